"""Splits and metrics on samples."""

import pytest
from laws import cache_law, compute_samples, linear_law

from shardcore.cost import accuracy


def test_split_is_by_id_alone():
    sides = [accuracy.split_of(f"{i:016x}") for i in range(5000)]
    assert {s: round(sides.count(s) / 5000, 1) for s in set(sides)} == {"train": 0.8, "validation": 0.1, "test": 0.1}
    samples = compute_samples(linear_law, 60)
    few, many = ({s.id for s in accuracy.held_out(x)} for x in (samples[:30], samples))
    assert few <= many


def test_predict_is_forward_and_backward_together(model):
    samples = compute_samples(cache_law, 5)
    truth = [sum(cache_law(s.request.shards, s.request.batch)) for s in samples]
    assert accuracy.predict(model, samples) == pytest.approx(truth, rel=0.25)
    assert accuracy.predict(model, []).shape == (0,)
