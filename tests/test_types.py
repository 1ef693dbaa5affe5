import dataclasses
import pickle

import numpy as np
import pytest

from shardcore import types, workload
from shardcore.types import (
    CommRequest,
    ComputeRequest,
    ComputeSample,
    Constraints,
    Device,
    Placement,
    Problem,
    Replayed,
    Reuse,
    Setting,
    SettingMismatch,
    Shard,
    ShardCoreError,
    Spread,
    StepCost,
    Table,
    Topology,
    Zipf,
)

STILL = (0.0, 0.0)
HOSTS = Topology((Device(1, host="a"), Device(1, host="a"), Device(1, host="b"), Device(1, host="b")))
FOUR = tuple(Table(name, 10, 8, 1.0) for name in "stuv")


def constrained(**constraints) -> Problem:
    return Problem("p", FOUR, HOSTS, 4, constraints=Constraints(**constraints))


@pytest.mark.parametrize("make, named", [
    (lambda: Table("t", 0, 8, 1.0), ["'t'", "0 rows"]),
    (lambda: Table("t", 10, 6, 1.0), ["'t'", "dim 6", "multiple of 4"]),
    (lambda: Table("t", 10, 8, -1.0), ["'t'", "pooling -1.0"]),
    (lambda: Table("t", 10, 8, float("nan")), ["'t'", "nan"]),
    (lambda: Table("t", 10, 8, 1.0, precision="fp8"), ["fp8", "fp32"]),
    (lambda: Table("t", 10, 8, 1.0, Reuse((0.0,) * 17, 4)), ["'t'", "empty reuse histogram"]),
    (lambda: Reuse((0.5,) * 17, 4), ["8.5", "sum to 1"]),
    (lambda: Reuse((1.0,), 4), ["1 bins", "17"]),
    (lambda: Zipf(-1), ["-1"]),
    (lambda: Shard(Table("t", 10, 8, 1.0), 0, 11, 0, 8), ["'t'", "[0, 11)", "[0, 10)"]),
    (lambda: Shard(Table("t", 10, 8, 1.0), 0, 10, 2, 8), ["[2, 8)", "multiples of 4"]),
    (lambda: Placement("data_parallel", Shard.whole(Table("t", 10, 8, 1.0)), (1, 1)), ["(1, 1)"]),
    (lambda: Device(0), ["memory_bytes 0"]),
    (lambda: Topology(()), ["no devices"]),
    (lambda: Problem("p", (Table("t", 10, 8, 1.0),) * 2, Topology((Device(1),)), 4), ["'p'", "'t'"]),
    (lambda: Problem("p", (Table("t", 10, 8, 1.0),), Topology((Device(1),) * 3), 4), ["global_batch 4", "3 devices"]),
    (lambda: Problem("../p", (Table("t", 10, 8, 1.0),), Topology((Device(1),)), 4), ["'../p'", "folder"]),
    (lambda: Topology((Device(1),), latency_ms=-1.0), ["latency_ms -1.0"]),
    (lambda: constrained(unsplit=("x",)), ["'p'", "forbids splitting ['x']"]),
    (lambda: constrained(pinned=(("x", (0,)),)), ["'p'", "pins ['x']"]),
    (lambda: constrained(pinned=(("s", (0, 4)),)), ["'s' to 4", "devices are 0 to 3", "hosts a, b"]),
    (lambda: constrained(pinned=(("s", (-1,)),)), ["'s' to -1"]),
    (lambda: constrained(pinned=(("s", ("c",)),)), ["'s' to 'c'", "hosts a, b"]),
    (lambda: constrained(pinned=(("s", ()),)), ["'s' pinned to ()", "one or more devices"]),
    (lambda: constrained(pinned=(("s", "a"),)), ["'s' pinned to 'a'", "a list"]),
    (lambda: constrained(pinned=(("s", (0.5,)),)), ["'s' pinned to (0.5,)"]),
    (lambda: constrained(pinned=(("s", (0,)), ("s", (1,)))), ["pin table 's' twice"]),
    (lambda: constrained(together=(("s", "x"),)), ["'p'", "keeps together ['x']"]),
    (lambda: constrained(together=((),)), ["together ()", "one or more names"]),
    (lambda: constrained(together=("st",)), ["together 'st'", "a list"]),
    (lambda: constrained(together=(("s", "t"), ("t", "u"))), ["table 't' together twice"]),
    (lambda: constrained(together=(("s", "s"),)), ["table 's' together twice"]),
    (lambda: constrained(pinned=(("s", (0, 2)), ("t", ("b", 1)), ("u", ("a",))), together=(("s", "t", "u"),)),
     ["['s', 't', 'u'] together", "'s' to [0, 2]", "'t' to ['b', 1]", "a device in common"]),
    (lambda: CommRequest((8,), 4, (0.0,)), ["(8,)", "at least 2"]),
    (lambda: CommRequest((0, 0), 4, STILL), ["(0, 0)", "above 0"]),
    (lambda: CommRequest((8, 8), 5, STILL), ["batch 5", "2 ranks"]),
    (lambda: CommRequest((8, 8), 4, (0.0,)), ["start_ms (0.0,)", "2 ranks"]),
    (lambda: CommRequest((8, 8), 4, STILL, "broadcast"), ["'broadcast'", "reduce_scatter"]),
    (lambda: CommRequest((8, 4), 4, STILL, "all_reduce"), ["(8, 4)", "one width"]),
    (lambda: CommRequest((8, 8), 4, STILL, payload="fp8"), ["'fp8'", "bf16"]),
    (lambda: CommRequest((8, 8), 4, STILL, hosts=3), ["hosts 3", "2 ranks"]),
    (lambda: Table("", 10, 8, 1.0), ["a table has name ''"]),
    (lambda: Table("a\nb", 10, 8, 1.0), ["a table has name 'a\\nb'", "1 to 200 printable characters"]),
    (lambda: Table("x" * 201, 10, 8, 1.0), ["a table has name 'xxx", "1 to 200 printable characters"]),
    (lambda: Device(1, host="\x1b[31m"), ["a device's host has name"]),
    (lambda: Table("t", 2**40 + 1, 8, 1.0), ["1099511627777 rows"]), (lambda: Table("t", 10, 65540, 1.0), ["dim 65540"]),
    (lambda: Table("t", 10, 8, 1e6 + 1), ["pooling 1000001.0"]), (lambda: Zipf(float("nan")), ["alpha is nan"]),
    (lambda: Device(2**50 + 1), ["memory_bytes 1125899906842625"]), (lambda: Device(1, 1001.0), ["speed 1001.0"]),
    (lambda: Setting("x" * 101, 1), ["hardware 'xxx"]), (lambda: Setting("x", 2**40 + 1), ["batch 1099511627777"]),
    (lambda: Topology((Device(1),) * 65537), ["65537 devices"]), (lambda: Topology((Device(1),), "../x"), ["hardware '../x'"]),
    (lambda: Constraints(reserved_bytes=2**50 + 1), ["reserved_bytes 1125899906842625"]),
    (lambda: Table("t", 10, 0, 1.0), ["dim 0"]),
    (lambda: Table("t", 10, 8, float("inf")), ["pooling inf"]),
    (lambda: Reuse((1.0, *(0.0,) * 16), 0), ["reuse batch is 0"]),
    (lambda: Reuse((1.5, -0.5, *(0.0,) * 15), 4), ["not fractions"]),
    (lambda: Reuse((0.998, *(0.0,) * 16), 4), ["0.998", "sum to 1"]),
    (lambda: Zipf(10), ["10.0", "within 0 and 10"]),
    (lambda: Shard(Table("t", 10, 8, 1.0), -1, 10, 0, 8), ["[-1, 10)"]),
    (lambda: Shard(Table("t", 10, 8, 1.0), 4, 4, 0, 8), ["[4, 4)"]),
    (lambda: Shard(Table("t", 10, 8, 1.0), 0, 10, 4, 4), ["[4, 4)"]),
    (lambda: Shard(Table("t", 10, 8, 1.0), 0, 10, -4, 4), ["[-4, 4)"]),
    (lambda: Shard(Table("t", 10, 8, 1.0), 0, 10, 4, 12), ["[4, 12)", "[0, 8)"]),
    (lambda: Shard(Table("t", 10, 8, 1.0), 0, 10, 0, 6), ["[0, 6)", "multiples of 4"]),
    (lambda: Shard(Table("t", 10, 8, 1.0), 0, 10, 2, 6), ["[2, 6)", "multiples of 4"]),
    (lambda: Placement("data_parallel", Shard.whole(Table("t", 10, 8, 1.0)), ()), ["()", "one or more"]),
    (lambda: Placement("data_parallel", Shard.whole(Table("t", 10, 8, 1.0)), (0, -1)), ["(0, -1)"]),
    (lambda: Device(1, 0.0), ["speed 0.0"]),
    (lambda: Device(1, float("inf")), ["speed inf"]),
    (lambda: Device(1, float("nan")), ["speed nan"]),
    (lambda: Topology((Device(1),), within_host_gbps=0.0), ["within_host_gbps 0.0", "positive"]),
    (lambda: Topology((Device(1),), between_hosts_gbps=float("inf")), ["between_hosts_gbps inf"]),
    (lambda: Topology((Device(1),), latency_ms=float("inf")), ["latency_ms inf"]),
    (lambda: constrained(reserved_bytes=-1), ["reserved_bytes -1"]),
    (lambda: constrained(pinned=(("s", (True,)),)), ["'s' pinned to (True,)"]),
    (lambda: Problem("p", (), HOSTS, 4), ["no tables"]),
    (lambda: Problem("p", FOUR, HOSTS, 0), ["global_batch 0", "at least 1"]),
    (lambda: Problem("p", FOUR, HOSTS, 4, "adam"), ["'adam'", "exact_sgd"]),
    (lambda: Problem("p", (*FOUR, Table("h", 1, 4, 0.0, precision="fp16")), HOSTS, 4), ["mixes", "fp16", "fp32"]),
    (lambda: CommRequest((8, -1), 4, STILL), ["(8, -1)"]),
    (lambda: CommRequest((8, 8), 0, STILL), ["batch 0"]),
    (lambda: CommRequest((8, 8), 4, (0.0, -1.0)), ["start_ms (0.0, -1.0)"]),
    (lambda: CommRequest((8, 8), 4, (0.0, float("inf"))), ["inf"]),
    (lambda: CommRequest((8, 8), 4, STILL, hosts=0), ["hosts 0"]),
    (lambda: CommRequest((8, 8), 4, STILL, busy_ms=-1.0), ["busy_ms -1.0"]),
    (lambda: Setting("x", 1, "fp8"), ["'fp8'"]),
    (lambda: Setting("a/b", 4), ["'a/b'"]),
    (lambda: Setting("x", 0), ["batch 0"]),
    (lambda: Setting("x", 1, optimizer="adam"), ["'adam'", "exact_sgd"]),
])
def test_bad_values_are_named(make, named):
    with pytest.raises(ShardCoreError) as error:
        make()
    assert all(word in str(error.value) for word in named), str(error.value)


