"""The conformance suite for the default search."""

from conformance import *  # noqa: F403
from conformance import FILES

SHARDERS_HERE = FILES["portfolio"]
