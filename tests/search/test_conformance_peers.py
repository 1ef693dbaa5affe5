"""The conformance suite for other people's planners, with which only benches compare."""

import pytest
from conformance import *  # noqa: F403
from conformance import FILES

pytestmark = pytest.mark.long
SHARDERS_HERE = FILES["peers"]
