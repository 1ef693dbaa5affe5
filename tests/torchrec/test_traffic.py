"""Bytes that TorchRec sends in a step, counted in its processes, are those that we predict.

SHARDCORE_EXAMPLES=200 python -m pytest -n 0 -m long tests/torchrec/test_traffic.py -k drawn    so many drawn models
"""

import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("torchrec")
sys.path.append(str(Path(__file__).parent))

import counted_traffic as traffic
import drawn_collections

EXAMPLES = os.environ.get("SHARDCORE_EXAMPLES")


@pytest.mark.long
@pytest.mark.parametrize(
    "seed, kinds, processes",
    [(56, {"column", "row", "host_row", "data_parallel"}, 4), (48, {"column", "row", "data_parallel"}, 2)],
)
def test_every_collective_carries_the_bytes_expected(seed, kinds, processes):
    """On two hosts of two processes, with weights of lookups and sequences; and on two processes."""
    drawn = traffic.drawn(seed)
    assert {p.kind for p in drawn.plan.placements} == kinds and len(drawn.problem.topology) == processes
    assert max(t.features for t in drawn.problem.tables) > 1
    for special in ("weighted", "sequence"):
        assert any(getattr(t, special) for t in drawn.problem.tables) == (processes == 4)
    assert traffic.differences(seed) == []


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 9])
def test_payloads_with_scales_carry_the_bytes_expected(seed):
    model = drawn_collections.coded(seed)
    assert traffic.differences(seed, model) == []


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2])
def test_features_with_batches_of_their_own_carry_the_bytes_expected(seed):
    model = drawn_collections.variable(seed)
    assert traffic.differences(seed, model) == []


@pytest.mark.skipif(not EXAMPLES, reason="a minute each: SHARDCORE_EXAMPLES says how many")
@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(int(EXAMPLES or 0)))
@pytest.mark.parametrize("kind", ["drawn", "coded", "variable"])
def test_the_bytes_of_any_model_are_those_expected(kind, seed):
    """Drawn collections and plans, payloads with scales, and batches of features."""
    assert traffic.differences(seed, getattr(drawn_collections, kind)(seed), limit_s=800) == []
