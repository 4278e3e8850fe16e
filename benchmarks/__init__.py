"""Benchmarks beside what they are compared to. ``rolecall bench NAME`` calls ``run(out)`` of the file NAME.py here."""

import json
from datetime import date
from pathlib import Path
from typing import Any

from rolecall.files import atomic_write
from rolecall.telemetry.versions import collect, installed

COMPARED = ("vllm", "trl")


def write(name: str, result: dict[str, Any], table: str, out: Path, command: str | None = None) -> None:
    """Write ``out/results/NAME.json`` (the figures and where they come from) and ``out/NAME.md`` (the table).

    Args:
        table: Markdown.
        command: what was run, if not ``rolecall bench NAME``.
    """
    origin: dict[str, Any] = {
        "machine": collect() | {name: found for name in COMPARED if (found := installed(name))},
        "command": command or f"rolecall bench {name}",
        "date": date.today().isoformat(),
    }
    (out / "results").mkdir(parents=True, exist_ok=True)
    atomic_write(out / "results" / f"{name}.json", json.dumps({**result, **origin}, indent=2) + "\n")
    lines = [f"# {name}", "", table, "", f"`{origin['command']}`, {origin['date']}", ""]
    lines += ["| where | |", "|---|---|", *(f"| {key} | {value} |" for key, value in origin["machine"].items())]
    atomic_write(out / f"{name}.md", "\n".join(lines) + "\n")
