"""The KV cache, and the two ways to attend with it: prompts that enter (prefill) and one token a row (decode)."""

from __future__ import annotations

import torch
from torch import Tensor

from rolecall.models.attention import Packed

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


class Prefill(Packed):
    """Prompts one behind the other; the keys and values of each are written to all the slots that continue it.

    Args:
        sizes: of the prompts, in tokens.
        slots: per prompt the first slot and the one behind the last.
    """

    def __init__(self, cache: Cache, sizes: list[int], slots: list[tuple[int, int]], device: torch.device):
        masks = [torch.ones(size, size, dtype=torch.bool, device=device).tril() for size in sizes]
        super().__init__(masks, torch.cat([torch.arange(size, device=device) for size in sizes]))
        self.cache, self.sizes, self.slots = cache, sizes, slots

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        keys, values = self.cache.layer(layer, key, value)
        start = 0
        for size, (first, last) in zip(self.sizes, self.slots, strict=True):
            keys[first:last, :, :size] = key[0, :, start : start + size]
            values[first:last, :, :size] = value[0, :, start : start + size]
            start += size
        return super().attend(layer, query, key, value, scale, window)


class Decode:
    """One new token in each of slots 0 to n - 1.

    Args:
        positions: (n,) where the new tokens stand.
        longest: the largest of them, known to the caller without asking the device.
    """

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
