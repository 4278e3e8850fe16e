"""What a run was made with. Asks the installed packages' metadata and the system; imports none of them."""

import importlib.metadata
import os
import platform
import shutil
import subprocess
from pathlib import Path

PACKAGES = ("rolecall", "torch", "transformers", "ray", "numpy", "safetensors")


def collect() -> dict[str, str]:
    """Versions of the packages, Python, the platform, processors, and the source's commit if it has one."""
    return {
        **{name: installed(name) or "not installed" for name in PACKAGES},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": f"{_cpu_name()}, {os.cpu_count()} cores",
        "gpu": _output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").replace("\n", ", ") or "none",
        "commit": _commit() or "none",
    }


def installed(package: str) -> str | None:
    """The version of an installed distribution, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str:
    """Of Rolecall's own checkout, with -dirty where its code was changed since (not where results were added to it).

    Empty when it was installed into somebody else's.
    """
    git = ("git", "-C", str(Path(__file__).parent))
    if not _output(*git, "ls-files", Path(__file__).name):
        return ""
    changed = _output(*git, "diff", "--name-only", "HEAD", "--", ":/src", ":/*.py")
    return _output(*git, "rev-parse", "HEAD") + ("-dirty" if changed else "")


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    names = [line for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    return names[0].partition(":")[2].strip() if names else platform.processor() or platform.machine()


def _output(*command: str) -> str:
    """What a command prints; empty when it is not there or fails."""
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return "" if done.returncode else done.stdout.strip()
