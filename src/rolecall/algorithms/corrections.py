"""The trainer and the engine never agree exactly on log-probabilities: importance weights for the difference."""

import torch
from torch import Tensor

from rolecall.algorithms.kl import LOG_LIMIT
from rolecall.algorithms.masked import select
from rolecall.errors import check_known

MODES = ("truncate", "mask", "none")
LEVELS = ("token", "sequence")


def importance_correction(
    train_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    *,
    mode: str = "truncate",
    cap: float = 2.0,
    floor: float = 0.0,
    level: str = "token",
) -> Tensor:
    """Weights that make samples of the engine count as samples of the trainer's policy.

    r = pi_train / pi_rollout, of a token or (level "sequence") the product over a sequence's action tokens

    * "truncate": w = min(r, cap), truncated importance sampling (Ionides, 2008; for RL engines Yao et al., 2025, "Your
      efficient RL framework secretly brings you off-policy RL training").
    * "mask": w = r if floor <= r <= cap else 0, masked importance sampling (Liu et al., 2025, "When speed kills
      stability"; with a floor and level "token" it is IcePop's, 2510.18855): what the trainer would hardly have
      sampled teaches nothing.

    With the weights of a *proximal* policy over the behaviour policy, and the ratio of ``policy_loss`` taken to the
    proximal policy, this is decoupled PPO (2110.00641) for stale samples.

    Args:
        train_logprobs: (B, T), the trainer's, of the weights that generated (the old policy, not the one in training).
        rollout_logprobs: (B, T), the engine's, of the same tokens.
        mask: (B, T).
        mode: "truncate", "mask", or "none" for weight 1.
        cap, floor: the largest weight, and the smallest that "mask" keeps.

    Returns:
        (B, T) weights for ``policy_loss``, detached, 0 where masked.
    """
    check_known("correction", mode, MODES)
    check_known("level of the correction", level, LEVELS)
    gap = select(train_logprobs.detach(), mask) - select(rollout_logprobs.detach(), mask)
    if level == "sequence":
        gap = gap.sum(-1, keepdim=True).expand_as(gap)
    ratio = gap.clamp(-LOG_LIMIT, LOG_LIMIT).exp()
    if mode == "truncate":
        weights = ratio.clamp(max=cap)
    elif mode == "mask":
        weights = torch.where((ratio >= floor) & (ratio <= cap), ratio, 0.0)
    else:
        weights = torch.ones_like(ratio)
    return select(weights, mask)
