"""One suite for every engine, behind the Rollout as a run uses it: the same requests, against plain forward passes."""

import importlib.util
import os
import random
import signal
import statistics
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, LlamaForCausalLM

from forward import plain, sampled_scores
from rolecall import models
from rolecall.config import SEPARATE_ENGINES, Config
from rolecall.engines.vllm import _check_parallel, _shares
from rolecall.errors import RunError, UserError
from rolecall.models.tiny import VOCABULARY, make
from rolecall.roles.rollout import Rollout
from rolecall.samples import Request, Sample, Sampling
from rolecall.sync.ends import Link, Sender
from vllm_here import vllm_here

ENGINES = ["native", "transformers", "vllm", "sglang"]
DTYPE = dict.fromkeys(ENGINES, torch.float32) | {"sglang": torch.bfloat16}  # SGLang has no kernels for float32
BFLOAT16 = 0.4  # most that a log-probability is off in it; the native engine on a CPU: 0.25, 0.02 on average
CONTEXT, MOST = 256, 24  # tokens; sequences at once
ENDS = [1, 15]  # the tokenizer's, and one that only the generation config names
PROMPTS = [[2, 3, 7, 11, 4], [9], [2, 3, 7, 8, 8, 12, 6, 6, 10, 4], [2, 3, 6, 4]]
LONG = Sampling(max_tokens=24, min_tokens=24)
GREEDY = Sampling(max_tokens=24, temperature=0)
Weights = dict[str, torch.Tensor]


def exact(rollout: Rollout) -> bool:
    """In float32 rounding decides no draw of this suite; in bfloat16 it decides one now and then."""
    return DTYPE.get(rollout.config.rollout.engine, torch.float32) == torch.float32


def most_off(rollout: Rollout) -> float:
    """How far a log-probability may be from the reference's, which is computed in float32 and on the CPU."""
    if not exact(rollout):
        return BFLOAT16
    if models.device().type == "cpu":
        return 5e-5  # measured: 1e-5 at most, 1e-6 on average
    return 2e-4 if rollout.config.rollout.engine in ("native", "transformers") else 2e-2  # TF32; measured: 7e-3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with biases and tied embeddings, whose distributions are far from flat and depend on the context."""
    folder = make(tmp_path_factory.mktemp("conform") / "model")  # for its tokenizer
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(VOCABULARY),
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,  # the smallest for which all have kernels
            max_position_embeddings=CONTEXT,
            attention_bias=True,
            tie_word_embeddings=True,
            bos_token_id=2,
            eos_token_id=1,
        )
    )
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.2, generator=generator)
            parameter.copy_(parameter.bfloat16())  # so that engines in bfloat16 have the same weights
    model.generation_config = GenerationConfig(
        do_sample=True, bos_token_id=2, eos_token_id=ENDS, repetition_penalty=3.0, top_k=2
    )
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def first(model: Any) -> Weights:
    """The weights that every engine starts with, and has again after each test."""
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def config(folder: Path, engine: str, **model: Any) -> Config:
    dtype = str(DTYPE[engine]).removeprefix("torch.")
    return Config(
        model={"path": str(folder), "dtype": dtype} | model,
        rollout={"engine": engine, "max_sequences": MOST, "sleep": 1 if engine in SEPARATE_ENGINES else 0},
    )


@pytest.fixture(scope="module", params=ENGINES)
def started(request: pytest.FixtureRequest, folder: Path) -> Iterator[Rollout]:
    settings = config(folder, request.param)
    if request.param == "vllm":
        with vllm_here(settings) as rollout:
            yield rollout
        return
    if request.param == "sglang" and importlib.util.find_spec("sglang") is None:
        pytest.skip("SGLang is not installed (docs/engines.md)")
    rollout = Rollout(settings)
    yield rollout
    if request.param == "sglang":
        rollout.engine.close()


@pytest.fixture
def rollout(started: Rollout, first: Weights) -> Iterator[Rollout]:
    yield started
    if started.version != 0:
        update(started, first, 0)


