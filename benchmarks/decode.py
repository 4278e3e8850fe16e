"""Where the time of the native engine's decode step goes, by torch's profiler: random-weights Qwen2, groups of 8."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks import _gpu, _models, write
from benchmarks._gpu import PROMPT, Part, Row
from benchmarks._models import SIZES, Size
from rolecall import models
from rolecall.config import Config
from rolecall.engines.native.paged import STEPS, PagedEngine
from rolecall.samples import Request, Sampling

GROUP, BEFORE = 8, 256  # responses a prompt; tokens of each before the round of ``STEPS`` that is profiled
TRIAL = 8  # tokens instead, where the model is tiny
KINDS = {"attention": "attention", "products": "layers' products", "layers": "else in layers", "once": "once a step"}
KEYS = ("size", "n")
ATTENTION = ("attend", "attention")
PRODUCTS = ("gemm", "gemv", "nvjet", "cutlass", "splitk", "aten::mm", "aten::addmm", "aten::bmm")


def run(out: Path, size: Sequence[str] = ("0.5B",), n: Sequence[int] = (8, 64, 512, 1024)) -> dict[str, Any]:
    """Add to ``decode-h200.json`` and ``.md`` under ``out``. On a GPU; ``--size tiny`` tries it without one.

    Args:
        n: rows that are decoded at once.
    """
    _models.check_sizes(size)
    _gpu.check_groups(n, GROUP)
    name = f"decode-{_gpu.machine()}"
    result: dict[str, Any] = {"rows": []} | _gpu.earlier(name, out)
    parts = [Part("benchmarks.decode", {"size": one, "n": list(n)}) for one in size]
    for row, _ in _gpu.measure(parts):
        row = _gpu.merge(result["rows"], row, KEYS)
        print(_line(row), flush=True)
        write(name, result, _table(result), out, "rolecall bench decode")
    return result


def measure(size: str, n: list[int]) -> Iterator[Row]:
    """A row for each number of rows: microseconds and kernels of a step, by kind."""
    before = TRIAL if size == "tiny" else BEFORE
    config = Config(model={"path": str(_models.make(size))})
    loaded = models.load(config.model, models.device())
    copy = _models.copy_rate()
    for count in n:
        engine = PagedEngine(loaded, count)
        length = before + 4 * STEPS
        sampling = Sampling(length, min_tokens=length)
        texts = _gpu.token_prompts(count // GROUP, seed=0)
        requests = [Request(i, str(i), text, GROUP, 0, sampling) for i, text in enumerate(texts)]
        engine.generate(requests)  # what is compiled and captured is so now
        profiled = Profiled(engine.decoder.run, before)
        engine.decoder.run = profiled  # type: ignore[method-assign]
        engine.generate(requests)
        row: Row = {"size": size, "n": count} | by_kind(profiled.kernels, SIZES[size].layers)
        yield row | {"floor": step_bytes(SIZES[size], count, before) / copy * 1e6}


class Profiled:
    """Stands for a decoder's ``run``; once, behind ``before`` tokens, it notes what the device computes in a round.

    Attributes:
        kernels: name -> (how many, microseconds), of that round's ``STEPS`` steps.
    """

    def __init__(self, run: Callable[[int, int], None], before: int):
        self.run, self.left = run, before
        self.kernels: dict[str, tuple[int, float]] = {}

    def __call__(self, running: int, steps: int) -> None:
        if self.left > 0 or self.kernels:
            self.run(running, steps)
            self.left -= steps
            return
        on_gpu = torch.cuda.is_available()
        _models.synchronize()
        with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiler:
            self.run(running, steps)
            _models.synchronize()
        for event in profiler.key_averages():
            taken = event.self_device_time_total if on_gpu else event.self_cpu_time_total
            if taken:  # else it is the host's, which only starts them
                self.kernels[event.key] = event.count, taken


def by_kind(kernels: dict[str, tuple[int, float]], layers: int) -> dict[str, float]:
    """Microseconds of a step, in all and by kind, and its ``kernels``.

    A kernel that comes less often than there are layers is of what is done once a step: the vocabulary's product (where
    it is not the very kernel of a layer's), drawing, bookkeeping.
    """
    found = {"step": 0.0, "kernels": 0.0} | dict.fromkeys(KINDS, 0.0)
    for name, (count, taken) in kernels.items():
        kind = "layers"
        if count < STEPS * layers:
            kind = "once"
        elif any(part in name.lower() for part in ATTENTION):
            kind = "attention"
        elif any(part in name.lower() for part in PRODUCTS):
            kind = "products"
        found[kind] += taken / STEPS
        found["step"] += taken / STEPS
        found["kernels"] += count / STEPS
    return found


def step_bytes(shape: Size, rows: int, tokens: int) -> int:
    """What a step must read: the weights once, and the keys and values of rows that have so many tokens."""
    return 2 * (shape.body + shape.head) + rows * (PROMPT + tokens) * shape.token_bytes


def _line(row: Row) -> str:
    cells = [row["size"], row["n"], f"{row['step'] / 1e3:.2f}", f"{row['kernels']:.0f}"]
    cells += [f"{row[kind] / 1e3:.2f}" for kind in KINDS]
    cells += [f"{row['floor'] / 1e3:.2f}", _gpu.commits(row)]
    return f"| {' | '.join(map(str, cells))} |"


def _table(result: dict[str, Any]) -> str:
    heads = ["size", "rows", "ms a step", "kernels", *KINDS.values(), "floor by bytes", "commit"]
    figures = (
        f"What the GPU computes in a decode step, by torch's profiler, mean of {STEPS} steps behind a prompt of "
        f"{PROMPT} and {BEFORE} tokens of each response; bf16, temperature 1. Once a step: the vocabulary's "
        "product, drawing, bookkeeping. The floor: the weights and all rows' keys and values at the rate of a copy."
    )
    rows = sorted(result["rows"], key=lambda row: (list(SIZES).index(row["size"]), row["n"]))
    return _gpu.table(figures, heads, map(_line, rows))


if __name__ == "__main__":
    _gpu.print_rows(measure)
