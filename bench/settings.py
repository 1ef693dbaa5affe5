"""Compute models of each optimizer and precision that FBGEMM trains here, measured and trained alike.

    python -m bench.settings --out DIR
    python -m bench.settings --out DIR --other EARLIER     # beside the same groups' timings of an earlier run

Each setting gets the first --samples groups of the same draws, in --rounds turns with the other settings, so
that a slow hour of the machine is shared by all; then --again of them once more, which shows what timings are
worth. What FBGEMM does not train here is listed with its refusal. DIR keeps what was measured and trained:
killed, it goes on, and finished settings stay.

Errors are of forward + backward, in percent, on held-out groups: the mean of --seeds models, each with a
split of its own. A split holds out the same groups of every setting. `base` is the setting that all are
compared with, exact_sgd with fp32.

  own             a model trained on the setting's own groups; `of base`: over the base's own error
  1 factor        the base's model of the same groups times one factor, fitted to the setting's other groups
  2 factors       the same with a factor of forward and one of backward
  fine-tuned      the base's model fine-tuned on the setting's groups
  base as it is   the base's model, nothing fitted
  repeatability   mean difference of two timings of a group over √2, of those that were timed twice: minutes
                  lie between, so it has what the machine did meanwhile
  spread          interquartile range of a group's repeats over their median, the median group's
  of base         a group's time over the same group's in base: median (10% to 90% of the groups); and the
                  medians of backward for the quarters of groups with the fewest and the most lookups
  level, noise    with --other: the median of this run's timings over those of the same groups there; and the
                  mean difference from it over √2, which is what one timing errs
  beyond noise    √(own² - noise²)
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shardcore import report
from shardcore.core.errors import ShardCoreError
from shardcore.core.types import OPTIMIZERS, PRECISION_BYTES, Setting
from shardcore.cost import accuracy, drift_correction, fit, nets, study
from shardcore.cost.metrics import mape
from shardcore.cost.neural import NeuralModel
from shardcore.io import dataset, writing
from shardcore.io.measurements import ComputeRequest, ComputeSample
from shardcore.measure import fused_op, hardware

ARMS = ("own", "1 factor", "2 factors", "fine-tuned", "base as it is")
MEASURED_WITH = ("--device", "cpu", "--tolerance", "0.05", "--max-repeats", "8", "--arena-gib", "1")


# --- measuring ----------------------------------------------------------------------------------------------


def runnable(settings: Sequence[Setting]) -> list[Setting]:
    """The settings that FBGEMM trains here; the refusals of the others are printed."""
    found = []
    for setting in settings:
        try:
            fused_op.require_trains(setting, "cpu")
            found.append(setting)
        except ShardCoreError as error:
            print(f"refused: {error}")
    return found


def folder(out: Path, setting: Setting) -> Path:
    return out / f"{setting.optimizer}-{setting.precision}"


def measure(out: Path, setting: Setting, samples: int, again: int, minutes: float) -> None:
    """Measure the first so many groups, each that is missing; and the first `again` once more."""
    command = [
        sys.executable,
        "-m",
        "shardcore",
        "measure",
        *MEASURED_WITH,
        "--batch",
        str(setting.batch),
        "--precision",
        setting.precision,
        "--optimizer",
        setting.optimizer,
        "--samples",
        str(samples),
        "--again",
        str(again),
        "--minutes",
        str(minutes),
        "--out",
        str(folder(out, setting)),
    ]
    began = time.monotonic()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    print(
        f"{setting}: {samples} groups, {again} again, {time.monotonic() - began:.0f} s, load "
        f"{os.getloadavg()[0]:.1f}",
        file=sys.stderr,
        flush=True,
    )


def measure_all(args: argparse.Namespace, settings: Sequence[Setting]) -> None:
    """Measure in turns. A turn that was finished is not begun again."""
    turns = [(args.samples * n // args.rounds, 0) for n in range(1, args.rounds + 1)]
    for samples, again in [*turns, (args.samples, args.again)]:
        for setting in settings:
            done = folder(args.out, setting) / f"{samples}-{again}.done"
            if not done.exists():
                measure(args.out, setting, samples, again, args.minutes)
                done.touch()


# --- the same groups in every setting -----------------------------------------------------------------------


def in_base(request: ComputeRequest, base: Setting) -> ComputeRequest:
    """A group as the base setting has it: the same shards, in the base's precision."""
    shards = tuple(
        dataclasses.replace(s, table=dataclasses.replace(s.table, precision=base.precision))
        for s in request.shards
    )
    return dataclasses.replace(request, shards=shards)


