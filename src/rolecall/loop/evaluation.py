"""Held-out evaluation: the same prompts, seeds and sampling at every step, so that only the weights differ."""

import statistics
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rolecall import data, models
from rolecall.config import Config
from rolecall.errors import UserError
from rolecall.loop.stages import Context, generate, score
from rolecall.roles.reward import Reward
from rolecall.roles.rollout import Rollout
from rolecall.samples import Prompt
from rolecall.telemetry import logs


def answers(context: Context, heldout: list[Prompt]) -> list[dict[str, Any]]:
    """``run.eval_samples`` scored responses to each held-out prompt, a dictionary each: the first two stages.

    Groups get negative ids, which the training stream never uses, so evaluation shares no seed with it.
    """
    groups = [(-1 - index, prompt) for index, prompt in enumerate(heldout)]
    samples = generate(context, groups, context.config.run.eval_samples)
    score(context, groups, samples)
    return logs.records(groups, samples)


def evaluate(context: Context, heldout: list[Prompt], run_dir: Path, step: int) -> float:
    """Held-out accuracy (mean reward) of the present weights; the answers go to eval.jsonl."""
    lines = answers(context, heldout)
    logs.append(run_dir / logs.EVAL, [{"step": step} | line for line in lines])
    return accuracy(lines)


def accuracy(lines: list[dict[str, Any]]) -> float:
    return statistics.fmean(line["reward"] for line in lines)


def evaluate_model(config: Config) -> list[dict[str, Any]]:
    """Generate and score the held-out prompts with the configured model, in this process, without Ray.

    Returns:
        one line a response, as in eval.jsonl.

    Raises:
        UserError: the data set holds no prompts out.
    """
    _, heldout, _ = data.load_prompts(config, models.load_tokenizer(config.model))
    if not heldout:
        raise UserError("There is nothing to evaluate on: set data.holdout to more than 0, or data.eval_path.")
    return answers(Context(config, SimpleNamespace(rollout=Rollout(config), reward=Reward(config))), heldout)
