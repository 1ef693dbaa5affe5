"""The library as its users call it: what is there, short texts of its nouns, and errors for arguments of
another type, which name the argument, its value and what would be right."""

import re

import numpy as np
import pytest

import shardcore
from shardcore import (
    SHARDERS,
    Budget,
    Constraints,
    Device,
    Placement,
    Plan,
    Problem,
    Reuse,
    Setting,
    Shard,
    ShardCoreError,
    Table,
    Topology,
    Zipf,
    load_model,
    lower,
    price,
    replay,
)
from shardcore.core.access_statistics import RowShares
from shardcore.core.job import Job
from shardcore.core.links import make_links
from shardcore.cost.analytic import AnalyticModel
from shardcore.io import files
from shardcore.plans.replan import ReplanConfig, Start
from shardcore.search.decisions.driver import decide
from shardcore.search.decisions.groups import Groups
from shardcore.search.decisions.towers import OnTowers

TABLE = Table("t0", 1000, 64, 5.0)
TOPOLOGY = Topology.of_hosts(2, 4, memory_gib=80)
PROBLEM = Problem("p", (TABLE,), TOPOLOGY, 2048)
MODEL = AnalyticModel(Setting("gpu", 2048))
PLAN = SHARDERS["size_greedy"](PROBLEM, MODEL)
WHOLE = Shard.whole(TABLE)


def table(**changed):
    return Table(**{"name": "t", "rows": 5, "dim": 64, "pooling": 1.0, **changed})


def problem(**changed):
    return Problem(**{"name": "p", "tables": [TABLE], "topology": TOPOLOGY, "global_batch": 2048, **changed})


