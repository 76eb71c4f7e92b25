"""The directory of checkpoints: complete and durable, or not there - wherever a crash ends the writer.

A crash: a child process that is gone at its n-th call of something that changes the disk, n = 1, 2, ... until it ends
undisturbed. Power loss is not simulated: the order of calls is looked at, since what was synced before is there after.
"""

import json
import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from hybridflow.checkpoint.store import (
    MANIFEST,
    begin,
    damage,
    file_sum,
    point_to,
    publish,
    read_manifest,
    remove,
    step_name,
    steps,
    superfluous,
)
from hybridflow.errors import CheckpointError
from hybridflow.formats.distributed_storage import FileSum

SHARE = "actor/__0_0.distcp"
CRASHED = 9


def fill(partial: Path, text: str) -> dict[str, FileSum]:
    """What a save writes, in small; the sums of what was written with them."""
    (partial / "state.json").write_text(json.dumps({"text": text}))
    (partial / "actor" / ".metadata").write_bytes(b"where")
    (partial / SHARE).write_bytes(text.encode() * 100)
    return {SHARE: FileSum(len(text) * 100, zlib.crc32(text.encode() * 100))}


def write(root: Path, iteration: int, text: str) -> Path:
    partial = begin(root, iteration, ["actor"])
    return publish(root, iteration, partial, fill(partial, text))


def intact(root: Path) -> dict[int, str]:
    """Iteration -> text of the checkpoints in which nothing is wrong."""
    found = {}
    for iteration in steps(root):
        step = root / step_name(iteration)
        try:
            files = read_manifest(step).files
        except CheckpointError:
            continue
        if not damage(step, files):
            assert set(files) == {"state.json", "actor/.metadata", SHARE}
            found[iteration] = json.loads((step / "state.json").read_text())["text"]
    return found


# ------------------------------------------------------------------------------------------------ what is written


def test_a_checkpoint_lists_all_that_is_in_it(tmp_path: Path) -> None:
    step = write(tmp_path / "checkpoints", 12, "new")
    assert step == tmp_path / "checkpoints" / "step_000012"
    manifest = read_manifest(step)
    assert manifest.iteration == 12
    assert manifest.files == {
        "state.json": FileSum(15, 2636110790),
        "actor/.metadata": FileSum(5, zlib.crc32(b"where")),
        SHARE: FileSum(300, zlib.crc32(b"new" * 100)),
    }
    assert manifest.num_bytes == 320
    assert damage(step, manifest.files) == []
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step_000012\n"
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["latest", "step_000012"]


def test_a_file_that_its_writer_told_of_and_that_is_not_there_makes_no_checkpoint(tmp_path: Path) -> None:
    """As where a rank wrote to a disk of its own, or another host does not see it yet."""
    partial = begin(tmp_path, 1, ["actor"])
    sums = fill(partial, "new") | {"actor/__1_0.distcp": FileSum(7, 0)}
    with pytest.raises(CheckpointError, match=r"actor/__1_0\.distcp: cannot be read: No such file or directory"):
        publish(tmp_path, 1, partial, sums)
    assert steps(tmp_path) == []


def test_a_file_shorter_than_its_writer_told_makes_no_checkpoint(tmp_path: Path) -> None:
    partial = begin(tmp_path, 1, ["actor"])
    sums = fill(partial, "new")
    os.truncate(partial / SHARE, 299)
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp: has 299 bytes, was written with 300$"):
        publish(tmp_path, 1, partial, sums)
    assert steps(tmp_path) == []


def test_names_are_ordered_as_numbers(tmp_path: Path) -> None:
    for iteration in (999_999, 1_000_000, 12, 12_345_678):
        (tmp_path / step_name(iteration)).mkdir()
    for other in (".step_000013.partial", "step_12", "step_000012.1", "rollout"):
        (tmp_path / other).mkdir()
    assert sorted(path.name for path in tmp_path.glob("step_1000*")) == ["step_1000000"]
    assert steps(tmp_path) == [12, 999_999, 1_000_000, 12_345_678]
    assert steps(tmp_path / "none") == []


