"""Commands that make, price, run and export plans: problem, plan, price, replay, export.

Commands import what they need when they run, so that help is quick.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardcore.cli.options import amount, command, natural, positive
from shardcore.constraints import Constraints
from shardcore.errors import ShardCoreError
from shardcore.job import HIDES_IDS, PAYLOADS, Job
from shardcore.limits import MOST_DEVICES, require_within
from shardcore.topology import Device, Topology
from shardcore.types import Plan, Problem, Setting

if TYPE_CHECKING:
    from shardcore.cost.model import CostModel
    from shardcore.search.budget import Budget

SECOND_MODEL_IS_GONE = ("--second-model is gone: replayed plans that two models agreed on were no faster "
                        "(docs/log.md); leave it out, or search longer with --budget-s")
_MODEL = ("folder of a trained model; where weights of tables differ in precision, give the option for each "
          "precision")
_CONFIDENCE = ("an op's cost is what its measurement stays below with this probability (0.9, say), rather "
               "than what the model expects")
_EXPLAIN = ("say what bounds the plan, what other algorithms find, and what more memory or more devices "
            "would bring")


def add_commands(commands: argparse._SubParsersAction) -> None:
    _add_plan(commands)
    _add_price(commands)
    _add_replay(commands)
    _add_export(commands)
    _add_problem(commands)


# --- plan --------------------------------------------------------------------------------------------------


def _add_plan(commands: argparse._SubParsersAction) -> None:
    p = command(commands, plan, "Search a plan for a problem under a cost model.")
    p.add_argument("problem", type=Path, metavar="PROBLEM.json")
    p.add_argument("--model", type=Path, required=True, action="append", help=_MODEL)
    p.add_argument("--start", metavar="PLAN", help="improve this plan of the problem instead of planning "
                   "afresh (annealing)")
    p.add_argument("--start-problem", metavar="PROBLEM.json", help="the problem that --start was made for, "
                   "where it has changed since: tables new, gone, or with other statistics")
    p.add_argument("--max-moved-tables", type=natural, metavar="N", help="with --start: most tables that may "
                   "move; default: any number")
    p.add_argument("--max-moved-gib", type=amount, metavar="G", help="with --start: most GiB of weights "
                   "that may move; default: any number")
    p.add_argument("--towers", type=Path, metavar="TOWERS.json", help="tables that belong together on a "
                   "host, and how many times smaller a tower module makes what crosses hosts (docs/plan.md)")
    p.add_argument("--algorithm", help="anneal_columns, the default (tables whole or cut by columns), anneal "
                   "(also rows divided over all devices, and copies on all), random, size_greedy, "
                   "dim_greedy, lookup_greedy, size_lookup_greedy, neuroshard or torchrec "
                   "(where installed)")
    budget = p.add_mutually_exclusive_group()
    budget.add_argument("--budget-s", type=positive(float), help="seconds to search")
    budget.add_argument("--budget-evals", type=positive(int), help="plans to price; the same seed then gives "
                        "the same plan")
    p.add_argument("--seed", type=natural, default=0)
    p.add_argument("--confidence", type=positive(float), metavar="P", help=_CONFIDENCE)
    p.add_argument("--second-model", help=argparse.SUPPRESS)
    p.add_argument("--explain", action="store_true", help=f"{_EXPLAIN}; each is searched with the same "
                   "budget again")
    p.add_argument("--out", type=Path, required=True, metavar="PLAN.json")


def plan(args: argparse.Namespace) -> None:
    from shardcore import files
    from shardcore.cost import mixed
    from shardcore.cost.model import at_confidence
    from shardcore.report import plan_report
    from shardcore.search import DEFAULT_SHARDER, SHARDERS, known
    from shardcore.search.budget import Budget
    from shardcore.search.tower_hosts import tower_traffic
    from shardcore.workload import lower

    args.algorithm = known(args.algorithm or DEFAULT_SHARDER)
    _require_agreeing(args)
    asked = problem = files.read_problem(args.problem)
    model = mixed.load(args.model).for_problem(problem)
    problem.require_setting(model.setting)
    # The search uses the cautious model. The range check below needs the plain one.
    cautious = at_confidence(model, args.confidence)
    provenance = {"model_digest": "+".join(map(files.model_digest, args.model))}
    if args.confidence:
        provenance["confidence"] = args.confidence
    budget = Budget(args.budget_evals, args.budget_s) if args.budget_evals or args.budget_s else None
    began, why = time.monotonic(), ""
    if args.towers:
        problem, of_towers = _with_towers(args.towers, problem, cautious)
        provenance |= of_towers
    if args.start:
        found, why = _replanned(args, problem, cautious, budget)
    else:
        found = SHARDERS[args.algorithm](problem, cautious, seed=args.seed, budget=budget)
    found = Plan(found.placements, {**found.provenance, **provenance})
    seconds, cost = time.monotonic() - began, found.provenance["predicted_ms"]
    # Towers only narrow where tables may live: a plan with them is one of the problem that was asked.
    files.write_plan(args.out, found, asked)
    sure = f" with {args.confidence:.0%} confidence in each op" if args.confidence else ""
    print(f"{args.out}: {cost:.3f} ms predicted{sure}, found in {seconds:.2f} s by {args.algorithm}{why}")
    if args.towers:
        print(plan_report.towers_text(tower_traffic(found, problem)))
    if args.explain:
        _say_explained(found, problem, cautious, budget)
    # Warnings go to standard error, so that standard output stays readable by programs.
    _say_extrapolated(mixed.out_of_range(model, lower(found, problem)))


def _require_agreeing(args: argparse.Namespace) -> None:
    """Raise ShardCoreError for options that are gone or contradict each other."""
    from shardcore.search.anneal.sharder import SPACE_OF

    if args.second_model is not None:
        raise ShardCoreError(SECOND_MODEL_IS_GONE)
    if args.start and args.algorithm not in SPACE_OF:
        raise ShardCoreError(f"--start is for --algorithm {' and '.join(SPACE_OF)} only; got "
                             f"{args.algorithm}")
    if args.start and args.towers:
        raise ShardCoreError(f"--start {args.start} and --towers {args.towers} were both given; a plan with "
                             "towers is made afresh, so leave one out")
    for name in ("start_problem", "max_moved_tables", "max_moved_gib"):
        if getattr(args, name) is not None and not args.start:
            raise ShardCoreError(f"--{name.replace('_', '-')} {getattr(args, name)} needs --start, the plan "
                                 "to start from")


def _with_towers(path: Path, problem: Problem, model: CostModel) -> tuple[Problem, dict[str, Any]]:
    """The problem with the towers of a file, and what a plan's provenance says of them."""
    from shardcore.search.tower_hosts import tower_hosts
    from shardcore.towers import read_towers

    towers = read_towers(path)
    found = tower_hosts(problem, towers, model)
    return found.problem, {"tower_ratio": towers.compression_ratio,
                           "towers": {"affinity_inside": found.affinity_inside,
                                      "loads": [list(host) for host in found.loads]}}


