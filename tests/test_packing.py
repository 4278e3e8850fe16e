"""Packing: what lies in a micro-batch, and that a sample's log-probabilities do not depend on its company."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rolecall.errors import RunError
from rolecall.models import Loaded
from rolecall.models.attention import Packed, why_unsupported
from rolecall.training import packing
from rolecall.training.logprobs import sample_logprobs
from rolecall.training.packing import micro_batches
from training_samples import plain_logprobs, sample, uneven

SHAPE = {
    "vocab_size": 16,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


def make(kind: str, window: int = 4, layers: int = 2) -> Loaded:
    torch.manual_seed(0)
    if kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, **SHAPE))
    elif kind == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(num_hidden_layers=layers, **SHAPE))
    else:  # a sliding layer with a window shorter than the samples, and a full one
        layers = ["sliding_attention", "full_attention"]
        config = Gemma3TextConfig(num_hidden_layers=2, sliding_window=window, layer_types=layers, **SHAPE)
        model = Gemma3ForCausalLM(config)
    for parameter in model.parameters():  # norms of Gemma start at 0: make every weight matter
        torch.nn.init.normal_(parameter, std=0.3)
    model = model.double().eval()
    return Loaded(model, tokenizer=None, why=why_unsupported(model))


@pytest.fixture(scope="module", params=["llama", "qwen3", "gemma3"])
def loaded(request) -> Loaded:
    return make(request.param)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotations_that_depend_on_the_longest_sequence_are_not_packed(kind: str):
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 8}
    rotary = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0} | (factors if kind == "longrope" else {})
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, rope_parameters=rotary, **SHAPE))
    assert f"(rope_type {kind})" in why_unsupported(model)


def test_a_group_is_one_segment_with_its_prompt_once():
    samples = [sample(index=0, response=[9, 10, 1]), sample(index=1, response=[11, 1])]
    (micro,) = micro_batches(samples, 100, packed=True)
    assert micro.tokens.tolist() == [[6, 7, 8, 9, 10, 11]]
    assert micro.positions.tolist() == [[0, 1, 2, 3, 4, 3]]
    assert micro.predictors.tolist() == [2, 3, 4, 2, 5]
    assert micro.targets.tolist() == [9, 10, 1, 11, 1]
    assert micro.layout is not None
    (mask,) = micro.layout.masks
    assert mask.int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 1, 0],
        [1, 1, 1, 0, 0, 1],
    ]


def test_padded_rows_are_on_the_right_with_explicit_positions():
    samples = [sample(0, response=[9, 1]), sample(1, prompt=[6], response=[9, 10, 1])]
    (micro,) = micro_batches(samples, 100, packed=False)
    assert micro.tokens.tolist() == [[6, 7, 8, 9], [6, 9, 10, 0]]
    assert micro.attention_mask is not None and micro.attention_mask.tolist() == [[1, 1, 1, 1], [1, 1, 1, 0]]
    assert micro.positions.tolist() == [[0, 1, 2, 3]] * 2
    assert micro.predictors.tolist() == [2, 3, 4, 5, 6]
    assert micro.targets.tolist() == [9, 1, 9, 10, 1]


def test_flat_values_become_rows():
    samples = [sample(response=[9, 10, 1], mask=[1, 0, 1]), sample(index=1, response=[1])]
    (micro,) = micro_batches(samples, 100, packed=True)
    assert micro.rows(torch.tensor([1.0, 2.0, 3.0, 4.0])).tolist() == [[1, 2, 3], [4, 0, 0]]
    assert micro.mask.tolist() == [[True, False, True], [True, False, False]]
    samples[0].advantages, samples[1].advantages = [5.0, float("nan"), 6.0], [7.0]
    assert micro.field("advantages").tolist() == [[5, 0, 6], [7, 0, 0]]


def test_a_field_that_was_not_filled_is_named():
    (micro,) = micro_batches([sample(group_id=5)], 100, packed=True)
    with pytest.raises(RunError, match="group 5 has 0 ref_logprobs for 3 response tokens"):
        micro.field("ref_logprobs")


def test_groups_are_their_ids_not_their_text_or_place():
    """Two groups with the same prompt stay apart; one group's samples come together from anywhere in the batch."""
    samples = [sample(1, 0), sample(2, 0), sample(1, 1), sample(2, 1)]
    (micro,) = micro_batches(samples, 100, packed=True)
    assert [(s.group_id, s.index) for s in micro.samples] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert micro.layout is not None and [len(mask) for mask in micro.layout.masks] == [7, 7]


def test_one_group_id_for_two_prompts_is_refused():
    with pytest.raises(RunError, match="Group 4 holds samples of different prompts"):
        list(micro_batches([sample(4), sample(4, prompt=[1])], 100, packed=True))


@pytest.mark.parametrize("packed", [True, False])
def test_a_sample_over_the_budget_goes_alone_and_whole(packed):
    samples = [sample(0, 0), sample(0, 1, response=[9] * 50), sample(1, 0)]
    micros = list(micro_batches(samples, 12, packed=packed))
    long = next(micro for micro in micros if samples[1] in micro.samples)
    assert long.samples == [samples[1]] and long.tokens.numel() == 3 + 49


def test_a_group_over_the_budget_repeats_its_prompt():
    samples = [sample(0, i) for i in range(4)]  # 3 prompt tokens + 2 each
    sizes = [micro.tokens.numel() for micro in micro_batches(samples, 7, packed=True)]
    assert sizes == [7, 7]


