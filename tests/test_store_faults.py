"""What goes wrong with a store on a disk: damage, strangers, two writers, no room, forgery."""

import copy
import errno
import json
import os
import resource
import shutil
import signal
import struct
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from storing import (
    FACTS,
    Child,
    attempt,
    block_of_all,
    flip,
    in_child,
    journal,
    journal_lines,
    large_block,
    one_arena,
    read_manifest,
    reseal_shard,
    rewrite_journal,
    same_content,
    same_tensor,
    seal,
    shards,
    small_block,
    status_bytes,
    tensors_of,
    values,
    write_manifest,
    write_steps,
    write_store,
)

from gradtrail import GradientStore, StoreError
from gradtrail.store import BackgroundWriter, StepStore

BLOCKS = [small_block(step) for step in range(5)]


@pytest.fixture
def folder(tmp_path):
    """A store of five blocks, each in a shard of its own."""
    return write_store(tmp_path / "a", BLOCKS, shard_bytes=1)


def snapshot(folder):
    return {path: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


def read_all(folder, kind=GradientStore):
    """Touch everything that a store on disk can give."""
    with kind(folder, mode="read") as store:
        if kind is StepStore:
            found = [
                (step, {name: tensor.clone() for name, tensor in tensors.items()}, read)
                for step, tensors, read in store.iterate()
            ]
            return found, dict(store.facts)
        store.find(id=1)
        store.find(step=1)
        read = [
            (
                stored.block.step,
                stored.block.ids,
                stored.meta,
                [t.clone() for t in tensors_of(stored.block)],
            )
            for stored in store.blocks()
        ]
        if len(store):
            store.get([0, len(store) - 1])
        return read, store.ids, store.steps, dict(store.layers), store.facts


# ---------------------------------------------------------------- damaged shards


def test_a_flipped_byte_anywhere_in_a_shard_is_found(folder):
    for number, shard in enumerate(shards(folder)):
        size = shard.stat().st_size
        for place in sorted({*range(0, size, 41), 0, 7, 8, size - 1}):
            flip(shard, place, 1 << (place % 8))
            with (
                GradientStore(folder, mode="read") as store,
                pytest.raises(StoreError, match=shard.name),
            ):
                store.verify()
            if place % 3 == 0:
                check_touch(folder, shard, number)
            flip(shard, place, 1 << (place % 8))
    read_all(folder)


def check_touch(folder, shard, number):
    """The first touch of a damaged shard tells it, and the blocks of the others are fine."""
    touches = {
        "blocks": lambda store: [
            tensors_of(stored.block) for stored in store.blocks(rows=[2 * number])
        ],
        "a block alone": lambda store: next(store.blocks(rows=[2 * number], prefetch=False)),
        "without a thread": lambda store: tensors_of(
            next(store.blocks(rows=[2 * number], prefetch=False)).block
        ),
        "one layer": lambda store: next(
            store.blocks(rows=[2 * number], layers=["second"], prefetch=False)
        ).block.layers["second"],
        "get": lambda store: store.get([2 * number + 1]),
    }
    for touch in touches.values():
        with GradientStore(folder, mode="read") as store:
            with pytest.raises(StoreError, match=shard.name):
                touch(store)
            other = (number + 1) % len(BLOCKS)
            assert store.get([2 * other]).ids == (2 * other,)
            with pytest.raises(StoreError, match=shard.name):
                touch(store)


@pytest.mark.slow
def test_a_flip_of_every_byte_of_a_shard_is_found(tmp_path):
    folder = write_store(tmp_path / "a", [small_block(0), small_block(1)], shard_bytes=10**6)
    (shard,) = shards(folder)
    for place in range(shard.stat().st_size):
        for mask in (1, 128):
            flip(shard, place, mask)
            with (
                GradientStore(folder, mode="read") as store,
                pytest.raises(StoreError, match=shard.name),
            ):
                store.get([0])
            flip(shard, place, mask)


def test_verify_names_all_of_them(folder):
    for number in (0, 2, 4):
        flip(shards(folder)[number], -1)
    with GradientStore(folder, mode="read") as store, pytest.raises(StoreError) as info:
        store.verify()
    named = [shard.name in str(info.value) for shard in shards(folder)]
    assert named == [True, False, True, False, True]


@pytest.mark.parametrize("cut", [0, 1, 100, -1], ids=str)
@pytest.mark.parametrize("mode", ["read", "resume"])
def test_a_truncated_shard_is_named_at_once(cut, mode, folder):
    shard = shards(folder)[2]
    shard.write_bytes(shard.read_bytes()[:cut])
    with pytest.raises(StoreError, match=shard.name):
        GradientStore(folder, mode=mode)


@pytest.mark.parametrize("mode", ["read", "resume"])
def test_a_shard_that_grew_is_named_at_once(mode, folder):
    shard = shards(folder)[2]
    shard.write_bytes(shard.read_bytes() + b"\0")
    with pytest.raises(StoreError, match=shard.name):
        GradientStore(folder, mode=mode)


@pytest.mark.parametrize("mode", ["read", "resume"])
def test_a_missing_shard_is_named_at_once(mode, folder):
    shard = shards(folder)[2]
    shard.unlink()
    with pytest.raises(StoreError, match=shard.name):
        GradientStore(folder, mode=mode)


def test_a_shard_of_another_store_is_found(folder, tmp_path):
    """Of the same sizes, so that only its checksum can tell."""
    other = write_store(
        tmp_path / "b",
        [small_block(step + 1, first_id=2 * step) for step in range(5)],
        shard_bytes=1,
    )
    stranger = shards(other)[2].read_bytes()
    assert len(stranger) == shards(folder)[2].stat().st_size
    assert stranger != shards(folder)[2].read_bytes()
    shards(folder)[2].write_bytes(stranger)
    with (
        GradientStore(folder, mode="read") as store,
        pytest.raises(StoreError, match=shards(folder)[2].name),
    ):
        store.verify()
    check_touch(folder, shards(folder)[2], 2)


def test_shards_that_changed_places_are_found(folder):
    first, second = shards(folder)[1:3]
    a, b = first.read_bytes(), second.read_bytes()
    first.write_bytes(b)
    second.write_bytes(a)
    with pytest.raises(StoreError) as info, GradientStore(folder, mode="read") as store:
        store.verify()
    assert first.name in str(info.value)


@pytest.mark.parametrize("kind", ["symlink", "folder", "fifo"])
def test_a_shard_that_is_no_file_is_refused(kind, folder, tmp_path):
    shard = shards(folder)[2]
    kept = tmp_path / "kept"
    shard.rename(kept)
    if kind == "symlink":
        outside = tmp_path / "outside"
        outside.write_bytes(b"x" * kept.stat().st_size)
        shard.symlink_to(outside)
    elif kind == "folder":
        shard.mkdir()
    else:
        os.mkfifo(shard)
    child = Child(_verify, folder)
    text = child.hear(30)
    child.kill()
    assert shard.name in text


def _verify(say, folder):
    try:
        with GradientStore(folder, mode="read") as store:
            store.verify()
        say("fine")
    except StoreError as error:
        say(str(error))


def test_a_damaged_attachment_is_named(folder):
    with GradientStore(folder, mode="resume") as store:
        store.define(**FACTS)
        before = set(folder.iterdir())
        store.attach("covariances", {"a": values(9)}, {"steps": "0"})
        (path,) = set(folder.iterdir()) - before
    whole = path.read_bytes()
    for place in range(0, len(whole), 3):
        flip(path, place)
        with (
            GradientStore(folder, mode="read") as store,
            pytest.raises(StoreError, match="covariances"),
        ):
            store.attached("covariances")
        flip(path, place)
    for end in (0, 5, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:end])
        with (
            GradientStore(folder, mode="read") as store,
            pytest.raises(StoreError, match="covariances"),
        ):
            store.attached("covariances")
    with GradientStore(folder, mode="read") as store:
        same_content(store, BLOCKS)


