"""The native engine's pages and captured steps: the same samples as one row at a time in one block of memory."""

import importlib
import math
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rolecall import models
from rolecall.config import Model
from rolecall.engines.native import fused, paged
from rolecall.engines.native.decode import BUCKETS, Decoder
from rolecall.engines.native.engine import NativeEngine
from rolecall.engines.native.paged import PREFILL_TOKENS, PagedEngine
from rolecall.engines.native.pages import ALIGNED, PAGE, TRASH, PagedDecode, Pages, attend_plainly, pages_for
from rolecall.engines.native.sampling import Batch, draw, token_mask
from rolecall.engines.native.stack import find
from rolecall.engines.sequence import Sequence
from rolecall.errors import RunError, UserError
from rolecall.models import Loaded
from rolecall.models.attention import hidden_states, why_unsupported
from rolecall.models.compiled import compile_layers, compiled
from rolecall.samples import Request, Sample, Sampling

DEVICE = models.device()
ON_GPU = pytest.mark.skipif(DEVICE.type != "cuda", reason="a Triton kernel")

SAMPLINGS = [
    Sampling(20),
    Sampling(33, temperature=0),
    Sampling(40, min_tokens=10),
    Sampling(70, temperature=0.7, top_k=5),
    Sampling(5, top_p=0.9),
    Sampling(1),
    Sampling(60, min_tokens=60, temperature=1.3),
    Sampling(40, stop=("3 4", "7 7")),
]
SHAPE = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "pad_token_id": 0,
}
WINDOWED = {"sliding_window": 40, "layer_types": ["sliding_attention", "full_attention"] * 2}

# Prompts that end at, before and behind a page's last place.
SIZES = [1, 5, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 90]


@st.composite
def requests(draw: Any) -> list[Request]:
    def request(group: int) -> Request:
        size = draw(st.sampled_from(SIZES))
        prompt = draw(st.lists(st.integers(3, 14), min_size=size, max_size=size))
        return Request(
            group, str(group), prompt, draw(st.sampled_from([1, 2, 4, 11])), 7, draw(st.sampled_from(SAMPLINGS))
        )

    return [request(group) for group in range(draw(st.integers(1, 6)))]


def same(one: list[Sample], other: list[Sample]) -> None:
    for a, b in zip(one, other, strict=True):
        assert (a.group_id, a.index, a.response, a.finish, a.versions, a.text) == (
            b.group_id,
            b.index,
            b.response,
            b.finish,
            b.versions,
            b.text,
        )
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)


def hangs_on_rounding(loaded: Loaded, asked: list[Request]) -> bool:
    """Whether noise of 3e-6 of the output layer's weights changes a response: then two tokens were as good as equal."""

    def responses(noise: float, seed: int = 0) -> list[list[int]]:
        model = deepcopy(loaded.model)
        with torch.no_grad():
            torch.manual_seed(seed)
            weight = model.get_output_embeddings().weight
            weight += noise * weight * torch.randn_like(weight)
        return [one.response for one in NativeEngine(replace(loaded, model=model), 64).generate(asked)]

    exact = responses(0.0)
    return any(responses(3e-6, seed) != exact for seed in range(1, 9))


@settings(deadline=None, max_examples=25)
@given(asked=requests(), most=st.sampled_from([1, 5, 64]), pages=st.sampled_from([5, 8, 13, None]))
def test_whatever_the_room_the_samples_are_those_of_the_plain_engine(
    tiny: Loaded, asked: list[Request], most: int, pages: int | None
):
    """With few pages rows give theirs up and are computed again; with few rows they wait."""
    engine = PagedEngine(tiny, most, pages)
    found, wanted = engine.generate(asked), NativeEngine(tiny, most).generate(asked)
    if [one.response for one in found] != [one.response for one in wanted]:
        assume(not hangs_on_rounding(tiny, asked))
    same(found, wanted)
    assert engine.pages.pool is None and not any(engine.pages.users)
    assert sorted(engine.pages.free) == list(range(1, len(engine.pages.users)))  # none lost, none twice


