"""The objectives beyond GRPO and PPO: exact values by hand, gradients, and what each is a special case of."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rolecall.algorithms import (
    AdaptiveKL,
    dpo_loss,
    entropy,
    estimate_advantages,
    full_kl,
    gae,
    group_advantages,
    importance_correction,
    kl,
    overlong_filter,
    overlong_penalty,
    policy_loss,
    reward_model_loss,
    sequence_logprobs,
    token_rewards,
    whiten,
)
from rolecall.errors import UserError
from tensors import batches, close, t

NAN = float("nan")


def v(*values):
    return torch.tensor(values, dtype=torch.float64)


def value_and_slope(logprobs, *arguments, **options):
    x = logprobs.detach().clone().requires_grad_()
    loss, metrics = policy_loss(x, *arguments, **options)
    loss.backward()
    return loss.detach(), x.grad, metrics


# Policy losses ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope", "clipped"),
    [
        (5.0, -1.0, 3.0, 0.0, 1),  # plain PPO would be 5 with slope 5
        (2.0, -1.0, 2.0, 2.0, 0),
        (0.5, -1.0, 0.8, 0.0, 1),  # the ordinary clip
        (5.0, 1.0, -1.2, 0.0, 1),
    ],
)
def test_dual_clip_by_hand(ratio, advantage, loss, slope, clipped):
    value, gradient, metrics = value_and_slope(t([math.log(ratio)]), t([0]), t([advantage]), t([1]), dual_clip=3.0)
    close(value, loss)
    close(gradient, [[slope]])
    assert metrics["clip_fraction"] == clipped


@given(batches(3))
def test_a_dual_clip_out_of_reach_is_ppo(batch):
    logprobs, old, advantages, mask = batch
    plain, dual = (value_and_slope(logprobs, old, advantages, mask, dual_clip=c) for c in (None, 1e9))
    assert torch.equal(plain[0], dual[0])
    assert torch.equal(plain[1], dual[1])


@pytest.mark.parametrize(("ratio", "weight"), [(0.5, 0.8), (1.1, 1.1), (3.0, 1.3)])
@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_cispo_by_hand(ratio, weight, advantage):
    """The slope is -weight A, never 0: PPO stops a token with ratio 3 and A 2."""
    logprobs = t([math.log(ratio)])
    value, gradient, metrics = value_and_slope(
        logprobs, t([0]), t([advantage]), t([1]), kind="cispo", clip_low=0.2, clip_high=0.3
    )
    close(value, -weight * advantage * math.log(ratio))
    close(gradient, [[-weight * advantage]])
    assert metrics["clip_fraction"] == (weight != ratio)


def test_cispo_without_a_lower_bound():
    """clip_low 1, as in the paper: ratio 0.1 keeps its own weight."""
    _, gradient, _ = value_and_slope(t([math.log(0.1)]), t([0]), t([1]), t([1]), kind="cispo", clip_low=1.0)
    close(gradient, [[-0.1]])


def test_reinforce_by_hand():
    """A log pi: -(2 log 0.5 - log 0.25) / 2 is 0, slopes -2/2 and 1/2; the old policy does not matter."""
    value, gradient, metrics = value_and_slope(
        t([0.5, 0.25]).log(), t([-7, -7]), t([2, -1]), t([1, 1]), kind="reinforce"
    )
    close(value, 0.0)
    close(gradient, [[-1, 0.5]])
    assert metrics["clip_fraction"] == 0


@given(batches(3))
def test_on_policy_all_kinds_and_levels_have_the_gradient_of_reinforce(batch):
    logprobs, _, advantages, mask = batch
    _, expected, _ = value_and_slope(logprobs, logprobs, advantages, mask, kind="reinforce")
    for kind in ("clip", "cispo"):
        for level in ("token", "sequence-token"):
            _, gradient, _ = value_and_slope(logprobs, logprobs, advantages, mask, kind=kind, level=level)
            close(gradient, expected)


def test_gspo_token_by_hand():
    """Ratios 2 and 1/2 have the geometric mean 1; the tokens' own gradients are -1 A_t / 2 then, not -2 and -1/2."""
    value, gradient, metrics = value_and_slope(
        t([2, 0.5]).log(), t([0, 0]), t([1, 3]), t([1, 1]), level="sequence-token"
    )
    close(value, -2)
    close(gradient, [[-0.5, -1.5]])
    assert metrics["ratio_max"] == pytest.approx(1)
    assert metrics["approx_kl"] == pytest.approx(0.25)  # of the tokens: (2 - 1 - ln 2 + 0.5 - 1 + ln 2) / 2


