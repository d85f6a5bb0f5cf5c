"""Refinement: the damped Gauss-Newton system against explicit Jacobians in float64."""

import copy
import math
import warnings

import pytest
import torch
from capturing import by_parameter, language_batch, tiny_gpt2, tiny_llama
from models import pad_left, text_rows, tiny
from torch import nn
from torch.utils.checkpoint import checkpoint

from gradtrail import GradTrailWarning, UnsupportedLayerError
from gradtrail.attribution import curvature_products
from gradtrail.attribution.data import Rows, as_rows
from gradtrail.attribution.gauss_newton import RefineOptions, gauss_newton_solve
from gradtrail.attribution.layer_maps import map_layers
from gradtrail.attribution.losses import outputs_of, resolve_loss
from gradtrail.attribution.outputs import losses_of
from gradtrail.attribution.setup import make_session
from gradtrail.factors import DenseGradient, Projection, to_dense
from gradtrail.hooks import LivePass, select_layers
from gradtrail.kronecker.conjugate import conjugate_gradients

F64 = torch.float64
INFERRED = resolve_loss(None, None)
TIGHT = {"tolerance": 1e-11, "max_iterations": 2000}
TRANSFORMERS = ("gpt2", "llama")


def network(*sizes, seed=0):
    torch.manual_seed(seed)
    layers = [nn.Linear(left, right, dtype=F64) for left, right in zip(sizes, sizes[1:])]  # noqa: B905
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh())))[:-1].train()


def pairs(n, width, targets, seed=0):
    """Rows of inputs with class labels (a number of classes) or float targets (a shape)."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(n, *width, generator=generator, dtype=F64)
    if isinstance(targets, int):
        labels = torch.randint(0, targets, (n,), generator=generator)
    else:
        labels = torch.randn(n, *targets, generator=generator, dtype=F64)
    return list(zip(inputs, labels, strict=True))


class ConvNet(nn.Module):
    """Groups, a layer called twice, a norm, and two layers that share a weight but no bias."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(4, 4, 3, padding=1, groups=2, dtype=F64)
        self.norm = nn.GroupNorm(2, 4, dtype=F64)
        self.left = nn.Linear(4, 4, dtype=F64)
        self.right = nn.Linear(4, 4, dtype=F64)
        self.right.weight = self.left.weight
        self.head = nn.Linear(4, 3, bias=False, dtype=F64)

    def forward(self, x):
        x = torch.tanh(self.conv(torch.tanh(self.conv(x))))
        x = self.norm(x).mean((2, 3))
        return self.head(torch.tanh(self.right(torch.tanh(self.left(x)))))


def language_rows(lengths):
    batch = language_batch(lengths)
    return [
        {"input_ids": batch["input_ids"][row, :length], "labels": batch["labels"][row, :length]}
        for row, length in enumerate(lengths)
    ]


def skipping(rows):
    """The same rows, some labels of which do not count."""
    rows = [dict(row, labels=row["labels"].clone()) for row in rows]
    rows[0]["labels"][2] = -100
    rows[1]["labels"][:] = -100
    return rows


def with_ignored(rows):
    rows[1] = (rows[1][0], torch.tensor(-100))
    return rows


CASES = {
    "classifier": lambda: (network(4, 5, 3), with_ignored(pairs(9, (4,), 3))),
    "regression": lambda: (network(4, 5, 1), pairs(9, (4,), ())),
    "regression of several": lambda: (network(4, 5, 2), pairs(9, (4,), (2,))),
    "convolutions": lambda: (ConvNet(), pairs(7, (4, 5, 4), 3)),
    "tiny language model": lambda: (tiny(), skipping(text_rows((5, 3, 7, 1)))),
    "gpt2": lambda: (tiny_gpt2(), language_rows((4, 3))),
    "llama": lambda: (tiny_llama(), language_rows((4, 3))),
}


