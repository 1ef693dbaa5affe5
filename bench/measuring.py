"""How much faster ShardCore measures than NeuroShard's published procedure: same groups, same run, same
precision of the median.

The plain loop does what NeuroShard's collector does for each group: build an op with weights of its own, make
its indices, run it 5 times to warm up and 10 times timed, take the median, and drop it. It is never tuned.
ShardCore's bench measures the same groups with --repeats. Both on one device and one thread, and all groups
in several passes in alternation, so that each tells how far two medians of a group, taken minutes apart,
disagree: that is the precision which is compared. (What a loop's own repeats say of it is worth little: taken
within a fraction of a second, they share the machine's momentary slowdown.)
"""

from __future__ import annotations

import itertools
import resource
import time

import numpy as np
import torch

from bench import common
from shardcore import report
from shardcore.core.types import Setting
from shardcore.io.measurements import ComputeRequest
from shardcore.measure import devices, hardware, kernels, timing
from shardcore.measure.sampling.groups import GroupConfig, compute_request, reference_request
from shardcore.step import memory
from shardcore.tables import streams
from shardcore.tables.generate import generate_pool


def plain(request: ComputeRequest, device: str) -> tuple[list[float], float]:
    """The 10 totals in ms that NeuroShard's procedure takes of a group, and its seconds in kernels, warm-ups
    included."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    place = (
        (EmbeddingLocation.DEVICE, ComputeDevice.CUDA)
        if device == "cuda"
        else (EmbeddingLocation.HOST, ComputeDevice.CPU)
    )
    op = SplitTableBatchedEmbeddingBagsCodegen(
        [(s.rows, s.width, *place) for s in request.shards],
        optimizer=EmbOptimType.EXACT_SGD,
        device=torch.device(device),
    )
    parts = [streams.shard_stream(s, request.batch) for s in request.shards]
    starts = np.cumsum([0] + [len(i) for i, _ in parts])
    offsets = np.concatenate(
        [o[:-1] + a for (_, o), a in zip(parts, starts[:-1], strict=True)] + [starts[-1:]]
    )
    ids = torch.from_numpy(np.concatenate([i for i, _ in parts])).to(device)
    ends = torch.from_numpy(offsets).to(device)
    gradient = torch.randn(request.batch, sum(s.width for s in request.shards), device=device)
    clock, totals = devices.device_of(device), []
    for _ in range(15):
        begin = clock.mark()
        output = op(ids, ends)
        output.backward(gradient)
        totals += clock.elapsed_ms([begin, clock.mark()])
    return totals[5:], sum(totals) / 1e3


def main() -> None:
    parser = common.parser(
        __doc__,
        groups=(100, "groups to measure both ways"),
        passes=(2, "times that each way measures all groups"),
        repeats=(6, "of ShardCore's"),
        batch=(2048, "global batch"),
        max_bytes=(1 << 32, "weights of a group (4 GiB, NeuroShard's limit)"),
        seed=11,
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    device = hardware.detect_device()
    setting = Setting(hardware.hardware_name(device), args.batch)
    pool = [t for t in generate_pool() if t.pooling > 0]
    shape = GroupConfig(
        max_shards=15,
        max_width=128,
        row_ranges=0.0,
        any_width=0.0,
        duplicates=0.0,
        planned=0.0,
        replicated=0.0,
    )
    drawn = (compute_request(pool, i, setting, args.seed, shape) for i in range(100 * args.groups))
    requests = list(
        itertools.islice((r for r in drawn if sum(s.bytes for s in r.shards) <= args.max_bytes), args.groups)
    )
    before = _resident_bytes()
    began = time.perf_counter()
    bench = kernels.KernelBench(
        setting,
        device,
        kernels.KernelConfig(min_repeats=args.repeats, max_repeats=args.repeats),
        reference_request(pool, setting, shape),
    )
    bench.reference_ms = bench.calibrate(requests[:16])
    ours_s, plain_s, plain_kernel_s, resident = time.perf_counter() - began, 0.0, 0.0, 0
    plain_ms, ours_ms = ({r: [] for r in requests} for _ in range(2))
    for _ in range(args.passes):
        began = time.perf_counter()
        for sample in bench.measure(requests):
            if sample.request in ours_ms:
                ours_ms[sample.request].append(sample.total_ms)
        ours_s += time.perf_counter() - began
        resident = resident or _resident_bytes()
        began = time.perf_counter()
        for request in requests:
            totals, kernel_s = plain(request, device)
            plain_ms[request].append(timing.spread(totals).median_ms)
            plain_kernel_s += kernel_s
        plain_s += time.perf_counter() - began
    measured = args.passes * len(requests)
    largest = max(sum(s.bytes for s in r.shards) for r in requests)
    print(
        f"{setting}; {len(requests)} groups of 1 to 15 tables, up to {memory.gib(largest)}, "
        f"{args.passes} passes\n"
    )
    print(
        report.text_table(
            ("", "plain loop", "ShardCore"),
            [
                ("samples a minute", f"{60 * measured / plain_s:.0f}", f"{60 * measured / ours_s:.0f}"),
                ("timed repeats a sample", "10", str(args.repeats)),
                (
                    "share of time in kernels",
                    f"{plain_kernel_s / plain_s:.0%}",
                    f"{bench.kernel_s / ours_s:.0%}",
                ),
                (
                    "share of time in runs that enter a median",
                    f"{plain_kernel_s * 10 / 15 / plain_s:.0%}",
                    f"{bench.kept_s / ours_s:.0%}",
                ),
                (
                    "two medians of a group differ by: median",
                    *(f"{np.median(_differences(ms)):.1%}" for ms in (plain_ms, ours_ms)),
                ),
                (
                    "two medians of a group differ by: 90%",
                    *(f"{np.quantile(_differences(ms), 0.9):.1%}" for ms in (plain_ms, ours_ms)),
                ),
            ],
        )
    )
    ratio = [np.median(plain_ms[r]) / np.median(ours_ms[r]) for r in requests]
    print(
        f"\nrate: {plain_s / ours_s:.1f} times the plain loop's. A plain median is {np.median(ratio):.2f} "
        "of ShardCore's (its "
        f"caches are warm from the run before).\nmemory: {memory.gib(resident - before)} more than before, "
        f"of them {memory.gib(bench.config.arena_bytes)} arena; largest group {memory.gib(largest)}."
    )


def _differences(medians_ms: dict[ComputeRequest, list[float]]) -> np.ndarray:
    return np.array([abs(b / a - 1) for ms in medians_ms.values() for a, b in itertools.pairwise(ms)])


def _resident_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
