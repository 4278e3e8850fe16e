"""What a training run shows: a live display in a terminal, one plain line a step anywhere else."""

from __future__ import annotations

import math
import statistics
import time
from datetime import timedelta
from itertools import accumulate
from pathlib import Path
from typing import Any

from rich.console import Console as RichConsole
from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Column, Table
from rich.text import Text

from rolecall.config import Config
from rolecall.telemetry.logs import STAGE_COLORS, STAGES, before_after, binned, heldout_accuracy

BLOCKS = "▁▂▃▄▅▆▇█"
ANSWERS_SHOWN = 8


class Console:
    """Shows a run while it trains, and its result.

    with Console(config) as console:
        console.status("starting the roles")
        console.step(1, metrics)
        console.summary(run_dir)
    """

    def __init__(self, config: Config, output: RichConsole | None = None):
        self._output = output or RichConsole(highlight=False)
        self._config = config
        self._status = ""
        self._step = 0
        self._metrics: dict[str, Any] = {}
        self._rewards: list[float] = []
        self._heldout: list[float] = []
        self._recent: list[float] = []  # seconds of the last steps, with evaluation and checkpoints between
        self._finished = math.inf  # when the last step was
        live = Live(console=self._output, get_renderable=self._render, refresh_per_second=8)
        self._live = live if self._output.is_terminal else None

    def __enter__(self) -> Console:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._status = ""
        if self._live:
            self._live.stop()

    def status(self, text: str) -> None:
        """What is going on outside the steps: ``starting the roles``."""
        self._status = text
        if not self._live:
            self.note(text)

    def note(self, text: str) -> None:
        """Something to remember: a line that stays."""
        self._output.print(text, markup=False, emoji=False, soft_wrap=True)

    def evaluated(self, *accuracies: float) -> None:
        """Held-out accuracy outside a step's metrics: before training, or all that a resumed run has had."""
        self._heldout += accuracies
        if accuracies and not self._live:
            self.note(f"held-out accuracy {accuracies[-1]:.3f}")

    def step(self, step: int, metrics: dict[str, Any]) -> None:
        """Show a finished step."""
        now = time.monotonic()
        self._recent = [*self._recent[-19:], max(metrics["time/step"], now - self._finished)]
        self._finished = now
        self._rewards.append(metrics["reward/mean"])
        if metrics.get("heldout/accuracy") is not None:
            self._heldout.append(metrics["heldout/accuracy"])
        self._status, self._metrics = "", metrics
        self._step = step  # last: the display is drawn by another thread, and draws steps from the first one on
        if not self._live:
            self.note(self._line())

    def summary(self, run_dir: Path) -> None:
        """The same prompts answered before and after, held-out accuracy before and after, and where things are."""
        self.__exit__()
        if answers := before_after(run_dir):
            self._output.print(_answers(answers[:ANSWERS_SHOWN]), "")
        table = Table.grid(padding=(0, 3))
        accuracy = list(heldout_accuracy(run_dir).values())
        if len(accuracy) > 1:
            table.add_row("Held-out accuracy", f"[bold]{accuracy[0]:.3f}[/] before, [bold]{accuracy[-1]:.3f}[/] after")
        table.add_row("Report", Text(str(run_dir / "report.html")))
        table.add_row("Model", Text(str(run_dir / "model")))
        self._output.print(table)

    @property
    def _left(self) -> str:
        seconds = statistics.fmean(self._recent) * (self._config.run.steps - self._step)
        return f"{timedelta(seconds=round(seconds))} left"

    def _figures(self) -> dict[str, str]:
        metrics = self._metrics
        heldout = [f"{value:.3f}" for value in dict.fromkeys(self._heldout[:1] + self._heldout[-1:])]
        return {
            "reward": _figure(metrics.get("reward/mean"), ".3f"),
            "held-out": " → ".join(heldout) or "–",
            "KL": _figure(metrics.get("kl"), ".4f") if "reference" in self._config.roles else "off",
            "tokens/s": _figure(metrics.get("tokens_per_second"), ",.0f"),
        }

    def _line(self) -> str:
        metrics = self._metrics
        figures = "  ".join(f"{name} {value}" for name, value in self._figures().items())
        stages = ", ".join(f"{stage} {metrics[f'time/{stage}'] / metrics['time/step']:.0%}" for stage in STAGES)
        step = f"step {self._step}/{self._config.run.steps}"
        return f"{step}  {figures}  {_seconds(metrics['time/step'])} ({stages})  {self._left}"

    def _render(self) -> Group:
        config = self._config
        folder = Column(justify="right", style="dim", no_wrap=True)
        title = Table.grid(Column(ratio=1, no_wrap=True), folder, expand=True)
        what = Text.assemble(("Rolecall", "bold"), f"  {config.algorithm.name.upper()}, {Path(config.model.path).name}")
        title.add_row(what, Text(config.run.dir))
        parts: list[Any] = ["", title, ""]
        if self._step:
            parts += [self._progress(), "", self._figures_row(), "", stage_bar(self._metrics, self._output.width), ""]
        if self._status:
            parts += [Spinner("line", Text(self._status, style="dim"), style="dim"), ""]
        return Group(*parts)

    def _progress(self) -> Table:
        row = Table.grid(Column(no_wrap=True), Column(ratio=1), Column(no_wrap=True), expand=True, padding=(0, 2, 0, 0))
        total = self._config.run.steps
        bar = ProgressBar(total, self._step, complete_style=STAGE_COLORS["generate"], finished_style="green")
        row.add_row(f"step {self._step} of {total}", bar, f"{_seconds(self._metrics['time/step'])} a step", self._left)
        return row

    def _figures_row(self) -> Table:
        figures = self._figures()
        figures["reward"] += " " + sparkline(self._rewards, 16)
        table = Table.grid(*(Column(no_wrap=True) for _ in figures), expand=True)
        table.add_row(*(Text.assemble((f"{name} ", "dim"), value) for name, value in figures.items()))
        return table


