"""Products that go to oneDNN where it is faster: the same numbers, and nothing left behind."""

import copy
from contextlib import ExitStack
from inspect import signature

import pytest
import torch
from models import build, text_rows
from torch import nn
from torch.nn import functional as F

import gradtrail
from gradtrail.factors import (
    LinearFactors,
    cross_gram,
    outer_sums,
    pieces,
    product,
    products,
    to_dense,
)
from gradtrail.factors.pieces import long_products
from gradtrail.hooks import linear_products
from gradtrail.hooks.fused import fuse_elementwise
from gradtrail.kronecker import symmetric
from gradtrail.kronecker.symmetric import add_products, mirror
from gradtrail.machine import cpu_vendor

SINGLE = {"rtol": 1e-5, "atol": 1e-5}

needs_onednn = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"),
    reason="this PyTorch was built without oneDNN",
)


@pytest.fixture
def onednn(monkeypatch):
    """Every product of any size goes to oneDNN; gives the shapes that did."""
    seen = []

    def counted(x_mk, weight_nk, bias_n=None):
        seen.append((tuple(x_mk.shape), tuple(weight_nk.shape)))
        return run(x_mk, weight_nk, bias_n)

    run = products.linear
    monkeypatch.setattr(products, "_is_faster_here", lambda: True)
    for name in ("_ENOUGH", "_ENOUGH_ROWS", "_ENOUGH_AN_EXAMPLE", "_ENOUGH_POSITIONS"):
        monkeypatch.setattr(products, name, 1)
    for module in (products, pieces, symmetric, linear_products):
        monkeypatch.setattr(module, "linear", counted)
    return seen


def laid_out(rows, columns, layout):
    if layout == "transposed":
        return torch.randn(columns, rows).t()
    if layout == "rows":
        return torch.randn(rows, columns)
    wide = torch.randn(rows, columns + 3)[:, :columns]
    return wide if layout == "gaps" else torch.randn(columns, rows + 1)[:, :rows].t()


LAYOUTS = ["rows", "transposed", "gaps", "transposed gaps"]


@needs_onednn
@pytest.mark.parametrize("right", LAYOUTS)
@pytest.mark.parametrize("left", LAYOUTS)
def test_a_product_is_the_product_however_it_is_laid_out(onednn, left, right):
    torch.manual_seed(0)
    x, y = laid_out(7, 5, left), laid_out(5, 6, right)
    expected = x.double() @ y.double()
    torch.testing.assert_close(product(x, y).double(), expected, **SINGLE)
    assert len(onednn) == 1


@needs_onednn
@pytest.mark.parametrize("onto", [True, False], ids=["onto", "anew"])
@pytest.mark.parametrize("layout", ["plain", "columns", "gaps", "few"])
def test_outer_sums_of_every_example(onednn, layout, onto):
    torch.manual_seed(0)
    b, s = (0, 4) if layout == "few" else (3, 4)
    g, a = torch.randn(b, s, 9), torch.randn(b, s, 7)
    g = g[:, :, 2:6] if layout == "columns" else g
    a = a[:, :, 1:6] if layout == "gaps" else a
    out = torch.full((b, g.shape[2], a.shape[2]), torch.nan) if onto else None
    got = outer_sums(g, a, out)
    assert not onto or got.data_ptr() == out.data_ptr()
    expected = torch.einsum("bso,bsi->boi", g.double(), a.double())
    torch.testing.assert_close(got.double(), expected, **SINGLE)
    assert len(onednn) == b


@needs_onednn
@pytest.mark.parametrize("rows", [3, 8, 700])
def test_the_layout_and_the_number_of_rows_change_no_bit(onednn, rows):
    torch.manual_seed(0)
    x, y = torch.randn(rows, 300), torch.randn(300, 40)
    expected = product(x, y)
    wide = torch.cat([y, torch.randn(300, 3)], 1)[:, :40]
    for left, right in ((x, wide), (x.t().contiguous().t(), y.t().contiguous().t())):
        assert torch.equal(product(left, right), expected)
    assert torch.equal(product(x[:2], wide), expected[:2])
    assert len(onednn) == 4


