"""A lower bound by cases: which kinds of sharding the tables with most work take.

In each case, more is known of the ops of kinds that all devices share, so of their contention. The bound is
that of the lowest case. So only the lowest is divided further, by the kind of its next table.

Shapes: N shards.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardcore.search.bound.ops import Ops
from shardcore.search.bound.packing import Packing, Proof
from shardcore.search.bound.shards import BoundShards

CASES = 60
"""Cases to prove at most, with few tables. With many tables they are fewer, as each takes longer."""
MOST_SHARDS = 20_000
"""With more possible shards there are no cases, for their time and memory."""
_MOST_WORK = 4_000
"""Cases times tables."""
_AT_ONCE = 1.25
"""A case is proved up to this times what is proved of it before,"""
_RAISED = 3
"""and so often."""


@dataclass(frozen=True, order=True)
class _Case:
    """ms: at least. number: tells cases apart. kinds: of the tables with most work. mix: kinds in use."""

    ms: float
    number: int
    kinds: tuple[int, ...]
    mix: tuple[int, ...]


def least_ms(
    shards: BoundShards, ops: Sequence[Ops], mixes: dict[tuple[int, ...], tuple[float, str]], alike: bool
) -> float:
    """ms of plans at least.

    ops: of each kind.
    mixes: by mix of kinds, the ms that are proved already, and why.
    alike: whether all devices wait for the same exchanges.
    """
    if len(shards.kind) > MOST_SHARDS:
        return min(ms for ms, _ in mixes.values())
    packing, left = Packing(shards, ops, alike), max(8, min(CASES, _MOST_WORK // len(shards.size)))
    order = np.argsort(-shards.alone_ms[shards.whole], kind="stable")
    cases = [_Case(ms, i, (), mix) for i, (mix, (ms, _)) in enumerate(mixes.items())]
    heapq.heapify(cases)
    proofs: dict[int, Proof] = {}
    number = len(cases)
    while left > 0 and cases and np.isfinite(cases[0].ms):
        case = heapq.heappop(cases)
        before = proofs.pop(case.number, None)
        # A mix is first proved as a whole. After that it is divided by the kind of one more table.
        more = [()] if before is None else [(k,) for k in case.mix]
        if before is not None and (len(case.kinds) == len(order) or len(case.mix) == 1):
            heapq.heappush(cases, case)
            break
        for kind in more:
            kinds = case.kinds + kind
            proof = _prove(packing, case.mix, kinds, order, before or Proof(case.ms, None))
            proofs[number] = proof
            heapq.heappush(cases, _Case(proof.ms, number, kinds, case.mix))
            number, left = number + 1, left - 1
    return cases[0].ms


def _prove(
    packing: Packing, mix: tuple[int, ...], kinds: tuple[int, ...], order: np.ndarray, start: Proof
) -> Proof:
    """What plans take at least whose tables order[i] are of kinds[i]."""
    shards = packing.shards
    of = np.full(len(order), -1)
    of[order[: len(kinds)]] = kinds
    kind = of[shards.table]
    known = (kind < 0) | (kind == shards.kind)
    for _ in range(_RAISED):
        high = start.ms * _AT_ONCE
        some = shards.within(known & (shards.alone_ms / shards.fastest <= high))
        sure = some & (kind == shards.kind) & (shards.kind > 0) & (shards.copies == len(shards.speed))
        found = packing.prove(list(mix), some, sure, start, high)
        # Go on where all was proved that was asked for.
        if found.ms < high:
            return found
        start = found
    return start