def stage_bar(metrics: dict[str, Any], width: int) -> Group:
    """One bar that shows where a step's time went, in the colours of the six stages, with a legend."""
    seconds = [metrics[f"time/{stage}"] for stage in STAGES]
    scale = 1 / max(metrics["time/step"], sum(seconds), 1e-9)
    bar = Text()
    for color, end in zip(STAGE_COLORS.values(), accumulate(seconds), strict=True):
        bar.append("█" * (round(end * scale * width) - len(bar)), color)
    bar.append("░" * (width - len(bar)), "dim")  # the time between the stages
    legend = Table.grid(padding=(0, 3, 0, 0))
    entries = [
        Text.assemble(("■ ", color), f"{stage} ", (f"{spent * scale:.0%}", "bold"))
        for (stage, color), spent in zip(STAGE_COLORS.items(), seconds, strict=True)
    ]
    for row in [entries] if width >= 100 else [entries[:3], entries[3:]]:
        legend.add_row(*row)
    return Group(bar, legend)


def sparkline(values: list[float], width: int) -> str:
    """The course of ``values`` from their smallest to their largest, in at most ``width`` characters."""
    means = binned(values, width)
    low, high = min(means, default=0.0), max(means, default=0.0)
    scale = (len(BLOCKS) - 1) / ((high - low) or 1.0)
    return "".join(BLOCKS[round((value - low) * scale)] for value in means)


def _figure(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value >= 10 else f"{value:.2f} s"


def _answers(answers: list[tuple[dict[str, Any], dict[str, Any]]]) -> Table:
    table = Table(title="The same held-out prompts before and after", title_style="bold", box=None, expand=True)
    table.add_column("Prompt", ratio=4, no_wrap=True)
    for when in ("Before", "After"):
        table.add_column(when, ratio=3, no_wrap=True)
        table.add_column("Reward", justify="right")
    for before, after in answers:
        better = "green" if after["reward"] > before["reward"] else "red" if after["reward"] < before["reward"] else ""
        table.add_row(
            Text(_one_line(before["prompt"])),
            Text(_one_line(before["response"]), style="dim"),
            f"{before['reward']:.2f}",
            Text(_one_line(after["response"])),
            Text(f"{after['reward']:.2f}", style=better),
        )
    return table


def _one_line(text: str) -> str:
    return " ".join(text.split())
