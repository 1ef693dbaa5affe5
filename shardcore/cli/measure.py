"""The command measure: measures the samples that a folder lacks, on this machine, in a supervised process."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from shardcore.cli.declarations import Flat
from shardcore.cli.options import (
    DatasetFolder,
    Group,
    Natural,
    Optimizer,
    Output,
    Positive,
    PositiveFloat,
    PositiveGib,
    Precision,
)
from shardcore.core.errors import ShardCoreError
from shardcore.core.types import PRECISION_BYTES, Problem, Setting
from shardcore.core.validation import Wait, within
from shardcore.measure.config import KernelConfig
from shardcore.measure.sampling import MOST_DRAWS, MOST_RANKS
from shardcore.measure.sampling.groups import GroupConfig

if TYPE_CHECKING:
    from shardcore.cost.profile import Profile
    from shardcore.io.measurements import CollectiveRequest, CollectiveSample, ComputeRequest
    from shardcore.measure.replay import ReplayConfig
    from shardcore.measure.supervise import Finished, Supervisor

command = Group()

_ESTIMATE_S = 5.0
"""Seconds of measuring on which a dry run bases its estimate."""
_CALIBRATE_S = 5.0
"""Seconds of measuring the reference op's ms, if the folder has no timing of it."""
_PROGRESS_S = 5.0
"""Seconds between two lines of progress."""
_STATES = 4
"""Rows of optimizer state, over the rows of the largest table. The tables of an op that have more share them."""


@dataclass(frozen=True, kw_only=True)
class MeasureOptions:
    """Measure fused embedding ops on this machine's device; a rerun goes on where the last one ended.

    device: auto: cuda if there is a GPU, else cpu
    minutes: time to spend on ops, including start and end
    samples: stop after the first N different draws; 0: measure no ops; default: when the time is up
    again: measure the first N draws again, even if they are known, to show how far timings agree
    out: dataset folder; it only grows
    pool: tables to draw from; default: the calibrated pool
    batch: global batch; default: 2048 on cpu, 65536 on cuda
    precision: precision of the weights
    hardware: name of the device in the setting; default: its product name
    arena_gib: memory for weights, and so the largest shard that is measured; default: 1 on cpu; on cuda,
      weights and optimizer state take half of the free memory
    chunk: samples that are written at once; a kill loses at most these and those that run
    hang_s: time without a finished op after which the measuring process is replaced, and its group recorded
      as failed
    ranks: processes (GPUs) of an exchange or a step
    exchanges: afterwards measure the first M exchanges among --ranks of this machine, into the same dataset
    steps: afterwards replay a step of each of the first P plans among --ranks, for the times of exchanges in
      steps
    held_out: draw groups only from the tables that are kept for testing, a twentieth of all
    dry_run: show what is missing and how long it will take, from some seconds of measuring; write nothing
    """

    device: Literal["auto", "cpu", "cuda"] = "auto"
    minutes: PositiveFloat = 10.0
    samples: Annotated[Natural, "N"] | None = None
    again: Annotated[Natural, "N"] = 0
    out: Annotated[DatasetFolder, Output(())]
    pool: Annotated[Path, "POOL.json"] | None = None
    batch: Positive | None = None
    precision: Precision = "fp32"
    optimizer: Optimizer = "exact_sgd"
    hardware: str | None = None
    arena_gib: PositiveGib | None = None
    groups: Annotated[GroupConfig, Flat(("max_shards", "max_width", "sequences"))] = GroupConfig()
    kernels: Annotated[KernelConfig, Flat(("tolerance", "max_repeats", "interleave"))] = KernelConfig()
    chunk: Positive = 64
    hang_s: Wait = 60.0
    ranks: Annotated[int, within(1, MOST_RANKS)] = 2
    exchanges: Annotated[int, within(0, MOST_DRAWS), "M"] = 0
    steps: Annotated[int, within(0, MOST_DRAWS), "P"] = 0
    held_out: bool = False
    dry_run: bool = False
    seed: Natural = 0


