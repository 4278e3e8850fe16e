"""Does the demo learn? Its recipe with three seeds."""

from pathlib import Path
from typing import Any

from benchmarks.learning import train_all


def run(out: Path) -> dict[str, Any]:
    """Write ``demo.json``, ``demo.md`` and ``demo.svg`` under ``out``."""
    return train_all("demo", ["grpo-arithmetic"], out)
