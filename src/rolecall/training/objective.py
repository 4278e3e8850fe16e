"""The policy's objective, put together as configured."""

from torch import Tensor

from rolecall.algorithms import aggregate, importance_correction, kl, masked_mean, policy_loss
from rolecall.algorithms.masked import select
from rolecall.config import Algorithm
from rolecall.training.trained import Totals


def policy_objective(
    settings: Algorithm,
    logprobs: Tensor,
    entropy: Tensor,
    mask: Tensor,
    *,
    advantages: Tensor,
    old_logprobs: Tensor,
    engine_logprobs: Tensor,
    ref_logprobs: Tensor | None = None,
    beta: float = 0.0,
    totals: Totals,
    norm: float,
) -> tuple[Tensor, dict[str, float | Tensor]]:
    """What the Actor minimises: policy loss + beta KL(policy, Reference) - entropy_coef entropy.

    Args:
        logprobs, entropy: (B, T), of the policy in training.
        mask, advantages: (B, T).
        old_logprobs: (B, T), that the ratio is to.
        engine_logprobs: (B, T), of the policy that generated, for the correction.
        ref_logprobs: (B, T), where beta is not 0.
        totals: of the mini-batch.
        norm: the longest response, for "sequence-mean-token-sum-norm".

    Returns:
        The loss, and metrics that add up over micro-batches ("max": the largest).
    """
    total = totals.tokens if settings.aggregate == "token-mean" else totals.sequences

    def mean(x: Tensor) -> Tensor:
        return aggregate(x, mask, settings.aggregate, total=total, norm=norm)

    weights = importance_correction(
        old_logprobs,
        engine_logprobs,
        mask,
        mode=settings.correction,
        level=settings.correction_level,
        cap=settings.correction_cap,
        floor=settings.correction_floor,
    )
    loss, metrics = policy_loss(
        logprobs,
        old_logprobs,
        advantages,
        mask,
        kind=settings.loss,
        level=settings.ratio,
        clip_low=settings.clip_low,
        clip_high=settings.clip_high,
        dual_clip=settings.dual_clip or None,
        aggregate=settings.aggregate,
        total=total,
        norm=norm,
        weights=weights,
    )
    if beta > 0:
        assert ref_logprobs is not None
        # The estimate is an expectation over the policy in training, so from the engine's samples it takes the
        # correction's weights, and from the old policy's the ratio.
        ratio = importance_correction(logprobs, old_logprobs, mask, cap=settings.correction_cap)
        drift = kl(logprobs, ref_logprobs, estimator=settings.kl_estimator, mask=mask)
        loss = loss + beta * mean(weights * ratio * drift)
    if settings.entropy_coef > 0:
        loss = loss - settings.entropy_coef * mean(entropy)

    gap = select(old_logprobs - engine_logprobs, mask).abs()
    cut = weights == 0 if settings.correction == "mask" else weights >= settings.correction_cap
    return loss, metrics | {
        "tokens": mask.sum(),
        "entropy": masked_mean(entropy.detach(), mask, totals.computed),
        "mismatch/mean": masked_mean(gap, mask, totals.computed),
        "mismatch/max": gap.max(),
        "correction/mean": masked_mean(weights, mask, totals.computed),
        "correction/max": weights.max(),
        "correction/cut": masked_mean(cut, mask, totals.computed),
    }