def _replanned(args: argparse.Namespace, problem: Problem, model: CostModel,
               budget: Budget | None) -> tuple[Plan, str]:
    """A plan improved from --start, and the improvement in words."""
    from shardcore import files
    from shardcore.cost.model import price
    from shardcore.publish.diff import diff
    from shardcore.publish.replan import ReplanConfig, replan
    from shardcore.report import plan_report
    from shardcore.search.anneal.sharder import SPACE_OF
    from shardcore.workload import lower

    # A plan's file is checked against the problem that it was made for.
    old = files.read_plan(args.start, files.read_problem(args.start_problem) if args.start_problem
                          else problem)
    most_bytes = None if args.max_moved_gib is None else int(args.max_moved_gib * 2**30)
    config = ReplanConfig(args.max_moved_tables, most_bytes, space=SPACE_OF[args.algorithm], seed=args.seed,
                          budget=budget)
    found = replan(old, problem, model, config)
    # A plan of another problem has no cost in this one.
    before = "" if args.start_problem else f", which cost {price(lower(old, problem), model).total_ms:.3f} ms"
    return found, f", starting from {args.start}{before}; {plan_report.moves_text(diff(old, found))}"


def _say_explained(plan: Plan, problem: Problem, model: CostModel, budget: Budget | None) -> None:
    from shardcore.report import plan_report
    from shardcore.search.explain import explain

    print(f"\n{plan_report.text(explain(plan, problem, model, budget))}")


def _say_extrapolated(sentences: Sequence[str]) -> None:
    for sentence in sentences[:5]:
        print(f"extrapolated: {sentence}", file=sys.stderr)
    if len(sentences) > 5:
        print(f"extrapolated: and {len(sentences) - 5} more", file=sys.stderr)


# --- price -------------------------------------------------------------------------------------------------


def _add_price(commands: argparse._SubParsersAction) -> None:
    p = command(commands, price, "Predict what one training step of a plan costs, per device.")
    p.add_argument("plan", type=Path, metavar="PLAN.json")
    p.add_argument("--problem", type=Path, required=True, metavar="PROBLEM.json")
    p.add_argument("--model", type=Path, required=True, action="append", help=_MODEL)
    p.add_argument("--confidence", type=positive(float), metavar="P", help=_CONFIDENCE)
    p.add_argument("--explain", action="store_true", help=f"{_EXPLAIN}, instead of standard output's JSON")
    p.add_argument("--out", type=Path, metavar="COST.json", help="default: standard output")


