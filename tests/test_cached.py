"""Gradients that are stored while they are captured: equal scores, one pass, nothing lost."""

import copy
import functools
import os
import random
import signal
import tempfile
import time

import pytest
import torch
from interchanging import Mlp, basis_of, call, drawn, seeded
from models import build, pad_left, text_rows, tiny
from storing import Child
from torch import nn

import gradtrail
from gradtrail import Projection, StoreError, attribute, plan, self_influence
from gradtrail.attribution import cached_pass, kronecker_run
from gradtrail.attribution.cached import cache
from gradtrail.attribution.inner_product import InnerProductAttributor
from gradtrail.attribution.stored import attached_covariances
from gradtrail.factors import DenseGradient, GradientBlock, select, to_dense
from gradtrail.interchange import InterchangeQuery, Site
from gradtrail.kronecker import covariances_from
from gradtrail.store import GradientStore

F32 = torch.float32
TRAIN_MARK, QUERY_MARK = 3, 4


def marked(rows, mark):
    """Rows of text whose first token says which side they are of."""
    for row in rows:
        row["input_ids"][0] = mark
    return rows


TEXT = (
    marked(text_rows((5, 3, 7, 2, 6, 4, 5)), TRAIN_MARK),
    marked(text_rows((4, 6, 3), seed=1), QUERY_MARK),
)


def images(count, seed):
    x = torch.randn(count, 2, 6, 6, generator=torch.Generator().manual_seed(seed))
    return [(x[row], torch.tensor(row % 3)) for row in range(count)]


def conv_net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, groups=2),
        nn.GroupNorm(2, 4),
        nn.ReLU(),
        nn.Conv2d(4, 3, 3, stride=2, bias=False),
        nn.Flatten(),
        nn.Linear(12, 3),
    )


# name: (makes the model, train, query)
CASES = {
    "gpt2": (lambda: build("gpt2", F32), *TEXT),
    "llama": (lambda: build("llama", F32), *TEXT),
    "tiny": (lambda: tiny(F32), *TEXT),  # a tied table with padding, a layer norm
    "conv": (conv_net, images(7, 0), images(3, 1)),
}
METHODS = {
    "graddot": {"method": "graddot"},
    "gradcos": {"method": "gradcos"},
    "kfac": {"method": "kfac"},
    "ekfac": {"method": "ekfac"},
    "sweep": {"method": "ekfac", "damping_sweep": [0.1, 1.0]},
    "direct": {"method": "ekfac", "non_kronecker": "direct", "normalize": "train"},
}
PLACES = {
    "memory": ("memory", False),
    "disk": ("disk", False),
    "tiered": ("tiered", False),
    "folder": ("disk", True),
    "tiered folder": ("tiered", True),
}
SIZES = {"batch_size": 3, "query_batch_size": 2, "progress": False}


def place(name, tmp_path):
    residency, stays = PLACES[name]
    options = {"gradient_cache_residency": residency}
    return {**options, "cache_dir": tmp_path / "cache"} if stays else options


def run(case, **options):
    make, train, query = CASES[case]
    return values_of(attribute(make(), train, query, **SIZES, **options))


def values_of(scores):
    if isinstance(scores, dict):
        return torch.cat([part.values for part in scores.values()], 1)
    return scores.values


@functools.cache
def live(case, method, **options):
    return run(case, **METHODS[method], **options)


def assert_close(got, expected, tolerance=1e-5):
    scale = float(expected.abs().max())
    torch.testing.assert_close(got, expected, rtol=0, atol=tolerance * scale)


class Forwards:
    """Counts the forwards of a model, by the side whose rows they run on."""

    def __init__(self, model):
        self.train = self.query = 0
        self.handle = model.register_forward_pre_hook(self.note, with_kwargs=True)

    def note(self, _module, args, kwargs):
        ids = kwargs.get("input_ids", args[0] if args else None)
        self.train += bool((ids[:, 0] == TRAIN_MARK).any())
        self.query += bool((ids[:, 0] == QUERY_MARK).any())

    def take(self):
        found, self.train, self.query = (self.train, self.query), 0, 0
        return found


# ---------------------------------------------------------------- equal scores


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("method", ["graddot", "ekfac"])
@pytest.mark.parametrize("case", CASES)
def test_scores_are_the_live_ones_wherever_gradients_are_kept(case, method, where, tmp_path):
    expected = live(case, method)
    for _ in range(2 if PLACES[where][1] else 1):  # captured, then read
        got = run(case, **METHODS[method], **place(where, tmp_path))
        if method == "graddot":
            assert torch.equal(got, expected)
        assert_close(got, expected)


@pytest.mark.parametrize("method", [name for name in METHODS if name not in ("graddot", "ekfac")])
@pytest.mark.parametrize("case", CASES)
def test_scores_of_every_method_are_the_live_ones(case, method, tmp_path):
    expected = live(case, method)
    for _ in range(2):
        assert_close(run(case, **METHODS[method], **place("folder", tmp_path)), expected)
    assert_close(run(case, **METHODS[method], **place("disk", tmp_path)), expected)


