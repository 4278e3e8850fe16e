"""The configuration: what it accepts, what it refuses and with which words, and its generated reference page."""

import runpy
import tomllib
from contextlib import nullcontext
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rolecall.config import PRESETS, Algorithm, Config
from rolecall.errors import UserError
from rolecall.overrides import parse_overrides

DOCS = Path(__file__).parents[1] / "docs"


def test_the_reference_page_is_up_to_date():
    page = runpy.run_path(str(DOCS / "configuration.py"))["page"]
    assert (DOCS / "configuration.md").read_text() == page(), "python docs/configuration.py > docs/configuration.md"


def test_the_docs_of_the_objectives_name_them_all():
    pages = "".join((DOCS / f"{page}.md").read_text() for page in ("objectives", "grpo", "ppo"))
    missing = [name for name in [*PRESETS, *Algorithm.model_fields] if name not in pages]
    assert not missing


def test_there_are_few_fields():
    assert sum(len(section.annotation.model_fields) for section in Config.model_fields.values()) < 120


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        (
            {"rollout": {"temperatur": 1}},
            "Unknown configuration key 'rollout.temperatur'. Did you mean 'rollout.temperature'?",
        ),
        ({"rolout": {}}, "Unknown configuration key 'rolout'. Did you mean 'rollout'?"),
        ({"rollout": {"xyz": 1}}, "Known: engine, group_size"),
        ({"algorithm": {"name": "gpo"}}, "algorithm.name = 'gpo': Input should be 'grpo', 'dr-grpo', 'dapo'"),
        ({"algorithm": {"name": ["grpo"]}}, "algorithm.name = ['grpo']: Input should be 'grpo'"),
        (
            {"algorithm": {"dynamic_sampling": True}},
            "algorithm.dynamic_sampling = True: Input should be a value, not true",
        ),
        ({"rollout": {"top_p": 0}}, "rollout.top_p = 0: Input should be greater than 0."),
        ({"rollout": {"min_tokens": 9, "max_tokens": 8}}, "rollout.min_tokens is 9, over max_tokens 8"),
        ({"algorithm": {"kl_target": 0.1}}, "algorithm.kl_target adapts kl_beta by factors, and it is 0"),
        ({"rollout": {"stop": ["x", ""]}}, "rollout.stop holds an empty string"),
        ({"actor": {"lr": float("inf")}}, "actor.lr = inf: Input should be a finite number."),
        ({"algorithm": {"baseline": "none"}}, "baseline = 'none' has no groups; take 'batch-std' or 'none'."),
        ({"algorithm": {"dual_clip": 1}}, "algorithm.dual_clip = 1.0 must be over 1"),
        ({"algorithm": {"dual_clip": 3, "loss": "cispo"}}, "with loss = 'clip'"),
        ({"algorithm": {"correction_floor": 0.5}}, "belongs to correction = 'mask'"),
        ({"algorithm": {"kl_in": "reward", "kl_beta": 0.1}}, "take scale = 'none' or kl_in = 'loss'."),
        ({"algorithm": {"name": "rloo", "ratio": "sequence"}}, "has no ratio, so ratio = 'sequence' would do nothing."),
        ({"cluster": {"pools": {"a": {"roles": ["actor"]}}}}, "cluster.pools places no rollout, reward"),
        ({"cluster": {"pools": {"a": {"roles": ["actor", "actor", "rollout", "reward"]}}}}, "places actor more than"),
        ({"cluster": {"pools": {"a": {"role": ["actor"]}}}}, "Did you mean 'cluster.pools.a.roles'?"),
        (
            {"rollout": {"tensor_parallel": 2}},
            "rollout.tensor_parallel = 2 is for rollout.engine = 'vllm', not 'native'",
        ),
        (
            {"rollout": {"sleep": 1}},
            "rollout.sleep = 1 is for engines with weights of their own (vllm, sglang), not 'native'",
        ),
        (
            {
                "rollout": {"engine": "vllm"},
                "cluster": {"pools": {"a": {"roles": ["actor", "rollout"]}, "a-rollout": {"roles": ["reward"]}}},
            },
            "the name 'a-rollout' is the one of another pool's process; take another",
        ),
    ],
)
def test_mistakes_name_the_key_the_value_and_the_way_out(sections, says):
    with pytest.raises(UserError) as error:
        Config(**sections)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("rollout", "says"),
    [
        ({"group_size": 3}, "rollout.group_size is 3: grpo needs groups of at least 4"),
        ({"top_p": 0.9}, "rollout.top_p = 0.9 (needs 1.0)"),
        ({"top_k": 50}, "rollout.top_k = 50 (needs 0)"),
        ({"min_tokens": 1}, "rollout.min_tokens = 1 (needs 0)"),
        ({"temperature": 0}, "rollout.temperature = 0"),
        ({"engine": "https://h/v1"}, "rollout.engine = 'https://h/v1': a server's weights cannot be synced"),
    ],
)
def test_training_refuses_what_is_for_evaluation(rollout, says):
    config = Config(rollout=rollout)  # fine for evaluation
    with pytest.raises(UserError) as error:
        config.check_trainable()
    assert says in str(error.value)


