"""What fills one GPU, by part: generation and training in one process; and whether a smaller GPU would do."""

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks import _gpu, _models, write
from benchmarks._gpu import PROMPT, Part, Row
from rolecall import models, preflight
from rolecall.config import Config
from rolecall.errors import UserError, check_known
from rolecall.roles.actor import Actor
from rolecall.roles.rollout import Rollout
from rolecall.samples import Request, Sampling

PROMPTS, GROUP, TOKENS, RANK = 32, 8, 256, 32
TRAINS: dict[str, tuple[str, dict[str, Any]]] = {
    "all": ("all weights", {}),
    "lean": ("all, checkpointing, 8-bit moments", {"actor": {"checkpointing": True, "optimizer": "adamw-8bit"}}),
    "lora": (f"LoRA of rank {RANK}", {"model": {"lora_rank": RANK}}),
}
TINY = 2, 16  # prompts and tokens of the model "tiny", with which a CPU tries all of this
ROUNDS = 2  # of generation and update: the first allocates what the second finds there
PARTS = {
    "weights": "weights",
    "masters": "FP32 masters, adapter",
    "adam": "Adam's moments",
    "engine": "what the engine keeps",
    "generate": "generation, over that",
    "update": "update, over that",
}
KEYS = ("size", "trains", "gib")


def run(
    out: Path,
    size: Sequence[str] = ("3B", "7B"),
    trains: Sequence[str] = ("all", "lora"),
    gib: Sequence[int] = (0,),
) -> dict[str, Any]:
    """Add to ``memory-h200.json`` and ``.md`` under ``out``. On a GPU; ``--size tiny`` tries it without one.

    What does not fit, as ``rolecall doctor`` counts, is left out.

    Args:
        trains: all; lean (all, with checkpointing and 8-bit moments); lora.
        gib: sizes of GPUs to stand in for: the rest of this one is filled first; 0: this one, whole.
    """
    _models.check_sizes(size)
    for way in trains:
        check_known("trains", way, TRAINS)
    has = _total()
    if wrong := [one for one in gib if not 0 <= one <= has]:
        raise UserError(f"--gib {wrong[0]}: there are {has}.")
    name = f"memory-{_gpu.machine()}"
    result: dict[str, Any] = {"rows": []} | _gpu.earlier(name, out)
    cases = product(size, trains, [room or has for room in gib])
    predicted = {case: tokens for case in cases if (tokens := _predict(*case))}
    parts = [Part("benchmarks.memory", dict(zip(KEYS, case, strict=True))) for case in predicted]
    for row, peak in _gpu.measure(parts):
        row |= {"predicted": predicted[tuple(row[key] for key in KEYS)], "peak_gib": peak - row.pop("ballast")}
        row = _gpu.merge(result["rows"], row, KEYS)
        print(_line(row), flush=True)
        write(name, result, _table(result), out, "rolecall bench memory")
    return result


def measure(size: str, trains: str, gib: int) -> Iterator[Row]:
    """The row of one model: GiB by part, seconds of the last generation and update."""
    _models.make(size)
    ballast = _ballast(gib)
    before = _held()
    config = _config(size, trains)
    actor = Actor(config)
    weights = sum(
        p.numel() * p.itemsize for p in actor.loaded.model.parameters() if trains != "lora" or not p.requires_grad
    )
    row: Row = {"size": size, "trains": trains, "gib": gib, "ballast": ballast.nbytes / 2**30}
    row |= {"weights": weights / 2**30, "masters": _held() - before - weights / 2**30}
    rollout = Rollout(config, actor)
    sampling = Sampling(config.rollout.max_tokens)
    for number in range(ROUNDS):
        texts = _gpu.token_prompts(config.rollout.prompts, seed=number)
        requests = [Request(i, str(i), text, GROUP, number, sampling) for i, text in enumerate(texts)]
        with _watched(row, "generate", "engine"):
            samples = rollout.generate(requests)
        for sample in samples:
            sample.advantages = [1.0 if sample.index % 2 else -1.0] * len(sample.response)
        with _watched(row, "update", "adam"):
            actor.update(samples)
        rollout.share_weights(number + 1)
    yield row | {"micro_tokens": actor.micro_tokens}


