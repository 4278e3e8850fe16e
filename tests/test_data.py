"""Rows, prompts and the sampler."""

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolecall.config import Config
from rolecall.data import Sampler, load_prompts
from rolecall.data.sources import read_rows
from rolecall.data.tasks import addition, first_digit
from rolecall.errors import UserError
from rolecall.models import Loaded
from rolecall.samples import Prompt

ROWS = [{"prompt": "12", "answer": 1}, {"prompt": "34", "answer": 3}]


def jsonl(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def load(tiny: Loaded, **data: Any) -> tuple[list[Prompt], list[Prompt], str]:
    return load_prompts(Config(data={"holdout": 0} | data), tiny.tokenizer)


# Sources


def test_files_hold_the_same_rows(tmp_path: Path) -> None:
    jsonl(tmp_path / "rows.jsonl", ROWS)
    (tmp_path / "rows.json").write_text(json.dumps(ROWS))
    (tmp_path / "rows.csv").write_text("prompt,answer\n12,1\n34,3\n")
    assert read_rows(str(tmp_path / "rows.jsonl"), "train") == ROWS
    assert read_rows(str(tmp_path / "rows.json"), "train") == ROWS
    assert read_rows(str(tmp_path / "rows.csv"), "train") == [
        {"prompt": "12", "answer": "1"},
        {"prompt": "34", "answer": "3"},
    ]
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(sys.modules["pyarrow"].Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    assert read_rows(str(tmp_path / "rows.parquet"), "train") == ROWS


def test_text_survives_as_written(tmp_path: Path) -> None:
    odd = [{"prompt": "a\u2028b\u0085c {x} \u00e9\U0001f642", "answer": "\u6771\u4eac"}]
    file = tmp_path / "rows.jsonl"
    file.write_text("\ufeff\n" + json.dumps(odd[0], ensure_ascii=False) + "\r\n\n", encoding="utf-8")
    assert read_rows(str(file), "train") == odd
    cells = ["two\nlines, one row", "a\u2028b\u2029c\u0085d\fe", "\x1c"]
    written = "prompt,answer\n" + "".join(f'"{cell}",1\n' for cell in cells) + "a\u2028b,1\n"
    (tmp_path / "rows.csv").write_text(written, encoding="utf-8")
    read = read_rows(str(tmp_path / "rows.csv"), "train")
    assert read == [{"prompt": cell, "answer": "1"} for cell in (*cells, "a\u2028b")]


def test_functions_yield_rows(tmp_path: Path) -> None:
    assert len(read_rows("rolecall.data.tasks:addition", "train")) == 100
    (tmp_path / "mine.py").write_text("def rows():\n    yield {'prompt': '1'}\n\ndef broken():\n    yield 1 / 0\n")
    assert read_rows(f"{tmp_path}/mine.py:rows", "train") == [{"prompt": "1"}]
    with pytest.raises(UserError, match=r"failed: ZeroDivisionError: division by zero \(.*mine\.py, line 5\)"):
        read_rows(f"{tmp_path}/mine.py:broken", "train")


def test_data_sets_through_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "set").mkdir()
    jsonl(tmp_path / "set" / "train.jsonl", ROWS)
    jsonl(tmp_path / "set" / "test.jsonl", ROWS[:1])
    assert read_rows(str(tmp_path / "set"), "train") == ROWS
    assert read_rows(str(tmp_path / "set"), "test") == ROWS[:1]
    with pytest.raises(UserError, match=r"data\.path: .*split 'nowhere' of it cannot be read.*nowhere"):
        read_rows(str(tmp_path / "set"), "nowhere")
    with pytest.raises(UserError, match=r"'no-one/nothing:main' is no .jsonl, .* and no module:function"):
        read_rows("no-one/nothing:main", "train")


def test_data_sets_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"'openai/gsm8k:main' is no .*pip install 'rolecall\[datasets\]'"):
        read_rows("openai/gsm8k:main", "train")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"prompt": "1"}\n\n{"prompt": \n', r"a\.jsonl, line 3 is not valid JSON"),
        ("a.jsonl", '{"prompt": "1"}\n["2"]\n', r"row 2 of .*a\.jsonl is a list, not an object"),
        ("a.jsonl", "\n", r"data\.path: .*a\.jsonl has no rows"),
        ("a.json", '[{"prompt": "1"},\n}]', r"a\.json, line 2 is not valid JSON"),
        ("a.json", '{"prompt": "1"}', r"a\.json must hold a JSON list of rows, not a dict"),
        ("a.json", "[]", r"a\.json has no rows"),
        ("a.csv", "prompt,answer\n1,2\n3\n", r"a\.csv, line 3 has another number of columns.*prompt, answer"),
        ("a.csv", "prompt,answer\n1,2,3\n", r"a\.csv, line 2 has another number of columns"),
        ("a.csv", "prompt,answer\n", r"a\.csv has no rows"),
        ("a.csv", b"prompt\n\xff\n", r"a\.csv is not UTF-8: invalid start byte at byte 7"),
        ("a.parquet", "no", r"a\.parquet is not a valid Parquet file"),
        ("b.jsonl", None, r"data\.path: there is no file '.*b\.jsonl'"),
    ],
)
def test_sources_that_cannot_be_read(tmp_path: Path, name: str, content: str | bytes | None, message: str) -> None:
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    if content is not None:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=message):
        read_rows(str(tmp_path / name), "train")


