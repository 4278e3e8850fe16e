"""A whole GRPO step on one GPU, against TRL's: 32 prompts x 8 samples, 128 tokens in and 256 out, bf16."""

import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import _gpu, _models, write
from benchmarks._gpu import PROMPT, Part, Row
from rolecall import cluster, models
from rolecall.config import Config
from rolecall.data import Sampler, load_prompts
from rolecall.errors import UserError, check_known
from rolecall.loop.stages import Context, synchronise
from rolecall.loop.synchronous import take_step
from rolecall.telemetry.logs import STAGES

PROMPTS, GROUP, TOKENS = 32, 8, 256
TINY = 4, 16  # prompts and tokens of the model "tiny", with which a CPU tries all of this
WARMUP = 2  # steps that do not count
KEYS = ("size", "system")
TRL_MICRO = {"0.5B": 32, "1.5B": 16, "3B": 8, "tiny": 8}  # samples in one pass: the most that fit beside vLLM
# A random-weights model of so large a vocabulary hardly ever ends by itself, so every response has its full length.
TRL: dict[str, dict[str, Any]] = {
    "trl": {"vllm": True},
    "trl-sleep": {"vllm": True, "vllm_enable_sleep_mode": True},
    "trl-generate": {"vllm": False},
}
HEADS = (
    "size", "system", "s a step", "the first, s", "peak GiB", "mean length", "mean log-probability difference",
    "stages, s", "commit",
)  # fmt: skip


def run(
    out: Path,
    size: Sequence[str] = ("0.5B", "1.5B", "3B"),
    system: Sequence[str] = ("rolecall", "trl", "trl-sleep"),
    steps: int = 5,
) -> dict[str, Any]:
    """Add to ``step-h200.json`` and ``.md`` under ``out``. On a GPU; ``--size tiny`` tries it without one.

    Args:
        system: "rolecall" (the native engine on the Actor's weights, one process), "trl" (vLLM in its process),
            "trl-sleep" (which gives its memory up while it trains), "trl-generate" (transformers' generate).
        steps: the first two do not count.
    """
    _models.check_sizes(size)
    for by in system:
        check_known("system", by, ("rolecall", *TRL))
        if by in TRL:
            _gpu.check_installed("trl")
            if TRL[by]["vllm"]:
                _gpu.check_installed("vllm")
    name = f"step-{_gpu.machine()}"
    result: dict[str, Any] = {"rows": []} | _gpu.earlier(name, out)
    parts = [part(one, by, steps) for one in size for by in system]
    for row, peak in _gpu.measure(parts):
        row = _gpu.merge(result["rows"], row | {"peak_gib": peak}, KEYS)
        result["ratio_vs_trl"] = _ratios(result["rows"])
        print(_line(row), flush=True)
        write(name, result, _table(result), out, "rolecall bench step")
    return result


def part(size: str, system: str, steps: int, kl_beta: float = 0.0) -> Part:
    """One row's measurement. ``system``: one of ``TRL``, "rolecall", or the engine that Rolecall is to use."""
    if steps <= WARMUP:
        raise UserError(f"--steps {steps}: the first {WARMUP} do not count.")
    arguments = {"size": size, "system": system, "steps": steps, "kl_beta": kl_beta}
    return Part("benchmarks.step", arguments, timeout=480.0)


def measure(size: str, system: str, steps: int, kl_beta: float) -> Iterator[Row]:
    """The row of one system and size. ``kl_beta``: above 0 there is a Reference (Rolecall alone)."""
    path = str(_models.make(size))
    prompts, tokens = TINY if size == "tiny" else (PROMPTS, TOKENS)
    shape = {"prompts": prompts, "group_size": GROUP, "max_tokens": tokens}
    if system in TRL:
        lines = _trl_steps(path, steps, shape | {"micro": TRL_MICRO[size]} | TRL[system])
    else:
        lines = _steps(path, steps, kl_beta, shape | {"engine": "native" if system == "rolecall" else system})
    counted = lines[WARMUP:]
    row: Row = {"size": size, "system": system, "s_per_step": statistics.median(line["time/step"] for line in counted)}
    stages = ["sync"] if system in TRL else STAGES
    row["stages"] = {stage: statistics.median(line[f"time/{stage}"] for line in counted) for stage in stages}
    row["mismatch"] = lines[-1].get("mismatch/mean")
    row["mean_length"] = statistics.fmean(line["response_length/mean"] for line in counted)
    row["steps"] = [line["time/step"] for line in lines]
    yield row


