"""What the loop holds of a role in another process: calls with a time-out, and errors that say who failed and where."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from rolecall.errors import ProcessDied, RunError, UserError

MOMENT = 10.0  # seconds


@dataclass(eq=False)
class Process:
    """A pool's process. Where it runs (``node``, its ``address``, ``gpus``, ``pid``) is known once it does.

    All of these are another's after a restart, which the handles to its roles outlive.
    """

    pool: str
    roles: list[str]
    launch: Callable[..., Any] = field(repr=False)  # starts a Worker there; may be told (node, pid) of the one before
    worker: Any  # the Ray actor handle that it returned
    node: str = "a node that has not answered yet"
    address: str = ""  # of the node, as others reach it
    gpus: tuple[int | str, ...] = ()  # Ray's numbers of them
    actor_id: str = ""  # Ray's, of this process
    pid: int = 0

    def __str__(self) -> str:
        return f"pool {self.pool!r} ({', '.join(self.roles)}; process {self.pid} on {self.node})"


class Future:
    """A call under way.

    Args:
        timeout: seconds, counted from the call's start.
        advice: what to do when they are over.
        sources: processes whose values the call waits for.
    """

    def __init__(self, ref: Any, what: str, process: Process, timeout: float, advice: str, sources: list[Process]):
        self.ref, self.what, self.process, self.timeout, self.advice = ref, what, process, timeout, advice
        self.sources = sources
        self._deadline = time.monotonic() + timeout

    @property
    def left(self) -> float:
        """Seconds until the time is over."""
        return max(0.0, self._deadline - time.monotonic())

    def result(self) -> Any:
        """Wait for the value.

        Raises:
            UserError, RunError: the role's own.
            RunError: the role raised anything else (with its traceback).
            ProcessDied: its process died, or the time is over (then its process is killed, because what hangs in it
                would keep its GPU and its memory).
        """
        try:
            return ray.get(self.ref, timeout=self.left)
        except GetTimeoutError:
            raise self.over() from None
        except RayTaskError as error:
            if isinstance(error.cause, (UserError, RunError)):
                raise error.cause from None
            if isinstance(error.cause, RayActorError):  # of a source
                raise self._died(error.cause) from None
            raise RunError(f"{self.what} failed in {self.process}:\n{error}") from None
        except RayError as error:
            raise self._died(error) from None

    def with_others(self, others: list["Future"]) -> "TeamFuture":
        """The same call on the other ranks of a team is waited for, too."""
        return TeamFuture(self, others)

    def over(self, *others: Process) -> ProcessDied:
        """Kill the process, and others that are waited for too: what to raise when the time is over."""
        late = [self.process, *others]
        for process in late:
            ray.kill(process.worker)
        happened = (
            f"{self.what} did not return within {self.timeout:g} s in {' and '.join(map(str, late))}; "
            f"{'its process was' if len(late) == 1 else 'these processes were'} killed."
        )
        return ProcessDied(self.process, happened, self.advice)

    def _died(self, error: RayError) -> ProcessDied:
        dead = getattr(error, "actor_id", None)
        process = next((source for source in self.sources if source.actor_id == dead), self.process)
        happened = f"The process of {process} died during {self.what}."
        return ProcessDied(process, happened, f"Go on from the last checkpoint with --resume. Ray says: {error}")


class TeamFuture(Future):
    """A call under way on all ranks; what it stands for is the first one's."""

    def __init__(self, first: Future, others: list[Future]):
        super().__init__(first.ref, first.what, first.process, first.timeout, first.advice, first.sources)
        self.ranks = [first, *others]

    def result(self) -> Any:
        """Wait for all ranks, and give the first one's value.

        Raises:
            UserError, RunError, ProcessDied: see ``Future.result``. When one rank has failed the others, which may be
                waiting for it, get a moment to tell: a death is the reason for any other error.
        """
        waiting = {future.ref: future for future in self.ranks}
        values: dict[Any, Any] = {}
        failures: list[Exception] = []
        while waiting:
            first, *others = waiting.values()
            done, _ = ray.wait(list(waiting), timeout=MOMENT if failures else first.left)
            if not done and not failures:
                raise first.over(*(future.process for future in others))
            if not done:
                break
            try:
                values[done[0]] = waiting.pop(done[0]).result()
            except (UserError, RunError) as error:
                failures.append(error)
        if failures:
            raise next((error for error in failures if isinstance(error, ProcessDied)), failures[0])
        return values[self.ref]


@dataclass(frozen=True)
class Handle:
    """A role in the process of its pool: ``handle.method(...)`` calls it and waits."""

    role: str
    process: Process
    timeout: float
    advice: str

    def start(self, method: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Future:
        """Start a call and return at once; ``.result()`` waits for its value.

        A function in the place of a method's name is run in the role's process with the role as its first argument.
        A Future among the arguments is handed on as the value it stands for, from process to process.
        """
        sources = [arg.process for arg in args if isinstance(arg, Future)]
        args = tuple(arg.ref if isinstance(arg, Future) else arg for arg in args)
        name = method if isinstance(method, str) else method.__name__
        ref = self.process.worker.call.remote(self.role, method, *args, **kwargs)
        return Future(ref, f"{self.role}.{name}", self.process, self.timeout, self.advice, sources)

    def __getattr__(self, method: str) -> Callable[..., Any]:
        if method.startswith("_"):
            raise AttributeError(method)
        return lambda *args, **kwargs: self.start(method, *args, **kwargs).result()


@dataclass(frozen=True)
class TeamHandle(Handle):
    """A role sharded over the processes of its pool, which is one to whoever calls it.

    All ranks take part in every call; ``process`` is the first one's, and so is the value.
    """

    others: list[Process]

    def start(self, method: str | Callable[..., Any], *args: Any, **kwargs: Any) -> TeamFuture:
        """See ``Handle.start``."""
        ranks = [Handle(self.role, process, self.timeout, self.advice) for process in (self.process, *self.others)]
        shared = [arg if isinstance(arg, Future) else ray.put(arg) for arg in args]  # samples are stored once for all
        first, *others = [rank.start(method, *shared, **kwargs) for rank in ranks]
        return first.with_others(others)
