"""One table of refusals for each record: by field, the values that are refused by the field's name and theirs."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from shardcore.core.errors import ShardCoreError

NAN, INF = float("nan"), float("inf")
Bad = Mapping[str, Sequence[Any]]


def rows(tables: Mapping[Callable[..., Any], Bad]) -> list[Any]:
    """Parameters (make, field, value) of a test, from the tables of some records."""
    return [
        pytest.param(make, field, value, id=f"{make.__name__}-{field}-{str(value)[:12]}")
        for make, bad in tables.items()
        for field, values in bad.items()
        for value in values
    ]


def refused(make: Callable[..., Any], **fields: Any) -> str:
    """The refusal of a record with these fields."""
    with pytest.raises(ShardCoreError) as error:
        make(**fields)
    return str(error.value)


def names(message: str, field: str, value: Any) -> bool:
    """Tell if a refusal names a field and its value. Long values are shown cut."""
    return f"{field} {value!r}"[:40] in message
