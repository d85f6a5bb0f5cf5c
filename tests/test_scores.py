"""``AttributionScores``: ranking, the file, and how it shows itself; ``check`` and ``plan``."""

import json
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from models import alone, build, captured, rows_of, text_rows, tiny
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

import gradtrail
from gradtrail import AttributionScores, Coverage, Projection
from gradtrail.attribution.data import as_rows, pad_rows
from gradtrail.attribution.inner_product import collect_queries
from gradtrail.attribution.losses import resolve_loss
from gradtrail.attribution.method import Task
from gradtrail.attribution.setup import make_session
from gradtrail.factors import LinearFactors
from gradtrail.hooks import LAYERS, AbstractLayerRule, ParameterCoverage, select_layers
from gradtrail.hooks.layers.linear import LinearRule

TRAIN = text_rows((5, 3, 7, 1, 6))
QUERY = text_rows((4, 6, 2), seed=1)
VALUES = torch.tensor([[3.0, -1.0], [1.0, 5.0], [-2.0, 0.0], [4.0, 2.0]])


def scores(values=VALUES, **fields):
    coverage = Coverage(
        (
            ParameterCoverage("a.weight", 30, "covered", "a"),
            ParameterCoverage("b", 10, "unsupported", reason="Thing has no rule for 'b'"),
        )
    )
    ids = tuple(f"doc-{row}" for row in range(values.shape[0]))
    queries = tuple(range(values.shape[-1]))
    options = {"normalize": None, "loss": "cross-entropy", "projection": {"dim": 4}}
    return AttributionScores(values, ids, queries, "graddot", options, coverage, **fields)


# ---------------------------------------------------------------- ranking


def test_topk_and_bottomk():
    found = scores().topk(2)
    assert found.indices.tolist() == [[3, 0], [1, 3]]
    assert found.values.tolist() == [[4, 3], [5, 2]]
    assert found.ids == [["doc-3", "doc-0"], ["doc-1", "doc-3"]]
    lowest = scores().bottomk(2)
    assert lowest.indices.tolist() == [[2, 1], [0, 2]]
    assert lowest.values.tolist() == [[-2, 1], [-1, 0]]
    again = scores().topk(2, largest=False)
    assert torch.equal(again.indices, lowest.indices)


def test_topk_of_more_or_none():
    assert scores().topk(100).indices.shape == (2, 4)
    assert scores(torch.zeros(0, 2)).topk(3).indices.shape == (2, 0)
    assert scores(torch.zeros(4, 0)).topk(3).indices.shape == (0, 3)
    for k in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match="k must be an integer of at least 1"):
            scores().topk(k)


def test_topk_sums_positions():
    tokens = torch.stack([VALUES / 2, VALUES / 2], dim=1)
    assert torch.equal(scores(tokens).topk(2).indices, scores().topk(2).indices)
    assert torch.equal(scores(tokens).example_values, VALUES)


def test_ids_must_fit():
    with pytest.raises(
        ValueError, match=r"values must be \[train_ids.*got \(4, 2\) for 3 and 2 ids"
    ):
        AttributionScores(VALUES, (0, 1, 2), (0, 1), "graddot")


def test_arrays_and_tables():
    array = scores().to_numpy()
    assert isinstance(array, np.ndarray)
    assert array.tolist() == VALUES.tolist()
    pandas = pytest.importorskip("pandas")
    table = scores().to_pandas()
    assert isinstance(table, pandas.DataFrame)
    assert list(table.index) == ["doc-0", "doc-1", "doc-2", "doc-3"]
    assert list(table.columns) == [0, 1]
    assert table.loc["doc-3", 0] == 4
    tokens = scores(torch.stack([VALUES / 2, VALUES / 2], dim=1))
    assert tokens.to_pandas().equals(table)


# ---------------------------------------------------------------- the file


