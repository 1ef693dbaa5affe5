"""Does a plan take as much memory as is counted? Peaks of a training step in TorchRec's real processes.

    python -m bench.memory --plans 20 --out memory.jsonl
    python -m bench.memory --modules 40 --out modules.jsonl

Each plan is drawn, of all kinds of sharding: weights take most of its memory, or ids, or outputs, or none
does. Some tables have two features. A third of the plans have a collection of sequences too.
DistributedModelParallel trains it under TrainPipelineSparseDist on 2 gloo processes, or on 4 as two hosts.
`torch.profiler` records what every tensor takes, weights and optimizer state included. The peak of warm steps
is compared with what `memory` counts, and with what TorchRec's own storage estimator does.

With --modules, models have a dense part of drawn widths, and train under each of TorchRec's pipelines in turn.
The count has the dense part's memory as `measured_job` finds it. Beside it is TorchRec's, with what its
HeuristicalStorageReservation reserves for the dense part and for ids; its share of a device's memory left out.

A line of --out is a plan. Run again, it goes on from there. Exits 1 if a count is off by more than is
promised (ABOVE, BELOW).
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bench import common
from shardcore import report
from shardcore.core.types import Plan, Problem
from shardcore.step import memory
from shardcore.torchrec.sharding_plan import to_torchrec

sys.path.append(str(Path(__file__).parents[1] / "tests" / "torchrec"))

import peaks

# --- TorchRec's own count ---------------------------------------------------------------------------------


PIPELINES = {"none": "TRAIN_BASE", "prefetch": "TRAIN_PREFETCH_SPARSE_DIST"}
"""Names of TorchRec's PipelineType. TRAIN_SPARSE_DIST for others: its estimator knows no more."""


def estimated(problem: Problem, plan: Plan) -> list[int]:
    """[D] bytes by TorchRec's EmbeddingStorageEstimator for a GPU.

    It counts outputs too, and nothing of what a TorchRec planner reserves.
    """
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.planner import Topology as TheirTopology
    from torchrec.distributed.planner.shard_estimators import EmbeddingStorageEstimator
    from torchrec.distributed.planner.types import ParameterConstraints, ShardingOption
    from torchrec.distributed.planner.types import Shard as TheirShard
    from torchrec.distributed.planner.utils import build_sharder_data_map, sharder_name
    from torchrec.distributed.types import PipelineType

    n, fused = len(problem.topology), replace(problem, job=replace(problem.job, replica_optimizer=None))
    model, sharders = peaks.Model(problem), (EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder())
    sharded = to_torchrec(plan, problem, model, "cpu").plan
    pooling = {t.name: [t.pooling / t.features] * t.features for t in problem.tables}
    options = []
    for table in problem.tables:
        path = "sequences" if table.sequence else "tables"
        module, sharding = getattr(model, path), sharded[path][table.name]
        spec = getattr(sharding.sharding_spec, "shards", None)
        shards = (
            [TheirShard(list(s.shard_sizes), list(s.shard_offsets), rank=s.placement.rank()) for s in spec]
            if spec
            else [TheirShard([table.rows, table.dim], [0, 0], rank=r) for r in range(n)]
        )
        [parameter] = (x for name, x in module.named_parameters() if name.split(".")[-2] == table.name)
        # By this it knows the optimizer's state. Only replicas have one by name.
        parameter._optimizer_classes = [peaks._optimizer_class(problem if not spec else fused)]
        options.append(
            ShardingOption(
                name=table.name,
                tensor=parameter,
                module=(path, module),
                input_lengths=pooling[table.name],
                batch_size=problem.local_batch,
                sharding_type=sharding.sharding_type,
                partition_by="device",
                compute_kernel=sharding.compute_kernel,
                shards=shards,
            )
        )
    theirs = TheirTopology(
        world_size=n, compute_device="cuda", local_world_size=n // len(problem.topology.hosts)
    )
    EmbeddingStorageEstimator(
        theirs,
        {name: ParameterConstraints(pooling_factors=p) for name, p in pooling.items()},
        pipeline_type=PipelineType[PIPELINES.get(problem.job.pipeline, "TRAIN_SPARSE_DIST")],
        run_embedding_at_peak_memory=True,
    ).estimate(options, build_sharder_data_map({sharder_name(x.module_type): x for x in sharders}))
    found = [0] * n
    for option in options:
        for shard in option.shards:
            found[shard.rank] += shard.storage.hbm
    return found


def reserved(problem: Problem, widths: Sequence[int]) -> int:
    """Bytes that TorchRec's HeuristicalStorageReservation keeps on a device for the dense part and ids.

    Its share of a device's memory is 0.
    """
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.planner import Topology as TheirTopology
    from torchrec.distributed.planner.storage_reservations import HeuristicalStorageReservation
    from torchrec.distributed.planner.types import ParameterConstraints

    most = 1 << 40
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        reservation = HeuristicalStorageReservation(percentage=0.0)
    left = reservation.reserve(
        TheirTopology(world_size=len(problem.topology), compute_device="cuda", hbm_cap=most),
        problem.local_batch,
        peaks.Model(problem, widths),
        [EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()],
        {
            t.name: ParameterConstraints(pooling_factors=[t.pooling / t.features] * t.features)
            for t in problem.tables
        },
    )
    return most - left.devices[0].storage.hbm


