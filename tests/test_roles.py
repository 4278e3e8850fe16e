"""The Actor, the Critic and the Reference on the tiny model, with real parts."""

import copy
import importlib
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from rolecall.algorithms import group_advantages
from rolecall.config import Config
from rolecall.errors import RunError, UserError
from rolecall.roles import actor as actor_module
from rolecall.roles.actor import Actor
from rolecall.roles.critic import Critic
from rolecall.roles.reference import Reference
from rolecall.samples import Sample
from training_samples import gradients, plain_logprobs, sample, uneven

NAN = math.nan


@pytest.fixture
def settings(tiny_path: Path):
    """A configuration of the tiny model; keyword arguments are sections."""

    def make(**sections: Any) -> Config:
        model = {"path": str(tiny_path), "dtype": "float32"} | sections.pop("model", {})
        return Config(model=model, rollout={"max_tokens": 8} | sections.pop("rollout", {}), **sections)

    return make


def weights(role: Actor | Critic) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in role.module.named_parameters()}


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor], tolerance: float = 0.0) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=tolerance, atol=tolerance)


# Actor: the gradient. ----------------------------------------------------------------------------------------------


def test_the_gradient_is_that_of_the_formula(settings):
    """By a plain forward pass a sample: (1/N) sum_t w_t (-A_t log pi_t + beta (log pi_t - log ref_t)^2 / 2)."""
    config = settings(algorithm={"kl_beta": 0.3, "correction_cap": 1.1}, rollout={"temperature": 0.7})
    actor, samples = Actor(config), uneven()
    found = gradients(actor, samples)
    total = sum(s.action_tokens for s in samples)
    loss = torch.zeros((), dtype=torch.float64)
    for s in samples:
        logprobs = plain_logprobs(actor.loaded.model, s, temperature=0.7)
        advantages, engine, reference = (torch.tensor(x) for x in (s.advantages, s.logprobs, s.ref_logprobs))
        correction = (logprobs.detach() - engine).exp().clamp(max=1.1)
        each = correction * (-advantages * logprobs + 0.3 * (logprobs - reference).square() / 2)
        loss = loss + each[torch.tensor(s.response_mask) == 1].sum() / total
    loss.backward()
    plain = {name: p.grad for name, p in actor.loaded.model.named_parameters()}
    assert_same(found, plain, 1e-6)
    assert max(g.abs().max() for g in found.values()) > 1e-3


@pytest.mark.parametrize("aggregate", ["token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum-norm"])
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_accumulation_packing_and_order_never_change_the_gradient(settings, aggregate, beta):
    """Pitfall 7."""
    samples = uneven(groups=5, size=3, seed=4)
    shuffled = random.Random(0).sample(samples, len(samples))

    def found(micro_tokens: int, given: list[Sample], packed: bool = True) -> dict[str, Tensor]:
        actor = Actor(
            settings(actor={"micro_tokens": micro_tokens}, algorithm={"aggregate": aggregate, "kl_beta": beta})
        )
        if not packed:
            actor.loaded.why = "padded for the test"
        return gradients(actor, given)

    whole = found(10_000, samples)
    assert_same(whole, found(1, samples), 1e-6)
    assert_same(whole, found(20, shuffled), 1e-6)
    assert_same(whole, found(10_000, shuffled), 1e-6)
    assert_same(whole, found(25, samples, packed=False), 1e-6)


def test_skipping_flat_groups_changes_nothing(settings, monkeypatch):
    samples = uneven()
    for s in samples[:3] + samples[6:9]:
        s.advantages = [0.0] * len(s.response)
    skipped = gradients(Actor(settings()), samples)
    assert Actor(settings()).update(samples)["policy/skipped_samples"] == 6
    monkeypatch.setattr(actor_module, "_moves_policy", lambda sample, always: True)
    assert_same(skipped, gradients(Actor(settings()), samples), 1e-12)