@command
def measure(args: MeasureOptions) -> None:
    from shardcore.io import dataset, files, replays
    from shardcore.measure import hardware, run
    from shardcore.measure.device_bench import BenchSpec
    from shardcore.measure.devices import device_of
    from shardcore.measure.local_workers import LocalTransport
    from shardcore.measure.replay import of_samples
    from shardcore.measure.sampling.groups import compute_request, reference_request
    from shardcore.measure.sampling.steps import first_step_plans
    from shardcore.measure.supervise import Supervisor
    from shardcore.tables.generate import PoolConfig, generate_pool
    from shardcore.tables.held_out import kept_for_testing

    began = time.monotonic()
    device = hardware.detect_device() if args.device == hardware.AUTO else args.device
    hardware.require_device(device)
    setting = Setting(
        args.hardware or hardware.hardware_name(device),
        args.batch or device_of(device).batch,
        args.precision,
        args.optimizer,
    )
    profile = profile_of_card(device)
    arena_bytes = int(args.arena_gib * 2**30) if args.arena_gib else _arena_bytes(setting, device)
    pool = files.read_pool(args.pool) if args.pool else generate_pool(PoolConfig())
    live = run.tables_with_lookups(pool)
    config = replace(args.kernels, arena_bytes=arena_bytes, state_rows=_STATES * max(t.rows for t in live))
    groups = replace(args.groups, max_shard_bytes=config.arena_bytes)
    if args.exchanges or args.steps:
        _require_ranks(args, setting, device)
    wanted = run.wanted_exchanges(setting, args.exchanges, args.ranks, args.seed)
    exchanges = list(run.lacking(wanted, dataset.read_ids(args.out, "comm")))
    of_steps = of_samples(arena_bytes, args.hang_s)
    steps = (
        replays.missing(
            args.out,
            first_step_plans(live, args.steps, setting, args.ranks, of_steps.arena_bytes, args.seed),
            setting,
        )
        if args.steps
        else []
    )
    known = dataset.read_ids(args.out, "compute")
    disturbed = known & dataset.disturbed_ids(args.out, config.tolerance_on(device))
    drawn = [t for t in live if kept_for_testing(t)] if args.held_out else live
    missing = run.lacking(
        run.wanted_groups(drawn, setting, args.samples, args.seed, groups), known - disturbed, args.again
    )
    if (first := next(missing, None)) is not None:
        reference = reference_request(live, setting, groups)
        reference_ms = dataset.usual_ms(args.out, setting, reference)
        transport = LocalTransport(BenchSpec(setting, device, config, reference), args.hang_s)
        with Supervisor(transport, reference_ms=reference_ms, hang_s=args.hang_s) as bench:
            missing = itertools.chain([first], missing)
            if args.dry_run:
                _estimate(args, bench, missing)
            else:
                again = f", {len(disturbed)} of them disturbed and to be measured again" if disturbed else ""
                print(
                    f"measuring for {setting} into {args.out}, {len(known)} samples there already{again}",
                    flush=True,
                )
                if reference_ms is None:
                    others = [
                        compute_request(live, i, setting, args.seed, groups) for i in range(config.interleave)
                    ]
                    found_ms = bench.calibrate(others, _CALIBRATE_S)
                    expected = _expected(profile, setting, reference) if profile else ""
                    print(f"the reference op takes {found_ms:.3g} ms{expected}", flush=True)
                until = began + 60 * args.minutes
                print_progress = _progress_of(bench, until)
                run.measure_groups(bench, missing, args.out, pool, print_progress, args.chunk, until)
                print_progress([])
    elif args.samples:
        print(f"{args.out} holds the first {args.samples} samples already", flush=True)
    if args.dry_run:
        for kind, n, total in (
            ("exchanges", len(exchanges), args.exchanges),
            ("steps", sum(len(plans) for _, plans in steps), args.steps),
        ):
            if n:
                print(f"{n} of the first {total} {kind} are missing")
        return
    if exchanges:
        _measure_exchanges(args, exchanges, setting, device)
    if steps:
        _measure_steps(args, steps, setting, device, of_steps)
    dataset.merge_parts(args.out)
    if profile:
        _check(profile, args.out, setting)


def profile_of_card(device: str) -> Profile | None:
    """The published profile of the GPU. None on a CPU, and for a card without one, which a line says."""
    from shardcore.cost.profile import profile_of_device
    from shardcore.measure.devices import device_of

    if device == "cpu":
        return None
    try:
        return profile_of_device(device_of(device).product())
    except ShardCoreError as error:
        print(error, file=sys.stderr)
        return None


def _expected(profile: Profile, setting: Setting, reference: ComputeRequest) -> str:
    from shardcore.cost.model import group_costs
    from shardcore.cost.profile_model import ProfileModel

    model = ProfileModel(profile, replace(setting, hardware=profile.name))
    expected_ms = group_costs([reference.shards], model, reference.batch)[0]
    return f"; profile {profile.name} expects {expected_ms:.3g} ms"


def _check(profile: Profile, folder: Path, setting: Setting) -> None:
    """Print how far the card's profile errs on what a folder holds, and how to correct it."""
    from shardcore.cost.profile_samples import checks, timings_of
    from shardcore.io import dataset

    timings = timings_of(dataset.read_compute(folder, setting), dataset.read_comm(folder, setting))
    if found := checks(profile, timings):
        print(f"profile {profile.name} against what {folder} holds:", *found, sep="\n  ")
        print(
            f"start from it: shardcore train {folder} --start {profile.name} --out MODEL; "
            f"correct it: shardcore profile fit {folder} --from {profile.name} --out PROFILE.json"
        )


