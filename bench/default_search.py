"""The default search on fresh problems: against every shipped search, and with more memory.

    python -m bench.default_search --problems 20 --evals 20000 --out rows.jsonl

Problem i is of one of four classes: pooled tables, sequences, several collections, few huge tables; on 4 to 64 devices,
under the H100 profile or given rates. Every search has as many evaluations. A row has the cost of each over the
default's, the default's parts, its cost with twice and four times the even share of memory, and its cost over the
proved bound. Costs are predicted.

    python -m bench.default_search --each columns --problems 300 --evals 3000 --out regrets.jsonl

One cut for 2 to 4 offered machines (plans/one_cut.py): the same tables, at batch 65,536 under row-wise Adagrad, on 4 to
64 drawn cards of the shipped profiles. A row has what each machine loses to the one cut, or why it has no plan.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import partial
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
from shardcore.cost.profile import load_profile, profile_names
from shardcore.plans.one_cut import plan_each
from shardcore.search import SHARDERS, Budget
from shardcore.search.bound.lower_bound import prove_lower_bound
from shardcore.search.decisions.provision import Offer

CLASSES, HARDWARE = ("pooled", "sequences", "collections", "huge"), "nvidia-h100-sxm"
MACHINES = ((1, 4), (1, 8), (2, 8), (8, 8))
"""Hosts, and devices of each."""
REGRETS = (0.01, 0.02, 0.05, 0.1, 0.2)
MORE = 1e-3
"""Share by which a rival is cheaper, or a cost with more memory is higher, before it counts."""


def draw_problem_with_memory(i: int) -> Problem:
    """Draw problem i, with ample memory on every device."""
    rng, kind = np.random.default_rng([54, i]), CLASSES[i % 4]
    hosts, each = MACHINES[int(rng.integers(4))]
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


def draw_offers(i: int) -> list[Offer]:
    """Draw the offered machines of problem i."""
    rng, cards = np.random.default_rng([61, i]), [name for name in profile_names() if name != "cpu"]
    return [
        Offer(
            f"{k}-{card}-{hosts}x{each}",
            each,
            load_profile(card).memory_bytes,
            price_per_hour=1.0,
            hardware=card,
            most_hosts=hosts,
        )
        for k in range(int(rng.integers(2, 5)))
        for hosts, each in [MACHINES[int(rng.integers(4))]]
        for card in [str(rng.choice(cards))]
    ]


def one_cut_regrets(i: int, budget: Budget, same: str) -> dict[str, Any]:
    """Regret of one cut on each drawn machine. same: see one_cut.MUST_MATCH."""
    problem = replace(draw_problem_with_memory(i), global_batch=65_536, optimizer="rowwise_adagrad")
    offers, found = draw_offers(i), []
    models = {offer.hardware: load_profile(offer.hardware).cost_model() for offer in offers}
    # A problem that no machine can hold has nothing to compare.
    with suppress(ShardCoreError):
        found = plan_each(problem, offers, models, partial(SHARDERS["portfolio"], budget=budget), same)
    return {
        "problem": problem.name,
        "own_ms": {x.proposal.name: own_ms for x, own_ms in found},
        "regret": {x.proposal.name: x.ms / own_ms - 1 for x, own_ms in found if x.found},
        "why": {x.proposal.name: str(x.error) for x, _ in found if x.error},
    }


def regrets_text(rows: list[dict[str, Any]]) -> str:
    """Table of the worst regrets of problems that some machine can hold, by class and of all."""
    worst = {
        kind: np.array(
            [max(row["regret"].values()) for row in rows if kind in row["problem"] and row["regret"]]
        )
        for kind in (*CLASSES, "")
    }
    return report.text_table(
        ("class", "problems", *(f"<= {share:.0%}" for share in REGRETS), "mean", "worst", "with a refusal"),
        [
            (kind or "all", f"{len(of)}", *(f"{(of <= share).mean():.1%}" for share in REGRETS))
            + (f"{of.mean():.1%}", f"{of.max():.1%}")
            + (f"{sum(bool(row['why']) for row in rows if kind in row['problem'])}",)
            for kind, of in worst.items()
            if len(of)
        ],
    )


def main() -> None:
    parser = common.bench_parser(
        __doc__,
        problems=20,
        evals=20_000,
        each=(str, "what is the same on all machines: columns, replicas or kinds"),
        out=(Path, "a line of JSON for each problem"),
    )
    args = parser.parse_args()
    rows = common.read_rows(args.out)
    for i in range(len(rows), args.problems):
        measure = partial(one_cut_regrets, same=args.each) if args.each else search_costs
        rows.append(measure(i, Budget(evals=args.evals)))
        common.write_rows(args.out, rows)
    print((regrets_text if args.each else results_table)(rows[: args.problems]))


if __name__ == "__main__":
    main()
