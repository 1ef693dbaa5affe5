"""Gangs over the hosts of a box: plans replayed, and shuffled ranks found."""

from dataclasses import replace

import pytest
from boxes import boxed
from shapes import column, host_row, on_hosts, replica

from bench.hosts import Box, emulated_hosts
from shardcore.core.constraints import Constraints
from shardcore.core.errors import ShardCoreError
from shardcore.core.types import Plan, Problem, Setting, Shard, Table
from shardcore.io.measurements import ComputeRequest
from shardcore.measure import pairs
from shardcore.measure.replay import ReplayConfig, replay_all
from shardcore.measure.transport import Transport
from shardcore.step.kinds import CHANNELS, Channel
from shardcore.step.lower import lower

pytestmark = boxed
SLOW = Box(hosts=2, ranks_per_host=2, between_gbit_s=0.08)


@pytest.mark.long
def test_shuffled_ranks_are_found():
    with emulated_hosts(SLOW) as places:
        found = pairs.measure_pairs(
            4,
            pairs.PairConfig(sweeps=2, repeats=2, load_kib=256),
            Transport(places=[places[i] for i in (0, 2, 3, 1)]),
        )
    assert found.levels == [((0, 3), (1, 2))]
    [link] = found.links.outward
    assert link.gbps < 2 * SLOW.between_gbit_s / 8 and found.links.within_gbps > link.gbps
    assert 0.5 * SLOW.between_gbit_s / 8 < link.shared_gbps < 2 * SLOW.between_gbit_s / 8


@pytest.mark.long
def test_hosts_in_pods_are_found_with_the_links_of_each_level():
    box = Box(4, 2, between_gbit_s=0.04, pods=2, pod_gbit_s=0.4)
    dealt = (0, 5, 2, 7, 4, 1, 6, 3)
    with emulated_hosts(box) as places:
        config = pairs.PairConfig(message_kib=256, sweeps=2, repeats=2, load_kib=256)
        found = pairs.measure_pairs(8, config, Transport(places=[places[i] for i in dealt]))
    host_of, pod_of = ([places[i].host // each for i in dealt] for each in (1, 2))
    for groups, unit_of in zip(found.levels, (host_of, pod_of), strict=True):
        assert all(len({unit_of[rank] for rank in group}) == 1 for group in groups)
        assert len(groups) == len(set(unit_of))
    for link, gbit_s in zip(found.links.outward, (box.pod_gbit_s, box.between_gbit_s), strict=True):
        assert 0.5 * gbit_s / 8 < (link.shared_gbps or link.gbps) < 2 * gbit_s / 8


@pytest.mark.long
def test_plans_are_replayed_over_hosts_with_their_compute_measured_before():
    setting = Setting("cpu", 1024)
    # Far more lookups than the replica has, so that what else the machine does cannot hide it.
    tables = tuple(Table(f"t{i}", 2000, 32, pooling) for i, pooling in enumerate((80.0, 80.0, 2.0)))
    problem = Problem("p", tables, on_hosts("aabb", 1 << 30), 1024)
    config = ReplayConfig(repeats=4, warmups=1, batches=2, evict_bytes=1 << 20)
    apart = Plan((column(tables[0], 0), host_row(tables[1], (2, 3)), replica(tables[2], problem.topology)))
    near = Plan((column(tables[0], 0), column(tables[1], 0), replica(tables[2], problem.topology)))
    workloads = [lower(plan, problem) for plan in (apart, near)]
    reference = ComputeRequest((Shard.whole(tables[0]),), 1024), 1.0
    with emulated_hosts(SLOW) as places:
        both = replay_all(workloads, setting, config, Transport(places=places), reference)
        with pytest.raises(ShardCoreError, match="hosts a, b and speeds .1.0.; a replay needs one host"):
            replay_all(workloads, setting, config)
        alone = lower(near, Problem("p", tables, on_hosts("aaaa", 1 << 30), 1024))
        with pytest.raises(ShardCoreError, match="a replay needs the box's 2 hosts of 2 devices"):
            replay_all([alone], setting, config, Transport(places=places))
    for found, workload in zip(both, workloads, strict=True):
        assert found.slowdown == 1
        # A device that holds nothing but its replica computes less.
        assert found.forward_compute_ms[1] < found.forward_compute_ms[0]
        assert min(found.backward_compute_ms) > 0
        # Half of what device 0 sends goes to the other host. What exceeds a burst passes at the link's rate.
        n_bytes = workload.traffic[CHANNELS.index(Channel("all_to_all")), 0] / 2 - (64 << 10)
        assert max(found.forward_comm_ms) > 0.8 * 8e3 * n_bytes / (SLOW.between_gbit_s * 1e9)


@pytest.mark.long
@pytest.mark.parametrize(
    "box, on",
    [
        (SLOW, on_hosts("aabb", 1 << 30)),
        (
            Box(4, 1, SLOW.between_gbit_s, pods=2, pod_gbit_s=1.0),
            on_hosts(["p/a", "p/b", "q/c", "q/d"], 1 << 30, rows_over="pod"),
        ),
    ],
    ids=["hosts", "pods"],
)
def test_a_plan_with_towers_sends_less_to_other_hosts_or_pods(box, on):
    tables = tuple(Table(f"t{i}", 2000, 32, 2.0) for i in range(4))
    plain = Problem(
        "p",
        tables,
        on,
        4096,  # exchanges of tens of ms, so that what else the machine does cannot hide the difference
        constraints=Constraints(
            pinned=tuple((t.name, (d // 2 * 2, d // 2 * 2 + 1)) for d, t in enumerate(tables))
        ),
    )
    towered = replace(plain, job=replace(plain.job, tower_ratio=8.0))
    plan = Plan(tuple(column(t, d) for d, t in enumerate(tables)))
    took, config = [], ReplayConfig(repeats=3, warmups=1, batches=2, evict_bytes=1 << 20)
    with emulated_hosts(box) as places:
        for problem in (plain, towered):
            [found] = replay_all(
                [lower(plan, problem)], Setting("cpu", 4096), config, Transport(places=places)
            )
            took.append((max(found.forward_comm_ms), max(found.backward_comm_ms)))
    for without, with_towers in zip(*took, strict=True):
        assert 0.05 * without < with_towers < 0.7 * without
    rows = replace(host_row(tables[0], (0, 1)), kind=f"{on.row_domain}_row")
    mixed = Plan((rows, *plan.placements[1:]))
    with pytest.raises(ShardCoreError, match="towers, and shards of .*; a replay with towers needs one"):
        replay_all([lower(mixed, towered)], Setting("cpu", 4096), config)
