"""Treatment by ShardCorePlanner of each field of TorchRec's planning records (uses, ignores or refuses it), as one
table.

A field that a job sets is honoured, priced or refused by name. A field that is not in the table, for it came
with a newer TorchRec, is refused wherever it is set to another value than its default.
tests/torchrec/test_fields.py checks the table on the installed TorchRec.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from shardcore.core.errors import ShardCoreError, shorten

HONOURED, PRICED, REFUSED = "honoured", "priced", "refused"
UNKNOWN = object()
"""Value of a constructor's argument that an object does not keep."""


@dataclass(frozen=True)
class FieldTreatment:
    """Treatment of a TorchRec field that is set to another value than its default: obeyed, priced or refused.

    how: HONOURED (the plan obeys it, or neither plan nor price depends on it), PRICED (price or memory counts
        it) or REFUSED.
    note: effect of the field. Of a refused one: the reason, and what would be right.
    unpriced: effect on a job that the price leaves out, for the planner's `unpriced`. "": none.
    plain: names of values that count as the default.
    """

    how: str
    note: str
    unpriced: str = ""
    plain: tuple[str, ...] = ()


_honoured, _priced, _refused = (partial(FieldTreatment, how) for how in (HONOURED, PRICED, REFUSED))

_PASSED_ON = "in the plan's ParameterSharding, for FBGEMM"
_OF_MODULE = "the module keeps it; neither plan nor price depends on it"
_OF_JOB = "handed on to DMPCollection; neither plan nor price depends on it"
_MEASURED = "the cost model measured this itself: leave it at its default"
_VIRTUAL = "a virtual table has no rows to place before its ids come: leave it out"
_VALUES = "values change; as many bytes"
_OF_CACHE = "as in cache_params of a table, which come before it"
_BY_TORCHREC = "TorchRec itself gives it to the op: leave it out"
_FURTHER_STATE = "further state of rows is not counted: leave it out"
_STREAMED = "rows that are sent away from the op are neither counted nor priced: leave it out"
_ELSEWHERE = "rows on a parameter server are neither counted nor priced: leave it out"

