"""Checks, for each field of TorchRec's planning records, that ShardCore treats it as its table says.

A field is set to another value than its default, and a small model is planned with and without it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import CacheAlgorithm, MultiPassPrefetchConfig
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
    WeightDecayMode,
)
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
from torchrec.distributed.model_parallel import DMPCollection
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.planner import Topology as TheirTopology
from torchrec.distributed.planner import types as planner_types
from torchrec.distributed.types import BoundsCheckMode, CacheParams, CacheStatistics, DataType, KeyValueParams
from torchrec.modules import embedding_configs

from shardcore.core.errors import ShardCoreError
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Setting
from shardcore.cost.analytic import AnalyticModel
from shardcore.cost.model import price
from shardcore.search import SHARDERS
from shardcore.step import memory
from shardcore.step.lower import lower
from shardcore.step.sharding_groups import GroupedPlan, Grouping, problem_of_group
from shardcore.torchrec.dmp_collection import to_dmp_collection
from shardcore.torchrec.fields import FIELDS, HONOURED, PRICED, REFUSED, field_defaults
from shardcore.torchrec.planner import ShardCorePlanner, problem_for
from shardcore.torchrec.settings import job_from_qcomms

ROWS, DIM, LOCAL_BATCH, DEVICES, PER_HOST = 100_000, 64, 64, 4, 2
LOOKUPS = {"f0": 5.0, "f1": 3.0, "f2": 2.0}
GIB = 2**30


def records() -> dict[str, type]:
    """The classes of FIELDS, of the installed TorchRec."""
    configs = EmbeddingBagConfig, EmbeddingConfig, QCommsConfig, CacheParams, KeyValueParams
    op = SplitTableBatchedEmbeddingBagsCodegen  # fused_params are its arguments
    return {c.__name__: c for c in (*configs, ParameterConstraints, TheirTopology, DMPCollection, op)}


@dataclass(frozen=True)
class Outcome:
    """A plan of the small model, its price, and bytes on each device."""

    planner: ShardCorePlanner
    shardings: dict[str, Any]
    ms: float
    held: tuple[int, ...]

    def same_as(self, other: Outcome) -> bool:
        return (self.shardings, self.ms, self.held) == (other.shardings, other.ms, other.held)


def tables(pooled: bool, **given: Any) -> list[Any]:
    """Table a of features f0 and f1, and b of f2. given: fields of a; dim and data type are those of both."""
    config = EmbeddingBagConfig if pooled else EmbeddingConfig
    both = {k: given[k] for k in ("embedding_dim", "data_type") if k in given}
    b = {"name": "b", "num_embeddings": ROWS, "embedding_dim": DIM, "feature_names": ["f2"]} | both
    return [config(**b | {"name": "a", "feature_names": ["f0", "f1"]} | given), config(**b)]


def model(pooled: bool = True, **given: Any) -> nn.Module:
    collection = EmbeddingBagCollection if pooled else EmbeddingCollection
    return nn.ModuleDict({"m": collection(device=torch.device("meta"), tables=tables(pooled, **given))})


def topology(**given: Any) -> TheirTopology:
    return TheirTopology(
        **{"world_size": DEVICES, "local_world_size": PER_HOST, "compute_device": "cuda", "hbm_cap": 8 * GIB}
        | given
    )


def planned(
    module: nn.Module | None = None,
    asked: ParameterConstraints | None = None,
    on: TheirTopology | None = None,
    sharders: Any = (),
    precision: str = "fp32",
) -> Outcome:
    """asked: of table a. Lookups are LOOKUPS unless it has pooling_factors."""
    constraints = {"a": asked, "b": ParameterConstraints(pooling_factors=[2.0])} if asked else {}
    stated = asked is not None and asked.pooling_factors != [1.0]
    # TorchRec has SSD under this optimizer alone.
    on_ssd = asked is not None and "key_value" in (asked.compute_kernels or ())
    optimizer = "rowwise_adagrad" if on_ssd else "exact_sgd"
    planner = ShardCorePlanner(
        on or topology(),
        LOCAL_BATCH,
        constraints,
        algorithm="size_greedy",
        model=AnalyticModel(Setting("gpu", LOCAL_BATCH * DEVICES, precision, optimizer)),
        lookups=None if stated else LOOKUPS,
    )
    plan = planner.plan(module or model(), sharders)
    priced = planner.model.for_problem(planner.problem)
    return Outcome(
        planner,
        {f"{path}.{name}": sharding for path, of in plan.plan.items() for name, sharding in of.items()},
        price(lower(planner.our_plan, planner.problem), priced).total_ms,
        tuple(memory.used_bytes(planner.our_plan, planner.problem)),
    )


@cache
def as_usual(pooled: bool = True) -> Outcome:
    return planned(model(pooled))


# --- values, and what the plan then has ---------------------------------------------------------------------

Obeys = Callable[[Outcome], bool]
"""Predicate: an outcome obeys the value."""


def _first(outcome: Outcome) -> Any:
    return outcome.shardings["m.a"]


def _kept(field: str, value: Any) -> tuple[Any, Obeys]:
    return value, lambda outcome: getattr(_first(outcome), field) == value


def constraints_values() -> dict[str, tuple[Any, Obeys | None]]:
    """By field, a value and what the plan then has. None: the same as without."""
    uvm = {"compute_kernels": ["fused_uvm_caching"]}
    return {
        "sharding_types": (["row_wise"], lambda o: _first(o).sharding_type == "row_wise"),
        "compute_kernels": (
            ["fused_uvm"],
            lambda o: _first(o).compute_kernel == "fused_uvm" and max(o.held) < max(as_usual().held),
        ),
        "min_partition": (
            DIM,
            lambda o: [s.shard_sizes for s in _first(o).sharding_spec.shards] == [[ROWS, DIM]],
        ),
        "pooling_factors": ([50.0, 30.0], None),
        "num_poolings": ([2.0, 2.0], None),
        "batch_sizes": ([LOCAL_BATCH // 2, LOCAL_BATCH], None),
        "is_weighted": (True, None),
        "cache_params": ({**uvm, "cache_params": CacheParams(load_factor=0.5)}, None),
        "enforce_hbm": _kept("enforce_hbm", True),
        "stochastic_rounding": _kept("stochastic_rounding", True),
        "bounds_check_mode": _kept("bounds_check_mode", BoundsCheckMode.FATAL),
        "feature_names": (["f1", "f0"], None),
        "output_dtype": _kept("output_dtype", DataType.FP16),
        "device_group": ("cuda", None),
        "key_value_params": (
            {"compute_kernels": ["key_value"], "key_value_params": KeyValueParams("/x", max_l1_cache_size=1)},
            lambda o: _first(o).key_value_params.ssd_storage_directory == "/x",
        ),
        "use_virtual_table": (True, None),
    }


def topology_values() -> dict[str, tuple[Any, Obeys | None]]:
    custom = planner_types.CustomTopologyData({"hbm_cap": [8 * GIB] * 3 + [4 * GIB]}, DEVICES)
    sizes = lambda o: [d.memory_bytes for d in o.planner.topology.devices]  # noqa: E731
    return {
        "world_size": (2 * DEVICES, lambda o: len(o.planner.topology) == 2 * DEVICES),
        "compute_device": (
            "cpu",
            lambda o: (
                {s.placement.device().type for x in o.shardings.values() for s in x.sharding_spec.shards}
                == {"cpu"}
            ),
        ),
        "hbm_cap": (16 * GIB, lambda o: sizes(o) == [int(16 * GIB * 0.85)] * DEVICES),
        "ddr_cap": (
            {"compute_device": "cpu", "ddr_cap": 6 * GIB},
            lambda o: sizes(o) == [int(6 * GIB * 0.85)] * DEVICES,
        ),
        "ssd_cap": (GIB, None),
        "local_world_size": (DEVICES, lambda o: len(o.planner.topology.hosts) == 1),
        "pod_size": (2, lambda o: o.planner.topology.joins_devices("within_pod")),
        "hbm_mem_bw": (1e9, None),
        "ddr_mem_bw": (1e9, None),
        "ssd_mem_bw": (1e9, None),
        "hbm_to_ddr_mem_bw": (1e6, None),
        "intra_host_bw": (1e6, None),
        "inter_host_bw": (1e5, None),
        "bwd_compute_multiplier": (3.0, None),
        "custom_topology_data": (custom, lambda o: sizes(o)[2:] == [int(n * GIB * 0.85) for n in (8, 4)]),
        "weighted_feature_bwd_compute_multiplier": (3.0, None),
        "uneven_sharding_perf_multiplier": (2.0, None),
        "generalized_comms_bandwidths": (planner_types.BasicCommsBandwidths(1e5, 1e6), None),
        "created_by_factory": (True, None),
    }


def config_values(record: str) -> dict[str, tuple[Any, Obeys | None]]:
    pooling = {} if record == "EmbeddingConfig" else {"pooling": (embedding_configs.PoolingType.MEAN, None)}
    return {
        "num_embeddings": (2 * ROWS, None),
        "embedding_dim": (2 * DIM, None),
        "name": ("c", lambda o: "m.c" in o.shardings),
        "data_type": (DataType.FP16, None),
        "feature_names": (["f0"], None),
        "weight_init_max": (1.0, None),
        "weight_init_min": (-1.0, None),
        "num_embeddings_post_pruning": (ROWS // 2, None),
        "init_fn": (torch.nn.init.zeros_, None),
        "need_pos": (True, None),
        "input_dim": (4, None),
        "total_num_buckets": (10, None),
        "use_virtual_table": (True, None),
        "virtual_table_eviction_policy": (embedding_configs.CountBasedEvictionPolicy(), None),
        "enable_embedding_update": (True, None),
        "stash_weights": (True, None),
        **pooling,
    }


def cache_values() -> dict[str, tuple[Any, Obeys | None]]:
    return {
        field: (value, lambda o, f=field, v=value: getattr(_first(o).cache_params, f) == v)
        for field, value in {
            "algorithm": CacheAlgorithm.LFU,
            "load_factor": 0.5,
            "reserved_memory": 1.0,
            "precision": DataType.FP16,
            "prefetch_pipeline": True,
            "stats": Statistics(),
            "multipass_prefetch_config": MultiPassPrefetchConfig(2),
        }.items()
    }


class Statistics(CacheStatistics):
    expected_lookups, cacheability = 1.0, 0.5

    def expected_miss_rate(self, clf: float) -> float:
        return 1 - clf


_VALUES: dict[type, Any] = {bool: True, int: 1, float: 0.5, str: "/x"}
"""A value of each type, for fields whose own does not matter."""


def key_value_values() -> dict[str, tuple[Any, Obeys | None]]:
    own: dict[str, Any] = {"use_passed_in_path": False, "ps_hosts": (("::1", 1),), "max_l1_cache_size": 1}
    values = {}
    for f in dataclasses.fields(KeyValueParams):
        kind = next(k for k in (bool, int, str, object) if k is object or k.__name__ in str(f.type))
        values[f.name] = own.get(f.name, _VALUES.get(kind, "object"))
    # The plan gives each table a cache and a write buffer of its own size.
    decided = ("max_l1_cache_size", "ssd_rocksdb_write_buffer_size")
    return {
        name: (value, lambda o, f=name, v=value: f in decided or getattr(_first(o).key_value_params, f) == v)
        for name, value in values.items()
    }


def fused_value(field: str) -> Any:
    """Another value than the default of an argument of FBGEMM's op."""
    own = {
        "optimizer": EmbOptimType.EXACT_ADAGRAD,
        "cache_algorithm": CacheAlgorithm.LFU,
        "cache_load_factor": 0.5,
        "weight_decay_mode": WeightDecayMode.COUNTER,
        "bounds_check_mode": BoundsCheckMode.FATAL,
    }
    default = field_defaults(SplitTableBatchedEmbeddingBagsCodegen)[field]
    if field in own or type(default) not in _VALUES:
        return own.get(field, "object")
    return not default if isinstance(default, bool) else default + 1 if default else _VALUES[type(default)]


