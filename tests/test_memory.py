"""Memory that must not grow: with tokens x vocabulary (pitfall 25), and step by step (pitfall 30)."""

import gc
from functools import partial

import psutil
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from rolecall.config import Config
from rolecall.models import Loaded
from rolecall.models.attention import why_unsupported
from rolecall.roles.actor import Actor
from rolecall.training import logprobs as module
from rolecall.training.packing import micro_batches
from training_samples import sample, uneven


class Largest(TorchDispatchMode):
    """The most elements of any tensor that an operation makes, forward or backward."""

    elements = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        made = function(*arguments, **(options or {}))
        for tensor in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return made


def test_no_tensor_has_tokens_times_vocabulary_elements(monkeypatch):
    """200 tokens x 2,000 entries are 400,000 logits. With a limit of 8,000 what attends to what is the largest."""
    config = LlamaConfig(
        vocab_size=2000, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )
    model = LlamaForCausalLM(config).eval()
    loaded = Loaded(model, None, why=why_unsupported(model))
    (micro,) = micro_batches([sample(response=[5] * 200)], 1000, packed=True)
    token_logprobs = module.token_logprobs

    def largest(limit: int) -> int:
        monkeypatch.setattr(module, "token_logprobs", partial(token_logprobs, limit=limit))
        with Largest() as seen:
            logprobs, _ = module.policy_logprobs(loaded, micro, 1.0)
            logprobs.sum().backward()
        return seen.elements

    assert largest(10**9) == 200 * 2000
    assert largest(8000) <= 2 * 202 * 202  # of two heads


def test_host_memory_is_flat_over_200_updates(tiny_path):
    actor = Actor(Config(model={"path": str(tiny_path), "dtype": "float32"}, actor={"micro_tokens": 20}))
    samples = uneven(groups=2)

    def after(updates: int) -> tuple[int, int]:
        for _ in range(updates):
            actor.update(samples)
        gc.collect()
        return psutil.Process().memory_info().rss, len(gc.get_objects())

    (memory, objects), (later_memory, later_objects) = after(50), after(200)
    assert later_objects - objects < 200  # not one a step
    assert later_memory - memory < 16 * 2**20