@pytest.fixture
def engine(rollout: Rollout) -> Any:
    return rollout.engine


def requests(sampling: Sampling, n: int = 1, prompts: list[list[int]] = PROMPTS, seed: int = 0) -> list[Request]:
    return [Request(i, f"prompt-{i}", prompt, n, seed, sampling) for i, prompt in enumerate(prompts)]


def by_id(samples: list[Sample]) -> dict[tuple[int, int], tuple[list[int], str]]:
    return {(sample.group_id, sample.index): (sample.response, sample.finish) for sample in samples}


def same(rollout: Rollout, samples: list[Sample], others: list[Sample]) -> bool:
    """Whether they are the same samples: all of them, or most where rounding decides some."""
    one, other = by_id(samples), by_id(others)
    equal = sum(one[key] == other[key] for key in one) / len(one)
    return one.keys() == other.keys() and equal >= (1.0 if exact(rollout) else 0.5)


def announce(rollout: Rollout, weights: Weights, version: int) -> Sender:
    """The sender of the weights, in several buckets and the engine's type, after the Rollout has been told of them."""
    own = DTYPE[rollout.config.rollout.engine]
    weights = {name: value.to(own) if value.dtype == torch.float32 else value for name, value in weights.items()}
    link = Link("mapped", "cpu", 40_000, 2, True, "127.0.0.1", 2, 60.0)
    sender = Sender(weights.items, link)
    try:
        rollout.join(sender.offer, link, 1)
    finally:  # also where a test has it refused
        sender.join()
    rollout.start_update(version)
    return sender


def update(rollout: Rollout, weights: Weights, version: int) -> None:
    sender = announce(rollout, weights, version)
    for number in range(len(sender.buckets)):
        rollout.write(number, sender.pack(number))
    rollout.finish_update()


def moved(weights: Weights, seed: int = 1) -> Weights:
    """Other weights: every element of every parameter."""
    generator = torch.Generator().manual_seed(seed)
    noise = {name: torch.randn(value.shape, generator=generator) * 0.1 for name, value in weights.items()}
    return {name: (value + noise[name]).bfloat16().float() for name, value in weights.items()}


def with_weights(model: Any, weights: Weights) -> Any:
    other = LlamaForCausalLM(model.config).eval()
    other.load_state_dict(weights, strict=False)
    other.tie_weights()
    return other


def gaps(model: Any, sample: Sample, sampling: Sampling, off: float = 0.0) -> list[float]:
    """|engine - plain forward pass| of each token's log-probability, where those may be ``off`` by rounding.

    Which may also move the cuts of top-p and top-k, and swap the tokens beside them: then it is how far the engine's is
    from the range that any of these cuts leaves, each with the sampled token in it.
    """
    move = 0.08 if off == BFLOAT16 else min(off, 0.03)
    tops = {sampling.top_p} if sampling.top_p == 1 else {sampling.top_p - move, sampling.top_p + move}
    ranks = 2 if off == BFLOAT16 else 1 if off > 1e-3 else 0  # TF32 may swap two of neighbouring rank
    counts = {sampling.top_k + i for i in range(-ranks, ranks + 1)} if sampling.top_k else {0}
    cuts = [replace(sampling, top_p=top, top_k=count) for top in tops for count in counts]
    logits, said = plain(model, sample), torch.tensor(sample.logprobs)
    token = torch.tensor(sample.response)[:, None]
    own = sampled_scores(logits, replace(sampling, top_p=1.0, top_k=0), ENDS).gather(-1, token)
    kept = [sampled_scores(logits, cut, ENDS) for cut in cuts]
    drawn = torch.stack([scores.gather(-1, token).isfinite() for scores in kept]).any(0)[:, 0]
    with_it = [scores.scatter(-1, token, own).log_softmax(-1).gather(-1, token) for scores in kept]
    expected = torch.stack(with_it)[..., 0]
    gap = torch.maximum(said - expected.amax(0), expected.amin(0) - said).clamp(min=0)
    return gap.masked_fill(~drawn, torch.inf).tolist()


