"""The six stages of a step. Every mode of the loop (synchronous, pipelined, asynchronous) calls these functions."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

import torch

from rolecall import algorithms, sync
from rolecall.config import Config
from rolecall.samples import Prompt, Request, Sample, Sampling, by_group
from rolecall.training.packing import per_token

Group = tuple[int, Prompt]  # (group_id, its prompt)
Metrics = dict[str, float]


@dataclass
class Context:
    """What the stages work with: the configuration, handles to the roles, the KL controller.

    ``checked``: this process has compared the parts with each other in a first step.
    """

    config: Config
    roles: Any
    kl: algorithms.AdaptiveKL
    checked: bool = False


def requests(config: Config, groups: list[Group], n: int) -> list[Request]:
    """One request a group, sampled as configured."""
    rollout = config.rollout
    sampling = Sampling(
        rollout.max_tokens, rollout.min_tokens, rollout.temperature, rollout.top_p, rollout.top_k, tuple(rollout.stop)
    )
    return [Request(group_id, prompt.id, prompt.tokens, n, config.run.seed, sampling) for group_id, prompt in groups]


def generate(context: Context, groups: list[Group]) -> tuple[list[Sample], Metrics]:
    """Stage 1: G responses a prompt from the rollout engine, with log-probabilities and weight versions."""
    config = context.config
    samples = context.roles.rollout.generate(requests(config, groups, config.rollout.group_size))
    lengths = [len(sample.response) for sample in samples]
    return samples, {
        "response_length/mean": statistics.fmean(lengths),
        "response_length/max": max(lengths),
        "response_length/truncated": statistics.fmean(sample.finish == "length" for sample in samples),
        "tokens": sum(lengths),
    }


def score(context: Context, groups: list[Group], samples: list[Sample]) -> Metrics:
    """Stage 2: the Reward judges each response."""
    judge(context.roles.reward, groups, samples)
    rewards = [sample.reward for sample in samples]
    flat = [len({sample.reward for sample in group}) == 1 for group in by_group(samples).values()]
    return {
        "reward/mean": statistics.fmean(rewards),
        "reward/std": statistics.pstdev(rewards),
        "reward/flat_groups": statistics.fmean(flat),
    }


def judge(reward: Any, groups: list[Group], samples: list[Sample]) -> None:
    """Write the verdict of the Reward, or of a handle to it, into the samples."""
    prompts = dict(groups)
    values = reward.score([prompts[sample.group_id] for sample in samples], samples)
    for sample, value in zip(samples, values, strict=True):
        sample.reward = value


def reference(context: Context, samples: list[Sample]) -> Metrics:
    """Stage 3: log-probabilities under the frozen Reference, and the Actor's own before it is updated.

    Neither is computed without need: the Reference's for the KL term, or to watch the KL of one response a prompt;
    the Actor's for a KL in the reward, or for a ratio that several optimizer steps share.
    """
    config, roles = context.config, context.roles
    in_reward = config.kl_beta > 0 and config.algorithm.kl_in == "reward"
    compared = samples if config.kl_beta > 0 else [sample for sample in samples if sample.index == 0]
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


def advantages(context: Context, samples: list[Sample]) -> Metrics:
    """Stage 4: how much better than expected each token was: by the group (GRPO), or the Critic and GAE (PPO)."""
    settings = context.config.algorithm
    rewards = torch.tensor([sample.reward for sample in samples])
    if settings.name == "grpo":
        group_ids = torch.tensor([sample.group_id for sample in samples])
        acted = torch.tensor([sample.action_tokens > 0 for sample in samples])
        scalars = algorithms.group_advantages(
            rewards, group_ids, scale=settings.scale, baseline=settings.baseline, mask=acted
        )
        for sample, scalar in zip(samples, scalars.tolist(), strict=True):
            sample.advantages = [scalar] * len(sample.response)
        return {}

    for sample, row in zip(samples, context.roles.critic.values(samples), strict=True):
        sample.values = row
    mask = per_token(samples, "response_mask").bool()
    values = per_token(samples, "values")
    penalty = None
    if settings.kl_in == "reward" and context.kl.beta > 0:
        penalty = context.kl.beta * (per_token(samples, "old_logprobs") - per_token(samples, "ref_logprobs"))
    token_rewards = algorithms.token_rewards(rewards, mask, penalty)
    gains, returns = algorithms.gae(token_rewards, values, mask, gamma=settings.gamma, lam=settings.lam)
    if settings.whiten:
        gains = algorithms.whiten(gains, mask)
    for sample, gain, target in zip(samples, gains.tolist(), returns.tolist(), strict=True):
        sample.advantages, sample.returns = gain[: len(sample.response)], target[: len(sample.response)]
    return {"value/mean": algorithms.masked_mean(values, mask).item()}


def update(context: Context, samples: list[Sample], step: int) -> Metrics:
    """Stage 5: gradient steps of the Actor and, for PPO, the Critic."""
    config, roles = context.config, context.roles
    metrics: Metrics = {}
    critic = roles.critic.start("update", samples) if config.algorithm.name == "ppo" else None
    if critic is None or step > config.critic.warmup_only:
        metrics |= roles.actor.update(samples, kl_beta=context.kl.beta)
    if critic is not None:
        metrics |= critic.result()
    return metrics


def synchronise(context: Context, step: int) -> Metrics:
    """Stage 6: the Actor's parameters reach the engine, verified; their version is the number of finished steps."""
    return sync.sync(context.roles, version=step)
