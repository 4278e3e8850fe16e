"""From samples to micro-batches: a group's prompt once, its responses behind it, under a token budget."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rolecall.errors import RunError
from rolecall.models.attention import Packed
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
    """

    samples: list[Sample]
    tokens: Tensor
    positions: Tensor
    layout: Packed | None
    attention_mask: Tensor | None
    predictors: Tensor

    @property
    def targets(self) -> Tensor:
        """(N,) the response tokens."""
        return self.tokens.new_tensor([token for sample in self.samples for token in sample.response])

    @cached_property
    def mask(self) -> Tensor:
        """(B, T) True where the policy chose the token."""
        return per_token(self.samples, "response_mask").bool().to(self.tokens.device)

    def rows(self, flat: Tensor) -> Tensor:
        """(N,) values of the response tokens -> (B, T), 0 on the padding."""
        return pad_sequence(flat.split([len(sample.response) for sample in self.samples]), batch_first=True)

    def field(self, name: str) -> Tensor:
        """A per-token field of the samples as (B, T) float32; 0 where ``mask`` is False, whatever stood there."""
        return per_token(self.samples, name).to(self.tokens.device).where(self.mask, 0.0)


def per_token(samples: list[Sample], name: str) -> Tensor:
    """A per-token field of the samples, right-padded: (B, T) float32 on the CPU."""
    rows = [torch.tensor(token_values(sample, name), dtype=torch.float32) for sample in samples]
    return pad_sequence(rows, batch_first=True)


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
    samples: list[Sample], budget: int, *, packed: bool, device: torch.device | str = "cpu"
) -> Iterator[MicroBatch]:
    """Cut samples into micro-batches of at most ``budget`` tokens.

    Packed: each group is a segment with its prompt once and the responses behind it, their positions restarted and
    blind to each other; a group over the budget becomes several segments that repeat the prompt. Not packed (a model
    that does not take our attention): rows of similar length, padded on the right, padding counted.
    A sample over the budget goes alone, whole. Samples with an empty response have nothing to compute and are left out.

    Raises:
        RunError: samples of one group with different prompts.
    """
    samples = [sample for sample in samples if sample.response]
    if packed:
        segments = _segments(samples, budget)
        for chosen in _first_fit([_segment_tokens(segment) for segment in segments], budget):
            yield _pack([segments[i] for i in chosen], device)
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


def _pack(segments: list[list[Sample]], device: torch.device | str) -> MicroBatch:
    tokens: list[int] = []
    positions: list[int] = []
    predictors: list[int] = []
    for segment in segments:
        prompt, start = segment[0].prompt, len(tokens)
        tokens += prompt
        positions += range(len(prompt))
        for sample in segment:
            behind = len(tokens)
            predictors += [start + len(prompt) - 1, *range(behind, behind + len(sample.response) - 1)]
            tokens += sample.response[:-1]
            positions += range(len(prompt), len(prompt) + len(sample.response) - 1)
    where = torch.tensor(positions, device=device)
    return MicroBatch(
        samples=[sample for segment in segments for sample in segment],
        tokens=torch.tensor([tokens], device=device),
        positions=where[None],
        layout=Packed([_shared_prefix_mask(segment, device) for segment in segments], where),
        attention_mask=None,
        predictors=torch.tensor(predictors, device=device),
    )


def _shared_prefix_mask(segment: list[Sample], device: torch.device | str) -> Tensor:
    """(S, S): the prompt is causal; a response sees the prompt and, causally, itself."""
    lengths = [len(segment[0].prompt), *(len(sample.response) - 1 for sample in segment)]
    owner = torch.arange(len(lengths), device=device).repeat_interleave(torch.tensor(lengths, device=device))
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
    rows = [torch.tensor(sample.prompt + sample.response[:-1], device=device) for sample in samples]
    tokens = pad_sequence(rows, batch_first=True)
    size = tokens.shape[1]
    predictors = [
        torch.arange(len(sample.response), device=device) + i * size + len(sample.prompt) - 1
        for i, sample in enumerate(samples)
    ]
    return MicroBatch(
        samples=samples,
        tokens=tokens,
        positions=torch.arange(size, device=device).expand_as(tokens),
        layout=None,
        attention_mask=pad_sequence([torch.ones_like(row) for row in rows], batch_first=True),
        predictors=torch.cat(predictors),
    )
