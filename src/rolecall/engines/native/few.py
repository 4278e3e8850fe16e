"""A decoder layer of few rows in five kernels: what its step costs is then mostly kernels, not bytes or products.

A long tail is many steps of few rows. transformers' layer, compiled, is about 13 kernels, each of which waits for the
one before; here a product takes the norm before it and the sum, or activation, behind it along. Imported on a GPU only.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from transformers.activations import SiLUActivation

from rolecall.engines.native.fused import Fused, Replacement
from rolecall.engines.native.kernels import attend

# The layers of these are: norm, q k v, attention, o, sum; norm, gate and up, SiLU, down, sum.
LAYERS = {"LlamaDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"}
PROGRAMS = 264  # that fill the GPU: fewer tiles of a product are split along its sums
TILE, WARPS, STAGES = 16, 4, 3  # of a product: columns that a program computes
DEPTH = {16: 256, 32: 128, 64: 128}  # and how many terms of its sums at once, by rows


class FewRows:
    """Computes one layer of the decode step, with its parameters where they are.

    Args:
        layer: a decoder layer of transformers.
        qkv, gate_up: its linear layers that read one input.
    """

    def __init__(self, layer: Any, qkv: Fused, gate_up: Fused):
        self.layer, self.qkv, self.gate_up = layer, qkv, gate_up
        attention = layer.self_attn
        self.norms = (attention.q_norm, attention.k_norm) if hasattr(attention, "q_norm") else None

    def __call__(self, hidden: Tensor, position_embeddings: tuple[Tensor, Tensor], layout: Any, **_: Any) -> Tensor:
        """hidden (n, 1, H) -> (n, 1, H), as the layer's forward."""
        layer, attention = self.layer, self.layer.self_attn
        where = layout.layer(attention.layer_idx).where
        arrivals, width = where[2], attention.head_dim
        before = hidden.squeeze(1)
        first, second = layer.input_layernorm, layer.post_attention_layernorm
        projected = project(before, self.qkv.weight, arrivals, bias=self.qkv.bias, norm=first)
        query, key, value = (part.unflatten(-1, (-1, width)) for part in projected.split(self.qkv.sizes, -1))
        how: dict[str, Any] = {"rotary": [part.reshape(-1, width) for part in position_embeddings]}
        if self.norms:
            how |= {"norms": [norm.weight for norm in self.norms], "epsilon": self.norms[0].variance_epsilon}
        window = getattr(attention, "sliding_window", None) or 0
        attended = attend(query, key, value, where, attention.scaling, window, **how)
        middle = project(attended.flatten(1), attention.o_proj.weight, arrivals, residual=before)
        inner = project(middle, self.gate_up.weight, arrivals, norm=second, gated=True)
        return project(inner, layer.mlp.down_proj.weight, arrivals, residual=middle).unsqueeze(1)


def find(model: Any, groups: list[Fused]) -> list[Replacement]:
    """The forward functions of the model's decoder layers; none where one of the layers cannot be computed so."""
    owners = {id(group.owner): group for group in groups}
    found: list[Replacement] = []
    for layer in model.base_model.layers:
        if type(layer).__name__ not in LAYERS:
            return []
        qkv, gate_up = owners.get(id(layer.self_attn)), owners.get(id(layer.mlp))
        others = layer.self_attn.o_proj, layer.mlp.down_proj
        plain = all(type(linear) is nn.Linear and linear.bias is None for linear in others)
        if not (qkv and gate_up and gate_up.bias is None and plain and isinstance(layer.mlp.act_fn, SiLUActivation)):
            return []
        found.append((layer, "forward", FewRows(layer, qkv, gate_up)))
    return found


