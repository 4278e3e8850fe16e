"""vLLM with the Actor's LoRA adapter as it is: a sync sends the adapter alone, and vLLM's weights stay the base's."""

import copy
import tempfile
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from rolecall.config import Config
from rolecall.engines.vllm import VLLMEngine
from rolecall.errors import RunError
from rolecall.models import lora
from rolecall.sync.buckets import Entry


class VLLMAdapterEngine(VLLMEngine):
    """Every request goes through one adapter of vLLM's, which each update replaces. At the start it does nothing (0).

    vLLM computes it beside each layer, as the Actor does, in the type of the weights.
    """

    def __init__(self, config: Config):
        super().__init__(config)
        from vllm.lora.request import LoRARequest

        self.lora = LoRARequest("actor", 1, "loaded already")  # a path, which vLLM follows only where it is not
        handle = lora.add(copy.deepcopy(self.outline), config.model, seed=0)
        self._settings = handle.peft_config[lora.ADAPTER]
        self._shapes = {name: tuple(tensor.shape) for name, tensor in lora.adapter(handle)}
        self._written: dict[str, Tensor] = {}
        self.write([(name, torch.zeros(shape)) for name, shape in self._shapes.items()])
        self.finish_update(0)

    def expect(self, entries: list[Entry]) -> None:
        """See ``Engine.expect``, of the adapter's tensors under peft's names."""
        sent = {entry.name: entry.shape for entry in entries}
        for name in sorted(sent.keys() | self._shapes.keys()):
            if (given := sent.get(name)) != (own := self._shapes.get(name)):
                raise RunError(
                    f"Weight sync: {name!r} of the adapter has shape {given}, the engine's {own}; nothing was written."
                )

    def start_update(self) -> None:
        """See ``Engine.start_update``. Responses may be under way."""
        self._written = {}

    def write(self, weights: list[tuple[str, Tensor]]) -> None:
        """See ``Engine.write``."""
        self._written |= {name: tensor.to("cpu", copy=True) for name, tensor in weights}

    def finish_update(self, version: int) -> None:
        """See ``Engine.finish_update``. Responses under way go on from the new adapter, their past computed anew."""
        if missing := sorted(self._shapes.keys() - self._written.keys()):
            raise RunError(
                f"Weight sync: {len(missing)} of the adapter's tensors were not written ({missing[0]}, ...)."
            )
        from vllm.lora.request import LoRARequest

        with tempfile.TemporaryDirectory(prefix="rolecall-adapter-") as folder, self._turn():
            self._settings.save_pretrained(folder)
            safetensors.torch.save_file(self._written, Path(folder) / "adapter_model.safetensors")
            if not self.llm.add_lora(LoRARequest("actor", 1, folder, load_inplace=True)):
                raise RunError(f"Weight sync: vLLM did not take the adapter of version {version}.")
            self.llm.reset_prefix_cache(reset_running_requests=True)
            self.version = version
        self._written = {}
