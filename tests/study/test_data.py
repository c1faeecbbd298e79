"""Images of the study and the benchmarks: CIFAR files, digits, batches, augmentation."""

import hashlib
import io
import tarfile

import pytest
import torch

pytest.importorskip("matplotlib")
pytest.importorskip("tabulate")
pytest.importorskip("sklearn")
pytest.importorskip("tqdm")

from bench.__main__ import main
from preact_kernels.study import data

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
            # Pixels of record i are i, normalised as the published training set.
            expected = (torch.arange(RECORDS) / 255 - 0.4914) / 0.2470
            torch.testing.assert_close(images.images[:RECORDS, 0, 5, 7], expected)

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
    std, mean = torch.std_mean(train.images.double())
    torch.testing.assert_close(torch.stack((mean, std)).float(), torch.tensor([0.0, 1.0]))


def test_training_and_test_digits_are_all_digits_once():
    train, test = (data.load_digits(train=t, size=8) for t in (True, False))
    images = torch.cat((train.images, test.images)).flatten(1)
    assert len(images.unique(dim=0)) == len(images) == 1797
    counts = torch.bincount(test.labels, minlength=10)
    assert counts.min() >= 20 and counts.max() <= 40


def test_the_test_set_is_normalised_by_the_training_set():
    train, test = data.load_digits(size=8), data.load_digits(train=False, size=8)
    for images in (train, test):
        assert images.images.min() == train.images.min()  # white in both


def test_a_batch_depends_on_seed_and_step_alone():
    images = data.load_digits(size=8)
    batches, other = data.Batches(images, 128, seed=1), data.Batches(images, 128, seed=2)
    expected = [batches[step] for step in (0, 1, 11, 23)]
    assert batches.steps_per_epoch == 11
    again = data.Batches(images, 128, seed=1)
    for step, (x, labels) in reversed(list(zip((0, 1, 11, 23), expected, strict=True))):
        assert torch.equal(again[step][0], x) and torch.equal(again[step][1], labels)
    assert not torch.equal(other[0][0], expected[0][0])
    assert not torch.equal(expected[0][1], expected[2][1])  # another order in the next epoch


def test_an_epoch_has_each_image_once():
    images = data.load_digits(size=8)
    numbered = images._replace(labels=torch.arange(1500))
    batches = data.Batches(numbered, 100)
    seen = torch.cat([batches[15 + step][1] for step in range(15)])
    assert torch.equal(seen.sort().values, torch.arange(1500))


def test_processes_share_a_batch():
    images = data.load_digits(size=8)
    whole = data.Batches(images, 12, seed=3)[5]
    parts = [data.Batches(images, 12, seed=3, rank=r, world_size=3)[5] for r in range(3)]
    for index in range(2):
        assert torch.equal(torch.cat([part[index] for part in parts]), whole[index])
    with pytest.raises(ValueError, match="multiple of the 5 processes, got 12"):
        data.Batches(images, 12, world_size=5)


def test_batches_are_of_the_size_that_is_wanted():
    images = data.load_digits()
    large, labels = data.Batches(images, 4, seed=1, size=64)[0]
    assert large.shape == (4, 3, 64, 64)
    assert torch.equal(labels, data.Batches(images, 4, seed=1)[0][1])
    with pytest.raises(ValueError, match="batch: expected 1 to 1500"):
        data.Batches(images, 1501)


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
