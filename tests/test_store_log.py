"""The parts of a store one by one: files, journal lines, layouts, shards, threads, ranks."""

import errno
import json
import os
import resource
import subprocess
import sys
import textwrap
import threading
import time
import weakref
import zlib
from pathlib import Path

import numpy as np
import pytest
import store_rank_checks
import torch
from processes import Workers
from safetensors import safe_open
from safetensors.torch import load_file
from storing import FACTS, values

from gradtrail.errors import StoreError
from gradtrail.factors import DenseGradient, GradientBlock, LinearFactors, tensors_of
from gradtrail.files import DTYPE_NAMES, join_sums, replace_text, write_tensors
from gradtrail.store import (
    BackgroundWriter,
    BlockRecord,
    GradientStore,
    StepStore,
    StoreFacts,
    records_digest,
)
from gradtrail.store.codec import BlockKind, gather
from gradtrail.store.fetch import AbstractSource, fetched
from gradtrail.store.journal import decode_line, encode_line
from gradtrail.store.layout import Layouts, plan_layout
from gradtrail.store.shard_file import ShardFile
from gradtrail.store.shards import ShardWriter

ROOT = Path(__file__).resolve().parent.parent
F32, I64, U8 = torch.float32, torch.int64, torch.uint8


def block(step, b=2, s=3, i=4, o=5, layers=2):
    named = {
        f"l{n}": LinearFactors(values(b, s, i, seed=step), values(b, s, o, seed=step + n), True)
        for n in range(layers)
    }
    return GradientBlock(step, tuple(range(step * b, step * b + b)), named)


def child(code, *args, **options):
    script = textwrap.dedent(code)
    return subprocess.run(
        [sys.executable, "-c", script, *map(str, args)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        **options,
    )


# ---------------------------------------------------------------- files


def test_a_file_of_every_dtype_is_one_that_safetensors_reads(tmp_path):
    tensors = {code: torch.ones(3, 2).to(dtype) for dtype, code in DTYPE_NAMES.items()}
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 4), "turned": values(3, 4).t()}
    path = tmp_path / "all.safetensors"
    total = write_tensors(path, tensors, {"a": "b"})
    data = path.read_bytes()
    assert total == (len(data), zlib.crc32(data))
    assert list(tmp_path.iterdir()) == [path]
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"a": "b"}
        for name, tensor in tensors.items():
            got = file.get_tensor(name)
            assert (got.dtype, got.shape) == (tensor.dtype, tensor.shape)
            assert (
                got.contiguous().view(U8).equal(tensor.contiguous().view(U8))
                if got.dim()
                else (got == tensor)
            )


def test_a_failed_write_leaves_what_was_there(tmp_path, monkeypatch):
    write_tensors(tmp_path / "a", {"x": values(3)}, {})
    replace_text(tmp_path / "t", "old")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def fail(_):
        raise OSError(errno.EIO, "broken disk")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="broken disk"):
        write_tensors(tmp_path / "a", {"x": values(4)}, {})
    with pytest.raises(OSError, match="broken disk"):
        replace_text(tmp_path / "t", "new")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("size", [0, 1, 7, 1000, 1 << 20])
def test_checksums_are_joined_without_the_bytes(size):
    first, second = b"a header", os.urandom(size)
    joined = join_sums(zlib.crc32(first), zlib.crc32(second), size)
    assert joined == zlib.crc32(first + second)


# ---------------------------------------------------------------- journal and layouts


@pytest.mark.parametrize("entry", [{}, {"a": [1, "x", None]}, {"line_crc": 3}, {"ä": "\n\u2028"}])
def test_a_line_comes_back_and_no_flip_of_it_does(entry):
    line = encode_line(entry)
    if entry:  # an object of nothing else has no comma to begin the checksum with
        assert decode_line(line[:-1]) == entry
    assert line.count(b"\n") == 1
    for place in range(len(line) - 1):
        changed = bytearray(line[:-1])
        changed[place] ^= 1
        assert decode_line(bytes(changed)) is None


SPECS = [("a", F32, (2, 3)), ("i", I64, (2,)), ("u", U8, (3,)), ("b", F32, ())]


def test_tensors_lie_at_multiples_of_their_elements():
    layout = plan_layout(SPECS, None)
    assert list(layout.tensors) == ["i", "a", "b", "u"]
    starts = {spec.key: spec.start for spec in layout.tensors.values()}
    assert starts == {"i": 0, "a": 16, "b": 40, "u": 44}
    assert (layout.num_bytes, layout.padding, layout.stride) == (47, 1, 48)


