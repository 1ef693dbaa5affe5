"""Traces as torch.profiler writes them, made by hand."""

import gzip
import json

BASE_NS = 1_790_000_000_000_000_000


def event(name, begin_ms, ms, category="cpu_op", thread=1, **args):
    return {
        "ph": "X", "name": name, "cat": category, "pid": 7, "tid": thread,
        "ts": 1e3 * begin_ms, "dur": 1e3 * ms, "args": args,
    }  # fmt: skip


def gloo_step(late_ms=0.0, at_ms=0.0, number=3, entered=256):
    """A step of 20 ms on the CPU; lookups take longer by `late_ms`, so the other rank waits in the exchange.

    entered: numbers that the rank enters into the exchange.
    """
    lookup_ms, sizes = 4 + late_ms, {"Input Dims": [[100], [entered]], "Input type": ["float", "float"]}
    begins_ms = at_ms + 2 + lookup_ms
    ends_ms = at_ms + 11  # of the exchange, on both ranks
    return [
        event(f"ProfilerStep#{number}", at_ms, 20, "user_annotation"),
        event("## forward 8 ##", at_ms + 1, 12, "user_annotation"),
        event("[lookup]_[tables]_[column_wise]", at_ms + 2, lookup_ms, "user_annotation"),
        event("fbgemm::split_embedding_codegen_lookup_sgd_function", at_ms + 2, lookup_ms),
        event("All2All_Pooled_Req", begins_ms, 0.1),
        event("c10d::alltoall_base_", begins_ms, 0.1, **sizes),
        event("gloo:all_to_all", begins_ms, ends_ms - begins_ms, "user_annotation", thread=2),
        event("## EmbeddingBagCollectionAwaitable wait() ##", begins_ms + 0.1, 8.9 - lookup_ms, "user_annotation"),
        event("aten::linear", ends_ms, 2),
        event("## backward 8 ##", at_ms + 13, 6, "user_annotation"),
        event("torch::autograd::CppNode<SplitLookupFunction_sgd_Op_pt2>", at_ms + 13, 5),
        event("mylib::secret", at_ms + 19.2, 0.3),
    ]  # fmt: skip


def write(folder, rank, events, world_size=2, base_ns=BASE_NS, zipped=False, **header):
    header = {
        "baseTimeNanoseconds": base_ns,
        "distributedInfo": {"backend": "gloo", "rank": rank, "world_size": world_size},
    } | header
    folder.mkdir(exist_ok=True)
    path = folder / f"rank-{rank}.trace.json{'.gz' * zipped}"
    content = json.dumps({**header, "traceEvents": events, "traceName": "x"}).encode()
    path.write_bytes(gzip.compress(content) if zipped else content)
    return path


def ranks_of(ranks, own_ms, waits_ms):
    """Events of a step of 20 ms by rank. Each enters an exchange, and waits in it for the last rank to come.

    own_ms: ms of the exchange from then on. waits_ms: by rank; the last rank's is 0.
    """
    begins_ms = 14.0
    return {
        rank: [
            event("ProfilerStep#3", 0, 20, "user_annotation"),
            event("[lookup]_[tables]_[column_wise]", 1, 4, "user_annotation"),
            event("fbgemm::split_embedding_codegen_lookup_sgd_function", 1, 4),
            event("All2All_Pooled_Req", begins_ms - waits_ms[rank], 0.1),
            event("c10d::alltoall_base_", begins_ms - waits_ms[rank], 0.1),
            event(
                "gloo:all_to_all",
                begins_ms - waits_ms[rank],
                waits_ms[rank] + own_ms,
                "user_annotation",
                thread=2,
            ),
            event("torch::autograd::CppNode<SplitLookupFunction_sgd_Op_pt2>", 16, 3),
        ]
        for rank in range(ranks)
    }
