"""``rolecall doctor RECIPE``: does the run's model suit Rolecall, and how much memory of a GPU do its processes need?

Only the model's configuration is read, no weights: a laptop can ask on behalf of a cluster.
"""

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from rolecall import config as configuration
from rolecall import models
from rolecall.config import Config, Pool
from rolecall.engines.cache import token_bytes
from rolecall.errors import UserError
from rolecall.models import lora
from rolecall.models.attention import why_by_configuration, why_unsupported
from rolecall.models.load import INCONSISTENT, count_parameters
from rolecall.training.memory import SHARE, activation_bytes, fitting, head_bytes
from rolecall.training.optimizer import moment_bytes

TRIAL_VOCABULARY, TRIAL_INNER = 256, 128
SCALE = 5  # of a trial's weights: small ones would show no cap on scores or logits


@dataclass(frozen=True)
class Update:
    """What a role takes while it computes: ``fixed`` bytes, by part, and ``token`` bytes for each token.

    Args:
        tokens: of a micro-batch, where they are configured.
        longest: tokens of a sample, which is never cut: over those of a micro-batch it goes alone.
    """

    fixed: dict[str, int]
    token: int
    tokens: int | None
    longest: int

    def micro_tokens(self, free: int) -> int:
        """Of a micro-batch, with so many bytes free; 0: too few."""
        left = free - sum(self.fixed.values())
        if self.tokens is None:
            return fitting(left, self.token) if self.longest * self.token <= SHARE * left else 0
        return self.tokens if max(self.tokens, self.longest) * self.token <= left else 0


@dataclass(frozen=True)
class Process:
    """One process of a run: the bytes that stay on its GPU, by part, and its updates, of which one runs at a time."""

    name: str
    stays: dict[str, int]
    updates: dict[str, Update]

    def micro_tokens(self, free: int) -> dict[str, int]:
        """Tokens of each update's micro-batches on a GPU with so many bytes free; 0: too few."""
        left = free - sum(self.stays.values())
        return {role: update.micro_tokens(left) for role, update in self.updates.items()}

    def fits(self, free: int) -> bool:
        return sum(self.stays.values()) <= free and all(self.micro_tokens(free).values())


def processes(config: Config) -> list[Process]:
    """Those that hold a model, one of each kind: replicas need the same, and so do shards.

    Raises:
        UserError: the model cannot be had, or not with the adapter.
    """
    model = models.outline(config.model, "cuda")
    whole = _bytes(model)
    if config.model.lora_rank:
        lora.add(model, config.model, config.run.seed)
    found: dict[tuple[str, ...], Process] = {}
    for name, pool in config.pools.items():
        if pool.roles != ["reward"]:
            found.setdefault(tuple(pool.roles), _process(name, pool, config, model, whole))
    return list(found.values())


