"""Training alone on one GPU: ``Actor.update`` by model size, and what the vocabulary's logits cost in memory."""

import math
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import _gpu, _models, write
from benchmarks._gpu import PROMPT, Part, Row
from benchmarks._models import SIZES, Size
from rolecall.config import Config
from rolecall.errors import UserError, check_known
from rolecall.roles.actor import Actor
from rolecall.samples import Sample

PROMPTS, GROUP, RESPONSE = 32, 8, 256
SEGMENT, PART = 2048, 241  # a group of 8 such responses has 128 + 8 * 240 tokens in a packed batch
REPEATS = 3
MODES = ("ordinary", "invariant")
COLUMNS = {
    "s": ".3f", "tok_s": ",.0f", "computed_tok_s": ",.0f", "mfu": ".1%", "mfu_samples": ".1%", "peak_gib": ".1f",
    "invariant_s": ".3f",
}  # fmt: skip
HEADS = (
    "size", "tokens a micro-batch", "s", "tok/s", "computed tok/s", "MFU", "MFU, prompts repeated", "peak GiB",
    "s, invariant", "commit",
)  # fmt: skip


def run(
    out: Path,
    size: Sequence[str] = ("0.5B", "1.5B", "3B", "head"),
    micro_tokens: Sequence[int] = (8192, 16_384),
    tokens: Sequence[int] = (8192, 16384, 32768, 65536, 131072),
    mode: Sequence[str] = ("ordinary",),
) -> dict[str, Any]:
    """Add to ``training-h200.json`` and ``.md`` under ``out``. On a GPU; ``--size tiny`` tries it without one.

    Args:
        size: "head" is one layer under a whole vocabulary, for which ``tokens`` go in one micro-batch, in multiples of
            2,048.
        micro_tokens: ``actor.micro_tokens`` of the other sizes: one row for each.
        mode: "invariant" is with ``model.batch_invariant``, of which the time alone goes into the row.
    """
    for one in mode:
        check_known("mode", one, MODES)
    if "head" in size and "invariant" in mode:
        raise UserError(f"--size {','.join(size)}: of 'head' the memory is measured, not the time in invariant mode.")
    _models.check_sizes(size)
    name = f"training-{_gpu.machine()}"
    result: dict[str, Any] = {"rows": [], "head": []} | _gpu.earlier(name, out)
    shapes = [(one, tokens if one == "head" else micro_tokens) for one in size]
    parts = [
        Part("benchmarks.training", {"size": one, "micro_tokens": list(micro), "mode": by})
        for one, micro in shapes
        for by in mode
    ]
    for row, _ in _gpu.measure(parts):
        key = "head" if row["size"] == "head" else "rows"
        row["invariant_commit" if "invariant_s" in row else "commit"] = row.pop("commit")
        row = _gpu.merge(result[key], row, ("size", "micro_tokens"))
        print(_head_line(row) if key == "head" else _line(row), flush=True)
        write(name, result, _table(result), out, "rolecall bench training")
    return result


