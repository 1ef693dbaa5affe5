"""Towers: the hosts that are found, against brute force; what travels, by hand; and what is refused."""

import json
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from shapes import (
    ACROSS,
    ALL_TO_ALL,
    CHANNEL,
    TO_TOWER,
    WITHIN,
    column,
    entering,
    host_row,
    on_hosts,
    with_room,
)

from shardcore.core.constraints import Constraints
from shardcore.core.errors import Infeasible, ShardCoreError
from shardcore.core.links import make_links
from shardcore.core.types import Placement, Plan, Problem, Setting, Shard, Table
from shardcore.cost.analytic import AnalyticModel
from shardcore.cost.model import price
from shardcore.io import files
from shardcore.io.towers import Towers, read_towers
from shardcore.search import SHARDERS, Budget, greedy
from shardcore.search.bound.lower_bound import prove_lower_bound
from shardcore.search.decisions.driver import decide
from shardcore.search.decisions.row_domains import RowDomains
from shardcore.search.decisions.towers import (
    OnTowers,
    TowerDivision,
    assign_tower_hosts,
    pin_tables_to_towers,
    step_ms_without_towers,
    with_towers_of_plan,
)
from shardcore.search.lockstep import PlanBatch, search_space_by_columns
from shardcore.step.kinds import CHANNELS
from shardcore.step.lower import lower
from shardcore.step.memory import table_peak_bytes

B = 64
MODEL = AnalyticModel(
    Setting("made-up", B), launch_us=2, table_us=1, lookup_ns=10, exchange_latency_ms=0.001, exchange_gbps=1
)


def problem_of(n: int = 12, hosts: str = "aabb", memory_bytes: int = 1 << 24, **fields) -> Problem:
    rng = np.random.default_rng(n)
    tables = tuple(
        Table(
            f"t{i}", int(rng.integers(50, 400)), int(rng.choice([8, 16, 32])), float(rng.choice([1, 2.5, 10]))
        )
        for i in range(n)
    )
    return with_room(Problem("towers", tables, on_hosts(hosts, memory_bytes), B, **fields))


def pairs(n: int = 12) -> Towers:
    """t0 with t1, t2 with t3, ..."""
    return Towers(4.0, tuple((f"t{i}", f"t{i + 1}") for i in range(0, n, 2)))


# --- the division -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_no_division_of_few_groups_is_better(seed):
    rng = np.random.default_rng(seed)
    n_groups, n_hosts = 8 - seed % 2, 2 + seed % 2
    affinity = np.triu(rng.random((n_groups, n_groups)) * (rng.random((n_groups, n_groups)) < 0.6), 1)
    load = np.stack([rng.uniform(1, 4, n_groups), rng.uniform(1, 4, n_groups)], 1)
    room = load[:, 1].sum() * (1.1 if seed % 3 else 3) / n_hosts
    capacity = np.stack([np.ones(n_hosts), np.full(n_hosts, room)], 1)
    allowed = rng.random((n_groups, n_hosts)) < 0.9
    allowed[:, 0] |= ~allowed.any(1)
    division = TowerDivision(affinity + affinity.T, load, capacity, allowed)
    least = min(
        division.cost(np.array([*range(n_hosts), *h]))
        for h in product(range(n_hosts), repeat=n_groups)
        if allowed[range(n_groups), h].all()
    )
    found = division.best_division()
    assert allowed[range(n_groups), found[n_hosts:]].all()
    assert division.cost(found) == pytest.approx(least, rel=1e-9, abs=1e-9)


def test_out_of_time_the_first_division_that_fits_will_do():
    rng = np.random.default_rng(0)
    affinity, load = rng.random((30, 30)), rng.uniform(1, 4, (30, 2))
    capacity = np.stack([np.ones(3), np.full(3, load[:, 1].sum())], 1)
    at_once, whole = (
        TowerDivision(affinity + affinity.T, load, capacity, np.ones((30, 3), dtype=bool), seconds)
        for seconds in (1e-9, None)
    )
    assert whole.cost(whole.best_division()) < at_once.cost(at_once.best_division())


