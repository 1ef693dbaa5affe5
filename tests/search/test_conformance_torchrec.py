"""The conformance suite for TorchRec's planner."""

from conformance import *  # noqa: F403
from conformance import FILES

SHARDERS_HERE = FILES["torchrec"]
