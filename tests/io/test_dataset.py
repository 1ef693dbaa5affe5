import dataclasses
import hashlib
import os
import subprocess
import sys
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shardcore.core.errors import ShardCoreError
from shardcore.core.types import Setting, Shard
from shardcore.io import dataset, dataset_parts
from shardcore.io.measurements import (
    CollectiveRequest,
    CollectiveSample,
    ComputeRequest,
    ComputeSample,
    EmulatedLinks,
    TimingSpread,
)
from shardcore.measure.sampling.collectives import draw_collective_request
from shardcore.measure.sampling.groups import draw_compute_request
from shardcore.step.collectives import COLLECTIVES

SETTING = Setting("cpu-test", 256)
SPREAD = TimingSpread(1.0, 0.9, 1.1, 7)


def compute_sample(tables, i, error=None, at=1.0):
    request = draw_compute_request(tables, i, SETTING)
    timing = None if error else SPREAD
    return ComputeSample(dataset.compute_id(SETTING, request), SETTING, request, timing, timing, at, error)


def comm_sample(i):
    request = draw_collective_request(i, 2, 256)
    timed = (
        (SPREAD,) * 2 if direction in COLLECTIVES[request.collective].directions else None
        for direction in ("forward", "backward")
    )
    return CollectiveSample(
        dataset.collective_id(SETTING, request),
        SETTING,
        request,
        *timed,
        (0.0, 1.5),
        time.time(),
        None,
        order=i,
        oversubscribed=i == 1,
    )


def test_parts_round_trip_merge_and_count_once(tables, tmp_path):
    pool = dataset.write_pool(tmp_path, tables)
    samples = [compute_sample(tables, i) for i in range(6)]
    dataset.write_compute_samples(tmp_path, samples[:4], pool)
    dataset.write_compute_samples(tmp_path, samples[2:], pool)
    comm = [comm_sample(i) for i in range(120)]
    assert len({(s.request.collective, s.request.payload) for s in comm}) == 9
    dataset.write_collective_samples(tmp_path, comm)
    assert dataset.read_compute_samples(tmp_path) == sorted(samples, key=lambda s: s.id)
    dataset.merge_parts(tmp_path)
    assert len(list(tmp_path.glob("compute-*.parquet"))) == 1
    assert dataset.read_compute_samples(tmp_path, SETTING) == sorted(samples, key=lambda s: s.id)
    assert dataset.read_collective_samples(tmp_path) == sorted(comm, key=lambda s: s.id)
    assert dataset.read_timed_ids(tmp_path, "compute") == {s.id for s in samples}
    assert dataset.dataset_settings(tmp_path) == [SETTING]
    assert dataset.read_compute_samples(tmp_path, Setting("other", 256)) == []


def test_samples_of_sequences_are_not_those_of_pooled_lookups(tables, tmp_path):
    pooled = compute_sample(tables, 0)
    shards = tuple(
        dataclasses.replace(s, table=dataclasses.replace(s.table, sequence=True))
        for s in pooled.request.shards
    )
    request = dataclasses.replace(pooled.request, shards=shards)
    sequence = dataclasses.replace(pooled, id=dataset.compute_id(SETTING, request), request=request)
    dataset.write_compute_samples(tmp_path, [pooled, sequence], dataset.write_pool(tmp_path, tables))
    found = {s.id: s for s in dataset.read_compute_samples(tmp_path)}
    assert found == {pooled.id: pooled, sequence.id: sequence} and pooled.id != sequence.id


def test_the_control_group_is_what_was_timed_most_often(tables, tmp_path):
    pool = dataset.write_pool(tmp_path, tables)
    assert dataset.reference_op(tmp_path, SETTING) is None
    for i in (1, 2):
        dataset.write_compute_samples(
            tmp_path, [compute_sample(tables, i, at=float(at)) for at in range(4)], pool
        )
    assert dataset.reference_op(tmp_path, SETTING) is None  # a repeatability set
    dataset.write_compute_samples(
        tmp_path, [compute_sample(tables, 0, at=float(at)) for at in range(9)], pool
    )
    request, usual_ms = dataset.reference_op(tmp_path, SETTING)
    assert request == compute_sample(tables, 0).request and usual_ms == pytest.approx(2.0)


