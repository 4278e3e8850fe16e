"""The decode step of few rows, with five kernels a layer: its time is kernels that wait for each other, not bytes.

A long tail is many steps of few rows. transformers' layer, compiled, is about 13 kernels; here a product takes along
what follows it (sum, activation, the next norm), and while one kernel ends, the next one is already there and reads its
weights (programmatic dependent launch, from compute capability 9 on). Imported on a GPU only.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor, nn
from transformers.activations import SiLUActivation
from transformers.modeling_outputs import BaseModelOutputWithPast

from rolecall.engines.native.fused import Fused, Replacement
from rolecall.engines.native.kernels import attend, fetch, overlap, take_over

# Their layers are: norm, q k v, attention, o, sum; norm, gate and up, SiLU, down, sum.
MODELS = {"LlamaModel", "Qwen2Model", "Qwen3Model"}
PROGRAMS = 264  # that fill the GPU: fewer tiles of a product are split along its sums
TILE, WARPS, STAGES = 32, 4, 4  # of a product: columns that a program computes
DEPTH = {16: 128, 32: 128, 64: 64}  # and terms of its sums at once, by rows
AHEAD = 1024  # terms of the sums whose weights a program asks for before what it multiplies is there


class FewRows:
    """Computes a model's hidden states in the decode step, with its parameters where they are.

    Args:
        layers: each decoder layer, with its linear layers that read one input.
    """

    def __init__(self, backbone: Any, layers: list[tuple[Any, Fused, Fused]]):
        self.backbone, self.layers = backbone, layers
        # The norm behind each layer's second sum is the next layer's first.
        self.following = [layer.input_layernorm for layer, _, _ in layers[1:]] + [backbone.norm]

    def __call__(self, input_ids: Tensor, position_ids: Tensor, layout: Any, **_: Any) -> BaseModelOutputWithPast:
        """As the model's forward: (n, 1) tokens -> hidden states (n, 1, H)."""
        backbone = self.backbone
        embedded = backbone.embed_tokens(input_ids)
        rotary = [part.flatten(0, 1) for part in backbone.rotary_emb(embedded, position_ids)]
        x = embedded.squeeze(1)
        normed = _normed(x, self.layers[0][0].input_layernorm)
        for number, following in enumerate(self.following):
            x, normed = self._layer(number, x, normed, rotary, layout, following)
        norm = backbone.norm
        hidden: Any = F.rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)
        return BaseModelOutputWithPast(last_hidden_state=hidden.unsqueeze(1))

    def _layer(
        self, number: int, x: Tensor, normed: "Normed", rotary: list[Tensor], layout: Any, following: Any
    ) -> tuple[Tensor, "Normed"]:
        layer, qkv, gate_up = self.layers[number]
        attention = layer.self_attn
        where, width = layout.layer(number).where, attention.head_dim
        projected = project(normed, qkv.weight, qkv.bias)
        query, key, value = (part.unflatten(-1, (-1, width)) for part in projected.split(qkv.sizes, -1))
        norms, epsilon = None, 0.0
        if hasattr(attention, "q_norm"):
            norms = attention.q_norm.weight, attention.k_norm.weight
            epsilon = attention.q_norm.variance_epsilon
        window = getattr(attention, "sliding_window", None) or 0
        attended = attend(query, key, value, where, attention.scaling, window, rotary, norms, epsilon)
        arrivals = where[2]
        x, normed = add_product(
            x, attended.flatten(1), attention.o_proj.weight, layer.post_attention_layernorm, arrivals
        )
        inner = project(normed, gate_up.weight, gated=True)
        return add_product(x, inner, layer.mlp.down_proj.weight, following, arrivals)


