"""Rows of a data set, from wherever they are, each a dict."""

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rolecall.data.functions import describe, load_function
from rolecall.errors import UserError

Row = dict[str, Any]


def read_rows(path: str, split: str, key: str = "data.path") -> list[Row]:
    """Every row of ``path``: a .jsonl, .json, .csv or .parquet file, ``module:function`` or ``file.py:function``
    that yields rows, or a data set of the hub (``name`` or ``organisation/name:subset``) or in a folder.

    ``split`` is for hub data sets and folders only; ``key`` is the configuration key, for messages.

    Raises:
        UserError: it cannot be read (with file and line where there is one), a row is no dict, or there is no row.
    """
    readers = {".jsonl": _jsonl, ".json": _json, ".csv": _csv, ".parquet": _parquet}
    file = Path(path)
    source, colon, _ = path.rpartition(":")
    if file.suffix in readers:
        if not file.is_file():
            raise UserError(f"{key}: there is no file {path!r}.")
        rows = list(readers[file.suffix](file))
    elif colon and (source.endswith(".py") or "/" not in source):
        rows = _call(path, key)
    else:
        rows = _dataset(path, split, key)
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise UserError(f"{key}: row {number} of {path} is a {type(row).__name__}, not an object with fields.")
    if not rows:
        raise UserError(f"{key}: {path} has no rows.")
    return rows


def _jsonl(file: Path) -> Iterator[Row]:
    for number, line in enumerate(_text(file).split("\n"), 1):
        if line.strip():
            yield _parsed(line, file, number)


def _json(file: Path) -> list[Row]:
    rows = _parsed(_text(file), file, 1)
    if not isinstance(rows, list):
        raise UserError(f"{file} must hold a JSON list of rows, not a {type(rows).__name__}.")
    return rows


def _parsed(text: str, file: Path, first: int) -> Any:
    """JSON that begins in line ``first`` of the file."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        where = f"{file}, line {first + error.lineno - 1}"
        raise UserError(f"{where} is not valid JSON: {error.msg} at column {error.colno}.") from None


def _csv(file: Path) -> Iterator[Row]:
    reader = csv.DictReader(io.StringIO(_text(file)))
    for row in reader:
        if None in row or None in row.values():
            raise UserError(
                f"{file}, line {reader.line_num} has another number of columns than the first line, which names "
                f"{', '.join(reader.fieldnames or [])}."
            )
        yield row


def _parquet(file: Path) -> list[Row]:
    try:
        import pyarrow.parquet
    except ModuleNotFoundError:
        raise UserError(f"Reading {file} needs pyarrow: pip install 'rolecall[datasets]'.") from None
    try:
        return pyarrow.parquet.read_table(file).to_pylist()
    except pyarrow.ArrowException as error:
        raise UserError(f"{file} is not a valid Parquet file: {error}") from None


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is not UTF-8: {error.reason} at byte {error.start}.") from None


def _call(spec: str, key: str) -> list[Row]:
    function = load_function(spec, key)
    try:
        return list(function())
    except Exception as error:
        raise UserError(f"{key}: {spec} failed: {describe(error)}") from error


def _dataset(path: str, split: str, key: str) -> list[Row]:
    try:
        import datasets
    except ModuleNotFoundError:
        raise UserError(
            f"{key}: {path!r} is no .jsonl, .json, .csv or .parquet file and no module:function; "
            "reading a data set of the hub needs pip install 'rolecall[datasets]'."
        ) from None
    name, _, subset = path.partition(":")
    try:
        return list(datasets.load_dataset(name, subset or None, split=split))
    except Exception as error:  # the library raises many kinds: not found, no network, no such split, broken file
        raise UserError(
            f"{key}: {path!r} is no .jsonl, .json, .csv or .parquet file and no module:function, and split {split!r} "
            f"of it cannot be read as a data set: {type(error).__name__}: {error}"
        ) from error
