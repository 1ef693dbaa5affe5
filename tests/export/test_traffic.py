"""What TorchRec sends in a step, counted in its processes, is what we say it sends."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("torchrec")
sys.path.append(str(Path(__file__).parent))

from bench import traffic  # noqa: E402


@pytest.mark.parametrize("seed, kinds", [
    (9, {"column", "row", "host_row", "data_parallel"}),
    (14, {"column", "row", "data_parallel"}),
])
def test_every_collective_carries_the_bytes_expected(seed, kinds):
    """On two hosts of two processes, and on two processes."""
    assert {p.kind for p in traffic.drawn(seed).plan.placements} == kinds
    assert traffic.differences(seed) == []