def test_a_timing_replaces_an_error_and_the_later_one_wins(tables, tmp_path):
    pool = dataset.write_pool(tmp_path, tables)
    dataset.write_compute_samples(tmp_path, [compute_sample(tables, 0, at=2.0)], pool)
    dataset.write_compute_samples(tmp_path, [compute_sample(tables, 0, error="out of memory", at=3.0)], pool)
    dataset.write_compute_samples(tmp_path, [compute_sample(tables, 0, at=1.0)], pool)
    [sample] = dataset.read_compute_samples(tmp_path)
    assert sample.error is None and sample.measured_at == 2.0
    dataset.merge_parts(tmp_path)  # keeps all timings, for they show drift
    [repeats] = dataset.repeated_samples(dataset.read_compute_timings(tmp_path))
    assert [s.measured_at for s in repeats] == [1.0, 2.0]


def test_a_part_of_a_folder_can_be_read(tables, tmp_path):
    samples = [compute_sample(tables, i) for i in range(6)]
    dataset.write_compute_samples(tmp_path, samples, dataset.write_pool(tmp_path, tables))
    first = [s.id for s in dataset.read_compute_timings(tmp_path, SETTING, 4)]
    assert len(first) == 4 and set(first) < {s.id for s in samples}


def over_links(emulated):
    request = CollectiveRequest((8,) * 4, 256, (0.0,) * 4, hosts=2, group="cross", emulated=emulated)
    return CollectiveSample(
        dataset.collective_id(SETTING, request),
        SETTING,
        request,
        (SPREAD,) * 4,
        (SPREAD,) * 4,
        (0.0,) * 4,
        1.0,
    )


def renamed(path, change):
    """A part, its table changed, under the name of its new content."""
    table = change(pq.read_table(path))
    path.unlink()
    pq.write_table(table, path)
    path.rename(path.with_name(f"comm-{hashlib.sha256(path.read_bytes()).hexdigest()[:24]}.parquet"))


def test_an_exchange_says_its_links(tmp_path):
    samples = [over_links(x) for x in (None, EmulatedLinks(0.4), EmulatedLinks(0.4, 2.0))]
    dataset.write_collective_samples(tmp_path / "new", samples)
    assert dataset.read_collective_samples(tmp_path / "new") == sorted(samples, key=lambda s: s.id)


def test_an_exchange_of_ids_says_what_devices_do_with_them(tmp_path):
    def of_ids(**more):
        request = CollectiveRequest((8, 16), 256, (0.0, 0.0), "all_to_all_ids")
        return CollectiveSample(
            dataset.collective_id(SETTING, request),
            SETTING,
            request,
            (SPREAD,) * 2,
            None,
            (0.0, 0.0),
            1.0,
            **more,
        )

    sample = of_ids(work_ms=(0.1, 0.2))
    path = dataset.write_collective_samples(tmp_path, [sample])
    assert dataset.read_collective_samples(tmp_path) == [sample]
    renamed(path, lambda table: table.drop_columns(["work_ms"]))
    with pytest.raises(ShardCoreError, match="lacks the column 'work_ms'"):
        dataset.read_collective_samples(tmp_path)
    for wrong in ((0.1, -0.2), (0.1,)):
        with pytest.raises(ShardCoreError, match="work_ms|timings"):
            of_ids(work_ms=wrong)
    with pytest.raises(ShardCoreError, match="only where ids travel"):
        dataclasses.replace(comm_sample(0), work_ms=(0.1, 0.2))


def test_an_emulated_rate_without_the_other_is_refused(tmp_path):
    path = dataset.write_collective_samples(tmp_path, [over_links(EmulatedLinks(0.4, 2.0))])
    at = dataset_parts.COMM.names.index("emulated_between_gbit_s")
    renamed(path, lambda table: table.set_column(at, dataset_parts.COMM.field(at), pa.nulls(1, pa.float64())))
    with pytest.raises(ShardCoreError, match="emulated_within_gbit_s 2.0 only; it needs emulated_between"):
        dataset.read_collective_samples(tmp_path)


def test_failures_are_tried_again_and_the_last_is_kept(tables, tmp_path):
    pool = dataset.write_pool(tmp_path, tables)
    for at in (1.0, 2.0):
        dataset.write_compute_samples(
            tmp_path, [compute_sample(tables, 0, error=f"failed at {at}", at=at)], pool
        )
    assert dataset.read_timed_ids(tmp_path, "compute") == set()
    dataset.merge_parts(tmp_path)
    [part] = tmp_path.glob("compute-*.parquet")
    assert pq.read_metadata(part).num_rows == 1
    [sample] = dataset.read_compute_samples(tmp_path)
    assert sample.error == "failed at 2.0"


