"""Replays kept in folders: nothing runs twice, whatever was killed or edited runs again, and any model prices
them."""

import dataclasses
import json
from functools import cache

import pytest
from sealing import edit

from shardcore.core.errors import ShardCoreError
from shardcore.core.step_cost import PARTS
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Plan, Problem, Setting
from shardcore.cost import replay_metrics
from shardcore.cost.analytic import AnalyticModel
from shardcore.cost.model import price
from shardcore.io import replays
from shardcore.io.measurements import StepSample, TimingSpread
from shardcore.measure.replay import ReplayConfig
from shardcore.search import SHARDERS, Budget

MIB = 1 << 20
SETTING = Setting("test", 240)
CONFIG = ReplayConfig(repeats=4, warmups=2, batches=2, arena_bytes=8 * MIB, evict_bytes=MIB, timeout_s=60)
MODEL = AnalyticModel(SETTING)


@pytest.fixture
def problem(tables) -> Problem:
    return Problem("replayed", tables, Topology((Device(64 * MIB),) * 2), SETTING.batch)


@cache
def plans_of(problem):
    names = ["portfolio", "neuroshard", "size_greedy", "dim_greedy", "random"]
    plans = [(n, SHARDERS[n](problem, MODEL, seed=3, budget=Budget(evals=200))) for n in names]
    return (*plans, ("random", SHARDERS["random"](problem, MODEL, seed=4)))


@pytest.fixture
def made(problem):
    return list(plans_of(problem))


@pytest.fixture
def clock():
    """Takes 1.5 times what the analytic model says at the usual speed, at 1/1.25 of which it runs; notes how
    many plans it ran at each call."""
    ran = []

    def replay(workloads):
        ran.append(len(workloads))
        costs = [price(w, MODEL) for w in workloads]
        return [
            StepSample(
                **{part: tuple(1.875 * ms for ms in getattr(c, part)) for part in PARTS},
                step=TimingSpread(1.875 * c.total_ms, 1.75 * c.total_ms, 2 * c.total_ms, 4),
                oversubscribed=False,
                slowdown=1.25,
            )
            for c in costs
        ]

    replay.ran = ran
    return replay


def test_what_is_kept_is_not_replayed_again_and_reads_as_it_was(problem, made, clock, tmp_path):
    folder = tmp_path / problem.name
    kept = replays.replay_or_reuse(folder, problem, made, SETTING, CONFIG, clock)
    assert clock.ran == [len({plan for _, plan in made})]
    assert (
        replays.replay_or_reuse(folder, problem, made, SETTING, CONFIG, clock) == kept and len(clock.ran) == 1
    )
    assert replays.read_all_replays(tmp_path, SETTING) == [kept]
    assert replays.read_all_replays(tmp_path, dataclasses.replace(SETTING, batch=64)) == []
    rows = replay_metrics.judge_replays([kept], MODEL)
    assert [r.algorithm for r in rows] == [algorithm for algorithm, _ in made]
    for r in rows:  # quartiles 1.4 to 1.6 times what was predicted, of four repeats
        assert r.replayed_ms == pytest.approx(1.5 * r.predicted_ms)
        assert r.noise_ms == pytest.approx(1.96 * 1.2533 / 1.349 * 0.2 * r.predicted_ms / 2)
    assert replay_metrics.flat_metrics(rows)["bias"] == pytest.approx(-100 / 3)


@pytest.mark.parametrize(
    "change",
    [lambda body: body.update(measurement_version=2), lambda body: body["replays"][0].pop("slowdown")],
)
def test_replays_that_mean_something_else_or_lack_something_run_again(problem, made, clock, tmp_path, change):
    replays.replay_or_reuse(tmp_path / "kept", problem, made, SETTING, CONFIG, clock)
    path = tmp_path / "kept/replays.json"
    edit(path, change)
    assert not replays.has_valid_replays(tmp_path / "kept", problem, made, SETTING, CONFIG)
    replays.replay_or_reuse(tmp_path / "kept", problem, made, SETTING, CONFIG, clock)
    assert len(clock.ran) == 2 and replays.has_valid_replays(
        tmp_path / "kept", problem, made, SETTING, CONFIG
    )


@pytest.mark.parametrize("slowdown", [0.0, -1.0, 1e4, 1e-4])
def test_a_replay_at_a_slowdown_that_no_machine_has_is_refused(slowdown, problem, made, clock, tmp_path):
    replays.replay_or_reuse(tmp_path / "kept", problem, made, SETTING, CONFIG, clock)
    edit(tmp_path / "kept/replays.json", lambda body: body["replays"][0].update(slowdown=slowdown))
    with pytest.raises(ShardCoreError, match=f"has slowdown {slowdown}; it needs 0.001 to 1,000"):
        replays.read_replays(tmp_path / "kept")


