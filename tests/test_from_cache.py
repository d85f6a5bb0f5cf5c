"""Attribution from stores: the scores of a live run, without the model."""

import json
import weakref
from collections.abc import Mapping
from dataclasses import asdict, replace

import pytest
import torch
from models import alone, build, pad_left, rows_of, text_rows, tiny
from torch import nn

from gradtrail import (
    CurvatureError,
    GradTrailWarning,
    Projection,
    StoreError,
    attribute,
    self_influence,
)
from gradtrail.attribution import (
    METHODS,
    AttributionScores,
    Attributor,
    EKFACAttributor,
    KFACAttributor,
    KroneckerMethod,
    attribute_from_cache,
    cache_preconditioned_query,
    self_influence_from_cache,
)
from gradtrail.attribution.cached import cache
from gradtrail.attribution.stored import replay, stored_rows
from gradtrail.callbacks.summed import sum_examples
from gradtrail.factors import DenseGradient, GradientBlock, tensors_of
from gradtrail.store import GradientStore

TRAIN = text_rows((5, 3, 7, 1, 6, 4, 4, 2, 5))
QUERY = text_rows((4, 6, 3), seed=5)
LINEAR = {"layers": ["mix", "up", "down"]}
CALL = {"batch_size": 4, "progress": False}
QUIET = {"progress": False}

# name: (method, options, whether scores are equal to the bit)
METHODS_TRIED = {
    "graddot": ("graddot", {}, True),
    "gradcos": ("gradcos", {}, True),
    "graddot by train norm": ("graddot", {"normalize": "train"}, True),
    "kfac": ("kfac", {}, False),
    "ekfac": ("ekfac", {}, False),
    "ekfac, absolute damping": ("ekfac", {"damping": 0.3, "relative_damping": False}, False),
    "ekfac by both norms": ("ekfac", {"normalize": "both"}, False),
    "kfac, direct": ("kfac", {"non_kronecker": "direct"}, False),
    "ekfac, diagonal": ("ekfac", {"diagonal": "norm"}, False),
    "ekfac of rank 2": ("ekfac", {"query_rank": 2}, False),
}


@pytest.fixture(scope="module")
def model():
    return tiny(torch.float32)


@pytest.fixture(scope="module")
def stores(model, tmp_path_factory):
    """Stores by method and capture, each captured once; what tests write goes elsewhere."""
    made = {}

    def get(method="graddot", capture="factored", **options):
        key = (method, capture, json.dumps(options, sort_keys=True))
        if key not in made:
            folder = tmp_path_factory.mktemp("stores")
            made[key] = cache(
                model,
                TRAIN,
                QUERY,
                cache_dir=folder,
                method=method,
                capture=capture,
                **CALL,
                **options,
            )
        return made[key]

    yield get
    for pair in made.values():
        pair.train.close()
        pair.query.close()


def copied(
    store, path=None, *, residency="memory", dtype=None, mode="create", facts=None, change=None
):
    """Copy a store's blocks into another, with some facts or blocks changed."""
    found = GradientStore(path, residency=residency, dtype=dtype, mode=mode)
    found.define(**{**asdict(store.facts), **(facts or {})})
    for number, one in enumerate(store.blocks()):
        block, meta = one.block, one.meta
        if change is not None:
            block, meta = change(number, block, meta)
        found.append(block, meta=meta)
    found.flush()
    return found


def as_training(store, ids, steps, **options):
    """Turn a live capture into what a training run would have stored."""

    def change(number, block, meta):
        names = tuple(ids[row] for row in block.ids)
        return replace(block, step=steps[number], ids=names), meta

    return copied(
        store,
        facts={"id_scheme": "key:name", "checkpoint_digest": None, "data_digest": None},
        change=change,
        **options,
    )


def assert_close(got, expected, tolerance=1e-5):
    """Compare scores, relative to the largest."""
    scale = float(expected.abs().max())
    assert float((got - expected).abs().max()) <= tolerance * scale


# ---------------------------------------------------------------- scores are the live ones


@pytest.mark.parametrize("capture", ["factored", "materialized", "auto"])
@pytest.mark.parametrize("case", METHODS_TRIED)
def test_scores_are_those_of_a_live_run(model, stores, case, capture):
    method, options, exact = METHODS_TRIED[case]
    live = attribute(model, TRAIN, QUERY, method=method, **CALL, **options)
    pair = stores(method, capture, **options)
    found = attribute_from_cache(pair.train, pair.query, method=method, **QUIET, **options)
    if exact and capture == "factored":
        assert torch.equal(found.values, live.values)
    assert_close(found.values, live.values)
    assert found.train_ids == live.train_ids
    assert found.query_ids == live.query_ids
    assert found.train_steps is None
    assert found.method == live.method
    assert found.coverage == live.coverage
    same = live.options.keys() & found.options.keys() - {"dtype", "query_energy"}
    assert len(same) >= 8
    assert {name: found.options[name] for name in same} == {n: live.options[n] for n in same}


@pytest.mark.parametrize("residency", ["memory", "tiered", "disk"])
@pytest.mark.parametrize("method", ["graddot", "ekfac"])
def test_every_residency_gives_the_same_scores(stores, method, residency):
    pair = stores(method)
    expected = attribute_from_cache(pair.train, pair.query, method=method, **QUIET)
    with (
        copied(pair.train, residency=residency) as train,
        copied(pair.query, residency=residency) as query,
    ):
        found = attribute_from_cache(train, query, method=method, **QUIET)
    assert torch.equal(found.values, expected.values) or method == "ekfac"
    assert_close(found.values, expected.values)


