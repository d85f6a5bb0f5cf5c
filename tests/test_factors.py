"""The algebra of per-example gradients against plain sums over examples, positions and entries."""

import math

import pytest
import torch

from gradtrail import factors
from gradtrail.factors import (
    DenseGradient,
    EmbeddingFactors,
    GramMemo,
    JoinMemo,
    LinearFactors,
    ScaleFactors,
    SumGradient,
    concatenate,
    cross_gram,
    dense_size,
    map_tensors,
    materialize,
    merge_uses,
    move,
    position_gram,
    positions_of,
    prefers_dense,
    select,
    squared_norm,
    tensors_of,
    to_dense,
)
from gradtrail.factors import gram as gram_module

EXACT = {"rtol": 1e-10, "atol": 1e-12}
ROUTES = [None, "factored", "materialized"]
V, D = 6, 4  # a table of 6 rows of 4, tied to a projection onto 6


def draw(*shape, dtype=torch.float64, seed=None):
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator).to(dtype)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def linear(b, s=3, i=D, o=V, *, has_bias=False, groups=1):
    return LinearFactors(draw(b, s, i), draw(b, s, o), has_bias, groups)


def bias_alone(b, s=3, o=V):
    return LinearFactors(draw(b, s, 0), draw(b, s, o), has_bias=True)


def table(b, s=3, *, padding_idx=None):
    return EmbeddingFactors(torch.randint(0, V, (b, s)), draw(b, s, D), V, padding_idx)


def scale(b, s=3, d=D, *, has_bias=True):
    return ScaleFactors(draw(b, s, d), draw(b, s, d), has_bias)


def dense(b, *, has_bias=False):
    return DenseGradient(draw(b, V * D + has_bias * V), (V, D), has_bias)


# kind -> makes b examples with s positions; every pair within a family describes one parameter
FAMILIES = {
    "linear": {
        "linear": linear,
        "written": lambda b, s=3: to_dense(linear(b, s)),
        "sum": lambda b, s=3: SumGradient((linear(b, s), linear(b, s + 1))),
    },
    "linear with bias": {
        "linear": lambda b, s=3: linear(b, s, has_bias=True),
        "written": lambda b, s=3: to_dense(linear(b, s, has_bias=True)),
        "sum": lambda b, s=3: SumGradient(tuple(linear(b, s, has_bias=True) for _ in range(2))),
    },
    "one input": {"linear": lambda b, s=3: linear(b, s, i=1, o=1, has_bias=True)},
    "groups": {
        "linear": lambda b, s=3: linear(b, s, i=4, o=6, groups=2, has_bias=True),
        "written": lambda b, s=3: to_dense(linear(b, s, i=4, o=6, groups=2, has_bias=True)),
        "sum": lambda b, s=3: SumGradient(
            tuple(linear(b, s, i=4, o=6, groups=2, has_bias=True) for _ in range(2))
        ),
    },
    "depthwise": {"linear": lambda b, s=3: linear(b, s, i=6, o=6, groups=6)},
    "bias alone": {
        "bias": bias_alone,
        "written": lambda b, s=3: to_dense(bias_alone(b, s)),
        "sum": lambda b, s=3: SumGradient((bias_alone(b, s), bias_alone(b, s))),
    },
    "tied": {
        "linear": linear,
        "table": table,
        "both": lambda b, s=3: SumGradient((linear(b, s), table(b, s))),
        "written": lambda b, *_: dense(b),
        "written sum": lambda b, s=3: SumGradient((table(b, s), dense(b))),
    },
    "tied with padding": {
        "linear": linear,
        "table": lambda b, s=3: table(b, s, padding_idx=2),
        "both": lambda b, s=3: SumGradient((linear(b, s), table(b, s, padding_idx=2))),
    },
    "scale": {
        "scale": scale,
        "written": lambda b, s=3: to_dense(scale(b, s)),
        "sum": lambda b, s=3: SumGradient((scale(b, s), scale(b, s))),
    },
    "scale without bias": {"scale": lambda b, s=3: scale(b, s, has_bias=False)},
}
KINDS = [(family, kind) for family, kinds in FAMILIES.items() for kind in kinds]
PAIRS = [
    (family, left, right) for family, kinds in FAMILIES.items() for left in kinds for right in kinds
]
# with positions, of one length
SHARED_OUT = [
    (family, left, right)
    for family, left, right in PAIRS
    if "written" not in left and (family, left) != ("linear", "sum")
]


