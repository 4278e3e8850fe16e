"""The stages with real roles in this process: what each objective's name does, and DAPO's dynamic sampling."""

import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rolecall.algorithms import policy_loss
from rolecall.cluster import Replicas
from rolecall.config import PRESETS, Config
from rolecall.data import Sampler
from rolecall.errors import RunError, UserError
from rolecall.loop import stages
from rolecall.loop.run import State
from rolecall.loop.stages import Context
from rolecall.loop.synchronous import take_step
from rolecall.roles.actor import Actor
from rolecall.roles.critic import Critic
from rolecall.roles.reference import Reference
from rolecall.roles.reward import Reward
from rolecall.roles.rollout import Rollout
from rolecall.samples import Prompt
from rolecall.training.checkpoint import latest
from rolecall.training.objective import policy_objective
from rolecall.training.trained import Totals
from training_samples import sample


class Here:
    """A role in this process, called as the loop calls a handle to one."""

    process = "this one"

    def __init__(self, role: Any):
        self._role = role

    def __getattr__(self, name: str) -> Any:
        return getattr(self._role, name)

    def start(self, method: Any, *arguments: Any) -> Any:
        run = partial(method, self._role) if callable(method) else getattr(self._role, method)
        return SimpleNamespace(result=partial(run, *arguments))


@pytest.fixture
def context(tiny_path: Path):
    """A context of the tiny model with the roles that its configuration needs; keyword arguments are sections."""

    def make(reward: Any = None, **sections: Any) -> Context:
        model = {"path": str(tiny_path), "dtype": "float32"}
        rollout = {"prompts": 2, "group_size": 4, "max_tokens": 8} | sections.pop("rollout", {})
        config = Config(model=model, rollout=rollout, **sections)
        config.check_trainable()
        actor = Actor(config)
        roles = SimpleNamespace(actor=Here(actor), critic=None, reference=None)
        roles.rollout = Replicas([Here(Rollout(config, actor))], restart=None)
        roles.reward = Here(SimpleNamespace(score=reward) if reward else Reward(config))
        if "critic" in config.roles:
            roles.critic = Here(Critic(config))
        if "reference" in config.roles:
            roles.reference = Here(Reference(config))
        return Context(config, roles)

    return make


def prompts(n: int) -> list[Prompt]:
    return [Prompt(f"p{i}", f"{i}", [6 + i % 8, 7], {"difficulty": i}) for i in range(n)]


def spread(prompts: list[Prompt], samples: list) -> list[float]:
    """A reward by the position in the group, so that no group is flat."""
    return [float(sample.index) for sample in samples]


def by_difficulty(prompts: list[Prompt], samples: list) -> list[float]:
    """Even prompts are flat, odd ones are not."""
    return [float(s.index if p.row["difficulty"] % 2 else 1) for p, s in zip(prompts, samples, strict=True)]


@pytest.mark.parametrize("name", PRESETS)
def test_every_objective_takes_a_step(context, name):
    here = context(spread, algorithm={"name": name, "clip_low": PRESETS[name].get("clip_low", 0.2)})
    _, samples, metrics = take_step(here, Sampler(prompts(5), seed=0), 1)
    acting = [s for s in samples if s.action_tokens]
    assert metrics["reward/mean"] == 1.5 and metrics["policy/grad_norm"] > 0
    assert any(any(s.advantages) for s in acting)
    assert ("kl_beta" in metrics) == (name in ("ppo", "reinforce++"))
    assert ("value/loss" in metrics) == (name == "ppo")


