"""Provenance of published plans."""

import os
import shutil
import signal
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from laws import SETTING, comm_samples, compute_samples, linear_law, pool
from mlflow.entities.model_registry import ModelVersion
from prefect.logging import disable_run_logger
from stored_pages import stored_page
from tracking import no_pages, tracked

from shardcore import load_model
from shardcore.core.errors import SettingMismatch, ShardCoreError
from shardcore.core.tiers import Memory
from shardcore.core.topology import Device, Topology
from shardcore.core.types import Problem
from shardcore.cost import fit, neural
from shardcore.cost.model import price
from shardcore.cost.profile import load_profile
from shardcore.io import dataset, files
from shardcore.plans import store
from shardcore.plans.publisher import PublishConfig
from shardcore.report import plan_page
from shardcore.search import DEFAULT_SHARDER
from shardcore.step.lower import lower
from tasks import owned, publish_claim
from tasks.pricing import Pricing
from tasks.promote import PromoteConfig, promote_model
from tasks.publish import _plan_provenance, publish_first_plan, publish_plans
from tasks.registry import connect_to_mlflow, registered_model_name
from tasks.setting import SettingConfig

pytestmark = pytest.mark.usefixtures("short_explanations")


def by(model):
    return Pricing(model, "shardcore-cost-law", "3", ModelVersion("shardcore-cost-law", "3", 0))


@pytest.mark.parametrize("limit", [None, 3])
def test_a_plan_names_its_model_the_data_and_the_search(limit):
    model = SimpleNamespace(
        setting=SETTING,
        meta={
            "provenance": {
                "data_version": "d1",
                "git_commit": "c1",
                "seed": 5,
                "data": "0123456789abcdef",
                "lent": {"datasets/x": {"digest": "digest", "hardware": "other"}},
            }
        },
    )
    found = _plan_provenance(by(model), PublishConfig(budget_evals=2_000, max_moved_tables=limit))
    assert len(found.pop("git_commit")) >= 40
    assert found == {
        "model": "shardcore-cost-law",
        "model_version": "3",
        "setting": str(SETTING),
        "data_version": "d1",
        "data": "0123456789abcdef",
        "model_git_commit": "c1",
        "model_seed": 5,
        "datasets": {"datasets/x": "digest"},
        "algorithm": DEFAULT_SHARDER,
        "budget_evals": 2_000,
        "seed": 0,
        **({} if limit is None else {"max_moved_tables": limit}),
    }


def test_a_model_without_provenance_says_so():
    found = _plan_provenance(by(SimpleNamespace(setting=SETTING, meta={"provenance": {}})), PublishConfig())
    assert (
        found["data_version"] == "unversioned"
        and found["model_git_commit"] == "no git"
        and "datasets" not in found
    )


@pytest.fixture
def registry(tmp_path):
    """A folder with an empty registry."""
    with tracked(tmp_path), disable_run_logger(), no_pages():  # a run can do without pages
        yield tmp_path


@cache
def trained(setting):
    """Measured groups, exchanges, and a model of them."""
    known = compute_samples(linear_law, 60, setting), comm_samples(20, setting=setting)
    return *known, fit.train(*known, setting, fit.FitConfig(epochs=1)).model


def measured_and_trained(setting):
    """A model of 60 measured groups in the folder "measured"."""
    compute, comm, model = trained(setting)
    dataset.write_compute_samples("measured", compute, dataset.write_pool("measured", pool()))
    dataset.write_collective_samples("measured", comm)
    return model


@pytest.fixture
def mixed_champion(registry):
    """A folder whose registry has a champion for FP16 and FP32: the former is slower in all."""
    full = measured_and_trained(SETTING)
    weights = {**full.weights, "launch": 3 * full.weights["launch"], "rates": 3 * full.weights["rates"]}
    half = replace(full, weights=weights, setting=replace(SETTING, precision="fp16"))
    for model, data in ((full, "of fp32"), (half, "of fp16")):
        neural.save(replace(model, meta={**model.meta, "provenance": {"data": data}}), registry / data)
    promoted = promote_model.fn(
        registry / "of fp32", Path("measured"), PromoteConfig(also=(str(registry / "of fp16"),))
    )
    assert promoted.champion == "1"
    return registry


def of_precisions(name, *precisions):
    tables = tuple(replace(t, precision=precisions[i % len(precisions)]) for i, t in enumerate(pool()[:4]))
    return Problem(name, tables, Topology((Device(1 << 30),) * 2), SETTING.batch)


def publish(*problems, hardware=SETTING.hardware, algorithm="anneal", processes=1):
    for one in problems:
        files.write_problem(f"{one.name}.json", one)
    return publish_plans.fn(
        [Path(f"{p.name}.json") for p in problems],
        "plans",
        SettingConfig(hardware, SETTING.batch),
        PublishConfig(algorithm, budget_evals=300, torchrec_s=0, processes=processes),
        everything=True,
    )


