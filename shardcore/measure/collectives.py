"""Collectives among real processes, as a step of training makes them: gloo between CPUs, NCCL between GPUs.

Each rank runs one Rank; all are given the same requests (measurements.CollectiveRequest defines the
collectives). An exchange's waiting lasts until the last rank starts, its transfer from there to a rank's own
end.

In a step an exchange follows a computation, and takes longer for it: the threads that carry it slept, the
caches hold other things. So ranks may be kept busy before each.

Starts of different ranks are compared. The ranks of one host share its monotonic clock; another host's is
corrected by its offset, from ping-pongs over the process group. NCCL is written for the same interface and
has not been run here. Several hosts were emulated only (hosts.Box).

Shapes: D ranks, B batch rows, R repeats.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import urlparse

import numpy as np
import torch
import torch.distributed as dist

from shardcore.core.errors import ShardCoreError
from shardcore.core.types import Setting
from shardcore.core.validation import MOST_REPEATS, WAITS_S, require, require_within
from shardcore.io import dataset
from shardcore.io.measurements import CollectiveRequest, CollectiveSample
from shardcore.measure import hosts, local_ranks, own_core
from shardcore.measure.devices import device_of
from shardcore.measure.id_transfer import IdTransfer
from shardcore.measure.timing import spread
from shardcore.measure.transfers import Transfer, transfers
from shardcore.step.scopes import WORLD

_SCRATCH_BYTES = 16 << 20
"""Overwritten to keep a rank busy: more than a core's caches hold."""
_PINGS = 20
"""Ping-pongs a rank, of which the fastest tells the clocks' offset."""
_NOTICE_S = 0.03
"""How long before a common start ranks hear of it. It has to reach them all."""
_WAKING_S = 3e-4
"""A sleep may take so much longer."""


@dataclass(frozen=True)
class CollectiveConfig:
    """repeats of each exchange after warmups; timeout_s: a rank that waits longer for another gives up."""

    repeats: int = 7
    warmups: int = 1
    timeout_s: float = 60.0

    def __post_init__(self) -> None:
        require_within(
            self, "comm config", repeats=(1, MOST_REPEATS), warmups=(0, MOST_REPEATS), timeout_s=WAITS_S
        )


@dataclass(frozen=True)
class RankTimes:
    """One rank's repeats of one request: starts and ends in s of rank 0's monotonic clock, [R] each; None for
    a way that the collective does not run. oversubscribed: the rank's machine has more ranks than
    cores. work_s: [R] of a transfer of ids, the rank's own work in it."""

    forward: tuple[tuple[float, ...], tuple[float, ...]] | None
    backward: tuple[tuple[float, ...], tuple[float, ...]] | None
    oversubscribed: bool = False
    work_s: tuple[float, ...] = ()


# --- a gang -------------------------------------------------------------------------------------------------


def measure_all(
    requests: Sequence[CollectiveRequest],
    ranks: int,
    setting: Setting,
    config: CollectiveConfig | None = None,
    device: str = "cpu",
    box: hosts.Box | None = None,
) -> Iterator[CollectiveSample]:
    """Measure requests in order, by a gang of local processes ("cpu": one core each; "cuda": one GPU each); a
    sample is yielded as soon as all ranks have it.

    box: the hosts to emulate, with as many ranks in all. None: one host, this machine.

    Raises ShardCoreError before anything starts where a request is not for this gang or the machine lacks the
    GPUs, and while it runs where a rank dies or hangs: it names rank and reason, no process stays behind, and
    samples yielded before are good.
    """
    config = config or CollectiveConfig()
    for request in requests:
        _require_fits(request, ranks, box.hosts if box else 1)
        require(
            request.emulated == (box and box.links),
            f"exchange has links {request.emulated}; those here are {box and box.links}",
        )
    require(not box or box.ranks == ranks, f"box has {box and box.ranks} ranks; the gang has {ranks}")
    if device == "cuda" and torch.cuda.device_count() < ranks:
        raise ShardCoreError(
            f"exchanges among {ranks} ranks need as many GPUs; here are {torch.cuda.device_count()}"
        )
    return _measured(list(requests), ranks, setting, config, (device, box))


def _measured(
    requests: Sequence[CollectiveRequest],
    ranks: int,
    setting: Setting,
    config: CollectiveConfig,
    on: tuple[str, hosts.Box | None],
) -> Iterator[CollectiveSample]:
    if not requests:
        return
    device, box = on
    seen: list[deque[RankTimes]] = [deque() for _ in range(ranks)]
    order = 0
    with (
        hosts.box_of(box) if box else nullcontext() as places,
        closing(
            local_ranks.run(
                "exchange", _work, ranks, (ranks, requests, config, device), config.timeout_s, places
            )
        ) as heard,
    ):
        for rank, times in heard:
            seen[rank].append(times)
            if all(seen):
                yield combine(setting, requests[order], [times.popleft() for times in seen], order)
                order += 1