def test_memory_counts_before_affinity():
    # The first two belong together. Within the tolerance they would be, but they take 10.8 of 10.5 bytes.
    load = np.array([(1, 6.0), (1, 4.8), (1, 5.0), (1, 4.2)])
    affinity = np.zeros((4, 4))
    affinity[0, 1] = affinity[1, 0] = 1.0
    for room, beside in ((10.5, 3), (11.0, 1)):
        capacity = np.array([(1, room)] * 2)
        division = TowerDivision(affinity, load, capacity, np.ones((4, 2), dtype=bool))
        host = division.best_division()[2:]
        assert np.flatnonzero(host == host[0]).tolist() == [0, beside]


def test_blocks_of_a_matrix_are_found_and_hosts_are_even():
    alike = tuple(Table(f"t{i}", 100, 16, 2.0) for i in range(12))
    problem = Problem("blocks", alike, on_hosts("aabbcc"), 48)
    block = np.arange(12) * 5 % 3  # tables of a block are not neighbours
    matrix = np.where(block[:, None] == block, 1.0, 0.01)
    found = assign_tower_hosts(
        problem, Towers(2.0, (), tuple(t.name for t in problem.tables), tuple(map(tuple, matrix))), MODEL
    )
    hosts = [{found.host_of[f"t{i}"] for i in np.flatnonzero(block == b)} for b in range(3)]
    assert sorted(map(sorted, hosts)) == [["a"], ["b"], ["c"]]
    np.testing.assert_allclose(found.loads, 1.0)
    assert found.affinity_inside == pytest.approx(18 / (18 + 48 * 0.01))
    assert found.problem.job.tower_ratio == 2.0


def test_groups_stay_together_with_pins_and_bundles_and_missing_tables_are_alone():
    asked = Constraints(pinned=(("t0", (1, 3)), ("t5", ("a",))), together=(("t2", "t4"),))
    problem = problem_of(constraints=asked)
    found = assign_tower_hosts(problem, Towers(4.0, (("t1", "t0"), ("t3", "t2"), ("t5", "t4"))), MODEL)
    assert found.host_of["t1"] == found.host_of["t0"]
    assert {found.host_of[f"t{i}"] for i in (2, 3, 4, 5)} == {"a"}  # t2 with t4, which is with t5
    assert found.problem.pinned_devices["t0"] == ((1,) if found.host_of["t0"] == "a" else (3,))
    assert found.problem.constraints.together == asked.together
    assert max(map(max, found.loads)) < 1.3
    assert found == assign_tower_hosts(
        problem, Towers(4.0, (("t1", "t0"), ("t3", "t2"), ("t5", "t4"))), MODEL
    )


# --- what travels -------------------------------------------------------------------------------------------


def test_what_enters_each_channel_by_hand():
    # 2 hosts of 2 devices, batch 64, ratio 4. Device 0 has 16 columns, device 1 none, 2 has 8, 3 has 24.
    a, b, c = (Table(n, 100, d, 1.0) for n, d in (("a", 16), ("b", 8), ("c", 24)))
    plain = Problem("hand", (a, b, c), on_hosts("aabb"), B)
    problem = pin_tables_to_towers(plain, {"a": "a", "b": "b", "c": "b"}, 4.0)
    plan = Plan((column(a, 0), column(b, 2), column(c, 3)))
    found = entering(lower(plan, problem).traffic)
    # Within a host all outputs; across, a host's outputs / 4, half of them on each of its two devices.
    assert found == {
        "all_to_all_host": [B * 16 * 4, 0, B * 8 * 4, B * 24 * 4],
        "all_to_all_cross": [B * 16 / 2, B * 16 / 2, B * 32 / 2, B * 32 / 2],
    }
    assert entering(lower(plan, plain).traffic) == {"all_to_all": [B * 16 * 4, 0, B * 8 * 4, B * 24 * 4]}
    assert step_ms_without_towers(plan, problem, MODEL) == price(lower(plan, plain), MODEL).total_ms
    assert step_ms_without_towers(plan, plain, MODEL) is None


