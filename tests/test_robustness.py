"""Every loss and advantage under what real batches hold: extreme numbers, junk under the mask, padding, autocast."""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rolecall.algorithms import (
    aggregate,
    dpo_loss,
    entropy,
    estimate_advantages,
    full_kl,
    group_advantages,
    importance_correction,
    kl,
    policy_loss,
    reward_model_loss,
    sequence_logprobs,
    token_rewards,
    value_loss,
    whiten,
)
from tensors import batches, close

NAN = math.nan
Loss = Callable[..., Tensor]


def policy(x: Tensor, a: Tensor, b: Tensor, mask: Tensor, total: float | None = None, **options) -> Tensor:
    weights = importance_correction(a, x, mask)
    return policy_loss(x, a, b, mask, weights=weights, total=total, **options)[0]


def estimate(x: Tensor, a: Tensor, b: Tensor, mask: Tensor, total: float | None = None, *, estimator: str) -> Tensor:
    return aggregate(kl(x, a, estimator=estimator, mask=mask), mask, total=total)


def values(x: Tensor, a: Tensor, b: Tensor, mask: Tensor, total: float | None = None, **options) -> Tensor:
    return value_loss(x, a, b, mask, total=total, **options)[0]


def pairs(x: Tensor, a: Tensor, b: Tensor, mask: Tensor, total: float | None = None, **options) -> Tensor:
    """Each row's response is the chosen one of a pair whose rejected one is ``b``."""
    mean = options.pop("mean", False)
    chosen, ref_chosen, rejected = (sequence_logprobs(y, mask, length_normalized=mean) for y in (x, a, b))
    return dpo_loss(chosen, rejected, ref_chosen, ref_chosen, total=total, **options)[0]


def scores(x: Tensor, a: Tensor, b: Tensor, mask: Tensor, total: float | None = None) -> Tensor:
    chosen, rejected = sequence_logprobs(x, mask), sequence_logprobs(a, mask)
    return reward_model_loss(chosen, rejected, margin=0.5, total=total)[0]


# loss(x, a, b, mask, total) of four (B, T) tensors, differentiated by x. By what it is divided: tokens, sequences (with
# an action token) or rows.
MEAN, SUM = {"aggregate": "sequence-mean-token-mean"}, {"aggregate": "sequence-mean-token-sum-norm", "norm": 6}
LOSSES: dict[str, tuple[Loss, str]] = {
    "PPO": (policy, "tokens"),
    "GRPO": (partial(policy, **MEAN), "sequences"),
    "Dr. GRPO": (partial(policy, **SUM), "sequences"),
    "dual clip": (partial(policy, dual_clip=3.0), "tokens"),
    "GSPO": (partial(policy, level="sequence", **MEAN), "sequences"),
    "GSPO-token": (partial(policy, level="sequence-token", **MEAN), "sequences"),
    "CISPO": (partial(policy, kind="cispo", clip_low=1.0), "tokens"),
    "REINFORCE": (partial(policy, kind="reinforce"), "tokens"),
    "value": (values, "tokens"),
    "value without clip": (partial(values, clip=None), "tokens"),
    "k1": (partial(estimate, estimator="k1"), "tokens"),
    "k2": (partial(estimate, estimator="k2"), "tokens"),
    "k3": (partial(estimate, estimator="k3"), "tokens"),
    "DPO": (pairs, "rows"),
    "DPO, smoothed": (partial(pairs, label_smoothing=0.1), "rows"),
    "IPO": (partial(pairs, kind="ipo", mean=True), "rows"),
    "Bradley-Terry": (scores, "rows"),
}


def every_loss(test: Callable[..., None]) -> Callable[..., None]:
    return pytest.mark.parametrize("name", LOSSES)(settings(max_examples=20)(test))


def divisor(mask: Tensor, unit: str) -> int:
    counts = {"tokens": mask.sum(), "sequences": mask.any(-1).sum(), "rows": len(mask)}
    return int(counts[unit])


def value_and_gradient(loss: Loss, x: Tensor, *arguments) -> tuple[Tensor, Tensor]:
    x = x.detach().clone().requires_grad_()
    value = loss(x, *arguments)
    value.backward()
    return value.detach(), x.grad


# Extreme numbers. --------------------------------------------------------------------------------------------------

