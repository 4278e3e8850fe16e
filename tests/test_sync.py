"""Stage 6: what travels, what is refused, and that the engine then generates what the Actor's weights say."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rolecall import models, sync
from rolecall.cluster import Roles, spawn
from rolecall.config import Config
from rolecall.errors import RunError, UserError
from rolecall.roles.actor import Actor
from rolecall.roles.rollout import Rollout
from rolecall.samples import Request, Sampling
from rolecall.sync import checksum, host
from rolecall.sync.buckets import ALIGNMENT, Bucket, pack, plan

PROMPT = [2, 3, 7, 11, 4]
GREEDY = Request(0, "p", PROMPT, 1, 0, Sampling(max_tokens=8, temperature=0.0))
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.bool, torch.float64)


@st.composite
def weights(draw) -> dict[str, torch.Tensor]:
    """A few named tensors of any shape (scalars and empty ones too) and type."""
    shapes = st.lists(st.integers(0, 40), max_size=3)
    kinds = draw(st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), min_size=1, max_size=8))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    return {
        f"layer.{i}": (torch.randn(shape, generator=generator) * 50).to(dtype) for i, (shape, dtype) in enumerate(kinds)
    }


@given(weights(), st.integers(1, 20_000))
def test_buckets_carry_every_tensor_exactly(tensors, limit):
    buckets = [pack(tensors, entries) for entries in plan(tensors.items(), limit)]
    arrived = [pair for bucket in buckets for pair in bucket.tensors()]
    assert [name for name, _ in arrived] == list(tensors)
    for name, tensor in arrived:
        assert (tensor.dtype, tensor.shape) == (tensors[name].dtype, tensors[name].shape)
        assert torch.equal(tensor, tensors[name])
    assert checksum(arrived) == checksum(tensors.items()) == checksum(reversed(list(tensors.items())))
    for bucket in buckets:
        assert len(bucket.data) <= limit or len(bucket.entries) == 1
        assert all(entry.offset % ALIGNMENT == 0 for entry in bucket.entries)


def test_a_plan_worked_out_by_hand():
    tensors = {"a": torch.zeros(3), "b": torch.zeros(100), "c": torch.zeros(64), "d": torch.zeros(1)}
    places = [[(entry.name, entry.offset, entry.nbytes) for entry in bucket] for bucket in plan(tensors.items(), 700)]
    assert places == [[("a", 0, 12), ("b", 256, 400)], [("c", 0, 256), ("d", 256, 4)]]
    assert len(plan(tensors.items(), 655)) == 3  # a and b would need 656


@given(st.integers(0, 30_000), st.integers(0, 30_000), st.integers(0, 31))
def test_any_flipped_bit_and_any_swap_changes_the_checksum(here, there, bit):
    tensor = torch.arange(30_001, dtype=torch.int32)
    flipped, swapped = tensor.clone(), tensor.clone()
    flipped[here] ^= torch.tensor(1, dtype=torch.int32) << bit
    swapped[[here, there]] = tensor[[there, here]]
    assert checksum([("w", flipped)]) != checksum([("w", tensor)])
    assert (checksum([("w", swapped)]) == checksum([("w", tensor)])) == (here == there)


def test_the_checksum_covers_names_shapes_and_types():
    zeros = torch.zeros(4, 6)
    sums = [
        [("a", zeros)],
        [("b", zeros)],
        [("a", zeros.view(6, 4))],
        [("a", zeros.int())],
        [("a", zeros), ("a", zeros)],
    ]
    assert len({checksum(tensors) for tensors in sums}) == len(sums)
    assert checksum([("a", torch.ones(8, 8)[:, ::2])]) == checksum([("a", torch.ones(8, 4))])  # strides do not count
    odd = torch.arange(100, dtype=torch.uint8)
    assert checksum([("a", odd[3:])]) == checksum([("a", odd[3:].clone())])  # nor where in memory it lies


def test_tied_weights_travel_once(tiny_path):
    model = models.load(config(tiny_path).model, "cpu").model
    model.lm_head.weight = model.model.embed_tokens.weight
    names = [entry.name for bucket in plan(model.named_parameters()) for entry in bucket]
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_checksum_is_the_same_on_a_gpu():
    tensors = [(str(dtype), (torch.randn(3001, 7) * 50).to(dtype)) for dtype in DTYPES]
    assert checksum((name, tensor.cuda()) for name, tensor in tensors) == checksum(tensors)


def config(tiny_path: Path, dtype: str = "float32", **cluster) -> Config:
    return Config(model={"path": str(tiny_path), "dtype": dtype}, cluster={"timeout": 120.0} | cluster)


def shift(actor: Actor, seed: int) -> None:
    """Other weights, as an update would leave them: in place."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in actor.loaded.model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter) * 0.3)


def greedy(actor: Actor) -> list[int]:
    """Eight tokens by plain forward passes of the Actor's model, without an engine."""
    tokens = list(PROMPT)
    with torch.no_grad():
        for _ in range(8):
            tokens.append(int(actor.loaded.model(torch.tensor([tokens])).logits[0, -1].argmax()))
            if tokens[-1] == 1:
                break
    return tokens[len(PROMPT) :]


