"""What an engine's sample should say of itself, by one plain forward pass of a transformers model."""

import copy
from typing import Any

import torch

from rolecall.samples import Sample, Sampling


@torch.no_grad()
def plain(model: Any, sample: Sample) -> torch.Tensor:
    """Logits before each response token, (T, V), with transformers' eager attention."""
    model = copy.deepcopy(model)
    model.set_attn_implementation("eager")
    logits = model(torch.tensor([sample.prompt + sample.response])).logits[0].float()
    return logits[len(sample.prompt) - 1 : -1]


def sampled_logprobs(logits: torch.Tensor, sample: Sample, sampling: Sampling, ends: list[int]) -> torch.Tensor:
    """(T,) log-probabilities of the response under the distributions that ``sampling`` makes of the (T, V) logits."""
    scores = sampled_scores(logits, sampling, ends)
    return scores.log_softmax(-1).gather(-1, torch.tensor(sample.response)[:, None])[:, 0]


def sampled_scores(logits: torch.Tensor, sampling: Sampling, ends: list[int]) -> torch.Tensor:
    """(T, V) logits of a response from its first token on, as ``sampling`` leaves them: -inf what it does not draw."""
    scores = logits / (sampling.temperature or 1.0)
    early = torch.arange(len(scores)) < sampling.min_tokens
    scores[early[:, None] & torch.isin(torch.arange(scores.shape[-1]), torch.tensor(ends))] = -torch.inf
    if sampling.top_k and sampling.temperature:
        scores[scores < scores.topk(sampling.top_k).values[:, -1:]] = -torch.inf
    if sampling.temperature:
        for row in scores:
            ranked, order = row.softmax(-1).sort(descending=True)
            row[order[ranked.cumsum(-1) - ranked >= sampling.top_p]] = -torch.inf
    return scores
