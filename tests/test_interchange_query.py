"""``InterchangeQuery`` and ``ProjectionQuery``: exact gradients, and the methods that take them."""

import pytest
import torch
from interchanging import (
    Mlp,
    Sequences,
    assert_close,
    basis_of,
    call,
    captured_queries,
    drawn,
    last,
    oracle,
    seeded,
)
from models import VOCAB, build, exactly
from scipy.stats import spearmanr
from torch import nn
from torch.utils.checkpoint import checkpoint

import gradtrail
from gradtrail import CaptureError, reference
from gradtrail.attribution.query_source import QuerySum, RowJoin
from gradtrail.factors import (
    DenseGradient,
    EmbeddingFactors,
    LinearFactors,
    ScaleFactors,
    SumGradient,
    squared_norm,
    to_dense,
)
from gradtrail.interchange import (
    InterchangeQuery,
    ProjectionQuery,
    Site,
    fit_das,
    interchange_logits,
)

PAIRS = 5


def vector_pairs(inputs=4, classes=3, count=PAIRS, dtype=torch.float64):
    base, source = (
        drawn(count, inputs, seed=1, dtype=dtype),
        drawn(count, inputs, seed=2, dtype=dtype),
    )
    return base, source, None, None, drawn(count, seed=3, high=classes)


def token_pairs(vocab=11, length=5, count=PAIRS):
    base, source = (drawn(count, length, seed=seed, high=vocab) for seed in (1, 2))
    places = (drawn(count, seed=seed, high=length - 1) for seed in (4, 5))
    return base, source, *places, drawn(count, seed=3, high=vocab)


def query_of(model, site, basis, pairs, forward, **options):
    base, source, base_positions, source_positions, targets = pairs
    return InterchangeQuery(
        model,
        site,
        basis,
        base,
        source,
        targets,
        forward,
        base_positions=base_positions,
        source_positions=source_positions,
        **options,
    )


# id: (model, site, pairs, forward)
SITES = {
    "a bare hook point": (Mlp, Site("hook_mid"), vector_pairs, call),
    "a hooked linear layer": (Mlp, Site("second"), vector_pairs, call),
    "a hooked norm": (Mlp, Site("norm"), vector_pairs, call),
    "the lowest layer": (Mlp, Site("first"), vector_pairs, call),
    "an embedding with a tied head": (Sequences, Site("embed"), token_pairs, last),
    "a layer with its own forward": (Sequences, Site("block.inner"), token_pairs, last),
    "an entry of a tuple": (Sequences, Site("block", 1), token_pairs, last),
    "an entry of a tuple from the end": (Sequences, Site("block", -1), token_pairs, last),
    "a norm over sequences": (Sequences, Site("norm"), token_pairs, last),
}


@pytest.mark.parametrize("forwards", ["joint", "separate"])
@pytest.mark.parametrize("case", SITES)
def test_query_gradient_equals_autograd_through_two_forwards(case, forwards):
    build, site, make, forward = SITES[case]
    compared = Site(site.module, 1) if site.output_index == -1 else site
    model, pairs, basis = seeded(build), make(), basis_of(6)
    expected = oracle(model, compared, basis, pairs, forward, strength=0.7)
    query = query_of(model, site, basis, pairs, forward, strength=0.7, forwards=forwards)
    assert_close(captured_queries(model, query), expected, 1e-10)


@pytest.mark.parametrize("forwards", ["joint", "separate"])
@pytest.mark.parametrize(
    ("name", "site"),
    [
        ("gpt2", "transformer.h.0"),
        ("gpt2", "transformer.h.1.mlp.c_fc"),
        ("llama", "model.layers.0.mlp.down_proj"),
        ("llama", "model.layers.1.input_layernorm"),
    ],
)
def test_query_gradient_of_real_transformers(name, site, forwards):
    with exactly():
        model = build(name).eval()
        # some releases return a tuple from a block, others its first entry
        found = []
        handle = model.get_submodule(site).register_forward_hook(lambda *a: found.append(a[2]))
        pairs = token_pairs(vocab=VOCAB)
        last(model, pairs[0])
        handle.remove()
        output = found[0] if isinstance(found[0], torch.Tensor) else found[0][0]
        where = Site(site, None if found[0] is output else 0)
        basis = basis_of(output.shape[-1])
        expected = oracle(model, where, basis, pairs, last)
        query = query_of(model, where, basis, pairs, last, forwards=forwards)
        assert_close(captured_queries(model, query), expected, 1e-10)


def test_query_gradient_in_single_precision():
    model = seeded(Mlp, dtype=torch.float32)
    pairs = vector_pairs(dtype=torch.float32)
    exact = oracle(model.double(), Site("second"), basis_of(6), doubled(pairs), call)
    query = query_of(model.float(), "second", basis_of(6), pairs, call)
    assert_close(captured_queries(model, query), exact, 1e-5)


