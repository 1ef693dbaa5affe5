"""The library's command line: files in, files out. Exit code 0, 1 (it failed; one line says why) or 2 (bad usage)."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shardcore.types import Device, Problem, Setting, ShardCoreError, Topology

if TYPE_CHECKING:
    from shardcore.cost.model import CostModel
    from shardcore.cost.neural import NeuralModel
    from shardcore.search.budget import Budget
    from shardcore.types import Plan


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        args.command(args)
    except (ShardCoreError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def plan(args: argparse.Namespace) -> None:
    from shardcore import files
    from shardcore.cost import neural
    from shardcore.cost.model import at_confidence
    from shardcore.search import compare
    from shardcore.search.budget import Budget
    from shardcore.types import Infeasible, Plan
    from shardcore.workload import lower

    compare.require_known([args.algorithm])
    if args.start and (args.algorithm not in ("local", "local_all") or args.second_model):
        raise ShardCoreError(f"--start is for --algorithm local and local_all alone; got {args.algorithm}"
                             f"{' and --second-model' if args.second_model else ''}")
    for name in ("start_problem", "max_moved_tables", "max_moved_gib"):
        if getattr(args, name) is not None and not args.start:
            raise ShardCoreError(f"--{name.replace('_', '-')} {getattr(args, name)} needs --start, the plan to start from")
    problem, model = files.read_problem(args.problem), neural.load(args.model)
    problem.require_setting(model.setting)
    cautious, provenance = at_confidence(model, args.confidence), {"model_digest": files.model_digest(args.model)}
    if args.confidence:
        provenance["confidence"] = args.confidence
    budget = Budget(args.budget_evals, args.budget_s) if args.budget_evals or args.budget_s else None
    began = time.monotonic()
    if args.second_model:
        found, why = _chosen(args, problem, model, budget)
        provenance |= found.provenance
    elif args.start:
        found, why = _resharded(args, problem, cautious, budget)
    else:
        outcome = compare.run(args.algorithm, problem, cautious, args.seed, budget)
        if outcome.plan is None:
            raise Infeasible(outcome.error)
        found, why = outcome.plan, ""
    found = Plan(found.placements, {**found.provenance, **provenance})
    seconds, cost = time.monotonic() - began, found.provenance["predicted_ms"]
    files.write_plan(args.out, found, problem)
    sure = f" with {args.confidence:.0%} confidence in each op" if args.confidence else ""
    print(f"{args.out}: {cost:.3f} ms predicted{sure}, found in {seconds:.2f} s by {args.algorithm}{why}")
    if args.explain:
        _say_explained(found, problem, cautious, budget)
    _say_extrapolated(neural.out_of_range(model, lower(found, problem)))


_SEEDS = 4
"""Plans that each model's search gives to choose among."""


def _chosen(args: argparse.Namespace, problem: Problem, model: NeuralModel, budget: Budget | None) -> tuple[Plan, str]:
    """The plan that both models find good, priced by the first; and how it came to be chosen, in words."""
    from shardcore.cost import neural
    from shardcore.cost.model import at_confidence
    from shardcore.search import choose
    from shardcore.types import Plan

    second = neural.physical(model) if args.second_model == "physical" else neural.load(args.second_model)
    problem.require_setting(second.setting)
    models = [at_confidence(model, args.confidence), second]
    plans = choose.candidates(problem, models, args.algorithm, range(args.seed, args.seed + _SEEDS), budget)
    choice = choose.choose(plans, problem, models)
    (first_ms, second_ms), alone = choice.total_ms[choice.chosen], choice.total_ms[choice.cheapest]
    why = f"\nchosen among {len(plans)} plans by both models: the second says {second_ms:.3f} ms"
    if choice.chosen != choice.cheapest:
        why += f", and of the plan that the first finds cheapest {alone[1]:.3f} ms (the first: {alone[0]:.3f} ms)"
    provenance = {**choice.plan.provenance, "predicted_ms": first_ms, "setting": str(model.setting), "candidates": len(plans),
                  "second_model": str(args.second_model), "second_ms": second_ms}
    return Plan(choice.plan.placements, provenance), why


