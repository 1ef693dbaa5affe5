"""One Prefect flow per stage, and refresh, which runs them all. `python -m flows.STAGE` runs one."""

import tasks as tasks  # says what is missing, before a flow imports it
