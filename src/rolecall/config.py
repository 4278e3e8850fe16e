"""The configuration of a run: typed, one TOML file plus ``--section.key value`` overrides. Imports no torch."""

from __future__ import annotations

import math
import tomllib
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from rolecall.errors import UserError, nearest
from rolecall.overrides import parse_overrides, put, toml_value

Role = Literal["actor", "critic", "reference", "reward", "rollout"]
ROLES: tuple[str, ...] = get_args(Role)
SEPARATE_ENGINES = ("vllm", "sglang")  # with weights of their own: their Rollout has a process to itself
ENGINES = ("native", "transformers", *SEPARATE_ENGINES)


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        validate_assignment=True,
        validate_default=True,
        allow_inf_nan=False,
        coerce_numbers_to_str=True,  # --run.dir 12
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_switch_for_a_number(cls, given: Any, info: ValidationInfo) -> Any:
        """Refuse true and false where a number is wanted: as 1 and 0 they would set what nobody asked for."""
        if isinstance(given, bool) and cls.model_fields[info.field_name or ""].annotation is not bool:
            raise PydanticCustomError("switch", "Input should be a value, not true or false")
        return given


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
    batch_invariant: bool = Field(
        False,
        description="The native engine and the Actor compute the same bits on a GPU, at a cost, see "
        "docs/native-engine.md",
    )
    lora_rank: int = Field(0, ge=0, description="Train LoRA adapters of this rank, see docs/lora.md; 0: all weights")
    lora_alpha: int = Field(32, gt=0, description="LoRA: adapters count lora_alpha / lora_rank times")
    lora_targets: list[str] = Field(
        [], description="LoRA: names of the layers, such as q_proj; empty: all linear ones but the output embedding"
    )


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

    engine: str = Field(
        "native",
        description="native (on the Actor's own weights), transformers, vllm or sglang, or the URL of a vLLM server "
        "(evaluation only), see docs/engines.md",
    )
    prompts: int = Field(8, ge=1, description="Prompts a step")
    group_size: int = Field(8, ge=1, description="Responses a prompt (G)")
    max_tokens: int = Field(256, ge=1, description="Longest response")
    min_tokens: int = Field(0, ge=0, description="No end before so many tokens (evaluation only)")
    temperature: float = Field(1.0, ge=0, description="0 is greedy (evaluation only)")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus (evaluation only: training needs the full distribution)")
    top_k: int = Field(0, ge=0, description="Most likely tokens kept; 0: all (below all: evaluation only)")
    stop: list[str] = Field([], description="Strings that end a response")
    max_sequences: int = Field(256, ge=1, description="Sequences decoded at once; the rest wait")
    replicas: int = Field(
        1, ge=1, description="Engines that share a step's prompts, each in a process of its own with its pool's GPUs"
    )
    tensor_parallel: int = Field(1, ge=1, description="GPUs over which one engine's model is split (vllm)")
    sleep: Literal[0, 1, 2] = Field(
        0,
        description="What vllm and sglang free of their GPU while the roles train: nothing, all but a copy in host "
        "memory, all",
    )
    lora: Literal["merged", "adapter"] = Field(
        "merged", description="What of LoRA is sent to vllm: weights with the adapter in them, or the adapter alone"
    )

    @property
    def remote(self) -> bool:
        """Whether the engine is a server at a URL."""
        return self.engine.startswith(("http://", "https://"))


# What each name sets, where the configuration does not; everything else is at the field's own default.
PRESETS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "dr-grpo": {"scale": "none", "aggregate": "sequence-mean-token-sum-norm"},
    "dapo": {"dynamic_sampling": 4, "overlong_buffer": 0.2, "overlong_filter": True},
    "gspo": {"ratio": "sequence", "clip_low": 3e-4, "clip_high": 4e-4, "aggregate": "sequence-mean-token-mean"},
    "gspo-token": {
        "ratio": "sequence-token", "clip_low": 3e-4, "clip_high": 4e-4, "aggregate": "sequence-mean-token-mean"
    },
    "cispo": {"loss": "cispo", "clip_low": 1.0, "clip_high": 4.0},
    "rloo": {
        "baseline": "leave-one-out", "scale": "none", "loss": "reinforce", "aggregate": "sequence-mean-token-sum-norm"
    },
    "reinforce++": {"baseline": "none", "scale": "batch-std", "kl_in": "reward", "kl_beta": 0.01},
    "reinforce++-baseline": {"scale": "batch-std"},
    "reinforce": {
        "baseline": "none", "scale": "none", "loss": "reinforce", "aggregate": "sequence-mean-token-sum-norm"
    },
    "ppo": {"baseline": "critic", "scale": "batch-std", "kl_beta": 0.02, "kl_target": 0.05},
}  # fmt: skip


