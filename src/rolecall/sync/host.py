"""From the Actor's process to the engine's through host memory, bucket by bucket.

Buckets are handed from process to process as references: on one node they are shared memory, between nodes they are
sent once, and the driver never holds them. While the engine takes one, the Actor packs the next; no more wait.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rolecall.sync.buckets import BUCKET_BYTES, Bucket, Entry, pack, plan

if TYPE_CHECKING:
    from rolecall.cluster import Handle

IN_FLIGHT = 2  # buckets: one is written while the other is packed


def sync(actor: Handle, rollout: Handle, version: int, limit: int = BUCKET_BYTES) -> int:
    """See ``rolecall.sync.sync``; returns the bytes moved. ``limit``: bytes of a bucket."""
    buckets = actor.start(describe, limit).result()
    rollout.start_update([entry for entries in buckets for entry in entries], version)
    written: list[Any] = []
    for number, entries in enumerate(buckets):
        if number >= IN_FLIGHT:
            written[number - IN_FLIGHT].result()
        written.append(rollout.start("write", actor.start(export, entries)))
    for write in written[-IN_FLIGHT:]:
        write.result()
    rollout.finish_update()
    return sum(entry.nbytes for entries in buckets for entry in entries)


def describe(actor: Any, limit: int) -> list[tuple[Entry, ...]]:
    """In the Actor's process: what goes into which bucket, with the digest of each tensor as it is now."""
    return plan(actor.weights(), limit)


def export(actor: Any, entries: tuple[Entry, ...]) -> Bucket:
    """In the Actor's process: one bucket of its weights."""
    names = {entry.name for entry in entries}
    return pack({name: tensor for name, tensor in actor.weights() if name in names}, entries)
