"""From a name in the configuration to a model on its device, or one clear message why not."""

import contextlib
import importlib
import os
import re
import resource
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from filelock import FileLock
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import logging as transformers_logging

from rolecall import config as configuration
from rolecall.errors import UserError, nearest
from rolecall.files import atomic_folder
from rolecall.models.attention import why_unsupported
from rolecall.models.compiled import compile_layers, is_compiled
from rolecall.models.invariant import make_invariant

# Each module's make(folder) writes the model.
BUILT_IN = {"smollm2-135m-instruct": "rolecall.models.smollm2", "tiny": "rolecall.models.tiny"}
SMALL = 300_000_000  # parameters of a model that on a GPU "auto" computes in float32, too, and that is not compiled
LAYOUT = "1"  # of the cache; counted up when a built-in model is made differently

# What transformers raises where a config.json contradicts itself.
INCONSISTENT = (
    StrictDataclassError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError, AssertionError, RuntimeError
)  # fmt: skip

CGROUP = Path("/sys/fs/cgroup")

transformers_logging.disable_progress_bar()  # a bar for each shard would tear the run's own display


@dataclass
class Loaded:
    """A causal model in eval mode with its tokenizer.

    ``why``: None where the model runs under Rolecall's attention layouts (packing, the native engine), else the reason.
    ``invariant``: a token's numbers are to be the same bits in any batch, see ``invariant.py``.
    """

    model: nn.Module
    tokenizer: Any
    why: str | None
    invariant: bool = False

    @property
    def packed(self) -> bool:
        return self.why is None

    @property
    def compiled(self) -> bool:
        """Whether its decoder layers run compiled (see ``compile_layers``)."""
        return any(map(is_compiled, self.model.modules()))

    @property
    def window(self) -> int | None:
        """Of the sliding attention layers; None: there are none."""
        any_model: Any = self.model
        return getattr(any_model.config.get_text_config(), "sliding_window", None)


