"""A node that computes prompts with PyTorch, for people who have no MLX on their CUDA machine.

It stands behind the same sessions and moves as any other node: :class:`TorchModel` and
:class:`TorchGeneration` are to them what :class:`engine.Model` and :class:`engine.Generation` are.
The folder :mod:`node.produce.network` alone touches torch and transformers.
"""