def qcomms_values() -> dict[str, dict[str, Any]]:
    fp8, mx4 = (
        {"forward_precision": kind, "backward_precision": kind} for kind in (CommType.FP8, CommType.MX4)
    )
    from fbgemm_gpu.quantize_utils import RoundingMode
    from fbgemm_gpu.split_embedding_configs import SparseType

    return {
        "forward_precision": {"forward_precision": CommType.FP16},
        "backward_precision": {"backward_precision": CommType.BF16},
        "forward_loss_scale": {"forward_precision": CommType.FP16, "forward_loss_scale": 2.0},
        "backward_loss_scale": {"forward_precision": CommType.FP16, "backward_loss_scale": 2.0},
        "fp8_quantize_dim": fp8 | {"fp8_quantize_dim": 32},
        "fp8_quantize_dim_bwd": fp8 | {"fp8_quantize_dim_bwd": 32},
        "fp8_bwd_uses_143": fp8 | {"fp8_bwd_uses_143": True},
        "fp8_output_dtype": fp8 | {"fp8_output_dtype": SparseType.FP16},
        "mx4_quantize_dim": mx4 | {"mx4_quantize_dim": 64},
        "mx4_quantize_dim_bwd": mx4 | {"mx4_quantize_dim_bwd": 64},
        "mx4_rounding_mode": mx4 | {"mx4_rounding_mode": RoundingMode.even},
        "output_dtype": {"forward_precision": CommType.FP16, "output_dtype": SparseType.FP16},
    }