@needs_onednn
@pytest.mark.parametrize("width", [5, 128, 300])
def test_sums_of_products_are_symmetric_and_right(onednn, width):
    torch.manual_seed(0)
    x = torch.randn(40, width + 1)[:, :width]
    total = torch.zeros(width, width)
    add_products(total, x)
    add_products(total, 2 * x)
    expected = 5 * x.double().t() @ x.double()
    torch.testing.assert_close(mirror(total[None])[0].double(), expected, rtol=1e-5, atol=1e-4)
    assert len(onednn) == 2 * -(-width // 128)


@needs_onednn
@pytest.mark.parametrize("entries", [9000, 1 << 18])
def test_very_long_rows_keep_their_digits(onednn, entries):
    torch.manual_seed(0)
    x, y = torch.rand(40, entries), torch.rand(4, entries + 1)[:, :entries]
    torch.testing.assert_close(
        long_products(x, y).double(), x.double() @ y.double().t(), rtol=1e-6, atol=0
    )
    assert len(onednn) == int(entries == 9000)


@needs_onednn
def test_what_onednn_is_not_asked_for(onednn):
    x = torch.randn(4, 4)
    assert products.suits_onednn(4, 64, x, x)
    assert not products.suits_onednn(4, 0, x)
    assert not products.suits_onednn(0, 64, x)
    others = [x.double(), x.bfloat16(), x.to("meta"), x.clone().requires_grad_(), Labelled(x)]
    others += [x.to_sparse(), x.to_mkldnn()]
    for other in others:
        assert not products.suits_onednn(4, 64, x, other)
    assert products.suits_onednn(4, 64, x, nn.Parameter(x, requires_grad=False))
    with torch.no_grad():
        assert products.suits_onednn(4, 64, nn.Parameter(x))
    graph = torch.randn(4, 4, requires_grad=True)
    product(graph, x).sum().backward()
    torch.testing.assert_close(graph.grad, x.sum(1).expand(4, 4))
    assert not onednn


@needs_onednn
def test_settings_of_pytorch_are_kept_to(onednn):
    x = torch.randn(4, 4)
    was = torch.backends.mkldnn.enabled
    torch._C._set_mkldnn_enabled(False)
    try:
        product(x, x)
        assert linear_products.linear_forward(nn.Linear(4, 4)) is None
    finally:
        torch._C._set_mkldnn_enabled(was)
    torch.set_float32_matmul_precision("medium")
    try:
        product(x, x)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert not onednn
    product(x, x)
    assert len(onednn) == 1


@needs_onednn
def test_shapes_that_do_not_fit_are_refused_by_pytorch_in_its_words(onednn):
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        product(torch.randn(3, 6), torch.randn(5, 4))
    g, a = torch.randn(2, 3, 4), torch.randn(2, 3, 5)
    for given in ((g, a[:, :2]), (g, a[:1])):
        with pytest.raises(RuntimeError, match="batch"):
            outer_sums(*given)
    with pytest.raises(RuntimeError, match="dtype"):
        outer_sums(g, a, torch.empty(2, 4, 5, dtype=torch.float64))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        linear_products.linear_forward(nn.Linear(5, 4).requires_grad_(False))(torch.randn(3, 6))
    assert not onednn


@needs_onednn
def test_outer_sums_of_large_layers_come_in_strips(onednn, monkeypatch):
    monkeypatch.setattr(products, "_STRIP", 14)
    g, a = torch.randn(2, 3, 5), torch.randn(2, 3, 7)
    expected = torch.einsum("bso,bsi->boi", g, a)
    torch.testing.assert_close(outer_sums(g, a), expected, **SINGLE)
    assert [x for x, _ in onednn] == [(2, 3), (2, 3), (1, 3)] * 2


class Labelled(torch.Tensor):
    """A tensor with meaning of its own."""


@pytest.mark.parametrize(
    ("vendor", "capability", "expected"),
    [
        ("AuthenticAMD", "AVX512", True),
        ("AuthenticAMD", "AVX512_VNNI", True),
        ("AuthenticAMD", "AVX2", False),
        ("GenuineIntel", "AVX512", False),
        (None, "AVX512", False),
    ],
)
@needs_onednn
def test_the_processor_decides(monkeypatch, vendor, capability, expected):
    monkeypatch.setattr(products, "cpu_vendor", lambda: vendor)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    assert products._is_faster_here.__wrapped__() is expected


@needs_onednn
@pytest.mark.parametrize("fault", ["wrong", "raises", "absent"])
def test_onednn_that_is_not_right_is_not_used(monkeypatch, fault):
    def raising(*_):
        raise RuntimeError("no kernel")

    monkeypatch.setattr(products, "cpu_vendor", lambda: "AuthenticAMD")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    if fault == "absent":
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    else:
        wrong = F.linear if fault == "wrong" else raising
        monkeypatch.setattr(products, "linear", lambda x, w, b: wrong(x, w, 2 * b))
    assert products._is_faster_here.__wrapped__() is False


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("processor\t: 0\nvendor_id\t: AuthenticAMD\nmodel\t\t: 2\n", "AuthenticAMD"),
        ("processor\t: 0\nvendor_id\t: GenuineIntel\n", "GenuineIntel"),
        ("processor\t: 0\nCPU implementer\t: 0x41\n", None),
        ("vendor_id :\n", None),
        (None, None),
    ],
)
def test_the_vendor_is_read_from_the_kernel(tmp_path, text, expected):
    if text is not None:
        (tmp_path / "proc").mkdir()
        (tmp_path / "proc" / "cpuinfo").write_text(text, encoding="utf-8")
    assert cpu_vendor(tmp_path) == expected