def test_equal_layouts_are_one_object():
    layouts = Layouts(BlockKind())
    first, second = (gather(block(step).layers, None).layout for step in (0, 1))
    assert layouts.check(first) is first
    layouts.keep(first)
    assert layouts.check(second) is first
    assert layouts.read(json.loads(first.text), first.num_bytes) is first


def changed(path, value):
    entry = json.loads(gather(block(0).layers, None).layout.text)
    inner = entry
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    return entry


FORGED = {
    "huge": (("tensors", 0, 2), [1 << 40, 1 << 20]),
    "negative": (("tensors", 0, 2), [-2, -3, 4]),
    "beyond": (("tensors", 0, 2), [1 << 70]),
    "no number": (("tensors", 0, 2), [2.0, 3, 4]),
    "boolean": (("tensors", 0, 2), [True, 3, 4]),
    "dtype": (("tensors", 0, 1), "F128"),
    "no dtype": (("tensors", 0, 1), ["F32"]),
    "twice": (("tensors", 1, 0), "l0/a"),
    "kind": (("form", "l0", "kind"), "pickle"),
    "no key": (("form", "l0", "a"), "l9/a"),
    "role": (("form", "l0", "a"), 3),
    "groups": (("form", "l0", "groups"), 0),
    "many groups": (("form", "l0", "groups"), 3),
    "bias": (("form", "l0", "bias"), 1),
    "no form": (("form",), None),
    "unused": (("form",), {}),
    "constant": (("form", "l0", "constant"), "l0/a"),
    "nothing": (("tensors",), None),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_layout_is_refused(name):
    with pytest.raises(StoreError, match="a record's layout is none of this library"):
        Layouts(BlockKind()).read(changed(*FORGED[name]), 1 << 20)


# ---------------------------------------------------------------- shards


@pytest.mark.parametrize("shard_bytes", [1, 300, 1 << 26])
def test_a_shard_is_a_file_that_safetensors_reads(tmp_path, shard_bytes):
    """With the header in the room that was left for it, and with records moved behind it."""
    layout = plan_layout(SPECS, None)
    tensors = {
        key: torch.full(spec.shape, 3).to(spec.dtype) for key, spec in layout.tensors.items()
    }
    writer = ShardWriter(tmp_path, "0000-000000.safetensors", shard_bytes, layout, outlasts=True)
    givers = [lambda key=key: tensors[key] for key in layout.tensors]
    starts = [writer.add(layout, givers) for _ in range(3)]
    assert starts == [0, 48, 96]
    spec = layout.tensors["a"]
    assert writer.shard.tensor(48, spec).equal(tensors["a"])  # of the open file
    total = writer.finish()
    path = tmp_path / "0000-000000.safetensors"
    data = path.read_bytes()
    assert total == (len(data), zlib.crc32(data))
    assert writer.shard.data_start % 8 == 0
    assert writer.shard.tensor(48, spec).equal(tensors["a"])  # of the renamed one
    writer.shard.verify()
    read = load_file(path)
    names = [f"{n}/{key}" for n in range(3) for key in layout.tensors]
    assert set(read) == {*names, *(f"{n}:pad" for n in range(3))}
    assert all(read[name].equal(tensors[name.split("/")[1]]) for name in names)
    assert list(tmp_path.iterdir()) == [path]


def test_the_room_for_the_header_is_used_where_records_are_large(tmp_path):
    layout = plan_layout([("a", F32, (1 << 16,))], None)
    writer = ShardWriter(tmp_path, "0000-000000.safetensors", 4 << 18, layout, outlasts=False)
    kept = next(tmp_path.iterdir()).stat().st_ino
    for _ in range(4):
        writer.add(layout, [lambda: torch.zeros(1 << 16)])
    writer.finish()
    path = tmp_path / "0000-000000.safetensors"
    assert path.stat().st_ino == kept
    assert writer.shard.data_start == 4096
    assert set(load_file(path)) == {f"{n}/a" for n in range(4)}


def test_a_tensor_that_cannot_be_given_leaves_no_part(tmp_path):
    layout = plan_layout([("a", F32, (4,)), ("b", F32, (4,))], None)
    writer = ShardWriter(tmp_path, "0000-000000.safetensors", 100, layout, outlasts=False)
    writer.add(layout, [lambda: torch.ones(4)] * 2)

    def fail():
        raise OverflowError("does not fit")

    with pytest.raises(OverflowError, match="does not fit"):
        writer.add(layout, [lambda: torch.ones(4), fail])
    writer.add(layout, [lambda: torch.zeros(4)] * 2)
    writer.finish()
    writer.shard.verify()
    assert [int(t[0]) for t in load_file(tmp_path / "0000-000000.safetensors").values()].count(
        1
    ) == 2


def mappings(folder):
    return Path("/proc/self/maps").read_text().count(str(folder))


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="no list of mappings here")
@pytest.mark.parametrize("together", [True, False], ids=["small", "large"])
def test_a_mapping_goes_with_its_tensors_and_writes_nothing(tmp_path, together):
    side = 256 if together else 16640  # records of 0.25 MiB, and of a little over 16 MiB
    big = LinearFactors(values(2, 64, side), values(2, 64, side, seed=1), True)
    with GradientStore(tmp_path / "a") as store:
        store.define(**FACTS)
        store.append(GradientBlock(0, (0, 1), {"l": big}))
    before = (tmp_path / "a" / "0000-000000.safetensors").read_bytes()
    with GradientStore(tmp_path / "a", mode="read") as store:
        stored = next(store.blocks())
        assert mappings(tmp_path) == 0
        gradient = stored.block.layers["l"]
        assert mappings(tmp_path) == (1 if together else 2)
        numbers = Path("/proc/self/fd").iterdir()
        opened = [os.path.realpath(number) for number in numbers]
        assert not any(str(tmp_path) in path for path in opened)
        gradient.activation_bsi.zero_()  # changes a private copy of the pages
        del gradient
        if together:  # one mapping for all tensors of the block, which goes with the block
            stored = next(store.blocks())
        assert mappings(tmp_path) == 0
        assert stored.block.layers["l"].activation_bsi.equal(big.activation_bsi)
        store.verify()
    assert (tmp_path / "a" / "0000-000000.safetensors").read_bytes() == before


