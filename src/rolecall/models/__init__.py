"""Hugging Face causal models: where they come from, whether they fit, how they are loaded."""

import logging

for name in ("torchao", "torch.utils._pytree"):
    # transformers imports torchao where it is installed, which then says at every start what it does without.
    logging.getLogger(name).setLevel(logging.ERROR)

from rolecall.models.load import (  # noqa: E402
    Loaded,
    check_memory,
    device,
    load,
    load_tokenizer,
    outline,
    peak_memory,
    resolve,
)

__all__ = ["Loaded", "check_memory", "device", "load", "load_tokenizer", "outline", "peak_memory", "resolve"]
