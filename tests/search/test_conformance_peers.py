"""The conformance suite for other people's planners, with which only benches compare."""

import pytest
from suites import CHECKS, suite

from bench.peers import PEERS


@pytest.mark.long
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("peer", PEERS)
def test_peer(peer, check):
    getattr(suite(peer), check)()