# ---------------------------------------------------------------- damaged journals and manifests


def test_a_torn_last_line_is_no_error_and_is_left_alone_by_a_reader(folder):
    whole = journal(folder).read_bytes()
    start = whole[:-1].rindex(b"\n") + 1
    for place in range(start + 1, len(whole)):
        journal(folder).write_bytes(whole[:place])
        with GradientStore(folder, mode="read") as store:
            same_content(store, BLOCKS[:4])
        assert journal(folder).read_bytes() == whole[:place]


@pytest.mark.parametrize(
    "torn",
    [b"\0" * 40, b"\xff\xfe", b"{", b'{"shard"', b"null", b"[]", b'{"shard":"' + b"x" * 5000],
    ids=range(7),
)
def test_a_torn_last_line_of_anything_is_cut_off(torn, folder):
    whole = journal(folder).read_bytes()
    journal(folder).write_bytes(whole + torn)
    with GradientStore(folder, mode="read") as store:
        same_content(store, BLOCKS)
    with GradientStore(folder, mode="resume", shard_bytes=1) as store:
        store.define(**FACTS)
        store.append(small_block(5))
    assert journal(folder).read_bytes().startswith(whole)
    assert journal(folder).read_bytes().endswith(b"}\n")
    assert len(journal_lines(folder)) == 7
    with GradientStore(folder, mode="read") as store:
        same_content(store, [*BLOCKS, small_block(5)])


