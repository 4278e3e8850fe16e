"""The command line says what was wrong in one message, exits with 2, and leaves nothing behind."""

import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from rolecall.cli import main

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


ROOT = Path(__file__).parents[1]
COMMAND = [sys.executable, "-m", "rolecall"]


class Done(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def rolecall(monkeypatch, capfd):
    """Calls the command in this process, which has imported what it needs."""

    def call(*arguments: object) -> Done:
        monkeypatch.setattr(sys, "argv", ["rolecall", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        return Done(ended.value.code, *capfd.readouterr())

    return call


@pytest.fixture
def recipe(tmp_path, tiny_path):
    (tmp_path / "recipe.toml").write_text(RECIPE.format(model=tiny_path))
    return tmp_path / "recipe.toml"


@pytest.mark.parametrize(
    ("override", "says"),
    [
        (("--rollout.temperatur", 1), "Did you mean 'rollout.temperature'?"),
        (("--rolout.temperature", 1), "Did you mean 'rollout'?"),
        (("--resum", "yes"), "A run goes on with: rolecall train FOLDER/config.toml --resume."),
        (("--rollout.temperature", "hot"), "rollout.temperature = 'hot'"),
        (("--rollout.group_size", 2), "group_size is 2: grpo needs groups of at least 4"),
        (("--rollout.top_p", 0.9), "rollout.top_p = 0.9"),
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
def test_mistakes_of_the_user(tmp_path, recipe, rolecall, monkeypatch, override, says):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    run = tmp_path / "run"
    done = rolecall("train", recipe, "--run.dir", run, *override)
    assert done.code == 2, done.err
    assert says in done.err.replace("\n", " ")
    assert "Traceback" not in done.err
    assert not run.exists()


def test_a_mistake_ends_the_process_with_2_and_one_message(recipe):
    command = [*COMMAND, "train", recipe, "--rollout.temperatur", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 2
    hint = "Did you mean 'rollout.temperature'?"
    assert done.stderr == f"rolecall: Unknown configuration key 'rollout.temperatur'. {hint}\n"


def broken(body: str, folder: Path) -> list[str]:
    """Options for a reward function of this body."""
    (folder / "broken.py").write_text(f"def score(prompts, responses, rows):\n    {body}\n")
    return ["--reward.function", f"{folder}/broken.py:score"]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("return [1.0]", "returned 1 values for 8 samples"),
        ("return [float('nan')] * len(responses)", "nan"),
        ("return 1 / 0", "division by zero"),
    ],
)
def test_a_broken_reward_is_the_users_to_mend(tmp_path, recipe, rolecall, body, says):
    done = rolecall("eval", recipe, "--data.holdout", 2, *broken(body, tmp_path))
    assert done.code == 2, done.err
    assert says in done.err and "broken.py" in done.err
    assert "Traceback" not in done.err


def test_what_a_role_raises_in_its_process_is_said_alone(tmp_path, recipe, rolecall, local_ray):
    done = rolecall("train", recipe, "--run.dir", tmp_path / "run", *broken("return 1 / 0", tmp_path))
    assert done.code == 2, done.err
    assert "division by zero" in done.err and "broken.py" in done.err
    assert "RayTaskError" not in done.err and "Traceback" not in done.err


def test_what_a_role_refuses_when_it_is_built_is_said_alone(tmp_path, recipe, rolecall, local_ray):
    done = rolecall("train", recipe, "--run.dir", tmp_path / "run", "--rollout.engine", "nativ")
    assert done.code == 2, done.err
    assert "Did you mean 'native'?" in done.err
    assert "RayTaskError" not in done.err and "Traceback" not in done.err
    assert not (tmp_path / "run").exists()


def test_a_folder_takes_one_run_and_keeps_it(tmp_path, recipe, rolecall, local_ray):
    run = tmp_path / "run"
    assert rolecall("train", recipe, "--run.dir", run).code == 0
    again = rolecall("train", recipe, "--run.dir", run)
    assert again.code == 2 and "--resume" in again.err

    report = rolecall("report", run)
    assert report.code == 0 and "report.html" in report.out
    evaluated = rolecall("eval", recipe, "--model", run / "model")
    assert evaluated.code == 0, evaluated.err
    assert "accuracy" in evaluated.out


def test_a_run_needs_a_folder(tmp_path, recipe, rolecall):
    (tmp_path / "file").touch()
    done = rolecall("train", recipe, "--run.dir", tmp_path / "file")
    assert done.code == 2
    assert "is no folder that can be written to" in done.err


def test_ctrl_c_says_how_to_go_on(tmp_path, recipe, rolecall, monkeypatch):
    def interrupted(config: object, resume: bool) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("rolecall.train", interrupted)
    run = tmp_path / "run"
    code, _, err = rolecall("train", recipe, "--run.dir", run, "--run.save_every", 7)
    assert code == 130 and "Stopped before its first checkpoint (run.save_every = 7)" in err
    (run / "checkpoints" / "step-000007").mkdir(parents=True)
    code, _, err = rolecall("train", recipe, "--run.dir", run)
    assert code == 130 and f"from its newest checkpoint: rolecall train {run}/config.toml --resume." in err


def test_help_lists_every_command(rolecall):
    done = rolecall("--help")
    assert done.code == 0
    for name in ("train", "demo", "eval", "report", "bench", "doctor"):
        assert name in done.out


def test_help_for_a_benchmark_lists_its_own_options(rolecall, monkeypatch):
    monkeypatch.chdir(ROOT)
    done = rolecall("bench", "rollout", "--help")
    assert done.code == 0, done.err
    assert "--out" in done.out
    assert "rollout --size 0.5B,1.5B,3B,7B --n 64,512,1024 --lengths fixed,geometric --system native,vllm" in done.out
    assert '"geometric" of a mean of a quarter of that' in done.out
    assert "sync --size ... --engine ...\n" in rolecall("bench", "sync", "--help").out
    for general in (("bench",), ("bench", "--help")):
        done = rolecall(*general)
        assert done.code == 0 and "--out" in done.out and "--size 0.5B,7B" in done.out
        assert "NAME is one of: decode, decoupling, demo, " in done.out


def test_importing_the_package_is_light():
    code = "import sys, rolecall.config, rolecall.cli; assert not {'torch', 'ray', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
