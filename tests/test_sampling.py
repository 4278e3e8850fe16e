"""The sampler against distributions worked out in float64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rolecall.engines.native.sampling import Batch, draw, invert, token_mask, uniforms
from rolecall.engines.sequence import Sequence
from rolecall.samples import Request, Sampling

TOP = 1 - 2.0**-53  # the largest uniform number
NONE = torch.tensor(False)  # no end-of-sequence token, for any vocabulary


def batch_of(*samplings: Sampling, counts: tuple[int, ...] = (), seed: int = 0) -> Batch:
    rows = [Sequence(Request(i, "p", [0], 1, seed, s), 0, s.max_tokens) for i, s in enumerate(samplings)]
    for row, count in zip(rows, counts, strict=False):
        row.tokens = [0] * count
    return Batch(rows, torch.device("cpu"))


def reference(logits: list[float], sampling: Sampling) -> list[float]:
    """Temperature, then top-k, then top-p, one token at a time in float64."""
    scaled = [value / (sampling.temperature or 1.0) for value in logits]
    order = sorted(range(len(scaled)), key=lambda i: -scaled[i])
    if sampling.top_k:
        order = order[: sampling.top_k]
    weights = {i: math.exp(scaled[i] - max(scaled)) for i in order}
    total, mass, kept = sum(weights.values()), 0.0, []
    for i in order:
        if mass < sampling.top_p * total:
            kept.append(i)
        mass += weights[i]
    total = sum(weights[i] for i in kept)
    return [weights[i] / total if i in kept else 0.0 for i in range(len(logits))]


def test_uniforms_are_splitmix64():
    # The published first outputs of SplitMix64 from seed 0.
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    got = uniforms(torch.zeros(3, dtype=torch.long), torch.arange(3))
    assert got.tolist() == [(x >> 11) * 2.0**-53 for x in published]


def test_uniforms_fill_the_unit_interval_evenly():
    u = uniforms(torch.arange(2**40, 2**40 + 100).repeat_interleave(100), torch.arange(100).repeat(100))
    assert u.min() >= 0 and u.max() < 1
    counts = torch.histc(u.float(), 10, 0, 1)
    assert (counts - 1000).square().sum() / 1000 < 27.9  # chi-square, 9 degrees of freedom, 0.1 %


@pytest.mark.parametrize("size", [3, 128, 300])
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_a_grid_of_u_gives_each_token_its_probability(size: int, data: st.DataObject):
    finite = st.floats(-8, 8, width=32)
    logits = data.draw(st.lists(st.one_of(finite, st.just(-math.inf)), min_size=size, max_size=size))
    logits[data.draw(st.integers(0, size - 1))] = 0.0
    p = torch.tensor(logits).softmax(-1)
    grid = 4096
    tokens = invert(p.expand(grid, -1), (torch.arange(grid).double() + 0.5) / grid)
    assert (tokens.diff() >= 0).all()
    shares = torch.bincount(tokens, minlength=size) / grid
    exact = torch.tensor(logits, dtype=torch.double).softmax(-1)
    assert (shares - exact).abs().max() <= 1.0001 / grid
    # Cumulative errors would add up over the tokens; they do not.
    assert (shares.cumsum(0) - exact.cumsum(0)).abs().max() <= 1.0001 / grid


@pytest.mark.parametrize("size", [2, 5, 127, 128, 129, 1000])
def test_a_token_of_probability_zero_is_never_drawn(size: int):
    for only in {0, size // 2, size - 1}:
        p = torch.zeros(4, size)
        p[:, only] = 1.0
        assert invert(p, torch.tensor([0.0, 0.3, 1 - 2.0**-30, TOP], dtype=torch.double)).tolist() == [only] * 4
    p = torch.zeros(1, size)
    p[0, 0] = p[0, size - 2] = 0.5  # the last token has none
    assert invert(p, torch.tensor([TOP], dtype=torch.double)).item() == size - 2


def test_the_boundary_between_two_tokens_is_where_it_should_be():
    p = torch.tensor([[0.25, 0.75]]).expand(4, -1)
    u = torch.tensor([0.0, 0.25 - 2.0**-20, 0.25, TOP], dtype=torch.double)
    assert invert(p, u).tolist() == [0, 0, 1, 1]


@settings(max_examples=60, deadline=None)
@given(
    logits=st.lists(st.integers(-80, 80), min_size=12, max_size=12, unique=True),
    temperature=st.sampled_from([0.25, 0.7, 1.0, 2.5]),
    top_k=st.integers(0, 14),
    top_p=st.sampled_from([1e-6, 0.3, 0.8, 0.97, 1.0]),
    seed=st.integers(0, 10),
)
def test_log_probabilities_are_those_of_the_cut_distribution(logits, temperature, top_k, top_p, seed):
    sampling = Sampling(9, temperature=temperature, top_k=top_k, top_p=top_p)
    values = [x / 10 for x in logits]
    rows = 64
    tokens, logprobs = draw(torch.tensor(values).expand(rows, -1), batch_of(*[sampling] * rows, seed=seed), NONE)
    expected = reference(values, sampling)
    for token, logprob in zip(tokens.tolist(), logprobs.tolist(), strict=True):
        assert expected[token] > 0
        assert logprob == pytest.approx(math.log(expected[token]), abs=2e-5)


def test_each_row_is_sampled_by_its_own_parameters():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().expand(4, -1)
    batch = batch_of(
        Sampling(9, temperature=0), Sampling(9, top_k=1), Sampling(9, top_p=0.45), Sampling(9, temperature=0, top_k=2)
    )
    tokens, logprobs = draw(logits, batch, NONE)
    assert tokens.tolist() == [0, 0, 0, 0]
    # Greedy: under temperature 1, uncut. The others leave one token, of probability 1.
    assert logprobs.tolist() == pytest.approx([math.log(0.5), 0, 0, math.log(0.5)], abs=1e-6)


def test_no_end_before_min_tokens():
    logits = torch.tensor([[0.0, 9.0, 0.0, 8.0]]).repeat(3, 1)
    batch = batch_of(*[Sampling(9, min_tokens=2, temperature=0)] * 3, counts=(1, 2, 0))
    tokens, logprobs = draw(logits, batch, token_mask([1, 3], 4, logits.device))
    assert tokens.tolist() == [0, 1, 0]
    assert logprobs[0].item() == pytest.approx(math.log(0.5))  # of the two tokens that are allowed
    assert logprobs[1].item() == pytest.approx(-math.log(1 + 2 * math.exp(-9) + math.exp(-1)))


def test_nan_reaches_the_log_probability():
    _, logprobs = draw(torch.full((1, 300), math.nan), batch_of(Sampling(9)), NONE)
    assert math.isnan(logprobs.item())


def test_a_draw_does_not_depend_on_the_other_rows():
    torch.manual_seed(0)
    logits = torch.randn(16, 1000)
    samplings = [Sampling(9, temperature=0.5 + i / 8, top_k=i % 3 * 40) for i in range(16)]
    rows = [Sequence(Request(i, "p", [0], 1, 7, s), 0, 9) for i, s in enumerate(samplings)]
    device = torch.device("cpu")
    tokens, logprobs = draw(logits, Batch(rows, device), NONE)
    for i, row in enumerate(rows):
        alone, alone_logprobs = draw(logits[i : i + 1], Batch([row], device), NONE)
        assert alone.item() == tokens[i] and alone_logprobs.item() == logprobs[i]
