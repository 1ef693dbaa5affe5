from dataclasses import replace

import pytest

from shardcore.core.constraints import Constraints
from shardcore.core.errors import ShardCoreError
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Problem, Table
from shardcore.step.kinds import LAYOUTS

HOSTS = Topology((Device(1, host="a"), Device(1, host="a"), Device(1, host="b"), Device(1, host="b")))
FOUR = tuple(Table(name, 10, 8, 1.0) for name in "stuv")


def constrained(**constraints) -> Problem:
    return Problem("p", FOUR, HOSTS, 4, constraints=Constraints(**constraints))


@pytest.mark.parametrize(
    "make, named",
    [
        (lambda: constrained(unsplit=("x",)), ["'p'", "forbids splitting ['x']"]),
        (lambda: constrained(pinned=(("x", (0,)),)), ["'p'", "pins ['x']"]),
        (lambda: constrained(pinned=(("s", (0, 4)),)), ["'s' to 4", "devices are 0 to 3", "hosts a, b"]),
        (lambda: constrained(pinned=(("s", (-1,)),)), ["'s' to -1"]),
        (lambda: constrained(pinned=(("s", ("c",)),)), ["'s' to 'c'", "hosts a, b"]),
        (lambda: constrained(pinned=(("s", ()),)), ["empty list for 's'", "one or more"]),
        (
            lambda: constrained(pinned=(("s", "a"),)),
            ["pinned of table 's' is 'a'", "a list of whole numbers"],
        ),
        (lambda: constrained(pinned=(("s", (0.5,)),)), ["pinned of table 's'[0] is 0.5"]),
        (lambda: constrained(pinned=(("s", (0,)), ("s", (1,)))), ["pinned has table 's' twice"]),
        (lambda: constrained(together=(("s", "x"),)), ["'p'", "keeps together ['x']"]),
        (lambda: constrained(together=((),)), ["empty list for 'together'", "one or more"]),
        (lambda: constrained(together=("st",)), ["constraints.together is 'st'", "a list of texts"]),
        (lambda: constrained(together=(("s", "t"), ("t", "u"))), ["together has table 't' twice"]),
        (lambda: constrained(together=(("s", "s"),)), ["together has table 's' twice"]),
        (
            lambda: constrained(
                pinned=(("s", (0, 2)), ("t", ("b", 1)), ("u", ("a",))), together=(("s", "t", "u"),)
            ),
            ["['s', 't', 'u'] together", "'s' to [0, 2]", "'t' to ['b', 1]", "a device in common"],
        ),
        (lambda: Constraints(reserved_bytes=2**50 + 1), ["reserved_bytes 1125899906842625"]),
        (lambda: constrained(reserved_bytes=-1), ["reserved_bytes -1"]),
        (lambda: constrained(pinned=(("s", (True,)),)), ["pinned of table 's'[0] is True"]),
        (lambda: constrained(kinds=(("x", ("row",)),)), ["'p'", "kinds of ['x']"]),
        (lambda: constrained(kinds=(("s", "row"),)), ["kinds of table 's' is 'row'", '["row", "column"]']),
        (lambda: constrained(kinds=(("s", ()),)), ["empty list for 's'", "one or more"]),
        (lambda: constrained(kinds=(("s", ("row",)), ("s", ("column",)))), ["kinds has table 's' twice"]),
        (lambda: constrained(min_widths=(("x", 4),)), ["'p'", "min_widths of ['x']"]),
        (lambda: constrained(min_widths=(("s", 0),)), ["min_widths 0", "'s'", "1 to 65536"]),
        (lambda: constrained(min_widths=(("s", 4), ("s", 8))), ["min_widths has table 's' twice"]),
    ],
)
def test_bad_values_are_named(make, named):
    with pytest.raises(ShardCoreError) as error:
        make()
    assert all(word in str(error.value) for word in named), str(error.value)


