"""Curvature of tensors: covariances, damped inverses, corrected eigenvalues and the fit's file.

Expected values are dense Kronecker products of float64 sums over positions.
"""

import json
import math
import struct
import warnings
from functools import partial

import pytest
import torch

from gradtrail import CurvatureError, GradTrailWarning
from gradtrail.factors import (
    DenseGradient,
    EmbeddingFactors,
    LinearFactors,
    ScaleFactors,
    SumGradient,
    cross_gram,
    move,
    to_dense,
)
from gradtrail.kronecker import (
    FIT_FILE,
    CorrectedMoments,
    CovarianceAccumulator,
    Damping,
    DenseCurvature,
    DenseMoments,
    DiagonalCurvature,
    DiagonalMoments,
    EKFACCurvature,
    KFACCurvature,
    KroneckerFit,
    LayerRecord,
    Scratch,
    load_fit,
    save_fit,
    signature,
    to_matrices,
)
from gradtrail.kronecker import moments as moments_module
from gradtrail.kronecker.damping import inverted, unseen_below
from gradtrail.kronecker.matrices import from_matrices, turn_factors, turned_matrices
from gradtrail.kronecker.symmetric import add_products, check_finite, damped_inverse, decompose
from gradtrail.store import TensorCache

F64 = torch.float64
CPU = torch.device("cpu")
EXACT = {"rtol": 1e-9, "atol": 1e-11}


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def draw(*shape, dtype=F64):
    return torch.randn(*shape, dtype=F64).to(dtype)


def linear(b, s=3, i=4, o=6, *, bias=True, groups=1, zeros=0):
    """Factors whose first positions of the first example have no gradient."""
    g = draw(b, s, o)
    g[0, :zeros] = 0
    return LinearFactors(draw(b, s, i), g, bias, groups)


def close(got, expected, **tolerance):
    torch.testing.assert_close(got, expected, **{**EXACT, **tolerance})


def uses_of(gradient):
    return gradient.parts if isinstance(gradient, SumGradient) else (gradient,)


def inputs(part):
    """``[t, g, j]`` with the bias's constant."""
    a = part.activation_bsi.double().flatten(0, 1).unflatten(1, (part.groups, -1))
    if not part.has_bias:
        return a
    one = torch.ones(a.shape[0], dtype=F64) if part.constant_bs is None else part.constant_bs
    return torch.cat([a, one.reshape(-1, 1, 1).expand(-1, part.groups, 1)], 2)


def gradients(part):
    return part.output_gradient_bso.double().flatten(0, 1).unflatten(1, (part.groups, -1))


def matrices(gradient):
    """``[b, g, o, j]`` by a sum over positions."""
    total = 0
    for part in uses_of(gradient):
        b = part.num_examples
        a, g = inputs(part), gradients(part)
        products = torch.einsum("tgo,tgj->tgoj", g, a)
        total = total + products.unflatten(0, (b, -1)).sum(1)
    return total


def dense_covariances(layers, name):
    """``A``, ``S``, ``P``; ``layers`` all read one input and come in lists of batches."""
    sum_a = sum_s = positions = count = 0
    for batch in range(len(layers[name])):
        every = [uses_of(one[batch]) for one in layers.values()]
        for use in range(len(every[0])):
            keep = torch.stack([(gradients(u[use]) != 0).any(2).any(1) for u in every]).any(0)
            a, g = (
                inputs(uses_of(layers[name][batch])[use]),
                gradients(uses_of(layers[name][batch])[use]),
            )
            sum_a = sum_a + torch.einsum("t,tgi,tgj->gij", keep.double(), a, a)
            sum_s = sum_s + torch.einsum("tgo,tgp->gop", g, g)
            positions += int(keep.sum())
        count += layers[name][batch].num_examples
    return sum_a / positions, sum_s / count, positions


def accumulate(batches, *, max_side=512):
    """Covariances of ``[{layer: gradient}]``, a backward each."""
    found = CovarianceAccumulator(max_side=max_side)
    count = 0
    for batch in batches:
        for name, gradient in batch.items():
            found.add(name, gradient)
        found.end_backward()
        count += next(iter(batch.values())).num_examples
    return found.result(count)


def spread(*sides):
    """A covariance per group and its eigenbasis."""
    x = draw(*sides[:-1], 3 * sides[-1], sides[-1])
    return x.transpose(-1, -2) @ x / x.shape[-2]


# ---------------------------------------------------------------- covariances

GRADIENTS = {
    "bias": lambda b: linear(b),
    "no bias": lambda b: linear(b, bias=False),
    "positions without a gradient": lambda b: linear(b, zeros=2),
    "groups": lambda b: linear(b, groups=2, zeros=1),
    "groups without a bias": lambda b: linear(b, groups=2, bias=False),
    "bias alone": lambda b: linear(b, i=0),
    "two uses": lambda b: SumGradient((linear(b, 2, zeros=1), linear(b, 3))),
    "wider than a strip": lambda b: linear(b, 2, i=300, o=140),
}


@pytest.mark.parametrize("kind", GRADIENTS)
def test_covariances(kind):
    batches = [GRADIENTS[kind](3), GRADIENTS[kind](2)]
    found = accumulate([{"layer": batch} for batch in batches])["layer"]
    cov_a, cov_s, positions = dense_covariances({"layer": batches}, "layer")
    close(found.activation_cov_gii, cov_a)
    close(found.gradient_cov_goo, cov_s)
    assert (found.num_positions, found.num_examples, found.input_of) == (positions, 5, "layer")


