"""What travels between the roles: prompts, requests and samples, unpadded, with no tensors in them."""

import hashlib
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Prompt:
    """One row of the data set, rendered and tokenised once.

    ``id`` depends on the row's content only, so it is the same in every run. ``text`` is what the user says, without
    the chat template's marks; ``tokens`` are what the model reads. ``row`` is what the reward sees.
    """

    id: str
    text: str
    tokens: list[int]
    row: dict[str, Any]


@dataclass(frozen=True)
class Sampling:
    """How to sample. ``temperature`` 0 is greedy; ``top_k`` 0 and ``top_p`` 1 cut nothing off."""

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class Request:
    """``n`` responses to one prompt. ``group_id`` is given when the prompt is drawn and names the group for good."""

    group_id: int
    prompt_id: str
    prompt: list[int]
    n: int
    seed: int
    sampling: Sampling

    def sample_seed(self, index: int) -> int:
        """The seed of response ``index``: a function of (seed, group_id, index) alone, never of the batch."""
        digest = hashlib.blake2b(f"{self.seed}/{self.group_id}/{index}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1


@dataclass(slots=True)
class Sample:
    """One response. Lists are per response token.

    ``logprobs``: of each token under the distribution it was sampled from, as the engine computed it.
    ``response_mask``: 1 where the policy chose the token, 0 where a tool or the environment wrote it.
    ``versions``: spans ``(start, end, version)`` of response positions and the weight version that made them.
    ``finish``: "stop" (end-of-sequence or stop string; the token that ended it is included), "length", or "abort"
    (called off; the tokens are those there were).
    """

    group_id: int
    index: int
    prompt_id: str
    prompt: list[int]
    response: list[int]
    logprobs: list[float]
    response_mask: list[int]
    versions: list[tuple[int, int, int]]
    finish: str
    text: str
    reward: float = 0.0
    # Filled by the later stages, one value a response token.
    old_logprobs: list[float] = field(default_factory=list)
    ref_logprobs: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    advantages: list[float] = field(default_factory=list)
    returns: list[float] = field(default_factory=list)

    @property
    def action_tokens(self) -> int:
        return sum(self.response_mask)


def by_group(samples: list[Sample]) -> dict[int, list[Sample]]:
    """The samples of each group id, in their order."""
    groups: dict[int, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.group_id, []).append(sample)
    return groups
