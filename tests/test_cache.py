"""``TensorCache``: the same tensors from every place, nothing kept twice, no file left over."""

import gc
import os
import resource
import subprocess
import sys
import tempfile
import weakref
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from gradtrail.machine import free_bytes
from gradtrail.store import TensorCache
from gradtrail.store.cache import RESIDENCIES
from gradtrail.store.held import FILE_DTYPES

CPU = torch.device("cpu")


def values(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def files(folder):
    return sorted(path for path in Path(folder).rglob("*") if path.is_file())


def open_cache(residency, folder, **options):
    """A cache of each residency; a tiered one that keeps about half of what the tests put."""
    if residency in {"disk", "tiered"}:
        options["directory"] = folder
    if residency == "tiered":
        options.setdefault("budget", 400)
    return TensorCache(residency, **options)


TENSORS = {
    "float32": lambda: values(5, 3),
    "float64": lambda: values(5, 3, dtype=torch.float64),
    "bfloat16": lambda: values(5, 3, dtype=torch.bfloat16),
    "float16": lambda: values(7, dtype=torch.float16),
    "int64": lambda: torch.arange(6).view(2, 3),
    "uint8": lambda: torch.arange(6, dtype=torch.uint8),
    "bool": lambda: values(5) > 0,
    "complex64": lambda: torch.complex(values(3), values(3, seed=1)),
    "lazy conjugate": lambda: torch.complex(values(3), values(3, seed=1)).conj(),
    "lazy negative": lambda: torch.complex(values(3), values(3, seed=1)).conj().imag,
    "0-d": lambda: torch.tensor(2.5, dtype=torch.float64),
    "empty": lambda: torch.empty(0, 4),
    "one column": lambda: values(5, 3)[:, 1],
    "tail": lambda: values(50, 3)[47:],
    "empty slice": lambda: values(5, 3)[:0],
    "transposed": lambda: values(5, 3).t(),
    "expanded": lambda: values(1, 3).expand(5, 3),
    "part of a whole": lambda: values(5, 3)[2],
    "channels last": lambda: values(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "parameter": lambda: torch.nn.Parameter(values(5, 3)),
    "with a graph": lambda: values(5, 3).requires_grad_() * 2,
    "not a number": lambda: torch.tensor([float("nan"), float("inf"), -0.0]),
}


# ---------------------------------------------------------------- what goes in comes out


@pytest.mark.parametrize("residency", RESIDENCIES)
@pytest.mark.parametrize("kind", TENSORS)
def test_round_trip(kind, residency, tmp_path):
    tensor = TENSORS[kind]()
    expected = tensor.detach().clone()
    with open_cache(residency, tmp_path) as cache:
        cache.put("layer.weight", tensor)
        got = cache.get("layer.weight")
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
        assert got.dtype == expected.dtype
        assert got.is_contiguous()
        assert not got.is_conj()
        assert not got.requires_grad
        assert got.untyped_storage().nbytes() == got.nbytes
    assert files(tmp_path) == []


@pytest.mark.parametrize("residency", RESIDENCIES)
def test_round_trip_in_inference_mode(residency, tmp_path):
    with torch.inference_mode(), open_cache(residency, tmp_path) as cache:
        tensor = values(4, 4)
        cache.put("a", tensor)
        got = cache.get("a")
        assert torch.equal(got, tensor)
        assert not got.is_inference()
        assert cache.get("a", "cpu") is not tensor
        cache.put("a", tensor)
        assert torch.equal(cache.pop("a"), tensor)


def test_every_dtype_of_files_goes_through_one(tmp_path):
    with TensorCache("disk", directory=tmp_path) as cache:
        for dtype in FILE_DTYPES:
            tensor = torch.arange(8).to(dtype)
            cache.put(str(dtype), tensor)
            got = cache.get(str(dtype))
            assert got.dtype == dtype
            assert torch.equal(got.view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.parametrize("residency", RESIDENCIES)
def test_names_are_any_text(residency, tmp_path):
    names = ["h.0.attn", "../up", "a/b", "", "ü" * 300, "con", "tensor"]
    with open_cache(residency, tmp_path, **_small(residency)) as cache:
        for number, name in enumerate(names):
            cache.put(name, torch.full((3,), number))
        assert cache.names() == names
        assert len(cache) == len(names)
        for number, name in enumerate(names):
            assert name in cache
            assert cache.get(name).tolist() == [number] * 3
        assert "b" not in cache
        assert all(path.parent.parent == tmp_path for path in files(tmp_path))
        assert not (tmp_path.parent / "up").exists()


def _small(residency):
    return {"budget": 60} if residency == "tiered" else {}


def test_a_view_does_not_bring_its_whole_storage(tmp_path):
    whole = values(1000, 10)
    with TensorCache("disk", directory=tmp_path) as cache:
        cache.put("row", whole[3])
        cache.put("rows", whole[:, 2])
        sizes = [path.stat().st_size for path in files(tmp_path)]
        assert max(sizes) < 4 * 1000 + 1000
        assert min(sizes) < 1000
        assert cache.disk_bytes == sum(sizes)
    with TensorCache("memory") as cache:
        cache.put("row", whole[3])
        assert cache.get("row").untyped_storage().nbytes() == 40
        assert cache.memory_bytes == 40
        whole.zero_()
        assert cache.get("row").any()


def test_files_are_safetensors_of_the_tensors_dtype(tmp_path):
    with TensorCache("disk", directory=tmp_path) as cache:
        tensor = values(4, 2, dtype=torch.bfloat16)
        cache.put("a", tensor)
        (path,) = files(tmp_path)
        with safe_open(path, framework="pt") as file:
            (key,) = file.keys()
            assert torch.equal(file.get_tensor(key), tensor)


# ---------------------------------------------------------------- what is copied, what is shared


@pytest.mark.parametrize("residency", ["memory", "device"])
def test_memory_takes_and_hands_out_without_a_copy(residency):
    tensor = values(100)
    with TensorCache(residency) as cache:
        cache.put("a", tensor)
        assert cache.get("a").data_ptr() == tensor.data_ptr()
        cache.put("t", values(3, 4).t())
        assert cache.get("t").data_ptr() == cache.get("t").data_ptr()


def test_flags_set_on_what_was_handed_out_stay_there():
    with TensorCache("memory") as cache:
        cache.put("a", values(3))
        cache.get("a").requires_grad_()
        assert not cache.get("a").requires_grad


@pytest.mark.parametrize("by", ["who put it", "who got it"])
def test_a_write_into_a_held_tensor_is_noticed(by):
    tensor = values(3)
    with TensorCache("memory") as cache:
        cache.put("a", tensor)
        writer = tensor if by == "who put it" else cache.get("a")
        writer.add_(1)
        with pytest.raises(RuntimeError, match="'a' must be left alone .* Put it again"):
            cache.get("a")
        cache.put("a", writer)
        assert torch.equal(cache.get("a"), values(3) + 1)


def test_a_copy_that_was_written_into_is_made_anew_from_its_source():
    source = values(3, 4).t()
    with TensorCache("memory") as cache:
        cache.put("a", source)
        cache.get("a").zero_()
        cache.put("a", source)
        assert torch.equal(cache.get("a"), source)


def test_a_held_parameter_that_is_trained_is_noticed():
    weight = torch.nn.Parameter(values(3))
    with TensorCache("memory") as cache:
        cache.put("w", weight)
        weight.sum().backward()
        torch.optim.SGD([weight], lr=1.0).step()
        with pytest.raises(RuntimeError, match="written into"):
            cache.get("w")


@pytest.mark.parametrize("residency", ["disk", "tiered"])
def test_what_comes_from_a_file_is_the_callers_own(residency, tmp_path):
    with open_cache(residency, tmp_path, **_none(residency)) as cache:
        tensor = values(3)
        cache.put("a", tensor)
        tensor.zero_()
        got = cache.get("a")
        got.add_(1)
        assert torch.equal(cache.get("a"), values(3))


def _none(residency):
    return {"budget": 1} if residency == "tiered" else {}


@pytest.mark.skipif(sys.platform != "linux", reason="reads the list of mapped files")
def test_what_was_handed_out_is_no_view_of_the_file(tmp_path):
    with TensorCache("disk", directory=tmp_path) as cache:
        cache.put("a", values(100_000))
        got = cache.get("a")
        assert str(tmp_path) not in Path("/proc/self/maps").read_text()
        assert got.any()


def test_what_was_handed_out_outlives_the_cache(tmp_path):
    kept = []
    for residency in RESIDENCIES:
        with open_cache(residency, tmp_path) as cache:
            cache.put("a", values(200))
            kept.append(cache.get("a"))
    assert files(tmp_path) == []
    assert all(torch.equal(tensor, values(200)) for tensor in kept)


def inodes(folder):
    return [(path, path.stat().st_ino, path.stat().st_mtime_ns) for path in files(folder)]


@pytest.mark.parametrize("source", ["what was put", "what was handed out"])
def test_the_same_tensor_again_writes_nothing(source, tmp_path):
    with TensorCache("disk", directory=tmp_path) as cache:
        tensor = values(50)
        cache.put("a", tensor)
        before = inodes(tmp_path)
        again = tensor if source == "what was put" else cache.get("a")
        cache.put("a", again)
        assert inodes(tmp_path) == before
        again.mul_(2)
        cache.put("a", again)
        assert inodes(tmp_path) != before
        assert torch.equal(cache.get("a"), values(50) * 2)
        assert len(files(tmp_path)) == 1


def test_the_same_tensor_again_copies_nothing_in_memory():
    turned = values(20, 30).t()
    with TensorCache("memory") as cache:
        cache.put("a", turned)
        place = cache.get("a").data_ptr()
        cache.put("a", turned)
        cache.put("a", cache.get("a"))
        assert cache.get("a").data_ptr() == place
        assert cache.memory_bytes == turned.nbytes


def test_equal_values_in_another_tensor_are_another_tensor(tmp_path):
    with TensorCache("disk", directory=tmp_path) as cache:
        cache.put("a", values(5))
        before = inodes(tmp_path)
        cache.put("a", values(5))
        assert inodes(tmp_path) != before


def test_other_memory_under_the_same_tensor_is_seen(tmp_path):
    with TensorCache("disk", directory=tmp_path) as cache:
        tensor = values(5)
        cache.put("a", tensor)
        tensor.data = values(5, seed=1)
        cache.put("a", tensor)
        assert torch.equal(cache.get("a"), values(5, seed=1))


@pytest.mark.parametrize("residency", RESIDENCIES)
def test_two_names_share_one_tensor(residency, tmp_path):
    tensor = values(50)
    with open_cache(residency, tmp_path, **_none(residency)) as cache:
        cache.put("q", tensor)
        bytes_of_one = (cache.device_bytes, cache.memory_bytes, cache.disk_bytes)
        cache.put("k", tensor)
        cache.put("v", cache.get("q"))
        assert (cache.device_bytes, cache.memory_bytes, cache.disk_bytes) == bytes_of_one
        assert len(files(tmp_path)) <= 1
        cache.delete("q")
        cache.put("k", values(50, seed=1))
        assert torch.equal(cache.get("v"), tensor)
        assert torch.equal(cache.get("k"), values(50, seed=1))
        assert sum(bytes_of_one) < cache.device_bytes + cache.memory_bytes + cache.disk_bytes
        cache.delete("v")
        cache.delete("k")
        assert (cache.device_bytes, cache.memory_bytes, cache.disk_bytes) == (0, 0, 0)
        cache.put("q", tensor)
        assert torch.equal(cache.get("q"), tensor)


# ---------------------------------------------------------------- room


def test_bytes_are_counted_by_place(tmp_path):
    with TensorCache("device") as cache:
        cache.put("a", values(10))
        assert (cache.device_bytes, cache.memory_bytes, cache.disk_bytes) == (40, 0, 0)
    with TensorCache("memory") as cache:
        cache.put("a", values(10))
        assert (cache.device_bytes, cache.memory_bytes, cache.disk_bytes) == (0, 40, 0)
    with TensorCache("tiered", budget=50, directory=tmp_path) as cache:
        cache.put("a", values(10))
        cache.put("b", values(10))
        assert (cache.device_bytes, cache.memory_bytes) == (0, 40)
        assert cache.disk_bytes == files(tmp_path)[0].stat().st_size > 40
        cache.close()
        assert (cache.device_bytes, cache.memory_bytes, cache.disk_bytes) == (0, 0, 0)


def test_tiered_spills_what_does_not_fit_and_nothing_else(tmp_path):
    with TensorCache("tiered", budget=100, directory=tmp_path) as cache:
        cache.put("first", values(20))
        cache.put("large", values(1000))
        cache.put("small", values(5))
        assert cache.memory_bytes == 100
        assert len(files(tmp_path)) == 1
        cache.put("large", values(10, seed=1))
        assert torch.equal(cache.get("large"), values(10, seed=1))
        cache.delete("first")
        cache.put("large", values(15, seed=2))
        assert files(tmp_path) == []
        assert cache.disk_bytes == 0
        assert cache.memory_bytes == 80
        assert torch.equal(cache.get("large"), values(15, seed=2))


def test_replaced_names_free_memory_and_files(tmp_path):
    with TensorCache("memory", budget=100) as cache:
        for seed in range(5):
            cache.put("a", values(20, seed=seed))
        assert cache.memory_bytes == 80
        assert torch.equal(cache.get("a"), values(20, seed=4))
    with TensorCache("disk", directory=tmp_path) as cache:
        for seed in range(5):
            cache.put("a", values(20, seed=seed))
        assert len(files(tmp_path)) == 1
        assert cache.disk_bytes == files(tmp_path)[0].stat().st_size


@pytest.mark.parametrize("by", ["put", "delete", "pop", "close"])
def test_a_tensor_that_is_no_longer_held_is_let_go(by):
    array = np.ones(1000, dtype=np.float32)
    alive = weakref.ref(array)
    with TensorCache("memory") as cache:
        cache.put("a", torch.from_numpy(array))
        cache.put("also a", cache.get("a"))
        cache.delete("also a")
        del array
        gc.collect()
        assert alive() is not None
        getattr(cache, by)(*{"put": ("a", values(3)), "close": ()}.get(by, ("a",)))
        gc.collect()
        assert alive() is None


@pytest.mark.parametrize("residency", ["memory", "device"])
def test_memory_refuses_what_does_not_fit(residency):
    with TensorCache(residency, budget=100) as cache:
        cache.put("a", values(20))
        message = f"'b' must fit the budget of residency '{residency}', got 40 bytes where 20 of"
        with pytest.raises(MemoryError, match=message + ".*Raise budget=, or choose"):
            cache.put("b", values(10))
        with pytest.raises(MemoryError, match="got 104 bytes where 100 of 100 are left"):
            cache.put("a", values(26))
        assert cache.names() == ["a"]
        assert torch.equal(cache.get("a"), values(20))
        cache.put("a", values(25))


@pytest.mark.parametrize("residency", ["disk", "tiered"])
def test_a_disk_without_room_is_refused_before_writing(residency, tmp_path):
    huge = torch.zeros(1).expand(1 << 20, 1 << 30)
    with open_cache(residency, tmp_path) as cache:
        cache.put("a", values(3))
        with pytest.raises(OSError, match=r"'b' must fit on the disk, got \d+ bytes .* larger"):
            cache.put("b", huge)
        with pytest.raises(OSError, match="'a' must fit on the disk"):
            cache.put("a", huge)
        assert cache.names() == ["a"]
        assert torch.equal(cache.get("a"), values(3))


@contextmanager
def largest_file(num_bytes):
    """Files of this process cannot grow beyond a size, as on a disk that fills while writing."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_write_that_breaks_off_leaves_what_was_there(tmp_path):
    with TensorCache("disk", directory=tmp_path) as cache:
        cache.put("a", values(3))
        before = inodes(tmp_path)
        with (
            largest_file(20_000),
            pytest.raises(OSError, match=r"'a' \(400000 bytes\) could not be .*Name a directory"),
        ):
            cache.put("a", values(100_000))
        assert inodes(tmp_path) == before
        assert torch.equal(cache.get("a"), values(3))
        cache.put("a", values(100_000))
        assert torch.equal(cache.get("a"), values(100_000))


def test_a_budget_is_a_share_of_the_free_memory():
    free = free_bytes(CPU)
    for budget, share in ((0.25, 0.25), (1.0, 1.0), (None, 0.5)):
        with TensorCache("memory", budget=budget) as cache:
            assert 0.5 * share * free < cache.budget < 2 * share * free
    with TensorCache("memory", budget=1234) as cache:
        assert cache.budget == 1234


# ---------------------------------------------------------------- the end


@pytest.mark.parametrize("residency", ["disk", "tiered"])
def test_close_deletes_the_files_and_no_others(residency, tmp_path):
    theirs = tmp_path / "000000.safetensors"
    theirs.write_text("not ours")
    cache = open_cache(residency, tmp_path, **_none(residency))
    cache.put("a", values(3))
    (mine,) = (path for path in files(tmp_path) if path != theirs)
    stranger = mine.parent / "notes.txt"
    stranger.write_text("somebody's")
    cache.close()
    cache.close()
    assert files(tmp_path) == sorted([theirs, stranger])
    assert theirs.read_text() == "not ours"


def test_close_removes_the_private_folder(tmp_path):
    cache = TensorCache("disk", directory=str(tmp_path / "deep" / "er"))
    cache.put("a", values(3))
    cache.close()
    assert list((tmp_path / "deep" / "er").iterdir()) == []


def test_without_a_directory_the_temporary_folder_is_used(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with TensorCache("disk") as cache:
        cache.put("a", values(3))
        (path,) = files(tmp_path)
        assert path.parent.stat().st_mode & 0o077 == 0
    assert list(tmp_path.iterdir()) == []


def test_two_caches_in_one_directory_do_not_meet(tmp_path):
    with TensorCache("disk", directory=tmp_path) as one:
        with TensorCache("disk", directory=tmp_path) as two:
            one.put("a", values(3))
            two.put("a", values(3, seed=1))
        assert torch.equal(one.get("a"), values(3))
    assert list(tmp_path.iterdir()) == []


def _fails(cache):
    cache.put("a", values(3))
    raise ZeroDivisionError


def test_files_are_gone_after_an_exception(tmp_path):
    cache = TensorCache("disk", directory=tmp_path)
    with pytest.raises(ZeroDivisionError), cache:
        _fails(cache)
    assert list(tmp_path.iterdir()) == []


def test_a_forgotten_cache_deletes_its_files(tmp_path):
    cache = TensorCache("disk", directory=tmp_path)
    cache.put("a", values(3))
    kept = cache.get("a")
    assert len(files(tmp_path)) == 1
    del cache
    gc.collect()
    assert list(tmp_path.iterdir()) == []
    assert torch.equal(kept, values(3))


ENDS = {
    "end": "",
    "exception": "raise SystemExit(3)",
    "forked child": (
        "child = os.fork()\n"
        "if child == 0: cache.delete('a'); cache.close(); sys.exit(0)\n"
        "os.waitpid(child, 0)\n"
        "raise SystemExit(0 if cache.get('a').sum() == 5 else 4)"
    ),
    "writing child": (
        "child = os.fork()\n"
        "if child == 0:\n"
        "    try: cache.put('a', torch.zeros(5))\n"
        "    except RuntimeError as error: os._exit(7 if 'a fork of it' in str(error) else 1)\n"
        "raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))"
    ),
}
CODES = {"end": 0, "exception": 3, "forked child": 0, "writing child": 7}


@pytest.mark.parametrize("end", ENDS)
def test_files_are_gone_when_the_process_ends(end, tmp_path):
    script = (
        "import os, sys, torch\nfrom gradtrail.store import TensorCache\n"
        "torch.set_num_threads(1)\n"
        f"cache = TensorCache('disk', directory={str(tmp_path)!r})\n"
        "cache.put('a', torch.ones(5))\n"
        f"assert len(os.listdir({str(tmp_path)!r})) == 1\n{ENDS[end]}\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == CODES[end], done.stderr
    assert list(tmp_path.iterdir()) == []


CLOSED = {
    "put": lambda cache: cache.put("a", values(3)),
    "get": lambda cache: cache.get("a"),
    "pop": lambda cache: cache.pop("a"),
    "delete": lambda cache: cache.delete("a"),
    "names": lambda cache: cache.names(),
    "len": len,
    "in": lambda cache: "a" in cache,
    "with": lambda cache: cache.__enter__(),
}


@pytest.mark.parametrize("residency", RESIDENCIES)
@pytest.mark.parametrize("use", CLOSED)
def test_a_closed_cache_refuses(use, residency, tmp_path):
    cache = open_cache(residency, tmp_path)
    cache.put("a", values(3))
    cache.close()
    with pytest.raises(RuntimeError, match="TensorCache must be open, got one that was closed"):
        CLOSED[use](cache)


def test_pop_and_delete(tmp_path):
    for residency in RESIDENCIES:
        with open_cache(residency, tmp_path, **_none(residency)) as cache:
            cache.put("a", values(3))
            got = cache.pop("a")
            got.add_(1)
            assert "a" not in cache
            cache.put("a", got)
            cache.delete("a")
            assert len(cache) == 0
            assert files(tmp_path) == []


@pytest.mark.parametrize("use", ["get", "pop", "delete"])
def test_an_unknown_name_is_refused_with_its_neighbours(use):
    with TensorCache("memory") as cache:
        cache.put("h.0.attn", values(3))
        with pytest.raises(KeyError, match=r"name must .* got 'h.0.atn'. Near it: 'h.0.attn'"):
            getattr(cache, use)("h.0.atn")


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize("residency", ["ram", None, "Disk"])
def test_an_unknown_residency_is_refused(residency):
    with pytest.raises(ValueError, match="residency must be one of 'device', 'memory', 'disk'"):
        TensorCache(residency)


@pytest.mark.parametrize("budget", [0, -5, 0.0, 1.5, -0.1, float("nan"), True, "1GB"])
def test_a_senseless_budget_is_refused(budget, tmp_path):
    for residency in ("device", "memory", "tiered"):
        with pytest.raises(ValueError, match="budget must be an int of at least 1 .bytes., a fl"):
            open_cache(residency, tmp_path, budget=budget)
    assert list(tmp_path.iterdir()) == []


def test_options_without_an_effect_are_refused(tmp_path):
    for residency in ("device", "memory"):
        with pytest.raises(ValueError, match="directory must be None .* choose 'disk' or 'tier"):
            TensorCache(residency, directory=tmp_path)
    with pytest.raises(ValueError, match="budget must be None with residency 'disk'"):
        TensorCache("disk", directory=tmp_path, budget=100)


REFUSED = {
    "list": lambda: [1.0],
    "sparse": lambda: torch.eye(3).to_sparse(),
    "meta": lambda: torch.empty(3, device="meta"),
    "subclass": lambda: values(3).as_subclass(type("Own", (torch.Tensor,), {})),
}


@pytest.mark.parametrize("residency", RESIDENCIES)
@pytest.mark.parametrize("kind", REFUSED)
def test_what_has_no_plain_values_is_refused(kind, residency, tmp_path):
    with open_cache(residency, tmp_path) as cache:
        with pytest.raises(TypeError, match=r"'a' must be a dense torch.Tensor with data, got"):
            cache.put("a", REFUSED[kind]())
        assert len(cache) == 0


def test_a_dtype_that_files_do_not_hold_is_refused_at_once(tmp_path):
    tensor = torch.complex(values(3).double(), values(3).double())
    with TensorCache("memory") as cache:
        cache.put("a", tensor)
        assert torch.equal(cache.get("a"), tensor)
    for residency in ("disk", "tiered"):
        with (
            open_cache(residency, tmp_path) as cache,
            pytest.raises(TypeError, match=r"dtype that safetensors files hold, got torch.c"),
        ):
            cache.put("a", tensor)


@contextmanager
def without_privileges():
    """Root may write anywhere; act as somebody else for a while."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


def test_a_read_only_directory_is_refused_when_the_cache_is_made():
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o555)
    try:
        with without_privileges(), pytest.raises(OSError, match="directory must be a folder that"):
            TensorCache("disk", directory=folder)
    finally:
        folder.rmdir()


def test_a_file_in_place_of_a_directory_is_refused(tmp_path):
    path = tmp_path / "file"
    path.write_text("")
    with pytest.raises(OSError, match=r"directory must .* got '.*file' .* or keep the tensors in"):
        TensorCache("tiered", directory=path)
    with pytest.raises(OSError, match="directory must be a folder"):
        TensorCache("tiered", directory=path / "below")


def test_a_folder_that_somebody_removed(tmp_path):
    with TensorCache("disk", directory=tmp_path) as cache:
        cache.put("a", values(3))
        (path,) = files(tmp_path)
        path.unlink()
        path.parent.rmdir()
        with pytest.raises(OSError, match="'a' could not be read from .* put it once more"):
            cache.get("a")
        with pytest.raises(OSError, match="No such file"):
            cache.put("b", values(3))
        assert cache.names() == ["a"]


def test_a_damaged_file_is_refused(tmp_path):
    with TensorCache("disk", directory=tmp_path) as cache:
        cache.put("a", values(100))
        (path,) = files(tmp_path)
        path.write_bytes(path.read_bytes()[:200])
        with pytest.raises(OSError, match="'a' could not be read"):
            cache.get("a")
        cache.put("a", values(100))
        assert torch.equal(cache.get("a"), values(100))


# ---------------------------------------------------------------- devices


@pytest.mark.gpu
@pytest.mark.parametrize("residency", RESIDENCIES)
def test_tensors_come_to_the_device(residency, tmp_path):
    with open_cache(residency, tmp_path, device="cuda", **_none(residency)) as cache:
        for source in ("cpu", "cuda"):
            tensor = values(50).to(source)
            cache.put(source, tensor)
            got = cache.get(source)
            assert got.device.type == "cuda"
            assert torch.equal(got.cpu(), values(50))
            assert cache.get(source, "cpu").device.type == "cpu"
            sizes = (cache.device_bytes, cache.memory_bytes, cache.disk_bytes)
            cache.put(source, got)
            assert (cache.device_bytes, cache.memory_bytes, cache.disk_bytes) == sizes
        assert (cache.device_bytes > 0) == (residency == "device")


@pytest.mark.gpu
def test_device_memory_holds_one_tensor_at_a_time(tmp_path):
    for residency in ("memory", "disk"):
        with open_cache(residency, tmp_path, device="cuda") as cache:
            for number in range(8):
                cache.put(str(number), values(1 << 18, seed=number))
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            for name in cache.names():
                cache.get(name).sum()
            assert torch.cuda.max_memory_allocated() - before <= (1 << 20) + 4096
