"""A cache entry is whole and unharmed, or it is made again."""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from attnplat.errors import CacheDirectoryError
from attnplat.integrations.transformers.weight_cache import MANIFEST, WeightCache

KEY = "a-key"


class Maker:
    """Fills an entry, and counts how often."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, folder: Path) -> None:
        self.calls += 1
        (folder / "weights").write_bytes(b"x" * 1000)
        (folder / "nested").mkdir()
        (folder / "nested" / "config").write_text("{}")


def flip_a_bit(entry: Path) -> None:
    content = bytearray((entry / "weights").read_bytes())
    content[500] ^= 1
    (entry / "weights").write_bytes(content)


def cut_short(entry: Path) -> None:
    (entry / "weights").write_bytes(b"x" * 999)


def remove_a_file(entry: Path) -> None:
    (entry / "nested" / "config").unlink()


def remove_the_manifest(entry: Path) -> None:
    (entry / MANIFEST).unlink()


def cut_the_manifest(entry: Path) -> None:
    (entry / MANIFEST).write_text((entry / MANIFEST).read_text()[:20])


def change_the_format(entry: Path) -> None:
    manifest = json.loads((entry / MANIFEST).read_text())
    (entry / MANIFEST).write_text(json.dumps({**manifest, "format": -1}))


def make_the_manifest_a_list(entry: Path) -> None:
    (entry / MANIFEST).write_text("[]")


def test_an_entry_is_made_once(tmp_path: Path) -> None:
    make, cache = Maker(), WeightCache(tmp_path / "not" / "there")
    assert cache.find(KEY) is None
    entry = cache.find_or_make(KEY, make)
    assert (entry / "nested" / "config").read_text() == "{}"
    assert cache.find_or_make(KEY, make) == cache.find(KEY) == entry
    assert make.calls == 1


@pytest.mark.parametrize(
    "harm",
    [
        flip_a_bit,
        cut_short,
        remove_a_file,
        remove_the_manifest,
        cut_the_manifest,
        change_the_format,
        make_the_manifest_a_list,
    ],
)
def test_a_harmed_entry_is_made_again(harm: Callable[[Path], None], tmp_path: Path) -> None:
    make, cache = Maker(), WeightCache(tmp_path)
    harm(cache.find_or_make(KEY, make))
    assert cache.find(KEY) is None
    cache.find_or_make(KEY, make)
    assert cache.find(KEY) is not None and make.calls == 2


def test_a_failure_leaves_neither_an_entry_nor_rubbish(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise RuntimeError("the model is broken")

    cache = WeightCache(tmp_path)
    with pytest.raises(RuntimeError, match="broken"):
        cache.find_or_make(KEY, fail)
    assert [p.name for p in cache.folder.iterdir()] == [f"{KEY}.lock"]
    assert cache.find_or_make(KEY, Maker()) is not None


def test_a_full_disk_is_one_clear_error(tmp_path: Path) -> None:
    def fill(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(CacheDirectoryError, match="No space left on device; set ATTNPLAT_CACHE"):
        WeightCache(tmp_path).find_or_make(KEY, fill)


def test_a_folder_that_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CacheDirectoryError, match="Not a directory"):
        WeightCache(tmp_path / "file").find_or_make(KEY, Maker())


def _make_slowly(folder: Path) -> None:
    time.sleep(0.3)
    (folder / "weights").write_text(str(time.monotonic_ns()))


def _find_or_make(folder: str) -> str:
    return (WeightCache(Path(folder)).find_or_make(KEY, _make_slowly) / "weights").read_text()


def test_of_several_processes_one_makes_it(tmp_path: Path) -> None:
    with multiprocessing.get_context("fork").Pool(3) as pool:
        found = pool.map(_find_or_make, [str(tmp_path)] * 3)
    assert len(set(found)) == 1
