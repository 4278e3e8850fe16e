"""AdamW on FP32 master weights, with clipping, warm-up and a schedule."""

import importlib.util
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rolecall import config as configuration
from rolecall.errors import RunError, UserError
from rolecall.training.sharding import local, whole

BLOCK = 256  # values that share a scale where a moment has 8 bits
SMALLEST = 4096  # values of a tensor whose moments have 8 bits
EIGHT_BIT = "actor.optimizer or critic.optimizer = 'adamw-8bit'"  # in refusals


class Optimizer:
    """One optimizer step from accumulated gradients.

    A weight in a narrower type than FP32 has an FP32 master: its gradients of all micro-batches add up in FP32, AdamW
    moves the master, and the weight is the master rounded. (In bfloat16 an update of 1e-6 would round away.)

    Args:
        parameters: of the model; those that require no gradient are left alone.
        config: learning rate, betas, clipping, schedule.
        total: optimizer steps planned for the whole run, which the schedule spans.

    Raises:
        UserError: 8-bit moments, but torchao is not installed, nothing may be compiled, or the weights are sharded.

    Attributes:
        steps: that were taken; warm-up counts them.
        skipped: planned steps that had nothing to learn from; the schedule counts them, too, and so ends with the run.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], config: configuration.Optimizer, total: int):
        self.config, self.total, self.steps, self.skipped = config, total, 0, 0
        self._weights = [parameter for parameter in parameters if parameter.requires_grad]
        self._masters = [_master(weight) for weight in self._weights]
        decayed = [master for master in self._masters if master.ndim > 1]  # neither norms nor biases
        others = [master for master in self._masters if master.ndim <= 1]
        self._adam = _adam(
            config, [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
        )

    @property
    def lr(self) -> float:
        """Learning rate of the next step: linear warm-up, then constant, or falling to 0 at the end of the run."""
        warmup = self.config.warmup_steps
        if self.steps < warmup:
            return self.config.lr * (self.steps + 1) / warmup
        done = min(1.0, (self.steps + self.skipped - warmup) / max(1, self.total - warmup))
        fall = {"constant": 1.0, "linear": 1.0 - done, "cosine": 0.5 * (1.0 + math.cos(math.pi * done))}
        return self.config.lr * fall[self.config.schedule]

    def zero_grad(self) -> None:
        """Forget what gradients there are."""
        self._adam.zero_grad()

    @torch.no_grad()
    def step(self) -> dict[str, float]:
        """Clip, update and clear the gradients.

        Returns:
            ``grad_norm`` (before clipping) and ``lr`` of this step.

        Raises:
            RunError: the gradient norm is not finite; nothing was changed.
        """
        gradients = [master.grad for master in self._masters if master.grad is not None]
        norm = whole(nn.utils.get_total_norm(gradients))
        if not norm.isfinite():
            self.zero_grad()
            raise RunError(
                f"Gradient norm is {norm.item()} at optimizer step {self.steps}; the weights were left as they are. "
                "Lower the learning rate, or look at the rewards and log-probabilities of this step."
            )
        nn.utils.clip_grads_with_norm_(self._masters, self.config.grad_clip, norm)
        lr = self.lr
        for group in self._adam.param_groups:
            # A number would be a constant of the 8-bit optimizer's compiled step.
            group["lr"] = torch.tensor(lr) if self.config.optimizer == "adamw-8bit" else lr
        self._adam.step()
        self.zero_grad()
        if mastered := self._mastered():
            weights, masters = zip(*mastered, strict=True)
            torch._foreach_copy_(weights, masters)
        self.steps += 1
        return {"grad_norm": norm.item(), "lr": lr}

    def allocate(self) -> None:
        """Make Adam's state where there is none yet, as it is before the first step."""
        if self._adam.state:
            return
        for group in self._adam.param_groups:
            group["lr"] = 0.0
        for master in self._masters:
            master.grad = torch.zeros_like(master)
        self._adam.step()
        self.zero_grad()
        for state in self._adam.state.values():
            state["step"].zero_()

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs besides the weights; masters only where they are not the weights themselves."""
        masters = [master for _, master in self._mastered()]
        counts = {"steps": self.steps, "skipped": self.skipped}
        return {"adam": self._adam.state_dict(), "masters": masters} | counts

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state_dict``, under this configuration: betas and weight decay may be others than then."""
        self._adam.load_state_dict(state["adam"] | {"param_groups": self._adam.state_dict()["param_groups"]})
        for (_, master), saved in zip(self._mastered(), state["masters"], strict=True):
            master.copy_(saved)
        self.steps, self.skipped = state["steps"], state["skipped"]

    def unallocated(self) -> int:
        """Bytes that the next step will allocate for good: moments of those that have taken no step yet."""
        new = [master for master in self._masters if master not in self._adam.state]
        return moment_bytes(new, self.config)

    def _mastered(self) -> list[tuple[nn.Parameter, Tensor]]:
        pairs = zip(self._weights, self._masters, strict=True)
        return [(weight, master) for weight, master in pairs if weight is not master]


