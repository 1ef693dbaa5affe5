"""TorchRec's settings other than the placement. ShardCore keeps them but does not price them.

A ShardingPlan has the kernels and memory tiers of tables (UVM, caches, SSD, output types). Sharders have the
precision of collectives.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from shardcore.core.errors import ShardCoreError
from shardcore.core.job import Job
from shardcore.core.payloads import PAYLOADS, payload_by_name
from shardcore.core.tiers import TIERS
from shardcore.core.types import Problem, Setting
from shardcore.core.validation import require
from shardcore.step.collectives import COLLECTIVES, carried_payload
from shardcore.step.kinds import kind_of_torchrec_type
from shardcore.torchrec import plan_files
from shardcore.torchrec.fields import FIELDS, unpriced_record_lines
from shardcore.torchrec.modules import quote_first_names
from shardcore.torchrec.plan_files import shardings_by_module

if TYPE_CHECKING:
    from torchrec.distributed.fbgemm_qcomm_codec import QCommsConfig
    from torchrec.distributed.types import (
        ModuleSharder,
        ParameterSharding,
        QuantizedCommCodecs,
        ShardingPlan,
    )

PLACEMENT = ("sharding_type", "ranks", "sharding_spec")
"""Fields of a ParameterSharding that follow from our plan."""
PLAIN_KERNELS = ("fused", "dense")


def kernel_settings(sharding: ParameterSharding, what: str) -> dict[str, Any]:
    """Settings of a ParameterSharding other than its placement, as JSON; empty for TorchRec's defaults.

    Settings that JSON cannot hold become {"unkept": why}.
    """
    # Placement is blanked, so that only other settings are left.
    plain = replace(sharding, sharding_type="", ranks=None, sharding_spec=None)
    try:
        settings = plan_files.encode_setting(plain, what)
    # A plan must stay readable and priceable even if a setting cannot be stored.
    except ShardCoreError as error:
        return {"unkept": str(error)}
    del settings["sharding_type"]
    # Defaults are left out, so that plans without settings stay small.
    is_default = set(settings) == {"compute_kernel"} and sharding.compute_kernel in PLAIN_KERNELS
    return {} if is_default else settings


def sharding_with_settings(settings: Mapping[str, Any], what: str) -> ParameterSharding:
    """ParameterSharding with kernel settings and no placement.

    settings: as `kernel_settings` returns them. Invalid ones raise ShardCoreError.
    """
    from torchrec.distributed.types import ParameterSharding

    if "unkept" in settings:
        raise ShardCoreError(f"{settings['unkept']}; give to_torchrec the TorchRec plan itself, as `like`")
    # Placement follows from the plan, so a setting of it would contradict.
    if placed := sorted(set(settings) & set(PLACEMENT)):
        raise ShardCoreError(f"{what} has {placed[0]!r} among its settings, which follows from the plan")
    require(
        "compute_kernel" in settings,
        f"{what} has settings {sorted(settings)} and no compute_kernel; it needs one, such as 'fused'",
    )
    return plan_files.decode_setting(ParameterSharding, {"sharding_type": "", **settings}, what)


_TORCH = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
"""Payloads by torch's names."""


def job_from_qcomms(qcomms: QCommsConfig) -> Job:
    """Job with the payloads of a TorchRec QCommsConfig.

    Raises ShardCoreError naming a field that is refused, or a precision that is not priced.
    """
    from torchrec.distributed.fbgemm_qcomm_codec import get_qcomm_codecs

    unpriced_record_lines(qcomms, "QCommsConfig")
    forward, backward = _payloads_of_codecs(get_qcomm_codecs(qcomms), "QCommsConfig")
    return Job(forward_payload=forward, backward_payload=backward)


def qcomms_from_job(job: Job) -> QCommsConfig:
    """TorchRec QCommsConfig with the payloads of a job."""
    from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig

    names: list[str] = []
    blocks: dict[str, Any] = {}
    for of, payload in zip(("", "_bwd"), job.payloads.values(), strict=True):
        name, row = payload.partition("-")[0], payload_by_name(payload)
        names.append(name)
        if row.chosen:
            # Given in any case: left out backward, TorchRec takes that of forward. 0 has no scales.
            blocks[f"{name}_quantize_dim{of}"] = row.block if row.scale_bytes else 0
    return QCommsConfig(CommType(names[0]), CommType(names[1]), **blocks)


