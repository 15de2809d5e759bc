"""kvpack: the format. Seals, stores, verifies and describes the KV state of one LLM session.

This package stands alone: it imports neither MLX, gRPC nor HTTP. ``engine`` and ``node`` build on
it, never the other way round.
"""

__version__ = "0.1.0"
