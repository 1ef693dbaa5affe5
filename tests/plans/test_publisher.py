"""Decisions of publishing on a published plan, under the models and problems of now."""

import json
import shutil
import sys
import uuid
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from laws import SETTING, trained
from stored_pages import stored_page

from shardcore.core.access_statistics import Zipf
from shardcore.core.errors import Infeasible, ShardCoreError
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Placement, Plan, Problem, Shard, Table
from shardcore.cost.model import price, price_plan
from shardcore.io import files
from shardcore.plans import publisher, store
from shardcore.plans.diff import diff_plans
from shardcore.plans.publisher import PublishConfig, Publisher
from shardcore.report import plan_page
from shardcore.report.published_report import published_plan_row
from shardcore.search import BASELINES, SHARDERS, Budget, compare
from shardcore.step import lower as workload
from shardcore.step.lower import lower
from shardcore.torchrec import baseline

pytestmark = pytest.mark.usefixtures("short_explanations")
CONFIG = PublishConfig("anneal_columns", budget_evals=300, torchrec_s=0)


@pytest.fixture(scope="module")
def model():
    return trained()


@pytest.fixture
def problem():
    return drawn()


def drawn() -> Problem:
    rng = np.random.default_rng(0)
    tables = tuple(
        Table(f"t{i}", int(rng.integers(100, 4000)), 16, float(rng.uniform(1, 10)), Zipf(1.0))
        for i in range(8)
    )
    return Problem("published", tables, Topology((Device(8 << 20),) * 4), SETTING.batch)


def publish(root, problem, model, version=1, config=CONFIG, data="d1"):
    provenance = {
        "model": "shardcore-cost-law",
        "model_version": str(version),
        "data": data,
        "setting": str(model.setting),
        "algorithm": config.algorithm,
        "seed": config.seed,
        "git_commit": "c1",
    }
    return Publisher(model, root, config, provenance, plan_page.published_version_page).publish(problem)


@pytest.fixture(scope="module")
def first_plan(model, tmp_path_factory):
    """A store with the first plan of the problem."""
    root = tmp_path_factory.mktemp("first")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(publisher, "_EXPLAIN", Budget(evals=10))
        patch.setattr("shardcore.search.explain.MORE_MEMORY", ())
        publish(root, drawn(), model)
    return root


@pytest.fixture
def first(first_plan, tmp_path):
    """The decision for it, in a copy of that store at `tmp_path`."""
    shutil.copytree(first_plan, tmp_path, dirs_exist_ok=True)
    return store.last_decision(tmp_path, "published")


def slow(model):
    """Another model: lookups are what costs, so that other plans are good."""
    rates = model.weights["rates"].copy()
    rates[1:] *= np.linspace(0.2, 6, len(rates) - 1)[:, None]
    return replace(model, weights={**model.weights, "rates": rates})


def worse(problem):
    return Plan(
        tuple(Placement("column", Shard.whole(t), (0,)) for t in problem.tables), {"algorithm": "by hand"}
    )


def put(root, problem, plan, version=1):
    """A plan made elsewhere becomes current."""
    last = store.last_decision(root, problem.name)
    added = store.add_version(root, problem, plan, {"baselines": {}})
    store.record_decision(
        root,
        store.Decision(
            problem.name,
            "first",
            "put",
            added,
            added,
            files.problem_digest(problem),
            parent=last and last.id,
            provenance={"model": "shardcore-cost-law", "model_version": str(version), "data": "d1"},
        ),
    )


