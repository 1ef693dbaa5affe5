"""Steps of a job's other plans, predicted from one traced step of a real TorchRec job on this machine (gloo).

    python -m bench.job_traces MODEL --jobs 10 --out FOLDER
    python -m bench.job_traces MODEL --jobs 10 --shapes 1x4 1x8 2x2 2x4 --out FOLDER  # as root: emulated hosts

A shape is hosts x ranks of each. Several hosts are emulated (bench/hosts.py): processes, gloo and TCP are
real, links between hosts have the rate of bench/box_replays.py, and its tables. There MODEL has rates of
exchanges that were measured in such boxes (--exchanges). More ranks than cores share these: a step is what
the scheduler makes of it.

Each job is a drawn problem with random plans of all kinds (measure/sampling/steps.py, of a seed that nothing
else uses) and the plan that a greedy search finds. They take turns, in another order each round. The first
has a ShardCoreProfiler, which traces three steps. The median steps of the *other* plans are the truth. A
model predicts them:

  as it is        with the dense part that the trace shows
  anchored        as it is, and all else of the traced plan's step counts as the dense part
  corrected       by the first traced step (cost/traced_factors.py)
  by three        by all three
  mean            each plan takes what the traced one took: the least that a model has to beat

The same from a model of another machine, emulated: MODEL with lookups multiplied and exchanges divided by
--other. And from a profile (--profile), for which nothing was measured here. On emulated hosts it has the
links of data sheets.

FOLDER gets report.md, and for each job the traces and a file; a rerun goes on after the jobs that are done.
With --minutes 0 it only reports.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from bench import box_replays, common, hosts
from bench.common import print_progress
from bench.job_traces_training import TURN, Job, run_rank
from shardcore import report
from shardcore.core.errors import ShardCoreError
from shardcore.core.job import Job as StepJob
from shardcore.core.links import make_links
from shardcore.core.types import Plan, Problem
from shardcore.core.validation import MOST_BYTES
from shardcore.cost import neural, traced_factors
from shardcore.cost.model import price
from shardcore.cost.profile import load_profile
from shardcore.cost.traced_factors import QUANTITIES, with_dense_ms, with_traced_dense
from shardcore.io import files, writing
from shardcore.measure import local_ranks
from shardcore.measure.sampling.steps import draw_random_plans, draw_step_plans
from shardcore.plans import traced_job
from shardcore.search import SHARDERS, Budget
from shardcore.search.anneal.reshard import rebind_tables
from shardcore.step.lower import lower
from shardcore.torchrec.sharding_plan import to_torchrec

SEED = 4_242
TABLE_BYTES = 128 << 20
"""Most of a table, for two ranks."""
BOX_TABLE_BYTES = 16 << 20
TIMEOUT_S = 240.0
FOUND = "measured"
ARMS = ("as it is", "anchored", "corrected", "by three", "mean")


@dataclass(frozen=True)
class Shape:
    """Hosts of a job, and ranks of each."""

    hosts: int
    ranks_per_host: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        hosts_text, x, ranks_text = text.partition("x")
        if not (
            x and hosts_text.isdigit() and ranks_text.isdigit() and int(hosts_text) * int(ranks_text) > 1
        ):
            raise ShardCoreError(f"shape {text!r} is not hosts x ranks of each, such as 1x4 or 2x2")
        return cls(int(hosts_text), int(ranks_text))

    @property
    def ranks(self) -> int:
        return self.hosts * self.ranks_per_host

    @property
    def text(self) -> str:
        return (
            f"{self.ranks} ranks on this machine"
            if self.hosts == 1
            else f"{self.hosts} x {self.ranks_per_host} ranks, hosts and links of {box_replays.BETWEEN_GBIT_S:g} "
            "Gbit/s emulated"
        )


def draw_job(index: int, pool: Sequence[Any], model: Any, shape: Shape) -> tuple[Problem, dict[str, Plan]]:
    """Draw a job: a problem and its plans by name. The first plan is traced."""
    if shape.hosts == 1:
        # Each rank has memory for all tables, so with more ranks tables are smaller.
        most_bytes = 2 * TABLE_BYTES // shape.ranks
        problem, drawn = draw_step_plans(pool, index, model.setting, shape.ranks, most_bytes, SEED)
    else:
        boxes = [(shape.hosts, shape.ranks_per_host, 1)]
        problem, _ = box_replays.draw_box_problem(box_tables(), model, index, SEED, True, boxes)
        room = [replace(device, memory_bytes=MOST_BYTES) for device in problem.topology.devices]
        problem = replace(problem, topology=replace(problem.topology, devices=tuple(room)), job=StepJob())
        drawn = draw_random_plans(problem, np.random.default_rng([SEED, shape.hosts, shape.ranks, index]))
    if shape != TWO_RANKS:
        problem = replace(problem, name=f"{problem.name}-{shape.hosts}x{shape.ranks_per_host}")
    greedy = SHARDERS["size_lookup_greedy"](
        problem, model.for_problem(problem), seed=0, budget=Budget(evals=200)
    )
    plans = {f"{i}: {words}": plan for i, (words, plan) in enumerate(drawn)} | {"greedy": greedy}
    trained = {name: plan for name, plan in plans.items() if _is_trainable(plan, problem)}
    order = np.random.default_rng([SEED, index]).permutation(len(trained))
    return problem, {list(trained)[i]: list(trained.values())[i] for i in order}


@cache
def box_tables() -> list[Any]:
    """Pool of tables for jobs on emulated hosts, small enough for every rank's memory."""
    return [t for t in box_replays.box_tables() if t.bytes <= BOX_TABLE_BYTES]