def test_scores_are_those_of_plain_autograd(tmp_path):
    model = tiny()
    pair = cache(model, TRAIN, QUERY, cache_dir=tmp_path, **CALL)
    found = attribute_from_cache(pair.train, pair.query, **QUIET)
    train, query = alone(model, TRAIN), alone(model, QUERY)
    expected = sum(train[name].flatten(1) @ query[name].flatten(1).t() for name in train)
    torch.testing.assert_close(found.values, expected.float(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["gpt2", "llama", "vit", "bert"])
@pytest.mark.parametrize("method", ["graddot", "gradcos", "kfac", "ekfac"])
def test_layers_of_every_kind(tmp_path, name, method):
    model, rows = build(name, torch.float32), rows_of(name, torch.float32)
    live = attribute(model, rows, rows[:2], method=method, **CALL)
    pair = cache(
        model,
        rows,
        rows[:2],
        cache_dir=tmp_path,
        method=method,
        covariances=False if "fac" in method else None,
        **CALL,
    )
    found = attribute_from_cache(pair.train, pair.query, method=method, **QUIET)
    if method.startswith("grad"):
        assert torch.equal(found.values, live.values)
    assert_close(found.values, live.values)
    assert found.coverage == live.coverage


def test_the_output_embedding_is_left_out_of_a_curvature_unless_it_is_named(tmp_path):
    model, rows = build("llama", torch.float32), rows_of("llama", torch.float32)
    pair = cache(model, rows, rows[:2], cache_dir=tmp_path, **CALL)
    found = attribute_from_cache(pair.train, pair.query, method="kfac", **QUIET)
    assert_close(found.values, attribute(model, rows, rows[:2], method="kfac", **CALL).values)
    named = {"layers": ["lm_head"]}
    found = attribute_from_cache(pair.train, pair.query, method="kfac", **named, **QUIET)
    live = attribute(model, rows, rows[:2], method="kfac", **named, **CALL)
    assert_close(found.values, live.values)


def test_a_sweep_gives_one_result_a_damping(model, stores):
    pair = stores("ekfac")
    live = attribute(model, TRAIN, QUERY, method="ekfac", damping_sweep=[0.1, 0.7], **CALL)
    found = attribute_from_cache(
        pair.train, pair.query, method="ekfac", damping_sweep=[0.1, 0.7], **QUIET
    )
    assert list(found) == list(live) == [0.1, 0.7]
    for damping, scores in found.items():
        assert_close(scores.values, live[damping].values)
        assert scores.options["damping"] == damping


@pytest.mark.parametrize("collate", [None, pad_left], ids=["right", "left"])
@pytest.mark.parametrize("method", ["graddot", "gradcos", "kfac", "ekfac"])
def test_shares_of_tokens(model, tmp_path, method, collate):
    options = {"method": method, "collate_fn": collate, **LINEAR, **CALL}
    live = attribute(model, TRAIN, QUERY, granularity="token", **options)
    pair = cache(model, TRAIN, QUERY, cache_dir=tmp_path, **options)
    for size in (None, 20):
        found = attribute_from_cache(
            pair.train, pair.query, method=method, granularity="token", batch_size=size, **QUIET
        )
        assert_close(found.values, live.values)
        assert torch.equal(found.lengths, live.lengths)


def test_positions_are_read_off_the_gradients_where_nothing_else_tells(stores):
    pair = stores("graddot", **LINEAR)
    expected = attribute_from_cache(pair.train, pair.query, granularity="token", **QUIET)
    plain = copied(pair.train, change=lambda _, block, __: (block, None))
    found = attribute_from_cache(plain, pair.query, granularity="token", **QUIET)
    assert torch.equal(found.values, expected.values)
    assert found.lengths.tolist() == [7, 7, 7, 7, 6, 6, 6, 6, 5]  # padding is not known


def test_written_out_gradients_have_no_positions(stores):
    pair = stores("graddot", "materialized", **LINEAR)
    with pytest.raises(ValueError, match="needs gradients with positions, got written-out ones at"):
        attribute_from_cache(pair.train, pair.query, granularity="token", **QUIET)


@pytest.mark.parametrize("method", ["graddot", "gradcos", "kfac", "ekfac"])
def test_examples_against_themselves(model, stores, method):
    live = self_influence(model, TRAIN, method=method, **CALL)
    found = self_influence_from_cache(stores(method).train, method=method, **QUIET)
    assert_close(found, live)
    assert found.dtype == torch.float32
    last = self_influence_from_cache(
        stores(method).train, method="graddot", selected_steps=[2], layers="up", **QUIET
    )
    assert last.shape == (1,)


def test_a_store_of_low_precision_meets_one_of_high(stores):
    pair = stores("graddot")
    expected = attribute_from_cache(pair.train, pair.query, **QUIET)
    with copied(pair.train, dtype="bfloat16") as half:
        found = attribute_from_cache(half, pair.query, **QUIET)
    assert_close(found.values, expected.values, 2e-2)
    assert not torch.equal(found.values, expected.values)
    assert found.options["dtype"] == "bfloat16"


@pytest.mark.parametrize("sides", [("factored", "materialized"), ("materialized", "factored")])
@pytest.mark.parametrize("method", ["graddot", "kfac", "ekfac"])
def test_two_captures_meet(model, stores, method, sides):
    live = attribute(model, TRAIN, QUERY, method=method, **CALL)
    train, query = (stores(method, capture) for capture in sides)
    found = attribute_from_cache(train.train, query.query, method=method, **QUIET)
    assert_close(found.values, live.values)


# ---------------------------------------------------------------- steps and rows


def test_selected_steps_are_read_in_store_order(model, stores):
    pair = stores("kfac")
    kept = [0, 1, 2, 3, 8]
    for method in ("graddot", "kfac"):
        found = attribute_from_cache(
            pair.train, pair.query, method=method, selected_steps=[2, 0], **QUIET
        )
        rows = [TRAIN[row] for row in kept]
        assert_close(
            found.values,
            attribute(
                model, rows, QUERY, method=method, layers=list(pair.train.layers), **CALL
            ).values,
        )
        assert found.train_ids == tuple(kept)
        assert found.options["selected_steps"] == [0, 2]


def test_rows_of_a_training_run_have_steps(stores, tmp_path):
    pair = stores("graddot")
    expected = attribute_from_cache(pair.train, pair.query, **QUIET).values
    train = as_training(pair.train, list("abcdaefga"), [3, 7, 40])
    found = attribute_from_cache(train, pair.query, **QUIET)
    assert torch.equal(found.values, expected)
    assert found.train_ids == tuple("abcdaefga")
    assert found.train_steps == (3, 3, 3, 3, 7, 7, 7, 7, 40)
    found.save(tmp_path / "scores.safetensors")
    again = AttributionScores.load(tmp_path / "scores.safetensors")
    assert again.train_steps == found.train_steps
    part = attribute_from_cache(train, pair.query, selected_steps=[7, 40], **QUIET)
    assert torch.equal(part.values, expected[4:])
    assert part.train_steps == (7, 7, 7, 7, 40)


def test_results_without_steps_say_so(stores, tmp_path):
    pair = stores("graddot")
    found = attribute_from_cache(pair.train, pair.query, **QUIET)
    found.save(tmp_path / "scores.safetensors")
    assert AttributionScores.load(tmp_path / "scores.safetensors").train_steps is None
    with pytest.raises(ValueError, match=r"train_steps must be one a row of values \(9\), got 1"):
        replace(found, train_steps=(1,))


@pytest.mark.parametrize("method", ["graddot", "gradcos", "kfac", "ekfac"])
def test_no_step_gives_no_rows(stores, method):
    pair = stores(method)
    options = {"method": method, "selected_steps": [], **QUIET}
    assert attribute_from_cache(pair.train, pair.query, **options).values.shape == (0, 3)
    assert attribute_from_cache(pair.train, pair.query, top_k=2, **options).ids == [[], [], []]
    assert self_influence_from_cache(pair.train, **options).shape == (0,)


def test_a_step_that_is_not_stored_is_refused(stores):
    pair = stores("graddot")
    with pytest.raises(
        ValueError, match=r"among the 3 steps of train_store, got \[12\]. Near: 0, 1, 2"
    ):
        attribute_from_cache(pair.train, pair.query, selected_steps=[1, 12], **QUIET)


@pytest.mark.parametrize("method", ["graddot", "gradcos", "kfac", "ekfac"])
def test_blocks_are_joined(stores, method):
    pair = stores(method)
    expected = attribute_from_cache(pair.train, pair.query, method=method, **QUIET)
    found = attribute_from_cache(pair.train, pair.query, method=method, batch_size=8, **QUIET)
    assert_close(found.values, expected.values)


def test_a_batch_is_as_many_whole_blocks_as_fit(stores):
    rows = stored_rows(stores("graddot").train, "train_store")

    def sizes(batch_size):
        device = torch.device("cpu")
        done = replay(rows, batch_size=batch_size, device=device, sink=lambda *_: None)
        return [(place.start, place.size) for place in done]

    assert sizes(None) == sizes(1) == sizes(4) == [(0, 4), (4, 4), (8, 1)]
    assert sizes(7) == [(0, 4), (4, 5)]
    assert sizes(8) == [(0, 8), (8, 1)]
    assert sizes(9) == [(0, 9)]


def test_a_layer_that_some_blocks_lack_is_zero_there(stores):
    pair = stores("graddot")

    def change(number, block, meta):
        layers = {n: g for n, g in block.layers.items() if n != "up" or number != 1}
        return replace(block, layers=layers), meta

    train = copied(pair.train, change=change)
    whole = attribute_from_cache(pair.train, pair.query, **QUIET).values
    rest = attribute_from_cache(pair.train, pair.query, exclude="up", **QUIET).values
    expected = torch.cat([whole[:4], rest[4:8], whole[8:]])
    for size in (None, 9):
        found = attribute_from_cache(train, pair.query, batch_size=size, **QUIET)
        assert_close(found.values, expected, 1e-6)


# ---------------------------------------------------------------- the best of every query


@pytest.mark.parametrize("case", ["graddot", "gradcos", "kfac", "ekfac by both norms"])
@pytest.mark.parametrize("k", [1, 4, 50])
def test_top_k(stores, case, k):
    method, options, _ = METHODS_TRIED[case]
    pair = stores(method)
    whole = attribute_from_cache(pair.train, pair.query, method=method, **options, **QUIET)
    expected = whole.topk(k)
    found = attribute_from_cache(pair.train, pair.query, method=method, top_k=k, **options, **QUIET)
    assert torch.equal(found.indices, expected.indices)
    assert_close(found.values, expected.values, 1e-6)
    assert found.ids == expected.ids


def test_top_k_of_a_sweep(stores):
    pair = stores("ekfac")
    options = {"method": "ekfac", "damping_sweep": [0.1, 0.7], **QUIET}
    whole = attribute_from_cache(pair.train, pair.query, **options)
    found = attribute_from_cache(pair.train, pair.query, top_k=2, **options)
    assert list(found) == [0.1, 0.7]
    for damping, best in found.items():
        assert torch.equal(best.indices, whole[damping].topk(2).indices)


def test_top_k_says_that_scores_are_not_finite(stores):
    pair = stores("graddot")
    train = copied(pair.train, change=_with_nan)
    with pytest.warns(GradTrailWarning, match="scores of 1 training examples are not finite"):
        found = attribute_from_cache(train, pair.query, top_k=3, **QUIET)
    assert 5 not in found.indices
    assert torch.isfinite(found.values).all()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"top_k": 0}, "top_k must be an integer of at least 1, got 0"),
        ({"batch_size": 0}, "batch_size must be an integer of at least 1, got 0"),
        ({"top_k": 2, "granularity": "token"}, "top_k must be None with granularity='token'"),
        ({"granularity": "word"}, "granularity must be one of 'example', 'token', got 'word'"),
        ({"top_k": 2, "method": "kfac", "gradient_budget": 9}, "gradient_budget must be None with"),
        ({"method": "tracin"}, "one checkpoint's stores, got 'tracin'"),
        ({"optimizer_states": 1}, "optimizer_states must go with a method that reads them"),
    ],
    ids=str,
)
def test_options_are_checked(stores, options, match):
    pair = stores("kfac")
    with pytest.raises(ValueError, match=match):
        attribute_from_cache(pair.train, pair.query, **options, **QUIET)


