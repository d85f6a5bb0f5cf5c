"""K-FAC and EK-FAC scores against the dense oracle, and what they must not depend on."""

import copy
import math
import warnings

import curvature_oracle as oracle
import pytest
import torch
from models import build, exactly, pad_left, rows_of, text_rows, tiny
from torch import nn
from torch.nn import functional as F

from gradtrail import (
    CurvatureError,
    GradTrailWarning,
    attribute,
    coverage,
    reference,
    self_influence,
)
from gradtrail.attribution import curvature_scoring, kept, kronecker_run
from gradtrail.attribution.data import as_rows
from gradtrail.attribution.kronecker import KroneckerMethod
from gradtrail.attribution.losses import resolve_loss
from gradtrail.attribution.scores import AttributionScores

F64 = torch.float64
METHODS = ["kfac", "ekfac"]
TIGHT = {"rtol": 1e-6, "atol": 1e-6}  # results are float32


def run(model, train, query, **options):
    return attribute(model, train, query, progress=False, **options)


def values(model, train, query, **options):
    return run(model, train, query, **options).values.double()


def close(got, expected, rtol=1e-6):
    """Entries relative to the largest: scores of float32 hold seven digits of that."""
    scale = float(expected.abs().max()) or 1.0
    torch.testing.assert_close(got.double(), expected, rtol=rtol, atol=rtol * scale)


class Net(nn.Module):
    """Two layers on every position of ``[b, s, i]``, of which those with a mark of 0 count nothing.

    The marked positions meet the layers, but their output gradients are exactly 0.
    """

    def __init__(self, bias=True, width=5, dtype=F64):
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(4, width, bias=bias, dtype=dtype)
        self.second = nn.Linear(width, 3, bias=bias, dtype=dtype)

    def forward(self, x):
        mark = (x[..., :1] > -1).to(x)
        return (mark * self.second(torch.tanh(self.first(x)))).sum(1)


def sequences(n, s=3, seed=0, classes=3, width=4):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, s, width, generator=generator, dtype=F64)
    return [(x[row], torch.tensor(row % classes)) for row in range(n)]


def vectors(n, width=4, seed=0):
    return [(x[0], y) for x, y in sequences(n, 1, seed, width=width)]


OWNERS = {"first": ["first"], "second": ["second"]}
TRAIN, QUERY = sequences(9), sequences(4, seed=5)
KEEP = {"kept": None, "passes": 0}  # gradient_budget


def observed(model, data, owners=OWNERS, **options):
    return oracle.observe(model, data, owners, **options)


# ---------------------------------------------------------------- the oracle itself


@pytest.mark.parametrize("bias", [True, False])
def test_the_oracle_agrees_with_autograd(bias):
    model = Net(bias)
    layers = observed(model, TRAIN)
    rows, loss = as_rows(TRAIN, "train", None, 0), resolve_loss(None, None)
    singles = [rows.batch([number]) for number in range(len(rows))]
    gradients = reference.per_example_gradients(model, singles, loss)
    for name, layer in layers.items():
        expected = gradients[f"{name}.weight"]
        if bias:
            expected = torch.cat([expected, gradients[f"{name}.bias"].unsqueeze(-1)], -1)
        torch.testing.assert_close(layer.matrices()[:, 0], expected, rtol=1e-12, atol=1e-12)
    marked = sum(int((x[:, 0] > -1).sum()) for x, _ in TRAIN)
    assert oracle.covariances(layers, "first")[2] == marked < 27


# ---------------------------------------------------------------- equal to Kronecker products


DAMPINGS = {
    "default": ({}, {}),
    "relative": ({"damping": 0.5}, {"damping": 0.5}),
    "absolute": (
        {"damping": 0.03, "relative_damping": False},
        {"damping": 0.03, "relative": False},
    ),
}


@pytest.mark.parametrize("budget", KEEP.values(), ids=KEEP)
@pytest.mark.parametrize("damping", DAMPINGS)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("method", METHODS)
def test_two_layers(method, bias, damping, budget):
    model = Net(bias)
    options, dense = DAMPINGS[damping]
    train, query = observed(model, TRAIN), observed(model, QUERY)
    expected = oracle.scores(train, query, method, **dense)
    got = run(model, TRAIN, QUERY, method=method, gradient_budget=budget, batch_size=4, **options)
    close(got.values, expected)
    assert isinstance(got, AttributionScores)
    assert got.method == method
    assert got.options["fisher"] == "empirical"
    assert got.options["damping"] == options.get("damping")


@pytest.mark.parametrize("method", METHODS)
def test_the_fit_itself(method):
    from gradtrail import EKFACAttributor, KFACAttributor  # noqa: PLC0415

    model, layers = Net(), observed(Net(), TRAIN)
    bound = {"kfac": KFACAttributor, "ekfac": EKFACAttributor}[method](model, progress=False)
    with bound:
        fit = bound.fit(TRAIN)
        assert fit is bound.fit_
        assert fit.num_examples == len(TRAIN)
        for name in OWNERS:
            cov_a, cov_s, positions = oracle.covariances(layers, name)
            assert fit.records[name].num_positions == positions
            curvature = fit.curvature(name)
            if method == "kfac":
                torch.testing.assert_close(curvature.activation_cov_gjj, cov_a)
                torch.testing.assert_close(curvature.gradient_cov_goo, cov_s)
                continue
            q_a, q_s = curvature.activation_basis_gjj, curvature.gradient_basis_goo
            for basis, cov in ((q_a, cov_a), (q_s, cov_s)):
                turned = basis.transpose(1, 2) @ cov @ basis
                off = turned - torch.diag_embed(turned.diagonal(dim1=1, dim2=2))
                assert float(off.abs().max()) < 1e-12 * float(turned.abs().max()) + 1e-14
                eye = torch.eye(basis.shape[1], dtype=F64)
                torch.testing.assert_close(basis[0].t() @ basis[0], eye)
            turned = layers[name].rows() @ torch.kron(q_s[0], q_a[0])
            expected = turned.square().mean(0).view_as(curvature.eigenvalues_goj)
            torch.testing.assert_close(curvature.eigenvalues_goj, expected, rtol=1e-9, atol=1e-14)