def test_an_id_is_the_setting_and_the_request(tables):
    request = draw_compute_request(tables, 3, SETTING)
    same = dataset.compute_id(SETTING, draw_compute_request(tables, 3, SETTING))
    assert dataset.compute_id(SETTING, request) == same
    assert dataset.compute_id(dataclasses.replace(SETTING, batch=512), request) != same
    assert dataset.compute_id(SETTING, dataclasses.replace(request, batch=128)) != same


def test_an_exchanges_id_is_all_of_its_request():
    request = CollectiveRequest((8, 8), 256, (0.0, 0.0))
    others = [
        dataclasses.replace(request, **change)
        for change in (
            {"batch": 128},
            {"collective": "reduce_scatter"},
            {"payload": "bf16"},
            {"hosts": 2},
            {"start_ms": (0.0, 9.0)},
            {"widths": (8, 12)},
            {"busy_ms": 20.0},
            {"busy_ms": 10.0},
            {"hosts": 2, "group": "cross"},
            {"hosts": 2, "emulated": EmulatedLinks(0.4)},
            {"hosts": 2, "emulated": EmulatedLinks(0.2)},
            {"hosts": 2, "emulated": EmulatedLinks(0.4, 0.2)},
        )
    ]
    assert len({dataset.collective_id(SETTING, r) for r in (request, *others)}) == 13


def test_ids_are_those_of_earlier_versions(tables):
    """Or what was measured would be measured anew; a request that keeps nobody busy is one from before there
    was busy_ms."""
    assert dataset.collective_id(SETTING, CollectiveRequest((8, 8), 256, (0.0, 0.0))) == "6f0f6a285363b413"
    assert (
        dataset.collective_id(SETTING, CollectiveRequest((8, 8), 256, (0.0, 0.0), busy_ms=20.0))
        == "1ddab14afacf5c55"
    )
    # Over several hosts, ranks did not start together then: that would be measured anew.
    assert (
        dataset.collective_id(SETTING, CollectiveRequest((8, 8), 256, (0.0, 0.0), hosts=2))
        != "4547ebc1cbbc8be3"
    )
    shards = (Shard.whole(tables[0]), Shard(tables[3], 5, 50, 4, 8))
    assert dataset.compute_id(SETTING, ComputeRequest(shards, 128)) == "2ee5092bbac3ae03"


@pytest.mark.parametrize(
    "timed, reference",
    [([5, 2], True), ([4], True), ([4, 2], False), ([3], False), ([], False), ([9, 4, 4], True)],
)
def test_a_reference_op_was_timed_four_times_and_twice_as_often_as_others(timed, reference):
    assert dataset.has_reference_op([[None] * n for n in timed]) == reference


