"""Stage 6: what travels, what is refused, and that the engine then generates what the Actor's weights say."""

import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rolecall import models
from rolecall.cluster import Roles, spawn
from rolecall.cluster.handles import Process
from rolecall.config import Config
from rolecall.errors import RunError, UserError
from rolecall.roles.actor import Actor
from rolecall.roles.rollout import Rollout
from rolecall.samples import Request, Sampling
from rolecall.sync import WeightSync
from rolecall.sync.buckets import ALIGNMENT, ROW, digest, fill, plan, size, views
from rolecall.sync.driver import choose
from rolecall.sync.ends import Link, Receiver, Sender

PROMPT = [2, 3, 7, 11, 4]
GREEDY = Request(0, "p", PROMPT, 1, 0, Sampling(max_tokens=8, temperature=0.0))
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.bool, torch.float64)
LINK = Link("mapped", "cpu", 20_000, 2, True, "127.0.0.1", 2, 60.0)


@st.composite
def weights(draw) -> dict[str, torch.Tensor]:
    """A few named tensors of any shape (scalars and empty ones too) and type."""
    shapes = st.lists(st.integers(0, 40), max_size=3)
    kinds = draw(st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), min_size=1, max_size=8))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    return {
        f"layer.{i}": (torch.randn(shape, generator=generator) * 50).to(dtype) for i, (shape, dtype) in enumerate(kinds)
    }


def packed(tensors: dict[str, torch.Tensor], limit: int) -> Iterator[tuple[Any, torch.Tensor]]:
    """Each bucket and its bytes."""
    left = iter(tensors.items())
    for bucket in plan(tensors.items(), limit):
        data = torch.full((size(bucket),), 7, dtype=torch.uint8)  # as another bucket has left it
        fill(data, bucket, left)
        yield bucket, data


@given(weights(), st.integers(1, 20_000))
def test_buckets_carry_every_tensor_exactly(tensors, limit):
    arrived = []
    for bucket, data in packed(tensors, limit):
        arrived += views(data, bucket)
        assert bucket[-1].offset + bucket[-1].nbytes <= limit or len(bucket) == 1
        assert all(entry.offset % ALIGNMENT == 0 for entry in bucket)
        assert len(data) % ROW == 0
    assert [name for name, _ in arrived] == list(tensors)
    for name, tensor in arrived:
        assert (tensor.dtype, tensor.shape) == (tensors[name].dtype, tensors[name].shape)
        assert torch.equal(tensor, tensors[name])


def test_a_plan_worked_out_by_hand():
    tensors = {"a": torch.zeros(3), "b": torch.zeros(100), "c": torch.zeros(64), "d": torch.zeros(1)}
    places = [[(entry.name, entry.offset, entry.nbytes) for entry in bucket] for bucket in plan(tensors.items(), 700)]
    assert places == [[("a", 0, 12), ("b", 256, 400)], [("c", 0, 256), ("d", 256, 4)]]
    assert len(plan(tensors.items(), 655)) == 3  # a and b would need 656
    assert [size(bucket) for bucket in plan({"a": torch.zeros(2049), "b": torch.zeros(1)}.items())] == [ROW]
    assert [size(bucket) for bucket in plan({"a": torch.zeros(0)}.items())] == [ROW]


@pytest.mark.parametrize(
    "later", [{"a": torch.zeros(4)}, {"a": torch.zeros(3).half()}, {"c": torch.zeros(3)}, {}], ids=str
)
def test_other_tensors_than_were_planned_are_not_packed(later):
    (bucket,) = plan({"a": torch.zeros(3)}.items())
    with pytest.raises(RunError, match=r"'a'.* was announced"):
        fill(torch.zeros(size(bucket), dtype=torch.uint8), bucket, iter(later.items()))