def dense_system(model, rows, names):
    """Mean Gauss-Newton matrix over parameters, from one example and one output at a time."""
    model = copy.deepcopy(model).eval()
    parameters = [dict(model.named_parameters())[name] for name in names]
    size = sum(parameter.numel() for parameter in parameters)
    total = torch.zeros(size, size, dtype=F64)
    for row in range(len(rows)):
        outputs = outputs_of(INFERRED, model, rows.batch([row]), option="")
        flat = outputs.logits.flatten()
        jacobian = []
        for entry in flat:
            found = torch.autograd.grad(entry, parameters, retain_graph=True, allow_unused=True)
            jacobian.append(
                torch.cat([
                    torch.zeros(p.numel(), dtype=F64) if g is None else g.flatten()
                    for g, p in zip(found, parameters, strict=True)
                ])
            )  # fmt: skip
        # the Hessian of the loss in the outputs, by autograd too
        leaf = outputs.logits.detach().requires_grad_()
        at_leaf = type(outputs)(leaf, outputs.labels, outputs.kind, "")
        hessian = torch.func.hessian(
            lambda values, at=at_leaf: losses_of(
                type(at)(values.view(at.logits.shape), at.labels, at.kind, "")
            ).sum()
        )(flat.detach())
        jacobian = torch.stack(jacobian)
        total += jacobian.t() @ hessian @ jacobian
    return total / len(rows)


def captured(session, rows, loss, batch_size=4):
    """Every layer's written-out gradients of all rows."""
    found = {}

    def sink(place, name, gradient):
        dense = to_dense(gradient)
        if name not in found:
            values = dense.values_bd.new_zeros(len(rows), dense.values_bd.shape[1])
            found[name] = DenseGradient(values, dense.shape, dense.has_bias)
        found[name].values_bd[place.start : place.start + place.size] = dense.values_bd

    session.capture(rows, loss, batch_size=batch_size, phase="queries", sink=sink)
    return found


def by_damping(_name, values, damping):
    return values / damping


def solve(
    model, data, options, *, batch_size=4, loss=INFERRED, projection=None, queries=4,
    precondition=by_damping, collate=None, change=None, **choice
):  # fmt: skip
    """The solution by parameter, the queries' gradients by parameter, and the report."""
    selection = select_layers(model, **choice)
    session = make_session(model, selection, None, projection, 0, progress=False)
    rows = as_rows(data, "train", collate, 0)
    few = Rows(data[:queries], rows.collate)
    with session.opened(rows, loss):
        right = captured(session, few, loss)
        if change is not None:
            change(right)
        found, report = gauss_newton_solve(
            session, rows, loss, right, precondition, options, batch_size
        )
        units = session.selection.units
    return by_parameter(model, units, found), by_parameter(model, units, right), report


def flat(by_name, names):
    return torch.cat([by_name[name].flatten(1) for name in names], dim=1)


# ---------------------------------------------------------------- against the dense inverse


@pytest.mark.parametrize("case", CASES)
def test_solution_is_the_dense_damped_inverse(case):
    model, data = CASES[case]()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    flags = [parameter.requires_grad for parameter in model.parameters()]
    torch.manual_seed(1)
    random = torch.get_rng_state()
    damping = 1.0 if case in TRANSFORMERS else 0.05
    tolerance = 1e-8 if case in TRANSFORMERS else 1e-11
    options = RefineOptions(
        damping=damping, relative_damping=False, tolerance=tolerance, max_iterations=2000
    )
    solution, right, report = solve(model, data, options)
    assert torch.equal(torch.get_rng_state(), random)
    assert [module.training for module in model.modules()] == modes
    assert [parameter.requires_grad for parameter in model.parameters()] == flags
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert not any("forward" in vars(module) for module in model.modules())
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())

    names = list(right)
    assert set(names) == {name for name, _ in model.named_parameters()}
    matrix = dense_system(model, as_rows(data, "train", None, 0), names)
    damped = matrix + damping * torch.eye(len(matrix), dtype=F64)
    expected = torch.linalg.solve(damped, flat(right, names).t()).t()
    got = flat(solution, names)
    error = float((got - expected).norm() / expected.norm())
    # transformers computes softmaxes and norms in float32
    assert error < (1e-6 if case in TRANSFORMERS else 1e-10)
    assert report.damping == damping
    assert report.mean_eigenvalue is None
    assert all(report.converged)
    assert max(report.residuals) <= tolerance