def test_rows_divided_over_a_host_are_summed_and_compressed():
    t, u = Table("t", 100, 16, 1.0), Table("u", 100, 8, 1.0)
    problem = pin_tables_to_towers(Problem("rows", (t, u), on_hosts("aabb"), B), {"t": "a", "u": "b"}, 4.0)
    plan = Plan((host_row(t, (0, 1)), column(u, 2)))
    work = lower(plan, problem)
    of = dict(zip(CHANNELS, work.traffic.tolist(), strict=True))
    assert of[WITHIN] == [B * 16 * 4] * 2 + [0, 0] and of[TO_TOWER] == [0, 0, B * 8 * 4, 0]
    assert of[ACROSS] == [B * 16 / 2] * 2 + [B * 8 / 2] * 2 and not any(of[ALL_TO_ALL])


IN_PODS = ("p/a", "p/b", "q/c", "q/d")
"""Two pods of two hosts of a device."""


@pytest.mark.parametrize("rows", [False, True])
def test_towers_of_pods_send_as_towers_of_hosts_do(rows):
    """With rows over pods, each pod is a tower. The same bytes travel within and across pods."""
    t, u = Table("t", 100, 16, 1.0), Table("u", 100, 8, 1.0)
    found = []
    for on, names, domain in (
        (on_hosts("aabb"), ("a", "b"), "host"),
        (on_hosts(IN_PODS, rows_over="pod"), ("p", "q"), "pod"),
    ):
        whole = Problem("towers", (t, u), on, B)
        problem = pin_tables_to_towers(whole, dict(zip("tu", names, strict=True)), 4.0)
        first = Placement(f"{domain}_row", Shard.whole(t), (0, 1)) if rows else column(t, 0)
        plan = Plan((first, column(u, 2)), {"tower_ratio": 4.0})
        sent = entering(lower(plan, problem).traffic)
        found.append(sorted(sent.values()))
        assert {CHANNEL[name].scope.domain for name in sent} == {f"within_{domain}"}
        assert with_towers_of_plan(plan, whole) == problem
    assert found[0] == found[1]


@pytest.mark.parametrize("algorithm", ["anneal", "size_greedy", "neuroshard"])
def test_towers_are_divided_over_pods_and_a_plan_to_start_from_keeps_them(algorithm):
    on_pods = replace(problem_of(), topology=on_hosts(IN_PODS, 1 << 30, rows_over="pod"))
    best = decide(on_pods, MODEL, [OnTowers(pairs())], SHARDERS[algorithm], budget=Budget(evals=200))
    pod_of = {0: "p", 1: "p", 2: "q", 3: "q"}
    of_table = {p.shard.table.name: {pod_of[d] for d in p.devices} for p in best.plan.placements}
    assert all(len(of_table[a] | of_table[b]) == 1 for a, b in pairs().towers)
    again = decide(
        on_pods, MODEL, [OnTowers(pairs(), best.plan, False)], SHARDERS[algorithm], budget=Budget(evals=50)
    )
    kept = {p.shard.table.name: {pod_of[d] for d in p.devices} for p in again.plan.placements}
    assert kept == of_table and again.ledger.chosen == "hosts of the plan before"
    with pytest.raises(ShardCoreError, match="table 't0' on pods 'p' and 'q'; it needs one"):
        apart = Plan((Placement("row", Shard.whole(on_pods.tables[0]), (0, 1, 2, 3)),), {"tower_ratio": 4.0})
        with_towers_of_plan(apart, on_pods)


def test_row_domains_are_not_chosen_for_towers():
    """Their number is the model's."""
    with pytest.raises(
        ShardCoreError, match="row domains and towers were both asked for; a model has towers of"
    ):
        decide(problem_of(), MODEL, [OnTowers(pairs()), RowDomains()], SHARDERS["size_greedy"])