def find(model: Any, groups: list[Fused]) -> list[Replacement]:
    """What stands for the forward function of the model's backbone; nothing where it cannot be computed so."""
    backbone = model.base_model
    if type(backbone).__name__ not in MODELS:
        return []
    owners = {id(group.owner): group for group in groups}
    layers = []
    for layer in backbone.layers:
        qkv, gate_up = owners.get(id(layer.self_attn)), owners.get(id(layer.mlp))
        others = layer.self_attn.o_proj, layer.mlp.down_proj
        plain = all(type(linear) is nn.Linear and linear.bias is None for linear in others)
        if not (qkv and gate_up and gate_up.bias is None and plain and isinstance(layer.mlp.act_fn, SiLUActivation)):
            return []
        layers.append((layer, qkv, gate_up))
    return [(backbone, "forward", FewRows(backbone, layers))]


class Normed(NamedTuple):
    """An RMS norm's result, but for each row's factor, which the next product's sums are multiplied by.

    ``weighted``: (n, K) x * weight. ``squares``: (parts, ROWS or more) float32, which add up to each row's sum of x^2.
    """

    weighted: Tensor
    squares: Tensor
    epsilon: float


def _normed(x: Tensor, norm: Any) -> Normed:
    squares = x.new_zeros(1, _padded(len(x)), dtype=torch.float32)
    squares[0, : len(x)] = x.float().square().sum(-1)
    return Normed(x * norm.weight, squares, norm.variance_epsilon)


