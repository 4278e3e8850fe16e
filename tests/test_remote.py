"""The engine at a URL: vLLM's own server on the tiny model of the conformance suite, and servers that will not do."""

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import test_engines_conform as conform
from rolecall.config import Config
from rolecall.engines import create, remote
from rolecall.errors import RunError, UserError
from rolecall.loop.evaluation import evaluate_model
from rolecall.models import Loaded
from rolecall.roles.rollout import Rollout
from rolecall.samples import Sampling
from test_engines_conform import CONTEXT, GREEDY, LONG, PROMPTS, folder, model, requests  # noqa: F401 (fixtures)

RECIPES = Path(__file__).parents[1] / "recipes"


def config(folder: Path | str, url: str, **sections: Any) -> Config:  # noqa: F811
    return Config(model={"path": str(folder)}, rollout={"engine": url, "max_sequences": 24}, **sections)


# vLLM's own server.


class Server(NamedTuple):
    url: str
    process: subprocess.Popen
    log: Path

    def wait(self) -> None:
        """Until it answers."""
        deadline = time.monotonic() + 300
        while not answers(self.url.removesuffix("/v1") + "/health"):
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()[-3000:]
            time.sleep(0.5)


@contextmanager
def starting(folder: Path, *options: str) -> Iterator[Server]:  # noqa: F811
    """vLLM's server on the model in ``folder``, as somebody would start it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = os.environ | {
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_NUM_OF_RESERVED_CPU": "0", "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1", "TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }  # fmt: skip
    line = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--port", port]
    line += ["--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager", *options]
    log = folder.parent / f"server-{port}.log"
    with log.open("w") as output:
        process = subprocess.Popen(line, env=environment, stdout=output, stderr=output, start_new_session=True)
    try:
        yield Server(f"http://127.0.0.1:{port}/v1", process, log)
    finally:
        process.terminate()
        process.wait(60)
        with suppress(ProcessLookupError):  # what it could not end because it was killed itself
            os.killpg(process.pid, signal.SIGKILL)


def answers(url: str) -> bool:
    try:
        urllib.request.urlopen(url, timeout=5).close()
    except OSError:
        return False
    return True


@pytest.fixture(scope="module")
def servers(folder: Path) -> Iterator[dict[str, Server]]:  # noqa: F811
    """One as the documentation says; and one as most people start it, with a key and a shorter context."""
    told = "--logprobs-mode", "processed_logprobs", "--served-model-name", "ours"
    usual = "--max-model-len", "128", "--api-key", "sesame"
    with starting(folder, *told) as one, starting(folder, *usual) as other:  # side by side
        one.wait()
        other.wait()
        yield {"told": one, "usual": other}


@pytest.fixture(scope="module")
def served(servers: dict[str, Server]) -> str:
    return servers["told"].url


@pytest.fixture
def rollout(folder: Path, served: str) -> Rollout:  # noqa: F811
    return Rollout(config(folder, served + "/"))


INSTALLED = all(importlib.util.find_spec(name) for name in ("vllm", "uvicorn"))


def on_the_server(test: Any) -> Any:
    return pytest.mark.slow(pytest.mark.skipif(not INSTALLED, reason="vLLM's server is not installed")(test))


# What every engine does.
test_greedy = on_the_server(conform.test_greedy_is_the_most_likely_token_of_a_forward_pass)
test_logprobs = on_the_server(conform.test_log_probabilities_are_those_of_the_distribution_sampled_from)
test_frequencies = on_the_server(conform.test_tokens_come_as_often_as_they_are_likely)
test_samples = on_the_server(conform.test_what_a_sample_says_of_itself)
test_seeds = on_the_server(conform.test_the_same_seed_gives_the_same_sample_in_any_company)
test_ends = on_the_server(conform.test_any_end_token_ends_a_response_and_stays_in_it)
test_stops = on_the_server(conform.test_a_stop_string_ends_a_response_where_it_is_complete)
test_limit = on_the_server(conform.test_the_context_limit)
test_many = on_the_server(conform.test_500_requests_at_once)


@on_the_server
def test_evaluation_says_what_the_native_engine_says(served: str, folder: Path):  # noqa: F811
    def lines(engine: str) -> list[dict[str, Any]]:
        changed = {"model.path": str(folder), "rollout.engine": engine, "rollout.temperature": 0, "run.eval_samples": 1}
        return evaluate_model(Config.load(RECIPES / "grpo-tiny.toml", changed))

    assert lines(served) == lines("native")


@on_the_server
def test_a_server_as_most_people_start_it(servers: Any, folder: Path, model: Any, monkeypatch: Any):  # noqa: F811
    """Raw log-probabilities, a key, a context shorter than the model's; and it dies in the middle of responses."""
    url = servers["usual"].url
    with pytest.raises(UserError, match=r"/v1/models answered 401 Unauthorized.*\$OPENAI_API_KEY"):
        create(config(folder, url))
    monkeypatch.setenv("OPENAI_API_KEY", "sesame")
    rollout = Rollout(config(folder, url))
    plain = Sampling(max_tokens=24)
    for sampling in (plain, GREEDY):
        conform.check(rollout, model, rollout.generate(requests(sampling, n=4)), sampling)
    with pytest.raises(UserError, match=r"before temperature.*0\.6.*--logprobs-mode processed_logprobs"):
        rollout.generate(requests(Sampling(max_tokens=24, temperature=0.6)))
    (sample,) = rollout.generate(requests(GREEDY, prompts=[[7] * 127]))
    assert len(sample.response) == 1
    with pytest.raises(UserError, match="has 128 tokens; the model's context is 128"):
        rollout.generate(requests(GREEDY, prompts=[[7] * 128]))
    threading.Timer(0.5, servers["usual"].process.kill).start()
    with pytest.raises(RunError, match=f"{url}/completions does not answer: "):
        for _ in range(1000):
            rollout.generate(requests(plain, n=8))


