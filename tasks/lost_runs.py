"""Flow runs that a dead worker left. Prefect counts them as running for ever, and the next ones wait.

Prefect 20979: nothing ends a run whose worker and process were killed, nor one that was being submitted.
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
"""The work pool of prefect.yaml's deployments."""
WORKER = f"stack@{socket.gethostname()}"
"""The name of the stack's worker."""
AT_ONCE = 1
"""Runs of the pool at the same time, whatever their deployments: a publish would disturb a measurement."""

_HELD = ("PENDING", "RUNNING", "CANCELLING")
"""States of runs that a worker has taken and not ended."""
_TRIES = 10
"""Requests that a busy server may refuse, at most, a second apart."""
_PAGE = 200
"""Prefect's most runs in an answer."""
_RUN_ID = "PREFECT__FLOW_RUN_ID"


@dataclass(frozen=True)
class Api:
    """The Prefect server's API.

    url: of the API.
    user: "name:password". "": it asks for none.
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
        left = _TRIES
        while True:
            try:
                answer = get(f"{self.url}{path}", headers, json.dumps(body).encode(), method=method)
                return json.loads(answer) if answer else None
            except urllib.error.HTTPError as error:
                left -= 1
                # Prefect answers so while its database is busy. Its own client waits, too.
                if error.code != HTTPStatus.SERVICE_UNAVAILABLE or not left:
                    raise
                time.sleep(1.0)

    def workers(self) -> list[dict[str, Any]]:
        return self.post(f"/work_pools/{POOL}/workers/filter", {})


@dataclass(frozen=True)
class LostRun:
    """A run that Prefect counts as under way, and no process works on.

    state_id: of its state when this was found out.
    name, state: for people.
    since: Unix s, the time of its state.
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

    worker_began: Unix s, when the worker of now started; infinite if there is none. What it took since, it
      answers for.
    patience_s: to wait for processes that are starting. Some go on without their worker, some end.
    """
    until = time.monotonic() + patience_s
    while True:
        runs = [run for run in _left(api) if _since(run) < worker_began]
        # The processes are read after the runs: one that ended meanwhile has told how, which `end` sees.
        alive = _with_process()
        if time.monotonic() >= until or not any(
            run["id"] in alive and run["state_type"] == "PENDING" for run in runs
        ):
            break
        time.sleep(0.5)
    found = [run for run in runs if run["id"] not in alive]
    for run in found:  # It grows: subflows may have subflows.
        found += _taken(api, {"flow_runs": {"parent_flow_run_id": {"any_": [run["id"]]}}})
    return [LostRun(run["id"], run["state_id"], run["name"], run["state_name"], _since(run)) for run in found]


def end(api: Api, run: LostRun) -> bool:
    """Set a lost run to Crashed, which frees its place. Returns false if it ended by itself meanwhile."""
    [now] = api.post("/flow_runs/filter", {"flow_runs": {"id": {"any_": [run.id]}}})
    if now["state_id"] != run.state_id:
        return False
    crash(api, run.id, f"It was {run.state} when the stack's worker ended.")
    return True


def crash(api: Api, run_id: str, message: str) -> None:
    """Set a run to Crashed, whatever it is. Raises OSError if Prefect does not take that."""
    api.post(
        f"/flow_runs/{run_id}/set_state",
        {"force": True, "state": {"type": "CRASHED", "name": "Crashed", "message": message}},
    )


def _left(api: Api) -> list[dict[str, Any]]:
    """Runs that the stack's worker has taken, now or before it was started again."""
    others = {w["name"] for w in api.workers() if w["status"] == "ONLINE"} - {WORKER}

    def is_ours(run: dict[str, Any]) -> bool:
        # One that is being submitted may have no label yet.
        by = (run.get("labels") or {}).get("prefect.worker.name")
        return by == WORKER or (by is None and not others)

    return [run for run in _taken(api, {"work_pools": {"name": {"any_": [POOL]}}}) if is_ours(run)]


def _taken(api: Api, which: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Runs that some worker has taken, as Prefect describes them."""
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
    """Ids of the flow runs that a process of Prefect's engine on this machine works on."""
    found = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            # What an engine starts has the same environment, and may outlive it.
            if any("prefect" in part for part in process.cmdline()[1:3]):
                found.add(process.environ().get(_RUN_ID, ""))
    return found
