"""The output embedding, with logits in float32 whatever type the model computes in.

Logits of a real model reach 20 and more, where bfloat16 steps by 0.125: rounded to it, they alone move
log-probabilities by 0.03 (MiniMax-M1, arXiv:2506.13585, section 3.2, found training to stall on that).
"""

from typing import Any

import torch
from torch import Tensor, nn

from rolecall.models.invariant import kernels

ROWS = 1024  # of the output embedding in one matrix product on the CPU


@torch.no_grad()
def logits(model: nn.Module, hidden: Tensor, *, invariant: bool = False) -> Tensor:
    """The model's logits, float32 or wider, without a gradient: (n, H) hidden states -> (n, V)."""
    any_model: Any = model
    head = any_model.get_output_embeddings()
    if type(head) is not nn.Linear:
        return head(hidden).to(torch.promote_types(hidden.dtype, torch.float32))
    out = product(hidden, head.weight, invariant=invariant)
    return out if head.bias is None else out.add_(head.bias)


def product(a: Tensor, b: Tensor, *, invariant: bool = False) -> Tensor:
    """a @ b.T in float32 or wider, without a gradient: sums of 16-bit products are not rounded to 16 bits.

    a (n, K), b (m, K) -> (n, m). ``invariant``: a row's bits depend on no other row of a, see ``invariant.py``.
    """
    if invariant:
        return kernels().product(a, b, None, torch.float32)
    if a.dtype in (torch.bfloat16, torch.float16):
        if a.is_cuda:
            return torch.mm(a, b.t(), out_dtype=torch.float32)
        return a.float() @ b.float().t()
    if a.is_cuda:
        return a @ b.t()
    # MKL takes twice as long for the whole vocabulary at once as for pieces of it.
    out = a.new_empty(len(a), len(b))
    for rows, part in zip(b.split(ROWS), out.split(ROWS, 1), strict=True):
        torch.mm(a, rows.t(), out=part)
    return out