@pytest.mark.parametrize("capture", ["materialized", "auto"])
@pytest.mark.parametrize("method", ["graddot", "kfac", "ekfac", "direct"])
@pytest.mark.parametrize("case", CASES)
def test_written_out_gradients_score_the_same(case, method, capture, tmp_path):
    expected = live(case, method)
    for _ in range(2):
        options = {**METHODS[method], **place("folder", tmp_path), "capture": capture}
        assert_close(run(case, **options), expected)
    store = GradientStore(tmp_path / "cache" / "train", mode="read")
    dense = {
        name: isinstance(gradient, DenseGradient)
        for name, gradient in next(iter(store.blocks())).block.layers.items()
    }
    assert any(dense.values()) or (capture == "auto" and method != "graddot")
    assert capture == "auto" or all(dense.values())
    assert (attached_covariances(store) is not None) == (method != "graddot")


PROJECTIONS = {
    "factored": Projection(kind="factored", dim=4),
    "dense": Projection(kind="dense", dim=20),
    "mask": Projection(kind="mask", dim=20),
}


@pytest.mark.parametrize("kind", PROJECTIONS)
@pytest.mark.parametrize("case", ["gpt2", "conv"])
def test_projected_gradients_score_the_same(case, kind, tmp_path):
    projection = {"projection": PROJECTIONS[kind]}
    expected = live(case, "graddot", **projection)
    for _ in range(2):
        got = run(case, **projection, **place("folder", tmp_path))
        assert torch.equal(got, expected)


def test_projected_factors_are_fitted_from_the_store(tmp_path):
    options = {**METHODS["ekfac"], "projection": 4}
    expected = run("gpt2", **options)
    for _ in range(2):
        assert_close(run("gpt2", **options, **place("folder", tmp_path)), expected)


def test_trak_scores_the_same(tmp_path):
    options = {"method": "trak", "projection": PROJECTIONS["dense"]}
    expected = run("gpt2", **options)
    for where in ("memory", "folder", "folder"):
        assert_close(run("gpt2", **options, **place(where, tmp_path)), expected)


def trained():
    """A model and the optimizer that trained it for a few steps."""
    make, train, _ = CASES["conv"]
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for x, y in train:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[None]), y[None]).backward()
        optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def test_less_scores_the_same(tmp_path):
    model, optimizer = trained()
    options = {"method": "less", "optimizer_states": [optimizer], **SIZES}
    expected = attribute(model, *CASES["conv"][1:], **options).values
    for where in ("memory", "folder", "folder"):
        got = attribute(model, *CASES["conv"][1:], **options, **place(where, tmp_path)).values
        assert_close(got, expected)


class Unprojected(InnerProductAttributor):
    """Reads gradients before they are projected."""

    def score(self, session, task):
        session.projection = None
        return super().score(session, task)


def test_a_method_that_reads_other_gradients_than_are_stored_is_refused():
    options = {"projection": 4, "gradient_cache_residency": "memory", **SIZES}
    with pytest.raises(ValueError, match=r"projection must be None .*, got Projection\(kind="):
        attribute(conv_net(), *CASES["conv"][1:], method=Unprojected(), **options)


@pytest.mark.parametrize("method", ["graddot", "ekfac"])
@pytest.mark.parametrize("case", ["gpt2", "llama", "tiny"])
def test_shares_of_positions_are_the_live_ones(case, method, tmp_path):
    options = {**METHODS[method], "granularity": "token"}
    expected = run(case, **options)
    for _ in range(2):
        got = run(case, **options, **place("folder", tmp_path))
        assert got.shape == expected.shape
        assert_close(got, expected)


def test_positions_of_rows_padded_in_front(tmp_path):
    model, (train, query) = tiny(F32), TEXT
    options = {"granularity": "token", "collate_fn": pad_left, **SIZES}
    expected = attribute(model, train, query, **options)
    for _ in range(2):
        got = attribute(model, train, query, **options, **place("folder", tmp_path))
        assert torch.equal(got.values, expected.values)
        assert torch.equal(got.lengths, expected.lengths)


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 2e-2), ("float16", 2e-3)])
@pytest.mark.parametrize("method", ["graddot", "ekfac"])
def test_narrow_gradients_score_alike_captured_or_read(method, dtype, tolerance, tmp_path):
    expected = live("gpt2", method)
    options = {**METHODS[method], "cache_dtype": dtype}
    first = run("gpt2", **options, **place("folder", tmp_path))
    assert_close(first, expected, tolerance)
    again = run("gpt2", **options, **place("folder", tmp_path))
    assert_close(again, first, 1e-6)
    store = GradientStore(tmp_path / "cache" / "train", mode="read")
    assert str(store.dtype).endswith(dtype)


def test_float16_names_the_layer_it_cannot_hold():
    make, train, query = CASES["conv"]
    train = [(1e5 * x, y) for x, y in train]
    options = {"cache_dtype": "float16", "gradient_cache_residency": "memory"}
    with pytest.raises(OverflowError, match=r"must be at most 65504, got .* at \d.*bfloat16"):
        attribute(make(), train, query, **SIZES, **options)


