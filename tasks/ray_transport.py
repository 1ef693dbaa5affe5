"""Measuring on Ray: a worker a device for shardcore.measure.supervise, and ranks of gangs.

Each actor is a process that imports this module. So nothing here imports Prefect, which takes a second.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from shardcore.core.errors import ShardCoreError
from shardcore.measure import hardware, hosts, local_ranks
from shardcore.measure.device_bench import BenchSpec, Counts, DeviceBench
from shardcore.measure.supervise import START_S, WorkerEnded, WorkerRefused
from shardcore.measure.transport import Host, NoRoom, Transport
from tasks import services

remote: Any = ray.remote
"""ray.remote. Its own types lack concurrency groups."""
_PLACE_S = 60.0
"""Longest wait of a gang for room."""
_LOOK_EVERY_S = 2.0
"""Time between two looks at the messages of a gang's ranks, of which none has ended."""
_PROBE_S = 5.0
"""Longest wait for a word of an actor at work."""


# Ray must not restart a worker: the next call would fail, which did nothing wrong.
@remote(max_restarts=0, concurrency_groups={"watch": 1})
class DeviceWorker(DeviceBench):
    @ray.method(concurrency_group="watch")  # so that it answers while the device works
    def current_counts(self) -> Counts:
        return self.counts()


@remote(max_restarts=0, concurrency_groups={"watch": 1})
class RankProcess:
    """A rank of gangs, one after another."""

    def reserve_address(self) -> str:
        """Reserve a port of this node and return its address, at which all ranks meet."""
        self._said = []
        # The socket is held until the next gang. Else another process might get the port.
        self._held = services.reserve_port("")
        return f"tcp://{ray.util.get_node_ip_address()}:{self._held.getsockname()[1]}"

    def run(self, work: Callable[..., None], rank: int, init_method: str, arguments: Sequence[Any]) -> None:
        os.environ[hosts.NODE_VARIABLE] = ray.util.get_node_ip_address()  # by which Ray pins to a node
        work(rank, init_method, self._said.append, *arguments)

    @ray.method(concurrency_group="watch")  # so that it answers while the rank works
    def messages_from(self, first: int) -> list[Any]:
        """Messages that this rank has sent, from message number `first` on."""
        return self._said[first:]


class RayTransport(Transport):
    """Actors of the connected cluster, on its GPUs if it has some, else on CPU cores.

    A context manager. The ranks of a gang serve the next gang of as many ranks, as they take seconds to start.
    """

    def __init__(self) -> None:
        super().__init__("cuda" if ray.cluster_resources().get("GPU", 0) >= 1 else "cpu")
        self._shape: tuple[int, int | None] | None = None
        self._members: list[Any] = []
        self._group: Any = None

    def __enter__(self) -> RayTransport:
        return self

    def __exit__(self, *_: object) -> None:
        for member in self._members:  # killed at once, so that the next gang can have their names
            ray.kill(member)
        if self._group:
            remove_placement_group(self._group)
        self._shape, self._members, self._group = None, [], None

    def hardware(self) -> str:
        """Product name of the cluster's devices, which may differ from this machine's."""
        if not os.environ.get("RAY_ADDRESS"):
            return hardware.hardware_name(self.device)
        name = ray.remote(hardware.hardware_name).options(
            num_cpus=1, num_gpus=int(self.device == "cuda"), name="measure[hardware]"
        )
        return first_results([name.remote(self.device)])[0]

    def hosts(self) -> list[Host]:
        kind = "GPU" if self.device == "cuda" else "CPU"
        found = [
            Host(int(node["Resources"].get(kind, 0)), node["Resources"].get("memory", math.inf))
            for node in live_nodes()
        ]
        return sorted(found, key=lambda host: -host.devices)

    def fleet(self, spec: BenchSpec, hang_s: float) -> RayFleet:
        return RayFleet(spec)

    def shares_cores(self, ranks: int) -> bool:
        return self.device == "cpu" and cpus_per_rank(ranks) < 1

    def run(
        self,
        name: str,
        work: Callable[..., None],
        ranks: int,
        arguments: Sequence[Any],
        timeout_s: float,
        hosts: int | None = 1,
    ) -> Generator[tuple[int, Any]]:
        """Run work on each rank (see Transport)."""
        self.prepare(ranks, hosts)
        members, given, heard = self._members, ray.put(arguments), [0] * ranks
        try:
            # All start before the clock of the first message does.
            address, *_ = first_results([member.reserve_address.remote() for member in members])
            calls = [
                member.run.options(name=name).remote(work, rank, address, given)
                for rank, member in enumerate(members)
            ]

            def receive_messages(running: Sequence[int], limit_s: float) -> Iterator[local_ranks.Message]:
                look_s = min(limit_s, _LOOK_EVERY_S)
                ray.wait([calls[rank] for rank in running], num_returns=1, timeout=look_s)
                for rank in running:
                    # Looked at before the messages, so that those of a call that has ended are all there.
                    has_ended = bool(ray.wait([calls[rank]], timeout=0)[0])
                    try:
                        said = ray.get(members[rank].messages_from.remote(heard[rank]), timeout=_PROBE_S)
                    except GetTimeoutError:  # it is stuck, or busy: the next look finds what it said
                        continue
                    except RayError:  # it has died, which its call reports
                        said = []
                    heard[rank] += len(said)
                    yield from ((rank, "message", value) for value in said)
                    if has_ended:
                        yield rank, *_call_outcome(calls[rank])

            yield from local_ranks.follow_ranks(name, ranks, receive_messages, timeout_s)
        except BaseException:
            self.__exit__()  # a rank may be gone, or still at work
            raise

    def prepare(self, ranks: int, hosts: int | None = 1) -> None:
        """Start the rank processes of a gang in the background, unless they run already.

        They are in one placement group with a bundle a host: a bundle is on one host, and different bundles are on
        different ones.
        """
        if self._shape == (ranks, hosts):
            return
        self.__exit__()
        bundles, nodes = hosts or ranks, live_nodes()
        each, cpus = ranks // bundles, cpus_per_rank(ranks, hosts or len(nodes))
        gpus = int(self.device == "cuda")
        bundle = {"CPU": each * cpus} | ({"GPU": each} if gpus else {})
        self._group = placement_group([bundle] * bundles, strategy="STRICT_SPREAD" if hosts else "PACK")
        if not self._group.wait(_PLACE_S):
            self.__exit__()
            raise NoRoom(
                f"{ranks} ranks{f', {each} a host,' if hosts else ''} found no room within "
                f"{_PLACE_S:g} s on the Ray cluster of "
                f"{len(nodes)} nodes with {ray.cluster_resources()}; ask for fewer"
            )
        self._shape = (ranks, hosts)
        self._members = [
            RankProcess.options(
                name=f"measure rank {rank} of {ranks}",
                num_cpus=cpus,
                num_gpus=gpus,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, rank // each),
            ).remote()
            for rank in range(ranks)
        ]


