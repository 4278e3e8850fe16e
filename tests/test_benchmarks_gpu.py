"""The benchmarks for a GPU, tried on a CPU with a tiny model; how they run their parts; the figures they compare to."""

import json
import os
import shutil
import statistics
import subprocess
import sys
import textwrap
import time

import psutil
import pytest
import torch
from transformers import Qwen2ForCausalLM

from benchmarks import (
    _gpu,
    _models,
    decode,
    decoupling,
    learning_vs_trl,
    memory,
    rollout,
    sharding,
    step,
    sync,
    training,
)
from benchmarks._gpu import Part
from benchmarks._models import SIZES, Size, architecture
from rolecall import engines, models
from rolecall.cli import _given
from rolecall.config import Config
from rolecall.data import load_prompts
from rolecall.errors import RunError, UserError
from rolecall.samples import Request, Sampling
from rolecall.telemetry import versions
from vllm_here import needs_vllm

# 1 layer of width 4 with 2 heads of size 2, one of them for keys and values; an MLP of width 8; 10 words.
SMALL = Size(4, 8, 1, 2, 1, True, 10)


@pytest.fixture
def module(tmp_path, monkeypatch):
    """The name of a part's module of these lines, which ``measure`` runs."""

    def write(body: str) -> str:
        main = 'if __name__ == "__main__":\n    _gpu.print_rows(measure)\n'
        code = f"import os, sys, time\nfrom benchmarks import _gpu\n\n{textwrap.dedent(body)}\n{main}"
        (tmp_path / "measured.py").write_text(code)
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
        return "measured"

    return write


def test_rows_of_a_part_come_with_what_a_library_prints_left_out(module):
    name = module(
        """
        def measure(n):
            print("a library says ROW", flush=True)
            held = bytearray(100 * 2**20)
            time.sleep(1)
            for i in range(n):
                yield {"i": i, "n": n}
        """
    )
    found = list(_gpu.measure([Part(name, {"n": 2}), Part(name, {"n": 1})]))
    assert [(row["i"], row["n"]) for row, _ in found] == [(0, 2), (1, 2), (0, 1)]
    assert {row["commit"].removesuffix("+") for row, _ in found} == {versions.collect()["commit"][:7]}
    assert all(peak > 0.1 for _, peak in found)  # GiB


def test_a_part_that_fails_or_hangs_is_named_at_the_end_and_the_others_are_run(module, capsys):
    name = module(
        """
        def measure(how):
            yield {"how": how}
            print("the last thing it said", flush=True)
            if how == "fails":
                raise ValueError("no luck")
            if how == "hangs":
                if os.fork() == 0:
                    time.sleep(600)  # a child holds the output open
                time.sleep(600)
        """
    )
    rows = []
    with pytest.raises(RunError, match=r"2 of 3 measurements failed:(.|\n)*fails.*exit code 1(.|\n)*hangs.*killed"):
        for row, _ in _gpu.measure([Part(name, {"how": how}, timeout=6) for how in ("fails", "hangs", "works")]):
            rows.append(row["how"])
    assert rows == ["fails", "hangs", "works"]
    said = capsys.readouterr().out
    assert said.count("the last thing it said") == 2
    assert "ValueError: no luck" in said


def test_a_part_ends_with_the_benchmark_that_is_killed(module, tmp_path):
    name = module(
        f"""
        def measure():
            open({str(tmp_path / "pid")!r}, "w").write(str(os.getpid()) + "\\n")
            yield {{}}
            time.sleep(600)
        """
    )
    run = f"from benchmarks import _gpu; list(_gpu.measure([_gpu.Part({name!r}, {{}})]))"
    benchmark = subprocess.Popen([sys.executable, "-c", run])
    wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().endswith("\n"))
    part = int((tmp_path / "pid").read_text())
    benchmark.kill()
    benchmark.wait()
    wait_for(lambda: not psutil.pid_exists(part) or psutil.Process(part).status() == psutil.STATUS_ZOMBIE)


