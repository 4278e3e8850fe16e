"""The endless shuffled stream of prompts."""

import hashlib
import random
from typing import Any

from rolecall.errors import UserError
from rolecall.samples import Prompt


class Sampler:
    """Draws prompts without end: each epoch is a fresh permutation made from (seed, epoch).

    The only state is the position in the stream. It is also the group id of the prompt drawn there, so a prompt drawn
    twice, or two prompts that read the same, are still different groups.
    """

    def __init__(self, prompts: list[Prompt], seed: int):
        self.prompts, self.seed, self.position = prompts, seed, 0
        self._epoch, self._order = -1, list[int]()

    def draw(self, n: int) -> list[tuple[int, Prompt]]:
        """The next ``n`` prompts, each with its group id; group ids are never repeated."""
        drawn = [(position, self._at(position)) for position in range(self.position, self.position + n)]
        self.position += n
        return drawn

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"position": self.position, "seed": self.seed, "prompts": self._fingerprint()}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` was taken.

        Raises:
            UserError: the prompts or the seed are others than then, so that the stream would be another one.
        """
        here = self.state()
        for name, what in (("prompts", "the data set's prompts"), ("seed", "run.seed")):
            if state[name] != here[name]:
                raise UserError(
                    f"This run cannot be resumed: {what} changed since the checkpoint ({state[name]} then, "
                    f"{here[name]} now), so prompts would be skipped or repeated. Restore them, or start a new run."
                )
        self.position = state["position"]

    def _at(self, position: int) -> Prompt:
        epoch, index = divmod(position, len(self.prompts))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, list(range(len(self.prompts)))
            random.Random(f"{self.seed}/{epoch}").shuffle(self._order)
        return self.prompts[self._order[index]]

    def _fingerprint(self) -> str:
        names = "\n".join(prompt.id for prompt in self.prompts)
        return f"{len(self.prompts)}-{hashlib.blake2b(names.encode(), digest_size=8).hexdigest()}"
