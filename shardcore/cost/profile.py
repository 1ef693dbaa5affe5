"""Hardware profiles: rates of a card from published measurements and data sheets, each with its uncertainty and source.

A profile prices any setting at once (profile_model.py), for hardware that nobody measured here yet.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

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
from shardcore.io import envelope, writing

if TYPE_CHECKING:
    from shardcore.cost.profile_model import ProfileModel

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
    "peak_tflops": ("TFLOP/s", "matrix units, numbers of 16 bits without sparsity"),
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
    "dense_tflops": ("TFLOP/s", "the dense part of a model, forward and backward, with its optimizer"),
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
NETWORK_RATES = (
    "nvlink_gbps",
    "network_gbps",
    "switch_generation",
    "exchange_factor",
    *(name for name in RATES if name.startswith(PROFILED_COLLECTIVES)),
)
"""Rates of links between devices. A network has some of them in place of a profile's."""
BETWEEN_HOSTS = tuple(
    n for n in RATES if n.endswith("_round_us") or "between_hosts" in n or n == "network_gbps"
)
"""Those between hosts, which each network has."""
MEASUREMENTS: Mapping[str, tuple[Sequence[str], str]] = {
    "ops": (
        [name for name in RATES if name not in (*SPEC, *NETWORK_RATES)],
        "shardcore measure --out DIR; shardcore profile fit DIR --from CARD --out CARD.json",
    ),
    "collectives": (
        [name for name in NETWORK_RATES if name not in SPEC],
        "nccl-tests; shardcore profile network OURS --from-nccl-tests LOG --from CARD --out OURS.json",
    ),
}
"""The rates that each kind of measurement shows, and its commands."""
HOST_GBPS = ("host_read_gbps", "host_update_gbps", "host_cache_gbps")
"""Rates that scale with the link to host memory."""
MOST_UNCERTAINTY = 3.0
ENDS = (1e-9, 1e15)
"""The ends of a rate in its unit. Beyond them prices overflow."""
_Of = TypeVar("_Of", "Profile", "Network")
_STATED = Rule(lambda text: bool(text.strip()), "it needs one", found=lambda name, _: f"no {name}")
_DEFAULT_BATCH = 65_536
"""Batch of a model that is of no problem yet."""


@dataclass(frozen=True)
class ProfileRate(Record, noun="a rate"):
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


def _require_known_rates(what: str, rates: Mapping[str, ProfileRate], known: Iterable[str]) -> None:
    """Raise ShardCoreError for a rate that is not known, or in another unit than that of RATES."""
    unknown = sorted(rates.keys() - set(known))
    require(not unknown, f"{what} has an unknown rate {unknown[:1]}; known are {', '.join(known)}")
    for name, rate in rates.items():
        unit = RATES[name][0]
        require(rate.unit == unit, f"{what} has {name} in {rate.unit!r}; it needs {unit!r}")


@dataclass(frozen=True)
class Network(Record, noun="network"):
    """Rates of links between devices: of a kind of network, under one set-up of NCCL or its like.

    name: name of the network, as in Topology.
    words: its links and set-up, for people.
    rates: some of NETWORK_RATES. A card's profile has the others.

    Raises ShardCoreError naming a rate that is unknown or in another unit.
    """

    name: Annotated[str, require_path_name]
    words: Annotated[str, _STATED]
    rates: Mapping[str, ProfileRate]

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_known_rates(f"network {self.name!r}", self.rates, NETWORK_RATES)


