"""The synchronous mode: each step runs the six stages one after the other, on the policy of this very step."""

from rolecall.data import Sampler
from rolecall.errors import RunError
from rolecall.loop import checks, stages
from rolecall.loop.stages import Context, Group, Metrics
from rolecall.samples import Sample
from rolecall.telemetry.logs import StageClock


def take_step(context: Context, sampler: Sampler, step: int) -> tuple[list[Group], list[Sample], Metrics]:
    """One step: generate, score, reference, advantages, update, sync.

    Returns:
        The groups and samples as the update saw them, and the step's metrics.
    """
    clock = StageClock()
    groups, samples, metrics = _roll_out(context, sampler, clock, first=step == 1)
    with clock("reference"):
        if context.config.rollout.sleep:
            context.roles.rollout.sleep()  # until the sync wakes it
        metrics |= stages.reference(context, samples)
    with clock("advantages"):
        stages.advantages(context, samples)
    with clock("update"):
        metrics |= stages.update(context, samples, step)
    with clock("sync"):
        metrics |= stages.synchronise(context, step)

    if context.config.model.batch_invariant:
        checks.bitwise(metrics)
    if not context.checked:
        checks.first_step(context.config, groups, samples, metrics, untrained=step == 1)
        context.checked = "first/tokens" in metrics  # a step that moves nothing, all groups being flat, tells little
    metrics = {name: value for name, value in metrics.items() if not name.startswith("first/")}
    if "kl" in metrics:
        metrics["kl_beta"] = context.kl.beta
        if not stages.actor_waits(context, step):  # there is nothing yet that beta could hold back
            context.kl.update(metrics["kl"], len(samples))
    metrics |= clock.metrics()
    metrics["memory/peak_gb"] = context.roles.actor.peak_memory()
    metrics["tokens_per_second"] = metrics["tokens"] / metrics["time/generate"]
    return groups, samples, metrics


def _roll_out(
    context: Context, sampler: Sampler, clock: StageClock, first: bool
) -> tuple[list[Group], list[Sample], Metrics]:
    """Stages 1 and 2. With dynamic sampling (DAPO, 2503.14476) flat groups are replaced, in a bounded number of rounds.

    A step that finds fewer than it wants goes on with those; one that finds none, as when all is learned, with the
    flat groups of its last round.

    Raises:
        RunError: there is none at the first step, so nothing can be learned.
    """
    rollout, rounds = context.config.rollout, context.config.algorithm.dynamic_sampling
    groups: list[Group] = []
    samples: list[Sample] = []
    varied: set[int] = set()
    for _ in range(1 + rounds):
        drawn = sampler.draw(rollout.prompts - len(varied))
        with clock("generate"):
            made = stages.generate(context, drawn, rollout.group_size)
            checks.on_policy(made, context.sync.version)
        with clock("score"):
            stages.score(context, drawn, made)
        groups, samples, varied = groups + drawn, samples + made, varied | stages.varied(made)
        if rounds == 0 or len(varied) == rollout.prompts:
            break
    metrics = stages.rollout_metrics(samples)
    if rounds == 0:
        return groups, samples, metrics
    if not varied and first:
        raise RunError(
            f"All {len(groups)} groups of {1 + rounds} rounds are flat (mean reward {metrics['reward/mean']:g}), so "
            "there is nothing to learn: the prompts are too hard or too easy for the model, or the reward is constant. "
            "Change the data or the reward, or keep flat groups (--algorithm.dynamic_sampling 0)."
        )
    metrics |= {"groups/drawn": len(groups), "groups/kept": len(varied)}
    kept = varied or {group_id for group_id, _ in drawn}
    groups = [group for group in groups if group[0] in kept]
    return groups, [sample for sample in samples if sample.group_id in kept], metrics
