"""The conformance suite for learned policies."""

from conformance import *  # noqa: F403
from conformance import FILES

SHARDERS_HERE = FILES["learned"]
