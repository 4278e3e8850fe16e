"""AdamW with 8-bit moments: how near it stays to AdamW, what it takes in memory, how it resumes, when it is refused."""

import importlib.util
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from rolecall import config
from rolecall.config import Config
from rolecall.errors import UserError
from rolecall.roles.actor import Actor
from rolecall.training.optimizer import Optimizer, bytes_to_train, moment_bytes

EIGHT = config.Optimizer(lr=1e-3, optimizer="adamw-8bit")
here = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")


def make(dtype: torch.dtype, settings: config.Optimizer) -> tuple[nn.Sequential, Optimizer]:
    """Two matrices of 4,096 values, whose moments have 8 bits, and two biases of 64, whose have not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)).to(dtype)
    return model, Optimizer(model.parameters(), settings, total=100)


def train(model: nn.Sequential, optimizer: Optimizer, steps: range) -> None:
    """Learn to turn vectors round, each step from its own."""
    for step in steps:
        inputs = torch.randn(32, 64, generator=torch.Generator().manual_seed(step)).to(model[0].weight.dtype)
        (model(inputs) - inputs.flip(1)).square().mean().backward()
        optimizer.step()


@here
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_go_where_adamw_takes_them(dtype):
    """After 60 steps they are nearer than 3 % of the way that they came (1.4 % measured)."""
    eight, exact = make(dtype, EIGHT), make(dtype, config.Optimizer(lr=1e-3))
    start = [parameter.detach().clone() for parameter in exact[0].parameters()]
    for model, optimizer in (eight, exact):
        train(model, optimizer, range(60))
    for there, parameter, first in zip(eight[0].parameters(), exact[0].parameters(), start, strict=True):
        way = (parameter - first).float().norm()
        assert way > 0.1
        assert (there - parameter).float().norm() < 0.03 * way


@here
def test_bfloat16_weights_have_fp32_masters():
    """Pitfall 24. A thousand steps of 1e-6 are 1e-3, each of them too small for bfloat16 at 1/64."""
    weight = nn.Parameter(torch.full((64, 64), 1 / 64, dtype=torch.bfloat16))
    optimizer = Optimizer([weight], EIGHT.model_copy(update={"lr": 1e-6}), total=1000)
    for _ in range(1000):
        weight.sum().backward()
        optimizer.step()
    assert weight.mean().item() == pytest.approx(1 / 64 - 1e-3, abs=2**-15)


@here
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_resumed_run_goes_on_bit_for_bit(dtype, tmp_path):
    whole, optimizer = make(dtype, EIGHT)
    train(whole, optimizer, range(6))
    first, optimizer = make(dtype, EIGHT)
    train(first, optimizer, range(3))
    torch.save({"model": first.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "x")
    saved = torch.load(tmp_path / "x", map_location="cpu", weights_only=True)
    second, optimizer = make(dtype, EIGHT)
    second.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    train(second, optimizer, range(3, 6))
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), second.parameters(), strict=True))


# Memory ------------------------------------------------------------------------------------------------------------

MATRIX = 64 * 64 + 16 * 4 + 256 * 4  # codes, a scale a block of 256, and what each code means


def moments(optimizer: Optimizer) -> int:
    """Bytes that are there."""
    found = 0
    for state in optimizer.state_dict()["adam"]["state"].values():
        for moment in (state["exp_avg"], state["exp_avg_sq"]):
            parts = (moment,) if type(moment) is torch.Tensor else (moment.codes, moment.scale, moment.qmap)
            found += sum(part.nbytes for part in parts)
    return found


@here
def test_moments_take_the_bytes_that_are_planned_for():
    model, optimizer = make(torch.bfloat16, EIGHT)
    planned = 2 * (2 * MATRIX + 2 * 64 * 4)
    assert optimizer.unallocated() == planned
    train(model, optimizer, range(1))
    assert (optimizer.unallocated(), moments(optimizer)) == (0, planned)
    assert sum(bytes_to_train(model, EIGHT).values()) == planned + 2 * (64 * 64 + 64) * (4 + 4)  # gradients and masters


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((64, 64), 2 * MATRIX), ((63, 64), 2 * 4 * 63 * 64), ((17, 241), 2 * 4 * 17 * 241), ((4096,), 2 * MATRIX)],
)
def test_small_tensors_and_those_of_broken_blocks_stay_fp32(shape, expected):
    assert moment_bytes([torch.empty(shape, device="meta")], EIGHT) == expected


# Where it cannot be ------------------------------------------------------------------------------------------------


def test_without_torchao_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"'adamw-8bit': torchao is not installed.*rolecall\[8bit\]"):
        make(torch.float32, EIGHT)


@here
def test_without_compilation_it_is_refused():
    with torch._dynamo.config.patch(disable=True), pytest.raises(UserError, match="TORCH_COMPILE_DISABLE"):
        make(torch.float32, EIGHT)


@here
def test_sharded_weights_are_refused():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        weight = nn.Parameter(distribute_tensor(torch.zeros(64, 64), init_device_mesh("cpu", (1,))))
        with pytest.raises(UserError, match=r"'adamw-8bit': it is for .* this one is sharded"):
            Optimizer([weight], EIGHT, total=1)
    finally:
        dist.destroy_process_group()


@here
@pytest.mark.parametrize(("saved", "resumed"), [("adamw", "adamw-8bit"), ("adamw-8bit", "adamw")])
def test_moments_of_one_optimizer_are_no_others(tiny_path, tmp_path, saved, resumed):
    def actor(optimizer: str) -> Any:
        return Actor(Config(model={"path": str(tiny_path)}, actor={"optimizer": optimizer}))

    actor(saved).save(tmp_path)
    with pytest.raises(
        UserError, match=f"actor.optimizer = '{saved}': .* resumed with .*actor.optimizer = '{resumed}'"
    ):
        actor(resumed).load(tmp_path)
    actor(saved).load(tmp_path)


def test_other_optimizers_are_not_known():
    with pytest.raises(UserError, match=r"actor.optimizer = 'sgd': Input should be 'adamw' or 'adamw-8bit'"):
        Config(actor={"optimizer": "sgd"})
