import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from shard_streams import shard_stream

from shardcore.core.access_statistics import Zipf
from shardcore.core.catalog import OPTIMIZERS, Optimizer
from shardcore.core.errors import ShardCoreError
from shardcore.core.types import PRECISION_BYTES, Setting, Shard, Table
from shardcore.io import dataset
from shardcore.io.measurements import ComputeRequest
from shardcore.measure import kernels, timing
from shardcore.measure.kernels import KernelBench, KernelConfig
from shardcore.measure.sampling.groups import GroupConfig, draw_compute_request, reference_request
from shardcore.tables import streams

CONFIG = KernelConfig(arena_bytes=8 << 20, tolerance=0.2, min_repeats=3, max_repeats=5, interleave=4)
GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]


@pytest.mark.parametrize(
    "device, precision, optimizer",
    [
        ("cpu", "fp32", "exact_sgd"),
        ("cpu", "fp16", "exact_sgd"),
        ("cpu", "fp32", "rowwise_adagrad"),
        ("cpu", "fp16", "rowwise_adagrad"),
        *(
            pytest.param("cuda", precision, optimizer, marks=GPU)
            for precision in ("fp32", "fp16")
            for optimizer in OPTIMIZERS
        ),
    ],
)
def test_groups_are_measured_forward_and_backward(tables, device, precision, optimizer):
    groups, setting = GroupConfig(max_shard_bytes=4 << 20), Setting("test", 256, precision, optimizer)
    requests = [draw_compute_request(tables, i, setting, config=groups) for i in range(12)]
    samples = list(KernelBench(setting, device, CONFIG).measure(requests))
    assert {s.request for s in samples} == set(requests) and len(samples) == 12
    assert [s.error for s in samples] == [None] * 12
    for s in samples:
        for part in (s.forward, s.backward):
            assert (
                0 < part.q1_ms <= part.median_ms <= part.q3_ms
                and 3 <= part.repeats <= 5 * kernels.HELD_OUT_TIMES
            )


@pytest.mark.parametrize("device", DEVICES)
def test_an_op_over_the_arena_computes_what_fbgemm_computes(tables, device):
    """Pooled sums and one SGD step equal those of embeddings with the same weights: row ranges and tables of
    several features included."""
    bench = KernelBench(Setting("test", 256), device, CONFIG)
    several = dataclasses.replace(tables[0], features=2)
    shards = (Shard.whole(several), Shard(tables[1], 1000, 2500, 0, 32), Shard.whole(tables[3]))
    run = bench.prepare(ComputeRequest(shards, 256))
    before = bench._arena.detach().cpu().clone()
    output = run.op(run.indices, run.offsets)
    _, *places = run.op.weights_offsets.tolist()
    expected = []
    for shard, place in zip(shards, places, strict=True):
        weights = before[place : place + shard.rows * shard.width].view(shard.rows, shard.width)
        ids, offsets = shard_stream(shard, 256)
        ids, offsets = torch.from_numpy(ids), torch.from_numpy(offsets[:-1])
        pooled = torch.nn.functional.embedding_bag(ids, weights, offsets, mode="sum")
        expected += pooled.chunk(shard.table.features)
    torch.testing.assert_close(output.detach().cpu(), torch.cat(expected, 1), rtol=1e-4, atol=1e-5)
    output.backward(run.gradient)
    after = bench._arena.detach().cpu()
    for shard, place in zip(shards, places, strict=True):
        counts = np.bincount(shard_stream(shard, 256)[0], minlength=shard.rows)
        step = torch.from_numpy(counts).float()[:, None] * 1e-3 * 1e-3
        region = slice(place, place + shard.rows * shard.width)
        torch.testing.assert_close(
            (before - after)[region].view(shard.rows, shard.width),
            step.expand(-1, shard.width),
            rtol=1e-2,
            atol=1e-7,
        )