# Prompts


def test_prompts_are_rendered_and_tokenised_once(tiny: Loaded, tmp_path: Path) -> None:
    path = jsonl(tmp_path / "rows.jsonl", ROWS)
    (first, second), heldout, report = load(tiny, path=path)
    assert (first.text, first.tokens) == ("12", [2, 3, 7, 8, 4])  # <bos> <user> 1 2 <assistant>
    assert (second.text, second.tokens) == ("34", [2, 3, 9, 10, 4])
    assert first.row == {"prompt": "12", "answer": 1}
    assert (heldout, report) == ([], "2 prompts to train on, 0 held out")


def test_special_tokens_are_not_added_a_second_time(tiny: Loaded, tmp_path: Path) -> None:
    """Llama's tokenizer puts <bos> before any text by itself, and the chat template writes one too."""
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(tiny.tokenizer.name_or_path)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    assert tokenizer("1")["input_ids"] == [2, 7]
    path = jsonl(tmp_path / "rows.jsonl", ROWS)
    (first, _), _, _ = load_prompts(Config(data={"path": path, "holdout": 0}), tokenizer)
    assert first.tokens == [2, 3, 7, 8, 4]


def test_template_system_and_answer_field(tiny: Loaded, tmp_path: Path) -> None:
    path = jsonl(tmp_path / "rows.jsonl", [{"a": 1, "b": "{2}", "result": 3, "answer": "because"}])
    (prompt,), _, _ = load(tiny, path=path, prompt="{a} + {b} = {{?}}", answer="result", system="9")
    assert prompt.text == "1 + {2} = {?}"
    assert tiny.tokenizer.decode(prompt.tokens).startswith("<bos><user>9<user>1")  # this template has no system turn
    assert prompt.row == {"a": 1, "b": "{2}", "result": 3, "answer": 3}


def test_conversations(tiny: Loaded, tmp_path: Path) -> None:
    turns = [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "3"},
    ]
    own_system = [{"role": "system", "content": "8"}, {"role": "user", "content": "3"}]
    path = jsonl(tmp_path / "rows.jsonl", [{"chat": turns}, {"chat": turns[:1]}, {"chat": own_system}])
    prompts, _, _ = load(tiny, path=path, prompt="{chat}", answer="", system="9")
    assert [tiny.tokenizer.decode(prompt.tokens) for prompt in prompts] == [
        "<bos><user>9<user>1<assistant>2<eos><user>3<assistant>",
        "<bos><user>9<user>1<assistant>",
        "<bos><user>8<user>3<assistant>",
    ]
    assert [prompt.text for prompt in prompts] == ["user: 1\n\nassistant: 2\n\nuser: 3", "1", "3"]


