"""Rewards: functions ``f(prompts, responses, rows) -> list of floats``, one value a response.

``prompts`` and ``responses`` are texts, ``rows`` the rows of the data set with the right answer as ``row["answer"]``.
"""

from collections.abc import Callable
from typing import Any

from rolecall.data.functions import load_function
from rolecall.rewards.answers import first_digit, gsm8k, last_number

__all__ = ["first_digit", "gsm8k", "last_number", "resolve"]


def resolve(function: str) -> Callable[..., Any]:
    """The reward that ``reward.function`` names, as ``module:function`` or ``file.py:function``.

    Raises:
        UserError: there is no such function, or importing it fails.
    """
    return load_function(function, "reward.function")
