"""The cards of hardware profiles: data sheets, and the order in which profiles start from each other.

A profile starts from that of the card that it is most like, scaled by data sheets, and is then fitted to the
timings of its own card. The first has no other to start from: its values are BASE.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shardcore.cost.profile import PROFILED_COLLECTIVES, RATES, SPEC, Network, Profile, ProfileRate
from shardcore.cost.profile_fit import QUALITIES, Timing, fit_profile, network_rates, scale_profile
from shardcore.cost.profile_law import FAR, NEAR

MIB, GB = 1 << 20, 10**9
_RECSYS = "NVIDIA/recsys-examples, FBGEMM TBE on H100"
_SHEET = "data sheet of NVIDIA H100 SXM"
_STREAMED = f"{_SHEET}: 3,350 GB/s, three quarters of it as streaming kernels reach"
_STEPS = "MLPerf's DLRM-DCNv2, published steps less predicted embeddings: median"
_IDS = f"{_SHEET}: 3,350 GB/s over the passes of FBGEMM's kernels of ids"

BASE: Mapping[str, tuple[float, float, str]] = {
    "hbm_gbps": (3350, 0.0, _SHEET),
    "sm_ghz": (132 * 1.755, 0.0, _SHEET),
    "l2_bytes": (50 * MIB, 0.1, _SHEET),
    "granule_bytes": (
        32,
        0.02,
        "NVIDIA CUDA C++ Best Practices Guide: memory is read in sectors of 32 bytes",
    ),
    "nvlink_gbps": (450, 0.0, _SHEET),
    "network_gbps": (50, 0.0, "data sheet of NVIDIA DGX H100: a 400 Gb/s card for each GPU"),
    "pcie_gbps": (64, 0.0, _SHEET),
    "switch_generation": (3, 0.0, "data sheet of NVIDIA HGX H100"),
    "peak_tflops": (989, 0.0, _SHEET),
    "compute_factor": (1, 0.1, "the law"),
    "exchange_factor": (1, 0.08, "the law"),
    "forward_op_us": (50, 0.18, f"{_RECSYS}: 16 to 24% of peak at 65,536 lookups"),
    "backward_op_us": (140, 0.12, f"{_RECSYS}: a straight line through 65,536 and 1,048,576 lookups"),
    "backward_kernels_us": (
        22,
        0.4,
        "facebookresearch/param et_replay (on V100): kernels of tens of lookups",
    ),
    "forward_table_us": (0.3, 0.7, f"{_RECSYS}: 10 tables take no longer than one"),
    "backward_table_us": (1, 0.7, f"{_RECSYS}: 10 tables take 11 us longer than one"),
    "forward_lookup_ns": (0.045, 0.5, "meta-pytorch/torchrec PR 2365: tables 4 to 32 wide"),
    "backward_lookup_ns": (0.08, 0.5, f"{_RECSYS}: what bytes leave of a backward pass"),
    "sort_lookup_ns": (0.04, 0.5, f"{_RECSYS}: what bytes leave of a backward pass"),
    "weighted_lookup_ns": (0.003, 0.7, f"{_STREAMED}: 8 bytes a lookup"),
    "read_gbps": (2200, 0.3, _RECSYS),
    "repeat_gbps": (5500, 0.4, f"{_SHEET}: L2 reads at about 1.6 times memory's rate"),
    "stream_gbps": (2500, 0.1, _STREAMED),
    "update_gbps": (1900, 0.3, _RECSYS),
    "dense_gbps": (2500, 0.2, _STREAMED),
    "host_table_us": (4, 0.5, f"{_RECSYS}: host memory, 65,536 lookups"),
    "cache_lookup_ns": (0.1, 0.5, f"{_RECSYS}: caching, backward over that in device memory"),
    "host_read_gbps": (67, 0.3, _RECSYS),
    "host_update_gbps": (85, 0.3, _RECSYS),
    "host_cache_gbps": (50, 0.4, _RECSYS),
    "dense_tflops": (312, 0.2, f"{_STEPS} of 43 systems, scaled to H100"),
    "bucketize_gbps": (200, 0.7, f"{_IDS}: about 16"),
    "order_gbps": (400, 0.7, f"{_IDS}: about 8"),
} | {
    f"{collective}_{what}": (value, sure, f"nccl-tests: {words}")
    for collective, latency, near, far, late, step in (
        ("all_to_all", 25, 345, 46, 50, 1.2),
        ("reduce_scatter", 25, 360, 40, 30, 3),
        ("all_gather", 25, 360, 40, 30, 3),
        ("all_reduce", 25, 309, 40, 35, 15),
    )
    for what, value, sure, words in (
        ("within_host_latency_us", latency, 0.5, "latency of NVLink"),
        ("within_host_ramp_us", 80, 0.7, "32 MiB to 1 GiB on H100"),
        ("within_host_ramp_bytes", 1e8, 1.0, "32 MiB to 1 GiB on H100"),
        ("within_host_gbps", near, 0.2, "maintainers' figures of NVIDIA/nccl-tests issue 212"),
        ("between_hosts_latency_us", late, 0.5, "8 B to 16 KiB on A100"),
        ("between_hosts_ramp_us", 300 if collective == "all_reduce" else 100, 0.7, "64 KiB to 4 MiB on A100"),
        (
            "between_hosts_ramp_bytes",
            2e7 if collective == "all_reduce" else 1e6,
            1.0,
            "64 KiB to 4 MiB on A100",
        ),
        ("between_hosts_gbps", far, 0.2, "maintainers' figures of NVIDIA/nccl-tests issue 267"),
        ("round_us", step, 0.4, "2 to 10 hosts on A100 and H100"),
    )
}
"""Value, uncertainty and source of each rate that the first fit starts from."""


@dataclass(frozen=True)
class Card:
    """Data sheet of a GPU with a hardware profile.

    like: name of the profile that it starts from.
    exchanges: name of the profile whose collectives it starts from. "": the same.
    spec: what its data sheet has otherwise (profile.SPEC).
    devices: parts of torch.cuda.get_device_name().
    gpus: names that timings have for it.
    error: relative error that the law is expected to have on its timings.
    rates: value, uncertainty and source of rates that do not scale.
    """

    like: str
    spec: Mapping[str, float]
    devices: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()
    exchanges: str = ""
    error: float = 0.08
    rates: Mapping[str, tuple[float, float, str]] = dataclasses.field(default_factory=dict)


def _card_spec(memory_gb: float, hbm: float, sm: float, l2_mib: float, **more: float) -> dict[str, float]:
    return {
        "memory_bytes": memory_gb * GB,
        "hbm_gbps": hbm,
        "sm_ghz": sm,
        "l2_bytes": l2_mib * MIB,
        **more,
    }


_A100 = {"nvlink_gbps": 300, "network_gbps": 25, "pcie_gbps": 32, "switch_generation": 2, "peak_tflops": 312}
_PCIE = {"switch_generation": 1, "network_gbps": 25}
_AMD = {"granule_bytes": 128, "pcie_gbps": 64, "network_gbps": 50, "switch_generation": 1}
_CORE = "data sheet of AMD EPYC 7003, one core: 10 lines of 64 bytes on their way, 90 ns each"
_GLOO = "gloo over the loopback of a host: copies through sockets, at a core's rate"
_CPU_SPEC = {
    **_card_spec(64, 204.8, 3.0, 32, nvlink_gbps=7, network_gbps=1.25, pcie_gbps=7, switch_generation=1),
    "granule_bytes": 64,
    "peak_tflops": 0.096,
}
_CPU: Mapping[str, tuple[float, float, str]] = {
    **dict.fromkeys(("read_gbps", "update_gbps"), (7, 0.6, _CORE)),
    **dict.fromkeys(("stream_gbps", "dense_gbps", "bucketize_gbps", "order_gbps"), (5, 0.7, _CORE)),
    **dict.fromkeys(("host_read_gbps", "host_update_gbps", "host_cache_gbps"), (7, 0.7, _CORE)),
    "repeat_gbps": (20, 0.6, "data sheet of AMD EPYC 7003: a line of 64 bytes each 3 ns from L3"),
    "forward_lookup_ns": (10, 0.7, f"{_CORE}: a row overlaps with about nine others"),
    "backward_lookup_ns": (20, 0.7, f"{_CORE}: a row and its gradient"),
    "dense_tflops": (
        0.05,
        0.7,
        "data sheet of AMD EPYC 7003, one core: half of two FMAs of 8 floats a cycle at 3 GHz",
    ),
    "sort_lookup_ns": (30, 0.7, "radix sort of 4 passes, a count and a move each, at about 4 ns"),
    **{f"{c}_within_host_gbps": (2, 0.7, _GLOO) for c in PROFILED_COLLECTIVES},
    **{f"{c}_between_hosts_gbps": (1, 0.7, "data sheet: 10 Gb/s Ethernet") for c in PROFILED_COLLECTIVES},
    **{f"{c}_{level}_latency_us": (300, 0.7, _GLOO) for c in PROFILED_COLLECTIVES for level in (NEAR, FAR)},
    **{f"{c}_{level}_ramp_us": (10, 0.7, _GLOO) for c in PROFILED_COLLECTIVES for level in (NEAR, FAR)},
}
CARDS: Mapping[str, Card] = {
    # Columns of PR 2365 say how bandwidth depends on width; its card is Meta's H100 of 2.4 TB/s.
    "h100-96": Card("base", _card_spec(96, 2400, 231.7, 50), (), ("unknown (Meta H100-96 fits)",)),
    # NCCL's small messages were timed on A100s only.
    "nvidia-a100-40": Card(
        "base",
        _card_spec(40, 1555, 152.3, 40, **_A100),
        ("A100-SXM4-40GB", "A100-PCIE-40GB"),
        ("A100-40",),
    ),
    "nvidia-h100-sxm": Card(
        "h100-96",
        _card_spec(80, 3350, 231.7, 50),
        ("H100 80GB HBM3", "H100"),
        ("H100",),
        exchanges="nvidia-a100-40",
        rates={"dense_tflops": (338, 0.15, f"{_STEPS} of 23 systems")},
    ),
    "nvidia-a100-80": Card(
        "nvidia-a100-40",
        _card_spec(80, 2039, 152.3, 40),
        ("A100-SXM4-80GB", "A100 80GB", "A100"),
        ("A100-80",),
        rates={"dense_tflops": (141, 0.2, f"{_STEPS} of one system")},
    ),
    "nvidia-h200": Card(
        "nvidia-h100-sxm",
        _card_spec(141, 4800, 231.7, 50),
        ("H200",),
        ("H200",),
        rates={"dense_tflops": (396, 0.15, f"{_STEPS} of 7 systems")},
    ),
    "nvidia-b200": Card(
        "nvidia-h100-sxm",
        _card_spec(180, 8000, 290.8, 126, nvlink_gbps=900, switch_generation=4, peak_tflops=2250),
        ("B200",),
        ("B200",),
        rates={"dense_tflops": (613, 0.15, f"{_STEPS} of 8 systems")},
    ),
    "nvidia-gb200": Card(
        "nvidia-b200",
        _card_spec(186, 8000, 290.8, 126, pcie_gbps=450, peak_tflops=2500),
        ("GB200",),
        ("GB200",),
    ),
    "nvidia-b300": Card(
        "nvidia-b200", _card_spec(288, 8000, 290.8, 126, network_gbps=100), ("B300",), ("B300",)
    ),
    "nvidia-h20": Card(
        "nvidia-h100-sxm", _card_spec(96, 4000, 154.4, 60, peak_tflops=148), ("H20",), ("H20",)
    ),
    **{
        name: Card(
            "nvidia-h100-sxm",
            _card_spec(memory, hbm, sm, l2, nvlink_gbps=link, pcie_gbps=link, peak_tflops=peak, **_PCIE),
            (gpu,),
            (gpu,),
            # Without NVLink, collectives of eight devices in a host reach a sixth of a link's data sheet.
            rates={
                f"{c}_within_host_gbps": (
                    link / 6,
                    0.3,
                    "MLPerf's DLRM-DCNv2 on 8 x H100 PCIe, L40, L40S: what ops and the dense part leave of steps",
                )
                for c in PROFILED_COLLECTIVES
            },
        )
        for name, gpu, memory, hbm, sm, l2, link, peak in (
            ("nvidia-h100-pcie", "H100 PCIe", 80, 2039, 200.1, 50, 64, 756),
            ("nvidia-l40", "L40", 48, 864, 353.6, 96, 32, 181),
            ("nvidia-l40s", "L40S", 48, 864, 357.8, 96, 32, 362),
        )
    },
    "nvidia-v100": Card(
        "nvidia-h100-sxm",
        {
            **_card_spec(32, 900, 122.4, 6, nvlink_gbps=150, network_gbps=6.25, pcie_gbps=16),
            "switch_generation": 1,
            "peak_tflops": 125,
        },
        ("V100",),
        ("V100",),
        exchanges="nvidia-a100-40",
        error=0.2,
    ),
    "amd-mi350": Card(
        "nvidia-h100-sxm",
        _card_spec(288, 8000, 614.4, 256, nvlink_gbps=537, peak_tflops=2300, **_AMD),
        ("MI350", "MI355"),
        ("MI350", "MI355X"),
        error=0.15,
    ),
    "amd-mi300x": Card(
        "amd-mi350", _card_spec(192, 5300, 638.4, 256, nvlink_gbps=448, peak_tflops=1307), ("MI300X",)
    ),
    "cpu": Card("base", _CPU_SPEC, rates=_CPU),
}
"""In the order in which they are made."""


_OF_NETWORK = 0.97
"""Most of a network's data sheet that collectives reach: 48.5 of 50 GB/s, NVIDIA/nccl-tests issue 267."""