@pytest.mark.parametrize("mode", ["read", "resume"])
def test_a_bad_line_in_the_middle_is_named(mode, folder):
    lines = journal(folder).read_bytes().splitlines(keepends=True)
    for number in range(1, len(lines) - 1):
        for bad in (lines[number][:20] + b"\n", b"\n", b"\0\0\n", b"[]\n", b"{}\n", b'"\xff"\n'):
            journal(folder).write_bytes(b"".join([*lines[:number], bad, *lines[number + 1 :]]))
            before = snapshot(folder)
            with pytest.raises(StoreError, match=rf"line {number + 1}\b"):
                GradientStore(folder, mode=mode)
            assert before.items() <= snapshot(folder).items()


def test_a_flipped_byte_anywhere_in_a_journal_is_found(folder):
    whole = journal(folder).read_bytes()
    last = whole[:-1].rindex(b"\n") + 1
    for place in sorted({*range(0, len(whole), 3), *range(last - 2, last + 2), len(whole) - 1}):
        flip(journal(folder), place, 1 << (place % 7))
        store, error = attempt(lambda: GradientStore(folder, mode="read"))
        if error is None:
            assert place >= last - 1
            same_content(store, BLOCKS[:4])
            store.close()
        flip(journal(folder), place, 1 << (place % 7))


def test_a_damaged_last_line_that_is_whole_loses_nothing_on_disk(folder):
    """A line that ends was written whole; what it says is damaged and not torn."""
    whole = journal(folder).read_bytes()
    flip(journal(folder), len(whole) - 30)
    before = snapshot(folder)
    for mode in ("read", "resume"):
        with pytest.raises(StoreError, match="line 6"):
            GradientStore(folder, mode=mode)
    assert before.items() <= snapshot(folder).items()


@pytest.mark.parametrize(
    "change",
    {
        "twice": lambda lines: [*lines[:3], lines[2], *lines[3:]],
        "swapped": lambda lines: [lines[0], lines[2], lines[1], *lines[3:]],
        "left out": lambda lines: [*lines[:2], *lines[3:]],
        "no head": lambda lines: lines[1:],
        "head twice": lambda lines: [lines[0], *lines],
        "of another rank": lambda lines: [{**lines[0], "rank": 1}, *lines[1:]],
        "of another run": lambda lines: [{**lines[0], "run": "f" * 32}, *lines[1:]],
    }.items(),
    ids=lambda item: item[0],
)
@pytest.mark.parametrize("mode", ["read", "resume"])
def test_lines_out_of_place_are_refused(change, mode, folder):
    rewrite_journal(folder, lambda lines: lines)
    read_all(folder)
    rewrite_journal(folder, change[1])
    before = snapshot(folder)
    with pytest.raises(StoreError, match="journal"):
        GradientStore(folder, mode=mode)
    assert before.items() <= snapshot(folder).items()


