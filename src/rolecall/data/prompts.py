"""From rows to prompts: template, chat template and tokeniser, each applied once."""

import hashlib
import json
import random
import string
from collections import Counter
from typing import Any

import jinja2

from rolecall.config import Config, Data
from rolecall.data.sources import Row, read_rows
from rolecall.errors import UserError
from rolecall.samples import Prompt

HOLDOUT_SEED = 0  # fixed, so that runs with different seeds are measured on the same prompts

Messages = list[dict[str, Any]]


def load_prompts(config: Config, tokenizer: Any) -> tuple[list[Prompt], list[Prompt], str]:
    """The prompts to train on, the held-out ones, and a line on what was read and left out.

    Held out are the rows of ``data.eval_path``, or ``data.holdout`` rows of ``data.path``. No prompt that reads the
    same as a held-out one stays in training.

    Raises:
        UserError: a source cannot be read, a row lacks a field, the template or chat template refuses a row, or no
            prompt is left.
    """
    data = config.data
    usable, notes = _prompts(data, data.path, data.split, "data.path", tokenizer)
    if data.eval_path:
        heldout, more = _prompts(data, data.eval_path, data.eval_split, "data.eval_path", tokenizer)
        notes += more
        expected = len(usable)
    else:
        expected = max(len(usable) - data.holdout, 0)
        heldout = random.Random(HOLDOUT_SEED).sample(usable, len(usable) - expected)
    seen = {tuple(prompt.tokens) for prompt in heldout}
    train = [prompt for prompt in usable if tuple(prompt.tokens) not in seen]
    if not train:
        raise UserError(
            f"No prompt is left to train on: {data.path} has {len(usable)} usable ones; {len(heldout)} are held out "
            f"({'data.eval_path' if data.eval_path else 'data.holdout'}) or read the same as one of those."
        )
    if copies := expected - len(train):
        notes.append(f"{copies} of {data.path} left out, reading the same as a held-out one")
    return train, heldout, "; ".join([f"{len(train)} prompts to train on, {len(heldout)} held out", *notes])


def _prompts(data: Data, path: str, split: str, key: str, tokenizer: Any) -> tuple[list[Prompt], list[str]]:
    """All usable prompts of one source, and notes on the rest."""
    rows = read_rows(path, split, key)
    conversations = [_messages(data, row, f"row {number} of {path}") for number, row in enumerate(rows, 1)]
    try:
        rendered = tokenizer.apply_chat_template(conversations, tokenize=False, add_generation_prompt=True)
    except jinja2.TemplateError as error:
        raise UserError(f"The model's chat template refuses a prompt of {path}: {error}") from error
    tokens = tokenizer(rendered, add_special_tokens=False)["input_ids"]  # the template wrote the special ones
    prompts = [
        Prompt(id, _text(messages), ids, row | {"answer": row[data.answer]} if data.answer else row)
        for id, messages, ids, row in zip(_ids(rows), conversations, tokens, rows, strict=True)
    ]
    # A response needs room behind the prompt: the model's context is a limit, too.
    context = tokenizer.model_max_length - 1
    limit, name = min((data.max_prompt_tokens, "data.max_prompt_tokens"), (context, "the model's context - 1"))
    kept = [prompt for prompt in prompts if len(prompt.tokens) <= limit]
    notes = []
    if left_out := len(prompts) - len(kept):
        notes.append(
            f"{left_out} of {len(prompts)} prompts of {path} left out, being over {name} = {limit} "
            f"(the longest has {max(map(len, tokens))})"
        )
    if not kept:
        raise UserError(f"{key}: no prompt is left: {notes[0]}. Raise data.max_prompt_tokens.")
    return kept, notes


def _messages(data: Data, row: Row, where: str) -> Messages:
    """The conversation that ``row`` becomes."""
    if data.answer and data.answer not in row:
        raise UserError(
            f'{where} has no field {data.answer!r} (data.answer; "": none is needed). It has: {", ".join(row)}.'
        )
    messages = _conversation(data.prompt, row, where)
    if data.system and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": data.system}, *messages]
    return messages


def _conversation(template: str, row: Row, where: str) -> Messages:
    try:
        parts = list(string.Formatter().parse(template))
        if len(parts) == 1 and parts[0][0] == "" and isinstance(value := row[parts[0][1] or ""], list):
            return _checked(value, where)
        return [{"role": "user", "content": template.format_map(row)}]
    except KeyError as error:
        raise UserError(
            f"{where} has no field {error.args[0]!r}, which data.prompt = {template!r} asks for. "
            f"It has: {', '.join(row)}."
        ) from None
    except (ValueError, IndexError, AttributeError, TypeError) as error:
        raise UserError(
            f"data.prompt = {template!r} cannot be filled from {where}: {error}. "
            "Write {field} for a field, and {{ or }} for a brace."
        ) from None


def _checked(messages: list[Any], where: str) -> Messages:
    if not messages or not all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in messages):
        raise UserError(
            f"{where}: a list as prompt must hold messages with 'role' and 'content', not {messages!r:.80}."
        )
    if messages[-1]["role"] == "assistant":
        raise UserError(f"{where}: the conversation ends with the assistant's turn, so there is nothing to answer.")
    return messages


def _text(messages: Messages) -> str:
    """What people and rewards read: the user's message, or all turns of a longer conversation."""
    turns = [message for message in messages if message["role"] != "system"] or messages
    if len(turns) == 1:
        return str(turns[0]["content"])
    return "\n\n".join(f"{turn['role']}: {turn['content']}" for turn in turns)


def _ids(rows: list[Row]) -> list[str]:
    """Names that stay the same in every run: the rows' own unique ids, else a hash of the content and a count."""
    own = [str(row["id"]) for row in rows if row.get("id") is not None]
    if len(set(own)) == len(rows):
        return own
    ids, seen = [], Counter[str]()
    for row in rows:
        content = json.dumps(row, sort_keys=True, default=str)
        digest = hashlib.blake2b(content.encode(), digest_size=8).hexdigest()
        seen[digest] += 1
        ids.append(digest if seen[digest] == 1 else f"{digest}-{seen[digest]}")
    return ids
