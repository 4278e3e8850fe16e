"""The engines on a model in this process: four architectures in both, and what is the native engine's own.

What every engine must hold, whatever the architecture, is in test_engines_conform.py.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from forward import plain, sampled_logprobs
from rolecall import engines
from rolecall.config import Config
from rolecall.engines.native.cache import Cache, Prefill
from rolecall.engines.native.engine import NativeEngine
from rolecall.engines.transformers import TransformersEngine
from rolecall.errors import UserError
from rolecall.models import Loaded
from rolecall.models.attention import why_unsupported
from rolecall.samples import Request, Sample, Sampling

VOCABULARY, CONTEXT = 200, 96
ENDS = [1, *range(60, 80)]  # so many end tokens that samples have many lengths
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.25,  # distributions that are far from flat and depend on the context
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": ENDS,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SHAPE, tie_word_embeddings=False),
    "qwen3": Qwen3Config(**SHAPE, tie_word_embeddings=False),
    "gemma3": Gemma3TextConfig(  # one layer sees all, two see the last 6 tokens
        **SHAPE, sliding_window=6, layer_types=["sliding_attention", "full_attention", "sliding_attention"]
    ),
}
PROMPTS = [[5, 9, 100], [7], [9, 8, 7, 6, 5, 44, 45, 46, 47, 48, 49], [150, 3, 60, 7, 7, 7]]
STEM = [5, 9, 100, 44, 45, 46, 47, 48, 49]  # longer than the sliding window
ALIKE = {
    "stem": [[*STEM, 3], [*STEM, 7, 8, 150, 3, 11, 12, 13], [*STEM, 7]],
    "prefixes of each other": [[*STEM, 7, 8], STEM, [*STEM, 7]],
    "equal": [STEM, STEM],
    "one token": [[5, 9], [*STEM, 3], [5]],
}
LONG = Sampling(max_tokens=14, min_tokens=14)
GREEDY = Sampling(max_tokens=20, temperature=0)
SAMPLINGS = [
    Sampling(max_tokens=14),
    Sampling(max_tokens=14, temperature=0.6, min_tokens=14),
    Sampling(max_tokens=14, temperature=1.7, top_k=5),
    Sampling(max_tokens=14, top_p=0.7),
    GREEDY,
]


def build(name: str, tokenizer: Any) -> Loaded:
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(CONFIGS[name]).eval()
    return Loaded(model, tokenizer, why_unsupported(model))


@pytest.fixture(scope="module", params=list(CONFIGS))
def loaded(request: pytest.FixtureRequest, tiny: Loaded) -> Loaded:
    made = build(request.param, tiny.tokenizer)
    assert made.packed, made.why
    return made


@pytest.fixture
def llama(tiny: Loaded) -> Loaded:
    """Of one's own, to be changed."""
    return build("llama", tiny.tokenizer)


def requests(sampling: Sampling, n: int = 1, prompts: list[list[int]] = PROMPTS) -> list[Request]:
    return [Request(i, f"prompt-{i}", prompt, n, 0, sampling) for i, prompt in enumerate(prompts)]


def by_id(samples: list[Sample]) -> dict[tuple[int, int], tuple[list[int], str]]:
    return {(s.group_id, s.index): (s.response, s.finish) for s in samples}


def check_sampled_from(loaded: Loaded, sample: Sample, sampling: Sampling) -> None:
    """The sample's log-probabilities are those of the distribution that ``sampling`` makes of a plain forward pass."""
    expected = sampled_logprobs(plain(loaded.model, sample), sample, sampling, ENDS)
    torch.testing.assert_close(torch.tensor(sample.logprobs), expected, atol=2e-4, rtol=1e-4)


def test_greedy_is_transformers_greedy(loaded: Loaded):
    model: Any = loaded.model
    for sample in NativeEngine(loaded, 64).generate(requests(GREEDY)):
        prompt = torch.tensor([sample.prompt])
        expected = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=20)
        assert sample.response == expected[0, len(sample.prompt) :].tolist()


