"""How large a cache an engine with weights of its own may have: it may share its GPU with the Actor."""

from typing import Any

import torch

from rolecall import models
from rolecall.models.load import free_memory


def cache_tokens(outline: Any, longest: int, sequences: int, device: torch.device, *, block: int, engine: str) -> int:
    """Room for keys and values of ``sequences`` of the greatest length, within half of the memory that is free.

    With less than that for all, an engine lets some wait.

    Args:
        outline: the model (see ``models.outline``).
        longest: tokens of a prompt and its response.
        block: tokens that are taken together; one block more is left to the engine itself.
        engine: its name, for the message.

    Returns:
        Tokens, whole blocks.

    Raises:
        UserError: there is no room for one sequence.
    """
    size = block * token_bytes(outline)
    one, spare = -(-longest // block), 1  # blocks
    what = f"a response of {longest} tokens (with its prompt) in {engine}'s cache"
    models.check_memory((one + spare) * size, what, device)
    return block * max(one + spare, min(one * sequences + spare, free_memory(device) // 2 // size))


def token_bytes(outline: Any) -> int:
    """Bytes of one token's keys and values in all layers."""
    shape = outline.config.get_text_config()
    heads = getattr(shape, "num_key_value_heads", None) or shape.num_attention_heads
    return 2 * shape.num_hidden_layers * heads * head_size(outline) * outline.dtype.itemsize


def head_size(outline: Any) -> int:
    shape = outline.config.get_text_config()
    return getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
