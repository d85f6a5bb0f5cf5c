"""Interchange interventions and the search for a subspace: maths, passes, controls, refusals."""

import contextlib

import pytest
import torch
from interchanging import Mlp, Sequences, basis_of, call, drawn, last, principal, seeded
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from gradtrail import HookManager
from gradtrail.interchange import (
    LearnedSubspace,
    Site,
    arbitrary_targets,
    collect_activations,
    fit_das,
    interchange,
    interchange_accuracy,
    interchange_logits,
    mean_difference_basis,
    placebo_accuracy,
    random_basis,
    reinitialized,
)


class Planted(nn.Module):
    """The class is the signs of an activation's coordinates in a planted subspace."""

    def __init__(self, width, rank):
        super().__init__()
        self.planted = random_basis(width, rank, seed=99)
        self.site = nn.Identity()
        self.head = nn.Linear(width, 2**rank, bias=False)
        signs = [[2.0 * (label >> bit & 1) - 1 for bit in range(rank)] for label in range(2**rank)]
        with torch.no_grad():
            self.head.weight.copy_(4 * torch.tensor(signs) @ self.planted.T)

    def forward(self, x):
        return self.head(self.site(x))


def planted(width, rank, count, seed=0):
    model = Planted(width, rank).eval()
    base, source = (drawn(count, width, seed=2 * seed + one, dtype=torch.float32) for one in (5, 6))
    with torch.no_grad():
        return model, base, source, model(source).argmax(1)


def fitted(model, base, source, targets, **options):
    return fit_das(model, Site("site"), base, source, targets, call, **options)


# ---------------------------------------------------------------- the search


@pytest.mark.parametrize("seed", range(3))
def test_planted_direction_is_found(seed):
    model, base, source, targets = planted(6, 1, 256)
    result = fitted(model, base, source, targets, rank=1, epochs=30, lr=5e-2, seed=seed)
    basis = result.subspace.basis.detach()
    assert abs(float(basis[:, 0] @ model.planted[:, 0])) > 0.95
    _, base, source, targets = planted(6, 1, 500, seed=1)
    assert interchange_accuracy(model, "site", basis, base, source, call, targets) > 0.9
    assert len(result.losses) == 60
    assert result.losses[-1] < result.losses[0] / 10
    assert (result.site, result.rank) == (Site("site"), 1)


@pytest.mark.parametrize("lr", [1e-2, 5e-2])
def test_planted_plane_is_found(lr):
    model, base, source, targets = planted(256, 2, 1024)
    result = fitted(model, base, source, targets, rank=2, lr=lr)
    assert principal(result.subspace.basis.detach(), model.planted) > 0.95


def test_one_step_is_plain_adam_on_the_mean_loss():
    """The gradient of the basis equals autograd's through the formula written out."""
    model, base, source, targets = planted(6, 2, 8)
    model = model.double()
    base, source = base.double(), source.double()
    start = LearnedSubspace(6, 2, seed=3, dtype=torch.float64)
    b = start.basis
    loss = F.cross_entropy(model.head(base + 0.5 * (source - base) @ b @ b.T), targets)
    loss.backward()
    optimizer = torch.optim.Adam([start.raw], lr=1e-2)
    optimizer.step()
    for micro in (None, 3, 1, 100):
        result = fitted(
            model,
            base,
            source,
            targets,
            rank=2,
            epochs=1,
            seed=3,
            strength=0.5,
            micro_batch_size=micro,
        )
        assert result.losses == pytest.approx((loss.item(),), rel=1e-12)
        torch.testing.assert_close(result.subspace.raw, start.raw, rtol=1e-10, atol=1e-12)
    assert result.subspace.raw.dtype == torch.float64


@pytest.mark.parametrize("micro", [1, 5, 16])
def test_no_forward_exceeds_the_micro_batch(micro):
    model, base, source, targets = planted(6, 1, 43)
    sizes = []

    def forward(model, inputs):
        sizes.append(len(inputs))
        return model(inputs)

    options = {"rank": 1, "epochs": 2, "batch_size": 20}
    result = fit_das(
        model, "site", base, source, targets, forward, micro_batch_size=micro, **options
    )
    assert max(sizes) <= micro
    assert sum(sizes) == 3 * 43  # the sources once, the bases once an epoch
    whole = fitted(model, base, source, targets, **options)
    assert len(result.losses) == len(whole.losses) == 6
    torch.testing.assert_close(result.subspace.raw, whole.subspace.raw, rtol=0, atol=1e-5)


