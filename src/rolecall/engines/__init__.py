"""Rollout engines: requests in, samples out."""

import pkgutil
import warnings

from rolecall import models
from rolecall.config import Config
from rolecall.engines.base import Engine
from rolecall.engines.native.engine import NativeEngine
from rolecall.engines.native.paged import PagedEngine
from rolecall.engines.transformers import TransformersEngine
from rolecall.models import Loaded

__all__ = ["Engine", "create"]

# Engines with weights of their own. By name: each imports what is installed only where it is used.
CLASSES = {
    "vllm": "rolecall.engines.vllm:VLLMEngine",
    "vllm, LoRA adapter": "rolecall.engines.vllm_lora:VLLMAdapterEngine",
    "sglang": "rolecall.engines.sglang:SGLangEngine",
    "http://": "rolecall.engines.remote:RemoteEngine",
}


def create(config: Config, loaded: Loaded | None = None) -> Engine:
    """The engine that ``config.rollout`` names.

    "native" is one of two: on a GPU the one with pages and captured steps. It becomes "transformers", with a warning,
    on a model that does not take Rolecall's attention function.

    Args:
        loaded: the model that "native" and "transformers" work on (its parameters are used, not copied). None: they
            load one. Other engines have weights of their own in any case.

    Raises:
        UserError: not installed, or a model that it cannot take.
    """
    rollout = config.rollout
    name = "http://" if rollout.remote else rollout.engine
    if rollout.lora == "adapter":
        name += ", LoRA adapter"
    if name in CLASSES:
        return pkgutil.resolve_name(CLASSES[name])(config)
    loaded = loaded or models.load(config.model, models.device())
    if name == "transformers":
        return TransformersEngine(loaded, rollout.max_sequences)
    if loaded.why is not None:
        warnings.warn(f"Generating with transformers' generate, not the native engine: {loaded.why}", stacklevel=2)
        return TransformersEngine(loaded, rollout.max_sequences)
    native = PagedEngine if loaded.model.device.type == "cuda" else NativeEngine
    return native(loaded, rollout.max_sequences)
