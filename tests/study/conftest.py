"""Fixtures: few images."""

import pytest


@pytest.fixture(scope="module")
def few_digits():
    """300 digits to train on and 60 to test, in this process."""
    data = pytest.importorskip("preact_kernels.study.data")
    load = data.load_digits

    def load_few(*, train=True):
        images, count = load(train=train), 300 if train else 60
        return images._replace(images=images.images[:count], labels=images.labels[:count])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "load_digits", load_few)
        yield