def measure(size: str, micro_tokens: list[int], mode: str) -> Iterator[Row]:
    """A row for each number of tokens in a micro-batch, in rising order."""
    path, shape = str(_models.make(size)), SIZES[size]
    matmul = _models.matmul_rate()
    torch.cuda.empty_cache()
    for micro in sorted(micro_tokens):
        groups, response = (micro // SEGMENT, PART) if size == "head" else (2 if size == "tiny" else PROMPTS, RESPONSE)
        rollout = {"prompts": groups, "group_size": GROUP, "max_tokens": response}
        model = {"path": path, "batch_invariant": mode == "invariant"}
        actor = Actor(Config(model=model, rollout=rollout, actor={"micro_tokens": micro}))
        seconds = []
        for repeat in range(REPEATS + 1):
            samples = random_samples(groups, response, shape, repeat)
            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()
            _models.synchronize()
            start = time.perf_counter()
            actor.update(samples)
            _models.synchronize()
            seconds.append(time.perf_counter() - start)
        taken = statistics.median(seconds[1:])
        if mode == "invariant":
            yield {"size": size, "micro_tokens": micro, "invariant_s": taken}
            continue
        once = groups * (PROMPT + GROUP * (response - 1))  # tokens computed, each prompt once and no last token
        each = groups * GROUP * (PROMPT + response)
        yield {
            "size": size,
            "micro_tokens": micro,
            "s": taken,
            "tok_s": each / taken,
            "computed_tok_s": once / taken,
            "mfu": groups * update_flops(shape, response, GROUP) / taken / matmul,
            "mfu_samples": groups * GROUP * update_flops(shape, response, 1) / taken / matmul,
            "peak_gib": actor.peak_memory(),
            "logits_gib": groups * GROUP * response * shape.vocabulary * 4 / 2**30,
            "matmul": matmul,
        }
        del actor
        torch.cuda.empty_cache()


def update_flops(shape: Size, response: int, group: int) -> int:
    """FLOPs to train on a prompt and ``group`` responses to it: three times the forward pass's, nothing recomputed.

    The prompt is computed once, logits are those that predict a response token.
    """
    behind = response - 1  # its last token predicts nothing
    tokens = PROMPT + group * behind
    triangle = PROMPT * (PROMPT + 1) // 2 + group * behind * (behind + 1) // 2
    pairs = triangle + group * behind * PROMPT
    return 3 * (2 * shape.body * tokens + 2 * shape.head * group * response + shape.pair_flops * pairs)


def random_samples(groups: int, response: int, shape: Size, repeat: int) -> list[Sample]:
    """Groups with random tokens and advantages, as an engine of the same random weights would give them."""
    draw = random.Random(repeat)
    uniform = -math.log(shape.vocabulary)
    samples = []
    for group in range(groups):
        prompt = draw.choices(range(10, shape.vocabulary), k=PROMPT)
        for index in range(GROUP):
            tokens = draw.choices(range(10, shape.vocabulary), k=response)
            versions, mask = [(0, response, 0)], [1] * response
            sample = Sample(
                group, index, str(group), prompt, tokens, [uniform] * response, mask, versions, "length", ""
            )
            sample.advantages = [draw.gauss()] * response
            samples.append(sample)
    return samples


def _line(row: Row) -> str:
    cells = [row["size"], f"{row['micro_tokens']:,}"]
    cells += [format(row[key], digits) if key in row else "" for key, digits in COLUMNS.items()]
    return f"| {' | '.join([*cells, _gpu.commits(row)])} |"


def _head_line(row: Row) -> str:
    return f"| {row['micro_tokens']:,} | {row['peak_gib']:.2f} | {row['logits_gib']:.1f} |"


def _table(result: dict[str, Any]) -> str:
    figures = (
        f"`Actor.update` on {PROMPTS} prompts x {GROUP} samples, {PROMPT} + {RESPONSE} tokens, random weights of "
        f"Qwen2's sizes, bf16 with FP32 masters and AdamW; median of {REPEATS} after a first one. A group's prompt "
        "is computed once: tokens a second of the samples, and of what is computed. MFU is the FLOPs of what is "
        "computed (nothing recomputed, logits of responses alone) over the rate of a large product in the same "
        "run; the other MFU counts the prompt for every sample. Invariant: with `model.batch_invariant`."
    )
    rows = sorted(result["rows"], key=lambda row: (list(SIZES).index(row["size"]), row["micro_tokens"]))
    table = _gpu.table(figures, HEADS, map(_line, rows))
    if head := result["head"]:
        lines = [
            "",
            "",
            "One layer of the 0.5B model under its vocabulary of 151,936, all tokens in one micro-batch:",
            "",
            "| tokens | peak GiB | GiB of the responses' logits, had they been kept |",
            "|---|---|---|",
            *map(_head_line, sorted(head, key=lambda row: row["micro_tokens"])),
        ]
        table += "\n".join(lines)
    return table


if __name__ == "__main__":
    _gpu.print_rows(measure)
