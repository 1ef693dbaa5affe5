"""PEERS: other people's planners, reimplemented as sharders for comparisons.

TorchRec's planner is not here: it is one of shardcore's own sharders.
"""

from bench.peers import embark, milp
from shardcore.search.fixed_kinds import with_fixed_kinds
from shardcore.search.true_memory import within_memory

PEERS = {name: within_memory(with_fixed_kinds(name, of))
         for name, of in (("embark", embark.embark), ("milp", milp.milp))}
