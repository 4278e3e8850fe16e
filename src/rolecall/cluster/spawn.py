"""From the configuration to running roles: Ray, one placement group, a process a pool, and the end of all of them."""

import logging
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rolecall.cluster.handles import Future, Handle, Process
from rolecall.cluster.replicas import Replicas
from rolecall.cluster.worker import CLASSES, Worker
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
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # the worker hides the GPUs itself
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
    try:
        yield
    finally:
        ray.shutdown()


def _bundles(config: Config, gpus: float) -> dict[str, dict[str, float]]:
    """What each pool reserves. GPUs that are not configured: one for each pool with a model, the Actor's first.

    Engines with weights of their own for which none is left share the Actor's.
    """
    pools = config.pools
    actor = next(name for name in pools if "actor" in pools[name].roles)
    left = gpus - sum(pool.gpus for pool in pools.values() if pool.gpus is not None)
    shares = {}
    for name in sorted(pools, key=lambda name: name != actor):
        share = pools[name].gpus
        if share is None:
            wanted = config.rollout.tensor_parallel if pools[name].roles == ["rollout"] else 1
            share = float(wanted) if left >= wanted and pools[name].roles != ["reward"] else 0.0
            left -= share
        shares[name] = share
    for name, share in shares.items():
        if share > 1 and share != int(share):
            raise UserError(f"cluster.pools: {name} would get {share:g} GPUs; over 1 only whole ones can be given.")
    without = [name for name in pools if pools[name].roles == ["rollout"] and shares[name] == 0]
    unset = all(pools[name].gpus is None for name in (actor, *without))
    if config.rollout.engine in SEPARATE_ENGINES and unset:
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
    building = [_begin(config, process) for process in processes]
    for built in building:
        built.result()
    timeout = config.cluster.timeout
    handles = [Handle(role, process, timeout, SLOW) for process in processes for role in process.roles]
    single: dict[str, Any] = {handle.role: handle for handle in handles if handle.role != "rollout"}
    slow = f"reward.function {config.reward.function!r} hangs or is too slow: mend it, or raise --reward.timeout."
    single["reward"] = replace(single["reward"], timeout=config.reward.timeout, advice=slow)
    rollouts = [handle for handle in handles if handle.role == "rollout"]
    return Roles(rollout=Replicas(rollouts, partial(_restart, config)), **single)


def _begin(config: Config, process: Process) -> Future:
    """Wait for the process to be there, and have it build its roles."""

    def call(ref: Any, what: str) -> Future:
        return Future(ref, what, process, config.cluster.timeout, SLOW, [])

    vars(process).update(call(process.worker.place.remote(), "its start").result())
    classes = {role: CLASSES[role] for role in process.roles}
    return call(process.worker.build.remote(config, classes), f"building {', '.join(process.roles)}")


def _restart(config: Config, process: Process) -> None:
    """End what is left of the process and build its roles in a new one, in the same bundle of the placement group."""
    ray.kill(process.worker)
    process.worker = process.launch((process.node, process.pid))
    _begin(config, process).result()
