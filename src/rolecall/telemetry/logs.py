"""What a run writes down as it goes: one JSON object a step, some of its samples, and the held-out answers."""

import json
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rolecall.config import Config
from rolecall.errors import UserError
from rolecall.files import atomic_write
from rolecall.samples import Prompt, Sample
from rolecall.telemetry import trackers

METRICS, SAMPLES, EVAL = "metrics.jsonl", "samples.jsonl", "eval.jsonl"
STAGE_COLORS = {
    "generate": "#4c86c6",
    "score": "#e0a030",
    "reference": "#9a78c8",
    "advantages": "#3fa796",
    "update": "#d9655b",
    "sync": "#8a94a0",
}
STAGES = tuple(STAGE_COLORS)


class StageClock:
    """Times the stages of one step: ``with clock("generate"): ...``. A stage entered twice adds up."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._seconds = dict.fromkeys(STAGES, 0.0)

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        before, start = self._seconds[stage], time.monotonic()
        try:
            yield
        finally:
            self._seconds[stage] = before + time.monotonic() - start

    def metrics(self) -> dict[str, float]:
        """In seconds: ``time/<stage>`` of all six (0.0: skipped), and ``time/step`` since the clock was made."""
        seconds = {f"time/{stage}": value for stage, value in self._seconds.items()}
        return seconds | {"time/step": time.monotonic() - self._start}


class MetricsLog:
    """Appends to a run folder's logs, and tells the trackers in ``config.run.trackers``.

    Each line is on its way to the disk when the method returns, so a killed process loses at most the line it was
    writing. Resuming calls ``truncate`` first.
    """

    def __init__(self, run_dir: Path, config: Config):
        run_dir.mkdir(parents=True, exist_ok=True)
        self._dir = run_dir
        self._trackers = [trackers.TRACKERS[name](run_dir, config) for name in config.run.trackers]

    def step(self, step: int, metrics: dict[str, float]) -> None:
        """Log one step. A value that is not finite becomes null in the file and is not sent to the trackers."""
        finite = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
        append(self._dir / METRICS, [{"step": step} | dict.fromkeys(metrics) | finite])
        for tracker in self._trackers:
            tracker.log(step, finite)

    def samples(self, step: int, records: Iterable[dict[str, Any]]) -> None:
        """Log samples, as ``records`` gives them."""
        append(self._dir / SAMPLES, [{"step": step} | record for record in records])

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()


def records(groups: list[tuple[int, Prompt]], samples: list[Sample]) -> list[dict[str, Any]]:
    """What the logs keep of samples; ``groups``: the prompt of each group id."""
    prompts = dict(groups)
    kept = ("reward", "prompt_id", "group_id", "index", "finish")
    return [
        {"prompt": prompts[sample.group_id].text, "response": sample.text}
        | {name: getattr(sample, name) for name in kept}
        for sample in samples
    ]


def append(path: Path, records: list[dict[str, Any]]) -> None:
    """Add one line of JSON a record, and flush."""
    with open(path, "a", encoding="utf-8") as file:
        file.write("".join(json.dumps(record) + "\n" for record in records))


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a log; none if there is no file. A last line that a kill cut short is left out.

    Raises:
        UserError: any other line is not JSON.
    """
    if not path.exists():
        return []
    records = []
    lines = path.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines, start=1):
        try:
            records += [json.loads(line)] if line else []
        except json.JSONDecodeError as error:
            if number < len(lines):  # the last one has no line break behind it: it was being written
                raise UserError(f"{path}, line {number} is not JSON ({error}). Mend or delete that line.") from None
    return records


def truncate(run_dir: Path, step: int) -> None:
    """Drop the lines of steps after ``step`` from all logs (-1: all lines), each file at once or not at all."""
    for path in (run_dir / name for name in (METRICS, SAMPLES, EVAL)):
        if path.exists():
            atomic_write(path, "".join(json.dumps(record) + "\n" for record in read(path) if record["step"] <= step))


def binned(values: Sequence[float], most: int) -> list[float]:
    """``values``, or the means of equally many neighbours where there are more than ``most``."""
    size = -(-len(values) // most) or 1
    return [statistics.fmean(values[start : start + size]) for start in range(0, len(values), size)]


def heldout_accuracy(run_dir: Path) -> dict[int, float]:
    """Mean held-out reward by evaluated step (0: before training)."""
    by_step: dict[int, list[float]] = defaultdict(list)
    for line in read(run_dir / EVAL):
        by_step[line["step"]].append(line["reward"])
    return {step: statistics.fmean(rewards) for step, rewards in sorted(by_step.items())}


def before_after(run_dir: Path) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The first response to each held-out prompt in the first and in the last evaluation; empty with fewer than two."""
    answers: dict[int, dict[str, dict[str, Any]]] = defaultdict(dict)
    for line in read(run_dir / EVAL):
        answers[line["step"]].setdefault(line["prompt_id"], line)
    if len(answers) < 2:
        return []
    before, after = answers[min(answers)], answers[max(answers)]
    return [(before[prompt], after[prompt]) for prompt in before if prompt in after]
