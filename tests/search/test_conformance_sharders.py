"""The conformance suite for what ShardCore ships."""

from conformance import *  # noqa: F403
from conformance import FILES

SHARDERS_HERE = FILES["sharders"]
