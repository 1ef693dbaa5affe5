"""The conformance suite for what ShardCore ships."""

import pytest
from suites import CHECKS, SHIPPED, suite


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("sharder", SHIPPED)
def test_sharder(sharder, check):
    getattr(suite(sharder), check)()
