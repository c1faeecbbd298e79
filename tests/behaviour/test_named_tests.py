"""Tests that other files name exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = (".github", "bench", "csrc", "docs", "preact_kernels")
SUFFIXES = (".cpp", ".cu", ".cuh", ".h", ".md", ".py", ".yml")
NAME = re.compile(r"(?<![\w./-])(?:tests/)?(\w+/test_\w+)(?:\.py)?(?![\w*])")


def test_every_file_of_tests_that_is_named_exists():
    paths = [ROOT / name for name in ("Makefile", "README.md", "CONTRIBUTING.md", "setup.py")]
    paths += [p for name in FOLDERS for p in (ROOT / name).rglob("*") if p.suffix in SUFFIXES]
    named = {(path.name, name) for path in paths for name in NAME.findall(path.read_text())}
    assert len(named) > 10
    assert not [n for n in named if not (ROOT / "tests" / f"{n[1]}.py").exists()]


def test_every_test_that_is_named_for_other_instruction_sets_exists():
    from tests.kernels.cpu_variants.check import MORE_TESTS
    from tests.kernels.each_instruction_set import TESTS

    missing = []
    for tests in (TESTS, MORE_TESTS):
        for file, names in tests.items():
            text = (ROOT / "tests" / f"{file}.py").read_text()
            missing += [(file, n) for n in names if f"def test_{n}(" not in text]
    assert not missing
