"""A run from the configuration to the trained model: set up, loop, evaluate, save, resume."""

import hashlib
import json
import os
import shutil
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from rolecall import cluster, data, models
from rolecall.config import Config
from rolecall.data.functions import load_function
from rolecall.errors import UserError
from rolecall.files import atomic_write
from rolecall.loop import evaluation
from rolecall.loop.stages import Context, synchronise
from rolecall.loop.synchronous import take_step
from rolecall.overrides import toml_value
from rolecall.samples import Prompt
from rolecall.telemetry import logs, report, trackers, versions
from rolecall.telemetry.console import Console
from rolecall.training import checkpoint

SAMPLES_LOGGED = 16  # a step, in samples.jsonl


@dataclass
class Run:
    """A finished run: its folder, and what is in it."""

    dir: Path

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """One dictionary a step."""
        return logs.read(self.dir / logs.METRICS)

    @property
    def heldout(self) -> dict[int, float]:
        """Held-out accuracy by step (0: before training)."""
        return logs.heldout_accuracy(self.dir)

    @property
    def checkpoint(self) -> Path:
        """The newest checkpoint, which ``resume=True`` continues from."""
        found = checkpoint.latest(self.dir)
        assert found is not None  # a finished run has saved its last step
        return found

    @property
    def model(self) -> Path:
        """The trained model as a Hugging Face folder."""
        return self.dir / "model"

    @property
    def report(self) -> Path:
        return self.dir / "report.html"

    def save_pretrained(self, folder: str | Path) -> None:
        """Copy the trained model to ``folder``, which ``transformers`` loads."""
        shutil.copytree(self.model, folder, dirs_exist_ok=True)


@dataclass
class State:
    """What the loop itself must remember between steps; each role saves its own."""

    context: Context
    sampler: data.Sampler
    step: int = 0

    def save(self, run_dir: Path) -> None:
        """Write a checkpoint of the whole run, all or nothing."""
        with checkpoint.writing(run_dir, self.step) as folder:
            for name in self._trained:
                getattr(self.context.roles, name).save(str(folder / name))
            state = {
                "step": self.step,
                "sampler": self.sampler.state(),
                "algorithm": self.context.config.algorithm.name,
                "kl_beta": [self.context.config.algorithm.kl_beta, self.context.kl.beta],  # as configured, as adapted
            }
            (folder / "state.json").write_text(json.dumps(state, indent=2))
            shutil.copy(run_dir / "versions.json", folder)
        checkpoint.prune(run_dir, self.context.config.run.keep)

    def load(self, folder: Path) -> None:
        """Continue from a checkpoint: the loop's own state, then each trained role's."""
        state = json.loads((folder / "state.json").read_text())
        self.step = state["step"]
        self.sampler.restore(state["sampler"])
        config = self.context.config
        if self.step > config.run.steps:
            raise UserError(f"{folder} is {self.step} steps on, and run.steps = {config.run.steps}. Raise --run.steps.")
        if state["algorithm"] != config.algorithm.name:
            raise UserError(
                f"{folder} was trained by {state['algorithm']}: it cannot be resumed with algorithm.name = "
                f"{config.algorithm.name!r}. Start a new run from its model instead (--model.path RUN/model)."
            )
        if missing := [name for name in self._trained if not (folder / name).is_dir()]:
            raise UserError(
                f"{folder} holds no {', '.join(missing)}: it cannot be resumed with algorithm.baseline = "
                f"{config.algorithm.baseline!r}. Leave algorithm.baseline as it was, or start a new run."
            )
        configured, adapted = state["kl_beta"]
        if configured == config.algorithm.kl_beta:  # else the new one holds
            self.context.kl.beta = adapted
        for name in self._trained:
            getattr(self.context.roles, name).load(str(folder / name))

    @property
    def _trained(self) -> list[str]:
        return [name for name in ("actor", "critic") if name in self.context.config.roles]


def folder_of(config: Config) -> Path:
    """Where the run that is so configured writes."""
    return Path(config.run.dir or "runs/run")


def train(config: Config, *, resume: bool = False) -> Run:
    """Train as configured and return the finished run.

    Args:
        config: the whole run. ``config.run.dir`` must be new, unless ``resume``.
        resume: continue the run in ``config.run.dir`` from its newest checkpoint, to the same result as if it had
            never stopped; without a checkpoint, start it anew.

    Raises:
        UserError: what the user can mend, before anything is written.
        RunError: a role died, hung or failed a check; the checkpoints stay resumable.
    """
    run_dir = folder_of(config)
    config.check_trainable()
    start = _where_to_start(run_dir, resume)
    trackers.check_installed(config.run.trackers)
    load_function(config.reward.function, "reward.function")  # a mistake in it shows now, not when its process starts
    with _alone(run_dir), Console(config) as console:
        console.status("reading the data")
        tokenizer = models.load_tokenizer(config.model)
        train_prompts, heldout, note = data.load_prompts(config, tokenizer)
        console.note(note)
        console.status("starting the roles")
        with cluster.spawn(config) as roles:
            state = State(Context(config, roles), data.Sampler(train_prompts, config.run.seed))
            console.note(f"weight sync: {state.context.sync.way}")
            if start:
                state.load(start)
                console.note(f"resumed at step {state.step}, {_changes(run_dir, config)}")
            elif resume:
                console.note(f"{run_dir} has no checkpoint yet: the run starts anew")
            with _recording(run_dir, state, console) as log:
                _loop(run_dir, state, heldout, log, console)
            console.status("saving the model")
            roles.actor.save_pretrained(str(run_dir / "model"))
        report.write(run_dir)
        console.summary(run_dir)
    return Run(run_dir)


