"""A whole run through Ray with vLLM in a process of its own, next to the Actor's."""

import json
import os
import signal
from collections import Counter
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


@pytest.mark.slow
@needs_vllm
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


@pytest.mark.slow
@needs_vllm
def test_the_demo_takes_two_steps_with_vllm(tmp_path, local_ray):
    """The real model, with the Actor and vLLM in two processes, and the recipe of `rolecall demo`."""
    overrides = {
        "run.dir": str(tmp_path / "run"), "run.steps": 2, "rollout.engine": "vllm", "model.dtype": "float32",
        "rollout.prompts": 4, "rollout.group_size": 4, "data.holdout": 2, "run.eval_samples": 1,
    }  # fmt: skip
    run = rolecall.train(Config.load(Path(rolecall.__file__).with_name("demo.toml"), overrides))
    assert [line["sync/version"] for line in run.metrics] == [1, 2]
    assert json.loads((run.dir / "versions.json").read_text())["weight sync"] == "shared memory"
    assert all(0 <= line["reward/mean"] <= 1 and line["mismatch/mean"] < 1e-3 for line in run.metrics)
    assert run.metrics[0]["policy/grad_norm"] > 0  # so that step 2 generates from weights that were sent


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
def test_vllm_killed_mid_generation_changes_nothing(tmp_path, local_ray, monkeypatch):
    def run(name: str) -> rolecall.Run:
        overrides = {
            "run.dir": str(tmp_path / name), "run.steps": 3, "rollout.engine": "vllm", "rollout.sleep": 1,
            "rollout.prompts": 4, "rollout.group_size": 4, "data.holdout": 0,
        }  # fmt: skip
        return rolecall.train(Config.load(RECIPES / "grpo-tiny.toml", overrides))

    undisturbed = run("undisturbed")
    monkeypatch.setitem(worker.CLASSES, "rollout", f"{__name__}:KilledOnce")
    with pytest.warns(
        UserWarning, match=r"pool 'train-rollout' .* died during rollout\.generate\. It is started again"
    ):
        killed = run("killed")
    assert (killed.dir / "killed").exists()
    assert [line["rollout/restarts"] for line in killed.metrics] == [0, 1, 0]
    assert [line["rollout/restarts"] for line in undisturbed.metrics] == [0, 0, 0]
    samples, wanted = (logs.read(run.dir / logs.SAMPLES) for run in (killed, undisturbed))
    assert set(Counter((line["step"], line["group_id"]) for line in samples).values()) == {4}  # none lost or doubled
    assert len({(line["group_id"], line["index"]) for line in samples}) == len(samples) == 3 * 4 * 4
    assert samples == wanted


@pytest.mark.slow
@needs_vllm
def test_vllm_over_two_processes_agrees_with_the_actor(tmp_path, local_ray):
    """Each holds half of every layer; what a sync brings is split between them, and both change at once."""
    overrides = {"run.dir": str(tmp_path / "run"), "rollout.engine": "vllm", "rollout.tensor_parallel": 2}
    run = rolecall.train(Config.load(RECIPES / "grpo-tiny.toml", overrides | {"run.steps": 4, "run.eval_every": 0}))
    gaps = [line["mismatch/mean"] for line in run.metrics if "mismatch/mean" in line]
    assert [line["sync/version"] for line in run.metrics] == [1, 2, 3, 4]
    assert gaps and max(gaps) < 1e-4
