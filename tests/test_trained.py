"""What every trained role shares: the length of its schedule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rolecall.config import Config
from rolecall.roles.actor import Actor
from rolecall.roles.critic import Critic
from training_samples import uneven


def settings(model: Path, **sections: Any) -> Config:
    return Config(model={"path": str(model), "dtype": "float32"}, **sections)


# The schedule ends with the run. -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("optimizer", "actor_steps", "critic_steps"),
    [
        ({}, 3, 5),
        ({"minibatches": 2, "epochs": 3}, 3 * 6, 5 * 6),
        ({"minibatches": 9}, 3 * 4, 5 * 4),  # no more than prompts: a group is not split
    ],
)
def test_as_many_steps_are_planned_as_are_taken(tiny_path, optimizer, actor_steps, critic_steps):
    """Five steps of four prompts; the Critic trains alone in the first two."""
    config = settings(
        tiny_path,
        algorithm={"name": "ppo", "kl_beta": 0.0},
        rollout={"prompts": 4, "max_tokens": 8},
        actor=optimizer,
        critic=optimizer | {"warmup_only": 2},
        run={"steps": 5},
    )
    actor, critic = Actor(config), Critic(config)
    for step in range(5):
        samples = uneven(groups=4, seed=step)
        critic.update(samples)
        if step >= 2:
            actor.update(samples)
    assert actor.optimizer.steps == actor_steps == actor.optimizer.total
    assert critic.optimizer.steps == critic_steps == critic.optimizer.total


def test_without_a_critic_nobody_waits_for_it(tiny_path):
    actor = Actor(settings(tiny_path, critic={"warmup_only": 2}, run={"steps": 5}))
    assert actor.optimizer.total == 5


def test_a_step_with_nothing_to_learn_counts_in_the_schedule_and_not_in_the_warm_up(tiny_path, tmp_path):
    """Seven steps, one of warm-up, linear: 2/6 are done after the third although one was skipped, also once resumed."""
    actor = {"lr": 0.6, "warmup_steps": 1, "schedule": "linear"}
    config = settings(tiny_path, rollout={"max_tokens": 8}, actor=actor, run={"steps": 7})
    first, resumed = Actor(config), Actor(config)
    flat = uneven()
    for sample in flat:
        sample.advantages = [0.0] * len(sample.response)
    first.update(flat)
    assert first.optimizer.lr == 0.6  # the warm-up's only step is still to come
    first.update(uneven())
    first.update(uneven())
    assert (first.optimizer.steps, first.optimizer.skipped) == (2, 1)
    first.save(tmp_path)
    resumed.load(tmp_path)
    assert first.optimizer.lr == resumed.optimizer.lr == pytest.approx(0.6 * (1 - 2 / 6))