def make(family, kind, *args):
    return FAMILIES[family][kind](*args)


def entries(gradient):
    """Every entry of every example by loops over positions: weight row-major, then bias."""
    if isinstance(gradient, SumGradient):
        return sum(entries(part) for part in gradient.parts)
    if isinstance(gradient, DenseGradient):
        return gradient.values_bd.double()
    return torch.stack([_row(gradient, b) for b in range(gradient.num_examples)])


def _row(gradient, b):
    if isinstance(gradient, EmbeddingFactors):
        rows = torch.zeros(gradient.num_embeddings, gradient.output_gradient_bso.shape[2]).double()
        for s, index in enumerate(gradient.index_bs[b].tolist()):
            if index != gradient.padding_idx:
                rows[index] += gradient.output_gradient_bso[b, s].double()
        return rows.flatten()
    if isinstance(gradient, ScaleFactors):
        a, g = gradient.activation_bsd[b].double(), gradient.output_gradient_bsd[b].double()
        weight = torch.einsum("sd,sd->d", a, g)
    else:
        a, g = gradient.activation_bsi[b].double(), gradient.output_gradient_bso[b].double()
        blocks = zip(a.chunk(gradient.groups, -1), g.chunk(gradient.groups, -1), strict=True)
        weight = torch.cat([torch.einsum("si,so->oi", x, y).flatten() for x, y in blocks])
    return torch.cat([weight, g.sum(0)]) if gradient.has_bias else weight


# ---------------------------------------------------------------- writing out


@pytest.mark.parametrize(("family", "kind"), KINDS)
def test_to_dense_equals_sums_over_positions(family, kind):
    gradient = make(family, kind, 3)
    written = to_dense(gradient)
    torch.testing.assert_close(written.values_bd, entries(gradient), **EXACT)
    assert written.values_bd.shape == (3, dense_size(gradient))
    assert to_dense(written) is written


def test_materialize_is_the_matrix_of_the_layer():
    x = linear(3, has_bias=True)
    a = torch.cat([x.activation_bsi, torch.ones(3, 3, 1)], -1)
    expected = torch.einsum("bso,bsi->boi", x.output_gradient_bso, a)
    torch.testing.assert_close(materialize(x), expected, **EXACT)
    torch.testing.assert_close(materialize(to_dense(x)), expected, **EXACT)
    y = linear(3)
    expected = torch.einsum("bso,bsi->boi", y.output_gradient_bso, y.activation_bsi)
    torch.testing.assert_close(materialize(y), expected, **EXACT)


def test_materialize_of_groups_holds_each_groups_own_inputs():
    x = linear(3, i=4, o=6, groups=2)
    a, g = x.activation_bsi.unflatten(2, (2, 2)), x.output_gradient_bso.unflatten(2, (2, 3))
    expected = torch.einsum("bsgo,bsgi->bgoi", g, a).flatten(1, 2)
    torch.testing.assert_close(materialize(x), expected, **EXACT)


def test_materialize_of_tables_and_scales():
    x = table(3, 4)
    one_hot = torch.nn.functional.one_hot(x.index_bs, V).double()
    expected = torch.einsum("bsv,bso->bvo", one_hot, x.output_gradient_bso)
    torch.testing.assert_close(materialize(x), expected, **EXACT)
    y = scale(3)
    weight = (y.activation_bsd * y.output_gradient_bsd).sum(1)
    expected = torch.stack([weight, y.output_gradient_bsd.sum(1)], -1)
    torch.testing.assert_close(materialize(y), expected, **EXACT)
    torch.testing.assert_close(materialize(scale(3, has_bias=False)).shape, torch.Size([3, D]))


def test_materialize_of_a_bias_alone_is_one_column():
    x = bias_alone(3)
    expected = x.output_gradient_bso.sum(1).unsqueeze(-1)
    torch.testing.assert_close(materialize(x), expected, **EXACT)


# ---------------------------------------------------------------- inner products


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("family", "left", "right"), PAIRS)
def test_cross_gram_equals_inner_products_of_entries(family, left, right, route):
    x, y = make(family, left, 3, 2), make(family, right, 5, 4)
    got = cross_gram(x, y, route=route, memo=GramMemo())
    torch.testing.assert_close(got, entries(x) @ entries(y).t(), **EXACT)


