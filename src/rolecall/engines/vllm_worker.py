"""The part of the vLLM engine that runs inside vLLM's worker, where its model is. vLLM mixes it into its own class."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from rolecall.errors import RunError


class WeightReceiver:
    """Called by name through ``collective_rpc``: ``begin_weights``, ``write_weights`` (in parts), ``end_weights``.

    What comes is Hugging Face names; vLLM's own ``load_weights`` splits them over ranks and fuses them. It works on
    parameters as a checkpoint has them, and many have been repacked since (all linear ones on a CPU), so vLLM's
    layerwise reload gives each layer its first shape back, repacks it when all of it is there, and copies the result
    into the memory that kernels and CUDA graphs know.
    """

    model_runner: Any
    model_config: Any
    vllm_config: Any
    _expected: set[str]  # vLLM's names of what must be written
    _written: set[str] | None = None  # and of what was; None: no update is under way

    def begin_weights(self) -> None:
        if self._written is not None:  # the last update broke off
            self._finalize()
        model = self.model_runner.model
        once = {name for name, _ in model.named_parameters()}
        again = {name for name, _ in model.named_parameters(remove_duplicate=False)} - once  # tied to one of these
        initialize_layerwise_reload(model)
        self._expected = {name for name, _ in model.named_parameters()}
        if self.model_runner.device.type != "cpu":  # where tied layers share memory; on a CPU each repacks for itself
            self._expected -= again
        self._written = set()

    def write_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        assert self._written is not None
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
        with set_current_vllm_config(self.vllm_config):
            finalize_layerwise_reload(self.model_runner.model, self.model_config)
        self._written = None
