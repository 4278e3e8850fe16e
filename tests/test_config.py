"""The configuration: what it accepts, what it refuses and with which words, and its generated reference page."""

from __future__ import annotations

import runpy
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolecall.config import Config, parse_overrides
from rolecall.errors import UserError

DOCS = Path(__file__).parents[1] / "docs"


def test_the_reference_page_is_up_to_date():
    page = runpy.run_path(str(DOCS / "configuration.py"))["page"]
    assert (DOCS / "configuration.md").read_text() == page(), "python docs/configuration.py > docs/configuration.md"


def test_there_are_few_fields():
    assert sum(len(section.annotation.model_fields) for section in Config.model_fields.values()) < 120


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"rollout": {"temperatur": 1}}, "Unknown configuration key 'rollout.temperatur'. Did you mean 'temperature'?"),
        ({"rolout": {}}, "Unknown configuration key 'rolout'. Did you mean 'rollout'?"),
        ({"rollout": {"xyz": 1}}, "Known: engine, group_size"),
        ({"algorithm": {"name": "gpo"}}, "algorithm.name = 'gpo': Input should be 'grpo' or 'ppo'."),
        ({"rollout": {"top_p": 0}}, "rollout.top_p = 0: Input should be greater than 0."),
        ({"rollout": {"min_tokens": 9, "max_tokens": 8}}, "rollout.min_tokens is 9, over max_tokens 8"),
        ({"algorithm": {"kl_target": 0.1}}, "algorithm.kl_target adapts kl_beta by factors, and it is 0"),
        ({"rollout": {"stop": ["x", ""]}}, "rollout.stop holds an empty string"),
        ({"actor": {"lr": float("inf")}}, "actor.lr = inf: Input should be a finite number."),
        ({"algorithm": {"kl_in": "reward"}}, "algorithm.kl_in = 'reward' needs algorithm.name = 'ppo'"),
        ({"cluster": {"pools": {"a": {"roles": ["actor"]}}}}, "cluster.pools places no rollout, reward"),
        ({"cluster": {"pools": {"a": {"roles": ["actor", "actor", "rollout", "reward"]}}}}, "places actor more than"),
        ({"cluster": {"pools": {"a": {"role": ["actor"]}}}}, "Did you mean 'roles'?"),
    ],
)
def test_mistakes_name_the_key_the_value_and_the_way_out(sections, says):
    with pytest.raises(UserError) as error:
        Config(**sections)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("rollout", "says"),
    [
        ({"group_size": 3}, "rollout.group_size is 3: GRPO needs groups of at least 4"),
        ({"top_p": 0.9}, "rollout.top_p = 0.9 (needs 1.0)"),
        ({"top_k": 50}, "rollout.top_k = 50 (needs 0)"),
        ({"min_tokens": 1}, "rollout.min_tokens = 1 (needs 0)"),
        ({"temperature": 0}, "rollout.temperature = 0"),
    ],
)
def test_training_refuses_what_the_trainer_cannot_describe(rollout, says):
    config = Config(rollout=rollout)  # fine for evaluation
    with pytest.raises(UserError) as error:
        config.check_trainable()
    assert says in str(error.value)


def test_ppo_needs_no_group():
    Config(algorithm={"name": "ppo"}, rollout={"group_size": 1}).check_trainable()


def test_defaults_follow_the_algorithm():
    grpo, ppo = Config(), Config(algorithm={"name": "ppo"})
    assert (grpo.kl_beta, grpo.kl_target, grpo.roles) == (0.0, None, ["actor", "rollout", "reward"])
    assert (ppo.kl_beta, ppo.kl_target) == (0.02, 0.05)
    assert ppo.roles == ["actor", "critic", "reference", "rollout", "reward"]
    assert Config(algorithm={"name": "ppo", "kl_beta": 0.0}).kl_target is None
    assert Config(algorithm={"kl_beta": 0.1}).roles == ["actor", "reference", "rollout", "reward"]
    assert (grpo.actor.lr, grpo.critic.lr, grpo.algorithm.correction_cap) == (1e-6, 1e-5, 2.0)


def test_a_file_with_overrides(tmp_path):
    (tmp_path / "data.jsonl").write_text("{}")
    (tmp_path / "own.toml").write_text('[data]\npath = "data.jsonl"\n[rollout]\nmax_tokens = 8\n')
    config = Config.load(tmp_path / "own.toml", ["--rollout.max_tokens", "16", "--rollout.stop=['\\n', 'x']"])
    assert config.data.path == str(tmp_path / "data.jsonl")  # relative to the file
    assert config.rollout.max_tokens == 16
    assert config.rollout.stop == ["\\n", "x"]
    assert config.run.dir == "runs/own"


def test_a_file_that_is_not_there_or_not_toml(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        Config.load(tmp_path / "no.toml")
    (tmp_path / "bad.toml").write_text("[rollout\n")
    with pytest.raises(UserError, match="not valid TOML"):
        Config.load(tmp_path / "bad.toml")
    (tmp_path / "bad.toml").write_bytes("[data]\nsystem = 'é'".encode("latin-1"))
    with pytest.raises(UserError, match="not valid TOML"):
        Config.load(tmp_path / "bad.toml")
    (tmp_path / "bad.toml").write_text('model = "tiny"\n')
    with pytest.raises(UserError, match="model = 'tiny' stands outside a section"):
        Config.load(tmp_path / "bad.toml")


@pytest.mark.parametrize("arguments", [["--rollout.max_tokens"], ["rollout.max_tokens", "1"], ["--steps", "1"]])
def test_overrides_that_cannot_be_read(arguments):
    with pytest.raises(UserError):
        parse_overrides(arguments)


@given(st.text(st.characters(exclude_categories=["Cs"])), st.lists(st.text(st.characters(exclude_categories=["Cs"]))))
def test_toml_round_trip(system, stop):
    pools = {'a "b" c': {"roles": ["actor", "rollout", "reference", "critic", "reward"]}}
    sections = {"data": {"system": system}, "rollout": {"stop": [text for text in stop if text]}}
    config = Config(**sections, algorithm={"name": "ppo", "kl_beta": 0.3}, cluster={"pools": pools})
    assert Config(**tomllib.loads(config.to_toml())) == config
