"""TorchRec's topology as ours: memory, hosts, links, pods, and defaults that are told."""

from dataclasses import replace

import pytest

pytest.importorskip("torchrec")

from torch import device, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed.planner import Topology as TheirTopology

from shardcore.core.errors import Infeasible, ShardCoreError
from shardcore.core.links import make_links
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Setting
from shardcore.cost.analytic import AnalyticModel
from shardcore.step.kinds import SHARDING_KINDS, pod_size
from shardcore.torchrec.planner import ShardCorePlanner
from shardcore.torchrec.topologies import POD_SIZE, require_pod_environment, topology_from_torchrec

GIB = 2**30


def planner(on, rows: int = 1000) -> ShardCorePlanner:
    module = nn.ModuleDict(
        {
            "m": EmbeddingBagCollection(
                device=device("meta"),
                tables=[
                    EmbeddingBagConfig(name="t", num_embeddings=rows, embedding_dim=64, feature_names=["f"])
                ],
            )
        }
    )
    made = ShardCorePlanner(
        on, 32, model=AnalyticModel(Setting("gpu", 64)), lookups={"f": 2.0}, algorithm="size_greedy"
    )
    made.plan(module)
    return made


def theirs(**given) -> TheirTopology:
    return TheirTopology(**{"world_size": 4, "local_world_size": 2, "compute_device": "cuda"} | given)


def test_bandwidths_that_are_given_are_those_of_the_links():
    # bytes a millisecond: 1e6 are a GB/s
    given = topology_from_torchrec(theirs(intra_host_bw=300e6, inter_host_bw=25e6))
    assert given.links == make_links(within_host=300, between_hosts=25)
    usual = topology_from_torchrec(theirs())
    assert usual.links == ()
    assert [line for line in planner(theirs(intra_host_bw=300e6)).unpriced if "_bw" in line] == [
        "inter_host_bw of the topology is TorchRec's default and not used: exchanges are priced as the cost "
        "model knows them"
    ]


def test_bandwidths_by_collective_are_refused():
    from torchrec.distributed.planner.types import BasicCommsBandwidths

    class PerCollective(BasicCommsBandwidths):
        pass

    with pytest.raises(ShardCoreError, match="topology has generalized_comms_bandwidths PerCollective; "):
        topology_from_torchrec(theirs(generalized_comms_bandwidths=PerCollective()))


@pytest.mark.parametrize("kind", ["cuda", "mtia"])
def test_memory_of_an_accelerator_is_its_own(kind):
    on = theirs(compute_device=kind, hbm_cap=3 * GIB, ddr_cap=100 * GIB)
    assert {d.memory_bytes for d in topology_from_torchrec(on).devices} == {3 * GIB}


def test_a_model_of_another_type_of_device_is_told():
    line = "devices are of type mtia; the cost model was measured on gpu"
    assert line in planner(theirs(compute_device="mtia", hbm_cap=GIB)).unpriced
    assert line not in planner(theirs(hbm_cap=GIB)).unpriced


def test_a_capacity_that_nobody_gave_is_told():
    line = "devices count as 32 GiB, TorchRec's default, which holds where hbm_cap is not given"
    assert any(line in said for said in planner(theirs()).unpriced)
    assert not any(line in said for said in planner(theirs(hbm_cap=80 * GIB)).unpriced)
    with pytest.raises(
        Infeasible,
        match="devices count as 32 GiB, TorchRec's default, which holds where "
        "hbm_cap is not given: .*; of a device's memory, 15% stays free",
    ):
        planner(theirs(), rows=1_000_000_000)
    with pytest.raises(Infeasible, match="host memory; of a device's memory, 15% stays free .reserved.$"):
        planner(theirs(hbm_cap=GIB), rows=1_000_000_000)


def test_a_pod_of_one_host_is_a_host():
    assert topology_from_torchrec(theirs(pod_size=1)) == topology_from_torchrec(theirs())


def test_pods_of_several_hosts_are_pods(monkeypatch):
    monkeypatch.setenv(POD_SIZE, "2")
    ours = topology_from_torchrec(theirs(world_size=8, pod_size=2))
    assert ours.hosts == ("pod-0/host-0", "pod-0/host-1", "pod-1/host-2", "pod-1/host-3")
    assert ours.devices_by_domain("within_pod") == ((0, 1, 2, 3), (4, 5, 6, 7)) and pod_size(ours) == 2


def test_pods_that_hosts_do_not_tile_are_refused_with_the_sizes_that_do():
    with pytest.raises(ShardCoreError, match="pod_size 3 and 4 hosts of 2 devices; .* one size: 1 or 2 or 4"):
        topology_from_torchrec(theirs(world_size=8, pod_size=3))


def test_pods_of_the_environment_need_to_be_those_of_the_topology(monkeypatch):
    """TorchRec's groups follow the environment alone."""
    ours = Topology(tuple(Device(GIB, host=f"h{d // 2}") for d in range(4)))
    monkeypatch.setenv(POD_SIZE, "1")
    for on in (ours, theirs()):
        planner(on)
    monkeypatch.setenv(POD_SIZE, "2")
    for on in (ours, theirs()):
        with pytest.raises(
            ShardCoreError,
            match="environment has TORCHREC_RESOLVED_POD_SIZE=2: TorchRec would divide rows over 2 hosts of 2 "
            "devices, and the topology over 1: set it to 1, or give Topology.pod_size=2.",
        ):
            planner(on)
    in_pods = Topology(tuple(Device(GIB, host=f"p{d // 4}/h{d // 2}") for d in range(8)))
    assert planner(in_pods).problem.topology.rows_over == "pod"
    with pytest.raises(ShardCoreError, match="and the topology over 1"):
        planner(replace(in_pods, rows_over="host"))
    monkeypatch.setenv(POD_SIZE, "3")
    with pytest.raises(ShardCoreError, match="and the topology over 1 or 2: set it to 1 or 2"):
        planner(in_pods)


def test_without_the_variable_rows_are_divided_over_hosts_and_that_is_told(monkeypatch):
    monkeypatch.delenv(POD_SIZE, raising=False)
    for on in (
        theirs(world_size=8, pod_size=2),
        Topology(tuple(Device(GIB, host=f"p{d // 4}/h{d // 2}") for d in range(8))),
    ):
        found = planner(on)
        assert found.problem.topology.rows_over is None and not SHARDING_KINDS["pod_row"].device_groups(
            found.problem.topology
        )
        assert any(
            "rows are divided over hosts, as TorchRec does without TORCHREC_RES" in x for x in found.unpriced
        )
    assert not any("divided over" in x for x in planner(theirs(world_size=8)).unpriced)
    in_pods = replace(found.problem.topology, rows_over="pod")
    assert any(
        "the job needs TORCHREC_RESOLVED_POD_SIZE=2, which is not set" in x for x in planner(in_pods).unpriced
    )
    for placements in ((), found.our_plan.placements):
        with pytest.raises(
            ShardCoreError, match="over pods of 2 hosts, and .* is not set, so TorchRec would divide"
        ):
            require_pod_environment(in_pods, placements)
    require_pod_environment(replace(in_pods, rows_over=None), found.our_plan.placements)
