"""Batch-invariant attention over pages: prompts that enter and decode steps are computed alike, token by token."""

from itertools import chain

import torch
from torch import Tensor

from rolecall.engines.native.pages import PAGE, TRASH, Pages, pages_for
from rolecall.models.invariant import kernels


class PagedTokens:
    """n tokens, one a row of the model's batch. Their keys and values are written first, then read as all others are.

    Args:
        table: (rows, most pages a row) int32.
        rows: (n,) int64, each token's in the table.
        positions: (n, 1) where the tokens stand.
    """

    compiled = False

    def __init__(self, cache: Pages, table: Tensor, rows: Tensor, positions: Tensor):
        self.cache, self.table, self.positions = cache, table, positions
        self.starts = rows * table.stride(0)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        query, key, value = (x.squeeze(2) for x in (query, key, value))
        where = self.cache.anchor, self.cache.offsets[layer], self.table, self.starts, self.positions
        kernels().store(key, value, where, PAGE)
        return kernels().attention(query, key.shape[1], where, PAGE, scale, window or 0).unsqueeze(2)


class TokenPrefill(PagedTokens):
    """``PagedPrefill`` token by token: ``tokens``, ``positions`` (N, 1), and ``ends``, where the last tokens are."""

    def __init__(self, cache: Pages, prompts: list[list[int]], pages: list[list[int]], begin: int, end: int):
        device = cache.anchor.device
        longest = pages_for(max(map(len, prompts)))
        parts = [prompt[begin:end] for prompt in prompts]
        table = torch.tensor([row + [TRASH] * (longest - len(row)) for row in pages], dtype=torch.int32, device=device)
        rows = torch.tensor([row for row, part in enumerate(parts) for _ in part], device=device)
        positions = torch.tensor([*chain(*(range(begin, begin + len(part)) for part in parts))], device=device)
        super().__init__(cache, table, rows, positions[:, None])
        self.tokens = torch.tensor([*chain(*parts)], device=device)[:, None]
        self.ends = torch.tensor([len(part) for part in parts], device=device).cumsum(0) - 1, 0