def project(x: Normed, weight: Tensor, bias: Tensor | None = None, gated: bool = False) -> Tensor:
    """``norm(x) @ weight.T + bias``, or ``silu(gate) * up`` of the two halves of it.

    x (n, K), weight (N, K), bias (N,) -> (n, N); gated: (n, N / 2).
    """
    out = x.weighted.new_empty(len(x.weighted), len(weight) // 2 if gated else len(weight))
    _launch(x.weighted, weight, out, squares=x.squares, epsilon=x.epsilon, bias=bias, gated=gated)
    return out


def add_product(x: Tensor, y: Tensor, weight: Tensor, norm: Any, arrivals: Tensor) -> tuple[Tensor, Normed]:
    """``x + y @ weight.T``, and the RMS norm of that.

    Args:
        x: (n, N). y: (n, K). weight: (N, K).
        norm: of transformers.
        arrivals: see ``Pages``.
    """
    tiles, rows = triton.cdiv(len(weight), TILE), _padded(len(x))
    splits = max(1, min(8, PROGRAMS // tiles, triton.cdiv(y.shape[1], DEPTH[rows])))
    out, weighted = torch.empty_like(x), torch.empty_like(x)
    squares = x.new_empty(tiles, rows, dtype=torch.float32)
    sums = x.new_empty(tiles, splits, rows, TILE, dtype=torch.float32)
    normed = Normed(weighted, squares, norm.variance_epsilon)
    _launch(y, weight, out, residual=x, norm=norm.weight, normed=normed, sums=sums, arrivals=arrivals, splits=splits)
    return out, normed


def _padded(n: int) -> int:
    return max(16, triton.next_power_of_2(n))


def _launch(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    *,
    squares: Tensor | None = None,
    epsilon: float = 0.0,
    bias: Tensor | None = None,
    gated: bool = False,
    residual: Tensor | None = None,
    norm: Tensor | None = None,
    normed: Normed | None = None,
    sums: Tensor | None = None,
    arrivals: Tensor | None = None,
    splits: int = 1,
) -> None:
    parts, rows = 0 if squares is None else len(squares), _padded(len(x))
    _multiply[(triton.cdiv(out.shape[1], TILE), splits)](
        x,
        weight,
        out,
        squares,
        bias,
        residual,
        norm,
        None if normed is None else normed.weighted,
        None if normed is None else normed.squares,
        sums,
        arrivals,
        len(x),
        x.shape[1],
        out.shape[1],
        parts,
        epsilon,
        PARTS=triton.next_power_of_2(max(1, parts)),
        GATED=gated,
        SPLITS=splits,
        ROWS=rows,
        COLUMNS=TILE,
        TERMS=DEPTH[rows],
        MOST=AHEAD,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        **overlap(x),
        num_warps=WARPS,
        num_stages=STAGES,
    )


@triton.jit
def _multiply(
    x, weight, out, squares, bias, residual, norm, weighted, next_squares, sums, arrivals,
    n, inner, outer, parts, epsilon,
    PARTS: tl.constexpr, GATED: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    TERMS: tl.constexpr, MOST: tl.constexpr, PRECISION: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One program: some columns of all rows, over one split of the sums."""
    tile, split = tl.program_id(0), tl.program_id(1)
    rows, places = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)
    columns = tile * COLUMNS + places
    size = tl.cdiv(tl.cdiv(inner, SPLITS), TERMS) * TERMS
    start = split * size
    stop = tl.minimum(start + size, inner)
    mine = (columns < outer)[:, None]
    own = weight + columns.to(tl.int64)[:, None] * inner
    second = own + outer.to(tl.int64) * inner
    if OVERLAPS:
        lines = tl.arange(0, TERMS // 32)[None, :] * 32
        for begin in range(start, tl.minimum(stop, start + MOST), TERMS):
            fetch(own + begin + lines, mine & (begin + lines < inner))
            if GATED:
                fetch(second + begin + lines, mine & (begin + lines < inner))
        take_over()
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    up = tl.zeros([ROWS, COLUMNS], tl.float32)
    for begin in range(start, stop, TERMS):
        terms = begin + tl.arange(0, TERMS)[None, :]
        block = tl.load(x + rows * inner + terms, mask=(rows < n) & (terms < inner), other=0.0)
        part = tl.load(own + terms, mask=mine & (terms < inner), other=0.0)
        total = tl.dot(block, tl.trans(part), total, input_precision=PRECISION)
        if GATED:
            part = tl.load(second + terms, mask=mine & (terms < inner), other=0.0)
            up = tl.dot(block, tl.trans(part), up, input_precision=PRECISION)
    if squares is not None:
        each = tl.arange(0, PARTS)[:, None]
        square = tl.load(squares + each * ROWS + tl.arange(0, ROWS)[None, :], mask=each < parts, other=0.0)
        factor = tl.rsqrt(tl.sum(square, 0) / inner + epsilon)[:, None]
        total *= factor
        up *= factor
    if GATED:
        total = total / (1 + tl.exp(-total)) * up
    last = True
    if SPLITS > 1:
        spot = sums + (tile * SPLITS * ROWS + rows) * COLUMNS + places[None, :]
        tl.store(spot + split * ROWS * COLUMNS, total)
        tl.debug_barrier()  # all of this program has stored: then it counts as arrived, and the last one sums
        last = tl.atomic_add(arrivals + tile, 1, sem="acq_rel") == SPLITS - 1
        if last:
            tl.store(arrivals + tile, 0)
            total = tl.zeros([ROWS, COLUMNS], tl.float32)
            for other in tl.static_range(SPLITS):
                total += tl.load(spot + other * ROWS * COLUMNS, cache_modifier=".cg")
    if last:
        inside = (rows < n) & (columns < outer)[None, :]
        place = rows * outer + columns[None, :]
        if bias is not None:
            total += tl.load(bias + columns, mask=columns < outer, other=0.0).to(tl.float32)[None, :]
        if residual is not None:
            total += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
        result = total.to(out.dtype.element_ty)
        tl.store(out + place, result, mask=inside)
        if norm is not None:
            wide = tl.where(inside, result.to(tl.float32), 0.0)
            tl.store(next_squares + tile * ROWS + tl.arange(0, ROWS), tl.sum(wide * wide, 1))
            wide *= tl.load(norm + columns, mask=columns < outer, other=0.0).to(tl.float32)[None, :]
            tl.store(weighted + place, wide.to(out.dtype.element_ty), mask=inside)
