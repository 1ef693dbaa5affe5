"""Times of messages between pairs of ranks, by a gang on the connected cluster."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import ray
from prefect import task
from ray.exceptions import RayError

from shardcore.io import files
from shardcore.measure import pairs
from shardcore.measure.pairs import PairConfig, PairMeasurement
from shardcore.report import topology_report
from tasks import actors, console
from tasks.measure import cluster_device
from tasks.pair_rank import PairRank
from tasks.ray_cluster import ray_cluster

_LOOK_S = 5.0


def find_links(problem: Path, out: Path, ranks: Path | None, config: PairConfig) -> str:
    """Measure with a rank for each device of a problem, and write the problem with its links. Returns a report."""
    stored = files.read_problem(problem)
    pairs.require_links(stored)
    with ray_cluster():
        measured, nodes = measure_pairs(len(stored.topology), config)
    return topology_report.write(measured, stored, out, ranks, nodes)


@task(task_run_name="measure-pairs")
def measure_pairs(ranks: int, config: PairConfig) -> tuple[PairMeasurement, list[str]]:
    """Times of pairs by a gang of the connected cluster, and the node of each rank.

    It runs on GPUs if the cluster has some, else on CPU cores. Ray fills a host before it takes another.

    Raises ShardCoreError if the ranks find no room, or one fails, dies or hangs.
    """
    device = cluster_device()
    with actors.gang(PairRank, "pairs", ranks, device, hosts=None) as members:
        [address] = actors.when_started([members[0].address.remote()])
        calls = [
            member.run.remote(rank, ranks, address, config, device) for rank, member in enumerate(members)
        ]
        silent_s = actors.silence(members)

        def silent_and_shown_s(rank: int) -> float:
            # Called now and then, so it also shows the progress.
            if rank == 0:
                with suppress(RayError):  # its call reports the reason
                    [(done, of)] = ray.get([members[0].turns.remote()], timeout=_LOOK_S)
                    console.progress(done / of, f"turns of pairs: {done} of {of}")
            return silent_s(rank)

        results = actors.answers("pairs", calls, config.timeout_s, silent_and_shown_s)
    return results[0][0], [node for _, node in results]
