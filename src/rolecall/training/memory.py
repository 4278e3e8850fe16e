"""One budget of GPU memory for all roles of a process: how many tokens a micro-batch of each takes at most.

The roles of a process compute one after the other. What one holds for a while (activations, logits, gradients up to its
optimizer's step) is free again when the next begins. What stays is Adam's moments, and they come late: with the first
step of each optimizer. So a role that sizes its micro-batches before that leaves room for the moments of all.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from rolecall import config as configuration
from rolecall.errors import RunError
from rolecall.models.load import free_memory
from rolecall.samples import Sample
from rolecall.training.logprobs import LOGITS
from rolecall.training.optimizer import Optimizer
from rolecall.training.sharding import WHOLE, Shards

MOST = {"cpu": 4096, "cuda": 16_384}  # where nothing is configured; more compute no faster
LEAST = 1024  # on a GPU, whatever the estimate
SHARE = 0.8  # of the free memory that the estimate may fill: the allocator loses some in fragments

log = logging.getLogger(__name__)

_optimizers: WeakSet[Optimizer] = WeakSet()  # of this process's roles


def expect(optimizer: Optimizer) -> None:
    """Leave room for the moments that its first step will allocate."""
    _optimizers.add(optimizer)


def expected() -> int:
    """Bytes of moments that optimizers of this process will still allocate."""
    return sum(optimizer.unallocated() for optimizer in _optimizers)


def micro_tokens(
    settings: configuration.Optimizer,
    model: nn.Module,
    device: torch.device,
    shards: Shards = WHOLE,
    *,
    backward: bool = True,
) -> int:
    """Most tokens of a micro-batch through ``model``.

    As configured; else as many as the GPU's free memory holds activations of, in steps of ``LEAST``, beside the moments
    of all roles here and what this one takes whatever its micro-batches.

    Args:
        shards: how the model lies over several processes.
        backward: it is trained; else it only computes log-probabilities, and keeps no activations.
    """
    if settings.micro_tokens is not None:
        return settings.micro_tokens
    if device.type != "cuda":
        return MOST[device.type]
    free, parts = free_memory(device), {"moments to come (of all roles here)": expected()}
    parts |= passing_bytes(model, shards.count, shards.dtype, backward=backward)
    token = activation_bytes(model, settings.checkpointing, backward, shards.dtype)
    tokens = max(LEAST, fitting(free - sum(parts.values()), token))
    log.info(
        "Micro-batches of %d tokens: %.1f GiB are free, less %s; a token's activations take %.2f MiB.",
        tokens,
        free / 2**30,
        ", ".join(f"{part} {size / 2**30:.1f}" for part, size in parts.items()),
        token / 2**20,
    )
    return tokens


def passing_bytes(
    model: nn.Module, ranks: int = 1, dtype: torch.dtype | None = None, *, backward: bool = True
) -> dict[str, int]:
    """Bytes, by part, that a role takes while it computes, whatever its micro-batches.

    Args:
        ranks: over which the model is sharded.
        dtype, backward: see ``micro_tokens`` and ``activation_bytes``.
    """
    parts = {"logits": head_bytes(model, backward)}
    if backward:
        parts["gradients"] = 4 * sum(p.numel() for p in model.parameters() if p.requires_grad) // ranks
    if ranks > 1:
        any_model: Any = model
        layers = [_numel(layer) for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)]
        # What is in no layer; and of a layer its weights, the next one's, its gradients, and these in FP32.
        gathered = _numel(model) - sum(layers) + (5 if backward else 2) * max(layers, default=0)
        parts["gathered weights"] = (dtype or any_model.dtype).itemsize * gathered
    return parts


def fitting(free: int, token: int) -> int:
    """Tokens of a micro-batch for whose activations so many bytes are free, each of them taking ``token``; 0: under
    ``LEAST``."""
    return min(MOST["cuda"], max(0, int(SHARE * free / token)) // LEAST * LEAST)


def activation_bytes(
    model: nn.Module, checkpointing: bool, backward: bool = True, dtype: torch.dtype | None = None
) -> int:
    """Bytes that a token's activations take from the forward to the backward pass, at most; or in the forward pass.

    Counted in layers of the Llama type: between its norms, projections and attention a layer keeps up to 16 tensors as
    wide as its states and 4 as wide as its inner ones (float32 ones as two). With checkpointing it keeps its input, and
    one layer at a time the rest; so the backward pass's own gradients are as large as one layer's. Without a backward
    pass nothing is kept behind the layer in work.
    """
    any_model: Any = model
    architecture = any_model.config.get_text_config()
    hidden = architecture.hidden_size
    heads = getattr(architecture, "num_attention_heads", 1)  # Mamba has none
    width = max(hidden, heads * (getattr(architecture, "head_dim", None) or hidden // heads))
    inner = getattr(architecture, "intermediate_size", None) or 4 * hidden
    layer = 16 * width + 4 * (max(inner) if isinstance(inner, list) else inner)
    itemsize = (dtype or any_model.dtype).itemsize
    if not backward:
        return itemsize * layer
    kept = hidden if checkpointing else layer
    return itemsize * (architecture.num_hidden_layers * kept + 2 * layer)


def head_bytes(model: nn.Module, backward: bool = True) -> int:
    """Of the chunk of logits in work with its gradient, and of the output embedding's gradient in FP32."""
    any_model: Any = model
    embedding = any_model.get_input_embeddings().weight.numel() if backward else 0
    return 8 * LOGITS["cuda"] + 8 * embedding


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@contextmanager
def advising(section: str, tokens: int, samples: list[Sample], other: str = "") -> Iterator[None]:
    """Out of memory while this runs ends in a message that says what to set.

    Args:
        section: of the configuration whose ``micro_tokens`` these are, configured or not.
        samples: that micro-batches are made of.
        other: what else would help, as on the command line.

    Raises:
        RunError: out of memory.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        longest = max(len(sample.prompt) + len(sample.response) for sample in samples)
        # A sample over the budget goes alone, whole: a smaller budget would change nothing.
        first = f"--{section}.micro_tokens {tokens // 2}" if longest < tokens else "a lower --rollout.max_tokens"
        raise RunError(
            f"Out of memory with {section}.micro_tokens = {tokens} (longest sample: {longest} tokens). "
            f"Set {' or '.join(filter(None, (first, other)))}."
        ) from error
