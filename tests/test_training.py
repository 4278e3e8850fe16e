"""Chunked log-probabilities, the optimizer and checkpoints."""

import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from rolecall import config
from rolecall.errors import RunError
from rolecall.training import checkpoint
from rolecall.training.logprobs import token_logprobs
from rolecall.training.optimizer import Optimizer

# Log-probabilities. ------------------------------------------------------------------------------------------------


def test_log_probability_and_entropy_by_hand():
    """Logits (0, ln 3) at temperature 1/2 are (0, ln 9): probabilities 1/10 and 9/10."""
    logprobs, entropy = token_logprobs(torch.tensor([[0.0, math.log(3)]]), None, torch.tensor([1]), temperature=0.5)
    assert logprobs.item() == pytest.approx(math.log(0.9))
    assert entropy.item() == pytest.approx(-0.1 * math.log(0.1) - 0.9 * math.log(0.9))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 20), st.integers(2, 30), st.integers(1, 200), st.floats(0.3, 3.0), st.booleans(), st.booleans())
def test_any_chunking_gives_the_values_and_gradients_of_log_softmax(tokens, vocabulary, limit, temperature, bias, both):
    torch.manual_seed(tokens * 31 + vocabulary)
    hidden = torch.randn(tokens, 8, dtype=torch.float64, requires_grad=True)
    head = nn.Linear(8, vocabulary, dtype=torch.float64, bias=bias)
    targets = torch.randint(vocabulary, (tokens,))
    outer = torch.randn(2, tokens, dtype=torch.float64)

    logprobs, entropy = token_logprobs(hidden, head, targets, temperature, entropy_gradient=both, limit=limit)
    every = (head(hidden) / temperature).log_softmax(-1)
    expected = every.gather(1, targets[:, None])[:, 0], -(every.exp() * every).sum(-1)
    torch.testing.assert_close((logprobs, entropy), expected)
    assert entropy.requires_grad == both
    weighed = (logprobs * outer[0]).sum() + (entropy * outer[1]).sum() * both
    right = (expected[0] * outer[0]).sum() + (expected[1] * outer[1]).sum() * both
    inputs = [hidden, *head.parameters()]
    torch.testing.assert_close(torch.autograd.grad(weighed, inputs), torch.autograd.grad(right, inputs))


def test_a_head_that_is_not_trained_gets_no_gradient():
    hidden = torch.randn(3, 8, requires_grad=True)
    head = nn.Linear(8, 5).requires_grad_(False)
    token_logprobs(hidden, head, torch.tensor([0, 1, 2]), 1.0)[0].sum().backward()
    assert hidden.grad is not None and head.weight.grad is None


def test_a_sixteen_bit_head_adds_up_its_chunks_in_float32():
    """Two logits, both 0: each of 300 tokens gives the rows of the weight -+ 1/2 h. In bfloat16, 128 + 1/2 is 128."""
    hidden = torch.ones(300, 1, dtype=torch.bfloat16, requires_grad=True)
    head = nn.Linear(1, 2, bias=False, dtype=torch.bfloat16)
    nn.init.zeros_(head.weight)
    token_logprobs(hidden, head, torch.zeros(300, dtype=torch.long), 1.0, limit=2)[0].sum().backward()
    assert head.weight.grad.tolist() == [[150.0], [-150.0]]


def test_a_nearly_certain_token_keeps_its_small_gradient():
    """Logits 8 and 0: the gradients are 1 - p and -(1 - p), 3.4e-4, while p is 1 in bfloat16."""
    logits = torch.tensor([[8.0, 0.0]], dtype=torch.bfloat16, requires_grad=True)
    token_logprobs(logits, None, torch.tensor([0]), 1.0)[0].sum().backward()
    small = 1 / (1 + math.exp(8))
    assert logits.grad[0].tolist() == pytest.approx([small, -small], rel=2**-8)


def test_sums_run_in_float32():
    """1,000 equal bf16 logits: log-probability -ln 1000 to float32's precision, far beyond bfloat16's."""
    logprobs, entropy = token_logprobs(torch.full((1, 1000), 7.0, dtype=torch.bfloat16), None, torch.tensor([3]), 1.0)
    assert logprobs.dtype == torch.float32
    assert logprobs.item() == pytest.approx(-math.log(1000), rel=1e-6)
    assert entropy.item() == pytest.approx(math.log(1000), rel=1e-6)


def test_an_impossible_token_leaves_entropy_and_gradient_finite():
    logits = torch.tensor([[0.0, 0.0, -math.inf]], requires_grad=True)
    logprobs, entropy = token_logprobs(logits, None, torch.tensor([0]), 1.0, entropy_gradient=True)
    assert logprobs.item() == pytest.approx(-math.log(2)) and entropy.item() == pytest.approx(math.log(2))
    (logprobs + entropy).sum().backward()
    assert logits.grad.tolist() == [[0.5, -0.5, 0.0]]  # of the entropy 0: it is at its maximum


