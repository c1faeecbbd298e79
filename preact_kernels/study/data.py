"""Images to train on: CIFAR-10 or CIFAR-100 from a local folder, or scikit-learn's digits.

Nothing is downloaded. CIFAR is read in its binary format
(https://www.cs.toronto.edu/~kriz/cifar.html): records of one label byte (CIFAR-100: a coarse and
a fine label) and 3,072 pixels, in red, green and blue planes of 32x32. Archives are checked against
the published MD5 sums. There are no published sums of extracted files, so their structure is
checked: whole records, labels in range, files of equal length, and equal numbers of images in all
classes.
"""

import hashlib
import os
import tarfile
import warnings
import zlib
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

ENVIRONMENT_VARIABLE = "PREACT_KERNELS_DATA"
_PIXELS = 3 * 32 * 32


class Images(NamedTuple):
    """A labelled data set."""

    images: Tensor  # [N, 3, H, W] float32, normalised by the training set
    labels: Tensor  # [N] int64
    classes: int
    may_flip: bool  # a mirrored image keeps its label
    name: str  # "cifar-10", "cifar-100" or "digits"

    def to(self, device: torch.device | str) -> "Images":
        return self._replace(images=self.images.to(device), labels=self.labels.to(device))

    def checksum(self) -> int:
        labels = zlib.crc32(self.labels.numpy().tobytes())
        return zlib.crc32(self.images.contiguous().numpy().data, labels)

    def resized(self, size: int) -> "Images":
        """Returns the data set with images of `size x size` pixels, resized with antialiasing."""
        if self.images.shape[-1] == size:
            return self
        resize = {"size": (size, size), "mode": "bilinear", "antialias": True}
        return self._replace(images=F.interpolate(self.images, **resize))  # type: ignore[arg-type]


class _Distribution(NamedTuple):
    name: str
    folder: str
    archive: str
    archive_md5: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    label_bytes: int  # per record; only the last is read
    classes: int
    mean: tuple[float, ...]  # red, green and blue of the training set, from 0 to 1
    std: tuple[float, ...]


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
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
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
        mean=(0.5071, 0.4865, 0.4409),
        std=(0.2673, 0.2564, 0.2762),
    ),
)
_PUBLISHED_TRAIN, _PUBLISHED_TEST = 50_000, 10_000
_TEST_DIGITS = 297


def load(directory: str | Path | None = None, *, train: bool = True) -> Images:
    """Loads CIFAR from `directory`, or scikit-learn's digits without a directory.

    Args:
        directory: see `load_cifar`; None: the environment variable `PREACT_KERNELS_DATA`.
        train: the training set; False: the test set.

    Raises:
        FileNotFoundError: the directory has no CIFAR files.
        ValueError: a file is truncated or is not CIFAR.
    """
    directory = directory or os.environ.get(ENVIRONMENT_VARIABLE)
    return load_cifar(directory, train=train) if directory else load_digits(train=train)


def load_cifar(directory: str | Path, *, train: bool = True) -> Images:
    """Loads CIFAR-10 or CIFAR-100 in the binary format.

    Args:
        directory: contains `data_batch_1.bin` to `data_batch_5.bin` and `test_batch.bin`
            (CIFAR-100: `train.bin` and `test.bin`), or the published folder or archive.
        train: the training set; False: the test set.

    Returns:
        The images, normalised by the mean and standard deviation of the training set.

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
            contents[f"{path}:{name}"] = member.read() if member else b""
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
    mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in (kind.mean, kind.std))
    return Images((images - mean) / std, labels, kind.classes, True, kind.name)


def load_digits(*, train: bool = True) -> Images:
    """Loads scikit-learn's 1,797 handwritten digits, resized to 32x32, in three equal channels.

    Args:
        train: the 1,500 training scans; False: the other 297, spread evenly over the whole set, so
            that both parts have digits of all writers.

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
    is_test = torch.zeros(len(scans), dtype=torch.bool)
    is_test[(torch.arange(_TEST_DIGITS) + 0.5).mul(len(scans) / _TEST_DIGITS).long()] = True
    std, mean = torch.std_mean(images[~is_test])
    images = ((images - mean) / std).repeat(1, 3, 1, 1)
    labels = torch.from_numpy(bunch.target).long()
    part = ~is_test if train else is_test
    return Images(images[part], labels[part], 10, False, "digits")


