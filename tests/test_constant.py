"""Linear factors whose bias belongs to something else than 1, against sums over positions."""

import pytest
import torch

from gradtrail.factors import (
    DenseGradient,
    GramMemo,
    JoinMemo,
    LinearFactors,
    SumGradient,
    concatenate,
    cross_gram,
    map_tensors,
    materialize,
    merge_uses,
    move,
    paired_products,
    position_gram,
    select,
    squared_norm,
    tensors_of,
    to_dense,
    write_dense,
)
from gradtrail.factors import gram as gram_module

F64 = torch.float64
EXACT = {"rtol": 1e-10, "atol": 1e-12}
ROUTES = [None, "factored", "materialized"]
GROUPS = [1, 2]


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def draw(*shape):
    return torch.randn(*shape, dtype=F64)


def factors(b, s=3, *, constant=True, groups=1, has_bias=True):
    return LinearFactors(
        draw(b, s, 4), draw(b, s, 6), has_bias, groups, draw(b, s) if constant else None
    )


def per_position(x):
    """Weight and bias entries of every position, by loops. ``[b, s, d]``."""
    b, s, i = x.activation_bsi.shape
    o, width = x.output_gradient_bso.shape[2], i // x.groups
    found = torch.zeros(b, s, o * width + o, dtype=F64)
    for row in range(b):
        for place in range(s):
            a, g = x.activation_bsi[row, place], x.output_gradient_bso[row, place]
            for out in range(o):
                group = out // (o // x.groups)
                own = a[group * width : (group + 1) * width]
                found[row, place, out * width : (out + 1) * width] = g[out] * own
                if x.has_bias:
                    one = 1.0 if x.constant_bs is None else x.constant_bs[row, place]
                    found[row, place, o * width + out] = g[out] * one
    return found


def rows(x):
    if isinstance(x, SumGradient):
        return sum(rows(part) for part in x.parts)
    if isinstance(x, DenseGradient):
        return x.values_bd
    return per_position(x).sum(1)


def close(got, expected):
    torch.testing.assert_close(got, expected, **EXACT)


KINDS = {
    "constant": lambda b, s=3, groups=1: factors(b, s, groups=groups),
    "one": lambda b, s=3, groups=1: factors(b, s, constant=False, groups=groups),
    "sum": lambda b, s=3, groups=1: SumGradient(
        (factors(b, s, groups=groups), factors(b, s, constant=False, groups=groups))
    ),
    "written": lambda b, s=3, groups=1: to_dense(factors(b, s, groups=groups)),
}


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("right", KINDS)
@pytest.mark.parametrize("left", KINDS)
def test_inner_products(left, right, route, groups):
    x, y = KINDS[left](3, groups=groups), KINDS[right](2, 5, groups=groups)
    close(cross_gram(x, y, route=route), rows(x) @ rows(y).t())
    close(cross_gram(x, y, route=route, memo=GramMemo()), rows(x) @ rows(y).t())


@pytest.mark.parametrize("constants", [(True, False), (False, True), (True, True)])
def test_a_shared_token_gram_is_not_spoiled_by_a_constant(constants):
    memo = GramMemo()
    x, y = factors(3, constant=constants[0]), factors(2, constant=constants[1])
    plain = LinearFactors(x.activation_bsi, draw(3, 3, 6))
    other = LinearFactors(y.activation_bsi, draw(2, 3, 6))
    for left, right in ((x, y), (plain, other), (x, y)):
        expected = (
            rows(left) @ rows(right).t()
            if left.has_bias
            else torch.einsum("bsot,qsot->bq", *_products(left, right))
        )
        close(cross_gram(left, right, route="factored", memo=memo), expected)


def _products(x, y):
    return [
        torch.einsum("bso,bsi->boi", z.output_gradient_bso, z.activation_bsi).unsqueeze(1)
        for z in (x, y)
    ]


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("right", KINDS)
@pytest.mark.parametrize("left", ["constant", "one", "sum"])
def test_shares_of_positions(left, right, groups):
    x, y = KINDS[left](3, groups=groups), KINDS[right](2, 5, groups=groups)
    parts = x.parts if isinstance(x, SumGradient) else (x,)
    expected = sum(per_position(part) for part in parts) @ rows(y).t()
    close(position_gram(x, y), expected)
    close(position_gram(x, y).sum(1), cross_gram(x, y))


