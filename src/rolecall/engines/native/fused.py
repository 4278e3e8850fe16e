"""Linear layers that read the same input, as one matrix product: a small model's step is mostly small products."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # in the order in which the models call them

Replacement = tuple[nn.Module, str, Any]  # an attribute of a module, and what is to stand for it


class Fused:
    """Some linear layers with one input. Their parameters become parts of one tensor each, and stay parameters.

    Args:
        owner: the module that has them, by these names.
    """

    def __init__(self, owner: nn.Module, names: tuple[str, ...]):
        self.owner = owner
        linears = [getattr(owner, name) for name in names]
        self.weight = _joined([linear.weight for linear in linears])
        self.bias = None if linears[0].bias is None else _joined([linear.bias for linear in linears])
        self.sizes = [linear.out_features for linear in linears]
        self.input: Tensor | None = None
        self.outputs: tuple[Tensor, ...] = ()
        self.replacements: list[Replacement] = [(owner, name, _Part(self, i)) for i, name in enumerate(names)]

    def __call__(self, hidden: Tensor) -> tuple[Tensor, ...]:
        """What each linear layer gives."""
        return F.linear(hidden, self.weight, self.bias).split(self.sizes, -1)

    def output(self, number: int, hidden: Tensor) -> Tensor:
        """What the linear layer of that number gives.

        The model calls the layers of a group in turn on one tensor: the first call computes all, and the last lets go
        of them, so that no activation outlives its layer.
        """
        if self.input is not hidden:
            self.input, self.outputs = hidden, self(hidden)
        output = self.outputs[number]
        if number == len(self.sizes) - 1:
            self.input, self.outputs = None, ()
        return output


class _Part(nn.Module):
    """Stands for one of the linear layers. (A module: compiled code then serves the same one of every layer.)"""

    def __init__(self, group: Fused, number: int):
        super().__init__()
        self.group, self.number = group, number

    def forward(self, hidden: Tensor) -> Tensor:
        return self.group.output(self.number, hidden)


def fuse(model: nn.Module) -> list[Fused]:
    """Every group of linear layers in the model that ``TOGETHER`` names and that is nothing but linear."""
    found = []
    for module in model.modules():
        for names in TOGETHER:
            linears: list[Any] = [getattr(module, name, None) for name in names]
            plain = all(type(linear) is nn.Linear for linear in linears)
            if plain and len({(linear.in_features, linear.bias is None) for linear in linears}) == 1:
                found.append(Fused(module, names))
    return found


@contextmanager
def in_use(replacements: list[Replacement]) -> Iterator[None]:
    """Within it these stand in their modules."""
    # A linear layer is a module of its owner; a ``forward`` may be an attribute (compiled) or only the class's.
    before = [owner._modules.get(name) or vars(owner).get(name) for owner, name, _ in replacements]
    try:
        for owner, name, new in replacements:
            setattr(owner, name, new)
        yield
    finally:
        for (owner, name, _), old in zip(replacements, before, strict=True):
            if old is None:  # it is the class's, such as ``forward``
                delattr(owner, name)
            else:
                setattr(owner, name, old)


def _joined(parameters: list[nn.Parameter]) -> Tensor:
    """One tensor, of which they become parts; where they are already, that one: another engine computes with it."""
    first = parameters[0].data
    ends = accumulate((parameter.nbytes for parameter in parameters), initial=first.data_ptr())
    alike = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    if len(alike) == 1 and all(p.data_ptr() == end for p, end in zip(parameters, ends, strict=False)):
        return first.as_strided((sum(map(len, parameters)), *first.shape[1:]), first.stride())
    whole = torch.cat([parameter.data for parameter in parameters])
    for parameter, part in zip(parameters, whole.split([len(parameter) for parameter in parameters]), strict=True):
        parameter.data = part
    return whole
