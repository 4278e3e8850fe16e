"""Several Rollouts as one, and Rollouts that die: real Ray, real processes, real kills."""

import os
import signal
import subprocess
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rolecall.cluster import Roles, replicas, spawn, worker
from rolecall.cluster.handles import Process
from rolecall.cluster.replicas import spread
from rolecall.cluster.spawn import _bundles, _teams
from rolecall.config import Config
from rolecall.errors import RunError, UserError
from rolecall.roles.actor import Actor
from rolecall.roles.rollout import Rollout
from rolecall.samples import Request, Sample, Sampling
from rolecall.sync import WeightSync

APART = {"train": {"roles": ["actor"]}, "roll": {"roles": ["rollout"]}, "score": {"roles": ["reward"]}}
TOGETHER = {"train": {"roles": ["actor", "critic", "reference", "rollout"]}, "score": {"roles": ["reward"]}}


def config(tiny_path: Path, replicas: int = 1, timeout: float = 60.0) -> Config:
    return Config(
        model={"path": str(tiny_path), "dtype": "float32"},
        rollout={"replicas": replicas},
        cluster={"timeout": timeout, "pools": APART},
    )


def requests(groups: int = 5, n: int = 4, max_tokens: int = 12) -> list[Request]:
    """Prompts of different lengths."""
    sampling = Sampling(max_tokens, min_tokens=max_tokens)
    return [Request(7 + g, f"p{g}", [2, 3, *range(6, 8 + g), 4], n, 0, sampling) for g in range(groups)]


