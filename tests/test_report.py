"""The HTML report, from real log files."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from rolecall.config import Config
from rolecall.errors import UserError
from rolecall.telemetry import logs, report

HOSTILE = "<script>alert('x')</script> & <b>7</b>"


def step_metrics(step: int) -> dict[str, float]:
    stages = {"generate": 3.0, "score": 0.5, "reference": 0.0, "advantages": 0.25, "update": 2.0, "sync": 0.25}
    return {
        "reward/mean": step / 100,
        "kl": 0.01,
        "policy/grad_norm": 1.0,
        "tokens_per_second": 100.0 * step,
        "memory/peak_gb": 3.0 + step / 10,
        "time/step": 8.0,
    } | {f"time/{stage}": seconds for stage, seconds in stages.items()}


def make_run(folder: Path, steps: int, total: int = 20) -> Path:
    folder.mkdir()
    config = Config(run={"steps": total}, reward={"function": "my.py:f"})
    (folder / "config.toml").write_text(config.to_toml())
    (folder / "versions.json").write_text('{"torch": "2.13.0"}')
    log = logs.MetricsLog(folder, config)
    (folder / "metrics.jsonl").touch()
    for step in range(1, steps + 1):
        log.step(step, step_metrics(step))
        sample = {"prompt": "2 + 5?", "response": HOSTILE, "reward": 0.5, "group_id": 7, "finish": "stop"}
        log.samples(step, [sample, sample | {"response": "7", "reward": 1.0}])
    for step, reward in ((0, 0.25), (steps, 0.75)):
        record = {"step": step, "prompt_id": "p", "prompt": "1 < 2?", "response": f"answer {step}", "reward": reward}
        logs.append(folder / "eval.jsonl", [record])
    return folder


class Page(HTMLParser):
    """The tags, what they refer to, and the text of a page; complains about tags that do not match."""

    def __init__(self, path: Path):
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))
        assert self._open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.links += [value for key, value in attributes if key in ("src", "href", "xlink:href")]
        if tag != "meta":
            self._open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        self.handle_endtag(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if "style" not in self._open:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def test_a_finished_run(tmp_path):
    run = make_run(tmp_path / "my-run", steps=20)
    path = report.write(run)
    assert path == run / "report.html"
    page = Page(path)
    for part in ("my-run", "0.750 0.250 at the start", "0.200 0.010 at the start", "20 of 20"):
        assert part in page.text
    # 20 steps of 8 s; the median of 100, 200, ... 2000 tokens/s; the largest of 3.1 ... 5.0 GB.
    for part in ("0:02:40 8.0 s a step", "1,050 generated", "5.0 GB"):
        assert part in page.text
    for part in ("generate 60.0 s, 38 %", "update 40.0 s, 25 %", "reference 0.0 s, 0 %", "between stages 40.0 s, 25 %"):
        assert part in page.text
    assert "1 < 2? answer 0 0.25 answer 20 0.75" in page.text
    assert "Step 20 2 samples, mean reward 0.750" in page.text
    assert 'function = "my.py:f"' in page.text and "torch 2.13.0" in page.text
    assert page.tags.count("svg") == 5  # reward, held-out, KL, gradient norm and the timeline


def test_what_a_model_writes_stays_text(tmp_path):
    page = Page(report.write(make_run(tmp_path / "run", steps=2)))
    assert "script" not in page.tags
    assert HOSTILE in page.text


def test_nothing_is_fetched(tmp_path):
    path = report.write(make_run(tmp_path / "run", steps=3))
    page = Page(path)
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    assert all(link.startswith("#") for link in page.links)  # matplotlib's markers within the page
    assert not re.search(r"url\((?!#)|@import", path.read_text())


def test_plots_follow_light_and_dark(tmp_path):
    text = report.write(make_run(tmp_path / "run", steps=3)).read_text()
    assert "prefers-color-scheme: dark" in text
    plots = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    colors = set(re.findall(r"#[0-9a-f]{6}\b", "".join(plots)))
    assert colors <= set(logs.STAGE_COLORS.values())
    assert all("var(--ink)" in plot and "var(--lines)" in plot for plot in plots)


@pytest.mark.parametrize("steps", [0, 1])
def test_a_run_that_has_just_begun(tmp_path, steps):
    page = Page(report.write(make_run(tmp_path / "run", steps)))
    assert f"{steps} of 20" in page.text
    assert ("Where the time went" in page.text) == (steps > 0)


def test_an_unfinished_evaluation_and_a_torn_line(tmp_path):
    run = make_run(tmp_path / "run", steps=3)
    (run / "eval.jsonl").unlink()
    (run / "versions.json").unlink()
    for name in ("metrics.jsonl", "samples.jsonl"):
        with open(run / name, "a") as file:
            file.write('{"step": 4, "rew')
    page = Page(report.write(run))
    assert "3 of 20" in page.text and "Held-out accuracy" not in page.text


def test_a_long_run_is_thinned_out(tmp_path):
    run = make_run(tmp_path / "run", steps=1500, total=1500)
    path = report.write(run)
    page = Page(path)
    assert path.stat().st_size < 2_000_000
    assert page.tags.count("details") == report.STEPS_SHOWN + 2
    assert "Step 1 2 samples" in page.text and "Step 1500 2 samples" in page.text
    assert "3:20:00" in page.text


def test_binning_keeps_the_mean():
    assert logs.binned([1.0, 3.0], 300) == [1.0, 3.0]
    bins = logs.binned([float(value) for value in range(600)], 300)
    assert len(bins) == 300 and bins[:2] == [0.5, 2.5] and bins[-1] == 598.5
    assert logs.binned([], 300) == []


def test_the_same_run_gives_the_same_report(tmp_path):
    run = make_run(tmp_path / "run", steps=2)
    first = report.write(run).read_bytes()
    assert report.write(run).read_bytes() == first
    assert not list(run.glob("*.new"))


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"There is no run in '.*nowhere'"):
        report.write(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"holds no metrics\.jsonl"):
        report.write(tmp_path)


def test_every_curve_is_explained():
    documented = re.findall(r"`([\w/]+)`", (Path(__file__).parents[1] / "docs" / "metrics.md").read_text())
    assert {name for _, _, names in report.CURVES for name in names} <= set(documented)
