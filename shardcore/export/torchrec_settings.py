"""Settings that TorchRec has beside the placement. ShardCore keeps them but does not price them.

A ShardingPlan has the kernels and memory tiers of tables (UVM, caches, SSD, output types). Sharders have the
precision of collectives.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from shardcore.errors import ShardCoreError
from shardcore.export import torchrec_json
from shardcore.fused import OPTIMIZERS, named
from shardcore.job import Job
from shardcore.layouts import layout_of_torchrec
from shardcore.types import Setting

if TYPE_CHECKING:
    from torch import nn
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
        found = torchrec_json.encode(plain, what)
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
        raise ShardCoreError(f"{what} has settings {sorted(settings)} and no compute_kernel; it needs one, "
                             "such as 'fused'")
    return torchrec_json.decode(ParameterSharding, {"sharding_type": "", **settings}, what)


_TORCH = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
"""Payloads by torch's names."""


def unpriced(plan: ShardingPlan, sharders: Iterable[ModuleSharder[Any]] = (),
             optimizer: str | None = None, job: Job | None = None) -> list[str]:
    """What the price of a plan leaves out, a line each.

    Tables are priced as fused ops in device memory, collectives with the job's payloads (None: FP32).
    Sharders are checked for other payloads, and for another optimizer in fused_params. (For one that is set
    on parameters see unpriced_optimizers.) Of replicas no model has the time of the dense optimizer.
    """
    job = job or Job()
    said = _unpriced_replicas(plan, optimizer, job)
    for path, module in plan.plan.items():
        for name, sharding in module.items():
            given = [f"{f.name}={value}" for f in fields(sharding)
                     if f.name not in (*PLACEMENT, "compute_kernel")
                     and (value := getattr(sharding, f.name)) is not None]
            if sharding.compute_kernel not in PLAIN_KERNELS or given:
                said.append(f"table {name!r} of module {path!r} is priced as fused, in device memory; it has "
                            + ", ".join([f"kernel {sharding.compute_kernel}", *given]))
    for sharder in sharders:
        # Optimizers differ in time and in memory for their state.
        own = getattr((getattr(sharder, "fused_params", None) or {}).get("optimizer"), "name", None)
        if optimizer and own and named(own, OPTIMIZERS) != optimizer:
            said.append(f"tables of {type(sharder).__name__} are priced, and their state counted, as under "
                        f"{optimizer}; its optimizer is {own}")
        # Without codecs all is sent in FP32.
        sent = {op.lower(): tuple(str(codec.quantized_dtype).removeprefix("torch.")
                                  for codec in (codecs.forward, codecs.backward))
                for op, codecs in (getattr(sharder, "qcomm_codecs_registry", None) or {}).items()
                } or {"output": ("float32", "float32")}
        priced = tuple(_TORCH[payload] for payload in (job.forward_payload, job.backward_payload))
        said += [f"{op} of {type(sharder).__name__} is priced with {priced[0]} forward, {priced[1]} "
                 f"backward; it sends {own[0]} forward, {own[1]} backward"
                 for op, own in sent.items() if own != priced]
    return said


def unpriced_optimizers(module: nn.Module, optimizer: str) -> list[str]:
    """A line for each other optimizer that apply_optimizer_in_backward set on weights of tables.

    optimizer: what tables are priced and counted with.
    """
    from torchrec.distributed.utils import optimizer_type_to_emb_opt_type

    other: dict[str, list[str]] = {}
    for path, parameter in module.named_parameters():
        *_, collection, table, _ = ("", "", *path.split("."))
        if collection not in ("embedding_bags", "embeddings"):
            continue
        for kind in getattr(parameter, "_optimizer_classes", ()):
            theirs = optimizer_type_to_emb_opt_type(kind)
            if theirs is None or named(theirs.name, OPTIMIZERS) != optimizer:
                other.setdefault(kind.__name__, []).append(table)
    return [f"tables {', '.join(map(repr, tables[:3]))}{', ...' * (len(tables) > 3)} are priced, and their "
            f"state counted, as under {optimizer}; their optimizer in backward is {kind}"
            for kind, tables in other.items()]


def unpriced_hardware(setting: Setting, compute_device: str) -> list[str]:
    """A line if a cost model was measured on another type of device than a plan is for."""
    measured_on_cpu = setting.hardware.startswith("cpu")
    if measured_on_cpu == (compute_device == "cpu"):
        return []
    return [f"devices are of type {compute_device}; the cost model was measured on {setting.hardware}"]


def _unpriced_replicas(plan: ShardingPlan, optimizer: str | None, job: Job) -> list[str]:
    replicas = [name for module in plan.plan.values() for name, sharding in module.items()
                if (layout := layout_of_torchrec(sharding.sharding_type)) and layout.dense_gradient]
    dense = job.replica_optimizer or (OPTIMIZERS[optimizer].dense if optimizer else None)
    shown = ", ".join(map(repr, replicas[:3])) + (", ..." if len(replicas) > 3 else "")
    under, by = f", under {optimizer}" if optimizer else "", f", {dense}," if dense else ""
    return [f"replicas of {shown} are priced as if updated in backward{under}; a dense optimizer{by} steps "
            "over all of their weights later, which is not timed"] if replicas else []