@given(batches(2), st.floats(0.05, 0.5))
def test_gspo_token_is_gspo_where_a_sequence_has_one_advantage(batch, bound):
    """2507.18071, section 4.3. Equal gradients need the sequence's mean, which gives each of its tokens 1 / length."""
    logprobs, old, mask = batch
    advantages = torch.linspace(-1, 1.5, len(mask), dtype=torch.float64)
    options = {"aggregate": "sequence-mean-token-mean", "clip_low": bound, "clip_high": bound}
    sequence = value_and_slope(logprobs, old, advantages, mask, level="sequence", **options)
    token = value_and_slope(logprobs, old, advantages, mask, level="sequence-token", **options)
    close(sequence[0], token[0])
    close(sequence[1], token[1])


@pytest.mark.parametrize(
    "options", [{"kind": "cispo"}, {"kind": "reinforce"}, {"level": "sequence-token"}, {"dual_clip": 3.0}]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masked_junk_reaches_no_objective(options, dtype):
    mask = t([1, 0, 1], [0, 0, 0])
    results = []
    for junk in (0.0, NAN):
        logprobs, old = t([-1, junk, -2], [junk] * 3, dtype=dtype), t([-1.5, junk, -2.1], [junk] * 3, dtype=dtype)
        results.append(value_and_slope(logprobs, old, t([1, junk, -1], [junk] * 3), mask, **options))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert results[1][1][0, 2] != 0
    assert results[0][2] == results[1][2]


@settings(max_examples=10)
@given(batches(3))
def test_gradient_of_the_dual_clip(batch):
    log_ratio, old, advantages, mask = batch
    kinks = [math.log(x) for x in (0.8, 1.2, 3.0)]
    for kink in kinks:
        log_ratio = torch.where((log_ratio - kink).abs() < 1e-3, log_ratio + 2e-3, log_ratio)
    x = (old + log_ratio).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: policy_loss(x, old, advantages, mask, dual_clip=3.0)[0], (x,))


# Corrections --------------------------------------------------------------------------------------------------------


def test_masked_importance_sampling_by_hand():
    """Ratios 2, 1/2, 6 and cap 3: the 6 teaches nothing; with a floor of 0.6 neither does the 1/2."""
    train, rollout, mask = t([0.5, 0.25, 0.75]).log(), t([0.25, 0.5, 0.125]).log(), t([1, 1, 1])
    close(importance_correction(train, rollout, mask, mode="mask", cap=3.0), [[2, 0.5, 0]])
    close(importance_correction(train, rollout, mask, mode="mask", cap=3.0, floor=0.6), [[2, 0, 0]])


def test_sequence_level_corrections_by_hand():
    """Products 2 * 1/2 * 6 = 6 and 1/2 * 1/2 = 1/4 (its third token is masked)."""
    ratios = t([2, 0.5, 6], [0.5, 0.5, NAN])
    mask, zero = t([1, 1, 1], [1, 1, 0]), torch.zeros(2, 3, dtype=torch.float64)
    truncated = importance_correction(ratios.log(), zero, mask, level="sequence", cap=3.0)
    close(truncated, [[3, 3, 3], [0.25, 0.25, 0]])
    masked = importance_correction(ratios.log(), zero, mask, mode="mask", level="sequence", cap=3.0)
    close(masked, [[0, 0, 0], [0.25, 0.25, 0]])


@given(batches(2), st.sampled_from(["truncate", "mask"]))
def test_engine_and_trainer_agreeing_gives_weight_1(batch, mode):
    logprobs, _, mask = batch
    for level in ("token", "sequence"):
        assert torch.equal(importance_correction(logprobs, logprobs, mask, mode=mode, level=level), mask.double())


