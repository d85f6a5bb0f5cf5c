"""Where a fit lives: folders, residencies, kept factors, an attributor's memory, ensembles."""

import copy
import gc
import importlib
import os
import subprocess
import sys
import tempfile
import textwrap
import weakref
from pathlib import Path

import pytest
import torch
from models import text_rows, tiny
from torch import nn
from torch.nn import functional as F

from gradtrail import (
    CurvatureError,
    EKFACAttributor,
    GradTrailWarning,
    KFACAttributor,
    attribute,
    plan,
    self_influence,
)
from gradtrail.attribution import curvature_fit, fit_memory, kept, kronecker_run
from gradtrail.attribution.fit_memory import FitMemory
from gradtrail.kronecker import FIT_FILE
from gradtrail.store import TensorCache
from gradtrail.store import held as cache_module

plan_module = importlib.import_module("gradtrail.attribution.plan")
F64 = torch.float64
METHODS = ["kfac", "ekfac"]
BOUND = {"kfac": KFACAttributor, "ekfac": EKFACAttributor}
RESIDENCIES = [None, "memory", "disk", "tiered"]
BUDGETS = {"kept": None, "passes": 0}  # gradient_budget


class Net(nn.Module):
    """Two layers and a norm; counts its forwards."""

    def __init__(self, dtype=F64):
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(4, 5, dtype=dtype)
        self.norm = nn.LayerNorm(5, dtype=dtype)
        self.second = nn.Linear(5, 3, dtype=dtype)
        self.forwards = 0

    def forward(self, x):
        self.forwards += 1
        return self.second(torch.tanh(self.norm(self.first(x))))


def rows(n, seed=0, shift=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 4, generator=generator, dtype=F64)
    return [(x[row], torch.tensor((row + shift) % 3)) for row in range(n)]


TRAIN, QUERY = rows(9), rows(4, seed=5)


def run(model, train=TRAIN, query=QUERY, **options):
    return attribute(model, train, query, progress=False, **options)


def values(*args, **options):
    return run(*args, **options).values


def close(got, expected, rtol=1e-6):
    scale = float(expected.abs().max()) or 1.0
    torch.testing.assert_close(got, expected, rtol=rtol, atol=rtol * scale)


@pytest.fixture
def spill(tmp_path, monkeypatch):
    """The folder that files of caches are made in."""
    folder = tmp_path / "spill"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def held(monkeypatch):
    """Every cache that is made, held, so that only ``close`` can delete its files."""
    caches = []
    make = TensorCache.__init__

    def note(self, *arguments, **options):
        make(self, *arguments, **options)
        caches.append(self)

    monkeypatch.setattr(TensorCache, "__init__", note)
    return caches


def names_in(folder):
    return sorted(path.name for path in Path(folder).iterdir())


def files(folder):
    return sorted(path.name for path in Path(folder).rglob("*") if path.is_file())


# ---------------------------------------------------------------- residency


@pytest.mark.parametrize("options", [{}, {"damping_sweep": [0.1, 0.5]}, {"query_rank": 2},
                                     {"non_kronecker": "direct"}], ids=str)  # fmt: skip
@pytest.mark.parametrize("budget", BUDGETS.values(), ids=BUDGETS)
@pytest.mark.parametrize("method", METHODS)
def test_every_residency_gives_the_same_scores(method, budget, options, spill, held, monkeypatch):
    monkeypatch.setattr(cache_module, "free_bytes", lambda _: 900)  # tiered: some here, some there
    model, found = Net(), {}
    for residency in RESIDENCIES:
        if residency in (None, "memory"):
            monkeypatch.setattr(cache_module, "free_bytes", lambda _: 1 << 20)
        else:
            monkeypatch.setattr(cache_module, "free_bytes", lambda _: 900)
        got = run(model, method=method, gradient_budget=budget,
                  factor_cache_residency=residency, **options)  # fmt: skip
        found[residency] = got if isinstance(got, dict) else {0: got}
        assert held
        assert names_in(spill) == []
    for residency in RESIDENCIES[1:]:
        for key, result in found[residency].items():
            assert torch.equal(result.values, found[None][key].values)


@pytest.mark.parametrize("residency", RESIDENCIES)
@pytest.mark.parametrize("budget", BUDGETS.values(), ids=BUDGETS)
@pytest.mark.parametrize("method", METHODS)
def test_self_influence_of_every_residency(method, budget, residency, spill, held):
    options = {"method": method, "gradient_budget": budget}
    expected = values(Net(), TRAIN, TRAIN, **options).diagonal()
    got = self_influence(
        Net(), TRAIN, progress=False, factor_cache_residency=residency, batch_size=4, **options
    )
    close(got, expected)
    assert held
    assert names_in(spill) == []


