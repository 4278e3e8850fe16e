"""Rollout engines: requests in, samples out."""

import warnings
from collections.abc import Callable

from rolecall.engines.base import Engine
from rolecall.engines.native.engine import NativeEngine
from rolecall.engines.transformers import TransformersEngine
from rolecall.errors import UserError, nearest
from rolecall.models import Loaded

__all__ = ["Engine", "create"]

ENGINES: dict[str, Callable[[Loaded, int], Engine]] = {"native": NativeEngine, "transformers": TransformersEngine}


def create(name: str, loaded: Loaded, max_sequences: int) -> Engine:
    """An engine on the model in ``loaded`` (its parameters are used, not copied).

    "native" becomes "transformers", with a warning, on a model that does not take Rolecall's attention function.

    Raises:
        UserError: no engine of that name.
    """
    if name not in ENGINES:
        raise UserError(f"rollout.engine: there is no engine {name!r}.{nearest(name, ENGINES)}")
    if name == "native" and loaded.why is not None:
        warnings.warn(f"Generating with transformers' generate, not the native engine: {loaded.why}", stacklevel=2)
        name = "transformers"
    return ENGINES[name](loaded, max_sequences)
