"""The command that trains a policy: train-policy."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from shardcore.cli.options import command, natural, positive
from shardcore.cli.progress_line import shown
from shardcore.core.progress import report
from shardcore.io.model_files import MODEL_WEIGHTS


def add_commands(commands: argparse._SubParsersAction) -> None:
    p = command(
        commands,
        train_policy,
        "Train a policy that places tables (DreamShard, AutoShard) against a "
        "cost model, on problems drawn from a pool. No device takes part. `plan --policy` uses it.",
        folders={"out": ("policy.json", MODEL_WEIGHTS)},
    )
    p.add_argument(
        "name",
        help="dreamshard (as published: a cost network of its own rewards it), "
        "dreamshard_direct (the cost model does) or autoshard (even compute does)",
    )
    p.add_argument("--model", type=Path, required=True, help="folder of a trained cost model")
    p.add_argument(
        "--pool",
        type=Path,
        metavar="POOL.json",
        help="tables to draw from, half of them kept for testing; default: the calibrated pool",
    )
    p.add_argument(
        "--like",
        type=Path,
        metavar="PROBLEM.json",
        help="take speeds, hosts and links of the "
        "devices from this problem; default: --devices equal ones, without stated links",
    )
    p.add_argument("--devices", type=positive(int), default=4)
    p.add_argument("--min-tables", type=positive(int), default=10, help="of a problem")
    p.add_argument("--max-tables", type=positive(int), default=60, help="of a problem")
    p.add_argument("--max-dim", type=positive(int), default=128, help="of a table")
    p.add_argument("--problems", type=positive(int), default=60, help="to learn from")
    p.add_argument("--rounds", type=positive(int), default=30, help="of training, at most")
    p.add_argument(
        "--patience",
        type=positive(int),
        default=10,
        help="rounds without a better plan before training stops",
    )
    p.add_argument("--seed", type=natural, default=0)
    p.add_argument("--out", type=Path, required=True, metavar="POLICY", help="folder to write")


def train_policy(args: argparse.Namespace) -> None:
    from shardcore.cost import neural
    from shardcore.io import files, model_files
    from shardcore.search.learned.policy import write_policy
    from shardcore.search.learned.training import PolicyConfig, PolicyProblems, make_policy
    from shardcore.tables.generate import generate_pool

    model = neural.load(args.model)
    like = files.read_problem(args.like).topology if args.like else None
    pool = files.read_pool(args.pool) if args.pool else generate_pool()
    problems = PolicyProblems(
        devices=args.devices,
        min_tables=args.min_tables,
        max_tables=args.max_tables,
        max_dim=args.max_dim,
        problems=args.problems,
    )
    config = PolicyConfig(rounds=args.rounds, patience=args.patience, seed=args.seed)
    with shown() as line:

        def say_round(round_: int, values: dict[str, float]) -> None:
            report("training")
            line.say(
                f"round {round_}: {', '.join(f'{k} {v:.4g}' for k, v in values.items() if k != 'round')}"
            )

        report("drawing problems")
        trained = make_policy(args.name, pool, model, problems, config, like, say_round)
    meta = {**trained.policy.meta, "provenance": {"model_digest": model_files.model_digest(args.model)}}
    write_policy(args.out, dataclasses.replace(trained.policy, meta=meta))
    print(json.dumps(meta["metrics"], indent=1))
