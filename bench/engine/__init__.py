"""Measurements of the engine: ratios of two things that run in turns, in one process."""
