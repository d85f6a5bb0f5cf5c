"""Wide gradients that are written out in pieces: the same inner products, in little space."""

import pytest
import torch
from models import build, text_rows

import gradtrail
from gradtrail.factors import DenseGradient, GramMemo, LinearFactors, cross_gram, pieces, to_dense


def factors(b, s, i, o, *, dtype=torch.float64, **options):
    return LinearFactors(torch.randn(b, s, i).to(dtype), torch.randn(b, s, o).to(dtype), **options)


@pytest.fixture
def small_pieces(monkeypatch):
    """Every layer is wide, and a piece a few rows high; gives the widths that were asked for."""
    monkeypatch.setattr(pieces, "_WIDE", 0)
    monkeypatch.setattr(pieces, "_PIECE", 1)
    monkeypatch.setattr(pieces, "_ROWS", 3)
    asked, take = [], pieces.WriteSpace.take

    def counted(space, count, width, like):
        asked.append((count, width))
        return take(space, count, width, like)

    monkeypatch.setattr(pieces.WriteSpace, "take", counted)
    return asked


@pytest.mark.parametrize("constant", [False, True], ids=["one", "constant"])
@pytest.mark.parametrize("biases", [(False, False), (True, False), (False, True), (True, True)])
def test_products_equal_those_of_the_whole(small_pieces, biases, constant):
    torch.manual_seed(0)
    x, y = (factors(b, 5, 4, 11, has_bias=bias) for b, bias in zip((3, 2), biases, strict=True))
    if constant and x.has_bias:
        x = LinearFactors(
            x.activation_bsi, x.output_gradient_bso, True, constant_bs=torch.randn(3, 5).double()
        )
    dense = to_dense(y)
    got = cross_gram(x, dense)
    assert small_pieces == [(3, 8), (3, 12), (3, 12), (3, 12)]
    whole = to_dense(x).values_bd
    width = 44 + 11 * (x.has_bias and y.has_bias)
    expected = whole[:, :width] @ dense.values_bd[:, :width].t()
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("first", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("second", [torch.float32, torch.bfloat16, torch.float64])
def test_products_take_the_wider_dtype(small_pieces, first, second):
    torch.manual_seed(0)
    x = factors(2, 3, 4, 7, dtype=first, has_bias=True)
    y = DenseGradient(torch.randn(3, 35).to(second), (7, 4), has_bias=True)
    got = cross_gram(x, y)
    wide = torch.float64 if torch.float64 in (first, second) else torch.float32
    assert got.dtype == wide
    assert len(small_pieces) == 3
    expected = to_dense(x).values_bd.double() @ y.values_bd.double().t()
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(0, 5, 4, 7), (2, 0, 4, 7), (2, 5, 4, 1)])
def test_nothing_and_a_single_row(small_pieces, shape):
    x, y = factors(*shape), factors(3, 2, shape[2], shape[3])
    got = cross_gram(x, to_dense(y))
    expected = to_dense(x).values_bd @ to_dense(y).values_bd.t()
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    assert small_pieces or not x.num_examples or not x.num_positions


def test_space_does_not_grow_with_the_layer():
    memo = GramMemo()
    x = factors(8, 2, 1024, 1024, dtype=torch.float32)  # 32 MiB written out
    y = DenseGradient(torch.randn(2, 1 << 20), (1024, 1024))
    got = cross_gram(x, y, memo=memo)
    assert memo.space.take(1, 1, got).untyped_storage().nbytes() == 4 << 20
    torch.testing.assert_close(got, to_dense(x).values_bd @ y.values_bd.t(), rtol=1e-3, atol=0.5)


def test_groups_and_narrow_layers_are_written_whole(small_pieces, monkeypatch):
    grouped, y = factors(2, 3, 4, 8, groups=2), factors(3, 3, 4, 8, groups=2)
    expected = to_dense(grouped).values_bd @ to_dense(y).values_bd.t()
    torch.testing.assert_close(cross_gram(grouped, to_dense(y)), expected, rtol=1e-12, atol=1e-12)
    monkeypatch.setattr(pieces, "_WIDE", 1 << 22)
    plain, y = factors(2, 3, 4, 8), to_dense(factors(3, 3, 4, 8))
    cross_gram(plain, y)
    assert small_pieces == [(2, 16), (2, 32)]


@pytest.mark.parametrize("method", ["graddot", "gradcos"])
def test_scores_are_equal(small_pieces, monkeypatch, method):
    model, rows = build("llama"), text_rows()
    monkeypatch.setattr("gradtrail.attribution.queries.prefers_dense", lambda *_, **__: True)
    options = {"method": method, "batch_size": 2, "progress": False}
    got = gradtrail.attribute(model, rows, rows[:2], **options).values
    assert small_pieces
    monkeypatch.setattr(pieces, "_WIDE", 1 << 22)
    expected = gradtrail.attribute(model, rows, rows[:2], **options).values
    torch.testing.assert_close(got, expected, rtol=1e-8, atol=1e-8)