GENERATORS = [
    (torch, "manual_seed"),
    (torch, "seed"),
    (torch.random, "fork_rng"),
    (torch.cuda, "manual_seed"),
    (torch.cuda, "manual_seed_all"),
    (torch.mps, "manual_seed"),
    (torch.xpu, "manual_seed"),
    (torch.xpu, "manual_seed_all"),
]


def test_no_global_generator_is_touched(monkeypatch):
    model, base, source, targets = planted(6, 1, 64)
    before = torch.get_rng_state()
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []

    def refuse(*_, **__):
        raise AssertionError("a global generator was seeded")

    for module, name in GENERATORS:
        monkeypatch.setattr(module, name, refuse)
    first = fitted(model, base, source, targets, rank=1, epochs=2, seed=5)
    random_basis(6, 2)
    arbitrary_targets([1, 2], 2)
    reinitialized(model)
    placebo_accuracy(model, "site", first.subspace, base, source, call, targets)
    again = fitted(model, base, source, targets, rank=1, epochs=2, seed=5)
    other = fitted(model, base, source, targets, rank=1, epochs=2, seed=6)
    assert torch.equal(first.subspace.raw, again.subspace.raw)
    assert not torch.allclose(first.subspace.raw, other.subspace.raw)
    assert torch.equal(torch.get_rng_state(), before)
    if devices:
        after = torch.cuda.get_rng_state_all()
        assert all(torch.equal(a, b) for a, b in zip(after, devices, strict=True))


def test_order_of_pairs_does_not_repeat_the_numbers_of_the_basis(monkeypatch):
    """One generator for both: the order comes after the basis, not from the same seed again."""
    seen = []
    original = torch.randperm
    monkeypatch.setattr(torch, "randperm", lambda n, **k: seen.append(original(n, **k)) or seen[-1])
    model, base, source, targets = planted(6, 1, 64)
    fitted(model, base, source, targets, rank=1, epochs=2, seed=5)
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[0], original(64, generator=torch.Generator().manual_seed(5)))


def left(model):
    modules = [
        (name, m.training, len(m._forward_hooks), len(m._forward_pre_hooks))
        for name, m in model.named_modules()
    ]
    parameters = [(name, p.requires_grad, p.grad) for name, p in model.named_parameters()]
    return modules, parameters, torch.backends.mha.get_fastpath_enabled()


@pytest.mark.parametrize("fails", [None, 1, 2, 4], ids=str)
def test_model_is_left_as_it_was(fails):
    model, base, source, targets = planted(6, 1, 64)
    model.extra = nn.Linear(2, 2).requires_grad_(False).eval()
    before, calls = left(model), [0]
    weights = {name: value.clone() for name, value in model.state_dict().items()}

    def forward(model, inputs):
        calls[0] += 1
        if calls[0] == fails:
            raise RuntimeError("out of memory")
        return model(inputs)

    with pytest.raises(RuntimeError, match="out of mem") if fails else contextlib.nullcontext():
        fit_das(model, "site", base, source, targets, forward, rank=1, epochs=2, batch_size=32)
    assert left(model) == before
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
    assert torch.is_grad_enabled()


def test_model_is_frozen_during_the_fit():
    model, base, source, targets = planted(6, 1, 16)
    flags = []

    def forward(model, inputs):
        flags.append(model.head.weight.requires_grad)
        return model(inputs)

    fit_das(model, "site", base, source, targets, forward, rank=1, epochs=1)
    assert flags == [True, False]  # collected without gradient, then fitted
    assert model.head.weight.requires_grad
    assert model.head.weight.grad is None


def test_fit_where_gradients_are_off():
    model, base, source, targets = planted(6, 1, 64)
    expected = fitted(model, base, source, targets, rank=1, epochs=2)
    with torch.no_grad():
        found = fitted(model, base, source, targets, rank=1, epochs=2)
    assert torch.equal(found.subspace.raw, expected.subspace.raw)


def test_half_precision_model_learns_in_float32():
    model, base, source, targets = planted(6, 1, 256)
    result = fitted(
        model.bfloat16(), base.bfloat16(), source.bfloat16(), targets, rank=1, epochs=30, lr=5e-2
    )
    assert result.subspace.raw.dtype == torch.float32
    assert abs(float(result.subspace.basis.detach()[:, 0] @ model.planted[:, 0].float())) > 0.95


