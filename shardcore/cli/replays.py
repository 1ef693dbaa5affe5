"""The command replay: run plans for real, and show them against what a model predicted."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence

from shardcore.cli.commands import ReplayOptions
from shardcore.cli.models import load_model_for_problem
from shardcore.cli.progress_line import showing_progress
from shardcore.core.progress import report
from shardcore.core.types import Setting
from shardcore.cost.model import price
from shardcore.io import dataset, files, replays, writing
from shardcore.io.dataset import ReferenceOp
from shardcore.io.measurements import StepSample
from shardcore.measure import hardware
from shardcore.measure.replay import replay_all
from shardcore.measure.transport import Transport
from shardcore.report.replay_report import replay_text
from shardcore.step.lower import Workload, lower


def replay(args: ReplayOptions) -> None:
    # Fail before reading files if the device is missing.
    device = args.device or hardware.detect_device()
    hardware.require_device(device)
    problem = files.read_problem(args.problem)
    name = args.hardware or hardware.hardware_name(device)
    setting = Setting(name, problem.global_batch, problem.precision, problem.optimizer)
    plans, workloads = [], []
    for path in args.plans:
        plans.append(files.read_plan(path, problem))
        with files.name_file_in_errors(path):
            workloads.append(lower(plans[-1], problem))
    model = load_model_for_problem(args.model, problem) if args.model else None
    predicted = [price(workload, model) for workload in workloads] if model else None

    def run_replays(some: Sequence[Workload], reference: ReferenceOp | None = None) -> list[StepSample]:
        report(f"running {len(some)} plans in {len(problem.topology)} processes, {config.repeats} steps each")
        return replay_all(some, setting, config, Transport(device), reference)

    config = dataclasses.replace(args.config, arena_bytes=int(args.arena_gib * 2**30))
    with showing_progress():
        if args.append:
            # Replays are kept by algorithm. A plan without one is named by its file.
            named_plans = [
                (plan.provenance.get("algorithm", path.stem), plan)
                for path, plan in zip(args.plans, plans, strict=True)
            ]
            # The reference op shows the machine's slowdown during the replays.
            reference = dataset.reference_op(args.append, setting)
            known = replays.add_missing_replays(
                args.append, problem, named_plans, setting, config, lambda w: run_replays(w, reference)
            )
            costs = [known[replays.plan_digest(plan)] for plan in plans]
        else:
            costs = run_replays(workloads)
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
