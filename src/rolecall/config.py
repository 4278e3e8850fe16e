"""The configuration of a run: typed, one TOML file plus ``--section.key value`` overrides. Imports no torch."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from rolecall.errors import UserError, nearest

Role = Literal["actor", "critic", "reference", "reward", "rollout"]
ROLES: tuple[str, ...] = get_args(Role)


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", validate_assignment=True, validate_default=True, allow_inf_nan=False)


class Model(Section):
    """The policy that is trained."""

    path: str = Field(
        "smollm2-135m-instruct",
        description="Folder or hub id of a Hugging Face causal model, or a built-in: smollm2-135m-instruct, tiny",
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="Of the weights that compute (masters are FP32); auto: bfloat16 on a GPU from 0.3B parameters on",
    )
    chat_template: str | None = Field(None, description="Jinja file that replaces the model's own chat template")


class Data(Section):
    """Prompts: where they come from and how a row becomes one."""

    path: str = Field(
        "rolecall.data.tasks:addition",
        description="A .jsonl, .json, .csv or .parquet file, a hub data set id, or `module:function` yielding rows",
    )
    split: str = Field("train", description="Split of a hub data set")
    prompt: str = Field(
        "{prompt}", description="User message over the row's fields, or one field that holds a list of messages"
    )
    answer: str = Field("answer", description="Field with the right answer, for rewards row['answer']; empty: none")
    system: str = Field("", description="System message; empty: none")
    eval_path: str = Field("", description="Held-out rows, read like `path`; empty: `holdout` rows taken out of `path`")
    eval_split: str = Field("test", description="Split of a hub data set in `eval_path`")
    holdout: int = Field(32, ge=0, description="Rows kept for evaluation when `eval_path` is empty")
    max_prompt_tokens: int = Field(512, ge=1, description="Longer prompts are left out (and reported), never cut")


class Reward(Section):
    """What a response is worth."""

    function: str = Field(
        "rolecall.rewards:last_number",
        description="`module:function` or `file.py:function`, called as f(prompts, responses, rows) -> list of floats",
    )
    timeout: float = Field(60.0, gt=0, description="Seconds that scoring one step's samples may take")


class Rollout(Section):
    """Generation."""

    engine: str = Field("native", description="native (on the Actor's own weights) or transformers (its generate)")
    prompts: int = Field(8, ge=1, description="Prompts a step")
    group_size: int = Field(8, ge=1, description="Responses a prompt (G)")
    max_tokens: int = Field(256, ge=1, description="Longest response")
    min_tokens: int = Field(0, ge=0, description="No end before so many tokens (evaluation only)")
    temperature: float = Field(1.0, ge=0, description="0 is greedy (evaluation only)")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus (evaluation only: training needs the full distribution)")
    top_k: int = Field(0, ge=0, description="Most likely tokens kept; 0: all (below all: evaluation only)")
    stop: list[str] = Field([], description="Strings that end a response")
    max_sequences: int = Field(256, ge=1, description="Sequences decoded at once; the rest wait")


class Algorithm(Section):
    """The objective. See docs/grpo.md and docs/ppo.md."""

    name: Literal["grpo", "ppo"] = Field("grpo", description="grpo: group baseline; ppo: Critic and GAE")
    scale: Literal["std", "none"] = Field("std", description="GRPO: divide by the group's deviation; none is Dr.GRPO")
    baseline: Literal["mean", "leave-one-out"] = Field("mean", description="GRPO: the group's mean, or RLOO's")
    gamma: float = Field(1.0, ge=0, le=1, description="PPO: discount")
    lam: float = Field(0.95, ge=0, le=1, description="PPO: lambda of GAE")
    whiten: bool = Field(True, description="PPO: advantages to mean 0 and deviation 1 over the batch's action tokens")
    clip_low: float = Field(0.2, gt=0, lt=1, description="Ratio clipped below 1 - clip_low")
    clip_high: float = Field(0.28, gt=0, description="Ratio clipped above 1 + clip_high")
    value_clip: float = Field(0.2, gt=0, description="PPO: how far a value may move from its old one in an update")
    aggregate: Literal["token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum-norm"] = Field(
        "token-mean", description="Mean over the global batch's action tokens; over sequences of their mean; Dr.GRPO's"
    )
    kl_beta: float | None = Field(None, ge=0, description="Weight of KL(policy, Reference); unset: GRPO 0, PPO 0.02")
    watch_kl: bool = Field(False, description="Measure the KL even at beta 0, on the first response to each prompt")
    kl_in: Literal["loss", "reward"] = Field("loss", description="Where the KL term enters; reward: PPO only")
    kl_estimator: Literal["k2", "k3"] = Field("k2", description="In the loss: k2's gradient is exact on-policy")
    kl_target: float | None = Field(None, gt=0, description="beta adapts towards this KL; unset: GRPO fixed, PPO 0.05")
    kl_horizon: float = Field(10_000, gt=0, description="Samples over which beta adapts")
    correction: Literal["truncate", "none"] = Field("truncate", description="Importance weights trainer over engine")
    correction_cap: float = Field(2.0, gt=1, description="Where importance weights are truncated")


class Optimizer(Section):
    """Updates of one trained role."""

    lr: float = Field(1e-6, gt=0, description="Learning rate after warm-up")
    betas: tuple[float, float] = Field((0.9, 0.999), description="Of AdamW")
    weight_decay: float = Field(0.0, ge=0, description="Of AdamW")
    grad_clip: float = Field(1.0, gt=0, description="Largest global gradient norm")
    warmup_steps: int = Field(0, ge=0, description="Linear warm-up, in optimizer steps")
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="After warm-up, down to 0")
    epochs: int = Field(1, ge=1, description="Passes over a step's samples")
    minibatches: int = Field(1, ge=1, description="Optimizer steps a pass")
    micro_tokens: int = Field(4096, ge=1, description="Most tokens in one forward and backward pass")
    checkpointing: bool = Field(False, description="Recompute activations in the backward pass to save memory")


class Critic(Optimizer):
    """Updates of the Critic (PPO)."""

    lr: float = Field(1e-5, gt=0, description="Learning rate after warm-up")
    warmup_only: int = Field(0, ge=0, description="First steps that train the Critic and leave the Actor as it is")


class Pool(Section):
    """Roles that share one process (and so one GPU)."""

    roles: list[Role] = Field(description="Which roles live here")
    gpus: float | None = Field(None, ge=0, description="GPUs reserved; unset: 1 for a role with a model, if there are")
    cpus: float = Field(0.0, ge=0, description="CPUs reserved")
    threads: int = Field(0, ge=0, description="torch threads; 0: the node's cores")


class Cluster(Section):
    """Where the roles run."""

    address: str = Field("", description="Of a running Ray cluster; empty: a local one, started and stopped by the run")
    pools: dict[str, Pool] = Field(
        {
            "train": Pool(roles=["actor", "critic", "reference", "rollout"]),
            "score": Pool(roles=["reward"]),
        },
        description="Pools by name; roles that the run does not need are not started",
    )
    strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = Field(
        "PACK", description="Ray's placement of pools on nodes"
    )
    timeout: float = Field(1800.0, gt=0, description="Seconds any call to a role may take before the run stops")


class Run(Section):
    """The run as a whole."""

    dir: str = Field("", description="Folder of the run; empty: runs/NAME of the configuration file")
    steps: int = Field(100, ge=1, description="Steps to train")
    seed: int = Field(0, ge=0, description="Of everything random")
    eval_every: int = Field(0, ge=0, description="Steps between evaluations; 0: only before and after")
    eval_samples: int = Field(4, ge=1, description="Responses a held-out prompt")
    save_every: int = Field(10, ge=1, description="Steps between checkpoints (the last step is always saved)")
    keep: int = Field(2, ge=1, description="Checkpoints kept")
    trackers: list[Literal["tensorboard", "wandb", "trackio", "mlflow"]] = Field(
        [], description="Where metrics go besides metrics.jsonl"
    )


class Config(Section):
    """A whole run. ``Config.load(path, overrides)`` reads one; ``Config(...)`` builds one in Python."""

    model: Model = Model()
    data: Data = Data()
    reward: Reward = Reward()
    rollout: Rollout = Rollout()
    algorithm: Algorithm = Algorithm()
    actor: Optimizer = Optimizer()
    critic: Critic = Critic()
    cluster: Cluster = Cluster()
    run: Run = Run()

    def __init__(self, **sections: Any):
        try:
            super().__init__(**sections)
        except ValidationError as error:
            raise UserError(_explain(error)) from None

    @classmethod
    def load(cls, path: str | Path, overrides: list[str] | dict[str, Any] | None = None) -> Config:
        """Read a TOML file and apply overrides.

        Args:
            path: the file. Relative paths inside it are relative to its folder.
            overrides: ``["--rollout.max_tokens", "64", ...]`` as on the command line, or ``{"rollout.max_tokens": 64}``

        Raises:
            UserError: no such file, not TOML, an unknown key (with the nearest valid name) or a bad value.
        """
        file = Path(path)
        if not file.is_file():
            raise UserError(f"Configuration file {str(path)!r} does not exist. Examples are in recipes/.")
        try:
            raw = tomllib.loads(file.read_text())
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise UserError(f"{path} is not valid TOML: {error}") from None
        for name, section in raw.items():
            if not isinstance(section, dict):
                raise UserError(f"{path}: {name} = {section!r} stands outside a section; those are written [{name}].")
        _anchor(raw, file.parent)
        given = overrides if isinstance(overrides, dict) else parse_overrides(overrides or [])
        for key, value in given.items():
            _put(raw, key, value)
        raw.setdefault("run", {}).setdefault("dir", f"runs/{file.stem}")
        return cls(**raw)

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        algorithm, rollout = self.algorithm, self.rollout
        if algorithm.kl_in == "reward" and algorithm.name == "grpo":
            raise ValueError("algorithm.kl_in = 'reward' needs algorithm.name = 'ppo'; GRPO takes its KL in the loss")
        if algorithm.kl_target is not None and self.kl_beta == 0:
            raise ValueError("algorithm.kl_target adapts kl_beta by factors, and it is 0; set algorithm.kl_beta too")
        if "" in rollout.stop:
            raise ValueError("rollout.stop holds an empty string, which would end every response at its first token")
        placed = [role for pool in self.cluster.pools.values() for role in pool.roles]
        if twice := sorted({role for role in placed if placed.count(role) > 1}):
            raise ValueError(f"cluster.pools places {', '.join(twice)} more than once; each role lives in one pool")
        if missing := [role for role in self.roles if role not in placed]:
            raise ValueError(f"cluster.pools places no {', '.join(missing)}; add the role to a pool")
        if rollout.min_tokens > rollout.max_tokens:
            raise ValueError(f"rollout.min_tokens is {rollout.min_tokens}, over max_tokens {rollout.max_tokens}")
        return self

    def check_trainable(self) -> None:
        """Refuse what can be generated from but not trained on.

        Raises:
            UserError: a GRPO group under 4, or sampling that the trainer's log-probabilities would not describe.
        """
        rollout = self.rollout
        if self.algorithm.name == "grpo" and rollout.group_size < 4:
            raise UserError(
                f"rollout.group_size is {rollout.group_size}: GRPO needs groups of at least 4 to estimate a baseline. "
                "Use a larger group, or PPO with a Critic (--algorithm.name ppo)."
            )
        cut = [
            f"rollout.{name} = {getattr(rollout, name)} (needs {neutral})"
            for name, neutral in (("top_p", 1.0), ("top_k", 0), ("min_tokens", 0))
            if getattr(rollout, name) != neutral
        ]
        if rollout.temperature == 0:
            cut.append("rollout.temperature = 0 (needs more than 0)")
        if cut:
            raise UserError(
                f"Training cannot use {', '.join(cut)}: the trainer's log-probabilities would describe another "
                "distribution than the one sampled from. Leave these for `rolecall eval`."
            )

    @property
    def kl_beta(self) -> float:
        """The (initial) KL weight: as configured, else 0 for GRPO and 0.02 for PPO."""
        if self.algorithm.kl_beta is not None:
            return self.algorithm.kl_beta
        return 0.02 if self.algorithm.name == "ppo" else 0.0

    @property
    def kl_target(self) -> float | None:
        """The KL that beta adapts towards: as configured, else fixed beta for GRPO and 0.05 for PPO."""
        if self.algorithm.kl_target is not None:
            return self.algorithm.kl_target
        return 0.05 if self.algorithm.name == "ppo" and self.kl_beta > 0 else None

    @property
    def roles(self) -> list[str]:
        """The roles that this run needs, in the order they are built."""
        needed = ["actor", "rollout", "reward"]
        if self.kl_beta > 0 or self.algorithm.watch_kl:
            needed.insert(1, "reference")
        if self.algorithm.name == "ppo":
            needed.insert(1, "critic")
        return needed

    def to_toml(self) -> str:
        """The whole configuration as TOML that ``load`` reads back."""
        lines: list[str] = []
        for name, section in self.model_dump(exclude_none=True).items():
            pools = section.pop("pools", {})
            lines += [f"[{name}]", *(f"{key} = {toml_value(value)}" for key, value in section.items()), ""]
            for pool, fields in pools.items():
                lines += [
                    f"[{name}.pools.{toml_value(pool)}]",
                    *(f"{key} = {toml_value(v)}" for key, v in fields.items()),
                    "",
                ]
        return "\n".join(lines)


def parse_overrides(arguments: list[str]) -> dict[str, Any]:
    """``["--rollout.max_tokens", "64", "--rollout.stop=['x']"]`` -> ``{"rollout.max_tokens": 64, ...}``."""
    given, rest = {}, list(arguments)
    while rest:
        option = rest.pop(0)
        if not option.startswith("--") or "." not in option:
            raise UserError(f"Cannot read {option!r}: overrides are written --section.key value.")
        key, equals, text = option[2:].partition("=")
        if not equals:
            if not rest:
                raise UserError(f"--{key} has no value: overrides are written --section.key value.")
            text = rest.pop(0)
        try:
            given[key.replace("-", "_")] = tomllib.loads(f"x = {text}")["x"]
        except tomllib.TOMLDecodeError:
            given[key.replace("-", "_")] = text
    return given


def _anchor(raw: dict[str, Any], folder: Path) -> None:
    """Make the file's relative paths absolute, where they name something that is there."""
    for section, key in (
        ("model", "path"), ("model", "chat_template"), ("data", "path"), ("data", "eval_path"), ("reward", "function")
    ):  # fmt: skip
        value = raw.get(section, {}).get(key)
        if isinstance(value, str) and value:
            name, colon, rest = value.partition(":")
            if (folder / name).exists():
                raw[section][key] = str((folder / name).resolve()) + colon + rest


def _put(raw: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    for parent in parents:
        raw = raw.setdefault(parent, {})
        if not isinstance(raw, dict):
            raise UserError(f"--{key}: {parent!r} is a value, not a section.")
    raw[last] = value


def _explain(error: ValidationError) -> str:
    """One line a mistake: where, what was given, what is allowed."""
    lines = []
    for item in error.errors():
        where = [str(part) for part in item["loc"]]
        if item["type"] == "extra_forbidden":
            fields = _fields_at(where[:-1])
            lines.append(f"Unknown configuration key {'.'.join(where)!r}.{nearest(where[-1], fields)}")
        elif not where:
            lines.append(item["msg"].removeprefix("Value error, "))
        else:
            lines.append(f"{'.'.join(where)} = {item['input']!r}: {item['msg']}.")
    return "\n".join(lines)


def _fields_at(where: list[str]) -> list[str]:
    kind: Any = Config
    for part in where:
        if part == "pools":
            return list(Pool.model_fields)
        kind = kind.model_fields[part].annotation
    return list(kind.model_fields)


def toml_value(value: Any) -> str:
    """``value`` as TOML writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        # TOML's strings are JSON's, but for DEL.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    return repr(value)
