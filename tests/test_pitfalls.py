"""Silent bugs of this field, one section a kind: training goes on and the curve is merely worse.

Each kind was reported against a public framework; each right value here is worked out by hand. Kinds that belong to
another part are tested there:

8   the trainer ignores the sampling's settings
        test_config.py::test_training_refuses_what_is_for_evaluation
        test_packing.py::test_temperature_divides_the_logits
        test_engines_conform.py::test_log_probabilities_are_those_of_the_distribution_sampled_from
11  padding, positions, attention between samples
        test_packing.py::test_log_probabilities_are_the_same_in_any_company
12  tokens change when their text is encoded again
        test_data.py::test_prompts_are_rendered_and_tokenised_once
13  generation from old weights after a sync
        test_sync.py::test_shared_weights_are_the_actors_own
        test_engines_conform.py::test_new_weights_are_used_at_once_and_the_old_ones_come_back
        test_checks.py::test_older_weights_stop_any_step
14  an engine that wakes with something missing
        test_engines_conform.py::test_after_sleeping_and_a_sync_the_output_is_as_before
15  a hang without a name
        test_cluster.py::test_a_call_that_hangs_ends_at_its_time_out
16  a dead process reads as finished
        test_cluster.py::test_a_killed_process_is_named_at_once
        test_replicas.py::test_killed_while_generating_the_same_samples_come_and_none_is_lost_or_doubled
19  a resumed run skips or repeats prompts
        test_train.py::test_a_killed_run_resumes_to_the_same_result
        test_data.py::test_killed_anywhere_and_restored_it_goes_on_the_same
20  a verifier that fails scores 0
        test_cluster.py::test_a_reward_that_hangs_is_ended_and_named
        test_rewards.py::test_row_without_a_number_is_an_error_not_a_zero
21  dynamic sampling never ends
        test_stages.py::test_dynamic_sampling_is_bounded_and_goes_on_with_what_there_is
22  versions that do not cover a response (and below)
        test_checks.py::test_version_spans_that_miss_a_token_stop_the_run
24  bfloat16 loses small updates
        test_training.py::test_a_thousand_steps_of_1e_6_move_a_weight
25  tokens x vocabulary fill the memory
        test_training.py::test_nothing_kept_has_the_vocabulary_in_it
        test_memory.py::test_no_tensor_has_tokens_times_vocabulary_elements
30  host memory grows step by step
        test_memory.py::test_host_memory_is_flat_over_200_updates
31  versions that cannot be installed together: ``make test`` resolves and installs all of constraints.txt
"""