def _resharded(args: argparse.Namespace, problem: Problem, model: CostModel, budget: Budget | None) -> tuple[Plan, str]:
    """The plan improved from the one to start from, and by how much, in words."""
    from shardcore import files, plan_report
    from shardcore.cost.model import price
    from shardcore.diff import diff, in_order, nearest
    from shardcore.search.local import local
    from shardcore.search.space import Reshard
    from shardcore.workload import lower

    old_problem = files.read_problem(args.start_problem) if args.start_problem else problem
    old = files.read_plan(args.start, old_problem)
    most_bytes = None if args.max_moved_gib is None else int(args.max_moved_gib * 2**30)
    found = local(problem, model, seed=args.seed, budget=budget, space="all" if args.algorithm == "local_all" else "columns",
                  reshard=Reshard(old, args.max_moved_tables, most_bytes))
    found = nearest(found, old, problem) if args.max_moved_tables is None and most_bytes is None else in_order(found, old)
    before = "" if args.start_problem else f", which cost {price(lower(old, problem), model).total_ms:.3f} ms"
    return found, f", starting from {args.start}{before}; {plan_report.moves_text(diff(old, found))}"


def _say_explained(plan: Plan, problem: Problem, model: CostModel, budget: Budget | None) -> None:
    from shardcore import plan_report
    from shardcore.search.explain import explain

    print(f"\n{plan_report.text(explain(plan, problem, model, budget))}")


def price(args: argparse.Namespace) -> None:
    from shardcore import files
    from shardcore.cost import neural
    from shardcore.cost.model import at_confidence
    from shardcore.cost.model import price as predict
    from shardcore.workload import lower

    problem, model = files.read_problem(args.problem), neural.load(args.model)
    problem.require_setting(model.setting)
    plan = files.read_plan(args.plan, problem)
    workload = lower(plan, problem)
    cost, beyond = predict(workload, at_confidence(model, args.confidence)), neural.out_of_range(model, workload)
    body = {"total_ms": cost.total_ms, **dataclasses.asdict(cost), "memory_bytes": list(workload.memory_bytes),
            "extrapolated": beyond}
    if args.out:
        files.write_json(args.out, body)
    elif not args.explain:
        print(json.dumps(body, indent=1))
    if args.explain:
        _say_explained(plan, problem, at_confidence(model, args.confidence), None)
    _say_extrapolated(beyond)


def replay(args: argparse.Namespace) -> None:
    from shardcore import files, replays
    from shardcore.measure import hardware
    from shardcore.measure.replay import ReplayConfig, replay_all
    from shardcore.workload import lower

    device = args.device or hardware.detect_device()
    problem = files.read_problem(args.problem)
    setting = Setting(hardware.hardware_name(device), problem.global_batch, problem.precision, problem.optimizer)
    plans = [files.read_plan(path, problem) for path in args.plans]
    workloads = [lower(plan, problem) for plan in plans]
    config = ReplayConfig(repeats=args.repeats, arena_bytes=int(args.arena_gib * 2**30), timeout_s=args.timeout_s, seed=args.seed)
    if args.append:
        made = [(plan.provenance.get("algorithm", path.stem), plan) for path, plan in zip(args.plans, plans, strict=True)]
        kept = replays.append(args.append, problem, made, setting, config, lambda w: replay_all(w, setting, config, device))
        costs = [kept.costs[replays.plan_digest(plan, problem)] for plan in plans]
    else:
        costs = replay_all(workloads, setting, config, device)
    body = {"setting": files.setting_to_json(setting), "replays": [
        {"plan": str(path), "total_ms": cost.total_ms, **dataclasses.asdict(cost), "memory_bytes": list(workload.memory_bytes)}
        for path, cost, workload in zip(args.plans, costs, workloads, strict=True)]}
    if args.out:
        files.write_json(args.out, body)
    else:
        print(json.dumps(body, indent=1))
    if any(cost.oversubscribed for cost in costs):
        print(f"oversubscribed: {len(problem.topology)} processes on fewer cores measure the scheduler too", file=sys.stderr)