_CONFIG = {
    "num_embeddings": _priced("rows"),
    "embedding_dim": _priced("columns"),
    "name": _honoured("the table's name in problem and plan"),
    "data_type": _priced("bytes of weights; the cost model is one of that precision"),
    "feature_names": _priced("features of the table: their lookups and outputs"),
    "weight_init_max": _honoured(_OF_MODULE),
    "weight_init_min": _honoured(_OF_MODULE),
    "num_embeddings_post_pruning": _refused("a table that is trained has num_embeddings rows: leave it out"),
    "init_fn": _honoured(_OF_MODULE),
    "need_pos": _honoured(_OF_MODULE),
    "input_dim": _refused("ShardCore plans tables that are looked up by id: leave it out"),
    "total_num_buckets": _refused("buckets would divide rows elsewhere than a plan does: leave it out"),
    "use_virtual_table": _refused(_VIRTUAL),
    "virtual_table_eviction_policy": _refused(_VIRTUAL),
    "enable_embedding_update": _honoured(
        "the module keeps it", "writes of rows by DistributedModelParallel.write are not priced"
    ),
    "stash_weights": _refused(
        "weights that leave the device between passes are neither counted nor priced: leave it out"
    ),
}
_LFU = {"plain": ("LRU",), "unpriced": "misses are priced as those of an LRU cache"}
_PASSES = "rows are priced as fetched in one pass"
_LESS = "where less memory is free, FBGEMM makes the cache smaller than it is priced"
_KEY_VALUE = {
    **dict.fromkeys(
        (
            "ssd_storage_directory",
            "ssd_rocksdb_write_buffer_size",
            "ssd_rocksdb_shards",
            "gather_ssd_cache_stats",
            "stats_reporter_config",
            "use_passed_in_path",
            "enable_async_update",
            "bulk_init_chunk_size",
            "lazy_bulk_init_enabled",
            "res_store_shards",
            "load_ckpt_without_opt",
        ),
        _honoured(_PASSED_ON),
    ),
    "l2_cache_size": _honoured(_PASSED_ON, "its host memory is not counted, nor its hits priced"),
    "max_l1_cache_size": _priced("bytes of the cache in device memory"),
    "enable_raw_embedding_streaming": _refused(_STREAMED),
    "kvzch_tbe_config": _refused(_VIRTUAL),
    **dict.fromkeys(
        ("ps_hosts", "ps_client_thread_num", "ps_max_key_per_request", "ps_max_local_index_length"),
        _refused(_ELSEWHERE),
    ),
}
FIELDS: Mapping[str, Mapping[str, FieldTreatment]] = {
    "ParameterConstraints": {
        "sharding_types": _honoured("the kinds that the search may choose"),
        "compute_kernels": _honoured(
            "the first that is not dense runs the table; without 'dense' there are no replicas, and with nothing else "
            "only they are. fused_uvm and fused_uvm_caching are priced with rows in host memory, key_value on SSD"
        ),
        "min_partition": _honoured("fewest columns of a cut that the search may choose"),
        "pooling_factors": _priced("lookups a sample, an entry per feature"),
        "num_poolings": _priced("bags of each feature for a sample of its batch"),
        "batch_sizes": _priced("samples of each feature on a rank (VBE), unless lookups have strides"),
        "is_weighted": _priced("weights of lookups travel with ids"),
        "cache_params": _priced("each of its fields, those of CacheParams, is treated"),
        "enforce_hbm": _honoured(_PASSED_ON),
        "stochastic_rounding": _honoured(_PASSED_ON),
        "bounds_check_mode": _honoured(_PASSED_ON),
        "feature_names": _honoured("they need to be the features of the table"),
        "output_dtype": _honoured(_PASSED_ON),
        "device_group": _honoured("it needs to be the topology's compute_device"),
        "key_value_params": _priced("each of its fields, those of KeyValueParams, is treated"),
        "use_virtual_table": _refused(_VIRTUAL),
    },
    "CacheParams": {
        "algorithm": _honoured(_PASSED_ON, **_LFU),
        "load_factor": _priced("share of rows in device memory"),
        "reserved_memory": _honoured(_PASSED_ON, _LESS),
        "precision": _refused("caches are counted in their table's own: leave it out"),
        "prefetch_pipeline": _priced("without a job of its own, the planner takes pipeline 'prefetch'"),
        "stats": _honoured(_PASSED_ON + "; misses are priced by the table's own lookups"),
        "multipass_prefetch_config": _honoured(_PASSED_ON, _PASSES),
    },
    "KeyValueParams": _KEY_VALUE,
    # Keys of fused_params are arguments of FBGEMM's op, and some that TorchRec takes out.
    "SplitTableBatchedEmbeddingBagsCodegen": {
        **_KEY_VALUE,
        **dict.fromkeys(
            (
                "embedding_specs",
                "feature_table_map",
                "weights_precision",
                "pooling_mode",
                "device",
                "table_names",
                "embedding_shard_info",
                "res_params",
                "is_qr_tbe",
                "preallocated_host_buffers",
            ),
            _refused(_BY_TORCHREC),
        ),
        **dict.fromkeys(("cache_load_factor", "prefetch_pipeline"), _priced(_OF_CACHE)),
        "cache_algorithm": _honoured(_OF_CACHE, **_LFU),
        "cache_sets": _refused("caches are counted by their share of rows: give cache_load_factor"),
        "cache_reserved_memory": _honoured(_OF_CACHE, _LESS),
        "cache_precision": _refused("caches are counted in their tables' own: leave it out"),
        "multipass_prefetch_config": _honoured(_OF_CACHE, _PASSES),
        "optimizer": _priced("bytes of its state"),
        **dict.fromkeys(
            (
                "learning_rate",
                "lr",
                "eps",
                "beta1",
                "beta2",
                "betas",
                "momentum",
                "weight_decay",
                "eta",
                "gradient_clipping",
                "max_gradient",
                "max_norm",
                "stochastic_rounding",
                "bounds_check_mode",
                "enforce_hbm",
                "embedding_table_index_type",
                "embedding_table_offset_type",
                "uvm_host_mapped",
                "tbe_input_multiplexer_config",
            ),
            _honoured(_VALUES),
        ),
        "output_dtype": _honoured("the op has it", "outputs are priced in FP32"),
        "weight_decay_mode": _refused(_FURTHER_STATE, plain=("NONE", "L2", "DECOUPLE")),
        **dict.fromkeys(
            (
                "ensemble_mode",
                "emainplace_mode",
                "counter_based_regularization",
                "cowclip_regularization",
                "global_weight_decay",
                "extra_optimizer_config",
            ),
            _refused(_FURTHER_STATE),
        ),
        "optimizer_state_dtypes": _refused("state is counted in FP32: leave it out"),
        "uvm_non_rowwise_momentum": _refused("state is counted beside its rows: leave it out"),
        "use_experimental_tbe": _honoured("the op has it", "another kernel than the one that is priced"),
        "use_one_tbe_per_table": _honoured("TorchRec has it", "tables are priced as one op"),
        **dict.fromkeys(
            ("record_cache_metrics", "gather_uvm_cache_stats"),
            _honoured("the op has it", "what counting takes is not priced"),
        ),
        "res_enabled_tables": _honoured("it counts with enable_raw_embedding_streaming alone"),
    },
    "Topology": {
        "world_size": _honoured("devices"),
        "compute_device": _honoured("type of the devices in the plan"),
        "hbm_cap": _honoured("memory of a device"),
        "ddr_cap": _honoured("memory of a device on a CPU; elsewhere host memory for fused_uvm tables"),
        "ssd_cap": _honoured("SSD of a device's host, for key_value tables"),
        "local_world_size": _honoured("devices of a host"),
        "pod_size": _honoured("hosts of a pod; pods need to be of one size"),
        "hbm_mem_bw": _refused(_MEASURED),
        "ddr_mem_bw": _refused(_MEASURED),
        "ssd_mem_bw": _priced("link of a device to its host's SSD, for key_value tables"),
        "hbm_to_ddr_mem_bw": _priced("link of a device to its host's memory, for fused_uvm tables"),
        "intra_host_bw": _priced("the topology's links of level within_host"),
        "inter_host_bw": _priced("the topology's links of level between_hosts"),
        "bwd_compute_multiplier": _refused(_MEASURED),
        "custom_topology_data": _honoured("memory of each device"),
        "weighted_feature_bwd_compute_multiplier": _refused(_MEASURED),
        "uneven_sharding_perf_multiplier": _refused(_MEASURED),
        "generalized_comms_bandwidths": _priced(
            "BasicCommsBandwidths, as intra_host_bw and inter_host_bw; others are refused"
        ),
        "created_by_factory": _honoured("neither plan nor price depends on it"),
    },
    "QCommsConfig": {
        "forward_precision": _priced("payload of outputs"),
        "backward_precision": _priced("payload of gradients"),
        "forward_loss_scale": _honoured("a factor; as many bytes travel"),
        "backward_loss_scale": _honoured("a factor; as many bytes travel"),
        **dict.fromkeys(
            ("fp8_quantize_dim", "fp8_quantize_dim_bwd", "mx4_quantize_dim", "mx4_quantize_dim_bwd"),
            _priced("elements with one scale"),
        ),
        **dict.fromkeys(
            ("fp8_bwd_uses_143", "mx4_rounding_mode"), _honoured("values change; as many bytes travel")
        ),
        **dict.fromkeys(
            ("fp8_output_dtype", "output_dtype"),
            _refused("outputs are priced in FP32 at both ends: leave it out"),
        ),
    },
    "EmbeddingConfig": _CONFIG,
    "EmbeddingBagConfig": {**_CONFIG, "pooling": _honoured("sums and means take as long; " + _OF_MODULE)},
    "DMPCollection": {
        "module": _honoured("the model"),
        "device": _honoured(_OF_JOB),
        "plan": _honoured("of one group"),
        "world_size": _honoured("devices"),
        "sharding_group_size": _honoured("devices of a group"),
        "global_pg": _honoured(_OF_JOB),
        "sharding_strategy": _refused("groups are planned for ShardingStrategy.DEFAULT: leave it out"),
        "node_group_size": _honoured("devices of a group on a host"),
        "sharders": _honoured(_OF_JOB),
        "init_data_parallel": _honoured(_OF_JOB),
        "init_parameters": _honoured(_OF_JOB),
        "data_parallel_wrapper": _honoured(_OF_JOB),
        "use_inter_host_allreduce": _honoured("the layout of the groups"),
        "custom_all_reduce": _refused("replicas are priced with TorchRec's own all-reduce: leave it out"),
        "submodule_configs": _refused("a plan has one grouping for all modules: leave it out"),
        "rs_awaitable_hook_module": _refused("it belongs to ShardingStrategy.FULLY_SHARDED: leave it out"),
        "use_sharded_relay": _refused("replicas are priced with an all-reduce, not a relay: leave it out"),
    },
}


