"""Models of real sizes with random weights, made where they are needed."""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rolecall.models import device, tiny

# hidden, intermediate, layers, heads, key-value heads, tied: the dimensions of Qwen2
SIZES = {
    "0.5B": (896, 4864, 24, 14, 2, True),
    "1.5B": (1536, 8960, 28, 12, 2, True),
    "3B": (2048, 11008, 36, 16, 2, True),
    "7B": (3584, 18944, 28, 28, 4, False),
}


def make(size: str, folder: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """A Hugging Face folder of a Llama of that size, with the word-level tokenizer of the model "tiny"."""
    if not (folder / "config.json").exists():
        tiny.make(folder)
        hidden, intermediate, layers, heads, kv_heads, tied = SIZES[size]
        config = LlamaConfig(
            vocab_size=151_936,
            hidden_size=hidden,
            intermediate_size=intermediate,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            max_position_embeddings=4096,
            tie_word_embeddings=tied,
            bos_token_id=2,
            eos_token_id=1,
            pad_token_id=0,
        )
        torch.manual_seed(0)
        torch.set_default_dtype(dtype)
        try:
            with device():
                LlamaForCausalLM(config).save_pretrained(folder)
        finally:
            torch.set_default_dtype(torch.float32)
    return folder
