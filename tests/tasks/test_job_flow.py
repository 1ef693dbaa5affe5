"""The flow of a running job: new traces correct the champion, the gate judges it, and a plan follows."""

import json

import mlflow
import pytest
import yaml
from job_folders import traced_step
from laws import SETTING, comm_samples, compute_samples, linear_law, pool, trained
from prefect.logging import disable_run_logger
from tracking import no_pages, tracked

from flows.job import LEAST_GAIN, MEASURED, job, log_steps, read_traces, write_job_problem
from shardcore.core.errors import ShardCoreError
from shardcore.cost import composite, neural
from shardcore.io import dataset, files, job_folder, traced_samples
from shardcore.plans import store
from tasks import registry
from tasks.promote import TRACED_ERROR, PromoteConfig, promote_model
from tasks.publish import publish_plans

pytestmark = pytest.mark.usefixtures("short_explanations")
PARAMS = {
    "setting": {"hardware": SETTING.hardware, "batch": SETTING.batch},
    "publish": {"budget_evals": 200, "torchrec_s": 0.0},
}


@pytest.fixture(scope="module")
def model():
    return trained()


@pytest.fixture
def project(tmp_path, monkeypatch, model):
    """A folder with a champion, and a job that traced a step. Its tasks run in this process, without Prefect."""
    for task in (read_traces, promote_model, write_job_problem, publish_plans, log_steps):
        monkeypatch.setitem(job.fn.__globals__, task.fn.__name__, task.fn)
    with tracked(tmp_path), disable_run_logger(), no_pages():
        (tmp_path / "params.yaml").write_text(yaml.safe_dump(PARAMS))
        compute, comm = compute_samples(linear_law, 60), comm_samples(20)
        dataset.write_compute_samples(
            "data/measurements", compute, dataset.write_pool("data/measurements", pool())
        )
        dataset.write_collective_samples("data/measurements", comm)
        neural.save(model, "data/model")
        promote_model.fn(tmp_path / "data/model", tmp_path / "data/measurements", PromoteConfig())
        traced_step(tmp_path / "dlrm")
        yield tmp_path


def read(project, plans=None):
    return job.fn(str(project / "dlrm"), plans=plans)


def history(name=MEASURED):
    """Steps that the job's run has, with a metric of theirs."""
    [run] = mlflow.search_runs(filter_string="tags.stage = 'job'", output_format="list")
    return {m.step: m.value for m in mlflow.MlflowClient().get_metric_history(run.info.run_id, name)}


def champion():
    return registry.champion_model(registry.connect_to_mlflow(), SETTING.hardware)


def test_each_traced_step_is_read_once_in_one_run(project):
    assert read(project).startswith("step-00001000: step 18.0 ms measured")
    assert read(project).endswith("no new traced step")
    traced_step(project / "dlrm", 2000)
    assert read(project).startswith("step-00002000: step 18.0 ms measured")
    assert history() == {1000: 18.0, 2000: 18.0}
    assert len(traced_samples.read_traced_samples([project / "datasets/jobs"])) == 2


def test_the_corrected_model_goes_through_the_gate_and_names_job_steps_and_traces(project):
    output = read(project)
    assert "error on held-out traces" in output and "of champion 1" in output
    model, version = champion()
    assert str(version.version) == "2" and "passed, error" in version.tags["gate"]
    assert version.tags["job"] == "dlrm" and version.tags["job.steps"] == "dlrm-00001000"
    before, after = model.meta["provenance"]["job"]["held_out_errors"]
    assert before - after > LEAST_GAIN and float(version.tags[TRACED_ERROR]) == pytest.approx(after, abs=1e-3)
    assert version.tags["job.traces"] == files.json_digest(model.meta["provenance"]["job"]["traces"])
    assert model.meta["provenance"]["job"]["traces"]["dlrm-00001000"].keys() == {"0", "1"}


@pytest.mark.long
def test_a_step_corrects_the_champion_once(project):
    read(project)
    traced_step(project / "dlrm", 2000)
    assert "no traced step that the model has not learned from; error on held-out traces" in read(project)
    assert str(champion()[1].version) == "2"


