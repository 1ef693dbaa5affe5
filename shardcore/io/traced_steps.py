"""Training steps of a running job, from the traces of its ranks.

Each ms of a rank's step belongs to one part. What overlaps counts once, in the part that the device works on.
A transfer counts as far as nothing hides it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

from shardcore.core.errors import shorten
from shardcore.core.validation import MOST_DEVICES, entry_count_within

UNNAMED = "unnamed"


@dataclass(frozen=True)
class TracedPart:
    """Kind of part of a traced training step.

    words: for people.
    cost: field of StepCost that has it; "dense_ms" for all around the embeddings.
    """

    words: str
    cost: str


TRACED_PARTS: Mapping[str, TracedPart] = {
    "ids": TracedPart("ids: permute, bucketize, order", "input_ms"),
    "ids_transfer": TracedPart("ids: transfer", "input_ms"),
    "lookup_forward": TracedPart("lookups forward", "forward_compute_ms"),
    "lookup_backward": TracedPart("lookups backward and update", "backward_compute_ms"),
    "outputs": TracedPart("outputs: split and join", "forward_comm_ms"),
    "outputs_transfer": TracedPart("outputs: transfer", "forward_comm_ms"),
    "gradients": TracedPart("gradients of outputs: split and join", "backward_comm_ms"),
    "gradients_transfer": TracedPart("gradients of outputs: transfer", "backward_comm_ms"),
    "reduce_transfer": TracedPart("all-reduce of dense gradients and replicas", "dense_ms"),
    "waiting": TracedPart("waiting for the last rank", "waiting_ms"),
    "dense_forward": TracedPart("dense part forward", "dense_ms"),
    "dense_backward": TracedPart("dense part backward", "dense_ms"),
    "optimizer": TracedPart("optimizer of the dense part", "dense_ms"),
    "data": TracedPart("batches: load and copy", "dense_ms"),
    "host": TracedPart("host: Python, launches", "dense_ms"),
    "other_transfer": TracedPart("other collectives", "dense_ms"),
    UNNAMED: TracedPart("not recognised", "dense_ms"),
}


@dataclass(frozen=True)
class TracedExchange:
    """A collective of one rank in a traced step.

    collective: all_to_all, reduce_scatter, all_gather, all_reduce, broadcast or barrier, as the backend ran
      it.
    role: a part of TRACED_PARTS without "_transfer": ids, outputs, gradients, reduce or other.
    n_bytes: that the rank enters. 0 where the trace does not say.
    waiting_ms: until its last rank began.
    transfer_ms: since then, hidden or not.
    exposed_ms: of the transfer that nothing hides.
    shared_ms: of exposed_ms, in moments that other transfers share. Which of them takes that long, no trace
      tells.
    is_aligned: True if the traces of all ranks tell when its last rank began. If not, transfer_ms may be
      waiting.
    """

    collective: str
    role: str
    n_bytes: int
    waiting_ms: float
    transfer_ms: float
    exposed_ms: float
    shared_ms: float = 0.0
    is_aligned: bool = True


@dataclass(frozen=True)
class RankStep:
    """One traced training step of one rank.

    total_ms: from its begin to its end.
    ms: of each part, which sum to total_ms.
    hidden_ms: of transfers that ran while the device worked.
    names_ms: ms of each name that is not recognised, hidden or not.
    host_ms: ms in which a GPU idled while the host worked, by the part that it worked on.
    kernel_ms: ms of kernels and collectives by part; overlapping ones count each. Empty on a CPU.
    """

    rank: int
    total_ms: float
    ms: Mapping[str, float]
    hidden_ms: float
    exchanges: tuple[TracedExchange, ...]
    names_ms: Mapping[str, float] = field(default_factory=dict)
    host_ms: Mapping[str, float] = field(default_factory=dict)
    kernel_ms: Mapping[str, float] = field(default_factory=dict)

    @property
    def recognised_share(self) -> float:
        """Fraction of the rank's step time whose events are recognised."""
        return 1 - self.ms.get(UNNAMED, 0.0) / self.total_ms

    def cost_ms(self, name: str) -> float:
        """ms of the rank's step that belong to a field of StepCost."""
        return sum(ms for part, ms in self.ms.items() if TRACED_PARTS[part].cost == name)

    def scaled_by(self, factor: float) -> RankStep:
        """The rank's step with the times of its parts and collectives multiplied by a factor."""
        return replace(
            self,
            total_ms=factor * self.total_ms,
            ms={part: factor * ms for part, ms in self.ms.items()},
            exchanges=tuple(
                replace(
                    x,
                    waiting_ms=factor * x.waiting_ms,
                    transfer_ms=factor * x.transfer_ms,
                    exposed_ms=factor * x.exposed_ms,
                    shared_ms=factor * x.shared_ms,
                )
                for x in self.exchanges
            ),
        )


@dataclass(frozen=True)
class TracedStep:
    """One training step of all ranks that have traces.

    number: of the step in the profiler's count.
    ranks: sorted by rank.
    world_size: ranks of the job.
    """

    number: int
    ranks: Annotated[tuple[RankStep, ...], entry_count_within(1, MOST_DEVICES)]
    world_size: int

    @property
    def total_ms(self) -> float:
        """ms of the traced step on the slowest rank."""
        return max(rank.total_ms for rank in self.ranks)

    @property
    def missing_ranks_text(self) -> str:
        """Ranks of the job that have no trace, in words: "ranks 4, 5 are"; empty where all have one."""
        missing = set(range(min(self.world_size, MOST_DEVICES))) - {rank.rank for rank in self.ranks}
        numbers = shorten(", ".join(map(str, sorted(missing))), 60)
        return f"ranks {numbers} are" if len(missing) > 1 else f"rank {numbers} is" * len(missing)

    def with_untraced_ms(self, step_ms: float | None) -> TracedStep:
        """The traced step scaled to the duration of steps without tracing.

        step_ms: None if no step was timed without tracing; then the step is unchanged.

        Tracing slows all parts. And one step is slow or fast by chance, which a median of many is not.
        """
        if step_ms is None:
            return self
        return replace(self, ranks=tuple(rank.scaled_by(step_ms / self.total_ms) for rank in self.ranks))


@dataclass(frozen=True)
class TracedJob:
    """The traced training steps of a job.

    remarks: a line on each thing that the traces do not tell, or tell with care.
    digests: of the trace files, by rank.
    """

    steps: tuple[TracedStep, ...]
    backend: str
    devices: tuple[str, ...]
    remarks: tuple[str, ...]
    digests: Mapping[int, str]

    @property
    def ranks(self) -> Sequence[int]:
        """Ranks that have traces, sorted."""
        return sorted({rank.rank for step in self.steps for rank in step.ranks})