@pytest.mark.parametrize(
    ("rows", "data", "message"),
    [
        (
            ROWS,
            {"prompt": "{question}"},
            r"row 1 of .* has no field 'question', which data\.prompt .* It has: prompt, answer",
        ),
        ([*ROWS, {"answer": 1}], {}, r"row 3 of .* has no field 'prompt'"),
        (
            [*ROWS, {"prompt": "1"}],
            {},
            r"row 3 of .* has no field 'answer' \(data\.answer; \"\": none is needed\)\. It has: prompt",
        ),
        (ROWS, {"prompt": "{prompt"}, r"data\.prompt = '\{prompt' cannot be filled.*Write \{field\}"),
        (ROWS, {"prompt": "{prompt.text}"}, r"row 1 of .* has no field 'prompt\.text'"),
        (ROWS, {"prompt": "Say {prompt.text}"}, r"cannot be filled from row 1.*has no attribute 'text'"),
        (ROWS, {"prompt": "{}"}, r"cannot be filled from row 1|has no field ''"),
        ([{"prompt": [], "answer": 1}], {}, r"row 1 .* must hold messages with 'role' and 'content'"),
        ([{"prompt": ["hello"], "answer": 1}], {}, r"row 1 .* must hold messages with 'role' and 'content'"),
        ([{"prompt": [{"role": "assistant", "content": "1"}], "answer": 1}], {}, "ends with the assistant's turn"),
        (
            ROWS,
            {"max_prompt_tokens": 4},
            r"no prompt is left: 2 of 2 .*the longest has 5\).*Raise data\.max_prompt_tokens",
        ),
        (ROWS, {"holdout": 2}, r"has 2 usable ones; 2 are held out \(data\.holdout\)"),
        (ROWS, {"holdout": 9}, r"has 2 usable ones; 2 are held out \(data\.holdout\)"),
        ([ROWS[0]] * 3, {"holdout": 1}, r"has 3 usable ones; 1 are held out .* or read the same"),
    ],
)
def test_prompts_that_cannot_be_made(
    tiny: Loaded, tmp_path: Path, rows: list[Any], data: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        load(tiny, path=jsonl(tmp_path / "rows.jsonl", rows), **data)


def test_chat_template_that_refuses(tiny: Loaded, tmp_path: Path) -> None:
    path = jsonl(tmp_path / "rows.jsonl", ROWS)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny.tokenizer.name_or_path)
    tokenizer.chat_template = "{{ raise_exception('no system role here') }}"
    with pytest.raises(UserError, match=r"chat template refuses a prompt of .*: no system role here"):
        load_prompts(Config(data={"path": path, "holdout": 0}), tokenizer)


def test_long_prompts_are_left_out_and_counted_never_cut(tiny: Loaded, tmp_path: Path) -> None:
    path = jsonl(tmp_path / "rows.jsonl", [{"prompt": "1" * n, "answer": 1} for n in (1, 2, 3, 4, 5)])
    train, _, report = load(tiny, path=path, max_prompt_tokens=6)  # three tokens are the template's
    assert [prompt.text for prompt in train] == ["1", "11", "111"]
    assert report == (
        f"3 prompts to train on, 0 held out; 2 of 5 prompts of {path} left out, being over data.max_prompt_tokens = 6 "
        "(the longest has 8)"
    )


def test_held_out_prompts_are_the_same_for_every_seed_and_never_trained_on(tiny: Loaded) -> None:
    def split(seed: int) -> tuple[list[Prompt], list[Prompt], str]:
        return load_prompts(
            Config(model={"path": "tiny"}, data={"path": "rolecall.data.tasks:first_digit"}, run={"seed": seed}),
            tiny.tokenizer,
        )

    train, heldout, report = split(0)
    assert report == "968 prompts to train on, 32 held out"
    assert not {p.id for p in train} & {p.id for p in heldout}
    assert len({p.id for p in train + heldout}) == 1000
    assert split(7) == (train, heldout, report)


def test_copies_of_a_held_out_prompt_leave_training(tiny: Loaded, tmp_path: Path) -> None:
    path = jsonl(tmp_path / "rows.jsonl", [{"prompt": str(n % 5), "answer": n % 5} for n in range(10)])
    train, heldout, report = load(tiny, path=path, holdout=1)
    assert len(heldout) == 1 and len(train) == 8
    assert heldout[0].tokens not in [prompt.tokens for prompt in train]
    assert report == f"8 prompts to train on, 1 held out; 1 of {path} left out, reading the same as a held-out one"


def test_eval_path_is_read_the_same_way_and_not_trained_on(tiny: Loaded, tmp_path: Path) -> None:
    path, other = (
        jsonl(tmp_path / "a.jsonl", ROWS),
        jsonl(tmp_path / "b.jsonl", [ROWS[1], {"prompt": "5", "answer": 5}]),
    )
    train, heldout, report = load(tiny, path=path, eval_path=other, holdout=32)
    assert [p.text for p in train] == ["12"]
    assert [p.text for p in heldout] == ["34", "5"]
    assert report == f"1 prompts to train on, 2 held out; 1 of {path} left out, reading the same as a held-out one"
    with pytest.raises(UserError, match=r"2 are held out \(data\.eval_path\) or read the same"):
        load(tiny, path=path, eval_path=path)
    with pytest.raises(UserError, match=r"data\.eval_path: there is no file"):
        load(tiny, path=path, eval_path=str(tmp_path / "c.jsonl"))


