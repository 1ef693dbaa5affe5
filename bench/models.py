"""The compute model against NeuroShard's published network: same samples, same splits, one run.

    python -m bench.models datasets/cpu-amd-epyc --seeds 5 --out /tmp/models

What is trained is kept in OUT, one file a model, seed and split: killed, it goes on; two runs (--only) share
the work. The last line's table takes all that is there. OUT/curves.png shows that NeuroShard's network has
converged.

NeuroShard's network (neuroshard_net.py) is trained as published, with our loss, and with our loss and
features, each with its layers, optimizer and number of epochs. `physical rates` is our model before anything
is learned. Only groups at the setting's own batch count, for NeuroShard's features do not tell the batch.
Drift is corrected (cost/drift_correction.py) for all alike; `as measured` is the error on the test split's
timings as they were.
Errors are of forward + backward, in percent:

  error           on the test split by sample; `beyond floor` is √(error² - floor²), the floor being the mean
                  difference of two timings of a group over √2
  planned         on those of its groups that come from sharders' plans; `random` on the others
  unseen tables   on groups of held-out tables alone, by models trained on groups without any of them
  lowered         additions of a random measured shard to a test group that lower the predicted cost, of
                  10,000
  coverage        of the 90% interval: on the test split, on its planned groups, on unseen tables
  costs a µs      group costs per microsecond of one thread, from cached encodings: a batch of 1,024 groups,
                  each given one shard more, priced

Shapes: S groups, N shards, F features.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
import timeit
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench import common, neuroshard_net
from bench.common import print_progress
from shardcore import report
from shardcore.core.errors import ShardCoreError
from shardcore.core.types import Setting, Table
from shardcore.cost import accuracy, drift_correction, fit, study
from shardcore.cost.metrics import interval_coverage, kendall_tau, mape
from shardcore.cost.model import group_op_ms
from shardcore.cost.neural import NeuralModel
from shardcore.io import dataset, files, writing
from shardcore.io.measurements import ComputeRequest, ComputeSample
from shardcore.measure.sampling.groups import GroupConfig, draw_compute_request

ADDITIONS = 10_000


@dataclass(frozen=True)
class Trained:
    """predict: [S] ms of groups. curve: validation error in percent after each epoch. model: what has
    intervals and encodings."""

    predict: Callable[[Sequence[ComputeRequest]], np.ndarray]
    curve: list[float]
    model: NeuralModel | None = None


@dataclass(frozen=True)
class Data:
    """Measured ops: all, the test split, its ops of planned and of other groups, ops of unseen tables alone and without
    unseen tables, the test split's raw timings; lowest possible error in percent.
    """

    groups: list[ComputeSample]
    test: list[ComputeSample]
    planned: list[ComputeSample]
    random: list[ComputeSample]
    unseen: list[ComputeSample]
    seen: list[ComputeSample]
    as_measured: dict[str, float]
    floor: float


# --- ours ---------------------------------------------------------------------------------------------------


def train_our_model(groups: Sequence[ComputeSample], config: fit.FitConfig) -> Trained:
    trained = fit.train(groups, [], groups[0].setting, config)
    model = trained.model
    return Trained(
        lambda requests: np.array([group_op_ms([r.shards], model, r.batch)[0] for r in requests]),
        [r["validation_mape"] for r in trained.curves if r["epoch"]],
        model,
    )


# --- figures ------------------------------------------------------------------------------------------------


def measured_total_ms(samples: Sequence[ComputeSample]) -> np.ndarray:
    return np.array([s.total_ms for s in samples])


def error_percent(model: Trained, samples: Sequence[ComputeSample]) -> float:
    return mape(model.predict([s.request for s in samples]), measured_total_ms(samples))


def interval_coverages(model: Trained, **samples: Sequence[ComputeSample]) -> dict[str, float]:
    """Interval coverage in percent on each set of samples. {} for a model without intervals."""
    return {
        f"coverage {name}": interval_coverage(
            *accuracy.confidence_intervals(model.model, found, 0.9), measured_total_ms(found)
        )
        for name, found in samples.items()
        if model.model is not None
    }


def test_metrics(model: Trained, test: Sequence[ComputeSample]) -> dict[str, float]:
    if model.model is None:
        return {}
    codes = [model.model.encode(s.request.shards, s.request.batch) for s in test]
    rng = np.random.default_rng(0)
    sums, more = (
        np.stack([f(codes[i]) for i in rng.integers(len(codes), size=1024)])
        for f in (lambda c: c.sum(0), lambda c: c[0])
    )
    seconds = min(timeit.repeat(lambda: model.model.op_ms(sums + more), number=200, repeat=5)) / 200
    return {"costs a µs": len(sums) / seconds / 1e6}


def lowered_by_additions_percent(model: Trained, test: Sequence[ComputeSample], seed: int) -> float:
    rng = np.random.default_rng(seed)
    shards = [s for x in test for s in x.request.shards]
    before = [test[i].request for i in rng.integers(0, len(test), ADDITIONS)]
    after = [ComputeRequest((*r.shards, shards[rng.integers(len(shards))]), r.batch) for r in before]
    return 100 * float(np.mean(model.predict(after) < model.predict(before)))


def split_by_sample_metrics(model: Trained, data: Data, seed: int) -> dict[str, float]:
    found = model.predict([s.request for s in data.test])
    whole = mape(found, measured_total_ms(data.test))
    return {
        "error": whole,
        "as measured": mape(found, np.array([data.as_measured[s.id] for s in data.test])),
        "tau": kendall_tau(found, measured_total_ms(data.test)),
        "beyond floor": math.sqrt(max(0.0, whole**2 - data.floor**2)),
        "planned": error_percent(model, data.planned),
        "random": error_percent(model, data.random),
        "lowered": lowered_by_additions_percent(model, data.test, seed),
        **interval_coverages(model, test=data.test, planned=data.planned),
        **test_metrics(model, data.test),
    }


def split_by_table_metrics(model: Trained, data: Data, seed: int) -> dict[str, float]:
    return {
        "unseen tables": error_percent(model, data.unseen),
        **interval_coverages(model, unseen=data.unseen),
    }


def planned_ids(
    pool: Sequence[Table], setting: Setting, draws: int, seeds: Sequence[int], arena_bytes: int
) -> set[str]:
    """Ids of those drawn groups of tables that a sharder's plan puts together on one device."""
    # As drawn when the shipped dataset was measured: one batch, and all lookups pooled.
    config = GroupConfig(max_shard_bytes=arena_bytes, smaller_batches=0.0, sequences=0.0)
    live = [t for t in pool if t.pooling > 0]
    return {
        dataset.compute_id(setting, draw_compute_request(live, i, setting, seed, config))
        for seed in seeds
        for i in range(draws)
        if np.random.default_rng([1, seed, i]).random() < config.planned
    }