def export(args: argparse.Namespace) -> None:
    from shardcore import files
    from shardcore.export.torchrec import to_torchrec
    from shardcore.export.torchrec_json import write_torchrec
    from shardcore.search.peers import torchrec

    torchrec.require_installed("a file for TorchRec is written with TorchRec")
    problem = files.read_problem(args.problem)
    plan = files.read_plan(args.plan, problem)
    write_torchrec(args.out, to_torchrec(plan, problem, args.module, args.compute_device, uneven_rows=args.uneven_rows))


def _say_extrapolated(sentences: Sequence[str]) -> None:
    for sentence in sentences[:5]:
        print(f"extrapolated: {sentence}", file=sys.stderr)
    if len(sentences) > 5:
        print(f"extrapolated: and {len(sentences) - 5} more", file=sys.stderr)


def measure(args: argparse.Namespace) -> None:
    from shardcore.measure import command

    command.measure(args)


def train(args: argparse.Namespace) -> None:
    from shardcore import dataset, files, replays
    from shardcore.cost import accuracy, fit, neural, settle, steps

    found = sorted({s for folder in args.datasets for s in dataset.settings(folder)}, key=str)
    chosen = [s for s in found if all(getattr(args, k) in (None, getattr(s, k))
                                      for k in ("hardware", "batch", "precision", "optimizer"))]
    if len(chosen) != 1:
        raise ShardCoreError(f"{', '.join(map(str, args.datasets))}: samples for [{'; '.join(map(str, found)) or 'nothing'}]; "
                             "choose one with --hardware, --batch, --precision and --optimizer")
    known, start = settle.read(args.datasets, chosen[0]), neural.load(args.start) if args.start else None
    config = files.build(fit.FitConfig, {"seed": args.seed}, "train")
    trained = fit.train(known.compute, known.comm, chosen[0], config, _say_progress, start)
    model = steps.fit(trained.model, replays.steps(args.datasets, chosen[0]))
    neural.save(model, args.out)
    metrics = accuracy.evaluate(model, accuracy.held_out(known.compute), accuracy.held_out(known.comm))
    print(json.dumps(metrics, indent=1))


def _say_progress(model: str, epoch: int, values: dict[str, float]) -> None:
    if epoch % 10 == 0:
        print(f"{model}, epoch {epoch}: {', '.join(f'{k} {v:.4g}' for k, v in values.items())}", file=sys.stderr)


def report(args: argparse.Namespace) -> None:
    from shardcore import dataset
    from shardcore import report as reports

    found = dataset.settings(args.dataset)
    if not found:
        raise ShardCoreError(f"{args.dataset} holds no compute samples")
    for setting in found:
        samples, repeats = dataset.read_compute(args.dataset, setting), dataset.read_repeats(args.dataset, setting)
        rows = reports.dataset_summary(samples, repeats)
        if comm := dataset.read_comm(args.dataset, setting):
            rows += reports.exchange_summary(comm)
        print(f"{setting}\n\n{reports.text_table(('quantity', 'value'), rows)}\n")
        if args.out:
            path = args.out / f"{setting.hardware}-{setting.batch}-{setting.precision}-{setting.optimizer}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            reports.dataset_figure(samples, repeats, str(setting)).savefig(path, dpi=120)
            print(path)


def problem(args: argparse.Namespace) -> None:
    from shardcore import files, sampling, tables

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


def history(args: argparse.Namespace) -> None:
    from shardcore import plans_command

    plans_command.history(args)


def diff(args: argparse.Namespace) -> None:
    from shardcore import plans_command

    plans_command.diff(args)