@pytest.mark.long
def test_a_worse_model_does_not_follow_by_held_out_traces(project):
    """The model before its correction, trained and promoted again, has the better score on measurements."""
    read(project)
    worse = composite.load_models(project / "data/model")
    weights = {**worse.weights, "launch": 1.001 * worse.weights["launch"]}
    neural.save(neural.NeuralModel(worse.setting, weights, worse.meta), project / "data/other")
    found = promote_model.fn(project / "data/other", project / "data/measurements", PromoteConfig())
    assert found.champion == "2" and "lost by" in found.reason and "held-out traces of dlrm" in found.reason


@pytest.mark.long
def test_with_approval_a_corrected_model_waits(project):
    (project / "params.yaml").write_text(yaml.safe_dump(PARAMS | {"promote": {"approval": True}}))
    assert "awaits approval" in read(project) and str(champion()[1].version) == "1"


@pytest.mark.long
def test_a_plan_for_the_job_is_published_under_the_new_champion(project):
    assert "dlrm" in read(project, str(project / "plans"))
    plan, problem = store.load_plan(project / "plans", "dlrm")
    assert files.read_problem(project / "data/jobs/dlrm/problem.json") == problem
    assert plan.provenance["model_version"] == "2" and problem.job.dense_ms > 0


@pytest.mark.long
def test_without_a_champion_a_profile_is_corrected_and_prices_the_plan(project, monkeypatch):
    params = PARAMS | {"setting": {"hardware": "nvidia-h100-sxm", "batch": SETTING.batch}}
    (project / "params.yaml").write_text(yaml.safe_dump(params))
    (project / "data/measurements").rename(project / "data/others")
    read(project, str(project / "plans"))
    profile = json.loads((project / "data/jobs/dlrm/profile.json").read_text())
    assert any("corrected by traces of dlrm" in rate["source"] for rate in profile["rates"].values())
    plan, _ = store.load_plan(project / "plans", "dlrm")
    assert "profile" in plan.provenance and plan.provenance["model"] == "nvidia-h100-sxm"


@pytest.mark.long
def test_a_page_and_the_run_have_steps_as_measured_and_as_predicted(project):
    read(project)
    traced_step(project / "dlrm", 2000)
    read(project)
    page = (project / "data/jobs/dlrm/job.html").read_text()
    assert "<svg" in page and "2,000" in page and "1,000" in page
    predicted = history("predicted_ms")
    assert set(predicted) == {1000, 2000}
    # The second step was predicted from the first, and is equal to it.
    assert predicted[2000] == pytest.approx(18.0, rel=0.02) and predicted[1000] != pytest.approx(
        18.0, rel=0.02
    )
    [run] = mlflow.search_runs(filter_string="tags.stage = 'job'", output_format="list")
    paths = {a.path for a in mlflow.MlflowClient().list_artifacts(run.info.run_id)}
    assert {"job.html", "step-00001000", "step-00002000"} <= paths
    assert history("model_version") == {1000: 1.0, 2000: 2.0}


@pytest.mark.long
def test_a_damaged_step_is_named_and_hides_no_other(project):
    where = traced_step(project / "dlrm", 2000)
    (where / job_folder.PLAN_JSON).write_text("{")
    assert read(project).startswith("step-00001000")
    with pytest.raises(ShardCoreError, match="step-00002000: .*plan.json"):
        read(project)


@pytest.mark.long
def test_a_step_whose_plan_could_not_be_published_is_read_again(project):
    (project / "plans").write_text("no folder")
    with pytest.raises(ShardCoreError, match="plans"):
        read(project, str(project / "plans"))
    (project / "plans").unlink()
    assert "dlrm" in read(project, str(project / "plans"))
    assert history() == {1000: 18.0} and str(champion()[1].version) == "2"


def test_a_folder_without_traced_steps_is_refused(project):
    (project / "dlrm").rename(project / "other")
    (project / "dlrm").mkdir()
    with pytest.raises(ShardCoreError, match="no traced step of all ranks"):
        read(project)
