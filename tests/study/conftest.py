"""Fixtures: few images, and figures that are not rendered."""

import pytest
from matplotlib.figure import Figure

from preact_kernels.study import data


@pytest.fixture(scope="module")
def few_digits():
    """300 digits to train on and 60 to test on, in this process."""
    found = {}
    for train, count in ((True, 300), (False, 60)):
        images = data.load_digits(train=train)
        few = {"images": images.images[:count], "labels": images.labels[:count]}
        found[train] = images._replace(**few)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "load_digits", lambda *, train=True: found[train])
        yield


@pytest.fixture
def undrawn(monkeypatch):
    """Saves figures without rendering them; `test_plots.py` checks their content."""
    monkeypatch.setattr(Figure, "savefig", lambda self, file, **_: file.write(b"\x89PNG"))
