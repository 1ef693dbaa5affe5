"""Commands that make a problem file, and look at one."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from shardcore.cli.commands import HeatOptions, HotDriftOptions, ProblemOptions
from shardcore.core.constraints import Constraints
from shardcore.core.errors import ShardCoreError
from shardcore.core.topology import Topology, default_reserved_bytes
from shardcore.core.types import Problem, Setting
from shardcore.core.validation import require
from shardcore.cost.profile import load_profile
from shardcore.io import files, job_folder
from shardcore.io.hot_ids import read_hot_ids, write_hot_ids
from shardcore.io.row_counts import read_row_counts
from shardcore.measure.sampling.problems import ProblemConfig, draw_problem
from shardcore.plans.hot_drift import hot_row_drifts as drift_of
from shardcore.report.decisions_report import hot_row_drift_table
from shardcore.report.heat_report import heat_table
from shardcore.tables.public import public_optimizer, public_pool

_MEMORY_GIB = 80e9 / 2**30
"""Memory of a device if neither a profile nor --memory-gib gives it: 80 GB, as in data sheets of A100 and H100."""


def problem(args: ProblemOptions) -> None:
    topology, measured = (
        _topology_of_options(args),
        args.tables.endswith(".json") or Path(args.tables).is_dir(),
    )
    require(
        not measured or args.zipf_alpha is None,
        f"--zipf-alpha {args.zipf_alpha} was given with {args.tables}, which has measured lookups; it needs a "
        "public list",
    )
    if args.tables.endswith(".json"):
        pool = files.read_pool(args.tables)
        if args.draw is None:
            raise ShardCoreError(
                f"{args.tables} is a pool to draw from: give --draw INDEX (or name a public list)"
            )
        setting = Setting("any", args.batch, args.precision or "fp32", args.optimizer or "exact_sgd")
        shape = ProblemConfig(devices=args.devices, max_dim=args.max_dim)
        made = draw_problem(pool, args.draw, setting, args.seed, shape)
        # Devices have the memory that was drawn.
        topology = _with_device_memory(topology, made.topology.devices[0].memory_bytes)
    else:
        name, optimizer = args.tables, args.optimizer or "exact_sgd"
        if Path(args.tables).is_dir():
            step = job_folder.read_step(job_folder.newest_step_folder(Path(args.tables)))
            tables, name = step.problem.tables, Path(args.tables).resolve().name
        else:
            tables = public_pool(args.tables, args.zipf_alpha)
            optimizer = args.optimizer or public_optimizer(args.tables)
        if args.precision:
            tables = tuple(dataclasses.replace(table, precision=args.precision) for table in tables)
        reserved = Constraints(reserved_bytes=default_reserved_bytes(topology.devices))
        name = "-".join(filter(None, (name, topology.hardware, str(args.devices))))
        made = Problem(name, tables, topology, args.batch, optimizer, constraints=reserved)
    made = dataclasses.replace(made, job=args.job, topology=topology)
    files.write_problem(args.out, made)
    gib = sum(t.bytes for t in made.tables) / 2**30
    on = f" on {args.hosts} hosts" * (args.hosts > 1) + f" in {args.pods} pods" * (args.pods > 1)
    of = f" of {topology.hardware}" if topology.hardware else ""
    print(
        f"{args.out}: {len(made.tables)} tables, {gib:.1f} GiB in {made.precision}, {made.optimizer}, "
        f"batch {args.batch}, {args.devices} devices{of}{on}"
    )


def heat(args: HeatOptions) -> None:
    print(heat_table(files.read_problem(args.problem), args.held))


def hot_drift(args: HotDriftOptions) -> None:
    found = drift_of(
        files.read_problem(args.problem), read_hot_ids(args.hot_ids), read_row_counts(args.row_counts)
    )
    if args.out:
        write_hot_ids(args.out, [one.new for one in found])
    print(hot_row_drift_table(found))


def _topology_of_options(args: ProblemOptions) -> Topology:
    """Topology of equal devices on equal hosts, with memory and links of the profile of --hardware, if given."""
    per_host, left = divmod(args.devices, args.hosts)
    require(
        per_host > 0 and left == 0,
        f"{args.devices} devices were asked for on {args.hosts} hosts; it needs as many on each",
    )
    if args.hardware is None:
        return Topology.of_hosts(args.hosts, per_host, args.memory_gib or _MEMORY_GIB, pods=args.pods)
    topology = load_profile(args.hardware).topology(args.hosts, per_host, pods=args.pods)
    return _with_device_memory(topology, int(args.memory_gib * 2**30)) if args.memory_gib else topology


def _with_device_memory(topology: Topology, n_bytes: int) -> Topology:
    devices = tuple(dataclasses.replace(device, memory_bytes=n_bytes) for device in topology.devices)
    return dataclasses.replace(topology, devices=devices)
