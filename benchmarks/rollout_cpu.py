"""The native engine against transformers' generate: same model, prompts and sampling, one run, interleaved repeats."""

import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks import write
from rolecall import models
from rolecall.config import Config
from rolecall.data import load_prompts
from rolecall.engines.native.engine import NativeEngine
from rolecall.models import Loaded
from rolecall.samples import Prompt, Request, Sampling

PROMPTS, GROUP, TOKENS, REPEATS = 8, 8, 32, 5
SYSTEMS = ("native", "generate")
# With end-of-sequence as the task has it, and with every response forced to its full length.
MODES = ("task", "forced")


def run(out: Path, model_path: str = "smollm2-135m-instruct") -> dict[str, Any]:
    """Measure and write ``rollout-cpu.json`` and ``rollout-cpu.md`` (``rollout-cuda`` on a GPU) under ``out``.

    Tokens are those of responses up to their end; ``ratio_vs_generate`` is of medians, by mode.
    """
    loaded, prompts = _load(model_path)
    rows: list[dict[str, Any]] = []
    for mode in MODES:
        generators = {system: _generator(system, mode, loaded, prompts) for system in SYSTEMS}
        for generate in generators.values():
            generate(0)  # first calls allocate
        for repeat in range(REPEATS):
            for system, generate in generators.items():
                wall, cpu = time.perf_counter(), time.process_time()
                tokens = generate(repeat)
                seconds = time.perf_counter() - wall, time.process_time() - cpu
                rows.append({"mode": mode, "system": system, "tokens": tokens, "s": seconds[0], "cpu_s": seconds[1]})

    def median(mode: str, system: str, clock: str = "s") -> float:
        of = [row for row in rows if row["mode"] == mode and row["system"] == system]
        return statistics.median(row["tokens"] / row[clock] for row in of)

    result: dict[str, Any] = {
        "ratio_vs_generate": {mode: median(mode, "native") / median(mode, "generate") for mode in MODES},
        "ratio_cpu_seconds": {
            mode: median(mode, "native", "cpu_s") / median(mode, "generate", "cpu_s") for mode in MODES
        },
        "tokens_per_s": {mode: {system: median(mode, system) for system in SYSTEMS} for mode in MODES},
        "peak_mb": {system: _peak_elsewhere(model_path, system) for system in SYSTEMS},
        "model": model_path,
        "shape": {"prompts": PROMPTS, "group": GROUP, "tokens": TOKENS, "repeats": REPEATS},
        "threads": torch.get_num_threads(),
        "rows": rows,
    }
    write(f"rollout-{loaded.model.device.type}", result, _table(result), out, "rolecall bench rollout-cpu")
    return result


def _load(model_path: str) -> tuple[Loaded, list[Prompt]]:
    config = Config(model={"path": model_path})
    loaded = models.load(config.model, models.device())
    prompts, _, _ = load_prompts(config, loaded.tokenizer)
    return loaded, prompts[:PROMPTS]


def _generator(system: str, mode: str, loaded: Loaded, prompts: list[Prompt]) -> Callable[[int], int]:
    """A function of a seed that generates once and returns the number of response tokens."""
    if system == "native":
        engine = NativeEngine(loaded, PROMPTS * GROUP)
        sampling = Sampling(max_tokens=TOKENS, min_tokens=TOKENS if mode == "forced" else 0)

        def native(seed: int) -> int:
            requests = [Request(i, p.id, p.tokens, GROUP, seed, sampling) for i, p in enumerate(prompts)]
            return sum(len(sample.response) for sample in engine.generate(requests))

        return native

    model: Any = loaded.model
    batch = loaded.tokenizer.pad(
        {"input_ids": [prompt.tokens for prompt in prompts]}, padding_side="left", return_tensors="pt"
    ).to(model.device)
    ends = torch.tensor(NativeEngine(loaded, 1).endings.tokens, device=model.device)

    def generate(seed: int) -> int:
        torch.manual_seed(seed)
        tokens = model.generate(
            **batch,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            repetition_penalty=1.0,
            max_new_tokens=TOKENS,
            min_new_tokens=TOKENS if mode == "forced" else 0,
            num_return_sequences=GROUP,
            eos_token_id=ends.tolist(),
            pad_token_id=loaded.tokenizer.pad_token_id,
        )
        responses = tokens[:, batch["input_ids"].shape[1] :]
        ended = torch.isin(responses, ends).long().cumsum(-1)
        return int((ended.cumsum(-1) <= 1).sum())  # up to the first end, which counts

    return generate


def _peak_elsewhere(model_path: str, system: str) -> float:
    """MB by which one system's peak memory grows over the loaded model, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.rollout_cpu", model_path, system]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout.splitlines()[-1])


def _peak(model_path: str, system: str) -> float:
    loaded, prompts = _load(model_path)
    generate = _generator(system, "forced", loaded, prompts)
    if loaded.model.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        generate(0)
        return (torch.cuda.max_memory_allocated() - before) / 1e6
    Path("/proc/self/clear_refs").write_text("5")  # Linux forgets the peak of loading
    before = psutil.Process().memory_info().rss
    generate(0)
    peak = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert peak is not None
    return (int(peak[1]) * 1024 - before) / 1e6


def _table(result: dict[str, Any]) -> str:
    lines = [
        f"{PROMPTS} prompts x {GROUP} samples x up to {TOKENS} tokens, temperature 1, {result['model']}, "
        f"{result['threads']} threads, median of {REPEATS} interleaved repeats. Tokens after a response's end do not "
        "count. Peak memory is over the loaded model, with full-length responses.",
        "",
        "| responses | native tok/s | generate tok/s | ratio | ratio of CPU-seconds |",
        "|---|---|---|---|---|",
    ]
    for mode, label in (("task", "end where the model ends them"), ("forced", f"forced to {TOKENS} tokens")):
        speed = result["tokens_per_s"][mode]
        lines.append(
            f"| {label} | {speed['native']:.0f} | {speed['generate']:.0f} | {result['ratio_vs_generate'][mode]:.2f} "
            f"| {result['ratio_cpu_seconds'][mode]:.2f} |"
        )
    peak = result["peak_mb"]
    return "\n".join([*lines, "", f"Peak memory: native {peak['native']:.0f} MB, generate {peak['generate']:.0f} MB."])


if __name__ == "__main__":
    print(_peak(sys.argv[1], sys.argv[2]))
