"""Files that grow past the system's cache: the same bytes, whatever the disk does meanwhile."""

import errno
import mmap
import os
import random
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
import torch
from storing import FACTS

from gradtrail import GradientStore, files
from gradtrail.factors import GradientBlock, LinearFactors
from gradtrail.store import shard_file as shard_file_module
from gradtrail.store import shards as shards_module
from gradtrail.store.shard_file import ShardFile

fcntl = pytest.importorskip("fcntl")
RESERVED = 8192
HEAD = bytes(range(256)) * 32
SIZES = [1, 4095, 4096, 4097, 100_000, (4 << 20) - 7, 4 << 20, (9 << 20) + 13, 0]


def drawn(size, seed=0):
    return random.Random(seed).randbytes(size)


def is_direct(number):
    return bool(fcntl.fcntl(number, fcntl.F_GETFL) & os.O_DIRECT)


@pytest.fixture
def make(tmp_path):
    """Makes files, and closes what is left open."""
    made = []

    def new(name="a", *, direct=True):
        made.append(ShardFile(tmp_path / name, RESERVED, direct=direct))
        return made[-1]

    yield new
    for file in made:
        file.close()


def content(tmp_path, name="a"):
    return (tmp_path / name).read_bytes()


def check_whole(tmp_path, file, added, *, head=HEAD):
    """The file is its header and what was added, and knows its sum."""
    assert (file.num_bytes, file.crc32) == (len(added), zlib.crc32(added))
    file.end(head)
    file.sync()
    assert content(tmp_path) == (b" " * RESERVED if head is None else head) + added


@pytest.mark.parametrize("direct", [False, True], ids=["plain", "direct"])
@pytest.mark.parametrize("settled", [False, True], ids=["at the end", "each time"])
def test_what_is_added_is_there(direct, settled, make, tmp_path):
    file, added = make(direct=direct), b""
    for seed, size in enumerate(SIZES):
        piece = drawn(size, seed)
        file.add(memoryview(piece))
        added += piece
        if settled or size == SIZES[-1]:
            file.settle()
            file.settle()  # a second one changes nothing
            assert content(tmp_path)[RESERVED : RESERVED + len(added)] == added
    check_whole(tmp_path, file, added)


def test_a_header_can_be_left_out(make, tmp_path):
    file = make()
    file.add(memoryview(b"abc"))
    file.settle()
    check_whole(tmp_path, file, b"abc", head=None)


@pytest.mark.parametrize("direct", [False, True], ids=["plain", "direct"])
@pytest.mark.parametrize("kept", [0, 10, 4096, (4 << 20) + 5])
def test_going_back_leaves_what_was_there(kept, direct, make, tmp_path):
    file, first, last = make(direct=direct), drawn(kept, 1), drawn(5000, 3)
    file.add(memoryview(first))
    file.settle()
    mark = file.mark()
    for lost in (100, 9 << 20):
        file.add(memoryview(drawn(lost, 2)))
        file.go_back(mark)
        assert content(tmp_path)[RESERVED:] == first
    file.add(memoryview(last))
    file.settle()
    check_whole(tmp_path, file, first + last)


@pytest.mark.parametrize("direct", [False, True], ids=["plain", "direct"])
def test_what_was_added_moves_to_another_file(direct, make, tmp_path):
    file, added = make("b", direct=direct), drawn((5 << 20) + 3)
    file.add(memoryview(added))
    file.settle()
    other = make(direct=False)
    file.copy_to(other)
    check_whole(tmp_path, other, added)


