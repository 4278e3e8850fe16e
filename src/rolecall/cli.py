"""The command line. Exit codes: 0 done, 1 the run failed (resumable), 2 something for the user to mend."""

import inspect
import sys
from collections.abc import Callable
from importlib import resources
from itertools import chain, count, zip_longest
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

import rolecall
from rolecall.config import Config
from rolecall.errors import RunError, UserError, check_known
from rolecall.overrides import parse_overrides

app = typer.Typer(
    help="Distributed RL post-training: PPO and GRPO for language models, from one laptop to a cluster.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode="rich",
)

OVERRIDES = {"allow_extra_args": True, "ignore_unknown_options": True}
Recipe = Annotated[str, typer.Argument(help="Configuration file, such as recipes/grpo-arithmetic.toml")]


@app.command(context_settings=OVERRIDES)
def train(
    context: typer.Context,
    file: Recipe,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run from its newest checkpoint")] = False,
) -> None:
    """Train as FILE says; any field is overridden by [bold]--section.key value[/bold] (docs/configuration.md)."""
    _train(Config.load(file, context.args), resume)  # before what takes seconds to import: a mistake shows at once


@app.command(context_settings=OVERRIDES)
def demo(context: typer.Context) -> None:
    """Teach a 135M chat model one-digit addition by GRPO, in minutes, on whatever is here. Takes overrides, too."""
    with resources.as_file(resources.files("rolecall") / "demo.toml") as file:
        config = Config.load(file, context.args)
    if "run.dir" not in parse_overrides(context.args):
        config.run.dir = str(_unused(Path("runs/demo")))
    _train(config)


@app.command("eval", context_settings=OVERRIDES)
def evaluate(
    context: typer.Context,
    file: Recipe,
    model: Annotated[str, typer.Option(help="Folder or hub id to evaluate instead of the file's model")] = "",
) -> None:
    """Score a model on the held-out prompts of FILE."""
    config = Config.load(file, context.args)
    if model:
        config.model.path = model
    from rolecall.loop.evaluation import accuracy, evaluate_model

    lines = evaluate_model(config)
    print(f"held-out accuracy {accuracy(lines):.3f} ({len(lines)} responses)")
    for line in lines[:: config.run.eval_samples][:8]:
        print(f"{line['reward']:.2f}  {line['prompt']!r:.60} -> {line['response']!r:.40}")


@app.command()
def report(run: Annotated[Path, typer.Argument(help="Folder of a run, such as runs/demo")]) -> None:
    """Write RUN/report.html: curves, stage times, samples, configuration, in one file that opens anywhere."""
    from rolecall.telemetry.report import write

    print(write(run))


@app.command(context_settings=OVERRIDES, add_help_option=False)
def bench(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Which one")] = "",
    out: Annotated[Path, typer.Option(help="Folder for NAME.md and results/NAME.json")] = Path("benchmarks"),
    asked: Annotated[bool, typer.Option("--help", help="Show this, and what is NAME's own, and exit")] = False,
) -> None:
    """Run one benchmark side by side with what it is compared to, and write its table. (In a clone of the project.)

    Some take lists of what to measure, such as [bold]--size 0.5B,7B --n 64[/bold], and add to the table that is there.
    """
    known = sorted(file.stem.replace("_", "-") for file in Path("benchmarks").glob("[!_]*.py"))
    if asked or not name:
        print(context.get_help())
        print(f"NAME is one of: {', '.join(known) or 'none, as there is no clone of the project in this folder'}\n")
    if not name:
        return
    from rolecall.data.functions import load_function

    if not known:
        raise UserError("Benchmarks run in a clone of the project: there is no benchmarks/ with any in this folder.")
    check_known("benchmark", name, known)
    run = load_function(f"benchmarks.{name.replace('-', '_')}:run", "NAME")
    if asked:
        defaults = "".join(f" --{option.replace('_', '-')} {_written(own)}" for option, own in _own(run).items())
        print(f"{name}{defaults}\n\n{inspect.getdoc(run)}")
        return
    run(out, **_given(context.args, run))
    Console().print(f"Written: the table in {out}, its figures in {out / 'results'}.", highlight=False, soft_wrap=True)


@app.command(context_settings=OVERRIDES)
def doctor(
    context: typer.Context,
    file: Annotated[
        str, typer.Argument(help="Configuration of a run: would it fit? Fields can be overridden as for train")
    ] = "",
) -> None:
    """Say what is installed, which engines and devices are usable, and what to install for the rest.

    With a configuration file, also whether the run's model suits Rolecall and what memory it needs of a GPU.
    """
    config = Config.load(file, context.args) if file else None
    from rolecall.doctor import main

    raise typer.Exit(main(config))


def main() -> None:
    """Entry point: turns the errors that users are meant to read into one message and an exit code."""
    try:
        app()
    except (UserError, RunError) as error:
        _complain(str(error))
        sys.exit(2 if isinstance(error, UserError) else 1)


def _train(config: Config, resume: bool = False) -> None:
    try:
        rolecall.train(config, resume=resume)
    except KeyboardInterrupt:
        from rolecall.loop.run import folder_of
        from rolecall.training import checkpoint

        run = folder_of(config)
        if checkpoint.latest(run):
            _complain(f"Stopped. It continues from its newest checkpoint: rolecall train {run}/config.toml --resume.")
        else:
            every = config.run.save_every
            _complain(f"Stopped before its first checkpoint (run.save_every = {every}): with --resume it begins anew.")
        raise


def _own(run: Callable[..., Any]) -> dict[str, Any]:
    """A benchmark's own options and their defaults: a tuple where it takes a list."""
    parameters = inspect.signature(run).parameters
    return {name: each.default for name, each in parameters.items() if each.default is not inspect.Parameter.empty}


def _given(arguments: list[str], run: Callable[..., Any]) -> dict[str, Any]:
    """``["--n", "64,512"]`` or ``["--n=64,512"]`` -> ``{"n": [64, 512]}``, of the type of ``run``'s default for it."""
    defaults, given = _own(run), {}
    words = [word for argument in arguments for word in argument.split("=", 1 if argument.startswith("--") else 0)]
    for option, text in zip_longest(words[::2], words[1::2]):
        name = option.removeprefix("--").replace("-", "_")
        check_known("option", name, defaults)
        default = defaults[name]
        if not text or text.startswith("--"):
            raise UserError(f"{option} has no value: write it as {option} {_written(default)}.")
        try:
            if isinstance(default, tuple):
                kind = type(next(iter(default), ""))
                given[name] = [kind(item) for item in text.split(",")]
            else:
                given[name] = type(default)(text)
        except ValueError:
            raise UserError(f"{option} {text}: write it as {_written(default)}.") from None
    return given


def _written(default: Any) -> str:
    return (",".join(map(str, default)) or "...") if isinstance(default, tuple) else str(default)


def _complain(message: str) -> None:
    Console(stderr=True).print(f"[bold red]rolecall:[/bold red] {escape(message)}", highlight=False, soft_wrap=True)


def _unused(folder: Path) -> Path:
    """``folder``, or with the first free number behind it."""
    numbered = (folder.with_name(f"{folder.name}-{number}") for number in count(2))
    return next(candidate for candidate in chain([folder], numbered) if not candidate.exists())
