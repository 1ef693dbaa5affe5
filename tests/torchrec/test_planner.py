"""Planning from a TorchRec model: its tables as a problem, and the planner in the place of TorchRec's."""

import dataclasses
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("torchrec")
sys.path.append(str(Path(__file__).parent))

import training
import wrapped_training
from laws import by_hand
from planning import CONSTRAINTS, FOUR, LOOKUPS, MODEL, MODULE, planner, table_in
from shapes import column
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    JaggedTensor,
    KeyedJaggedTensor,
)
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.planner import Topology as TheirTopology
from torchrec.distributed.types import ShardingPlan, ShardingPlanner
from torchrec.modules.embedding_configs import DataType

from shardcore.core.constraints import Constraints
from shardcore.core.errors import Infeasible, SettingMismatch, ShardCoreError
from shardcore.core.job import Job
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Plan, Setting
from shardcore.cost import neural
from shardcore.plans.survive import prepare_plans, write_prepared_plan
from shardcore.search import Budget
from shardcore.step.lower import lower
from shardcore.tables.public import DEFAULT_ACCESS
from shardcore.torchrec.plan_files import require_same_tables
from shardcore.torchrec.planner import ShardCorePlanner, plan_for, problem_for, topology_from_torchrec
from shardcore.torchrec.sharding_plan import from_torchrec, to_torchrec


def test_problem_from_given_lookups():
    found = problem_for(MODULE, FOUR, 64, LOOKUPS)
    assert {t.name: (t.rows, t.dim, t.pooling) for t in found.tables} == {
        "a": (24, 16, 10.0),
        "b": (50, 8, 3.5),
        "left.c": (40, 32, 10.0),
        "d": (10, 8, 4.0),
        "inner.right.c": (17, 12, 1.0),
        "e": (33, 20, 1.5),
    }
    assert {t.access for t in found.tables} == {DEFAULT_ACCESS}
    assert {t.collection for t in found.tables} == {"left", "inner.right"}
    with pytest.raises(ShardCoreError, match="feature 'f2' of table 'b' has no lookups"):
        problem_for(MODULE, FOUR, 64, {k: v for k, v in LOOKUPS.items() if k != "f2"})


def test_problem_from_data():
    batches = [training._batch(seed) for seed in range(16)]
    found = {t.name: t for t in problem_for(MODULE, FOUR, 64, batches).tables}
    ids = torch.cat([b["f1"].values() for b in batches] + [b["f2"].values() for b in batches]).numpy()
    assert found["b"].pooling == len(ids) / 64
    assert found["b"].access.batch == 64
    _, counts = np.unique(ids, return_counts=True)
    assert found["b"].access.bins[0] == pytest.approx((counts == 1).mean())
    assert found["a"].pooling == found["left.c"].pooling  # one feature
    with pytest.raises(
        ShardCoreError, match="lookups has 60 samples of feature 'f0'; it needs a global batch of the mod"
    ):
        problem_for(MODULE, FOUR, 64, batches[1:])
    other = EmbeddingBagCollection(
        device=torch.device("meta"),
        tables=[EmbeddingBagConfig(name="t", num_embeddings=4, embedding_dim=4, feature_names=["nowhere"])],
    )
    with pytest.raises(ShardCoreError, match="feature 'nowhere' of table 't' is not in the data"):
        problem_for(other, FOUR, 64, batches)


def test_deduplicated_features_have_the_factor_of_the_data_and_stay_together():
    # Each sample twice: as two of a session.
    batches = [training._batch(seed) for seed in range(8)]
    twice = [
        KeyedJaggedTensor.from_jt_dict(
            {
                key: JaggedTensor.from_dense([row for row in jagged.to_dense() for _ in range(2)])
                for key, jagged in batch.to_dict().items()
            }
        )
        for batch in batches
    ]
    plain = problem_for(MODULE, FOUR, 64, twice)
    found = problem_for(
        MODULE,
        FOUR,
        64,
        iter(twice),
        deduplicated=[["f1", "f2"], ["f3"]],
        constraints=Constraints(reserved_bytes=1),
    )
    dedup = {t.name: t.dedup for t in found.tables}
    assert dedup["b"] == dedup["e"] >= 2 and dedup["d"] >= 2 and dedup["a"] == dedup["left.c"] == 1
    assert [dataclasses.replace(t, dedup=1.0) for t in found.tables] == list(plain.tables)
    # Only f3's group has a single table.
    assert found.constraints == Constraints(reserved_bytes=1, together=(("b", "e"),))