def test_ppo_needs_no_group():
    Config(algorithm={"name": "ppo"}, rollout={"group_size": 1}).check_trainable()


def test_defaults_follow_the_algorithm():
    grpo, ppo = Config(), Config(algorithm={"name": "ppo"})
    assert (grpo.algorithm.kl_beta, grpo.algorithm.kl_target) == (0.0, 0.0)
    assert (ppo.algorithm.kl_beta, ppo.algorithm.kl_target) == (0.02, 0.05)
    assert grpo.roles == ["actor", "rollout", "reward"]
    assert ppo.roles == ["actor", "critic", "reference", "rollout", "reward"]
    assert Config(algorithm={"name": "ppo", "kl_beta": 0.0}).algorithm.kl_target == 0
    assert Config(algorithm={"kl_beta": 0.1}).roles == ["actor", "reference", "rollout", "reward"]
    assert (grpo.actor.lr, grpo.critic.lr, grpo.algorithm.correction_cap) == (1e-6, 1e-5, 2.0)


@pytest.mark.parametrize("name", PRESETS)
def test_a_name_sets_what_is_not_set_and_the_saved_file_says_all(name):
    config = Config(algorithm={"name": name})
    assert PRESETS[name].items() <= config.algorithm.model_dump().items()
    assert Config(algorithm={"name": name, "clip_high": 0.5}).algorithm.clip_high == 0.5
    assert Config(**tomllib.loads(config.to_toml())) == config


def test_the_name_cannot_be_changed_under_its_fields():
    with pytest.raises(ValidationError, match="frozen"):
        Config().algorithm.name = "gspo"


def test_another_name_over_a_saved_file_brings_its_own_fields(tmp_path):
    """The saved file holds all of PPO's fields; only what was set beside its preset stays."""
    saved = tmp_path / "config.toml"
    saved.write_text(Config(algorithm={"name": "ppo", "lam": 0.9}).to_toml())
    gspo = Config(algorithm={"name": "gspo", "lam": 0.9}).algorithm
    assert Config.load(saved, ["--algorithm.name", "gspo"]).algorithm == gspo
    assert Config.load(saved, ["--algorithm.name", "ppo"]).algorithm.baseline == "critic"


@pytest.mark.parametrize(
    ("algorithm", "size", "ok"),
    [("rloo", 1, False), ("rloo", 2, True), ("dr-grpo", 3, False), ("reinforce++", 1, True), ("dapo", 4, True)],
)
def test_the_smallest_group_of_each_baseline(algorithm, size, ok):
    config = Config(algorithm={"name": algorithm}, rollout={"group_size": size})
    with nullcontext() if ok else pytest.raises(UserError, match=f"needs groups of at least {2 if size == 1 else 4}"):
        config.check_trainable()


def test_reinforce_takes_one_step_a_batch():
    with pytest.raises(UserError, match=r"actor.epochs is 1 and actor.minibatches 2. Set both to 1"):
        Config(algorithm={"name": "rloo"}, actor={"minibatches": 2}).check_trainable()


def test_a_group_of_one_is_always_flat():
    config = Config(algorithm={"name": "ppo", "dynamic_sampling": 1}, rollout={"group_size": 1})
    with pytest.raises(UserError, match="always flat"):
        config.check_trainable()


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("--run.dir=12", "run.dir", "12"),
        ("--run.dir=2026-11-29", "run.dir", "2026-11-29"),
        ("--run.steps=12", "run.steps", 12),
        ("--rollout.max-tokens=12", "rollout.max_tokens", 12),
    ],
)
def test_overrides_by_type(tmp_path, text, key, value):
    (tmp_path / "c.toml").touch()
    section, field = key.split(".")
    assert getattr(getattr(Config.load(tmp_path / "c.toml", [text]), section), field) == value


def test_the_names_of_pools_are_the_users():
    assert parse_overrides(["--cluster.pools.my-pool.gpus", "1"]) == {"cluster.pools.my-pool.gpus": 1}


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


def test_an_override_of_a_pool_is_of_the_usual_ones_where_the_file_has_none(tmp_path: Path):
    (tmp_path / "run.toml").write_text("[run]\nsteps = 3\n")
    config = Config.load(tmp_path / "run.toml", ["--cluster.pools.train.processes", "2"])
    assert config.cluster.pools["train"].processes == 2 and config.cluster.pools["score"].roles == ["reward"]
    apart = ["--cluster.pools.a.roles", "['actor', 'rollout']", "--cluster.pools.b.roles", "['reward']"]
    assert set(Config.load(tmp_path / "run.toml", apart).cluster.pools) == {"a", "b"}


def test_moments_of_8_bits_are_for_a_whole_model():
    pools = {"train": {"roles": ["actor", "rollout"], "processes": 2}, "score": {"roles": ["reward"]}}
    with pytest.raises(UserError, match=r"train\.processes = 2 shards the actor, and actor\.optimizer = 'adamw-8bit'"):
        Config(actor={"optimizer": "adamw-8bit"}, cluster={"pools": pools})
