"""A drawn model of several collections, and what its collectives carry in a step, as we say it.

counted_traffic.py compares this with TorchRec.

Shapes: D devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import training
from given_ids import Lookups, count_bytes, input_bytes

from shardcore.core.errors import ShardCoreError
from shardcore.core.job import Job
from shardcore.core.payloads import FP32_BYTES, MEASURED, payload_by_name
from shardcore.core.topology import Device, Topology
from shardcore.core.types import OUTPUT_BYTES, Placement, Plan, Problem, Shard, Table
from shardcore.step.access import payload_bytes
from shardcore.step.collectives import carried_payload
from shardcore.step.kinds import ID_CHANNELS, Channel, ShardingKind, sharding_kind_for_table, shards_by_device
from shardcore.step.lower import lower, require_valid_plan
from shardcore.step.scopes import SCOPES, groups_in_topology
from shardcore.torchrec.constraints import kinds_without_variable_batches

SHAPES = ((1, 2), (2, 2), (1, 4))
"""Hosts, and devices on each."""
SPLITS, INPUT = "splits", "input"
"""Counts of what travels, and ids with their lengths."""


@dataclass(frozen=True)
class Drawn:
    """A model to train for a step.

    problem: its tables, each with its collection. Its job has the types of ids and lengths.
    features: of each table. Tables may share them.
    plan: a plan of the problem.
    batches: bags of each feature on a rank, where features have batches of their own. Empty: they have not.
    """

    problem: Problem
    features: dict[str, list[str]]
    plan: Plan
    batches: dict[str, int] = field(default_factory=dict)

    @property
    def collections(self) -> dict[str, list[Table]]:
        found: dict[str, list[Table]] = {}
        for table in self.problem.tables:
            found.setdefault(table.collection, []).append(table)
        return found


def drawn(seed: int, shape: tuple[int, int] | None = None) -> Drawn:
    """A random model and plan."""
    rng = np.random.default_rng(seed)
    hosts, per_host = shape or SHAPES[rng.integers(len(SHAPES))]
    devices = tuple(Device(10**9, host=f"host-{h}") for h in range(hosts) for _ in range(per_host))
    tables, features = [], {}
    for c in range(rng.integers(1, 4)):
        sequence, names = bool(rng.random() < 0.3), []
        weighted, dim = bool(not sequence and rng.random() < 0.4), 4 * int(rng.integers(1, 9))
        for i in range(rng.integers(1, 6)):
            own = [f"f{c}_{len(names) + k}" for k in range(rng.choice([1, 2, 3], p=[0.6, 0.2, 0.2]))]
            # About a third of the tables share a feature with another.
            own = [names[rng.integers(len(names))], *own[1:]] if names and rng.random() < 0.3 else own
            names = list(dict.fromkeys([*names, *own]))
            # An EmbeddingCollection has one dim.
            dim = dim if sequence else 4 * int(rng.integers(1, 9))
            tables.append(
                Table(
                    f"c{c}_t{i}",
                    int(rng.integers(4, 60)),
                    dim,
                    2.0 * len(own),
                    features=len(own),
                    weighted=weighted,
                    sequence=sequence,
                    collection=f"c{c}",
                )
            )
            features[tables[-1].name] = own
    given = Problem("drawn", tuple(tables), Topology(devices), len(devices) * int(rng.integers(1, 9)))
    plan, (id_bytes, length_bytes) = training.draw(given, rng), map(int, rng.choice([4, 8], 2))
    # Drawn apart, so that the models are those of earlier versions.
    payloads = map(str, np.random.default_rng([seed, 1]).choice(MEASURED, 2, p=[0.5, 0.3, 0.2]))
    job = Job(
        id_bytes=id_bytes,
        length_bytes=length_bytes,
        **dict(zip(("forward_payload", "backward_payload"), payloads, strict=True)),
    )
    half = np.random.default_rng([seed, 2]).random(len(tables)) < 0.3
    mixed = {t.name: replace(t, precision="fp16") for t, short in zip(tables, half, strict=True) if short}
    given = replace(given, job=job, tables=tuple(mixed.get(t.name, t) for t in tables))
    return Drawn(
        given,
        features,
        Plan(
            tuple(
                replace(p, shard=replace(p.shard, table=mixed.get(p.shard.table.name, p.shard.table)))
                for p in plan.placements
            )
        ),
    )


CODECS = ("int8", "mx4", "mx4-16", "fp32", "bf16")
"""Payloads whose codecs run on CPUs, of which one has scales at least in one direction."""


def coded(seed: int) -> Drawn:
    """A drawn model whose outputs or gradients travel with scales, as far as codecs carry its columns."""
    return next(model for model, refusal in _coded(seed) if not refusal)


def refused(seed: int) -> tuple[Drawn, str]:
    """A drawn model with a plan that is refused as no codec carries it, and the refusal."""
    return next((model, refusal) for model, refusal in _coded(seed) if "codec" in refusal)


def _coded(seed: int) -> Iterator[tuple[Drawn, str]]:
    model, rng = drawn(seed), np.random.default_rng([seed, 3])
    given = model.problem
    while True:
        there, back = map(str, rng.choice(CODECS, 2))
        local_batch, dim = int(rng.choice([3, 4, 8, 16])), int(rng.choice([16, 32]))
        # Sequences need whole blocks in each row.
        tables = tuple(replace(t, dim=dim) if t.sequence else t for t in given.tables)
        made = replace(
            given,
            tables=tables,
            global_batch=local_batch * len(given.topology),
            job=replace(given.job, forward_payload=there, backward_payload=back),
        )
        plan = training.draw(made, rng)
        if {there, back} <= {"fp32", "bf16"}:
            continue
        try:
            require_valid_plan(plan, made)
            yield Drawn(made, model.features, plan), ""
        except ShardCoreError as error:
            yield Drawn(made, model.features, plan), str(error)


def variable(seed: int) -> Drawn:
    """A drawn model whose features have batches of their own (VBE), and a plan that TorchRec runs with them."""
    model, rng = drawn(seed), np.random.default_rng([seed, 4])
    local_batch = int(rng.integers(2, 13))
    features = sorted({f for own in model.features.values() for f in own})
    # A feature has fewer bags than samples, as many, or more.
    batches = {
        f: int(n) for f, n in zip(features, rng.integers(1, local_batch + 4, len(features)), strict=True)
    }
    most = {
        name: max(batches[f] for t in tables for f in model.features[t.name])
        for name, tables in model.collections.items()
    }
    tables = tuple(
        # On CPUs FBGEMM runs one precision in an op with such batches.
        replace(
            t,
            precision="fp32",
            strides=tuple(
                (most[t.collection] if t.sequence else batches[f]) / local_batch
                for f in model.features[t.name]
            ),
        )
        for t in model.problem.tables
    )
    given = replace(model.problem, tables=tables, global_batch=local_batch * len(model.problem.topology))
    while True:
        plan = training.draw(given, rng)
        if all(_runs_variable(p) for p in plan.placements):
            return Drawn(given, model.features, plan, batches)


def _runs_variable(placement: Placement) -> bool:
    """Tell if TorchRec runs a placement with batches of different sizes: no replicas, nor grid_shard before 1.9."""
    cut = placement.shard.width < placement.shard.table.dim
    return placement.kind != "data_parallel" and not (
        placement.kind in kinds_without_variable_batches() and cut
    )


def batches_of(model: Drawn) -> dict[str, int]:
    """For each feature how many bags a rank has."""
    features = (f for own in model.features.values() for f in own)
    return model.batches or dict.fromkeys(features, model.problem.local_batch)


def lengths_of(model: Drawn, seed: int, rank: int) -> dict[str, np.ndarray]:
    """For each feature how many ids each of a rank's bags has."""
    rng = np.random.default_rng([seed, rank])
    return {feature: rng.integers(0, 5, n) for feature, n in sorted(batches_of(model).items())}


