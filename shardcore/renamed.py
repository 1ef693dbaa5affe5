"""Names that older files and commands use, and what they are called now."""

from __future__ import annotations

_SHARDERS = {"local": "anneal", "local_all": "anneal", "local_columns": "anneal_columns"}
_FIELDS = {"pace": "slowdown", "known_to": "relative_ci"}


def sharder(name: str) -> str:
    """Today's name of a sharder; one that was never renamed is returned as it is."""
    return _SHARDERS.get(name, name)


def field(name: str) -> str:
    """Today's name of a column or entry of a measurement."""
    return _FIELDS.get(name, name)