def test_plans_that_were_damaged_are_replayed_again(problem, made, clock, tmp_path):
    folder = tmp_path / problem.name
    kept = replays.replay_or_reuse(folder, problem, made, SETTING, CONFIG, clock)
    damaged = folder / f"{kept.made[0][1]}.json"
    damaged.write_bytes(damaged.read_bytes()[:-20])
    assert not replays.has_valid_replays(folder, problem, made, SETTING, CONFIG)
    assert (
        replays.replay_or_reuse(folder, problem, made, SETTING, CONFIG, clock) == kept and len(clock.ran) == 2
    )


def test_what_was_disturbed_tells_nothing_and_is_replayed_again(problem, made, clock, tmp_path):
    def disturbed(workloads):
        return [dataclasses.replace(cost, slowdown=replays.MOST_SLOWDOWN + 0.1) for cost in clock(workloads)]

    first = replays.add_missing_replays(tmp_path, problem, made[-2:], SETTING, CONFIG, disturbed)
    assert len(first) == 2 and replays.read_step_samples([tmp_path], SETTING) == []
    assert replays.plans_without_replay(tmp_path, [(problem, made[-2:])], SETTING) == [(problem, made[-2:])]
    again = replays.add_missing_replays(
        tmp_path,
        problem,
        made[-2:],
        SETTING,
        CONFIG,
        steady := (lambda workloads: [dataclasses.replace(cost, slowdown=1.2) for cost in clock(workloads)]),
    )
    assert {cost.slowdown for cost in again.values()} == {1.2} and len(
        replays.read_step_samples([tmp_path], SETTING)
    ) == 2
    assert replays.add_missing_replays(
        tmp_path, problem, made[-2:], SETTING, CONFIG, steady
    ) == again and clock.ran == [
        2,
        2,
    ]
    assert len(replays.replay_digests(tmp_path)) == 1


@pytest.mark.parametrize("slowdown, disturbed", [(1.5, False), (1.51, True), (0.67, False), (0.66, True)])
def test_a_replay_is_disturbed_at_a_slowdown_of_half_as_much_again_either_way(
    slowdown, disturbed, problem, made, clock, tmp_path
):
    def at(workloads):
        return [dataclasses.replace(cost, slowdown=slowdown) for cost in clock(workloads)]

    folder = tmp_path / "replays" / "kept"
    replays.replay_or_reuse(folder, problem, made[-1:], SETTING, CONFIG, at)
    assert replays.has_valid_replays(folder, problem, made[-1:], SETTING, CONFIG) != disturbed
    assert bool(replays.plans_without_replay(tmp_path, [(problem, made[-1:])], SETTING)) == disturbed
    assert len(replays.read_step_samples([tmp_path], SETTING)) == (not disturbed)


@pytest.mark.parametrize("hosts, name", [(1, "STEP_VERSION"), (2, "OVER_HOSTS_VERSION")])
def test_replays_whose_timings_meant_something_else_are_none(
    hosts, name, problem, made, clock, tmp_path, monkeypatch
):
    folder = tmp_path / "replays" / "kept"
    devices = (
        dataclasses.replace(d, host=f"host-{i % hosts}") for i, d in enumerate(problem.topology.devices)
    )
    problem = dataclasses.replace(problem, topology=Topology(tuple(devices)))
    monkeypatch.setattr(replays, name, 2)  # steps without ids
    replays.replay_or_reuse(folder, problem, made[-1:], SETTING, CONFIG, clock)
    monkeypatch.undo()
    assert not replays.has_valid_replays(folder, problem, made[-1:], SETTING, CONFIG)
    assert (
        replays.read_all_replays(tmp_path / "replays", SETTING)
        == replays.read_step_samples([tmp_path], SETTING)
        == []
    )