@pytest.mark.parametrize("method", ["graddot", "kfac", "ekfac"])
@pytest.mark.parametrize("where", ["memory", "folder"])
def test_self_influence_is_the_live_one(method, where, tmp_path):
    make, train, _ = CASES["gpt2"]
    model, sizes = make(), {"batch_size": 3, "progress": False}
    expected = self_influence(model, train, method=method, **sizes)
    counts = Forwards(model)
    for _ in range(2 if where == "folder" else 1):
        got = self_influence(model, train, method=method, **sizes, **place(where, tmp_path))
        assert_close(got, expected)
    self_influence(model, train, method="graddot", **sizes)
    (once, _), probe_and_pass = counts.take(), 3
    assert once >= probe_and_pass


# ---------------------------------------------------------------- one pass of the model


def plain_forwards(**options):
    model = CASES["gpt2"][0]()
    counts = Forwards(model)
    attribute(model, *TEXT, **SIZES, **options)
    return counts.take()


MANY_PASSES = {
    "ekfac": {},
    "sweep": {"damping_sweep": [0.1, 1.0]},
    "chunks": {"budget": 4000},
    "written out": {"capture": "materialized"},
}


@pytest.mark.parametrize("kind", MANY_PASSES)
def test_the_model_passes_over_train_once_and_never_again(kind, tmp_path, monkeypatch):
    options = dict(MANY_PASSES[kind])
    budget = options.pop("budget", None)
    if budget:
        monkeypatch.setattr(kronecker_run, "query_budget", lambda _: budget)
    model = CASES["gpt2"][0]()
    counts = Forwards(model)
    options |= {"method": "ekfac", **place("folder", tmp_path)}
    first = attribute(model, *TEXT, **SIZES, **options)
    assert counts.take() == plain_forwards(method="ekfac")  # a probe and a pass over each side
    again = attribute(model, *TEXT, **SIZES, **options)
    train, query = counts.take()
    assert train == 0
    assert query > 0
    assert_close(values_of(again), values_of(first))


def test_without_a_cache_there_are_more_passes():
    """The test above proves something: the fit, the eigenvalues and the scores are a pass each."""
    many = plain_forwards(method="ekfac", gradient_budget=0)
    assert many[0] - plain_forwards(method="ekfac")[0] == 2 * 3


def test_self_influence_of_a_whole_store_runs_nothing(tmp_path):
    model = CASES["gpt2"][0]()
    options = {"method": "ekfac", "batch_size": 3, "progress": False, **place("folder", tmp_path)}
    self_influence(model, TEXT[0], **options)
    counts = Forwards(model)
    self_influence(model, TEXT[0], **options)
    assert counts.take() == (0, 0)


@pytest.mark.parametrize("kind", ["expected", "sampled"])
def test_other_labels_run_the_model_and_scoring_passes_are_kept(kind, tmp_path):
    make, train, query = CASES["conv"]
    model, forwards = make(), []
    model.register_forward_pre_hook(lambda _, args: forwards.append(len(args[0])))
    options = {**SIZES, "method": "ekfac", "fisher": kind}
    expected = attribute(model, train, query, **options).values
    live_count = len(forwards)
    for number in range(2):
        forwards.clear()
        got = attribute(model, train, query, **options, **place("folder", tmp_path)).values
        assert_close(got, expected)
        assert len(forwards) == live_count - 3 * number  # its scoring pass is read


def test_refinement_runs_its_own_passes(tmp_path):
    make, train, query = CASES["conv"]
    options = {**SIZES, "method": "ekfac", "refine": "cg", "damping": 10.0}
    expected = attribute(make(), train, query, **options).values
    for _ in range(2):
        got = attribute(make(), train, query, **options, **place("folder", tmp_path)).values
        assert_close(got, expected, 1e-3)


def test_a_persisted_fit_leaves_the_scoring_pass(tmp_path):
    model = CASES["gpt2"][0]()
    fit = {"method": "ekfac", "fisher_dir": tmp_path / "fit"}
    expected = attribute(model, *TEXT, **SIZES, **fit)
    counts = Forwards(model)
    for number in range(2):
        got = attribute(model, *TEXT, **SIZES, **fit, **place("folder", tmp_path))
        assert_close(got.values, expected.values)
        assert (counts.take()[0] == 0) == bool(number)


