"""The conformance suite for the baselines."""

from conformance import *  # noqa: F403
from conformance import FILES

SHARDERS_HERE = FILES["greedy"]
