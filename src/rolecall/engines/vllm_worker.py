"""The part of the vLLM engine that runs inside vLLM's worker, where its model is. vLLM mixes it into its own class."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from rolecall.errors import RunError

Weights = list[tuple[str, Tensor]]


@dataclass(eq=False)
class Copies(TorchDispatchMode):
    """What a load from these weights does, if it is nothing but copies of them (or of parts): the next one, from the
    same memory, can do them all at once instead of finding each anew.
    """

    weights: Weights
    targets: list[Tensor] = field(default_factory=list)
    sources: list[Tensor] = field(default_factory=list)
    written: set[str] = field(default_factory=set)  # vLLM's names of what it wrote
    only_copies: bool = True

    def __post_init__(self) -> None:
        super().__init__()
        self._memory = {value.untyped_storage().data_ptr() for _, value in self.weights}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            target, source = args[:2]
            ours = source.untyped_storage().data_ptr() in self._memory and source.shape == target.shape
            self.only_copies &= ours
            self.targets.append(target)
            self.sources.append(source)
        elif func._schema.is_mutable:
            self.only_copies = False
        return func(*args, **(kwargs or {}))

    def fits(self, weights: Weights) -> bool:
        """Whether these are the same names on the same memory."""
        return self.only_copies and all(
            (name, value.data_ptr()) == (known, before.data_ptr())
            for (name, value), (known, before) in zip(weights, self.weights, strict=True)
        )


class WeightReceiver:
    """Called by name: ``expect_weights`` once, then ``begin_weights``, ``write_weights`` (in parts), ``end_weights``.

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
    _tied: set[str]  # vLLM's names of parameters that have another, too
    _copies: dict[str, Copies]  # by the first name of what is written together
    _expected: set[str]  # vLLM's names of what must be written
    _written: set[str] | None = None  # and of what was; None: no update is under way

    def expect_weights(self) -> None:
        model, on_cpu = self.model_runner.model, self.model_runner.device.type == "cpu"
        quantized = self.vllm_config.quant_config is not None
        self._repacked = on_cpu or quantized or any("MoE" in type(module).__name__ for module in model.modules())
        once = {name for name, _ in model.named_parameters()}
        every = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        self._tied = set() if on_cpu else every - once  # they share memory; on a CPU each repacks for itself
        self._expected = once
        self._copies = {}

    def begin_weights(self) -> None:
        if self._written is not None:  # the last update broke off
            self._finalize()
        if self._repacked:
            model = self.model_runner.model
            initialize_layerwise_reload(model)
            self._expected = {name for name, _ in model.named_parameters()} - self._tied
        self._written = set()

    def write_weights(self, weights: list[tuple[str, Any]]) -> None:
        assert self._written is not None
        # From another process it comes as how to open it (see ``_portable``).
        weights = [(name, value[0](*value[1]) if isinstance(value, tuple) else value) for name, value in weights]
        known = self._copies.get(weights[0][0])
        if known is not None and len(known.weights) == len(weights) and known.fits(weights):
            torch._foreach_copy_(known.targets, known.sources)
            self._written |= known.written
        else:
            self._load(weights)
        if self.model_runner.device.type == "cuda":  # all has been read: whoever sent it may use the memory again
            torch.cuda.current_stream().synchronize()

    def _load(self, weights: Weights) -> None:
        """By vLLM's own ``load_weights``, noting what can be done at once the next time."""
        assert self._written is not None
        if self._repacked:  # a layer waits for all of itself, and the memory is the sender's again before
            weights = [(name, value.clone()) for name, value in weights]
        copies = Copies(weights)
        try:
            with set_current_vllm_config(self.vllm_config), copies:
                copies.written = self.model_runner.model.load_weights(weights)
        except (ValueError, KeyError) as error:
            raise RunError(f"Weight sync: vLLM cannot place a weight: {error}") from error
        self._written |= copies.written
        if not self._repacked:
            self._copies[weights[0][0]] = copies

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
