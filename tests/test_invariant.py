"""Equal bits in any batch: the native engine's log-probabilities are those of the Actor's forward pass.

On a CPU the kernels are ``row_by_row``'s, which shows that all that has to goes through them, and that pages and packed
tokens give them the same sequences. On a GPU they are the real ones, in float32 and bfloat16.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import row_by_row
from rolecall import models
from rolecall.config import Config, Model
from rolecall.engines.native.engine import NativeEngine
from rolecall.engines.native.paged import PagedEngine
from rolecall.engines.native.pages import PAGE
from rolecall.errors import RunError, UserError
from rolecall.loop.checks import bitwise
from rolecall.models import Loaded, invariant
from rolecall.models.attention import why_unsupported
from rolecall.models.invariant import listed, make_invariant
from rolecall.roles.actor import Actor
from rolecall.samples import Request, Sample, Sampling
from rolecall.training.logprobs import sample_logprobs, token_logprobs
from training_samples import gradients, uneven

DEVICE = models.device()
ON_GPU = pytest.mark.skipif(DEVICE.type != "cuda", reason="a Triton kernel")

SHAPE = {
    "vocab_size": 5000,  # more than a chunk of the logits
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "pad_token_id": 0,
}
WINDOWED = {"sliding_window": 40, "layer_types": ["sliding_attention", "full_attention"] * 2}
KINDS: dict[str, Any] = {
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {"num_hidden_layers": 2}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"num_hidden_layers": 2}),
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig, {"num_hidden_layers": 4} | WINDOWED),
}


@pytest.fixture(autouse=True)
def on_a_cpu_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE.type == "cpu":
        monkeypatch.setattr(invariant, "kernels", lambda: row_by_row)
        for user in ("rolecall.models.head", "rolecall.engines.native.invariant"):
            monkeypatch.setattr(f"{user}.kernels", lambda: row_by_row)


def build(kind: str, tokenizer: Any, dtype: torch.dtype = torch.float32, *, exact: bool = True) -> Loaded:
    """Random weights in which no bias is 0 and no norm 1."""
    model_class, config_class, given = KINDS[kind]
    torch.manual_seed(0)
    model: Any = model_class(config_class(**SHAPE | given)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.3 * torch.randn_like(parameter)
    model.to(DEVICE, dtype)
    why = why_unsupported(model)
    if exact:
        make_invariant(model)
    return Loaded(model, tokenizer, why, exact)


def asked(temperature: float = 0.7, tokens: int = 20) -> list[Request]:
    """Prompts of one token to three pages, at whose borders some end; groups of one to four."""
    sizes = [(1, 2), (PAGE - 9, 1), (PAGE + 1, 4), (2 * PAGE + 6, 2)]
    sampling = Sampling(tokens, temperature=temperature)
    return [Request(i, str(i), [3 + i] * size, n, 5, sampling) for i, (size, n) in enumerate(sizes)]


def same_bits(samples: list[Sample], rows: list[list[float]]) -> None:
    assert sum(len(sample.response) for sample in samples) > 100
    for sample, row in zip(samples, rows, strict=True):
        assert sample.logprobs == row  # as floats that are exact


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_the_engine_reports_the_actors_log_probabilities_bit_for_bit(
    tiny: Loaded, kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
):
    """Many rows and few, rows that give up their pages and are computed again; packed together and apart."""
    loaded, long, left = build(kind, tiny.tokenizer, dtype), asked(tokens=PAGE + 20), []
    leave = PagedEngine._leave
    monkeypatch.setattr(PagedEngine, "_leave", lambda engine, waiting: (left.append(1), leave(engine, waiting)))
    first = PagedEngine(loaded, 64).generate(long)
    for most, pages in ((2, None), (8, 6)):
        again = PagedEngine(loaded, most, pages).generate(long)
        assert [(s.response, s.logprobs) for s in again] == [(s.response, s.logprobs) for s in first]
    assert left
    same_bits(first, sample_logprobs(loaded, first, 0.7, 10_000))
    same_bits(first, sample_logprobs(loaded, first[::-1], 0.7, 90)[::-1])


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_same_model(tiny: Loaded, kind: str):
    """Up to rounding: against the ordinary mode, whose forward passes are another's."""
    drawn = NativeEngine(build(kind, tiny.tokenizer, exact=False), 64).generate(asked())
    ordinary = sample_logprobs(build(kind, tiny.tokenizer, exact=False), drawn, 0.7, 10_000)
    for row, right in zip(sample_logprobs(build(kind, tiny.tokenizer), drawn, 0.7, 10_000), ordinary, strict=True):
        assert row == pytest.approx(right, abs=1e-4)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_the_ordinary_ones(
    tiny: Loaded, tiny_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, checkpointing: bool
):
    def found(exact: bool) -> Any:
        loaded = build(kind, tiny.tokenizer, exact=exact)
        monkeypatch.setattr("rolecall.models.load", lambda *_: loaded)
        settings = {"checkpointing": checkpointing, "micro_tokens": 60}
        return gradients(Actor(Config(model={"path": str(tiny_path)}, actor=settings)), uneven(), torch.float32)

    torch.testing.assert_close(found(True), found(False), rtol=1e-3, atol=1e-5)