@given(batches(4))
def test_decoupled_ppo_is_the_proximal_ratio_weighted_by_the_behaviour(batch):
    """2110.00641: J = (prox / behav) min(pi / prox A, clip(pi / prox) A), written out."""
    new, proximal, behaviour, advantages, mask = batch
    weights = importance_correction(proximal, behaviour, mask, cap=1e6)
    loss, _ = policy_loss(new, proximal, advantages, mask, weights=weights)
    ratio = (new - proximal).exp()
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    expected = ((proximal - behaviour).exp() * surrogate)[mask]
    close(loss, -expected.mean() if len(expected) else 0.0)


# Advantages and rewards ---------------------------------------------------------------------------------------------


def advantages(rewards, mask, **options):
    return estimate_advantages(rewards, mask, **options)[0]


reinforce_plus_plus = partial(advantages, baseline="none", scale="batch-std")
with_baseline = partial(advantages, baseline="mean", scale="batch-std")


def test_reinforce_plus_plus_by_hand():
    """Returns after KL: 1 - 0.5 - 0.5 = 0 and 1 - 0.5 = 0.5; 2 and 2. Mean 1.125, deviations whitened over tokens."""
    mask, penalty = t([1, 1], [1, 1]), t([0.5, 0.5], [0, 0])
    found = reinforce_plus_plus(v(1, 2), mask, kl=penalty)
    close(found, whiten(t([0, 0.5], [2, 2]), mask))
    deviation = ((1.125**2 + 0.625**2 + 2 * 0.875**2) / 3) ** 0.5
    close(found[0, 0], -1.125 / deviation)


def test_reinforce_plus_plus_discounts_over_action_tokens():
    close(
        reinforce_plus_plus(v(4, 0), t([1, 0, 1], [1, 1, 1]), gamma=0.5),
        whiten(t([2, 0, 4], [0, 0, 0]), t([1, 0, 1], [1, 1, 1])),
    )


def test_reinforce_plus_plus_baseline_takes_the_groups_mean_off_first():
    """Groups (0, 2) and (5, 5): -1, 1, 0, 0. GRPO would give the first group the same whatever the second did."""
    mask = t([1], [1], [1], [1])
    found = with_baseline(v(0, 2, 5, 5), mask, group_ids=torch.tensor([4, 4, 9, 9]))
    close(found[:, 0], v(-1, 1, 0, 0) / (2 / 3) ** 0.5)


def test_an_empty_response_takes_no_part_in_the_baseline():
    """Groups (0, 2) and (5, 5) again, with a response of reward 100 and no action token in the first."""
    mask, ids = t([1], [1], [0], [1], [1]), torch.tensor([4, 4, 4, 9, 9])
    found = with_baseline(v(0, 2, 100, 5, 5), mask, group_ids=ids)
    close(found[:, 0], v(-1, 1, 0, 0, 0) / (2 / 3) ** 0.5)


def test_reinforce_plus_plus_without_kl_whitens_the_reward():
    mask = t([1, 1, 0], [1, 1, 0])
    close(reinforce_plus_plus(v(1, 3), mask), whiten(t([1, 1, 0], [3, 3, 0]), mask))
    assert not reinforce_plus_plus(v(0.1, 0.1), mask).any()
    assert not reinforce_plus_plus(v(1, NAN), t([1, 1, 0], [0, 0, 0])).any()


@pytest.mark.parametrize(
    ("baseline", "scale", "expected"),
    [
        ("mean", "std", [-1 / 2**0.5, 1 / 2**0.5]),
        ("mean", "none", [-1, 1]),
        ("mean", "batch-std", [-((4 / 3) ** 0.5), 1 / 3**0.5]),  # tokens -1, 1, 1: mean 1/3, variance 4/3
        ("leave-one-out", "none", [-2, 2]),
        ("none", "none", [0, 2]),
    ],
)
def test_a_response_has_one_advantage_at_each_action_token(baseline, scale, expected):
    """Rewards 0 and 2; responses of one and of two action tokens, with a tool's token between."""
    mask, ids = t([1, 0, 0], [1, 0, 1]), torch.tensor([5, 5])
    found = advantages(v(0, 2), mask, group_ids=ids, baseline=baseline, scale=scale)
    one, other = expected
    close(found, t([one, 0, 0], [other, 0, other]))


