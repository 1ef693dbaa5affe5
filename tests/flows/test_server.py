"""The Prefect server of a run without one: for its own user, and gone with its data afterwards."""

import base64
import os
import urllib.error
from pathlib import Path

import psutil
import pytest

from tasks import services


def answer(url, user=None):
    headers = {"Content-Type": "application/json"}
    if user:
        headers["Authorization"] = f"Basic {base64.b64encode(user.encode()).decode()}"
    return services.http_request(f"{url}/flow_runs/filter", headers, b"{}")


@pytest.mark.long
def test_it_answers_only_who_knows_its_password_and_keeps_a_database_of_its_own(prefect_api, prefect_home):
    for user in (None, "shardcore:guess"):
        with pytest.raises(urllib.error.HTTPError, match="401"):
            answer(prefect_api, user)
    assert answer(prefect_api, os.environ["PREFECT_API_AUTH_STRING"])
    assert not (prefect_home / "prefect.db").exists()
    port = prefect_api.split(":")[2].split("/")[0]
    children = [p for p in psutil.Process().children() if p.status() != psutil.STATUS_ZOMBIE]
    [server] = [p for p in children if port in p.cmdline()]
    url = server.environ()["PREFECT_SERVER_DATABASE_CONNECTION_URL"]
    database = Path(url.removeprefix("sqlite+aiosqlite:///"))
    assert database.exists() and database.parent.stat().st_mode & 0o077 == 0
    assert os.environ["PREFECT_API_AUTH_STRING"].split(":")[1] not in " ".join(server.cmdline())


@pytest.mark.long
def test_it_starts_with_the_tables_that_were_made_at_installation_and_keeps_them_empty(tmp_path, monkeypatch):
    made = tmp_path / "prefect.db"
    monkeypatch.setattr(services, "_EMPTY_DATABASE", made)
    services.make_empty_database()
    before = made.read_bytes()
    with services.temporary_prefect_server() as (url, _):
        assert answer(url, os.environ["PREFECT_API_AUTH_STRING"]) == b"[]"
    assert list(tmp_path.iterdir()) == [made] and made.read_bytes() == before


def test_after_it_nothing_is_left(tmp_path, monkeypatch):
    """The server is one that ends at once."""
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", "mine")
    monkeypatch.setattr("sys.executable", "/bin/false")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(ValueError, match="ended with exit code 1"), services.temporary_prefect_server():
        pass
    assert not list(tmp_path.iterdir())
    assert os.environ["PREFECT_API_AUTH_STRING"] == "mine" and "PREFECT_API_URL" not in os.environ