def test_a_gradient_beyond_the_first_entries_counts():
    g = torch.zeros(1, 3, 40, dtype=F64)
    g[0, 1, 39] = 2.0
    x = LinearFactors(draw(1, 3, 4), g)
    found = accumulate([{"layer": x}])["layer"]
    assert found.num_positions == 1
    close(found.activation_cov_gii[0], torch.outer(*[x.activation_bsi[0, 1]] * 2))


def test_no_position_with_a_gradient():
    found = accumulate([{"layer": LinearFactors(draw(2, 3, 4), torch.zeros(2, 3, 5).double())}])
    assert found["layer"].num_positions == 0
    assert not found["layer"].activation_cov_gii.any()
    assert not found["layer"].gradient_cov_goo.any()


def shared(a, *zeros, bias=True):
    """Factors that read one input; each with a gradient of 0 at its own position."""
    found = []
    for zero in zeros:
        g = draw(*a.shape[:2], 3)
        if zero is not None:
            g[:, zero] = 0
        found.append(LinearFactors(a, g, bias))
    return found


def test_layers_that_read_one_input_share_it():
    batches = [dict(zip("qkv", shared(draw(2, 4, 5), 0, 0, None), strict=True)) for _ in range(2)]
    batches += [dict(zip("qkv", shared(draw(2, 4, 5), 1, 1, 1), strict=True))]
    found = accumulate(batches)
    layers = {name: [batch[name] for batch in batches] for name in "qkv"}
    for name in "qkv":
        cov_a, cov_s, positions = dense_covariances(layers, name)
        assert found[name].activation_cov_gii is found["q"].activation_cov_gii
        assert found[name].input_of == "q"
        assert found[name].num_positions == positions == 8 + 8 + 6
        close(found[name].activation_cov_gii, cov_a)
        close(found[name].gradient_cov_goo, cov_s)


def test_one_input_with_and_without_a_bias_is_not_shared():
    a = draw(2, 3, 5)
    batch = {"with": shared(a, None)[0], "without": shared(a, None, bias=False)[0]}
    found = accumulate([batch])
    assert found["without"].input_of == "without"
    assert found["without"].activation_cov_gii.shape == (1, 5, 5)
    close(found["with"].activation_cov_gii[:, :5, :5], found["without"].activation_cov_gii)


def test_layers_that_part_ways_keep_what_each_has_read():
    one, two = draw(2, 3, 5), draw(2, 3, 5)
    q, k = shared(one, None, None)
    together = {"q": q, "k": k}
    apart = {"q": shared(two, None)[0]}  # k was not called in this backward
    found = accumulate([together, apart])
    a_q = torch.cat([inputs(q), inputs(apart["q"])])
    close(found["q"].activation_cov_gii, torch.einsum("tgi,tgj->gij", a_q, a_q) / len(a_q))
    a_k = inputs(k)
    close(found["k"].activation_cov_gii, torch.einsum("tgi,tgj->gij", a_k, a_k) / len(a_k))
    assert found["q"].num_positions == 12
    assert found["k"].num_positions == 6


def test_a_layer_that_joins_late():
    q = shared(draw(2, 3, 5), None)[0]
    both = dict(zip("qk", shared(draw(2, 3, 5), None, None), strict=True))
    found = accumulate([{"q": q}, both])
    assert found["q"].num_positions == 12
    assert found["k"].num_positions == 6
    close(found["k"].activation_cov_gii, dense_covariances({"k": [both["k"]]}, "k")[0])
    close(found["q"].activation_cov_gii, dense_covariances({"q": [q, both["q"]]}, "q")[0])


def test_many_inputs_wait_at_once():
    tensors = [draw(2, 3, 5) for _ in range(7)]
    batch = {f"layer {n}": shared(a, None)[0] for n, a in enumerate(tensors)}
    found = accumulate([batch])
    for name, gradient in batch.items():
        close(found[name].activation_cov_gii, dense_covariances({name: [gradient]}, name)[0])


def test_an_input_that_comes_again_after_many_others():
    """Beyond the few inputs that wait, each layer has its own sum: over its own positions."""
    a, others = draw(2, 3, 5), [draw(2, 3, 5) for _ in range(6)]
    first, last = shared(a, 0, None)
    batch = {"first": first, **{f"{n}": shared(x, None)[0] for n, x in enumerate(others)}}
    batch["last"] = last
    found = accumulate([batch, batch])
    for name, gradient in (("first", first), ("last", last)):
        assert found[name].input_of == name
        cov_a, _, positions = dense_covariances({name: [gradient, gradient]}, name)
        assert found[name].num_positions == positions
        close(found[name].activation_cov_gii, cov_a)


