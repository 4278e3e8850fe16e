"""What every trained role shares: the length of its schedule, and a model without dropout."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    LlamaConfig,
    OPTConfig,
    PretrainedConfig,
)

from rolecall.config import Config
from rolecall.roles.actor import Actor
from rolecall.roles.critic import Critic
from training_samples import gradients, uneven


def settings(model: Path, **sections: Any) -> Config:
    return Config(model={"path": str(model), "dtype": "float32"}, **sections)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_an_interrupted_update_has_computed_is_no_part_of_the_next(tiny_path, monkeypatch, dtype):
    """Interrupted in the second of several micro-batches, as in a notebook; then asked again."""
    config = Config(model={"path": str(tiny_path), "dtype": dtype}, actor={"micro_tokens": 30})
    whole, interrupted = Actor(config), Actor(config)
    batches = iter([interrupted._loss])

    def loss(*args: Any, **options: Any) -> Any:
        if first := next(batches, None):
            return first(*args, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(interrupted, "_loss", loss)
        interrupted.update(uneven())
    assert interrupted.update(uneven())["policy/grad_norm"] == whole.update(uneven())["policy/grad_norm"]


# The schedule ends with the run. -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("optimizer", "actor_steps", "critic_steps"),
    [
        ({}, 3, 5),
        ({"minibatches": 2, "epochs": 3}, 3 * 6, 5 * 6),
        ({"minibatches": 9}, 3 * 4, 5 * 4),  # no more than prompts: a group is not split
    ],
)
def test_as_many_steps_are_planned_as_are_taken(tiny_path, optimizer, actor_steps, critic_steps):
    """Five steps of four prompts; the Critic trains alone in the first two."""
    config = settings(
        tiny_path,
        algorithm={"name": "ppo", "kl_beta": 0.0},
        rollout={"prompts": 4, "max_tokens": 8},
        actor=optimizer,
        critic=optimizer | {"warmup_only": 2},
        run={"steps": 5},
    )
    actor, critic = Actor(config), Critic(config)
    for step in range(5):
        samples = uneven(groups=4, seed=step)
        critic.update(samples)
        if step >= 2:
            actor.update(samples)
    assert actor.optimizer.steps == actor_steps == actor.optimizer.total
    assert critic.optimizer.steps == critic_steps == critic.optimizer.total


def test_without_a_critic_nobody_waits_for_it(tiny_path):
    actor = Actor(settings(tiny_path, critic={"warmup_only": 2}, run={"steps": 5}))
    assert actor.optimizer.total == 5


def test_a_step_with_nothing_to_learn_counts_in_the_schedule_and_not_in_the_warm_up(tiny_path, tmp_path):
    """Seven steps, one of warm-up, linear: 2/6 are done after the third although one was skipped, also once resumed."""
    actor = {"lr": 0.6, "warmup_steps": 1, "schedule": "linear"}
    config = settings(tiny_path, rollout={"max_tokens": 8}, actor=actor, run={"steps": 7})
    first, resumed = Actor(config), Actor(config)
    flat = uneven()
    for sample in flat:
        sample.advantages = [0.0] * len(sample.response)
    first.update(flat)
    assert first.optimizer.lr == 0.6  # the warm-up's only step is still to come
    first.update(uneven())
    first.update(uneven())
    assert (first.optimizer.steps, first.optimizer.skipped) == (2, 1)
    first.save(tmp_path)
    resumed.load(tmp_path)
    assert first.optimizer.lr == resumed.optimizer.lr == pytest.approx(0.6 * (1 - 2 / 6))


# Dropout. ----------------------------------------------------------------------------------------------------------

SHAPE = {"vocab_size": 16, "max_position_embeddings": 64, "num_attention_heads": 2, "hidden_size": 16}
WITH_DROPOUT = {  # by a function in the attention, by modules, and by a function in the layer itself
    "llama": LlamaConfig(**SHAPE, num_hidden_layers=2, intermediate_size=32, attention_dropout=0.5),
    "gpt2": GPT2Config(**SHAPE, num_hidden_layers=2, resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5),
    "opt": OPTConfig(
        **SHAPE, num_hidden_layers=2, ffn_dim=32, word_embed_proj_dim=16, dropout=0.5, attention_dropout=0.5
    ),
}


@pytest.fixture(params=WITH_DROPOUT.values(), ids=WITH_DROPOUT.keys())
def with_dropout(request: pytest.FixtureRequest, tiny_path: Path, tmp_path: Path) -> Path:
    """A folder with a model whose own training mode is random."""
    configuration: PretrainedConfig = request.param
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(configuration)
    model.train()
    tokens = torch.tensor([[6, 7, 8]])
    assert not torch.equal(model(input_ids=tokens).logits, model(input_ids=tokens).logits)
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tiny_path).save_pretrained(tmp_path)
    return tmp_path


def test_activation_checkpointing_leaves_dropout_off(with_dropout):
    plain = gradients(Actor(settings(with_dropout)), uneven())
    recomputed = gradients(Actor(settings(with_dropout, actor={"checkpointing": True})), uneven())
    assert max(gradient.abs().max() for gradient in plain.values()) > 1e-3
    torch.testing.assert_close(recomputed, plain, rtol=0, atol=0)
