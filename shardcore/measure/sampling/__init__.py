"""Seeded draws: the samples to measure, and the problems that sharders are judged on.

  groups        groups of shards, each run as one fused op
  placements    places of the tables of a drawn problem, for groups as sharders make them
  collectives   collectives with the loads and skews of plans
  steps         plans whose steps of training are replayed
  problems      problems for sharders

Draw i depends only on (seed, i). So more draws keep earlier ones. Draws see no cost model and no search. So an edit
of a sharder leaves every wanted sample as it was.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import TypeVar

from shardcore.io.measurements import CollectiveRequest, ComputeRequest

Request = TypeVar("Request", ComputeRequest, CollectiveRequest)
MOST_DRAWS, MOST_RANKS = 1_000_000, 1 << 10
"""Limits: draws of groups, collectives, steps or problems, which are all drawn before the first is used; and ranks of
one collective, which must be drawn within a second."""


def different(
    draw: Callable[[int], Request], identify: Callable[[Request], str], n: int | None
) -> Iterator[tuple[str, Request]]:
    """The first n different requests of draw(0), draw(1), ..., with their ids. n None: all of them.

    A tiny pool may have fewer than n.
    """
    seen: set[str] = set()
    for index in itertools.count():
        # Duplicates may never end: give up after ten draws per wanted request.
        if len(seen) == n or index >= 10 * (n or len(seen) + 100):
            return
        request = draw(index)
        # Two draws may give one request, which is measured once.
        key = identify(request)
        if key not in seen:
            seen.add(key)
            yield key, request