def test_a_first_plan_names_what_it_comes_from_and_has_a_page(problem, model, tmp_path):
    published = publish(tmp_path, problem, model)
    plan, its_problem = store.load_plan(tmp_path, "published")
    assert published.decision.outcome == "first" and its_problem == problem
    assert dict(plan.provenance) | dict(published.decision.provenance) == plan.provenance
    assert (
        plan.provenance["model_version"] == "1" and plan.provenance["predicted_ms"] == published.cost.total_ms
    )
    page = stored_page(tmp_path, "published", published.decision.current).decode()
    assert "<svg" in page and "no plan was published" in page and f"{published.cost.total_ms:.2f} ms" in page
    cost = json.loads(
        (tmp_path / "published/versions" / published.decision.current / "cost.json").read_bytes()
    )
    assert cost["total_ms"] == published.cost.total_ms == price(lower(plan, problem), model).total_ms
    assert (
        set(cost["baselines"]) == {*BASELINES, "neuroshard"}
        and published_plan_row(published)[0] == "published"
    )
    best = min(cost["baselines"], key=cost["baselines"].get)
    assert published_plan_row(published)[4] == f"{cost['baselines'][best]:.2f} {best}"


@pytest.mark.skipif(bool(baseline.missing_torchrec_message()), reason="TorchRec is not installed")
def test_torchrecs_planner_is_compared_with_where_problems_are_small(problem, model, tmp_path):
    asked, few = replace(CONFIG, torchrec_s=5.0), replace(problem, tables=problem.tables[:3])
    ms = publish(tmp_path, few, model, config=asked).baselines["torchrec"]
    assert ms == SHARDERS["torchrec"](few, model).provenance["predicted_ms"]
    many = replace(problem, topology=Topology((Device(8 << 20),) * 1024), global_batch=1024)
    others = Publisher(model, tmp_path, asked, {}, plan_page.published_version_page)._baseline_outcomes(many)
    assert "torchrec" not in others and "neuroshard" in others


def test_a_baseline_that_cannot_plan_stops_nothing(problem, model, tmp_path, monkeypatch):
    def refuses(*args, **given):
        raise ShardCoreError("not such tables")

    monkeypatch.setitem(SHARDERS, "neuroshard", refuses)
    assert publish(tmp_path, problem, model).baselines["neuroshard"] == "not such tables"


@pytest.mark.parametrize("file", ["plan.json", "problem.json"])
def test_a_damaged_plan_is_replaced_and_the_decision_says_why(problem, model, tmp_path, first, file):
    """Also where the search finds the same plan again: its version is written anew."""
    damaged = tmp_path / problem.name / "versions" / first.current / file
    damaged.write_text(damaged.read_text().replace("t3", "t4", 1))
    with pytest.raises(ShardCoreError):
        store.load_plan(tmp_path, problem.name)
    again = publish(tmp_path, problem, model).decision
    assert (
        again.outcome == "no longer fits" and "of the plan before: " in again.reason and file in again.reason
    )
    assert len(store.load_plan(tmp_path, problem.name)[0].placements) >= len(problem.tables)
    assert publish(tmp_path, problem, model).decision.outcome == "kept"


def test_a_store_that_does_not_answer_keeps_its_plan(problem, model, tmp_path, first):
    plan = tmp_path / problem.name / "versions" / first.current / "plan.json"
    content = plan.read_bytes()
    plan.unlink()
    plan.symlink_to(plan)  # reading it fails, and says nothing of its content
    with pytest.raises(ShardCoreError, match="cannot read .*plan.json: Too many levels"):
        publish(tmp_path, problem, model)
    plan.unlink()
    plan.write_bytes(content)
    assert store.last_decision(tmp_path, problem.name) == first


