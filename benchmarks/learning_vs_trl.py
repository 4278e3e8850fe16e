"""Learning against TRL's: same model, task, prompts, batch, learning rate, reward and held-out answers' seeds."""

import statistics
import tempfile
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks import _gpu, write
from benchmarks._gpu import Part, Row
from rolecall import models
from rolecall.config import Config
from rolecall.data import load_prompts
from rolecall.data.functions import load_function
from rolecall.engines.transformers import TransformersEngine
from rolecall.errors import UserError, check_known
from rolecall.loop import evaluation
from rolecall.loop.run import train
from rolecall.loop.stages import Context
from rolecall.models import Loaded
from rolecall.roles.reward import Reward
from rolecall.samples import Prompt

NAME, RECIPE = "learning-vs-trl", "grpo-arithmetic"
COLORS = {"rolecall": "#4c86c6", "trl": "#d9655b", "trl-default": "#b08fc7", "trl-generate": "#e0a030"}
WAYS = {
    "trl": "with a colocated vLLM in float32, as all the rest",
    "trl-default": "its colocated vLLM in the checkpoint's bfloat16",
    "trl-generate": "with transformers' generate",
}
WITH_VLLM = ("trl", "trl-default")
GOAL = 0.8  # held-out accuracy, the time to which the table gives


def run(
    out: Path,
    system: Sequence[str] = ("rolecall", "trl"),
    seed: Sequence[int] = (0, 1, 2),
    steps: int = 24,
    every: int = 2,
    recipe: str = RECIPE,
) -> dict[str, Any]:
    """Add to ``learning-vs-trl.json``, ``.md`` and ``.svg`` under ``out``.

    Args:
        system: "rolecall"; "trl" (with a colocated vLLM, in float32 as all the rest), "trl-default" (whose vLLM takes
            the checkpoint's bfloat16 while TRL trains in float32) or "trl-generate" (with transformers' generate).
        every: steps between evaluations, which are not timed.
        recipe: for both; without its warm-up, which TRL counts otherwise, and without watching the KL.
    """
    for by in system:
        check_known("system", by, COLORS)
        if by != "rolecall":
            _gpu.check_installed("trl")
    if any(by in WITH_VLLM for by in system):
        _gpu.check_installed("vllm")
    if every < 1:
        raise UserError(f"--every {every}: a curve needs evaluations on its way.")
    name = NAME if recipe == RECIPE else f"{NAME}-{recipe}"
    if _gpu.machine() == "dry-run":
        name = f"{NAME}-dry-run"
    result = _gpu.earlier(name, out)
    shared: dict[str, Any] = {"steps": steps, "every": every, "recipe": recipe}
    for one in seed:
        _config(one, **shared)  # what no run can be begun with is told before the first
    parts = [Part("benchmarks.learning_vs_trl", {"system": by, "seed": one} | shared) for one in seed for by in system]
    for row, _ in _gpu.measure(parts):
        by = row.pop("system")
        print(_line(by, _gpu.merge(result.setdefault(by, []), row, ["seed"])), flush=True)
        measured = {by: result[by] for by in COLORS if by in result}
        _plot(measured, out / f"{name}.svg")
        table = f"{_table(measured, recipe)}\n\n![held-out accuracy by samples and by seconds]({name}.svg)"
        write(name, result, table, out, f"rolecall bench {NAME} --system {','.join(measured)}")
    return result


def measure(system: str, seed: int, steps: int, every: int, recipe: str) -> Iterator[Row]:
    """The curve of one run: held-out accuracy after so many samples and so many seconds of steps."""
    config = _config(seed, steps, every, recipe)
    with tempfile.TemporaryDirectory() as folder:
        config.run.dir = f"{folder}/run"
        if system == "rolecall":
            finished = train(config)
            heldout, seconds = finished.heldout, [line["time/step"] for line in finished.metrics]
        else:
            heldout, seconds = _train_with_trl(config, folder, system)
    passed = [0.0, *accumulate(seconds)]
    batch = config.rollout.prompts * config.rollout.group_size
    yield {
        "system": system,
        "seed": seed,
        "samples": [step * batch for step in heldout],
        "seconds": [passed[step] for step in heldout],
        "accuracy": list(heldout.values()),
    }


def _config(seed: int, steps: int, every: int, recipe: str) -> Config:
    overrides = {
        "run.seed": seed,
        "run.steps": steps,
        "run.eval_every": every,
        "run.save_every": steps,
        "actor.warmup_steps": 0,
        "algorithm.watch_kl": False,
    }
    return Config.load(Path("recipes") / f"{recipe}.toml", overrides)


