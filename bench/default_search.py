"""The default search on fresh problems: against every shipped search, and with more memory.

    python -m bench.default_search --problems 20 --evals 20000 --out rows.jsonl

Problem i is of one of four classes: pooled tables, sequences, several collections, few huge tables; on 4 to 64 devices,
under the H100 profile or given rates. Every search has as many evaluations. A row has the cost of each over the
default's, the default's parts, its cost with twice and four times the even share of memory, and its cost over the
proved bound. Costs are predicted.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bench import common
from bench.kept import with_memory_times
from shardcore import report
from shardcore.core.access_statistics import Zipf
from shardcore.core.errors import ShardCoreError
from shardcore.core.types import Problem, Setting, Table
from shardcore.cost.analytic import AnalyticModel
from shardcore.cost.profile import load_profile
from shardcore.search import SHARDERS, Budget
from shardcore.search.bound.lower_bound import prove_lower_bound

CLASSES, HARDWARE = ("pooled", "sequences", "collections", "huge"), "nvidia-h100-sxm"
MORE = 1e-3
"""Share by which a rival is cheaper, or a cost with more memory is higher, before it counts."""


def draw_problem_with_memory(i: int) -> Problem:
    """Draw problem i, with ample memory on every device."""
    rng, kind = np.random.default_rng([54, i]), CLASSES[i % 4]
    hosts, each = ((1, 4), (1, 8), (2, 8), (8, 8))[int(rng.integers(4))]
    n_tables = 11 if kind == "huge" else int(hosts * each * rng.uniform(1, 2.2)) + 4

    def draw_table(j: int) -> Table:
        rows = int(10 ** (rng.uniform(7, 8) if kind == "huge" else rng.uniform(2, 7)))
        dim, pooling = int(rng.choice([16, 32, 64, 128])), float(np.exp(rng.uniform(-1, 4)))
        sequence, of = kind == "sequences" and j % 3 == 0, "ab"[j % 2] if kind == "collections" else ""
        return Table(
            f"t{j}", rows, 32 if sequence else dim, pooling, Zipf(1.05), sequence=sequence, collection=of
        )

    topology = load_profile(HARDWARE).topology(hosts, each)
    many = replace(topology, devices=tuple(replace(d, memory_bytes=1 << 50) for d in topology.devices))
    return Problem(
        f"{i:02}-{kind}-{hosts}x{each}", tuple(map(draw_table, range(n_tables))), many, 1024 * hosts * each
    )


def search_costs(i: int, budget: Budget) -> dict[str, Any]:
    """Costs of all sharders' plans on problem i."""
    given, costs, parts = draw_problem_with_memory(i), dict[str, float](), 0
    model = (
        AnalyticModel(Setting(HARDWARE, given.global_batch)) if i % 2 else load_profile(HARDWARE).cost_model()
    )
    for name, times in (*((name, 4.0) for name in SHARDERS if name != "torchrec"), ("twice", 2.0)):
        problem = with_memory_times(given, times)
        try:
            # "twice" is the default with less memory.
            plan = SHARDERS.get(name, SHARDERS["portfolio"])(
                problem, model.for_problem(problem), budget=budget
            )
        except ShardCoreError as error:
            common.print_progress(problem.name, name, str(error)[:100])
            continue
        costs[name] = plan.provenance["predicted_ms"]
        parts = len(plan.placements) if name == "portfolio" else parts
    ample = with_memory_times(given, 4.0)
    least = prove_lower_bound(ample, model.for_problem(ample))
    return {
        "problem": given.name,
        "tables": len(given.tables),
        "parts": parts,
        "ms": costs,
        "proved_ms": least.proved_ms if least else np.nan,
    }


def results_table(rows: list[dict[str, Any]]) -> str:
    """Table with a row per problem: cost of the default search's plan, of its best rival's, and of the default's in
    half the memory.
    """
    shown = []
    for row in rows:
        ms = row["ms"]
        own, rivals = ms["portfolio"], {n: v for n, v in ms.items() if n not in ("portfolio", "twice")}
        best, less = min(rivals, key=rivals.__getitem__), ms.get("twice", np.inf)
        shown.append(
            (
                row["problem"],
                f"{row['tables']}",
                f"{row['parts']}",
                f"{own:.4g}",
                f"{best} {rivals[best] / own - 1:+.2%}",
                f"{less / own - 1:+.2%}",
                f"{own / row['proved_ms'] - 1:.1%}",
                "loses " * (rivals[best] < own * (1 - MORE)) + "rises" * (less < own * (1 - MORE)),
            )
        )
    return report.text_table(
        (
            "problem",
            "tables",
            "parts",
            "default, ms",
            "best rival",
            "with half the memory",
            "over the bound",
            "",
        ),
        shown,
    )


def main() -> None:
    parser = common.bench_parser(
        __doc__, problems=20, evals=20_000, out=(Path, "a line of JSON for each problem")
    )
    args = parser.parse_args()
    rows = common.read_rows(args.out)
    for i in range(len(rows), args.problems):
        rows.append(search_costs(i, Budget(evals=args.evals)))
        common.write_rows(args.out, rows)
    print(results_table(rows[: args.problems]))


if __name__ == "__main__":
    main()