def test_a_better_plan_takes_the_place_and_a_plan_that_is_hardly_better_does_not(problem, model, tmp_path):
    put(tmp_path, problem, worse(problem))
    better = publish(tmp_path, problem, model).decision
    gained = better.previous_ms - better.candidate_ms
    assert better.outcome == "better" and better.current == better.candidate
    assert 0 < better.margin_ms < gained
    share, margin = (100 * ms / better.previous_ms for ms in (gained, better.margin_ms))
    assert (
        f"gain {share:.1f}% ± {margin:.1f}% at 90% confidence: replaced" in better.reason
        and "to move" in better.reason
    )
    page = stored_page(tmp_path, "published", better.current).decode()
    assert f"gain {share:.1f}% ± {margin:.1f}%" in page
    kept = publish(tmp_path, problem, model).decision
    assert kept.outcome == "kept" and kept.current == better.current
    before = store.last_decision(tmp_path, "published")
    assert (
        publish(tmp_path, problem, model).decision.is_repeat_of(kept)
        and store.last_decision(tmp_path, "published") == before
    )
    put(tmp_path, problem, worse(problem))
    stubborn = publish(tmp_path, problem, model, config=replace(CONFIG, threshold=0.9)).decision
    assert "(at least 90.0% asked): kept" in stubborn.reason
    assert stubborn.outcome == "kept" and stubborn.candidate_ms < stubborn.previous_ms == stubborn.total_ms
    assert store.load_plan(tmp_path, "published")[0] == worse(problem)
    assert store.load_plan(tmp_path, "published", stubborn.candidate)[0] != worse(problem)


def test_a_gain_within_the_models_error_replaces_nothing(problem, model, tmp_path):
    """The same two plans: the model that errs more is not believed."""
    put(tmp_path / "sure", problem, worse(problem))
    put(tmp_path / "unsure", problem, worse(problem))
    unsure = replace(
        model,
        meta={
            **model.meta,
            "metrics": {"compute_mape": 150.0, "forward_comm_mape": 150.0, "backward_comm_mape": 150.0},
        },
    )
    taken, left = (
        publish(tmp_path / name, problem, m).decision for name, m in (("sure", model), ("unsure", unsure))
    )
    assert taken.candidate_ms == left.candidate_ms and taken.previous_ms == left.previous_ms
    assert taken.outcome == "better" and left.outcome == "kept" and left.margin_ms > taken.margin_ms
    assert left.margin_ms > left.previous_ms - left.candidate_ms > 0 and "confidence: kept" in left.reason


def test_a_plan_that_no_longer_fits_is_replaced_however_cheap(problem, model, tmp_path, first):
    grown = replace(
        problem,
        tables=(replace(problem.tables[0], rows=9_000), *problem.tables[1:], Table("new", 900, 16, 2.0)),
    )
    decision = publish(tmp_path, grown, model).decision
    assert decision.outcome == "no longer fits" and decision.previous_ms is None
    assert "'new'" in decision.reason
    tight = replace(grown, topology=Topology((Device(100_000),) + (Device(4 << 20),) * 3))
    decision = publish(tmp_path, tight, model).decision
    assert decision.outcome == "no longer fits" and "device 0" in decision.reason
    with pytest.raises(Infeasible):
        publish(tmp_path, replace(grown, topology=Topology((Device(9_000),) * 4)), model)
    assert store.last_decision(tmp_path, "published") == decision


def test_a_new_table_finds_room_beside_the_others(problem, model, tmp_path, first):
    old, _ = store.load_plan(tmp_path, "published")
    more = replace(problem, tables=(*problem.tables, Table("new", 900, 16, 2.0)))
    decision = publish(tmp_path, more, model, config=replace(CONFIG, max_moved_tables=0)).decision
    found = diff_plans(old, store.load_plan(tmp_path, "published")[0])
    assert decision.outcome == "no longer fits" and found.added == ("new",) and not found.moves


def test_an_object_store_gets_what_a_folder_gets(problem, model, tmp_path):
    where = f"memory://{uuid.uuid4()}"
    for version in (1, 2, 1):
        there, here = (
            publish(where, problem, model, version).decision,
            publish(tmp_path, problem, model, version).decision,
        )
        assert (there.outcome, there.current, there.candidate_ms) == (
            here.outcome,
            here.current,
            here.candidate_ms,
        )
    assert here.outcome == "restored" and store.load_plan(where, "published") == store.load_plan(
        tmp_path, "published"
    )


