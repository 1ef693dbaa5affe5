"""Steps of a running job, from traces of its ranks."""

import gzip
import json
import random
import shutil
import tracemalloc
import zlib
from pathlib import Path

import pytest
from kineto_traces import BASE_NS, event, gloo_step, ranks_of, write

from shardcore.core.errors import ShardCoreError
from shardcore.core.validation import MOST_BYTES
from shardcore.io import schema
from shardcore.io.kineto import KinetoFile
from shardcore.measure.traces.job import divide_rank_step, read_traced_job
from shardcore.measure.traces.names import NCCL_KERNEL, match_collective, match_kernel_name
from shardcore.measure.traces.rank import Span, StepSpans, TracedCollective


def two_ranks(folder, **of_second):
    write(folder, 0, gloo_step())
    write(folder, 1, gloo_step(late_ms=2.0), **of_second)
    return folder


def rounded(ms):
    return {part: round(value, 1) for part, value in ms.items()}


def test_a_step_of_two_gloo_ranks_is_divided_among_its_parts(tmp_path):
    job = read_traced_job(two_ranks(tmp_path))
    [step] = job.steps
    first, second = step.ranks
    assert (step.number, step.world_size, job.backend, job.devices, job.remarks) == (
        3,
        2,
        "gloo",
        ("cpu",),
        (),
    )
    assert rounded(first.ms) == {
        "unnamed": 2.0, "dense_forward": 3.0, "lookup_forward": 4.0, "waiting": 2.0,
        "outputs_transfer": 3.0, "dense_backward": 1.0, "lookup_backward": 5.0,
    }  # fmt: skip
    assert second.ms["lookup_forward"] == pytest.approx(6.0, abs=0.01)
    assert "waiting" not in rounded(second.ms) or second.ms["waiting"] < 0.01
    for rank in step.ranks:
        assert sum(rank.ms.values()) == pytest.approx(rank.total_ms)
        assert rank.names_ms["mylib::secret"] == pytest.approx(0.3, abs=0.01)
        assert rank.recognised_share == pytest.approx(1 - rank.ms["unnamed"] / 20)


def test_waiting_ends_when_the_last_rank_begins(tmp_path):
    [first, second] = read_traced_job(two_ranks(tmp_path)).steps[0].ranks
    [sent], [also] = first.exchanges, second.exchanges
    assert (sent.collective, sent.role, sent.n_bytes) == ("all_to_all", "outputs", 1024)
    assert (sent.waiting_ms, sent.transfer_ms) == pytest.approx((2.0, 3.0), abs=0.01)
    assert (also.waiting_ms, also.transfer_ms) == pytest.approx((0.0, 3.0), abs=0.01)


def test_clocks_that_differ_are_aligned_by_collectives(tmp_path):
    there = read_traced_job(two_ranks(tmp_path / "a"))
    later = read_traced_job(two_ranks(tmp_path / "b", base_ns=BASE_NS + 5_000_000_000))
    for a, b in zip(there.steps[0].ranks, later.steps[0].ranks, strict=True):
        assert b.ms == pytest.approx(a.ms, abs=0.01)


def test_a_clock_that_jumps_between_steps_is_named(tmp_path):
    write(tmp_path, 0, gloo_step() + gloo_step(at_ms=30, number=4))
    write(tmp_path, 1, gloo_step() + gloo_step(at_ms=900, number=4))
    job = read_traced_job(tmp_path)
    assert any("clock of rank 1 jumps by 870.0 ms before step 4" in remark for remark in job.remarks)
    assert [rank.ms["lookup_forward"] for step in job.steps for rank in step.ranks] == pytest.approx(
        [4.0] * 4, abs=0.01
    )


def kernel(name, begin_ms, ms, stream=84, correlation=None):
    return event(name, begin_ms, ms, "kernel", stream, correlation=correlation)


