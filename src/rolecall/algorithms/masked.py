"""Sums and means over action tokens.

Every function here and in the rest of the package selects with ``where``: a masked slot may hold anything, NaN
included, and changes neither a value nor a gradient. Arithmetic is float32, or float64 where the input is.
"""

import torch
from torch import Tensor

from rolecall.errors import UserError, check_known

Metrics = dict[str, float]

AGGREGATES = ("token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum-norm")


def real(x: Tensor) -> Tensor:
    """float32, or float64 as it is: bfloat16 sums lose a token's contribution after a few hundred tokens."""
    return x if x.dtype == torch.float64 else x.float()


def select(x: Tensor, mask: Tensor) -> Tensor:
    """``x`` where the mask is set, else 0; (B, T) each.

    Raises:
        UserError: the shapes differ. Broadcasting here would silently pair values with other tokens.
    """
    if x.shape != mask.shape:
        raise UserError(f"Shapes differ: values {tuple(x.shape)}, mask {tuple(mask.shape)}. Both must be (B, T).")
    return torch.where(mask.bool(), real(x), 0.0)


def flat(high: Tensor, low: Tensor, dtype: torch.dtype) -> Tensor:
    """Whether values between ``low`` and ``high`` differ by no more than a few roundings in ``dtype``.

    0.1 + 0.2 and 0.3 are the same reward: their difference must not be divided by itself.
    """
    return high - low <= 4 * torch.finfo(dtype).eps * torch.maximum(high.abs(), low.abs())


def masked_mean(x: Tensor, mask: Tensor, total: float | Tensor | None = None) -> Tensor:
    """Sum of ``x`` over the mask, divided by ``total`` (default: the mask's own count). 0 if nothing is selected."""
    divisor = mask.bool().sum() if total is None else torch.as_tensor(total, device=x.device)
    return select(x, mask).sum() / divisor.clamp(min=1)


def aggregate(
    x: Tensor,
    mask: Tensor,
    how: str = "token-mean",
    *,
    total: float | Tensor | None = None,
    norm: float | None = None,
) -> Tensor:
    """One number out of a value a token.

    ==============================  =================================================  ======================
    how                             value                                              used by
    ==============================  =================================================  ======================
    token-mean                      sum over all tokens / tokens                       DAPO (2503.14476) eq. 8
    sequence-mean-token-mean        sum over sequences of their mean / sequences       GRPO (2402.03300) eq. 3
    sequence-mean-token-sum-norm    sum over sequences of (sum / norm) / sequences     Dr. GRPO (2503.20783)
    ==============================  =================================================  ======================

    Args:
        x, mask: (B, T). Sequences without an action token count nowhere.
        total: what the last division divides by, counted over the global batch (all ranks and accumulated
            micro-batches): action tokens for token-mean, sequences with an action token for the other two. The parts'
            results then add up to the whole's, however the batch was split. Default: the count of this call.
        norm: constant length that sequence-mean-token-sum-norm divides by (the longest response allowed).
    """
    if how == "token-mean":
        return masked_mean(x, mask, total)
    check_known("aggregate", how, AGGREGATES)
    lengths = mask.bool().sum(-1)
    if how == "sequence-mean-token-sum-norm":
        if norm is None or norm <= 0:
            raise UserError(f"{how} divides by a constant length, but norm is {norm!r}: give the longest response.")
        sequences = select(x, mask).sum(-1) / norm
    else:
        sequences = select(x, mask).sum(-1) / lengths.clamp(min=1)
    return masked_mean(sequences, lengths > 0, total)


def floats(**metrics: Tensor) -> Metrics:
    """To Python in one transfer: each ``item()`` would wait for the GPU."""
    values = torch.stack([value.detach().double() for value in metrics.values()]).tolist()
    return dict(zip(metrics, values, strict=True))
