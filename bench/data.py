"""Images to train on: CIFAR-10 or CIFAR-100 from a folder of yours, or scikit-learn's digits.

Nothing is downloaded. CIFAR is read in its binary format
(https://www.cs.toronto.edu/~kriz/cifar.html): records of one label byte (CIFAR-100: a coarse and
a fine one) and 3,072 pixels, in red, green and blue planes of 32x32. An archive is checked against
its published MD5 sum. Extracted files have no published sums, so their structure is checked: whole
records, labels in range, files of equal length, and the same number of images in every class.
"""

import hashlib
import os
import tarfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

ENVIRONMENT_VARIABLE = "PREACT_KERNELS_DATA"
_PIXELS = 3 * 32 * 32


class Images(NamedTuple):
    """A labelled data set."""

    images: Tensor  # [N, 3, 32, 32] float32, mean 0 and standard deviation 1 per channel
    labels: Tensor  # [N] int64
    classes: int
    may_flip: bool  # a mirrored image keeps its label
    name: str  # "cifar-10", "cifar-100" or "digits"


class _Distribution(NamedTuple):
    name: str
    folder: str
    archive: str
    archive_md5: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    label_bytes: int  # per record; the last one is read
    classes: int


_CIFAR = (
    _Distribution(
        name="cifar-10",
        folder="cifar-10-batches-bin",
        archive="cifar-10-binary.tar.gz",
        archive_md5="c32a1d4ab5d03f1284b67883e8d87530",
        train=tuple(f"data_batch_{i}.bin" for i in range(1, 6)),
        test=("test_batch.bin",),
        label_bytes=1,
        classes=10,
    ),
    _Distribution(
        name="cifar-100",
        folder="cifar-100-binary",
        archive="cifar-100-binary.tar.gz",
        archive_md5="03b5dce01913d631647c71ecec9e9cb8",
        train=("train.bin",),
        test=("test.bin",),
        label_bytes=2,
        classes=100,
    ),
)
_PUBLISHED_TRAIN, _PUBLISHED_TEST = 50_000, 10_000


def load(directory: str | Path | None = None, *, train: bool = True) -> Images:
    """CIFAR from `directory`, or the digits without one.

    Args:
        directory: see `load_cifar`; the default is the environment variable `PREACT_KERNELS_DATA`.
        train: the training set; False: the test set (of the digits, the last 297 scans).

    Raises:
        FileNotFoundError: the directory has no CIFAR files.
        ValueError: a file is truncated or is not CIFAR.
    """
    directory = directory or os.environ.get(ENVIRONMENT_VARIABLE)
    return load_cifar(directory, train=train) if directory else load_digits(train=train)


def load_cifar(directory: str | Path, *, train: bool = True) -> Images:
    """CIFAR-10 or CIFAR-100 in the binary format.

    Args:
        directory: has `data_batch_1.bin` to `data_batch_5.bin` and `test_batch.bin` (CIFAR-100:
            `train.bin` and `test.bin`), or the published folder or archive.
        train: the training set; False: the test set.

    Returns:
        The images, normalised by their own mean and standard deviation.

    Raises:
        FileNotFoundError: the directory or a file is missing.
        ValueError: a file is truncated or is not CIFAR.
    """
    root = Path(directory).expanduser()
    if not root.is_dir():
        raise FileNotFoundError(
            f"data: expected a directory with CIFAR files, found none at {root}"
        )
    for kind in _CIFAR:
        for folder in (root, root / kind.folder):
            if any((folder / name).exists() for name in (*kind.train, *kind.test)):
                return _from_files(kind, folder, train)
        if (root / kind.archive).exists():
            return _from_archive(kind, root / kind.archive, train)
    expected = "; or ".join(
        f"{', '.join((*kind.train, *kind.test))} (here, in {kind.folder}/, or in {kind.archive})"
        for kind in _CIFAR
    )
    raise FileNotFoundError(f"data: expected {expected}, found none of them in {root}")


def _from_files(kind: _Distribution, folder: Path, train: bool) -> Images:
    names = kind.train if train else kind.test
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise FileNotFoundError(
            f"data: expected {', '.join(names)} in {folder}, {', '.join(missing)} missing"
        )
    return _decoded(kind, {str(folder / n): (folder / n).read_bytes() for n in names}, train)


def _from_archive(kind: _Distribution, path: Path, train: bool) -> Images:
    found = hashlib.md5(path.read_bytes()).hexdigest()
    if found != kind.archive_md5:
        raise ValueError(
            f"{path}: expected MD5 {kind.archive_md5}, got {found}: "
            "truncated, or not the published archive"
        )
    contents = {}
    with tarfile.open(path) as archive:
        for name in kind.train if train else kind.test:
            member = archive.extractfile(f"{kind.folder}/{name}")
            contents[f"{path}:{name}"] = member.read()
    return _decoded(kind, contents, train)