def test_kernels_belong_to_what_launched_them(tmp_path):
    events = [
        event("ProfilerStep#1", 0, 20, "user_annotation"),
        event("## forward ##", 0, 10, "user_annotation"),
        event("c10d::alltoall_base_", 1, 1),
        event(
            "record_param_comms",
            1,
            1,
            **{"In msg nelems": 64, "dtype": "Float", "Collective name": "all_to_allv"},
        ),
        event("cudaLaunchKernel", 1.2, 0.1, "cuda_runtime", correlation=1),
        event("torch::autograd::CppNode<SplitLookupFunction_adagrad_Op>", 4, 3, thread=2),
        event("cudaLaunchKernel", 5, 0.1, "cuda_runtime", 2, correlation=2),
        kernel("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", 3, 4, correlation=1),
        kernel("void cub::DeviceRadixSortOnesweepKernel<...>", 6, 3, 7, correlation=2),
        kernel("split_embedding_codegen_forward_unweighted_kernel<float>", 10, 2, 7),
        kernel("volta_sgemm_128x32_nt", 13, 1, 7),
        kernel("somebody_elses_kernel", 15, 1, 7),
    ]
    write(tmp_path, 0, events, 1, deviceProperties=[{"name": "Tesla V100"}])
    job = read_traced_job(tmp_path)
    [rank] = job.steps[0].ranks
    assert job.devices == ("Tesla V100",)
    assert rounded(rank.kernel_ms) == {
        "lookup_backward": 3.0, "lookup_forward": 2.0, "dense_forward": 1.0, "unnamed": 1.0, "other_transfer": 4.0
    }  # fmt: skip
    # The exchange is hidden while the sort runs.
    assert rank.ms["other_transfer"] == pytest.approx(3.0, abs=0.01)
    assert rank.hidden_ms == pytest.approx(1.0, abs=0.01)
    assert rank.names_ms["somebody_elses_kernel"] == pytest.approx(1.0, abs=0.01)
    assert rank.exchanges[0].n_bytes == 256


@pytest.mark.parametrize(
    "name, part",
    [
        ("void split_embedding_backward_codegen_adagrad_unweighted_kernel_cta_per_row_1", "lookup_backward"),
        ("split_embedding_nobag_codegen_forward_unweighted_small_kernel", "lookup_forward"),
        ("void fbgemm_gpu::permute_2D_data_kernel<false, int, int>", "ids"),
        ("fbgemm::block_bucketize_sparse_features", "ids"),
        ("void fbgemm_gpu::permute_pooled_embs_kernel<float>", "outputs"),
        ("autograd::engine::evaluate_function: All2All_Pooled_ReqBackward", "gradients"),
        ("ReduceScatterBase_WaitBackward", "gradients"),
        ("## SplitsAllToAllAwaitable wait() ##", "ids"),
        ("Optimizer.step#SGD.step", "optimizer"),
        ("torch::distributed::reducer::mul_out", "dense_backward"),
        # Kernels of FBGEMM 1.6 for CUDA 13.
        ("void split_embedding_codegen_forward_unweighted_v2_kernel<float, float, float, long>", "lookup_forward"),
        ("void bounds_check_indices_kernel_v2<long, false>", "lookup_forward"),
        ("void (anonymous namespace)::linearize_cache_indices_kernel<long, long, int>", "lookup_forward"),
        ("(anonymous namespace)::get_cache_indices_kernel", "lookup_forward"),
        ("void (anonymous namespace)::lxu_cache_lookup_kernel<long>", "lookup_forward"),
        ("void split_embedding_codegen_grad_indice_weights_kernel<float, float, float, long>", "lookup_backward"),
        ("void embedding_ops::grad_mean_vbe_kernel<float>", "lookup_backward"),
        ("split_rowwise_adagrad_update_kernel", "lookup_backward"),
        ("embedding_ops::split_embedding_backward_codegen_find_long_segments", "lookup_backward"),
        ("void fbgemm_gpu::permute_1D_data_kernel_vec<int, long, long>", "ids"),
        ("void fbgemm_gpu::delinearize_unique_index_kernel<long>", "ids"),
        ("void fbgemm_gpu::permute_multi_embs_kernel<float, false>", "outputs"),
        ("recat_copy_async_kernel", "gradients"),
        ("somebody_elses_kernel", None),
    ],
)  # fmt: skip
def test_names_of_ops_and_kernels_are_rows(name, part):
    assert getattr(match_kernel_name(name), "part", None) == part


