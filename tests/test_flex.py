"""Packed training as on a GPU: what the block mask lists, and that log-probabilities and gradients do not change.

FlexAttention refuses gradients on a CPU, where it has no kernel for them; its reference implementation, which these
tests use, has them. Compilation goes through dynamo and autograd as on a GPU, without the generation of kernels.
"""

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import flex_attention
from torch.nn.attention.flex_attention import create_mask
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

from rolecall.config import Config
from rolecall.models import compiled, flex
from rolecall.models.compiled import compile_layers
from rolecall.models.flex import BLOCK, BlockSparse
from rolecall.models.load import Loaded
from rolecall.roles.actor import Actor
from rolecall.training import packing
from rolecall.training.logprobs import response_hidden, sample_logprobs
from rolecall.training.memory import activation_bytes
from rolecall.training.packing import micro_batches
from test_packing import SHAPE, make
from training_samples import gradients, sample, uneven


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> CompileCounterWithBackend:
    """Packs as for a GPU, and counts what is compiled."""
    counter = CompileCounterWithBackend("aot_eager_decomp_partition")

    compile = torch.compile
    options = {"backend": counter}
    monkeypatch.setattr(torch, "compile", lambda function, **given: compile(function, **options | given))
    monkeypatch.setattr(packing, "_skips_blocks", lambda *_: True)
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)
    attention = flex._attention.__wrapped__
    monkeypatch.setattr(flex, "_attention", torch.compile(attention, dynamic=True, fullgraph=True))
    torch._dynamo.reset()
    compiled.compiled.cache_clear()
    return counter


# The block mask. ---------------------------------------------------------------------------------------------------


def by_definition(segments: list[list[int]], window: int | None) -> Tensor:
    """(L, L) from each token's segment, part and position."""
    parts = [(s, p, n) for s, lengths in enumerate(segments) for p, n in enumerate(lengths)]
    prompts = {s: lengths[0] for s, lengths in enumerate(segments)}
    rows = [(s, p, i + (prompts[s] if p else 0)) for s, p, n in parts for i in range(n)]
    segment, part, position = torch.tensor(rows).unbind(1)
    visible = (segment[:, None] == segment) & ((part == 0) | (part[:, None] == part))
    visible &= torch.ones_like(visible).tril()
    return visible if window is None else visible & (position[:, None] - position < window)


# A prompt and responses, of which those of one token have nothing to compute behind the prompt.
parts = st.tuples(st.integers(1, 300), st.lists(st.integers(0, 300), max_size=4)).map(lambda both: [both[0], *both[1]])


