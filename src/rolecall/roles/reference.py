"""The Reference: the policy as it was before training, frozen, for the KL term."""

from rolecall import models
from rolecall.config import Config
from rolecall.samples import Sample
from rolecall.training.logprobs import sample_logprobs


class Reference:
    """The configured model as loaded; nothing here changes its weights."""

    def __init__(self, config: Config):
        self.config = config
        self._loaded = models.load(config.model, models.device())
        self._loaded.model.requires_grad_(False)

    def logprobs(self, samples: list[Sample]) -> list[list[float]]:
        """Log-probability of each response token, at the temperature that the Actor samples and trains at."""
        return sample_logprobs(self._loaded, samples, self.config.rollout.temperature, self.config.actor.micro_tokens)
