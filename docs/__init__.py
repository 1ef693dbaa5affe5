"""Documentation. The tools are in `docs.tools`."""
