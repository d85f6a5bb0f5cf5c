"""Which Fisher: losses whose squared gradients add up to it, against plain autograd."""

import copy
import math

import pytest
import torch
from models import VOCAB, build, pad_left, rows_of, text_rows, tiny
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from gradtrail import CaptureError, reference
from gradtrail.attribution import fisher
from gradtrail.attribution.data import as_rows
from gradtrail.attribution.fisher import MAX_EXPECTED_OUTPUTS, fisher_loss
from gradtrail.attribution.losses import AbstractLoss, outputs_of, resolve_loss
from gradtrail.attribution.outputs import ModelOutputs, losses_of
from gradtrail.attribution.setup import make_session
from gradtrail.factors import to_dense
from gradtrail.hooks import LivePass, select_layers

F64 = torch.float64
INFERRED = resolve_loss(None, None)
TRAIN = text_rows((5, 3, 7, 1, 6))


def classifier(*sizes, seed=0):
    torch.manual_seed(seed)
    layers = [nn.Linear(left, right, dtype=F64) for left, right in zip(sizes, sizes[1:])]  # noqa: B905
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh())))[:-1]


def class_rows(n=6, width=4, classes=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(n, width, generator=generator, dtype=F64)
    return [(inputs[row], torch.tensor(row % classes)) for row in range(n)]


def backwards(model, data, loss, *, batch_size=4, collate=None):
    """Every backward's gradients: a list of {parameter: [n, *shape]}, in the order they come."""
    session = make_session(model, select_layers(model), None, None, 0, progress=False)
    rows = as_rows(data, "train", collate, 0)
    names = {id(value): name for name, value in model.named_parameters()}
    found, batch, turn = [], {}, [0, -1]

    def sink(_place, layer, gradient):
        owner = next(unit for unit in session.selection.units if unit.name == layer).owners[0]
        dense = to_dense(gradient)
        for role, value in owner.rule.to_parameters(owner.module, dense).items():
            batch[names[id(owner.module._parameters[role])]] = value

    def done(place):
        turn[:] = [turn[0] + 1, place.start] if turn[1] == place.start else [0, place.start]
        if turn[0] == len(found):
            found.append({})
        for name, value in batch.items():
            target = found[turn[0]].setdefault(name, value.new_zeros(len(rows), *value.shape[1:]))
            target[place.start : place.start + place.size] = value
        batch.clear()

    with session.opened(rows, loss):
        session.capture(
            rows, loss, batch_size=batch_size, phase="train", sink=sink, done=done
        )  # fmt: skip
    return found


def flat(gradients):
    """One row an example of all parameters, by name."""
    return torch.cat([gradients[name].flatten(1) for name in sorted(gradients)], dim=1)


def fisher_of(found):
    """Sum over backwards of the mean outer product."""
    return sum(flat(one).t() @ flat(one) for one in found) / len(flat(found[0]))


def oracle(model, data, value, *, collate=None):
    """Per-example gradients by autograd of any function ``(model, batch) -> [1]``."""
    model = copy.deepcopy(model).eval()
    rows = as_rows(data, "train", collate, 0)
    singles = [rows.batch([row]) for row in range(len(rows))]
    return flat(reference.per_example_gradients(model, singles, value))


def close(got, expected, rtol=1e-9, atol=1e-11):
    torch.testing.assert_close(got, expected, rtol=rtol, atol=atol)


# ---------------------------------------------------------------- several backwards a forward


class Several(AbstractLoss):
    """The loss times 1, 2 and -3: a backward each."""

    several = True
    description = "several"
    factors = (1.0, 2.0, -3.0)

    def __call__(self, model, batch):
        values = INFERRED(model, batch)
        return torch.stack([factor * values for factor in self.factors])

    def rounds(self, model, batch, start):
        del start
        yield lambda: self(model, batch)


class Checkpointed(nn.Module):
    """A classifier whose middle runs again in the backward, as activation checkpointing does."""

    def __init__(self, reentrant):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 5, dtype=F64)
        self.middle = nn.Sequential(nn.Linear(5, 5, dtype=F64), nn.Tanh())
        self.last = nn.Linear(5, 3, dtype=F64)
        self.reentrant = reentrant

    def forward(self, x):
        x = torch.tanh(self.first(x))
        if self.reentrant is None:
            x = self.middle(x)
        else:
            x = checkpoint(self.middle, x, use_reentrant=self.reentrant)
        return self.last(x)


