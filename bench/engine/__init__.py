"""Measurements of the engine: ratios of two things that run in turns, in one process."""

# Before anything here imports MLX: the engine sets the switches that MLX reads once.
import engine  # noqa: F401  for what its import does
