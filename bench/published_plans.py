"""Steps of published MLPerf systems under hardware profiles, and plans under profiles with other rates.

A published step of MLPerf is a whole one, with its dense part, and parts of it run side by side. So the
embeddings of a plan may take no longer.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path

import numpy as np

from bench.published_cards import shipped_profile_of_card
from bench.workloads import FP16, H100, public_workloads
from shardcore import report
from shardcore.core.types import Plan, Problem
from shardcore.cost.model import predicted_total_ms, price
from shardcore.cost.profile import Profile
from shardcore.cost.profile_fit import scale_profile
from shardcore.search import DEFAULT_SHARDER, SHARDERS, Budget
from shardcore.step.lower import lower
from shardcore.tables.public import public_pool

STEP = "training step (DLRM-DCNv2, whole model)"
"""Op of MLPerf's steps in tables of timings."""
_PCIE = {"switch_generation": 1, "network_gbps": 25}
SHEETS: Mapping[str, Mapping[str, float]] = {
    "H100 PCIe": {"hbm_gbps": 2039, "sm_ghz": 200.1, "nvlink_gbps": 64, **_PCIE},
    "L40": {
        "memory_bytes": 48e9,
        "hbm_gbps": 864,
        "sm_ghz": 353.6,
        "l2_bytes": 96 << 20,
        "nvlink_gbps": 32,
        **_PCIE,
    },
    "L40S": {
        "memory_bytes": 48e9,
        "hbm_gbps": 864,
        "sm_ghz": 357.8,
        "l2_bytes": 96 << 20,
        "nvlink_gbps": 32,
        **_PCIE,
    },
}
"""Cards of MLPerf's systems without a profile, by their data sheets. Their links within a host are PCIe."""
_EVALS = 10_000
_DRAWS = 6


# --- MLPerf -------------------------------------------------------------------------------------------------


def steps_table(timings: Path, shipped: Mapping[str, Profile]) -> str:
    """Table of MLPerf systems: published step time, and predicted embedding time of our plan.

    Each system is priced by its card's profile, or by its data sheet (SHEETS). Others are left out by name.
    """
    with open(timings, encoding="utf-8") as lines:
        rows = [row for row in csv.DictReader(lines) if row["op"] == STEP]
    seen: dict[tuple[str, ...], tuple[float, float]] = {}
    cells, found, left_out = [], [], Counter[str]()
    for row in rows:
        key = row["gpu"], row["hosts"], row["ranks"], row["B"]
        sheet, name = SHEETS.get(row["gpu"]), shipped_profile_of_card(row["gpu"]) or ""
        if not (sheet or name):
            left_out[row["gpu"]] += 1
            continue
        if key not in seen:
            profile = (
                scale_profile(shipped[H100], row["gpu"].replace(" ", "-"), **sheet)
                if sheet
                else shipped[name]
            )
            seen[key] = _predicted_step(profile, int(row["hosts"]), int(row["ranks"]), int(row["B"]))
        ms, band = seen[key]
        step_ms = float(row["time_us"]) / 1e3
        found.append((key, ms, step_ms))
        system = row["source"].split("/results/")[-1].split("/")[0]
        layout = f"{row['hosts']} x {int(row['ranks']) // int(row['hosts'])} {row['gpu']}"
        cells.append(
            (
                system,
                layout,
                row["B"],
                f"{step_ms:.2f}",
                f"{ms:.2f} ±{band:.0%}",
                "yes" if ms <= step_ms else "NO",
            )
        )
    # Systems of one layout have one prediction. Others are in order if predictions and steps are.
    pairs = [(a, b) for a, b in combinations(found, 2) if a[0] != b[0] and abs(np.log(a[2] / b[2])) > 0.05]
    right = sum((a[1] < b[1]) == (a[2] < b[2]) for a, b in pairs)
    headers = ("system", "devices", "batch", "published step, ms", "predicted embeddings, ms", "below")
    order = f"{right} of {len(pairs)} pairs of systems that differ by more than 5% are in order."
    left = "".join(f" No profile is of card {gpu!r}: {n} left out." for gpu, n in left_out.items())
    return (
        f"{report.markdown_table(headers, cells)}\n\n{order}{left}\n" if rows else "The file has no steps.\n"
    )


def _predicted_step(profile: Profile, hosts: int, ranks: int, batch: int) -> tuple[float, float]:
    """Predicted embedding ms of our plan on a system, and the relative error band."""
    tables = public_pool("mlperf-dlrm-dcnv2")
    problem = Problem(
        "mlperf", tables, profile.topology(hosts, ranks // hosts), batch, "exact_adagrad", job=FP16
    )
    model = profile.cost_model().for_problem(problem)
    workload = lower(SHARDERS[DEFAULT_SHARDER](problem, model, budget=Budget(evals=_EVALS)), problem)
    cost = price(workload, model)
    # Ids travel while the dense part runs, in HugeCTR as in TorchRec's pipelines.
    return cost.total_ms - max(cost.input_ms), model.step_error_band(workload)


# --- plans --------------------------------------------------------------------------------------------------


def regrets_table() -> str:
    """Table of regrets of our plans under sampled hardware rates, for workloads on at most two hosts."""
    cells = [
        _regret_cells(problem, profile)
        for problem, profile in public_workloads()
        if len(problem.topology) <= 16
    ]
    headers = ("problem", "mean regret", "worst regret", "cost of the plan over the draws")
    return report.markdown_table(headers, cells)


def _regret_cells(problem: Problem, profile: Profile) -> tuple[str, ...]:
    """Table cells: cost of the default plan over the best known plan, under sampled hardware rates."""
    rng = np.random.default_rng(0)

    def default_plan(of: Profile) -> Plan:
        return SHARDERS[DEFAULT_SHARDER](
            problem, of.cost_model().for_problem(problem), budget=Budget(evals=_EVALS)
        )

    default, draws = default_plan(profile), [profile.with_sampled_rates(rng) for _ in range(_DRAWS)]
    plans: Sequence[Plan] = [default, *map(default_plan, draws)]
    regrets, costs = [], []
    for drawn in draws:
        model = drawn.cost_model().for_problem(problem)
        ms = [predicted_total_ms(lower(plan, problem), model) for plan in plans]
        regrets.append(ms[0] / min(ms) - 1)
        costs.append(ms[0])
    spread = f"{min(costs):.2f} to {max(costs):.2f} ms"
    return problem.name, f"{np.mean(regrets):.1%}", f"{max(regrets):.1%}", spread