parts = st.tuples(st.integers(1, 9), st.lists(st.integers(0, 7), max_size=4)).map(lambda both: [both[0], *both[1]])


@given(st.lists(parts, min_size=1, max_size=4))
def test_a_tokens_sequence_is_its_prompt_and_its_own_part(segments: list[list[int]]):
    table, starts = listed(segments)
    at = token = 0
    for prompt, *responses in segments:
        shared = list(range(at, at + prompt))
        for number, size in enumerate([prompt, *responses]):
            sequence = shared + (list(range(at, at + size)) if number else [])
            for _ in range(size):
                assert table[starts[token] : starts[token] + len(sequence)].tolist() == sequence
                token += 1
            at += size
    assert token == len(starts)


@pytest.mark.parametrize("kind", KINDS)
def test_norms_take_their_means_from_the_kernel(tiny: Loaded, monkeypatch: pytest.MonkeyPatch, kind: str):
    """Rows of ones and a mean of their squares of 4 instead of 1: a half."""
    model: Any = build(kind, tiny.tokenizer).model
    norm, ones = model.model.norm, torch.ones(2, 1, SHAPE["hidden_size"], device=DEVICE)
    with torch.no_grad():
        norm.weight.fill_(0.0 if kind == "gemma3" else 1.0)  # Gemma's norm counts from 1
        monkeypatch.setattr(invariant.kernels(), "row_means", lambda x: torch.full(x.shape[:-1], 4.0, device=DEVICE))
        torch.testing.assert_close(norm(ones), ones / 2)


def test_log_probabilities_by_hand():
    logits, head = torch.tensor([[0.0, 2 * torch.log(torch.tensor(3.0))]], device=DEVICE), None
    found, _ = token_logprobs(logits, head, torch.tensor([1], device=DEVICE), 2.0, invariant=True)
    assert found.tolist() == pytest.approx([-0.287682])  # log 3/4


# Configuration and the run's own check. ----------------------------------------------------------------------------


@pytest.mark.parametrize("given", [{"rollout": {"engine": "vllm"}}, {"model": {"lora_rank": 4}}])
def test_what_cannot_be_invariant_is_refused(given: dict[str, Any]):
    sections = {"model": {"batch_invariant": True} | given.get("model", {}), "rollout": given.get("rollout", {})}
    with pytest.raises(UserError, match=r"model.batch_invariant is for rollout.engine = 'native' and no LoRA adapter"):
        Config(**sections)


def test_a_cpu_is_refused(tiny_path: Path):
    with pytest.raises(UserError, match=r"model.batch_invariant = true: it needs a GPU, and the model is on cpu"):
        models.load(Model(path=str(tiny_path), batch_invariant=True), "cpu")


def test_a_difference_stops_the_run():
    bitwise({})  # nothing was trained on
    bitwise({"mismatch/mean": 0.0, "mismatch/max": 0.0})
    for largest in (1e-7, float("nan")):
        with pytest.raises(RunError, match=f"differ by 1e-09 on average and {largest:g} at most, expected 0"):
            bitwise({"mismatch/mean": 1e-9, "mismatch/max": largest})


# The kernels. ------------------------------------------------------------------------------------------------------

COUNTS = (1, 3, 16, 200, 5000)  # rows: of both tiles, and of a part of one


@ON_GPU
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inner", "columns"), [(896, 1152), (100, 77), (4864, 896)])
def test_a_products_rows_do_not_depend_on_their_number(dtype: torch.dtype, inner: int, columns: int):
    from rolecall.models.kernels import product

    torch.manual_seed(0)
    a, b = (torch.randn(size, inner, device=DEVICE, dtype=dtype) for size in (max(COUNTS), columns))
    bias = torch.randn(columns, device=DEVICE, dtype=dtype)
    whole = product(a, b, bias, torch.float32)
    wanted = a.double() @ b.double().t() + bias.double()
    assert (whole - wanted).abs().max() < 1e-2
    for count in COUNTS:
        assert torch.equal(product(a[-count:], b, bias, torch.float32), whole[-count:])
        half = columns // 2  # as where q, k and v are one product
        assert torch.equal(product(a[-count:], b[half:], bias[half:], dtype), whole[-count:, half:].to(dtype))


@ON_GPU
@pytest.mark.parametrize("size", [64, 128, 896, 3584])
def test_means_do_not_depend_on_the_number_of_rows(size: int):
    from rolecall.models.kernels import row_means

    x = torch.randn(max(COUNTS), size, device=DEVICE)
    whole = row_means(x)
    assert torch.allclose(whole, x.mean(-1), atol=1e-6)
    for count in COUNTS:
        assert torch.equal(row_means(x[-count:]), whole[-count:])