@pytest.mark.parametrize(
    "name, collective",
    [
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "all_to_all"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "reduce_scatter"),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "all_gather"),
        ("ncclDevKernel_AllReduce_Sum_f32_TREE_LL(ncclDevKernelArgsStorage<4096ul>)", "all_reduce"),
        # Symmetric memory: NCCL 2.27 and newer.
        ("ncclSymkDevKernel_AllReduce_RSxLDMC_AGxSTMC_sum_f32(ncclSymkDevWorkArgs4K)", "all_reduce"),
        ("ncclSymkDevKernel_ReduceScatter_LL_sum_f16(ncclSymkDevWorkArgs4K)", "reduce_scatter"),
        ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)", "all_to_all"),
        # Of some collective: its launch tells which.
        ("ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)", None),
    ],
)
def test_kernels_of_nccl_name_their_collective(name, collective):
    assert NCCL_KERNEL.match(name) and match_collective(name) == collective


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("share", [0.3, 0.8, 0.97])
def test_a_trace_cut_short_tells_what_it_has(tmp_path, zipped, share):
    path = write(tmp_path, 0, gloo_step(), 1, zipped=zipped)
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[: int(share * size)])
    try:
        job = read_traced_job(tmp_path)
    except ShardCoreError as error:  # not even one step is left
        assert "rank-0" in str(error) and share < 0.9
    else:
        assert any("trace of rank 0 is cut short" in remark for remark in job.remarks)


def test_a_trace_cut_short_counts_as_far_as_whole_ones_show_that_it_is_whole(tmp_path):
    path = write(tmp_path, 0, gloo_step())
    write(tmp_path, 1, gloo_step())
    path.write_bytes(path.read_bytes()[: int(0.4 * path.stat().st_size)])
    job = read_traced_job(tmp_path)
    assert job.ranks == [1] and job.digests.keys() == {1}
    assert "trace of rank 0 does not count: no step of it is whole" in job.remarks
    assert not any("differ in collectives" in remark for remark in job.remarks)


def test_a_trace_of_one_rank_tells_all_but_waiting(tmp_path):
    write(tmp_path, 0, gloo_step())
    job = read_traced_job(tmp_path)
    assert job.remarks == (
        "traces of 1 of 2 ranks: rank 1 is missing; waiting for missing ranks counts as transfer",
    )
    assert job.steps[0].ranks[0].ms["outputs_transfer"] == pytest.approx(5.0, abs=0.1)


def of_ranks(folder, events, world_size=8, **of_third):
    for rank, own in events.items():
        write(folder, rank, own, world_size, **(of_third if rank == 2 else {}))
    return read_traced_job(folder)


WAITS_MS = (9.0, 8.5, 7.0, 0.0, 8.0, 9.5, 3.0, 8.8)


@pytest.mark.parametrize("seconds", [0, 5, -7200])
def test_an_exchange_takes_the_time_since_its_last_rank_began(tmp_path, seconds):
    """Seven of eight ranks wait most of the time. The clock of one may be off by seconds."""
    job = of_ranks(tmp_path, ranks_of(8, 0.4, WAITS_MS), base_ns=BASE_NS + 1_000_000_000 * seconds)
    assert job.remarks == ()
    for rank, waits_ms in zip(job.steps[0].ranks, WAITS_MS, strict=True):
        [sent] = rank.exchanges
        assert (sent.waiting_ms, sent.transfer_ms) == pytest.approx((waits_ms, 0.4), abs=0.01)
        assert sent.is_aligned


def test_missing_ranks_are_named_and_exchanges_are_not_aligned(tmp_path):
    events = ranks_of(8, 0.4, WAITS_MS)
    job = of_ranks(tmp_path, {rank: events[rank] for rank in (0, 1, 2, 5, 7)})
    assert job.remarks == (
        "traces of 5 of 8 ranks: ranks 3, 4, 6 are missing; waiting for missing ranks counts as transfer",
    )
    assert job.steps[0].missing_ranks_text == "ranks 3, 4, 6 are"
    for rank in job.steps[0].ranks:
        assert not any(sent.is_aligned for sent in rank.exchanges)
        assert rank.ms["outputs_transfer"] == pytest.approx(7.4, abs=0.01)  # rank 2 is the last one there