@pytest.mark.parametrize("entries_at_once", [1, 20])
@pytest.mark.parametrize("route", ["factored", "materialized"])
@pytest.mark.parametrize(("family", "left", "right"), PAIRS)
def test_chunks_do_not_change_inner_products(
    family, left, right, route, entries_at_once, monkeypatch
):
    x, y = make(family, left, 3, 2), make(family, right, 5, 4)
    expected = entries(x) @ entries(y).t()
    monkeypatch.setattr(gram_module, "_CHUNK_ENTRIES", entries_at_once)
    got = cross_gram(x, y, route=route, memo=GramMemo())
    torch.testing.assert_close(got, expected, **EXACT)


@pytest.mark.parametrize("entries_at_once", [None, 1, 20])
@pytest.mark.parametrize(("family", "left", "right"), SHARED_OUT)
def test_position_shares_sum_to_the_inner_product(
    family, left, right, entries_at_once, monkeypatch
):
    x, y = make(family, left, 3, 2), make(family, right, 5, 4)
    if entries_at_once is not None:
        monkeypatch.setattr(gram_module, "_CHUNK_ENTRIES", entries_at_once)
    shares = position_gram(x, y, memo=GramMemo())
    assert shares.shape == (3, 2, 5)
    torch.testing.assert_close(shares.sum(1), entries(x) @ entries(y).t(), **EXACT)
    for s in range(2):
        alone = map_tensors(x, lambda tensor, s=s: tensor[:, s : s + 1])
        torch.testing.assert_close(shares[:, s], entries(alone) @ entries(y).t(), **EXACT)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("family", "kind"), KINDS)
def test_squared_norm_is_the_diagonal(family, kind, route):
    x = make(family, kind, 3)
    expected = entries(x).square().sum(1)
    torch.testing.assert_close(squared_norm(x, route=route), expected, **EXACT)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("family", "kind"), KINDS)
def test_no_queries_and_no_examples(family, kind, route):
    x, none = make(family, kind, 3), select(make(family, kind, 3), slice(0, 0))
    assert cross_gram(x, none, route=route).shape == (3, 0)
    assert cross_gram(none, x, route=route).shape == (0, 3)
    assert squared_norm(none, route=route).shape == (0,)
    assert to_dense(none).values_bd.shape == (0, dense_size(x))
    if (family, kind, kind) in SHARED_OUT:
        assert position_gram(x, none).shape == (3, 3, 0)
        assert position_gram(none, x).shape == (0, 3, 3)


@pytest.mark.parametrize("has_bias", [True, False])
def test_a_bias_counts_only_where_both_have_one(has_bias):
    x, y = linear(3, has_bias=True), linear(2, has_bias=has_bias)
    weights = entries(x)[:, : V * D] @ entries(y)[:, : V * D].t()
    expected = entries(x) @ entries(y).t() if has_bias else weights
    for left, right in ((x, y), (x, to_dense(y)), (to_dense(x), y)):
        torch.testing.assert_close(cross_gram(left, right), expected, **EXACT)
        torch.testing.assert_close(cross_gram(right, left), expected.t(), **EXACT)


def test_many_positions_and_few_agree_on_both_routes():
    for s, t in ((1, 50), (50, 1), (50, 50)):
        x, y = linear(3, s, has_bias=True), linear(2, t, has_bias=True)
        factored = cross_gram(x, y, route="factored")
        torch.testing.assert_close(factored, cross_gram(x, y, route="materialized"), **EXACT)


# ---------------------------------------------------------------- precision


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("family", "left", "right"), PAIRS)
def test_low_precision_accumulates_in_float32(family, left, right, route, dtype):
    x = move(make(family, left, 3, 40), dtype=dtype)
    y = move(make(family, right, 2, 40), dtype=dtype)
    got, expected = cross_gram(x, y, route=route), entries(x) @ entries(y).t()
    assert got.dtype == torch.float32
    size = entries(x).norm(dim=1).unsqueeze(1) * entries(y).norm(dim=1)
    assert ((got - expected).abs() <= 1e-5 * size).all()
    norms = squared_norm(x, route=route)
    assert norms.dtype == torch.float32
    torch.testing.assert_close(norms.double(), entries(x).square().sum(1), rtol=1e-5, atol=0)


def test_float16_sums_beyond_its_range_stay_finite():
    x = LinearFactors(torch.full((1, 4, 2), 200.0).half(), torch.full((1, 4, 2), 300.0).half())
    for route in ("factored", "materialized"):
        for value in (cross_gram(x, x, route=route), squared_norm(x, route=route)):
            assert value.item() == pytest.approx(4 * (4 * 200 * 300) ** 2, rel=1e-6)