def drift(args: argparse.Namespace) -> None:
    from shardcore import plans_command

    plans_command.drift(args)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m shardcore", description=__doc__,
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(function, summary: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(function.__name__, help=summary, description=summary,
                                  formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        sub.set_defaults(command=function)
        return sub

    p = add(plan, "Search a plan for a problem under a cost model.")
    p.add_argument("problem", type=Path, metavar="PROBLEM.json")
    p.add_argument("--model", type=Path, required=True, help="folder of a trained model")
    p.add_argument("--start", metavar="PLAN", help="improve this plan of the problem instead of planning afresh (local search)")
    p.add_argument("--start-problem", metavar="PROBLEM.json", help="the problem that --start was made for, where it has changed "
                                                                   "since: tables new, gone, or with other statistics")
    p.add_argument("--max-moved-tables", type=_natural, metavar="N", help="with --start: so many tables may move (any)")
    p.add_argument("--max-moved-gib", type=_amount, metavar="G", help="with --start: so many GiB of weights may move (any)")
    p.add_argument("--algorithm", default="local", help="random, size_greedy, dim_greedy, lookup_greedy, "
                   "size_lookup_greedy, neuroshard, embark, milp, torchrec (where "
                   "installed), local (tables whole or cut by columns) or local_all (also by rows, or copied to all devices)")
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

    p = add(price, "Predict what one training step of a plan costs, per device.")
    p.add_argument("plan", type=Path, metavar="PLAN.json")
    p.add_argument("--problem", type=Path, required=True, metavar="PROBLEM.json")
    p.add_argument("--model", type=Path, required=True, help="folder of a trained model")
    p.add_argument("--confidence", type=_positive(float), metavar="P", help="an op's cost is what its measurement stays below "
                   "with this probability (0.9, say), rather than what the model expects")
    p.add_argument("--explain", action="store_true", help="say what bounds the plan, what other algorithms find, and what more "
                   "memory or more devices would bring, instead of standard output's JSON")
    p.add_argument("--out", type=Path, metavar="COST.json", help="default: standard output")

    p = add(replay, "Run one training step of plans for real on this machine, in alternation, and time its parts per device.")
    p.add_argument("plans", type=Path, nargs="+", metavar="PLAN.json", help="plans of the same problem")
    p.add_argument("--problem", type=Path, required=True, metavar="PROBLEM.json")
    p.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda where there is one")
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

    p = add(measure, "Measure fused embedding ops on this machine's device; a rerun goes on where the last one ended.")
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
    p.add_argument("--ranks", type=_positive(int), default=2, help="processes (GPUs) of an exchange")
    p.add_argument("--exchanges", type=_natural, default=0, metavar="M", help="afterwards measure the first M exchanges among "
                   "--ranks of this machine, into the same dataset")
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

    p = add(history, "Say which versions of a problem's published plan were current, since when and why.")
    p.add_argument("plans", metavar="PLANS", help="folder or URL of published plans")
    p.add_argument("name", help="of the problem")
    p.add_argument("--last", type=_positive(int), default=20, metavar="N", help="decisions to show")

    p = add(diff, "Say which tables move from one plan to another, and how many bytes of weights.")
    p.add_argument("old", type=Path, metavar="OLD.json")
    p.add_argument("new", type=Path, metavar="NEW.json")
    p.add_argument("--problem", type=Path, metavar="PROBLEM.json", help="of both plans; default: problem.json beside each, as in "
                   "the folders of published versions")

    p = add(drift, "Say how far a published plan is from the best, now that its tables are looked up otherwise, and what a "
            "re-plan would bring.")
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
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is negative")
    return value


def _amount(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number of 0 or more")
    return value


def _positive(kind: type):
    def parse(text: str):
        value = kind(text)
        if not 0 < value < math.inf:
            raise argparse.ArgumentTypeError(f"{text} is not a positive number")
        return value

    parse.__name__ = kind.__name__
    return parse


if __name__ == "__main__":
    sys.exit(main())
