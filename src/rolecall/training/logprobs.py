"""Log-probabilities of response tokens, in memory that does not grow with tokens x vocabulary."""

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn

from rolecall.models import Loaded
from rolecall.models.attention import hidden_states
from rolecall.models.compiled import compiled_later
from rolecall.models.head import product
from rolecall.models.invariant import token_logprobs as invariant_logprobs
from rolecall.samples import Sample
from rolecall.training.packing import MicroBatch
from rolecall.training.sharding import NOTHING, WHOLE, Shards

# Most logits held at once: 256 MiB in float32; on a GPU 1 GiB, since short products do not fill it.
LOGITS = {"cpu": 2**26, "cuda": 2**28}
UNFUSED_LOGITS = 2**26  # on a GPU: so few are not worth the seconds that their kernels take to compile


def token_logprobs(
    hidden: Tensor,
    head: nn.Linear | None,
    targets: Tensor,
    temperature: float,
    *,
    entropy_gradient: bool = False,
    limit: int | None = None,
    invariant: bool = False,
) -> tuple[Tensor, Tensor]:
    """log softmax(head(hidden) / temperature) at the targets, and the entropy of that distribution.

    At most ``limit`` logits (at least one token's) exist at a time: tokens go in chunks, and the backward pass computes
    each chunk's logits again. Sums run in float32 or wider.

    Args:
        hidden: (N, H) states that predict the targets; (N, V) logits if ``head`` is None.
        head: the output embedding.
        targets: (N,) token ids.
        limit: default: ``LOGITS``.
        invariant: log-probabilities are those that the native engine gives, bit for bit.

    Returns:
        log-probabilities (N,) and entropies (N,) in nats; these carry a gradient only if ``entropy_gradient``.
    """
    weight, bias = (None, None) if head is None else (head.weight, head.bias)
    vocabulary = hidden.shape[1] if weight is None else len(weight)
    size = max(1, (limit or LOGITS[hidden.device.type]) // vocabulary)
    return _TokenLogprobs.apply(hidden, weight, bias, targets, temperature, entropy_gradient, size, invariant)


class _TokenLogprobs(torch.autograd.Function):
    """Keeps a token's hidden state, normalizer and entropy for the backward pass, and no logits."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        entropy_gradient: bool,
        size: int,
        invariant: bool,
    ) -> tuple[Tensor, Tensor]:
        parts = []
        for part, target in zip(hidden.split(size), targets.split(size), strict=True):
            scores = _scores(part, weight, bias, invariant)
            normalizer, entropy = _normalizer_and_entropy(scores, temperature)
            if invariant:
                chosen = invariant_logprobs(scores, target, temperature)
            else:
                chosen = scores.gather(1, target[:, None])[:, 0] / temperature - normalizer
            parts.append((chosen, normalizer, entropy))
        logprobs, normalizer, entropy = (torch.cat(each) for each in zip(*parts, strict=True))
        ctx.save_for_backward(hidden, weight, bias, targets, normalizer, entropy)
        ctx.temperature, ctx.entropy_gradient, ctx.size = temperature, entropy_gradient, size
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, *per_token = ctx.saved_tensors
        to_hidden = torch.empty_like(hidden)
        # Chunks add up in float32.
        to_weight = _zeros(weight) if ctx.needs_input_grad[1] else None
        to_bias = _zeros(bias) if ctx.needs_input_grad[2] else None
        chunks = zip(*(x.split(ctx.size) for x in (hidden, to_hidden, *per_token, *gradients)), strict=True)
        for part, to_part, target, normalizer, entropy, *outer in chunks:
            scores = _scores(part, weight, bias)
            to_logprob, to_entropy = (x[:, None] / ctx.temperature for x in outer)
            shared = (
                normalizer[:, None].clone(),  # at offset 0: a view's own would be compiled for
                (normalizer - entropy)[:, None],
                to_logprob,
                to_entropy if ctx.entropy_gradient else None,
                ctx.temperature,
            )
            # Every entry's gradient in one kernel. The chosen one's is written over it: its 1 of [chosen] - p is added
            # in FP32, as in a narrow type it would be rounded together with p.
            to_scores = _fused_score_gradient(scores, *shared, dtype=hidden.dtype)
            chosen = _score_gradient(scores.gather(1, target[:, None]), *shared, dtype=scores.dtype) + to_logprob
            to_scores.scatter_(1, target[:, None], chosen.to(hidden.dtype))
            if weight is None:
                to_part.copy_(to_scores)
            else:
                torch.mm(to_scores, weight, out=to_part)
            if to_weight is not None:
                to_weight += product(to_scores.t(), part.t())
            if to_bias is not None:
                to_bias += to_scores.sum(0, dtype=to_bias.dtype)
        return (
            to_hidden,
            None if to_weight is None else to_weight.to(weight.dtype),
            None if to_bias is None else to_bias.to(bias.dtype),
            *[None] * 5,  # targets, temperature, entropy_gradient, size, invariant
        )


def _zeros(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter, dtype=torch.promote_types(parameter.dtype, torch.float32))


def _scores(hidden: Tensor, weight: Tensor | None, bias: Tensor | None, invariant: bool = False) -> Tensor:
    """(n, V) logits, float32 or wider."""
    if weight is None:
        return hidden.to(torch.promote_types(hidden.dtype, torch.float32))
    scores = product(hidden, weight, invariant=invariant)
    return scores if bias is None else scores.add_(bias)


def _fused_on_cuda(function: Callable[..., Any]) -> Callable[..., Any]:
    """One kernel for all of a function's element-wise steps, where its first argument is on a GPU, and large."""
    compiled = compiled_later(function)

    @wraps(function)
    def call(scores: Tensor, *args: Any, **options: Any) -> Any:
        return (compiled if scores.is_cuda and scores.numel() > UNFUSED_LOGITS else function)(scores, *args, **options)

    return call


@_fused_on_cuda
def _normalizer_and_entropy(scores: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """(n, V) logits -> log of the sum of exp(logits / temperature), and the distribution's entropy, (n,) each."""
    peak = scores.amax(1, keepdim=True)
    below = (scores - peak) / temperature
    powers = below.exp()
    total = powers.sum(1)
    # An impossible token (logit -inf) adds nothing: p log p is 0 there, not NaN.
    mean = (powers * below.where(powers > 0, 0.0)).sum(1) / total
    return peak[:, 0] / temperature + total.log(), total.log() - mean


def _score_gradient(
    scores: Tensor,
    normalizer: Tensor,
    mean: Tensor,
    to_logprob: Tensor,
    to_entropy: Tensor | None,
    temperature: float,
    *,
    dtype: torch.dtype,
) -> Tensor:
    """The gradient of logits that are not chosen; that of a chosen one has its own ``to_logprob`` in addition.

    With s = logits / temperature and p their softmax: d log p_chosen / ds = [chosen] - p, and dH / ds = -p (s - E[s]).

    Args:
        scores: (n, any) logits.
        normalizer, mean: (n, 1) log of the sum of exp(s), and E[s].
        to_logprob, to_entropy: (n, 1) outer gradients over the temperature; none for the entropy: None.
        dtype: of what is returned.
    """
    scores = scores / temperature
    p = (scores - normalizer).exp()
    outer = to_logprob
    if to_entropy is not None:
        outer = outer + to_entropy * (scores - mean).where(p > 0, 0.0)
    return (-p * outer).to(dtype)


_fused_score_gradient = _fused_on_cuda(_score_gradient)  # the few chosen ones are not worth a kernel of their own


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
    head = None
    if loaded.packed:
        hidden = response_hidden(model, micro)
        head = model.get_output_embeddings()
        if type(head) is not nn.Linear:
            hidden, head = head(hidden), None
    else:
        # Such a model may do more to its logits than the output embedding does, so we take what it returns.
        output = model(
            input_ids=micro.tokens, attention_mask=micro.attention_mask, position_ids=micro.positions, use_cache=False
        ).logits
        hidden = output.flatten(0, 1).index_select(0, micro.predictors)
    logprobs, entropy = token_logprobs(
        hidden, head, micro.targets, temperature, entropy_gradient=entropy_gradient, invariant=loaded.invariant
    )
    return micro.rows(logprobs), micro.rows(entropy)


@torch.no_grad()
def in_sample_order(
    samples: list[Sample],
    loaded: Loaded,
    budget: int,
    compute: Callable[[MicroBatch], Tensor],
    shards: Shards = WHOLE,
) -> list[list[float]]:
    """Run ``compute`` (micro-batch -> (B, T)) over all samples and give each its values, one a response token."""
    places = {id(sample): place for place, sample in enumerate(samples)}
    rows: list[tuple[int, list[float]]] = []
    micros = shards.micro_batches(samples, loaded, budget)
    # All are under way before the first is waited for.
    for micro, values in [(micro, shards.run(partial(compute, micro))) for micro in micros]:
        for sample, row in zip(micro.samples, values.tolist(), strict=True):
            if sample is not NOTHING:
                rows.append((places[id(sample)], row[: len(sample.response)]))
    found = dict(shards.gather(rows))
    return [found.get(place, []) for place in range(len(samples))]


def sample_logprobs(
    loaded: Loaded, samples: list[Sample], temperature: float, budget: int, shards: Shards = WHOLE
) -> list[list[float]]:
    """Log-probabilities of every sample's response tokens at ``temperature``, in the samples' order, no gradient."""

    def compute(micro: MicroBatch) -> Tensor:
        return policy_logprobs(loaded, micro, temperature)[0]

    return in_sample_order(samples, loaded, budget, compute, shards)
