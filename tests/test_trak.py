"""TRAK against a dense re-implementation on the oracle's gradients, and what it refuses."""

import copy

import pytest
import torch
from models import alone, captured, exactly, text_rows, tiny
from torch import nn

import gradtrail
from gradtrail import CurvatureError, Projection
from gradtrail.attribution.trak_features import solve_features
from gradtrail.factors import DenseGradient, project
from gradtrail.kronecker import Damping

TRAIN = text_rows((5, 3, 7, 1, 6, 4, 2, 8, 3))
QUERY = text_rows((4, 6, 2), seed=1)
PROJECTIONS = {
    "dense": Projection(kind="dense", dim=7, seed=3),
    "factored": Projection(kind="factored", dim=3, seed=4),
    "mask": Projection(kind="mask", dim=9, seed=5),
    "whole": Projection(kind="dense", dim=10_000),
}


def network(seed=0, dtype=torch.float64):
    """A small network of linear layers, so that every layer's gradient is one matrix and a bias."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).to(dtype)


def pairs(count, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 5, generator=generator, dtype=torch.float64).to(dtype)
    labels = torch.randint(0, 3, (count,), generator=generator)
    return list(zip(inputs, labels, strict=True))


def features(model, rows, projection):
    """Every layer's gradient by autograd on single examples, projected, side by side."""
    gradients = alone(model, rows)
    columns = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        weight, bias = gradients[f"{name}.weight"], gradients[f"{name}.bias"]
        dense = DenseGradient(
            torch.cat([weight.flatten(1), bias], 1), tuple(weight.shape[1:]), has_bias=True
        )
        if projection.kind == "factored":  # the two sides, from factors: one position an example
            outer = torch.cat([weight, bias.unsqueeze(-1)], -1)
            columns.append(two_sided(name, outer, projection))
        else:
            columns.append(project(name, dense, projection).values_bd)
    return torch.cat(columns, 1)


def two_sided(name, outer, projection):
    from gradtrail.factors.projection._random import gaussian, generator_for

    if outer.shape[2] > projection.dim:
        right = gaussian(
            projection.dim, outer.shape[2], generator_for(projection.seed, name, "input")
        )
        outer = outer @ right.double().t()
    if outer.shape[1] > projection.dim:
        left = gaussian(
            projection.dim, outer.shape[1], generator_for(projection.seed, name, "output")
        )
        outer = left.double() @ outer
    return outer.flatten(1)


def dense_trak(train_nk, query_qk, damping, *, relative=True):
    gram = train_nk.t() @ train_nk
    strength = damping * gram.diagonal().mean() if relative else damping
    eye = torch.eye(gram.shape[0], dtype=gram.dtype)
    return train_nk @ torch.linalg.solve(gram + strength * eye, query_qk.t())


@pytest.mark.parametrize("kind", PROJECTIONS)
@pytest.mark.parametrize("relative", [True, False], ids=["relative", "absolute"])
def test_scores_are_those_of_the_dense_formula(kind, relative):
    model, train, query = network(), pairs(11), pairs(4, seed=1)
    projection = PROJECTIONS[kind]
    scores = gradtrail.attribute(
        model, train, query, method="trak", projection=projection, damping=0.3,
        relative_damping=relative, batch_size=4, progress=False,
    )  # fmt: skip
    expected = dense_trak(
        features(model, train, projection),
        features(model, query, projection),
        0.3,
        relative=relative,
    )
    torch.testing.assert_close(scores.values, expected.float(), rtol=1e-5, atol=1e-6)
    assert scores.method == "trak"
    assert scores.options["damping"] == 0.3


def test_default_damping_is_a_tenth_of_the_mean_eigenvalue():
    model, train, query = network(), pairs(11), pairs(4, seed=1)
    projection = PROJECTIONS["dense"]
    scores = gradtrail.attribute(
        model, train, query, method="trak", projection=projection, progress=False
    )
    expected = dense_trak(
        features(model, train, projection), features(model, query, projection), 0.1
    )
    torch.testing.assert_close(scores.values, expected.float(), rtol=1e-5, atol=1e-6)


def test_undamped_scores_solve_least_squares():
    """With more examples than features the scores of the training rows are a projection matrix."""
    model, train = network(), pairs(60)
    scores = gradtrail.attribute(
        model, train, train, method="trak", projection=PROJECTIONS["dense"], damping=0.0,
        progress=False,
    )  # fmt: skip
    values = scores.values.double()
    torch.testing.assert_close(values @ values, values, rtol=0, atol=1e-4)
    assert abs(float(values.trace()) - 14) < 1e-3  # two layers of 7 features


