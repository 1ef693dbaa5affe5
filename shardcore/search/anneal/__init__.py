"""Simulated annealing: the sharder, its search space as arrays, and its compiled core."""
