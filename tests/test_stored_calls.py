"""Calls on stores that are made twice, on the wrong stores, or with another call's options."""

import json
from dataclasses import asdict

import pytest
import torch
from models import text_rows, tiny
from trajectories import network, positive_rows, recorded, squared, stored_queries

from gradtrail import CurvatureError, GradTrailWarning, Projection, StoreError, attribute, plan
from gradtrail.attribution import (
    attribute_from_cache,
    cache_preconditioned_query,
    search,
    self_influence_from_cache,
)
from gradtrail.attribution.cached import cache
from gradtrail.store import GradientStore, StepStore

TRAIN = text_rows((5, 3, 7, 1, 6, 4, 4, 2, 5))
QUERY = text_rows((4, 6, 3, 2, 5), seed=5)
CALL = {"batch_size": 2, "progress": False}
QUIET = {"progress": False}


@pytest.fixture(scope="module")
def model():
    return tiny(torch.float32)


@pytest.fixture(scope="module")
def pair(model, tmp_path_factory):
    found = cache(
        model, TRAIN, QUERY, cache_dir=tmp_path_factory.mktemp("a"), method="ekfac", **CALL
    )
    yield found
    found.train.close()
    found.query.close()


def of_training(store):
    """A copy of a store that does not know its weights or data, as a training run's."""
    found = GradientStore(residency="memory")
    found.define(**{**asdict(store.facts), "checkpoint_digest": None, "data_digest": None})
    for one in store.blocks():
        found.append(one.block, meta=one.meta)
    return found


# ---------------------------------------------------------------- preconditioned queries, twice


@pytest.mark.parametrize("closed", [False, True])
def test_the_same_preconditioned_queries_are_read_again(pair, tmp_path, closed):
    options = {"method": "ekfac", "damping": 0.3, **QUIET}
    first = cache_preconditioned_query(pair.train, pair.query, tmp_path / "a", **options)
    expected = attribute_from_cache(pair.train, first, **QUIET).values
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "a").iterdir()}
    if closed:
        first.close()
    again = cache_preconditioned_query(pair.train, pair.query, tmp_path / "a", **options)
    assert again.mode == "read"
    assert torch.equal(attribute_from_cache(pair.train, again, **QUIET).values, expected)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "a").iterdir()} == files


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_preconditioned_queries_in_a_folder_go_on(pair, tmp_path, kept):
    options = {"method": "ekfac", **QUIET}
    with cache_preconditioned_query(pair.train, pair.query, tmp_path / "a", **options) as whole:
        with GradientStore(tmp_path / "b") as part:  # what a kill leaves
            if kept:
                part.define(**asdict(whole.facts))
            for one, _ in zip(whole.blocks(), range(kept), strict=False):
                part.append(one.block, meta=one.meta)
        with cache_preconditioned_query(pair.train, pair.query, tmp_path / "b", **options) as found:
            assert found.ids == whole.ids
            scores = [attribute_from_cache(pair.train, one, **QUIET) for one in (whole, found)]
            assert torch.equal(scores[0].values, scores[1].values)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (
            {"damping": 0.5},
            r"^extra.preconditioned.options.damping must be .* got 0.5 where .* 0.3",
        ),
        ({"method": "kfac"}, r"^extra.preconditioned.method must be .* got 'kfac' where .*'ekfac'"),
        ({"layers": "up"}, r"^extra.preconditioned.layers must be "),
    ],
    ids=str,
)
def test_a_folder_of_other_preconditioned_queries_is_refused(pair, tmp_path, options, match):
    given = {"method": "ekfac", "damping": 0.3, **QUIET}
    with cache_preconditioned_query(pair.train, pair.query, tmp_path / "a", **given) as first:
        ids = first.ids
    with pytest.raises(StoreError, match=match) as info:
        cache_preconditioned_query(pair.train, pair.query, tmp_path / "a", **{**given, **options})
    assert len(str(info.value)) < 900
    with GradientStore(tmp_path / "a", mode="read") as store:
        assert store.ids == ids
    memory = GradientStore(residency="memory")
    cache_preconditioned_query(pair.train, pair.query, memory, **given)
    with pytest.raises(StoreError, match="store in memory"):
        cache_preconditioned_query(pair.train, pair.query, memory, **{**given, **options})


def test_preconditioned_queries_of_another_run_are_not_taken_for_these(pair, tmp_path):
    train, query, other = (of_training(one) for one in (pair.train, pair.query, pair.query))
    with cache_preconditioned_query(train, query, tmp_path / "a", **QUIET) as first:
        ids = first.ids
    with cache_preconditioned_query(train, query, tmp_path / "a", **QUIET) as again:
        assert again.mode == "read"
        assert again.ids == ids
    with pytest.raises(StoreError, match=r"^extra.preconditioned.runs must be "):
        cache_preconditioned_query(train, other, tmp_path / "a", **QUIET)


def test_preconditioned_queries_for_training_examples_are_named_in_short(pair):
    ready = GradientStore(residency="memory")
    cache_preconditioned_query(pair.train, pair.query, ready, **QUIET)
    with pytest.raises(StoreError, match=r"got queries that method 'ekfac' was applied to\. Pass"):
        search(ready, pair.query, 2, **QUIET)