def _steps(path: str, steps: int, kl_beta: float, rollout: dict[str, Any]) -> list[dict[str, Any]]:
    """Metrics of each of Rolecall's steps."""
    separate = rollout["engine"] == "vllm"
    config = Config(
        model={"path": path},
        algorithm={"kl_beta": kl_beta},
        data={"path": "benchmarks._gpu:prompts", "answer": "", "holdout": 0},
        reward={"function": "benchmarks._gpu:coin"},
        rollout=rollout | {"max_sequences": rollout["prompts"] * GROUP, "sleep": 2 if separate else 0},
        cluster={"timeout": 400.0},
        run={"steps": steps},
    )
    prompts, _, _ = load_prompts(config, models.load_tokenizer(config.model))
    with cluster.spawn(config) as roles:
        # Random weights of 3B and more differ between any two kernels by what stops a real run's first step.
        context, sampler = Context(config, roles, checked=True), Sampler(prompts, config.run.seed)
        synchronise(context, 0)
        return [take_step(context, sampler, step + 1)[2] for step in range(steps)]


def _trl_steps(path: str, steps: int, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """The same metrics of each of TRL's steps, where it has them."""
    from benchmarks import _trl  # which imports TRL

    def coin(prompts: list[Any], completions: list[Any], **_: Any) -> list[float | None]:
        return [*_gpu.coin(prompts, completions, [])]

    clock = _trl.StepClock()
    with tempfile.TemporaryDirectory() as folder:
        trainer = _trl.trainer(
            path,
            coin,
            list(_gpu.prompts()),
            clock,
            folder,
            max_prompt=PROMPT,
            max_steps=steps,
            learning_rate=1e-6,
            **settings,
        )
        trainer.train()
    logged = [line for line in trainer.state.log_history if "completions/mean_length" in line]
    sync = statistics.median(clock.sync_seconds[WARMUP:] or [0.0])  # transformers' generate needs none
    return [
        {
            "time/step": seconds,
            "time/sync": sync,
            "response_length/mean": line["completions/mean_length"],
            "mismatch/mean": line.get("sampling/sampling_logp_difference/mean"),
        }
        for seconds, line in zip(clock.seconds, logged, strict=True)
    ]


def _ratios(rows: list[Row]) -> dict[str, float]:
    """By size: how many times as long the faster of TRL's ways with vLLM takes."""
    ratios = {}
    for own in [row for row in rows if row["system"] == "rolecall"]:
        theirs = [row for row in rows if row["size"] == own["size"] and TRL.get(row["system"], {}).get("vllm")]
        if theirs:
            ratios[own["size"]] = min(row["s_per_step"] for row in theirs) / own["s_per_step"]
    return ratios


def stage_seconds(row: Row) -> str:
    return ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in row["stages"].items() if seconds >= 0.005)


def _line(row: Row) -> str:
    mismatch = f"{row['mismatch']:.4f}" if row["mismatch"] is not None else ""
    cells = [row["size"], row["system"], f"{row['s_per_step']:.2f}", f"{row['steps'][0]:.1f}", f"{row['peak_gib']:.1f}"]
    cells += [f"{row['mean_length']:.0f}", mismatch, stage_seconds(row), _gpu.commits(row)]
    return f"| {' | '.join(cells)} |"


def _table(result: dict[str, Any]) -> str:
    order = list(_models.SIZES)
    rows = sorted(result["rows"], key=lambda row: (order.index(row["size"]), row["system"]))
    ratios = ", ".join(f"{ratio:.1f} times at {size}" for size, ratio in result["ratio_vs_trl"].items())
    figures = (
        f"{PROMPTS} prompts x {GROUP} samples, {PROMPT} + {TOKENS} tokens, random weights of Qwen2's sizes, bf16 "
        f"over FP32 masters, random rewards; median of the steps after the first {WARMUP}. Peak memory is all that "
        "is held on the GPU, by any process. `trl`: vLLM colocated, which reserves 0.3 of the GPU by default; "
        "`trl-sleep`: in its sleep mode; `trl-generate`: transformers' generate; all without gradient "
        "checkpointing, which is TRL's default, slower, and takes less memory."
    )
    table = _gpu.table(figures, HEADS, map(_line, rows))
    if ratios:
        table += f"\n\nFaster than TRL (the fastest of its ways with vLLM that is here): {ratios}."
    return table


if __name__ == "__main__":
    _gpu.print_rows(measure)
