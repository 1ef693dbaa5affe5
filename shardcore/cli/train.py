"""The command that trains a cost model on measurements. It needs torch, which a report does not."""

from __future__ import annotations

import sys
from pathlib import Path

from shardcore.cli.commands import TrainOptions
from shardcore.cli.measurements import dataset_settings
from shardcore.cli.progress_line import PrintedProgress, showing_progress
from shardcore.core import progress
from shardcore.core.validation import require
from shardcore.cost import accuracy, known_errors, neural, study, training
from shardcore.cost.fit_config import FitConfig
from shardcore.cost.profile import load_profile
from shardcore.report.text import rounded_json
from shardcore.stages import train as stage


def train(args: TrainOptions) -> None:
    # Samples of different settings must not train one model. The first folder's are this machine's.
    settings = dataset_settings(args.datasets[0])
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
    with showing_progress("training") as line:
        trained = stage.train(data, FitConfig(seed=args.seed), PrintedProgress(line), start)
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
