"""How single values are written: on the command line as ``--section.key value``, and as TOML."""

import difflib
import json
import tomllib
from datetime import date, time
from typing import Any

from rolecall.errors import UserError


def parse_overrides(arguments: list[str]) -> dict[str, Any]:
    """``["--rollout.max_tokens", "64", "--rollout.stop=['x']"]`` -> ``{"rollout.max_tokens": 64, ...}``."""
    given, rest = {}, list(arguments)
    while rest:
        option = rest.pop(0)
        if not option.startswith("--") or "." not in option:
            resume = difflib.get_close_matches(option, ["--resume"])
            hint = " A run goes on with: rolecall train FOLDER/config.toml --resume." if resume else ""
            raise UserError(f"Cannot read {option!r}: overrides are written --section.key value.{hint}")
        key, equals, text = option[2:].partition("=")
        if not equals:
            if not rest:
                raise UserError(f"--{key} has no value: overrides are written --section.key value.")
            text = rest.pop(0)
        if not key.startswith("cluster.pools."):  # whose names are the user's
            key = key.replace("-", "_")
        given[key] = _value(text)
    return given


def _value(text: str) -> Any:
    """What TOML reads, else the text itself, as it is for a date: no field is one, and a folder may be named by it."""
    try:
        value = tomllib.loads(f"x = {text}")["x"]
    except tomllib.TOMLDecodeError:
        return text
    return text if isinstance(value, (date, time)) else value


def put(raw: dict[str, Any], key: str, value: Any) -> None:
    """Set ``section.key`` in what a TOML file holds.

    Raises:
        UserError: a part of the key is a value there, not a section.
    """
    *parents, last = key.split(".")
    for parent in parents:
        raw = raw.setdefault(parent, {})
        if not isinstance(raw, dict):
            raise UserError(f"--{key}: {parent!r} is a value, not a section.")
    raw[last] = value


def toml_value(value: Any) -> str:
    """``value`` as TOML writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        # TOML's strings are JSON's, but for DEL.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    return repr(value)
