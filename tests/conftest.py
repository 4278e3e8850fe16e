"""What several test files share: one tiny model and one Ray, one torch thread, no time limit on examples."""

import os
from collections.abc import Iterator
from pathlib import Path

# Tensors are small here, and on a busy machine two threads wait for each other most of the time. In the environment,
# before torch reads it, so that it holds in every thread: vLLM wants the same number in all that call it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import ray
from hypothesis import settings
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from rolecall import config, models
from rolecall.models import Loaded
from rolecall.models.tiny import make

settings.register_profile("rolecall", deadline=None)
settings.load_profile("rolecall")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What works on ``local_ray`` comes last: it is there to the end, and others start a Ray of their own, or none."""
    items.sort(key=lambda item: "local_ray" in getattr(item, "fixturenames", ()))


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the 0.1M-parameter Llama."""
    return make(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def tiny(tiny_path: Path) -> Loaded:
    """The 0.1M-parameter Llama in FP32 on the CPU. Tests that change its weights load their own."""
    return models.load(config.Model(path=str(tiny_path), dtype="float32"), "cpu")


@pytest.fixture(scope="session")
def smollm2_small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with SmolLM2's tokenizer and kind of model, two layers of it and random weights."""
    folder = tmp_path_factory.mktemp("models") / "smollm2"
    whole = models.resolve("smollm2-135m-instruct")
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = AutoConfig.from_pretrained(whole, num_hidden_layers=2, head_dim=32, **shape)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(whole).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def local_ray() -> Iterator[None]:
    """A Ray that this process is connected to: runs in it work there, instead of each starting one for itself."""
    ray.init("local", include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()