COUNTS = {"counted": "used_bytes", "TorchRec": "torchrec_bytes"}


def modules(seeds: Sequence[int], out: Path) -> list[dict[str, Any]]:
    """A row for each drawn model with a dense part, measured unless `out` has it."""
    done = {row["seed"]: row for row in common.lines_of(out)}
    waiting = [seed for seed in seeds if seed not in done]
    for at in range(0, len(waiting), AT_ONCE):
        some = waiting[at : at + AT_ONCE]
        found = peaks.measured([peaks.drawn_module(seed) for seed in some])
        done |= {seed: {"seed": seed, "steps_bytes": steps} for seed, steps in zip(some, found, strict=True)}
        common.write_lines(out, list(done.values()))
    rows = []
    for seed in seeds:
        problem, (_, plan, widths) = peaks.counted_module(seed), peaks.drawn_module(seed)
        row = done[seed] | peaks.counted_of(problem, plan, done[seed]["steps_bytes"])
        theirs = reserved(problem, widths)
        dense = f"{memory.gib(problem.job.dense_bytes + problem.job.activation_bytes)} dense"
        rows.append(
            row
            | {"torchrec_bytes": [n + theirs for n in estimated(problem, plan)]}
            | {"pipeline": problem.job.pipeline, "kinds": [dense, *row["kinds"]]}
        )
    return rows


AT_ONCE = 5
"""Models that are trained one after the other by the same processes."""


def main() -> None:
    parser = common.parser(
        __doc__,
        plans=(20, "to draw"),
        modules=(0, "models with a dense part to draw, in place of plans"),
        first=(0, "number of the first plan"),
        out=(Path("memory.jsonl"), "a line of JSON for each plan"),
    )
    args = parser.parse_args()
    if args.modules:
        rows = modules(range(args.first, args.first + args.modules), args.out)
        show(rows)
        for name in {row["pipeline"]: None for row in rows}:
            of = [row for row in rows if row["pipeline"] == name]
            each = [share for row in of for share in peaks.off(row, "used_bytes")]
            print(f"{name}: {min(each):+.1%} to {max(each):+.1%}, {np.median(each):+.1%} in the median")
    else:
        rows = plans(range(args.first, args.first + args.plans), args.out)
        show(rows)
    below, above = (MODULE_BELOW, MODULE_ABOVE) if args.modules else (peaks.BELOW, peaks.ABOVE)
    sys.exit(any(not -below <= share <= above for row in rows for share in peaks.off(row, "used_bytes")))


MODULE_ABOVE, MODULE_BELOW = 0.05, 0.01
"""Distances of a count from the peak that are allowed with a dense part, as shares of it."""


def plans(seeds: Sequence[int], out: Path) -> list[dict[str, Any]]:
    """A row for each drawn plan, measured unless `out` has it."""
    done = {row["seed"]: row for row in common.lines_of(out)}
    for shape in dict.fromkeys(peaks.SHAPES):
        waiting = [s for s in seeds if s not in done and peaks.SHAPES[s % len(peaks.SHAPES)] == shape]
        done |= {row["seed"]: row for row in (peaks.compared(waiting) if waiting else ())}
        common.write_lines(out, list(done.values()))
    # Counted again: the code may have changed since it was measured.
    rows = [done[seed] | peaks.counted(seed, done[seed]["steps_bytes"]) for seed in seeds]
    for row in rows:
        row["torchrec_bytes"] = estimated(*peaks.drawn(row["seed"]))
    return rows


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print the fullest device of each row, and how far counts are off on all devices."""
    shown = []
    for row in rows:
        fullest = int(np.argmax(row["peak_bytes"]))
        kinds = ", ".join(row["kinds"]) + ("; sequences" if row["sequences"] else "")
        shown.append(
            (
                row["problem"],
                kinds,
                row["phases"][fullest],
                memory.gib(row["peak_bytes"][fullest]),
                *(f"{peaks.off(row, count)[fullest]:+.1%}" for count in COUNTS.values()),
            )
        )
    print(report.text_table(("plan", "kinds", "phase", "peak of the fullest", *COUNTS), shown))
    for name, count in COUNTS.items():
        each = [share for row in rows for share in peaks.off(row, count)]
        below, above = (MODULE_BELOW, MODULE_ABOVE) if "pipeline" in rows[0] else (peaks.BELOW, peaks.ABOVE)
        within = sum(-below <= share <= above for share in each)
        print(
            f"{name}: {min(each):+.1%} to {max(each):+.1%}, {np.median(each):+.1%} in the median; "
            f"{within} of {len(each)} devices within limits"
        )
    apart = [max(each) / min(each) - 1 for row in rows for each in row["steps_bytes"]]
    print(f"steps of a device differ by {np.median(apart):.1%} in the median, {max(apart):.1%} at most")
    for name, of in (("least", min), ("median", np.median)):
        each = [
            n / of(steps) - 1
            for row in rows
            for n, steps in zip(row["used_bytes"], row["steps_bytes"], strict=True)
        ]
        print(f"counted, against the {name} of the steps: {min(each):+.1%} to {max(each):+.1%}")


if __name__ == "__main__":
    main()