# ---------------------------------------------------------------- memory


class _Watched(Mapping):
    """Layers of a block, with a weak reference to every tensor that was handed out."""

    def __init__(self, layers, seen):
        self._layers, self._seen = layers, seen

    def __getitem__(self, name):
        gradient = self._layers[name]
        self._seen += [weakref.ref(tensor) for tensor in tensors_of(gradient)]
        return gradient

    def __iter__(self):
        return iter(self._layers)

    def __len__(self):
        return len(self._layers)


@pytest.fixture
def watched(monkeypatch):
    """Count, whenever a store is asked for a block, the tensors of the last one that are alive."""
    alive = []
    blocks = GradientStore.blocks

    def instrumented(self, **options):
        seen = []
        for one in blocks(self, **options):
            alive.append(sum(reference() is not None for reference in seen))
            seen.clear()
            yield replace(one, block=replace(one.block, layers=_Watched(one.block.layers, seen)))

    monkeypatch.setattr(GradientStore, "blocks", instrumented)
    return alive


@pytest.mark.parametrize("capture", ["factored", "materialized"])
@pytest.mark.parametrize(
    ("method", "options", "passes"),
    [
        ("graddot", {}, 1),
        ("gradcos", {}, 1),
        ("graddot", {"granularity": "token"}, 1),
        ("graddot", {"batch_size": 9}, 1),
        ("graddot", {"top_k": 2}, 1),
        ("kfac", {}, 1),
        ("ekfac", {}, 2),
        ("ekfac", {"batch_size": 9, "normalize": "both"}, 2),
        ("ekfac", {"gradient_budget": 0}, 2),
    ],
    ids=str,
)
def test_no_tensor_of_a_block_is_alive_when_the_next_is_asked_for(
    stores, watched, method, options, passes, capture
):
    if capture == "materialized" and "granularity" in options:
        pytest.skip("written out, no positions are left")
    pair = stores(method, capture, **LINEAR)
    watched.clear()
    attribute_from_cache(pair.train, pair.query, method=method, **options, **QUIET)
    assert watched == [0] * (1 + 3 * passes)  # one block of queries, three of training examples


