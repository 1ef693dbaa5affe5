"""Tables that are kept for testing."""

from __future__ import annotations

import hashlib

from shardcore.core.types import Table


def kept_for_testing(table: Table, one_of: int = 20) -> bool:
    """Tell if a table is kept for testing: one of twenty of any pool, or of `one_of`, chosen by name only.

    Users bring tables that nobody measured. So studies (cost/study.py) train without these tables, and judge
    models on groups of these only.
    """
    # A hash, so that the choice does not depend on the pool or its order.
    return int(hashlib.sha256(table.name.encode()).hexdigest(), 16) % one_of == 0
