"""What the engines share that work on a model in this process; and what weights any engine refuses."""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from rolecall.engines.sequence import Endings
from rolecall.errors import RunError, UserError
from rolecall.models import Loaded
from rolecall.sync.buckets import Entry


class LocalEngine:
    """An engine on the parameters of a model in this process."""

    def __init__(self, loaded: Loaded, max_sequences: int):
        self.model: Any = loaded.model
        self.tokenizer = loaded.tokenizer
        self.max_sequences = max_sequences
        self.version = 0
        self.endings = Endings(loaded.model, loaded.tokenizer)

    def expect(self, entries: list[Entry]) -> None:
        """See ``Engine.expect``."""
        check_entries(self.model, entries)

    def start_update(self) -> None:
        """See ``Engine.start_update``."""

    @torch.no_grad()
    def write(self, weights: list[tuple[str, Tensor]]) -> None:
        """See ``Engine.write``. Reads back what it wrote."""
        places = [self.model.get_parameter(name) for name, _ in weights]
        torch._foreach_copy_(places, [value for _, value in weights])
        for (name, value), place in zip(weights, places, strict=True):
            if not torch.equal(place.view(torch.uint8), value.to(place.device).view(torch.uint8)):
                raise RunError(f"Weight sync: the engine's {name!r} is not what was written into it.")

    def finish_update(self, version: int) -> None:
        """See ``Engine.finish_update``."""
        self.version = version

    def sleep(self, level: Literal[1, 2]) -> None:
        """See ``Engine.sleep``: nothing is freed, the Actor may work on these very weights."""

    def close(self) -> None:
        """See ``Engine.close``: nothing was started."""

    def wake(self, part: Literal["weights", "kv_cache"]) -> None:
        """See ``Engine.wake``."""


def check_entries(model: nn.Module, entries: list[Entry]) -> None:
    """``Engine.expect`` against a model of the engine's architecture, with weights or without (device "meta")."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    given: dict[int, Entry] = {}
    for entry in entries:
        name = entry.name
        parameter = parameters.get(name)
        if parameter is None:
            raise RunError(f"Weight sync: the engine's model has no parameter {name!r}; nothing was written.")
        if parameter.shape != entry.shape:
            raise RunError(
                f"Weight sync: {name!r} has shape {entry.shape}, the engine's parameter "
                f"{tuple(parameter.shape)}; nothing was written."
            )
        if parameter.dtype != entry.dtype:
            raise UserError(
                f"The Actor computes in {entry.dtype}, the engine in {parameter.dtype} ({name}), because one has a "
                "GPU and the other has none. Set --model.dtype, or give both pools gpus."
            )
        if (other := given.setdefault(id(parameter), entry)) is not entry:
            raise RunError(
                f"Weight sync: {other.name!r} and {name!r} are one parameter here, and were sent as two; nothing was "
                "written."
            )
    own = dict(model.named_parameters())
    if missing := [name for name, parameter in own.items() if id(parameter) not in given]:
        raise RunError(
            f"Weight sync: {len(missing)} of {len(own)} parameters were not sent ({', '.join(missing[:3])}, ...); "
            "nothing was written."
        )