TWO_RANKS = Shape(1, 2)


def _is_trainable(plan: Plan, problem: Problem) -> bool:
    try:
        return bool(to_torchrec(plan, problem, "tables", "cpu"))
    except ShardCoreError as error:
        print_progress(f"{problem.name}: {error}")
        return False


def run_job(job: Job, shape: Shape) -> dict[str, Any]:
    """Train all plans of a job. Returns ms of their steps and of the profiler's callback."""
    said: list[Any] = [None] * shape.ranks
    box = (
        hosts.Box(shape.hosts, shape.ranks_per_host, box_replays.BETWEEN_GBIT_S) if shape.hosts > 1 else None
    )
    with hosts.emulated_hosts(box) if box else nullcontext() as places:
        for rank, value in local_ranks.run_ranks("job", run_rank, shape.ranks, (job,), TIMEOUT_S, places):
            said[rank] = value
    # A step takes as long as on the slowest rank.
    steps = {name: np.max([times[name] for times, _ in said], axis=0).tolist() for name in job.plans}
    return {"steps_ms": steps, "callback_ms": np.max([ms for _, ms in said], axis=0).tolist()}


# --- judged -------------------------------------------------------------------------------------------------


def compare_job_with_prediction(
    problem: Problem, plans: Mapping[str, Plan], found: Mapping[str, Any], folder: Path, model: Any
) -> dict[str, Any]:
    """Measured step ms of a job's plans, and predictions of each arm."""
    # A job's callback times a thousand steps between two traced ones. Here its plan takes turns with others.
    step_ms = float(np.median(found["steps_ms"][next(iter(plans))]))
    all_steps = replace(traced_job.read_job_traces(folder), step_ms=step_ms)
    assert all_steps.problem is not None
    # A job knows its hosts, and not their links.
    all_steps = replace(all_steps, problem=replace(all_steps.problem, topology=problem.topology))
    job = replace(all_steps, traced=replace(all_steps.traced, steps=all_steps.traced.steps[:1]))
    assert job.problem is not None
    checked, by_three = traced_job.check_traced_job(job, model), traced_job.check_traced_job(all_steps, model)
    measured = {name: float(np.median(ms)) for name, ms in found["steps_ms"].items()}
    noise = {name: _median_noise_ms(ms) for name, ms in found["steps_ms"].items()}
    as_it_is = with_traced_dense(job.problem, [s.with_untraced_ms(step_ms) for s in job.traced.steps])
    anchor = max(0.0, job.total_ms - checked.before.cost.total_ms + checked.before.cost.dense_ms)
    arms = {
        "as it is": (as_it_is, model),
        "anchored": (with_dense_ms(job.problem, anchor), model),
        "corrected": (checked.problem, checked.model),
        "by three": (by_three.problem, by_three.model),
    }
    predicted = {
        arm: {
            name: price(lower(rebind_tables(plan, of), of, fits=False), ours.for_problem(of)).total_ms
            for name, plan in plans.items()
        }
        for arm, (of, ours) in arms.items()
    }
    predicted["mean"] = dict.fromkeys(plans, job.total_ms)
    return {
        "name": problem.name,
        "traced": next(iter(plans)),
        "traced_ms": job.total_ms,
        "measured_ms": measured,
        "noise_ms": noise,
        "predicted_ms": predicted,
        "named": float(np.mean([r.recognised_share for s in all_steps.traced.steps for r in s.ranks])),
        "factors": {
            q.label: checked.correction.factors[q].value
            for q in QUANTITIES
            if checked.correction.factors[q].units
        },
        "around_ms": checked.correction.around_ms,
    }


