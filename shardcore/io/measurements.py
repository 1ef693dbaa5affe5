"""Measurements: requests to a machine, and samples.

A request is work to run. A sample is its timing with spread and repeats, or the reason why there is none.

Shapes: D ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated

from shardcore.core.errors import ShardCoreError
from shardcore.core.links import host_names
from shardcore.core.payloads import payload_by_name, require_payload
from shardcore.core.step_cost import PARTS, StepCost
from shardcore.core.types import Setting, Shard
from shardcore.core.validation import (
    MOST_BATCH,
    MOST_DEVICES,
    MOST_MS,
    MOST_SEED,
    MOST_SPEED,
    MOST_UNIX_S,
    SLOWDOWN_LIMIT,
    Record,
    each_entry,
    number_within,
    one_of,
    require,
)
from shardcore.step.collectives import COLLECTIVES, Collective
from shardcore.step.scopes import SCOPES, WORLD, groups_among_hosts

LINK_GBIT_S = (1e-3, 100.0)
"""The ends of the rate of an emulated link."""
GbitS = Annotated[float, number_within(*LINK_GBIT_S)]
UnixS = Annotated[float, number_within(0, MOST_UNIX_S)]
_TIMES = each_entry(number_within(0, MOST_MS))
Order = Annotated[int, number_within(0, MOST_SEED)]


@dataclass(frozen=True)
class TimingSpread:
    """Median and quartiles of repeated timings.

    median_ms: median of the repeats.
    q1_ms, q3_ms: their quartiles.
    repeats: number of repeats.
    """

    median_ms: float
    q1_ms: float
    q3_ms: float
    repeats: int

    def __post_init__(self) -> None:
        # Without `require`, whose text would be made for each of a dataset's many spreads.
        if not 0 <= self.q1_ms <= self.median_ms <= self.q3_ms <= MOST_MS or self.repeats < 1:
            raise ShardCoreError(
                f"a timing is {self.median_ms} ms (q1_ms {self.q1_ms} to q3_ms {self.q3_ms}) in {self.repeats} "
                f"repeats; it needs 0 to {MOST_MS:g} ms, the median between its quartiles, and 1 or more"
            )

    def scaled_by(self, factor: float) -> TimingSpread:
        """The timing with all times multiplied by a factor; the number of repeats stays."""
        return TimingSpread(self.median_ms * factor, self.q1_ms * factor, self.q3_ms * factor, self.repeats)


@dataclass(frozen=True)
class StepSample(StepCost):
    """Measured cost of a training step: medians over the repeats, per device, by the clock.

    step: total of the slowest device, over the repeats. On a busy machine it is above total_ms, whose parts
        each leave out their own disturbances.
    oversubscribed: True if there were more processes than cores. Parts then measure the scheduler, too.
    slowdown: the machine's slowdown meanwhile: time of a dataset's reference op over its usual time. 1 if
      none ran.
    """

    step: TimingSpread
    oversubscribed: bool
    slowdown: Annotated[float, number_within(1 / MOST_SPEED, MOST_SPEED)] = 1.0

    def at_usual_speed(self) -> StepSample:
        """The step's times divided by the machine's slowdown during the measurement."""
        parts = {name: tuple(ms / self.slowdown for ms in getattr(self, name)) for name in PARTS}
        step = replace(
            self.step,
            median_ms=self.step.median_ms / self.slowdown,
            q1_ms=self.step.q1_ms / self.slowdown,
            q3_ms=self.step.q3_ms / self.slowdown,
        )
        return replace(self, **parts, step=step, slowdown=1.0)


@dataclass(frozen=True)
class ComputeRequest(Record):
    """Request to measure some shards as one fused op.

    batch: number of samples that the op runs over.
    """

    shards: tuple[Shard, ...]
    batch: Annotated[int, number_within(1, MOST_BATCH)]


@dataclass(frozen=True)
class EmulatedLinks(Record):
    """Links between hosts that one machine emulates (docs/measure.md).

    between_gbit_s: rate of each host's link, Gbit/s each way. With pods: of each pod's link to the others.
    within_gbit_s: rate of each host's loopback, Gbit/s. None: not limited.
    pods: number of pods that hosts are divided into evenly. 1: none.
    pod_gbit_s: rate of each host's link in its pod, Gbit/s each way. None without pods.
    """

    between_gbit_s: GbitS
    within_gbit_s: GbitS | None = None
    pods: Annotated[int, number_within(1, 64)] = 1
    pod_gbit_s: GbitS | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            (self.pods > 1) == (self.pod_gbit_s is not None),
            f"emulated links have pods {self.pods} and pod_gbit_s {self.pod_gbit_s}; several pods need the rate of "
            "links within them, and one has none",
        )

    @property
    def description(self) -> str:
        """Description of emulated hosts and links, shown beside all figures measured on them."""
        within = "" if self.within_gbit_s is None else f", within {self.within_gbit_s:g} Gbit/s"
        if self.pod_gbit_s is None:
            return f"emulated hosts, between {self.between_gbit_s:g} Gbit/s{within}"
        return (
            f"emulated hosts in {self.pods} pods, between pods {self.between_gbit_s:g} Gbit/s, within pods "
            f"{self.pod_gbit_s:g} Gbit/s{within}"
        )


@dataclass(frozen=True)
class CollectiveRequest(Record, noun="exchange"):
    """Request to measure one collective among D ranks.

    widths: [D] columns that each rank owns.
    batch: B, the rows that travel.
    start_ms: [D] ms by which each rank enters the first exchange (forward, or the all-reduce) after the first
      rank.
    collective: name in step.collectives.COLLECTIVES, see below.
    payload: type in which FP32 tensors travel, a name of core/payloads.py.
    hosts: number of hosts that the ranks are spread over evenly.
    busy_ms: time for which each rank computes before an exchange, as in a step. Without it, CPUs exchange up
        to three times as fast.
    group: scope of the groups whose n ranks exchange with each other, in step.scopes.SCOPES. All groups
        exchange at once, B rows each.
    emulated: links of emulated hosts. None: hosts and links are real.

    What travels, by collective:
      all_to_all      forward: rank d sends each rank its B / n rows of the widths[d] columns of pooled outputs;
                      backward: their gradients return
      reduce_scatter  forward: all give [B, max width] partial outputs, padded, and each receives the sum
                      of its B / n rows; backward: an all-gather of their gradients
      all_reduce      backward only: the sum of dense gradients [B, width], all widths being equal
      all_to_all_ids  forward only: rank d receives as many bytes of ids and lengths as all_to_all has
                      of outputs, equally many from each rank (measure/id_transfer.py)
      all_to_all_ids_bucketized  the same, after each rank has put its ids in buckets, one for each rank
    """

    widths: tuple[int, ...]
    batch: Annotated[int, number_within(1, MOST_BATCH)]
    start_ms: Annotated[tuple[float, ...], _TIMES]
    collective: Annotated[str, one_of(COLLECTIVES)] = "all_to_all"
    payload: Annotated[str, require_payload] = "fp32"
    hosts: Annotated[int, number_within(1, MOST_DEVICES)] = 1
    busy_ms: Annotated[float, number_within(0, MOST_MS)] = 0.0
    group: Annotated[str, one_of(SCOPES)] = WORLD
    emulated: EmulatedLinks | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        ranks = len(self.widths)
        require(
            ranks >= 2 and min(self.widths) >= 0 and max(self.widths) > 0,
            f"exchange has widths {self.widths}; it needs one of 0 or more for each of at least 2 "
            "ranks, and one above 0",
        )
        row = self.definition
        require(
            not row.ring or payload_by_name(self.payload).summed != (),
            f"exchange {self.collective} has payload {self.payload!r}, whose codec fails where outputs are summed",
        )
        require(
            not row.ids or self.payload == "fp32",
            f"exchange {self.collective} has payload {self.payload!r}; ids are never cast, it needs 'fp32'",
        )
        require(
            not (row.work and row.work.buckets) or min(self.widths) > 0,
            f"exchange {self.collective} has widths {self.widths}; rows are divided over all "
            "ranks, so each needs one above 0",
        )
        require(
            not row.dense or len(set(self.widths)) == 1,
            f"exchange {self.collective} has widths {self.widths}; the same gradient on all ranks has "
            "one width",
        )
        require(
            len(self.start_ms) == ranks,
            f"exchange has start_ms {self.start_ms}; it needs one for each of its {ranks} ranks",
        )
        require(
            ranks % self.hosts == 0,
            f"exchange has hosts {self.hosts}; they need to hold the same number of its {ranks} ranks each",
        )
        together = len(self.rank_groups[0]) if self.rank_groups else 0
        require(
            together >= 2 and all(any(self.widths[r] for r in ranks) for ranks in self.rank_groups),
            f"exchange has group {self.group!r} of hosts {self.hosts} with {ranks} ranks and widths "
            f"{self.widths}; a group needs at least 2 ranks, and a width above 0",
        )
        require(
            row.dense or self.batch % together == 0,
            f"exchange has batch {self.batch}, which its {together} ranks need to divide evenly",
        )
        require(
            not row.ids or self.group == WORLD,
            f"exchange {self.collective} has group {self.group!r}; ids go to all ranks, it needs 'world'",
        )
        require(
            self.emulated is None or self.hosts > 1,
            f"exchange has emulated links between hosts {self.hosts}; it needs at least 2",
        )
        require(
            self.hosts % self.pods == 0,
            f"exchange has pods {self.pods}; they need to hold the same number of its {self.hosts} hosts each",
        )

    @property
    def definition(self) -> Collective:
        """Definition of the request's collective, a row of COLLECTIVES."""
        return COLLECTIVES[self.collective]

    @property
    def rank_groups(self) -> tuple[tuple[int, ...], ...]:
        """Groups of ranks that exchange among themselves. Ranks are numbered host by host."""
        return groups_among_hosts(self.host_names, self.group)

    @property
    def host_names(self) -> list[str]:
        """[D] host name of each rank."""
        return host_names(len(self.widths), self.hosts, self.pods)

    @property
    def pods(self) -> int:
        """Number of pods that the hosts are divided into; 1 if there are none."""
        return self.emulated.pods if self.emulated else 1


