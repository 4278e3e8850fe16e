"""Exact values by hand, gradients against finite differences, and equivalences between objectives."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rolecall.algorithms import (
    AdaptiveKL,
    aggregate,
    explained_variance,
    gae,
    group_advantages,
    importance_correction,
    kl,
    masked_mean,
    policy_loss,
    token_rewards,
    value_loss,
    whiten,
)
from rolecall.errors import RunError, UserError
from tensors import batches, close, t

HOWS = ("token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum-norm")


def grad(function, x):
    x = x.detach().clone().requires_grad_()
    function(x).backward()
    return x.grad


# Aggregates ---------------------------------------------------------------------------------------------------------


def test_the_three_aggregates_by_hand():
    """Tokens 1, 2, 3 and 10: 16/4; (2 + 10)/2; (6/8 + 10/8)/2."""
    x, mask = t([1, 2, 3], [10, 99, 99]), t([1, 1, 1], [1, 0, 0])
    assert aggregate(x, mask, "token-mean") == 4
    assert aggregate(x, mask, "sequence-mean-token-mean") == 6
    assert aggregate(x, mask, "sequence-mean-token-sum-norm", norm=8) == 1
    assert aggregate(x, mask, "token-mean", total=8) == 2
    assert aggregate(x, mask, "sequence-mean-token-mean", total=torch.tensor(4)) == 3


def test_sums_of_bfloat16_are_float32():
    """In bfloat16 a running sum of ones stops at 256."""
    ones = torch.ones(1, 1000, dtype=torch.bfloat16)
    mean = masked_mean(ones, ones, total=1)
    assert mean == 1000
    assert mean.dtype == torch.float32
    assert masked_mean(ones.double(), ones).dtype == torch.float64


def test_names_that_do_not_exist_are_refused():
    x = torch.zeros(1, 2)
    with pytest.raises(UserError, match="mean 'token-mean'"):
        aggregate(x, x, "token_mean")
    with pytest.raises(UserError, match="norm is None"):
        aggregate(x, x, "sequence-mean-token-sum-norm")
    with pytest.raises(UserError, match="'clip'"):
        policy_loss(x, x, x, x, kind="clipp")
    with pytest.raises(UserError, match="'token'"):
        policy_loss(x, x, x, x, level="tokens")
    with pytest.raises(UserError, match="k1, k2, k3"):
        kl(x, x, estimator="abs")
    with pytest.raises(UserError, match="'truncate'"):
        importance_correction(x, x, x, mode="truncated")
    with pytest.raises(UserError, match="'std'"):
        group_advantages(x[0], x[0].long(), scale="stdev")
    with pytest.raises(UserError, match="'leave-one-out'"):
        group_advantages(x[0], x[0].long(), baseline="leave_one_out")


# Advantages ---------------------------------------------------------------------------------------------------------


def test_gae_by_hand():
    """gamma 0.5, lambda 0.5, rewards 1, 2, 4, values 2, 4, 8.

    delta = 1 + 2 - 2 = 1,  2 + 4 - 4 = 2,  4 - 8 = -4;  A = 4, ... backwards: -4; 2 - 1 = 1; 1 + 1/4.
    """
    advantages, returns = gae(t([1, 2, 4]), t([2, 4, 8]), t([1, 1, 1]), gamma=0.5, lam=0.5)
    assert advantages.tolist() == [[1.25, 1, -4]]
    assert returns.tolist() == [[3.25, 5, 4]]


@given(batches(2))
def test_gae_with_lambda_1_is_monte_carlo(batch):
    rewards, values, mask = batch
    _, returns = gae(rewards, values, mask, gamma=0.9, lam=1.0)
    for row in range(len(mask)):
        where = mask[row].nonzero()[:, 0].tolist()
        for i, position in enumerate(where):
            expected = sum(0.9**j * rewards[row, later] for j, later in enumerate(where[i:]))
            close(returns[row, position], expected)


@given(batches(2))
def test_gae_with_lambda_0_is_the_one_step_error(batch):
    rewards, values, mask = batch
    advantages, _ = gae(rewards, values, mask, gamma=0.9, lam=0.0)
    for row in range(len(mask)):
        where = mask[row].nonzero()[:, 0].tolist()
        for position, following in zip(where, [*where[1:], None], strict=False):
            bootstrap = 0 if following is None else 0.9 * values[row, following]
            close(advantages[row, position], rewards[row, position] + bootstrap - values[row, position])


@given(batches(2), st.floats(0, 1), st.floats(0, 1))
def test_gae_of_a_masked_batch_is_that_of_its_action_tokens_alone(batch, gamma, lam):
    rewards, values, mask = batch
    advantages, returns = gae(rewards, values, mask, gamma=gamma, lam=lam)
    for row in range(len(mask)):
        keep = mask[row]
        alone = gae(rewards[row, keep][None], values[row, keep][None], keep[keep][None], gamma=gamma, lam=lam)
        close(advantages[row, keep][None], alone[0])
        close(returns[row, keep][None], alone[1])
    assert not advantages[~mask].any()
    assert not returns[~mask].any()


def test_group_advantages_by_hand():
    """Rewards 1, 0, 0, 0: mean 1/4, sample variance (9/16 + 3/16) / 3 = 1/4; leave-one-out: 1 - 0 and 0 - 1/3."""
    rewards, ids = torch.tensor([1.0, 0, 0, 0]), torch.tensor([2, 2, 2, 2])
    assert group_advantages(rewards, ids).tolist() == [1.5, -0.5, -0.5, -0.5]
    assert group_advantages(rewards, ids, scale="none").tolist() == [0.75, -0.25, -0.25, -0.25]
    close(group_advantages(rewards, ids, scale="none", baseline="leave-one-out"), [1, -1 / 3, -1 / 3, -1 / 3], 1e-7)
    close(group_advantages(rewards, ids, baseline="leave-one-out"), [2, -2 / 3, -2 / 3, -2 / 3], 1e-7)


# (group id, reward)
GROUPS = st.lists(st.tuples(st.integers(-2, 2), st.floats(-1e3, 1e3, width=32)), min_size=1, max_size=16)


@given(GROUPS)
def test_drgrpo_is_grpo_times_the_deviation(samples):
    ids, rewards = torch.tensor([s[0] for s in samples]), torch.tensor([s[1] for s in samples], dtype=torch.float64)
    scaled, plain = group_advantages(rewards, ids), group_advantages(rewards, ids, scale="none")
    for group in ids.unique():
        mine = rewards[ids == group]
        if len(mine) > 1:
            close(plain[ids == group], scaled[ids == group] * mine.std(), 1e-9 * (1 + mine.abs().max().item()))


@given(GROUPS)
def test_leave_one_out_is_grpo_mean_times_g_over_g_minus_1(samples):
    ids, rewards = torch.tensor([s[0] for s in samples]), torch.tensor([s[1] for s in samples], dtype=torch.float64)
    left_out = group_advantages(rewards, ids, scale="none", baseline="leave-one-out")
    for i, (group, reward) in enumerate(samples):
        others = [r for j, (g, r) in enumerate(samples) if g == group and j != i]
        if others:
            close(left_out[i], reward - sum(others) / len(others), 1e-9 * (1 + max(map(abs, others)) + abs(reward)))
        else:
            assert left_out[i] == 0


@given(GROUPS, st.randoms())
def test_group_advantages_do_not_depend_on_the_order(samples, random):
    order = list(range(len(samples)))
    random.shuffle(order)

    def advantages(samples):
        return group_advantages(torch.tensor([s[1] for s in samples]), torch.tensor([s[0] for s in samples]))

    close(advantages([samples[i] for i in order]), advantages(samples)[order], 1e-5)


@given(GROUPS)
def test_group_advantages_have_mean_0_and_deviation_1_or_are_all_0(samples):
    ids, rewards = torch.tensor([s[0] for s in samples]), torch.tensor([s[1] for s in samples])
    advantages = group_advantages(rewards, ids).double()
    for group in ids.unique():
        mine = advantages[ids == group]
        if mine.any():
            close(mine.mean(), 0.0, 1e-5)
            close(mine.std(), 1.0, 1e-5)
        else:
            close(rewards[ids == group], rewards[ids == group][0].expand(len(mine)).tolist(), 1e-6)


def test_whiten_by_hand():
    """Advantages 1, 2, 6: mean 3, sample variance (4 + 1 + 9) / 2 = 7."""
    mask = t([1, 1, 0], [0, 1, 0])
    close(whiten(t([1, 2, 50], [50, 6, 50]), mask), [[-2 / 7**0.5, -1 / 7**0.5, 0], [0, 3 / 7**0.5, 0]])


def test_token_rewards_keep_the_sum():
    """Reward 1 minus beta 1/2 times KL 0.2 + 0.4 leaves 0.7 in all."""
    placed = token_rewards(torch.tensor([1.0]), t([1, 0, 1]), kl=t([0.2, 9, 0.4]), beta=0.5)
    close(placed, [[-0.1, 0, 0.8]])


# Policy loss --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.1, 2.0, -2.2, -2.2),
        (1.5, 2.0, -2.56, 0.0),  # clipped at 1.28
        (1.5, -2.0, 3.0, 3.0),  # the larger loss is kept
        (0.5, 2.0, -1.0, -1.0),
        (0.5, -2.0, 1.6, 0.0),  # clipped at 0.8
    ],
)
def test_the_clip_by_hand(ratio, advantage, loss, slope):
    """One token. d loss / d log pi is -rho A where the clip is not active, else 0."""
    logprobs = t([math.log(ratio)]).requires_grad_()
    value, metrics = policy_loss(logprobs, t([0]), t([advantage]), t([1]), clip_low=0.2, clip_high=0.28)
    value.backward()
    close(value.detach(), loss)
    close(logprobs.grad, [[slope]])
    assert metrics["clip_fraction"] == (slope == 0)
    assert metrics["loss"] == pytest.approx(loss)
    assert metrics["ratio_max"] == pytest.approx(ratio)
    assert metrics["approx_kl"] == pytest.approx(ratio - 1 - math.log(ratio))


def test_the_sequence_ratio_by_hand():
    """GSPO: the ratios 2 and 1/2 of a sequence have the geometric mean 1, those of the other sqrt(2 * 1) = 1.41."""
    logprobs = t([2, 0.5, 9], [2, 1, 1]).log()
    loss, metrics = policy_loss(
        logprobs,
        torch.zeros_like(logprobs),
        torch.tensor([1.0, -1.0]),
        t([1, 1, 0], [1, 1, 0]),
        level="sequence",
        aggregate="sequence-mean-token-mean",
    )
    close(loss, (-1 + 2**0.5) / 2)
    assert metrics["ratio_max"] == pytest.approx(2**0.5)


@given(batches(2))
def test_ratio_1_is_reinforce_with_advantages(batch):
    logprobs, advantages, mask = batch
    for how in HOWS:
        for level in ("token", "sequence"):
            actual = grad(
                lambda x, how=how, level=level: policy_loss(
                    x, x.detach(), advantages, mask, aggregate=how, norm=6, level=level
                )[0],
                logprobs,
            )
            if level == "sequence":  # each token then stands for the mean over its sequence
                weights = grad(lambda x, how=how: -aggregate(x * advantages, mask, how, norm=6), logprobs)
                expected = torch.where(mask, weights.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True), 0.0)
            else:
                expected = grad(lambda x, how=how: -aggregate(x * advantages, mask, how, norm=6), logprobs)
            close(actual, expected)


@given(batches(3))
def test_gspo_on_one_token_responses_is_ppo(batch):
    logprobs, old, advantages, mask = (x[:, :1] for x in batch)

    def loss(x, level):
        return policy_loss(x, old, advantages, mask, level=level)[0]

    close(loss(logprobs, "sequence"), loss(logprobs, "token").item())
    close(grad(lambda x: loss(x, "sequence"), logprobs), grad(lambda x: loss(x, "token"), logprobs).tolist())


@given(batches(4), st.integers(0, 3), st.integers(0, 3), st.sampled_from(HOWS), st.sampled_from(["token", "sequence"]))
def test_padding_and_order_of_the_samples_change_no_loss(batch, left, right, how, level):
    logprobs, old, advantages, weights, mask = batch
    order = torch.randperm(len(mask), generator=torch.Generator().manual_seed(left))

    def pad(x):
        return torch.nn.functional.pad(x[order], (left, right), value=0 if x.dtype == torch.bool else math.nan)

    arguments = (logprobs, old, advantages, mask)
    loss, metrics = policy_loss(*arguments, weights=weights, aggregate=how, norm=6, level=level)
    padded, padded_metrics = policy_loss(*map(pad, arguments), weights=pad(weights), aggregate=how, norm=6, level=level)
    close(padded, loss.item())
    for name in ("loss", "clip_fraction", "approx_kl"):
        assert padded_metrics[name] == pytest.approx(metrics[name])


@given(batches(4))
def test_a_packed_row_is_its_samples_padded(batch):
    """Token-level losses do not see rows: all samples one behind the other in one row give the same."""
    logprobs, old, advantages, returns, mask = batch
    packed = [x[mask][None] for x in (logprobs, old, advantages, mask)]
    close(policy_loss(*packed)[0], policy_loss(logprobs, old, advantages, mask)[0].item())
    packed[2] = returns[mask][None]
    close(value_loss(*packed)[0], value_loss(logprobs, old, returns, mask)[0].item())


def test_gradients_flow_to_the_model_in_training_only():
    """Not to the old policy, the targets or the weights, even where they come with a graph."""
    mask = t([1, 1, 0])
    model, *others = (t([-1 - i, -2, -3]).requires_grad_() for i in range(4))
    policy_loss(model, others[0], others[1], mask, weights=others[2])[0].backward()
    value_loss(model, others[0], others[1], mask)[0].backward()
    assert model.grad[0, :2].all()
    assert [other.grad for other in others] == [None] * 3
    assert not importance_correction(model, others[0], mask).requires_grad
    assert not gae(others[0], others[1], mask)[1].requires_grad
    assert not group_advantages(others[0][0], torch.tensor([1, 1, 1])).requires_grad


# Value loss ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "loss", "slope"),
    [
        (1.1, 0.405, -0.9),  # within 0.2 of the old value 1: (1.1 - 2)^2 / 2
        (1.5, 0.32, 0.0),  # clipped at 1.2, which is further off: (1.2 - 2)^2 / 2
        (0.5, 1.125, -1.5),  # moved the wrong way: the unclipped error is larger and pulls back
    ],
)
def test_the_value_clip_by_hand(value, loss, slope):
    values = t([value]).requires_grad_()
    actual, metrics = value_loss(values, t([1.0]), t([2.0]), t([1]))
    actual.backward()
    close(actual.detach(), loss)
    close(values.grad, [[slope]])
    assert metrics["clip_fraction"] == (slope == 0)
    close(value_loss(values, t([1.0]), t([2.0]), t([1]), clip=None)[0].detach(), (value - 2) ** 2 / 2)


def test_explained_variance_by_hand():
    returns, mask = t([1, 2, 3, 77]), t([1, 1, 1, 0])
    assert explained_variance(returns, returns, mask) == 1
    assert explained_variance(t([2, 2, 2, 0]), returns, mask) == 0
    assert explained_variance(-returns, returns, mask) == -3
    assert explained_variance(returns, t([2, 2, 2, 0]), mask) == 0
    assert explained_variance(returns, returns, torch.zeros(1, 4)) == 0


# KL -----------------------------------------------------------------------------------------------------------------


def test_the_estimators_by_hand():
    """pi 1/2 and ref 1/4: d = log 2. k1 0.6931, k2 0.2402, k3 1/2 - 1 + log 2 = 0.1931."""
    logprobs, ref = t([0.5]).log(), t([0.25]).log()
    close(kl(logprobs, ref, estimator="k1"), [[math.log(2)]])
    close(kl(logprobs, ref, estimator="k2"), [[math.log(2) ** 2 / 2]])
    close(kl(logprobs, ref, estimator="k3"), [[math.log(2) - 0.5]])
    assert not kl(logprobs, logprobs, estimator="k3").any()


def test_the_reference_gets_no_gradient():
    logprobs, ref = t([0.5]).log().requires_grad_(), t([0.25]).log().requires_grad_()
    for estimator in ("k1", "k2", "k3"):
        kl(logprobs, ref, estimator=estimator).sum().backward()
    assert ref.grad is None
    close(logprobs.grad, [[1 + math.log(2) + 1 - 0.5]])


@given(st.floats(-1, 10), st.floats(-1, 10), st.integers(1, 5000), st.floats(1e-4, 1.0))
def test_the_controller_is_monotone_in_the_measured_kl_and_stays_positive(one, other, n, target):
    low, high = sorted((one, other))
    betas = [AdaptiveKL(0.05, target=target, horizon=1000).update(measured, n) for measured in (low, high)]
    assert 0 < betas[0] <= betas[1]


def test_the_controllers_state_is_its_fields():
    controller = AdaptiveKL(0.1, target=0.1, horizon=100)
    controller.update(0.3, 50)
    assert dataclasses.asdict(controller) == {
        "beta": pytest.approx(0.11),
        "target": 0.1,
        "horizon": 100,
        "rule": "proportional",
    }
    again = AdaptiveKL(**dataclasses.asdict(controller))
    assert again.update(0.2, 50) == controller.update(0.2, 50) == pytest.approx(0.121)


def test_without_a_target_beta_is_fixed():
    assert AdaptiveKL(0.1, None, 100).update(5.0, 100) == 0.1


def test_the_controller_refuses_nonsense():
    with pytest.raises(RunError, match="nan"):
        AdaptiveKL(0.1, 0.1, 100).update(math.nan, 8)
    with pytest.raises(UserError, match="target=0"):
        AdaptiveKL(0.1, 0, 100)


# Gradients against finite differences -------------------------------------------------------------------------------


def away(x, *edges):
    """Move ``x`` off the edges where the loss has a kink and no derivative."""
    for edge in edges:
        x = torch.where((x - edge).abs() < 1e-3, x + 2e-3, x)
    return x


GRADIENTS = {
    "token": {"level": "token"},
    "sequence": {"level": "sequence"},
    "mean of means": {"aggregate": "sequence-mean-token-mean"},
    "Dr. GRPO": {"aggregate": "sequence-mean-token-sum-norm", "norm": 6, "total": 7},
}


@pytest.mark.parametrize("name", GRADIENTS)
@settings(max_examples=10)
@given(batch=batches(3))
def test_gradients_of_the_policy_loss(name, batch):
    log_ratio, old, advantages, mask = batch
    log_ratio = away(log_ratio, math.log(0.8), math.log(1.2))
    if GRADIENTS[name].get("level") == "sequence":
        ratio = (log_ratio * mask).sum(-1) / mask.sum(-1).clamp(min=1)
        log_ratio = log_ratio + (away(ratio, math.log(0.8), math.log(1.2)) - ratio)[:, None]
    x = (old + log_ratio).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: policy_loss(x, old, advantages, mask, **GRADIENTS[name])[0], (x,))


@settings(max_examples=10)
@given(batch=batches(3))
def test_gradients_of_the_value_loss_and_the_estimators(batch):
    moved, old, returns, mask = batch
    x = (old + away(moved, -0.2, 0.2)).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: value_loss(x, old, returns + 5, mask)[0], (x,))
    assert torch.autograd.gradcheck(lambda x: value_loss(x, old, returns, mask, clip=None)[0], (x,))
    for estimator in ("k1", "k2", "k3"):
        assert torch.autograd.gradcheck(lambda x, e=estimator: kl(x, old, estimator=e, mask=mask), (x,))


def test_bfloat16_inputs_give_the_float32_result_of_the_same_numbers():
    generator = torch.Generator().manual_seed(0)
    logprobs, old, advantages = (torch.randn(3, 40, generator=generator).bfloat16() for _ in range(3))
    mask = torch.ones(3, 40)
    for level in ("token", "sequence"):
        short = policy_loss(logprobs, old, advantages, mask, level=level)[0]
        full = policy_loss(logprobs.float(), old.float(), advantages.float(), mask, level=level)[0]
        assert torch.equal(short, full)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(policy_loss(logprobs, old, advantages, mask, level=level)[0], full)