# --- runs with a value --------------------------------------------------------------------------------------


def _of_constraints(field: str) -> tuple[Outcome, Outcome, Obeys | None]:
    value, obeys = constraints_values()[field]
    given = value if isinstance(value, dict) else {field: value}
    # What is compared has the same kernel.
    usual = planned(asked=ParameterConstraints(**{k: v for k, v in given.items() if k != field}))
    return planned(asked=ParameterConstraints(**given)), usual, obeys


def _of_cache(field: str) -> tuple[Outcome, Outcome, Obeys | None]:
    value, obeys = cache_values()[field]
    uvm = {"compute_kernels": ["fused_uvm_caching"]}
    on = topology(hbm_cap=8 * GIB, ddr_cap=64 * GIB)
    usual = planned(asked=ParameterConstraints(**uvm), on=on)
    return (
        planned(asked=ParameterConstraints(**uvm, cache_params=CacheParams(**{field: value})), on=on),
        usual,
        obeys,
    )


def _of_key_value(field: str) -> tuple[Outcome, Outcome, Obeys | None]:
    value, obeys = key_value_values()[field]
    ssd = {"compute_kernels": ["key_value"]}
    asked = ParameterConstraints(**ssd, key_value_params=KeyValueParams(**{field: value}))
    return planned(asked=asked), planned(asked=ParameterConstraints(**ssd)), obeys