@dataclass(frozen=True)
class ComputeSample(Record, noun="sample"):
    """Sample of one measured fused op.

    id: digest of its setting, its request and the version of what a timing means.
    forward, backward: times at the machine's usual speed. The optimizer is fused into backward.
    measured_at: Unix s of its end.
    error: reason why there is no timing. None if there is one.
    slowdown: the machine's slowdown meanwhile. The clock showed slowdown times forward and backward.
    relative_ci: half the width of the 95% interval of the median of forward + backward, relative to the
      median.
    order: number among the samples of its process, from 0.
    software: versions of the software, and size of the arena. "": not known.
    """

    id: str
    setting: Setting
    request: ComputeRequest
    forward: TimingSpread | None
    backward: TimingSpread | None
    measured_at: UnixS
    error: str | None = None
    slowdown: Annotated[float, number_within(1 / SLOWDOWN_LIMIT, SLOWDOWN_LIMIT)] = 1.0
    relative_ci: Annotated[float | None, number_within(0, math.inf)] = None
    order: Order = 0
    software: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_timing_or_error(self, self.forward is not None and self.backward is not None)
        require(
            self.forward is None or self.backward is None or self.total_ms > 0,
            f"sample {self.id} took 0 ms; no op does",
        )

    @property
    def total_ms(self) -> float:
        """Median forward + backward ms of the op; NaN without a timing."""
        return sum(math.nan if x is None else x.median_ms for x in (self.forward, self.backward))


