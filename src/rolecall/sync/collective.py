"""Broadcasts from the Actor to every engine over a process group of their own: NCCL between GPUs, gloo between hosts.

The group is beside torch's default one, which an engine may need for itself.
"""

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rolecall.errors import RunError

SENDER = 0  # its rank
MEETING = 30.0  # seconds, at most, for all ranks to come: they are sent at the same time
GRACE = 60.0  # seconds after which NCCL's own watchdog, which ends the process, may follow our time-out


class Group:
    """One rank of a group of ``ranks`` processes that all meet at ``store``.

    Args:
        seconds: that a broadcast may take.

    Raises:
        RunError: they do not meet.
    """

    def __init__(self, store: dist.Store, rank: int, ranks: int, device: torch.device, seconds: float):
        self.seconds = seconds
        meeting = timedelta(seconds=min(MEETING, seconds))
        store.set_timeout(meeting)
        try:
            if device.type == "cuda":
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = timedelta(seconds=seconds + GRACE)
                self._group: Any = dist.ProcessGroupNCCL(store, rank, ranks, options)
            else:
                self._group = dist.ProcessGroupGloo(store, rank, ranks, meeting)
            self.wait(self.broadcast(torch.zeros(1, device=device)), "the first word")  # NCCL connects only now
        except RuntimeError as error:
            raise RunError(f"Weight sync: the Actor and its engines did not meet ({error}).") from None

    def broadcast(self, data: Tensor) -> dist.Work:
        """Begin to send ``data`` (rank 0), or to receive into it."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = SENDER, 0
        options.timeout = timedelta(seconds=self.seconds)
        return self._group.broadcast([data], options)

    def wait(self, work: dist.Work, what: str) -> None:
        """Wait until it is there.

        Raises:
            RunError: it is not, within ``seconds``, or another rank is gone.
        """
        deadline = time.monotonic() + self.seconds
        while not work.is_completed():
            if time.monotonic() > deadline:
                raise RunError(f"Weight sync: {what} did not get through within {self.seconds:g} s.")
            time.sleep(1e-4)
        try:
            work.wait()
        except RuntimeError as error:
            raise RunError(f"Weight sync: {what} broke off: {error}") from None

    def abort(self) -> None:
        """Give up what is under way."""
        self._group.abort()