READ_MUCH = """
    import sys, torch
    from gradtrail.factors import GradientBlock, LinearFactors
    from gradtrail.store import GradientStore

    def resident():
        lines = open("/proc/self/status").read().splitlines()
        return max(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) >> 10

    one = torch.ones(4, 64, 256)
    layers = {f"l{n}": LinearFactors(one + n, one - n) for n in range(8)}
    num_blocks = int(sys.argv[2])
    for mode in ("create", "read"):
        before = resident()
        with GradientStore(sys.argv[1], mode=mode) as store:
            if mode == "create":
                store.define(id_scheme="index")
                for step in range(num_blocks):
                    store.append(GradientBlock(step, tuple(range(4 * step, 4 * step + 4)), layers))
            total = sum(
                float(gradient.activation_bsi.sum())
                for stored in store.blocks()
                for gradient in stored.block.layers.values()
            )
            assert total == num_blocks * one.numel() * (8 + 28), total
        print(resident() - before)
"""


@pytest.mark.parametrize("num_blocks", [64, pytest.param(512, marks=pytest.mark.slow)])
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no memory figures here")
def test_memory_does_not_grow_with_the_store(tmp_path, num_blocks):
    """256 MiB, or 2 GiB in 4 MiB blocks, written and read within 48 MiB."""
    done = child(READ_MUCH, tmp_path / "a", num_blocks, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert max(map(int, done.stdout.split())) < 48


# ---------------------------------------------------------------- what is stored


def test_shared_and_turned_inputs_are_stored_once_and_as_they_lie(tmp_path):
    image = values(2, 5, 7)  # [b, i, s], as a convolution's input lies
    a, g = image.transpose(1, 2), values(2, 7, 3)
    layers = {"q": LinearFactors(a, g), "k": LinearFactors(a, g + 1), "v": LinearFactors(a[:], g)}
    with GradientStore(tmp_path / "a") as store:
        store.define(**FACTS)
        store.append(GradientBlock(0, (0, 1), layers))
        assert store.nbytes == image.nbytes + 2 * g.nbytes
        got = next(store.blocks()).block.layers
        q, k, v = got["q"], got["k"], got["v"]
    assert q.activation_bsi is k.activation_bsi is v.activation_bsi
    assert q.activation_bsi.stride() == a.stride()
    assert q.activation_bsi.equal(a)
    assert v.output_gradient_bso is q.output_gradient_bso
    assert k.output_gradient_bso.equal(g + 1)
    assert set(load_file(tmp_path / "a" / "0000-000000.safetensors")) == {
        "0/q/a/t",
        "0/q/g",
        "0/k/g",
    }


def test_rows_of_blocks_of_other_forms_are_joined():
    factors = block(0, layers=1).layers["l0"]
    dense = DenseGradient(values(2, 25), (5, 4), has_bias=True)
    with GradientStore(residency="memory") as store:
        store.define(**FACTS)
        store.append(GradientBlock(0, (0, 1), {"l0": factors, "only": dense}))
        store.append(GradientBlock(1, (2, 3), {"l0": dense}))
        got = store.get([3, 0])
    assert got.ids == (3, 0)
    assert got.layers["l0"].values_bd[0].equal(dense.values_bd[1])
    weight = factors.output_gradient_bso[0].T @ factors.activation_bsi[0]
    torch.testing.assert_close(
        got.layers["l0"].values_bd[1, :20].view(5, 4), weight, rtol=1e-6, atol=1e-6
    )
    assert got.layers["only"].values_bd[0].count_nonzero() == 0
    assert got.layers["only"].values_bd[1].equal(dense.values_bd[0])


def test_digests_of_records_tell_steps_ids_and_order_but_not_blocks():
    def records(*pairs):
        return [BlockRecord(step, ids, None, 8, 0) for step, ids in pairs]

    digest = records_digest(records((0, (1, 2)), (1, ("1",))))
    assert digest == records_digest(records((0, (1,)), (0, (2,)), (1, ("1",))))
    others = [((0, (1, 2)), (1, (1,))), ((0, (2, 1)), (1, ("1",))), ((0, (1, 2)),)]
    assert digest not in {records_digest(records(*pairs)) for pairs in others}


def test_facts_that_fit_no_json_are_refused():
    with (
        GradientStore(residency="memory") as store,
        pytest.raises(TypeError, match="must fit JSON"),
    ):
        store.define(**{**FACTS, "projection": {"kind": {1}, "dim": 3, "seed": 0}})
    with pytest.raises(ValueError, match="id_scheme must be"):
        StoreFacts(id_scheme="keys")


# ---------------------------------------------------------------- beside the log


class Source(AbstractSource):
    """Records what is asked of it."""

    def __init__(self, slow):
        self.slow, self.seen, self.threads = slow, [], set()

    def is_slow(self, entry):
        return entry in self.slow

    def touch(self, entry):
        self.seen.append(("touch", entry))

    def fetch(self, entry):
        self.seen.append(("fetch", entry))
        self.threads.add((entry, threading.current_thread() is threading.main_thread()))
        if entry == "bad":
            raise StoreError("damaged")


def appears(wanted, seen):
    """Wait until a thread has done something."""
    for _ in range(1000):
        if wanted in seen:
            return True
        time.sleep(0.01)
    return False


def test_the_next_record_is_fetched_before_this_one_is_given():
    source, before = Source({"c", "bad"}), set(threading.enumerate())
    for entry in fetched(source, ["a", "b", "c", "bad"], prefetch=True):
        if entry == "a":
            assert [pair for pair in source.seen if pair[1] != "c"] == [
                ("fetch", "b"),
                ("touch", "a"),
            ]
            assert appears(("fetch", "c"), source.seen)  # the next slow one, two records ahead
            assert ("fetch", "bad") not in source.seen  # and no more than that
    assert [kind for kind, _ in source.seen].count("fetch") == 3
    assert [entry for kind, entry in source.seen if kind == "touch"] == ["a", "b", "c", "bad"]
    assert source.threads == {("b", True), ("c", False), ("bad", False)}
    assert set(threading.enumerate()) <= before


class Gate:
    """Holds a store's thread back until it is opened."""

    def __init__(self, store):
        self.store, self.open, self.entered = store, threading.Event(), threading.Event()
        self.append = store.log.append
        store.log.append = self

    def __call__(self, *args):
        self.entered.set()
        self.open.wait(20)
        return self.append(*args)


def test_the_queue_is_bounded_by_bytes_and_keeps_the_order():
    with GradientStore(residency="memory") as store:
        store.define(**FACTS)
        gate = Gate(store)
        size = sum(t.nbytes for g in block(0).layers.values() for t in tensors_of(g))
        writer = BackgroundWriter(store, queue_bytes=2 * size + 1)
        writer.submit(block(0))
        assert gate.entered.wait(20)
        writer.submit(block(1))
        third = threading.Thread(target=writer.submit, args=(block(2),))
        third.start()
        third.join(0.2)
        assert third.is_alive()  # two blocks wait already
        gate.open.set()
        third.join(20)
        assert not third.is_alive()
        writer.submit(block(3, b=50))  # larger than the queue: alone
        writer.flush()
        assert store.steps == (0, 0, 1, 1, 2, 2, *(3,) * 50)
        writer.close()


def test_a_block_on_the_host_is_not_copied():
    first = block(0)
    with GradientStore(residency="memory") as store:
        store.define(**FACTS)
        with BackgroundWriter(store) as writer:
            writer.submit(first)
        got = next(store.blocks()).block
        for name, gradient in first.layers.items():
            pairs = zip(tensors_of(gradient), tensors_of(got.layers[name]), strict=True)
            assert all(a.data_ptr() == b.data_ptr() for a, b in pairs)


def numpy_block(memory):
    """A block of four tensors whose memory is seen to go."""
    layers = {}
    for name in ("first", "second"):
        a, g = np.ones((2, 3, 4), np.float32), np.ones((2, 3, 5), np.float32)
        memory += [weakref.ref(a), weakref.ref(g)]
        layers[name] = LinearFactors(torch.from_numpy(a), torch.from_numpy(g), False)
    return GradientBlock(0, (0, 1), layers)


def test_a_tensor_goes_as_soon_as_it_is_written(tmp_path, monkeypatch):
    alive, memory, add = [], [], ShardFile.add

    def watched(file, view):
        alive.append(sum(one() is not None for one in memory))
        add(file, view)

    monkeypatch.setattr(ShardFile, "add", watched)
    with GradientStore(tmp_path / "a") as store:
        store.define(**FACTS)
        with BackgroundWriter(store) as writer:
            gate = Gate(store)
            writer.submit(numpy_block(memory))
            gate.open.set()
    assert alive[:4] == [4, 3, 2, 1]  # the one that is being written is still there


def test_an_error_of_the_thread_is_raised_and_what_came_before_stays(tmp_path):
    with GradientStore(tmp_path / "a") as store:
        store.define(**FACTS)
        writer = BackgroundWriter(store)
        writer.submit(block(0))
        writer.submit(GradientBlock(1, (1,), block(1).layers))  # one id for two rows
        with pytest.raises(ValueError, match="ids must be one a row"):
            writer.flush()
        with pytest.raises(ValueError, match="ids must be one a row"):
            writer.submit(block(2))
        with pytest.raises(ValueError, match="ids must be one a row"):
            writer.close()
        with pytest.raises(RuntimeError, match="got one that was closed"):
            writer.submit(block(2))
    with GradientStore(tmp_path / "a", mode="read") as store:
        assert store.steps == (0, 0)


def test_a_store_that_closes_first_writes_what_its_writer_took(tmp_path):
    store = GradientStore(tmp_path / "a")
    store.define(**FACTS)
    writer = BackgroundWriter(store)
    for step in range(5):
        writer.submit(block(step))
    store.close()
    with pytest.raises(StoreError, match="must be open"):
        writer.submit(block(5))
    writer.flush()
    writer.close()
    with GradientStore(tmp_path / "a", mode="read") as store:
        assert len(store) == 10


def test_an_error_of_the_thread_is_raised_by_the_store_if_nobody_else_was_told(tmp_path):
    store = GradientStore(tmp_path / "a")
    store.define(**FACTS)
    writer = BackgroundWriter(store)
    writer.submit(GradientBlock(1, (1,), block(1).layers))
    with pytest.raises(ValueError, match="ids must be one a row"):
        store.close()
    assert store.is_closed
    with pytest.raises(ValueError, match="ids must be one a row"):
        writer.close()


@pytest.mark.gpu
def test_tensors_of_a_device_are_written_once_their_copy_is_done(tmp_path):
    """The copies start while the values are still being computed."""
    device = torch.device("cuda")
    large = torch.ones(2048, 2048, device=device)
    with GradientStore(tmp_path / "a") as store:
        store.define(**FACTS)
        with BackgroundWriter(store) as writer:
            expected = []
            for step in range(8):
                product = large @ large
                for _ in range(20):
                    product = product @ large / 2048
                a = (product[:2, :64, None] + step).expand(2, 64, 128)
                g = a.transpose(1, 2).contiguous().transpose(1, 2) * 2
                expected.append((a.sum(), g.sum()))
                writer.submit(
                    GradientBlock(step, (2 * step, 2 * step + 1), {"l": LinearFactors(a, g)})
                )
                del a, g, product
        for stored, (a_sum, g_sum) in zip(store.blocks(device=device), expected, strict=True):
            gradient = stored.block.layers["l"]
            torch.testing.assert_close(gradient.activation_bsi.sum(), a_sum, rtol=1e-6, atol=0)
            torch.testing.assert_close(gradient.output_gradient_bso.sum(), g_sum, rtol=1e-6, atol=0)


# ---------------------------------------------------------------- processes


FORGOTTEN = """
    import sys, torch
    from gradtrail.factors import DenseGradient, GradientBlock
    from gradtrail.store import BackgroundWriter, GradientStore

    store = GradientStore(sys.argv[1])
    store.define(id_scheme="index")
    writer = BackgroundWriter(store)
    for step in range(20):
        writer.submit(GradientBlock(step, (step,), {"l": DenseGradient(torch.ones(1, 4), (4,))}))
"""


def test_an_interpreter_that_ends_loses_nothing(tmp_path):
    done = child(FORGOTTEN, tmp_path / "a")
    assert (done.returncode, done.stderr) == (0, "")
    with GradientStore(tmp_path / "a", mode="read") as store:
        assert store.ids == tuple(range(20))
        store.verify()


LOCKED = """
    import os, signal, sys, time
    from gradtrail.store import GradientStore

    store = GradientStore(sys.argv[1])
    reads, writes = os.pipe()
    pid = os.fork()
    if not pid:  # lives on, as a worker of a data loader may for a while
        os.write(writes, b"x")
        time.sleep(60)
        os._exit(0)
    os.read(reads, 1)
    print(pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(os.name != "posix", reason="no fork here")
def test_a_killed_writer_leaves_no_lock_though_its_fork_lives(tmp_path):
    folder = tmp_path / "a"
    with Path(tmp_path / "said").open("w+") as said:
        script = textwrap.dedent(LOCKED)
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", script, folder], stdout=said, cwd=ROOT
        )
        said.seek(0)
        pid = int(said.read())
    try:
        with GradientStore(folder, mode="resume") as store:
            with pytest.raises(StoreError, match="must have one writer"):
                GradientStore(folder, mode="resume")
            store.define(**FACTS)
    finally:
        os.kill(pid, 9)


LIMITED = """
    import resource, sys, torch
    from gradtrail.factors import DenseGradient, GradientBlock
    from gradtrail.store import GradientStore

    def block(step):
        dense = DenseGradient(torch.full((1, 1 << 16), float(step)), (1 << 16,))
        return GradientBlock(step, (step,), {"l": dense})

    store = GradientStore(sys.argv[1], shard_bytes=1 << 20)
    store.define(id_scheme="index")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (600_000, hard))
    refused = []
    for step in range(4):
        try:
            store.append(block(step))
        except OSError as error:
            kept = "2 blocks with 2 rows that were stored before, up to step 1, are kept there"
            told = kept in str(error) and "mode='resume'" in str(error)
            refused.append((step, error.errno, told and "make the same call" in str(error)))
    assert [step for step, *_ in refused] == [2, 3], refused
    assert all(number == 27 and told for _, number, told in refused), refused
    assert store.ids == (0, 1)
    store.flush()
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    store.append(block(2))
    store.close()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="another number of the error")
