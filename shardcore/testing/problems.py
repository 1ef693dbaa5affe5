"""Problems with a plan, by what is special about them, and problems without one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from shardcore.core.access_statistics import Zipf
from shardcore.core.constraints import Constraints
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Placement, Problem, Setting, Shard, Table
from shardcore.cost.analytic import AnalyticModel
from shardcore.step import memory
from shardcore.step.kinds import SHARDING_KINDS, kind_on_one_device

BATCH = 48
"""Batch of all problems here. 1, 2, 3 and 4 devices divide it."""
DIMS = (4, 8, 12, 16, 32)
"""Columns of drawn tables."""
REPLICATED = tuple(x.name for x in SHARDING_KINDS.values() if x.dense_gradient)
DIVIDED = tuple(x.name for x in SHARDING_KINDS.values() if x.divides_rows and not x.rows_over)
CUT_OR_DIVIDED = (*(x.name for x in SHARDING_KINDS.values() if x.is_on_one_device), *DIVIDED)
"""Kinds of sharding that constraints allow."""


def small_problem_model(problem: Problem) -> AnalyticModel:
    """Cost model under which both compute and communication matter for this module's small problems."""
    setting = Setting("made-up", problem.global_batch, problem.tables[0].precision, problem.optimizer)
    # A slow network and a short launch.
    return AnalyticModel(
        setting, launch_us=2, table_us=1, lookup_ns=10, exchange_latency_ms=0.001, exchange_gbps=1
    )


def table_bytes(table: Table, optimizer: str = "exact_sgd", width: int | None = None) -> int:
    """Bytes of a table, or of `width` of its columns, with optimizer state, as searches count them."""
    of_one = Problem("one", (table,), Topology((Device(1),)), BATCH, optimizer)
    return memory.table_peak_bytes(table, of_one, width)


def column_placement(table: Table, device: int) -> Placement:
    """Placement of a whole table on one device."""
    return Placement(kind_on_one_device(table).name, Shard.whole(table), (device,))


def with_room_for_batch(problem: Problem) -> Problem:
    """Problem with memory for the local batch added to every device."""
    whole = [column_placement(table, 0) for table in problem.tables]
    more = int(memory.memory_account(whole, problem).base.max()) + 1
    devices = tuple(replace(d, memory_bytes=d.memory_bytes + more) for d in problem.topology.devices)
    return replace(problem, topology=replace(problem.topology, devices=devices))


def draw_random_tables(rng: np.random.Generator, n: int, dims: tuple[int, ...] = DIMS) -> tuple[Table, ...]:
    """Draw small random tables with Zipf accesses."""
    return tuple(
        Table(
            f"t{i}",
            int(rng.integers(1, 400)),
            int(rng.choice(dims)),
            float(rng.choice([0, 1, 2.5, 10, 30])),
            Zipf(float(rng.uniform(0, 1.5))),
        )
        for i in range(n)
    )


def draw_random_problem(
    seed: int,
    n_tables: int,
    memory: list[int],
    speeds: list[float] | None = None,
    dims: tuple[int, ...] = DIMS,
    **fields,
) -> Problem:
    """Draw a problem of random tables on devices of given memory and speed. fields: other fields of the problem."""
    rng = np.random.default_rng(seed)
    devices = tuple(Device(m, s) for m, s in zip(memory, speeds or [1.0] * len(memory), strict=True))
    return Problem(
        f"drawn-{seed}", draw_random_tables(rng, n_tables, dims), Topology(devices), BATCH, **fields
    )


def problem_with_slack(seed: int, n_devices: int, slack: float, **fields) -> Problem:
    """Random problem whose devices together hold the tables' bytes times `slack`."""
    loose = draw_random_problem(seed, 12, [1] * n_devices, **fields)
    needed = sum(table_bytes(t, loose.optimizer) for t in loose.tables)
    return replace(loose, topology=Topology((Device(int(needed * slack / n_devices)),) * n_devices))


def split_over_two_hosts(problem: Problem, constraints: Constraints) -> Problem:
    """Problem with the first half of the devices on host a, the others on host b."""
    half = len(problem.topology) // 2
    devices = tuple(replace(d, host="a" if i < half else "b") for i, d in enumerate(problem.topology.devices))
    return replace(problem, topology=Topology(devices), constraints=constraints)


