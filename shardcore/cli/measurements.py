"""Commands on measurements: measure, train, report."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from shardcore.cli.options import command, natural, positive, positive_gib
from shardcore.errors import ShardCoreError
from shardcore.model_files import MODEL_JSON, MODEL_WEIGHTS
from shardcore.types import OPTIMIZERS, PRECISION_BYTES


def add_commands(commands: argparse._SubParsersAction) -> None:
    _add_measure(commands)
    _add_train(commands)
    _add_report(commands)


# --- measure -----------------------------------------------------------------------------------------------


def _add_measure(commands: argparse._SubParsersAction) -> None:
    p = command(commands, measure, "Measure fused embedding ops on this machine's device; a rerun goes on "
                "where the last one ended.", folders={"out": ()})
    p.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto: cuda where there "
                   "is one")
    p.add_argument("--minutes", type=positive(float), default=10.0, help="time to spend on ops, start and "
                   "end included")
    p.add_argument("--samples", type=natural, metavar="N", help="stop after the first N different "
                   "draws, 0: measure no ops; default: when the time is up")
    p.add_argument("--again", type=natural, default=0, metavar="N", help="measure the first N draws again "
                   "though they are known: a repeatability set")
    p.add_argument("--out", type=Path, required=True, metavar="DIR", help="dataset folder; it only grows")
    p.add_argument("--pool", type=Path, metavar="POOL.json", help="tables to draw from; default: the "
                   "calibrated pool")
    p.add_argument("--batch", type=positive(int), help="global batch; default: 2048 on cpu, 65536 on cuda")
    p.add_argument("--precision", choices=PRECISION_BYTES, default="fp32", help="of the weights")
    p.add_argument("--optimizer", choices=OPTIMIZERS, default="exact_sgd")
    p.add_argument("--hardware", help="the setting's name of the device; default: its own")
    p.add_argument("--arena-gib", type=positive_gib, help="weights in memory, the largest shard measured; "
                   "default: 1 on cpu, on cuda half of the free memory with the optimizer's state")
    p.add_argument("--max-shards", type=positive(int), default=30, help="of a group")
    p.add_argument("--max-width", type=positive(int), default=256, help="columns of a shard")
    p.add_argument("--sequences", type=float, default=0.05, metavar="SHARE", help="of groups whose lookups "
                   "are not pooled, as those of EmbeddingCollections (0.05)")
    p.add_argument("--tolerance", type=positive(float), help="relative confidence interval to reach for a "
                   "median; default: 0.02 on cpu, 0.01 on cuda")
    p.add_argument("--max-repeats", type=positive(int), default=24)
    p.add_argument("--interleave", type=positive(int), default=16, help="groups that run in turn")
    p.add_argument("--chunk", type=positive(int), default=64, help="samples written at once; a kill loses at "
                   "most these and those that run")
    p.add_argument("--hang-s", type=positive(float), default=60.0, help="after so many seconds without "
                   "a finished op the measuring process is replaced, and its group recorded as failed")
    p.add_argument("--ranks", type=positive(int), default=2, help="processes (GPUs) of an exchange or a step")
    p.add_argument("--exchanges", type=natural, default=0, metavar="M", help="afterwards measure the first M "
                   "exchanges among --ranks of this machine, into the same dataset")
    p.add_argument("--hosts", type=positive(int), metavar="H", help="spread --ranks evenly over H hosts "
                   "that this machine emulates, for exchanges only (Linux, as root)")
    p.add_argument("--between-gbit-s", type=positive(float), metavar="RATE", help="of each emulated host's "
                   "link, Gbit/s each way")
    p.add_argument("--within-gbit-s", type=positive(float), metavar="RATE", help="of each emulated host's "
                   "loopback, Gbit/s; default: as fast as it is")
    p.add_argument("--steps", type=natural, default=0, metavar="P", help="afterwards replay a step of each "
                   "of the first P plans among --ranks: what exchanges take in steps")
    p.add_argument("--held-out", action="store_true", help="draw groups only from the tables that "
                   "are kept for testing, a twentieth of all")
    p.add_argument("--dry-run", action="store_true", help="say what is missing and how long it will take, "
                   "from some seconds of measuring; write nothing")
    p.add_argument("--seed", type=natural, default=0)


def measure(args: argparse.Namespace) -> None:
    from shardcore.measure import command as measuring

    measuring.measure(args)


# --- train -----------------------------------------------------------------------------------------------


def _add_train(commands: argparse._SubParsersAction) -> None:
    p = command(commands, train, "Train cost models on the samples of one setting in dataset folders.",
                folders={"out": (MODEL_JSON, MODEL_WEIGHTS)})
    p.add_argument("datasets", type=Path, nargs="+", metavar="DIR")
    p.add_argument("--hardware", help="choose one of the datasets' settings, together with the next "
                   "three")
    p.add_argument("--batch", type=positive(int))
    p.add_argument("--precision", choices=PRECISION_BYTES)
    p.add_argument("--optimizer", choices=OPTIMIZERS)
    p.add_argument("--start", type=Path, metavar="MODEL", help="fine-tune this model, of another batch, "
                   "optimizer or machine, where samples are few")
    p.add_argument("--seed", type=natural, default=0)
    p.add_argument("--out", type=Path, required=True, metavar="MODEL", help="folder to write")


def train(args: argparse.Namespace) -> None:
    from shardcore import schema
    from shardcore.cost import fit, known_errors, neural, training
    from shardcore.samples import dataset

    # Samples of different settings must not train one model.
    found = sorted({s for folder in args.datasets for s in dataset.settings(folder)}, key=str)
    chosen = [s for s in found if all(getattr(args, k) in (None, getattr(s, k))
                                      for k in ("hardware", "batch", "precision", "optimizer"))]
    if len(chosen) != 1:
        raise ShardCoreError(f"{', '.join(map(str, args.datasets))}: samples for "
                             f"[{'; '.join(map(str, found)) or 'nothing'}]; "
                             "choose one with --hardware, --batch, --precision and --optimizer")
    data, start = training.read(args.datasets, chosen[0]), neural.load(args.start) if args.start else None
    config = schema.build(fit.FitConfig, {"seed": args.seed}, "train")
    print(*data.warnings, data, sep="\n", file=sys.stderr)
    trained = training.train(data, config, _say_progress, start)
    neural.save(trained.model, args.out)
    for line in (trained.of_steps, f"{args.out}: {known_errors.label(trained.model)}",
                 *known_errors.worse_than_usual(trained.model)):
        if line:
            print(line, file=sys.stderr)
    print(json.dumps(training.judge(trained.model, data.known), indent=1))


def _say_progress(model: str, epoch: int, values: dict[str, float]) -> None:
    if epoch % 10 == 0:
        print(f"{model}, epoch {epoch}: {', '.join(f'{k} {v:.4g}' for k, v in values.items())}",
              file=sys.stderr)


# --- report ----------------------------------------------------------------------------------------------


def _add_report(commands: argparse._SubParsersAction) -> None:
    p = command(commands, report, "Say what a dataset covers, how noisy it is, how it drifts and repeats.",
                folders={"out": ()})
    p.add_argument("dataset", type=Path, metavar="DIR")
    p.add_argument("--out", type=Path, metavar="FOLDER", help="write the plots there")


def report(args: argparse.Namespace) -> None:
    from shardcore import files
    from shardcore.report import dataset_report, figures, text_table
    from shardcore.samples import dataset, replays

    found = dataset.settings(args.dataset)
    if not found:
        raise ShardCoreError(f"{args.dataset} holds no compute samples")
    for setting in found:
        samples, repeats = dataset.read_compute(args.dataset,
                                                setting), dataset.read_repeats(args.dataset, setting)
        rows = dataset_report.dataset_summary(samples, repeats)
        if comm := dataset.read_comm(args.dataset, setting):
            rows += dataset_report.exchange_summary(comm)
        if kept := replays.read_all(args.dataset / dataset.REPLAYS, setting):
            rows += dataset_report.step_summary(kept)
        print(f"{setting}\n\n{text_table(('quantity', 'value'), rows, words=(1,))}\n")
        if args.out:
            named = setting.hardware, setting.batch, setting.precision, setting.optimizer
            path = args.out / f"{'-'.join(map(str, named))}.png"
            made = dataset_report.dataset_figure(samples, repeats, str(setting))
            files.write_atomic(path, figures.png(made))
            print(path)
