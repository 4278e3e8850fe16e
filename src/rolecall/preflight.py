"""``rolecall doctor RECIPE``: does the run's model suit Rolecall, and how much memory of a GPU do its processes need?

Only the model's configuration is read, no weights: a laptop can ask on behalf of a cluster.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from rolecall import config as configuration
from rolecall import models
from rolecall.config import Config, Pool
from rolecall.doctor import Check, Status
from rolecall.engines.cache import token_bytes
from rolecall.errors import UserError
from rolecall.models import lora
from rolecall.models.attention import why_by_configuration, why_unsupported
from rolecall.models.load import INCONSISTENT, check_not_quantized, count_parameters
from rolecall.overrides import put
from rolecall.training.memory import LEAST, SHARE, activation_bytes, fitting, passing_bytes
from rolecall.training.optimizer import bytes_to_train, check_moments

GPUS = (24, 48, 80, 140)  # GiB of common ones
CONTEXT = 2**30  # bytes of a GPU that CUDA keeps for itself
TRIAL_VOCABULARY, TRIAL_INNER = 256, 128
LORA = {"model.lora_rank": 32}
LARGER = "a smaller model, or more GPUs: processes in cluster.pools"
SCALE = 5  # of a trial's weights: small ones would show no cap on scores or logits


@dataclass(frozen=True)
class Update:
    """What a role takes while it computes.

    Args:
        fixed: bytes, by part, whatever the micro-batches.
        per_token: bytes of activations for each token of a micro-batch.
        configured: the role's ``micro_tokens``.
        longest: tokens of the longest sample; over the budget it goes alone, whole.
    """

    fixed: dict[str, int]
    per_token: int
    configured: int | None
    longest: int

    def micro_tokens(self, free: int) -> int:
        """Most tokens of a micro-batch with so many bytes free; 0: these are too few."""
        left = free - sum(self.fixed.values())
        if self.configured is None:
            return fitting(left, self.per_token) if self.longest * self.per_token <= SHARE * left else 0
        return self.configured if max(self.configured, self.longest) * self.per_token <= left else 0


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


def checks(config: Config) -> Iterator[Check]:
    """What ``rolecall doctor`` says of a run: the model, its attention, and each process with the GPUs that it fits on.

    Raises:
        UserError: the model cannot be had, or ``train`` would refuse the configuration.
    """
    config.check_trainable()
    model: Any = models.outline(config.model, "cuda")
    check_not_quantized(model.config, config.model.path)
    models.load_tokenizer(config.model)  # as a run does, and refuses a model without a chat template
    for role in {"actor", "critic"} & set(config.roles):
        check_moments(getattr(config, role))
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    kind = f"{type(model).__name__}, {millions:,.1f}M parameters, on a GPU in {str(model.dtype).removeprefix('torch.')}"
    yield Check("Run", "model", "ok", kind)
    yield _attention(config.model)
    free = {f"on {gib} GiB": free_on(gib) for gib in GPUS}
    if torch.cuda.is_available():
        free = {"on this GPU": torch.cuda.mem_get_info()[0]}
    found = processes(config)
    ways = {} if all(process.fits(left) for process in found for left in free.values()) else _lighter(config)
    for process in found:
        needs = [f"holds {_parts(process.stays)}"]
        for role, update in process.updates.items():
            passing = f"{_parts(update.fixed)} and {update.per_token / 2**20:.2f} MiB a token"
            needs.append(f"the {role} computes in at most {passing}")
        yield Check("Run", process.name, "ok", "; ".join(needs))
        for where, left in free.items():
            yield _verdict(process, where, left, ways)


def _verdict(process: Process, where: str, free: int, ways: dict[str, dict[str, Process]]) -> Check:
    """Does it fit, and if not, which of the ``ways`` (see ``_lighter``) is the first that makes it?"""
    if process.fits(free):
        return Check("Run", where, "ok", _fit(process, free))
    status: Status = "missing" if torch.cuda.is_available() else "optional"
    for words, lighter in ways.items():
        if lighter[process.name].fits(free):
            return Check("Run", where, status, "too small", f"{words} gives {_fit(lighter[process.name], free)}")
    return Check("Run", where, status, "too small", LARGER)


def _attention(config: configuration.Model) -> Check:
    try:
        reason = why_transformers(config)
    except UserError as error:  # of a small one: the run's own may do
        return Check("Run", "attention", "optional", f"known only in a run, since no small one can be tried: {error}")
    if reason is None:
        return Check("Run", "attention", "ok", "Rolecall's: packed micro-batches, the native engine")
    return Check("Run", "attention", "optional", f"transformers', padded, with its generate: {reason}")


def _parts(parts: dict[str, int]) -> str:
    """Their sum, and each of them."""
    each = ", ".join(f"{name} {size / 2**30:.1f}" for name, size in parts.items())
    return f"{sum(parts.values()) / 2**30:.1f} GiB ({each})"


def _fit(process: Process, free: int) -> str:
    """How a process fits into so many bytes."""
    tokens = sorted(set(process.micro_tokens(free).values()))
    return f"micro-batches of {' and '.join(f'{count:,}' for count in tokens)} tokens" if tokens else "large enough"


def _lighter(config: Config) -> dict[str, dict[str, Process]]:
    """What may be set for less memory, what costs least first, with the processes, by name, that it leads to."""
    trained = sorted({"actor", "critic"} & set(config.roles))
    small = {f"{role}.micro_tokens": LEAST for role in trained if getattr(config, role).micro_tokens}
    recompute = {f"{role}.checkpointing": True for role in trained}
    eight_bit = {f"{role}.optimizer": "adamw-8bit" for role in trained}
    found: dict[str, dict[str, Process]] = {}
    for way in ({}, recompute, recompute | eight_bit, LORA, LORA | recompute):
        changes: dict[str, Any] = small | way
        raw = config.model_dump()
        for key, value in changes.items():
            put(raw, key, value)
        with suppress(UserError):  # the run may not be given it
            words = " ".join(f"--{key} {str(value).lower()}" for key, value in changes.items())
            found[words] = {process.name: process for process in processes(Config(**raw))}
    return found


def free_on(gib: int) -> int:
    """Bytes that a process finds free on a GPU of ``gib`` GiB that is all its own."""
    return gib * 2**30 - CONTEXT


def processes(config: Config) -> list[Process]:
    """Those that hold a model, one of each kind (replicas need the same, and so do shards), and all that share a GPU.

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
    alone = all(pool.processes == 1 for pool in config.pools.values()) and config.rollout.replicas == 1
    if len(found) > 1 and alone and config.rollout.tensor_parallel == 1 and torch.cuda.device_count() < 2:
        return [*found.values(), _together(list(found.values()), config)]
    return list(found.values())


def _together(several: list[Process], config: Config) -> Process:
    """Processes that share one GPU; an engine that sleeps while the others compute holds nothing then."""
    awake = [one for one in several if one.updates or "reference" in one.stays or not config.rollout.sleep]
    return Process(
        "all on one GPU",
        {part: size for one in awake for part, size in one.stays.items()},
        {role: update for one in awake for role, update in one.updates.items()},
    )


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
    weights, added = _bytes(module), bytes_to_train(module, settings)
    if shares > 1:
        weights -= added["FP32 masters"] // 4 * module.dtype.itemsize
    parts = {"weights": weights, "FP32 masters": added["FP32 masters"], "moments": added["moments"]}
    return {f"{role}'s {part}": size // shares for part, size in parts.items() if size}


def _update(module: Any, settings: configuration.Optimizer, longest: int, shares: int, backward: bool = True) -> Update:
    fixed = passing_bytes(module, shares, backward=backward)
    return Update(fixed, activation_bytes(module, settings.checkpointing, backward), settings.micro_tokens, longest)


def _bytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


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
    architecture = outline.config  # nobody else's: it may be changed
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
