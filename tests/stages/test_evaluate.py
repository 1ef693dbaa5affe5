"""Evaluating a model: its problems, what is written, and the reason where no plan can be replayed."""

import contextlib
import csv
import json
import logging

import pytest
from laws import SETTING, pool, replayed_as_priced, trained

from shardcore.core.errors import ShardCoreError
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Problem, Setting, Table
from shardcore.cost.analytic import AnalyticModel
from shardcore.io import replays
from shardcore.measure.replay import ReplayConfig
from shardcore.measure.transport import Host, Transport
from shardcore.search.budget import Budget
from shardcore.stages import evaluate
from shardcore.stages.evaluate import COMPARED, CandidateModel, EvaluateConfig


class Told(logging.LoggerAdapter):
    """A stage's progress as a log."""

    def __init__(self):
        super().__init__(logging.getLogger("evaluate"))

    def show(self, tally):
        pass


class Cores(Transport):
    """One host, whose devices have a name."""

    def __init__(self, name, count):
        super().__init__()
        self.name, self.count = name, count

    def hardware(self):
        return self.name

    def hosts(self):
        return [Host(self.count)]


@pytest.fixture(scope="module")
def model():
    return trained()


def candidate(model, folder, config, tables=None):
    return CandidateModel(model, tables or pool(), folder, config, Told())


@pytest.mark.parametrize(
    "on, problems, message",
    [
        (Cores("other", 2), 2, "the model is for law, the devices are other"),
        (Cores(SETTING.hardware, 1), 2, "no host has two devices"),
        (None, 0, "evaluate.replay_problems is 0"),
    ],
    ids=["other hardware", "one core a host", "switched off"],
)
def test_what_cannot_be_replayed_is_skipped_with_a_line_and_absent(
    on, problems, message, model, tmp_path, caplog
):
    out = tmp_path / "replays"
    out.mkdir()
    (out / "replays.csv").write_text("of another model")
    config = EvaluateConfig(replay_problems=problems)
    with caplog.at_level(logging.INFO, "evaluate"):
        found = evaluate.replay_plans(
            candidate(model, tmp_path, config), out, lambda: contextlib.nullcontext(on)
        )
    assert found == {} and not list(out.iterdir())
    assert f"no plans are replayed: {message}" in caplog.text


def test_dvc_shows_a_few_figures_and_a_file_has_all(tmp_path, monkeypatch):
    accuracy = {"compute_mape": 12.345678, "forward_comm_mape": 3.0, **{f"other_{i}": 1.0 for i in range(50)}}
    sharders = {f"{name}_{of}": 1.0 for name in COMPARED for of in ("solved", "relative_cost", "seconds")}
    replayed = {"mape": 7.0, "noise": 2.0, **{f"other_{i}": 1.0 for i in range(50)}}
    monkeypatch.setattr(evaluate, "judge_model", lambda *_: accuracy)
    monkeypatch.setattr(evaluate, "compare_sharders", lambda *_: sharders)
    monkeypatch.setattr(evaluate, "replay_plans", lambda *_: replayed)
    found = evaluate.evaluate(None, tmp_path, None)
    shown, kept = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("metrics", "figures"))
    assert found == kept == {"accuracy": accuracy, "sharders": sharders, "replays": replayed}
    assert shown["accuracy"] == {"compute_mape": 12.35, "forward_comm_mape": 3.0}
    assert shown["replays"] == {"mape": 7.0, "noise": 2.0} and len(shown["sharders"]) == 3
    monkeypatch.setattr(evaluate, "replay_plans", lambda *_: {})
    assert list(evaluate.evaluate(None, tmp_path, None)) == ["accuracy", "sharders"]


SMALL = EvaluateConfig(
    replay_problems=3, min_tables=3, max_tables=5, budget_evals=50, max_dim=32, replay_repeats=2
)


def test_tables_that_no_rank_holds_are_left_out_and_problems_without_others_too(model):
    huge = [Table(f"huge {i}", evaluate.ARENA_BYTES // 4, 64, 1.0) for i in range(24)]
    drawn = evaluate._draw_replay_problems(candidate(model, None, SMALL), 2)
    assert len(drawn) == 3 and all(3 <= len(p.tables) <= 5 and len(p.topology) == 2 for p in drawn)
    mixed = evaluate._draw_replay_problems(candidate(model, None, SMALL, [*pool()[:12], *huge[:12]]), 2)
    assert mixed and all(t.bytes <= evaluate.ARENA_BYTES for p in mixed for t in p.tables)
    assert sum(len(p.tables) for p in mixed) < sum(len(p.tables) for p in drawn)
    assert evaluate._draw_replay_problems(candidate(model, None, SMALL, huge), 2) == []


def test_what_was_replayed_is_not_run_again_and_what_else_is_there_goes(model, tmp_path):
    problems = evaluate._draw_replay_problems(candidate(model, None, SMALL), 2)[:1]
    steps = ReplayConfig(repeats=2, arena_bytes=evaluate.ARENA_BYTES)

    run = replayed_as_priced(model)
    for problem in problems:
        made = [
            (o.algorithm, o.plan)
            for o in evaluate.plans_to_replay(problem, model, SMALL.seed, Budget(evals=SMALL.budget_evals))
        ]
        replays.replay_or_reuse(tmp_path / problem.name, problem, made, model.setting, steps, run)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*.json")}
    (tmp_path / "of-before").mkdir()
    (tmp_path / "replays.csv").write_text("of before")
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("somebody's")
    before[tmp_path / "thesis" / "chapter.txt"] = b"somebody's"
    kept = evaluate._replay_problems(candidate(model, tmp_path, SMALL), problems, tmp_path, Transport())
    assert [k.problem for k in kept] == problems and {
        p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()
    } == before
    assert not (tmp_path / "of-before").exists()


def test_each_problem_is_searched_by_each_compared_sharder(model, tmp_path):
    config = EvaluateConfig(problems=2, min_tables=2, max_tables=3, budget_evals=10)
    evaluate.compare_sharders(candidate(model, tmp_path, config), tmp_path)
    rows = list(csv.DictReader((tmp_path / "sharders.csv").read_text().splitlines()))
    wanted = [(f"pool-1-0{i}", name) for i in range(2) for name in COMPARED]
    assert [(r["problem"], r["algorithm"]) for r in rows] == wanted


@pytest.mark.parametrize("values", [{"replay_problems": -1}, {"replay_repeats": 0}, {"problems": 10**10}])
def test_bad_values_are_refused(values):
    [(name, value)] = values.items()
    with pytest.raises(
        ShardCoreError, match=f"evaluate config has {name} {value}; it needs [01] to 1,000,000"
    ):
        EvaluateConfig(**values)


def test_plans_worth_a_replay_are_the_same_for_a_seed_and_of_every_kind(tables):
    problem = Problem("p", tables, Topology((Device(1 << 26),) * 2), 240)
    model = AnalyticModel(Setting("test", 240))
    outcomes, again = (
        evaluate.plans_to_replay(problem, model, 3, Budget(evals=200), random=2) for _ in range(2)
    )
    assert [o.plan for o in outcomes] == [o.plan for o in again]
    names = [o.algorithm for o in outcomes]
    assert set(evaluate.WORTH_REPLAYING) < set(names)
    assert names.count("random") == 2 and names[0] == "portfolio"
