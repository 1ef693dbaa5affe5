"""Ray actors: started, or a reason why not; and gangs, whose ranks are placed together and end together."""

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
"""ray.remote, whose types know no groups of concurrent calls."""
_PLACE_S = 60.0
"""Seconds that a gang may wait for room."""
_LOOK_EVERY_S = 5.0
_GRACE_S = 3.0
"""How long a rank that lost another waits to be told why: Ray's word of a death comes a moment later."""
_PROBE_S = 5.0
"""How long a rank may take to say that it is alive."""


class Meeting:
    """A rank of a gang, where the others may meet it."""

    def address(self) -> str:
        """Address where the ranks meet, if this is the first."""
        # for as long as this rank lives, or another process may get it first
        self._held = services.reserve_port("")
        return f"tcp://{ray.util.get_node_ip_address()}:{self._held.getsockname()[1]}"


class Member(Meeting):
    """A rank that tells for how long it is silent. As an actor it needs a concurrency group "watch"."""

    def __init__(self) -> None:
        self.heard()

    def heard(self) -> None:
        """For its work to call as it goes on."""
        self._heard = time.monotonic()

    @ray.method(concurrency_group="watch")  # so that it answers while the rank works
    def silent_s(self) -> float:
        """For how long its work has not called `heard`."""
        return time.monotonic() - self._heard


def when_started(calls: Sequence[Any]) -> list[Any]:
    """Results of the first calls to new actors; raises ShardCoreError where one cannot start (FBGEMM missing,
    no such device free)."""
    try:
        return ray.get(list(calls), timeout=START_S)
    except GetTimeoutError:
        raise ShardCoreError(
            f"{len(calls)} measuring actors found no free device in {START_S:g} s; {room()}"
        ) from None
    except RayError as error:
        raise ShardCoreError(f"a measuring actor cannot start: {reason(error)}") from None


def room() -> str:
    return f"the cluster has {ray.cluster_resources()}; ask for fewer (measure.actors, measure.ranks)"


def reason(error: Exception) -> str:
    """Why an actor failed, in one line, without Ray's frames."""
    text = " ".join(str(getattr(error, "cause", None) or error).split())
    if "ShardCoreError: " in text:  # raised where the actor started
        return text.split("ShardCoreError: ")[-1][:300]
    if isinstance(error, RayActorError):
        for mark in ("The actor died because ", "Worker exit detail: "):
            text = text.split(mark)[-1]
        return f"its process died: {text.split(' Some common causes')[0][:280]}"
    return text[:300]


def rank_cpus(ranks: int, hosts: int = 1) -> float:
    """CPUs for each of so many ranks: one, or less where the largest hosts have fewer cores than ranks."""
    most = max(node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"])
    return min(1.0, most / math.ceil(ranks / hosts))


@contextmanager
def gang(actor: Any, name: str, ranks: int, device: str, hosts: int | None = 1) -> Iterator[list[Any]]:
    """`ranks` actors of a class, in their order; all end with the context.

    hosts: that many hosts have equally many of them each. None: on as few as have room.

    One placement group with a bundle a host: what is in one bundle is on one host, and different bundles are
    on different ones. Raises ShardCoreError where they do not fit.
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
            for member in members:  # at once, and their names are free for the next gang
                ray.kill(member)
    finally:
        remove_placement_group(group)


def answers(
    name: str, calls: Sequence[Any], timeout_s: float, silent_s: Callable[[int], float] | None = None
) -> list[Any]:
    """Results of one call to every rank of a gang, in the order of the ranks.

    Raises ShardCoreError naming the rank and the reason where one fails or dies, or was silent for timeout_s
    (by what silent_s says of it; without that, since now). Of several complaints, the rank that failed is
    named, not those that lost it.
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
    """Says for how many s a rank of these Members has not been heard of; for `answers`."""
    heard = [time.monotonic()] * len(members)

    def silent_for(rank: int) -> float:
        with suppress(RayError):  # it died, which its call tells, or is stuck
            [silent_s] = ray.get([members[rank].silent_s.remote()], timeout=_PROBE_S)
            heard[rank] = time.monotonic() - silent_s
        return time.monotonic() - heard[rank]

    return silent_for


def _listed(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))