def _median_noise_ms(rounds_ms: Sequence[Sequence[float]]) -> float:
    """Half width of the 95% interval of a median step time, from medians of rounds."""
    medians = [float(np.median(ms)) for ms in rounds_ms]
    return 1.96 * 1.253 * float(np.std(medians, ddof=1)) / np.sqrt(len(medians))


def error_summary(jobs: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Summary row per arm: errors on untraced plans, and rank correlation."""
    rows = []
    for arm in ARMS:
        errors, taus, slips = [], [], []
        for job in jobs:
            others = [name for name in job["measured_ms"] if name != job["traced"]]
            real = np.array([job["measured_ms"][name] for name in others])
            ours = np.array([job["predicted_ms"][arm][name] for name in others])
            noise = np.array([job["noise_ms"][name] for name in others])
            errors += (np.abs(ours - real) / real).tolist()
            slips.append(float(np.mean(ours / real)))
            taus.append(_tau_beyond_noise(real, ours, noise))
        tau = [x for x in taus if x is not None]
        rows.append(
            (
                arm,
                f"{np.mean(errors):.1%}",
                f"{np.median(errors):.1%}",
                f"{np.quantile(errors, 0.9):.1%}",
                f"{np.mean(slips):.2f}",
                f"{np.mean(tau):.2f}" if tau and arm != "mean" else "-",
            )
        )
    return rows


def _tau_beyond_noise(real: np.ndarray, ours: np.ndarray, noise: np.ndarray) -> float | None:
    """Kendall's tau over pairs of plans that differ beyond noise. None without such pairs."""
    i, j = np.triu_indices(len(real), 1)
    apart = np.abs(real[i] - real[j]) > np.hypot(noise[i], noise[j])
    signs = np.sign(real[i] - real[j]) * np.sign(ours[i] - ours[j])
    return float(signs[apart].mean()) if apart.any() else None


HEADERS = ("prediction", "mean error", "median", "9 of 10 below", "predicted / measured", "tau beyond noise")


def report_text(
    shape: Shape,
    jobs: Sequence[Mapping[str, Any]],
    others: Mapping[str, Sequence[Mapping[str, Any]]],
    found: Sequence[Mapping[str, Any]],
) -> str:
    """Report on the jobs of one cluster shape. others: jobs under other models, by description."""
    noise = np.median(
        [job["noise_ms"][n] / job["measured_ms"][n] for job in jobs for n in job["measured_ms"]]
    )
    plans = sum(len(job["measured_ms"]) - 1 for job in jobs)
    callback = np.array([job["callback_ms"] for job in found])
    quiet, busy = np.median(callback), callback.sum(1) - callback.shape[1] * np.median(callback)
    step_ms = np.median([job["traced_ms"] for job in jobs])
    return "\n\n".join(
        [
            f"## {shape.text}",
            f"{len(jobs)} jobs, {plans} other plans; a plan's step is known to ±{noise:.1%} (median, 95%), from "
            f"{len(found[0]['steps_ms'][jobs[0]['traced']])} turns of {TURN - 1} timed steps. Named: "
            f"{np.mean([job['named'] for job in jobs]):.1%} of a traced step's ms (least "
            f"{min(job['named'] for job in jobs):.1%}).",
            report.markdown_table(HEADERS, error_summary(jobs)),
            *(
                line
                for words, rows in others.items()
                for line in (f"From {words}:", report.markdown_table(HEADERS, error_summary(rows)))
            ),
            f"The callback takes {quiet:.3f} ms a step without tracing, and {np.median(busy):.0f} ms in all for a "
            f"traced one (median over jobs, with writing): {(quiet + np.median(busy) / 1000) / step_ms:.2%} of a step "
            f"of {step_ms:.0f} ms at every=1000.",
        ]
    )


def main() -> None:
    parser = common.bench_parser(
        __doc__,
        {"model": "folder of the cost model"},
        out=(..., "folder of the report and of what is done"),
        shapes=(["1x2"], "hosts x ranks of each"),
        jobs=(10, "of each shape"),
        first=(0, "number of the first job"),
        rounds=(8, "turns of each plan, 4 or more"),
        other=(1.7, "factor of the emulated model of another machine"),
        profile=("cpu", "a profile to start from"),
        minutes=(60.0, "begin no job after so many"),
    )
    data = Path("datasets/cpu-amd-epyc/pool-5100d5310aebd953.json")
    parser.add_argument("--pool", type=Path, default=data, help="of the tables of jobs on one host")
    parser.add_argument(
        "--exchanges", type=Path, default=Path("bench/emulated-hosts"), help="dataset of emulated exchanges"
    )
    args = parser.parse_args()
    alone, pool = neural.load(args.model), files.read_pool(args.pool)
    shapes, until = [Shape.parse(text) for text in args.shapes], time.monotonic() + 60 * args.minutes
    in_box = box_replays.with_box_rates(alone, args.exchanges) if any(s.hosts > 1 for s in shapes) else alone
    of_profile = load_profile(args.profile).cost_model()
    pages, kept = ["# Steps of other plans, after one traced step"], {}
    for shape, index in itertools.product(shapes, range(args.first, args.first + args.jobs)):
        model = alone if shape.hosts == 1 else in_box
        problem, plans = draw_job(index, pool, model, shape)
        folder, path = args.out / problem.name, args.out / f"{problem.name}.json"
        if not path.exists():
            if time.monotonic() >= until:
                continue
            writing.write_json(path, run_job(Job(problem, plans, model.setting, folder, args.rounds), shape))
        found = json.loads(path.read_text())
        if set(found["steps_ms"]) != set(plans):
            raise ShardCoreError(f"{path} is of other plans; remove it to run them again")
        medians = {name: round(float(np.median(ms)), 1) for name, ms in found["steps_ms"].items()}
        print_progress(f"{problem.name}, ms of plans: {medians}")
        models = {
            "its own model": model,
            f"a model of another machine, emulated (lookups x {args.other:g}, exchanges / {args.other:g})": (
                model.corrected_by(
                    {
                        q: traced_factors.CorrectionFactor(
                            args.other if q.family == traced_factors.COMPUTE else 1 / args.other, 0.0, 0
                        )
                        for q in QUANTITIES
                    }
                )
            ),
            f"the profile {args.profile!r}": of_profile,
        }
        of_shape = kept.setdefault(shape, {})
        of_shape.setdefault(FOUND, []).append(found)
        for words, one in models.items():
            of_shape.setdefault(words, []).append(
                compare_job_with_prediction(problem, plans, found, folder, one)
            )
        if shape.hosts > 1:
            # All ranks of a host share its link, as `topology measure` finds.
            gbps = {"between_hosts": box_replays.BETWEEN_GBIT_S / 8}
            linked = replace(
                problem, topology=replace(problem.topology, links=make_links(shared=True, **gbps))
            )
            rows = of_shape.setdefault(f"the profile {args.profile!r}, given the links between hosts", [])
            rows.append(compare_job_with_prediction(linked, plans, found, folder, of_profile))
    for shape, of_shape in kept.items():
        found, jobs, *_ = of_shape.values()
        others = {words: rows for words, rows in of_shape.items() if rows is not found and rows is not jobs}
        pages.append(report_text(shape, jobs, others, found))
    document = {f"{shape.hosts}x{shape.ranks_per_host}": of_shape for shape, of_shape in kept.items()}
    writing.write_json(args.out / "jobs.json", document)
    page = "\n\n".join(pages)
    writing.write_atomic(args.out / "report.md", (page + "\n").encode())
    print(page)


if __name__ == "__main__":
    main()
