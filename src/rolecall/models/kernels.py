"""Triton kernels in which an output row depends on its own input row alone, bit for bit: see ``invariant.py``.

Each sums in one order, whatever the number of rows: a product over all of K in one program, attention over positions
from the first one on, a row's mean and normalizer in one program. Imported where there is Triton only.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rolecall.models.invariant import ALIGNED

# Rows, columns and inner elements of a product's tile, warps, stages. Tiles of 16-bit products may differ by the number
# of rows: each adds up the tensor cores' products of 16 inner elements, in order. FP32 is summed one by one.
FEW, MANY, FLOAT = (64, 64, 128, 4, 3), (128, 128, 64, 8, 3), (64, 64, 16, 4, 3)
MANY_ROWS = 1024  # from where on
BAND = 8  # tiles of rows that are computed with one tile of the weights, which is then in the cache
BLOCK, WARPS, STAGES = 64, 2, 2  # of invariant attention: positions that a program reads at once
CHUNK = 4096  # logits that a program reads at once

LOG2_E = tl.constexpr(1.4426950408889634)  # GPUs have exp2 alone, so this goes into the scores' scale

Where = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def product(a: Tensor, b: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """a @ b.T + bias, summed in float32: a (n, K), b (m, K), bias (m,) -> (n, m) in ``dtype``."""
    a, b = a.contiguous(), b.contiguous()
    (n, inner), columns = a.shape, len(b)
    out = a.new_empty(n, columns, dtype=dtype)
    tile = FLOAT if a.dtype == torch.float32 else FEW if n <= MANY_ROWS else MANY
    height, width, depth, warps, stages = tile
    sizes = {"HEIGHT": height, "TILE_WIDTH": width, "DEPTH": depth, "BAND_SIZE": BAND}
    flags = {"BIAS": bias is not None, "EVEN": inner % depth == 0, "PRECISION": precision(a)}
    grid = (triton.cdiv(n, height) * triton.cdiv(columns, width),)
    given = a, b, b if bias is None else bias, out, n, columns, inner
    _product[grid](*given, **sizes, **flags, num_warps=warps, num_stages=stages)
    return out


@triton.jit
def _product(
    a, b, bias, out, n, columns, inner,
    BIAS: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
    HEIGHT: tl.constexpr, TILE_WIDTH: tl.constexpr, DEPTH: tl.constexpr, BAND_SIZE: tl.constexpr,
):  # fmt: skip
    """One program: one tile of the output."""
    down, across = tl.cdiv(n, HEIGHT), tl.cdiv(columns, TILE_WIDTH)
    band = tl.program_id(0) // (BAND_SIZE * across)
    tall = tl.minimum(down - band * BAND_SIZE, BAND_SIZE)
    place = tl.program_id(0) % (BAND_SIZE * across)
    row = (band * BAND_SIZE + place % tall) * HEIGHT + tl.arange(0, HEIGHT)
    column = place // tall * TILE_WIDTH + tl.arange(0, TILE_WIDTH)
    step = tl.arange(0, DEPTH)
    # Rows and columns past the end are computed from the first one, and not stored.
    left = a + tl.where(row < n, row, 0).to(tl.int64)[:, None] * inner + step[None, :]
    right = b + tl.where(column < columns, column, 0).to(tl.int64)[:, None] * inner + step[None, :]
    total = tl.zeros([HEIGHT, TILE_WIDTH], tl.float32)
    for begin in range(0, inner, DEPTH):
        if EVEN:
            x, y = tl.load(left), tl.load(right)
        else:
            inside = (step < inner - begin)[None, :]
            x, y = tl.load(left, mask=inside, other=0.0), tl.load(right, mask=inside, other=0.0)
        total = tl.dot(x, tl.trans(y), total, input_precision=PRECISION)
        left += DEPTH
        right += DEPTH
    if BIAS:
        total += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    places = out + row.to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(places, total.to(out.dtype.element_ty), mask=(row < n)[:, None] & (column < columns)[None, :])


def row_means(x: Tensor) -> Tensor:
    """(..., K) float32 -> (...,) means."""
    x = x.contiguous()
    out = x.new_empty(x.shape[:-1])
    _row_mean[(out.numel(),)](x, out, x.shape[-1], SIZE_PAD=triton.next_power_of_2(x.shape[-1]), num_warps=4)
    return out


@triton.jit
def _row_mean(x, out, size, SIZE_PAD: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, SIZE_PAD)
    tl.store(out + row, tl.sum(tl.load(x + row * size + at, mask=at < size, other=0.0), 0) / size)


def store(key: Tensor, value: Tensor, where: Where, page: int) -> None:
    """Write the keys and values of n tokens, (n, Hkv, D) each, to where ``attention`` finds them."""
    key, value = contiguous_heads(key), contiguous_heads(value)
    n, heads, width = key.shape
    shape = {"HEADS": heads, "WIDTH": width, "WIDTH_PAD": triton.next_power_of_2(width)}
    strides = key.stride(0), value.stride(0)
    _store[(n, heads)](key, value, *where, *strides, PAGE_SIZE=page, UNIT=ALIGNED, **shape, num_warps=1)


@triton.jit
def _store(
    key, value, anchor, offsets, table, starts, positions, key_stride, value_stride,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, PAGE_SIZE: tl.constexpr, UNIT: tl.constexpr, WIDTH_PAD: tl.constexpr,
):  # fmt: skip
    """One program: one token's key and value of one head."""
    token, head, columns = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, WIDTH_PAD)
    position, real = tl.load(positions + token), columns < WIDTH
    page = tl.load(table + tl.load(starts + token) + position // PAGE_SIZE).to(tl.int64)
    place = ((page * HEADS + head) * PAGE_SIZE + position % PAGE_SIZE) * WIDTH + columns
    spot = head * WIDTH + columns
    tl.store(anchor + tl.load(offsets) * UNIT + place, tl.load(key + token * key_stride + spot, mask=real), mask=real)
    new = tl.load(value + token * value_stride + spot, mask=real)
    tl.store(anchor + tl.load(offsets + 1) * UNIT + place, new, mask=real)


def attention(query: Tensor, kv_heads: int, where: Where, page: int, scale: float, window: int) -> Tensor:
    """Each of n tokens attends to its sequence's positions up to its own, whose keys and values are in pages.

    Args:
        query: (n, Hq, D).
        where: ``anchor`` and ``offsets``, (2,) int64: keys and values, (pages, kv_heads, page, D) each, are so many
            times ``ALIGNED`` elements behind it. ``table``, int32 page numbers, all sequences' in turn; ``starts``,
            (n,) int64, where in it those of a token's begin; ``positions``, (n,) int64 of the tokens.
        page: positions in a page.
        window: positions that a token sees, its own one included; 0: all.

    Returns:
        (n, Hq, D).
    """
    query = contiguous_heads(query)
    n, heads, width = query.shape
    group = heads // kv_heads
    out = query.new_empty(query.shape)
    shape = {"HEADS": kv_heads, "GROUP": group, "WIDTH": width, "WINDOW": window, "PAGE_SIZE": page, "UNIT": ALIGNED}
    padded = {"GROUP_PAD": padded_size(group), "WIDTH_PAD": padded_size(width)}
    blocks = {"BLOCK_SIZE": BLOCK, "num_warps": WARPS, "num_stages": STAGES}
    given = query, *where, out, scale, query.stride(0)
    _attend[(n, kv_heads)](*given, PRECISION=precision(query), **shape, **padded, **blocks)
    return out


@triton.jit
def attend_pages(
    queries, keys, values, pages, head, first, start, stop, scale,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, WINDOW: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    PRECISION: tl.constexpr, GROUP_PAD: tl.constexpr, WIDTH_PAD: tl.constexpr,
):  # fmt: skip
    """Attention of queries (GROUP_PAD, WIDTH_PAD) to a head's positions ``start`` to ``stop`` - 1, a block at a time.

    ``pages``: pointer to the sequence's page numbers. ``first``: position before which nothing is seen; ``start`` is
    the beginning of its block, or of a later one. ``scale``: of the scores, times ``LOG2_E``; above 0. Returns, a
    query: the largest score, so scaled; the sum of the weights 2 ** (score - largest); the values' sum under these
    weights, (GROUP_PAD, WIDTH_PAD).
    """
    steps, columns = tl.arange(0, BLOCK_SIZE), tl.arange(0, WIDTH_PAD)
    largest = tl.full([GROUP_PAD], -float("inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    mean = tl.zeros([GROUP_PAD, WIDTH_PAD], tl.float32)
    for begin in range(start, stop, BLOCK_SIZE):
        where = begin + steps
        seen = where < stop
        if WINDOW > 0:
            seen &= where >= first
        if PAGE_SIZE % BLOCK_SIZE == 0:  # all of it lies in one page
            page = tl.load(pages + begin // PAGE_SIZE).to(tl.int64)
            base = ((page * HEADS + head) * PAGE_SIZE + begin % PAGE_SIZE) * WIDTH
            places = steps[:, None] * WIDTH + columns[None, :]
        else:
            page = tl.load(pages + where // PAGE_SIZE, mask=seen, other=0).to(tl.int64)[:, None]
            base = ((page * HEADS + head) * PAGE_SIZE + (where % PAGE_SIZE)[:, None]) * WIDTH
            places = columns[None, :]
        real = seen[:, None]
        if WIDTH < WIDTH_PAD:
            real &= (columns < WIDTH)[None, :]
            block = tl.load(keys + base + places, mask=real, other=0.0)
        else:  # no mask: a page is memory to its end, and scores of what is not seen become -inf
            block = tl.load(keys + base + places)
        scores = tl.dot(queries, tl.trans(block), input_precision=PRECISION)
        scores = tl.where(seen[None, :], scores, -float("inf"))
        higher = tl.maximum(largest, tl.max(scores, 1) * scale)
        weights, fade = tl.exp2(scores * scale - higher[:, None]), tl.exp2(largest - higher)
        block = tl.load(values + base + places, mask=real, other=0.0)  # masked: 0 x NaN is NaN
        mean = tl.dot(weights.to(block.dtype), block, mean * fade[:, None], input_precision=PRECISION)
        total = total * fade + tl.sum(weights, 1)
        largest = higher
    return largest, total, mean


@triton.jit
def _attend(
    query, anchor, offsets, table, starts, positions, out, scale, query_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, WINDOW: tl.constexpr, PAGE_SIZE: tl.constexpr,
    UNIT: tl.constexpr, BLOCK_SIZE: tl.constexpr, PRECISION: tl.constexpr,
    GROUP_PAD: tl.constexpr, WIDTH_PAD: tl.constexpr,
):  # fmt: skip
    """One program: the query heads of one token that share a key/value head."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(positions + token).to(tl.int32)
    pages = table + tl.load(starts + token)
    keys, values = anchor + tl.load(offsets) * UNIT, anchor + tl.load(offsets + 1) * UNIT
    members, columns = tl.arange(0, GROUP_PAD), tl.arange(0, WIDTH_PAD)
    real = (members < GROUP)[:, None] & (columns < WIDTH)[None, :]
    mine = query + token * query_stride + (head * GROUP + members) * WIDTH
    queries = tl.load(mine[:, None] + columns[None, :], mask=real, other=0.0)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(0, position - WINDOW + 1)
    start = first // BLOCK_SIZE * BLOCK_SIZE
    _, total, mean = attend_pages(
        queries, keys, values, pages, head, first, start, position + 1, scale * LOG2_E,
        HEADS, WIDTH, WINDOW, PAGE_SIZE, BLOCK_SIZE, PRECISION, GROUP_PAD, WIDTH_PAD,
    )  # fmt: skip
    heads = token * HEADS * GROUP + head * GROUP + members
    tl.store(out + heads[:, None] * WIDTH + columns[None, :], (mean / total[:, None]).to(queries.dtype), mask=real)


def token_logprobs(logits: Tensor, targets: Tensor, temperature: Tensor) -> Tensor:
    """log softmax(logits / temperature) at the targets: (n, V) float32, (n,) int64, (n,) float32 -> (n,) float32."""
    logits = logits.contiguous()
    n, size = logits.shape
    out = logits.new_empty(n)
    _token_logprob[(n,)](logits, targets, temperature, out, size, CHUNK_SIZE=CHUNK, num_warps=8)
    return out


@triton.jit
def _token_logprob(logits, targets, temperature, out, size, CHUNK_SIZE: tl.constexpr):
    """One program: one row, read twice."""
    row, inside = tl.program_id(0).to(tl.int64), tl.arange(0, CHUNK_SIZE)
    logits += row * size
    heat = tl.load(temperature + row)
    highs = tl.full([CHUNK_SIZE], -float("inf"), tl.float32)
    for begin in range(0, size, CHUNK_SIZE):
        at = begin + inside
        highs = tl.maximum(highs, tl.load(logits + at, mask=at < size, other=-float("inf")) / heat)
    largest = tl.max(highs, 0)
    sums = tl.zeros([CHUNK_SIZE], tl.float32)
    for begin in range(0, size, CHUNK_SIZE):
        at = begin + inside
        sums += tl.exp(tl.load(logits + at, mask=at < size, other=-float("inf")) / heat - largest)
    chosen = tl.load(logits + tl.load(targets + row)) / heat
    tl.store(out + row, chosen - largest - tl.log(tl.sum(sums, 0)))


def padded_size(size: int) -> int:
    """Of a side of what ``tl.dot`` multiplies: a power of two, and no less than its 16."""
    return max(16, triton.next_power_of_2(size))


def precision(x: Tensor) -> str:
    """Of ``tl.dot``'s factors: FP32 ones are not rounded to TF32."""
    return "ieee" if x.dtype == torch.float32 else "tf32"


def contiguous_heads(x: Tensor) -> Tensor:
    """(n, heads, D) whose every token is one block of memory: as it is where it is a part of a larger product."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()