def largest_layer(fit):
    """Bytes of the largest layer's factors."""
    return max(
        sum(fit.tensors.get(key).nbytes for key in record.keys.values())
        for record in fit.records.values()
    )


class Stack(nn.Module):
    """Layers of different width, so that the largest is not most of the whole."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Linear(4, 4, dtype=F64) for _ in range(6)))

    def forward(self, x):
        return self.layers(x)[:, :3]


@pytest.mark.parametrize("what", ["scores", "diagonal", "saved", "ranks"])
@pytest.mark.parametrize("budget", BUDGETS.values(), ids=BUDGETS)
@pytest.mark.parametrize("residency", ["memory", "disk"])
@pytest.mark.parametrize("method", METHODS)
def test_one_layer_at_a_time_is_on_the_device(
    method, residency, budget, what, monkeypatch, tmp_path
):
    """What a cache hands out, as copies to a device, is at most the largest layer at any time.

    On the CPU "memory" and device are one place, so every tensor that leaves the cache is cloned
    here, as a transfer would, and counted for as long as anyone holds it.
    """
    with BOUND[method](Stack(), progress=False) as bound:
        largest = largest_layer(bound.fit(TRAIN))
        total = sum(bound.fit_.tensors.get(n).nbytes for n in bound.fit_.tensors.names())
    assert total > 4 * largest
    alive, peak = [], [0]
    get = TensorCache.get

    def counted(self, name, device=None):
        tensor = get(self, name, device).clone()
        alive.append(weakref.ref(tensor))
        held = [ref() for ref in alive]
        alive[:] = [ref for ref, one in zip(alive, held, strict=True) if one is not None]
        peak[0] = max(peak[0], sum(one.nbytes for one in held if one is not None))
        return tensor

    monkeypatch.setattr(TensorCache, "get", counted)
    options = {"method": method, "gradient_budget": budget, "factor_cache_residency": residency}
    if what == "diagonal":
        self_influence(Stack(), TRAIN, progress=False, **options)
    else:
        if what == "ranks":
            options["query_rank"] = 2
        if what == "saved":
            options["fisher_dir"] = tmp_path / "fit"
        run(Stack(), batch_size=4, **options)
    assert 0 < peak[0] <= largest


class Boom(RuntimeError):
    pass


def failing(model, at):
    """A loss that raises once the model has run so often."""

    def loss(_model, batch):
        if model.forwards >= at:
            raise Boom
        return F.cross_entropy(_model(batch[0]), batch[1], reduction="none")

    return loss


@pytest.mark.parametrize("residency", ["disk", "tiered"])
@pytest.mark.parametrize("method", METHODS)
def test_spilled_files_are_gone_after_an_exception(
    method, residency, spill, held, monkeypatch, tmp_path
):
    monkeypatch.setattr(cache_module, "free_bytes", lambda _: 100)
    folder, whole, seen = tmp_path / "fit", Net(), []
    options = {"method": method, "factor_cache_residency": residency, "gradient_budget": 0,
               "batch_size": 3}  # fmt: skip
    run(whole, **options)
    for at in range(whole.forwards):
        model = Net()
        put = TensorCache.put

        def noted(self, name, tensor, put=put):
            put(self, name, tensor)
            seen.append(len(files(spill)))

        monkeypatch.setattr(TensorCache, "put", noted)
        with pytest.raises(Boom):
            run(model, loss=failing(model, at), fisher_dir=folder, **options)
        monkeypatch.setattr(TensorCache, "put", put)
        assert files(spill) == []
        assert names_in(spill) == []
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
        if not folder.exists() or files(folder) == []:
            continue
        assert files(folder) == [FIT_FILE]  # the fit was done; scoring failed
        assert names_in(folder) == [FIT_FILE]
        (folder / FIT_FILE).unlink()
    assert max(seen) > 0
    assert held


@pytest.mark.parametrize("method", METHODS)
def test_an_attributors_files_go_with_its_fit(method, spill):
    model = Net()
    bound = BOUND[method](model, progress=False)
    options = {"factor_cache_residency": "disk"}
    bound.fit(TRAIN, **options)
    first = files(spill)
    folders = names_in(spill)
    assert first
    assert len(folders) == 1
    bound.attribute(TRAIN, QUERY, **options)
    assert files(spill) == first
    old = bound.fit_
    bound.fit(TRAIN[:7], **options)  # a newer fit replaces it
    assert bound.fit_ is not old
    assert len(names_in(spill)) == 1
    assert names_in(spill) != folders
    with pytest.raises(RuntimeError, match="TensorCache must be open"):
        old.curvature("first")
    held = bound.fit_
    with pytest.raises(Boom):
        BoundFailing(bound).fit(TRAIN[:5], **options)
    assert bound.fit_ is held  # a fit that failed replaces nothing
    assert len(names_in(spill)) == 1
    bound.close()
    assert bound.fit_ is None
    assert names_in(spill) == []
    bound.close()  # twice is fine
    with BOUND[method](model, progress=False) as again:
        again.fit(TRAIN, **options)
        assert files(spill)
    assert names_in(spill) == []
    forgotten = BOUND[method](model, progress=False)
    forgotten.fit(TRAIN, **options)
    del forgotten
    gc.collect()
    assert names_in(spill) == []


class BoundFailing:
    """An attributor whose loss fails for as long as this lasts."""

    def __init__(self, bound):
        self.bound = bound

    def fit(self, train, **options):
        own = self.bound._options["loss"]
        self.bound._options["loss"] = failing(self.bound.model, 0)
        try:
            self.bound.fit(train, **options)
        finally:
            self.bound._options["loss"] = own


# ---------------------------------------------------------------- a folder


@pytest.mark.parametrize("kind", [str, Path])
@pytest.mark.parametrize("method", METHODS)
def test_the_second_fit_runs_no_forward(method, kind, tmp_path):
    folder, model = tmp_path / "deep" / "fit", Net()
    expected = values(Net(), method=method)
    with BOUND[method](model, progress=False) as bound:
        bound.fit(TRAIN, fisher_dir=kind(folder))
        assert model.forwards > 0
    assert names_in(folder) == [FIT_FILE]
    model.forwards = 0
    with BOUND[method](model, progress=False) as bound:
        fit = bound.fit(TRAIN, fisher_dir=kind(folder))
        assert bound.fit(TRAIN, fisher_dir=kind(folder), damping=0.7) is fit
        assert model.forwards == 0
        close(bound.attribute(TRAIN, QUERY, fisher_dir=kind(folder)).values, expected)
    assert names_in(folder) == [FIT_FILE]


@pytest.mark.parametrize("method", METHODS)
def test_scores_from_a_folder_take_no_more_forwards_than_inner_products(method, tmp_path):
    folder = tmp_path / "fit"
    options = {"method": method, "fisher_dir": folder, "batch_size": 3}
    first = values(Net(), **options)
    plain = Net()
    values(plain, method="graddot", layers=["first", "second"], batch_size=3)
    for extra in ({}, {"damping": 0.7}, {"damping_sweep": [0.1, 1.0]}, {"normalize": "both"}):
        model = Net()
        got = run(model, **options, **extra)
        assert model.forwards == plain.forwards  # a probe, the queries, the training data
        if not extra:
            close(got.values, first)
        elif "damping" in extra:
            close(got.values, values(Net(), method=method, damping=0.7))
        elif "normalize" in extra:
            close(got.values, values(Net(), method=method, normalize="both"))
        else:
            close(got[1.0].values, values(Net(), method=method, damping=1.0))
    assert names_in(folder) == [FIT_FILE]


@pytest.mark.parametrize("method", METHODS)
def test_self_influence_from_a_folder(method, tmp_path):
    options = {"method": method, "fisher_dir": tmp_path / "fit"}
    run(Net(), **options)
    model = Net()
    got = self_influence(model, TRAIN, progress=False, **options)
    close(got, values(Net(), TRAIN, TRAIN, method=method).diagonal())
    plain = Net()
    self_influence(plain, TRAIN, progress=False, layers=["first", "second"])
    assert model.forwards == plain.forwards


def other_weights():
    model = Net()
    with torch.no_grad():
        model.first.weight[0, 0] += 1e-3
    return model


def own_loss(model, batch):
    return 2 * F.cross_entropy(model(batch[0]), batch[1], reduction="none")


MISMATCHES = {
    "layers": ({"layers": "first"}, r'layers: \'{"first": "kronecker"}\', got \'{"first": "kron'),
    "excluded": ({"exclude": "first"}, r'layers: \'{"second": "kronecker"}\', got \'{"first"'),
    "data": ({"train": rows(9, seed=1)}, r"train_digest: '[0-9a-f]{32}', got '[0-9a-f]{32}'"),
    "fewer data": ({"train": TRAIN[:8]}, r"train_digest: '[0-9a-f]{32}', got '[0-9a-f]{32}'"),
    "labels": ({"train": rows(9, shift=1)}, r"train_digest: '[0-9a-f]{32}', got '[0-9a-f]{32}'"),
    "weights": ({"model": other_weights}, r"model_digest: '[0-9a-f]{32}', got '[0-9a-f]{32}'"),
    "dtype": ({"model": lambda: Net().float(), "train": [(x.float(), y) for x, y in TRAIN],
               "query": [(x.float(), y) for x, y in QUERY]}, r"(model|train)_digest: "),
    "fisher": ({"fisher": "expected"}, "fisher: 'expected', got 'empirical'"),
    "draws": ({"fisher": "sampled"}, "fisher: 'sampled', got 'empirical'"),
    "projection": ({"projection": 2}, r"projection: '\[\"factored\", 2, 0\]', got 'null'"),
    "direct": ({"non_kronecker": "direct"}, r'layers: .*"norm": "dense".*, got .*'),
    "loss": ({"loss": own_loss}, "loss: 'own_loss \\w+', got 'inferred'"),
}  # fmt: skip


@pytest.mark.parametrize("kind", MISMATCHES)
@pytest.mark.parametrize("method", METHODS)
def test_a_fit_of_something_else_is_refused_with_both_values(method, kind, tmp_path):
    folder = tmp_path / "fit"
    run(Net(), method=method, fisher_dir=folder)
    before = (folder / FIT_FILE).read_bytes()
    options, message = MISMATCHES[kind]
    options = {"model": Net, "train": TRAIN, "query": QUERY, **options}
    model, train, query = (options.pop(name) for name in ("model", "train", "query"))
    with pytest.raises(CurvatureError, match=f"fisher_dir must hold a fit of this {message}"):
        run(model(), train, query, method=method, fisher_dir=folder, **options)
    assert (folder / FIT_FILE).read_bytes() == before
    assert names_in(folder) == [FIT_FILE]


def test_a_fit_of_the_other_method_is_refused(tmp_path):
    run(Net(), method="kfac", fisher_dir=tmp_path)
    with pytest.raises(
        CurvatureError, match="fit of this method: 'ekfac', got 'kfac' in .*Pass an"
    ):
        run(Net(), method="ekfac", fisher_dir=tmp_path)


def test_a_fit_of_other_draws_is_refused(tmp_path):
    options = {"method": "kfac", "fisher_dir": tmp_path, "fisher": "sampled"}
    run(Net(), **options)
    run(Net(), **options)
    with pytest.raises(CurvatureError, match=r"fit of this draws: '\[2, 0, .*', got '\[1, 0, "):
        run(Net(), fisher_draws=2, **options)
    with pytest.raises(CurvatureError, match=r"fit of this draws: '\[1, 7, .*', got '\[1, 0, "):
        run(Net(), seed=7, **options)


def test_what_does_not_define_a_fit_may_differ(tmp_path):
    first = run(Net(), method="ekfac", fisher_dir=tmp_path, batch_size=4)
    for options in ({"batch_size": 2}, {"query": QUERY[:2]}, {"factor_cache_residency": "disk"},
                    {"query_rank": 2}, {"granularity": "token"}, {"collate_fn": None}):  # fmt: skip
        query = options.pop("query", QUERY)
        model = Net()
        got = run(model, TRAIN, query, method="ekfac", fisher_dir=tmp_path, **options)
        if "query_rank" not in options and "granularity" not in options:
            close(got.values, first.values[:, : len(query)])


def test_two_losses_of_one_name_are_two_fits(tmp_path):
    first = lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="none")  # noqa: E731
    second = lambda m, b: m(b[0]).square().sum(1)  # noqa: E731
    options = {"method": "kfac", "fisher_dir": tmp_path}
    run(Net(), loss=first, **options)
    with pytest.raises(CurvatureError, match="fit of this loss"):
        run(Net(), loss=second, **options)


def test_a_limit_that_leaves_the_layers_as_they_are_does_not_define_a_fit(tmp_path):
    first = run(Net(), method="kfac", fisher_dir=tmp_path)
    again = run(Net(), method="kfac", fisher_dir=tmp_path, max_factor_dim=100)
    close(again.values, first.values)


@pytest.mark.parametrize("method", METHODS)
def test_padding_does_not_define_a_fit(method, tmp_path):
    model, train = tiny(), text_rows()
    first = run(model, train, train, method=method, fisher_dir=tmp_path, batch_size=5)
    again = run(model, train, train, method=method, fisher_dir=tmp_path, batch_size=1)
    close(again.values, first.values)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
def test_a_truncated_file_is_refused(share, tmp_path):
    run(Net(), method="ekfac", fisher_dir=tmp_path)
    data = (tmp_path / FIT_FILE).read_bytes()
    (tmp_path / FIT_FILE).write_bytes(data[: int(share * len(data))])
    with pytest.raises(CurvatureError, match="must hold a whole fit, got a damaged .* Delete the"):
        run(Net(), method="ekfac", fisher_dir=tmp_path)
    assert names_in(tmp_path) == [FIT_FILE]


def test_a_changed_byte_is_refused(tmp_path, spill):
    run(Net(), method="ekfac", fisher_dir=tmp_path / "fit")
    path = tmp_path / "fit" / FIT_FILE
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(data)
    with pytest.raises(CurvatureError, match="got a damaged .* is not what was written"):
        run(Net(), method="ekfac", fisher_dir=path.parent, factor_cache_residency="disk")
    assert names_in(spill) == []


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    model = Net()
    with pytest.raises(CurvatureError, match=r"fisher_dir must be empty or hold fit\.safetensors, "
                       r"got .* with notes\.txt\. Pass a folder of its own"):  # fmt: skip
        run(model, method="kfac", fisher_dir=tmp_path)
    assert names_in(tmp_path) == ["notes.txt"]
    with pytest.raises(CurvatureError, match="fisher_dir must be a folder, got the file .*notes"):
        run(model, method="kfac", fisher_dir=tmp_path / "notes.txt")


WRITER = """
    import sys, time
    from pathlib import Path
    sys.path.insert(0, {tests!r})
    from test_kfac_files import Net, run
    from gradtrail.attribution import fit_memory
    folder, name = Path(sys.argv[1]), sys.argv[2]
    save = fit_memory.save_fit
    def wait(*arguments):
        (folder.parent / name).touch()
        stop = time.monotonic() + 60
        while not (folder.parent / "go").exists() and time.monotonic() < stop:
            time.sleep(0.001)
        for _ in range(8):
            save(*arguments)
    fit_memory.save_fit = wait
    got = run(Net(), method="ekfac", fisher_dir=folder)
    sys.stdout.write(repr(got.values.tolist()))
