"""A weight sync between two processes, by transport and mode, beside plain copies of as many bytes."""

import importlib.util
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import _gpu, _models, write
from rolecall import models
from rolecall.cluster.handles import Handle, Process
from rolecall.cluster.worker import CLASSES, Worker
from rolecall.config import Config
from rolecall.errors import check_known
from rolecall.samples import Request, Sample, Sampling
from rolecall.sync import WeightSync
from rolecall.sync.collective import Group
from rolecall.sync.ends import Sender
from rolecall.training.logprobs import sample_logprobs
from rolecall.training.sharding import WHOLE

REPEATS, TIMEOUT = 7, 900.0
KEYS = {
    "rows": ("size", "engine", "transport", "mode"),
    "plain": ("size", "engine", "transport"),
    "mismatch": ("size", "engine"),
    "sleep": ("size", "engine", "level"),
}
MODES: dict[str, dict[str, Any]] = {
    "a tensor at a time": {"limit": 1, "slots": 1},
    "packed": {"slots": 1},
    "packed, two in flight": {},
    "packed, two in flight, no digest": {"verify": False},
}


class Source:
    """Stands for an Actor: a model whose weights change, without an optimizer (7B would not leave room for one)."""

    def __init__(self, config: Config):
        self.config, self.device, self.shards = config, models.device(), WHOLE
        self.loaded = models.load(config.model, self.device)
        self.sender: Sender | None = None

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return self.loaded.model.named_parameters()

    @torch.no_grad()
    def move(self) -> None:
        """Other weights, every one; the first ones again at the next call."""
        for parameter in self.loaded.model.parameters():
            parameter.neg_()

    def logprobs(self, samples: list[Sample]) -> list[list[float]]:
        return sample_logprobs(self.loaded, samples, 1.0, 4096)

    def copy_seconds(self, nbytes: int) -> float:
        """One copy of as many bytes in this process's memory."""
        data = [torch.zeros(nbytes // 8, dtype=torch.int64, device=self.device) for _ in range(2)]
        return _median(lambda: data[1].copy_(data[0]), self.device)


def broadcast_seconds(role: Any, address: str, port: int, rank: int, nbytes: int) -> float:
    """One plain broadcast of as many bytes, in one tensor, between this process and another."""
    device = models.device()
    store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=TIMEOUT))
    group = Group(store, rank, 2, device, TIMEOUT)
    data = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    return _median(lambda: group.wait(group.broadcast(data), "the broadcast"), device)


def run(out: Path, size: Sequence[str] = (), engine: Sequence[str] = ()) -> dict[str, Any]:
    """Add to ``sync-cpu`` (``sync-cuda`` on a GPU), JSON and table, under ``out``.

    On a GPU: both processes on one, and where there is a second one, each on its own; vLLM and SGLang where installed.
    On a CPU: by shared memory and by gloo, for the native engine and vLLM. (TRL's sync is timed in ``step``.)
    """
    device = models.device()
    engines = [name for name in ("vllm", "sglang") if importlib.util.find_spec(name)]
    if device.type == "cpu":
        engines = ["native", *engines]
    for by in engine:
        check_known("engine", by, engines)
    for one in size:
        check_known("size", one, (*_models.SIZES, "135M"))
    name = f"sync-{device.type}" if "tiny" not in size else "sync-dry-run"
    result: dict[str, Any] = {part: [] for part in KEYS} | _gpu.earlier(name, out)
    commit = _gpu.commit()
    if not ray.is_initialized():
        ray.init("local", include_dashboard=False, log_to_driver=False)
    with tempfile.TemporaryDirectory() as folder:
        for one in size or (["135M"] if device.type == "cpu" else ["0.5B", "7B"]):
            path = "smollm2-135m-instruct" if one == "135M" else str(_models.make(one, Path(folder) / one))
            for by in engine or engines:
                settings = {"engine": by, "max_tokens": 64, "sleep": int(by != "native")}
                config = Config(model={"path": path}, rollout=settings)
                for gpus in range(1, min(2, torch.cuda.device_count()) + 1) or [0]:
                    with _two_processes(config, gpus) as (actor, rollout):
                        _measure(result, {"size": one, "engine": by, "commit": commit}, actor, rollout)
                    write(name, result, _table(result), out, "rolecall bench sync")  # what there is so far
    return result


@contextmanager
def _two_processes(config: Config, gpus: int) -> Iterator[tuple[Handle, Handle]]:
    """The Source and a Rollout: on no GPU, sharing one, or each on its own."""
    handles, building = [], []
    for role, where in (("actor", "benchmarks.sync:Source"), ("rollout", CLASSES["rollout"])):
        remote: Any = ray.remote(num_cpus=0, num_gpus=gpus / 2)(Worker)
        launch = partial(remote.remote, role, 0, False, (str(Path.cwd()), [str(Path.cwd())]))
        process = Process(role, [role], launch, launch())
        vars(process).update(ray.get(process.worker.place.remote()))
        building.append(process.worker.build.remote(config, {role: where}))
        handles.append(Handle(role, process, TIMEOUT, ""))
    ray.get(building)
    try:
        yield handles[0], handles[1]
    finally:
        for handle in handles:
            ray.kill(handle.process.worker)