def _of_fused(field: str) -> tuple[Outcome, Outcome, Obeys | None]:
    asked = ParameterConstraints(compute_kernels=["fused_uvm_caching"])
    given = [{field: fused_value(field)}, {}]
    found, usual = (
        planned(asked=asked, sharders=[EmbeddingBagCollectionSharder(fused_params=fused)]) for fused in given
    )
    return found, usual, lambda o: o.ms == usual.ms and o.held == usual.held


def _of_topology(field: str) -> tuple[Outcome, Outcome, Obeys | None]:
    value, obeys = topology_values()[field]
    given, asked = value if isinstance(value, dict) else {field: value}, None
    if field == "hbm_to_ddr_mem_bw":
        asked = ParameterConstraints(compute_kernels=["fused_uvm"])
    if field == "ssd_mem_bw":
        asked = ParameterConstraints(compute_kernels=["key_value"])
    if field in ("intra_host_bw", "inter_host_bw", "generalized_comms_bandwidths"):
        asked = ParameterConstraints(sharding_types=["row_wise"])
    return planned(asked=asked, on=topology(**given)), planned(asked=asked), obeys


def _of_config(record: str, field: str) -> tuple[Outcome, Outcome, Obeys | None]:
    pooled = record == "EmbeddingBagConfig"
    value, obeys = config_values(record)[field]
    return (
        planned(model(pooled, **{field: value}), precision="fp16" if field == "data_type" else "fp32"),
        as_usual(pooled),
        obeys,
    )


