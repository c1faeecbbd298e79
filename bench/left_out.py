"""A pytest plugin that leaves out the tests that a file names, one node id a line.

pytest's `--deselect=tests/a.py::test_b` also leaves out tests whose names begin with `test_b`.
"""

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the option."""
    parser.addoption("--left-out", help="file of the names")


@pytest.hookimpl(trylast=True)  # tests/conftest.py first chooses from all cases of a test
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out the tests."""
    names = set(Path(config.getoption("--left-out")).read_text().splitlines())
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in names])
    items[:] = [item for item in items if item.nodeid not in names]
