"""topology: find which devices of the Ray cluster are near each other, and the bandwidths of their links."""

from pathlib import Path

from prefect import flow, task

from flows import program
from shardcore.io import files
from shardcore.measure import pairs
from shardcore.measure.pairs import PairConfig, PairMeasurement
from shardcore.report import topology_report
from tasks import console
from tasks.ray_cluster import ray_cluster
from tasks.ray_transport import RayTransport


def write_measured_links(problem: Path, out: Path, ranks: Path | None, config: PairConfig) -> str:
    """Measure links between ranks, one per device of a problem, and write the problem with links. Returns a report."""
    stored = files.read_problem(problem)
    pairs.require_measurable_links(stored)
    with ray_cluster():
        measured = measure_pair_times(len(stored.topology), config)
    return topology_report.write_measured_topology(measured, stored, out, ranks)


@task(task_run_name="measure-pairs")
def measure_pair_times(ranks: int, config: PairConfig) -> PairMeasurement:
    """Message times between all pairs of ranks on the connected Ray cluster. Ranks fill one host after another.

    Raises ShardCoreError if the ranks find no room, or one fails, dies or hangs.
    """
    with RayTransport() as transport:
        return pairs.measure_pairs(
            ranks,
            config,
            transport,
            lambda done, of: console.show_progress(done / of, f"turns of pairs: {done} of {of}"),
        )


@flow(name="topology")
def topology(
    problem: str, *, out: str, ranks: str | None = None, message_kib: int = 1024, repeats: int = 3
) -> str:
    """Time messages between all pairs of ranks, one for each device of a problem, on the Ray cluster. Write
    the problem with the hosts and bandwidths that were found. Returns a report.

    Args:
        problem: Problem file. It needs as many devices as the job will have.
        out: File to write the problem with hosts and bandwidths to.
        ranks: File to write the order of ranks, their nodes, their groups and the times of pairs to.
        message_kib: KiB of the messages whose times show which ranks are near each other.
        repeats: Repeats of each message, in each of three sweeps. The fastest counts.
    """
    config = PairConfig(message_kib, repeats=repeats)
    return write_measured_links(Path(problem), Path(out), Path(ranks) if ranks else None, config)


if __name__ == "__main__":
    program.run_as_program(topology, shows_result=True)
