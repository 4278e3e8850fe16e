"""Models sharded over several processes: the same numbers as in one, whatever the shares; saved, exported, gathered.

The processes are real and talk over gloo. Two of them are asked all that the tests want to know.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.attention import flex_attention
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from rolecall.config import Config
from rolecall.errors import UserError
from rolecall.models import lora
from rolecall.models.compiled import compile_layers
from rolecall.roles import rollout as rollout_module
from rolecall.roles.actor import Actor
from rolecall.roles.critic import Critic
from rolecall.roles.reference import Reference
from rolecall.roles.rollout import Rollout
from rolecall.samples import Sample
from rolecall.sync import buckets, ends
from rolecall.training import packing, sharding
from rolecall.training.packing import micro_batches
from rolecall.training.sharding import share, whole
from rolecall.training.trained import Trained
from training_samples import sample, uneven

KINDS = {"actor": Actor, "critic": Critic}


def config(model: Path, dtype: str = "float32", lora_rank: int = 0, **optimizer: Any) -> Config:
    optimizer = {"lr": 1e-3} | optimizer
    return Config(
        model={"path": str(model), "dtype": dtype, "lora_rank": lora_rank},
        rollout={"max_tokens": 8},
        algorithm={"kl_beta": 0.1},
        actor=optimizer,
        critic=optimizer,
    )


def run_ranks(ranks: int, function: Callable[..., Any], *args: Any) -> None:
    """``function(*args)`` in so many new processes that have met."""
    store = sharding.open_store()
    mp.spawn(_rank, args=(store.port, ranks, function, args), nprocs=ranks)


def _rank(rank: int, port: int, ranks: int, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    sharding.meet(rank, "127.0.0.1", port, ranks, seconds=60)
    function(*args)
    sharding.leave()


# Compiled layers. --------------------------------------------------------------------------------------------------


def compiled_heads(model: Path) -> None:
    """Asserts what one rank's compiler sees of the heads."""
    actor = Actor(config(model))
    compile_layers(actor.loaded.model)
    seen: list[Any] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        called = [node for node in graph.graph.nodes if "flex_attention" in str(node.target)]
        seen.extend(node.args[0].meta["example_value"].shape for node in called)
        return graph.forward

    compile = torch.compile
    torch.compile = lambda function, **options: compile(function, backend=backend, **options)  # type: ignore[assignment]
    packing._skips_blocks = lambda *_: True
    flex_attention._validate_device = lambda *tensors: None
    for size in (20, 60, 90):
        actor.logprobs(uneven(groups=8, size=size))
    heads = actor.loaded.model.config.num_attention_heads, actor.loaded.model.config.head_dim
    assert seen and all(isinstance(shape[2], torch.SymInt) for shape in seen[1:])  # lengths vary
    assert all((shape[1], shape[3]) == heads and type(shape[3]) is int for shape in seen)
    assert len(seen) <= 2  # whatever the lengths; a single block is a case of its own


def test_compiled_code_of_a_sharded_layer_knows_its_heads_and_no_lengths(tiny_path):
    run_ranks(2, compiled_heads, tiny_path)


# The same numbers as in one process. -------------------------------------------------------------------------------


def held(role: Trained) -> dict[str, Tensor]:
    """The weights, whole."""
    return {name: whole(parameter.detach()).clone() for name, parameter in role.module.named_parameters()}


@dataclass
class Trial:
    """A role's updates, and what it says and holds after them."""

    metrics: list[dict[str, float]]
    answers: list[list[float]]
    weights: dict[str, Tensor]


SEEDS = (0, 9)  # of the samples of two updates
CASES: dict[str, dict[str, Any]] = {
    "one": {"micro_tokens": 10_000},
    "two": {"micro_tokens": 40},
    "three, unevenly": {"micro_tokens": 24},
    "four": {"micro_tokens": 16},
    "one a sample": {"micro_tokens": 1},
    "checkpointing": {"micro_tokens": 24, "checkpointing": True},
    "LoRA": {"micro_tokens": 24, "lora_rank": 4},
    "bfloat16": {"micro_tokens": 24, "dtype": "bfloat16"},
    "LoRA on bfloat16": {"micro_tokens": 24, "lora_rank": 4, "dtype": "bfloat16"},
}
COUNTS = {  # micro-batches of an update in one process, and in each of two
    "one": [(1, [1, 1]), (1, [1, 1])],
    "two": [(2, [1, 1]), (2, [1, 1])],
    "three, unevenly": [(3, [1, 2]), (3, [2, 1])],
    "four": [(4, [2, 2]), (4, [2, 2])],
    "one a sample": [(12, [6, 6]), (12, [4, 8])],
}


