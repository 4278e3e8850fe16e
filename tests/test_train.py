"""Whole runs through Ray on the tiny model: the command line, Python, the user's own task, learning, and resuming."""

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

import rolecall
from rolecall import models
from rolecall.config import Config
from rolecall.data import Sampler, load_prompts
from rolecall.loop.run import State, _changes
from rolecall.loop.stages import Context
from rolecall.telemetry.logs import read

RECIPES = Path(__file__).parents[1] / "recipes"
STEPS = 80  # by which both tiny recipes have learned
TIMES = ("time/", "memory/", "tokens_per_second")  # what two equal runs may differ in


def comparable(run_dir: Path) -> list[dict]:
    return [
        {key: value for key, value in line.items() if not key.startswith(TIMES)}
        for line in read(run_dir / "metrics.jsonl")
    ]


@pytest.fixture(scope="module")
def learned(tmp_path_factory, local_ray) -> dict[str, rolecall.Run]:
    """A run of each recipe that has learned, to look at and not to change."""

    def run(recipe: str) -> rolecall.Run:
        overrides = {"run.dir": str(tmp_path_factory.mktemp("runs") / recipe), "run.steps": STEPS}
        return rolecall.train(Config.load(RECIPES / f"{recipe}.toml", overrides))

    return {recipe: run(recipe) for recipe in ("grpo-tiny", "ppo-tiny")}


@pytest.mark.parametrize("recipe", ["grpo-tiny", "ppo-tiny"])
def test_learns_the_first_digit_from_random_weights(learned, recipe):
    """From about .05 to .7 at least (seeds: benchmarks/learning.md); a wrong sign, shift or sync leaves it there."""
    run = learned[recipe]
    rewards = [line["reward/mean"] for line in run.metrics]
    assert sum(rewards[:3]) / 3 < 0.3
    assert sum(rewards[-5:]) / 5 > 0.5
    assert list(run.heldout) == [0, STEPS] and run.heldout[0] < 0.3 and run.heldout[STEPS] > 0.5


@pytest.mark.parametrize("recipe", ["grpo-tiny", "ppo-tiny"])
def test_a_run_leaves_everything_it_promises(tmp_path, learned, recipe):
    run = learned[recipe]
    assert [line["step"] for line in run.metrics] == list(range(1, STEPS + 1))
    times = {f"time/{stage}" for stage in ("generate", "score", "reference", "advantages", "update", "sync")}
    expected = {"reward/mean", "policy/loss", "policy/entropy", "policy/grad_norm", "mismatch/mean", "time/step"}
    if recipe == "ppo-tiny":
        expected |= {"kl", "kl_beta", "value/loss", "value/explained_variance"}
    for step, line in enumerate(run.metrics, start=1):
        assert (line["sync/version"], line["sync/bytes"]) == (step, 0)  # one process
        assert expected | times <= set(line), expected | times - set(line)
        assert sum(line[time] for time in times) <= line["time/step"]
        assert line["mismatch/mean"] < 1e-4  # the engine runs on the Actor's own weights, in float32
    model = AutoModelForCausalLM.from_pretrained(run.model)
    assert sum(parameter.numel() for parameter in model.parameters()) > 10_000
    assert "<svg" in run.report.read_text()
    assert Config.load(run.dir / "config.toml").run.steps == STEPS
    assert json.loads((run.dir / "versions.json").read_text())["weight sync"] == "nothing moves, one process"
    assert run.checkpoint.name == f"step-{STEPS:06}"
    run.save_pretrained(tmp_path / "copy")
    assert (tmp_path / "copy" / "model.safetensors").exists()


