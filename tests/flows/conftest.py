"""A scratch copy of the project with toy parameters, built once through the same commands that a user gives.

Only one file uses the fixture `project`: files are what the suite's workers share out, and each would build its own.
"""

import os

import pytest
from scratch import copy_project

from tasks import services


@pytest.fixture(scope="session")
def prefect_home(tmp_path_factory):
    return tmp_path_factory.mktemp("prefect")


@pytest.fixture(scope="session")
def prefect_api(prefect_home):
    os.environ["PREFECT_HOME"] = str(prefect_home)
    with services.prefect_server() as url:
        yield url


@pytest.fixture(scope="session")
def new_project(tmp_path_factory, prefect_api, prefect_home):
    """Makes scratch projects in which nothing was run yet."""
    return lambda: copy_project(tmp_path_factory.mktemp("project"), prefect_api, prefect_home)


@pytest.fixture(scope="session")
def project(new_project):
    """A project with two problems, refreshed once; `log` in its folder holds what that printed."""
    made = new_project()
    made.run("flows.tables")
    for i in range(2):
        made.run("shardcore", "problem", "data/pool.json", "--draw", str(i), "--batch", "64", "--devices", "2",
                 "--max-dim", "32", "--out", f"problems/draw-{i}.json")
    (made.folder / "log").write_text(made.run("flows.refresh").stdout)
    return made