class Recomputed(nn.Module):
    """A planted model whose blocks run again in the backward."""

    def __init__(self, use_reentrant, *, opened):
        super().__init__()
        self.inner = Planted(6, 1)
        self.use_reentrant = use_reentrant
        self.opened = opened

    def forward(self, x):
        if self.opened:
            x = x.clone().requires_grad_()
        return checkpoint(self.inner, x, use_reentrant=self.use_reentrant)


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["saved tensors", "reentrant"])
def test_intervention_stays_while_checkpointing_recomputes(use_reentrant):
    model, base, source, targets = planted(6, 1, 64)
    expected = fitted(model, base, source, targets, rank=1, epochs=3, batch_size=16)
    again = Recomputed(use_reentrant, opened=use_reentrant).eval()
    runs = []
    again.inner.site.register_forward_hook(lambda *_: runs.append(1))
    found = fit_das(
        again, "inner.site", base, source, targets, call, rank=1, epochs=3, batch_size=16
    )
    torch.testing.assert_close(found.subspace.raw, expected.subspace.raw, rtol=0, atol=1e-6)
    assert len(runs) == 4 + 2 * 12  # the sources once, every step twice


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
def test_checkpointing_that_drops_the_basis_is_refused():
    _, base, source, targets = planted(6, 1, 16)
    model = Recomputed(True, opened=False).eval()
    with pytest.raises(RuntimeError, match="must depend on the basis.*use_reentrant=False"):
        fit_das(model, "inner.site", base, source, targets, call, rank=1)


def test_training_capture_does_not_see_the_passes():
    model = seeded(Mlp)
    base, source = drawn(6, 4, seed=1), drawn(6, 4, seed=2)
    targets = drawn(6, seed=3, high=3)
    manager = HookManager(model)
    with manager.collect():
        model(base).sum().backward()
        result = fit_das(model, "second", base, source, targets, call, rank=1, epochs=1)
        interchange_logits(model, "second", result.subspace, base, source, call)
        collect_activations(model, "second", base, call)
        assert manager.steps == 1
        model(base).sum().backward()
    assert manager.steps == 2


# ---------------------------------------------------------------- the subspace


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_basis_is_orthonormal_and_differentiable(dtype):
    subspace = LearnedSubspace(7, 3, seed=4, dtype=dtype)
    torch.testing.assert_close(subspace.basis, subspace.raw, rtol=0, atol=1e-6)
    with torch.no_grad():
        subspace.raw.add_(torch.randn(7, 3, generator=torch.Generator().manual_seed(0)))
    basis = subspace.basis
    torch.testing.assert_close(basis.T @ basis, torch.eye(3, dtype=dtype), rtol=0, atol=1e-5)
    triangular = basis.T @ subspace.raw
    assert (triangular.diagonal() > 0).all()
    torch.testing.assert_close(
        triangular.tril(-1), torch.zeros(3, 3, dtype=dtype), atol=1e-5, rtol=0
    )
    assert sum(1 for _ in subspace.buffers()) == 0
    assert "width=7, rank=3" in repr(subspace)


def test_gradient_of_the_basis_is_exact():
    subspace = LearnedSubspace(5, 2, dtype=torch.float64)
    assert torch.autograd.gradcheck(
        _basis,
        (subspace.raw.detach().clone().requires_grad_(),),
    )


def _basis(raw):
    subspace = LearnedSubspace(*raw.shape, dtype=raw.dtype)
    del subspace.raw
    subspace.raw = raw
    return subspace.basis


def test_subspace_survives_its_state_dict():
    first, second = LearnedSubspace(5, 2, seed=1), LearnedSubspace(5, 2, seed=2)
    second.load_state_dict(first.state_dict())
    assert torch.equal(first.basis, second.basis)


