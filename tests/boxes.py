"""Check that this machine can emulate hosts (measure/hosts.py), and the mark of tests that need it."""

from functools import cache

import pytest

from shardcore.core.errors import ShardCoreError
from shardcore.measure.hosts import Box, box_of


@cache
def can_box() -> bool:
    try:
        with box_of(Box()):
            return True
    except ShardCoreError:
        return False


boxed = pytest.mark.skipif(not can_box(), reason="needs root, and Linux' ip, tc and tbf (measure/hosts.py)")