def test_a_tie_is_told_from_a_difference(tiny: Loaded):
    """At this one's 37th token the fifth and the sixth likeliest differ by 5e-8, and only five may be drawn."""
    tied = Request(0, "0", [3], 4, 7, Sampling(70, temperature=0.7, top_k=5))
    assert hangs_on_rounding(tiny, [tied])
    assert not hangs_on_rounding(tiny, [replace(tied, sampling=Sampling(70, temperature=0.7))])


def test_a_row_that_gives_up_its_pages_goes_on_where_it_was(tiny: Loaded, monkeypatch: pytest.MonkeyPatch):
    left: list[int] = []
    leave = PagedEngine._leave

    def watched(self: PagedEngine, waiting: Any) -> None:
        left.append(1)
        leave(self, waiting)

    monkeypatch.setattr(PagedEngine, "_leave", watched)
    size = 3 * PAGE + 4
    asked = [Request(i, str(i), [3 + i] * 20, 1, 0, Sampling(size, min_tokens=size)) for i in range(3)]
    same(PagedEngine(tiny, 8, 6).generate(asked), NativeEngine(tiny, 8).generate(asked))
    assert left


def test_a_prompt_is_computed_once_and_its_whole_pages_are_shared(tiny: Loaded, monkeypatch: pytest.MonkeyPatch):
    engine = PagedEngine(tiny, 8)
    seen: list[tuple[int, ...]] = []
    used: list[int] = []
    prefill = PagedEngine._prefill

    def watched(self: PagedEngine, parts: list[list[Sequence]]) -> None:
        before = len(self.pages.free)
        prefill(self, parts)
        seen.extend((len(part), part[0].length) for part in parts)
        used.append(before - len(self.pages.free))

    monkeypatch.setattr(PagedEngine, "_prefill", watched)
    engine.generate([Request(0, "p", [5] * (2 * PAGE + 3), 8, 0, Sampling(4))])
    assert seen == [(8, 2 * PAGE + 3)] and used == [2 + 8]  # two whole pages for all, the third one each


def test_one_response_that_has_no_room_is_refused(tiny: Loaded):
    with pytest.raises(UserError, match=r"room for 3 pages of 64 tokens; one response with its prompt may need 4"):
        PagedEngine(tiny, 8, 3).generate([Request(0, "p", [5] * 100, 1, 0, Sampling(140))])


