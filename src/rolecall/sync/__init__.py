"""Weights from the Actor to the engine: the sixth stage."""

from rolecall.sync.buckets import check_coverage, checksum

__all__ = ["check_coverage", "checksum"]
