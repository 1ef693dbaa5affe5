"""Problems drawn at random, ways to cut their tables, and costs of plans: for tests of searches' bookkeeping."""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
from shapes import on_hosts, with_room

from shardcore.core.access_statistics import Zipf
from shardcore.core.constraints import Constraints
from shardcore.core.job import Job
from shardcore.core.payloads import MEASURED
from shardcore.core.topology import Device, Memory, Topology
from shardcore.core.types import MIN_WIDTH, Plan, Problem, Setting, Shard, Table
from shardcore.cost.analytic import AnalyticModel
from shardcore.cost.model import price
from shardcore.step.kinds import shards_by_device
from shardcore.step.lower import channels_of_traffic, lower
from shardcore.step.ways import (
    allowed_devices_of_shard,
    consolidate_placements,
    cut_into_equal_parts,
    fixed_placements,
    placements_of_bundles,
    row_division,
    searched_tables,
)

BATCH = 48


class SlowScatter(AnalyticModel):
    """Reduce-scatters take as long as for twice their bytes, so that costs tell collectives apart."""

    def comm_cost(self, traffic, compute_ms, topology):
        times = np.array([1 + (c.collective == "reduce_scatter") for c in channels_of_traffic(traffic)])
        return super().comm_cost((traffic.T * times).T, compute_ms, topology)


MODEL = SlowScatter(
    Setting("made-up", BATCH),
    launch_us=2,
    table_us=1,
    lookup_ns=10,
    exchange_latency_ms=0.001,
    exchange_gbps=1,
)


def draw_problem(
    seed: int, n_tables: int = 12, n_devices: int = 4, memory: int = 2**22, optimizer: str = "exact_sgd"
) -> Problem:
    rng = np.random.default_rng(seed)
    tables = tuple(
        Table(
            f"t{i}",
            int(rng.integers(1, 2000)),
            int(rng.choice([4, 8, 12, 32, 64])),
            float(rng.choice([0, 1, 7.5, 30])),
            Zipf(float(rng.uniform(0, 1.5))),
        )
        for i in range(n_tables)
    )
    devices = tuple(Device(memory, float(rng.choice([1, 1, 2]))) for _ in range(n_devices))
    return with_room(Problem("drawn", tables, Topology(devices), BATCH, optimizer))


def on_two_hosts(problem: Problem) -> Problem:
    """The problem with its four devices on two hosts in turns, and a table pinned to the second host."""
    devices = tuple(replace(d, host=h) for d, h in zip(problem.topology.devices, "xyxy", strict=True))
    return replace(problem, topology=Topology(devices), constraints=Constraints(pinned=(("t1", ("y",)),)))


def plan_of(shards, devices, problem) -> Plan:
    return Plan(
        consolidate_placements(
            [*placements_of_bundles([(s,) for s in shards], devices, problem), *fixed_placements(problem)]
        )
    )


def total_ms(shards, devices, problem) -> float:
    model = replace(MODEL, setting=replace(MODEL.setting, optimizer=problem.optimizer))
    return price(lower(plan_of(shards, devices, problem), problem), model).total_ms


def draw_cuts(rng: np.random.Generator, problem: Problem, rows: bool) -> list[Shard]:
    """Tables cut at random by columns, and with `rows` some by rows."""
    shards = []
    for i, table in enumerate(problem.tables):
        divided = row_division(table, problem) if rows and (i == 1 or rng.random() < 0.3) else None
        shards += [s for _, s in shards_by_device(divided)] if divided else [Shard.whole(table)]
    for _ in range(8):
        i = rng.integers(len(shards))
        if shards[i].has_all_rows and shards[i].width > MIN_WIDTH:
            shards[i : i + 1] = cut_into_equal_parts(shards[i], 2, MIN_WIDTH)
    return shards


# --- problems of all kinds ----------------------------------------------------------------------------------


