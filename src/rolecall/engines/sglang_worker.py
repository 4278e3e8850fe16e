"""The part of the SGLang engine that runs inside SGLang's scheduler process, where its model and its sampler are."""

from functools import partial
from typing import Any

import torch
from sglang.srt.layers.sampler import Sampler, register_sampler_backend
from sglang.srt.managers.scheduler import run_scheduler_process
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.utils.weight_checker import WeightChecker
from torch import Tensor

from rolecall.engines.native.sampling import Batch, draw, token_mask
from rolecall.errors import RunError

BACKEND = "pytorch"  # the name under which SGLang is given the sampler below instead of its own
ROW = "rolecall"  # in a request's custom_params: [seed, tokens of the prompt, min_tokens, greedy]
MARKS = {2: (torch.int16, 0x7FA5), 4: (torch.int32, 0x7FA5A5A5)}  # bytes of a type -> bits of a NaN that none computes


def run_scheduler(ends: list[int], *arguments: Any) -> None:
    """SGLang's ``run_scheduler_process`` with what makes it conform.

    SGLang's own sampler reports log-probabilities as they are before top-k and top-p, gives seeds a meaning only with
    slower kernels, and min_tokens only where it has the tokenizer. The native engine's does all of it.
    """
    register_sampler_backend(BACKEND, partial(NativeSampler, ends))
    SamplingBatchInfo.adjusted_from_schedule_batch = keep_rows
    WeightChecker.handle = check_weights
    run_scheduler_process(*arguments)


def keep_rows(info: Any, batch: Any, vocab_size: int) -> None:
    """Put each request's row into its batch.

    In fields that SGLang merges and filters together with the batch, and that only its own sampler reads.
    """
    rows = [request.sampling_params.custom_params[ROW] for request in batch.reqs]
    table = torch.tensor(rows, dtype=torch.long, pin_memory=True).view(len(rows), 4)
    info.sampling_seed = table.to(batch.device, non_blocking=True)
    info.need_min_p_sampling = any(min_tokens > 0 for _, _, min_tokens, _ in rows)
    info.is_any_greedy = any(greedy for *_, greedy in rows)


class Rows(Batch):
    """SGLang's batch as the native sampler reads it. ``positions``: (B,) where the last known token of each stands."""

    def __init__(self, info: Any, positions: Tensor):
        self.seeds, prompts, self.min_tokens, greedy = info.sampling_seed.unbind(1)
        self.counts = positions + 1 - prompts
        self.greedy = greedy.bool()
        self.temperature = info.temperatures.squeeze(1)
        self.top_p, self.top_k = info.top_ps, info.top_ks.long()
        self.any_min, self.any_greedy = info.need_min_p_sampling, info.is_any_greedy
        self.any_tempered = True
        self.any_cut = info.need_top_p_sampling or info.need_top_k_sampling


class NativeSampler(Sampler):
    """``draw`` in SGLang. ``ends``: the end-of-sequence tokens, which min_tokens forbids."""

    def __init__(self, ends: list[int]):
        super().__init__()
        self.ends = ends

    def forward(
        self,
        logits_output: Any,
        sampling_info: Any,
        return_logprob: bool,
        top_logprobs_nums: list[int],
        token_ids_logprobs: list[list[int]],
        positions: Tensor,
    ) -> Tensor:
        """The next tokens, (B,) int32; their log-probabilities go into ``logits_output``."""
        rows, logits = Rows(sampling_info, positions), logits_output.next_token_logits
        ends = token_mask(self.ends, logits.shape[-1], logits.device)
        tokens, logits_output.next_token_logprobs = draw(logits, rows, ends)
        return tokens.to(torch.int32)


def check_weights(checker: Any, action: str, allow_quant_error: bool = False) -> None:
    """Before an update ("begin") mark every element of every parameter, after it ("end") look for marks that are left.

    SGLang's ``load_weights`` fuses parameters and passes over names that it does not know without a word; so what was
    not written is found by what is in memory, not by names.

    Raises:
        RunError: parameters that were not written, or only in part.
    """
    parameters = dict(checker._get_model().named_parameters())
    if action == "begin":
        for parameter in parameters.values():
            bits, mark = MARKS[parameter.itemsize]
            parameter.data.view(bits).fill_(mark)
        return
    sums = torch.stack([parameter.data.sum(dtype=torch.float32) for parameter in parameters.values()])
    missing = []
    for (name, parameter), total in zip(parameters.items(), sums.tolist(), strict=True):
        bits, mark = MARKS[parameter.itemsize]
        if total != total and (parameter.data.view(bits) == mark).any():  # the weights may hold NaN of their own
            missing.append(name)
    if missing:
        raise RunError(
            f"Weight sync: {len(missing)} of SGLang's {len(parameters)} parameters were not written, or not all of "
            f"them ({', '.join(missing[:3])}, ...)."
        )