def test_a_block_that_does_not_fit_the_disk_is_refused_and_the_rest_kept(tmp_path):
    done = child(LIMITED, tmp_path / "a")
    assert done.returncode == 0, done.stderr
    with GradientStore(tmp_path / "a", mode="read") as store:
        store.verify()
        got = [float(s.block.layers["l"].values_bd[0, 0]) for s in store.blocks()]
        assert got == [0, 1, 2]


def test_a_shard_that_cannot_be_closed_fails_the_store_and_keeps_the_rest(tmp_path, monkeypatch):
    store = GradientStore(tmp_path / "a", shard_bytes=1 << 20)
    store.define(**FACTS)
    store.append(block(0))
    store.flush()
    store.append(block(1))

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(
            OSError, match="1 blocks could not be written .* 2 rows that .* same training"
        ) as info:
            store.flush()
    assert info.value.errno == errno.ENOSPC
    assert store.steps == (0, 0)
    with pytest.raises(OSError, match="mode='resume'"):
        store.append(block(2))
    store.verify()
    store.close()
    with GradientStore(tmp_path / "a", mode="resume") as store:
        store.define(**FACTS)
        assert store.has(0, (0, 1))
        assert not store.has(1, (2, 3))
        store.append(block(1))
    with GradientStore(tmp_path / "a", mode="read") as store:
        assert store.steps == (0, 0, 1, 1)


