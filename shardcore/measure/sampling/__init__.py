"""Seeded draws: the samples to measure, and the problems that sharders are judged on.

  groups        groups of shards, each run as one fused op
  placements    plans of drawn problems, for groups as sharders make them
  collectives   collectives with the loads and skews of plans
  steps         plans whose steps of training are replayed
  problems      problems for sharders

Draw i depends only on (seed, i), so a larger number of draws keeps earlier ones. Draws use no cost model and
no search, so an edit of a sharder leaves every wanted sample as it was. For the same reason, an option that
came later draws from a random stream of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import TypeVar

from shardcore.io.measurements import CollectiveRequest, ComputeRequest

Request = TypeVar("Request", ComputeRequest, CollectiveRequest)
MOST_DRAWS = 1_000_000
"""Most draws of groups, collectives, steps or problems. All are drawn before the first is used."""
MOST_RANKS = 1 << 10
"""Most ranks of a collective, which is still drawn within a second."""


def distinct_requests(
    draw: Callable[[int], Request], identify: Callable[[Request], str], n: int | None
) -> Iterator[tuple[str, Request]]:
    """The first n distinct requests of draw(0), draw(1), ..., with their ids; all of them if n is None.

    A tiny pool may have fewer than n.
    """
    seen: set[str] = set()
    for index in itertools.count():
        # All further draws may be duplicates, so give up after ten draws per wanted request.
        if len(seen) == n or index >= 10 * (n or len(seen) + 100):
            return
        request = draw(index)
        key = identify(request)
        if key not in seen:
            seen.add(key)
            yield key, request