@pytest.mark.parametrize(
    "lookups, groups, said",
    [
        (LOOKUPS, [["f1"]], r"deduplicated has \['f1'\]; its factor is read from batches of data"),
        ([training._batch(seed) for seed in range(16)], [["f1"]], r"table 'b' has features \['f1', 'f2'\]"),
        ([training._batch(seed) for seed in range(16)], [["f9"]], r"deduplicated has \['f9'\]; no table has"),
    ],
)
def test_groups_that_no_data_or_table_has_are_refused(lookups, groups, said):
    with pytest.raises(ShardCoreError, match=said):
        problem_for(MODULE, FOUR, 64, lookups, deduplicated=groups)


@pytest.mark.parametrize(
    "lookups, said",
    [
        (None, "lookups has None; it needs KeyedJaggedTensors, or mean lookups by feature"),
        ([(1, 2)], r"lookups has \(1, 2\); it needs KeyedJaggedTensors"),
        ({**LOOKUPS, "f2": [1.0]}, r"feature 'f2' of table 'b' has lookups \[1.0\]; it needs a number"),
    ],
)
def test_refuses_lookups_that_are_none(lookups, said):
    with pytest.raises(ShardCoreError, match=said):
        problem_for(MODULE, FOUR, 64, lookups)


def test_a_single_batch_may_be_all_data():
    assert problem_for(MODULE, FOUR, training.BATCH, training._batch(0)) == problem_for(
        MODULE, FOUR, training.BATCH, [training._batch(0)]
    )


def test_refuses_ids_that_a_table_lacks():
    small = EmbeddingBagCollection(
        device=torch.device("meta"),
        tables=[EmbeddingBagConfig(name="t", num_embeddings=4, embedding_dim=4, feature_names=["f1"])],
    )
    with pytest.raises(
        ShardCoreError,
        match="feature 'f1' has ids .* to .*, table 't' rows 0 to 3; give ids as the collection",
    ):
        problem_for(small, FOUR, 64, [training._batch(seed) for seed in range(16)])


@pytest.mark.parametrize("rows", [3, 4])
def test_the_last_row_is_the_last_id(rows):
    module = EmbeddingBagCollection(
        device=torch.device("meta"),
        tables=[EmbeddingBagConfig(name="t", num_embeddings=rows, embedding_dim=4, feature_names=["f"])],
    )
    data = KeyedJaggedTensor(
        keys=["f"], values=torch.tensor([0, 3, 3, 3]), lengths=torch.tensor([1, 3, 0, 0])
    )
    if rows == 3:
        with pytest.raises(ShardCoreError, match="'f' has ids 0 to 3, table 't' rows 0 to 2"):
            problem_for(module, FOUR, 4, data)
    else:
        [table] = problem_for(module, FOUR, 4, data).tables
        # seen once, and three times
        assert (table.rows, table.pooling, table.access.bins[:3]) == (4, 1.0, (0.5, 0.0, 0.5))


def test_refuses_models_it_cannot_price():
    with pytest.raises(ShardCoreError, match="no EmbeddingBagCollection"):
        problem_for(torch.nn.Linear(1, 1), FOUR, 64, {})
    with pytest.raises(ShardCoreError, match="table 't' has data type INT8; known are FP32, FP16, BF16"):
        problem_for(table_in(DataType.INT8), FOUR, 64, LOOKUPS)


@pytest.mark.parametrize("data_type, precision", [(DataType.FP16, "fp16"), (DataType.BF16, "bf16")])
def test_weights_keep_their_precision_and_need_a_model_of_it(data_type, precision):
    module = table_in(data_type)
    found = problem_for(module, FOUR, 64, LOOKUPS, "partial_rowwise_adam")
    assert (found.precision, found.optimizer) == (precision, "partial_rowwise_adam")
    with pytest.raises(SettingMismatch, match=f"than the cost model: precision: {precision} against fp32;"):
        plan_for(module, FOUR, MODEL, LOOKUPS, budget=Budget(evals=10))


def test_plan_for_a_model():
    plan, problem = plan_for(MODULE, FOUR, MODEL, LOOKUPS, budget=Budget(evals=2000))
    assert problem.global_batch == 64
    assert lower(plan, problem)
    with pytest.raises(ShardCoreError, match="algorithm 'best' is not known; there are .*anneal"):
        plan_for(MODULE, FOUR, MODEL, LOOKUPS, algorithm="best")
    with pytest.raises(ShardCoreError, match="profile 'model/' is not known; known are "):
        plan_for(MODULE, FOUR, "model/", LOOKUPS)


