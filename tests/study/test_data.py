"""Images of the study and the benchmarks: CIFAR files, digits, batches, augmentation."""

import hashlib
import io
import tarfile

import pytest
import torch

from preact_kernels.study import data

RECORDS = 20  # per file: fewer than published, so the reader warns


def records(label_bytes=lambda i: [i % 10]):
    """Returns the bytes of a file: labels in order, all pixels of a record equal to its index."""
    return b"".join(bytes([*label_bytes(i), *[i] * 3072]) for i in range(RECORDS))


CIFAR_10 = [f"data_batch_{i}.bin" for i in range(1, 6)]


@pytest.fixture
def cifar_10(tmp_path):
    for name in (*CIFAR_10, "test_batch.bin"):
        (tmp_path / name).write_bytes(records())
    return tmp_path


@pytest.mark.filterwarnings("ignore:data. .* a part of it")
class TestCifar:
    def test_training_and_test_set(self, tmp_path, monkeypatch):
        monkeypatch.setenv(data.ENVIRONMENT_VARIABLE, str(tmp_path))
        labels = torch.randint(10, (6, RECORDS, 1), dtype=torch.uint8)
        pixels = torch.randint(256, (6, RECORDS, 3072), dtype=torch.uint8)
        for name, *record in zip((*CIFAR_10, "test_batch.bin"), labels, pixels, strict=True):
            (tmp_path / name).write_bytes(torch.cat(record, 1).numpy().tobytes())
        # Planes of red, green and blue, normalised by the published training set.
        mean, std = torch.tensor([[0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]])[..., None]
        for train, part in ((True, slice(0, 5)), (False, slice(5, 6))):
            images = data.load(train=train)
            assert (images.name, images.classes, images.may_flip) == ("cifar-10", 10, True)
            assert torch.equal(images.labels, labels[part].flatten().long())
            expected = (pixels[part].reshape(-1, 3, 1024) / 255 - mean) / std
            torch.testing.assert_close(images.images, expected.view(-1, 3, 32, 32))

    def test_the_fine_label_of_cifar_100(self, tmp_path):
        folder = tmp_path / "cifar-100-binary"
        folder.mkdir()
        (folder / "train.bin").write_bytes(records(lambda i: [0, 5 * i]))
        images = data.load_cifar(tmp_path)
        assert images.classes == 100
        assert torch.equal(images.labels, torch.arange(0, 100, 5))

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (records()[:-1], r"3\.bin: expected whole records.*truncated"),
            (records()[:-3073], r"files of equal length.*data_batch_3\.bin 19"),
            ((bytes([10]) + bytes(3072)) * RECORDS, r"3\.bin: expected labels below 10, got 10"),
            (None, r"data_batch_3\.bin missing"),
        ],
        ids=["a byte", "a record", "labels", "missing"],
    )
    def test_a_wrong_file_is_named(self, cifar_10, content, message):
        path = cifar_10 / "data_batch_3.bin"
        path.unlink() if content is None else path.write_bytes(content)
        with pytest.raises((FileNotFoundError, ValueError), match=message):
            data.load_cifar(cifar_10)

    def test_whole_sets_have_as_many_images_of_every_class(self, cifar_10, monkeypatch):
        monkeypatch.setattr(data, "_PUBLISHED_TEST", RECORDS)
        assert len(data.load_cifar(cifar_10, train=False).labels) == RECORDS
        (cifar_10 / "test_batch.bin").write_bytes(bytes(3073) * 2 + records()[3073 * 2 :])
        with pytest.raises(ValueError, match="expected 2 images of every class in cifar-10, got 1"):
            data.load_cifar(cifar_10, train=False)

    def test_a_folder_of_something_else(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="found none of them"):
            data.load_cifar(tmp_path)

    def test_an_archive_is_read_if_it_is_the_published_one(self, tmp_path, monkeypatch):
        path = tmp_path / "cifar-10-binary.tar.gz"
        with tarfile.open(path, "w:gz") as archive:
            for name in CIFAR_10:
                member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
                member.size = len(records())
                archive.addfile(member, io.BytesIO(records()))
        with pytest.raises(ValueError, match="expected MD5 c32a1d4a"):
            data.load_cifar(tmp_path)
        ten, hundred = data._CIFAR
        published = ten._replace(archive_md5=hashlib.md5(path.read_bytes()).hexdigest())
        monkeypatch.setattr(data, "_CIFAR", (published, hundred))
        assert len(data.load_cifar(tmp_path).labels) == 5 * RECORDS


