import pickle

import pytest

from shardcore.types import (
    CommRequest,
    Constraints,
    Device,
    Placement,
    Problem,
    Reuse,
    Setting,
    SettingMismatch,
    Shard,
    ShardCoreError,
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
    (lambda: Placement(Shard.whole(Table("t", 10, 8, 1.0)), (1, 1)), ["(1, 1)"]),
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
    (lambda: Setting("a/b", 4), ["'a/b'"]),
    (lambda: Setting("x", 0), ["batch 0"]),
    (lambda: Setting("x", 1, optimizer="adam"), ["'adam'", "exact_sgd"]),
])
def test_bad_values_are_named(make, named):
    with pytest.raises(ShardCoreError) as error:
        make()
    assert all(word in str(error.value) for word in named), str(error.value)


def test_a_problem_of_another_setting_is_refused_with_both_shown(problem):
    problem.require_setting(Setting("anything", 256))  # a topology without hardware takes the model's
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