def _process(name: str, pool: Pool, config: Config, model: Any, whole: int) -> Process:
    """``whole``: bytes of the model's weights, without an adapter."""
    roles, shares = set(pool.roles), pool.processes
    longest = config.data.max_prompt_tokens + config.rollout.max_tokens
    stays: dict[str, int] = {}
    updates: dict[str, Update] = {}
    for role, module in (("actor", model), ("critic", model.base_model)):
        if role in roles:
            settings = getattr(config, role)
            stays |= _held(role, module, settings, shares)
            updates[role] = _update(module, settings, longest, shares)
    if "reference" in roles and not ("actor" in roles and config.model.lora_rank):  # else: the Actor's without adapter
        stays["reference"] = whole // shares
        if not updates:  # else: in a smaller part of what an update takes
            updates["reference"] = _update(model, config.actor, longest, shares, backward=False)
    if "rollout" in roles and ("actor" not in roles or shares > 1):  # else: it generates from the Actor's
        parts = config.rollout.tensor_parallel if roles == {"rollout"} else 1
        stays |= {"engine's weights": whole // parts, "one response's cache": longest * token_bytes(model) // parts}
    return Process(name, stays, updates)


def _held(role: str, module: Any, settings: configuration.Optimizer, shares: int) -> dict[str, int]:
    """Bytes of what a trained role holds all the time. Sharded, it keeps what it trains in FP32 only (``shard``)."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    narrow = [parameter for parameter in trained if parameter.itemsize < 4]
    weights = _bytes(module)
    if shares > 1:
        weights -= sum(parameter.nbytes for parameter in narrow)
    masters = 4 * sum(parameter.numel() for parameter in narrow)
    parts = {"weights": weights, "FP32 masters": masters, "moments": moment_bytes(trained, settings)}
    return {f"{role}'s {part}": size // shares for part, size in parts.items() if size}


def _update(module: Any, settings: configuration.Optimizer, longest: int, shares: int, backward: bool = True) -> Update:
    trained = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
    fixed = {"gradients": 4 * trained // shares} if backward else {}
    fixed["logits"] = head_bytes(module, backward)
    if shares > 1:
        layers = [_bytes(layer) for layer in module.modules() if isinstance(layer, GradientCheckpointingLayer)]
        # What is in no layer; and of a layer its weights, the next one's, its gradients, and these in FP32.
        fixed["gathered"] = _bytes(module) - sum(layers) + (5 if backward else 2) * max(layers, default=0)
    return Update(fixed, activation_bytes(module, settings.checkpointing, backward), settings.micro_tokens, longest)


def _bytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


def lighter(process: Process, config: Config) -> str:
    """What the run could still be given, so that this process needs less memory."""
    pool, model = config.pools[process.name], config.model
    trained = {role: getattr(config, role) for role in ("actor", "critic") if role in process.updates}
    ways = []
    if trained and model.lora_rank == 0:
        ways += [] if model.batch_invariant else ["--model.lora_rank 32"]
        eight_bit = [role for role in trained if trained[role].optimizer == "adamw" and pool.processes == 1]
        ways += [f"--{role}.optimizer adamw-8bit" for role in eight_bit]
    ways += [f"--{role}.checkpointing true" for role in trained if not trained[role].checkpointing]
    if pool.roles != ["rollout"]:
        ways.append("more processes in cluster.pools")
    elif config.rollout.engine == "vllm":
        ways.append("a higher --rollout.tensor_parallel")
    return f"less is needed with {' or '.join([*ways, 'a lower --rollout.max_tokens', 'a smaller --model.path'])}"


def why_transformers(config: configuration.Model) -> str | None:
    """Why transformers generates with the model, and micro-batches are padded; None: they need not be.

    Tried as at the start of a run (see ``why_unsupported``), but with random weights, a layer of each kind, narrow
    inside (experts, too), and few tokens.

    Raises:
        UserError: the model cannot be had, none so small can be made, or even that needs more memory than there is.
    """
    outline: Any = models.outline(config, "cpu")
    if reason := why_by_configuration(outline):
        return reason
    architecture = deepcopy(outline.config)
    shape = architecture.get_text_config()
    kinds = list(dict.fromkeys(getattr(shape, "layer_types", None) or []))
    shape.num_hidden_layers = max(1, len(kinds))
    if kinds:
        shape.layer_types = kinds
    for name, size in shape.to_dict().items():
        if "intermediate_size" in name and isinstance(size, int):
            setattr(shape, name, min(size, TRIAL_INNER))
    shape.vocab_size = min(shape.vocab_size, TRIAL_VOCABULARY)
    shape.pad_token_id = None  # it may lie outside
    needed = 4 * count_parameters(architecture)
    models.check_memory(needed, f"a trial of {config.path}'s attention", "cpu")
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(architecture, dtype=torch.float32).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(SCALE)
        return why_unsupported(model)
    except INCONSISTENT as error:  # so small, it breaks a rule of its kind
        raise UserError(f"{type(error).__name__}: {error}") from error
