"""Rewards that compare the response's answer with the row's: 1 for a right one, 0 for a wrong one."""

from __future__ import annotations

import importlib.util
import logging
import re
from fractions import Fraction
from typing import Any

Row = dict[str, Any]

# A minus sign belongs to the number unless something stands right before it: "5-3" ends in 3, "= -3" in -3.
_NUMBER = re.compile(
    r"""(?P<minus> (?<![\w)\]}.,]) [-−] )? \$? (?P<inner_minus> (?<=\$) [-−] )?
        (?P<value> (?: [0-9]{1,3} (?:,[0-9]{3})+ (?![0-9]) | [0-9]+ ) (?:\.[0-9]+)? | (?<![0-9])\.[0-9]+ )
        (?: \s?/\s? (?P<denominator> [0-9]+ ) (?![0-9./]) )?""",
    re.VERBOSE,
)
_BOXED = re.compile(r"\\boxed\s*\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}")  # braces nested up to three deep
_LONGEST = 64  # characters of an answer; beyond it is no answer, and could take minutes to evaluate


def last_number(prompts: list[str], responses: list[str], rows: list[Row]) -> list[float]:
    """1 where the last number in the response equals the row's answer, else 0.

    "1,234", "$7.00", "-3." and "1/2" are numbers; "5-3" ends in 3.
    """
    return [float(find_number(text) == _gold(row)) for text, row in zip(responses, rows, strict=True)]


def gsm8k(prompts: list[str], responses: list[str], rows: list[Row]) -> list[float]:
    """1 where the response's answer equals the row's, which stands after "####" (GSM8K), else 0.

    The response's answer is what stands after its last "####", else in its last \\boxed{}, else its last number. Plain
    numbers are compared exactly; LaTeX such as \\frac{1}{2} is judged by math-verify where that is installed, and is
    wrong otherwise.
    """
    return [float(_same(answer_part(text), _gold(row))) for text, row in zip(responses, rows, strict=True)]


def first_digit(prompts: list[str], responses: list[str], rows: list[Row]) -> list[float]:
    """How much of the response is the row's answer, place by place: from 0 to 1, which only the answer itself gets.

    A response longer than the answer is divided by its own length, so that ending in time is part of the task.
    """
    return [
        sum(a == b for a, b in zip(text, row["answer"], strict=False)) / max(len(text), len(row["answer"]))
        for text, row in zip(responses, rows, strict=True)
    ]


def find_number(text: str) -> Fraction | None:
    """The last number in ``text``, exactly, or None."""
    last = None
    for last in _NUMBER.finditer(text):
        pass
    if last is None or len(last[0]) > _LONGEST:
        return None
    value = Fraction(last["value"].replace(",", ""))
    if last["denominator"]:
        if int(last["denominator"]) == 0:
            return None
        value /= int(last["denominator"])
    return -value if last["minus"] or last["inner_minus"] else value


def answer_part(response: str) -> str:
    """The part of a response that holds its answer: after the last "####", else in the last \\boxed{}, else all."""
    _, marker, after = response.rpartition("####")
    if marker:
        return after.strip().split("\n")[0].strip()
    boxed = _BOXED.findall(response)
    return boxed[-1].strip() if boxed else response


def _gold(row: Row) -> Fraction:
    answer = row["answer"]
    value = find_number(str(answer).rpartition("####")[2])
    if value is None:
        raise ValueError(f"the row's answer {answer!r} holds no number")
    return value


def _same(part: str, gold: Fraction) -> bool:
    latex = "\\" in part and len(part) <= _LONGEST
    if not latex:
        return find_number(part) == gold
    # Powers and factorials are not evaluated: a response can ask for 9^{9^9}, and nobody's answer is written so.
    return not re.search(r"[\^!]", part) and _math_verify(part, gold)


def _math_verify(latex: str, gold: Fraction) -> bool:
    """math-verify's verdict; False where it is not installed.

    Its own time-outs are off: they work by signals, fail in threads and read as a wrong answer. The Reward role's
    process has a hard time-out instead (reward.timeout), which is an error.
    """
    if importlib.util.find_spec("math_verify") is None:
        return False
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns about the time-outs being off
    target = parse(f"${latex}$", parsing_timeout=None)
    return bool(verify(parse(str(gold), parsing_timeout=None), target, timeout_seconds=None))
