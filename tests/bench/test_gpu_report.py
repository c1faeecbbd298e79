"""The report of a GPU machine: failing or hanging parts stop no others."""

import re
import tarfile
import types
from unittest import mock

import pytest
import torch

from bench import __main__ as bench
from bench import gpu_networks, gpu_report, kernels, launches, measure, memory
from bench.gpu_report import Part, Report
from bench.records import LAUNCHES


def summary(folder):
    return (folder / "summary.txt").read_text().splitlines()


def test_every_part_leaves_its_output_and_a_line(tmp_path):
    report = Report(tmp_path, seconds=100)
    report.run(Part("first", ["-c", "print('one'); print('two')"], 50))
    # A sanitizer that runs out of time has found no fault.
    out_of_time = "print('not passed: memcheck (exit status 124); 124 is out of time'); exit(2)"
    report.run(Part("memcheck", ["-c", out_of_time], 50))
    assert not report.has_failed
    report.run(Part("second", ["-c", "import os; os.write(2, b'bad\\n'); raise SystemExit(7)"], 50))
    assert report.has_failed
    slow = "import time\nprint('= 3 failed, 5 passed =')\nprint('a warning', flush=True)\n"
    report.has_failed = False
    report.run(Part("tests", ["-c", slow + "time.sleep(60)"], 2, at_once=True))
    assert report.has_failed
    report.end_s = 0
    report.run(Part("late", ["-c", "print(1)"], 50))
    first, _, second, third, last = summary(tmp_path)
    assert re.fullmatch(r"first: ok after \d+ s: two", first)
    assert re.fullmatch(r"second: exit status 7 after \d+ s: bad", second)
    assert re.fullmatch(r"tests: out of time after \d+ s: 3 failed, 5 passed", third)
    assert last == "late: no time left"
    log = (tmp_path / "log.txt").read_text()
    assert log.index("one\ntwo\n") < log.index("=== second: ") < log.index("bad\n")


def test_the_commands_are_understood(tmp_path, monkeypatch):
    def parts_of(has_gpu):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
        return {part.name: part for part in gpu_report.parts_of(tmp_path, ["--steps", "7"], 150)}

    properties = types.SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    parts = parts_of(True)
    assert parts.keys() - parts_of(False) == {name for name in parts if parts[name].needs_gpu}
    for name in ("bench", "bench-captured", "bench-triton", "bench-resident"):
        a = bench.arguments(parts[name].command[2:])
        assert (a.out, a.steps) == (tmp_path, 7)
        assert (a.contenders is None) == (name == "bench")
    measuring = [name for name, part in parts.items() if not part.at_once]
    order = ["networks", "bench-captured", "bench-resident", "more-networks", "host"]
    assert measuring[:5] == order and parts["check"].at_once and parts["compile"].at_once
    given = {n: memory.arguments(parts[n].command[2:]) for n in ("compile", *order[::3])}
    first, more = given["networks"].models, given["more-networks"].models
    assert [*first, *more] == given["compile"].models == list(gpu_networks.CASES)
    assert len({a.cache for a in given.values()}) == 1 and given["compile"].compile_only
    resident = parts["bench-resident"].environment
    assert resident == {"PREACT_KERNELS_RESIDENT_RUNS": "1"}
    assert parts["bench-resident"].command == parts["bench-captured"].command
    part = parts["kernels"]
    assert kernels.arguments(part.command[2:]).seconds < part.seconds <= 240
    assert part.environment["TEARDOWN_CUPTI"] == "0"
    for backend in ("cuda", "triton"):
        part = parts[f"launches-{backend}"]
        a = launches.arguments(part.command[2:])
        assert (a.backend, a.csv) == (backend, tmp_path / f"nvidia-h200{LAUNCHES}")
        assert part.environment["TEARDOWN_CUPTI"] == "0"
    assert parts["bench-triton"].environment["PREACT_KERNELS_BACKEND"] == "triton"
    files = [word for word in parts["tests"].command if word.startswith("tests/")]
    assert all((gpu_report.ROOT / name).is_file() for name in files)
    assert len(files) == len(set(files)) and files[0] == "tests/kernels/test_cuda_resident_run.py"
    assert "tests/kernels/test_cuda.py" in files
    assert not any(name.endswith(gpu_report.WITHOUT_GPU) for name in files)


def test_chosen_parts_run_and_libraries_are_built_first(tmp_path, monkeypatch, capsys):
    process = mock.Mock(return_value=0)
    monkeypatch.setattr(measure, "run_process", process)
    monkeypatch.setattr(gpu_report, "is_built", lambda: False)
    gpu_report.main([str(tmp_path), "--parts", "bench", "tests", "--networks", "resnet-20"])
    names = [line.split(":")[0] for line in summary(tmp_path)]
    assert names == ["sources", "build", "tests", "bench"]
    build, _, measured = [call.args[0] for call in process.call_args_list]
    assert build[1] == "setup.py"
    assert measured[-4:-1] == ["--networks", "resnet-20", "--time-limit"]
    with pytest.raises(SystemExit):
        gpu_report.main([str(tmp_path), "--parts", "no-such-part"])
    assert "--parts: expected some of check, tests, " in capsys.readouterr().err


def test_parts_import_the_packages_of_the_archive(tmp_path, monkeypatch):
    (tmp_path / "packed.py").write_text("print('imported')")
    archive = tmp_path / "packages.tar.xz"
    with tarfile.open(archive, "w:xz") as packed:
        packed.add(tmp_path / "packed.py", "packed.py")
    (tmp_path / "packed.py").unlink()
    monkeypatch.setattr(gpu_report, "PACKAGES", archive)
    monkeypatch.setattr(gpu_report, "is_built", lambda: True)
    part = Part("part", ["-c", "import packed"], 50)
    monkeypatch.setattr(gpu_report, "parts_of", lambda *_: [part])
    monkeypatch.setenv("PYTHONPATH", "/first")
    assert gpu_report.main([str(tmp_path / "out")]) == 0
    assert re.fullmatch(r"part: ok after \d+ s: imported", summary(tmp_path / "out")[-1])


def test_packages_that_are_installed_are_not_taken_from_the_archive(tmp_path):
    for name in ("pytest", "not_installed"):
        about = tmp_path / f"{name}-0.1.dist-info"
        (tmp_path / name).mkdir()
        about.mkdir()
        (tmp_path / name / "__init__.py").touch()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1\n")
        files = f"{name}/__init__.py", f"{about.name}/METADATA", "../../bin/tool"
        (about / "RECORD").write_text("".join(f"{file},,\n" for file in files))
    gpu_report.remove_installed(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        "not_installed",
        "not_installed-0.1.dist-info",
    }