@pytest.mark.parametrize("name", ["classifier", "tiny language model"])
def test_solution_does_not_depend_on_batches(name, monkeypatch):
    model, data = CASES[name]()
    options = RefineOptions(damping=1.0, tolerance=1e-7, probes=4)
    results = {}
    for label, batch_size, entries in (("1", 1, 1), ("3", 3, 1 << 12), ("all", 9, 1 << 24)):
        monkeypatch.setattr(curvature_products, "_CHUNK_ENTRIES", {"cpu": entries})
        solution, _, report = solve(model, data, options, batch_size=batch_size, queries=3)
        results[label] = (flat(solution, sorted(solution)), report.damping)
    if name != "classifier":
        solution, _, report = solve(model, data, options, batch_size=2, collate=pad_left, queries=3)
        results["padded on the left"] = (flat(solution, sorted(solution)), report.damping)
    for values, damping in results.values():
        # conjugate gradients amplify rounding, to well below the tolerance
        assert float((values - results["all"][0]).norm()) < 1e-7 * float(values.norm())
        assert damping == pytest.approx(results["all"][1], rel=1e-12)


def test_two_runs_are_equal_to_the_bit():
    model, data = CASES["tiny language model"]()
    first, second = (solve(model, data, RefineOptions(tolerance=1e-6)) for _ in range(2))
    torch.manual_seed(9)
    third = solve(model, data, RefineOptions(tolerance=1e-6))
    for again in (second, third):
        assert again[2] == first[2]
        assert all(torch.equal(again[0][name], value) for name, value in first[0].items())
    other = solve(model, data, RefineOptions(tolerance=1e-6, seed=1))
    assert other[2].damping != first[2].damping


def test_attention_runs_on_a_kernel_with_forward_mode():
    """``scaled_dot_product_attention`` gives what attention spelled out gives."""
    transformers = pytest.importorskip("transformers")
    eager, data = tiny_gpt2(), language_rows((4, 3))
    config = copy.deepcopy(eager.config)
    fused = transformers.GPT2LMHeadModel._from_config(config, attn_implementation="sdpa").double()
    fused.load_state_dict(eager.state_dict())
    assert fused.config._attn_implementation == "sdpa"
    options = RefineOptions(damping=1.0, relative_damping=False, tolerance=1e-7)
    found = [solve(model, data, options, queries=2)[0] for model in (eager, fused)]
    wanted = flat(found[0], sorted(found[0]))
    got = flat(found[1], sorted(found[0]))
    assert float((got - wanted).norm()) < 1e-5 * float(wanted.norm())
    assert torch.backends.cuda.flash_sdp_enabled()
    assert torch.backends.cuda.mem_efficient_sdp_enabled()


def test_layers_left_out_are_held_fixed():
    model, data = CASES["classifier"]()
    options = RefineOptions(damping=0.3, relative_damping=False, **TIGHT)
    solution, right, _ = solve(model, data, options, exclude="0")
    assert sorted(right) == ["2.bias", "2.weight"]
    rows, names = as_rows(data, "train", None, 0), ["2.weight", "2.bias"]
    damped = dense_system(model, rows, names)
    damped += 0.3 * torch.eye(len(damped), dtype=F64)
    expected = torch.linalg.solve(damped, flat(right, names).t()).t()
    torch.testing.assert_close(flat(solution, names), expected, rtol=1e-9, atol=1e-10)

    def without_first(layers):
        del layers["0"]

    again, _, _ = solve(model, data, options, change=without_first)
    torch.testing.assert_close(flat(again, names), expected, rtol=1e-9, atol=1e-10)


# ---------------------------------------------------------------- damping


@pytest.mark.parametrize("case", ["classifier", "regression of several", "convolutions"])
def test_default_damping_is_the_mean_eigenvalue(case):
    model, data = CASES[case]()
    _, right, report = solve(model, data, RefineOptions())
    matrix = dense_system(model, as_rows(data, "train", None, 0), list(right))
    mean = float(matrix.diagonal().mean())
    assert report.mean_eigenvalue == pytest.approx(mean, rel=1e-10)
    assert report.damping == report.mean_eigenvalue
    assert report.mean_error == 0
    assert solve(model, data, RefineOptions(damping=2.5))[2].damping == pytest.approx(2.5 * mean)


