"""Policy and value losses. Each returns a loss to minimise and its metrics."""

from __future__ import annotations

import torch
from torch import Tensor

from rolecall.algorithms.kl import LOG_LIMIT
from rolecall.algorithms.masked import aggregate as aggregate_tokens
from rolecall.algorithms.masked import masked_mean, select
from rolecall.errors import UserError, nearest

KINDS = ("clip",)
LEVELS = ("token", "sequence")

Metrics = dict[str, float]


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    level: str = "token",
    kind: str = "clip",
    aggregate: str = "token-mean",
    total: float | Tensor | None = None,
    norm: float | None = None,
    weights: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """The clipped surrogate of PPO (1707.06347, eq. 7), with separate bounds (DAPO, 2503.14476, eq. 10).

    rho_t = pi / pi_old,   loss_t = -w_t min(rho_t A_t, clip(rho_t, 1 - clip_low, 1 + clip_high) A_t)

    Args:
        logprobs, old_logprobs: (B, T), of the policy in training and of the one that the ratio is to.
        advantages: (B, T), or (B,) for one a sequence.
        mask: (B, T), the action tokens.
        level: "token", or "sequence" for GSPO's ratio, the geometric mean over a sequence's tokens (2507.18071, eq. 7).
        aggregate, total, norm: see ``aggregate``. With ``total`` of the global batch, losses of micro-batches and
            ranks add up (so multiply by the world size where gradients are averaged over ranks).
        weights: (B, T) of ``importance_correction``.

    Returns:
        loss: scalar.
        metrics: loss, clip_fraction, approx_kl (k3 of old to new) add up over micro-batches as the loss does;
            ratio_max is a maximum.
    """
    if kind not in KINDS:
        raise UserError(f"Unknown kind {kind!r} of policy loss.{nearest(kind, KINDS)}")
    advantages = select(_per_token(advantages.detach(), mask), mask)
    log_ratio = _log_ratio(logprobs, old_logprobs, mask, level)
    ratio = log_ratio.exp()
    free, clipped = ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    objective = torch.minimum(free, clipped)
    if weights is not None:
        objective = objective * select(weights.detach(), mask)
    loss = -aggregate_tokens(objective, mask, aggregate, total=total, norm=norm)

    with torch.no_grad():
        mean = "token-mean" if aggregate == "token-mean" else "sequence-mean-token-mean"  # fractions need no norm
        clip_fraction = aggregate_tokens(clipped < free, mask, mean, total=total)
        approx_kl = aggregate_tokens(ratio - 1 - log_ratio, mask, mean, total=total)
        ratio_max = select(ratio, mask).amax() if mask.numel() else ratio.sum()
    return loss, _floats(loss=loss, clip_fraction=clip_fraction, approx_kl=approx_kl, ratio_max=ratio_max)


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    *,
    clip: float | None = 0.2,
    total: float | Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """Half the squared error of the Critic, clipped around its old values as in PPO's reference code.

    loss_t = max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2) / 2

    Args:
        values, old_values, returns, mask: (B, T).
        clip: how far a value may move in an update; None: any distance.
        total: action tokens of the global batch, see ``aggregate``.

    Returns:
        loss: scalar. metrics: loss and clip_fraction, which add up over micro-batches.
    """
    values, returns = select(values, mask), select(returns.detach(), mask)
    error = (values - returns).square()
    if clip is None:
        clipped = error
    else:
        old = select(old_values.detach(), mask)
        clipped = (torch.clamp(values, old - clip, old + clip) - returns).square()
    loss = 0.5 * masked_mean(torch.maximum(error, clipped), mask, total)
    return loss, _floats(loss=loss, clip_fraction=masked_mean(clipped > error, mask, total))


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """1 - Var(returns - values) / Var(returns) over the action tokens: 1 is a perfect Critic, 0 a constant one.

    0 where the returns do not vary. (B, T) each; of the whole batch, as it does not add up over micro-batches.
    """
    action = mask.bool()
    values, returns = values.detach()[action].double(), returns.detach()[action].double()
    if len(returns) < 2 or bool((returns == returns[0]).all()):
        return 0.0
    return 1 - float((returns - values).var() / returns.var())


def _log_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, level: str) -> Tensor:
    """log(pi / pi_old) a token, (B, T); bounded, so that no finite input makes an infinite ratio (and 0 * inf)."""
    if level not in LEVELS:
        raise UserError(f"Unknown level {level!r} of the ratio.{nearest(level, LEVELS)}")
    log_ratio = select(logprobs, mask) - select(old_logprobs.detach(), mask)
    if level == "sequence":
        mean = log_ratio.sum(-1, keepdim=True) / mask.bool().sum(-1, keepdim=True).clamp(min=1)
        log_ratio = mean.expand_as(log_ratio)
    return log_ratio.clamp(-LOG_LIMIT, LOG_LIMIT)


def _per_token(x: Tensor, mask: Tensor) -> Tensor:
    """(B,) -> (B, T), by the number of dimensions: broadcasting would pair the wrong tokens where B = T."""
    return x[:, None].expand(mask.shape) if x.dim() == 1 and x.shape[0] == mask.shape[0] else x


def _floats(**metrics: Tensor) -> Metrics:
    """To Python in one transfer: each ``item()`` would wait for the GPU."""
    return dict(
        zip(metrics, torch.stack([value.detach().double() for value in metrics.values()]).tolist(), strict=True)
    )