@pytest.mark.parametrize("case", COUNTS)
def test_the_cases_have_as_many_micro_batches_as_they_say(case):
    def count(samples: list[Sample]) -> int:
        return len(list(micro_batches(samples, CASES[case]["micro_tokens"], packed=True)))

    batches = [uneven(groups=4, seed=seed) for seed in SEEDS]
    assert [(count(s), [count(share(s, rank, 2)) for rank in range(2)]) for s in batches] == COUNTS[case]


def trial(model: Path, kind: str, case: str) -> Trial:
    role = KINDS[kind](config(model, **CASES[case]))
    metrics = [role.update(uneven(groups=4, seed=seed)) for seed in SEEDS]
    if len(CASES[case]) == 1:
        metrics.append(role.update(uneven(groups=1, size=1)))  # a sample: only one rank has anything to compute
    ask = role.logprobs if isinstance(role, Actor) else role.values
    return Trial(metrics, ask(uneven(seed=9)), held(role))


def all_trials(model: Path, folder: Path) -> dict[tuple[str, str], Trial]:
    return {(kind, case): trial(model, kind, case) for kind in KINDS for case in CASES}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", [case for case in CASES if "bfloat16" not in case])
def test_two_processes_train_as_one(found_by_two, tiny_path, kind, case):
    one = trial(tiny_path, kind, case)
    for two in (found["all_trials"][kind, case] for found in found_by_two):
        for found, wanted in zip(two.metrics, one.metrics, strict=True):
            assert found == pytest.approx(wanted, rel=1e-4, abs=1e-5)
        for row, wanted_row in zip(two.answers, one.answers, strict=True):
            assert row == pytest.approx(wanted_row, abs=1e-5)
        torch.testing.assert_close(two.weights, one.weights, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", [case for case in CASES if "bfloat16" in case])
def test_a_narrow_model_has_shards_of_its_masters(found_by_two, tiny_path, kind, case):
    """What is trained is FP32; what is not has the model's type. bfloat16 rounds otherwise in other micro-batches."""
    one, two = trial(tiny_path, kind, case), found_by_two[1]["all_trials"][kind, case]
    norm = "policy/grad_norm" if kind == "actor" else "value/grad_norm"
    assert two.metrics[0][norm] == pytest.approx(one.metrics[0][norm], rel=0.02)
    for row, wanted in zip(two.answers, one.answers, strict=True):
        assert row == pytest.approx(wanted, abs=0.03)
    frozen = {name for name, weight in two.weights.items() if weight.dtype == torch.bfloat16}
    assert frozen == {
        name for name in two.weights if "LoRA" in case and ".lora_" not in name and not name.startswith("head.")
    }


# Shares. -----------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(1, 9), st.lists(st.integers(0, 40), min_size=1, max_size=6)), max_size=6),
    st.integers(1, 5),
)
def test_every_sample_is_in_one_share_and_shares_are_even(groups, ranks):
    samples = [
        sample(group_id=group, index=index, prompt=[1] * prompt, response=[1] * size)
        for group, (prompt, sizes) in enumerate(groups)
        for index, size in enumerate(sizes)
    ]
    shares = [share(samples, rank, ranks) for rank in range(ranks)]
    found = [(s.group_id, s.index) for part in shares for s in part]
    assert sorted(found) == sorted((s.group_id, s.index) for s in samples if s.response)
    cut = sum(len({s.group_id for s in part}) for part in shares) - len({group for group, _ in found})
    assert cut <= ranks - 1
    longest = max((len(s.prompt) + len(s.response) for s in samples), default=0)
    prompts = {s.group_id: len(s.prompt) for s in samples if s.response}
    total = sum(prompts.values()) + sum(len(s.response) for s in samples)
    for part in shares:
        tokens = sum(len(s.response) for s in part) + sum(prompts[group] for group in {s.group_id for s in part})
        assert tokens <= total / ranks + 2 * longest


