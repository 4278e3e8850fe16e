"""The command line says what was wrong in one message, exits with 2, and leaves nothing behind."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

RECIPE = """
[model]
path = "{model}"
[data]
path = "rolecall.data.tasks:first_digit"
[reward]
function = "rolecall.rewards:first_digit"
[rollout]
prompts = 2
group_size = 4
max_tokens = 4
[run]
steps = 1
"""


def rolecall(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rolecall", *map(str, arguments)], capture_output=True, text=True, timeout=240
    )


@pytest.fixture
def recipe(tmp_path, tiny_path):
    (tmp_path / "recipe.toml").write_text(RECIPE.format(model=tiny_path))
    return tmp_path / "recipe.toml"


@pytest.mark.parametrize(
    ("override", "says"),
    [
        (("--rollout.temperatur", 1), "Did you mean 'temperature'?"),
        (("--rolout.temperature", 1), "Did you mean 'rollout'?"),
        (("--rollout.temperature", "hot"), "rollout.temperature = 'hot'"),
        (("--rollout.group_size", 2), "group_size is 2: GRPO needs groups of at least 4"),
        (("--rollout.top_p", 0.9), "rollout.top_p = 0.9"),
        (("--rollout.engine", "nativ"), "Did you mean 'native'?"),
        (("--data.path", "nowhere.jsonl"), "nowhere.jsonl"),
        (("--data.prompt", "{question}"), "question"),
        (("--data.max_prompt_tokens", 1), "max_prompt_tokens"),
        (("--model.path", "no/such-model"), "no/such-model"),
        (("--reward.function", "rolecall.rewards:last_numbr"), "last_numbr"),
        (("--reward.function", "nowhere.py:score"), "nowhere.py"),
        (("--resume",), "Nothing to resume"),
        (("--algorithm.kl_target", 0.1), "set algorithm.kl_beta too"),
    ],
)
def test_mistakes_of_the_user(tmp_path, recipe, override, says):
    run = tmp_path / "run"
    done = rolecall("train", recipe, "--run.dir", run, *override)
    assert done.returncode == 2, done.stderr
    assert says in done.stderr.replace("\n", " ")
    assert "Traceback" not in done.stderr
    assert not run.exists()


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("return [1.0]", "8"),
        ("return [float('nan')] * len(responses)", "nan"),
        ("return 1 / 0", "division by zero"),
    ],
)
def test_a_broken_reward_is_the_users_to_mend(tmp_path, recipe, body, says):
    (tmp_path / "broken.py").write_text(f"def score(prompts, responses, rows):\n    {body}\n")
    options = ("--reward.function", f"{tmp_path}/broken.py:score", "--data.holdout", 0, "--run.dir", tmp_path / "run")
    done = rolecall("train", recipe, *options)
    assert done.returncode == 2, done.stderr
    assert says in done.stderr and "broken.py" in done.stderr
    assert "RayTaskError" not in done.stderr


def test_a_finished_run_is_not_overwritten(tmp_path, recipe):
    run = tmp_path / "run"
    assert rolecall("train", recipe, "--run.dir", run).returncode == 0
    again = rolecall("train", recipe, "--run.dir", run)
    assert again.returncode == 2
    assert "--resume" in again.stderr

    report = rolecall("report", run)
    assert report.returncode == 0 and "report.html" in report.stdout
    evaluated = rolecall("eval", recipe, "--model", run / "model")
    assert evaluated.returncode == 0, evaluated.stderr
    assert "accuracy" in evaluated.stdout


def test_a_folder_takes_one_run_at_a_time(tmp_path, recipe):
    command = [sys.executable, "-m", "rolecall", "train", str(recipe), "--run.dir", str(tmp_path / "run")]
    first = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    time.sleep(3)
    second = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert sorted([first.wait(240), second.returncode]) == [0, 2]


def test_a_run_needs_a_folder(tmp_path, recipe):
    (tmp_path / "file").touch()
    done = rolecall("train", recipe, "--run.dir", tmp_path / "file")
    assert done.returncode == 2
    assert "is no folder that can be written to" in done.stderr


def test_help_lists_every_command():
    done = rolecall("--help")
    assert done.returncode == 0
    for name in ("train", "demo", "eval", "report", "bench", "doctor"):
        assert name in done.stdout


def test_importing_the_package_is_light():
    code = "import sys, rolecall.config, rolecall.cli; assert not {'torch', 'ray', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