@pytest.mark.montecarlo
def test_mean_eigenvalue_of_many_outputs_is_estimated():
    model, data = CASES["tiny language model"]()
    options = {"tolerance": 0.9}
    _, right, report = solve(model, data, RefineOptions(**options, probes=400))
    matrix = dense_system(model, as_rows(data, "train", None, 0), list(right))
    mean = float(matrix.diagonal().mean())
    assert abs(report.mean_eigenvalue / mean - 1) < 4 * report.mean_error
    assert report.mean_error < 0.05
    one = solve(model, data, RefineOptions(**options, probes=1))[2]
    assert math.isnan(one.mean_error)
    assert abs(one.mean_eigenvalue / mean - 1) < 1.5


def test_layers_that_the_trace_leaves_out():
    model, data = CASES["classifier"]()
    _, right, report = solve(model, data, RefineOptions(), exclude="2")
    matrix = dense_system(model, as_rows(data, "train", None, 0), list(right))
    assert report.mean_eigenvalue == pytest.approx(float(matrix.diagonal().mean()), rel=1e-10)


# ---------------------------------------------------------------- preconditioner and stopping


def test_preconditioner_changes_the_way_not_the_solution():
    model, data = CASES["classifier"]()
    options = RefineOptions(damping=0.02, relative_damping=False, **TIGHT)
    plain, right, report = solve(model, data, options)
    seen = set()

    def scaled(name, values, damping):
        seen.add((name, damping))
        return values / torch.linspace(0.02, 3, values.shape[1], dtype=F64)

    turned, _, _ = solve(model, data, options, precondition=scaled)
    assert seen == {("0", 0.02), ("2", 0.02)}
    names = sorted(right)
    torch.testing.assert_close(flat(turned, names), flat(plain, names), rtol=1e-8, atol=1e-9)

    model = nn.Sequential(nn.Linear(4, 3, dtype=F64))
    data = pairs(9, (4,), 3)
    names = ["0.weight", "0.bias"]
    damped = dense_system(model, as_rows(data, "train", None, 0), names)
    damped += 0.02 * torch.eye(len(damped), dtype=F64)

    def exact(_name, values, _damping):
        return torch.linalg.solve(damped, values.t()).t()

    _, _, report = solve(model, data, options, precondition=exact)
    assert max(report.iterations) == 1


def test_queries_that_do_not_converge_are_named():
    model, data = CASES["classifier"]()
    options = RefineOptions(
        damping=1e-3, relative_damping=False, tolerance=1e-9, max_iterations=2
    )  # fmt: skip

    def zero_first(layers):
        for layer in layers.values():
            layer.values_bd[0] = 0

    match = r"cg_tolerance=1e-09 for 2 of 4 queries \(2, 3\): 2 iterations left .* up to \d.*e"
    with pytest.warns(GradTrailWarning, match=match):
        solution, _, report = solve(model, data, options, change=zero_first)
    # query 1 has a label that does not count, so its gradient is zero as well
    assert report.converged == (True, True, False, False)
    assert report.iterations == (0, 0, 2, 2)
    assert report.residuals[:2] == (0, 0)
    assert all(not value[:2].any() and value[2:].any() for value in solution.values())


def test_model_without_curvature():
    """A network that is zero has no gradients: its queries' solution is 0, and that is said."""
    model, data = CASES["regression"]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model[2].bias.requires_grad_(False)
    with pytest.warns(GradTrailWarning, match="the Gauss-Newton matrix of the training data is 0"):
        solution, _, report = solve(model, data, RefineOptions())
    assert report.damping == 0
    assert not any(value.any() for value in solution.values())


@pytest.mark.parametrize("absolute", [True, False], ids=["absolute", "relative"])
def test_weights_that_are_not_finite(absolute):
    model, data = CASES["classifier"]()
    with torch.no_grad():
        model[0].weight[0, 0] = torch.nan
    options = RefineOptions(damping=0.1, relative_damping=not absolute)
    with pytest.warns(GradTrailWarning, match="left a relative residual of up to nan"):
        solution, _, report = solve(model, data, options)
    assert not any(report.converged)
    assert all(value.isnan().all() for value in solution.values())


# ---------------------------------------------------------------- what cannot be refined


