"""Does the demo's task learn by PPO, too? Its recipe with three seeds."""

from pathlib import Path
from typing import Any

from benchmarks.learning import train_all


def run(out: Path) -> dict[str, Any]:
    """Write ``ppo.json``, ``ppo.md`` and ``ppo.svg`` under ``out``."""
    return train_all("ppo", ["ppo-arithmetic"], out)
