"""Actor and engine in one process on the same parameters: nothing moves, the version goes up."""

from torch import nn

from rolecall.errors import RunError


def check_same_storage(actor: nn.Module, engine: nn.Module) -> None:
    """Equal weights without reading a byte: every parameter of the two models is the same memory.

    Raises:
        RunError: with the first parameter that one of them has for itself.
    """
    ours, theirs = dict(actor.named_parameters()), dict(engine.named_parameters())
    for name in ours.keys() | theirs.keys():
        if name not in ours or name not in theirs or ours[name].data_ptr() != theirs[name].data_ptr():
            raise RunError(f"Weight sync: the engine no longer works on the Actor's own parameter {name!r}.")
