"""Held-out evaluation: the same prompts, seeds and sampling at every step, so that only the weights differ."""

from __future__ import annotations

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
    telemetry.append(
        run_dir / telemetry.EVAL,
        [
            {
                "step": step,
                "prompt_id": sample.prompt_id,
                "index": sample.index,
                "prompt": prompts[sample.group_id].text,
                "response": sample.text,
                "reward": reward,
            }
            for sample, reward in zip(samples, rewards, strict=True)
        ],
    )
    return sum(rewards) / len(rewards)

