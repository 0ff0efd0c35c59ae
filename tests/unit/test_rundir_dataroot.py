"""The data folder, looked at before any process is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.dataroot import CIFAR_FILES, check_data_root
from harness.errors import UsageError

JPEG = b"\xff\xd8\xff\xe0\x00\x10JFIF\x00\xff\xd9"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for part in ("train", "test"):
        for name in ("cat", "dog"):
            folder = tmp_path / part / name
            folder.mkdir(parents=True)
            for i in range(3):
                (folder / f"{i}.jpg").write_bytes(JPEG)
    return tmp_path


@pytest.fixture
def cifar(tmp_path: Path) -> Path:
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for name in CIFAR_FILES:
        (folder / name).write_bytes(b"\x80\x04rest")
    return tmp_path


def refused(root: Path, strict: bool = True) -> str:
    with pytest.raises(UsageError) as caught:
        check_data_root(root, strict=strict)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_whole_folders_pass(tree: Path) -> None:
    check_data_root(tree, strict=True)


def test_a_whole_cifar_passes_by_either_path(cifar: Path) -> None:
    check_data_root(cifar, strict=True)
    check_data_root(cifar / "cifar-10-batches-py", strict=True)


def test_missing_file_and_empty(tmp_path: Path) -> None:
    assert "does not exist" in refused(tmp_path / "gone")
    (tmp_path / "file").write_text("x")
    assert "is a file" in refused(tmp_path / "file")
    (tmp_path / "empty").mkdir()
    assert "is empty" in refused(tmp_path / "empty")
    assert "is empty" in refused(tmp_path / "empty", strict=False)


def test_half_a_tree(tree: Path) -> None:
    (tree / "test" / "dog").rename(tree / "dog")
    assert "class dog is only in train" in refused(tree)


def test_a_tree_without_test(tree: Path) -> None:
    (tree / "test").rename(tree / "tset")
    assert "has no test folder" in refused(tree)


def test_an_empty_class(tree: Path) -> None:
    for path in (tree / "train" / "cat").iterdir():
        path.unlink()
    message = refused(tree)
    assert "train/cat is empty" in message
    assert message == refused(tree, strict=False)


@pytest.mark.parametrize(("content", "words"), [(b"", "is empty"), (b"<html>not found", "no jpg image")])
def test_a_corrupt_image_is_named(tree: Path, content: bytes, words: str) -> None:
    (tree / "test" / "dog" / "1.jpg").write_bytes(content)
    message = refused(tree)
    assert "test/dog/1.jpg" in message
    assert words in message


@pytest.mark.parametrize(("name", "whole"), [("1.jpg", b"\xff\xd8\xff\xe0pixels\xff\xd9"), ("1.png", b"\x89PNG\r\n\x1a\npixelsIEND\xaeB`\x82")])
def test_an_image_that_is_cut_short_is_named(tree: Path, name: str, whole: bytes) -> None:
    path = tree / "test" / "dog" / name
    path.write_bytes(whole + b"written behind it by a camera")
    check_data_root(tree, strict=True)
    path.write_bytes(whole[:-6])
    assert f"test/dog/{name} is cut short" in refused(tree)
    check_data_root(tree, strict=False)  # the user's own script may take what is left of it


def test_a_folder_below_that_may_not_be_read_is_one_line(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(folder: Path) -> list[str]:
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr("harness.dataroot._classes", denied)
    assert refused(tree) == f"data folder {tree / 'train'} cannot be read: permission denied; chmod it"


def test_a_half_copied_cifar(cifar: Path) -> None:
    (cifar / "cifar-10-batches-py" / "data_batch_4").unlink()
    assert "data_batch_4 missing" in refused(cifar)
    (cifar / "cifar-10-batches-py" / "data_batch_4").write_bytes(b"")
    assert "data_batch_4 is empty" in refused(cifar)


def test_another_layout_is_the_scripts_own_business(tmp_path: Path) -> None:
    (tmp_path / "shard-0.bin").write_bytes(b"x")
    check_data_root(tmp_path, strict=False)
    assert "holds shard-0.bin, but neither" in refused(tmp_path)


def test_the_mini_set_passes() -> None:
    root = Path(__file__).parents[3] / "shared" / "data" / "cifar10-mini"
    if not root.is_dir():
        pytest.skip("the mini set is not beside this checkout")
    check_data_root(root, strict=True)