@pytest.mark.parametrize("batch_size", [1, 4, 9])
def test_scores_do_not_depend_on_the_batch_size(batch_size):
    model = tiny(torch.float32)
    options = {"method": "trak", "projection": PROJECTIONS["factored"], "progress": False}
    expected = gradtrail.attribute(model, TRAIN, QUERY, batch_size=5, **options).values
    got = gradtrail.attribute(model, TRAIN, QUERY, batch_size=batch_size, **options).values
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-5)


def test_second_pass_where_the_features_do_not_fit(monkeypatch):
    """Without room to keep the training features they are captured again: the same scores."""
    model, train, query = network(), pairs(11), pairs(4, seed=1)
    options = {"method": "trak", "projection": PROJECTIONS["dense"], "progress": False}
    expected = gradtrail.attribute(model, train, query, **options).values
    monkeypatch.setattr("gradtrail.attribution.trak.kept_budget", lambda *_: 0)
    got = gradtrail.attribute(model, train, query, **options).values
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-7)


def test_language_model_on_padded_batches():
    model = tiny()
    projection = Projection(kind="mask", dim=10_000)  # every entry, unscaled
    with exactly():
        scores = gradtrail.attribute(
            model, TRAIN, QUERY, method="trak", projection=projection, damping=0.5, progress=False
        )
        found = [captured(model, rows)[0] for rows in (TRAIN, QUERY)]
    train, query = (
        torch.cat([gradients[name].flatten(1) for name in found[0]], 1) for gradients in found
    )
    torch.testing.assert_close(
        scores.values.double(), dense_trak(train, query, 0.5), rtol=1e-4, atol=1e-6
    )


def test_positions_add_up_to_the_example():
    model = tiny(torch.float32)
    options = {"method": "trak", "projection": PROJECTIONS["factored"], "progress": False}
    options["exclude"] = ["position", "norm"]  # these are not factors once projected
    tokens = gradtrail.attribute(model, TRAIN, QUERY, granularity="token", **options)
    whole = gradtrail.attribute(model, TRAIN, QUERY, **options)
    assert tokens.values.shape == (len(TRAIN), 8, len(QUERY))
    torch.testing.assert_close(tokens.example_values, whole.values, rtol=1e-3, atol=1e-5)


def test_checkpoints_are_averaged():
    model, train, query = network(), pairs(11), pairs(4, seed=1)
    states = [network(seed).state_dict() for seed in (1, 2, 3)]
    options = {"method": "trak", "projection": PROJECTIONS["dense"], "progress": False}
    parts = [
        gradtrail.attribute(model, train, query, checkpoints=[state], **options).values
        for state in states
    ]
    scores = gradtrail.attribute(model, train, query, checkpoints=states, **options)
    torch.testing.assert_close(scores.values, sum(parts) / 3, rtol=1e-5, atol=1e-7)
    weighed = gradtrail.attribute(
        model, train, query, checkpoints=states, checkpoint_weights=[1, 1, 2], **options
    )
    expected = (parts[0] + parts[1] + 2 * parts[2]) / 4
    torch.testing.assert_close(weighed.values, expected, rtol=1e-5, atol=1e-7)
    with pytest.raises(ValueError, match="checkpoint_weights must add up to more than 0"):
        gradtrail.attribute(
            model, train, query, checkpoints=states, checkpoint_weights=[1, -1, 0], **options
        )


def test_self_influence_is_the_diagonal():
    model, train = network(), pairs(11)
    options = {"method": "trak", "projection": PROJECTIONS["dense"], "progress": False}
    scores = gradtrail.attribute(model, train, train, **options).values
    diagonal = gradtrail.self_influence(model, train, batch_size=3, **options)
    torch.testing.assert_close(diagonal, scores.diagonal(), rtol=1e-5, atol=1e-7)
    assert (diagonal >= 0).all()
    assert gradtrail.self_influence(model, [], **options).shape == (0,)


def test_nothing_to_score():
    options = {"method": "trak", "projection": PROJECTIONS["dense"], "progress": False}
    model, train = network(dtype=torch.float32), pairs(5, dtype=torch.float32)
    assert gradtrail.attribute(model, train, [], **options).values.shape == (5, 0)
    assert gradtrail.attribute(model, [], train, **options).values.shape == (0, 5)


def test_features_of_zero_gradients_score_zero():
    """A constant loss leaves no feature, which is no reason to fail."""
    model, train, query = network(), pairs(5), pairs(2, seed=1)

    def flat(model, batch):
        return 0 * model(batch[0]).sum(1)

    scores = gradtrail.attribute(
        model, train, query, loss=flat, query_loss=lambda m, b: m(b[0]).sum(1), method="trak",
        projection=PROJECTIONS["dense"], progress=False,
    )  # fmt: skip
    assert torch.equal(scores.values, torch.zeros(5, 2))


