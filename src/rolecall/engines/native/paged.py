"""The native engine on a GPU: generation on a model's own parameters without a host in the loop."""

from collections import deque
from dataclasses import dataclass

import numpy as np
import torch

from rolecall.engines.local import LocalEngine
from rolecall.engines.native.decode import BUCKETS, Decoder
from rolecall.engines.native.invariant import TokenPrefill
from rolecall.engines.native.pages import PAGE, PagedPrefill, Pages, pages_for
from rolecall.engines.native.rows import Status, Taken
from rolecall.engines.sequence import Sequence, in_parts
from rolecall.errors import UserError
from rolecall.models import Loaded
from rolecall.models.attention import hidden_states
from rolecall.models.head import logits
from rolecall.models.load import free_memory
from rolecall.samples import Request, Sample

STEPS = 4  # tokens between two looks at what has ended
PREFILL_TOKENS = 16384  # prompt tokens in one forward pass, with their padding; a longer prompt goes in parts
SHARE = 0.8  # of the free memory for the cache; the rest is for prompts' activations


@dataclass(slots=True)
class Running:
    """A sequence that has a row.

    ``pages``: its own and shared ones, in order. ``count``: tokens of its response, if it has not ended before; they
    are on the device, and the sequence gets them once it has. ``done``: it is known to have ended.
    """

    sequence: Sequence
    pages: list[int]
    count: int
    done: bool = False


