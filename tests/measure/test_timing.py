import math

import numpy as np
import pytest

from shardcore.measure import devices, timing


def test_a_median_is_known_better_with_more_and_steadier_repeats():
    rng = np.random.default_rng(0)
    assert timing.relative_ci([1.0] * 5) == float("inf")
    assert timing.relative_ci([1.0] * 6) == 0
    few, many = rng.normal(10, 1, 10), rng.normal(10, 1, 1000)
    assert timing.relative_ci(many) < timing.relative_ci(few)


@pytest.mark.parametrize("n, low, high", [(6, 1, 6), (8, 1, 8), (15, 4, 12), (40, 14, 27)])
def test_the_interval_is_between_order_statistics_that_hold_the_median_as_often_as_it_says(n, low, high):
    """The values are 1 to n, so the interval is `low` to `high`, and the median the larger of the middle ones."""
    rng = np.random.default_rng(1)
    assert timing.relative_ci(rng.permutation(n) + 1.0) == pytest.approx((high - low) / 2 / (n // 2 + 1))
    draws = np.sort(rng.lognormal(0, 0.5, (1000, n)), axis=1)
    assert 940 <= ((draws[:, low - 1] <= 1) & (1 <= draws[:, high - 1])).sum() <= 998


def test_spread_is_quartiles():
    assert timing.timing_spread([3.0, 1.0, 2.0, 5.0, 4.0]) == timing.TimingSpread(3.0, 2.0, 4.0, 5)


@pytest.fixture
def rng():
    return np.random.default_rng(3)


def wandering(rng, ops, runs, noise=0.02):
    """Runs of ops in turn on a machine whose slowdown wanders between 0.7 and 1.6: (op, ms), and the
    slowdowns."""
    levels = {k: float(10 ** rng.uniform(-0.5, 1.5)) for k in range(ops)}
    slowdown = np.exp(np.convolve(rng.normal(0, 0.1, runs + 50), np.ones(50) / 7, "valid")[:runs])
    order = np.concatenate([rng.permutation(ops) for _ in range(runs // ops + 1)])[:runs]
    return (
        levels,
        [
            (int(k), levels[k] * p * math.exp(rng.normal(0, noise)))
            for k, p in zip(order, slowdown, strict=True)
        ],
        slowdown,
    )


def test_the_slowdown_is_told_from_neighbouring_runs(rng):
    levels, runs, slowdown = wandering(rng, 10, 600)
    log = timing.SlowdownLog({0: math.log(levels[0])})
    numbers = [log.add_timing(op, ms) for op, ms in runs]
    found = log.fit_slowdown()
    raw, mended = [], []
    for op, level in levels.items():
        mine = [(n, ms) for n, (k, ms) in zip(numbers, runs, strict=True) if k == op]
        raw.append(abs(np.median([ms for _, ms in mine[:8]]) / level - 1))
        mended.append(abs(np.median([ms / found(n) for n, ms in mine[:8]]) / level - 1))
    assert np.median(mended) < 0.5 * np.median(raw)
    assert np.corrcoef([found(n) for n in numbers], slowdown)[0, 1] > 0.95


def test_an_op_with_a_known_level_ties_the_slowdown():
    """The op takes 3 ms instead of 2, so the slowdown is 1.5, whatever other ops take."""
    for anchors, slowdown in (({0: math.log(2.0)}, 1.5), ({}, 1.0), ({"another": 0.0}, 1.0)):
        log = timing.SlowdownLog(anchors)
        assert [log.add_timing(k % 3, 3.0 * (1 + k % 3)) for k in range(60)] == list(range(60))
        assert [log.fit_slowdown()(n) for n in range(60)] == pytest.approx([slowdown] * 60)


def test_a_run_is_never_corrected_by_itself():
    log = timing.SlowdownLog()
    for k in range(90):
        log.add_timing(k % 3, 1.25 if k == 45 else 1.0)
    assert log.fit_slowdown()(45) == pytest.approx(1.0, abs=0.01)


def test_on_a_quiet_machine_nothing_is_corrected(rng):
    log = timing.SlowdownLog()
    numbers = [log.add_timing(k % 7, (1 + k % 7) * math.exp(rng.normal(0, 0.01))) for k in range(400)]
    found = log.fit_slowdown()
    assert max(abs(found(n) - 1) for n in numbers) < 0.01


def test_runs_no_longer_kept_are_refused():
    log = timing.SlowdownLog(kept=10)
    for _ in range(12):
        last = log.add_timing("op", 1.0)
    found = log.fit_slowdown()
    assert found(last) == found(2) == pytest.approx(1.0)
    with pytest.raises(KeyError):
        found(1)


def test_a_clock_gives_the_ms_between_marks():
    assert devices.Cpu().elapsed_ms([1.0, 1.5, 1.75]) == [500.0, 250.0]
    assert (
        type(devices.device_by_name("cpu")) is devices.Cpu
        and type(devices.device_by_name("cuda")) is devices.Cuda
    )