def test_the_journal_of_another_run_is_refused(folder, tmp_path):
    other = write_store(tmp_path / "b", BLOCKS, shard_bytes=1)
    shutil.copy(journal(other), journal(folder))
    for mode in ("read", "resume"):
        with pytest.raises(StoreError, match=r"journal-0000"):
            GradientStore(folder, mode=mode)
    assert len(shards(folder)) == 5


@pytest.mark.parametrize("mode", ["read", "resume"])
def test_a_journal_that_is_gone_loses_no_shard(mode, folder):
    """Shards without any line may be all of a store: nothing is deleted for want of a journal."""
    journal(folder).unlink()
    before = snapshot(folder)
    store, error = attempt(lambda: GradientStore(folder, mode=mode))
    if error is None:
        assert len(store) == 0
        store.close()
    else:
        assert "journal" in str(error)
    if mode == "read":
        assert snapshot(folder) == before


def test_a_manifest_that_is_gone_loses_no_shard(folder):
    (folder / "manifest.json").unlink()
    before = snapshot(folder)
    for mode in ("read", "create", "resume"):
        with pytest.raises((StoreError, FileExistsError), match=r"manifest\.json|overwrite|empty"):
            GradientStore(folder, mode=mode)
    assert before.items() <= snapshot(folder).items()


def test_a_cut_manifest_is_refused(folder):
    manifest = folder / "manifest.json"
    whole = manifest.read_bytes()
    for end in range(0, len(whole) - 1, 7):
        manifest.write_bytes(whole[:end])
        for mode in ("read", "resume"):
            with pytest.raises(StoreError, match=r"manifest\.json"):
                GradientStore(folder, mode=mode)
    manifest.write_bytes(whole)
    read_all(folder)


def test_a_flipped_byte_in_a_manifest_changes_nothing_unnoticed(folder):
    expected = summary(read_all(folder))
    manifest = folder / "manifest.json"
    for place in range(len(manifest.read_bytes())):
        flip(manifest, place)
        found, error = attempt(read_all, folder)
        assert error or summary(found) == expected, place
        flip(manifest, place)


def summary(found):
    """What was read, in a form that can be compared."""
    read, *rest = found
    return [(*blocks, [tensor.tolist() for tensor in tensors]) for *blocks, tensors in read], *rest


# ---------------------------------------------------------------- forged files


def walk(value, path=()):
    """Every place in a JSON value."""
    yield path, value
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, part in items:
        yield from walk(part, (*path, key))


def put(value, path, new):
    """The same JSON value with one place changed; ``...`` takes it out."""
    value = copy.deepcopy(value)
    if not path:
        return new
    inside = value
    for key in path[:-1]:
        inside = inside[key]
    if new is ...:
        del inside[path[-1]]
    else:
        inside[path[-1]] = new
    return value


FORGED_NAMES = [
    "/etc/passwd",
    "../0000-000000.safetensors",
    "..",
    ".",
    "",
    "0000-000000.safetensors/../../x",
    "0000-000000.safetensors\n",
    "./0000-000000.safetensors",
    "\u0660000-000000.safetensors",
    "0000-000000.safetensors\0",
    "C:\\x",
    "0000-000099.safetensors",
    "0001-000000.safetensors",
    None,
    3,
    ["0000-000000.safetensors"],
]


@pytest.mark.parametrize("name", FORGED_NAMES, ids=range(len(FORGED_NAMES)))
def test_a_shard_name_that_is_a_path_is_refused(name, folder):
    (folder.parent / "0000-000000.safetensors").write_bytes(shards(folder)[0].read_bytes())

    def change(lines):
        lines[1]["shard"] = name
        return lines

    rewrite_journal(folder, change)
    for mode in ("read", "resume"):
        with pytest.raises(StoreError, match="journal"):
            GradientStore(folder, mode=mode)
    assert (folder.parent / "0000-000000.safetensors").exists()


