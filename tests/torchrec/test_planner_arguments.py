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


@pytest.mark.parametrize(
    "given, said",
    [
        *[
            ({"batch_size": value}, said)
            for value, said in [
                (0, "batch_size is 0; it needs 1 or more"),
                (-2, "batch_size is -2"),
                (16.0, "batch_size is 16.0"),
                ("16", "batch_size is '16'; it needs to be a whole number"),
                (True, "batch_size is True"),
            ]
        ],
        *[
            ({"topology": theirs(), "reserved": value}, said)
            for value, said in [
                (-0.5, "reserved is -0.5; it needs to be a share"),
                (1.0, "reserved is 1.0"),
                ("x", "reserved is 'x'"),
                (float("nan"), "reserved is nan"),
                (None, "reserved is None; it needs to be a number"),
            ]
        ],
        ({"reserved": 0.5}, "reserved is 0.5; it is a share of TorchRec's topology"),
        *[
            ({"topology": value}, f"topology is {value!r}; it needs to be TorchRec's")
            for value in (None, 4, "x")
        ],
        *[
            ({"topology": theirs(hbm_cap=value)}, f"topology has hbm_cap {value} on rank 0")
            for value in (0, -1)
        ],
        *[({"seed": value}, f"seed is {value!r}; it needs to be") for value in (1.5, -1, None, "x", True)],
        ({"constraints": [ParameterConstraints()]}, "constraints is .* it needs to be ParameterConstraints"),
        *[
            (
                {"constraints": {"a": value}},
                "constraints of table 'a' is .* it needs to be ParameterConstraints",
            )
            for value in (None, {})
        ],
        *[
            (
                {"constraints": with_a(**fields)},
                f"table 'a' has {next(iter(fields))} .* it needs to be a list",
            )
            for fields in (
                {"pooling_factors": None},
                {"pooling_factors": 5.0},
                {"pooling_factors": ["x"]},
                {"sharding_types": "row_wise"},
                {"sharding_types": [None]},
                {"compute_kernels": "fused"},
            )
        ],
        *[
            (
                {"constraints": with_a(min_partition=value)},
                "table 'a': min_partition is .* a number of columns",
            )
            for value in ("x", 4.0)
        ],
    ],
)
def test_an_argument_of_another_kind_is_named_with_its_value(given, said):
    with pytest.raises(ShardCoreError, match=said):
        ShardCorePlanner(
            **{
                "topology": FOUR,
                "batch_size": 16,
                "constraints": CONSTRAINTS,
                "model": MODEL,
                "algorithm": "size_greedy",
                **given,
            }
        ).plan(MODULE)


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
