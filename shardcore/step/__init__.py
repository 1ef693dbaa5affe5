"""One training step of a plan. Each of its choices (kind, collective, memory tier, pipeline) is a catalog of rows."""