def conv1d(inputs, outputs):
    from transformers.pytorch_utils import Conv1D

    return Conv1D(outputs, inputs)


@needs_onednn
@pytest.mark.parametrize("shape", [(5,), (3, 5), (2, 3, 5), (2, 0, 5)])
@pytest.mark.parametrize("kind", [nn.Linear, conv1d, "no bias"])
def test_a_linear_layer_and_its_input_gradient(onednn, kind, shape):
    torch.manual_seed(0)
    layer = nn.Linear(5, 4, bias=False) if kind == "no bias" else kind(5, 4)
    layer.requires_grad_(False)
    forward = linear_products.linear_forward(layer)
    x = torch.randn(shape, requires_grad=True)
    inputs, found = (x, x.clone().detach().requires_grad_()), []
    for one, run in zip(inputs, (layer, forward), strict=True):
        y = run(one)
        found.append((y, *torch.autograd.grad((y**2).sum(), one)))
    for mine, own in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(mine, own)
    assert len(onednn) == (2 if x.numel() and x.dim() > 1 else 0)
    with torch.no_grad():
        assert not forward(x).requires_grad


@needs_onednn
@pytest.mark.parametrize("kind", [nn.Linear, conv1d])
def test_gradients_of_input_gradients(onednn, kind):
    torch.manual_seed(0)
    layer = kind(5, 4).requires_grad_(False)
    layer.weight.normal_()
    forward, x = linear_products.linear_forward(layer), torch.randn(3, 5)
    found = [
        torch.autograd.functional.hessian(lambda v, run=run: (run(v) ** 3).sum(), x)
        for run in (layer, forward)
    ]
    assert found[0].abs().max() > 0.1
    torch.testing.assert_close(found[1], found[0])
    assert onednn


@needs_onednn
def test_the_result_may_be_changed_in_place(onednn):
    layer = nn.Linear(5, 4).requires_grad_(False)
    forward = linear_products.linear_forward(layer)
    for x in (torch.randn(3, 5, requires_grad=True), torch.randn(2, 3, 5, requires_grad=True)):
        expected = torch.autograd.grad((layer(x) * 2).relu().sum(), x)[0]
        y = forward(x)
        y *= 2
        y.relu_()
        torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], expected)
    assert onednn


@needs_onednn
@pytest.mark.parametrize(
    "bias",
    [torch.arange(8.0)[::2], torch.ones(1).expand(4), torch.ones(1), torch.ones(1, 4)],
    ids=["strided", "expanded", "one", "row"],
)
def test_biases_that_are_no_plain_row(onednn, bias):
    layer = nn.Linear(5, 4).requires_grad_(False)
    layer.bias = nn.Parameter(bias, requires_grad=False)
    x = torch.randn(3, 5)
    torch.testing.assert_close(linear_products.linear_forward(layer)(x), layer(x))
    assert not onednn


@needs_onednn
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_inside_transforms_and_tracers_the_own_forward_runs(onednn):
    layer = nn.Linear(5, 4).requires_grad_(False)
    forward, x = linear_products.linear_forward(layer), torch.randn(3, 5)
    torch.testing.assert_close(torch.func.vmap(forward)(x), layer(x))
    got = torch.func.jvp(forward, (x,), (x,))
    torch.testing.assert_close(got[1], x @ layer.weight.t())
    with torch.autograd.forward_ad.dual_level():
        dual = forward(torch.autograd.forward_ad.make_dual(x, x))
        assert torch.autograd.forward_ad.unpack_dual(dual).tangent is not None
    assert not onednn
    forward(x)
    assert len(onednn) == 1


@needs_onednn
def test_what_is_not_strided_goes_the_own_way(onednn):
    layer, x = nn.Linear(5, 4).requires_grad_(False), torch.randn(3, 5)
    forward = linear_products.linear_forward(layer)
    torch.testing.assert_close(forward(x.to_sparse()), layer(x))
    nested = torch.nested.nested_tensor([x, x[:2]], layout=torch.jagged)
    torch.testing.assert_close(forward(nested).unbind()[1], layer(x[:2]))
    assert not onednn


class Vmapped(nn.Module):
    """Transforms layers in its forward, a norm of the Llama kind among them."""

    def __init__(self, norm):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(5, 6), norm, nn.Linear(6, 4)

    def forward(self, x):
        return self.last(torch.func.vmap(lambda row: self.norm(self.first(row)))(x))