def test_planner_in_the_place_of_torchrecs():
    made = planner(algorithm="size_greedy")  # it makes no replicas, whose kernel is another
    plan = made.plan(MODULE, [])
    assert isinstance(made, ShardingPlanner)
    assert from_torchrec(plan, made.problem, MODULE).placements == made.our_plan.placements
    assert {t.name: t.pooling for t in made.problem.tables}["b"] == 3.5
    assert {s.compute_kernel for m in plan.plan.values() for s in m.values()} == {"fused"}


def test_planner_reads_torchrecs_topology():
    theirs = TheirTopology(world_size=4, local_world_size=2, compute_device="cuda", hbm_cap=10**9)
    ours = topology_from_torchrec(theirs, reserved=0.25)
    assert [(d.memory_bytes, d.host) for d in ours.devices] == [
        (750_000_000, f"host-{i // 2}") for i in range(4)
    ]
    assert (
        topology_from_torchrec(TheirTopology(world_size=2, compute_device="cpu", ddr_cap=10**10))
        .devices[0]
        .memory_bytes
        == 10**10
    )
    assert problem_for(MODULE, theirs, 64, LOOKUPS).topology == topology_from_torchrec(theirs, reserved=0.15)
    measured = Job(dense_bytes=10**6)
    assert problem_for(MODULE, theirs, 64, LOOKUPS, job=measured).topology == topology_from_torchrec(theirs)
    assert planner(topology=theirs, job=measured).topology == topology_from_torchrec(theirs)
    assert planner(topology=theirs, job=measured, reserved=0.25).topology == ours
    plan = planner(topology=theirs).plan(MODULE)
    placements = {
        str(p.placement)
        for m in plan.plan.values()
        for s in m.values()
        if s.sharding_spec
        for p in s.sharding_spec.shards
    }
    assert placements <= {"rank:0/cuda:0", "rank:1/cuda:1", "rank:2/cuda:0", "rank:3/cuda:1"}


def test_planner_says_what_is_missing():
    with pytest.raises(
        ShardCoreError, match="table 'e' has no constraints; it needs .*mean lookups per sample of f2"
    ):
        planner({k: v for k, v in CONSTRAINTS.items() if k != "e"}).plan(MODULE)
    with pytest.raises(
        ShardCoreError,
        match=r"'a' has pooling_factors \[1.0, 2.0\] for its 1 features "
        "f0; it needs one",
    ):
        planner({**CONSTRAINTS, "a": ParameterConstraints(pooling_factors=[1.0, 2.0])}).plan(MODULE)
    measured = neural.NeuralModel(MODEL.setting, {}, {"ranges": {}})
    with pytest.raises(
        SettingMismatch,
        match="batch_size 16 on 2 devices: global batch 32 was not measured; .* measure with --batch 32",
    ):
        ShardCorePlanner(Topology((Device(10**9),) * 2), 16, CONSTRAINTS, model=measured).plan(MODULE)


def test_a_planner_takes_any_batch_that_its_model_prices():
    two = planner(topology=Topology((Device(10**9),) * 2))
    two.plan(MODULE)
    assert two.problem.global_batch == 32 and MODEL.setting.batch == 64
    _, problem = plan_for(MODULE, FOUR, MODEL, LOOKUPS, "size_greedy", global_batch=32)
    assert problem.global_batch == 32


WRAPPED = wrapped_training.Model()


def test_wrapped_collections_are_planned_by_the_path_of_what_wraps_them():
    made = wrapped_training.planner(2)
    plan = made.plan(WRAPPED)
    assert set(plan.plan) == wrapped_training.PATHS
    # TorchRec remaps ids only where rows are divided over all ranks.
    types = {name: s.sharding_type for module in plan.plan.values() for name, s in module.items()}
    assert types["e"] == types["g"] == "row_wise" and {types["c"], types["d"]} == {"table_wise"}
    said = [line for line in made.unpriced if "is priced as the collection within" in line]
    assert [line.split("'")[1] for line in said] == ["processed", "collided", "collided_rows"]
    assert from_torchrec(plan, made.problem, WRAPPED).placements == made.our_plan.placements
    require_same_tables(plan, WRAPPED, "the plan")
    inner = ShardingPlan({**plan.plan, "collided._embedding_module": plan.plan["collided"]})
    with pytest.raises(ShardCoreError, match="shards module 'collided._embedding_module', which is no coll"):
        require_same_tables(inner, WRAPPED, "the plan")