"""


def test_two_processes_that_write_at_once_leave_one_valid_file(tmp_path):
    folder = tmp_path / "fit"
    script = textwrap.dedent(WRITER).format(tests=str(Path(__file__).parent))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(folder), name],
            cwd=Path(__file__).parent.parent,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in ("one", "two")
    ]
    try:
        while not all((tmp_path / name).exists() for name in ("one", "two")):
            assert all(process.poll() is None for process in processes), [
                process.communicate() for process in processes
            ]
        (tmp_path / "go").touch()
        outputs = [process.communicate(timeout=60) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert outputs[0][0] == outputs[1][0]
    assert names_in(folder) == [FIT_FILE]
    model = Net()
    with EKFACAttributor(model, progress=False) as bound:
        bound.fit(TRAIN, fisher_dir=folder)
        assert model.forwards == 0
        close(bound.attribute(TRAIN, QUERY).values, values(Net(), method="ekfac"))


def sampler(model, batch, generator):
    """Labels drawn uniformly."""
    del model
    x, y = batch
    return x, torch.randint(0, 3, y.shape, generator=generator)


def test_a_sampler_means_the_same_in_another_process(tmp_path):
    script = textwrap.dedent("""
        import sys
        sys.path.insert(0, {tests!r})
        from test_kfac_files import Net, run, sampler
        run(Net(), method="kfac", fisher_dir=sys.argv[1], fisher="sampled", label_sampler=sampler)
    """).format(tests=str(Path(__file__).parent))
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        cwd=Path(__file__).parent.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    options = {"method": "kfac", "fisher": "sampled", "label_sampler": sampler}
    got = run(Net(), fisher_dir=tmp_path, **options)
    close(got.values, values(Net(), **options))
    assert got.options["label_sampler"] == "sampler"
    with pytest.raises(CurvatureError, match="fit of this draws"):
        run(Net(), fisher_dir=tmp_path, method="kfac", fisher="sampled")


# ---------------------------------------------------------------- an attributor's memory


@pytest.fixture
def loads(monkeypatch):
    found = []
    load = fit_memory.load_fit

    def note(*arguments):
        found.append(arguments[0])
        return load(*arguments)

    monkeypatch.setattr(fit_memory, "load_fit", note)
    return found


@pytest.mark.parametrize("method", METHODS)
def test_an_unchanged_file_is_not_read_again(method, loads, tmp_path):
    model = Net()
    with BOUND[method](model, progress=False) as bound:
        bound.attribute(TRAIN, QUERY, fisher_dir=tmp_path)  # writes it
        fit = bound.fit_
        bound.attribute(TRAIN, QUERY, fisher_dir=tmp_path, damping=0.5)
        bound.self_influence(TRAIN, fisher_dir=tmp_path)
        assert bound.fit(TRAIN, fisher_dir=tmp_path) is fit
        assert loads == []
    with BOUND[method](model, progress=False) as bound:
        first = bound.attribute(TRAIN, QUERY, fisher_dir=tmp_path)
        bound.attribute(TRAIN, QUERY, fisher_dir=tmp_path)
        assert len(loads) == 1
        other = tmp_path.with_name(tmp_path.name + "-other")
        run(Net(), method=method, fisher_dir=other)
        (other / FIT_FILE).replace(tmp_path / FIT_FILE)  # another writer
        again = bound.attribute(TRAIN, QUERY, fisher_dir=tmp_path)
        assert len(loads) == 2
        assert torch.equal(first.values, again.values)
        (tmp_path / FIT_FILE).unlink()
        model.forwards = 0
        bound.fit(TRAIN, fisher_dir=tmp_path)
        assert model.forwards > 0  # the folder was empty
        assert files(tmp_path) == [FIT_FILE]


@pytest.mark.parametrize("method", METHODS)
def test_a_fit_is_remembered_without_a_folder(method):
    model = Net()
    with BOUND[method](model, progress=False, batch_size=4) as bound:
        first = bound.attribute(TRAIN, QUERY)
        close(first.values, values(Net(), method=method))
        assert first.method == method
        fit, model.forwards = bound.fit_, 0
        assert bound.fit(TRAIN, damping=0.3) is fit
        assert model.forwards == 0
        close(bound.attribute(TRAIN, QUERY, damping=2.0).values,
              values(Net(), method=method, damping=2.0))  # fmt: skip
        assert bound.fit_ is fit
        with torch.no_grad():
            model.first.weight.mul_(1.5)
        got = bound.attribute(TRAIN, QUERY)  # other weights: a new fit
        assert bound.fit_ is not fit
        close(got.values, values(copy.deepcopy(model), method=method))


def test_a_remembered_fit_moves_to_the_residency_that_is_asked_for(spill):
    with KFACAttributor(Net(), progress=False) as bound:
        bound.fit(TRAIN)
        bound.fit(TRAIN, factor_cache_residency="disk")
        assert files(spill)


def test_two_attributors_share_nothing():
    one, two = EKFACAttributor(Net(), progress=False), EKFACAttributor(Net(), progress=False)
    with one, two:
        one.fit(TRAIN)
        assert two.fit_ is None


def test_attributors_check_what_they_are_given():
    bound = KFACAttributor(Net(), progress=False)
    with pytest.raises(
        ValueError, match="train must hold at least one example to fit on, got none"
    ):
        bound.fit([])
    with pytest.raises(ValueError, match=r"options of method 'kfac' must be among .*\['refine'\]"):
        bound.fit(TRAIN, refine="cg")
    with pytest.raises(ValueError, match=r"options of method 'kfac' must be among .*\['memory'\]"):
        bound.attribute(TRAIN, QUERY, memory=FitMemory())
    with pytest.raises(TypeError, match="layer"):
        EKFACAttributor(Net(), layer="first")
    assert bound.fit_ is None
    bound.close()


def test_a_fit_describes_itself():
    with EKFACAttributor(Net(), progress=False) as bound:
        text = str(bound.fit(TRAIN, non_kronecker="direct").describe(0.5))
    assert text.startswith("ekfac fit on 9 examples")
    assert all(name in text for name in ("first", "second", "norm", "corrected", "dense"))


# ---------------------------------------------------------------- kept factors


def test_factors_are_kept_only_where_they_fit(monkeypatch):
    model, held = Net(), []
    make = kept.KeptFactors.__init__

    def note(self, num_rows, budget, **options):
        held.append(budget)
        make(self, num_rows, budget, **options)

    monkeypatch.setattr(kept.KeptFactors, "__init__", note)
    model_of = {}
    for budget in (0, 100, 10**6):
        model = Net()
        run(model, method="ekfac", gradient_budget=budget, batch_size=3)
        model_of[budget] = model.forwards
    assert held == [100, 10**6]
    # a probe, two batches of queries; passes over three batches: fit, eigenvalues, scores
    assert model_of[0] == model_of[100] == model_of[10**6] + 6
    model = Net()
    run(model, method="ekfac", fisher="expected", batch_size=3, gradient_budget=10**6)
    assert held == [100, 10**6]  # gradients of other labels are of no use for the scores


@pytest.mark.parametrize("method", METHODS)
def test_kept_factors_equal_passes(method):
    model, train = tiny(), text_rows((5, 3, 7, 1, 6, 2, 4), seed=2)
    for options in ({}, {"query_rank": 3}, {"normalize": "train"}, {"granularity": "token"}):
        options = {"method": method, "layers": ["mix", "up", "down"], **options}
        found = [
            run(model, train, train[:3], gradient_budget=budget, batch_size=2, **options).values
            for budget in (None, 0)
        ]
        close(*found, rtol=2e-6)


@pytest.mark.parametrize("method", METHODS)
def test_nothing_is_kept_after_the_call(method, monkeypatch):
    made = []
    held_of = kept.KeptFactors._held

    def note(self, tensor):
        found = held_of(self, tensor)
        made.append(weakref.ref(found))
        return found

    monkeypatch.setattr(kept.KeptFactors, "_held", note)
    with BOUND[method](Net(), progress=False) as bound:
        bound.attribute(TRAIN, QUERY)
        bound.self_influence(TRAIN[:5])
        gc.collect()
        assert made
        assert not any(ref() is not None for ref in made)


PASSES = {
    "kept": {},
    "not kept": {"gradient_budget": 0},
    "too much to keep": {"gradient_budget": 500},
    "expected": {"fisher": "expected"},
    "sweep": {"damping_sweep": [0.1, 1.0]},
    "sweep without keeping": {"damping_sweep": [0.1, 1.0], "gradient_budget": 0},
    "chunks": {"gradient_budget": 0, "budget": 300},
    "chunks of a sweep": {"gradient_budget": 0, "budget": 600, "damping_sweep": [0.1, 1.0]},
    "chunks of ranks": {"gradient_budget": 0, "budget": 200, "query_rank": 2},
}


@pytest.mark.parametrize("kind", PASSES)
@pytest.mark.parametrize("method", METHODS)
def test_the_plan_counts_the_passes(method, kind, monkeypatch):
    """Forwards of a run are a probe's, and as many batches as the plan announces."""
    options = dict(PASSES[kind])
    budget = options.pop("budget", 1 << 20)
    monkeypatch.setattr(plan_module, "query_budget", lambda _: budget)
    monkeypatch.setattr(kronecker_run, "query_budget", lambda _: budget)
    train, query = ([(x.float(), y) for x, y in data] for data in (TRAIN, QUERY))
    batches = {"query": 2, "train": 3}
    options = {"method": method, "batch_size": 3, "query_batch_size": 2, **options}
    plain, model = Net(torch.float32), Net(torch.float32)
    run(plain, train, query, method="graddot", batch_size=3, query_batch_size=2)
    announced = plan(Net(torch.float32), train, query, **options)
    run(model, train, query, **options)
    probes = plain.forwards - batches["query"] - batches["train"]
    expected = announced.query_passes * batches["query"]
    expected += announced.train_passes * batches["train"]
    assert model.forwards - probes == expected


