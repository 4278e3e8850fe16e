"""Weights from the Actor to the rollout engine: the sixth stage."""

from rolecall.sync.driver import WeightSync

__all__ = ["WeightSync"]