@pytest.mark.parametrize("method", ["kfac", "ekfac"])
def test_a_curvature_without_covariances_reads_once_more(stores, watched, method):
    pair = stores(method, covariances=False)
    watched.clear()
    attribute_from_cache(pair.train, pair.query, method=method, **QUIET)
    assert watched == [0] * (1 + 3 * (2 if method == "kfac" else 3))


def test_a_budget_keeps_what_was_read(stores, watched):
    pair = stores("ekfac", covariances=False)
    watched.clear()
    kept = attribute_from_cache(
        pair.train, pair.query, method="ekfac", gradient_budget=1 << 30, **QUIET
    )
    assert len(watched) == 1 + 3
    read = attribute_from_cache(pair.train, pair.query, method="ekfac", **QUIET)
    assert_close(kept.values, read.values)


def test_a_batch_of_one_block_hands_its_own_tensors_on(stores):
    with copied(stores("graddot").train) as store:
        own = {
            (one.row, name): [tensor.data_ptr() for tensor in tensors_of(one.block.layers[name])]
            for one in store.blocks()
            for name in one.block.layers
        }
        seen = {}

        def sink(place, name, gradient):
            seen[place.start, name] = [tensor.data_ptr() for tensor in tensors_of(gradient)]

        rows = stored_rows(store, "train_store")
        for _ in replay(rows, batch_size=4, device=torch.device("cpu"), sink=sink):
            pass
        assert seen == own


# ---------------------------------------------------------------- curvature


def test_covariances_beside_a_store_are_used(stores):
    """Doubling both covariances' sums halves K-FAC's scores twice over: nothing was fitted."""
    pair = stores("kfac")
    options = {"method": "kfac", "damping": 0.1, **QUIET}
    expected = attribute_from_cache(pair.train, pair.query, **options)
    tensors, metadata = pair.train.attached("covariances")
    with copied(pair.train) as train:
        scaled = {
            key: tensor if key.endswith(":count") else 2 * tensor for key, tensor in tensors.items()
        }
        train.attach("covariances", scaled, metadata)
        found = attribute_from_cache(train, pair.query, **options)
        assert_close(4 * found.values, expected.values)
        train.attach("covariances", scaled, {**metadata, "covers": "0" * 32})
        fitted = attribute_from_cache(train, pair.query, **options)
        assert_close(fitted.values, expected.values)


