import pytest

from shardcore.types import ShardCoreError
from tasks.measure import MeasureConfig, actor_count, cluster_device, rank_count

pytestmark = pytest.mark.usefixtures("cluster")


def test_devices_and_ranks_follow_from_the_cluster():
    assert cluster_device() == "cpu"
    assert actor_count(MeasureConfig(), "cpu") == 2 and actor_count(MeasureConfig(actors=5), "cpu") == 5
    assert rank_count(MeasureConfig(), "cpu", 64) == 2  # on one core
    assert rank_count(MeasureConfig(hosts=2), "cpu", 64) == 2  # on one core each
    assert rank_count(MeasureConfig(ranks=4), "cpu", 64) == 4


@pytest.mark.parametrize("config, said", [(MeasureConfig(ranks=3), "ranks is 3, which does not divide the batch of 64"),
                                          (MeasureConfig(hosts=3), "hosts is 3; the Ray cluster has 2")])
def test_ranks_that_cannot_be_are_named(config, said):
    with pytest.raises(ShardCoreError, match=said):
        rank_count(config, "cpu", 64)


@pytest.mark.parametrize("values", [{"chunk": 0}, {"hosts": 0}, {"hang_s": 0}, {"seed": -1}, {"ranks": 3, "hosts": 2}])
def test_bad_values_are_refused(values):
    with pytest.raises(ShardCoreError, match="measure"):
        MeasureConfig(**values)
