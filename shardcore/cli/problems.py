"""Commands that make a problem file, and look at one."""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated

from shardcore.cli.options import Natural, Output, Positive, PositiveGib, ProblemFile, add_command
from shardcore.core.catalog import DENSE_OPTIMIZERS
from shardcore.core.constraints import Constraints
from shardcore.core.errors import ShardCoreError
from shardcore.core.job import HIDES_IDS, PAYLOADS, Job
from shardcore.core.topology import Device, Topology, default_reserve
from shardcore.core.types import Problem, Setting
from shardcore.core.validation import MOST_DEVICES, require_within


@dataclass(frozen=True)
class ProblemOptions:
    """Make a problem file from a public list of tables, FBGEMM's reports of a job, or by drawing from a pool.

    tables: name of a public list (mlperf-dlrm-dcnv2, hugectr-180, ...), a folder of FBGEMM's reports
      (docs/torchrec.md) or a POOL.json
    hosts: of equally many of the devices
    memory_gib: a device, of which 15% is kept for the dense part, unless drawn from a pool
    batch: global batch
    draw: which problem to draw from a pool
    max_dim: of the drawn tables
    pipeline: TorchRec's: whether ids travel while the dense part runs
    replica_optimizer: the job's dense optimizer, which updates replicas; left out, the one most like that of
      the tables
    dense_forward_ms: of the dense part on a device; give both or neither
    dense_backward_ms: of the dense part on a device; give both or neither
    forward_payload: what outputs travel as
    backward_payload: what gradients travel as
    """

    tables: str
    _: KW_ONLY
    devices: Positive = 4
    hosts: Positive = 1
    memory_gib: PositiveGib = 24.0
    batch: Positive = 2048
    draw: Annotated[Natural, "INDEX"] | None = None
    max_dim: Positive = 128
    seed: Natural = 0
    pipeline: Annotated[str, tuple(HIDES_IDS)] = Job.pipeline
    replica_optimizer: Annotated[str, tuple(DENSE_OPTIMIZERS)] | None = None
    dense_forward_ms: Annotated[float, "MS"] | None = None
    dense_backward_ms: Annotated[float, "MS"] | None = None
    forward_payload: Annotated[str, tuple(PAYLOADS)] = "fp32"
    backward_payload: Annotated[str, tuple(PAYLOADS)] = "fp32"
    out: Annotated[ProblemFile, Output()]


@dataclass(frozen=True)
class HeatOptions:
    """Show which rows of a problem's tables are hot, and what a cache of them would miss.

    held: of each table's rows in the cache
    """

    problem: ProblemFile
    _: KW_ONLY
    held: Annotated[float, "SHARE"] = 0.1


def add_commands(commands: argparse._SubParsersAction) -> None:
    add_command(commands, ProblemOptions, problem)
    add_command(commands, HeatOptions, heat)


def heat(args: HeatOptions) -> None:
    from shardcore.io import files
    from shardcore.report.heat_report import heat_table

    print(heat_table(files.read_problem(args.problem), args.held))


def problem(args: ProblemOptions) -> None:
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