FORGED = [2**60, 2**28, -1, -(2**70), 0, 1.5, 1e400, None, True, "x", [], {}, [2**60], [[]], ...]


def forge_journal(folder):
    """Every place of one line of a journal, with every wrong value in turn."""
    lines = journal_lines(folder)
    for path, _ in walk(lines[2]):
        if path and path[0] != "line_crc":
            for new in FORGED:
                yield path, new, [*lines[:2], put(lines[2], path, new), *lines[3:]]


def _forged_journal(folder, every):
    one_arena()
    kept, before, count, accepted = journal(folder).read_bytes(), status_bytes("VmPeak"), 0, []
    expected = repr(summary(read_all(folder)))
    before = status_bytes("VmPeak")
    for number, (path, new, lines) in enumerate(forge_journal(folder)):
        if number % every:
            continue
        journal(folder).write_text("".join(seal(line) for line in lines))
        count += 1
        try:
            found = repr(summary(read_all(folder)))
        except StoreError:
            continue
        except Exception as error:
            raise AssertionError(f"{path} = {new!r}: {type(error).__name__}: {error}") from error
        if found == expected:
            accepted.append((path, "equal"))
        else:
            accepted.append((path, new))
    journal(folder).write_bytes(kept)
    return count, accepted, status_bytes("VmPeak") - before


@pytest.mark.parametrize(
    "every", [pytest.param(9, id="some"), pytest.param(1, id="all", marks=pytest.mark.slow)]
)
def test_a_forged_journal_is_refused_before_anything_is_allocated(every, folder):
    count, accepted, grown = in_child(_forged_journal, folder, every)
    assert count > 60
    assert grown < 32 << 20
    # What a line may say differently and stay a store: numbers and texts that stand for themselves.
    free = {"step", "ids", "meta"}
    for path, new in accepted:
        assert new == "equal" or free & set(path), (path, new)


def _forged_manifest(folder, every):
    one_arena()
    kept = read_manifest(folder)
    write_manifest(folder, kept)
    read_all(folder)
    before, count = status_bytes("VmPeak"), 0
    del kept["crc32"]
    for number, (path, _) in enumerate(walk(kept)):
        for other, new in enumerate(FORGED):
            if (number + other) % every or (new is ... and not path):
                continue
            write_manifest(folder, put(kept, path, new))
            count += 1
            try:
                _, error = attempt(read_all, folder)
                assert error is None or str(folder) in str(error)
            except Exception as error:
                raise AssertionError(
                    f"{path} = {new!r}: {type(error).__name__}: {error}"
                ) from error
    return count, status_bytes("VmPeak") - before


@pytest.mark.parametrize(
    "every", [pytest.param(3, id="some"), pytest.param(1, id="all", marks=pytest.mark.slow)]
)
def test_a_forged_manifest_is_refused_before_anything_is_allocated(every, folder):
    count, grown = in_child(_forged_manifest, folder, every)
    assert count > 60
    assert grown < 32 << 20


def test_a_manifest_without_a_layer_of_the_journal_is_refused(folder):
    text = read_manifest(folder)
    (path,) = (path for path, _ in walk(text) if path and path[-1] == "second")
    write_manifest(folder, put(text, path, ...))
    with pytest.raises(StoreError, match="second|manifest"):
        read_all(folder)


@pytest.mark.parametrize("version", [1, "gradtrail-store-2", "", None, [], "x"], ids=str)
def test_a_store_of_another_format_names_its_version(version, folder):
    text = read_manifest(folder)
    assert text["format"] == "gradtrail-store-1"
    write_manifest(folder, {**text, "format": version})
    for mode in ("read", "resume"):
        with pytest.raises(StoreError, match="(?s)format|manifest"):
            GradientStore(folder, mode=mode)