def test_empty_responses_are_left_out():
    assert list(micro_batches([sample(response=[])], 100, packed=True)) == []
    (micro,) = micro_batches([sample(response=[]), sample(index=1)], 100, packed=False)
    assert [s.index for s in micro.samples] == [1]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 999), st.integers(1, 80), st.booleans(), st.integers(1, 6), st.integers(1, 6))
def test_every_sample_lands_once_within_the_budget(seed, budget, packed, groups, size):
    samples = uneven(groups, size, seed)
    micros = list(micro_batches(samples, budget, packed=packed))
    assert sorted(id(s) for micro in micros for s in micro.samples) == sorted(map(id, samples))
    for micro in micros:
        assert micro.tokens.numel() <= budget or len(micro.samples) == 1
        assert len(micro.predictors) == len(micro.targets) == sum(len(s.response) for s in micro.samples)


def test_log_probabilities_are_the_same_in_any_company(loaded):
    """Alone, padded, packed one a segment, packed behind a shared prompt: pitfall 11."""
    assert loaded.packed, loaded.why
    samples = uneven(groups=4, size=3, seed=1)
    expected = [plain_logprobs(loaded.model, s).tolist() for s in samples]
    padded = Loaded(loaded.model, None, why="padded for the test")
    ways = {
        "shared prefix": sample_logprobs(loaded, samples, 1.0, budget=10_000),
        "split groups": sample_logprobs(loaded, samples, 1.0, budget=12),
        "each alone": sample_logprobs(loaded, samples, 1.0, budget=1),
        "padded": sample_logprobs(padded, samples, 1.0, budget=10_000),
        "padded, few rows": sample_logprobs(padded, samples, 1.0, budget=20),
        "shuffled": sample_logprobs(loaded, samples[::-1], 1.0, budget=30)[::-1],
    }
    for way, values in ways.items():
        for row, right in zip(values, expected, strict=True):
            assert row == pytest.approx(right, abs=1e-9), way


def test_the_samples_above_are_longer_than_the_window():
    """Else the comparison would prove nothing about it: a window of 100 gives other values for the same weights."""
    near, far = make("gemma3").model, make("gemma3", window=100).model
    differ = [not plain_logprobs(near, s).allclose(plain_logprobs(far, s)) for s in uneven(4, 3, seed=1)]
    assert any(differ)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_temperature_divides_the_logits(temperature):
    loaded = make("llama")
    samples = uneven(2, 2, seed=3)
    for row, s in zip(sample_logprobs(loaded, samples, temperature, 100), samples, strict=True):
        assert row == pytest.approx(plain_logprobs(loaded.model, s, temperature).tolist(), abs=1e-9)


def test_without_compilation_a_gpu_attends_by_masks_as_a_cpu_does():
    """TORCH_COMPILE_DISABLE=1 sets this; FlexAttention without its kernel would make the scores of all tokens."""
    assert packing._skips_blocks("cuda", True) and not packing._skips_blocks("cpu", True)
    assert not packing._skips_blocks("cuda", False)
    with torch._dynamo.config.patch(disable=True):  # (monkeypatch would leave torch's switch unreadable)
        assert not packing._skips_blocks("cuda", True)


@given(
    st.lists(st.tuples(st.integers(1, 5), st.lists(st.integers(0, 4), min_size=1, max_size=4)), min_size=1, max_size=4),
    st.one_of(st.none(), st.integers(1, 6)),
)
def test_a_mask_is_what_each_token_sees(segments, window):
    """Token by token: (segment, part, position), part 0 the prompt. A response of one token has no part of its own."""
    tokens = []
    for number, (prompt, responses) in enumerate(segments):
        tokens += [(number, 0, place) for place in range(prompt)]
        tokens += [(number, i, prompt + place) for i, size in enumerate(responses, 1) for place in range(size)]

    def sees(i: int, j: int) -> bool:
        (segment, part, here), (other, its_part, there) = tokens[i], tokens[j]
        near = window is None or here - there < window
        return j <= i and segment == other and its_part in (0, part) and near

    mask = packing._mask([[prompt, *responses] for prompt, responses in segments], "cpu")
    (found,) = Packed([mask], torch.tensor([place for *_, place in tokens]))._masks(window)
    assert found.tolist() == [[sees(i, j) for j in range(len(tokens))] for i in range(len(tokens))]


def test_one_mask_for_all_segments_is_those_of_each(loaded, monkeypatch):
    samples = uneven(groups=3, size=3, seed=1)
    apart = sample_logprobs(loaded, samples, 1.0, 1000)
    monkeypatch.setattr(packing, "_joins_segments", lambda device, tokens: tokens <= 1000)
    (micro,) = micro_batches(samples, 1000, packed=True)
    assert [tuple(mask.shape) for mask in micro.layout.masks] == [(micro.tokens.shape[1],) * 2]
    for row, expected in zip(sample_logprobs(loaded, samples, 1.0, 1000), apart, strict=True):
        assert row == pytest.approx(expected, abs=1e-9)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_compiles_attention_for_many_tokens_and_masks_few():
    few, many = uneven(groups=3), uneven(groups=200, size=8)
    kinds = [
        type(next(micro_batches(samples, 10**6, packed=True, device="cuda", compiled=compiled)).layout).__name__
        for samples, compiled in ((few, False), (few, True), (many, False))
    ]
    assert kinds == ["Packed", "BlockSparse", "BlockSparse"]