import math
import pickle
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from rolecall.algorithms import (
    AdaptiveKL,
    aggregate,
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
from rolecall.config import Config
from rolecall.errors import UserError
from rolecall.roles.actor import Actor
from rolecall.samples import Sample
from rolecall.training import sharding
from rolecall.training.packing import micro_batches
from test_roles import assert_same, gradients
from training_samples import sample
from training_samples import uneven as uneven_samples

NAN = float("nan")


def t(*rows, dtype=torch.float32):
    return torch.tensor(rows, dtype=dtype)


def equal(actual, expected, tolerance=1e-6):
    torch.testing.assert_close(actual.double(), torch.as_tensor(expected).double(), rtol=tolerance, atol=tolerance)


def test_the_tests_named_above_are_there():
    named = re.findall(r"(test_\w+\.py)::(test_\w+)", __doc__)
    assert len(named) > 10
    for file, name in named:
        assert f"def {name}(" in (Path(__file__).parent / file).read_text(), f"{file}::{name}"


# 1: GAE walks through masked tokens. -------------------------------------------------------------------------------


@pytest.mark.parametrize("junk", [0.0, 1e30, math.inf, NAN])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_1_gae_skips_what_a_tool_wrote(junk, dtype):
    """gamma 1, lambda 1/2. Last action: delta = 1 - 1/4 = 3/4. First: delta = 1/4 - 1/2, A = -1/4 + 3/4 / 2 = 1/8."""
    mask = t([1, 0, 0, 1, 0])
    rewards, values = t([0, junk, junk, 1, junk], dtype=dtype), t([0.5, junk, junk, 0.25, junk], dtype=dtype)
    advantages, returns = gae(rewards, values, mask, lam=0.5)
    equal(advantages, [[0.125, 0, 0, 0.75, 0]])
    equal(returns, [[0.625, 0, 0, 1.0, 0]])


def test_1_masked_tokens_do_not_discount():
    """gamma 1/2, lambda 1: the return of the first action is 1/2, however many masked tokens lie between."""
    for gap in range(4):
        mask = torch.tensor([[1] + [0] * gap + [1]])
        rewards = torch.zeros(mask.shape)
        rewards[0, -1] = 1.0
        assert gae(rewards, torch.zeros(mask.shape), mask, gamma=0.5, lam=1.0)[1][0, 0] == 0.5


def test_1_gae_is_the_same_wherever_the_padding_lies():
    rewards, values, mask = t([0, 0, 1.0]), t([0.1, 0.2, 0.4]), t([1, 1, 1])
    alone = gae(rewards, values, mask)[0][0]
    for left, right in ((0, 2), (2, 0), (3, 1)):
        padded = [torch.nn.functional.pad(x, (left, right), value=value) for x, value in ((rewards, 9), (values, 9))]
        inside = gae(*padded, torch.nn.functional.pad(mask, (left, right)))[0][0]
        assert torch.equal(inside[left : left + 3], alone)
        assert inside.count_nonzero() == 3


def test_1_gae_of_nothing():
    for shape in ((0, 3), (2, 0), (0, 0)):
        assert all(x.shape == shape for x in gae(torch.zeros(shape), torch.zeros(shape), torch.ones(shape)))
    assert all(not x.any() for x in gae(t([NAN, NAN]), t([NAN, NAN]), t([0, 0])))


# 2: the reward lands on padding. -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        ([1, 1, 1, 0, 0], [0, 0, 7, 0, 0]),  # right-padded
        ([0, 0, 1, 1, 1], [0, 0, 0, 0, 7]),  # left-padded
        ([0, 1, 1, 0, 0], [0, 0, 7, 0, 0]),  # both
        ([1, 0, 0, 1, 0], [0, 0, 0, 7, 0]),  # a tool's tokens in between
        ([1, 1, 0, 0, 0], [0, 7, 0, 0, 0]),  # ends with a tool's tokens
        ([1, 0, 0, 0, 0], [7, 0, 0, 0, 0]),  # one token
        ([0, 0, 0, 0, 0], [0, 0, 0, 0, 0]),  # none
    ],
)
@pytest.mark.parametrize("kind", [torch.bool, torch.int64, torch.float32])
def test_2_the_reward_is_on_the_last_action_token(mask, expected, kind):
    assert token_rewards(torch.tensor([7.0]), torch.tensor([mask]).to(kind)).tolist() == [expected]


def test_2_rows_of_a_batch_keep_their_own_reward():
    mask = t([1, 1, 0], [0, 0, 1], [0, 0, 0])
    assert token_rewards(torch.tensor([1.0, 2.0, NAN]), mask).tolist() == [[0, 1, 0], [0, 0, 2], [0, 0, 0]]


# 3: NaN in a masked slot poisons a loss, forward or backward. ------------------------------------------------------

JUNK_MASK = t([1, 0, 1, 0], [0, 0, 0, 0])


def junk(dtype=torch.float32):
    """Two rows, finite only where the mask is set; fresh leaves."""
    return t([-1, NAN, -2, math.inf], [NAN] * 4, dtype=dtype).requires_grad_()