@pytest.mark.parametrize("route", ROUTES)
def test_mixed_precision_keeps_the_wider(route):
    x, y = linear(3), move(linear(2), dtype=torch.bfloat16)
    got = cross_gram(x, y, route=route)
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, entries(x) @ entries(y).t(), rtol=1e-6, atol=1e-6)


# ---------------------------------------------------------------- shared token Gram matrices


def test_memo_answers_for_the_same_pair_of_inputs(monkeypatch):
    calls = []
    plain = gram_module._token_gram
    monkeypatch.setattr(gram_module, "_token_gram", lambda *a: calls.append(a) or plain(*a))
    a, c = draw(3, 2, D), draw(4, 2, D)
    memo = GramMemo()
    for has_bias in (True, False, True):
        x = LinearFactors(a, draw(3, 2, V), has_bias)
        y = LinearFactors(c, draw(4, 2, V), has_bias)
        got = cross_gram(x, y, route="factored", memo=memo)
        torch.testing.assert_close(got, entries(x) @ entries(y).t(), **EXACT)
    assert sum(left is a for left, _ in calls) == 1
    assert memo.token_gram(a, c) is memo.token_gram(a, c)
    first = memo.token_gram(a, c)
    assert memo.token_gram(a, c.clone()) is not first
    assert memo.token_gram(a, c) is not first
    memo.clear()
    assert memo._key is None
    assert memo._gram is None


# ---------------------------------------------------------------- joining, cutting, moving


@pytest.mark.parametrize(("family", "kind"), KINDS)
def test_concatenate_and_select_undo_each_other(family, kind):
    pieces = [make(family, kind, b, s) for b, s in ((2, 3), (1, 5), (3, 1))]
    joined = concatenate(pieces)
    assert joined.num_examples == 6
    torch.testing.assert_close(entries(joined), torch.cat([entries(p) for p in pieces]), **EXACT)
    torch.testing.assert_close(entries(select(joined, slice(2, 3))), entries(pieces[1]), **EXACT)
    order = torch.tensor([5, 0, 0])
    torch.testing.assert_close(entries(select(joined, order)), entries(joined)[order], **EXACT)
    assert concatenate(pieces[:1]) is pieces[0]


def test_concatenate_pads_with_positions_of_zero_gradient():
    joined = concatenate([linear(2, 3), linear(1, 5)])
    assert joined.num_positions == 5
    assert not joined.output_gradient_bso[:2, 3:].any()


def test_concatenate_keeps_inputs_shared():
    inputs = [draw(2, 3, D), draw(1, 5, D)]
    memo = JoinMemo()
    one, two = (
        concatenate([LinearFactors(a, draw(*a.shape[:2], V)) for a in inputs], memo)
        for _ in range(2)
    )
    assert one.activation_bsi is two.activation_bsi
    alone = concatenate([LinearFactors(a, draw(*a.shape[:2], V)) for a in inputs])
    assert alone.activation_bsi is not one.activation_bsi


def test_concatenate_of_batches_that_used_a_layer_more_or_less_often():
    twice, once = SumGradient((linear(2), linear(2))), linear(3, 5)
    for pieces in ([twice, once], [once, twice], [once, twice, once]):
        joined = concatenate(pieces)
        assert len(joined.parts) == 2
        torch.testing.assert_close(
            entries(joined), torch.cat([entries(p) for p in pieces]), **EXACT
        )
    pieces = [SumGradient((linear(2), table(2))), table(3)]
    torch.testing.assert_close(
        entries(concatenate(pieces)), torch.cat([entries(p) for p in pieces]), **EXACT
    )


def test_merge_uses_joins_positions():
    uses = SumGradient((linear(3, 2, has_bias=True), linear(3, 4, has_bias=True)))
    merged = merge_uses(uses)
    assert isinstance(merged, LinearFactors)
    assert merged.num_positions == 6
    torch.testing.assert_close(entries(merged), entries(uses), **EXACT)


def test_merge_uses_leaves_what_cannot_be_joined():
    for gradient in (
        linear(3),
        SumGradient((linear(3), table(3))),
        SumGradient((linear(3), linear(3, has_bias=True))),
        SumGradient((scale(3), scale(3))),
    ):
        assert merge_uses(gradient) is gradient


