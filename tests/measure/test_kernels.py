import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from shardcore import sampling, streams
from shardcore.measure.kernels import KernelBench, KernelConfig
from shardcore.types import ComputeRequest, Setting, Shard, Table, Zipf

CONFIG = KernelConfig(arena_bytes=8 << 20, tolerance=0.2, min_repeats=3, max_repeats=5, interleave=4)
GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("precision, optimizer", [("fp32", "exact_sgd"), ("fp16", "exact_sgd"), ("fp32", "rowwise_adagrad")])
def test_groups_are_measured_forward_and_backward(tables, device, precision, optimizer):
    groups, setting = sampling.GroupConfig(max_shard_bytes=4 << 20), Setting("test", 256, precision, optimizer)
    requests = [sampling.compute_request(tables, i, setting, config=groups) for i in range(12)]
    samples = list(KernelBench(setting, device, CONFIG).measure(requests))
    assert {s.request for s in samples} == set(requests) and len(samples) == 12
    assert [s.error for s in samples] == [None] * 12
    for s in samples:
        for part in (s.forward, s.backward):
            assert 0 < part.q1_ms <= part.median_ms <= part.q3_ms and 3 <= part.repeats <= 5


@pytest.mark.parametrize("device", DEVICES)
def test_an_op_over_the_arena_computes_what_fbgemm_computes(tables, device):
    """Pooled sums and one SGD step equal those of embeddings with the same weights, row ranges included."""
    bench = KernelBench(Setting("test", 256), device, CONFIG)
    shards = (Shard.whole(tables[0]), Shard(tables[1], 1000, 2500, 0, 32), Shard.whole(tables[3]))
    run = bench.prepare(ComputeRequest(shards, 256))
    before = bench._arena.detach().cpu().clone()
    output = run.op(run.indices, run.offsets)
    places = run.op.weights_offsets.tolist()
    expected = []
    for shard, place in zip(shards, places, strict=True):
        weights = before[place:place + shard.rows * shard.width].view(shard.rows, shard.width)
        ids, offsets = streams.shard_stream(shard, 256)
        ids, offsets = torch.from_numpy(ids), torch.from_numpy(offsets[:-1])
        expected.append(torch.nn.functional.embedding_bag(ids, weights, offsets, mode="sum"))
    torch.testing.assert_close(output.detach().cpu(), torch.cat(expected, 1), rtol=1e-4, atol=1e-5)
    output.backward(run.gradient)
    after = bench._arena.detach().cpu()
    for shard, place in zip(shards, places, strict=True):
        counts = np.bincount(streams.shard_stream(shard, 256)[0], minlength=shard.rows)
        step = torch.from_numpy(counts).float()[:, None] * 1e-3 * 1e-3
        region = slice(place, place + shard.rows * shard.width)
        torch.testing.assert_close((before - after)[region].view(shard.rows, shard.width), step.expand(-1, shard.width),
                                   rtol=1e-2, atol=1e-7)


def test_what_does_not_fit_costs_that_sample_only(tables):
    huge = Shard.whole(Table("huge", 10_000_000, 64, 1.0, Zipf(1.0)))
    setting, groups = Setting("test", 256), sampling.GroupConfig(max_shard_bytes=1 << 20)
    good = sampling.compute_request(tables, 0, setting, config=groups)
    samples = list(KernelBench(setting, "cpu", CONFIG).measure([ComputeRequest((huge,), 256), good]))
    failed = next(s for s in samples if s.request.shards == (huge,))
    assert "huge" in failed.error and "2.4 GiB" in failed.error and failed.forward is None
    assert next(s for s in samples if s.request == good).error is None


def test_tables_that_exceed_the_arena_together_share_it(tables):
    many = ComputeRequest((Shard.whole(tables[0]),) * 6, 256)  # 18 MiB in an arena of 8
    [sample] = KernelBench(Setting("test", 256), "cpu", CONFIG).measure([many])
    assert sample.error is None


def test_the_control_runs_throughout_and_gives_samples_of_its_own(tables):
    setting, groups = Setting("test", 256), sampling.GroupConfig(max_shard_bytes=1 << 20, max_shards=4)
    requests = [sampling.compute_request(tables, i, setting, config=groups) for i in range(8)]
    control = sampling.control_request(tables, setting, groups)
    bench = KernelBench(setting, "cpu", CONFIG, control)
    bench.control_ms = bench.calibrate(requests, seconds=0.2)
    samples = list(bench.measure(requests))
    assert bench.active == [] and {s.request for s in samples} == {control, *requests}
    own = next(s for s in samples if s.request == control)
    assert own.forward.repeats >= 3 and own.pace > 0
    assert own.total_ms * own.pace > 0 and 0 < bench.kept_s < bench.kernel_s
    assert [s.order for s in samples] == list(range(len(samples)))


def test_what_was_added_stays_in_turn_until_finished(tables):
    setting, groups = Setting("test", 256), sampling.GroupConfig(max_shard_bytes=1 << 20, max_shards=4)
    requests = [sampling.compute_request(tables, i, setting, config=groups) for i in range(7)]
    bench = KernelBench(setting, "cpu", CONFIG)
    finished = [s for r in requests for s in bench.add(r)]
    assert 0 < len(bench.active) <= CONFIG.interleave
    assert {s.request for s in finished} | set(bench.active) == set(requests)
    finished += bench.finish()
    assert bench.active == [] and sorted(s.id for s in finished) == sorted({s.id for s in finished})


def test_missing_fbgemm_is_one_clear_line(tmp_path):
    """In a Python whose fbgemm_gpu is broken, the command line says what to install."""
    (tmp_path / "fbgemm_gpu").mkdir()
    (tmp_path / "fbgemm_gpu" / "__init__.py").write_text("raise ImportError('libfbgemm.so: undefined symbol')")
    shutil.copytree(Path(__file__).parents[2] / "shardcore", tmp_path / "shardcore")
    done = subprocess.run([sys.executable, "-m", "shardcore", "measure", "--device", "cpu", "--samples", "1", "--out", "out"],
                          cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "FBGEMM" in done.stderr and "pip install" in done.stderr