def test_interchange_is_the_formula():
    base, source, basis = drawn(3, 2, 5, seed=1), drawn(3, 2, 5, seed=2), basis_of(5)
    expected = base + 0.3 * (source - base) @ basis @ basis.T
    torch.testing.assert_close(interchange(base, source, basis, 0.3), expected, rtol=1e-12, atol=0)
    assert torch.equal(interchange(base, base, basis), base)
    full = interchange(base, source, torch.eye(5, dtype=torch.float64))
    torch.testing.assert_close(full, source, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_interchange_computes_wide_and_casts_back(dtype):
    base, source, basis = drawn(4, 64, seed=1), drawn(4, 64, seed=2), basis_of(64)
    low = interchange(base.to(dtype), source.to(dtype), basis)
    assert low.dtype == dtype
    wide = interchange(base.to(dtype).float(), source.to(dtype).float(), basis.float())
    assert torch.equal(low, wide.to(dtype))


# ---------------------------------------------------------------- passes


@pytest.mark.parametrize("batch_size", [1, 3, 256])
def test_activations_and_logits_of_vectors(batch_size):
    model, basis = seeded(Mlp), basis_of(6)
    base, source = drawn(7, 4, seed=1), drawn(7, 4, seed=2)
    with torch.no_grad():
        h_b, h_s = (model.second(model.norm(torch.tanh(model.first(x)))) for x in (base, source))
        expected = model.head(torch.tanh(h_b + (h_s - h_b) @ basis @ basis.T))
    found = collect_activations(model, Site("second"), base, call, batch_size=batch_size)
    torch.testing.assert_close(found, h_b, rtol=1e-12, atol=1e-12)
    assert not found.requires_grad
    logits = interchange_logits(model, "second", basis, base, source, call, batch_size=batch_size)
    torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-12)
    targets = torch.arange(7) % 3
    accuracy = interchange_accuracy(
        model, "second", basis, base, source, call, targets, batch_size=batch_size
    )
    assert accuracy == float((expected.argmax(1) == targets).double().mean())


@pytest.mark.parametrize("batch_size", [1, 2, 256])
@pytest.mark.parametrize("site", [Site("embed"), Site("block", 1), Site("norm")])
def test_one_position_a_row_is_replaced(site, batch_size):
    model, basis = seeded(Sequences), basis_of(6)
    base, source = drawn(4, 5, seed=1, high=11), drawn(4, 6, seed=2, high=11)
    base_positions, source_positions = torch.tensor([0, 2, 4, 3]), torch.tensor([5, 1, 0, 2])
    module = model.get_submodule(site.module)

    def pick(output):
        return output if site.output_index is None else output[site.output_index]

    expected = []
    for row in range(4):
        kept = []
        handle = module.register_forward_hook(lambda *a, kept=kept: kept.append(pick(a[2]).clone()))
        with torch.no_grad():
            model(source[row : row + 1])
            handle.remove()
            h_s = kept[0][0, source_positions[row]]

            def write(_module, _args, output, row=row, h_s=h_s):
                new = pick(output).clone()
                place = base_positions[row]
                new[0, place] += (h_s - new[0, place]) @ basis @ basis.T
                return new if site.output_index is None else (output[0], new)

            handle = module.register_forward_hook(write)
            expected.append(last(model, base[row : row + 1]))
            handle.remove()
    logits = interchange_logits(
        model,
        site,
        basis,
        base,
        source,
        last,
        base_positions=base_positions,
        source_positions=source_positions,
        batch_size=batch_size,
    )
    torch.testing.assert_close(logits, torch.cat(expected), rtol=1e-10, atol=1e-12)


def test_encoder_of_torch_takes_no_fast_path_past_the_site():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 1).double().eval()
    inputs, positions = drawn(3, 4, 8), torch.tensor([0, 1, 3])
    found = collect_activations(
        model, "layers.0.linear1", inputs, lambda m, x: m(x)[:, 0], positions=positions
    )
    assert found.shape == (3, 16)
    assert torch.backends.mha.get_fastpath_enabled()


def test_compiled_model_runs_as_it_is():
    model = seeded(Mlp)
    expected = collect_activations(model, "second", drawn(3, 4), call)
    compiled = torch.compile(model, backend="eager")
    compiled(drawn(3, 4))
    found = collect_activations(compiled, "_orig_mod.second", drawn(3, 4), call)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_names_of_tied_modules_and_of_hook_points_work():
    model = seeded(Mlp)
    model.also = model.second
    inputs = drawn(3, 4)
    expected = collect_activations(model, "second", inputs, call)
    for name in ("also", "hook_mid"):
        assert torch.equal(collect_activations(model, name, inputs, call), expected)


# ---------------------------------------------------------------- controls


def test_random_bases_are_orthonormal_and_differ():
    first, second = random_basis(50, 3, seed=0), random_basis(50, 3, seed=1)
    torch.testing.assert_close(first.T @ first, torch.eye(3), rtol=0, atol=1e-5)
    assert torch.equal(first, random_basis(50, 3, seed=0))
    assert principal(first, second) < 0.5
    assert not first.requires_grad
    assert random_basis(4, 1, dtype=torch.float64).dtype == torch.float64


