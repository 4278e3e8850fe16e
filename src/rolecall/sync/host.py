"""From the Actor's process to the engines' through host memory, bucket by bucket.

Buckets are handed from process to process as references: on one node they are shared memory, between nodes they are
sent once, and the driver never holds them. While the engine takes one, the Actor packs the next; no more wait.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rolecall.sync.buckets import BUCKET_BYTES, Bucket, Entry, pack, plan

if TYPE_CHECKING:
    from rolecall.cluster import Handle

IN_FLIGHT = 2  # buckets: one is written while the other is packed


def sync(actor: Handle, rollouts: list[Handle], version: int, limit: int = BUCKET_BYTES) -> int:
    """See ``rolecall.sync.sync``; returns the bytes exported. ``limit``: bytes of a bucket, which all engines get."""
    buckets = actor.start(describe, limit).result()
    announced = [entry for entries in buckets for entry in entries]
    _finish([rollout.start("start_update", announced, version) for rollout in rollouts])
    written: list[list[Any]] = []
    for number, entries in enumerate(buckets):
        if number >= IN_FLIGHT:
            _finish(written[number - IN_FLIGHT])
        bucket = actor.start(export, entries)
        written.append([rollout.start("write", bucket) for rollout in rollouts])
    for writes in written[-IN_FLIGHT:]:
        _finish(writes)
    _finish([rollout.start("finish_update") for rollout in rollouts])
    return sum(entry.nbytes for entry in announced)


def _finish(calls: list[Any]) -> None:
    for call in calls:
        call.result()


def describe(actor: Any, limit: int) -> list[tuple[Entry, ...]]:
    """In the Actor's process: what goes into which bucket, with the digest of each tensor as it is now."""
    return plan(actor.loaded.model.named_parameters(), limit)


def export(actor: Any, entries: tuple[Entry, ...]) -> Bucket:
    """In the Actor's process: one bucket of its weights."""
    return pack(dict(actor.loaded.model.named_parameters()), entries)