def test_a_plan_kept_under_fresh_statistics_is_published_anew_for_them_and_nothing_moves(
    problem, model, tmp_path, first
):
    plan, _ = store.load_plan(tmp_path, "published")
    livelier = replace(problem, tables=tuple(replace(t, pooling=1.01 * t.pooling) for t in problem.tables))
    kept = publish(tmp_path, livelier, model).decision
    assert kept.outcome == "kept" and kept.current != first.current and kept.previous_ms > first.candidate_ms
    now, its_problem = store.load_plan(tmp_path, "published")
    assert its_problem == livelier and not diff_plans(plan, now) and now.provenance == plan.provenance
    busier = replace(problem, tables=tuple(replace(t, pooling=1.02 * t.pooling) for t in problem.tables))
    again = publish(tmp_path, busier, model, config=replace(CONFIG, algorithm="random")).decision
    assert again.outcome == "kept" and again.candidate != again.current != kept.current
    for version, taken in ((again.current, True), (again.candidate, False)):
        page = stored_page(tmp_path, "published", version).decode()
        assert f"version {version}" in page and ("(considered, not taken)" in page) is not taken
    skewed = replace(
        problem,
        tables=tuple(
            replace(t, pooling=t.pooling * (9 if p.devices == (0,) else 1))
            for t, p in ((t, next(p for p in plan.placements if p.shard.table == t)) for t in problem.tables)
        ),
    )
    drifted = publish(tmp_path, skewed, model, config=replace(CONFIG, max_moved_tables=2)).decision
    assert drifted.outcome == "better" and drifted.candidate_ms < drifted.previous_ms
    assert 1 <= len(diff_plans(now, store.load_plan(tmp_path, "published")[0]).moves) <= 2


def test_a_plan_that_a_job_rolled_back_is_not_published_again(problem, model, tmp_path, first):
    skewed = replace(
        problem,
        tables=tuple(
            replace(t, pooling=t.pooling * (9 if i < 2 else 1)) for i, t in enumerate(problem.tables)
        ),
    )
    better = publish(tmp_path, skewed, model).decision
    assert better.outcome == "better"
    with pytest.raises(ShardCoreError, match="has another version than"):
        store.roll_back_version(tmp_path, "published", first.current, "of a test")
    back = store.roll_back_version(tmp_path, "published", better.current, "12 ms a step in the job")
    assert back.outcome == "rolled back" and back.current == first.current == store.current_version(
        tmp_path, "published"
    )
    again = publish(tmp_path, skewed, model).decision
    assert again.outcome == "kept" and again.candidate == better.current
    assert "was rolled back: 12 ms a step in the job" in again.reason


def test_setting_the_champion_back_restores_its_plan(problem, model, tmp_path, first):
    put(tmp_path, problem, worse(problem), 2)
    back = publish(tmp_path, problem, model, 1)
    assert back.decision.outcome == "restored" and back.decision.current == first.current
    assert published_plan_row(back)[4:] == published_plan_row(publish(tmp_path / "other", problem, model, 1))[
        4:9
    ] + ("restored",)
    assert (
        store.load_plan(tmp_path, "published")[0] == store.load_plan(tmp_path, "published", first.current)[0]
    )
    put(tmp_path, problem, worse(problem), 2)
    elsewhere = publish(tmp_path, problem, model, 1, data="d2")  # version 1 of another registry
    assert elsewhere.decision.outcome != "restored"
    livelier = replace(problem, tables=tuple(replace(t, pooling=2 * t.pooling) for t in problem.tables))
    assert publish(tmp_path, livelier, model, 2).decision.outcome != "restored"  # another problem than then
    third = publish(tmp_path, livelier, slow(model), 3).decision
    assert third.outcome in ("better", "kept") and third.previous_ms != back.decision.total_ms


def test_old_versions_go_and_the_page_tells_the_history(problem, model, tmp_path):
    few = replace(CONFIG, keep_versions=2)
    for version in (1, 2):
        put(tmp_path, problem, Plan(worse(problem).placements, {"algorithm": f"by hand {version}"}), version)
    newest = publish(tmp_path, problem, model, 3, few).decision
    assert len(list((tmp_path / "published/versions").iterdir())) == 2
    page = stored_page(tmp_path, "published", newest.current).decode()
    assert page.count(">put<") == 2 and "version 3" in page and "to move" in page


