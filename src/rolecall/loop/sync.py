"""The synchronous mode: each step runs the six stages one after the other, on the policy of this very step."""

from __future__ import annotations

from rolecall.loop import checks, stages
from rolecall.loop.stages import Context, Group, Metrics
from rolecall.samples import Sample
from rolecall.telemetry.metrics import Stages


def take_step(context: Context, groups: list[Group], step: int) -> tuple[list[Sample], Metrics]:
    """One step on the drawn groups: generate, score, reference, advantages, update, sync.

    Returns:
        The samples as the update saw them, and the step's metrics.
    """
    clock = Stages()
    with clock("generate"):
        samples, metrics = stages.generate(context, groups)
    with clock("score"):
        metrics |= stages.score(context, groups, samples)
    with clock("reference"):
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
    return samples, metrics