def check(rollout: Rollout, model: Any, samples: list[Sample], sampling: Sampling) -> None:
    limit = most_off(rollout)
    every = [gap for sample in samples for gap in gaps(model, sample, sampling, limit)]
    assert max(every) < limit
    assert statistics.fmean(every) < limit / 5


def test_greedy_is_the_most_likely_token_of_a_forward_pass(rollout: Rollout, model: Any):
    samples = rollout.generate(requests(GREEDY))
    for sample in samples:
        logits = plain(model, sample)
        chosen = logits.gather(-1, torch.tensor(sample.response)[:, None])[:, 0]
        assert (logits.amax(-1) - chosen).max() < most_off(rollout)  # the very same one but for ties within rounding
        assert sample.finish == ("stop" if sample.response[-1] in ENDS else "length")
    check(rollout, model, samples, GREEDY)


SAMPLINGS = {
    "plain": Sampling(max_tokens=24),
    "temperature": Sampling(max_tokens=24, temperature=0.6, min_tokens=24),
    "top-k": Sampling(max_tokens=24, temperature=1.7, top_k=4),
    "top-p": Sampling(max_tokens=24, top_p=0.7),
    "both": Sampling(max_tokens=24, temperature=1.3, top_k=6, top_p=0.8, min_tokens=12),
}


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_log_probabilities_are_those_of_the_distribution_sampled_from(rollout: Rollout, model: Any, sampling: Sampling):
    check(rollout, model, rollout.generate(requests(sampling, n=4)), sampling)


def test_tokens_come_as_often_as_they_are_likely(rollout: Rollout, model: Any):
    sampling = Sampling(max_tokens=1, temperature=1.5, top_k=5)
    samples = rollout.generate(requests(sampling, n=400, prompts=PROMPTS[:1]))
    likely = {sample.response[0]: 2.718281828459045 ** sample.logprobs[0] for sample in samples}
    assert sum(likely.values()) == pytest.approx(1.0, abs=1e-3 if exact(rollout) else 0.05) and len(likely) == 5
    for token, times in Counter(sample.response[0] for sample in samples).items():
        assert times / 400 == pytest.approx(likely[token], abs=0.1)  # four deviations of the most uncertain one


def test_what_a_sample_says_of_itself(rollout: Rollout):
    samples = rollout.generate(requests(LONG, n=4))
    assert [(s.group_id, s.index) for s in samples] == [(g, i) for g in range(4) for i in range(4)]
    for sample in samples:
        assert sample.prompt == PROMPTS[sample.group_id] and sample.prompt_id == f"prompt-{sample.group_id}"
        assert sample.response_mask == [1] * 24 and len(sample.response) == len(sample.logprobs) == 24
        assert sample.versions == [(0, 24, 0)] and sample.finish == "length"
        assert sample.text == rollout.engine.tokenizer.decode(sample.response, skip_special_tokens=True)
    assert len({tuple(sample.response) for sample in samples}) == 16  # those of a group differ, too
    assert rollout.generate([]) == []


def test_the_same_seed_gives_the_same_sample_in_any_company(rollout: Rollout):
    crowd = requests(Sampling(max_tokens=16), n=7)  # more than run at once
    expected = rollout.generate(crowd)
    assert len({len(sample.response) for sample in expected}) > 1
    assert same(rollout, rollout.generate(crowd[::-1]), expected)
    alone = [sample for request in crowd for sample in rollout.generate([replace(request, n=1)])]
    assert same(rollout, alone, [sample for sample in expected if sample.index == 0])
    other = rollout.generate([replace(request, seed=1) for request in crowd])
    assert not same(rollout, other, expected)


