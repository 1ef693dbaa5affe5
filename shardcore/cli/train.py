"""Commands that train: train, train-policy. They need torch, which a report does not."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from shardcore.cli.commands import TrainOptions, TrainPolicyOptions
from shardcore.cli.measurements import dataset_settings
from shardcore.cli.progress_line import showing_progress
from shardcore.core import progress
from shardcore.core.validation import require
from shardcore.cost import accuracy, known_errors, neural, study, training
from shardcore.cost.fit_config import FitConfig
from shardcore.cost.profile import load_profile
from shardcore.io import files, model_files
from shardcore.report.text import rounded_json
from shardcore.search.learned import training as policy_training
from shardcore.search.learned.policy import write_policy
from shardcore.stages import train as stage
from shardcore.tables.generate import generate_pool


def train(args: TrainOptions) -> None:
    # Samples of different settings must not train one model. The first folder's are this machine's.
    settings = dataset_settings(args.datasets[0])
    chosen = [
        s
        for s in settings
        if all(
            getattr(args, k) in (None, getattr(s, k)) for k in ("hardware", "batch", "precision", "optimizer")
        )
    ]
    require(
        len(chosen) == 1,
        f"{args.datasets[0]}: samples for "
        f"[{'; '.join(map(str, settings))}]; "
        "choose one with --hardware, --batch, --precision and --optimizer",
    )
    data, start = training.read_training_data(args.datasets[0], chosen[0], args.datasets[1:]), None
    if args.start is not None:
        start = neural.load(args.start) if Path(args.start).is_dir() else load_profile(args.start)
    with showing_progress("training") as line:
        trained = stage.train(data, FitConfig(seed=args.seed), line, start)
        progress.report("judging the model")
        judged = study.judge_test_split(trained.model, data.known)
    neural.save(trained.model, args.out)
    print(
        f"{args.out}: {known_errors.model_label(trained.model)}",
        accuracy.accuracy_summary(judged),
        sep="\n",
        file=sys.stderr,
    )
    print(rounded_json(judged))


def train_policy(args: TrainPolicyOptions) -> None:
    model = neural.load(args.model)
    like = files.read_problem(args.like).topology if args.like else None
    pool = files.read_pool(args.pool) if args.pool else generate_pool()
    problems = policy_training.PolicyProblems(
        devices=args.devices,
        min_tables=args.min_tables,
        max_tables=args.max_tables,
        max_dim=args.max_dim,
        problems=args.problems,
    )
    with showing_progress() as line:

        def print_round(round_: int, values: dict[str, float]) -> None:
            progress.report("training")
            line.print_line(
                f"round {round_}: {', '.join(f'{k} {v:.4g}' for k, v in values.items() if k != 'round')}"
            )

        progress.report("drawing problems")
        config = policy_training.PolicyConfig(rounds=args.rounds, patience=args.patience, seed=args.seed)
        trained = policy_training.make_policy(args.name, pool, model, problems, config, like, print_round)
    meta = {**trained.policy.meta, "provenance": {"model_digest": model_files.model_digest(args.model)}}
    write_policy(args.out, dataclasses.replace(trained.policy, meta=meta))
    print(rounded_json(meta["metrics"]))
