"""Does every objective reach its optimum? The loop's own step on problems small enough to know it, three seeds each.

A wrong sign, a dropped mask or a lost factor shows here. Where an objective is regularised the optimum is a certain
distribution, not only the best answer, so that a factor in its weight shows too.
"""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import _tabular as tabular
from benchmarks import write
from rolecall.algorithms import dpo_loss, reward_model_loss
from rolecall.config import PRESETS, Config
from rolecall.data import Sampler
from rolecall.loop.synchronous import take_step
from rolecall.samples import Prompt

SEEDS = (0, 1, 2)
BETA = 0.3  # of KL, entropy and DPO
ABOUT = """\
What is reached and its optimum: the mean reward of a five-token sequence task (1), the chance of a bandit's best arm
where a term of the loss sets it, the KL, or the gap of a reward model's scores. A wrong sign, factor or mask misses it
(tests/test_benchmarks.py). The rows of the dual clip, of `mask`, of the sequence level and of old samples show that
these do no harm; their values are in tests/test_objectives.py.
"""
PROMPTS = [Prompt(f"p{i}", "", [0], {}) for i in range(8)]


@dataclass(frozen=True)
class Case:
    """``settings`` of [algorithm], and what they must reach on a task (see ``tabular.context`` for the rest).

    ``reached``: of a policy (states, actions), what ``optimum`` is of: the mean reward or, on the bandit, the chance
    of the best arm, which regularisation sets. Within ``tolerance`` passes.
    """

    settings: dict[str, Any]
    task: tabular.Task
    reached: Callable[[Tensor], float]
    optimum: float
    tolerance: float
    setup: dict[str, Any] = field(default_factory=dict)


def run(out: Path) -> dict[str, Any]:
    """Write ``objectives.json`` and ``objectives.md`` under ``out``."""
    names = [*_cases(), *PREFERENCES]
    with ProcessPoolExecutor(mp_context=get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,)) as pool:
        rows = list(pool.map(learn, [name for name in names for _ in SEEDS], [*SEEDS] * len(names)))
    results = {name: rows[i * len(SEEDS) : (i + 1) * len(SEEDS)] for i, name in enumerate(names)}
    write("objectives", results, _table(results), out)
    return results


def learn(name: str, seed: int) -> dict[str, Any]:
    """Train the named objective to its end and compare with its optimum."""
    return PREFERENCES[name](seed) if name in PREFERENCES else _learn(_cases()[name], seed)


def _cases() -> dict[str, Case]:
    sequence, bandit = tabular.Sequence(), tabular.Bandit()
    start, rewards = bandit.logits()[0].softmax(-1), bandit.rewards
    tilted = _tilted(start, rewards)

    def best(settings: dict[str, Any], **setup: Any) -> Case:
        return Case(settings, sequence, sequence.expected, 1.0, 0.05, setup)

    # Leave-one-out without scaling is the unbiased policy gradient, so the weight of the other term is exactly BETA.
    def exact(term: dict[str, Any], optimum: Tensor, **setup: Any) -> Case:
        settings = {"name": "rloo", "loss": "clip"} | term
        return Case(settings, bandit, lambda policy: float(policy[0, -1]), float(optimum[-1]), 0.03, setup)

    k2 = {"kl_beta": BETA}
    cases = {f"algorithm.name {name}": best({"name": name}) for name in PRESETS}
    return cases | {
        "dual clip, samples 4 versions old": best({"dual_clip": 1.5}, lag=4),
        "k2 in the loss": exact(k2, tilted),
        "k3 in the loss": exact({"kl_beta": BETA, "kl_estimator": "k3"}, _reverse(start, rewards)),
        "k1 in the reward": exact({"kl_beta": BETA, "kl_in": "reward"}, tilted),
        "entropy bonus": exact({"entropy_coef": BETA}, _tilted(torch.ones(5), rewards)),
        "adaptive KL, to its target": _held(bandit, start),
        "correction: truncate": exact(k2 | {"correction_cap": 20.0}, tilted, mismatch=0.6),
        "correction: mask": exact(k2 | {"correction": "mask"}, tilted, mismatch=0.3),
        "correction: sequence level": best({"correction_level": "sequence"}, mismatch=0.2),
        "decoupled PPO, samples 4 versions old": exact(k2, tilted, lag=4),
    }