def saved_elements(tokens: int, vocabulary: int) -> int:
    """Elements that autograd keeps between forward and backward, parameters and inputs aside."""
    hidden = torch.randn(tokens, 4, requires_grad=True)
    head = nn.Linear(4, vocabulary)
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes() // tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logprobs, _ = token_logprobs(hidden, head, torch.zeros(tokens, dtype=torch.long), 1.0)
    logprobs.sum().backward()
    own = {tensor.untyped_storage().data_ptr() for tensor in (hidden, head.weight, head.bias)}
    return sum(size for where, size in kept.items() if where not in own)


def test_nothing_kept_has_the_vocabulary_in_it():
    """Pitfall 25. A token's target, normalizer and entropy are kept, whatever the vocabulary."""
    assert [saved_elements(256, vocabulary) for vocabulary in (1000, 4000)] == [3 * 256, 3 * 256]


# Optimizer. --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_thousand_steps_of_1e_6_move_a_weight(dtype):
    """Pitfall 24. Under a constant gradient Adam moves by lr a step: 1/64 - 1e-3, within the type's rounding (2^-15).

    bfloat16's own step at 1/64 is 2^-14, sixty times the update, so each update would round away without a master.
    """
    weight = nn.Parameter(torch.full((2, 2), 1 / 64, dtype=dtype))
    optimizer = Optimizer([weight], config.Optimizer(lr=1e-6), total=1000)
    for _ in range(1000):
        weight.sum().backward()
        optimizer.step()
    assert weight.mean().item() == pytest.approx(1 / 64 - 1e-3, abs=2**-15)


def test_bf16_gradients_add_up_in_fp32():
    """256 + 1 is 256 in bfloat16: micro-batches of gradient 256, 1 and 1 must give a norm of 258."""
    weight = nn.Parameter(torch.ones(1, 1, dtype=torch.bfloat16))
    optimizer = Optimizer([weight], config.Optimizer(), total=1)
    for gradient in (256.0, 1.0, 1.0):
        (weight * gradient).sum().backward()
    assert optimizer.step()["grad_norm"] == 258.0
    assert weight.grad is None


def test_the_norm_is_over_all_parameters_and_clips():
    """Gradients 3 and 4: norm 5, clipped to 1. Adam's first step is lr whatever the scale, its moment tells."""
    a, b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1, 1))
    optimizer = Optimizer([a, b], config.Optimizer(lr=0.1, grad_clip=1.0), total=10)
    (3 * a.sum() + 4 * b.sum()).backward()
    assert optimizer.step() == {"grad_norm": 5.0, "lr": 0.1}
    moments = [state["exp_avg"].item() for state in optimizer.state_dict()["adam"]["state"].values()]
    assert sorted(moments) == pytest.approx([0.06, 0.08], rel=1e-4)  # 0.1 x (0.6, 0.8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_stops_before_the_step(dtype, bad):
    weight = nn.Parameter(torch.ones(2, 2, dtype=dtype))
    optimizer = Optimizer([weight], config.Optimizer(lr=1.0), total=5)
    (weight * bad).sum().backward()
    with pytest.raises(RunError, match=f"Gradient norm is {bad} at optimizer step 0"):
        optimizer.step()
    assert weight.tolist() == [[1, 1], [1, 1]]
    weight.sum().backward()
    assert optimizer.step()["grad_norm"] == 2.0  # the bad gradient is gone


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1, 1, 1, 1, 1]),
        ("linear", [0.5, 1, 1, 0.75, 0.5, 0.25]),
        ("cosine", [0.5, 1, 1, 0.5 + 0.5 * math.sqrt(0.5), 0.5, 0.5 - 0.5 * math.sqrt(0.5)]),
    ],
)
def test_warm_up_and_schedule_by_hand(schedule, expected):
    weight = nn.Parameter(torch.zeros(1, 1))
    optimizer = Optimizer([weight], config.Optimizer(lr=2.0, warmup_steps=2, schedule=schedule), total=6)
    seen = []
    for _ in range(6):
        weight.sum().backward()
        seen.append(optimizer.step()["lr"])
    assert seen == pytest.approx([2.0 * factor for factor in expected])


