"""Settings that TorchRec has beside the placement. ShardCore keeps them but does not price them.

A ShardingPlan has the kernels and memory tiers of tables (UVM, caches, SSD, output types). Sharders have the
precision of collectives.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from shardcore.core.errors import ShardCoreError
from shardcore.core.job import PAYLOADS, Job
from shardcore.core.types import Problem, Setting
from shardcore.step.kinds import layout_of_torchrec
from shardcore.torchrec import fields as torchrec_fields
from shardcore.torchrec import plan_files

if TYPE_CHECKING:
    from torchrec.distributed.fbgemm_qcomm_codec import QCommsConfig
    from torchrec.distributed.types import ModuleSharder, ParameterSharding, ShardingPlan

PLACEMENT = ("sharding_type", "ranks", "sharding_spec")
"""Fields of a ParameterSharding that follow from our plan."""
PLAIN_KERNELS = ("fused", "dense")


def settings_of(sharding: ParameterSharding, what: str) -> dict[str, Any]:
    """A table's settings except its placement, as JSON. {}: TorchRec's defaults, with a plain kernel.

    Settings that JSON cannot hold become {"unkept": why}.
    """
    plain = replace(sharding, sharding_type="", ranks=None, sharding_spec=None)
    try:
        found = plan_files.encode(plain, what)
    # A plan must stay readable and priceable even if a setting cannot be stored.
    except ShardCoreError as error:
        return {"unkept": str(error)}
    del found["sharding_type"]
    return {} if set(found) == {"compute_kernel"} and sharding.compute_kernel in PLAIN_KERNELS else found


def with_settings(settings: Mapping[str, Any], what: str) -> ParameterSharding:
    """A sharding without a placement, with settings from `settings_of`. Raises ShardCoreError for invalid
    ones."""
    from torchrec.distributed.types import ParameterSharding

    if "unkept" in settings:
        raise ShardCoreError(f"{settings['unkept']}; give to_torchrec the TorchRec plan itself, as `like`")
    if placed := sorted(set(settings) & set(PLACEMENT)):
        raise ShardCoreError(f"{what} has {placed[0]!r} among its settings, which follows from the plan")
    if "compute_kernel" not in settings:
        raise ShardCoreError(
            f"{what} has settings {sorted(settings)} and no compute_kernel; it needs one, such as 'fused'"
        )
    return plan_files.decode(ParameterSharding, {"sharding_type": "", **settings}, what)


_TORCH = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
"""Payloads by torch's names."""


def job_of(qcomms: QCommsConfig) -> Job:
    """A job that sends outputs and gradients as TorchRec's config says.

    Raises ShardCoreError naming a field that is refused, or a precision that is not priced.
    """
    torchrec_fields.require_treated(qcomms, "QCommsConfig")
    payloads = {name: getattr(qcomms, name).value for name in ("forward_precision", "backward_precision")}
    for name, payload in payloads.items():
        if payload not in PAYLOADS:
            raise ShardCoreError(f"QCommsConfig has {name} {payload}; priced are {', '.join(PAYLOADS)}")
    return Job(forward_payload=payloads["forward_precision"], backward_payload=payloads["backward_precision"])


def payloads_of(sharders: Iterable[ModuleSharder[Any]]) -> tuple[str, str]:
    """Payloads of the sharders' collectives, forward and backward, if all send the same. Else FP32.

    Raises ShardCoreError for payloads that are not priced.
    """
    sent = {payloads for sharder in sharders for payloads in _sent(sharder).values()}
    return sent.pop() if len(sent) == 1 else ("fp32", "fp32")


def _of_collection(sharder: ModuleSharder[Any]) -> ModuleSharder[Any]:
    """The sharder of the collection: within that of a wrapper, if it is one."""
    return getattr(sharder, "_ebc_sharder", getattr(sharder, "_e_sharder", sharder))


