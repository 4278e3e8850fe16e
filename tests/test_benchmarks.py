"""`rolecall bench objectives`: every objective reaches its optimum, and a wrong one would not. What tables say."""

from dataclasses import replace

import pytest

from benchmarks import objectives, sync
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


def test_the_table_of_the_sync_has_every_figure():
    row = {"engine": "vllm", "transport": "NCCL", "size": "0.5B", "mode": "packed", "seconds": 0.02, "bytes": 10**9}
    row["commit"] = "0123456"
    plain = {"engine": "vllm", "transport": "NCCL", "size": "0.5B", "copy_s": 0.001, "broadcast_s": 0.005}
    gap = {"size": "0.5B", "engine": "vllm", "mean": 0.01, "max": 0.05}
    nap = {"size": "0.5B", "level": 1, "sleep_s": 1.5, "freed_gib": 3.25, "wake_and_sync_s": 0.125, "same_output": True}
    table = sync._table({"rows": [row], "plain": [plain], "mismatch": [gap], "sleep": [nap]})
    assert "| 0.5B | vllm | NCCL | packed | 20.0 | 50.00 | 5% | 25% | 0123456 |" in table
    assert "| 0.5B | vllm | 0.01 | 0.05 |" in table
    assert "| 0.5B | 1 | 1.50 | 3.2 | 0.12 | yes |" in table