def bytes_to_train(model: nn.Module, config: configuration.Optimizer) -> dict[str, int]:
    """Bytes, by part, that training adds to the weights: FP32 gradients, masters where needed, Adam's two moments.

    Only parameters that require a gradient take any, and sharded ones for this rank's shard.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    narrow = [parameter for parameter in trained if parameter.itemsize < 4]
    gradients, masters = (4 * sum(local(parameter).numel() for parameter in some) for some in (trained, narrow))
    return {"gradients": gradients, "FP32 masters": masters, "moments": moment_bytes(trained, config)}


def moment_bytes(parameters: Iterable[Tensor], config: configuration.Optimizer) -> int:
    """Bytes of both moments of Adam for ``parameters``: FP32, or 8-bit codes with a scale a block."""

    def one(parameter: Tensor) -> int:
        size = local(parameter).numel()
        if config.optimizer == "adamw-8bit" and size >= SMALLEST and size % BLOCK == 0:
            return size + 4 * size // BLOCK + 4 * 2**8  # and what each code means
        return 4 * size

    return sum(2 * one(parameter) for parameter in parameters)


def check_moments(config: configuration.Optimizer) -> None:
    """Refuse 8-bit moments where they cannot be had.

    Raises:
        UserError: torchao is not installed, or nothing may be compiled.
    """
    if config.optimizer != "adamw-8bit":
        return
    if importlib.util.find_spec("torchao") is None:
        raise UserError(f"{EIGHT_BIT}: torchao is not installed. Install it: pip install 'rolecall[8bit]'.")
    if torch._dynamo.config.disable:
        raise UserError(
            f"{EIGHT_BIT}: torchao compiles its step, and TORCH_COMPILE_DISABLE turns compilation off. Unset that, or "
            "take 'adamw'."
        )


def _adam(config: configuration.Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    if config.optimizer == "adamw":
        return torch.optim.AdamW(groups, betas=config.betas, fused=True)
    check_moments(config)
    if any(isinstance(master, DTensor) for group in groups for master in group["params"]):
        raise UserError(
            f"{EIGHT_BIT}: it is for a model that is whole in its process, and this one is sharded. Take 'adamw'."
        )
    from torchao.optim import AdamW8bit

    return AdamW8bit(groups, betas=config.betas, block_size=BLOCK)


def _master(weight: nn.Parameter) -> Tensor:
    if weight.dtype in (torch.float32, torch.float64):
        return weight
    master = weight.detach().float()

    def accumulate(weight: Tensor) -> None:
        gradient, weight.grad = weight.grad, None
        assert gradient is not None
        if master.grad is None:
            master.grad = gradient.float()
        else:
            master.grad.add_(gradient)  # one kernel, which widens as it reads

    weight.register_post_accumulate_grad_hook(accumulate)
    return master