def ids_of(model: Drawn, seed: int, rank: int) -> dict[str, np.ndarray]:
    """For each feature the ids that a rank's samples look up: within the rows of every table that has it."""
    rng = np.random.default_rng([seed, rank, 1])
    rows = {
        f: min(t.rows for t in model.problem.tables if f in model.features[t.name])
        for own in model.features.values()
        for f in own
    }
    return {
        f: rng.integers(0, rows[f], lengths.sum()) for f, lengths in lengths_of(model, seed, rank).items()
    }


def given_lookups(model: Drawn, seed: int) -> Lookups:
    """The lookups of a drawn batch, counted."""
    ids = [ids_of(model, seed, rank) for rank in range(len(model.problem.topology))]

    def of(shard: Shard) -> np.ndarray:
        mine = [np.concatenate([of_rank[f] for f in model.features[shard.table.name]]) for of_rank in ids]
        return np.array([np.count_nonzero((i >= shard.row_lo) & (i < shard.row_hi)) for i in mine])

    return of


Calls = dict[str, list[list[int]]]
"""By what is carried, bytes in and out of each collective, rising. Of _SUMMED, of all together."""


def expected(model: Drawn, seed: int) -> list[Calls]:
    """For each rank the collectives of a step."""
    n, job = len(model.problem.topology), model.problem.job
    sent, received = input_bytes(model.plan, model.problem, given_lookups(model, seed))
    counts = count_bytes(model.plan, model.problem)
    groups = {name: groups_in_topology(model.problem.topology, name) for name in SCOPES}
    exchanges = [*pooled_exchanges(model), *sequence_exchanges(model, given_lookups(model, seed))]
    found = []
    for rank in range(n):
        mine = {SPLITS: [[counts, counts]], INPUT: [[sent[rank], received[rank]]]}
        for channel, there, back, samples in exchanges:
            [group] = (g for g in groups[channel.group] if rank in g)
            # All ranks of a group take part if any has something.
            if not there[list(group)].any():
                continue
            for direction in channel.definition.directions:
                cast = carried_payload(channel.definition, direction, getattr(job, f"{direction}_payload"))
                enters, leaves = there, back
                if samples and direction == "forward":
                    enters = padded_bytes(there, cast, samples)
                    leaves = _dealt(channel, enters, groups)
                # What enters on the way there leaves on the way back.
                pair = (enters, leaves) if direction == "forward" else (leaves, enters)
                mine.setdefault(f"{direction} {channel.description}", []).append(
                    [payload_bytes(n_bytes[rank], cast) for n_bytes in pair]
                )
        found.append(in_order(mine))
    return found


