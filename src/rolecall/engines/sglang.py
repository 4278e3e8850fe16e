"""SGLang as the rollout engine: paged attention and a radix cache, on weights of its own."""

import asyncio
import concurrent.futures
import itertools
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Collection, Coroutine
from contextlib import aclosing
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from rolecall import models
from rolecall.config import Config
from rolecall.engines.cache import cache_tokens
from rolecall.engines.separate import SeparateEngine
from rolecall.engines.sequence import Sequence
from rolecall.errors import RunError, UserError
from rolecall.samples import Request, Sample

BLOCK = 64  # tokens by which the cache is sized
MARGIN = 8  # tokens that SGLang keeps free at the end of a context
MOST_CAPTURED = 512  # sequences in the largest CUDA graph
IDLE = 60.0  # seconds until SGLang must have put away what it has already answered


class SGLangEngine(SeparateEngine):
    """Generates through ``sglang.Engine``, whose scheduler has a process of its own.

    Tokens go in and tokens come out; they are drawn by the native engine's sampler, inside SGLang, so that seeds,
    log-probabilities and ``min_tokens`` mean the same. What ends a response is decided by the same code as in the
    other engines. Calls may come from several threads: all that talks to SGLang runs in one, which must outlive it,
    because a process of SGLang's ends with the thread that has started it.
    """

    package, name = "sglang", "SGLang"
    install = "pip install 'rolecall[sglang]', on a machine with a GPU and in an environment without vLLM"

    def __init__(self, config: Config):
        super().__init__(config)
        _check_usable(self.device, self.outline)
        self.timeout = config.cluster.timeout
        self._ids = itertools.count()
        self._running: dict[str, Sequence] = {}  # all whose call has not returned
        self._sent: set[str] = set()  # those that SGLang works on
        self._called_off: set[str] = set()
        self._asleep: set[str] = set()
        self._processes: list[Any] = []
        self._loop = asyncio.new_event_loop()
        self._unpaused = asyncio.Event()
        self._unpaused.set()
        if threading.current_thread() is threading.main_thread():
            # A process of SGLang's that fails ends its parent by this signal; here the wait for it says so instead.
            signal.signal(signal.SIGQUIT, signal.SIG_IGN)
        threading.Thread(target=self._loop.run_forever, name="sglang", daemon=True).start()
        starting = _start(config, self.outline, self.device, self.longest, self.endings.tokens)
        self.llm = self._wait(starting, "starting")
        pids = self.llm.get_all_child_pids()
        self._processes = [child for child in multiprocessing.active_children() if child.pid in pids]

    def generate(self, requests: list[Request]) -> list[Sample]:
        """See ``Engine.generate``.

        Raises:
            RunError: it sleeps, did not answer in time, or one of its processes has died.
        """
        sequences = self.endings.open(requests)
        if self._asleep:
            raise RunError("SGLang sleeps (rollout.sleep) until a weight sync wakes it: nothing can be generated.")
        self._wait(self._generate(sequences), f"generating {len(sequences)} responses")
        return [sequence.sample(self.tokenizer) for sequence in sequences]

    def pause(self) -> None:
        """Take the responses back from SGLang as far as they are, and send none until ``resume``."""
        self._wait(self._pause(), "pausing")

    def resume(self) -> None:
        """Go on where ``pause`` stopped, from the weights that there are now."""
        self._loop.call_soon_threadsafe(self._unpaused.set)

    def abort(self, group_ids: Collection[int]) -> None:
        """Call off the responses of these groups that are being generated: they finish as they are ("abort")."""
        self._wait(self._abort(group_ids), "calling off responses")

    def start_update(self) -> None:
        """See ``Engine.start_update``. Responses under way must be paused, or be generated to their end."""
        if self._sent:
            raise RunError(f"Weight sync: {len(self._sent)} responses are being generated; pause the engine.")
        self._check_weights("begin")

    def write(self, weights: list[tuple[str, Tensor]]) -> None:
        """See ``Engine.write``. SGLang maps the tensors into its process; they are free again when this returns."""
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
        from sglang.srt.utils import MultiprocessingSerializer

        # A tied parameter once, by the name that SGLang knows it by; and a copy, because a tensor that has come from
        # another process cannot be passed on to a third.
        named = {self._names[sent][0]: value.detach().to(self.device, copy=True) for sent, value in weights}
        payload = MultiprocessingSerializer.serialize(list(named.items()))
        request = UpdateWeightsFromTensorReqInput(serialized_named_tensors=[payload], flush_cache=False)
        taken, message = self._wait(self._manager.update_weights_from_tensor(request), "taking weights")
        if not taken:
            raise RunError(f"Weight sync: SGLang cannot place the weights: {message}")

    def finish_update(self, version: int) -> None:
        """See ``Engine.finish_update``. Paused responses go on from the new weights, their past computed anew."""
        self._check_weights("end")
        self._forget()
        self.version = version

    def sleep(self, level: Literal[1, 2]) -> None:
        """See ``Engine.sleep``. Whether the host keeps a copy was settled by ``rollout.sleep`` at the start."""
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        if not self._asleep:
            self._forget()  # also waits until SGLang is idle, which its release takes for granted
            parts = ["kv_cache", "weights"]
            request = ReleaseMemoryOccupationReqInput(tags=parts)
            self._wait(self._manager.release_memory_occupation(request), "going to sleep")
            self._asleep = set(parts)

    def wake(self, part: Literal["weights", "kv_cache"]) -> None:
        """See ``Engine.wake``."""
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        if part in self._asleep:
            request = ResumeMemoryOccupationReqInput(tags=[part])
            self._wait(self._manager.resume_memory_occupation(request), f"waking its {part}")
            self._asleep.remove(part)

    def close(self) -> None:
        """End SGLang's processes."""
        self._manager._subprocess_watchdog.stop()
        for process in self._processes:
            process.kill()
            process.join()
        self._loop.call_soon_threadsafe(self._loop.stop)

    @property
    def _manager(self) -> Any:
        """What talks to the scheduler. ``sglang.Engine`` wraps it in calls that cannot run side by side."""
        return self.llm.tokenizer_manager

    def _wait(self, coroutine: Coroutine[Any, Any, Any], doing: str) -> Any:
        """The coroutine's result, computed in SGLang's thread.

        Raises:
            RunError: a process of SGLang's has ended, or there was no result within ``cluster.timeout``.
        """
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        deadline = time.monotonic() + self.timeout
        while not concurrent.futures.wait([future], timeout=1.0).done:
            dead = next((process for process in self._processes if not process.is_alive()), None)
            if dead is None and time.monotonic() < deadline:
                continue
            future.cancel()
            if dead is not None:
                raise RunError(f"SGLang's process {dead.pid} ended (exit code {dead.exitcode}) while it was {doing}.")
            raise RunError(f"SGLang did not answer for {self.timeout:g} s, {doing}. Raise --cluster.timeout if it may.")
        return future.result()

    async def _generate(self, sequences: list[Sequence]) -> None:
        tasks = [asyncio.create_task(self._complete(sequence)) for sequence in sequences]
        try:
            await asyncio.gather(*tasks)
        finally:  # where one has failed, or this call was given up: the others too
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _complete(self, sequence: Sequence) -> None:
        """From now to its end; ``pause`` cuts it into parts, each of one version."""
        name = f"{next(self._ids)}/"  # SGLang calls off every request whose name begins with the one it is given
        self._running[name] = sequence
        try:
            while not sequence.finish:
                await self._unpaused.wait()
                if name not in self._called_off:
                    await self._continue(name, sequence)
                if name in self._called_off and not sequence.finish:
                    sequence.finish = "abort"
        finally:
            del self._running[name]
            self._called_off.discard(name)

    async def _continue(self, name: str, sequence: Sequence) -> None:
        """Until SGLang has nothing more to say: the response is complete, or was called off, or all are paused."""
        known, version = len(sequence.tokens), self.version
        self._sent.add(name)
        try:
            async with aclosing(self._manager.generate_request(self._request(name, sequence))) as answers:
                async for answer in answers:
                    said = answer["meta_info"].get("output_token_logprobs") or []  # all since this call, every time
                    for logprob, token, _ in said[len(sequence.tokens) - known :]:
                        if not sequence.finish:
                            sequence.append(token, logprob, self.endings, version)
                    reason = answer["meta_info"]["finish_reason"]
                    if sequence.finish and reason is None:  # by a stop string, which SGLang knows nothing of
                        self._manager.abort_request(name)
        finally:
            self._sent.remove(name)
        stopped = name in self._called_off or not self._unpaused.is_set()
        if len(sequence.tokens) == known and not stopped:
            raise sequence.cut_short("SGLang", reason)

    def _request(self, name: str, sequence: Sequence) -> Any:
        """SGLang's request for the rest of a response."""
        from sglang.srt.managers.io_struct import GenerateReqInput

        from rolecall.engines.sglang_worker import ROW

        request, sampling = sequence.request, sequence.request.sampling
        greedy = sampling.temperature == 0
        row = [request.sample_seed(sequence.index), len(request.prompt), sampling.min_tokens, int(greedy)]
        return GenerateReqInput(
            rid=name,
            input_ids=request.prompt + sequence.tokens,
            sampling_params={
                "max_new_tokens": sequence.limit - len(sequence.tokens),
                "temperature": 1.0 if greedy else sampling.temperature,
                "top_p": 1.0 if greedy else sampling.top_p,
                "top_k": -1 if greedy or not sampling.top_k else sampling.top_k,
                "stop_token_ids": self.endings.tokens,
                "custom_params": {ROW: row},
            },
            return_logprob=True,
            stream=bool(sampling.stop),  # token by token, which costs time, only to see where a stop string ends
        )

    async def _pause(self) -> None:
        self._unpaused.clear()
        for name in self._sent:
            self._manager.abort_request(name)
        while self._sent:
            await asyncio.sleep(0.001)

    async def _abort(self, group_ids: Collection[int]) -> None:
        for name, sequence in self._running.items():
            if sequence.request.group_id in group_ids:
                self._called_off.add(name)
                if name in self._sent:
                    self._manager.abort_request(name)

    def _check_weights(self, action: Literal["begin", "end"]) -> None:
        """See ``sglang_worker.check_weights``."""
        from sglang.srt.managers.io_struct import CheckWeightsReqInput

        checking = self._manager.check_weights(CheckWeightsReqInput(action=action))
        good, message, _, _ = self._wait(checking, "checking its weights")
        if not good:
            raise RunError(message)

    def _forget(self) -> None:
        """Drop all keys and values, those of the radix cache above all."""
        answer = self._wait(self._manager.flush_cache(timeout_s=IDLE), "emptying its cache")
        if not answer.success:
            raise RunError(f"SGLang still holds what it computed from older weights: {answer.message}")


