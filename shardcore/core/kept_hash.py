"""Hashes of nouns that are keys of many caches."""

from __future__ import annotations

from dataclasses import fields
from functools import cached_property
from typing import Any


class CachedHash:
    """Mixin for frozen dataclasses that computes the hash once.

    The dataclass names it, `__hash__ = KeptHash.__hash__`, as it would make its own otherwise.
    """

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, f.name) for f in fields(self)))  # pyright: ignore[reportArgumentType]

    def __hash__(self) -> int:
        return self._hash

    def __getstate__(self) -> dict[str, Any]:  # it is not kept across processes, where strings hash otherwise
        return {name: value for name, value in self.__dict__.items() if name != "_hash"}
