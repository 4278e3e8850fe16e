"""The native engine against vLLM on a GPU: random-weights Qwen2, groups of 8, lengths fixed and with a long tail."""

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import _gpu, _models, write
from benchmarks._gpu import PROMPT, Part, Row
from benchmarks._models import SIZES, Size
from rolecall import engines, models
from rolecall.config import Config
from rolecall.errors import UserError, check_known
from rolecall.samples import Request, Sampling

GROUP = 8
ENDS = [_models.END, _models.OFTEN]
KEYS = ("size", "n", "out", "lengths")
SYSTEMS = ("native", "vllm", "invariant")
HEADS = (
    "size", "sequences", "tokens out", "lengths", "native tok/s", "vLLM tok/s", "ratio", "ms a step", "floor, ms",
    "mean lengths", "invariant tok/s", "commit",
)  # fmt: skip


def run(
    out: Path,
    size: Sequence[str] = ("0.5B", "1.5B", "3B", "7B"),
    n: Sequence[int] = (64, 512, 1024),
    lengths: Sequence[str] = ("fixed", "geometric"),
    system: Sequence[str] = ("native", "vllm"),
    repeats: int = 2,
) -> dict[str, Any]:
    """Add to ``rollout-h200.json`` and ``.md`` under ``out``. On a GPU; ``--size tiny`` tries it without one.

    Args:
        n: sequences, all of them decoded at once.
        system: "invariant" is the native engine with ``model.batch_invariant``.
        lengths: "fixed", all of the longest; "geometric" of a mean of a quarter of that, cut at the longest.
        repeats: after one to warm up; the median counts.
    """
    _models.check_sizes(size)
    for by in system:
        check_known("system", by, SYSTEMS)
    if "vllm" in system:
        _gpu.check_installed("vllm")
    for kind in lengths:
        check_known("lengths", kind, ("fixed", "geometric"))
    _gpu.check_groups(n, GROUP)
    if repeats < 1:
        raise UserError(f"--repeats {repeats}: nothing would be measured. Take 1 or more.")
    name = f"rollout-{_gpu.machine()}"
    result: dict[str, Any] = {"rows": []} | _gpu.earlier(name, out)
    shared = {"n": list(n), "lengths": list(lengths), "repeats": repeats}
    parts = [Part("benchmarks.rollout", {"size": one, "system": by} | shared, 560.0) for one in size for by in system]
    for row, _ in _gpu.measure(parts):
        by = next(by for by in SYSTEMS if f"{by}_tok_s" in row)
        row[f"{by}_commit"] = row.pop("commit")
        row = _gpu.merge(result["rows"], row, KEYS)
        if "native_tok_s" in row and "vllm_tok_s" in row:
            row["ratio"] = row["native_tok_s"] / row["vllm_tok_s"]
        print(_line(row), flush=True)
        write(name, result, _table(result), out, "rolecall bench rollout")
    return result