def _preset(algorithm: dict[str, Any]) -> dict[str, Any]:
    """What the name in this section sets; nothing for a name that is none, which is refused later."""
    return PRESETS.get(str(algorithm.get("name", "grpo")), {})


class Algorithm(Section):
    """The objective: `name` sets those of the fields below that make it, and each can be set on its own."""

    name: Literal[
        "grpo", "dr-grpo", "dapo", "gspo", "gspo-token", "cispo", "rloo", "reinforce++", "reinforce++-baseline",
        "reinforce", "ppo",
    ] = Field("grpo", frozen=True, description="Which objective, see docs/objectives.md")  # fmt: skip

    baseline: Literal["mean", "leave-one-out", "critic", "none"] = Field(
        "mean",
        description="What a reward is compared to: the group's mean, the others' mean, the Critic (GAE), nothing",
    )
    scale: Literal["std", "batch-std", "none"] = Field(
        "std",
        description="Advantages in deviations of the group; of the batch's action tokens (whitening); as they are",
    )
    gamma: float = Field(1.0, ge=0, le=1, description="Discount a token")
    lam: float = Field(0.95, ge=0, le=1, description="Lambda of GAE (critic)")
    reward_scale: float = Field(1.0, gt=0, description="Rewards are multiplied by it")
    reward_clip: float = Field(0.0, ge=0, description="Then limited to +- this; 0: not")
    dynamic_sampling: int = Field(0, ge=0, description="Rounds that replace flat groups by new ones (DAPO); 0: none")
    overlong_buffer: float = Field(
        0.0, ge=0, le=1, description="Last share of max_tokens over which the reward falls by 1 (DAPO); 0: none"
    )
    overlong_filter: bool = Field(False, description="Responses cut off at max_tokens do not train (DAPO)")

    loss: Literal["clip", "cispo", "reinforce"] = Field("clip", description="PPO's clipped ratio; CISPO; no ratio")
    ratio: Literal["token", "sequence", "sequence-token"] = Field(
        "token",
        description="policy / old policy: a token's own; its sequence's mean (GSPO); that with its own gradient",
    )
    clip_low: float = Field(0.2, gt=0, le=1, description="Ratio clipped below 1 - clip_low")
    clip_high: float = Field(0.28, gt=0, description="Ratio clipped above 1 + clip_high")
    dual_clip: float = Field(
        0.0, ge=0, description="Bound of the ratio where the advantage is negative, over 1; 0: none"
    )
    aggregate: Literal["token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum-norm"] = Field(
        "token-mean", description="Mean over the global batch's action tokens; over sequences of their mean; Dr.GRPO's"
    )
    entropy_coef: float = Field(0.0, ge=0, description="Weight of the entropy bonus in the loss")
    value_clip: float = Field(0.2, gt=0, description="Critic: how far a value may move from its old one in an update")
    value_coef: float = Field(1.0, gt=0, description="Critic: weight of its loss (c1); felt only through grad_clip")

    kl_beta: float = Field(0.0, ge=0, description="Weight of KL(policy, Reference) (c2); 0: no Reference")
    kl_in: Literal["loss", "reward"] = Field("loss", description="Where the KL term enters")
    kl_estimator: Literal["k2", "k3"] = Field("k2", description="In the loss: k2's gradient is that of the KL itself")
    kl_target: float = Field(0.0, ge=0, description="beta adapts towards this KL a token; 0: beta is fixed")
    kl_rule: Literal["proportional", "double"] = Field("proportional", description="How beta adapts")
    kl_horizon: float = Field(10_000, gt=0, description="Samples over which beta adapts (proportional)")
    watch_kl: bool = Field(False, description="Measure the KL even at beta 0, on the first response to each prompt")

    correction: Literal["truncate", "mask", "none"] = Field(
        "truncate",
        description="Importance weights trainer over engine: truncated at the cap, or 0 outside floor and cap",
    )
    correction_level: Literal["token", "sequence"] = Field("token", description="Weights of tokens, or of sequences")
    correction_cap: float = Field(2.0, gt=1, description="Largest importance weight")
    correction_floor: float = Field(0.0, ge=0, lt=1, description="Smallest that `mask` keeps")

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        preset = _preset(given)
        if given.get("kl_beta") == 0:  # then there is nothing to adapt
            preset = {key: value for key, value in preset.items() if key != "kl_target"}
        return preset | given

    @model_validator(mode="after")
    def _consistent(self) -> Algorithm:
        if self.scale == "std" and self.baseline in ("critic", "none"):
            raise ValueError(
                f"algorithm.scale = 'std' is the group's deviation, but baseline = {self.baseline!r} has no groups; "
                "take 'batch-std' or 'none'"
            )
        if self.scale == "std" and self.kl_in == "reward" and self.kl_beta > 0:
            raise ValueError(
                "algorithm.kl_in = 'reward' with scale = 'std': where a group's rewards are equal its deviation is the "
                "KL's alone, which would count in full whatever kl_beta; take scale = 'none' or kl_in = 'loss'"
            )
        if self.loss == "reinforce" and self.ratio != "token":
            raise ValueError(f"algorithm.loss = 'reinforce' has no ratio, so ratio = {self.ratio!r} would do nothing")
        if self.kl_target > 0 and self.kl_beta == 0:
            raise ValueError("algorithm.kl_target adapts kl_beta by factors, and it is 0; set algorithm.kl_beta too")
        if self.dual_clip and (self.dual_clip <= 1 or self.loss != "clip"):
            raise ValueError(f"algorithm.dual_clip = {self.dual_clip} must be over 1 (usually 3), with loss = 'clip'")
        if self.correction_floor and self.correction != "mask":
            raise ValueError("algorithm.correction_floor belongs to correction = 'mask'")
        return self