def split(samples: Sequence[ComputeSample], base: Setting, seed: int) -> list[ComputeSample]:
    """Samples with ids by which a seed holds out the same groups of every setting."""
    return [
        dataclasses.replace(s, id=f"{seed}-{dataset.compute_id(base, in_base(s.request, base))}")
        for s in samples
    ]


def measured_ms(samples: Sequence[ComputeSample]) -> np.ndarray:
    """[S, 2] forward and backward."""
    return np.array([[s.forward.median_ms, s.backward.median_ms] for s in samples])


def base_ms(model: NeuralModel, samples: Sequence[ComputeSample]) -> np.ndarray:
    """[S, 2] forward and backward that the base's model predicts for the groups as the base has them."""
    requests = [in_base(s.request, model.setting) for s in samples]
    return nets.parts(model.weights, np.stack([model.encode(r.shards, r.batch).sum(0) for r in requests]))


def errors(
    samples: Sequence[ComputeSample], setting: Setting, base: NeuralModel, seed: int
) -> dict[str, float]:
    """The error of each arm on one split. samples: as `split` gives them."""
    test = accuracy.held_out(samples)
    rest = [s for s in samples if accuracy.split_of(s.id) != "test"]
    goal, known, predicted = measured_ms(test).sum(1), measured_ms(rest), base_ms(base, rest)
    one = np.median(known.sum(1) / predicted.sum(1))
    two = np.median(known / predicted, axis=0)
    found = {
        "1 factor": one * base_ms(base, test).sum(1),
        "2 factors": (two * base_ms(base, test)).sum(1),
        "base as it is": base_ms(base, test).sum(1),
    }
    for arm, start in (("own", None), ("fine-tuned", base)):
        model = fit.train(samples, [], setting, fit.FitConfig(seed=seed), start=start).model
        found[arm] = accuracy.predict(model, test)
    return {"held out": len(test), **{arm: mape(found[arm], goal) for arm in ARMS}}


# --- figures ------------------------------------------------------------------------------------------------


def ratios(
    samples: Sequence[ComputeSample], of_base: Mapping[ComputeRequest, ComputeSample], base: Setting
) -> dict[str, list[float]]:
    """Of a group's time over its time in base, for forward, backward and both: median, 10% and 90%.

    few and many: the medians of backward where lookups are fewest and where they are most.
    """
    pairs = [(s, of_base[group]) for s in samples if (group := in_base(s.request, base)) in of_base]
    ours, theirs = (measured_ms(side) for side in zip(*pairs, strict=True))
    found = {
        "forward": ours[:, 0] / theirs[:, 0],
        "backward": ours[:, 1] / theirs[:, 1],
        "both": ours.sum(1) / theirs.sum(1),
    }
    lookups = np.array([s.request.batch * sum(x.table.pooling for x in s.request.shards) for s, _ in pairs])
    few, many = np.quantile(lookups, (0.25, 0.75))
    return {
        "groups": [len(pairs)],
        "few": [np.median(found["backward"][lookups <= few])],
        "many": [np.median(found["backward"][lookups >= many])],
    } | {part: np.quantile(r, (0.5, 0.1, 0.9)).tolist() for part, r in found.items()}


def noise(known: drift_correction.Measurements) -> dict[str, float]:
    timed = [s for s in known.compute if s.error is None]
    parts = [p for s in timed for p in (s.forward, s.backward)]
    return {
        "groups": len(timed),
        "failed": len(known.compute) - len(timed),
        "repeatability": study.repeatability(known.repeats) or float("nan"),
        "spread": 100 * float(np.median([(p.q3_ms - p.q1_ms) / p.median_ms for p in parts])),
        "relative ci": 100 * float(np.median([s.relative_ci for s in timed])),
        "slowdown 10%": float(np.quantile([s.slowdown for s in timed], 0.1)),
        "slowdown 90%": float(np.quantile([s.slowdown for s in timed], 0.9)),
    }


def between(ours: Sequence[ComputeSample], theirs: Sequence[ComputeSample]) -> dict[str, float]:
    """Level, and noise in percent, of two runs' timings of the same groups."""
    known = {s.request: s for s in theirs if s.error is None}
    found = np.array([s.total_ms / known[s.request].total_ms for s in ours if s.request in known])
    level = float(np.median(found))
    return {"level": level, "noise": 100 * float(np.mean(np.abs(found / level - 1))) / math.sqrt(2)}