def test_where_clocks_are_not_known_the_rank_that_is_shortest_tells_the_transfer(tmp_path):
    events = ranks_of(3, 0.4, (9.0, 0.0, 5.0))
    for i, at_ms in enumerate((2.0, 9.0)):  # more exchanges, whose ends say otherwise
        for rank, apart in ((0, 0.0), (1, 7.0 * i), (2, 0.0)):
            events[rank] += [
                event("c10d::allreduce_", at_ms + apart, 0.1),
                event("gloo:all_reduce", at_ms + apart, 0.2, "user_annotation", 2),
            ]
    job = of_ranks(tmp_path, events, 3)
    assert any("clock of rank 1 is known to" in remark and "shortest" in remark for remark in job.remarks)
    for rank in job.steps[0].ranks:
        [sent] = (x for x in rank.exchanges if x.role == "outputs")
        assert sent.is_aligned and sent.transfer_ms == pytest.approx(0.4, abs=0.01)


def test_steps_that_overlap_end_where_the_next_one_begins_and_are_told(tmp_path):
    """A step of 12.4 ms whose annotation lasts 19.8."""
    events = []
    for number in (3, 4, 5):
        at_ms = 12.4 * number
        own = [e for e in gloo_step(at_ms=at_ms, number=number) if e["ts"] + e["dur"] <= 1e3 * (at_ms + 12.4)]
        events += [event(f"ProfilerStep#{number}", at_ms, 19.8, "user_annotation"), *own]
    write(tmp_path, 0, events, 1)
    job = read_traced_job(tmp_path)
    assert [(step.number, round(step.total_ms, 2)) for step in job.steps] == [(3, 12.4), (4, 12.4)]
    [remark] = job.remarks
    assert "ProfilerSteps that overlap the next one, by ms: {3: 7.4, 4: 7.4}" in remark
    assert "the last one, 5, does not count" in remark


def test_steps_that_other_ranks_lack_and_steps_without_ops_do_not_count(tmp_path):
    empty = [event("ProfilerStep#6", 100, 0.5, "user_annotation")]
    write(tmp_path, 0, gloo_step() + gloo_step(at_ms=30, number=4) + empty)
    write(tmp_path, 1, gloo_step() + gloo_step(at_ms=30, number=4) + gloo_step(at_ms=60, number=5))
    job = read_traced_job(tmp_path)
    assert [step.number for step in job.steps] == [3, 4]
    assert "steps [5] do not count, as not all ranks have them" in job.remarks
    assert "trace of rank 0 has steps without ops, which do not count: [6]" in job.remarks


def test_a_trace_of_empty_steps_alone_is_refused(tmp_path):
    write(tmp_path, 0, [event("ProfilerStep#6", 0, 5, "user_annotation"), event("aten::add", 9, 1)], 1)
    with pytest.raises(ShardCoreError, match=r"rank-0.trace.json has no ops within its steps \[6\]"):
        read_traced_job(tmp_path)


def test_a_second_trace_of_a_rank_leaves_another_one_missing(tmp_path):
    write(tmp_path, 0, gloo_step())
    write(tmp_path, 1, gloo_step(), distributedInfo={"rank": 0, "world_size": 2})
    remarks = read_traced_job(tmp_path).remarks
    assert "rank 0 has several traces; the last one counts" in remarks
    assert any("rank 1 is missing" in remark for remark in remarks)


def test_a_trace_without_collectives_tells_the_rest(tmp_path):
    write(tmp_path, 0, [e for e in gloo_step() if "c10d" not in e["name"] and "gloo" not in e["name"]], 1)
    job = read_traced_job(tmp_path)
    assert job.remarks == ("trace of rank 0 has no collectives: of exchanges it tells nothing",)
    assert job.steps[0].ranks[0].ms["lookup_forward"] == pytest.approx(4.0, abs=0.01)


