"""Agreement of a job's ranks on one change: all make it, or none does.

Ranks vote through the store of their rendezvous. What counts is one key of it, which the first who writes
decides for all: a rank that has read every vote writes "commit", one that has waited for too long "abort".
A collective cannot decide: where a rank dies in an all-reduce, some ranks have its result and others an error.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from shardcore.core.errors import ShardCoreError

_COMMIT, _ABORT = "commit", "abort"


class ChangeRefused(ShardCoreError):
    """Raised when a change is given up on all ranks."""


class WaitEnded(ShardCoreError):
    """A wait for another rank that has ended without it. The other rank knows why."""


class ChangeUndecided(ShardCoreError):
    """Raised when a rank cannot learn whether other ranks make a change. The job has to end."""


# Counts changes in this process. Ranks call in the same order, so their numbers agree.
_numbers = itertools.count()


def rank_and_world_size() -> tuple[int, int]:
    """This process's rank and the number of ranks; (0, 1) without a process group."""
    ready = dist.is_available() and dist.is_initialized()
    return (dist.get_rank(), dist.get_world_size()) if ready else (0, 1)


class Agreement:
    """Agreement of all ranks on one change of the sharding plan: they go through the same phases, or none changes.

    store: store of the job's process group.
    ranks: this rank, and how many there are.
    number: number of changes before it, the same on all ranks.
    timeout_s: limit of each wait.
    """

    @classmethod
    def new(cls, timeout_s: float) -> Agreement:
        """Agreement on this process's next change. Raises Refused if other ranks have already given the change up."""
        store = dist.distributed_c10d._get_default_store()
        change = cls(store, rank_and_world_size(), next(_numbers), timeout_s)
        if change._store.check(["decision"]):
            raise ChangeRefused(
                f"rank {change.rank} comes late: other ranks have given up this change; ask for it again"
            )
        return change

    def __init__(self, store: Store, ranks: tuple[int, int], number: int, timeout_s: float) -> None:
        # A prefix for each change: votes of an earlier one are never read again.
        self._store = PrefixStore(f"shardcore/change/{number}", store)
        self.rank, self.ranks = ranks
        self.timeout_s = timeout_s

    @contextmanager
    def agreed_phase(self, name: str, share: Callable[[], Any] = lambda: None) -> Iterator[list[Any]]:
        """Context for this rank's part of a phase; on exit it waits until all ranks have done theirs.

        share: called after the part. Its result, JSON, goes to all ranks, into the list.

        Raises Refused on all ranks if one fails or takes too long.
        """
        values: list[Any] = []
        error: Exception | None = None
        try:
            yield values
            vote = {"value": share()}
        except Exception as e:  # whatever TorchRec raises, the others need to know
            why = str(e) if isinstance(e, ShardCoreError) else f"{type(e).__name__}: {e}"
            error, vote = e, {"error": why, "waited": isinstance(e, WaitEnded)}
        votes = self._exchange_votes(name, vote)
        # Ranks that only waited come last, so that the cause is reported, not its effect.
        if failed := sorted((v for v in votes if "error" in v), key=lambda v: v["waited"]):
            # Nobody commits without this rank's vote, so the decision is to abort.
            self._decide(_ABORT)
            raise ChangeRefused(failed[0]["error"]) from error
        values += [v["value"] for v in votes]

    def commit(self) -> None:
        """Commit the change once all phases have passed. Raises Refused if another rank has aborted the change."""
        if self._decide(_COMMIT) == _ABORT:
            raise ChangeRefused("another rank has waited too long, and decided against it")

    def _decide(self, decision: str) -> str:
        """Decision on the change: `decision`, unless another rank wrote one first."""
        try:
            # Compare and set: the first value written stays, and every rank reads that one.
            return self._store.compare_set("decision", "", decision).decode()
        except Exception as e:
            raise ChangeUndecided(
                f"the job's store cannot be reached ({type(e).__name__}); its other ranks may have changed plan: end "
                "the job, and start it from its checkpoint"
            ) from e

    def _exchange_votes(self, phase: str, vote: dict[str, Any]) -> list[dict[str, Any]]:
        """Votes of all ranks on a phase. Raises Refused if a rank's vote does not come in time."""
        # Another rank may first have to wait in vain for this one, in an exchange.
        patience = timedelta(seconds=2 * self.timeout_s + 1)
        try:
            self._store.set(f"{phase}/{self.rank}", json.dumps(vote))
            keys = [f"{phase}/{rank}" for rank in range(self.ranks)]
            self._store.wait(keys, patience)
            return [json.loads(self._store.get(key)) for key in keys]
        except Exception as e:
            # The store may have a decision already. Only an abort is safe to report as a refusal.
            if self._decide(_ABORT) == _ABORT:
                raise ChangeRefused(
                    f"not all ranks have done {phase!r} of the change in {patience.total_seconds():g} s; one may have "
                    "died or hang, or not have called"
                ) from e
            raise ChangeUndecided(f"the change is decided for, and a vote of it cannot be read: {e}") from e


@contextmanager
def time_limit(group: dist.ProcessGroup, timeout_s: float) -> Iterator[None]:
    """Context with a timeout on all waits in a process group, and in groups that TorchRec creates meanwhile."""
    set_timeout, limit = dist.distributed_c10d._set_pg_timeout, timedelta(seconds=timeout_s)
    backend = group._get_backend(torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu"))
    before, new_group, made = backend.options._timeout, dist.new_group, [group]

    def limited(*args: Any, **named: Any) -> Any:
        # Groups of a host's ranks, for the first table that has its rows there. Connecting them waits, too.
        group = new_group(*args, **{"timeout": limit, **named})
        if "timeout" not in named and isinstance(group, dist.ProcessGroup):
            made.append(group)
        return group

    set_timeout(limit, group)
    dist.new_group = limited
    try:
        yield
    finally:
        dist.new_group = new_group
        for one in made:  # the job trains with them
            set_timeout(before, one)