def _payload_name(precision: str, block: int | None, what: str) -> str:
    """ShardCore's name of a payload of a precision and block size. Raises ShardCoreError, beginning with `what`, for
    others.
    """
    name = f"{precision}-{block}" if block else precision
    with suppress(ShardCoreError, KeyError):
        # The default block needs no number.
        return precision if payload_by_name(name) == PAYLOADS[precision] else name
    raise ShardCoreError(
        f"{what} {name}; priced are {', '.join(PAYLOADS)}, with blocks of a multiple of 4 elements"
    )


def payloads_of_sharders(sharders: Iterable[ModuleSharder[Any]]) -> tuple[str, str]:
    """Payloads of the sharders' collectives, forward and backward, if all sharders agree; else FP32.

    A reduce-scatter may send what TorchRec substitutes there.

    Raises ShardCoreError for payloads that are not priced.
    """
    # Payloads that differ between sharders have no single job. They are named as unpriced.
    sent = [pair for sharder in sharders for pair in _payloads_by_operation(sharder).items()]
    pairs = {payloads for op, payloads in sent if _SUMS not in op} or {payloads for _, payloads in sent}
    if len(pairs) != 1 or any(not _is_payload_priced(op, payloads, *pairs) for op, payloads in sent):
        return "fp32", "fp32"
    return pairs.pop()


_SUMS = "reduce_scatter"
"""Part of the name of a TorchRec operation that sums."""


def _is_payload_priced(op: str, sent: tuple[str, str], priced: tuple[str, str]) -> bool:
    """Tell if a collective operation sends as many bytes as a job with the priced payloads."""
    row = COLLECTIVES[_SUMS if _SUMS in op else "all_to_all"]
    carried = [
        carried_payload(row, direction, payload)
        for direction, payload in zip(row.directions, priced, strict=True)
    ]
    # Where it substitutes, TorchRec sends FP16 for BF16 on CPUs: as many bytes.
    return all(
        of == form or (form != payload and payload_by_name(of).size_ratio == payload_by_name(form).size_ratio)
        for of, form, payload in zip(sent, carried, priced, strict=True)
    )


def _collection_sharder(sharder: ModuleSharder[Any]) -> ModuleSharder[Any]:
    """Sharder of the embedding collection: the sharder itself, or the inner one of a wrapper's sharder."""
    # TorchRec's wrappers name the inner sharder in two ways.
    return getattr(sharder, "_ebc_sharder", getattr(sharder, "_e_sharder", sharder))


def _payloads_of_codecs(codecs: QuantizedCommCodecs, what: str) -> tuple[str, str]:
    """Payloads of TorchRec's quantization codecs, forward and backward.

    Raises ShardCoreError, beginning with `what`, for codecs whose outputs or payloads are not priced.
    """

    from torchrec.distributed.types import NoOpQuantizedCommCodec

    def payload(direction: str, codec: Any) -> str:
        # Codecs do not know their config, so what that refuses is refused again.
        if output := getattr(codec, "_output_dtype", None):
            refused = FIELDS["QCommsConfig"]["output_dtype"].note
            raise ShardCoreError(f"{what} has output_dtype {output}; {refused}")
        if isinstance(codec, NoOpQuantizedCommCodec):
            return "fp32"
        # Codecs name torch types. Payloads of 8 bits and fewer share one, so FBGEMM's own name decides.
        dtype = str(codec.quantized_dtype).removeprefix("torch.")
        if dtype in _TORCH:
            return _TORCH[dtype]
        precision = getattr(getattr(codec, "_comm_precision", None), "name", dtype).lower()
        block = max(getattr(codec, "_row_dim", 0), 0) if precision in ("fp8", "mx4") else None
        return _payload_name(precision, block, f"{what} has {direction}_precision")

    return payload("forward", codecs.forward), payload("backward", codecs.backward)


