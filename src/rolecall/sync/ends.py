"""The two ends of a sync: in the Actor's process weights are packed into buckets, in the Rollout's they are unpacked.

Each end has a few buffers ("slots") as large as a bucket; bucket ``number`` goes through slot ``number % slots``, and
the driver gives a slot its next bucket only when the last one has been read out of it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rolecall.errors import RunError
from rolecall.sync import mapped
from rolecall.sync.buckets import Bucket, Weights, digest, fill, plan, size, views
from rolecall.sync.collective import MEETING, Group
from rolecall.training.sharding import whole


@dataclass(frozen=True)
class Link:
    """How the ends are joined; the same at both.

    Args:
        transport: "mapped" (a buffer that both see) or "collective" (broadcasts between buffers of their own).
        device: of the buffers, "cuda" or "cpu".
        limit: bytes of a bucket.
        slots: buckets on their way at once.
        verify: compare each bucket's digest.
        address: where the Actor's node is reached.
        ranks: the Actor and its engines.
        seconds: that one bucket may take.
    """

    transport: str
    device: str
    limit: int
    slots: int
    verify: bool
    address: str
    ranks: int
    seconds: float


@dataclass(frozen=True)
class Offer:
    """What the Actor's end tells the others once: the buckets to come, and how its slots (or its rank) are found."""

    buckets: list[Bucket]
    handles: list[Any]  # of the slots, mapped
    port: int  # of the ranks' meeting place, collective


class Sender:
    """The Actor's end.

    Args:
        weights: gives all that travels, in one order for ever.
    """

    def __init__(self, weights: Callable[[], Weights], link: Link):
        self.weights, self.link = weights, link
        self.buckets = plan(weights(), link.limit)
        device, sizes = torch.device(link.device), _slot_sizes(self.buckets, link.slots)
        self.group: Group | None = None
        self._handles: list[Any] = []
        self._sending: list[dist.Work | None] = [None] * link.slots
        self._left: Iterator[tuple[str, Tensor]] = iter(())
        if link.transport == "mapped":
            made = [mapped.create(nbytes, device) for nbytes in sizes]
            self.slots, self._handles = [slot for slot, _ in made], [handle for _, handle in made]
        else:
            self.slots = [torch.zeros(nbytes, dtype=torch.uint8, device=device) for nbytes in sizes]
            self._store = dist.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)

    @property
    def offer(self) -> Offer:
        return Offer(self.buckets, self._handles, 0 if self._handles else self._store.port)

    def join(self) -> None:
        """Meet the other ranks (they must come at the same time), or know that all have opened the slots."""
        if self.link.transport == "collective":
            link = self.link
            self.group = Group(self._store, 0, link.ranks, torch.device(link.device), link.seconds)
        for handle in self._handles:
            mapped.unlink(handle)

    def close(self) -> None:
        """Leave the other ranks, of which some may be dead."""
        if self.group is not None:
            self.group.abort()

    def pack(self, number: int) -> int | None:
        """Fill bucket ``number``'s slot with the weights as they are now (in order: 0 begins anew), and send it off.

        Returns:
            its digest, if one is wanted.
        """
        if number == 0:
            self._left = iter(self.weights())
        slot = number % self.link.slots
        if (work := self._sending[slot]) is not None and self.group is not None:
            self.group.wait(work, f"bucket {number - self.link.slots}")
        data = self.slots[slot][: size(self.buckets[number])]
        fill(data, self.buckets[number], self._left)
        made = digest(data) if self.link.verify else None
        if self.group is not None:
            self._sending[slot] = self.group.broadcast(data)
        elif data.is_cuda:
            torch.cuda.current_stream().synchronize()  # the reader is another process, with streams of its own
        return None if made is None else int(made)


class Helper:
    """The end of a sharded Actor's other ranks, which hold a part of all that its first one packs.

    Args:
        weights, limit: as the Sender has them.
    """

    offer = None

    def __init__(self, weights: Callable[[], Weights], limit: int):
        self.weights, self.buckets = weights, plan(weights(), limit)
        self._left: Iterator[tuple[str, Tensor]] = iter(())

    def join(self) -> None:
        """Meets nobody: engines hear of the first rank alone."""

    def close(self) -> None:
        """Leaves nobody."""

    def pack(self, number: int) -> None:
        """Take part in gathering bucket ``number``, and keep nothing of it."""
        if number == 0:
            self._left = iter(self.weights())
        for _, tensor in islice(self._left, len(self.buckets[number])):
            whole(tensor)


class Receiver:
    """An engine's end.

    Args:
        rank: among the engines, from 1.
    """

    def __init__(self, offer: Offer, link: Link, rank: int):
        self.buckets, self.link = offer.buckets, link
        sizes = _slot_sizes(self.buckets, link.slots)
        self.group: Group | None = None
        if link.transport == "mapped":
            self.slots = [mapped.attach(*pair) for pair in zip(offer.handles, sizes, strict=True)]
        else:
            device = torch.device(link.device)
            self.slots = [torch.zeros(nbytes, dtype=torch.uint8, device=device) for nbytes in sizes]
            store = dist.TCPStore(link.address, offer.port, is_master=False, timeout=timedelta(seconds=MEETING))
            self.group = Group(store, rank, link.ranks, device, link.seconds)

    def close(self) -> None:
        """Leave the other ranks: what the Actor has begun to send then ends at once, not at its time-out."""
        if self.group is not None:
            self.group.abort()

    def unpack(self, number: int) -> tuple[list[tuple[str, Tensor]], Tensor | None]:
        """The tensors of a bucket that was packed, on its slot's memory: to be read before the slot's next bucket.

        And their digest, if one is wanted; a GPU computes it while they are read.

        Raises:
            RunError: it did not arrive.
        """
        bucket = self.buckets[number]
        data = self.slots[number % self.link.slots][: size(bucket)]
        if self.group is not None:
            self.group.wait(self.group.broadcast(data), f"{self._named(number)} from the Actor at {self.link.address}")
        return views(data, bucket), digest(data) if self.link.verify else None

    def check(self, number: int, arrived: Tensor | None, sent: int | None) -> None:
        """Compare bucket ``number``'s digest as ``unpack`` gave it with that of what was ``sent``.

        Raises:
            RunError: they differ.
        """
        if arrived is not None and sent is not None and int(arrived) != sent:
            found, right = (f"{value % 2**64:x}" for value in (int(arrived), sent))
            raise RunError(f"Weight sync: {self._named(number)} arrived with digest {found}, the Actor sent {right}.")

    def _named(self, number: int) -> str:
        bucket = self.buckets[number]
        return f"bucket {number} ({bucket[0].name} to {bucket[-1].name})"


def _slot_sizes(buckets: list[Bucket], slots: int) -> list[int]:
    return [max(map(size, buckets[slot::slots])) for slot in range(min(slots, len(buckets)))]