def doubled(pairs):
    return tuple(
        value.double() if value is not None and value.is_floating_point() else value
        for value in pairs
    )


def test_sources_have_a_part_upstream_of_the_site_only():
    """Rows of the source before they are joined: nothing below the site, something above it."""
    model, basis = seeded(Mlp), basis_of(6)
    query = query_of(model, "hook_mid", basis, vector_pairs(), call)
    halves = []

    class Looking(RowJoin):
        def __call__(self, gradient, parts):
            halves.append(squared_norm(gradient)[parts:])
            return super().__call__(gradient, parts)

    query._join = Looking()
    captured_queries(model, query, batch_size=PAIRS)
    downstream, upstream = halves[:1], halves[1:]  # the backward meets the head first
    assert len(upstream) == 3
    assert not any(values.any() for values in downstream)
    assert all((values > 1e-6).all() for values in upstream)


def test_full_interchange_of_everything_is_the_sources_own_loss():
    """Rank d at strength 1 leaves nothing of the base above the site: an exact case."""
    model, pairs = seeded(Mlp), vector_pairs()
    base, source, _, _, targets = pairs
    query = query_of(model, "hook_mid", torch.eye(6, dtype=torch.float64), pairs, call)
    found = captured_queries(model, query)
    rows = [(source[row : row + 1], targets[row : row + 1]) for row in range(PAIRS)]
    expected = reference.per_example_gradients(
        model, rows, lambda model, row: nn.functional.cross_entropy(model(row[0]), row[1])
    )
    assert_close(found, expected, 1e-10)


def test_strength_zero_is_the_bases_own_loss():
    model, pairs = seeded(Mlp), vector_pairs()
    base, _, _, _, targets = pairs
    found = captured_queries(
        model, query_of(model, "hook_mid", basis_of(6), pairs, call, strength=0.0)
    )
    rows = [(base[row : row + 1], targets[row : row + 1]) for row in range(PAIRS)]
    expected = reference.per_example_gradients(
        model, rows, lambda model, row: nn.functional.cross_entropy(model(row[0]), row[1])
    )
    assert_close(found, expected, 1e-10)


def other_lengths():
    base, _, base_positions, _, targets = token_pairs()
    source = drawn(PAIRS, 7, seed=2, high=11)
    return base, source, base_positions, drawn(PAIRS, seed=5, high=7), targets


@pytest.mark.parametrize("site", ["embed", "block.inner", "norm"])
def test_sources_of_other_length_run_apart(site):
    model, pairs, basis = seeded(Sequences), other_lengths(), basis_of(6)
    expected = oracle(model, Site(site), basis, pairs, last)
    query = query_of(model, site, basis, pairs, last)
    assert_close(captured_queries(model, query), expected, 1e-10)
    with pytest.raises(ValueError, match=r"forwards='joint' must have .* Pad them to one length"):
        query_of(model, site, basis, pairs, last, forwards="joint")


class Coupled(Mlp):
    """Every row sees the others of its batch."""

    def forward(self, x):
        return super().forward(x + 0.3 * x.sum(0, keepdim=True))


def test_rows_that_see_each_other_run_apart():
    model, pairs, basis = seeded(Coupled), vector_pairs(), basis_of(6)
    expected = oracle(model, Site("second"), basis, pairs, call)
    apart = query_of(model, "second", basis, pairs, call, forwards="separate")
    assert_close(captured_queries(model, apart, batch_size=1), expected, 1e-10)
    together = query_of(model, "second", basis, pairs, call)
    mixed = captured_queries(model, together, batch_size=1)
    assert not torch.allclose(mixed["first.weight"], expected["first.weight"])


class Checkpointed(nn.Module):
    """The model in two blocks that run again in the backward."""

    def __init__(self, use_reentrant):
        super().__init__()
        self.mlp = Mlp()
        self.use_reentrant = use_reentrant

    def forward(self, x):
        mlp, options = self.mlp, {"use_reentrant": self.use_reentrant}
        hidden = checkpoint(
            lambda x: mlp.hook_mid(mlp.second(mlp.norm(torch.tanh(mlp.first(x))))), x, **options
        )
        return checkpoint(lambda h: mlp.head(torch.tanh(h)), hidden, **options)


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["saved tensors", "reentrant"])
@pytest.mark.parametrize("site", ["mlp.second", "mlp.hook_mid", "mlp.head"])
def test_activation_checkpointing_around_the_site(site, use_reentrant):
    model, pairs = seeded(lambda: Checkpointed(use_reentrant)), vector_pairs()
    basis = basis_of(3 if site == "mlp.head" else 6)
    plain = {
        f"mlp.{name}": value
        for name, value in oracle(
            model.mlp, Site(site.removeprefix("mlp.")), basis, pairs, call
        ).items()
    }
    found = captured_queries(model, query_of(model, site, basis, pairs, call))
    assert_close(found, plain, 1e-10)
    apart = query_of(model, site, basis, pairs, call, forwards="separate")
    with pytest.raises(CaptureError, match="must not run again in the backward of separate"):
        captured_queries(model, apart)


