"""Policy and value losses. Each returns a loss to minimise and its metrics."""

import torch
from torch import Tensor

from rolecall.algorithms.kl import LOG_LIMIT, kl
from rolecall.algorithms.masked import Metrics, floats, masked_mean, select
from rolecall.algorithms.masked import aggregate as aggregate_tokens
from rolecall.errors import check_known

KINDS = ("clip", "cispo", "reinforce")
LEVELS = ("token", "sequence", "sequence-token")


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    level: str = "token",
    kind: str = "clip",
    aggregate: str = "token-mean",
    total: float | Tensor | None = None,
    norm: float | None = None,
    weights: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """Minus the aggregate of w_t J_t, with rho = pi / pi_old and clip(x) = min(max(x, 1 - clip_low), 1 + clip_high).

    * kind "clip": J = min(rho A, clip(rho) A), PPO (1707.06347, eq. 7) with the separate bounds of DAPO (2503.14476,
      eq. 10). With ``dual_clip`` c > 1, J = max(J, c A) where A < 0 (1912.09729, eq. 5): a bad token that the policy
      has made much *more* likely no longer outweighs the batch.
    * kind "cispo": J = stop(clip(rho)) A log pi (MiniMax-M1, 2506.13585, eq. 4 and 5): the weight is bounded, yet every
      token keeps its gradient. The paper bounds it from above only: clip_low 1.
    * kind "reinforce": J = A log pi (Williams, 1992). No ratio: for samples of the policy itself.

    * level "token": rho_t is the token's own.
    * level "sequence": rho_t is the geometric mean over its sequence's tokens, GSPO (2507.18071, eq. 7). Its bounds
      are 3e-4 and 4e-4 in the paper (section 5.1), and its aggregate is sequence-mean-token-mean.
    * level "sequence-token": the same value with the gradient of the token's own log pi, GSPO-token (eq. 14), for
      advantages that differ within a sequence.

    Args:
        logprobs, old_logprobs: (B, T), of the policy in training and of the one that the ratio is to.
        advantages: (B, T), or (B,) for one a sequence.
        mask: (B, T), the action tokens.
        aggregate, total, norm: see ``aggregate``. With ``total`` of the global batch, losses of micro-batches and
            ranks add up (so multiply by the world size where gradients are averaged over ranks).
        weights: (B, T) of ``importance_correction``.

    Returns:
        loss: scalar.
        metrics: loss, clip_fraction, approx_kl (k3 a token, of old to new) add up over micro-batches as the loss does;
            ratio_max is a maximum.
    """
    check_known("kind of policy loss", kind, KINDS)
    advantages = select(_per_token(advantages.detach(), mask), mask)
    log_ratio = _log_ratio(logprobs, old_logprobs, mask, level)
    ratio = log_ratio.exp()
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    if kind == "clip":
        objective, clipped = _clipped(ratio * advantages, bounded * advantages, advantages, dual_clip)
    elif kind == "cispo":
        objective, clipped = bounded.detach() * advantages * select(logprobs, mask), bounded != ratio
    else:
        objective, clipped = advantages * select(logprobs, mask), torch.zeros_like(ratio)
    if weights is not None:
        objective = objective * select(weights.detach(), mask)
    loss = -aggregate_tokens(objective, mask, aggregate, total=total, norm=norm)

    with torch.no_grad():
        mean = "token-mean" if aggregate == "token-mean" else "sequence-mean-token-mean"  # fractions need no norm
        clip_fraction = aggregate_tokens(clipped, mask, mean, total=total)
        # Of the tokens at any level: a sequence's mean log-ratio may be 0 however far its tokens have moved.
        moved = kl(old_logprobs, logprobs, estimator="k3", mask=mask)
        approx_kl = aggregate_tokens(moved, mask, mean, total=total)
        ratio_max = select(ratio, mask).amax() if mask.numel() else ratio.sum()
    return loss, floats(loss=loss, clip_fraction=clip_fraction, approx_kl=approx_kl, ratio_max=ratio_max)


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
    return loss, floats(loss=loss, clip_fraction=masked_mean(clipped > error, mask, total))


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """1 - Var(returns - values) / Var(returns) over the action tokens: 1 is a perfect Critic, 0 a constant one.

    0 where the returns do not vary. (B, T) each; of the whole batch, as it does not add up over micro-batches.
    """
    action = mask.bool()
    values, returns = values.detach()[action].double(), returns.detach()[action].double()
    if len(returns) < 2 or bool((returns == returns[0]).all()):
        return 0.0
    return 1 - float((returns - values).var() / returns.var())


def _clipped(free: Tensor, bounded: Tensor, advantages: Tensor, dual_clip: float | None) -> tuple[Tensor, Tensor]:
    """PPO's objective a token, and where it is not the free one."""
    objective = torch.minimum(free, bounded)
    if dual_clip is not None:
        objective = torch.where(advantages < 0, torch.maximum(objective, dual_clip * advantages), objective)
    return objective, objective != free


def _log_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, level: str) -> Tensor:
    """log(pi / pi_old) a token, (B, T); bounded, so that no finite input makes an infinite ratio (and 0 * inf)."""
    check_known("level of the ratio", level, LEVELS)
    new = select(logprobs, mask)
    log_ratio = new - select(old_logprobs.detach(), mask)
    if level != "token":
        mean = log_ratio.sum(-1, keepdim=True) / mask.bool().sum(-1, keepdim=True).clamp(min=1)
        # In the token form the value is the sequence's and the gradient the token's own.
        log_ratio = mean.expand_as(new) if level == "sequence" else mean.detach() + (new - new.detach())
    return log_ratio.clamp(-LOG_LIMIT, LOG_LIMIT)


def _per_token(x: Tensor, mask: Tensor) -> Tensor:
    """(B,) -> (B, T), by the number of dimensions: broadcasting would pair the wrong tokens where B = T."""
    return x[:, None].expand(mask.shape) if x.dim() == 1 and x.shape[0] == mask.shape[0] else x