def _learn(case: Case, seed: int) -> dict[str, Any]:
    # Without a ratio to the old policy there is one pass over a step's samples; everyone takes 400 optimizer steps.
    epochs = 1 if Config(algorithm=case.settings).algorithm.loss == "reinforce" else 4
    config = Config(
        algorithm=case.settings,
        rollout={"prompts": 4, "group_size": 8, "max_tokens": 8},
        actor={"lr": 0.1, "epochs": epochs},
        critic={"lr": 0.05, "epochs": 4},
        run={"seed": seed, "steps": 400 // epochs},
    )
    config.check_trainable()
    context, sampler = tabular.context(config, case.task, **case.setup), Sampler(PROMPTS, seed)
    for step in range(1, config.run.steps + 1):
        take_step(context, sampler, step)
    return _verdict(seed, case.reached(context.roles.actor.table()), case.optimum, case.tolerance)


def _verdict(seed: int, reached: float, optimum: float, tolerance: float) -> dict[str, Any]:
    return {"seed": seed, "reached": reached, "optimum": optimum, "passed": abs(reached - optimum) <= tolerance}


# Where regularised objectives have their maximum, on the bandit. -----------------------------------------------------


def _tilted(weights: Tensor, utility: Tensor) -> Tensor:
    """argmax over p of E_p u - BETA sum p log(p / weights): p ~ weights exp(u / BETA)."""
    p = weights * (utility / BETA).exp()
    return p / p.sum()


def _reverse(q: Tensor, utility: Tensor) -> Tensor:
    """argmax over p of E_p u - BETA KL(q, p): p = BETA q / (x - u), with the x that makes it a distribution."""
    low, high = float(utility.max()), float(utility.max()) + 1.0
    for _ in range(60):
        x = (low + high) / 2
        p = BETA * q / (x - utility)
        low, high = (x, high) if p.sum() > 1 else (low, x)
    return p / p.sum()


def _held(bandit: tabular.Bandit, start: Tensor) -> Case:
    """beta adapts until the KL is the target."""
    target = 0.15
    settings = {"name": "rloo", "loss": "clip", "kl_beta": 1.0, "kl_target": target, "kl_horizon": 300}
    return Case(settings, bandit, lambda policy: float((policy[0] * (policy[0] / start).log()).sum()), target, 0.03)


# Preferences: pairs of the bandit's arms, drawn evenly and judged by Bradley-Terry. ----------------------------------


def _pairs(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    scores = 3 * tabular.Bandit.rewards
    a, b = torch.randint(5, (2, 40_000), generator=generator)
    a_wins = torch.rand(len(a), generator=generator) < (scores[a] - scores[b]).sigmoid()
    return torch.where(a_wins, a, b), torch.where(a_wins, b, a)


def _minimise(loss_of: Callable[[Tensor], Tensor]) -> Tensor:
    table = nn.Parameter(torch.zeros(5))
    optimizer = torch.optim.LBFGS([table], max_iter=100, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(table)
        loss.backward()
        return loss

    optimizer.step(closure)
    return table.detach()


def _bradley_terry(seed: int) -> dict[str, Any]:
    """The gap between the best and the worst arm's score: 3 (0.9 - 0.1)."""
    chosen, rejected = _pairs(seed)
    scores = _minimise(lambda table: reward_model_loss(table[chosen], table[rejected])[0])
    return _verdict(seed, float(scores[4] - scores[0]), 2.4, 0.1)


def _preference(kind: str, utility: Tensor) -> Callable[[int], dict[str, Any]]:
    """How likely the best arm gets; DPO maximises E_p u - BETA KL(p, even)."""
    even = torch.full((5,), 0.2)

    def fit(seed: int) -> dict[str, Any]:
        chosen, rejected = _pairs(seed)
        ref = even.log()

        def loss_of(table: Tensor) -> Tensor:
            logp = table.log_softmax(-1)
            return dpo_loss(logp[chosen], logp[rejected], ref[chosen], ref[rejected], beta=BETA, kind=kind)[0]

        return _verdict(seed, float(_minimise(loss_of).softmax(-1)[-1]), float(_tilted(even, utility)[-1]), 0.02)

    return fit


_SCORES = 3 * tabular.Bandit.rewards
PREFERENCES = {
    "reward model (Bradley-Terry)": _bradley_terry,
    "DPO, sigmoid": _preference("sigmoid", _SCORES),
    # IPO's utility is how often an arm beats an evenly drawn one (2310.12036).
    "DPO, IPO": _preference("ipo", (_SCORES[:, None] - _SCORES).sigmoid().mean(-1)),
}


def _table(results: dict[str, Any]) -> str:
    lines = [ABOUT, "| objective | optimum | " + " | ".join(f"seed {seed}" for seed in SEEDS) + " | passed |"]
    lines += ["|---|---|" + "---|" * (len(SEEDS) + 1)]
    for name, rows in results.items():
        reached = " | ".join(f"{row['reached']:.3f}" for row in rows)
        passed = sum(row["passed"] for row in rows)
        lines.append(f"| {name} | {rows[0]['optimum']:.3f} | {reached} | {passed} of {len(rows)} |")
    return "\n".join(lines)