# ---------------------------------------------------------------- as queries of the methods

TRAIN = [
    {"x": drawn(4, seed=10 + row), "label": int(drawn(1, seed=row, high=3))} for row in range(7)
]


def train_loss(model, batch):
    return nn.functional.cross_entropy(model(batch["x"]), batch["label"], reduction="none")


def train_gradients(model):
    rows = [{"x": row["x"][None], "label": torch.tensor([row["label"]])} for row in TRAIN]
    return reference.per_example_gradients(model, rows, train_loss)


def attribute(model, query, **options):
    return gradtrail.attribute(model, TRAIN, query, loss=train_loss, progress=False, **options)


def assert_scores(scores, expected):
    scale = float(expected.abs().max())
    torch.testing.assert_close(scores.values.double(), expected.double(), rtol=0, atol=1e-6 * scale)


def scored(model, site="second", **options):
    return query_of(model, site, basis_of(6), vector_pairs(), call, **options)


def expected_queries(model, site="second"):
    return oracle(model, Site(site), basis_of(6), vector_pairs(), call)


@pytest.mark.parametrize("query_batch_size", [1, 2, 5, 64])
@pytest.mark.parametrize("method", ["graddot", "gradcos"])
def test_scores_equal_dense_products(method, query_batch_size):
    model = seeded(Mlp)
    scores = attribute(model, scored(model), method=method, query_batch_size=query_batch_size)
    expected = reference.dot_products(
        train_gradients(model), expected_queries(model), normalize=method == "gradcos"
    )
    assert_scores(scores, expected)


def test_normalized_projected_and_chosen_layers():
    model = seeded(Mlp)
    wanted = {"first.weight", "first.bias"}
    train = {name: value for name, value in train_gradients(model).items() if name in wanted}
    query = {name: value for name, value in expected_queries(model).items() if name in wanted}
    expected = reference.dot_products(train, query)
    assert_scores(attribute(model, scored(model), layers=["first"]), expected)
    full = attribute(model, scored(model), layers=["first"], projection="dense")
    assert full.values.shape == expected.shape
    assert (
        torch.corrcoef(torch.stack([full.values.flatten(), expected.flatten().float()]))[0, 1] > 0.5
    )


def test_scores_by_position_sum_to_those_of_examples():
    model = seeded(Sequences)
    rows = [{"ids": drawn(5, seed=row, high=11)} for row in range(4)]

    def loss(model, batch):
        logits = model(batch["ids"])[:, :-1]
        targets = batch["ids"][:, 1:]
        return nn.functional.cross_entropy(logits.mT, targets, reduction="none").sum(1)

    query = query_of(model, "block.inner", basis_of(6), token_pairs(), last)
    whole = gradtrail.attribute(model, rows, query, loss=loss, progress=False)
    parts = gradtrail.attribute(model, rows, query, loss=loss, progress=False, granularity="token")
    torch.testing.assert_close(parts.values.sum(1), whole.values, rtol=1e-5, atol=1e-6)


def test_tracin_sums_over_checkpoints_of_the_querys_own_model():
    model = seeded(Mlp)
    states = [seeded(Mlp, seed).state_dict() for seed in (1, 2)]
    scores = attribute(model, scored(model), method="tracin", checkpoints=states)
    expected = 0
    for seed in (1, 2):
        other = seeded(Mlp, seed)
        expected = expected + reference.dot_products(
            train_gradients(other), expected_queries(other)
        )
    assert_scores(scores, expected)


@pytest.mark.parametrize("query_batch_size", [1, 2, 5])
@pytest.mark.parametrize("forwards", ["joint", "separate"])
def test_mean_is_one_query(query_batch_size, forwards):
    model = seeded(Mlp)
    query = scored(model, granularity="mean", forwards=forwards)
    scores = attribute(model, query, query_batch_size=query_batch_size)
    expected = reference.dot_products(train_gradients(model), expected_queries(model))
    assert scores.values.shape == (len(TRAIN), 1)
    assert_scores(scores, expected.mean(1, keepdim=True))
    cosines = attribute(model, query, method="gradcos", query_batch_size=query_batch_size)
    one = {name: value.mean(0, keepdim=True) for name, value in expected_queries(model).items()}
    assert_scores(cosines, reference.dot_products(train_gradients(model), one, normalize=True))


