"""Collectives among real processes, as a step of training makes them: gloo between CPUs, NCCL between GPUs.

Each process runs one `Rank`; all get the same requests (measurements.CollectiveRequest defines the
collectives). An exchange has two parts. A rank *waits* until the last rank has started, and *transfers* from
then to its own end.

In a step, an exchange follows computation. It is then slower than on an idle machine: the threads that carry
it slept, and the caches hold other data. So requests may keep ranks busy before each exchange (`busy_ms`).

Starts of different ranks are compared on rank 0's clock. The ranks of one host share its monotonic clock. The
clock of another host is corrected by its offset, from ping-pongs over the process group. NCCL is written for
the same interface and has not been run here. Several hosts were emulated only (docs/measure.md).

Shapes: D ranks, B batch rows, R repeats.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any
from urllib.parse import urlparse

import numpy as np
import torch
import torch.distributed as dist

from shardcore.core.types import Setting
from shardcore.core.validation import require
from shardcore.io import dataset
from shardcore.io.measurements import CollectiveRequest, CollectiveSample
from shardcore.measure import hosts, local_ranks, own_core
from shardcore.measure.config import CollectiveConfig
from shardcore.measure.devices import device_by_name
from shardcore.measure.exchanges import make_exchange, make_own_group
from shardcore.measure.id_transfer import Parts, make_id_transfer
from shardcore.measure.timing import timing_spread
from shardcore.measure.transport import LOCAL, Transport
from shardcore.step.scopes import WORLD

_SCRATCH_BYTES = 16 << 20
"""Memory that a busy rank overwrites: more than a core's caches hold."""
_PINGS = 20
"""Ping-pongs with each rank. The fastest gives the offset between its clock and rank 0's."""
_NOTICE_S = 0.03
"""Time between the announcement of a common start and the start. The message has to reach all ranks."""
_WAKING_S = 3e-4
"""Longest delay with which a sleep ends."""


@dataclass(frozen=True)
class RankTimes:
    """One rank's repeated timings of one measured exchange.

    forward, backward: starts [R] and ends [R] in s of rank 0's monotonic clock. None: the collective does not
        run that way.
    oversubscribed: True if the rank's machine has more ranks than cores.
    work_s: [R] s of the rank's own work in a transfer of ids. Empty for other collectives.
    """

    forward: tuple[tuple[float, ...], tuple[float, ...]] | None
    backward: tuple[tuple[float, ...], tuple[float, ...]] | None
    oversubscribed: bool = False
    work_s: tuple[float, ...] = ()


# --- a gang -------------------------------------------------------------------------------------------------


def measure_collectives(
    requests: Sequence[CollectiveRequest],
    ranks: int,
    setting: Setting,
    config: CollectiveConfig | None = None,
    transport: Transport = LOCAL,
    hosts: int = 1,
) -> Iterator[CollectiveSample]:
    """Measure exchanges among ranks, in order, in one process for each rank.

    Yields a sample as soon as all ranks have it.
    hosts: number of hosts of the ranks. Places of the transport have hosts of their own.

    Raises ShardCoreError before anything starts if a request does not fit this gang. Raises it later if
    devices lack, or a rank dies or hangs, with rank and reason. No process stays behind; earlier samples are
    valid.
    """
    config, on = config or CollectiveConfig(), transport.places
    links = on[0].links if on else None
    # Before any process starts, as a gang of ranks takes seconds to connect.
    for request in requests:
        _require_fits_gang(request, ranks, len({place.host for place in on}) or hosts)
        require(request.emulated == links, f"exchange has links {request.emulated}; those here are {links}")
    require(len(on) in (0, ranks), f"{len(on)} places of ranks are given; the gang has {ranks} ranks")

    # A generator of its own, so that the checks above run at the call and not at the first sample.
    def measured_samples() -> Iterator[CollectiveSample]:
        # A queue for each rank: ranks send their times at different moments.
        waiting: list[deque[RankTimes]] = [deque() for _ in range(ranks)]
        order, task = 0, (ranks, list(requests), config, transport.device)
        gang = transport.run("exchange", _run_rank, ranks, task, config.timeout_s, hosts)
        with closing(gang) as messages:
            for rank, times in messages:
                waiting[rank].append(times)
                # A sample needs the times of all ranks.
                if all(waiting):
                    yield combine_rank_times(
                        setting, requests[order], [queue.popleft() for queue in waiting], order
                    )
                    order += 1

    return measured_samples() if requests else iter(())


