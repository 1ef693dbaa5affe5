"""Simulated annealing: the sharder, the space that it searches as numbers, and its compiled core."""