@dataclass(frozen=True)
class Sheet:
    """A network, by its data sheet.

    words: its links and set-up, for people.
    card: the card that its timings are of.
    gbps: links of a device between hosts, GB/s each way.
    links: part of the interconnects of its timings. "": it has none.
    sources: parts of its timings' sources. (): any.
    reached: most of the data sheet's bandwidth that its collectives reach.
    """

    words: str
    card: str
    gbps: float
    links: str = ""
    sources: tuple[str, ...] = ()
    reached: float = _OF_NETWORK


_POLARIS = "a100-40 with 2 cards of 200 Gb/s for 4 devices, NCCL 2.18, tuned libfabric"
NETWORKS: Mapping[str, Sheet] = {
    "aws-efa-32x100g": Sheet(
        "AWS EFA, 32 x 100 Gb/s a host of 8 (p5); all-reduces timed, NCCL's tuner unknown",
        "nvidia-h100-sxm",
        50,
        "EFA 32 x 100G",
        reached=math.inf,
    ),
    "aws-efa-4x100g": Sheet(
        "AWS EFA, 4 x 100 Gb/s a host of 8 (p4d, p4de); all-reduces timed, NCCL's tuner unknown",
        "nvidia-a100-80",
        6.25,
        "EFA 4 x 100G",
        # Only all-reduces were timed. Their trees send less between hosts than the ring that a rate is of.
        reached=math.inf,
    ),
    "slingshot-11-setup-4": Sheet(
        f"HPE Slingshot 11 of Polaris, {_POLARIS}, set-up 4",
        "nvidia-a100-40",
        12.5,
        "Slingshot",
        ("setup 4",),
    ),
    "slingshot-11-setup-5": Sheet(
        f"HPE Slingshot 11 of Polaris, {_POLARIS}, set-up 5",
        "nvidia-a100-40",
        12.5,
        "Slingshot",
        ("setup 5",),
    ),
    "slingshot-11": Sheet(
        f"HPE Slingshot 11 of Polaris, {_POLARIS}, any set-up", "nvidia-a100-40", 12.5, "Slingshot"
    ),
    **{
        name: Sheet(
            f"InfiniBand {name.split('-')[1].upper()}, {n} x {gb} Gb/s a host of 8: not timed",
            card,
            n * gb / 64,
        )
        for name, card, n, gb in (
            ("infiniband-hdr-4x200g", "nvidia-a100-40", 4, 200),
            ("infiniband-hdr-8x200g", "nvidia-a100-40", 8, 200),
            ("infiniband-ndr-4x400g", "nvidia-h100-sxm", 4, 400),
            ("infiniband-ndr-8x400g", "nvidia-h100-sxm", 8, 400),
            ("infiniband-xdr-8x800g", "nvidia-h100-sxm", 8, 800),
        )
    },
}
"""Networks between hosts. Those of some sources come before those of any."""
_OTHER_CLUSTERS = {
    f"{FAR}_gbps": 0.15,
    f"{FAR}_latency_us": 0.3,
    f"{FAR}_ramp_us": 0.3,
    "round_us": 0.3,
    "_op_us": 0.55,
    "cache_gbps": 0.1,
}
"""Uncertainty added to a card's rates, by the end of a rate's name.

Between hosts: about what AWS's p5 hosts and one with InfiniBand differ by. Launches: about what hosts differ by, as an
H200 took 2.3 times as long as predicted where launches decide. Caches: what asked rows err by.
"""
_OTHER_SET_UPS = {f"{FAR}_gbps": 0.15, f"{FAR}_latency_us": 0.7, f"{FAR}_ramp_us": 0.7, "round_us": 0.7}
"""Uncertainty added to a network's rates: about what two set-ups of Slingshot differ by."""
EXCHANGE_RATES = tuple(name for name in RATES if name.startswith(PROFILED_COLLECTIVES))
SHIPPED = tuple(name for name in CARDS if name != "h100-96")


