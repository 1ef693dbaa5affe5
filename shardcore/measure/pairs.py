"""Times of messages between pairs of ranks, and the link bandwidths they imply. All ranks of a gang take part.

Pairs talk in turn, one after another: pairs that share a link or a core would slow each other down. With more
ranks than MOST_IN_TURN, pairs without a common rank talk at once.

Gloo between CPUs has been run. NCCL between GPUs is written for the same interface and has not.

Shapes: D ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.distributed as dist

from shardcore.core.types import Problem
from shardcore.core.validation import require
from shardcore.measure import collectives, hardware, hosts, local_ranks
from shardcore.measure.config import PairConfig
from shardcore.measure.devices import device_by_name
from shardcore.measure.rank_order import Groups, MeasuredLinks, OutwardLinks, find_levels
from shardcore.measure.transport import LOCAL, Transport

MOST_IN_TURN = 64
"""Ranks whose pairs talk one after another: 2,016 pairs take a minute."""
_BYTES_PER_GBPS_MS = 1e6
"""Bytes that a link of 1 GB/s carries in a ms."""


@dataclass(frozen=True, eq=False)
class PairMeasurement:
    """Measured times and bandwidths between all pairs of ranks.

    pair_ms: [D, D] ms of a message from one rank to another. The diagonal is 0.
    levels: groups of near ranks, the smallest first.
    links: bandwidths within and between the groups of each level.
    nodes: name of each rank's host.
    """

    pair_ms: np.ndarray
    levels: list[Groups]
    links: MeasuredLinks
    nodes: tuple[str, ...] = ()


def require_measurable_links(problem: Problem) -> None:
    """Raise ShardCoreError for a problem whose links cannot be measured: of one device, or with towers."""
    require(
        problem.job.tower_ratio is None,
        f"problem {problem.name!r} has towers (job.tower_ratio), and its tables are pinned to hosts; measure the "
        "problem without both, then run plan --towers",
    )
    require(len(problem.topology) > 1, f"problem {problem.name!r} has one device; links need 2 or more")


Note = Callable[[int, int], None]
"""Called after each turn of pairs with the number of turns so far, and of all."""


def measure_pairs(
    ranks: int,
    config: PairConfig,
    transport: Transport = LOCAL,
    note: Note = lambda done, of: None,
) -> PairMeasurement:
    """Measure message times and bandwidths between all pairs of ranks, in one process for each core or GPU.

    Raises ShardCoreError if a rank dies or hangs. No process stays behind.
    """
    task = (ranks, config, transport.device)
    # All ranks send progress and the same measurement. Rank 0's are enough.
    for rank, message in transport.run("pairs", _run_rank, ranks, task, config.timeout_s, hosts=None):
        if rank == 0 and isinstance(message, PairMeasurement):
            return message
        if rank == 0:
            note(*message)
    raise AssertionError("rank 0 ends with its measurement")


def _run_rank(
    rank: int, init_method: str, send: Callable[[object], None], ranks: int, config: PairConfig, device: str
) -> None:
    """Entry point of one rank's process: send progress, and finally the measurement of all pairs."""
    send(measure_rank(rank, ranks, init_method, config, device, lambda *done: send(done)))


def measure_rank(
    rank: int,
    ranks: int,
    init_method: str,
    config: PairConfig,
    device: str,
    note: Note = lambda done, of: None,
) -> PairMeasurement:
    """Measure all pairs of ranks as one rank of a gang of processes."""
    with local_ranks.report_lost_ranks():
        collectives.init_process_group(rank, ranks, init_method, device, config.timeout_s)
        pair_ms = measure_pair_times(config, device, note)
        # Groups come first, as links are measured within and between them.
        near = find_levels(pair_ms)
        measured = PairMeasurement(
            pair_ms,
            near,
            measure_links(near or [(tuple(range(ranks)),)], config, device),
            tuple(collectives.all_gather_objects(hosts.host_name())),
        )
        # Rank 0's process holds the store, which the others need until they are done.
        dist.barrier()
        dist.destroy_process_group()
    return measured


def measure_in_job(
    config: PairConfig, device: str = "cpu", note: Note = lambda done, of: None
) -> PairMeasurement:
    """Measure all pairs of ranks in a job started by torchrun or similar. Each process calls this."""
    hardware.require_device(device)
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return measure_rank(rank, ranks, "env://", config, device, note)


def pair_rounds(ranks: int) -> Iterator[list[tuple[int, int]]]:
    """Round-robin schedule: rounds of disjoint pairs of ranks, in which every pair meets once (circle method)."""
    # With an odd number of ranks, one rank a round is paired with a number beyond the last, so it rests.
    ring = list(range(ranks + ranks % 2))
    for _ in range(len(ring) - 1):
        half = len(ring) // 2
        both = zip(ring[:half], reversed(ring[half:]), strict=True)
        yield [(min(p), max(p)) for p in both if max(p) < ranks]
        # Keep the first and rotate the others: in n - 1 rounds each meets each.
        ring = [ring[0], ring[-1], *ring[1:-1]]


