"""Conversion of TorchRec's planner Topology to ShardCore's."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shardcore.core.errors import ShardCoreError
from shardcore.core.links import DEFAULT_ROWS_OVER, LEVELS, ROWS_OVER, make_links
from shardcore.core.tiers import BELOW, TIERS, Memory
from shardcore.core.topology import BYTES_PER_MS_PER_GBPS, Device, Topology
from shardcore.core.types import Placement
from shardcore.core.validation import require, require_type
from shardcore.step.kinds import pod_size, row_domain_choices
from shardcore.torchrec import fields

if TYPE_CHECKING:
    from torchrec.distributed.planner import Topology as TheirTopology

POD_SIZE = "TORCHREC_RESOLVED_POD_SIZE"
"""Environment variable from which TorchRec's jobs read how many hosts a pod has."""


def topology_from_torchrec(
    topology: TheirTopology, reserved: float = 0.0, below: Collection[str] = ()
) -> Topology:
    """ShardCore Topology with the devices and hosts of TorchRec's. On CPUs, DDR counts as device memory.

    reserved: share of a device's memory that stays free of embeddings.
    below: tiers below the devices where tables have rows. The topology has these, and the links to them.

    Bandwidths between devices that differ from TorchRec's defaults are the topology's. For others the cost
    model has its measured ones.

    Raises ShardCoreError naming a setting that is refused, for pods that hosts do not tile or that the environment
    contradicts, and where no memory is left.
    """
    from torchrec.distributed.planner import Topology as TheirTopology

    require_type(topology, TheirTopology, "topology", "TorchRec's planner Topology, or ShardCore's Topology")
    require_type(reserved, float, "reserved", "a number")
    require(0 <= reserved < 1, f"reserved is {reserved}; it needs to be a share of memory, 0 to below 1")
    _unpriced_topology_lines(topology)
    hosts_of_pod = _hosts_per_pod(topology)
    storage, devices = _storage_field(topology), []
    # DDR of a CPU's devices, HBM otherwise.
    for d in topology.devices:
        capacity = getattr(d.storage, storage)
        require(
            capacity * (1 - reserved) >= 1,
            f"topology has {storage}_cap {capacity} on rank {d.rank}; it needs bytes, of which some are left with "
            f"{100 * reserved:.6g}% reserved",
        )
        # TorchRec numbers ranks host by host, and pod by pod.
        host = f"host-{d.rank // topology.local_world_size}"
        if hosts_of_pod > 1:
            host = f"pod-{d.rank // (topology.local_world_size * hosts_of_pod)}/{host}"
        devices.append(Device(int(capacity * (1 - reserved)), host=host))
    memory = []
    for tier in (TIERS[name] for name in BELOW if name in below and storage == "hbm"):
        if tier.torchrec is None:
            continue
        capacity, bandwidth = tier.torchrec
        # Our tiers have one size for all hosts, so the smallest counts.
        of_host = min(getattr(d.storage, capacity) for d in topology.devices) * topology.local_world_size
        require(
            of_host > 0,
            f"topology has {capacity}_cap 0 on a rank, and tables have rows in {tier.words}; "
            "it needs bytes there",
        )
        memory.append(Memory(tier.name, of_host, getattr(topology, bandwidth) / BYTES_PER_MS_PER_GBPS))
    # Only bandwidths that somebody gave. Others are the cost model's.
    gbps: dict[str, Any] = nondefault_bandwidths(topology)
    return with_row_domain_of_environment(
        Topology(tuple(devices), links=make_links(**gbps), memory=tuple(memory))
    )


def _storage_field(topology: TheirTopology) -> str:
    """TorchRec's field for the memory in which a device holds tables: "ddr" on CPUs, else "hbm"."""
    return "ddr" if topology.compute_device == "cpu" else "hbm"


def _unpriced_topology_lines(topology: TheirTopology) -> list[str]:
    """A line for each set argument of TorchRec's Topology whose effect the price leaves out.

    Raises as `topology_from_torchrec`.
    """
    values = fields.field_values(topology)
    values.pop("pod_size", None)
    return fields.unpriced_field_lines(type(topology), values, "topology")


def _hosts_per_pod(topology: TheirTopology) -> int:
    """Hosts per pod of TorchRec's Topology. Raises ShardCoreError unless pods are of one size."""
    pod, hosts = getattr(topology, "_pod_size", None) or 1, topology.world_size // topology.local_world_size
    require(
        hosts % pod == 0,
        f"topology has pod_size {pod} and {hosts} hosts of {topology.local_world_size} devices; TorchRec needs pods of "
        f"one size: {' or '.join(str(n) for n in range(1, hosts + 1) if hosts % n == 0)}",
    )
    return pod


