"""DMPCollection trains our grouped plans as unsharded models train.

A group's gradient is the mean of its ranks' (TorchRec divides by the size of the group, not of the world).
With SGD the mean of the groups' steps is therefore the step of the mean gradient. So replicas that average
after each step are one unsharded model of all data. Otherwise they are not: Adagrad divides by roots of sums
of each group's own squares, and steps between two synchronisations start from other weights. What they are
then is R unsharded models, each of its group's data, that average weights and sums.
"""

import sys
from pathlib import Path

import pytest

pytest.importorskip("torchrec")
sys.path.append(str(Path(__file__).parent))

import grouped_training as training

from shardcore.step.sharding_groups import Grouping, replica_devices

ROUNDING = 1e-5


def require_trained(n_hosts: int, per_host: int, groupings: list[Grouping]) -> None:
    given = training.problem(n_hosts, per_host)
    optimizers = ("exact_sgd", "rowwise_adagrad")
    found = iter(training.compare(given, groupings, optimizers))
    for grouping in groupings:
        of_rank = {r: alike for alike in replica_devices(given.topology, grouping) for r in alike}
        for optimizer in optimizers:
            apart = next(found)
            assert apart.replicas < ROUNDING, (grouping, optimizer)
            assert (apart.one < ROUNDING) == (optimizer == "exact_sgd" and grouping.sync_every == 1)
            assert [alike for _, alike in apart.ranks] == [of_rank[r] for r in range(len(given.topology))]


@pytest.mark.long
def test_groups_of_two_and_of_one_on_four_ranks_train_as_unsharded():
    require_trained(
        2,
        2,
        [
            Grouping(2, "contiguous", 1),
            Grouping(2, "strided", 1),
            Grouping(2, "strided", 2),
            Grouping(1, "contiguous", 2),
        ],
    )


@pytest.mark.long
@pytest.mark.parametrize("hosts, layout", [(2, "strided"), (2, "contiguous")])
def test_groups_of_four_on_eight_ranks_train_as_unsharded(hosts, layout):
    """The first has rows divided over a host of the group."""
    require_trained(hosts, 8 // hosts, [Grouping(4, layout, 1), Grouping(4, layout, 3)])
