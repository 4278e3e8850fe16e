"""LoRA: what is trained, saved, resumed and sent, and that the adapter reaches the engine."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import safetensors.torch
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import rolecall
from forward import plain, sampled_logprobs
from rolecall import config as configuration
from rolecall.config import Config
from rolecall.errors import RunError, UserError
from rolecall.models import lora
from rolecall.roles.actor import Actor
from rolecall.roles.critic import Critic
from rolecall.roles.reference import Reference
from rolecall.roles.rollout import Rollout
from rolecall.samples import Request, Sampling
from rolecall.sync.buckets import plan
from rolecall.training.optimizer import bytes_to_train
from test_engines_conform import Generating
from training_samples import gradients, plain_logprobs, uneven
from vllm_here import needs_vllm, vllm_here

RECIPES = Path(__file__).parents[1] / "recipes"
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture
def settings(tiny_path: Path):
    """A configuration of the tiny model with an adapter of rank 4; keyword arguments are sections."""

    def make(**sections: Any) -> Config:
        model = {"path": str(tiny_path), "dtype": "float32", "lora_rank": 4} | sections.pop("model", {})
        actor = {"lr": 1e-2} | sections.pop("actor", {})
        return Config(model=model, actor=actor, rollout={"max_tokens": 8} | sections.pop("rollout", {}), **sections)

    return make


def frozen(actor: Actor) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in actor.module.named_parameters() if not p.requires_grad}


def merged_model(actor: Actor) -> LlamaForCausalLM:
    """A model without adapters that computes what the Actor does."""
    config: Any = actor.loaded.model.config
    model = LlamaForCausalLM(config)
    weights = lora.merged(actor.loaded.model)
    model.load_state_dict({name: tensor.clone() for name, tensor in weights})
    return model.eval()


def perturb(actor: Actor, by: float = 0.3) -> None:
    """Move B off 0, as training does."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in actor.module.parameters():
            if parameter.requires_grad:
                parameter += by * torch.randn(parameter.shape, generator=generator)


# The merged weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_merged_weight_by_hand(dtype):
    """Rank 1, alpha 2: W + 2 B A = [[1, 2], [3, 4]] + 2 [[.5], [2]] [[1, -1]] = [[2, 1], [7, 0]]."""
    shape = LlamaConfig(vocab_size=5, hidden_size=2, intermediate_size=3, num_hidden_layers=1, num_attention_heads=1)
    model = LlamaForCausalLM(shape).to(dtype)
    before = dict(copy.deepcopy(model).named_parameters())
    lora.add(model, configuration.Model(lora_rank=1, lora_alpha=2, lora_targets=["q_proj"]), seed=0)
    layer = model.model.layers[0].self_attn.q_proj
    assert layer.lora_A.default.weight.dtype == torch.float32
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        layer.lora_A.default.weight.copy_(torch.tensor([[1.0, -1.0]]))
        layer.lora_B.default.weight.copy_(torch.tensor([[0.5], [2.0]]))
    merged = dict(lora.merged(model))
    assert list(merged) == list(before)
    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(merged.pop(name), torch.tensor([[2.0, 1.0], [7.0, 0.0]], dtype=dtype))
    assert torch.equal(layer.weight, torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=dtype))  # the base stays
    for other, tensor in merged.items():
        assert torch.equal(tensor, before[other])


def test_the_sum_is_rounded_once():
    """1 + 2^-8 + 2^-8 in bfloat16, whose step at 1 is 2^-7: rounded in between, either half would be lost."""
    shape = LlamaConfig(vocab_size=5, hidden_size=1, intermediate_size=1, num_hidden_layers=1, num_attention_heads=1)
    model = LlamaForCausalLM(shape).bfloat16()
    lora.add(model, configuration.Model(lora_rank=2, lora_alpha=2, lora_targets=["up_proj"]), seed=0)
    layer = model.model.layers[0].mlp.up_proj
    with torch.no_grad():
        layer.weight.fill_(1.0)
        layer.lora_A.default.weight.fill_(1.0)
        layer.lora_B.default.weight.fill_(2**-8)
    merged = dict(lora.merged(model))
    assert merged["model.layers.0.mlp.up_proj.weight"].item() == 1 + 2**-7


