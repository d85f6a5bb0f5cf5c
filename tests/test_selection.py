"""Choosing layers: patterns, shared and frozen parameters, and the coverage that comes of it."""

import pytest
import torch
from models import MODELS, alone, assert_same_gradients, build, captured, text_rows, tiny
from torch import nn
from torch.nn import functional as F

import gradtrail
from gradtrail import UnsupportedLayerError
from gradtrail.hooks import select_layers
from gradtrail.hooks.reads import mentions

TRAIN = text_rows((5, 3, 7, 1, 6))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.out = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.norm = nn.LayerNorm(4)

    def forward(self, x):
        return x + self.out(torch.tanh(self.query(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.conv = nn.Conv1d(4, 4, 1)
        self.plain = nn.LayerNorm(4, elementwise_affine=False)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(self.plain(self.conv(x.transpose(1, 2)).transpose(1, 2)).sum(1))


def net():
    torch.manual_seed(0)
    return Net().double()


ROWS = [(torch.randn(3, 4, dtype=torch.float64), label % 2) for label in range(5)]


def names(model, **choice):
    return [unit.name for unit in select_layers(model, **choice).units]


EVERY = [
    *(f"blocks.{block}.{layer}" for block in range(3) for layer in ("query", "out", "norm")),
    "conv",
    "head",
]


# ---------------------------------------------------------------- patterns


@pytest.mark.parametrize(
    ("choice", "chosen"),
    [
        (None, EVERY),
        ("head", ["head"]),
        ("blocks.*.query", [f"blocks.{block}.query" for block in range(3)]),
        ("blocks.1", ["blocks.1.query", "blocks.1.out", "blocks.1.norm"]),
        ("blocks", EVERY[:9]),
        ("*", EVERY),
        ("*.[no]*", [name for name in EVERY if name.endswith(("norm", "out"))]),
        (["head", "blocks.0.o*"], ["blocks.0.out", "head"]),
        (nn.LayerNorm, [f"blocks.{block}.norm" for block in range(3)]),
        ((nn.Conv1d, "head"), ["conv", "head"]),
        (Block, EVERY[:9]),
        pytest.param(
            lambda name, module: isinstance(module, nn.Linear) and name.startswith("blocks.2"),
         ["blocks.2.query", "blocks.2.out"],
            id="callable",
        ),
        ({"conv"}, ["conv"]),
    ],
    ids=str,
)  # fmt: skip
def test_choosing_layers(choice, chosen):
    assert names(net(), layers=choice) == chosen
    if choice is not None and chosen != EVERY:
        assert names(net(), exclude=choice) == [name for name in EVERY if name not in chosen]


def test_choice_and_exclusion_together():
    model = net()
    assert names(model, layers="blocks", exclude=[nn.LayerNorm, "blocks.[12]"]) == [
        "blocks.0.query",
        "blocks.0.out",
    ]
    entries = {entry.name: entry for entry in gradtrail.coverage(
        model, layers="blocks", exclude="blocks.1"
    ).entries}  # fmt: skip
    assert entries["blocks.0.out.weight"].status == "covered"
    assert entries["blocks.1.out.weight"].reason == "excluded"
    assert entries["head.bias"].reason == "not among the chosen layers"
    assert entries["head.bias"].status == "left out"


def test_root_pattern_takes_the_model_itself():
    layer = nn.Linear(3, 2)
    assert names(layer, layers="") == [""]
    assert names(layer) == [""]


@pytest.mark.parametrize("option", ["layers", "exclude"])
def test_pattern_that_matches_nothing_lists_near_names(option):
    match = rf"{option} must match a layer .*'blocks.0.qeury'.*Near names: 'blocks.0.query'"
    with pytest.raises(ValueError, match=match):
        select_layers(net(), **{option: "blocks.0.qeury"})
    with pytest.raises(ValueError, match=rf"{option} must match .*got .*Conv2d.*Near names"):
        select_layers(net(), **{option: nn.Conv2d})
    with pytest.raises(ValueError, match=rf"{option} must match"):
        select_layers(net(), **{option: lambda *_: False})
    with pytest.raises(ValueError, match=rf"{option} must match a layer .*'plain'"):
        select_layers(net(), **{option: "plain"})  # owns no parameter
    with pytest.raises(ValueError, match=r"'nothing', which matches none"):
        select_layers(net(), **{option: ["head", "nothing"]})
    with pytest.raises(TypeError, match=r"glob patterns, module types or callables .* got int"):
        select_layers(net(), **{option: 3})


def test_choice_that_leaves_nothing_says_why():
    model = net()
    model.head.requires_grad_(False)
    match = r"layers must leave something .*head.weight: frozen \(include_frozen=True\)"
    with pytest.raises(ValueError, match=match):
        select_layers(model, layers="head")
    with pytest.raises(ValueError, match=r"got none: conv.weight: excluded; conv.bias: excluded"):
        select_layers(model, layers="conv", exclude="conv")
    with pytest.raises(
        ValueError, match="layers must leave something to capture, got none: an empty"
    ):
        select_layers(model, layers=[])
    assert names(model, exclude=[]) == EVERY[:-1]


def test_options_of_the_entry_points_reach_the_selection():
    model = net()
    for call in (
        lambda **choice: gradtrail.attribute(model, ROWS, ROWS, progress=False, **choice).coverage,
        lambda **choice: gradtrail.coverage(model, **choice),
        lambda **choice: gradtrail.plan(model, ROWS, ROWS, **choice).coverage,
    ):
        covered = call(layers="blocks.*", exclude="*.norm").with_status("covered")
        assert {entry.layer for entry in covered} == {
            f"blocks.{block}.{layer}" for block in range(3) for layer in ("query", "out")
        }


# ---------------------------------------------------------------- shared parameters


def test_modules_that_share_a_parameter_are_chosen_together():
    model = tiny()
    for choice in ("head", "embed", nn.Embedding, "*ead"):
        units = {unit.name: unit for unit in select_layers(model, layers=choice).units}
        assert [owner.name for owner in units["embed"].owners] == ["embed", "head"]
    assert "embed" not in names(model, exclude="head")
    assert "embed" not in names(model, exclude="embed")


class Tied(nn.Module):
    """Two linear layers with one weight, each with a bias of its own."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.out(torch.tanh(self.b(torch.tanh(self.a(x)))).sum(1))


def test_two_layers_with_one_weight():
    torch.manual_seed(0)
    model = Tied().double()
    assert names(model) == ["a", "a.bias", "b.bias", "out"]
    got, coverage = captured(model, ROWS)
    assert_same_gradients(got, alone(model, ROWS), 1e-10)
    assert coverage.share == 1
    assert [entry.name for entry in coverage.entries] == [
        name for name, _ in model.named_parameters()
    ]
    only, _ = captured(model, ROWS, layers="b")
    assert set(only) == {"a.weight", "b.bias"}
    assert_same_gradients(only, alone(model, ROWS, names=list(only)), 1e-10)


def test_one_module_under_two_names():
    class Same(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.second = self.first
            self.out = nn.Linear(4, 2)

        def forward(self, x):
            return self.out(self.second(torch.tanh(self.first(x))).sum(1))

    torch.manual_seed(0)
    model = Same().double()
    assert names(model) == ["first", "out"]
    assert names(model, layers="second") == ["first"]
    assert names(model, exclude="second") == ["out"]
    got, _ = captured(model, ROWS)
    assert_same_gradients(got, alone(model, ROWS), 1e-10)


# ---------------------------------------------------------------- trained and frozen


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_one_parameter_of_each_layer(frozen):
    model = net()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.endswith(frozen))
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    got, coverage = captured(model, ROWS)
    assert set(got) == set(trained)
    assert_same_gradients(got, alone(model, ROWS, names=trained), 1e-10)
    left = coverage.with_status("left out")
    assert {entry.reason for entry in left} == {"frozen"}
    assert {entry.name for entry in left} | set(trained) == {
        name for name, _ in model.named_parameters()
    }


def test_bias_alone_is_named_after_its_layer():
    model = net()
    model.requires_grad_(False)
    model.head.bias.requires_grad_(True)
    assert names(model) == ["head.bias"]
    assert gradtrail.coverage(model).share == pytest.approx(
        2 / sum(p.numel() for p in model.parameters())
    )


def test_frozen_layers_are_captured_when_asked():
    model = net()
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    assert names(model) == ["head"]
    assert names(model, include_frozen=True) == EVERY
    assert gradtrail.coverage(model, include_frozen=True).share == 1
    got, _ = captured(model, ROWS, include_frozen=True)
    assert_same_gradients(got, alone(model, ROWS), 1e-10)
    assert [name for name, p in model.named_parameters() if p.requires_grad] == [
        "head.weight",
        "head.bias",
    ]


# ---------------------------------------------------------------- what has no rule


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.pair = nn.Bilinear(4, 4, 4)
        self.scale = nn.Parameter(torch.ones(4, dtype=torch.float64))
        self.out = nn.Linear(4, 2)

    def forward(self, x):
        x = self.attention(x, x, x, need_weights=False)[0]
        return self.out((self.pair(x, x) * self.scale).sum(1))


def test_unsupported_parameters_are_named_with_their_reasons():
    torch.manual_seed(0)
    model = Attention().double()
    got, coverage = captured(model, ROWS)
    assert set(got) == {"out.weight", "out.bias"}
    assert_same_gradients(got, alone(model, ROWS, names=list(got)), 1e-10)
    reasons = {entry.name: entry.reason for entry in coverage.with_status("unsupported")}
    assert reasons == {
        "scale": "Attention has no rule for 'scale'",
        "attention.in_proj_weight": "MultiheadAttention has no rule for 'in_proj_weight'",
        "attention.in_proj_bias": "MultiheadAttention has no rule for 'in_proj_bias'",
        "attention.out_proj.weight": "nn.MultiheadAttention uses its weight without calling it",
        "attention.out_proj.bias": "nn.MultiheadAttention uses its weight without calling it",
        "pair.weight": "Bilinear has no rule for 'weight'",
        "pair.bias": "Bilinear has no rule for 'bias'",
    }
    table = str(coverage)
    assert all(name in table and reason in table for name, reason in reasons.items())


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("pair", "Bilinear has no rule"),
        ("attention.out_proj", "nn.MultiheadAttention uses its weight without calling it"),
    ],
)
def test_unsupported_layer_named_in_full_is_refused(name, reason):
    with pytest.raises(
        UnsupportedLayerError, match=f"layers must name supported layers, got '{name}': {reason}"
    ):
        select_layers(Attention(), layers=["out", name])
    assert names(Attention(), layers=["out", f"{name}*"]) == ["out"]  # a pattern may take more


def test_container_with_an_unsupported_part_gives_the_rest():
    model = nn.Sequential(Attention(), nn.Linear(2, 2))
    assert names(model, layers="0") == ["0.out"]


def test_model_with_nothing_to_capture():
    model = nn.Sequential(nn.Bilinear(2, 2, 2))
    assert gradtrail.coverage(model).share == 0
    assert names(model) == []
    assert gradtrail.coverage(nn.ReLU()).share == 1


def test_integer_parameters_have_no_gradient():
    class Quantised(nn.Linear):
        def __init__(self):
            super().__init__(3, 2)
            self.weight = nn.Parameter(torch.ones(2, 3, dtype=torch.int8), requires_grad=False)

    entries = {e.name: e for e in gradtrail.coverage(Quantised(), include_frozen=True).entries}
    assert entries["weight"].reason == "its dtype torch.int8 has no gradient"
    assert entries["bias"].status == "covered"


# ---------------------------------------------------------------- names without a use


class Head(nn.Module):
    """Holds its decoder's bias under a second name, as heads of masked language models do."""

    def __init__(self):
        super().__init__()
        self.decoder = nn.Linear(4, 2)
        self.bias = nn.Parameter(torch.zeros(2))
        self.decoder.bias = self.bias

    def tie(self):
        self.decoder.bias = self.bias

    def forward(self, x):
        return self.decoder(x).sum(1)


class UsingHead(Head):
    def forward(self, x):
        return self.decoder(x).sum(1) + self.bias


class UsingMethodHead(Head):
    @property
    def shift(self):
        return self.bias * 2

    def add(self, x):
        return x + self.shift

    def forward(self, x):
        return self.add(self.decoder(x).sum(1))


class UsingLookupHead(Head):
    def forward(self, x):
        return self.decoder(x).sum(1) + getattr(self, "bias")  # noqa: B009


class UsingInnerHead(Head):
    def forward(self, x):
        return F.relu((lambda y: y + self.bias)(self.decoder(x).sum(1)))


def test_second_name_of_a_bias_is_no_use():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Head()).double()
    got, coverage = captured(model, ROWS)
    assert coverage.share == 1
    assert set(got) == {name for name, _ in model.named_parameters()}
    assert_same_gradients(got, alone(model, ROWS), 1e-10)


@pytest.mark.parametrize("head", [UsingHead, UsingMethodHead, UsingLookupHead, UsingInnerHead])
def test_second_name_that_is_used_is_reported(head):
    model = nn.Sequential(nn.Linear(4, 4), head()).double()
    unsupported = gradtrail.coverage(model).with_status("unsupported")
    assert [(entry.name, entry.reason) for entry in unsupported] == [
        ("1.bias", f"{head.__name__} has no rule for 'bias'")
    ]
    got, _ = captured(model, ROWS)
    assert_same_gradients(got, alone(model, ROWS, names=list(got)), 1e-10)


def test_reading_what_a_forward_mentions():
    assert not mentions(Head(), "bias")
    assert mentions(Head(), "decoder")
    assert mentions(UsingMethodHead(), "bias")
    assert mentions(UsingLookupHead(), "bias")
    assert mentions(UsingInnerHead(), "bias")
    replaced = Head()
    replaced.forward = lambda x: x
    assert mentions(replaced, "bias")
    opaque = type("Opaque", (nn.Module,), {"forward": staticmethod(torch.relu)})()
    assert mentions(opaque, "bias")


# ---------------------------------------------------------------- sparse mixtures


class Routed(nn.Module):
    """Each expert sees the rows that a router chooses, in the order of the choice."""

    skips = False

    def __init__(self, experts=2, top=2):
        super().__init__()
        self.top = top
        self.gate = nn.Linear(4, experts)
        self.parts = nn.ModuleList([nn.Linear(4, 4) for _ in range(experts)])
        self.out = nn.Linear(4, 2)

    def forward(self, x):
        rows = x.reshape(-1, x.shape[-1])
        weight, chosen = self.gate(rows).softmax(-1).topk(self.top)
        total = torch.zeros_like(rows)
        for number, part in enumerate(self.parts):
            rank, row = torch.where((chosen == number).t())
            if self.skips and not len(row):
                continue
            total = total.index_add(0, row, part(rows[row]) * weight[row, rank].unsqueeze(1))
        return self.out(total.view(x.shape[0], -1, 4).sum(1))


class RoutedMoe(Routed):
    """As ``transformers`` before 5 names them."""

    def __init__(self, **options):
        super().__init__(**options)
        self.experts = self.parts


@pytest.mark.parametrize("sizes", [(2, 2), (3, 1), (6, 2)], ids=str)
@pytest.mark.parametrize("shape", [(4,), (3, 4)], ids=str)
def test_experts_that_see_chosen_rows_are_left_out(sizes, shape):
    """Also where every expert sees every row: by choice, not by example, is their order."""
    torch.manual_seed(1)
    model = Routed(*sizes).double()
    rows = [(torch.randn(shape, dtype=torch.float64), label % 2) for label in range(6)]
    with pytest.warns(gradtrail.GradTrailWarning, match="rows that cannot be assigned"):
        got, coverage = captured(model, rows, batch_size=6)
    left = {entry.name for entry in coverage.with_status("unsupported")}
    assert left
    assert all(name.startswith("parts.") for name in left)
    assert {"gate.weight", "out.weight"} <= set(got)
    assert_same_gradients(got, alone(model, rows, names=list(got)), 1e-10)


def test_experts_of_known_models_are_left_out_before_any_data():
    torch.manual_seed(1)
    model = RoutedMoe().double()
    unsupported = gradtrail.coverage(model).with_status("unsupported")
    assert {entry.name.split(".")[0] for entry in unsupported} == {"parts"}
    assert {entry.reason for entry in unsupported} == {
        "a router chooses the rows it sees, which cannot be assigned to examples"
    }
    got, _ = captured(model, ROWS)
    assert_same_gradients(got, alone(model, ROWS, names=list(got)), 1e-10)
    with pytest.raises(UnsupportedLayerError, match="got 'parts.0': a router chooses the rows"):
        select_layers(model, layers="parts.0")


def test_expert_that_passed_by_chance_is_refused_in_the_pass():
    """The first rows all go to one expert, in order; a later one does not."""
    model = Routed(2, 1).double()
    model.skips = True
    with torch.no_grad():
        model.gate.weight.copy_(torch.tensor([[1.0, 0, 0, 0], [-1.0, 0, 0, 0]]))
        model.gate.bias.zero_()
    rows = [(torch.tensor([sign, 0.1, number, 0.3]).double(), 0) for number, sign in enumerate(
        (1.0, 2.0, 3.0, 4.0, -5.0, -1.0)
    )]  # fmt: skip
    match = r"parts.\d must see one row an example, got otherwise: it sees rows that cannot be"
    with pytest.raises(gradtrail.CaptureError, match=match):
        captured(model, rows, batch_size=6)
    got, _ = captured(model, rows, batch_size=6, exclude="parts")
    assert_same_gradients(got, alone(model, rows, names=list(got)), 1e-10)


def test_rows_that_are_all_experts_of_every_example_are_captured():
    """A dense mixture: every expert reads the whole batch in order."""

    class Dense(Routed):
        def forward(self, x):
            weight = self.gate(x).softmax(-1)
            values = torch.stack([part(x) for part in self.parts], -1)
            return self.out((values * weight.unsqueeze(-2)).sum(-1))

    torch.manual_seed(0)
    model = Dense(3).double()
    rows = [(torch.randn(4, dtype=torch.float64), label % 2) for label in range(6)]
    got, coverage = captured(model, rows)
    assert coverage.share == 1
    assert_same_gradients(got, alone(model, rows), 1e-10)


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_of_every_model_has_one_entry(name):
    model = build(name, torch.float32)
    coverage = gradtrail.coverage(model)
    assert [entry.name for entry in coverage.entries] == [
        name for name, _ in model.named_parameters()
    ]
    layers = {unit.name for unit in select_layers(model).units}
    assert {entry.layer for entry in coverage.with_status("covered")} == layers
    assert all(entry.reason for entry in coverage.entries if entry.status != "covered")
