"""Logs, trackers, the stage clock, versions and the live display."""

import importlib.util
import io
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console as RichConsole

from rolecall.config import Config
from rolecall.errors import UserError
from rolecall.telemetry import logs, trackers, versions
from rolecall.telemetry.console import BLOCKS, Console, sparkline, stage_bar

STEP = {
    "reward/mean": 0.5,
    "tokens_per_second": 1234.4,
    "time/generate": 5.0,
    "time/score": 0.0,
    "time/reference": 1.0,
    "time/advantages": 0.0,
    "time/update": 3.0,
    "time/sync": 0.5,
    "time/step": 10.0,
}


def answer(step: int, prompt: str, reward: float, index: int = 0) -> dict[str, object]:
    return {
        "step": step,
        "prompt_id": prompt,
        "index": index,
        "prompt": f"{prompt}?",
        "response": f"{prompt}@{step}.{index}",
        "reward": reward,
    }


def test_each_step_is_one_line_that_is_there_at_once(tmp_path):
    log = logs.MetricsLog(tmp_path / "new" / "run", Config())
    log.step(1, {"reward/mean": 0.5, "kl": math.nan, "policy/loss": -math.inf})
    log.samples(1, [{"response": "ein „Ü“\u2028", "reward": 1.0}, {"response": "", "reward": 0.0}])
    # Read before the log is closed: nothing waits in a buffer. Not-a-number is no JSON, so it is null.
    lines = (tmp_path / "new" / "run" / "metrics.jsonl").read_text()
    assert json.loads(lines) == {"step": 1, "reward/mean": 0.5, "kl": None, "policy/loss": None}
    assert "NaN" not in lines and "Infinity" not in lines
    assert logs.read(tmp_path / "new" / "run" / "samples.jsonl") == [
        {"step": 1, "response": "ein „Ü“\u2028", "reward": 1.0},
        {"step": 1, "response": "", "reward": 0.0},
    ]


def test_a_kill_in_the_middle_of_a_line_loses_that_line_only(tmp_path):
    path = tmp_path / "metrics.jsonl"
    records = [{"step": step, "response": "é {", "reward": step / 4} for step in (1, 2, 3)]
    logs.append(path, records)
    whole = path.read_bytes()
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        # A record counts from its closing brace on, with or without the line break.
        assert logs.read(path) == records[: (whole[:cut] + b"\n").count(b"}\n")]


def test_a_broken_line_in_the_middle_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": \n{"step": 3}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl, line 2 is not JSON"):
        logs.read(path)


