"""What the engines share that work on the parameters of a model in this process."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from rolecall.engines.sequence import Endings
from rolecall.errors import RunError, UserError
from rolecall.models import Loaded
from rolecall.sync import checksum


class LocalEngine:
    """The model, what ends its responses, and new weights into it."""

    def __init__(self, loaded: Loaded, max_sequences: int):
        self.model: Any = loaded.model
        self.tokenizer = loaded.tokenizer
        self.max_sequences = max_sequences
        self.version = 0
        self.endings = Endings(loaded.model, loaded.tokenizer)

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> str:
        """See ``Engine.load_weights``."""
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        given: dict[int, tuple[str, Tensor]] = {}
        for name, tensor in weights:
            parameter = parameters.get(name)
            if parameter is None:
                raise RunError(f"Weight sync: the engine's model has no parameter {name!r}; nothing was written.")
            if parameter.shape != tensor.shape:
                raise RunError(
                    f"Weight sync: {name!r} has shape {tuple(tensor.shape)}, the engine's parameter "
                    f"{tuple(parameter.shape)}; nothing was written."
                )
            if parameter.dtype != tensor.dtype:
                raise UserError(
                    f"The Actor computes in {tensor.dtype}, the engine in {parameter.dtype} ({name}), because one has "
                    "a GPU and the other has none. Set --model.dtype, or give both pools gpus."
                )
            other, value = given.setdefault(id(parameter), (name, tensor))
            if value is not tensor and not torch.equal(value, tensor):
                raise RunError(
                    f"Weight sync: {other!r} and {name!r} are one parameter here, but differ; nothing was written."
                )
        own = dict(self.model.named_parameters())
        if missing := [name for name, parameter in own.items() if id(parameter) not in given]:
            raise RunError(
                f"Weight sync: {len(missing)} of {len(own)} parameters were not sent ({', '.join(missing[:3])}, ...); "
                "nothing was written."
            )
        for parameter in own.values():
            parameter.copy_(given[id(parameter)][1])
        self.version = version
        return checksum(own.items())