def _check_usable(device: torch.device, outline: Any) -> None:
    if device.type != "cuda":
        raise UserError("rollout.engine = 'sglang' needs a GPU, and the Rollout has none. Use --rollout.engine native.")
    if outline.dtype == torch.float32:
        raise UserError(
            "rollout.engine = 'sglang': its kernels compute in bfloat16 or float16, the model's type is float32. Set "
            "--model.dtype bfloat16, or use --rollout.engine native or vllm."
        )


async def _start(config: Config, outline: Any, device: torch.device, context: int, ends: list[int]) -> Any:
    """A ``sglang.Engine`` on the model's own weights."""
    # Beyond the model's own context nothing is computed: endings end a response before.
    os.environ.setdefault("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", "1")
    from sglang.srt.entrypoints.engine import Engine

    from rolecall.engines.sglang_worker import BACKEND, run_scheduler

    class ConformingEngine(Engine):
        run_scheduler_process_func = staticmethod(partial(run_scheduler, ends))

    rollout = config.rollout
    longest = context + MARGIN
    tokens = cache_tokens(outline, longest, rollout.max_sequences, device, block=BLOCK, engine="SGLang")
    try:
        return ConformingEngine(
            model_path=models.resolve(config.model.path),
            skip_tokenizer_init=True,
            dtype=str(outline.dtype).removeprefix("torch."),
            context_length=longest,
            max_running_requests=rollout.max_sequences,
            max_total_tokens=tokens,
            mem_fraction_static=0.9,  # of what is free, for weights and cache; max_total_tokens is the closer bound
            disable_prefill_cuda_graph=True,  # a minute at the first start, for the smaller part of a rollout
            cuda_graph_max_bs_decode=min(rollout.max_sequences, MOST_CAPTURED),
            attention_backend="triton",
            sampling_backend=BACKEND,
            enable_memory_saver=rollout.sleep > 0,
            enable_weights_cpu_backup=rollout.sleep == 1,
            random_seed=config.run.seed,
            log_level="error",
        )
    except (ValueError, RuntimeError) as error:
        why = " ".join(str(error).split())
        raise UserError(f"rollout.engine: SGLang does not take the model {config.model.path!r}: {why:.300}") from error
