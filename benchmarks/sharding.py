"""An update on one GPU and sharded over several (FSDP2): the same numbers, memory a GPU, seconds."""

import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from benchmarks import _gpu, _models, write
from benchmarks._gpu import PROMPT, Part, Row
from benchmarks._models import SIZES
from benchmarks.training import GROUP, PROMPTS, RESPONSE, random_samples
from rolecall.config import Config
from rolecall.errors import UserError, check_known
from rolecall.roles.actor import Actor
from rolecall.training import sharding

UPDATES = 4  # the first also compiles
KEYS = ("size", "dtype", "processes")
HEADS = (
    "size", "type", "GPUs", "s an update", "the first, s", "GiB kept", "GiB at the peak",
    "difference to one GPU", "commit",
)  # fmt: skip


def run(
    out: Path,
    size: Sequence[str] = ("0.5B", "3B"),
    processes: Sequence[int] = (1, 2),
    dtype: Sequence[str] = ("bfloat16",),
) -> dict[str, Any]:
    """Add to ``sharding-h200.json`` and ``.md`` under ``out``. A GPU a process; ``--size tiny`` tries it without one.

    Args:
        dtype: of the weights that compute; in float32 the numbers differ by rounding of sums alone.
    """
    _models.check_sizes(size)
    for kind in dtype:
        check_known("dtype", kind, ("bfloat16", "float32"))
    gpus = torch.cuda.device_count()
    for count in processes:
        if count < 1:
            raise UserError(f"--processes {count}: there is nothing to measure without any.")
        if count > gpus > 0:
            raise UserError(f"--processes {count}: each takes a GPU, and there are {gpus}.")
    name = f"sharding-{_gpu.machine()}"
    result: dict[str, Any] = {"rows": []} | _gpu.earlier(name, out)
    cases = [{"size": one, "dtype": kind, "processes": ranks} for one in size for kind in dtype for ranks in processes]
    for row, _ in _gpu.measure([Part("benchmarks.sharding", case) for case in cases]):
        row = _gpu.merge(result["rows"], row, KEYS)
        print(_line(row, result["rows"]), flush=True)
        command = f"rolecall bench sharding --size {','.join(size)} --dtype {','.join(dtype)}"
        write(name, result, _table(result), out, command)
    return result


def measure(size: str, dtype: str, processes: int) -> Iterator[Row]:
    """The row of one case, as the first process has it."""
    path = str(_models.make(size))
    store = sharding.open_store()
    found = mp.get_context("spawn").SimpleQueue()
    mp.spawn(_updates, args=(processes, store.port, path, size, dtype, found), nprocs=processes)
    yield {"size": size, "dtype": dtype, "processes": processes} | found.get()


def _updates(rank: int, ranks: int, port: int, path: str, size: str, dtype: str, found: Any) -> None:
    """One process's part in some updates; the first one tells what it saw."""
    if torch.cuda.is_available():  # (too late for CUDA_VISIBLE_DEVICES: which there are has been settled)
        torch.cuda.set_device(rank)
    if ranks > 1:
        sharding.meet(rank, "127.0.0.1", port, ranks, seconds=120)
    groups = 2 if size == "tiny" else PROMPTS
    rollout = {"prompts": groups, "group_size": GROUP, "max_tokens": RESPONSE}
    actor = Actor(Config(model={"path": path, "dtype": dtype}, rollout=rollout, actor={"micro_tokens": 8192}))
    seconds, losses, norms = [], [], []
    for repeat in range(UPDATES):
        samples = random_samples(groups, RESPONSE, SIZES[size], repeat)
        if torch.cuda.is_available() and repeat == 1:
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        metrics = actor.update(samples)
        _models.synchronize()
        seconds.append(time.perf_counter() - start)
        losses.append(metrics["policy/loss"])
        norms.append(metrics["policy/grad_norm"])
    if rank == 0:
        kept = torch.cuda.memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
        row = {"s": statistics.median(seconds[1:]), "first_s": seconds[0], "kept_gib": kept}
        found.put(row | {"peak_gib": actor.peak_memory(), "losses": losses, "norms": norms})
    if ranks > 1:
        sharding.leave()


def difference(row: Row, whole: Row) -> float:
    """The largest between two rows: of a loss absolutely, of a gradient's norm relative to the whole model's."""
    losses = [abs(a - b) for a, b in zip(row["losses"], whole["losses"], strict=True)]
    return max(*losses, *(abs(a / b - 1) for a, b in zip(row["norms"], whole["norms"], strict=True)))


def _line(row: Row, rows: list[Row]) -> str:
    whole = [one for one in rows if [one[key] for key in KEYS] == [row["size"], row["dtype"], 1]]
    apart = f"{difference(row, whole[0]):.1e}" if whole and row["processes"] > 1 else ""
    cells = [row["size"], row["dtype"], row["processes"], f"{row['s']:.2f}", f"{row['first_s']:.1f}"]
    cells += [f"{row['kept_gib']:.1f}", f"{row['peak_gib']:.1f}", apart, _gpu.commits(row)]
    return f"| {' | '.join(map(str, cells))} |"


def _table(result: dict[str, Any]) -> str:
    rows = sorted(result["rows"], key=lambda row: (list(SIZES).index(row["size"]), row["dtype"], row["processes"]))
    figures = (
        f"`Actor.update` on {PROMPTS} prompts x {GROUP} samples, {PROMPT} + {RESPONSE} tokens, random weights of "
        "Qwen2's sizes, FP32 masters and AdamW, micro-batches of 8,192 tokens; whole on one GPU, and sharded over "
        f"several. Median of {UPDATES - 1} updates after a first one, and the memory of the first GPU in them. "
        f"The difference is the largest in {UPDATES} updates: of a loss absolutely, of a gradient's norm relative "
        "to the whole model's."
    )
    return _gpu.table(figures, HEADS, (_line(row, rows) for row in rows))


if __name__ == "__main__":
    _gpu.print_rows(measure)
