"""Damage and forgery drawn at random: a store says so with ``StoreError``, or gives what it had."""

import contextlib
import json
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from storing import (
    attempt,
    journal,
    journal_lines,
    quick_folder,
    read_manifest,
    reseal_shard,
    same_tensor,
    seal,
    shards,
    small_block,
    step_tensors,
    tensors_of,
    write_manifest,
    write_steps,
    write_store,
)

from gradtrail import GradientStore
from gradtrail.store import StepStore

NUM_BLOCKS = 3
STEP_NAMES = sorted(step_tensors(0))
CASES = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
MANY = settings(CASES, max_examples=700)


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("original")
    blocks = [small_block(step, b=1, s=2) for step in range(NUM_BLOCKS)]
    write_store(folder / "gradients", blocks, metas=[{"n": n} for n in range(3)], shard_bytes=1)
    write_steps(folder / "steps", range(NUM_BLOCKS), shard_bytes=1)
    return folder


@contextlib.contextmanager
def copied(folder):
    """A copy that may be damaged."""
    place = quick_folder(None)
    try:
        yield Path(shutil.copytree(folder, place / "store"))
    finally:
        shutil.rmtree(place)


def read_gradients(folder, mode):
    """Everything a store gives, in a form that can be compared."""
    with GradientStore(folder, mode=mode) as store:
        found = []
        for stored in store.blocks(prefetch=False):
            tensors = [tensor.clone() for tensor in tensors_of(stored.block)]
            found.append((stored.block.step, stored.block.ids, stored.meta, tensors))
        for record in store.records:
            store.find(id=record.ids[0] if record.ids else None, step=record.step)
        if len(store):
            store.get(range(len(store)))
        assert len(store) == len(store.ids) == len(store.steps)
        assert store.nbytes >= 0
        assert store.disk_bytes >= 0
        for name in ("first", "covariances"):
            store.attached(name)
        facts, layers = store.facts, dict(store.layers)
        store.verify()
    return found, facts, layers


def read_steps(folder, mode):
    with StepStore(folder, mode=mode) as store:
        found = [
            (step, (), values, [tensors[name].clone() for name in sorted(tensors)])
            for step, tensors, values in store.iterate()
        ]
        for step in store.steps:
            store.read(step)
            store.values(step)
        facts = dict(store.facts or {})
        store.verify()
    return found, facts, {}


READS = {"gradients": read_gradients, "steps": read_steps}


def expected(kind):
    if kind == "steps":
        return [
            (step, (), {"lr": step / 8}, [step_tensors(step)[name] for name in STEP_NAMES])
            for step in range(NUM_BLOCKS)
        ]
    blocks = [small_block(step, b=1, s=2) for step in range(NUM_BLOCKS)]
    return [(block.step, block.ids, {"n": n}, tensors_of(block)) for n, block in enumerate(blocks)]


def check(folder, kind, mode, *, whole):
    """Only ``StoreError`` may come, or the content: all of it, or up to a torn last line."""
    got, error = attempt(READS[kind], folder, mode)
    assert error is None or len(str(error)) > 20
    if error is not None or whole is None:
        return
    found = got[0]
    assert len(found) >= (NUM_BLOCKS if whole else NUM_BLOCKS - 1)
    for got, right in zip(found, expected(kind), strict=False):
        assert got[:3] == right[:3]
        for a, b in zip(got[3], right[3], strict=True):
            same_tensor(a, b)


def last_line(data):
    return data[:-1].rindex(b"\n") + 1 if b"\n" in data[:-1] else 0


# ---------------------------------------------------------------- bytes


@st.composite
def edits(draw):
    """A few cuts, insertions and replacements at places given as shares of the length."""
    return draw(
        st.lists(
            st.tuples(
                st.floats(0, 1),
                st.integers(0, 40),
                st.one_of(st.binary(max_size=30), st.sampled_from(SNIPPETS)),
            ),
            min_size=1,
            max_size=3,
        )
    )


SNIPPETS = [
    *(
        b"",
        b"\n",
        b"\n\n",
        b"{}\n",
        b"null",
        b"[]",
        b"{",
        b"}",
        b'"',
        b"\0",
        b"\xff",
        b"\xed\xa0\x80",
    ),
    *(
        b"NaN",
        b"-Infinity",
        b"1e999",
        b"9" * 5000,
        b"[" * 3000,
        b'{"a":' * 3000,
        b"-1",
        b"0.5",
        b"true",
    ),
]


def edit(data, changes):
    """The edited bytes, and the first place that differs."""
    first = len(data)
    for share, length, new in changes:
        place = round(share * len(data))
        first = min(first, place)
        data = data[:place] + new + data[place + length :]
    return data, first


