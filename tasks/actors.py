"""Ray actors: their start and errors, and gangs, whose ranks are placed together and end together."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from shardcore.core.errors import ShardCoreError
from shardcore.measure.local_ranks import Lost
from shardcore.measure.supervise import START_S
from tasks import services

remote: Any = ray.remote
"""ray.remote. Its own types lack concurrency groups."""
_PLACE_S = 60.0
"""Longest wait of a gang for room."""
_LOOK_EVERY_S = 5.0
_GRACE_S = 3.0
"""Wait for the report of the rank that failed, after another has lost it. Ray reports a death a moment later."""
_PROBE_S = 5.0
"""Longest time in which a rank answers whether it is alive."""


class Meeting:
    """A rank of a gang. The first rank gives the address at which all meet."""

    def address(self) -> str:
        """Address of a port that is reserved here."""
        # The socket is held as long as this rank lives. Else another process might get the port.
        self._held = services.reserve_port("")
        return f"tcp://{ray.util.get_node_ip_address()}:{self._held.getsockname()[1]}"


class Member(Meeting):
    """A rank that knows how long it has been silent. As an actor it needs a concurrency group "watch"."""

    def __init__(self) -> None:
        self.heard()

    def heard(self) -> None:
        """Note a sign of life. The rank's work calls this as it goes on."""
        self._heard = time.monotonic()

    @ray.method(concurrency_group="watch")  # so that it answers while the rank works
    def silent_s(self) -> float:
        """Seconds since the last call of `heard`."""
        return time.monotonic() - self._heard


def when_started(calls: Sequence[Any]) -> list[Any]:
    """Results of the first calls to new actors.

    Raises ShardCoreError if one cannot start, such as without FBGEMM or a free device.
    """
    try:
        return ray.get(list(calls), timeout=START_S)
    except GetTimeoutError:
        raise ShardCoreError(
            f"{len(calls)} measuring actors found no free device in {START_S:g} s; {room()}"
        ) from None
    except RayError as error:
        raise ShardCoreError(f"a measuring actor cannot start: {reason(error)}") from None


def room() -> str:
    """The cluster's resources, for the end of an error."""
    return f"the cluster has {ray.cluster_resources()}; ask for fewer (measure.actors, measure.ranks)"


def reason(error: Exception) -> str:
    """The reason why an actor failed, in one line, without Ray's frames."""
    text = " ".join(str(getattr(error, "cause", None) or error).split())
    if "ShardCoreError: " in text:  # raised where the actor started
        return text.split("ShardCoreError: ")[-1][:300]
    if isinstance(error, RayActorError):
        for mark in ("The actor died because ", "Worker exit detail: "):
            text = text.split(mark)[-1]
        return f"its process died: {text.split(' Some common causes')[0][:280]}"
    return text[:300]


def rank_cpus(ranks: int, hosts: int = 1) -> float:
    """CPUs of each rank: one, or less if the largest host has fewer cores than a host gets ranks."""
    most = max(node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"])
    return min(1.0, most / math.ceil(ranks / hosts))


@contextmanager
def gang(actor: Any, name: str, ranks: int, device: str, hosts: int | None = 1) -> Iterator[list[Any]]:
    """`ranks` actors of a class, in order of ranks. All end with the context.

    hosts: number of hosts, each with equally many ranks. None: as few hosts as have room.

    They are in one placement group with a bundle a host: a bundle is on one host, and different bundles are on
    different ones. Raises ShardCoreError if they find no room.
    """
    bundles, nodes = hosts or ranks, [node for node in ray.nodes() if node["Alive"]]
    each, cpus = ranks // bundles, rank_cpus(ranks, hosts or len(nodes))
    bundle = {"CPU": each * cpus, "GPU": each} if device == "cuda" else {"CPU": each * cpus}
    group = placement_group([bundle] * bundles, strategy="STRICT_SPREAD" if hosts else "PACK")
    try:
        if not group.wait(_PLACE_S):
            raise ShardCoreError(
                f"{ranks} ranks{f', {each} a host,' if hosts else ''} found no room within "
                f"{_PLACE_S:g} s on the Ray cluster of "
                f"{len(nodes)} nodes with {ray.cluster_resources()}; ask for fewer"
            )
        members = [
            actor.options(
                name=f"{name} rank {rank}",
                num_cpus=cpus,
                num_gpus=int(device == "cuda"),
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, rank // each),
            ).remote()
            for rank in range(ranks)
        ]
        try:
            yield members
        finally:
            for member in members:  # killed at once, so that the next gang can have their names
                ray.kill(member)
    finally:
        remove_placement_group(group)


def answers(
    name: str, calls: Sequence[Any], timeout_s: float, silent_s: Callable[[int], float] | None = None
) -> list[Any]:
    """Results of one call to every rank of a gang, in order of ranks.

    silent_s: function from a rank to the seconds for which it has been silent. None: seconds since now.

    Raises ShardCoreError if a rank fails, dies, or is silent for timeout_s, with rank and reason. It names the rank
    that failed, not those that waited for it in vain.
    """
    waiting, lost = {call: rank for rank, call in enumerate(calls)}, {}
    began, until = time.monotonic(), math.inf
    while waiting and time.monotonic() < until:
        look_s = max(0.0, min(_LOOK_EVERY_S, timeout_s, until - time.monotonic()))
        for call in ray.wait(list(waiting), num_returns=1, timeout=look_s)[0]:
            rank = waiting.pop(call)
            try:
                ray.get(call)
            except RayError as error:
                if not isinstance(getattr(error, "cause", None), Lost):
                    raise ShardCoreError(
                        f"{name}: rank {rank} of {len(calls)} failed: {reason(error)}"
                    ) from None
                lost[rank] = reason(error)
                until = min(until, time.monotonic() + _GRACE_S)
        silent = [
            r for r in waiting.values() if (silent_s(r) if silent_s else time.monotonic() - began) > timeout_s
        ]
        if silent and not lost:
            raise ShardCoreError(
                f"{name}: no word for {timeout_s:g} s from rank {_listed(silent)} of {len(calls)}: it hangs"
            )
    if lost:
        rank, message = next(iter(lost.items()))
        silent = _listed(waiting.values()) or rank
        raise ShardCoreError(f"{name}: rank {silent} does not answer the others; rank {rank}: {message}")
    return ray.get(list(calls))


def silence(members: Sequence[Any]) -> Callable[[int], float]:
    """A function from a rank of these Members to the seconds for which it has been silent, for `answers`."""
    heard = [time.monotonic()] * len(members)

    def silent_for(rank: int) -> float:
        with suppress(RayError):  # it is stuck, or has died, which its call reports
            [silent_s] = ray.get([members[rank].silent_s.remote()], timeout=_PROBE_S)
            heard[rank] = time.monotonic() - silent_s
        return time.monotonic() - heard[rank]

    return silent_for


def _listed(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))