def wait_for(done, seconds=30.0):
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.1)


@pytest.fixture
def two_gpus(tmp_path, monkeypatch):
    """A driver that knows two GPUs, with 1 and 0.5 GiB in use."""
    (tmp_path / "nvidia-smi").write_text(
        textwrap.dedent(
            """\
            #!/bin/sh
            case "$*" in
              *query-gpu=name*) printf "NVIDIA H200\\nNVIDIA H200\\n";;
              *--id=0,1) printf "1024\\n512\\n";;
              *--id=1|*--id=GPU-1b) printf "512\\n";;
              *--id=*) echo "No devices were found"; exit 6;;
              *) printf "1024\\n512\\n";;
            esac
            """
        )
    )
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1"))


@pytest.mark.parametrize(
    ("mine", "gib"), [(None, 1.5), ("0,1", 1.5), ("1", 0.5), ("GPU-1b", 0.5), ("7", None), ("", "dry"), ("-1", "dry")]
)
def test_the_memory_in_use_is_that_of_the_gpus_that_torch_may_use(two_gpus, module, monkeypatch, mine, gib):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if mine is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mine)
    part = Part(module("def measure():\n    yield {}\n"), {})
    if gib is None:
        with pytest.raises(UserError, match=r"CUDA_VISIBLE_DEVICES = '7': No devices were found Write their numbers"):
            list(_gpu.measure([part]))
        return
    assert _gpu.machine() == ("dry-run" if gib == "dry" else "h200")
    ((_, peak),) = _gpu.measure([part])
    assert 0 < peak < 0.5 if gib == "dry" else peak == gib


def test_a_row_is_added_to_the_one_with_its_keys():
    rows = [{"size": "7B", "n": 64, "native_tok_s": 1.0}]
    assert _gpu.merge(rows, {"size": "7B", "n": 64, "vllm_tok_s": 2.0}, ("size", "n")) == {
        "size": "7B", "n": 64, "native_tok_s": 1.0, "vllm_tok_s": 2.0
    }  # fmt: skip
    _gpu.merge(rows, {"size": "7B", "n": 512}, ("size", "n"))
    assert [row["n"] for row in rows] == [64, 512]


def test_a_row_of_several_runs_names_the_commit_of_each(tmp_path, monkeypatch):
    def measured(part):
        by = part.arguments["system"]
        known = {"size": "tiny", "n": 8, "out": 16, "lengths": "fixed"}
        yield known | {f"{by}_tok_s": 1.0, f"{by}_mean_length": 16.0}, 1.0

    monkeypatch.setattr(_gpu, "_run", measured)
    cells = []
    for commit, systems in (("a", ["native", "vllm"]), ("b", ["native"]), ("c", ["invariant"]), ("b", ["vllm"])):
        monkeypatch.setattr(_gpu, "commit", lambda commit=commit: commit)
        rollout.run(tmp_path, size=["tiny"], system=systems)
        cells.append(table(tmp_path, "rollout")[0][2].split(" | ")[-1])
    assert cells == ["a |", "b, a |", "b, a, c |", "b, c |"]


def test_options_of_a_benchmark_have_the_type_of_their_default():
    assert _given(["--size", "0.5B,7B", "--n", "64"], rollout.run) == {"size": ["0.5B", "7B"], "n": [64]}
    assert _given(["--repeats", "3"], rollout.run) == {"repeats": 3}
    assert _given(["--recipe", "a=b", "--system=trl"], learning_vs_trl.run) == {"recipe": "a=b", "system": ["trl"]}
    both = {"micro_tokens": [8192, 16384], "size": ["3B"]}
    assert _given(["--micro-tokens=8192,16384", "--size", "3B"], training.run) == both
    for wrong, says in (
        (["--sise", "7B"], "Did you mean 'size'"),
        (["--n", "many"], "--n many: write it as 64,512,1024"),
        (["--repeats", "3,4"], "--repeats 3,4: write it as 2"),
        (["--n"], "--n has no value: write it as --n 64,512,1024"),
        (["--size", "--n", "16"], "--size has no value: write it as --size 0.5B,1.5B,3B,7B"),
        (["--n="], "--n has no value"),
        (["--out", "x"], "Unknown option 'out'"),
    ):
        with pytest.raises(UserError, match=says):
            _given(wrong, rollout.run)