Exchange = tuple[Channel, np.ndarray, np.ndarray, int]
"""A collective, [D] FP32 bytes that enter and leave it forward, and its samples. 0: it carries no samples."""


def pooled_exchanges(model: Drawn) -> Iterator[Exchange]:
    """Those of pooled tables and replicas. They do not depend on the ids."""
    pooled = tuple(t for t in model.problem.tables if not t.sequence)
    if not pooled:
        return
    work = lower(
        Plan(tuple(p for p in model.plan.placements if not p.shard.table.sequence)),
        replace(model.problem, tables=pooled),
    )
    groups = {name: groups_in_topology(model.problem.topology, name) for name in SCOPES}
    for channel, there in zip(work.channels, work.traffic, strict=True):
        # The workload's ids are those that statistics make us expect.
        if channel in ID_CHANNELS or not there.any():
            continue
        # Across hosts travel the samples that a sum within them leaves a device.
        summed = len(model.problem.topology) // len(groups[channel.group][0])
        samples = model.problem.global_batch // summed * (channel.collective == "all_to_all")
        yield channel, there, _dealt(channel, there, groups), samples


def padded_bytes(n_bytes: np.ndarray, payload: str, samples: int) -> np.ndarray:
    """FP32 bytes [...] of devices' pooled outputs of so many samples, with padding to whole blocks forward.

    Prices leave it out: a device pads by less than a block of columns, whatever it holds.
    """
    row = payload_by_name(payload)
    block_bytes = FP32_BYTES * samples * row.block
    return np.ceil(n_bytes / block_bytes) * block_bytes if row.pads else n_bytes


def _dealt(channel: Channel, there: np.ndarray, groups: Mapping[str, Sequence[Sequence[int]]]) -> np.ndarray:
    """[D] bytes that leave a collective."""
    back = there.copy()
    for group in map(list, groups[channel.group] if channel.collective != "all_reduce" else ()):
        # An all-to-all deals out what each has, evenly. A reduce-scatter leaves its share of a sum.
        of_all = there[group].sum() if channel.collective == "all_to_all" else there[group]
        back[group] = of_all / len(group)
    return back


def sequence_exchanges(model: Drawn, lookups: Lookups) -> Iterator[Exchange]:
    """Those of sequences, for given lookups.

    A row of each lookup goes from the device that has it to the one that asked. Of a collection, TorchRec
    runs tables cut by columns apart from whole ones.
    """
    found: dict[tuple[ShardingKind, bool], np.ndarray] = {}
    for placement in model.plan.placements:
        table = placement.shard.table
        if table.sequence:
            run = sharding_kind_for_table(placement.kind, table), placement.shard.width < table.dim
            mine = found.setdefault(run, np.zeros((2, len(model.problem.topology))))
            for device, shard in shards_by_device(placement):
                asked = OUTPUT_BYTES * shard.width * lookups(shard)
                mine[0, device] += asked.sum()
                mine[1] += asked
    for (run, _), (there, back) in found.items():
        [channel] = run.channels
        yield channel, there, back, 0


def in_order(calls: Mapping[str, Iterable[Sequence[float]]]) -> Calls:
    found = {}
    for name, pairs in calls.items():
        # A host that has nothing of a run still takes part, with 0 bytes.
        whole = sorted([round(b) for b in pair] for pair in pairs if any(pair))
        found[name] = [[sum(side) for side in zip(*whole, strict=True)]] if _is_summed(name) else whole
    return {name: pairs for name, pairs in found.items() if pairs and pairs != [[]]}


def _is_summed(name: str) -> bool:
    """Ids are several tensors. DDP makes buckets of gradients."""
    return name in (SPLITS, INPUT) or Channel("all_reduce").description in name
