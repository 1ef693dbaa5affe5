import math

import numpy as np
import pytest

from shardcore.measure import timing


def test_a_median_is_known_better_with_more_and_steadier_repeats():
    rng = np.random.default_rng(0)
    assert timing.known_to([1.0] * 5) == float("inf")
    assert timing.known_to([1.0] * 6) == 0
    few, many = rng.normal(10, 1, 10), rng.normal(10, 1, 1000)
    assert timing.known_to(many) < timing.known_to(few)


def test_the_interval_holds_the_true_median_as_often_as_it_says():
    rng = np.random.default_rng(1)
    for n in (8, 15, 40):
        hits = 0
        for _ in range(1000):
            values = np.sort(rng.lognormal(0, 0.5, n))
            reach = 0.98 * np.sqrt(n)
            low, high = int(max(0, np.floor((n - 1) / 2 - reach))), int(min(n - 1, np.ceil((n - 1) / 2 + reach)))
            hits += values[low] <= 1 <= values[high]
            assert timing.known_to(values) == (values[high] - values[low]) / 2 / values[n // 2]
        assert hits >= 940


def test_spread_is_quartiles():
    assert timing.spread([3.0, 1.0, 2.0, 5.0, 4.0]) == timing.Spread(3.0, 2.0, 4.0, 5)


@pytest.fixture
def rng():
    return np.random.default_rng(3)


def wandering(rng, ops, runs, noise=0.02):
    """Runs of ops in turn on a machine whose pace wanders between 0.7 and 1.6: (op, ms), and the paces."""
    levels = {k: float(10 ** rng.uniform(-0.5, 1.5)) for k in range(ops)}
    pace = np.exp(np.convolve(rng.normal(0, 0.1, runs + 50), np.ones(50) / 7, "valid")[:runs])
    order = np.concatenate([rng.permutation(ops) for _ in range(runs // ops + 1)])[:runs]
    return levels, [(int(k), levels[k] * p * math.exp(rng.normal(0, noise))) for k, p in zip(order, pace, strict=True)], pace


def test_the_pace_is_told_from_neighbouring_runs(rng):
    levels, runs, pace = wandering(rng, 10, 600)
    log = timing.PaceLog({0: math.log(levels[0])})
    numbers = [log.add(op, ms) for op, ms in runs]
    found = log.fit()
    raw, mended = [], []
    for op, level in levels.items():
        mine = [(n, ms) for n, (k, ms) in zip(numbers, runs, strict=True) if k == op]
        raw.append(abs(np.median([ms for _, ms in mine[:8]]) / level - 1))
        mended.append(abs(np.median([ms / found(n) for n, ms in mine[:8]]) / level - 1))
    assert np.median(mended) < 0.5 * np.median(raw)
    assert np.corrcoef([found(n) for n in numbers], pace)[0, 1] > 0.95


def test_on_a_quiet_machine_nothing_is_corrected(rng):
    log = timing.PaceLog()
    numbers = [log.add(k % 7, (1 + k % 7) * math.exp(rng.normal(0, 0.01))) for k in range(400)]
    found = log.fit()
    assert max(abs(found(n) - 1) for n in numbers) < 0.01


def test_runs_no_longer_kept_are_refused():
    log = timing.PaceLog(kept=10)
    for _ in range(12):
        last = log.add("op", 1.0)
    assert log.fit()(last) == pytest.approx(1.0)
    with pytest.raises(KeyError):
        log.fit()(1)
