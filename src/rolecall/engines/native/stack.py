"""The decode step through all layers of a model of the Llama type, with fewer kernels than its own code takes.

A step of few rows is kernels that wait for each other. Three of transformers' 12 a layer are left out: attention turns
queries and keys to their positions itself (two kernels), and the second residual sum waits for the norm that reads it.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from rolecall.engines.native.fused import Fused, Replacement
from rolecall.engines.native.pages import PagedDecode, PagedDecodeLayer
from rolecall.models.compiled import compiled, is_compiled

# Their layers are: norm, attention, sum, norm, gate * up, sum.
MODELS = {"LlamaModel", "Qwen2Model", "Qwen3Model"}


class Layer(nn.Module):
    """Computes a decoder layer with its own parts. (A module: compiled code then serves the same one of every layer.)

    Args:
        qkv, gate_up: its linear layers that read one input.
    """

    def __init__(self, layer: Any, qkv: Fused, gate_up: Fused):
        super().__init__()
        self.layer, self.qkv, self.gate_up = layer, qkv, gate_up

    def forward(
        self, x: Tensor, y: Tensor, cos: Tensor, sin: Tensor, layout: PagedDecodeLayer
    ) -> tuple[Tensor, Tensor]:
        """x and y (n, H), whose sum is the layer's input; the same two of its output. cos, sin: (n, D)."""
        attention, mlp = self.layer.self_attn, self.layer.mlp
        x = x + y
        new = self.qkv(self.layer.input_layernorm(x))
        query, key, value = (part.unflatten(-1, (-1, attention.head_dim)) for part in new)
        norms: list[Any] = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
        window = getattr(attention, "sliding_window", None)
        attended = layout.turn_and_attend(query, key, value, attention.scaling, window, cos, sin, *norms)
        x = x + attention.o_proj(attended.flatten(1))
        gate, up = self.gate_up(self.layer.post_attention_layernorm(x))
        return x, mlp.down_proj(mlp.act_fn(gate) * up)


class Stack:
    """Stands for the forward function of a model's backbone, in the decode step."""

    def __init__(self, backbone: Any, layers: list[Layer]):
        self.backbone, self.layers = backbone, layers
        self.forward = compiled(Layer.forward) if is_compiled(layers[0].layer) else Layer.forward

    def __call__(self, input_ids: Tensor, position_ids: Tensor, layout: PagedDecode, **_: Any) -> Any:
        """(n, 1) tokens and where they stand -> hidden states (n, 1, H)."""
        embedded = self.backbone.embed_tokens(input_ids)
        cos, sin = (part.squeeze(1) for part in self.backbone.rotary_emb(embedded, position_ids))
        x, y = embedded.squeeze(1), torch.zeros_like(embedded.squeeze(1))
        for number, layer in enumerate(self.layers):
            x, y = self.forward(layer, x, y, cos, sin, layout.layer(number))
        return BaseModelOutputWithPast(last_hidden_state=self.backbone.norm(x + y).unsqueeze(1))


def find(model: Any, groups: list[Fused]) -> list[Replacement]:
    """What stands for the model's own code; nothing where a layer is not of the Llama type, or has an adapter."""
    backbone = model.base_model
    if type(backbone).__name__ not in MODELS:
        return []
    owners = {id(group.owner): group for group in groups}
    layers = []
    for layer in backbone.layers:
        qkv, gate_up = owners.get(id(layer.self_attn)), owners.get(id(layer.mlp))
        if qkv is None or gate_up is None:
            return []
        layers.append(Layer(layer, qkv, gate_up))
    return [(backbone, "forward", Stack(backbone, layers))]
