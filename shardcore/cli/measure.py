"""The command measure: measures the samples that a folder lacks, on this machine, in a supervised process."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from shardcore.cli.commands import MeasureOptions
from shardcore.cli.progress_line import showing_progress
from shardcore.core.catalog import OPTIMIZERS
from shardcore.core.errors import ShardCoreError
from shardcore.core.types import PRECISION_BYTES, Setting
from shardcore.core.validation import require
from shardcore.cost.model import group_op_ms
from shardcore.cost.profile import Profile, profile_of_device
from shardcore.cost.profile_model import ProfileModel
from shardcore.cost.profile_samples import check_profile, sample_timings
from shardcore.io import dataset, files
from shardcore.measure import hardware
from shardcore.measure.devices import device_by_name
from shardcore.measure.tally import NAMES
from shardcore.measure.transport import Transport
from shardcore.stages import measure as run
from shardcore.tables.generate import PoolConfig, generate_pool


def measure(args: MeasureOptions) -> None:
    transport = Transport(hardware.detect_device() if args.device == hardware.AUTO else args.device)
    hardware.require_device(transport.device)
    setting = Setting(
        args.hardware or transport.hardware(),
        args.batch or device_by_name(transport.device).batch,
        args.precision,
        args.optimizer,
    )
    if args.config.ranks and (args.exchanges or args.steps):
        _require_valid_ranks(args.config.ranks, bool(args.steps), setting.batch, transport)
    profile = published_profile_of_device(transport.device)
    arena_bytes = (
        int(args.arena_gib * 2**30) if args.arena_gib else _default_arena_bytes(setting, transport.device)
    )
    config = replace(
        args.config,
        compute_samples=args.samples,
        comm_samples=args.exchanges,
        step_samples=args.steps,
        kernels=replace(args.kernels, arena_bytes=arena_bytes),
        groups=args.groups,
    )
    pool = files.read_pool(args.pool) if args.pool else generate_pool(PoolConfig())
    wanted = run.WantedSamples(pool, setting, config, transport)
    if args.dry_run:
        if args.samples is None:
            print(f"{NAMES['compute']}: as many as {config.minutes:g} min have time for")
        for line in run.estimate_measuring_time(wanted, args.out):
            print(line)
        return
    there = len(dataset.read_timed_ids(args.out, "compute"))
    print(f"measuring for {setting} into {args.out}, {there} samples there already", flush=True)
    if profile:
        reference = wanted.reference_op_request()
        model = ProfileModel(profile, replace(setting, hardware=profile.name))
        expected_ms = group_op_ms([reference.shards], model, reference.batch)[0]
        print(f"profile {profile.name} expects the reference op to take {expected_ms:.3g} ms", flush=True)
    with showing_progress() as line:
        found = run.measure(wanted, args.out, line)
    print("measured {compute} groups, {comm} exchanges and {steps} steps of plans".format_map(found))
    if profile:
        _print_profile_errors(profile, args.out, setting)


def _require_valid_ranks(ranks: int, for_steps: bool, batch: int, transport: Transport) -> None:
    """Raise ShardCoreError if --ranks does not divide the batch, or exceeds this machine's devices."""
    require(
        ranks > 1 and batch % ranks == 0,
        f"--ranks is {ranks}; an exchange needs at least 2, and a number that divides the batch of {batch}",
    )
    there = transport.hosts()[0].devices
    if transport.device == "cuda":
        require(ranks <= there, f"--ranks is {ranks}; here are {there} GPUs")
    elif for_steps:
        require(
            ranks <= there,
            f"--ranks is {ranks}; steps of so many need as many cores, here are {there}",
        )


def published_profile_of_device(device: str) -> Profile | None:
    """Published hardware profile of this machine's GPU. None on a CPU, or if no profile of the GPU is published."""
    if device == "cpu":
        return None
    try:
        return profile_of_device(device_by_name(device).product_name())
    except ShardCoreError as error:
        print(error, file=sys.stderr)
        return None


def _print_profile_errors(profile: Profile, folder: Path, setting: Setting) -> None:
    """Print a hardware profile's errors on the measurements of a folder, and the command that corrects the profile."""
    timings = sample_timings(
        dataset.read_compute_samples(folder, setting), dataset.read_collective_samples(folder, setting)
    )
    if found := check_profile(profile, timings):
        print(f"profile {profile.name} against what {folder} holds:", *found, sep="\n  ")
        print(
            f"start from it: shardcore train {folder} --start {profile.name} --out MODEL; "
            f"correct it: shardcore profile fit {folder} --from {profile.name} --out PROFILE.json"
        )


def _default_arena_bytes(setting: Setting, device: str) -> int:
    """Default bytes of the memory arena for weights, which leaves room for optimizer state."""
    weights = PRECISION_BYTES[setting.precision]
    state = OPTIMIZERS[setting.optimizer].state_bytes("cell")
    return device_by_name(device).arena_bytes(weights / (weights + state))
