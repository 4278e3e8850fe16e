"""What every rollout engine answers to."""

from collections.abc import Iterable
from typing import Protocol

from torch import Tensor

from rolecall.samples import Request, Sample


class Engine(Protocol):
    """Generates from its current weights.

    ``version`` counts weight syncs (0: the weights it started with) and is written into every sample.
    """

    version: int

    def generate(self, requests: list[Request]) -> list[Sample]:
        """All ``n`` samples of every request, in request order, then by ``index``.

        Raises:
            UserError: a prompt is empty or leaves no room for one token in the model's context.
            RunError: the model gives NaN.
        """
        ...

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> str:
        """Write every parameter (Hugging Face names) and return the checksum of what is now in place.

        A tied parameter goes by any of its names, once or several times with equal values.

        Raises (before anything is written):
            UserError: the weights have another type than the engine's.
            RunError: an unknown or missing name, a wrong shape, or two values for one parameter.
        """
        ...