@pytest.mark.parametrize("count", [3, 40])
@pytest.mark.parametrize("site", ["embed", "block.inner"])
def test_mean_of_sequences_by_factors_and_written_out(site, count):
    """Few pairs stay factors, many are written out: tied embeddings, norms and linear layers."""
    model, basis = seeded(Sequences), basis_of(6)
    pairs = token_pairs(count=count)
    query = query_of(model, site, basis, pairs, last, granularity="mean")
    expected = oracle(model, Site(site), basis, pairs, last)
    mean = {name: value.mean(0, keepdim=True) for name, value in expected.items()}
    assert_close(captured_queries(model, query, batch_size=2), mean, 1e-10)


def test_without_training_examples_there_are_no_scores():
    model = seeded(Mlp)
    scores = gradtrail.attribute(model, [], scored(model), loss=train_loss, progress=False)
    assert scores.values.shape == (0, PAIRS)


@pytest.mark.parametrize("granularity", ["pair", "mean"])
def test_plan_measures_one_batch(granularity):
    model = seeded(Mlp)
    plan = gradtrail.plan(
        model, TRAIN, scored(model, granularity=granularity), loss=train_loss, batch_size=2
    )
    assert plan.num_query == (1 if granularity == "mean" else PAIRS)
    assert plan.query_bytes > 0


def test_what_was_asked_is_written_down():
    model = seeded(Mlp)
    options = attribute(model, scored(model)).options
    assert options["query_loss"] == (
        "cross-entropy of interchange interventions at second, rank 2, strength 1, by pair"
    )
    same = attribute(model, scored(model), query_batch_size=2).options
    assert same["queries_digest"] == options["queries_digest"]
    others = [
        scored(model, strength=0.5),
        scored(model, "first"),
        query_of(model, "second", basis_of(6, seed=1), vector_pairs(), call),
        query_of(model, "second", basis_of(6), vector_pairs(count=4), call),
        query_of(
            model, "second", basis_of(6), (*vector_pairs()[:4], torch.zeros(PAIRS).long()), call
        ),
    ]
    digests = {attribute(model, query).options["queries_digest"] for query in others}
    assert len(digests) == len(others)
    assert options["queries_digest"] not in digests


@pytest.mark.parametrize("granularity", ["pair", "mean"])
def test_a_loss_that_is_no_number_names_the_pair(granularity):
    model = seeded(Mlp)
    base, source, _, _, targets = vector_pairs()
    source = source.clone()
    source[3, 0] = torch.nan
    query = InterchangeQuery(
        model, "second", basis_of(6), base, source, targets, call, granularity=granularity
    )
    number = 0 if granularity == "mean" else 3
    with pytest.warns(
        gradtrail.GradTrailWarning, match=f"queries {number} are not finite: the loss"
    ):
        scores = attribute(model, query)
    assert scores.values[:, number].isnan().all()
    if granularity == "pair":
        assert scores.values[:, :3].isfinite().all()


@pytest.mark.parametrize("fails", [None, "forward", "backward"])
def test_everything_is_left_as_it_was(fails):
    model = seeded(Mlp)
    model.norm.weight.requires_grad_(False)
    query = scored(model)
    before = snapshot(model)
    calls = [0]

    def broken(_gradient):
        raise RuntimeError("in the backward")

    def forward(model, inputs):
        calls[0] += 1
        if fails == "forward" and calls[0] > 2:
            raise RuntimeError("in the forward")
        logits = model(inputs)
        if fails == "backward" and logits.requires_grad:
            logits.register_hook(broken)
        return logits

    query._forward = forward
    if fails is None:
        attribute(model, query)
    else:
        with pytest.raises(RuntimeError, match=f"in the {fails}"):
            attribute(model, query, query_batch_size=1)
    assert snapshot(model) == before
    assert query._values is query._source is None


def snapshot(model):
    """Hooks, flags, modes and random state."""
    modules = [
        (name, module.training, len(module._forward_hooks), len(module._forward_pre_hooks))
        for name, module in model.named_modules()
    ]
    flags = [(name, p.requires_grad, p.grad is None) for name, p in model.named_parameters()]
    return modules, flags, torch.get_rng_state().tolist()


def test_called_where_gradients_are_off():
    model = seeded(Mlp)
    query = scored(model)
    expected = reference.dot_products(train_gradients(model), expected_queries(model))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert_scores(attribute(model, query), expected)


def test_inputs_made_in_inference_mode():
    with torch.inference_mode():
        base, source, _, _, targets = vector_pairs()
        basis = basis_of(6)
    model = seeded(Mlp)
    query = InterchangeQuery(model, "second", basis, base, source, targets, call)
    expected = reference.dot_products(train_gradients(model), expected_queries(model))
    assert_scores(attribute(model, query), expected)