def test_relative_damping_is_of_each_factors_own_mean():
    """Scaling the loss by c scales S by c^2 and A by 1, so K-FAC's relative damping follows."""
    model, name = Net(), "first"
    layers = observed(model, TRAIN)
    cov_a, cov_s, _ = oracle.covariances(layers, name)
    lambda_a = 0.1 * float(cov_a[0].diagonal().mean())
    lambda_s = 0.1 * float(cov_s[0].diagonal().mean())
    solve = torch.kron(
        torch.linalg.inv(cov_s[0] + lambda_s * torch.eye(5, dtype=F64)),
        torch.linalg.inv(cov_a[0] + lambda_a * torch.eye(5, dtype=F64)),
    )
    expected = layers[name].rows() @ solve @ layers[name].rows().t()
    close(values(model, TRAIN, TRAIN, method="kfac", layers=name), expected)


def linear_loss(model, batch):
    """A loss whose gradient at the output is the target, whatever the input."""
    x, direction = batch
    return (model(x) * direction).sum(-1)


def product_design(weights=None):
    """Every input with every output gradient: a, g independent, one position an example."""
    torch.manual_seed(0)
    inputs, directions = torch.randn(5, 4, dtype=F64), torch.randn(4, 3, dtype=F64)
    if weights is not None:
        inputs = torch.linalg.qr(torch.randn(4, 4, dtype=F64))[0]
        directions = torch.linalg.qr(torch.randn(3, 3, dtype=F64))[0]
    scale = torch.ones(len(inputs), len(directions)) if weights is None else weights
    return [
        (scale[k, m] * a, scale[k, m] * g)
        for k, a in enumerate(inputs)
        for m, g in enumerate(directions)
    ]


def test_kfac_is_ekfac_where_inputs_and_gradients_are_independent():
    """One position an example and every a with every g: Lambda is the product of the spectra."""
    model = nn.Linear(4, 3, bias=False, dtype=F64)
    train = product_design()
    query = [(x[0], g) for (x, _), (_, g) in zip(sequences(3, 1), product_design(), strict=False)]
    found = {
        method: values(model, train, query, method=method, loss=linear_loss, damping=0.0)
        for method in METHODS
    }
    close(found["ekfac"], found["kfac"])
    rows = observed(nn.Sequential(model), train, {"0": ["0"]}, loss=linear_loss)["0"].rows()
    queries = observed(nn.Sequential(model), query, {"0": ["0"]}, loss=linear_loss)["0"].rows()
    fisher = rows.t() @ rows / len(rows)
    close(found["kfac"], rows @ torch.linalg.inv(fisher) @ queries.t())


@pytest.mark.parametrize("damping", [0.1, 0.02])
def test_ekfac_is_the_exact_fisher_where_gradients_are_orthogonal(damping):
    """One example a block: orthogonal inputs meet orthogonal output gradients, each pair once.

    The Fisher is then diagonal in the Kronecker eigenbasis (lengths differ by pair, so that it is
    unique), with the squared length of each pair's gradient as eigenvalue: EK-FAC is exact at any
    damping. K-FAC is not: these lengths are no products of a row's and a column's.
    """
    generator = torch.Generator().manual_seed(3)
    weights = torch.rand(4, 3, generator=generator, dtype=F64) + 0.5
    model = nn.Linear(4, 3, bias=False, dtype=F64)
    train = product_design(weights)
    query = [(x[0], torch.randn(3, generator=generator, dtype=F64)) for x, _ in sequences(5, 1)]
    whole = nn.Sequential(model)
    rows = observed(whole, train, {"0": ["0"]}, loss=linear_loss)["0"].rows()
    queries = observed(whole, query, {"0": ["0"]}, loss=linear_loss)["0"].rows()
    expected = rows @ oracle.dense_inverse(rows, damping) @ queries.t()
    options = {"loss": linear_loss, "damping": damping}
    close(values(model, train, query, method="ekfac", **options), expected)
    kfac = values(model, train, query, method="kfac", **options)
    assert float((kfac - expected).abs().max()) > 0.05 * float(expected.abs().max())


# ---------------------------------------------------------------- what scores do not depend on


@pytest.mark.parametrize("budget", KEEP.values(), ids=KEEP)
@pytest.mark.parametrize("method", METHODS)
def test_batch_sizes(method, budget):
    model = Net()
    expected = values(model, TRAIN, QUERY, method=method, gradient_budget=budget)
    for batch_size in (1, 4, 5, 9):
        got = values(
            model,
            TRAIN,
            QUERY,
            method=method,
            gradient_budget=budget,
            batch_size=batch_size,
            query_batch_size=3 if batch_size == 4 else None,
        )
        close(got, expected)


@pytest.mark.parametrize("method", METHODS)
def test_order(method):
    model, rows, columns = Net(), [3, 8, 0, 5, 2, 1, 7, 4, 6], [2, 0, 3, 1]
    plain = values(model, TRAIN, QUERY, method=method)
    train, query = [TRAIN[n] for n in rows], [QUERY[n] for n in columns]
    close(values(model, train, query, method=method), plain[rows][:, columns])


@pytest.mark.parametrize("budget", KEEP.values(), ids=KEEP)
@pytest.mark.parametrize("method", METHODS)
def test_repeated_to_the_bit(method, budget):
    model = Net(dtype=torch.float32)
    train = [(x.float(), y) for x, y in TRAIN]
    first, second = (
        run(model, train, train, method=method, gradient_budget=budget).values for _ in range(2)
    )
    assert torch.equal(first, second)


@pytest.mark.parametrize("per_token", [False, True], ids=["example", "token"])
@pytest.mark.parametrize("options", [{}, {"query_rank": 2}, {"normalize": "both"}], ids=str)
@pytest.mark.parametrize("budget", KEEP.values(), ids=KEEP)
@pytest.mark.parametrize("method", METHODS)
def test_queries_in_chunks(method, budget, options, per_token, monkeypatch):
    if per_token and "normalize" in options:
        options = {"normalize": "train"}
    options = {**options, "method": method, "gradient_budget": budget}
    options["granularity"] = "token" if per_token else "example"
    model, train = tiny(), text_rows()
    query = text_rows((4, 6, 2, 7, 3), seed=8)
    layers = ["mix", "up", "down"]
    whole = run(model, train, query, layers=layers, **options)
    chunks = []
    scored = kronecker_run.KroneckerRun._score_part

    def note(self, task, queries, columns, *, last):
        chunks.append((columns, last))
        return scored(self, task, queries, columns, last=last)

    monkeypatch.setattr(kronecker_run.KroneckerRun, "_score_part", note)
    monkeypatch.setattr(kronecker_run, "query_budget", lambda _: 2000)
    cut = run(model, train, query, layers=layers, **options)
    assert len(chunks) > 1
    assert [last for _, last in chunks] == [False] * (len(chunks) - 1) + [True]
    close(cut.values, whole.values.double(), rtol=2e-6)
    if "query_rank" in options:
        assert cut.options["query_energy"] == pytest.approx(whole.options["query_energy"])


