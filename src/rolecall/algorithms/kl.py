"""How far the policy is from the Reference, and the controller that holds it there."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rolecall.algorithms.masked import real, select
from rolecall.errors import RunError, UserError, check_known

ESTIMATORS = ("k1", "k2", "k3")
RULES = ("proportional", "double")
# e^20 is 5e8: nothing that an estimate or a ratio should go beyond, and far from float32's overflow at e^88.
LOG_LIMIT = 20.0


def kl(logprobs: Tensor, ref_logprobs: Tensor, *, estimator: str = "k2", mask: Tensor | None = None) -> Tensor:
    """A one-sample estimate of KL(policy, Reference) a token, for tokens the policy sampled.

    With d = log pi - log ref (Schulman, "Approximating KL divergence", joschu.net/blog/kl-approx.html):

    ==  ==================  =====================================  =====================================
    k1  d                   unbiased, any sign                     gradient is 0 in expectation
    k2  d^2 / 2             biased, second-order                   gradient is exactly the KL's on-policy
    k3  exp(-d) - 1 + d     unbiased, never negative               gradient is that of KL(Reference, policy)
    ==  ==================  =====================================  =====================================

    So k1 in the reward, k2 in the loss, k3 as the metric (docs/grpo.md shows it on three tokens).

    Args:
        logprobs, ref_logprobs: (B, T). Gradients flow to ``logprobs`` only.
        mask: (B, T). Needed where masked slots may hold NaN and the result is differentiated.

    Returns:
        (B, T), 0 where masked.
    """
    check_known("KL estimator", estimator, ESTIMATORS)
    mask = torch.ones_like(logprobs, dtype=torch.bool) if mask is None else mask
    d = select(logprobs, mask) - select(ref_logprobs.detach(), mask)
    if estimator == "k1":
        return d
    if estimator == "k2":
        return 0.5 * d.square()
    # expm1: near 0, where most tokens are, exp(-d) - 1 is nothing but rounding, of either sign.
    return torch.expm1((-d).clamp(max=LOG_LIMIT)) + d


def full_kl(logits: Tensor, ref_logits: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """KL(policy, Reference) a token over the whole vocabulary: exact in value and gradient, where logits are at hand.

    sum over v of p_v (log p_v - log q_v),   p and q the softmax of the logits

    Args:
        logits, ref_logits: (B, T, V); -inf is an impossible token. Gradients flow to ``logits`` only.
        mask: (B, T).

    Returns:
        (B, T), 0 where masked; inf where the policy allows what the Reference makes impossible.
    """
    logp = _log_softmax(logits, mask)
    gap = logp - _log_softmax(ref_logits.detach(), mask)
    # A token that is impossible, or so unlikely that p is 0 in this type, adds nothing, while 0 * inf would be NaN.
    p = logp.exp()
    return (p * torch.where(p > 0, gap, 0.0)).sum(-1)


def entropy(logits: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Entropy of the policy at each token, in nats: (B, T, V) logits -> (B, T), 0 where masked.

    For an entropy bonus (1707.06347, eq. 9) subtract ``coefficient * aggregate(entropy(...), ...)`` from the loss.
    """
    logp = _log_softmax(logits, mask)
    total = -(logp.exp() * torch.where(logp > -torch.inf, logp, 0.0)).sum(-1)
    return total if mask is None else select(total, mask)


def _log_softmax(logits: Tensor, mask: Tensor | None) -> Tensor:
    logits = logits if mask is None else select(logits, mask[..., None].expand_as(logits))
    return real(logits).log_softmax(-1)


@dataclass
class AdaptiveKL:
    """beta that moves the measured KL towards a target.

    * rule "proportional" (Ziegler et al., 1909.08593, section 2.2):
      error = clip(KL / target - 1, -0.2, 0.2),   beta <- beta (1 + error n / horizon)
    * rule "double" (PPO, 1707.06347, section 4): beta <- 2 beta if KL > 1.5 target, beta / 2 if KL < target / 1.5

    Args:
        beta: the present weight of the KL term; all the state there is.
        target: the KL a token to hold; None leaves beta as it is.
        horizon: samples over which beta adapts ("proportional").
        rule: "proportional" or "double".
    """

    beta: float
    target: float | None
    horizon: float
    rule: str = "proportional"

    def __post_init__(self) -> None:
        if not ((self.target is None or self.target > 0) and self.horizon > 0 and self.beta >= 0):
            raise UserError(f"{self}: target and horizon must be above 0 and beta not below.")
        check_known("rule of the KL controller", self.rule, RULES)

    def update(self, measured_kl: float, n: int) -> float:
        """The new beta after ``n`` samples with this mean KL; never lower for a higher KL.

        Raises:
            RunError: the measured KL is not a finite number.
        """
        if not math.isfinite(measured_kl):
            raise RunError(f"The KL to the Reference is {measured_kl}: the policy has diverged.")
        if self.target is None:
            return self.beta
        if self.rule == "double":
            self.beta *= 2.0 if measured_kl > 1.5 * self.target else 0.5 if measured_kl < self.target / 1.5 else 1.0
            return self.beta
        error = min(max(measured_kl / self.target - 1, -0.2), 0.2)
        # More samples than the horizon count as the horizon, else beta could turn negative.
        self.beta *= 1 + error * min(n / self.horizon, 1.0)
        return self.beta