def test_a_plan_that_managed_collision_cannot_run_is_refused():
    with pytest.raises(
        ShardCoreError,
        match="table 'e' is in 'collided', .* which TorchRec shards row_wise "
        "only; constraints have it run by column: allow row",
    ):
        wrapped_training.planner(2, {"e": ["column_wise"]}).plan(WRAPPED)
    problem = problem_for(
        WRAPPED, Topology((Device(10**9),) * 2), 16, dict.fromkeys(("f0", "f1", "f2", "f3", "r0", "r1"), 2.0)
    )
    whole = Plan(tuple(column(t, 0) for t in problem.tables))
    free = dataclasses.replace(problem, constraints=Constraints())
    with pytest.raises(
        ShardCoreError,
        match="plan shards table 'e' table_wise; TorchRec shards module "
        "'collided', ManagedCollisionEmbeddingBagCollection, row_wise only",
    ):
        to_torchrec(whole, free, WRAPPED, "cpu")


def test_managed_collision_on_one_device_is_refused_by_its_own_rule():
    """No kind divides rows there. The user gave no kinds, so none of theirs are named."""
    with pytest.raises(
        ShardCoreError,
        match="^table 'e' is in 'collided', a ManagedCollisionEmbeddingBag"
        "Collection, which TorchRec shards row_wise only; the topology "
        "has 1 device, and it needs 2 or more to divide rows$",
    ):
        wrapped_training.planner(1).plan(WRAPPED)
    with pytest.raises(ShardCoreError, match="the topology has 1 device, and it needs 2 or more"):
        plan_for(
            WRAPPED,
            Topology((Device(10**9),)),
            MODEL,
            dict.fromkeys((*LOOKUPS, "f3", "r0", "r1"), 2.0),
            constraints=Constraints(kinds=(("e", ("row",)), ("g", ("row",)))),
        )


def test_a_wrapped_collection_without_the_sharder_of_its_wrapper_is_refused_by_name():
    plain, rows, *_ = wrapped_training.sharders()
    with pytest.raises(
        ShardCoreError,
        match="module 'processed' is an FeatureProcessedEmbeddingBagColl.*,"
        " which no sharder takes; .*add FeatureProcessedEmbeddingBagCollectionSharder",
    ):
        wrapped_training.planner(2).plan(WRAPPED, [plain, rows])


def test_a_module_that_a_sharder_takes_and_no_plan_has_is_refused():
    from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection

    fused = FusedEmbeddingBagCollection(
        [EmbeddingBagConfig(name="u", num_embeddings=4, embedding_dim=4, feature_names=["f"])],
        torch.optim.SGD,
        {"lr": 0.1},
        device=torch.device("cpu"),
    )
    constraints = {"t": ParameterConstraints(pooling_factors=[1.0])}
    with pytest.raises(
        ShardCoreError,
        match=r"module 'inner.fused' is a FusedEmbeddingBagCollection; ShardCore plans EmbeddingBagCollection, ",
    ):
        planner(constraints).plan(
            torch.nn.ModuleDict(
                {"bags": table_in(DataType.FP32), "inner": torch.nn.ModuleDict({"fused": fused})}
            )
        )


def test_a_collection_used_twice_is_planned_once():
    bags = table_in(DataType.FP32)
    twice = torch.nn.ModuleDict({"user": bags, "item": bags})
    constraints = {"t": ParameterConstraints(pooling_factors=[1.0])}
    assert planner(constraints).plan(twice).plan.keys() == {"user"}


class OwnCollection(EmbeddingBagCollection):
    pass


def test_other_modules_with_tables_are_refused_by_name():
    from torchrec.modules.embedding_tower import EmbeddingTower

    tower = EmbeddingTower(table_in(DataType.FP32), torch.nn.Identity())
    own = OwnCollection(table_in(DataType.FP32).embedding_bag_configs(), device=torch.device("meta"))
    for module, kind in ((tower, "EmbeddingTower"), (own, "OwnCollection")):
        with pytest.raises(ShardCoreError, match=f"module 'inner' is a {kind}; ShardCore plans "):
            planner().plan(torch.nn.ModuleDict({"inner": module}))


