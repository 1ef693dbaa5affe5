"""Measured samples as timings of a profile."""

import dataclasses

import numpy as np
import pytest
from laws import pool

from shardcore.cli import main
from shardcore.core.types import Setting
from shardcore.cost.metrics import mape
from shardcore.cost.profile import load_profile
from shardcore.cost.profile_fit import Predictor
from shardcore.cost.profile_samples import check_profile, sample_timings
from shardcore.io import dataset
from shardcore.io.measurements import CollectiveRequest, CollectiveSample, ComputeSample, TimingSpread
from shardcore.measure.sampling.groups import GroupConfig, draw_compute_request

CARD = load_profile("nvidia-h100-sxm")
TRUTH = CARD.with_values(
    CARD.rate_values | {"read_gbps": 900.0, "forward_op_us": 80.0, "all_to_all_within_host_gbps": 200.0}
)
SETTING = Setting("nvidia-h100-80gb-hbm3", 65536)


def took(ms):
    return TimingSpread(ms, ms, ms, 9)


@pytest.fixture(scope="module")
def samples():
    """Groups and exchanges, as a card takes them that differs from its profile."""
    config = GroupConfig(max_shards=4, sequences=0.0, planned=0.0)
    requests = [draw_compute_request(pool(), i, SETTING, config=config) for i in range(80)]
    empty = [ComputeSample(str(i), SETTING, r, took(1.0), took(1.0), 1.0) for i, r in enumerate(requests)]
    exchanges = [
        CollectiveSample(
            f"e{i}", SETTING, CollectiveRequest((64 + 4 * i, 4 * i), 65536, (0.0, 0.0)),
            (took(1.0),) * 2, (took(1.0),) * 2, (0.0, 0.0), 1.0,
        )
        for i in range(40)
    ]  # fmt: skip
    ms = (Predictor(sample_timings(empty, exchanges)).times_us(TRUTH.rate_values) / 1e3).tolist()
    compute = [
        dataclasses.replace(s, id=dataset.compute_id(SETTING, s.request), forward=took(f), backward=took(b))
        for s, f, b in zip(empty, ms[0:160:2], ms[1:160:2], strict=True)
    ]
    comm = [
        dataclasses.replace(
            s, id=dataset.collective_id(SETTING, s.request), forward=(took(f),) * 2, backward=(took(b),) * 2
        )
        for s, f, b in zip(exchanges, ms[160::2], ms[161::2], strict=True)
    ]
    return compute, comm


def test_a_profile_is_checked_by_kind_of_op_and_collective(samples):
    timings = sample_timings(*samples)
    assert len(timings) == 2 * 80 + 2 * 40
    found = {check.kind: check for check in check_profile(CARD, timings)}
    kinds = [
        f"fp32 exact_sgd {direction}, {w} groups"
        for direction in ("backward", "forward")
        for w in ("mixed", "narrow", "wide")
    ]
    assert set(found) == {*kinds, "all-to-all of 2 on 1 hosts"}
    assert sum(check.n for check in found.values()) == len(timings)
    slower = found["all-to-all of 2 on 1 hosts"]
    assert 1.1 < slower.low <= slower.ratio <= slower.high < 2 and "times the prediction" in str(slower)
    assert found[kinds[3]].ratio > 1.05 > found[kinds[0]].ratio
    assert all(check.error < 1e-9 for check in check_profile(TRUTH, timings))
    assert check_profile(CARD, []) == []


def test_what_has_no_time_or_no_law_is_left_out(samples):
    compute, comm = samples
    failed = dataclasses.replace(compute[0], forward=None, backward=None, error="out of memory")
    ids = dataclasses.replace(
        comm[0], request=dataclasses.replace(comm[0].request, collective="all_to_all_ids"), backward=None
    )
    cast = dataclasses.replace(comm[0], request=dataclasses.replace(comm[0].request, payload="bf16"))
    assert sample_timings([failed], [ids, cast]) == []


def test_a_profile_is_fitted_to_a_dataset_and_judged_on_its_test_split(
    samples, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    compute, comm = samples
    dataset.write_compute_samples("data", compute, dataset.write_pool("data", pool()))
    dataset.write_collective_samples("data", comm)
    assert main("profile fit data --from nvidia-h100-sxm --out mine.json".split()) == 0
    out = capsys.readouterr().out
    assert "kept to judge the fit" in out and "all-to-all of 2 on 1 hosts: mean error" in out
    fitted, timings = load_profile("mine.json"), sample_timings(compute, comm)
    measured = np.array([t.time_us for t in timings])
    errors = [mape(Predictor(timings).times_us(p.rate_values), measured) for p in (CARD, fitted)]
    assert errors[1] < 3 < errors[0]
    assert fitted.rates["forward_op_us"].source == "fitted to groups measured on nvidia-h100-80gb-hbm3"
    assert fitted.rates["host_read_gbps"] == CARD.rates["host_read_gbps"]


@pytest.mark.parametrize(
    "arguments, words",
    [
        ("data --from cpu", "data has samples of nvidia-h100-80gb-hbm3; profile 'cpu' is of another card"),
        ("empty --from cpu", "empty has no timing that profile 'cpu' can be fitted to"),
    ],
)
def test_datasets_of_other_cards_and_empty_ones_are_refused(
    samples, tmp_path, monkeypatch, capsys, arguments, words
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    dataset.write_compute_samples("data", samples[0][:2], dataset.write_pool("data", pool()))
    assert main(f"profile fit {arguments} --out mine.json".split()) == 1
    assert words in capsys.readouterr().err and not (tmp_path / "mine.json").exists()
