"""Rewards that compare the response's answer with the row's: 1 for a right one, 0 for a wrong one."""

import importlib.util
import logging
import re
from fractions import Fraction
from typing import Any

Row = dict[str, Any]

# A minus sign belongs to the number unless something stands right before it: "5-3" ends in 3, "= -3" in -3.
_NUMBER = re.compile(
    r"""(?P<minus> (?<![\w)\]}]) [-−] )? \$? (?P<inner_minus> (?<=\$) [-−] )?
        (?P<value> (?: [0-9]{1,3} (?:,[0-9]{3})+ (?![0-9]) | [0-9]+ ) (?:\.[0-9]+)? | (?<![0-9])\.[0-9]+ )
        (?: \s?/\s? (?P<denominator> [0-9]+ ) (?![0-9./]) )?""",
    re.VERBOSE,
)
_BOXED = re.compile(r"\\boxed\s*\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}")  # braces nested up to three deep
_LONGEST = 64  # characters of an answer; a longer one is none, and could take minutes to evaluate


def last_number(prompts: list[str], responses: list[str], rows: list[Row]) -> list[float]:
    """1 where the last number in the response equals the row's answer, else 0.

    "1,234", "$7.00", "-3." and "1/2" are numbers; "5-3" ends in 3.
    """
    return [float(find_number(text) == _gold(row)) for text, row in zip(responses, rows, strict=True)]


def gsm8k(prompts: list[str], responses: list[str], rows: list[Row]) -> list[float]:
    """1 where the response's answer equals the row's, which stands after "####" (GSM8K), else 0.

    The response's answer is what stands after its last "####", else in its last \\boxed{}, else its last number. Plain
    numbers are compared exactly; expressions such as \\frac{1}{2} are judged by math-verify where it is installed, and
    are wrong where it is not.
    """
    return [float(_same(text, _gold(row))) for text, row in zip(responses, rows, strict=True)]


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
    found = list(_NUMBER.finditer(text))
    return _value(found[-1]) if found else None


def _value(number: re.Match[str]) -> Fraction | None:
    denominator = int(number["denominator"] or 1) if len(number[0]) <= _LONGEST else 0
    if denominator == 0:
        return None
    value = Fraction(number["value"].replace(",", "")) / denominator
    return -value if number["minus"] or number["inner_minus"] else value


def _gold(row: Row) -> Fraction:
    answer = row["answer"]
    value = find_number(str(answer).rpartition("####")[2])
    if value is None:
        raise ValueError(f"the row's answer {answer!r} holds no number")
    return value


def _same(response: str, gold: Fraction) -> bool:
    _, marker, part = response.rpartition("####")
    if marker:
        part = part.strip().partition("\n")[0]
    elif boxed := _BOXED.findall(response):
        part = boxed[-1]
    else:
        return find_number(response) == gold
    # Units and spacing of LaTeX go; of "x = 2 + 3 = 5" the last side counts.
    part = re.sub(r"\\text\{[^}]*\}|\\[$%,;! ]", "", part).replace("{,}", ",").rpartition("=")[2].strip()
    if re.search(r"[\\^]|[0-9)}]\s*[-−*+]\s*[0-9(]", part):
        return _math_verify(part, gold)
    number = _NUMBER.search(part)
    return number is not None and _value(number) == gold


def _math_verify(latex: str, gold: Fraction) -> bool:
    """math-verify's verdict; False where it is not installed, and for powers, factorials and long expressions.

    Those are never a GSM8K answer, and a response may ask for 9^{9^9}, which would be evaluated for hours.
    Its own time-outs are off: they work by signals, fail in threads and read as a wrong answer. The Reward role's
    process has a hard time-out instead (reward.timeout), which is an error.
    """
    if len(latex) > _LONGEST or re.search(r"[\^!]", latex) or importlib.util.find_spec("math_verify") is None:
        return False
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns about the time-outs being off
    target = parse(f"${latex}$", parsing_timeout=None)
    return bool(verify(parse(str(gold), parsing_timeout=None), target, timeout_seconds=None))