def test_digits_are_the_default_and_all_there_once(monkeypatch):
    monkeypatch.delenv(data.ENVIRONMENT_VARIABLE, raising=False)
    train, test = data.load(), data.load(train=False)
    assert (train.images.shape, len(test.labels)) == ((1500, 3, 32, 32), 297)
    assert not train.may_flip
    assert torch.std_mean(train.images.double()) == pytest.approx((1, 0), abs=1e-5)
    assert test.images.min() == train.images.min()  # white in both: normalised alike
    images = torch.cat((train.images, test.images))[:, 0].flatten(1)
    assert len(images.unique(dim=0)) == 1797
    assert test.labels[:10].tolist() != list(range(10)), "the first scans, all of one writer"


@pytest.fixture(scope="module")
def digits():
    """Digits of 8x8 pixels, with their numbers as labels."""
    images = data.load_digits().resized(8)
    return images._replace(labels=torch.arange(1500))


def test_a_batch_depends_on_seed_and_step_alone(digits):
    batches, other = data.Batches(digits, 100, seed=1), data.Batches(digits, 100, seed=2)
    expected = [batches[step] for step in range(15, 30)]
    assert batches.steps_per_epoch == 15
    for x, y in zip(data.Batches(digits, 100, seed=1)[29], expected[-1], strict=True):
        assert torch.equal(x, y)
    assert not torch.equal(other[15][0], expected[0][0])
    assert not torch.equal(batches[0][1], expected[0][1])  # another order in the next epoch
    seen = torch.cat([labels for _, labels in expected])
    assert torch.equal(seen.sort().values, torch.arange(1500))  # each image once


def test_processes_share_a_batch(digits):
    whole = data.Batches(digits, 12, seed=3)[5]
    parts = [data.Batches(digits, 12, seed=3, rank=r, world_size=3)[5] for r in range(3)]
    for found, expected in zip(zip(*parts, strict=True), whole, strict=True):
        assert torch.equal(torch.cat(found), expected)


def test_batches_have_the_sizes_that_are_given(digits):
    assert data.Batches(digits, 4, size=64)[0][0].shape == (4, 3, 64, 64)
    with pytest.raises(ValueError, match="batch: expected 1 to 1500"):
        data.Batches(digits, 1501)
    with pytest.raises(ValueError, match="multiple of the 5 processes, got 12"):
        data.Batches(digits, 12, world_size=5)


def test_images_move_by_an_eighth_of_their_size_at_most():
    dots = torch.zeros(512, 3, 32, 32)
    dots[:, :, 16, 16] = 1
    images = data.Images(dots, torch.zeros(512, dtype=torch.long), 10, False, "dots")
    moved, _ = data.Batches(images, 512)[0]
    places = moved[:, 0].nonzero()[:, 1:]
    assert torch.equal(places.min(0).values, torch.tensor([12, 12]))
    assert torch.equal(places.max(0).values, torch.tensor([20, 20]))
    still, _ = data.Batches(images, 512, augment=False)[0]
    assert torch.equal(still, dots)


@pytest.mark.parametrize("may_flip", [False, True])
def test_images_are_mirrored_where_that_keeps_the_label(may_flip):
    ramp = torch.arange(8.0).expand(256, 3, 8, 8).clone()
    images = data.Images(ramp, torch.zeros(256, dtype=torch.long), 10, may_flip, "ramp")
    moved, _ = data.Batches(images, 256)[0]
    falls = (moved[:, 0, 4, 2:6].diff() < 0).all(-1)
    assert falls.any() == may_flip
    assert may_flip is False or 64 < falls.sum() < 192
