"""vLLM as the rollout engine: paged attention and a prefix cache, on weights of its own.

vLLM runs in this process and is stepped from here, not as a server of its own: the Rollout has a process to itself
already, weights need no further hop, and between two steps is the moment at which generation can be paused, called
off, or go on from other weights.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import threading
from collections.abc import Collection, Iterable
from typing import Any, Literal

import torch
from torch import Tensor

from rolecall import models
from rolecall.config import Config
from rolecall.engines.sequence import Endings, Sequence
from rolecall.engines.weights import check_entries
from rolecall.errors import RunError, UserError
from rolecall.models.load import free_memory
from rolecall.samples import Request, Sample
from rolecall.sync.buckets import Entry

INSTALL = "pip install 'rolecall[vllm]'; on a machine without a GPU see docs/engines.md"
BLOCK = 128  # tokens in vLLM's largest default block of the cache


class VLLMEngine:
    """Generates through vLLM's ``LLMEngine``.

    Tokens go in and tokens come out. Log-probabilities are those of the distribution that was sampled from. What ends
    a response is decided by the same code as in the other engines. Calls may come from several threads.
    """

    kind = "vllm"

    def __init__(self, config: Config):
        if importlib.util.find_spec("vllm") is None:
            raise UserError(f"rollout.engine = 'vllm': vLLM is not installed. Install it: {INSTALL}.")
        self.device = models.device()
        self.outline: Any = models.outline(config.model, self.device)
        self.tokenizer = models.load_tokenizer(config.model)
        self.version = 0
        self.endings = Endings(self.outline, self.tokenizer)
        longest = config.data.max_prompt_tokens + config.rollout.max_tokens
        self.endings.context = min(longest, self.endings.context or longest)
        self.llm = _start(config, self.outline, self.device, self.endings.context)
        self._names = _names_of_one(self.outline)
        self._running: dict[str, Sequence] = {}
        self._ids = itertools.count()
        self._turn = threading.Condition(threading.RLock())  # held while vLLM is called
        self._paused = False

    def generate(self, requests: list[Request]) -> list[Sample]:
        """See ``Engine.generate``."""
        sequences = self.endings.open(requests)
        own: list[str] = []
        try:
            with self._turn:
                own += [self._add(sequence) for sequence in sequences]
            while not all(sequence.finish for sequence in sequences):
                with self._turn:
                    self._turn.wait_for(lambda: not self._paused)
                    self._step()
        finally:
            with self._turn:
                self._drop([name for name in own if name in self._running])
        return [sequence.sample(self.tokenizer) for sequence in sequences]

    def pause(self) -> None:
        """Finish the step that is being computed and begin no other until ``resume``: responses stay as they are."""
        with self._turn:
            self._paused = True

    def resume(self) -> None:
        """Go on where ``pause`` stopped, from the weights that there are now."""
        with self._turn:
            self._paused = False
            self._turn.notify_all()

    def abort(self, group_ids: Collection[int]) -> None:
        """Call off the responses of these groups that are being generated: they finish as they are ("abort")."""
        with self._turn:
            names = [name for name, sequence in self._running.items() if sequence.request.group_id in group_ids]
            for name in names:
                self._running[name].finish = "abort"
            self._drop(names)
            self._turn.notify_all()

    def start_update(self, entries: list[Entry]) -> None:
        """See ``Engine.start_update``. Responses under way must be paused, or be generated to their end."""
        check_entries(self.outline, entries)
        with self._turn:
            if self._running and not self._paused:
                raise RunError(f"Weight sync: {len(self._running)} responses are being generated; pause the engine.")
            self.llm.collective_rpc("begin_weights")

    def write(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """See ``Engine.write``."""
        named = [(name, value) for sent, value in weights for name in self._names[sent]]
        with self._turn:
            self.llm.collective_rpc("write_weights", args=(named,))

    def finish_update(self, version: int) -> None:
        """See ``Engine.finish_update``. Paused responses go on from the new weights, their past computed anew."""
        with self._turn:
            self.llm.collective_rpc("end_weights")
            self.llm.reset_prefix_cache(reset_running_requests=True)
            self.version = version

    def sleep(self, level: Literal[1, 2]) -> None:
        """See ``Engine.sleep``. On a CPU vLLM frees nothing."""
        with self._turn:
            if not self.llm.is_sleeping():
                self.llm.sleep(level)

    def wake(self, part: Literal["weights", "kv_cache"]) -> None:
        """See ``Engine.wake``."""
        with self._turn:
            if self.llm.is_sleeping():
                self.llm.wake_up([part])

    def close(self) -> None:
        """End vLLM in this process."""
        self.llm.engine_core.shutdown()

    def _add(self, sequence: Sequence) -> str:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = sequence.request.sampling
        params = SamplingParams(
            max_tokens=sequence.limit,
            min_tokens=min(sampling.min_tokens, sequence.limit),
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=sequence.request.sample_seed(sequence.index),
            stop_token_ids=self.endings.tokens,
            logprobs=0,  # of the sampled token alone
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        name = str(next(self._ids))
        self.llm.add_request(name, {"prompt_token_ids": sequence.request.prompt}, params)
        self._running[name] = sequence
        return name

    def _step(self) -> None:
        """One step of everything that runs, whoever asked for it."""
        ended_here = []  # by a stop string, which vLLM knows nothing of
        for output in self.llm.step():
            sequence = self._running.get(output.request_id)
            if sequence is None:
                continue
            (completion,) = output.outputs
            for token, logprobs in zip(completion.token_ids, completion.logprobs, strict=True):
                sequence.append(token, logprobs[token].logprob, self.endings, self.version)
            if output.finished and not sequence.finish:
                raise RunError(
                    f"vLLM ended a response to prompt {sequence.request.prompt_id!r} after {len(sequence.tokens)} of "
                    f"{sequence.limit} tokens ({completion.finish_reason})."
                )
            if output.finished:
                del self._running[output.request_id]
            elif sequence.finish:
                ended_here.append(output.request_id)
        self._drop(ended_here)

    def _drop(self, names: list[str]) -> None:
        if names:
            self.llm.abort_request(names)
            for name in names:
                del self._running[name]


def _start(config: Config, outline: Any, device: torch.device, longest: int) -> Any:
    """A vLLM engine on the model's own weights."""
    rollout, on_cpu = config.rollout, device.type == "cpu"
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # in this process
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if on_cpu:
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # how many threads is the pool's to say
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # it would compile for seconds, and needs a C++ compiler
    from vllm import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    dtype: Any = str(outline.dtype).removeprefix("torch.")
    try:
        arguments = EngineArgs(
            model=models.resolve(config.model.path),
            dtype=dtype,
            skip_tokenizer_init=True,
            generation_config="vllm",  # not the sampling defaults that the model ships
            logprobs_mode="processed_logprobs",  # of the distribution that is sampled from
            max_model_len=longest,
            max_num_seqs=rollout.max_sequences,
            kv_cache_memory_bytes=_cache_bytes(outline, longest, rollout.max_sequences, device),
            enable_prefix_caching=True,
            enable_sleep_mode=rollout.sleep > 0 and not on_cpu,
            enforce_eager=on_cpu,
            worker_extension_cls="rolecall.engines.vllm_worker.WeightReceiver",
            disable_log_stats=True,
            use_tqdm_on_load=False,
            seed=config.run.seed,
        )
        return LLMEngine.from_engine_args(arguments)
    except (ValueError, NotImplementedError) as error:
        raise UserError(f"vLLM does not take the model {config.model.path!r}: {error}") from error


def _cache_bytes(outline: Any, longest: int, sequences: int, device: torch.device) -> int:
    """Room for keys and values of ``sequences`` of the greatest length, within half of the memory that is free.

    With less, vLLM lets some sequences wait.
    """
    shape = outline.config.get_text_config()
    heads = getattr(shape, "num_key_value_heads", None) or shape.num_attention_heads
    size = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    token = 2 * shape.num_hidden_layers * heads * size * outline.dtype.itemsize
    blocks = -(-longest // BLOCK) * sequences + 1  # vLLM keeps one for itself
    return min(token * BLOCK * blocks, free_memory(device) // 2)


def _names_of_one(outline: Any) -> dict[str, list[str]]:
    """Each parameter's name -> all names of it. vLLM keeps tied ones apart while it loads."""
    names: dict[int, list[str]] = {}
    for name, parameter in outline.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {name: group for group in names.values() for name in group}
