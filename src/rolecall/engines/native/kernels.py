"""Triton kernels of the decode step: attention over paged keys and values, and drawing tokens.

Imported on a GPU only. What they compute is written plainly in ``pages.attend_plainly`` and ``sampling.draw``.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rolecall.engines.native.pages import PAGE
from rolecall.engines.native.sampling import Batch
from rolecall.models.invariant import ALIGNED
from rolecall.models.kernels import CHUNK, LOG2_E, attend_pages, contiguous_heads, padded_size, precision

BLOCK, WARPS, STAGES = 32, 1, 3  # of attention: positions that a program reads at once
assert PAGE % BLOCK == 0  # so that one page number finds them
# Fewer (row, head) pairs do not fill the GPU: they are split along the sequence. Few ways, as each is compiled.
SPLITS = ((512, 1), (128, 4), (0, 16))  # (least pairs, splits)


# It does write: to pages, which it finds without an argument, and to counters, which are 0 again when it ends.
@torch.library.custom_op("rolecall::paged_attention", mutates_args=())
def paged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    anchor: Tensor,
    offsets: Tensor,
    arrivals: Tensor,
    table: Tensor,
    positions: Tensor,
    scale: float,
    window: int,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    epsilon: float = 0.0,
) -> Tensor:
    """Write one new token a row into the cache, and attend to all up to it (FlashDecoding: Dao et al. 2023).

    Args:
        query: (n, Hq, D). key, value: (n, Hkv, D) of the new tokens.
        anchor, offsets, arrivals: where the layer's pages are, and the counters, see ``Pages``.
        table: (n or more, most pages a row) int32 page numbers.
        positions: (n,) where the new tokens stand.
        window: positions that a token sees, its own one included; 0: all.
        cos, sin: (n, D) by which queries and keys are still to be turned to their positions.
        query_norm, key_norm: (D,) weights of their RMS norms before that, and ``epsilon`` of these.

    Returns:
        (n, Hq, D).
    """
    n, heads, width = query.shape
    kv_heads = key.shape[1]
    group = heads // kv_heads
    splits = next(splits for pairs, splits in SPLITS if n * kv_heads >= pairs)
    assert splits == 1 or n * kv_heads <= len(arrivals)  # each splitting pair has a counter
    # Where q, k and v are parts of one product, each row of theirs is followed by the others'.
    query, key, value = contiguous_heads(query), contiguous_heads(key), contiguous_heads(value)
    out = query.new_empty(query.shape)
    # What each split gives to be merged: sums weighted by 2 ** (score - largest), the largest, the weights' sum.
    sums = query.new_empty((n, heads, splits, width) if splits > 1 else (1,), dtype=torch.float32)
    stats = query.new_empty((n, heads, splits, 2) if splits > 1 else (1,), dtype=torch.float32)
    padded = {"GROUP_PAD": padded_size(group), "WIDTH_PAD": padded_size(width)}
    _attend[(n, kv_heads, splits)](
        query,
        key,
        value,
        anchor,
        offsets,
        arrivals,
        table,
        positions,
        cos,
        sin,
        query_norm,
        key_norm,
        out,
        sums,
        stats,
        scale,
        epsilon,
        query.stride(0),
        key.stride(0),
        value.stride(0),
        table.stride(0),
        HEADS=kv_heads,
        GROUP=group,
        WIDTH=width,
        WINDOW=window,
        SPLITS=splits,
        PAGE_SIZE=PAGE,
        UNIT=ALIGNED,
        BLOCK_SIZE=BLOCK,
        PRECISION=precision(query),
        **padded,
        num_warps=WARPS,
        num_stages=STAGES,
    )
    return out


@paged_attention.register_fake
def _(query, *_):
    return torch.empty_like(query, memory_format=torch.contiguous_format)


@triton.jit
def _attend(
    query, key, value, anchor, offsets, arrivals, table, positions, cos, sin, query_norm, key_norm, out, sums, stats,
    scale, epsilon, query_stride, key_stride, value_stride, table_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, WINDOW: tl.constexpr, SPLITS: tl.constexpr,
    PAGE_SIZE: tl.constexpr, UNIT: tl.constexpr, BLOCK_SIZE: tl.constexpr, PRECISION: tl.constexpr,
    GROUP_PAD: tl.constexpr, WIDTH_PAD: tl.constexpr,
):  # fmt: skip
    """One program: the query heads of one row that share a key/value head, over one split of the row's positions."""
    row, head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    position = tl.load(positions + row).to(tl.int32)
    keys, values = anchor + tl.load(offsets) * UNIT, anchor + tl.load(offsets + 1) * UNIT
    members, columns = tl.arange(0, GROUP_PAD), tl.arange(0, WIDTH_PAD)
    real = (members < GROUP)[:, None] & (columns < WIDTH)[None, :]
    heads = row * HEADS * GROUP + head * GROUP + members
    mine = query + row * query_stride + (head * GROUP + members[:, None]) * WIDTH
    queries = _turned(mine, query_norm, cos, sin, row, members[:, None] < GROUP, epsilon, WIDTH, WIDTH_PAD)
    first, aligned = 0, 0
    if WINDOW > 0:
        first = tl.maximum(0, position - WINDOW + 1)
        aligned = tl.where(first < position, first // BLOCK_SIZE * BLOCK_SIZE, position)  # a window of 1 sees no other
    size = tl.cdiv(tl.cdiv(position - aligned, SPLITS), BLOCK_SIZE) * BLOCK_SIZE
    start = aligned + split * size
    stop = tl.minimum(start + size, position)
    largest, total, mean = attend_pages(
        queries, keys, values, table + row * table_stride, head, first, start, stop, scale * LOG2_E,
        HEADS, WIDTH, WINDOW, PAGE_SIZE, BLOCK_SIZE, PRECISION, GROUP_PAD, WIDTH_PAD,
    )  # fmt: skip
    if split == 0:  # the new token itself, which no other program reads
        spot = columns[None, :]
        own = key + row * key_stride + head * WIDTH + tl.zeros([1, 1], tl.int32)
        inside = spot < WIDTH
        new_key = _turned(own, key_norm, cos, sin, row, inside, epsilon, WIDTH, WIDTH_PAD)
        new_value = tl.load(value + row * value_stride + head * WIDTH + spot, mask=inside, other=0.0)
        page = tl.load(table + row * table_stride + position // PAGE_SIZE).to(tl.int64)
        place = ((page * HEADS + head) * PAGE_SIZE + position % PAGE_SIZE) * WIDTH + spot
        tl.store(keys + place, new_key, mask=inside)
        tl.store(values + place, new_value, mask=inside)
        score = tl.sum(queries.to(tl.float32) * new_key.to(tl.float32), 1) * (scale * LOG2_E)
        higher = tl.maximum(largest, score)
        weight, fade = tl.exp2(score - higher), tl.exp2(largest - higher)
        mean = mean * fade[:, None] + weight[:, None] * new_value.to(tl.float32)
        total = total * fade + weight
        largest = higher
    target = out + heads[:, None] * WIDTH + columns[None, :]
    if SPLITS == 1:
        tl.store(target, (mean / total[:, None]).to(queries.dtype), mask=real)
    else:
        parts = heads * SPLITS + split
        tl.store(sums + parts[:, None] * WIDTH + columns[None, :], mean, mask=real)
        tl.store(stats + parts * 2, largest, mask=members < GROUP)
        tl.store(stats + parts * 2 + 1, total, mask=members < GROUP)
        tl.debug_barrier()  # all of this program has stored: then it counts as arrived, and the last one merges
        arrived = arrivals + row * HEADS + head
        if tl.atomic_add(arrived, 1, sem="acq_rel") == SPLITS - 1:
            tl.store(arrived, 0)
            largest = tl.full([GROUP_PAD], -float("inf"), tl.float32)
            total = tl.zeros([GROUP_PAD], tl.float32)
            mean = tl.zeros([GROUP_PAD, WIDTH_PAD], tl.float32)
            for other in tl.static_range(SPLITS):
                parts = heads * SPLITS + other
                high = tl.load(stats + parts * 2, mask=members < GROUP, other=0.0, cache_modifier=".cg")
                mass = tl.load(stats + parts * 2 + 1, mask=members < GROUP, other=1.0, cache_modifier=".cg")
                part = sums + parts[:, None] * WIDTH + columns[None, :]
                part = tl.load(part, mask=real, other=0.0, cache_modifier=".cg")
                higher = tl.maximum(largest, high)
                weight, fade = tl.exp2(high - higher), tl.exp2(largest - higher)
                mean = mean * fade[:, None] + part * weight[:, None]
                total = total * fade + mass * weight
                largest = higher
            tl.store(target, (mean / total[:, None]).to(queries.dtype), mask=real)


@triton.jit
def _turned(rows, norm, cos, sin, row, mask, epsilon, WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr):
    """Queries or keys (pointers (k, 1) to them), normed and turned to their position."""
    columns = tl.arange(0, WIDTH_PAD)[None, :]
    inside = mask & (columns < WIDTH)
    x = tl.load(rows + columns, mask=inside, other=0.0)
    if cos is not None:
        half: tl.constexpr = WIDTH // 2
        partner = tl.where(columns < half, columns + half, columns - half)
        one, other = x.to(tl.float32), tl.load(rows + partner, mask=inside, other=0.0).to(tl.float32)
        if norm is not None:
            size = tl.rsqrt(tl.sum(one * one, 1) / WIDTH + epsilon)[:, None]
            one *= size * tl.load(norm + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
            other *= size * tl.load(norm + partner, mask=columns < WIDTH, other=0.0).to(tl.float32)
        cosine = tl.load(cos + row * WIDTH + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
        sine = tl.load(sin + row * WIDTH + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
        x = (one * cosine + tl.where(columns < half, -other, other) * sine).to(x.dtype)
    return x


def draw(logits: Tensor, batch: Batch, ends: Tensor) -> tuple[Tensor, Tensor]:
    """``sampling.draw`` without top-k and top-p: the logits are read once, and of each row one chunk a second time.

    Args:
        logits: (n, V). ends: (V,) bool, true at the end-of-sequence tokens.

    Returns:
        tokens (n,) int64, and log-probabilities (n,) float32.
    """
    logits = logits.float().contiguous()
    n, size = logits.shape
    chunks = triton.cdiv(size, CHUNK)
    sums = logits.new_empty(n, chunks, 2)
    likeliest = batch.seeds.new_empty(n, chunks)
    tokens, logprobs = batch.seeds.new_empty(n), logits.new_empty(n)
    given = (logits, batch.temperature, ends, batch.counts, batch.min_tokens, sums, likeliest)
    flags = {"TEMPERED": batch.any_tempered, "EARLY": batch.any_min, "GREEDY": batch.any_greedy, "CHUNK_SIZE": CHUNK}
    _sum_chunks[(n, chunks)](*given, size, **flags, num_warps=8)
    rest = (batch.greedy, batch.seeds, tokens, logprobs, size, chunks)
    _pick[(n,)](*given, *rest, CHUNKS=triton.next_power_of_2(chunks), **flags, num_warps=8)
    return tokens, logprobs


@triton.jit
def _scores(
    logits, temperature, ends, counts, min_tokens, row, at, size, TEMPERED: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """Scores at some tokens of a row: -inf where an end-of-sequence token may not come yet."""
    scores = tl.load(logits + row * size + at, mask=at < size, other=-float("inf"))
    if TEMPERED:
        scores /= tl.load(temperature + row)
    if EARLY:
        early = tl.load(counts + row) < tl.load(min_tokens + row)
        ending = tl.load(ends + at, mask=at < size, other=0) != 0
        scores = tl.where(ending & early, -float("inf"), scores)
    return scores


@triton.jit
def _sum_chunks(
    logits,
    temperature,
    ends,
    counts,
    min_tokens,
    sums,
    likeliest,
    size,
    TEMPERED: tl.constexpr,
    EARLY: tl.constexpr,
    GREEDY: tl.constexpr,
    CHUNK_SIZE: tl.constexpr,
):
    """One program: the largest score of a row's chunk, and the sum of exp(score - largest)."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = chunk * CHUNK_SIZE + tl.arange(0, CHUNK_SIZE)
    scores = _scores(logits, temperature, ends, counts, min_tokens, row, at, size, TEMPERED, EARLY)
    largest = tl.max(scores, 0)
    # A chunk with nothing allowed in it sums to 0, not to NaN.
    shift = tl.where(largest == -float("inf"), 0.0, largest)
    spot = row * tl.num_programs(1) + chunk
    tl.store(sums + spot * 2, largest)
    tl.store(sums + spot * 2 + 1, tl.sum(tl.exp(scores - shift), 0))
    if GREEDY:
        tl.store(likeliest + spot, chunk * CHUNK_SIZE + tl.argmax(tl.where(scores == scores, scores, -float("inf")), 0))


@triton.jit
def _pick(
    logits,
    temperature,
    ends,
    counts,
    min_tokens,
    sums,
    likeliest,
    greedy,
    seeds,
    tokens,
    logprobs,
    size,
    chunks,
    TEMPERED: tl.constexpr,
    EARLY: tl.constexpr,
    GREEDY: tl.constexpr,
    CHUNK_SIZE: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """One program: the chunk, then the token in it, at which the row's cumulative probability passes its number."""
    row = tl.program_id(0).to(tl.int64)
    each = tl.arange(0, CHUNKS)
    spots = sums + (row * chunks + each) * 2
    highs = tl.load(spots, mask=each < chunks, other=-float("inf"))
    masses = tl.load(spots + 1, mask=each < chunks, other=0.0)
    largest = tl.max(highs, 0)
    masses = (masses * tl.exp(highs - largest)).to(tl.float64)
    through = tl.cumsum(masses, 0)
    total = tl.sum(masses, 0)
    target = _uniform(tl.load(seeds + row), tl.load(counts + row)) * total
    # Only a chunk with some mass can be it; rounding may leave the target past the last of them.
    chunk = tl.min(tl.where((through > target) & (masses > 0), each, CHUNKS), 0)
    chunk = tl.where(chunk == CHUNKS, tl.max(tl.where(masses > 0, each, 0), 0), chunk)
    target -= tl.sum(tl.where(each < chunk, masses, 0.0), 0)
    inside = tl.arange(0, CHUNK_SIZE)
    at = chunk * CHUNK_SIZE + inside
    scores = _scores(logits, temperature, ends, counts, min_tokens, row, at, size, TEMPERED, EARLY)
    weights = tl.exp(scores - largest).to(tl.float64)
    passed = (tl.cumsum(weights, 0) > target) & (weights > 0)
    place = tl.min(tl.where(passed, inside, CHUNK_SIZE), 0)
    place = tl.where(place == CHUNK_SIZE, tl.max(tl.where(weights > 0, inside, 0), 0), place)
    token = chunk * CHUNK_SIZE + place
    if GREEDY:
        best = tl.min(tl.where(highs == largest, each, CHUNKS), 0)
        best = tl.load(likeliest + row * chunks + tl.minimum(best, chunks - 1))
        token = tl.where(tl.load(greedy + row) != 0, best, token)
    score = tl.load(logits + row * size + token) / tl.load(temperature + row)
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(logprobs + row, score - largest - tl.log(total.to(tl.float32)))


@triton.jit
def _uniform(seed, count):
    """``sampling.uniforms``: SplitMix64, the upper 53 bits."""
    x = seed.to(tl.uint64) + (count + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    x = x ^ (x >> 31)
    return (x >> 11).to(tl.float64) * 1.1102230246251565e-16