def test_no_factors_are_kept_beside_a_store(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError

    monkeypatch.setattr(kronecker_run, "KeptFactors", refuse)
    run("gpt2", **METHODS["ekfac"], gradient_cache_residency="disk")
    with pytest.raises(AssertionError):
        run("gpt2", **METHODS["ekfac"])


# ---------------------------------------------------------------- results say the same


def test_a_result_says_the_same_of_its_data(tmp_path):
    model = CASES["gpt2"][0]()
    expected = attribute(model, *TEXT, **SIZES)
    for options in (place("memory", tmp_path), *2 * [place("folder", tmp_path)]):
        got = attribute(model, *TEXT, **SIZES, **options)
        assert got.options == expected.options
        assert got.coverage == expected.coverage
        assert got.train_ids == expected.train_ids


def test_another_batch_size_reads_the_same_store(tmp_path):
    model = CASES["gpt2"][0]()
    options = {"method": "ekfac", "progress": False, **place("folder", tmp_path)}
    first = attribute(model, *TEXT, batch_size=2, **options)
    steps = GradientStore(tmp_path / "cache" / "train", mode="read").steps
    again = attribute(model, *TEXT, batch_size=5, **options)
    assert_close(again.values, first.values)
    assert GradientStore(tmp_path / "cache" / "train", mode="read").steps == steps


def test_checkpoints_have_a_folder_each(tmp_path):
    model = CASES["gpt2"][0]()
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.1)
    states = [model.state_dict(), other.state_dict()]
    for method in ("tracin", "ekfac"):
        options = {"method": method, "checkpoints": states, **SIZES}
        expected = attribute(model, *TEXT, **options)
        folder = tmp_path / method
        counts = Forwards(model)
        for number in range(2):
            got = attribute(
                model, *TEXT, **options, gradient_cache_residency="disk", cache_dir=folder
            )
            assert_close(got.values, expected.values)
            assert (counts.take()[0] == 0) == bool(number)
        counts.handle.remove()
        assert sorted(path.name for path in folder.iterdir()) == [
            "checkpoint-000",
            "checkpoint-001",
        ]


def pairs_of(model, **options):
    base, source = (drawn(5, 4, seed=seed) for seed in (1, 2))
    return InterchangeQuery(
        model, Site("second"), basis_of(6), base, source, drawn(5, seed=3, high=3), call, **options
    )


SOURCE_TRAIN = [(drawn(4, seed=10 + row), torch.tensor(row % 3)) for row in range(7)]


@pytest.mark.parametrize("granularity", ["pair", "mean"])
@pytest.mark.parametrize("method", ["graddot", "ekfac"])
def test_a_source_of_queries_runs_live(method, granularity, tmp_path):
    model = seeded(Mlp)
    query = pairs_of(model, granularity=granularity)
    expected = attribute(model, SOURCE_TRAIN, query, method=method, **SIZES)
    for _ in range(2):
        got = attribute(
            model, SOURCE_TRAIN, query, method=method, **SIZES, **place("folder", tmp_path)
        )
        assert_close(got.values, expected.values)
        assert got.options == expected.options


@pytest.mark.parametrize("granularity", ["pair", "mean"])
def test_a_source_of_queries_is_stored(granularity, tmp_path):
    model = seeded(Mlp)
    query = pairs_of(model, granularity=granularity)
    expected = attribute(model, SOURCE_TRAIN, query, **SIZES)
    for _ in range(2):
        found = cache(model, SOURCE_TRAIN, query, cache_dir=tmp_path, **SIZES)
        train, queries = stored(found.train), stored(found.query)
        dots = sum(train[name] @ queries[name].t() for name in train)
        assert_close(dots.float(), expected.values)
    other = pairs_of(model, granularity=granularity, strength=0.5)
    with pytest.raises(StoreError, match="data_digest"):
        cache(model, SOURCE_TRAIN, other, cache_dir=tmp_path, **SIZES)


# ---------------------------------------------------------------- what is refused


def scale(model, factor=1.5):
    with torch.no_grad():
        next(model.parameters()).mul_(factor)


def own_loss(model, batch):
    logits = model(**{k: v for k, v in batch.items() if k != "labels"}).logits
    return logits.flatten(1).square().sum(1)


OTHERS = {
    "weights": ("checkpoint_digest", {}),
    "data": ("data_digest", {}),
    "order of the data": ("data_digest", {}),
    "fewer rows": ("data_digest", {}),
    "loss": ("loss", {"loss": own_loss}),
    "projection": ("projection", {"projection": 4}),
    "layers": ("chosen_layers 1.* layers .*, and ", {"layers": "*mlp*"}),
    "method": ("chosen_layers", {"method": "ekfac"}),
    "capture": ("capture 'factored', and 'auto'", {"capture": "auto"}),
    "dtype": ("dtype None, and 'bfloat16'", {"cache_dtype": "bfloat16"}),
}


@pytest.mark.parametrize("what", OTHERS)
def test_a_cache_of_another_call_is_refused(what, tmp_path):
    field, options = OTHERS[what]
    model, train = CASES["gpt2"][0](), list(TEXT[0])
    options = {**SIZES, **options}
    kept = place("folder", tmp_path)
    expected = attribute(model, train, TEXT[1], **SIZES, **kept)
    if what == "weights":
        scale(model)
    elif what == "data":
        train[4] = text_rows((6,), seed=9)[0]
    elif what == "order of the data":
        train = train[::-1]
    elif what == "fewer rows":
        train = train[:-1]
    with pytest.raises(StoreError, match=rf"cache_dir must hold gradients of this call.*{field}"):
        attribute(model, train, TEXT[1], **{**kept, **options})
    if what == "weights":
        scale(model, 1 / 1.5)
    again = attribute(CASES["gpt2"][0](), TEXT[0], TEXT[1], **SIZES, **kept)
    assert torch.equal(again.values, expected.values)  # what lies there is as it was