def _payloads_by_operation(sharder: ModuleSharder[Any]) -> dict[str, tuple[str, str]]:
    """Forward and backward payload of each collective operation of a sharder; FP32 without codecs."""
    from torchrec.distributed.types import CommOp, QuantizedCommCodecs

    of_collection = _collection_sharder(sharder)
    registry = getattr(of_collection, "qcomm_codecs_registry", None) or {}
    form = "POOLED" if hasattr(of_collection.module_type, "embedding_bag_configs") else "SEQUENCE"
    ops = [op.name for op in CommOp if op.name.startswith(form)]
    return {
        op.lower(): _payloads_of_codecs(
            registry.get(op, QuantizedCommCodecs()), f"{op.lower()} of {type(sharder).__name__}"
        )
        for op in ops
    }


def unpriced_plan_lines(
    plan: ShardingPlan,
    sharders: Iterable[ModuleSharder[Any]] = (),
    problem: Problem | None = None,
    dense_update: bool = False,
) -> list[str]:
    """A line for each effect of a ShardingPlan and its sharders that the price leaves out.

    Tables are priced as fused ops, in device memory unless the problem has rows of theirs in host memory, and
    collectives with the job's payloads. Of replicas no trained model has the time of the dense optimizer.

    problem: None: it has no rows in host memory, and sends FP32.
    dense_update: True if the model has that time, as profiles do.

    Raises ShardCoreError for payloads of sharders that are not priced.
    """
    job = problem.job if problem else Job()
    # Names in the module, without the path that our names may have.
    below = {
        (t.collection, t.name.removeprefix(f"{t.collection}.")): TIERS[t.tier].words
        for t in (problem.tables if problem else ())
        if t.in_host_memory
    }
    lines = _unpriced_replicas(plan, problem, dense_update)
    for path, module in shardings_by_module(plan).items():
        for name, sharding in module.items():
            words = below.get((path, name))
            # A cache of a table below device memory is priced.
            known = (*PLACEMENT, "compute_kernel", *(["cache_params", "key_value_params"] if words else []))
            given = [
                f"{f.name}={value}"
                for f in fields(sharding)
                if f.name not in known and (value := getattr(sharding, f.name)) is not None
            ]
            is_plain = words or sharding.compute_kernel in PLAIN_KERNELS
            if given or not is_plain:
                where = f"with rows in {words}" if words else "in device memory"
                lines.append(
                    f"table {name!r} of module {path!r} is priced as fused, {where}; it has "
                    + ", ".join([f"kernel {sharding.compute_kernel}", *given])
                )
    lines += [
        f"{type(sharder).__name__} has use_index_dedup, which sends each id once; ids are priced as if it sent all"
        for sharder in sharders
        if getattr(_collection_sharder(sharder), "_use_index_dedup", False)
    ]
    # Compared with what the job is priced with, direction by direction.
    priced = job.forward_payload, job.backward_payload
    return lines + [
        f"{op} of {type(sharder).__name__} is priced with {priced[0]} forward, {priced[1]} backward; it sends "
        f"{sent[0]} forward, {sent[1]} backward"
        for sharder in sharders
        for op, sent in _payloads_by_operation(sharder).items()
        if not _is_payload_priced(op, sent, priced)
    ]


def unpriced_hardware(setting: Setting, compute_device: str) -> list[str]:
    """A line if the cost model was measured on another type of device than the plan is for."""
    is_measured = compute_device == ("cpu" if setting.hardware.startswith("cpu") else "cuda")
    return [f"devices are of type {compute_device}; the cost model was measured on {setting.hardware}"] * (
        not is_measured
    )


def _unpriced_replicas(plan: ShardingPlan, problem: Problem | None, dense_update: bool) -> list[str]:
    replicas = [
        name
        for module in shardings_by_module(plan).values()
        for name, sharding in module.items()
        if (sharding_kind := kind_of_torchrec_type(sharding.sharding_type)) and sharding_kind.dense_gradient
    ]
    if not replicas:
        return []
    fused, dense = (f" ({problem.optimizer})", f" ({problem.replica_optimizer})") if problem else ("", "")
    untimed = (
        "; they are priced as if updated in backward, and its step over all of their weights is not timed"
    )
    return [
        f"replicas (data_parallel) of {quote_first_names(replicas)} leave the fused optimizer{fused}: a dense "
        f"optimizer of the job{dense} has to train them{'' if dense_update else untimed}"
    ]
