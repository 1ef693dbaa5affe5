"""The conformance suite runs in several files, each for its own sharders."""

import pytest

pytest.register_assert_rewrite("conformance")


def pytest_generate_tests(metafunc):
    if "sharder" in metafunc.fixturenames:
        metafunc.parametrize("sharder", metafunc.module.SHARDERS_HERE)
