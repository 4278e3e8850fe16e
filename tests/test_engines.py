"""What every engine must hold, for both engines and four architectures, against plain forward passes."""

import copy
import random
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

from forward import sampled_logprobs
from rolecall import engines
from rolecall.engines.native.cache import Cache, Prefill
from rolecall.engines.native.engine import NativeEngine
from rolecall.engines.transformers import TransformersEngine
from rolecall.errors import RunError, UserError
from rolecall.models import Loaded
from rolecall.models.attention import why_unsupported
from rolecall.samples import Request, Sample, Sampling
from rolecall.sync.buckets import plan

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
ENGINES = ["native", "transformers"]
PROMPTS = [[5, 9, 100], [7], [9, 8, 7, 6, 5, 44, 45, 46, 47, 48, 49], [150, 3, 60, 7, 7, 7]]
STEM = [5, 9, 100, 44, 45, 46, 47, 48, 49]  # longer than the sliding window
ALIKE = {
    "stem": [[*STEM, 3], [*STEM, 7, 8, 150, 3, 11, 12, 13], [*STEM, 7]],
    "prefixes of each other": [[*STEM, 7, 8], STEM, [*STEM, 7]],
    "equal": [STEM, STEM],
    "one token": [[5, 9], [*STEM, 3], [5]],
}
LONG = Sampling(max_tokens=14, min_tokens=14)


def build(name: str, tokenizer: Any, config: PreTrainedConfig | None = None) -> Loaded:
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config or CONFIGS[name]).eval()
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


def requests(sampling: Sampling, n: int = 1, prompts: list[list[int]] = PROMPTS, seed: int = 0) -> list[Request]:
    return [Request(i, f"prompt-{i}", prompt, n, seed, sampling) for i, prompt in enumerate(prompts)]


def update(engine: Any, weights: dict[str, torch.Tensor], version: int) -> None:
    engine.expect([entry for bucket in plan(weights.items()) for entry in bucket])
    engine.start_update()
    engine.write(weights.items())
    engine.finish_update(version)


def by_id(samples: list[Sample]) -> dict[tuple[int, int], tuple[list[int], str]]:
    return {(s.group_id, s.index): (s.response, s.finish) for s in samples}


def check_sampled_from(loaded: Loaded, sample: Sample, sampling: Sampling) -> None:
    """The sample's log-probabilities are those of the distribution that ``sampling`` makes of a plain forward pass."""
    expected = sampled_logprobs(loaded.model, sample, sampling, ENDS)
    torch.testing.assert_close(torch.tensor(sample.logprobs), expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("engine", ENGINES)
def test_greedy_is_transformers_greedy(engine: str, loaded: Loaded):
    model: Any = loaded.model
    for sample in engines.create(engine, loaded, 64).generate(requests(Sampling(max_tokens=20, temperature=0))):
        prompt = torch.tensor([sample.prompt])
        expected = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=20)
        assert sample.response == expected[0, len(sample.prompt) :].tolist()
        check_sampled_from(loaded, sample, Sampling(max_tokens=20, temperature=0))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(max_tokens=14),
        Sampling(max_tokens=14, temperature=0.6, min_tokens=14),
        Sampling(max_tokens=14, temperature=1.7, top_k=5),
        Sampling(max_tokens=14, top_p=0.7),
    ],
    ids=["plain", "temperature", "top-k", "top-p"],
)
def test_log_probabilities_are_those_of_a_forward_pass(engine: str, loaded: Loaded, sampling: Sampling):
    for sample in engines.create(engine, loaded, 64).generate(requests(sampling, n=2)):
        check_sampled_from(loaded, sample, sampling)


@pytest.mark.parametrize("prompts", ALIKE.values(), ids=ALIKE)
def test_prompts_that_begin_alike(loaded: Loaded, prompts: list[list[int]]):
    for sample in engines.create("native", loaded, 64).generate(requests(LONG, n=2, prompts=prompts)):
        check_sampled_from(loaded, sample, LONG)


@pytest.mark.parametrize("engine", ENGINES)
def test_what_a_sample_says_of_itself(engine: str, llama: Loaded):
    generator = engines.create(engine, llama, 64)
    generator.version = 7
    samples = generator.generate(requests(LONG, n=3))
    assert [(s.group_id, s.index) for s in samples] == [(g, i) for g in range(4) for i in range(3)]
    for sample in samples:
        assert sample.prompt == PROMPTS[sample.group_id] and sample.prompt_id == f"prompt-{sample.group_id}"
        assert sample.response_mask == [1] * 14 and len(sample.response) == len(sample.logprobs) == 14
        assert sample.versions == [(0, 14, 7)] and sample.finish == "length"
        assert sample.text == llama.tokenizer.decode(sample.response, skip_special_tokens=True)
    assert len({tuple(sample.response) for sample in samples}) == 12  # the samples of a group differ
    assert generator.generate([]) == []