ODD = st.sampled_from([0.0, -0.0, 1e-45, -1e-38, 1e-7, -1.0, 20.0, -20.1, 87.0, -89.0, 1e4, -1e15, 1e30, -1e30])
LOGPROBS = st.one_of(ODD, st.floats(-(2.0**99), 2.0**99, width=32))
MODERATE = st.one_of(st.sampled_from([0.0, -1.0, 1e-20, 1e6, -1e6]), st.floats(-(2.0**20), 2.0**20, width=32))
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])


def filled(elements: st.SearchStrategy[float], rows: int = 2, width: int = 3) -> st.SearchStrategy[Tensor]:
    lists = st.lists(elements, min_size=rows * width, max_size=rows * width)
    return lists.map(lambda numbers: torch.tensor(numbers).view(rows, width))


@every_loss
@given(x=filled(LOGPROBS), a=filled(LOGPROBS), b=filled(MODERATE), mask=filled(st.booleans()), dtype=DTYPES)
def test_no_finite_numbers_make_a_nan(name, x, a, b, mask, dtype):
    """Log-probabilities, values and scores to 1e30, advantages to 1e6. The square of 1e30 is infinite, which shows."""
    value, gradient = value_and_gradient(LOSSES[name][0], *(y.to(dtype) for y in (x, a, b)), mask)
    assert not value.isnan()
    assert not gradient.isnan().any()


@given(logits=filled(LOGPROBS, 2, 4), ref=filled(LOGPROBS, 2, 4), dtype=DTYPES)
def test_no_finite_logits_make_a_nan(logits, ref, dtype):
    logits, ref = logits.to(dtype)[None], ref.to(dtype)[None]
    for function in (lambda x: full_kl(x, ref).sum(), lambda x: entropy(x).sum()):
        value, gradient = value_and_gradient(function, logits)
        assert not value.isnan() and not gradient.isnan().any()


def test_a_token_too_unlikely_for_the_type_adds_nothing_to_the_kl():
    """p = e^-200 is 0 in float32 while its log is not; the Reference makes it impossible. 0 x inf is NaN."""
    value, gradient = value_and_gradient(
        lambda x: full_kl(x, torch.tensor([[[0.0, -math.inf]]])).sum(), torch.tensor([[[0.0, -200.0]]])
    )
    assert value == 0 and not gradient.any()


@given(x=filled(LOGPROBS), a=filled(LOGPROBS), mask=filled(st.booleans()), dtype=DTYPES, ids=filled(st.integers(0, 1)))
def test_no_finite_rewards_make_a_nan(x, a, mask, dtype, ids):
    x, a, ids = x.to(dtype), a.to(dtype), ids[:, 0].long()
    rewards = x[:, 0]
    for baseline in ("mean", "leave-one-out"):
        for scale in ("std", "none"):
            assert not group_advantages(rewards, ids, baseline=baseline, scale=scale).isnan().any()
    for options in ({"baseline": "critic", "values": a}, {"baseline": "none"}, {"baseline": "mean", "group_ids": ids}):
        both = estimate_advantages(rewards, mask, scale="batch-std", **options)
        assert not any(found.isnan().any() for found in both)
    assert not whiten(a, mask).isnan().any()
    assert not token_rewards(rewards, mask, kl=a).isnan().any()
    for level in ("token", "sequence"):
        assert not importance_correction(x, a, mask, level=level).isnan().any()


# Junk under the mask, padding, order, parts. -----------------------------------------------------------------------


@every_loss
@given(batch=batches(3), junk=st.sampled_from([NAN, math.inf, -math.inf, 1e38]), dtype=DTYPES)
def test_what_stands_under_the_mask_changes_nothing(name, batch, junk, dtype):
    *columns, mask = batch
    dirty, clean = ([y.to(dtype).where(mask, other) for y in columns] for other in (junk, 0.0))
    value, gradient = value_and_gradient(LOSSES[name][0], *dirty, mask)
    expected, right = value_and_gradient(LOSSES[name][0], *clean, mask)
    assert torch.equal(value, expected)
    assert torch.equal(gradient, right)
    assert not gradient[~mask].any()