def test_at_the_start_the_weights_are_the_models_own(settings, tiny_path):
    """B is 0: exactly, also in bfloat16."""
    for dtype in ("float32", "bfloat16"):
        base = AutoModelForCausalLM.from_pretrained(tiny_path, dtype=getattr(torch, dtype))
        sent = dict(Actor(settings(model={"dtype": dtype})).weights())
        assert sent.keys() == dict(base.named_parameters()).keys()
        for name, parameter in base.named_parameters():
            assert torch.equal(sent[name], parameter)


def test_without_an_adapter_the_weights_are_the_parameters_themselves(settings):
    actor = Actor(settings(model={"lora_rank": 0}))
    own = dict(actor.loaded.model.named_parameters())
    assert all(tensor is own[name] for name, tensor in actor.weights())


@pytest.mark.parametrize("tied", [False, True])
def test_the_saved_model_gives_the_adapters_logprobs(settings, tiny_path, tmp_path, tied):
    """Both ways to read the folder: merged by transformers alone, and the adapter by peft on the first model."""
    base = AutoModelForCausalLM.from_pretrained(tiny_path, tie_word_embeddings=tied)
    base.save_pretrained(tmp_path / "base")
    AutoTokenizer.from_pretrained(tiny_path).save_pretrained(tmp_path / "base")
    actor, samples = Actor(settings(model={"path": str(tmp_path / "base")})), uneven()
    perturb(actor)
    actor.save_pretrained(tmp_path / "model")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert type(merged) is LlamaForCausalLM
    assert not [name for name, _ in merged.named_parameters() if "lora" in name]
    loaded = peft.PeftModel.from_pretrained(base, str(tmp_path / "model" / "adapter"))
    before = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    moved = []
    for sample, ours in zip(samples, actor.logprobs(samples), strict=True):
        expected = torch.tensor(ours)
        torch.testing.assert_close(plain_logprobs(merged, sample), expected, atol=1e-5, rtol=0)
        torch.testing.assert_close(plain_logprobs(loaded, sample), expected, atol=1e-5, rtol=0)
        moved.append((plain_logprobs(before, sample) - expected).abs().max().item())
    assert max(moved) > 0.1


