"""Losses of robust plans where a profile's rates are wrong, beside those of plans for the rates as they are.

    python -m bench.robust --problems 50 --out robust.jsonl

Problems of 8 to 64 devices of a profile's card, on hosts of 8. `robust` chooses a plan by draws of the profile. All
plans are then judged by other draws, with another seed. A plan is searched under each of these with the whole budget,
so that regret counts from about the best that there is. All costs are predicted by profiles: nothing is measured here.

A line of --out is a problem. Run again, it goes on from there.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from bench import common
from bench.common import say
from shardcore import report
from shardcore.core.types import Problem
from shardcore.cost.model import total_ms
from shardcore.cost.profile import Profile, load_profile
from shardcore.io import files
from shardcore.search.budget import Budget
from shardcore.search.robust import RobustConfig, robust
from shardcore.search.sharders import DEFAULT_SHARDER, SHARDERS
from shardcore.step.lower import lower
from shardcore.tables.generate import generate_pool

PER_HOST = 8
KINDS = ("pooled", "sequences", "both")


def drawn(i: int, seed: int, profile: Profile) -> Problem:
    """Problem i: tables of the generated pool, of the widths that are trained on GPUs."""
    rng, kind = np.random.default_rng([seed, i]), KINDS[i % len(KINDS)]
    n = int(rng.choice([8, 16, 32, 64]))
    live = [t for t in generate_pool() if t.pooling > 0]
    tables = []
    for j, k in enumerate(rng.choice(len(live), n * int(rng.integers(2, 9)))):
        sequence = kind == "sequences" or (kind == "both" and rng.random() < 0.2)
        pooling = float(rng.choice([1, 10, 50])) if sequence else live[k].pooling
        dim = int(rng.choice([32, 64, 128, 256]))
        tables.append(replace(live[k], name=f"t{j}", dim=dim, pooling=pooling, sequence=sequence))
    topology = profile.topology(n // PER_HOST, PER_HOST)
    return Problem(f"{kind}-{i}", tuple(tables), topology, 1024 * n, "rowwise_adagrad")


def judged(
    problem: Problem, seeds: Sequence[int], profile: Profile, judges: int, config: RobustConfig, evals: int
) -> dict:
    """Regrets of the plans of a problem. seeds: of all draws, then the problem's number."""
    search, budget, seed = SHARDERS[DEFAULT_SHARDER], Budget(evals=evals), seeds[0]
    own = profile.model().for_problem(problem)
    total = Budget(evals=evals * 2 * config.searches)
    began_s = time.process_time()
    chosen = robust(problem, own, seed=seed, budget=total, config=config)
    robust_s = time.process_time() - began_s
    plain, longer = (search(problem, own, seed=seed, budget=b) for b in (budget, total))
    longer_s = time.process_time() - began_s - robust_s
    rng, regrets = np.random.default_rng([*seeds, 1]), []
    for _ in range(judges):
        model = profile.drawn(rng).model().for_problem(problem)
        best = search(problem, model, seed=seed, budget=total)
        ms = np.array([total_ms(lower(p, problem), model) for p in (plain, longer, chosen, best)])
        regrets.append((ms[:3] / ms.min() - 1).tolist())
    told = chosen.provenance["robust"]
    return {
        "problem": problem.name,
        "tables": len(problem.tables),
        "devices": len(problem.topology),
        "own_worst": [told["of_cheapest"]["worst_regret"], told["worst_regret"]],
        "dearer": told["dearer"],
        "removes": told["measuring_removes"],
        "seconds": [longer_s, robust_s],
        "regrets": regrets,
    }


def summary(rows: Sequence[dict]) -> str:
    """Regrets of three plans: of one search under the rates, of one with the budget of all, and the robust one."""
    regrets = np.array([row["regrets"] for row in rows])  # [problems, judges, 3]
    lines = [
        ("worst draw, mean of problems", regrets.max(1).mean(0)),
        ("worst draw of all problems", regrets.max((0, 1))),
        ("mean of draws and problems", regrets.mean((0, 1))),
    ]
    shown = [[name, *(f"{100 * x:.2f}%" for x in values)] for name, values in lines]
    dearer = np.array([row["dearer"] for row in rows])
    campaigns = {name: np.mean([row["removes"][name] for row in rows]) for name in rows[0]["removes"]}
    table = report.text_table(("regret", "one search", "one, as long as all", "robust"), shown)
    by_worth = sorted(campaigns.items(), key=lambda pair: -pair[1])
    removes = ", ".join(f"{name} {100 * x:.0f}%" for name, x in by_worth)
    return (
        f"{len(rows)} problems\n{table}\n\nrobust plans cost {100 * dearer.mean():.2f}% more than the cheapest under "
        f"the profile's own rates (at most {100 * dearer.max():.2f}%)\n"
        f"a measurement would remove, of the regret: {removes}\n"
        f"seconds of the processor, both plain searches and robust: {np.mean([row['seconds'] for row in rows], 0)}"
    )


def main() -> None:
    parser = common.parser(
        __doc__,
        problem=(str, "a file, in place of drawn problems"),
        problems=50,
        seed=2026,
        hardware=("nvidia-h100-sxm", "profile"),
        judges=(16, "draws that judge"),
        draws=(32, "draws that choose"),
        searches=(8, "of these, under which a plan is searched"),
        evals=(2_000, "of each search"),
        out=...,
    )
    args = parser.parse_args()
    profile, rows = load_profile(args.hardware), common.lines_of(args.out)
    config = RobustConfig(draws=args.draws, searches=args.searches)
    for i in range(len(rows), 1 if args.problem else args.problems):
        problem = files.read_problem(args.problem) if args.problem else drawn(i, args.seed, profile)
        rows.append(judged(problem, (args.seed, i), profile, args.judges, config, args.evals))
        common.write_lines(args.out, rows)
        say(rows[-1]["problem"], np.max(rows[-1]["regrets"], 0).round(4), rows[-1]["own_worst"])
    print(summary(rows))


if __name__ == "__main__":
    main()