def test_values_at_their_limits_are_taken():
    table = Table("t", 1, 4, 0.0, Reuse((0.0,) * 17, 1))
    assert (table.bytes, Table("u", 3, 8, 1, precision="fp16").bytes) == (16, 48)
    assert Zipf(0).alpha == 0.0 and Reuse((0.9995, *(0.0,) * 16), 1).batch == 1
    assert Topology((Device(1, 0.001),), within_host_gbps=1e-3, between_hosts_gbps=1e9, latency_ms=0.0).latency_ms == 0
    assert Problem("p", (table,), Topology((Device(1),)), 1).local_batch == 1
    assert CommRequest((0, 4), 2, STILL, busy_ms=0).hosts == 1 and CommRequest((4, 4), 3, STILL, "all_reduce").batch == 3


def test_what_is_not_said_has_its_default():
    table, device, problem = Table("t", 10, 8, 1.0), Device(1), constrained()
    assert (table.access, table.precision, table.ordered) == (Zipf(1.05), "fp32", False)
    assert (device.speed, device.host) == (1.0, "host-0")
    assert (problem.optimizer, Problem("p", FOUR, HOSTS, 4).constraints) == ("exact_sgd", Constraints(0, (), (), ()))
    assert (Setting("x", 1).precision, Setting("x", 1).optimizer) == ("fp32", "exact_sgd")
    request = CommRequest((4, 4), 2, STILL)
    assert (request.collective, request.payload, request.hosts, request.busy_ms) == ("all_to_all", "fp32", 1, 0.0)
    links = HOSTS.within_host_gbps, HOSTS.between_hosts_gbps, HOSTS.latency_ms, HOSTS.hardware
    assert links == (None,) * 4 and HOSTS.hosts == ("a", "b") and len(HOSTS) == 4