def draw_all_kinds(seed: int, caches: bool) -> Problem:
    """Two collections of pooled tables and one of sequences, payloads, a bundle, fixed kinds and pins, on two
    hosts of two devices. Every third problem is for CPUs, and every third names no hardware.

    caches: whether rows are in host memory, of two precisions, some with a cache in device memory.
    """
    rng = np.random.default_rng([seed, 1])
    tables = [
        Table(
            f"t{i}",
            int(rng.integers(8, 2000)),
            int(rng.choice([8, 16, 32, 64])),
            float(rng.choice([0, 1, 7.5, 30])),
            features=int(rng.integers(1, 3)),
            collection=str(rng.choice(["left", "right"])),
        )
        for i in range(14)
    ]
    for i in (3, 7):
        tables[i] = replace(tables[i], sequence=True, dim=16, collection="sequences")
    # Replicas (t5) have all rows in device memory.
    for i in (i for i in range(14) if caches and i != 5):
        load_factor, precision = float(rng.choice([0, 0.1, 0.5, 1])), str(rng.choice(["fp16", "fp32"]))
        tables[i] = replace(tables[i], load_factor=load_factor, precision=precision)
    there, back = (str(rng.choice(MEASURED)) for _ in range(2))
    constraints = Constraints(
        together=(tuple(f"t{i}" for i in rng.choice([0, 1, 2, 3], 2, replace=False)),),
        kinds=(("t5", ("data_parallel",)), ("t6", ("row",))),
        pinned=(("t8", ("x",)),),
    )
    hardware = (None, "cpu-some", "nvidia-h200")[seed % 3]
    memory = (Memory("host", 1 << 40, 25.0),) if caches else ()
    topology = on_hosts("xyxy", 1 << 40, hardware=hardware, memory=memory)
    return Problem(
        "all-kinds",
        tuple(tables),
        topology,
        BATCH,
        str(rng.choice(["exact_sgd", "rowwise_adagrad", "adam"])),
        constraints,
        job=Job(forward_payload=there, backward_payload=back),
    )


def with_memory(problem: Problem, n_bytes: Iterable[int]) -> Problem:
    """The problem with so many bytes on each device."""
    devices = tuple(
        replace(d, memory_bytes=int(n)) for d, n in zip(problem.topology.devices, n_bytes, strict=True)
    )
    return replace(problem, topology=replace(problem.topology, devices=devices))


def draw_two_cuts(rng: np.random.Generator, problem: Problem) -> list[list[Shard]]:
    """Two ways to cut the searched tables: some by rows, some into halves. In each way one more table is halved,
    another one than in the other."""
    shards: list[Shard] = []
    for table in searched_tables(problem):
        divided = (
            row_division(table, problem)
            if rng.random() < 0.2 and table.name not in problem.uncut_tables
            else None
        )
        parts = 2 if rng.random() < 0.25 and table.name not in problem.uncut_tables else 1
        shards += (
            [s for _, s in shards_by_device(divided)]
            if divided
            else cut_into_equal_parts(Shard.whole(table), parts)
        )
    whole = [s for s in shards if s == Shard.whole(s.table) and s.table.name not in problem.uncut_tables]
    may_be_cut = [s for s in whole if s.width > 4 and not s.table.sequence]
    cut = [may_be_cut[i] for i in rng.permutation(len(may_be_cut))[:2]]
    return [
        [part for s in shards for part in (cut_into_equal_parts(s, 2, MIN_WIDTH) if s == one else [s])]
        for one in cut
    ]


def draw_devices(rng: np.random.Generator, shards: list[Shard], problem: Problem) -> list[int]:
    """A device for each shard, and one for a bundle. No two shards of a table meet."""
    homes: dict[str, set[int]] = {}
    devices = []
    for shard in shards:
        name = problem.group_by_table.get(shard.table.name, (shard.table.name,))[0]
        home = homes.setdefault(name, set())
        if shard.table.name in problem.group_by_table and home:
            devices += home
            continue
        devices.append(
            int(rng.choice([d for d in allowed_devices_of_shard(shard, problem) if d not in home]))
        )
        home.add(devices[-1])
    return devices