def test_result_may_leave_the_sums():
    batch = {"layer": linear(3)}
    accumulator = CovarianceAccumulator(max_side=16)
    accumulator.add("layer", batch["layer"])
    with pytest.raises(RuntimeError, match="end_backward must be called before result"):
        accumulator.result(3)
    accumulator.end_backward()
    first = accumulator.result(3, consume=False)["layer"]
    assert accumulator.names == ("layer",)
    second = accumulator.result(3)["layer"]
    close(first.activation_cov_gii, second.activation_cov_gii)
    close(first.gradient_cov_goo, second.gradient_cov_goo)
    assert accumulator.names == ()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_sums_are_in_float32(dtype):
    a, g = draw(64, 4, 8, dtype=dtype), draw(64, 4, 5, dtype=dtype)
    x = LinearFactors(a, g, has_bias=True)
    found = accumulate([{"layer": x}])["layer"]
    cov_a, cov_s, _ = dense_covariances({"layer": [x]}, "layer")
    assert found.activation_cov_gii.dtype == found.gradient_cov_goo.dtype == torch.float32
    close(found.activation_cov_gii.double(), cov_a, rtol=1e-5, atol=1e-5)
    close(found.gradient_cov_goo.double(), cov_s, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("side", ["activation", "gradient"])
def test_a_wide_side_is_refused_before_anything_is_allocated(side):
    wide = torch.zeros(1).expand(1, 1, 2_000_000)  # its covariance would take 14.6 TiB
    narrow = torch.ones(1, 1, 3)
    pair = (wide, narrow) if side == "activation" else (narrow, wide)
    accumulator = CovarianceAccumulator(max_side=16384)
    message = (
        r"head must have sides of at most max_factor_dim=16384, got 2000000: its covariance "
        r"would take 14,901\.2 GiB\. Leave it out"
    )

    def add():
        accumulator.add("head", LinearFactors(*pair))
        accumulator.end_backward()

    with pytest.raises(CurvatureError, match=message):
        add()


def test_only_linear_factors_have_covariances():
    with pytest.raises(TypeError, match="gradient must hold linear factors, got ScaleFactors"):
        accumulate([{"norm": ScaleFactors(draw(2, 3, 4), draw(2, 3, 4))}])


@pytest.mark.parametrize("width", [1, 127, 128, 129, 300])
def test_products_of_strips(width):
    x = draw(7, width)
    total = torch.zeros(width, width, dtype=F64)
    add_products(total, x)
    close(total.triu(), (x.t() @ x).triu())


# ---------------------------------------------------------------- damping and inverses


@pytest.mark.parametrize(
    ("damping", "relative", "extra"), [(None, True, 0.2), (0.5, True, 1.0), (0.5, False, 0.5)]
)
def test_damping_is_added_to_a_spectrum(damping, relative, extra):
    assert Damping.of(damping, relative=relative).absolute(2.0) == pytest.approx(extra)


@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf, True, "0.1"])
def test_damping_must_be_a_number(value):
    with pytest.raises(ValueError, match="damping must be a finite number of at least 0, got"):
        Damping.of(value, relative=True)


def test_no_default_is_absolute():
    with pytest.raises(ValueError, match="damping must be given with relative_damping=False"):
        Damping.of(None, relative=False)


def test_inverted_spectra():
    values = torch.tensor([4.0, 1.0, 0.0, 1e-16], dtype=F64)
    close(inverted(values, 0.0), torch.tensor([0.25, 1.0, 0.0, 0.0], dtype=F64))
    close(inverted(values, 1.0), 1 / (values + 1))
    assert float(unseen_below(torch.empty(0))) == 0


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("damping", [Damping(0.0), Damping(0.3), Damping(0.2, relative=False)])
def test_damped_inverses(damping, groups):
    cov = spread(groups, 5)
    extra = damping.strength * (cov.diagonal(dim1=1, dim2=2).mean() if damping.relative else 1)
    expected = torch.linalg.inv(cov + extra * torch.eye(5, dtype=F64))
    before = cov.clone()
    close(damped_inverse(cov, damping, "layer", "covariance A"), expected)
    assert torch.equal(cov, before)


def test_inverse_of_a_singular_covariance_without_damping():
    x = draw(3, 8)
    cov = (x.t() @ x).unsqueeze(0)
    close(
        damped_inverse(cov, Damping(0.0), "layer", "covariance A"),
        torch.linalg.pinv(cov, hermitian=True),
        rtol=1e-7,
    )
    assert not damped_inverse(cov * 0, Damping(0.1), "layer", "covariance A").any()
    assert not damped_inverse(cov * 0, Damping(0.1, relative=False), "layer", "covariance A").any()


def test_a_covariance_of_rounding_errors_below_zero_is_still_inverted():
    cov = torch.diag(torch.tensor([1.0, -1e-9], dtype=F64)).unsqueeze(0)
    found = damped_inverse(cov, Damping(1e-12, relative=False), "layer", "covariance A")
    assert torch.isfinite(found).all()
    close(found[0, 0, 0], torch.tensor(1.0, dtype=F64))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_named(value):
    cov = spread(1, 4)
    cov[0, 1, 2] = value
    message = r"The covariance A of fc must be finite, got 1 entries that are not, of 16"
    for function in (
        lambda: check_finite(cov, "fc", "covariance A"),
        lambda: decompose(cov, "fc", "covariance A"),
        lambda: damped_inverse(cov, Damping(), "fc", "covariance A"),
    ):
        with pytest.raises(CurvatureError, match=message):
            function()


