"""The same samples through other implementations: TRL's GRPO loss and torchrl's GAE (the extra `compare`).

TRL's trainer runs its own forward pass (prompts padded on the left) and its own loss method. Ours is packed: a group's
prompt once, its responses behind it. Equal gradients of all parameters thus compare the log-probabilities as well.
Where a formula differs, a test holds the difference and says which is right.
"""

import copy
import random
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from rolecall.algorithms import aggregate, gae, group_advantages, importance_correction, kl, policy_loss
from rolecall.models import Loaded
from rolecall.models.attention import why_unsupported
from rolecall.samples import Sample
from rolecall.training.logprobs import policy_logprobs, sample_logprobs
from rolecall.training.packing import micro_batches, per_token
from training_samples import sample, uneven

LONGEST = 8
TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def trl() -> ModuleType:
    return pytest.importorskip("trl", reason="the extra `compare` is not installed")


@pytest.fixture(scope="module")
def trainer(trl: ModuleType, tiny: Loaded, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """TRL's trainer of a copy of the tiny model, in float64; keyword arguments are its configuration's."""
    datasets = pytest.importorskip("datasets", reason="the extra `compare` is not installed")
    folder: Path = tmp_path_factory.mktemp("trl")

    def make(kind: type | None = None, reward: Callable[..., list[float]] | None = None, **settings: Any) -> Any:
        config = trl.GRPOConfig(
            output_dir=str(folder),
            temperature=TEMPERATURE,
            max_completion_length=LONGEST,
            use_cpu=True,
            bf16=False,
            report_to=[],
            **settings,
        )
        made = (kind or trl.GRPOTrainer)(
            model=copy.deepcopy(tiny.model).double(),
            reward_funcs=reward or (lambda completions, **_: [0.0] * len(completions)),
            args=config,
            train_dataset=datasets.Dataset.from_dict({"prompt": ["1 2"]}),
            processing_class=tiny.tokenizer,
        )
        made.model.train()  # the mode that it divides by accumulation steps in; the model has no dropout
        made.current_gradient_accumulation_steps = config.gradient_accumulation_steps
        return made

    return make


@pytest.fixture(scope="module")
def samples(tiny: Loaded) -> list[Sample]:
    """Uneven responses, some with tokens that a tool wrote; an old policy and a Reference some way off the policy."""
    rng = random.Random(0)
    drawn = [s for s in uneven(groups=4, size=4, seed=1) if s.action_tokens]
    exact = packed(copy.deepcopy(tiny.model).double())
    for s, logprobs in zip(drawn, sample_logprobs(exact, drawn, TEMPERATURE, 10_000), strict=True):
        s.old_logprobs = [x + rng.gauss(0, 0.3) for x in logprobs]
        s.ref_logprobs = [x + rng.gauss(0, 0.3) for x in logprobs]
        s.logprobs = [x + rng.gauss(0, 0.5) for x in s.old_logprobs]  # the engine's: some ratios beyond the cap
    return drawn


def packed(model: nn.Module) -> Loaded:
    return Loaded(model, None, why=why_unsupported(model))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def theirs(trainer: Any, samples: list[Sample], tokens: int | None = None) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of the trainer's own loss method on these samples. ``tokens``: of the whole batch."""

    def padded(rows: list[list[int]], left: bool = False) -> Tensor:
        return pad_sequence([torch.tensor(r) for r in rows], True, padding_side="left" if left else "right")

    def known(name: str) -> Tensor:
        return per_token(samples, name).double()

    prompts, responses = [s.prompt for s in samples], [s.response for s in samples]
    mask = known("response_mask")
    inputs = {
        "prompt_ids": padded(prompts, left=True),
        "prompt_mask": padded([[1] * len(p) for p in prompts], left=True),
        "completion_ids": padded(responses),
        "completion_mask": padded([[1] * len(r) for r in responses]),
        "tool_mask": mask,
        "advantages": torch.tensor([s.advantages[0] for s in samples]).double(),
        "old_per_token_logps": known("old_logprobs"),
        "ref_per_token_logps": known("ref_logprobs"),
        "importance_sampling_ratio": importance_correction(known("old_logprobs"), known("logprobs"), mask),
        "num_items_in_batch": torch.tensor(tokens or sum(s.action_tokens for s in samples)),
    }
    loss = trainer.compute_loss(trainer.model, inputs)
    loss.backward()
    return loss.item(), gradients(trainer.model)


def ours(
    trainer: Any,
    samples: list[Sample],
    *,
    beta: float = 0.0,
    estimator: str = "k3",
    correct: bool = False,
    **options: Any,
) -> tuple[float, dict[str, Tensor]]:
    """The same of our functions, on the same model."""
    (micro,) = micro_batches(samples, 10_000, packed=True)
    logprobs, _ = policy_logprobs(packed(trainer.model), micro, TEMPERATURE)
    old, engine, ref = (micro.field(name).double() for name in ("old_logprobs", "logprobs", "ref_logprobs"))
    weights = importance_correction(old, engine, micro.mask) if correct else None
    loss, _ = policy_loss(logprobs, old, micro.field("advantages").double(), micro.mask, weights=weights, **options)
    how = {name: options[name] for name in ("norm", "total") if name in options}
    drift = kl(logprobs, ref, estimator=estimator, mask=micro.mask)
    loss = loss + beta * aggregate(drift, micro.mask, options["aggregate"], **how)
    loss.backward()
    return loss.item(), gradients(trainer.model)


def assert_equal(a: tuple[float, dict[str, Tensor]], b: tuple[float, dict[str, Tensor]]) -> None:
    # Rotary embeddings are float32, and padding on the left shifts the positions.
    assert a[0] == pytest.approx(b[0], rel=1e-7, abs=1e-9)
    torch.testing.assert_close(a[1], b[1], rtol=1e-6, atol=1e-8)
    assert max(g.abs().max() for g in a[1].values()) > 1e-3


# (TRL's configuration, ours)
MEAN_OF_MEANS = {"aggregate": "sequence-mean-token-mean"}
OBJECTIVES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo": ({"loss_type": "grpo"}, MEAN_OF_MEANS),
    "bnpo": ({"loss_type": "bnpo"}, {"aggregate": "token-mean"}),
    "dr_grpo": ({"loss_type": "dr_grpo"}, {"aggregate": "sequence-mean-token-sum-norm", "norm": LONGEST}),
    "dapo": ({"loss_type": "dapo", "epsilon_high": 0.28}, {"aggregate": "token-mean", "clip_high": 0.28}),
    "gspo": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.03, "epsilon_high": 0.04},
        {"level": "sequence", "clip_low": 0.03, "clip_high": 0.04} | MEAN_OF_MEANS,
    ),
    # TRL's epsilon_high is the largest weight itself; the paper's, and ours, is how far it is above 1.
    "cispo": (
        {"loss_type": "cispo", "epsilon_high": 1.2},
        {"kind": "cispo", "clip_low": 1.0, "clip_high": 0.2, "aggregate": "token-mean"},
    ),
    "dual clip": ({"loss_type": "bnpo", "delta": 1.4}, {"dual_clip": 1.4, "aggregate": "token-mean"}),
}


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("beta", [0.0, 0.2])
@pytest.mark.parametrize("correct", [False, True])
def test_loss_and_gradient_are_trls(trainer, samples, name, beta, correct):
    """With k3 in the loss, and with truncated importance sampling, as TRL has it for samples of vLLM."""
    settings, options = OBJECTIVES[name]
    other = trainer(beta=beta, use_bias_correction_kl=False, **settings)
    other.use_vllm = correct  # only the loss looks at it now; no engine is started
    assert_equal(ours(other, samples, beta=beta, correct=correct, **options), theirs(other, samples))


