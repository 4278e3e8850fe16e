"""Every recipe loads with its data, and scores real rows rightly."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from rolecall import rewards
from rolecall.config import Config
from rolecall.data import load_prompts
from rolecall.data.functions import load_function
from rolecall.roles.reward import Reward
from rolecall.samples import Prompt, Sample

FOLDER = Path(__file__).parent.parent / "recipes"
RECIPES = sorted(FOLDER.glob("**/*.toml"))


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (FOLDER / "data" / name).read_text().splitlines()]


def test_the_recipes_are_there() -> None:
    names = {str(path.relative_to(FOLDER).with_suffix("")) for path in RECIPES}
    tasks = ("arithmetic", "svamp", "gsm8k", "tiny")
    assert names == {f"{name}-{task}" for name in ("grpo", "ppo") for task in tasks} | {"own-task/recipe"}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, so that different prompts are different tokens."""
    backend = Tokenizer(BPE({letter: i for i, letter in enumerate(sorted(ByteLevel.alphabet()))}, []))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
    return tokenizer


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe(path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """It loads, may be trained on, says what it is for, and its prompts and reward are there."""
    config = Config.load(path, {"data.max_prompt_tokens": 2000})
    config.check_trainable()
    load_function(config.reward.function, "reward.function")
    assert path.read_text().startswith("# ") and "model.path" in path.read_text()
    train, heldout, report = load_prompts(config, tokenizer)
    assert heldout and len(train) > config.rollout.prompts
    assert "left out" not in report


def test_data_is_whole() -> None:
    assert (len(rows("gsm8k/train.jsonl")), len(rows("gsm8k/test.jsonl")), len(rows("svamp/svamp.jsonl"))) == (
        7473,
        1319,
        1000,
    )
    for name in ("gsm8k", "svamp"):
        assert "MIT License" in (FOLDER / "data" / name / "LICENSE").read_text()
        assert "licence" in (FOLDER / "data" / name / "SOURCE.txt").read_text()


def test_gsm8k_scores_all_its_own_answers() -> None:
    """Reference solutions are right in their own format, and wrong for the next row unless the answers are equal."""
    data = rows("gsm8k/test.jsonl")
    solutions = [row["answer"] for row in data]
    finals = [solution.rpartition("####")[2].strip().replace(",", "") for solution in solutions]
    prompts = [row["question"] for row in data]
    assert rewards.gsm8k(prompts, solutions, data) == [1.0] * len(data)
    assert rewards.gsm8k(prompts, [f"So \\boxed{{{final}}}." for final in finals], data) == [1.0] * len(data)
    assert rewards.gsm8k(prompts, [f"The answer is ${final}.00." for final in finals], data) == [1.0] * len(data)
    shifted = rewards.gsm8k(prompts, [*solutions[1:], solutions[0]], data)
    assert shifted == [float(a == b) for a, b in zip(finals, [*finals[1:], finals[0]], strict=True)]


def test_svamp_scores_its_answers() -> None:
    data = rows("svamp/svamp.jsonl")
    prompts = [row["question"] for row in data]
    assert (
        rewards.last_number(prompts, [f"First 3, so the answer is {row['answer']}." for row in data], data)
        == [1.0] * 1000
    )
    assert rewards.last_number(prompts, [f"It is {row['answer'] + 1}" for row in data], data) == [0.0] * 1000
    assert rewards.last_number(prompts, ["I do not know."] * 1000, data) == [0.0] * 1000


def test_own_task() -> None:
    """The example of a user's own rows and reward, used as the documentation says."""
    config = Config.load(FOLDER / "own-task" / "recipe.toml")
    asked = Prompt("p", "What is the opposite of hot?", [1], {"word": "hot", "opposite": "cold", "answer": "cold"})
    answers = ["Cold.", "It is cold!", "warm", ""]
    samples = [Sample(0, i, "p", [1], [2], [0.0], [1], [(0, 1, 0)], "stop", text) for i, text in enumerate(answers)]
    assert Reward(config).score([asked] * 4, samples) == [1.0, pytest.approx(1 / 3), 0.0, 0.0]


@pytest.mark.slow
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_with_a_real_tokenizer(path: Path) -> None:
    from rolecall import models

    config = Config.load(path, {"model.path": "smollm2-135m-instruct"})
    _, heldout, report = load_prompts(config, models.load_tokenizer(config.model))
    assert "left out" not in report
    assert all(prompt.tokens[-3:] == heldout[0].tokens[-3:] for prompt in heldout)  # <|im_start|> assistant \n