def test_nouns_are_values_that_nobody_changes():
    nouns = [x for module in (types, workload) for x in vars(module).values()
             if dataclasses.is_dataclass(x) and x.__module__ == module.__name__]
    assert len(nouns) > 15 and all(x.__dataclass_params__.frozen for x in nouns)
    by_array = {x.__name__ for x in nouns if not x.__dataclass_params__.eq}
    assert by_array == {"Workload"}  # whose arrays have no one answer to ==
    pinned = Constraints(0, ["s"], [["s", [0]]], [["t"]])
    listed = Problem("p", list(FOUR), Topology(list(HOSTS.devices)), 4, constraints=pinned)
    hash(listed)
    assert listed.constraints == Constraints(0, ("s",), (("s", (0,)),), (("t",),)) and listed.tables == FOUR
    placement = Placement("data_parallel", Shard.whole(FOUR[0]), np.array([1, 0]))
    assert placement.devices == (1, 0) and {*map(type, placement.devices)} == {int}


def test_tables_that_differ_in_anything_differ_as_keys():
    table = Table("t", 10, 8, 1.0)
    others = [dataclasses.replace(table, **change) for change in (
        {"name": "u"}, {"rows": 11}, {"dim": 4}, {"pooling": 2.0}, {"access": Zipf(0)}, {"precision": "fp16"}, {"ordered": True})]
    assert len({hash(t) for t in (table, *others)}) == 8 and len({table, *others, Table("t", 10, 8, 1)}) == 8


