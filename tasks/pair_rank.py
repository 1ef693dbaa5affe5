"""The rank of a gang that times its pairs, as a Ray actor. It is in its own module for the reason in tasks.workers."""

from __future__ import annotations

import ray

from shardcore.measure import pairs
from shardcore.measure.pairs import PairConfig, PairMeasurement
from tasks import actors


@actors.remote(max_restarts=0, concurrency_groups={"watch": 1})
class PairRank(actors.Member):
    """One rank of a gang that times its pairs."""

    def __init__(self) -> None:
        super().__init__()
        self._turns = (0, 1)

    def run(
        self, rank: int, ranks: int, address: str, config: PairConfig, device: str
    ) -> tuple[PairMeasurement, str]:
        """Times of pairs, and the address of its node."""
        measured = pairs.measure_rank(rank, ranks, address, config, device, self._note)
        return measured, ray.util.get_node_ip_address()

    @ray.method(concurrency_group="watch")
    def turns(self) -> tuple[int, int]:
        """Number of turns of pairs that are done, and number of all."""
        return self._turns

    def _note(self, done: int, of: int) -> None:
        self._turns = done, of
        self.heard()