def test_flat_groups_are_not_skipped_with_a_kl_term(settings):
    samples = [sample(advantages=[0.0] * 3, ref_logprobs=[-1.0, -2.0, -3.0])]
    metrics = Actor(settings(algorithm={"kl_beta": 0.1})).update(samples)
    assert metrics["policy/skipped_samples"] == 0 and metrics["policy/grad_norm"] > 0


def test_no_step_when_nothing_is_left(settings):
    actor = Actor(settings())
    before = weights(actor)
    metrics = actor.update([sample(advantages=[0.0] * 3), sample(1, response=[], advantages=[])])
    assert metrics == {"policy/skipped_samples": 2, "policy/micro_tokens": 4096}
    assert_same(before, weights(actor))
    assert actor.optimizer.steps == 0


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_masked_tokens_change_nothing_even_nan(settings, beta):
    """Pitfalls 3 and 32: what a tool wrote counts in no loss, KL, entropy or other metric."""
    clean = uneven(seed=2)
    dirty = copy.deepcopy(clean)
    for s in dirty:
        for name in ("advantages", "logprobs", "ref_logprobs"):
            setattr(s, name, [x if m else NAN for x, m in zip(getattr(s, name), s.response_mask, strict=True)])
    config = settings(algorithm={"kl_beta": beta})
    assert_same(gradients(Actor(config), clean), gradients(Actor(config), dirty))
    assert Actor(config).update(clean) == Actor(config).update(dirty)


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_a_sample_without_action_tokens_changes_nothing(settings, beta):
    """Pitfall 4: an empty response, and one that a tool wrote whole."""
    samples, config = uneven(seed=3), settings(algorithm={"kl_beta": beta})
    empty = sample(3, 8, samples[0].prompt, response=[], advantages=[])
    tool = sample(3, 9, samples[0].prompt, mask=[0, 0, 0], advantages=[1.0] * 3, ref_logprobs=[-1.0] * 3)
    assert_same(gradients(Actor(config), samples), gradients(Actor(config), [empty, *samples, tool]), 1e-12)


def test_advantages_that_were_not_filled_are_named(settings):
    with pytest.raises(RunError, match="group 3 has 0 advantages for 3 response tokens"):
        Actor(settings()).update([sample(3)])


def test_a_kl_in_the_reward_is_not_in_the_loss(settings):
    samples = uneven()
    both = {"name": "ppo", "kl_in": "reward", "kl_beta": 0.5}
    rewarded = gradients(Actor(settings(algorithm=both)), samples, kl_beta=0.7)
    assert_same(rewarded, gradients(Actor(settings(algorithm={"kl_beta": 0.0})), samples), 1e-12)


def test_a_given_beta_replaces_the_configured_one(settings):
    samples = uneven()
    given = gradients(Actor(settings(algorithm={"kl_beta": 0.1})), samples, kl_beta=0.4)
    assert_same(given, gradients(Actor(settings(algorithm={"kl_beta": 0.4})), samples), 1e-12)


# Actor: metrics, steps, state. -------------------------------------------------------------------------------------


def test_metrics_by_hand(settings):
    """The engine is off by 0.1, 0.3 and -1 nats, the last beyond the cap ln 2."""
    actor = Actor(settings())
    samples = [sample(0, 0, advantages=[1.0] * 3, mask=[1, 1, 0]), sample(0, 1, response=[5], advantages=[-1.0])]
    for s, own, gaps in zip(samples, actor.logprobs(samples), ([0.1, 0.3, 9.0], [-1.0]), strict=True):
        s.logprobs = [x + gap for x, gap in zip(own, gaps, strict=True)]
    metrics = actor.update(samples)
    corrections = [math.exp(-0.1), math.exp(-0.3), 2.0]
    expected = {
        "mismatch/mean": 1.4 / 3,
        "mismatch/max": 1.0,
        "correction/mean": sum(corrections) / 3,
        "correction/max": 2.0,
        "correction/cut": 1 / 3,
        "policy/loss": -(corrections[0] + corrections[1] - corrections[2]) / 3,
        "policy/clip_fraction": 0.0,
        "policy/approx_kl": 0.0,
        "first/approx_kl": 0.0,
        "first/ratio_max": 1.0,
        "first/tokens": 3,
        "first/skipped": 0,
        "policy/skipped_samples": 0,
        "policy/micro_tokens": 4096,
        "policy/lr": 1e-6,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, abs=1e-5)
    assert 0 < metrics["policy/entropy"] <= math.log(16) and metrics["policy/grad_norm"] > 0
    assert set(metrics) - set(expected) == {"policy/entropy", "policy/grad_norm"}