# Rewards 0, 0, 0, 4 and 1, 1, 1, 1: group means 1, deviations 2 and 0; of the batch mean 1, variance 12 / 7.
WHITENED = [-((7 / 12) ** 0.5)] * 3 + [3 * (7 / 12) ** 0.5] + [0] * 4
GROUP = [-0.5] * 3 + [1.5] + [0] * 4


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        *((name, GROUP) for name in ("grpo", "dapo", "gspo", "gspo-token", "cispo")),
        ("dr-grpo", [-1, -1, -1, 3, 0, 0, 0, 0]),
        ("rloo", [-4 / 3, -4 / 3, -4 / 3, 4, 0, 0, 0, 0]),
        ("reinforce++", WHITENED),
        ("reinforce++-baseline", WHITENED),  # the groups' means are equal here
        ("reinforce", [0, 0, 0, 4, 1, 1, 1, 1]),
        ("ppo", WHITENED),  # a new Critic's values are 0
    ],
)
def test_the_advantages_of_each_objective_by_hand(context, name, expected):
    here = context(algorithm={"name": name})
    samples = [sample(group, i, response=[9]) for group in (3, 8) for i in range(4)]
    for s, reward in zip(samples, [0, 0, 0, 4, 1, 1, 1, 1], strict=True):
        s.reward, s.old_logprobs, s.ref_logprobs = reward, [-1.0], [-1.0]
    stages.advantages(here, samples)
    assert [s.advantages[0] for s in samples] == pytest.approx(expected, abs=1e-6)


GSPO = {"clip_low": 3e-4, "clip_high": 4e-4, "aggregate": "sequence-mean-token-mean"}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in ("grpo", "dapo", "reinforce++", "reinforce++-baseline", "ppo")),
        ("dr-grpo", {"aggregate": "sequence-mean-token-sum-norm", "norm": 9}),
        ("gspo", GSPO | {"level": "sequence"}),
        ("gspo-token", GSPO | {"level": "sequence-token"}),
        ("cispo", {"kind": "cispo", "clip_low": 1.0, "clip_high": 4.0}),
        ("rloo", {"kind": "reinforce", "aggregate": "sequence-mean-token-sum-norm", "norm": 9}),
        ("reinforce", {"kind": "reinforce", "aggregate": "sequence-mean-token-sum-norm", "norm": 9}),
    ],
)
def test_the_policy_loss_of_each_objective(name, options):
    """Value and gradient at ratios of 1/2 to 6, three sequences of 3, 1 and 0 tokens."""
    old = torch.tensor([[0.1, 0.4, 0.8], [0.2, 1.0, 1.0], [1.0, 1.0, 1.0]]).log()
    mask, advantages = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0]]), torch.tensor([[1.0] * 3, [-2.0] * 3, [0.0] * 3])

    def slope(loss_of) -> tuple[float, list]:
        new = torch.tensor([[0.6, 0.2, 0.8], [0.5, 1.0, 1.0], [1.0, 1.0, 1.0]]).log().requires_grad_()
        loss = loss_of(new)
        loss.backward()
        return loss.item(), new.grad.flatten().tolist()

    def configured(new: torch.Tensor) -> torch.Tensor:
        settings = Config(algorithm={"name": name}).algorithm
        return policy_objective(
            settings, new, torch.zeros_like(new), mask, advantages=advantages, old_logprobs=old, engine_logprobs=old,
            totals=Totals(4, 2, 4), norm=9,
        )[0]  # fmt: skip

    def formula(new: torch.Tensor) -> torch.Tensor:
        return policy_loss(new, old, advantages, mask, **({"clip_low": 0.2, "clip_high": 0.28} | options))[0]

    value, gradient = slope(formula)
    assert slope(configured) == (pytest.approx(value), pytest.approx(gradient))


def test_the_kl_term_is_the_policys_own_off_policy_too():
    """Ratio 1.5 and engine weight 0.8 at the only action token, d = log(0.3 / 0.6): beta w rho d is the KL's gradient.

    An entropy of 2 adds -0.25 x 2 to the value. The second token is a tool's: NaN everywhere.
    """
    new = torch.tensor([[0.3, 0.5]]).log().requires_grad_()
    old, engine, ref = (torch.tensor([[x, torch.nan]]).log() for x in (0.2, 0.25, 0.6))
    settings = Config(algorithm={"kl_beta": 0.1, "entropy_coef": 0.25}).algorithm
    loss, metrics = policy_objective(
        settings, new, torch.tensor([[2.0, torch.nan]]), torch.tensor([[1, 0]]), advantages=torch.zeros(1, 2),
        old_logprobs=old, engine_logprobs=engine, ref_logprobs=ref, beta=0.1, totals=Totals(1, 1, 1), norm=9,
    )  # fmt: skip
    loss.backward()
    d = math.log(0.5)
    assert loss.item() == pytest.approx(0.1 * 0.8 * 1.5 * d**2 / 2 - 0.5)
    assert new.grad.tolist() == [[pytest.approx(0.1 * 0.8 * 1.5 * d), 0]]
    assert metrics["correction/mean"].item() == metrics["correction/max"].item() == pytest.approx(0.8)
    assert metrics["mismatch/mean"].item() == pytest.approx(math.log(1.25)) and metrics["entropy"].item() == 2


