"""The output embedding, with logits in float32 whatever type the model computes in.

Logits of a real model reach 20 and more, where bfloat16 steps by 0.125: rounded to it, they alone move
log-probabilities by 0.03 (MiniMax-M1, arXiv:2506.13585, section 3.2, found training to stall on that).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS = 1024  # of the output embedding in one matrix product on the CPU


def logits(model: nn.Module, hidden: Tensor) -> Tensor:
    """The model's logits, float32 or wider: (n, H) hidden states -> (n, V)."""
    any_model: Any = model
    head = any_model.get_output_embeddings()
    if type(head) is not nn.Linear or head.bias is not None:
        return head(hidden).to(torch.promote_types(hidden.dtype, torch.float32))
    if hidden.dtype in (torch.bfloat16, torch.float16):
        return _Float32Product.apply(hidden, head.weight)
    if hidden.is_cuda or torch.is_grad_enabled():
        return F.linear(hidden, head.weight)
    # MKL takes twice as long for the whole vocabulary at once as for pieces of it.
    out = hidden.new_empty(len(hidden), len(head.weight))
    for rows, part in zip(head.weight.split(ROWS), out.split(ROWS, 1), strict=True):
        torch.mm(hidden, rows.t(), out=part)
    return out


class _Float32Product(torch.autograd.Function):
    """hidden @ weight.T of 16-bit tensors without rounding the sums to 16 bits."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        if hidden.is_cuda:
            return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
        return hidden.float() @ weight.float().t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        hidden, weight = ctx.saved_tensors
        gradient = gradient.to(hidden.dtype)
        return gradient @ weight, gradient.t() @ hidden