@pytest.mark.parametrize("reentrant", [None, False, True], ids=["plain", "checkpoint", "reentrant"])
@pytest.mark.parametrize("batch_size", [1, 4, 6])
def test_backwards_through_one_forward(reentrant, batch_size):
    model, data = Checkpointed(reentrant), class_rows()
    found = backwards(model, data, Several(), batch_size=batch_size)
    model.reentrant = None
    expected = oracle(model, data, INFERRED)
    assert len(found) == 3
    for one, factor in zip(found, Several.factors, strict=True):
        close(flat(one), factor * expected)


def test_backwards_of_a_shared_weight_and_a_table():
    model = tiny()
    found = backwards(model, TRAIN, Several())
    expected = oracle(model, TRAIN, INFERRED)
    for one, factor in zip(found, Several.factors, strict=True):
        close(flat(one), factor * expected)


def test_layers_that_one_backward_misses():
    """A layer reached by some backwards only is no missing layer; one that none reaches is."""
    model = nn.ModuleDict({name: nn.Linear(3, 1, dtype=F64) for name in ("a", "b", "c")})
    seen = []
    with LivePass(model, select_layers(model)) as live:
        x, turns = torch.ones(2, 3, dtype=F64), []

        def losses():
            model["c"](x)
            return model["a"](x)[:, 0], model["b"](x)[:, 0]

        values, missing = live.run(
            losses, batch=2, tokens=1, sink=lambda name, _: seen.append(name), several=True,
            done=lambda: turns.append(len(seen)),
        )  # fmt: skip
        assert (values.shape, missing, seen, turns) == ((2, 2), ("c",), ["a", "b"], [1, 2])
        assert live.never_reached() == ("c",)
        with pytest.raises(CaptureError, match="must reach a captured layer"):
            live.run(
                lambda: (model["a"](x)[:, 0], x[:, 0]),
                batch=2, tokens=1, sink=lambda *_: None, several=True,
            )  # fmt: skip


@pytest.mark.parametrize(
    ("value", "got"),
    [
        (torch.zeros(2), r"\(\)"),
        (torch.zeros(3, 4), r"\(4,\)"),
        (torch.zeros(1, 2, 2), r"\(2, 2\)"),
        (torch.zeros(()), r"\(\)"),
        ((torch.zeros(2), torch.zeros(3)), r"\(3,\)"),
        ([torch.zeros(2)], "list"),
    ],
    ids=["one", "other rows", "deep", "scalar", "uneven", "list"],
)
def test_several_losses_of_other_shapes_are_refused(value, got):
    model = nn.Linear(3, 1, dtype=F64)
    with (
        LivePass(model, select_layers(model)) as live,
        pytest.raises(ValueError, match=rf"one value an example, shape \(2,\), got {got}"),
    ):
        live.run(lambda: value, batch=2, tokens=1, sink=lambda *_: None, several=True)


# ---------------------------------------------------------------- outputs


@pytest.mark.parametrize("name", ["gpt2", "bert", "t5", "vit"])
def test_outputs_give_the_loss(name):
    model, rows = build(name).eval(), as_rows(rows_of(name), "train", None, 0)
    batch = rows.batch(range(5))
    outputs = outputs_of(INFERRED, model, batch, option="refine")
    assert outputs.kind == "cross_entropy"
    assert outputs.logits.shape[:-1] == outputs.labels.shape
    assert torch.equal(losses_of(outputs), INFERRED(model, batch))
    taken = outputs.logits.log_softmax(-1).gather(-1, outputs.labels.clamp(min=0).unsqueeze(-1))
    total = -(taken.squeeze(-1) * (outputs.labels != -100)).reshape(5, -1).sum(1)
    close(total, INFERRED(model, batch))


