"""Drawing tokens: each row by its own parameters and its own random numbers, whatever else is in the batch."""

import torch
import torch.nn.functional as F
from torch import Tensor

from rolecall.engines.sequence import Sequence

UNIT = 2.0**40  # the largest mass as an integer; less than 2**-40 of it counts as 0
BLOCK = 128  # tokens summed together before one is searched for


class Batch:
    """The sampling parameters and progress of some sequences, one tensor a parameter, (B,) each.

    ``prompts``: prompt lengths; ``counts``: tokens sampled so far; ``tokens``: the last token of each.
    """

    def __init__(self, sequences: list[Sequence], device: torch.device):
        def column(values: list, dtype: torch.dtype = torch.long) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        given = [sequence.request.sampling for sequence in sequences]
        self.tokens = column([sequence.tokens[-1] if sequence.tokens else -1 for sequence in sequences])
        self.prompts = column([len(sequence.request.prompt) for sequence in sequences])
        self.counts = column([len(sequence.tokens) for sequence in sequences])
        self.seeds = column([sequence.request.sample_seed(sequence.index) for sequence in sequences])
        self.min_tokens = column([sampling.min_tokens for sampling in given])
        self.greedy = column([sampling.temperature == 0 for sampling in given], torch.bool)
        self.temperature = column([sampling.temperature or 1.0 for sampling in given], torch.float)
        self.top_p = column([sampling.top_p for sampling in given], torch.float)
        self.top_k = column([sampling.top_k for sampling in given])
        self.expect(sequences)

    def expect(self, sequences: list[Sequence]) -> None:
        """What any of these wants of the sampler: known here, so that no step asks the device."""
        given = [sequence.request.sampling for sequence in sequences]
        self.any_min = any(sampling.min_tokens > 0 for sampling in given)
        self.any_tempered = any(sampling.temperature not in (0, 1) for sampling in given)
        self.any_cut = any(sampling.top_p < 1 or sampling.top_k > 0 for sampling in given)
        self.any_greedy = any(sampling.temperature == 0 for sampling in given)

    def advance(self, tokens: Tensor) -> None:
        self.tokens = tokens
        self.counts = self.counts + 1


def token_mask(tokens: list[int], vocabulary: int, device: torch.device) -> Tensor:
    """(V,) booleans, true at ``tokens``."""
    index = torch.tensor(tokens, dtype=torch.long, device=device)
    return torch.zeros(vocabulary, dtype=torch.bool, device=device).index_fill_(0, index, True)


def draw(logits: Tensor, batch: Batch, ends: Tensor) -> tuple[Tensor, Tensor]:
    """Sample one token a row by inverting the cumulative distribution at the row's next uniform number.

    The order is min_tokens (no end-of-sequence token before), temperature, top-k, top-p. A token of probability
    0 is never drawn.

    Args:
        logits: (B, V), any floating type; may be overwritten.
        ends: (V,) bool, true at the end-of-sequence tokens.

    Returns:
        tokens (B,) and their log-probabilities (B,), float32, under the very distribution that was sampled from
        (greedy rows: under temperature 1 without top-k and top-p).
    """
    if logits.is_cuda and not batch.any_cut:
        from rolecall.engines.native import kernels  # needs Triton, which comes with torch's CUDA builds alone

        return kernels.draw(logits, batch, ends)
    scores = logits.float()
    if batch.any_min:
        scores = scores.masked_fill(ends & (batch.counts < batch.min_tokens)[:, None], -torch.inf)
    if batch.any_tempered:
        scores = scores / batch.temperature[:, None]
    if batch.any_cut:
        least = _least_kept(scores, batch.top_k, batch.top_p).masked_fill(batch.greedy, -torch.inf)
        scores = scores.masked_fill(scores < least[:, None], -torch.inf)
    probabilities = scores.softmax(-1)
    tokens = invert(probabilities, uniforms(batch.seeds, batch.counts))
    if batch.any_greedy:
        tokens = torch.where(batch.greedy, scores.argmax(-1), tokens)
    return tokens, probabilities.gather(-1, tokens[:, None]).squeeze(-1).log()


def uniforms(seeds: Tensor, counters: Tensor) -> Tensor:
    """Numbers in [0, 1) that are a function of (seed, counter) alone: SplitMix64 (Steele et al. 2014), 53 bits.

    Args:
        seeds, counters: (B,) int64.

    Returns:
        (B,) float64.
    """

    def shifted(x: Tensor, bits: int) -> Tensor:  # a logical shift; torch's own keeps the sign
        return (x >> bits) & ((1 << (64 - bits)) - 1)

    x = seeds + (counters + 1) * _signed(0x9E3779B97F4A7C15)
    x = (x ^ shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ shifted(x, 27)) * _signed(0x94D049BB133111EB)
    x = x ^ shifted(x, 31)
    return shifted(x, 11).double() * 2.0**-53


def _signed(x: int) -> int:
    return x - (1 << 64) if x >= 1 << 63 else x


def invert(probabilities: Tensor, u: Tensor) -> Tensor:
    """(B, V) float32 and (B,) in [0, 1) -> (B,) the first token whose cumulative probability is above u.

    First the block of tokens, then the token in it: a running sum over the whole vocabulary takes ten times as long.
    """
    size = probabilities.shape[-1]
    padded = F.pad(probabilities, (0, -size % BLOCK)) if size % BLOCK else probabilities
    blocks = padded.view(len(padded), -1, BLOCK)
    block, u = _pick(blocks.sum(-1), u[:, None])
    token, _ = _pick(blocks.gather(1, block[:, :, None].expand(-1, -1, BLOCK)).squeeze(1), u)
    return (block * BLOCK + token).squeeze(-1).clamp(max=size - 1)


def _pick(masses: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """(B, N) and (B, 1) in [0, 1) -> the index (B, 1) whose share of the mass u falls in, and where in it, in [0, 1).

    Masses become integers, whose sums are exact in float64: an empty one has no share, whatever the order of summation.
    """
    weights = (masses.double() / masses.amax(-1, keepdim=True) * UNIT).floor()
    through = weights.cumsum(-1)
    total = through[:, -1:]
    target = torch.minimum(u * total, total - 0.5)  # u just under 1 may round up to the total
    # A row of NaN finds no place. It is given one, and its NaN log-probability is reported later.
    index = torch.searchsorted(through, target, right=True).clamp(max=masses.shape[-1] - 1)
    return index, 1 - (through.gather(-1, index) - target) / weights.gather(-1, index)


def _least_kept(scores: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """(B, V) -> (B,) the smallest score that top-k and then top-p keep; tokens that tie with it stay too."""
    ranked = scores.sort(-1, descending=True).values
    size = ranked.shape[-1]
    kth = ranked.gather(-1, torch.where(top_k > 0, top_k.clamp(max=size), size)[:, None] - 1)
    in_k = ranked >= kth
    probabilities = ranked.masked_fill(~in_k, -torch.inf).double().softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    in_p = (before < top_p[:, None]) | (top_p >= 1)[:, None]
    kept = (in_k & in_p).sum(-1, keepdim=True).clamp(min=1)
    return ranked.gather(-1, kept - 1).squeeze(-1)