@pytest.mark.parametrize("as_text", [True, False])
@pytest.mark.parametrize("granularity", ["example", "token"])
def test_saved_scores_come_back(tmp_path, as_text, granularity):
    model = tiny(torch.float32)
    made = gradtrail.attribute(
        model, TRAIN, QUERY, granularity=granularity, method="gradcos", progress=False
    )
    path = tmp_path / "scores.safetensors"
    made.save(str(path) if as_text else path)
    read = AttributionScores.load(str(path) if as_text else path)
    assert torch.equal(read.values, made.values)
    assert read.values.dtype == torch.float32
    assert (read.train_ids, read.query_ids) == (made.train_ids, made.query_ids)
    assert (read.method, dict(read.options)) == (made.method, dict(made.options))
    assert read.coverage == made.coverage
    if granularity == "token":
        assert torch.equal(read.lengths, made.lengths)
    else:
        assert read.lengths is None
    assert [file.name for file in tmp_path.iterdir()] == ["scores.safetensors"]


def test_file_says_what_it_holds(tmp_path):
    path = tmp_path / "scores.safetensors"
    scores().save(path)
    with safe_open(path, framework="pt") as file:
        header = {name: json.loads(value) for name, value in file.metadata().items()}
    assert header["axes"] == ["train", "query"]
    assert header["shape"] == [4, 2]
    assert header["sign"] == "positive: training more on the example lowers the query's loss"
    assert header["method"] == "graddot"
    assert header["options"]["projection"] == {"dim": 4}
    scores(torch.zeros(4, 3, 2), lengths=torch.tensor([1, 2, 3, 3])).save(path)  # replaced whole
    read = AttributionScores.load(path)
    assert read.values.shape == (4, 3, 2)
    assert read.train_ids == ("doc-0", "doc-1", "doc-2", "doc-3")


def test_empty_and_strided_scores_are_saved(tmp_path):
    path = tmp_path / "scores.safetensors"
    for values in (torch.zeros(0, 2), torch.zeros(4, 0), VALUES.t().contiguous().t()):
        scores(values).save(path)
        assert torch.equal(AttributionScores.load(path).values, values)


def test_foreign_files_are_refused(tmp_path):
    path = tmp_path / "weights.safetensors"
    save_file({"values": VALUES}, path)
    with pytest.raises(ValueError, match="path must be a file written by AttributionScores.save"):
        AttributionScores.load(path)
    save_file({"values": VALUES}, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"weights.safetensors': format None"):
        AttributionScores.load(str(path))
    path.write_bytes(b"not safetensors at all")
    with pytest.raises(ValueError, match="path must be a file written by AttributionScores.save"):
        AttributionScores.load(path)
    with pytest.raises(FileNotFoundError):
        AttributionScores.load(tmp_path / "missing")


def test_failed_save_leaves_the_old_file(tmp_path):
    path = tmp_path / "scores.safetensors"
    scores().save(path)
    bad = AttributionScores(VALUES, tuple("abcd"), (0, 1), "graddot", {"loss": object()})
    with pytest.raises(TypeError, match="not JSON serializable"):
        bad.save(path)
    assert torch.equal(AttributionScores.load(path).values, VALUES)
    assert [file.name for file in tmp_path.iterdir()] == ["scores.safetensors"]
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        scores().save(tmp_path / "folder")
    assert {file.name for file in tmp_path.iterdir()} == {"scores.safetensors", "folder"}


# ---------------------------------------------------------------- how it shows itself


def test_repr_and_describe():
    assert repr(scores()) == "AttributionScores(graddot, 4 x 2, covered 75.0%)"
    text = scores().describe()
    assert "graddot: 4 training examples x 2 queries" in text
    assert "score > 0 is training more on the example lowers the query's loss" in text
    assert "min, 5%, median, 95%, max: -2, -2, " in text
    assert "positive share: 62.5%" in text
    assert "loss: cross-entropy" in text
    assert "normalize" not in text
    assert "min" not in scores(torch.zeros(0, 2)).describe()


class _Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.cells = [], []

    def handle_starttag(self, tag, _):
        self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1] == "td":
            self.cells.append(data)


def test_html():
    values = scores()
    html = values._repr_html_()
    reader = _Tags()
    reader.feed(html)
    assert not reader.open
    assert reader.cells[:2] == ["doc-3 (4)", "doc-0 (3)"]
    escaped = AttributionScores(VALUES, ("<b>", "&", "c", "d"), (0, "<q>"), "graddot")._repr_html_()
    assert "&lt;b&gt;" in escaped
    assert "query &lt;q&gt;" in escaped
    assert "<table>" not in scores(torch.zeros(0, 2))._repr_html_()