def test_the_samples_above_reach_every_bound(samples):
    """Else the comparison would prove nothing about them."""
    old, engine, mask = (per_token(samples, name) for name in ("old_logprobs", "logprobs", "response_mask"))
    weights = importance_correction(old, engine, mask)
    assert (weights == 2).any() and ((weights > 0) & (weights < 1)).any()
    advantages = torch.tensor([s.advantages[0] for s in samples])
    assert (advantages > 0).any() and (advantages < 0).any() and (mask.sum(-1) > 1).any() and (mask == 0).any()


def test_the_token_form_of_gspo_is_trls(trl, trainer, samples):
    experimental = pytest.importorskip("trl.experimental.gspo_token")
    options = {"epsilon": 0.03, "epsilon_high": 0.04}
    other = trainer(experimental.GRPOTrainer, importance_sampling_level="sequence_token", loss_type="grpo", **options)
    mine = ours(other, samples, level="sequence-token", clip_low=0.03, clip_high=0.04, **MEAN_OF_MEANS)
    assert_equal(mine, theirs(other, samples))


@pytest.mark.parametrize("parts", [2, 4])
def test_accumulation_adds_up_as_trls_dapo_does(trainer, samples, parts):
    """Both divide by the tokens of the whole batch: the micro-batches of TRL's add up to ours in one."""
    other = trainer(
        loss_type="dapo", gradient_accumulation_steps=parts, num_generations=parts, per_device_train_batch_size=parts
    )
    tokens = sum(s.action_tokens for s in samples)
    added = [theirs(other, samples[i::parts], tokens) for i in range(parts)]
    summed = {name: sum(part[1][name] for part in added) for name in added[0][1]}
    assert_equal(ours(other, samples, aggregate="token-mean"), (sum(part[0] for part in added), summed))