@settings(max_examples=60)
@given(st.lists(parts, min_size=1, max_size=4), st.none() | st.integers(1, 400))
def test_the_block_mask_lists_what_a_segment_sees(segments, window):
    if rest := -sum(chain.from_iterable(segments)) % BLOCK:
        segments = [*segments, [rest]]
    right = by_definition(segments, window)
    mask = BlockSparse(segments, "cpu", window)._masks[window]
    size = len(right)
    assert torch.equal(create_mask(mask.mask_mod, 1, 1, size, size, device="cpu")[0, 0], right)
    tiles = right.view(size // BLOCK, BLOCK, size // BLOCK, BLOCK)
    assert torch.equal(mask.to_dense()[0, 0].bool(), tiles.any(3).any(1))  # computed: all with something to see
    full = flex_attention._ordered_to_dense(mask.full_kv_num_blocks, mask.full_kv_indices, size // BLOCK)[0, 0].bool()
    assert not (full & ~tiles.all(3).all(1)).any()  # unmasked: only where all is seen


def test_a_block_that_one_range_fills_is_not_masked():
    """A prompt of three blocks and a response of one: below the diagonal all six are seen whole."""
    mask = BlockSparse([[3 * BLOCK, BLOCK]], "cpu")._masks[None]
    assert mask.kv_num_blocks.tolist() == [[[1, 1, 1, 1]]]
    assert mask.full_kv_num_blocks.tolist() == [[[0, 1, 2, 3]]]


def test_the_last_block_is_filled_up(compiler):
    """And there are two at least."""
    (micro,) = micro_batches([sample(), sample(1)], 100, packed=True)
    assert micro.tokens.shape == micro.positions.shape == (1, 2 * BLOCK)
    assert micro.positions[0, :12].tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]
    assert micro.predictors.tolist() == [2, 3, 4, 7, 8, 9]
    (micro,) = micro_batches([sample(prompt=[6] * 300)], 1000, packed=True)
    assert micro.tokens.shape == (1, 3 * BLOCK)


# The same numbers. -------------------------------------------------------------------------------------------------


def mixed() -> list[Any]:
    """Groups of one to six, a prompt of one token, responses of one token, and more than a block in all."""
    samples = uneven(groups=3, size=6, seed=4) + uneven(groups=1, size=1, seed=5)
    samples[-1].group_id = 1
    long = [sample(500, i, prompt=[3] * 90, response=[5, 7] * (20 + i)) for i in range(3)]
    return [*samples, sample(600, prompt=[6], response=[9]), *long]


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3"])
@pytest.mark.parametrize("budget", [10_000, 60])
def test_log_probabilities_are_those_of_the_masks(compiler, monkeypatch, kind, budget):
    loaded = make(kind)
    found = sample_logprobs(loaded, mixed(), 0.7, budget)
    monkeypatch.undo()
    expected = sample_logprobs(loaded, mixed(), 0.7, budget)
    for row, right in zip(found, expected, strict=True):
        assert row == pytest.approx(right, abs=1e-9)


@pytest.fixture
def actor_of(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Actor whose model is one of test_packing's, with compiled layers."""

    def build(kind: str, **settings: Any) -> Actor:
        model = make(kind).model.float()
        monkeypatch.setattr("rolecall.models.load", lambda *_: Loaded(model, None, None))
        actor = Actor(Config(model={"path": str(tiny_path)}, actor=settings))
        compile_layers(actor.loaded.model)
        return actor

    return build


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_gradients_are_those_of_the_masks_and_layers_compile_once_a_kind(
    compiler, monkeypatch, actor_of, kind, checkpointing
):
    """Updates with batches of other lengths, several micro-batches each: one compiled layer a kind."""
    batches = [uneven(groups=4 + 3 * i, size=5, seed=i) for i in range(3)]
    actor = actor_of(kind, micro_tokens=150, checkpointing=checkpointing)
    found = [gradients(actor, batch) for batch in batches]
    kinds = {"llama": 1, "gemma3": 2}[kind]
    assert compiler.frame_count == kinds
    monkeypatch.setattr(packing, "_skips_blocks", lambda *_: False)
    expected = [gradients(actor, batch) for batch in batches]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)  # Gemma's norms are float32
    assert compiler.frame_count == kinds  # masks run through layers as they are


def test_generate_runs_the_layers_as_they_are(compiler):
    model: Any = make("llama").model.float()
    tokens = torch.tensor([[3, 5, 7]])
    before = model.generate(tokens, max_new_tokens=5, do_sample=False)
    compile_layers(model)
    assert torch.equal(model.generate(tokens, max_new_tokens=5, do_sample=False), before)
    assert compiler.frame_count == 0


def test_layers_are_numbered_as_their_attention_is_whatever_stands_before_them():
    """A Gemma that reads images: its vision layers come first and are left alone."""
    text = {**SHAPE, "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    image = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    ids = {"boi_token_index": 13, "eoi_token_index": 14, "image_token_index": 15}
    model: Any = Gemma3ForConditionalGeneration(Gemma3Config(text_config=text, vision_config=image, **ids))
    compile_layers(model)
    numbers = {name: module.forward.args[1] for name, module in model.named_modules() if "forward" in vars(module)}
    assert numbers == {f"model.language_model.layers.{number}": number for number in (0, 1)}


# Memory. -----------------------------------------------------------------------------------------------------------


def kept_bytes(model: Any, compiled: bool) -> int:
    """What autograd keeps of 512 tokens' forward pass, parameters aside."""
    if compiled:
        compile_layers(model)
    (micro,) = micro_batches([sample(prompt=[3] * 256, response=[5] * 257)], 1000, packed=True)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        response_hidden(model, micro)
    return sum(size for where, size in kept.items() if where not in own)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_activations_are_not_underestimated(compiler, kind, compiled):
    """Of a layer, in bfloat16: the difference between two models, one with two layers more."""
    few, many = (make(kind, layers=layers).model.bfloat16() for layers in (2, 4))
    kept = (kept_bytes(many, compiled) - kept_bytes(few, compiled)) / 2 / 512
    estimated = (activation_bytes(many, False) - activation_bytes(few, False)) / 2
    assert 0.95 * kept <= estimated <= 2 * kept
