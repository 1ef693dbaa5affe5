"""A real deployment: server, process work pool, worker, `prefect deployment run … --watch`."""

import subprocess
import sys

from shardcore import store


def test_publish_runs_as_a_deployment(project):
    project.run("prefect", "work-pool", "create", "local", "--type", "process", "--overwrite")
    project.run("prefect", "--no-prompt", "deploy", "--all")
    worker = subprocess.Popen([sys.executable, "-m", "prefect", "worker", "start", "--pool", "local"], cwd=project.folder,
                              env={**project.env, "PREFECT_WORKER_QUERY_SECONDS": "1"}, stdout=subprocess.DEVNULL,
                              stderr=subprocess.DEVNULL)
    try:
        done = project.run("prefect", "deployment", "run", "publish/local", "-p", "plans=from-deployment", "--watch")
        assert "Completed" in done.stdout
        assert store.load_plan(project.folder / "from-deployment", "pool-0-00")[0].placements
        failed = project.run("prefect", "deployment", "run", "publish/local", "-p", 'problems=["none.json"]', "--watch",
                             check=False)
        assert failed.returncode == 1 and "Failed" in failed.stdout
    finally:
        worker.terminate()
        worker.wait(30)
