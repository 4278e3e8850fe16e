"""What several test files share: one tiny model, made once, and no time limit on hypothesis' examples."""

from pathlib import Path

import pytest
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
