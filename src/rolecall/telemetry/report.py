"""The report of a run: one HTML file that opens anywhere, without network or scripts."""

import io
import json
import statistics
import tomllib
from datetime import timedelta
from itertools import groupby
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from rolecall.errors import UserError
from rolecall.files import atomic_write
from rolecall.telemetry import logs
from rolecall.telemetry.logs import STAGE_COLORS, binned

POINTS = 300  # most points of a curve, and bars of the timeline; beyond that, means of neighbouring steps
STEPS_SHOWN = 40  # most steps whose samples are listed, evenly spread
BLUE, RED = STAGE_COLORS["generate"], STAGE_COLORS["update"]
INK, LINES = "#010203", "#010204"  # stand-ins that become CSS colours, so that the plots follow light and dark

# Title, what to look for, and the metrics drawn in it. A curve without values is left out.
CURVES = (
    ("Reward", "mean of the step's samples; should rise", ("reward/mean",)),
    ("Held-out accuracy", "mean reward on prompts never trained on", ("heldout/accuracy",)),
    ("KL to the Reference", "drift from the starting model", ("kl",)),
    ("Entropy", "nats a token; near 0 it no longer explores", ("policy/entropy",)),
    ("Response length", "tokens", ("response_length/mean",)),
    ("Flat groups", "groups of equal rewards, which teach nothing", ("reward/flat_groups",)),
    ("Clip fraction", "tokens whose ratio was clipped", ("policy/clip_fraction",)),
    ("Gradient norm", "before clipping", ("policy/grad_norm", "value/grad_norm")),
    ("Policy loss", "no measure of progress; look for spikes", ("policy/loss",)),
    ("Value loss", "Critic's error", ("value/loss",)),
    ("Explained variance", "1: the Critic predicts the returns", ("value/explained_variance",)),
    ("Trainer – engine mismatch", "mean |log-probability difference|", ("mismatch/mean",)),
)


def write(run_dir: str | Path) -> Path:
    """Write ``report.html`` into a run's folder, finished or in progress, and return its path.

    Raises:
        UserError: no such folder, or no metrics in it.
    """
    run_dir = Path(run_dir)
    if not (run_dir / logs.METRICS).exists():
        raise UserError(
            f"There is no run in {str(run_dir)!r}: it holds no {logs.METRICS}. The folder is another one (runs are in "
            "runs/ by default), or no step has finished yet."
        )
    steps = logs.read(run_dir / logs.METRICS)
    heldout = logs.heldout_accuracy(run_dir)
    config = run_dir / "config.toml"
    versions = run_dir / "versions.json"
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    template = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True).get_template("report.html.j2")
    page = template.render(
        name=run_dir.resolve().name,
        headline=_headline(steps, heldout, config),
        curves=_curves(steps, heldout),
        timeline=_timeline(steps),
        stages=_stage_totals(steps),
        answers=logs.before_after(run_dir),
        samples=_samples(run_dir),
        config=config.read_text(encoding="utf-8") if config.exists() else "",
        versions=json.loads(versions.read_text()) if versions.exists() else {},
    )
    path = run_dir / "report.html"
    atomic_write(path, page)
    return path


def _headline(steps: list[dict[str, Any]], heldout: dict[int, float], config: Path) -> list[tuple[str, str, str]]:
    """(label, figure, remark) of each headline figure that is known."""
    accuracy = list(heldout.values())
    names = ("reward/mean", "time/step", "tokens_per_second", "memory/peak_gb")
    rewards, seconds, speeds, memory = (_series(steps, name)[1] for name in names)
    total = f"of {tomllib.loads(config.read_text(encoding='utf-8'))['run']['steps']}" if config.exists() else ""
    figures: list[Any] = [
        accuracy and ("Held-out accuracy", f"{accuracy[-1]:.3f}", f"{accuracy[0]:.3f} at the start"),
        rewards and ("Reward", f"{rewards[-1]:.3f}", f"{rewards[0]:.3f} at the start"),
        ("Steps", str(steps[-1]["step"] if steps else 0), total),
        seconds and ("Time", str(timedelta(seconds=round(sum(seconds)))), f"{statistics.median(seconds):.1f} s a step"),
        speeds and ("Tokens/s", f"{statistics.median(speeds):,.0f}", "generated"),
        memory and ("Peak memory", f"{max(memory):.1f} GB", ""),
    ]
    return [figure for figure in figures if figure]