def test_a_shard_knows_its_shape():
    shard = Shard(Table("t", 10, 16, 1.0, precision="fp16"), 2, 10, 4, 16)
    assert (shard.rows, shard.width, shard.bytes, shard.full_rows, shard.label) == (8, 12, 192, False, "t[2:10, 4:16]")
    assert Shard(shard.table, 0, 10, 4, 8).full_rows and Shard.whole(shard.table).label == "t[0:10, 0:16]"


def test_a_step_is_as_long_as_that_of_the_device_that_takes_longest():
    parts = (1.0, 2.0), (3.0, 5.0), (0.5, 0.25), (0.125, 4.0), (7.0, 0.0)
    cost = StepCost(*parts)
    assert cost.compute_ms == (4.0, 7.0) and cost.device_ms == (11.625, 11.25) and cost.total_ms == 11.625
    slow = Replayed(*parts, step=Spread(12.0, 10.0, 14.0, 5), oversubscribed=True, slowdown=2.0)
    usual = slow.at_usual_speed()
    assert usual.device_ms == (11.625 / 2, 11.25 / 2) and usual.waiting_ms == (3.5, 0.0) and usual.oversubscribed
    assert usual.step == Spread(6.0, 5.0, 7.0, 5) and usual.slowdown == 1.0 and slow.slowdown == 2.0
    sample = ComputeSample("id", Setting("x", 1), ComputeRequest((), 1), Spread(1.0, 1, 1, 3), Spread(2.5, 2, 3, 3), 0.0)
    assert sample.total_ms == 3.5 and sample.slowdown == 1.0 and sample.error is None