def test_what_was_left_is_gone_before_the_next_begins(tmp_path: Path) -> None:
    """Of a start with more ranks too: its files must not come into a checkpoint of this one."""
    write(tmp_path, 1, "old")
    left = begin(tmp_path, 2, ["actor", "critic"])
    (left / "critic" / "__3_0.distcp").write_bytes(b"stale")
    (tmp_path / ".step_1000000.old" / "actor").mkdir(parents=True)
    partial = begin(tmp_path, 2, ["actor"])
    assert partial == left
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.glob(".step*/**/*")) == [
        ".step_000002.partial/actor"
    ]
    assert intact(tmp_path) == {1: "old"}


def test_latest_is_replaced_whole(tmp_path: Path) -> None:
    point_to(tmp_path, "step_000001")
    point_to(tmp_path, "step_000002")
    assert [path.name for path in tmp_path.iterdir()] == ["latest"]
    assert (tmp_path / "latest").read_text() == "step_000002\n"


# ------------------------------------------------------------------------------------------------ which are kept

SCORES = {2: 0.5, 4: 0.9, 6: 0.9, 8: 0.1, 10: 0.7}


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "keep_best", "gone"),
    [
        (1, None, 0, [2, 4, 6, 8]),
        (2, None, 0, [2, 4, 6]),
        (5, None, 0, []),
        (9, None, 0, []),
        (1, 4, 0, [2, 6]),
        (1, 1, 0, []),
        (1, 7, 0, [2, 4, 6, 8]),
        (1, None, 1, [2, 4, 8]),  # 4 and 6 are equal: the later one
        (1, None, 2, [2, 8]),
        (1, None, 3, [2, 8]),  # the third best is the last anyway
        (1, None, 4, [8]),
        (1, None, 9, []),
        (2, 4, 1, [2]),
    ],
)
def test_superfluous(keep_last: int, keep_every: int | None, keep_best: int, gone: list[int]) -> None:
    metrics = {iteration: {"score": score, "other": -score} for iteration, score in SCORES.items()}
    found = superfluous(metrics, keep_last=keep_last, keep_every=keep_every, keep_best=keep_best, best="score")
    assert found == gone


def test_the_lowest_are_the_best_where_the_config_says_so() -> None:
    metrics = {2: {"loss": 0.9}, 4: {"loss": 0.1}, 6: {"loss": 0.1}, 8: {}, 10: {"loss": 0.5}}
    kept = {"keep_last": 1, "keep_every": None, "best": "loss"}
    assert superfluous(metrics, **kept, keep_best=1, best_is="lowest") == [2, 4, 8]  # of equals the later one
    assert superfluous(metrics, **kept, keep_best=2, best_is="lowest") == [2, 8]
    assert superfluous(metrics, **kept, keep_best=1, best_is="highest") == [4, 6, 8]


def test_what_lacks_the_metric_is_no_best() -> None:
    metrics = {1: {"score": -3.0}, 2: {}, 3: {"score": -5.0}, 4: {"other": 1.0}}
    assert superfluous(metrics, keep_last=1, keep_every=None, keep_best=1, best="score") == [2, 3]
    assert superfluous(metrics, keep_last=1, keep_every=None, keep_best=4, best="score") == [2]
    assert superfluous(metrics, keep_last=1, keep_every=None, keep_best=4, best="nobody has it") == [1, 2, 3]
    assert superfluous({}, keep_last=1, keep_every=2, keep_best=1, best="score") == []


def test_removing(tmp_path: Path) -> None:
    write(tmp_path, 1, "old")
    write(tmp_path, 2, "new")
    remove(tmp_path, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_000002"]


def test_what_is_half_removed_is_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ends_midway(path: Path) -> None:
        (path / SHARE).unlink()
        raise KeyboardInterrupt

    write(tmp_path, 1, "old")
    write(tmp_path, 2, "new")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shutil, "rmtree", ends_midway)
        remove(tmp_path, 1)
    assert steps(tmp_path) == [2]


