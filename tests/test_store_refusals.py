"""What stores refuse, and what they say then: nothing is deleted, and the cause is named."""

import json
import re

import pytest
from storing import FACTS, journal, shards, small_block, write_store

from gradtrail.errors import StoreError
from gradtrail.options import near_names, near_numbers
from gradtrail.store import GradientStore, StepStore


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}


@pytest.fixture
def folder(tmp_path):
    return write_store(tmp_path / "a", [small_block(step) for step in range(3)], shard_bytes=1)


# ---------------------------------------------------------------- shards without a journal


@pytest.mark.parametrize("is_there", [False, True], ids=["deleted", "emptied"])
@pytest.mark.parametrize("mode", ["read", "resume"])
def test_shards_without_their_journal_are_refused_and_kept(folder, mode, is_there):
    journal(folder).unlink()
    if is_there:
        journal(folder).touch()
    before = content(folder)
    assert len(shards(folder)) == 3
    for _ in range(2):
        with pytest.raises(
            StoreError, match=r"beside the journal .* got '0000-000002.safetensors' .*'journal-0000"
        ):
            GradientStore(folder, mode=mode)
    assert content(folder) == before


def test_a_journal_that_comes_back_brings_the_rows_back(folder):
    whole = journal(folder).read_bytes()
    journal(folder).unlink()
    with pytest.raises(StoreError, match="Nothing was deleted: restore the journal"):
        GradientStore(folder, mode="resume")
    journal(folder).write_bytes(whole)
    with GradientStore(folder, mode="resume") as store:
        store.verify()
        assert len(store) == 6


def test_shards_of_another_rank_without_its_journal_are_refused(folder):
    (folder / "0002-000000.safetensors").write_bytes(shards(folder)[0].read_bytes())
    with pytest.raises(StoreError, match=r"got '0002-000000.safetensors' .* 'journal-0002.jsonl'"):
        GradientStore(folder, mode="resume")


@pytest.mark.parametrize("journalled", [False, True])
def test_a_writer_that_was_killed_before_its_first_shard_is_resumed(folder, journalled):
    for shard in shards(folder):
        shard.unlink()
    first = journal(folder).read_bytes().split(b"\n")[0] + b"\n"
    journal(folder).unlink()
    if journalled:
        journal(folder).write_bytes(first)
    with GradientStore(folder, mode="resume") as store:
        store.define(**FACTS)
        assert len(store) == 0
        store.append(small_block(0))
    with GradientStore(folder, mode="read") as store:
        assert store.ids == (0, 1)


def test_overwrite_replaces_a_store_without_its_journal(folder):
    journal(folder).unlink()
    with GradientStore(folder, mode="overwrite") as store:
        assert len(store) == 0
    assert shards(folder) == []


# ---------------------------------------------------------------- overwriting what is no store


FOREIGN = {
    "a shard's name": ["0000-000000.safetensors"],
    "an attachment's name": ["attached-x.safetensors"],
    "other files": ["notes.txt"],
    "both": ["0000-000000.safetensors", "notes.txt"],
    "a journal among others": ["journal-0000.jsonl", "notes.txt"],
}


@pytest.mark.parametrize("names", FOREIGN.values(), ids=FOREIGN)
@pytest.mark.parametrize("kind", [GradientStore, StepStore])
def test_overwrite_refuses_a_folder_that_is_no_store(tmp_path, kind, names):
    for name in names:
        (tmp_path / name).write_text("mine")
    with pytest.raises(StoreError, match=r"with mode='overwrite'.*Nothing was deleted"):
        kind(tmp_path, mode="overwrite")
    assert content(tmp_path) == dict.fromkeys(names, b"mine")


def test_overwrite_takes_what_a_lost_manifest_leaves(folder):
    (folder / "manifest.json").unlink()
    with GradientStore(folder, mode="overwrite") as store:
        assert len(store) == 0


@pytest.mark.parametrize("kind", [GradientStore, StepStore])
def test_a_file_is_no_store(tmp_path, kind):
    path = tmp_path / "gradients"
    path.write_text("mine")
    with pytest.raises(StoreError, match=r"must be the folder of a store, got the file '.*gradien"):
        kind(path, mode="read")
    for mode in ("create", "resume", "overwrite"):
        with pytest.raises(OSError, match=r"path must be a folder .* '.*gradients'"):
            kind(path, mode=mode)
    assert path.read_text() == "mine"


# ---------------------------------------------------------------- facts that differ


def applied(damping, method="ekfac"):
    coverage = [{"name": f"layer {number}", "size": 10} for number in range(200)]
    options = {"damping": damping, "relative_damping": True}
    extra = {"method": method, "options": options, "coverage": coverage}
    return {"preconditioned": json.dumps(extra), "coverage": json.dumps(coverage)}


