"""What the benchmarks on a GPU share: measurements in processes of their own, peak memory, merged rows, a task."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from rolecall.errors import RunError, UserError
from rolecall.telemetry.versions import collect, installed

Row = dict[str, Any]

MARK = "ROW "  # in front of each row that a part prints: libraries print, too
PROMPT = 128  # tokens of every prompt
TRIAL = (
    "Tried without a GPU: a tiny model in float32, few and short samples. These figures say only that all of it runs."
)
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a fork of a process that has looked at the GPU cannot use it
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it would compile for minutes at its first use
}


@dataclass(frozen=True)
class Part:
    """One measurement in a process of its own, whose end frees all memory: ``measure(**arguments)`` of ``module``.

    Attributes:
        timeout: seconds until it is killed with all its processes.
    """

    module: str
    arguments: dict[str, Any]
    timeout: float = 600.0


def measure(parts: Sequence[Part]) -> Iterator[tuple[Row, float]]:
    """Run the parts one after the other and yield each row as it comes, with the device's peak memory till then (GiB).

    A row's ``commit`` is that of the code it was measured with: rows of one table may come from several runs. A part
    that fails or hangs is told at once, and the next one is run.

    Raises:
        RunError: after the last part, if one failed.
    """
    failed, measured_with = [], commit()
    for part in parts:
        print(f"{part.module} {json.dumps(part.arguments)}", flush=True)
        try:
            for row, peak in _run(part):
                yield row | {"commit": measured_with}, peak
        except RunError as error:
            print(error, flush=True)
            failed.append(str(error).splitlines()[0])
    if failed:
        raise RunError("\n".join([f"{len(failed)} of {len(parts)} measurements failed:", *failed]))


def print_rows(measure: Callable[..., Iterable[Row]]) -> None:
    """The main function of a part's module: ``measure`` with the arguments that stand on the command line."""
    threading.Thread(target=_end_with, args=[os.getppid()], daemon=True).start()
    for row in measure(**json.loads(sys.argv[1])):
        print(f"\n{MARK}{json.dumps(row)}", flush=True)


def _run(part: Part) -> Iterator[tuple[Row, float]]:
    command = [sys.executable, "-m", part.module, json.dumps(part.arguments)]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=ENVIRONMENT | os.environ,
        start_new_session=True,
    )
    assert process.stdout is not None
    began, said = time.monotonic(), deque[str](maxlen=40)
    alarm = threading.Timer(part.timeout, _kill, [process.pid])
    alarm.start()
    try:
        with _watching(process.pid) as peak:
            for line in process.stdout:
                if line.startswith(MARK):
                    yield json.loads(line.removeprefix(MARK)), peak()
                else:
                    said.append(line)
            code = process.wait()
    finally:
        alarm.cancel()
        _kill(process.pid)
        process.wait()
    if code:
        hung = time.monotonic() - began >= part.timeout
        how = f"took longer than its {part.timeout:g} s and was killed" if hung else f"failed (exit code {code})"
        raise RunError(f"{part.module} {part.arguments} {how}. It said last:\n{''.join(said)}")


def _end_with(parent: int) -> None:
    """A benchmark that is killed itself cannot end its part, which would go on holding the GPU."""
    while os.getppid() == parent:
        time.sleep(0.5)
    _kill(os.getpid())