def test_several_steps_keep_the_old_policy_fixed(settings):
    """Two epochs of two mini-batches: the first is on-policy, the later ones are not; groups are never split."""
    actor, samples = Actor(settings(actor={"epochs": 2, "minibatches": 2, "lr": 1e-3}, run={"steps": 1})), uneven()
    before = actor.logprobs(samples)
    metrics = actor.update(samples)
    assert [s.old_logprobs for s in samples] == before
    assert metrics["first/approx_kl"] == pytest.approx(0, abs=1e-9)
    assert metrics["first/ratio_max"] == pytest.approx(1, abs=1e-5)
    assert metrics["policy/approx_kl"] > 1e-6
    assert actor.optimizer.steps == 4 == actor.optimizer.total


def test_a_single_step_is_to_the_old_policy_where_it_is_known(settings):
    """Old log-probabilities ln 2 below the present ones: ratio 2, clipped at 1.28 for an advantage of 1."""
    actor, samples = Actor(settings()), [sample(advantages=[1.0] * 3), sample(1, advantages=[1.0] * 3)]
    samples[0].old_logprobs = samples[0].logprobs = [x - math.log(2) for x in actor.logprobs(samples)[0]]
    samples[1].logprobs = actor.logprobs(samples)[1]
    metrics = actor.update(samples)  # the second's are filled: ratio 1
    assert metrics["policy/loss"] == pytest.approx(-(1.28 + 1) / 2, abs=1e-5)
    assert metrics["policy/clip_fraction"] == pytest.approx(0.5)
    assert metrics["first/ratio_max"] == pytest.approx(2, abs=1e-4)
    assert metrics["policy/approx_kl"] == pytest.approx((2 - 1 - math.log(2)) / 2, abs=1e-5)


def test_minibatches_are_whole_groups_in_an_order_of_the_seed_and_the_update(settings):
    def split(seed: int, given: list[Sample], updates: int = 0) -> list[list[int]]:
        trained = Actor(settings(actor={"minibatches": 3}, run={"seed": seed}))
        trained.updates = updates
        parts = [{(s.group_id, s.index) for s in part} for part in trained._minibatches(given)]
        assert set.union(*parts) == {(s.group_id, s.index) for s in given} and sum(map(len, parts)) == len(given)
        return [sorted({group for group, _ in part}) for part in parts]

    samples = uneven(groups=8, size=2)
    first = split(0, samples)
    assert [len(groups) for groups in first] == [3, 3, 2] and len({g for part in first for g in part}) == 8
    assert split(0, samples[::-1]) == first
    assert split(1, samples) != first and split(0, samples, updates=1) != first


def test_more_minibatches_than_groups_take_a_step_a_group(settings):
    actor = Actor(settings(actor={"minibatches": 9}))
    actor.update(uneven(groups=2))
    assert actor.optimizer.steps == 2
    assert actor.optimizer.steps + actor.optimizer.skipped == 8  # of 8 prompts: the schedule ends with the run


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("role", [Actor, Critic])
def test_save_and_load_continue_bit_for_bit(settings, tmp_path, role, dtype):
    train = {"lr": 1e-3, "warmup_steps": 2, "schedule": "cosine", "minibatches": 2}
    config = settings(model={"dtype": dtype}, actor=train, critic=train, algorithm={"name": "ppo", "kl_beta": 0.0})
    whole, first, second = role(config), role(config), role(config)
    samples = uneven()
    whole.update(copy.deepcopy(samples))
    first.update(copy.deepcopy(samples))
    first.save(tmp_path / "role")
    draw = torch.rand(3)
    second.load(tmp_path / "role")
    assert torch.equal(torch.rand(3), draw)
    assert_same(weights(first), weights(second))
    metrics = whole.update(copy.deepcopy(samples))
    assert second.update(copy.deepcopy(samples)) == metrics
    assert_same(weights(whole), weights(second))


