"""Rewards against answers worked out by hand, and what the Reward role does with bad ones."""

import math
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolecall.config import Config
from rolecall.errors import UserError
from rolecall.rewards import answers, first_digit, gsm8k, last_number
from rolecall.roles.reward import Reward
from rolecall.samples import Prompt, Sample


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", 7),
        ("The answer is 7.", 7),
        ("7.0", 7),
        ("$7.00", 7),
        ("1,234,567.5 dollars", Fraction(2469135, 2)),
        ("It is -3.", -3),
        ("−3", -3),
        ("-$5", -5),
        ("$-5", -5),
        ("(2,-3)", -3),
        ("5-3", 3),
        ("f(5)-3", 3),
        ("1, 2, 3", 3),
        ("1,2345", 2345),
        (".5", Fraction(1, 2)),
        ("a half: 1/2", Fraction(1, 2)),
        ("-3 / 4", Fraction(-3, 4)),
        ("12/4 = 3", 3),
        ("1/0", None),
        ("none", None),
        ("", None),
        ("1" * 5000, None),  # Python itself refuses to read so many digits
    ],
)
def test_find_number(text: str, value: Fraction | None) -> None:
    assert answers.find_number(text) == value


@given(st.integers(-(10**12), 10**12), st.text(alphabet="abc .,!?$\n", max_size=20))
def test_last_number_finds_what_was_written(number: int, around: str) -> None:
    text = f"{around.rstrip('.')} 3 {number:,} {around}"
    assert last_number([""], [text], [{"answer": number}]) == [1.0]
    assert last_number([""], [text], [{"answer": number + 1}]) == [0.0]


def test_last_number_reads_answers_of_any_type() -> None:
    rows = [{"answer": 7}, {"answer": 7.0}, {"answer": "7"}, {"answer": "so 3 + 4 = 7"}, {"answer": "$7.00"}]
    assert last_number([""] * 5, ["7"] * 5, rows) == [1.0] * 5


PLAIN = [
    ("#### 1072", 1),
    ("I think\n#### $1,072.00 dollars in 3 days", 1),
    ("####\n1072", 1),
    ("#### **1072**", 1),
    ("#### 1072!", 1),
    ("#### x = 1072", 1),
    ("\\boxed{1072}", 1),
    ("\\boxed{\\$1{,}072}", 1),
    ("\\boxed{x = 1072 \\text{ apples}}", 1),
    ("\\boxed{3} no, \\boxed{1072}, not 4", 1),
    ("That makes 1072.", 1),
    ("#### 1071", 0),
    ("1072 #### 5", 0),
    ("\\boxed{-1072}", 0),
    ("\\boxed{}", 0),
    ("####", 0),
    ("", 0),
    ("\\boxed{9^{9^{9^{9}}}}", 0),  # returns at once: powers are not evaluated
    ("\\boxed{1072^1}", 0),
]
EXPRESSIONS = [
    ("\\boxed{\\frac{2144}{2}}", 1),
    ("\\boxed{\\dfrac{2144}{3}}", 0),
    ("#### 1000 + 72", 1),
    ("#### 1000 - 72", 0),
    ("\\boxed{\\frac{}}", 0),
    ("\\boxed{\\frac{1072}{0}}", 0),
]


