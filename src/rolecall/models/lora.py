"""LoRA (2106.09685) through peft: a frozen model's linear layers with a small trained product beside each of them.

A layer computes ``W x + (alpha / rank) B A x``. A is drawn at random and B is 0: training starts at the model itself.
"""

import importlib.util
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from rolecall import config as configuration
from rolecall.errors import UserError, nearest

ADAPTER = "default"  # peft's name for the only one


def add(model: nn.Module, config: configuration.Model, seed: int) -> Any:
    """Freeze ``model`` and put an adapter into it, in place: under its own class and methods it computes with both.

    The adapter's parameters are FP32 whatever type the model computes in, and the only ones that require a gradient.

    Args:
        config: rank, alpha and the layers; none named: all linear ones but the output embedding.
        seed: of A.

    Returns:
        peft's handle: ``disable_adapter()`` while a ``with`` block runs, and ``save_pretrained`` of the adapter alone.

    Raises:
        UserError: peft is not installed, or ``lora_targets`` names what is no linear layer inside the model.
    """
    if importlib.util.find_spec("peft") is None:
        raise UserError(
            f"model.lora_rank = {config.lora_rank}: peft is not installed. Install it: pip install 'rolecall[lora]'."
        )
    from peft import LoraConfig, get_peft_model

    _check_targets(model, config.lora_targets)
    settings = LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        target_modules=config.lora_targets or "all-linear",
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]):  # A is drawn on the CPU
        torch.manual_seed(seed)
        adapted = get_peft_model(model, settings)
    return adapted.eval()


@torch.no_grad()
def merged(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters of a model without adapter that computes what this one does, tied ones once.

    Yields:
        names as they were before ``add``; ``W + (alpha / rank) B A``, summed in FP32 and rounded to W's type, where
        there is an adapter, and else the parameter itself. One at a time: nothing in the model changes or grows.
    """
    tensor: Tensor
    for name, tensor in model.named_parameters():
        if ".lora_" in name:
            continue
        layer, _, leaf = name.partition(".base_layer.")
        if leaf == "weight":
            any_layer: Any = model.get_submodule(layer)
            tensor = (tensor + any_layer.get_delta_weight(ADAPTER)).to(tensor.dtype)
        yield name.replace(".base_layer.", "."), tensor


def adapter(handle: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors A and B of what ``add`` returned, under the names of peft's files."""
    from peft import get_peft_model_state_dict

    yield from get_peft_model_state_dict(handle, save_embedding_layers=False).items()


def identity(config: configuration.Model) -> dict[str, Any]:
    """What trained parameters belong to: those of another adapter, or for another frozen model, do not fit here."""
    if config.lora_rank == 0:
        return {"lora_rank": 0}
    return config.model_dump(include={"path", "lora_rank", "lora_alpha", "lora_targets"})


def _check_targets(model: nn.Module, targets: list[str]) -> None:
    any_model: Any = model
    head = any_model.get_output_embeddings()
    linear = [
        name
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, Conv1D)) and module is not head  # what peft means by all-linear
    ]
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name in linear):
            known = {name.rpartition(".")[2] for name in linear}
            raise UserError(
                f"model.lora_targets: {target!r} is no linear layer inside the model (embeddings cannot have an "
                f"adapter).{nearest(target, known)}"
            )
