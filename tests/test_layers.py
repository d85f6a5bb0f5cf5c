"""Every layer rule against plain autograd, on the cases it declares and on classes of models."""

import pytest
import torch
from models import model_class
from torch import nn
from torch.nn import functional as F

from gradtrail import reference
from gradtrail.errors import CaptureError, UnsupportedLayerError
from gradtrail.factors import ScaleFactors, to_dense
from gradtrail.hooks.capture import Capture
from gradtrail.hooks.layers import LAYERS, LayerCall, Roles
from gradtrail.hooks.selection import select_layers
from gradtrail.hooks.taps import Taps

# torch's own hint about a copy it makes, for the one case with odd total padding
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")

CASES = {case.label: (rule, case) for rule in LAYERS.rules() for case in rule.cases()}
BY_ROW = [label for label in CASES if not label.endswith(("-offsets", "-last"))]


class Holder(nn.Module):
    """A model around one layer."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, *args):
        return self.layer(*args)


def build(label):
    rule, case = CASES[label]
    torch.manual_seed(0)
    layer, args = case.build(), case.inputs()
    return rule, layer, args, torch.randn_like(layer(*args))


def whole_roles(layer):
    names = dict(layer.named_parameters())
    return Roles("weight" in names, "bias" in names)


def oracle(layer, args, direction):
    """Per-example gradients by autograd; bags of one flat list cannot be cut by row."""
    b = direction.shape[0]
    if all(value.shape[0] == b for value in args if isinstance(value, torch.Tensor)):
        return reference.module_gradients(layer, args, direction)
    return reference.per_example_gradients(
        layer, range(b), lambda layer, row: (layer(*args)[row] * direction[row]).sum()
    )


@torch.no_grad()
def by_rule(rule, layer, args, direction, roles=None):
    call = rule.keep(layer, args, {})
    gradient = rule.layer_gradient(layer, call, direction, roles or whole_roles(layer))
    return rule.to_parameters(layer, to_dense(gradient))


def by_capture(layer, args, direction, **kwargs):
    """Gradients by name from a forward and backward of a model with hooks on."""
    model = Holder(layer)
    units = select_layers(model).units
    rules = {unit.name: unit.owners[0].rule for unit in units}
    got = {}

    def sink(name, gradient):
        got.update(rules[name].to_parameters(layer, to_dense(gradient)))

    taps = Taps(units)
    capture = Capture(direction.shape[0], 1, sink, **kwargs)
    taps.install()
    try:
        with taps.forward(capture):
            output = model(*args)
        with taps.backward(capture):
            output.backward(direction)
        capture.finish()
    finally:
        taps.remove()
    return got


def assert_equal(got, expected, *, rtol=1e-10, relative_to_max=None):
    assert set(got) == set(expected)
    for name, value in expected.items():
        actual, value = got[name].double(), value.double()
        atol = 1e-12 if relative_to_max is None else relative_to_max * float(value.abs().max())
        torch.testing.assert_close(actual, value, rtol=rtol, atol=atol)


def cast(value, dtype):
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.to(dtype)
    return value


# ---------------------------------------------------------------- conformance


@pytest.mark.parametrize("label", CASES)
def test_rule_equals_autograd(label):
    rule, layer, args, direction = build(label)
    assert direction.shape[0] >= 3
    assert_equal(by_rule(rule, layer, args, direction), oracle(layer, args, direction))


@pytest.mark.parametrize("label", CASES)
def test_capture_equals_autograd(label):
    _, layer, args, direction = build(label)
    assert_equal(by_capture(layer, args, direction), oracle(layer, args, direction))


@pytest.mark.parametrize("label", CASES)
def test_roles_of_a_frozen_parameter(label):
    _, layer, args, direction = build(label)
    expected = oracle(layer, args, direction)
    for name in expected:
        if len(expected) > 1:
            layer.requires_grad_(False)
            layer.get_parameter(name).requires_grad_(True)
            assert_equal(by_capture(layer, args, direction), {name: expected[name]})


@pytest.mark.parametrize("label", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_low_precision_accumulates_in_float32(label, dtype):
    rule, layer, args, direction = build(label)
    layer, direction = layer.to(dtype), direction.to(dtype)
    args = tuple(cast(value, dtype) for value in args)
    got = by_rule(rule, layer, args, direction)
    assert all(value.dtype == torch.float32 for value in got.values())
    wide = tuple(cast(value, torch.float64) for value in args)
    expected = oracle(layer.double(), wide, direction.double())
    assert_equal(got, expected, rtol=1e-5, relative_to_max=1e-5)


@pytest.mark.parametrize("label", CASES)
def test_memory_layout_does_not_matter(label):
    rule, layer, args, direction = build(label)
    expected = oracle(layer, args, direction)

    def strided(value):
        if not isinstance(value, torch.Tensor) or value.dim() < 2:
            return value
        return value.movedim(0, -1).contiguous().movedim(-1, 0)

    got = by_rule(rule, layer, tuple(map(strided, args)), strided(direction))
    assert_equal(got, expected)


@pytest.mark.parametrize("label", CASES)
def test_expanded_output_gradient(label):
    rule, layer, args, direction = build(label)
    direction = direction.new_full((), 0.5).expand(direction.shape)
    assert_equal(by_rule(rule, layer, args, direction), oracle(layer, args, direction))


@pytest.mark.parametrize("label", BY_ROW)
@torch.no_grad()
def test_folded_rows_belong_to_their_example(label):
    """A layer that saw batch and rows in one axis, as the capture hands it on."""
    rule, case = CASES[label]
    torch.manual_seed(0)
    layer = case.build()
    pieces = [case.inputs(), case.inputs()]
    args = tuple(
        torch.cat(pair) if isinstance(pair[0], torch.Tensor) and pair[0].dim() else pair[0]
        for pair in zip(*pieces, strict=True)
    )
    direction = torch.randn_like(layer(*args))
    call = rule.keep(layer, args, {})
    call = LayerCall(call.inputs.unflatten(0, (2, -1)), call.extras)
    gradient = rule.layer_gradient(layer, call, direction.unflatten(0, (2, -1)), whole_roles(layer))
    got = rule.to_parameters(layer, to_dense(gradient))
    with torch.enable_grad():
        rows = oracle(layer, args, direction)
    expected = {name: value.unflatten(0, (2, -1)).sum(1) for name, value in rows.items()}
    assert_equal(got, expected)


@pytest.mark.parametrize("label", BY_ROW)
def test_no_examples(label):
    rule, layer, args, direction = build(label)
    args = tuple(value[:0] if isinstance(value, torch.Tensor) else value for value in args)
    got = by_rule(rule, layer, args, direction[:0])
    shapes = {name: (0, *value.shape) for name, value in layer.named_parameters()}
    assert {name: tuple(value.shape) for name, value in got.items()} == shapes


@pytest.mark.parametrize("label", CASES)
def test_layer_is_left_as_it_was(label):
    rule, layer, args, direction = build(label)
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    by_rule(rule, layer, args, direction)
    torch.testing.assert_close(layer.state_dict(), before, rtol=0, atol=0)
    assert all(parameter.grad is None for parameter in layer.parameters())


# ---------------------------------------------------------------- single layers


def test_layers_with_equal_options_share_patches():
    one = nn.Conv2d(4, 2, 3, padding=1)
    two = nn.Conv2d(4, 6, 3, padding=1)
    other = nn.Conv2d(4, 6, 3, padding=1, dilation=2)
    rule = LAYERS.find(one)[0]
    x = torch.randn(3, 4, 5, 5)
    call = rule.keep(one, (x,), {})
    a, b, c = (
        rule.layer_gradient(conv, call, conv(x).detach(), Roles()).activation_bsi
        for conv in (one, two, other)
    )
    assert a is b
    assert a is not c


def test_patches_of_pointwise_kernels_are_views():
    conv = nn.Conv2d(4, 6, 1)
    x = torch.randn(3, 4, 5, 5)
    rule = LAYERS.find(conv)[0]
    factors = rule.layer_gradient(conv, LayerCall(x), conv(x).detach(), Roles())
    assert factors.activation_bsi.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


def test_channels_last_input():
    torch.manual_seed(0)
    for layer in (nn.Conv2d(4, 6, 3), nn.GroupNorm(2, 4), nn.ConvTranspose2d(4, 6, 3)):
        layer.double()
        x = torch.randn(3, 4, 5, 5).double()
        direction = torch.randn_like(layer(x))
        # the oracle keeps the usual order: torch's own backward of GroupNorm crashes on the other
        expected = oracle(layer, (x,), direction)
        x, direction = (v.to(memory_format=torch.channels_last) for v in (x, direction))
        assert_equal(by_rule(LAYERS.find(layer)[0], layer, (x,), direction), expected)


def test_output_size_by_keyword_is_honoured():
    torch.manual_seed(0)

    class Up(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.ConvTranspose1d(2, 3, 3, stride=3, dtype=torch.float64)

        def forward(self, x):
            return self.conv(x, output_size=(17,))

    model, x = Up(), torch.randn(3, 2, 5, dtype=torch.float64)
    direction = torch.randn_like(model(x))
    got = by_rule(LAYERS.find(model.conv)[0], model.conv, (x,), direction)
    expected = oracle(model, (x,), direction)
    assert_equal({f"conv.{name}": value for name, value in got.items()}, expected)


def test_bags_by_keyword_with_weights():
    torch.manual_seed(0)
    layer = nn.EmbeddingBag(7, 4, mode="sum", dtype=torch.float64)
    kwargs = {
        "input": torch.tensor([1, 2, 3, 4], dtype=torch.int32),
        "offsets": torch.tensor([0, 0, 3], dtype=torch.int32),
        "per_sample_weights": torch.randn(4, dtype=torch.float64, requires_grad=True),
    }
    direction = torch.randn(3, 4, dtype=torch.float64)
    rule = LAYERS.find(layer)[0]
    call = rule.keep(layer, (), kwargs)
    got = rule.to_parameters(layer, to_dense(rule.layer_gradient(layer, call, direction, Roles())))
    expected = reference.per_example_gradients(
        layer, range(3), lambda layer, row: (layer(**kwargs)[row] * direction[row]).sum()
    )
    assert not call.extras["weights"].requires_grad
    assert_equal(got, expected)


def test_bags_that_are_all_empty():
    layer = nn.EmbeddingBag(7, 4, mode="mean")
    args = (torch.empty(0, dtype=torch.int64), torch.zeros(3, dtype=torch.int64))
    got = by_rule(LAYERS.find(layer)[0], layer, args, torch.ones(3, 4))
    assert torch.equal(got["weight"], torch.zeros(3, 7, 4))


def test_running_statistics_are_those_of_the_call():
    torch.manual_seed(0)
    layer = nn.InstanceNorm1d(4, affine=True, track_running_stats=True, dtype=torch.float64)
    layer.running_mean.normal_()
    x = torch.randn(3, 4, 5, dtype=torch.float64)
    layer.eval()
    direction = torch.randn_like(layer(x))
    expected = oracle(layer, (x,), direction)
    rule = LAYERS.find(layer)[0]
    call = rule.keep(layer, (x,), {})
    layer.train()
    with torch.no_grad():
        factors = rule.layer_gradient(layer, call, direction, Roles(weight=True, bias=True))
    assert_equal(rule.to_parameters(layer, to_dense(factors)), expected)


# ---------------------------------------------------------------- classes of models


RMS_NORMS = {
    "llama": "LlamaRMSNorm",
    "mistral": "MistralRMSNorm",
    "mixtral": "MixtralRMSNorm",
    "qwen2": "Qwen2RMSNorm",
    "qwen3": "Qwen3RMSNorm",
    "gemma": "GemmaRMSNorm",
    "gemma2": "Gemma2RMSNorm",
    "gemma3": "Gemma3RMSNorm",
    "t5": "T5LayerNorm",
    "mt5": "MT5LayerNorm",
    "udop": "UdopLayerNorm",
}


@pytest.mark.parametrize("model", RMS_NORMS)
@pytest.mark.parametrize("shape", [(3, 5), (3, 4, 5), (3, 2, 4, 5)], ids=len)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_model_norm_is_verified_and_captured(model, shape, dtype):
    torch.manual_seed(0)
    layer = model_class(model, RMS_NORMS[model])(5).to(dtype)
    with torch.no_grad():
        layer.weight.normal_()
    x = torch.randn(shape, dtype=dtype)
    direction = torch.randn_like(layer(x))
    expected = oracle(layer, (x,), direction)
    # Gemma's casts make autograd itself sum in float32
    exact = dtype == torch.float64 and not model.startswith("gemma")
    tolerance = {} if exact else {"rtol": 1e-5, "relative_to_max": 1e-6}
    assert_equal(by_capture(layer, (x,), direction), expected, **tolerance)


@pytest.mark.parametrize("model", ["llama", "gemma", "t5"])
def test_model_norm_in_bfloat16(model):
    torch.manual_seed(0)
    layer = model_class(model, RMS_NORMS[model])(8)
    with torch.no_grad():
        layer.weight.normal_()
    layer.bfloat16()
    x = torch.randn(3, 4, 8).bfloat16()
    direction = torch.randn(3, 4, 8).bfloat16()
    got = by_capture(layer, (x,), direction)
    assert got["weight"].dtype == torch.float32
    expected = oracle(layer.double(), (x.double(),), direction.double())
    assert_equal(got, expected, rtol=1e-5, relative_to_max=1e-5)


def test_model_norm_runs_past_its_hooks():
    layer = model_class("llama", "LlamaRMSNorm")(5)
    calls = []
    layer.register_forward_hook(lambda *_: calls.append(1))
    x = torch.randn(3, 4, 5)
    by_rule(LAYERS.find(layer)[0], layer, (x,), torch.ones(3, 4, 5))
    assert not calls
    assert isinstance(layer.weight, nn.Parameter)


@pytest.mark.parametrize(("rows", "columns"), [(5, 3), (4, 4)])
def test_model_linear_that_stores_its_weight_transposed(rows, columns):
    cls = pytest.importorskip("transformers.pytorch_utils").Conv1D
    torch.manual_seed(0)
    layer = cls(columns, rows).double()
    x = torch.randn(3, 2, rows, dtype=torch.float64)
    direction = torch.randn(3, 2, columns, dtype=torch.float64)
    assert_equal(by_capture(layer, (x,), direction), oracle(layer, (x,), direction))


class InputScaledRMSNorm(nn.Module):
    """Scales before it normalises, so that it is not affine in the weight."""

    def __init__(self, size=5):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(size, dtype=torch.float64))

    def forward(self, x):
        return F.normalize(x * self.weight, dim=-1)


class GatedRMSNorm(InputScaledRMSNorm):
    def forward(self, x, gate=None):
        return F.normalize(x, dim=-1) * self.weight * torch.sigmoid(gate)


class NarrowRMSNorm(InputScaledRMSNorm):
    def forward(self, x):
        return F.normalize(x, dim=-1).unflatten(-1, (self.weight.numel(), -1)).mean(-1)


class DoubledGroupNorm(nn.GroupNorm):
    def forward(self, x):
        return super().forward(x) * 2


class CastGroupNorm(nn.GroupNorm):
    def forward(self, x):
        return super().forward(x.float().to(self.weight.dtype)).to(x.dtype)


class PaddedConv(nn.Conv2d):
    """Pads by itself and lets the operation pad nothing, as models ported from TensorFlow do."""

    def forward(self, x):
        return F.conv2d(F.pad(x, (0, 1, 0, 1)), self.weight, self.bias, self.stride)


class OtherStride(nn.Conv2d):
    def forward(self, x):
        return F.conv2d(x, self.weight, self.bias, stride=2)


def test_subclass_with_an_equivalent_forward_is_captured():
    torch.manual_seed(0)
    x = torch.randn(3, 4, 6, 5, dtype=torch.float64)
    for layer in (
        CastGroupNorm(2, 4, dtype=torch.float64),
        PaddedConv(4, 6, 3, stride=2, dtype=torch.float64),
    ):
        direction = torch.randn_like(layer(x))
        expected = oracle(layer, (x,), direction)
        tolerance = {"rtol": 1e-5} if isinstance(layer, nn.GroupNorm) else {}
        assert_equal(by_capture(layer, (x,), direction), expected, **tolerance)


@pytest.mark.parametrize(
    ("layer", "shape", "match"),
    [
        (InputScaledRMSNorm(), (3, 5), "weight gradient does not equal"),
        (DoubledGroupNorm(2, 4), (3, 4, 5), "gradient does not equal"),
        (OtherStride(4, 6, 3), (3, 4, 7, 7), "own stride, padding and dilation"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_subclass_with_another_gradient_is_refused(layer, shape, match):
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=torch.float64)
    layer.double()
    with torch.no_grad():
        layer.weight.normal_()
    with pytest.raises(UnsupportedLayerError, match=match):
        by_capture(layer, (x,), torch.randn_like(layer(x)))


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv1d(4, 2, 3), (4, 5)),
        (nn.Conv2d(4, 2, 3), (4, 5, 5)),
        (nn.ConvTranspose3d(4, 2, 3), (4, 5, 5, 5)),
        (nn.InstanceNorm2d(4, affine=True), (4, 5, 5)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_unbatched_input_is_refused(layer, shape):
    direction = torch.zeros(shape[0], 1)
    with pytest.raises(CaptureError, match=r"must see a batch, an input of \d axes, got shape"):
        by_capture(layer, (torch.randn(shape),), direction)


def test_input_without_an_axis_for_the_batch_is_refused():
    for layer in (nn.LayerNorm((3, 5)), nn.RMSNorm((3, 5))):
        rule = LAYERS.find(layer)[0]
        with pytest.raises(CaptureError, match="more than 2 axes"):
            by_rule(rule, layer, (torch.randn(3, 5),), torch.randn(3, 5))


@pytest.mark.parametrize("cls", [nn.BatchNorm1d, nn.SyncBatchNorm])
def test_batch_norm_in_training_mode_is_refused(cls):
    layer = cls(4)
    with pytest.raises(CaptureError, match="must be in evaluation mode, got training mode"):
        LAYERS.find(layer)[0].keep(layer, (torch.randn(3, 4),), {})


def test_running_statistics_changed_before_the_backward_are_noticed():
    layer = nn.BatchNorm1d(4).eval()
    model, x = Holder(layer), torch.randn(3, 4)
    taps = Taps(select_layers(model).units)
    capture = Capture(3, 1, lambda *_: None)
    taps.install()
    with taps.forward(capture):
        output = model(x)
    layer.running_mean.add_(1)
    with pytest.raises(CaptureError, match="changed in place"):
        output.sum().backward()
    taps.remove()


@pytest.mark.parametrize(
    ("layer", "match"),
    [
        (nn.BatchNorm1d(4, track_running_stats=False), "without running statistics"),
        (nn.EmbeddingBag(5, 3, mode="max"), "only 'sum' and 'mean'"),
        (nn.EmbeddingBag(5, 3, max_norm=1.0), "max_norm changes the weight"),
        (nn.EmbeddingBag(5, 3, scale_grad_by_freq=True), "rest of the batch"),
        (nn.Embedding(5, 3, max_norm=1.0), "max_norm changes the weight"),
        (nn.Embedding(5, 3, scale_grad_by_freq=True), "rest of the batch"),
        (GatedRMSNorm(), "takes more than one input"),
        (nn.Bilinear(3, 4, 2), "Bilinear has no rule"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_configuration_without_a_rule_is_refused_by_name(layer, match):
    with pytest.raises(UnsupportedLayerError, match=match):
        select_layers(Holder(layer), layers="layer")
    model = nn.ModuleDict({"other": nn.Linear(2, 2), "layer": layer})
    entries = select_layers(model).coverage.with_status("unsupported")
    assert {entry.name for entry in entries} == {f"layer.{n}" for n, _ in layer.named_parameters()}


def test_norm_whose_weight_is_not_the_last_axis_is_refused():
    layer = NarrowRMSNorm(5)
    rule = LAYERS.find(layer)[0]
    x = torch.randn(3, 10, dtype=torch.float64)
    with pytest.raises(UnsupportedLayerError, match="by its weight of 5 entries, got 10"):
        rule.layer_gradient(layer, LayerCall(x), torch.randn_like(x), Roles())


def test_names_alone_do_not_make_a_norm():
    class TwoRMSNorm(InputScaledRMSNorm):
        def __init__(self):
            super().__init__()
            self.shift = nn.Parameter(torch.zeros(5))

    class ParentRMSNorm(InputScaledRMSNorm):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(5, 5)

    class MatrixRMSNorm(InputScaledRMSNorm):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(5, 5))

    for cls in (TwoRMSNorm, ParentRMSNorm, MatrixRMSNorm):
        assert LAYERS.find(cls()) is None


def test_call_without_a_tensor_is_refused():
    layer = nn.Linear(3, 2)
    with pytest.raises(TypeError, match="must be called with a tensor, got none"):
        LAYERS.find(layer)[0].keep(layer, (None,), {})


def test_scale_and_bias_kinds():
    layer = nn.LayerNorm(5)
    rule = LAYERS.find(layer)[0]
    x = torch.randn(3, 4, 5)
    both = rule.layer_gradient(layer, LayerCall(x), x, Roles(weight=True, bias=True))
    assert isinstance(both, ScaleFactors)
    assert both.has_bias
    bias = rule.layer_gradient(layer, LayerCall(x), x, Roles(weight=False, bias=True))
    assert bias.activation_bsi.shape == (3, 4, 0)
