"""What ``rolecall.models.kernels`` computes, without Triton: one row, token or sequence at a time on the CPU.

A row that is computed alone cannot depend on others, so these are batch-invariant, too.
"""

import ctypes
import math
from typing import Any

import torch
from torch import Tensor

from rolecall.models.attention import sdpa
from rolecall.models.invariant import ALIGNED


def product(a: Tensor, b: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    rows = torch.stack([b.float() @ row for row in a.float()])
    return (rows if bias is None else rows + bias).to(dtype)


def row_means(x: Tensor) -> Tensor:
    return torch.stack([row.mean() for row in x.flatten(0, -2)]).view(x.shape[:-1])


def store(key: Tensor, value: Tensor, where: Any, page: int) -> None:
    anchor, offsets, table, starts, positions = where
    pages = _pages(anchor, offsets, table, key.shape[1], page, key.shape[2])
    for token, (start, position) in enumerate(zip(starts.tolist(), positions.flatten().tolist(), strict=True)):
        number = table.flatten()[start + position // page]
        for part, new in zip(pages, (key, value), strict=True):
            part[number, :, position % page] = new[token]


def attention(query: Tensor, kv_heads: int, where: Any, page: int, scale: float, window: int) -> Tensor:
    anchor, offsets, table, starts, positions = where
    pages = _pages(anchor, offsets, table, kv_heads, page, query.shape[2])
    out = []
    for own, start, position in zip(query, starts.tolist(), positions.flatten().tolist(), strict=True):
        places = torch.arange(max(0, position - window + 1) if window else 0, position + 1)
        numbers = table.flatten()[start + places // page].long()
        keys, values = (part[numbers, :, places % page].transpose(0, 1)[None] for part in pages)
        out.append(sdpa(own[None, :, None], keys, values, None, scale)[0, :, 0])
    return torch.stack(out)


def token_logprobs(logits: Tensor, targets: Tensor, temperature: Tensor) -> Tensor:
    rows = zip(logits, targets, temperature, strict=True)
    return torch.stack([(row / heat).log_softmax(-1)[target] for row, target, heat in rows])


def _pages(anchor: Tensor, offsets: Tensor, table: Tensor, heads: int, page: int, width: int) -> list[Tensor]:
    """Keys and values, (pages, heads, page, width) each, found as the kernels find them: by their addresses."""
    shape, size = (int(table.max()) + 1, heads, page, width), anchor.element_size()
    nbytes = math.prod(shape) * size
    addresses = [anchor.data_ptr() + int(offset) * ALIGNED * size for offset in offsets]
    buffers = [(ctypes.c_uint8 * nbytes).from_address(address) for address in addresses]
    return [torch.frombuffer(buffer, dtype=anchor.dtype).view(shape) for buffer in buffers]