def test_another_seed_of_a_projection_is_refused(tmp_path):
    kept = {**place("folder", tmp_path), "projection": 4}
    run("gpt2", **kept, seed=1)
    with pytest.raises(StoreError, match=r"projection .*'seed': 1.*'seed': 2"):
        run("gpt2", **kept, seed=2)


def test_rows_that_a_store_lacks_are_captured(tmp_path):
    kept = place("folder", tmp_path)
    expected = run("gpt2", **kept)
    with GradientStore(tmp_path / "cache" / "train", mode="resume") as store:
        store.discard(store.steps[0])
        assert len(store) == 4
    assert torch.equal(run("gpt2", **kept), expected)
    with GradientStore(tmp_path / "cache" / "train", mode="read") as store:
        assert store.ids == tuple(range(7))


def test_a_store_with_other_rows_is_refused(tmp_path):
    kept = place("folder", tmp_path)
    run("gpt2", **kept)
    with GradientStore(tmp_path / "cache" / "train", mode="resume") as store:
        first = next(iter(store.blocks())).block
        layers = {name: select(first.layers[name], slice(0, 1)) for name in first.layers}
        store.append(GradientBlock(99, (8,), layers))
    with pytest.raises(StoreError, match=r"must hold rows of 7, each once, got 8 other examples"):
        run("gpt2", **kept)


def test_a_folder_with_something_else_is_refused(tmp_path):
    (tmp_path / "cache" / "train").mkdir(parents=True)
    (tmp_path / "cache" / "train" / "notes.txt").write_text("mine")
    with pytest.raises(StoreError, match="notes.txt"):
        run("gpt2", **place("folder", tmp_path))


IDLE = {
    "folder without residency": ({"cache_dir": "x"}, r"cache_dir must go with gradient_cache_res"),
    "capture without residency": ({"capture": "auto"}, r"capture must go with gradient_cache_res"),
    "dtype without residency": ({"cache_dtype": "float16"}, r"cache_dtype must go with"),
    "folder in memory": (
        {"gradient_cache_residency": "memory", "cache_dir": "x"},
        r"cache_dir must go with gradient_cache_residency='disk' or 'tiered', got 'x'",
    ),
    "positions written out": (
        {
            "gradient_cache_residency": "disk",
            "capture": "materialized",
            "granularity": "token",
        },
        r"capture must be 'factored' with granularity='token', got 'materialized'",
    ),
    "budget": (
        {"gradient_cache_residency": "disk", "method": "kfac", "gradient_budget": 0},
        r"gradient_budget must be None with gradient_cache_residency, got 0",
    ),
    "residency": (
        {"gradient_cache_residency": "device"},
        r"gradient_cache_residency must be one of None, 'memory', 'disk', 'tiered', got 'device'",
    ),
    "form": (
        {"gradient_cache_residency": "disk", "capture": "dense"},
        r"capture must be one of 'factored', 'materialized', 'auto', got 'dense'",
    ),
    "dtype": (
        {"gradient_cache_residency": "disk", "cache_dtype": "float64"},
        r"cache_dtype must be one of 'float32', 'bfloat16', 'float16', got 'float64'",
    ),
}


@pytest.mark.parametrize("call", [attribute, plan], ids=["attribute", "plan"])
@pytest.mark.parametrize("what", IDLE)
def test_options_without_effect_are_refused(what, call):
    options, message = IDLE[what]
    with pytest.raises(ValueError, match=message):
        call(conv_net(), images(3, 0), images(2, 1), **options)


