"""What travels in a sync: the policy's parameters under their Hugging Face names, cut into buckets of bytes."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from rolecall.errors import RunError
from rolecall.training.sharding import whole

BUCKET_BYTES = 512 * 2**20
ALIGNMENT = 256  # bytes: every tensor starts where any dtype, and a GPU's widest load, may start
ROW = 2**16  # bytes: a bucket is a whole number of these, see ``digest``
COLUMNS = ROW // 8  # 64-bit words
Weights = Iterable[tuple[str, Tensor]]


@dataclass(frozen=True)
class Entry:
    """One tensor and where it lies in its bucket (``offset`` in bytes)."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


Bucket = tuple[Entry, ...]


def plan(weights: Weights, limit: int = BUCKET_BYTES) -> list[Bucket]:
    """Cut the weights, in their order, into buckets of at most ``limit`` bytes; a larger tensor has one of its own."""
    buckets: list[list[Entry]] = []
    end = 0
    for name, tensor in weights:
        start = _up(end, ALIGNMENT)
        if not buckets or start + tensor.nbytes > limit:
            buckets.append([])
            start = 0
        buckets[-1].append(Entry(name, tuple(tensor.shape), tensor.dtype, start))
        end = start + tensor.nbytes
    return [tuple(bucket) for bucket in buckets]


def size(bucket: Bucket) -> int:
    """Bytes of memory that a bucket takes."""
    return max(ROW, _up(bucket[-1].offset + bucket[-1].nbytes, ROW))


def views(data: Tensor, bucket: Bucket) -> list[tuple[str, Tensor]]:
    """(name, tensor) of each entry, on the bytes in ``data`` (uint8)."""
    raw = [(entry, data[entry.offset : entry.offset + entry.nbytes]) for entry in bucket]
    return [(entry.name, part.view(entry.dtype).view(entry.shape)) for entry, part in raw]


@torch.no_grad()
def fill(data: Tensor, bucket: Bucket, weights: Weights) -> None:
    """Copy the tensors of ``bucket``, which come next from ``weights``, into the bytes of ``data``, from any device.

    Sharded ones are gathered: no more of the model than this bucket is whole at a time.

    Raises:
        RunError: other tensors come than were planned.
    """
    places, values = [], []
    for (name, place), (found, value) in zip(views(data, bucket), weights, strict=False):
        if (found, value.shape, value.dtype) != (name, place.shape, place.dtype):
            raise RunError(
                f"Weight sync: {found!r} {tuple(value.shape)} {value.dtype} stands where {name!r} {tuple(place.shape)} "
                f"{place.dtype} was announced: the model's parameters have changed since the first sync."
            )
        places.append(place)
        values.append(whole(value))
    if len(places) < len(bucket):
        raise RunError(f"Weight sync: {bucket[len(places)].name!r} was announced, and is no parameter any more.")
    torch._foreach_copy_(places, values)


@torch.no_grad()
def digest(data: Tensor) -> Tensor:
    """64 bits that depend on every bit of a bucket (uint8, a multiple of ``ROW``): an int64 of no dimension.

    The same on every device. On a GPU it is computed while the caller goes on, in few kernels: to start many takes the
    host longer than the GPU computes.

    The bytes, read as a table of 64-bit words, are summed by row and by column (modulo 2^64, so in any order): one
    changed word changes both kinds, two swapped words at least one. Each sum is mixed, one to one, multiplied by a
    factor of its place, and the products are added up. It guards against errors, not against intent.
    """
    table = data.view(torch.int64).view(-1, COLUMNS)
    sums = torch.cat([table.sum(0), table.sum(1)])
    sums ^= (sums >> 32) & 0xFFFFFFFF  # else the product would carry changes of high bits out of the 64
    return (sums * _factors(len(sums), data.device)).sum()


@lru_cache
def _factors(count: int, device: torch.device) -> Tensor:
    """A number for each place, by the steps of MurmurHash3's finalizer (>> keeps the sign here).

    Columns' are even and rows' odd, so that what a word changes in both does not cancel out.
    """
    words = torch.arange(1, count + 1, device=device)
    for factor in (-0xAE502812AA7333, -0x3B314601E57A13AD):
        words = (words ^ (words >> 33)) * factor
    words = (words ^ (words >> 33)) | 1
    words[:COLUMNS] *= 2
    return words


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
