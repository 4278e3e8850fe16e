"""How large a cache an engine with weights of its own gets."""

import pytest
import torch

from rolecall import models
from rolecall.config import Model
from rolecall.engines import cache
from rolecall.errors import UserError

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def outline(tiny_path):
    return models.outline(Model(path=str(tiny_path), dtype="float32"), CPU)


def tokens(outline, sequences: int) -> int:
    return cache.cache_tokens(outline, 200, sequences, CPU, block=64, engine="vLLM")


def test_room_for_all_and_a_block_or_what_half_of_the_memory_holds(outline, monkeypatch):
    assert cache.token_bytes(outline) == 2 * 2 * 1 * 32 * 4  # keys and values, layers, heads, head size, bytes
    assert tokens(outline, 10) == 64 * (4 * 10 + 1)  # 200 tokens take four blocks
    monkeypatch.setattr(cache, "free_memory", lambda device: 2 * 512 * 64 * 7)
    assert tokens(outline, 10) == 64 * 7
    monkeypatch.setattr(cache, "free_memory", lambda device: 0)
    assert tokens(outline, 10) == 64 * (4 + 1)  # never less than one response


def test_no_room_for_one_response_is_said_at_the_start(outline):
    with pytest.raises(UserError, match=r"a response of 10{12} tokens \(with its prompt\) in vLLM's cache needs"):
        cache.cache_tokens(outline, 10**12, 1, CPU, block=64, engine="vLLM")
