"""Do plans train in TorchRec as predicted, and as replayed? Steps of the real client beside kept replays, on
two processes.

    python -m bench.replays MODEL --problems 30 --out FOLDER
    python -m bench.steps MODEL FOLDER --measurements DATA --out STEPS

Each problem's plans of ALGORITHMS train a small DLRM (an EmbeddingBagCollection of the problem's tables, a
dense part over its pooled outputs) by TorchRec's DistributedModelParallel and TrainPipelineSparseDist on gloo
processes, with the batches that the replay looked up. Plans take turns of TURN steps, in another order each
round, and of a turn all steps but the first are timed:

  embedding part   from the gradients of the pooled outputs, known on all ranks, to the weights' update, and
                   from the next lookup to the pooled outputs: what a replay times, and what TorchRec does
                   around it (ids arranged and checked, outputs split and joined, the all-reduce of the dense
                   part beside it)
  whole step       from the dense part to the next one: exchange of the next ids, dense part, embedding part,
                   optimizer

Before each dense part caches are overwritten as before a replayed step, and ranks meet, outside of what is
timed. Plans train over one piece of memory, as replays do, for allocating it takes longer than the steps;
what plans learn, bench.torchrec checks. Once a round the dataset's reference op runs on all ranks: steps are
given at the machine's usual speed, as replays are.

STEPS gets report.md with a plot, steps.csv, and a file for each problem: a rerun with the same arguments goes
on after those done, and after --minutes the report is of these. Times of both are the median over the timed
steps, of the slowest rank.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from bench import common
from bench.common import print_progress
from bench.steps_training import LARGE, TIMEOUT_S, TURN, Steps, combine_ranks, run_rank
from shardcore import report
from shardcore.core.errors import ShardCoreError
from shardcore.core.types import PRECISION_BYTES, Plan, Problem, Setting
from shardcore.cost import metrics, neural, replay_metrics
from shardcore.io import dataset, files, replays, schema, writing
from shardcore.io.dataset import ReferenceOp
from shardcore.io.measurements import TimingSpread
from shardcore.measure import local_ranks
from shardcore.step.lower import lower
from shardcore.torchrec.sharding_plan import to_torchrec

ALGORITHMS = (replay_metrics.OURS, "neuroshard", "torchrec", "best greedy", replay_metrics.RANDOM)
RANKING = {"kendall_tau": "{:.3f}", "tau_beyond_noise": "{:.3f}", "regret": "{:.1f}%"}
"""Reported figures of replay_metrics.quality_by_problem, and their formats."""


@dataclass(frozen=True)
class Trained:
    """A problem's replays, and the steps of their plans, by the plans' digests."""

    kept: replays.ReplaySet
    steps: dict[str, Steps]


# --- all ranks ----------------------------------------------------------------------------------------------


def trained_plans(replay_set: replays.ReplaySet) -> dict[str, Plan]:
    """Distinct plans among a problem's replays, by digest. TorchRec trains under each."""
    found = {name: replay_set.plans[name] for algorithm, name in replay_set.made if algorithm in ALGORITHMS}
    return {name: plan for name, plan in found.items() if _is_trainable(plan, replay_set.problem)}


def _is_trainable(plan: Plan, problem: Problem) -> bool:
    try:
        return bool(to_torchrec(plan, problem, "tables", "cpu"))
    except ShardCoreError as error:
        print_progress(f"{problem.name}, plan of {plan.provenance.get('algorithm')}: {error}")
        return False


def train_plans(
    all_kept: Sequence[replays.ReplaySet],
    setting: Setting,
    out: Path,
    rounds: int,
    minutes: float,
    reference: ReferenceOp,
) -> list[Trained]:
    """Train steps of further problems within a time limit. Returns all steps, including those stored in `out`.

    Raises as local_ranks.run_ranks.
    """
    found = {
        kept.problem.name: steps for kept in all_kept if (steps := _read_earlier_steps(out, kept, rounds))
    }
    waiting = [kept for kept in all_kept if kept.problem.name not in found]
    until = time.monotonic() + 60 * minutes
    with closing(_train_problems(waiting if minutes > 0 else [], setting, rounds, reference)) as trained:
        for kept, steps in trained:
            writing.write_json(
                _steps_path(out, kept),
                {**_run_settings(kept, rounds), "plans": {n: asdict(s) for n, s in steps.items()}},
            )
            found[kept.problem.name] = steps
            print_progress(f"{len(found)} of {len(all_kept)} problems: {_steps_line(kept, steps)}")
            if time.monotonic() > until:
                break
    return [Trained(kept, found[kept.problem.name]) for kept in all_kept if kept.problem.name in found]


