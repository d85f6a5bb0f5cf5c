"""Builders for tests of stores: blocks of every kind, comparisons to the bit, child processes."""

import ctypes
import dataclasses
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import traceback
import zlib
from pathlib import Path

import torch
from torch import Tensor

from gradtrail.errors import StoreError
from gradtrail.factors import (
    DenseGradient,
    EmbeddingFactors,
    GradientBlock,
    LinearFactors,
    ScaleFactors,
    SumGradient,
)
from gradtrail.store import GradientStore, StepStore

FACTS = {
    "id_scheme": "index",
    "recording": "per_example",
    "capture": "factored",
    "projection": None,
    "loss_reduction": "sum",
    "loss": "causal_lm",
    "checkpoint_digest": "c0ffee",
    "data_digest": "da7a",
    "extra": {"optimizer": "adamw"},
}


def values(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# ---------------------------------------------------------------- blocks


def _linear(b, s, seed, dtype):
    return LinearFactors(
        values(b, s, 4, seed=seed, dtype=dtype), values(b, s, 3, seed=seed + 1, dtype=dtype), True
    )


KINDS = {
    "linear": _linear,
    "linear without bias": lambda b, s, seed, dtype: dataclasses.replace(
        _linear(b, s, seed, dtype), has_bias=False
    ),
    "linear in groups": lambda b, s, seed, dtype: LinearFactors(
        values(b, s, 4, seed=seed, dtype=dtype),
        values(b, s, 6, seed=seed + 1, dtype=dtype),
        True,
        2,
    ),
    "bias alone": lambda b, s, seed, dtype: LinearFactors(
        values(b, s, 0, seed=seed, dtype=dtype), values(b, s, 3, seed=seed + 1, dtype=dtype), True
    ),
    "linear with a constant": lambda b, s, seed, dtype: dataclasses.replace(
        _linear(b, s, seed, dtype), constant_bs=values(b, s, seed=seed + 2, dtype=dtype)
    ),
    "embedding": lambda b, s, seed, dtype: EmbeddingFactors(
        torch.arange(b * s).view(b, s).mul(seed + 1).remainder(7),
        values(b, s, 3, seed=seed, dtype=dtype),
        7,
    ),
    "embedding with padding": lambda b, s, seed, dtype: EmbeddingFactors(
        torch.arange(b * s, dtype=torch.int32).view(b, s).mul(seed + 1).remainder(7),
        values(b, s, 3, seed=seed, dtype=dtype),
        7,
        0,
    ),
    "scale": lambda b, s, seed, dtype: ScaleFactors(
        values(b, s, 5, seed=seed, dtype=dtype), values(b, s, 5, seed=seed + 1, dtype=dtype)
    ),
    "scale with bias": lambda b, s, seed, dtype: ScaleFactors(
        values(b, s, 5, seed=seed, dtype=dtype), values(b, s, 5, seed=seed + 1, dtype=dtype), True
    ),
    "dense": lambda b, _, seed, dtype: DenseGradient(values(b, 12, seed=seed, dtype=dtype), (3, 4)),
    "dense convolution with bias": lambda b, _, seed, dtype: DenseGradient(
        values(b, 27, seed=seed, dtype=dtype), (3, 2, 2, 2), True
    ),
    "sum of two calls": lambda b, s, seed, dtype: SumGradient(
        (_linear(b, s, seed, dtype), _linear(b, s + 2, seed + 5, dtype))
    ),
    "sum over tied modules": lambda b, s, seed, dtype: SumGradient(
        (
            EmbeddingFactors(
                torch.arange(b * s).view(b, s).remainder(3),
                values(b, s, 4, seed=seed, dtype=dtype),
                3,
            ),
            dataclasses.replace(_linear(b, s, seed + 3, dtype), has_bias=False),
        )
    ),
}


def gradient(kind, *, b=2, s=3, seed=0, dtype=torch.float32):
    return KINDS[kind](b, s, seed, dtype)


def block_of_all(step, *, b=2, s=3, dtype=torch.float32, first_id=None):
    """A block with a layer of every kind, and two layers that read one input."""
    layers = {
        f"layers.{number}.{kind.replace(' ', '_')}": gradient(
            kind, b=b, s=s, seed=100 * step + 10 * number, dtype=dtype
        )
        for number, kind in enumerate(KINDS)
    }
    inputs = values(b, s, 4, seed=100 * step + 7, dtype=dtype)
    for number, name in enumerate(("attention.q", "attention.k")):
        outputs = values(b, s, 3, seed=100 * step + 8 + number, dtype=dtype)
        layers[name] = LinearFactors(inputs, outputs)
    first = step * b if first_id is None else first_id
    return GradientBlock(step, tuple(range(first, first + b)), layers)


def small_block(step, *, b=2, s=3, first_id=None, dtype=torch.float32):
    """A block with one factored and one dense layer."""
    first = step * b if first_id is None else first_id
    layers = {
        "first": LinearFactors(
            values(b, s, 4, seed=3 * step, dtype=dtype),
            values(b, s, 3, seed=3 * step + 1, dtype=dtype),
            True,
        ),
        "second": DenseGradient(values(b, 6, seed=3 * step + 2, dtype=dtype), (2, 3)),
    }
    return GradientBlock(step, tuple(range(first, first + b)), layers)


def large_block(step, num_bytes, *, name="dense"):
    """A block of two examples whose only tensor has about so many bytes."""
    wide = max(1, num_bytes // 8)
    filled = torch.arange(2 * wide, dtype=torch.float32).view(2, wide) + step
    return GradientBlock(step, (2 * step, 2 * step + 1), {name: DenseGradient(filled, (1, wide))})


def meta_of(step):
    return {"start": 2 * step, "size": 2, "padding_left": None, "lengths": [3, 2], "word": "é\n"}


def fields_of(layer):
    return {field.name: getattr(layer, field.name) for field in dataclasses.fields(layer)}


def tensors_of(block):
    """Every tensor of a block."""
    return [tensor for name in block.layers for tensor in _tensors(block.layers[name])]


def _tensors(value):
    if isinstance(value, Tensor):
        return [value]
    if dataclasses.is_dataclass(value):
        value = tuple(fields_of(value).values())
    if isinstance(value, tuple):
        return [tensor for part in value for tensor in _tensors(part)]
    return []


def cast(value, dtype):
    """A layer, or what a field of it holds, with its floating tensors in another dtype."""
    if isinstance(value, Tensor):
        return value.to(dtype) if dtype is not None and value.is_floating_point() else value
    if isinstance(value, tuple):
        return tuple(cast(part, dtype) for part in value)
    if dataclasses.is_dataclass(value):
        return type(value)(**{name: cast(part, dtype) for name, part in fields_of(value).items()})
    return value


def cut(value, rows):
    """A layer with some of its examples only."""
    if isinstance(value, Tensor):
        return value[list(rows)]
    if isinstance(value, SumGradient):
        return SumGradient(tuple(cut(part, rows) for part in value.parts))
    changed = {
        name: cut(part, rows) for name, part in fields_of(value).items() if isinstance(part, Tensor)
    }
    return dataclasses.replace(value, **changed)


def same_tensor(got, expected, where=""):
    assert got.dtype == expected.dtype, (where, got.dtype, expected.dtype)
    assert got.shape == expected.shape, (where, got.shape, expected.shape)
    got = got.detach().cpu().contiguous().view(-1).view(torch.uint8)
    expected = expected.detach().cpu().contiguous().view(-1).view(torch.uint8)
    assert torch.equal(got, expected), f"{where}: bytes differ"


def same_layer(got, expected, where=""):
    assert type(got) is type(expected), (where, type(got), type(expected))
    for name, value in fields_of(expected).items():
        found = getattr(got, name)
        inside = f"{where}.{name}"
        if isinstance(value, Tensor):
            same_tensor(found, value, inside)
        elif isinstance(expected, SumGradient):
            assert len(found) == len(value), inside
            for number, (a, b) in enumerate(zip(found, value, strict=True)):
                same_layer(a, b, f"{inside}[{number}]")
        else:
            assert found == value, (inside, found, value)
            assert type(found) is type(value), (inside, type(found), type(value))


def same_block(got, expected, dtype=None):
    """Compare two blocks to the bit, after the cast that a store of this dtype does."""
    assert got.step == expected.step
    assert got.ids == expected.ids
    assert [type(i) for i in got.ids] == [type(i) for i in expected.ids]
    assert list(got.layers) == list(expected.layers)
    assert len(got.layers) == len(expected.layers)
    for name, layer in expected.layers.items():
        same_layer(got.layers[name], cast(layer, dtype), name)


def same_content(store, blocks, *, metas=None, dtype=None):
    """Compare everything a store gives with the blocks that went in."""
    blocks = list(blocks)
    read = 0
    for number, stored in enumerate(store.blocks()):
        same_block(stored.block, blocks[number], dtype)
        if metas is not None:
            assert stored.meta == metas[number]
        assert stored.row == sum(len(block.ids) for block in blocks[:number])
        read += 1
    assert read == len(blocks)
    assert store.ids == tuple(i for block in blocks for i in block.ids)
    assert store.steps == tuple(block.step for block in blocks for _ in block.ids)
    assert len(store) == len(store.ids)


# ---------------------------------------------------------------- stores


def open_store(folder, residency="disk", **options):
    """A store of a residency; a tiered one that holds about a third of what the tests put."""
    if residency == "tiered":
        options.setdefault("budget", 2500)
    path = None if residency == "memory" else folder
    return GradientStore(path, residency=residency, **options)


def write_store(folder, blocks, *, metas=None, facts=FACTS, **options):
    """Write blocks into a new store on disk and close it."""
    options.setdefault("shard_bytes", 2000)
    with GradientStore(folder, **options) as store:
        store.define(**facts)
        for number, block in enumerate(blocks):
            store.append(block, meta=None if metas is None else metas[number])
    return Path(folder)


def write_steps(folder, steps, **options):
    options.setdefault("shard_bytes", 200)
    with StepStore(folder, **options) as store:
        store.define(optimizer="adamw")
        for step in steps:
            store.append(step, step_tensors(step), {"lr": step / 8})
    return Path(folder)


def step_tensors(step):
    return {
        "exp_avg": values(3, 2, seed=step),
        "exp_avg_sq": values(3, 2, seed=step + 1, dtype=torch.bfloat16),
        "step": torch.tensor(step),
    }


def shards(folder):
    return sorted(Path(folder).glob("0000-[0-9][0-9][0-9][0-9][0-9][0-9].safetensors"))


def journal(folder):
    return Path(folder) / "journal-0000.jsonl"


def journal_lines(folder):
    """The lines of a journal that are whole, as dictionaries."""
    raw = journal(folder).read_bytes() if journal(folder).exists() else b""
    return [json.loads(line) for line in raw.split(b"\n")[:-1]]


def journalled_steps(folder):
    """Steps that a journal promises, in order, those taken back left out."""
    steps = []
    for line in journal_lines(folder):
        if "records" in line:
            steps += [record["step"] for record in line["records"]]
        elif "discard" in line:
            steps = [step for step in steps if step != line["discard"]]
    return steps


def seal(line):
    """A line of a journal with the checksum that fits what it says."""
    bare = {key: value for key, value in line.items() if key != "line_crc"}
    text = json.dumps(bare, separators=(",", ":"))
    crc = zlib.crc32(text.encode())
    return f'{text[:-1]}{"," if bare else ""}"line_crc":{crc}}}\n'


def read_manifest(folder):
    return json.loads((Path(folder) / "manifest.json").read_bytes())


def write_manifest(folder, entries):
    """Write a manifest of any JSON, with the checksum that fits where it can have one."""
    if isinstance(entries, dict):
        bare = {key: value for key, value in entries.items() if key != "crc32"}
        text = json.dumps(bare, separators=(",", ":"), sort_keys=True)
        entries = {**bare, "crc32": zlib.crc32(text.encode())}
    (Path(folder) / "manifest.json").write_text(json.dumps(entries))


def rewrite_journal(folder, change):
    """Change the lines of a journal, and make their checksums fit."""
    lines = change(journal_lines(folder))
    journal(folder).write_text("".join(seal(line) for line in lines))


def flip(path, place, mask=1):
    """Flip bits of one byte of a file."""
    data = bytearray(path.read_bytes())
    data[place] ^= mask
    path.write_bytes(bytes(data))


def reseal_shard(folder, shard, data):
    """Put other bytes into a shard, and make the journal agree that they are right."""

    def change(lines):
        for line in lines:
            if line.get("shard") == shard.name:
                line["bytes"], line["crc32"] = len(data), zlib.crc32(data)
        return lines

    shard.write_bytes(data)
    rewrite_journal(folder, change)


def quick_folder(usual):
    """A folder where a flush to the disk costs nothing, if there is one; a kill cannot tell."""
    memory = Path("/dev/shm")
    usable = memory.is_dir() and os.access(memory, os.W_OK | os.X_OK)
    return Path(tempfile.mkdtemp(prefix="stores-", dir=memory if usable else usual))


def attempt(work, *args, refused=StoreError):
    """What a call gives, and the error of the one kind that it may raise instead."""
    try:
        return work(*args), None
    except refused as error:
        return None, error


# ---------------------------------------------------------------- child processes


_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "gradtrail", "gradtrail.store", "hypothesis", "pytest"])


