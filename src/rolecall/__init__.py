"""Rolecall: distributed RL post-training for language models, from one laptop to a cluster.

>>> config = rolecall.Config.load("recipes/grpo-arithmetic.toml", {"run.steps": 10})
>>> run = rolecall.train(config)
>>> run.heldout, run.model
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

for _name in ("torchao", "torch.utils._pytree"):
    # transformers imports torchao where it is installed, which then says at every start what it does without.
    logging.getLogger(_name).setLevel(logging.ERROR)

if TYPE_CHECKING:
    from rolecall import algorithms, engines
    from rolecall.config import Config
    from rolecall.errors import RunError, UserError
    from rolecall.loop.run import Run, train

__all__ = ["Config", "Run", "RunError", "UserError", "algorithms", "engines", "train"]

# Imported at first use, so that `import rolecall` (and `rolecall --help`) loads neither torch nor Ray.
_HOME = {"Config": "config", "RunError": "errors", "UserError": "errors", "Run": "loop.run", "train": "loop.run"}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"rolecall.{_HOME[name]}"), name)
    if name in __all__:
        return importlib.import_module(f"rolecall.{name}")
    raise AttributeError(f"module 'rolecall' has no attribute {name!r}")
