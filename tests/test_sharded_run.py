"""Roles sharded over the processes of a pool, through Ray: one to the loop, in step with their engines, watched."""

import os
import shutil
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import distribute_tensor
from transformers import AutoModelForCausalLM

import rolecall
from rolecall import models
from rolecall.cluster import Roles, spawn
from rolecall.cluster.spawn import _bundles
from rolecall.config import Config
from rolecall.config import Model as ModelSection
from rolecall.engines.native.engine import NativeEngine
from rolecall.errors import ProcessDied, RunError, UserError
from rolecall.roles.actor import Actor
from rolecall.roles.rollout import Rollout
from rolecall.samples import Request, Sampling
from rolecall.sync import WeightSync
from rolecall.training.sharding import whole
from test_train import RECIPES, STEPS, comparable
from training_samples import uneven

BESIDE = {"train": {"roles": ["actor", "rollout"], "processes": 2, "threads": 1}, "score": {"roles": ["reward"]}}
APART = {
    "train": {"roles": ["actor"], "processes": 2, "threads": 1},
    "roll": {"roles": ["rollout"], "threads": 1},
    "score": {"roles": ["reward"]},
}
REQUESTS = [Request(g, f"p{g}", [2, 3, 6 + g, 4], 3, 0, Sampling(8)) for g in range(4)]


def config(tiny_path: Path, pools: Any, timeout: float = 120.0) -> Config:
    settings = {"path": str(tiny_path), "dtype": "float32"}
    return Config(model=settings, rollout={"max_tokens": 8}, cluster={"timeout": timeout, "pools": pools})


def shift(actor: Actor, seed: int) -> None:
    """Other weights than the model's file has, the same on all ranks."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in actor.module.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.3
            parameter.add_(distribute_tensor(noise, parameter.device_mesh, parameter.placements))


def shard_sizes(actor: Actor) -> tuple[int, int]:
    """Of this rank's shards and of all, in numbers."""
    parameters = list(actor.module.parameters())
    return sum(p.to_local().numel() for p in parameters), sum(p.numel() for p in parameters)


def weights(actor: Actor) -> dict[str, list[float]]:
    return {name: whole(tensor).flatten().tolist() for name, tensor in actor.weights()}


def held(rollout: Rollout) -> dict[str, list[float]]:
    return {name: tensor.flatten().tolist() for name, tensor in rollout.engine.model.named_parameters()}


def break_engine(rollout: Rollout) -> None:
    def fail(weights: Any) -> None:
        raise MemoryError("no room for it")

    rollout.engine.write = fail  # type: ignore[method-assign]


def process_id(role: Any) -> int:
    return os.getpid()


def check_engines_follow(roles: Roles, folder: Path, **options: Any) -> None:
    """Twice: shift, sync, generate; as an engine in this process does from the whole model, exported."""
    move = WeightSync(roles.actor, roles.rollout.handles, **options)
    for version in (1, 2):
        roles.actor.start(shift, version).result()
        moved = roles.rollout.synchronise(partial(move, version))
        exported = folder / str(version)
        roles.actor.save_pretrained(str(exported))
        expected = weights_of(exported)
        assert moved["sync/bytes"] == sum(4 * len(values) for values in expected.values())
        for handle in roles.rollout.handles:
            assert handle.start(held).result() == expected
        alone = NativeEngine(models.load(ModelSection(path=str(exported), dtype="float32"), "cpu"), 256)
        for found, wanted in zip(roles.rollout.generate(REQUESTS), alone.generate(REQUESTS), strict=True):
            assert found.response == wanted.response
            assert found.logprobs == pytest.approx(wanted.logprobs, abs=1e-5)
            assert found.versions == [(0, len(found.response), version)]


def weights_of(folder: Path) -> dict[str, list[float]]:
    model = AutoModelForCausalLM.from_pretrained(folder)
    return {name: parameter.flatten().tolist() for name, parameter in model.named_parameters()}


def test_an_engine_elsewhere_gets_the_gathered_weights(tmp_path, tiny_path, local_ray):
    with spawn(config(tiny_path, APART)) as roles:
        mine, total = roles.actor.start(shard_sizes).result()
        assert 0.45 * total < mine < 0.55 * total
        check_engines_follow(roles, tmp_path / "shared memory", limit=60_000)
        check_engines_follow(roles, tmp_path / "gloo", limit=60_000, transport=("collective", "cpu"))


