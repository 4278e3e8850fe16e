"""A whole run through Ray with vLLM in a process of its own, next to the Actor's."""

import json
import os
import signal
from itertools import count
from pathlib import Path

import pytest

import rolecall
from rolecall.cluster import worker
from rolecall.config import Config
from rolecall.roles.rollout import Rollout
from rolecall.samples import Request, Sample
from rolecall.telemetry import logs
from vllm_here import needs_vllm

RECIPES = Path(__file__).parents[1] / "recipes"


def run(folder: Path, steps: int) -> rolecall.Run:
    """One word changed in the recipe."""
    overrides = {"run.dir": str(folder), "run.steps": steps, "rollout.engine": "vllm", "rollout.sleep": 1}
    return rolecall.train(Config.load(RECIPES / "grpo-tiny.toml", overrides))


@pytest.fixture(scope="module")
def learned(tmp_path_factory, local_ray) -> rolecall.Run:
    """A run that nobody disturbs."""
    return run(tmp_path_factory.mktemp("runs") / "run", 80)


@pytest.mark.slow
@needs_vllm
def test_learns_the_first_digit_with_vllm(learned):
    """Stale weights, a wrong shift or end would leave the reward at about .05."""
    rewards = [line["reward/mean"] for line in learned.metrics]
    assert sum(rewards[:3]) / 3 < 0.3
    assert sum(rewards[-5:]) / 5 > 0.5
    assert learned.heldout[len(rewards)] > 0.5
    assert json.loads((learned.dir / "versions.json").read_text())["weight sync"] == "shared memory"
    parameters = 100_672
    for step, line in enumerate(learned.metrics, start=1):
        assert (line["sync/version"], line["sync/bytes"]) == (step, 4 * parameters)
        if "mismatch/mean" in line:  # not where all groups are flat and nothing was trained on
            assert line["mismatch/mean"] < 1e-4  # float32 in both; the first step is checked by the run itself


class KilledOnce(Rollout):
    """Its process kills itself at the third token of the second step; the one that replaces it does not."""

    def generate(self, requests: list[Request]) -> list[Sample]:
        killed = Path(self.config.run.dir) / "killed"
        if self.version == 1 and not killed.exists():
            step, numbers = self.engine._step, count(1)

            def dying() -> None:
                if next(numbers) == 3:
                    killed.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                step()

            self.engine._step = dying
        return super().generate(requests)


@pytest.mark.slow
@needs_vllm
def test_vllm_killed_mid_generation_changes_nothing(tmp_path, learned, monkeypatch):
    monkeypatch.setitem(worker.CLASSES, "rollout", f"{__name__}:KilledOnce")
    with pytest.warns(
        UserWarning, match=r"pool 'train-rollout' .* died during rollout\.generate\. It is started again"
    ):
        killed = run(tmp_path / "killed", 3)
    assert (killed.dir / "killed").exists()
    assert [line["rollout/restarts"] for line in killed.metrics] == [0, 1, 0]
    assert {line["rollout/restarts"] for line in learned.metrics} == {0}
    samples, wanted = (logs.read(run.dir / logs.SAMPLES) for run in (killed, learned))
    assert samples == wanted[: len(samples)] and samples[-1]["step"] == 3
    # Those are some of a step's samples. What it makes of all of them is the same, too: none was lost or doubled.
    for line, undisturbed in zip(killed.metrics, learned.metrics, strict=False):
        for key in ("reward/mean", "response_length/mean", "policy/loss", "policy/grad_norm", "mismatch/mean"):
            assert line[key] == pytest.approx(undisturbed[key], rel=1e-5, abs=1e-6), key


def coin(prompts: list[str], responses: list[str], rows: list[dict]) -> list[float]:
    """A reward for every other response, so that no group is flat."""
    return [float(number % 2) for number in range(len(responses))]


@pytest.mark.slow
@needs_vllm
def test_the_demo_takes_two_steps_with_vllm(tmp_path, local_ray):
    """Its own 135M model, on few and short samples."""
    overrides = {
        "rollout.engine": "vllm", "rollout.prompts": 2, "rollout.group_size": 4, "rollout.max_tokens": 8,
        "reward.function": f"{__name__}:coin", "algorithm.watch_kl": False, "data.holdout": 0,
        "run.dir": str(tmp_path / "run"), "run.steps": 2,
    }  # fmt: skip
    finished = rolecall.train(Config.load(Path(rolecall.__file__).with_name("demo.toml"), overrides))
    assert [line["sync/version"] for line in finished.metrics] == [1, 2]
    assert {line["sync/bytes"] for line in finished.metrics} == {4 * 134_515_008}
    assert max(line["mismatch/mean"] for line in finished.metrics) < 1e-4
    assert min(line["policy/grad_norm"] for line in finished.metrics) > 0


@pytest.mark.slow
@needs_vllm
def test_vllm_over_two_processes_agrees_with_the_actor(tmp_path, smollm2_small, local_ray):
    """Each holds half of every layer; what a sync brings is split between them, and both change at once.

    By the demo's recipe, on a model of its kind: chat messages, a real tokenizer, tied embeddings.
    """
    overrides = {
        "model.path": str(smollm2_small), "rollout.engine": "vllm", "rollout.tensor_parallel": 2, "actor.lr": 2e-3,
        "rollout.prompts": 4, "rollout.group_size": 4, "rollout.max_tokens": 4, "reward.function": f"{__name__}:coin",
        "algorithm.watch_kl": False, "data.holdout": 0, "data.max_prompt_tokens": 60,
        "run.dir": str(tmp_path / "run"), "run.steps": 4,
    }  # fmt: skip
    finished = rolecall.train(Config.load(Path(rolecall.__file__).with_name("demo.toml"), overrides))
    assert [line["sync/version"] for line in finished.metrics] == [1, 2, 3, 4]
    assert max(line["mismatch/mean"] for line in finished.metrics) < 1e-4
    assert min(line["policy/grad_norm"] for line in finished.metrics) > 0