def shard_parts(data):
    (size,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def shard_bytes(header, body):
    text = json.dumps(header, separators=(",", ":")).encode()
    return struct.pack("<Q", len(text)) + text + body


def forge_shards(data):
    """Shards whose journal says that they are right, and that are not what it tells of them."""
    header, body = shard_parts(data)
    names = [name for name in header if name != "__metadata__"]
    yield b""
    yield b"\0" * 4
    yield struct.pack("<Q", 2**60) + data[8:]
    yield struct.pack("<Q", 2**63 + 5) + data[8:]
    yield struct.pack("<Q", len(data)) + data[8:]
    yield struct.pack("<Q", 0) + data[8:]
    yield data[:-1]
    yield shard_bytes([], body)
    yield shard_bytes({}, b"")
    for name in names:
        entry = header[name]
        start, end = entry["data_offsets"]
        for change in (
            {"shape": [2**60]},
            {"shape": [2**32, 2**32]},
            {"shape": [-1, -entry["shape"][-1]]},
            {"shape": [1, *entry["shape"]]},
            {"shape": entry["shape"][::-1]},
            {"shape": "x"},
            {"shape": [1.0]},
            {"dtype": "F64"},
            {"dtype": "I32"},
            {"dtype": "nonsense"},
            {"dtype": None},
            {"data_offsets": [0, 2**60]},
            {"data_offsets": [start + 4, end + 4]},
            {"data_offsets": [end, start]},
            {"data_offsets": [-4, end - start - 4]},
            {"data_offsets": [start]},
            {"data_offsets": None},
        ):
            new = {**entry, **change}
            if new != entry:
                yield shard_bytes({**header, name: new}, body)
        yield shard_bytes({key: value for key, value in header.items() if key != name}, body)
        yield shard_bytes({**header, name: None}, body)
        yield shard_bytes(
            {(key + "x" if key == name else key): header[key] for key in header}, body
        )


def _forged_shards(folder, every):
    one_arena()
    read_all(folder)
    shard = shards(folder)[2]
    kept, count, accepted = shard.read_bytes(), 0, 0
    expected = repr(summary(read_all(folder)))
    before = status_bytes("VmPeak")
    for number, data in enumerate(forge_shards(kept)):
        if number % every:
            continue
        reseal_shard(folder, shard, data)
        count += 1
        try:
            found, error = attempt(read_all, folder)
        except Exception as other:
            raise AssertionError(f"{data[:300]}: {type(other).__name__}: {other}") from other
        if error is None:
            assert repr(summary(found)) == expected, data[:300]
            accepted += 1
        else:
            assert shard.name in str(error) or "Line 4" in str(error), (data[:200], error)
    reseal_shard(folder, shard, kept)
    assert repr(summary(read_all(folder))) == expected
    return count, accepted, status_bytes("VmPeak") - before


def test_a_forged_shard_is_refused_before_anything_is_allocated(folder):
    count, accepted, grown = in_child(_forged_shards, folder, 1)
    assert count > 40
    assert accepted == 0
    assert grown < 32 << 20


def test_no_file_of_a_store_is_a_pickle(folder):
    with GradientStore(folder, mode="resume") as store:
        store.define(**FACTS)
        store.attach("covariances", {"a": values(3)}, {"x": "y"})
    for path in folder.iterdir():
        data = path.read_bytes()
        assert not data.startswith((b"\x80", b"PK"))
        assert path.suffix in {".json", ".jsonl", ".safetensors"} or not data


# ---------------------------------------------------------------- two writers


def _hold(say, folder, mode):
    with GradientStore(folder, mode=mode, shard_bytes=1) as store:
        store.define(**FACTS)
        store.append(small_block(5))
        say("open")
        signal.pause()


def test_a_second_writer_is_refused(folder):
    child = Child(_hold, folder, "resume")
    try:
        assert child.hear() == "open"
        before = snapshot(folder)
        for mode in ("resume", "overwrite", "create"):
            with pytest.raises((StoreError, OSError), match="(?s)" + folder.name):
                GradientStore(folder, mode=mode)
        assert snapshot(folder) == before
        with GradientStore(folder, mode="read") as store:
            same_content(store, [*BLOCKS, small_block(5)])
    finally:
        assert child.kill() == -signal.SIGKILL
    with GradientStore(folder, mode="resume") as store:  # a killed writer leaves no lock behind
        store.define(**FACTS)
        store.append(small_block(6))
        with pytest.raises((StoreError, OSError)):  # nor may one process write twice
            GradientStore(folder, mode="resume")
    with GradientStore(folder, mode="read") as store:
        same_content(store, [*BLOCKS, small_block(5), small_block(6)])
    with GradientStore(folder, mode="overwrite") as store:
        store.define(**FACTS)


def test_a_second_writer_of_a_new_folder_is_refused(tmp_path):
    child = Child(_hold, tmp_path / "a", "create")
    try:
        assert child.hear() == "open"
        for mode in ("resume", "overwrite", "create"):
            with pytest.raises((StoreError, OSError)):
                GradientStore(tmp_path / "a", mode=mode)
    finally:
        child.kill()
    with GradientStore(tmp_path / "a", mode="read") as store:
        same_content(store, [small_block(5)])


def _race(say, folder, number):
    say("ready")
    try:
        with GradientStore(folder, shard_bytes=1) as store:
            store.define(**FACTS)
            store.append(small_block(number))
        say("wrote")
    except (StoreError, OSError):
        say("refused")


def test_of_writers_that_start_together_one_writes(tmp_path):
    for turn in range(5):
        folder = tmp_path / str(turn)
        children = [Child(_race, folder, number) for number in range(4)]
        for child in children:
            assert child.hear() == "ready"
        told = [child.hear() for child in children]
        for child in children:
            child.end()
        assert told.count("wrote") == 1
        with GradientStore(folder, mode="read") as store:
            same_content(store, [small_block(told.index("wrote"))])


# ---------------------------------------------------------------- no room


@contextmanager
def largest_file(num_bytes):
    """Files of this process cannot grow beyond a size, as on a disk that fills while writing."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def put_blocks(store, blocks, background):
    if background:
        with BackgroundWriter(store) as writer:
            for block in blocks:
                writer.submit(block)
    else:
        for block in blocks:
            store.append(block)
        store.flush()


@pytest.mark.parametrize("background", [False, True])
def test_a_disk_that_fills_keeps_what_was_journalled(background, tmp_path):
    folder = tmp_path / "a"
    blocks = [small_block(step) for step in range(3)] + [large_block(3, 200_000)]
    with GradientStore(folder, shard_bytes=1) as store:
        store.define(**FACTS)
        with largest_file(50_000), pytest.raises(OSError, match="(?s)kept|still there") as info:
            put_blocks(store, blocks, background)
        assert info.value.errno in {errno.EFBIG, errno.ENOSPC}
        assert str(folder) in str(info.value)
    assert [path.name for path in folder.iterdir() if path.name.endswith(".tmp")] == []
    with GradientStore(folder, mode="read") as store:
        store.verify()
        same_content(store, blocks[:3])
    with GradientStore(folder, mode="resume", shard_bytes=1) as store:
        store.define(**FACTS)
        store.append(blocks[3])
    with GradientStore(folder, mode="read") as store:
        same_content(store, blocks)


def test_a_journal_that_cannot_grow_keeps_what_it_had(tmp_path):
    """The line is torn by a full disk, in a store that then goes on."""
    folder = tmp_path / "a"
    with GradientStore(folder, shard_bytes=1) as store:
        store.define(**FACTS)
        for step in range(30):
            store.append(small_block(step))
        size = journal(folder).stat().st_size
        biggest = max(path.stat().st_size for path in shards(folder))
        assert size > 2 * biggest
        with largest_file(size + 20), pytest.raises(OSError, match="kept|still there"):
            put_blocks(store, [small_block(30)], background=False)
        assert journal(folder).stat().st_size == size  # no part of a line is left
        attempt(put_blocks, store, [small_block(31)], False, refused=(OSError, RuntimeError))
    with GradientStore(folder, mode="read") as store:
        store.verify()
        count = len(store.records)
        assert count >= 30
        assert [record.step for record in store.records[:30]] == list(range(30))
        for stored in store.blocks():
            same_tensor(
                stored.block.layers["second"].values_bd,
                small_block(stored.block.step).layers["second"].values_bd,
            )
    with GradientStore(folder, mode="resume") as store:
        store.define(**FACTS)
        store.append(small_block(50))
    with GradientStore(folder, mode="read") as store:
        store.verify()
        assert len(store.records) == count + 1


TMPFS = """
import ctypes, errno, os, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
folder = Path(sys.argv[2])
libc = ctypes.CDLL(None, use_errno=True)
if libc.mount(b"none", str(folder).encode(), b"tmpfs", 0, b"size=1m"):
    sys.exit(77)
from storing import FACTS, large_block, same_content, small_block
from gradtrail import GradientStore
from gradtrail.store import BackgroundWriter
def fill(store, background):
    store.define(**FACTS)
    if background:
        with BackgroundWriter(store) as writer:
            for step in range(40):
                writer.submit(large_block(step, 100_000))
    else:
        for step in range(40):
            store.append(large_block(step, 100_000))
for background in (False, True):
    try:
        with GradientStore(folder / "a", mode="overwrite", shard_bytes=1) as store:
            fill(store, background)
        sys.exit("no error")
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        text = str(error)
    with GradientStore(folder / "a", mode="read") as store:
        store.verify()
        count = len(store.records)
        same_content(store, [large_block(step, 100_000) for step in range(count)])
    print(count, text)
"""


@pytest.mark.slow
def test_a_disk_without_room(tmp_path):
    """A disk of 1 MiB, seen by the child alone."""
    unshare = shutil.which("unshare")
    if unshare is None:
        pytest.skip("needs unshare to mount a small disk")
    done = subprocess.run(
        [unshare, "-Urm", sys.executable, "-c", TMPFS, str(Path(__file__).parent), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip("this machine lets nobody mount a small disk")
    assert done.returncode == 0, done.stderr
    for line in filter(None, done.stdout.splitlines()):
        if line[0].isdigit():
            assert 5 <= int(line.split()[0]) <= 9, line
    assert "kept" in done.stdout or "still there" in done.stdout


# ---------------------------------------------------------------- the same for stores of steps


def test_a_step_store_finds_what_is_damaged(tmp_path):
    folder = write_steps(tmp_path / "a", range(6))
    found = read_all(folder, StepStore)
    assert [step for step, _, _ in found[0]] == list(range(6))
    for shard in shards(folder):
        for place in range(0, shard.stat().st_size, 29):
            flip(shard, place)
            with (
                StepStore(folder, mode="read") as store,
                pytest.raises(StoreError, match=shard.name),
            ):
                store.verify()
            with pytest.raises(StoreError, match=shard.name):
                read_all(folder, StepStore)
            flip(shard, place)
    whole = journal(folder).read_bytes()
    for place in range(0, len(whole), 5):
        flip(journal(folder), place)
        try:
            steps = [step for step, _, _ in read_all(folder, StepStore)[0]]
        except StoreError:
            pass
        else:
            assert steps == list(range(len(steps)))
            assert place > len(whole) // 2
        flip(journal(folder), place)
    read_all(folder, StepStore)


def test_writers_of_steps_exclude_each_other(tmp_path):
    with StepStore(tmp_path / "a") as store:
        store.define()
        store.append(0, {"a": values(2)}, {})
        with pytest.raises((StoreError, OSError)):
            StepStore(tmp_path / "a", mode="resume")
        with pytest.raises((StoreError, OSError)):
            StepStore(tmp_path / "a", mode="overwrite")
        store.append(1, {"a": values(2)}, {})
    with StepStore(tmp_path / "a", mode="read") as store:
        assert tuple(store.steps) == (0, 1)


def test_blocks_of_every_kind_are_verified(tmp_path):
    folder = write_store(
        tmp_path / "a", [block_of_all(step) for step in range(3)], shard_bytes=5000
    )
    with GradientStore(folder, mode="read") as store:
        store.verify()
        same_content(store, [block_of_all(step) for step in range(3)])