@pytest.mark.parametrize("method", METHODS)
def test_a_budget_that_is_too_small_only_costs_time(method, monkeypatch):
    model, options = Net(), {"method": method, "batch_size": 2}
    expected = values(model, TRAIN, QUERY, **options)
    dropped, drop = [], kept.KeptFactors.drop

    def note(self):
        dropped.append(self.active)
        drop(self)

    monkeypatch.setattr(kept.KeptFactors, "drop", note)
    for budget in (1, 300, 2000, 5000):
        dropped.clear()
        close(values(model, TRAIN, QUERY, gradient_budget=budget, **options), expected)
        assert dropped[0] == (budget < 5000)


def test_turned_gradients_in_small_blocks(monkeypatch):
    model, expected = Net(), values(Net(), TRAIN, QUERY, method="ekfac", normalize="train")
    for name in ("_TURNED", "_WRITTEN"):
        monkeypatch.setattr(curvature_scoring, name, 300)
    for options in ({}, {"damping_sweep": [0.1, 0.5]}):
        got = run(model, TRAIN, QUERY, method="ekfac", batch_size=2, normalize="train", **options)
        got = got[0.1] if options else got
        close(got.values, expected)


@pytest.mark.parametrize("method", METHODS)
def test_duplicating_the_training_set_changes_nothing(method):
    once = values(Net(), TRAIN, QUERY, method=method)
    twice = values(Net(), TRAIN * 2, QUERY, method=method)
    close(twice, torch.cat([once, once]))


