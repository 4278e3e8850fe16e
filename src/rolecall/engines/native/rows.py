"""The responses that are being generated, as tensors on the device: one row each, in the order of the decode batch."""

import copy

import numpy as np
import torch
from torch import Tensor

from rolecall.engines.native.pages import TRASH
from rolecall.engines.native.sampling import Batch
from rolecall.engines.sequence import Sequence
from rolecall.models.flex import put

Taken = tuple[Tensor, Tensor, Tensor]  # of some rows: counts (k,), tokens and log-probabilities (k, longest + 1)
PARAMETERS = ("tokens", "prompts", "counts", "seeds", "min_tokens", "top_k", "greedy", "temperature", "top_p")
# What an empty row computes with: the model runs it beside the others, so its token is one that exists.
EMPTY = {"tokens": 0, "prompts": 1, "counts": 0, "min_tokens": 0, "temperature": 1.0, "done": True, "table": TRASH}


class Rows(Batch):
    """A batch with room for ``slots`` rows, whose tensors keep their addresses, as CUDA graphs need.

    What is done stays where it is until ``keep``. Rows behind the running ones write to the trash page.

    ``fields``: all these tensors by name. Each is an attribute of that name, too, and only ever written in place; what
    ``first`` and ``put`` return has the same attributes as views of some rows.
    Beside what a ``Batch`` has: ``limits``, ``done``: (slots,) most tokens of each response, and whether it has ended;
    ``table``: (slots, pages a row) int32; ``responses``, ``logprobs``: (slots, longest response + 1).

    Args:
        pages: most of a row.
        longest: most response tokens.
    """

    limits: Tensor
    done: Tensor
    table: Tensor
    responses: Tensor
    logprobs: Tensor

    def __init__(self, slots: int, pages: int, longest: int, device: torch.device):
        self.slots, self.pages, self.longest = slots, pages, longest
        super().__init__([], device)
        self.fields = {name: getattr(self, name).new_zeros(slots) for name in PARAMETERS}
        self.fields["limits"] = torch.zeros_like(self.fields["counts"])
        self.fields["done"] = torch.ones_like(self.fields["greedy"])
        self.fields["table"] = torch.full((slots, pages), TRASH, dtype=torch.int32, device=device)
        self.fields["responses"] = torch.zeros(slots, longest + 1, dtype=torch.int32, device=device)
        self.fields["logprobs"] = torch.zeros(slots, longest + 1, device=device)
        vars(self).update(self.fields)
        self.keep([])

    def first(self, n: int) -> "Rows":
        """The same memory, of the first ``n`` rows alone."""
        return self._part(slice(n))

    def _part(self, rows: slice) -> "Rows":
        part = copy.copy(self)
        vars(part).update({name: tensor[rows] for name, tensor in self.fields.items()})
        return part

    def put(self, at: int, sequences: list[Sequence], pages: list[list[int]]) -> "Rows":
        """Fill the rows from ``at`` on; those rows."""
        batch = Batch(sequences, self.tokens.device)
        here = slice(at, at + len(sequences))
        for name in PARAMETERS:
            self.fields[name][here] = getattr(batch, name)
        self.limits[here] = torch.tensor([sequence.limit for sequence in sequences], device=self.limits.device)
        self.done[here] = False
        padded = [row + [TRASH] * (self.pages - len(row)) for row in pages]
        self.table[here] = torch.tensor(padded, dtype=torch.int32, device=self.table.device)
        return self._part(here)

    def add_pages(self, added: list[tuple[int, int, int]]) -> None:
        """Some rows have more pages: each time a row, how many it had, and the page."""
        if added:
            row, place, page = put(np.array(added), self.table.device).T
            self.table[row, place] = page.int()

    def record(self, tokens: Tensor, logprobs: Tensor, ends: Tensor) -> None:
        """One more token of each row that is not done. ``ends``: (V,) bool, the end-of-sequence tokens.

        (Of a row that is done it writes behind the response, which nothing reads.)
        """
        self.responses.scatter_(1, self.counts[:, None], tokens[:, None].int())
        self.logprobs.scatter_(1, self.counts[:, None], logprobs[:, None])
        self.tokens.copy_(tokens)
        self.counts += ~self.done
        self.done |= ends[tokens] & (self.counts >= self.min_tokens)
        self.done |= self.counts >= self.limits

    def keep(self, rows: list[int]) -> None:
        """These become the first ones, in this order; all others are empty."""
        index = put(np.array(rows, dtype=np.int64), self.tokens.device)
        left = len(rows)
        for tensor in self.fields.values():
            tensor[:left] = tensor[index]
        for name, empty in EMPTY.items():
            self.fields[name][left:] = empty

    def status(self, n: int) -> "Status":
        """Which of the first ``n`` are done, as of now."""
        return Status(self.done[:n])

    def take(self, rows: list[int]) -> Taken:
        """A copy of some rows' counts, tokens and log-probabilities, made in turn on the device."""
        index = put(np.array(rows), self.tokens.device)
        return self.counts[index], self.responses[index], self.logprobs[index]


class Status:
    """Booleans on their way from the device, which goes on meanwhile."""

    def __init__(self, done: Tensor):
        self._event = torch.cuda.Event() if done.is_cuda else None
        self._host = torch.empty(done.shape, dtype=torch.bool, pin_memory=done.is_cuda)
        self._host.copy_(done, non_blocking=True)
        if self._event:
            self._event.record()

    def done(self) -> list[bool]:
        """Waits until they are there."""
        if self._event:
            self._event.synchronize()
        return self._host.tolist()