def test_merging_removes_what_a_killed_writer_left_an_hour_ago(tmp_path):
    part, others = f"compute-{'0' * 24}.parquet", ".vimrc.1.tmp"
    for name, age_s in ((f".{part}.7.tmp", 3700), (f".{part}.8.tmp", 60), (others, 3700)):
        (tmp_path / name).write_bytes(b"half")
        os.utime(tmp_path / name, (time.time() - age_s,) * 2)
    dataset.merge_parts(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {f".{part}.8.tmp", others}


def test_the_better_known_timing_counts(tables, tmp_path):
    pool = dataset.write_pool(tmp_path, tables)
    timed = [
        dataclasses.replace(compute_sample(tables, 0, at=float(at)), relative_ci=k)
        for at, k in enumerate((0.5, 0.01, 0.01, 0.2, None))
    ]
    dataset.write_compute_samples(tmp_path, timed, pool)
    assert dataset.read_compute_samples(tmp_path) == [timed[2]]
    assert dataset.median_ms(tmp_path, SETTING, timed[0].request) == pytest.approx(2.0)
    assert dataset.median_ms(tmp_path, SETTING, compute_sample(tables, 1).request) is None


def test_an_empty_folder_holds_nothing(tmp_path):
    assert (
        dataset.read_compute_samples(tmp_path) == []
        and dataset.read_timed_ids(tmp_path / "none", "comm") == set()
    )


def test_disturbed_samples_are_named_until_they_are_measured_again(tables, tmp_path):
    pool = dataset.write_pool(tmp_path, tables)
    samples = [
        dataclasses.replace(s, relative_ci=0.03) for s in (compute_sample(tables, i) for i in range(6))
    ]
    bad = dataclasses.replace(samples[0], relative_ci=0.3)
    dataset.write_compute_samples(tmp_path, [bad, *samples[1:]], pool)
    assert (
        dataset.disturbed_sample_ids(tmp_path, 0.02) == {bad.id}
        and dataset.disturbed_sample_ids(tmp_path, 0.2) == set()
    )
    assert (
        dataset.disturbed_sample_ids(tmp_path, 0.149) == {bad.id}
        and dataset.disturbed_sample_ids(tmp_path, 0.15) == set()
    )
    again = dataclasses.replace(bad, relative_ci=0.04, measured_at=bad.measured_at + 60)
    worse = dataclasses.replace(bad, relative_ci=0.5, measured_at=bad.measured_at + 120)
    dataset.write_compute_samples(tmp_path, [again, worse], pool)
    assert dataset.disturbed_sample_ids(tmp_path, 0.02) == set()
    dataset.merge_parts(tmp_path)  # which orders timings by time: the first still is the bad one
    assert dataset.disturbed_sample_ids(tmp_path, 0.02) == set()
    assert next(s for s in dataset.read_compute_samples(tmp_path) if s.id == bad.id) == again
    assert dataset.median_ms(tmp_path, bad.setting, bad.request) == pytest.approx(again.total_ms)


def test_parts_whose_timings_meant_something_else_are_left_alone(tables, tmp_path, monkeypatch):
    monkeypatch.setitem(dataset_parts.MEASUREMENT_VERSIONS, "compute", 1)
    old = dataset.write_compute_samples(
        tmp_path, [compute_sample(tables, 0)], dataset.write_pool(tmp_path, tables)
    )
    monkeypatch.undo()
    assert (
        dataset.read_compute_samples(tmp_path) == [] and dataset.read_timed_ids(tmp_path, "compute") == set()
    )
    dataset.merge_parts(tmp_path)
    assert old.exists()
    rows, new = pq.read_table(old).to_pylist(), compute_sample(tables, 0).id
    dataset_parts.write_part(tmp_path, "compute", rows + [{**rows[0], "id": new, "measurement_version": 2}])
    assert [s.id for s in dataset.read_compute_samples(tmp_path)] == [new]
    assert dataset.read_timed_ids(tmp_path, "compute") == {new}


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    "name, message",
    [
        ("compute-000000000000000000000000.parquet", "is a link that leads nowhere; remove it"),
        ("compute-latest.parquet", "has no name of a part"),
    ],
)
def test_a_link_that_leads_nowhere_is_named(tmp_path, name, message):
    """And does not make a reader look for it forever."""
    (tmp_path / name).symlink_to(tmp_path / "nowhere")
    with pytest.raises(ShardCoreError) as error:
        dataset.read_compute_samples(tmp_path)
    assert message in str(error.value) and name in str(error.value)


def rewritten(folder, **columns):
    """The rows of a folder's one part of compute samples, with columns changed, under the name of their own
    digest."""
    [path] = folder.glob("compute-*.parquet")
    rows = [{**row, **columns} for row in pq.read_table(path).to_pylist()]
    path.unlink()
    return dataset_parts.write_part(folder, "compute", rows)


TIMING = {"median_ms": 1.0, "q1_ms": 1.0, "q3_ms": 1.0, "repeats": 3}


@pytest.mark.parametrize(
    "columns, message",
    [
        ({"forward": {**TIMING, "median_ms": -1.0}}, "a timing is -1.0 ms"),
        ({"forward": {**TIMING, "q3_ms": float("nan")}}, "q3_ms nan)"),
        ({"forward": {**TIMING, "repeats": 0}}, "in 0 repeats"),
        ({"forward": None}, "has no timing, and no error"),
        ({"backward": {**TIMING, "median_ms": None}}, "has an entry that is nothing"),
        ({"slowdown": 0.0}, "has slowdown 0.0"),
        ({"slowdown": float("inf")}, "slowdown inf"),
        ({"slowdown": None}, "has nothing in column 'slowdown'"),
        ({"relative_ci": -0.1}, "relative_ci -0.1"),
        ({"order": -1}, "order -1"),
        ({"measured_at": float("nan")}, "measured_at nan"),
        ({"id": "0" * 16}, "its request has the id"),
        ({"batch": 0}, "batch 0"),
        ({"pool": "../x"}, "its pool is '../x'"),
        ({"pool": "0" * 16}, "pool-0000000000000000.json"),
        ({"hardware": "a/b"}, "'a/b'"),
        ({"shards": [None]}, "has an entry that is nothing"),
        ({"shards": None}, "has nothing in column 'shards'"),
        (
            {"shards": [{"table": "none", "dim": 4, "row_lo": 0, "row_hi": 1, "col_lo": 0, "col_hi": 4}]},
            "has no table 'none'",
        ),
        (
            {"shards": [{"table": "hot", "dim": 4, "row_lo": 1, "row_hi": 1, "col_lo": 0, "col_hi": 4}]},
            "has rows [1, 1)",
        ),
    ],
)
def test_a_sample_that_is_none_is_named(tables, tmp_path, columns, message):
    dataset.write_compute_samples(tmp_path, [compute_sample(tables, 0)], dataset.write_pool(tmp_path, tables))
    rewritten(tmp_path, **columns)
    with pytest.raises(ShardCoreError) as error:
        dataset.read_compute_samples(tmp_path)
    assert message in str(error.value), str(error.value)


