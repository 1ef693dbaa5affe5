"""Fits of profiles to timings, their files, and profiles from data sheets."""

import csv
import dataclasses

import numpy as np
import pytest

from shardcore.core.access_statistics import Zipf
from shardcore.core.errors import ShardCoreError
from shardcore.core.types import Shard, Table
from shardcore.cost.profile import SPEC, load_profile
from shardcore.cost.profile_fit import (
    Predictor,
    Timing,
    fit_profile,
    read_timings,
    scale_profile,
    timings_of_card,
)

H100 = load_profile("nvidia-h100-sxm")


def shards_of(width: int) -> tuple[Shard, ...]:
    return tuple(Shard.whole(Table(f"t{i}", 1_000_000, width, 10.0, Zipf(0.0))) for i in range(4))


OP = Timing("s", "", "fwd", 1.0, shards=shards_of(64), batch=65_536)
EXCHANGE = Timing("s", "", "alltoall", 1.0, sent=(1 << 28,) * 8, hosts=1)


def timed(timings, profile, noise=0.0):
    """The timings as a card of this profile would take."""
    rng = np.random.default_rng(0)
    times = Predictor(timings).times_us(profile.rate_values) * np.exp(
        noise * rng.standard_normal(len(timings))
    )
    return [dataclasses.replace(t, time_us=float(us)) for t, us in zip(timings, times, strict=True)]


OPS = [
    dataclasses.replace(OP, op=op, batch=batch, shards=shards_of(width), source=f"s{batch}")
    for op in ("fwd", "bwd")
    for batch in (4096, 65_536, 1 << 19)
    for width in (16, 64, 256)
]
EXCHANGES = [
    dataclasses.replace(EXCHANGE, op=op, sent=(n,) * 8)
    for op in ("alltoall", "allgather", "reducescatter", "allreduce")
    for n in (1 << 10, 1 << 20, 1 << 30)
]


@pytest.mark.parametrize("timings", [OPS, EXCHANGES])
def test_a_fit_finds_a_card_that_is_not_the_one_it_starts_from(timings):
    other = scale_profile(H100, "other", hbm_gbps=1500.0, nvlink_gbps=350.0, sm_ghz=150.0)
    own = timed(timings, other, 0.02)
    start = scale_profile(H100, "start")
    found = fit_profile(own, start)
    measured = np.array([t.time_us for t in own])
    before, after = (
        abs(Predictor(own).times_us(p.rate_values) / measured - 1).mean() for p in (start, found)
    )
    assert after < 0.05 and before > 1.5 * after


def test_rates_that_no_timing_depends_on_stay():
    found = fit_profile(timed(OPS, H100), H100)
    for name in ("all_to_all_within_host_gbps", "host_read_gbps", "hbm_gbps", "exchange_factor"):
        assert found.rates[name] == H100.rates[name]
    assert "fitted to s" in found.rates["read_gbps"].source
    assert found.rates["read_gbps"].uncertainty <= H100.rates["read_gbps"].uncertainty


def test_one_wrong_timing_does_not_decide():
    wrong = timed(OPS, H100)
    wrong[0] = dataclasses.replace(wrong[0], time_us=10 * wrong[0].time_us)
    values = fit_profile(wrong, H100).rate_values
    others = Predictor(wrong[1:]).times_us(values) / [t.time_us for t in wrong[1:]]
    assert abs(others - 1).mean() < 0.05


def test_what_a_law_leaves_unexplained_is_the_factors_uncertainty():
    quiet, noisy = (fit_profile(timed(OPS, H100, noise), H100) for noise in (0.0, 0.3))
    assert quiet.rates["compute_factor"].uncertainty == pytest.approx(0.1)
    assert noisy.rates["compute_factor"].uncertainty > 0.15


def test_no_gather_beats_memory():
    fast = [dataclasses.replace(t, time_us=t.time_us / 20) for t in timed(OPS, H100)]
    assert (
        fit_profile(fast, scale_profile(H100, "fast")).rate_values["read_gbps"] < H100.rate_values["hbm_gbps"]
    )


