"""One response while it is being generated, and when it ends. Shared by all engines."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import nn

from rolecall.errors import RunError, UserError
from rolecall.samples import Request, Sample


class Endings:
    """What ends a response of this model: its end-of-sequence tokens, the room in its context, stop strings."""

    def __init__(self, model: nn.Module, tokenizer: Any):
        any_model: Any = model
        self.tokenizer = tokenizer
        ids = any_model.generation_config.eos_token_id
        given = ids if isinstance(ids, list) else [ids]
        self.tokens = sorted({token for token in (*given, tokenizer.eos_token_id) if token is not None})
        self.context: int | None = getattr(any_model.config.get_text_config(), "max_position_embeddings", None)

    def open(self, requests: list[Request]) -> list[Sequence]:
        """The sequences of all requests, in order; ``max_tokens`` is cut to the room that the context leaves.

        Raises:
            UserError: a prompt is empty or leaves no room for one token.
        """
        sequences = []
        for request in requests:
            size, limit = len(request.prompt), request.sampling.max_tokens
            if not size:
                raise UserError(f"Prompt {request.prompt_id!r} has no tokens: there is nothing to continue.")
            if self.context is not None:
                if size >= self.context:
                    raise UserError(
                        f"Prompt {request.prompt_id!r} has {size} tokens; the model's context is {self.context}, so a "
                        f"prompt may have {self.context - 1}. Shorten it, or lower data.max_prompt_tokens."
                    )
                limit = min(limit, self.context - size)
            sequences += [Sequence(request, index, limit) for index in range(request.n)]
        return sequences

    def stops(self, sequence: Sequence) -> bool:
        """Whether the last token of ``sequence`` ends it (by what it is or by the stop string it completes)."""
        tokens, sampling = sequence.tokens, sequence.request.sampling
        if len(tokens) < sampling.min_tokens:
            return False
        if tokens[-1] in self.tokens:
            return True
        for stop in sampling.stop:
            # A token has at least one byte; the rest is room for characters that begin before the tail.
            tail = tokens[-len(stop.encode()) - 8 :]
            if self.tokenizer.decode(tail).count(stop) > self.tokenizer.decode(tail[:-1]).count(stop):
                return True
        return False


@dataclass(slots=True)
class Sequence:
    """``limit``: most response tokens. ``finish``: empty while it runs. ``versions``: as in a Sample."""

    request: Request
    index: int
    limit: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[tuple[int, int, int]] = field(default_factory=list)
    finish: str = ""

    @property
    def length(self) -> int:
        """Tokens of the prompt and what there is of the response."""
        return len(self.request.prompt) + len(self.tokens)

    @property
    def longest(self) -> int:
        """Tokens of the prompt and of the longest response."""
        return len(self.request.prompt) + self.limit

    def append(self, token: int, logprob: float, endings: Endings, version: int) -> None:
        """Take the token that the weights ``version`` have sampled, and see whether it was the last."""
        if math.isnan(logprob):
            raise RunError(
                f"The model gives NaN log-probabilities for prompt {self.request.prompt_id!r}, response token "
                f"{len(self.tokens)}: its weights or activations have overflowed."
            )
        self._take([token], [logprob], version)
        if endings.stops(self):
            self.finish = "stop"
        elif len(self.tokens) == self.limit:
            self.finish = "length"

    def extend(self, tokens: list[int], logprobs: list[float], endings: Endings, version: int) -> None:
        """``append`` each, up to the one that ends the response.

        Args:
            tokens: none but the last may end the response, other than by a stop string.
        """
        if not self.request.sampling.stop and not math.isnan(sum(logprobs)):  # then only the last needs a look
            self._take(tokens[:-1], logprobs[:-1], version)
            tokens, logprobs = tokens[-1:], logprobs[-1:]
        for token, logprob in zip(tokens, logprobs, strict=True):
            if not self.finish:
                self.append(token, logprob, endings, version)

    def _take(self, tokens: list[int], logprobs: list[float], version: int) -> None:
        """Add tokens of one version; their span joins the last one if that is of the same."""
        if tokens:
            start = size = len(self.tokens)
            if self.versions and self.versions[-1][2] == version:
                start, _, _ = self.versions.pop()
            self.versions.append((start, size + len(tokens), version))
            self.tokens += tokens
            self.logprobs += logprobs

    def cut_short(self, engine: str, reason: Any) -> RunError:
        """What to raise where ``engine`` has ended a response that nothing ends here."""
        return RunError(
            f"{engine} ended a response to prompt {self.request.prompt_id!r} after {len(self.tokens)} of {self.limit} "
            f"tokens ({reason})."
        )

    def sample(self, tokenizer: Any) -> Sample:
        request = self.request
        return Sample(
            group_id=request.group_id,
            index=self.index,
            prompt_id=request.prompt_id,
            prompt=request.prompt,
            response=self.tokens,
            logprobs=self.logprobs,
            response_mask=[1] * len(self.tokens),
            versions=self.versions,
            finish=self.finish,
            text=tokenizer.decode(np.array(self.tokens), skip_special_tokens=True),  # a list is checked item by item
        )


def in_parts(sequences: list[Sequence], most: int) -> list[list[Sequence]]:
    """What enters an engine together, in order: a group, or as much of it as may run at once (``most``)."""
    cut: list[list[Sequence]] = []
    for sequence in sequences:
        if sequence.index % most == 0:
            cut.append([])
        cut[-1].append(sequence)
    return cut
