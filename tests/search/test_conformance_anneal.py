"""The conformance suite for annealing."""

from conformance import *  # noqa: F403
from conformance import FILES

SHARDERS_HERE = FILES["anneal"]
