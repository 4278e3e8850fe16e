"""Held-out evaluation: the same prompts, seeds and sampling at every step, so that only the weights differ."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

from rolecall.loop.stages import Context, requests
from rolecall.samples import Prompt
from rolecall.telemetry import metrics as telemetry


def evaluate(context: Context, heldout: list[Prompt], run_dir: Path, step: int) -> float:
    """Mean reward of ``run.eval_samples`` responses to each held-out prompt; the answers go to eval.jsonl.

    Groups get negative ids, which the training stream never uses, so evaluation shares no seed with it.
    """
    groups = [(-1 - index, prompt) for index, prompt in enumerate(heldout)]
    samples = context.roles.rollout.generate(requests(context.config, groups, context.config.run.eval_samples))
    prompts = dict(groups)
    rewards = context.roles.reward.score([prompts[sample.group_id] for sample in samples], samples)
    with open(run_dir / "eval.jsonl", "a") as file:
        for sample, reward in zip(samples, rewards, strict=True):
            line = {
                "step": step,
                "prompt_id": sample.prompt_id,
                "index": sample.index,
                "prompt": prompts[sample.group_id].text,
                "response": sample.text,
                "reward": reward,
            }
            file.write(json.dumps(line) + "\n")
    return sum(rewards) / len(rewards)


def accuracy_by_step(run_dir: Path) -> dict[int, float]:
    """Mean held-out reward of each evaluated step, read back from eval.jsonl."""
    by_step: dict[int, list[float]] = defaultdict(list)
    for line in telemetry.read(run_dir / "eval.jsonl"):
        by_step[line["step"]].append(line["reward"])
    return {step: sum(rewards) / len(rewards) for step, rewards in sorted(by_step.items())}
