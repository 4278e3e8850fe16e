"""Makes docs/configuration.md from the types: ``python docs/configuration.py > docs/configuration.md``."""

from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from rolecall.config import Cluster, Config, Pool
from rolecall.overrides import toml_value


def page() -> str:
    """The whole page."""
    lines = [
        "# Configuration",
        "",
        "A run is one TOML file; `--section.key value` overrides any field. "
        "This page is made from the types by `python docs/configuration.py > docs/configuration.md`.",
        "",
    ]
    for name, field in Config.model_fields.items():
        section: Any = field.annotation
        lines += _section(f"## [{name}]", section)
        if section is Cluster:
            lines += _section("### [cluster.pools.NAME]", Pool)
    return "\n".join(lines)


def _section(title: str, section: Any) -> list[str]:
    rows = [
        f"| `{key}` | {_type(field.annotation)} | {_default(field)} | {field.description} |"
        for key, field in section.model_fields.items()
    ]
    return [title, "", section.__doc__.strip(), "", "| field | type | default | what |", "|---|---|---|---|", *rows, ""]


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if field.default is None:
        return "unset"
    return "" if isinstance(field.default, dict) else f"`{toml_value(field.default)}`"


def _type(annotation: Any) -> str:
    args = [arg for arg in get_args(annotation) if arg is not type(None)]
    if not args:
        return annotation.__name__
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{arg}`" for arg in args)
    if annotation.__class__.__name__ in ("UnionType", "_UnionGenericAlias"):
        return " or ".join(_type(arg) for arg in args)
    return str(annotation).replace("typing.", "").replace("rolecall.config.", "").split("[")[0]


if __name__ == "__main__":
    print(page(), end="")