def test_a_sample_that_is_none_takes_no_good_ones_with_it(tables, tmp_path):
    """Merged into one part with them, it would have them all refused, and their own parts were gone."""
    pool = dataset.write_pool(tmp_path, tables)
    dataset.write_compute_samples(tmp_path, [compute_sample(tables, 0)], pool)
    bad = rewritten(tmp_path, id="0" * 16)
    dataset.write_compute_samples(tmp_path, [compute_sample(tables, 1)], pool)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(
        ShardCoreError,
        match=rf"{bad.name} is no part of a dataset, sample '0{{16}}': .*; "
        r"remove it$",
    ):
        dataset.merge_parts(tmp_path)
    assert sorted(tmp_path.iterdir()) == before
    bad.unlink()
    assert [s.id for s in dataset.read_compute_samples(tmp_path)] == [compute_sample(tables, 1).id]
    for i in range(2):
        dataset.write_collective_samples(tmp_path, [comm_sample(i)])
    dataset.write_collective_samples(tmp_path, [dataclasses.replace(comm_sample(2), id="0" * 16)])
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ShardCoreError, match="sample '0{16}'"):
        dataset.merge_parts(tmp_path)
    assert sorted(tmp_path.iterdir()) == before


def test_a_part_that_is_sound_but_not_the_one_of_its_name_is_refused(tables, tmp_path):
    pool = dataset.write_pool(tmp_path, tables)
    first, second = (
        dataset.write_compute_samples(tmp_path, [compute_sample(tables, i)], pool) for i in range(2)
    )
    first.write_bytes(second.read_bytes())
    with pytest.raises(
        ShardCoreError,
        match=f"{first.name} does not match the digest in its name; it was cut short or edited",
    ):
        dataset.read_compute_samples(tmp_path)


@pytest.mark.timeout(60)
def test_a_part_that_is_none_is_named(tables, tmp_path):
    pool = dataset.write_pool(tmp_path, tables)
    content = dataset.write_compute_samples(tmp_path, [compute_sample(tables, 0)], pool).read_bytes()
    table = pq.read_table(pa.BufferReader(content))
    others = {
        "no part of a dataset": content[:-20],
        "lacks the column 'slowdown'": table.drop_columns("slowdown"),
        "has an unknown column 'more'": table.append_column("more", table["slowdown"]),
        "column 'order' of type string; it needs int64": table.set_column(
            table.schema.get_field_index("order"), "order", pa.array(["first"])
        ),
    }
    for output, other in others.items():
        for old in tmp_path.glob("compute-*"):
            old.unlink()
        if isinstance(other, pa.Table):
            sink = pa.BufferOutputStream()
            pq.write_table(other, sink)
            other = sink.getvalue().to_pybytes()
        (tmp_path / f"compute-{hashlib.sha256(other).hexdigest()[:24]}.parquet").write_bytes(other)
        with pytest.raises(ShardCoreError, match=output):
            dataset.read_timed_ids(tmp_path, "compute")


def test_merging_leaves_what_a_link_leads_to(tables, tmp_path):
    pool = dataset.write_pool(tmp_path / "mine", tables)
    kept = dataset.write_compute_samples(tmp_path / "theirs", [compute_sample(tables, 0)], pool)
    dataset.write_compute_samples(tmp_path / "mine", [compute_sample(tables, 1)], pool)
    (tmp_path / "mine" / kept.name).symlink_to(kept)
    dataset.merge_parts(tmp_path / "mine")
    assert kept.exists() and len(list((tmp_path / "mine").glob("compute-*"))) == 1
    assert len(dataset.read_compute_samples(tmp_path / "mine")) == 2


