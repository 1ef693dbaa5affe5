"""Arguments of the planner, problem_for and plan_for that cannot be right are refused by name."""

import pytest
import torch
from planning import CONSTRAINTS, FOUR, LOOKUPS, MODEL, MODULE, planner
from torchrec import KeyedJaggedTensor
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.planner import Topology as TheirTopology

from shardcore.core.errors import ShardCoreError
from shardcore.torchrec.planner import ShardCorePlanner, plan_for, problem_for


def theirs(**given):
    return TheirTopology(world_size=4, compute_device="cuda", **{"hbm_cap": 1 << 30, **given})


def with_a(**fields):
    return {**CONSTRAINTS, "a": ParameterConstraints(**{"pooling_factors": [10.0], **fields})}


ASKED = {
    "topology": FOUR,
    "batch_size": 16,
    "constraints": CONSTRAINTS,
    "model": MODEL,
    "algorithm": "size_greedy",
}
OF_A_TABLE = {
    "pooling_factors": [None, 5.0, ["x"]],
    "sharding_types": ["row_wise", [None]],
    "compute_kernels": ["fused"],
}
WRONG = {
    "batch_size": [(value, "batch_size is {0!r}; it needs") for value in (0, -2, 16.0, "16", True)],
    "reserved": [(value, "reserved is {0!r}; it needs") for value in (-0.5, 1.0, "x", float("nan"))],
    "topology": [
        *[(value, "topology is {0!r}; it needs to be TorchRec's") for value in (None, 4, "x")],
        *[(theirs(hbm_cap=n), f"topology has hbm_cap {n} on rank 0") for n in (0, -1)],
    ],
    "seed": [(value, "seed is {0!r}; it needs to be") for value in (1.5, -1, None, "x", True)],
    "constraints": [
        ([ParameterConstraints()], "constraints is .* it needs to be ParameterConstraints by"),
        *[({"a": value}, "constraints of table 'a' is .* it needs to be Param") for value in (None, {})],
        *[
            (with_a(**{field: value}), f"table 'a' has {field} .* it needs to be a list")
            for field, values in OF_A_TABLE.items()
            for value in values
        ],
        *[
            (with_a(min_partition=x), "table 'a': min_partition is .* a number of columns")
            for x in ("x", 4.0)
        ],
    ],
}


@pytest.mark.parametrize(
    "name, value, said", [(name, *row) for name, values in WRONG.items() for row in values]
)
def test_an_argument_of_another_kind_is_named_with_its_value(name, value, said):
    of_theirs = {"topology": theirs()} if name == "reserved" else {}
    with pytest.raises(ShardCoreError, match=said.format(value)):
        ShardCorePlanner(**{**ASKED, **of_theirs, name: value}).plan(MODULE)


def test_a_share_is_reserved_of_torchrecs_topology_alone():
    with pytest.raises(ShardCoreError, match="reserved is 0.5; it is a share of TorchRec's topology"):
        ShardCorePlanner(**ASKED, reserved=0.5).plan(MODULE)


@pytest.mark.parametrize("module", [None, 3])
def test_what_is_no_module_is_refused(module):
    with pytest.raises(ShardCoreError, match=f"module is {module}; it needs to be a torch.nn.Module"):
        planner().plan(module)


def test_what_is_no_sharder_is_refused():
    with pytest.raises(ShardCoreError, match="sharders has 3; it needs TorchRec's sharders"):
        planner().plan(MODULE, [3])


@pytest.mark.parametrize("batch", [0, 1.5, "64", True])
def test_a_global_batch_that_is_none_is_refused_and_not_replaced(batch):
    for call in (
        lambda: problem_for(MODULE, FOUR, batch, LOOKUPS),
        lambda: plan_for(MODULE, FOUR, MODEL, LOOKUPS, global_batch=batch),
    ):
        with pytest.raises(ShardCoreError, match=f"global_batch (is )?{batch!r}"):
            call()


def test_an_empty_name_of_an_optimizer_is_refused():
    with pytest.raises(ShardCoreError, match="has optimizer ''; known are"):
        problem_for(MODULE, FOUR, 64, LOOKUPS, optimizer="")


@pytest.mark.parametrize(
    "lookups, said",
    [
        ({**LOOKUPS, ("absent", "f0"): 2.0}, r"lookups are for \('absent', 'f0'\), which the model does not"),
        ({**LOOKUPS, ("a", "f4"): 2.0}, r"lookups are for \('a', 'f4'\), which the model does not have"),
        ({**LOOKUPS, "f0": None}, "feature 'f0' of table 'a' has lookups None; it needs a number"),
        ({**LOOKUPS, "f0": True}, "feature 'f0' of table 'a' has lookups True; it needs a number"),
        (
            KeyedJaggedTensor(
                keys=list(LOOKUPS), values=torch.full((320,), 1.5), lengths=torch.ones(320).int()
            ),
            "feature 'f0' has ids of type float32; table 'a' needs whole numbers",
        ),
    ],
)
def test_lookups_that_name_no_table_or_are_no_numbers_are_refused(lookups, said):
    with pytest.raises(ShardCoreError, match=said):
        problem_for(MODULE, FOUR, 64, lookups)


@pytest.mark.parametrize("types", [["table_row_wise"], ["grid_shard"]])
def test_sharding_types_that_the_hosts_do_not_have_are_named(types):
    said = r"table 'a' has sharding_types .*; with 4 devices in all and 4 on a host ShardCore runs "
    with pytest.raises(ShardCoreError, match=said):
        planner(with_a(sharding_types=types)).plan(MODULE)