def _call_outcome(call: Any) -> tuple[str, str | None]:
    """Kind and error of how a rank's Ray call ended, as in local_ranks.Message."""
    try:
        ray.get(call)
    except RayError as error:
        is_lost = isinstance(getattr(error, "cause", None), local_ranks.RankLost)
        return "lost" if is_lost else "failed", failure_reason(error)
    return "done", None


class RayFleet:
    """Workers of the connected cluster, one a device."""

    def __init__(self, spec: BenchSpec):
        self.spec, self._starts = spec, Counter()

    def start(self, name: str, reference_ms: float | None) -> RayWorker:
        self._starts[name] += 1  # part of the name, as Ray may free that of a dead worker late
        again = f", start {self._starts[name]}" if self._starts[name] > 1 else ""
        options = {"name": f"measure[compute] {name}{again}", "num_gpus": int(self.spec.device == "cuda")}
        actor = DeviceWorker.options(**options, num_cpus=1)
        return RayWorker(options["name"], actor.remote(self.spec, reference_ms))

    def wait(self, workers: Sequence[RayWorker], timeout_s: float) -> list[RayWorker]:
        calls = [w.ongoing for w in workers]
        ray.wait(calls, num_returns=1, timeout=timeout_s)
        ended = set(ray.wait(calls, num_returns=len(calls), timeout=0)[0])
        return [w for w in workers if w.ongoing in ended]

    def describe_devices(self) -> str:
        return cluster_resources_text()


class RayWorker:
    def __init__(self, name: str, actor: Any):
        self._name, self._actor = name, actor
        self.counts: Counts = Counts()
        self.ongoing: Any = None

    def call(self, method: str, *arguments: Any, label: str = "") -> None:
        name = f"{self._name}, {label or method}"
        self.ongoing = self._actor.call.options(name=name).remote(method, *arguments)

    def answer(self) -> Any:
        try:
            value, self.counts = ray.get(self.ongoing)
            return value
        except RayError as error:
            raise (WorkerRefused if "ShardCoreError: " in str(error) else WorkerEnded)(
                failure_reason(error)
            ) from None

    def update_counts(self) -> None:
        with suppress(RayError):  # it is stuck, or has died, which its call reports
            self.counts = ray.get(self._actor.current_counts.remote(), timeout=_PROBE_S)

    def end(self) -> None:
        ray.kill(self._actor)


def first_results(calls: Sequence[Any]) -> list[Any]:
    """Results of the first calls to new Ray actors.

    Raises ShardCoreError if one cannot start, such as without FBGEMM or a free device.
    """
    try:
        return ray.get(list(calls), timeout=START_S)
    except GetTimeoutError:
        raise NoRoom(
            f"a measuring actor found no free device in {START_S:g} s; {cluster_resources_text()}"
        ) from None
    except RayError as error:
        raise ShardCoreError(f"a measuring actor cannot start: {failure_reason(error)}") from None


def live_nodes() -> list[dict[str, Any]]:
    """Live nodes of the Ray cluster, as ray.nodes describes them."""
    return [node for node in ray.nodes() if node["Alive"]]


def cluster_resources_text() -> str:
    """Resources of the Ray cluster, as the end of an error message."""
    return f"the cluster has {ray.cluster_resources()}; ask for fewer (measure.actors, measure.ranks)"


def cpus_per_rank(ranks: int, hosts: int = 1) -> float:
    """CPUs for each rank: 1, or less if the largest host has fewer cores than ranks."""
    most = max(node["Resources"].get("CPU", 0) for node in live_nodes())
    return min(1.0, most / math.ceil(ranks / hosts))


def failure_reason(error: Exception) -> str:
    """Reason of a Ray actor's failure in one line, without Ray's stack frames."""
    text = " ".join(str(getattr(error, "cause", None) or error).split())
    if "ShardCoreError: " in text:  # raised where the actor started
        return text.split("ShardCoreError: ")[-1][:300]
    if isinstance(error, RayActorError):
        for mark in ("The actor died because ", "Worker exit detail: "):
            text = text.split(mark)[-1]
        return f"its process died: {text.split(' Some common causes')[0][:280]}"
    return text[:300]
