"""Figures and model card of a cost model.

Shapes: S samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from shardcore.core import links
from shardcore.cost import accuracy, collective_model, known_errors, ranges, replay_metrics
from shardcore.cost.metrics import kendall_tau, mape
from shardcore.cost.neural import NeuralModel
from shardcore.report.figures import Axes, Figure, figure_with_panels
from shardcore.report.text import markdown_table
from shardcore.step.kinds import CHANNELS, kinds_of_channel

if TYPE_CHECKING:
    from shardcore.cost.study import LearningCurve  # imports torch


@dataclass(frozen=True)
class StudyResults:
    """Results of studying a model. None: too few samples.

    metrics: by split, the result of accuracy.evaluate_accuracy; that of "test" is of study.judge_test_split.
    unseen_tables: percent error on groups of tables that a training never saw (see study).
    repeatability: percent error of a timing itself (see study).
    curve: errors over the number of training samples.
    """

    metrics: Mapping[str, Mapping[str, float]]
    unseen_tables: float | None = None
    repeatability: float | None = None
    curve: LearningCurve | None = None

    def flat_metrics(self) -> dict[str, float]:
        """All figures of the study in one flat mapping, named for MLflow, which groups names with a slash."""
        figures: dict[str, float | None] = {
            f"{split}/{k}": v for split, values in self.metrics.items() for k, v in values.items()
        }
        figures["test/unseen_tables_compute_mape"] = self.unseen_tables
        figures["test/repeatability"] = self.repeatability
        for name in ("constant", "scale", "power", "gain") if self.curve else ():
            figures[f"learning_curve/{name}"] = getattr(self.curve, name)
        return {k: v for k, v in figures.items() if v is not None}


# --- figures ---------------------------------------------------------------------------------------------


def prediction_scatter_figure(measured_ms: np.ndarray, predicted_ms: np.ndarray, title: str) -> Figure:
    """Scatter of predicted over measured ms [S] on log axes, with the line of equality and ±10%."""
    words = (
        f"{len(measured_ms):,} groups\nmean absolute error {mape(predicted_ms, measured_ms):.1f}%\n"
        f"Kendall tau {kendall_tau(predicted_ms, measured_ms):.3f}"
    )
    figure, axes = _equality_figure(title, np.concatenate([measured_ms, predicted_ms]), words)
    axes.scatter(measured_ms, predicted_ms, s=8, alpha=0.6, linewidths=0)
    axes.set(xlabel="measured ms", aspect="equal")
    axes.legend(loc="upper left", frameon=False)
    return figure


def replay_scatter_figure(replays: Sequence[replay_metrics.PlanReplay], title: str) -> Figure:
    """Figure of predicted over replayed step ms of plans of many problems, on log axes.

    A colour marks the algorithm. A line joins the plans of a problem. Bars are 95% intervals of replays. The
    line of equality and ±10% are drawn too.
    """
    predicted, replayed, noise = (
        np.array([getattr(r, k) for r in replays]) for k in ("predicted_ms", "replayed_ms", "noise_ms")
    )
    found = replay_metrics.flat_metrics(replays)
    tau = f"\nKendall tau within problems {found['kendall_tau']:.2f}" if "kendall_tau" in found else ""
    words = (
        f"{found['plans']:.0f} plans of {found['problems']:.0f} problems\nmean absolute error "
        f"{found['mape']:.1f}%{tau}\nregret {found['regret']:.1f}%"
    )
    figure, axes = _equality_figure(title, np.concatenate([predicted, replayed]), words, width=8)
    axes.set(xlabel="replayed ms")
    for problem in dict.fromkeys(r.problem for r in replays):
        own = sorted((r.replayed_ms, r.predicted_ms) for r in replays if r.problem == problem)
        axes.plot(*np.array(own).T, color="0.7", linewidth=0.7, zorder=1)
    for i, name in enumerate(dict.fromkeys(r.algorithm for r in replays)):
        of = np.array([r.algorithm == name for r in replays])
        # A bar must not reach 0 on a log axis.
        axes.errorbar(
            replayed[of],
            predicted[of],
            xerr=np.minimum(noise[of], 0.9 * replayed[of]),
            fmt=_MARKERS[i // 10 % 3],
            color=f"C{i % 10}",
            markersize=4,
            linewidth=0,
            elinewidth=0.7,
            label=name,
        )
    figure.legend(loc="outside right center", frameon=False, fontsize=8)
    return figure


_MARKERS = "osv"


def _equality_figure(title: str, ms: np.ndarray, words: str, width: float = 6.4) -> tuple[Figure, Axes]:
    """Figure of log axes over the range of `ms`, with the line of equality, ±10%, and a text in a corner."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    figure, [axes] = figure_with_panels((width, 4.8))
    figure.suptitle(title)
    axes.grid(color="0.92", linewidth=0.8)
    axes.set_axisbelow(True)
    line = np.array([ms.min() * 0.9, ms.max() * 1.1])
    axes.fill_between(line, line * 0.9, line * 1.1, color="0.85", label="±10%", zorder=0)
    axes.plot(line, line, color="0.4", linewidth=1)
    axes.set(xscale="log", yscale="log", ylabel="predicted ms", xlim=line, ylim=line)
    for axis in (axes.xaxis, axes.yaxis):
        # Plain numbers instead of powers of ten.
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,g}"))
        axis.set_minor_formatter(NullFormatter())
    axes.text(0.97, 0.03, words, transform=axes.transAxes, ha="right", va="bottom")
    return figure, axes