@dataclass(frozen=True)
class Profile(Record, noun="profile"):
    """Hardware profile: rates of a GPU (or CPU), and of the links between several.

    name: name of the hardware, as in Setting and Topology.
    device_names: parts of torch.cuda.get_device_name() that mean this card.
    memory_bytes: memory of a device.
    rates: by name, one for each of RATES.
    network: name of the network that rates between hosts are of. None: the one that was fitted with the card.

    Raises ShardCoreError naming a rate that is missing, unknown or not positive.
    """

    name: Annotated[str, require_path_name]
    device_names: Annotated[tuple[str, ...], each_entry(require_name)]
    memory_bytes: Annotated[int, number_within(1, MOST_BYTES)]
    rates: Mapping[str, ProfileRate]
    network: Annotated[str | None, require_path_name] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        missing = [name for name in RATES if name not in self.rates]
        _require_known_rates(f"profile {self.name!r}", self.rates, RATES)
        require(not missing, f"profile {self.name!r} lacks the rate {missing[:1]}")

    def on_network(self, network: Network) -> Profile:
        """The profile with a network's rates in place of its own."""
        return dataclasses.replace(self, rates={**self.rates, **network.rates}, network=network.name)

    @cached_property
    def digest(self) -> str:
        """16 hex digits that identify the content of a hardware profile."""
        return envelope.json_digest(_content(self))

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

    def error_band(
        self,
        prices: Callable[[Sequence[Mapping[str, float]]], np.ndarray],
        names: Container[str] = RATES,
    ) -> np.ndarray:
        """Relative standard error of prices computed from the profile's rates, whose errors count as independent.

        prices: (K sets of values of rates) -> prices [K, ...].
        names: rates whose errors count.
        """
        values = self.rate_values
        moved = [
            {**values, name: rate.value * math.exp(rate.uncertainty)}
            for name, rate in self.rates.items()
            if rate.uncertainty and name in names
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
            network=self.network,
            memory=(Memory(BELOW[0], host_memory_bytes, self.rates["host_read_gbps"].value),)
            if host_memory_bytes
            else (),
        )


# --- files --------------------------------------------------------------------------------------------------


def profile_names() -> list[str]:
    """Names of the profiles that ShardCore comes with."""
    return _shipped_names(Profile)


def network_names() -> list[str]:
    """Names of the networks that ShardCore comes with."""
    return _shipped_names(Network)


def load_profile(name_or_path: str | Path) -> Profile:
    """Load a hardware profile by its name, or from a file.

    name_or_path: such as "nvidia-h100-sxm" (`shardcore profile list` has all), or a path. With the network between
      hosts, where it is another than the profile's: "nvidia-h100-sxm@aws-efa-32x100g", or a path after the @.

    Raises ShardCoreError for an unknown name, with the known ones, and for a file that is no profile.
    """
    card, at, network = str(name_or_path).rpartition("@")
    if at and not Path(name_or_path).is_file():
        return load_profile(card).on_network(load_network(network))
    return _load(Profile, name_or_path, "; a trained model's folder goes by --model")


def load_network(name_or_path: str | Path) -> Network:
    """Load a network by its name (`shardcore profile networks` has all), or from a file.

    Raises ShardCoreError for an unknown name, with the known ones, and for a file that is no network.
    """
    return _load(Network, name_or_path)


def write_profile(path: str | Path, profile: Profile | Network) -> None:
    """Write a hardware profile, or a network, to a file, whole or not at all."""
    writing.write_json(path, envelope.with_schema(profile.noun, _content(profile)))


def _content(profile: Profile | Network) -> dict[str, Any]:
    """Content of a file: fields that are given, and rates in one order."""
    given = {name: value for name, value in dataclasses.asdict(profile).items() if value is not None}
    return {**given, "rates": {name: given["rates"][name] for name in RATES if name in given["rates"]}}


def _folder(cls: type[_Of]) -> Path:
    return Path(__file__).parent / f"{cls.noun}s"


def _shipped_names(cls: type[_Of]) -> list[str]:
    return sorted(path.stem for path in _folder(cls).glob("*.json"))


@lru_cache
def _load_shipped(cls: type[_Of], name: str) -> _Of:
    return _read(cls, _folder(cls) / f"{name}.json")


def _load(cls: type[_Of], name_or_path: str | Path, hint: str = "") -> _Of:
    """A profile or network that ships with ShardCore, or of a file. hint: added to the error for other names."""
    if (known := str(name_or_path)) in _shipped_names(cls):
        return _load_shipped(cls, known)
    require(
        known.endswith(".json") or Path(known).is_file(),
        f"{cls.noun} {known!r} is not known; known are {', '.join(_shipped_names(cls))}, or a path of a file{hint}",
    )
    return _read(cls, name_or_path)


def _read(cls: type[_Of], path: str | Path) -> _Of:
    return envelope.read_record(cls, path, cls.noun)


def profile_of_device(device_name: str) -> Profile:
    """The hardware profile of a card by torch.cuda.get_device_name(). The longest match counts.

    Raises ShardCoreError for a card without a profile, with the known ones.
    """
    names = [(part.lower(), name) for name in profile_names() for part in load_profile(name).device_names]
    matches = [(len(part), name) for part, name in names if part in device_name.lower()]
    require(
        bool(matches),
        f"device {device_name!r} has no profile; known are {', '.join(profile_names())} (or make one from its data "
        "sheet: shardcore profile new)",
    )
    return load_profile(max(matches)[1])
