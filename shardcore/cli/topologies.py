"""Commands on topologies: topology measure."""

from __future__ import annotations

import os
import sys

from shardcore.cli.commands import MeasurePairsOptions
from shardcore.core.types import Problem
from shardcore.core.validation import require
from shardcore.io import files
from shardcore.measure import pairs
from shardcore.measure.transport import Transport
from shardcore.report import topology_report


def topology_measure(args: MeasurePairsOptions) -> None:
    problem = files.read_problem(args.problem)
    pairs.require_measurable_links(problem)
    if "RANK" in os.environ:
        first = _torchrun_rank(problem) == 0
        found = pairs.measure_in_job(
            args.pairs, args.device, _print_turn_progress if first else lambda *_: None
        )
        if not first:
            return
    else:
        transport = Transport(args.device)
        found = pairs.measure_pairs(len(problem.topology), args.pairs, transport, _print_turn_progress)
    print(topology_report.write_measured_topology(found, problem, args.out, args.ranks))


def _torchrun_rank(problem: Problem) -> int:
    """Rank of this process, from torchrun's environment. Raises ShardCoreError unless each device has one rank."""
    n, given = len(problem.topology), os.environ
    require(
        given.get("WORLD_SIZE") == str(n),
        f"WORLD_SIZE is {given.get('WORLD_SIZE')!r} and problem {problem.name!r} has "
        f"{n} devices; they need to be as many",
    )
    for name, most in (("RANK", n - 1), ("MASTER_PORT", 65535), ("LOCAL_RANK", n - 1)):
        found = given.get(name, "0")
        require(
            found.isascii() and found.isdecimal() and len(found) <= 5 and int(found) <= most,
            f"{name} is {found!r}; it needs a whole number of 0 to {most}",
        )
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        require(name in given, f"{name} is not set, though RANK is; a job needs both")
    return int(given["RANK"])


def _print_turn_progress(done: int, total: int) -> None:
    if done % max(1, total // 10) == 0 or done == total:
        print(f"pairs: {done} of {total} turns", file=sys.stderr, flush=True)