def field_defaults(record: type) -> dict[str, Any]:
    """Default of each field of a TorchRec class; inspect.Parameter.empty for a required field."""
    # Dataclasses list their fields. Other classes have them in the arguments of __init__.
    if dataclasses.is_dataclass(record):
        return {f.name: _dataclass_default(f) for f in dataclasses.fields(record)}
    defaults: dict[str, Any] = {}
    # From the class up to its bases: values of subclasses take precedence.
    for c in (c for c in record.__mro__ if "__init__" in vars(c)):
        parameters = inspect.signature(c.__init__).parameters
        named = {name: p for name, p in parameters.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
        defaults = {name: p.default for name, p in named.items() if name != "self"} | defaults
        # A subclass may hand on arguments that it does not name.
        if len(named) == len(parameters):
            break
    return defaults


def _dataclass_default(field: dataclasses.Field) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default


def field_values(record: object) -> dict[str, Any]:
    """Value of each field of a TorchRec object; UNKNOWN for a constructor argument that the object does not store."""
    return {
        # Constructors often keep an argument under the same name with an underscore.
        name: getattr(record, name, getattr(record, f"_{name}", UNKNOWN))
        for name in field_defaults(type(record))
    }


def unpriced_record_lines(record: object, what: str) -> list[str]:
    """A line for each set field of a TorchRec record whose effect the price leaves out.

    what: the record, for messages.

    Raises ShardCoreError naming a field that is set and refused, or set and not in FIELDS.
    """
    return unpriced_field_lines(type(record), field_values(record), what)


def unpriced_field_lines(kind: type, values: Mapping[str, Any], what: str) -> list[str]:
    """A line for each set field among `values` whose effect the price leaves out.

    kind: the TorchRec class that has the fields.

    Raises as `unpriced_record_lines`.
    """
    # Under its own name, or that of a base class.
    treatments = FIELDS[next(c.__name__ for c in kind.__mro__ if c.__name__ in FIELDS)]
    defaults, lines = field_defaults(kind), []
    for name, value in values.items():
        treatment = treatments.get(name)
        # A field at its default has no effect, so it needs no treatment.
        if _is_default(value, defaults.get(name, UNKNOWN)) or (
            treatment and getattr(value, "name", None) in treatment.plain
        ):
            continue
        # An argument of a newer TorchRec that its object does not keep.
        if treatment is None and value is UNKNOWN:
            lines.append(f"{what} may have {name}, which ShardCore does not know and cannot read")
        # Known, but the object does not keep it, so it cannot be read.
        elif value is UNKNOWN:
            continue
        elif treatment is None:
            raise ShardCoreError(
                f"{what} has {name} {_short_text(value)}, which this ShardCore does not know; "
                f"leave it {f'at its default, {_short_text(defaults[name])}' if name in defaults else 'out'}"
            )
        elif treatment.how == REFUSED:
            raise ShardCoreError(f"{what} has {name} {_short_text(value)}; {treatment.note}")
        elif treatment.unpriced:
            lines.append(f"{what} has {name} {_short_text(value)}; {treatment.unpriced}")
    return lines


def _is_default(value: Any, default: Any) -> bool:
    if value is default:
        return True
    try:
        # Equal values of other types are not the same: 1 == True.
        return type(value) is type(default) and bool(value == default)
    except (TypeError, ValueError, RuntimeError):  # of arrays and tensors
        return False


def _short_text(value: Any) -> str:
    return shorten(repr(value), 80)
