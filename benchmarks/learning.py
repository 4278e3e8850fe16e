"""Does it learn? Recipes run whole, with three seeds each: held-out accuracy before and after, and the reward curve."""

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import matplotlib

from benchmarks import write
from rolecall.config import Config
from rolecall.loop.run import train

SEEDS = (0, 1, 2)
RECIPES = Path("recipes")


def run(out: Path) -> dict[str, Any]:
    """From random weights: write ``learning.json``, ``learning.md`` and ``learning.svg`` under ``out``."""
    return train_all("learning", ["grpo-tiny", "ppo-tiny"], out)


def train_all(name: str, recipes: list[str], out: Path) -> dict[str, Any]:
    """Train each recipe with each seed and write ``NAME.json``, ``NAME.md`` and ``NAME.svg`` under ``out``."""
    rows = [_train(recipe, seed) for recipe in recipes for seed in SEEDS]
    result: dict[str, Any] = {"cores": len(os.sched_getaffinity(0))}
    if len(recipes) == 1:
        result["seeds"] = [{key: row[key] for key in row if key != "recipe"} for row in rows]
    else:
        result["recipes"] = {recipe: [row for row in rows if row["recipe"] == recipe] for recipe in recipes}
    _plot(rows, out / f"{name}.svg")
    write(name, result, _table(rows) + f"\n\n![training reward by step]({name}.svg)", out)
    return result


def _train(recipe: str, seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        config = Config.load(RECIPES / f"{recipe}.toml", {"run.seed": seed, "run.dir": f"{folder}/run"})
        started = time.monotonic()
        finished = train(config)
        seconds = time.monotonic() - started
        heldout, metrics = finished.heldout, finished.metrics
    return {
        "recipe": recipe,
        "seed": seed,
        "heldout_before": heldout[0],
        "heldout_after": heldout[config.run.steps],
        "seconds": seconds,
        "steps": config.run.steps,
        "reward": [line["reward/mean"] for line in metrics],
        "step_seconds": sum(line["time/step"] for line in metrics) / len(metrics),
    }


def _table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| recipe | seed | held-out before | held-out after | steps | seconds, all in all | seconds a step |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['recipe']} | {row['seed']} | {row['heldout_before']:.3f} | {row['heldout_after']:.3f} "
            f"| {row['steps']} | {row['seconds']:.0f} | {row['step_seconds']:.2f} |"
        )
    return "\n".join(lines)


def _plot(rows: list[dict[str, Any]], path: Path) -> None:
    matplotlib.use("svg")
    from matplotlib import pyplot

    recipes = list(dict.fromkeys(row["recipe"] for row in rows))
    figure, panels = pyplot.subplots(1, len(recipes), figsize=(4.5 * len(recipes), 3), sharey=True, squeeze=False)
    for panel, recipe in zip(panels[0], recipes, strict=True):
        for row in rows:
            if row["recipe"] == recipe:
                panel.plot(range(1, row["steps"] + 1), row["reward"], label=f"seed {row['seed']}")
        panel.set(title=recipe, xlabel="step", ylim=(0, 1))
    panels[0][0].set_ylabel("mean reward")
    panels[0][0].legend(frameon=False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
