"""What becomes of a text when PyTorch computes its prompt and MLX goes on with it.

``python -m bench.produce MODEL [--dtype float32] [--tokens 700] [--steps 256] [--json]`` needs both
MLX and the extra ``torch`` in one environment. Both continue greedily from the same rows.
"""
