"""A cache entry is whole and unharmed, or it is made again; a cache that fails is done without."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from attnplat.config.env import Environment, read_env
from attnplat.errors import CacheDirectoryError, OfflineError, UnknownNameError
from attnplat.storage import KINDS, Store, cache_folder, check_folder, key_of, refuse_network
from attnplat.storage.locks import Owner
from attnplat.storage.store import MANIFEST

ROOT = Path(__file__).resolve().parents[2]
KEY = "a-key"
VALUE = {"version": "1.2", "features": ["a", "b"], "count": 3, "nothing": None}


class Maker:
    """Fills an entry, and counts how often."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, folder: Path) -> None:
        self.calls += 1
        (folder / "weights").write_bytes(b"x" * 1000)
        (folder / "nested").mkdir()
        (folder / "nested" / "config").write_text("{}")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "cache", "models")


@contextmanager
def small_files() -> Iterator[None]:
    """Files may grow to 4096 bytes in here: writing more fails as on a full disk.

    No fixture: pytest itself, whose output may be a file, reports while fixtures are in force.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def python(code: str, *arguments: str) -> subprocess.Popen[str]:
    """A process of its own that runs `code` with attnplat at hand."""
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


# --- folders ---------------------------------------------------------------------------------


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


FOLDER_HARMS = (
    flip_a_bit,
    cut_short,
    remove_a_file,
    remove_the_manifest,
    cut_the_manifest,
    change_the_format,
    make_the_manifest_a_list,
)


def test_an_entry_is_made_once(store: Store) -> None:
    make = Maker()
    assert store.find(KEY) is None and not store.folder.exists()
    entry = store.find_or_make(KEY, make)
    assert (entry / "nested" / "config").read_text() == "{}"
    assert store.find_or_make(KEY, make) == store.find(KEY) == entry
    assert make.calls == 1


@pytest.mark.parametrize("harm", FOLDER_HARMS)
def test_a_harmed_entry_is_made_again(harm: Callable[[Path], None], store: Store) -> None:
    make = Maker()
    harm(store.find_or_make(KEY, make))
    assert store.find(KEY) is None
    (entry,) = store.entries()
    assert entry.problem
    store.find_or_make(KEY, make)
    assert store.find(KEY) is not None and make.calls == 2


def test_a_failure_leaves_neither_an_entry_nor_rubbish(store: Store) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise RuntimeError("the model is broken")

    with pytest.raises(RuntimeError, match="broken"):
        store.find_or_make(KEY, fail)
    assert store.entries() == ()
    assert store.find_or_make(KEY, Maker()) is not None


def test_a_full_disk_is_one_clear_error_and_leaves_no_rubbish(
    store: Store,
) -> None:
    def fill(folder: Path) -> None:
        (folder / "weights").write_bytes(b"x" * 5000)

    wrong = "File too large; set ATTNPLAT_CACHE_DIR"
    with small_files(), pytest.raises(CacheDirectoryError, match=wrong):
        store.find_or_make(KEY, fill)
    assert store.entries() == ()


def test_a_folder_that_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CacheDirectoryError, match="Not a directory"):
        Store(tmp_path / "file", "models").find_or_make(KEY, Maker())


# --- documents -------------------------------------------------------------------------------


def test_a_document_reads_as_it_was_written(store: Store) -> None:
    assert store.read(KEY) is None
    store.write(KEY, VALUE)
    assert store.read(KEY) == VALUE
    store.write(KEY, {"numbered": {10: "ten", 9: "nine"}, "pair": (1, 2)})
    assert store.read(KEY) == {"numbered": {"10": "ten", "9": "nine"}, "pair": [1, 2]}


DOCUMENT_HARMS = {
    "cut short": lambda text: text[: len(text) // 2],
    "emptied": lambda text: "",
    "a value changed": lambda text: text.replace("1.2", "1.3"),
    "another form": lambda text: text.replace('"format": 1', '"format": 2'),
    "a list": lambda text: "[]",
    "no text": lambda text: "\udcff\udcfe",
    "nested without end": lambda text: "[" * 100_000,
}


@pytest.mark.parametrize("harm", DOCUMENT_HARMS)
def test_a_harmed_document_is_made_again(harm: str, store: Store) -> None:
    store.write(KEY, VALUE)
    path = store.folder / f"{KEY}.json"
    text = DOCUMENT_HARMS[harm](path.read_text())
    path.write_text(text, encoding="utf-8", errors="surrogateescape")
    assert store.read(KEY) is None
    assert store.read_or_make(KEY, lambda: VALUE) == VALUE
    assert store.read(KEY) == VALUE


def notices(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "cache folder" in r.getMessage()]


def test_a_cache_that_cannot_be_written_is_told_of_once_and_done_without(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    for kind in ("probes", "plugins"):
        for key in ("one", "two"):
            assert Store(tmp_path / "file", kind).read_or_make(key, lambda: VALUE) == VALUE
    assert len(notices(caplog)) == 1
    assert str(tmp_path / "file") in notices(caplog)[0]
    assert "set ATTNPLAT_CACHE_DIR to a folder that can be" in notices(caplog)[0]


def test_a_full_disk_is_told_of_once_and_done_without(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    big = "x" * 5000
    store.write(KEY, VALUE)
    with small_files():
        for _ in range(3):
            assert store.read_or_make("big", lambda: big) == big
            assert not store.keep(KEY, big)
    assert len(notices(caplog)) == 1
    assert store.read(KEY) == VALUE, "what was there before is untouched"
    assert [e.key for e in store.entries()] == [KEY], "no rubbish is left"


def on_full_file_system(folder: Path) -> None:
    """Fills a file system of its own and runs into its end."""
    cache = Store(folder, "probes")
    cache.write("first", VALUE)
    rest = os.statvfs(folder)
    (folder / "rest").write_bytes(b"x" * (rest.f_bavail * rest.f_bsize))
    assert cache.read_or_make("second", lambda: VALUE) == VALUE
    assert cache.read("first") == VALUE and cache.read("second") is None


def test_a_file_system_that_is_full_is_done_without(tmp_path: Path) -> None:
    """In a mount namespace of its own, where that may be had."""
    code = f"""
        import subprocess, sys
        from pathlib import Path
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", {str(tmp_path)!r}],
            capture_output=True, text=True)
        if mounted.returncode:
            sys.exit(77)
        sys.path.insert(0, "")
        from tests.unit.test_storage import on_full_file_system
        on_full_file_system(Path({str(tmp_path)!r}))
    """
    unshare = ["unshare", "--map-root-user", "--mount"]
    try:
        done = subprocess.run(
            [*unshare, sys.executable, "-c", textwrap.dedent(code)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
        )
    except OSError as error:
        pytest.skip(f"no unshare here: {error}")
    if done.returncode == 77 or "unshare:" in done.stderr:
        pytest.skip(f"no file system may be mounted here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("No space left on device") == 1


# --- several processes -----------------------------------------------------------------------

MAKE = """
    import sys, time
    from pathlib import Path
    from attnplat.storage import Store

    def make(folder):
        time.sleep(0.3)
        (folder / "weights").write_text(str(time.monotonic_ns()))

    print("ready", flush=True)
    sys.stdin.readline()
    entry = Store(Path(sys.argv[1]), "models").find_or_make("a-key", make)
    print((entry / "weights").read_text())
