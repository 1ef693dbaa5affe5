"""Commands on a running job: read its traces, watch its folder, follow its moves, measure their rates."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from shardcore.cli import models
from shardcore.cli.commands import (
    IN_THE_JOB,
    FollowOptions,
    JobOptions,
    RatesOptions,
    ReadOptions,
    WatchOptions,
)
from shardcore.cli.progress_line import showing_progress
from shardcore.core.errors import ShardCoreError, Unreachable
from shardcore.core.validation import require
from shardcore.cost import composite
from shardcore.cost.model import CostModel
from shardcore.cost.move_rates import write_move_rates
from shardcore.cost.profile import write_profile
from shardcore.io import files, job_folder, traced_samples
from shardcore.plans import followed, store, traced_job
from shardcore.plans.replan import ReplanConfig
from shardcore.plans.traced_job import CheckedJob, ReadJob
from shardcore.report import follow_report, job_report

# --- read ---------------------------------------------------------------------------------------------------


def job_read(args: ReadOptions) -> None:
    for name, of, needed in (("out", "hardware", "out-profile"), ("out_profile", "model", "out")):
        require(
            not (getattr(args, name) and getattr(args, of)),
            f"--{name.replace('_', '-')} does not go with --{of}; use --{needed}",
        )
    model = models.load_cost_model(args.source) if args.source else None
    job = _read_job(args.folder, args)
    print(job_report.traced_step_text(job.traced))
    checked = None
    try:
        checked = _compare_with_model(job, model) if model else None
    finally:  # what traces tell without the model is said, too
        print(f"\n{job_report.bottleneck_sentence(job.traced.steps[-1])}")
        _print_remarks(job, checked)
    if checked:
        _write_corrections(args, checked)
    if model and args.append:
        folder = traced_samples.add_traced_sample(
            args.append, traced_job.traced_sample(job, model.setting.hardware)
        )
        print(f"{folder}: a traced step, which `train {args.append}` joins", file=sys.stderr)
    if checked and model and args.propose:
        _propose_plan(args, checked, model)


def _read_job(folder: Path, args: JobOptions) -> ReadJob:
    require((args.problem is None) == (args.plan is None), "--problem and --plan belong together; give both")
    problem = files.read_problem(args.problem) if args.problem else None
    plan = files.read_plan(args.plan, problem) if args.plan and problem else None
    with showing_progress(f"reading traces in {folder}"):
        return traced_job.read_job_traces(folder, problem, plan)


def _compare_with_model(job: ReadJob, model: CostModel) -> CheckedJob:
    """Compare a job's traced step with a cost model, print the comparison and return the result."""
    with showing_progress("comparing with the model"):
        checked = traced_job.check_traced_job(job, model)
    before = checked.before.cost
    predicted = job_report.prediction_text(
        job.traced.steps[-1], before, checked.after.cost, checked.problem.topology.ranks
    )
    print(f"\n{predicted}")
    print(f"\n{job_report.step_headline(job.total_ms, before.total_ms, checked.interval_ms)}")
    return checked


def _print_remarks(job: ReadJob, checked: CheckedJob | None) -> None:
    for line in (
        *job.remarks,
        *job.traced.remarks,
        *(checked.remarks if checked else ()),
        *job_report.balance_remarks(job),
    ):
        print(line, file=sys.stderr)
    if names := job_report.unrecognised_kernels_text(job.traced.steps[-1]):
        print(f"not recognised: {names}", file=sys.stderr)


def _write_corrections(args: ReadOptions, checked: CheckedJob) -> None:
    if args.out:
        composite.save_models(checked.model, args.out)
        print(f"{args.out}: corrected by the job's traces", file=sys.stderr)
    if args.out_profile:
        write_profile(args.out_profile, checked.model.profile)
        print(f"{args.out_profile}: corrected by the job's traces", file=sys.stderr)
    if args.out_problem:
        files.write_problem(args.out_problem, checked.problem)