LOSSES = {
    "policy, token": lambda x: policy_loss(x, x.detach() + 0.1, t([1, NAN, -1, NAN], [NAN] * 4), JUNK_MASK)[0],
    "policy, sequence": lambda x: policy_loss(x, x.detach(), torch.tensor([1.0, NAN]), JUNK_MASK, level="sequence")[0],
    "policy, weighted": lambda x: policy_loss(
        x, x.detach(), torch.tensor([1.0, NAN]), JUNK_MASK, weights=t([1, NAN, 1, NAN], [NAN] * 4)
    )[0],
    "value": lambda x: value_loss(x, x.detach() + 1, x.detach() + 2, JUNK_MASK)[0],
    "k1": lambda x: masked_mean(kl(x, x.detach() - 1, estimator="k1", mask=JUNK_MASK), JUNK_MASK),
    "k2": lambda x: masked_mean(kl(x, x.detach() - 1, estimator="k2", mask=JUNK_MASK), JUNK_MASK),
    "k3": lambda x: masked_mean(kl(x, x.detach() - 1, estimator="k3", mask=JUNK_MASK), JUNK_MASK),
    "aggregate": lambda x: aggregate(x, JUNK_MASK, "sequence-mean-token-mean"),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_3_masked_junk_changes_no_loss_and_no_gradient(name, dtype):
    dirty = junk(dtype)
    clean = t([-1, 0, -2, 0], [0] * 4, dtype=dtype).requires_grad_()
    losses = [LOSSES[name](x) for x in (dirty, clean)]
    for loss in losses:
        loss.backward()
    assert torch.equal(*losses)
    assert torch.equal(dirty.grad, clean.grad)
    assert dirty.grad[0, ::2].all()
    assert not dirty.grad[0, 1::2].any()
    assert not dirty.grad[1].any()


def test_3_masked_junk_changes_no_advantage_and_no_weight():
    x = junk().detach()
    equal(whiten(x, JUNK_MASK), [[0.5**0.5, 0, -(0.5**0.5), 0], [0, 0, 0, 0]])
    equal(importance_correction(x, x - 0.5, JUNK_MASK), [[math.exp(0.5), 0, math.exp(0.5), 0], [0, 0, 0, 0]])


@pytest.mark.parametrize("gap", [60.0, 1e4, 1e30])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("advantage", [0.0, 1.0, -1.0])
def test_3_no_finite_input_makes_a_nan(gap, level, advantage):
    """exp overflows float32 beyond 88; an infinite ratio times a zero advantage or gradient would be NaN."""
    for sign in (1, -1):
        logprobs = t([sign * gap, -1.0]).requires_grad_()
        loss, _ = policy_loss(logprobs, t([0.0, -1.0]), t([advantage, 1.0]), t([1, 1]), level=level)
        loss = loss + masked_mean(kl(logprobs, t([0.0, -1.0]), estimator="k3"), t([1, 1]))
        loss.backward()
        assert torch.isfinite(loss)
        assert torch.isfinite(logprobs.grad).all()


# 4: a response with no action tokens. ------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum-norm"])
def test_4_an_empty_response_changes_no_loss(how):
    full = t([1.0, 2.0], [3.0, 5.0])
    assert aggregate(torch.cat([full, t([8.0, 9.0])]), t([1, 1], [1, 1], [0, 0]), how, norm=4) == aggregate(
        full, t([1, 1], [1, 1]), how, norm=4
    )


def test_4_an_empty_response_changes_no_advantage():
    """Rewards 0, 1, 2 have mean 1 and deviation 1. The fourth member, with no action token, takes no part."""
    rewards, ids = torch.tensor([0.0, 100.0, 1.0, 2.0]), torch.tensor([5, 5, 5, 5])
    assert group_advantages(rewards, ids, mask=torch.tensor([1, 0, 1, 1])).tolist() == [-1, 0, 0, 1]
    rewards[1] = NAN
    assert group_advantages(rewards, ids, mask=torch.tensor([1, 0, 1, 1])).tolist() == [-1, 0, 0, 1]


def test_4_a_whole_batch_of_empty_responses_is_zero_and_differentiable():
    logprobs = junk()
    mask = torch.zeros(2, 4)
    for level in ("token", "sequence"):
        loss, metrics = policy_loss(logprobs, logprobs.detach(), torch.tensor([1.0, 1.0]), mask, level=level)
        loss.backward()
        assert loss == 0
        assert metrics["approx_kl"] == metrics["clip_fraction"] == 0
    assert not logprobs.grad.any()
    assert value_loss(logprobs, logprobs, logprobs, mask)[0] == 0
    assert not whiten(logprobs, mask).any()
    assert not group_advantages(torch.tensor([NAN, 1.0]), torch.tensor([0, 0]), mask=torch.tensor([0, 0])).any()


# 5: a flat group's float noise is divided by a tiny deviation. -----------------------------------------------------


@pytest.mark.parametrize("value", [0.0, 0.1, 1 / 3, -0.7, 1e-30, 123456.789, 1e30])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 64, 1000])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_5_a_flat_group_is_exactly_zero(value, size, dtype):
    rewards = torch.full((size,), value, dtype=dtype)
    ids = torch.zeros(size, dtype=torch.long)
    for scale in ("std", "none"):
        for baseline in ("mean", "leave-one-out"):
            assert not group_advantages(rewards, ids, scale=scale, baseline=baseline).any()