@pytest.mark.parametrize("installed", [True, False])
@pytest.mark.parametrize(("response", "right"), PLAIN + EXPRESSIONS)
def test_gsm8k(response: str, right: int, installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if installed:
        pytest.importorskip("math_verify")
    else:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        right = right if (response, right) in PLAIN else 0
    assert gsm8k([""], [response], [{"answer": "16 * 67 = <<16*67=1072>>1072\n#### 1,072"}]) == [float(right)]


def test_gsm8k_works_in_a_thread() -> None:
    """math-verify's time-outs work by signals, which a thread must not use: they would read as a wrong answer."""
    pytest.importorskip("math_verify")
    code = (
        "from concurrent.futures import ThreadPoolExecutor as Pool; from rolecall.rewards import gsm8k\n"
        "with Pool(1) as pool: print(pool.submit(gsm8k, [''], [r'\\boxed{\\frac{14}{2}}'], [{'answer': 7}]).result())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == ("[1.0]", "")


@pytest.mark.parametrize(
    ("response", "value"),
    [("444", 1), ("44", 2 / 3), ("4444", 3 / 4), ("414", 2 / 3), ("144", 2 / 3), ("", 0), ("123", 0)],
)
def test_first_digit(response: str, value: float) -> None:
    assert first_digit(["483"], [response], [{"answer": "444"}]) == [value]


def prompt(text: str = "What?", answer: object = 7) -> Prompt:
    return Prompt("p1", text, [1, 2], {"answer": answer})


def sample(text: str, index: int = 0) -> Sample:
    return Sample(0, index, "p1", [1, 2], [3], [-1.0], [1], [(0, 1, 0)], "stop", text)


def reward(tmp_path: Path, body: str) -> Reward:
    """A Reward whose function is ``body``, in a user's file."""
    file = tmp_path / "mine.py"
    file.write_text(f"def score(prompts, responses, rows):\n    {body}\n")
    return Reward(Config(reward={"function": f"{file}:score"}))


def test_reward_scores_each_sample_with_its_own_prompt() -> None:
    prompts = [prompt(answer=1), prompt(answer=2), prompt(answer=2)]
    role = Reward(Config(reward={"function": "rolecall.rewards:last_number"}))
    assert role.score(prompts, [sample("2"), sample("2"), sample("It is 2.")]) == [0.0, 1.0, 1.0]
    assert role.score([], []) == []


def test_reward_accepts_numpy_and_integers(tmp_path: Path) -> None:
    assert reward(tmp_path, "return [1, 0.5]").score([prompt()] * 2, [sample("a")] * 2) == [1.0, 0.5]
    array = reward(tmp_path, "import numpy; return numpy.ones(2, dtype='float32') / 2")
    assert array.score([prompt()] * 2, [sample("a")] * 2) == [0.5, 0.5]
    assert reward(tmp_path, "import numpy; return [numpy.float32(1)]").score([prompt()], [sample("a")]) == [1.0]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return [1.0]", "returned 1 values for 2 samples"),
        ("return 1.0", "returned a float, not a list"),
        ("return None", "returned a NoneType, not a list"),
        ("return [1.0, float('nan')]", "returned nan for prompt p1 .*response 1"),
        ("return [1.0, float('inf')]", "returned inf"),
        ("return [1.0, None]", "returned None"),
        ("return [1.0, True]", "returned True"),
        ("return [1.0, '1']", "returned '1'"),
        ("return [1.0, 1j]", "returned 1j"),
    ],
)
def test_reward_refuses_what_is_no_list_of_numbers(tmp_path: Path, body: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        reward(tmp_path, body).score([prompt()] * 2, [sample("a", 0), sample("b", 1)])


def test_reward_that_raises_is_called_once_and_named_with_error_and_line(tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    role = reward(tmp_path, f"open({str(calls)!r}, 'a').write('.'); return [float(text) for text in responses]")
    with pytest.raises(UserError) as caught:
        role.score([prompt()] * 3, [sample("1", 0), sample("two", 1), sample("3", 2)])
    message = str(caught.value)
    assert "ValueError: could not convert string to float: 'two'" in message
    assert f"({tmp_path / 'mine.py'}, line 2)" in message
    assert message.endswith("called with 3 samples.")
    assert isinstance(caught.value.__cause__, ValueError)
    assert calls.read_text() == "."


def test_row_without_a_number_is_an_error_not_a_zero() -> None:
    role = Reward(Config(reward={"function": "rolecall.rewards:last_number"}))
    with pytest.raises(UserError, match="answer 'seven' holds no number"):
        role.score([prompt(answer="seven")], [sample("7")])


def test_reward_cannot_change_the_rows(tmp_path: Path) -> None:
    asked = prompt()
    reward(tmp_path, "rows[0]['answer'] = 0; return [1.0]").score([asked], [sample("a")])
    assert asked.row == {"answer": 7}


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("rolecall.rewards", "must be written module:function"),
        ("rolecall.rewards:last_numer", "Did you mean 'last_number'"),
        ("no_such_module:f", "importing the module 'no_such_module' failed: ModuleNotFoundError"),
        ("no/such/file.py:f", "there is no file 'no/such/file.py'"),
    ],
)
def test_reward_function_that_is_not_there(function: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Reward(Config(reward={"function": function}))


def test_reward_file_that_does_not_import(tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text("import math\n\nmath.no_such_name\n")
    with pytest.raises(UserError, match=r"importing .*broken\.py failed: AttributeError: .*broken\.py, line 3\)"):
        Reward(Config(reward={"function": f"{file}:f"}))


def test_reward_file_may_import_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_mine.py").write_text("HALF = 0.5\n")
    assert reward(tmp_path, "from neighbour_of_mine import HALF; return [HALF]").score([prompt()], [sample("a")]) == [
        0.5
    ]


def test_rewards_import_no_torch() -> None:
    code = "import sys, rolecall.roles.reward, rolecall.rewards, rolecall.data; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_values_are_floats() -> None:
    values = Reward(Config()).score([prompt()], [sample("7")])
    assert type(values[0]) is float and math.isfinite(values[0])
    assert not isinstance(values, np.ndarray)
