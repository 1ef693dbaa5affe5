"""Flow runs that a dead worker has left. Prefect counts them as running for ever, and the next ones wait.

Prefect's issue 20979: nothing ends a run whose worker and process were killed, nor one that was being submitted.
"""

from __future__ import annotations

import base64
import json
import os
import socket
import time
import urllib.error
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from http import HTTPStatus
from typing import Any

import psutil

from tasks.services import http_request

POOL = "local"
"""Work pool of prefect.yaml's deployments."""
WORKER = f"stack@{socket.gethostname()}"
"""Name of the stack's worker."""
AT_ONCE = 1
"""Most runs of the pool at one time, of all deployments, as a publish would disturb a measurement."""
_HELD = ("PENDING", "RUNNING", "CANCELLING")
"""States of runs that a worker has taken and not ended."""
_TRIES = 10
"""Most tries of a request that a busy server refuses, a second apart."""
_PAGE = 200
"""Most runs in one answer of Prefect."""
_RUN_ID = "PREFECT__FLOW_RUN_ID"


@dataclass(frozen=True)
class PrefectApi:
    """The Prefect server's API.

    url: URL of the API.
    user: "name:password". "": the server asks for none.
    """

    url: str
    user: str

    @classmethod
    def from_environment(cls) -> PrefectApi:
        """API of the Prefect server in this process's environment, with user and password."""
        return cls(os.environ.get("PREFECT_API_URL", ""), os.environ.get("PREFECT_API_AUTH_STRING", ""))

    def post(self, path: str, body: dict[str, Any], method: str | None = None) -> Any:
        """Send a JSON request to a path of Prefect's API. Raises OSError or ValueError without a valid answer."""
        headers = {
            "Authorization": f"Basic {base64.b64encode(self.user.encode()).decode()}",
            "Content-Type": "application/json",
        }
        for left in reversed(range(_TRIES)):
            try:
                answer = http_request(f"{self.url}{path}", headers, json.dumps(body).encode(), method=method)
                return json.loads(answer) if answer else None
            except urllib.error.HTTPError as error:
                # Prefect answers 503 while its database is busy. Its own client waits, too.
                if error.code != HTTPStatus.SERVICE_UNAVAILABLE or not left:
                    raise
                time.sleep(1.0)

    def workers(self) -> list[dict[str, Any]]:
        return self.post(f"/work_pools/{POOL}/workers/filter", {})


@dataclass(frozen=True)
class LostRun:
    """A run that Prefect counts as running, though no process works on it.

    state_id: id of its state when it was found.
    name, state: texts for people.
    since: time of its state, Unix s.
    """

    id: str
    state_id: str
    name: str
    state: str
    since: float

    def __str__(self) -> str:
        since = datetime.fromtimestamp(self.since).strftime("%Y-%m-%d %H:%M:%S")
        return f"run {self.name!r}, {self.state} since {since}, whose worker has ended"


def limit_concurrent_runs(api: PrefectApi) -> None:
    """Limit the Prefect work pool to one flow run at a time."""
    api.post(f"/work_pools/{POOL}", {"concurrency_limit": AT_ONCE}, method="PATCH")


def find_lost_runs(api: PrefectApi, worker_began: float, patience_s: float = 0.0) -> list[LostRun]:
    """Flow runs of the stack's work pool that no process works on, and their subflows.

    worker_began: time at which the present worker started, Unix s; infinite if there is none. Runs since then are its,
      but not those of a clock that was ahead.
    patience_s: longest wait for processes that are starting. Without their worker, some of them go on and some end.
    """
    until = time.monotonic() + patience_s
    while True:
        runs = [
            run for run in _unended_stack_runs(api) if not worker_began <= _state_time(run) <= time.time()
        ]
        # Processes are listed after runs. If one ended in between, its run has another state, which
        # `crash_lost_run` sees.
        alive = _live_run_ids()
        if time.monotonic() >= until or not any(
            run["id"] in alive and run["state_type"] == "PENDING" for run in runs
        ):
            break
        time.sleep(0.5)
    lost = [run for run in runs if run["id"] not in alive]
    for run in lost:  # the list grows, as subflows may have subflows
        lost += _unended_runs(api, {"flow_runs": {"parent_flow_run_id": {"any_": [run["id"]]}}})
    return [
        LostRun(run["id"], run["state_id"], run["name"], run["state_name"], _state_time(run)) for run in lost
    ]


def crash_lost_run(api: PrefectApi, run: LostRun) -> bool:
    """Set a lost flow run to Crashed, which frees its place. Returns False if the run has ended meanwhile."""
    [now] = api.post("/flow_runs/filter", {"flow_runs": {"id": {"any_": [run.id]}}})
    if now["state_id"] != run.state_id:
        return False
    crash_run(api, run.id, f"It was {run.state} when the stack's worker ended.")
    return True


def crash_run(api: PrefectApi, run_id: str, message: str) -> None:
    """Set a flow run to Crashed, whatever its state. Raises OSError if Prefect refuses."""
    api.post(
        f"/flow_runs/{run_id}/set_state",
        {"force": True, "state": {"type": "CRASHED", "name": "Crashed", "message": message}},
    )


def _unended_stack_runs(api: PrefectApi) -> list[dict[str, Any]]:
    """Unended flow runs that the stack's worker has taken, also before a restart of the worker."""
    others = {w["name"] for w in api.workers() if w["status"] == "ONLINE"} - {WORKER}

    def is_of_stack_worker(run: dict[str, Any]) -> bool:
        # A run that is being submitted may have no label yet.
        by = (run.get("labels") or {}).get("prefect.worker.name")
        return by == WORKER or (by is None and not others)

    return [
        run
        for run in _unended_runs(api, {"work_pools": {"name": {"any_": [POOL]}}})
        if is_of_stack_worker(run)
    ]


def _unended_runs(api: PrefectApi, which: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Flow runs, as JSON, that a worker has taken and that have not ended. which: filter of Prefect's API."""
    flow_runs = {**which.get("flow_runs", {}), "state": {"type": {"any_": list(_HELD)}}}
    for offset in range(0, 1 << 20, _PAGE):
        page = api.post(
            "/flow_runs/filter",
            {**which, "flow_runs": flow_runs, "limit": _PAGE, "offset": offset, "sort": "ID_DESC"},
        )
        yield from page
        if len(page) < _PAGE:
            return


def _state_time(run: dict[str, Any]) -> float:
    return datetime.fromisoformat(run["state"]["timestamp"]).timestamp()


def _live_run_ids() -> set[str]:
    """Ids of the flow runs that a process of Prefect's engine on this machine executes."""
    ids = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            # Only engines count: processes that they start have the same environment, and may outlive them.
            if any("prefect" in part for part in process.cmdline()[1:3]):
                ids.add(process.environ().get(_RUN_ID, ""))
    return ids
