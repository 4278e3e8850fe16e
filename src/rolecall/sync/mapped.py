"""A buffer that two processes of one machine both see: CUDA IPC on a GPU, a mapped file in memory on the host.

What one writes the other reads in place; when it may is for the caller to say.
"""

import os
import shutil
import tempfile
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from rolecall.errors import RunError, UserError

SHARED_MEMORY = "/dev/shm"  # small in many containers


def create(nbytes: int, device: torch.device) -> tuple[Tensor, Any]:
    """A new buffer of bytes, and what another process opens it by."""
    if device.type == "cuda":
        buffer = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        return buffer, reduce_tensor(buffer)
    file, path = tempfile.mkstemp(prefix="rolecall-", dir=folder(nbytes))
    try:
        os.truncate(file, nbytes)
        if hasattr(os, "posix_fallocate"):  # not on macOS; a page that cannot be had later would end the process
            os.posix_fallocate(file, 0, nbytes)
    except OSError as error:
        os.unlink(path)
        raise UserError(
            f"Weight sync: no room for a buffer of {nbytes / 2**20:.0f} MiB in {os.path.dirname(path)} "
            f"({error.strerror}). Make room there, or set TMPDIR to a folder that has it."
        ) from None
    finally:
        os.close(file)
    return attach(path, nbytes), path


def folder(nbytes: int) -> str:
    """Where a buffer on the host goes: without room in shared memory, to the temporary files (which stay in memory)."""
    room = os.path.isdir(SHARED_MEMORY) and shutil.disk_usage(SHARED_MEMORY).free > 2 * nbytes
    return SHARED_MEMORY if room else tempfile.gettempdir()


def attach(handle: Any, nbytes: int) -> Tensor:
    """The other process's buffer, as a tensor of this one."""
    if isinstance(handle, str):
        if not os.path.exists(handle):  # from_file would make a new one
            raise RunError(f"Weight sync: the Actor's buffer {handle} is gone.")
        return torch.from_file(handle, shared=True, size=nbytes, dtype=torch.uint8)
    rebuild, arguments = handle
    return rebuild(*arguments)


def unlink(handle: Any) -> None:
    """All have opened it: nothing of it outlives them."""
    if isinstance(handle, str):
        os.unlink(handle)