def _train_with_trl(config: Config, folder: str, system: str) -> tuple[dict[int, float], list[float]]:
    """Held-out accuracy by step, and the seconds of each step. Prompts come in TRL's own order."""
    from benchmarks import _trl  # which imports TRL

    tokenizer = models.load_tokenizer(config.model)
    prompts, heldout, _ = load_prompts(config, tokenizer)
    reward = load_function(config.reward.function, "reward.function")
    accuracies: dict[int, float] = {}

    def score(completions: list[Any], number: list[int], **_: Any) -> list[float | None]:
        chosen = [prompts[i] for i in number]
        answers = [messages[0]["content"] for messages in completions]
        return reward([prompt.text for prompt in chosen], answers, [prompt.row for prompt in chosen])

    def evaluate(step: int) -> None:
        if step % config.run.eval_every == 0 or step == config.run.steps:
            model: Any = trainer.model
            accuracies[step] = _accuracy(config, Loaded(model, tokenizer, None), heldout)

    clock = _trl.StepClock(evaluate)
    trainer = _trl.trainer(
        str(models.resolve(config.model.path)),
        score,
        [{"prompt": prompt.text, "number": i} for i, prompt in enumerate(prompts)],
        clock,
        folder,
        vllm=system in WITH_VLLM,
        vllm_dtype="float32" if system == "trl" else "auto",
        prompts=config.rollout.prompts,
        group_size=config.rollout.group_size,
        micro=config.rollout.prompts * config.rollout.group_size,
        max_prompt=max(len(prompt.tokens) for prompt in prompts),
        max_tokens=config.rollout.max_tokens,
        max_steps=config.run.steps,
        learning_rate=config.actor.lr,
        seed=config.run.seed,
        bf16=False,  # as Rolecall has it for so small a model
    )
    trainer.train()
    return accuracies, clock.seconds


def _accuracy(config: Config, loaded: Loaded, heldout: list[Prompt]) -> float:
    """As a run of Rolecall has it: the same seeds and the same sampler, on TRL's weights."""
    engine = TransformersEngine(loaded, config.rollout.max_sequences)
    context = Context(config, SimpleNamespace(rollout=engine, reward=Reward(config)))
    return evaluation.accuracy(evaluation.answers(context, heldout))


def _line(system: str, row: Row) -> str:
    there = [seconds for seconds, accuracy in zip(row["seconds"], row["accuracy"], strict=True) if accuracy >= GOAL]
    accuracy, half = row["accuracy"], len(row["accuracy"]) // 2
    cells = [system, str(row["seed"]), *(f"{accuracy[at]:.3f}" for at in (0, half, -1))]
    cells += [f"{there[0]:.1f}" if there else "never", f"{row['seconds'][-1]:.1f}", _gpu.commits(row)]
    return f"| {' | '.join(cells)} |"


def _table(measured: dict[str, list[Row]], recipe: str) -> str:
    ways = "; ".join(f"`{by}`: {WAYS[by]}" for by in measured if by in WAYS)
    lines = [
        f"`recipes/{recipe}.toml` by Rolecall and by TRL's GRPOTrainer ({ways}): held-out accuracy, answered with the "
        "same seeds. Seconds are those of the steps, without start and evaluation.",
        "",
        f"| system | seed | accuracy before | half-way | at the end | s to {GOAL} | s, all steps | commit |",
        "|---|---|---|---|---|---|---|---|",
        *(_line(system, row) for system, rows in measured.items() for row in sorted(rows, key=lambda row: row["seed"])),
    ]
    ends = {system: statistics.fmean(row["accuracy"][-1] for row in rows) for system, rows in measured.items()}
    return "\n".join([*lines, "", "Mean at the end: " + ", ".join(f"{by} {end:.3f}" for by, end in ends.items()) + "."])


def _plot(measured: dict[str, list[Row]], path: Path) -> None:
    """Every seed's curve, over samples and over seconds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for panel, over in zip(panels, ("samples", "seconds"), strict=True):
        for system, rows in measured.items():
            for number, row in enumerate(rows):
                label = system if number == 0 else None
                panel.plot(row[over], row["accuracy"], color=COLORS[system], lw=1.4, alpha=0.8, label=label)
        panel.set(xlabel=over, ylim=(0, 1))
    panels[0].set_ylabel("held-out accuracy")
    panels[0].legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="svg")


if __name__ == "__main__":
    _gpu.print_rows(measure)