def test_many_long_prompts_enter_in_turns(tiny: Loaded):
    asked = [Request(i, str(i), [3 + i % 9] * 200, 1, 0, Sampling(3)) for i in range(PREFILL_TOKENS // 200 + 5)]
    same(PagedEngine(tiny, 256).generate(asked), NativeEngine(tiny, 256).generate(asked))


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_a_long_prompt_enters_in_parts(tiny: Loaded, kind: str, monkeypatch: pytest.MonkeyPatch):
    """Windowed layers see over the ends of parts; parts end within a page's tokens and at its last."""
    torch.manual_seed(0)
    loaded = tiny
    if kind == "gemma3":
        model: Any = Gemma3ForCausalLM(Gemma3TextConfig(num_hidden_layers=4, **WINDOWED, **SHAPE))
        loaded = Loaded(model.eval(), tiny.tokenizer, why_unsupported(model))
    asked = [
        Request(i, str(i), [3 + (i + place) % 9 for place in range(size)], 2, 0, Sampling(40, min_tokens=40))
        for i, size in enumerate([5, PAGE, PAGE + 1, 2 * PAGE, 150, 170])
    ]
    seen: list[tuple[int, ...]] = []
    forward = paged.hidden_states

    def watched(model: Any, tokens: torch.Tensor, *rest: Any) -> torch.Tensor:
        seen.append(tuple(tokens.shape))
        return forward(model, tokens, *rest)

    monkeypatch.setattr(paged, "PREFILL_TOKENS", PAGE)
    monkeypatch.setattr(paged, "hidden_states", watched)
    same(PagedEngine(loaded, 64).generate(asked), NativeEngine(loaded, 64).generate(asked))
    assert max(rows * size for rows, size in seen) == PAGE
    assert len(seen) == 3 + 3 + 2 + 2 + 1 + 1  # the longest first


def test_new_weights_are_used_at_once(tiny_path: Any):
    loaded = models.load(Model(path=str(tiny_path), dtype="float32"), "cpu")
    engine, asked = PagedEngine(loaded, 8), [Request(0, "p", [5] * 40, 4, 0, Sampling(20))]
    before = engine.generate(asked)
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            parameter.mul_(1.3)
    engine.finish_update(3)
    after = engine.generate(asked)
    assert [s.response for s in after] != [s.response for s in before]
    assert all(sample.versions == [(0, len(sample.response), 3)] for sample in after)
    same(after, _at(NativeEngine(loaded, 8), 3).generate(asked))
    with torch.no_grad():
        loaded.model.model.norm.weight.fill_(math.nan)
    with pytest.raises(RunError, match="NaN log-probabilities for prompt 'p', response token 0"):
        engine.generate(asked)


def _at(engine: NativeEngine, version: int) -> NativeEngine:
    engine.version = version
    return engine


@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])
def test_other_architectures(tiny: Loaded, kind: str):
    torch.manual_seed(0)
    if kind == "qwen3":
        model: Any = Qwen3ForCausalLM(Qwen3Config(num_hidden_layers=2, **SHAPE))
    else:
        model = Gemma3ForCausalLM(Gemma3TextConfig(num_hidden_layers=4, **WINDOWED, **SHAPE))
    loaded = Loaded(model.eval(), tiny.tokenizer, why_unsupported(model))
    assert loaded.why is None
    asked = [Request(i, str(i), [3 + i] * (30 * i + 1), 3, 0, Sampling(50, min_tokens=50)) for i in range(3)]
    same(PagedEngine(loaded, 64).generate(asked), NativeEngine(loaded, 64).generate(asked))


def test_linear_layers_with_one_input_compute_together_and_stay_parameters(tiny_path: Any):
    model: Any = models.load(Model(path=str(tiny_path), dtype="float32"), "cpu").model
    tokens = torch.arange(10)[None]
    with torch.no_grad():
        before = model(tokens).logits
        names = list(model.state_dict())
        groups = fused.fuse(model)
        assert len(groups) == 2 * model.config.num_hidden_layers
        together = [replacement for group in groups for replacement in group.replacements]
        with fused.in_use(together):
            assert torch.allclose(model(tokens).logits, before, atol=1e-5)
        assert list(model.state_dict()) == names and torch.allclose(model(tokens).logits, before, atol=1e-5)
        model.model.layers[0].mlp.up_proj.weight.zero_()  # an update is seen by both
        changed = model(tokens).logits
        with fused.in_use(together):
            assert torch.allclose(model(tokens).logits, changed, atol=1e-5)
        assert not torch.allclose(changed, before, atol=1e-5)


def test_two_engines_on_one_model_compute_with_the_same_weights(tiny_path: Any):
    model: Any = models.load(Model(path=str(tiny_path), dtype="float32"), "cpu").model
    first, second = fused.fuse(model), fused.fuse(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.3)
        updated = model(torch.arange(10)[None]).logits
        for groups in (first, second):
            with fused.in_use([replacement for group in groups for replacement in group.replacements]):
                assert torch.allclose(model(torch.arange(10)[None]).logits, updated, atol=1e-4)


def test_an_adapter_that_comes_after_the_engine_is_told(tiny_path: Any):
    """It would be lost without a word: captured steps and fused layers know the layers that there were."""
    from rolecall.config import Model
    from rolecall.models import lora

    config = Model(path=str(tiny_path), dtype="float32", lora_rank=2)
    loaded, asked = models.load(config, "cpu"), [Request(0, "p", [5], 1, 0, Sampling(2))]
    engine = PagedEngine(loaded, 8)
    engine.generate(asked)
    lora.add(loaded.model, config, 0)
    with pytest.raises(UserError, match="given an adapter after its native engine was made"):
        engine.generate(asked)
    assert len(PagedEngine(loaded, 8).generate(asked)) == 1


