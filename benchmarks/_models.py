"""Models of real sizes with random weights, made where they are needed; and what their sizes cost."""

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from rolecall.errors import UserError, check_known
from rolecall.files import remove
from rolecall.models import device

SPECIAL = ["<pad>", "<eos>", "<often>", "<user>", "<assistant>"]
END, OFTEN = 1, 2  # the end of a response, which is hardly ever drawn; and what to end at for lengths with a long tail
CHAT_TEMPLATE = (
    "{% for message in messages %}<user>{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@dataclass(frozen=True)
class Size:
    """The dimensions of a Qwen2, and what they cost. FLOPs are of the forward pass; a backward pass takes twice that.

    ``tied``: the output embedding is the input's.
    """

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    tied: bool
    vocabulary: int = 151_936
    often: int = 128  # tokens from one ``OFTEN`` to the next, on average

    @property
    def head_size(self) -> int:
        return self.hidden // self.heads

    @property
    def body(self) -> int:
        """Parameters of the matrices of all layers: two FLOPs a token each."""
        attention = self.hidden * self.head_size * 2 * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def head(self) -> int:
        """Parameters of the output embedding: two FLOPs a token whose logits are wanted."""
        return self.vocabulary * self.hidden

    @property
    def pair_flops(self) -> int:
        """FLOPs of attention for one pair of a token and one that it sees, in all layers."""
        return 4 * self.layers * self.heads * self.head_size

    @property
    def token_bytes(self) -> int:
        """Of one token's keys and values in all layers, in bfloat16."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_size


SIZES = {
    "0.5B": Size(896, 4864, 24, 14, 2, True),
    "1.5B": Size(1536, 8960, 28, 12, 2, True),
    "3B": Size(2048, 11008, 36, 16, 2, True),
    "7B": Size(3584, 18944, 28, 28, 4, False),
    # One layer under a whole vocabulary, to measure the head alone; and one to try all of this on a CPU.
    "head": Size(896, 4864, 1, 14, 2, True),
    "tiny": Size(64, 192, 2, 2, 1, True, 1024, 4),
}


def check_sizes(sizes: Sequence[str]) -> None:
    """Refuse what is no size, and where there is no GPU, all that would take hours."""
    for size in sizes:
        check_known("size", size, SIZES)
        if size != "tiny" and device().type == "cpu":
            raise UserError(f"This benchmark wants a GPU for size {size}, and there is none. To try it: --size tiny.")


def architecture(shape: Size, tie_word_embeddings: bool) -> Qwen2Config:
    """A Qwen2 of that shape."""
    return Qwen2Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=4096,
        tie_word_embeddings=tie_word_embeddings,
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=0,
    )


def make(size: str, folder: Path | None = None) -> Path:
    """A Hugging Face folder of a Qwen2 of that size in bfloat16, made once: by default among the temporary files.

    Its tokenizer has a token for each byte, so that a prompt's length is that of its text. All tokens are about equally
    likely, but for ``OFTEN``: where that ends a response, lengths are nearly geometric.
    """
    folder = folder or Path(tempfile.gettempdir()) / "rolecall-bench" / size
    if folder.exists():
        return folder
    shape = SIZES[size]
    config = architecture(shape, tie_word_embeddings=shape.tied)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device():
            model = Qwen2ForCausalLM(config)
    finally:
        torch.set_default_dtype(torch.float32)
    _draw_often(model, shape.often)
    model.generation_config = GenerationConfig(eos_token_id=END, pad_token_id=0)
    new = folder.with_name(f".{folder.name}.new")
    remove(new)
    model.save_pretrained(new)
    _tokenizer().save_pretrained(new)
    # Whole or not at all also where this is interrupted. Not by ``atomic_folder``, which waits until all is on the
    # disk, so that a crash of the machine loses none of it: 15 GB of random weights are drawn sooner than that.
    new.rename(folder)
    del model
    torch.cuda.empty_cache()  # what comes now may want the whole GPU
    return folder


def outline(size: str, folder: Path) -> None:
    """The folder of ``make`` without weights: configuration and tokenizer, all that ``rolecall doctor`` reads."""
    config = architecture(SIZES[size], tie_word_embeddings=SIZES[size].tied)
    config.architectures = ["Qwen2ForCausalLM"]
    config.save_pretrained(folder)
    _tokenizer().save_pretrained(folder)


@torch.no_grad()
def _draw_often(model: Any, often: int) -> None:
    """Make the probability of ``OFTEN`` 1 / ``often``, on average over random tokens.

    The last layer's attention writes a constant into one dimension of the residual stream (a value that is its bias
    alone, whatever is attended to), and that token's row of the output embedding reads it. The constant is 20 times
    the other dimensions' size, so that the probability changes little from token to token.
    """
    last, embedding = model.model.layers[-1].self_attn, model.lm_head.weight
    streams: list[torch.Tensor] = []
    hook = model.model.norm.register_forward_pre_hook(lambda module, given: streams.append(given[0]))
    tokens = torch.randint(10, embedding.shape[0], (4, 128), device=embedding.device)
    model.model(input_ids=tokens, use_cache=False)
    hook.remove()
    last.v_proj.weight[0], last.v_proj.bias[0] = 0.0, 1.0
    last.o_proj.weight[0, 0] = 20 * streams[0].float().pow(2).mean().sqrt()
    embedding[:, 0] = 0.0
    hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state[:, ::4].flatten(0, 1)
    logits, constant = (hidden @ embedding.T).float(), hidden[:, 0].float()
    low, high = 0.0, 100.0
    for _ in range(40):
        middle = (low + high) / 2
        raised = logits.index_add(1, torch.tensor([OFTEN], device=logits.device), middle * constant[:, None])
        too_often = raised.softmax(-1)[:, OFTEN].mean() > 1 / often
        low, high = (low, middle) if too_often else (middle, high)
    embedding[OFTEN, 0] = low


def _tokenizer() -> Qwen2Tokenizer:
    """Qwen2's own, which transformers takes for a Qwen2 whatever lies in its folder: with bytes and no merges."""
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *sorted(ByteLevel.alphabet())])}
    tokenizer = Qwen2Tokenizer(
        vocab=vocabulary,
        merges=[],
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<pad>",
        additional_special_tokens=["<user>", "<assistant>"],
        model_max_length=4096,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def copy_rate() -> float:
    """Bytes a second that this device's memory reads and writes together, by one large copy."""
    small = device().type == "cpu"
    source = torch.zeros(2**24 if small else 2**31, dtype=torch.uint8, device=device())
    target = torch.empty_like(source)
    return 2 * source.numel() / _seconds(lambda: target.copy_(source))


def matmul_rate() -> float:
    """FLOP a second of one large product (8192 cubed in bfloat16)."""
    small = device().type == "cpu"
    side, dtype = (512, torch.float32) if small else (8192, torch.bfloat16)
    factor = torch.randn(side, side, device=device(), dtype=dtype)
    return 2 * side**3 / _seconds(lambda: factor @ factor)


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _seconds(work: Callable[[], object], repeats: int = 20) -> float:
    """Mean time of one call, after three for warming up."""
    for _ in range(3):
        work()
    synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    synchronize()
    return (time.perf_counter() - start) / repeats
