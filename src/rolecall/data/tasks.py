"""Small tasks that need no file."""

import random
from collections.abc import Iterator
from typing import Any


def addition() -> Iterator[dict[str, Any]]:
    """All 100 sums of two digits, in an order that never changes."""
    pairs = [(a, b) for a in range(10) for b in range(10)]
    random.Random(0).shuffle(pairs)
    for a, b in pairs:
        yield {"prompt": f"What is {a} + {b}? Answer only with a number.", "answer": a + b}


def first_digit() -> Iterator[dict[str, Any]]:
    """All 1,000 three-digit strings; the answer is the first digit three times. For the model "tiny"."""
    for number in range(1000):
        digits = f"{number:03}"
        yield {"prompt": digits, "answer": digits[0] * 3}