def test_any_algorithm_can_publish(problem, model, tmp_path):
    for algorithm in ("size_greedy", "neuroshard"):
        published = publish(
            tmp_path / algorithm,
            problem,
            model,
            config=replace(CONFIG, algorithm=algorithm, budget_evals=300),
        )
        assert algorithm not in published.baselines
        found = SHARDERS[algorithm](problem, model, budget=Budget(evals=300))
        assert store.load_plan(tmp_path / algorithm, "published")[0] == found


def test_bad_settings_are_named():
    for fields, named in (
        ({"threshold": 1.5}, "threshold 1.5"),
        ({"keep_versions": 1}, "keep_versions 1"),
        ({"algorithm": "magic"}, "'magic'"),
        ({"algorithm": "milp", "max_moved_tables": 3}, "'milp'"),
    ):
        with pytest.raises(ShardCoreError, match=named):
            PublishConfig(**fields)


@pytest.mark.parametrize("plans", ["", "a\0b"])
def test_plans_need_a_folder(plans):
    with pytest.raises(ShardCoreError, match="publish config has plans"):
        PublishConfig(plans=plans)


@pytest.mark.parametrize("algorithm", ["size_greedy", "anneal"])
def test_a_plan_is_lowered_and_priced_once_on_its_way_to_the_store(
    problem, model, tmp_path, monkeypatch, algorithm
):
    """Beside what searches and moves on the page lower: each run's plan, the one before, and a new one."""
    counts = Counter()
    others = ("shardcore.search.state.shards", "shardcore.search.memory_balance", "shardcore.plans.what_if")

    def counted(name, original):
        def call(*args, **kwargs):
            counts[name] += sys._getframe(1).f_globals["__name__"] not in others
            return original(*args, **kwargs)

        return call

    for name, original in (("lower", workload.lower), ("price", price), ("run_sharder", compare.run_sharder)):
        wrapped = counted(name, original)
        for module in [m for m in sys.modules.values() if getattr(m, "__name__", "").startswith("shardcore")]:
            if module.__dict__.get(name) is original:
                monkeypatch.setattr(module, name, wrapped)
    config = replace(CONFIG, algorithm=algorithm, budget_evals=300)
    for outcome in ("first", "kept", "better"):
        if outcome == "better":
            put(tmp_path, problem, worse(problem))
        before = store.last_decision(tmp_path, "published")
        counts.clear()
        found = publish(tmp_path, problem, model, config=config).decision
        assert found.outcome == outcome and counts["run_sharder"] >= len(BASELINES)
        more = 0 if before is None else 1 + (found.candidate != before.current)
        assert counts["lower"] == counts["price"] == counts["run_sharder"] + more


def test_a_cheaper_baseline_is_published_in_place_of_the_plan_that_the_search_finds(
    problem, model, tmp_path, monkeypatch
):
    run = compare.run_sharder

    def run_badly(name, *args, **kwargs):
        outcome = run(name, *args, **kwargs)
        bad = price_plan(worse(problem), problem, model)
        return replace(outcome, priced=bad) if name == CONFIG.algorithm else outcome

    monkeypatch.setattr(compare, "run_sharder", run_badly)
    published = publish(tmp_path, problem, model)
    costs = {name: ms for name, ms in published.baselines.items() if isinstance(ms, float)}
    best = min(costs, key=lambda name: costs[name])
    assert published.decision.outcome == "first" and published.cost.total_ms == costs[best]
    assert store.load_plan(tmp_path, "published")[0].provenance["algorithm"] == best
    monkeypatch.undo()
    again = publish(tmp_path, problem, model)
    assert again.cost.total_ms <= costs[best] and published_plan_row(again)[5] == "+0.0%"
    # A baseline that is asked for by name is published as it is.
    asked = publish(tmp_path / "asked", problem, model, config=replace(CONFIG, algorithm="random"))
    assert asked.cost.total_ms > costs[best]