# ------------------------------------------------------------------------------------------------ crashes


def ends_at(number: int, work: Callable[[], object]) -> bool:
    """Whether a child that does this work was ended by its n-th call; the call is not done, a text is half written."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            crash_at(number)
            work()
            status = 0
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, CRASHED)
    return status == CRASHED


def crash_at(number: int) -> None:
    """Only in a child."""
    calls = 0

    def reached() -> bool:
        nonlocal calls
        calls += 1
        return calls == number

    def wrap(function: Callable) -> Callable:
        def counted(*arguments: object, **named: object) -> object:
            if reached():
                os._exit(CRASHED)
            return function(*arguments, **named)

        return counted

    def write_text(path: Path, text: str, encoding: str = "utf-8") -> None:
        ends = reached()
        path.write_bytes((text[: len(text) // 2] if ends else text).encode(encoding))
        if ends:
            os._exit(CRASHED)

    for name in ("rename", "replace", "fsync", "unlink", "mkdir", "rmdir"):
        setattr(os, name, wrap(getattr(os, name)))
    shutil.rmtree = wrap(shutil.rmtree)
    Path.write_text = write_text


def nothing(root: Path) -> None:
    root.mkdir()


def an_older_one(root: Path) -> None:
    write(root, 1, "old")


def one_too_many(root: Path) -> None:
    """Left by a crash before it was removed."""
    write(root, 0, "older")
    write(root, 1, "old")


def a_damaged_one_in_its_place(root: Path) -> None:
    write(root, 1, "old")
    os.truncate(write(root, 2, "damaged") / SHARE, 10)


def one_half_written(root: Path) -> None:
    write(root, 1, "old")
    fill(begin(root, 2, ["actor", "critic"]), "half")
    (root / ".step_000002.partial" / "critic" / "__3_0.distcp").write_bytes(b"stale")
    (root / ".latest").write_text("step")


@pytest.mark.parametrize("before", [nothing, an_older_one, one_too_many, a_damaged_one_in_its_place, one_half_written])
@pytest.mark.thorough
def test_a_crash_leaves_the_former_or_the_new_one(before: Callable[[Path], None], tmp_path: Path) -> None:
    seen = []

    def save(root: Path) -> None:
        write(root, 2, "new")
        for iteration in superfluous({i: {} for i in steps(root)}, keep_last=1, keep_every=None, keep_best=0, best=""):
            remove(root, iteration)

    for number in range(1, 1000):
        root = tmp_path / str(number)
        before(root)
        had, damaged = intact(root), {*steps(root)} - {*intact(root)}
        crashed = ends_at(number, lambda root=root: save(root))
        found = intact(root)
        assert all(had.get(iteration, "new") == text for iteration, text in found.items()), f"call {number}"
        assert found or not had, f"call {number}: nothing is left"
        assert {*steps(root)} - {*found} <= damaged, f"call {number}: what has a name is whole"
        assert found.get(2) == "new" or found.get(max(had, default=None)) == had.get(max(had, default=None))
        seen.append(tuple(found))
        if not crashed:
            break
        save(root)
        assert intact(root) == {2: "new"}, f"after a crash at call {number}"
        assert sorted(path.name for path in root.iterdir()) == ["latest", "step_000002"]
        assert (root / "latest").read_text() == "step_000002\n"
    assert not crashed and number > 15
    assert seen[0] == tuple(had) and seen[-1] == (2,), "both sides of the change were seen"


# ------------------------------------------------------------------------------------------------ power loss


@pytest.fixture
def trace(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """(what, of which path), in order; a rename by its target."""
    calls: list[tuple[str, str]] = []
    fsync, rename, replace = os.fsync, os.rename, os.replace

    def traced(name: str, function: Callable[[object, object], None]) -> Callable:
        def move(source: object, target: object) -> None:
            calls.append((name, str(target)))
            function(source, target)

        return move

    def synced(fd: int) -> None:
        calls.append(("fsync", os.readlink(f"/proc/self/fd/{fd}")))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", traced("rename", rename))
    monkeypatch.setattr(os, "replace", traced("replace", replace))
    return calls


def test_all_is_on_the_disk_before_it_has_its_name(tmp_path: Path, trace: list[tuple[str, str]]) -> None:
    root = tmp_path / "run" / "checkpoints"
    partial = begin(root, 3, ["actor"])
    assert trace == [("fsync", str(root.parent))], "the name of the new directory"
    trace.clear()
    fill(partial, "new")
    step = publish(root, 3, partial, {})
    renamed = trace.index(("rename", str(step)))
    pointed = trace.index(("replace", str(root / "latest")))
    contents = {str(partial / name) for name in ("state.json", "actor/.metadata", SHARE, MANIFEST)}
    directories = {str(partial), str(partial / "actor")}
    assert {path for _, path in trace[:renamed]} == contents | directories
    last_file = max(trace.index(("fsync", path)) for path in contents)
    assert all(trace.index(("fsync", path)) > last_file for path in directories), "they hold the files' names"
    assert trace.index(("fsync", str(partial / MANIFEST))) == last_file, "it says that all others are there"
    assert trace[renamed + 1 :] == [
        ("fsync", str(root)),
        ("fsync", str(root / ".latest")),
        ("replace", str(root / "latest")),
        ("fsync", str(root)),
    ]
    assert pointed == len(trace) - 2


def test_files_of_known_sum_were_synced_by_their_writer(tmp_path: Path, trace: list[tuple[str, str]]) -> None:
    """They are not read again either: the sum is that of what was meant to be written."""
    partial = begin(tmp_path, 3, ["actor"])
    sums = fill(partial, "new")
    (partial / SHARE).write_bytes(b"x" * 300)
    step = publish(tmp_path, 3, partial, sums)
    assert ("fsync", str(partial / SHARE)) not in trace
    assert damage(step, read_manifest(step).files) == [
        f"{step / SHARE}: is damaged: its CRC-32 is {zlib.crc32(b'x' * 300):08x}, "
        f"manifest.json says {zlib.crc32(b'new' * 100):08x}"
    ]


# ------------------------------------------------------------------------------------------------ damage


def test_a_flipped_bit_anywhere_is_seen(tmp_path: Path) -> None:
    step = write(tmp_path, 1, "some text")
    files, file = read_manifest(step).files, step / SHARE
    data = file.read_bytes()
    for place in (0, 1, len(data) // 3, len(data) // 2, len(data) - 1):
        file.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        (line,) = damage(step, files)
        assert line.startswith(f"{file}: is damaged: its CRC-32 is ")
        assert damage(step, files, thorough=False) == [], "only the size is looked at"
    file.write_bytes(data)
    assert damage(step, files) == []


def test_a_flipped_bit_of_a_large_file_is_seen_in_every_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybridflow.formats.directories.BLOCK_BYTES", 64)
    file = tmp_path / "file"
    data = bytes(range(200))
    file.write_bytes(data)
    assert file_sum(file) == FileSum(200, zlib.crc32(data))
    found = set()
    for place in range(200):
        file.write_bytes(data[:place] + bytes([data[place] ^ 128]) + data[place + 1 :])
        found.add(file_sum(file))
    assert len(found) == 200 and FileSum(200, zlib.crc32(data)) not in found


@pytest.mark.parametrize("thorough", [True, False])
@pytest.mark.parametrize("size", [0, 899, 901])
def test_another_size_is_seen_without_reading(size: int, thorough: bool, tmp_path: Path) -> None:
    step = write(tmp_path, 1, "some text")
    os.truncate(step / SHARE, size)
    found = damage(step, read_manifest(step).files, thorough=thorough)
    assert found == [f"{step / SHARE}: has {size} bytes, was written with 900"]


@pytest.mark.parametrize("thorough", [True, False])
def test_missing_files_are_named_all(thorough: bool, tmp_path: Path) -> None:
    step = write(tmp_path, 1, "some text")
    shutil.rmtree(step / "actor")
    assert sorted(damage(step, read_manifest(step).files, thorough=thorough)) == [
        f"{step / 'actor/.metadata'}: cannot be read: No such file or directory",
        f"{step / SHARE}: cannot be read: No such file or directory",
    ]


def test_what_cannot_be_read_is_damaged(tmp_path: Path) -> None:
    (tmp_path / "directory").mkdir()
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    size = (tmp_path / "directory").stat().st_size
    assert damage(tmp_path, {"directory": FileSum(size, 0), "circle": FileSum(0, 0)}) == [
        f"{tmp_path / 'directory'}: cannot be read: Is a directory",
        f"{tmp_path / 'circle'}: cannot be read: Too many levels of symbolic links",
    ]


def edit_manifest(step: Path, edit: Callable[[dict], None], *, honest: bool) -> None:
    """honest: with the checksum of what it then says."""
    tree = json.loads((step / MANIFEST).read_text())
    edit(tree)
    if honest:
        del tree["crc32"]
        tree["crc32"] = zlib.crc32(json.dumps(tree, sort_keys=True).encode())
    (step / MANIFEST).write_text(json.dumps(tree))


@pytest.mark.parametrize(
    "edit",
    [
        lambda tree: tree["files"].pop(SHARE),
        lambda tree: tree["files"][SHARE].update(crc32=0),
        lambda tree: tree.update(iteration=2),
        lambda tree: tree.update(more=1),
        lambda tree: tree.pop("crc32"),
        lambda tree: tree.clear(),
    ],
    ids=["lists less", "another sum", "another iteration", "more", "no checksum", "empty"],
)
def test_a_manifest_that_was_changed_is_damaged(edit: Callable[[dict], None], tmp_path: Path) -> None:
    step = write(tmp_path, 1, "some text")
    edit_manifest(step, edit, honest=False)
    with pytest.raises(CheckpointError, match=r"manifest\.json: is damaged: its own checksum is not "):
        read_manifest(step)


def test_every_byte_of_a_manifest_counts(tmp_path: Path) -> None:
    """But for white space, which says nothing."""
    step = write(tmp_path, 1, "some text")
    expected, file = read_manifest(step), step / MANIFEST
    data = file.read_bytes()
    for place in range(len(data)):
        file.write_bytes(data[:place] + bytes([data[place] ^ 2]) + data[place + 1 :])
        if not data[place : place + 1].isspace():
            with pytest.raises(CheckpointError, match=r"manifest\.json: is damaged: "):
                read_manifest(step)
    for length in range(len(data) - 1):
        file.write_bytes(data[:length])
        with pytest.raises(CheckpointError, match=r"manifest\.json: is damaged: "):
            read_manifest(step)
    file.write_bytes(data)
    assert read_manifest(step) == expected


def test_a_manifest_of_another_format(tmp_path: Path) -> None:
    step = write(tmp_path, 1, "some text")
    edit_manifest(step, lambda tree: tree.update(format=2), honest=True)
    with pytest.raises(CheckpointError) as error:
        read_manifest(step)
    assert str(error.value) == f"{step / MANIFEST}: format = 2 is not supported, must be 1"


def test_no_manifest(tmp_path: Path) -> None:
    step = write(tmp_path, 1, "some text")
    (step / MANIFEST).unlink()
    with pytest.raises(CheckpointError) as error:
        read_manifest(step)
    assert str(error.value) == f"{step / MANIFEST}: cannot be read: No such file or directory"
    with pytest.raises(CheckpointError, match=r"step_000007/manifest\.json: cannot be read"):
        read_manifest(tmp_path / step_name(7))
