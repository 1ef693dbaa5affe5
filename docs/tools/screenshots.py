"""Screenshots of the pages of a real run: the plan page, Prefect's run, MLflow's model, Ray's dashboard.

    make up && . .stack/env.sh && prefect deployment run refresh/local
    make screenshots    # writes docs/pictures/screenshots/*.png, with Chromium

Options: --plans FOLDER of published plans, --problem NAME of the plan that is shown, --only PAGE.
Ray's actors live while a run measures. So this starts while the run is under way, takes Ray's page when it
has actors, and the others when the run has completed. A run measures if it is the first, or has more samples.
"""

from __future__ import annotations

import argparse
import base64
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from websockets.sync.client import connect
from websockets.sync.connection import Connection

from docs.tools.blocks import ROOT
from shardcore.core.errors import ShardCoreError
from shardcore.io.writing import write_atomic
from shardcore.plans import store
from tasks.lost_runs import PrefectApi
from tasks.services import http_request

FOLDER = ROOT / "docs/pictures/screenshots"
PATIENCE_S = 60.0
"""Longest wait until Chromium starts, and until a page that is ready is drawn. Busy machines take a while."""
RUN_S = 1800.0
"""Longest wait for a run: until it measures, and until it has completed."""


@dataclass(frozen=True)
class Page:
    """A page, and how it is opened.

    shows: text of the loaded page.
    headers: headers of all requests.
    stored: entries of the browser's local storage.
    height: height of the picture, pixels.
    """

    address: str
    shows: str
    headers: Mapping[str, str] = field(default_factory=dict)
    stored: Mapping[str, str] = field(default_factory=dict)
    height: int = 900


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--plans", default="plans", help="folder of published plans")
    parser.add_argument("--problem", default="mlperf-dlrm-dcnv2-nvidia-h100-sxm-8", help="its plan is shown")
    parser.add_argument("--only", choices=sorted(PAGES), action="append", help="pages to take; default: all")
    args = parser.parse_args()
    failed = False
    for name in args.only or PAGES:
        try:
            page = PAGES[name](args)
            with browser() as chrome:  # one for each page: there may be minutes between them
                write_atomic(FOLDER / f"{name}.png", chrome.picture(page))
            print(FOLDER / f"{name}.png", flush=True)
        except (OSError, ShardCoreError) as error:
            failed = True
            print(f"error: {name} is not taken: {error}", file=sys.stderr)
    return int(failed)


# --- pages ----------------------------------------------------------------------------------------------------


def plan(args: argparse.Namespace) -> Page:
    """The page of a published plan."""
    version = store.current_version(args.plans, args.problem)
    path = Path(args.plans, args.problem, "versions", version, "report.html").resolve()
    return Page(path.as_uri(), "What bounds it", height=1500)


def prefect(_: argparse.Namespace) -> Page:
    """The last flow run of `refresh`, of the stack, once it has completed."""
    api, login = _setting("PREFECT_API_URL"), _setting("PREFECT_API_AUTH_STRING")
    _until(lambda: _last_run()["end_time"], RUN_S)
    run = _last_run()
    if run["state_type"] != "COMPLETED":
        raise ShardCoreError(f"run {run['name']} is {run['state_name']}; it has to be Completed")
    address = f"{api.removesuffix('/api')}/runs/flow-run/{run['id']}"
    stored = {"prefect-password": json.dumps(_base64(login))}
    return Page(address, run["name"], {"Authorization": f"Basic {_base64(login)}"}, stored)


def mlflow(_: argparse.Namespace) -> Page:
    """The registered cost model, of the stack."""
    home = _setting("MLFLOW_TRACKING_URI")
    login = (
        f"{os.environ.get('MLFLOW_TRACKING_USERNAME', '')}:{os.environ.get('MLFLOW_TRACKING_PASSWORD', '')}"
    )
    headers = {"Authorization": f"Basic {_base64(login)}"}
    # Its chat panel opens on a first visit, over a third of the page. Models are not of its side "GenAI".
    stored = {
        "mlflow.assistant.fab.autoOpenedOnFirstLoad_v1": "true",
        "mlflow.workflowType_v1": json.dumps("machine_learning"),
    }
    models = json.loads(http_request(f"{home}/api/2.0/mlflow/registered-models/search", headers)).get(
        "registered_models", []
    )
    if not models:
        raise ShardCoreError("no registered model; first: prefect deployment run refresh/local")
    return Page(f"{home}/#/models/{models[0]['name']}", "champion", headers, stored)


