"""A Prefect flow for each stage, and refresh, which runs them all. `python -m flows.STAGE` runs one."""

import tasks as tasks  # it names missing packages, before a flow imports them