@pytest.mark.skipif(torch.cuda.is_available(), reason="refused without a GPU")
@pytest.mark.parametrize("benchmark", [decoupling, memory, rollout, step, training])
def test_without_a_gpu_a_benchmark_does_not_begin(benchmark, tmp_path):
    with pytest.raises(UserError, match=r"GPU for size (0\.5B|3B), and there is none. To try it: --size tiny"):
        benchmark.run(tmp_path)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("benchmark", "given", "says"),
    [
        (training, {"size": ["9B"]}, "Unknown size '9B'"),
        (rollout, {"system": ["vlm"]}, "Unknown system 'vlm'. Did you mean 'vllm'"),
        (rollout, {"lengths": ["geometrical"]}, "Did you mean 'geometric'"),
        (rollout, {"n": [64, 100]}, "--n 100: sequences come in groups of 8"),
        (rollout, {"n": [0]}, "--n 0"),
        (rollout, {"repeats": 0}, "--repeats 0: nothing would be measured"),
        (decode, {"n": [12]}, "--n 12: sequences come in groups of 8"),
        (memory, {"trains": ["some"]}, "Unknown trains 'some'. Known: all, lean, lora"),
        (memory, {"gib": [24, 4000]}, r"--gib 4000: there are \d+"),
        (step, {"system": ["trl-sleeps"]}, "Did you mean 'trl-sleep'"),
        (
            training,
            {"size": ["tiny", "head"], "mode": ["ordinary", "invariant"]},
            "--size tiny,head: of 'head' the mem",
        ),
        (step, {"steps": 2}, "--steps 2: the first 2 do not count"),
        (decoupling, {"mode": ["vlm"]}, "Unknown mode 'vlm'. Did you mean 'vllm'"),
        (decoupling, {"steps": 1}, "--steps 1"),
        (learning_vs_trl, {"system": ["tlr"]}, "Did you mean 'trl'"),
        (learning_vs_trl, {"system": ["rolecall"], "recipe": "grpo"}, r"'recipes/grpo\.toml' does not exist"),
        (learning_vs_trl, {"system": ["rolecall"], "seed": [0, -1]}, r"run\.seed"),
        (learning_vs_trl, {"system": ["rolecall"], "every": 0}, "--every 0"),
        (sync, {"engine": ["vlm"]}, "Unknown engine 'vlm'"),
        (sync, {"size": ["9B"]}, "Unknown size '9B'"),
        (sharding, {"processes": [1, 0]}, "--processes 0"),
    ],
)
def test_what_a_benchmark_cannot_measure_is_told_before_it_begins(benchmark, given, says, tmp_path):
    size = {} if benchmark is learning_vs_trl else {"size": ["tiny"]}
    with pytest.raises(UserError, match=says):
        benchmark.run(tmp_path, **size | given)


@pytest.mark.parametrize("size", SIZES)
def test_a_size_counts_what_the_model_has(size):
    shape = SIZES[size]
    with torch.device("meta"):
        config = architecture(shape, tie_word_embeddings=False)  # so that the head is counted by itself
        matrices = {name: p.numel() for name, p in Qwen2ForCausalLM(config).named_parameters() if p.ndim == 2}
    head = matrices.pop("lm_head.weight")
    assert matrices.pop("model.embed_tokens.weight") == head == shape.head
    assert sum(matrices.values()) == shape.body