def _run_rank(
    rank: int,
    init_method: str,
    send: Callable[[RankTimes], None],
    ranks: int,
    requests: Sequence[CollectiveRequest],
    config: CollectiveConfig,
    device: str,
) -> None:
    """Entry point of one rank's process: measure the requests and send the times of each."""
    with local_ranks.report_lost_ranks():
        member = Rank(rank, ranks, init_method, device, config)
    # One request at a time, so that its sample is out before the next begins.
    for request in requests:
        [times] = member.measure([request])
        send(times)
    member.close()


def combine_rank_times(
    setting: Setting, request: CollectiveRequest, ranks: Sequence[RankTimes], order: int = 0
) -> CollectiveSample:
    """Sample of an exchange from the times of all its ranks."""
    transfer, waiting_ms = {}, []
    for direction in request.definition.directions:
        # [D, R] ms on rank 0's clock.
        start, end = (np.array([getattr(r, direction)[k] for r in ranks]) * 1e3 for k in (0, 1))
        waits, transfers = split_wait_and_transfer(start, end)
        transfer[direction] = tuple(map(timing_spread, transfers))
        # A median over repeats for each rank.
        waiting_ms.append(np.median(waits, axis=1))
    return CollectiveSample(
        dataset.collective_id(setting, request),
        setting,
        request,
        transfer.get("forward"),
        transfer.get("backward"),
        tuple(map(float, waiting_ms[0])),
        time.time(),
        order=order,
        oversubscribed=any(r.oversubscribed for r in ranks),
        work_ms=tuple(float(np.median(r.work_s)) * 1e3 for r in ranks if r.work_s) or None,
    )


def split_wait_and_transfer(start: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Split the duration of an exchange into waiting and transfer ms [D, R]: before and after the last rank's start.

    A rank that is done by then only waited.
    """
    # A rank that ended before the last one started moved its last byte by then: no transfer is left.
    last = np.minimum(start.max(0), end)
    return last - start, end - last


def _require_fits_gang(request: CollectiveRequest, ranks: int, hosts: int) -> None:
    """Raise ShardCoreError unless a request has as many ranks and hosts as the gang of measuring processes."""
    require(
        len(request.widths) == ranks and request.hosts == hosts,
        f"exchange of {len(request.widths)} widths with hosts {request.hosts} does not fit a gang of {ranks} ranks "
        f"with hosts {hosts}: it needs one width a rank, and as many hosts as there are",
    )


# --- one rank -----------------------------------------------------------------------------------------------


def host_id() -> str:
    """Name of this process's host, unique among hosts. Processes of one host share a monotonic clock.

    The hosts of a box have different names, though they share a clock, too.
    """
    emulated = hosts.emulated_host_number()
    return hosts.machine_id() + ("" if emulated is None else f" host {emulated} of a box")


def init_process_group(rank: int, ranks: int, init_method: str, device: str, timeout_s: float) -> None:
    """Initialize torch's process group of a gang of ranks, on the backend of its device, which a rank has alone."""
    on, url = device_by_name(device), urlparse(init_method)
    if device == "cpu":
        # One thread a rank, as a device of a CPU is one core.
        torch.set_num_threads(1)
    timeout = timedelta(seconds=timeout_s + on.gang_start_s)
    start = partial(dist.init_process_group, on.backend, rank=rank, world_size=ranks, timeout=timeout)
    # Other methods, such as torchrun's env://, come with a store.
    if url.scheme != "tcp" or url.hostname is None or url.port is None:
        start(init_method=init_method)
        return
    if ipaddress.ip_address(url.hostname).is_loopback:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # gloo's own connections, too, stay off the network
    # Rank 0 listens at this address only. A store that torch makes would listen at all addresses.
    listener = socket.create_server((url.hostname, url.port)).detach() if rank == 0 else None
    store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage] (torch lists it nowhere)
        url.hostname, url.port, ranks, rank == 0, timeout, wait_for_workers=False, master_listen_fd=listener
    )
    start(store=store)


