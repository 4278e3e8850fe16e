"""The errors that a user is meant to read."""

import difflib
from collections.abc import Iterable
from typing import Any


class UserError(Exception):
    """What the user can mend: the message says what was wrong, with the value, and what to do.

    The command line prints it alone (no traceback) and exits with code 2.
    """


class RunError(Exception):
    """A run that cannot go on (a role died, a call timed out, a check failed); its checkpoints stay resumable."""


class ProcessDied(RunError):
    """The ``process`` of a pool died, or hung and was killed. ``happened``: the message without what to do about it."""

    def __init__(self, process: Any, happened: str, advice: str):
        super().__init__(f"{happened} {advice}")
        self.process, self.happened = process, happened


def nearest(name: str, known: Iterable[str], within: str = "") -> str:
    """A hint for a mistyped name: `` Did you mean 'temperature'?``, or the list of what is known.

    Args:
        within: what stands before the name where it is written out, such as ``"rollout."``.
    """
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f" Did you mean {within + close[0]!r}?" if close else f" Known: {', '.join(known) or 'none'}."


def check_known(what: str, name: str, known: Iterable[str]) -> None:
    """Refuse a name that is not among the known ones, with the nearest of them."""
    if name not in known:
        raise UserError(f"Unknown {what} {name!r}.{nearest(name, known)}")
