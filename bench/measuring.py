"""How much faster ShardCore measures than NeuroShard's published procedure, on the same groups, in one run.

The plain loop does what NeuroShard's collector does for each group: build an op with weights of its own, make its indices, run
it 5 times to warm up and 10 times timed, take the median, and drop it. It is never tuned. ShardCore's bench measures the same
groups until their median is known at least as well. Both on one device and one thread, in blocks that alternate, so that a
machine whose speed drifts treats them alike.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch

from shardcore import memory, report, sampling, streams, tables
from shardcore.measure import hardware, kernels, timing
from shardcore.types import ComputeRequest, Setting


def plain(request: ComputeRequest, device: str) -> tuple[list[float], float]:
    """The 10 totals in ms that NeuroShard's procedure takes of a group, and its seconds in kernels, warm-ups included."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen

    place = ((EmbeddingLocation.DEVICE, ComputeDevice.CUDA) if device == "cuda" else (EmbeddingLocation.HOST, ComputeDevice.CPU))
    op = SplitTableBatchedEmbeddingBagsCodegen([(s.rows, s.width, *place) for s in request.shards],
                                               optimizer=EmbOptimType.EXACT_SGD, device=torch.device(device))
    parts = [streams.shard_stream(s, request.batch) for s in request.shards]
    starts = np.cumsum([0] + [len(i) for i, _ in parts])
    offsets = np.concatenate([o[:-1] + a for (_, o), a in zip(parts, starts[:-1], strict=True)] + [starts[-1:]])
    ids = torch.from_numpy(np.concatenate([i for i, _ in parts])).to(device)
    ends = torch.from_numpy(offsets).to(device)
    gradient = torch.randn(request.batch, sum(s.width for s in request.shards), device=device)
    clock, totals = timing.clock_for(device), []
    for _ in range(15):
        begin = clock.mark()
        output = op(ids, ends)
        output.backward(gradient)
        totals += clock.elapsed_ms([begin, clock.mark()])
    return totals[5:], sum(totals) / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=64, help="groups to measure both ways (64)")
    parser.add_argument("--batch", type=int, default=2048, help="global batch (2048)")
    parser.add_argument("--block", type=int, default=32, help="groups in turn (32)")
    parser.add_argument("--max-bytes", type=int, default=1 << 32, help="weights of a group (4 GiB, NeuroShard's limit)")
    parser.add_argument("--seed", type=int, default=11)
    args = parser.parse_args()
    torch.set_num_threads(1)
    device = hardware.detect_device()
    setting = Setting(hardware.hardware_name(device), args.batch)
    pool = [t for t in tables.generate_pool() if t.pooling > 0]
    shape = sampling.GroupConfig(max_shards=15, row_ranges=0.0, any_width=0.0, duplicates=0.0)
    requests = []
    for i in range(100 * args.groups):
        request = sampling.compute_request(pool, i, setting, args.seed, shape)
        if sum(s.bytes for s in request.shards) <= args.max_bytes and len(requests) < args.groups:
            requests.append(request)
    began = time.perf_counter()
    bench = kernels.KernelBench(setting, device, kernels.KernelConfig(min_repeats=10, max_repeats=10))
    ours_s, plain_s, plain_kernel_s = time.perf_counter() - began, 0.0, 0.0
    known = {"plain": [], "ours": []}
    medians = {"plain": {}, "ours": {}}
    for i in range(0, len(requests), args.block):
        block = requests[i:i + args.block]
        began = time.perf_counter()
        for sample in bench.measure(block):
            known["ours"].append((sample.forward.q3_ms + sample.backward.q3_ms - sample.forward.q1_ms - sample.backward.q1_ms)
                                 / (sample.forward.median_ms + sample.backward.median_ms))
            medians["ours"][sample.request] = sample.forward.median_ms + sample.backward.median_ms
        ours_s += time.perf_counter() - began
        began = time.perf_counter()
        for request in block:
            totals, kernel_s = plain(request, device)
            spread = timing.spread(totals)
            known["plain"].append((spread.q3_ms - spread.q1_ms) / spread.median_ms)
            medians["plain"][request] = spread.median_ms
            plain_kernel_s += kernel_s
        plain_s += time.perf_counter() - began
    ratio = [medians["plain"][r] / medians["ours"][r] for r in requests]
    largest = max(sum(s.bytes for s in r.shards) for r in requests)
    print(f"{setting}; {len(requests)} groups of 1 to 15 tables, up to {memory.gib(largest)}\n")
    print(report.text_table(("", "plain loop", "ShardCore"), [
        ("samples a minute", f"{60 * len(requests) / plain_s:.0f}", f"{60 * len(requests) / ours_s:.0f}"),
        ("timed repeats a sample", "10", "10"),
        ("share of time in kernels", f"{plain_kernel_s / plain_s:.0%}", f"{bench.kernel_s / ours_s:.0%}"),
        ("interquartile range, median over samples", *(f"{np.median(known[k]):.1%}" for k in ("plain", "ours"))),
    ]))
    print(f"\nrate: {plain_s / ours_s:.1f} times the plain loop's; a plain median is {np.median(ratio):.2f} of ShardCore's "
          "(median; its caches are warm from the run before)")


if __name__ == "__main__":
    main()
