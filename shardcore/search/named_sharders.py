"""Sharders by name, with an error for an unknown name that says which there are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from shardcore.core.validation import require_type


class NamedSharders(dict[str, Any]):
    """A dict of sharders that finds other names by a function.

    find: gives the sharder of a name, or raises ShardCoreError for one that is not known.
    """

    def __init__(self, sharders: Mapping[str, Any], find: Callable[[str], Any]):
        super().__init__(sharders)
        self._find = find

    def __missing__(self, name: str) -> Any:
        require_type(name, str, "algorithm", "a name of a sharder")
        return self._find(name)