def test_covariances_of_more_rows_than_are_read_are_not_used(model, stores):
    pair = stores("ekfac", "materialized")
    with pytest.raises(CurvatureError, match="covariances that cover every row that is read, got"):
        attribute_from_cache(pair.train, pair.query, method="ekfac", selected_steps=[0, 1], **QUIET)
    pair = stores("ekfac")
    found = attribute_from_cache(
        pair.train, pair.query, method="ekfac", selected_steps=[0, 1], **QUIET
    )
    assert_close(found.values, attribute(model, TRAIN[:8], QUERY, method="ekfac", **CALL).values)


def test_covariances_of_some_layers_go_with_a_sweep_of_the_others(model, stores):
    pair = stores("kfac")
    tensors, metadata = pair.train.attached("covariances")
    names = json.loads(metadata["layers"])
    part = {**metadata, "layers": json.dumps({"up": names["up"]})}
    with copied(pair.train) as train:
        train.attach("covariances", tensors, part)
        found = attribute_from_cache(train, pair.query, method="kfac", **QUIET)
    assert_close(found.values, attribute(model, TRAIN, QUERY, method="kfac", **CALL).values)


class _Branches(nn.Module):
    """Two layers that read one input."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(6, 5), nn.Linear(6, 5)
        self.out = nn.Linear(5, 3)

    def forward(self, x):
        return self.out(torch.tanh(self.left(x)) * self.right(x))


@pytest.mark.parametrize("covariances", [True, False])
@pytest.mark.parametrize("layers", [None, ["right", "out"]], ids=str)
def test_layers_that_read_one_input(tmp_path, layers, covariances):
    torch.manual_seed(0)
    model = _Branches()
    rows = [(torch.randn(6), torch.tensor(row % 3)) for row in range(7)]
    live = attribute(model, rows, rows[:2], method="ekfac", layers=layers, **CALL)
    pair = cache(
        model, rows, rows[:2], cache_dir=tmp_path, method="ekfac", covariances=covariances, **CALL
    )
    found = attribute_from_cache(pair.train, pair.query, method="ekfac", layers=layers, **QUIET)
    assert_close(found.values, live.values)


@pytest.mark.parametrize("batch_size", [None, 8], ids=str)
def test_layers_that_read_one_input_are_given_one_tensor(tmp_path, batch_size):
    rows = [(torch.randn(6), torch.tensor(row % 3)) for row in range(7)]
    pair = cache(_Branches(), rows, cache_dir=tmp_path, layers=["left", "right"], **CALL)
    last = {}

    def sink(place, name, gradient):
        assert (
            not last or place.start != last["start"] or last["input"]() is gradient.activation_bsi
        )
        last.update(start=place.start, input=weakref.ref(gradient.activation_bsi), name=name)

    stored = stored_rows(pair.train, "train_store")
    device = torch.device("cpu")
    assert len(list(replay(stored, batch_size=batch_size, device=device, sink=sink))) >= 1
    assert last["name"] in ("left", "right")


def test_matrices_without_covariances_have_no_curvature(stores):
    pair = stores("graddot", "materialized", **LINEAR)
    for options in ({}, {"non_kronecker": "direct", "direct_fisher_max_params": 1}):
        with pytest.raises(CurvatureError, match="got gradients written out and none for .*mix"):
            attribute_from_cache(pair.train, pair.query, method="kfac", **options, **QUIET)
    found = attribute_from_cache(
        pair.train, pair.query, method="kfac", diagonal=["mix", "up", "down"], **QUIET
    )
    assert torch.isfinite(found.values).all()


@pytest.mark.parametrize("projection", [4, "dense"], ids=str)
@pytest.mark.parametrize("method", ["graddot", "kfac", "ekfac"])
def test_projected_gradients(model, tmp_path, method, projection):
    options = {"non_kronecker": "direct"} if projection == "dense" and "fac" in method else {}
    given = {"projection": projection, **LINEAR}
    if projection == "dense":
        given["projection"] = Projection(kind="dense", dim=16, seed=3)
    live = attribute(model, TRAIN, QUERY, method=method, **given, **options, **CALL)
    pair = cache(model, TRAIN, QUERY, cache_dir=tmp_path, method=method, **given, **options, **CALL)
    found = attribute_from_cache(pair.train, pair.query, method=method, **options, **QUIET)
    assert_close(found.values, live.values)
    assert found.options["projection"] == live.options["projection"]


def test_a_wide_layer_is_refused_by_name(stores):
    pair = stores("kfac")
    with pytest.raises(CurvatureError, match=r"max_factor_dim=10, got .*up \(12, 0.0 GiB\)"):
        attribute_from_cache(pair.train, pair.query, method="kfac", max_factor_dim=10, **QUIET)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"refine": "cg"}, "refine must be None with stored gradients, got 'cg'"),
        (
            {"fisher": "expected"},
            "fisher must be 'empirical' with stored gradients, got 'expected'",
        ),
        ({"fisher": "sampled"}, "fisher must be 'empirical' with stored gradients, got 'sampled'"),
        ({"diagonal": "nowhere"}, "diagonal must match a stored layer, got 'nowhere'"),
    ],
    ids=str,
)
def test_what_runs_the_model_is_refused(stores, options, match):
    pair = stores("ekfac")
    with pytest.raises(ValueError, match=match):
        attribute_from_cache(pair.train, pair.query, method="ekfac", **options, **QUIET)


def test_a_fit_in_a_folder_serves_model_and_stores(model, stores, tmp_path):
    pair = stores("ekfac")
    options = {"method": "ekfac", "fisher_dir": tmp_path / "fit"}
    first = attribute_from_cache(pair.train, pair.query, **options, **QUIET)
    file = tmp_path / "fit" / "fit.safetensors"
    state = file.stat()
    live = attribute(model, TRAIN, QUERY, **options, **CALL)
    again = attribute_from_cache(pair.train, pair.query, damping=0.5, **options, **QUIET)
    assert file.stat().st_mtime_ns == state.st_mtime_ns
    assert_close(live.values, first.values)
    assert not torch.equal(again.values, first.values)
    with pytest.raises(CurvatureError, match="a fit of this train_digest"):
        attribute_from_cache(pair.train, pair.query, selected_steps=[0], **options, **QUIET)


def test_a_fit_of_changing_weights_belongs_to_its_store(stores, tmp_path):
    pair = stores("kfac")
    options = {"method": "kfac", "fisher_dir": tmp_path / "fit", **QUIET}
    names, steps = list("abcdefghi"), [1, 2, 3]
    one, two = (as_training(pair.train, names, steps) for _ in range(2))
    first = attribute_from_cache(one, pair.query, **options)
    assert torch.equal(attribute_from_cache(one, pair.query, **options).values, first.values)
    with pytest.raises(CurvatureError, match="a fit of this model_digest: 'store "):
        attribute_from_cache(two, pair.query, **options)


@pytest.mark.parametrize("residency", ["memory", "disk", "tiered"])
def test_the_fit_may_rest_anywhere(stores, residency):
    pair = stores("ekfac")
    expected = attribute_from_cache(pair.train, pair.query, method="ekfac", **QUIET)
    found = attribute_from_cache(
        pair.train, pair.query, method="ekfac", factor_cache_residency=residency, **QUIET
    )
    assert_close(found.values, expected.values, 1e-6)


# ---------------------------------------------------------------- stores must fit each other


@pytest.mark.parametrize(
    ("facts", "match"),
    [
        (
            {"projection": {"kind": "factored", "dim": 4, "seed": 0}},
            "the same projection, got None and {'kind': 'factored', 'dim': 4, 'seed': 0}",
        ),
        ({"checkpoint_digest": "other"}, "the same checkpoint_digest, got '.*' and 'other'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_stores_that_were_captured_otherwise_are_refused(stores, facts, match):
    pair = stores("graddot")
    with (
        copied(pair.query, facts=facts) as query,
        pytest.raises(StoreError, match=f"train_store and query_store must have {match}"),
    ):
        attribute_from_cache(pair.train, query, **QUIET)


@pytest.mark.parametrize("side", ["train", "query"])
def test_blocks_that_were_summed_score_as_their_examples_together(stores, side):
    pair = stores("graddot")
    table = attribute_from_cache(pair.train, pair.query, **QUIET).values
    whole = getattr(pair, side)
    with GradientStore(residency="memory") as summed:
        facts = {**asdict(whole.facts), "recording": "per_block", "id_scheme": "content"}
        summed.define(**{**facts, "extra": {}})
        for stored in whole.blocks():
            layers = {name: sum_examples(one) for name, one in stored.block.layers.items()}
            summed.append(GradientBlock(stored.block.step, (f"{stored.row}",), layers))
        sides = {"train": pair.train, "query": pair.query, side: summed}
        found = attribute_from_cache(sides["train"], sides["query"], **QUIET)
    lengths = [len(record.ids) for record in whole.records]
    axis = 0 if side == "train" else 1
    expected = torch.stack([part.sum(axis) for part in table.split(lengths, axis)], axis)
    assert len(found.train_ids if side == "train" else found.query_ids) == len(lengths)
    assert_close(found.values, expected, 1e-5)


def test_weights_that_are_not_known_are_no_mismatch(stores):
    pair = stores("graddot")
    expected = attribute_from_cache(pair.train, pair.query, **QUIET)
    with copied(pair.train, facts={"checkpoint_digest": None}) as train:
        found = attribute_from_cache(train, pair.query, **QUIET)
    assert torch.equal(found.values, expected.values)


def test_layers_of_one_store_only_are_refused_unless_layers_are_named(model, stores):
    wide, narrow = stores("graddot"), stores("graddot", layers=["mix", "up"])
    with pytest.raises(StoreError, match="query_store must have every layer .* got none of down"):
        attribute_from_cache(wide.train, narrow.query, **QUIET)
    with pytest.raises(StoreError, match="train_store must have every layer .* got none of down"):
        attribute_from_cache(narrow.train, wide.query, **QUIET)
    live = attribute(model, TRAIN, QUERY, layers=["mix", "up"], **CALL)
    found = attribute_from_cache(wide.train, narrow.query, layers="*", **QUIET)
    assert torch.equal(found.values, live.values)
    found = attribute_from_cache(
        wide.train, narrow.query, exclude=["down", "embed", "norm", "position"], **QUIET
    )
    assert torch.equal(found.values, live.values)


def test_layers_are_named_by_patterns_and_containers(tmp_path):
    model, rows = build("gpt2", torch.float32), rows_of("gpt2", torch.float32)
    pair = cache(model, rows, rows[:2], cache_dir=tmp_path, **CALL)
    for choice in ({"layers": "transformer.h.1"}, {"layers": "*.attn.*", "exclude": "*.1.*"}):
        live = attribute(model, rows, rows[:2], **choice, **CALL)
        found = attribute_from_cache(pair.train, pair.query, **choice, **QUIET)
        assert torch.equal(found.values, live.values)
        covered = {e.layer for e in found.coverage.with_status("covered")}
        assert covered == {e.layer for e in live.coverage.with_status("covered")}


def test_a_pattern_must_match_and_be_text(stores):
    pair = stores("graddot")
    with pytest.raises(ValueError, match="layers must match a stored layer, got 'upp'.*'up'"):
        attribute_from_cache(pair.train, pair.query, layers="upp", **QUIET)
    with pytest.raises(TypeError, match="exclude must be glob patterns on names of stored layers"):
        attribute_from_cache(pair.train, pair.query, exclude=[nn.Linear], **QUIET)
    with pytest.raises(ValueError, match="must leave a layer that both stores have, got none of"):
        attribute_from_cache(pair.train, pair.query, layers="up", exclude="up", **QUIET)


def test_a_layer_of_another_shape_is_refused(stores):
    pair = stores("graddot", layers=["mix"])

    def wider(_, block, meta):
        layers = {"mix": DenseGradient(torch.zeros(len(block.ids), 12), (4, 3))}
        return replace(block, layers=layers), meta

    with (
        copied(pair.query, change=wider) as query,
        pytest.raises(
            StoreError,
            match=r"mix must have .* \(8, 8\) in train_store and \(4, 3\) in query_store. They are "
            "of models of other sizes",
        ),
    ):
        attribute_from_cache(pair.train, query, **QUIET)


def test_a_store_must_be_one_and_be_whole(stores):
    pair = stores("graddot")
    with pytest.raises(TypeError, match="query_store must be a GradientStore, got str"):
        attribute_from_cache(pair.train, "queries", **QUIET)
    with (
        GradientStore(residency="memory") as empty,
        pytest.raises(
            StoreError, match="train_store must hold gradients, got a store that nothing"
        ),
    ):
        self_influence_from_cache(empty, **QUIET)
    with (
        copied(pair.train, facts={"extra": {"num_rows": "12"}}) as part,
        pytest.raises(StoreError, match="train_store must be whole, got 9 of 12 rows. Call cache"),
    ):
        attribute_from_cache(part, pair.query, **QUIET)


def test_a_store_without_extra_facts_is_enough(stores):
    pair = stores("graddot")
    expected = attribute_from_cache(pair.train, pair.query, **QUIET)
    bare = {"extra": {}, "loss": None, "data_digest": None, "checkpoint_digest": None}
    with copied(pair.train, facts=bare) as train, copied(pair.query, facts=bare) as query:
        found = attribute_from_cache(train, query, **QUIET)
    assert torch.equal(found.values, expected.values)
    assert found.options["loss"] == "not recorded"
    assert found.coverage.share == 1.0
    assert {entry.name for entry in found.coverage.entries} == set(pair.train.layers)


def _with_nan(number, block, meta):
    """Make one entry of the second block's second example NaN, in one layer."""
    layers = dict(block.layers)
    if number == 1:
        g_bso = layers["up"].output_gradient_bso.clone()
        g_bso[1, 0, 0] = torch.nan
        layers["up"] = replace(layers["up"], output_gradient_bso=g_bso)
    return replace(block, layers=layers), meta