def test_what_is_appended_to_a_dataset_lies_beside_what_it_had_and_is_read_as_steps(
    problem, made, clock, tmp_path
):
    first, more = made[-2:], made[-4:]  # random ones: all differ
    replays.add_missing_replays(tmp_path, problem, first, SETTING, CONFIG, clock)
    before = replays.replay_digests(tmp_path)
    for config in (CONFIG, dataclasses.replace(CONFIG, repeats=9)):
        known = replays.add_missing_replays(tmp_path, problem, more, SETTING, config, clock)
        assert {replays.plan_digest(plan) for _, plan in more} <= set(known)
    assert clock.ran == [2, len({p for _, p in more}) - 2] and set(before) < set(
        replays.replay_digests(tmp_path)
    )
    fresh = dataclasses.replace(
        problem, tables=tuple(dataclasses.replace(t, pooling=2 * t.pooling) for t in problem.tables)
    )
    plans = [
        (
            n,
            Plan(
                tuple(
                    dataclasses.replace(x, shard=dataclasses.replace(x.shard, table=of[x.shard.table.name]))
                    for x in p.placements
                )
            ),
        )
        for of in [{t.name: t for t in fresh.tables}]
        for n, p in first
    ]
    replays.add_missing_replays(tmp_path, fresh, plans, SETTING, CONFIG, clock)
    steps = replays.read_step_samples([tmp_path, tmp_path], SETTING)
    assert len(steps) == len({plan for _, plan in more}) + len(first)
    assert all(
        took.total_ms == pytest.approx(1.5 * price(workload, MODEL).total_ms) for workload, took in steps
    )
    assert replays.read_step_samples([tmp_path / "none"], SETTING) == []
    assert replays.plans_without_replay(tmp_path, [(problem, more), (fresh, plans)], SETTING) == []
    [(of, lacks)] = replays.plans_without_replay(tmp_path, [(problem, made)], SETTING)
    assert of == problem and len(lacks) == len([p for _, p in made if p not in [q for _, q in more]])
    with pytest.raises(
        ShardCoreError, match="holds replays of other settings than asked for: batch: 240 against 64$"
    ):
        replays.read_step_samples([tmp_path], dataclasses.replace(SETTING, batch=64))


def test_replays_of_more_processes_than_cores_are_no_steps(problem, made, clock, tmp_path):
    shared = lambda workloads: [dataclasses.replace(cost, oversubscribed=True) for cost in clock(workloads)]  # noqa: E731
    replays.add_missing_replays(tmp_path, problem, made[:2], SETTING, CONFIG, shared)
    assert replays.read_step_samples([tmp_path], SETTING) == []


def rewrite(path, change):
    path.write_text(change(path.read_text()))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda folder: (folder / "replays.json").unlink(),
        lambda folder: rewrite(folder / "replays.json", lambda text: text[:-20]),
        lambda folder: rewrite(
            folder / "replays.json", lambda text: text.replace('"repeats": 4', '"repeats": 5')
        ),
        lambda folder: next(p for p in folder.glob("*.json") if len(p.stem) == 16).unlink(),
    ],
    ids=["killed before the last file", "cut short", "edited", "a plan lost"],
)
def test_what_was_killed_or_edited_runs_again(spoil, problem, made, clock, tmp_path):
    kept = replays.replay_or_reuse(tmp_path, problem, made, SETTING, CONFIG, clock)
    spoil(tmp_path)
    assert not replays.has_valid_replays(tmp_path, problem, made, SETTING, CONFIG)
    with pytest.raises(ShardCoreError, match="json"):
        replays.read_replays(tmp_path)
    assert (
        replays.replay_or_reuse(tmp_path, problem, made, SETTING, CONFIG, clock) == kept
        and len(clock.ran) == 2
    )


def test_other_plans_repeats_or_problems_run_again_and_leave_nothing_behind(problem, made, clock, tmp_path):
    replays.replay_or_reuse(tmp_path, problem, made, SETTING, CONFIG, clock)
    replays.replay_or_reuse(tmp_path, problem, made[:2], SETTING, CONFIG, clock)
    assert len(list(tmp_path.glob("*.json"))) == 2 + len({plan for _, plan in made[:2]})
    replays.replay_or_reuse(
        tmp_path, problem, made[:2], SETTING, dataclasses.replace(CONFIG, repeats=5), clock
    )
    other = dataclasses.replace(problem, name="other")
    replays.replay_or_reuse(tmp_path, other, made[:2], SETTING, CONFIG, clock)
    assert len(clock.ran) == 4 and replays.read_replays(tmp_path).problem == other


def test_a_version_that_is_not_known_is_named(problem, made, clock, tmp_path):
    replays.replay_or_reuse(tmp_path, problem, made[:1], SETTING, CONFIG, clock)
    path = tmp_path / "replays.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 4}))
    with pytest.raises(
        ShardCoreError,
        match="has version 4 of shardcore.replays; this ShardCore reads 3; remove .* to replay its plans again",
    ):
        replays.read_replays(tmp_path)


def test_a_replay_that_fails_keeps_nothing_and_leaves_what_there_was(problem, made, clock, tmp_path):
    def failing(workloads):
        raise ShardCoreError("replay: rank 0 of 2 failed")

    for _ in range(2):
        before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
        with pytest.raises(ShardCoreError, match="rank 0 of 2"):
            replays.replay_or_reuse(tmp_path, problem, made[:1], SETTING, CONFIG, failing)
        assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before
        replays.replay_or_reuse(tmp_path, problem, made[1:2], SETTING, CONFIG, clock)


