"""Commands on hardware profiles: profile list, show, new, fit."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from shardcore.cli.commands import FitOptions, ListOptions, NewOptions, ShowOptions
from shardcore.core.errors import ShardCoreError
from shardcore.core.validation import require
from shardcore.cost.nccl_tests import read_nccl_logs
from shardcore.cost.profile import SPEC, Profile, load_profile, profile_names, write_profile
from shardcore.cost.profile_fit import Timing, fit_profile, read_timings, scale_profile, timings_of_card
from shardcore.cost.profile_samples import check_profile, sample_timings
from shardcore.report.profile_report import profile_text, profiles_text, unused_timings_text


def profile_list(args: ListOptions) -> None:
    print(profiles_text(map(load_profile, profile_names())))


def profile_show(args: ShowOptions) -> None:
    print(profile_text(load_profile(args.profile)))


def profile_new(args: NewOptions) -> None:
    given = {name: value for name, value in vars(args).items() if name in SPEC and value is not None}
    given |= {"l2_bytes": args.l2_mib * 2**20} if args.l2_mib else {}
    given |= {"memory_bytes": args.memory_gib * 2**30} if args.memory_gib else {}
    start = load_profile(args.from_)
    made = scale_profile(start, args.name, **given)
    made = dataclasses.replace(made, device_names=tuple(args.device_name or ()))
    write_profile(args.out, made)
    print(f"{args.out}: {profile_text(made, start)}")


def profile_fit(args: FitOptions) -> None:
    start = load_profile(args.from_)
    known, judging, left_out = _read_timings(args.timings, start)
    given = ", ".join(map(str, args.timings[:3])) + ", ..." * (len(args.timings) > 3)
    if not known:
        [(why, n)] = left_out.most_common(1) or [("it holds no timing", 0)]
        raise ShardCoreError(
            f"{given} has no timing that profile {start.name!r} can be fitted to; of {left_out.total()} left "
            f"out, {n}: {why}"
        )
    fitted = fit_profile(known, start)
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
    """Read timings: one list to fit a profile to, one to judge the fit, and counts of excluded timings by reason."""
    from shardcore.cost import accuracy
    from shardcore.io import dataset

    first, *more = paths
    if first.is_dir() and not more:
        for setting in dataset.dataset_settings(first):
            require(
                start.covers_hardware(setting.hardware),
                f"{first} has samples of {setting.hardware}; profile {start.name!r} is of another card",
            )
        compute, comm = dataset.read_compute_samples(first), dataset.read_collective_samples(first)
        test = sample_timings(accuracy.held_out_samples(compute), accuracy.held_out_samples(comm))
        known = sample_timings(
            [s for s in compute if dataset.split_of_sample(s.id) != "test"],
            [s for s in comm if dataset.split_of_sample(s.id) != "test"],
        )
        return known, test, Counter({"kept to judge the fit": len(test)})
    if first.suffix == ".csv" and not more:
        timings, reasons = read_timings(first)
    else:
        timings, reasons = read_nccl_logs(paths, start)
    chosen = timings_of_card(timings, start)
    return chosen, chosen, reasons + Counter({"another card, or a low quality": len(timings) - len(chosen)})