def test_ranks_that_ran_other_collectives_are_named(tmp_path):
    write(tmp_path, 0, gloo_step())
    more = [event("c10d::allreduce_", 18, 0.1), event("gloo:all_reduce", 18, 0.1, "user_annotation", 2)]
    write(tmp_path, 1, gloo_step() + more)
    assert "all_reduce of reduce (rank 0: 0, rank 1: 1)" in " ".join(read_traced_job(tmp_path).remarks)


@pytest.mark.parametrize(
    "spoil, words",
    [
        (lambda folder: write(folder, 1, gloo_step(), world_size=4), "traces of jobs of 2 and 4 ranks"),
        (lambda folder: write(folder, 1, gloo_step(number=9)), "traces of no common step"),
        (
            lambda folder: write(folder, 1, gloo_step(), distributedInfo={"rank": 7, "world_size": 2}),
            "traces of ranks 0, 7; a job of 2 has 0 to 1",
        ),
        (
            lambda folder: [write(folder, rank, gloo_step(), world_size=10**15) for rank in (0, 1)],
            "a job of 1000000000000000 has .*, and 65,536 ranks at most",
        ),
        (lambda folder: shutil.rmtree(folder) or folder.mkdir(), "has no traces; it needs files"),
    ],
)
def test_traces_of_other_jobs_are_refused_in_one_line(tmp_path, spoil, words):
    folder = two_ranks(tmp_path / "job")
    spoil(folder)
    with pytest.raises(ShardCoreError, match=words):
        read_traced_job(folder)


@pytest.mark.parametrize(
    "content",
    [
        "", "{}", '{"traceEvents": 3}', '{"traceEvents": [', "not json", '{"traceEvents": [' + "[" * 100_000,
        '{"traceEvents": [{"ph": "X", "name": 3, "ts": "x", "dur": null}, 7, null]}',
        json.dumps({"traceEvents": [event("aten::add", 1, 0)]}),
        '{"traceEvents": [{"ts": ' + "9" * 5000 + "}]}",
    ],
)  # fmt: skip
def test_what_is_no_trace_is_refused_in_one_line(tmp_path, content):
    (tmp_path / "rank-0.trace.json").write_text(content)
    with pytest.raises(ShardCoreError, match="rank-0.trace.json"):
        read_traced_job(tmp_path)


def test_events_without_a_time_are_counted(tmp_path):
    broken = [
        {"ph": "X", "name": "a", "ts": "soon"},
        {"ph": "X", "ts": 1, "dur": -1, "name": "b"},
        {"ph": "X", "ts": 10**400, "name": "c"},
        {"ph": "X", "ts": float("nan"), "dur": 1, "name": "d"},
        {"ph": "X", "ts": 1, "dur": float("inf"), "name": "e"},
        event("ProfilerStep#4", 0, 1e15, "user_annotation"),
    ]
    write(tmp_path, 0, gloo_step() + broken, 1)
    assert (
        "trace of rank 0 has 6 events without a name or a possible time" in read_traced_job(tmp_path).remarks
    )


@pytest.mark.parametrize(
    "more, header",
    [
        ([event("ProfilerStep#9", 5, 0, "user_annotation")], {}),
        ([event("c10d::allreduce_", 19, 0.1, **{"Input Dims": [[1]], "Input type": [["float"]]})], {}),
        ([event("c10d::allreduce_", 19, 0.1, **{"In msg nelems": 1, "dtype": []})], {}),
        ([event("Memcpy DtoD", 19, 0.1, "kernel", correlation=[1])], {}),
        ([], {"deviceProperties": 3}),
        ([], {"distributedInfo": {"rank": True, "world_size": True}}),
    ],
)
def test_fields_of_other_kinds_are_left_out(tmp_path, more, header):
    write(tmp_path, 0, gloo_step() + more, 1, **header)
    [step] = read_traced_job(tmp_path).steps
    assert step.number == 3 and step.ranks[0].total_ms == pytest.approx(20.0)