def sequences(tables, *widths):
    return [
        Shard(dataclasses.replace(t, dim=w, sequence=True), 0, t.rows // 2 * (1 + i % 2), 0, w)
        for i, (t, w) in enumerate(zip(tables, widths, strict=False))
    ]


@pytest.mark.parametrize("device", DEVICES)
def test_each_lookup_of_a_sequence_is_an_output(tables, device):
    """A row range and a whole table. They equal the rows looked up, and one SGD step moves those."""
    bench = KernelBench(Setting("test", 256), device, CONFIG)
    shards = sequences(tables, 16, 16)
    run = bench.prepare(ComputeRequest(tuple(shards), 256))
    before = bench._arena.detach().cpu().clone()
    output = run.op(run.indices, run.offsets)
    places, expected = run.op.weights_offsets.tolist(), []
    for shard, place in zip(shards, places, strict=True):
        weights = before[place : place + shard.rows * 16].view(shard.rows, 16)
        expected.append(weights[torch.from_numpy(shard_stream(shard, 256)[0])])
    torch.testing.assert_close(output.detach().cpu(), torch.cat(expected))
    assert len(expected[0]) and len(expected[1])
    output.backward(run.gradient)
    moved = before != bench._arena.detach().cpu()
    for shard, place in zip(shards, places, strict=True):
        rows = np.unique(shard_stream(shard, 256)[0])
        assert np.array_equal(
            np.flatnonzero(moved[place : place + shard.rows * 16].view(-1, 16).all(1)), rows
        )


@pytest.mark.parametrize(
    "shards, message",
    [
        (lambda t: sequences(t, 16, 32), "sequences 16 and 32 columns wide; FBGEMM runs those of one width"),
        (lambda t: [*sequences(t, 16), Shard.whole(t[1])], "has sequences and pooled tables"),
    ],
)
def test_sequences_that_no_op_runs_together_cost_that_sample_only(tables, shards, message):
    request = ComputeRequest(tuple(shards(tables)), 256)
    [sample] = KernelBench(Setting("test", 256), "cpu", CONFIG).measure([request])
    assert message in sample.error


def test_what_does_not_fit_costs_that_sample_only(tables):
    huge = Shard.whole(Table("huge", 10_000_000, 64, 1.0, Zipf(1.0)))
    setting, groups = Setting("test", 256), GroupConfig(max_shard_bytes=1 << 20)
    good = draw_compute_request(tables, 0, setting, config=groups)
    samples = list(KernelBench(setting, "cpu", CONFIG).measure([ComputeRequest((huge,), 256), good]))
    failed = next(s for s in samples if s.request.shards == (huge,))
    assert "huge" in failed.error and "2.4 GiB" in failed.error and failed.forward is None
    assert next(s for s in samples if s.request == good).error is None


@pytest.mark.parametrize(
    "table, batch", [(Table("odd", 10, 4, 1e6), 1 << 20), (Table("odd", 10, 4, 1.0), 1 << 40)]
)
def test_a_batch_that_no_memory_holds_costs_that_sample_only(tables, table, batch):
    """Once, drawing it took all memory of the machine."""
    good = ComputeRequest((Shard.whole(tables[3]),), 64)
    bench = KernelBench(Setting("test", 256), "cpu", CONFIG)
    failed, fine = sorted(
        bench.measure([ComputeRequest((Shard.whole(table),), batch), good]), key=lambda s: s.error is None
    )
    assert (
        f"a batch of {batch} has" in failed.error and "fewer samples" in failed.error and fine.error is None
    )


def test_tables_that_exceed_the_arena_together_share_it(tables):
    many = ComputeRequest((Shard.whole(tables[0]),) * 6, 256)  # 18 MiB in an arena of 8
    bench = KernelBench(Setting("test", 256), "cpu", CONFIG)
    size, places = tables[0].rows * tables[0].dim, bench.prepare(many).op.weights_offsets.tolist()
    assert len(set(places)) < 6
    assert all(0 <= place <= (8 << 18) - size and place % 16 == 0 for place in places)
    [sample] = bench.measure([many])
    assert sample.error is None


def test_groups_lie_elsewhere_in_the_arena_and_their_tables_one_after_the_other(tables):
    bench = KernelBench(Setting("test", 256), "cpu", CONFIG)
    first = set()
    for width in range(4, 68, 4):
        shards = (
            Shard(tables[2], 0, 999, 0, width),
            Shard(tables[3], 0, 10, 0, 4),
        )  # 999 × 4 is not a multiple of 16
        a, b = bench.prepare(ComputeRequest(shards, 8)).op.weights_offsets.tolist()
        assert b == a + (999 * width + 15) // 16 * 16
        first.add(a)
    assert len(first) > 12


def test_a_shard_in_another_precision_fails_alone(tables):
    half = ComputeRequest((Shard.whole(dataclasses.replace(tables[0], precision="fp16")),), 256)
    [sample] = KernelBench(Setting("test", 256), "cpu", CONFIG).measure([half])
    assert "weights in fp16; the setting's are in fp32" in sample.error


@pytest.mark.parametrize(
    "device, optimizer",
    [
        ("cpu", "rowwise_adagrad"),
        ("cpu", "adagrad"),
        *(pytest.param("cuda", optimizer, marks=GPU) for optimizer in OPTIMIZERS),
    ],
)
def test_an_optimizer_keeps_state_of_what_was_looked_up(tables, device, optimizer, monkeypatch):
    """State is for each row, or for each cell. On CPU, only FBGEMM's plain Adagrad has cells."""
    monkeypatch.setitem(OPTIMIZERS, "adagrad", Optimizer("EXACT_ADAGRAD", ("cell",)))
    bench = KernelBench(Setting("test", 256, "fp32", optimizer), device, CONFIG)
    shards = (Shard.whole(tables[1]), Shard(tables[3], 2000, 9000, 0, 8))
    bench.run_once_ms(bench.prepare(ComputeRequest(shards, 256)))
    rows = [(len(np.unique(shard_stream(s, 256)[0])), s.width) for s in shards]
    seen = {"row": sum(n for n, _ in rows), "cell": sum(n * width for n, width in rows)}
    assert [int((state != 0).sum()) for state in bench._states] == [
        seen[per] for per in OPTIMIZERS[optimizer].states
    ]


@pytest.mark.parametrize("precision", PRECISION_BYTES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_setting_is_measured_or_refused_with_what_runs_instead(tables, optimizer, precision):
    """Found by running FBGEMM 1.8 on CPU."""
    setting, runs = (
        Setting("test", 64, precision, optimizer),
        ("exact_sgd", "rowwise_adagrad", "exact_adagrad"),
    )
    if optimizer in runs and precision in ("fp32", "fp16"):
        request = draw_compute_request(tables, 0, setting, config=GroupConfig(max_shard_bytes=1 << 20))
        [sample] = KernelBench(setting, "cpu", CONFIG).measure([request])
        assert sample.error is None and sample.total_ms > 0
    else:
        with pytest.raises(ShardCoreError) as error:
            KernelBench(setting, "cpu", CONFIG)
        output = str(error.value)
        assert output.startswith(f"FBGEMM does not train {precision} weights with {optimizer} on cpu (")
        assert output.endswith("; here it trains " + "; ".join(f"{o} with fp32 or fp16" for o in runs))


def test_a_tables_stream_is_drawn_once(tables, monkeypatch):
    wide, narrow, part = (
        Shard.whole(tables[1]),
        Shard(tables[1], 0, 3000, 0, 8),
        Shard(tables[1], 500, 900, 0, 32),
    )
    parts = [shard_stream(s, 256) for s in (wide, narrow, part)]
    drawn, draw = [], streams.draw_lookups
    monkeypatch.setattr(streams, "draw_lookups", lambda *which: drawn.append(which) or draw(*which))
    bench = KernelBench(Setting("test", 256), "cpu", CONFIG)
    run = bench.prepare(ComputeRequest((wide, narrow, part), 256))
    bench.prepare(ComputeRequest((Shard.whole(dataclasses.replace(tables[1], dim=16)),), 256))
    assert len(drawn) == 1
    assert run.indices.tolist() == np.concatenate([ids for ids, _ in parts]).tolist()
    ends = np.concatenate([[0], *(np.diff(offsets) for _, offsets in parts)]).cumsum()
    assert run.offsets.tolist() == ends.tolist()
    for other in (64, 256):  # another batch, another seed
        bench.prepare(ComputeRequest((wide,), other), seed=int(other == 256))
    assert len(drawn) == 3


@pytest.fixture
def events(monkeypatch):
    """Actions of benches, in order: "evict" or "run"."""
    found, evict, once = [], timing.HardwareCaches.evict_caches, KernelBench._run_once
    monkeypatch.setattr(
        timing.HardwareCaches, "evict_caches", lambda caches: (found.append("evict"), evict(caches))[1]
    )
    monkeypatch.setattr(
        KernelBench, "_run_once", lambda bench, run: (found.append("run"), once(bench, run))[1]
    )
    return found


def test_where_few_ops_run_in_turn_each_meets_caches_that_were_overwritten(tables, events):
    setting = Setting("test", 64)
    request, reference = (ComputeRequest((Shard.whole(t),), 64) for t in (tables[3], tables[4]))
    few, many = (dataclasses.replace(CONFIG, interleave=n) for n in (3, 2))
    [sample] = KernelBench(setting, "cpu", few).measure([request])
    assert events == ["evict", "run"] * (sample.forward.repeats + 1)  # the first is to warm up
    del events[:]
    [sample] = KernelBench(setting, "cpu", many).measure([request])
    assert events == ["run"] * (sample.forward.repeats + 1)
    for config, expected in ((few, ["evict", "run"]), (many, ["run"])):
        bench = KernelBench(setting, "cpu", config, reference)
        del events[:]
        bench.calibrate([request], seconds=0)
        assert events == expected * 2 * 10  # at least ten times the reference, and the other in turn with it


def test_caches_are_overwritten():
    caches = timing.HardwareCaches(1 << 20, "cpu")
    caches.evict_caches()
    assert caches._written.nbytes == 1 << 20 and bool((caches._written == 1).all())
    timing.HardwareCaches(0, "cpu").evict_caches()


def test_repeats_stop_when_the_median_is_known(tables):
    request = ComputeRequest((Shard.whole(tables[4]),), 8)
    loose, tight = (
        KernelConfig(arena_bytes=1 << 20, tolerance=t, min_repeats=6, max_repeats=30) for t in (0.99, 1e-9)
    )
    [soon], [late] = (KernelBench(Setting("test", 8), "cpu", c).measure([request]) for c in (loose, tight))
    most = 30 if dataset.split_of_sample(late.id) == "train" else 30 * kernels.HELD_OUT_TIMES
    assert 6 <= soon.forward.repeats < 30 <= most == late.forward.repeats and late.relative_ci > 1e-9 >= 0
    assert [KernelConfig().timing_tolerance(device) for device in ("cpu", "cuda")] == [0.02, 0.01]
    assert KernelConfig(tolerance=0.3).timing_tolerance("cuda") == 0.3


def test_held_out_ops_run_more_often_as_their_noise_adds_to_the_errors_shown(tables):
    config = KernelConfig(arena_bytes=1 << 20, tolerance=1e-9, min_repeats=2, max_repeats=3)
    requests = [ComputeRequest((Shard.whole(tables[4]),), batch) for batch in range(1, 33)]
    samples = list(KernelBench(Setting("test", 8), "cpu", config).measure(requests))
    repeats = {(dataset.split_of_sample(s.id) == "train", s.forward.repeats) for s in samples}
    assert repeats == {(True, 3), (False, 3 * kernels.HELD_OUT_TIMES)}


def test_ops_that_take_long_end_after_the_fewest_runs(tables, monkeypatch):
    monkeypatch.setattr(kernels, "_LONGEST_MS", 0.0)
    config = KernelConfig(arena_bytes=1 << 20, tolerance=1e-9, min_repeats=4, max_repeats=30)
    [sample] = KernelBench(Setting("test", 8), "cpu", config).measure(
        [ComputeRequest((Shard.whole(tables[4]),), 8)]
    )
    assert sample.forward.repeats == 4


def test_timings_are_at_the_speed_at_which_the_reference_takes_its_usual_ms(tables):
    """A reference that usually takes a thousand times as long says that the machine is so much faster than
    usual."""
    request, reference = (ComputeRequest((Shard.whole(t),), 64) for t in (tables[3], tables[4]))
    found = {}
    for usual in (1.0, 1000.0):
        for _ in range(3):  # other work on the machine may disturb a run
            bench = KernelBench(Setting("test", 64), "cpu", CONFIG, reference, usual)
            found[usual] = {s.request: s for s in bench.measure([request])}
            if found[usual][reference].total_ms == pytest.approx(usual, rel=0.5):
                break
        assert found[usual][reference].total_ms == pytest.approx(usual, rel=0.5)
    assert 0 < found[1000.0][request].slowdown < 0.1 * found[1.0][request].slowdown
    assert found[1000.0][request].total_ms > 10 * found[1.0][request].total_ms


def test_the_control_runs_throughout_and_gives_samples_of_its_own(tables):
    setting, groups = Setting("test", 256), GroupConfig(max_shard_bytes=1 << 20, max_shards=4)
    requests = [draw_compute_request(tables, i, setting, config=groups) for i in range(8)]
    reference = reference_request(tables, setting, groups)
    bench = KernelBench(setting, "cpu", CONFIG, reference)
    bench.reference_ms = bench.calibrate(requests, seconds=0.2)
    samples = list(bench.measure(requests))
    assert bench.active_requests == [] and {s.request for s in samples} == {reference, *requests}
    own = next(s for s in samples if s.request == reference)
    assert own.forward.repeats >= 3 and own.slowdown > 0
    assert own.total_ms * own.slowdown > 0 and 0 < bench.kept_s < bench.kernel_s
    assert [s.order for s in samples] == list(range(len(samples)))


def test_what_was_added_stays_in_turn_until_finished(tables):
    setting, groups = Setting("test", 256), GroupConfig(max_shard_bytes=1 << 20, max_shards=4)
    requests = [draw_compute_request(tables, i, setting, config=groups) for i in range(7)]
    bench = KernelBench(setting, "cpu", CONFIG)
    finished = [s for r in requests for s in bench.add(r)]
    assert 0 < len(bench.active_requests) <= CONFIG.interleave
    assert {s.request for s in finished} | set(bench.active_requests) == set(requests)
    rounds = 0
    while bench.active_requests:  # each time a round, however little time there is
        finished += bench.finish(0.0)
        rounds += 1
    assert rounds > 1
    assert bench.active_requests == [] and sorted(s.id for s in finished) == sorted({s.id for s in finished})


@pytest.mark.parametrize("times", [1, 2])
def test_an_op_that_finds_no_memory_is_tried_once_more_without_kept_streams(tables, monkeypatch, times):
    bench = KernelBench(Setting("any", 64), config=CONFIG)
    real, kept = bench.prepare, []

    def prepare(request, seed=0):
        kept.append(bench.streams.drawn)
        if len(kept) <= times:
            bench.streams.lookup_stream(request, 7)
            raise torch.OutOfMemoryError("out of memory")
        return real(request, seed)

    monkeypatch.setattr(bench, "prepare", prepare)
    request = ComputeRequest((Shard.whole(tables[4]),), 64)
    [sample] = bench.measure([request])
    assert (sample.error is None) == (times == 1) and len(kept) == 2
    assert times == 1 or sample.error == "out of memory"


def test_a_sample_says_with_what_it_was_measured(tables):
    bench = KernelBench(Setting("any", 64), config=CONFIG)
    [sample] = bench.measure([ComputeRequest((Shard.whole(tables[4]),), 64)])
    assert f"torch {torch.__version__}" in sample.software and "fbgemm 1." in sample.software
    assert sample.software.startswith("arena 8.0 MiB, ")


def test_ids_are_drawn_while_a_gpu_runs_what_came_before(monkeypatch, tmp_path, tables):
    monkeypatch.setenv("SHARDCORE_REHEARSAL", "fake_cuda:FakeCuda")
    monkeypatch.setenv("FAKE_CUDA", str(tmp_path))
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    bench = KernelBench(Setting("test", 256), "cuda", CONFIG)
    runs = ComputeRequest((Shard.whole(tables[0]),), 256)
    never = ComputeRequest((Shard.whole(dataclasses.replace(tables[1], precision="fp16")),), 256)
    bench.prefetch([runs, never])
    assert len(bench.streams._expected) == 1
    found = list(bench.measure([runs, never]))
    assert not bench.streams._expected
    errors = {s.request: s.error for s in found}
    assert errors[runs] is None and "weights in fp16" in errors[never]