def _train_problems(
    waiting: Sequence[replays.ReplaySet], setting: Setting, rounds: int, reference: ReferenceOp
) -> Iterator[tuple[replays.ReplaySet, dict[str, Steps]]]:
    """Train the plans of each problem in turn. Yields the replays and steps by plan."""
    if not waiting:
        return
    given = [(kept.problem, trained_plans(kept)) for kept in waiting]
    largest = max(
        max(lower(plan, problem).memory_bytes) for problem, plans in given for plan in plans.values()
    )
    elements = largest // PRECISION_BYTES[setting.precision] + LARGE  # for alignment
    ranks = len(waiting[0].problem.topology)
    marks: list[list[dict[str, np.ndarray]]] = [[] for _ in range(ranks)]
    done = 0
    with closing(
        local_ranks.run_ranks(
            "steps", run_rank, ranks, (given, setting, rounds, elements, reference), TIMEOUT_S
        )
    ) as heard:
        for rank, said in heard:
            marks[rank] += [said] if said else []
            while min(map(len, marks)) > done:
                yield (
                    waiting[done],
                    {name: combine_ranks([m[done][name] for m in marks]) for name in marks[0][done]},
                )
                done += 1


def _steps_line(replay_set: replays.ReplaySet, steps: dict[str, Steps]) -> str:
    name, own = next(iter(steps.items()))
    return (
        f"{replay_set.problem.name}, {len(steps)} plans; the first {replay_set.costs[name].total_ms:.1f} ms "
        f"replayed, in TorchRec {own.embedding.median_ms:.1f} ± "
        f"{replay_metrics.median_noise_ms(own.embedding):.1f} of {own.whole.median_ms:.1f}"
    )


def _steps_path(out: Path, replay_set: replays.ReplaySet) -> Path:
    return out / f"{replay_set.problem.name}.json"


def _run_settings(replay_set: replays.ReplaySet, rounds: int) -> dict[str, Any]:
    return {
        "problem": files.json_digest(files.problem_to_json(replay_set.problem)),
        "rounds": rounds,
        "turn": TURN,
    }


def _read_earlier_steps(out: Path, replay_set: replays.ReplaySet, rounds: int) -> dict[str, Steps] | None:
    """Read a problem's stored steps. None unless measured for the same plans in the same way."""
    path = _steps_path(out, replay_set)
    written = schema.read_json(path) if path.exists() else {}
    asked = _run_settings(replay_set, rounds)
    same = {k: written.get(k) for k in asked} == asked and set(written["plans"]) == set(
        trained_plans(replay_set)
    )
    return (
        {
            name: Steps(TimingSpread(**s["embedding"]), TimingSpread(**s["whole"]), s["share"])
            for name, s in written["plans"].items()
        }
        if same
        else None
    )


# --- the report ---------------------------------------------------------------------------------------------


def records_with_step_times(
    trained: Sequence[Trained], replayed: Sequence[replay_metrics.PlanReplay], part: str
) -> list[replay_metrics.PlanReplay]:
    """Replay records with measured TorchRec step times in place of replayed times.

    part: of the step, "embedding" or "whole".
    """
    steps = {
        (t.kept.problem.name, plan): getattr(own, part) for t in trained for plan, own in t.steps.items()
    }
    return [
        replace(r, replayed_ms=step.median_ms, noise_ms=replay_metrics.median_noise_ms(step))
        for r in replayed
        for step in [steps[r.problem, r.plan]]
    ]


