"""The Rollout: an engine, and how new weights come into it."""

from typing import Any

from rolecall import engines, models
from rolecall.config import Config
from rolecall.errors import RunError
from rolecall.roles.actor import Actor
from rolecall.samples import Request, Sample
from rolecall.sync.buckets import Bucket, checksum
from rolecall.sync.shared import check_same_storage


class Rollout:
    """Generates with the configured engine.

    Args:
        config: the run's.
        actor: of the same process, if any: the engine then works on its very parameters, and the Actor's updates are
            the engine's. Without one it loads the model itself and waits for weights to be sent.
    """

    def __init__(self, config: Config, actor: Actor | None = None):
        self.actor = actor
        self.loaded = actor.loaded if actor else models.load(config.model, models.device())
        self.engine: Any = engines.create(config.rollout.engine, self.loaded, config.rollout.max_sequences)

    @property
    def version(self) -> int:
        """Of the engine's weights: 0 for those it started with."""
        return self.engine.version

    def generate(self, requests: list[Request]) -> list[Sample]:
        """See ``Engine.generate``."""
        return self.engine.generate(requests)

    def share_weights(self, version: int) -> None:
        """The Actor in this process has been updated: its parameters are ``version`` now.

        Raises:
            RunError: the engine does not work on the Actor's own parameters.
        """
        if self.actor is None:
            raise RunError("Weight sync: this Rollout shares no process with the Actor; its weights must be sent.")
        check_same_storage(self.actor.loaded.model, self.engine.model)
        self.engine.version = version

    def load_weights(self, version: int, sent: str, *buckets: Bucket) -> None:
        """Take the Actor's weights, all or none, as ``version``.

        Args:
            sent: checksum of the weights in the Actor's process.
            buckets: all of them.

        Raises:
            RunError: what arrived is not what was sent, or what the engine holds afterwards is something else.
            UserError, RunError: the engine refuses the weights; nothing is written then.
        """
        weights = [pair for bucket in buckets for pair in bucket.tensors()]
        if (arrived := checksum(weights)) != sent:
            raise RunError(
                f"Weight sync: {len(weights)} tensors arrived with checksum {arrived}, the Actor sent {sent}; "
                f"the engine keeps version {self.version}."
            )
        if (loaded := self.engine.load_weights(weights, version)) != sent:
            raise RunError(f"Weight sync: the engine holds weights with checksum {loaded}, the Actor sent {sent}.")
