"""Tables that are held out for testing."""

from __future__ import annotations

import hashlib

from shardcore.core.types import Table


def is_held_out(table: Table, one_of: int = 20) -> bool:
    """Tell if a table is held out for testing: one in `one_of`, chosen by a hash of its name.

    Users bring tables that nobody measured. So studies (cost/study.py) train without these tables, and judge models
    only on groups of them.
    """
    # A hash, so that the choice depends on neither the pool nor its order.
    return int(hashlib.sha256(table.name.encode()).hexdigest(), 16) % one_of == 0