@pytest.mark.parametrize(
    "sizes",
    [
        {"Input Dims": [[1], [10**18] * 40], "Input type": ["float", "float"]},
        {"Input Dims": [[-1], [-7]], "Input type": ["float", "float"]},
        {"In msg nelems": 10**400, "dtype": "Float"},
        {"In msg nelems": -(10**400), "dtype": "Float"},
    ],
)
def test_sizes_of_an_exchange_that_no_memory_has_are_bounded(tmp_path, sizes):
    events = gloo_step()
    for e in events:
        e["args"] |= sizes if e["name"].startswith("c10d::") else {}
    write(tmp_path, 0, events, 1)
    [exchange] = read_traced_job(tmp_path).steps[0].ranks[0].exchanges
    assert 0 <= exchange.n_bytes <= MOST_BYTES


def test_traces_of_which_none_can_be_read_have_a_line_each(tmp_path):
    for rank in (0, 1):
        (tmp_path / f"rank-{rank}.trace.json").write_text("{}")
    with pytest.raises(ShardCoreError) as info:
        read_traced_job(tmp_path)
    lines = str(info.value).split("\n")
    assert [f"rank-{rank}.trace.json" in line for rank, line in enumerate(lines)] == [True, True]


def test_a_trace_that_ends_before_its_ops_is_said_to_be_cut_short(tmp_path):
    path = write(tmp_path, 0, gloo_step(), 1)
    content = path.read_text()
    path.write_text(content[: content.index("[lookup]")])
    with pytest.raises(ShardCoreError, match="has no ops within its steps .* and is cut short"):
        read_traced_job(tmp_path)


def test_large_traces_are_read_in_bounded_memory(tmp_path):
    noise = [event("aten::view", 1000 + i, 0.1, "python_function", note="x" * 400) for i in range(20_000)]
    path = write(tmp_path, 0, gloo_step() + noise, 1)
    assert path.stat().st_size > 8 << 20
    tracemalloc.start()
    assert sum(1 for _ in KinetoFile(Path(path)).events()) > 20_000
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 8 << 20


def test_a_gzip_bomb_is_refused_with_its_file_size_and_limit(tmp_path):
    """128 MiB of spaces in 128 KiB."""
    path = tmp_path / "rank-0.trace.json.gz"
    packer = zlib.compressobj(9, wbits=31)
    with path.open("wb") as file:
        file.write(packer.compress(b'{"traceEvents": ['))
        for _ in range(8):
            file.write(packer.compress(b" " * (1 << 24)))
        file.write(packer.flush())
    size = path.stat().st_size
    words = f"{path} has {size:,} bytes and unpacks to more than {schema.LEAST_UNPACKED_BYTES:,} bytes"
    with pytest.raises(ShardCoreError, match=words):
        read_traced_job(tmp_path)


def test_gzip_of_very_many_parts_is_refused(tmp_path):
    """4 MB of empty parts took 10 s to read. A file in some hundred parts is read."""
    content = write(tmp_path, 0, gloo_step(), 1).read_bytes()
    (tmp_path / "rank-0.trace.json").unlink()
    path = tmp_path / "rank-0.trace.json.gz"
    path.write_bytes(b"".join(gzip.compress(content[i : i + 10]) for i in range(0, len(content), 10)))
    assert read_traced_job(tmp_path).steps[0].number == 3
    path.write_bytes(gzip.compress(b"") * 2_000 + gzip.compress(content))
    with pytest.raises(
        ShardCoreError, match=r"has [\d,]+ bytes and about 2,001 parts of gzip; it needs to have 1,0"
    ):
        read_traced_job(tmp_path)


def test_a_trace_that_packs_well_is_read(tmp_path):
    """30 to 1, more than traces do."""
    rng = random.Random(0)
    notes = [f"{rng.getrandbits(256):064x}{'x' * 1400}" for _ in range(12_000)]
    noise = [event("aten::view", 1000 + i, 0.1, "python_function", note=note) for i, note in enumerate(notes)]
    size = write(tmp_path, 0, gloo_step() + noise, 1, zipped=True).stat().st_size
    assert 25 < 18e6 / size < 45
    assert read_traced_job(tmp_path).steps[0].number == 3