def test_scores_that_are_not_finite_are_traced_to_the_stored_gradient(stores):
    pair = stores("graddot")
    train = copied(pair.train, change=_with_nan)
    match = "scores of training examples 5 are not finite: the stored gradient of 5 in up is not"
    with pytest.warns(GradTrailWarning, match=match):
        found = attribute_from_cache(train, pair.query, **QUIET)
    assert found.values.isnan().any(1).nonzero()[:, 0].tolist() == [5]
    with pytest.warns(GradTrailWarning, match="training examples 1 are not finite: the stored"):
        attribute_from_cache(train, pair.query, selected_steps=[1], **QUIET)
    with pytest.warns(GradTrailWarning, match="training examples 5 are not finite"):
        self_influence_from_cache(train, **QUIET)


# ---------------------------------------------------------------- preconditioned queries


@pytest.mark.parametrize("rank", [None, 2])
@pytest.mark.parametrize("capture", ["factored", "materialized"])
@pytest.mark.parametrize("method", ["kfac", "ekfac"])
def test_scores_of_preconditioned_queries_are_inner_products(
    model, stores, tmp_path, method, capture, rank
):
    pair = stores(method, capture)
    options = {"method": method, "query_rank": rank, "damping": 0.3}
    live = attribute(model, TRAIN, QUERY, **options, **CALL)
    out = cache_preconditioned_query(pair.train, pair.query, tmp_path / "out", **options, **QUIET)
    found = attribute_from_cache(pair.train, out, **QUIET)
    assert_close(found.values, live.values)
    assert found.options["preconditioned"]["method"] == method
    if rank:
        assert out.layers["up"].kinds == ("linear",)
    with GradientStore(tmp_path / "out", mode="read") as again:
        best = attribute_from_cache(pair.train, again, top_k=2, **QUIET)
    assert torch.equal(best.indices, found.topk(2).indices)