WRONG = {
    "budget": (lambda: SHARDERS["anneal"](PROBLEM, MODEL, budget=100), "budget is 100; it needs to be a"),
    "seed": (lambda: SHARDERS["random"](PROBLEM, MODEL, seed=1.5), "seed is 1.5; it needs to be a whole"),
    "negative seed": (lambda: SHARDERS["portfolio"](PROBLEM, MODEL, seed=-1), "seed is -1; it needs to be 0"),
    "number of hosts": (lambda: Topology.of_hosts(True, 8, memory_gib=1), "True; it needs to be a whole"),
    "searched problem": (lambda: SHARDERS["random"](PLAN, MODEL), "problem is Plan(1 tables"),
    "searching model": (lambda: SHARDERS["random"](PROBLEM, "model"), "model is 'model'; it needs to be a"),
    "priced plan": (
        lambda: price(PLAN, MODEL),
        "workload is Plan(1 tables in 1 shards on 1 devices, by size_gr",
    ),
    "pricing model": (lambda: price(lower(PLAN, PROBLEM), None), "model is None; it needs to be a cost"),
    "lowered": (lambda: lower(PROBLEM, PLAN), "plan is Problem('p', 1 tables"),
    "lowered for": (lambda: lower(PLAN, PLAN), "problem is Plan(1 tables"),
    "replayed": (lambda: replay(PLAN, MODEL.setting), "workload is Plan("),
    "replay's setting": (lambda: replay(lower(PLAN, PROBLEM), PROBLEM), "setting is Problem("),
    "model's folder": (lambda: load_model(5), "folder of a model is 5; it needs to be a path"),
    "global_batch": (lambda: problem(global_batch="2048"), "problem 'p': global_batch is '2048'; it needs"),
    "float batch": (lambda: problem(global_batch=2048.0), "global_batch is 2048.0; it needs to be a whole"),
    "one table": (lambda: problem(tables=TABLE), "tables is Table("),
    "table": (lambda: problem(tables=[TABLE, "x"]), "problem 'p': tables[1] is 'x'; it needs to be a Table"),
    "no tables": (lambda: problem(tables=None), "tables is None; it needs to be a list of Tables"),
    "topology": (lambda: problem(topology=8), "topology is 8; it needs to be a Topology"),
    "constraints": (lambda: problem(constraints={"pinned": 1}), "constraints is {'pinned': 1}; it needs to"),
    "name": (lambda: problem(name=3), "problem: name is 3; it needs to be a text"),
    "unknown pinned": (
        lambda: problem(constraints=Constraints(pinned=[("big", [0])])),
        "pins ['big'], which it does not have",
    ),
    "pinned pair": (
        lambda: Constraints(pinned=("t0", (0,))),
        'constraints.pinned is (\'t0\', (0,)); it needs to be a list, such as [("t0", [0, "host-1"])]',
    ),
    "pinned mapping": (lambda: Constraints(pinned={"t0": 0}), "constraints.pinned is {'t0': 0}; it needs"),
    "unsplit": (lambda: Constraints(unsplit="t0"), "constraints.unsplit is 't0'; it needs to be a list"),
    "kinds": (lambda: Constraints(kinds=("t0", "row")), "constraints.kinds is ('t0', 'row'); it needs"),
    "together": (lambda: Constraints(together=3), "constraints.together is 3; it needs to be a list"),
    "reserved": (lambda: Constraints(reserved_bytes="1 GiB"), "constraints.reserved_bytes is '1 GiB'; it"),
    "rows": (lambda: table(rows="5"), "table 't': rows is '5'; it needs to be a whole number"),
    "boolean rows": (lambda: table(rows=True), "rows is True; it needs to be a whole number"),
    "pooling": (lambda: table(pooling="3"), "pooling is '3'; it needs to be a number"),
    "access": (lambda: table(access=1.05), "access is 1.05; it needs to be a Reuse or a Zipf"),
    "precision": (lambda: table(precision=16), "precision is 16; it needs to be a text"),
    "sequence": (lambda: table(sequence="no"), "sequence is 'no'; it needs to be True or False"),
    "table's name": (lambda: table(name=5), "table: name is 5; it needs to be a text"),
    "device": (lambda: Device("80"), "device: memory_bytes is '80'; it needs to be a whole number"),
    "devices": (lambda: Topology(8), "topology: devices is 8; it needs to be a list of Devices"),
    "one of the devices": (lambda: Topology([Device(1), 8]), "topology: devices[1] is 8; it needs to be a"),
    "hosts": (lambda: Topology.of_hosts("2", 8, 80), "hosts is '2'; it needs to be a whole number"),
    "no hosts": (lambda: Topology.of_hosts(0, 8, 80), "hosts is 0; it needs 1 to 65536"),
    "memory": (lambda: Topology.of_hosts(2, 8, None), "memory_gib is None; it needs to be a number"),
    "no memory": (lambda: Topology.of_hosts(2, 8, 0), "memory_gib is 0; it needs more than 0"),
    "setting": (lambda: Setting("gpu", "2048"), "setting: batch is '2048'; it needs to be a whole number"),
    "evals": (lambda: Budget(evals="5"), "budget: evals is '5'; it needs to be a whole number or None"),
    "job": (lambda: Job(dense_forward_ms="3"), "job: dense_forward_ms is '3'; it needs to be a number or"),
    "zipf": (lambda: Zipf("steep"), "zipf: alpha is 'steep'; it needs to be a number"),
    "reuse": (lambda: Reuse("x", 5), "reuse histogram: bins is 'x'; it needs to be a list of numbers"),
    "shard's table": (lambda: Shard("t", 0, 1, 0, 4), "a shard: table is 't'; it needs to be a Table"),
    "shard's rows": (lambda: Shard(TABLE, 0, "1", 0, 4), "a shard: row_hi is '1'; it needs to be a whole"),
    "placed": (lambda: Placement("row", TABLE, (0,)), "a placement: shard is Table("),
    "kind": (lambda: Placement(5, WHOLE, (0,)), "a placement: kind is 5; it needs to be a text"),
    "placed on": (lambda: Placement("row", WHOLE, 0), "a placement: devices is 0; it needs to be a list of"),
    "placements": (lambda: Plan([TABLE]), "a plan: placements[0] is Table("),
    "huge": (lambda: table(precision=10**5000), "table 't': precision is a whole number that is too long"),
    "decisions": (
        lambda: decide(PROBLEM, MODEL, Groups(), SHARDERS["random"]),
        "it needs to be a list of decisions, such as [Groups()]",
    ),
    "decision": (
        lambda: decide(PROBLEM, MODEL, ["groups"], SHARDERS["random"]),
        "a decision is 'groups'; it needs to be a Decision",
    ),
    "deciding search": (lambda: decide(PROBLEM, MODEL, [], "random"), "search is 'random'; it needs to be a"),
    "decided problem": (lambda: decide(PLAN, MODEL, [], SHARDERS["random"]), "problem is Plan("),
    "deciding model": (lambda: decide(PROBLEM, None, [], SHARDERS["random"]), "model is None; it needs"),
    "size of groups": (lambda: Groups(1.5), "groups: size is 1.5; it needs to be a text or a whole number"),
    "interval": (lambda: Groups(sync_every="x"), "groups: sync_every is 'x'; it needs to be a whole number"),
    "no such size": (lambda: decide(PROBLEM, MODEL, [Groups(3)], SHARDERS["random"]), "--groups is '3'"),
    "towers": (lambda: OnTowers(None), "towers: towers is None; it needs to be a Towers"),
    "start": (lambda: Start(None, PROBLEM), "a plan to start from: old is None; it needs to be a Plan"),
    "gone": (lambda: Start(PLAN, PROBLEM, "0"), "gone is '0'; it needs to be a list of whole numbers"),
    "re-plan": (lambda: ReplanConfig("x"), "re-plan config: max_moved_tables is 'x'; it needs to be a whole"),
    "plans": (lambda: shardcore.load_plan(5, "p"), "plans is 5; it needs to be a folder or URL"),
    "published name": (lambda: shardcore.load_plan("plans", 5), "no plan is published for problem 5 in"),
    "no models": (lambda: load_model([]), "folders of models are []; they need one or more"),
    "file": (lambda: files.read_problem(5), "path is 5; it needs to be a path of a file"),
    "written plan": (lambda: files.write_plan("x.json", PROBLEM, PLAN), "plan is Problem("),
    "written for": (lambda: files.write_plan("x.json", PLAN, PLAN), "problem is Plan("),
    "written problem": (lambda: files.write_problem("x.json", PLAN), "problem is Plan("),
    "written to": (lambda: files.write_problem("a\0b", PROBLEM), r"cannot write 'a\x00b': no name of a file"),
    "sharder": (lambda: SHARDERS["anneal_cols"], "algorithm 'anneal_cols' is not known; there are "),
    "sharder's name": (lambda: SHARDERS[3], "algorithm is 3; it needs to be a name of a"),
}