def _work(
    rank: int,
    init_method: str,
    say: Callable[[RankTimes], None],
    ranks: int,
    requests: Sequence[CollectiveRequest],
    config: CollectiveConfig,
    device: str,
) -> None:
    """One process of measure_all's gang: it says its times of one request after the other."""
    if device == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    with local_ranks.exchanging():
        member = Rank(rank, ranks, init_method, device, config)
    for request in requests:
        [times] = member.measure([request])
        say(times)
    member.close()


def combine(
    setting: Setting, request: CollectiveRequest, ranks: Sequence[RankTimes], order: int = 0
) -> CollectiveSample:
    """One sample from what all ranks saw of a request."""

    def parts_ms(way: str) -> tuple[np.ndarray, np.ndarray]:
        start, end = (np.array([getattr(r, way)[k] for r in ranks]) for k in (0, 1))
        return wait_and_transfer(start * 1e3, end * 1e3)

    ways = {way: parts_ms(way) for way in ("forward", "backward") if getattr(ranks[0], way)}
    transfer = {way: tuple(map(spread, ms)) for way, (_, ms) in ways.items()}
    first_waiting, _ = next(iter(ways.values()))
    return CollectiveSample(
        dataset.comm_id(setting, request),
        setting,
        request,
        transfer.get("forward"),
        transfer.get("backward"),
        tuple(map(float, np.median(first_waiting, axis=1))),
        time.time(),
        order=order,
        oversubscribed=any(r.oversubscribed for r in ranks),
        work_ms=tuple(float(np.median(r.work_s)) * 1e3 for r in ranks if r.work_s) or None,
    )


