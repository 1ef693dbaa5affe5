"""The command that trains a policy: train-policy."""

from __future__ import annotations

import dataclasses
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated

from shardcore.cli.options import Group, Natural, Output, Positive, ProblemFile
from shardcore.cli.progress_line import showing_progress
from shardcore.core.progress import report
from shardcore.io.model_files import MODEL_WEIGHTS

command = Group()


@dataclass(frozen=True)
class TrainPolicyOptions:
    """Train a policy that places tables (DreamShard, AutoShard) against a cost model, on problems drawn from
    a pool, without any device. `plan --policy` uses it.

    name: dreamshard (as published, rewarded by a cost network of its own), dreamshard_direct (rewarded by the
      cost model) or autoshard (rewarded for even compute)
    model: folder of a trained cost model
    pool: tables to draw from, half of them kept for testing; default: the calibrated pool
    like: problem whose devices' speeds, hosts and links to take; default: --devices equal ones, without
      stated links
    min_tables: fewest tables of a problem
    max_tables: most tables of a problem
    max_dim: largest dim of a table
    problems: number of problems to learn from
    rounds: most rounds of training
    patience: rounds without a better plan before training stops
    out: folder to write
    """

    name: str
    _: KW_ONLY
    model: Path
    pool: Annotated[Path, "POOL.json"] | None = None
    like: ProblemFile | None = None
    devices: Positive = 4
    min_tables: Positive = 10
    max_tables: Positive = 60
    max_dim: Positive = 128
    problems: Positive = 60
    rounds: Positive = 30
    patience: Positive = 10
    seed: Natural = 0
    out: Annotated[Path, "POLICY", Output(("policy.json", MODEL_WEIGHTS))]


@command
def train_policy(args: TrainPolicyOptions) -> None:
    from shardcore.cost import neural
    from shardcore.io import files, model_files
    from shardcore.report.text import rounded_json
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
    with showing_progress() as line:

        def print_round(round_: int, values: dict[str, float]) -> None:
            report("training")
            line.print_line(
                f"round {round_}: {', '.join(f'{k} {v:.4g}' for k, v in values.items() if k != 'round')}"
            )

        report("drawing problems")
        trained = make_policy(args.name, pool, model, problems, config, like, print_round)
    meta = {**trained.policy.meta, "provenance": {"model_digest": model_files.model_digest(args.model)}}
    write_policy(args.out, dataclasses.replace(trained.policy, meta=meta))
    print(rounded_json(meta["metrics"]))