class Optimizer(Section):
    """Updates of one trained role."""

    optimizer: Literal["adamw", "adamw-8bit"] = Field(
        "adamw", description="AdamW, or with moments of a byte a value (torchao), see docs/training.md"
    )
    lr: float = Field(1e-6, gt=0, description="Learning rate after warm-up")
    betas: tuple[float, float] = Field((0.9, 0.999), description="Of AdamW")
    weight_decay: float = Field(0.0, ge=0, description="Of AdamW")
    grad_clip: float = Field(1.0, gt=0, description="Largest global gradient norm")
    warmup_steps: int = Field(0, ge=0, description="Linear warm-up, in optimizer steps")
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="After warm-up, down to 0")
    epochs: int = Field(1, ge=1, description="Passes over a step's samples")
    minibatches: int = Field(1, ge=1, description="Optimizer steps a pass")
    micro_tokens: int | None = Field(
        None, ge=1, description="Most tokens in one forward and backward pass; unset: what a GPU holds, 4096 on a CPU"
    )
    checkpointing: bool = Field(False, description="Recompute activations in the backward pass to save memory")


class Critic(Optimizer):
    """Updates of the Critic (PPO)."""

    lr: float = Field(1e-5, gt=0, description="Learning rate after warm-up")
    warmup_only: int = Field(0, ge=0, description="First steps that train the Critic and leave the Actor as it is")