def test_5_equal_rewards_that_were_summed_in_another_order_are_flat():
    rewards = torch.tensor([0.1 + 0.2, 0.3, 0.3], dtype=torch.float64)
    assert rewards[0] != rewards[1]
    assert not group_advantages(rewards, torch.zeros(3, dtype=torch.long)).any()


def test_5_a_small_real_difference_is_not_flat():
    rewards = torch.tensor([1.0, 1.0, 1.0 + 1e-5])
    equal(group_advantages(rewards, torch.zeros(3, dtype=torch.long)), [-(3**-0.5), -(3**-0.5), 2 * 3**-0.5])


def test_5_whitening_equal_advantages_is_exactly_zero():
    for size in (1, 2, 3, 1000):
        assert not whiten(torch.full((1, size), 0.1), torch.ones(1, size)).any()


# 6: groups keyed by prompt text or position. -----------------------------------------------------------------------


def test_6_groups_are_their_ids_in_any_order():
    """Group 7 earned 0, 2 and group 3 earned 10, 10, 40; the same prompt may stand behind both."""
    rewards, ids = torch.tensor([0.0, 10.0, 2.0, 10.0, 40.0]), torch.tensor([7, 3, 7, 3, 3])
    expected = torch.tensor([-(0.5**0.5), -(3**-0.5), 0.5**0.5, -(3**-0.5), 2 * 3**-0.5])
    equal(group_advantages(rewards, ids), expected)
    order = torch.tensor([4, 0, 3, 1, 2])
    equal(group_advantages(rewards[order], ids[order]), expected[order])


def test_6_filtering_one_group_leaves_the_others_as_they_are():
    rewards, ids = torch.tensor([0.0, 10.0, 2.0, 10.0, 40.0]), torch.tensor([7, 3, 7, 3, 3])
    kept = ids == 3
    assert torch.equal(group_advantages(rewards[kept], ids[kept]), group_advantages(rewards, ids)[kept])


def test_6_ids_may_be_large_or_negative():
    ids = torch.tensor([2**62, -5, 2**62, -5])
    assert group_advantages(torch.tensor([0.0, 1.0, 2.0, 3.0]), ids, scale="none").tolist() == [-1, -1, 1, 1]


# 7: accumulation, data parallelism or uneven lengths change the loss. ----------------------------------------------

LENGTHS = (5, 1, 3, 4)
HOWS = ("token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum-norm")


def uneven():
    """Four responses of 5, 1, 3 and 4 tokens; weights of a one-layer policy that all of them share."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(4, 5, 3, generator=generator, dtype=torch.float64)
    mask = torch.arange(5) < torch.tensor(LENGTHS)[:, None]
    return features, mask, torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)


def gradient(rows, how, total):
    """Of the rows' loss, padded to their own longest response only."""
    features, mask, advantages = (x[rows] for x in uneven())
    width = int(mask.sum(-1).max())
    weight = torch.ones(3, dtype=torch.float64, requires_grad=True)
    logprobs = (features[:, :width] @ weight).tanh()
    old = torch.full_like(logprobs, 0.1).detach()
    loss, metrics = policy_loss(logprobs, old, advantages, mask[:, :width], aggregate=how, total=total, norm=8)
    value, _ = value_loss(logprobs, old, old + 1, mask[:, :width], total=sum(LENGTHS))
    (loss + value).backward()
    return weight.grad, loss.detach(), metrics