def wait_and_transfer(start: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """An exchange's two parts [D, R], before and after the last rank's start; a rank that is done by then
    only waited."""
    last = np.minimum(start.max(0), end)
    return last - start, end - last


def _require_fits(request: CollectiveRequest, ranks: int, hosts: int) -> None:
    if len(request.widths) != ranks or request.hosts != hosts:
        raise ShardCoreError(
            f"exchange of {len(request.widths)} widths with hosts {request.hosts} does not "
            f"fit a gang of {ranks} ranks with hosts {hosts}: it needs one width a rank, "
            "and as many hosts as there are"
        )


# --- one rank -----------------------------------------------------------------------------------------------


def host_id() -> str:
    """Tells hosts apart: processes with the same share a monotonic clock. Hosts of a box count as several,
    though they share one."""
    emulated = hosts.own_host()
    return hosts.machine_id() + ("" if emulated is None else f" host {emulated} of a box")


def _address(init_method: str) -> tuple[str, int] | None:
    url = urlparse(init_method)
    return (url.hostname, url.port) if url.scheme == "tcp" else None


def _store(host: str, port: int, rank: int, ranks: int, timeout: timedelta) -> dist.TCPStore:
    """Where the ranks find each other: rank 0 listens at this address only, which torch's own would not."""
    if ipaddress.ip_address(host).is_loopback:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # they exchange there, too
    listening = socket.create_server((host, port)).detach() if rank == 0 else None
    return dist.TCPStore(
        host, port, ranks, rank == 0, timeout, wait_for_workers=False, master_listen_fd=listening
    )


def connect(rank: int, ranks: int, init_method: str, device: str, timeout_s: float) -> None:
    """Make the process group of a gang, on the backend of its device."""
    on = device_of(device)
    timeout, where = timedelta(seconds=timeout_s + on.gang_start_s), _address(init_method)
    found = {"store": _store(*where, rank, ranks, timeout)} if where else {"init_method": init_method}
    # Clocks and barriers are tensors on the CPU, so gloo carries them.
    dist.init_process_group(on.backend, rank=rank, world_size=ranks, timeout=timeout, **found)


class Rank:
    """One process of the gang. init_method: such as "tcp://127.0.0.1:PORT" (a numeric address of rank 0's
    host, the only one where it then listens), the same on all ranks.

    hosts: how many the ranks are on, as host_id tells. Raises ShardCoreError where they are not spread over
    them evenly.
    """

    def __init__(
        self,
        rank: int,
        ranks: int,
        init_method: str,
        device: str = "cpu",
        config: CollectiveConfig | None = None,
    ):
        self.rank, self.ranks, self.config = rank, ranks, config or CollectiveConfig()
        self._on = device_of(device)
        self.device = torch.device(self._on.place)
        connect(rank, ranks, init_method, device, self.config.timeout_s)
        host_of = _gather(host_id())
        ranks_on = Counter(host_of)
        self.hosts = len(ranks_on)
        if len(set(ranks_on.values())) > 1:
            raise ShardCoreError(
                f"the gang's hosts have {sorted(ranks_on.values())} of its {ranks} ranks; each needs as many"
            )
        machines = _gather(hosts.machine_id())  # its cores are shared by all hosts of a box
        self._oversubscribed = machines.count(machines[rank]) > len(os.sched_getaffinity(0))
        nth = machines[:rank].count(machines[rank])
        self._cores = own_core.take(nth) if self.device.type == "cpu" else ()
        self._offset_s = self._clock_offset_s()
        self._groups: dict[str, dist.ProcessGroup] = {}
        self._scratch = torch.zeros(_SCRATCH_BYTES // 4, device=self.device)

    def measure(self, requests: Sequence[CollectiveRequest]) -> list[RankTimes]:
        """Times of each request; all ranks must be given the same ones. Raises local_ranks.Lost where another
        rank breaks one."""
        if self.hosts > 1:  # their clocks drift apart
            self._offset_s = self._clock_offset_s()
        return [self._measure(r) for r in requests]

    def meet(self) -> None:
        """Wait for all ranks.

        Those of several hosts go on at one time. What the first ones to leave a barrier send would hold up
        its messages to others, on slow links by up to 70 ms.
        """
        self._on.meet()
        if self.hosts > 1:
            due_s = torch.tensor([time.perf_counter() + self._offset_s + _NOTICE_S], dtype=torch.float64)
            dist.broadcast(due_s, 0)
            wait_until(due_s.item() - self._offset_s)

    def close(self) -> None:
        dist.destroy_process_group()
        own_core.give_back(self._cores)

    def _measure(self, request: CollectiveRequest) -> RankTimes:
        _require_fits(request, self.ranks, self.hosts)
        both = transfers(request, self.rank, self.device, self._group(request))
        first = next(transfer for transfer in both if transfer)
        times: tuple[list, list] = [], []
        work_s: list[float] = []
        for _ in range(self.config.warmups + self.config.repeats):
            for transfer, way in zip(both, times, strict=True):
                if transfer:
                    start_ms = request.start_ms[self.rank] if transfer is first else 0.0
                    *ends, worked_s = self._timed(transfer, start_ms, request.busy_ms)
                    way.append(ends)
                    work_s.append(worked_s)
        ways = (tuple(zip(*way[self.config.warmups :], strict=True)) if way else None for way in times)
        own = tuple(work_s[self.config.warmups :]) if request.row.ids else ()
        return RankTimes(*ways, self._oversubscribed, own)

    def _group(self, request: CollectiveRequest) -> dist.ProcessGroup | None:
        """torch's name for the ranks with which this one exchanges. None: all."""
        if request.group != WORLD and request.group not in self._groups:
            for ranks in request.groups:  # all ranks have to make each
                made = dist.new_group(list(ranks))
                if self.rank in ranks:
                    self._groups[request.group] = made
            own_core.let_network_wait()
        return self._groups.get(request.group)

    def _compute(self, busy_ms: float) -> None:
        due = time.perf_counter() + busy_ms / 1e3
        while time.perf_counter() < due:
            self._scratch.add_(1)
            self._on.synchronize()

    def _timed(
        self, transfer: Transfer | IdTransfer, start_ms: float, busy_ms: float
    ) -> tuple[float, float, float]:
        """Start and end in s of rank 0's clock, and s of own work between."""
        self._compute(busy_ms)
        with local_ranks.exchanging():
            self.meet()
            due = time.perf_counter() + start_ms / 1e3
            if self._oversubscribed:  # what spins would take the core of ranks that exchange
                time.sleep(start_ms / 1e3)
            # a rank that still computes occupies its device: spin, do not sleep
            while time.perf_counter() < due:
                pass
            start = time.perf_counter() + self._offset_s
            marks = [self._on.mark()]
            for part, _ in transfer.parts:
                part()
                marks.append(self._on.mark())
            took_ms = self._on.elapsed_ms(marks)
            work_ms = sum(ms for ms, (_, own) in zip(took_ms, transfer.parts, strict=True) if own)
            return start, start + sum(took_ms) / 1e3, work_ms / 1e3

    def _clock_offset_s(self) -> float:
        """To be added to this host's clock to have rank 0's: the best estimate of its ranks, and 0 on rank
        0's own host."""
        with local_ranks.exchanging():
            round_trip_s, offset_s = estimate_clock_offset()
            found = _gather((host_id(), round_trip_s, offset_s))
        return min((round_trip, offset) for host, round_trip, offset in found if host == host_id())[1]


def wait_until(due_s: float) -> None:
    """Sleep until a time of this host's monotonic clock. A sleep ends late, so wake before, and spin."""
    if (sleep_s := due_s - time.perf_counter() - _WAKING_S) > 0:
        time.sleep(sleep_s)
    while time.perf_counter() < due_s:
        pass


def estimate_clock_offset(clock: Callable[[], float] = time.perf_counter) -> tuple[float, float]:
    """(round trip, offset) in s of this rank's clock to rank 0's; all ranks of the process group need to call
    it.

    Of some ping-pongs the fastest counts, and rank 0 is taken to have read its clock in the middle (Cristian
    1989), so the offset is wrong by half the round trip at most. Rank 0 has (0, 0).
    """
    at = torch.zeros(1, dtype=torch.float64)
    rank, best = dist.get_rank(), (0.0, 0.0)
    for other in range(1, dist.get_world_size()):
        tries = []
        for _ in range(_PINGS if rank in (0, other) else 0):
            if rank == 0:
                dist.recv(at, other)
                dist.send(at.fill_(clock()), other)
            else:
                sent = clock()
                dist.send(at, 0)
                dist.recv(at, 0)
                theirs, received = at.item(), clock()
                tries.append((received - sent, theirs - (sent + received) / 2))
        best = min(tries, default=best)
    return best


def _gather(value: Any) -> list[Any]:
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found
