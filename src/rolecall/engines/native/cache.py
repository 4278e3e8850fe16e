"""The KV cache, and the two ways to attend with it: prompts that enter (prefill) and one token a row (decode)."""

from itertools import chain, takewhile

import torch
from torch import Tensor

from rolecall.models.attention import sdpa

SPAN = 16  # decode reads a multiple of this many positions


class Cache:
    """Keys (after rotary) and values: per layer two tensors (slots, Hkv, length, D), allocated once and reused.

    Slots are rows of the decode batch, so the sequences that run are always slots 0 to n - 1.
    """

    def __init__(self) -> None:
        self.slots = self.length = 0
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def reserve(self, slots: int, length: int) -> None:
        """Make room. What is there already is dropped if it is too small."""
        if slots > self.slots or length > self.length:
            self.slots, self.length = max(slots, self.slots), max(length, self.length)
            self.layers.clear()

    def layer(self, index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, made at its first use in the shape and type of ``key`` and ``value``."""
        if index not in self.layers:
            # Zeros, because positions that are masked out are still multiplied (by 0).
            self.layers[index] = (
                key.new_zeros(self.slots, key.shape[1], self.length, key.shape[3]),
                value.new_zeros(self.slots, value.shape[1], self.length, value.shape[3]),
            )
        return self.layers[index]

    def move(self, sources: list[int], targets: list[int], length: int) -> None:
        """Copy the first ``length`` positions of some slots to others."""
        for layer in self.layers.values():
            for tensor in layer:
                tensor[targets, :, :length] = tensor[sources, :, :length]


class Prefill:
    """Prompts that enter: the prefix that they all share once, and behind it the rest of each.

    The keys and values of a prompt are written to all the slots that continue it, and read from the first of them.

    ``tokens``, ``positions``: (L,) what the model reads; ``ends``: (number of prompts,) the last token of each in it.

    Args:
        prompts: the token ids of each.
        slots: per prompt the first slot and the one behind the last.
    """

    compiled = False

    def __init__(self, cache: Cache, prompts: list[list[int]], slots: list[tuple[int, int]], device: torch.device):
        prefix = _common_prefix([prompt[:-1] for prompt in prompts])  # a last token stays its prompt's own
        self.cache, self.slots, self.shared = cache, slots, len(prefix)
        rests = [prompt[self.shared :] for prompt in prompts]
        self.sizes = [len(rest) for rest in rests]
        places = [range(self.shared), *(range(self.shared, len(prompt)) for prompt in prompts)]
        self.tokens = torch.tensor([*prefix, *chain(*rests)], device=device)
        self.positions = torch.tensor([*chain(*places)], device=device)
        self.ends = torch.tensor(self.sizes, device=device).cumsum(0) + self.shared - 1
        self.masks: dict[tuple[int, int, int | None], Tensor] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        keys, values = self.cache.layer(layer, key, value)
        outputs, start = [], self.shared
        if self.shared:
            alone = self._mask(0, start, window)
            outputs.append(sdpa(query[:, :, :start], key[:, :, :start], value[:, :, :start], alone, scale))
        for size, (first, last) in zip(self.sizes, self.slots, strict=True):
            end, length = start + size, self.shared + size
            for cached, new in ((keys, key[0]), (values, value[0])):
                cached[first:last, :, : self.shared] = new[:, : self.shared]
                cached[first:last, :, self.shared : length] = new[:, start:end]
            whole = keys[first, None, :, :length], values[first, None, :, :length]
            outputs.append(sdpa(query[:, :, start:end], *whole, self._mask(self.shared, size, window), scale))
            start = end
        return torch.cat(outputs, dim=2)

    def _mask(self, before: int, size: int, window: int | None) -> Tensor:
        """(size, before + size): what ``size`` tokens see of the ``before`` ones in front of them and of themselves."""
        if (before, size, window) not in self.masks:
            mask = torch.ones(size, before + size, dtype=torch.bool, device=self.positions.device).tril(before)
            self.masks[before, size, window] = mask if window is None else mask.triu(before - window + 1)
        return self.masks[before, size, window]


def _common_prefix(rows: list[list[int]]) -> list[int]:
    first, last = min(rows), max(rows)  # what these two share, all those between them share
    same = takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False))
    return [token for token, _ in same]


class Decode:
    """One new token in each of slots 0 to n - 1.

    Args:
        positions: (n,) where the new tokens stand.
        longest: the largest of them, known to the caller without asking the device.
    """

    compiled = False

    def __init__(self, cache: Cache, positions: Tensor, longest: int):
        self.cache, self.positions = cache, positions
        self.rows = torch.arange(len(positions), device=positions.device)
        self.span = min(cache.length, -(-(longest + 1) // SPAN) * SPAN)
        self.masks: dict[int | None, Tensor] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        keys, values = self.cache.layer(layer, key, value)
        keys[self.rows, :, self.positions] = key[:, :, 0]
        values[self.rows, :, self.positions] = value[:, :, 0]
        n, heads, _, width = query.shape
        # The query heads that share one key/value head stand in for the query length: nothing is repeated. Plain
        # batched products, since fused attention on the CPU is slower for so few queries.
        grouped = query.reshape(-1, heads // key.shape[1], width)
        keys, values = (cached[:n, :, : self.span].flatten(0, 1) for cached in (keys, values))
        scores = torch.baddbmm(self._mask(window, query.dtype, key.shape[1]), grouped, keys.mT, alpha=scale)
        return (scores.softmax(-1, dtype=torch.float32).to(query.dtype) @ values).view(n, heads, 1, -1)

    def _mask(self, window: int | None, dtype: torch.dtype, heads: int) -> Tensor:
        """(n * Hkv, 1, span): 0 where a row's new token sees a position, else -inf."""
        if window not in self.masks:
            columns = torch.arange(self.span, device=self.positions.device)
            seen = columns <= self.positions[:, None]
            if window is not None:
                seen &= columns > self.positions[:, None] - window
            mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)
            self.masks[window] = mask.repeat_interleave(heads, 0)[:, None]
        return self.masks[window]
