"""The command that trains a policy: train-policy."""

from __future__ import annotations

import dataclasses

from shardcore.cli.commands import TrainPolicyOptions
from shardcore.cli.progress_line import showing_progress
from shardcore.core.progress import report
from shardcore.cost import neural
from shardcore.io import files, model_files
from shardcore.report.text import rounded_json
from shardcore.search.learned.policy import write_policy
from shardcore.search.learned.training import PolicyConfig, PolicyProblems, make_policy
from shardcore.tables.generate import generate_pool


def train_policy(args: TrainPolicyOptions) -> None:
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
    with showing_progress() as line:

        def print_round(round_: int, values: dict[str, float]) -> None:
            report("training")
            line.print_line(
                f"round {round_}: {', '.join(f'{k} {v:.4g}' for k, v in values.items() if k != 'round')}"
            )

        report("drawing problems")
        config = PolicyConfig(rounds=args.rounds, patience=args.patience, seed=args.seed)
        trained = make_policy(args.name, pool, model, problems, config, like, print_round)
    meta = {**trained.policy.meta, "provenance": {"model_digest": model_files.model_digest(args.model)}}
    write_policy(args.out, dataclasses.replace(trained.policy, meta=meta))
    print(rounded_json(meta["metrics"]))