@dataclass(frozen=True)
class CollectiveSample(Record, noun="sample"):
    """Sample of one measured exchange among D ranks, including casts to and from its payload.

    id: digest of its setting, its request and the version of what a timing means.
    forward, backward: [D] transfers, each from the last rank's start to a rank's own end. None for a way that
        does not run.
    waiting_ms: [D] ms that each rank waits for the last one before the first exchange.
    measured_at: Unix s of its end.
    error: reason why there is no timing. None if there is one.
    order: number among the samples of its gang, from 0.
    oversubscribed: True if a host had more ranks than cores. Times then measure the scheduler, too.
    work_ms: [D] ms of forward in which a device puts ids in buckets and in order, which is its own work. None
        if no ids travel, and in samples of earlier versions.
    """

    id: str
    setting: Setting
    request: CollectiveRequest
    forward: tuple[TimingSpread, ...] | None
    backward: tuple[TimingSpread, ...] | None
    waiting_ms: Annotated[tuple[float, ...] | None, _TIMES]
    measured_at: UnixS
    error: str | None = None
    order: Order = 0
    oversubscribed: bool = False
    work_ms: Annotated[tuple[float, ...] | None, _TIMES] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        directions = self.request.definition.directions
        _require_timing_or_error(
            self,
            self.waiting_ms is not None
            and all(
                (getattr(self, direction) is not None) == (direction in directions)
                for direction in ("forward", "backward")
            ),
        )
        of_ranks = [x for x in (self.forward, self.backward, self.waiting_ms, self.work_ms) if x is not None]
        require(
            all(len(x) == len(self.request.widths) for x in of_ranks),
            f"sample {self.id} has {[len(x) for x in of_ranks]} timings; it needs one for each of its "
            f"{len(self.request.widths)} ranks",
        )
        require(
            self.work_ms is None or self.request.definition.ids,
            f"sample {self.id} of {self.request.collective} has work_ms {self.work_ms}; it needs some only where ids "
            "travel",
        )


def _require_timing_or_error(sample: ComputeSample | CollectiveSample, is_timed: bool) -> None:
    """Raise ShardCoreError for a sample without a timing and without an error."""
    require(
        is_timed or sample.error is not None,
        f"sample {sample.id} has no timing, and no error for which there is none",
    )
