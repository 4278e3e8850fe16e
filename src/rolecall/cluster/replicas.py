"""The Rollout as the loop sees it: one object, whatever the number of its processes, and whichever of them die."""

import contextlib
import warnings
from collections import Counter
from collections.abc import Callable
from itertools import islice
from typing import Any

import ray

from rolecall.cluster.handles import Handle, Process
from rolecall.errors import ProcessDied, RunError
from rolecall.samples import Request, Sample

CLOSING = 10.0  # seconds
RESTARTS = 3  # of one process without a generation between that succeeds
Metrics = dict[str, float]


class Replicas:
    """Rollouts with the same weights, which share the requests.

    One that dies or hangs is started again, unless it shares its process with a role in training: it gets the Actor's
    weights as the last sync gave them, and what it was asked is asked again. A sample is a function of weights, prompt
    and seed, so neither the number of replicas nor a restart changes any.

    Args:
        handles: to each of them.
        restart: puts a new process with newly built roles in the place of one that died.
    """

    def __init__(self, handles: list[Handle], restart: Callable[[Process], None]):
        self.handles = handles
        self._restart = restart
        self._sync: Callable[[], Metrics] = dict  # before the first one all have the weights that they start with
        self._in_a_row: Counter[str] = Counter()  # restarts by pool since the last success
        self._restarts = 0  # since the last sync that the loop asked for

    @property
    def version(self) -> int:
        """Of the weights of all.

        Raises:
            RunError: they differ.
        """
        versions = [call.result() for call in [handle.start(held_version) for handle in self.handles]]
        if len(set(versions)) > 1:
            found = ", ".join(f"{handle.process.pool}: {v}" for handle, v in zip(self.handles, versions, strict=True))
            raise RunError(
                f"A weight sync reached only some replicas (versions {found}). Sync again before generating."
            )
        return versions[0]

    def generate(self, requests: list[Request]) -> list[Sample]:
        """See ``Engine.generate``: in the requests' order, each answered once.

        Raises:
            RunError: the replicas' weights are of several versions, or a process dies again and again.
        """
        answers: dict[int, list[Sample]] = {}
        while len(answers) < len(requests):
            try:
                self._ask(requests, answers)
            except ProcessDied as death:
                self._synchronise(self._to_restart(death))
        self._in_a_row.clear()
        return [sample for position in range(len(requests)) for sample in answers[position]]

    def synchronise(self, sync: Callable[[], Metrics]) -> Metrics:
        """Run ``sync``, which gives all of them the Actor's present weights; after a restart it is run again.

        Returns:
            its metrics, and ``rollout/restarts``: processes started again since the last call.
        """
        self._sync = sync
        metrics = self._synchronise()
        restarts, self._restarts = self._restarts, 0
        return metrics | {"rollout/restarts": restarts}

    def sleep(self) -> None:
        """See ``Rollout.sleep``."""
        for call in [handle.start("sleep") for handle in self.handles]:
            with contextlib.suppress(ProcessDied):  # the sync before the next generation finds it dead
                call.result()

    def close(self) -> None:
        """Let the engines end what they have started, for a moment; what is killed leaves its shared memory behind."""
        ray.wait([handle.start("close").ref for handle in self.handles], num_returns=len(self.handles), timeout=CLOSING)

    def _ask(self, requests: list[Request], answers: dict[int, list[Sample]]) -> None:
        """Add the answers that are missing; where a process dies, those of the others."""
        if len(self.handles) > 1:
            _ = self.version  # refuses several
        missing = [position for position in range(len(requests)) if position not in answers]
        shares = spread([requests[position] for position in missing], len(self.handles))
        calls = []
        for handle, share in zip(self.handles, shares, strict=True):
            if share:
                positions = [missing[index] for index in share]
                calls.append((positions, handle.start("generate", [requests[position] for position in positions])))
        death = None
        for positions, call in calls:
            try:
                samples = iter(call.result())
            except ProcessDied as error:
                death = error
            else:
                answers |= {position: list(islice(samples, requests[position].n)) for position in positions}
        if death:
            raise death

    def _synchronise(self, dead: Process | None = None) -> Metrics:
        """The last sync, after a restart of the process that is dead, and again as long as one dies meanwhile."""
        while True:
            try:
                if dead:
                    self._restart(dead)
                return self._sync()
            except ProcessDied as death:
                dead = self._to_restart(death)

    def _to_restart(self, death: ProcessDied) -> Process:
        """The process that died, which is counted and reported.

        Raises:
            ProcessDied: the same, if what was in training there is lost, or if it is none of the Rollout's.
            RunError: it has died too often.
        """
        process = death.process
        trained = {"actor", "critic"} & set(process.roles)
        if trained or all(handle.process is not process for handle in self.handles):
            raise death
        if self._in_a_row[process.pool] == RESTARTS:
            raise RunError(
                f"{death.happened} It was started again {RESTARTS} times and has generated nothing since. Look into "
                "Ray's logs of that node and at its memory (rollout.max_sequences, rollout.max_tokens and other "
                "programs there decide it), then go on from the last checkpoint with --resume."
            ) from death
        self._in_a_row[process.pool] += 1
        self._restarts += 1
        warnings.warn(f"{death.happened} It is started again.", stacklevel=2)
        return process


def held_version(rollout: Any) -> int:
    """In a Rollout's process: the version of its weights."""
    return rollout.version


def spread(requests: list[Request], engines: int) -> list[list[int]]:
    """Positions of the requests that each engine answers: groups stay whole, the longest go first to who has least."""
    shares: list[list[int]] = [[] for _ in range(engines)]
    tokens = [0] * engines
    most = [len(request.prompt) + request.n * request.sampling.max_tokens for request in requests]
    for position in sorted(range(len(requests)), key=lambda position: -most[position]):
        engine = tokens.index(min(tokens))
        shares[engine].append(position)
        tokens[engine] += most[position]
    return [sorted(share) for share in shares]