def test_inputs_in_mappings_and_tuples():
    model = seeded(Mlp)
    base, source, _, _, targets = vector_pairs()
    expected = attribute(model, scored(model)).values
    named = InterchangeQuery(
        model,
        "second",
        basis_of(6),
        {"x": base},
        {"x": source},
        targets,
        lambda model, inputs: model(**inputs),
    )
    placed = InterchangeQuery(
        model,
        "second",
        basis_of(6),
        (base / 2, base / 2),
        (source / 2, source / 2),
        targets,
        lambda model, inputs: model(inputs[0] + inputs[1]),
    )
    for query in (named, placed):
        assert_scores(attribute(model, query), expected)


# ---------------------------------------------------------------- what is refused


def with_site(**options):
    model = seeded(Mlp)
    arguments = dict(
        zip(
            ("base_inputs", "source_inputs", "targets"),
            (vector_pairs()[0], vector_pairs()[1], vector_pairs()[4]),
            strict=True,
        ),
        model=model,
        site="second",
        basis=basis_of(6),
        forward=call,
    )
    return InterchangeQuery(**{**arguments, **options})


def frozen():
    model = seeded(Mlp)
    return model.requires_grad_(False)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        (
            {"granularity": "token"},
            ValueError,
            "granularity must be one of 'pair', 'mean', got 'tok",
        ),
        ({"forwards": "two"}, ValueError, "forwards must be one of 'joint', 'separate', None"),
        ({"strength": float("nan")}, ValueError, "strength must be a finite number, got nan"),
        ({"strength": True}, ValueError, "strength must be a finite number, got True"),
        (
            {"model": frozen()},
            ValueError,
            "must have a trained parameter .* none of which requires",
        ),
        ({"model": seeded(Mlp).train()}, ValueError, "must be in evaluation mode, got 6 modules"),
        ({"forward": None}, TypeError, "forward must be a callable .* got NoneType"),
        ({"site": "sekond"}, ValueError, r"got 'sekond'\. Near names: 'second'"),
        ({"site": 3}, TypeError, "site must be a Site or a module's name, got int"),
        ({"basis": torch.ones(6, 2)}, ValueError, "basis must have orthonormal columns"),
        (
            {"targets": torch.zeros(4).long()},
            ValueError,
            r"one class a row, shape \(5,\), got \(4,\)",
        ),
        ({"source_inputs": torch.zeros(4, 4)}, ValueError, "got 5 bases and 4 sources"),
    ],
)
def test_query_refuses(options, error, match):
    with pytest.raises(error, match=match):
        with_site(**options)


def test_query_refuses_inference_mode():
    with torch.inference_mode(), pytest.raises(RuntimeError, match="outside torch.inference_mode"):
        with_site()


def test_query_belongs_to_one_model_and_brings_its_loss():
    model = seeded(Mlp)
    query = scored(model)
    with pytest.raises(ValueError, match="model must be the one that query was made with"):
        attribute(seeded(Mlp), query)
    with pytest.raises(ValueError, match="query_loss must be None where query brings its own loss"):
        attribute(model, query, query_loss=train_loss)
    with pytest.raises(ValueError, match="query_loss must be None"):
        gradtrail.plan(model, TRAIN, query, loss=train_loss, query_loss=train_loss)
    with pytest.raises(TypeError, match="train must have a length and rows by number"):
        gradtrail.attribute(model, query, TRAIN, loss=train_loss)
    rows = gradtrail.attribution.query_source.as_queries(query, model, None, 0)
    with pytest.raises(TypeError, match="must be read by its own batches"):
        rows.batch([0])


def test_sites_that_do_not_fit_are_refused_when_they_run():
    model = seeded(Mlp)
    base, source, _, _, targets = vector_pairs()
    for options, match in [
        ({"basis": basis_of(5)}, r"width d=6, got \(5, 2\)"),
        ({"base_positions": torch.zeros(PAIRS).long()}, "base_positions must be None at a site"),
        ({"targets": torch.full((PAIRS,), 3)}, "targets must be classes below 3"),
        ({"forward": lambda model, x: model(x)[:1]}, r"with n=2, got \(1, 3\)"),
    ]:
        query = with_site(model=model, **options)
        with pytest.raises(ValueError, match=match):
            attribute(model, query)
    for forward, runs in [
        (lambda model, x: model(x) + model(x), 2),
        (lambda model, x: model.head(x.repeat(1, 2)[:, :6]), 0),
    ]:
        query = with_site(model=model, forward=forward)
        with pytest.raises(RuntimeError, match=f"must run once in a forward, got {runs} runs"):
            attribute(model, query)


# ---------------------------------------------------------------- projections