def test_a_groups_kl_is_the_responses_sum_and_goes_before_the_baseline():
    """Rewards 1 and 1, KL 0.1 + 0.3 and 0 (NaN where a tool wrote): with beta 2 they are 0.2 and 1."""
    mask, drift = t([1, 0, 1], [1, 0, 1]), t([0.1, NAN, 0.3], [0, NAN, 0])
    loo = partial(advantages, group_ids=torch.tensor([5, 5]), baseline="leave-one-out", scale="none")
    close(loo(v(1, 1), mask, kl=drift, beta=2.0), t([-0.8, 0, -0.8], [0.8, 0, 0.8]))


def test_a_critics_advantages_are_gae_whitened_and_its_returns_are_not():
    mask, values = t([1, 1], [1, 0]), t([0.5, 0.25], [0.125, NAN])
    found, returns = estimate_advantages(v(1, 0), mask, values=values, baseline="critic", scale="batch-std", lam=0.9)
    raw, expected = gae(t([0, 1], [0, 0]), values, mask, lam=0.9)
    close(found, whiten(raw, mask))
    close(returns, expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"baseline": "mean"}, "give group_ids"),
        ({"baseline": "critic", "scale": "none"}, "needs the Critic's values"),
        ({"baseline": "none", "scale": "std"}, "take 'batch-std'"),
        ({"baseline": "median"}, "median"),
    ],
)
def test_an_advantage_that_cannot_be_is_refused(options, message):
    with pytest.raises(UserError, match=message):
        advantages(v(1, 2), t([1], [1]), **options)


def test_overlong_penalty_by_hand():
    """Limit 20, buffer 8: free to 12, half at 16, -1 from 20 on."""
    lengths = torch.tensor([0, 12, 14, 16, 20, 25])
    assert overlong_penalty(lengths, longest=20, buffer=8).tolist() == [0, 0, -0.25, -0.5, -1, -1]
    with pytest.raises(UserError, match="buffer is 0"):
        overlong_penalty(lengths, longest=20, buffer=0)


def test_overlong_filter_takes_truncated_responses_out_of_the_loss_but_not_out_of_their_group():
    """Rewards 1, 0, 0 (cut off): the baseline is 1/3 still. The loss is the mean over the other two."""
    mask, truncated = t([1, 1], [1, 0], [1, 1]), torch.tensor([0, 0, 1])
    kept = overlong_filter(mask, truncated)
    assert kept.tolist() == [[True, True], [True, False], [False, False]]
    advantages = group_advantages(v(1, 0, 0), torch.tensor([1, 1, 1]), scale="none")
    zero = torch.zeros(3, 2, dtype=torch.float64)
    close(policy_loss(zero, zero, advantages, kept)[0], -(2 * 2 / 3 - 1 / 3) / 3)


# KL over the vocabulary, entropy, the controller --------------------------------------------------------------------

POLICY, REFERENCE = [0.5, 0.3, 0.2], [0.25, 0.25, 0.5]
EXACT = 0.5 * math.log(2) + 0.3 * math.log(1.2) + 0.2 * math.log(0.4)


def test_full_kl_by_hand():
    """dKL / dlogit_i = p_i (log(p_i / q_i) - KL)."""
    logits = t([POLICY]).log().requires_grad_()
    value = full_kl(logits, t([REFERENCE]).log())
    value.sum().backward()
    close(value.detach(), [[EXACT]])
    gaps = [math.log(2), math.log(1.2), math.log(0.4)]
    close(logits.grad, [[[p * (gap - EXACT) for p, gap in zip(POLICY, gaps, strict=True)]]])


