"""The Actor: the policy in training."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from rolecall import models
from rolecall.config import Config
from rolecall.files import atomic_folder
from rolecall.models import lora
from rolecall.samples import Sample
from rolecall.sync.ends import Helper, Sender
from rolecall.training.logprobs import policy_logprobs, sample_logprobs
from rolecall.training.objective import policy_objective
from rolecall.training.packing import MicroBatch, token_values
from rolecall.training.trained import Totals, Trained, mean_over_steps


class Actor(Trained):
    """The policy, its optimizer and its objective.

    ``loaded`` is the model itself: a rollout engine in the same process generates from these very weights.
    ``adapter`` is peft's handle to what LoRA trains of it, or None.
    """

    def __init__(self, config: Config):
        loaded = models.load(config.model, models.device())
        self.adapter = lora.add(loaded.model, config.model, config.run.seed) if config.model.lora_rank else None
        waits = config.critic.warmup_only if "critic" in config.roles else 0
        super().__init__(config, config.actor, loaded, loaded.model, waits)
        self.sender: Sender | Helper | None = None  # where a sync has opened one

    def logprobs(self, samples: list[Sample]) -> list[list[float]]:
        """Log-probability of each response token under the present weights, at the sampling temperature."""
        with self._advising(samples):
            return sample_logprobs(
                self.loaded, samples, self.config.rollout.temperature, self.micro_tokens, self.shards
            )

    def update(self, samples: list[Sample], kl_beta: float | None = None) -> dict[str, float]:
        """Train on samples with advantages: ``epochs`` passes of ``minibatches`` optimizer steps each.

        The ratio is to ``old_logprobs``. Where they are missing they are the present policy's: before the first of
        several steps they are computed and written into the samples; a single step takes its own forward pass's.
        Samples that cannot move the policy (no action token or, without a term for KL or entropy, no advantage but 0)
        are not computed; they still count in what the loss divides by. If none is left, no step is taken.

        Args:
            samples: with ``advantages``, and ``ref_logprobs`` if there is a Reference.
            kl_beta: the present weight of the KL in the loss, where it adapts; default: the configured one.

        Returns:
            metrics: means over the action tokens that were computed; the policy loss's own (loss, clip_fraction,
            approx_kl) divide as the loss does, by the others, too. ``first/*`` are the first mini-batch's, before any
            step: the policy is the old one there (approx_kl 0, ratio_max 1).
        """
        settings = self.config.algorithm
        beta = settings.kl_beta if kl_beta is None else kl_beta
        if settings.kl_in == "reward":
            beta = 0.0
        always = beta > 0 or settings.entropy_coef > 0
        keep = partial(_moves_policy, always=always)
        several_steps = self.config.actor.epochs * self.config.actor.minibatches > 1
        if several_steps or any(sample.old_logprobs for sample in samples):
            missing = [sample for sample in samples if keep(sample) and not sample.old_logprobs]
            for sample, logprobs in zip(missing, self.logprobs(missing), strict=True):
                sample.old_logprobs = logprobs
        steps = self.take_steps(samples, keep, partial(self._loss, beta=beta))
        metrics: dict[str, float] = {
            "policy/skipped_samples": sum(not keep(sample) for sample in samples),
            "policy/micro_tokens": self.micro_tokens,
        }
        if steps:
            mean = mean_over_steps(steps)
            names = ("loss", "clip_fraction", "approx_kl", "entropy", "grad_norm", "lr")
            metrics |= {f"policy/{name}": mean[name] for name in names}
            metrics |= {name: mean[name] for name in mean if "/" in name}
            metrics |= {f"first/{name}": steps[0][name] for name in ("approx_kl", "ratio_max", "tokens", "skipped")}
        return metrics

    def _loss(self, micro: MicroBatch, totals: Totals, beta: float) -> tuple[Tensor, dict[str, float | Tensor]]:
        settings = self.config.algorithm
        logprobs, entropy = policy_logprobs(
            self.loaded, micro, self.config.rollout.temperature, entropy_gradient=settings.entropy_coef > 0
        )
        known = all(sample.old_logprobs for sample in micro.samples)
        return policy_objective(
            settings,
            logprobs,
            entropy,
            micro.mask,
            advantages=micro.field("advantages"),
            old_logprobs=micro.field("old_logprobs") if known else logprobs.detach(),
            engine_logprobs=micro.field("logprobs"),
            ref_logprobs=micro.field("ref_logprobs") if beta > 0 else None,
            beta=beta,
            totals=totals,
            norm=self.config.rollout.max_tokens,
        )

    def peak_memory(self) -> float:
        """Most memory that this process (so all roles of its pool) has held, in GiB."""
        return models.peak_memory(self.device) / 2**30

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """What an engine in another process is to have: each parameter under its Hugging Face name, tied ones once.

        With LoRA adapters they are merged into the weights, one tensor at a time as it is asked for; or with
        ``rollout.lora = "adapter"`` it is the adapter's tensors under peft's names. Sharded ones are sharded still:
        ``sharding.whole`` gathers each of them.
        """
        if self.config.rollout.lora == "adapter":
            return lora.adapter(self.adapter)
        return self._merged()

    def _merged(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, tensor.to(self.shards.dtype or tensor.dtype)) for name, tensor in lora.merged(self.loaded.model))

    def save_pretrained(self, folder: str | Path) -> None:
        """Write model and tokenizer as a Hugging Face folder, whole or not at all.

        With LoRA it is the merged model, which needs no peft; its ``adapter/`` holds the adapter as peft loads it.
        """
        model: Any = self.loaded.model
        buffers = dict(model.named_buffers())
        # On the host, so that the merged weights are never all on the GPU beside the others.
        state = self.shards.on_host(self._merged())
        named = self.adapter.state_dict() if self.adapter is not None else {}
        adapter = self.shards.on_host((name, tensor) for name, tensor in named.items() if ".lora_" in name)
        if self.shards.rank > 0:
            return
        state |= {name: tensor for name, tensor in model.state_dict().items() if name in buffers}
        with atomic_folder(folder) as new:
            model.save_pretrained(new, state_dict=state)
            self.loaded.tokenizer.save_pretrained(new)
            if self.adapter is not None:
                self.adapter.save_pretrained(str(new / "adapter"), state_dict=adapter, save_embedding_layers=False)


def _moves_policy(sample: Sample, always: bool) -> bool:
    """Whether the sample's gradient can differ from 0. ``always``: even with advantages of 0."""
    advantages = token_values(sample, "advantages")
    actions = [advantage for advantage, mask in zip(advantages, sample.response_mask, strict=True) if mask]
    return bool(actions) if always else any(actions)
