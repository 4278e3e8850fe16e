"""The part of the vLLM engine that runs inside vLLM's worker, where its model is. vLLM mixes it into its own class."""

from typing import Any

from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from rolecall.errors import RunError


class WeightReceiver:
    """Called by name through ``collective_rpc``: ``begin_weights``, ``write_weights`` (in parts), ``end_weights``.

    What comes is Hugging Face names; vLLM's own ``load_weights`` splits them over ranks and fuses them. It works on
    parameters as a checkpoint has them. On a GPU plain ones still are, and are written in place. Others have been
    repacked since (all linear ones on a CPU, quantized ones and experts anywhere): vLLM's layerwise reload gives each
    layer its first shape back, repacks it when all of it is there, and copies the result into the memory that kernels
    and CUDA graphs know.
    """

    model_runner: Any
    model_config: Any
    vllm_config: Any
    _repacked: bool
    _expected: set[str]  # vLLM's names of what must be written
    _written: set[str] | None = None  # and of what was; None: no update is under way

    def begin_weights(self) -> None:
        if self._written is not None:  # the last update broke off
            self._finalize()
        model, on_cpu = self.model_runner.model, self.model_runner.device.type == "cpu"
        quantized = self.vllm_config.quant_config is not None
        self._repacked = on_cpu or quantized or any("MoE" in type(module).__name__ for module in model.modules())
        once = {name for name, _ in model.named_parameters()}
        again = {name for name, _ in model.named_parameters(remove_duplicate=False)} - once  # tied to one of these
        if self._repacked:
            initialize_layerwise_reload(model)
        self._expected = {name for name, _ in model.named_parameters()}
        if not on_cpu:  # where tied layers share memory; on a CPU each repacks for itself
            self._expected -= again
        self._written = set()

    def write_weights(self, weights: list[tuple[str, Tensor]]) -> None:
        assert self._written is not None
        if self._repacked:  # a layer waits for all of itself, and the memory is the sender's again before
            weights = [(name, value.clone()) for name, value in weights]
        with set_current_vllm_config(self.vllm_config):
            try:
                self._written |= self.model_runner.model.load_weights(weights)
            except (ValueError, KeyError) as error:
                raise RunError(f"Weight sync: vLLM cannot place a weight: {error}") from error

    def end_weights(self) -> None:
        assert self._written is not None
        if missing := sorted(self._expected - self._written):
            raise RunError(
                f"Weight sync: {len(missing)} of vLLM's {len(self._expected)} parameters were not written "
                f"({', '.join(missing[:3])}, ...)."
            )
        self._finalize()

    def _finalize(self) -> None:
        if self._repacked:
            with set_current_vllm_config(self.vllm_config):
                finalize_layerwise_reload(self.model_runner.model, self.model_config)
        self._written = None