def device() -> torch.device:
    """The GPU if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def resolve(path: str) -> str:
    """What ``transformers`` can load: a built-in name becomes its folder, made once; the rest passes through.

    Built-in models lie in $ROLECALL_CACHE, or ~/.cache/rolecall. A folder appears there whole or not at all.

    Raises:
        UserError: ``path`` is neither a folder, a built-in name, nor written like a hub id.
    """
    if path in BUILT_IN:
        return str(_make_once(path))
    if Path(path).is_dir():
        return path
    if not re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", path):
        raise UserError(f"model.path: there is no folder {path!r}. {_choices(path)}")
    return path


def _make_once(name: str) -> Path:
    cache = os.environ.get("ROLECALL_CACHE") or Path.home() / ".cache" / "rolecall"
    folder = Path(cache) / "models" / LAYOUT / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f"{name}.lock")):
        if not folder.is_dir():
            with atomic_folder(folder) as new:
                importlib.import_module(BUILT_IN[name]).make(new)
                for file in new.iterdir():
                    file.chmod(0o644)
    return folder


def load(config: configuration.Model, device: torch.device | str) -> Loaded:
    """Load a causal model in eval mode, in the configured type, on ``device``.

    Raises:
        UserError: the model cannot be had, is no causal language model or a quantized one, does not fit in memory,
            lacks weights, has no chat template, or is to be batch-invariant and cannot.
    """
    device = torch.device(device)
    path = resolve(config.path)
    architecture = _pretrained(AutoConfig, config.path)
    _check_causal(architecture, config.path)
    check_not_quantized(architecture, config.path)
    tokenizer = load_tokenizer(config)
    parameters = count_parameters(architecture)
    dtype = _dtype(config.dtype, device, parameters)
    check_memory(parameters * dtype.itemsize, f"the weights of {config.path}", device)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, output_loading_info=True)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise UserError(f"model.path: the weights of {config.path!r} cannot be loaded: {_short(error)}") from error
    model, info = loaded
    if missing := sorted(info["missing_keys"]):
        raise UserError(
            f"model.path: {config.path!r} lacks {len(missing)} of its weights ({', '.join(missing[:3])}, ...): "
            "they would be random. Check that the folder is complete."
        )
    model = model.to(device).eval()
    for module in model.modules():  # dropout would make a policy differ from itself; some read these outside eval mode
        for name, value in list(vars(module).items()):
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)
    why = why_unsupported(model)
    if config.batch_invariant:
        if device.type != "cuda" or why is not None:
            reason = why or f"it needs a GPU, and the model is on {device}"
            raise UserError(f"model.batch_invariant = true: {reason}. Leave it false.")
        make_invariant(model)
    elif why is None and device.type == "cuda" and parameters > SMALL:  # a small one would take longer to compile
        compile_layers(model)
    return Loaded(model, tokenizer, why, config.batch_invariant)


def outline(config: configuration.Model, device: torch.device | str) -> nn.Module:
    """The model as ``load`` would give it, without weights (on "meta"): names, shapes, type, ties, settings.

    Raises:
        UserError: the model cannot be had or is no causal language model.
    """
    architecture = _pretrained(AutoConfig, config.path)
    _check_causal(architecture, config.path)
    dtype = _dtype(config.dtype, torch.device(device), count_parameters(architecture))
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(architecture, dtype=dtype)
    with contextlib.suppress(OSError):  # a folder without one: transformers takes the architecture's then, too
        model.generation_config = GenerationConfig.from_pretrained(resolve(config.path))
    return model.eval()


def check_not_quantized(architecture: Any, path: str) -> None:
    """Refuse weights of a few bits, which nothing here trains or computes with.

    Raises:
        UserError: the model's configuration says that they are.
    """
    how = getattr(architecture, "quantization_config", None)
    if how is not None:
        method = how["quant_method"] if isinstance(how, dict) else how.quant_method
        raise UserError(f"model.path: {path!r} is quantized ({method}). Take the model that it was made of.")


def load_tokenizer(config: configuration.Model) -> Any:
    """The model's tokenizer, with a chat template and a padding token.

    Raises:
        UserError: it cannot be had, or there is no chat template.
    """
    tokenizer = _pretrained(AutoTokenizer, config.path)
    if config.chat_template is not None:
        file = Path(config.chat_template)
        if not file.is_file():
            raise UserError(f"model.chat_template: there is no file {config.chat_template!r}.")
        tokenizer.chat_template = file.read_text()
    if not tokenizer.chat_template:
        raise UserError(
            f"model.path: {config.path!r} has no chat template. Use the model's instruction-tuned variant, or give a "
            "Jinja file: --model.chat_template FILE."
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token  # padding is always masked, so any token will do
    return tokenizer


def _pretrained(kind: Any, path: str) -> Any:
    """``kind.from_pretrained``: what a folder or the hub says of a model, before its weights."""
    try:
        return kind.from_pretrained(resolve(path), trust_remote_code=False)
    except (OSError, *INCONSISTENT) as error:
        raise UserError(f"model.path: {path!r} cannot be loaded: {_short(error)} {_choices(path)}") from error


def count_parameters(architecture: Any) -> int:
    """A model's parameters, from its configuration alone (tied ones counted once).

    Raises:
        UserError: no model can be made by it.
    """
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(architecture)
    except INCONSISTENT as error:
        kind = type(architecture).__name__
        raise UserError(
            f"model.path: no model can be made as its config.json, a {kind}, says: {_short(error)} Check that file."
        ) from error
    return sum(parameter.numel() for parameter in model.parameters())


def check_memory(needed_bytes: int, what: str, device: torch.device | str) -> None:
    """Refuse to start what cannot end well.

    Raises:
        UserError: ``what`` needs more than is free on ``device``, with both figures.
    """
    available = free_memory(torch.device(device))
    if needed_bytes > available:
        raise UserError(
            f"Too little memory: {what} needs {needed_bytes / 2**30:.1f} GiB, and {available / 2**30:.1f} GiB are free "
            f"on {device}. Use a smaller model (model.path) or type (model.dtype), or a larger machine."
        )


def peak_memory(device: torch.device) -> int:
    """Most bytes that this process has held: on the GPU by torch's allocator, on the CPU resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def free_memory(device: torch.device) -> int:
    """Free bytes: of the GPU, with what torch holds unused in this process, or of this machine within the limit of its
    container (cgroup v2 or v1)."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    left = psutil.virtual_memory().available
    for limit, usage, stat in (
        ("memory.max", "memory.current", "memory.stat"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
    ):
        if (CGROUP / limit).is_file() and (text := (CGROUP / limit).read_text().strip()) != "max":
            cache = re.search(r"^inactive_file (\d+)$", (CGROUP / stat).read_text(), re.MULTILINE)
            droppable = int(cache[1]) if cache else 0  # file cache, which the kernel gives up before it kills
            used = int((CGROUP / usage).read_text()) - droppable
            left = min(left, int(text) - used)
    return max(left, 0)


def _dtype(name: str, device: torch.device, parameters: int) -> torch.dtype:
    if name == "auto":
        # A small model gains little from bfloat16 and learns more slowly in it, its updates being rounded away.
        return torch.bfloat16 if device.type == "cuda" and parameters > SMALL else torch.float32
    return getattr(torch, name)


def _check_causal(architecture: Any, path: str) -> None:
    known: Any = AutoModelForCausalLM._model_mapping
    made_as = ", ".join(architecture.architectures or []) or type(architecture).__name__
    causal = type(architecture) in known
    if causal and architecture.architectures:
        # A BERT or a reward model has a causal class too, whose head its folder does not hold.
        causal = known[type(architecture)].__name__ in architecture.architectures
    if not causal:
        raise UserError(f"model.path: {path!r} is a {made_as}, not a causal language model. {_choices(path)}")


def _choices(path: str) -> str:
    hint = nearest(path, BUILT_IN) if "/" not in path else ""
    return f"It may be a folder, a hub id (organisation/name), or built in: {', '.join(BUILT_IN)}." + (
        hint if hint.startswith(" Did") else ""
    )


def _short(error: Exception) -> str:
    """The first sentence or line of a library's message."""
    lines = [line.strip() for line in str(error).strip().splitlines()] or [""]
    text = " ".join(lines[: 2 if lines[0].endswith(":") else 1])  # "Validation error for field 'hidden_size':"
    return f"{type(error).__name__}: {text}".rstrip(".") + "."
