"""Prompts: read, rendered and tokenised once, drawn in an order that a checkpoint can hold."""

from rolecall.data.prompts import load_prompts
from rolecall.data.sampler import Sampler

__all__ = ["Sampler", "load_prompts"]