# Training


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_only_the_adapters_have_gradients_and_move(settings, dtype):
    actor = Actor(settings(model={"dtype": dtype}))
    before, base = {name: p.detach().clone() for name, p in actor.weights()}, frozen(actor)
    actor.update(uneven())
    trained = {name: p for name, p in actor.module.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 2 * len(LINEAR)  # A and B, two layers
    assert all(".lora_" in name and p.dtype == torch.float32 for name, p in trained.items())
    assert all(torch.equal(tensor, base[name]) for name, tensor in frozen(actor).items())
    moved = {name for name, tensor in actor.weights() if not torch.equal(tensor, before[name])}
    assert moved == {name for name in before if name.split(".")[-2] in LINEAR}
    state = actor.optimizer.state_dict()
    assert len(state["adam"]["state"]) == len(trained) and state["masters"] == []
    size = sum(p.nbytes for p in trained.values())
    moments = [state["adam"]["state"][i][name] for i in range(len(trained)) for name in ("exp_avg", "exp_avg_sq")]
    needed = bytes_to_train(actor.module, actor.settings)
    assert sum(tensor.nbytes for tensor in moments) + size == sum(needed.values()) == 3 * size


def test_gradients_are_the_same_packed_or_one_by_one_and_recomputed(settings):
    def found(**actor: Any) -> dict[str, Tensor]:
        role = Actor(settings(actor=actor))
        perturb(role, 0.1)
        return gradients(role, uneven())

    packed = found()
    assert max(gradient.abs().max() for gradient in packed.values()) > 1e-3
    for other in (found(micro_tokens=1), found(checkpointing=True)):
        assert other.keys() == packed.keys()
        for name, gradient in packed.items():
            torch.testing.assert_close(other[name], gradient, atol=1e-7, rtol=1e-5)


def test_the_critic_trains_adapters_and_its_head(settings):
    critic = Critic(settings(algorithm={"name": "ppo"}))
    critic.update(uneven())
    trained = {name for name, p in critic.module.named_parameters() if p.requires_grad}
    assert {"head.weight", "head.bias"} == {name for name in trained if ".lora_" not in name}
    assert len(trained) == 2 * 2 * len(LINEAR) + 2


def test_the_reference_of_the_same_process_is_the_actors_model_without_the_adapter(settings):
    actor, samples = Actor(settings()), uneven()
    reference, apart = Reference(actor.config, actor), Reference(actor.config)
    assert reference.logprobs(samples) == actor.logprobs(samples)  # KL at the first step: exactly 0
    perturb(actor)
    assert reference.logprobs(samples) == apart.logprobs(samples) != actor.logprobs(samples)
    assert reference._loaded is actor.loaded
    before = dict(actor.weights())
    actor.update(samples)  # the adapter is on again, and trains
    assert any(not torch.equal(tensor, before[name]) for name, tensor in actor.weights())


def test_the_reference_of_a_fully_trained_actor_has_a_model_of_its_own(settings):
    actor, samples = Actor(settings(model={"lora_rank": 0})), uneven()
    reference = Reference(actor.config, actor)
    before = reference.logprobs(samples)
    actor.update(samples)
    assert reference.logprobs(samples) == before != actor.logprobs(samples)


# Checkpoints


def test_a_checkpoint_holds_the_adapter_and_resumes_to_the_same_result(settings, tmp_path):
    config = settings(actor={"warmup_steps": 3})
    first = Actor(config)
    first.update(uneven(seed=1))
    first.save(tmp_path)
    saved = safetensors.torch.load_file(tmp_path / "weights.safetensors")
    assert len(saved) == 2 * 2 * len(LINEAR) and all(".lora_" in name for name in saved)
    resumed = Actor(settings(actor={"warmup_steps": 3}, run={"seed": 7}))  # another A, until it is loaded
    resumed.load(tmp_path)
    resumed.config = config
    for actor in (first, resumed):
        actor.update(uneven(seed=2))
    for (name, one), (_, other) in zip(first.weights(), resumed.weights(), strict=True):
        assert torch.equal(one, other), name


@pytest.mark.parametrize(
    ("other", "found"),
    [
        ({"lora_rank": 8}, "model.lora_rank = 8"),
        ({"lora_alpha": 4}, "model.lora_alpha = 4"),
        ({"lora_targets": ["q_proj"]}, r"model.lora_targets = \['q_proj'\]"),
        ({"lora_rank": 0}, "model.lora_rank = 0. "),
        ({"path": "tiny"}, "model.path = 'tiny'"),
    ],
)
def test_a_checkpoint_of_another_adapter_is_refused(settings, tmp_path, other, found):
    Actor(settings()).save(tmp_path)
    with pytest.raises(UserError, match=rf"was trained with .*lora_rank = 4.*cannot be resumed with .*{found}"):
        Actor(settings(model=other)).load(tmp_path)


def test_alpha_and_targets_do_not_matter_without_an_adapter(settings, tmp_path):
    Actor(settings(model={"lora_rank": 0})).save(tmp_path)
    Actor(settings(model={"lora_rank": 0, "lora_alpha": 4, "lora_targets": ["q_proj"]})).load(tmp_path)


# Engines


@pytest.mark.parametrize("engine", ["native", "transformers"])
def test_an_engine_in_the_actors_process_generates_with_the_adapter(settings, engine, tmp_path):
    """Pitfall 17."""
    config = settings(rollout={"engine": engine})
    actor = Actor(config)
    rollout = Rollout(config, actor)
    requests = [Request(0, "p", [2, 3, 6, 7, 4], 4, 0, Sampling(max_tokens=8))]
    before = rollout.generate(requests)
    perturb(actor)
    rollout.share_weights(1)
    after = rollout.generate(requests)
    assert [s.response for s in after] != [s.response for s in before]
    assert {version for s in after for _, _, version in s.versions} == {1}
    actor.save_pretrained(tmp_path / "model")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    for sample in after:
        torch.testing.assert_close(torch.tensor(sample.logprobs), plain_logprobs(merged, sample), atol=1e-5, rtol=0)


def expect(engine: Any, weights: dict[str, Tensor]) -> None:
    engine.expect([entry for bucket in plan(weights.items()) for entry in bucket])


def update(engine: Any, actor: Actor, version: int) -> None:
    weights = dict(actor.weights())
    expect(engine, weights)
    engine.start_update()
    engine.write(weights.items())
    engine.finish_update(version)


@pytest.fixture(scope="module")
def vllm(tiny_path: Path) -> Iterator[tuple[Actor, Any]]:
    """An Actor with an adapter on some of the layers, and a vLLM of its own that is sent the adapter alone."""
    model = {"path": str(tiny_path), "dtype": "float32", "lora_rank": 4, "lora_targets": ["q_proj", "down_proj"]}
    rollout = {"engine": "vllm", "lora": "adapter", "max_tokens": 200, "max_sequences": 8}
    config = Config(model=model, rollout=rollout, data={"max_prompt_tokens": 16})
    with vllm_here(config) as started:
        yield Actor(config), started.engine


def test_vllm_takes_the_adapter_alone_even_in_the_middle_of_responses(vllm):
    """Each token is of the adapter that its span names, and what came before it is read with that, not from a cache."""
    actor, engine = vllm
    start, models = engine.version, [merged_model(actor)]
    sampling = Sampling(max_tokens=200, min_tokens=200)
    asked = [Request(0, "p", [2, 3, 6, 7, 4], 2, 0, sampling)]
    thread = Generating(engine, asked)
    thread.reach(10)
    perturb(actor)
    update(engine, actor, start + 1)
    models.append(merged_model(actor))
    samples = thread.end()
    assert len(samples) == 2
    for sample in samples:
        assert [version for _, _, version in sample.versions] == [start, start + 1]
        found = torch.tensor(sample.logprobs)
        both = [sampled_logprobs(plain(model, sample), sample, sampling, engine.endings.tokens) for model in models]
        for first, last, version in sample.versions:
            new = version - start
            torch.testing.assert_close(found[first:last], both[new][first:last], atol=5e-5, rtol=0)
            assert (found[first:last] - both[1 - new][first:last]).abs().max() > 0.05


def test_the_adapter_travels_under_the_names_of_peft_files(vllm, tmp_path):
    actor, _ = vllm
    actor.save_pretrained(tmp_path / "model")
    saved = safetensors.torch.load_file(tmp_path / "model" / "adapter" / "adapter_model.safetensors")
    sent = dict(actor.weights())
    assert len(sent) == 2 * 2 * 2 and sent.keys() == saved.keys()
    assert all(torch.equal(sent[name], saved[name]) for name in saved)


@pytest.mark.parametrize("change", ["missing", "unknown", "shape"])
def test_vllm_refuses_another_adapter_and_keeps_its_own(vllm, change):
    actor, engine = vllm
    version, weights = engine.version, dict(actor.weights())
    name = next(iter(weights))
    tensor = weights.pop(name)
    if change != "missing":
        weights |= {name + ".x": tensor} if change == "unknown" else {name: tensor[:1]}
    with pytest.raises(RunError, match=f"{name}.*of the adapter has shape.*nothing was written"):
        expect(engine, weights)
    assert engine.version == version


def test_vllm_refuses_half_an_adapter(vllm):
    actor, engine = vllm
    version, weights = engine.version, dict(actor.weights())
    engine.start_update()
    engine.write(list(weights.items())[1:])
    with pytest.raises(RunError, match="1 of the adapter's tensors were not written"):
        engine.finish_update(version + 1)
    assert engine.version == version


POOLS = {
    "train": {"roles": ["actor"], "threads": 1},
    "rollout": {"roles": ["rollout", "reference"], "threads": 1},
    "score": {"roles": ["reward"]},
}


def run(folder: Path, **overrides: Any) -> rolecall.Run:
    given = {"run.dir": str(folder), "model.lora_rank": 8} | {k.replace("__", "."): v for k, v in overrides.items()}
    return rolecall.train(Config.load(RECIPES / "grpo-tiny.toml", given))


def test_an_engine_in_another_process_gets_the_merged_weights(tmp_path, local_ray):
    """The Actor's log-probabilities, with the adapter, are the engine's, without one; the first model would be off."""
    finished = run(
        tmp_path / "run", run__steps=4, actor__lr=0.02, algorithm__watch_kl=True, data__holdout=0, cluster__pools=POOLS
    )
    lines = finished.metrics
    parameters = 100_672
    assert [(line["sync/version"], line["sync/bytes"]) for line in lines] == [(n, 4 * parameters) for n in range(1, 5)]
    assert lines[0]["kl"] < 1e-9 and lines[-1]["kl"] > 0.05  # it has moved from the Reference
    assert max(line["mismatch/mean"] for line in lines) < 1e-4


def test_grpo_learns_with_an_adapter(tmp_path, tiny_path, local_ray):
    """The output embedding stays as it is, and no adapter makes the tiny model's random one sure of a token: a hidden
    state has norm 8 and a row of it 0.16, so logits end at 1.3. Ten times as large it is more like a trained one."""
    model = AutoModelForCausalLM.from_pretrained(tiny_path)
    model.lm_head.weight.data *= 10
    model.save_pretrained(tmp_path / "base")
    AutoTokenizer.from_pretrained(tiny_path).save_pretrained(tmp_path / "base")
    base = str(tmp_path / "base")
    finished = run(tmp_path / "run", model__path=base, run__steps=80, actor__lr=1e-3, algorithm__kl_beta=1e-3)
    rewards = [line["reward/mean"] for line in finished.metrics]
    assert sum(rewards[:3]) / 3 < 0.3
    assert sum(rewards[-5:]) / 5 > 0.6
    assert sorted(path.name for path in (finished.model / "adapter").iterdir()) == [
        "README.md", "adapter_config.json", "adapter_model.safetensors"
    ]  # fmt: skip


@pytest.mark.slow
@needs_vllm
def test_a_run_that_sends_vllm_the_adapter_alone(tmp_path, local_ray):
    finished = run(
        tmp_path / "run",
        run__steps=3,
        actor__lr=0.02,
        algorithm__watch_kl=True,
        data__holdout=0,
        rollout__engine="vllm",
        rollout__lora="adapter",
    )
    shapes = 2 * ((64 + 64) + 2 * (64 + 32) + (64 + 64) + 3 * (64 + 192))  # in + out of each linear layer, two layers
    assert [line["sync/bytes"] for line in finished.metrics] == [4 * 8 * shapes] * 3
    assert finished.metrics[-1]["kl"] > 0.02
    assert max(line["mismatch/mean"] for line in finished.metrics) < 1e-4


# Mistakes


def test_without_peft_the_message_says_how_to_install_it(settings, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"lora_rank = 4: peft is not installed.*pip install 'rolecall\[lora\]'"):
        Actor(settings())


@pytest.mark.parametrize(
    ("target", "hint"), [("q_prj", "Did you mean 'q_proj'"), ("lm_head", "Known: down_proj"), ("embed_tokens", "Known")]
)
def test_a_layer_that_cannot_have_an_adapter_is_refused(settings, target, hint):
    with pytest.raises(UserError, match=f"lora_targets: '{target}' is no linear layer.*{hint}"):
        Actor(settings(model={"lora_targets": ["q_proj", target]}))


@pytest.mark.parametrize(
    ("model", "rollout", "message"),
    [
        ({"lora_rank": 8}, {"engine": "native"}, "rollout.engine = 'native' and model.lora_rank = 8"),
        ({}, {"engine": "vllm"}, "rollout.engine = 'vllm' and model.lora_rank = 0"),
        ({"lora_rank": 8}, {"engine": "vllm", "sleep": 2}, "no sync brings them back; take rollout.sleep = 1"),
    ],
)
def test_where_the_adapter_cannot_be_sent_alone(model, rollout, message):
    with pytest.raises(UserError, match=message):
        Config(model=model, rollout=rollout | {"lora": "adapter"})


def test_one_layer_may_be_named(settings):
    actor = Actor(settings(model={"lora_targets": ["layers.1.mlp.up_proj"]}))
    trained = [name for name, p in actor.module.named_parameters() if p.requires_grad]
    assert [name.partition(".lora_")[0] for name in trained] == ["model.layers.1.mlp.up_proj"] * 2