@pytest.mark.parametrize(("family", "kind"), KINDS)
def test_move_changes_floating_parts_only(family, kind):
    x = make(family, kind, 3)
    moved = move(x, device="cpu", dtype=torch.bfloat16)
    for before, after in zip(tensors_of(x), tensors_of(moved), strict=True):
        expected = torch.bfloat16 if before.is_floating_point() else before.dtype
        assert after.dtype == expected
    pairs = zip(tensors_of(x), tensors_of(move(x)), strict=True)
    assert all(before is after for before, after in pairs)


def test_positions_of_factors():
    assert positions_of(linear(3, 5)) == {5}
    assert positions_of(SumGradient((linear(3, 5), table(3, 2), dense(3)))) == {5, 2}
    assert positions_of(dense(3)) == set()


# ---------------------------------------------------------------- the cost rule


def test_cheaper_route_counts_multiplications():
    few, many = linear(4, 1, 50, 50), linear(4, 100, 3, 3)
    assert factors.cheaper_route(few, few) == "factored"
    assert factors.cheaper_route(many, many) == "materialized"
    assert factors.cheaper_norm_route(few) == "factored"
    assert factors.cheaper_norm_route(many) == "materialized"
    # writing 4 queries out pays once many examples meet them
    long = linear(4, 20, 10, 10)
    assert factors.cheaper_route(long, long) == "materialized"
    assert factors.cheaper_route(linear(1, 1, 10, 10), linear(1, 1, 10, 10)) == "factored"


def test_prefers_dense_where_many_positions_meet():
    assert prefers_dense(dense(2), num_train=100, num_query=2)
    assert prefers_dense(scale(2), num_train=100, num_query=2)
    assert prefers_dense(linear(2, 100, 3, 3), num_train=100, num_query=2)
    assert not prefers_dense(linear(2, 1, 100, 100), num_train=100, num_query=2)


def test_accumulation_dtype_is_float32_or_wider():
    assert factors.accumulation_dtype(torch.bfloat16, torch.float16) == torch.float32
    assert factors.accumulation_dtype(torch.bfloat16, torch.float64) == torch.float64


# ---------------------------------------------------------------- shape errors


@pytest.mark.parametrize(
    ("build", "match"),
    [
        (lambda: LinearFactors(draw(2, 3, 4), draw(2, 4, 4)), r"\(2, 3, 4\) and \(2, 4, 4\)"),
        (lambda: LinearFactors(draw(2, 4), draw(2, 4)), "activation_bsi and output_gradient_bso"),
        (lambda: linear(2, i=3, o=4, groups=2), "groups must divide i=3 and o=4, got 2"),
        (lambda: linear(2, i=4, o=3, groups=2), "groups must divide i=4 and o=3, got 2"),
        (
            lambda: EmbeddingFactors(torch.zeros(2, 3).long(), draw(2, 4, 5), 9),
            r"index_bs and output_gradient_bso must be .* \(2, 3\) and \(2, 4, 5\)",
        ),
        (lambda: ScaleFactors(draw(2, 3, 4), draw(2, 3, 5)), r"both be \[b, s, d\]"),
        (lambda: ScaleFactors(draw(2, 3), draw(2, 3)), r"both be \[b, s, d\]"),
        (lambda: DenseGradient(draw(2, 7), (2, 3)), r"values_bd must be \[b, 6\].*\(2, 7\)"),
        (lambda: DenseGradient(draw(2, 6), (2, 3), has_bias=True), r"must be \[b, 8\]"),
    ],
)
def test_factors_that_do_not_fit_are_refused(build, match):
    with pytest.raises(ValueError, match=match):
        build()


def test_written_out_gradients_have_no_positions():
    with pytest.raises(TypeError, match="x must hold factors with positions, got DenseGradient"):
        position_gram(dense(2), dense(2))


def test_sizes():
    assert (
        math.prod((V, D)) == dense_size(dense(2)) == dense_size(linear(2)) == dense_size(table(2))
    )
    assert dense_size(scale(2)) == 2 * D


def test_factors_without_weight_and_bias_are_zero():
    x = LinearFactors(torch.zeros(3, 2, 0), torch.randn(3, 2, 4))
    for route in ("factored", "materialized"):
        assert not cross_gram(x, x, route=route).any()
        assert not squared_norm(x, route=route).any()
    biased = LinearFactors(x.activation_bsi, x.output_gradient_bso, has_bias=True)
    for route in ("factored", "materialized"):
        total = x.output_gradient_bso.sum(1)
        got = cross_gram(biased, biased, route=route)
        torch.testing.assert_close(got, total @ total.t(), rtol=1e-5, atol=1e-5)