def price(args: argparse.Namespace) -> None:
    from shardcore import files
    from shardcore.cost import mixed
    from shardcore.cost.model import at_confidence
    from shardcore.cost.model import price as predicted
    from shardcore.search.tower_hosts import as_planned
    from shardcore.workload import lower

    problem = files.read_problem(args.problem)
    model = mixed.load(args.model).for_problem(problem)
    problem.require_setting(model.setting)
    found = files.read_plan(args.plan, problem)
    problem = as_planned(found, problem)
    workload, cautious = lower(found, problem), at_confidence(model, args.confidence)
    cost, beyond = predicted(workload, cautious), mixed.out_of_range(model, workload)
    body = {"total_ms": cost.total_ms, **dataclasses.asdict(cost),
            "memory_bytes": list(workload.memory_bytes), "extrapolated": beyond}
    if args.out:
        files.write_json(args.out, body)
    elif not args.explain:
        print(json.dumps(body, indent=1))
    if args.explain:
        _say_explained(found, problem, cautious, None)
    _say_extrapolated(beyond)


# --- replay ------------------------------------------------------------------------------------------------


def _add_replay(commands: argparse._SubParsersAction) -> None:
    p = command(commands, replay, "Run one training step of plans for real on this machine, in alternation, "
                "and time its parts per device.")
    p.add_argument("plans", type=Path, nargs="+", metavar="PLAN.json", help="plans of the same problem")
    p.add_argument("--problem", type=Path, required=True, metavar="PROBLEM.json")
    p.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda where there is one")
    p.add_argument("--hardware", help="the setting's name of the device; default: its own")
    p.add_argument("--repeats", type=positive(int), default=50, help="steps of each plan that enter a median")
    p.add_argument("--arena-gib", type=positive(float), default=1.0, help="weights in memory a process, the "
                   "largest shard")
    p.add_argument("--timeout-s", type=positive(float), default=120.0, help="a round of steps that takes "
                   "longer has hung")
    p.add_argument("--seed", type=natural, default=0, help="of the batches")
    p.add_argument("--append", type=Path, metavar="DIR", help="keep the replays in this dataset too: "
                   "training on it learns what exchanges take in steps; what it has of these plans is not "
                   "run again")
    p.add_argument("--out", type=Path, metavar="REPLAY.json", help="default: standard output")


def replay(args: argparse.Namespace) -> None:
    from shardcore import files
    from shardcore.measure import hardware
    from shardcore.measure.replay import ReplayConfig, replay_all
    from shardcore.samples import dataset, replays
    from shardcore.workload import lower

    # Fail before reading files if the device is missing.
    device = args.device or hardware.detect_device()
    hardware.require_device(device)
    problem = files.read_problem(args.problem)
    name = args.hardware or hardware.hardware_name(device)
    setting = Setting(name, problem.global_batch, problem.precision, problem.optimizer)
    plans = [files.read_plan(path, problem) for path in args.plans]
    workloads = [lower(plan, problem) for plan in plans]
    config = ReplayConfig(repeats=args.repeats, arena_bytes=int(args.arena_gib * 2**30),
                          timeout_s=args.timeout_s, seed=args.seed)
    if args.append:
        # Replays are kept by algorithm: a plan without one goes by its file.
        made = [(plan.provenance.get("algorithm", path.stem), plan)
                for path, plan in zip(args.plans, plans, strict=True)]
        # The reference op shows how slow the machine is during the replays.
        reference = dataset.reference_op(args.append, setting)
        known = replays.append(args.append, problem, made, setting, config,
                               lambda w: replay_all(w, setting, config, device, reference))
        costs = [known[replays.plan_digest(plan)] for plan in plans]
    else:
        costs = replay_all(workloads, setting, config, device)
    body = {"setting": files.setting_to_json(setting), "replays": [
        {"plan": str(path), "total_ms": cost.total_ms, **dataclasses.asdict(cost),
         "memory_bytes": list(workload.memory_bytes)}
        for path, cost, workload in zip(args.plans, costs, workloads, strict=True)]}
    if args.out:
        files.write_json(args.out, body)
    else:
        print(json.dumps(body, indent=1))
    if any(cost.oversubscribed for cost in costs):
        print(f"oversubscribed: {len(problem.topology)} processes on fewer cores measure the scheduler too",
              file=sys.stderr)


# --- export ------------------------------------------------------------------------------------------------


