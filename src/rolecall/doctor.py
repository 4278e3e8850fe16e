"""``rolecall doctor``: what is installed, which engines and devices are usable, and what to install for the rest."""

import importlib.metadata
import os
import platform
import shutil
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from rolecall.config import Config
from rolecall.telemetry.versions import installed

Status = Literal["ok", "missing", "optional"]

NOT_LISTED = {"dev", "compare", "vllm", "sglang"}  # extras that tests need, or that have a line of their own
COLORS = {"ok": "green", "missing": "bold red", "optional": "dim"}


@dataclass(frozen=True)
class Check:
    """One thing that was looked at. ``missing``: nothing runs without it; ``optional``: not there, not needed.

    ``fix`` is what to do about it, as a command where there is one.
    """

    section: str
    name: str
    status: Status
    detail: str
    fix: str = ""


def doctor(config: Config | None = None) -> list[Check]:
    """Look at everything; with ``config`` also whether that run would fit (see ``preflight.checks``).

    Takes as long as importing torch and transformers.

    Raises:
        UserError: the model cannot be had, or ``train`` would refuse the configuration.
    """
    base, extras = _requirements()
    checks = [Check("Packages", "python", "ok", platform.python_version())]
    checks += [_package("Packages", requirement) for requirement in base]
    if all(check.status == "ok" for check in checks):
        checks += _devices()
    checks += [
        Check("Engines", "native", "ok", "on the Actor's own weights; CPU and GPU"),
        Check("Engines", "transformers", "ok", "for models that the native engine does not take"),
        _separate("vllm", "with a GPU pip install 'rolecall[vllm]', without one see docs/engines.md"),
        _separate("sglang", "with a GPU, and without vllm beside it: pip install 'rolecall[sglang]'"),
    ]
    if not any(check.status == "missing" for check in checks):
        checks.append(Check("Engines", "weight sync", "ok", ", ".join(_ways())))
    checks += [_package("Extras", requirement, extra) for extra in extras for requirement in extras[extra]]
    if config and not any(check.status == "missing" for check in checks):
        from rolecall import preflight

        checks += preflight.checks(config)
    return checks


def main(config: Config | None = None) -> int:
    """Print the checks; 0 if Rolecall can run (and the run of ``config`` on one of the GPUs), else 1."""
    checks = doctor(config)
    console = Console(highlight=False)
    for section, members in groupby(checks, key=lambda check: check.section):
        console.print(section, style="bold")
        table = Table.grid(Column(width=8), Column(width=14), Column(overflow="fold"), padding=(0, 1))
        for check in members:
            detail = Text(check.detail + (f": {check.fix}" if check.fix else ""))
            table.add_row(Text(check.status, COLORS[check.status]), check.name, detail)
        console.print(table, "")
    missing = [check for check in checks if check.status == "missing"]
    if missing:
        fixes = "\n".join(f"  {fix}" for fix in dict.fromkeys(check.fix for check in missing))
        console.print(f"This cannot run yet. Mend this first:\n{fixes}", markup=False)
    elif config is None:
        console.print("Rolecall can run here. Try: rolecall demo")
    return 1 if missing else 0


def _requirements() -> tuple[list[Requirement], dict[str, list[Requirement]]]:
    """What the package itself needs, and what each extra adds, from its own metadata."""
    everything = [Requirement(text) for text in importlib.metadata.requires("rolecall") or []]
    names = set(importlib.metadata.metadata("rolecall").get_all("Provides-Extra") or []) - NOT_LISTED
    base = [requirement for requirement in everything if _needed(requirement, "")]
    return base, {
        extra: [requirement for requirement in everything if requirement not in base and _needed(requirement, extra)]
        for extra in sorted(names)
    }


def _needed(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def _package(section: str, requirement: Requirement, extra: str = "") -> Check:
    """Is it there, in a version that will do? An extra's package is optional."""
    version = installed(requirement.name)
    if version and requirement.specifier.contains(version, prereleases=True):
        return Check(section, requirement.name, "ok", version)
    detail = f"{version} is not {requirement.specifier}" if version else "not installed"
    fix = f"pip install 'rolecall[{extra}]'" if extra else f"pip install '{requirement.name}{requirement.specifier}'"
    return Check(section, requirement.name, "optional" if extra else "missing", detail, fix)


def _separate(engine: str, how: str) -> Check:
    """Is it there, with the torch and transformers that its own metadata asks for? Importing it would take seconds."""
    name = next((name for name in (engine, f"{engine}-cpu") if installed(name)), None)
    if name is None:
        return Check("Engines", engine, "optional", "not installed", how)
    for requirement in map(Requirement, importlib.metadata.requires(name) or []):
        found = installed(requirement.name)
        if requirement.name not in ("torch", "transformers") or not _needed(requirement, ""):
            continue
        if found is None or not requirement.specifier.contains(found, prereleases=True):
            detail = f"{name} {installed(name)} cannot run with {requirement.name} {found}"
            fix = f"pip install '{requirement.name}{requirement.specifier}'"
            return Check("Engines", engine, "optional", detail, fix)
    return Check("Engines", engine, "ok", f"{name} {installed(name)}, in a process of its own")


def _devices() -> Iterator[Check]:
    try:
        import psutil
        import torch

        from rolecall.models.load import free_memory
    except (ImportError, OSError) as error:  # installed, but for another system, or half
        fix = "pip install --force-reinstall torch"
        yield Check("Packages", "torch", "missing", f"cannot be imported ({error})", fix)
        return
    memory = f"{_gib(free_memory(torch.device('cpu')))} of {_gib(psutil.virtual_memory().total)}"
    yield Check("Devices", "cpu", "ok", f"{os.cpu_count()} cores, {memory} memory free")
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        yield Check("Devices", f"gpu {index}", "ok", f"{name}, {_gib(free)} of {_gib(total)} free")
    if torch.cuda.is_available():
        yield _compiler()
    else:
        there = shutil.which("nvidia-smi") is not None
        detail = f"there is one, but torch {torch.__version__} cannot use it" if there else "none; the CPU does it all"
        yield Check("Devices", "gpu", "optional", detail, "install torch as https://pytorch.org says" if there else "")


def _compiler() -> Check:
    """Triton, which makes the kernels for a GPU, compiles a launcher for each: is there what it looks for?"""
    chosen = os.environ.get("CC")
    compilers = ["gcc", "clang"] if chosen is None else [chosen]
    found = next(filter(shutil.which, compilers), None)
    header = Path(sysconfig.get_path("include", "posix_prefix")) / "Python.h"
    if found and header.exists():
        return Check("Devices", "compiler", "ok", f"{found}, which Triton's kernels need")
    lacks = header if found else f"C compiler {' or '.join(map(repr, compilers))}"
    fix = "install gcc and Python's headers (on Debian and Ubuntu: apt install gcc python3-dev)"
    if chosen is not None and not found:
        fix = "unset CC, or set it to a C compiler's path"
    return Check("Devices", "compiler", "missing", f"Triton's kernels need it, and there is no {lacks}", fix)


def _ways() -> Iterator[str]:
    """How weights can reach an engine on this machine."""
    import torch

    from rolecall.sync import mapped
    from rolecall.sync.buckets import BUCKET_BYTES

    yield "within a process nothing moves"
    if torch.cuda.is_available():
        yield "CUDA IPC on a GPU"
    if torch.cuda.device_count() > 1:
        yield f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))} between GPUs"
    folder = mapped.folder(BUCKET_BYTES)
    yield f"shared memory ({folder}, {_gib(shutil.disk_usage(folder).free)} free)"
    if torch.distributed.is_gloo_available():
        yield "gloo between machines"


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