class Child:
    """A forked process that runs a function ``work(say, *args)``; ``say`` sends to the test."""

    def __init__(self, work, *args):
        self.pipe, inside = _CONTEXT.Pipe()
        self.process = _CONTEXT.Process(target=_work, args=(inside, work, args))
        self.process.start()
        inside.close()

    def hear(self, seconds=60):
        """The next message; an error of the child is raised here."""
        assert self.pipe.poll(seconds), "the child says nothing"
        kind, value = self.pipe.recv()
        assert kind != "error", value
        return value

    def kill(self):
        self.process.kill()
        return self.end()

    def end(self, seconds=60):
        """Wait for the end; the exit code, negative for a signal."""
        self.process.join(seconds)
        assert self.process.exitcode is not None, "the child does not end"
        self.pipe.close()
        return self.process.exitcode


def in_child(work, *args, seconds=120):
    """What a function returns in a forked child."""
    child = Child(_returning, work, args)
    try:
        return child.hear(seconds)
    finally:
        child.kill()


def _returning(say, work, args):
    say(work(*args))


def _work(pipe, work, args):
    try:
        work(lambda value: pipe.send(("said", value)), *args)
    except BaseException:
        pipe.send(("error", traceback.format_exc()))
        raise


def drop_capabilities():
    """Make the rights of files count for this process, also where it is run by root."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    nothing = (ctypes.c_uint32 * 6)()
    if ctypes.CDLL(None, use_errno=True).capset(header, nothing):
        raise OSError(ctypes.get_errno(), "capset")


def one_arena():
    """No memory set aside for further threads, so that peaks can be compared."""
    ctypes.CDLL(None).mallopt(-8, 1)


def status_bytes(name):
    """A size from the process's own status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def interrupt():
    raise KeyboardInterrupt


class AtCall:
    """Acts right before or after the n-th call into C of some names; ``n=None`` only counts.

    Counted from the moment it is armed, over all threads that start later, or the present one.
    """

    NAMES = frozenset(
        (
            *("write", "writelines", "fsync", "fdatasync", "replace", "rename", "open", "close"),
            *("truncate", "ftruncate", "flush", "flock", "mkdir", "pwrite", "remove", "unlink"),
        )
    )

    def __init__(self, n, act):
        self.n, self.act = n, act
        self.count = 0
        self.lock = threading.Lock()

    def __call__(self, _, event, function):
        if event not in {"c_call", "c_return"} or function.__name__ not in self.NAMES:
            return
        with self.lock:
            number, self.count = self.count, self.count + 1
        if number == self.n:
            self.act()

    def arm(self, *, threads=True):
        if threads:
            threading.setprofile(self)
        sys.setprofile(self)

    def disarm(self):
        threading.setprofile(None)
        sys.setprofile(None)
