"""What the Actor and the Critic share: a model, its optimizer, and how samples become optimizer steps."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed.checkpoint as distributed_checkpoint
from torch import Tensor, nn

from rolecall import config as configuration
from rolecall import models
from rolecall.config import Config
from rolecall.errors import UserError
from rolecall.models import Loaded, lora
from rolecall.samples import Sample, by_group
from rolecall.training import checkpoint, memory
from rolecall.training.optimizer import Optimizer, bytes_to_train
from rolecall.training.packing import MicroBatch
from rolecall.training.sharding import NOTHING, shard

Metrics = dict[str, float]

SHARDS = "shards"  # in a sharded role's checkpoint, the folder with each rank's weights and optimizer state


@dataclass(frozen=True)
class Totals:
    """What the losses of a mini-batch's micro-batches divide by, so that they add up to the mini-batch's own.

    ``tokens``, ``sequences``: action tokens, and samples that have any, before anything is skipped.
    ``computed``: action tokens that are not skipped.
    """

    tokens: int
    sequences: int
    computed: int


Loss = Callable[[MicroBatch, Totals], tuple[Tensor, Mapping[str, float | Tensor]]]


class Trained:
    """A role whose model is in training.

    Dropout is never on (the model stays in eval mode): the ratio of a policy to itself must be 1.
    In a process that has met others (``sharding.meet``) the model is sharded: every call is then one of all ranks.

    Args:
        config: the run's.
        settings: the section for this role's optimizer and mini-batches.
        loaded: the model that micro-batches are made for.
        module: what is trained and saved (that model, or its backbone with another head): those of its parameters
            that require a gradient.
        waits: first steps of the run that do not update this role.

    Raises:
        UserError: gradients and optimizer state do not fit in memory.
    """

    def __init__(
        self, config: Config, settings: configuration.Optimizer, loaded: Loaded, module: nn.Module, waits: int = 0
    ):
        self.config, self.settings, self.loaded, self.module = config, settings, loaded, module
        self.device = next(module.parameters()).device
        self.shards = shard(module)
        self._role = type(self).__name__.lower()
        what = f"training the {self._role} (gradients and Adam, with moments to come of other roles here)"
        needed = sum(bytes_to_train(module, settings).values()) + memory.expected()
        models.check_memory(needed, what, self.device)
        self._planned = settings.epochs * min(settings.minibatches, config.rollout.prompts)  # groups are not split
        updates = max(config.run.steps - waits, 0)
        self.optimizer = Optimizer(module.parameters(), settings, self._planned * updates)
        memory.expect(self.optimizer)
        self.updates = 0
        if settings.checkpointing:
            model: Any = loaded.model
            model.gradient_checkpointing_enable({"use_reentrant": False})

    @cached_property
    def micro_tokens(self) -> int:
        """Most tokens of a micro-batch; where it is not configured, what fits when it is first asked for."""
        return memory.micro_tokens(self.settings, self.loaded.model, self.device, self.shards)

    def take_steps(self, samples: list[Sample], keep: Callable[[Sample], bool], loss: Loss) -> list[Metrics]:
        """``epochs`` passes over the samples, an optimizer step for each of the ``minibatches``.

        Args:
            keep: False for a sample that adds nothing to the loss or its gradient: it is not computed, only counted in
                the totals. A mini-batch with no other samples takes no step.
            loss: of a micro-batch, and metrics. Both add up over the micro-batches of a mini-batch (divided by its
                totals), but metrics whose names end in "max" are maxima.

        Returns:
            each step's metrics, with ``grad_norm``, ``lr``, and the action tokens ``computed`` and ``skipped``.

        Raises:
            RunError: a gradient is not finite, or out of memory.
        """
        steps = []
        batches = list(self._minibatches(samples))
        for batch in batches:
            kept = [sample for sample in batch if keep(sample)]
            if not kept:
                self.optimizer.skipped += 1
            else:
                counts = [sample.action_tokens for sample in batch]
                totals = Totals(sum(counts), sum(n > 0 for n in counts), sum(sample.action_tokens for sample in kept))
                with self._advising(kept, backward=True):
                    parts: list[Metrics] = self.shards.gather(self._accumulate(kept, totals, loss))
                    metrics = combine(parts) | self.optimizer.step()
                steps.append(metrics | {"computed": totals.computed, "skipped": totals.tokens - totals.computed})
        self.optimizer.skipped += max(0, self._planned - len(batches))  # fewer groups came than were planned for
        self.updates += 1
        return steps

    def _minibatches(self, samples: list[Sample]) -> Iterator[list[Sample]]:
        """Parts of whole groups, split by the seed and the count of updates, whatever the order of the samples."""
        groups = by_group(samples)
        for epoch in range(self.settings.epochs):
            order = sorted(groups)
            random.Random(f"{self.config.run.seed}/{self.updates}/{epoch}").shuffle(order)
            for part in range(min(self.settings.minibatches, len(order))):
                yield [sample for group in order[part :: self.settings.minibatches] for sample in groups[group]]

    def _accumulate(self, samples: list[Sample], totals: Totals, loss: Loss) -> list[Metrics]:
        """Backward through every micro-batch of this rank; their metrics, combined (none where it has none)."""
        self.optimizer.zero_grad()  # of an update that was interrupted, or ran out of memory
        parts: list[Mapping[str, float | Tensor]] = []
        with self._recomputing():
            for micro in self.shards.micro_batches(samples, self.loaded, self.micro_tokens):
                value, metrics = self.shards.run(partial(loss, micro, totals))
                (value * self.shards.count).backward()  # FSDP2 takes the mean over the ranks, we the sum
                if micro.samples[0] is not NOTHING:
                    parts.append(metrics)
        return [combine(parts)] if parts else []

    def _advising(self, samples: list[Sample], *, backward: bool = False) -> AbstractContextManager[None]:
        """See ``memory.advising``. ``backward``: these are trained on."""
        other = f"--{self._role}.checkpointing true" if backward and not self.settings.checkpointing else ""
        return memory.advising(self._role, self.micro_tokens, samples, other)

    @contextmanager
    def _recomputing(self) -> Iterator[None]:
        """Activation checkpointing on. transformers' layers do it in training mode, so they alone are put in it."""
        layers = [module for module in self.module.modules() if getattr(module, "gradient_checkpointing", False)]
        for layer in layers:
            layer.training = True
        try:
            yield
        finally:
            for layer in layers:
                layer.training = False

    def save(self, folder: str | Path) -> None:
        """Write all state into ``folder``: trained weights (tied ones once), optimizer, counters, random generators."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        state = {"settings": self._settings(), "updates": self.updates, "rng": checkpoint.rng_state()}
        optimizer = self.optimizer.state_dict()
        if self.shards.count > 1:
            distributed_checkpoint.save(self._sharded_state(), checkpoint_id=folder / SHARDS)
            del optimizer["adam"]["state"]
        else:
            weights = {name: parameter.detach().contiguous() for name, parameter in self._trained_parameters()}
            safetensors.torch.save_file(weights, folder / "weights.safetensors")
        if self.shards.rank == 0:
            torch.save(state, folder / "state.pt")
            torch.save(optimizer, folder / "optimizer.pt")

    def load(self, folder: str | Path) -> None:
        """Continue exactly where ``save`` was called. Weights change in place: an engine that shares them follows.

        (On a GPU later steps are bit for bit the same only under ``torch.use_deterministic_algorithms``.)

        Raises:
            UserError: the checkpoint is of another model, other LoRA settings, another optimizer, or of one process
                where this is one of several (or the reverse).
        """
        folder = Path(folder)
        state = torch.load(folder / "state.pt", map_location="cpu", weights_only=True)
        if state["settings"] != (configured := self._settings()):
            raise UserError(
                f"{folder} was trained with {_fields(state['settings'])}: it cannot be resumed with "
                f"{_fields(configured)}. Leave these as they were, or start a new run from its model "
                "(--model.path RUN/model)."
            )
        sharded = self.shards.count > 1
        if sharded != (folder / SHARDS).is_dir():
            raise UserError(
                f"{folder} was saved by {'one process' if sharded else 'several processes'}: it cannot be resumed with "
                f"cluster.pools.NAME.processes = {self.shards.count}. Set {'1' if sharded else 'any number over 1'}, "
                "or start a new run from its model (--model.path RUN/model)."
            )
        optimizer = torch.load(folder / "optimizer.pt", map_location="cpu", weights_only=True)
        if sharded:
            shards = self._sharded_state()
            distributed_checkpoint.load(shards, checkpoint_id=folder / SHARDS)
            optimizer["adam"]["state"] = shards["adam"]
        else:
            weights = safetensors.torch.load_file(folder / "weights.safetensors", device=str(self.device))
            here = {name: list(parameter.shape) for name, parameter in self._trained_parameters()}
            there = {name: list(weight.shape) for name, weight in weights.items()}
            if other := sorted(name for name in here.keys() | there if here.get(name) != there.get(name)):
                name = other[0]
                raise UserError(
                    f"{folder} holds another model than model.path = {self.config.model.path!r}: {name} is "
                    f"{there.get(name, 'absent')} there and {here.get(name, 'absent')} here. Leave model.path as it "
                    "was, or start a new run."
                )
            with torch.no_grad():
                for name, parameter in self._trained_parameters():
                    parameter.copy_(weights[name])
        self.optimizer.load_state_dict(optimizer)
        self.updates = state["updates"]
        checkpoint.set_rng_state(state["rng"])

    def _sharded_state(self) -> dict[str, Any]:
        """What each rank has a shard of, in the very tensors that are in use."""
        self.optimizer.allocate()
        weights = {name: parameter.detach() for name, parameter in self._trained_parameters()}
        return {"weights": weights, "adam": self.optimizer.state_dict()["adam"]["state"]}

    def _settings(self) -> dict[str, Any]:
        """Those that a checkpoint's tensors belong to."""
        model = {f"model.{name}": value for name, value in lora.identity(self.config.model).items()}
        return model | {f"{self._role}.optimizer": self.settings.optimizer}

    def _trained_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        named = self.module.named_parameters()
        return ((name, parameter) for name, parameter in named if parameter.requires_grad)


def _fields(settings: dict[str, Any]) -> str:
    return ", ".join(f"{name} = {value!r}" for name, value in settings.items())


def combine(parts: Sequence[Mapping[str, float | Tensor]], weights: Sequence[float] | None = None) -> Metrics:
    """The (weighted) sum of each metric over the parts; the maximum of those whose names end in "max"."""
    weights = weights or [1.0] * len(parts)
    combined = {}
    for name in parts[0]:
        values = [part[name] for part in parts]
        largest = name.endswith("max")
        combined[name] = float(max(values) if largest else sum(w * v for w, v in zip(weights, values, strict=True)))
    return combined


def mean_over_steps(steps: list[Metrics]) -> Metrics:
    """Metrics of an update from those of its steps, weighted by the action tokens that each computed."""
    total = sum(step["computed"] for step in steps)
    return combine(steps, [step["computed"] / total for step in steps])
