"""Hardware profiles as text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from shardcore.cost.known_errors import NOT_MEASURED, law_uncertainties
from shardcore.cost.profile import RATES, Network, Profile
from shardcore.report.text import records_table, text_table
from shardcore.step.memory import size_text

_MOST_REASONS = 10


def profiles_text(profiles: Iterable[Profile]) -> str:
    """Table of hardware profiles, a row each."""
    rows = [
        {
            "profile": profile.name,
            "memory": size_text(profile.memory_bytes),
            "GB/s of it": f"{profile.rates['hbm_gbps'].value:,.0f}",
            "error of ops": f"±{op_error:.0%}",
            "of collectives": f"±{collective_error:.0%}",
            "rates timed": f"{sum('fitted to' in x.source for x in profile.rates.values())} of {len(RATES)}",
            "device names": ", ".join(profile.device_names) or "-",
        }
        for profile in profiles
        for op_error, collective_error in [law_uncertainties(profile)]
    ]
    return (
        f"{records_table(rows, words=(6,))}\n({NOT_MEASURED}; an op or a collective errs by so much, and a step "
        "by more, as all its rates are uncertain: plan and price show it)"
    )


def networks_text(networks: Iterable[Network]) -> str:
    """Table of networks, a row each."""
    rates = {
        "GB/s of a device": "network_gbps",
        "in all-to-alls": "all_to_all_between_hosts_gbps",
        "in all-reduces": "all_reduce_between_hosts_gbps",
    }
    rows = [
        {
            "network": x.name,
            **{
                words: f"{x.rates[name].value:.3g}" if name in x.rates else "-"
                for words, name in rates.items()
            },
            "links and set-up": x.words,
        }
        for x in networks
    ]
    return records_table(rows, words=(4,))


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