def test_loading_keeps_the_parameters_that_an_engine_shares(settings, tmp_path):
    actor = Actor(settings(actor={"lr": 1e-2}))
    shared = dict(actor.loaded.model.named_parameters())
    before = weights(actor)
    actor.save(tmp_path)
    actor.update(uneven())
    assert not torch.equal(before["lm_head.weight"], shared["lm_head.weight"])
    actor.load(tmp_path)
    assert all(p is shared[name] for name, p in actor.loaded.model.named_parameters())
    assert_same(before, weights(actor))


def test_the_checkpoint_of_another_model_is_refused(settings, tmp_path):
    actor = Actor(settings())
    actor.save(tmp_path)
    wider = torch.nn.Linear(3, 2, bias=False)
    actor.module.lm_head = wider.to(actor.device)
    with pytest.raises(
        UserError, match=r"holds another model than model\.path = .*: lm_head\.weight is \[.*\] there and \[2, 3\] here"
    ):
        actor.load(tmp_path)


def test_the_final_model_is_a_hugging_face_folder(settings, tmp_path):
    actor = Actor(settings(actor={"lr": 1e-2, "checkpointing": True}))
    actor.update(uneven())
    actor.save_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert model.config._attn_implementation == "sdpa" and not model.is_gradient_checkpointing
    s = sample()
    assert plain_logprobs(model, s).tolist() == pytest.approx(actor.logprobs([s])[0], abs=1e-5)
    messages = [{"role": "user", "content": "1 2"}]
    for one in (tokenizer, actor.loaded.tokenizer):
        assert one.apply_chat_template(messages, tokenize=False) == "<bos><user>1 2"


def test_activation_checkpointing_recomputes_in_updates_only(settings):
    samples, calls = uneven(), []
    plain, saving = Actor(settings()), Actor(settings(actor={"checkpointing": True}))
    saving.loaded.model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    assert_same(gradients(plain, samples), gradients(saving, samples), 1e-12)
    assert len(calls) == 2
    saving.logprobs(samples)
    saving.loaded.model(input_ids=torch.tensor([[3, 4]])).logits.sum().backward()
    assert len(calls) == 4
    assert not any(module.training for module in saving.loaded.model.modules())


def test_too_little_memory_for_training_is_said_before_it_starts(settings, monkeypatch):
    loading = importlib.import_module("rolecall.models.load")  # the attribute of that name is a function
    monkeypatch.setattr(loading, "free_memory", lambda device: 2**20)
    with pytest.raises(UserError, match="training the actor"):
        Actor(settings())


def test_a_small_policy_gradient_run_improves(settings):
    """Reward: the share of three tokens that are "7" (1/16 by chance), by GRPO, sampled from the Actor's own model."""
    torch.manual_seed(0)
    actor = Actor(settings(actor={"lr": 1e-2}, run={"steps": 25}))
    prompts, seven, shares = [[2, 3, 6 + digit, 4] for digit in range(4)], 6 + 7, []
    for step in range(25):
        samples = []
        for group, prompt in enumerate(prompts):
            rows = torch.tensor([prompt] * 8)
            for _ in range(3):
                logits = actor.loaded.model(input_ids=rows).logits[:, -1]
                rows = torch.cat([rows, torch.multinomial(logits.softmax(-1), 1)], 1)
            samples += [sample(step * 4 + group, i, prompt, row[4:].tolist()) for i, row in enumerate(rows)]
        rewards = torch.tensor([s.response.count(seven) / 3 for s in samples])
        advantages = group_advantages(rewards, torch.tensor([s.group_id for s in samples]))
        for s, engine, advantage in zip(samples, actor.logprobs(samples), advantages.tolist(), strict=True):
            s.logprobs, s.advantages = engine, [advantage] * 3
        actor.update(samples)
        shares.append(rewards.mean().item())
    assert shares[0] < 0.2 and sum(shares[-3:]) / 3 > 0.9