def test_a_network_is_as_fast_as_its_data_sheet_only_where_that_is_its():
    n = (1 << 30,) * 16
    far = [
        dataclasses.replace(EXCHANGE, op=op, sent=n, hosts=2, time_us=us / 2)
        for op in ("allgather", "alltoall")
        for us in Predictor([dataclasses.replace(EXCHANGE, op=op, sent=n, hosts=2)]).times_us(
            H100.rate_values
        )
    ]
    start = scale_profile(H100, "fast")
    of_sheet, own = fit_profile(far, start, of_network=0.97).rate_values, fit_profile(far, start).rate_values
    for name in ("all_gather_between_hosts_gbps", "all_to_all_between_hosts_gbps"):
        assert of_sheet[name] <= max(0.971 * H100.rate_values["network_gbps"], 1.02 * H100.rate_values[name])
        assert own[name] > H100.rate_values["network_gbps"]


def test_a_data_sheet_scales_what_follows_from_it():
    twice = scale_profile(
        H100, "twice", hbm_gbps=6700.0, nvlink_gbps=900.0, pcie_gbps=128.0, memory_bytes=1e11
    )
    values, own = twice.rate_values, H100.rate_values
    assert own["read_gbps"] < values["read_gbps"] < 2 * own["read_gbps"]  # multiprocessors are the same
    for name in ("dense_gbps", "all_to_all_within_host_gbps", "host_read_gbps"):
        assert values[name] == pytest.approx(2 * own[name])
    for name in ("forward_op_us", "sort_lookup_ns", "all_to_all_between_hosts_gbps"):
        assert values[name] == own[name]
    # Dense parts wait for memory and for matrix units, and reach 45% of these at most.
    assert values["dense_tflops"] == pytest.approx(0.45 * own["peak_tflops"])
    slower = scale_profile(H100, "slower", hbm_gbps=1675.0).rate_values
    assert slower["dense_tflops"] == pytest.approx(0.5**0.5 * own["dense_tflops"])
    faster = scale_profile(H100, "faster", hbm_gbps=6700.0, peak_tflops=2 * 989.0)
    assert faster.rate_values["dense_tflops"] == pytest.approx(2 * own["dense_tflops"])
    assert faster.rates["dense_tflops"].source.endswith("by hbm_gbps and peak_tflops")
    assert twice.memory_bytes == 10**11 and twice.rates["hbm_gbps"].source == "data sheet of twice"
    assert "scaled from nvidia-h100-sxm by hbm_gbps" in twice.rates["read_gbps"].source
    for name, rate in twice.rates.items():
        assert name in SPEC or rate.uncertainty > H100.rates[name].uncertainty


@pytest.mark.parametrize(
    "spec, words",
    [
        ({"hbm": 5.0}, "a data sheet has 'hbm'; known are hbm_gbps"),
        ({"hbm_gbps": 0.0}, "a data sheet has hbm_gbps 0.0; it needs to be above 0"),
        ({"hbm_gbps": float("inf")}, "above 0"),
        ({"memory_bytes": -1.0}, "above 0"),
    ],
)
def test_bad_data_sheets_are_refused(spec, words):
    with pytest.raises(ShardCoreError, match=words):
        scale_profile(H100, "own", **spec)


# --- files --------------------------------------------------------------------------------------------------

OP_ROW = {"op": "bwd", "time_us": "612.5", "B": "1024", "T": "2", "E": "1000,50", "D": "2x64", "L": "10"}
EXCHANGE_ROW = {"op": "alltoall", "time_us": "30", "ranks": "16", "hosts": "2", "msg_bytes_per_rank": "1024"}