def project(
    x: Tensor,
    weight: Tensor,
    arrivals: Tensor,
    *,
    bias: Tensor | None = None,
    norm: Any = None,
    residual: Tensor | None = None,
    gated: bool = False,
) -> Tensor:
    """``norm(x) @ weight.T + bias + residual``, or ``silu(gate) * up`` of the two halves of it.

    Args:
        x: (n, K). weight: (N, K). bias: (N,). residual: (n, N).
        arrivals: see ``Pages``.
        norm: an RMS norm of transformers, or None.

    Returns:
        (n, N); gated: (n, N / 2).
    """
    n, inner = x.shape
    outer = len(weight) // 2 if gated else len(weight)
    out = x.new_empty(n, outer)
    rows = max(16, triton.next_power_of_2(n))
    tiles = triton.cdiv(outer, TILE)
    splits = 1
    if norm is None:  # (a row's norm needs the whole of it)
        splits = max(1, min(8, PROGRAMS // tiles, triton.cdiv(inner, DEPTH[rows])))
    sums = x.new_empty((tiles, splits, rows, TILE) if splits > 1 else (1,), dtype=torch.float32)
    _project[(tiles, splits)](
        x,
        x if norm is None else norm.weight,
        weight,
        weight if bias is None else bias,
        x if residual is None else residual,
        out,
        sums,
        arrivals,
        n,
        inner,
        outer,
        0.0 if norm is None else norm.variance_epsilon,
        NORM=norm is not None,
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        GATED=gated,
        SPLITS=splits,
        ROWS=rows,
        COLUMNS=TILE,
        TERMS=DEPTH[rows],
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=WARPS,
        num_stages=STAGES,
    )
    return out


@triton.jit
def _project(
    x, norm, weight, bias, residual, out, sums, arrivals, n, inner, outer, epsilon,
    NORM: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, GATED: tl.constexpr, SPLITS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TERMS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: some columns of all rows, over one split of the sums."""
    tile, split = tl.program_id(0), tl.program_id(1)
    rows, places = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)
    columns = tile * COLUMNS + places
    size = tl.cdiv(tl.cdiv(inner, SPLITS), TERMS) * TERMS
    start = split * size
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    gate = tl.zeros([ROWS, COLUMNS], tl.float32)
    squares = tl.zeros([ROWS], tl.float32)
    for begin in range(start, tl.minimum(start + size, inner), TERMS):
        depth = begin + tl.arange(0, TERMS)[None, :]
        block = tl.load(x + rows * inner + depth, mask=(rows < n) & (depth < inner), other=0.0)
        if NORM:
            wide = block.to(tl.float32)
            squares += tl.sum(wide * wide, 1)
            block = (wide * tl.load(norm + depth, mask=depth < inner, other=0.0).to(tl.float32)).to(block.dtype)
        inside = (columns[:, None] < outer) & (depth < inner)
        own = weight + columns.to(tl.int64)[:, None] * inner + depth
        part = tl.load(own, mask=inside, other=0.0)
        if GATED:
            gate = tl.dot(block, tl.trans(part), gate, input_precision=PRECISION)
            part = tl.load(own + outer.to(tl.int64) * inner, mask=inside, other=0.0)
        total = tl.dot(block, tl.trans(part), total, input_precision=PRECISION)
    if NORM:
        scale = tl.rsqrt(squares / inner + epsilon)[:, None]
        total *= scale
        gate *= scale
    if GATED:
        total *= gate / (1 + tl.exp(-gate))
    last = True
    if SPLITS > 1:
        mine = sums + (tile * SPLITS * ROWS + rows) * COLUMNS + places[None, :]
        tl.store(mine + split * ROWS * COLUMNS, total)
        tl.debug_barrier()  # all of this program has stored: then it counts as arrived, and the last one sums
        last = tl.atomic_add(arrivals + tile, 1, sem="acq_rel") == SPLITS - 1
        if last:
            tl.store(arrivals + tile, 0)
            total = tl.zeros([ROWS, COLUMNS], tl.float32)
            for other in range(SPLITS):
                total += tl.load(mine + other * ROWS * COLUMNS, cache_modifier=".cg")
    if last:
        inside = (rows < n) & (columns[None, :] < outer)
        if BIAS:
            total += tl.load(bias + columns, mask=columns < outer, other=0.0).to(tl.float32)[None, :]
        if RESIDUAL:
            total += tl.load(residual + rows * outer + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        tl.store(out + rows * outer + columns[None, :], total.to(out.dtype.element_ty), mask=inside)
