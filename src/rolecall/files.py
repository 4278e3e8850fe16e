"""Files and folders that appear whole or not at all."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_folder(target: str | Path) -> Iterator[Path]:
    """A folder to write into that becomes ``target`` (replacing it) when the block ends without an error.

    Until then it is a hidden sibling. After a crash ``target`` is the old one, the new one or absent, never half.
    """
    target = Path(target)
    new, old = target.with_name(f".{target.name}.new"), target.with_name(f".{target.name}.old")
    remove(new, old)
    new.mkdir(parents=True)
    try:
        yield new
        for path in [*new.rglob("*"), new]:
            _fsync(path)
        if target.exists():
            target.rename(old)
        new.rename(target)
        _fsync(target.parent)
    finally:
        remove(new, old)


def atomic_write(path: Path, text: str) -> None:
    """Write a file; after a crash it is the old one, the new one or absent."""
    new = path.with_suffix(".new")
    new.write_text(text, encoding="utf-8")
    _fsync(new)
    new.replace(path)


def remove(*folders: Path) -> None:
    """Remove folders where they exist."""
    for folder in folders:
        if folder.exists():
            shutil.rmtree(folder)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