def test_many_collectives_take_time_and_memory_in_proportion(tmp_path):
    """2,000 transfers among 2,000 ops: a table of transfers and moments would take 140 MB."""
    events = [event("ProfilerStep#3", 0, 2_000, "user_annotation")]
    for i in range(2_000):
        events += [
            event("aten::mul", i, 0.5),
            event("c10d::broadcast_", i + 0.6, 0.1),
            event("gloo:all_gather", i + 0.7, 0.2, "user_annotation", 2),
        ]
    write(tmp_path, 0, events, 1)
    tracemalloc.start()
    [rank] = read_traced_job(tmp_path).steps[0].ranks
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert rank.ms["other_transfer"] == pytest.approx(0.2 * 2_000, rel=0.02)
    assert peak_bytes < 60 << 20


def painted(begin, end, layers):
    """ms of each part, millisecond by millisecond: the last layer that covers one has it."""
    parts: dict[str, int] = {}
    for ms in range(begin, end):
        part = [part for a, b, part in layers if a <= ms < b][-1]
        parts[part] = parts.get(part, 0) + 1
    return parts


@pytest.mark.parametrize("seed", range(20))
def test_each_moment_of_overlapping_spans_belongs_to_the_topmost(seed):
    rng = random.Random(seed)

    def spans(n):
        return sorted((a, a + rng.randint(1, 60)) for a in (rng.randint(-5, 95) for _ in range(n)))

    host = [
        Span(a, b, rng.choice(["ids", "data", "optimizer"]), rng.random() < 0.5, "x") for a, b in spans(30)
    ]
    sent = [TracedCollective("all_to_all", "outputs", 0, a, b, a + rng.randint(0, 60)) for a, b in spans(30)]
    rank = divide_rank_step(0, StepSpans(3, 0, 100, host, [], sent), on_gpu=False)
    layers = [
        (0, 100, "unnamed"),
        *((s.begin_ms, s.end_ms, s.part) for s in host),
        *((c.begin_ms, c.transfer_begin_ms, "waiting") for c in sent),
        *((c.transfer_begin_ms, c.end_ms, "outputs_transfer") for c in sent),
        *((s.begin_ms, s.end_ms, s.part) for s in host if s.works),
    ]
    assert rank.ms == pytest.approx(painted(0, 100, layers))
    # Transfers of a moment share it.
    assert sum(x.exposed_ms for x in rank.exchanges) == pytest.approx(rank.ms.get("outputs_transfer", 0.0))


def test_many_collectives_that_all_overlap_are_divided():
    """50,000 layers, each of 50,000 moments."""
    n = 50_000
    sent = [TracedCollective("all_to_all", "outputs", 0, 1.0 * i, 1.0 * (n + i)) for i in range(n)]
    rank = divide_rank_step(0, StepSpans(3, 0.0, 2.0 * n, [], [], sent), on_gpu=False)
    assert rank.ms == pytest.approx({"outputs_transfer": 2.0 * n - 1, "unnamed": 1.0})


ANNOTATION = "user_annotation"


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize(
    "twin",
    [
        event("ProfilerStep#3", 0, 20, ANNOTATION, thread=9),  # of another thread
        event("ProfilerStep#3", 0, 20, ANNOTATION),
        event("ProfilerStep#3", 5, 1, ANNOTATION),  # within lookups
        event("ProfilerStep#3", 30, 15, ANNOTATION),
    ],
)
def test_of_several_annotations_of_a_step_the_longest_counts_once_and_they_are_told(tmp_path, twin, first):
    write(tmp_path / "one", 0, gloo_step(), 1)
    write(tmp_path / "two", 0, [twin, *gloo_step()] if first else [*gloo_step(), twin], 1)
    there, job = read_traced_job(tmp_path / "one"), read_traced_job(tmp_path / "two")
    assert job.steps == there.steps
    [remark] = job.remarks
    assert remark == "trace of rank 0 has several ProfilerSteps of number [3]: the longest of each counts"