def measure_pair_times(
    config: PairConfig, device: str = "cpu", note: Note = lambda done, of: None
) -> np.ndarray:
    """[D, D] ms of a message from one rank to another: half of the fastest round trip."""
    rank, n, on = dist.get_rank(), dist.get_world_size(), device_by_name(device)
    message = torch.zeros(config.message_kib << 10, dtype=torch.uint8, device=on.place)
    # Infinite until measured, as the least of all sweeps is kept.
    to_others = torch.full((n,), torch.inf, dtype=torch.float64)
    to_others[rank] = 0.0
    at_once = list(pair_rounds(n))
    in_turn = [[pair] for pairs in at_once for pair in pairs]
    turns = (at_once if n > MOST_IN_TURN else in_turn) * config.sweeps
    for done, turn in enumerate(turns, 1):
        # Pairs of a round start together, after all have ended the round before.
        dist.barrier()
        for pair in turn:
            if rank in pair:
                other = pair[1 - pair.index(rank)]
                # One rank sends while the other receives. Else both would wait for ever.
                there = partial(_send_one_way, message, *pair)
                back = partial(_send_one_way, message, *reversed(pair))
                took_ms = on.time_calls_ms(*[there, back] * (config.repeats + 1))
                # The first message connects.
                round_trips_ms = np.reshape(took_ms, (-1, 2))[1:].sum(1)
                to_others[other] = min(to_others[other].item(), round_trips_ms.min() / 2)
        note(done, len(turns))
    # Each rank knows its own row only.
    rows = [torch.zeros_like(to_others) for _ in range(n)]
    dist.all_gather(rows, to_others)
    # Both ranks of a pair have timed it. The lower figure was disturbed less.
    both_ways = torch.stack(rows).numpy()
    return np.minimum(both_ways, both_ways.T)


def measure_links(levels: Sequence[Groups], config: PairConfig, device: str = "cpu") -> MeasuredLinks:
    """Bandwidths of links within and between groups of ranks at each level, and the latency of a collective."""
    rank, n, on = dist.get_rank(), dist.get_world_size(), device_by_name(device)
    load = torch.zeros(config.load_kib << 10, dtype=torch.uint8, device=on.place)

    def slowest_ms(*calls: Callable[[], object]) -> float:
        """Time of calls that ranks begin together, on the slowest rank: a collective waits for that."""
        dist.barrier()
        # Ranks without a call report 0.
        took_ms = torch.tensor(sum(on.time_calls_ms(*calls)), dtype=torch.float64)
        dist.all_reduce(took_ms, dist.ReduceOp.MAX)
        return took_ms.item()

    def measure_gbps(pairs: Sequence[tuple[int, int]]) -> float | None:
        """Bandwidth in GB/s from the first to the second rank of each pair, while all pairs send."""
        if not pairs:
            return None
        mine = [partial(_send_one_way, load, *pair) for pair in pairs if rank in pair]
        # The fastest repeat counts: disturbances only add time.
        return len(load) / min(slowest_ms(*mine) for _ in range(config.repeats)) / _BYTES_PER_GBPS_MS

    # One pair within each group.
    within = measure_gbps([(group[0], group[1]) for group in levels[0] if len(group) > 1])
    outward = []
    for groups, outer in zip(levels, [*levels[1:], (tuple(range(n)),)], strict=True):
        # Groups send to others of the same outer group: first one rank of each, then all ranks together.
        inside = [tuple(group for group in groups if group[0] in of) for of in outer]
        first = measure_gbps(
            [pair for of in inside for pair in _pairs_between_groups(tuple(group[:1] for group in of))]
        )
        together = measure_gbps([pair for of in inside for pair in _pairs_between_groups(of)])
        if together is not None:
            outward.append(OutwardLinks(together, _shared_gbps(groups, first, together)))
    # One number for each rank is next to no data, so the time is latency.
    small, into = torch.zeros(n, device=on.place), torch.zeros(n, device=on.place)
    took_ms = [slowest_ms(lambda: dist.all_to_all_single(into, small)) for _ in range(config.repeats + 1)]
    # The first repeat connects.
    return MeasuredLinks(within, tuple(outward), float(np.median(took_ms[1:])))


def _shared_gbps(groups: Groups, first: float | None, together: float | None) -> float | None:
    """Bandwidth in GB/s of the link that a group's ranks share; None where each rank has its own link.

    first: of a rank while no other of its group sends.
    together: of a rank while all send.
    """
    size = max(map(len, groups))
    # A rank alone is `size` times as fast on a shared link, and equally fast on its own. The threshold is
    # their geometric mean, half way on a scale of ratios.
    if first is None or together is None or first < together * size**0.5 or size == 1:
        return None
    return together * size


def _pairs_between_groups(groups: Groups) -> list[tuple[int, int]]:
    """Disjoint pairs of ranks of different groups, which can send at once."""
    # With groups of one size in order, two ranks that are half the list apart are in different groups.
    ranks = [rank for group in groups for rank in group]
    half, group_of = len(ranks) // 2, {rank: i for i, group in enumerate(groups) for rank in group}
    pairs = zip(ranks[:half], ranks[len(ranks) - half :], strict=True)
    return [pair for pair in pairs if group_of[pair[0]] != group_of[pair[1]]]


def _send_one_way(load: torch.Tensor, sender: int, receiver: int) -> None:
    """Send a tensor from one rank to another."""
    # Never both ways at once: both would share a connection, where gloo's requests wait behind data.
    if dist.get_rank() == sender:
        dist.send(load, receiver)
    else:
        dist.recv(load, sender)
