"""The compiled core of annealing: greedy construction and simulated annealing.

It works on arrays. `arrays.SearchProblem` holds the problem; search_space.py makes it.
`arrays.State` holds one plan, with everything that follows from it. Moves update it in place.
The best plan is not copied. A log of the changes made since then leads back to it.

Nothing in these functions may allocate. They are compiled without numba's reference counts
(`_nrt=False`, an internal option of numba), because counting tripled the time of a trial.
Records are passed as pointers (pointers.py). Each function is compiled when it is first called.

Names in all files: `fx` is the SearchProblem, `st` the State.
s is a strip; a, b, c and d devices; h a host; g a group; y a layout; r and k runs; x an exchange.
`was` is before a change, `then` after it.
"""

from shardcore.search.anneal.compiled.arrays import SearchProblem, State, empty
from shardcore.search.anneal.compiled.greedy import greedy
from shardcore.search.anneal.compiled.put import expect_all, find_devices, put_all
from shardcore.search.anneal.compiled.run import anneal, refresh
from shardcore.search.anneal.compiled.state import place, share

__all__ = [
    "SearchProblem",
    "State",
    "anneal",
    "empty",
    "expect_all",
    "find_devices",
    "greedy",
    "place",
    "put_all",
    "refresh",
    "share",
]