# Servers that will not do, and none.


class Pretending(ThreadingHTTPServer):
    """Answers as a vLLM server with the tiny model, but for what a test changes.

    ``cards``: of its models; ``first``, ``later``: parts of the completion of a text, and of token ids; ``always``:
    status and text, sent whatever is asked; ``silent``: until it is set, nothing is answered.
    """

    def __init__(self, tokenizer: Any):
        super().__init__(("127.0.0.1", 0), Asked)
        self.url = f"http://127.0.0.1:{self.server_port}/v1"
        self.cards: list[dict[str, Any]] = [{"id": "tiny", "max_model_len": CONTEXT}]
        likely = {"token_ids": [7], "finish_reason": "length"}
        self.first = likely | {"prompt_token_ids": tokenizer(remote.TEXT, add_special_tokens=False)["input_ids"]}
        self.first["logprobs"] = {"token_logprobs": [0.0], "top_logprobs": [{"token_id:7": 0.0, "token_id:8": -9999.0}]}
        self.later = likely | {"logprobs": {"token_logprobs": [-0.5]}}
        self.always: tuple[int, str] | None = None
        self.silent = threading.Event()
        self.silent.set()
        self.asked: list[dict[str, Any]] = []

    def handle_error(self, *_: object) -> None:
        """Who asked has hung up."""


class Asked(BaseHTTPRequestHandler):
    server: Pretending

    def do_GET(self) -> None:
        self._answer({"data": self.server.cards})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(body)
        self._answer({"choices": [self.server.first if isinstance(body["prompt"], str) else self.server.later]})

    def _answer(self, usual: dict[str, Any]) -> None:
        self.server.silent.wait(60)
        status, text = self.server.always or (200, json.dumps(usual))
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def pretending(tiny: Loaded) -> Iterator[Pretending]:
    with Pretending(tiny.tokenizer) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield server
        server.silent.set()
        server.shutdown()


ONE = Sampling(max_tokens=1)


def test_what_it_asks_for_and_what_it_makes_of_the_answer(pretending: Pretending, tiny_path: Path):
    pretending.cards = [{"id": "an-adapter"}, {"id": "base", "root": str(tiny_path), "max_model_len": CONTEXT}]
    sampling = Sampling(max_tokens=1, temperature=0.5, top_p=0.9, top_k=3, min_tokens=4, stop=("3",))
    (request,) = requests(sampling, prompts=PROMPTS[:1], seed=5)
    (sample,) = Rollout(config(tiny_path, pretending.url)).generate([request])
    assert (sample.response, sample.logprobs, sample.versions, sample.text) == ([7], [-0.5], [(0, 1, 0)], "1")
    assert pretending.asked[1] == {
        "model": "base", "prompt": PROMPTS[0], "max_tokens": 1, "min_tokens": 1, "seed": request.sample_seed(0),
        "temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
        "frequency_penalty": 0.0, "stop": ["3"], "stop_token_ids": [1], "skip_special_tokens": False, "logprobs": 0,
        "return_token_ids": True,
    }  # fmt: skip