def test_a_collection_that_no_sharder_takes_is_refused_by_name():
    from torchrec.distributed.embedding import EmbeddingCollectionSharder

    constraints = {"t": ParameterConstraints(pooling_factors=[1.0])}
    one = torch.nn.ModuleDict({"bags": table_in(DataType.FP32)})
    with pytest.raises(
        ShardCoreError,
        match="module 'bags' is an EmbeddingBagCollection, which no sharder "
        "takes; there are .'EmbeddingCollectionSharder'.*EmbeddingBagCollectionSharder",
    ):
        planner(constraints).plan(one, [EmbeddingCollectionSharder()])
    assert planner(constraints).plan(one).plan.keys() == {"bags"}


def test_a_planner_tells_what_was_not_measured():
    """Devices of another type, and what lies beyond the measured range."""
    of = Setting("cpu-of-yesterday", 256)
    model = neural.NeuralModel(of, by_hand().weights, {"ranges": {"shard_rows": [1, 40]}})
    made = ShardCorePlanner(
        Topology((Device(10**9),)),
        256,
        model=model,
        lookups=dict.fromkeys(LOOKUPS, 2.0),
        algorithm="size_greedy",
    )
    made.plan(MODULE)
    assert made.unpriced[1:] == [
        "devices are of type cuda; the cost model was measured on cpu-of-yesterday",
        "extrapolated: table 'b' has 50 rows; most measured 40",
        "extrapolated: the topology names no hardware: prices are those of cpu-of-yesterday",
    ]


def test_features_may_be_in_tensors_of_their_own():
    batches = [training._batch(seed) for seed in range(16)]
    apart = [
        KeyedJaggedTensor.from_jt_dict({key: batch[key] for key in keys})
        for batch in batches
        for keys in (["f0", "f3"], ["f1", "f2", "f4"], ["f5", "f6"])
    ]
    assert problem_for(MODULE, FOUR, 64, apart) == problem_for(MODULE, FOUR, 64, batches)
    with pytest.raises(ShardCoreError, match="has 60 samples of feature 'f0'; it needs a global batch"):
        problem_for(MODULE, FOUR, 64, apart[1:])
    with pytest.raises(ShardCoreError, match="68 samples of feature 'f2' and 64 of 'f1'; table 'b' needs as"):
        problem_for(MODULE, FOUR, 64, [*batches, KeyedJaggedTensor.from_jt_dict({"f2": batches[0]["f2"]})])


def test_rows_of_managed_collision_that_ranks_do_not_divide_are_refused_with_rows_that_they_do():
    from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
    from torchrec.modules.mc_modules import (
        DistanceLFU_EvictionPolicy,
        ManagedCollisionCollection,
        MCHManagedCollisionModule,
    )

    def plan(rows: int, ranks: int) -> str:
        bags = EmbeddingBagCollection(
            device=torch.device("meta"),
            tables=[EmbeddingBagConfig(name="t", num_embeddings=rows, embedding_dim=4, feature_names=["f"])],
        )
        collided = MCHManagedCollisionModule(
            zch_size=rows,
            device=torch.device("meta"),
            eviction_interval=2,
            eviction_policy=DistanceLFU_EvictionPolicy(),
        )
        module = ManagedCollisionEmbeddingBagCollection(
            bags, ManagedCollisionCollection({"t": collided}, bags.embedding_bag_configs())
        )
        made = planner(
            {}, TheirTopology(ranks, "cuda", hbm_cap=10**9), lookups={"f": 2.0}, algorithm="size_greedy"
        )
        return made.plan(module).plan[""]["t"].sharding_type

    with pytest.raises(
        ShardCoreError, match="row_wise only; .*the last of 4 devices would have none: give it 7 rows"
    ):
        plan(5, 4)
    assert plan(7, 4) == "row_wise"


