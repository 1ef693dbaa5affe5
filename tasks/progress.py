"""Progress of a stage in its Prefect run: in the log, and on the screen."""

from __future__ import annotations

from prefect import get_run_logger

from shardcore.measure.tally import Tally
from tasks import console


class RunProgress:
    """The progress of a run (see shardcore.stages.progress.Progress)."""

    def __init__(self) -> None:
        logger = get_run_logger()
        self.info, self.warning = logger.info, logger.warning

    def show(self, tally: Tally) -> None:
        console.show_progress(tally.done_share, tally.progress_line)
