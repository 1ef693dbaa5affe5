"""Studies: repeatability, unseen tables, learning curves."""

import dataclasses

import numpy as np
import pytest
from laws import SETTING, cache_law, compute_samples, linear_law

from shardcore import tables
from shardcore.cost import fit, study

QUICK = fit.FitConfig(epochs=4)


def test_repeatability_is_the_error_of_one_timing():
    rng, samples = np.random.default_rng(0), compute_samples(linear_law, 300)

    def timed(sample, known_to=0.05):
        by = np.exp(0.05 * rng.normal())
        spreads = {k: dataclasses.replace(getattr(sample, k), median_ms=getattr(sample, k).median_ms * by)
                   for k in ("forward", "backward")}
        return dataclasses.replace(sample, known_to=known_to, **spreads)

    repeats = [[timed(s) for _ in range(3)] for s in samples]
    control = [[timed(samples[0]) for _ in range(50)]]
    assert study.repeatability([*control, *repeats]) == pytest.approx(100 * 0.05 * np.sqrt(2 / np.pi), rel=0.15)
    assert study.repeatability(control) is None and study.repeatability([]) is None
    assert study.repeatability([g[:2] for g in repeats]) > 2


def test_unseen_tables_are_judged_by_a_model_that_never_saw_them():
    compute = compute_samples(cache_law, 400)
    pool = {x.table for s in compute for x in s.request.shards}
    assert any(tables.kept_for_testing(t) for t in pool), "the pool of these tests holds a table kept for testing"
    alone = [s for s in compute if all(tables.kept_for_testing(x.table) for x in s.request.shards)]
    found = study.unseen_tables(compute, SETTING, QUICK)
    assert alone and 0 < found < 60
    wrong = [dataclasses.replace(s, forward=s.backward, backward=s.forward) if s in alone else s for s in compute]
    assert study.unseen_tables(wrong, SETTING, QUICK) == pytest.approx(found)  # of forward + backward, which stay the same
    assert study.unseen_tables([s for s in compute if s not in alone], SETTING, QUICK) is None


def test_a_learning_curve_falls_to_its_constant():
    seen = []
    curve = study.learning_curve(compute_samples(cache_law, 900, noise=0.1), SETTING, fit.FitConfig(epochs=15),
                                 lambda *row: seen.append(row))
    assert [n for n, _ in curve.rows] == [r[1] for r in seen] == sorted(n for n, _ in curve.rows) and len(seen) >= 3
    assert curve.rows[-1][1] < curve.rows[0][1]
    assert curve.constant >= 0 and curve.at(1e9) == pytest.approx(curve.constant, abs=2) and curve.gain >= 0
    assert curve.at(curve.rows[-1][0]) == pytest.approx(curve.rows[-1][1], rel=0.3)


def test_too_few_samples_give_no_curve():
    assert study.learning_curve(compute_samples(cache_law, 150), SETTING, QUICK) is None
