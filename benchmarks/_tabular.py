"""Two problems with exact answers, and roles whose model is a table: the loop's own step takes milliseconds on them."""

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from rolecall.algorithms import value_loss
from rolecall.config import Config
from rolecall.loop.stages import Context
from rolecall.samples import Prompt, Request, Sample
from rolecall.training.objective import policy_objective
from rolecall.training.packing import per_token
from rolecall.training.trained import Totals


class Bandit:
    """One token: an arm. The best one starts out unlikely, and rewards are noisy. A tool's token follows."""

    rewards = torch.tensor([0.1, 0.3, 0.5, 0.7, 0.9])
    noise = 0.1

    def logits(self) -> Tensor:
        """(1, 5): states x actions."""
        return torch.tensor([[0.0, 0.0, 0.0, 0.0, -1.0]])

    def play(self, policy: list[list[float]], rng: random.Random) -> tuple[list[int], list[int]]:
        """Tokens, and the mask of those that the policy chose."""
        return [*rng.choices(range(5), policy[0]), 0], [1, 0]

    def states(self, tokens: list[int]) -> list[int]:
        """The row of the table that each token was chosen from."""
        return [0] * len(tokens)

    def reward(self, tokens: list[int]) -> float:
        return float(self.rewards[tokens[0]])

    def expected(self, policy: Tensor) -> float:
        """Exact mean reward of a policy, (states, actions) probabilities."""
        return float(policy[0] @ self.rewards)


class Sequence:
    """Five tokens, each right for one that depends on the token before and its place; a fifth of the reward each.

    Action 0 ends the response, so that lengths differ; after the second token a tool writes one, which must not count.
    """

    length, tool_at, noise = 5, 2, 0.0

    def logits(self) -> Tensor:
        """(20, 4): (place, token before) x actions."""
        return torch.zeros(self.length * 4, 4)

    def play(self, policy: list[list[float]], rng: random.Random) -> tuple[list[int], list[int]]:
        tokens: list[int] = []
        before = 0
        for place in range(self.length):
            if place == self.tool_at:
                tokens.append(rng.randrange(4))
            before = rng.choices(range(4), policy[place * 4 + before])[0]
            tokens.append(before)
            if before == 0:
                break
        return tokens, [int(position != self.tool_at) for position in range(len(tokens))]

    def states(self, tokens: list[int]) -> list[int]:
        acts = self._acts(tokens)
        rows = [place * 4 + before for place, before in enumerate([0, *acts[:-1]])]
        return [*rows[: self.tool_at], 0, *rows[self.tool_at :]] if len(tokens) > self.tool_at else rows

    def reward(self, tokens: list[int]) -> float:
        acts = self._acts(tokens)
        return sum(act == self._right(*pair) for act, pair in zip(acts, enumerate([0, *acts]), strict=False)) / 5

    def expected(self, policy: Tensor) -> float:
        after = torch.zeros(4)  # mean reward still to come, by the token before
        for place in reversed(range(self.length)):
            each = torch.tensor([[float(a == self._right(place, b)) / 5 for a in range(4)] for b in range(4)])
            going_on = after * torch.tensor([0.0, 1.0, 1.0, 1.0])
            after = (policy[place * 4 : place * 4 + 4] * (each + going_on)).sum(-1)
        return float(after[0])

    def _acts(self, tokens: list[int]) -> list[int]:
        return [token for position, token in enumerate(tokens) if position != self.tool_at]

    def _right(self, place: int, before: int) -> int:
        return 1 + (place + before) % 3


Task = Bandit | Sequence