def test_mean_difference_spans_the_class_means():
    labels = torch.tensor([0, 0, 3, 3, 3, 7])
    means = {0: drawn(6, seed=1), 3: drawn(6, seed=2), 7: drawn(6, seed=3)}
    noise = drawn(6, 6, seed=4)
    values = torch.stack([means[int(label)] for label in labels]) + 0.01 * noise
    own = [values[labels == label].mean(0) for label in (0, 3, 7)]
    basis = mean_difference_basis(values, labels)
    assert basis.shape == (6, 2)
    first = own[1] - own[0]
    torch.testing.assert_close(basis[:, 0], first / first.norm(), rtol=1e-10, atol=1e-12)
    for mean in own[1:]:
        difference = mean - own[0]
        torch.testing.assert_close(basis @ (basis.T @ difference), difference)
    assert mean_difference_basis(values.bfloat16(), labels).dtype == torch.float32


def test_arbitrary_targets_depend_on_the_key_alone_and_are_even():
    keys = ["a", "b", "c", "a", "d", "c", "e", "a"]
    targets = arbitrary_targets(keys, 2, seed=3)
    assert targets[0] == targets[3] == targets[7]
    assert targets[2] == targets[5]
    by_key = {key: int(target) for key, target in zip(keys, targets, strict=True)}
    assert sorted(by_key.values()).count(0) in (2, 3)
    assert torch.equal(targets, arbitrary_targets(keys, 2, seed=3))
    rows = torch.tensor([[1, 2], [3, 4], [1, 2]])
    of_rows = arbitrary_targets(rows, 5, seed=1)
    assert of_rows[0] == of_rows[2]
    assert torch.equal(of_rows, arbitrary_targets([(1, 2), (3, 4), (1, 2)], 5, seed=1))
    assert (
        len({tuple(arbitrary_targets(torch.arange(8), 2, seed).tolist()) for seed in range(9)}) > 5
    )


def test_reinitialized_keeps_scales_and_nothing_else():
    class Normed(Mlp):
        def __init__(self):
            super().__init__(width=64)
            self.stats = nn.BatchNorm1d(3)
            self.register_buffer("kept", torch.ones(2))

    model = seeded(Normed)
    model.stats.running_mean.fill_(5)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    other = reinitialized(model, seed=1)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    old, new = model.second.weight.detach(), other.second.weight.detach()
    assert abs(float(torch.corrcoef(torch.stack([old.flatten(), new.flatten()]))[0, 1])) < 0.1
    assert float(new.std()) == pytest.approx(float(old.std()), rel=0.1)
    assert not other.stats.running_mean.any()
    assert other.kept.all()
    assert other.training == model.training is False
    assert [p.requires_grad for p in other.parameters()] == [
        p.requires_grad for p in model.parameters()
    ]
    same, different = reinitialized(model, seed=1), reinitialized(model, seed=2)
    assert torch.equal(same.second.weight, new)
    assert not torch.equal(different.second.weight, new)
    tied = reinitialized(seeded(Sequences))
    assert tied.head.weight is tied.embed.weight