def test_full_kl_is_what_k1_estimates():
    logprobs, ref = t(POLICY).log(), t(REFERENCE).log()
    close((t(POLICY) * kl(logprobs, ref, estimator="k1")).sum(), full_kl(logprobs[None], ref[None])[0, 0].item())


def test_entropy_by_hand():
    """Two equal tokens and an impossible one: log 2. The gradient pulls towards equal, and is 0 there."""
    logits = t([[0, 0, -math.inf], [0, 0, 0]]).requires_grad_()
    value = entropy(logits)
    value.sum().backward()
    close(value.detach(), [[math.log(2), math.log(3)]])
    close(logits.grad, torch.zeros(1, 2, 3))


def test_impossible_and_masked_tokens_make_no_nan():
    logits = t([[0, 1, -math.inf], [NAN, NAN, NAN]]).requires_grad_()
    mask = t([1, 0])
    value = full_kl(logits, t([[0, 0, -math.inf], [NAN, NAN, NAN]]), mask=mask) + entropy(logits, mask=mask)
    value.sum().backward()
    close(value.detach(), [[math.log(2), 0]])  # KL + entropy = minus E log q, and q is 1/2 of two tokens
    assert torch.isfinite(logits.grad).all()
    assert not logits.grad[0, 1].any()


@settings(max_examples=10)
@given(st.integers(0, 2**31))
def test_gradients_of_full_kl_and_entropy(seed):
    generator = torch.Generator().manual_seed(seed)
    logits, ref = torch.randn(2, 2, 2, 4, generator=generator, dtype=torch.float64)
    mask = t([1, 0], [1, 1])
    assert torch.autograd.gradcheck(lambda x: full_kl(x, ref, mask=mask), (logits.requires_grad_(),))
    assert torch.autograd.gradcheck(lambda x: entropy(x, mask=mask), (logits,))


@pytest.mark.parametrize(("measured", "beta"), [(0.16, 0.4), (0.15, 0.2), (0.1, 0.2), (0.067, 0.2), (0.06, 0.1)])
def test_the_2x_rule(measured, beta):
    """Target 0.1: doubled above 0.15, halved below 0.0667."""
    assert AdaptiveKL(0.2, target=0.1, horizon=1, rule="double").update(measured, 8) == beta


def test_an_unknown_rule_is_refused():
    with pytest.raises(UserError, match="'double'"):
        AdaptiveKL(0.2, 0.1, 1, rule="doubled")


# Preferences --------------------------------------------------------------------------------------------------------


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def test_reward_model_loss_by_hand():
    """Gaps 1 and -2, and a tie."""
    chosen, rejected = v(2, 0, 1).requires_grad_(), v(1, 2, 1)
    loss, metrics = reward_model_loss(chosen, rejected)
    loss.backward()
    close(loss.detach(), -(math.log(sigmoid(1)) + math.log(sigmoid(-2)) + math.log(0.5)) / 3)
    close(chosen.grad, [-sigmoid(-1) / 3, -sigmoid(2) / 3, -0.5 / 3])
    assert metrics["accuracy"] == pytest.approx(1 / 3)
    assert metrics["margin"] == pytest.approx(-1 / 3)


def test_the_margin_asks_for_a_larger_gap():
    close(reward_model_loss(v(2), v(1), margin=v(1))[0], math.log(2))
    with pytest.raises(UserError, match=r"\(2,\)"):
        reward_model_loss(v(1, 2), v(1))


def test_dpo_by_hand():
    """Chosen rose by 1 against the Reference, rejected fell by 2: h = 3; beta 1/2."""
    arguments = v(-4).requires_grad_(), v(-7), v(-5), v(-5)
    loss, metrics = dpo_loss(*arguments, beta=0.5)
    loss.backward()
    close(loss.detach(), -math.log(sigmoid(1.5)))
    close(arguments[0].grad, [-0.5 * sigmoid(-1.5)])
    assert (metrics["chosen_reward"], metrics["rejected_reward"], metrics["margin"]) == (0.5, -1.0, 1.5)
    assert metrics["accuracy"] == 1
    smoothed = dpo_loss(*arguments, beta=0.5, label_smoothing=0.1)[0]
    close(smoothed.detach(), -0.9 * math.log(sigmoid(1.5)) - 0.1 * math.log(sigmoid(-1.5)))


