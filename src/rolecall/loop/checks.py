"""What every run asserts at its first step, when the right answers are known in advance."""

import statistics
from collections import Counter

from rolecall.config import Config
from rolecall.errors import RunError
from rolecall.loop.stages import Group, Metrics
from rolecall.samples import Sample

# Mean |difference| of log-probabilities. bfloat16 rounding alone makes 0.03 of a 135M model's (plain transformers
# against itself with another attention kernel); a wrong temperature, a shift or stale weights make 0.1 and more.
MISMATCH_LIMIT = 0.06


def first_step(
    config: Config, groups: list[Group], samples: list[Sample], metrics: Metrics, *, untrained: bool
) -> None:
    """Stop a run whose first step shows that a part disagrees with another.

    Args:
        untrained: the Actor generated with the weights that it started from, which are the Reference's.

    Raises:
        RunError: with the two things compared and their values.
    """
    _groups_complete(config, groups, samples)
    _versions_known(samples)
    action_tokens = sum(sample.action_tokens for sample in samples)
    if untrained and config.algorithm.overlong_filter and action_tokens == 0:
        raise RunError(
            f"All {len(samples)} responses of the first step were cut off at rollout.max_tokens = "
            f"{config.rollout.max_tokens}, and algorithm.overlong_filter takes those out of training: nothing is left "
            "to learn from. Raise rollout.max_tokens, or set algorithm.overlong_filter false."
        )
    weighed = None  # tokens that the loss weighs; with several mini-batches the first is only a part of them
    if config.actor.minibatches == 1 and "first/tokens" in metrics:
        weighed = metrics["first/tokens"] + metrics["first/skipped"]
    start_gap = _start_gap(samples) if untrained else None
    # The update's own forward pass is the old policy, unless that came from one before it, which may round otherwise.
    exact = config.actor.epochs * config.actor.minibatches == 1 and not any(sample.old_logprobs for sample in samples)
    kl_limit, ratio_limit = (1e-6, 1e-6) if exact else (1e-3, 1.0)
    for name, found, wanted, limit in (
        ("KL(policy, old policy) before the first update", metrics.get("first/approx_kl"), 0.0, kl_limit),
        ("largest ratio policy / old policy before it", metrics.get("first/ratio_max"), 1.0, ratio_limit),
        ("mean |Actor - engine| log-probability", metrics.get("mismatch/mean"), 0.0, MISMATCH_LIMIT),
        ("mean |engine - Reference| log-probability at the start", start_gap, 0.0, MISMATCH_LIMIT),
        ("action tokens that the loss weighs", weighed, action_tokens, 0.0),
    ):
        if found is not None and not abs(found - wanted) <= limit:
            raise RunError(f"First-step check failed: {name} is {found:.6g}, expected {wanted:g} (within {limit:g}).")


def _groups_complete(config: Config, groups: list[Group], samples: list[Sample]) -> None:
    found = Counter((sample.group_id, sample.prompt_id) for sample in samples)
    asked = {(group_id, prompt.id): config.rollout.group_size for group_id, prompt in groups}
    for group in found.keys() | asked.keys():
        if (count := found[group]) != (size := asked.get(group, 0)):
            raise RunError(f"First-step check failed: group {group} has {count} samples, expected {size}.")


def _versions_known(samples: list[Sample]) -> None:
    for sample in samples:
        covered = [position for start, end, _ in sample.versions for position in range(start, end)]
        if covered != list(range(len(sample.response))):
            raise RunError(
                f"First-step check failed: version spans {sample.versions} do not cover the "
                f"{len(sample.response)} tokens of sample {sample.index} in group {sample.group_id}."
            )


def _start_gap(samples: list[Sample]) -> float | None:
    gaps = [
        abs(own - ref)
        for sample in samples
        for own, ref, action in zip(sample.logprobs, sample.ref_logprobs, sample.response_mask, strict=False)
        if action
    ]
    return statistics.fmean(gaps) if gaps else None