@pytest.mark.parametrize("engine", ENGINES)
def test_the_same_seed_gives_the_same_sample_in_any_company(engine: str, loaded: Loaded):
    crowd = requests(Sampling(max_tokens=9), n=4)
    expected = by_id(engines.create(engine, loaded, 64).generate(crowd))
    assert len({len(response) for response, _ in expected.values()}) > 1  # rows do finish at different times
    for most in (1, 3):
        assert by_id(engines.create(engine, loaded, most).generate(crowd)) == expected
    generator = engines.create(engine, loaded, 64)
    for request in crowd:
        alone = by_id(generator.generate([replace(request, n=1)]))
        assert alone == {(request.group_id, 0): expected[request.group_id, 0]}
    assert by_id(generator.generate(crowd[::-1])) == expected
    assert by_id(generator.generate([replace(crowd[0], seed=1)])) != {
        key: value for key, value in expected.items() if key[0] == 0
    }


def test_both_engines_draw_the_same_samples(loaded: Loaded):
    native, fallback = (engines.create(engine, loaded, 64).generate(requests(LONG, n=3)) for engine in ENGINES)
    assert by_id(native) == by_id(fallback)


@pytest.mark.parametrize("engine", ENGINES)
def test_new_weights_are_used_at_once(engine: str, loaded: Loaded):
    """Pitfall 13: nothing that was computed from older weights is left, though prompts and cache are the same."""
    own = Loaded(copy.deepcopy(loaded.model), loaded.tokenizer, loaded.why)
    generator = engines.create(engine, own, 64)
    before = by_id(generator.generate(requests(LONG, n=2)))
    original = {name: value.clone() for name, value in own.model.named_parameters()}

    with torch.no_grad():  # as an optimizer does it
        for parameter in own.model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)), alpha=0.1)
    samples = generator.generate(requests(LONG, n=2))
    assert by_id(samples) != before
    for sample in samples:
        check_sampled_from(own, sample, LONG)

    update(generator, original, version=5)
    assert all(torch.equal(own.model.get_parameter(name), value) for name, value in original.items())
    samples = generator.generate(requests(LONG, n=2))
    assert by_id(samples) == before
    assert samples[0].versions == [(0, 14, 5)]


@pytest.mark.parametrize("engine", ENGINES)
def test_weights_are_loaded_all_or_not_at_all(engine: str, llama: Loaded):
    generator = engines.create(engine, llama, 64)
    good = {name: value + 1 for name, value in llama.model.named_parameters()}
    before = {name: value.clone() for name, value in llama.model.named_parameters()}
    bad: dict[str, tuple[dict[str, torch.Tensor], str]] = {
        "unknown": ({**good, "model.extra": torch.zeros(1)}, "no parameter 'model.extra'"),
        "missing": ({k: v for k, v in good.items() if k != "model.norm.weight"}, "1 of 29 .*model.norm.weight"),
        "shape": ({**good, "model.norm.weight": torch.zeros(31)}, r"\(31,\).*\(32,\)"),
        "tied, but different": ({**good, "lm_head.weight": torch.zeros(VOCABULARY, 32)}, "one parameter here"),
    }
    for weights, message in bad.values():
        with pytest.raises(RunError, match=message):
            update(generator, weights, version=1)
        assert all(torch.equal(llama.model.get_parameter(name), value) for name, value in before.items())
        assert generator.version == 0
    # The tied parameter goes by its other name too.
    renamed = {("lm_head.weight" if "embed" in name else name): value for name, value in good.items()}
    update(generator, renamed, version=1)
    assert all(torch.equal(llama.model.get_parameter(name), value) for name, value in good.items())
    assert generator.version == 1


