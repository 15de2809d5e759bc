"""Muon for the weight matrices, AdamW for embedding and norms, and the learning-rate schedule."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, nn

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ROUNDS = 5


def orthogonalised(stack: Tensor) -> Tensor:
    """Newton-Schulz iteration on a stack of matrices, [count, rows, columns], in bfloat16."""
    x = stack.bfloat16()
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(ROUNDS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).float()


class Muon:
    """Momentum, orthogonalised, scaled so that one learning rate suits Muon and AdamW alike."""

    def __init__(self, matrices: list[nn.Parameter], momentum: float = 0.95) -> None:
        self.momentum = momentum
        self.groups: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
        for matrix in matrices:
            self.groups[matrix.shape].append(matrix)
        self.buffers = {
            shape: torch.zeros(len(group), *shape, device=group[0].device)
            for shape, group in self.groups.items()
        }

    @torch.no_grad()
    def step(self, learning_rate: float, weight_decay: float) -> None:
        """Update all matrices of one shape together: few large products, not many small ones."""
        for shape, group in self.groups.items():
            gradient = torch.stack([matrix.grad for matrix in group])
            buffer = self.buffers[shape]
            buffer.lerp_(gradient, 1 - self.momentum)
            update = orthogonalised(gradient.lerp(buffer, self.momentum))
            update *= -learning_rate * 0.2 * max(shape) ** 0.5
            torch._foreach_mul_(group, 1 - learning_rate * weight_decay)
            torch._foreach_add_(group, list(update.unbind()))


class Optimizer:
    """Both optimisers behind one ``step``."""

    def __init__(self, model: nn.Module, weight_decay: float) -> None:
        matrices, others = [], []
        for name, parameter in model.named_parameters():
            is_matrix = parameter.dim() == 2 and "embed" not in name
            (matrices if is_matrix else others).append(parameter)
        self.weight_decay = weight_decay
        self.parameters = matrices + others
        self.muon = Muon(matrices)
        self.adam = torch.optim.AdamW(others, betas=(0.9, 0.98), eps=1e-9, weight_decay=0.0)

    def step(self, learning_rate: float) -> None:
        """Clip the gradients to norm 1, update, and clear them."""
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.muon.step(learning_rate, self.weight_decay)
        for group in self.adam.param_groups:
            group["lr"] = learning_rate
        self.adam.step()
        for parameter in self.parameters:
            parameter.grad = None


def learning_rate(step: int, steps: int, peak: float, warmup: int, decay_share: float) -> float:
    """Warm up, stay, and fall in a straight line to zero over the last share of the steps."""
    decay = max(int(steps * decay_share), 1)
    return peak * min((step + 1) / warmup, 1.0, (steps - step) / decay)