def test_500_requests_at_once(rollout: Rollout):
    """All are answered, each with its own sample, in order."""
    asked = requests(Sampling(max_tokens=3), prompts=[[2, 6 + i % 10, 6 + i // 10 % 10] for i in range(500)])
    samples = rollout.generate(asked)
    assert [(s.group_id, s.index, s.prompt) for s in samples] == [(r.group_id, 0, r.prompt) for r in asked]
    assert all(len(s.response) == 3 or (s.finish == "stop" and s.response[-1] in ENDS) for s in samples)
    few = asked[::50]
    assert same(rollout, rollout.generate(few), [samples[request.group_id] for request in few])


def test_any_end_token_ends_a_response_and_stays_in_it(rollout: Rollout):
    samples = rollout.generate(requests(Sampling(max_tokens=60), n=8))
    for sample in samples:
        assert not set(sample.response[:-1]) & set(ENDS)
        assert (sample.finish == "stop") == (sample.response[-1] in ENDS)
        assert sample.finish == "stop" or len(sample.response) == 60
    assert {sample.response[-1] for sample in samples if sample.finish == "stop"} == set(ENDS)
    for sample in rollout.generate(requests(Sampling(max_tokens=60, min_tokens=9), n=8)):
        assert len(sample.response) > 9 or (len(sample.response) == 9 and sample.finish == "stop")


def test_a_stop_string_ends_a_response_where_it_is_complete(rollout: Rollout):
    free = Sampling(max_tokens=40, min_tokens=40)
    whole = rollout.generate(requests(free))
    decode = rollout.engine.tokenizer.decode
    found = 0
    for request, sample in zip(requests(free), whole, strict=True):
        stop = decode(sample.response[20:23])
        size = next(i for i in range(41) if stop in decode(sample.response[:i]))
        # Under min_tokens neither a stop string nor an end token counts; so it is set just below where the string ends.
        stopped = replace(free, stop=("nowhere", stop), min_tokens=size)
        (ended,) = rollout.generate([replace(request, sampling=stopped)])
        if exact(rollout) or ended.response == sample.response[:size]:
            found += 1
            assert ended.finish == "stop" and ended.response == sample.response[:size]
            assert ended.versions == [(0, size, 0)] and stop in decode(ended.response)
            (later,) = rollout.generate([replace(request, sampling=replace(stopped, min_tokens=size + 1))])
            assert len(later.response) > size
            assert not exact(rollout) or later.response[:size] == sample.response[:size]
    assert found >= 2


def test_the_context_limit(rollout: Rollout):
    (sample,) = rollout.generate(requests(LONG, prompts=[[7] * (CONTEXT - 1)]))
    assert len(sample.response) == 1 and sample.finish == "length"
    (sample,) = rollout.generate(requests(LONG, prompts=[[7] * (CONTEXT - 5)]))
    assert len(sample.response) == 5 and sample.finish == "length"
    with pytest.raises(UserError, match="'prompt-1' has 256 tokens; the model's context is 256"):
        rollout.generate(requests(LONG, prompts=[[7], [7] * CONTEXT]))
    with pytest.raises(UserError, match="'prompt-0' has no tokens"):
        rollout.generate(requests(LONG, prompts=[[]]))
    assert len(rollout.generate(requests(LONG))) == 4  # the refused ones left nothing behind


def test_many_requests_of_many_kinds(rollout: Rollout, model: Any):
    rng = random.Random(0)
    asked = [
        Request(i, str(i), [rng.randrange(16) for _ in range(rng.randint(1, 200))], rng.randint(1, 3), 0, sampling)
        for i, sampling in enumerate(rng.choices([*SAMPLINGS.values(), GREEDY], k=60))
    ]
    samples = rollout.generate(asked)
    assert [(s.group_id, s.index) for s in samples] == [(r.group_id, i) for r in asked for i in range(r.n)]
    for sample in samples:
        assert max(gaps(model, sample, asked[sample.group_id].sampling, most_off(rollout))) < most_off(rollout)


def test_prompts_of_more_tokens_than_one_forward_pass_takes(rollout: Rollout, model: Any):
    rng = random.Random(1)
    prompts = [[rng.randrange(16) for _ in range(CONTEXT - 30)] for _ in range(2 * MOST)]
    sampling = Sampling(max_tokens=6)
    for sample in rollout.generate(requests(sampling, prompts=prompts)):
        assert max(gaps(model, sample, sampling)) < most_off(rollout)


def test_new_weights_are_used_at_once_and_the_old_ones_come_back(rollout: Rollout, model: Any, first: Weights):
    """Pitfall 13: the long prompt fills whole blocks of a prefix cache, which must not outlive the weights."""
    asked = requests(LONG, n=2, prompts=[*PROMPTS, [2] + [7, 11, 6, 9] * 50])
    before = rollout.generate(asked)
    second = moved(first)
    update(rollout, second, 5)
    assert rollout.version == 5
    samples = rollout.generate(asked)
    assert not same(rollout, samples, before)
    assert all(sample.versions == [(0, 24, 5)] for sample in samples)
    check(rollout, with_weights(model, second), samples, LONG)
    update(rollout, first, 6)
    assert same(rollout, rollout.generate(asked), before)


def test_one_changed_parameter_of_each_kind_arrives(rollout: Rollout, model: Any, first: Weights):
    for name in first:
        if "layers.1." in name or "layers" not in name:
            second = first | {name: moved(first)[name]}
            update(rollout, second, 1)
            check(rollout, with_weights(model, second), rollout.generate(requests(LONG, prompts=PROMPTS[:2])), LONG)


def test_a_tied_parameter_goes_by_any_of_its_names(rollout: Rollout, model: Any, first: Weights):
    second = moved(first)
    renamed = {("lm_head.weight" if "embed" in name else name): value for name, value in second.items()}
    update(rollout, renamed, 1)
    check(rollout, with_weights(model, second), rollout.generate(requests(LONG)), LONG)
    with pytest.raises(RunError, match=r"'model\.embed_tokens\.weight' and 'lm_head\.weight' are one parameter"):
        announce(rollout, first | {"lm_head.weight": second["model.embed_tokens.weight"]}, 2)


WRONG: dict[str, tuple[Weights, type[Exception], str]] = {
    "unknown": ({"model.extra": torch.zeros(1)}, RunError, "no parameter 'model.extra'; nothing was written"),
    "shape": ({"model.norm.weight": torch.zeros(31)}, RunError, r"\(31,\), the engine's parameter \(64,\)"),
    "type": ({"model.norm.weight": torch.zeros(64).half()}, UserError, r"torch.float16, .* Set --model.dtype"),
}


@pytest.mark.parametrize("wrong", [*WRONG, "missing"])
def test_weights_that_do_not_fit_change_nothing(rollout: Rollout, first: Weights, wrong: str):
    before = rollout.generate(requests(LONG))
    good = moved(first)
    if wrong == "missing":
        del good["model.norm.weight"]
    added, kind, message = WRONG.get(wrong, ({}, RunError, r"1 of \d+ parameters were not sent .model.norm.weight"))
    with pytest.raises(kind, match=message):
        announce(rollout, good | added, 1)
    assert same(rollout, rollout.generate(requests(LONG)), before) and rollout.version == 0


def test_half_an_update_generates_nothing_and_a_whole_one_mends_it(rollout: Rollout, model: Any, first: Weights):
    second = moved(first)
    sender = announce(rollout, second, 1)
    for number in range(3):
        rollout.write(number, sender.pack(number))
    sent = sender.pack(3)
    sender.slots[1][sender.buckets[3][0].offset + 5] ^= 1
    with pytest.raises(RunError, match=r"bucket 3 .* arrived with digest \w+, the Actor sent \w+"):
        rollout.write(3, sent)
    with pytest.raises(RunError, match="partly of version 0 and partly of 1"):
        rollout.generate(requests(LONG))
    update(rollout, second, 2)
    check(rollout, with_weights(model, second), rollout.generate(requests(LONG)), LONG)


def test_weights_that_give_nan_stop_the_run(rollout: Rollout, first: Weights):
    nan = torch.full_like(first["model.norm.weight"], torch.nan)
    update(rollout, first | {"model.norm.weight": nan}, 1)
    with pytest.raises(RunError, match="NaN"):
        rollout.generate(requests(LONG))


@pytest.mark.parametrize("level", [1, 2])
def test_after_sleeping_and_a_sync_the_output_is_as_before(rollout: Rollout, first: Weights, level: int):
    """Pitfall 14, in the order of ``rolecall.sync``."""
    before = rollout.generate(requests(LONG, n=2))
    rollout.engine.sleep(level)
    rollout.wake("weights")
    update(rollout, first, 1)
    rollout.wake("kv_cache")
    assert same(rollout, rollout.generate(requests(LONG, n=2)), before)


# What engines with weights of their own do.


def only(*engines: str) -> pytest.MarkDecorator:
    """The test for these engines. (All are named, so that pytest keeps an engine's tests together: it starts once.)"""
    other = pytest.mark.skip(reason=f"of {' and '.join(engines)} alone")
    params = [name if name in engines else pytest.param(name, marks=other) for name in ENGINES]
    return pytest.mark.parametrize("started", params, indirect=True)


@only("vllm")
def test_without_the_reset_vllm_reads_older_weights_blocks(engine: Any, rollout: Rollout, model: Any, first: Weights):
    """So the test of pitfall 13 above can fail."""
    asked = requests(LONG, prompts=[[2] + [7, 11, 6, 9] * 50])
    rollout.generate(asked)
    second = moved(first)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.llm, "reset_prefix_cache", lambda **_: True)
        update(rollout, second, 1)
    (sample,) = rollout.generate(asked)
    assert statistics.fmean(gaps(with_weights(model, second), sample, LONG)) > 0.01


@only(*SEPARATE_ENGINES)
def test_while_asleep_it_says_so(rollout: Rollout, first: Weights):
    rollout.sleep()
    rollout.wake("weights")
    with pytest.raises(RunError, match=r"sleeps \(rollout.sleep\) until a weight sync wakes it"):
        rollout.generate(requests(LONG))
    update(rollout, first, 1)
    rollout.wake("kv_cache")
    assert len(rollout.generate(requests(LONG))) == 4


class Generating(threading.Thread):
    """A call of ``generate`` under way."""

    def __init__(self, engine: Any, asked: list[Request]):
        super().__init__(daemon=True)
        self.engine, self.asked, self.samples, self.error = engine, asked, [], None
        self.start()

    def run(self) -> None:
        try:
            self.samples = self.engine.generate(self.asked)
        except RunError as error:
            self.error = error

    def reach(self, tokens: int) -> None:
        """Wait until a response has so many tokens."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if any(len(sequence.tokens) >= tokens for sequence in list(self.engine._running.values())):
                return
            time.sleep(0.001)
        raise AssertionError("nothing is being generated")

    def end(self) -> list[Sample]:
        self.join(60)
        assert not self.is_alive()
        return self.samples


ENDLESS = Sampling(max_tokens=200, min_tokens=200, stop=("nowhere",))  # SGLang then gives token by token


@only(*SEPARATE_ENGINES)
def test_weights_change_in_the_middle_of_responses(engine: Any, rollout: Rollout, model: Any, first: Weights):
    """Each token is of the weights that its span names, and what came before it is read by those, not from a cache."""
    thread = Generating(engine, requests(ENDLESS, n=2))
    thread.reach(10)
    engine.pause()
    second = moved(first)
    update(rollout, second, 1)
    engine.resume()
    models_of = {0: model, 1: with_weights(model, second)}
    for sample in thread.end():
        (zero, middle, old), (again, end, new) = sample.versions
        assert (zero, old, end, new) == (0, 0, 200, 1) and middle == again and 0 < middle < 200
        for start, end, version in sample.versions:
            assert max(gaps(models_of[version], sample, ENDLESS)[start:end]) < most_off(rollout)


@only(*SEPARATE_ENGINES)
def test_weights_do_not_change_under_a_step(engine: Any, rollout: Rollout, first: Weights):
    thread = Generating(engine, requests(ENDLESS, n=2))
    thread.reach(2)
    with pytest.raises(RunError, match="8 responses are being generated; pause the engine"):
        announce(rollout, moved(first), 1)
    assert all(sample.versions == [(0, 200, 0)] for sample in thread.end())


@only(*SEPARATE_ENGINES)
def test_called_off_groups_end_as_they_are_and_the_others_go_on(engine: Any, rollout: Rollout):
    alone = by_id(engine.generate(requests(ENDLESS)))
    thread = Generating(engine, requests(ENDLESS))
    thread.reach(5)
    engine.abort([1, 3])
    for sample in thread.end():
        whole, finish = alone[sample.group_id, 0]
        if sample.group_id in (1, 3):
            size = len(sample.response)
            assert sample.finish == "abort" and 5 <= size < 200
            assert sample.versions == [(0, size, 0)] and len(sample.logprobs) == size
        else:
            assert (len(sample.response), sample.finish) == (len(whole), finish)
        assert not exact(rollout) or sample.response == whole[: len(sample.response)]
    assert not engine._running


@only(*SEPARATE_ENGINES)
def test_two_calls_at_once_get_their_own_samples(engine: Any, rollout: Rollout):
    asked = [requests(LONG, n=2), requests(LONG, n=2, seed=1)]
    expected = [engine.generate(each) for each in asked]
    threads = [Generating(engine, each) for each in asked]
    for thread, samples in zip(threads, expected, strict=True):
        assert same(rollout, thread.end(), samples)


@pytest.mark.parametrize(("engine", "name"), [("vllm", "vLLM"), ("sglang", "SGLang")])
def test_a_machine_without_it_is_told_what_to_install(folder: Path, monkeypatch: Any, engine: str, name: str):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=rf"{name} is not installed\. Install it: pip install 'rolecall\[{engine}\]'"):
        Rollout(config(folder, engine))


def test_the_outline_is_the_model_without_its_weights(folder: Path, model: Any):
    bare: Any = models.outline(config(folder, "vllm").model, "cpu")
    shapes = [[(name, p.shape, p.dtype) for name, p in each.named_parameters()] for each in (bare, model)]
    assert shapes[0] == shapes[1] and all(parameter.is_meta for parameter in bare.parameters())
    assert bare.lm_head.weight is bare.model.embed_tokens.weight
    assert bare.generation_config.eos_token_id == ENDS


def test_sglang_says_at_once_where_it_cannot_run(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: "there")
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match=r"'sglang' needs a GPU, and the Rollout has none\. Use .* native"):
            Rollout(config(folder, "sglang"))
    monkeypatch.setattr(models, "device", lambda: torch.device("cuda"))
    with pytest.raises(UserError, match=r"bfloat16 or float16, the model's type is float32\. Set --model\.dtype"):
        Rollout(config(folder, "sglang", dtype="float32"))


def test_vllm_over_more_gpus_or_cores_than_there_are_is_refused():
    with pytest.raises(UserError, match=r"rollout\.tensor_parallel = 1000000, but .* has \d+ (cores|GPUs)\. Lower it"):
        _check_parallel(10**6, models.device())
    assert _shares({5, 1, 2, 7, 3}, 2) == "1,3,7|2,5"


@only("sglang")  # the last one: it ends the engine
def test_a_dead_scheduler_is_named_in_the_middle_of_responses(engine: Any):
    thread = Generating(engine, requests(ENDLESS))
    thread.reach(5)
    scheduler = engine.llm.get_all_child_pids()[0]
    os.kill(scheduler, signal.SIGKILL)
    thread.end()
    said = f"SGLang's process {scheduler} ended (exit code -9) while it was generating 4 responses."
    assert str(thread.error) == said
    with pytest.raises(RunError, match="ended"):
        engine.generate(requests(LONG))