def count(how):
    return sum(LENGTHS) if how == "token-mean" else len(LENGTHS)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize(
    "split", [[[0], [1], [2], [3]], [[0, 1], [2, 3]], [[3, 1], [0, 2]], [[1], [0, 2, 3]], [[0, 1, 2, 3]]]
)
def test_7_micro_batches_add_up_to_the_whole(how, split):
    whole, loss, metrics = gradient([0, 1, 2, 3], how, None)
    parts = [gradient(rows, how, count(how)) for rows in split]
    torch.testing.assert_close(sum(part[0] for part in parts), whole)
    torch.testing.assert_close(sum(part[1] for part in parts), loss)
    for name in ("loss", "clip_fraction", "approx_kl"):
        assert sum(part[2][name] for part in parts) == pytest.approx(metrics[name])
    assert max(part[2]["ratio_max"] for part in parts) == metrics["ratio_max"]


def _rank(rank: int, port: int, folder: str, configs: list[Config], samples: list[Sample]) -> None:
    sharding.meet(rank, "127.0.0.1", port, 2, seconds=60)
    found = [gradients(Actor(config), samples) for config in configs]
    torch.save(
        [{name: sharding.whole(gradient) for name, gradient in one.items()} for one in found], f"{folder}/{rank}"
    )
    dist.destroy_process_group()


def test_7_two_processes_of_uneven_load_and_any_accumulation_give_the_actors_gradient_of_one(tmp_path, tiny_path):
    """Four samples here and eight there; micro-batches of everything, of a few samples, of one."""
    samples = uneven_samples(groups=4, size=3, seed=9)
    assert [len(sharding.share(samples, rank, 2)) for rank in range(2)] == [4, 8]
    configs = [
        Config(
            model={"path": str(tiny_path), "dtype": "float32"},
            rollout={"max_tokens": 8},
            actor={"micro_tokens": micro_tokens},
            algorithm={"aggregate": how, "kl_beta": 0.1},
        )
        for how in HOWS
        for micro_tokens in (10_000, 25, 1)
    ]
    store = sharding.open_store()
    mp.spawn(_rank, args=(store.port, str(tmp_path), configs, samples), nprocs=2)
    both = [torch.load(tmp_path / str(rank)) for rank in range(2)]
    for i in range(0, len(configs), 3):
        whole = gradients(Actor(configs[i]), samples)
        assert max(g.abs().max() for g in whole.values()) > 1e-3
        for rank in both:
            for split in rank[i : i + 3]:
                assert_same(split, whole, 1e-6)


def test_7_a_mean_of_means_is_another_loss():
    """Guards the tests above: on these lengths the naive average of micro-batch means differs."""
    values, mask = t([4, 4, 4], [1, 0, 0]), t([1, 1, 1], [1, 0, 0])
    assert aggregate(values, mask) == 13 / 4
    assert (aggregate(values[:1], mask[:1]) + aggregate(values[1:], mask[1:])) / 2 == 10 / 4


# 9: importance correction of the wrong pair, or of the wrong shape. ------------------------------------------------


def test_9_trainer_over_rollout_by_hand():
    """The trainer gave 1/2, 1/4, 3/4, the engine 1/4, 1/2, 1/8: ratios 2, 1/2, 6, and 6 is cut at 3."""
    trainer, engine = t([0.5, 0.25, 0.75]).log(), t([0.25, 0.5, 0.125]).log()
    equal(importance_correction(trainer, engine, t([1, 1, 1]), cap=3.0), [[2, 0.5, 3]])
    equal(importance_correction(engine, trainer, t([1, 1, 1]), cap=3.0), [[0.5, 2, 1 / 6]])
    equal(importance_correction(trainer, engine, t([1, 0, 1]), mode="none"), [[1, 0, 1]])