# ---------------------------------------------------------------- trak without a projection


def test_trak_refuses_whole_gradients_of_stores(pair):
    with pytest.raises(
        ValueError, match="for method 'trak', got stores that were captured without"
    ):
        attribute_from_cache(pair.train, pair.query, method="trak", **QUIET)
    with pytest.raises(
        ValueError, match="for method 'trak', got stores that were captured without"
    ):
        self_influence_from_cache(pair.train, method="trak", **QUIET)


def test_trak_refuses_stored_features_that_do_not_fit(model, tmp_path, monkeypatch):
    projection = Projection(kind="dense", dim=10_000)  # every layer stays whole
    found = cache(model, TRAIN, QUERY, cache_dir=tmp_path, projection=projection, **CALL)
    size = sum(g.values_bd.shape[1] for g in next(iter(found.train.blocks())).block.layers.values())
    read = []
    free = 20 * size**2 - 1
    monkeypatch.setattr("gradtrail.attribution.trak_features.free_bytes", lambda _: free)
    monkeypatch.setattr(GradientStore, "blocks", lambda *_, **__: read.append(1))
    with pytest.raises(ValueError, match=f"features whose matrix fits .* got {size} of them"):
        attribute_from_cache(found.train, found.query, method="trak", **QUIET)
    assert not read


# ---------------------------------------------------------------- covariances


def test_projected_and_written_out_gradients_ask_for_covariances(model, tmp_path):
    options = {"projection": 2, "capture": "materialized", "layers": ["up", "down"], **CALL}
    found = cache(model, TRAIN, QUERY, cache_dir=tmp_path / "a", **options)
    with pytest.raises(CurvatureError, match=r"covariances .* KroneckerCovarianceCallback .*"):
        attribute_from_cache(found.train, found.query, method="ekfac", **QUIET)
    found = cache(model, TRAIN, QUERY, cache_dir=tmp_path / "b", method="ekfac", **options)
    scores = attribute_from_cache(found.train, found.query, method="ekfac", **QUIET)
    assert scores.values.abs().max() > 0


@pytest.mark.parametrize("capture", ["factored", "materialized"])
def test_the_plan_says_what_covariances_take(model, tmp_path, capture):
    """Layers that read one input share its covariance, in the plan and in the file."""
    options = {"method": "ekfac", "capture": capture}
    kept = {"gradient_cache_residency": "disk", "cache_dir": tmp_path / "none"}
    planned = plan(model, TRAIN, QUERY, **options, **kept)
    found = cache(model, TRAIN, QUERY, cache_dir=tmp_path / "a", **options, **CALL)
    tensors, _ = found.train.attached("covariances")
    size = sum(tensor.nbytes for name, tensor in tensors.items() if not name.endswith(":count"))
    assert planned.covariance_bytes == size > 0
    assert "of covariances where cache() fills it" in str(planned)
    beside = size if capture == "materialized" else 0  # which attribute keeps as well
    assert planned.disk_bytes == planned.store_bytes + beside
    without = plan(model, TRAIN, QUERY, **kept)
    assert without.covariance_bytes == 0
    assert "covariances" not in str(without)


# ---------------------------------------------------------------- options of another call


def test_an_option_that_another_call_names_otherwise_is_said(model, tmp_path):
    with pytest.raises(ValueError, match=r"dtype: attribute\(\) and plan\(\) call it cache_dtype"):
        attribute(model, TRAIN, QUERY, dtype="bfloat16", **CALL)
    with pytest.raises(ValueError, match=r"cache_dtype: cache\(\) calls it dtype"):
        cache(model, TRAIN, QUERY, cache_dir=tmp_path, cache_dtype="bfloat16", **CALL)
    with pytest.raises(ValueError, match="shard_bytes: an option of GradientStore alone"):
        cache(model, TRAIN, QUERY, cache_dir=tmp_path, shard_bytes=100, **CALL)
    with pytest.raises(ValueError, match=r"got \['damping'\]. Near: damping: none"):
        attribute(model, TRAIN, QUERY, damping=0.1, **CALL)


@pytest.mark.parametrize("steps", [3, "3"])
def test_selected_steps_must_be_several(pair, steps):
    match = f"selected_steps must be step numbers in a list, got {steps!r}"
    with pytest.raises(TypeError, match=match):
        attribute_from_cache(pair.train, pair.query, selected_steps=steps, **QUIET)
    with pytest.raises(TypeError, match=match):
        search(pair.train, pair.query, 2, selected_steps=steps, **QUIET)


def test_selected_steps_must_be_numbers(pair):
    with pytest.raises(TypeError, match=r"selected_steps must be ints, got \['1'\]"):
        attribute_from_cache(pair.train, pair.query, selected_steps=["1"], **QUIET)


