"""The Reference: the policy as it was before training, frozen, for the KL term."""

from contextlib import nullcontext
from functools import cached_property

from rolecall import models
from rolecall.config import Config
from rolecall.roles.actor import Actor
from rolecall.samples import Sample
from rolecall.training import memory
from rolecall.training.logprobs import sample_logprobs
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

    @cached_property
    def micro_tokens(self) -> int:
        """Most tokens of a micro-batch: the Actor's, where they are configured."""
        device = models.device()
        return memory.micro_tokens(self.config.actor, self._loaded.model, device, self._shards, backward=False)

    def logprobs(self, samples: list[Sample]) -> list[list[float]]:
        """Log-probability of each response token, at the temperature that the Actor samples and trains at."""
        temperature = self.config.rollout.temperature
        base = self._adapter.disable_adapter() if self._adapter else nullcontext()
        with base, memory.advising("actor", self.micro_tokens, samples):
            return sample_logprobs(self._loaded, samples, temperature, self.micro_tokens, self._shards)
