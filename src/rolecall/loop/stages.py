"""The six stages of a step. Every mode of the loop (synchronous, pipelined, asynchronous) calls these functions."""

import statistics
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch

from rolecall import algorithms
from rolecall.algorithms.masked import flat
from rolecall.config import Config
from rolecall.samples import Prompt, Request, Sample, Sampling, by_group
from rolecall.sync import WeightSync
from rolecall.training.packing import per_token

Group = tuple[int, Prompt]  # (group_id, its prompt)
Metrics = dict[str, float]


@dataclass
class Context:
    """What the stages work with: the configuration, the roles (or handles to them), the KL controller, the sync.

    ``checked``: this process has compared the parts with each other in a first step.
    """

    config: Config
    roles: Any
    checked: bool = False
    kl: algorithms.AdaptiveKL = field(init=False)

    def __post_init__(self) -> None:
        settings = self.config.algorithm
        self.kl = algorithms.AdaptiveKL(
            settings.kl_beta, settings.kl_target or None, settings.kl_horizon, settings.kl_rule
        )

    @cached_property
    def sync(self) -> WeightSync:
        """How weights reach the engine, for the whole run."""
        return WeightSync(self.roles.actor, self.roles.rollout.handles, sleeps=self.config.rollout.sleep > 0)


def generate(context: Context, groups: list[Group], n: int) -> list[Sample]:
    """Stage 1: ``n`` responses a prompt from the rollout engine, with log-probabilities and weight versions."""
    rollout, seed = context.config.rollout, context.config.run.seed
    sampling = Sampling(
        rollout.max_tokens, rollout.min_tokens, rollout.temperature, rollout.top_p, rollout.top_k, tuple(rollout.stop)
    )
    requests = [Request(group_id, prompt.id, prompt.tokens, n, seed, sampling) for group_id, prompt in groups]
    return context.roles.rollout.generate(requests)


def score(context: Context, groups: list[Group], samples: list[Sample]) -> None:
    """Stage 2: the Reward judges each response."""
    prompts = dict(groups)
    rewards = context.roles.reward.score([prompts[sample.group_id] for sample in samples], samples)
    for sample, reward in zip(samples, rewards, strict=True):
        sample.reward = reward


def reference(context: Context, samples: list[Sample]) -> Metrics:
    """Stage 3: log-probabilities under the frozen Reference, and the Actor's own before it is updated.

    Neither is computed without need: the Reference's for the KL term, or to watch the KL of one response a prompt;
    the Actor's for a KL in the reward, or for a ratio that several optimizer steps share.
    """
    config, roles = context.config, context.roles
    beta = config.algorithm.kl_beta
    in_reward = beta > 0 and config.algorithm.kl_in == "reward"
    compared = samples if beta > 0 else [sample for sample in samples if sample.index == 0]
    pending = roles.reference.start("logprobs", compared) if roles.reference else None
    if in_reward or config.actor.epochs * config.actor.minibatches > 1:
        for sample, row in zip(samples, roles.actor.logprobs(samples), strict=True):
            sample.old_logprobs = row
    if pending is None:
        return {}
    for sample, row in zip(compared, pending.result(), strict=True):
        sample.ref_logprobs = row
    mask = per_token(compared, "response_mask").bool()
    # The engine's own log-probabilities will do here: `mismatch/mean` says how far they are from the Actor's.
    engine, frozen = per_token(compared, "logprobs"), per_token(compared, "ref_logprobs")
    drift = algorithms.kl(engine, frozen, estimator="k3", mask=mask)
    return {"kl": algorithms.masked_mean(drift, mask).item()}


def advantages(context: Context, samples: list[Sample]) -> None:
    """Stage 4: how much better than expected each token was: by the group, the Critic and GAE, or the batch."""
    settings = context.config.algorithm
    mask = per_token(samples, "response_mask").bool()
    values = drift = None
    if settings.baseline == "critic":
        for sample, row in zip(samples, context.roles.critic.values(samples), strict=True):
            sample.values = row
        values = per_token(samples, "values")
    if settings.kl_in == "reward" and context.kl.beta > 0:
        drift = per_token(samples, "old_logprobs") - per_token(samples, "ref_logprobs")
    gains, returns = algorithms.estimate_advantages(
        _shaped_rewards(context.config, samples),
        mask,
        group_ids=torch.tensor([sample.group_id for sample in samples]),
        values=values,
        kl=drift,
        beta=context.kl.beta,
        baseline=settings.baseline,
        scale=settings.scale,
        gamma=settings.gamma,
        lam=settings.lam,
    )
    for sample, gain, target in zip(samples, gains.tolist(), returns.tolist(), strict=True):
        sample.advantages, sample.returns = gain[: len(sample.response)], target[: len(sample.response)]
    if settings.overlong_filter:  # last, as they count in their group's baseline
        kept = algorithms.overlong_filter(mask, torch.tensor([sample.finish == "length" for sample in samples]))
        for sample, row in zip(samples, kept.int().tolist(), strict=True):
            sample.response_mask = row[: len(sample.response)]


def update(context: Context, samples: list[Sample], step: int) -> Metrics:
    """Stage 5: gradient steps of the Actor and, for PPO, the Critic."""
    roles = context.roles
    metrics: Metrics = {}
    critic = roles.critic.start("update", samples) if roles.critic else None
    if not actor_waits(context, step):
        metrics |= roles.actor.update(samples, kl_beta=context.kl.beta)
    if critic is not None:
        metrics |= critic.result()
    return metrics


def synchronise(context: Context, step: int) -> Metrics:
    """Stage 6: the Actor's parameters reach the engine, verified; their version is the number of finished steps."""
    return context.roles.rollout.synchronise(partial(context.sync, step))


def actor_waits(context: Context, step: int) -> bool:
    """Whether the step trains the Critic only, which has a head start."""
    return context.roles.critic is not None and step <= context.config.critic.warmup_only


def varied(samples: list[Sample]) -> set[int]:
    """Ids of the groups whose rewards differ: the others are flat, and teach a group baseline nothing."""

    def differ(group: list[Sample]) -> bool:
        rewards = torch.tensor([sample.reward for sample in group])
        return not flat(rewards.max(), rewards.min(), rewards.dtype)

    return {group_id for group_id, group in by_group(samples).items() if differ(group)}


def rollout_metrics(samples: list[Sample]) -> Metrics:
    """Of all that was generated and scored in a step, whether or not it is trained on."""
    lengths, rewards = [len(sample.response) for sample in samples], [sample.reward for sample in samples]
    return {
        "response_length/mean": statistics.fmean(lengths),
        "response_length/max": max(lengths),
        "response_length/truncated": statistics.fmean(sample.finish == "length" for sample in samples),
        "tokens": sum(lengths),
        "reward/mean": statistics.fmean(rewards),
        "reward/std": statistics.pstdev(rewards),
        "reward/flat_groups": 1 - len(varied(samples)) / len(by_group(samples)),
    }


def _shaped_rewards(config: Config, samples: list[Sample]) -> torch.Tensor:
    """(B,) rewards as the objective takes them: scaled, clipped, less for overlong responses."""
    settings, longest = config.algorithm, config.rollout.max_tokens
    rewards = torch.tensor([sample.reward for sample in samples]) * settings.reward_scale
    if settings.reward_clip > 0:
        rewards = rewards.clamp(-settings.reward_clip, settings.reward_clip)
    if settings.overlong_buffer > 0:
        lengths = torch.tensor([len(sample.response) for sample in samples])
        buffer = settings.overlong_buffer * longest
        rewards = rewards + algorithms.overlong_penalty(lengths, longest=longest, buffer=buffer)
    return rewards