@every_loss
@given(batch=batches(3), left=st.integers(0, 3), right=st.integers(0, 3), seed=st.integers(0, 99))
def test_padding_and_order_change_nothing(name, batch, left, right, seed):
    *columns, mask = batch
    order = torch.randperm(len(mask), generator=torch.Generator().manual_seed(seed))

    def pad(x: Tensor) -> Tensor:
        return torch.nn.functional.pad(x[order], (left, right), value=0 if x.dtype == torch.bool else NAN)

    value, gradient = value_and_gradient(LOSSES[name][0], *columns, mask)
    padded, moved = value_and_gradient(LOSSES[name][0], *map(pad, columns), pad(mask))
    close(padded, value.item())
    close(moved[:, left : left + mask.shape[1]], gradient[order])


@every_loss
@given(batch=batches(3))
def test_samples_alone_add_up_to_the_batch(name, batch):
    """Each trimmed to its own action tokens, divided by what the whole batch is."""
    *columns, mask = batch
    loss, unit = LOSSES[name]
    whole, gradient = value_and_gradient(loss, *columns, mask)
    added = torch.zeros_like(whole)
    for row in range(len(mask)):
        keep = mask[row]
        alone = [x[row, keep][None] for x in columns]
        value, own = value_and_gradient(loss, *alone, keep[keep][None], divisor(mask, unit))
        added += value
        close(own[0], gradient[row, keep])
    close(added, whole.item())


# Types. ------------------------------------------------------------------------------------------------------------


@every_loss
@given(batch=batches(3))
def test_autocast_and_bfloat16_inputs_change_no_digit_of_the_float32_result(name, batch):
    *columns, mask = batch
    narrow = [x.bfloat16() for x in columns]
    wide = [x.float() for x in narrow]
    expected, right = value_and_gradient(LOSSES[name][0], *wide, mask)
    with torch.autocast("cpu", torch.bfloat16):
        for given_columns in (narrow, wide):
            value, gradient = value_and_gradient(LOSSES[name][0], *given_columns, mask)
            assert value.dtype == torch.float32
            assert torch.equal(value, expected)
            assert torch.equal(gradient, right.to(gradient.dtype))


@every_loss
@given(batch=batches(3))
def test_float32_is_float64_but_for_rounding(name, batch):
    *columns, mask = batch
    columns = [x.float() for x in columns]
    value, gradient = value_and_gradient(LOSSES[name][0], *columns, mask)
    expected, right = value_and_gradient(LOSSES[name][0], *(x.double() for x in columns), mask)
    assert expected.dtype == right.dtype == torch.float64
    close(value.double(), expected.item(), 1e-4)
    close(gradient.double(), right, 1e-4)


@pytest.mark.parametrize("clip", [3e-4, 0.2])
def test_both_forms_of_gspo_have_the_same_value_to_the_bit(clip):
    """In float32, where log-probabilities of -15 leave no room for clips of 3e-4 beside them."""
    generator = torch.Generator().manual_seed(0)
    logprobs = -15 * torch.rand(4, 50, generator=generator)
    old = logprobs + 1e-3 * torch.randn(4, 50, generator=generator)
    found = [
        policy_loss(logprobs, old, torch.ones(4), torch.ones(4, 50), level=level, clip_low=clip, clip_high=clip)[1]
        for level in ("sequence", "sequence-token")
    ]
    assert found[0] == found[1]
    assert found[0]["ratio_max"] != 1


# Gradients of the objectives that stop one, against finite differences. --------------------------------------------


@pytest.mark.parametrize("options", [{"kind": "cispo", "clip_low": 1.0}, {"kind": "cispo"}, {"kind": "reinforce"}])
@settings(max_examples=10)
@given(batch=batches(3))
def test_gradients_with_the_ratio_held(options, batch):
    """The old policy moves along with x, so the ratio stands still, as the stopped gradient has it."""
    x, log_ratio, advantages, mask = batch

    def loss(x: Tensor) -> Tensor:
        return policy_loss(x, x.detach() - log_ratio, advantages, mask, **options)[0]

    assert torch.autograd.gradcheck(loss, (x.requires_grad_(),))


@settings(max_examples=10)
@given(batch=batches(2))
def test_gradient_of_the_token_form_of_gspo(batch):
    """With one advantage a sequence its gradient is that of its value, away from the clip."""
    x, old, mask = batch
    advantages = torch.linspace(-1, 1.5, len(mask), dtype=torch.float64)
    options = {"level": "sequence-token", "aggregate": "sequence-mean-token-mean", "clip_low": 1.0, "clip_high": 1e6}
    assert torch.autograd.gradcheck(
        lambda x: policy_loss(x, old, advantages, mask, **options)[0], (x.requires_grad_(),)
    )
