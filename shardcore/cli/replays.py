"""The command replay: run plans for real, and show them against what a model predicted."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardcore.cli.options import command, natural, positive, positive_gib
from shardcore.cli.progress_line import shown
from shardcore.core.progress import report
from shardcore.core.types import Setting

if TYPE_CHECKING:
    from shardcore.io.measurements import StepSample
    from shardcore.step.lower import Workload


def add_commands(commands: argparse._SubParsersAction) -> None:
    p = command(
        commands,
        replay,
        "Run one training step of plans for real on this machine, in alternation, "
        "and time its parts per device.",
        folders={"append": ()},
    )
    p.add_argument("plans", type=Path, nargs="+", metavar="PLAN.json", help="plans of the same problem")
    p.add_argument("--problem", type=Path, required=True, metavar="PROBLEM.json")
    p.add_argument(
        "--model",
        type=Path,
        action="append",
        metavar="MODEL",
        help="show what this trained "
        "model predicts, too; where weights of tables differ in precision, give it for each",
    )
    p.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda where there is one")
    p.add_argument("--hardware", help="the setting's name of the device; default: its own")
    p.add_argument("--repeats", type=positive(int), default=50, help="steps of each plan that enter a median")
    p.add_argument(
        "--arena-gib", type=positive_gib, default=1.0, help="weights in memory a process, the largest shard"
    )
    p.add_argument(
        "--timeout-s", type=positive(float), default=120.0, help="a round of steps that takes longer has hung"
    )
    p.add_argument("--seed", type=natural, default=0, help="of the batches")
    p.add_argument(
        "--append",
        type=Path,
        metavar="DIR",
        help="keep the replays in this dataset too: "
        "training on it learns what exchanges take in steps; what it has of these plans is not "
        "run again",
    )
    p.add_argument("--out", type=Path, metavar="REPLAY.json", help="write all figures there")


def replay(args: argparse.Namespace) -> None:
    from shardcore.cost import composite
    from shardcore.cost.model import price
    from shardcore.io import dataset, files, replays, writing
    from shardcore.measure import hardware
    from shardcore.measure.replay import ReplayConfig, replay_all
    from shardcore.report.replay_report import replay_text
    from shardcore.step.lower import lower

    # Fail before reading files if the device is missing.
    device = args.device or hardware.detect_device()
    hardware.require_device(device)
    problem = files.read_problem(args.problem)
    name = args.hardware or hardware.hardware_name(device)
    setting = Setting(name, problem.global_batch, problem.precision, problem.optimizer)
    plans, workloads = [], []
    for path in args.plans:
        plans.append(files.read_plan(path, problem))
        with files.validating(path):
            workloads.append(lower(plans[-1], problem))
    predicted = None
    if args.model:
        model = composite.load(args.model).for_problem(problem)
        problem.require_setting(model.setting)
        predicted = [price(workload, model) for workload in workloads]

    def run(some: Sequence[Workload], *given: Any) -> list[StepSample]:
        report(f"running {len(some)} plans in {len(problem.topology)} processes, {config.repeats} steps each")
        return replay_all(some, *given)

    config = ReplayConfig(
        repeats=args.repeats,
        arena_bytes=int(args.arena_gib * 2**30),
        timeout_s=args.timeout_s,
        seed=args.seed,
    )
    if args.append:
        # Replays are kept by algorithm: a plan without one goes by its file.
        made = [
            (plan.provenance.get("algorithm", path.stem), plan)
            for path, plan in zip(args.plans, plans, strict=True)
        ]
        # The reference op shows how slow the machine is during the replays.
        reference = dataset.reference_op(args.append, setting)
        with shown():
            known = replays.append(
                args.append,
                problem,
                made,
                setting,
                config,
                lambda w: run(w, setting, config, device, reference),
            )
        costs = [known[replays.plan_digest(plan)] for plan in plans]
    else:
        with shown():
            costs = run(workloads, setting, config, device)
    body = {
        "setting": files.setting_to_json(setting),
        "replays": [
            {
                "plan": str(path),
                "total_ms": cost.total_ms,
                **dataclasses.asdict(cost),
                "memory_bytes": list(workload.memory_bytes),
                **({"predicted_ms": predicted[i].total_ms} if predicted else {}),
            }
            for i, (path, cost, workload) in enumerate(zip(args.plans, costs, workloads, strict=True))
        ],
    }
    if args.out:
        writing.write_json(args.out, body)
    print(replay_text([str(path) for path in args.plans], costs, predicted))
    if any(cost.oversubscribed for cost in costs):
        print(
            f"oversubscribed: {len(problem.topology)} processes on fewer cores measure the scheduler too",
            file=sys.stderr,
        )
