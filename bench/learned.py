"""Learned policies against search: the same unseen problems, the same cost model, one run, one thread.

    python -m bench.learned MODEL --out OUT --devices 4 --problems 50
    python -m bench.learned MODEL --out OUT --transfer

MODEL is a folder as `python -m shardcore train` writes it. Problems are those of bench/search.py. Half of the
pool's tables are for training policies; problems to compare on have only tables of the other half. Policies
are kept in OUT, one folder a policy: killed, it goes on.

Without a flag: sharders on problems of --devices. Policies are trained on --trained-on devices (4). Costs are
relative to anneal_columns (the default search, 500,000 evaluations), the mean over the problems that all
solved. "greedy" is the best of the four orders. A number is a budget in evaluations. Seconds are of the
processor.

--transfer: policies trained on 20 tables × 4 devices, asked for 100 × 4 and 40 × 8, and others trained there.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from bench import common
from bench.common import print_progress
from bench.peers import PEERS
from bench.search import draw_problems
from shardcore import report
from shardcore.core.topology import Topology
from shardcore.core.types import Plan, Problem, Table
from shardcore.cost import neural
from shardcore.cost.neural import NeuralModel
from shardcore.measure.sampling.problems import ProblemConfig, draw_problem
from shardcore.search import SHARDERS, Budget, sharder
from shardcore.search.greedy import ORDERS
from shardcore.search.learned.policy import NETS, Policy, read_policy, write_policy
from shardcore.search.learned.training import PolicyConfig, train_policy
from shardcore.stages import evaluate
from shardcore.tables.generate import generate_pool
from shardcore.tables.held_out import is_held_out

TRAIN, VALIDATION, SEED = 60, 15, 2026
FEW, CUTS_MANY = 8, "dreamshard_direct"
"""On more devices only this policy cuts columns: the beam runs it on hundreds of states."""
SIZES = {"20 x 4": (20, 4), "100 x 4": (100, 4), "40 x 8": (40, 8)}


def train_and_test_tables() -> tuple[list[Table], list[Table]]:
    """Pool of tables, split into tables for training and for testing."""
    pool = generate_pool()
    return tuple([t for t in pool if is_held_out(t, one_of=2) == testing] for testing in (False, True))


def problems_of_size(
    model: NeuralModel, tables: Sequence[Table], size: tuple[int, int], n: int, seed: int
) -> list[Problem]:
    """Draw n problems of `size` (tables, devices), with dims up to 128."""
    shape = ProblemConfig(size[1], size[0], size[0], slack=2.0)
    drawn = [draw_problem(tables, i, model.setting, seed, shape) for i in range(n)]
    return [replace(p, topology=Topology(p.topology.devices, **common.LINKS)) for p in drawn]


def load_or_train_policy(
    name: str, kind: str, out: Path, draw: Callable[[int, int], list[Problem]], model: NeuralModel
) -> Policy:
    """Load a trained policy from `out`, or train and store one. draw(n, seed): training problems."""
    folder = out / f"{name}, {kind}"
    if not (folder / "policy.json").exists():
        began = time.process_time()
        trained = train_policy(
            name, draw(TRAIN, SEED + 1), draw(VALIDATION, SEED + 2), model, PolicyConfig()
        ).policy
        seconds = time.process_time() - began
        write_policy(
            folder,
            replace(
                trained, meta={**trained.meta, "metrics": {**trained.meta["metrics"], "seconds": seconds}}
            ),
        )
    found = read_policy(folder)
    print_progress(f"{folder.name}: {found.meta['metrics']}")
    return found


def compare_policies(args: argparse.Namespace, model: NeuralModel) -> None:
    to_learn, testing = train_and_test_tables()
    trained = [
        load_or_train_policy(
            name,
            f"{args.trained_on} devices",
            args.out,
            lambda n, seed: draw_problems(model, n, args.trained_on, seed, pool=to_learn),
            model,
        )
        for name in NETS
    ]
    arms: dict[str, Callable[[Problem], Plan]] = {
        "random": lambda p: SHARDERS["random"](p, model),
        "greedy": lambda p: min(
            (SHARDERS[n](p, model) for n in ORDERS), key=lambda plan: plan.provenance["predicted_ms"]
        ),
    }
    for one in trained:
        for cut in ("", "_columns"):
            if cut and args.devices > FEW and one.name != CUTS_MANY:
                continue  # minutes a problem
            search = sharder(one.name + cut, one)
            arms[one.name + cut] = lambda p, search=search: search(p, model)
    arms["neuroshard"] = lambda p: SHARDERS["neuroshard"](p, model)
    arms["milp"] = lambda p: PEERS["milp"](p, model)
    annealing = SHARDERS["anneal_columns"]
    arms |= {
        f"anneal_columns, {n:,}": lambda p, n=n: annealing(p, model, budget=Budget(evals=n))
        for n in (2_000, 20_000)
    }
    arms["anneal_columns"] = lambda p: annealing(p, model)
    drawn = draw_problems(model, args.problems, args.devices, SEED, pool=testing)
    for arm in arms.values():  # compiled and imported before the clock starts
        arm(draw_problems(model, 1, 2, 0)[0])
    cost, seconds = ({name: [] for name in arms} for _ in range(2))
    for i, problem in enumerate(drawn):
        for name, arm in arms.items():
            plan, took_s = common.timed_plan(arm, problem)
            cost[name].append(plan.provenance["predicted_ms"] if plan else np.nan)
            seconds[name].append(took_s)
        print_progress(f"problem {i + 1} of {len(drawn)}: {len(problem.tables)} tables")
    found = evaluate.compute_standings(cost, seconds, "anneal_columns")
    print(
        f"{model.setting}; {len(drawn)} unseen problems of {args.devices} devices; policies of "
        f"{args.trained_on} devices\n"
    )
    print(
        report.text_table(
            ("sharder", "solved", "cost", "worst", "seconds"),
            [
                (name, f"{s.solved:.0%}", f"{s.cost:.3f}", f"{s.worst:.2f}", f"{s.seconds:.3f}")
                for name, s in found.items()
            ],
        )
    )


def compare_transfer(args: argparse.Namespace, model: NeuralModel) -> None:
    to_learn, testing = train_and_test_tables()
    rows = []
    for name in args.policies:
        own = {
            kind: load_or_train_policy(
                name,
                kind,
                args.out,
                lambda n, seed, size=size: problems_of_size(model, to_learn, size, n, seed),
                model,
            )
            for kind, size in SIZES.items()
        }
        for kind in list(SIZES)[1:]:
            drawn = problems_of_size(model, testing, SIZES[kind], args.problems, SEED)
            greedy = np.array(
                [min(SHARDERS[n](p, model).provenance["predicted_ms"] for n in ORDERS) for p in drawn]
            )
            ms = {
                of: np.array([sharder(name, own[of])(p, model).provenance["predicted_ms"] for p in drawn])
                for of in ("20 x 4", kind)
            }
            moved, home = (float(np.mean(ms[of] / greedy)) for of in ("20 x 4", kind))
            rows.append(
                (
                    name,
                    kind,
                    f"{moved:.3f}",
                    f"{home:.3f}",
                    f"{100 * float(np.mean(ms['20 x 4'] / ms[kind]) - 1):+.1f}%",
                )
            )
    print(f"{model.setting}; {args.problems} unseen problems a row; cost over the best greedy order's\n")
    print(report.text_table(("policy", "asked for", "trained on 20 x 4", "trained on that", "drop"), rows))


def main() -> None:
    parser = common.bench_parser(
        __doc__,
        {"model": "folder of a trained model"},
        out=(..., "folder that keeps trained policies"),
        problems=50,
        devices=4,
        trained_on=4,
        transfer=False,
    )
    parser.add_argument("--policies", nargs="+", default=list(NETS), choices=list(NETS), help="of --transfer")
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = neural.load(args.model)
    (compare_transfer if args.transfer else compare_policies)(args, model)


if __name__ == "__main__":
    main()