def test_pages_are_counted():
    pages = Pages(_shape(torch.float32))
    pages.allocate(3)
    first = pages.take(2)
    pages.share(first[:1])
    assert len(pages.free) == 1 and TRASH not in first
    pages.give(first)
    assert len(pages.free) == 2  # the shared one has a reader left
    pages.give(first[:1])
    assert len(pages.free) == 3
    assert [pages_for(n) for n in (1, PAGE, PAGE + 1)] == [1, 1, 2]


def test_kernels_find_the_pages_from_the_anchor():
    pages = Pages(_shape(torch.bfloat16))
    pages.allocate(3)
    assert pages.pool is not None
    unit = ALIGNED * pages.pool.element_size()
    for layer in range(pages.layers):
        for part in (0, 1):
            found = pages.anchor.data_ptr() + int(pages.offsets[layer, part]) * unit
            assert found == pages.pool[layer, part].data_ptr()


def filled(cache: Pages, rows: int, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Table and positions of rows with so many random pages each; the first row stands at its first position."""
    cache.allocate(rows * most)
    assert cache.pool is not None
    cache.pool.normal_()
    positions = torch.randint(0, most * PAGE, (rows,), device=DEVICE)
    positions[0] = 0
    return 1 + torch.randperm(rows * most, device=DEVICE).view(rows, most).int(), positions


def _shape(dtype: torch.dtype, heads: int = 4, kv_heads: int = 2, width: int = 16) -> Any:
    config = SimpleNamespace(
        num_hidden_layers=2,
        num_key_value_heads=kv_heads,
        num_attention_heads=heads,
        head_dim=width,
        hidden_size=heads * width,
    )
    config.get_text_config = lambda: config
    return SimpleNamespace(config=config, dtype=dtype, device=DEVICE)


@ON_GPU
@pytest.mark.parametrize(
    ("rows", "heads", "kv_heads", "width", "window", "dtype"),
    [
        (3, 4, 2, 16, None, torch.float32),
        (3, 4, 2, 8, None, torch.bfloat16),  # narrower than what a tensor core multiplies
        (7, 14, 2, 64, None, torch.bfloat16),  # split along the sequence, in many parts and in few
        (80, 14, 2, 64, None, torch.bfloat16),
        (7, 6, 1, 80, 40, torch.bfloat16),  # a width that is no power of two, a window
        (7, 4, 2, 16, 1, torch.float32),  # a window of the new token alone
        (300, 4, 2, 16, 33, torch.float32),
        (600, 28, 4, 128, None, torch.bfloat16),
    ],
)
def test_the_attention_kernel(rows: int, heads: int, kv_heads: int, width: int, window: int | None, dtype: Any):
    from rolecall.engines.native.kernels import paged_attention

    torch.manual_seed(0)
    most = 6
    cache = Pages(_shape(dtype, heads, kv_heads, width))
    table, positions = filled(cache, rows, most)
    assert cache.pool is not None
    positions[:7] = torch.tensor([0, 31, 32, 33, PAGE - 1, PAGE, PAGE + 1], device=DEVICE)[:rows]
    places = torch.arange(most * PAGE, device=DEVICE).expand(rows, -1)
    ahead = places >= positions[:, None]  # memory as it was found
    cache.pool[:, :, table.long().gather(1, places // PAGE)[ahead], :, places[ahead] % PAGE] = torch.nan
    together = torch.randn(rows, heads + 2 * kv_heads, width, dtype=dtype, device=DEVICE)
    query, key, value = together.split((heads, kv_heads, kv_heads), 1)
    expected = cache.pool[1].double()
    wanted = attend_plainly(query.double(), key.double(), value.double(), expected, table, positions, 0.1, window)
    nowhere = torch.arange(most, device=DEVICE) > positions[:, None] // PAGE
    where = cache.anchor, cache.offsets[1], cache.arrivals, table.masked_fill(nowhere, 10**6), positions
    got = paged_attention(query, key, value, *where, 0.1, window or 0)
    assert (got - wanted).abs().max() < (1e-5 if dtype == torch.float32 else 2e-2)
    assert cache.pool[1].double().allclose(expected, 0, 0, equal_nan=True)  # new keys and values, and nothing else


@pytest.mark.parametrize("rows", [1, 20])
@pytest.mark.parametrize(
    ("model", "width", "window"),
    [(LlamaForCausalLM, 16, None), (Qwen2ForCausalLM, 16, 40), (Qwen3ForCausalLM, 24, None)],
)
@torch.no_grad()
def test_layers_with_fewer_kernels_compute_the_same(model: Any, width: int, window: int | None, rows: int):
    if torch.cuda.is_available():
        importlib.import_module("rolecall.engines.native.kernels")  # as Decoder does: it registers what layouts call
    torch.manual_seed(0)
    sliding = {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 1} if window else {}
    made = model(model.config_class(**SHAPE | {"num_hidden_layers": 2, "head_dim": width} | sliding))
    assert why_unsupported(made.to(DEVICE).eval()) is None
    for parameter in made.parameters():
        parameter.normal_(std=0.3)
    most = 5
    cache = Pages(made)
    table, positions = filled(cache, rows, most)
    assert cache.pool is not None
    tokens, before = torch.randint(0, 32, (rows, 1), device=DEVICE), cache.pool.clone()

    def computed() -> tuple[torch.Tensor, torch.Tensor]:
        assert cache.pool is not None
        cache.pool.copy_(before)
        hidden = hidden_states(made, tokens, positions[:, None], PagedDecode(cache, table, positions))
        return hidden, cache.pool.clone()

    wanted, wanted_pool = computed()
    found = find(made, fused.fuse(made))
    assert len(found) == 1
    with fused.in_use(found):
        hidden, pool = computed()
    assert (hidden - wanted).abs().max() < 1e-5 and (pool - wanted_pool).abs().max() < 1e-5
    assert not torch.equal(pool, before) and not cache.arrivals.any()
    assert "forward" not in vars(made.base_model)


def test_layers_with_fewer_kernels_compile_for_all_layers_and_rows(tiny: Loaded, monkeypatch: pytest.MonkeyPatch):
    """As they do in models of more than 300M parameters."""
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(LlamaConfig(num_hidden_layers=6, **SHAPE)).eval()
    loaded = Loaded(model, tiny.tokenizer, why_unsupported(model))
    asked = [Request(i, str(i), [5] * (10 + i), 1 + i, 0, Sampling(5 * i + 5)) for i in range(4)]
    plain = PagedEngine(loaded, 64).generate(asked)
    counter, compile = CompileCounterWithBackend("eager"), torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **given: compile(function, backend=counter, **given))
    torch._dynamo.reset()
    compiled.cache_clear()
    compile_layers(model)
    same(PagedEngine(loaded, 64).generate(asked), plain)
    assert counter.frame_count <= 2  # not one a layer, nor one for each of five numbers of rows
    compiled.cache_clear()


@ON_GPU
@pytest.mark.parametrize("vocabulary", [50, 4096, 9000])
def test_the_sampling_kernel(vocabulary: int):
    torch.manual_seed(0)
    kinds = [Sampling(9), Sampling(9, temperature=0), Sampling(9, min_tokens=5, temperature=0.5)]
    rows = [Sequence(Request(i, "p", [0], 1, 7, kinds[i % 3]), 0, 9) for i in range(300)]
    for i, row in enumerate(rows):
        row.tokens = [0] * (i % 9)
    logits = torch.randn(300, vocabulary) * 3
    logits[:, ::7] = -torch.inf
    ends = token_mask([1, 3, vocabulary - 1], vocabulary, torch.device("cpu"))
    tokens, logprobs = draw(logits.to(DEVICE), Batch(rows, DEVICE), ends.to(DEVICE))
    wanted, wanted_logprobs = draw(logits, Batch(rows, torch.device("cpu")), ends)
    same = tokens.cpu() == wanted
    assert same.float().mean() > 0.98  # a number may fall between the two roundings of a cumulative sum
    assert logprobs.isfinite().all()
    assert (logprobs.cpu() - wanted_logprobs)[same].abs().max() < 1e-4


@ON_GPU
def test_a_step_is_captured_once_for_each_bucket_and_kind(tiny_path: Any):
    loaded = models.load(Model(path=str(tiny_path), dtype="float32"), DEVICE)
    engine = PagedEngine(loaded, 64)
    asked = [Request(i, str(i), [5] * 10, 8, 0, Sampling(20, min_tokens=20)) for i in range(2)]
    first = engine.generate(asked)
    captured = dict(engine.decoder.graphs)
    assert [key[0] for key in captured] == [16]
    assert [s.response for s in engine.generate(asked)] == [s.response for s in first]
    assert engine.decoder.graphs == captured  # the pages were allocated anew, the graph was not
    with torch.no_grad():
        loaded.model.model.norm.weight.mul_(0)
    assert [s.response for s in engine.generate(asked)] != [s.response for s in first]  # it reads weights in place


def test_what_fails_while_rows_enter_leaves_rows_that_the_model_can_run(
    tiny_path: Any, monkeypatch: pytest.MonkeyPatch
):
    """On a GPU the rows behind the running ones are computed, too: from tokens that are in the vocabulary."""
    engine = PagedEngine(models.load(Model(path=str(tiny_path), dtype="float32"), DEVICE), 64)
    asked = [Request(0, "p", [5] * 40, 8, 0, Sampling(20))]
    before = engine.generate(asked)
    sample = engine.decoder.sample

    def out_of_memory(*_: Any) -> None:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(engine.decoder, "sample", out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        engine.generate(asked)
    monkeypatch.setattr(engine.decoder, "sample", sample)
    same(engine.generate([Request(0, "p", [5] * 40, 1, 0, Sampling(20))]), before[:1])
    assert engine.decoder.rows.tokens.min() >= 0


def test_a_step_whose_capture_fails_is_captured_again(tiny: Loaded, monkeypatch: pytest.MonkeyPatch):
    class Graph:
        replays = 0

        def replay(self) -> None:
            self.replays += 1

        def pool(self) -> str:
            return "pool"

    def out_of_memory(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("out of memory")

    decoder = Decoder(tiny.model, Pages(tiny.model), [1])
    decoder.pages.allocate(1)
    decoder.captures = True
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", out_of_memory)
    with pytest.raises(torch.OutOfMemoryError), torch.no_grad():
        decoder.run(1, 8)
    assert not decoder.graphs
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: nullcontext())
    with torch.no_grad():
        decoder.run(1, 8)
    assert [graph.replays for graph in decoder.graphs.values()] == [7]  # the first of the eight was no replay


def test_more_rows_than_the_largest_bucket_wait(tiny: Loaded):
    asked = [Request(0, "p", [5], BUCKETS[-1] + 1, 0, Sampling(1))]
    assert len(PagedEngine(tiny, 10_000).generate(asked)) == BUCKETS[-1] + 1


def test_decoder_makes_room_only_where_it_lacks_it(tiny: Loaded):
    decoder = Decoder(tiny.model, Pages(tiny.model), [1])
    decoder.reserve(5, 3, 20)
    rows = decoder.rows
    decoder.reserve(8, 2, 20)
    assert decoder.rows is rows and rows.slots == 8
    decoder.reserve(2, 4, 33)
    assert (decoder.rows.slots, decoder.rows.pages, decoder.rows.longest) == (8, 4, 64)


def test_memory_in_pieces_gives_fewer_pages(tiny: Loaded, monkeypatch: pytest.MonkeyPatch):
    asked = [Request(0, "p", [5] * 80, 4, 0, Sampling(120, min_tokens=120))]
    tried: list[int] = []
    allocate = Pages.allocate

    def scarce(self: Pages, count: int) -> None:
        tried.append(count)
        if count > 5:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        allocate(self, count)

    monkeypatch.setattr(Pages, "allocate", scarce)
    same(PagedEngine(tiny, 8).generate(asked), NativeEngine(tiny, 8).generate(asked))
    assert tried == [16, 8, 4]  # a response and its prompt have 200 tokens, so four pages each