def test_9_the_weight_has_no_gradient_and_multiplies_after_the_clip():
    """rho 2 is clipped to 1.2, times weight 1.5, times advantage 1: loss -1.8, and no gradient flows."""
    logprobs = t([0.5]).log().requires_grad_()
    weights = importance_correction(t([0.375]).log(), t([0.25]).log(), t([1]))
    loss, _ = policy_loss(logprobs, t([0.25]).log(), t([1.0]), t([1]), weights=weights)
    loss.backward()
    equal(loss.detach(), -1.8)
    assert logprobs.grad.item() == 0
    assert not weights.requires_grad


def test_9_wrong_shapes_are_refused():
    square, column = torch.zeros(3, 3), torch.zeros(3, 1)
    mask = torch.ones(3, 3)
    with pytest.raises(UserError, match=r"\(3, 1\)"):
        importance_correction(square, column, mask)
    with pytest.raises(UserError, match=r"\(3, 1\)"):
        policy_loss(square, square, column, mask)
    with pytest.raises(UserError, match=r"\(3,\)"):
        policy_loss(square, square, square, mask, weights=torch.ones(3))
    with pytest.raises(UserError, match=r"\(2, 3\)"):
        value_loss(square, square, torch.zeros(2, 3), mask)
    with pytest.raises(UserError, match=r"\(2,\)"):
        group_advantages(torch.zeros(3), torch.zeros(2, dtype=torch.long))


def test_9_one_advantage_a_sequence_is_never_taken_for_one_a_position():
    """B = T = 2: broadcasting would give token (0, 1) the advantage of sequence 1."""
    zeros = torch.zeros(2, 2, requires_grad=True)
    policy_loss(zeros, torch.zeros(2, 2), torch.tensor([1.0, 5.0]), torch.ones(2, 2))[0].backward()
    assert zeros.grad.tolist() == [[-0.25, -0.25], [-1.25, -1.25]]


# 10: a KL estimator with the right value and the wrong gradient; a coefficient silently ignored. -------------------

POLICY, REFERENCE = [0.5, 0.3, 0.2], [0.25, 0.25, 0.5]


def expected_kl(estimator):
    """E over the policy's own samples, on three tokens: the value, and the gradient the estimate gives the logits."""
    logits = torch.tensor(POLICY, dtype=torch.float64).log().requires_grad_()
    logprobs = logits.log_softmax(-1)
    estimate = kl(logprobs[None], torch.tensor([REFERENCE], dtype=torch.float64).log(), estimator=estimator)[0]
    expectation = (torch.tensor(POLICY, dtype=torch.float64) * estimate).sum()  # the samples carry no gradient
    expectation.backward()
    return expectation.item(), logits.grad


def exact_kl(forward=True):
    logits = torch.tensor(POLICY, dtype=torch.float64).log().requires_grad_()
    p, q = logits.softmax(-1), torch.tensor(REFERENCE, dtype=torch.float64)
    value = (p * (p / q).log()).sum() if forward else (q * (q / p).log()).sum()
    value.backward()
    return value.item(), logits.grad


def test_10_values_against_the_exact_kl():
    gaps = [math.log(2), math.log(1.2), math.log(0.4)]
    exact = 0.5 * gaps[0] + 0.3 * gaps[1] + 0.2 * gaps[2]  # 0.2180
    assert exact_kl()[0] == pytest.approx(exact)
    assert expected_kl("k1")[0] == pytest.approx(exact)
    assert expected_kl("k3")[0] == pytest.approx(exact)
    biased = (0.5 * gaps[0] ** 2 + 0.3 * gaps[1] ** 2 + 0.2 * gaps[2] ** 2) / 2  # 0.2091
    assert expected_kl("k2")[0] == pytest.approx(biased)


def test_10_gradients_against_the_exact_kl():
    """dKL/dlogit_i = p_i (log(p_i / q_i) - KL): the first is (0.6931 - 0.2180) / 2."""
    exact = exact_kl()[1]
    assert exact[0].item() == pytest.approx((math.log(2) - exact_kl()[0]) / 2)
    torch.testing.assert_close(expected_kl("k2")[1], exact)
    torch.testing.assert_close(expected_kl("k1")[1], torch.zeros(3, dtype=torch.float64))
    torch.testing.assert_close(expected_kl("k3")[1], exact_kl(forward=False)[1])  # p - q, another divergence's


