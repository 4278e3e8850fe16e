"""The first step's checks: what is right passes, and each fault is named with both values."""

from copy import deepcopy

import pytest

from rolecall.config import Config
from rolecall.errors import RunError
from rolecall.loop.checks import first_step, on_policy
from rolecall.samples import Prompt, Sample

GROUPS = [(7, Prompt("a", "", [1], {})), (9, Prompt("b", "", [1], {}))]
METRICS = {
    "first/approx_kl": 0.0,
    "first/ratio_max": 1.0,
    "mismatch/mean": 0.01,
    "first/tokens": 10,
    "first/skipped": 6,
}
CONFIG = Config(rollout={"group_size": 4})


def step() -> list[Sample]:
    """Two groups of four samples, two tokens each: 16 action tokens, of which 6 were skipped as flat."""
    return [
        Sample(
            group, i, prompt.id, [1], [2, 3], [-1.0, -2.0], [1, 1], [(0, 2, 0)], "stop", "", ref_logprobs=[-1.0, -2.0]
        )
        for group, prompt in GROUPS
        for i in range(4)
    ]


def test_a_right_first_step_passes():
    first_step(CONFIG, GROUPS, step(), METRICS, untrained=True)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"first/approx_kl": 0.1}, r"KL.policy, old policy. before the first update is 0.1, expected 0"),
        ({"first/ratio_max": 1.5}, "is 1.5, expected 1"),
        ({"mismatch/mean": 0.2}, r"Actor - engine.* is 0.2, expected 0"),
        ({"first/tokens": 9}, "action tokens that the loss weighs is 15, expected 16"),
    ],
)
def test_metrics_that_disagree_stop_the_run(change, says):
    with pytest.raises(RunError, match=says):
        first_step(CONFIG, GROUPS, step(), METRICS | change, untrained=True)


def test_old_logprobs_of_an_earlier_forward_pass_may_round_otherwise():
    """A KL in the reward needs them, in bfloat16 a thousandth off the update's own."""
    samples = step()
    for sample in samples:
        sample.old_logprobs = [-1.0, -2.0]
    metrics = METRICS | {"first/approx_kl": 1e-5, "first/ratio_max": 1.01}
    first_step(CONFIG, GROUPS, samples, metrics, untrained=True)
    with pytest.raises(RunError, match="largest ratio"):
        first_step(CONFIG, GROUPS, step(), metrics | {"first/approx_kl": 0.0}, untrained=True)


def test_a_lost_or_a_foreign_sample_stops_the_run():
    with pytest.raises(RunError, match="group"):
        first_step(CONFIG, GROUPS, step()[1:], METRICS, untrained=True)
    foreign = deepcopy(step())
    foreign[0].group_id = 8
    with pytest.raises(RunError, match="group"):
        first_step(CONFIG, GROUPS, foreign, METRICS, untrained=True)


def test_version_spans_that_miss_a_token_stop_the_run():
    samples = step()
    samples[3].versions = [(0, 1, 0)]
    with pytest.raises(RunError, match="version spans"):
        first_step(CONFIG, GROUPS, samples, METRICS, untrained=True)


def test_engine_and_reference_start_equal_and_may_differ_later():
    samples = step()
    for sample in samples:
        sample.ref_logprobs = [-1.5, -2.5]
    with pytest.raises(RunError, match=r"engine - Reference.* is 0.5"):
        first_step(CONFIG, GROUPS, samples, METRICS, untrained=True)
    first_step(CONFIG, GROUPS, samples, METRICS, untrained=False)


def test_older_weights_stop_any_step():
    samples = step()
    on_policy(samples, None)  # nothing has been synced
    on_policy(samples, 0)
    samples[5].versions = [(0, 1, 4), (1, 2, 5)]
    with pytest.raises(RunError, match=r"Tokens 0 to 1 of sample 1 in group 9 .* version 4, .* was version 5"):
        on_policy(samples[5:6], 5)
