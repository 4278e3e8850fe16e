"""A role's model over several processes, its ranks (FSDP2): each keeps a part of every weight and of Adam's state.

All ranks get the same samples and take the same steps, each on its share of them; a decoder layer's weights are whole
on a rank only while that layer computes. What ranks must know of the others' shares is small and travels as objects.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from itertools import accumulate
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers.modeling_layers import GradientCheckpointingLayer

from rolecall import models
from rolecall.errors import RunError
from rolecall.models import Loaded
from rolecall.samples import Sample, by_group
from rolecall.training.packing import MicroBatch, micro_batches

T = TypeVar("T")

# What a rank computes where only others have samples left: a forward and backward pass that adds 0 to every gradient.
NOTHING = Sample(
    group_id=-1,
    index=0,
    prompt_id="",
    prompt=[0],
    response=[0],
    logprobs=[0.0],
    response_mask=[0],
    versions=[],
    finish="abort",
    text="",
    old_logprobs=[0.0],
    ref_logprobs=[0.0],
    values=[0.0],
    advantages=[0.0],
    returns=[0.0],
)


def open_store() -> dist.TCPStore:
    """Where ranks meet, to be kept in the process of the first of them; all are told its ``port``."""
    return dist.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)


def meet(rank: int, address: str, port: int, ranks: int, seconds: float) -> None:
    """Join the other ranks: the roles that this process builds from now on are sharded over all of them.

    Args:
        address, port: of the store.
        seconds: that the others may take to come, and then any exchange with them.

    Raises:
        RunError: they do not come.
    """
    limit = timedelta(seconds=seconds)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    try:
        store = dist.TCPStore(address, port, is_master=False, timeout=limit)
        dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=limit)
        dist.all_reduce(torch.zeros(1, device=models.device()))  # NCCL connects only now
    except RuntimeError as error:
        raise RunError(f"Rank {rank} of {ranks} did not meet the others at {address}:{port}: {error}") from None


def leave() -> NoReturn:
    """End this process, which has met others, and successfully.

    Not through Python's own end: gloo's threads may hold tensors still, and to give one back then aborts the process.
    """
    dist.destroy_process_group()
    os._exit(0)


class _Root(nn.Module):
    """FSDP2 gathers a module's weights only while its ``forward`` runs. This one's runs any function.

    So all of it (log-probabilities, too, which use the output embedding directly) finds embedding, norm and head whole.
    """

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, compute: Callable[[], Any]) -> Any:
        return compute()


@dataclass(frozen=True)
class Shards:
    """How a module lies over the ranks: see ``shard``. With one rank, which has all of it, nothing here does anything.

    Args:
        dtype: that sharded weights compute in.
    """

    rank: int = 0
    count: int = 1
    dtype: torch.dtype | None = None
    root: Any = None

    def run(self, compute: Callable[[], T]) -> T:
        """``compute()``, which may use the module and must be run on all ranks at once."""
        return compute() if self.root is None else self.root(compute)

    def micro_batches(self, samples: list[Sample], loaded: Loaded, budget: int) -> Iterator[MicroBatch]:
        """This rank's micro-batches of the samples, as many as any rank has: ``NOTHING``'s are added."""
        device = next(loaded.model.parameters()).device

        def cut(samples: list[Sample]) -> Iterator[MicroBatch]:
            return micro_batches(
                samples,
                budget,
                packed=loaded.packed,
                device=device,
                compiled=loaded.compiled,
                window=loaded.window,
                invariant=loaded.invariant,
            )

        if self.root is None:
            yield from cut(samples)
            return
        micros = list(cut(share(samples, self.rank, self.count)))
        most = max(self.gather([len(micros)]))  # ranks run equally many passes, or their collectives wait for ever
        yield from micros
        for _ in range(most - len(micros)):
            yield next(cut([NOTHING]))

    def gather(self, mine: list[T]) -> list[T]:
        """The items of all ranks, in their order."""
        if self.root is None:
            return mine
        items: list[Any] = [None] * self.count
        dist.all_gather_object(items, mine)
        return [item for some in items for item in some]

    def on_host(self, weights: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """The whole weights in the first rank's main memory, gathered one at a time; the others only take part."""
        gathered = ((name, whole(tensor)) for name, tensor in weights)
        return {name: tensor.cpu() for name, tensor in gathered if self.rank == 0}


WHOLE = Shards()


def shard(module: nn.Module) -> Shards:
    """Cut the module's weights, in place, into a shard for each of the ranks that have met.

    Decoder layers are gathered one at a time, the other weights while anything computes. What is trained in a narrower
    type than FP32 is kept in FP32, gathered in its own type, and its gradients add up in FP32.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return WHOLE
    first = next(module.parameters())
    dtype, mesh = first.dtype, init_device_mesh(first.device.type, (dist.get_world_size(),))
    layers = [layer for layer in module.modules() if isinstance(layer, GradientCheckpointingLayer)]
    heads = [child for child in module.children() if next(child.parameters()).dtype != dtype]  # a Critic's, in FP32
    root = _Root(module)
    # Inner parts first: what one of them has taken is a DTensor from then on, and the root takes what is left.
    for part in (*layers, *heads, root):
        weights = [parameter for parameter in part.parameters() if not isinstance(parameter, DTensor)]
        policy = MixedPrecisionPolicy(cast_forward_inputs=False)
        if any(weight.requires_grad and weight.itemsize < 4 for weight in weights):
            policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
            for weight in weights:
                weight.data = weight.data.float()
        fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    for part in root.modules():
        # By this mark torch.compile would take a head's size for a length; FlexAttention's kernel needs a constant.
        part._is_fsdp_managed_module = False  # type: ignore[assignment]
    return Shards(dist.get_rank(), dist.get_world_size(), dtype, root)


def share(samples: list[Sample], rank: int, ranks: int) -> list[Sample]:
    """A rank's part of the samples: about as many tokens as the others', a group cut only where two ranks' parts meet.

    Samples with an empty response, which have nothing to compute, are in no part.
    """
    groups = by_group([sample for sample in samples if sample.response]).values()
    ordered = [sample for group in groups for sample in group]
    sizes = [len(sample.response) + (len(sample.prompt) if sample is g[0] else 0) for g in groups for sample in g]
    ends = list(accumulate(sizes))
    return [
        sample
        for sample, size, end in zip(ordered, sizes, ends, strict=True)
        if (2 * end - size) * ranks // (2 * ends[-1]) == rank  # it goes where its middle lies
    ]


@torch.no_grad()
def whole(tensor: Tensor) -> Tensor:
    """A sharded tensor from all ranks' shards (all of them must call it); any other as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """This rank's shard; of a tensor that is not sharded all of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