@pytest.mark.parametrize("ratio", [1, 8])
def test_a_ratio_divides_what_crosses_hosts_and_nothing_else(ratio):
    towers = replace(pairs(), compression_ratio=ratio)
    problem = assign_tower_hosts(problem_of(hosts="aabbccdd"), towers, MODEL).problem
    plan = SHARDERS["size_greedy"](problem, MODEL)
    plain = replace(problem, job=replace(problem.job, tower_ratio=None))
    sent, whole = (entering(lower(plan, of).traffic) for of in (problem, plain))
    assert sum(sent["all_to_all_cross"]) == pytest.approx(sum(whole["all_to_all"]) / ratio)
    assert sent["all_to_all_host"] == whole["all_to_all"]


# --- plans --------------------------------------------------------------------------------------------------


KIN = {*greedy.ORDERS, "anneal", "anneal_columns"} - {"size_greedy"}
"""Greedy searches differ in their order alone, and the portfolio anneals."""


@pytest.mark.parametrize(
    "algorithm",
    [pytest.param(name, marks=[pytest.mark.long] if name in KIN else []) for name in SHARDERS],
)
def test_every_sharder_keeps_towers_on_their_hosts(algorithm):
    found = assign_tower_hosts(problem_of(), pairs(), MODEL)
    problem, host = found.problem, [d.host for d in found.problem.topology.devices]
    plan = SHARDERS[algorithm](problem, MODEL, seed=1, budget=Budget(evals=300))
    for p in plan.placements:
        assert {host[d] for d in p.devices} == {found.host_of[p.shard.table.name]}
    ms = price(lower(plan, problem), MODEL).total_ms
    assert plan.provenance["predicted_ms"] == pytest.approx(ms)
    proved = prove_lower_bound(problem, MODEL).proved_ms
    assert proved is None or proved <= ms * (1 + 1e-9)


