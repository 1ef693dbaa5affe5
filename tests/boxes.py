"""Check that this machine can emulate hosts (bench/hosts.py), and the mark of tests that need it."""

from functools import cache

import pytest

from bench.hosts import Box, emulated_hosts
from shardcore.core.errors import ShardCoreError


@cache
def can_box() -> bool:
    try:
        with emulated_hosts(Box()):
            return True
    except ShardCoreError:
        return False


boxed = pytest.mark.skipif(not can_box(), reason="needs root, and Linux' ip, tc and tbf (bench/hosts.py)")