def with_row_domain_of_environment(topology: Topology) -> Topology:
    """Topology with rows divided over the domain, host or pod, that the environment variable POD_SIZE names.

    Raises ShardCoreError if the topology has no such domains, or its rows_over is another one.
    """
    # TorchRec reads this variable at run time, whatever a plan assumes.
    if (theirs := os.environ.get(POD_SIZE)) is None:
        return topology
    able = {pod_size(replace(topology, rows_over=domain)): domain for domain in row_domain_choices(topology)}
    if (domain := {str(size): domain for size, domain in able.items()}.get(theirs)) is None:
        ours = " or ".join(map(str, able))
        raise ShardCoreError(
            f"the environment has {POD_SIZE}={theirs}: TorchRec would divide rows over {theirs} hosts of "
            f"{len(topology.devices_by_host[0])} devices, and the topology over {ours}: set it to {ours}, or give "
            f"Topology(pod_size={theirs})"
        )
    return replace(topology, rows_over=domain) if len(able) > 1 else topology


def topology_of_job(world_size: int) -> Topology:
    """Topology of the running job: ranks by host, with the memory that this rank's device reports."""
    import torch

    # torchrun states ranks of a host. Without it all are on one.
    per_host = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    if torch.cuda.is_available():
        memory_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    else:
        # Ranks of a CPU host share its memory.
        memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // per_host
    devices = (Device(memory_bytes, host=f"host-{rank // per_host}") for rank in range(world_size))
    return Topology(tuple(devices))


def require_pod_environment(topology: Topology, placements: Iterable[Placement]) -> None:
    """Raise ShardCoreError if a plan divides rows over pods, where the environment has TorchRec use hosts."""
    if (size := pod_size(topology, placements)) > 1 and POD_SIZE not in os.environ:
        raise ShardCoreError(
            f"the plan divides rows over pods of {size} hosts, and {POD_SIZE} is not set, so TorchRec would divide "
            f"them over hosts: set it to {size}, or give a topology with rows_over {DEFAULT_ROWS_OVER!r}"
        )


def row_division_note(topology: Topology) -> str:
    """Line that says whether row-wise sharding spans a host or a pod; "" if the environment states it."""
    if POD_SIZE in os.environ or not any(
        topology.joins_devices(level) for level in list(ROWS_OVER.values())[1:]
    ):
        return ""
    if (size := pod_size(topology)) > 1:
        return f"rows are divided over pods: the job needs {POD_SIZE}={size}, which is not set here"
    return (
        f"rows are divided over hosts, as TorchRec does without {POD_SIZE}; set it to the hosts of a pod to have them "
        "divided over pods"
    )


def nondefault_bandwidths(topology: TheirTopology) -> dict[str, float | None]:
    """GB/s of a device by level of links; None where TorchRec's Topology has its default."""
    from torchrec.distributed.planner import constants
    from torchrec.distributed.planner.types import BasicCommsBandwidths

    theirs = topology.comms_bandwidths
    require(
        type(theirs) is BasicCommsBandwidths,
        f"topology has generalized_comms_bandwidths {type(theirs).__name__}; ShardCore "
        "prices BasicCommsBandwidths, or intra_host_bw and inter_host_bw",
    )
    gbps = {}
    for level in LEVELS.values():
        if level.torchrec is not None:
            # A value equal to the default counts as not given.
            value, default = getattr(theirs, level.torchrec[0]), getattr(constants, level.torchrec[1])
            gbps[level.name] = None if value == default else value / BYTES_PER_MS_PER_GBPS
    return gbps


def default_memory_note(topology: TheirTopology) -> str:
    """Line on a device memory equal to TorchRec's default, which may be unintended; "" for another capacity."""
    from torchrec.distributed.planner import constants

    storage = _storage_field(topology)
    default = getattr(constants, f"{storage.upper()}_CAP")
    if any(getattr(d.storage, storage) != default for d in topology.devices):
        return ""
    return (
        f"devices count as {default / 2**30:g} GiB, TorchRec's default, which holds where {storage}_cap is not "
        f"given: Topology({storage}_cap=bytes of a device)"
    )


def topology_notes(topology: TheirTopology, below: Iterable[Memory]) -> list[str]:
    """A line for each default of TorchRec's Topology that counts, or that the cost model replaces.

    below: tiers of the topology where tables have rows.
    """
    inner = next(iter(LEVELS))
    several = topology.world_size > topology.local_world_size
    unused = [
        theirs[0]
        for name, gbps in nondefault_bandwidths(topology).items()
        # Links between hosts do not matter on one host.
        if (theirs := LEVELS[name].torchrec) and gbps is None and (several or name == inner)
    ]
    lines = [default_memory_note(topology)]
    if unused:
        lines.append(
            f"{' and '.join(unused)} of the topology {'is' if len(unused) == 1 else 'are'} "
            "TorchRec's default and not used: exchanges are priced as the cost model knows them"
        )
    for memory in below:
        if names := TIERS[memory.tier].torchrec:
            lines.append(
                f"{TIERS[memory.tier].words} is TorchRec's {names[0]}_cap of each device, its link "
                f"{memory.gbps:g} GB/s ({names[1]})"
            )
    return [line for line in lines if line] + _unpriced_topology_lines(topology)
