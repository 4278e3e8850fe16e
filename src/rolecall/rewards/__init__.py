"""Rewards: functions ``f(prompts, responses, rows) -> list of floats``, one value a response.

``prompts`` and ``responses`` are texts, ``rows`` the rows of the data set with the right answer as ``row["answer"]``.
"""

from rolecall.rewards.answers import first_digit, gsm8k, last_number

__all__ = ["first_digit", "gsm8k", "last_number"]
