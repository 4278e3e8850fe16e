"""The paged KV cache: pages of a few positions each, shared between the rows that continue one prompt."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from rolecall.engines.cache import head_size, token_bytes
from rolecall.models.attention import sdpa
from rolecall.models.invariant import ALIGNED

PAGE = 64  # positions
ARRIVALS = 1024  # counters of ``Pages.arrivals``
TRASH = 0  # the page that rows write to which have no more use for what they compute


def pages_for(tokens: int) -> int:
    return -(-tokens // PAGE)


class Pages:
    """Keys (after rotary) and values of all layers, in numbered pages that rows take and give back.

    A page that several rows read (their prompt's whole pages) is counted, and free once all have given it back.

    Captured CUDA graphs keep the addresses of the tensors they were captured with. That of the pages is not one of
    them: kernels find each layer's from ``anchor``, a small tensor that stays, and ``offsets``, which ``allocate``
    writes. So the memory can be freed for training, and the graphs live on.

    ``anchor``: (8,) of the model's type. ``offsets``: (layers, 2) int64, in ``ALIGNED`` elements from it to the layer's
    keys and values. ``arrivals``: (ARRIVALS,) int32 zeros, by which programs of one kernel know the last of them.
    """

    def __init__(self, model: Any):
        shape = model.config.get_text_config()
        self.layers, self.width = shape.num_hidden_layers, head_size(model)
        self.heads = getattr(shape, "num_key_value_heads", None) or shape.num_attention_heads
        self.page_bytes = PAGE * token_bytes(model)
        self.anchor = torch.empty(ALIGNED, dtype=model.dtype, device=model.device)
        self.offsets = torch.zeros(self.layers, 2, dtype=torch.int64, device=model.device)
        self.arrivals = torch.zeros(ARRIVALS, dtype=torch.int32, device=model.device)
        self.pool: Tensor | None = None  # (layers, 2, pages, heads, PAGE, width)
        self.free: list[int] = []
        self.users: list[int] = []

    def allocate(self, count: int) -> None:
        """Memory for ``count`` pages that rows may take (and the trash)."""
        self.pool = self.anchor.new_empty(self.layers, 2, 1 + count, self.heads, PAGE, self.width)
        self.pool[:, :, TRASH] = 0  # read by rows that are done: never NaN
        unit = ALIGNED * self.pool.element_size()
        addresses = [[self.pool[layer, part].data_ptr() for part in (0, 1)] for layer in range(self.layers)]
        self.offsets.copy_((torch.tensor(addresses) - self.anchor.data_ptr()) // unit)
        self.free = list(range(count, TRASH, -1))
        self.users = [0] * (1 + count)

    def release(self) -> None:
        self.pool = None

    def take(self, count: int) -> list[int]:
        """That many free pages; the caller has seen that there are as many."""
        taken = [self.free.pop() for _ in range(count)]
        self.share(taken)
        return taken

    def share(self, pages: list[int]) -> None:
        """One more row reads these."""
        for page in pages:
            self.users[page] += 1

    def give(self, pages: list[int]) -> None:
        """A row is done with these."""
        for page in pages:
            self.users[page] -= 1
            if not self.users[page]:
                self.free.append(page)

    def copy(self, sources: list[int], targets: list[int]) -> None:
        """Pages, with all layers of them, to others."""
        assert self.pool is not None
        self.pool[:, :, targets] = self.pool[:, :, sources]


class PagedPrefill:
    """Prompts that enter, one a row, padded on the right (what stands behind a token is not seen by it).

    ``tokens``, ``positions``: (B, L) what the model reads; ``ends``: row and place of each prompt's last token.

    Args:
        prompts: the token ids of each.
        pages: of each, enough for it.
        begin, end: of the tokens to be computed, where only a part is; those before are in the pages. (Multiples of
            ``PAGE``.)
    """

    compiled = False

    def __init__(self, cache: Pages, prompts: list[list[int]], pages: list[list[int]], begin: int, end: int):
        device = cache.anchor.device
        self.cache, self.begin = cache, begin
        parts = [prompt[begin:end] for prompt in prompts]
        longest = PAGE * pages_for(max(map(len, parts)))
        self.tokens = torch.tensor([part + [0] * (longest - len(part)) for part in parts], device=device)
        self.positions = begin + torch.arange(longest, device=device).expand_as(self.tokens)
        last = torch.tensor([len(part) - 1 for part in parts], device=device)
        self.ends = torch.arange(len(parts), device=device), last
        self.before = torch.tensor([row[: begin // PAGE] for row in pages], dtype=torch.long, device=device)
        own = [row[begin // PAGE : end // PAGE] for row in pages]
        self.pages = torch.tensor([row + [TRASH] * (longest // PAGE - len(row)) for row in own], device=device)
        self.masks: dict[int, Tensor] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        keys, values = self._stored(layer, 0, key), self._stored(layer, 1, value)
        size, all_keys = query.shape[2], keys.shape[2]
        if window is None or window >= all_keys:
            mask = causal_lower_right(size, all_keys) if self.begin else None
            return sdpa(query, keys, values, mask, scale, causal=not self.begin)
        first = max(0, self.begin - window + 1)  # key that the first query sees
        return sdpa(query, keys[:, :, first:], values[:, :, first:], self._band(window, first), scale)

    def _stored(self, layer: int, part: int, new: Tensor) -> Tensor:
        """Write keys (0) or values (1) into their pages; with those before them: (B, Hkv, begin + L, D)."""
        assert self.cache.pool is not None
        pool = self.cache.pool[layer, part]
        rows, heads, length, width = new.shape
        pool[self.pages] = new.view(rows, heads, length // PAGE, PAGE, width).transpose(1, 2)
        return torch.cat([pool[self.before].transpose(1, 2).flatten(2, 3), new], 2) if self.begin else new

    def _band(self, window: int, first: int) -> Tensor:
        if window not in self.masks:
            query = self.positions[0]
            key = torch.arange(first, self.begin + len(query), device=query.device)
            distance = query[:, None] - key
            self.masks[window] = (distance >= 0) & (distance < window)
        return self.masks[window]


class PagedDecode:
    """One new token a row.

    Args:
        table: (rows, most pages a row) int32.
        positions: (n,) where the new tokens stand.
    """

    compiled = True

    def __init__(self, cache: Pages, table: Tensor, positions: Tensor):
        self.cache, self.table, self.positions = cache, table, positions

    def layer(self, number: int) -> "PagedDecodeLayer":
        return PagedDecodeLayer(self, number)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        return self.layer(layer).attend(layer, query, key, value, scale, window)


class PagedDecodeLayer:
    """The layout of one layer. It holds tensors and no number, so that compiled code serves every layer."""

    def __init__(self, decode: PagedDecode, number: int):
        cache = decode.cache
        self.where = cache.anchor, cache.offsets[number], cache.arrivals, decode.table, decode.positions
        self.table, self.positions = decode.table, decode.positions
        self.pool = None if cache.anchor.is_cuda else cache.pool[number]  # type: ignore[index]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        new = query.squeeze(2), key.squeeze(2), value.squeeze(2)
        if self.pool is not None:
            return attend_plainly(*new, self.pool, self.table, self.positions, scale, window).unsqueeze(2)
        return torch.ops.rolecall.paged_attention(*new, *self.where, scale, window or 0).unsqueeze(2)

    def turn_and_attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        window: int | None,
        cos: Tensor,
        sin: Tensor,
        query_norm: Any = None,
        key_norm: Any = None,
    ) -> Tensor:
        """query (n, Hq, D), key and value (n, Hkv, D) of new tokens, not yet turned to their positions -> (n, Hq, D).

        Args:
            cos, sin: (n, D), which turn them.
            query_norm, key_norm: RMS norms before that, if the model has some.
        """
        if self.pool is not None:
            query, key = (
                turned(x if norm is None else norm(x), cos, sin) for x, norm in ((query, query_norm), (key, key_norm))
            )
            return attend_plainly(query, key, value, self.pool, self.table, self.positions, scale, window)
        how: tuple[Any, ...] = cos, sin
        if query_norm is not None:
            how += query_norm.weight, key_norm.weight, query_norm.variance_epsilon
        return torch.ops.rolecall.paged_attention(query, key, value, *self.where, scale, window or 0, *how)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding (RoFormer, arXiv:2104.09864, in halves): x (n, heads, D), cos and sin (n, D)."""
    first, second = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]


def attend_plainly(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pool: Tensor,
    table: Tensor,
    positions: Tensor,
    scale: float,
    window: int | None,
) -> Tensor:
    """``kernels.paged_attention`` without a kernel, on one layer's pool (2, pages, Hkv, PAGE, D)."""
    pages = table[: len(query)].long()
    own = pages.gather(1, positions[:, None] // PAGE).squeeze(1)
    for part, new in enumerate((key, value)):
        pool[part, own, :, positions % PAGE] = new
    # (n, pages a row, Hkv, PAGE, D) -> (n, Hkv, positions, D)
    keys, values = (pool[part, pages].transpose(1, 2).flatten(2, 3) for part in (0, 1))
    columns = torch.arange(keys.shape[2], device=query.device)
    seen = columns <= positions[:, None]
    if window is not None:
        seen &= columns > positions[:, None] - window
    values = values.masked_fill(~seen[:, None, :, None], 0)  # pages hold what was there before
    keys = keys.masked_fill(~seen[:, None, :, None], 0)
    return sdpa(query.unsqueeze(2), keys, values, seen[:, None, None], scale).squeeze(2)
