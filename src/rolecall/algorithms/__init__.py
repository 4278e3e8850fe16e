"""The objectives: pure tensor functions, each with its formula and its source.

Tensors are (B, T), one row a sample, right-padded; masks are bool or 0/1 and mark the tokens that the policy chose.
"""

from rolecall.algorithms.advantages import gae, group_advantages, token_rewards, whiten
from rolecall.algorithms.corrections import importance_correction
from rolecall.algorithms.kl import AdaptiveKL, kl
from rolecall.algorithms.losses import explained_variance, policy_loss, value_loss
from rolecall.algorithms.masked import aggregate, masked_mean

__all__ = [
    "AdaptiveKL",
    "aggregate",
    "explained_variance",
    "gae",
    "group_advantages",
    "importance_correction",
    "kl",
    "masked_mean",
    "policy_loss",
    "token_rewards",
    "value_loss",
    "whiten",
]
