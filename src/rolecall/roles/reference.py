"""The Reference: the policy as it was before training, frozen, for the KL term."""

from contextlib import nullcontext

from rolecall import models
from rolecall.config import Config
from rolecall.roles.actor import Actor
from rolecall.samples import Sample
from rolecall.training.logprobs import sample_logprobs
from rolecall.training.memory import MOST
from rolecall.training.sharding import shard


class Reference:
    """The configured model as loaded; nothing here changes its weights.

    Args:
        config: the run's.
        actor: of the same process, if any: where it trains a LoRA adapter, its model without the adapter is the
            Reference, and there is no second one.
    """

    def __init__(self, config: Config, actor: Actor | None = None):
        self.config = config
        self._adapter = actor.adapter if actor else None
        if actor and actor.adapter:
            self._loaded, self._shards = actor.loaded, actor.shards
        else:
            self._loaded = models.load(config.model, models.device())
            self._loaded.model.requires_grad_(False)
            self._shards = shard(self._loaded.model)

    def logprobs(self, samples: list[Sample]) -> list[list[float]]:
        """Log-probability of each response token, at the temperature that the Actor samples and trains at."""
        rollout, budget = self.config.rollout, self.config.actor.micro_tokens or MOST[models.device().type]
        with self._adapter.disable_adapter() if self._adapter else nullcontext():
            return sample_logprobs(self._loaded, samples, rollout.temperature, budget, self._shards)