def _config(size: str, trains: str, folder: Path | None = None) -> Config:
    prompts, tokens = TINY if size == "tiny" else (PROMPTS, TOKENS)
    _, settings = TRAINS[trains]
    return Config(
        model={"path": str(folder or _models.make(size))} | settings.get("model", {}),
        data={"max_prompt_tokens": PROMPT},
        rollout={"prompts": prompts, "group_size": GROUP, "max_tokens": tokens, "max_sequences": prompts * GROUP},
        actor=settings.get("actor", {}),
    )


def _predict(size: str, trains: str, gib: int) -> int:
    """Tokens of micro-batches on a GPU of that size, as ``rolecall doctor`` counts; 0: it is too small."""
    with tempfile.TemporaryDirectory() as folder:
        _models.outline(size, Path(folder))
        (process,) = preflight.processes(_config(size, trains, Path(folder)))
    return process.micro_tokens(preflight.free_on(gib))["actor"]


def _total() -> int:
    """GiB of the GPU, or of this machine's memory."""
    on_gpu = torch.cuda.is_available()
    total = torch.cuda.get_device_properties(0).total_memory if on_gpu else psutil.virtual_memory().total
    return round(total / 2**30)


def _ballast(gib: int) -> torch.Tensor:
    """What has to be taken so that a GPU of ``gib`` GiB is left: nothing of the whole one, or where there is none."""
    taken = 0
    if torch.cuda.is_available() and gib < _total():
        taken = max(0, torch.cuda.mem_get_info()[0] - preflight.free_on(gib))
    return torch.empty(taken, dtype=torch.uint8, device=models.device())


@contextmanager
def _watched(row: Row, name: str, kept: str) -> Iterator[None]:
    """Note what the block takes at its most (GiB and seconds), and what of it is ``kept`` from its first time on."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    before, start = _held(), time.perf_counter()
    yield
    _models.synchronize()
    after = _held()
    row |= {f"{name}_s": time.perf_counter() - start, name: models.peak_memory(models.device()) / 2**30 - after}
    row.setdefault(kept, after - before)


def _held() -> float:
    if torch.cuda.is_available():
        return torch.cuda.memory_allocated() / 2**30
    return psutil.Process().memory_info().rss / 2**30


def _line(row: Row) -> str:
    cells = [row["size"], TRAINS[row["trains"]][0], str(row["gib"])]
    cells += [f"{row['predicted']:,}", f"{row['micro_tokens']:,}" if "micro_tokens" in row else ""]
    cells += [f"{row[part]:.1f}" for part in PARTS]
    cells += [f"{row['peak_gib']:.1f}", f"{row['generate_s']:.2f}", f"{row['update_s']:.2f}", _gpu.commits(row)]
    return f"| {' | '.join(cells)} |"


def _table(result: dict[str, Any]) -> str:
    heads = ["size", "trains", "GPU of", "micro-batches predicted", "in the run", *PARTS.values()]
    heads += ["peak of the GPU", "generate, s", "update, s", "commit"]
    figures = (
        f"GiB by part: {PROMPTS} prompts x {GROUP} samples, {PROMPT} + {TOKENS} tokens, random weights of Qwen2's "
        "sizes in bf16, the native engine on the Actor's weights in one process. The peak of the GPU is all that "
        "is held on it, torch's unused blocks and CUDA's own included. Tokens of micro-batches as `rolecall "
        "doctor` predicts them, and as they came out."
    )
    rows = sorted(result["rows"], key=lambda row: tuple(row[key] for key in KEYS))
    return _gpu.table(figures, heads, map(_line, rows))


if __name__ == "__main__":
    _gpu.print_rows(measure)