def shift(actor: Actor) -> None:
    """Other weights than the model's file has."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in actor.loaded.model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter) * 0.3)


@contextmanager
def running(settings: Config) -> Iterator[Roles]:
    """Roles whose Actor has weights of its own, which are synced as version 3."""
    with spawn(settings) as roles:
        roles.actor.start(shift).result()
        resync(roles)
        yield roles


def resync(roles: Roles) -> dict[str, float]:
    return roles.rollout.synchronise(partial(WeightSync(roles.actor, roles.rollout.handles), 3))


def same(found: list[Sample], wanted: list[Sample]) -> bool:
    """Up to the rounding of matrix products of other shapes."""

    def exact(sample: Sample) -> tuple:
        return sample.group_id, sample.index, sample.response, sample.versions, sample.finish

    pairs = zip(found, wanted, strict=True)
    return [exact(s) for s in found] == [exact(s) for s in wanted] and all(
        one.logprobs == pytest.approx(other.logprobs, abs=1e-5) for one, other in pairs
    )


# How requests are shared out


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 9), st.integers(1, 100)), max_size=30), st.integers(1, 9))
def test_every_request_goes_to_one_engine_and_loads_are_even(shapes, engines):
    asked = [Request(i, str(i), [1] * size, n, 0, Sampling(limit)) for i, (size, n, limit) in enumerate(shapes)]
    shares = spread(asked, engines)
    assert len(shares) == engines
    assert sorted(position for share in shares for position in share) == list(range(len(asked)))
    assert all(share == sorted(share) for share in shares)
    tokens = [size + n * limit for size, n, limit in shapes]
    loads = [sum(tokens[position] for position in share) for share in shares]
    assert max(loads) - min(loads) <= max(tokens, default=0)


def test_shares_worked_out_by_hand():
    sizes = [10, 50, 20, 30, 40]
    asked = [Request(i, str(i), [1], 1, 0, Sampling(size - 1)) for i, size in enumerate(sizes)]
    assert spread(asked, 2) == [[0, 1, 2], [3, 4]]  # 50 | 40 30 | 20 10 -> 80 | 70
    assert spread(asked, 9) == [[1], [4], [3], [2], [0], [], [], [], []]
    even = [Request(i, str(i), [1], 1, 0, Sampling(8)) for i in range(6)]
    assert spread(even, 3) == [[0, 3], [1, 4], [2, 5]]


# Where they run


def places(available: float, engine: str = "vllm", replicas: int = 2, pools: Any = TOGETHER, **train: Any) -> dict:
    pools = pools | {"train": pools["train"] | train}
    settings = Config(rollout={"engine": engine, "replicas": replicas}, cluster={"pools": pools})
    return {name: bundle.get("GPU", 0) for name, bundle in _bundles(settings, available).items()}


def test_each_replica_has_a_bundle_of_its_own():
    assert places(4) == {"train-rollout-0": 1, "train-rollout-1": 1, "train": 1, "score": 0}
    assert places(2) == {"train-rollout-0": 1, "train-rollout-1": 0.5, "train": 0.5, "score": 0}
    assert places(0) == {"train-rollout-0": 0, "train-rollout-1": 0, "train": 0, "score": 0}
    assert places(8, gpus=4) == {"train-rollout-0": 1, "train-rollout-1": 1, "train": 2, "score": 0}
    assert places(8, "native", 3, APART) == {"train": 1, "roll-0": 1, "roll-1": 1, "roll-2": 1, "score": 0}
    two = APART | {"roll": {"roles": ["rollout"], "gpus": 2}}
    assert places(8, "vllm", 2, two) == {"train": 1, "roll-0": 2, "roll-1": 2, "score": 0}
    assert places(8, "vllm", 1, two) == {"train": 1, "roll": 2, "score": 0}


def test_an_engine_over_several_gpus_has_all_of_them():
    settings = Config(rollout={"engine": "vllm", "tensor_parallel": 2, "replicas": 2}, cluster={"pools": APART})
    found = {name: bundle.get("GPU", 0) for name, bundle in _bundles(settings, 5).items()}
    assert found == {"train": 1, "roll-0": 2, "roll-1": 2, "score": 0}


def test_what_cannot_be_replicated_is_refused_with_the_way_out():
    with pytest.raises(UserError, match=r"rollout.replicas = 2: the native engine shares .* actor, .* pool of its own"):
        Config(rollout={"replicas": 2})
    clash = APART | {"roll-1": {"roles": ["reference"]}}
    with pytest.raises(UserError, match="name 'roll-1' is the one of another pool's process; take another"):
        Config(rollout={"replicas": 2}, algorithm={"watch_kl": True}, cluster={"pools": clash})


# On a Ray


@pytest.fixture(scope="module")
def alone(tiny_path, local_ray) -> Iterator[Roles]:
    with running(config(tiny_path)) as roles:
        yield roles


@pytest.fixture(scope="module")
def wanted(alone) -> list[Sample]:
    """What one engine that nobody disturbs answers to ``requests()``."""
    return alone.rollout.generate(requests())


@pytest.fixture(scope="module")
def three(tiny_path, local_ray) -> Iterator[Roles]:
    """Three replicas. Tests leave them as able as they were."""
    with running(config(tiny_path, 3)) as roles:
        yield roles


def test_the_number_of_replicas_changes_no_sample(three, wanted):
    roles = three
    processes = [handle.start(pid).result() for handle in roles.rollout.handles]
    assert len({*processes, roles.actor.start(pid).result()}) == 3 + 1
    assert roles.rollout.version == 3
    assert same(roles.rollout.generate(requests()), wanted)
    assert roles.rollout.generate([]) == []
    assert same(roles.rollout.generate(requests()[:1]), wanted[:4])  # fewer groups than replicas


def pid(role: Any) -> int:
    return os.getpid()


def test_a_sync_that_reached_only_some_replicas_is_noticed(three, wanted):
    WeightSync(three.actor, three.rollout.handles[:1])(4)
    with pytest.raises(RunError, match=r"only some replicas \(versions roll-0: 4, roll-1: 3, roll-2: 3\). Sync again"):
        three.rollout.generate(requests())
    resync(three)
    assert same(three.rollout.generate(requests()), wanted)


# Deaths


def doom(rollout: Rollout, method: str) -> None:
    """This process kills itself when the method is next called."""
    setattr(rollout, method, lambda *_: os.kill(os.getpid(), signal.SIGKILL))


def doom_midway(rollout: Rollout) -> None:
    """This process kills itself in the middle of generating: at the fifth token."""
    decode, calls = rollout.engine._decode, Counter()

    def dying(*arguments: Any) -> Any:
        calls["decode"] += 1
        if calls["decode"] == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return decode(*arguments)

    rollout.engine._decode = dying


DIES = r"The process of pool 'roll(-\d)?' \(rollout; process \d+ on node .* died during {}\. It is started again\."


@pytest.mark.parametrize("number", ["alone", "three"])
def test_killed_while_generating_the_same_samples_come_and_none_is_lost_or_doubled(request, wanted, number):
    roles = request.getfixturevalue(number)
    handle = roles.rollout.handles[-1]
    before = handle.start(pid).result()
    handle.start(doom_midway).result()
    with pytest.warns(UserWarning, match=DIES.format(r"rollout\.generate")):
        assert same(roles.rollout.generate(requests()), wanted)
    assert handle.process.pid == handle.start(pid).result() != before
    assert same(roles.rollout.generate(requests()), wanted)
    assert resync(roles)["rollout/restarts"] == 1
    assert resync(roles)["rollout/restarts"] == 0


def test_all_replicas_die_at_once(three, wanted):
    for handle in three.rollout.handles:
        handle.start(doom_midway).result()
    with pytest.warns(UserWarning, match=DIES.format(".*")):
        assert same(three.rollout.generate(requests()), wanted)
    assert resync(three)["rollout/restarts"] == 3


@pytest.mark.parametrize(
    ("method", "transport"),
    [
        ("join", ("mapped", "cpu")),
        ("start_update", ("mapped", "cpu")),
        ("write", ("mapped", "cpu")),
        ("write", ("collective", "cpu")),
        ("finish_update", ("mapped", "cpu")),
    ],
)
def test_killed_during_a_sync(three, wanted, method, transport):
    """By a broadcast, it may be the other ends that notice first."""
    move = WeightSync(three.actor, three.rollout.handles, transport=transport, limit=60_000)
    if method != "join":
        move(3)
    three.rollout.handles[1].start(doom, method).result()
    with pytest.warns(UserWarning, match=DIES.format(r"rollout\.\w+")):  # calls follow each other without waiting
        moved = three.rollout.synchronise(partial(move, 3))
    assert (moved["sync/version"], moved["rollout/restarts"]) == (3, 1)
    assert same(three.rollout.generate(requests()), wanted)


@pytest.mark.parametrize("when", ["before it sleeps", "asleep"])
def test_killed_while_training(alone, wanted, when):
    number = alone.rollout.handles[0].process.pid
    if when == "asleep":
        alone.rollout.sleep()
    os.kill(number, signal.SIGKILL)
    if when != "asleep":
        alone.rollout.sleep()
    with pytest.warns(UserWarning, match=DIES.format(r"rollout\.\w+")):
        assert resync(alone)["rollout/restarts"] == 1
    assert same(alone.rollout.generate(requests()), wanted)


def test_an_engine_that_hangs_is_killed_and_started_again(alone, wanted, monkeypatch):
    stopped = alone.rollout.handles[0].process.pid
    monkeypatch.setattr(alone.rollout, "handles", [replace(alone.rollout.handles[0], timeout=5.0)])
    os.kill(stopped, signal.SIGSTOP)
    hangs = r"did not return within 5 s in pool 'roll' .*; its process was killed\. It is started again\."
    with pytest.warns(UserWarning, match=hangs):
        assert same(alone.rollout.generate(requests()), wanted)
    assert not psutil.pid_exists(stopped)


class Doomed(Rollout):
    """Dies whenever it generates."""

    def generate(self, requests: list[Request]) -> list[Sample]:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


def test_an_engine_that_dies_again_and_again_ends_the_run(tiny_path, local_ray, monkeypatch):
    monkeypatch.setitem(worker.CLASSES, "rollout", f"{__name__}:Doomed")
    monkeypatch.setattr(replicas, "RESTARTS", 2)
    with running(config(tiny_path)) as roles, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        again = r"pool 'roll' .*It was started again 2 times .*rollout\.max_sequences.*--resume"
        with pytest.raises(RunError, match=again):
            roles.rollout.generate(requests())
        assert sum("It is started again" in str(warning.message) for warning in warned) == 2


@pytest.mark.parametrize(("role", "pool"), [("actor", "train"), ("critic", "roll")])
def test_what_was_in_training_is_not_started_again(tiny_path, local_ray, role, pool):
    """Its weights are lost: only a checkpoint has them."""
    settings = config(tiny_path)
    settings.cluster.pools = {
        "roll": {"roles": ["rollout", "critic"]}, "train": {"roles": ["actor"]}, "score": {"roles": ["reward"]}
    }  # fmt: skip
    settings.algorithm = {"name": "ppo", "kl_beta": 0}
    with running(settings) as roles:
        os.kill(getattr(roles, role).process.pid, signal.SIGKILL)
        lost = rf"pool '{pool}' .* died during .*\. Go on from the last checkpoint with --resume"
        with pytest.raises(RunError, match=lost):
            resync(roles)


def start_family(role: Any) -> list[int]:
    """A child of this process and one of that child: their process ids."""
    shell = subprocess.Popen(["sh", "-c", "sleep 600 & echo $!; wait"], stdout=subprocess.PIPE)
    return [shell.pid, int(shell.stdout.readline())]


def runs(number: int) -> bool:
    return psutil.pid_exists(number) and psutil.Process(number).status() != psutil.STATUS_ZOMBIE


def test_what_shares_the_rollouts_process(tiny_path, local_ray, wanted):
    """A frozen Reference is built again with it; what it has started ends with it, at once or when the run ends."""
    settings = config(tiny_path)
    settings.cluster.pools = {
        "roll": {"roles": ["rollout", "reference"]}, "train": {"roles": ["actor"]}, "score": {"roles": ["reward"]}
    }  # fmt: skip
    settings.algorithm.watch_kl = True
    with running(settings) as roles:
        before = roles.reference.logprobs(wanted)
        killed = roles.reference.start(start_family).result()
        assert all(map(runs, killed))
        os.kill(roles.reference.process.pid, signal.SIGKILL)
        with pytest.warns(UserWarning, match="It is started again"):
            assert same(roles.rollout.generate(requests()), wanted)
        assert not any(map(runs, killed))
        assert roles.reference.logprobs(wanted) == before
        ended = roles.reference.start(start_family).result()
        os.kill(roles.reference.process.pid, signal.SIGKILL)
    deadline = time.monotonic() + 30
    while any(map(runs, ended)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(runs, ended))


def test_a_pool_named_as_a_role_is_no_team_with_that_roles_pool():
    processes = [Process(name, roles, lambda: None, None) for name, roles in (("actor", ["rollout"]), ("t", ["actor"]))]
    assert _teams(processes) == [[processes[0]], [processes[1]]]
