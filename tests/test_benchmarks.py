"""`rolecall bench objectives`: every objective reaches its optimum, and a wrong one would not."""

from dataclasses import replace

import pytest

from benchmarks import objectives
from benchmarks._tabular import Bandit
from rolecall.training import objective


@pytest.mark.parametrize("name", [*objectives._cases(), *objectives.PREFERENCES])
def test_every_objective_reaches_its_optimum(name):
    verdict = objectives.learn(name, seed=0)
    assert verdict["passed"], verdict


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("k2 in the loss", {"kl_beta": 2 * objectives.BETA}),
        ("k2 in the loss", {"kl_in": "reward", "kl_beta": objectives.BETA / 2}),
        ("k2 in the loss", {"kl_estimator": "k3"}),
        ("entropy bonus", {"entropy_coef": objectives.BETA / 2}),
        ("correction: truncate", {"correction": "none"}),
        ("adaptive KL, to its target", {"kl_target": 0.0}),
    ],
)
def test_a_wrong_factor_or_term_misses_it(name, wrong):
    case = objectives._cases()[name]
    verdict = objectives._learn(replace(case, settings=case.settings | wrong), seed=2)
    assert not verdict["passed"], verdict


@pytest.mark.parametrize("name", ["algorithm.name grpo", "algorithm.name ppo", "DPO, sigmoid"])
def test_a_wrong_sign_misses_it(monkeypatch, name):
    def negated(loss):
        def wrong(*arguments, **options):
            value, metrics = loss(*arguments, **options)
            return -value, metrics

        return wrong

    monkeypatch.setattr(objective, "policy_loss", negated(objective.policy_loss))
    monkeypatch.setattr(objectives, "dpo_loss", negated(objectives.dpo_loss))
    assert not objectives.learn(name, seed=0)["passed"]


def test_a_dropped_mask_misses_it(monkeypatch):
    play = Bandit.play
    monkeypatch.setattr(Bandit, "play", lambda *arguments: (play(*arguments)[0], [1, 1]))
    assert not objectives.learn("entropy bonus", seed=0)["passed"]