@pytest.mark.parametrize("engine", ENGINES)
def test_any_end_token_ends_a_response_and_stays_in_it(engine: str, llama: Loaded):
    free = engines.create(engine, llama, 64)
    free.endings.tokens = []
    asked = requests(Sampling(max_tokens=14), prompts=PROMPTS[:1])
    (endless,) = free.generate(asked)
    end = endless.response[6]
    llama.model.generation_config.eos_token_id = [199, end]  # the tokenizer's own (1) ends it as well
    generator = engines.create(engine, llama, 64)
    assert generator.endings.tokens == sorted({1, 199, end})
    (sample,) = generator.generate(asked)
    size = next(i for i, token in enumerate(endless.response) if token in (1, 199, end)) + 1
    assert sample.finish == "stop" and sample.response == endless.response[:size]
    (sample,) = generator.generate(requests(LONG, prompts=PROMPTS[:1]))
    assert len(sample.response) == 14 and not {1, 199, end} & set(sample.response)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_stop_string_ends_a_response_where_it_is_complete(engine: str, tiny: Loaded):
    generator = engines.create(engine, tiny, 64)
    generator.endings.tokens = []
    prompt, free = [[2, 3, 6, 4]], Sampling(max_tokens=80)
    (whole,) = generator.generate(requests(free, prompts=prompt))
    decode = tiny.tokenizer.decode
    stop = decode(whole.response[40:43])
    size = next(i for i in range(80) if stop in decode(whole.response[:i]))
    (sample,) = generator.generate(requests(replace(free, stop=("nowhere", stop)), prompts=prompt))
    assert sample.finish == "stop" and sample.response == whole.response[:size]
    # What is complete before min_tokens does not count.
    (later,) = generator.generate(requests(replace(free, stop=(stop,), min_tokens=size + 1), prompts=prompt))
    assert size < len(later.response) and later.response == whole.response[: len(later.response)]
    assert len(later.response) == 80 or decode(later.response).endswith(stop)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_context_limit(engine: str, llama: Loaded):
    generator = engines.create(engine, llama, 64)
    (sample,) = generator.generate(requests(LONG, prompts=[[7] * (CONTEXT - 1)]))
    assert len(sample.response) == 1 and sample.finish == "length"
    (sample,) = generator.generate(requests(LONG, prompts=[[7] * (CONTEXT - 5)]))
    assert len(sample.response) == 5 and sample.finish == "length"
    with pytest.raises(UserError, match="'prompt-1' has 96 tokens; the model's context is 96"):
        generator.generate(requests(LONG, prompts=[[7], [7] * CONTEXT]))
    with pytest.raises(UserError, match="'prompt-0' has no tokens"):
        generator.generate(requests(LONG, prompts=[[]]))


@pytest.mark.parametrize("engine", ENGINES)
def test_weights_that_give_nan_stop_the_run(engine: str, llama: Loaded):
    with torch.no_grad():
        llama.model.get_parameter("model.norm.weight").fill_(torch.nan)
    with pytest.raises(RunError, match="NaN"):
        engines.create(engine, llama, 64).generate(requests(LONG))


def test_five_hundred_requests_of_many_kinds(tiny: Loaded):
    rng = random.Random(0)
    asked = [
        Request(
            group_id=i,
            prompt_id=str(i),
            prompt=[rng.randrange(16) for _ in range(rng.randint(1, 40))],
            n=rng.randint(1, 3),
            seed=4,
            sampling=Sampling(
                max_tokens=rng.randint(1, 12), temperature=rng.choice([0, 0.7, 1]), top_k=rng.choice([0, 3])
            ),
        )
        for i in range(500)
    ]
    samples = engines.create("native", tiny, 48).generate(asked)
    assert [(s.group_id, s.index) for s in samples] == [(r.group_id, i) for r in asked for i in range(r.n)]
    for sample in samples:
        ended = sample.response[-1] == tiny.tokenizer.eos_token_id
        assert sample.finish == ("stop" if ended else "length")
        assert ended or len(sample.response) == asked[sample.group_id].sampling.max_tokens
    picked = rng.sample(samples, 10)
    for sample in picked:
        check_sampled_from(tiny, sample, asked[sample.group_id].sampling)


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


def test_an_unknown_engine(tiny: Loaded):
    with pytest.raises(UserError, match=r"no engine 'nativ'\. Did you mean 'native'"):
        engines.create("nativ", tiny, 8)


def test_a_model_without_our_attention_falls_back(tiny: Loaded):
    with pytest.warns(UserWarning, match="because it is odd"):
        engine = engines.create("native", Loaded(tiny.model, tiny.tokenizer, "because it is odd"), 8)
    assert isinstance(engine, TransformersEngine)


def test_a_shipped_repetition_penalty_is_not_applied(llama: Loaded):
    config = llama.model.generation_config
    config.repetition_penalty = 5.0
    for sample in engines.create("transformers", llama, 8).generate(requests(LONG)):
        check_sampled_from(llama, sample, LONG)
    assert llama.model.generation_config is config  # and it is still saved with the model
