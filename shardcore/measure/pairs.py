"""How long messages between pairs of ranks take, and what links carry. Every rank of a gang calls these.

Pairs talk in turn, one after another: pairs that share a link or a core would slow each other down. With more
ranks than MOST_IN_TURN, pairs without a common rank talk at once.

Gloo between CPUs has been run. NCCL between GPUs is written for the same interface and has not.

Shapes: D ranks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from shardcore.core.types import Problem
from shardcore.core.validation import MOST_REPEATS, WAITS_S, require, require_within
from shardcore.measure import collectives, hardware, local_ranks
from shardcore.measure.hosts import Place
from shardcore.measure.rank_order import Groups, Links, levels

MOST_IN_TURN = 64
"""Ranks whose pairs talk one after another: 2,016 pairs take a minute."""
_GB = 1e9


@dataclass(frozen=True)
class PairConfig:
    """message_kib: of the messages that tell ranks apart. sweeps: over all pairs, and repeats: of a pair in
    each. The fastest counts, so that what disturbs a machine for a while disturbs no pair in all sweeps.
    load_kib: of the messages that tell what links carry. timeout_s: a rank that waits longer gives up."""

    message_kib: int = 1024
    sweeps: int = 3
    repeats: int = 3
    load_kib: int = 4096
    timeout_s: float = 60.0

    def __post_init__(self) -> None:
        require_within(
            self,
            "pairs",
            message_kib=(1, 1 << 20),
            load_kib=(1, 1 << 20),
            sweeps=(1, MOST_REPEATS),
            repeats=(1, MOST_REPEATS),
            timeout_s=WAITS_S,
        )


@dataclass(frozen=True, eq=False)
class Found:
    """What a gang found. pair_ms: [D, D]. levels: groups of near ranks, the smallest first. links: of the
    first level."""

    pair_ms: np.ndarray
    levels: list[Groups]
    links: Links


def require_links(problem: Problem) -> None:
    """Raises ShardCoreError for a problem of one device, and for one with towers, which name hosts."""
    require(
        problem.job.tower_ratio is None,
        f"problem {problem.name!r} has towers (job.tower_ratio), and "
        "its tables are pinned to hosts; measure the problem without both, then run plan --towers",
    )
    require(len(problem.topology) > 1, f"problem {problem.name!r} has one device; links need 2 or more")


Note = Callable[[int, int], None]
"""Told after each turn of pairs how many there were, and of how many."""


def measure(
    ranks: int,
    config: PairConfig,
    device: str = "cpu",
    note: Note = lambda done, of: None,
    on: Sequence[Place] = (),
) -> Found:
    """What a gang of local processes finds, one a core or a GPU.

    on: the place of each rank, in a box.

    Raises ShardCoreError if a rank dies or hangs. No process stays behind.
    """
    hardware.require_device(device)
    heard = local_ranks.run("pairs", _work, ranks, (ranks, config, device), config.timeout_s, on or None)
    for rank, said in heard:
        if rank == 0 and isinstance(said, Found):
            return said
        if rank == 0:
            note(*said)
    raise AssertionError("rank 0 ends with what it found")


def _work(
    rank: int, init_method: str, say: Callable[[object], None], ranks: int, config: PairConfig, device: str
) -> None:
    """One process of the gang. It says how far it is, and in the end what it found."""
    if device == "cuda":
        torch.cuda.set_device(rank)
    say(measure_rank(rank, ranks, init_method, config, device, lambda *done: say(done)))


def measure_rank(
    rank: int,
    ranks: int,
    init_method: str,
    config: PairConfig,
    device: str,
    note: Note = lambda done, of: None,
) -> Found:
    """The same, called by every rank of a gang, each in a process of its own."""
    if device == "cpu":
        torch.set_num_threads(1)
    with local_ranks.exchanging():
        collectives.connect(rank, ranks, init_method, device, config.timeout_s)
        found = measure_here(config, device, note)
        # Rank 0 holds the store, which the others need until they are done.
        dist.barrier()
        dist.destroy_process_group()
    return found


def measure_job(config: PairConfig, device: str = "cpu", note: Note = lambda done, of: None) -> Found:
    """The same in a job that torchrun or the like has started. Each of its processes calls this."""
    hardware.require_device(device)
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    return measure_rank(
        int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), "env://", config, device, note
    )


def measure_here(
    config: PairConfig, device: torch.device | str = "cpu", note: Note = lambda done, of: None
) -> Found:
    """The same, called by every rank of a process group."""
    pair_ms = pair_times(config, device, note)
    near = levels(pair_ms)
    groups = near[0] if near else (tuple(range(len(pair_ms))),)
    return Found(pair_ms, near, links(groups, config, device))


def rounds(ranks: int) -> Iterator[list[tuple[int, int]]]:
    """Rounds of pairs without a common rank, in which every pair meets once (the circle method)."""
    ring = list(range(ranks + ranks % 2))
    for _ in range(len(ring) - 1):
        half = len(ring) // 2
        both = zip(ring[:half], reversed(ring[half:]), strict=True)
        yield [(min(p), max(p)) for p in both if max(p) < ranks]
        ring = [ring[0], ring[-1], *ring[1:-1]]


def pair_times(
    config: PairConfig, device: torch.device | str = "cpu", note: Note = lambda done, of: None
) -> np.ndarray:
    """[D, D] ms of a message from one rank to another: half of there and back, the fastest of some.

    The diagonal is 0.
    """
    rank, n = dist.get_rank(), dist.get_world_size()
    message = torch.zeros(config.message_kib << 10, dtype=torch.uint8, device=device)
    own = torch.full((n,), torch.inf, dtype=torch.float64)
    own[rank] = 0.0
    sweep = list(rounds(n)) if n > MOST_IN_TURN else [[pair] for some in rounds(n) for pair in some]
    turns = sweep * config.sweeps
    for done, turn in enumerate(turns, 1):
        dist.barrier()
        for pair in turn:
            if rank in pair:
                other = pair[1 - pair.index(rank)]
                took_s = _there_and_back(message, other, rank == pair[0], config.repeats)
                own[other] = min(own[other].item(), min(took_s) / 2 * 1e3)
        note(done, len(turns))
    rows = [torch.zeros_like(own) for _ in range(n)]
    dist.all_gather(rows, own)
    found = torch.stack(rows).numpy()
    return np.minimum(found, found.T)


def _there_and_back(message: torch.Tensor, other: int, first: bool, repeats: int) -> list[float]:
    """s of each of some messages to another rank and back. The first message, which connects, is left out."""
    found = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        for send in (first, not first):
            (dist.send if send else dist.recv)(message, other)
        if message.is_cuda:
            torch.cuda.synchronize(message.device)
        found.append(time.perf_counter() - began)
    return found[1:]


def links(groups: Groups, config: PairConfig, device: torch.device | str = "cpu") -> Links:
    """What links within and between these groups carry, and what a collective takes at least."""
    rank, n = dist.get_rank(), dist.get_world_size()
    load = torch.zeros(config.load_kib << 10, dtype=torch.uint8, device=device)

    def carried(pairs: Sequence[tuple[int, int]]) -> float | None:
        """GB/s of each first rank to its second while all of these pairs do so."""
        if not pairs:
            return None
        mine = next((pair for pair in pairs if rank in pair), None)
        took = float("inf")
        for _ in range(config.repeats):
            dist.barrier()
            began = time.perf_counter()
            if mine:
                _one_way(load, *mine)
            took = min(took, _slowest(time.perf_counter() - began if mine else 0.0))
        return len(load) / took / _GB

    # One pair within each group; one rank of each group, each with one of another; then all ranks.
    within = carried([(group[0], group[1]) for group in groups if len(group) > 1])
    alone, between = (carried(_between(some)) for some in (tuple(g[:1] for g in groups), groups))
    small, into = torch.zeros(n, device=device), torch.zeros(n, device=device)
    once = []
    for _ in range(config.repeats + 1):
        dist.barrier()
        began = time.perf_counter()
        dist.all_to_all_single(into, small)
        if small.is_cuda:
            torch.cuda.synchronize(small.device)
        once.append(_slowest(time.perf_counter() - began))
    return Links(within, between, _shared_gbps(groups, alone, between), 1e3 * float(np.median(once[1:])))


def _shared_gbps(groups: Groups, alone: float | None, together: float | None) -> float | None:
    """GB/s of a link that the ranks of a group share. None where each rank has its own.

    alone: of a rank while no other of its group sends. together: while all do.
    """
    size = max(map(len, groups))
    # Half way, on a scale of ratios, from links of their own to one link.
    if alone is None or together is None or alone < together * size**0.5 or size == 1:
        return None
    return together * size


def _between(groups: Groups) -> list[tuple[int, int]]:
    """Pairs of ranks of different groups, as many at once as there are. A rank is in one pair at most."""
    # In the order of groups, ranks that are half of all apart are of different groups of one size.
    ranks = [rank for group in groups for rank in group]
    half, group_of = len(ranks) // 2, {rank: i for i, group in enumerate(groups) for rank in group}
    pairs = zip(ranks[:half], ranks[len(ranks) - half :], strict=True)
    return [pair for pair in pairs if group_of[pair[0]] != group_of[pair[1]]]


def _one_way(load: torch.Tensor, sender: int, receiver: int) -> None:
    """One rank sends to another. Both at once share a connection, where gloo's requests wait behind data."""
    if dist.get_rank() == sender:
        dist.send(load, receiver)
    else:
        dist.recv(load, sender)
    if load.is_cuda:
        torch.cuda.synchronize(load.device)


def _slowest(seconds: float) -> float:
    """The longest of all ranks."""
    found = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.item()
