"""The synchronous mode: each step runs the six stages one after the other, on the policy of this very step."""

from __future__ import annotations

from rolecall.data import Sampler
from rolecall.errors import RunError
from rolecall.loop import checks, stages
from rolecall.loop.stages import Context, Group, Metrics
from rolecall.samples import Sample
from rolecall.telemetry.metrics import Stages


def take_step(context: Context, sampler: Sampler, step: int) -> tuple[list[Group], list[Sample], Metrics]:
    """One step: generate, score, reference, advantages, update, sync.

    Returns:
        The groups and samples as the update saw them, and the step's metrics.
    """
    clock = Stages()
    groups, samples, metrics = _roll_out(context, sampler, clock)
    with clock("reference"):
        if context.config.rollout.sleep:
            context.roles.rollout.sleep()  # until the sync wakes it
        metrics |= stages.reference(context, samples)
    with clock("advantages"):
        metrics |= stages.advantages(context, samples)
    with clock("update"):
        metrics |= stages.update(context, samples, step)
    with clock("sync"):
        metrics |= stages.synchronise(context, step)

    if not context.checked:
        checks.first_step(context.config, groups, samples, metrics, untrained=step == 1)
        context.checked = "first/tokens" in metrics  # a step that moves nothing, all groups being flat, tells little
    metrics = {name: value for name, value in metrics.items() if not name.startswith("first/")}
    if "kl" in metrics:
        metrics["kl_beta"] = context.kl.beta
        context.kl.update(metrics["kl"], len(samples))
    metrics |= clock.metrics()
    metrics["memory/peak_gb"] = context.roles.actor.peak_memory()
    metrics["tokens_per_second"] = metrics["tokens"] / metrics["time/generate"]
    return groups, samples, metrics


def _roll_out(context: Context, sampler: Sampler, clock: Stages) -> tuple[list[Group], list[Sample], Metrics]:
    """Stages 1 and 2. With dynamic sampling (DAPO, 2503.14476) flat groups are replaced, in a bounded number of rounds.

    Raises:
        RunError: dynamic sampling found none but flat groups.
    """
    wanted, rounds = context.config.rollout.prompts, context.config.algorithm.dynamic_sampling
    groups: list[Group] = []
    samples: list[Sample] = []
    varied: set[int] = set()
    for _ in range(1 + rounds):
        drawn = sampler.draw(wanted - len(varied))
        with clock("generate"):
            made = stages.generate(context, drawn)
        with clock("score"):
            stages.score(context, drawn, made)
        groups, samples, varied = groups + drawn, samples + made, varied | stages.varied(made)
        if rounds == 0 or len(varied) == wanted:
            break
    metrics = stages.rollout_metrics(samples)
    if rounds == 0:
        return groups, samples, metrics
    if not varied:
        raise RunError(
            f"All {len(groups)} groups of {1 + rounds} rounds are flat (mean reward {metrics['reward/mean']:g}), so "
            "there is nothing to learn: the prompts are too hard or too easy for the model, or the reward is constant. "
            "Change the data, or go on without replacing flat groups: --resume --algorithm.dynamic_sampling 0."
        )
    metrics |= {"groups/drawn": len(groups), "groups/kept": len(varied)}
    kept = [sample for sample in samples if sample.group_id in varied]
    return [group for group in groups if group[0] in varied], kept, metrics
