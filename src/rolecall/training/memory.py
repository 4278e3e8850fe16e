"""How many tokens a micro-batch takes at most: as configured, else as many as the memory holds."""

import logging
from typing import Any

import torch
from torch import nn

from rolecall import config as configuration
from rolecall.models.load import free_memory
from rolecall.training.logprobs import LOGITS

MOST = {"cpu": 4096, "cuda": 16_384}  # where nothing is configured; more compute no faster
LEAST = 1024  # on a GPU, whatever the estimate
SHARE = 0.8  # of the free memory that the estimate may fill: the allocator loses some in fragments

log = logging.getLogger(__name__)


def micro_tokens(settings: configuration.Optimizer, model: nn.Module, device: torch.device) -> int:
    """Most tokens of a micro-batch that trains ``model``, whose gradients and optimizer state may not be there yet.

    As configured; else as many as the GPU's free memory holds activations of, in steps of ``LEAST``.
    """
    if settings.micro_tokens is not None:
        return settings.micro_tokens
    if device.type != "cuda":
        return MOST[device.type]
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    free = free_memory(device) - 12 * trained - head_bytes(model)  # FP32 gradients and Adam's two moments
    token = activation_bytes(model, settings.checkpointing)
    tokens = min(MOST["cuda"], max(LEAST, int(SHARE * free / token) // LEAST * LEAST))
    log.info(
        "Micro-batches of %d tokens: %.1f GiB are free for activations of %.2f MiB a token.",
        tokens,
        free / 2**30,
        token / 2**20,
    )
    return tokens


def activation_bytes(model: nn.Module, checkpointing: bool) -> int:
    """Bytes that a token's activations take from the forward to the backward pass, at most.

    Counted in layers of the Llama type: between its norms, projections and attention a layer keeps up to 16 tensors as
    wide as its states and 4 as wide as its inner ones (float32 ones as two). With checkpointing it keeps its input, and
    one layer at a time the rest; so the backward pass's own gradients are as large as one layer's.
    """
    any_model: Any = model
    architecture = any_model.config.get_text_config()
    hidden = architecture.hidden_size
    heads = architecture.num_attention_heads
    width = max(hidden, heads * (getattr(architecture, "head_dim", None) or hidden // heads))
    inner = getattr(architecture, "intermediate_size", None) or 4 * hidden
    layer = 16 * width + 4 * inner
    kept = hidden if checkpointing else layer
    return any_model.dtype.itemsize * (architecture.num_hidden_layers * kept + 2 * layer)


def head_bytes(model: nn.Module) -> int:
    """Of the chunk of logits in work with its gradient, and of the output embedding's gradient in FP32."""
    any_model: Any = model
    return 8 * LOGITS["cuda"] + 8 * any_model.get_input_embeddings().weight.numel()
