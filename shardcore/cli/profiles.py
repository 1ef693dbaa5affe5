"""Commands on hardware profiles: profile list, show, new, fit."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from shardcore.cli.options import Group, Output, PositiveFloat, PositiveGib
from shardcore.core.errors import ShardCoreError

if TYPE_CHECKING:
    from shardcore.cost.profile import Profile
    from shardcore.cost.profile_fit import Timing

command = Group("profile", "Rates of hardware from published measurements.")

ProfileFile = Annotated[Path, "PROFILE.json"]


@dataclass(frozen=True)
class ListOptions:
    """List the profiles that come with ShardCore: of cards, and of links between them."""


@dataclass(frozen=True)
class ShowOptions:
    """Show the rates of a profile, with the uncertainty and the source of each.

    profile: name or file of the profile
    """

    profile: Annotated[str, "PROFILE"]


@dataclass(frozen=True)
class NewOptions:
    """Make a profile of another card from its data sheet. Rates scale with what is given, and are less certain.

    name: name of the hardware, such as nvidia-h100-nvl
    from_: profile of the most similar card
    memory_gib: memory of a device
    hbm_gbps: bandwidth of that memory
    sm_ghz: number of multiprocessors times their clock in GHz
    l2_mib: L2 cache
    nvlink_gbps: links of a device within a host, each way
    network_gbps: links of a device between hosts, each way
    pcie_gbps: link of a device to host memory, each way
    device_name: part of torch.cuda.get_device_name() by which this card is recognised
    """

    name: str
    _: KW_ONLY
    from_: Annotated[str, "PROFILE"]
    memory_gib: PositiveGib | None = None
    hbm_gbps: PositiveFloat | None = None
    sm_ghz: PositiveFloat | None = None
    l2_mib: PositiveFloat | None = None
    nvlink_gbps: PositiveFloat | None = None
    network_gbps: PositiveFloat | None = None
    pcie_gbps: PositiveFloat | None = None
    device_name: list[Annotated[str, "TEXT"]] | None = None
    out: Annotated[ProfileFile, Output()]


@dataclass(frozen=True)
class FitOptions:
    """Fit the rates of a profile to timings. Rates that no timing depends on stay as they are.

    timings: folder of a dataset, whose test split is kept to judge the fit; or CSV with a line for each
      timing, with the columns of docs/models.md; or logs of nccl-tests (all_reduce_perf, alltoall_perf and so on,
      as they print them; only logs may be several), for the rates of links; those of other cards are left out
    from_: profile to start from
    """

    timings: list[Annotated[Path, "DATASET|TIMINGS.csv|LOG"]]
    _: KW_ONLY
    from_: Annotated[str, "PROFILE"]
    out: Annotated[ProfileFile, Output()]


@command
def list_(args: ListOptions) -> None:
    from shardcore.cost.profile import load_profile, profile_names
    from shardcore.report.profile_report import profiles_text

    print(profiles_text(map(load_profile, profile_names())))


@command
def show(args: ShowOptions) -> None:
    from shardcore.cost.profile import load_profile
    from shardcore.report.profile_report import profile_text

    print(profile_text(load_profile(args.profile)))


@command
def new(args: NewOptions) -> None:
    from shardcore.cost.profile import SPEC, load_profile, write_profile
    from shardcore.cost.profile_fit import scale_profile
    from shardcore.report.profile_report import profile_text

    given = {name: value for name, value in vars(args).items() if name in SPEC and value is not None}
    given |= {"l2_bytes": args.l2_mib * 2**20} if args.l2_mib else {}
    given |= {"memory_bytes": args.memory_gib * 2**30} if args.memory_gib else {}
    start = load_profile(args.from_)
    made = scale_profile(start, args.name, **given)
    made = dataclasses.replace(made, device_names=tuple(args.device_name or ()))
    write_profile(args.out, made)
    print(f"{args.out}: {profile_text(made, start)}")


@command
def fit(args: FitOptions) -> None:
    from shardcore.cost import profile_fit
    from shardcore.cost.profile import load_profile, write_profile
    from shardcore.cost.profile_samples import check_profile
    from shardcore.report.profile_report import profile_text, unused_timings_text

    start = load_profile(args.from_)
    known, judging, left_out = _read_timings(args.timings, start)
    given = ", ".join(map(str, args.timings[:3])) + ", ..." * (len(args.timings) > 3)
    if not known:
        [(why, n)] = left_out.most_common(1) or [("it holds no timing", 0)]
        raise ShardCoreError(
            f"{given} has no timing that profile {start.name!r} can be fitted to; of {left_out.total()} left "
            f"out, {n}: {why}"
        )
    fitted = profile_fit.fit_profile(known, start)
    write_profile(args.out, fitted)
    print(f"{given}: {len(known)} timings fitted, {left_out.total()} left out")
    errors = (
        f"  {before.kind}: mean error {before.error:.0%} before, {after.error:.0%} after"
        for before, after in zip(check_profile(start, judging), check_profile(fitted, judging), strict=True)
    )
    print("\n".join(filter(None, (unused_timings_text(left_out), *errors))))
    print(f"\n{args.out}: {profile_text(fitted, start)}")


def _read_timings(
    paths: Sequence[Path], start: Profile
) -> tuple[Sequence[Timing], Sequence[Timing], Counter[str]]:
    """Read timings: those to fit a profile to, those to judge the fit, and counts of excluded timings by reason."""
    from shardcore.cost import accuracy, profile_fit
    from shardcore.cost.nccl_tests import read_nccl_logs
    from shardcore.cost.profile_samples import sample_timings
    from shardcore.io import dataset

    first, *more = paths
    if first.is_dir() and not more:
        for setting in dataset.dataset_settings(first):
            if not start.covers_hardware(setting.hardware):
                raise ShardCoreError(
                    f"{first} has samples of {setting.hardware}; profile {start.name!r} is of another card"
                )
        compute, comm = dataset.read_compute_samples(first), dataset.read_collective_samples(first)
        test = sample_timings(accuracy.held_out_samples(compute), accuracy.held_out_samples(comm))
        known = sample_timings(
            [s for s in compute if dataset.split_of_sample(s.id) != "test"],
            [s for s in comm if dataset.split_of_sample(s.id) != "test"],
        )
        return known, test, Counter({"kept to judge the fit": len(test)})
    if first.suffix == ".csv" and not more:
        timings, reasons = profile_fit.read_timings(first)
    else:
        timings, reasons = read_nccl_logs(paths, start)
    chosen = profile_fit.timings_of_card(timings, start)
    return chosen, chosen, reasons + Counter({"another card, or a low quality": len(timings) - len(chosen)})
