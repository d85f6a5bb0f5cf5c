"""A store whose writer is killed at any instant: readable, nothing lost, equal in the end.

Two ways to kill: from outside after a random while, and from inside right before or after a drawn
call into C (write, fsync, rename, open and their kin), so that every gap between two is hit.
"""

import os
import random
import shutil
import time
import traceback
from pathlib import Path

import pytest
from storing import (
    FACTS,
    AtCall,
    Child,
    block_of_all,
    die,
    in_child,
    interrupt,
    journal,
    journal_lines,
    journalled_steps,
    meta_of,
    quick_folder,
    same_block,
    same_content,
    same_tensor,
    shards,
    small_block,
    step_tensors,
    values,
)

from gradtrail import GradientStore, StoreError
from gradtrail.store import BackgroundWriter, StepStore
from gradtrail.store import shards as shards_module

NUM_BLOCKS = 16
GONE = {5, 11}  # steps that are taken back
FINISHED = 0
KILLED = -9


def blocks():
    """Blocks of several sizes; a layer that comes later than the others."""
    found = [small_block(step, s=3 + 9 * (step % 3)) for step in range(NUM_BLOCKS)]
    found[9] = block_of_all(9)
    return found


# ---------------------------------------------------------------- the writers, in a child


def write_directly(folder, *, pause=0.0):
    """The same in a process of its own, past the system's cache however small the records are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards_module, "_DIRECT_RECORD", 0)
        write_gradients(folder, background=True, discards=False, pause=pause)


def write_gradients(folder, *, background, discards, pause=0.0):
    """Go on with the store in a folder up to its last block, as a capture that resumes does."""
    everything = blocks()
    with GradientStore(folder, mode="resume", shard_bytes=900) as store:
        store.define(**FACTS)
        done = set(store.steps)
        last = max(done, default=-1)
        if background:
            with BackgroundWriter(store, queue_bytes=3000) as writer:
                for step in range(last + 1, NUM_BLOCKS):
                    writer.submit(everything[step], meta=meta_of(step))
                    time.sleep(pause)
                writer.flush()
            todo = sorted(GONE) if discards else []
        else:
            todo = sorted(GONE & done) if discards else []
        for step in todo:
            if step in store.steps:
                store.discard(step)
        if background:
            return
        for step in range(last + 1, NUM_BLOCKS):
            store.append(everything[step], meta=meta_of(step))
            if discards and step in GONE:
                store.discard(step)
            time.sleep(pause)


def write_steps(folder, *, pause=0.0):
    with StepStore(folder, mode="resume", shard_bytes=150) as store:
        store.define(optimizer="adamw")
        for step in range(max(store.steps, default=-1) + 1, NUM_BLOCKS):
            store.append(step, step_tensors(step), {"lr": step / 8})
            time.sleep(pause)


WRITERS = {
    "synchronous": (write_gradients, {"background": False, "discards": False}),
    "background": (write_gradients, {"background": True, "discards": False}),
    "with steps taken back": (write_gradients, {"background": False, "discards": True}),
    "in the background with steps taken back": (
        write_gradients,
        {"background": True, "discards": True},
    ),
    "past the cache": (write_directly, {}),
    "steps": (write_steps, {}),
}


def from_outside(say, writer, folder, pause):
    """Say when the work begins, and do it."""
    write, options = WRITERS[writer]
    say("begins")
    write(folder, **options, pause=pause)


def from_inside(say, writer, folder, n):
    """Do the work and die at the n-th call; with None, say how many calls there were."""
    write, options = WRITERS[writer]
    death = AtCall(n, die)
    death.arm()
    write(folder, **options)
    death.disarm()
    say(death.count)


# ---------------------------------------------------------------- what must hold


def check_between(folder, writer):
    """After a kill: the store can be read, and holds all that its journal promises, whole."""
    if not (Path(folder) / "manifest.json").exists():
        assert not journalled_steps(folder)
        return 0
    promised = journalled_steps(folder)
    if writer == "steps":
        with StepStore(folder, mode="read") as store:
            assert list(store.steps) == promised
            store.verify()
            for step in promised:
                check_step(store, step)
    else:
        everything = blocks()
        with GradientStore(folder, mode="read") as store:
            store.verify()
            assert [record.step for record in store.records] == promised
            for stored in store.blocks(prefetch=False):
                same_block(stored.block, everything[stored.block.step])
                assert stored.meta == meta_of(stored.block.step)
    assert promised == sorted(set(promised))
    if writer in EXACT:
        assert promised == list(range(len(promised)))
    return len(promised)


def check_step(store, step):
    got = store.read(step)
    assert set(got) == set(step_tensors(step))
    for name, tensor in step_tensors(step).items():
        same_tensor(got[name], tensor, name)
    assert store.values(step) == {"lr": step / 8}


EXACT = {"synchronous", "background", "past the cache", "steps"}


def check_end(folder, reference, writer, *, exact=EXACT):
    """A store that was killed and resumed equals one that was not, to the byte of its shards."""
    check_between(folder, writer)
    if writer != "steps":
        kept = [
            block
            for block in blocks()
            if not (WRITERS[writer][1].get("discards") and block.step in GONE)
        ]
        with (
            GradientStore(folder, mode="read") as store,
            GradientStore(reference, mode="read") as other,
        ):
            same_content(store, kept, metas=[meta_of(block.step) for block in kept])
            assert store.facts == other.facts
            assert store.layers == other.layers
            assert list(store.layers) == list(other.layers)
            assert store.nbytes == other.nbytes
    if writer in exact:
        assert [path.name for path in shards(folder)] == [path.name for path in shards(reference)]
        for path, other in zip(shards(folder), shards(reference), strict=True):
            assert path.read_bytes() == other.read_bytes(), path.name
        assert without_run(journal_lines(folder)) == without_run(journal_lines(reference))
        left = sorted(path.name for path in Path(folder).iterdir())
        assert left == sorted(path.name for path in Path(reference).iterdir())
    assert not [path for path in Path(folder).iterdir() if path.suffix == ".tmp"]
    assert {path.name for path in shards(folder)} == {
        line["shard"] for line in journal_lines(folder) if "shard" in line
    }


def without_run(lines):
    """Lines of a journal without what is drawn anew for every store."""
    return [
        {key: value for key, value in line.items() if key not in {"run", "line_crc"}}
        for line in lines
    ]


@pytest.fixture
def place(tmp_path):
    folder = quick_folder(tmp_path)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """One store of each kind whose writer was left alone, and its number of calls into C."""
    found, folder = {}, quick_folder(tmp_path_factory.mktemp("reference"))
    for writer in WRITERS:
        calls = in_child(_counted, writer, folder / writer)
        assert calls > 60
        found[writer] = folder / writer, calls
    yield found
    shutil.rmtree(folder)


def _counted(writer, folder):
    heard = []
    from_inside(heard.append, writer, folder, None)
    return heard[0]


def kill_outside(folder, reference, writer, *, kills, seed, pause=0.004):
    """Kill after random whiles, over as many stores as it takes; how far each kill came."""
    random_ = random.Random(seed)
    reached, stores = [], 0
    while len(reached) < kills:
        store = folder / str(stores)
        stores += 1
        code = KILLED
        while code == KILLED and len(reached) < kills:
            child = Child(from_outside, writer, store, pause)
            assert child.hear() == "begins"
            child.process.join(random_.uniform(0, 3 * pause * NUM_BLOCKS))
            child.process.kill()
            code = child.end()
            assert code in {FINISHED, KILLED}
            if code == KILLED:
                reached.append(check_between(store, writer) if store.exists() else 0)
        if code == KILLED:
            Child(from_outside, writer, store, 0.0).end()
        check_end(store, reference, writer)
        shutil.rmtree(store)
    return reached


def kill_inside(folder, reference, writer, instants):
    """Kill at given calls, each time followed by a resume that is killed too, and one that ends."""
    for number, instant in enumerate(instants):
        store = folder / str(number)
        for n in (instant, instant // 3, None):
            code = Child(from_inside, writer, store, n).end()
            assert code in {FINISHED, KILLED}
            assert n is not None or code == FINISHED
            if store.exists():
                check_between(store, writer)
        check_end(store, reference, writer)
        shutil.rmtree(store)


# ---------------------------------------------------------------- the tests


@pytest.mark.parametrize("writer", WRITERS)
def test_killed_at_drawn_calls(writer, references, place):
    reference, calls = references[writer]
    instants = random.Random(7).sample(range(calls), 8)
    kill_inside(place, reference, writer, instants)


@pytest.mark.parametrize("writer", ["synchronous", "background"])
def test_killed_at_random_instants(writer, references, place):
    reached = kill_outside(place, references[writer][0], writer, kills=15, seed=3)
    assert len(reached) == 15
    assert any(0 < count < NUM_BLOCKS for count in reached)


@pytest.mark.slow
@pytest.mark.parametrize("writer", WRITERS)
def test_killed_at_fifty_random_instants(writer, references, place):
    reached = kill_outside(place, references[writer][0], writer, kills=50, seed=11, pause=0.01)
    assert len(reached) == 50
    assert len(set(reached)) > 3


@pytest.mark.slow
@pytest.mark.parametrize("writer", WRITERS)
def test_killed_at_every_fifth_call(writer, references, place):
    reference, calls = references[writer]
    kill_inside(place, reference, writer, range(0, calls, 5))


def _interrupted(writer, folder, n):
    """Do the work with what Ctrl-C raises at the n-th call of this thread; what came out of it."""
    write, options = WRITERS[writer]
    at = AtCall(n, interrupt)
    at.arm(threads=False)
    try:
        write(folder, **options)
    except KeyboardInterrupt:
        return "interrupted"
    except Exception:  # noqa: BLE001  # the test tells what it was
        return traceback.format_exc()
    finally:
        at.disarm()
    return "finished"


def _overwritten(say, folder, n):
    """Write a store anew over another one, and die at the n-th call."""
    at = AtCall(n, die)
    at.arm()
    with GradientStore(folder, mode="overwrite", shard_bytes=500) as store:
        store.define(**FACTS)
        store.attach("covariances", {"a": values(3, seed=1)}, {"n": "1"})
        for step in range(4):
            store.append(small_block(step + 20))
    at.disarm()
    say(at.count)


def _attached(say, folder, n):
    """Replace an attachment, and die at the n-th call."""
    at = AtCall(n, die)
    with GradientStore(folder, mode="resume") as store:
        store.define(**FACTS)
        at.arm()
        store.attach("covariances", {"a": values(3, seed=1)}, {"n": "1"})
        at.disarm()
    say(at.count)


def old_store(folder):
    with GradientStore(folder, shard_bytes=500) as store:
        store.define(**FACTS)
        store.attach("covariances", {"a": values(3)}, {"n": "0"})
        for step in range(4):
            store.append(small_block(step))


def calls_of(work, place):
    old_store(place / "counted")
    child = Child(work, place / "counted", None)
    calls = child.hear()
    child.end()
    return calls


def test_killed_while_it_overwrites(place):
    """What is left is a store, old or new, or none; and it can be overwritten."""
    for instant in range(0, calls_of(_overwritten, place), 9):
        store = place / str(instant)
        old_store(store)
        assert Child(_overwritten, store, instant).end() == KILLED
        if (store / "manifest.json").exists():
            with GradientStore(store, mode="read") as found:
                found.verify()
                first = 20 if any(step > 9 for step in found.steps) else 0
                same_content(found, [small_block(first + n) for n in range(len(found.records))])
        with GradientStore(store, mode="overwrite", shard_bytes=500) as found:
            assert len(found) == 0
            assert found.attached("covariances") is None
        assert len(list(store.iterdir())) == 3  # the manifest, a journal and the lock
        shutil.rmtree(store)


def test_killed_while_it_attaches(place):
    """The old attachment or the new one, whole."""
    seen = set()
    for instant in range(calls_of(_attached, place)):
        store = place / str(instant)
        old_store(store)
        assert Child(_attached, store, instant).end() == KILLED
        with GradientStore(store, mode="read") as found:
            tensors, metadata = found.attached("covariances")
            seed = int(metadata["n"])
            seen.add(seed)
            same_tensor(tensors["a"], values(3, seed=seed))
            found.verify()
        with GradientStore(store, mode="resume") as found:
            found.define(**FACTS)
            same_content(found, [small_block(step) for step in range(4)])
        assert not [path for path in store.iterdir() if path.suffix == ".tmp"]
        shutil.rmtree(store)
    assert seen == {0, 1}


def interrupt_and_go_on(place, reference, writer, instants):
    """Interrupt at given calls, each time followed by a run to the end."""
    write, options = WRITERS[writer]
    for instant in instants:
        store = place / str(instant)
        # in a process of its own: an interrupt while the lock is taken leaves it to the process
        told = in_child(_interrupted, writer, store, instant)
        if store.exists():
            check_between(store, writer)
        assert told in {"interrupted", "finished"}, told
        write(store, **options)
        check_end(store, reference, writer, exact=set())  # shards end where it was closed
        shutil.rmtree(store)


@pytest.mark.parametrize("writer", WRITERS)
def test_interrupted_at_drawn_calls(writer, references, place):
    reference, calls = references[writer]
    instants = random.Random(5).sample(range(calls), 12)
    interrupt_and_go_on(place, reference, writer, instants)


@pytest.mark.slow
@pytest.mark.parametrize("writer", WRITERS)
def test_interrupted_at_every_fifth_call(writer, references, place):
    reference, calls = references[writer]
    interrupt_and_go_on(place, reference, writer, range(0, calls, 5))


def test_journal_cut_at_every_byte(references, place):
    """A line torn anywhere costs its own shard and no other; a resume goes on to the same store."""
    reference, _ = references["synchronous"]
    whole = journal(reference).read_bytes()
    ends = [at + 1 for at, byte in enumerate(whole) if byte == ord("\n")]
    cuts = {0, 1, len(whole) - 1, len(whole) // 2}
    cuts |= {at for end in ends for at in (end - 1, end, end + 1)} - {len(whole) + 1}
    for at in sorted(cuts):
        store = place / str(at)
        shutil.copytree(reference, store)
        journal(store).write_bytes(whole[:at])
        before = listing(store)
        if at < ends[0]:  # no kill leaves this: the first line is there before the first shard
            for mode in ("read", "resume"):
                with pytest.raises(StoreError, match="Nothing was deleted"):
                    GradientStore(store, mode=mode)
            assert before.items() <= listing(store).items()
            continue
        count = check_between(store, "synchronous")
        assert count == len(journalled_steps(store))
        assert listing(store) == before
        write_gradients(store, background=False, discards=False)
        check_end(store, reference, "synchronous")


def listing(folder):
    return {path.name: path.stat().st_mtime_ns for path in Path(folder).iterdir()}


def test_shards_without_a_line_are_ignored_and_removed(references, place):
    reference, _ = references["synchronous"]
    store = place / "store"
    shutil.copytree(reference, store)
    lines = journal(store).read_bytes().splitlines(keepends=True)
    journal(store).write_bytes(b"".join(lines[:-2]))
    (store / "0000-000099.safetensors").write_bytes(b"half a shard")
    (store / "0000-000100.safetensors.tmp").write_bytes(b"less")
    before = listing(store)
    check_between(store, "synchronous")
    assert listing(store) == before
    write_gradients(store, background=False, discards=False)
    check_end(store, reference, "synchronous")


def test_each_shard_is_on_the_disk_before_its_line(tmp_path, monkeypatch):
    """Flushed under another name, renamed, the folder flushed, then journalled and flushed."""
    events = []
    fsync, replace, rename = os.fsync, os.replace, os.rename

    def flushed(file):
        number = file if isinstance(file, int) else file.fileno()
        events.append(("fsync", Path(f"/proc/self/fd/{number}").readlink().name, sizes()))
        fsync(file)

    def renamed(call):
        def do(source, target, **options):
            events.append(("rename", (Path(source).name, Path(target).name), sizes()))
            call(source, target, **options)

        return do

    def sizes():
        return len(journal_lines(folder))

    folder = tmp_path / "store"
    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(os, "replace", renamed(replace))
    monkeypatch.setattr(os, "rename", renamed(rename))
    write_gradients(folder, background=False, discards=False)
    lines = journal_lines(folder)
    assert len(shards(folder)) > 4
    for shard in shards(folder):
        (at,) = (
            n
            for n, (kind, names, _) in enumerate(events)
            if kind == "rename" and names[1] == shard.name
        )
        source = events[at][1][0]
        number = next(n for n, line in enumerate(lines) if line.get("shard") == shard.name)
        assert source != shard.name
        assert source.endswith(".tmp")
        assert any(kind == "fsync" and name == source for kind, name, _ in events[:at])
        later = [(kind, name, count) for kind, name, count in events[at:] if kind == "fsync"]
        folder_first = next(n for n, (_, name, _) in enumerate(later) if name == folder.name)
        journal_first = next(
            n
            for n, (_, name, count) in enumerate(later)
            if name == journal(folder).name and count > number
        )
        assert folder_first < journal_first
        assert later[folder_first][2] <= number  # the line is not there before the shard is
    manifests = [
        names for kind, names, _ in events if kind == "rename" and names[1] == "manifest.json"
    ]
    assert manifests


class Disk:
    """What a folder would hold if the power failed now: what was flushed, and nothing else.

    With ``names="flushed"`` a file has the name it had when its folder was last flushed, with
    ``names="current"`` its newest one: a file system may keep names sooner than what is in files.
    """

    def __init__(self, folder, monkeypatch):
        self.folder, self.watch, self.states = folder, [], {}
        self.content, self.flushed, self.flushed_folders = {}, {}, set()
        self._fsync = os.fsync
        monkeypatch.setattr(os, "fsync", self.fsync)
        for name in ("replace", "rename", "unlink", "remove"):
            monkeypatch.setattr(os, name, self.around(getattr(os, name)))

    def around(self, call):
        def do(*args, **options):
            self.take()
            call(*args, **options)
            self.take()

        return do

    def fsync(self, file):
        self._fsync(file)
        number = file if isinstance(file, int) else file.fileno()
        path = Path(f"/proc/self/fd/{number}").readlink()
        if path.is_dir():
            self.flushed_folders.add(path)
            if path == self.folder:
                self.flushed = self.names()
        else:
            self.watch.append(os.dup(number))  # so that no other file is given its number
            self.content[os.fstat(number).st_ino] = path.read_bytes()
        self.take()

    def names(self):
        return {entry.name: entry.inode() for entry in os.scandir(self.folder)}

    def take(self):
        if not self.folder.is_dir():
            return
        for names in (self.flushed, self.names()):
            state = tuple(
                (name, self.content.get(inode, b"")) for name, inode in sorted(names.items())
            )
            self.states[state] = None

    def close(self):
        for number in self.watch:
            os.close(number)


@pytest.mark.parametrize(
    "writer", ["synchronous", "with steps taken back", "past the cache", "steps"]
)
def test_the_power_fails_at_any_instant(writer, place, monkeypatch):
    """Nothing that a journal on the disk promises is missing there, and a flush is one."""
    folder = place / "store"
    write, options = WRITERS[writer]
    with monkeypatch.context() as patches:
        disk = Disk(folder, patches)
        write(folder, **options)
        disk.close()
    reached = []
    for number, state in enumerate(disk.states):
        after = place / str(number)
        after.mkdir()
        for name, content in state:
            (after / name).write_bytes(content)
        reached.append(check_between(after, writer))
        shutil.rmtree(after)
    assert len(reached) > 20
    assert reached[-1] == NUM_BLOCKS - (len(GONE) if writer == "with steps taken back" else 0)
    assert disk.flushed.keys() == {path.name for path in folder.iterdir()}
    assert place in disk.flushed_folders
