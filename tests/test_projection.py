"""Random projections: the same numbers everywhere, inner products right in expectation."""

import pytest
import torch

from gradtrail.factors import (
    DenseGradient,
    EmbeddingFactors,
    LinearFactors,
    Projection,
    ScaleFactors,
    SumGradient,
    cross_gram,
    mask_coordinates,
    materialize,
    move,
    position_gram,
    project,
    select,
    squared_norm,
    tensors_of,
    to_dense,
)
from gradtrail.factors.projection._random import coordinates, gaussian, generator_for, signs
from gradtrail.factors.projection.factored import _matrix

EXACT = {"rtol": 1e-10, "atol": 1e-12}
KINDS = ["factored", "dense", "mask"]
V, D = 10, 7  # a table of 10 rows of 7, tied to a projection onto 10


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def draw(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def linear(b=3, s=2, i=D, o=V, *, has_bias=False, groups=1):
    return LinearFactors(draw(b, s, i), draw(b, s, o), has_bias, groups)


def table(b=3, s=4, *, padding_idx=None):
    return EmbeddingFactors(torch.randint(0, V, (b, s)), draw(b, s, D), V, padding_idx)


def tied(b=3):
    return SumGradient((linear(b), table(b, padding_idx=2)))


GRADIENTS = {
    "linear": linear,
    "bias": lambda b=3: linear(b, has_bias=True),
    "bias alone": lambda b=3: LinearFactors(draw(b, 2, 0), draw(b, 2, V), has_bias=True),
    "groups": lambda b=3: linear(b, i=6, o=6, groups=3, has_bias=True),
    "table": table,
    "table with padding": lambda b=3: table(b, padding_idx=2),
    "scale": lambda b=3: ScaleFactors(draw(b, 2, 20), draw(b, 2, 20), has_bias=True),
    "written": lambda b=3: DenseGradient(draw(b, 40), (5, 8)),
    "two uses": lambda b=3: SumGradient((linear(b, has_bias=True), linear(b, 4, has_bias=True))),
    "tied": tied,
}


def gram(name, x, y, projection):
    return cross_gram(project(name, x, projection), project(name, y, projection))


# ---------------------------------------------------------------- the same numbers


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gradient", GRADIENTS)
def test_numbers_repeat(kind, gradient):
    x = GRADIENTS[gradient]()
    projection = Projection(kind=kind, dim=4, seed=3)
    first, again = project("layer", x, projection), project("layer", x, projection)
    for one, two in zip(tensors_of(first), tensors_of(again), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gradient", GRADIENTS)
def test_numbers_do_not_depend_on_the_batch(kind, gradient):
    x = GRADIENTS[gradient](5)
    projection = Projection(kind=kind, dim=4)
    whole = to_dense(project("layer", x, projection)).values_bd
    parts = [
        to_dense(project("layer", select(x, slice(start, start + 2)), projection)).values_bd
        for start in (0, 2, 4)
    ]
    torch.testing.assert_close(torch.cat(parts), whole, **EXACT)
    none = project("layer", select(x, slice(0, 0)), projection)
    assert to_dense(none).values_bd.shape == (0, whole.shape[1])


@pytest.mark.parametrize("size", [4096 * 2, 4096 * 2 + 1, 10_001])
def test_numbers_do_not_depend_on_the_size_of_a_block(size):
    x = DenseGradient(draw(3, size), (size,))
    in_blocks, at_once = (
        project("layer", x, Projection(kind="dense", dim=64, block_mib=mib)).values_bd
        for mib in (1, 64)
    )
    torch.testing.assert_close(in_blocks, at_once, **EXACT)


def test_dense_projection_is_one_sign_matrix():
    projection = Projection(kind="dense", dim=4)
    unit = DenseGradient(torch.eye(30, dtype=torch.float64), (30,))
    matrix = project("layer", unit, projection).values_bd
    torch.testing.assert_close(matrix.abs(), torch.full_like(matrix, 0.5), **EXACT)
    x = DenseGradient(draw(3, 30), (30,))
    torch.testing.assert_close(
        project("layer", x, projection).values_bd, x.values_bd @ matrix, **EXACT
    )


@pytest.mark.parametrize("kind", KINDS)
def test_layers_and_seeds_are_independent(kind):
    unit = DenseGradient(torch.eye(400, dtype=torch.float64), (400,))

    def matrix(name, seed):
        values = project(name, unit, Projection(kind=kind, dim=8, seed=seed)).values_bd
        # a mask's columns are sorted: compare which entries it keeps
        return values.sum(1) if kind == "mask" else values.flatten()

    one, other_layer, other_seed = matrix("a", 0), matrix("b", 0), matrix("a", 1)
    for other in (other_layer, other_seed):
        correlation = torch.corrcoef(torch.stack([one, other]))[0, 1].abs()
        assert correlation < 5 / len(one) ** 0.5


def test_sides_are_independent():
    projection = Projection(dim=8)
    for size in (40, 400):
        sides = [_matrix("layer", side, size, projection).flatten() for side in ("input", "output")]
        assert torch.corrcoef(torch.stack(sides))[0, 1].abs() < 5 / (8 * size) ** 0.5


def test_generator_depends_on_seed_and_names_alone():
    seeds = [
        generator_for(*names).initial_seed()
        for names in ((0, "a"), (1, "a"), (0, "b"), (0, "a", "b"), (0, "ab"), (0, "", "a"))
    ]
    assert len(set(seeds)) == len(seeds)
    # the same in every process and version: stored projections rely on it
    assert generator_for(0, "layer", "dense").initial_seed() == 1683614462704888194


@pytest.mark.parametrize("kind", KINDS)
def test_global_random_state_is_neither_read_nor_moved(kind):
    x = {name: make() for name, make in GRADIENTS.items()}
    before = torch.get_rng_state()
    projection = Projection(kind=kind, dim=3, seed=11)
    first = {name: project(f"{name}-{kind}", value, projection) for name, value in x.items()}
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(123)
    _matrix.__globals__["_cached_matrix"].cache_clear()
    for name, value in x.items():
        again = project(f"{name}-{kind}", value, projection)
        for one, two in zip(tensors_of(first[name]), tensors_of(again), strict=True):
            assert torch.equal(one, two)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gradient", GRADIENTS)
def test_low_precision_is_projected_in_float32(kind, gradient):
    x = move(GRADIENTS[gradient](), dtype=torch.bfloat16)
    projection = Projection(kind=kind, dim=4)
    got = project("layer", x, projection)
    floating = [tensor for tensor in tensors_of(got) if tensor.is_floating_point()]
    assert {tensor.dtype for tensor in floating} == {torch.float32}
    expected = project("layer", move(x, dtype=torch.float64), projection)
    torch.testing.assert_close(
        to_dense(got).values_bd.double(), to_dense(expected).values_bd, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gradient", GRADIENTS)
def test_gradients_are_left_as_they_were(kind, gradient):
    x = GRADIENTS[gradient]()
    before = [tensor.clone() for tensor in tensors_of(x)]
    project("layer", x, Projection(kind=kind, dim=4))
    for now, then in zip(tensors_of(x), before, strict=True):
        assert torch.equal(now, then)


# ---------------------------------------------------------------- exact where nothing is lost


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gradient", GRADIENTS)
def test_what_is_small_is_kept_as_it_is(kind, gradient):
    x, y = GRADIENTS[gradient](), GRADIENTS[gradient](2)
    projection = Projection(kind=kind, dim=1000)
    got = gram("layer", x, y, projection)
    torch.testing.assert_close(got, cross_gram(x, y), **EXACT)
    norms = squared_norm(project("layer", x, projection))
    torch.testing.assert_close(norms, squared_norm(x), **EXACT)


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("dim", [4, D, 8, V])
def test_factored_projection_is_two_sided(has_bias, dim):
    x = linear(has_bias=has_bias)
    projection = Projection(dim=dim)
    expected = materialize(x)
    width = D + has_bias
    if width > dim:
        expected = expected @ _matrix("layer", "input", width, projection).double().t()
    if dim < V:
        expected = _matrix("layer", "output", V, projection).double() @ expected
    got = project("layer", x, projection)
    assert got.num_positions == x.num_positions
    torch.testing.assert_close(materialize(got), expected, **EXACT)
    shares = position_gram(got, got).sum(1)
    torch.testing.assert_close(shares, cross_gram(got, got), **EXACT)


@pytest.mark.parametrize("kind", ["dense", "mask"])
def test_sum_of_uses_is_projected_as_one(kind):
    projection = Projection(kind=kind, dim=9)
    for x in (tied(), GRADIENTS["two uses"]()):
        got = to_dense(project("layer", x, projection)).values_bd
        once = to_dense(project("layer", to_dense(x), projection)).values_bd
        torch.testing.assert_close(got, once, **EXACT)


@pytest.mark.parametrize("dim", [4, D, V])
def test_tied_table_is_projected_like_its_linear_use(dim):
    x, projection = tied(), Projection(dim=dim)
    weight = to_dense(x).values_bd.view(-1, V, D)
    if dim < V:
        weight = _matrix("layer", "output", V, projection).double() @ weight
    if dim < D:
        weight = weight @ _matrix("layer", "input", D, projection).double().t()
    got = project("layer", x, projection)
    expected = torch.einsum("bij,qij->bq", weight, weight)
    torch.testing.assert_close(cross_gram(got, got), expected, **EXACT)
    torch.testing.assert_close(squared_norm(got), expected.diagonal(), **EXACT)
    # a batch in which the weight was used one way only meets the others on the same sides
    uses = [project("layer", part, projection) for part in x.parts]
    joint = sum(cross_gram(left, right) for left in uses for right in uses)
    torch.testing.assert_close(joint, expected, **EXACT)


def test_tied_table_with_a_written_out_part():
    x = SumGradient((table(), DenseGradient(draw(3, V * D), (V, D))))
    projection = Projection(dim=4)
    got = project("layer", x, projection).values_bd
    expected = project("layer", to_dense(x), projection).values_bd
    torch.testing.assert_close(got, expected, **EXACT)


@pytest.mark.parametrize("gradient", GRADIENTS)
def test_mask_keeps_exact_entries(gradient):
    x, projection = GRADIENTS[gradient](), Projection(kind="mask", dim=9)
    values = to_dense(x).values_bd
    keep = mask_coordinates("layer", values.shape[1], projection)
    got = project("layer", x, projection).values_bd
    expected = values[:, keep] * (values.shape[1] / 9) ** 0.5
    torch.testing.assert_close(got, expected, **EXACT)


@pytest.mark.parametrize("size", [9, 10, 1000, (1 << 24) + 5])
def test_coordinates_are_different_and_sorted(size):
    drawn = coordinates(9, size, generator_for(0, "layer"))
    assert drawn.shape == (9,)
    assert (drawn.diff() > 0).all()
    assert drawn.min() >= 0
    assert drawn.max() < size


def test_coordinates_of_a_large_layer_can_be_many():
    drawn = coordinates(100_000, (1 << 24) + 5, generator_for(0, "layer"))
    assert drawn.shape == (100_000,)
    assert (drawn.diff() > 0).all()


def test_raw_draws():
    generator = generator_for(0, "layer")
    matrix = signs(3, 5, generator)
    assert set(matrix.unique().tolist()) <= {-1.0, 1.0}
    again = generator_for(0, "layer")
    assert torch.equal(torch.cat([signs(1, 5, again), signs(2, 5, again)]), matrix)
    assert gaussian(4, 1000, generator).square().sum(0).mean() == pytest.approx(1, abs=0.2)


# ---------------------------------------------------------------- right in expectation


@pytest.mark.montecarlo
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gradient", GRADIENTS)
def test_inner_products_are_unbiased(kind, gradient):
    """Mean of 400 seeds within 4.5 standard errors, each of which is below 30% of the scale."""
    x, y = GRADIENTS[gradient](), GRADIENTS[gradient](2)
    exact = cross_gram(x, y)
    draws = torch.stack(
        [gram("layer", x, y, Projection(kind=kind, dim=3, seed=seed)) for seed in range(400)]
    )
    error = draws.std(0) / 400**0.5
    assert (error < 0.3 * squared_norm(x).mean().sqrt() * squared_norm(y).mean().sqrt()).all()
    assert ((draws.mean(0) - exact).abs() <= 4.5 * error + 1e-9).all()


@pytest.mark.montecarlo
@pytest.mark.parametrize("kind", KINDS)
def test_error_falls_with_the_dimension(kind):
    """Root mean square error over 100 seeds: 16 times the entries, about a quarter of it."""
    x = linear(i=40, o=50)
    exact = squared_norm(x)
    errors = []
    for dim in (8, 8 * (4 if kind == "factored" else 16)):
        draws = torch.stack(
            [
                squared_norm(project("layer", x, Projection(kind=kind, dim=dim, seed=seed)))
                for seed in range(100)
            ]
        )
        errors.append(((draws - exact) / exact).square().mean().sqrt())
    assert errors[1] < 0.5 * errors[0]


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"kind": "gaussian"}, "kind must be one of"),
        ({"dim": 0}, "dim must be an integer of at least 1"),
        ({"dim": -1}, "dim must be an integer of at least 1"),
        ({"block_mib": 0}, "block_mib must be an integer of at least 1"),
    ],
)
def test_projection_that_makes_no_sense_is_refused(options, match):
    with pytest.raises(ValueError, match=match):
        Projection(**options)
