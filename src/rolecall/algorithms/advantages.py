"""Rewards to advantages: against the group, through a Critic (GAE), or against the batch."""

import torch
from torch import Tensor

from rolecall.algorithms.masked import flat, real, select
from rolecall.errors import UserError, check_known

GROUP_BASELINES = ("mean", "leave-one-out")
BASELINES = (*GROUP_BASELINES, "critic", "none")
SCALES = ("std", "batch-std", "none")


def estimate_advantages(
    rewards: Tensor,
    mask: Tensor,
    *,
    group_ids: Tensor | None = None,
    values: Tensor | None = None,
    kl: Tensor | None = None,
    beta: float = 1.0,
    baseline: str = "mean",
    scale: str = "std",
    gamma: float = 1.0,
    lam: float = 0.95,
) -> tuple[Tensor, Tensor]:
    """How much better than expected each token was, by what is expected and the unit it is measured in.

    =====================  ===============  =========  ==========================================
    objective              baseline         scale      source
    =====================  ===============  =========  ==========================================
    GRPO                   mean             std        2402.03300
    Dr. GRPO               mean             none       2503.20783
    RLOO                   leave-one-out    none       2402.14740
    REINFORCE++            none             batch-std  2501.03262
    its baseline variant   mean             batch-std  2501.03262
    PPO                    critic           batch-std  1707.06347 with GAE, 1506.02438
    REINFORCE              none             none       Williams, 1992
    =====================  ===============  =========  ==========================================

    The reward, less the group's baseline, is placed on the last action token; ``gae`` carries it back, with the
    Critic's values, or with none and lambda 1 (the return from each token on); "batch-std" then whitens.

    Args:
        rewards: (B,), one a sample. mask: (B, T).
        group_ids: (B,), for the baselines of a group. values: (B, T), for "critic".
        kl, beta: per-token KL (B, T) to take off the rewards, and its weight: token by token, or, where there is a
            group, the response's sum before the baseline, as RLOO has it.
        gamma, lam: of ``gae``.

    Returns:
        advantages, and the returns that a Critic learns; (B, T) each, detached, 0 where masked.
    """
    check_known("baseline", baseline, BASELINES)
    check_known("scale", scale, SCALES)
    if baseline in GROUP_BASELINES:
        if group_ids is None:
            raise UserError(f"The baseline {baseline!r} is the group's: give group_ids.")
        if kl is not None:
            rewards, kl = rewards - beta * select(kl.detach(), mask).sum(-1), None
        unit, acted = "std" if scale == "std" else "none", mask.bool().any(-1)
        rewards = group_advantages(rewards, group_ids, scale=unit, baseline=baseline, mask=acted)
    elif scale == "std":
        raise UserError(f"scale 'std' is the group's deviation, but the baseline is {baseline!r}: take 'batch-std'.")
    placed = token_rewards(rewards, mask, kl, beta)
    if baseline == "critic":
        if values is None:
            raise UserError("The baseline 'critic' needs the Critic's values.")
        advantages, returns = gae(placed, values, mask, gamma=gamma, lam=lam)
    else:
        advantages, returns = gae(placed, torch.zeros_like(placed), mask, gamma=gamma, lam=1.0)
    return whiten(advantages, mask) if scale == "batch-std" else advantages, returns


