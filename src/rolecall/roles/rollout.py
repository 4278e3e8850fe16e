"""The Rollout: an engine, and how new weights come into it."""

import logging
from typing import Any, Literal

import torch

from rolecall import engines
from rolecall.config import Config
from rolecall.errors import RunError
from rolecall.roles.actor import Actor
from rolecall.samples import Request, Sample
from rolecall.sync.buckets import plan
from rolecall.sync.ends import Link, Offer, Receiver
from rolecall.sync.shared import check_same_storage
from rolecall.training.sharding import whole

log = logging.getLogger(__name__)


class Rollout:
    """Generates with the configured engine.

    Args:
        config: the run's.
        actor: of the same process, if any: the engine then works on its very parameters, and the Actor's updates are
            the engine's. Without one the engine loads the model itself and waits for weights to be sent. So it does
            beside a shard of an Actor, whose whole weights are gathered into it.
    """

    def __init__(self, config: Config, actor: Actor | None = None):
        self.config, self.actor = config, actor
        sharded = actor is not None and actor.shards.count > 1
        self.engine: Any = engines.create(config, actor.loaded if actor and not sharded else None)
        if actor and sharded:
            entries = [entry for bucket in plan(actor.weights()) for entry in bucket]
            self.engine.expect(entries)
            size = sum(entry.nbytes for entry in entries) / 2**30
            log.info("The engine keeps a whole copy of the sharded Actor's weights: %.1f GiB.", size)
        self._receiver: Receiver | None = None
        self._awaited: set[int] = set()  # buckets of an update that have not arrived, or not as they were sent
        self._unfinished: int | None = None  # the version of an update that was begun

    @property
    def version(self) -> int:
        """Of the engine's weights: 0 for those it started with."""
        return self.engine.version

    def generate(self, requests: list[Request]) -> list[Sample]:
        """See ``Engine.generate``.

        Raises:
            RunError: the last update of the weights was begun and not finished, so that they are of two versions.
        """
        if self._unfinished is not None:
            raise RunError(
                f"The engine's weights are partly of version {self.version} and partly of {self._unfinished}: a weight "
                "sync failed half-way. Sync again before generating."
            )
        return self.engine.generate(requests)

    def sleep(self) -> None:
        """Free memory for training as ``rollout.sleep`` says, until ``wake``."""
        self.engine.sleep(self.config.rollout.sleep)

    def wake(self, part: Literal["weights", "kv_cache"]) -> None:
        """See ``Engine.wake``."""
        self.engine.wake(part)

    def close(self) -> None:
        """See ``Engine.close``."""
        self.engine.close()

    def share_weights(self, version: int) -> None:
        """The Actor in this process has been updated: its parameters are ``version`` now.

        Raises:
            RunError: the engine does not work on the Actor's own parameters.
        """
        if self.actor is None:
            raise RunError("Weight sync: this Rollout shares no process with the Actor; its weights must be sent.")
        check_same_storage(self.actor.loaded.model, self.engine.model)
        self.engine.version = version

    def gather_weights(self, version: int) -> int:
        """Copy the present weights of the Actor, of which this process has a shard, into the engine, as ``version``.

        All ranks gather one tensor after the other, at the same time, each for its own engine.

        Returns:
            bytes of the weights.
        """
        if self.actor is None:
            raise RunError("Weight sync: this Rollout shares no process with the Actor; its weights must be sent.")
        self._unfinished = version
        self.engine.start_update()
        copied = 0
        for name, tensor in self.actor.weights():
            self.engine.write([(name, whole(tensor))])
            copied += tensor.nbytes
        self.engine.finish_update(version)
        self._unfinished = None
        return copied

    def leave(self) -> None:
        """Break off what is under way with an Actor's end that is to be replaced, if there is any."""
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None

    def join(self, offer: Offer, link: Link, rank: int) -> None:
        """Learn what every sync will bring, and connect with the Actor's end.

        Raises:
            UserError, RunError: see ``Engine.expect``.
        """
        self._receiver = Receiver(offer, link, rank)
        self.engine.expect([entry for bucket in offer.buckets for entry in bucket])

    def start_update(self, version: int) -> None:
        """All weights of ``version`` come: ``write`` takes each bucket, ``finish_update`` puts them to use."""
        if self._receiver is None:
            raise RunError("Weight sync: this Rollout has not joined the Actor.")
        self._awaited = set()  # of an update that broke off
        self.engine.start_update()
        self._awaited = set(range(len(self._receiver.buckets)))
        self._unfinished = version

    def write(self, number: int, sent: int | None) -> None:
        """Take one bucket, of which the Actor has ``sent`` the digest.

        Raises:
            RunError: it has changed on the way, came before, or was never announced. What was overwritten by then
                generates nothing: the update stays unfinished.
        """
        if self._receiver is None or number not in self._awaited:
            raise RunError(f"Weight sync: bucket {number} came twice, or unannounced.")
        weights, arrived = self._receiver.unpack(number)
        self.engine.write(weights)
        if weights[0][1].is_cuda:  # all has been read: the Actor may use the memory again
            torch.cuda.current_stream().synchronize()
        self._receiver.check(number, arrived, sent)
        self._awaited.remove(number)  # only now: the driver may have asked to finish before it hears of an error here

    def finish_update(self) -> None:
        """All buckets are there: the engine generates from the new weights.

        Raises:
            RunError: some are missing or have changed on the way, or the engine holds something else than was sent.
        """
        if self._unfinished is None:
            raise RunError("Weight sync: no update was begun.")
        if self._awaited:
            raise RunError(
                f"Weight sync: {len(self._awaited)} buckets of version {self._unfinished} did not arrive as they were "
                f"sent ({sorted(self._awaited)})."
            )
        self.engine.finish_update(self._unfinished)
        self._unfinished = None