def test_both_kinds_refuse_each_other(tmp_path):
    with GradientStore(tmp_path / "g") as store:
        store.define(**FACTS)
    with StepStore(tmp_path / "s") as store:
        store.define(a=1)
    with pytest.raises(StoreError, match="a store of steps, got one of gradients"):
        StepStore(tmp_path / "g", mode="read")
    with pytest.raises(StoreError, match="a store of gradients, got one of steps"):
        GradientStore(tmp_path / "s", mode="resume")


def test_a_full_disk_keeps_a_step_that_was_to_go(tmp_path):
    with GradientStore(tmp_path / "a") as store:
        store.define(**FACTS)
        store.append(
            GradientBlock(0, (0, 1), {"l": LinearFactors(values(2, 1, 3), values(2, 1, 2))})
        )
        store.flush()
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1, hard))
        try:
            with pytest.raises(
                OSError, match="Step 0 could not be taken out .* call discard again"
            ):
                store.discard(0)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert store.steps == (0, 0)
        store.discard(0)
        assert store.steps == ()
    with GradientStore(tmp_path / "a", mode="read") as store:
        assert store.ids == ()


# ---------------------------------------------------------------- several ranks


@pytest.fixture(scope="module")
def workers():
    with Workers(2, "store_rank_checks") as started:
        yield started