def test_the_floor_of_a_decode_by_hand():
    # Body: q and o 4 x 4, k and v 4 x 2, three of 4 x 8: 144; head 40. Keys and values: 2 x 2 numbers of 2 bytes, 8.
    assert (SMALL.body, SMALL.head, SMALL.token_bytes, SMALL.pair_flops) == (144, 40, 8, 16)
    # Responses of 1 and 2 tokens see 129, and 129 + 130, tokens: 388. Two steps read 2 x 184 bytes of weights each.
    nbytes, flops = 2 * 368 + 388 * 8, 3 * 368 + 388 * 16
    assert rollout.floor_seconds(SMALL, [1, 2], {"copy": 1.0, "matmul": 1e9}) == nbytes
    assert rollout.floor_seconds(SMALL, [1, 2], {"copy": 1e9, "matmul": 1.0}) == flops


def test_the_flops_of_an_update_by_hand():
    # A prompt of 128 and two responses of 3, whose last tokens are not computed: 132 tokens, 6 of them predicted.
    # They see: 128 x 129 / 2 in the prompt; 1 + 2 in each response, whose two tokens see the prompt's 128, too.
    pairs = 8256 + 2 * (3 + 2 * 128)
    assert training.update_flops(SMALL, 3, 2) == 3 * (2 * 144 * 132 + 2 * 40 * 6 + 16 * pairs)


def test_a_random_model_ends_as_often_as_was_asked(tmp_path):
    """A quarter of the tokens end a response, so lengths are geometric: a mean of 4, and 1 in 1 of 4."""
    config = Config(model={"path": str(_models.make("tiny", tmp_path / "tiny"))})
    loaded = models.load(config.model, "cpu")
    loaded.model.generation_config.eos_token_id = rollout.ENDS
    requests = [Request(i, str(i), text, 8, 0, Sampling(64)) for i, text in enumerate(_gpu.token_prompts(128, 0))]
    lengths = [len(sample.response) for sample in engines.create(config, loaded).generate(requests)]
    assert statistics.fmean(lengths) == pytest.approx(4, rel=0.15)  # of 1,024: their mean's deviation is 3 %
    assert lengths.count(1) / len(lengths) == pytest.approx(0.25, abs=0.06)


def test_prompts_have_the_length_that_is_stated():
    model = {"path": str(_models.make("tiny"))}
    config = Config(model=model, data={"path": "benchmarks._gpu:prompts", "answer": "", "holdout": 0})
    prompts, _, _ = load_prompts(config, models.load_tokenizer(config.model))
    assert {len(prompt.tokens) for prompt in prompts} == {_gpu.PROMPT}
    assert len({prompt.text for prompt in prompts}) == 1024


def test_the_ratio_is_to_the_faster_of_trls_ways():
    seconds = {("0.5B", "rolecall"): 1.5, ("0.5B", "trl"): 6.0, ("0.5B", "trl-sleep"): 7.0, ("3B", "rolecall"): 2.0}
    rows = [{"size": size, "system": system, "s_per_step": s} for (size, system), s in seconds.items()]
    assert step._ratios(rows) == {"0.5B": 4.0}


def table(out, name):
    """The lines of a table of results, and the figures that it was made of."""
    figures = json.loads((out / "results" / f"{name}-dry-run.json").read_text())
    text = (out / f"{name}-dry-run.md").read_text()
    assert "bf16" not in text and (_gpu.TRIAL in text) == (name != "learning-vs-trl")
    return [line for line in text.splitlines() if line.startswith("|")], figures


def test_training_tried_on_a_cpu(tmp_path):
    training.run(tmp_path, size=["tiny"], micro_tokens=[4096])
    lines, figures = table(tmp_path, "training")
    (row,) = figures["rows"]
    assert lines[2].startswith("| tiny | 4,096 |")
    assert 0 < row["mfu"] < row["mfu_samples"]
    # 2 groups of 8: 16 x 384 tokens of samples, 2 x (128 + 8 x 255) computed.
    assert row["tok_s"] / row["computed_tok_s"] == pytest.approx(6144 / 4336)
    known = {"size": "tiny", "micro_tokens": 64, "invariant_s": 2.0, "commit": "1234567"}
    assert training._line(known) == "| tiny | 64 |  |  |  |  |  |  | 2.000 | 1234567 |"


