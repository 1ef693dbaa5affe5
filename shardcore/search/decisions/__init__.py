"""Decisions before a search: each proposes problems, and one driver has them searched (see driver.py)."""