def test_ipo_by_hand():
    """h = 3, 1 / (2 beta) = 1: (3 - 1)^2, slope 4; it wants the gap 1 and no more. Smoothed: 0.9 * 4 + 0.1 * 16."""
    chosen = v(-4).requires_grad_()
    arguments = chosen, v(-7), v(-5), v(-5)
    loss, _ = dpo_loss(*arguments, beta=0.5, kind="ipo")
    loss.backward()
    close(loss.detach(), 4)
    close(chosen.grad, [4])
    close(dpo_loss(*arguments, beta=0.5, kind="ipo", label_smoothing=0.1)[0].detach(), 5.2)
    close(dpo_loss(v(-5), v(-6), v(-5), v(-5), beta=0.5, kind="ipo")[0], 0.0)


def test_at_the_reference_dpo_is_log_2():
    close(dpo_loss(v(-3, -4), v(-5, -6), v(-3, -4), v(-5, -6))[0], math.log(2))


def test_dpo_is_bradley_terry_on_the_implied_rewards():
    chosen, rejected, ref_chosen, ref_rejected = torch.randn(
        4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    dpo, _ = dpo_loss(chosen, rejected, ref_chosen, ref_rejected, beta=0.3)
    close(dpo, reward_model_loss(0.3 * (chosen - ref_chosen), 0.3 * (rejected - ref_rejected))[0].item())


def test_the_reference_of_a_pair_gets_no_gradient():
    columns = [v(-4).requires_grad_() for _ in range(4)]
    dpo_loss(*columns)[0].backward()
    close(columns[0].grad, [-0.05])  # -beta sigmoid(0)
    assert columns[2].grad is columns[3].grad is None


def test_pairs_add_up_over_micro_batches():
    columns = torch.randn(4, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for function, arguments in ((dpo_loss, columns), (reward_model_loss, columns[:2])):
        whole, metrics = function(*arguments)
        parts = [function(*(x[part] for x in arguments), total=5) for part in (slice(0, 2), slice(2, 5))]
        close(parts[0][0] + parts[1][0], whole.item())
        for name, value in metrics.items():
            assert parts[0][1][name] + parts[1][1][name] == pytest.approx(value)


def test_a_response_is_its_action_tokens():
    logprobs, mask = t([-1, NAN, -3], [NAN] * 3), t([1, 0, 1], [0, 0, 0])
    close(sequence_logprobs(logprobs, mask), [-4, 0])
    close(sequence_logprobs(logprobs, mask, length_normalized=True), [-2, 0])


def test_preference_mistakes_are_refused():
    with pytest.raises(UserError, match="'sigmoid'"):
        dpo_loss(v(1), v(1), v(1), v(1), kind="sigmoide")
    with pytest.raises(UserError, match=r"0\.5"):
        dpo_loss(v(1), v(1), v(1), v(1), label_smoothing=0.5)
    with pytest.raises(UserError, match="differ in shape"):
        dpo_loss(v(1), v(1, 2), v(1), v(1))


@settings(max_examples=10)
@given(st.integers(0, 2**31), st.sampled_from(["sigmoid", "ipo"]))
def test_gradients_of_the_preference_losses(seed, kind):
    columns = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    chosen, rejected = (x.clone().requires_grad_() for x in columns[:2])

    def dpo(chosen, rejected):
        return dpo_loss(chosen, rejected, *columns[2:], kind=kind, label_smoothing=0.1)[0]

    assert torch.autograd.gradcheck(dpo, (chosen, rejected))
    assert torch.autograd.gradcheck(lambda c, r: reward_model_loss(c, r, margin=0.5)[0], (chosen, rejected))


def test_token_rewards_take_the_kl_off():
    penalty, mask = t([0.1, 0.2, 0.3], [0, 0, 0]), t([1, 1, 1], [1, 1, 1])
    assert token_rewards(v(1, 1), mask, penalty, 2.0)[0].sum().item() == pytest.approx(1 - 2 * 0.6)