HUGE = Table("huge", 5000, 64, 20.0)
DEEP = Table("deep", 200_000, 4, 3.0)
SMALL = tuple(Table(f"small{i}", 50 + i, 8, 2.0) for i in range(5))
MIB = 2**20
CASES = {
    "one device": draw_random_problem(0, 8, [64 * MIB]),
    "one table": Problem("one", (SMALL[0],), Topology((Device(MIB),) * 4), BATCH),
    "more devices than tables": draw_random_problem(1, 2, [MIB] * 4),
    "unequal memory": draw_random_problem(2, 15, [MIB // 2, MIB, 3 * MIB]),
    "unequal speed": draw_random_problem(3, 15, [MIB] * 3, [1.0, 2.0, 0.5]),
    "tight memory": problem_with_slack(4, 4, 1.05),
    "adagrad, tight": problem_with_slack(5, 3, 1.08, optimizer="rowwise_adagrad"),
    "a full device": draw_random_problem(6, 6, [2000, MIB]),
    "all empty": Problem(
        "empty", tuple(replace(t, pooling=0.0) for t in SMALL), Topology((Device(MIB),) * 2), BATCH
    ),
    "rows to cut": Problem("rows", (DEEP, *SMALL), Topology((Device(DEEP.bytes // 2),) * 3), BATCH),
    "rows and columns to cut": Problem(
        "both", (replace(HUGE, rows=50_000), *SMALL), Topology((Device(700_000),) * 24), BATCH
    ),
    "unsplit": replace(problem_with_slack(7, 3, 1.3), constraints=Constraints(unsplit=("t0", "t3", "t7"))),
    "reserved more than one has": replace(
        draw_random_problem(6, 6, [2000, MIB]), constraints=Constraints(reserved_bytes=3000)
    ),
    "reserved": replace(
        draw_random_problem(9, 10, [MIB] * 2), constraints=Constraints(reserved_bytes=MIB // 2)
    ),
    "pinned": replace(
        problem_with_slack(10, 4, 1.3),
        constraints=Constraints(
            pinned=(("t0", (0,)), ("t3", (0,)), ("t5", (1, 2)), ("t6", (3, 1)), ("t9", (0, 1, 2, 3)))
        ),
    ),
    "pinned to hosts": split_over_two_hosts(
        problem_with_slack(11, 4, 1.15),
        Constraints(pinned=tuple((f"t{i}", ("a",) if i < 4 else ("b",)) for i in range(8))),
    ),
    "pinned, to cut": split_over_two_hosts(
        Problem("cut", (HUGE, *SMALL), Topology((Device(HUGE.bytes * 6 // 10),) * 4), BATCH),
        Constraints(pinned=(("huge", ("b",)), ("small0", (2,)))),
    ),
    "together": replace(
        problem_with_slack(12, 3, 1.4),
        constraints=Constraints(together=(("t0", "t1", "t2"), ("t3", "t7"), ("t8",))),
    ),
    "given kinds": replace(
        problem_with_slack(20, 4, 4.0),
        constraints=Constraints(
            unsplit=("t1",),
            pinned=(("t4", (0, 1)),),
            kinds=(("t0", REPLICATED), ("t2", DIVIDED), ("t7", REPLICATED)),
        ),
    ),
    "all by given kinds": replace(
        problem_with_slack(21, 2, 3.0),
        constraints=Constraints(kinds=tuple((f"t{i}", REPLICATED) for i in range(12))),
    ),
    "together and pinned, tight": split_over_two_hosts(
        problem_with_slack(19, 4, 1.3, optimizer="rowwise_adagrad"),
        Constraints(
            unsplit=("t1",),
            together=(("t0", "t2", "t4"), ("t5", "t6")),
            pinned=(("t2", ("b",)), ("t5", (0, "b")), ("t8", ("a",))),
        ),
    ),
}
CASES = {case: with_room_for_batch(problem) for case, problem in CASES.items()}

PIGEON = table_bytes(Table("p0", 10_000, 32, 1.0))
"""Bytes of a table of 10,000 rows and 32 columns, and about those of one of 40,000 rows and 8 columns."""
FOUR_SMALL = sum(map(table_bytes, SMALL[:4]))
NOTHING_FITS = {
    "sum": (
        Problem("sum", (HUGE, *SMALL), Topology((Device(HUGE.bytes // 4),) * 3), BATCH),
        [
            "'sum'",
            "6 tables take 1.4 MiB",
            "3 devices may hold 1.0 MiB",
            "0.4 MiB too little",
            "more per device",
            "more devices",
        ],
    ),
    "side by side": (
        Problem(
            "pigeons",
            tuple(Table(f"p{i}", 10_000, 32, 1.0) for i in range(3)),
            Topology((Device(19 * PIGEON // 10),) * 2),
            BATCH,
            constraints=Constraints(unsplit=("p0", "p1", "p2")),
        ),
        [
            "'p0'",
            "'p1'",
            "'p2'",
            "must stay whole",
            "no way was found to pack it",
            "more per device",
            "1 more device like",
        ],
    ),
    "pinned to a device": (
        Problem(
            "device",
            SMALL,
            Topology((Device(FOUR_SMALL // 2), Device(MIB))),
            BATCH,
            constraints=Constraints(pinned=tuple((f"small{i}", (0,)) for i in range(4))),
        ),
        [
            "tables pinned to device 0 (constraints.pinned), 'small0', 'small1', 'small2', 'small3', take",
            "with outputs; it may hold",
            "bytes too little",
            "more per device",
            "or without constraints.pinned",
        ],
    ),
    "pinned to a host": (
        split_over_two_hosts(
            Problem("host", (HUGE, *SMALL), Topology((Device(HUGE.bytes // 3),) * 6), BATCH),
            Constraints(pinned=(("huge", ("b",)), ("small0", (3,)), ("small1", ("a",)))),
        ),
        [
            "tables pinned to devices 3, 4, 5 (constraints.pinned), 'huge', 'small0', take 1.3 MiB",
            "they may hold",
            "more per device",
            "without constraints.pinned",
        ],
    ),
    "a group too large": (
        Problem(
            "group",
            SMALL,
            Topology((Device(FOUR_SMALL // 2),) * 4),
            BATCH,
            constraints=Constraints(together=(("small0", "small1", "small2", "small3"),)),
        ),
        [
            "the group 'small0', 'small1', 'small2', 'small3', kept on one device (constraints.together)",
            "the largest device may hold",
            "or without constraints.together",
        ],
    ),
    "a pinned table too large": (
        replace(draw_random_problem(2, 8, [3000, MIB]), constraints=Constraints(pinned=(("t2", (0,)),))),
        ["table 't2', which must stay whole (constraints.pinned)", "device where it may live"],
    ),
    "groups side by side": (
        Problem(
            "groups",
            tuple(Table(f"p{i}", 40_000, 8, 1.0) for i in range(6)),
            Topology((Device(28 * PIGEON // 10),) * 2 + (Device(15 * PIGEON // 10),)),
            BATCH,
            constraints=Constraints(together=(("p0", "p1"), ("p2", "p3"), ("p4", "p5"))),
        ),
        ["must stay whole (constraints.together)", "no way was found to pack it"],
    ),
    "outputs": (
        Problem(
            "batch",
            SMALL[:1],
            Topology((Device(4 * MIB),) * 4),
            2**16,
            constraints=Constraints(kinds=(("small0", CUT_OR_DIVIDED),)),
        ),
        [
            "4 columns of table 'small0' take 12.",
            "may hold 6.",
            "divides evenly over all 4 devices, take ",
            "more per device",
        ],
    ),
    "rows on a small device": (
        Problem("deep", (DEEP,), Topology((Device(MIB), Device(2 * MIB), Device(MIB // 2))), BATCH),
        [
            "4 columns of table 'deep' take 3.1 MiB with outputs; the largest device may hold 2.0 MiB",
            "its rows, which TorchRec divides evenly over all 3 devices, take 1.0 MiB on device",
        ],
    ),
    "rows where they may not be": (
        Problem(
            "deep",
            (DEEP,),
            Topology((Device(2 * MIB),) * 3),
            BATCH,
            constraints=Constraints(pinned=(("deep", (0, 1)),)),
        ),
        [
            "4 columns of table 'deep' take 3.1 MiB",
            "where it may live may hold 2.0 MiB",
            "TorchRec divides rows evenly over all devices, or a whole host",
            "without constraints.pinned",
        ],
    ),
    "fewer rows than devices": (
        Problem(
            "flat",
            (replace(DEEP, rows=9),),
            Topology((Device(3000),) * 8),
            96,
            constraints=Constraints(kinds=(("deep", CUT_OR_DIVIDED),)),
        ),
        ["4 columns of table 'deep'", "no devices share a table of 9 rows by row"],
    ),
}


def problem_with_hidden_plan(seed: int, pinned: bool = False) -> Problem:
    """Problem whose devices hold exactly the bytes that some table-wise plan puts on them.

    pinned: whether some tables are pinned to their devices or hosts in that plan, or kept together.
    """
    rng = np.random.default_rng(seed)
    tables = draw_random_tables(rng, int(rng.integers(1, 10)))
    n_devices, optimizer = (
        int(rng.integers(1 + pinned, 5)),
        str(rng.choice(["exact_sgd", "rowwise_adagrad"])),
    )
    homes = rng.integers(n_devices, size=len(tables))
    memory_bytes = np.bincount(homes, [table_bytes(t, optimizer) for t in tables], n_devices)
    devices = [
        Device(int(m) or 1, float(rng.choice([0.5, 1, 2])), f"host-{d // 2 if pinned else 0}")
        for d, m in enumerate(memory_bytes)
    ]
    home_of = {t.name: int(d) for t, d in zip(tables, homes, strict=True)}
    unsplit = tuple(home_of) if rng.random() < 0.5 else ()
    pins, together = [], []
    for name, home in home_of.items() if pinned else ():
        if rng.random() < 0.4:
            more = rng.integers(n_devices, size=rng.integers(2)).tolist()
            pins.append((name, (devices[home].host,) if rng.random() < 0.3 else (home, *more)))
    for home in range(n_devices) if pinned else ():
        together.append(tuple(name for name, d in home_of.items() if d == home and rng.random() < 0.5))
    constraints = Constraints(0, unsplit, tuple(pins), tuple(filter(None, together)))
    topology = Topology(tuple(devices))
    return with_room_for_batch(Problem("hidden", tables, topology, BATCH, optimizer, constraints))
