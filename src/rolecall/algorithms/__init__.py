"""The objectives: pure tensor functions, each with its formula and its source.

Tensors are (B, T), one row a sample, right-padded; masks are bool or 0/1 and mark the tokens that the policy chose.
"""

from rolecall.algorithms.advantages import (
    estimate_advantages,
    gae,
    group_advantages,
    overlong_filter,
    overlong_penalty,
    token_rewards,
    whiten,
)
from rolecall.algorithms.corrections import importance_correction
from rolecall.algorithms.kl import AdaptiveKL, entropy, full_kl, kl
from rolecall.algorithms.losses import explained_variance, policy_loss, value_loss
from rolecall.algorithms.masked import aggregate, masked_mean
from rolecall.algorithms.preference import dpo_loss, reward_model_loss, sequence_logprobs

__all__ = [
    "AdaptiveKL",
    "aggregate",
    "dpo_loss",
    "entropy",
    "estimate_advantages",
    "explained_variance",
    "full_kl",
    "gae",
    "group_advantages",
    "importance_correction",
    "kl",
    "masked_mean",
    "overlong_filter",
    "overlong_penalty",
    "policy_loss",
    "reward_model_loss",
    "sequence_logprobs",
    "token_rewards",
    "value_loss",
    "whiten",
]