class Pool(Section):
    """Roles that share one process and its GPU, or several over which their models are sharded."""

    roles: list[Role] = Field(description="Which roles live here")
    processes: int = Field(1, ge=1, description="Processes over which the roles' models are sharded (FSDP2)")
    gpus: float | None = Field(
        None,
        ge=0,
        description="GPUs reserved, for each process; unset: 1 a model (a Rollout alone: tensor_parallel), if there "
        "are",
    )
    cpus: float = Field(0.0, ge=0, description="CPUs reserved")
    threads: int = Field(0, ge=0, description="torch threads; 0: the node's cores, with a GPU at most 8")


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
    timeout: float = Field(1800.0, gt=0, description="Seconds any call to a role may take; then its process is killed")


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
            raw = tomllib.loads(file.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise UserError(f"{path} is not valid TOML: {error}") from None
        for name, section in raw.items():
            if not isinstance(section, dict):
                raise UserError(f"{path}: {name} = {section!r} stands outside a section; those are written [{name}].")
        _anchor(raw, file.parent)
        given = overrides if isinstance(overrides, dict) else parse_overrides(overrides or [])
        _change_preset(raw, given)
        pools = [key for key in given if key.startswith("cluster.pools.")]
        if pools and not any(key.endswith(".roles") for key in pools):  # they change pools, if not the file's the usual
            usual = {name: {"roles": pool.roles} for name, pool in Cluster().pools.items()}
            raw.setdefault("cluster", {}).setdefault("pools", usual)
        for key, value in given.items():
            put(raw, key, value)
        raw.setdefault("run", {}).setdefault("dir", f"runs/{file.stem}")
        return cls(**raw)

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        rollout = self.rollout
        if not rollout.remote and rollout.engine not in ENGINES:
            known = nearest(rollout.engine, ENGINES)
            raise UserError(f"rollout.engine: there is no engine {rollout.engine!r}.{known}")
        if "" in rollout.stop:
            raise ValueError("rollout.stop holds an empty string, which would end every response at its first token")
        placed = [role for pool in self.cluster.pools.values() for role in pool.roles]
        if twice := sorted({role for role in placed if placed.count(role) > 1}):
            raise ValueError(f"cluster.pools places {', '.join(twice)} more than once; each role lives in one pool")
        if missing := [role for role in self.roles if role not in placed]:
            raise ValueError(f"cluster.pools places no {', '.join(missing)}; add the role to a pool")
        self._check_processes()
        if rollout.min_tokens > rollout.max_tokens:
            raise ValueError(f"rollout.min_tokens is {rollout.min_tokens}, over max_tokens {rollout.max_tokens}")
        processes = self._processes()
        names = [name for name, _ in processes]
        if clash := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"cluster.pools: the name {clash[0]!r} is the one of another pool's process; take another")
        if rollout.tensor_parallel > 1 and rollout.engine != "vllm":
            raise ValueError(
                f"rollout.tensor_parallel = {rollout.tensor_parallel} is for rollout.engine = 'vllm', not "
                f"{rollout.engine!r}"
            )
        beside = next(pool.roles for _, pool in processes if "rollout" in pool.roles)
        if rollout.replicas > 1 and len(beside) > 1:
            raise ValueError(
                f"rollout.replicas = {rollout.replicas}: the {rollout.engine} engine shares a process with "
                f"{', '.join(sorted(set(beside) - {'rollout'}))}, of which there is one. Give rollout a pool of its "
                f"own in cluster.pools, or take an engine that has one anyway ({', '.join(SEPARATE_ENGINES)})"
            )
        if self.model.batch_invariant and (rollout.engine != "native" or self.model.lora_rank):
            raise ValueError(
                "model.batch_invariant is for rollout.engine = 'native' and no LoRA adapter, but rollout.engine = "
                f"{rollout.engine!r} and model.lora_rank = {self.model.lora_rank}"
            )
        if rollout.sleep and rollout.engine not in SEPARATE_ENGINES:
            raise ValueError(
                f"rollout.sleep = {rollout.sleep} is for engines with weights of their own "
                f"({', '.join(SEPARATE_ENGINES)}), not {rollout.engine!r}"
            )
        if rollout.lora == "adapter" and (rollout.engine != "vllm" or self.model.lora_rank == 0):
            raise ValueError(
                "rollout.lora = 'adapter' sends vllm what model.lora_rank trains, but rollout.engine = "
                f"{rollout.engine!r} and model.lora_rank = {self.model.lora_rank}"
            )
        if rollout.lora == "adapter" and rollout.sleep == 2:
            raise ValueError(
                "rollout.sleep = 2 drops vllm's weights, and with rollout.lora = 'adapter' no sync brings them back; "
                "take rollout.sleep = 1"
            )
        return self

    def _check_processes(self) -> None:
        """Refuse several processes where there is nothing to shard, or what cannot be beside a shard."""
        for name, pool in self.cluster.pools.items():
            roles = set(self.roles) & set(pool.roles)
            if pool.processes == 1 or not roles:
                continue
            several = f"cluster.pools.{name}.processes = {pool.processes} shards"
            if "reward" in roles:
                raise ValueError(f"{several} models, and a reward has none; give reward a pool of its own")
            if roles == {"rollout"}:
                raise ValueError(f"{several} no engine; for several engines set rollout.replicas")
            if "rollout" in roles and ("actor" not in roles or self.rollout.engine in SEPARATE_ENGINES):
                raise ValueError(
                    f"{several} {', '.join(sorted(roles - {'rollout'}))}; only a native or transformers engine can be "
                    "beside that, and only beside the actor. Give rollout a pool of its own"
                )
            for role in roles & {"actor", "critic"}:
                if (optimizer := getattr(self, role).optimizer) == "adamw-8bit":
                    raise ValueError(
                        f"{several} the {role}, and {role}.optimizer = {optimizer!r} is for a model that is whole in "
                        "its process; take adamw"
                    )
            if pool.gpus is not None and pool.gpus not in (0, 1):
                raise ValueError(f"{several} over GPUs of which each process needs one; gpus is {pool.gpus:g}")

    def check_trainable(self) -> None:
        """Refuse what can be generated from but not trained on.

        Raises:
            UserError: an engine that takes no weights, a group too small for its baseline, or sampling that the
                trainer's log-probabilities would not describe.
        """
        rollout, algorithm = self.rollout, self.algorithm
        if rollout.remote:
            raise UserError(
                f"rollout.engine = {rollout.engine!r}: a server's weights cannot be synced, so that after one step it "
                "would generate from an old policy. Train with --rollout.engine native, vllm or sglang, and keep "
                "the URL for `rolecall eval`."
            )
        smallest = {"mean": 4, "leave-one-out": 2}.get(algorithm.baseline, 1)
        if rollout.group_size < smallest:
            raise UserError(
                f"rollout.group_size is {rollout.group_size}: {algorithm.name} needs groups of at least {smallest} to "
                "estimate a baseline. Use a larger group, or --algorithm.name rloo (2 or more) or ppo (a Critic)."
            )
        if algorithm.loss == "reinforce" and self.actor.epochs * self.actor.minibatches > 1:
            raise UserError(
                "algorithm.loss = 'reinforce' has no ratio to the old policy, so a step's samples serve one optimizer "
                f"step, but actor.epochs is {self.actor.epochs} and actor.minibatches {self.actor.minibatches}. Set "
                "both to 1, or take algorithm.loss = 'clip'."
            )
        if algorithm.dynamic_sampling and rollout.group_size < 2:
            raise UserError(
                "A group of one is always flat: algorithm.dynamic_sampling needs rollout.group_size over 1."
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
    def roles(self) -> list[str]:
        """The roles that this run needs, in the order they are built."""
        needed = ["actor", "rollout", "reward"]
        if self.algorithm.kl_beta > 0 or self.algorithm.watch_kl:
            needed.insert(1, "reference")
        if self.algorithm.baseline == "critic":
            needed.insert(1, "critic")
        return needed

    @property
    def pools(self) -> dict[str, Pool]:
        """The pools that this run starts, a process each, with the roles that it needs, in the order they are built.

        One over whose processes roles are sharded is there as many times, NAME-0 and on.

        A Rollout whose engine has weights of its own always gets a process of its own, NAME-rollout, and half of the
        GPUs that its pool was given. Replicas are numbered, NAME-0 and on: each gets what a pool of the Rollout alone
        was given, or its part of that half.
        """
        return dict(self._processes())

    def _processes(self) -> list[tuple[str, Pool]]:
        """See ``pools``; here a name may come twice."""
        processes: list[tuple[str, Pool]] = []
        count = self.rollout.replicas
        for name, pool in self.cluster.pools.items():
            roles = sorted(set(self.roles) & set(pool.roles), key=self.roles.index)
            if roles == ["rollout"] or ("rollout" in roles and self.rollout.engine in SEPARATE_ENGINES):
                roles.remove("rollout")
                engine = pool.model_copy(update={"roles": ["rollout"]})
                if roles and pool.gpus is not None:
                    engine.gpus = _placeable(pool.gpus / 2 / count)
                    pool = pool.model_copy(update={"gpus": pool.gpus / 2})
                own = f"{name}-rollout" if roles else name
                processes += [(f"{own}-{number}" if count > 1 else own, engine) for number in range(count)]
            if roles:
                ranks = [f"{name}-{rank}" for rank in range(pool.processes)] if pool.processes > 1 else [name]
                processes += [(rank, pool.model_copy(update={"roles": roles})) for rank in ranks]
        return processes

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


def _placeable(gpus: float) -> float:
    """Whole GPUs, or such a part of one that several fill it: no engine's share lies across two."""
    return math.floor(gpus) if gpus >= 1 else 1 / math.ceil(1 / gpus) if gpus > 0 else 0.0


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


def _change_preset(raw: dict[str, Any], overrides: dict[str, Any]) -> None:
    """Drop what the file has from its own preset where the overrides name another (a run's config.toml has it all)."""
    written = raw.get("algorithm", {})
    if overrides.get("algorithm.name", written.get("name")) != written.get("name"):
        defaults = {key: field.default for key, field in Algorithm.model_fields.items()}
        preset = defaults | _preset(written)
        raw["algorithm"] = {key: value for key, value in written.items() if value != preset.get(key)}


def _explain(error: ValidationError) -> str:
    """One line a mistake: where, what was given, what is allowed."""
    lines = []
    for item in error.errors():
        where = [str(part) for part in item["loc"]]
        if item["type"] == "extra_forbidden":
            section, fields = "".join(f"{part}." for part in where[:-1]), _fields_at(where[:-1])
            lines.append(f"Unknown configuration key {section + where[-1]!r}.{nearest(where[-1], fields, section)}")
        elif item["type"] == "value_error":
            lines.append(item["msg"].removeprefix("Value error, ") + ".")
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
