"""The measured range of a cost model, and sentences on parts of a step beyond it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardcore.core.links import LEVELS, joining_levels
from shardcore.core.types import Shard
from shardcore.cost import collective_model
from shardcore.step import access
from shardcore.step.kinds import ID_CHANNELS, kinds_of_channel
from shardcore.step.lower import Workload
from shardcore.step.memory import size_text
from shardcore.step.scopes import group_members

if TYPE_CHECKING:
    from shardcore.cost.neural import NeuralModel

SLACK = 1.1
"""A size counts as measured up to a tenth beyond the range."""


def _format_number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


@dataclass(frozen=True)
class MeasuredRange:
    """Words that warn of an input of a cost model, such as bytes of a shard, beyond its measured range.

    The report reads "NAME <phrase VALUE>; <end> measured LIMIT". upper and lower are its ends.
    """

    phrase: str
    upper: str = "largest"
    lower: str = ""
    show: Callable[[float], str] = _format_number
    slack: float = SLACK


RANGES = {
    "shard_bytes": MeasuredRange("is {}", show=size_text),
    "shard_rows": MeasuredRange("has {} rows", "most"),
    "shard_width": MeasuredRange("is {} columns wide", "widest", "narrowest"),
    "shard_pooling": MeasuredRange("has {} lookups a sample", "most"),
    "shard_features": MeasuredRange("has {} features", "most", slack=1.0),
    "op_shards": MeasuredRange("runs {} shards in one op", "most"),
    "op_bytes": MeasuredRange("holds {} in one op", show=size_text),
    "op_sequences": MeasuredRange("runs {} sequences in one op", "most"),
    "op_batch": MeasuredRange("runs an op over {} samples", "largest", "smallest", slack=1.0),
    "batch": MeasuredRange("has a global batch of {}", "largest", "smallest", slack=1.0),
    "devices": MeasuredRange("has {} devices", "most", "fewest", slack=1.0),
    "exchange_bytes": MeasuredRange("exchanges {}", show=size_text),
    "exchange_id_bytes": MeasuredRange("receives {} of ids", show=size_text),
}


def op_quantities(shards: Sequence[Shard], batch: int) -> dict[str, list[float]]:
    """Values of an op's quantities that have a measured range (RANGES). Those of shard_* have one entry for each
    shard.
    """
    return {
        "shard_bytes": [s.bytes for s in shards],
        "shard_rows": [s.rows for s in shards],
        "shard_width": [s.width for s in shards],
        # A row range gets part of a table's lookups, and was measured as such.
        "shard_pooling": [s.table.pooling * access.access_share(s) for s in shards],
        "shard_features": [s.table.features for s in shards],
        "op_shards": [len(shards)],
        "op_bytes": [sum(s.bytes for s in shards)],
        "op_sequences": [sum(s.table.sequence for s in shards)],
        "op_batch": [batch],
    }


def describe_out_of_range(model: NeuralModel, workload: Workload) -> list[str]:
    """Sentences on quantities of a step beyond a model's measured range. Empty if there are none.

    Each names the worst case of a kind, and the number of others.
    """
    values_of: dict[str, list[tuple[str, float]]] = {name: [] for name in RANGES}
    known: dict[int, dict[str, list[float]]] = {}  # devices of replicas share their Op
    for device, ops in enumerate(workload.ops):
        for op in ops:
            # An op of replicas is listed once for shards, but for each device as an op.
            if first := id(op) not in known:
                known[id(op)] = op_quantities(op.shards, op.batch)
            for name, values in known[id(op)].items():
                if name.startswith("shard_"):
                    values_of[name] += zip(map(_shard_name, op.shards), values, strict=True) if first else ()
                else:
                    values_of[name].append((f"device {device}", values[0]))
    if len(workload.topology) > 1:
        # A single device exchanges nothing, so exchanges have no range to exceed.
        values_of["devices"].append(("the topology", len(workload.topology)))
        for channel, sent in zip(workload.channels, workload.traffic, strict=True):
            name = "exchange_id_bytes" if channel in ID_CHANNELS else "exchange_bytes"
            values_of[name] += [(f"device {d}", n_bytes) for d, n_bytes in enumerate(sent)]
    sentences: list[str] = []
    for name, values in values_of.items():
        # Models without a range for a quantity say nothing about it.
        sentences += _range_violations(name, values, model.meta["ranges"].get(name))
    return [*sentences, *_unmeasured_parts(model, workload)]


def _shard_name(shard: Shard) -> str:
    return f"table {shard.table.name!r}" if shard == Shard.whole(shard.table) else f"shard {shard.label}"


def _range_violations(
    name: str, values: Sequence[tuple[str, float]], measured: Sequence[float] | None
) -> Iterable[str]:
    """At most two sentences on one quantity: above its measured range, and below."""
    quantity = RANGES[name]
    if measured is None:
        return
    low, high = measured
    # The slack avoids warnings about sizes just beyond the range.
    # The worst case first: it is the one that the sentence names.
    above = sorted({(v, n) for n, v in values if v > high * quantity.slack}, reverse=True)
    # Quantities without a word for their lower end have no meaningful minimum, such as bytes.
    below = sorted({(v, n) for n, v in values if v < low / quantity.slack}) if quantity.lower else []
    for side, end, limit in ((above, quantity.upper, high), (below, quantity.lower, low)):
        if side:
            value, owner = side[0]
            phrase = quantity.phrase.format(quantity.show(value))
            yield f"{owner} {phrase}{more_entries_suffix(side)}; {end} measured {quantity.show(limit)}"


def _unmeasured_parts(model: NeuralModel, workload: Workload) -> Iterable[str]:
    """Sentences on parts of a step that the model was not measured for."""
    topology = workload.topology
    if topology.hardware is None:
        yield f"the topology names no hardware: prices are those of {model.setting.hardware}"
    elif topology.hardware != model.setting.hardware:
        yield f"the topology has {topology.hardware}; the model was measured on {model.setting.hardware}"
    yield from _unmeasured_exchanges(model, workload)
    yield from _unmeasured_tables(model, workload)
    if (ratio := workload.job.tower_ratio) is not None:
        yield (
            f"outputs cross hosts {ratio:g} times smaller, as given; the compute and memory of the tower "
            "modules that make them so are not priced"
        )
    if workload.job.dense_mflops is not None:
        yield (
            f"the dense part of {workload.job.dense_mflops:g} million operations a sample is left out: trained models "
            "know no rate of it; give dense_forward_ms and dense_backward_ms in its place"
        )
    if speeds := ", ".join(f"{s:g}" for s in sorted({d.speed for d in topology.devices} - {1.0})):
        yield f"devices of speed {speeds} are scaled from the measured hardware"


def _unmeasured_exchanges(model: NeuralModel, workload: Workload) -> Iterable[str]:
    """Sentences on links, collectives and payloads of a step that the model was not measured for."""
    topology = workload.topology
    # Channels without bytes, or with groups of one device, never run.
    carrying = [c for c, sent in zip(workload.channels, workload.traffic, strict=True) if sent.any()]
    used = [c for c in dict.fromkeys(carrying) if group_members(c.group, topology).shape[1] > 1]
    if topology.links and len(topology) > 1:
        yield (
            f"the topology gives {'; '.join(link.description for link in topology.links)}: the explicit link "
            "model prices its exchanges from there, not measured"
        )
    # Given bandwidths need no measurement.
    given = {link.level for link in topology.links if link.gbps}
    known = [given | collective_model.measured_link_levels(model.weights, c) for c in used]
    order = list(LEVELS)
    for k, (name, is_used) in enumerate(zip(LEVELS, joining_levels(topology.domain_numbers), strict=True)):
        if others := next((of for of in known if of and name not in of), None) if is_used else None:
            # As collective_model counts them: the next level out that is known, or else in.
            stand_in = LEVELS[next(x for x in (*order[k:], *order[:k][::-1]) if x in others)].words
            yield f"links {LEVELS[name].words} were not measured: they count as those {stand_in}"
    for channel in used:
        # The all-to-all itself is the stand-in, so there is nothing better to name.
        if channel == collective_model.ALL_TO_ALL or collective_model.is_measured(model.weights, channel):
            continue
        kinds = kinds_of_channel(channel, workload.job.tower_ratio is not None)
        yield (
            f"{kinds} shards: their {channel.description} is priced with the rates of "
            f"{collective_model.substitute_words(model.weights, channel)}, not measured"
        )
    payloads = model.setting.payloads
    for channel, direction in ((c, direction) for c in used for direction in c.definition.directions):
        if not collective_model.has_payload_rates(model.weights, channel, direction, payloads[direction]):
            yield (
                f"{payloads[direction]} {direction} in the {channel.description} is priced with FP32's rates and fewer "
                "bytes, not measured"
            )


def _unmeasured_tables(model: NeuralModel, workload: Workload) -> Iterable[str]:
    """Sentences on tables of kinds that the model was not measured for."""
    shards = [(s, op.sharding_kind) for ops in workload.ops for op in ops for s in op.shards]
    tables = {s.table.name: s.table for s, _ in shards}
    # Models that never saw a sequence have no range for them.
    unseen = "op_sequences" not in model.meta["ranges"]
    for names, words in (
        (
            [name for name, table in tables.items() if table.sequence and unseen],
            "is a sequence: its lookups are priced from pooled ones with an output for each",
        ),
        (
            list(dict.fromkeys(s.table.name for s, run in shards if run.dense_gradient)),
            "is replicated: its dense kernel is priced as a fused op, without its dense optimizer",
        ),
        (
            [name for name, table in tables.items() if table.weighted],
            "has weights of lookups, which are priced to travel only",
        ),
        (
            [name for name, table in tables.items() if table.has_variable_batch],
            "is deduplicated, or has batches of its own: it is priced as looked up by fewer samples",
        ),
    ):
        if names:
            yield f"table {names[0]!r}{more_entries_suffix(names)} {words}, not measured"


def more_entries_suffix(values: Sized) -> str:
    """Text for the number of further items after the first: " (and 2 more)". "" for one item."""
    return f" (and {len(values) - 1} more)" if len(values) > 1 else ""
