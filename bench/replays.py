"""Plans of the search, of its peers and random ones, predicted and replayed on two processes: do predictions
hold, does the search exploit the model's errors, and what is it worth?

    dvc repro train
    python -m bench.replays data/model --measurements data/measurements --problems 30 --out FOLDER

MODEL must be of this machine and for two processes, and know what exchanges take in steps
(measure.step_samples in params.yaml; more samples make better models). Problems are drawn from the calibrated
pool: 8 to 24 tables of 1 to 512 MiB at dims up to 16, 8 to 16 tables at larger dims. All plans of a problem
are replayed in alternation. `portfolio` is the default; "ids for free" is the same, told that exchanges
of ids cost nothing; `torchrec` is TorchRec's planner swept and told the measured bandwidths
(torchrec/baseline.py), where it is installed and tables are pooled; `best greedy` is the greedy order cheapest
under MODEL.

FOLDER gets replays.csv, report.md with its plots, and each problem's replays: a rerun with the same arguments
goes on after the problems done; one with another MODEL or other arguments replays again where plans differ.
What figures mean: cost/replay_metrics.py.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from bench import common
from bench.common import print_progress
from shardcore import report
from shardcore.core.job import Job
from shardcore.core.types import Plan, Problem
from shardcore.cost import metrics, neural, replay_metrics
from shardcore.cost.model import at_confidence, price
from shardcore.io import dataset, replays, writing
from shardcore.measure.replay import ReplayConfig, replay_all
from shardcore.measure.sampling.problems import ProblemConfig, draw_problem, with_sized_devices
from shardcore.report import model_report
from shardcore.search import SHARDERS, greedy
from shardcore.search.portfolio import search_with_annealing as anneal
from shardcore.step.lower import lower
from shardcore.step.memory import local_batch_bytes, table_peak_bytes
from shardcore.tables.generate import generate_pool

SMALLEST, LARGEST = 1 << 20, 512 << 20
_HIDDEN = Job(dense_forward_ms=1e6, dense_backward_ms=1e6)
"""A dense part that hides all ids."""
LOSS = 0.03
"""Relative time by which ours may be slower on a problem before the loss counts as one that matters."""


def draw_problems(
    model: neural.NeuralModel,
    n: int,
    seed: int,
    max_dim: int = 16,
    job: Job | None = None,
    sequences: float = 0.0,
) -> list[Problem]:
    """sequences: share of the tables of each whose lookups are not pooled. They have one dim, as in an
    EmbeddingCollection."""
    pool = [dataclasses.replace(t, dim=max_dim) for t in generate_pool()]
    small = [t for t in pool if SMALLEST <= t.bytes <= LARGEST]
    drawn = [draw_problem(small, i, model.setting, seed, ProblemConfig(2, 8, 24, max_dim)) for i in range(n)]
    return [dataclasses.replace(_with_sequences(p, sequences), job=job or p.job) for p in drawn]


def _with_sequences(drawn: Problem, fraction: float) -> Problem:
    n = round(fraction * len(drawn.tables))
    if not n:
        return drawn
    dim = min(t.dim for t in drawn.tables[:n])
    given = dataclasses.replace(
        drawn,
        tables=(
            *(dataclasses.replace(t, sequence=True, dim=dim) for t in drawn.tables[:n]),
            *drawn.tables[n:],
        ),
    )
    return with_sized_devices(given, ProblemConfig().slack, table_peak_bytes, local_batch_bytes(given))


def plans_by_name(problem: Problem, model: neural.NeuralModel) -> list[tuple[str, Plan]]:
    sure = at_confidence(model, 0.9)
    found = {
        replay_metrics.OURS: SHARDERS[replay_metrics.OURS](problem, model),
        "anneal": anneal(problem, model),
        "anneal, 90% confidence": anneal(problem, sure),
        "anneal_columns": anneal(problem, model, space="columns"),
    }
    found["anneal_columns, ids for free"] = anneal(
        dataclasses.replace(problem, job=_HIDDEN), model, space="columns"
    )
    pooled = not any(t.sequence for t in problem.tables)
    found |= {
        n: SHARDERS[n](problem, model)
        for n in ("neuroshard", *["torchrec"] * pooled, *greedy.ORDERS)
        if n in SHARDERS
    }
    found["best greedy"] = min(
        (found[n] for n in greedy.ORDERS), key=lambda p: price(lower(p, problem), model).total_ms
    )
    return [*found.items(), *(("random", SHARDERS["random"](problem, model, seed=seed)) for seed in range(3))]


def report_text(replays: Sequence[replay_metrics.PlanReplay], head: str) -> str:
    """Markdown report of replays, with two tables and linked plots."""
    found = replay_metrics.quality_by_problem(replays, replay_metrics.OURS)
    kinds = [
        (name, [r for r in replays if r.algorithm == name])
        for name in dict.fromkeys(r.algorithm for r in replays)
    ]
    held = [
        (
            name,
            len(own),
            *(
                form.format(x)
                for form, x in zip(
                    ("{:.1f}%", "{:+.1f}%"), replay_metrics.mean_error_and_bias(own), strict=True
                )
            ),
        )
        for name, own in [("all plans", replay_metrics.distinct_plans(replays)), *kinds]
    ]
    return "\n\n".join(
        [
            "# Replays",
            head,
            "## Do predictions hold, and does the search exploit the model's errors?",
            report.markdown_table(("plans of", "replays", "predicted against replayed", "bias"), held),
            "![predicted against replayed](predicted.png)",
            "Among the plans of a problem (mean over problems, 95% interval): "
            + "; ".join(
                f"{words} {common.interval_text(metrics.mean_interval(found[name]), *form)}"
                for name, words, *form in (
                    ("kendall_tau", "Kendall's tau"),
                    ("tau_beyond_noise", "tau of pairs that differ beyond noise"),
                    ("regret", "regret of the plan that the model prefers", "{:.1f}%"),
                    ("ours_regret", f"of {replay_metrics.OURS}'s", "{:.1f}%"),
                )
            )
            + ".",
            f"## Cost against {replay_metrics.OURS}'s",
            _rivals_table(replay_metrics.compare_sharders(replays)),
            f"Losses: problems on which {replay_metrics.OURS}'s plan took longer, beyond the noise of the two "
            f"replays (95%: one in 40 is by chance); of them, those by more than {LOSS:.0%}.\n",
        ]
    )


def _rivals_table(rivals: dict[str, replay_metrics.SharderComparison]) -> str:
    rows = []
    for name, r in rivals.items():
        worst = max(r.losses.values(), default=0.0)
        rows.append(
            (
                name,
                f"{r.predicted:.3f}",
                common.interval_text(r.cost),
                f"{len(r.losses)} of {r.problems}",
                sum(loss > LOSS for loss in r.losses.values()),
                f"{worst:.1%}" if worst else "-",
            )
        )
    return report.markdown_table(
        (
            "plans of",
            f"predicted cost over {replay_metrics.OURS}'s",
            "replayed",
            "losses beyond noise",
            f"above {LOSS:.0%}",
            "worst",
        ),
        rows,
    )


def write_report(
    folder: Path, replay_sets: Sequence[replays.ReplaySet], model: neural.NeuralModel, head: str
) -> str:
    """Write the report, plots and records of replays to a folder. Returns the report."""
    rows = replay_metrics.judge_replays(replay_sets, model)
    writing.write_csv(folder / "replays.csv", replay_metrics.csv_rows(rows))
    common.write_png(folder / "predicted.png", model_report.replay_scatter_figure(rows, "Replayed plans"))
    page = report_text(rows, head)
    writing.write_atomic(folder / "report.md", page.encode())
    return page


def main() -> None:
    parser = common.bench_parser(
        __doc__,
        {"model": "folder of a model of this machine"},
        out=(..., "folder of the report and of what is done"),
        measurements=(
            Path,
            "the dataset of MODEL; its reference group tells the machine's slowdown meanwhile",
        ),
        problems=30,
        repeats=(40, "steps of each plan"),
        max_dim=(16, "of the tables"),
        sequences=(0.0, "of the tables: not pooled"),
        seed=(31, "of the problems"),
    )
    parser.add_argument(
        "--dense-ms",
        type=float,
        nargs=2,
        metavar=("FORWARD", "BACKWARD"),
        help="of a dense part, beside which ids travel; ranks sleep for it",
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    model, config, kept = neural.load(args.model), ReplayConfig(repeats=args.repeats), []
    reference = dataset.reference_op(args.measurements, model.setting) if args.measurements else None
    job = Job("sparse_dist", *args.dense_ms) if args.dense_ms else None
    for i, problem in enumerate(
        draw_problems(model, args.problems, args.seed, args.max_dim, job, args.sequences)
    ):
        kept.append(
            replays.replay_or_reuse(
                args.out / problem.name,
                problem,
                plans_by_name(problem, model),
                model.setting,
                config,
                lambda workloads: replay_all(workloads, model.setting, config, reference=reference),
            )
        )
        [mine] = (
            r for r in replay_metrics.judge_replays(kept[-1:], model) if r.algorithm == replay_metrics.OURS
        )
        print_progress(
            f"problem {i + 1} of {args.problems}: {len(problem.tables)} tables, {replay_metrics.OURS} "
            f"{mine.replayed_ms:.2f} ms replayed (± {mine.noise_ms:.2f}), "
            f"{mine.predicted_ms:.2f} predicted"
        )
    print(write_report(args.out, kept, model, _report_head(args, kept, model)))


def _report_head(
    args: argparse.Namespace, replay_sets: Sequence[replays.ReplaySet], model: neural.NeuralModel
) -> str:
    noise = np.median([r.noise_ms / r.replayed_ms for r in replay_metrics.judge_replays(replay_sets, model)])
    dense = f", a dense part of {sum(args.dense_ms):g} ms" if args.dense_ms else ""
    dense += f", {args.sequences:.0%} of the tables not pooled" if args.sequences else ""
    shared = any(cost.oversubscribed for one in replay_sets for cost in one.costs.values())
    return (
        f"{model.setting}; {len(replay_sets)} problems, 2 processes{' on fewer cores' * shared}, {args.repeats} "
        f"steps of each plan in alternation, seed {args.seed}, dims up to {args.max_dim}{dense}; a "
        f"replay is known to ±{noise:.1%} (median, 95%)."
    )


if __name__ == "__main__":
    main()
