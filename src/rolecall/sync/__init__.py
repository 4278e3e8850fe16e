"""Weights from the Actor to the rollout engine: the sixth stage."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rolecall.sync import host, shared
from rolecall.sync.buckets import checksum

if TYPE_CHECKING:
    from rolecall.cluster import Roles

__all__ = ["checksum", "sync"]


def sync(roles: Roles, version: int) -> dict[str, float]:
    """Make the engine generate from the Actor's present weights, and check that it does.

    Args:
        roles: Actor and Rollout; whether they share a process decides how the weights travel. All replicas get them.
        version: that the engine's weights get.

    Returns:
        ``sync/version`` and ``sync/bytes`` (moved; 0 where the weights are shared).

    Raises:
        RunError: the engine does not have the Actor's weights, every parameter exactly. It keeps the old ones, or if
            some were overwritten already, it refuses to generate until a sync has gone through.
    """
    rollouts = roles.rollout.handles
    if roles.actor.process is rollouts[0].process:
        moved = shared.sync(roles.actor, rollouts[0], version)
    else:
        # An engine that has slept on the Actor's GPU takes memory back in this order, so that weights find room first.
        roles.rollout.wake("weights")
        moved = host.sync(roles.actor, rollouts, version)
        roles.rollout.wake("kv_cache")
    return {"sync/bytes": moved, "sync/version": version}
