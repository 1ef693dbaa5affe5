"""Which tables are kept for testing."""

from __future__ import annotations

import hashlib

from shardcore.types import Table


def kept_for_testing(table: Table) -> bool:
    """Whether a table is kept for testing: a twentieth of any pool, by name only.

    Users bring tables that nobody measured. So studies (cost/study.py) train without these tables and judge
    on groups of these only.
    """
    return int(hashlib.sha256(table.name.encode()).hexdigest(), 16) % 20 == 0
