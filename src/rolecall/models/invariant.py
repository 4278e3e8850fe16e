"""Batch-invariant forward passes: a token's numbers depend on its own sequence alone, bit for bit.

Libraries choose a kernel, and with it an order of summation, by the number of rows: the same token gets other last bits
in a decode step than in a training batch (He et al. 2025, "Defeating Nondeterminism in LLM Inference"). Here products,
means, attention and log-probabilities are computed by ``kernels.py``, in one order. What is left of a decoder
is element-wise, and layers are not compiled, so that it stays the same operations. Gradients are the ordinary ones.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rolecall.models.attention import Packed
from rolecall.models.flex import BlockSparse, put

ALIGNED = 8  # elements: where keys and values begin is counted in these, so that kernels may load 16 bytes at once


def kernels() -> Any:
    """They need Triton, which comes with torch's CUDA builds alone."""
    from rolecall.models import kernels

    return kernels


def make_invariant(model: nn.Module) -> None:
    """Let all linear layers of the model, and the means that its norms take, compute each row alone."""
    for module in model.modules():
        if not any(module.children()):  # a norm is one of these; the others take no means
            module.forward = partial(_linear if type(module) is nn.Linear else _row_by_row, module)


def _linear(module: Any, hidden: Tensor) -> Tensor:
    return _Linear.apply(hidden, module.weight, module.bias)


def _row_by_row(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    with _RowMeans():
        return type(module).forward(module, *args, **kwargs)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        out = kernels().product(hidden.flatten(0, -2), weight, bias, hidden.dtype)
        return out.view(*hidden.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight = ctx.saved_tensors
        outer = gradients[0].flatten(0, -2)
        to_hidden, to_weight, to_bias = ctx.needs_input_grad
        return (
            (outer @ weight).view(hidden.shape) if to_hidden else None,
            outer.t() @ hidden.flatten(0, -2) if to_weight else None,
            outer.sum(0) if to_bias else None,
        )


class _RowMeans(TorchFunctionMode):
    """Within it ``x.mean(-1)`` and ``x.mean(-1, keepdim=True)`` are taken of each row alone."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        ordinary = partial(function, *args, **kwargs or {})
        if function is Tensor.mean and args[1:] == (-1,):
            means = kernels().row_means(args[0])
            return stand_in(means.unsqueeze(-1) if (kwargs or {}).get("keepdim") else means, ordinary)
        return ordinary()


def stand_in(exact: Tensor, ordinary: Callable[[], Tensor]) -> Tensor:
    """The values of ``exact`` with the gradient of ``ordinary()``, which is computed where there may be one."""
    return _StandIn.apply(exact, ordinary()) if torch.is_grad_enabled() else exact


class _StandIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exact: Tensor, ordinary: Tensor) -> Tensor:
        return exact.view_as(exact)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        return None, gradients[0]


def token_logprobs(scores: Tensor, targets: Tensor, temperature: Tensor | float) -> Tensor:
    """log softmax(scores / temperature) at the targets, without a gradient: (n, V) float32 and (n,) -> (n,).

    Args:
        temperature: (n,) float32, or one for all.
    """
    if not isinstance(temperature, Tensor):
        temperature = scores.new_full((len(scores),), temperature)
    return kernels().token_logprobs(scores, targets, temperature)


class PackedTokens:
    """The layout of packed segments, each token of which attends alone, over its sequence in order of position.

    To the kernel every token's key and value is a page of one position, and a sequence lists its prompt's pages, then
    its own.

    Args:
        ordinary: the layout of the same segments that has a gradient.
        segments: the lengths of each segment's parts, the prompt first.
        positions: (1, L).
    """

    compiled = False

    def __init__(self, ordinary: Packed | BlockSparse, segments: list[list[int]], positions: Tensor):
        self.ordinary, self.positions = ordinary, positions
        self.table, self.starts = (put(x, positions.device) for x in listed(segments))

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        with torch.no_grad():
            both = torch.stack([part[0].transpose(0, 1) for part in (key, value)])  # (2, L, Hkv, D)
            assert both[0].numel() % ALIGNED == 0  # heads are a multiple of it wide
            offsets = torch.arange(2, device=both.device) * (both[0].numel() // ALIGNED)
            where = both, offsets, self.table, self.starts, self.positions
            out = kernels().attention(query[0].transpose(0, 1), key.shape[1], where, 1, scale, window or 0)
        ordinary = partial(self.ordinary.attend, layer, query, key, value, scale, window)
        return stand_in(out.transpose(0, 1)[None], ordinary)


def listed(segments: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """All sequences' tokens in turn, int32: a prompt's, then each response's behind its prompt's again; and for each
    token, where those of its sequence begin in that list, int64."""
    sequences: list[np.ndarray] = []
    at = 0
    for parts in segments:
        prompt = np.arange(at, at + parts[0])
        for number, size in enumerate(parts):
            own = np.arange(at, at + size)
            sequences.append(np.concatenate([prompt, own]) if number else own)
            at += size
    begins = [0, *accumulate(len(sequence) for sequence in sequences)][:-1]
    lengths = [size for parts in segments for size in parts]
    return np.concatenate(sequences).astype(np.int32), np.repeat(begins, lengths)