def projection_oracle(model, site, vectors, inputs, positions, forward):
    rows = []
    for row in range(len(inputs)):
        place = None if positions is None else int(positions[row])
        rows.append((inputs[row : row + 1], vectors[row], place))

    def loss(model, row):
        kept = {}
        module = model.get_submodule(site)
        handle = module.register_forward_hook(lambda *call: kept.update(h=call[2]))
        forward(model, row[0])
        handle.remove()
        value = kept["h"] if row[2] is None else kept["h"][:, row[2]]
        return -(value @ row[1])

    return reference.per_example_gradients(model, rows, loss)


@pytest.mark.parametrize("site", ["second", "hook_mid", "norm"])
def test_projection_gradient_equals_autograd(site):
    model, inputs, direction = seeded(Mlp), vector_pairs()[0], drawn(6, seed=8)
    query = ProjectionQuery(model, site, inputs, call, direction=direction)
    vectors = direction.expand(PAIRS, -1)
    expected = projection_oracle(model, site, vectors, inputs, None, call)
    assert_close(captured_queries(model, query), expected, 1e-10)
    assert not expected["head.weight"].any()  # upstream only


def test_projection_of_sequences():
    model, (inputs, _, positions, _, _) = seeded(Sequences), token_pairs()
    direction = drawn(6, seed=8)
    query = ProjectionQuery(
        model, "block.inner", inputs, last, direction=direction, positions=positions
    )
    expected = projection_oracle(
        model, "block.inner", direction.expand(PAIRS, -1), inputs, positions, last
    )
    assert_close(captured_queries(model, query), expected, 1e-10)


def test_projection_on_each_class_in_a_subspace():
    model, inputs, basis = seeded(Mlp), vector_pairs(count=8)[0], basis_of(6)
    labels = torch.tensor([0, 2, 0, 2, 2, 0, 5, 5])
    query = ProjectionQuery(model, "second", inputs, call, basis=basis, labels=labels)
    with torch.no_grad():
        coordinates = model.second(model.norm(torch.tanh(model.first(inputs)))) @ basis
    means = {label: coordinates[labels == label].mean(0) for label in (0, 2, 5)}
    centre = sum(means.values()) / 3
    units = {label: (mean - centre) / (mean - centre).norm() for label, mean in means.items()}
    vectors = torch.stack([basis @ units[int(label)] for label in labels])
    expected = projection_oracle(model, "second", vectors, inputs, None, call)
    assert_close(captured_queries(model, query), expected, 1e-10)


@pytest.mark.parametrize("query_batch_size", [1, 2, 8])
def test_mean_projection_is_one_query(query_batch_size):
    model, inputs, direction = seeded(Mlp), vector_pairs()[0], drawn(6, seed=8)
    each = attribute(model, ProjectionQuery(model, "second", inputs, call, direction=direction))
    one = ProjectionQuery(model, "second", inputs, call, direction=direction, granularity="mean")
    scores = attribute(model, one, query_batch_size=query_batch_size)
    assert_scores(scores, each.values.mean(1, keepdim=True))
    assert scores.options["query_loss"] == (
        "negative projection at second on a direction, mean over inputs"
    )


def test_training_on_a_helpful_example_raises_the_projection():
    model, inputs, direction = seeded(Mlp), vector_pairs()[0], drawn(6, seed=8)
    query = ProjectionQuery(model, "second", inputs, call, direction=direction, granularity="mean")
    scores = attribute(model, query).values[:, 0]

    def measured():
        with torch.no_grad():
            return (model.second(model.norm(torch.tanh(model.first(inputs)))) @ direction).mean()

    start = {name: value.clone() for name, value in model.state_dict().items()}
    for row, gradients in enumerate(zip(*train_gradients(model).values(), strict=True)):
        before = measured()
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= 1e-6 * gradient
        assert float((measured() - before) / 1e-6) == pytest.approx(float(scores[row]), rel=1e-3)
        model.load_state_dict(start)


