"""Roles in processes of their own, on a real Ray: placement, calls, and what is said when something fails.

The roles here are plain classes, which is all that the cluster knows of a role.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster

from rolecall.cluster import spawn
from rolecall.cluster import worker as cluster_worker
from rolecall.cluster.spawn import _bundles, _connected
from rolecall.config import Config
from rolecall.errors import RunError, UserError


class Plain:
    """Stands in for every role; a Rollout also gets the Actor of its process."""

    def __init__(self, config: Config, actor: Plain | None = None):
        self.actor, self.received = actor, []
        if config.data.system == "refuse":
            raise UserError("model.path: there is no folder 'nowhere'.")

    def echo(self, *values, **named):
        return values, named

    def seen(self) -> dict:
        names = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "TOKENIZERS_PARALLELISM", "CUDA_VISIBLE_DEVICES")
        return {"pid": os.getpid(), "folder": os.getcwd(), "torch": "torch" in sys.modules} | {
            name: os.environ.get(name, "") for name in names
        }

    def shares_the_actors_process(self) -> bool:
        return isinstance(self.actor, Plain)

    def refuse(self) -> None:
        raise UserError("rollout.engine: there is no engine 'fast'.")

    def stop(self) -> None:
        raise RunError("First-step check failed.")

    def crash(self) -> None:
        raise ZeroDivisionError("the seventh sample")

    def hang(self, started: str = "") -> None:
        if started:
            Path(started).touch()
        time.sleep(600)

    def meet(self, mine: str, other: str) -> bool:
        """True if someone else runs at the same time."""
        Path(mine).touch()
        return _appears(Path(other), 30)


def node_id(role: Plain) -> str:
    return ray.get_runtime_context().get_node_id()


def torch_threads(role: Plain) -> int:
    import torch

    return torch.get_num_threads()


def _appears(file: Path, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    return file.exists()


def _gone(pid: int) -> bool:
    deadline = time.monotonic() + 20
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" and time.monotonic() < deadline:
        time.sleep(0.05)
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie"


@pytest.fixture(autouse=True)
def plain_roles(monkeypatch):
    for role in cluster_worker.CLASSES:
        monkeypatch.setitem(cluster_worker.CLASSES, role, f"{__name__}:Plain")


@pytest.fixture(scope="module")
def address():
    """Of a cluster with three nodes of two CPUs."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "num_gpus": 0})
    for _ in range(2):
        cluster.add_node(num_cpus=2, num_gpus=0)
    cluster.wait_for_nodes()
    yield cluster.address
    cluster.shutdown()


def settings(address: str, algorithm: str = "ppo", system: str = "", timeout: float = 60.0, **cluster) -> Config:
    pools = {"train": {"roles": ["actor", "critic", "reference", "rollout"]}, "score": {"roles": ["reward"]}}
    return Config(
        algorithm={"name": algorithm},
        data={"system": system},
        reward={"timeout": timeout},
        cluster={"address": address, "pools": pools, "timeout": timeout} | cluster,
    )


APART = {role: {"roles": [role]} for role in ("actor", "critic", "reference", "rollout", "reward")}


def test_a_ray_of_its_own_starts_and_ends_with_the_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_IGNORE_UNHANDLED_ERRORS", raising=False)
    said: list[Exception] = []
    monkeypatch.setattr("ray._private.worker._unhandled_error_handler", said.append)
    assert not ray.is_initialized()
    pools = {
        "train": {"roles": ["actor", "critic", "reference", "rollout"], "threads": 2},
        "score": {"roles": ["reward"]},
    }
    with spawn(settings("", pools=pools)) as roles:
        actor, rollout, reward = roles.actor.seen(), roles.rollout.handles[0].seen(), roles.reward.seen()
        assert actor["pid"] == rollout["pid"] == roles.critic.seen()["pid"] == roles.reference.seen()["pid"]
        assert roles.rollout.handles[0].shares_the_actors_process()
        assert reward["pid"] not in (actor["pid"], os.getpid())
        assert not reward["torch"]
        assert actor["folder"] == reward["folder"] == str(tmp_path)
        assert (actor["OMP_WAIT_POLICY"], actor["TOKENIZERS_PARALLELISM"]) == ("", "false")
        assert actor["CUDA_VISIBLE_DEVICES"] == ""
        assert actor["OMP_NUM_THREADS"] == "2"
        assert reward["OMP_NUM_THREADS"] == str(len(os.sched_getaffinity(0)))
        assert roles.actor.start(torch_threads).result() == 2
        failed = roles.actor.start("crash")
        assert roles.actor.echo(1, b=2) == ((1,), {"b": 2})
        del failed  # nobody has waited for it, and Ray says nothing of its own, which would come at once
        time.sleep(0.5)
    assert not said
    assert not ray.is_initialized()
    assert _gone(actor["pid"])
    assert _gone(reward["pid"])