def report_text(
    replayed: Sequence[replay_metrics.PlanReplay],
    embedding: Sequence[replay_metrics.PlanReplay],
    whole: Sequence[replay_metrics.PlanReplay],
    head: str,
) -> str:
    """Markdown report of TorchRec steps, with two tables and a linked plot."""
    ranks = []
    for words, rows in (
        ("predicted, replayed", replayed),
        ("predicted, embedding part in TorchRec", embedding),
        ("replayed, embedding part in TorchRec", steps_against_replays(embedding, replayed)),
        ("predicted, whole step", whole),
        ("replayed, whole step", steps_against_replays(whole, replayed)),
    ):
        found = replay_metrics.quality_by_problem(rows)
        ranks.append(
            (
                words,
                *(
                    common.interval_text(metrics.mean_interval(found[name]), form)
                    if np.isfinite(found[name]).any()
                    else "-"
                    for name, form in RANKING.items()
                ),
            )
        )
    by_part = [replay_metrics.compare_sharders(rows) for rows in (replayed, embedding, whole)]
    costs = [
        (
            name,
            f"{rival.predicted:.3f}",
            *(common.interval_text(found[name].cost) for found in by_part),
            f"{len(by_part[1][name].losses)} of {rival.problems}",
        )
        for name, rival in by_part[0].items()
    ]
    return "\n\n".join(
        [
            "# Steps in TorchRec",
            head,
            "## Are plans ranked in TorchRec as they are predicted, and as they are replayed?",
            report.markdown_table(
                (
                    "one by the other",
                    "Kendall's tau",
                    "of pairs that differ beyond noise",
                    "Spearman's rho",
                    "regret of the best by the first",
                ),
                ranks,
            ),
            "Mean over problems, with the 95% interval (Student's t) over them. Pairs differ beyond the noise "
            "of what is named second; where replays are named first their noise counts against them.",
            f"## Cost over {replay_metrics.OURS}'s",
            report.markdown_table(
                (
                    "plans of",
                    "predicted",
                    "replayed",
                    "embedding part in TorchRec",
                    "whole step",
                    f"its embedding part shorter than {replay_metrics.OURS}'s beyond noise",
                ),
                costs,
            ),
            "![steps](steps.png)\n",
        ]
    )


def steps_against_replays(
    replays: Sequence[replay_metrics.PlanReplay], replayed: Sequence[replay_metrics.PlanReplay]
) -> list[replay_metrics.PlanReplay]:
    """Records of TorchRec steps with replayed times as predictions."""
    ms = {(r.problem, r.plan): r.replayed_ms for r in replayed}
    return [replace(r, predicted_ms=ms[r.problem, r.plan]) for r in replays]


def _report_head(
    trained: Sequence[Trained], replays: Sequence[replay_metrics.PlanReplay], setting: Setting
) -> str:
    """Head of the report. replays: result of `steps_against_replays`."""
    plans, ranks = replay_metrics.distinct_plans(replays), len(trained[0].kept.problem.topology)
    ratio = np.array([r.replayed_ms / r.predicted_ms for r in plans])
    share = np.median([s.share for t in trained for s in t.steps.values()])
    noise = np.median([r.noise_ms / r.replayed_ms for r in plans])
    timed = next(iter(trained[0].steps.values())).embedding.repeats
    return (
        f"{setting}; {len(trained)} problems, {len(plans)} plans on {ranks} gloo processes of one "
        f"thread, {timed} steps of each, in turns; the embedding part is known to ±{noise:.1%} (median, "
        f"95%), is {share:.0%} of the step, and takes {np.median(ratio):.2f} times what the replay took "
        f"(median over plans; {np.quantile(ratio, 0.1):.2f} to {np.quantile(ratio, 0.9):.2f} for eight "
        "in ten)."
    )


