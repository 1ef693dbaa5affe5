"""One Prefect flow per stage, and refresh, which runs them all. `python -m flows.STAGE` runs one."""