# Reference. --------------------------------------------------------------------------------------------------------


def test_the_reference_is_the_actor_before_training(settings):
    config = settings(actor={"lr": 1e-2}, rollout={"temperature": 0.7})
    actor, reference, samples = Actor(config), Reference(config), uneven()
    before = reference.logprobs(samples)
    assert before == actor.logprobs(samples)
    assert before[0] == pytest.approx(plain_logprobs(actor.loaded.model, samples[0], 0.7).tolist(), abs=1e-5)
    actor.update(samples)
    assert reference.logprobs(samples) == before != actor.logprobs(samples)


# Critic. -----------------------------------------------------------------------------------------------------------


def ppo(settings, **critic: Any) -> Config:
    return settings(algorithm={"name": "ppo"}, critic=critic)


def test_values_start_at_zero_one_a_token(settings):
    samples = [sample(), sample(index=1, response=[5]), sample(1, response=[])]
    assert Critic(ppo(settings)).values(samples) == [[0.0] * 3, [0.0], []]


def test_a_value_knows_the_tokens_before_and_not_its_own(settings):
    critic = Critic(ppo(settings))
    torch.manual_seed(0)
    nn.init.normal_(critic._head.weight)
    one, other = critic.values([sample(response=[9, 10, 1]), sample(1, response=[9, 11, 1])])
    assert one[:2] == pytest.approx(other[:2], abs=1e-5)
    assert abs(one[2] - other[2]) > 1e-3


def test_the_critic_learns_its_returns(settings):
    """Each group's return is its own, so that it can be known from the prompt."""
    critic, samples = Critic(ppo(settings, lr=1e-2)), uneven()
    for s in samples:
        s.returns = [s.group_id / 50] * len(s.response)
    for _ in range(40):
        for s, values in zip(samples, critic.values(samples), strict=True):
            s.values = values
        metrics = critic.update(samples)
    assert metrics["value/explained_variance"] > 0.9 and metrics["value/loss"] < 0.02


def test_value_metrics_by_hand(settings):
    """Values 0 and returns 1, 2, 3: half the squared error is (1 + 4 + 9) / 6; old values of 0.1 explain nothing."""
    samples = [
        sample(values=[0.1, NAN, 0.1, 0.1], returns=[1.0, NAN, 2.0, 3.0], response=[9, 8, 7, 1], mask=[1, 0, 1, 1])
    ]
    metrics = Critic(ppo(settings)).update(samples)
    assert metrics["value/loss"] == pytest.approx(14 / 6)
    assert metrics["value/mean"] == pytest.approx(0.1)
    assert metrics["value/explained_variance"] == pytest.approx(0.0)
    assert metrics["value/grad_norm"] > 0 and metrics["value/lr"] == 1e-5


def test_accumulation_and_order_never_change_the_critic_gradient(settings):
    samples = uneven(seed=5)

    def found(given: list[Sample], micro_tokens: int) -> dict[str, Tensor]:
        critic = Critic(ppo(settings, micro_tokens=micro_tokens))
        torch.manual_seed(0)
        nn.init.normal_(critic._head.weight)
        return gradients(critic, given)

    whole = found(samples, 10_000)
    assert_same(whole, found(samples[::-1], 12), 1e-5)
    assert "head.weight" in whole and any(name.startswith("backbone.layers.0") for name in whole)


def test_a_critic_without_action_tokens_takes_no_step(settings):
    assert Critic(ppo(settings)).update([sample(mask=[0, 0, 0])]) == {}