def test_a_decomposition_that_fails_is_named(monkeypatch):
    def fail(_):
        raise torch.linalg.LinAlgError("did not converge")

    monkeypatch.setattr(torch.linalg, "eigh", fail)
    with pytest.raises(CurvatureError, match=r"The eigendecomposition of the covariance S of fc "
                       r"must converge, got did not converge \(diagonal between"):  # fmt: skip
        decompose(spread(1, 4), "fc", "covariance S")


def test_decompositions_are_in_float64():
    cov = spread(2, 6)
    values, vectors = decompose(cov.float(), "fc", "covariance A")
    assert values.dtype == F64
    assert vectors.dtype == torch.float32
    expected = torch.linalg.eigvalsh(cov.float().double())
    close(values, expected)


# ---------------------------------------------------------------- curvature of a layer

LINEAR = {
    "factors": lambda b: linear(b),
    "no bias": lambda b: linear(b, bias=False),
    "many positions": lambda b: linear(b, 40),
    "groups": lambda b: linear(b, groups=2),
    "groups without a bias": lambda b: linear(b, groups=2, bias=False),
    "bias alone": lambda b: linear(b, i=0),
    "two uses": lambda b: SumGradient((linear(b, 2), linear(b, 30))),
    "written": lambda b: to_dense(linear(b)),
}
DAMPINGS = [Damping(0.1), Damping(0.7, relative=False), Damping(0.0)]


def as_matrices(gradient, groups):
    return to_matrices(to_dense(gradient), groups)


def groups_of(gradient):
    part = uses_of(gradient)[0]
    return getattr(part, "groups", 1)


def kron_blocks(o_sides, i_sides):
    return torch.block_diag(*(torch.kron(o, i) for o, i in zip(o_sides, i_sides, strict=True)))


def dense_kfac(cov_a, cov_s, damping):
    sides = []
    for cov in (cov_s, cov_a):
        extra = damping.strength
        if damping.relative:
            extra *= float(cov.diagonal(dim1=1, dim2=2).mean())
        sides.append([torch.linalg.inv(c + extra * torch.eye(len(c), dtype=F64)) for c in cov])
    return kron_blocks(*sides)


@pytest.mark.parametrize("damping", DAMPINGS)
@pytest.mark.parametrize("kind", LINEAR)
def test_kfac(kind, damping):
    x, other = LINEAR[kind](4), LINEAR[kind](3)
    groups = groups_of(x)
    rows, others = (as_matrices(one, groups) for one in (x, other))
    _, g, o, j = rows.shape
    cov_a, cov_s = spread(g, j), spread(g, o)
    curvature = KFACCurvature("fc", cov_a, cov_s)
    solve = dense_kfac(cov_a, cov_s, damping)
    expected = rows.flatten(1) @ solve @ others.flatten(1).t()
    close(cross_gram(x, curvature.precondition(other, damping)), expected)
    close(
        curvature.quadratic(x, damping),
        torch.einsum("bd,de,be->b", rows.flatten(1), solve, rows.flatten(1)),
    )
    close(curvature.mean_eigenvalues()[0], float(cov_a.diagonal(dim1=1, dim2=2).mean()))
    a, s = curvature.spectra()
    assert (a.what, s.what) == ("A", "S")
    close(a.eigenvalues.sort().values, torch.linalg.eigvalsh(cov_a).flatten().sort().values)
    close(s.eigenvalues.sort().values, torch.linalg.eigvalsh(cov_s).flatten().sort().values)


@pytest.mark.parametrize("strength", [1e-7, 1e-4, 0.0])
@pytest.mark.parametrize("kind", [kind for kind in LINEAR if kind != "bias alone"])
def test_kfac_of_float32_with_little_damping(kind, strength):
    """A null direction's ``1 / lambda`` is exact: training gradients along it are rounding only."""
    x = move(LINEAR[kind](4), dtype=torch.float32)
    rows = as_matrices(x, groups_of(x)).double()
    _, g, o, j = rows.shape
    null = torch.nn.functional.normalize(draw(g, j, 1), dim=1)
    keep = torch.eye(j, dtype=F64) - null @ null.transpose(1, 2)
    cov_a = (keep @ spread(g, j) @ keep).float()
    cov_s = spread(g, o).float()
    damping = Damping(strength)
    got = KFACCurvature("fc", cov_a, cov_s).precondition(x, damping)
    rebuilt = as_matrices(got, g)
    assert rebuilt.dtype == torch.float32
    extra = [strength * cov.double().diagonal(dim1=1, dim2=2).mean() for cov in (cov_s, cov_a)]
    if strength:
        sides = [
            torch.linalg.inv(cov.double() + more * torch.eye(cov.shape[1], dtype=F64))
            for cov, more in zip((cov_s, cov_a), extra, strict=True)
        ]
    else:  # what is below float32's precision is no direction
        sides = [
            torch.linalg.pinv(cov.double(), rtol=1e-5, hermitian=True) for cov in (cov_s, cov_a)
        ]
    expected = torch.einsum("gop,bgpj,gjk->bgok", sides[0], rows, sides[1])
    scale = float(expected.abs().max())
    close(rebuilt.double(), expected, rtol=1e-4, atol=1e-4 * scale)