def test_placebo_moves_as_far_at_right_angles():
    model, base, source, targets = planted(6, 1, 300)
    basis = model.planted
    moved = {}
    model.head.register_forward_pre_hook(lambda _, args: moved.update(h=args[0]))
    real = interchange_accuracy(model, "site", basis, base, source, call, targets, batch_size=300)
    change = moved["h"] - base
    first = placebo_accuracy(
        model, "site", basis, base, source, call, targets, batch_size=300, seed=2
    )
    push = moved["h"] - base
    torch.testing.assert_close(push.norm(dim=1), change.norm(dim=1), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(push @ basis, torch.zeros(300, 1), rtol=0, atol=1e-5)
    assert real > 0.99
    with torch.no_grad():
        unmoved = float((model(base).argmax(1) == targets).double().mean())
    assert first == pytest.approx(unmoved, abs=0.01)
    by_one = placebo_accuracy(
        model, "site", basis, base, source, call, targets, batch_size=1, seed=2
    )
    assert by_one == pytest.approx(first, abs=0.01)


# ---------------------------------------------------------------- refusals

BASE, SOURCE = drawn(5, 4, seed=1), drawn(5, 4, seed=2)
TARGETS = torch.tensor([0, 1, 2, 0, 1])
IDS = drawn(5, 4, seed=1, high=11)
AT = torch.tensor([0, 1, 2, 3, 0])


def collect(**options):
    arguments = {"model": seeded(Mlp), "site": "second", "inputs": BASE, "forward": call}
    return collect_activations(**{**arguments, **options})


def logits(**options):
    arguments = {
        "model": seeded(Mlp),
        "site": "second",
        "basis": basis_of(6),
        "base_inputs": BASE,
        "source_inputs": SOURCE,
        "forward": call,
    }
    return interchange_logits(**{**arguments, **options})


def accuracy(**options):
    arguments = {
        "model": seeded(Mlp),
        "site": "second",
        "basis": basis_of(6),
        "base_inputs": BASE,
        "source_inputs": SOURCE,
        "forward": call,
        "targets": TARGETS,
    }
    return interchange_accuracy(**{**arguments, **options})


def fit(**options):
    arguments = {
        "model": seeded(Mlp),
        "site": "second",
        "base_inputs": BASE,
        "source_inputs": SOURCE,
        "targets": TARGETS,
        "forward": call,
        "rank": 1,
        "epochs": 1,
    }
    return fit_das(**{**arguments, **options})


def placebo(**options):
    arguments = {
        "model": seeded(Mlp),
        "site": "second",
        "basis": basis_of(6),
        "base_inputs": BASE,
        "source_inputs": SOURCE,
        "forward": call,
        "targets": TARGETS,
    }
    return placebo_accuracy(**{**arguments, **options})


def partly_training():
    model = seeded(Mlp)
    model.norm.train()
    model.head.train()
    return model


FUNCTIONS = [collect, logits, accuracy, fit, placebo]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_training_mode_is_refused_and_not_flipped(function):
    model = partly_training()
    with pytest.raises(ValueError, match=r"got 2 modules in training mode \(norm, head\)\. Call"):
        function(model=model)
    assert model.norm.training
    whole = seeded(Mlp).train()
    names = r"got 6 modules in training mode \(\(the model\), first, norm, \.\.\.\)"
    with pytest.raises(ValueError, match=names):
        function(model=whole)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_function_refuses(function):
    with torch.inference_mode(), pytest.raises(RuntimeError, match="outside torch.inference_mode"):
        function()
    with pytest.raises(TypeError, match="model must be a torch.nn.Module, got str"):
        function(model="gpt2")
    with pytest.raises(ValueError, match=r"got 'sekond'\. Near names: 'second'"):
        function(site="sekond")
    with pytest.raises(TypeError, match="site must be a Site or a module's name, got int"):
        function(site=2)
    with pytest.raises(TypeError, match="forward must be a callable .* got str"):
        function(forward="logits")
    with pytest.raises(ValueError, match="batch_size must be an integer of at least 1, got 0"):
        function(batch_size=0)
    with pytest.raises(RuntimeError, match=r"must run once in a forward, got 2 runs\. Name"):
        function(forward=lambda model, x: model(x) + model(x))
    with pytest.raises(RuntimeError, match="must run once in a forward, got 0 runs"):
        function(forward=lambda model, x: model.head(x.repeat(1, 2)[:, :6]))
    with pytest.raises(TypeError, match="must return a floating tensor of logits .* got tuple"):
        function(forward=lambda model, x: (model(x),))
    with pytest.raises(TypeError, match="got torch.int64"):
        function(forward=lambda model, x: model(x).argmax(1))
    with pytest.raises(ValueError, match=r"logits \[n, C\] with n=5, got \(5,\)"):
        function(forward=lambda model, x: model(x)[:, 0])
    broken = seeded(Mlp)
    with torch.no_grad():
        broken.first.bias[0] = torch.nan
    with pytest.raises(ValueError, match="activations at site second must be finite.* in row 0"):
        function(model=broken)


PAIRED = [logits, accuracy, fit, placebo]


@pytest.mark.parametrize("function", PAIRED)
@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"source_inputs": SOURCE[:4]}, ValueError, "got 5 bases and 4 sources"),
        ({"base_inputs": BASE[:0]}, ValueError, "base_inputs must hold at least one row, got none"),
        (
            {"source_inputs": [1.0]},
            TypeError,
            "source_inputs must be a tensor, .* got float at '0'",
        ),
        ({"base_inputs": "text"}, TypeError, "base_inputs must be a tensor, .* got str"),
        ({"base_inputs": {}}, TypeError, "base_inputs must be a tensor, .* got dict"),
        (
            {"base_inputs": {"x": BASE, "y": BASE[:2]}},
            ValueError,
            "base_inputs must hold tensors of one length on dimension 0, got .'x': 5, 'y': 2",
        ),
        ({"base_inputs": torch.tensor(1.0)}, ValueError, "of one length on dimension 0"),
        ({"base_positions": AT}, ValueError, "base_positions must be None at a site of .n, d"),
        ({"source_positions": AT}, ValueError, "source_positions must be None at a site of .n, d"),
        ({"base_positions": AT[:4]}, ValueError, r"base_positions .* shape \(5,\), got \(4,\)"),
        ({"base_positions": AT.double()}, TypeError, "base_positions must be an integer tensor"),
        (
            {"source_positions": [0] * 5},
            TypeError,
            "source_positions must be an integer .* got list",
        ),
        ({"source_positions": -AT}, ValueError, "source_positions must count from 0, got -3"),
    ],
    ids=lambda value: "" if isinstance(value, (type, str)) else next(iter(value)),
)
def test_pairs_that_do_not_fit_are_refused(function, options, error, match):
    with pytest.raises(error, match=match):
        function(**options)