def test_on_policy_our_k2_has_the_gradient_of_trls_weighted_k3(trainer, samples):
    """By default TRL multiplies k3 by the ratio (DeepSeek-V3.2, 2512.02556), which has the KL's own gradient.

    d(rho k3) = (k3 + 1 - exp(-d)) d log pi = d d log pi where rho is 1: k2's.
    """
    other = trainer(beta=0.2, loss_type="bnpo")
    fresh = copy.deepcopy(samples)
    model = packed(other.model)
    for s, logprobs in zip(fresh, sample_logprobs(model, fresh, TEMPERATURE, 10_000), strict=True):
        s.old_logprobs = logprobs
    theirs_found, k2, k3 = (
        theirs(other, fresh),
        ours(other, fresh, beta=0.2, estimator="k2", aggregate="token-mean"),
        ours(other, fresh, beta=0.2, estimator="k3", aggregate="token-mean"),
    )
    assert theirs_found[0] == pytest.approx(k3[0], rel=1e-6)
    torch.testing.assert_close(theirs_found[1], k2[1], rtol=1e-5, atol=1e-6)  # the fields' float32: rho is 1 +- 1e-7
    assert max((k2[1][name] - k3[1][name]).abs().max() for name in k2[1]) > 1e-3


# Differences. ------------------------------------------------------------------------------------------------------


def test_an_empty_response_counts_in_trls_mean_and_not_in_ours(trainer, samples):
    """TRL divides by all rows, so a response without action tokens shrinks the others' loss. Ours is as without it."""
    empty = sample(samples[0].group_id, 9, samples[0].prompt, response=[5], mask=[0], advantages=[1.0])
    empty.old_logprobs = empty.ref_logprobs = [-1.0]
    other = trainer(loss_type="grpo")
    alone, beside = ours(other, samples, **MEAN_OF_MEANS), ours(other, [*samples, empty], **MEAN_OF_MEANS)
    assert_equal(alone, beside)
    n = len(samples)
    assert theirs(other, [*samples, empty])[0] == pytest.approx(alone[0] * n / (n + 1))