def token_rewards(rewards: Tensor, mask: Tensor, kl: Tensor | None = None, beta: float = 1.0) -> Tensor:
    """Each sample's reward on its last action token, minus ``beta`` times the KL of every action token.

    r_t = [t is the last action token] R - beta kl_t    (InstructGPT, 2203.02155; Ziegler et al., 1909.08593,
    eq. 2)

    Args:
        rewards: (B,), one a sample. mask: (B, T). kl: (B, T) per-token estimates (k1 is the one whose sum is the
            sequence's log-ratio), detached here.

    Returns:
        (B, T). A row without action tokens is all 0, whatever its reward.
    """
    action = mask.bool()
    if rewards.shape != action.shape[:1]:
        raise UserError(f"{tuple(rewards.shape)} rewards for a mask of {tuple(mask.shape)}: one a row is needed.")
    last = action & (action.flip(-1).cumsum(-1).flip(-1) == 1)
    placed = select(rewards[:, None].expand(action.shape), last)
    return placed if kl is None else placed - beta * select(kl.detach(), action)


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float = 1.0, lam: float = 0.95
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (1506.02438, eq. 16), over action tokens only.

    delta_t = r_t + gamma V_next(t) - V_t,   A_t = delta_t + gamma lam A_next(t),   return_t = A_t + V_t

    next(t) is the next *action* token: what a tool, the environment or padding wrote in between neither bootstraps
    nor decays. After the last one V and A are 0 (the response ended, by whatever cause).

    Args:
        rewards, values, mask: (B, T) each.

    Returns:
        advantages and returns, (B, T) each, detached, 0 where masked.
    """
    action = mask.bool()
    rewards, values = select(rewards.detach(), action), select(values.detach(), action)
    advantages = torch.zeros_like(values)
    next_value = next_advantage = values.new_zeros(values.shape[0])
    for t in reversed(range(values.shape[1])):
        here = action[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = torch.where(here, delta + gamma * lam * next_advantage, next_advantage)
        next_value = torch.where(here, values[:, t], next_value)
        advantages[:, t] = torch.where(here, next_advantage, 0.0)
    return advantages, advantages + values


def group_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    scale: str = "std",
    baseline: str = "mean",
    mask: Tensor | None = None,
) -> Tensor:
    """Rewards against those of the same group: A_i = (r_i - baseline) / scale.

    * baseline "mean", scale "std": GRPO (2402.03300, outcome supervision).
    * baseline "mean", scale "none": Dr. GRPO (2503.20783).
    * baseline "leave-one-out", scale "none": RLOO (2402.14740), the mean of the *others*, so unbiased.

    The deviation is the sample's (divided by G - 1), with nothing added: a group is a sample of what the policy earns
    at this prompt, and TRL, verl and OpenRLHF take the same one (plus 1e-4 or 1e-6, which makes
    advantages depend on the reward's unit and lets the rounding of a flat group through).

    A flat group (all equal, to within a few roundings of the rewards' own type) gives exactly 0.

    Args:
        rewards: (N,). group_ids: (N,) integers in any order; a group's members need not be neighbours.
        mask: (N,), which samples take part (those with an action token); the others get 0 and count nowhere.

    Returns:
        (N,), detached.
    """
    check_known("scale", scale, ("std", "none"))
    check_known("baseline", baseline, GROUP_BASELINES)
    if rewards.dim() != 1 or rewards.shape != group_ids.shape:
        raise UserError(f"{tuple(rewards.shape)} rewards and {tuple(group_ids.shape)} group ids: one of each a sample.")
    member = torch.ones_like(rewards, dtype=torch.bool) if mask is None else mask.bool()
    kind = real(rewards).dtype
    # float64 inside: N is small, and the mean of a float32 group is then exact enough to subtract.
    chosen = select(rewards.detach(), member).double()
    advantages = torch.zeros_like(chosen)
    for group_id in group_ids[member].unique():
        here = member & (group_ids == group_id)
        group = chosen[here]
        if flat(group.max(), group.min(), kind):
            continue
        centered = group - group.mean()
        if baseline == "leave-one-out":  # r_i - mean of the others = (r_i - mean of all) G / (G - 1)
            centered = centered * len(group) / (len(group) - 1)
        advantages[here] = centered / group.std() if scale == "std" else centered
    return advantages.to(kind)


def whiten(advantages: Tensor, mask: Tensor) -> Tensor:
    """Mean 0 and (sample) deviation 1 over the action tokens; exactly 0 everywhere if they are flat.

    (B, T) each -> (B, T), 0 where masked. Call it on the whole step's batch: whitening micro-batches one by one
    gives the same sample another advantage for another split.
    """
    action = mask.bool()
    chosen = select(advantages.detach(), action)[action]
    whitened = torch.zeros(action.shape, dtype=chosen.dtype, device=chosen.device)
    if len(chosen) and not flat(chosen.max(), chosen.min(), chosen.dtype):
        whitened[action] = (chosen - chosen.mean()) / chosen.std()
    return whitened


def overlong_penalty(lengths: Tensor, *, longest: int, buffer: float) -> Tensor:
    """What DAPO adds to the reward of a long response (2503.14476, eq. 13).

    0 up to ``longest - buffer`` tokens, then falling linearly to -1 at ``longest``, and -1 beyond.

    Args:
        lengths: (N,) response tokens. longest: the length limit. buffer: tokens before it where the penalty starts.
    """
    if not 0 < buffer <= longest:
        raise UserError(f"buffer is {buffer}, longest {longest}: the buffer must be within the length limit.")
    return ((longest - buffer - lengths) / buffer).clamp(-1, 0)


def overlong_filter(mask: Tensor, truncated: Tensor) -> Tensor:
    """The mask without the responses that the length limit cut off (DAPO, 2503.14476, section 3.4).

    Their reward is noise: an answer was not wrong, it was not given. They still count in their group's mean.

    Args:
        mask: (B, T). truncated: (B,).
    """
    return mask.bool() & ~truncated.bool()[:, None]