def eigen(gradient, values=None):
    """EK-FAC curvature of a gradient's shape, and its dense basis."""
    rows = as_matrices(gradient, groups_of(gradient))
    _, g, o, j = rows.shape
    q_a, q_s = torch.linalg.eigh(spread(g, j))[1], torch.linalg.eigh(spread(g, o))[1]
    values = draw(g, o, j).square() if values is None else values
    return EKFACCurvature("fc", q_a, q_s, values), kron_blocks(q_s, q_a)


@pytest.mark.parametrize("damping", DAMPINGS)
@pytest.mark.parametrize("kind", LINEAR)
def test_ekfac(kind, damping):
    x, other = LINEAR[kind](4), LINEAR[kind](3)
    rows, others = (as_matrices(one, groups_of(x)).flatten(1) for one in (x, other))
    curvature, basis = eigen(x)
    values = curvature.eigenvalues_goj.flatten()
    extra = damping.strength * (float(values.mean()) if damping.relative else 1)
    solve = basis @ torch.diag(1 / (values + extra)) @ basis.t()
    close(cross_gram(x, curvature.precondition(other, damping)), rows @ solve @ others.t())
    close(curvature.quadratic(x, damping), torch.einsum("bd,de,be->b", rows, solve, rows))
    close(curvature.turned(x).flatten(1), rows @ basis)
    out = torch.empty_like(curvature.turned(x))
    assert curvature.turned(x, out=out, scratch=Scratch()) is out
    close(out.flatten(1), rows @ basis)
    close(curvature.inverse(damping).flatten(), 1 / (values + extra))
    assert curvature.mean_eigenvalues() == (float(values.mean()),)
    assert curvature.spectra()[0].what == "corrected"


@pytest.mark.parametrize("make", [lambda b: linear(b), lambda b: ScaleFactors(draw(b, 3, 4), draw(b, 3, 4), has_bias=True)], ids=["linear", "scale"])  # fmt: skip  # noqa: E501
@pytest.mark.parametrize("damping", DAMPINGS)
def test_dense_fisher(damping, make):
    x, other = make(4), make(3)
    rows, others = to_dense(x).values_bd, to_dense(other).values_bd
    train = draw(3 * rows.shape[1], rows.shape[1])
    fisher = train.t() @ train / len(train)
    extra = damping.strength * (float(fisher.diagonal().mean()) if damping.relative else 1)
    solve = torch.linalg.inv(fisher + extra * torch.eye(len(fisher), dtype=F64))
    curvature = DenseCurvature("norm", fisher)
    close(cross_gram(x, curvature.precondition(other, damping)), rows @ solve @ others.t())
    close(curvature.quadratic(x, damping), torch.einsum("bd,de,be->b", rows, solve, rows))
    (spectrum,) = curvature.spectra()
    close(spectrum.eigenvalues, torch.linalg.eigvalsh(fisher))
    close(curvature.mean_eigenvalues()[0], spectrum.mean)


