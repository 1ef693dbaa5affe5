"""Commands on measurements: train, report."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from shardcore.cli.options import command, natural, positive
from shardcore.cli.progress_line import shown
from shardcore.core import progress
from shardcore.core.errors import ShardCoreError
from shardcore.core.types import OPTIMIZERS, PRECISION_BYTES, Setting
from shardcore.io.model_files import MODEL_JSON, MODEL_WEIGHTS


def add_commands(commands: argparse._SubParsersAction) -> None:
    _add_train(commands)
    _add_report(commands)


# --- train -----------------------------------------------------------------------------------------------


def _add_train(commands: argparse._SubParsersAction) -> None:
    p = command(
        commands,
        train,
        "Train cost models on the samples of one setting in dataset folders.",
        folders={"out": (MODEL_JSON, MODEL_WEIGHTS)},
    )
    p.add_argument("datasets", type=Path, nargs="+", metavar="DIR")
    p.add_argument("--hardware", help="choose one of the datasets' settings, together with the next three")
    p.add_argument("--batch", type=positive(int))
    p.add_argument("--precision", choices=PRECISION_BYTES)
    p.add_argument("--optimizer", choices=OPTIMIZERS)
    p.add_argument(
        "--start",
        type=Path,
        metavar="MODEL",
        help="fine-tune this model, of another batch, optimizer or machine, where samples are few",
    )
    p.add_argument("--seed", type=natural, default=0)
    p.add_argument("--out", type=Path, required=True, metavar="MODEL", help="folder to write")


def train(args: argparse.Namespace) -> None:
    from shardcore.cost import fit, known_errors, neural, training
    from shardcore.io import schema

    # Samples of different settings must not train one model.
    found = sorted({s for folder in args.datasets for s in _settings_in(folder)}, key=str)
    chosen = [
        s
        for s in found
        if all(
            getattr(args, k) in (None, getattr(s, k)) for k in ("hardware", "batch", "precision", "optimizer")
        )
    ]
    if len(chosen) != 1:
        raise ShardCoreError(
            f"{', '.join(map(str, args.datasets))}: samples for "
            f"[{'; '.join(map(str, found))}]; "
            "choose one with --hardware, --batch, --precision and --optimizer"
        )
    data, start = training.read(args.datasets, chosen[0]), neural.load(args.start) if args.start else None
    config = schema.build(fit.FitConfig, {"seed": args.seed}, "train")
    print(*data.warnings, data, sep="\n", file=sys.stderr)
    with shown():
        progress.report("training")
        trained = training.train(data, config, _report_epoch, start)
        progress.report("judging the model")
        judged = training.judge(trained.model, data.known)
    neural.save(trained.model, args.out)
    for line in (
        trained.of_steps,
        f"{args.out}: {known_errors.label(trained.model)}",
        *known_errors.worse_than_usual(trained.model),
    ):
        if line:
            print(line, file=sys.stderr)
    print(json.dumps(judged, indent=1))


def _settings_in(folder: Path) -> list[Setting]:
    """Settings of a dataset's samples. Raises ShardCoreError if there are none."""
    from shardcore.io import dataset

    if not folder.is_dir():
        raise ShardCoreError(f"{folder} is no folder; it needs to be one of measurements, as measure makes")
    if not (found := dataset.settings(folder)):
        raise ShardCoreError(
            f"{folder} holds no compute samples; it needs to be a folder of measurements, as measure makes"
        )
    return found


def _report_epoch(model: str, epoch: int, values: dict[str, float]) -> None:
    shown_values = ", ".join(f"{name} {value:.4g}" for name, value in values.items())
    progress.report(f"training {model}, epoch {epoch}: {shown_values}")


# --- report ----------------------------------------------------------------------------------------------


def _add_report(commands: argparse._SubParsersAction) -> None:
    p = command(
        commands,
        report,
        "Say what a dataset covers, how noisy it is, how it drifts and repeats.",
        folders={"out": ()},
    )
    p.add_argument("dataset", type=Path, metavar="DIR")
    p.add_argument("--out", type=Path, metavar="FOLDER", help="write the plots there")


def report(args: argparse.Namespace) -> None:
    from shardcore.io import dataset, replays, writing
    from shardcore.report import dataset_report, figures, text_table

    found = _settings_in(args.dataset)
    for setting in found:
        with shown():
            progress.report(f"reading samples of {setting}")
            samples = dataset.read_compute(args.dataset, setting)
            repeats = dataset.read_repeats(args.dataset, setting)
            rows = dataset_report.dataset_summary(samples, repeats)
            if comm := dataset.read_comm(args.dataset, setting):
                rows += dataset_report.exchange_summary(comm)
            if kept := replays.read_all(args.dataset / dataset.REPLAYS, setting):
                rows += dataset_report.step_summary(kept)
            if args.out:
                progress.report("drawing")
                figure = figures.png(dataset_report.dataset_figure(samples, repeats, str(setting)))
        print(f"{setting}\n\n{text_table(('quantity', 'value'), rows, words=(1,))}\n")
        if args.out:
            named = setting.hardware, setting.batch, setting.precision, setting.optimizer
            path = args.out / f"{'-'.join(map(str, named))}.png"
            writing.write_atomic(path, figure)
            print(path)
