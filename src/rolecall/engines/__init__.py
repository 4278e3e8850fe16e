"""Rollout engines: requests in, samples out."""

import warnings
from collections.abc import Callable

from rolecall import models
from rolecall.config import SEPARATE_ENGINES, Config
from rolecall.engines.base import Engine
from rolecall.engines.native.engine import NativeEngine
from rolecall.engines.native.paged import PagedEngine
from rolecall.engines.transformers import TransformersEngine
from rolecall.errors import UserError, nearest
from rolecall.models import Loaded

__all__ = ["Engine", "create", "launch"]

ENGINES: dict[str, Callable[[Loaded, int], Engine]] = {"native": NativeEngine, "transformers": TransformersEngine}


def launch(config: Config, loaded: Loaded | None = None) -> Engine:
    """The configured engine: on the model in ``loaded`` if it can share one, else with a model of its own.

    Raises:
        UserError: no engine of that name, not installed, or a model that it cannot take.
    """
    rollout = config.rollout
    if rollout.lora == "adapter":
        from rolecall.engines.vllm_lora import VLLMAdapterEngine

        return VLLMAdapterEngine(config)
    if rollout.remote:
        from rolecall.engines.remote import RemoteEngine

        return RemoteEngine(config)
    if rollout.engine == "vllm":
        from rolecall.engines.vllm import VLLMEngine

        return VLLMEngine(config)
    if rollout.engine == "sglang":
        from rolecall.engines.sglang import SGLangEngine

        return SGLangEngine(config)
    loaded = loaded or models.load(config.model, models.device())
    return create(rollout.engine, loaded, rollout.max_sequences)


def create(name: str, loaded: Loaded, max_sequences: int) -> Engine:
    """An engine on the model in ``loaded`` (its parameters are used, not copied).

    "native" is one of two: on a GPU the one with pages and captured steps. It becomes "transformers", with a warning,
    on a model that does not take Rolecall's attention function.

    Raises:
        UserError: no engine of that name, or one with weights of its own, which ``launch`` starts.
    """
    if name in SEPARATE_ENGINES:
        raise UserError(f"{name!r} has weights of its own, not those of a loaded model: use engines.launch(config).")
    if name not in ENGINES:
        known = nearest(name, [*ENGINES, *SEPARATE_ENGINES])
        raise UserError(f"rollout.engine: there is no engine {name!r}.{known}")
    if name == "native" and loaded.why is not None:
        warnings.warn(f"Generating with transformers' generate, not the native engine: {loaded.why}", stacklevel=2)
        name = "transformers"
    if name == "native" and loaded.model.device.type == "cuda":
        return PagedEngine(loaded, max_sequences)
    return ENGINES[name](loaded, max_sequences)