def test_a_fact_inside_another_is_named_alone(tmp_path):
    facts = {**FACTS, "extra": applied(0.1)}
    folder = write_store(tmp_path / "a", [small_block(0)], facts=facts)
    with GradientStore(folder, mode="resume") as store:
        with pytest.raises(StoreError) as info:
            store.define(**{**facts, "extra": applied(0.5)})
        assert str(info.value) == (
            "extra.preconditioned.options.damping must be that of the store, got 0.5 where "
            f"{str(folder)!r} was written with 0.1. Pass another folder, or mode='overwrite' to "
            "write it anew."
        )
        changed = {**facts, "capture": "materialized", "extra": applied(0.1, "kfac")}
        match = (
            r"^extra.preconditioned.method must be .* got 'kfac' where .* with 'ekfac'. Also: "
            r"capture 'factored' there, 'materialized' here"
        )
        with pytest.raises(StoreError, match=match):
            store.define(**changed)


def test_lists_that_differ_show_what_only_one_has(tmp_path):
    names = [f"layer {number}" for number in range(50)]
    facts = {**FACTS, "extra": {"layers": json.dumps(names)}}
    folder = write_store(tmp_path / "a", [small_block(0)], facts=facts)
    with GradientStore(folder, mode="resume") as store:
        match = re.escape(
            "extra.layers must be that of the store, got 49, [] among them where "
            f"{str(folder)!r} was written with 50 entries, ['layer 7'] among them."
        )
        names.remove("layer 7")
        with pytest.raises(StoreError, match=match):
            store.define(**{**facts, "extra": {"layers": json.dumps(names)}})
        with pytest.raises(StoreError, match=r"extra.colour must be .* got 'red' where .*nothing"):
            store.define(**{**facts, "extra": {**facts["extra"], "colour": "red"}})


def test_a_store_in_memory_is_named_so():
    with GradientStore(residency="memory") as store:
        store.define(id_scheme="content")
        with pytest.raises(StoreError, match="got 'index' where the store in memory was written"):
            store.define(id_scheme="index")
    with StepStore(residency="memory") as store:
        store.define(every=2)
        with pytest.raises(StoreError, match="^every must be .* got 3 where the store in memory"):
            store.define(every=3)


# ---------------------------------------------------------------- what is looked up


@pytest.mark.parametrize(
    ("scheme", "ids", "wrong"),
    [
        ("index", (3, 4), "3"),
        ("content", ("ab", "cd"), 3),
        ("key:uid", (1002, 1003), "1002"),
        ("index", (3, 4), True),
        ("index", (3, 4), 3.0),
    ],
)
def test_an_id_of_another_kind_is_refused(scheme, ids, wrong):
    with GradientStore(residency="memory") as store:
        store.define(id_scheme=scheme)
        assert store.find(id=wrong) == ()
        block = small_block(2)
        store.append(type(block)(2, ids, block.layers))
        assert store.find(id=ids[1]) == (1,)
        assert store.find(id=type(ids[0])(9)) == ()
        kind = type(ids[0]).__name__
        with pytest.raises(TypeError, match=f"id must be {kind}, .* got {wrong!r}"):
            store.find(id=wrong)


@pytest.mark.parametrize("wrong", ["2", 2.0, True, [2]])
def test_a_step_that_is_no_number_is_refused(folder, wrong):
    with GradientStore(folder, mode="read") as store:
        assert store.find(step=2) == (4, 5)
        assert store.find(step=9) == ()
        with pytest.raises(TypeError, match=r"step must be an int, got "):
            store.find(step=wrong)
        with pytest.raises(TypeError, match=r"step must be an int, got "):
            store.find(id=3, step=wrong)


# ---------------------------------------------------------------- words


def test_a_damaged_shard_says_what_was_found_before_what_to_do(folder):
    data = bytearray(shards(folder)[0].read_bytes())
    data[-1] ^= 1
    shards(folder)[0].write_bytes(data)
    with (
        GradientStore(folder, mode="read") as store,
        pytest.raises(
            StoreError,
            match=r"as it was written, got checksum \d+ where \d+ was written\. What .*: restore",
        ),
    ):
        store.verify()


def test_names_far_from_what_was_written_are_not_shown():
    names = ["normalize", "damping", "query_rank"]
    assert near_names("dampin", names) == "'damping'"
    assert near_names("dtype", names) == "none"
    assert near_names("shard_bytes", names) == "none"
    assert near_numbers(7, [90, 5, 6, 12, 5]) == "5, 6, 12"
    assert near_numbers(7, []) == "none"