def test_each_process_has_an_engine_and_a_dead_or_silent_one_is_named(tmp_path, tiny_path, local_ray):
    with spawn(config(tiny_path, BESIDE)) as roles:
        first, second = (handle.process for handle in roles.rollout.handles)
        assert (first.pool, second.pool) == ("train-0", "train-1")
        check_engines_follow(roles, tmp_path)
        assert roles.actor.update(uneven())["policy/grad_norm"] > 0
        roles.rollout.handles[1].start(break_engine).result()
        with pytest.raises(RunError, match=r"rollout\.gather_weights failed in pool 'train-1'(?s:.*)no room for it"):
            WeightSync(roles.actor, roles.rollout.handles)(3)
        os.kill(second.pid, signal.SIGKILL)
        with pytest.raises(ProcessDied, match=r"pool 'train-1' \(actor, rollout; process \d+ on .*\) died") as caught:
            roles.actor.update(uneven())
        assert caught.value.process is second
    with spawn(config(tiny_path, BESIDE)) as roles:
        os.kill(roles.rollout.handles[1].process.pid, signal.SIGSTOP)
        late = r"actor.update did not return within 5 s in pool 'train-0' .* and pool 'train-1' .*; these processes"
        with pytest.raises(ProcessDied, match=late):
            replace(roles.actor, timeout=5.0).update(uneven())


# The configuration. ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pools", "rollout", "message"),
    [
        ({"a": {"roles": ["actor", "rollout", "reward"], "processes": 2}}, {}, "a reward has none; give reward a pool"),
        (APART | {"roll": {"roles": ["rollout"], "processes": 2}}, {}, "for several engines set rollout.replicas"),
        (BESIDE, {"engine": "vllm"}, "only a native or transformers engine can be beside that"),
        (BESIDE, {"replicas": 2}, "shares a process with actor"),
        (
            APART | {"train": {"roles": ["actor"], "processes": 2, "gpus": 0.5}},
            {},
            "each process needs one; gpus is 0.5",
        ),
        (
            APART | {"train-1": APART["roll"], "roll": {"roles": []}},
            {},
            "'train-1' is the one of another pool's process",
        ),
    ],
)
def test_what_cannot_be_sharded_is_refused(pools, rollout, message):
    with pytest.raises(UserError, match=message):
        Config(rollout=rollout, cluster={"pools": pools})


def gpus(available: float, pools: Any, **rollout: Any) -> dict[str, float]:
    settings = Config(rollout=rollout, cluster={"pools": pools})
    return {name: bundle.get("GPU", 0) for name, bundle in _bundles(settings, available).items()}


def test_each_process_gets_a_gpu_or_none_does():
    assert gpus(0, BESIDE) == {"train-0": 0, "train-1": 0, "score": 0}
    assert gpus(2, BESIDE) == {"train-0": 1, "train-1": 1, "score": 0}
    assert gpus(3, APART) == {"train-0": 1, "train-1": 1, "roll": 1, "score": 0}
    assert gpus(3, APART, engine="vllm") == {"train-0": 1, "train-1": 1, "roll": 1, "score": 0}
    assert gpus(0, APART, engine="vllm") == {"train-0": 0, "train-1": 0, "roll": 0, "score": 0}
    with pytest.raises(
        UserError, match=r"2 processes \(train-0, train-1\) want a GPU each or none, and 1 of 1 are left"
    ):
        gpus(1, BESIDE)
    with pytest.raises(UserError, match="roll would have to share a GPU with one of the Actor's processes"):
        gpus(2, APART, engine="vllm")


# Whole runs. -------------------------------------------------------------------------------------------------------

SHARDED = {"cluster.pools.train.processes": 2}


def recipe(name: str, folder: Path, **overrides: Any) -> Config:
    return Config.load(RECIPES / f"{name}.toml", {"run.dir": str(folder), **overrides})


def test_a_sharded_run_is_that_of_one_process_and_resumes_exactly(tmp_path, local_ray):
    """PPO: Actor, Critic and Reference are sharded. The third step is taken again from the second's checkpoint."""
    short = {"run.steps": 3, "run.save_every": 1, "run.keep": 3, "rollout.prompts": 4, "data.holdout": 4}
    alone = rolecall.train(recipe("ppo-tiny", tmp_path / "alone", **short))
    run = rolecall.train(recipe("ppo-tiny", tmp_path / "sharded", **short, **SHARDED))
    lines = comparable(run.dir)
    for found, wanted in zip(lines, comparable(alone.dir), strict=True):
        assert found == pytest.approx(wanted | {"sync/bytes": found["sync/bytes"]}, rel=1e-3, abs=1e-4)
    shutil.rmtree(run.dir / "checkpoints" / "step-000003")
    rolecall.train(recipe("ppo-tiny", run.dir, **short, **SHARDED), resume=True)
    assert comparable(run.dir) == lines


def test_learns_the_first_digit_in_two_processes(tmp_path, local_ray):
    run = rolecall.train(recipe("grpo-tiny", tmp_path / "run", **{"run.steps": STEPS}, **SHARDED))
    rewards = [line["reward/mean"] for line in run.metrics]
    assert sum(rewards[:3]) / 3 < 0.3
    assert sum(rewards[-5:]) / 5 > 0.5
    assert run.heldout[STEPS] > 0.5
