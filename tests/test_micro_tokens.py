"""How many tokens a micro-batch takes: as configured, or by the memory there is."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rolecall import config
from rolecall.config import Config
from rolecall.errors import RunError
from rolecall.roles.actor import Actor
from rolecall.training import memory
from training_samples import uneven


def model_of(layers: int, hidden: int = 64, inner: int = 192) -> Any:
    shape = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    return LlamaForCausalLM(LlamaConfig(vocab_size=16, num_attention_heads=4, **shape)).to(torch.bfloat16)


def test_activation_bytes_by_hand():
    """bfloat16, states of 64 and inner ones of 192: 2 x (16 x 64 + 4 x 192) = 3584 a layer, and two more in work."""
    model = model_of(layers=3)
    assert memory.activation_bytes(model, checkpointing=False) == (3 + 2) * 3584
    assert memory.activation_bytes(model, checkpointing=True) == 3 * 2 * 64 + 2 * 3584


@pytest.mark.parametrize(
    ("free_gib", "expected"),
    [
        (200, memory.MOST["cuda"]),
        (3.2, 13 * 1024),  # 0.8 x (3.2 GiB - 2 for logits - 0.03 for gradients and Adam) over 72 KiB a token
        (1, memory.LEAST),
    ],
)
def test_on_a_gpu_what_is_free_decides(monkeypatch, free_gib, expected):
    model = model_of(layers=1, hidden=512, inner=1024)
    monkeypatch.setattr(memory, "free_memory", lambda device: free_gib * 2**30)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    found = memory.micro_tokens(config.Optimizer(), model, torch.device("cuda"))
    assert found == expected


def test_what_is_configured_counts_and_a_cpu_has_a_fixed_default():
    model = model_of(layers=1)
    assert memory.micro_tokens(config.Optimizer(micro_tokens=77), model, torch.device("cuda")) == 77
    assert memory.micro_tokens(config.Optimizer(), model, torch.device("cpu")) == 4096


def test_out_of_memory_says_what_to_set(tiny_path: Path):
    actor = Actor(Config(model={"path": str(tiny_path)}, actor={"micro_tokens": 100}))

    def exhausted(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    with pytest.raises(
        RunError, match=r"micro-batch of \d+ tokens .* --actor.micro_tokens 50 or --actor.checkpointing"
    ):
        actor.take_steps(uneven(), lambda sample: True, exhausted)