def _add_export(commands: argparse._SubParsersAction) -> None:
    p = command(commands, export, "Write a plan as TorchRec's: what "
                "shardcore.export.torchrec_json.read_torchrec reads, DistributedModelParallel takes.")
    p.add_argument("plan", type=Path, metavar="PLAN.json")
    p.add_argument("--problem", type=Path, required=True, metavar="PROBLEM.json")
    p.add_argument("--module", required=True, metavar="PATH", help="of the EmbeddingBagCollection that has "
                   "the tables, in the model's tree of modules, such as sparse_arch.embedding_bag_collection")
    p.add_argument("--compute-device", choices=["cpu", "cuda"], default="cuda")
    p.add_argument("--uneven-rows", action="store_true", help=argparse.SUPPRESS)
    p.add_argument("--out", type=Path, required=True, metavar="TORCHREC.json")


def export(args: argparse.Namespace) -> None:
    from shardcore import files
    from shardcore.export.torchrec import to_torchrec
    from shardcore.export.torchrec_json import write_torchrec
    from shardcore.search import torchrec

    if args.uneven_rows:
        raise ShardCoreError("--uneven-rows is gone: plans divide rows evenly now, as TorchRec does; "
                             "leave it out")
    torchrec.require_installed("a file for TorchRec is written with TorchRec")
    problem = files.read_problem(args.problem)
    plan = files.read_plan(args.plan, problem)
    exported = to_torchrec(plan, problem, args.module, args.compute_device)
    write_torchrec(args.out, exported)


# --- problem -----------------------------------------------------------------------------------------------


def _add_problem(commands: argparse._SubParsersAction) -> None:
    p = command(commands, problem, "Make a problem file from a public list of tables, FBGEMM's reports of a "
                "job, or by drawing from a pool.")
    p.add_argument("tables", help="name of a public list (mlperf-dlrm-dcnv2, hugectr-180, ...), a folder of "
                   "FBGEMM's reports (docs/torchrec.md) or a POOL.json")
    p.add_argument("--devices", type=positive(int), default=4)
    p.add_argument("--memory-gib", type=positive(float), default=24.0, help="a device, of which 15%% is kept "
                   "for the dense part, unless drawn from a pool")
    p.add_argument("--batch", type=positive(int), default=2048, help="global batch")
    p.add_argument("--draw", type=natural, metavar="INDEX", help="which problem to draw from a pool")
    p.add_argument("--max-dim", type=positive(int), default=128, help="of the drawn tables")
    p.add_argument("--seed", type=natural, default=0)
    p.add_argument("--pipeline", choices=list(HIDES_IDS), default=Job.pipeline,
                   help="TorchRec's: whether ids travel while the dense part runs")
    for way in ("forward", "backward"):
        p.add_argument(f"--dense-{way}-ms", type=float, metavar="MS",
                       help="of the dense part on a device; give both or neither")
        p.add_argument(f"--{way}-payload", choices=list(PAYLOADS), default="fp32",
                       help=f"what {'outputs' if way == 'forward' else 'gradients'} travel as")
    p.add_argument("--out", type=Path, required=True, metavar="PROBLEM.json")


def problem(args: argparse.Namespace) -> None:
    from shardcore import files
    from shardcore.draws.problems import ProblemConfig, draw_problem
    from shardcore.tables.public import public_pool

    require_within(args, "problem", devices=(1, MOST_DEVICES))
    job = Job(args.pipeline, args.dense_forward_ms, args.dense_backward_ms,
              forward_payload=args.forward_payload, backward_payload=args.backward_payload)
    if args.tables.endswith(".json"):
        pool = files.read_pool(args.tables)
        if args.draw is None:
            raise ShardCoreError(f"{args.tables} is a pool to draw from: give --draw INDEX (or name a public "
                                 "list)")
        shape = ProblemConfig(devices=args.devices, max_dim=args.max_dim)
        made = draw_problem(pool, args.draw, Setting("any", args.batch), args.seed, shape)
    else:
        devices, name = (Device(int(args.memory_gib * 2**30)),) * args.devices, args.tables
        if Path(args.tables).is_dir():
            from shardcore.export.fbgemm_statistics import reported_tables

            found, name = reported_tables(args.tables), Path(args.tables).resolve().name
        else:
            found = public_pool(args.tables)
        reserved = Constraints(reserved_bytes=int(files.DEFAULT_RESERVE * devices[0].memory_bytes))
        made = Problem(f"{name}-{args.devices}", found, Topology(devices), args.batch, constraints=reserved)
    files.write_problem(args.out, dataclasses.replace(made, job=job))
    gib = sum(t.bytes for t in made.tables) / 2**30
    print(f"{args.out}: {len(made.tables)} tables, {gib:.1f} GiB, {args.devices} devices")