@pytest.mark.parametrize("function", [accuracy, fit, placebo])
@pytest.mark.parametrize(
    ("targets", "error", "match"),
    [
        (TARGETS.double(), TypeError, "targets must be an integer tensor .* got torch.float64"),
        (TARGETS == 0, TypeError, "got torch.bool"),
        (TARGETS.tolist(), TypeError, "got list"),
        (None, TypeError, "targets must be an integer tensor with one class a row, got NoneType"),
        (TARGETS[:3], ValueError, r"one class a row, shape \(5,\), got \(3,\)"),
        (TARGETS - 1, ValueError, "targets must be classes from 0, got -1"),
        (TARGETS + 1, ValueError, "targets must be classes below 3, .* got 3"),
    ],
)
def test_targets_that_do_not_fit_are_refused(function, targets, error, match):
    with pytest.raises(error, match=match):
        function(targets=targets)


@pytest.mark.parametrize("function", [logits, accuracy, placebo])
@pytest.mark.parametrize(
    ("basis", "error", "match"),
    [
        ([[1.0]], TypeError, "basis must be a floating tensor .* got list"),
        (torch.eye(6).long(), TypeError, "got torch.int64"),
        (
            torch.eye(6)[0],
            ValueError,
            r"basis must be \[d, k\] .* got \(6,\)\. Write one direction",
        ),
        (torch.ones(2, 6), ValueError, "basis must be .* with 1 <= k <= d"),
        (torch.eye(6)[:, :0], ValueError, "basis must be .* with 1 <= k <= d"),
        (1.001 * torch.eye(6)[:, :2], ValueError, "orthonormal columns .* differs .* by 0.002"),
        (torch.full((6, 1), torch.nan), ValueError, "orthonormal columns .* by nan"),
        (basis_of(5), ValueError, r"width d=6, got \(5, 2\)"),
    ],
    ids=str,
)
def test_bases_that_do_not_fit_are_refused(function, basis, error, match):
    with pytest.raises(error, match=match):
        function(basis=basis)


def test_basis_nearly_orthonormal_is_taken():
    exact, near = torch.eye(6)[:, :2], (1 + 2e-5) * torch.eye(6)[:, :2]
    torch.testing.assert_close(logits(basis=near), logits(basis=exact), rtol=0, atol=1e-3)
    assert not torch.equal(logits(basis=near), logits(basis=exact)), "taken as it is"


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"rank": 0}, ValueError, r"rank must be an integer in \[1, 6\], got 0"),
        ({"rank": 7}, ValueError, r"rank must be an integer in \[1, 6\], got 7"),
        ({"rank": True}, ValueError, "rank must be an integer"),
        ({"epochs": 0}, ValueError, "epochs must be an integer of at least 1, got 0"),
        ({"micro_batch_size": 0}, ValueError, "micro_batch_size must be an integer of at least 1"),
        ({"lr": 0.0}, ValueError, "lr must be a positive number, got 0.0"),
        ({"lr": float("inf")}, ValueError, "lr must be a positive number, got inf"),
        ({"strength": float("inf")}, ValueError, "strength must be a finite number, got inf"),
    ],
)
def test_fit_refuses(options, error, match):
    with pytest.raises(error, match=match):
        fit(**options)


