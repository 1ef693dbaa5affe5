"""Commands on measurements: train, report."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from shardcore.cli.commands import ReportOptions, TrainOptions
from shardcore.cli.progress_line import PrintedProgress, showing_progress
from shardcore.core import progress
from shardcore.core.errors import ShardCoreError
from shardcore.core.types import Setting
from shardcore.core.validation import require
from shardcore.cost import accuracy, known_errors, neural, study, training
from shardcore.cost.fit_config import FitConfig
from shardcore.cost.profile import load_profile
from shardcore.io import dataset, replays, schema, traced_samples
from shardcore.report import dataset_report, figures, text_table
from shardcore.report.text import rounded_json
from shardcore.stages import train as stage

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# --- train -----------------------------------------------------------------------------------------------


def train(args: TrainOptions) -> None:
    # Samples of different settings must not train one model. The first folder's are this machine's.
    settings = _dataset_settings(args.datasets[0])
    chosen = [
        s
        for s in settings
        if all(
            getattr(args, k) in (None, getattr(s, k)) for k in ("hardware", "batch", "precision", "optimizer")
        )
    ]
    require(
        len(chosen) == 1,
        f"{args.datasets[0]}: samples for "
        f"[{'; '.join(map(str, settings))}]; "
        "choose one with --hardware, --batch, --precision and --optimizer",
    )
    data, start = training.read_training_data(args.datasets[0], chosen[0], args.datasets[1:]), None
    if args.start is not None:
        start = neural.load(args.start) if Path(args.start).is_dir() else load_profile(args.start)
    config = schema.build_record(FitConfig, {"seed": args.seed}, "train")
    with showing_progress("training") as line:
        trained = stage.train(data, config, PrintedProgress(line), start)
        progress.report("judging the model")
        judged = study.judge_test_split(trained.model, data.known)
    neural.save(trained.model, args.out)
    print(
        f"{args.out}: {known_errors.model_label(trained.model)}",
        accuracy.accuracy_summary(judged),
        sep="\n",
        file=sys.stderr,
    )
    print(rounded_json(judged))


def _dataset_settings(folder: Path) -> list[Setting]:
    """Settings of the samples in a dataset folder. Raises ShardCoreError for a folder without samples."""
    require(folder.is_dir(), f"{folder} is no folder; it needs to be one of measurements, as measure makes")
    if not (found := dataset.dataset_settings(folder) or traced_samples.traced_settings(folder)):
        raise ShardCoreError(
            f"{folder} holds no compute samples and no traced steps; it needs to be a folder of measurements, as "
            "measure makes"
        )
    return found


# --- report ----------------------------------------------------------------------------------------------


def report(args: ReportOptions) -> None:
    pictures: dict[Path, Callable[[], Figure]] = {}
    for setting in _dataset_settings(args.dataset):
        with showing_progress(f"reading samples of {setting}"):
            samples = dataset.read_compute_samples(args.dataset, setting)
            repeats = dataset.repeated_samples(dataset.read_compute_timings(args.dataset, setting))
            rows = dataset_report.dataset_summary(samples, repeats) if samples else []
            if comm := dataset.read_collective_samples(args.dataset, setting):
                rows += dataset_report.exchange_summary(comm)
            if kept := replays.read_all_replays(args.dataset / dataset.REPLAYS, setting):
                rows += dataset_report.step_summary(kept)
            if traced := traced_samples.read_traced_samples([args.dataset], setting):
                rows += dataset_report.traced_summary(traced)
        print(f"{setting}\n\n{text_table(('quantity', 'value'), rows, words=(1,))}\n")
        if args.out and samples:
            named = setting.hardware, setting.batch, setting.precision, setting.optimizer
            draw = partial(dataset_report.dataset_figure, samples, repeats, str(setting))
            pictures[args.out / f"{'-'.join(map(str, named))}.png"] = draw
    # Last, as they need a package that may not be there.
    for path, draw in pictures.items():
        print(figures.write_png(path, draw))