def test_pins_and_groups_say_where_tables_may_live_and_which_stay_whole():
    problem = constrained(
        unsplit=("v",),
        pinned=(("s", (3, 0, "a")), ("u", ("b", 0)), ("v", ("a", "b"))),
        together=(("s", "t"),),
    )
    assert [problem.allowed_devices(name) for name in "stuv"] == [
        (0, 1, 3),
        (0, 1, 3),
        (0, 2, 3),
        (0, 1, 2, 3),
    ]
    assert set(problem.pinned) == {"s", "t", "u"} and problem.whole == {"s", "t", "v"}
    assert dict(problem.bundle_of) == {"s": ("s", "t"), "t": ("s", "t")}
    on_one = constrained(pinned=(("s", (0, 2)), ("t", ("b",)), ("u", (1,))), together=(("t", "s"),))
    assert on_one.allowed_devices("s") == on_one.allowed_devices("t") == (2,)
    assert on_one.whole == {"s", "t", "u"}  # what has a single device gains nothing from a cut
    assert [on_one.kept_whole_by(n) for n in "su"] == ["constraints.together", "constraints.pinned"]
    assert problem.kept_whole_by("v") == "constraints.unsplit"


def test_kinds_and_widths_say_what_may_run_a_table():
    tables = Table("narrow", 10, 96, 1.0), Table("wide", 10, 4096, 1.0), Table("free", 10, 8, 1.0)
    problem = Problem(
        "p",
        tables,
        HOSTS,
        4,
        constraints=Constraints(
            kinds=(("narrow", ("row", "column")),), min_widths=(("narrow", 20), ("wide", 100), ("free", 64))
        ),
    )
    may = {t.name: {kind for kind, layout in LAYOUTS.items() if problem.may_run(layout, t)} for t in tables}
    assert may == {"narrow": {"row", "column"}, "wide": {"column"}, "free": set(LAYOUTS)}
    assert [problem.unit_width(t) for t in tables] == [24, 128, 8]
    assert [problem.most_width(t) for t in tables] == [96, 2048, 8]
    on_cpu = replace(problem, topology=replace(HOSTS, hardware="cpu-amd-epyc"))
    assert on_cpu.may_run(LAYOUTS["row"], tables[1]) and on_cpu.most_width(tables[1]) == 4096


def test_ten_thousand_tables_on_a_thousand_devices_are_pinned():
    tables = tuple(Table(f"t{i}", 10, 8, 1.0) for i in range(10_000))
    topology = Topology(tuple(Device(1, host=f"h{d // 8}") for d in range(1024)))
    pinned = tuple((f"t{i}", (f"h{i % 128}", i % 1024)) for i in range(10_000))
    problem = Problem("p", tables, topology, 1024, constraints=Constraints(pinned=pinned))
    assert sum(len(problem.allowed_devices(t.name)) for t in tables) == sum(
        # a host's eight, and one that may be among them
        8 + (i % 1024 // 8 != i % 128)
        for i in range(10_000)
    )


@pytest.mark.timeout(30)
def test_a_host_may_be_named_a_thousand_times():
    tables = tuple(Table(f"t{i}", 10, 4, 1.0) for i in range(4))
    topology = Topology((Device(1 << 40, host="big"),) * (1 << 16))
    pins = tuple((t.name, ("big",) * 8_000 + (i,)) for i, t in enumerate(tables))
    problem = Problem("p", tables, topology, len(topology), constraints=Constraints(pinned=pins))
    assert len(problem.allowed_devices("t0")) == 1 << 16


def test_pins_that_mean_millions_of_devices_are_refused():
    tables = tuple(Table(f"t{i}", 10, 4, 1.0) for i in range(200))
    devices = (*(Device(1 << 40, 1.0, "big"),) * 30_000, *(Device(1 << 40, 1.0, f"h{i}") for i in range(200)))
    pins = tuple((f"t{i}", ("big", f"h{i}")) for i in range(200))
    with pytest.raises(ShardCoreError, match="pins tables to sets of more than"):
        Problem("p", tables, Topology(devices), len(devices), constraints=Constraints(pinned=pins))
