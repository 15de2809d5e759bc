"""Measurements of serving: real ``kvnode serve`` processes, asked as their clients ask.

Each number is a ratio of two things within one run, so that whatever else the machine does slows
both.
"""

from node.config import prepare_process

# Before anything here imports gRPC or MLX: one part runs an engine in this process.
prepare_process()
