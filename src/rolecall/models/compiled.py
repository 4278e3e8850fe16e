"""Compiled decoder layers: the code of one serves all, in training and in the decode step of the native engine."""

from functools import cache, partial, wraps
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer


def compiled_later(function: Any, **options: Any) -> Any:
    """``torch.compile``, at the first call: to import the compiler would cost every process a second of its start."""
    compiled = cache(lambda: torch.compile(function, **options))

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        # What is compiled itself takes the function in as it is.
        return (function if torch.compiler.is_compiling() else compiled())(*args, **kwargs)

    return call


def compile_layers(model: nn.Module) -> None:
    """Let the model's decoder layers run compiled where they are called with a layout that says so.

    They share what is compiled: once for each kind of layer and layout, with and without gradients, whatever the
    lengths. Called in any other way (generate, prompts that enter the native engine) they run as they are.
    """
    for layer in (module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)):
        # A model that reads images has other layers, too, before these; their attention has no number.
        numbers: list[Any] = [module.layer_idx for module in layer.modules() if hasattr(module, "layer_idx")]
        if numbers:
            layer.forward = partial(_forward, layer, numbers[0])


def is_compiled(layer: nn.Module) -> bool:
    """Whether ``compile_layers`` has had it."""
    return getattr(vars(layer).get("forward"), "func", None) is _forward


def _forward(module: nn.Module, number: int, *args: Any, **kwargs: Any) -> Any:
    forward = type(module).forward
    layout = kwargs.get("layout")
    if layout is not None and layout.compiled:
        kwargs["layout"] = layout.layer(number)  # here, so that compiled code does not know the number
        forward = compiled(forward)
    return forward(module, *args, **kwargs)


@cache
def compiled(forward: Any) -> Any:
    """The compiled form of a layer's forward function."""
    # Only lengths are dynamic: a layer's epsilon and the like are constants. A layer has several forms (two windows,
    # with and without gradients, in training and in the decode step): past the limit it would silently run as it is.
    patch = torch._dynamo.config.patch(specialize_float=True, recompile_limit=16)
    return patch(torch.compile(forward, dynamic=True))
