"""What several test files share: one tiny model, made once, one torch thread, no time limit on examples."""

import os
from collections.abc import Iterator
from pathlib import Path

# Tensors are small here, and on a busy machine two threads wait for each other most of the time. In the environment,
# before torch reads it, so that it holds in every thread: vLLM wants the same number in all that call it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import ray
from hypothesis import settings

from rolecall import config, models
from rolecall.models import Loaded
from rolecall.models.tiny import make

settings.register_profile("rolecall", deadline=None)
settings.load_profile("rolecall")


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the 0.1M-parameter Llama."""
    return make(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def tiny(tiny_path: Path) -> Loaded:
    """The 0.1M-parameter Llama in FP32 on the CPU. Tests that change its weights load their own."""
    return models.load(config.Model(path=str(tiny_path), dtype="float32"), "cpu")


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    """A Ray that this process is connected to: runs in it work there, instead of each starting one for itself."""
    ray.init("local", include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()