def test_truncate_drops_later_steps_and_torn_lines_from_all_logs(tmp_path):
    for name in ("metrics.jsonl", "samples.jsonl", "eval.jsonl"):
        logs.append(tmp_path / name, [{"step": step, "file": name} for step in (0, 1, 1, 2, 3)])
        with open(tmp_path / name, "a") as file:
            file.write('{"step": 4, "fi')
    logs.truncate(tmp_path, 1)
    for name in ("metrics.jsonl", "samples.jsonl", "eval.jsonl"):
        logs.append(tmp_path / name, [{"step": 2, "file": "again"}])
        assert [line["step"] for line in logs.read(tmp_path / name)] == [0, 1, 1, 2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["eval.jsonl", "metrics.jsonl", "samples.jsonl"]
    logs.truncate(tmp_path, -1)
    assert logs.read(tmp_path / "eval.jsonl") == []
    logs.truncate(tmp_path / "nothing-there", 3)


def test_heldout_answers_are_matched_by_prompt(tmp_path):
    logs.append(
        tmp_path / "eval.jsonl",
        [
            *(answer(0, "a", 0), answer(0, "a", 1, index=1), answer(0, "b", 0), answer(0, "c", 0), answer(5, "b", 1)),
            *(answer(10, "b", 0.5), answer(10, "a", 1), answer(10, "a", 0, index=1)),
        ],
    )
    assert logs.heldout_accuracy(tmp_path) == {0: 0.25, 5: 1.0, 10: 0.5}
    pairs = [(before["response"], after["response"]) for before, after in logs.before_after(tmp_path)]
    assert pairs == [("a@0.0", "a@10.0"), ("b@0.0", "b@10.0")]  # the first of several; c has no answer yet


def test_one_evaluation_has_no_before_and_after(tmp_path):
    assert logs.before_after(tmp_path) == []
    logs.append(tmp_path / "eval.jsonl", [answer(0, "a", 0)])
    assert logs.before_after(tmp_path) == []
    assert logs.heldout_accuracy(tmp_path) == {0: 0.0}


def test_stages_add_up_and_skipped_ones_are_zero(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    clock = logs.StageClock()
    for stage, seconds in (("generate", 3.0), ("update", 2.0), ("generate", 0.5)):
        with clock(stage):
            now[0] += seconds
        now[0] += 0.25
    with pytest.raises(ZeroDivisionError), clock("sync"):
        now[0] += 1.0
        raise ZeroDivisionError
    assert clock.metrics() == {
        "time/generate": 3.5,
        "time/score": 0.0,
        "time/reference": 0.0,
        "time/advantages": 0.0,
        "time/update": 2.0,
        "time/sync": 1.0,
        "time/step": 7.25,
    }
    with pytest.raises(KeyError), clock("generation"):
        pass


def test_tensorboard_gets_the_finite_metrics(tmp_path):
    config = Config(run={"trackers": ["tensorboard"]})
    for steps in ((1, 2, 3), (3, 4)):  # the second time resumed: what was step 3 is forgotten
        log = logs.MetricsLog(tmp_path, config)
        for step in steps:
            log.step(step, {"reward/mean": step / 4 + len(steps), "kl": math.nan})
        log.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["reward/mean"]
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [
        (1, 3.25),
        (2, 3.5),
        (3, 2.75),
        (4, 3.0),
    ]


@pytest.mark.parametrize("name", ["wandb", "trackio", "mlflow"])
def test_the_other_trackers_take_a_run(name, tmp_path, monkeypatch):
    pytest.importorskip(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.chdir(tmp_path)
    tracker = trackers.TRACKERS[name](tmp_path, Config())
    tracker.log(1, {"reward/mean": 0.25, "time/step": 2.0})
    tracker.log(2, {"reward/mean": 0.5})
    tracker.close()


@pytest.mark.parametrize("name", sorted(trackers.TRACKERS))
def test_a_missing_tracker_is_named_with_its_extra(name, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: None)
    with pytest.raises(UserError, match=rf"{name} is not installed.*pip install 'rolecall\[{name}\]'"):
        trackers.check_installed([name])


def test_every_configurable_tracker_exists():
    assert Config(run={"trackers": list(trackers.TRACKERS)}).run.trackers == list(trackers.TRACKERS)


def test_telemetry_imports_no_torch():
    code = "import sys; from rolecall.telemetry import console, logs, versions; versions.collect(); "
    subprocess.run([sys.executable, "-c", code + "sys.exit('torch' in sys.modules)"], check=True)


def test_versions_name_what_ran():
    found = versions.collect()
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert found["rolecall"] and found["torch"][0].isdigit() and "cores" in found["cpu"]
    assert all(isinstance(value, str) and value for value in found.values())
    assert versions.installed("no-such-package-here") is None


def test_the_commit_is_that_of_the_code(tmp_path, monkeypatch):
    """A copy of it in a checkout: what a benchmark adds to its results is no change of the code."""
    code, results = tmp_path / "src/rolecall/telemetry/versions.py", tmp_path / "benchmarks/results/step.json"
    for path, text in (
        (code, Path(versions.__file__).read_text()),
        (results, "{}"),
        (tmp_path / "benchmarks/a.py", ""),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def commit() -> str:
        ask = "import runpy, sys; print(runpy.run_path(sys.argv[1])['collect']()['commit'])"
        return subprocess.run([sys.executable, "-c", ask, code], capture_output=True, text=True, check=True).stdout[:-1]

    def git(*command: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        return subprocess.run(
            ["git", "-C", tmp_path, *who, *command], capture_output=True, text=True, check=True
        ).stdout

    assert commit() == "none"  # no checkout
    git("init")
    assert commit() == "none"  # somebody else's
    git("add", "src")
    assert commit() == "none"  # nothing committed yet
    git("add", ".")
    git("commit", "-m", "all")
    git("tag", "v1")
    head = git("rev-parse", "HEAD")[:-1]
    assert len(head) == 40 and commit() == head
    results.write_text("{1}")
    assert commit() == head
    (tmp_path / "benchmarks/a.py").write_text("1")
    assert commit() == f"{head}-dirty"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert commit() == "none"  # no git


def test_a_driver_that_fails_has_no_gpu(tmp_path, monkeypatch):
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho NVIDIA-SMI has failed\nexit 9\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert versions.collect()["gpu"] == "none"


def shown(width: int, terminal: bool) -> tuple[Console, RichConsole]:
    output = RichConsole(width=width, force_terminal=terminal, record=True, highlight=False, file=io.StringIO())
    return Console(Config(run={"steps": 4, "dir": "runs/x"}, algorithm={"kl_beta": 0.1}), output), output


def test_without_a_terminal_each_step_is_one_plain_line():
    console, output = shown(80, terminal=False)
    with console:
        console.status("starting [the] roles")
        console.evaluated(0.125)
        console.step(1, STEP | {"kl": 0.01234})
        console.step(2, STEP | {"kl": None, "heldout/accuracy": 0.75, "time/step": 70.0})
    stages = "(generate {}%, score 0%, reference {}%, advantages 0%, update {}%, sync {}%)"
    assert output.export_text().splitlines() == [
        "starting [the] roles",
        "held-out accuracy 0.125",
        "step 1/4  reward 0.500  held-out 0.125  KL 0.0123  tokens/s 1,234  "
        f"10.0 s {stages.format(50, 10, 30, 5)}  0:00:30 left",
        # 10 s and 70 s make 40 s a step, two of them left.
        "step 2/4  reward 0.500  held-out 0.125 → 0.750  KL –  tokens/s 1,234  "
        f"70.0 s {stages.format(7, 1, 4, 1)}  0:01:20 left",
    ]


@pytest.mark.parametrize("width", [80, 120])
def test_the_live_display_fits_and_shows_the_figures(width):
    console, output = shown(width, terminal=True)
    console.evaluated(0.125)
    console.step(1, STEP | {"kl": 0.5, "reward/mean": 0.0})
    console.step(2, STEP | {"kl": 0.5, "heldout/accuracy": 0.75})
    console.status("saving [a] checkpoint")
    output.print(console._render())
    lines = output.export_text().splitlines()
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    for part in ("GRPO, smollm2-135m-instruct", "runs/x", "step 2 of 4", "0:00:20 left", "reward 0.500 ▁█"):
        assert part in text
    for part in ("held-out 0.125 → 0.750", "KL 0.5000", "tokens/s 1,234", "saving [a] checkpoint"):
        assert part in text
    for part in ("generate 50%", "score 0%", "reference 10%", "advantages 0%", "update 30%", "sync 5%"):
        assert part in text


def test_the_stage_bar_is_as_wide_as_the_step_is_long():
    output = RichConsole(width=40, record=True, file=io.StringIO())
    output.print(stage_bar(STEP, 40))
    # 5 + 1 + 3 + 0.5 of 10 seconds are 38 of 40 columns; the rest passed between the stages.
    assert output.export_text().splitlines()[0] == "█" * 38 + "░" * 2


def test_a_live_run_goes_through_and_ends_with_the_answers(tmp_path):
    logs.append(
        tmp_path / "eval.jsonl",
        [answer(0, "[bold]a", 0), answer(0, "b", 1), answer(4, "[bold]a", 1), answer(4, "b", 1)],
    )
    console, output = shown(120, terminal=True)
    with console:
        console.status("reading the data")
        console.note("2 prompts [left] out of runs/:fire:/x")
        for step in range(1, 5):
            console.step(step, STEP)
        console.summary(tmp_path)
    text = output.export_text()
    assert "2 prompts [left] out of runs/:fire:/x" in text
    assert [line.split() for line in text.splitlines() if "[bold]a?" in line] == [
        ["[bold]a?", "[bold]a@0.0", "0.00", "[bold]a@4.0", "1.00"]
    ]
    assert "0.500 before, 1.000 after" in text
    assert str(tmp_path / "report.html") in text.replace("\n", "") and str(tmp_path / "model") in text.replace("\n", "")


def test_a_summary_without_evaluation_says_where_things_are(tmp_path):
    console, output = shown(200, terminal=False)
    console.summary(Path("runs/x"))
    assert [line.split() for line in output.export_text().splitlines()] == [
        ["Report", "runs/x/report.html"],
        ["Model", "runs/x/model"],
    ]


@given(st.lists(st.floats(-1e6, 1e6), max_size=200), st.integers(1, 20))
def test_a_sparkline_fits_and_spans_its_blocks(values, width):
    line = sparkline(values, width)
    assert len(line) <= width and set(line) <= set(BLOCKS)
    assert (line == "") == (values == [])


def test_a_sparkline_by_hand():
    assert sparkline([0.0, 1.0, 3.5, 7.0], 10) == "▁▂▅█"
    assert sparkline([0.0, 2.0, 4.0, 8.0], 2) == "▁█"  # means of neighbours: 1 and 6
    assert sparkline([3.0, 3.0], 5) == "▁▁"