def test_optimizer_states_must_be_a_store_and_of_use(pair):
    states = StepStore(residency="memory")
    with pytest.raises(ValueError, match="a method that reads them, got method 'graddot'. Leave"):
        attribute_from_cache(pair.train, pair.query, optimizer_states=states, **QUIET)
    for method in ("less", "adamw", "dvemb"):
        with pytest.raises(TypeError, match="optimizer_states must be a StepStore, got 'run/s'"):
            attribute_from_cache(
                pair.train, pair.query, method=method, optimizer_states="run/s", **QUIET
            )


def test_messages_name_the_method_as_it_was_written(pair, tmp_path):
    with pytest.raises(ValueError, match=r"must have a curvature .* got 'graddot'\. Other"):
        cache_preconditioned_query(pair.train, pair.query, tmp_path, method="graddot", **QUIET)


def test_states_that_nothing_was_recorded_in_are_called_so(tmp_path):
    moves, queries, _ = recorded_moves(tmp_path)
    empty = StepStore(residency="memory")
    with pytest.raises(ValueError, match=r"wrote, got one that nothing was recorded in\. Record"):
        attribute_from_cache(moves, queries, method="dvemb", optimizer_states=empty, **QUIET)


# ---------------------------------------------------------------- folders and data of a cache


def test_a_cache_inside_a_store_is_refused(model, tmp_path):
    with GradientStore(tmp_path / "a") as store:
        store.define(id_scheme="index")
    before = sorted((tmp_path / "a").iterdir())
    match = r"cache_dir must be a folder that stores are made in, got the store '.*a' itself"
    for call in (
        lambda: cache(model, TRAIN, QUERY, cache_dir=tmp_path / "a", **CALL),
        lambda: attribute(
            model, TRAIN, QUERY, cache_dir=tmp_path / "a", gradient_cache_residency="disk", **CALL
        ),
    ):
        with pytest.raises(StoreError, match=match):
            call()
    assert sorted((tmp_path / "a").iterdir()) == before


def test_no_examples_give_an_empty_store(model, tmp_path):
    found = cache(model, [], QUERY, cache_dir=tmp_path, **CALL)
    assert len(found.train) == 0
    again = cache(model, [], QUERY, cache_dir=tmp_path, **CALL)
    assert len(again.train) == 0
    assert len(again.query) == len(QUERY)
    for store in (found.train, again.train):
        assert attribute_from_cache(store, again.query, **QUIET).values.shape == (0, len(QUERY))
    assert attribute(model, [], QUERY, **CALL).values.shape == (0, len(QUERY))


def test_other_weights_and_other_data_are_called_so(model, tmp_path):
    cache(model, TRAIN, QUERY, cache_dir=tmp_path, **CALL)
    with pytest.raises(
        StoreError, match=r"other data: data_digest '\w+', and '\w+' here: 9 rows there and 7 here"
    ):
        cache(model, TRAIN[:7], QUERY, cache_dir=tmp_path, **CALL)
    with pytest.raises(StoreError, match=r"other data: data_digest .* here: 9 rows in both"):
        cache(model, TRAIN[::-1], QUERY, cache_dir=tmp_path, **CALL)
    with pytest.raises(StoreError, match=r"got '.*train' with other weights: checkpoint_digest '"):
        cache(tiny(torch.float32, seed=3), TRAIN, QUERY, cache_dir=tmp_path, **CALL)


# ---------------------------------------------------------------- update directions


def recorded_moves(folder, projection=None):
    def adamw(model):
        return torch.optim.AdamW(model.parameters(), lr=0.01)

    trained, moves, states = recorded(
        network, squared, positive_rows(8), adamw, steps=4, moves=True, projection=projection
    )
    rows = positive_rows(2, seed=1)
    return (
        moves,
        stored_queries(trained, squared, rows, folder=folder, projection=projection),
        states,
    )


def test_scores_of_update_directions_are_called_so(tmp_path):
    moves, queries, states = recorded_moves(tmp_path)
    match = "train_store holds update directions of AdamW: scores of '{}' are of these"
    with pytest.warns(GradTrailWarning, match=match.format("graddot")):
        found = attribute_from_cache(moves, queries, **QUIET)
    assert found.options["gradients"] == "update directions of AdamW"
    with pytest.warns(GradTrailWarning, match=match.format("search")):
        best = search(moves, queries, 2, **QUIET)
    assert torch.equal(best.values, found.topk(2).values)
    with pytest.warns(GradTrailWarning, match=match.format("gradcos")):
        self_influence_from_cache(moves, method="gradcos", **QUIET)
    # a method that is made for them says nothing
    attribute_from_cache(moves, queries, method="less", optimizer_states=states, **QUIET)


def test_gradients_are_called_nothing_else(pair):
    assert attribute_from_cache(pair.train, pair.query, **QUIET).options["gradients"] is None
    assert "gradients" not in json.dumps(dict(pair.train.facts.extra)).split('"coverage"')[0]


def test_directions_and_gradients_of_a_two_sided_projection_are_refused_with_the_cause(tmp_path):
    moves, queries, states = recorded_moves(tmp_path, Projection(kind="factored", dim=3))
    with pytest.raises(
        StoreError,
        match=r"in train_store and .* in query_store. Update directions are projected as",
    ):
        attribute_from_cache(moves, queries, method="less", optimizer_states=states, **QUIET)
