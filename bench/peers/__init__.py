"""PEERS: other people's planners, reimplemented as sharders, for comparisons. (TorchRec's is among shardcore's own.)"""

from bench.peers import embark, milp

PEERS = {"embark": embark.embark, "milp": milp.milp}