def _sent(sharder: ModuleSharder[Any]) -> dict[str, tuple[str, str]]:
    """Payloads forward and backward by operation. Without codecs all is sent in FP32."""
    found = {}
    for op, codecs in (getattr(_of_collection(sharder), "qcomm_codecs_registry", None) or {}).items():
        both = {"forward": codecs.forward, "backward": codecs.backward}
        names = [str(codec.quantized_dtype).removeprefix("torch.") for codec in both.values()]
        for name, (field, codec) in zip(names, both.items(), strict=True):
            if name not in _TORCH:
                precision = getattr(getattr(codec, "_comm_precision", None), "name", name)
                raise ShardCoreError(
                    f"{op.lower()} of {type(sharder).__name__} has {field}_precision "
                    f"{precision}; priced are {', '.join(PAYLOADS)}"
                )
        found[op.lower()] = tuple(_TORCH[name] for name in names)
    return found or {"output": ("fp32", "fp32")}


def unpriced(
    plan: ShardingPlan, sharders: Iterable[ModuleSharder[Any]] = (), problem: Problem | None = None
) -> list[str]:
    """Effects that the price of a plan leaves out, a line each.

    Tables are priced as fused ops, in device memory unless the problem has rows of theirs in host memory, and
    collectives with the job's payloads. Of replicas no model has the time of the dense optimizer.

    problem: None: it has no rows in host memory, and sends FP32.

    Raises ShardCoreError for payloads of sharders that are not priced.
    """
    job = problem.job if problem else Job()
    in_host = {
        (t.collection, t.name.removeprefix(f"{t.collection}."))
        for t in (problem.tables if problem else ())
        if t.in_host_memory
    }
    lines = _unpriced_replicas(plan, problem)
    for path, module in plan.plan.items():
        for name, sharding in module.items():
            priced = (path, name) in in_host
            known = (*PLACEMENT, "compute_kernel", *(["cache_params"] if priced else []))
            given = [
                f"{f.name}={value}"
                for f in fields(sharding)
                if f.name not in known and (value := getattr(sharding, f.name)) is not None
            ]
            if (sharding.compute_kernel not in PLAIN_KERNELS and not priced) or given:
                where = "with rows in host memory" if priced else "in device memory"
                lines.append(
                    f"table {name!r} of module {path!r} is priced as fused, {where}; it has "
                    + ", ".join([f"kernel {sharding.compute_kernel}", *given])
                )
    lines += [
        f"{type(sharder).__name__} has use_index_dedup, which sends each id once; ids are priced as if it sent all"
        for sharder in sharders
        if getattr(_of_collection(sharder), "_use_index_dedup", False)
    ]
    own = job.forward_payload, job.backward_payload
    return lines + [
        f"{op} of {type(sharder).__name__} is priced with {own[0]} forward, {own[1]} backward; "
        f"it sends {sent[0]} forward, {sent[1]} backward"
        for sharder in sharders
        for op, sent in _sent(sharder).items()
        if sent != own
    ]


def unpriced_hardware(setting: Setting, compute_device: str) -> list[str]:
    """A line if a cost model was measured on another type of device than a plan is for."""
    if compute_device == ("cpu" if setting.hardware.startswith("cpu") else "cuda"):
        return []
    return [f"devices are of type {compute_device}; the cost model was measured on {setting.hardware}"]


def _unpriced_replicas(plan: ShardingPlan, problem: Problem | None) -> list[str]:
    replicas = [
        name
        for module in plan.plan.values()
        for name, sharding in module.items()
        if (layout := layout_of_torchrec(sharding.sharding_type)) and layout.dense_gradient
    ]
    shown = ", ".join(map(repr, replicas[:3])) + (", ..." if len(replicas) > 3 else "")
    under, by = (f", under {problem.optimizer}", f", {problem.replica_optimizer},") if problem else ("", "")
    return (
        [
            f"replicas of {shown} are priced as if updated in backward{under}; a dense optimizer{by} steps "
            "over all of their weights later, which is not timed"
        ]
        if replicas
        else []
    )