"""


def test_of_several_processes_one_makes_it(tmp_path: Path) -> None:
    processes = [python(MAKE, str(tmp_path)) for _ in range(3)]
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    results = []
    for process in processes:  # all start at once
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    for process in processes:
        out, err = process.communicate(timeout=30)
        assert process.returncode == 0, err
        results.append(out)
    assert len(set(results)) == 1


WRITE = """
    import sys
    from pathlib import Path
    from attnplat.storage import Store

    store = Store(Path(sys.argv[1]), "probes")
    for turn in range(200):
        store.write("a-key", {"from": sys.argv[2], "text": sys.argv[2] * 3000})
        found = store.read("a-key")
        assert found is not None and found["text"] == found["from"] * 3000, found
"""


def test_of_racing_writers_a_reader_sees_one_or_the_other(tmp_path: Path) -> None:
    writers = [python(WRITE, str(tmp_path), name) for name in ("a", "b")]
    for writer in writers:
        _, err = writer.communicate(timeout=60)
        assert writer.returncode == 0, err
    store = Store(tmp_path, "probes")
    assert [e.problem for e in store.entries()] == [""]


HOLD = """
    import os, subprocess, sys, time
    from pathlib import Path
    from attnplat.storage.locks import locked

    path = Path(sys.argv[1])
    with locked(path):
        if sys.argv[2] == "with a child":
            open_files = {int(n): Path(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd")}
            held = [n for n, file in open_files.items() if file.resolve() == path.resolve()]
            child = subprocess.Popen(["sleep", "60"], pass_fds=held)
            print(child.pid, flush=True)
        else:
            print(0, flush=True)
        time.sleep(60)
"""


@pytest.mark.parametrize("company", ["alone", "with a child"])
def test_the_lock_of_a_killed_process_is_taken_over_within_seconds(
    company: str, tmp_path: Path
) -> None:
    if company == "with a child" and not Path("/proc/self/fd").exists():
        pytest.skip("which file is open is read from /proc")
    store = Store(tmp_path, "models")
    store.folder.mkdir()
    owner = python(HOLD, str(store.folder / f"{KEY}.lock"), company)
    assert owner.stdout is not None
    child = int(owner.stdout.readline())
    owner.kill()
    owner.wait()
    started = time.monotonic()
    try:
        store.find_or_make(KEY, Maker())
    finally:
        if child:
            os.kill(child, signal.SIGKILL)
    assert time.monotonic() - started < 5


def test_the_lock_of_a_living_process_is_waited_for_and_its_owner_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(tmp_path, "models")
    store.folder.mkdir()
    code = HOLD.replace("time.sleep(60)", "time.sleep(1.5)")
    owner = python(code, str(store.folder / f"{KEY}.lock"), "alone")
    assert owner.stdout is not None and owner.stdout.readline()
    started = time.monotonic()
    store.find_or_make(KEY, Maker())
    owner.wait()
    assert time.monotonic() - started > 1
    assert f"process {owner.pid} is making what is wanted from" in caplog.text


def test_whether_an_owner_is_gone_is_told_by_its_number_and_its_start() -> None:
    here = Owner.here()
    assert not here.is_gone()
    assert not here._replace(machine="another").is_gone()
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    assert here._replace(pid=done.pid).is_gone()
    if here.start:
        assert here._replace(start="1").is_gone(), "another process has its number now"


# --- housekeeping ----------------------------------------------------------------------------


def test_entries_say_what_is_wrong_with_them(store: Store) -> None:
    store.find_or_make("current", Maker(), packages={"transformers": "5.24.0"}, about="SmolLM2")
    store.find_or_make("older", Maker(), packages={"transformers": "5.20.0"})
    store.write("document", VALUE, packages={"gone": "1.0"})
    cut_short(store.find_or_make("damaged", Maker()))
    for name in (".key-5.24.0-0123", ".fresh-0123"):
        (store.folder / name).mkdir()
    an_hour_ago = time.time() - 3700
    os.utime(store.folder / ".key-5.24.0-0123", (an_hour_ago, an_hour_ago))
    found = {e.key: e for e in store.entries({"transformers": "5.24.0"})}
    assert {key: entry.problem for key, entry in found.items()} == {
        "current": "",
        "older": "made with transformers 5.20.0; installed is 5.24.0",
        "document": "made with gone 1.0; installed is none",
        "damaged": "damaged",
        ".key-5.24.0-0123": "left by an attempt that was broken off",
        ".fresh-0123": "",
    }
    assert found["current"].about == "SmolLM2" and found["current"].size > 1000
    for entry in found.values():
        store.remove(entry)
    assert store.entries() == ()


@pytest.mark.parametrize("key", ["", ".hidden", "a/b", "..", "x" * 201, "a b"])
def test_what_is_no_key_is_refused(key: str, store: Store) -> None:
    with pytest.raises(ValueError, match="is no key"):
        store.read(key)


def test_a_kind_that_nobody_declared_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'models'"):
        Store(tmp_path, "model")
    assert all(kind.what for kind in KINDS.values())


def test_equal_parts_give_equal_keys() -> None:
    assert key_of("a", {"x": 1, "y": 2}) == key_of("a", {"y": 2, "x": 1})
    assert len({key_of("a"), key_of("b"), key_of("a", "b"), key_of(["a", "b"])}) == 4


def test_the_folder_is_the_named_one_or_the_operating_systems(tmp_path: Path) -> None:
    named = read_env({"ATTNPLAT_CACHE_DIR": str(tmp_path)})
    assert cache_folder(named) == tmp_path
    assert cache_folder(Environment()).is_absolute()
    assert check_folder(tmp_path).problem is None
    assert check_folder(tmp_path / "not" / "there").problem is None
    assert list(tmp_path.iterdir()) == []


def test_the_network_is_refused_by_name() -> None:
    refuse_network(Environment(), "a", "b")
    with pytest.raises(OfflineError, match="the kernel x would need the network, and ATTNPLAT_OFF"):
        refuse_network(Environment(offline=True), "the kernel x", "install it")