def test_a_store_of_all_layers_meets_preconditioned_queries(model, stores, tmp_path):
    """Layers without a curvature are not in them, and need not be named."""
    train, query = stores("graddot").train, stores("graddot").query
    out = cache_preconditioned_query(train, query, tmp_path / "out", method="kfac", **QUIET)
    assert set(out.layers) < set(train.layers)
    found = attribute_from_cache(train, out, **QUIET)
    assert_close(found.values, attribute(model, TRAIN, QUERY, method="kfac", **CALL).values)
    normed = attribute_from_cache(train, out, normalize="train", layers=list(out.layers), **QUIET)
    live = attribute(model, TRAIN, QUERY, method="kfac", normalize="train", **CALL)
    assert_close(normed.values, live.values)


def test_an_interrupted_store_of_queries_goes_on(stores, tmp_path):
    pair = stores("ekfac")
    many = copied(pair.train, facts={"extra": {}})  # three blocks of queries
    options = {"method": "ekfac", **QUIET}
    whole = cache_preconditioned_query(pair.train, many, tmp_path / "whole", **options)
    out = GradientStore(tmp_path / "part")
    out.define(**asdict(whole.facts))
    first = next(iter(whole.blocks()))
    out.append(first.block, meta=first.meta)
    with pytest.raises(StoreError, match="query_store must be whole, got 4 of 9 rows"):
        attribute_from_cache(pair.train, out, **QUIET)
    cache_preconditioned_query(pair.train, many, out, **options)
    assert out.ids == whole.ids
    scores = [attribute_from_cache(pair.train, one, **QUIET).values for one in (whole, out)]
    assert torch.equal(*scores)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"method": "graddot"}, r"method must have a curvature \('kfac' or 'ekfac'\), got"),
        ({"damping_sweep": [0.1]}, r"damping_sweep must be None .* got \[0.1\]"),
        ({"normalize": "both"}, "normalize must be None for preconditioned queries, got 'both'"),
    ],
    ids=str,
)
def test_what_inner_products_cannot_express_is_refused(stores, tmp_path, options, match):
    pair = stores("ekfac")
    with pytest.raises(ValueError, match=match):
        cache_preconditioned_query(pair.train, pair.query, tmp_path / "out", **options, **QUIET)
    assert not (tmp_path / "out").exists()


