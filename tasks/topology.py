"""Times of messages between pairs of ranks, by a gang on the connected cluster."""

from __future__ import annotations

from pathlib import Path

from prefect import task

from shardcore.io import files
from shardcore.measure import pairs
from shardcore.measure.pairs import PairConfig, PairMeasurement
from shardcore.report import topology_report
from tasks import console
from tasks.ray_cluster import ray_cluster
from tasks.ray_transport import RayTransport


def find_links(problem: Path, out: Path, ranks: Path | None, config: PairConfig) -> str:
    """Measure with a rank for each device of a problem, and write the problem with its links. Returns a report."""
    stored = files.read_problem(problem)
    pairs.require_links(stored)
    with ray_cluster():
        measured = measure_pairs(len(stored.topology), config)
    return topology_report.write_measured_topology(measured, stored, out, ranks)


@task(task_run_name="measure-pairs")
def measure_pairs(ranks: int, config: PairConfig) -> PairMeasurement:
    """Times of pairs by a gang of the connected cluster. Ray fills a host before it takes another.

    Raises ShardCoreError if the ranks find no room, or one fails, dies or hangs.
    """

    def note(done: int, of: int) -> None:
        console.progress(done / of, f"turns of pairs: {done} of {of}")

    with RayTransport() as transport:
        return pairs.measure(ranks, config, transport, note)