@pytest.fixture(scope="module")
def generated(tmp_path_factory):
    """The table of the native engine alone."""
    out = tmp_path_factory.mktemp("out")
    rollout.run(out, size=["tiny"], n=[16], system=["native"], repeats=1)
    return out


def test_generation_tried_on_a_cpu(generated):
    lines, figures = table(generated, "rollout")
    assert [line.split(" | ")[3] for line in lines[2:4]] == ["fixed", "geometric"]
    fixed, geometric = figures["rows"]
    assert fixed["native_mean_length"] == 16 > geometric["native_mean_length"]
    assert 0 < fixed["floor_ms"] < fixed["ms"]


def test_kernels_of_a_decode_step_by_kind():
    """Two layers, four steps."""
    kernels = {
        "_attend": (8, 80.0),
        "nvjet_tst_128": (32, 400.0),
        "norm": (16, 48.0),
        "nvjet_tst_256": (4, 200.0),
        "_pick": (4, 20.0),
    }
    assert decode.by_kind(kernels, layers=2) == {
        "step": 187.0,
        "kernels": 16.0,
        "attention": 20.0,
        "products": 100.0,
        "layers": 12.0,
        "once": 55.0,
    }


def test_a_decode_step_tried_on_a_cpu(tmp_path):
    decode.run(tmp_path, size=["tiny"], n=[8])
    lines, figures = table(tmp_path, "decode")
    (row,) = figures["rows"]
    assert row["step"] == pytest.approx(sum(row[kind] for kind in decode.KINDS))
    assert row["attention"] > 0 and row["products"] > 0 and row["once"] > 0
    shape = SIZES["tiny"]
    seen = 8 * (128 + decode.TRIAL) * 2 * 2 * 2 * 1 * 32  # tokens, keys and values, bytes, layers, heads, their size
    assert decode.step_bytes(shape, 8, decode.TRIAL) == 2 * (shape.body + shape.head) + seen
    assert lines[2].startswith("| tiny | 8 | ")


def test_memory_tried_on_a_cpu(tmp_path):
    pytest.importorskip("peft")
    memory.run(tmp_path, size=["tiny"], trains=["lora"])
    lines, figures = table(tmp_path, "memory")
    (row,) = figures["rows"]
    # Without the adapter, 4 bytes each: the matrices; a layer's two norms and biases of q, k and v; the last norm.
    shape = SIZES["tiny"]
    others = 2 * (2 * 64 + 64 + 2 * 32) + 64
    assert row["weights"] * 2**30 == 4 * (shape.body + shape.head + others)
    assert row["peak_gib"] > 0.1 and row["masters"] > 0
    assert row["micro_tokens"] == 4096  # as on every CPU
    assert lines[2].startswith(f"| tiny | LoRA of rank 32 | {row['gib']} | 16,384 | 4,096 | 0.0 |")


@needs_vllm
@pytest.mark.slow
def test_generation_beside_vllm_tried_on_a_cpu(generated, tmp_path, monkeypatch):
    for name, value in {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TORCHDYNAMO_DISABLE": "1",
    }.items():
        monkeypatch.setenv(name, value)
    shutil.copytree(generated, tmp_path, dirs_exist_ok=True)  # to add to
    rollout.run(tmp_path, size=["tiny"], n=[16], system=["vllm"], repeats=1)
    lines, figures = table(tmp_path, "rollout")
    assert len(figures["rows"]) == 2
    for row in figures["rows"]:
        assert row["ratio"] == row["native_tok_s"] / row["vllm_tok_s"]
    assert figures["rows"][0]["vllm_mean_length"] == 16
    assert f"| {figures['rows'][0]['ratio']:.2f} |" in lines[2]


