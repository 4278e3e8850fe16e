"""The native engine: batched generation on a model's own parameters, so that a shared Actor needs no sync."""

from collections import deque

import torch
from torch import Tensor

from rolecall.engines.local import LocalEngine
from rolecall.engines.native.cache import Cache, Decode, Prefill
from rolecall.engines.native.sampling import Batch, draw, token_mask
from rolecall.engines.sequence import Sequence, in_parts
from rolecall.models import Loaded
from rolecall.models.attention import hidden_states
from rolecall.models.head import logits
from rolecall.samples import Request, Sample

PREFILL_TOKENS = 4096  # prompt tokens in one forward pass (a longer prompt goes alone)


class NativeEngine(LocalEngine):
    """Generates with the model in ``loaded``; keeps no copy of its weights and nothing computed from older ones.

    A group's prompt is computed once, what all prompts that enter together begin with too, and keys and values are
    copied to the slots. A group enters whole when enough slots are free; one larger than ``max_sequences`` enters in
    parts, each with its own prefill. A sample is a function of (weights, prompt, sampling, seed), up to the rounding
    of matrix products of other shapes.
    """

    def __init__(self, loaded: Loaded, max_sequences: int):
        super().__init__(loaded, max_sequences)
        self.cache = Cache()
        vocabulary = self.model.get_output_embeddings().weight.shape[0]
        self.ends = token_mask(self.endings.tokens, vocabulary, self.model.device)

    # Not inference_mode: a module may keep a tensor it makes here (rotary caches), and the Actor trains on this model.
    @torch.no_grad()
    def generate(self, requests: list[Request]) -> list[Sample]:
        """See ``Engine.generate``."""
        sequences = self.endings.open(requests)
        waiting = deque(in_parts(sequences, self.max_sequences))
        rows: list[Sequence] = []  # rows[i] runs in slot i
        batch: Batch | None = None  # of all rows; None: the rows have changed
        longest = max((sequence.longest for sequence in sequences), default=0)
        self.cache.reserve(min(self.max_sequences, len(sequences)), longest)
        while waiting or rows:
            if entering := self._enter(waiting, len(rows)):
                new = [sequence for part in entering for sequence in part]
                scores = self._prefill(entering, len(rows))
                rows += new
                self._sample(scores, new, Batch(new, self.model.device))
                batch = None
            else:
                batch = batch or Batch(rows, self.model.device)
                self._sample(self._decode(rows, batch), rows, batch)
            if any(sequence.finish for sequence in rows):
                self._drop_finished(rows)
                batch = None
        return [sequence.sample(self.tokenizer) for sequence in sequences]

    def _enter(self, waiting: deque[list[Sequence]], running: int) -> list[list[Sequence]]:
        """The next parts for which slots are free, in order, as many as one prefill takes."""
        entering: list[list[Sequence]] = []
        tokens = 0
        while waiting and running + len(waiting[0]) <= self.max_sequences:
            tokens += len(waiting[0][0].request.prompt)
            if entering and tokens > PREFILL_TOKENS:
                break
            running += len(waiting[0])
            entering.append(waiting.popleft())
        return entering

    def _prefill(self, parts: list[list[Sequence]], slot: int) -> Tensor:
        """Compute the parts' prompts into the slots from ``slot`` on; logits (number of sequences, V)."""
        device = self.model.device
        prompts = [part[0].request.prompt for part in parts]
        slots = []
        for part in parts:
            slots.append((slot, slot + len(part)))
            slot += len(part)
        layout = Prefill(self.cache, prompts, slots, device)
        hidden = hidden_states(self.model, layout.tokens[None], layout.positions[None], layout)[0]
        copies = torch.tensor([len(part) for part in parts], device=device)
        return logits(self.model, hidden[layout.ends]).repeat_interleave(copies, 0)

    def _decode(self, rows: list[Sequence], batch: Batch) -> Tensor:
        """One step of all rows: feed the token sampled last; logits (n, V)."""
        positions = batch.prompts + batch.counts - 1
        longest = max(row.length for row in rows) - 1
        layout = Decode(self.cache, positions, longest)
        return logits(self.model, hidden_states(self.model, batch.tokens[:, None], positions[:, None], layout)[:, 0])

    def _sample(self, logits: Tensor, rows: list[Sequence], batch: Batch) -> None:
        tokens, logprobs = draw(logits, batch, self.ends)
        batch.advance(tokens)
        both = torch.stack([tokens.double(), logprobs.double()])  # one transfer; both are exact in float64
        for row, token, logprob in zip(rows, *both.tolist(), strict=True):
            row.append(int(token), logprob, self.endings, self.version)

    def _drop_finished(self, rows: list[Sequence]) -> None:
        """Keep the rows compact: the last ones that run take the slots of those that have finished."""
        left = sum(not row.finish for row in rows)
        holes = [slot for slot in range(left) if rows[slot].finish]
        movers = [slot for slot in range(left, len(rows)) if not rows[slot].finish]
        if movers:
            length = max(rows[slot].length for slot in movers)
            self.cache.move(movers, holes, length)
            for hole, mover in zip(holes, movers, strict=True):
                rows[hole] = rows[mover]
        del rows[left:]
