"""One training step of a plan: the axes that it has, each a table of rows."""