def _kill(session: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # all have ended
        os.killpg(session, signal.SIGKILL)


@contextlib.contextmanager
def _watching(pid: int) -> Iterator[Callable[[], float]]:
    """Poll the memory held on the GPU (without one: by the process and its children); the most so far, in GiB."""
    done, most = threading.Event(), [_held(pid)]  # once here, where an error ends the benchmark

    def watch() -> None:
        while not done.wait(0.1):
            most[0] = max(most[0], _held(pid))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield lambda: most[0]
    finally:
        done.set()
        thread.join()


def _held(pid: int) -> float:
    if _on_gpu():
        # Asked of the driver, not of torch, whose CUDA context would be part of what is measured.
        query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        if mine := os.environ.get("CUDA_VISIBLE_DEVICES"):  # others' are no part of it
            query.append(f"--id={mine}")
        found = subprocess.run(query, capture_output=True, text=True, check=False)
        if found.returncode:
            raise UserError(
                f"nvidia-smi cannot tell the memory of the GPUs in CUDA_VISIBLE_DEVICES = {mine!r}: "
                f"{found.stdout.strip()} Write their numbers or whole UUIDs, or leave it unset for all GPUs."
            )
        return sum(map(float, found.stdout.split())) / 2**10
    held = 0
    with contextlib.suppress(psutil.NoSuchProcess):  # it has ended
        process = psutil.Process(pid)
        for one in [process, *process.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                held += one.memory_info().rss
    return held / 2**30


def commit() -> str:
    """Short, and with a + where the code has been changed since."""
    whole, _, changed = collect()["commit"].partition("-")
    return whole[:7] + ("+" if changed else "")


def machine() -> str:
    """Of a results file's name: "h200". Where torch sees no GPU "dry-run", as its figures only show that all runs."""
    return collect()["gpu"].split(", ")[0].split()[-1].lower() if _on_gpu() else "dry-run"


def _on_gpu() -> bool:
    from rolecall import models  # with torch, which a Reward's process, that takes ``coin`` from here, never loads

    return models.device().type == "cuda"


def about(figures: str) -> str:
    """What a table says of its figures: that, where they come from a GPU."""
    return TRIAL if machine() == "dry-run" else figures


def table(figures: str, heads: Iterable[str], lines: Iterable[str]) -> str:
    """What is said of the figures (see ``about``), and under ``heads`` a line each."""
    columns = list(heads)
    return "\n".join([about(figures), "", f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}", *lines])


def check_groups(n: Iterable[int], group: int) -> None:
    """Refuse numbers of sequences that are no whole groups."""
    for count in n:
        if count < group or count % group:
            raise UserError(f"--n {count}: sequences come in groups of {group}.")


def check_installed(package: str) -> None:
    """Refuse to measure what is not there.

    Raises:
        UserError: TRL, or vLLM (its build for a CPU will do), is missing.
    """
    if not (installed(package) or installed(f"{package}-cpu")):
        extra = {"trl": "compare"}.get(package, package)
        raise UserError(f"{package} is not installed: pip install -e '.[{extra}]', or leave it out.")


def commits(row: Row) -> str:
    """Of the code that a row was measured with, each once: it may come from several runs."""
    return ", ".join(dict.fromkeys(value for key, value in row.items() if key.endswith("commit")))


def earlier(name: str, out: Path) -> dict[str, Any]:
    """What ``out/results/NAME.json`` holds, so that a table can be made in several runs."""
    file = out / "results" / f"{name}.json"
    return json.loads(file.read_text()) if file.exists() else {}


def merge(rows: list[Row], row: Row, keys: Sequence[str]) -> Row:
    """Put a row's fields into the one of ``rows`` with the same ``keys``, or add it; what then stands there."""
    for known in rows:
        if all(known[key] == row[key] for key in keys):
            known.update(row)
            return known
    rows.append(row)
    return row


def prompts() -> Iterator[dict[str, Any]]:
    """Rows whose prompts have ``PROMPT`` tokens with the chat template of ``_models``, all different."""
    digits = random.Random(0)
    for _ in range(1024):
        yield {"prompt": "".join(digits.choices("0123456789", k=PROMPT - 2))}


def token_prompts(count: int, seed: int) -> list[list[int]]:
    """Prompts of ``PROMPT`` random tokens, others for every seed."""
    draw = random.Random(seed)
    return [draw.choices(range(10, 200), k=PROMPT) for _ in range(count)]


def coin(prompts: list[str], responses: list[str], rows: list[dict[str, Any]]) -> list[float]:
    """A random reward: no group is flat, so every sample is trained on, and there is nothing to learn."""
    return [random.random() for _ in responses]