def own(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def test_loss_of_the_users_own_is_refused():
    model, data = CASES["classifier"]()
    match = r"must know the curvature of the loss in the outputs, got a loss of your own \(own\)"
    with pytest.raises(ValueError, match=match):
        solve(model, data, RefineOptions(), loss=resolve_loss(own, None))


def test_projection_is_refused():
    model, data = CASES["classifier"]()
    with pytest.raises(ValueError, match="for the parameters themselves, got a projection"):
        solve(model, data, RefineOptions(), projection=Projection(dim=2))


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        del ctx
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        del ctx
        return 2 * gradient


class Between(nn.Module):
    """A network with an operation of some kind between two layers."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 4, dtype=F64), nn.Linear(4, 3, dtype=F64)
        self.lstm = nn.LSTM(4, 4, batch_first=True, dtype=F64)
        self.lstm.requires_grad_(False)
        self.kind = kind

    def forward(self, x):
        x = self.first(x)
        if self.kind == "function":
            x = _Doubled.apply(x)
        elif self.kind == "checkpoint":
            x = checkpoint(torch.tanh, x, use_reentrant=False)
        elif self.kind == "lstm":
            x = self.lstm(x.unsqueeze(1))[0][:, 0]
        elif self.kind == "error":
            x = x[:, :7].expand(-1, 7)
        return self.last(x)


@pytest.mark.parametrize("kind", ["function", "checkpoint"])
def test_operation_without_forward_mode_is_refused(kind):
    model, data = Between(kind), pairs(5, (4,), 3)
    match = r'refine="cg" must differentiate the model in forward mode, got .*Leave refine out'
    with pytest.raises(UnsupportedLayerError, match=match):
        solve(model, data, RefineOptions())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("layers", [None, "last"], ids=["around", "above"])
def test_layers_around_a_frozen_recurrent_one(layers):
    model, data = Between("lstm"), pairs(5, (4,), 3)
    options = RefineOptions(damping=0.3, relative_damping=False, **TIGHT)
    solution, right, _ = solve(model, data, options, layers=layers)
    names = sorted(right)
    assert len(names) == (4 if layers is None else 2)
    damped = dense_system(model, as_rows(data, "train", None, 0), names)
    damped += 0.3 * torch.eye(len(damped), dtype=F64)
    expected = torch.linalg.solve(damped, flat(right, names).t()).t()
    torch.testing.assert_close(flat(solution, names), expected, rtol=1e-9, atol=1e-10)


def test_attention_without_forward_mode_is_refused():
    model, data = tiny_gpt2(), language_rows((4, 3))
    model.config._attn_implementation = "flash_attention_2"
    session = make_session(model, select_layers(model), None, None, 0, progress=False)
    rows = as_rows(data, "train", None, 0)
    maps = map_layers(model, (), {})
    products = curvature_products.GaussNewtonProducts(session, model, rows, INFERRED, maps, 2)
    match = r"attention that has forward mode, got attn_implementation='flash_attention_2'"
    with pytest.raises(UnsupportedLayerError, match=match), products.opened():
        pass


def test_rule_that_does_more_than_place_entries_is_refused(monkeypatch):
    model, data = CASES["classifier"]()
    rule = select_layers(model).units[0].owners[0].rule
    placed = type(rule).to_parameters
    monkeypatch.setattr(
        type(rule), "to_parameters",
        lambda self, module, dense: {"weight": 2 * placed(self, module, dense)["weight"]},
    )  # fmt: skip
    with pytest.raises(UnsupportedLayerError, match=r"0 must keep every entry .* got a Linear"):
        solve(model, data, RefineOptions())


def test_other_errors_pass_through_and_leave_the_pass_whole():
    """An error inside the products leaves hooks and fused operations as they were."""
    model, data = tiny_llama(), language_rows((4, 3))
    session = make_session(model, select_layers(model), None, None, 0, progress=False)
    rows = as_rows(data, "train", None, 0)
    plain = make_session(model, select_layers(model), None, None, 0, progress=False)
    with plain.opened(rows, INFERRED):
        expected = captured(plain, rows, INFERRED)

    def fails(_name, _values, _damping):
        raise KeyError("precondition")

    with session.opened(rows, INFERRED):
        before = captured(session, rows, INFERRED)
        hooks = [len(m._forward_hooks) for m in model.modules()]
        fused = ["forward" in vars(m) for m in model.modules()]
        options = RefineOptions(damping=1.0, relative_damping=False)
        with pytest.raises(KeyError, match="precondition"):
            gauss_newton_solve(session, rows, INFERRED, before, fails, options, 2)
        assert [len(m._forward_hooks) for m in model.modules()] == hooks
        assert ["forward" in vars(m) for m in model.modules()] == fused
        after = captured(session, rows, INFERRED)
    for name, gradient in expected.items():
        assert torch.equal(before[name].values_bd, gradient.values_bd)
        assert torch.equal(after[name].values_bd, gradient.values_bd)
    wrong = Between("error")
    with pytest.raises(RuntimeError, match="expand"):
        solve(wrong, pairs(3, (4,), 3), RefineOptions(damping=1.0, relative_damping=False))


@pytest.mark.parametrize("reentrant", [False, True])
def test_suspended_pass_runs_the_model_as_it_was_written(reentrant):
    """Neither hooks nor what opens inputs for reentrant checkpointing: plain outputs, no graph."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.embed = nn.Embedding(5, 4, dtype=F64)
            self.middle = nn.Sequential(nn.Linear(4, 4, dtype=F64), nn.Tanh())
            self.last = nn.Linear(4, 3, dtype=F64)

        def forward(self, ids):
            hidden = self.embed(ids)
            return self.last(checkpoint(self.middle, hidden, use_reentrant=reentrant))

    model, seen = Net(), {}
    ids, labels = torch.tensor([0, 1, 4]), torch.tensor([0, 2, 1])

    def run(live):
        live.run(
            lambda: INFERRED(model, (ids, labels)),
            batch=3,
            tokens=1,
            sink=lambda name, gradient: seen.setdefault(name, []).append(to_dense(gradient)),
        )

    with LivePass(model, select_layers(model)) as live:
        run(live)
        hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
        with live.suspended(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "None of the inputs have requires_grad=True")
            assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
            assert not model(ids).requires_grad
        assert hooks == [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
        run(live)
    for name, (before, after) in seen.items():
        assert torch.equal(before.values_bd, after.values_bd), name
    assert len(seen) == 3
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"damping": 0.0}, r"damping must be a finite number above 0 .* got 0\.0"),
        ({"damping": -1.0}, "got -1.0"),
        ({"damping": math.inf}, "got inf"),
        ({"damping": math.nan}, "got nan"),
        ({"relative_damping": False}, "damping must be given with relative_damping=False"),
        ({"tolerance": 0.0}, r"cg_tolerance must be between 0 and 1, got 0\.0"),
        ({"tolerance": 1.0}, "cg_tolerance"),
        ({"max_iterations": 0}, "cg_max_iterations must be an integer of at least 1, got 0"),
        ({"probes": 0}, "probes must be an integer"),
    ],
    ids=str,
)
def test_options_that_are_refused(options, match):
    with pytest.raises(ValueError, match=match):
        RefineOptions(**options)


