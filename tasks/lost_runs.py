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

from tasks.services import get

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
class Api:
    """The Prefect server's API.

    url: URL of the API.
    user: "name:password". "": the server asks for none.
    """

    url: str
    user: str

    @classmethod
    def of_client(cls) -> Api:
        """The API of this process: its server, user and password."""
        return cls(os.environ.get("PREFECT_API_URL", ""), os.environ.get("PREFECT_API_AUTH_STRING", ""))

    def post(self, path: str, body: dict[str, Any], method: str | None = None) -> Any:
        """The answer of a path. Raises OSError or ValueError if there is none."""
        headers = {
            "Authorization": f"Basic {base64.b64encode(self.user.encode()).decode()}",
            "Content-Type": "application/json",
        }
        for left in reversed(range(_TRIES)):
            try:
                answer = get(f"{self.url}{path}", headers, json.dumps(body).encode(), method=method)
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


def limit_runs(api: Api) -> None:
    """Let the pool have one run at a time."""
    api.post(f"/work_pools/{POOL}", {"concurrency_limit": AT_ONCE}, method="PATCH")


def find(api: Api, worker_began: float, patience_s: float = 0.0) -> list[LostRun]:
    """Runs of the stack's pool that no process works on, and their subflows.

    worker_began: time at which the present worker started, Unix s; infinite if there is none. Runs since then are its,
      but not those of a clock that was ahead.
    patience_s: longest wait for processes that are starting. Without their worker, some of them go on and some end.
    """
    until = time.monotonic() + patience_s
    while True:
        runs = [run for run in _left(api) if not worker_began <= _since(run) <= time.time()]
        # Processes are listed after runs. If one ended in between, its run has another state, which `end` sees.
        alive = _with_process()
        if time.monotonic() >= until or not any(
            run["id"] in alive and run["state_type"] == "PENDING" for run in runs
        ):
            break
        time.sleep(0.5)
    lost = [run for run in runs if run["id"] not in alive]
    for run in lost:  # the list grows, as subflows may have subflows
        lost += _taken(api, {"flow_runs": {"parent_flow_run_id": {"any_": [run["id"]]}}})
    return [LostRun(run["id"], run["state_id"], run["name"], run["state_name"], _since(run)) for run in lost]


def end(api: Api, run: LostRun) -> bool:
    """Set a lost run to Crashed, which frees its place. Returns False if it has ended meanwhile."""
    [now] = api.post("/flow_runs/filter", {"flow_runs": {"id": {"any_": [run.id]}}})
    if now["state_id"] != run.state_id:
        return False
    crash(api, run.id, f"It was {run.state} when the stack's worker ended.")
    return True


def crash(api: Api, run_id: str, message: str) -> None:
    """Set a run to Crashed, whatever its state. Raises OSError if Prefect refuses."""
    api.post(
        f"/flow_runs/{run_id}/set_state",
        {"force": True, "state": {"type": "CRASHED", "name": "Crashed", "message": message}},
    )


def _left(api: Api) -> list[dict[str, Any]]:
    """Runs that the stack's worker has taken, now or before it was started again."""
    others = {w["name"] for w in api.workers() if w["status"] == "ONLINE"} - {WORKER}

    def is_ours(run: dict[str, Any]) -> bool:
        # A run that is being submitted may have no label yet.
        by = (run.get("labels") or {}).get("prefect.worker.name")
        return by == WORKER or (by is None and not others)

    return [run for run in _taken(api, {"work_pools": {"name": {"any_": [POOL]}}}) if is_ours(run)]


def _taken(api: Api, which: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Runs that a worker has taken and that have not ended, as Prefect describes them. which: Prefect's filter."""
    flow_runs = {**which.get("flow_runs", {}), "state": {"type": {"any_": list(_HELD)}}}
    for offset in range(0, 1 << 20, _PAGE):
        page = api.post(
            "/flow_runs/filter",
            {**which, "flow_runs": flow_runs, "limit": _PAGE, "offset": offset, "sort": "ID_DESC"},
        )
        yield from page
        if len(page) < _PAGE:
            return


def _since(run: dict[str, Any]) -> float:
    return datetime.fromisoformat(run["state"]["timestamp"]).timestamp()


def _with_process() -> set[str]:
    """Ids of the flow runs on which a process of Prefect's engine on this machine works."""
    ids = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            # Only engines count: processes that they start have the same environment, and may outlive them.
            if any("prefect" in part for part in process.cmdline()[1:3]):
                ids.add(process.environ().get(_RUN_ID, ""))
    return ids