def test_coverage_prints_as_a_table():
    coverage = scores().coverage
    assert coverage.share == 0.75
    lines = str(coverage).splitlines()
    assert lines[0].split() == ["parameter", "entries", "status", "reason"]
    assert lines[2].split(maxsplit=3) == ["b", "10", "unsupported", "Thing has no rule for 'b'"]
    assert lines[-1] == ("covered share 75.0% (covered 30, left out 0, unsupported 10 entries)")
    assert Coverage.from_records(coverage.to_records()) == coverage
    assert Coverage(()).share == 1


# ---------------------------------------------------------------- check


class Doubled(nn.Linear):
    """A layer whose registered rule will be wrong."""


class HalfRule(AbstractLayerRule):
    """Forgets half of the gradient."""

    def __init__(self):
        self.right = LinearRule()

    def layer_gradient(self, module, call, output_gradient, roles):
        return self.right.layer_gradient(module, call, output_gradient * factor[0], roles)

    def to_parameters(self, module, dense):
        return self.right.to_parameters(module, dense)

    def cases(self):
        return ()


factor = [0.5]


@pytest.fixture
def wrong_rule():
    LAYERS.register(Doubled)(HalfRule())
    yield
    del LAYERS._rules[Doubled]
    factor[0] = 0.5


def pair_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), Doubled(4, 2)).double()


def pair_batch(rows=6):
    return torch.randn(rows, 3, dtype=torch.float64), torch.zeros(rows, dtype=torch.long)


def test_check_of_a_good_model():
    report = gradtrail.check(pair_model(), pair_batch())
    assert report.ok
    assert report.num_examples == 4
    assert [layer.layer for layer in report.layers] == ["0", "2"]
    assert report.worst.error < 1e-12
    assert all(layer.norm > 0 for layer in report.layers)
    assert "captured gradients agree with autograd on 4 examples" in str(report)


@pytest.mark.usefixtures("wrong_rule")
def test_check_finds_a_wrong_rule():
    report = gradtrail.check(pair_model(), pair_batch())
    assert not report.ok
    assert report.worst.layer == "2"
    assert report.worst.error == pytest.approx(0.5)
    assert report.layers[0].ok
    assert "captured gradients DIFFER from autograd" in str(report)
    assert str(report).count("<- differs") == 1
    factor[0] = float("nan")
    report = gradtrail.check(pair_model(), pair_batch())
    assert not report.ok
    assert report.worst.layer == "2"
    factor[0] = 1 + 1e-4
    assert not gradtrail.check(pair_model(), pair_batch()).ok
    factor[0] = 1.0
    assert gradtrail.check(pair_model(), pair_batch()).ok


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_check_of_few_examples(rows):
    assert gradtrail.check(pair_model(), pair_batch(rows)).num_examples == rows


def test_check_takes_the_options_of_attribute():
    def loss(model, batch):
        return model(batch[0]).square().sum(1).mean()

    options = {"loss": loss, "exclude": "2"}
    report = gradtrail.check(pair_model(), pair_batch(), loss_reduction="mean", **options)
    assert report.ok
    assert [layer.layer for layer in report.layers] == ["0"]
    # said to be a sum, a mean of 4 examples shows them at a quarter
    report = gradtrail.check(pair_model(), pair_batch(), loss_reduction="sum", **options)
    assert report.worst.error == pytest.approx(0.75)


def test_check_leaves_the_model_as_it_was():
    model = tiny()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    rng = torch.get_rng_state()
    assert gradtrail.check(model, pad_rows(TRAIN, 0)).ok
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert model.training
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    assert torch.equal(rng, torch.get_rng_state())


@pytest.mark.parametrize("batch", [(torch.zeros(0, 3), torch.zeros(0)), {"x": ["text"]}], ids=str)
def test_check_needs_an_example(batch):
    with pytest.raises(ValueError, match="batch must hold at least one example"):
        gradtrail.check(pair_model(), batch)


# ---------------------------------------------------------------- plan


def measured_queries(model, train, query, projection=None, batch_size=8):
    session = make_session(model, select_layers(model), None, projection, 0, progress=False)
    loss = resolve_loss(None, None)
    task = Task(
        train=as_rows(train, "train", None, 0),
        query=as_rows(query, "query", None, 0),
        loss=loss,
        query_loss=loss,
        batch_size=batch_size,
        query_batch_size=batch_size,
    )
    with session.opened(task.train, loss):
        return collect_queries(session, task, norms=False)


