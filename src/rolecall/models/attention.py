"""One attention function for every Hugging Face decoder, driven by a layout.

transformers lets a model call any registered attention function and hands it the keyword arguments of the forward
call. Ours takes a ``layout``, an object that knows how the tokens of this call are arranged: packed sequences here
(training), prompts and rows of a KV cache in the native engine (prefill and decoding). The model code stays
transformers' own.
"""

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "rolecall"


class Layout(Protocol):
    """How the tokens of one forward call attend to each other.

    ``compiled``: whether a model's layers run compiled under it (see ``compiled.compile_layers``). Such a layout has
    ``layer(number)``, the layout of one layer alone.
    """

    compiled: bool

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        """query (B, Hq, L, D), key and value (B, Hkv, L, D) of this call's tokens -> output (B, Hq, L, D)."""
        ...


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    layout: Layout | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    if layout is None:  # an ordinary call of the model, such as transformers' generate
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer: Any = module.layer_idx
    return layout.attend(layer, query, key, value, scale, sliding_window).transpose(1, 2), None


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


def sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, causal: bool = False) -> Tensor:
    """Attention with grouped key/value heads, masked or causal: query (B, Hq, L, D), key and value (B, Hkv, S, D).

    Heads are repeated by hand: with a mask, CUDA's grouped-query path would fall back to its slow kernel.
    """
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal, scale=scale)


class Packed:
    """Independent segments one behind the other in a single row, each with its own attention mask.

    A segment is a plain sequence, or a prompt followed by several responses that all see the prompt and not each
    other (shared-prefix packing). Nothing leaks between segments: a mask that several share lets none see another.

    Args:
        masks: boolean (S, S), in row order, one a segment or one for several; ``mask[i, j]``: position i sees j.
        positions: (sum of S,) position ids, restarted in each segment; sliding windows are measured in them.
    """

    compiled = False

    def __init__(self, masks: list[Tensor], positions: Tensor):
        self.masks, self.positions = masks, positions
        self._windowed: dict[int, list[Tensor]] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        outputs, start = [], 0
        for mask in self._masks(window):
            end = start + mask.shape[0]
            outputs.append(sdpa(query[:, :, start:end], key[:, :, start:end], value[:, :, start:end], mask, scale))
            start = end
        return torch.cat(outputs, dim=2)

    def _masks(self, window: int | None) -> list[Tensor]:
        if window is None:
            return self.masks
        if window not in self._windowed:
            self._windowed[window] = [
                mask & (where[:, None] - where[None, :] < window)
                for mask, where in zip(self.masks, self.positions.split([m.shape[0] for m in self.masks]), strict=True)
            ]
        return self._windowed[window]


def hidden_states(model: nn.Module, tokens: Tensor, positions: Tensor, layout: Layout) -> Tensor:
    """The model's last hidden states, (B, L) tokens -> (B, L, H), with attention as ``layout`` says."""
    # A 4-D mask is passed through untouched, so transformers builds none of its own.
    untouched = torch.empty(0, 0, 0, 0, device=tokens.device)
    backbone: Any = model.base_model
    return backbone(
        input_ids=tokens, position_ids=positions, attention_mask=untouched, use_cache=False, layout=layout
    ).last_hidden_state


def why_by_configuration(model: nn.Module) -> str | None:
    """What the configuration tells of ``why_unsupported``, where longer inputs would tell and short ones do not."""
    any_model: Any = model
    shape = any_model.config.get_text_config()
    if other := sorted(set(getattr(shape, "layer_types", None) or []) - {"full_attention", "sliding_attention"}):
        return f"{type(model).__name__} has layers of another kind: {', '.join(other)}"
    rotary = getattr(shape, "rope_parameters", None) or {}
    kinds: set[Any] = {one.get("rope_type") for one in (rotary, *rotary.values()) if isinstance(one, dict)}
    if varying := sorted(kinds & {"dynamic", "longrope"}):
        return f"{type(model).__name__} turns positions by the longest sequence beside them (rope_type {varying[0]})"
    return None


@torch.no_grad()
def why_unsupported(model: nn.Module) -> str | None:
    """None if the model runs under our attention function, else the reason: tried on two short sequences, not guessed.

    The model may fail it by ignoring the attention interface, by attention that this function does not offer
    (sinks, soft-capping), or by transforming the logits behind its output embedding.
    """
    if reason := why_by_configuration(model):
        return reason
    any_model: Any = model
    before = any_model.config._attn_implementation
    device = next(model.parameters()).device
    vocabulary = any_model.get_input_embeddings().weight.shape[0]
    rows = [torch.arange(size, device=device) * 7919 % vocabulary for size in (5, 9)]
    plain = torch.cat([any_model(input_ids=row[None]).logits[0] for row in rows])
    positions = torch.cat([torch.arange(len(row), device=device) for row in rows])
    masks = [torch.ones(len(row), len(row), dtype=torch.bool, device=device).tril() for row in rows]
    try:
        any_model.set_attn_implementation(NAME)
        hidden = hidden_states(model, torch.cat(rows)[None], positions[None], Packed(masks, positions))
        packed = any_model.get_output_embeddings()(hidden[0])
    except (AttributeError, TypeError, ValueError, RuntimeError, KeyError) as error:
        any_model.set_attn_implementation(before)
        return f"{type(model).__name__} does not take Rolecall's attention function: {error}"
    gap = (plain.float().log_softmax(-1) - packed.float().log_softmax(-1)).abs().mean().item()
    limit = 1e-4 if plain.dtype == torch.float32 else 0.05
    if not gap <= limit:
        any_model.set_attn_implementation(before)
        return f"{type(model).__name__} gives other log-probabilities under Rolecall's attention (mean gap {gap:.2g})"
    return None
