"""PEERS: other people's planners, reimplemented as sharders for comparisons.

TorchRec's planner is not here: it is one of shardcore's own sharders.
"""

from bench.peers import embark, milp

PEERS = {"embark": embark.embark, "milp": milp.milp}
