"""Where metrics go besides metrics.jsonl. Each tracker's package is an extra, imported when it is chosen."""

import importlib.util
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from rolecall.config import Config
from rolecall.errors import UserError

PROJECT = "rolecall"


class Tracker(Protocol):
    """Receives one step's metrics at a time. A resumed run is a new run to it, under the same name."""

    def log(self, step: int, metrics: dict[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files in ``run_dir/tensorboard``; written without torch."""

    def __init__(self, run_dir: Path, config: Config):
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(run_dir / "tensorboard"))
        self._started = False

    def log(self, step: int, metrics: dict[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary

        if not self._started:  # tells TensorBoard to forget what an interrupted run wrote from this step on
            start = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(wall_time=time.time(), step=step, session_log=start))
            self._started = True
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Wandb:
    def __init__(self, run_dir: Path, config: Config):
        import wandb

        self._run: Any = wandb.init(project=PROJECT, name=run_dir.name, dir=str(run_dir), config=config.model_dump())

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log(metrics, step=step)

    def close(self) -> None:
        self._run.finish()


class Trackio(Wandb):
    """Its runs answer to wandb's calls."""

    def __init__(self, run_dir: Path, config: Config):
        import trackio

        self._run: Any = trackio.init(project=PROJECT, name=run_dir.name, config=config.model_dump())


class MLflow:
    def __init__(self, run_dir: Path, config: Config):
        import mlflow

        self._mlflow = mlflow
        mlflow.set_experiment(PROJECT)
        mlflow.start_run(run_name=run_dir.name)
        sections = config.model_dump().items()
        mlflow.log_params({f"{name}.{key}": value for name, section in sections for key, value in section.items()})

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._mlflow.log_metrics(metrics, step=step)

    def close(self) -> None:
        self._mlflow.end_run()


TRACKERS: dict[str, Callable[[Path, Config], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "trackio": Trackio,
    "mlflow": MLflow,
}


def check_installed(names: Sequence[str]) -> None:
    """Refuse a tracker whose package is missing.

    Raises:
        UserError: with the command that installs it.
    """
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise UserError(
                f"run.trackers: {name} is not installed. Run `pip install 'rolecall[{name}]'`, "
                "or leave it out (metrics.jsonl is always written)."
            )