def _propose_plan(args: ReadOptions, checked: CheckedJob, model: CostModel) -> None:
    with showing_progress("searching a better plan"):
        found = traced_job.propose_plan(checked, model, ReplanConfig(seed=args.seed, budget=args.budget()))
    now_ms = checked.after.cost.total_ms
    if found is None:
        print(f"no better plan was found; the plan in use takes {now_ms:.1f} ms")
        return
    (low, high), tables = found.interval_ms, [move.table for move in found.moved.moves]
    print(
        f"with the proposed plan {found.now.cost.total_ms:.1f} ms ({low:.1f} to {high:.1f}) in place of "
        f"{now_ms:.1f}: {found.gain}{', not worth it: within the error' * (not found.gain.exceeds_margin())}"
    )
    print(
        f"{len(tables)} tables move, {found.moved.bytes:,} bytes, about {found.seconds:.2f} s: "
        f"{', '.join(tables[:8])}{', ...' * (len(tables) > 8)}"
    )
    if args.out_plan:
        files.write_plan(args.out_plan, found.now.plan, checked.problem)


# --- watch --------------------------------------------------------------------------------------------------


def job_watch(args: WatchOptions) -> None:
    model = models.load_cost_model(args.source) if args.source else None
    known: set[str] = set()
    if not job_folder.complete_step_folders(args.folder):
        print(f"{args.folder} has no traced step of all ranks yet; waiting for one", file=sys.stderr)
    while not args.steps or len(known) < args.steps:
        for step in job_folder.complete_step_folders(args.folder):
            if step.name not in known:
                known.add(step.name)
                try:
                    job = _read_job(step, args)
                    checked = _compare_with_model(job, model) if model else None
                except ShardCoreError as error:  # a damaged step must not end the watch
                    print(f"{step.name}: {error}", file=sys.stderr)
                    continue
                print(f"{step.name}: {job_report.bottleneck_sentence(job.traced.steps[-1])}", flush=True)
                _print_remarks(job, checked)
        if not args.steps or len(known) < args.steps:
            time.sleep(args.seconds)


# --- follow -------------------------------------------------------------------------------------------------


def job_follow(args: FollowOptions) -> None:
    known: set[str] = set()
    while True:
        try:
            lines = _keyed_status_lines(args)
        except Unreachable as error:  # it may be back at the next look
            if args.once:
                raise
            lines = [(str(error), str(error))]
        for key, line in lines:
            if key not in known:
                known.add(key)
                print(line, flush=True)
        if args.once:
            return
        time.sleep(args.seconds)


def _keyed_status_lines(args: FollowOptions) -> list[tuple[str, str]]:
    """(key, line) pairs on the current plan and each job. A key changes whenever its line has news."""
    decision = store.current_decision(args.plans, args.name)
    lines = [(decision.id, follow_report.current_version_text(decision))]
    jobs = followed.read_reports(args.plans, args.name)
    if not jobs:
        lines.append(("", f"no job has reported yet. {IN_THE_JOB}"))
    for job in jobs:
        if isinstance(job, ShardCoreError):
            lines.append((str(job), str(job)))
            continue
        # More steps since the last event are no news.
        key = f"{job.job} {job.current} {job.events[-1:]}"
        lines.append((key, follow_report.job_text(job, time.time())))
        lines += [(f"{job.job} {e}", f"  {follow_report.event_text(e)}") for e in job.events]
        lines.append((f"{key} {decision.id}", f"  {follow_report.next_action_text(job, decision.current)}"))
    return lines


# --- rates --------------------------------------------------------------------------------------------------


def job_rates(args: RatesOptions) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        require(
            os.environ.get(name, "").isdecimal(),
            f"{name} is {os.environ.get(name)!r}; start this with torchrun, which sets it to a number",
        )
    require(int(os.environ["WORLD_SIZE"]) > 1, "WORLD_SIZE is 1; tables move between two ranks or more")
    import torch

    from shardcore.measure.hardware import require_device
    from shardcore.torchrec.moves.move_rates import MoveRatesConfig, measure_move_rates

    require_device(args.device)
    local = int(os.environ["LOCAL_RANK"])
    on = torch.device(args.device, local) if args.device == "cuda" else torch.device("cpu")
    if args.device == "cuda":
        torch.cuda.set_device(on)
    torch.distributed.init_process_group("nccl" if args.device == "cuda" else "gloo")
    try:
        found = measure_move_rates(
            on, int(os.environ["LOCAL_WORLD_SIZE"]), MoveRatesConfig(args.mib, args.repeats)
        )
        if torch.distributed.get_rank() == 0:
            write_move_rates(args.out, found)
            print(found)
    finally:
        torch.distributed.destroy_process_group()
