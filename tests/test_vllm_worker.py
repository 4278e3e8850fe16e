"""What vLLM's worker learns of a load on a GPU and does at once the next time; on the CPU, with hand-made loads."""

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed (docs/engines.md)")

from rolecall.engines.vllm_worker import Copies, Weights


def fused(target: torch.Tensor) -> Callable[[Weights], None]:
    """A load as vLLM's is: q and k into the rows of one parameter, the second half of v's into its end."""

    def load(weights: Weights) -> None:
        named = dict(weights)
        target.narrow(0, 0, 2).copy_(named["q"])
        target[2:4].copy_(named["k"].view(2, 3))
        target[4:].copy_(named["v"].chunk(2)[1])

    return load


def recorded(load: Callable[[Weights], None], weights: Weights) -> Copies:
    with (copies := Copies(weights)):
        load(weights)
    return copies


@pytest.fixture
def memory() -> torch.Tensor:
    return torch.arange(24.0)


@pytest.fixture
def weights(memory: torch.Tensor) -> Weights:
    return [("q", memory[:6].view(2, 3)), ("k", memory[6:12]), ("v", memory[12:].view(4, 3))]


def test_a_load_is_done_again_from_the_same_memory(memory, weights):
    target = torch.zeros(6, 3)
    copies = recorded(fused(target), weights)
    first = torch.cat([torch.arange(12.0), torch.arange(18.0, 24.0)]).view(6, 3)
    assert torch.equal(target, first) and copies.fits(weights)
    memory += 100  # the next bucket in the same slot
    torch._foreach_copy_(copies.targets, copies.sources)
    assert torch.equal(target, first + 100)
    assert not copies.fits([(name, value.clone()) for name, value in weights])  # in other memory
    assert not copies.fits([("other", weights[0][1]), *weights[1:]])


OTHER = {
    "another type": lambda target, weights: target.copy_(weights[0][1].double()),
    "a sum": lambda target, weights: target.add_(weights[0][1]),
    "a computed value": lambda target, weights: target.copy_(weights[0][1] * 2),
    "a constant": lambda target, weights: target.fill_(0),
    "one row for all": lambda target, weights: target.copy_(weights[0][1][0]),
}


@pytest.mark.parametrize("what", OTHER)
def test_a_load_that_is_more_than_copies_is_not(weights, what):
    target = torch.zeros(2, 3)
    assert not recorded(lambda given: OTHER[what](target, given), weights).fits(weights)