def read_data(args: argparse.Namespace) -> Data:
    setting = common.single_setting(args.dataset)
    known = drift_correction.read_measurements(args.dataset, setting)
    groups = [s for s in known.compute if s.error is None and s.request.batch == setting.batch]
    # The pools that were measured: one that is generated on another machine differs in a few tables.
    pools = [files.read_pool(path) for path in sorted(Path(args.dataset).glob("pool-*.json"))]
    asked = setting, args.draws, args.draw_seeds, int(args.arena_gib * 2**30)
    from_plans = set[str]().union(*(planned_ids(pool, *asked) for pool in pools))
    test = accuracy.held_out_samples(groups)
    planned, random = ([s for s in test if (s.id in from_plans) == side] for side in (True, False))
    seen, unseen = study.split_by_table(groups)
    measured = {
        s.id: s.total_ms for s in dataset.read_compute_samples(args.dataset, setting) if s.error is None
    }
    data = Data(
        groups, test, planned, random, unseen, seen, measured, study.repeatability_error(known.repeats) or 0.0
    )
    if not (planned and random and unseen and len(seen) >= fit.MIN_COMPUTE):
        raise ShardCoreError(
            f"{args.dataset} has {len(planned)} planned and {len(random)} other groups in "
            f"its test split, {len(unseen)} of unseen tables and {len(seen)} without any; "
            "each is needed (see --draws)"
        )
    unsettled = (
        study.repeatability_error(
            dataset.repeated_samples(dataset.read_compute_timings(args.dataset, setting))
        )
        or 0.0
    )
    print(
        f"{setting}: {len(groups)} groups, {len(test)} of them held out, {len(planned)} of those from "
        f"plans; unseen tables: {len(unseen)} groups, by models of {len(seen)}; repeatability (floor): "
        f"{data.floor:.2f}% (as measured {unsettled:.2f}%)\n",
        flush=True,
    )
    return data