def test_10_the_coefficient_reaches_the_reward():
    """KL 0.1 and 0.3 a token at beta 2, reward 1 on the last: -0.2 and 0.4."""
    equal(token_rewards(torch.tensor([1.0]), t([1, 1, 0]), kl=t([0.1, 0.3, NAN]), beta=2.0), [[-0.2, 0.4, 0]])


def test_10_the_controller_pushes_against_the_drift():
    for measured, expected in ((0.2, 0.101), (0.1, 0.1), (0.05, 0.099), (0.105, 0.10025), (-3.0, 0.099)):
        assert AdaptiveKL(0.1, target=0.1, horizon=1000).update(measured, 50) == pytest.approx(expected)


def test_10_a_small_kl_is_no_rounding():
    """exp(-d) - 1 + d in float32 is off by 6e-8 and often negative, where the KL of a fresh policy is d^2 / 2."""
    d = torch.cat([sign * torch.logspace(-9, 1, 1000) for sign in (1, -1)])[None]
    found = kl(d, torch.zeros_like(d), estimator="k3")
    assert (found >= 0).all()
    small = (d.abs() > 1e-3) & (d.abs() < 1e-2)
    exact = torch.expm1(-d.double()) + d.double()
    torch.testing.assert_close(found[small].double(), exact[small], rtol=1e-3, atol=0)
    _, metrics = policy_loss(torch.full((1, 4), -1 + 1e-3), torch.full((1, 4), -1.0), torch.ones(1), torch.ones(1, 4))
    assert metrics["approx_kl"] == pytest.approx(5e-7, rel=1e-2)


# 22: one version number for a response that several versions made. -------------------------------------------------


@pytest.mark.parametrize("packed", [True, False])
def test_22_a_change_of_weights_inside_a_response_stays_with_its_tokens(packed):
    """Two tokens by version 4, one by version 5: spans and log-probabilities survive processes and packing."""
    resumed = sample(7, 0, response=[9, 10, 1], logprobs=[-0.5, -0.25, -2.0])
    resumed.versions = [(0, 2, 4), (2, 3, 5)]
    sent = pickle.loads(pickle.dumps([sample(7, 1), resumed, sample(8, 0, prompt=[6])]))
    found = {}
    for micro in micro_batches(sent, 100, packed=packed):
        rows = zip(micro.samples, micro.field("logprobs"), strict=True)
        found |= {(s.group_id, s.index): (s.versions, row) for s, row in rows}
    versions, logprobs = found[7, 0]
    assert versions == [(0, 2, 4), (2, 3, 5)]
    assert logprobs.tolist() == [-0.5, -0.25, -2.0]
    assert found[7, 1][0] == [(0, 3, 0)]


# 32: tokens that a tool or the environment wrote count in KL or loss. ----------------------------------------------


def test_32_tool_tokens_count_nowhere():
    """Doubling a tool's answer in the middle of a response changes no loss, no advantage and no KL."""
    short = t([1, 1, 0, 1])
    long = t([1, 1, 0, 0, 1])
    logprobs, old, ref = t([-1, -2, -9, -3.0]), t([-1.1, -1.9, 0, -3.1]), t([-1.5, -2.5, 5, -3.5])

    def stretch(x):
        return torch.cat([x[:, :3], x[:, 2:]], -1)

    def figures(mask, logprobs, old, ref):
        estimate = kl(logprobs, ref, estimator="k3", mask=mask)
        rewards = token_rewards(torch.tensor([1.0]), mask, kl=estimate, beta=0.1)
        advantages, _ = gae(rewards, old, mask, gamma=0.9)
        losses = [
            policy_loss(logprobs, old, advantages, mask, level=level, aggregate=how, norm=4)[0]
            for level in ("token", "sequence")
            for how in HOWS
        ]
        return torch.stack([*losses, value_loss(logprobs, old, ref, mask)[0], masked_mean(estimate, mask)])

    assert torch.equal(figures(short, logprobs, old, ref), figures(long, stretch(logprobs), stretch(old), stretch(ref)))