@pytest.fixture
def interruptible():
    """As in a terminal: a process that was started in the background ignores the signal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("interrupts", [0, 1, 3])
def test_an_interrupt_while_ray_starts_comes_behind_it(monkeypatch, interruptible, interrupts):
    done: list[str] = []

    def start(*_, **options):
        for _ in range(interrupts):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)
        done.append("started")

    monkeypatch.setattr(ray, "init", start)
    monkeypatch.setattr(ray, "shutdown", lambda: done.append("ended"))
    expected = pytest.raises(KeyboardInterrupt) if interrupts else nullcontext()
    with expected, _connected(""):
        done.append("used")
    assert done == (["started", "ended"] if interrupts else ["started", "used", "ended"])
    with pytest.raises(KeyboardInterrupt):  # as before
        signal.raise_signal(signal.SIGINT)


def test_only_the_roles_of_the_run_are_started(address):
    with spawn(settings(address, "grpo")) as roles:
        assert roles.critic is None
        assert roles.reference is None
        assert roles.actor.echo(3) == ((3,), {})


def test_spread_pools_get_a_node_each(address):
    pools = {
        "train": {"roles": ["actor", "critic"]},
        "roll": {"roles": ["reference", "rollout"]},
        "score": {"roles": ["reward"]},
    }
    with spawn(settings(address, pools=pools, strategy="SPREAD")) as roles:
        handles = [roles.actor, roles.critic, roles.reference, roles.reward, *roles.rollout.handles]
        nodes = {handle.role: handle.start(node_id).result() for handle in handles}
        assert len(set(nodes.values())) == 3
        assert nodes["actor"] == nodes["critic"]
        assert nodes["reference"] == nodes["rollout"]
        assert not roles.rollout.handles[0].shares_the_actors_process()


def test_a_ray_that_was_there_is_left_alone(address):
    ray.init(address, log_to_driver=False)
    try:
        with spawn(settings(address, "grpo")) as roles:
            pid = roles.actor.seen()["pid"]
        assert ray.is_initialized()
        assert _gone(pid)
        groups = ray.util.placement_group_table().values()
        assert groups
        assert {group["state"] for group in groups} == {"REMOVED"}
    finally:
        ray.shutdown()


def test_no_ray_at_the_address():
    with (
        pytest.raises(UserError, match=r"(?s)cluster.address: .*127.0.0.1:1'.*ray start --head"),
        spawn(settings("127.0.0.1:1")),
    ):
        pass


def test_pools_that_cannot_fit_are_refused_with_what_there_is(address):
    pools = APART | {"actor": {"roles": ["actor"], "gpus": 8, "cpus": 1}}
    begun = time.monotonic()
    with pytest.raises(UserError) as caught, spawn(settings(address, pools=pools, timeout=2)):
        pass
    assert "actor: 8 GPUs, 1 CPUs" in str(caught.value)
    assert "3 node(s)" in str(caught.value)
    assert str(caught.value).count("0 GPUs, 2 CPUs") == 3
    assert time.monotonic() - begun < 60  # the time-out ended it, not pytest's


def test_strict_spread_needs_as_many_nodes_as_pools(address):
    with (
        pytest.raises(UserError, match="STRICT_SPREAD"),
        spawn(settings(address, pools=APART, strategy="STRICT_SPREAD", timeout=2)),
    ):
        pass


def test_gpus_go_to_the_actor_first_and_to_other_models_as_far_as_they_suffice():
    pools = {name: pool["roles"] for name, pool in reversed(APART.items())}

    def gpus(available: float, **given: float) -> dict[str, float]:
        config = settings("", pools={name: {"roles": pools[name], "gpus": given.get(name)} for name in pools})
        return {name: bundle.get("GPU", 0) for name, bundle in _bundles(config, available).items()}

    assert gpus(0) == {"reward": 0, "rollout": 0, "reference": 0, "critic": 0, "actor": 0}
    assert gpus(1) == {"reward": 0, "rollout": 0, "reference": 0, "critic": 0, "actor": 1}
    assert gpus(2) == {"reward": 0, "rollout": 1, "reference": 0, "critic": 0, "actor": 1}
    assert gpus(8) == {"reward": 0, "rollout": 1, "reference": 1, "critic": 1, "actor": 1}
    assert gpus(4, reference=0, reward=0.5, rollout=2) == {
        "reward": 0.5, "rollout": 2, "reference": 0, "critic": 0, "actor": 1
    }  # fmt: skip
    assert list(gpus(1)) == list(pools)


def test_a_vllm_rollout_gets_a_gpu_of_its_own_or_half_of_the_actors():
    def gpus(available: float, **pool) -> dict[str, float]:
        pools = {
            "train": {"roles": ["actor", "critic", "reference", "rollout"], **pool},
            "score": {"roles": ["reward"]},
        }
        config = Config(rollout={"engine": "vllm"}, cluster={"pools": pools})
        return {name: bundle.get("GPU", 0) for name, bundle in _bundles(config, available).items()}

    assert gpus(0) == {"train-rollout": 0, "train": 0, "score": 0}
    assert gpus(1) == {"train-rollout": 0.5, "train": 0.5, "score": 0}
    assert gpus(4) == {"train-rollout": 1, "train": 1, "score": 0}
    assert gpus(4, gpus=1) == {"train-rollout": 0.5, "train": 0.5, "score": 0}
    assert gpus(4, gpus=2) == {"train-rollout": 1, "train": 1, "score": 0}


def test_a_vllm_rollout_gets_a_process_of_its_own(address):
    config = settings(address)
    assert {name: pool.roles for name, pool in config.pools.items()} == {
        "train": ["actor", "critic", "reference", "rollout"], "score": ["reward"]
    }  # fmt: skip
    config.rollout.engine = "vllm"
    config.cluster.pools["train"].threads = 1
    assert {name: pool.roles for name, pool in config.pools.items()} == {
        "train-rollout": ["rollout"], "train": ["actor", "critic", "reference"], "score": ["reward"]
    }  # fmt: skip
    with spawn(config) as roles:
        assert roles.rollout.handles[0].process.pool == "train-rollout"
        assert not roles.rollout.handles[0].shares_the_actors_process()
        assert roles.rollout.handles[0].seen()["pid"] != roles.actor.seen()["pid"] == roles.critic.seen()["pid"]
        assert roles.rollout.handles[0].seen()["OMP_NUM_THREADS"] == "1"


def test_calls_to_two_pools_run_side_by_side(address, tmp_path):
    with spawn(settings(address, pools=APART)) as roles:
        one = roles.reference.start("meet", str(tmp_path / "reference"), str(tmp_path / "critic"))
        other = roles.critic.start("meet", str(tmp_path / "critic"), str(tmp_path / "reference"))
        assert (one.result(), other.result()) == (True, True)


def test_a_future_is_handed_on_as_its_value(address):
    with spawn(settings(address, "grpo")) as roles:
        first = roles.actor.start("echo", "weights")
        assert roles.reward.echo(first, 2) == (((("weights",), {}), 2), {})


def test_a_roles_own_errors_arrive_as_they_are(address):
    with spawn(settings(address, "grpo")) as roles:
        with pytest.raises(UserError) as caught:
            roles.rollout.handles[0].refuse()
        assert str(caught.value) == "rollout.engine: there is no engine 'fast'."
        assert type(caught.value) is UserError
        with pytest.raises(RunError, match=r"^First-step check failed\.$"):
            roles.actor.stop()
        with pytest.raises(RunError, match=r"actor\.crash failed in pool 'train'") as crashed:
            roles.actor.crash()
        assert "in crash\n" in str(crashed.value)  # the traceback
        assert "ZeroDivisionError: the seventh sample" in str(crashed.value)
        with pytest.raises(RunError, match=r"actor\.no_such_method failed"):
            roles.actor.no_such_method()
        assert roles.actor.echo(4) == ((4,), {})  # none of these ends the process


def test_a_role_that_refuses_to_be_built(address):
    with (
        pytest.raises(UserError, match=r"^model.path: there is no folder 'nowhere'\.$"),
        spawn(settings(address, system="refuse")),
    ):
        pass


def test_a_killed_process_is_named_at_once(address, tmp_path):
    with spawn(settings(address, pools=APART, timeout=300)) as roles:
        pid = roles.critic.seen()["pid"]
        call = roles.critic.start("hang", str(tmp_path / "started"))
        assert _appears(tmp_path / "started", 30)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(RunError) as caught:  # long before the 300 s are over: pytest would end it first
            call.result()
        assert f"pool 'critic' (critic; process {pid} on node " in str(caught.value)
        assert "critic.hang" in str(caught.value)
        assert "--resume" in str(caught.value)
        with pytest.raises(RunError, match="pool 'critic'"):
            roles.critic.echo()
        assert roles.actor.echo() == ((), {})


def test_the_process_that_died_is_named_where_its_value_was_awaited(address):
    with spawn(settings(address, pools=APART)) as roles:
        os.kill(roles.actor.seen()["pid"], signal.SIGKILL)
        with pytest.raises(RunError, match="pool 'actor'"):
            roles.rollout.handles[0].echo(roles.actor.start("echo"))


def test_a_call_that_hangs_ends_at_its_time_out(address):
    with spawn(settings(address, pools=APART)) as roles:
        impatient = replace(roles.critic, timeout=1.0)
        pid = roles.critic.seen()["pid"]
        with pytest.raises(RunError) as caught:
            impatient.hang()
        where = f"critic.hang did not return within 1 s in pool 'critic' (critic; process {pid} on node "
        assert str(caught.value).startswith(where)
        assert "--cluster.timeout" in str(caught.value)
        assert _gone(pid)


def test_a_reward_that_hangs_is_ended_and_named(address):
    config = settings(address, "grpo")
    config.reward.timeout = 1.0
    config.reward.function = "judge.py:ask"
    with spawn(config) as roles:
        pid = roles.reward.seen()["pid"]
        with pytest.raises(RunError) as caught:
            roles.reward.hang()
        assert "within 1 s in pool 'score'" in str(caught.value)
        assert "reward.function 'judge.py:ask'" in str(caught.value)
        assert "--reward.timeout" in str(caught.value)
        assert _gone(pid)
        assert roles.actor.echo() == ((), {})
