"""The conformance suite for other people's planners."""

from conformance import *  # noqa: F403
from conformance import FILES

SHARDERS_HERE = FILES["peers"]