def test_projection_plan_and_model():
    model, inputs, direction = seeded(Mlp), vector_pairs()[0], drawn(6, seed=8)
    query = ProjectionQuery(model, "second", inputs, call, direction=direction)
    assert gradtrail.plan(model, TRAIN, query, loss=train_loss, batch_size=2).num_query == PAIRS
    with pytest.raises(ValueError, match="model must be the one that query was made with"):
        attribute(seeded(Mlp), query)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({}, ValueError, "direction alone, or basis and labels, got none"),
        (
            {"direction": torch.ones(6), "labels": torch.arange(5)},
            ValueError,
            "got .'direction', 'la",
        ),
        ({"basis": basis_of(6)}, ValueError, r"got \['basis'\]"),
        ({"direction": [1.0] * 6}, TypeError, "direction must be a floating tensor .* got list"),
        ({"direction": torch.ones(6).long()}, TypeError, "got torch.int64"),
        ({"direction": torch.ones(5)}, ValueError, r"width d=6, got \(5,\)"),
        ({"direction": torch.zeros(6)}, ValueError, "direction must be finite and not zero"),
        (
            {"basis": basis_of(5), "labels": torch.arange(5)},
            ValueError,
            r"width d=6, got \(5, 2\)",
        ),
        (
            {"basis": basis_of(6), "labels": torch.zeros(5).long()},
            ValueError,
            "labels must hold at least 2 classes, got 1",
        ),
        ({"direction": torch.ones(6), "granularity": "pair"}, ValueError, "'example', 'mean', got"),
    ],
)
def test_projection_refuses(options, error, match):
    model, inputs = seeded(Mlp), vector_pairs()[0]
    with pytest.raises(error, match=match):
        ProjectionQuery(model, "second", inputs, call, **options)


def test_projection_refuses_classes_that_lie_together():
    model, inputs = seeded(Mlp), vector_pairs()[0]
    inputs = torch.cat([inputs[:2], inputs[:2]])
    with pytest.raises(ValueError, match="labels must be classes whose means lie apart"):
        ProjectionQuery(
            model, "second", inputs, call, basis=basis_of(6), labels=torch.tensor([0, 0, 1, 1])
        )


# ---------------------------------------------------------------- what training does


@pytest.mark.parametrize("site", ["second", "hook_mid", "norm"])
def test_one_training_step_changes_the_measure_as_predicted(site):
    """Twenty single examples: a small step on each, and the interchange loss before and after."""
    model = seeded(Mlp)
    pairs = vector_pairs(count=12)
    rows = [
        {"x": drawn(4, seed=50 + row), "label": int(drawn(1, seed=row, high=3))}
        for row in range(20)
    ]
    basis, step = basis_of(6), 1e-5
    query = query_of(model, site, basis, pairs, call, granularity="mean")
    scores = gradtrail.attribute(model, rows, query, loss=train_loss, progress=False).values[:, 0]
    start = {name: value.clone() for name, value in model.state_dict().items()}

    def measured():
        base, source, _, _, targets = pairs
        logits = interchange_logits(model, site, basis, base, source, call)
        return float(nn.functional.cross_entropy(logits, targets))

    before, changes = measured(), []
    for row in rows:
        batch = {"x": row["x"][None], "label": torch.tensor([row["label"]])}
        gradients = torch.autograd.grad(train_loss(model, batch).sum(), model.parameters())
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= step * gradient
        changes.append((before - measured()) / step)
        model.load_state_dict(start)
    assert spearmanr(changes, scores).statistic > 0.99
    torch.testing.assert_close(torch.tensor(changes).float(), scores, rtol=1e-2, atol=1e-3)


# ---------------------------------------------------------------- other curvatures