def ray(_: argparse.Namespace) -> Page:
    """Actors that measure, in Ray's dashboard, of the stack."""
    home = _setting("RAY_API_SERVER_ADDRESS")
    token = Path(_setting("RAY_AUTH_TOKEN_PATH")).read_text().strip()
    headers = {"Authorization": f"Bearer {token}"}
    # The page itself shows actors as alive for minutes after they have ended.
    alive = f"{home}/api/v0/actors?filter_keys=state&filter_predicates=%3D&filter_values=ALIVE"
    _until(lambda: b"measure[compute]" in http_request(alive, headers) or _last_run()["end_time"], RUN_S)
    if (run := _last_run())["end_time"]:
        raise ShardCoreError(
            f"run {run['name']} has ended, and its actors with it; first: "
            "prefect deployment run refresh/local"
        )
    return Page(f"{home}/#/actors", "ALIVE", headers, height=520)


PAGES = {"ray": ray, "prefect": prefect, "mlflow": mlflow, "plan": plan}
"""Function that describes the page of each picture, by name of the picture, in the order of a run."""


def _last_run() -> dict[str, Any]:
    """The latest flow run of `refresh` that is due, as Prefect's API has it."""
    api, login = _setting("PREFECT_API_URL"), _setting("PREFECT_API_AUTH_STRING")
    due = {"expected_start_time": {"before_": datetime.now(UTC).isoformat()}}
    request = {
        "flows": {"name": {"any_": ["refresh"]}},
        "flow_runs": due,
        "sort": "EXPECTED_START_TIME_DESC",
        "limit": 1,
    }
    if runs := PrefectApi(api, login).post("/flow_runs/filter", request):
        return runs[0]
    raise ShardCoreError("no run of the flow refresh; first: prefect deployment run refresh/local")


def _base64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _setting(name: str) -> str:
    if not os.environ.get(name):
        raise ShardCoreError(f"{name} is not set; first: make up, then . .stack/env.sh")
    return os.environ[name]


# --- the browser ----------------------------------------------------------------------------------------------


@contextmanager
def browser() -> Iterator[Browser]:
    """A headless Chromium of its own, which ends with the block."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        raise SystemExit("error: there is no chromium on this machine; it takes the pictures")
    # Chromium's helpers may write for a moment after it has ended.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        options = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-proxy-server")
        command = [program, *options, "--remote-debugging-port=0", f"--user-data-dir={folder}", "about:blank"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            place = Path(folder, "DevToolsActivePort")  # Chromium writes it when it listens
            if not (port := _until(lambda: place.exists() and place.read_text(), PATIENCE_S)):
                raise SystemExit(f"error: {program} does not start within {PATIENCE_S:.0f} s")
            address = f"http://127.0.0.1:{port.split()[0]}/json"
            [target] = [t for t in json.loads(http_request(address)) if t["type"] == "page"]
            with connect(target["webSocketDebuggerUrl"], max_size=None, proxy=None) as channel:
                yield Browser(channel)
        finally:
            process.terminate()
            process.wait()


class Browser:
    """A tab, over Chromium's DevTools protocol."""

    def __init__(self, channel: Connection) -> None:
        self._channel, self._numbers = channel, itertools.count()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        self._channel.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            answer = json.loads(self._channel.recv(PATIENCE_S))
            if answer.get("id") == number:
                if "error" in answer:
                    raise ShardCoreError(f"Chromium refuses {method}: {answer['error']['message']}")
                return answer["result"]

    def picture(self, page: Page) -> bytes:
        """PNG of a page once it shows its text. Raises ShardCoreError if it does not in time."""
        self.call("Network.enable")
        self.call("Network.setExtraHTTPHeaders", headers=dict(page.headers))
        size = {"width": 1400, "height": page.height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Page.enable")
        stored = "".join(
            f"localStorage.setItem({json.dumps(k)}, {json.dumps(v)});" for k, v in page.stored.items()
        )
        self.call("Page.addScriptToEvaluateOnNewDocument", source=stored)
        self.call("Page.navigate", url=page.address)
        if not _until(lambda: page.shows in self._text(), PATIENCE_S):
            raise ShardCoreError(f"{page.address} does not show {page.shows!r} within {PATIENCE_S:.0f} s")
        time.sleep(3)  # for what is drawn after the text
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])

    def _text(self) -> str:
        result = self.call("Runtime.evaluate", expression="document.body ? document.body.innerText : ''")
        return str(result["result"].get("value", ""))


def _until(ready: Callable[[], Any], patience_s: float) -> Any:
    """The first true result within this time, or None. A service that does not answer is asked again."""
    end = time.monotonic() + patience_s
    while time.monotonic() < end:
        with suppress(OSError):
            if result := ready():
                return result
        time.sleep(0.5)
    return None


if __name__ == "__main__":
    sys.exit(main())
