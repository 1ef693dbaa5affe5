"""Flow runs whose worker and process were killed, on a real Prefect server: found, ended, and what still runs
is left alone."""

import math
import os
import subprocess
import sys
import threading
import time
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.objects import StateType
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings
from prefect.states import Cancelling, Completed, Pending, Running

from tasks import lost_runs
from tasks.lost_runs import POOL, WORKER, PrefectApi

pytestmark = pytest.mark.long


@flow
def waits():
    pass


@pytest.fixture(scope="module")
def client(prefect_api):
    settings = {PREFECT_API_URL: prefect_api, PREFECT_API_AUTH_STRING: os.environ["PREFECT_API_AUTH_STRING"]}
    with temporary_settings(settings), get_client(sync_client=True) as client:
        client.create_work_pool(WorkPoolCreate(name=POOL, type="process"), overwrite=True)
        yield client


@pytest.fixture
def api(client):
    return PrefectApi(os.environ["PREFECT_API_URL"], os.environ["PREFECT_API_AUTH_STRING"])


@pytest.fixture
def taken(client):
    """Makes runs of a deployment that a worker has taken; they go with the test."""
    flow_id = client.create_flow(waits)
    deployment = client.create_deployment(flow_id, f"d-{uuid.uuid4()}", work_pool_name=POOL)
    made = []

    def take(*states, worker=WORKER):
        run = client.create_flow_run_from_deployment(deployment)
        if worker:
            client.update_flow_run_labels(run.id, {"prefect.worker.name": worker})
        for state in states:
            client.set_flow_run_state(run.id, state, force=True)
        made.append(run.id)
        return str(run.id)

    yield take
    for run_id in made:
        client.delete_flow_run(run_id)
    client.delete_deployment(deployment)


def ids(found):
    return {run.id for run in found}


def test_runs_that_a_dead_worker_took_are_found_and_end_as_crashed(client, api, taken):
    held = [
        taken(Pending()),
        taken(Pending(), Running()),
        taken(Pending(), Running(), Cancelling()),
        taken(Pending(), worker=None),
    ]
    taken()  # nobody has taken it
    found = lost_runs.find_lost_runs(api, math.inf)
    assert ids(found) == set(held)
    assert all(str(run).startswith(f"run {run.name!r}, ") and run.state in str(run) for run in found)
    assert all(lost_runs.crash_lost_run(api, run) for run in found)
    assert {client.read_flow_run(run_id).state.type for run_id in held} == {StateType.CRASHED}
    assert lost_runs.find_lost_runs(api, math.inf) == []
    assert not any(lost_runs.crash_lost_run(api, run) for run in found)


def test_what_the_worker_of_now_or_another_took_is_left_alone(api, taken):
    taken(Pending(), Running())
    assert lost_runs.find_lost_runs(api, time.time() - 60) == []
    taken(Pending(), Running(), worker="stack@elsewhere")
    assert len(lost_runs.find_lost_runs(api, math.inf)) == 1


def test_a_run_whose_process_lives_goes_on(api, taken):
    run_id = taken(Pending(), Running())
    env = {**os.environ, "PREFECT__FLOW_RUN_ID": run_id}

    def start(code):
        process = subprocess.Popen(
            [sys.executable, "-c", f"print(flush=True); input(){code}"],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        process.stdout.readline()
        return process

    # As the worker starts it, its engine has the run's id in its environment. So has what that starts.
    with start("  # prefect.engine") as engine, start("") as child:
        assert lost_runs.find_lost_runs(api, math.inf) == []
        engine.kill()
        engine.wait()
        assert ids(lost_runs.find_lost_runs(api, math.inf)) == {run_id}
        child.kill()


def test_one_that_ended_meanwhile_keeps_its_end(client, api, taken):
    run_id = taken(Pending(), Running())
    [found] = lost_runs.find_lost_runs(api, math.inf)
    client.set_flow_run_state(run_id, Completed(), force=True)
    assert not lost_runs.crash_lost_run(api, found)
    assert client.read_flow_run(run_id).state.type == StateType.COMPLETED


def test_the_pool_runs_one_at_a_time_whatever_the_deployment(client, api):
    lost_runs.limit_concurrent_runs(api)
    assert client.read_work_pool(POOL).concurrency_limit == 1


@pytest.mark.parametrize("refusals, status, answered", [(2, 503, True), (99, 503, False), (1, 404, False)])
def test_a_busy_server_is_asked_again(refusals, status, answered, monkeypatch):
    asked = []

    class Busy(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            asked.append(self.path)
            self.send_response(status if len(asked) <= refusals else 200)
            self.end_headers()
            self.wfile.write(b"[7]")

        def log_message(self, *_):
            pass

    monkeypatch.setattr(lost_runs.time, "sleep", lambda _: None)
    with ThreadingHTTPServer(("127.0.0.1", 0), Busy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        here = PrefectApi(f"http://127.0.0.1:{server.server_port}", "")
        if answered:
            assert here.post("/runs", {}) == [7]
        else:
            with pytest.raises(OSError, match=str(status)):
                here.post("/runs", {})
        server.shutdown()
    assert len(asked) == {(2, 503): 3, (99, 503): 10, (1, 404): 1}[refusals, status]
