"""What the engines share that have weights of their own: the model without its weights, and what ends a response."""

import importlib.util
from typing import Any

from torch import nn

from rolecall import models
from rolecall.config import Config
from rolecall.engines.local import check_entries
from rolecall.engines.sequence import Endings
from rolecall.errors import UserError
from rolecall.sync.buckets import Entry


class SeparateEngine:
    """Around another project's engine, which loads the model itself.

    Attributes:
        outline: the model as this project knows it, see ``models.outline``.
        longest: most tokens of a prompt and its response together.

    Raises:
        UserError: the package is not installed.
    """

    package: str  # as it is imported, and named in ``rollout.engine``
    name: str  # as its makers write it
    install: str

    def __init__(self, config: Config):
        if importlib.util.find_spec(self.package) is None:
            raise UserError(
                f"rollout.engine = {self.package!r}: {self.name} is not installed. Install it: {self.install}."
            )
        self.device = models.device()
        self.outline: Any = models.outline(config.model, self.device)
        self.tokenizer = models.load_tokenizer(config.model)
        self.version = 0
        self.endings = Endings(self.outline, self.tokenizer)
        most = config.data.max_prompt_tokens + config.rollout.max_tokens
        self.longest = self.endings.context = min(most, self.endings.context or most)
        self._names = names_of_one(self.outline)

    def expect(self, entries: list[Entry]) -> None:
        """See ``Engine.expect``."""
        check_entries(self.outline, entries)


def names_of_one(model: nn.Module) -> dict[str, list[str]]:
    """Each parameter's name -> all names of it, the first one that the model gives it in front."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {name: group for group in names.values() for name in group}
