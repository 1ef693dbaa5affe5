"""The compiled core of annealing: greedy construction, and changes of plans.

It works on numbers (records.SearchProblem, which space.py makes of a problem). A plan is a records.State, kept up to date while
pieces are placed and changes carried out; the best plan met is kept as a log of what was done since.

Compiled without numba's reference counts (_nrt=False, an option of numba's own use): they tripled the time of a trial. So nothing
in the compiled functions may allocate.
"""

from shardcore.search.anneal.compiled.greedy import greedy
from shardcore.search.anneal.compiled.records import BEST, ENERGY, LOG, WORST, SearchProblem, State, empty
from shardcore.search.anneal.compiled.run import anneal
from shardcore.search.anneal.compiled.state import place, refresh, rewind, share

__all__ = ["BEST", "ENERGY", "LOG", "WORST", "SearchProblem", "State", "anneal", "empty", "greedy", "place", "refresh", "rewind",
           "share"]