def test_prompt_ids_are_stable_and_unique(tiny: Loaded, tmp_path: Path) -> None:
    named = [{"id": n, "prompt": "1", "answer": 1} for n in (3, 5)]
    assert [p.id for p in load(tiny, path=jsonl(tmp_path / "a.jsonl", named))[0]] == ["3", "5"]
    same = [ROWS[0], ROWS[1], ROWS[0]]
    first, second, third = (p.id for p in load(tiny, path=jsonl(tmp_path / "b.jsonl", same))[0])
    assert third == f"{first}-2" and first != second
    turned = [ROWS[1], dict(reversed(ROWS[0].items()))]  # neither the rows' order nor the fields' changes an id
    assert [p.id for p in load(tiny, path=jsonl(tmp_path / "c.jsonl", turned))[0]] == [second, first]
    clash = [{"id": 1, "prompt": "1", "answer": 1}, {"id": 1, "prompt": "2", "answer": 1}]
    assert len({p.id for p in load(tiny, path=jsonl(tmp_path / "d.jsonl", clash))[0]}) == 2


# Tasks


def test_tasks() -> None:
    rows = list(addition())
    assert rows == list(addition()) and len({row["prompt"] for row in rows}) == 100
    assert {"prompt": "What is 3 + 4? Answer only with a number.", "answer": 7} in rows
    assert rows != sorted(rows, key=lambda row: row["prompt"])
    digits = list(first_digit())
    assert len(digits) == 1000
    assert digits[483] == {"prompt": "483", "answer": "444"}


# Sampler


def prompts(n: int) -> list[Prompt]:
    return [Prompt(f"p{i}", "the same text", [1], {}) for i in range(n)]


@given(st.integers(1, 7), st.integers(0, 3), st.lists(st.integers(0, 9), max_size=8))
def test_each_epoch_has_every_prompt_once_and_group_ids_never_repeat(n: int, seed: int, draws: list[int]) -> None:
    sampler = Sampler(prompts(n), seed)
    drawn = [item for size in draws for item in sampler.draw(size)]
    assert [group_id for group_id, _ in drawn] == list(range(sum(draws)))
    for start in range(0, len(drawn) - n + 1, n):
        assert Counter(prompt.id for _, prompt in drawn[start : start + n]) == Counter(p.id for p in prompts(n))


@given(st.integers(1, 7), st.integers(0, 3), st.lists(st.integers(0, 9), max_size=8), st.data())
def test_killed_anywhere_and_restored_it_goes_on_the_same(
    n: int, seed: int, draws: list[int], data: st.DataObject
) -> None:
    whole = Sampler(prompts(n), seed)
    expected = [whole.draw(size) for size in draws]
    kill = data.draw(st.integers(0, len(draws)))
    before = Sampler(prompts(n), seed)
    drawn = [before.draw(size) for size in draws[:kill]]
    state = json.loads(json.dumps(before.state()))
    before.draw(3)  # what was drawn after the checkpoint is lost with the process, and drawn again
    after = Sampler(prompts(n), seed)
    after.restore(state)
    assert drawn + [after.draw(size) for size in draws[kill:]] == expected


def test_epochs_and_seeds_differ_and_the_order_is_fixed() -> None:
    def order(seed: int) -> list[str]:
        return [prompt.id for _, prompt in Sampler(prompts(20), seed).draw(40)]

    assert order(0) == order(0) != order(1)
    assert order(0)[:20] != order(0)[20:]
    # Written down, because a stream that changes with the Python version or the process cannot be resumed.
    assert " ".join(p.id for _, p in Sampler(prompts(4), 0).draw(8)) == "p0 p3 p1 p2 p0 p1 p2 p3"


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (Sampler(prompts(5), 0), r"the data set's prompts changed since the checkpoint \(4-\w+ then, 5-\w+ now\)"),
        (Sampler(prompts(4)[::-1], 0), "the data set's prompts changed"),
        (Sampler(prompts(4), 1), r"run\.seed changed since the checkpoint \(0 then, 1 now\)"),
    ],
)
def test_restoring_another_stream_is_refused(other: Sampler, message: str) -> None:
    with pytest.raises(UserError, match=message):
        other.restore(Sampler(prompts(4), 0).state())
