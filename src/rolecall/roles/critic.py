"""The Critic: expected return from each position of a response (PPO)."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from rolecall import models
from rolecall.algorithms import explained_variance, masked_mean, value_loss
from rolecall.config import Config
from rolecall.models import lora
from rolecall.samples import Sample
from rolecall.training.logprobs import in_sample_order, response_hidden
from rolecall.training.packing import MicroBatch, per_token
from rolecall.training.trained import Totals, Trained, mean_over_steps


class Critic(Trained):
    """The policy's architecture and first weights, with a scalar head in place of the output embedding.

    A token's value is read from the position that predicts it, so it knows the tokens before, not the token itself.
    The head starts at zero: the first values are exactly 0. Where the policy is trained by LoRA, so is the backbone.
    """

    def __init__(self, config: Config):
        # It has no engine to agree with.
        loaded = models.load(config.model.model_copy(update={"batch_invariant": False}), models.device())
        model: Any = loaded.model
        if config.model.lora_rank:
            lora.add(model, config.model, config.run.seed)
        self._head = nn.Linear(model.config.get_text_config().hidden_size, 1, device=model.device, dtype=torch.float32)
        nn.init.zeros_(self._head.weight)
        nn.init.zeros_(self._head.bias)
        module = nn.ModuleDict({"backbone": model.base_model, "head": self._head})
        super().__init__(config, config.critic, replace(loaded, model=model.base_model), module)

    def values(self, samples: list[Sample]) -> list[list[float]]:
        """The expected return before each response token."""
        with self._advising(samples):
            return in_sample_order(samples, self.loaded, self.micro_tokens, self._values)

    def update(self, samples: list[Sample]) -> dict[str, float]:
        """Regress on ``returns``, clipped around ``values``.

        ``value/mean`` and ``value/explained_variance`` are of ``values``, as they were before the update.
        """
        steps = self.take_steps(samples, lambda sample: sample.action_tokens > 0, self._loss)
        if not steps:
            return {}
        mean = mean_over_steps(steps)
        metrics = {f"value/{name}": mean[name] for name in ("loss", "clip_fraction", "grad_norm", "lr")}
        values, returns, mask = (per_token(samples, name) for name in ("values", "returns", "response_mask"))
        return metrics | {
            "value/mean": masked_mean(values, mask).item(),
            "value/explained_variance": explained_variance(values, returns, mask),
        }

    def _values(self, micro: MicroBatch) -> Tensor:
        """(B, T) values."""
        hidden = response_hidden(self.loaded.model, micro).to(self._head.weight.dtype)
        return micro.rows(self._head(hidden).squeeze(-1))

    def _loss(self, micro: MicroBatch, totals: Totals) -> tuple[Tensor, dict[str, float]]:
        settings = self.config.algorithm
        loss, metrics = value_loss(
            self._values(micro),
            micro.field("values"),
            micro.field("returns"),
            micro.mask,
            clip=settings.value_clip,
            total=totals.tokens,
        )
        return settings.value_coef * loss, metrics
