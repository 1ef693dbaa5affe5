"""The command measure: measures the samples that a folder lacks, on this machine, in a supervised process."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from shardcore.cli.options import (
    DatasetFolder,
    Flat,
    Group,
    Optimizer,
    Output,
    Positive,
    PositiveGib,
    Precision,
)
from shardcore.cli.progress_line import PrintedProgress, showing_progress
from shardcore.core.errors import ShardCoreError
from shardcore.core.types import PRECISION_BYTES, Setting
from shardcore.core.validation import require
from shardcore.measure.config import KernelConfig
from shardcore.measure.sampling.groups import GroupConfig
from shardcore.stages.measure_config import MeasureConfig, Samples

if TYPE_CHECKING:
    from shardcore.cost.profile import Profile
    from shardcore.io.measurements import ComputeRequest
    from shardcore.measure.transport import Transport

command = Group()

_OF_CONFIG = ("minutes", "again", "seed", "chunk", "hang_s", "ranks", "held_out")
"""Fields of MeasureConfig that are options."""
_CONFIG = MeasureConfig(compute_samples=None, minutes=10.0, chunk=64, ranks=2, actors=1)
_OF_KERNELS = ("tolerance", "max_repeats", "interleave")
"""Fields of KernelConfig that are options."""
_OF_GROUPS = ("max_shards", "max_width", "sequences")
"""Fields of GroupConfig that are options."""


@dataclass(frozen=True, kw_only=True)
class MeasureOptions:
    """Measure fused embedding ops on this machine's device; a rerun goes on where the last one ended.

    device: auto: cuda if there is a GPU, else cpu
    samples: stop after the first N different draws; 0: measure no ops; default: when the time is up
    out: dataset folder; it only grows
    pool: tables to draw from; default: the calibrated pool
    batch: global batch; default: 2048 on cpu, 65536 on cuda
    precision: precision of the weights
    hardware: name of the device in the setting; default: its product name
    arena_gib: memory for weights, and so the largest shard that is measured; default: 1 on cpu; on cuda,
      weights and optimizer state take half of the free memory
    exchanges: afterwards measure the first N exchanges among --ranks of this machine, into the same dataset
    steps: afterwards replay a step of each of the first N plans among --ranks, for the times of exchanges in
      steps
    dry_run: show what is missing, and about how long it takes, at the rate at which the dataset grew or
      the usual one of two CPU cores; measure and write nothing
    """

    device: Literal["auto", "cpu", "cuda"] = "auto"
    samples: Samples | None = None
    out: Annotated[DatasetFolder, Output(())]
    pool: Annotated[Path, "POOL.json"] | None = None
    batch: Positive | None = None
    precision: Precision = "fp32"
    optimizer: Optimizer = "exact_sgd"
    hardware: str | None = None
    arena_gib: PositiveGib | None = None
    config: Annotated[MeasureConfig, Flat(_OF_CONFIG)] = _CONFIG
    groups: Annotated[GroupConfig, Flat(_OF_GROUPS)] = GroupConfig()
    kernels: Annotated[KernelConfig, Flat(_OF_KERNELS)] = KernelConfig()
    exchanges: Samples = 0
    steps: Samples = 0
    dry_run: bool = False


@command
def measure(args: MeasureOptions) -> None:
    from shardcore.io import dataset, files
    from shardcore.measure import hardware
    from shardcore.measure.devices import device_by_name
    from shardcore.measure.tally import NAMES
    from shardcore.measure.transport import Transport
    from shardcore.stages import measure as run
    from shardcore.tables.generate import PoolConfig, generate_pool

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
    wanted = run.Wanted(pool, setting, config, transport)
    if args.dry_run:
        if args.samples is None:
            print(f"{NAMES['compute']}: as many as {config.minutes:g} min have time for")
        for line in run.estimate_measuring_time(wanted, args.out):
            print(line)
        return
    there = len(dataset.read_timed_ids(args.out, "compute"))
    print(f"measuring for {setting} into {args.out}, {there} samples there already", flush=True)
    if profile:
        print(_expected_time_text(profile, setting, wanted.reference_op_request()), flush=True)
    with showing_progress() as line:
        found = run.measure(wanted, args.out, PrintedProgress(line))
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
    from shardcore.cost.profile import profile_of_device
    from shardcore.measure.devices import device_by_name

    if device == "cpu":
        return None
    try:
        return profile_of_device(device_by_name(device).product())
    except ShardCoreError as error:
        print(error, file=sys.stderr)
        return None


def _expected_time_text(profile: Profile, setting: Setting, reference: ComputeRequest) -> str:
    from shardcore.cost.model import group_op_ms
    from shardcore.cost.profile_model import ProfileModel

    model = ProfileModel(profile, replace(setting, hardware=profile.name))
    expected_ms = group_op_ms([reference.shards], model, reference.batch)[0]
    return f"profile {profile.name} expects the reference op to take {expected_ms:.3g} ms"


def _print_profile_errors(profile: Profile, folder: Path, setting: Setting) -> None:
    """Print a hardware profile's errors on the measurements of a folder, and the command that corrects the profile."""
    from shardcore.cost.profile_samples import check_profile, sample_timings
    from shardcore.io import dataset

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
    from shardcore.core.catalog import OPTIMIZERS
    from shardcore.measure.devices import device_by_name

    weights = PRECISION_BYTES[setting.precision]
    state = OPTIMIZERS[setting.optimizer].state_bytes("cell")
    return device_by_name(device).arena_bytes(weights / (weights + state))