def test_what_all_ranks_wrote_is_read_as_one_store(workers, tmp_path):
    folder = tmp_path / "a"
    assert workers.run("write", path=str(folder), mode="create", steps=[0, 1]) == [[0, 2]] * 2
    assert workers.run("write", path=str(folder), mode="resume", steps=[2]) == [[4, 6]] * 2
    names = {path.name for path in folder.iterdir()}
    assert names >= {
        "journal-0000.jsonl",
        "journal-0001.jsonl",
        "manifest.json",
        "manifest-0001.json",
    }
    with GradientStore(folder, mode="read") as store:
        store.verify()
        assert store.ids == (0, 1, 2, 3, 8, 9, 10, 11)
        assert store.steps == (0, 0, 0, 0, 2, 2, 2, 2)
        assert set(store.layers) == {"both", "only 0", "only 1"}
        for stored in store.blocks():
            (gradient,) = stored.block.layers.values()
            assert gradient.values_bd.tolist() == [[float(stored.block.ids[0])] * 3]
    for found in workers.try_run("write", path=str(folder), mode="create", steps=[0]):
        assert "must hold no store" in found["error"]
    with GradientStore(folder, mode="resume") as store:  # one process goes on beside two journals
        assert len(store) == 8
        store.append(store_rank_checks.block(3, 12))
    assert workers.run("write", path=str(folder), mode="resume", steps=[4]) == [[9, 11]] * 2
    with GradientStore(folder, mode="read") as store:
        store.verify()
        assert store.ids == (0, 1, 2, 3, 8, 9, 10, 11, 12, 16, 17, 18, 19)
    assert workers.run("write", path=str(folder), mode="overwrite", steps=[5]) == [[0, 2]] * 2
    with GradientStore(folder, mode="read") as store:
        assert store.ids == (20, 21, 22, 23)


def test_a_journal_of_a_rank_that_there_is_not_is_refused(tmp_path):
    with GradientStore(tmp_path / "a") as store:
        store.define(**FACTS)
        store.append(block(0))
    first = (tmp_path / "a" / "journal-0000.jsonl").read_bytes().split(b"\n")[0]
    entry = {**decode_line(first), "rank": 3}
    (tmp_path / "a" / "journal-0003.jsonl").write_bytes(encode_line(entry))
    with pytest.raises(StoreError, match="journals must be of 1 ranks"):
        GradientStore(tmp_path / "a", mode="read")