def test_weight_decay_leaves_norms_and_biases():
    matrix, bias = nn.Parameter(torch.ones(1, 1)), nn.Parameter(torch.ones(1))
    optimizer = Optimizer([matrix, bias], config.Optimizer(lr=0.1, weight_decay=0.5), total=1)
    (0 * matrix.sum() + 0 * bias.sum()).backward()
    optimizer.step()
    assert matrix.item() == pytest.approx(0.95) and bias.item() == 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_saved_optimizer_continues_bit_for_bit(dtype, tmp_path):
    def make() -> tuple[nn.Linear, Optimizer]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2, dtype=dtype)
        settings = config.Optimizer(lr=0.01, warmup_steps=3, schedule="cosine")
        return model, Optimizer(model.parameters(), settings, total=10)

    def train(model: nn.Linear, optimizer: Optimizer, steps: int) -> None:
        for _ in range(steps):
            model(torch.ones(1, 3, dtype=dtype)).square().sum().backward()
            optimizer.step()

    whole, optimizer = make()
    train(whole, optimizer, 7)
    first, optimizer = make()
    train(first, optimizer, 4)
    torch.save({"model": first.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "x")
    saved = torch.load(tmp_path / "x", weights_only=True)
    second, optimizer = make()
    second.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    train(second, optimizer, 3)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), second.parameters(), strict=True))


def test_a_resumed_optimizer_goes_by_the_new_configuration():
    """Moments of the gradients 1 and 0: m is 0.1 then 0.5 x 0.1, v is 0.001 then 0.9 x 0.001, and the weight decays."""
    weight = nn.Parameter(torch.ones(1, 1))
    first = Optimizer([weight], config.Optimizer(betas=(0.9, 0.999), weight_decay=0.0), total=2)
    weight.sum().backward()
    first.step()
    with torch.no_grad():
        weight.fill_(1.0)
    settings = config.Optimizer(lr=0.1, betas=(0.5, 0.9), weight_decay=0.5)
    second = Optimizer([weight], settings, total=2)
    second.load_state_dict(first.state_dict())
    (0 * weight.sum()).backward()
    second.step()
    (moments,) = second.state_dict()["adam"]["state"].values()
    assert (moments["exp_avg"].item(), moments["exp_avg_sq"].item()) == pytest.approx((0.05, 0.0009), rel=1e-5)
    corrected = 0.05 / (1 - 0.5**2), math.sqrt(0.0009 / (1 - 0.9**2))
    assert weight.item() == pytest.approx(1 - 0.1 * 0.5 - 0.1 * corrected[0] / corrected[1])


# Checkpoints. ------------------------------------------------------------------------------------------------------


def test_a_checkpoint_is_there_only_when_whole(tmp_path):
    with pytest.raises(ZeroDivisionError), checkpoint.writing(tmp_path, 10) as folder:
        (folder / "half").write_text("x")
        assert checkpoint.latest(tmp_path) is None  # not while it is being written
        1 / 0  # noqa: B018
    assert checkpoint.latest(tmp_path) is None
    with checkpoint.writing(tmp_path, 10) as folder:
        (folder / "actor").mkdir()
        (folder / "actor" / "state").write_text("whole")
    assert checkpoint.latest(tmp_path) == tmp_path / "checkpoints" / "step-000010"
    assert (tmp_path / "checkpoints" / "step-000010" / "actor" / "state").read_text() == "whole"
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000010"]


def test_what_a_killed_write_left_is_never_read_and_is_cleared(tmp_path):
    for name in ("step-000003", ".step-000004.new"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    (tmp_path / "checkpoints" / ".step-000004.new" / "junk").write_text("x")
    assert list(checkpoint.checkpoints(tmp_path)) == [3]
    with checkpoint.writing(tmp_path, 4) as folder:
        assert list(folder.iterdir()) == []
    assert list(checkpoint.checkpoints(tmp_path)) == [3, 4]


def test_writing_a_step_again_replaces_it_and_a_failure_keeps_the_old(tmp_path):
    for text in ("one", "two"):
        with checkpoint.writing(tmp_path, 1) as folder:
            (folder / "x").write_text(text)
    with pytest.raises(OSError), checkpoint.writing(tmp_path, 1) as folder:
        raise OSError
    latest = checkpoint.latest(tmp_path)
    assert latest is not None and (latest / "x").read_text() == "two"


def test_pruning_keeps_the_newest_in_the_order_of_numbers(tmp_path):
    for step in (2, 10, 1_000_000, 999_999):
        with checkpoint.writing(tmp_path, step):
            pass
    (tmp_path / "checkpoints" / ".step-000001.new").mkdir()
    checkpoint.prune(tmp_path, keep=2)
    assert list(checkpoint.checkpoints(tmp_path)) == [999_999, 1_000_000]
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2
    checkpoint.prune(tmp_path / "no run", keep=2)


def test_random_generators_continue(tmp_path):
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    random.gauss(0, 1), np.random.normal()  # leaves half a pair of normals behind in each
    torch.save(checkpoint.rng_state(), tmp_path / "rng")
    expected = [random.gauss(0, 1), np.random.normal(), np.random.randint(10**6), torch.rand(()).item()]
    random.seed(7), np.random.seed(7), torch.manual_seed(7)
    checkpoint.set_rng_state(torch.load(tmp_path / "rng", weights_only=True))
    assert [random.gauss(0, 1), np.random.normal(), np.random.randint(10**6), torch.rand(()).item()] == expected
