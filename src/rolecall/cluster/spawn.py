"""From the configuration to running roles: Ray, one placement group, a process a pool, and the end of all of them."""

import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rolecall.cluster.handles import Future, Handle, Process, TeamFuture, TeamHandle
from rolecall.cluster.replicas import Replicas
from rolecall.cluster.worker import CLASSES, Meeting, Worker
from rolecall.config import SEPARATE_ENGINES, Config, Pool
from rolecall.errors import UserError

LOCAL_WAIT = 10.0  # seconds for room on a Ray of our own, where no machine will join
SLOW = "Look at that node, or raise --cluster.timeout."  # to do about a call that takes too long


@dataclass(frozen=True)
class Roles:
    """A handle to each role; None where the run needs no such role."""

    actor: Handle
    rollout: Replicas
    reward: Handle
    critic: Handle | None = None
    reference: Handle | None = None


@contextmanager
def spawn(config: Config) -> Iterator[Roles]:
    """Start the roles that the run needs in the pools of ``config.cluster``; end them when the block ends.

    Raises:
        UserError: no Ray at the address, no room for the pools, or what a role refuses when it is built.
        RunError: a process died or hung while its roles were built.
    """
    pools = config.pools
    with _connected(config.cluster.address):
        bundles = _bundles(config, ray.cluster_resources().get("GPU", 0))
        group = placement_group(list(bundles.values()), strategy=config.cluster.strategy)
        processes: list[Process] = []
        try:
            _wait_for_room(config, group, bundles)
            alone = sum(pool.roles != ["reward"] for pool in pools.values()) == 1
            processes += [_start(group, index, alone, *pool) for index, pool in enumerate(pools.items())]
            roles = _build(config, processes)
            yield roles
            roles.rollout.close()
        finally:
            for process in processes:
                ray.kill(process.worker)
            remove_placement_group(group)


@contextmanager
def _connected(address: str) -> Iterator[None]:
    """A Ray to work on: the one this process is connected to (left alone), the one at ``address``, or a new one."""
    if ray.is_initialized():
        yield
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # after one call has failed nobody waits for the others
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # the worker hides the GPUs itself
    try:
        with _uninterrupted():
            _connect(address)
        yield
    finally:
        ray.shutdown()