@pytest.mark.slow
def test_a_step_beside_trls_tried_on_a_cpu(tmp_path):
    pytest.importorskip("trl")
    step.run(tmp_path, size=["tiny"], system=["rolecall", "trl-generate"], steps=3)
    _, figures = table(tmp_path, "step")
    own, theirs = figures["rows"]
    assert (own["system"], theirs["system"]) == ("rolecall", "trl-generate")
    assert own["mismatch"] < 1e-4
    assert sum(own["stages"].values()) <= own["s_per_step"]
    for row in (own, theirs):
        assert len(row["steps"]) == 3
        assert 15 < row["mean_length"] <= 16


def test_decoupling_tried_on_a_cpu(tmp_path, monkeypatch, local_ray):
    """In this process: that one of its own measures a step is tried above."""
    monkeypatch.setattr(_gpu, "_run", lambda part: ((row, 1.5) for row in step.measure(**part.arguments)))
    decoupling.run(tmp_path, size=["tiny"], mode=["transformers"], steps=3)
    lines, figures = table(tmp_path, "decoupling")
    assert [row["mode"] for row in figures["rows"]] == ["transformers"] and len(figures["rows"][0]["steps"]) == 3
    assert lines[2].startswith("| tiny | transformers' generate on the Actor's weights, one process |")
    assert ", update " in lines[2] and " | 1.5 | " in lines[2]


@pytest.mark.slow
def test_learning_beside_trl_tried_on_a_cpu(tmp_path):
    pytest.importorskip("trl")
    systems = ["rolecall", "trl-generate"]
    learning_vs_trl.run(tmp_path, system=systems, seed=[0], steps=60, every=30, recipe="grpo-tiny")
    _, figures = table(tmp_path, "learning-vs-trl")
    (own,), (theirs,) = (figures[system] for system in systems)
    assert own["samples"] == theirs["samples"] == [0, 30 * 128, 60 * 128]
    assert own["accuracy"][0] == theirs["accuracy"][0]  # the same weights, prompts, seeds and sampler
    for row in (own, theirs):
        assert row["accuracy"][-1] > row["accuracy"][0] + 0.1
        assert row["seconds"] == sorted(row["seconds"])
    assert (tmp_path / "learning-vs-trl-dry-run.svg").exists()


def test_a_sync_tried_on_a_cpu(tmp_path, local_ray):
    sync.run(tmp_path, size=["tiny"], engine=["native"])
    figures = json.loads((tmp_path / "results" / "sync-dry-run.json").read_text())
    rows = {(row["transport"], row["mode"]): row for row in figures["rows"]}
    assert set(rows) == {(way, mode) for way in ("shared memory", "gloo") for mode in sync.MODES}
    assert len({row["bytes"] for row in rows.values()}) == 1 and all(row["seconds"] > 0 for row in rows.values())
    (gap,) = figures["mismatch"]
    assert gap["max"] < 1e-4
    assert "| tiny | native | gloo | packed, two in flight, no digest |" in (tmp_path / "sync-dry-run.md").read_text()


def test_sharding_tried_on_a_cpu(tmp_path, monkeypatch):
    """Over gloo, in this process's children: that a part has a process of its own is tried above."""
    monkeypatch.setattr(_gpu, "_run", lambda part: ((row, 1.5) for row in sharding.measure(**part.arguments)))
    sharding.run(tmp_path, size=["tiny"], dtype=["float32"])
    lines, figures = table(tmp_path, "sharding")
    one, two = figures["rows"]
    assert (one["processes"], two["processes"]) == (1, 2)
    assert 0 < sharding.difference(two, one) < 1e-4
    assert lines[2].startswith("| tiny | float32 | 1 |") and lines[3].startswith("| tiny | float32 | 2 |")
    with pytest.raises(UserError, match=r"there is none\. To try it: --size tiny"):
        sharding.run(tmp_path, size=["3B"])