@pytest.mark.parametrize("method", METHODS)
def test_mean_and_sum_losses(method):
    def total(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")

    def mean(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    model, expected = Net(), values(Net(), TRAIN, QUERY, method=method)
    for loss, reduction in ((total, "sum"), (mean, "mean")):
        options = {"loss": loss, "loss_reduction": reduction, "method": method, "batch_size": 4}
        close(values(model, TRAIN, QUERY, **options), expected)
        close(values(model, TRAIN, QUERY, gradient_budget=0, **options), expected)


@pytest.mark.parametrize("budget", KEEP.values(), ids=KEEP)
@pytest.mark.parametrize("method", METHODS)
def test_the_model_is_left_as_it_was(method, budget):
    model = tiny()
    model.mix.weight.requires_grad_(False)  # noqa: FBT003
    model.up.eval()
    model.up.weight.grad = torch.ones_like(model.up.weight)
    state = copy.deepcopy(model.state_dict())
    flags = [p.requires_grad for p in model.parameters()]
    modes = [m.training for m in model.modules()]
    before = torch.get_rng_state()
    run(model, text_rows(), text_rows((3, 4)), method=method, gradient_budget=budget)
    self_influence(model, text_rows(), method=method, gradient_budget=budget, progress=False)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert [p.requires_grad for p in model.parameters()] == flags
    assert [m.training for m in model.modules()] == modes
    assert torch.equal(model.up.weight.grad, torch.ones_like(model.up.weight))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


# ---------------------------------------------------------------- language models

GPT2 = [f"transformer.h.{n}.{part}" for n in range(2) for part in
        ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")]  # fmt: skip
LLAMA = [f"model.layers.{n}.{part}" for n in range(2) for part in (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)]  # fmt: skip
LANGUAGE = {"gpt2": GPT2, "llama": LLAMA}


@pytest.fixture(scope="module", params=LANGUAGE)
def language(request):
    """A tiny model, its rows, and the oracle's view of them."""
    model, names = build(request.param), LANGUAGE[request.param]
    train, query = rows_of(request.param), rows_of(request.param, seed=4)[:3]
    owners = {name: [name] for name in names}
    with exactly():
        dense = oracle.observe(model, train, owners), oracle.observe(model, query, owners)
    return request.param, model, train, query, dense


def left(rows):
    """Padding in front, and positions that count from the first token."""
    batch = pad_left(rows)
    return {**batch, "position_ids": (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)}


@pytest.mark.parametrize("method", METHODS)
def test_language_models(language, method):
    _, model, train, query, dense = language
    expected = oracle.scores(*dense, method)
    with exactly():
        got = run(model, train, query, method=method, batch_size=3)
        close(got.values, expected)
        close(values(model, train, query, method=method, batch_size=2, gradient_budget=0), expected)
    reasons = {entry.name: entry for entry in got.coverage.entries}
    output = {"gpt2": "transformer.wte.weight", "llama": "lm_head.weight"}
    head = reasons[output[language[0]]]
    assert head.status == "left out"
    covered = {entry.layer for entry in got.coverage.with_status("covered")}
    assert covered == set(LANGUAGE[language[0]])


@pytest.mark.parametrize("method", METHODS)
def test_padding_on_either_side(language, method):
    _, model, train, query, _ = language
    with exactly():
        options = {"method": method, "batch_size": 3}
        alone = values(model, train, query, method=method, batch_size=1)
        close(values(model, train, query, **options), alone)
        close(values(model, train, query, collate_fn=left, **options), alone)


@pytest.mark.parametrize("budget", KEEP.values(), ids=KEEP)
@pytest.mark.parametrize("method", METHODS)
def test_shares_of_tokens(language, method, budget):
    _, model, train, query, dense = language
    with exactly():
        options = {"method": method, "batch_size": 3, "gradient_budget": budget}
        whole = values(model, train, query, **options)
        tokens = run(model, train, query, granularity="token", **options)
        moved = run(model, train, query, granularity="token", collate_fn=left, **options)
    close(tokens.values.double().sum(1), whole)
    close(moved.values, tokens.values.double())
    assert torch.equal(moved.lengths, tokens.lengths)
    for row, expected in enumerate(oracle.shares(*dense, method)):
        assert int(tokens.lengths[row]) == len(expected)
        close(tokens.values[row, : len(expected)], expected)
        assert not tokens.values[row, len(expected) :].any()


def test_layers_of_one_input_share_a_decomposition(language):
    from gradtrail import EKFACAttributor  # noqa: PLC0415

    name, model, train, _, dense = language
    with exactly(), EKFACAttributor(model, progress=False, batch_size=3) as bound:
        names = set(bound.fit(train).tensors.names())
        keys = {layer: dict(record.keys) for layer, record in bound.fit_.records.items()}
    firsts = {one.reads for one in dense[0].values()}
    assert len(firsts) == (8 if name == "gpt2" else 2 * 4)
    assert sum(key.endswith(":activation_basis") for key in names) == len(firsts)
    for layer, one in dense[0].items():
        same = {keys[other]["activation_basis"] for other in dense[0]
                if dense[0][other].reads == one.reads}  # fmt: skip
        assert same == {keys[layer]["activation_basis"]}
    assert sum(key.endswith(":gradient_basis") for key in names) == len(dense[0])


@pytest.mark.parametrize("method", METHODS)
def test_the_output_embedding_counts_when_it_is_named(method):
    model, train, query = build("llama"), rows_of("llama"), rows_of("llama", seed=4)[:2]
    owners = {name: [name] for name in [*LLAMA, "lm_head"]}
    with exactly():
        dense = oracle.observe(model, train, owners), oracle.observe(model, query, owners)
        got = run(model, train, query, method=method, layers=["lm_head", "model.layers.*_proj"])
        close(got.values, oracle.scores(*dense, method))
        plain = run(model, train, query, method=method)
    entry = {entry.name: entry for entry in plain.coverage.entries}["lm_head.weight"]
    assert entry.status == "left out"
    assert entry.reason == "the output embedding is left out of the K-FAC family by default"
    assert not torch.allclose(plain.values, got.values)


@pytest.mark.parametrize("name", ["bert", "vit", "t5"])
def test_other_models(name):
    """Every layer with Kronecker structure that is covered by default, against the oracle."""
    model, train, query = build(name), rows_of(name), rows_of(name, seed=4)[:2]
    with exactly():
        got = run(model, train, query, method="ekfac", batch_size=3)
        owners = {entry.layer: [entry.layer] for entry in got.coverage.with_status("covered")}
        assert len(owners) > 10
        dense = oracle.observe(model, train, owners), oracle.observe(model, query, owners)
        close(got.values, oracle.scores(*dense, "ekfac"))


# ---------------------------------------------------------------- self-influence, norms, sweeps


@pytest.mark.parametrize("normalize", [None, "train", "both"])
@pytest.mark.parametrize("budget", KEEP.values(), ids=KEEP)
@pytest.mark.parametrize("method", METHODS)
def test_self_influence_is_the_diagonal(method, budget, normalize):
    model, options = Net(), {"method": method, "gradient_budget": budget, "normalize": normalize}
    got = self_influence(model, TRAIN, progress=False, batch_size=4, **options)
    assert got.dtype == torch.float32
    assert (got >= 0).all()
    close(got, values(model, TRAIN, TRAIN, **options).diagonal())


@pytest.mark.parametrize("normalize", ["train", "both"])
@pytest.mark.parametrize("budget", KEEP.values(), ids=KEEP)
@pytest.mark.parametrize("method", METHODS)
def test_normalized_scores(method, budget, normalize):
    model, train, query = Net(), observed(Net(), TRAIN), observed(Net(), QUERY)
    expected = oracle.scores(train, query, method) / oracle.norms(train).unsqueeze(1)
    if normalize == "both":
        expected = expected / oracle.norms(query).unsqueeze(0)
    options = {"method": method, "gradient_budget": budget, "normalize": normalize}
    close(values(model, TRAIN, QUERY, **options), expected)
    close(
        run(model, TRAIN, QUERY, damping_sweep=[0.5, 0.1], **options)[0.1].values,
        expected,
    )


@pytest.mark.parametrize("relative", [True, False])
@pytest.mark.parametrize("budget", KEEP.values(), ids=KEEP)
@pytest.mark.parametrize("method", METHODS)
def test_a_sweep_is_single_calls(method, budget, relative):
    model, sweep = Net(), [1.0, 0.01, 0.1]
    options = {"method": method, "gradient_budget": budget, "relative_damping": relative}
    found = run(model, TRAIN, QUERY, damping_sweep=sweep, **options)
    assert list(found) == sweep
    for damping, result in found.items():
        single = run(model, TRAIN, QUERY, damping=damping, **options)
        close(result.values, single.values.double())
        assert result.options["damping"] == damping


def test_a_sweep_of_token_shares():
    model, train = tiny(), text_rows()
    options = {"method": "ekfac", "granularity": "token", "layers": ["up", "down"]}
    found = run(model, train, train[:2], damping_sweep=[0.1, 2.0], **options)
    for damping, result in found.items():
        single = run(model, train, train[:2], damping=damping, **options)
        close(result.values, single.values.double())


def low_rank(matrix, rank):
    left, size, right = torch.linalg.svd(matrix, full_matrices=False)
    return (left[:, :rank] * size[:rank]) @ right[:rank], size


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("budget", KEEP.values(), ids=KEEP)
@pytest.mark.parametrize("method", METHODS)
def test_ranks_of_queries(method, budget, bias):
    model = Net(bias)
    options = {"method": method, "gradient_budget": budget}
    train, query = observed(model, TRAIN), observed(model, QUERY)
    full = run(model, TRAIN, QUERY, query_rank=9, **options)
    close(full.values, oracle.scores(train, query, method))
    assert full.options["query_energy"] == pytest.approx(1, abs=1e-6)
    expected = 0
    had = left = torch.zeros(len(QUERY), dtype=F64)
    for name in OWNERS:
        solved = query[name].rows() @ oracle.inverse(train, name, method)
        shape = query[name].matrices().shape[2:]
        cut = [low_rank(row.view(shape), 1) for row in solved]
        rows = torch.stack([matrix.flatten() for matrix, _ in cut])
        expected = expected + train[name].rows() @ rows.t()
        had = had + torch.stack([size.square().sum() for _, size in cut])
        left = left + torch.stack([size[0] ** 2 for _, size in cut])
    got = run(model, TRAIN, QUERY, query_rank=1, **options)
    close(got.values, expected)
    assert got.options["query_energy"] == pytest.approx(float((left / had).mean()), rel=1e-5)
    assert got.options["query_energy"] < 0.999


# ---------------------------------------------------------------- layers


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.plain = nn.Conv2d(2, 4, 3, padding=1, stride=2, dtype=F64)
        self.grouped = nn.Conv2d(4, 6, (2, 1), groups=2, dtype=F64)
        self.line = nn.Conv1d(6, 3, 2, dilation=1, bias=False, dtype=F64)

    def forward(self, x):
        x = torch.tanh(self.plain(x))
        x = torch.tanh(self.grouped(x))
        return self.line(x.flatten(2)).sum(-1)


CONVOLUTIONS = {name: [name] for name in ("plain", "grouped", "line")}


def images(n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 2, 6, 6, generator=generator, dtype=F64)
    return [(x[row], torch.tensor(row % 3)) for row in range(n)]


@pytest.mark.parametrize("options", [{}, {"gradient_budget": 0}, {"query_rank": 30}], ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_convolutions(method, options):
    model = Convolutions()
    train = observed(model, images(7), CONVOLUTIONS)
    query = observed(model, images(3, seed=1), CONVOLUTIONS)
    got = run(model, images(7), images(3, seed=1), method=method, batch_size=3, **options)
    close(got.values, oracle.scores(train, query, method))
    diagonal = self_influence(model, images(7), method=method, progress=False)
    close(diagonal, oracle.scores(train, train, method).diagonal())


class Shared(nn.Module):
    """One layer called twice, two layers that own one weight, and two with a bias each."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(3)
        twice = kind == "twice"
        self.inner = nn.Linear(4, 4, bias=twice, dtype=F64)
        self.other = self.inner if twice else nn.Linear(4, 4, bias=False, dtype=F64)
        self.other.weight = self.inner.weight
        self.head = nn.Linear(4, 3, dtype=F64)

    def forward(self, x):
        x = torch.tanh(self.inner(x))
        return self.head(torch.tanh(self.other(x))).sum(1)


@pytest.mark.parametrize("options", [{}, {"gradient_budget": 0}, {"query_rank": 9}], ids=str)
@pytest.mark.parametrize("kind", ["twice", "tied"])
@pytest.mark.parametrize("method", METHODS)
def test_a_weight_that_is_used_twice(method, kind, options):
    model = Shared(kind)
    owners = {"inner": ["inner"] if kind == "twice" else ["inner", "other"], "head": ["head"]}
    train, query = observed(model, TRAIN, owners), observed(model, QUERY, owners)
    got = run(model, TRAIN, QUERY, method=method, batch_size=4, **options)
    close(got.values, oracle.scores(train, query, method))
    if not options:
        diagonal = self_influence(model, TRAIN, method=method, progress=False)
        close(diagonal, oracle.scores(train, train, method).diagonal())


@pytest.mark.parametrize("method", METHODS)
def test_a_factored_projection(method):
    """Each side is multiplied by its own matrix; the projected factors get the curvature."""
    model = Net()
    from gradtrail import Projection  # noqa: PLC0415
    from gradtrail.factors import LinearFactors, project  # noqa: PLC0415

    projection = Projection(dim=3, seed=7)
    layers = {}
    for side, data in (("train", TRAIN), ("query", QUERY)):
        layers[side] = observed(model, data)
        for name, layer in layers[side].items():
            for n, (a, g) in enumerate(zip(layer.inputs, layer.gradients, strict=True)):
                factors = LinearFactors(a[None, :, 0, :-1], g[None, :, 0], has_bias=True)
                small = project(name, factors, projection)
                assert not small.has_bias
                layer.inputs[n] = small.activation_bsi[0].unsqueeze(1)
                layer.gradients[n] = small.output_gradient_bso[0].unsqueeze(1)
    got = values(model, TRAIN, QUERY, method=method, projection=projection)
    close(got, oracle.scores(layers["train"], layers["query"], method))
    assert got.abs().max() > 0


class Normed(nn.Module):
    """An embedding, a norm and a layer, on ``[b, s]`` numbers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.embed = nn.Embedding(6, 4, dtype=F64)
        self.norm = nn.LayerNorm(4, dtype=F64)
        self.head = nn.Linear(4, 3, dtype=F64)
        with torch.no_grad():
            self.norm.weight.add_(torch.randn(4, dtype=F64) * 0.3)

    def forward(self, x):
        return self.head(torch.tanh(self.norm(self.embed(x)))).sum(1)


def numbers(n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 6, (n, 3), generator=generator)
    return [(x[row], torch.tensor(row % 3)) for row in range(n)]


def parameter_rows(model, data, *names):
    """Rows of several parameters joined, by autograd."""
    rows, loss = as_rows(data, "train", None, 0), resolve_loss(None, None)
    singles = [rows.batch([number]) for number in range(len(rows))]
    found = reference.per_example_gradients(model, singles, loss, names)
    return torch.cat([found[name].flatten(1) for name in names], 1)


DIRECT = {
    "ignored": ({}, ()),
    "norm dense": ({"non_kronecker": "direct", "exclude": "embed"}, ("norm",)),
    "both dense": ({"non_kronecker": "direct"}, ("norm", "embed")),
    "embedding diagonal": ({"diagonal": "embed"}, ("embed*",)),
    "norm diagonal": ({"diagonal": nn.LayerNorm}, ("norm*",)),
    "all": ({"non_kronecker": "direct", "diagonal": "embed"}, ("norm", "embed*")),
    "layer diagonal": ({"diagonal": "head"}, ("head*",)),
}
PARAMETERS = {
    "norm": ("norm.weight", "norm.bias"),
    "embed": ("embed.weight",),
    "head": ("head.weight", "head.bias"),
}


@pytest.mark.parametrize("budget", KEEP.values(), ids=KEEP)
@pytest.mark.parametrize("kind", DIRECT)
@pytest.mark.parametrize("method", METHODS)
def test_layers_without_kronecker_structure(method, kind, budget):
    model, train, query = Normed(), numbers(9), numbers(4, seed=3)
    options, direct = DIRECT[kind]
    head = {"head": ["head"]}
    dense = observed(model, train, head), observed(model, query, head)
    expected = diagonal = 0
    if "head*" not in direct:
        expected = oracle.scores(*dense, method)
        diagonal = oracle.scores(dense[0], dense[0], method).diagonal()
    for name in direct:
        rows, queries = (
            parameter_rows(model, data, *PARAMETERS[name.rstrip("*")]) for data in (train, query)
        )
        solver = oracle.diagonal_inverse if name.endswith("*") else oracle.dense_inverse
        expected = expected + rows @ solver(rows) @ queries.t()
        diagonal = diagonal + (rows @ solver(rows) @ rows.t()).diagonal()
    options = {**options, "method": method, "gradient_budget": budget, "batch_size": 4}
    got = run(model, train, query, **options)
    close(got.values, expected)
    close(self_influence(model, train, progress=False, **options), diagonal)
    sweep = run(model, train, query, damping_sweep=[0.1, 3.0], **options)
    close(sweep[0.1].values, expected)
    statuses = {entry.name: (entry.status, entry.reason) for entry in got.coverage.entries}
    treated = {name.rstrip("*") for name in direct} | {"head"}
    for name, parameters in PARAMETERS.items():
        for parameter in parameters:
            status, reason = statuses[parameter]
            assert status == ("covered" if name in treated else "left out")
            if kind == "ignored" and name != "head":
                assert reason == "no Kronecker structure (non_kronecker='ignore')"


@pytest.mark.parametrize("kind", ["dense", "mask"])
@pytest.mark.parametrize("method", METHODS)
def test_written_projections_get_a_dense_fisher(method, kind):
    from gradtrail import Projection  # noqa: PLC0415
    from gradtrail.factors import DenseGradient, project  # noqa: PLC0415

    model, projection = Net(), Projection(kind=kind, dim=6, seed=2)
    train, query = observed(model, TRAIN), observed(model, QUERY)
    expected = 0
    for name in OWNERS:
        small = []
        for layer in (train[name], query[name]):
            weight, bias = layer.matrices()[:, 0, :, :-1], layer.matrices()[:, 0, :, -1]
            rows = torch.cat([weight.flatten(1), bias], 1)
            dense = DenseGradient(rows, tuple(weight.shape[1:]), has_bias=True)
            small.append(project(name, dense, projection).values_bd)
        expected = expected + small[0] @ oracle.dense_inverse(small[0]) @ small[1].t()
    options = {"method": method, "projection": projection, "non_kronecker": "direct"}
    close(values(model, TRAIN, QUERY, **options), expected)
    message = "must have a layer with Kronecker structure, got none: first: no Kronecker structure"
    with pytest.raises(CurvatureError, match=message):
        run(model, TRAIN, QUERY, method=method, projection=projection)


def test_how_many_layers_direct_covers():
    model, train, query = Normed(), numbers(9), numbers(2, seed=3)
    options = {"method": "kfac", "non_kronecker": "direct"}
    message = "non_kronecker='direct' covers 1 of 2 eligible layers"
    with pytest.warns(GradTrailWarning, match=message):
        got = run(model, train, query, direct_fisher_max_params=8, **options)
    entry = {entry.name: entry for entry in got.coverage.entries}["embed.weight"]
    assert (entry.status, entry.reason) == (
        "left out", "24 entries are over direct_fisher_max_params=8",
    )  # fmt: skip
    with pytest.warns(GradTrailWarning, match="covers 0 of 2 eligible layers") as seen:
        got = run(model, train, query, direct_fisher_max_params=7, **options)
    assert len(seen) == 1
    close(got.values, values(model, train, query, method="kfac"))


@pytest.mark.parametrize("kind", ["ignored", "norm diagonal", "all"])
@pytest.mark.parametrize("method", METHODS)
def test_coverage_before_a_run(method, kind):
    options, _ = DIRECT[kind]
    got = run(Normed(), numbers(9), numbers(2, seed=3), method=method, **options)
    assert coverage(Normed(), method=method, **options) == got.coverage


def test_direct_without_layers_to_treat():
    with pytest.raises(CurvatureError, match="non_kronecker='direct' must have layers without"):
        run(Net(), TRAIN, QUERY, method="kfac", non_kronecker="direct")


def test_diagonal_of_nothing():
    with pytest.raises(ValueError, match="diagonal must name captured layers, got 'norm', none of"):
        run(Normed(), numbers(3), numbers(2), method="kfac", layers="head", diagonal="norm")


class Wide(nn.Module):
    """A language model with a vocabulary of 50,000."""

    def __init__(self, vocabulary=50_000):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(4, 4, dtype=F64)
        self.lm_head = nn.Linear(4, vocabulary, bias=False, dtype=F64)

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, x):
        return self.lm_head(torch.tanh(self.body(x)))


@pytest.mark.parametrize("method", METHODS)
def test_a_wide_output_layer(method):
    model, train, query = Wide(), vectors(6), vectors(2, seed=3)
    assert run(model, train, query, method=method).coverage.with_status("left out")
    message = (
        r"Layers must have sides of at most max_factor_dim=16384, got lm_head \(50,000, 9\.3 GiB\) "
        r"for a covariance\. Leave them out with exclude=, give them diagonal= treatment"
    )
    for layers in (["lm_head", "body"], nn.Linear):
        with pytest.raises(CurvatureError, match=message):
            run(model, train, query, method=method, layers=layers)
    narrow = run(model, train, query, method=method, layers=nn.Linear, diagonal="lm_head")
    rows = parameter_rows(model, train, "lm_head.weight")
    body = observed(model, train, {"body": ["body"]}), observed(model, query, {"body": ["body"]})
    squares = rows.square().mean(0)
    solved = parameter_rows(model, query, "lm_head.weight") / (squares + 0.1 * squares.mean())
    close(narrow.values, oracle.scores(*body, method) + rows @ solved.t())
    small = run(model, train, query, method=method, layers=nn.Linear, projection=3)
    assert torch.isfinite(small.values).all()


# ---------------------------------------------------------------- numbers that go wrong


class Dead(nn.Module):
    """A layer that the loss does not reach, and one whose gradient is always exactly zero."""

    def __init__(self, dtype=F64):
        super().__init__()
        torch.manual_seed(0)
        self.dead = nn.Linear(4, 5, dtype=dtype)
        self.head = nn.Linear(4, 3, dtype=dtype)

    def forward(self, x):
        return self.head(x) + 0 * self.dead(x).sum(-1, keepdim=True)


@pytest.mark.parametrize("options", [{}, {"damping": 0.1, "relative_damping": False},
                                     {"gradient_budget": 0}], ids=str)  # fmt: skip
@pytest.mark.parametrize("method", METHODS)
def test_a_dead_layer(method, options):
    model, train, query = Dead(), vectors(6), vectors(2, seed=3)
    with pytest.warns(GradTrailWarning, match=r"1 layers \(dead\) have no gradient anywhere"):
        got = run(model, train, query, method=method, **options)
    assert torch.isfinite(got.values).all()
    close(got.values, values(model, train, query, method=method, layers="head", **options))
    with pytest.warns(GradTrailWarning, match=r"\(dead\) have no gradient anywhere"):
        alone = run(model, train, query, method=method, layers="dead", **options)
    assert not alone.values.any()
    with pytest.warns(GradTrailWarning, match=r"\(dead\) have no gradient anywhere"):
        assert not self_influence(
            model, train, method=method, layers="dead", progress=False, **options
        ).any()


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("method", METHODS)
def test_three_examples_without_damping(method, dtype):
    torch.manual_seed(0)
    model = nn.Linear(8, 6, bias=False, dtype=dtype)
    train = [(x.to(dtype), y) for x, y in vectors(3, width=8)]
    query = [(x.to(dtype), y) for x, y in vectors(2, width=8, seed=4)]
    message = "have directions that the training data do not reach"
    with pytest.warns(GradTrailWarning, match=message):
        got = run(model, train, query, method=method, damping=0.0)
    assert torch.isfinite(got.values).all()
    assert got.values.abs().max() < 1e4
    whole = {"0": ["0"]}
    double = nn.Sequential(copy.deepcopy(model).double())
    dense = [observed(double, [(x.double(), y) for x, y in data], whole) for data in (train, query)]
    close(got.values, oracle.scores(*dense, method, 0.0), rtol=1e-6 if dtype == F64 else 1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("budget", KEEP.values(), ids=KEEP)
@pytest.mark.parametrize("method", METHODS)
def test_low_precision(method, budget, dtype):
    """The oracle too runs on the low-precision model: what is made of its gradients is wide."""
    model = Net(dtype=dtype)
    train = [(x.to(dtype), y) for x, y in sequences(40)]
    query = [(x.to(dtype), y) for x, y in QUERY]
    dense = observed(model, train), observed(model, query)
    expected = oracle.scores(*dense, method)
    got = run(model, train, query, method=method, batch_size=1, query_batch_size=1,
              gradient_budget=budget)  # fmt: skip
    assert got.values.dtype == torch.float32
    close(got.values, expected, rtol=2e-4)


class Centred(nn.Module):
    """A layer whose inputs add up to 0, as behind a norm: its covariance has a null direction."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(4, 3, bias=False)

    def forward(self, x):
        return self.head(x - x.mean(-1, keepdim=True))


@pytest.mark.parametrize("budget", KEEP.values(), ids=KEEP)
@pytest.mark.parametrize("damping", [1e-2, 1e-5])
@pytest.mark.parametrize("method", METHODS)
def test_little_damping_in_float32(method, damping, budget):
    model = Centred()
    train, query = ([(x.float(), y) for x, y in vectors(n, seed=n)] for n in (20, 5))
    dense = [observed(model, data, {"head": ["head"]}) for data in (train, query)]
    got = run(model, train, query, method=method, damping=damping, gradient_budget=budget)
    close(got.values, oracle.scores(*dense, method, damping), rtol=1e-3)


@pytest.mark.parametrize("options", [{}, {"gradient_budget": 0}], ids=str)
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("method", METHODS)
def test_one_weight_that_is_no_number(method, value, options):
    model = Net()
    with torch.no_grad():
        model.second.weight[0, 0] = value
    message = r"The covariance [AS] of (first|second) must be finite, got \d+ entries"
    with pytest.raises(CurvatureError, match=message):
        run(model, TRAIN, QUERY, method=method, **options)
    assert not any(m._forward_hooks for m in model.modules())


@pytest.mark.parametrize("method", METHODS)
def test_an_overflow_of_a_covariance(method):
    def loss(model, batch):
        return 1e25 * resolve_loss(None, None)(model, batch)

    model = Net(dtype=torch.float32)
    train = [(x.float(), y) for x, y in TRAIN]
    with pytest.raises(CurvatureError, match="The covariance S of (first|second) must be finite"):
        run(model, train, train, method=method, loss=loss)


@pytest.mark.parametrize("options", [{}, {"gradient_budget": 0}], ids=str)
def test_an_overflow_of_the_corrected_eigenvalues_alone(options):
    """Covariances of 1e30 and 1e20 fit float32; squares of the gradients, 1e50, do not."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3, bias=False)
    train = [(1e10 * x.float(), 1e15 * torch.randn(3)) for x, _ in vectors(6)]
    values = {"loss": linear_loss, "method": "ekfac", **options}
    with pytest.raises(CurvatureError, match=r"The corrected eigenvalues of .* must be finite"):
        run(model, train, train, **values)


@pytest.mark.parametrize("method", METHODS)
def test_empty_sets(method):
    model = Net()
    for options in ({}, {"gradient_budget": 0}, {"normalize": "both"}, {"query_rank": 2}):
        assert run(model, [], QUERY, method=method, **options).values.shape == (0, 4)
        assert run(model, TRAIN, [], method=method, **options).values.shape == (9, 0)
    sweep = run(model, TRAIN, [], method=method, damping_sweep=[0.1, 0.2])
    assert sweep[0.2].values.shape == (9, 0)
    sweep = run(model, [], QUERY, method=method, damping_sweep=[0.1, 0.2])
    assert sweep[0.1].values.shape == (0, 4)
    assert self_influence(model, [], method=method, progress=False).shape == (0,)
    text = tiny()
    assert run(text, [], text_rows((3,)), method=method, granularity="token").values.numel() == 0
    tokens = run(text, text_rows(), [], method=method, granularity="token")
    assert tokens.values.shape == (5, 7, 0)
    states = [model.state_dict()] * 2
    assert run(model, [], QUERY, method=method, checkpoints=states).values.shape == (0, 4)
    assert run(model, TRAIN, [], method=method, checkpoints=states).values.shape == (9, 0)


@pytest.mark.parametrize("method", METHODS)
def test_one_training_example(method):
    model = Net()
    dense = observed(model, TRAIN[:1]), observed(model, QUERY)
    close(values(model, TRAIN[:1], QUERY, method=method), oracle.scores(*dense, method))


def test_labels_that_are_all_left_out_score_zero():
    model, rows = tiny(), text_rows()
    rows[1] = {**rows[1], "labels": torch.full_like(rows[1]["labels"], -100)}
    for method in METHODS:
        got = run(model, rows, rows, method=method)
        assert not got.values[1].any()
        assert not got.values[:, 1].any()
        assert torch.isfinite(got.values).all()


# ---------------------------------------------------------------- options


BAD = {
    "damping": ({"damping": -1.0}, "damping must be a finite number of at least 0, got -1.0"),
    "absolute default": (
        {"relative_damping": False}, "damping must be given with relative_damping=False"),
    "empty sweep": ({"damping_sweep": []}, "damping_sweep must be a list of at least one damping"),
    "negative sweep": ({"damping_sweep": [0.1, -1]}, "damping must be a finite number"),
    "both": (
        {"damping": 0.1, "damping_sweep": [0.1]}, "damping must be None with damping_sweep, got"),
    "fisher": ({"fisher": "true"}, "fisher must be one of 'empirical', 'expected', 'sampled'"),
    "draws": ({"fisher_draws": 2}, "fisher_draws must go with fisher='sampled', got fisher='emp"),
    "no draws": ({"fisher": "sampled", "fisher_draws": 0}, "fisher_draws must be an integer"),
    "sampler": ({"label_sampler": print}, "label_sampler must go with fisher='sampled'"),
    "residency": (
        {"factor_cache_residency": "gpu"}, "factor_cache_residency must be one of None, 'memory'"),
    "non_kronecker": ({"non_kronecker": "skip"}, "non_kronecker must be one of 'ignore', 'direct'"),
    "max params": ({"direct_fisher_max_params": 0}, "direct_fisher_max_params must be an integer"),
    "max dim": ({"max_factor_dim": 0}, "max_factor_dim must be an integer of at least 1, got 0"),
    "rank": ({"query_rank": 0}, "query_rank must be an integer of at least 1, got 0"),
    "normalize": ({"normalize": "query"}, "normalize must be one of None, 'train', 'both'"),
    "tolerance": (
        {"cg_tolerance": 1e-3}, "(cg_tolerance must go with refine='cg'|options of method)"),
    "iterations": (
        {"cg_max_iterations": 3}, "(cg_max_iterations must go with refine='cg'|options of method)"),
    "unknown": ({"dampening": 1}, r"options of method .* must be among .*, got \['dampening'\]"),
    "budget": ({"gradient_budget": -1}, "gradient_budget must be"),
    "direct limit without direct": (
        {"direct_fisher_max_params": 5}, "max_params must go with non_kronecker='direct', got non"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("method", METHODS)
def test_options_are_checked(method, name):
    options, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        run(Net(), TRAIN, QUERY, method=method, **options)


def test_options_of_the_refinement():
    with pytest.raises(ValueError, match="refine must be one of None, 'cg'"):
        run(Net(), TRAIN, QUERY, method="ekfac", refine="newton")
    with pytest.raises(ValueError, match="query_rank must be None with refine='cg', got both"):
        run(Net(), TRAIN, QUERY, method="ekfac", refine="cg", query_rank=1)
    with pytest.raises(ValueError, match="refine='cg' must go with method 'ekfac'"):
        KroneckerMethod(corrected=False, refine="cg")
    with pytest.raises(ValueError, match="cg_max_iterations must be an integer of at least 1"):
        run(Net(), TRAIN, QUERY, method="ekfac", refine="cg", cg_max_iterations=0)


@pytest.mark.parametrize("option", [{"query_rank": 1}, {"damping_sweep": [0.1]}, {"refine": "cg"}])
def test_options_without_effect_on_self_influence(option):
    (name,) = option
    with pytest.raises(ValueError, match=f"{name} must be None for self-influence, got"):
        self_influence(Net(), TRAIN, method="ekfac", progress=False, **option)


@pytest.mark.parametrize("method", METHODS)
def test_the_expected_fisher(method):
    """Every class with its probability, as one example's gradient; scores are of the data's."""
    model, train, query = Net(), TRAIN, QUERY
    classes = 3
    parts = []
    for label in range(classes):

        def loss(model, batch, label=label):
            logits = model(batch[0])
            share = classes * logits.detach().softmax(-1)[:, label]
            return share.sqrt() * -logits.log_softmax(-1)[:, label]

        parts.append(observed(model, train, loss=loss))
    whole = {name: copy.copy(layer) for name, layer in parts[0].items()}
    for name, layer in whole.items():
        layer.inputs = [a for part in parts for a in part[name].inputs]
        layer.gradients = [g for part in parts for g in part[name].gradients]
    expected = 0
    for name, layer in observed(model, train).items():
        solve = oracle.inverse(whole, name, method)
        expected = expected + layer.rows() @ solve @ observed(model, query)[name].rows().t()
    got = run(model, train, query, method=method, fisher="expected", batch_size=4)
    close(got.values, expected)
    assert got.options["fisher"] == "expected"


def test_options_are_recorded():
    got = run(Net(), TRAIN, QUERY, method="kfac", diagonal=None, seed=3)
    import json  # noqa: PLC0415

    json.dumps(got.options)
    assert got.options["damping"] is None
    assert got.options["relative_damping"] is True
    assert got.options["fisher"] == "empirical"
    assert "memory" not in got.options


def test_no_warning_where_nothing_is_wrong():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(Net(), TRAIN, QUERY, method="ekfac")
