"""Are the bytes that `lower` says the bytes that TorchRec sends? Collectives counted in its real processes.

    python -m bench.traffic --models 200 --out traffic.jsonl

Each model is drawn: one to three collections, pooled, pooled with weights, or of sequences. Their tables have
one to three features, and share some. Weights are FP32 or FP16. Ids have 32 or 64 bits. Outputs and gradients
travel in FP32, FP16 or BF16. (On CPU, TorchRec sends FP16 for BF16.) The plan has all kinds of sharding.
DistributedModelParallel runs one step of it on 2 or 4 gloo processes. Every collective passes a
TorchDispatchMode, which counts what a rank puts in and gets out. Those counts are compared with a Workload
that was made for the same ids: rank by rank, each exchange of each collection by itself, to the byte.

A line of --out is a model. Run again, it goes on from there. Exits 1 if a byte differs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from bench import common
from bench.common import say
from shardcore import report
from shardcore.core.job import Job
from shardcore.core.payloads import payload_of
from shardcore.core.types import Table

sys.path.append(str(Path(__file__).parents[1] / "tests" / "torchrec"))

import counted_traffic
from drawn_collections import drawn

_SPECIAL: dict[str, Callable[[Table], bool]] = {
    "weights of lookups": lambda t: t.weighted,
    "sequences": lambda t: t.sequence,
    "tables of several features": lambda t: t.features > 1,
}
"""What tables of a model may have, in the report's words."""


def _is_short(job: Job) -> bool:
    return min(payload_of(p).share for p in (job.forward_payload, job.backward_payload)) < 1


def main() -> None:
    parser = common.parser(__doc__, models=(200, "to draw"), out=(..., "a line of JSON for each model"))
    args = parser.parse_args()
    done = {row["seed"]: row for row in common.lines_of(args.out)}
    for seed in range(args.models):
        if seed in done:
            continue
        model = drawn(seed)
        done[seed] = {
            "seed": seed,
            "devices": len(model.problem.topology),
            "tables": len(model.problem.tables),
            "collections": len(model.collections),
            "kinds": sorted({p.kind for p in model.plan.placements}),
            "differences": counted_traffic.differences(seed),
        }
        common.write_lines(args.out, list(done.values()))
        say(f"{len(done)} of {args.models}")
    rows = [done[seed] for seed in range(args.models)]
    problems = {row["seed"]: drawn(row["seed"]).problem for row in rows}
    groups = {"any": rows}
    for kind in sorted({kind for row in rows for kind in row["kinds"]}):
        groups[kind] = [r for r in rows if kind in r["kinds"]]
    groups["several collections"] = [r for r in rows if r["collections"] > 1]
    for name, has in _SPECIAL.items():
        groups[name] = [r for r in rows if any(map(has, problems[r["seed"]].tables))]
    groups["payloads of 16 bits"] = [r for r in rows if _is_short(problems[r["seed"]].job)]
    groups["weights in FP32 and FP16"] = [r for r in rows if "+" in problems[r["seed"]].precision]
    shown = [(name, len(some), sum(not r["differences"] for r in some)) for name, some in groups.items()]
    print(report.text_table(("models with", "models", "to the byte"), shown))
    for row in rows:
        for words in row["differences"]:
            print(f"model {row['seed']}: {words}")
    sys.exit(any(row["differences"] for row in rows))


if __name__ == "__main__":
    main()
