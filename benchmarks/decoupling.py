"""One GRPO run with a Reference: with transformers' generate, the native engine, and a vLLM that sleeps meanwhile."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import _gpu, _models, step, write
from benchmarks._gpu import Row
from rolecall.errors import check_known

KEYS = ("mode", "size")
KL_BETA = 0.01
MODES = {
    "transformers": "transformers' generate on the Actor's weights, one process",
    "native": "the native engine on the Actor's weights, one process",
    "vllm": "vLLM with weights of its own on the same GPU, asleep while the Actor trains",
}
HEADS = (
    "size", "generation by", "s a step", "the first, s", "by stage, s", "peak GiB", "commit",
)  # fmt: skip


def run(
    out: Path,
    size: Sequence[str] = ("0.5B", "3B"),
    mode: Sequence[str] = tuple(MODES),
    steps: int = 5,
) -> dict[str, Any]:
    """Add to ``decoupling.json`` and ``.md`` under ``out``. On a GPU; ``--size tiny`` tries it without one.

    Steps are those of the benchmark ``step``.
    """
    _models.check_sizes(size)
    for by in mode:
        check_known("mode", by, MODES)
    if "vllm" in mode:
        _gpu.check_installed("vllm")
    name = "decoupling" if _gpu.machine() != "dry-run" else "decoupling-dry-run"
    result: dict[str, Any] = {"rows": []} | _gpu.earlier(name, out)
    for row, peak in _gpu.measure([step.part(one, by, steps, KL_BETA) for one in size for by in mode]):
        row = _gpu.merge(result["rows"], {"mode": row.pop("system"), "peak_gib": peak} | row, KEYS)
        print(_line(row), flush=True)
        write(name, result, _table(result), out, "rolecall bench decoupling")
    return result


def _line(row: Row) -> str:
    cells = [row["size"], MODES[row["mode"]], f"{row['s_per_step']:.2f}", f"{row['steps'][0]:.1f}"]
    cells += [step.stage_seconds(row), f"{row['peak_gib']:.1f}", _gpu.commits(row)]
    return f"| {' | '.join(cells)} |"


def _table(result: dict[str, Any]) -> str:
    rows = sorted(result["rows"], key=lambda row: (row["size"], list(MODES).index(row["mode"])))
    figures = (
        f"{step.PROMPTS} prompts x {step.GROUP} samples, {_gpu.PROMPT} + {step.TOKENS} tokens, random weights of "
        f"Qwen2's sizes, bf16, with a Reference; median of the steps after the first {step.WARMUP}. Peak memory is "
        "all that is held on the GPU, by any process."
    )
    return _gpu.table(figures, HEADS, map(_line, rows))
