"""A machine that was slow for a while is told from groups that cost more."""

import dataclasses
import math

import numpy as np
import pytest
from laws import SETTING, cache_law, comm_samples, compute_samples, linear_law

from shardcore.core.errors import ShardCoreError
from shardcore.core.types import Setting
from shardcore.cost import accuracy
from shardcore.cost.drift_correction import (
    NEIGHBOURS,
    REACH_S,
    _median_of_neighbours,
    correct_drift,
    read_measurements,
    rescale_sample,
)
from shardcore.io import dataset
from shardcore.io.measurements import EmulatedLinks


def in_turn(samples, slowdown_of, seconds: float = 0.3):
    """The samples as measured one after the other, the clock showing slowdown_of(seconds) times what they
    cost."""
    return [
        slowed(dataclasses.replace(s, measured_at=1e9 + i * seconds), slowdown_of(i * seconds))
        for i, s in enumerate(samples)
    ]


def slowed(sample, by: float):
    forward, backward = (
        dataclasses.replace(x, **{k: getattr(x, k) * by for k in ("median_ms", "q1_ms", "q3_ms")})
        for x in (sample.forward, sample.backward)
    )
    return dataclasses.replace(sample, forward=forward, backward=backward)


def off(samples, truth) -> float:
    """Mean size of the logarithm of found over true ms, their median being the machine's usual speed."""
    ratio = np.log([s.total_ms / t.total_ms for s, t in zip(samples, truth, strict=True)])
    return float(np.abs(ratio - np.median(ratio)).mean())


@pytest.mark.parametrize("law", [linear_law, cache_law])
def test_slow_stretches_are_taken_out(law):
    truth = compute_samples(law, 600, noise=0.03)
    measured = in_turn(truth, lambda s: 1.3 if 40 < s < 80 else 1 + 0.1 * math.sin(s / 15))
    found = correct_drift(measured)
    assert off(found, truth) < 0.5 * off(measured, truth)
    assert [s.id for s in found] == [s.id for s in truth]
    slow, was = found[200], measured[200]
    by = was.forward.median_ms / slow.forward.median_ms
    assert slow.slowdown == pytest.approx(by * was.slowdown)
    assert [
        x for part in (slow.forward, slow.backward) for x in (part.median_ms, part.q1_ms, part.q3_ms)
    ] == pytest.approx(
        [x / by for part in (was.forward, was.backward) for x in (part.median_ms, part.q1_ms, part.q3_ms)]
    )
    assert 1.03 < slow.slowdown / found[20].slowdown < 1.5


def test_a_steady_machine_changes_next_to_nothing():
    truth = compute_samples(cache_law, 600, noise=0.03)
    assert off(correct_drift(in_turn(truth, lambda s: 1.0)), truth) < 0.01


def test_neighbours_are_near_in_time_and_others():
    """Half of NEIGHBOURS at least, of the nearest on each side, within REACH_S, none a timing of the same
    request."""
    n, at = NEIGHBOURS, np.arange(40.0)
    residual, trusted, ids = np.arange(40.0), np.ones(40, bool), [str(i) for i in range(40)]

    def median(i, at_s=at, trusted=trusted, ids=ids):
        return _median_of_neighbours(at_s, residual, trusted, ids)[i]

    assert (
        median(20) == 20
        and median(0) == np.median(range(1, n + 1))
        and median(5) == np.median([*range(5), *range(6, 6 + n)])
    )
    assert median(20, trusted=at > 20) == np.median(range(21, 22 + n))
    again = ["20" if 20 <= i < 30 else str(i) for i in range(40)]
    assert median(20, ids=again) == np.median([*range(20 - n, 20), *range(30, 21 + n)])
    assert (
        median(20, at_s=at * REACH_S / 3) == 20 and median(20, at_s=at * REACH_S / 2.9) == 0
    )  # six, or four


def test_samples_far_apart_or_all_of_one_time_stay_as_they_are():
    measured = in_turn(compute_samples(linear_law, 100, noise=0.1), lambda s: 1.0, seconds=REACH_S + 1)
    assert correct_drift(measured) == measured
    once = [dataclasses.replace(s, measured_at=1.0) for s in measured]
    assert correct_drift(once) == once


def test_a_group_that_costs_more_keeps_its_cost():
    measured = in_turn(compute_samples(linear_law, 300), lambda s: 1.0)
    measured[150] = slowed(measured[150], 3.0)
    assert correct_drift(measured)[150].total_ms == pytest.approx(measured[150].total_ms, rel=0.02)


def test_the_test_split_corrects_nobody():
    measured = in_turn(compute_samples(linear_law, 300, noise=0.05), lambda s: 1 + 0.2 * math.sin(s / 10))
    other = [slowed(s, 2.0) if accuracy.held_out_samples([s]) else s for s in measured]
    rest = [
        (a, b)
        for a, b in zip(correct_drift(measured), correct_drift(other), strict=True)
        if not accuracy.held_out_samples([a])
    ]
    assert all(a == b for a, b in rest)


def test_failures_and_few_samples_stay_as_they_are():
    samples = in_turn(compute_samples(linear_law, 30), lambda s: 1 + s)
    assert correct_drift(samples) == samples
    failed = [
        dataclasses.replace(s, id=f"{i}", forward=None, backward=None, error="out of memory")
        for i, s in enumerate(samples)
    ]
    assert [
        s
        for s in correct_drift([*in_turn(compute_samples(linear_law, 100), lambda s: 1.0), *failed])
        if s.error
    ] == failed


def test_the_samples_of_a_folder_are_read_each_once(tmp_path):
    samples = in_turn({s.id: s for s in compute_samples(linear_law, 60)}.values(), lambda s: 1.0)
    tables = list({t.name: t for s in samples for t in (x.table for x in s.request.shards)}.values())
    for part in (samples[:40], samples[30:]):
        dataset.write_compute_samples(tmp_path, part, dataset.write_pool(tmp_path, tables))
    known = read_measurements(tmp_path, SETTING)
    assert sorted({s.id for s in samples}) == [s.id for s in known.compute] and not known.comm
    assert known.repeats == []


def test_a_rescaled_sample_takes_so_many_times_as_long_in_each_direction():
    [sample] = compute_samples(linear_law, 1)
    found = rescale_sample(sample, 2.0, 0.5)
    assert found.forward.q3_ms == 2 * sample.forward.q3_ms and found.id == sample.id
    assert found.total_ms == 2 * sample.forward.median_ms + sample.backward.median_ms / 2


def test_exchanges_over_emulated_links_and_within_groups_are_left_out(tmp_path):
    real, *others = (
        comm_samples(10, ranks=(4,), hosts=2, **more)
        for more in ({}, {"emulated": EmulatedLinks(0.4)}, {"group": "cross"})
    )
    dataset.write_collective_samples(tmp_path, [s for some in (real, *others) for s in some])
    assert {s.id for s in read_measurements(tmp_path, SETTING).comm} == {s.id for s in real}


def test_a_folder_of_another_setting_is_named(tmp_path):
    samples = compute_samples(linear_law, 3)
    tables = list({t.name: t for s in samples for t in (x.table for x in s.request.shards)}.values())
    dataset.write_compute_samples(tmp_path, samples, dataset.write_pool(tmp_path, tables))
    with pytest.raises(
        ShardCoreError, match="holds samples of other settings than asked for: batch: 256 against 512$"
    ):
        read_measurements(tmp_path, Setting("law", 512))
