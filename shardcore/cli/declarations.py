"""Declarations of fields, from which options of commands are made: type, rules, placeholder and default."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, get_type_hints

from shardcore.core.validation import Rule, marks, type_hints


class Flat(tuple[str, ...]):
    """Mark of a field that holds a config, some of whose fields are options: Flat(("seed", "repeats"))."""


@dataclasses.dataclass(frozen=True)
class Field:
    """The declaration of a field.

    kind: its type, without marks.
    marks: rules, Flat, and a text: the placeholder of an option.
    default: MISSING if it is required.
    """

    name: str
    kind: Any
    marks: tuple[Any, ...]
    default: Any

    @property
    def rules(self) -> list[Rule]:
        return [mark for mark in self.marks if isinstance(mark, Rule)]

    @property
    def flat(self) -> Sequence[str]:
        """Fields of its config that are options."""
        return next((mark for mark in self.marks if isinstance(mark, Flat)), ())


@cache
def declarations_of(cls: type) -> Mapping[str, Field]:
    """The declarations of a dataclass's fields, by name."""
    plain, hints = type_hints(cls), get_type_hints(cls, include_extras=True)
    found = {}
    for f in dataclasses.fields(cls):
        default = f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
        found[f.name] = Field(f.name, plain[f.name], marks(hints[f.name]), default)
    return found


@cache
def options_of(cls: type) -> Mapping[str, Field]:
    """The declarations of a dataclass's options: fields, with those of configs in the place of these."""
    found: dict[str, Field] = {}
    for name, field in declarations_of(cls).items():
        for key in field.flat:
            found[key] = dataclasses.replace(
                declarations_of(field.kind)[key], default=getattr(field.default, key)
            )
        if not field.flat:
            found[name] = field
    return found


def config_from(cls: Any, values: Mapping[str, Any]) -> Any:
    """A dataclass's instance of values of its options (see `options_of`)."""
    own = dict(values)
    for name, field in declarations_of(cls).items():
        if field.flat:
            own[name] = dataclasses.replace(field.default, **{key: own.pop(key) for key in field.flat})
    return cls(**own)