def written(tmp_path, *rows):
    path = tmp_path / "timings.csv"
    columns = list(dict.fromkeys(key for row in rows for key in row))
    with open(path, "w") as f:
        writer = csv.DictWriter(f, columns, restval="")
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_files_of_timings_are_read(tmp_path):
    more = {
        "optimizer": "adam",
        "weights_precision": "fp16",
        "gpu": "H100",
        "index_distribution": "zipf alpha 1.15",
    }
    timings, reasons = read_timings(written(tmp_path, {**OP_ROW, **more}, EXCHANGE_ROW))
    op, exchange = timings
    tables = [Table(f"t{i}", rows, 64, 10.0, Zipf(1.15), "fp16") for i, rows in enumerate((1000, 50))]
    assert op.shards == tuple(map(Shard.whole, tables)) and op.optimizer == "adam"
    assert (exchange.sent, exchange.hosts) == ((1024.0,) * 16, 2)
    assert not reasons and (Predictor(timings).times_us(H100.rate_values) > 0).all()
    assert timings_of_card(timings, H100) == timings
    assert timings_of_card(timings, load_profile("nvidia-v100")) == [exchange]  # it names no card


@pytest.mark.parametrize(
    "change, why",
    [
        ({"op": "gather"}, "op 'gather' is not one"),
        ({"time_us": ""}, "time_us is not stated"),
        ({"E": ""}, "E is not stated"),
        ({"E": "see commit"}, "not stated one by one"),
        ({"D": "1,2,3"}, "not stated one by one"),
        ({"D": ",".join(["9999x1"] * 18_000)}, "not stated one by one"),  # 180 million numbers
        ({"D": "6"}, "no multiple of 4"),
        ({"D": "64.5"}, "no multiple of 4"),
        ({"weights_precision": "fp8"}, "weights are 'fp8'"),
        ({"optimizer": "magic"}, "optimizer 'magic'"),
        ({"mode": "uvm_caching"}, "share of rows that its cache holds"),
    ],
)
def test_rows_that_cannot_be_used_leave_with_a_reason(tmp_path, change, why):
    timings, reasons = read_timings(written(tmp_path, OP_ROW, {**OP_ROW, **change}))
    assert len(timings) == 1 and len(reasons) == 1 and why in next(iter(reasons))


@pytest.mark.parametrize(
    "rows, words",
    [
        ([{"op": "fwd"}], "lacks the column 'time_us'"),
        ([{"time_us": "1"}], "lacks the column 'op'"),
        ([{k: v for k, v in OP_ROW.items() if k != "D"}], "has 'bwd' timings and lacks the column 'D'"),
        ([{k: v for k, v in EXCHANGE_ROW.items() if k != "hosts"}], "lacks the column 'hosts'"),
        ([{**OP_ROW, "time_us": "fast"}], "line 2 has time_us 'fast'; it needs a number"),
        ([{**OP_ROW, "time_us": "0"}], "line 2 has time_us 0; it needs to be above 0"),
        ([{**OP_ROW, "B": "nan"}], "B"),
        ([{**OP_ROW, "B": "0"}], "line 2 has B '0'; it needs a number from 1 to "),
        ([{**OP_ROW, "T": "0"}], "line 2 has T '0'; it needs a number from 1 to 4,096"),
        ([{**OP_ROW, "T": "1e9"}], "line 2 has T '1e9'; it needs a number from 1 to 4,096"),
        ([{**EXCHANGE_ROW, "ranks": "1e9"}], "line 2 has ranks '1e9'; it needs a number from 1 to 65,536"),
        ([{**EXCHANGE_ROW, "hosts": "0"}], "line 2 has hosts '0'; it needs a number from 1 to 65,536"),
        ([{**EXCHANGE_ROW, "hosts": "3"}], "16 ranks on 3 hosts"),
    ],
)
def test_bad_files_are_refused_in_one_line(tmp_path, rows, words):
    if words == "B":
        assert not read_timings(written(tmp_path, *rows))[0]
        return
    with pytest.raises(ShardCoreError, match=words) as error:
        read_timings(written(tmp_path, *rows))
    assert "timings.csv" in str(error.value) and "\n" not in str(error.value)


def test_nothing_cannot_be_fitted(tmp_path):
    with pytest.raises(ShardCoreError, match="profile 'nvidia-h100-sxm' has no timings"):
        fit_profile([], H100)
    (tmp_path / "empty.csv").write_text("op,time_us\n")
    with pytest.raises(ShardCoreError, match="has no rows"):
        read_timings(tmp_path / "empty.csv")