# ---------------------------------------------------------------- ensembles


def states(count=3):
    found = []
    for seed in range(count):
        model = Net()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator, dtype=F64)
                parameter.add_(noise, alpha=0.3)
        found.append(model.state_dict())
    return found


def with_state(state):
    model = Net()
    model.load_state_dict(state)
    return model


def averaged(parts, weights=None):
    """Each divided by the standard deviation of all its entries, then averaged."""
    weights = [1.0] * len(parts) if weights is None else weights
    scaled = [w * part / part.std(correction=0) for w, part in zip(weights, parts, strict=True)]
    return sum(scaled) / sum(weights)


@pytest.mark.parametrize("weights", [None, [1.0, 2.0, 0.5]])
@pytest.mark.parametrize("options", [{}, {"normalize": "both"}, {"gradient_budget": 0}], ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_ensembles_are_averages_on_one_scale(method, options, weights):
    points, model = states(), Net()
    parts = [values(with_state(s), method=method, **options).double() for s in points]
    got = run(model, method=method, checkpoints=points, checkpoint_weights=weights, **options)
    close(got.values.double(), averaged(parts, weights))
    assert got.options["checkpoints"] == 3
    single = run(model, method=method, checkpoints=points[:1], **options)
    assert float(single.values.double().std(correction=0)) == pytest.approx(1, rel=1e-6)
    assert all(torch.equal(v, Net().state_dict()[k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize("method", METHODS)
def test_ensembles_of_other_shapes(method):
    points, model = states(), Net()
    sweep = run(model, method=method, checkpoints=points, damping_sweep=[0.1, 1.0])
    for damping, got in sweep.items():
        parts = [values(with_state(s), method=method, damping=damping).double() for s in points]
        close(got.values.double(), averaged(parts))
    diagonals = [
        self_influence(with_state(s), TRAIN, method=method, progress=False).double() for s in points
    ]
    got = self_influence(model, TRAIN, method=method, progress=False, checkpoints=points)
    close(got.double(), averaged(diagonals))


@pytest.mark.parametrize("method", METHODS)
def test_token_shares_of_an_ensemble_add_up(method):
    model, train = tiny(), text_rows()
    points = [tiny(seed=seed).state_dict() for seed in (1, 2)]
    options = {"method": method, "checkpoints": points, "layers": ["mix", "up", "down"]}
    whole = run(model, train, train[:3], **options)
    tokens = run(model, train, train[:3], granularity="token", **options)
    close(tokens.values.sum(1), whole.values, rtol=2e-6)


@pytest.mark.parametrize("method", METHODS)
def test_an_ensemble_keeps_a_fit_each(method, tmp_path):
    points, model = states(2), Net()
    options = {"method": method, "checkpoints": points, "fisher_dir": tmp_path, "batch_size": 9}
    first = run(model, **options)
    assert sorted(names_in(tmp_path)) == ["checkpoint-000", "checkpoint-001"]
    assert files(tmp_path) == [FIT_FILE] * 2
    model.forwards = 0
    close(run(model, **options).values, first.values)
    plain = Net()
    run(plain, method="tracin", checkpoints=points, layers=["first", "second"], batch_size=9)
    assert model.forwards == plain.forwards
    with pytest.raises(CurvatureError, match="fit of this model_digest"):
        run(model, **{**options, "checkpoints": points[::-1]})


@pytest.mark.parametrize("method", METHODS)
def test_an_ensemble_of_an_attributor(method, spill):
    points, model = states(2), Net()
    with BOUND[method](model, progress=False) as bound:
        got = bound.attribute(TRAIN, QUERY, checkpoints=points, factor_cache_residency="disk")
        close(got.values, values(model, method=method, checkpoints=points))
        assert len(names_in(spill)) == 1  # the last checkpoint's fit
    assert names_in(spill) == []


@pytest.mark.parametrize("weights", [[1.0, -1.0], [0.0, 0.0]])
def test_weights_must_have_a_mean(weights):
    with pytest.raises(ValueError, match="checkpoint_weights must add up to more than 0"):
        run(Net(), method="kfac", checkpoints=states(2), checkpoint_weights=weights)


def test_scores_that_are_all_zero_are_not_scaled():
    def none(model, batch):
        return 0 * F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    with pytest.warns(GradTrailWarning, match="have no gradient anywhere"):
        got = run(Net(), method="kfac", checkpoints=states(2), loss=none)
    assert not got.values.any()


def test_the_fit_options_are_those_of_the_pass():
    """The eigenvalue pass draws afresh; the covariance pass's labels are not used again."""
    stages = []
    make = curvature_fit.fisher_loss

    def note(kind, loss, **options):
        stages.append((kind, options["stage"], options["draws"], options["seed"]))
        return make(kind, loss, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(curvature_fit, "fisher_loss", note)
        run(Net(), method="ekfac", fisher="sampled", fisher_draws=2, seed=3)
    assert stages == [("sampled", "covariances", 2, 3), ("sampled", "eigenvalues", 2, 3)]


@pytest.mark.parametrize("method", METHODS)
def test_sampled_labels_are_equal_to_the_bit(method):
    options = {"method": method, "fisher": "sampled", "fisher_draws": 2}
    state = torch.get_rng_state()
    first, second = (values(Net(), **options) for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(first, values(Net(), seed=1, **options))
    close(values(Net(), batch_size=2, **options), first)
