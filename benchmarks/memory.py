"""What fills one GPU, by part: generation and training in one process, of a 3B in full and a 7B with LoRA."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks import _gpu, _models, write
from benchmarks._gpu import PROMPT, Part, Row
from rolecall import models
from rolecall.config import Config
from rolecall.errors import check_known
from rolecall.roles.actor import Actor
from rolecall.roles.rollout import Rollout
from rolecall.samples import Request, Sampling

PROMPTS, GROUP, TOKENS, RANK = 32, 8, 256, 32
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
KEYS = ("size", "trains")


def run(
    out: Path,
    size: Sequence[str] = ("3B", "7B"),
    lora: Sequence[str] = ("7B",),
) -> dict[str, Any]:
    """Add to ``memory-h200.json`` and ``.md`` under ``out``. On a GPU; ``--size tiny`` tries it without one.

    Args:
        lora: of the sizes those that train LoRA adapters; the others train all their weights.
    """
    _models.check_sizes(size)
    for one in lora:
        check_known("size", one, _models.SIZES)
    name = f"memory-{_gpu.machine()}"
    result: dict[str, Any] = {"rows": []} | _gpu.earlier(name, out)
    parts = [Part("benchmarks.memory", {"size": one, "trains": "lora" if one in lora else "all"}) for one in size]
    for row, peak in _gpu.measure(parts):
        row = _gpu.merge(result["rows"], row | {"peak_gib": peak}, KEYS)
        print(_line(row), flush=True)
        write(name, result, _table(result), out, "rolecall bench memory")
    return result


def measure(size: str, trains: str) -> Iterator[Row]:
    """The row of one model: GiB by part, seconds of the last generation and update."""
    prompts, tokens = TINY if size == "tiny" else (PROMPTS, TOKENS)
    config = Config(
        model={"path": str(_models.make(size)), "lora_rank": RANK if trains == "lora" else 0},
        rollout={"prompts": prompts, "group_size": GROUP, "max_tokens": tokens, "max_sequences": prompts * GROUP},
    )
    actor = Actor(config)
    weights = sum(
        p.numel() * p.itemsize for p in actor.loaded.model.parameters() if trains == "all" or not p.requires_grad
    )
    row: Row = {"size": size, "trains": trains, "weights": weights / 2**30, "masters": _held() - weights / 2**30}
    rollout = Rollout(config, actor)
    sampling = Sampling(tokens)
    for number in range(ROUNDS):
        texts = _gpu.token_prompts(prompts, seed=number)
        requests = [Request(i, str(i), text, GROUP, number, sampling) for i, text in enumerate(texts)]
        with _watched(row, "generate", "engine"):
            samples = rollout.generate(requests)
        for sample in samples:
            sample.advantages = [1.0 if sample.index % 2 else -1.0] * len(sample.response)
        with _watched(row, "update", "adam"):
            actor.update(samples)
        rollout.share_weights(number + 1)
    yield row


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
    cells = [row["size"], "all weights" if row["trains"] == "all" else f"LoRA of rank {RANK}"]
    cells += [f"{row[part]:.1f}" for part in PARTS]
    cells += [f"{row['peak_gib']:.1f}", f"{row['generate_s']:.2f}", f"{row['update_s']:.2f}", _gpu.commits(row)]
    return f"| {' | '.join(cells)} |"


def _table(result: dict[str, Any]) -> str:
    heads = ["size", "trains", *PARTS.values(), "peak of the GPU", "generate, s", "update, s", "commit"]
    lines = [
        _gpu.about(
            f"GiB by part: {PROMPTS} prompts x {GROUP} samples, {PROMPT} + {TOKENS} tokens, random weights of Qwen2's "
            "sizes in bf16, the native engine on the Actor's weights in one process. The peak of the GPU is all that "
            "is held on it, torch's unused blocks and CUDA's own included."
        ),
        "",
        f"| {' | '.join(heads)} |",
        f"|{'---|' * len(heads)}",
        *(_line(row) for row in sorted(result["rows"], key=lambda row: (row["size"], row["trains"]))),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    _gpu.print_rows(measure)