@pytest.mark.parametrize("damping", DAMPINGS)
def test_diagonal(damping):
    x = EmbeddingFactors(torch.randint(0, 5, (4, 3)), draw(4, 3, 2), 5)
    squares = draw(10).square() + 0.1
    rows = to_dense(x).values_bd
    extra = damping.strength * (float(squares.mean()) if damping.relative else 1)
    curvature = DiagonalCurvature("embed", squares)
    expected = rows @ torch.diag(1 / (squares + extra)) @ rows.t()
    close(cross_gram(x, curvature.precondition(x, damping)), expected)
    close(curvature.quadratic(x, damping), expected.diagonal())
    close(curvature.mean_eigenvalues()[0], float(squares.mean()))
    assert curvature.spectra()[0].what == "diagonal"


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("bias", [True, False])
def test_matrices_and_rows(bias, groups):
    x = linear(3, groups=groups, bias=bias)
    dense = to_dense(x)
    close(to_matrices(dense, groups), matrices(x))
    back = from_matrices(matrices(x), has_bias=bias)
    close(back.values_bd, dense.values_bd)
    assert (back.shape, back.has_bias) == (dense.shape, dense.has_bias)
    m_i, m_o = draw(groups, matrices(x).shape[3], 5), draw(groups, 6 // groups, 2)
    turned = torch.einsum("gok,bgoj,gjm->bgkm", m_o, matrices(x), m_i)
    close(matrices(turn_factors(x, m_i, m_o)), turned)
    close(turned_matrices(x, m_i, m_o), turned)
    close(turned_matrices(dense, m_i, m_o), turned)


# ---------------------------------------------------------------- moments


@pytest.mark.parametrize("chunk", [1, 1 << 24], ids=["one by one", "at once"])
@pytest.mark.parametrize("kind", LINEAR)
def test_corrected_moments(kind, chunk, monkeypatch):
    monkeypatch.setattr(moments_module, "_CHUNK_ENTRIES", chunk)
    batches = [LINEAR[kind](4), LINEAR[kind](3)]
    bases, basis = eigen(batches[0])
    moments, scratch = CorrectedMoments.like(bases), Scratch()
    for batch in batches:
        moments.add(bases, batch, scratch)
    rows = torch.cat([as_matrices(one, groups_of(one)).flatten(1) for one in batches])
    close(moments.sum_goj.flatten(), (rows @ basis).square().sum(0))


def test_moments_of_low_precision_are_float32():
    x = linear(32, 5)
    low = LinearFactors(
        x.activation_bsi.bfloat16(), x.output_gradient_bso.bfloat16(), has_bias=True
    )
    bases, basis = eigen(x)
    bases = EKFACCurvature(
        "fc",
        bases.activation_basis_gjj.float(),
        bases.gradient_basis_goo.float(),
        bases.eigenvalues_goj.float(),
    )
    moments = CorrectedMoments.like(bases)
    moments.add(bases, low, Scratch())
    assert moments.sum_goj.dtype == torch.float32
    expected = (matrices(low).flatten(1) @ basis).square().sum(0)
    close(moments.sum_goj.flatten().double(), expected, rtol=1e-4, atol=1e-3)


def test_dense_moments():
    batches = [linear(4), linear(3)]
    moments = DenseMoments("norm", max_params=30)
    for batch in batches:
        moments.add(batch)
    rows = torch.cat([to_dense(batch).values_bd for batch in batches])
    close(moments.sum_dd, rows.t() @ rows)
    with pytest.raises(CurvatureError, match=r"norm must have at most direct_fisher_max_params=29 "
                       r"entries for a dense Fisher, got 30"):  # fmt: skip
        DenseMoments("norm", max_params=29).add(batches[0])


def tied(b):
    return SumGradient(
        (
            EmbeddingFactors(torch.randint(0, 6, (b, 3)), draw(b, 3, 4), 6),
            linear(b, bias=False),
        )
    )


DIAGONAL = {
    "linear": lambda b: linear(b),
    "table": lambda b: EmbeddingFactors(torch.randint(0, 6, (b, 5)), draw(b, 5, 4), 6),
    "table with padding": lambda b: EmbeddingFactors(
        torch.randint(0, 6, (b, 5)), draw(b, 5, 4), 6, 2
    ),
    "scale": lambda b: ScaleFactors(draw(b, 3, 4), draw(b, 3, 4), has_bias=True),
    "tied": tied,
}


@pytest.mark.parametrize("chunk", [1, 1 << 24], ids=["one by one", "at once"])
@pytest.mark.parametrize("kind", DIAGONAL)
def test_diagonal_moments(kind, chunk, monkeypatch):
    monkeypatch.setattr(moments_module, "_CHUNK_ENTRIES", chunk)
    batches = [DIAGONAL[kind](4), DIAGONAL[kind](3)]
    moments = DiagonalMoments()
    for batch in batches:
        moments.add(batch)
    rows = torch.cat([to_dense(batch).values_bd for batch in batches])
    close(moments.sum_d, rows.square().sum(0))


# ---------------------------------------------------------------- the fit and its report


def full_fit(method, *, dead=False, short=False):
    """A small fit of three layers: two that share an input, and a dense one."""
    count, s = (2, 1) if short else (20, 3)
    a = draw(count, s, 4)
    g = [draw(count, s, 5), draw(count, s, 6) * (0 if dead else 1)]
    batch = {"q": LinearFactors(a, g[0], True), "k": LinearFactors(a, g[1], True)}  # noqa: FBT003
    tensors = TensorCache("memory")
    fit = KroneckerFit(method, tensors, CPU, count, {"method": method, "layers": "q k"})
    found = accumulate([batch])
    expected = {name: (f.activation_cov_gii, f.gradient_cov_goo) for name, f in found.items()}
    if method == "kfac":
        fit.add_covariances(found)
    else:
        fit.add_bases(found, progress=False)
        for name, gradient in batch.items():
            bases = fit.bases(name)
            moments = CorrectedMoments.like(bases)
            moments.add(bases, gradient, Scratch())
            fit.add_eigenvalues(name, moments.sum_goj / count)
    rows = draw(30, 7)
    fit.add_direct("norm", "dense", rows.t() @ rows / 30)
    fit.add_direct("embed", "diagonal", rows.square().mean(0))
    assert not found  # handed over
    return fit, batch, expected


def test_a_fit_holds_a_shared_input_once():
    fit, _, expected = full_fit("kfac")
    names = set(fit.tensors.names())
    assert names == {
        "q:activation_cov", "q:gradient_cov", "k:gradient_cov", "norm:fisher", "embed:squares",
    }  # fmt: skip
    close(fit.curvature("k").activation_cov_gjj, expected["q"][0])
    fit, _, expected = full_fit("ekfac")
    assert {name for name in fit.tensors.names() if "activation" in name} == {"q:activation_basis"}
    basis = fit.curvature("k").activation_basis_gjj
    turned = basis.transpose(1, 2) @ expected["q"][0] @ basis
    close(turned, torch.diag_embed(turned.diagonal(dim1=1, dim2=2)))
    assert [fit.groups(name) for name in ("q", "k", "norm", "embed")] == [1, 1, 0, 0]


def test_the_largest_matrices_are_decomposed_first(monkeypatch):
    sides = []

    def note(cov, layer, what):
        sides.append((cov.shape[-1], layer, what))
        return decompose(cov, layer, what)

    monkeypatch.setattr("gradtrail.kronecker.fit.decompose", note)
    fit = KroneckerFit("ekfac", TensorCache("memory"), CPU, 3)
    batch = {"wide": linear(3, i=9, o=2), "narrow": linear(3, i=3, o=7)}
    fit.add_bases(accumulate([batch]), progress=False)
    assert [side for side, *_ in sides] == [10, 7, 4, 2]
    assert sides[0][1:] == ("wide", "covariance A")


@pytest.mark.parametrize("method", ["kfac", "ekfac"])
def test_what_is_not_finite_is_no_fit(method):
    found = accumulate([{"fc": linear(3)}])
    found["fc"].gradient_cov_goo[0, 0, 0] = math.nan
    fit = KroneckerFit(method, TensorCache("memory"), CPU, 3)
    add = fit.add_covariances if method == "kfac" else partial(fit.add_bases, progress=False)
    with pytest.raises(CurvatureError, match="The covariance S of fc must be finite"):
        add(found)


@pytest.mark.parametrize("kind", ["corrected", "dense", "diagonal"])
def test_second_moments_that_overflow_are_no_fit(kind):
    fit = KroneckerFit("ekfac", TensorCache("memory"), CPU, 3)
    what = {"corrected": "corrected eigenvalues", "dense": "dense Fisher", "diagonal": "diagonal"}
    shapes = {"corrected": (1, 6, 5), "dense": (3, 3), "diagonal": (3,)}
    moments = torch.ones(shapes[kind], dtype=F64)
    moments.view(-1)[0] = math.inf
    add = partial(fit.add_direct, "fc", kind)
    if kind == "corrected":
        fit.add_bases(accumulate([{"fc": linear(3)}]), progress=False)
        add = partial(fit.add_eigenvalues, "fc")
    with pytest.raises(CurvatureError, match=f"The {what[kind]} of fc must be finite, got 1"):
        add(moments)


def test_report():
    fit, _, expected = full_fit("kfac")
    report = fit.describe(0.25)
    rows = {(row.layer, row.what): row for row in report.layers}
    assert set(rows) == {
        ("q", "A"), ("q", "S"), ("k", "A"), ("k", "S"), ("norm", "dense"), ("embed", "diagonal"),
    }  # fmt: skip
    for what, cov in (("A", expected["q"][0]), ("S", expected["q"][1])):
        values = torch.linalg.eigvalsh(cov).flatten()
        row = rows["q", what]
        assert row.width == len(values)
        assert row.trace == pytest.approx(float(values.sum()))
        assert row.condition == pytest.approx(float(values.max() / values.min()))
        share = values / values.sum()
        assert row.effective_rank == pytest.approx(float((-(share * share.log()).sum()).exp()))
        assert row.damping == pytest.approx(0.25 * float(values.mean()))
        assert row.damped == pytest.approx(float((values < row.damping).double().mean()))
    assert fit.describe(3.0, relative_damping=False).layers[0].damping == 3.0
    text = str(report)
    assert text.startswith("kfac fit on 20 examples\nlayer")
    assert all(name in text for name in ("norm", "embed", "diagonal", "eff. rank", "condition"))


def test_report_of_known_spectra():
    fit = KroneckerFit("ekfac", TensorCache("memory"), CPU, 1)
    fit.add_direct("flat", "diagonal", torch.ones(8))
    fit.add_direct("dead", "diagonal", torch.zeros(8))
    fit.add_direct("short", "diagonal", torch.tensor([2.0, 2.0, 0.0, 0.0]))
    flat, dead, short = fit.describe().layers
    assert flat.effective_rank == pytest.approx(8)
    assert flat.condition == 1
    assert (dead.effective_rank, dead.trace, dead.condition) == (0, 0, math.inf)
    assert short.effective_rank == pytest.approx(2)
    assert short.condition == math.inf
    assert short.damped == 0.5


@pytest.mark.parametrize("method", ["kfac", "ekfac"])
def test_dead_layers_are_named(method):
    fit, _, _ = full_fit(method, dead=True)
    with pytest.warns(GradTrailWarning, match=r"1 layers \(k\) have no gradient anywhere"):
        fit.warn_flat(Damping(0.1))


@pytest.mark.parametrize("method", ["kfac", "ekfac"])
def test_directions_without_data_are_named_without_damping(method):
    fit, _, _ = full_fit(method, short=True)
    message = (
        r"2 layers \(q, k\) have directions that the training data do not reach; with damping=0 "
        "these count nothing"
    )
    with pytest.warns(GradTrailWarning, match=message):
        fit.warn_flat(Damping(0.0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit.warn_flat(Damping(0.1))
        full_fit(method)[0].warn_flat(Damping(0.0))


# ---------------------------------------------------------------- the file


@pytest.fixture(params=["kfac", "ekfac"])
def saved(request, tmp_path):
    fit, batch, _ = full_fit(request.param)
    save_fit(fit, tmp_path / "fit", {"strength": [0.1], "relative": True})
    return fit, batch, tmp_path / "fit"


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def load(folder, definition):
    return load_fit(folder, definition, TensorCache("memory"), CPU)


def test_a_fit_comes_back_to_the_bit(saved):
    fit, batch, folder = saved
    again = load(folder, fit.definition)
    assert (again.method, again.num_examples, again.records, again.definition) == (
        fit.method, fit.num_examples, fit.records, fit.definition,
    )  # fmt: skip
    assert sorted(again.tensors.names()) == sorted(fit.tensors.names())
    for name in fit.tensors.names():
        assert torch.equal(again.tensors.get(name), fit.tensors.get(name))
    for name, gradient in batch.items():
        for damping in DAMPINGS:
            got, want = (one.curvature(name).quadratic(gradient, damping) for one in (again, fit))
            assert torch.equal(got, want)
    assert names_in(folder) == [FIT_FILE]


def header_of(path):
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        return json.loads(file.read(size)), size


def test_the_file_records_the_damping_and_any_reader_can_read_it(saved):
    from safetensors.torch import load_file  # noqa: PLC0415

    fit, _, folder = saved
    header, size = header_of(folder / FIT_FILE)
    assert json.loads(header["__metadata__"]["damping"]) == {"strength": [0.1], "relative": True}
    assert size % 8 == 0
    tensors = load_file(folder / FIT_FILE)
    for name in fit.tensors.names():
        assert torch.equal(tensors[name], fit.tensors.get(name))


def test_another_definition_is_refused_with_both_values(saved):
    fit, _, folder = saved
    with pytest.raises(CurvatureError, match=r"fisher_dir must hold a fit of this layers: 'q', got "
                       r"'q k' in .*Pass another folder, or delete the file"):  # fmt: skip
        load(folder, {**fit.definition, "layers": "q"})
    with pytest.raises(CurvatureError, match=r"of this draws: '3', got None"):
        load(folder, {**fit.definition, "draws": "3"})
    with pytest.raises(CurvatureError, match=r"of this layers: None, got 'q k'"):
        load(folder, {"method": fit.method})


@pytest.mark.parametrize("share", [0.0, 0.001, 0.02, 0.5, 0.999])
def test_a_truncated_file_is_refused(saved, share):
    fit, _, folder = saved
    data = (folder / FIT_FILE).read_bytes()
    (folder / FIT_FILE).write_bytes(data[: int(len(data) * share)])
    with pytest.raises(CurvatureError, match="fisher_dir must hold a whole fit, got a damaged"):
        load(folder, fit.definition)


@pytest.mark.parametrize("place", [0, 3, 12, -1, -100])
def test_a_corrupted_file_is_refused(saved, place):
    fit, _, folder = saved
    data = bytearray((folder / FIT_FILE).read_bytes())
    data[place] ^= 0x55
    (folder / FIT_FILE).write_bytes(data)
    with pytest.raises(CurvatureError, match="fisher_dir must hold a"):
        load(folder, fit.definition)


def rewrite(path, change):
    """Change the header's metadata."""
    header, size = header_of(path)
    body = path.read_bytes()[8 + size :]
    change(header["__metadata__"])
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)


BAD_METADATA = {
    "no records": lambda m: m.pop("records"),
    "records that are no JSON": lambda m: m.update(records="{"),
    "records of another shape": lambda m: m.update(records='{"q": 3}'),
    "a number that is none": lambda m: m.update(num_examples="many"),
    "a kind that is none": lambda m: m.update(
        records=m["records"].replace('"kind": "dense"', '"kind": "sparse"')
    ),
}


@pytest.mark.parametrize("kind", BAD_METADATA)
def test_damaged_metadata_are_refused(saved, kind):
    fit, _, folder = saved
    rewrite(folder / FIT_FILE, BAD_METADATA[kind])
    with pytest.raises(CurvatureError, match="fisher_dir must hold a whole fit, got a damaged"):
        load(folder, fit.definition)


def test_another_format_is_refused(saved):
    fit, _, folder = saved
    rewrite(folder / FIT_FILE, lambda metadata: metadata.update(format="other-2"))
    with pytest.raises(CurvatureError, match=r"must hold a fit of format gradtrail-fit-1, got "
                       r"'other-2' in .* Pass another folder"):  # fmt: skip
        load(folder, fit.definition)


def test_a_file_without_a_tensor_is_refused(saved):
    fit, _, folder = saved
    fit.records["more"] = LayerRecord("dense", {"fisher": "more:fisher"})

    def add(metadata):
        records = json.loads(metadata["records"])
        records["more"] = {"kind": "dense", "keys": {"fisher": "more:fisher"}, "num_positions": 0}
        metadata["records"] = json.dumps(records)

    rewrite(folder / FIT_FILE, add)
    with pytest.raises(CurvatureError, match=r"must hold a whole fit, got .* without "
                       r"\['more:fisher'\]"):  # fmt: skip
        load(folder, fit.definition)


def test_nothing_half_written_is_left(saved, monkeypatch):
    fit, _, folder = saved
    before = (folder / FIT_FILE).read_bytes()

    def fail(_):
        raise OSError("disk full")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        save_fit(fit, folder, {})
    assert names_in(folder) == [FIT_FILE]
    assert (folder / FIT_FILE).read_bytes() == before


def test_signatures_tell_states_of_the_file(saved, tmp_path):
    fit, _, folder = saved
    first = signature(folder)
    assert signature(folder) == first
    save_fit(fit, folder, {})
    assert signature(folder) != first
    assert signature(tmp_path / "none") is None


def test_a_dense_gradient_of_the_layer_is_scored_like_its_factors(saved):
    fit, batch, _ = saved
    for name, gradient in batch.items():
        curvature = fit.curvature(name)
        dense = to_dense(gradient)
        assert isinstance(dense, DenseGradient)
        close(
            cross_gram(dense, curvature.precondition(gradient, DAMPINGS[0])),
            cross_gram(gradient, curvature.precondition(dense, DAMPINGS[0])),
        )