def measure(size: str, system: str, n: list[int], lengths: list[str], repeats: int) -> Iterator[Row]:
    """A row for each combination of ``n`` and ``lengths``, by one system, whose prompts are never the same twice."""
    path = str(_models.make(size))
    rates = {"copy": _models.copy_rate(), "matmul": _models.matmul_rate()} if system == "native" else None
    torch.cuda.empty_cache()
    context = PROMPT + max(longest_response(size, count, kind) for count in n for kind in lengths)
    measured = _vllm(path, context, max(n)) if system == "vllm" else _native(path, system == "invariant")
    for count in n:
        for kind in lengths:
            longest = longest_response(size, count, kind)
            generate = measured(count, longest, kind == "geometric")
            generate(_gpu.token_prompts(count // GROUP, seed=-1))
            timed = []
            for repeat in range(repeats):
                prompts = _gpu.token_prompts(count // GROUP, seed=repeat)
                start = time.perf_counter()
                found = generate(prompts)
                timed.append((time.perf_counter() - start, found))
            seconds = statistics.median(taken for taken, _ in timed)
            speed = statistics.median(sum(found) / taken for taken, found in timed)
            row: Row = {"size": size, "n": count, "out": longest, "lengths": kind, f"{system}_tok_s": speed}
            mean = statistics.fmean(length for _, found in timed for length in found)
            row |= {f"{system}_s": seconds, f"{system}_mean_length": mean}
            if rates:
                steps = statistics.median(max(found) for _, found in timed)
                floor = floor_seconds(SIZES[size], timed[0][1], rates) / max(timed[0][1])
                row |= {"ms": seconds / steps * 1e3, "floor_ms": floor * 1e3, "rates": rates}
            yield row
            del generate
            gc.collect()
            torch.cuda.empty_cache()  # the next engine sizes its cache by what is free


def longest_response(size: str, n: int, lengths: str) -> int:
    if lengths == "geometric":
        return 4 * SIZES[size].often
    return 16 if size == "tiny" else 256 if n <= 64 else 512


def floor_seconds(shape: Size, lengths: list[int], rates: dict[str, float]) -> float:
    """The least time to decode responses of these lengths together: by bytes read or by FLOPs, what takes longer.

    Each step reads the weights once and every running sequence's keys and values, a shared prompt's for each.

    Args:
        rates: ``copy`` in bytes a second, ``matmul`` in FLOP a second.
    """
    weights = shape.body + shape.head
    seen = sum(length * PROMPT + length * (length + 1) // 2 for length in lengths)  # pairs of token and token seen
    nbytes = max(lengths) * 2 * weights + seen * shape.token_bytes
    flops = sum(lengths) * 2 * weights + seen * shape.pair_flops
    return max(nbytes / rates["copy"], flops / rates["matmul"])


Generate = Callable[[list[list[int]]], list[int]]  # prompts -> the lengths of their groups' responses


def _native(path: str, invariant: bool) -> Callable[[int, int, bool], Generate]:
    model = {"path": path, "batch_invariant": invariant}
    loaded: Any = models.load(Config(model=model).model, models.device())

    def for_shape(n: int, longest: int, ends: bool) -> Generate:
        loaded.model.generation_config.eos_token_id = ENDS
        engine = engines.create(Config(model=model, rollout={"max_sequences": n}), loaded)
        sampling = Sampling(longest, min_tokens=0 if ends else longest)

        def generate(prompts: list[list[int]]) -> list[int]:
            requests = [Request(i, str(i), prompt, GROUP, 0, sampling) for i, prompt in enumerate(prompts)]
            return [len(sample.response) for sample in engine.generate(requests)]

        return generate

    return for_shape


def _vllm(path: str, context: int, most: int) -> Callable[[int, int, bool], Generate]:
    """vLLM's own ``LLM`` at its best: CUDA graphs for all batch sizes, no seeds (it draws each seeded row alone)."""
    on_cpu = models.device().type == "cpu"
    from vllm import LLM, SamplingParams

    llm = LLM(
        path,
        dtype="float32" if on_cpu else "bfloat16",
        skip_tokenizer_init=True,
        generation_config="vllm",
        logprobs_mode="processed_logprobs",
        max_model_len=context,
        max_num_seqs=most,
        max_cudagraph_capture_size=None if on_cpu else most,
        gpu_memory_utilization=0.85,
        enforce_eager=on_cpu,
        enable_chunked_prefill=not on_cpu,  # see rolecall.engines.vllm
    )

    def for_shape(n: int, longest: int, ends: bool) -> Generate:
        params = SamplingParams(
            n=GROUP,
            max_tokens=longest,
            stop_token_ids=ENDS if ends else None,
            ignore_eos=not ends,
            logprobs=0,  # of the sampled token alone
            flat_logprobs=True,  # in the form that is cheapest to make
            detokenize=False,
        )

        def generate(prompts: list[list[int]]) -> list[int]:
            outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
            return [len(one.token_ids) for output in outputs for one in output.outputs]

        return generate

    return for_shape


def _line(row: Row) -> str:
    def number(key: str, digits: int = 0) -> str:
        return f"{row[key]:.{digits}f}" if key in row else ""

    cells = [row["size"], row["n"], row["out"], row["lengths"], number("native_tok_s"), number("vllm_tok_s")]
    cells += [number("ratio", 2), number("ms", 2), number("floor_ms", 2)]
    cells.append(" / ".join(number(key) for key in ("native_mean_length", "vllm_mean_length") if key in row))
    cells += [number("invariant_tok_s"), _gpu.commits(row)]
    return f"| {' | '.join(map(str, cells))} |"


def _table(result: dict[str, Any]) -> str:
    figures = (
        f"Prompts of {PROMPT} tokens, {GROUP} responses each, temperature 1, sampled log-probabilities, bf16, "
        "random weights of Qwen2's sizes. Prefill is counted. `geometric`: lengths of a mean of a quarter of the "
        "longest, cut there. A step's floor is its bytes (weights once, every sequence's keys and values) over "
        "the rate of a copy, or its FLOPs over the rate of a large product, whichever is longer (both measured in "
        "the same run). Invariant: with `model.batch_invariant`."
    )
    return _gpu.table(figures, HEADS, (_line(row) for row in sorted(result["rows"], key=_order)))


def _order(row: Row) -> tuple[Any, ...]:
    return list(SIZES).index(row["size"]), row["n"], row["lengths"]


if __name__ == "__main__":
    _gpu.print_rows(measure)