def versions(rollout) -> list[tuple[int, int, int]]:
    return rollout.generate([GREEDY])[0].versions


# In one process


def test_shared_weights_are_the_actors_own(tiny_path):
    actor = Actor(config(tiny_path))
    rollout = Rollout(config(tiny_path), actor)
    before = rollout.generate([GREEDY])[0].response
    assert before == greedy(actor)
    shift(actor, seed=1)
    rollout.share_weights(1)
    assert rollout.version == 1
    after = rollout.generate([GREEDY])[0]
    assert after.response == greedy(actor) != before
    assert after.versions == [(0, len(after.response), 1)]
    rollout.share_weights(7)
    assert rollout.version == 7


def test_weights_that_are_shared_no_longer_are_noticed(tiny_path):
    actor = Actor(config(tiny_path))
    rollout = Rollout(config(tiny_path), actor)
    model = actor.loaded.model
    actor.loaded = replace(actor.loaded, model=models.load(config(tiny_path).model, "cpu").model)
    with pytest.raises(RunError, match="no longer works on the Actor's own parameter"):
        rollout.share_weights(1)
    actor.loaded = replace(actor.loaded, model=model)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
    rollout.share_weights(1)  # one model, whatever its parameters are
    assert rollout.version == 1
    with pytest.raises(RunError, match="must be sent"):
        Rollout(config(tiny_path)).share_weights(1)


@pytest.fixture
def apart(tiny_path) -> tuple[Actor, Rollout]:
    """Actor and Rollout with weights of their own; the Actor's have moved on."""
    actor, rollout = Actor(config(tiny_path)), Rollout(config(tiny_path))
    shift(actor, seed=2)
    return actor, rollout


def announced(actor: Actor, rollout: Rollout, version: int, limit: int = 20_000) -> list[Bucket]:
    """The Actor's weights in several buckets, after the Rollout has been told what they will be."""
    buckets = host.describe(actor, limit)
    assert len(buckets) > 2
    rollout.start_update([entry for entries in buckets for entry in entries], version)
    return [host.export(actor, entries) for entries in buckets]


def update(actor: Actor, rollout: Rollout, version: int) -> None:
    for bucket in announced(actor, rollout, version):
        rollout.write(bucket)
    rollout.finish_update()


def held(rollout: Rollout) -> str:
    return checksum(rollout.engine.model.named_parameters())


def test_sent_weights_are_in_place_bit_for_bit(apart):
    actor, rollout = apart
    sent = checksum(actor.loaded.model.named_parameters())
    assert held(rollout) != sent
    update(actor, rollout, 1)
    assert rollout.version == 1
    assert held(rollout) == sent
    assert rollout.generate([GREEDY])[0].response == greedy(actor)
    update(actor, rollout, 9)
    assert rollout.version == 9