class Rank:
    """One process of a gang of ranks that measures exchanges.

    init_method: such as "tcp://127.0.0.1:PORT", the same on all ranks. The address is a numeric one of rank
        0's host, which listens there only.
    hosts: number of different hosts of the ranks (host_id).

    Raises ShardCoreError if hosts have different numbers of ranks.
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
        self._on = device_by_name(device)
        self.device = torch.device(self._on.place)
        init_process_group(rank, ranks, init_method, device, self.config.timeout_s)
        ranks_on = Counter(all_gather_objects(host_id()))
        self.hosts = len(ranks_on)
        require(
            len(set(ranks_on.values())) <= 1,
            f"the gang's hosts have {sorted(ranks_on.values())} of its {ranks} ranks; each needs as many",
        )
        machines = all_gather_objects(hosts.machine_id())  # all hosts of a box share the cores of one machine
        self._oversubscribed = machines.count(machines[rank]) > len(os.sched_getaffinity(0))
        # Ranks of one machine take its cores in turn, over all of its emulated hosts.
        nth = machines[:rank].count(machines[rank])
        self._cores = own_core.take_core(nth) if self.device.type == "cpu" else ()
        self._offset_s = self._clock_offset_s()
        self._groups: dict[str, dist.ProcessGroup] = {}
        # Written here, so that page faults are over before the first timing.
        self._scratch = torch.zeros(_SCRATCH_BYTES // 4, device=self.device)

    def measure(self, requests: Sequence[CollectiveRequest]) -> list[RankTimes]:
        """Measure exchanges as one rank of a gang. All ranks have to call this with the same requests.

        Raises local_ranks.RankLost if another rank fails during one.
        """
        if self.hosts > 1:  # clocks of different hosts drift apart
            self._offset_s = self._clock_offset_s()
        return [self._measure_request(r) for r in requests]

    def wait_for_all_ranks(self) -> None:
        """Wait for all ranks of the gang. Over several hosts, all continue at a time that rank 0 sets.

        Leaving the barrier at once would not do: the first ranks to leave send data, which holds up the
        barrier's messages to the others, on slow links by up to 70 ms.
        """
        self._on.barrier()
        if self.hosts > 1:
            # The time is on rank 0's clock. Other ranks convert it to theirs.
            due_s = torch.tensor([time.perf_counter() + self._offset_s + _NOTICE_S], dtype=torch.float64)
            dist.broadcast(due_s, 0)
            sleep_until(due_s.item() - self._offset_s)

    def close(self) -> None:
        """Destroy the process group, and restore the process's CPU cores."""
        dist.destroy_process_group()
        own_core.restore_cores(self._cores)

    def _measure_request(self, request: CollectiveRequest) -> RankTimes:
        """Run the repeats of one exchange on this rank."""
        _require_fits_gang(request, self.ranks, self.hosts)
        parts_of, directions = self._calls_by_direction(request), request.definition.directions
        runs: dict[str, list[tuple[float, float, float]]] = {direction: [] for direction in directions}
        for _ in range(self.config.warmups + self.config.repeats):
            for direction in directions:
                # Only the first exchange is entered at given starts. The next follows it, as in a step.
                start_ms = request.start_ms[self.rank] if direction == directions[0] else 0.0
                runs[direction].append(self._run_timed(parts_of[direction], start_ms, request.busy_ms))
        # Starts, ends and own work of each direction. Warm-ups connect the ranks and allocate buffers.
        timed = {
            direction: tuple(zip(*of_direction[self.config.warmups :], strict=True))
            for direction, of_direction in runs.items()
        }
        spans = {direction: (starts, ends) for direction, (starts, ends, _) in timed.items()}
        # Only transfers of ids have own work.
        own_s = timed[directions[0]][2] if request.definition.ids else ()
        return RankTimes(spans.get("forward"), spans.get("backward"), self._oversubscribed, own_s)

    def _calls_by_direction(self, request: CollectiveRequest) -> dict[str, Parts]:
        """Calls that run a request's exchange, by direction (forward, backward)."""
        if request.definition.ids:
            return {"forward": make_id_transfer(request, self.rank, self.device).timed_calls}

        def zeros(shape: Sequence[int]) -> torch.Tensor:
            # Zeros stay finite however often they are summed. Memory that was only reserved reads faster, so
            # they are written.
            return torch.empty(tuple(shape), device=self.device).fill_(0.0)

        exchange = make_exchange(request, self.rank, self._process_group(request), zeros)
        there: Parts = ((lambda: exchange.forward(None), False),)
        back: Parts = ((lambda: exchange.backward(None, None), False),)
        return {"forward": there, "backward": back}

    def _process_group(self, request: CollectiveRequest) -> dist.ProcessGroup | None:
        """Process group of a request's ranks; None for all ranks."""
        # Each group is made once, as making one is a collective of all ranks.
        if request.group != WORLD and request.group not in self._groups:
            _, self._groups[request.group] = make_own_group(self.rank, request.rank_groups)
        return self._groups.get(request.group)

    def _keep_busy(self, busy_ms: float) -> None:
        """Compute for some ms, overwriting the caches, as a step does before an exchange."""
        due = time.perf_counter() + busy_ms / 1e3
        while time.perf_counter() < due:
            # Work that also replaces what the caches hold.
            self._scratch.add_(1)
            self._on.synchronize()

    def _run_timed(self, parts: Parts, start_ms: float, busy_ms: float) -> tuple[float, float, float]:
        """Run an exchange after a start delay. Returns start and end in s of rank 0's clock, and s of the rank's own
        work."""
        self._keep_busy(busy_ms)
        with local_ranks.report_lost_ranks():
            self.wait_for_all_ranks()
            due = time.perf_counter() + start_ms / 1e3
            if self._oversubscribed:  # spinning would take the core from ranks that already exchange
                time.sleep(start_ms / 1e3)
            # Elsewhere a rank spins: it stands for one that still computes, whose device is busy.
            while time.perf_counter() < due:
                pass
            start = time.perf_counter() + self._offset_s
            took_ms = self._on.time_calls_ms(*(part for part, _ in parts))
            work_ms = sum(ms for ms, (_, own) in zip(took_ms, parts, strict=True) if own)
            return start, start + sum(took_ms) / 1e3, work_ms / 1e3

    def _clock_offset_s(self) -> float:
        """Seconds to add to this host's clock to get rank 0's; 0 on rank 0's own host."""
        # Ranks of one host share a clock, so the best of their estimates serves all.
        with local_ranks.report_lost_ranks():
            round_trip_s, offset_s = estimate_clock_offset()
            estimates = all_gather_objects((host_id(), round_trip_s, offset_s))
        return min((round_trip, offset) for host, round_trip, offset in estimates if host == host_id())[1]


def sleep_until(due_s: float) -> None:
    """Sleep until a time of this host's monotonic clock."""
    # A sleep ends late, so wake before, and spin.
    if (sleep_s := due_s - time.perf_counter() - _WAKING_S) > 0:
        time.sleep(sleep_s)
    while time.perf_counter() < due_s:
        pass


def estimate_clock_offset(clock: Callable[[], float] = time.perf_counter) -> tuple[float, float]:
    """Round trip to rank 0, and the offset to add to this rank's clock to get rank 0's, in s.

    All ranks have to call it together. The fastest of several ping-pongs counts. Rank 0 is taken to have read
    its clock in the middle of it (Cristian 1989), so the offset is wrong by at most half the round trip. Rank
    0 has (0, 0).
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
                # Rank 0's clock, minus the middle of the round trip on this one.
                tries.append((received - sent, theirs - (sent + received) / 2))
        # The shortest round trip had the least time to wait anywhere.
        best = min(tries, default=best)
    return best


def all_gather_objects(value: Any) -> list[Any]:
    """Values of all ranks of the process group, in order of ranks."""
    # As pickled objects, since names of hosts have different lengths.
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