@pytest.mark.parametrize(
    ("projection", "lengths", "count"),
    [
        (None, (6,) * 5, 5),
        (None, (6,) * 5, 40),
        (None, (2,) * 4, 4),
        (Projection(dim=4), (6,) * 5, 5),
        (Projection(kind="mask", dim=16), (6,) * 8, 8),
    ],
    ids=str,
)
@pytest.mark.parametrize("batch_size", [4, 64])
def test_plan_equals_what_the_queries_take(projection, lengths, count, batch_size):
    model = build("llama", torch.float32)
    train = text_rows((6,) * count)
    query = text_rows(lengths, seed=1)
    plan = gradtrail.plan(model, train, query, projection=projection, batch_size=batch_size)
    side = measured_queries(model, train, query, projection, batch_size)
    assert plan.query_bytes == pytest.approx(side.nbytes, rel=0.02)
    assert plan.device_bytes == plan.query_bytes + plan.layer_bytes
    assert plan.host_bytes == 4 * len(train) * len(query)
    assert plan.disk_bytes == 0


def test_plan_has_seen_both_forms_of_a_query():
    """The cases above are a proof because some layers stay factors and others are written out."""
    model = build("llama", torch.float32)
    forms = {
        type(layer)
        for lengths, count in (((2,) * 4, 4), ((6,) * 5, 40))
        for layer in measured_queries(
            model, text_rows((6,) * count), text_rows(lengths, seed=1)
        ).layers.values()
    }
    assert LinearFactors in forms
    assert len(forms) > 1


def test_plan_counts_the_largest_layer_of_a_batch():
    model = tiny(torch.float32)
    plan = gradtrail.plan(model, text_rows((6,) * 8), QUERY, batch_size=4, layers="up")
    # inputs 8 and outputs 12 wide at 6 positions, and a gradient of 12 x 9 written out
    assert plan.layer_bytes == 4 * 4 * (6 * (8 + 12) + 12 * 9)


def test_plan_counts_passes_and_shares():
    model = tiny(torch.float32)
    states = [model.state_dict()] * 3
    plan = gradtrail.plan(
        model, TRAIN, QUERY, method="tracin", checkpoints=states, checkpoint_weights=[1, 2, 3],
        query_batch_size=1, granularity="token",
    )  # fmt: skip
    assert (plan.query_passes, plan.train_passes) == (3, 3)
    assert plan.host_bytes == 4 * 5 * 7 * 3
    assert (plan.method, plan.num_train, plan.num_query) == ("tracin", 5, 3)
    assert plan.coverage.share == 1
    text = str(plan)
    assert "tracin: 5 training examples, 3 queries" in text
    assert "passes: 3 over the queries, 3 over train" in text
    with pytest.raises(ValueError, match=r"one weight a checkpoint \(3\), got 1"):
        gradtrail.plan(model, TRAIN, QUERY, checkpoints=states, checkpoint_weights=[1.0])


def test_plan_of_nothing():
    model = tiny(torch.float32)
    assert gradtrail.plan(model, [], QUERY).host_bytes == 0
    assert gradtrail.plan(model, TRAIN, []).query_bytes == 0


def test_plan_reads_no_more_than_a_batch_and_leaves_the_model():
    model = build("gpt2", torch.float32)
    read = []

    class Noted(list):
        def __getitem__(self, number):
            read.append(number)
            return super().__getitem__(number)

    rng = torch.get_rng_state()
    gradtrail.plan(model, Noted(rows_of("gpt2") * 20), TRAIN, batch_size=4)
    assert max(read) < 4
    assert torch.equal(rng, torch.get_rng_state())
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())


def test_helpers_of_these_tests_agree():
    """The oracle and the capture used throughout give the same on a layer called twice."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x):
            return self.layer(torch.tanh(self.layer(x)))

    torch.manual_seed(0)
    model = Twice().double()
    rows = [(torch.randn(3).double(), torch.randn(3).double()) for _ in range(5)]
    got, _ = captured(model, rows)
    for name, value in alone(model, rows).items():
        torch.testing.assert_close(got[name], value, rtol=1e-10, atol=1e-12)
