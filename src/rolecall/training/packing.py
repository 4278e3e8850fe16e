"""From samples to micro-batches: a group's prompt once, its responses behind it, under a token budget."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rolecall.errors import RunError
from rolecall.models.attention import Packed
from rolecall.models.flex import BLOCK, BlockSparse, put
from rolecall.models.invariant import PackedTokens
from rolecall.samples import Sample, by_group

MASKED_TOKENS = 2048  # On a GPU so few attend by a mask, if layers are not compiled: no kernel has to be, either.


@dataclass
class MicroBatch:
    """What one forward pass reads, and how its outputs belong to samples.

    A response's last token is left out of ``tokens``: it predicts nothing. N counts the response tokens of all samples.

    ``samples``: in the order of the rows of every (B, T) tensor, T the longest response.
    ``tokens``, ``positions``: (1, L) packed or (B, L) padded on the right.
    ``layout``: how packed tokens attend; None: padded, and ``attention_mask`` (B, L) says where tokens are.
    ``predictors``: (N,) index into the flattened ``tokens`` of the position that predicts each response token. All
    responses of a group share the predictor of their first token, the prompt's last position.
    ``targets``: (N,) the response tokens.
    """

    samples: list[Sample]
    tokens: Tensor
    positions: Tensor
    layout: Packed | BlockSparse | PackedTokens | None
    attention_mask: Tensor | None
    predictors: Tensor
    targets: Tensor

    @cached_property
    def mask(self) -> Tensor:
        """(B, T) True where the policy chose the token."""
        return self._field("response_mask").bool()

    def rows(self, flat: Tensor) -> Tensor:
        """(N,) values of the response tokens -> (B, T), 0 on the padding."""
        shape, places = self._places
        return flat.new_zeros(shape).flatten().index_copy(0, places, flat).view(shape)

    def field(self, name: str) -> Tensor:
        """A per-token field of the samples as (B, T) float32; 0 where ``mask`` is False, whatever stood there."""
        return self._field(name).where(self.mask, 0.0)

    def _field(self, name: str) -> Tensor:
        return put(per_token(self.samples, name), self.tokens.device)

    @cached_property
    def _places(self) -> tuple[tuple[int, ...], Tensor]:
        """(B, T), and (N,) index into a flattened tensor of that shape of each response token."""
        present = _present(self.samples)
        return present.shape, put(np.flatnonzero(present), self.tokens.device)


def per_token(samples: list[Sample], name: str) -> Tensor:
    """A per-token field of the samples, right-padded with 0: (B, T) float32 on the CPU."""
    present = _present(samples)
    rows = np.zeros(present.shape, np.float32)
    rows[present] = [value for sample in samples for value in token_values(sample, name)]
    return torch.from_numpy(rows)


def _present(samples: list[Sample]) -> np.ndarray:
    """(B, T) True where a sample has a response token."""
    lengths = np.array([len(sample.response) for sample in samples])
    return np.arange(lengths.max()) < lengths[:, None]


def token_values(sample: Sample, name: str) -> list[float]:
    """A field that an earlier stage fills with one value a response token; RunError if it has not."""
    values = getattr(sample, name)
    if len(values) != len(sample.response):
        raise RunError(
            f"Sample {sample.index} of group {sample.group_id} has {len(values)} {name} for {len(sample.response)} "
            "response tokens; the stage that fills them has to come first."
        )
    return values


def micro_batches(
    samples: list[Sample],
    budget: int,
    *,
    packed: bool,
    device: torch.device | str = "cpu",
    compiled: bool = False,
    window: int | None = None,
    invariant: bool = False,
) -> Iterator[MicroBatch]:
    """Cut samples into micro-batches of at most ``budget`` tokens.

    Packed: each group is a segment with its prompt once and the responses behind it, their positions restarted and
    blind to each other; a group over the budget becomes several segments that repeat the prompt. Not packed (a model
    that does not take our attention): rows of similar length, padded on the right, padding counted.
    A sample over the budget goes alone, whole. Samples with an empty response have nothing to compute and are left out.

    Args:
        compiled: whether the model's layers are: then attention's kernel is compiled for short rows, too.
        window: of the model's sliding layers, if it has any.
        invariant: attention is computed token by token, as in the native engine (packed only).

    Raises:
        RunError: samples of one group with different prompts.
    """
    samples = [sample for sample in samples if sample.response]
    if packed:
        segments = _segments(samples, budget)
        for chosen in _first_fit([_segment_tokens(segment) for segment in segments], budget):
            yield _pack([segments[i] for i in chosen], device, compiled, window, invariant)
    else:
        for rows in _rows_of_similar_length(samples, budget):
            yield _pad(rows, device)


def _segment_tokens(segment: list[Sample]) -> int:
    return len(segment[0].prompt) + sum(len(sample.response) - 1 for sample in segment)


def _segments(samples: list[Sample], budget: int) -> list[list[Sample]]:
    """Samples by group, a group over the budget in several parts."""
    segments: list[list[Sample]] = []
    for group_id, members in by_group(samples).items():
        if any(sample.prompt != members[0].prompt for sample in members):
            raise RunError(f"Group {group_id} holds samples of different prompts; a group id belongs to one prompt.")
        segment: list[Sample] = []
        for sample in members:
            if segment and _segment_tokens([*segment, sample]) > budget:
                segments.append(segment)
                segment = []
            segment.append(sample)
        segments.append(segment)
    return segments


def _first_fit(sizes: list[int], budget: int) -> list[list[int]]:
    """First-fit decreasing bin packing: the indices in each bin."""
    bins: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        fitting = (b for b, free in enumerate(room) if sizes[i] <= free)
        b = next(fitting, len(bins))
        if b == len(bins):
            bins.append([])
            room.append(budget)
        bins[b].append(i)
        room[b] -= sizes[i]
    return bins


def _pack(
    segments: list[list[Sample]], device: torch.device | str, compiled: bool, window: int | None, invariant: bool
) -> MicroBatch:
    tokens: list[int] = []
    positions: list[np.ndarray] = []
    predictors: list[np.ndarray] = []
    lengths: list[list[int]] = []
    for segment in segments:
        prompt, last = segment[0].prompt, len(tokens) + len(segment[0].prompt) - 1
        tokens += prompt
        positions.append(np.arange(len(prompt)))
        lengths.append([len(prompt), *(len(sample.response) - 1 for sample in segment)])
        for sample in segment:
            behind = np.arange(len(sample.response) - 1)
            predictors += [np.array([last]), behind + len(tokens)]
            tokens += sample.response[:-1]
            positions.append(behind + len(prompt))
    sparse = _skips_blocks(device, compiled or len(tokens) > MASKED_TOKENS)
    # A last segment that nobody reads. Two blocks at least: for a single one all would be compiled again.
    if sparse and (rest := max(-len(tokens) % BLOCK, 2 * BLOCK - len(tokens))):
        tokens += [0] * rest
        positions.append(np.arange(rest))
        lengths.append([rest])
    where = put(np.concatenate(positions), device)
    layout: Packed | BlockSparse | PackedTokens
    if sparse:
        layout = BlockSparse(lengths, device, window)
    else:
        apart = [lengths] if _joins_segments(device, len(tokens)) else [[parts] for parts in lengths]
        layout = Packed([_mask(some, device) for some in apart], where)
    if invariant:
        layout = PackedTokens(layout, lengths, where[None])
    samples = [sample for segment in segments for sample in segment]
    return MicroBatch(
        samples=samples,
        tokens=put(tokens, device)[None],
        positions=where[None],
        layout=layout,
        attention_mask=None,
        predictors=put(np.concatenate(predictors), device),
        targets=put([token for sample in samples for token in sample.response], device),
    )


def _skips_blocks(device: torch.device | str, worth_compiling: bool) -> bool:
    """Whether attention is one compiled kernel for all segments: on a CPU a call for each with a mask is faster."""
    # (Nor without compilation, where FlexAttention would make the scores of all tokens x tokens.)
    return torch.device(device).type == "cuda" and worth_compiling and not torch._dynamo.config.disable


def _joins_segments(device: torch.device | str, tokens: int) -> bool:
    """Whether one mask serves all segments: on a GPU a call for each takes longer than computing what is masked."""
    return torch.device(device).type == "cuda" and tokens <= MASKED_TOKENS


def _mask(segments: list[list[int]], device: torch.device | str) -> Tensor:
    """(S, S) of some segments' parts: a prompt is causal; a response sees its prompt and, causally, itself."""
    sizes = list(map(sum, segments))
    segment = put(np.arange(len(sizes)).repeat(sizes), device)
    part = put(np.concatenate([np.arange(len(parts)).repeat(parts) for parts in segments]), device)
    visible = (segment[:, None] == segment) & ((part == 0) | (part[:, None] == part))
    return visible.tril()


def _rows_of_similar_length(samples: list[Sample], budget: int) -> Iterator[list[Sample]]:
    rows: list[Sample] = []
    for sample in sorted(samples, key=lambda sample: -_segment_tokens([sample])):
        if rows and (len(rows) + 1) * _segment_tokens(rows[:1]) > budget:
            yield rows
            rows = []
        rows.append(sample)
    if rows:
        yield rows


def _pad(samples: list[Sample], device: torch.device | str) -> MicroBatch:
    rows = [torch.tensor(sample.prompt + sample.response[:-1]) for sample in samples]
    tokens = put(pad_sequence(rows, batch_first=True), device)
    size = tokens.shape[1]
    predictors = [
        torch.arange(len(sample.response)) + i * size + len(sample.prompt) - 1 for i, sample in enumerate(samples)
    ]
    return MicroBatch(
        samples=samples,
        tokens=tokens,
        positions=torch.arange(size, device=device).expand_as(tokens),
        layout=None,
        attention_mask=put(pad_sequence([torch.ones_like(row) for row in rows], batch_first=True), device),
        predictors=put(torch.cat(predictors), device),
        targets=put([token for sample in samples for token in sample.response], device),
    )
