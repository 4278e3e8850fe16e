"""The Reward: what each sample is worth, by the function that the configuration names."""

import inspect
import math
import numbers
from typing import Any

from rolecall.config import Config
from rolecall.data.functions import describe, load_function
from rolecall.errors import UserError
from rolecall.samples import Prompt, Sample


class Reward:
    """Scores responses with a user's function ``f(prompts, responses, rows) -> list of floats``.

    Raises:
        UserError: ``reward.function`` cannot be loaded.
    """

    def __init__(self, config: Config):
        self.name = config.reward.function
        self.function = load_function(self.name, "reward.function")

    def score(self, prompts: list[Prompt], samples: list[Sample]) -> list[float]:
        """One finite value a sample; ``prompts[i]`` belongs to ``samples[i]``.

        The function is called once: it may cost money or time, or keep count of its calls.

        Raises:
            UserError: the function raises, or returns anything but one finite number a sample.
        """
        if not samples:
            return []
        rows = [dict(prompt.row) for prompt in prompts]  # a function may write into its rows
        try:
            values = self.function([prompt.text for prompt in prompts], [sample.text for sample in samples], rows)
        except (Exception, SystemExit) as error:
            what = describe(error, _file(self.function))
            raise UserError(f"The reward {self.name} raised {what}, called with {len(samples)} samples.") from error
        return self._checked(values, prompts, samples)

    def _checked(self, values: Any, prompts: list[Prompt], samples: list[Sample]) -> list[float]:
        if hasattr(values, "tolist"):  # a NumPy array or a tensor
            values = values.tolist()
        if not isinstance(values, (list, tuple)):
            raise UserError(f"The reward {self.name} returned a {type(values).__name__}, not a list of numbers.")
        if len(values) != len(samples):
            raise UserError(f"The reward {self.name} returned {len(values)} values for {len(samples)} samples.")
        for value, prompt, sample in zip(values, prompts, samples, strict=True):
            number = isinstance(value, numbers.Real) and not isinstance(value, bool)
            if not number or not math.isfinite(value):
                raise UserError(
                    f"The reward {self.name} returned {value!r} for {_shown(prompt, sample)}; "
                    "each value must be a finite number."
                )
        return [float(value) for value in values]


def _file(function: Any) -> str | None:
    return inspect.getsourcefile(function) if inspect.isroutine(function) else None


def _shown(prompt: Prompt, sample: Sample) -> str:
    return f"prompt {prompt.id} ({prompt.text!r:.100}), response {sample.index} ({sample.text!r:.100})"