def test_a_problem_of_another_setting_is_refused_with_both_shown(problem):
    problem.require_setting(Setting("anything", 256))  # a topology without hardware takes the model's
    named = dataclasses.replace(problem, topology=dataclasses.replace(problem.topology, hardware="h"))
    named.require_setting(Setting("h", 256))
    for other in (Setting("i", 256), Setting("h", 128), Setting("h", 256, "fp16"), Setting("h", 256, "fp32", "rowwise_adagrad")):
        with pytest.raises(SettingMismatch):
            named.require_setting(other)
    with pytest.raises(SettingMismatch) as error:
        problem.require_setting(Setting("nvidia-h200", 65536))
    assert "batch 256" in str(error.value) and "batch 65536" in str(error.value)


def test_pins_and_groups_say_where_tables_may_live_and_which_stay_whole():
    problem = constrained(unsplit=("v",), pinned=(("s", (3, 0, "a")), ("u", ("b", 0)), ("v", ("a", "b"))), together=(("s", "t"),))
    assert [problem.allowed_devices(name) for name in "stuv"] == [(0, 1, 3), (0, 1, 3), (0, 2, 3), (0, 1, 2, 3)]
    assert set(problem.pinned) == {"s", "t", "u"} and problem.whole == {"s", "t", "v"}
    assert dict(problem.bundle_of) == {"s": ("s", "t"), "t": ("s", "t")}
    on_one = constrained(pinned=(("s", (0, 2)), ("t", ("b",)), ("u", (1,))), together=(("t", "s"),))
    assert on_one.allowed_devices("s") == on_one.allowed_devices("t") == (2,)
    assert on_one.whole == {"s", "t", "u"}  # what has a single device gains nothing from a cut
    assert [on_one.kept_whole_by(n) for n in "su"] == ["constraints.together", "constraints.pinned"]
    assert problem.kept_whole_by("v") == "constraints.unsplit"


def test_ten_thousand_tables_on_a_thousand_devices_are_pinned():
    tables = tuple(Table(f"t{i}", 10, 8, 1.0) for i in range(10_000))
    topology = Topology(tuple(Device(1, host=f"h{d // 8}") for d in range(1024)))
    pinned = tuple((f"t{i}", (f"h{i % 128}", i % 1024)) for i in range(10_000))
    problem = Problem("p", tables, topology, 1024, constraints=Constraints(pinned=pinned))
    assert sum(len(problem.allowed_devices(t.name)) for t in tables) == sum(
        8 + (i % 1024 // 8 != i % 128) for i in range(10_000))  # a host's eight, and one that may be among them


def test_a_table_stays_a_key_across_processes(tables):
    """Its hash, of strings, is another in each process; so it is not taken along."""
    for table in tables:
        hash(table)
        taken = pickle.loads(pickle.dumps(table))
        assert "_hash" in vars(table) and "_hash" not in vars(taken) and taken == table and hash(taken) == hash(table)


def test_equal_tables_have_equal_files():
    from shardcore import files

    assert files.table_to_json(Table("t", 3, 4, 1)) == files.table_to_json(Table("t", 3, 4, 1.0))


def test_pins_that_mean_millions_of_devices_are_refused():
    tables = tuple(Table(f"t{i}", 10, 4, 1.0) for i in range(200))
    devices = (*(Device(1 << 40, 1.0, "big"),) * 30_000, *(Device(1 << 40, 1.0, f"h{i}") for i in range(200)))
    pins = tuple((f"t{i}", ("big", f"h{i}")) for i in range(200))
    with pytest.raises(ShardCoreError, match="pins tables to sets of more than"):
        Problem("p", tables, Topology(devices), len(devices), constraints=Constraints(pinned=pins))
