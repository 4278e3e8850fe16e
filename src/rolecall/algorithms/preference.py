"""Losses on pairs of a chosen and a rejected response."""

import torch.nn.functional as F
from torch import Tensor

from rolecall.algorithms.masked import Metrics, floats, real, select
from rolecall.errors import UserError, check_known

KINDS = ("sigmoid", "ipo")


def reward_model_loss(
    chosen: Tensor, rejected: Tensor, *, margin: Tensor | float = 0.0, total: float | None = None
) -> tuple[Tensor, Metrics]:
    """Bradley-Terry: -log sigmoid(r_chosen - r_rejected - margin).

    InstructGPT, 2203.02155, eq. 1; the margin is that of Llama 2's reward models, 2307.09288.

    Args:
        chosen, rejected: (N,) scores of a pair's responses. margin: (N,) or one number, larger for clearer preferences.
        total: pairs of the global batch; default: N.

    Returns:
        loss: scalar. metrics: loss, accuracy (ties count as wrong), margin (mean r_chosen - r_rejected); they add up.
    """
    if chosen.shape != rejected.shape:
        raise UserError(
            f"{tuple(chosen.shape)} chosen and {tuple(rejected.shape)} rejected scores: one of each a pair."
        )
    gap = real(chosen) - real(rejected)
    loss = _mean(-F.logsigmoid(gap - margin), total)
    return loss, floats(loss=loss, accuracy=_mean(gap > 0, total), margin=_mean(gap, total))


def dpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    *,
    beta: float = 0.1,
    kind: str = "sigmoid",
    label_smoothing: float = 0.0,
    total: float | None = None,
) -> tuple[Tensor, Metrics]:
    """Direct preference optimisation: the policy's own log-ratio to the Reference is the reward.

    h = (log pi - log ref)(chosen) - (log pi - log ref)(rejected)

    * kind "sigmoid": l(h) = -log sigmoid(beta h)          (DPO, 2305.18290, eq. 7)
    * kind "ipo":     l(h) = (h - 1 / (2 beta))^2          (IPO, 2310.12036, eq. 17): bounded where DPO drifts on

    loss = (1 - label_smoothing) l(h) + label_smoothing l(-h): that share of the labels is taken to be wrong
    (conservative DPO; Mitchell, 2023).

    Args:
        chosen, rejected, ref_chosen, ref_rejected: (N,) from ``sequence_logprobs``. With its means instead of sums the
            losses are length-normalised, as IPO's authors advise for IPO.
        total: pairs of the global batch; default: N.

    Returns:
        loss: scalar. metrics: loss, accuracy (of the implied rewards; ties count as wrong), chosen_reward and
            rejected_reward (beta times the log-ratio), margin (their difference); they add up over micro-batches.
    """
    check_known("kind of preference loss", kind, KINDS)
    if not 0 <= label_smoothing < 0.5:
        raise UserError(f"label_smoothing is {label_smoothing}: from 0.5 on the labels would say nothing.")
    if len({x.shape for x in (chosen, rejected, ref_chosen, ref_rejected)}) > 1:
        raise UserError("chosen, rejected and their Reference log-probabilities differ in shape: one of each a pair.")
    chosen_ratio = real(chosen) - real(ref_chosen.detach())
    rejected_ratio = real(rejected) - real(ref_rejected.detach())
    h = chosen_ratio - rejected_ratio

    def pair_loss(h: Tensor) -> Tensor:
        return -F.logsigmoid(beta * h) if kind == "sigmoid" else (h - 1 / (2 * beta)).square()

    losses = pair_loss(h)
    if label_smoothing > 0:  # not with 0: the other label's loss may be infinite
        losses = (1 - label_smoothing) * losses + label_smoothing * pair_loss(-h)
    loss = _mean(losses, total)
    return loss, floats(
        loss=loss,
        accuracy=_mean(h > 0, total),
        chosen_reward=beta * _mean(chosen_ratio, total),
        rejected_reward=beta * _mean(rejected_ratio, total),
        margin=beta * _mean(h, total),
    )


def sequence_logprobs(logprobs: Tensor, mask: Tensor, *, length_normalized: bool = False) -> Tensor:
    """Log-probability of each response: the sum over its action tokens, or their mean; (B, T) -> (B,)."""
    summed = select(logprobs, mask).sum(-1)
    return summed / mask.bool().sum(-1).clamp(min=1) if length_normalized else summed


def _mean(x: Tensor, total: float | None) -> Tensor:
    """Over the pairs: their sum divided by ``total``, or by their own number."""
    return real(x).sum() / max(1, len(x) if total is None else total)