@pytest.mark.long
def test_problems_are_published_side_by_side_with_the_plans_of_one_after_another(mixed_champion, monkeypatch):
    """One of them fits nowhere. Of an owned run, as `flows.publish` is one, the guardian ends the processes."""
    one, other, full = (of_precisions(name, "fp32") for name in ("one", "other", "full"))
    other = replace(other, tables=other.tables[:2])
    full = replace(full, topology=Topology((Device(1),) * 2))
    plans = []
    for processes, run in ((1, None), (2, None), (2, str(mixed_champion))):
        if run:
            monkeypatch.setenv(owned.RUN, run)
        with pytest.raises(
            ShardCoreError, match="1 of 3 problems have no new plan: full.json: .*does not fit"
        ):
            publish(one, full, other, processes=processes)
        plans.append({name: store.read_plan("plans", name)[0] for name in ("one", "other")})
        assert store.published_problem_names("plans") == ["one", "other"]
        shutil.rmtree("plans")
    assert plans[0] == plans[1] == plans[2]


def killed(*_):
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.long
def test_a_killed_process_is_named_with_what_to_do(mixed_champion, monkeypatch):
    monkeypatch.setattr(plan_page, "published_version_page", killed)
    problems = [of_precisions(name, "fp32") for name in ("one", "other")]
    with pytest.raises(
        ShardCoreError,
        match="2 of 2 problems .* one.json: a process .* was killed.*; lower publish.processes",
    ):
        publish(*problems, processes=2)
    assert store.published_problem_names("plans") == []


def test_problems_of_one_precision_and_of_several_are_published_under_one_champion(mixed_champion):
    cached = of_precisions("cached", "fp16", "fp32")
    host = {"memory": (Memory("host", 1 << 40, 10.0),)}
    cached = replace(
        cached,
        topology=replace(cached.topology, **host),
        tables=(replace(cached.tables[0], load_factor=0.2), *cached.tables[1:]),
    )
    problems = [of_precisions("half", "fp16"), of_precisions("both", "fp16", "fp32"), cached]
    table = publish(*problems)
    assert all(p.name in table for p in problems) and "fp16+fp32" in table
    model = load_model([mixed_champion / "of fp32", mixed_champion / "of fp16"])
    for p in problems:
        plan, its_problem = store.load_plan("plans", p.name)
        assert its_problem == p and stored_page("plans", p.name, store.current_version("plans", p.name))
        assert plan.provenance["data"] == "of fp16+of fp32" and plan.provenance["model_version"] == "1"
        assert plan.provenance["predicted_ms"] == price(lower(plan, p), model.for_problem(p)).total_ms


def test_a_model_of_another_optimizer_is_none_to_join(mixed_champion):
    model = neural.load(mixed_champion / "of fp16")
    neural.save(replace(model, setting=replace(model.setting, optimizer="adam")), mixed_champion / "adam")
    with pytest.raises(
        SettingMismatch, match="cannot be mixed .*; they need the same hardware and optimizer"
    ):
        promote_model.fn(
            mixed_champion / "of fp32", Path("measured"), PromoteConfig(also=(str(mixed_champion / "adam"),))
        )


def test_a_challenger_is_judged_against_the_champion_s_model_of_its_precision(mixed_champion):
    """It loses, as its predictions are three times the measurements."""
    slow = neural.load(mixed_champion / "of fp16")
    neural.save(replace(slow, setting=SETTING), mixed_champion / "slow")
    promoted = promote_model.fn(mixed_champion / "slow", Path("measured"), PromoteConfig())
    assert promoted.champion == "1" and "lost by" in promoted.reason


def test_a_challenger_that_lacks_a_precision_of_the_champion_says_so(mixed_champion):
    promoted = promote_model.fn(mixed_champion / "of fp32", Path("measured"), PromoteConfig())
    assert promoted.champion == "2"
    assert promoted.reason.endswith("it has no model for fp16, as champion 1 has: name one in promote.also")
    again = promote_model.fn(
        mixed_champion / "of fp32", Path("measured"), PromoteConfig(also=(str(mixed_champion / "of fp16"),))
    )
    assert again.champion == "1" and "no model" not in again.reason


def test_a_precision_without_a_model_is_refused_by_name_before_any_search(mixed_champion):
    with pytest.raises(ShardCoreError, match="precision: bf16.fp32 against fp32; .*promote.also of params"):
        publish(of_precisions("brain", "bf16", "fp32"))
    assert store.published_problem_names("plans") == []


# --- without a champion ---------------------------------------------------------------------------------------

