"""Log-probabilities of response tokens, in memory that does not grow with tokens x vocabulary."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rolecall.models import Loaded
from rolecall.models.attention import hidden_states
from rolecall.models.head import logits
from rolecall.samples import Sample
from rolecall.training.packing import MicroBatch, micro_batches

LOGITS = 2**26  # most logits held at once: 256 MiB in float32

Head = Callable[[Tensor], Tensor]


def token_logprobs(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    temperature: float,
    *,
    entropy_gradient: bool = False,
    limit: int = LOGITS,
) -> tuple[Tensor, Tensor]:
    """log softmax(head(hidden) / temperature) at the targets, and the entropy of that distribution.

    At most ``limit`` logits (at least one token's) exist at a time: tokens go in chunks, and with more than one chunk
    the logits are computed again in the backward pass instead of being kept. Sums run in float32 or wider.

    Args:
        hidden: (N, H) states that predict the targets.
        head: the output embedding, (n, H) -> (n, V).
        targets: (N,) token ids.

    Returns:
        log-probabilities (N,) and entropies (N,) in nats; these carry a gradient only if ``entropy_gradient``.
    """
    with torch.no_grad():
        vocabulary = head(hidden[:1]).shape[-1]
    size = max(1, limit // vocabulary)
    recompute = len(targets) > size and torch.is_grad_enabled()
    chunk = partial(checkpoint, _chunk, use_reentrant=False) if recompute else _chunk
    chunks = zip(hidden.split(size), targets.split(size), strict=True)
    parts = [chunk(part, head, target, temperature, entropy_gradient) for part, target in chunks]
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def _chunk(
    hidden: Tensor, head: Head, targets: Tensor, temperature: float, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    scores = head(hidden)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) / temperature
    normalizer = scores.logsumexp(-1)
    logprobs = scores.gather(-1, targets[:, None]).squeeze(-1) - normalizer
    # Last, so that the recomputation in the backward pass stops before it where it has no gradient.
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        p = (scores - normalizer[:, None]).exp()
        # An impossible token (logit -inf) adds nothing: p log p is 0 there, not NaN, and so is its gradient.
        entropy = normalizer - (p * scores.where(p > 0, 0.0)).sum(-1)
    return logprobs, entropy


def response_hidden(model: nn.Module, micro: MicroBatch) -> Tensor:
    """(N, H): the last hidden states of the positions that predict the response tokens."""
    if micro.layout is not None:
        hidden = hidden_states(model, micro.tokens, micro.positions, micro.layout)
    else:
        backbone: Any = model.base_model
        hidden = backbone(
            input_ids=micro.tokens, attention_mask=micro.attention_mask, position_ids=micro.positions, use_cache=False
        ).last_hidden_state
    return hidden.flatten(0, 1).index_select(0, micro.predictors)


def policy_logprobs(
    loaded: Loaded, micro: MicroBatch, temperature: float, *, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies of a micro-batch's response tokens at ``temperature``, (B, T) each."""
    model: Any = loaded.model
    if loaded.packed:
        head: Head = partial(logits, model)
        hidden = response_hidden(model, micro)
    else:
        # Such a model may do more to its logits than the output embedding does, so we take what it returns.
        output = model(
            input_ids=micro.tokens, attention_mask=micro.attention_mask, position_ids=micro.positions, use_cache=False
        ).logits
        hidden, head = output.flatten(0, 1).index_select(0, micro.predictors), nn.Identity()
    logprobs, entropy = token_logprobs(hidden, head, micro.targets, temperature, entropy_gradient=entropy_gradient)
    return micro.rows(logprobs), micro.rows(entropy)


@torch.no_grad()
def in_sample_order(
    samples: list[Sample], loaded: Loaded, budget: int, compute: Callable[[MicroBatch], Tensor]
) -> list[list[float]]:
    """Run ``compute`` (micro-batch -> (B, T)) over all samples and give each its values, one a response token."""
    device = next(loaded.model.parameters()).device
    rows: dict[int, list[float]] = {}
    for micro in micro_batches(samples, budget, packed=loaded.packed, device=device):
        for sample, row in zip(micro.samples, compute(micro).tolist(), strict=True):
            rows[id(sample)] = row[: len(sample.response)]
    return [rows.get(id(sample), []) for sample in samples]


def sample_logprobs(loaded: Loaded, samples: list[Sample], temperature: float, budget: int) -> list[list[float]]:
    """Log-probabilities of every sample's response tokens at ``temperature``, in the samples' order, no gradient."""
    return in_sample_order(samples, loaded, budget, lambda micro: policy_logprobs(loaded, micro, temperature)[0])