def _of_qcomms(field: str) -> tuple[Outcome, Outcome, Obeys | None]:
    config = QCommsConfig(**qcomms_values()[field])
    job = job_from_qcomms(config)
    sharder = EmbeddingBagCollectionSharder(qcomm_codecs_registry=get_qcomm_codecs_registry(config))
    outcome = planned(sharders=[sharder])
    if outcome.planner.problem.job != job:
        raise AssertionError(f"sharders give {outcome.planner.problem.job}, the config {job}")
    same = QCommsConfig(**{k: v for k, v in qcomms_values()[field].items() if k != field})
    usual = EmbeddingBagCollectionSharder(qcomm_codecs_registry=get_qcomm_codecs_registry(same))
    return outcome, planned(sharders=[usual]), None


@cache
def grouped() -> tuple[GroupedPlan, Any]:
    devices = tuple(Device(8 * GIB, host=f"h{d // PER_HOST}") for d in range(DEVICES))
    problem = problem_for(model(), Topology(devices), LOCAL_BATCH * DEVICES, LOOKUPS)
    grouping = Grouping(2, "contiguous")
    own = problem_of_group(problem, grouping)
    plan = SHARDERS["size_greedy"](own, AnalyticModel(Setting("gpu", own.global_batch)))
    return GroupedPlan(grouping, plan, own), problem


def dmp_values() -> dict[str, Any]:
    from torchrec.distributed import types

    return {
        "device": torch.device("cuda"),
        "global_pg": object(),
        "sharders": [EmbeddingBagCollectionSharder()],
        "sharding_strategy": types.ShardingStrategy.FULLY_SHARDED,
        "init_data_parallel": False,
        "init_parameters": False,
        "data_parallel_wrapper": object(),
        "custom_all_reduce": print,
        "submodule_configs": [object()],
        "rs_awaitable_hook_module": "over",
        "use_sharded_relay": True,
    }


def check(record: str, field: str) -> str:
    """The class of a field, once it was seen to be true. Raises AssertionError where it is not."""
    treatment = FIELDS[record].get(field)
    assert treatment is not None, f"{record}.{field} has no class"
    if record == "DMPCollection":
        return _check_dmp(field, treatment.how)
    run = {
        "ParameterConstraints": _of_constraints,
        "Topology": _of_topology,
        "QCommsConfig": _of_qcomms,
        "CacheParams": _of_cache,
        "KeyValueParams": _of_key_value,
        "SplitTableBatchedEmbeddingBagsCodegen": _of_fused,
        "EmbeddingBagConfig": lambda f: _of_config("EmbeddingBagConfig", f),
        "EmbeddingConfig": lambda f: _of_config("EmbeddingConfig", f),
    }[record]
    try:
        outcome, usual, obeys = run(field)
    except ShardCoreError as error:
        assert treatment.how == REFUSED, f"{record}.{field} is refused, not {treatment.how}: {error}"
        assert field in str(error), f"{record}.{field} is refused by another name: {error}"
        return REFUSED
    assert treatment.how != REFUSED, f"{record}.{field} is not refused"
    if treatment.how == PRICED:
        assert (outcome.ms, outcome.held) != (usual.ms, usual.held), f"{record}.{field} changes no price"
    elif obeys:
        assert obeys(outcome), f"{record}.{field} is not obeyed"
    else:
        assert outcome.same_as(usual), f"{record}.{field} changes the plan or its price"
    if treatment.unpriced:
        named = any(f"has {field}" in line for line in outcome.planner.unpriced)
        assert named, f"{record}.{field} is not named"
    return treatment.how


def _check_dmp(field: str, how: str) -> str:
    of_group, problem = grouped()
    usual = to_dmp_collection(of_group, problem, model())
    if field in ("module", *usual):  # those that follow from the plan
        assert how == HONOURED
        assert field == "module" or usual[field] is not None
        return how
    value = dmp_values()[field]
    try:
        arguments = to_dmp_collection(of_group, problem, model(), **{field: value})
    except ShardCoreError as error:
        assert how == REFUSED and field in str(error), f"DMPCollection.{field} is {how}: {error}"
        return how
    assert how == HONOURED and arguments[field] is value
    return how


def fields() -> list[tuple[str, str]]:
    """All fields of all records of the installed TorchRec."""
    return [(record, field) for record, kind in records().items() for field in field_defaults(kind)]
