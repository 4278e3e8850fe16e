"""vLLM as the rollout engine: paged attention and a prefix cache, on weights of its own.

vLLM runs in this process and is stepped from here, not as a server of its own: the Rollout has a process to itself
already, weights need no further hop, and between two steps is the moment at which generation can be paused, called
off, or go on from other weights.
"""

import itertools
import os
import threading
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from rolecall import models
from rolecall.config import Config
from rolecall.engines.cache import cache_tokens, head_size, token_bytes
from rolecall.engines.separate import SeparateEngine
from rolecall.engines.sequence import Sequence
from rolecall.errors import RunError, UserError
from rolecall.samples import Request, Sample
from rolecall.sync.buckets import Entry

PREFILL_TOKENS = 4096  # prompt tokens in one forward pass on a CPU (a longer prompt goes alone)
BLOCK = 128  # tokens in vLLM's largest default block of the cache


class VLLMEngine(SeparateEngine):
    """Generates through vLLM's ``LLMEngine``.

    Tokens go in and tokens come out. Log-probabilities are those of the distribution that was sampled from. What ends
    a response is decided by the same code as in the other engines. Calls may come from several threads.
    """

    package, name = "vllm", "vLLM"
    install = "pip install 'rolecall[vllm]'; on a machine without a GPU see docs/engines.md"
    lora: Any = None  # vLLM's LoRARequest that every response is generated with

    def __init__(self, config: Config):
        super().__init__(config)
        self.llm = _start(config, self.outline, self.device, self.longest)
        self._parallel = config.rollout.tensor_parallel
        self._running: dict[str, Sequence] = {}
        self._ids = itertools.count()
        self._lock, self._next = threading.Lock(), threading.Lock()  # held while vLLM is called; while waiting for it
        self._unpaused = threading.Event()
        self._unpaused.set()

    def generate(self, requests: list[Request]) -> list[Sample]:
        """See ``Engine.generate``.

        Raises:
            RunError: it sleeps.
        """
        sequences = self.endings.open(requests)
        own: list[str] = []
        try:
            with self._turn():
                if self.llm.is_sleeping():
                    raise RunError(
                        "vLLM sleeps (rollout.sleep) until a weight sync wakes it: nothing can be generated."
                    )
                own += [self._add(sequence) for sequence in sequences]
            while not all(sequence.finish for sequence in sequences):
                self._unpaused.wait()
                with self._turn():
                    if self._unpaused.is_set():
                        self._step()
        finally:
            with self._turn():
                self._drop([name for name in own if name in self._running])
        return [sequence.sample(self.tokenizer) for sequence in sequences]

    def pause(self) -> None:
        """Finish the step that is being computed and begin no other until ``resume``: responses stay as they are."""
        self._unpaused.clear()
        with self._turn():
            pass

    def resume(self) -> None:
        """Go on where ``pause`` stopped, from the weights that there are now."""
        self._unpaused.set()

    def abort(self, group_ids: Collection[int]) -> None:
        """Call off the responses of these groups that are being generated: they finish as they are ("abort")."""
        with self._turn():
            names = [name for name, sequence in self._running.items() if sequence.request.group_id in group_ids]
            for name in names:
                self._running[name].finish = "abort"
            self._drop(names)

    def expect(self, entries: list[Entry]) -> None:
        """See ``Engine.expect``."""
        super().expect(entries)
        with self._turn():
            self.llm.collective_rpc("expect_weights")

    def start_update(self) -> None:
        """See ``Engine.start_update``. Responses under way must be paused, or be generated to their end."""
        with self._turn():
            if self._running and self._unpaused.is_set():
                raise RunError(f"Weight sync: {len(self._running)} responses are being generated; pause the engine.")
            self.llm.collective_rpc("begin_weights")

    def write(self, weights: list[tuple[str, Tensor]]) -> None:
        """See ``Engine.write``."""
        # Under all names of a tied one: vLLM keeps them apart while it loads.
        named: list[tuple[str, Any]] = [(name, value) for sent, value in weights for name in self._names[sent]]
        if self._parallel > 1:
            named = [(name, _portable(value)) for name, value in named]
        with self._turn():
            self.llm.collective_rpc("write_weights", args=(named,))

    def finish_update(self, version: int) -> None:
        """See ``Engine.finish_update``. Paused responses go on from the new weights, their past computed anew."""
        with self._turn():
            self.llm.collective_rpc("end_weights")
            self.llm.reset_prefix_cache(reset_running_requests=True)
            self.version = version

    def sleep(self, level: Literal[1, 2]) -> None:
        """See ``Engine.sleep``. On a CPU vLLM frees nothing."""
        with self._turn():
            if not self.llm.is_sleeping():
                self.llm.sleep(level)

    def wake(self, part: Literal["weights", "kv_cache"]) -> None:
        """See ``Engine.wake``."""
        with self._turn():
            if self.llm.is_sleeping():
                self.llm.wake_up([part])

    def close(self) -> None:
        """End vLLM in this process."""
        self.llm.engine_core.shutdown()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Alone with vLLM. Who steps it in a loop gets back in line, so that the others' turn comes after one step."""
        with self._next:
            self._lock.acquire()
        try:
            yield
        finally:
            self._lock.release()

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
        self.llm.add_request(name, {"prompt_token_ids": sequence.request.prompt}, params, lora_request=self.lora)
        self._running[name] = sequence
        return name

    def _step(self) -> None:
        """One step of everything that runs, whoever asked for it."""
        ended_here = []  # by a stop string, which vLLM knows nothing of
        for output in self.llm.step():
            sequence = self._running.get(output.request_id)
            if sequence is None:  # dropped since
                continue
            (completion,) = output.outputs
            for token, logprobs in zip(completion.token_ids, completion.logprobs, strict=True):
                sequence.append(token, logprobs[token].logprob, self.endings, self.version)
            if output.finished and not sequence.finish:
                raise sequence.cut_short("vLLM", completion.finish_reason)
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
    parallel = rollout.tensor_parallel
    if parallel > 1:
        _check_parallel(parallel, device)
    if on_cpu:
        binding = "nobind" if parallel == 1 else _shares(os.sched_getaffinity(0), parallel)
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", binding)  # how many threads is the pool's to say
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # it would compile for seconds, and needs a C++ compiler
    from vllm import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    if on_cpu:
        _check_head_size(config.model.path, head_size(outline))
    dtype: Any = str(outline.dtype).removeprefix("torch.")
    cache = cache_tokens(outline, longest, rollout.max_sequences, device, block=BLOCK, engine="vLLM")
    try:
        arguments = EngineArgs(
            model=models.resolve(config.model.path),
            dtype=dtype,
            skip_tokenizer_init=True,
            generation_config="vllm",  # not the sampling defaults that the model ships
            logprobs_mode="processed_logprobs",  # of the distribution that is sampled from
            max_model_len=longest,
            max_num_seqs=rollout.max_sequences,
            tensor_parallel_size=parallel,
            distributed_executor_backend="mp" if parallel > 1 else None,
            gpu_memory_utilization=0.9 if on_cpu else 0.01,  # sizes nothing here, and vLLM wants so much free at first
            kv_cache_memory_bytes=cache * token_bytes(outline) // parallel,
            enable_prefix_caching=True,
            # A prompt in parts takes back the draws of all parts but the last, which torch cannot on a CPU.
            enable_chunked_prefill=not on_cpu,
            max_num_batched_tokens=max(longest, PREFILL_TOKENS) if on_cpu else None,
            enable_sleep_mode=rollout.sleep > 0 and not on_cpu,
            enforce_eager=on_cpu,
            enable_lora=rollout.lora == "adapter",
            max_lora_rank=max(8, 1 << (config.model.lora_rank - 1).bit_length()),  # vLLM takes powers of two
            worker_extension_cls="rolecall.engines.vllm_worker.WeightReceiver",
            disable_log_stats=True,
            use_tqdm_on_load=False,
            seed=config.run.seed,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # about vLLM's own code
            return LLMEngine.from_engine_args(arguments)
    except (ValueError, NotImplementedError) as error:
        why = " ".join(str(error).split())
        raise UserError(f"rollout.engine: vLLM does not take the model {config.model.path!r}: {why:.300}") from error


def _check_parallel(parallel: int, device: torch.device) -> None:
    on_cpu = device.type == "cpu"
    places = len(os.sched_getaffinity(0)) if on_cpu else torch.cuda.device_count()
    if parallel > places:
        raise UserError(
            f"rollout.tensor_parallel = {parallel}, but the Rollout's process has {places} "
            f"{'cores' if on_cpu else 'GPUs'}. Lower it, or give its pool as many (cluster.pools.NAME.gpus)."
        )


def _shares(cores: set[int], parallel: int) -> str:
    """The cores of each of vLLM's processes, as it reads them."""
    ordered = sorted(cores)
    return "|".join(",".join(map(str, ordered[rank::parallel])) for rank in range(parallel))


def _portable(value: Tensor) -> Any:
    """What brings a tensor to another process: a handle to the GPU's memory, or a copy of its own."""
    return reduce_tensor(value) if value.is_cuda else value.clone()


def _check_head_size(path: str, size: int) -> None:
    """vLLM starts on a CPU with any size, and fails at its first step."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    if size not in (sizes := CPUAttentionBackend.get_supported_head_sizes()):
        raise UserError(
            f"rollout.engine: vLLM on a CPU does not take the model {path!r}: its attention heads have size {size}, "
            f"not one of {sizes}. Use --rollout.engine native."
        )