def fuzz_bytes(original, kind, name, changes, mode):
    with copied(original / kind) as folder:
        path = folder / name
        before = path.read_bytes()
        after, first = edit(before, changes)
        assume(after != before)
        path.write_bytes(after)
        torn = name.startswith("journal") and first >= last_line(before) - 1
        check(folder, kind, mode, whole=not torn)


FILES = ["manifest.json", "journal-0000.jsonl"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", READS)
@CASES
@given(changes=edits(), mode=st.sampled_from(["read", "resume"]))
def test_bytes(original, kind, name, changes, mode):
    fuzz_bytes(original, kind, name, changes, mode)


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", READS)
@MANY
@given(changes=edits(), mode=st.sampled_from(["read", "resume"]))
def test_many_bytes(original, kind, name, changes, mode):
    fuzz_bytes(original, kind, name, changes, mode)


# ---------------------------------------------------------------- JSON


LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([0, 1, -1, 2, 2**31, 2**53, 2**60, 2**63, 2**64, -(2**63), 10**400]),
    st.floats(),
    st.text(max_size=12),
    st.sampled_from(
        ["float32", "F32", "int64", "../x", "/x", "0000-000000.safetensors", "index", "dense"]
    ),
)
JSON = st.recursive(
    LEAVES,
    lambda inside: st.one_of(
        st.lists(inside, max_size=3), st.dictionaries(st.text(max_size=8), inside, max_size=3)
    ),
    max_leaves=6,
)


def places(value, path=()):
    """Every place in a JSON value."""
    found = [path]
    if isinstance(value, dict):
        for key in value:
            found += places(value[key], (*path, key))
    elif isinstance(value, list):
        for number, part in enumerate(value):
            found += places(part, (*path, number))
    return found


def changed(value, path, new, how):
    """A JSON value with one place replaced, taken out, doubled, or with a further key."""
    if path:
        key, *rest = path
        parts = dict(value) if isinstance(value, dict) else list(value)
        if not rest and how == "out":
            del parts[key]
        elif not rest and how == "doubled" and isinstance(parts, list):
            parts.insert(key, parts[key])
        else:
            parts[key] = changed(parts[key], rest, new, how)
        return parts
    if how == "added" and isinstance(value, dict):
        return {**value, "added": new}
    return new


HOW = st.sampled_from(["replaced", "replaced", "out", "doubled", "added"])


def fuzz_json(original, kind, name, drawn, mode):
    """Change one place of a file that stays JSON, with checksums that fit."""
    share, new, how = drawn
    with copied(original / kind) as folder:
        path = folder / name
        lines = journal_lines(folder) if name.startswith("journal") else [read_manifest(folder)]
        choices = [(n, place) for n, line in enumerate(lines) for place in places(line)]
        number, place = choices[min(int(share * len(choices)), len(choices) - 1)]
        line = changed(lines[number], place, new, how)
        if name.startswith("journal"):
            text = [
                seal(x) if isinstance(x, dict) else json.dumps(x) + "\n" for x in lines[:number]
            ]
            text.append(seal(line) if isinstance(line, dict) else json.dumps(line) + "\n")
            text += [seal(x) for x in lines[number + 1 :]]
            path.write_text("".join(text))
        else:
            write_manifest(folder, line)
        check(folder, kind, mode, whole=None)


DRAWN = st.tuples(st.floats(0, 1), JSON, HOW)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", READS)
@CASES
@given(drawn=DRAWN, mode=st.sampled_from(["read", "resume"]))
def test_json(original, kind, name, drawn, mode):
    fuzz_json(original, kind, name, drawn, mode)


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", READS)
@MANY
@given(drawn=DRAWN, mode=st.sampled_from(["read", "resume"]))
def test_much_json(original, kind, name, drawn, mode):
    fuzz_json(original, kind, name, drawn, mode)


# ---------------------------------------------------------------- shards whose checksum fits


def fuzz_shard(original, changes, mode):
    with copied(original / "gradients") as folder:
        shard = shards(folder)[1]
        before = shard.read_bytes()
        header = 8 + int.from_bytes(before[:8], "little")
        after, _ = edit(before[:header], changes)
        assume(after != before[:header])
        reseal_shard(folder, shard, after + before[header:])
        check(folder, "gradients", mode, whole=True)


@CASES
@given(changes=edits(), mode=st.sampled_from(["read", "resume"]))
def test_headers_of_shards(original, changes, mode):
    fuzz_shard(original, changes, mode)


@pytest.mark.slow
@MANY
@given(changes=edits(), mode=st.sampled_from(["read", "resume"]))
def test_many_headers_of_shards(original, changes, mode):
    fuzz_shard(original, changes, mode)


def test_the_copies_that_nothing_was_done_to(original):
    for kind, read in READS.items():
        for mode in ("read", "resume"):
            with copied(original / kind) as folder:
                found, _, _ = read(folder, mode)
                assert len(found) == NUM_BLOCKS
                check(folder, kind, mode, whole=True)
                assert journal(folder).exists()