@pytest.mark.parametrize("per_position_too", [False, True])
def test_queries_in_chunks(monkeypatch, per_position_too):
    x, y = factors(3, 2), factors(5, 4)
    monkeypatch.setattr(gram_module, "_CHUNK_ENTRIES", 3 * 2 * 4)
    close(cross_gram(x, y, route="factored"), rows(x) @ rows(y).t())
    if per_position_too:
        close(position_gram(x, y), per_position(x) @ rows(y).t())


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("kind", ["constant", "sum"])
def test_squared_norms(kind, route, groups):
    x = KINDS[kind](3, groups=groups)
    close(squared_norm(x, route=route), rows(x).square().sum(1))


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("right", KINDS)
@pytest.mark.parametrize("left", KINDS)
def test_paired_products(left, right, groups):
    x, y = KINDS[left](3, groups=groups), KINDS[right](3, 5, groups=groups)
    close(paired_products(x, y), (rows(x) * rows(y)).sum(1))


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("kind", KINDS)
def test_written_out(kind, groups):
    x = KINDS[kind](3, groups=groups)
    close(to_dense(x).values_bd, rows(x))
    out = torch.full_like(rows(x), torch.nan)
    write_dense(x, out)
    close(out, rows(x))
    width = 4 // groups
    weight, bias = rows(x)[:, : 6 * width].view(3, 6, width), rows(x)[:, 6 * width :]
    close(materialize(x), torch.cat([weight, bias.unsqueeze(-1)], -1))


@pytest.mark.parametrize("groups", GROUPS)
def test_written_in_the_scratch_space(groups):
    x = factors(3, groups=groups)
    close(GramMemo().written(x).values_bd, rows(x))


def test_a_constant_without_a_bias_counts_nothing():
    x = factors(3, has_bias=False)
    expected = torch.einsum("bso,bsi->boi", x.output_gradient_bso, x.activation_bsi).flatten(1)
    close(to_dense(x).values_bd, expected)
    close(squared_norm(x), expected.square().sum(1))
    y = factors(2)
    close(cross_gram(x, y, route="factored"), expected @ rows(y)[:, :24].t())
    close(cross_gram(y, x, route="materialized"), rows(y)[:, :24] @ expected.t())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_widened(dtype):
    x = move(factors(3), dtype=dtype)
    assert x.constant_bs.dtype == dtype
    wide = move(x, dtype=F64)
    for got, expected in (
        (to_dense(x).values_bd, rows(wide)),
        (squared_norm(x, route="factored"), rows(wide).square().sum(1)),
        (squared_norm(x, route="materialized"), rows(wide).square().sum(1)),
        (cross_gram(x, x, route="factored"), rows(wide) @ rows(wide).t()),
        (cross_gram(x, x, route="materialized"), rows(wide) @ rows(wide).t()),
        (position_gram(x, to_dense(x)), per_position(wide) @ rows(wide).t()),
    ):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("index", [slice(1, 3), torch.tensor([2, 0])], ids=["slice", "numbers"])
def test_selected(index):
    x = factors(4)
    part = select(x, index)
    close(part.constant_bs, x.constant_bs[index])
    close(rows(part), rows(x)[index])


@pytest.mark.parametrize("lengths", [(3, 3), (3, 5)], ids=["same", "ragged"])
@pytest.mark.parametrize("constants", [(True, True), (True, False), (False, True), (False, False)])
def test_joined_over_batches(constants, lengths):
    pairs = zip(constants, lengths, strict=True)
    pieces = [factors(2, length, constant=constant) for constant, length in pairs]
    whole = concatenate(pieces, JoinMemo())
    assert (whole.constant_bs is None) == (not any(constants))
    close(rows(whole), torch.cat([rows(piece) for piece in pieces]))


def test_joined_sums():
    pieces = [KINDS["sum"](2), factors(3, 5)]
    close(rows(concatenate(pieces)), torch.cat([rows(piece) for piece in pieces]))


@pytest.mark.parametrize("constants", [(True, True), (True, False), (False, True), (False, False)])
def test_merged_uses(constants):
    uses = SumGradient(tuple(factors(2, constant=constant) for constant in constants))
    merged = merge_uses(uses)
    assert isinstance(merged, LinearFactors)
    assert (merged.constant_bs is None) == (not any(constants))
    close(rows(merged), rows(uses))


def test_every_tensor_is_moved_and_listed():
    x = factors(2)
    assert any(tensor is x.constant_bs for tensor in tensors_of(x))
    doubled = map_tensors(x, lambda tensor: 2 * tensor)
    close(doubled.constant_bs, 2 * x.constant_bs)
    assert move(x, dtype=torch.float32).constant_bs.dtype == torch.float32


def test_shape_is_checked():
    with pytest.raises(ValueError, match=r"constant_bs must be \(2, 3\), got \(2, 4\)"):
        LinearFactors(draw(2, 3, 4), draw(2, 3, 6), True, 1, draw(2, 4))  # noqa: FBT003