@pytest.mark.parametrize("types", [None, ["table_wise"]])
@pytest.mark.parametrize("reserved", [None, 0.5, 0.0])
def test_the_memory_that_a_refusal_asks_for_is_enough_and_near_the_least(types, reserved):
    """A reserve is a share, so it grows with the memory."""
    module = EmbeddingBagCollection(
        device=torch.device("meta"),
        tables=[EmbeddingBagConfig(name="t", num_embeddings=10**8, embedding_dim=128, feature_names=["f"])],
    )
    asked = {"t": ParameterConstraints(pooling_factors=[2.0], sharding_types=types)}

    def plan(gib: float, ranks: int = 2):
        on = TheirTopology(ranks, "cuda", hbm_cap=int(gib * 2**30))
        planner(asked, on, reserved=reserved, algorithm="size_greedy").plan(module)

    with pytest.raises(Infeasible) as raised:
        plan(16)
    more = float(re.search(r"fit with ([\d.]+) GiB more per device", str(raised.value))[1])
    plan(16 + more)
    with pytest.raises(Infeasible):
        plan(16 + more * 0.9)
    if found := re.search(r"or (\d+) more devices?", str(raised.value)):
        plan(16, 2 + int(found[1]))


def test_a_reserve_is_told_as_it_is():
    one = EmbeddingBagCollection(
        device=torch.device("meta"),
        tables=[EmbeddingBagConfig(name="a", num_embeddings=24, embedding_dim=16, feature_names=["f0"])],
    )
    with pytest.raises(Infeasible, match="of a device's memory, 99.9% stays free"):
        on = TheirTopology(2, "cuda", hbm_cap=10**5)
        planner({"a": ParameterConstraints(pooling_factors=[2.0])}, on, reserved=0.999).plan(one)


def test_a_gradient_of_weights_that_nobody_reads_is_named_on_gpus():
    bag = EmbeddingBagConfig(name="t", num_embeddings=8, embedding_dim=8, feature_names=["f"])
    for weighted, device, is_named in ((True, "cuda", True), (True, "cpu", False), (False, "cuda", False)):
        model = torch.nn.Sequential(
            EmbeddingBagCollection(tables=[bag], is_weighted=weighted, device=torch.device("meta"))
        )
        ours = planner(topology=TheirTopology(2, device), lookups={"f": 1.0}, constraints=None)
        ours.plan(model)
        found = [line for line in ours.unpriced if "backward computes their gradient" in line]
        assert len(found) == is_named and all("module '0' has weights of ids" in line for line in found)


@pytest.fixture
def one_rank(tmp_path):
    """A process group of this process alone."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield torch.distributed.GroupMember.WORLD
    torch.distributed.destroy_process_group()


def test_a_search_that_was_started_gives_the_plan_once(one_rank):
    """The second plan is searched again, with the same result."""
    made, direct = planner(), planner().plan(MODULE)
    searched = []
    search, made._search_plan = made._search_plan, lambda p: searched.append(p) or search(p)
    made.start_plan(training.Model())
    assert made.collective_plan(MODULE, pg=one_rank).plan == direct.plan
    assert len(searched) == 1 and made.our_plan is not None
    assert made.collective_plan(MODULE, pg=one_rank).plan == direct.plan and len(searched) == 2


def test_a_search_that_was_started_for_other_tables_is_refused(one_rank):
    made = planner(constraints=None, lookups={"f0": 1.0})
    made.start_plan(torch.nn.Sequential(table_in(DataType.FP32)))
    with pytest.raises(ShardCoreError, match="the plan shards module '0', which is no collection"):
        made.collective_plan(MODULE, pg=one_rank)


def test_an_error_of_a_search_that_was_started_comes_with_its_plan(one_rank):
    made = planner(lookups={"f0": 1.0})
    made.start_plan(MODULE)
    with pytest.raises(ShardCoreError, match="feature 'f2' of table 'b' has no lookups|has no lookups"):
        made.collective_plan(MODULE, pg=one_rank)


def test_a_restarted_job_takes_the_plan_that_was_prepared_for_it(tmp_path):
    """Four ranks lose one. The planner of the three that are left finds no plan for two."""
    whole, three = planner(), dataclasses.replace(FOUR, devices=FOUR.devices[:3])
    plan = whole.plan(MODULE) and whole.our_plan
    few = Budget(evals=500)
    for prepared in prepare_plans(plan, whole.problem, MODEL, "rank", budget=few):
        write_prepared_plan(tmp_path, prepared)
    again = planner(topology=three, prepared=tmp_path)
    assert set(again.plan(MODULE).plan) == {"left", "inner.right"}
    assert again.our_plan.provenance["prepared"].startswith(str(tmp_path))
    assert len(again.problem.topology) == 3
    searched = planner(topology=dataclasses.replace(FOUR, devices=FOUR.devices[:2]), prepared=tmp_path)
    searched.plan(MODULE)
    assert "prepared" not in searched.our_plan.provenance