def test_both_engines_draw_the_same_samples_as_a_forward_pass_has_them_likely(loaded: Loaded):
    """However many run at once: in the native engine fewer than two groups."""
    kinds = [(prompt, sampling) for sampling in SAMPLINGS for prompt in PROMPTS]
    asked = [Request(i, str(i), prompt, 2, 0, sampling) for i, (prompt, sampling) in enumerate(kinds)]
    native, fallback = NativeEngine(loaded, 3).generate(asked), TransformersEngine(loaded, 64).generate(asked)
    assert by_id(native) == by_id(fallback)
    assert len({len(sample.response) for sample in native}) > 1  # rows do finish at different times
    for sample in [*native, *fallback]:
        check_sampled_from(loaded, sample, asked[sample.group_id].sampling)


@pytest.mark.parametrize("prompts", ALIKE.values(), ids=ALIKE)
def test_prompts_that_begin_alike(loaded: Loaded, prompts: list[list[int]]):
    for sample in NativeEngine(loaded, 64).generate(requests(LONG, n=2, prompts=prompts)):
        check_sampled_from(loaded, sample, LONG)


def test_the_cache_is_kept_and_grows_only_when_needed(llama: Loaded):
    engine = NativeEngine(llama, 8)
    engine.generate(requests(LONG, n=2))
    keys = engine.cache.layers[0][0]
    assert keys.shape == (8, 2, 25, 16)  # slots, key/value heads, longest prompt 11 + 14, head size
    engine.generate(requests(LONG, n=1))
    engine.generate(requests(LONG, n=9))  # more than there are slots
    assert engine.cache.layers[0][0] is keys
    engine.generate(requests(replace(LONG, max_tokens=20), n=1))
    assert engine.cache.layers[0][0].shape == (8, 2, 31, 16)


def test_a_group_is_prefilled_once(llama: Loaded, monkeypatch: pytest.MonkeyPatch):
    prefilled: list[list[int]] = []
    original = NativeEngine._prefill

    def spy(self: NativeEngine, parts: list, slot: int) -> torch.Tensor:
        prefilled.extend(part[0].request.prompt for part in parts)
        return original(self, parts, slot)

    monkeypatch.setattr(NativeEngine, "_prefill", spy)
    NativeEngine(llama, 8).generate(requests(LONG, n=3))  # two groups at a time
    assert prefilled == PROMPTS
    prefilled.clear()
    NativeEngine(llama, 8).generate(requests(LONG, n=20, prompts=PROMPTS[:1]))  # larger than the engine
    assert prefilled == PROMPTS[:1] * 3


def test_a_common_prefix_is_computed_once():
    def prefill(*prompts: list[int]) -> Prefill:
        return Prefill(Cache(), list(prompts), [(i, i + 1) for i in range(len(prompts))], torch.device("cpu"))

    layout = prefill([5, 6, 7], [5, 6, 8, 9], [5, 6, 7])
    assert layout.tokens.tolist() == [5, 6, 7, 8, 9, 7]
    assert layout.positions.tolist() == [0, 1, 2, 2, 3, 2]
    assert layout.ends.tolist() == [2, 4, 5]
    layout = prefill([5, 6], [5, 6, 7])  # a prompt that others continue still ends in a token of its own
    assert layout.tokens.tolist() == [5, 6, 6, 7]
    assert layout.positions.tolist() == [0, 1, 1, 2]
    assert layout.ends.tolist() == [1, 3]
    layout = prefill([5, 6], [4, 6])
    assert layout.tokens.tolist() == [5, 6, 4, 6]
    assert layout.positions.tolist() == [0, 1, 0, 1]
    assert layout.ends.tolist() == [1, 3]


def test_an_unknown_engine():
    with pytest.raises(UserError, match=r"no engine 'nativ'\. Did you mean 'native'"):
        engines.create(Config(rollout={"engine": "nativ"}))


def test_a_model_without_our_attention_falls_back(tiny: Loaded):
    with pytest.warns(UserWarning, match="because it is odd"):
        engine = engines.create(Config(), Loaded(tiny.model, tiny.tokenizer, "because it is odd"))
    assert isinstance(engine, TransformersEngine)


def test_the_models_own_generation_config_is_left_as_it_was(llama: Loaded):
    config = llama.model.generation_config
    TransformersEngine(llama, 8).generate(requests(LONG))
    assert llama.model.generation_config is config  # it is saved with the model