# ---------------------------------------------------------------- other models


def test_low_precision_model_is_refined_in_float32():
    """Weights in bfloat16 give what the same weights in float32 give."""
    torch.manual_seed(0)
    low = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 3)).bfloat16()
    low[0].requires_grad_(False)
    wide = copy.deepcopy(low).float()
    data = [(x.bfloat16(), label) for x, label in pairs(6, (4,), 3)]
    floats = [(x.float(), label) for x, label in data]
    options = RefineOptions(damping=0.1, relative_damping=False, tolerance=1e-5)
    expected, right, _ = solve(wide, floats, options)

    def same(layers):
        for name, role in (("1", "weight"), ("3", "weight")):
            joined = torch.cat([right[f"{name}.{role}"].flatten(1), right[f"{name}.bias"]], dim=1)
            layers[name].values_bd.copy_(joined)

    got, _, _ = solve(low, data, options, change=same)
    assert set(got) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=1e-4, atol=1e-5)


def test_compiled_model():
    model, data = CASES["classifier"]()
    options = RefineOptions(damping=0.1, relative_damping=False, **TIGHT)
    expected, _, _ = solve(model, data, options)
    compiled = torch.compile(model, backend="eager")
    got, _, _ = solve(compiled, data, options)
    for name, value in expected.items():
        torch.testing.assert_close(got[f"_orig_mod.{name}"], value, rtol=1e-9, atol=1e-10)


