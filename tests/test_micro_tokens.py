"""How many tokens a micro-batch takes: as configured, or by the memory there is."""

import importlib
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rolecall import config
from rolecall.config import Config
from rolecall.errors import RunError, UserError
from rolecall.models import Loaded
from rolecall.roles.actor import Actor
from rolecall.roles.critic import Critic
from rolecall.roles.reference import Reference
from rolecall.training import memory
from rolecall.training.optimizer import Optimizer
from training_samples import uneven

CUDA = torch.device("cuda")


def model_of(layers: int, hidden: int = 64, inner: int = 192) -> Any:
    shape = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    return LlamaForCausalLM(LlamaConfig(vocab_size=16, num_attention_heads=4, **shape)).to(torch.bfloat16)


def test_activation_bytes_by_hand():
    """bfloat16, states of 64 and inner ones of 192: 2 x (16 x 64 + 4 x 192) = 3584 a layer, and two more in work."""
    model = model_of(layers=3)
    assert memory.activation_bytes(model, checkpointing=False) == (3 + 2) * 3584
    assert memory.activation_bytes(model, checkpointing=True) == 3 * 2 * 64 + 2 * 3584


@pytest.fixture(autouse=True)
def alone(monkeypatch) -> None:
    """A process without roles."""
    monkeypatch.setattr(memory, "_optimizers", WeakSet())


@pytest.fixture
def gpu(monkeypatch) -> Callable[[float], None]:
    """Make believe that so many GiB of a GPU are free."""
    return lambda gib: monkeypatch.setattr(memory, "free_memory", lambda device: gib * 2**30)


@pytest.mark.parametrize(
    ("free_gib", "expected"),
    [
        (200, memory.MOST["cuda"]),
        (3.2, 13 * 1024),  # 0.8 x (3.2 GiB - 2 for logits - 0.01 for gradients) over 72 KiB a token
        (1, memory.LEAST),
    ],
)
def test_on_a_gpu_what_is_free_decides(gpu, free_gib, expected):
    gpu(free_gib)
    assert memory.micro_tokens(config.Optimizer(), model_of(layers=1, hidden=512, inner=1024), CUDA) == expected


def test_what_is_configured_counts_and_a_cpu_has_a_fixed_default():
    model = model_of(layers=1)
    assert memory.micro_tokens(config.Optimizer(micro_tokens=77), model, CUDA) == 77
    assert memory.micro_tokens(config.Optimizer(), model, torch.device("cpu")) == 4096


# The roles of a process -------------------------------------------------------------------------------------------


def test_moments_are_expected_until_the_first_step(tiny_path):
    """8 bytes a parameter of each role, and then of those that have taken none."""
    settings = Config(model={"path": str(tiny_path)}, algorithm={"name": "ppo"})
    actor, critic = Actor(settings), Critic(settings)
    sizes = [sum(p.numel() for p in role.module.parameters()) for role in (actor, critic)]
    assert memory.expected() == 8 * sum(sizes)
    actor.update(uneven())
    assert memory.expected() == 8 * sizes[1]
    critic.update(uneven())
    assert memory.expected() == 0
    Actor(settings)
    assert memory.expected() == 0  # it is gone


def test_moments_to_come_make_micro_batches_smaller(gpu, caplog):
    """0.2 GiB of moments to come: 0.8 x (3.2 GiB - 2 for logits - 0.01 for gradients - 0.2) over 72 KiB a token."""
    weight = torch.nn.Parameter(torch.empty(2**18, 100, device="meta"))
    waiting = Optimizer([weight], config.Optimizer(), total=1)
    assert waiting.unallocated() == 8 * 2**18 * 100  # 0.195 GiB
    memory.expect(waiting)
    gpu(3.2)
    with caplog.at_level("INFO"):
        found = memory.micro_tokens(config.Optimizer(), model_of(layers=1, hidden=512, inner=1024), CUDA)
    assert found == 11 * 1024
    assert "of 11264 tokens: 3.2 GiB are free, less moments to come (of all roles here) 0.2, " in caplog.text


def test_without_a_backward_pass_a_token_takes_one_layer(gpu):
    """16 x 512 + 4 x 1024 values of 2 bytes are 24 KiB a token, whatever the layers: 0.8 x (2.3 GiB - 2 for logits)."""
    gpu(2.3)
    model = model_of(layers=9, hidden=512, inner=1024)
    assert memory.activation_bytes(model, checkpointing=False, backward=False) == 24 * 2**10
    assert memory.micro_tokens(config.Optimizer(), model, CUDA, backward=False) == 10 * 1024
    assert memory.micro_tokens(config.Optimizer(), model, CUDA) == memory.LEAST


def test_a_second_role_has_to_fit_beside_what_the_first_will_allocate(tiny_path, monkeypatch):
    settings = Config(model={"path": str(tiny_path)}, algorithm={"name": "ppo"})
    loading = importlib.import_module("rolecall.models.load")  # the attribute of that name is a function
    parameters = sum(p.numel() for p in Critic(settings).module.parameters())
    monkeypatch.setattr(loading, "free_memory", lambda device: 14 * parameters)  # 12 for one role, 20 for both
    Critic(settings)
    actor = Actor(settings)
    with pytest.raises(UserError, match=r"training the critic .* moments to come"):
        Critic(settings)
    del actor


# Out of memory -----------------------------------------------------------------------------------------------------


def exhausted(*_: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def test_out_of_memory_in_an_update_says_what_to_set(tiny_path):
    actor = Actor(Config(model={"path": str(tiny_path)}, actor={"micro_tokens": 100}))
    longest = max(len(sample.prompt) + len(sample.response) for sample in uneven())
    found = rf"actor.micro_tokens = 100 \(longest sample: {longest} tokens\)"
    with pytest.raises(RunError, match=rf"{found}. Set --actor.micro_tokens 50 or --actor.checkpointing true\.$"):
        actor.take_steps(uneven(), lambda sample: True, exhausted)


@pytest.mark.parametrize(
    ("role", "method", "section"),
    [(Actor, "logprobs", "actor"), (Reference, "logprobs", "actor"), (Critic, "values", "critic")],
)
def test_out_of_memory_outside_an_update_says_it_too(tiny_path, monkeypatch, role, method, section):
    given = {"micro_tokens": 100}
    found = role(Config(model={"path": str(tiny_path)}, algorithm={"name": "ppo"}, actor=given, critic=given))
    loaded: Any
    (loaded,) = (value for value in vars(found).values() if isinstance(value, Loaded))
    loaded.model.base_model.layers[0].register_forward_pre_hook(exhausted)
    with pytest.raises(RunError, match=rf"{section}.micro_tokens = 100 .* Set --{section}.micro_tokens 50\.$"):
        getattr(found, method)(uneven())


def test_a_sample_that_is_too_long_alone_is_told_apart(tiny_path):
    actor = Actor(Config(model={"path": str(tiny_path)}, actor={"micro_tokens": 2, "checkpointing": True}))
    with pytest.raises(RunError, match=r"Set a lower --rollout.max_tokens\.$"):
        actor.take_steps(uneven(), lambda sample: True, exhausted)
