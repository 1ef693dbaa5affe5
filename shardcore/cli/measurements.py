"""The command that reports on measurements."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from shardcore.cli.commands import ReportOptions
from shardcore.cli.progress_line import showing_progress
from shardcore.core.errors import ShardCoreError
from shardcore.core.types import Setting
from shardcore.core.validation import require
from shardcore.io import dataset, replays, traced_samples
from shardcore.report import dataset_report, figures, text_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def dataset_settings(folder: Path) -> list[Setting]:
    """Settings of the samples in a dataset folder. Raises ShardCoreError for a folder without samples."""
    require(folder.is_dir(), f"{folder} is no folder; it needs to be one of measurements, as measure makes")
    if not (found := dataset.dataset_settings(folder) or traced_samples.traced_settings(folder)):
        raise ShardCoreError(
            f"{folder} holds no compute samples and no traced steps; it needs to be a folder of measurements, as "
            "measure makes"
        )
    return found


def report(args: ReportOptions) -> None:
    pictures: dict[Path, Callable[[], Figure]] = {}
    for setting in dataset_settings(args.dataset):
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
