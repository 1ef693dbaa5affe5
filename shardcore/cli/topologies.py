"""Commands on topologies: topology measure."""

from __future__ import annotations

import os

from shardcore.cli.commands import MeasurePairsOptions
from shardcore.cli.progress_line import showing_progress
from shardcore.core.progress import report
from shardcore.core.types import Problem
from shardcore.core.validation import require
from shardcore.io import files
from shardcore.measure import pairs
from shardcore.measure.transport import Transport
from shardcore.report import topology_report


def topology_measure(args: MeasurePairsOptions) -> None:
    problem = files.read_problem(args.problem)
    pairs.require_measurable_links(problem)
    in_job = "RANK" in os.environ
    is_first = not in_job or _torchrun_rank(problem) == 0

    def report_turns(done: int, of: int) -> None:
        if is_first:
            report(f"pairs: {done} of {of} turns")

    with showing_progress():
        if in_job:
            found = pairs.measure_in_job(args.pairs, args.device, report_turns)
        else:
            found = pairs.measure_pairs(
                len(problem.topology), args.pairs, Transport(args.device), report_turns
            )
    if is_first:
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