def test_trls_bnpo_is_a_mean_of_means_under_accumulation(trainer, samples):
    """Responses of 1 and of 3 tokens in two micro-batches: each token of the first then weighs as much as three."""
    ordered = sorted(samples, key=lambda s: s.action_tokens)
    half = len(ordered) // 2
    micros = ordered[:half], ordered[half:]
    other = trainer(loss_type="bnpo", gradient_accumulation_steps=2)
    means = [ours(other, micro, aggregate="token-mean")[0] for micro in micros]
    added = sum(theirs(other, micro)[0] for micro in micros)
    assert added == pytest.approx(sum(means) / 2)
    total = sum(s.action_tokens for s in samples)
    right = sum(ours(other, micro, aggregate="token-mean", total=total)[0] for micro in micros)
    assert right == pytest.approx(ours(other, samples, aggregate="token-mean")[0])
    assert abs(added - right) > 0.01


def generated(trainer: Callable[..., Any], rewards: list[float], **settings: Any) -> Tensor:
    """TRL's advantages of one group with these rewards, through its own generation and scoring."""
    n = len(rewards)
    other = trainer(
        reward=lambda completions, **_: rewards, num_generations=n, per_device_train_batch_size=n, **settings
    )
    return other._generate_and_score_completions([{"prompt": "1 2"}] * n)["advantages"]


@pytest.mark.parametrize("rewards", [[1.0, 0.0, 0.0, 0.0], [0.3, -2.0, 5.0, 5.0], [0.0, 0.01, 0.0, 0.02]])
def test_group_advantages_are_trls_but_for_what_it_adds_to_the_deviation(trainer, rewards):
    """TRL adds 1e-4 to the deviation, so a reward in another unit gets another advantage; ours asks no unit."""
    ids = torch.zeros(len(rewards), dtype=torch.long)
    mine = group_advantages(torch.tensor(rewards), ids)
    deviation = torch.tensor(rewards).std()
    torch.testing.assert_close(generated(trainer, rewards), mine * deviation / (deviation + 1e-4))
    torch.testing.assert_close(group_advantages(torch.tensor(rewards) * 1e-4, ids), mine, rtol=1e-4, atol=1e-4)
    plain = group_advantages(torch.tensor(rewards), ids, scale="none")
    torch.testing.assert_close(generated(trainer, rewards, scale_rewards="none"), plain)


def test_a_flat_group_is_noise_in_trl_and_exactly_zero_here(trainer):
    """Seven rewards of 0.7: their float32 mean is off by a rounding, which TRL divides by 1e-4."""
    rewards = [0.7] * 7
    assert 0 < generated(trainer, rewards).abs().max() < 1e-3
    assert not group_advantages(torch.tensor(rewards), torch.zeros(7, dtype=torch.long)).any()


# torchrl. ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gamma", [1.0, 0.9])
@pytest.mark.parametrize("lam", [0.0, 0.95, 1.0])
def test_gae_is_torchrls(gamma, lam):
    """Responses of 1 to 7 tokens, padded on the right with values that are none: done at the last token of each."""
    functional = pytest.importorskip("torchrl.objectives.value.functional", reason="`compare` is not installed")
    generator = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, 7, 7, generator=generator, dtype=torch.float64)
    lengths = torch.arange(1, 8)[:, None]
    mask, done = torch.arange(7) < lengths, torch.arange(7) == lengths - 1
    following = values.roll(-1, dims=1).masked_fill(done, 0.0)
    columns = [x[..., None] for x in (values, following, rewards, done)]
    advantages, returns = functional.generalized_advantage_estimate(gamma, lam, *columns)
    mine = gae(rewards, values, mask, gamma=gamma, lam=lam)
    torch.testing.assert_close(
        mine[0], advantages[..., 0].where(mask, 0.0), rtol=1e-6, atol=1e-6
    )  # its gamma is float32
    torch.testing.assert_close(mine[1], returns[..., 0].where(mask, 0.0), rtol=1e-6, atol=1e-6)
