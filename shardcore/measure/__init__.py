"""Measuring real kernels and collectives on the device at hand."""
