"""vLLM in the process of the tests, and that process as it was before."""

import gc
import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from rolecall.config import Config
from rolecall.roles.rollout import Rollout

needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed (docs/engines.md)"
)


@contextmanager
def vllm_here(settings: Config) -> Iterator[Rollout]:
    """A Rollout with vLLM, which makes itself at home in its process until the block ends."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed (docs/engines.md)")
    environment, threads = dict(os.environ), torch.set_num_threads
    rollout = Rollout(settings)
    yield rollout
    from vllm.distributed import cleanup_dist_env_and_memory

    rollout.engine.close()
    rollout.engine = None  # the last that holds vLLM's memory on a GPU, of which a process has only one
    gc.collect()
    cleanup_dist_env_and_memory()
    torch.set_num_threads = threads
    os.environ.clear()
    os.environ.update(environment)