@pytest.mark.parametrize(
    ("correction", "cut"),
    [({}, 0.5), ({"correction": "mask"}, 0.5), ({"correction": "mask", "correction_floor": 0.6}, 1.0),
     ({"correction": "none"}, 0.0), ({"correction_level": "sequence"}, 0.0)],
)  # fmt: skip
def test_the_share_of_weights_that_were_cut(correction, cut):
    """Weights 3 (over the cap of 2) and 0.5 (under a floor of 0.6); their product 1.5."""
    old = torch.tensor([[0.6, 0.2]]).log()
    _, metrics = policy_objective(
        Config(algorithm=correction).algorithm, old, torch.zeros(1, 2), torch.ones(1, 2), advantages=torch.ones(1, 2),
        old_logprobs=old, engine_logprobs=torch.tensor([[0.2, 0.4]]).log(), totals=Totals(2, 1, 2), norm=9,
    )  # fmt: skip
    assert metrics["correction/cut"].item() == pytest.approx(cut)


def test_rewards_are_scaled_then_clipped_then_shortened_by_length(context):
    """Times 2, limited to 3; a limit of 8 tokens with a buffer of 4 takes 1/4 a token from the fifth on."""
    settings = {"name": "reinforce", "reward_scale": 2.0, "reward_clip": 3.0, "overlong_buffer": 0.5}
    samples = [sample(index=i, response=[9] * n) for i, n in enumerate((4, 5, 8))]
    for s, reward in zip(samples, (1, -5, 5), strict=True):
        s.reward = reward
    stages.advantages(context(algorithm=settings), samples)
    assert [s.advantages for s in samples] == [[2.0] * 4, [-3.25] * 5, [2.0] * 8]
    assert [s.reward for s in samples] == [1, -5, 5]  # what is reported


def test_overlong_responses_keep_their_place_in_the_group_and_do_not_train(context):
    samples = [sample(index=i) for i in range(4)]
    samples[0].reward, samples[3].finish = 4.0, "length"
    here = context(algorithm={"overlong_filter": True, "scale": "none"})
    stages.advantages(here, samples)
    assert [s.advantages[0] for s in samples] == [3, -1, -1, -1]
    assert [s.action_tokens for s in samples] == [3, 3, 3, 0]
    assert here.roles.actor.update(samples)["policy/skipped_samples"] == 1


def test_a_first_step_of_nothing_but_overlong_responses_ends_with_what_to_do(context):
    here = context(spread, algorithm={"overlong_filter": True}, rollout={"max_tokens": 1}, run={"seed": 1})
    with pytest.raises(RunError, match=r"All 8 responses .* rollout.max_tokens = 1, .*Raise rollout.max_tokens"):
        take_step(here, Sampler(prompts(4), seed=1), 1)
    here.checked = False
    assert take_step(here, Sampler(prompts(4), seed=1), 2)[2]["policy/skipped_samples"] == 8  # later it may pass


def test_a_checkpoint_without_a_critic_is_not_resumed_with_one(context, tmp_path):
    (tmp_path / "versions.json").write_text("{}")
    sampler = Sampler(prompts(3), seed=0)
    State(context(algorithm={"name": "rloo"}), sampler, step=1).save(tmp_path)
    other = State(context(algorithm={"name": "rloo", "baseline": "critic"}), sampler)
    with pytest.raises(UserError, match=r"step-000001 holds no critic: .*algorithm.baseline = 'critic'"):
        other.load(latest(tmp_path))


