"""The conformance suite for NeuroShard's search."""

from conformance import *  # noqa: F403
from conformance import FILES

SHARDERS_HERE = FILES["neuroshard"]
