"""The library's command line: files in, files out. Exit code 0, 1 (it failed; one line says why) or 2 (bad usage)."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from shardcore.schema import MOST_INT
from shardcore.types import MOST_DEVICES, Device, Problem, Setting, ShardCoreError, Topology, require_within


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        args.command(args)
    except (ShardCoreError, OSError) as error:
        print(f"error: {error if isinstance(error, ShardCoreError) else ShardCoreError(str(error))}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def export(args: argparse.Namespace) -> None:
    from shardcore import files
    from shardcore.export.torchrec import to_torchrec
    from shardcore.export.torchrec_json import write_torchrec
    from shardcore.search.peers import torchrec

    torchrec.require_installed("a file for TorchRec is written with TorchRec")
    problem = files.read_problem(args.problem)
    plan = files.read_plan(args.plan, problem)
    write_torchrec(args.out, to_torchrec(plan, problem, args.module, args.compute_device, uneven_rows=args.uneven_rows))


def train(args: argparse.Namespace) -> None:
    from shardcore import dataset, replays, schema
    from shardcore.cost import accuracy, fit, neural, settle, steps

    found = sorted({s for folder in args.datasets for s in dataset.settings(folder)}, key=str)
    chosen = [s for s in found if all(getattr(args, k) in (None, getattr(s, k))
                                      for k in ("hardware", "batch", "precision", "optimizer"))]
    if len(chosen) != 1:
        raise ShardCoreError(f"{', '.join(map(str, args.datasets))}: samples for [{'; '.join(map(str, found)) or 'nothing'}]; "
                             "choose one with --hardware, --batch, --precision and --optimizer")
    known, start = settle.read(args.datasets, chosen[0]), neural.load(args.start) if args.start else None
    replayed = replays.steps(args.datasets, chosen[0])
    config = schema.build(fit.FitConfig, {"seed": args.seed}, "train")
    trained = fit.train(known.compute, known.comm, chosen[0], config, _say_progress, start)
    model = steps.fit(trained.model, replayed)
    if replayed:
        print(steps.said(trained.model, model, len(replayed)), file=sys.stderr)
    neural.save(model, args.out)
    metrics = accuracy.evaluate(model, accuracy.held_out(known.compute), accuracy.held_out(known.comm))
    print(json.dumps(metrics, indent=1))


def _say_progress(model: str, epoch: int, values: dict[str, float]) -> None:
    if epoch % 10 == 0:
        print(f"{model}, epoch {epoch}: {', '.join(f'{k} {v:.4g}' for k, v in values.items())}", file=sys.stderr)


def report(args: argparse.Namespace) -> None:
    from shardcore import dataset, replays
    from shardcore import report as reports

    found = dataset.settings(args.dataset)
    if not found:
        raise ShardCoreError(f"{args.dataset} holds no compute samples")
    for setting in found:
        samples, repeats = dataset.read_compute(args.dataset, setting), dataset.read_repeats(args.dataset, setting)
        rows = reports.dataset_summary(samples, repeats)
        if comm := dataset.read_comm(args.dataset, setting):
            rows += reports.exchange_summary(comm)
        if kept := replays.read_all(args.dataset / dataset.REPLAYS, setting):
            rows += reports.step_summary(kept)
        print(f"{setting}\n\n{reports.text_table(('quantity', 'value'), rows)}\n")
        if args.out:
            path = args.out / f"{setting.hardware}-{setting.batch}-{setting.precision}-{setting.optimizer}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            reports.dataset_figure(samples, repeats, str(setting)).savefig(path, dpi=120)
            print(path)


def problem(args: argparse.Namespace) -> None:
    from shardcore import files, sampling, tables

    require_within(args, "problem", devices=(1, MOST_DEVICES))
    if args.tables.endswith(".json"):
        pool = files.read_pool(args.tables)
        if args.draw is None:
            raise ShardCoreError(f"{args.tables} is a pool to draw from: give --draw INDEX (or name a public list)")
        shape = sampling.ProblemConfig(devices=args.devices, max_dim=args.max_dim)
        made = sampling.problem(pool, args.draw, Setting("any", args.batch), args.seed, shape)
    else:
        devices, name = (Device(int(args.memory_gib * 2**30)),) * args.devices, args.tables
        if Path(args.tables).is_dir():
            from shardcore.export.fbgemm_statistics import reported_tables

            found, name = reported_tables(args.tables), Path(args.tables).resolve().name
        else:
            found = tables.public_pool(args.tables)
        made = Problem(f"{name}-{args.devices}", found, Topology(devices), args.batch)
    files.write_problem(args.out, made)
    print(f"{args.out}: {len(made.tables)} tables, {sum(t.bytes for t in made.tables) / 2**30:.1f} GiB, {args.devices} devices")


def _later(module: str, name: str) -> Callable[[argparse.Namespace], None]:
    """A command of a module of shardcore, imported when it runs: -h is quick."""
    def command(args: argparse.Namespace) -> None:
        getattr(importlib.import_module(f"shardcore.{module}"), name)(args)

    command.__name__ = name
    return command


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m shardcore", description=__doc__,
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(function, summary: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(function.__name__, help=summary, description=summary,
                                  formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        sub.set_defaults(command=function)
        return sub

    p = add(_later("plan_command", "plan"), "Search a plan for a problem under a cost model.")
    p.add_argument("problem", type=Path, metavar="PROBLEM.json")
    p.add_argument("--model", type=Path, required=True, help="folder of a trained model")
    p.add_argument("--start", metavar="PLAN", help="improve this plan of the problem instead of planning afresh (local search)")
    p.add_argument("--start-problem", metavar="PROBLEM.json", help="the problem that --start was made for, where it has changed "
                                                                   "since: tables new, gone, or with other statistics")
    p.add_argument("--max-moved-tables", type=_natural, metavar="N", help="with --start: so many tables may move (any)")
    p.add_argument("--max-moved-gib", type=_amount, metavar="G", help="with --start: so many GiB of weights may move (any)")
    p.add_argument("--algorithm", default="local_columns", help="random, size_greedy, dim_greedy, lookup_greedy, "
                   "size_lookup_greedy, neuroshard, embark, milp, torchrec (where "
                   "installed), local_columns (tables whole or cut by columns) or local (also rows divided over "
                   "all devices, and copies on all)")
    budget = p.add_mutually_exclusive_group()
    budget.add_argument("--budget-s", type=_positive(float), help="seconds to search")
    budget.add_argument("--budget-evals", type=_positive(int), help="plans to price; the same seed then gives the same plan")
    p.add_argument("--seed", type=_natural, default=0)
    p.add_argument("--confidence", type=_positive(float), metavar="P", help="an op's cost is what its measurement stays below "
                   "with this probability (0.9, say), rather than what the model expects")
    p.add_argument("--second-model", metavar="PATH", help="folder of another model, or 'physical': the first without what it "
                   "learned beyond rates; the plan that both find good is chosen among those that either finds, all within the "
                   "budget")
    p.add_argument("--explain", action="store_true", help="say what bounds the plan, what other algorithms find, and what more "
                   "memory or more devices would bring; each is searched with the same budget again")
    p.add_argument("--out", type=Path, required=True, metavar="PLAN.json")

    p = add(_later("plan_command", "price"), "Predict what one training step of a plan costs, per device.")
    p.add_argument("plan", type=Path, metavar="PLAN.json")
    p.add_argument("--problem", type=Path, required=True, metavar="PROBLEM.json")
    p.add_argument("--model", type=Path, required=True, help="folder of a trained model")
    p.add_argument("--confidence", type=_positive(float), metavar="P", help="an op's cost is what its measurement stays below "
                   "with this probability (0.9, say), rather than what the model expects")
    p.add_argument("--explain", action="store_true", help="say what bounds the plan, what other algorithms find, and what more "
                   "memory or more devices would bring, instead of standard output's JSON")
    p.add_argument("--out", type=Path, metavar="COST.json", help="default: standard output")

    p = add(_later("plan_command", "replay"), "Run one training step of plans for real on this machine, in alternation, and time "
            "its parts per device.")
    p.add_argument("plans", type=Path, nargs="+", metavar="PLAN.json", help="plans of the same problem")
    p.add_argument("--problem", type=Path, required=True, metavar="PROBLEM.json")
    p.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda where there is one")
    p.add_argument("--hardware", help="the setting's name of the device; default: its own")
    p.add_argument("--repeats", type=_positive(int), default=50, help="steps of each plan that enter a median")
    p.add_argument("--arena-gib", type=_positive(float), default=1.0, help="weights in memory a process, the largest shard")
    p.add_argument("--timeout-s", type=_positive(float), default=120.0, help="a round of steps that takes longer has hung")
    p.add_argument("--seed", type=_natural, default=0, help="of the batches")
    p.add_argument("--append", type=Path, metavar="DIR", help="keep the replays in this dataset too: training on it learns what "
                   "exchanges take in steps; what it has of these plans is not run again")
    p.add_argument("--out", type=Path, metavar="REPLAY.json", help="default: standard output")

    p = add(export, "Write a plan as TorchRec's: what shardcore.export.torchrec_json.read_torchrec reads, "
            "DistributedModelParallel takes.")
    p.add_argument("plan", type=Path, metavar="PLAN.json")
    p.add_argument("--problem", type=Path, required=True, metavar="PROBLEM.json")
    p.add_argument("--module", required=True, metavar="PATH", help="of the EmbeddingBagCollection that has the tables, in the "
                   "model's tree of modules, such as sparse_arch.embedding_bag_collection")
    p.add_argument("--compute-device", choices=["cpu", "cuda"], default="cuda")
    p.add_argument("--uneven-rows", action="store_true", help="allow row ranges that need the sharder of "
                   "shardcore.export.torchrec_rows")
    p.add_argument("--out", type=Path, required=True, metavar="TORCHREC.json")

    p = add(_later("measure.command", "measure"), "Measure fused embedding ops on this machine's device; a rerun goes on where "
            "the last one ended.")
    p.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto: cuda where there is one")
    p.add_argument("--minutes", type=_positive(float), default=10.0, help="time to spend")
    p.add_argument("--samples", type=_positive(int), metavar="N", help="stop after the first N different draws; default: when "
                   "the time is up")
    p.add_argument("--again", type=_natural, default=0, metavar="N", help="measure the first N draws again though they are "
                   "known: a repeatability set")
    p.add_argument("--out", type=Path, required=True, metavar="DIR", help="dataset folder; it only grows")
    p.add_argument("--pool", type=Path, metavar="POOL.json", help="tables to draw from; default: the calibrated pool")
    p.add_argument("--batch", type=_positive(int), default=2048, help="global batch")
    p.add_argument("--precision", choices=["fp32", "fp16"], default="fp32", help="of the weights")
    p.add_argument("--optimizer", choices=["exact_sgd", "rowwise_adagrad"], default="exact_sgd")
    p.add_argument("--hardware", help="the setting's name of the device; default: its own")
    p.add_argument("--arena-gib", type=_positive(float), default=1.0, help="weights in memory, the largest shard measured")
    p.add_argument("--max-shards", type=_positive(int), default=30, help="of a group")
    p.add_argument("--max-width", type=_positive(int), default=256, help="columns of a shard")
    p.add_argument("--tolerance", type=_positive(float), help="to which a median needs to be known; default: 0.02 on cpu, 0.01 "
                   "on cuda")
    p.add_argument("--max-repeats", type=_positive(int), default=24)
    p.add_argument("--interleave", type=_positive(int), default=16, help="groups that run in turn")
    p.add_argument("--chunk", type=_positive(int), default=64, help="samples written at once; a kill loses no more, and those "
                   "that run")
    p.add_argument("--hang-s", type=_positive(float), default=60.0, help="the measuring process has hung where no op ended for "
                   "so long; it is replaced, and the group that does it recorded as failed")
    p.add_argument("--ranks", type=_positive(int), default=2, help="processes (GPUs) of an exchange or a step")
    p.add_argument("--exchanges", type=_natural, default=0, metavar="M", help="afterwards measure the first M exchanges among "
                   "--ranks of this machine, into the same dataset")
    p.add_argument("--steps", type=_natural, default=0, metavar="P", help="afterwards replay a step of each of the first P "
                   "plans among --ranks: what exchanges take in steps")
    p.add_argument("--held-out", action="store_true", help="draw groups from the twentieth of the tables alone on which models "
                   "are tested")
    p.add_argument("--dry-run", action="store_true", help="say what is missing and how long it will take, from some seconds of "
                   "measuring; write nothing")
    p.add_argument("--seed", type=_natural, default=0)

    p = add(train, "Train cost models on the samples of one setting in dataset folders.")
    p.add_argument("datasets", type=Path, nargs="+", metavar="DIR")
    p.add_argument("--hardware", help="which of the dataset's settings, where it holds several; so the next three")
    p.add_argument("--batch", type=_positive(int))
    p.add_argument("--precision", choices=["fp32", "fp16"])
    p.add_argument("--optimizer", choices=["exact_sgd", "rowwise_adagrad"])
    p.add_argument("--start", type=Path, metavar="MODEL", help="fine-tune this model, of another batch, optimizer or machine, "
                   "where samples are few")
    p.add_argument("--seed", type=_natural, default=0)
    p.add_argument("--out", type=Path, required=True, metavar="MODEL", help="folder to write")

    p = add(report, "Say what a dataset covers, how noisy it is, how it drifts and repeats.")
    p.add_argument("dataset", type=Path, metavar="DIR")
    p.add_argument("--out", type=Path, metavar="FOLDER", help="write the plots there")

    p = add(problem, "Make a problem file from a public list of tables, FBGEMM's reports of a job, or by drawing from a pool.")
    p.add_argument("tables", help="name of a public list (mlperf-dlrm-dcnv2, hugectr-180, ...), a folder of FBGEMM's reports "
                                  "(docs/torchrec.md) or a POOL.json")
    p.add_argument("--devices", type=_positive(int), default=4)
    p.add_argument("--memory-gib", type=_positive(float), default=24.0, help="a device, unless drawn from a pool")
    p.add_argument("--batch", type=_positive(int), default=2048, help="global batch")
    p.add_argument("--draw", type=_natural, metavar="INDEX", help="which problem to draw from a pool")
    p.add_argument("--max-dim", type=_positive(int), default=128, help="of the drawn tables")
    p.add_argument("--seed", type=_natural, default=0)
    p.add_argument("--out", type=Path, required=True, metavar="PROBLEM.json")

    p = add(_later("plan_command", "history"), "Say which versions of a problem's published plan were current, since when and "
            "why.")
    p.add_argument("plans", metavar="PLANS", help="folder or URL of published plans")
    p.add_argument("name", help="of the problem")
    p.add_argument("--last", type=_positive(int), default=20, metavar="N", help="decisions to show")

    p = add(_later("plan_command", "diff"), "Say which tables move from one plan to another, and how many bytes of weights.")
    p.add_argument("old", type=Path, metavar="OLD.json")
    p.add_argument("new", type=Path, metavar="NEW.json")
    p.add_argument("--problem", type=Path, metavar="PROBLEM.json", help="of both plans; default: problem.json beside each, as in "
                   "the folders of published versions")

    p = add(_later("plan_command", "drift"), "Say how far a published plan is from the best, now that its tables are looked up "
            "otherwise, and what a re-plan would bring.")
    p.add_argument("plans", metavar="PLANS", help="folder or URL of published plans")
    p.add_argument("name", help="of the problem")
    p.add_argument("--fresh", type=Path, required=True, metavar="FILE.json", help="a problem or a pool of tables with the "
                   "pooling and access statistics of now")
    p.add_argument("--model", type=Path, required=True, help="folder of a trained model")
    p.add_argument("--max-moved-tables", type=_natural, metavar="N", help="so many tables may move for the re-plan (any)")
    p.add_argument("--threshold", type=_amount, default=0.02, help="a re-plan pays that is cheaper by this share")
    p.add_argument("--budget-evals", type=_positive(int), help="plans to price in each of the searches")
    p.add_argument("--seed", type=_natural, default=0)
    p.add_argument("--out", type=Path, metavar="FOLDER", help="write the re-plan there, with the problem of now")
    return parser


def _natural(text: str) -> int:
    value = int(text)
    if not 0 <= value <= MOST_INT:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of 0 to {MOST_INT}")
    return value


def _amount(text: str) -> float:
    value = float(text)
    if not 0 <= value <= MOST_INT:
        raise argparse.ArgumentTypeError(f"{text} is not a number of 0 to {MOST_INT}")
    return value


def _positive(kind: type):
    def parse(text: str):
        value = kind(text)
        if not 0 < value <= MOST_INT:
            raise argparse.ArgumentTypeError(f"{text} is not a positive number up to {MOST_INT}")
        return value

    parse.__name__ = kind.__name__
    return parse


if __name__ == "__main__":
    sys.exit(main())