def test_own_data_and_own_reward_without_touching_the_package(tmp_path, tiny_path, local_ray):
    (tmp_path / "data.jsonl").write_text("\n".join(json.dumps({"q": f"{i} 0", "a": str(i)}) for i in range(8)))
    (tmp_path / "reward.py").write_text(
        "def short(prompts, responses, rows):\n"
        "    assert all('q' in row for row in rows)\n"
        "    return [1.0 / (1 + len(response)) for response in responses]\n"
    )
    (tmp_path / "own.toml").write_text(
        f'[model]\npath = "{tiny_path}"\n'
        '[data]\npath = "data.jsonl"\nprompt = "{q}"\nanswer = "a"\nholdout = 2\n'
        '[reward]\nfunction = "reward.py:short"\n'
        "[rollout]\nprompts = 2\ngroup_size = 4\nmax_tokens = 4\n"
        "[run]\nsteps = 1\n"
    )
    run = rolecall.train(Config.load(tmp_path / "own.toml", {"run.dir": str(tmp_path / "run")}))
    assert 0 < run.metrics[0]["reward/mean"] <= 1


def test_a_killed_run_resumes_to_the_same_result(tmp_path, local_ray):
    """SIGKILL at a random step of a run by the command line, which goes on in Python, beside one in Python alone.

    Till then equal metrics to the bit; then the same prompts, and to rounding the same metrics.
    """
    steps, killed = 16, tmp_path / "killed"
    short = {"run.steps": steps, "run.save_every": 3, "rollout.prompts": 2, "rollout.group_size": 4, "data.holdout": 2}
    recipe = RECIPES / "ppo-tiny.toml"  # PPO: Critic and KL controller are part of what must come back
    whole = rolecall.train(Config.load(recipe, short | {"run.dir": str(tmp_path / "whole")})).dir

    line = [sys.executable, "-m", "rolecall", "train", str(recipe), "--run.dir", str(killed)]
    line += [part for key, value in short.items() if key != "run.steps" for part in (f"--{key}", str(value))]
    kill_after = random.randint(1, steps // 2)
    with subprocess.Popen([*line, f"--run.steps={steps}"], stdout=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline and len(read(killed / "metrics.jsonl")) < kill_after:
            time.sleep(0.02)
        process.send_signal(signal.SIGSTOP)  # so that it is still there
        again = Config.load(recipe, short | {"run.dir": str(killed)})
        try:
            with pytest.raises(rolecall.UserError, match="Another run is working in"):
                rolecall.train(again, resume=True)
        finally:
            process.kill()
        assert "weight sync: nothing moves, one process\n" in process.stdout.read()
    before = comparable(killed)
    assert kill_after <= len(before) < steps, f"asked to kill after step {kill_after}, found {len(before)} steps"
    assert before == comparable(whole)[: len(before)]

    rolecall.train(again, resume=True)
    draws = [
        [
            (line["step"], line["group_id"], line["prompt_id"], line["response"])
            for line in read(folder / "samples.jsonl")
        ]
        for folder in (whole, killed)
    ]
    assert draws[0] == draws[1]
    resumed = comparable(killed)
    assert [line["step"] for line in resumed] == list(range(1, steps + 1))
    for one, other in zip(comparable(whole), resumed, strict=True):
        assert one == pytest.approx(other, rel=1e-5, abs=1e-6)
    assert read(whole / "eval.jsonl") == read(killed / "eval.jsonl")


def test_what_may_change_on_resume_takes_effect_and_the_algorithm_may_not(tmp_path, learned, capsys):
    shutil.copytree(learned["grpo-tiny"].dir, tmp_path / "run")
    changes = {"run.dir": str(tmp_path / "run"), "run.steps": STEPS + 1, "algorithm.kl_beta": 0.5}
    resumed = rolecall.train(Config.load(RECIPES / "grpo-tiny.toml", changes), resume=True)
    assert [line["step"] for line in resumed.metrics] == list(range(1, STEPS + 2))
    assert resumed.metrics[-1]["kl_beta"] == 0.5
    said = capsys.readouterr().out
    assert "configured as before but for " in said
    assert f"held-out accuracy {learned['grpo-tiny'].heldout[STEPS]:.3f}\n" in said and "held-out –" not in said
    assert "algorithm.kl_beta (0.0 before, now 0.5), run.dir (" in said
    assert f", run.steps ({STEPS} before, now {STEPS + 1})\n" in said
    config = Config.load(RECIPES / "ppo-tiny.toml")
    prompts, _, _ = load_prompts(config, models.load_tokenizer(config.model))
    other = State(Context(config, roles=None), Sampler(prompts, config.run.seed))
    with pytest.raises(rolecall.UserError, match=r"was trained by grpo: it cannot be resumed with .* = 'ppo'"):
        other.load(resumed.checkpoint)
    fewer = Context(Config.load(RECIPES / "grpo-tiny.toml", {"run.steps": STEPS}), roles=None)
    with pytest.raises(rolecall.UserError, match=f"is {STEPS + 1} steps on, and run.steps = {STEPS}"):
        State(fewer, other.sampler).load(resumed.checkpoint)


BOTH = Config(data={"system": "[b]one\ntwo"}, cluster={"pools": {"all": {"roles": ["actor", "rollout", "reward"]}}})


@pytest.mark.parametrize(
    ("before", "says"),
    [
        (BOTH.to_toml(), "configured as before"),
        (BOTH.to_toml().replace("[b]one", "[b]no"), r'but for data.system ("[b]no\ntwo" before, now "[b]one\ntwo")'),
        ("old = 1\n" + BOTH.to_toml(), "but for old (1 before, now not set)"),  # of another version, as is the next
        (
            BOTH.to_toml() + "[gone]\nwhen = 1979-05-27\n",
            "but for gone.when (datetime.date(1979, 5, 27) before, now not",
        ),
        (BOTH.to_toml().replace("lam = 0.95\n", ""), "but for algorithm.lam (not set before, now 0.95)"),
        (BOTH.to_toml().replace("processes = 1", "processes = 2"), "for cluster.pools.all.processes (2 before, now "),
        (BOTH.to_toml() + '[cluster.pools.more]\nroles = ["critic"]\n', 'more.roles (["critic"] before, now not set)'),
        ("", 'but for model.path (not set before, now "smollm2-135m-instruct"), '),
        (BOTH.to_toml()[:200], "is not known, as RUN/config.toml cannot be read: "),  # cut in the middle of a string
        (b"[data]\nsystem = '\xff'\n", "is not known, as RUN/config.toml cannot be read: 'utf-8' codec"),
        (None, "is not known, as RUN/config.toml cannot be read: [Errno 2] No such file"),
    ],
)
def test_a_resumed_run_tells_what_its_folder_can_say_of_before(tmp_path, before, says):
    if before is not None:
        (tmp_path / "config.toml").write_bytes(before.encode() if isinstance(before, str) else before)
    said = _changes(tmp_path, BOTH).replace(str(tmp_path), "RUN")
    assert says in said and "\n" not in said
    assert (said == says) == (before == BOTH.to_toml())


@pytest.mark.slow
def test_the_real_model_runs_and_moves(tmp_path, local_ray):
    """Two steps of the demo on the 135M model."""
    small = {"run.steps": 2, "rollout.prompts": 4, "rollout.group_size": 4, "data.holdout": 2, "run.eval_samples": 1}
    demo = Path(rolecall.__file__).with_name("demo.toml")
    run = rolecall.train(Config.load(demo, small | {"run.dir": str(tmp_path / "run")}))
    assert len(run.metrics) == 2
    assert 0.02 < run.metrics[0]["reward/mean"] < 0.5
    assert run.metrics[-1]["mismatch/mean"] < 1e-3
    assert run.metrics[-1]["policy/grad_norm"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["grpo-svamp", "ppo-gsm8k"])
def test_word_problem_recipes_run(tmp_path, smollm2_small, local_ray, recipe):
    """With a model that cannot learn them, so only that every stage works on them."""
    small = {"model.path": str(smollm2_small), "data.eval_path": "", "data.holdout": 1, "run.eval_samples": 1}
    small |= {"rollout.prompts": 1, "rollout.group_size": 4, "rollout.max_tokens": 16, "run.steps": 1}
    run = rolecall.train(Config.load(RECIPES / f"{recipe}.toml", small | {"run.dir": str(tmp_path / "run")}))
    assert 0 <= run.metrics[0]["reward/mean"] <= 1
    assert ("value/loss" in run.metrics[0]) == (recipe == "ppo-gsm8k")
    assert list(run.heldout) == [0, 1]