def _series(steps: list[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Steps and values where a metric is known."""
    known = [(line["step"], line[name]) for line in steps if line.get(name) is not None]
    return [step for step, _ in known], [value for _, value in known]


def _curves(steps: list[dict[str, Any]], heldout: dict[int, float]) -> list[tuple[str, str, Markup]]:
    """(title, remark, plot) of each curve that has values."""
    curves = []
    for title, remark, names in CURVES:
        series = {name: _series(steps, name) for name in names}
        if names == ("heldout/accuracy",):
            series = {names[0]: (list(heldout), list(heldout.values()))}
        series = {name: points for name, points in series.items() if points[0]}
        if series:
            curves.append((title, remark, _plot(title, 4.2, 2.1, lambda axes, series=series: _draw(axes, series))))
    return curves


def _draw(axes: Axes, series: dict[str, tuple[list[int], list[float]]]) -> None:
    for color, (name, (x, y)) in zip((BLUE, RED), series.items(), strict=False):
        marker = "o" if len(x) <= 30 else ""
        axes.plot(
            binned(x, POINTS), binned(y, POINTS), color=color, lw=1.6, marker=marker, ms=3, label=name.split("/")[0]
        )
    if len(series) > 1:
        axes.legend(frameon=False, labelcolor=INK)


def _timeline(steps: list[dict[str, Any]]) -> Markup | None:
    """Seconds of each stage, stacked, by step; what lies between the stages in grey on top."""
    timed = [line for line in steps if line.get("time/step") is not None]
    if not timed:
        return None
    x = binned([line["step"] for line in timed], POINTS)
    width = 0.86 * (x[1] - x[0] if len(x) > 1 else 1)

    def draw(axes: Axes) -> None:
        bottom = [0.0] * len(x)
        for stage, color in STAGE_COLORS.items():
            height = binned([line.get(f"time/{stage}") or 0.0 for line in timed], POINTS)
            axes.bar(x, height, width, bottom, color=color)
            bottom = [low + high for low, high in zip(bottom, height, strict=True)]
        whole = binned([line["time/step"] for line in timed], POINTS)
        axes.bar(x, [max(0.0, w - b) for w, b in zip(whole, bottom, strict=True)], width, bottom, color=LINES)
        axes.set_ylabel("seconds")

    return _plot("timeline", 13, 3.2, draw)


def _plot(name: str, width: float, height: float, draw: Any) -> Markup:
    """An SVG drawn by ``draw(axes)``, in inches; text stays text, and colours follow the page."""
    style: dict[Any, Any] = {
        "svg.fonttype": "none", "svg.hashsalt": name, "font.size": 9, "axes.spines.top": False,
        "axes.spines.right": False, "axes.edgecolor": LINES, "axes.grid": True, "axes.grid.axis": "y",
        "grid.color": LINES, "grid.linewidth": 0.6, "axes.axisbelow": True, "xtick.color": LINES, "ytick.color": LINES,
        "xtick.labelcolor": INK, "ytick.labelcolor": INK, "axes.labelcolor": INK, "text.color": INK,
    }  # fmt: skip
    with rc_context(style):
        figure = Figure(figsize=(width, height), layout="constrained")
        axes = figure.subplots()
        draw(axes)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :].replace(INK, "var(--ink)").replace(LINES, "var(--lines)")
    return Markup(svg)  # numbers and our own titles only: nothing that a model wrote is in it


def _stage_totals(steps: list[dict[str, Any]]) -> list[tuple[str, str, str, float]]:
    """(stage, colour, time, share of all steps' time), and what is left between the stages."""
    whole = sum(_series(steps, "time/step")[1])
    rows = [(stage, color, sum(_series(steps, f"time/{stage}")[1])) for stage, color in STAGE_COLORS.items()]
    rows.append(("between stages", "var(--lines)", max(0.0, whole - sum(seconds for _, _, seconds in rows))))
    return [(stage, color, f"{seconds:,.1f} s", seconds / whole if whole else 0.0) for stage, color, seconds in rows]


def _samples(run_dir: Path) -> list[tuple[int, list[dict[str, Any]]]]:
    """(step, its logged samples), first and last step included."""
    records = logs.read(run_dir / logs.SAMPLES)
    by_step = [(step, list(group)) for step, group in groupby(records, key=lambda record: record["step"])]
    if len(by_step) <= STEPS_SHOWN:
        return by_step
    return [by_step[round(i * (len(by_step) - 1) / (STEPS_SHOWN - 1))] for i in range(STEPS_SHOWN)]