# ---------------------------------------------------------------- left as it was found


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """Where temporary folders are made."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


class Stops(nn.Module):
    """A model that raises in one of its forwards."""

    def __init__(self, model, at, error):
        super().__init__()
        self.model = model
        self.left = at
        self.error = error

    def forward(self, x):
        self.left -= 1
        if not self.left:
            raise self.error
        return self.model(x)


@pytest.mark.parametrize("where", ["disk", "tiered"])
@pytest.mark.parametrize("error", [None, RuntimeError("mine"), KeyboardInterrupt()], ids=repr)
def test_a_temporary_store_is_removed(where, error, temporary):
    model = Stops(conv_net(), 6, error) if error else conv_net()
    options = {**SIZES, "method": "ekfac", "gradient_cache_residency": where}
    with pytest.raises(type(error)) if error else open(os.devnull):  # noqa: PTH123, SIM115
        attribute(model, images(7, 0), images(3, 1), **options)
    assert not list(temporary.iterdir())


@pytest.mark.parametrize("error", [RuntimeError("mine"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("at", range(4, 9))
def test_what_was_captured_before_an_error_is_used(at, error, tmp_path):
    kept = place("folder", tmp_path)
    options = {**SIZES, "method": "ekfac"}
    expected = attribute(Stops(conv_net(), 0, None), images(7, 0), images(3, 1), **options)
    with pytest.raises(type(error)):
        attribute(
            Stops(conv_net(), at, error),
            images(7, 0),
            images(3, 1),
            **{**options, "batch_size": 2},  # the call that goes on may have other batches
            **kept,
        )
    got = attribute(Stops(conv_net(), 0, None), images(7, 0), images(3, 1), **options, **kept)
    assert_close(got.values, expected.values)
    assert GradientStore(tmp_path / "cache" / "train", mode="read").ids == tuple(range(7))


def test_model_and_random_state_are_as_found(tmp_path):
    model = CASES["gpt2"][0]()
    before = copy.deepcopy(model.state_dict())
    flags = [parameter.requires_grad for parameter in model.parameters()]
    for where in ("memory", "folder", "folder"):
        state = torch.get_rng_state()
        attribute(model, *TEXT, **SIZES, method="ekfac", **place(where, tmp_path))
        assert torch.equal(torch.get_rng_state(), state)
        assert model.training
        assert flags == [parameter.requires_grad for parameter in model.parameters()]
        assert all(parameter.grad is None for parameter in model.parameters())
        assert not any(module._forward_hooks for module in model.modules())
        assert all(
            torch.equal(a, b)
            for a, b in zip(before.values(), model.state_dict().values(), strict=True)
        )


def test_data_without_rows(tmp_path):
    for number, (train, query) in enumerate((([], images(2, 1)), (images(2, 0), []), ([], []))):
        for method in ("graddot", "ekfac"):
            kept = {"gradient_cache_residency": "disk", "cache_dir": tmp_path / f"{number}{method}"}
            for _ in range(2):
                got = attribute(conv_net(), train, query, **SIZES, method=method, **kept)
                assert got.values.shape == (len(train), len(query))


def test_two_calls_may_read_a_whole_store_at_once(tmp_path):
    kept = place("folder", tmp_path)
    expected = run("conv", **kept)
    with GradientStore(tmp_path / "cache" / "train", mode="read"):
        assert torch.equal(run("conv", **kept), expected)


# ---------------------------------------------------------------- cache


def cached(case, tmp_path, **options):
    make, train, query = CASES[case]
    return cache(make(), train, query, cache_dir=tmp_path / "both", **SIZES, **options)


def stored(store):
    """Every layer of every block, written out."""
    found = {}
    for one in store.blocks():
        for name, gradient in one.block.layers.items():
            found.setdefault(name, []).append(to_dense(gradient).values_bd)
    return {name: torch.cat(parts) for name, parts in found.items()}


@pytest.mark.parametrize("case", CASES)
def test_cache_stores_both_sides_once(case, tmp_path):
    found = cached(case, tmp_path)
    train, query = stored(found.train), stored(found.query)
    dots = sum(train[name] @ query[name].t() for name in train)
    assert_close(dots, live(case, "graddot"))
    assert found.train.ids == tuple(range(7))
    assert found.query.ids == tuple(range(3))
    assert found.train.facts.id_scheme == "index"
    assert found.train.facts.extra["num_rows"] == "7"
    assert attached_covariances(found.train) is None
    assert {path.name for path in (tmp_path / "both").iterdir()} == {"train", "query"}


def test_attribute_reads_what_cache_stored(tmp_path):
    cached("gpt2", tmp_path)
    model = CASES["gpt2"][0]()
    counts = Forwards(model)
    got = attribute(
        model, *TEXT, **SIZES, gradient_cache_residency="disk", cache_dir=tmp_path / "both"
    )
    assert counts.take()[0] == 0
    assert torch.equal(got.values, live("gpt2", "graddot"))


@pytest.mark.parametrize("capture", ["factored", "materialized", "auto"])
@pytest.mark.parametrize("projection", [None, 4], ids=["whole", "projected"])
def test_covariances_are_kept_beside_the_gradients(capture, projection, tmp_path):
    make, train, query = CASES["gpt2"]
    options = {"method": "ekfac", "projection": projection, **SIZES}
    found = cache(make(), train, query, cache_dir=tmp_path, capture=capture, **options)
    expected = gradtrail.KFACAttributor(
        make(), projection=projection, batch_size=3, progress=False
    ).fit(train)
    covariances = covariances_from(*attached_covariances(found.train))
    assert set(covariances) == set(expected.records)
    for name, factors in covariances.items():
        keys = expected.records[name].keys
        assert_close(factors.activation_cov_gii, expected.tensors.get(keys["activation_cov"]))
        assert_close(factors.gradient_cov_goo, expected.tensors.get(keys["gradient_cov"]))
    off = cache(
        make(),
        train,
        cache_dir=tmp_path / "off",
        covariances=False,
        **{**options, "query_batch_size": None},
    )
    assert attached_covariances(off.train) is None
    assert off.query is None


def test_a_whole_cache_runs_nothing(tmp_path):
    model = CASES["gpt2"][0]()
    counts = Forwards(model)
    options = {"cache_dir": tmp_path, "method": "ekfac", **SIZES}
    cache(model, *TEXT, **options)
    assert counts.take() == plain_forwards(method="ekfac")
    cache(model, *TEXT, **options)
    assert counts.take() == (0, 0)
    (tmp_path / "query").rename(tmp_path / "old")
    cache(model, *TEXT, **options)
    train, query = counts.take()
    assert train == 0
    assert query > 0


@pytest.mark.parametrize("capture", ["factored", "materialized"])
def test_lost_covariances_are_made_again(capture, tmp_path):
    model = CASES["gpt2"][0]()
    options = {"cache_dir": tmp_path, "method": "kfac", "capture": capture, **SIZES}
    first = cache(model, *TEXT, **options)
    expected = covariances_from(*attached_covariances(first.train))
    cache(model, *TEXT, **{**options, "cache_dir": tmp_path / "plain"}, covariances=False)
    counts = Forwards(model)
    again = cache(model, *TEXT, **{**options, "cache_dir": tmp_path / "plain"})
    assert (counts.take()[0] == 0) == (capture == "factored")
    got = covariances_from(*attached_covariances(again.train))
    for name, factors in expected.items():
        assert_close(got[name].activation_cov_gii, factors.activation_cov_gii)
        assert_close(got[name].gradient_cov_goo, factors.gradient_cov_goo)
    assert again.train.ids == first.train.ids


def test_queries_with_a_loss_of_their_own(tmp_path):
    make, train, query = CASES["gpt2"]
    options = {"query_loss": own_loss, **SIZES}
    expected = attribute(make(), train, query, **options)
    found = cache(make(), train, query, cache_dir=tmp_path, **options)
    train, query = stored(found.train), stored(found.query)
    assert_close(sum(train[name] @ query[name].t() for name in train), expected.values)
    assert found.query.facts.loss.startswith("own_loss")
    assert found.train.facts.loss == "inferred"


CACHE_ERRORS = {
    "query_loss": ({"query_loss": own_loss}, r"query_loss must go with query, got query=None"),
    "query_batch_size": ({"query_batch_size": 2}, r"query_batch_size must go with query"),
    "covariances": ({"covariances": True}, r"covariances=True must go with .*, got 'graddot'"),
    "dtype": ({"dtype": "int8"}, r"dtype must be one of 'float32', 'bfloat16', 'float16'"),
    "capture": ({"capture": "all"}, r"capture must be one of"),
}


@pytest.mark.parametrize("what", CACHE_ERRORS)
def test_cache_refuses_options_without_effect(what, tmp_path):
    options, message = CACHE_ERRORS[what]
    with pytest.raises(ValueError, match=message):
        cache(conv_net(), images(2, 0), cache_dir=tmp_path, **options)
    assert not list(tmp_path.iterdir())


def test_cache_refuses_other_queries(tmp_path):
    cached("conv", tmp_path)
    make, train, _ = CASES["conv"]
    with pytest.raises(StoreError, match=r"query.* with other data: data_digest"):
        cache(make(), train, images(3, 8), cache_dir=tmp_path / "both", **SIZES)


# ---------------------------------------------------------------- kills

WORK = {
    "attribute": ({"method": "ekfac"}, False),
    "attribute written out": ({"method": "ekfac", "capture": "materialized"}, False),
    "cache": ({"method": "ekfac"}, True),
    "cache written out": ({"method": "ekfac", "capture": "auto"}, True),
}


def work(kind, folder, model):
    """One call that can be resumed; its scores, or the gradients it stored."""
    options, caches = WORK[kind]
    _, train, query = CASES["conv"]
    if not caches:
        kept = {"gradient_cache_residency": "disk", "cache_dir": folder}
        return attribute(model, train, query, **SIZES, **options, **kept).values
    found = cache(model, train, query, cache_dir=folder, **SIZES, **options)
    factors = covariances_from(*attached_covariances(found.train))
    sums = {f"{name} A": one.activation_cov_gii for name, one in factors.items()}
    sums |= {f"{name} S": one.gradient_cov_goo for name, one in factors.items()}
    return {**stored(found.train), **sums, **{f"q {k}": v for k, v in stored(found.query).items()}}


def dies_at(say, kind, folder, at):
    """Run in a child; every batch is journalled at once, and the n-th forward is its last."""
    torch.set_num_threads(1)
    cached_pass._FLUSH_SECONDS = 0.0

    class Dies(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.left = conv_net(), at

        def forward(self, x):
            self.left -= 1
            if not self.left:
                os.kill(os.getpid(), signal.SIGKILL)
            return self.net(x)

    work(kind, folder, Dies())
    say("whole")


def goes_on(say, kind, folder):
    torch.set_num_threads(1)
    cached_pass._FLUSH_SECONDS = 0.0
    say("begins")
    work(kind, folder, Wrapped())
    say("whole")


class Wrapped(nn.Module):
    """The same model as the one that dies, with the same names."""

    def __init__(self):
        super().__init__()
        self.net, self.forwards = conv_net(), 0

    def forward(self, x):
        self.forwards += 1
        return self.net(x)


def assert_same(got, expected):
    if isinstance(expected, dict):
        assert set(got) == set(expected)
        for name, value in expected.items():
            assert_close(got[name], value)
        return
    assert_close(got, expected)


def check_resumed(kind, folder, expected):
    """What a kill left behind leads to the same, with nothing twice."""
    model = Wrapped()
    assert_same(work(kind, folder, model), expected)
    for side, count in (("train", 7), ("query", 3 if WORK[kind][1] else 0)):
        if count:
            store = GradientStore(folder / side, mode="read")
            assert store.ids == tuple(range(count))
            store.verify()
            store.close()
    return model.forwards


def killed_in_forwards(kind, tmp_path, choose):
    """Kill a call in some of its forwards; the forwards that the next call needed."""
    expected = work(kind, tmp_path / "whole", whole := Wrapped())
    resumed = []
    for at in choose(range(1, whole.forwards + 1)):
        folder = tmp_path / str(at)
        assert Child(dies_at, kind, folder, at).end() == -signal.SIGKILL
        resumed.append(check_resumed(kind, folder, expected))
    return resumed


@pytest.mark.parametrize("kind", WORK)
def test_killed_in_a_forward(kind, tmp_path):
    resumed = killed_in_forwards(kind, tmp_path, lambda forwards: (forwards[0], forwards[-2]))
    if WORK[kind][0].get("capture") is None:  # factors that were stored are not run again
        assert resumed[1] < resumed[0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", WORK)
def test_killed_in_any_forward(kind, tmp_path):
    killed_in_forwards(kind, tmp_path, lambda forwards: forwards)


@pytest.mark.slow
@pytest.mark.parametrize("kind", WORK)
def test_killed_at_random_instants(kind, tmp_path):
    expected = work(kind, tmp_path / "whole", Wrapped())
    draw = random.Random(kind)
    killed = 0
    for number in range(12):
        folder = tmp_path / str(number)
        while True:  # until it gets through
            child = Child(goes_on, kind, folder)
            child.hear()
            time.sleep(draw.uniform(0, 0.2))
            if child.kill() == 0:
                break
            killed += 1
            if draw.random() < 0.4:
                break
        check_resumed(kind, folder, expected)
    assert killed > 3


# ---------------------------------------------------------------- plan


def test_the_plan_says_what_a_store_takes(tmp_path):
    model = CASES["gpt2"][0]()
    rows = text_rows((6,) * 8)
    for capture in ("factored", "materialized", "auto"):
        for dtype in (None, "bfloat16"):
            options = {
                "gradient_cache_residency": "disk",
                "cache_dir": tmp_path / f"{capture}{dtype}",
                "capture": capture,
                "cache_dtype": dtype,
                "batch_size": 4,
            }
            planned = plan(model, rows, TEXT[1], **options)
            attribute(model, rows, TEXT[1], progress=False, **options)
            store = GradientStore(options["cache_dir"] / "train", mode="read")
            assert planned.store_bytes == store.nbytes
            assert planned.disk_bytes == store.nbytes
            assert planned.host_bytes == 4 * 8 * 3 + store.nbytes  # what waits to be written
            assert planned.store_on == "disk"
            first = next(iter(store.blocks())).block.layers
            assert planned.forms == {
                name: "materialized" if isinstance(gradient, DenseGradient) else "factored"
                for name, gradient in first.items()
            }
            assert "of training gradients on disk (layers: " in str(planned)


@pytest.mark.parametrize("method", ["graddot", "kfac", "ekfac"])
def test_the_plan_counts_one_pass(method):
    model, options = conv_net(), {"method": method, "gradient_cache_residency": "memory"}
    planned = plan(model, images(7, 0), images(3, 1), **options)
    assert planned.train_passes == 1
    assert planned.kept_bytes == 0
    assert planned.host_bytes == planned.store_bytes + 4 * 7 * 3
    assert planned.disk_bytes == 0
    if method != "graddot":
        sampled = plan(model, images(7, 0), images(3, 1), **options, fisher="sampled")
        assert sampled.train_passes == {"kfac": 2, "ekfac": 3}[method]


def test_the_plan_counts_every_checkpoint_that_stays(tmp_path):
    model = conv_net()
    options = {"method": "tracin", "checkpoints": [model.state_dict()] * 3}
    options["gradient_cache_residency"] = "disk"
    stays = plan(model, images(7, 0), images(3, 1), **options, cache_dir=tmp_path)
    goes = plan(model, images(7, 0), images(3, 1), **options)
    assert stays.disk_bytes == 3 * stays.store_bytes
    assert goes.disk_bytes == goes.store_bytes
    assert not list(tmp_path.iterdir())


def test_a_plan_without_a_cache_says_nothing_of_one():
    planned = plan(conv_net(), images(7, 0), images(3, 1))
    assert (planned.store_bytes, planned.store_on, planned.forms) == (0, None, {})
    assert "store:" not in str(planned)