def curves_figure(rows: Sequence[dict[str, Any]]) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for i, name in enumerate(dict.fromkeys(r["model"] for r in rows)):
        for row in (r for r in rows if r["model"] == name):
            axes.plot(range(1, len(row["curve"]) + 1), row["curve"], linewidth=0.8, color=f"C{i}", alpha=0.6)
        axes.plot([], [], color=f"C{i}", label=f"{name}, {sum(r['model'] == name for r in rows)} seeds")
    axes.set(
        xlabel="epoch",
        ylabel="validation error, %",
        xscale="log",
        yscale="log",
        title="training, split by sample",
    )
    axes.legend()
    return figure


def main() -> None:
    parser = common.bench_parser(
        __doc__,
        {"dataset": "folder of measurements of one setting"},
        seeds=(1, "seeds of initial weights and order"),
        epochs=(1000, "of NeuroShard's network"),
        only=(str, "train only models whose name holds this"),
        out=(..., "folder that keeps what was trained"),
        draws=(5100, "of each seed that the dataset measured"),
        arena_gib=(4.0, "with which it was measured"),
    )
    parser.add_argument(
        "--draw-seeds", type=int, nargs="*", default=[0, 1], help="that the dataset measured (0 1)"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    data = read_data(args)
    models: dict[str, Callable[[Sequence[ComputeSample], int], Trained]] = {
        **{
            name: lambda known, seed, recipe=recipe: Trained(
                *neuroshard_net.train_network(known, recipe, seed, args.epochs)
            )
            for name, recipe in neuroshard_net.RECIPES.items()
        },
        "physical rates": lambda known, seed: train_our_model(
            known, fit.FitConfig(seed=seed, epochs=1, learning_rate=1e-12)
        ),
        "ShardCore": lambda known, seed: train_our_model(known, fit.FitConfig(seed=seed)),
    }
    splits = {
        "by sample": (data.groups, split_by_sample_metrics),
        "by table": (data.seen, split_by_table_metrics),
    }
    made_of = {"dataset": str(args.dataset), "groups": len(data.groups), "epochs": args.epochs}
    rows = []
    for seed, (name, train), (split, (known, judge)) in itertools.product(
        range(args.seeds), models.items(), splits.items()
    ):
        path = args.out / f"{name}-{split}-{seed}.json".replace(" ", "-").replace("'", "")
        if not path.exists() and (args.only or "") in name:
            began = time.perf_counter()
            model, seconds = train(known, seed), time.perf_counter() - began
            writing.write_json(
                path,
                {
                    "made_of": made_of,
                    "model": name,
                    "split": split,
                    "seed": seed,
                    "train s": seconds,
                    "curve": model.curve,
                    "figures": judge(model, data, seed),
                },
            )
        if path.exists():
            rows.append(json.loads(path.read_text()))
            if rows[-1].get("made_of") != made_of:
                raise ShardCoreError(
                    f"{path} is of {rows[-1].get('made_of')}, this run of {made_of}; give another --out"
                )
            print_progress(
                f"seed {seed}, {name}, {split}: {rows[-1]['train s']:.0f} s, "
                f"{next(iter(rows[-1]['figures'].values())):.2f}%"
            )
    found: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        trained = {"train s": row["train s"]} if row["split"] == "by sample" else {}
        for figure, value in {**row["figures"], **trained}.items():
            found.setdefault(figure, {}).setdefault(row["model"], []).append(value)
    cells = [
        (
            figure,
            *(
                f"{np.mean(v):.3f} ± {np.std(v):.3f} ({len(v)})" if (v := of.get(name)) else ""
                for name in models
            ),
        )
        for figure, of in found.items()
    ]
    print(report.text_table(("mean ± sd (seeds)", *models), cells))
    curves_figure([r for r in rows if r["split"] == "by sample"]).savefig(args.out / "curves.png", dpi=110)


if __name__ == "__main__":
    main()
