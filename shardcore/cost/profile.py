"""Hardware profiles: rates of a card from published measurements and data sheets, each with its uncertainty and source.

A profile prices any setting at once (profile_model.py), for hardware that nobody measured here yet.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np

from shardcore.core.links import host_names
from shardcore.core.tiers import BELOW, Memory
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Setting
from shardcore.core.validation import (
    MOST_BYTES,
    Record,
    Rule,
    each_entry,
    number_within,
    require,
    require_name,
    require_path_name,
    to_path_name,
)
from shardcore.io import envelope, schema, writing

if TYPE_CHECKING:
    from shardcore.cost.profile_model import ProfileModel

_FOLDER = Path(__file__).parent / "profiles"
SCHEMA = "profile"
PROFILED_COLLECTIVES = ("all_to_all", "reduce_scatter", "all_gather", "all_reduce")
"""Collectives with rates. A reduce-scatter runs backward as an all-gather."""

SPEC: Mapping[str, tuple[str, str]] = {
    "hbm_gbps": ("GB/s", "memory of a device"),
    "sm_ghz": ("GHz", "multiprocessors times their clock"),
    "l2_bytes": ("bytes", "L2 cache"),
    "granule_bytes": ("bytes", "unit in which memory is read"),
    "nvlink_gbps": ("GB/s", "links of a device within a host, each way"),
    "network_gbps": ("GB/s", "links of a device between hosts, each way"),
    "pcie_gbps": ("GB/s", "link of a device to host memory, each way"),
    "switch_generation": ("1", "generation of the switches within a host: from the third on they sum"),
}
"""Rates of a data sheet: unit and words. Others scale with them (profile_fit.scale_profile)."""
RATES: Mapping[str, tuple[str, str]] = {
    **SPEC,
    "compute_factor": ("1", "ops over the law: its uncertainty is what the law leaves unexplained"),
    "exchange_factor": ("1", "collectives over the law: its uncertainty is what the law leaves unexplained"),
    "forward_op_us": ("us", "a fused op, forward"),
    "backward_op_us": ("us", "a fused op, backward, without its kernels of rows"),
    "backward_kernels_us": ("us", "kernels of rows of a fused op, backward"),
    "forward_table_us": ("us", "a shard in an op, forward"),
    "backward_table_us": ("us", "a shard in an op, backward"),
    "forward_lookup_ns": ("ns", "instructions of a lookup, forward"),
    "backward_lookup_ns": ("ns", "instructions of a lookup, backward"),
    "sort_lookup_ns": ("ns", "a lookup that is sorted, backward"),
    "weighted_lookup_ns": ("ns", "the weight of a lookup, forward and backward"),
    "read_gbps": ("GB/s", "rows that are read from memory"),
    "repeat_gbps": ("GB/s", "rows and gradients that are read again, from L2"),
    "stream_gbps": ("GB/s", "outputs that are written, and gradients that are read"),
    "update_gbps": ("GB/s", "rows and optimizer state that are read and written"),
    "dense_gbps": ("GB/s", "gradients, weights and state of replicas"),
    "host_table_us": ("us", "a shard with rows in host memory, forward and backward"),
    "cache_lookup_ns": ("ns", "a lookup that finds its place in a cache, forward and backward"),
    "host_read_gbps": ("GB/s", "rows that are read from host memory without a cache"),
    "host_update_gbps": ("GB/s", "rows and state that are read and written in host memory"),
    "host_cache_gbps": ("GB/s", "rows that a cache fetches and writes back"),
    "bucketize_gbps": ("GB/s", "ids that are put in buckets before they travel"),
    "order_gbps": ("GB/s", "ids that are put in order after they travelled"),
} | {
    f"{collective}_{what}": (unit, f"{collective.replace('_', '-')}: {words}")
    for collective in PROFILED_COLLECTIVES
    for what, unit, words in (
        ("within_host_latency_us", "us", "a small message within a host"),
        ("within_host_ramp_us", "us", "what large messages take more within a host, whatever their size"),
        ("within_host_ramp_bytes", "bytes", "a message within a host that takes half of that more"),
        ("within_host_gbps", "GB/s", "a device within a host"),
        ("between_hosts_latency_us", "us", "a small message between two hosts"),
        ("between_hosts_ramp_us", "us", "what large messages take more between hosts, whatever their size"),
        ("between_hosts_ramp_bytes", "bytes", "a message between hosts that takes half of that more"),
        ("between_hosts_gbps", "GB/s", "a device between hosts"),
        ("round_us", "us", "a further round between hosts"),
    )
}
"""Unit of each rate of a profile, and words for it."""
HOST_GBPS = ("host_read_gbps", "host_update_gbps", "host_cache_gbps")
"""Rates that scale with the link to host memory."""
MOST_UNCERTAINTY = 3.0
ENDS = (1e-9, 1e15)
"""The ends of a rate in its unit. Beyond them prices overflow."""
_STATED = Rule(lambda text: bool(text.strip()), "it needs one", found=lambda name, _: f"no {name}")
_DEFAULT_BATCH = 65_536
"""Batch of a model that is of no problem yet."""


@dataclass(frozen=True)
class Rate(Record, noun="a rate"):
    """One rate of a hardware profile: value, unit, uncertainty and source.

    value: in its unit.
    uncertainty: standard deviation of its logarithm. 0.1 is about 10%.
    unit: its unit in RATES.
    source: published measurement, data sheet, or "scaled from ...".
    """

    value: Annotated[float, number_within(*ENDS)]
    uncertainty: Annotated[float, number_within(0, MOST_UNCERTAINTY)]
    unit: str
    source: Annotated[str, _STATED]


@dataclass(frozen=True)
class Profile(Record, noun="profile"):
    """Hardware profile: rates of a GPU (or CPU), and of the links between several.

    name: name of the hardware, as in Setting and Topology.
    device_names: parts of torch.cuda.get_device_name() that mean this card.
    memory_bytes: memory of a device.
    rates: by name, one for each of RATES.

    Raises ShardCoreError naming a rate that is missing, unknown or not positive.
    """

    name: Annotated[str, require_path_name]
    device_names: Annotated[tuple[str, ...], each_entry(require_name)]
    memory_bytes: Annotated[int, number_within(1, MOST_BYTES)]
    rates: Mapping[str, Rate]

    def __post_init__(self) -> None:
        super().__post_init__()
        p = f"profile {self.name!r}"
        unknown = sorted(self.rates.keys() - RATES)
        missing = [name for name in RATES if name not in self.rates]
        require(not unknown, f"{p} has an unknown rate {unknown[:1]}; known are {', '.join(RATES)}")
        require(not missing, f"{p} lacks the rate {missing[:1]}")
        for name, rate in self.rates.items():
            unit = RATES[name][0]
            require(rate.unit == unit, f"{p} has {name} in {rate.unit!r}; it needs {unit!r}")

    @cached_property
    def digest(self) -> str:
        """16 hex digits that identify the content of a hardware profile."""
        return envelope.json_digest(dataclasses.asdict(self))

    def covers_hardware(self, hardware: str) -> bool:
        """True if the profile is for a hardware, by its own name or a name of a measured device.

        "cpu" is of all names that begin with "cpu-".
        """
        parts = map(to_path_name, self.device_names)
        return f"{hardware}-".startswith(f"{self.name}-") or any(part in hardware for part in parts)

    def cost_model(self) -> ProfileModel:
        """A cost model with the profile's rates, for any problem."""
        from shardcore.cost.profile_model import ProfileModel

        return ProfileModel(self, Setting(self.name, _DEFAULT_BATCH))

    def with_values(self, values: Mapping[str, float]) -> Profile:
        """The profile with other values of its rates."""
        rates = {name: dataclasses.replace(rate, value=values[name]) for name, rate in self.rates.items()}
        return dataclasses.replace(self, rates=rates)

    def with_sampled_rates(self, rng: np.random.Generator) -> Profile:
        """The profile with rates drawn log-normally within their uncertainty."""
        factors = np.exp(rng.standard_normal(len(RATES)) * [rate.uncertainty for rate in self.rates.values()])
        return self.with_values(
            {n: v * float(f) for (n, v), f in zip(self.rate_values.items(), factors, strict=True)}
        )

    @property
    def rate_values(self) -> dict[str, float]:
        """Values of the profile's rates, by name."""
        return {name: rate.value for name, rate in self.rates.items()}

    def error_band(self, prices: Callable[[Sequence[Mapping[str, float]]], np.ndarray]) -> np.ndarray:
        """Relative standard error of prices computed from the profile's rates, whose errors count as independent.

        prices: (K sets of values of rates) -> prices [K, ...].
        """
        values = self.rate_values
        moved = [
            {**values, name: rate.value * math.exp(rate.uncertainty)}
            for name, rate in self.rates.items()
            if rate.uncertainty
        ]
        logs = np.log(prices([values, *moved]))
        return np.sqrt(((logs[1:] - logs[0]) ** 2).sum(0))

    def topology(
        self, hosts: int, devices_per_host: int, host_memory_bytes: int = 0, pods: int = 1
    ) -> Topology:
        """A topology of devices of this profile, with its memory and links.

        host_memory_bytes: memory of each host for tables. 0: none may have rows there.
        pods: number of pods that hosts are divided into evenly. 1: none.
        """
        return Topology(
            tuple(
                Device(self.memory_bytes, host=name)
                for name in host_names(hosts * devices_per_host, hosts, pods)
            ),
            hardware=self.name,
            memory=(Memory(BELOW[0], host_memory_bytes, self.rates["host_read_gbps"].value),)
            if host_memory_bytes
            else (),
        )


