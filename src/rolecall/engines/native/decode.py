"""The decode step: every row's next token, on the device from end to end, replayed as a CUDA graph."""

import importlib
from typing import Any

import torch
from torch import Tensor

from rolecall.engines.native.fused import Replacement, fuse, in_use
from rolecall.engines.native.invariant import PagedTokens
from rolecall.engines.native.pages import PagedDecode, Pages
from rolecall.engines.native.rows import Rows
from rolecall.engines.native.sampling import draw, token_mask
from rolecall.engines.native.stack import find
from rolecall.errors import UserError
from rolecall.models.attention import Layout, hidden_states
from rolecall.models.head import logits
from rolecall.models.invariant import token_logprobs

# Rows of a captured step, powers of two and from 16 on what is half-way to the next: few graphs, few empty rows.
BUCKETS = [4, 8, *(size for power in range(4, 13) for size in (2**power, 3 * 2 ** (power - 1)))]


class Decoder:
    """Runs decode steps of all rows without asking the device.

    On a GPU a step is captured once for each bucket of rows and each kind of sampling, and replayed from then on. What
    it reads changes in place: the weights, the rows, the pages (see ``Pages``).

    Args:
        ends: the end-of-sequence tokens.
        invariant: a token's numbers are the same bits in any batch, see ``rolecall.models.invariant``.
    """

    def __init__(self, model: Any, pages: Pages, ends: list[int], invariant: bool = False):
        self.model, self.pages, self.invariant, device = model, pages, invariant, model.device
        self.ends = token_mask(ends, model.get_output_embeddings().weight.shape[0], device)
        self.rows = Rows(BUCKETS[0], 1, 1, device)
        self.captures = device.type == "cuda"
        if self.captures:
            importlib.import_module("rolecall.engines.native.kernels")  # needs Triton; registers what layouts call
        self.faster: list[Replacement] = []
        if not invariant:  # (there layers are computed by the very code of training)
            groups = fuse(model)
            together = [replacement for group in groups for replacement in group.replacements]
            self.faster = find(model, groups) or together
        self.addresses = _addresses(model)
        self.graphs: dict[tuple[Any, ...], torch.cuda.CUDAGraph] = {}
        self.memory: Any = None  # that the graphs share

    def reserve(self, slots: int, pages: int, longest: int) -> None:
        """Rows of at least this many, pages each, and response tokens.

        Raises:
            UserError: the model's weights are not where they were.
        """
        if _addresses(self.model) != self.addresses:  # graphs and fused layers would go on reading the old ones
            raise UserError(
                "The model was moved, converted or given an adapter after its native engine was made. Make the engine "
                "after that."
            )
        rows = self.rows
        if rows.slots < slots or rows.pages < pages or rows.longest < longest:
            self.graphs.clear()
            self.memory = None
            slots = next(size for size in BUCKETS if size >= max(slots, rows.slots))
            # Not just as large: a prompt of one token more would cost all graphs again.
            pages, longest = (
                1 << (size - 1).bit_length() for size in (max(pages, rows.pages), max(longest, rows.longest))
            )
            self.rows = Rows(slots, pages, longest, self.ends.device)

    def run(self, running: int, steps: int) -> None:
        """``steps`` tokens of the first ``running`` rows."""
        if not self.captures:
            for _ in range(steps):
                self._step(running)
            return
        size = min(self.rows.slots, next(size for size in BUCKETS if size >= running))
        key = size, self.rows.any_min, self.rows.any_tempered, self.rows.any_cut, self.rows.any_greedy
        if key not in self.graphs:
            self._step(size)  # one of the steps: what compiles or allocates at its first use does it here
            steps -= 1
            graph = torch.cuda.CUDAGraph()
            # Other roles' threads may use the GPU in the meantime.
            with torch.cuda.graph(graph, pool=self.memory, capture_error_mode="thread_local"):
                self._step(size)
            self.graphs[key] = graph  # not before: where capturing fails there is none to replay
            self.memory = self.memory or graph.pool()
        for _ in range(steps):
            self.graphs[key].replay()

    def _step(self, n: int) -> None:
        rows = self.rows.first(n)
        positions = rows.prompts + rows.counts - 1
        layout: Layout = PagedDecode(self.pages, rows.table, positions)
        if self.invariant:
            layout = PagedTokens(self.pages, rows.table, torch.arange(n, device=positions.device), positions[:, None])
        with in_use(self.faster):
            hidden = hidden_states(self.model, rows.tokens[:, None], positions[:, None], layout)
        self.sample(rows, logits(self.model, hidden[:, 0], invariant=self.invariant))

    def sample(self, rows: Rows, scores: Tensor) -> None:
        """Draw the next token of these rows from their logits (n, V)."""
        tokens, logprobs = draw(scores, rows, self.ends)
        if self.invariant and not (rows.any_cut or rows.any_min):  # of the whole distribution, as the trainer does
            logprobs = token_logprobs(scores, tokens, rows.temperature)
        rows.record(tokens, logprobs, self.ends)


def _addresses(model: Any) -> list[int]:
    return [parameter.data_ptr() for parameter in model.parameters()]