@given(st.integers(0, 2 * ROW // 4 - 1), st.integers(0, 2 * ROW // 4 - 1), st.integers(0, 31))
def test_any_flipped_bits_and_any_swap_change_the_digest(here, there, bit):
    tensor = torch.arange(2 * ROW // 4, dtype=torch.int32)
    flipped, twice, swapped = tensor.clone(), tensor.clone(), tensor.clone()
    mask = torch.tensor(1, dtype=torch.int32) << bit
    flipped[here] ^= mask
    twice[[here, there]] ^= mask
    swapped[[here, there]] = tensor[[there, here]]
    first = digest(tensor.view(torch.uint8))
    assert digest(flipped.view(torch.uint8)) != first
    assert digest(twice.view(torch.uint8)) != first
    assert (digest(swapped.view(torch.uint8)) == first) == (here == there)


def test_the_highest_bits_of_two_words_do_not_cancel_out():
    """The sign of the last bfloat16 of a word is bit 63, which alone a product keeps of it; in one row, and in two."""
    data = torch.zeros(4, ROW // 8, dtype=torch.int64)
    seen = {int(digest(data.view(-1).view(torch.uint8)))}
    for row, column in [(row, column) for row in range(4) for column in range(0, ROW // 8, 31)][1:]:
        changed = data.clone()
        changed[0, 0] = changed[row, column] = -(2**63)
        seen.add(int(digest(changed.view(-1).view(torch.uint8))))
    assert len(seen) == 4 * 265


def test_a_digest_worked_out_by_hand():
    """Two rows of 8192 words: ones, and 2^28 - 1 with an eight. Columns add up to 2^28 (one to 9), rows to more."""

    def signed(word: int) -> int:
        return (word + 2**63) % 2**64 - 2**63

    def factor(place: int) -> int:
        word = place + 1
        for step in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):  # MurmurHash3's
            word = signed((word ^ (word >> 33)) * step)
        return ((word ^ (word >> 33)) | 1) * (2 if place < 8192 else 1)

    words = torch.ones(2, 8192, dtype=torch.int64)
    words[1] = 2**28 - 1
    words[1, 5] = 8
    long = 8191 * (2**28 - 1) + 8
    sums = [2**28] * 5 + [9] + [2**28] * 8186 + [8192, long ^ (long >> 32)]
    by_hand = signed(sum(total * factor(place) for place, total in enumerate(sums)))
    assert digest(words.view(-1).view(torch.uint8)) == by_hand


def test_tied_weights_travel_once(tiny_path):
    model = models.load(config(tiny_path).model, "cpu").model
    model.lm_head.weight = model.model.embed_tokens.weight
    names = [entry.name for bucket in plan(model.named_parameters()) for entry in bucket]
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_digest_is_the_same_on_a_gpu():
    data = torch.randint(0, 256, (40 * ROW,), dtype=torch.uint8)
    assert int(digest(data.cuda())) == int(digest(data))


def config(tiny_path: Path, dtype: str = "float32", **cluster) -> Config:
    return Config(model={"path": str(tiny_path), "dtype": dtype}, cluster={"timeout": 120.0} | cluster)


def shift(actor: Actor, seed: int) -> None:
    """Other weights, as an update would leave them: in place."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in actor.loaded.model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter) * 0.3)


def begin_again(actor: Actor) -> None:
    """The weights that the model came with."""
    first = models.load(actor.config.model, "cpu").model
    with torch.no_grad():
        for own, value in zip(actor.loaded.model.parameters(), first.parameters(), strict=True):
            own.copy_(value)


def greedy(actor: Actor) -> list[int]:
    """Eight tokens by plain forward passes of the Actor's model, without an engine."""
    tokens = list(PROMPT)
    with torch.no_grad():
        for _ in range(8):
            row = torch.tensor([tokens], device=actor.device)
            tokens.append(int(actor.loaded.model(row).logits[0, -1].argmax()))
            if tokens[-1] == 1:
                break
    return tokens[len(PROMPT) :]


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


def join(actor: Actor, rollout: Rollout, link: Link = LINK) -> Sender:
    """What the driver does at a run's first sync, with both ends in this process."""
    sender = Sender(actor.weights, link)
    assert len(sender.buckets) > 2
    try:
        rollout.join(sender.offer, link, 1)
    finally:
        sender.join()
    return sender


def update(sender: Sender, rollout: Rollout, version: int) -> None:
    rollout.start_update(version)
    for number in range(len(sender.buckets)):
        rollout.write(number, sender.pack(number))
    rollout.finish_update()


def held(model: Any) -> list[bytes]:
    return [p.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes() for p in model.parameters()]


def test_sent_weights_are_in_place_bit_for_bit(apart):
    actor, rollout = apart
    before = set(os.listdir("/dev/shm"))
    sender = join(actor, rollout)
    assert not {name for name in set(os.listdir("/dev/shm")) - before if name.startswith("rolecall-")}
    assert held(rollout.engine.model) != held(actor.loaded.model)
    update(sender, rollout, 1)
    assert rollout.version == 1
    assert held(rollout.engine.model) == held(actor.loaded.model)
    assert rollout.generate([GREEDY])[0].response == greedy(actor)
    shift(actor, seed=5)
    update(sender, rollout, 9)
    assert rollout.version == 9
    assert held(rollout.engine.model) == held(actor.loaded.model)


FAULTS = {
    "one flipped bit": r"bucket 1 \(model\.[\w.]+ to model\.[\w.]+\) arrived with digest \w+, the Actor sent \w+",
    "a bucket twice": "bucket 0 came twice, or unannounced",
    "an unknown bucket": "bucket 99 came twice, or unannounced",
    "an older bucket": r"bucket 1 .* arrived with digest \w+, the Actor sent \w+",
}


@pytest.mark.parametrize("fault", [*FAULTS, "a bucket lost"])
def test_what_is_not_what_was_sent_is_refused_and_half_an_update_generates_nothing(apart, fault):
    """Also where all else is written and finished, which the driver has asked for before it hears of the fault."""
    actor, rollout = apart
    sender = join(actor, rollout, replace(LINK, slots=4))
    rollout.start_update(1)
    for number in range(len(sender.buckets)):
        sent, wrong = sender.pack(number), number
        if number == 1:
            if fault == "one flipped bit":
                sender.slots[1][sender.buckets[1][0].offset + 5] ^= 1
            elif fault == "an older bucket":
                sender.slots[1].copy_(sender.slots[0][: len(sender.slots[1])])
            elif fault == "a bucket lost":
                continue
            else:
                wrong = 0 if fault == "a bucket twice" else 99
            with pytest.raises(RunError, match=FAULTS[fault]):
                rollout.write(wrong, sent)
            continue
        rollout.write(number, sent)
    with pytest.raises(RunError, match=r"1 buckets of version 1 did not arrive as they were sent \(\[1\]\)"):
        rollout.finish_update()
    assert rollout.version == 0
    with pytest.raises(RunError, match=r"partly of version 0 and partly of 1: .* Sync again"):
        rollout.generate([GREEDY])
    update(sender, rollout, 2)
    assert rollout.generate([GREEDY])[0].response == greedy(actor)


def test_weights_of_another_model_are_refused_by_name_and_the_old_ones_stay(apart):
    actor, rollout = apart
    old, before = held(rollout.engine.model), rollout.generate([GREEDY])
    model = actor.loaded.model
    model.extra = model.model.norm.weight
    del model.model.norm
    with pytest.raises(RunError, match=r"no parameter 'extra'"):
        join(actor, rollout)
    sender = Sender(actor.weights, LINK)
    sender.join()
    del model.extra
    with pytest.raises(RunError, match=r"'extra' .* was announced"):
        [sender.pack(number) for number in range(len(sender.buckets))]
    with pytest.raises(RunError, match=r"model\.norm\.weight"):
        join(actor, rollout)
    assert held(rollout.engine.model) == old and rollout.generate([GREEDY]) == before
    with pytest.raises(RunError, match="no update was begun"):
        rollout.finish_update()


def test_a_rollout_that_has_not_joined_says_so(apart):
    with pytest.raises(RunError, match="has not joined"):
        apart[1].start_update(1)


def test_two_types_are_refused_with_the_way_out(tiny_path):
    actor, rollout = Actor(config(tiny_path, "bfloat16")), Rollout(config(tiny_path))
    old = held(rollout.engine.model)
    with pytest.raises(UserError, match=r"torch\.bfloat16, the engine in torch\.float32 .*--model\.dtype"):
        join(actor, rollout)
    assert held(rollout.engine.model) == old


def test_a_parameter_that_does_not_take_what_is_written_is_noticed(apart):
    """Such as an expanded one, whose elements share memory."""
    actor, rollout = apart
    weight = rollout.engine.model.get_parameter("model.norm.weight")
    weight.data = weight.data[:1].expand(len(weight))
    with pytest.raises(RuntimeError):
        update(join(actor, rollout), rollout, 1)


def test_a_broadcast_that_nobody_sends_names_itself_within_its_time(apart):
    actor, _ = apart
    link = replace(LINK, transport="collective", seconds=2.0)
    sender = Sender(actor.weights, link)
    joined = threading.Thread(target=sender.join)
    joined.start()
    receiver = Receiver(sender.offer, link, 1)
    joined.join()
    with pytest.raises(RunError, match=r"bucket 0 \(model.* from the Actor at 127.0.0.1 (did not get|broke off)"):
        receiver.unpack(0)


class Here:
    """A handle to a role in this process. What is started runs when it is waited for, at the latest."""

    def __init__(self, role: Any, log: list[str]):
        self.role, self.log = role, log
        self.process, self.timeout = Process(str(id(role)), [], print, None, actor_id=str(id(role))), 60.0

    def start(self, method: Any, *args: Any) -> "Here.Later":
        return Here.Later(self, method, args)

    def __getattr__(self, method: str) -> Any:
        return getattr(self.role, method)

    class Later:
        def __init__(self, handle: "Here", method: Any, args: tuple):
            self.handle, self.method, self.args, self.done = handle, method, args, False
            self.handle.log.append(f"start {getattr(method, '__name__', method)}")

        def result(self) -> Any:
            if not self.done:
                self.value, self.done = self.call(), True
            return self.value

        def call(self) -> Any:
            args = [arg.result() if isinstance(arg, Here.Later) else arg for arg in self.args]
            if callable(self.method):
                return self.method(self.handle.role, *args)
            self.handle.log.append(f"{self.method} done")
            return getattr(self.handle.role, self.method)(*args)


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_no_more_buckets_are_on_their_way_than_there_are_slots(apart, slots):
    actor, rollout = apart
    log: list[str] = []
    move = WeightSync(Here(actor, log), [Here(rollout, log)], limit=60_000, slots=slots)
    moved = move(3)
    assert log.count("write done") == log.count("start pack") > 4
    most = max(log[:end].count("start write") - log[:end].count("write done") for end in range(len(log)))
    assert most == slots
    assert moved == {"sync/version": 3, "sync/bytes": sum(p.nbytes for p in actor.loaded.model.parameters())}
    assert rollout.generate([GREEDY])[0].response == greedy(actor) and rollout.version == 3
    move(4)
    assert log.count("start join") == 2 and rollout.version == 4  # both ends, once


def process(node: str, *gpus: int) -> Process:
    return Process("pool", [], print, None, node=node, gpus=gpus)


HOW = {
    "one GPU": ([process("a", 0), process("a", 0)], ("mapped", "cuda")),
    "a GPU each": ([process("a", 0), process("a", 1)], ("collective", "cuda")),
    "the same number on other nodes": ([process("a", 0), process("b", 0)], ("collective", "cuda")),
    "an engine on two GPUs": ([process("a", 0), process("a", 1, 2)], ("collective", "cuda")),
    "replicas on GPUs of their own": ([process("a", 0), process("a", 1), process("b", 0)], ("collective", "cuda")),
    "one replica shares the Actor's GPU": ([process("a", 0), process("a", 0), process("a", 1)], ("mapped", "cpu")),
    "no GPU": ([process("a"), process("a")], ("mapped", "cpu")),
    "no GPU for the engine": ([process("a", 0), process("a")], ("mapped", "cpu")),
    "two nodes without": ([process("a"), process("b")], ("collective", "cpu")),
}


@pytest.mark.parametrize("case", HOW)
def test_the_placement_decides_how_weights_travel(case):
    (actor, *rollouts), expected = HOW[case]
    assert choose(actor, rollouts) == expected


def test_one_process_shares():
    both = process("a")
    assert choose(both, [both]) == ("shared", "")


# Through Ray


@pytest.fixture(scope="module")
def in_two_processes(tiny_path, local_ray):
    pools = {"train": {"roles": ["actor"]}, "roll": {"roles": ["rollout"]}, "score": {"roles": ["reward"]}}
    with spawn(config(tiny_path, pools=pools)) as roles:
        yield roles


def through_sync(roles: Roles, **options: Any):
    roles.actor.start(begin_again).result()
    move = WeightSync(roles.actor, roles.rollout.handles, **options)
    move(0)
    first = roles.rollout.generate([GREEDY])[0]
    assert first.response == roles.actor.start(greedy).result()
    for step in (1, 2):
        roles.actor.start(shift, step).result()
        moved = move(step)
        after = roles.rollout.generate([GREEDY])[0]
        assert after.response == roles.actor.start(greedy).result()
        assert after.versions == [(0, len(after.response), step)]
        yield moved, first.response, after.response
    assert move(10)["sync/version"] == 10


TRANSPORTS: dict[str, dict[str, Any]] = {
    "as placed": {},
    "many buckets": {"limit": 60_000},
    "a bucket a tensor, one at a time": {"limit": 1, "slots": 1},
    "gloo": {"transport": ("collective", "cpu"), "limit": 60_000},
    "gloo, unverified": {"transport": ("collective", "cpu"), "verify": False},
}


@pytest.mark.parametrize("how", TRANSPORTS)
def test_sync_between_two_processes_changes_what_is_generated(in_two_processes, tiny, how):
    responses = []
    for moved, first, after in through_sync(in_two_processes, **TRANSPORTS[how]):
        assert moved["sync/bytes"] == sum(p.nbytes for p in tiny.model.parameters())
        responses += [first, after]
    assert len({tuple(response) for response in responses}) == 3


def test_a_failed_sync_names_itself(in_two_processes):
    roles = in_two_processes
    roles.actor.start(poison).result()
    with pytest.raises(RunError, match=r"no parameter 'extra'"):
        WeightSync(roles.actor, roles.rollout.handles)(11)
    assert not roles.actor.start(left_behind).result()
    roles.actor.start(cure).result()
    assert WeightSync(roles.actor, roles.rollout.handles)(12)["sync/version"] == 12


@pytest.mark.parametrize("transport", [("mapped", "cpu"), ("collective", "cpu")])
def test_after_a_sync_that_broke_off_the_next_one_goes_through(in_two_processes, transport):
    """At once, although the Actor has begun to send buckets for which the engine never asked."""
    roles = in_two_processes
    move = WeightSync(roles.actor, roles.rollout.handles, transport=transport, limit=60_000)
    move(0)
    roles.rollout.handles[0].start(refuse_an_update).result()
    roles.actor.start(shift, 7).result()
    with pytest.raises(RunError, match="responses are being generated"):
        move(1)
    assert move(2)["sync/version"] == 2
    assert roles.rollout.generate([GREEDY])[0].response == roles.actor.start(greedy).result()


def refuse_an_update(rollout: Rollout) -> None:
    """Once, as an engine that is generating does."""

    def refuse() -> None:
        del rollout.engine.start_update
        raise RunError("Weight sync: responses are being generated.")

    rollout.engine.start_update = refuse


def left_behind(actor: Actor) -> list[str]:
    """The files under the slots of the last sync, which none needs once they are mapped, or once that has failed."""
    return [path for path in actor.sender.offer.handles if os.path.exists(path)]


def poison(actor: Actor) -> None:
    actor.loaded.model.extra = torch.nn.Parameter(torch.zeros(2))


def cure(actor: Actor) -> None:
    del actor.loaded.model.extra