# --- files --------------------------------------------------------------------------------------------------


def profile_names() -> list[str]:
    """Names of the profiles that ShardCore comes with."""
    return sorted(path.stem for path in _FOLDER.glob("*.json"))


def load_profile(name_or_path: str | Path) -> Profile:
    """Load a hardware profile by its name, or from a file.

    name_or_path: such as "nvidia-h100-sxm" (`shardcore profile list` has all), or a path.

    Raises ShardCoreError for an unknown name, with the known ones, and for a file that is no profile.
    """
    if (known := str(name_or_path)) in profile_names():
        return _load_shipped_profile(known)
    require(
        known.endswith(".json") or Path(known).is_file(),
        f"profile {known!r} is not known; known are {', '.join(profile_names())}, or a path of a file; a trained "
        "model's folder goes by --model",
    )
    return read_profile(name_or_path)


def read_profile(path: str | Path) -> Profile:
    """Read a hardware profile from a file. Raises ShardCoreError for an invalid file."""
    return schema.build_record(Profile, envelope.open_document(path, SCHEMA), str(path))


def write_profile(path: str | Path, profile: Profile) -> None:
    """Write a hardware profile to a file, whole or not at all."""
    body = dataclasses.asdict(profile)
    body["rates"] = {name: body["rates"][name] for name in RATES}  # in one order
    writing.write_json(path, envelope.with_schema(SCHEMA, body))


@lru_cache
def _load_shipped_profile(name: str) -> Profile:
    return read_profile(_FOLDER / f"{name}.json")


def profile_of_device(device_name: str) -> Profile:
    """The hardware profile of a card by torch.cuda.get_device_name(). The longest match counts.

    Raises ShardCoreError for a card without a profile, with the known ones.
    """
    names = [
        (part.lower(), name) for name in profile_names() for part in _load_shipped_profile(name).device_names
    ]
    matches = [(len(part), name) for part, name in names if part in device_name.lower()]
    require(
        bool(matches),
        f"device {device_name!r} has no profile; known are {', '.join(profile_names())} (or make one from its data "
        "sheet: shardcore profile new)",
    )
    return _load_shipped_profile(max(matches)[1])