def test_shares_worked_out_by_hand():
    """Group 1 comes first. Sizes 3 + 3, 9, 3 + 5, 5, 5: 33 tokens, middles at 3, 10.5, 19, 25.5, 30.5; cut at 16.5."""
    first = [sample(group_id=0, index=i, response=[1] * 5) for i in range(3)]
    second = [sample(group_id=1, index=i, response=[1] * size) for i, size in enumerate((3, 9))]
    samples = [second[0], *first, second[1]]
    assert share(samples, 0, 2) == second
    assert share(samples, 1, 2) == first


# What travels. -----------------------------------------------------------------------------------------------------


class Exchanges(TorchDispatchMode):
    """Counts what is asked of the process group."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "c10d":
            self.counts[function.overloadpacket.__name__] += 1
        return function(*args, **kwargs or {})


def count_exchanges(model: Path, folder: Path) -> list[tuple[int, int]]:
    """Of weights and of gradients, in an update of one micro-batch and in one of six."""
    found = []
    for micro_tokens in (10_000, 1):
        actor = Actor(config(model, micro_tokens=micro_tokens))
        with Exchanges() as exchanges:
            actor.update(uneven(groups=4))
        found.append((exchanges.counts["_allgather_base_"], exchanges.counts["_reduce_scatter_base_"]))
    return found


def test_what_travels_with_a_micro_batch(found_by_two):
    """Three groups of weights: two layers and the rest. Each is gathered before its forward and its backward pass, and
    its gradients are added up over the ranks behind it, so that none are ever whole on a rank."""
    for found in found_by_two:
        assert found["count_exchanges"] == [(6, 3), (6 * 6, 6 * 3)]


LIMIT = 60_000


def measure_gathering(model: Path, folder: Path) -> list[int]:
    """The most bytes of gathered weights there at a time: in a sync to others, and to this process's engine."""
    alive = peak = 0

    def freed(nbytes: int) -> None:
        nonlocal alive
        alive -= nbytes

    def watched(tensor: Tensor) -> Tensor:
        nonlocal alive, peak
        assert isinstance(tensor, DTensor)
        gathered = whole(tensor)
        alive += gathered.nbytes
        peak = max(peak, alive)
        weakref.finalize(gathered, freed, gathered.nbytes)
        return gathered

    settings = config(model)
    actor = Actor(settings)
    rollout = Rollout(settings, actor)
    link = ends.Link("mapped", "cpu", LIMIT, 2, True, "127.0.0.1", 2, 60.0)
    sender = ends.Sender(actor.weights, link) if dist.get_rank() == 0 else ends.Helper(actor.weights, LIMIT)
    with pytest.MonkeyPatch.context() as patched:
        for module in (buckets, ends, rollout_module):
            patched.setattr(module, "whole", watched)
        for number in range(len(sender.buckets)):
            sender.pack(number)
        in_buckets = peak
        assert alive == 0
        peak = 0
        rollout.gather_weights(3)
    sender.join()  # leaves no file behind
    return [in_buckets, peak]


def test_no_more_than_a_bucket_is_whole_at_a_time(found_by_two, tiny):
    """And where nothing is packed, no more than a tensor: on the other rank, and for the engine of the same process."""
    sizes = [parameter.nbytes for parameter in tiny.model.parameters()]
    assert max(sizes) == 192 * 64 * 4
    first, other = (found["measure_gathering"] for found in found_by_two)
    assert max(sizes) < first[0] <= LIMIT < sum(sizes) / 5
    assert first[1:] == [max(sizes)]
    assert other == [max(sizes), max(sizes)]


# Checkpoints and exports. ------------------------------------------------------------------------------------------


def resume(model: Path, folder: Path) -> list[Any]:
    """Saved after the second update: the third, by who went on and by who came back."""
    found: list[Any] = []
    for kind, make in KINDS.items():
        settings = config(model, dtype="bfloat16", micro_tokens=24, warmup_steps=3)
        first = make(settings)
        for seed in range(2):
            first.update(uneven(seed=seed))
        first.save(folder / kind)
        second = make(settings)
        second.load(folder / kind)
        found.append([(role.update(uneven(seed=2)), held(role)) for role in (first, second)])
    return found