def test_nothing_is_kept_through_a_link_and_what_is_removed_is_named(problem, made, clock, tmp_path):
    folder = tmp_path / "kept"
    replays.replay_or_reuse(folder, problem, made, SETTING, CONFIG, clock)
    (tmp_path / "link").symlink_to(folder)
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(ShardCoreError, match="is a symbolic link"):
        replays.replay_or_reuse(tmp_path / "link", problem, made, SETTING, CONFIG, clock)
    replays.remove_replays(tmp_path / "link")
    assert replays.read_replays(folder).problem == problem
    replays.remove_replays(folder)
    assert [p.name for p in folder.iterdir()] == ["notes.txt"]


def test_what_somebody_else_put_there_stays(problem, made, clock, tmp_path):
    """Only a plan's file is one of ours, whatever a name looks like."""
    theirs = tmp_path / "ffffffffffffffff.json"
    theirs.write_text('{"schema": "somebody/else"}')
    (tmp_path / "eeeeeeeeeeeeeeee.json").mkdir()
    replays.replay_or_reuse(tmp_path, problem, made, SETTING, CONFIG, clock)
    replays.replay_or_reuse(tmp_path, problem, made[:1], SETTING, CONFIG, clock)
    assert theirs.exists() and replays.read_replays(tmp_path).plans == {
        replays.plan_digest(made[0][1]): made[0][1]
    }
    replays.remove_replays(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["eeeeeeeeeeeeeeee.json", theirs.name]


def test_a_linked_folder_of_replays_is_not_written_to(problem, made, clock, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "data").mkdir()
    (tmp_path / "data/replays").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ShardCoreError, match="data/replays is a symbolic link"):
        replays.add_missing_replays(tmp_path / "data", problem, made, SETTING, CONFIG, clock)
    assert not clock.ran and not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize("in_the_way", ["p", "p/problem.json/x", "p/replays.json/x"])
def test_what_is_in_the_way_is_named_before_anything_runs(problem, made, clock, tmp_path, in_the_way):
    path = tmp_path / in_the_way
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("")
    with pytest.raises(ShardCoreError, match="p(/(problem|replays).json)? is (no|a) folder.*remove it"):
        replays.replay_or_reuse(tmp_path / "p", problem, made, SETTING, CONFIG, clock)
    assert not clock.ran


def test_damaged_replays_of_one_problem_are_only_its_own(problem, made, clock, tmp_path):
    """Replays of other problems still count, and the problem's own run again. Training reads all, and names the
    damaged one."""
    other = dataclasses.replace(problem, name="other")
    for one in (problem, other):
        replays.add_missing_replays(tmp_path, one, made, SETTING, CONFIG, clock)
    [damaged] = (tmp_path / "replays").glob("replayed-*")
    (damaged / "replays.json").write_text("{")
    assert replays.plans_without_replay(tmp_path, [(problem, made), (other, made)], SETTING) == [
        (problem, made)
    ]
    with pytest.raises(ShardCoreError, match=damaged.name):
        replays.read_step_samples([tmp_path], SETTING)
    replays.add_missing_replays(tmp_path, other, made, SETTING, CONFIG, clock)
    assert len(clock.ran) == 2
    replays.add_missing_replays(tmp_path, problem, made, SETTING, CONFIG, clock)
    assert len(clock.ran) == 3 and len(replays.read_step_samples([tmp_path], SETTING)) == 2 * len(
        {p for _, p in made}
    )


@pytest.mark.parametrize(
    "spoil, message",
    [
        (lambda body: body["replays"][0].update(total_ms=1e9), "has total_ms 1000000000.0; its parts sum to"),
        (
            lambda body: body["replays"].append({**body["replays"][0], "slowdown": 1.1}),
            "two replays of different times",
        ),
        (lambda body: body.update(version=True), "this ShardCore reads 3"),
        (lambda body: body.update(version=3.0), "this ShardCore reads 3"),
    ],
)
def test_replays_that_contradict_themselves_are_refused(problem, made, clock, tmp_path, spoil, message):
    replays.replay_or_reuse(tmp_path, problem, made[:1], SETTING, CONFIG, clock)
    edit(tmp_path / "replays.json", spoil)
    with pytest.raises(ShardCoreError, match=message):
        replays.read_replays(tmp_path)


def test_a_folder_that_cannot_be_read_is_not_taken_for_an_empty_one(problem, made, clock, tmp_path):
    replays.add_missing_replays(tmp_path, problem, made, SETTING, CONFIG, clock)
    (tmp_path / "replays/loop").symlink_to("loop")
    for read in (replays.replay_digests, lambda folder: replays.read_step_samples([folder], SETTING)):
        with pytest.raises(ShardCoreError, match="cannot read .*loop: Too many levels of symbolic links"):
            read(tmp_path)
