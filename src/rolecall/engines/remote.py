"""A vLLM server that somebody already runs, by its URL: for generating where no weights are synced (``rolecall eval``).

The protocol is OpenAI's completions with vLLM's additions: token ids in both directions, ``top_k``, ``min_tokens``.
"""

import json
import os
from collections.abc import Sequence as Several
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from typing import Any, Literal
from urllib.error import HTTPError
from urllib.request import Request as Call
from urllib.request import urlopen

from torch import Tensor

from rolecall import models
from rolecall.config import Config
from rolecall.engines.sequence import Endings, Sequence
from rolecall.errors import RunError, UserError
from rolecall.samples import Request, Sample, Sampling
from rolecall.sync.buckets import Entry

GREETING = 30.0  # seconds for the first answers, which take the server no time
IMPOSSIBLE = -1000.0  # JSON has no infinity: vLLM writes a log-probability of -inf as -9999
TEXT = "Which model reads this? 12 + 345 = 357. Ça va, naïve 世界!\n"  # hard to cut alike for two tokenizers


class RemoteEngine:
    """Generates through the completions of the server at ``rollout.engine``, one HTTP request a response.

    At most ``rollout.max_sequences`` are under way at once. A server that wants a key gets $OPENAI_API_KEY.
    ``model.path`` names the model that is served: its tokenizer and settings are read here, its weights are not.

    Raises:
        UserError: nothing answers there, it is no vLLM server, or it serves another model.
    """

    def __init__(self, config: Config):
        self.url = config.rollout.engine.rstrip("/")
        self.path = config.model.path
        self.timeout = config.cluster.timeout
        self.at_once = config.rollout.max_sequences
        self.tokenizer = models.load_tokenizer(config.model)
        self.version = 0
        self.endings = Endings(models.outline(config.model, "cpu"), self.tokenizer)
        try:
            card = self._served()
            self.name = card["id"]
            self._check_context(card.get("max_model_len"))
            choice = self._greet()
            self._check_tokens(choice)
            (likely,) = choice["logprobs"]["top_logprobs"]
            self.processed = min(likely.values()) < IMPOSSIBLE
        except (RunError, KeyError, TypeError, ValueError, AttributeError) as error:
            if not isinstance(error, RunError):  # JSON of another kind
                error = RunError(f"{self.url} answers otherwise than vLLM does ({type(error).__name__}: {error}).")
            raise UserError(
                f"rollout.engine: {error} `vllm serve MODEL` starts a server, whose URL ends in /v1, such as "
                "http://localhost:8000/v1; if it wants a key, that is $OPENAI_API_KEY."
            ) from None

    def generate(self, requests: list[Request]) -> list[Sample]:
        """See ``Engine.generate``.

        Raises:
            UserError: the server's log-probabilities are not of the distribution that is sampled from.
            RunError: the server refuses, is gone, or does not answer within ``cluster.timeout``.
        """
        for sampling in {request.sampling for request in requests}:
            self._check_sampling(sampling)
        sequences = self.endings.open(requests)
        with ThreadPoolExecutor(self.at_once) as threads:
            for _ in threads.map(self._complete, sequences):  # a failure calls off those that have not begun
                pass
        return [sequence.sample(self.tokenizer) for sequence in sequences]

    def expect(self, entries: list[Entry]) -> None:
        """Refuse: see ``Config.check_trainable``."""
        raise RunError(f"Weight sync: {self.url} is a server of its own, whose weights stay as they are.")

    def start_update(self) -> None:
        """Refuse, as ``expect``."""
        self.expect([])

    def write(self, weights: list[tuple[str, Tensor]]) -> None:
        """Refuse, as ``expect``."""
        self.expect([])

    def finish_update(self, version: int) -> None:
        """Refuse, as ``expect``."""
        self.expect([])

    def sleep(self, level: Literal[1, 2]) -> None:
        """See ``Engine.sleep``: the memory is the server's."""

    def close(self) -> None:
        """See ``Engine.close``: the server is the user's."""

    def wake(self, part: Literal["weights", "kv_cache"]) -> None:
        """See ``Engine.wake``."""

    def _complete(self, sequence: Sequence) -> None:
        """Generate one response. What ends it is decided here; what the server ends keeps it from going on for long."""
        request, sampling = sequence.request, sequence.request.sampling
        choice = self._choice(
            self.timeout,
            prompt=request.prompt,
            max_tokens=sequence.limit,
            min_tokens=min(sampling.min_tokens, sequence.limit),
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=request.sample_seed(sequence.index),
            stop=sampling.stop,
            stop_token_ids=self.endings.tokens,
            skip_special_tokens=False,  # a stop string may hold some
            logprobs=0,  # of the sampled token alone
        )
        for token, logprob in zip(choice["token_ids"], choice["logprobs"]["token_logprobs"], strict=True):
            sequence.append(token, logprob, self.endings, self.version)
            if sequence.finish:
                return
        raise sequence.cut_short(self.url, choice["finish_reason"])

    def _choice(self, seconds: float, **fields: Any) -> dict[str, Any]:
        """One completion. Sampling defaults that the model ships, and the server takes over, are set aside."""
        neutral = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "min_p": 0.0}
        body = {"model": self.name, "return_token_ids": True} | neutral | fields
        (choice,) = self._ask("/completions", seconds, body)["choices"]
        return choice

    def _served(self) -> dict[str, Any]:
        """The entry of the model to ask for: the one that is called or lies at ``model.path``, else the only one."""
        cards = self._ask("/models", GREETING).get("data")
        if not cards:
            raise RunError(f"{self.url}/models lists no models.")
        if cards[0].get("owned_by") == "sglang":
            raise UserError(
                f"rollout.engine: {self.url} is SGLang's. Its log-probabilities are those before top_k and top_p, and "
                "it heeds seeds only in a slower mode. Serve the model with vLLM, or take --rollout.engine sglang."
            )
        for card in cards:
            if self.path in (card["id"], card.get("root")):
                return card
        if len(cards) > 1:
            names = ", ".join(card["id"] for card in cards)
            raise UserError(f"rollout.engine: {self.url} serves {names}; set model.path to one of these names.")
        return cards[0]

    def _greet(self) -> dict[str, Any]:
        """Have the server read a text and continue it by one token, of which only the most likely one is allowed.

        So all others have probability 0, if its log-probabilities are of the distribution that is sampled from.
        """
        asked = {"prompt": TEXT, "add_special_tokens": False, "max_tokens": 1, "top_k": 1}
        return self._choice(GREETING, **asked, logprobs=5, return_tokens_as_token_ids=True)

    def _check_context(self, served: int | None) -> None:
        """A server may keep its context shorter than the model's; a longer one is another model's."""
        own = self.endings.context
        if served and own and served > own:
            raise UserError(self._other(f"its context is {served} tokens, and that of model.path {own}"))
        self.endings.context = served or own

    def _check_tokens(self, choice: dict[str, Any]) -> None:
        """The server must give token ids, and read a text as the tokenizer does."""
        if not choice.get("token_ids") or not choice.get("prompt_token_ids"):
            raise UserError(
                f"rollout.engine: {self.url} gives text without its token ids, which cannot be turned back into the "
                "tokens that were sampled. vLLM's server gives them, from 0.10.2 on."
            )
        ids = self.tokenizer(TEXT, add_special_tokens=False)["input_ids"]
        if (theirs := choice["prompt_token_ids"]) != ids:
            raise UserError(self._other(f"it reads {TEXT!r} as {_short(theirs)}, model.path as {_short(ids)}"))

    def _check_sampling(self, sampling: Sampling) -> None:
        changed = sampling.temperature not in (0, 1) or sampling.top_p < 1 or sampling.top_k or sampling.min_tokens
        if changed and not self.processed:
            raise UserError(
                f"rollout.engine: {self.url} gives log-probabilities as they are before temperature, top_p, top_k and "
                f"min_tokens ({sampling.temperature}, {sampling.top_p}, {sampling.top_k}, {sampling.min_tokens} here). "
                "Start it with `--logprobs-mode processed_logprobs`, or leave these at 1, 1, 0, 0."
            )

    def _other(self, why: str) -> str:
        return (
            f"rollout.engine: {self.url} serves {self.name!r}, which is not the model at model.path = {self.path!r}: "
            f"{why}. Set model.path to the model that is served."
        )

    def _ask(self, path: str, seconds: float, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """The server's JSON: to a GET, or to a POST of ``body``.

        Raises:
            RunError: there is none.
        """
        url = self.url + path
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("OPENAI_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        data = json.dumps(body).encode() if body else None
        try:
            with urlopen(Call(url, data, headers), timeout=seconds) as response:
                answer = json.load(response)
        except HTTPError as error:
            said = " ".join(error.read().decode(errors="replace").split())
            raise RunError(f"{url} answered {error.code} {error.reason}: {said:.300}") from None
        except ValueError:
            raise RunError(f"{url} did not answer with JSON.") from None
        except (OSError, HTTPException) as error:
            reason = getattr(error, "reason", error)
            why = f"nothing within {seconds:g} s" if isinstance(reason, TimeoutError) else reason
            raise RunError(f"{url} does not answer: {why}.") from None
        if not isinstance(answer, dict):
            raise RunError(f"{url} did not answer as an OpenAI-compatible server.")
        return answer


def _short(ids: Several[int]) -> str:
    return ", ".join(map(str, ids[:8])) + (", ..." if len(ids) > 8 else "")
