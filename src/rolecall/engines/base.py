"""What every rollout engine answers to."""

from typing import Literal, Protocol

from torch import Tensor

from rolecall.samples import Request, Sample
from rolecall.sync.buckets import Entry


class Engine(Protocol):
    """Generates from its current weights.

    ``version`` counts weight syncs (0: the weights it started with) and is written into every sample.

    New weights come as ``start_update``, any number of ``write``, ``finish_update``, after ``expect`` once. In between
    the engine's weights are neither the old nor the new ones; the Rollout does not let it generate then.
    """

    version: int

    def generate(self, requests: list[Request]) -> list[Sample]:
        """All ``n`` samples of every request, in request order, then by ``index``.

        Raises:
            UserError: a prompt is empty or leaves no room for one token in the model's context.
            RunError: the model gives NaN.
        """
        ...

    def expect(self, entries: list[Entry]) -> None:
        """Compare what every update will bring (Hugging Face names) with the engine's model.

        A tied parameter goes by any of its names, once.

        Raises:
            UserError: the weights have another type than the engine's.
            RunError: an unknown or missing name, a wrong shape, or a parameter twice.
        """
        ...

    def start_update(self) -> None:
        """Make ready for new weights. An update that was begun is given up."""
        ...

    def write(self, weights: list[tuple[str, Tensor]]) -> None:
        """Write some of the announced weights, from any device. Their memory is read no more once it returns.

        (On a GPU: once what it has put on the current stream is done.)
        """
        ...

    def finish_update(self, version: int) -> None:
        """All have been written: generate from them, as ``version``, and from nothing computed with older ones.

        Raises:
            RunError: the engine does not hold each of them.
        """
        ...

    def sleep(self, level: Literal[1, 2]) -> None:
        """Free the GPU's memory between generating and the next sync. 1 keeps the weights on the host, 2 drops them."""
        ...

    def close(self) -> None:
        """End what the engine has started."""
        ...

    def wake(self, part: Literal["weights", "kv_cache"]) -> None:
        """Take the memory for the weights back, or for the cache. Awake, it does nothing."""
        ...