CARD = "nvidia-h100-sxm"
SAID = "profile: published measurements, not of your machine"


def on_card(name):
    problem = of_precisions(name, "fp32")
    topology = replace(problem.topology, hardware=CARD)
    return replace(problem, topology=topology, global_batch=65_536, optimizer="exact_adagrad")


def published_of(name):
    plan, problem = store.load_plan("plans", name)
    page = stored_page("plans", name, store.current_version("plans", name)).decode()
    return plan, problem, page, store.last_decision("plans", name)


@pytest.mark.parametrize("algorithm", ["anneal", "dreamshard"])
def test_a_problem_of_hardware_without_a_champion_is_published_under_its_profile(mixed_champion, algorithm):
    """The run is under the champion of other hardware. Policies need a model, so none takes part."""
    if algorithm == "dreamshard":
        table = publish(on_card("gpu"), hardware=CARD, algorithm=algorithm)
    else:
        table = publish(of_precisions("half", "fp16"), on_card("gpu"))
        assert table.startswith("Model: shardcore-cost-law version 1, ")
        assert published_of("half")[0].provenance["model"] == "shardcore-cost-law"
    assert f"{CARD}, {SAID}: gpu" in table and " a profile " in table
    plan, problem, page, decision = published_of("gpu")
    profile = load_profile(CARD)
    wanted = {"model": CARD, "model_version": profile.digest, "profile": SAID}
    assert wanted.items() <= decision.provenance.items() and wanted.items() <= plan.provenance.items()
    assert decision.provenance["setting"] == f"{CARD}, batch 65536, fp32, exact_adagrad"
    assert (
        decision.total_ms == price(lower(plan, problem), profile.cost_model().for_problem(problem)).total_ms
    )
    assert f"Beyond what was measured: {SAID} (band ±" in page
    assert f"{CARD}, {SAID}" in Path("plans/report.md").read_text()
    assert f"{CARD}, {SAID}" in Path("plans/index.html").read_text()


def test_the_first_measured_model_replaces_a_profile(registry):
    gpu = replace(of_precisions("gpu", "fp32"), global_batch=SETTING.batch)
    table = publish(gpu, hardware=CARD)
    assert table.startswith(f"{CARD}, {SAID}: measure some groups") and "first" in table
    assert published_of("gpu")[3].provenance["model"] == CARD
    neural.save(measured_and_trained(replace(SETTING, hardware=CARD)), registry / "model")
    promoted = promote_model.fn(registry / "model", Path("measured"), PromoteConfig())
    assert promoted.champion == "1" and promoted.reason.endswith("the first")
    table = publish(gpu, hardware=CARD)
    assert table.startswith(f"Model: shardcore-cost-{CARD} version 1, ") and SAID not in table
    decision = published_of("gpu")[3]
    assert decision.provenance["model"] == f"shardcore-cost-{CARD}" and "profile" not in decision.provenance


def test_hardware_without_a_champion_or_a_profile_says_what_to_do(registry):
    with pytest.raises(ShardCoreError, match="'shardcore-cost-law' has no version with the alias 'champion'"):
        publish(of_precisions("any", "fp32"))


def test_a_version_counts_as_published_once_its_pages_are_there(mixed_champion):
    problem, index = of_precisions("one", "fp32"), Path("plans/index.html")
    index.mkdir(parents=True)  # a folder in its place: the page cannot be written
    with pytest.raises(ShardCoreError, match=r"index\.html"):
        publish(problem)
    published = partial(
        publish_claim.read_publish_state, connect_to_mlflow(), registered_model_name(SETTING.hardware)
    )
    assert store.last_decision("plans", "one") is not None and published().published is None
    index.rmdir()
    publish(problem)
    assert index.is_file() and published().published == "1"


def test_a_first_plan_needs_no_measurement_and_comes_once(registry):
    tables = tuple(pool()[:6])
    here = Problem("here", tables, Topology((Device(1 << 30),) * 2), SETTING.batch)
    theirs = replace(
        here, name="cards", topology=load_profile("nvidia-h100-sxm").topology(1, 2), global_batch=1024
    )
    paths = [registry / "here.json", registry / "theirs.json"]
    for path, problem in zip(paths, (here, theirs), strict=True):
        files.write_problem(path, problem)
    config = PublishConfig(budget_evals=500, torchrec_s=0)
    assert publish_first_plan.fn(paths[:1], "plans", config) is None  # of no profile's hardware
    assert publish_first_plan.fn(paths, "plans", config) == "cards"
    decision = store.last_decision("plans", "cards")
    assert decision.outcome == "first" and decision.provenance["model"] == "nvidia-h100-sxm"
    assert b"is the bottleneck" in stored_page("plans", "cards", decision.current)
    assert publish_first_plan.fn(paths, "plans", config) is None
