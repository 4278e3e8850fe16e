"""Checkpoints that are whole or not there: RUN/checkpoints/step-000010/."""

import random
import re
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rolecall.files import atomic_folder, remove


def writing(run_dir: str | Path, step: int) -> AbstractContextManager[Path]:
    """The atomic folder of a step's checkpoint: ``with writing(run, 10) as folder: actor.save(folder / "actor")``."""
    return atomic_folder(Path(run_dir) / "checkpoints" / f"step-{step:06d}")


def checkpoints(run_dir: str | Path) -> dict[int, Path]:
    """The whole checkpoints of a run by step, oldest first."""
    found = Path(run_dir).glob("checkpoints/step-*")
    steps = {int(name[1]): path for path in found if (name := re.fullmatch(r"step-(\d{6,})", path.name))}
    return dict(sorted(steps.items()))


def latest(run_dir: str | Path) -> Path | None:
    """The newest whole checkpoint, or None."""
    return next(reversed(checkpoints(run_dir).values()), None)


def prune(run_dir: str | Path, keep: int) -> None:
    """Remove all but the newest ``keep`` (at least 1) checkpoints, and what crashed writes left behind."""
    remove(*list(checkpoints(run_dir).values())[:-keep], *Path(run_dir).glob("checkpoints/.step-*"))


def rng_state() -> dict[str, Any]:
    """The state of this process's global random generators (python, numpy, torch, each GPU)."""
    numpy: dict[str, Any] = np.random.get_state(legacy=False)
    numpy["state"]["key"] = numpy["state"]["key"].tolist()  # torch.load(weights_only=True) takes no arrays
    return {
        "python": random.getstate(),
        "numpy": numpy,
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Continue the random streams of ``rng_state``; GPUs only where their number is the same."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if len(state["cuda"]) == torch.cuda.device_count() > 0:
        torch.cuda.set_rng_state_all(state["cuda"])
