"""The trainer and the engine never agree exactly on log-probabilities: importance weights for the difference."""

from __future__ import annotations

import torch
from torch import Tensor

from rolecall.algorithms.kl import LOG_LIMIT
from rolecall.algorithms.masked import select
from rolecall.errors import UserError, nearest

MODES = ("truncate", "none")


def importance_correction(
    train_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    *,
    mode: str = "truncate",
    cap: float = 2.0,
) -> Tensor:
    """Weights that make samples of the engine count as samples of the trainer's policy.

    w_t = min(pi_train(t) / pi_rollout(t), cap)    truncated importance sampling (Yao et al., 2025, "Your efficient RL
    framework secretly brings you off-policy RL training"; Ionides, 2008)

    Args:
        train_logprobs: (B, T), the trainer's, of the weights that generated (the old policy, not the one in training).
        rollout_logprobs: (B, T), the engine's, of the same tokens.
        mask: (B, T).
        mode: "truncate", or "none" for weight 1.
        cap: the largest weight.

    Returns:
        (B, T) weights for ``policy_loss``, detached, 0 where masked.
    """
    if mode not in MODES:
        raise UserError(f"Unknown correction {mode!r}.{nearest(mode, MODES)}")
    gap = select(train_logprobs.detach(), mask) - select(rollout_logprobs.detach(), mask)
    weights = torch.exp(gap.clamp(max=LOG_LIMIT)).clamp(max=cap) if mode == "truncate" else torch.ones_like(gap)
    return select(weights, mask)