def test_a_resumed_role_goes_on_exactly(found_by_two):
    for found in found_by_two:
        for (metrics, weights), (resumed_metrics, resumed_weights) in found["resume"]:
            assert metrics == resumed_metrics
            torch.testing.assert_close(resumed_weights, weights, rtol=0, atol=0)


def resume_elsewhere(model: Path, folder: Path) -> None:
    actor = Actor(config(model, dtype="bfloat16", micro_tokens=24, warmup_steps=3))
    actor.load(folder / "actor")
    metrics = actor.update(uneven(seed=2))
    if dist.get_rank() == 0:
        torch.save(metrics, folder / "three")


def test_three_processes_resume_what_two_have_saved(found_by_two, two_folder, tiny_path):
    run_ranks(3, resume_elsewhere, tiny_path, two_folder)
    (metrics, _), _ = found_by_two[0]["resume"][0]
    assert torch.load(two_folder / "three") == pytest.approx(metrics, rel=0.02, abs=1e-4)


def test_one_process_refuses_what_several_have_saved(found_by_two, two_folder, tiny_path):
    with pytest.raises(UserError, match=r"several processes.*processes = 1\. Set any number over 1"):
        Actor(config(tiny_path, dtype="bfloat16")).load(two_folder / "actor")


def export(model: Path, folder: Path) -> None:
    """After an update, so that nothing is the model's file; with an adapter, and without."""
    for rank in (0, 4):
        actor = Actor(config(model, lora_rank=rank))
        actor.update(uneven())
        actor.save_pretrained(folder / f"export-{rank}")


@pytest.mark.parametrize("rank", [0, 4])
def test_the_exported_model_is_whole(found_by_two, two_folder, tiny_path, rank):
    actor = Actor(config(tiny_path, lora_rank=rank))
    actor.update(uneven())
    expected = dict(lora.merged(actor.loaded.model))
    exported = AutoModelForCausalLM.from_pretrained(two_folder / f"export-{rank}")
    assert type(exported).__name__ == "LlamaForCausalLM"
    torch.testing.assert_close(dict(exported.named_parameters()), expected, rtol=0, atol=1e-5)
    if rank:
        found = load_file(two_folder / f"export-{rank}" / "adapter" / "adapter_model.safetensors")
        torch.testing.assert_close(found, dict(lora.adapter(actor.adapter)), rtol=0, atol=1e-5)


# The Reference. ----------------------------------------------------------------------------------------------------


def reference(model: Path, folder: Path) -> list[Any]:
    """What it holds of a weight, and says; then that of an Actor with an adapter, which has been trained."""
    settings = config(model, lora_rank=4)
    alone = Reference(settings)
    assert alone._loaded.model.lm_head.weight.to_local().shape == (8, 64)
    actor = Actor(settings)
    actor.update(uneven())
    return [of.logprobs(uneven(seed=9)) for of in (alone, Reference(settings, actor))]


def test_a_sharded_reference_says_what_a_whole_one_does(found_by_two, tiny_path):
    expected = Reference(config(tiny_path)).logprobs(uneven(seed=9))
    for found in found_by_two:
        for answers in found["reference"]:
            for row, wanted in zip(answers, expected, strict=True):
                assert row == pytest.approx(wanted, abs=1e-5)


# All that is asked of two processes, by name. ----------------------------------------------------------------------

QUESTIONS = (all_trials, count_exchanges, measure_gathering, resume, export, reference)


def answer(model: Path, folder: Path) -> None:
    found = {question.__name__: question(model, folder) for question in QUESTIONS}
    torch.save(found, folder / f"answers-{dist.get_rank()}")


@pytest.fixture(scope="module")
def two_folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("two")


@pytest.fixture(scope="module")
def found_by_two(two_folder, tiny_path) -> list[dict[str, Any]]:
    """By each of two ranks."""
    run_ranks(2, answer, tiny_path, two_folder)
    return [torch.load(two_folder / f"answers-{rank}", weights_only=False) for rank in range(2)]