def _loop(run_dir: Path, state: State, heldout: list[Prompt], log: logs.MetricsLog, console: Console) -> None:
    """Steps until the last one, with evaluation before, between and after, and checkpoints as configured."""
    context, settings = state.context, state.context.config.run
    synchronise(context, state.step)  # the engine may hold others: its own, or those that a resumed run began with
    if state.step == 0 and heldout:
        console.status("evaluating before training")
        console.evaluated(evaluation.evaluate(context, heldout, run_dir, step=0))
    while state.step < settings.steps:
        groups, samples, metrics = take_step(context, state.sampler, state.step + 1)
        state.step += 1
        last = state.step == settings.steps
        if heldout and (last or (settings.eval_every and state.step % settings.eval_every == 0)):
            metrics["heldout/accuracy"] = evaluation.evaluate(context, heldout, run_dir, state.step)
        log.step(state.step, metrics)
        log.samples(state.step, logs.records(groups, samples[:SAMPLES_LOGGED]))
        console.step(state.step, metrics)
        if last or state.step % settings.save_every == 0:
            state.save(run_dir)


def _changes(run_dir: Path, config: Config) -> str:
    """How the configuration differs from the one in the run's folder, which an older version may have written."""
    file = run_dir / "config.toml"
    try:
        before = dict(_flattened(tomllib.loads(file.read_text(encoding="utf-8"))))
    except (OSError, ValueError) as error:  # not there, not UTF-8, not TOML: the checkpoint is what a resume needs
        return f"how it was configured before is not known, as {file} cannot be read: {error}"
    now = dict(_flattened(tomllib.loads(config.to_toml())))
    keys = [key for key in before | now if before.get(key) != now.get(key)]
    changed = ", ".join(f"{key} ({before.get(key, 'not set')} before, now {now.get(key, 'not set')})" for key in keys)
    return f"configured as before but for {changed}" if changed else "configured as before"


def _flattened(section: dict[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
    """``{"a": {"b": 1}, "c": "d"}`` -> ``("a.b", '1'), ("c", '"d"')``."""
    for key, value in section.items():
        if isinstance(value, dict):
            yield from _flattened(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", toml_value(value)


@contextmanager
def _recording(run_dir: Path, state: State, console: Console) -> Iterator[logs.MetricsLog]:
    """The run's folder with its configuration and open logs; lines of steps that will be done again are dropped."""
    config = state.context.config
    run_dir.mkdir(parents=True, exist_ok=True)
    atomic_write(run_dir / "config.toml", config.to_toml())
    made_with = versions.collect() | {"weight sync": state.context.sync.way}
    atomic_write(run_dir / "versions.json", json.dumps(made_with, indent=2))
    logs.truncate(run_dir, state.step or -1)
    log = logs.MetricsLog(run_dir, config)
    try:
        console.evaluated(*logs.heldout_accuracy(run_dir).values())
        for line in logs.read(run_dir / logs.METRICS)[-1:]:
            console.step(line["step"], line)  # where a resumed run stands
        yield log
    finally:
        log.close()


@contextmanager
def _alone(run_dir: Path) -> Iterator[None]:
    """Keep a second run out of the folder, also while nothing has been written there yet."""
    name = hashlib.sha256(str(run_dir.resolve()).encode()).hexdigest()[:16]
    lock = FileLock(Path(tempfile.gettempdir()) / f"rolecall-{name}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise UserError(f"Another run is working in {run_dir}. Wait, or write elsewhere: --run.dir NEW.") from None
    try:
        yield
    finally:
        lock.release()


def _where_to_start(run_dir: Path, resume: bool) -> Path | None:
    there = next(folder for folder in (run_dir.absolute(), *run_dir.absolute().parents) if folder.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise UserError(f"run.dir: {there} is no folder that can be written to. Write elsewhere with --run.dir NEW.")
    if not resume and (run_dir / logs.METRICS).exists():
        raise UserError(
            f"{run_dir} already holds a run. Continue it with --resume, or write elsewhere with --run.dir NEW."
        )
    if resume and not run_dir.is_dir():
        raise UserError(f"Nothing to resume: {run_dir.absolute()} does not exist. Start the run without --resume.")
    return checkpoint.latest(run_dir) if resume else None
