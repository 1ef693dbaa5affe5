"""The flow of a running job: new traces correct the champion, in one MLflow run."""

from pathlib import Path

import mlflow
import pytest
from job_folders import traced_step
from laws import SETTING, comm_samples, compute_samples, linear_law, pool
from prefect.logging import disable_run_logger
from tracking import tracked

from shardcore.core.errors import ShardCoreError
from shardcore.cost import composite, fit, neural
from shardcore.io import dataset, files, job_folder
from shardcore.plans import store
from shardcore.plans.publisher import PublishConfig
from tasks.job import MEASURED, read_traces
from tasks.promote import PromoteConfig, promote_model
from tasks.setting import SettingConfig

WANTED = SettingConfig(SETTING.hardware, SETTING.batch)


@pytest.fixture
def project(tmp_path):
    """A folder with a champion, and a job that traced a step."""
    with tracked(tmp_path), disable_run_logger():
        compute, comm = compute_samples(linear_law, 60), comm_samples(20)
        dataset.write_compute("data/measurements", compute, dataset.write_pool("data/measurements", pool()))
        dataset.write_comm("data/measurements", comm)
        neural.save(fit.train(compute, comm, SETTING, fit.FitConfig(epochs=1)).model, "data/model")
        promote_model.fn(Path("data/model"), Path("data/measurements"), PromoteConfig())
        traced_step(tmp_path / "dlrm")
        yield tmp_path


def read(project, plans=None):
    config = PublishConfig(budget_evals=200)
    return read_traces.fn(project / "dlrm", None, plans, WANTED, config)


def history(project):
    """Steps that the job's run has, with their measured ms."""
    [run] = mlflow.search_runs(filter_string="tags.stage = 'job'", output_format="list")
    return {m.step: m.value for m in mlflow.MlflowClient().get_metric_history(run.info.run_id, MEASURED)}


def test_each_traced_step_is_read_once_in_one_run(project):
    assert read(project).startswith("step-00001000: step 18.0 ms measured")
    assert read(project).endswith("no new traced step")
    traced_step(project / "dlrm", 2000)
    assert read(project).startswith("step-00002000: step 18.0 ms measured")
    assert history(project) == {1000: 18.0, 2000: 18.0}


def test_the_corrected_model_and_the_jobs_problem_are_kept(project):
    read(project)
    model = composite.load(project / "data/jobs/dlrm/model")
    assert model.meta["provenance"]["job"]["job"] == "step-00001000"
    problem = files.read_problem(project / "data/jobs/dlrm/problem.json")
    assert problem.name == "dlrm" and problem.job.dense_ms > 0


def test_a_plan_for_the_job_is_published_under_the_corrected_model(project):
    assert "plan: dlrm" in read(project, str(project / "plans"))
    plan, problem = store.load_plan(project / "plans", "dlrm")
    assert plan.provenance["job"] == "dlrm" and problem.job.dense_ms > 0


def test_a_damaged_step_is_named_and_hides_no_other(project):
    where = traced_step(project / "dlrm", 2000)
    (where / job_folder.PLAN_JSON).write_text("{")
    assert read(project).startswith("step-00001000")
    with pytest.raises(ShardCoreError, match="step-00002000: .*plan.json"):
        read(project)


def test_a_step_whose_plan_could_not_be_published_is_read_again(project):
    (project / "plans").write_text("no folder")
    with pytest.raises(ShardCoreError, match="plans"):
        read(project, str(project / "plans"))
    (project / "plans").unlink()
    assert "plan: dlrm" in read(project, str(project / "plans"))
    assert history(project) == {1000: 18.0}


def test_a_folder_without_traced_steps_is_refused(project):
    (project / "dlrm").rename(project / "other")
    (project / "dlrm").mkdir()
    with pytest.raises(ShardCoreError, match="no traced step of all ranks"):
        read(project)