def test_singular_matrix_is_refused():
    model, train, query = network(), pairs(5), pairs(2, seed=1)
    with pytest.raises(
        CurvatureError, match="damping must make the 14 x 14 matrix.* got 0.0 with 5"
    ):
        gradtrail.attribute(
            model, train, query, method="trak", projection=PROJECTIONS["dense"], damping=0.0,
            progress=False,
        )  # fmt: skip


def test_projection_is_asked_for():
    model, train = network(), pairs(5)
    with pytest.raises(ValueError, match="projection must be given for method 'trak', got None"):
        gradtrail.attribute(model, train, train, method="trak", progress=False)
    with pytest.raises(ValueError, match="projection must be given for method 'trak', got None"):
        gradtrail.self_influence(model, train, method="trak", progress=False)


def test_too_many_features_are_refused(monkeypatch):
    monkeypatch.setattr("gradtrail.attribution.trak_features.free_bytes", lambda _: 1000)
    model, train = network(), pairs(5)
    with pytest.raises(ValueError, match="projection must leave features .* got 14 of them"):
        gradtrail.attribute(
            model, train, train, method="trak", projection=PROJECTIONS["dense"], progress=False
        )


def test_options_are_checked():
    model, train = network(), pairs(5)
    with pytest.raises(ValueError, match="damping must be a finite number of at least 0, got -1"):
        gradtrail.attribute(model, train, train, method="trak", projection=8, damping=-1)
    with pytest.raises(ValueError, match="damping must be given with relative_damping=False"):
        gradtrail.attribute(
            model, train, train, method="trak", projection=8, relative_damping=False
        )


def test_features_that_are_not_finite_are_refused():
    gram = torch.full((2, 2), torch.nan)
    with pytest.raises(CurvatureError, match="train must have finite features"):
        solve_features(gram, torch.ones(1, 2), Damping(0.1), 3)


def test_plan_counts_the_matrix():
    model, train, query = network(), pairs(11), pairs(4, seed=1)
    planned = gradtrail.plan(model, train, query, method="trak", projection=PROJECTIONS["dense"])
    assert "curvature" in str(planned).lower()


def test_model_is_left_as_it_was():
    model, train = network(), pairs(5)
    before = copy.deepcopy(model.state_dict())
    gradtrail.attribute(model, train, train, method="trak", projection=8, progress=False)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("kind", ["dense", "factored", "mask"])
def test_stored_features_give_the_same_scores(tmp_path, kind):
    """From stores of projected gradients, whatever their blocks are joined to."""
    model, train, query = network(), pairs(11), pairs(4, seed=1)
    options = {"projection": PROJECTIONS[kind], "progress": False}
    expected = gradtrail.attribute(model, train, query, method="trak", damping=0.3, **options)
    stored = gradtrail.cache(model, train, query, cache_dir=tmp_path, batch_size=3, **options)
    for batch_size in (None, 7):
        got = gradtrail.attribute_from_cache(
            stored.train, stored.query, method="trak", damping=0.3, batch_size=batch_size,
            progress=False,
        )  # fmt: skip
        torch.testing.assert_close(got.values, expected.values, rtol=1e-5, atol=1e-7)
    top = gradtrail.attribute_from_cache(
        stored.train, stored.query, method="trak", damping=0.3, top_k=2, progress=False
    )
    assert torch.equal(top.indices, expected.topk(2).indices)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_features_of_low_precision_are_summed_in_float32(tmp_path, dtype):
    """What is stored is rounded, the sum of its products is not: it scores as the formula says."""
    model, train, query = network(), pairs(40), pairs(4, seed=1)
    stored = gradtrail.cache(
        model, train, query, cache_dir=tmp_path, projection=PROJECTIONS["dense"], dtype=dtype,
        capture="materialized", progress=False,
    )  # fmt: skip
    sides = []
    for store in stored:
        layers = store.get(range(len(store))).layers
        sides.append(torch.cat([layers[name].values_bd.double() for name in store.layers], 1))
    got = gradtrail.attribute_from_cache(*stored, method="trak", damping=0.3, progress=False)
    torch.testing.assert_close(got.values.double(), dense_trak(*sides, 0.3), rtol=1e-4, atol=1e-5)


def test_gradient_cache_of_a_live_run():
    model, train, query = network(), pairs(11), pairs(4, seed=1)
    options = {"method": "trak", "projection": PROJECTIONS["dense"], "progress": False}
    expected = gradtrail.attribute(model, train, query, **options).values
    got = gradtrail.attribute(
        model, train, query, gradient_cache_residency="memory", **options
    ).values
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-7)
