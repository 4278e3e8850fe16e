"""The fallback engine: transformers' own generate, for models that do not take Rolecall's attention function."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, StoppingCriteria

from rolecall.engines.local import LocalEngine
from rolecall.engines.native.sampling import Batch, draw, token_mask
from rolecall.engines.sequence import Sequence
from rolecall.samples import Request, Sample


class TransformersEngine(LocalEngine):
    """Generates through ``model.generate``, ``max_sequences`` prompts at a time, padded on the left.

    Tokens are drawn by the native engine's sampler from generate's raw logits, so seeds, log-probabilities and
    endings mean the same in both engines.
    """

    @torch.no_grad()
    def generate(self, requests: list[Request]) -> list[Sample]:
        """See ``Engine.generate``."""
        sequences = self.endings.open(requests)
        for start in range(0, len(sequences), self.max_sequences):
            self._run(sequences[start : start + self.max_sequences])
        return [sequence.sample(self.tokenizer) for sequence in sequences]

    def _run(self, rows: list[Sequence]) -> None:
        width = max(len(row.request.prompt) for row in rows)
        padding = [width - len(row.request.prompt) for row in rows]
        tokens = [[0] * pad + row.request.prompt for pad, row in zip(padding, rows, strict=True)]
        mask = [[0] * pad + [1] * (width - pad) for pad in padding]
        sampler = _Sampler(rows, self)
        settings = GenerationConfig(do_sample=False, max_new_tokens=max(row.limit for row in rows), pad_token_id=0)
        with _no_generation_defaults(self.model):
            self.model.generate(
                input_ids=torch.tensor(tokens, device=self.model.device),
                attention_mask=torch.tensor(mask, device=self.model.device),
                generation_config=settings,
                logits_processor=[sampler],
                stopping_criteria=[_AllFinished(rows)],
            )


class _Sampler(LogitsProcessor):
    """Draws each row's token and leaves generate no other choice."""

    def __init__(self, rows: list[Sequence], engine: TransformersEngine):
        self.rows, self.endings, self.version = rows, engine.endings, engine.version
        self.batch = Batch(rows, engine.model.device)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        tokens, logprobs = draw(scores, self.batch, token_mask(self.endings.tokens, scores.shape[-1], scores.device))
        self.batch.advance(tokens)
        for row, token, logprob in zip(self.rows, tokens.tolist(), logprobs.tolist(), strict=True):
            if not row.finish:
                row.append(token, logprob, self.endings, self.version)
        return torch.full_like(scores, -torch.inf).scatter_(-1, tokens[:, None], 0.0)


class _AllFinished(StoppingCriteria):
    def __init__(self, rows: list[Sequence]):
        self.rows = rows

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        return torch.tensor([bool(row.finish) for row in self.rows], device=input_ids.device)


@contextlib.contextmanager
def _no_generation_defaults(model: Any) -> Iterator[None]:
    """Many models ship a repetition penalty or suppressed tokens, which the trainer knows nothing of."""
    shipped = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = shipped