# --- words -----------------------------------------------------------------------------------------------


def doubling_gain_sentence(curve: LearningCurve, repeatability: float | None) -> str:
    """Sentence on how much of the held-out error twice the training samples would remove."""
    most = max(n for n, _ in curve.rows)
    floor = f"; a timing itself is off by {repeatability:.1f}%" if repeatability is not None else ""
    return (
        f"Twice the groups ({2 * most:,} instead of {most:,}) would take {curve.gain:.1f} points off the "
        f"learning curve's held-out error of {curve.error_at(most):.1f}%, of own groups alone{floor}."
    )


_SPLIT_ROWS = (
    ("groups", "n_compute", "{:,.0f}"),
    ("error of a group's ms", "compute_mape", "{:.1f}%"),
    ("of its forward part", "forward_compute_mape", "{:.1f}%"),
    ("of its backward part", "backward_compute_mape", "{:.1f}%"),
    ("Kendall tau of groups", "compute_kendall_tau", "{:.3f}"),
    ("within their 90% interval", "compute_coverage_90", "{:.0f}%"),
    ("exchanges", "n_comm", "{:,.0f}"),
    ("error of a rank's all-to-all, forward", "forward_comm_mape", "{:.1f}%"),
    ("backward", "backward_comm_mape", "{:.1f}%"),
    ("of its reduce-scatter", "reduce_scatter_forward_mape", "{:.1f}%"),
    ("of its all-gather", "reduce_scatter_backward_mape", "{:.1f}%"),
    ("of its all-reduce", "all_reduce_backward_mape", "{:.1f}%"),
    ("of its exchange of ids", "all_to_all_ids_forward_mape", "{:.1f}%"),
    ("of bucketized ids", "all_to_all_ids_bucketized_forward_mape", "{:.1f}%"),
)
"""Rows of the card's table of splits: words, metric of accuracy.evaluate_accuracy, format."""


def model_card(model: NeuralModel, studied: StudyResults, name: str) -> str:
    """Model card of a trained cost model, as a page of Markdown.

    name: the model's name in the registry.
    """
    # The page must stay below 5,000 characters, which is all that a model registry keeps.
    return "\n\n".join(
        [
            f"# Cost model of {model.setting.hardware}",
            *(f"**{x}.**" for x in known_errors.error_warnings(model)),
            known_errors.model_label(model),
            "Predicts what the embedding tables of a recommendation model cost in one training step: the ms of fused "
            f"FBGEMM lookups, forward and backward, and of exchanges between devices. Valid for ({model.setting}); "
            "what is in another setting is refused. A group that grows never costs less, and an empty one costs "
            "nothing.",
            "## Trained on",
            _training_table(model),
            "## Where to trust it",
            _training_ranges_text(model),
            "## How good it is",
            _accuracy_text(studied),
            "## How to use it",
            _USE.replace("NAME", name).replace("BATCH", str(model.setting.batch)),
        ]
    )


def _training_table(model: NeuralModel) -> str:
    setting, samples, provenance = model.setting, model.meta["samples"], model.meta["provenance"]
    groups, exchanges = (
        " / ".join(f"{samples[f'{kind}_{side}']:,}" for side in ("train", "validation", "test"))
        for kind in ("compute", "comm")
    )
    return markdown_table(
        ("", ""),
        [
            ("hardware", setting.hardware),
            ("batch, weights, optimizer", f"{setting.batch:,}, {setting.precision}, {setting.optimizer}"),
            ("groups: train / validation / test", groups),
            ("exchanges: train / validation / test", exchanges),
            *(
                [("replayed steps: exchanges take there, of what they take alone", _step_factors_text(model))]
                if "steps" in model.meta
                else []
            ),
            ("measurements, DVC version", provenance.get("data_version", "-")),
            *(
                (f"{name} ({of['hardware']}), version {of['digest']}", of["words"])
                for name, of in provenance.get("lent", {}).items()
            ),
            ("code, git commit", provenance.get("git_commit", "-")),
            ("seed", model.meta["config"]["seed"]),
        ],
    )