@pytest.mark.parametrize("call, said", WRONG.values(), ids=WRONG)
def test_an_argument_of_another_type_is_named_with_its_value_and_what_would_be_right(call, said):
    with pytest.raises(ShardCoreError, match=re.escape(said)) as raised:
        call()
    assert len(str(raised.value)) <= 300


@pytest.mark.parametrize(
    "changed, said",
    [
        ({"tables": [table(precision="fp16")]}, "weights are fp16; the model was measured with fp32"),
        ({"job": Job(forward_payload="bf16")}, "payloads are bf16 and fp32; the model prices fp32 and fp32"),
    ],
)
def test_a_price_says_where_the_model_is_of_other_weights_or_payloads(changed, said):
    asked = problem(**changed)
    plan = Plan([Placement("column", Shard.whole(asked.tables[0]), (0,))])
    assert price(lower(plan, asked), MODEL).extrapolated[0].startswith(said)
    assert not any("payloads" in x or "weights" in x for x in price(lower(PLAN, PROBLEM), MODEL).extrapolated)


def test_groups_take_their_size_as_a_number():
    assert (
        decide(PROBLEM, MODEL, [Groups(8)], SHARDERS["random"]).ms
        == decide(PROBLEM, MODEL, [Groups("8")], SHARDERS["random"]).ms
    )


def test_lists_and_numbers_of_numpy_are_taken():
    found = problem(tables=(t for t in [TABLE]), global_batch=np.int64(2048))
    assert found == PROBLEM and hash(found.tables) == hash((TABLE,))
    assert table(rows=np.int32(5), pooling=np.float32(1)) == table()
    assert Plan([PLAN.placements[0]]) == PLAN and load_model.__doc__
    assert Reuse(np.ones(17) / 17, 64).bins[0] == pytest.approx(1 / 17)


def test_equal_hosts_are_one_call():
    assert TOPOLOGY == Topology(tuple(Device(80 << 30, host=f"host-{h}") for h in (0, 0, 0, 0, 1, 1, 1, 1)))
    found = Topology.of_hosts(
        1, 2, memory_gib=0.5, hardware="nvidia-h100", links=make_links(within_host=400.0)
    )
    assert [d.memory_bytes for d in found.devices] == [1 << 29] * 2 and found.hardware == "nvidia-h100"


def test_the_nouns_print_a_line_however_large_they_are():
    tables = tuple(Table(f"t{i}", 1000, 64, 5.0) for i in range(1000))
    large = Problem("large", tables, Topology.of_hosts(4, 8, memory_gib=80, hardware="nvidia-h100"), 1024)
    plan = SHARDERS["size_greedy"](large, AnalyticModel(Setting("nvidia-h100", 1024)))
    assert repr(large.topology) == "Topology(32 devices on 4 hosts, 80 GiB each, hardware nvidia-h100)"
    assert repr(plan) == "Plan(1000 tables in 1000 shards on 32 devices, by size_greedy)"
    assert all(len(repr(x)) < 200 for x in (large, plan, large.topology, lower(plan, large)))
    accesses = {"access": Reuse(np.ones(17) / 17, 64), "row_shares": RowShares((0.5,) * 2, (0.5,) * 2)}
    assert repr(table(**accesses, ordered=True)) == (
        "Table('t', 5 x 64, pooling=1, access=Reuse(batch=64), ordered=True, row_shares=RowShares(2 ranges))"
    )
    uneven = Topology((Device(1 << 30), Device(3 << 30)))
    assert repr(uneven) == "Topology(2 devices on 1 hosts, 1 to 3 GiB each)"


def test_all_that_the_page_names_is_there():
    names = dir(shardcore)
    assert {*shardcore.__all__, "__version__"} <= set(names)
    assert {"price", "lower", "load_model", "replay", "load_plan", "SHARDERS", "Budget", "CostModel"} <= set(
        names
    )
    for name in shardcore.__all__:
        assert getattr(shardcore, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'prices'"):
        shardcore.prices  # noqa: B018