@pytest.mark.filterwarnings("ignore::gradtrail.GradTrailWarning")
@pytest.mark.parametrize("forwards", ["joint", "separate"])
@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("graddot", {"normalize": "train"}),
        ("gradcos", {}),
        ("kfac", {}),
        ("kfac", {"normalize": "both"}),
        ("kfac", {"query_rank": 2}),
        ("ekfac", {}),
        ("ekfac", {"refine": "cg"}),
    ],
    ids=str,
)
def test_full_interchange_scores_as_the_source_itself(method, options, forwards):
    """An exact case for every method: at full rank the pair's loss is the source's own."""
    model = seeded(Mlp)
    base, source, _, _, targets = vector_pairs()
    rows, train = (
        list(zip(*columns, strict=True))
        for columns in ((source, targets), (drawn(9, 4, seed=20), drawn(9, seed=21, high=3)))
    )
    options = {"method": method, "progress": False, **options}
    plain = gradtrail.attribute(model, train, rows, **options)
    query = InterchangeQuery(
        model, "hook_mid", torch.eye(6), base, source, targets, call, forwards=forwards
    )
    found = gradtrail.attribute(model, train, query, query_batch_size=2, **options)
    torch.testing.assert_close(found.values, plain.values, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore::gradtrail.GradTrailWarning")
@pytest.mark.parametrize("forwards", ["joint", "separate"])
@pytest.mark.parametrize("method", ["kfac", "ekfac"])
def test_preconditioned_mean_is_the_mean_of_the_pairs(method, forwards):
    model = seeded(Sequences)
    rows = [{"ids": drawn(5, seed=row, high=11)} for row in range(8)]

    def loss(model, batch):
        logits, targets = model(batch["ids"])[:, :-1], batch["ids"][:, 1:]
        return nn.functional.cross_entropy(logits.mT, targets, reduction="none").sum(1)

    scores = {}
    for granularity in ("pair", "mean"):
        query = query_of(
            model,
            "block.inner",
            basis_of(6),
            token_pairs(count=30),
            last,
            granularity=granularity,
            forwards=forwards,
        )
        scores[granularity] = gradtrail.attribute(
            model, rows, query, loss=loss, method=method, query_batch_size=4, progress=False
        ).values
    mean = scores["pair"].mean(1, keepdim=True)
    assert mean.abs().max() > 0
    torch.testing.assert_close(scores["mean"], mean, rtol=1e-3, atol=1e-4 * float(mean.abs().max()))


# ---------------------------------------------------------------- joining rows and parts


def linear(count, positions, seed, width=3):
    return LinearFactors(
        drawn(count, positions, width, seed=seed), drawn(count, positions, 2, seed=seed + 1), True
    )


def lookup(count, positions, seed, rows=3):
    index = drawn(count, positions, seed=seed, high=rows)
    return EmbeddingFactors(index, drawn(count, positions, 2, seed=seed + 1), rows, padding_idx=1)


def scale(count, positions, seed):
    factors = (drawn(count, positions, 4, seed=seed + one) for one in (0, 1))
    return ScaleFactors(*factors, has_bias=True)


def written(count, seed):
    return DenseGradient(drawn(count, 6, seed=seed), (3, 2))


def tied(count, positions, seed):
    return SumGradient(
        (
            lookup(count, positions, seed),
            LinearFactors(
                drawn(count, positions, 2, seed=seed + 2), drawn(count, positions, 3, seed=seed + 3)
            ),
        )
    )


GRADIENTS = {
    "linear": lambda seed: linear(6, 2, seed),
    "a wide linear layer, written out": lambda seed: linear(6, 40, seed),
    "lookup": lambda seed: lookup(6, 2, seed, rows=90),
    "scale": lambda seed: scale(6, 2, seed),
    "written": lambda seed: written(6, seed),
    "tied": lambda seed: tied(6, 2, seed),
    "two calls": lambda seed: SumGradient((linear(6, 2, seed), linear(6, 3, seed + 5))),
}


@pytest.mark.parametrize("kind", GRADIENTS)
def test_joined_rows_are_the_sum_of_theirs(kind):
    gradient = GRADIENTS[kind](0)
    dense = to_dense(gradient).values_bd
    for parts in (1, 2, 3, 6):
        joined = to_dense(RowJoin()(gradient, parts))
        torch.testing.assert_close(joined.values_bd, dense.view(-1, parts, dense.shape[1]).sum(0))


@pytest.mark.parametrize("kind", GRADIENTS)
def test_parts_add_up_batch_by_batch(kind):
    total, expected = QuerySum(), 0
    for seed in (0, 10, 20):
        total.add("layer", GRADIENTS[kind](seed))
        expected = expected + to_dense(GRADIENTS[kind](seed)).values_bd.sum(0, keepdim=True)
    found = total.layers["layer"]
    assert found.num_examples == 1
    torch.testing.assert_close(to_dense(found).values_bd, expected)


def test_parts_of_other_make_add_up_too():
    """A layer that one batch calls twice and another once, or as another kind."""
    batches = [tied(6, 2, 0), lookup(6, 2, 10), written(6, 20), tied(6, 2, 30)]
    total = QuerySum()
    for batch in batches:
        total.add("layer", batch)
    expected = sum(to_dense(batch).values_bd.sum(0, keepdim=True) for batch in batches)
    torch.testing.assert_close(to_dense(total.layers["layer"]).values_bd, expected)


def test_layers_that_read_one_input_go_on_sharing_it():
    shared, join = drawn(6, 2, 3, seed=1), RowJoin()
    first, second = (join(LinearFactors(shared, drawn(6, 2, 2, seed=seed)), 3) for seed in (2, 3))
    assert first.activation_bsi is second.activation_bsi
    join.clear()
    assert join(LinearFactors(shared, drawn(6, 2, 2)), 3).activation_bsi is not first.activation_bsi


@pytest.mark.gpu
def test_on_a_card_as_on_the_cpu():
    model, pairs = seeded(Mlp), vector_pairs()
    expected = attribute(model, scored(model)).values
    base, source, _, _, targets = pairs
    on_cpu = fit_das(model, "second", base, source, targets, call, rank=2, epochs=2)
    model.cuda()
    result = fit_das(model, "second", base, source, targets, call, rank=2, epochs=2)
    assert result.subspace.raw.device.type == "cuda"
    torch.testing.assert_close(result.subspace.raw.cpu(), on_cpu.subspace.raw, rtol=0, atol=1e-6)
    found = attribute(model, scored(model)).values
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
