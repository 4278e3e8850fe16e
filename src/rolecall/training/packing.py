"""From samples to micro-batches: a group's prompt once, its responses behind it, under a token budget."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rolecall.errors import RunError
from rolecall.models.attention import Packed
from rolecall.models.flex import BLOCK, BlockSparse
from rolecall.samples import Sample, by_group


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
    layout: Packed | BlockSparse | None
    attention_mask: Tensor | None
    predictors: Tensor
    targets: Tensor

    @cached_property
    def mask(self) -> Tensor:
        """(B, T) True where the policy chose the token."""
        return self._put(per_token(self.samples, "response_mask").bool())

    def rows(self, flat: Tensor) -> Tensor:
        """(N,) values of the response tokens -> (B, T), 0 on the padding."""
        rows = flat.new_zeros(self._present.numel()).index_copy(0, self._places, flat)
        return rows.view(self._present.shape)

    def field(self, name: str) -> Tensor:
        """A per-token field of the samples as (B, T) float32; 0 where ``mask`` is False, whatever stood there."""
        return self._put(per_token(self.samples, name)).where(self.mask, 0.0)

    @cached_property
    def _present(self) -> Tensor:
        """(B, T) on the CPU."""
        return _present(self.samples)

    @cached_property
    def _places(self) -> Tensor:
        """(N,) index into a flattened (B, T) of each response token."""
        return self._put(self._present.flatten().nonzero().squeeze(1))

    def _put(self, tensor: Tensor) -> Tensor:
        return put(tensor, self.tokens.device)


def put(values: list[int] | Tensor, device: torch.device | str) -> Tensor:
    """A tensor on ``device``; a GPU's work that is under way is not waited for."""
    tensor = torch.as_tensor(values)
    if torch.device(device).type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def per_token(samples: list[Sample], name: str) -> Tensor:
    """A per-token field of the samples, right-padded with 0: (B, T) float32 on the CPU."""
    present = _present(samples)
    values = [value for sample in samples for value in token_values(sample, name)]
    return torch.zeros(present.shape).masked_scatter(present, torch.tensor(values, dtype=torch.float32))


def _present(samples: list[Sample]) -> Tensor:
    """(B, T) True where a sample has a response token."""
    lengths = torch.tensor([len(sample.response) for sample in samples])
    return torch.arange(int(lengths.max())) < lengths[:, None]


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
    window: int | None = None,
) -> Iterator[MicroBatch]:
    """Cut samples into micro-batches of at most ``budget`` tokens.

    Packed: each group is a segment with its prompt once and the responses behind it, their positions restarted and
    blind to each other; a group over the budget becomes several segments that repeat the prompt. Not packed (a model
    that does not take our attention): rows of similar length, padded on the right, padding counted.
    A sample over the budget goes alone, whole. Samples with an empty response have nothing to compute and are left out.

    Args:
        window: of the model's sliding layers, if it has any.

    Raises:
        RunError: samples of one group with different prompts.
    """
    samples = [sample for sample in samples if sample.response]
    if packed:
        segments = _segments(samples, budget)
        for chosen in _first_fit([_segment_tokens(segment) for segment in segments], budget):
            yield _pack([segments[i] for i in chosen], device, window)
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


def _pack(segments: list[list[Sample]], device: torch.device | str, window: int | None) -> MicroBatch:
    tokens: list[int] = []
    positions: list[int] = []
    predictors: list[int] = []
    lengths: list[list[int]] = []
    for segment in segments:
        prompt, start = segment[0].prompt, len(tokens)
        tokens += prompt
        positions += range(len(prompt))
        lengths.append([len(prompt), *(len(sample.response) - 1 for sample in segment)])
        for sample in segment:
            behind = len(tokens)
            predictors += [start + len(prompt) - 1, *range(behind, behind + len(sample.response) - 1)]
            tokens += sample.response[:-1]
            positions += range(len(prompt), len(prompt) + len(sample.response) - 1)
    layout: Packed | BlockSparse
    if _skips_blocks(device):
        # A last segment that nobody reads. Two blocks at least: for a single one all would be compiled again.
        if rest := max(-len(tokens) % BLOCK, 2 * BLOCK - len(tokens)):
            tokens += [0] * rest
            positions += range(rest)
            lengths.append([rest])
        layout = BlockSparse(lengths, device, window)
    else:
        layout = Packed([_shared_prefix_mask(parts) for parts in lengths], torch.tensor(positions))
    samples = [sample for segment in segments for sample in segment]
    return MicroBatch(
        samples=samples,
        tokens=put(tokens, device)[None],
        positions=put(positions, device)[None],
        layout=layout,
        attention_mask=None,
        predictors=put(predictors, device),
        targets=put([token for sample in samples for token in sample.response], device),
    )


def _skips_blocks(device: torch.device | str) -> bool:
    """Whether attention there is one kernel for all segments: on a CPU a call for each with a mask is faster."""
    return torch.device(device).type == "cuda"


def _shared_prefix_mask(lengths: list[int]) -> Tensor:
    """(S, S) of a segment's parts: the prompt is causal; a response sees the prompt and, causally, itself."""
    owner = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    visible = (owner[None, :] == 0) | (owner[:, None] == owner[None, :])
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