def judged(args: argparse.Namespace, settings: Sequence[Setting]) -> dict[Setting, dict[str, Any]]:
    """The figures of each setting. Errors, which need training, are kept in a file a seed."""
    known = {s: drift_correction.read([folder(args.out, s)], s) for s in settings}
    samples = {s: [x for x in known[s].compute if x.error is None] for s in settings}
    base = settings[0]
    of_base = {x.request: x for x in samples[base]}
    found = {
        s: {"noise": noise(known[s]), "ratios": ratios(samples[s], of_base, base), "errors": []}
        for s in settings
    }
    for s in settings if args.other else ():
        found[s]["other"] = between(samples[s], drift_correction.read([folder(args.other, s)], s).compute)
    for seed in range(args.seeds):
        model = None
        for setting in settings:
            path = folder(args.out, setting) / f"errors-{seed}.json"
            # Repeats count: what was timed twice has the better of two timings.
            made_of = {str(s): [len(samples[s]), len(known[s].repeats)] for s in (base, setting)}
            if not path.exists() or json.loads(path.read_text())["made_of"] != made_of:
                model = (
                    model
                    or fit.train(split(samples[base], base, seed), [], base, fit.FitConfig(seed=seed)).model
                )
                writing.write_json(
                    path,
                    {
                        "made_of": made_of,
                        "errors": errors(split(samples[setting], base, seed), setting, model, seed),
                    },
                )
            found[setting]["errors"].append(json.loads(path.read_text())["errors"])
    return found


def table(found: Mapping[Setting, dict[str, Any]]) -> str:
    """The figures for people: a column a setting."""
    columns = list(found.values())

    def mean(column: dict[str, Any], arm: str) -> float:
        return float(np.mean([e[arm] for e in column["errors"]]))

    def errors_of(column: dict[str, Any], arm: str) -> str:
        return f"{mean(column, arm):.2f} ± {np.std([e[arm] for e in column['errors']]):.2f}"

    def row(name: str, spoken: Callable[[dict[str, Any]], str]) -> tuple[str, ...]:
        return name, *map(spoken, columns)

    def beyond(column: dict[str, Any]) -> str:
        return f"{math.sqrt(max(0.0, mean(column, 'own') ** 2 - column['other']['noise'] ** 2)):.1f}"

    beside = (
        [
            row("level, of --other", lambda c: f"{c['other']['level']:.2f}"),
            row("noise, %", lambda c: f"{c['other']['noise']:.1f}"),
            row("own beyond noise, %", beyond),
        ]
        if "other" in columns[0]
        else []
    )
    return report.text_table(
        ("", *(f"{s.optimizer} {s.precision}" for s in found)),
        [
            row("groups", lambda c: f"{c['noise']['groups']}"),
            row("held out a split", lambda c: f"{mean(c, 'held out'):.0f}"),
            *(row(f"{arm}, %", lambda c, arm=arm: errors_of(c, arm)) for arm in ARMS),
            row("own, of base", lambda c: f"{mean(c, 'own') / mean(columns[0], 'own'):.2f}"),
            *(
                row(f"{name}, %", lambda c, name=name: f"{c['noise'][name]:.1f}")
                for name in ("repeatability", "spread", "relative ci")
            ),
            row(
                "slowdown, 10% to 90%",
                lambda c: f"{c['noise']['slowdown 10%']:.2f} to {c['noise']['slowdown 90%']:.2f}",
            ),
            row("groups of base too", lambda c: f"{c['ratios']['groups'][0]}"),
            *(
                row(
                    f"{part}, of base",
                    lambda c, part=part: "{:.2f} ({:.2f} to {:.2f})".format(*c["ratios"][part]),
                )
                for part in ("forward", "backward", "both")
            ),
            *(
                row(f"backward, {part} lookups", lambda c, part=part: f"{c['ratios'][part][0]:.2f}")
                for part in ("few", "many")
            ),
            *beside,
        ],
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder that keeps datasets and errors")
    parser.add_argument("--other", type=Path, help="folder of an earlier run of the same groups")
    parser.add_argument("--batch", type=int, default=2048, help="global batch (2048)")
    parser.add_argument("--samples", type=int, default=600, help="groups of each setting (600)")
    parser.add_argument("--again", type=int, default=80, help="of them measured twice (80)")
    parser.add_argument("--rounds", type=int, default=4, help="turns of measuring (4)")
    parser.add_argument("--minutes", type=float, default=5, help="of one turn of a setting, at most (5)")
    parser.add_argument("--seeds", type=int, default=5, help="splits and models of each setting (5)")
    args = parser.parse_args()
    name = hardware.hardware_name("cpu")
    hardware.require_fbgemm("cpu")
    settings = runnable(
        [Setting(name, args.batch, p, o) for o, p in itertools.product(OPTIMIZERS, PRECISION_BYTES)]
    )
    measure_all(args, settings)
    print(f"\n{name}, batch {args.batch}; measured with {' '.join(MEASURED_WITH)}\n")
    print(table(judged(args, settings)))


if __name__ == "__main__":
    main()
