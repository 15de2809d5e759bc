"""Measurements on a GPU, one script for each; every one of them also runs on a CPU, small.

``python -m bench.gpu.snapshot``, ``.handover``, ``.replay``; ``python -m bench.gpu`` runs them all.
Progress goes to standard error, the result as JSON into the file that ``--out`` names.
"""

# Before anything here imports MLX: the engine sets the switches that MLX reads once.
import engine  # noqa: F401  for what its import does
