"""Hardware profiles as text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from shardcore.cost.known_errors import NOT_MEASURED, law_uncertainties
from shardcore.cost.profile import RATES, Network, Profile
from shardcore.report.text import text_table
from shardcore.step.memory import size_text

_MOST_REASONS = 10


def profiles_text(profiles: Iterable[Profile]) -> str:
    """Table of hardware profiles, a row each."""
    headers = (
        "profile",
        "memory",
        "GB/s of it",
        "error of ops",
        "of collectives",
        "rates timed",
        "device names",
    )
    rows = [
        (
            profile.name,
            size_text(profile.memory_bytes),
            f"{profile.rates['hbm_gbps'].value:,.0f}",
            *(f"±{error:.0%}" for error in law_uncertainties(profile)),
            f"{sum('fitted to' in rate.source for rate in profile.rates.values())} of {len(RATES)}",
            ", ".join(profile.device_names) or "-",
        )
        for profile in profiles
    ]
    return (
        f"{text_table(headers, rows, words=(6,))}\n({NOT_MEASURED}; an op or a collective errs by so much, and a step "
        "by more, as all its rates are uncertain: plan and price show it)"
    )


def networks_text(networks: Iterable[Network]) -> str:
    """Table of networks, a row each."""
    rates = ("network_gbps", "all_to_all_between_hosts_gbps", "all_reduce_between_hosts_gbps")
    rows = [
        (x.name, *(f"{x.rates[name].value:.3g}" if name in x.rates else "-" for name in rates), x.words)
        for x in networks
    ]
    headers = ("network", "GB/s of a device", "in all-to-alls", "in all-reduces", "links and set-up")
    return text_table(headers, rows, words=(4,))


def profile_text(profile: Profile, before: Profile | None = None) -> str:
    """Table of a hardware profile's rates, with their uncertainties and sources.

    before: the profile that it was made from. Only rates that differ are shown.
    """
    ops, collectives = (f"±{error:.0%}" for error in law_uncertainties(profile))
    head = f"{profile.name}, {NOT_MEASURED}: {size_text(profile.memory_bytes)}, ops {ops}, collectives {collectives}"
    rows = [
        (
            name,
            *([f"{before.rates[name].value:,.4g}"] if before else []),
            f"{rate.value:,.4g}",
            rate.unit,
            f"±{rate.uncertainty:.0%}",
            words,
            rate.source,
        )
        for name, (_, words) in RATES.items()
        for rate in [profile.rates[name]]
        if before is None or rate != before.rates[name]
    ]
    headers = ("rate", *([f"in {before.name}"] if before else []), "value", "unit", "error", "of", "source")
    table = text_table(headers, rows, words=range(len(headers) - 4, len(headers)))
    return (
        f"{head}\n\n{table if rows else 'No rate differs from those of the profile that it was made from.'}"
    )


def unused_timings_text(reasons: Mapping[str, int]) -> str:
    """Numbers of timings that a fit left out, by reason, the most common first."""
    rows = sorted(((n, why) for why, n in reasons.items() if n), reverse=True)
    if rest := rows[_MOST_REASONS:]:
        rows[_MOST_REASONS:] = [(sum(n for n, _ in rest), f"for {len(rest)} other reasons")]
    return "\n".join(f"{n:6}  {why}" for n, why in rows)
