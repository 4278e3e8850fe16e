"""A whole run through Ray with vLLM in a process of its own, next to the Actor's."""

import importlib.util
from pathlib import Path

import pytest

import rolecall
from rolecall.config import Config

RECIPES = Path(__file__).parents[1] / "recipes"
INSTALLED = importlib.util.find_spec("vllm") is not None


@pytest.mark.slow
@pytest.mark.skipif(not INSTALLED, reason="vLLM is not installed (docs/engines.md)")
def test_learns_the_first_digit_with_vllm(tmp_path, local_ray):
    """One word changed in the recipe. Stale weights, a wrong shift or end would leave the reward at about .05."""
    overrides = {"run.dir": str(tmp_path / "run"), "rollout.engine": "vllm", "rollout.sleep": 1, "run.steps": 90}
    run = rolecall.train(Config.load(RECIPES / "grpo-tiny.toml", overrides))
    rewards = [line["reward/mean"] for line in run.metrics]
    assert sum(rewards[:3]) / 3 < 0.3
    assert sum(rewards[-5:]) / 5 > 0.5
    assert run.heldout[len(rewards)] > 0.5
    parameters = 100_672
    for step, line in enumerate(run.metrics, start=1):
        assert (line["sync/version"], line["sync/bytes"]) == (step, 4 * parameters)
        if "mismatch/mean" in line:  # not where all groups are flat and nothing was trained on
            assert line["mismatch/mean"] < 1e-4  # float32 in both; the first step is checked by the run itself
