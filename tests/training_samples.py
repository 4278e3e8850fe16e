"""Samples for the training tests, their log-probabilities by a plain forward pass of one sequence, and gradients."""

import random
from typing import Any

import torch
from torch import Tensor, nn

from rolecall.samples import Sample
from rolecall.training.trained import Trained


def sample(group_id=0, index=0, prompt=(6, 7, 8), response=(9, 10, 1), mask=None, **fields) -> Sample:
    response = list(response)
    return Sample(
        group_id=group_id,
        index=index,
        prompt_id=f"p{group_id}",
        prompt=list(prompt),
        response=response,
        logprobs=fields.pop("logprobs", [-1.0] * len(response)),
        response_mask=[1] * len(response) if mask is None else list(mask),
        versions=[(0, len(response), 0)],
        finish="stop",
        text="",
        **fields,
    )


def uneven(groups=4, size=3, seed=0, vocabulary=16) -> list[Sample]:
    """Groups with prompts and responses of many lengths, a masked token in most, and engine log-probabilities."""
    rng = random.Random(seed)
    samples = []
    for group in range(groups):
        prompt = [rng.randrange(vocabulary) for _ in range(rng.randint(1, 6))]
        for index in range(size):
            length = rng.randint(1, 7)
            samples.append(
                sample(
                    group_id=group * 17 + 3,
                    index=index,
                    prompt=prompt,
                    response=[rng.randrange(vocabulary) for _ in range(length)],
                    mask=[int(rng.random() < 0.8) for _ in range(length)],
                    logprobs=[-2.5 - rng.random() for _ in range(length)],
                    ref_logprobs=[-2.5 - rng.random() for _ in range(length)],
                    advantages=[rng.uniform(-1, 1)] * length,
                    returns=[rng.uniform(-1, 1)] * length,
                    values=[rng.uniform(-1, 1) for _ in range(length)],
                )
            )
    return samples


def plain_logprobs(model: nn.Module, sample: Sample, temperature: float = 1.0) -> Tensor:
    """(T,) by transformers' own attention on this one sequence."""
    tokens = torch.tensor([sample.prompt + sample.response])
    logits = model(input_ids=tokens).logits[0, len(sample.prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1)[torch.arange(len(sample.response)), torch.tensor(sample.response)]


def gradients(
    role: Trained, samples: list[Sample], dtype: torch.dtype = torch.float64, **options: Any
) -> dict[str, Tensor]:
    """In ``dtype``, of one update that stops short of the step."""
    module, optimizer = role.module, role.optimizer
    module.to(dtype)
    found: dict[str, Tensor] = {}

    def step() -> dict[str, float]:
        found.update({name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None})
        module.zero_grad()
        return {"grad_norm": 0.0, "lr": 0.0}

    optimizer.step = step  # type: ignore[method-assign]
    role.update(samples, **options)
    return found
