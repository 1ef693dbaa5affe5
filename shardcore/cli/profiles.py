"""Commands on hardware profiles: profile list, show, networks, network, new, fit."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from shardcore.cli.commands import (
    FitOptions,
    ListOptions,
    NetworkOptions,
    NetworksOptions,
    NewOptions,
    ShowOptions,
)
from shardcore.core.validation import require
from shardcore.cost.nccl_tests import read_nccl_logs
from shardcore.cost.profile import (
    SPEC,
    Network,
    Profile,
    load_network,
    load_profile,
    network_names,
    profile_names,
    write_profile,
)
from shardcore.cost.profile_fit import (
    Timing,
    fit_profile,
    network_rates,
    read_timings,
    scale_profile,
    timings_of_card,
)
from shardcore.cost.profile_samples import check_profile, sample_timings
from shardcore.report.profile_report import networks_text, profile_text, profiles_text, unused_timings_text


def profile_list(args: ListOptions) -> None:
    print(profiles_text(map(load_profile, profile_names())))


def profile_show(args: ShowOptions) -> None:
    print(profile_text(load_profile(args.profile)))


def profile_new(args: NewOptions) -> None:
    given = {name: value for name, value in vars(args).items() if name in SPEC and value is not None}
    given |= {"l2_bytes": args.l2_mib * 2**20} if args.l2_mib else {}
    given |= {"memory_bytes": args.memory_gib * 2**30} if args.memory_gib else {}
    start = load_profile(args.from_)
    made = dataclasses.replace(
        scale_profile(start, args.name, **given), device_names=tuple(args.device_name or ())
    )
    write_profile(args.out, made)
    print(f"{args.out}: {profile_text(made, start)}")


def profile_networks(args: NetworksOptions) -> None:
    print(networks_text(map(load_network, network_names())))


def profile_network(args: NetworkOptions) -> None:
    start, logs = load_profile(args.from_), ", ".join(path.name for path in args.from_nccl_tests)
    known, left_out = read_nccl_logs(args.from_nccl_tests, start)
    _require_timings(logs, start, known, left_out)
    sheet = scale_profile(start, args.name, network_gbps=args.network_gbps) if args.network_gbps else start
    network = Network(args.name, f"{logs} on {start.name}", network_rates(sheet, known))
    write_profile(args.out, network)
    print(
        f"{logs}: {_fit_text(start, start.on_network(network), known, known, left_out)}\n\nwritten: {args.out}"
    )


def profile_fit(args: FitOptions) -> None:
    start = load_profile(args.from_)
    known, judging, left_out = _read_timings(args.timings, start)
    _require_timings(str(args.timings), start, known, left_out)
    fitted = fit_profile(known, start)
    write_profile(args.out, fitted)
    print(f"{args.timings}: {_fit_text(start, fitted, known, judging, left_out)}\n\nwritten: {args.out}")


def _require_timings(given: str, start: Profile, known: Sequence[Timing], left_out: Counter[str]) -> None:
    """Raise ShardCoreError with the most common reason if all timings were left out."""
    [(why, n)] = left_out.most_common(1) or [("it holds no timing", 0)]
    require(
        len(known) > 0,
        f"{given} has no timing that profile {start.name!r} can be fitted to; of {left_out.total()} left "
        f"out, {n}: {why}",
    )


def _fit_text(
    start: Profile,
    fitted: Profile,
    known: Sequence[Timing],
    judging: Sequence[Timing],
    left_out: Counter[str],
) -> str:
    """Numbers of timings that were fitted and left out, errors before and after, and rates that changed."""
    parts = (
        f"{len(known)} timings fitted, {left_out.total()} left out",
        unused_timings_text(left_out),
        *(
            f"  {before.kind}: mean error {before.error:.0%} before, {after.error:.0%} after"
            for before, after in zip(
                check_profile(start, judging), check_profile(fitted, judging), strict=True
            )
        ),
        f"\n{profile_text(fitted, start)}",
    )
    return "\n".join(filter(None, parts))


def _read_timings(path: Path, start: Profile) -> tuple[Sequence[Timing], Sequence[Timing], Counter[str]]:
    """Read timings: those to fit a profile to, those to judge the fit, and counts of excluded timings by reason."""
    from shardcore.cost import accuracy
    from shardcore.io import dataset

    if not path.is_dir():
        timings, reasons = read_timings(path)
        chosen = timings_of_card(timings, start)
        return (
            chosen,
            chosen,
            reasons + Counter({"another card, or a low quality": len(timings) - len(chosen)}),
        )
    for setting in dataset.dataset_settings(path):
        require(
            start.covers_hardware(setting.hardware),
            f"{path} has samples of {setting.hardware}; profile {start.name!r} is of another card",
        )
    compute, comm = dataset.read_compute_samples(path), dataset.read_collective_samples(path)
    test = sample_timings(accuracy.held_out_samples(compute), accuracy.held_out_samples(comm))
    known = sample_timings(
        [s for s in compute if dataset.split_of_sample(s.id) != "test"],
        [s for s in comm if dataset.split_of_sample(s.id) != "test"],
    )
    return known, test, Counter({"kept to judge the fit": len(test)})