def test_a_file_that_cannot_be_made_leaves_none(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("gradtrail.store.shard_file.write_all", full)
    with pytest.raises(OSError, match="No space left"):
        ShardFile(tmp_path / "a", RESERVED, direct=True)
    assert list(tmp_path.iterdir()) == []


def test_a_system_without_large_pages(tmp_path, monkeypatch):
    class Small(mmap.mmap):
        def madvise(self, *_):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(mmap, "mmap", Small)
    file = ShardFile(tmp_path / "a", RESERVED, direct=True)
    file.add(memoryview(HEAD))
    file.settle()
    file.end(None)
    file.close()
    assert (tmp_path / "a").read_bytes()[RESERVED:] == HEAD


def test_the_sum_is_the_same_by_either_library():
    isal = pytest.importorskip("isal.isal_zlib")
    assert files.crc32 is isal.crc32
    for size in (0, 1, 7, 100_001):
        whole = drawn(size)
        first, last = whole[: size // 3], whole[size // 3 :]
        assert isal.crc32(last, isal.crc32(first)) == zlib.crc32(whole)


def test_without_the_extra_the_sums_are_zlibs():
    hidden = "import sys; sys.modules['isal'] = sys.modules['isal.isal_zlib'] = None\n"
    code = "import zlib, gradtrail.files as f; print(f.crc32 is zlib.crc32)"
    done = subprocess.run([sys.executable, "-c", hidden + code], capture_output=True, check=True)
    assert done.stdout.strip() == b"True"


# ---------------------------------------------------------------- where there is no direct way


def plainly(number, view, place):
    """Write through the cache into a file that is open for direct writes."""
    with Path(f"/proc/self/fd/{number}").open("r+b", buffering=0) as file:
        return os.pwrite(file.fileno(), view, place)


def refused(number, view, place):
    if is_direct(number):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    return plainly(number, view, place)


def cut_short(number, view, place):
    return plainly(number, view[:8192], place)


def cut_within_a_block(number, view, place):
    return plainly(number, view[:5000], place)


WAYS = {refused: False, cut_short: True, cut_within_a_block: False}  # and if direct in the end


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_disk_that_does_less_than_it_was_asked(way, make, tmp_path, monkeypatch):
    file, added = make(), drawn((5 << 20) + 77)
    assert file.is_direct
    with monkeypatch.context() as patch:
        patch.setattr("gradtrail.store.shard_file.os.pwrite", once_each(way))
        file.add(memoryview(added))
        file.settle()
    assert file.is_direct == WAYS[way]
    check_whole(tmp_path, file, added)


def once_each(way):
    """The system's own call for what ``plainly`` asks of it, another way for all else."""
    pwrite, inside = os.pwrite, []

    def do(number, view, place):
        if inside:
            return pwrite(number, view, place)
        inside.append(True)
        try:
            return way(number, view, place)
        finally:
            inside.clear()

    return do


def test_a_full_disk_is_told_and_leaves_what_was_there(make, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    file, first = make(), drawn(7000)
    file.add(memoryview(first))
    file.settle()
    mark = file.mark()
    with monkeypatch.context() as patch:
        patch.setattr("gradtrail.store.shard_file.os.pwrite", full)
        file.add(memoryview(drawn(100)))
        with pytest.raises(OSError, match="No space left"):
            file.settle()
    file.go_back(mark)
    check_whole(tmp_path, file, first)


@pytest.mark.parametrize("lacking", ["the flag", "the call", "a file system"])
def test_where_there_is_no_direct_way(lacking, make, tmp_path, monkeypatch):
    def refuse(file, command, *_):
        if command == fcntl.F_SETFL:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return control(file, command)

    control = fcntl.fcntl
    if lacking == "the flag":
        monkeypatch.delattr(os, "O_DIRECT")
    elif lacking == "the call":
        monkeypatch.setattr("gradtrail.store.shard_file.fcntl", None)
    else:
        monkeypatch.setattr(fcntl, "fcntl", refuse)
    file, added = make(), drawn(70_000)
    file.add(memoryview(added))
    file.settle()
    assert not file.is_direct
    check_whole(tmp_path, file, added)


# ---------------------------------------------------------------- in stores


def block(step, positions):
    generator = torch.Generator().manual_seed(step)
    a = torch.randn(1, positions, 6, generator=generator)
    g = torch.randn(1, positions, 5, generator=generator)
    return GradientBlock(step, (step,), {"l": LinearFactors(a, g)})


def fill(folder):
    """Records of 1.2 MB that end anywhere, larger and smaller ones, read as soon as they lie."""
    sizes = [27_273, 27_273, 100_001, 1, 27_273]
    with GradientStore(folder, shard_bytes=4 << 20) as store:
        store.define(**FACTS)
        direct = []
        for step, positions in enumerate(sizes):
            store.append(block(step, positions))
            writer = store.log._writer._open
            direct.append(None if writer is None else writer._file.is_direct)
            for before in range(step + 1):
                got = store.get([before]).layers["l"]
                asked = block(before, sizes[before]).layers["l"]
                assert got.activation_bsi.equal(asked.activation_bsi)
                assert got.output_gradient_bso.equal(asked.output_gradient_bso)
    return direct


def test_large_records_go_past_the_cache_and_shards_are_the_same(tmp_path, monkeypatch):
    direct = fill(tmp_path / "a")
    assert direct == [True, True, None, False, False]  # the first record of a shard decides
    monkeypatch.setattr(shards_module, "_DIRECT_RECORD", 1 << 60)
    assert fill(tmp_path / "b") == [False, False, None, False, False]
    names = sorted(path.name for path in (tmp_path / "a").glob("*.safetensors"))
    assert len(names) == 2
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    with GradientStore(tmp_path / "a", mode="read") as store:
        store.verify()


def test_what_is_read_again_right_away_stays_in_the_cache():
    assert fill(None) == [False, False, None, False, False]


def test_shards_of_one_writer_share_their_memory(tmp_path, monkeypatch):
    made, memory = [], shard_file_module._memory
    monkeypatch.setattr(
        shard_file_module, "_memory", lambda size: made.append(size) or memory(size)
    )
    blocks = [block(step, 30_000 + step) for step in range(3)]
    with GradientStore(tmp_path / "a", shard_bytes=1 << 20) as store:
        store.define(**FACTS)
        for one in blocks:
            store.append(one)
    assert len(made) == 1
    assert len(list((tmp_path / "a").glob("*.safetensors"))) == 3
    with GradientStore(tmp_path / "a", mode="read") as store:
        for one, stored in zip(blocks, store.blocks(), strict=True):
            assert torch.equal(
                stored.block.layers["l"].activation_bsi, one.layers["l"].activation_bsi
            )