def _arena_bytes(setting: Setting, device: str) -> int:
    """Default size of the arena, which leaves room for the optimizer's state."""
    from shardcore.core.catalog import OPTIMIZERS
    from shardcore.measure.devices import device_of

    weights = PRECISION_BYTES[setting.precision]
    state = OPTIMIZERS[setting.optimizer].state_bytes("cell")
    return device_of(device).arena_bytes(weights / (weights + state))


def _progress_of(bench: Supervisor, until: float) -> Callable[[Sequence[Finished]], None]:
    """A callback that prints progress of measuring groups: every _PROGRESS_S, and when called without results.

    until: time.monotonic() at which measuring ends.
    """
    began = printed_at = time.monotonic()
    done = failed = 0

    def print_progress(finished: Sequence[Finished]) -> None:
        nonlocal done, failed, printed_at
        now = time.monotonic()
        for sample in (s for f in finished for s in f.samples if s.request != bench.spec.reference):
            done, failed = done + 1, failed + (sample.error is not None)
            if sample.error:
                print(f"failed: {sample.error}", file=sys.stderr)
        if not finished or now - printed_at > _PROGRESS_S:
            printed_at, elapsed = now, now - began
            print(
                f"{done} samples{f' ({failed} failed)' if failed else ''}, {done / elapsed:.1f} a second, "
                f"{bench.kernel_s / elapsed:.0%} of the time in kernels, "
                f"{bench.kept_s / elapsed:.0%} in runs that entered a "
                f"median, {max(0.0, (until - now) / 60):.1f} min left at most",
                flush=True,
            )

    return print_progress


def _estimate(args: MeasureOptions, bench: Supervisor, missing: Iterable[ComputeRequest]) -> None:
    """Print how long measuring will take, from some seconds of it."""
    listed = list(missing) if args.samples else []
    began = time.monotonic()
    some = itertools.takewhile(lambda _: time.monotonic() - began < _ESTIMATE_S, listed or missing)
    rate = sum(s.request != bench.spec.reference for s in bench.samples(some)) / (time.monotonic() - began)
    if args.samples:
        print(
            f"{len(listed)} of the first {args.samples} samples are missing in {args.out}: about "
            f"{len(listed) / rate / 60:.1f} min at {rate:.1f} a second"
        )
    else:
        print(f"about {rate * args.minutes * 60:.0f} samples in {args.minutes:g} min, at {rate:.1f} a second")


def _require_ranks(args: MeasureOptions, setting: Setting, device: str) -> None:
    from shardcore.measure.devices import device_of

    if setting.batch % args.ranks or args.ranks < 2:
        raise ShardCoreError(
            f"--ranks is {args.ranks}; an exchange needs at least 2, "
            f"and a number that divides the batch of {setting.batch}"
        )
    there = device_of(device).count()
    if device == "cuda" and there < args.ranks:
        raise ShardCoreError(f"--ranks is {args.ranks}; here are {there} GPUs")
    if args.steps and device == "cpu" and args.ranks > there:
        raise ShardCoreError(
            f"--ranks is {args.ranks}; steps of so many need as many cores, here are {there}"
        )


def _measure_exchanges(
    args: MeasureOptions,
    missing: Sequence[CollectiveRequest],
    setting: Setting,
    device: str,
) -> None:
    from shardcore.measure import collectives, run

    began, done = time.monotonic(), 0

    def print_progress(_: CollectiveSample) -> None:
        nonlocal done
        done += 1
        if done % args.chunk == 0 or done == len(missing):
            rate = done / (time.monotonic() - began)
            print(f"{done} of {len(missing)} exchanges, {rate:.1f} a second", flush=True)

    samples = collectives.measure_all(missing, args.ranks, setting, device=device)
    run.measure_exchanges(samples, args.out, print_progress, args.chunk)


def _measure_steps(
    args: MeasureOptions,
    missing: Sequence[tuple[Problem, list]],
    setting: Setting,
    device: str,
    config: ReplayConfig,
) -> None:
    from shardcore.io import dataset
    from shardcore.measure import run
    from shardcore.measure.replay import replay_all

    reference, began = dataset.reference_op(args.out, setting), time.monotonic()
    done, total = 0, sum(len(plans) for _, plans in missing)

    def print_progress(problem: Problem, n: int, again: bool) -> None:
        nonlocal done
        if again:
            print(f"{n} steps of {problem.name} were disturbed and replayed once more", flush=True)
        else:
            done += n
            print(f"{done} of {total} steps, {(time.monotonic() - began) / done:.1f} s each", flush=True)

    run.measure_steps(
        args.out,
        missing,
        setting,
        config,
        run.attempt_with(lambda w: replay_all(w, setting, config, device, reference)),
        print_progress,
    )
