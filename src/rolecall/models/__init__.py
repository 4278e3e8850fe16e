"""Hugging Face causal models: where they come from, whether they fit, how they are loaded."""

from rolecall.models.load import Loaded, check_memory, device, load, load_tokenizer, outline, peak_memory, resolve

__all__ = ["Loaded", "check_memory", "device", "load", "load_tokenizer", "outline", "peak_memory", "resolve"]