def _step_factors_text(model: NeuralModel) -> str:
    factors = [
        f"{channel.description} {direction} {collective_model.step_factor(model.weights, channel, direction):.2f}"
        for channel in CHANNELS
        for direction in channel.definition.directions
        if collective_model.step_factor_name(channel, direction) in model.weights
    ]
    return f"{model.meta['steps']:,}: {', '.join(factors)}"


def _training_ranges_text(model: NeuralModel) -> str:
    """Ranges of the training data in words, and what is priced beyond them or by proxy."""
    owners = {"shard": "a shard", "op": "a device", "exchange": "a device"}
    lines = []
    for name, ends in model.meta["ranges"].items():
        quantity = ranges.RANGES[name]
        shown = " to ".join(dict.fromkeys(map(quantity.show, ends)))
        lines.append(f"- {owners.get(name.split('_')[0], 'a job')} {quantity.phrase.format(shown)}")
    return (
        "\n".join(["Within what it was trained on:\n", *lines]) + "\n\nBeyond it costs go on growing "
        "with the work to do, but nothing vouches for them: plans and answers name what of theirs is "
        "beyond (`extrapolated`). So they do with "
        f"what was not measured but is priced by proxy: {'; '.join(_proxy_names(model))}."
    )


def _proxy_names(model: NeuralModel) -> list[str]:
    """Names of quantities that a cost model prices without measurements of their own."""
    measured = [c for c in CHANNELS if collective_model.is_measured(model.weights, c)]
    known = [collective_model.measured_link_levels(model.weights, c) for c in measured]
    return [
        words
        for words, applies in (
            ("all exchanges, from the links' bandwidth, which a topology has to give", not measured),
            *(
                (
                    f"the {c.description} of {kinds_of_channel(c)} shards, with the rates of "
                    f"{collective_model.substitute_words(model.weights, c)}",
                    c not in measured,
                )
                for c in CHANNELS
                if c != collective_model.ALL_TO_ALL
            ),
            *(
                (f"links {level.words}, as those of other levels", any(name not in x for x in known))
                for name, level in links.LEVELS.items()
            ),
            ("links whose bandwidth a topology gives", True),
            ("devices of another speed, as the measured one scaled", True),
        )
        if applies
    ]


def _accuracy_text(studied: StudyResults) -> str:
    rows = [
        (words, *(_metric_cell(found, key, form) for found in studied.metrics.values()))
        for words, key, form in _SPLIT_ROWS
        if any(key in found for found in studied.metrics.values())
    ]
    sentences = [
        "Errors are mean absolute ones, relative to measurements of this machine; brackets hold numbers of samples. "
        "No model can be shown to err less than a timing itself is off. The test split is held out: no training sees "
        "it, and it decides on promotion. Own groups are those of train and validation. With 95% intervals: "
        f"{accuracy.accuracy_summary(studied.metrics['test'])}."
    ]
    if studied.unseen_tables is not None:
        sentences.append(
            f"On groups of tables kept aside a model trained without them errs by {studied.unseen_tables:.1f}%."
        )
    if studied.curve is not None:
        sentences.append(doubling_gain_sentence(studied.curve, None))
    return markdown_table(("", *studied.metrics), rows) + "\n\n" + " ".join(sentences)


def _metric_cell(metrics: Mapping[str, float], key: str, form: str) -> str:
    count = metrics.get(f"n_{key.removesuffix('_mape')}") if "comm" in key else None
    return "-" if key not in metrics else form.format(metrics[key]) + (f" ({count:.0f})" if count else "")


_USE = """```
python -m shardcore plan PROBLEM.json --model data/model --out PLAN.json
mlflow models serve -m models:/NAME@champion --env-manager local -p 5001
curl localhost:5001/invocations -H 'Content-Type: application/json' -d \\
  '{"inputs": [{"batch": BATCH, "shards": [
      {"table": {"name": "t", "rows": 1000000, "dim": 64, "pooling": 10}}]}]}'
```

In Python: `shardcore.load_model("data/model")`, or `mlflow.pyfunc.load_model("models:/NAME@champion")`,
whose `predict` takes the list under "inputs". A group's answer: `ms`, of it `forward_ms`, `low_ms` to
`high_ms` (holds 90% of measurements), `extrapolated`. A shard may name its `rows` and `columns`,
[low, high] each.
"""