def _decoded(kind: _Distribution, contents: dict[str, bytes], train: bool) -> Images:
    record_bytes = kind.label_bytes + _PIXELS
    parts = []
    for path, content in contents.items():
        if not content or len(content) % record_bytes:
            raise ValueError(
                f"{path}: expected whole records of {record_bytes} bytes, got {len(content)} "
                f"bytes: truncated, or not {kind.name}"
            )
        part = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(-1, record_bytes)
        if (part[:, kind.label_bytes - 1] >= kind.classes).any():
            raise ValueError(
                f"{path}: expected labels below {kind.classes}, got "
                f"{int(part[:, kind.label_bytes - 1].max())}: not {kind.name}"
            )
        parts.append(part)
    if len({len(part) for part in parts}) > 1:
        sizes = ", ".join(f"{path} {len(p)}" for path, p in zip(contents, parts, strict=True))
        raise ValueError(f"data: expected files of equal length, got records: {sizes}: truncated")
    records = torch.cat(parts)
    labels = records[:, kind.label_bytes - 1].long()
    published = _PUBLISHED_TRAIN if train else _PUBLISHED_TEST
    if len(records) == published:
        counts = torch.bincount(labels, minlength=kind.classes)
        if (counts != published // kind.classes).any():
            raise ValueError(
                f"data: expected {published // kind.classes} images of every class in {kind.name}, "
                f"got {int(counts.min())} to {int(counts.max())}: not the published files"
            )
    else:
        warnings.warn(
            f"data: {len(records)} records where {kind.name} has {published}: a part of it",
            stacklevel=3,
        )
    images = records[:, kind.label_bytes :].reshape(-1, 3, 32, 32).float() / 255
    return Images(_normalised(images), labels, kind.classes, True, kind.name)


def load_digits(*, train: bool = True) -> Images:
    """scikit-learn's 1,797 handwritten digits, 8x8, resized to 32x32 and three equal channels.

    Args:
        train: the first 1,500 scans; False: the other 297.

    Raises:
        ModuleNotFoundError: scikit-learn is not installed.
    """
    try:
        from sklearn import datasets
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "data: expected scikit-learn (its digits are the default images), found none; "
            f"install it or name a directory of CIFAR files in {ENVIRONMENT_VARIABLE}"
        ) from error
    bunch = datasets.load_digits()
    scans = torch.from_numpy(bunch.images).float()[:, None] / 16
    images = F.interpolate(scans, size=(32, 32), mode="bilinear", align_corners=False)
    images = _normalised(images).repeat(1, 3, 1, 1)
    part = slice(None, 1500) if train else slice(1500, None)
    labels = torch.from_numpy(bunch.target).long()
    return Images(images[part].clone(), labels[part].clone(), 10, False, "digits")


def _normalised(images: Tensor) -> Tensor:
    std, mean = torch.std_mean(images, dim=(0, 2, 3), keepdim=True)
    return (images - mean) / std.clamp_min(1e-6)


def augmented(images: Tensor, generator: torch.Generator, *, may_flip: bool) -> Tensor:
    """Images shifted by up to 4 pixels, filled with zeros, and mirrored with probability 1/2.

    Args:
        images: `[N, 3, H, W]`.
        generator: on the CPU.
        may_flip: False: never mirror.

    Returns:
        `[N, 3, H, W]`.
    """
    count, channels, height, width = images.shape
    padded = F.pad(images, (4, 4, 4, 4))
    top, left = torch.randint(0, 9, (2, count), generator=generator)
    rows = top[:, None] + torch.arange(height)
    columns = left[:, None] + torch.arange(width)
    if may_flip:
        flipped = torch.rand(count, generator=generator) < 0.5
        columns = torch.where(flipped[:, None], columns.flip(1), columns)
    index = torch.arange(count)[:, None, None, None]
    channel = torch.arange(channels)[None, :, None, None]
    return padded[index, channel, rows[:, None, :, None], columns[:, None, None, :]]


def batches(
    data: Images,
    batch: int,
    *,
    seed: int = 0,
    size: int = 32,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Shuffled batches; the incomplete last batch of each epoch is dropped.

    Args:
        data: the source.
        batch: images per batch.
        seed: of shuffling and augmentation.
        size: height and width in pixels; images are resized bilinearly.

    Yields:
        Images `[batch, 3, size, size]` float32 and labels `[batch]` int64, without end.

    Raises:
        ValueError: the set is smaller than one batch.
    """
    if not 1 <= batch <= len(data.labels):
        raise ValueError(f"batch: expected 1 to {len(data.labels)} ({data.name}), got {batch}")
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(data.labels), generator=generator)
        for indices in order.split(batch):
            if len(indices) < batch:
                continue
            images = augmented(data.images[indices], generator, may_flip=data.may_flip)
            if images.shape[-1] != size:
                images = F.interpolate(images, size=(size, size), mode="bilinear")
            yield images, data.labels[indices]
