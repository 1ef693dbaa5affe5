"""Hardware profiles as text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from shardcore.cost.known_errors import NOT_MEASURED, law_uncertainties
from shardcore.cost.profile import RATES, Profile
from shardcore.report.text import text_table
from shardcore.step.memory import size_text

_MOST_REASONS = 10


def profiles_text(profiles: Iterable[Profile]) -> str:
    """Table of hardware profiles, a row each."""
    headers = ("profile", "memory", "GB/s of it", "error of ops", "of collectives", "device names")
    rows = [
        (
            profile.name,
            size_text(profile.memory_bytes),
            f"{profile.rates['hbm_gbps'].value:,.0f}",
            *(f"±{error:.0%}" for error in law_uncertainties(profile)),
            ", ".join(profile.device_names) or "-",
        )
        for profile in profiles
    ]
    return (
        f"{text_table(headers, rows, words=(5,))}\n({NOT_MEASURED}; an op or a collective errs by so much, and a step "
        "by more, as all its rates are uncertain: plan and price show it)"
    )


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
    if not rows:
        return f"{head}\n\nNo rate differs from those of {before.name if before else ''}."
    headers = ("rate", *([f"in {before.name}"] if before else []), "value", "unit", "error", "of", "source")
    return f"{head}\n\n{text_table(headers, rows, words=range(len(headers) - 4, len(headers)))}"


def unused_timings_text(reasons: Mapping[str, int]) -> str:
    """Numbers of timings that a fit left out, by reason, the most common first."""
    rows = sorted(((n, why) for why, n in reasons.items() if n), reverse=True)
    rest = rows[_MOST_REASONS:]
    lines = [f"{n:6}  {why}" for n, why in rows[:_MOST_REASONS]]
    return "\n".join(
        [*lines, *([f"{sum(n for n, _ in rest):6}  for {len(rest)} other reasons"] if rest else [])]
    )