def test_a_table_too_large_for_a_device_is_divided_over_its_host():
    big = Table("big", 60_000, 4, 1.0)
    problem = problem_of(6, memory_bytes=table_peak_bytes(big, problem_of(6)) * 6 // 10)
    problem = replace(problem, tables=(*problem.tables, big))
    found = assign_tower_hosts(problem, pairs(6), MODEL)
    plan = SHARDERS["anneal"](found.problem, MODEL, budget=Budget(evals=300))
    [placement] = [p for p in plan.placements if p.shard.table == big]
    assert placement.kind == "host_row" and len(placement.devices) == 2
    lower(plan, found.problem)


def test_a_sequence_that_is_on_every_device_is_so_beside_towers():
    """Hot rows are such tables. Only pooled tables are a tower's."""
    hot = Table("s_hot", 50, 8, 2.0, sequence=True, collection="ec")
    problem = problem_of()
    problem = replace(
        problem,
        tables=(*problem.tables, hot),
        constraints=Constraints(kinds=(("s_hot", ("data_parallel",)),)),
    )
    found = assign_tower_hosts(problem, pairs(), MODEL)
    assert "s_hot" not in dict(found.problem.constraints.pinned)
    plan = SHARDERS["size_greedy"](found.problem, MODEL)
    [placement] = [p for p in plan.placements if p.shard.table == hot]
    assert placement.kind == "data_parallel" and placement.devices == (0, 1, 2, 3)
    told = Plan(plan.placements, {**plan.provenance, "tower_ratio": found.problem.job.tower_ratio})
    assert (
        lower(plan, with_towers_of_plan(told, problem)).memory_bytes
        == lower(plan, found.problem).memory_bytes
    )


def test_a_plan_under_construction_costs_what_its_workload_does():
    found = assign_tower_hosts(problem_of(), pairs(), MODEL)
    plan = SHARDERS["random"](found.problem, MODEL)
    whole = [Shard.whole(t) for t in found.problem.tables]
    space = search_space_by_columns(found.problem, MODEL, whole, cut=False)
    keys = [space.cache.shard_key(placement.shard) for placement in plan.placements]
    batch = PlanBatch(space, np.array([keys]))
    for placement, (item, blocks) in zip(plan.placements, keys, strict=True):
        batch.place_shard(item, blocks, placement.devices[0])
    assert batch.cost_ms()[0, 0] == pytest.approx(price(lower(plan, found.problem), MODEL).total_ms)


def test_slow_links_between_hosts_make_towers_pay():
    slow, links = problem_of(), make_links(within_host=100.0, between_hosts=0.001)
    slow = replace(slow, topology=replace(slow.topology, links=links))
    problems = [
        slow,
        *(assign_tower_hosts(slow, replace(pairs(), compression_ratio=r), MODEL).problem for r in (2, 16)),
    ]
    plans = [SHARDERS["anneal_columns"](p, MODEL, budget=Budget(evals=2000)) for p in problems]
    costs = [price(lower(plan, p), MODEL) for plan, p in zip(plans, problems, strict=True)]
    assert costs[0].total_ms > costs[1].total_ms > costs[2].total_ms
    # Outputs and gradients take less time, ids as long as before.
    back = [max(cost.backward_comm_ms) for cost in costs]
    assert back[0] > 1.6 * back[1] > 1.6 * 7 * back[2]
    ids = [max(cost.input_ms) for cost in costs]
    assert max(ids) < 1.2 * min(ids)


# --- what is refused ----------------------------------------------------------------------------------------


APART = Constraints(pinned=(("t0", ("a",)), ("t1", ("b",))))


@pytest.mark.parametrize(
    "make, towers, said",
    [
        (problem_of, Towers(2, (("t0", "who"),)), "towers have table 'who', which problem 'towers' does not"),
        (problem_of, Towers(2, (), ("who",), ((0.0,),)), "towers have table 'who', which problem"),
        (lambda: problem_of(hosts="aaaa"), pairs(), "has 1 host; towers need 2 or more"),
        (lambda: problem_of(hosts="aaab"), pairs(), "has hosts of 1 to 3 devices; towers need as many"),
        (
            lambda: replace(problem_of(), topology=on_hosts(["p/a", "p/b"] * 2, rows_over="pod")),
            pairs(),
            "has 1 pod; towers need 2 or more, for they make smaller what crosses pods",
        ),
        (lambda: problem_of(constraints=APART), pairs(), "'t0', 't1' on one host, but constraints.pinned"),
        (
            lambda: assign_tower_hosts(problem_of(), pairs(), MODEL).problem,
            pairs(),
            "has job.tower_ratio 4.0, so",
        ),
    ],
)
def test_what_cannot_have_towers_is_refused(make, towers, said):
    with pytest.raises(ShardCoreError, match=said):
        assign_tower_hosts(make(), towers, MODEL)


@pytest.mark.parametrize(
    "hosts, pins, ratio, said",
    [
        ("aaaa", [(f"t{i}", (0,)) for i in range(12)], 2.0, "has 1 host; towers need 2 or more"),
        ("aaab", [(f"t{i}", (0,)) for i in range(12)], 2.0, "has hosts of 1 to 3 devices; towers need as"),
        ("aabb", [("t0", (0, 1))], 2.0, "'t1' may live on several hosts; it needs constraints.pinned"),
        ("aabb", [], 0.5, "job has tower_ratio 0.5; it needs 1 to"),
    ],
)
def test_a_job_with_towers_needs_each_table_on_one_host(hosts, pins, ratio, said):
    problem = problem_of(hosts=hosts, constraints=Constraints(pinned=tuple(pins)))
    with pytest.raises(ShardCoreError, match=said):
        replace(problem, job=replace(problem.job, tower_ratio=ratio))


def test_a_group_that_does_not_fit_is_named_and_by_how_much():
    roomy = problem_of()
    needed = [table_peak_bytes(t, roomy) for t in roomy.tables]
    tight = problem_of(memory_bytes=sum(needed) * 3 // 10)  # a host has 60% of what all tables take
    seven = tuple(f"t{i}" for i in np.argsort(needed)[-9:])
    with pytest.raises(Infeasible, match=r"no division .* the group .* and 4 more is on host .* too little"):
        assign_tower_hosts(tight, Towers(2, (seven,)), MODEL)
    # Three equal groups, each over half of a host.
    equal = Problem("equal", tuple(Table(f"t{i}", 1000, 16, 1.0) for i in range(6)), on_hosts("aabb"), B)
    each = table_peak_bytes(equal.tables[0], equal)
    equal = with_room(replace(equal, topology=on_hosts("aabb", each * 3 // 2 + 8)))
    with pytest.raises(Infeasible, match=r"no division of its towers .* the group 't\d', 't\d' is on host"):
        assign_tower_hosts(equal, pairs(6), MODEL)


GOOD = {"schema": "shardcore/towers", "version": 1, "compression_ratio": 4, "towers": [["t0", "t1"]]}
MATRIX = {**{k: v for k, v in GOOD.items() if k != "towers"}, "tables": ["t0", "t1"]}


def test_files_of_towers_are_read(tmp_path):
    (tmp_path / "t.json").write_text(json.dumps(GOOD))
    assert read_towers(tmp_path / "t.json") == Towers(4, (("t0", "t1"),))
    (tmp_path / "t.json").write_text(json.dumps({**MATRIX, "affinity": [[9, 0.5], [0.5, 0]]}))
    assert read_towers(tmp_path / "t.json") == Towers(4, (), ("t0", "t1"), ((9, 0.5), (0.5, 0)))


@pytest.mark.parametrize(
    "data, said",
    [
        ({**GOOD, "compression_ratio": 0.9}, "compression_ratio 0.9; it needs 1 to 1,000,000"),
        ({**GOOD, "towers": [["t0"], ["t1", "t0"]]}, "table 't0' 2 times in their groups; it needs to be in"),
        ({**GOOD, "towers": [[]]}, "an empty group, towers[0]"),
        ({**GOOD, "towers": []}, "no 'towers' and no 'affinity'"),
        ({**GOOD, "tower": 1}, "unknown key 'tower'; known are compression_ratio, towers, tables, affinity"),
        ({**MATRIX, "affinity": [[0, 1]]}, "an affinity of 1 rows for 2 tables"),
        ({**MATRIX, "affinity": [[0, 1], [1]]}, "1 columns in the row of 't1'; it needs 2"),
        ({**MATRIX, "affinity": [[0, 1], [2, 0]]}, "affinity 1 of 't0' and 't1', and 2 of 't1' and 't0'; it"),
        ({**MATRIX, "affinity": [[0, -1], [-1, 0]]}, "affinity -1 of 't0' and 't1'; it needs 0, or 1e-100"),
        ({**MATRIX, "affinity": [[0, 1e308], [1e308, 0]]}, "affinity 1e+308 of 't0' and 't1'; it needs 0"),
        ({**MATRIX, "affinity": [[0, 1e-320], [1e-320, 0]]}, "of 't0' and 't1'; it needs 0, or 1e-100 to"),
        ({**MATRIX, "tables": ["t0", "t0"], "affinity": [[0, 1], [1, 0]]}, "table 't0' 2 times in 'tables'"),
        ({**MATRIX, "affinity": [[0, float("nan")], [1, 0]]}, "is not finite"),
    ],
)
def test_files_of_towers_that_are_refused(tmp_path, data, said):
    path = tmp_path / "towers.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ShardCoreError) as refused:
        read_towers(path)
    assert said in str(refused.value) and "towers.json" in str(refused.value)


def test_an_affinity_that_is_no_number_is_refused_in_python_too():
    with pytest.raises(ShardCoreError, match="affinity nan of 't0' and 't1'"):
        Towers(2, (), ("t0", "t1"), ((0, float("nan")), (1, 0)))


def test_a_problem_with_towers_survives_its_file_and_a_plan_tells_its_towers(tmp_path):
    plain = problem_of()
    problem = assign_tower_hosts(plain, pairs(), MODEL).problem
    files.write_problem(tmp_path / "p.json", problem)
    assert files.read_problem(tmp_path / "p.json") == problem
    plan = SHARDERS["size_greedy"](problem, MODEL)
    assert with_towers_of_plan(plan, plain) is plain
    assert with_towers_of_plan(Plan(plan.placements, {"tower_ratio": 4.0}), plain) == problem
    astray = Plan((column(plain.tables[0], 0, 0, 4), column(plain.tables[0], 2, 4)), {"tower_ratio": 4.0})
    with pytest.raises(ShardCoreError, match="table 't0' on hosts 'a' and 'b'; it needs one"):
        with_towers_of_plan(astray, plain)