def _connect(address: str) -> None:
    host, _, port = address.rpartition(":")
    try:
        if port.isdigit():  # a wrong address fails here at once; Ray would try it for minutes
            socket.create_connection((host.removeprefix("ray://"), int(port)), timeout=10).close()
        ray.init(address or "local", include_dashboard=None if address else False, logging_level=logging.ERROR)
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(
            f"cluster.address: cannot work with Ray at {address or 'this machine'!r}: {error}\nStart one there with "
            "`ray start --head`, or leave cluster.address empty for a local one."
        ) from None


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C waits for the end of the block.

    While Ray starts it would be lost in a fork, or raised within code of Ray's that then ends the process.
    """
    if threading.current_thread() is not threading.main_thread():  # no other one is interrupted
        yield
        return
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        signal.raise_signal(signal.SIGINT)


def _bundles(config: Config, gpus: float) -> dict[str, dict[str, float]]:
    """What each pool reserves. GPUs that are not configured: one for each pool with a model, the Actor's first.

    Engines with weights of their own for which none is left share the Actor's.
    """
    pools = config.pools
    actor = next(name for name in pools if "actor" in pools[name].roles)
    left = gpus - sum(pool.gpus for pool in pools.values() if pool.gpus is not None)
    shares = {}
    for name in sorted(pools, key=lambda name: "actor" not in pools[name].roles):
        share = pools[name].gpus
        if share is None:
            wanted = config.rollout.tensor_parallel if pools[name].roles == ["rollout"] else 1
            share = float(wanted) if left >= wanted and pools[name].roles != ["reward"] else 0.0
            left -= share
        shares[name] = share
    for name, share in shares.items():
        if share > 1 and share != int(share):
            raise UserError(f"cluster.pools: {name} would get {share:g} GPUs; over 1 only whole ones can be given.")
        team = [other for other in pools if pools[other].roles == pools[name].roles]
        if pools[name].processes > 1 and any(shares[other] != share for other in team):
            raise UserError(
                f"cluster.pools: {len(team)} processes ({', '.join(team)}) want a GPU each or none, and "
                f"{sum(shares[other] for other in team):g} of {gpus:g} are left for them. Lower their number "
                "(processes), or set the pool's gpus to 0."
            )
    without = [name for name in pools if pools[name].roles == ["rollout"] and shares[name] == 0]
    unset = all(pools[name].gpus is None for name in (actor, *without))
    if config.rollout.engine in SEPARATE_ENGINES and unset:
        if without and pools[actor].processes > 1 and shares[actor]:
            raise UserError(
                f"cluster.pools: {', '.join(without)} would have to share a GPU with one of the Actor's processes, and "
                "all of these would wait for that one. Lower their number (processes), so that a GPU is left."
            )
        shares |= dict.fromkeys((actor, *without), shares[actor] / (1 + len(without)))
    # One byte of memory, because Ray refuses a bundle of nothing.
    bundles = {name: {"GPU": shares[name], "CPU": pool.cpus, "memory": 1.0} for name, pool in pools.items()}
    return {name: {kind: amount for kind, amount in bundle.items() if amount} for name, bundle in bundles.items()}


def _wait_for_room(config: Config, group: PlacementGroup, bundles: dict[str, dict[str, float]]) -> None:
    cluster = config.cluster
    seconds = cluster.timeout if cluster.address else min(cluster.timeout, LOCAL_WAIT)
    if group.wait(seconds):
        return
    asked = "; ".join(f"{name}: {_amounts(bundle)}" for name, bundle in bundles.items())
    nodes = [node for node in ray.nodes() if node["Alive"]]
    has = "; ".join(f"{node['NodeManagerHostname']}: {_amounts(node['Resources'])}" for node in nodes)
    raise UserError(
        f"The cluster has no room for the pools (cluster.strategy {cluster.strategy}; waited {seconds:g} s).\n"
        f"  asked for: {asked}\n  {len(nodes)} node(s) with: {has}\n  free now: {_amounts(ray.available_resources())}\n"
        "Lower the pools' gpus or cpus, put roles together in fewer pools, change cluster.strategy, or add nodes."
    )


def _amounts(resources: dict[str, float]) -> str:
    return ", ".join(f"{resources.get(kind, 0):g} {kind}s" for kind in ("GPU", "CPU"))


def _start(group: PlacementGroup, index: int, alone: bool, name: str, pool: Pool) -> Process:
    bundle = group.bundle_specs[index]
    place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
    remote: Any = ray.remote(num_cpus=bundle.get("CPU", 0), num_gpus=bundle.get("GPU", 0), scheduling_strategy=place)
    driver = os.getcwd(), [os.getcwd(), *filter(None, sys.path)]
    launch = partial(remote(Worker).remote, name, pool.threads, alone, driver)
    return Process(name, list(pool.roles), launch, launch())


def _build(config: Config, processes: list[Process]) -> Roles:
    """Build the roles of all pools side by side."""
    for process in processes:
        _place(config, process)
    teams = _teams(processes)
    for building in [_begin(config, team) for team in teams]:
        building.result()
    timeout = config.cluster.timeout
    single: dict[str, Any] = {}
    for first, *others in teams:
        for role in first.roles:
            one = Handle(role, first, timeout, SLOW)
            single[role] = TeamHandle(role, first, timeout, SLOW, others) if others else one
    slow = f"reward.function {config.reward.function!r} hangs or is too slow: mend it, or raise --reward.timeout."
    single["reward"] = replace(single["reward"], timeout=config.reward.timeout, advice=slow)
    rollouts = [Handle("rollout", process, timeout, SLOW) for process in processes if "rollout" in process.roles]
    return Roles(**single | {"rollout": Replicas(rollouts, partial(_restart, config))})


def _teams(processes: list[Process]) -> list[list[Process]]:
    """The processes of each pool: one, or those over which its roles are sharded. A Rollout's replica is alone."""
    teams: dict[tuple[str, str], list[Process]] = {}
    for process in processes:
        # Of the other roles, each lives in one pool.
        key = ("", process.pool) if process.roles == ["rollout"] else (process.roles[0], "")
        teams.setdefault(key, []).append(process)
    return list(teams.values())


def _place(config: Config, process: Process) -> None:
    """Wait for the process to be there."""
    vars(process).update(_call(config, process, "its start", process.worker.place.remote()).result())


def _begin(config: Config, team: list[Process]) -> TeamFuture:
    """Have the processes build their roles, together if there are several."""
    first, classes = team[0], {role: CLASSES[role] for role in team[0].roles}
    meeting = None
    if len(team) > 1:
        port = _call(config, first, "opening a store", first.worker.open_store.remote()).result()
        meeting = Meeting(first.address, port, len(team), config.cluster.timeout)
    what = f"building {', '.join(first.roles)}"
    building = [
        _call(config, process, what, process.worker.build.remote(config, classes, rank, meeting))
        for rank, process in enumerate(team)
    ]
    return building[0].with_others(building[1:])


def _call(config: Config, process: Process, what: str, ref: Any) -> Future:
    return Future(ref, what, process, config.cluster.timeout, SLOW, [])


def _restart(config: Config, process: Process) -> None:
    """End what is left of the process and build its roles in a new one, in the same bundle of the placement group."""
    ray.kill(process.worker)
    process.worker = process.launch((process.node, process.pid))
    _place(config, process)
    _begin(config, [process]).result()
