"""Ray: the only part that knows it. Places pools, starts roles in them, calls them, and says who failed."""

from rolecall.cluster.handles import Future, Handle
from rolecall.cluster.replicas import Replicas
from rolecall.cluster.spawn import Roles, spawn

__all__ = ["Future", "Handle", "Replicas", "Roles", "spawn"]