def test_beta_does_not_adapt_while_the_actor_waits_for_the_critic(context):
    """The KL is 0 as long as the Actor is the Reference: beta would be halved, and stand at 1/4 when it is needed."""
    here = context(spread, algorithm={"name": "ppo", "kl_beta": 0.4}, critic={"warmup_only": 1})
    here.kl.rule = "double"
    sampler = Sampler(prompts(4), seed=0)
    betas = [(take_step(here, sampler, step)[2]["kl_beta"], here.kl.beta) for step in (1, 2)]
    assert betas == [(0.4, 0.4), (0.4, 0.2)]


# Dynamic sampling: pitfall 21. -------------------------------------------------------------------------------------


def test_flat_groups_are_replaced_by_the_next_prompts(context):
    here = context(by_difficulty, algorithm={"dynamic_sampling": 3})
    sampler = Sampler(prompts(6), seed=0)
    stream = [(group_id, prompt.row["difficulty"] % 2) for group_id, prompt in Sampler(prompts(6), seed=0).draw(20)]
    groups, samples, metrics = take_step(here, sampler, 1)
    wanted = [group_id for group_id, odd in stream if odd][:2]
    assert [group_id for group_id, _ in groups] == wanted == sorted({s.group_id for s in samples})
    assert len(samples) == 8 and sampler.position == wanted[-1] + 1 == metrics["groups/drawn"]
    assert metrics["groups/kept"] == 2
    assert metrics["reward/flat_groups"] == pytest.approx(1 - 2 / sampler.position)  # of all that was generated


def test_dynamic_sampling_is_bounded_and_goes_on_with_what_there_is(context):
    """One prompt in seven is mixed: two rounds of replacement find none or one of the two wanted."""
    here = context(lambda p, s: [float(x.index * (y.row["difficulty"] == 6)) for x, y in zip(s, p, strict=True)],
                   algorithm={"dynamic_sampling": 2})  # fmt: skip
    seed = next(seed for seed in range(9) if any(p.id == "p6" for _, p in Sampler(prompts(7), seed).draw(4)))
    groups, samples, metrics = take_step(here, Sampler(prompts(7), seed), 1)
    assert [prompt.id for _, prompt in groups] == ["p6"] and len(samples) == 4
    assert metrics["groups/kept"] == 1 and 4 <= metrics["groups/drawn"] <= 6


def test_nothing_but_flat_groups_at_the_start_ends_with_what_to_do(context):
    here = context(lambda prompts, samples: [0.25] * len(samples), algorithm={"name": "dapo"})
    sampler = Sampler(prompts(3), seed=0)
    with pytest.raises(RunError, match=r"All 10 groups of 5 rounds are flat \(mean reward 0.25\).*dynamic_sampling 0"):
        take_step(here, sampler, 1)
    assert sampler.position == 10


def test_nothing_but_flat_groups_later_is_a_step_that_changes_nothing(context):
    """A model that has learned all there is goes on to the end of its run, resumed or not."""
    here = context(lambda prompts, samples: [1.0] * len(samples), algorithm={"dynamic_sampling": 2})
    sampler = Sampler(prompts(3), seed=0)
    groups, samples, metrics = take_step(here, sampler, 7)
    assert [group_id for group_id, _ in groups] == [4, 5] and sampler.position == 6
    assert metrics["groups/kept"] == 0 and metrics["policy/skipped_samples"] == len(samples) == 8


def test_without_dynamic_sampling_flat_groups_stay(context):
    sampler = Sampler(prompts(6), seed=0)
    groups, samples, metrics = take_step(context(by_difficulty), sampler, 1)
    assert len(groups) == 2 == sampler.position and len(samples) == 8 and "groups/kept" not in metrics


def test_the_metric_of_flat_groups_counts_groups():
    samples = [sample(group, i) for group in (1, 2, 3) for i in range(2)]
    samples[0].reward = 1.0
    samples[2].reward, samples[3].reward = 0.1 + 0.2, 0.3  # the same reward: their advantages are 0
    assert stages.varied(samples) == {1}
    assert stages.rollout_metrics(samples)["reward/flat_groups"] == pytest.approx(2 / 3)
