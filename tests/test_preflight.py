"""rolecall doctor RECIPE: it counts the memory that roles hold, and micro-batches as a run makes them."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from benchmarks import _models
from rolecall import config as configuration
from rolecall import doctor, preflight
from rolecall.config import Config
from rolecall.errors import UserError
from rolecall.preflight import Process, Update
from rolecall.roles.actor import Actor
from rolecall.training import memory

TINY = 100_672  # parameters
HEAD = 16 * 64  # of them, in the output embedding
MEASURED = Path(__file__).parents[1] / "benchmarks/results/memory-h200.json"


def config(path: Path, **sections: dict) -> Config:
    model = {"path": str(path), "dtype": "bfloat16"} | sections.pop("model", {})
    return Config(model=model, **sections)


def stays(config: Config) -> list[dict[str, int]]:
    return [process.stays for process in preflight.processes(config)]


FULL = {"actor's weights": 2 * TINY, "actor's FP32 masters": 4 * TINY, "actor's moments": 8 * TINY}


def test_parts_of_every_kind_of_process(tiny_path):
    assert stays(config(tiny_path)) == [FULL]
    assert stays(config(tiny_path, model={"dtype": "float32"})) == [
        {"actor's weights": 4 * TINY, "actor's moments": 8 * TINY}
    ]
    reference = {"reference": 2 * TINY}
    assert stays(config(tiny_path, algorithm={"kl_beta": 0.1})) == [FULL | reference]
    ppo = config(tiny_path, algorithm={"name": "ppo"})
    critic = {name.replace("actor", "critic"): size // TINY * (TINY - HEAD) for name, size in FULL.items()}
    assert stays(ppo) == [FULL | critic | reference]


def test_an_engine_with_weights_of_its_own(tiny_path):
    settings = {"engine": "vllm", "tensor_parallel": 2, "max_tokens": 100, "replicas": 2}
    engine, trainer = stays(config(tiny_path, rollout=settings, data={"max_prompt_tokens": 28}))
    cache = 128 * 2 * 2 * 1 * 32 * 2  # tokens, keys and values, layers, heads, their size, bytes
    assert engine == {"engine's weights": TINY, "one response's cache": cache // 2} and trainer == FULL


def test_lora_trains_the_adapters_alone_and_needs_no_second_model(tiny_path):
    asked = config(tiny_path, model={"lora_rank": 4}, algorithm={"kl_beta": 0.1})
    (process,) = preflight.processes(asked)
    real = Actor(asked).loaded.model
    adapter = sum(parameter.numel() for parameter in real.parameters() if parameter.requires_grad)
    assert process.stays == {"actor's weights": 2 * TINY + 4 * adapter, "actor's moments": 8 * adapter}
    assert process.updates["actor"].fixed["gradients"] == 4 * adapter


def test_a_reference_alone_needs_room_to_compute(tiny_path):
    pools = {"rest": {"roles": ["actor", "rollout", "reward"]}, "reference": {"roles": ["reference"]}}
    asked = config(tiny_path, cluster={"pools": pools}, algorithm={"kl_beta": 0.1})
    reference = next(process for process in preflight.processes(asked) if process.name == "reference")
    model = Actor(asked).loaded.model
    token, head = memory.activation_bytes(model, False, backward=False), memory.head_bytes(model, backward=False)
    assert reference == Process(
        "reference", {"reference": 2 * TINY}, {"reference": Update({"logits": head}, token, None, 768)}
    )


def test_shards_hold_their_part_and_gather_the_rest(tiny_path):
    pools = {"train": {"roles": ["actor", "reference", "rollout"], "processes": 4}, "score": {"roles": ["reward"]}}
    (process,) = preflight.processes(config(tiny_path, cluster={"pools": pools}, algorithm={"kl_beta": 0.1}))
    held = {name: size // 4 for name, size in FULL.items() if name != "actor's weights"}
    assert {name: process.stays[name] for name in held} == held
    assert process.stays["reference"] == 2 * TINY // 4
    assert process.stays["engine's weights"] == 2 * TINY  # a whole copy
    fixed = process.updates["actor"].fixed
    assert fixed["gradients"] == TINY
    layer = (TINY - 2 * HEAD - 64) // 2  # of two: without both embeddings and the last norm
    assert fixed["gathered weights"] == 2 * (2 * HEAD + 64 + 5 * layer)


@pytest.mark.parametrize("name", ["grpo", "ppo"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_micro_batches_are_those_that_a_run_would_choose(tiny_path, monkeypatch, name, checkpointing):
    monkeypatch.setattr(memory, "LEAST", 4)
    asked = config(
        tiny_path,
        algorithm={"name": name},
        actor={"checkpointing": checkpointing},
        data={"max_prompt_tokens": 1},
        rollout={"max_tokens": 1},
    )
    (process,) = preflight.processes(asked)
    actor = Actor(asked.model_copy(update={"algorithm": configuration.Algorithm()}))
    came = set()
    for mib in range(2045, 2150, 7):
        others = sum(size for part, size in process.stays.items() if not part.startswith("actor's"))
        held = others + FULL["actor's weights"] + FULL["actor's FP32 masters"]
        monkeypatch.setattr(memory, "free_memory", lambda _, free=(mib << 20) - held: free)
        monkeypatch.setattr(memory, "_optimizers", {actor.optimizer})
        chosen = memory.micro_tokens(actor.settings, actor.loaded.model, torch.device("cuda"))
        predicted = process.micro_tokens(mib << 20)["actor"]
        assert predicted == (chosen if chosen > 4 or predicted else 0)
        came.add(predicted)
    assert 0 in came and len(came) > 10


@given(
    fixed=st.integers(0, 2**40),
    token=st.integers(1, 2**24),
    tokens=st.none() | st.integers(1, 2**15),
    longest=st.integers(1, 2**15),
    free=st.integers(-(2**40), 2**42),
    more=st.integers(0, 2**42),
)
def test_what_fits_fits_a_larger_gpu_too(fixed, token, tokens, longest, free, more):
    update = Update({"all": fixed}, token, tokens, longest)
    now, then = update.micro_tokens(free), update.micro_tokens(free + more)
    assert now <= then
    if now:
        assert fixed + max(now, longest) * token <= free


def test_a_sample_over_the_micro_batch_goes_alone():
    update = Update({"a": 1000}, 1, None, 20_000)  # which takes 25,000 of what is free, see ``memory.SHARE``
    assert update.micro_tokens(26_000) == 16_384 and update.micro_tokens(25_999) == 0


def test_a_process_fits_with_all_its_updates():
    small, large = Update({"a": 10}, 1, 100, 50), Update({"a": 10}, 2, 100, 150)
    process = Process("train", {"weights": 1000}, {"actor": small, "critic": large})
    assert process.micro_tokens(1309) == {"actor": 100, "critic": 0} and not process.fits(1309)
    assert process.micro_tokens(1310) == {"actor": 100, "critic": 100} and process.fits(1310)  # 1000 + 10 + 150 x 2
    engine = Process("rollout", {"weights": 1000}, {})
    assert engine.fits(1000) and not engine.fits(999)


@pytest.mark.parametrize("row", json.loads(MEASURED.read_text())["rows"], ids=lambda row: row["size"])
def test_the_count_agrees_with_what_was_measured_on_a_gpu(tmp_path, row):
    _models.outline(row["size"], tmp_path)
    (process,) = preflight.processes(config(tmp_path, model={"lora_rank": 32 if row["trains"] == "lora" else 0}))
    gib = {part: bytes / 2**30 for part, bytes in process.stays.items()}
    weights = gib["actor's weights"] + gib.get("actor's FP32 masters", 0)
    assert weights == pytest.approx(row["weights"] + row["masters"], rel=0.02)
    assert gib["actor's moments"] == pytest.approx(row["adam"], rel=0.02, abs=0.05)
    update = process.updates["actor"]
    tokens = process.micro_tokens(138 * 2**30)["actor"]
    assert row["update"] < (sum(update.fixed.values()) + tokens * update.per_token) / 2**30  # an estimate of the most


def table_row(tmp_path: Path, size: str, trains: str) -> str:
    """As it stands in docs/training.md."""
    _models.outline(size, tmp_path)
    adapter = {"lora_rank": 32 if trains == "LoRA of rank 32" else 0}
    lean = {"checkpointing": True, "optimizer": "adamw-8bit"} if trains == "all, lean" else {}
    (process,) = preflight.processes(config(tmp_path, model=adapter, actor=lean, rollout={"max_tokens": 256}))
    update = process.updates["actor"]
    counts = [process.micro_tokens(preflight.free_on(gib))["actor"] for gib in preflight.GPUS]
    parts = [sum(parts.values()) / 2**30 for parts in (process.stays, update.fixed)]
    cells = [size, trains, *(f"{part:.1f}" for part in parts), f"{update.per_token / 2**20:.2f}"]
    return f"| {' | '.join(cells + [f'{count:,}' if count else '–' for count in counts])} |"


@pytest.mark.parametrize("size", ["0.5B", "1.5B", "3B", "7B"])
@pytest.mark.parametrize("trains", ["all", "all, lean", "LoRA of rank 32"])
def test_the_table_in_the_documentation(tmp_path, size, trains):
    page = Path(__file__).parents[1] / "docs/training.md"
    assert table_row(tmp_path, size, trains) in page.read_text().splitlines()


# Whether a model's attention can be Rolecall's. ---------------------------------------------------------------------

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 1000,
    "pad_token_id": 999,
}


@pytest.mark.parametrize(
    ("kind", "layers", "reason"),
    [
        ("llama", 4, None),
        ("qwen3", 4, None),
        ("gemma3_text", 12, None),
        ("gemma2", 4, "gives other log-probabilities"),  # caps on scores and logits
        ("gpt_oss", 4, "gives other log-probabilities"),  # attention sinks
        ("qwen3_next", 4, "layers of another kind: linear_attention"),
        ("mamba", 4, "layers of another kind: linear_attention"),
    ],
)
def test_attention_is_tried_on_a_small_model_of_the_kind(tmp_path, tiny_path, kind, layers, reason):
    known = CONFIG_MAPPING[kind]()
    shape = CONFIG_MAPPING[kind](
        **{name: value for name, value in SMALL.items() if hasattr(known, name)}, num_hidden_layers=layers
    )
    shape.architectures = [AutoModelForCausalLM._model_mapping[type(shape)].__name__]
    shape.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tiny_path).save_pretrained(tmp_path)
    model = configuration.Model(path=str(tmp_path))
    why = preflight.why_transformers(model)
    assert why is None if reason is None else reason in why
    assert preflight.processes(Config(model=model))[0].fits(20 * 2**30)  # counted, whatever its layers


# What doctor says of it. ---------------------------------------------------------------------------------------------


def said(config: Config) -> list[doctor.Check]:
    return [check for check in doctor.doctor(config) if check.section == "Run"]


def test_doctor_says_what_a_run_needs(tiny_path):
    model, attention, needs, *sizes = found = said(config(tiny_path))
    assert model.detail == "LlamaForCausalLM, 0.1M parameters, on a GPU in bfloat16"
    assert attention.detail == "Rolecall's: packed micro-batches, the native engine"
    assert needs.name == "train" and "holds 0.0 GiB (actor's weights 0.0, " in needs.detail
    assert "computes in at most 2.0 GiB (logits 2.0, gradients 0.0) and 0.01 MiB a token" in needs.detail
    assert [size.name for size in sizes] == ["on 24 GiB", "on 48 GiB", "on 80 GiB", "on 140 GiB"]
    assert {size.detail for size in sizes} == {"micro-batches of 16,384 tokens"}
    assert {(check.status, check.fix) for check in found} == {("ok", "")}


def sized(tmp_path: Path, size: str, **sections: Any) -> dict[str, list[str]]:
    """By process, what is said of each GPU."""
    _models.outline(size, tmp_path)
    found: dict[str, list[str]] = {}
    for check in said(config(tmp_path, rollout={"max_tokens": 256} | sections.pop("rollout", {}), **sections))[2:]:
        if check.name.startswith("on "):
            found[list(found)[-1]].append(f"{check.status} {check.detail} {check.fix}".strip())
        else:
            found[check.name] = []
    return found


def test_where_a_run_is_too_large_the_cheapest_way_out_is_said(tmp_path):
    both = "--actor.checkpointing true --actor.optimizer adamw-8bit"
    assert sized(tmp_path, "1.5B") == {
        "train": [
            f"optional too small {both} gives micro-batches of 5,120 tokens",
            "ok micro-batches of 4,096 tokens",
            "ok micro-batches of 11,264 tokens",
            "ok micro-batches of 16,384 tokens",
        ]
    }
    lora = "--model.lora_rank 32"
    assert sized(tmp_path, "7B")["train"] == [
        f"optional too small {lora} --actor.checkpointing true gives micro-batches of 1,024 tokens",
        f"optional too small {lora} gives micro-batches of 2,048 tokens",
        f"optional too small {lora} gives micro-batches of 6,144 tokens",
        "optional too small --actor.checkpointing true gives micro-batches of 6,144 tokens",
    ]
    small = "--actor.micro_tokens 1024"
    assert sized(tmp_path, "0.5B", actor={"micro_tokens": 50_000})["train"] == [
        f"optional too small {small} gives micro-batches of 1,024 tokens",
        f"optional too small {small} gives micro-batches of 1,024 tokens",
        f"optional too small {small} gives micro-batches of 1,024 tokens",
        "ok micro-batches of 50,000 tokens",
    ]


def test_what_shares_a_gpu_is_counted_together_and_a_sleeping_engine_is_not(tmp_path, monkeypatch):
    asleep, awake = (sized(tmp_path, "3B", rollout={"engine": "vllm", "sleep": sleep}) for sleep in (2, 0))
    assert list(asleep) == ["train-rollout", "train", "all on one GPU"]
    assert asleep["train-rollout"] == ["ok large enough"] * 4
    assert asleep["all on one GPU"] == asleep["train"] == awake["train"]
    assert awake["train"][2] == "ok micro-batches of 3,072 tokens"
    assert awake["all on one GPU"][2] == "ok micro-batches of 2,048 tokens"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    apart = preflight.processes(config(tmp_path, rollout={"engine": "vllm"}))
    assert [process.name for process in apart] == ["train-rollout", "train"]


def test_doctor_measures_by_the_gpu_that_is_here(tiny_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "GPU")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index=0: (2**31, 2**32))
    monkeypatch.setattr(doctor, "_compiler", lambda: doctor.Check("Devices", "compiler", "ok", "gcc"))
    last = said(config(tiny_path))[-1]
    assert last == doctor.Check("Run", "on this GPU", "missing", "too small", preflight.LARGER)
    assert doctor.main(config(tiny_path)) == 1
    assert preflight.LARGER in " ".join(capsys.readouterr().out.split())


def test_a_model_that_cannot_be_had_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"there is no folder"):
        doctor.doctor(config(tmp_path / "none"))


def test_where_no_small_one_can_be_tried_the_rest_is_said(tmp_path, tiny_path):
    """RWKV's own code divides by the number of its layers less one."""
    shape = CONFIG_MAPPING["rwkv"](hidden_size=64, attention_hidden_size=64, num_hidden_layers=2, vocab_size=16)
    shape.architectures = ["RwkvForCausalLM"]
    shape.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tiny_path).save_pretrained(tmp_path)
    _, attention, needs, *_ = said(Config(model={"path": str(tmp_path)}))
    assert attention.status == "optional" and "known only in a run" in attention.detail
    assert "ZeroDivisionError" in attention.detail and "actor's moments" in needs.detail


def test_what_train_refuses_is_refused(tiny_path, tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"rollout\.top_k = 5"):
        doctor.doctor(config(tiny_path, rollout={"top_k": 5}))
    quantized = tmp_path / "awq"
    shutil.copytree(tiny_path, quantized)
    written = json.loads((quantized / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps(written | {"quantization_config": {"quant_method": "awq"}}))
    for refuses in (doctor.doctor, Actor):
        with pytest.raises(UserError, match=r"is quantized \(awq\)\. Take the model that it was made of"):
            refuses(config(quantized))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"torchao is not installed"):
        doctor.doctor(config(tiny_path, actor={"optimizer": "adamw-8bit"}))