class Policy:
    """Actor and Rollout in one: a table of logits. The engine's differ by ``mismatch``, or are ``lag`` updates old."""

    process = "one"

    def __init__(self, config: Config, task: Task, mismatch: float, lag: int):
        self.config, self.task, self.handles = config, task, [self]
        torch.manual_seed(config.run.seed)
        self.logits = nn.Parameter(task.logits())
        self.mismatch, self.lag = mismatch * torch.randn_like(self.logits), lag
        self.older = [self.logits.detach().clone()]
        self.rng = random.Random(config.run.seed)
        self.optimizer, self.schedule = _adam([self.logits], config, config.actor.lr, config.actor.epochs)
        self.version = 0

    def generate(self, requests: list[Request]) -> list[Sample]:
        logits = self.older[max(0, len(self.older) - 1 - self.lag)] + self.mismatch
        policy = logits.softmax(-1)
        rows = policy.tolist()
        return [self._sample(request, index, policy, rows) for request in requests for index in range(request.n)]

    def _sample(self, request: Request, index: int, policy: Tensor, rows: list[list[float]]) -> Sample:
        tokens, mask = self.task.play(rows, self.rng)
        chosen = policy[self.task.states(tokens), tokens].log().tolist()
        logprobs = [x if m else -50.0 for x, m in zip(chosen, mask, strict=True)]  # what stands there must not count
        spans = [(0, len(tokens), self.version)]
        return Sample(
            request.group_id, index, request.prompt_id, request.prompt, tokens, logprobs, mask, spans, "stop", ""
        )

    def table(self) -> Tensor:
        """(states, actions) probabilities."""
        return self.logits.detach().softmax(-1)

    def logprobs(self, samples: list[Sample]) -> list[list[float]]:
        return _rows(self.logits.detach().log_softmax(-1), self.task, samples)

    def update(self, samples: list[Sample], kl_beta: float) -> dict[str, float]:
        settings = self.config.algorithm
        if self.config.actor.epochs == 1:  # the loop leaves the old log-probabilities of a single step to the Actor
            for sample, row in zip(samples, self.logprobs(samples), strict=True):
                sample.old_logprobs = row
        mask = per_token(samples, "response_mask").bool()
        acting = [sample.action_tokens for sample in samples]
        states, actions = _places(self.task, samples)
        beta = kl_beta if settings.kl_in == "loss" else 0.0
        for _ in range(self.config.actor.epochs):
            everything = self.logits.log_softmax(-1)
            loss, _ = policy_objective(
                settings,
                everything[states, actions],
                -(everything.exp() * everything).sum(-1)[states],
                mask,
                advantages=per_token(samples, "advantages"),
                old_logprobs=per_token(samples, "old_logprobs"),
                engine_logprobs=per_token(samples, "logprobs"),
                ref_logprobs=per_token(samples, "ref_logprobs") if beta > 0 else None,
                beta=beta,
                totals=Totals(sum(acting), sum(n > 0 for n in acting), sum(acting)),
                norm=self.config.rollout.max_tokens,
            )
            _step(loss, self.optimizer, self.schedule)
        self.older.append(self.logits.detach().clone())
        return {}

    def synchronise(self, sync: Callable[[], dict[str, float]]) -> dict[str, float]:
        return sync()

    def share_weights(self, version: int) -> None:
        self.version = version

    def peak_memory(self) -> float:
        return 0.0


class Critic:
    """A table of values."""

    def __init__(self, config: Config, task: Task):
        self.config, self.task = config, task
        self.table = nn.Parameter(torch.zeros(len(task.logits())))
        self.optimizer, self.schedule = _adam([self.table], config, config.critic.lr, config.critic.epochs)

    def values(self, samples: list[Sample]) -> list[list[float]]:
        return _rows(self.table.detach()[:, None].expand(-1, 5), self.task, samples)

    def update(self, samples: list[Sample]) -> dict[str, float]:
        mask = per_token(samples, "response_mask")
        old, returns = per_token(samples, "values"), per_token(samples, "returns")
        states, _ = _places(self.task, samples)
        for _ in range(self.config.critic.epochs):
            loss, _ = value_loss(self.table[states], old, returns, mask, clip=self.config.algorithm.value_clip)
            _step(loss, self.optimizer, self.schedule)
        return {}

    def start(self, method: str, *arguments: Any) -> Any:
        return _done(getattr(self, method)(*arguments))


class Frozen:
    """The Reference: the table that the policy started from."""

    def __init__(self, task: Task):
        self.task, self.everything = task, task.logits().log_softmax(-1)

    def start(self, method: str, samples: list[Sample]) -> Any:
        return _done(_rows(self.everything, self.task, samples))


class Judge:
    """The Reward: the task's, with its noise."""

    def __init__(self, config: Config, task: Task):
        self.task, self.rng = task, random.Random(f"reward {config.run.seed}")

    def score(self, prompts: list[Prompt], samples: list[Sample]) -> list[float]:
        return [self.task.reward(sample.response) + self.task.noise * self.rng.gauss() for sample in samples]


def context(config: Config, task: Task, mismatch: float = 0.0, lag: int = 0) -> Context:
    """What the loop's step works with. The first step's checks are off, as a mismatch would rightly stop the run."""
    policy = Policy(config, task, mismatch, lag)
    roles = SimpleNamespace(actor=policy, rollout=policy, reward=Judge(config, task), critic=None, reference=None)
    if "critic" in config.roles:
        roles.critic = Critic(config, task)
    if "reference" in config.roles:
        roles.reference = Frozen(task)
    return Context(config, roles, checked=True)


def _places(task: Task, samples: list[Sample]) -> tuple[Tensor, Tensor]:
    """(B, T) states and actions of the samples, right-padded: where to look in a table."""
    states = [torch.tensor(task.states(sample.response)) for sample in samples]
    actions = [torch.tensor(sample.response) for sample in samples]
    return pad_sequence(states, batch_first=True), pad_sequence(actions, batch_first=True)


def _rows(table: Tensor, task: Task, samples: list[Sample]) -> list[list[float]]:
    """A (states, actions) table's entries at what each sample did."""
    found = table[_places(task, samples)].tolist()
    return [row[: len(sample.response)] for row, sample in zip(found, samples, strict=True)]


def _adam(parameters: list[nn.Parameter], config: Config, lr: float, epochs: int) -> tuple[Any, Any]:
    """Adam whose learning rate falls to 0, so that the end is a point and not a cloud."""
    optimizer = torch.optim.Adam(parameters, lr=lr)
    return optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, config.run.steps * epochs)


def _step(loss: Tensor, optimizer: Any, schedule: Any) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()


def _done(value: Any) -> Any:
    return SimpleNamespace(result=lambda: value)