def base_profile() -> Profile:
    return Profile(
        "base",
        (),
        80 * GB,
        {
            n: ProfileRate(float(value), sure, RATES[n][0], source)
            for n, (value, sure, source) in BASE.items()
        },
    )


def _is_of_network(timing: Timing, sheet: Sheet) -> bool:
    """True if a published timing is of a network."""
    of_source = not sheet.sources or any(part in timing.source for part in sheet.sources)
    return bool(sheet.links) and sheet.links in timing.network and of_source


def network_of_timing(timing: Timing, names: Iterable[str] = NETWORKS) -> str | None:
    """Name of the network that a published timing is of, among some names. None for others."""
    return next((name for name in names if _is_of_network(timing, NETWORKS[name])), None)


def card_of_timing(timing: Timing) -> str | None:
    """Name of the card that a published timing is of. None for other hardware."""
    return next((name for name, card in CARDS.items() if timing.gpu in card.gpus), None)


def shipped_profile_of_card(gpu: str) -> str | None:
    """Name of the shipped profile for a GPU name. None if no profile is shipped."""
    return next(
        (
            name
            for name in SHIPPED
            if gpu in (*CARDS[name].gpus, *CARDS[name].devices, name.partition("-")[2].upper())
        ),
        None,
    )


def fitted_profiles(timings: Sequence[Timing]) -> dict[str, Profile]:
    """Hardware profile of each card, fitted to published timings."""
    good, made = [t for t in timings if t.quality in QUALITIES], {"base": base_profile()}
    for name, card in CARDS.items():
        start = scale_profile(made[card.like], name, **card.spec)
        if card.exchanges:
            exchanges = scale_profile(
                made[card.exchanges], name, **{n: start.rates[n].value for n in SPEC}
            ).rates
            start = dataclasses.replace(
                start, rates={**start.rates, **{n: exchanges[n] for n in EXCHANGE_RATES}}
            )
        given = {
            n: ProfileRate(float(v), sure, RATES[n][0], source) for n, (v, sure, source) in card.rates.items()
        }
        start = dataclasses.replace(start, rates={**start.rates, **given})
        own = [t for t in good if card_of_timing(t) == name and not network_of_timing(t)]
        made[name] = fit_profile(own, start, card.error, _OF_NETWORK) if own else start
    return {
        name: dataclasses.replace(
            made[name], rates=_widened(made[name].rates, _OTHER_CLUSTERS), device_names=card.devices
        )
        for name, card in CARDS.items()
    }


def fitted_networks(timings: Sequence[Timing], profiles: Mapping[str, Profile]) -> dict[str, Network]:
    """Rates of interconnects: fitted to published timings, or from data sheets where nobody published timings."""
    made = {}
    for name, sheet in NETWORKS.items():
        own = [t for t in timings if t.quality in QUALITIES and _is_of_network(t, sheet)]
        # A set-up without timings has no rates of its own.
        if own or not sheet.sources:
            start = scale_profile(profiles[sheet.card], name, network_gbps=sheet.gbps)
            rates = network_rates(start, own, CARDS[sheet.card].error, sheet.reached)
            made[name] = Network(name, sheet.words, _widened(rates, {} if sheet.sources else _OTHER_SET_UPS))
    return made


def _widened(rates: Mapping[str, ProfileRate], more: Mapping[str, float]) -> dict[str, ProfileRate]:
    """Rates with wider uncertainty, as users' clusters differ from those that were fitted.

    more: uncertainty that is added, by the end of a rate's name.
    """
    return {
        name: dataclasses.replace(
            rate,
            uncertainty=math.hypot(
                rate.uncertainty,
                *(sure for end, sure in more.items() if name.endswith(end)),
            ),
        )
        for name, rate in rates.items()
    }
