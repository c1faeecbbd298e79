"""The images of the benchmarks: CIFAR files, digits, batches, augmentation."""

import hashlib
import io
import tarfile

import pytest
import torch

pytest.importorskip("matplotlib")
pytest.importorskip("tabulate")
pytest.importorskip("sklearn")
pytest.importorskip("tqdm")

from bench import data
from bench.__main__ import main

RECORDS = 20  # a file: few, and the reader says that they are a part


def cifar(kind, count=RECORDS):
    """Bytes of one file: labels in order, pixels of each record all equal to its index."""
    label = {"cifar-10": lambda i: [i % 10], "cifar-100": lambda i: [i % 20, i % 100]}[kind]
    return b"".join(bytes(label(i)) + bytes([i]) * 3072 for i in range(count))


CIFAR_10 = [f"data_batch_{i}.bin" for i in range(1, 6)]


@pytest.fixture
def cifar_10(tmp_path):
    for name in (*CIFAR_10, "test_batch.bin"):
        (tmp_path / name).write_bytes(cifar("cifar-10"))
    return tmp_path


@pytest.mark.filterwarnings("ignore:data. .* a part of it")
class TestCifar:
    def test_training_and_test_set(self, cifar_10):
        for train, files in ((True, 5), (False, 1)):
            images = data.load(cifar_10, train=train)
            assert (images.name, images.classes, images.may_flip) == ("cifar-10", 10, True)
            assert images.images.shape == (files * RECORDS, 3, 32, 32)
            assert torch.equal(images.labels, (torch.arange(RECORDS) % 10).repeat(files))
            std, mean = torch.std_mean(images.images.double(), dim=(0, 2, 3))
            torch.testing.assert_close(mean, torch.zeros_like(mean), atol=1e-5, rtol=0)
            torch.testing.assert_close(std, torch.ones_like(std), atol=1e-4, rtol=0)

    def test_planes_are_red_green_and_blue_in_rows(self, tmp_path):
        pixels = torch.arange(3 * 32 * 32).remainder(251).to(torch.uint8)
        record = bytes([3]) + bytes(pixels.tolist())
        other = bytes([4]) + bytes(3072)
        (tmp_path / "test_batch.bin").write_bytes(record + other)
        image = data.load_cifar(tmp_path, train=False).images[0].double()
        expected = pixels.view(3, 32, 32).double()
        for found, plane in zip(image, expected, strict=True):
            assert torch.corrcoef(torch.stack([found.flatten(), plane.flatten()]))[0, 1] > 0.999999

    def test_the_fine_label_of_cifar_100(self, tmp_path):
        folder = tmp_path / "cifar-100-binary"
        folder.mkdir()
        (folder / "train.bin").write_bytes(cifar("cifar-100", 50))
        images = data.load_cifar(tmp_path)
        assert images.classes == 100
        assert torch.equal(images.labels, torch.arange(50))

    def test_the_folder_of_the_environment(self, cifar_10, monkeypatch):
        monkeypatch.setenv(data.ENVIRONMENT_VARIABLE, str(cifar_10))
        assert data.load().name == "cifar-10"

    @pytest.mark.parametrize("cut", [1, 3072])
    def test_a_truncated_file_is_named(self, cifar_10, cut):
        path = cifar_10 / "data_batch_3.bin"
        path.write_bytes(cifar("cifar-10")[:-cut])
        with pytest.raises(ValueError, match=r"data_batch_3\.bin: expected whole records.*truncat"):
            data.load_cifar(cifar_10)

    def test_a_file_that_lacks_whole_records(self, cifar_10):
        (cifar_10 / "data_batch_3.bin").write_bytes(cifar("cifar-10", RECORDS - 1))
        with pytest.raises(ValueError, match=r"files of equal length.*data_batch_3\.bin 19"):
            data.load_cifar(cifar_10)

    def test_labels_out_of_range(self, cifar_10):
        (cifar_10 / "data_batch_2.bin").write_bytes((bytes([10]) + bytes(3072)) * RECORDS)
        with pytest.raises(
            ValueError, match=r"data_batch_2\.bin: expected labels below 10, got 10"
        ):
            data.load_cifar(cifar_10)

    def test_a_missing_file_is_named(self, cifar_10):
        (cifar_10 / "data_batch_4.bin").unlink()
        with pytest.raises(FileNotFoundError, match=r"data_batch_4\.bin missing"):
            data.load_cifar(cifar_10)

    def test_a_folder_of_something_else(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="found none of them"):
            data.load_cifar(tmp_path)
        with pytest.raises(FileNotFoundError, match="found none at"):
            data.load_cifar(tmp_path / "nowhere")

    def test_an_archive_is_read_if_it_is_the_published_one(self, tmp_path, monkeypatch):
        path = tmp_path / "cifar-10-binary.tar.gz"
        with tarfile.open(path, "w:gz") as archive:
            for name in CIFAR_10:
                member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
                member.size = len(cifar("cifar-10"))
                archive.addfile(member, io.BytesIO(cifar("cifar-10")))
        with pytest.raises(ValueError, match="expected MD5 c32a1d4a"):
            data.load_cifar(tmp_path)
        ten, hundred = data._CIFAR
        published = ten._replace(archive_md5=hashlib.md5(path.read_bytes()).hexdigest())
        monkeypatch.setattr(data, "_CIFAR", (published, hundred))
        assert len(data.load_cifar(tmp_path).labels) == 5 * RECORDS

    def test_the_benchmark_says_what_is_wrong_and_writes_nothing(self, cifar_10, tmp_path):
        (cifar_10 / "data_batch_1.bin").write_bytes(b"123")
        out = tmp_path / "out"
        with pytest.raises(SystemExit, match=r"bench: .*data_batch_1\.bin: expected whole records"):
            main(["--quick", "--device", "cpu", "--data", str(cifar_10), "--out", str(out)])
        assert not out.exists()


def test_digits_are_the_default(monkeypatch):
    monkeypatch.delenv(data.ENVIRONMENT_VARIABLE, raising=False)
    train, test = data.load(), data.load(train=False)
    assert (len(train.labels), len(test.labels), train.may_flip) == (1500, 297, False)
    assert train.images.shape[1:] == (3, 32, 32)


def test_batches_are_the_same_for_a_seed_and_of_the_size_that_is_wanted():
    images = data.load_digits()
    first, again, other = (next(data.batches(images, 4, seed=s)) for s in (1, 1, 2))
    assert torch.equal(first[0], again[0])
    assert not torch.equal(first[0], other[0])
    large, labels = next(data.batches(images, 4, seed=1, size=64))
    assert large.shape == (4, 3, 64, 64)
    assert torch.equal(labels, first[1])
    with pytest.raises(ValueError, match="batch: expected 1 to 1500"):
        next(data.batches(images, 1501))


def test_an_image_moves_by_four_pixels_at_most():
    image = torch.zeros(64, 1, 9, 9)
    image[:, :, 4, 4] = 1
    moved = data.augmented(image, torch.Generator().manual_seed(0), may_flip=False)
    assert torch.equal(moved.sum((1, 2, 3)), torch.ones(64))
    assert len({tuple(p) for p in moved.nonzero()[:, 2:].tolist()}) > 20