def plot_steps(
    replays: Sequence[replay_metrics.PlanReplay],
    by_part: dict[str, dict[str, replay_metrics.SharderComparison]],
) -> Figure:
    """Plot of replayed against TorchRec step times, and each algorithm's cost relative to ours.

    replays: result of `steps_against_replays`.
    """
    figure = Figure(figsize=(11, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    for problem in dict.fromkeys(r.problem for r in replays):
        own = sorted((r.predicted_ms, r.replayed_ms) for r in replays if r.problem == problem)
        left.plot(*np.array(own).T, color="0.8", linewidth=0.7, zorder=1)
    for i, name in enumerate(ALGORITHMS):
        if own := [(r.predicted_ms, r.replayed_ms, r.noise_ms) for r in replays if r.algorithm == name]:
            x, y, noise = np.array(own).T
            left.errorbar(
                x,
                y,
                np.minimum(noise, 0.9 * y),
                fmt="o",
                color=f"C{i}",
                markersize=4,
                elinewidth=0.7,
                label=name,
            )
    left.set(xscale="log", yscale="log", xlabel="replayed ms", ylabel="embedding part of a TorchRec step, ms")
    for axis in (left.xaxis, left.yaxis):
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter("{x:g}")
    names = [name for name in ALGORITHMS if name in by_part["replayed"]]
    for i, (part, found) in enumerate(by_part.items()):
        for k, cost in enumerate(found[name].cost for name in names):
            at, ends = k + 0.2 * (i - 1), [x if np.isfinite(x) else cost.mean for x in (cost.low, cost.high)]
            right.plot(ends, [at, at], color=f"C{i}", linewidth=2)
            right.plot(cost.mean, at, "o", color=f"C{i}", label=None if k else part)
    right.axvline(1, color="0.4", linewidth=1)
    right.set(
        yticks=range(len(names)),
        yticklabels=names,
        xlabel=f"cost over {replay_metrics.OURS}'s, mean over problems, 95% interval",
    )
    for axes in (left, right):
        axes.legend(frameon=False, fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def write_report(out: Path, trained: Sequence[Trained], model: neural.NeuralModel) -> str:
    """Write report.md, its plot and steps.csv. Returns the report."""
    # Ids travel beside the dense part here, so the embedding part has none.
    replayed = [
        r
        for t in trained
        for r in replay_metrics.judge_replays([t.kept], model, ids=False)
        if r.algorithm in ALGORITHMS and r.plan in t.steps
    ]
    embedding, whole = (records_with_step_times(trained, replayed, part) for part in ("embedding", "whole"))
    by_replay = steps_against_replays(embedding, replayed)
    figure = plot_steps(
        by_replay,
        {
            part: replay_metrics.compare_sharders(rows)
            for part, rows in (
                ("replayed", replayed),
                ("embedding part in TorchRec", embedding),
                ("whole step in TorchRec", whole),
            )
        },
    )
    common.write_png(out / "steps.png", figure)
    writing.write_csv(
        out / "steps.csv",
        [
            {"problem": r.problem, "algorithm": r.algorithm, "plan": r.plan}
            | {
                k: round(v, 5)
                for k, v in (
                    ("predicted_ms", r.predicted_ms),
                    ("replayed_ms", r.replayed_ms),
                    ("embedding_ms", e.replayed_ms),
                    ("embedding_noise_ms", e.noise_ms),
                    ("whole_ms", w.replayed_ms),
                    ("whole_noise_ms", w.noise_ms),
                )
            }
            for r, e, w in zip(replayed, embedding, whole, strict=True)
        ],
    )
    page = report_text(replayed, embedding, whole, _report_head(trained, by_replay, model.setting))
    writing.write_atomic(out / "report.md", page.encode())
    return page


def main() -> None:
    parser = common.bench_parser(
        __doc__,
        {"model": "folder of the cost model", "replays": (Path, "folder of bench.replays, of this machine")},
        out=(..., "folder of the report and of what is done"),
        measurements=(..., "the dataset of MODEL: its reference op tells the machine's slowdown"),
        problems=30,
        minutes=(7.0, "begin no problem after so many (7); 0: report what is done"),
    )
    parser.add_argument(
        "--rounds", type=int, default=7, help=f"turns of each plan, {TURN - 1} timed steps each (7)"
    )
    args = parser.parse_args()
    model = neural.load(args.model)
    kept = replays.read_all_replays(args.replays, model.setting)[: args.problems]
    if not kept:
        raise ShardCoreError(
            f"folder {str(args.replays)!r} has no replays for ({model.setting}); run python -m bench.replays"
        )
    reference = dataset.reference_op(args.measurements, model.setting)
    if reference is None:
        raise ShardCoreError(
            f"folder {str(args.measurements)!r} has no reference op for ({model.setting}); "
            "give the dataset of MODEL"
        )
    trained = train_plans(kept, model.setting, args.out, args.rounds, args.minutes, reference)
    if not trained:
        raise ShardCoreError(f"no problem was done in {args.minutes:g} minutes; give more --minutes")
    print(write_report(args.out, trained, model))


if __name__ == "__main__":
    try:
        main()
    except ShardCoreError as error:
        sys.exit(str(error))