FAULTS = {
    "one flipped bit": r"'[\w.]+' arrived with digest \w+, the Actor sent \w+; version 1 fails",
    "a bucket lost": r"\d tensors never arrived \(model\.[\w.]+, .*; version 1 fails",
    "a bucket twice": r"'model\.embed_tokens\.weight' came twice, or unannounced; version 1 fails",
    "another Actor's bucket": r"'[\w.]+' arrived with digest \w+, the Actor sent \w+; version 1 fails",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_not_what_was_sent_is_refused_and_half_an_update_generates_nothing(apart, fault):
    actor, rollout = apart
    buckets = announced(actor, rollout, 1)
    if fault == "one flipped bit":
        buckets[1].data[buckets[1].entries[0].offset + 5] ^= 1
    elif fault == "a bucket lost":
        del buckets[1]
    elif fault == "a bucket twice":
        buckets[1] = buckets[0]
    else:
        shift(actor, seed=3)
        buckets[1] = host.export(actor, buckets[1].entries)
    rollout.write(buckets[0])
    before = held(rollout)
    with pytest.raises(RunError, match=FAULTS[fault]):
        if fault != "a bucket lost":
            rollout.write(buckets[1])
        else:
            rollout.finish_update()
    assert held(rollout) == before  # nothing of the bad bucket was written
    assert rollout.version == 0
    with pytest.raises(RunError, match=r"partly of version 0 and partly of 1: .* Sync again"):
        rollout.generate([GREEDY])
    update(actor, rollout, 2)
    assert rollout.generate([GREEDY])[0].response == greedy(actor)


def test_weights_of_another_model_are_refused_by_name_and_the_old_ones_stay(apart):
    actor, rollout = apart
    old, before = held(rollout), rollout.generate([GREEDY])
    model = actor.loaded.model
    model.extra = model.model.norm.weight
    del model.model.norm
    with pytest.raises(RunError, match=r"no parameter 'extra'"):
        announced(actor, rollout, 1)
    del model.extra
    with pytest.raises(RunError, match=r"model\.norm\.weight"):
        announced(actor, rollout, 1)
    assert held(rollout) == old and rollout.generate([GREEDY]) == before
    with pytest.raises(RunError, match="no update was begun"):
        rollout.finish_update()


def test_two_types_are_refused_with_the_way_out(tiny_path):
    actor, rollout = Actor(config(tiny_path, "bfloat16")), Rollout(config(tiny_path))
    old = held(rollout)
    with pytest.raises(UserError, match=r"torch\.bfloat16, the engine in torch\.float32 .*--model\.dtype"):
        announced(actor, rollout, 1, limit=10_000)
    assert held(rollout) == old


def test_an_engine_that_holds_something_else_is_noticed(apart):
    actor, rollout = apart
    for bucket in announced(actor, rollout, 1):
        rollout.write(bucket)
    with torch.no_grad():
        rollout.engine.model.get_parameter("model.norm.weight")[3] += 1
    with pytest.raises(RunError, match=r"the engine's 'model\.norm\.weight' has digest \w+, the Actor sent \w+"):
        rollout.finish_update()


class Here:
    """A handle to a role in this process. What is started runs when it is waited for, at the latest."""

    def __init__(self, role: Any, log: list[str]):
        self.role, self.log = role, log

    def start(self, method: Any, *args: Any) -> "Here.Later":
        return Here.Later(self, method, args)

    def __getattr__(self, method: str) -> Any:
        return getattr(self.role, method)

    class Later:
        def __init__(self, handle: "Here", method: Any, args: tuple):
            self.handle, self.method, self.args = handle, method, args
            self.handle.log.append(f"start {getattr(method, '__name__', method)}")

        def result(self) -> Any:
            args = [arg.result() if isinstance(arg, Here.Later) else arg for arg in self.args]
            if callable(self.method):
                return self.method(self.handle.role, *args)
            self.handle.log.append(f"{self.method} done")
            return getattr(self.handle.role, self.method)(*args)


def test_no_more_than_two_buckets_are_on_their_way(apart):
    actor, rollout = apart
    log: list[str] = []
    moved = host.sync(Here(actor, log), [Here(rollout, log)], 3, limit=60_000)
    begin = ["start describe", "start start_update", "start_update done"]
    assert log[:8] == [*begin, *["start export", "start write"] * 2, "write done"]
    for end in range(len(log)):
        started, done = log[:end].count("start write"), log[:end].count("write done")
        assert started - done <= host.IN_FLIGHT
    assert log.count("write done") == log.count("start export") > 4
    assert moved == sum(p.nbytes for p in actor.loaded.model.parameters())
    assert rollout.generate([GREEDY])[0].response == greedy(actor) and rollout.version == 3


# Through Ray


@pytest.fixture(scope="module")
def in_two_processes(tiny_path, local_ray):
    pools = {"train": {"roles": ["actor"]}, "roll": {"roles": ["rollout"]}, "score": {"roles": ["reward"]}}
    with spawn(config(tiny_path, pools=pools)) as roles:
        yield roles


def through_sync(roles: Roles):
    first = roles.rollout.generate([GREEDY])[0]
    assert first.response == roles.actor.start(greedy).result()
    for step in (1, 2):
        roles.actor.start(shift, step).result()
        moved = sync.sync(roles, step)
        after = roles.rollout.generate([GREEDY])[0]
        assert after.response == roles.actor.start(greedy).result()
        assert after.versions == [(0, len(after.response), step)]
        yield moved, first.response, after.response
    assert sync.sync(roles, version=10)["sync/version"] == 10


def test_sync_between_two_processes_changes_what_is_generated(in_two_processes, tiny):
    responses = []
    for moved, first, after in through_sync(in_two_processes):
        assert moved["sync/bytes"] == sum(p.nbytes for p in tiny.model.parameters())
        responses += [first, after]
    assert len({tuple(response) for response in responses}) == 3


def test_sync_in_many_buckets_between_two_processes(in_two_processes):
    in_two_processes.actor.start(shift, 8).result()
    host.sync(in_two_processes.actor, in_two_processes.rollout.handles, 4, limit=60_000)
    after = in_two_processes.rollout.generate([GREEDY])[0]
    assert after.response == in_two_processes.actor.start(greedy).result()
    assert after.versions == [(0, len(after.response), 4)]


def test_sync_in_one_process_moves_nothing(tiny_path, local_ray):
    with spawn(config(tiny_path)) as roles:
        assert [moved["sync/bytes"] for moved, _, _ in through_sync(roles)] == [0, 0]


def test_a_failed_sync_names_itself(in_two_processes):
    in_two_processes.actor.start(poison).result()
    with pytest.raises(RunError, match=r"no parameter 'extra'"):
        sync.sync(in_two_processes, 11)
    in_two_processes.actor.start(cure).result()
    assert sync.sync(in_two_processes, 12)["sync/version"] == 12


def poison(actor: Actor) -> None:
    actor.loaded.model.extra = torch.nn.Parameter(torch.zeros(2))


def cure(actor: Actor) -> None:
    del actor.loaded.model.extra
