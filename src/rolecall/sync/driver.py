"""One sync after the other, as the loop sees it: how the weights travel, and which end does what when."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from rolecall.errors import ProcessDied, RunError, UserError
from rolecall.sync.buckets import BUCKET_BYTES
from rolecall.sync.ends import Helper, Link, Offer, Sender

if TYPE_CHECKING:
    from rolecall.cluster.handles import Future, Handle, Process

BUCKET_SECONDS = 300.0  # that one may take; a call to a role may take longer
WAYS = {  # (transport, device of its buffers) -> what a run calls it
    ("shared", ""): "nothing moves, one process",
    ("gathered", ""): "gathered into a copy in each process",
    ("mapped", "cuda"): "CUDA IPC",
    ("mapped", "cpu"): "shared memory",
    ("collective", "cuda"): "NCCL",
    ("collective", "cpu"): "gloo",
}


class WeightSync:
    """Makes the engines generate from the Actor's present weights, and checks that they do.

    Args:
        actor, rollouts: where the processes are decides how the weights travel.
        sleeps: the engines have slept since they generated, and are woken.
        limit: bytes of a bucket.
        slots: buckets on their way at once: with 2 one is packed while the other is unpacked.
        verify: compare each bucket's digest on both sides.
        transport: other than what the placement asks for, and the device of its buffers.

    Attributes:
        way: how the weights travel, for people.
    """

    def __init__(
        self,
        actor: Handle,
        rollouts: list[Handle],
        *,
        sleeps: bool = False,
        limit: int = BUCKET_BYTES,
        slots: int = 2,
        verify: bool = True,
        transport: tuple[str, str] | None = None,
    ):
        self.actor, self.rollouts, self.sleeps = actor, rollouts, sleeps
        self.limit, self.slots, self.verify = limit, slots, verify
        self._transport = transport or choose(actor.process, [rollout.process for rollout in rollouts])
        self.way = WAYS[self._transport]
        self.version: int | None = None  # that the engines have since the last sync
        self._joined: list[str] = []  # the processes between which the last sync went through
        self._sizes: list[int] = []  # bytes of each bucket's tensors

    def __call__(self, version: int) -> dict[str, float]:
        """Sync.

        Args:
            version: that the engines' weights get.

        Returns:
            ``sync/version`` and ``sync/bytes`` (moved; 0 where the weights are shared).

        Raises:
            RunError: an engine does not have the Actor's weights, every parameter exactly. It keeps the old ones, or
                if some were overwritten already, it refuses to generate until a sync has gone through.
        """
        if self._transport[0] == "shared":
            self.rollouts[0].share_weights(version)
        elif self._transport[0] == "gathered":
            first, *others = [rollout.start("gather_weights", version) for rollout in self.rollouts]
            self._sizes = [first.with_others(others).result()]  # each moves the same
        else:
            try:
                self._move(version)
            except RunError as error:
                if not isinstance(error, ProcessDied):  # it may be what one end has to say of the other's death
                    self._each(alive)
                raise
        self.version = version
        return {"sync/bytes": sum(self._sizes), "sync/version": version}

    def _move(self, version: int) -> None:
        if self.sleeps:  # the Actor makes room for the engine's weights
            self.actor.start(release).result()
            self._each("wake", "weights")
        processes = [handle.process.actor_id for handle in (self.actor, *self.rollouts)]
        joined, self._joined = self._joined, []  # should this one break off, one end may wait for what never comes
        if joined != processes:
            self._join()
        calls = [rollout.start("start_update", version) for rollout in self.rollouts]
        writes: list[list[Future]] = []
        for number in range(len(self._sizes)):  # calls to one process run in their order, so only slots are waited for
            if number >= self.slots:
                _wait(calls + writes[number - self.slots])
            packed = self.actor.start(pack, number)
            writes.append([packed, *(rollout.start("write", number, packed) for rollout in self.rollouts)])
        calls += [write for some in writes[-self.slots :] for write in some]
        _wait([*calls, *(rollout.start("finish_update") for rollout in self.rollouts)])
        if self.sleeps:
            self._each("wake", "kv_cache")
        self._joined = processes

    def _join(self) -> None:
        """Tell the engines once what will come, and connect them with the Actor's end."""
        ranks, where = 1 + len(self.rollouts), self.actor.process.address
        seconds = min(self.actor.timeout, BUCKET_SECONDS)
        leaving = [rollout.start("leave") for rollout in self.rollouts]  # at once: each end may wait for the other
        link = Link(*self._transport, self.limit, self.slots, self.verify, where, ranks, seconds)
        offer = self.actor.start(open_sender, link).result()
        _wait(leaving)
        self._sizes = [sum(entry.nbytes for entry in bucket) for bucket in offer.buckets]
        joining = [rollout.start("join", offer, link, rank) for rank, rollout in enumerate(self.rollouts, 1)]
        if link.transport == "collective":
            joining.append(self.actor.start(join))
        failures = []
        for joined in joining:  # all of them: a mapped file must not go before the last has opened it, nor stay
            try:
                joined.result()
            except (UserError, RunError) as error:
                failures.append(error)
        if link.transport == "mapped":
            self.actor.start(join).result()
        if failures:
            raise next((error for error in failures if isinstance(error, ProcessDied)), failures[0])

    def _each(self, method: str | Callable[..., Any], *args: Any) -> None:
        _wait([rollout.start(method, *args) for rollout in self.rollouts])


def choose(actor: Process, rollouts: list[Process]) -> tuple[str, str]:
    """(transport, device of its buffers) for where the processes are."""
    if actor is rollouts[0]:
        return ("shared" if len(rollouts) == 1 else "gathered"), ""  # a sharded Actor has an engine in each process
    processes = [actor, *rollouts]
    one_node = len({process.node for process in processes}) == 1
    places = [{(process.node, gpu) for gpu in process.gpus} for process in processes]
    if all(places):
        if len(places[0]) == 1 and all(place == places[0] for place in places):
            return "mapped", "cuda"
        if not any(places[0] & place for place in places[1:]):  # NCCL takes no two ranks on one GPU
            return "collective", "cuda"
    return ("mapped" if one_node else "collective"), "cpu"


def _wait(futures: list[Future]) -> None:
    for future in futures:
        future.result()


# In the Actor's process


def open_sender(actor: Any, link: Link) -> Offer | None:
    """Make the Actor's end, in the place of one that had other engines; only its first rank has an offer."""
    if actor.sender is not None:
        actor.sender.close()
    first = actor.shards.rank == 0
    actor.sender = Sender(actor.weights, link) if first else Helper(actor.weights, link.limit)
    return actor.sender.offer


def join(actor: Any) -> None:
    actor.sender.join()


def pack(actor: Any, number: int) -> int | None:
    return actor.sender.pack(number)


def release(actor: Any) -> None:
    """Give back what the Actor's allocator holds and does not use."""
    if actor.device.type == "cuda":
        torch.cuda.empty_cache()


# In a Rollout's process


def alive(rollout: Any) -> None:
    """Answers."""