# ---------------------------------------------------------------- conjugate gradients alone


def system(q=5, sizes=(4, 3), seed=0):
    generator = torch.Generator().manual_seed(seed)
    size = sum(sizes)
    root = torch.randn(size, size, generator=generator, dtype=F64)
    matrix = root @ root.t() + 0.1 * torch.eye(size, dtype=F64)
    right = torch.randn(q, size, generator=generator, dtype=F64)
    return matrix, {str(k): part for k, part in enumerate(right.split(sizes, dim=1))}


def joined(vectors):
    return torch.cat(list(vectors.values()), dim=1)


def cut(values, like):
    sizes = [value.shape[1] for value in like.values()]
    return dict(zip(like, values.split(sizes, dim=1), strict=True))


def run(matrix, right, *, precondition=lambda vectors: vectors, tolerance=1e-12, limit=100):
    seen = []

    def apply(vectors):
        seen.append(next(iter(vectors.values())).shape[0])
        return cut(joined(vectors) @ matrix, vectors)

    before = {name: value.clone() for name, value in right.items()}
    found = conjugate_gradients(
        apply, right, precondition, tolerance=tolerance, max_iterations=limit
    )
    torch.testing.assert_close(right, before, rtol=0, atol=0, equal_nan=True)
    return found, seen


def test_conjugate_gradients_solve():
    matrix, right = system()
    right["0"][2], right["1"][2] = 0, 0
    expected = torch.linalg.solve(matrix, joined(right).t()).t()
    found, seen = run(matrix, right)
    torch.testing.assert_close(joined(found.values), expected, rtol=1e-9, atol=1e-10)
    assert found.converged.all()
    assert found.iterations[2] == 0
    assert seen[0] == 4
    scale = matrix.diagonal()
    diagonal = {"0": scale[:4], "1": scale[4:]}
    turned, _ = run(
        matrix, right, precondition=lambda v: {k: x / diagonal[k] for k, x in v.items()}
    )
    torch.testing.assert_close(joined(turned.values), expected, rtol=1e-9, atol=1e-10)


def test_queries_that_arrived_stop_moving():
    """An eigenvector arrives after one product and takes part in no other."""
    matrix, right = system()
    vector = torch.linalg.eigh(matrix).eigenvectors[:, 0]
    right["0"][1], right["1"][1] = vector[:4], vector[4:]
    found, seen = run(matrix, right, tolerance=1e-9)
    assert found.iterations[1] == 1
    assert seen[:2] == [5, 4]
    alone, _ = run(matrix, {name: value[3:4] for name, value in right.items()}, tolerance=1e-9)
    torch.testing.assert_close(
        joined(found.values)[3:4], joined(alone.values), rtol=1e-9, atol=1e-10
    )
    assert found.iterations[3] == alone.iterations[0]


def test_iterations_run_out():
    matrix, right = system()
    found, seen = run(matrix, right, limit=2)
    assert len(seen) == 2
    assert not found.converged.any()
    assert (found.iterations == 2).all()
    residual = joined(right) - joined(found.values) @ matrix
    expected = residual.norm(dim=1) / joined(right).norm(dim=1)
    torch.testing.assert_close(found.residuals, expected, rtol=1e-9, atol=1e-12)


def test_matrix_that_is_not_positive_definite():
    matrix = torch.diag(torch.tensor([1.0, -1.0], dtype=F64))
    right = {"a": torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=F64)}
    found, _ = run(matrix, right)
    assert found.converged.tolist() == [True, False]
    assert found.values["a"].tolist() == [[1.0, 0.0], [0.0, 0.0]]
    nothing, _ = run(matrix, right, precondition=lambda vectors: {"a": 0 * vectors["a"]})
    assert not nothing.converged.any()
    assert not nothing.values["a"].any()


def test_right_hand_side_that_is_not_finite():
    matrix, right = system()
    right["0"][0, 0], right["1"][4, 1] = torch.nan, torch.inf
    found, _ = run(matrix, right)
    assert found.converged.tolist() == [False, True, True, True, False]
    assert joined(found.values)[[0, 4]].isnan().all()
    assert joined(found.values)[1:4].isfinite().all()