def test_preconditioned_queries_are_no_plain_ones(stores, tmp_path):
    pair = stores("ekfac")
    out = cache_preconditioned_query(pair.train, pair.query, tmp_path / "out", **QUIET)
    for method in ("kfac", "gradcos"):
        with pytest.raises(
            StoreError, match=r"query_store must hold plain gradients .*'ekfac' was"
        ):
            attribute_from_cache(pair.train, out, method=method, **QUIET)
    with pytest.raises(StoreError, match="train_store must hold gradients as they were captured"):
        attribute_from_cache(out, pair.query, **QUIET)


# ---------------------------------------------------------------- bound attributors


def test_a_bound_method_has_every_call(model, tmp_path):
    bound = Attributor(model, "gradcos", **LINEAR, **CALL)
    live = bound.attribute(TRAIN, QUERY)
    assert torch.equal(
        live.values, attribute(model, TRAIN, QUERY, method="gradcos", **LINEAR, **CALL).values
    )
    pair = bound.cache(TRAIN, QUERY, cache_dir=tmp_path)
    found = bound.attribute_from_cache(pair.train, pair.query)
    assert torch.equal(found.values, live.values)
    best = bound.attribute_from_cache(pair.train, pair.query, top_k=2)
    assert torch.equal(best.indices, live.topk(2).indices)
    alone_ = bound.self_influence(TRAIN)
    assert torch.equal(bound.self_influence_from_cache(pair.train), alone_)
    kept = bound.attribute(TRAIN, QUERY, gradient_cache_residency="memory")
    assert torch.equal(kept.values, live.values)
    with pytest.raises(ValueError, match="method must have a curvature"):
        bound.cache_preconditioned_query(pair.train, pair.query, tmp_path / "out")


@pytest.mark.parametrize("name", [name for name in METHODS if name in ("graddot", "kfac", "ekfac")])
def test_a_bound_method_is_the_registered_one(model, stores, name):
    pair = stores(name)
    bound = Attributor(model, name, **CALL)
    found = bound.attribute_from_cache(pair.train, pair.query)
    expected = attribute_from_cache(pair.train, pair.query, method=name, **QUIET)
    assert torch.equal(found.values, expected.values)


def test_a_bound_method_must_be_registered(model):
    with pytest.raises(ValueError, match="method must be one of .*got 'gradd'"):
        Attributor(model, "gradd")


@pytest.mark.parametrize("bound_class", [KFACAttributor, EKFACAttributor])
def test_one_fit_serves_model_and_stores(model, tmp_path, bound_class):
    with bound_class(model, **CALL) as bound:
        pair = bound.cache(TRAIN, QUERY, cache_dir=tmp_path)
        found = bound.attribute_from_cache(pair.train, pair.query)
        fit = bound.fit_
        live = bound.attribute(TRAIN, QUERY)
        assert bound.fit_ is fit
        assert_close(found.values, live.values)
        out = bound.cache_preconditioned_query(pair.train, pair.query, tmp_path / "out")
        assert bound.fit_ is fit
        assert_close(attribute_from_cache(pair.train, out, **QUIET).values, live.values)
        assert_close(bound.self_influence_from_cache(pair.train), bound.self_influence(TRAIN))
        assert bound.fit_ is fit
        bound.attribute_from_cache(pair.train, pair.query, selected_steps=[0])
        assert bound.fit_ is not fit


@pytest.mark.parametrize("choice", [LINEAR, {"exclude": nn.Embedding}, {"layers": nn.Linear}])
def test_layers_of_a_bound_method_are_its_layers_in_a_store(model, stores, choice):
    pair = stores("graddot")
    bound = Attributor(model, **choice, **CALL)
    found = bound.attribute_from_cache(pair.train, pair.query)
    assert torch.equal(found.values, attribute(model, TRAIN, QUERY, **choice, **CALL).values)
    other = bound.attribute_from_cache(pair.train, pair.query, layers="norm")
    assert torch.equal(other.values, attribute(model, TRAIN, QUERY, layers="norm", **CALL).values)


def test_a_bound_projection_must_be_the_stores(model, stores):
    pair = stores("graddot")
    bound = Attributor(model, projection=4, **CALL)
    with pytest.raises(StoreError, match="projection must be that of the store, got .*with None"):
        bound.attribute_from_cache(pair.train, pair.query)


def test_a_method_object_may_be_given(stores):
    pair = stores("ekfac")
    method = KroneckerMethod(corrected=True, damping=0.2)
    found = attribute_from_cache(pair.train, pair.query, method=method, **QUIET)
    named = attribute_from_cache(pair.train, pair.query, method="ekfac", damping=0.2, **QUIET)
    assert torch.equal(found.values, named.values)