RAW = {"token_logprobs": [-0.2], "top_logprobs": [{"token_id:7": -0.2, "token_id:8": -1.7}]}
MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "no server of this kind": ({"always": (200, "<html>Welcome</html>")}, "/v1/models did not answer with JSON"),
    "another API": ({"always": (200, "[1]")}, "/v1/models did not answer as an OpenAI-compatible server"),
    "wrong path": ({"always": (404, "not here")}, "/v1/models answered 404 Not Found: not here .*ends in /v1"),
    "no model": ({"cards": []}, "/v1/models lists no models"),
    "several": ({"cards": [{"id": "a"}, {"id": "b"}]}, "/v1 serves a, b; set model.path to one of these names"),
    "context": ({"cards": [{"id": "a", "max_model_len": 512}]}, "serves 'a', .* its context is 512 tokens, .* 256"),
    "SGLang": ({"cards": [{"id": "a", "owned_by": "sglang"}]}, "is SGLang's.*take --rollout.engine sglang"),
    "no ids": ({"first": {"text": "7"}}, "gives text without its token ids.*vLLM's server gives them, from 0.10.2 on"),
    "tokenizer": ({"first": {"token_ids": [7], "prompt_token_ids": [0] * 9}}, "not the model .* as 0, 0, .* as 5, "),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_server_that_will_not_do(pretending: Pretending, tiny_path: Path, mistake: str):
    changes, says = MISTAKES[mistake]
    vars(pretending).update(changes)
    with pytest.raises(UserError, match=says):
        create(config(tiny_path, pretending.url))


def test_no_server(tiny_path: Path):
    with pytest.raises(
        UserError, match=r"http://127\.0\.0\.1:1/v1/models does not answer: .*refused.*`vllm serve MODEL`"
    ):
        create(config(tiny_path, "http://127.0.0.1:1/v1"))


def test_nothing_hangs(pretending: Pretending, tiny_path: Path, monkeypatch: pytest.MonkeyPatch):
    engine = create(config(tiny_path, pretending.url, cluster={"timeout": 0.3}))
    pretending.silent.clear()
    with pytest.raises(RunError, match=r"/v1/completions does not answer: nothing within 0\.3 s"):
        engine.generate(requests(ONE, n=100))
    monkeypatch.setattr(remote, "GREETING", 0.2)
    with pytest.raises(UserError, match=r"/v1/models does not answer: nothing within 0\.2 s"):
        create(config(tiny_path, pretending.url))


@pytest.mark.parametrize(
    ("sampling", "refused"),
    [(ONE, False), (Sampling(1, temperature=0), False)]
    + [(Sampling(1, **one), True) for one in ({"temperature": 0.7}, {"top_p": 0.9}, {"top_k": 4}, {"min_tokens": 1})],
)
def test_raw_log_probabilities_will_do_where_they_are_those_sampled_from(
    pretending: Pretending, tiny_path: Path, sampling: Sampling, refused: bool
):
    pretending.first |= {"logprobs": RAW}
    engine = create(config(tiny_path, pretending.url))
    with pytest.raises(UserError, match="--logprobs-mode processed_logprobs") if refused else nullcontext():
        assert len(engine.generate(requests(sampling))) == 4


def test_a_response_that_the_server_cut_off(pretending: Pretending, tiny_path: Path):
    engine = create(config(tiny_path, pretending.url))
    with pytest.raises(RunError, match=r"ended a response to prompt 'prompt-0' after 1 of 24 tokens \(length\)"):
        engine.generate(requests(LONG))


def test_it_takes_no_weights(pretending: Pretending, tiny_path: Path):
    engine = create(config(tiny_path, pretending.url))
    calls = partial(engine.expect, []), engine.start_update, partial(engine.write, []), partial(engine.finish_update, 1)
    for call in calls:
        with pytest.raises(RunError, match="a server of its own, whose weights stay as they are"):
            call()
    assert engine.version == 0