def test_outputs_of_a_regression():
    model = classifier(4, 1)
    batch = (torch.ones(2, 4, dtype=F64), torch.zeros(2, dtype=F64))
    outputs = outputs_of(INFERRED, model, batch, option="refine")
    assert (outputs.kind, outputs.logits.shape, outputs.labels) == (
        "squared_error", (2,), batch[1],
    )  # fmt: skip
    close(losses_of(outputs), model(batch[0])[:, 0].square() / 2)


def own(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def test_outputs_of_a_loss_of_the_users_own():
    loss = resolve_loss(own, None)
    match = r"refine='cg' must know the outputs that the loss compares, got .* own \(own\)\. Leave"
    with pytest.raises(ValueError, match=match):
        outputs_of(loss, classifier(4, 3), None, option="refine='cg'")


# ---------------------------------------------------------------- expected


def expected_fisher(model, data):
    """Sum over classes of p times the outer product of the gradient of log p."""
    total = 0
    for c in range(3):
        weights = torch.stack([model(x)[None].softmax(-1)[0, c] for x, _ in data]).detach()
        rows = oracle(model, data, lambda m, batch, c=c: m(batch[0]).log_softmax(-1)[:, c])
        counted = torch.tensor([float(label != -100) for _, label in data], dtype=F64)
        total = total + (rows * (weights * counted).unsqueeze(1)).t() @ rows
    return total / len(data)


@pytest.mark.parametrize("batch_size", [1, 4, 6])
def test_expected_fisher_is_the_sum_over_classes(batch_size):
    model, data = classifier(4, 5, 3), class_rows()
    data[2] = (data[2][0], torch.tensor(-100))
    found = backwards(model, data, fisher_loss("expected", INFERRED), batch_size=batch_size)
    assert len(found) == 3
    close(fisher_of(found), expected_fisher(model, data))
    assert not any(flat(one)[2].any() for one in found)


def test_expected_fisher_of_a_class_that_cannot_come():
    """A logit of minus infinity: probability 0, and no gradient that is not a number."""

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = classifier(4, 3)

        def forward(self, x):
            return self.inner(x).masked_fill(torch.tensor([False, True, False]), -torch.inf)

    model, data = Masked(), class_rows()
    data = [(x, label if label != 1 else torch.tensor(0)) for x, label in data]
    for kind in ("expected", "sampled"):
        found = backwards(model, data, fisher_loss(kind, INFERRED))
        assert all(flat(one).isfinite().all() for one in found)
        assert sum(float(flat(one).square().sum()) for one in found) > 0


@pytest.mark.parametrize("shape", [(), (1,), (2,), (3, 2)], ids=str)
def test_expected_fisher_of_a_squared_error(shape):
    """A Gaussian of unit variance: the sum over outputs of outer products of their gradients."""
    model = nn.Sequential(
        classifier(4, 5, math.prod(shape)), nn.Unflatten(1, shape) if shape else nn.Identity()
    )
    data = [(x, torch.zeros(shape, dtype=F64)) for x, _ in class_rows()]
    found = backwards(model, data, fisher_loss("expected", INFERRED))
    wanted = 0
    for place in range(math.prod(shape)):
        rows = oracle(model, data, lambda m, batch, p=place: m(batch[0]).flatten(1)[:, p])
        wanted = wanted + rows.t() @ rows / len(data)
    close(fisher_of(found), wanted)


def test_expected_fisher_of_too_many_outputs():
    loss = fisher_loss("expected", INFERRED)
    inputs = torch.ones(2, 4, dtype=F64)
    for shape in ((2, MAX_EXPECTED_OUTPUTS + 1), (2, 3, 4)):
        model = nn.Linear(4, math.prod(shape[1:]), dtype=F64)
        model = nn.Sequential(model, nn.Unflatten(1, shape[1:]))
        batch = (inputs, torch.zeros(shape[:-1], dtype=torch.long))
        match = rf'at most 128 outputs an example, .* got outputs \({shape[0]}, .*"sampled"'
        with pytest.raises(ValueError, match=match):
            loss(model, batch)
    batch = (inputs, torch.zeros(2, MAX_EXPECTED_OUTPUTS + 1, dtype=F64))
    with pytest.raises(ValueError, match="must have one set of at most"):
        loss(nn.Linear(4, MAX_EXPECTED_OUTPUTS + 1, dtype=F64), batch)


# ---------------------------------------------------------------- sampled


@pytest.mark.montecarlo
@pytest.mark.parametrize("task", ["classes", "regression"])
def test_sampled_fisher_converges_to_the_expected_one(task):
    model, data = classifier(4, 3), class_rows(4)
    if task == "regression":
        data = [(x, torch.zeros(3, dtype=F64)) for x, _ in data]
    loss = fisher_loss("sampled", INFERRED, draws=3000)
    found = backwards(model, data, loss)
    assert len(found) == 3000
    wanted = fisher_of(backwards(model, data, fisher_loss("expected", INFERRED)))
    error = float((fisher_of(found) - wanted).norm() / wanted.norm())
    few = float((fisher_of(found[:30]) * 100 - wanted).norm() / wanted.norm())
    assert error < 0.05
    assert error < few / 3
    mean = sum(flat(one) for one in found) / math.sqrt(3000)  # a gradient of log p has mean zero
    spread = torch.stack([flat(one) for one in found]).square().sum(0).sqrt()
    assert float((mean / spread.clamp(min=1e-9)).abs().max()) < 5


@pytest.mark.montecarlo
def test_drawn_classes_have_the_models_frequencies():
    logits = torch.randn(3, 7, generator=torch.Generator().manual_seed(0), dtype=F64)
    logits[1, 2] = -torch.inf
    uniform = torch.rand(20000, 2, generator=torch.Generator().manual_seed(1), dtype=F64)
    drawn = fisher._inverted(logits, torch.tensor([0, 1]), uniform)
    shares = torch.stack([(drawn == c).double().mean(0) for c in range(7)], dim=1)
    probabilities = logits[:2].softmax(-1)
    spread = (probabilities * (1 - probabilities) / 20000).sqrt()
    assert ((shares - probabilities).abs() <= 4 * spread).all()
    assert not (drawn[:, 1] == 2).any()


def test_drawn_classes_at_the_ends_and_in_chunks(monkeypatch):
    logits = torch.tensor([[-torch.inf, 0.0, 0.0, -torch.inf]]).expand(5, 4)
    uniform = torch.tensor([[0.0, 0.4, 0.5, 0.6, 1 - 2**-52]], dtype=F64)
    expected = [[1, 1, 2, 2, 2]]
    for entries in (1 << 22, 8, 1):
        monkeypatch.setattr(fisher, "_CHUNK_ENTRIES", entries)
        assert fisher._inverted(logits, torch.arange(5), uniform).tolist() == expected


def drawn_labels(monkeypatch, model, loss, batch, start=0):
    """The labels that the losses of a batch were taken at, by draw."""
    seen = []
    nll = F.nll_loss

    def watch(logs, labels, **options):
        seen.append(labels)
        return nll(logs, labels, **options)

    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(F, "nll_loss", watch)
        next(loss.rounds(model, batch, start))()
    return seen


def test_sampled_losses_are_those_of_the_drawn_labels(monkeypatch):
    model = tiny().eval()
    rows = as_rows(TRAIN, "train", None, 0)
    batch = rows.batch(range(5))
    batch["labels"][2, 3] = -100
    loss = fisher_loss("sampled", INFERRED, draws=3, seed=5)
    values = loss(model, batch)
    labels = drawn_labels(monkeypatch, model, loss, batch)
    assert values.shape == (3, 5)
    shown = outputs_of(INFERRED, model, batch, option="fisher").labels
    for value, drawn in zip(values, labels, strict=True):
        assert torch.equal(drawn.view(shown.shape) == -100, shown == -100)
        outputs = ModelOutputs(model(batch["input_ids"], batch["attention_mask"])["logits"],
                               drawn.view(shown.shape), "cross_entropy", "")  # fmt: skip
        close(value, losses_of(outputs) / math.sqrt(3))
    assert not torch.equal(labels[0], labels[1])


def test_draws_differ_by_seed_stage_and_row(monkeypatch):
    model = nn.Linear(4, 50, dtype=F64)
    batch = (torch.zeros(8, 4, dtype=F64), torch.zeros(8, dtype=torch.long))
    labels = {}
    for seed in (0, 1):
        for stage in ("covariance", "eigenvalues"):
            for start in (0, 8):
                loss = fisher_loss("sampled", INFERRED, seed=seed, stage=stage)
                key = (seed, stage, start)
                (labels[key],) = drawn_labels(monkeypatch, model, loss, batch, start)
                (again,) = drawn_labels(monkeypatch, model, loss, batch, start)
                assert torch.equal(labels[key], again)
    assert len({tuple(one.tolist()) for one in labels.values()}) == 8
    (shifted,) = drawn_labels(
        monkeypatch, model, fisher_loss("sampled", INFERRED), batch, start=3
    )  # fmt: skip
    assert torch.equal(shifted[:5], labels[0, "covariance", 0][3:])


@pytest.mark.filterwarnings("ignore::gradtrail.GradTrailWarning")  # layers left out, not reached
@pytest.mark.parametrize("name", ["tiny", "llama", "bert", "t5", "vit"])
def test_sampled_gradients_do_not_depend_on_batches_and_padding(name):
    model = tiny() if name == "tiny" else build(name)
    data = TRAIN if name == "tiny" else rows_of(name)
    loss = fisher_loss("sampled", INFERRED, draws=2)
    expected = [flat(one) for one in backwards(model, data, loss, batch_size=1)]
    assert len(expected) == 2
    assert all(one.abs().sum() > 0 for one in expected)
    for size in (2, 5):
        found = backwards(model, data, loss, batch_size=size)
        for got, wanted in zip(found, expected, strict=True):
            # transformers computes softmaxes and norms in float32
            close(flat(got), wanted, rtol=1e-4, atol=1e-5 * float(wanted.abs().max()))
    if name == "tiny":
        for got, wanted in zip(
            backwards(model, data, loss, batch_size=3, collate=pad_left), expected, strict=True
        ):
            close(flat(got), wanted)


@pytest.mark.parametrize("data", ["padded on the right", "one output"])
def test_sampled_regression_does_not_depend_on_batches(data):
    model = nn.Linear(3, 1, dtype=F64) if data == "one output" else nn.Linear(3, 20, dtype=F64)
    shape = (1,) if data == "one output" else (20,)
    rows = [(x[:3], torch.zeros(shape, dtype=F64)) for x, _ in class_rows(6)]
    loss = fisher_loss("sampled", INFERRED)
    (expected,) = backwards(model, rows, loss, batch_size=1)
    for size in (4, 6):
        (found,) = backwards(model, rows, loss, batch_size=size)
        close(flat(found), flat(expected))


@pytest.mark.parametrize("kind", ["expected", "sampled", "sampler"])
def test_two_runs_are_equal_to_the_bit_and_move_no_random_state(kind):
    model, data = classifier(4, 5, 3), class_rows()
    loss = fisher_loss(
        "sampled" if kind == "sampler" else kind,
        INFERRED,
        sampler=redrawn if kind == "sampler" else None,
    )
    torch.manual_seed(3)
    state = torch.get_rng_state()
    first = backwards(model, data, loss)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(4)
    second = backwards(model, data, loss)
    for one, other in zip(first, second, strict=True):
        assert torch.equal(flat(one), flat(other))


def test_labels_that_do_not_count_draw_nothing():
    model = tiny()
    data = [dict(row) for row in TRAIN]
    for row in (data[0], data[2]):
        row["labels"] = torch.full_like(row["labels"], -100)
    (found,) = backwards(model, data, fisher_loss("sampled", INFERRED))
    assert not flat(found)[[0, 2, 3]].any()
    assert flat(found)[[1, 4]].any(1).all()
    (whole,) = backwards(model, TRAIN, fisher_loss("sampled", INFERRED))
    close(flat(found)[[1, 4]], flat(whole)[[1, 4]])


def test_low_precision_logits_are_widened():
    model = nn.Linear(4, 3).bfloat16()
    batch = (torch.ones(2, 4, dtype=torch.bfloat16), torch.tensor([0, 1]))
    for kind in ("expected", "sampled"):
        assert fisher_loss(kind, INFERRED)(model, batch).dtype == torch.float32


# ---------------------------------------------------------------- a sampler of the user's own


def redrawn(model, batch, generator):
    inputs, labels = batch
    drawn = torch.multinomial(model(inputs).softmax(-1), 1, generator=generator)[:, 0]
    return inputs, torch.where(labels == -100, labels, drawn)


@pytest.mark.parametrize("loss", [INFERRED, resolve_loss(own, None)], ids=["inferred", "own"])
def test_sampler_of_the_users_own(loss):
    model, data = classifier(4, 5, 3), class_rows()
    made = fisher_loss("sampled", loss, draws=2, sampler=redrawn, seed=7)
    found = backwards(model, data, made, batch_size=4)
    assert len(found) == 2
    for draw, one in enumerate(found):
        rows = []
        for start, stop in ((0, 4), (4, 6)):
            generator = fisher._generator(7, "covariance", draw, start)
            batch = tuple(torch.stack(part) for part in zip(*data[start:stop], strict=True))
            inputs, labels = redrawn(model, batch, generator)
            rows += [(x, label) for x, label in zip(inputs, labels, strict=True)]
        expected = oracle(model, rows, INFERRED) / math.sqrt(2)
        close(flat(one), expected)
    assert made.description.endswith("labels sampled by redrawn, 2 a position")


def test_sampler_that_drops_rows():
    loss = fisher_loss("sampled", INFERRED, sampler=lambda _model, batch, _: batch[0][:2])
    with pytest.raises(ValueError, match="4 rows, got 2 rows in a Tensor"):
        backwards(classifier(4, 3), class_rows(), loss)


# ---------------------------------------------------------------- options


def test_empirical_fisher_is_the_loss_itself():
    assert fisher_loss("empirical", INFERRED) is INFERRED


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"kind": "exact"}, ValueError, "fisher must be one of 'empirical', 'expected', 'sampled'"),
        (
            {"kind": "sampled", "draws": 0},
            ValueError,
            "fisher_draws must be an integer of at least",
        ),
        ({"kind": "expected", "draws": 2}, ValueError, "must go without draws, got fisher_draws=2"),
        ({"kind": "empirical", "sampler": redrawn}, ValueError, "without draws, got label_sampler"),
        ({"kind": "sampled", "sampler": "model"}, TypeError, "must be a callable .* got str"),
        ({"kind": "expected", "loss": own}, ValueError, r"fisher='expected' must know .* \(own\)"),
        ({"kind": "sampled", "loss": own}, ValueError, "own .* pass label_sampler"),
    ],
    ids=["kind", "draws", "expected-draws", "sampler", "no-callable", "expected", "sampled"],
)
def test_options_that_are_refused(options, error, match):
    loss = resolve_loss(options.pop("loss", None), None)
    with pytest.raises(error, match=match):
        fisher_loss(options.pop("kind"), loss, **options)


def test_vocabulary_is_covered():
    assert VOCAB < MAX_EXPECTED_OUTPUTS  # the models of these tests would pass by size alone
    model, rows = tiny(), as_rows(TRAIN, "train", None, 0)
    with pytest.raises(ValueError, match='must have one set .* Pass fisher="sampled"'):
        fisher_loss("expected", INFERRED)(model, rows.batch([0, 1]))
