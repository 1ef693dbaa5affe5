"""Progress of a stage in its Prefect run: in the log, and on the screen."""

from __future__ import annotations

import time

from prefect import get_run_logger

from shardcore.measure.tally import Tally
from tasks import console


class RunProgress:
    """The progress of a run (see shardcore.stages.progress.Progress).

    every_s: time between two lines in the log. The end of each kind of work has a line, too.
    """

    every_s = 30.0

    def __init__(self) -> None:
        logger = get_run_logger()
        self.info, self.warning = logger.info, logger.warning
        self._logged_s = time.monotonic()

    def show(self, tally: Tally) -> None:
        console.show_progress(tally.done_share, tally.progress_line)
        if time.monotonic() - self._logged_s >= self.every_s or tally.done == tally.total:
            self._logged_s = time.monotonic()
            self.publish(tally)

    def publish(self, tally: Tally) -> None:
        """Log the progress."""
        self.info("%s", tally.progress_line)
