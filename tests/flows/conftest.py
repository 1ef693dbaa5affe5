"""A Prefect server for the flows' tests of a worker, and scratch copies of the project with toy
parameters."""

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
    with services.temporary_prefect_server() as (url, _):
        yield url


@pytest.fixture(scope="session")
def new_project(tmp_path_factory, prefect_api, prefect_home):
    """Makes scratch projects in which nothing was run yet."""
    return lambda: copy_project(tmp_path_factory.mktemp("project"), prefect_api, prefect_home)