class PagedEngine(LocalEngine):
    """Generates with the model in ``loaded``; keeps no copy of its weights and nothing computed from older ones.

    A group's prompt is computed once, and the pages of keys and values that it fills are shared. Rows take pages as
    they grow; where none is left, the youngest gives up its own and is computed again later, to the same tokens up to
    rounding. A sample is a function of (weights, prompt, sampling, seed), up to that of products of other shapes; of a
    model that is batch-invariant, bit for bit.

    Args:
        pages: of the cache; None: as many as the requests can use and the memory has.
    """

    def __init__(self, loaded: Loaded, max_sequences: int, pages: int | None = None):
        super().__init__(loaded, min(max_sequences, BUCKETS[-1]))
        self.pages, self.most_pages = Pages(self.model), pages
        self.invariant = loaded.invariant
        self.decoder = Decoder(self.model, self.pages, self.endings.tokens, self.invariant)
        self.running: list[Running] = []  # in the order of the rows
        self.ended: list[tuple[list[Sequence], Taken]] = []  # ended rows' tokens, copied on the device

    # Not inference_mode: a module may keep a tensor it makes here (rotary caches), and the Actor trains on this model.
    @torch.no_grad()
    def generate(self, requests: list[Request]) -> list[Sample]:
        """See ``Engine.generate``."""
        sequences = self.endings.open(requests)
        if sequences:
            self._reserve(sequences)
            self._run(sequences)
        return [sequence.sample(self.tokenizer) for sequence in sequences]

    def _reserve(self, sequences: list[Sequence]) -> None:
        """Rows for these sequences, and pages for as many of them as will run."""
        device = self.model.device
        sizes = sorted((pages_for(sequence.longest) for sequence in sequences), reverse=True)
        slots = min(self.max_sequences, len(sequences))
        self.decoder.reserve(slots, sizes[0], max(sequence.limit for sequence in sequences))
        self.decoder.rows.expect(sequences)
        most = self.most_pages or int(SHARE * free_memory(device)) // self.pages.page_bytes
        if most < sizes[0]:
            raise UserError(
                f"The KV cache has room for {most} pages of {PAGE} tokens; one response with its prompt may need "
                f"{sizes[0]}. Lower rollout.max_tokens, use a smaller model, or free memory of {device}."
            )
        self._allocate(min(most, sum(sizes[: self.max_sequences])), sizes[0])

    def _allocate(self, count: int, least: int) -> None:
        """That many pages, or fewer where the free memory lies in pieces."""
        while True:
            try:
                return self.pages.allocate(count)
            except torch.OutOfMemoryError:
                if count == least:
                    raise
                count = max(least, count // 2)

    def _run(self, sequences: list[Sequence]) -> None:
        """Generate all of these.

        The device is always one round of steps ahead of what is known here, so that it never waits: a row that has
        ended is found out while it goes on for nothing in the next round.
        """
        self.running, self.ended = [], []
        self.decoder.rows.keep([])
        # The longest prompts first, so that those of one prefill are padded little.
        parts = in_parts(sequences, self.max_sequences)
        waiting = deque(sorted(parts, key=lambda part: -len(part[0].request.prompt)))
        previous: tuple[list[Running], Status] = [], self.decoder.rows.status(0)
        try:
            while waiting or self.running:
                while entering := self._enter(waiting):
                    self._prefill(entering)
                steps = self._grow(waiting)
                if steps:
                    self.decoder.run(len(self.running), steps)
                    for running in self.running:
                        running.count = min(running.count + steps, running.sequence.limit)
                latest = self._status()
                # One round late, so that nothing waits: the device computes this one meanwhile, if there is one.
                self._collect(*(previous if steps else latest))
                previous = latest
            for ended, taken in self.ended:
                self._give(ended, taken)
        finally:
            self.pages.release()

    def _enter(self, waiting: deque[list[Sequence]]) -> list[list[Sequence]]:
        """The next parts for which there are rows and pages, in order, as many as one prefill takes."""
        entering: list[list[Sequence]] = []
        running, longest = len(self.running), 0
        # One page more for each row that may need it: else those that enter would soon have to leave again.
        spare = len(self.pages.free) - sum(grows(row.sequence, len(row.pages)) for row in self.running)
        while waiting and running + len(waiting[0]) <= self.max_sequences:
            part = waiting[0]
            longest = max(longest, part[0].length)
            if entering and longest * (len(entering) + 1) > PREFILL_TOKENS:
                break
            needed = part[0].length // PAGE + len(part) * (part[0].length % PAGE > 0)
            needed += sum(grows(sequence, pages_for(sequence.length)) for sequence in part) if running else 0
            if needed <= spare:
                spare -= needed
                running += len(part)
                entering.append(waiting.popleft())
            elif running:
                break
            else:  # it is alone, and still too large: half of it, and in the end one that is known to fit
                waiting[0] = part[len(part) // 2 :]
                waiting.appendleft(part[: len(part) // 2])
        return entering

    def _prefill(self, parts: list[list[Sequence]]) -> None:
        """Compute the parts' prompts into new rows, and their first tokens."""
        prompts = [part[0].request.prompt + part[0].tokens for part in parts]
        pages = [self.pages.take(pages_for(len(prompt))) for prompt in prompts]
        for begin in range(0, max(map(len, prompts)), PREFILL_TOKENS):  # more than one part only of a prompt alone
            end = begin + PREFILL_TOKENS
            layout = (TokenPrefill if self.invariant else PagedPrefill)(self.pages, prompts, pages, begin, end)
            hidden = hidden_states(self.model, layout.tokens, layout.positions, layout)
        scores = logits(self.model, hidden[layout.ends], invariant=self.invariant)
        entering: list[list[int]] = []
        sources: list[int] = []
        targets: list[int] = []
        for part, prompt, first in zip(parts, prompts, pages, strict=True):
            whole, last = first[: len(prompt) // PAGE], first[len(prompt) // PAGE :]
            entering.append(first)
            for _ in part[1:]:  # the page that they will write to is each one's own
                own = self.pages.take(len(last))
                sources, targets = sources + last, targets + own
                self.pages.share(whole)
                entering.append(whole + own)
        self.pages.copy(sources, targets)
        sequences = [sequence for part in parts for sequence in part]
        rows = self.decoder.rows.put(len(self.running), sequences, entering)
        copies = torch.tensor([len(part) for part in parts], device=hidden.device)
        self.decoder.sample(rows, scores.repeat_interleave(copies, 0))
        self.running += [
            Running(sequence, own, len(sequence.tokens) + 1) for sequence, own in zip(sequences, entering, strict=True)
        ]

    def _grow(self, waiting: deque[list[Sequence]]) -> int:
        """Pages for the next steps of all rows; how many steps. Rows that find none wait again."""
        steps, missing = self._next()
        while missing.sum() > len(self.pages.free):
            if not self._collect(*self._status()):  # none has ended, so one must leave
                self._leave(waiting)
            steps, missing = self._next()
        added = []
        for row in missing.nonzero()[0].tolist():
            own, new = self.running[row].pages, self.pages.take(int(missing[row]))
            added += [(row, place, page) for place, page in enumerate(new, len(own))]
            own += new
        self.decoder.rows.add_pages(added)
        return steps

    def _next(self) -> tuple[int, np.ndarray]:
        """Steps of the next round, and how many pages each row lacks for them."""
        each = [(len(r.sequence.request.prompt), r.sequence.limit, r.count, len(r.pages)) for r in self.running]
        prompts, limits, counts, have = np.array(each).reshape(-1, 4).T
        steps = int((limits - counts).clip(0, STEPS).max(initial=0))
        last = prompts + np.minimum(counts + steps, limits) - 2  # A step writes the token drawn before its own.
        return steps, (last // PAGE + 1 - have).clip(0)

    def _leave(self, waiting: deque[list[Sequence]]) -> None:
        """The youngest row gives up its pages and waits, with what it has generated behind its prompt."""
        last = len(self.running) - 1
        sequence = self.running[last].sequence
        self._give([sequence], self.decoder.rows.take([last]))
        if not sequence.finish:
            waiting.appendleft([sequence])
        self._keep(list(range(last)))

    def _status(self) -> tuple[list[Running], Status]:
        return list(self.running), self.decoder.rows.status(len(self.running))

    def _collect(self, rows: list[Running], status: Status) -> bool:
        """Take out the rows that have ended, and let the others move up; whether there was one.

        Args:
            rows: those whose ``status`` it is.
        """
        for running, done in zip(rows, status.done(), strict=True):
            running.done = done
        stops = {row: running for row, running in enumerate(self.running) if running.sequence.request.sampling.stop}
        if stops:  # only their text tells
            self._give([running.sequence for running in stops.values()], self.decoder.rows.take(list(stops)))
            for running in stops.values():
                running.done = bool(running.sequence.finish)
        ended = [row for row, running in enumerate(self.running) if running.done]
        later = [row for row in ended if row not in stops]
        if later:
            self.ended.append(([self.running[row].sequence for row in later], self.decoder.rows.take(later)))
        if ended:
            self._keep([row for row, running in enumerate(self.running) if not running.done])
        return bool(ended)

    def _give(self, sequences: list[Sequence], taken: Taken) -> None:
        """The sequences' tokens to them, those that they have not got yet; waits for the device."""
        for sequence, count, tokens, logprobs in zip(sequences, *(part.tolist() for part in taken), strict=True):
            new = slice(len(sequence.tokens), count)
            sequence.extend(tokens[new], logprobs[new], self.endings, self.version)

    def _keep(self, rows: list[int]) -> None:
        """These stay, in this order; the pages of the others are free."""
        for row in set(range(len(self.running))) - set(rows):
            self.pages.give(self.running[row].pages)
        self.running = [self.running[row] for row in rows]
        self.decoder.rows.keep(rows)


def grows(sequence: Sequence, pages: int) -> bool:
    """Whether a response may need more than these pages."""
    return pages_for(sequence.longest) > pages