@needs_onednn
@pytest.mark.usefixtures("onednn")
def test_a_model_that_transforms_its_layers():
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    torch.manual_seed(0)
    model, rows = Vmapped(LlamaRMSNorm(6)), [(torch.randn(5), torch.tensor(1)) for _ in range(4)]
    given = {"layers": ["last"], "batch_size": 2, "progress": False}
    found = gradtrail.attribute(model, rows, rows[:2], **given).values
    exact = gradtrail.attribute(
        model.double(),
        [(x.double(), y) for x, y in rows],
        [(x.double(), y) for x, y in rows[:2]],
        **given,
    ).values
    torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-6)


@needs_onednn
def test_a_copy_made_during_a_pass_has_its_own_weights(onednn):
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    model = nn.Sequential(nn.Linear(5, 5), LlamaRMSNorm(5)).requires_grad_(False)
    with ExitStack() as stack:
        fuse_elementwise(model, stack)
        assert signature(model[0].forward) == signature(nn.Linear(5, 5).forward)
        copied = copy.deepcopy(model)
    copied[0].weight.zero_()
    copied[0].bias.fill_(1)
    copied[1].weight.fill_(2)
    torch.testing.assert_close(copied(torch.randn(3, 5)), torch.full((3, 5), 2.0))
    assert onednn
    assert "forward" not in vars(model[0])


class Doubling(nn.Linear):
    """Has a forward of its own."""

    def forward(self, x):
        return 2 * super().forward(x)


@needs_onednn
def test_layers_and_calls_that_stay_as_they_are(onednn):
    layer = nn.Linear(5, 4)
    forward, x = linear_products.linear_forward(layer), torch.randn(3, 5)
    for other in (Doubling(5, 4), nn.Conv1d(3, 3, 1), nn.Bilinear(2, 2, 2)):
        assert linear_products.linear_forward(other) is None
    forward(x).sum().backward()  # trained weights get their gradients
    torch.testing.assert_close(layer.bias.grad, torch.full((4,), 3.0))
    layer.weight.requires_grad_(False)
    forward(x)  # a trained bias alone as well
    layer.requires_grad_(False)
    forward(input=x)
    forward(Labelled(x))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert forward(x).dtype == torch.bfloat16
    layer.double()
    forward(x.double())
    with pytest.raises(RuntimeError, match="dtype"):
        forward(x)
    assert not onednn
    layer.float()
    forward(x)
    assert len(onednn) == 1


METHODS = {
    "graddot": {},
    "projected": {"projection": 4},
    "token": {"granularity": "token"},
    "kfac": {"method": "kfac"},
    "ekfac": {"method": "ekfac"},
    "streamed": {"method": "ekfac", "gradient_budget": 0},
}


def scores_of(model, rows, options):
    return gradtrail.attribute(
        model, rows[:6], rows[6:], batch_size=4, progress=False, **options
    ).values


@needs_onednn
@pytest.mark.parametrize("options", METHODS.values(), ids=METHODS)
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_scores_are_the_same_by_either_library(request, name, options):
    torch.manual_seed(0)
    model, rows = build(name, torch.float32), text_rows((5, 3, 7, 4, 6, 2, 5, 3, 4))
    expected = scores_of(model, rows, options)
    used = request.getfixturevalue("onednn")
    got = scores_of(model, rows, options)
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-5 * float(expected.abs().max()))
    assert len(used) > 20
    before = len(used)
    again = scores_of(model, rows, options)
    assert torch.equal(got, again)
    assert len(used) > before
    assert not any("forward" in vars(module) for module in model.modules())
    exact = scores_of(model.double(), rows, options)  # never asked for in float64
    torch.testing.assert_close(
        got.double(), exact.double(), rtol=1e-2, atol=1e-4 * float(exact.abs().max())
    )


@needs_onednn
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_gradients_agree_with_plain_autograd(onednn, name):
    torch.manual_seed(0)
    model, rows = build(name, torch.float32), text_rows((6, 6, 6, 6))
    batch = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
    report = gradtrail.check(model, batch)
    assert report.ok
    assert onednn


@needs_onednn
def test_inner_products_of_either_form(onednn):
    torch.manual_seed(0)
    x, y = (LinearFactors(torch.randn(b, 6, 5), torch.randn(b, 6, 4), True) for b in (3, 2))
    expected = to_dense(x).values_bd.double() @ to_dense(y).values_bd.double().t()
    for route in ("factored", "materialized"):
        before = len(onednn)
        torch.testing.assert_close(cross_gram(x, y, route=route).double(), expected, **SINGLE)
        assert len(onednn) > before
