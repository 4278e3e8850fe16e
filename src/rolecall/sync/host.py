"""From the Actor's process to the engine's through host memory.

Buckets are handed from process to process as references: on one node they are shared memory, between nodes they are
sent once, and the driver never holds them. All of them wait there, complete and checked, before the engine writes any.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rolecall.sync.buckets import BUCKET_BYTES, Bucket, Entry, checksum, pack, plan

if TYPE_CHECKING:
    from rolecall.cluster import Handle


def sync(actor: Handle, rollout: Handle, version: int) -> int:
    """See ``rolecall.sync.sync``; returns the bytes moved."""
    sent, buckets = actor.start(describe).result()
    futures = [actor.start(export, entries) for entries in buckets]
    rollout.load_weights(version, sent, *futures)
    return sum(entry.nbytes for entries in buckets for entry in entries)


def describe(actor: Any, limit: int = BUCKET_BYTES) -> tuple[str, list[tuple[Entry, ...]]]:
    """In the Actor's process: the checksum of its weights, and what goes into which bucket."""
    model = actor.loaded.model
    return checksum(model.named_parameters()), plan(model.named_parameters(), limit)


def export(actor: Any, entries: tuple[Entry, ...]) -> Bucket:
    """In the Actor's process: one bucket of its weights."""
    return pack(dict(actor.loaded.model.named_parameters()), entries)
