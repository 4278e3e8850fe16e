"""Packed sequences on a GPU: one attention kernel for all segments, which skips what is masked.

The kernel is FlexAttention (arXiv:2412.05496): of all tiles of 128 queries x 128 keys it computes those that a block
mask lists. The list comes from where each part begins and ends: no mask of tokens x tokens exists anywhere.
"""

from functools import partial
from itertools import chain

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from rolecall.models.compiled import compiled_later

BLOCK = 128


class BlockSparse:
    """The layout of ``Packed`` without its masks: segments of a prompt each and the responses behind it.

    A query sees two ranges of keys: its own part (prompt or response) up to itself, and its segment's prompt. A sliding
    window cuts off the beginnings of both. Made once a micro-batch, for all layers.

    Args:
        segments: the lengths of each segment's parts, the prompt first; together a multiple of ``BLOCK``.
        window: of the model's sliding layers, if it has any.
    """

    compiled = True

    def __init__(self, segments: list[list[int]], device: torch.device | str, window: int | None = None):
        own, shared, shared_end = _ranges(segments)
        self._masks: dict[int | None, BlockMask] = {None: _block_mask(own, shared, shared_end, device)}
        if window is not None:
            query = np.arange(len(own))
            nearest = shared + (query - own) + (shared_end - shared) - window + 1  # by positions, see Packed
            cut = np.clip(nearest, shared, shared_end)
            self._masks[window] = _block_mask(np.maximum(own, query - window + 1), cut, shared_end, device)

    def layer(self, number: int) -> "BlockSparse":
        """The layout of one layer: the same for all."""
        return self

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        return _attention(query, key, value, self._masks[window], scale)


# Lengths differ from one micro-batch to the next. As a full graph: what cannot be compiled is an error, since without
# its kernel FlexAttention would make the scores of all tokens x tokens.
@partial(compiled_later, dynamic=True, fullgraph=True)
def _attention(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: float) -> Tensor:
    for tensor in (query, key):
        torch._check(tensor.shape[2] % BLOCK == 0)  # knowing that, the kernel checks no bounds
    grouped = query.shape[1] != key.shape[1]
    return flex_attention(query, key, value, block_mask=mask, scale=scale, enable_gqa=grouped)


def _ranges(segments: list[list[int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each token, where its part begins, and where the prompt that its part follows begins and ends.

    A prompt follows an empty one, that ends where it begins.
    """
    lengths = np.array(list(chain.from_iterable(segments)))
    starts = lengths.cumsum() - lengths
    is_prompt = np.array([part == 0 for parts in segments for part in range(len(parts))])
    prompt = np.maximum.accumulate(np.where(is_prompt, np.arange(len(lengths)), 0))  # of each part, by number
    ends = starts[prompt] + np.where(is_prompt, 0, lengths[prompt])
    return starts.repeat(lengths), starts[prompt].repeat(lengths), ends.repeat(lengths)


def _block_mask(own: np.ndarray, shared: np.ndarray, shared_end: np.ndarray, device: torch.device | str) -> BlockMask:
    """Query i sees the keys ``own[i]`` to i, and ``shared[i]`` to ``shared_end[i] - 1``."""
    query = np.arange(len(own))
    ranges = [(own, query + 1), (shared, shared_end)]
    touched = sum(_queries(begin // BLOCK, np.where(begin < end, -(-end // BLOCK), 0)) for begin, end in ranges)
    filled = sum(_queries(-(-begin // BLOCK), end // BLOCK) for begin, end in ranges)
    every = np.equal(filled, BLOCK)  # a block that two ranges fill together is not found: it is masked in vain, no more
    own_at, shared_at, end_at = (put(x.astype(np.int32), device) for x in (own, shared, shared_end))

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        in_own = (own_at[query] <= key) & (key <= query)
        return in_own | ((shared_at[query] <= key) & (key < end_at[query]))

    partial_blocks, full_blocks = _listed(np.greater(touched, 0) & ~every, device), _listed(every, device)
    return BlockMask.from_kv_blocks(*partial_blocks, *full_blocks, BLOCK_SIZE=BLOCK, mask_mod=visible)


def _queries(begin: np.ndarray, end: np.ndarray) -> np.ndarray:
    """(blocks of queries, blocks of keys): how many of the queries have the block in their ``begin`` to ``end - 1``."""
    blocks = len(begin) // BLOCK
    row = np.arange(len(begin)) // BLOCK * (blocks + 1)
    changes = [np.bincount((row + at)[begin < end], minlength=blocks * (blocks + 1)) for at in (begin, end)]
    return (changes[0] - changes[1]).reshape(blocks, blocks + 1).cumsum(1)[:, :blocks]


def _listed(chosen: np.ndarray, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """(rows, columns) booleans -> how many are chosen in each row, and which (the first of each row's columns)."""
    dense = put(chosen.astype(np.int32), device)[None, None]  # the same for all samples and heads
    return dense.sum(-1, dtype=torch.int32), dense.argsort(dim=-1, descending=True, stable=True).int()


def put(values: list[int] | np.ndarray | Tensor, device: torch.device | str) -> Tensor:
    """A tensor on ``device``; a GPU's work that is under way is not waited for."""
    tensor = values if isinstance(values, Tensor) else torch.from_numpy(np.asarray(values))
    if torch.device(device).type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
