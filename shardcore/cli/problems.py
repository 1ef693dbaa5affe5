"""Commands that make a problem file, and look at one."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from shardcore.cli.options import command, natural, positive, positive_gib
from shardcore.core.catalog import DENSE_OPTIMIZERS
from shardcore.core.constraints import Constraints
from shardcore.core.errors import ShardCoreError
from shardcore.core.job import HIDES_IDS, PAYLOADS, Job
from shardcore.core.topology import Device, Topology, default_reserve
from shardcore.core.types import Problem, Setting
from shardcore.core.validation import MOST_DEVICES, require_within


def add_commands(commands: argparse._SubParsersAction) -> None:
    p = command(
        commands,
        problem,
        "Make a problem file from a public list of tables, FBGEMM's reports of a "
        "job, or by drawing from a pool.",
    )
    p.add_argument(
        "tables",
        help="name of a public list (mlperf-dlrm-dcnv2, hugectr-180, ...), a folder of "
        "FBGEMM's reports (docs/torchrec.md) or a POOL.json",
    )
    p.add_argument("--devices", type=positive(int), default=4)
    p.add_argument("--hosts", type=positive(int), default=1, help="of equally many of the devices")
    p.add_argument(
        "--memory-gib",
        type=positive_gib,
        default=24.0,
        help="a device, of which 15%% is kept for the dense part, unless drawn from a pool",
    )
    p.add_argument("--batch", type=positive(int), default=2048, help="global batch")
    p.add_argument("--draw", type=natural, metavar="INDEX", help="which problem to draw from a pool")
    p.add_argument("--max-dim", type=positive(int), default=128, help="of the drawn tables")
    p.add_argument("--seed", type=natural, default=0)
    p.add_argument(
        "--pipeline",
        choices=list(HIDES_IDS),
        default=Job.pipeline,
        help="TorchRec's: whether ids travel while the dense part runs",
    )
    p.add_argument(
        "--replica-optimizer",
        choices=list(DENSE_OPTIMIZERS),
        help="the job's dense optimizer, "
        "which updates replicas; left out, the one most like that of the tables",
    )
    for way in ("forward", "backward"):
        p.add_argument(
            f"--dense-{way}-ms",
            type=float,
            metavar="MS",
            help="of the dense part on a device; give both or neither",
        )
        p.add_argument(
            f"--{way}-payload",
            choices=list(PAYLOADS),
            default="fp32",
            help=f"what {'outputs' if way == 'forward' else 'gradients'} travel as",
        )
    p.add_argument("--out", type=Path, required=True, metavar="PROBLEM.json")
    p = command(
        commands, heat, "Show which rows of a problem's tables are hot, and what a cache of them would miss."
    )
    p.add_argument("problem", type=Path, metavar="PROBLEM.json")
    p.add_argument(
        "--held", type=float, default=0.1, metavar="SHARE", help="of each table's rows in the cache"
    )


def heat(args: argparse.Namespace) -> None:
    from shardcore.io import files
    from shardcore.report.heat_report import heat_table

    print(heat_table(files.read_problem(args.problem), args.held))


def problem(args: argparse.Namespace) -> None:
    from shardcore.io import files
    from shardcore.measure.sampling.problems import ProblemConfig, draw_problem
    from shardcore.tables.public import public_pool

    require_within(args, "problem", devices=(1, MOST_DEVICES))
    job = Job(
        args.pipeline,
        args.dense_forward_ms,
        args.dense_backward_ms,
        forward_payload=args.forward_payload,
        backward_payload=args.backward_payload,
        replica_optimizer=args.replica_optimizer,
    )
    if args.tables.endswith(".json"):
        pool = files.read_pool(args.tables)
        if args.draw is None:
            raise ShardCoreError(
                f"{args.tables} is a pool to draw from: give --draw INDEX (or name a public list)"
            )
        shape = ProblemConfig(devices=args.devices, max_dim=args.max_dim)
        made = draw_problem(pool, args.draw, Setting("any", args.batch), args.seed, shape)
    else:
        devices, name = (Device(int(args.memory_gib * 2**30)),) * args.devices, args.tables
        if Path(args.tables).is_dir():
            from shardcore.torchrec.fbgemm_statistics import reported_tables

            found, name = reported_tables(args.tables), Path(args.tables).resolve().name
        else:
            found = public_pool(args.tables)
        reserved = Constraints(reserved_bytes=default_reserve(devices))
        made = Problem(f"{name}-{args.devices}", found, Topology(devices), args.batch, constraints=reserved)
    made = dataclasses.replace(made, job=job, topology=_on_hosts(made.topology, args.hosts))
    files.write_problem(args.out, made)
    gib = sum(t.bytes for t in made.tables) / 2**30
    on = f" on {args.hosts} hosts" * (args.hosts > 1)
    print(f"{args.out}: {len(made.tables)} tables, {gib:.1f} GiB, {args.devices} devices{on}")


def _on_hosts(topology: Topology, hosts: int) -> Topology:
    n = len(topology)
    if n % hosts:
        raise ShardCoreError(f"{n} devices were asked for on {hosts} hosts; it needs as many on each")
    devices = tuple(
        dataclasses.replace(device, host=f"host-{d * hosts // n}")
        for d, device in enumerate(topology.devices)
    )
    return dataclasses.replace(topology, devices=devices)