def _measure(result: dict[str, Any], case: dict[str, str], actor: Handle, rollout: Handle) -> None:
    """Merge each figure of one case (its size, engine and commit) into the row of ``result`` that it belongs to."""

    def add(part: str, row: dict[str, Any]) -> None:
        print(_gpu.merge(result[part], case | row, KEYS[part]), flush=True)

    on_cpu = models.device().type == "cpu"
    transports: list[tuple[str, str] | None] = [None, ("collective", "cpu")] if on_cpu else [None]
    for transport in transports:
        syncs = {mode: WeightSync(actor, [rollout], transport=transport, **MODES[mode]) for mode in MODES}
        for mode, sync in syncs.items():  # one after the other: each has buffers of its own, and the next takes them
            seconds = []
            for repeat in range(REPEATS + 1):
                actor.move()
                start = time.perf_counter()
                moved = sync(repeat)
                seconds.append(time.perf_counter() - start)
            row = {"transport": sync.way, "mode": mode, "first_s": seconds[0]}
            add("rows", row | {"seconds": statistics.median(seconds[1:]), "bytes": moved["sync/bytes"]})
    nbytes = int(moved["sync/bytes"])
    plain: dict[str, Any] = {"bytes": nbytes, "copy_s": actor.copy_seconds(nbytes)}
    if on_cpu or actor.process.gpus != rollout.process.gpus:  # NCCL takes no two ranks on one GPU
        store = dist.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
        where = actor.process.address, store.port
        sending = actor.start(broadcast_seconds, *where, 0, nbytes)
        rollout.start(broadcast_seconds, *where, 1, nbytes).result()
        plain["broadcast_s"] = sending.result()
    add("plain", plain | {"transport": sync.way})
    requests = [Request(i, str(i), [2, 3, 7 + i, 4], 8, 0, Sampling(64)) for i in range(8)]
    samples = rollout.generate(requests)
    gaps = [
        abs(a - b)
        for row, sample in zip(actor.logprobs(samples), samples, strict=True)
        for a, b in zip(row, sample.logprobs, strict=True)
    ]
    add("mismatch", {"mean": statistics.fmean(gaps), "max": max(gaps)})
    if sync.way == "CUDA IPC":
        for level in (1, 2):
            add("sleep", _sleep(level, actor, rollout, samples, requests))


def _sleep(level: int, actor: Handle, rollout: Handle, before: list[Sample], requests: list[Request]) -> dict[str, Any]:
    """Seconds to sleep, to wake and sync, and what the GPU has free meanwhile; the output after it is as before."""
    free = actor.start(_free).result()
    start = time.perf_counter()
    rollout.start(_sleep_at, level).result()
    asleep = time.perf_counter()
    freed = actor.start(_free).result() - free
    woken = time.perf_counter()
    WeightSync(actor, [rollout], sleeps=True)(100 + level)
    awake = time.perf_counter()
    after = rollout.generate(requests)
    same = [sample.response for sample in after] == [sample.response for sample in before]
    return {
        "level": level,
        "sleep_s": asleep - start,
        "wake_and_sync_s": awake - woken,
        "freed_gib": freed / 2**30,
        "same_output": same,
    }


def _sleep_at(rollout: Any, level: int) -> None:
    rollout.engine.sleep(level)


def _free(role: Any) -> int:
    return torch.cuda.mem_get_info()[0]


def _median(work: Callable[[], Any], device: torch.device) -> float:
    seconds = []
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def _table(result: dict[str, Any]) -> str:
    lines = [
        f"From one process to another, weights changed before each sync; median of {REPEATS} after a first one (which "
        "connects the ends). Seconds include the remote calls. A plain copy is one copy of as many bytes in one "
        "process's memory, a plain broadcast one of a single tensor by torch.distributed.",
        "",
        "| model | engine | by | mode | ms | GB/s | of a plain copy's rate | of a plain broadcast's | commit |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        same = [p for p in result["plain"] if (p["size"], p["engine"]) == (row["size"], row["engine"])]
        plain = next((p for p in same if p["transport"] == row["transport"]), same[0])
        share = f"{plain['broadcast_s'] / row['seconds']:.0%}" if "broadcast_s" in plain else ""
        lines.append(
            f"| {row['size']} | {row['engine']} | {row['transport']} | {row['mode']} | {row['seconds'] * 1e3:.1f} | "
            f"{row['bytes'] / row['seconds'] / 1e9:.2f} | {plain['copy_s'] / row['seconds']:.0%} | {share} | "
            f"{_gpu.commits(row)} |"
        )
    lines += ["", "| model | engine | mean difference of log-probabilities | largest |", "|---|---|---|---|"]
    lines += [f"| {m['size']} | {m['engine']} | {m['mean']:.2g} | {m['max']:.2g} |" for m in result["mismatch"]]
    if result["sleep"]:
        lines += ["", "| model | sleep level | s to sleep | GiB freed | s to wake and sync | same output after |"]
        lines += ["|---|---|---|---|---|---|"]
        lines += [
            f"| {s['size']} | {s['level']} | {s['sleep_s']:.2f} | {s['freed_gib']:.1f} | {s['wake_and_sync_s']:.2f} | "
            f"{'yes' if s['same_output'] else 'NO'} |"
            for s in result["sleep"]
        ]
    return "\n".join(lines)