def test_many_samples_are_merged_into_several_parts_that_can_be_read(tables, tmp_path, monkeypatch):
    monkeypatch.setattr(dataset_parts, "_PART_ROWS", 2)
    pool = dataset.write_pool(tmp_path, tables)
    for i in range(5):
        dataset.write_compute_samples(tmp_path, [compute_sample(tables, i)], pool)
    for _ in range(2):
        dataset.merge_parts(tmp_path)
        assert len(list(tmp_path.glob("compute-*"))) == 3 and len(dataset.read_compute_samples(tmp_path)) == 5


@pytest.mark.parametrize(
    "error, rows, message", [("x", 20_000, "values; a part of its size"), ("x" * 200_000, 200, "characters;")]
)
def test_a_small_part_that_unpacks_to_much_is_refused(tables, tmp_path, error, rows, message):
    """It is refused by readers, and by the writer, as it would make the whole dataset unreadable."""
    pool, sample = dataset.write_pool(tmp_path, tables), compute_sample(tables, 0, error=error)
    with pytest.raises(ShardCoreError, match=message):
        dataset.write_compute_samples(tmp_path, [sample] * rows, pool)
    assert not list(tmp_path.glob("compute-*"))
    one = dataset.write_compute_samples(tmp_path, [dataclasses.replace(sample, error=error[:1])], pool)
    row = pq.read_table(one).to_pylist()[0] | {"error": error}
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist([row] * rows, schema=dataset_parts.COMPUTE), sink, compression="zstd")
    content = sink.getvalue().to_pybytes()
    assert len(content) < 100_000
    one.unlink()
    (tmp_path / f"compute-{hashlib.sha256(content).hexdigest()[:24]}.parquet").write_bytes(content)
    with pytest.raises(ShardCoreError, match=message):
        dataset.read_compute_samples(tmp_path, SETTING)


def test_parts_that_would_be_none_together_stay_as_they_are(tables, tmp_path, monkeypatch):
    pool = dataset.write_pool(tmp_path, tables)
    for i in range(3):
        dataset.write_compute_samples(tmp_path, [compute_sample(tables, i)], pool)
    before = sorted(tmp_path.iterdir())
    groups = [pq.ParquetFile(p).metadata.row_group(0) for p in tmp_path.glob("compute-*")]
    most = max(sum(g.column(i).num_values for i in range(g.num_columns)) for g in groups)
    monkeypatch.setattr(dataset_parts, "_MOST_VALUES", (most, 0))
    assert len(dataset.read_compute_samples(tmp_path)) == 3
    dataset.merge_parts(tmp_path)
    assert sorted(tmp_path.iterdir()) == before and len(dataset.read_compute_samples(tmp_path)) == 3


@pytest.mark.parametrize("content", ["", "{", None])
def test_a_damaged_pool_is_written_anew(tables, tmp_path, content):
    """Samples that are measured next could not be read without it."""
    pool = dataset.write_pool(tmp_path, tables)
    if content is None:
        (tmp_path / f"pool-{pool}.json").unlink()
    else:
        (tmp_path / f"pool-{pool}.json").write_text(content)
    dataset.write_pool(tmp_path, tables)
    dataset.write_compute_samples(tmp_path, [compute_sample(tables, 0)], pool)
    assert len(dataset.read_compute_samples(tmp_path)) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"forward": TimingSpread(0.0, 0.0, 0.0, 7), "backward": TimingSpread(0.0, 0.0, 0.0, 7)},
        {"slowdown": 1e300},
    ],
)
def test_an_op_takes_time_at_a_slowdown_that_machines_have(tables, wrong):
    with pytest.raises(ShardCoreError, match="took 0 ms|slowdown 1e"):
        dataclasses.replace(compute_sample(tables, 0), **wrong)


THREADS = """
import os, sys
from shardcore.io import dataset
def threads():
    return len(os.listdir("/proc/self/task"))
before = threads()
assert dataset.read_compute_samples(sys.argv[1])
print(threads() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_no_thread_is_started_to_read(tables, tmp_path):
    """A thread of Arrow's that still ran aborted one in a hundred commands after their work was done."""
    dataset.write_compute_samples(
        tmp_path, [compute_sample(tables, i) for i in range(9)], dataset.write_pool(tmp_path, tables)
    )
    env = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}  # by which Arrow goes
    done = subprocess.run(
        [sys.executable, "-c", THREADS, str(tmp_path)], env=env, capture_output=True, text=True
    )
    assert done.stdout == "0\n", done.stdout + done.stderr