def shifted(images: Tensor, top: Tensor, left: Tensor, flipped: Tensor, limit: int) -> Tensor:
    """Shifts each image, fills with zeros, and mirrors some images.

    Args:
        images: `[N, C, H, W]`.
        top: `[N]` rows to shift up by, plus `limit`; from 0 to `2 * limit`.
        left: `[N]` columns to shift left by, plus `limit`; from 0 to `2 * limit`.
        flipped: `[N]` bool: which images are mirrored.
        limit: the largest shift in pixels.

    Returns:
        `[N, C, H, W]`.
    """
    count, channels, height, width = images.shape
    device = images.device
    padded = F.pad(images, (limit,) * 4)
    rows = top[:, None] + torch.arange(height, device=device)
    columns = left[:, None] + torch.arange(width, device=device)
    columns = torch.where(flipped[:, None], columns.flip(1), columns)
    index = torch.arange(count, device=device)[:, None, None, None]
    channel = torch.arange(channels, device=device)[None, :, None, None]
    return padded[index, channel, rows[:, None, :, None], columns[:, None, None, :]]


class Batches:
    """Shuffled and augmented batches; the incomplete last batch of each epoch is dropped.

    `batches[step]` depends only on the seed and the step, on every device: a run that continues at
    a step gets the same batches as a run that was never stopped. Images are shifted by up to an
    eighth of their size (4 pixels of 32), and mirrored with probability 1/2 if mirrored images keep
    their labels. Both run on the device of the images.

    Args:
        data: the images, on the device of the batches.
        batch: images per batch.
        seed: seed of shuffling and augmentation.
        augment: False: no shifts, no mirroring.
        size: height and width in pixels; images are resized bilinearly. None: not resized.
        rank: index of this process, which gets its part of each batch.
        world_size: number of processes.

    Raises:
        ValueError: the set is smaller than a batch, or `batch` is not a multiple of `world_size`.
    """

    def __init__(
        self,
        data: Images,
        batch: int,
        *,
        seed: int = 0,
        augment: bool = True,
        size: int | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if not 1 <= batch <= len(data.labels):
            raise ValueError(f"batch: expected 1 to {len(data.labels)} ({data.name}), got {batch}")
        if batch % world_size:
            raise ValueError(
                f"batch: expected a multiple of the {world_size} processes, got {batch}"
            )
        self.data, self.batch, self.seed, self.augment, self.size = data, batch, seed, augment, size
        part = batch // world_size
        self.part = slice(rank * part, (rank + 1) * part)
        self.limit = data.images.shape[-1] // 8
        self.epoch = -1
        self.draws: Tensor

    @property
    def steps_per_epoch(self) -> int:
        """Number of complete batches in the set."""
        return len(self.data.labels) // self.batch

    def _draw(self, epoch: int) -> None:
        """Draws order, shifts and mirroring of an epoch's images, as `[4, steps * batch]`."""
        count = self.steps_per_epoch * self.batch
        # PyTorch's generator on the CPU uses 32 bits of a seed.
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + epoch) % 2**32)
        order = torch.randperm(len(self.data.labels), generator=generator)[:count]
        shifts = torch.randint(0, 2 * self.limit + 1, (2, count), generator=generator)
        flips = torch.randint(0, 2, (1, count), generator=generator)
        self.draws = torch.cat((order[None], shifts, flips)).to(self.data.images.device)
        self.epoch = epoch

    def __getitem__(self, step: int) -> tuple[Tensor, Tensor]:
        """Images `[batch / world_size, 3, size, size]` float32 and labels int64 of a step."""
        epoch, index = divmod(step, self.steps_per_epoch)
        if epoch != self.epoch:
            self._draw(epoch)
        start = index * self.batch
        chosen, top, left, flips = self.draws[:, start : start + self.batch][:, self.part]
        images = self.data.images[chosen]
        if self.augment:
            flipped = flips.bool() & self.data.may_flip
            images = shifted(images, top, left, flipped, self.limit)
        if self.size not in (None, images.shape[-1]):
            images = F.interpolate(images, size=(self.size, self.size), mode="bilinear")
        return images, self.data.labels[chosen]
