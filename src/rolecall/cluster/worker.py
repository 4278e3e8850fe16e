"""The process of a pool: one generic Ray actor that builds any roles and calls their methods. Imports no torch."""

import contextlib
import importlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import psutil
import ray

from rolecall.config import Config

# How each role is found; a pool imports only what it hosts, so that a Reward's process never loads torch.
CLASSES = {
    "actor": "rolecall.roles.actor:Actor",
    "critic": "rolecall.roles.critic:Critic",
    "reference": "rolecall.roles.reference:Reference",
    "rollout": "rolecall.roles.rollout:Rollout",
    "reward": "rolecall.roles.reward:Reward",
}
GPU_THREADS = 8  # of torch on the CPU, beside a GPU


class Meeting(NamedTuple):
    """Of the processes over which the roles of a pool are sharded.

    ``address``, ``port``: of the first one's store. ``seconds``: that an exchange between them may take.
    """

    address: str
    port: int
    ranks: int
    seconds: float


class Worker:
    """Hosts the roles of one pool. Calls to it run one after the other.

    Args:
        pool: its name.
        threads: for torch; 0: all cores of the node, or with a GPU at most ``GPU_THREADS``.
        alone: no other pool computes with torch.
        driver: working folder and import path of the process that started the run, used where they exist on this
            node, so that a reward function is found by the same name here as there.
        replaced: (node, process id) of the process that this one takes over from, whose memory it will need.
    """

    def __init__(
        self, pool: str, threads: int, alone: bool, driver: tuple[str, list[str]], replaced: tuple[str, int] = ("", 0)
    ):
        self.pool = pool
        self.roles: dict[str, Any] = {}
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        if ray.get_gpu_ids():  # what is left for the CPU is small, and many threads wait for each other
            cores = min(cores, GPU_THREADS)
        os.environ |= {  # before anything imports torch; Ray has set OMP_NUM_THREADS to the CPUs it reserved
            "OMP_NUM_THREADS": str(threads or cores),
            "TOKENIZERS_PARALLELISM": "false",
        }
        if not alone:  # by default waiting threads spin for a moment: 30 % faster for one pool, slower for several
            os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
        if not ray.get_gpu_ids():  # a pool without a GPU computes on the CPU, also where Ray leaves the GPUs visible
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        folder, path = driver
        if os.path.isdir(folder):
            os.chdir(folder)
        sys.path += [entry for entry in path if entry not in sys.path and os.path.exists(entry)]
        _end_children_with_this_process()
        node, pid = replaced
        while node == self.place()["node"] and _runs(pid):
            time.sleep(0.05)

    def __repr__(self) -> str:
        return f"pool {self.pool}"  # in front of each line that a role prints

    def place(self) -> dict[str, Any]:
        """Where this process runs, see ``Process``."""
        context = ray.get_runtime_context()
        return {
            "node": f"node {socket.gethostname()} ({context.get_node_id()[:8]})",
            "address": ray.util.get_node_ip_address(),
            "gpus": tuple(ray.get_gpu_ids()),
            "actor_id": context.get_actor_id() or "",
            "pid": os.getpid(),
        }

    def open_store(self) -> int:
        """Be the first of several processes: the port at which they meet."""
        from rolecall.training import sharding

        self._store = sharding.open_store()
        return self._store.port

    def build(self, config: Config, classes: dict[str, str], rank: int = 0, meeting: Meeting | None = None) -> None:
        """Make the roles in the order given; those that can work on the Actor's own model get it if it lives here.

        Args:
            rank: of this process among those that meet, if it is not alone.
        """
        if meeting is not None:
            from rolecall.training import sharding

            sharding.meet(rank, *meeting)
        for role, where in classes.items():
            module, name = where.split(":")
            make = getattr(importlib.import_module(module), name)
            shares = role in ("rollout", "reference")
            self.roles[role] = make(config, self.roles.get("actor")) if shares else make(config)

    def call(self, role: str, method: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """``role.method(*args)``, or ``method(role, *args)`` for a function."""
        if callable(method):
            return method(self.roles[role], *args, **kwargs)
        return getattr(self.roles[role], method)(*args, **kwargs)


def _end_children_with_this_process() -> None:
    """Have what a role starts (an engine's workers, which hold GPUs) killed when this process ends, however it does.

    They are one process group, watched by a shell. It is nobody's child here: Ray may end a worker's children first.
    """
    me = os.getpid()
    if os.getpgrp() != me:
        os.setpgid(0, 0)
    watch = f"(while kill -0 {me}; do sleep 1; done; kill -{signal.SIGKILL:d} -{me}) &"
    subprocess.run(["sh", "-c", watch], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _runs(group: int) -> bool:
    """Whether anything of a process group is left, other than zombies, which hold nothing."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):  # it has just ended
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                return True
    return False
