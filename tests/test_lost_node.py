"""A node is lost with the Rollout on it, on a real Ray of three nodes."""

import time
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from rolecall.cluster import spawn
from test_replicas import config, requests, resync, same, shift


def node_id(role: Any) -> str:
    return ray.get_runtime_context().get_node_id()


@pytest.mark.slow
def test_the_rollout_of_a_lost_node_goes_on_elsewhere(tiny_path):
    looks = {"health_check_period_ms": 500}  # by default every 3 s, five times
    head = {"num_cpus": 4, "num_gpus": 0, "_system_config": looks}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    others = {node.node_id: node for node in (cluster.add_node(num_cpus=2, num_gpus=0) for _ in range(2))}
    cluster.wait_for_nodes()
    settings = config(tiny_path, timeout=120.0)
    settings.cluster.address, settings.cluster.strategy = cluster.address, "STRICT_SPREAD"
    settings.cluster.pools = {
        "roll": {"roles": ["rollout"]}, "train": {"roles": ["actor", "reward"], "cpus": 4}  # which only the head has
    }  # fmt: skip
    try:
        with spawn(settings) as roles:
            (rollout,) = roles.rollout.handles
            roles.actor.start(shift).result()
            resync(roles)
            wanted = roles.rollout.generate(requests())
            lost = rollout.start(node_id).result()
            cluster.remove_node(others[lost], allow_graceful=False)
            time.sleep(2)  # its processes outlive it for a moment
            with pytest.warns(UserWarning, match="It is started again"):
                assert same(roles.rollout.generate(requests()), wanted)
            assert rollout.start(node_id).result() not in (lost, roles.actor.start(node_id).result())
            assert resync(roles)["rollout/restarts"] >= 1
    finally:
        cluster.shutdown()