def test_loss_that_is_no_number_is_refused():
    def forward(model, x):
        return model(x) * (torch.nan if torch.is_grad_enabled() else 1)

    with pytest.raises(ValueError, match="loss of intervened runs must be finite, got nan"):
        fit(forward=forward)
    with pytest.raises(ValueError, match="logits of intervened runs must be numbers, got NaN"):
        logits(forward=lambda model, x: model(x) * torch.nan)


def test_site_without_a_part_in_the_logits_is_refused():
    model = seeded(Mlp)
    with pytest.raises(RuntimeError, match="must depend on the basis, got logits that the site"):
        fit(model=model, forward=lambda model, x: (model(x), model.first(x))[1])


@pytest.mark.parametrize(
    ("site", "positions", "error", "match"),
    [
        ("embed", None, ValueError, r"positions must be given at a site of \[n, T, d\], got None"),
        ("embed", AT + 1, ValueError, "positions must be below the 4 positions .* got 4"),
        ("block", AT, TypeError, r"site block must give a floating tensor, got tuple\. Pick"),
        (Site("block", 2), AT, ValueError, "output_index must be below 2, .* got 2"),
        (Site("norm", 0), AT, TypeError, "output_index must be None where norm returns no tuple"),
        ("ids", AT, TypeError, "must give a floating tensor, got torch.int64"),
        ("cube", AT, ValueError, r"must give \[n, d\] or \[n, T, d\], got \(5, 4, 2, 3\)"),
        ("rows", None, ValueError, r"one entry a row of the inputs on dimension 0 \(5\), got \(20"),
    ],
)
def test_sites_that_do_not_fit_are_refused(site, positions, error, match):
    class Odd(Sequences):
        def __init__(self):
            super().__init__()
            self.ids, self.cube, self.rows = nn.Identity(), nn.Identity(), nn.Identity()

        def forward(self, ids):
            hidden = self.embed(self.ids(ids))
            self.cube(hidden.unflatten(2, (2, 3)))
            self.rows(hidden.flatten(0, 1))
            return self.head(self.norm(self.block(hidden)[1]))

    with pytest.raises(error, match=match):
        collect_activations(seeded(Odd), site, IDS, last, positions=positions)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ((3,), "Site.module must be a dotted name, got int"),
        (("a", "b"), "integer or None, got str"),
    ],
)
def test_site_refuses(arguments, match):
    with pytest.raises(TypeError, match=match):
        Site(*arguments)


def test_maths_refuse_shapes_that_do_not_fit():
    base = drawn(3, 5)
    with pytest.raises(ValueError, match=r"base and source must have one shape, got \(3, 5\) and"):
        interchange(base, base[:2], basis_of(5))
    with pytest.raises(ValueError, match=r"width d=5, got \(4, 2\)"):
        interchange(base, base, basis_of(4))
    with pytest.raises(ValueError, match=r"width d=5, got \(5,\)"):
        interchange(base, base, basis_of(5)[:, 0])
    with pytest.raises(ValueError, match="strength must be a finite number, got None"):
        interchange(base, base, basis_of(5), None)
    with pytest.raises(ValueError, match="width must be an integer of at least 1, got 0"):
        LearnedSubspace(0, 1)
    with pytest.raises(ValueError, match="dtype must be one of torch.float32, torch.float64"):
        LearnedSubspace(4, 1, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"rank must be an integer in \[1, 4\], got 5"):
        random_basis(4, 5)


def test_controls_refuse():
    values = drawn(6, 3)
    with pytest.raises(ValueError, match=r"activations must be \[n, d\], got \(6,\)"):
        mean_difference_basis(values[:, 0], torch.arange(6))
    with pytest.raises(ValueError, match=r"labels must hold 2 to 3 classes \(the width\), got 1"):
        mean_difference_basis(values, torch.zeros(6).long())
    with pytest.raises(ValueError, match="labels must hold 2 to 3 classes .* got 6"):
        mean_difference_basis(values, torch.arange(6))
    with pytest.raises(ValueError, match="labels must have class means that differ"):
        mean_difference_basis(values[[0, 1, 0, 1]], torch.tensor([0, 0, 1, 1]))
    with pytest.raises(ValueError, match="keys must hold at least one key, got none"):
        arbitrary_targets([], 2)
    with pytest.raises(ValueError, match="num_classes must be an integer of at least 1, got 0"):
        arbitrary_targets([1], 0)
    with pytest.raises(ValueError, match="basis must leave room at right angles to it, got rank 6"):
        placebo(basis=torch.eye(6))
