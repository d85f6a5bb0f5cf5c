"""What each trajectory method needs captured: the table of the documentation, row by row."""

import re
from pathlib import Path

import pytest
import torch
from training import make_model, make_rows, make_trainer
from trajectories import network, positive_rows, recorded, squared, stored_queries

import gradtrail
from gradtrail import HookManager, Projection, StoreError
from gradtrail.attribution import METHODS
from gradtrail.callbacks import (
    GradTrailCallback,
    OffloadCallback,
    OptimizerStateCallback,
    ParameterSnapshotCallback,
)
from gradtrail.store import GradientStore, StepStore

ROWS, QUERY = positive_rows(8), positive_rows(2, seed=1)
PAGE = Path(__file__).parent.parent / "docs" / "trajectory_methods.md"
KINDS = (None, "factored", "dense", "mask")
MOMENTS = ("before", "after", "both")


def table():
    """Rows of the page's table by number: the cells' texts."""
    lines = re.findall(r"^\| (\d) \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    return {int(number): [cell.strip() for cell in rest.split("|")] for number, rest in lines}


def words(cell):
    return re.findall(r"`(\w+)`", cell)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


_RUNS = {}


def recorded_run(tmp_path_factory, **options):
    """A short training and its queries; each kind is trained once."""
    key = tuple(sorted(options.items()))
    if key not in _RUNS:
        projection = None
        if options.get("kind") is not None:
            projection = Projection(kind=options["kind"], dim=3)
        model, gradients, states = recorded(
            network,
            squared,
            ROWS,
            adamw,
            steps=4,
            moments=options.get("moments", "both"),
            every=options.get("every", 1),
            moves=options.get("moves", False),
            projection=projection,
        )
        folder = tmp_path_factory.mktemp("queries")
        queries = stored_queries(model, squared, QUERY, folder=folder, projection=projection)
        _RUNS[key] = gradients, queries, states
    return _RUNS[key]


def scored(method, run, **options):
    gradients, queries, states = run
    options = {"optimizer_states": states, "progress": False, **options}
    return gradtrail.attribute_from_cache(gradients, queries, method=method, **options)


STORED = [number for number, cells in table().items() if "attribute_from_cache" in cells[1]]


def test_table_names_every_method():
    named = {words(cells[0])[0] for cells in table().values()}
    assert named == {"trak", "less", "adamw", "dvemb"}
    assert named <= set(METHODS)
    assert len(STORED) == 4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("moments", MOMENTS)
@pytest.mark.parametrize("number", STORED)
def test_records_of_a_row_are_enough_and_needed(tmp_path_factory, number, moments, kind):
    name, _, gradients, optimizer, _, projection = table()[number]
    method = words(name)[0]
    moves = gradients == "moves"
    run = recorded_run(tmp_path_factory, moments=moments, kind=kind, moves=moves)
    enough = moments in words(optimizer) and (
        kind in words(projection) if kind else "none" in projection
    )
    if enough:
        scores = scored(method, run)
        assert scores.values.shape == (16, 2)
        assert scores.values.isfinite().all()
        assert scores.values.abs().max() > 0
        return
    match = "Record with OptimizerStateCallback|Capture"
    if moves and kind == "factored":  # which projects moves as a whole, and gradients' two sides
        with pytest.raises(StoreError, match="Layer 0 must have one shape in both stores"):
            scored(method, run)
        return
    with pytest.raises(ValueError, match=match):
        scored(method, run)


@pytest.mark.parametrize("number", STORED)
def test_every_step_or_those_that_are_scored(tmp_path_factory, number):
    name, _, gradients, _, every, _ = table()[number]
    run = recorded_run(tmp_path_factory, every=2, moves=gradients == "moves")
    method = words(name)[0]
    if every == "any":
        assert scored(method, run).train_steps == (0,) * 4 + (2,) * 4
        return
    with pytest.raises(ValueError, match="got every=2. Record it with OptimizerStateCallback"):
        scored(method, run)
    whole = recorded_run(tmp_path_factory)
    with pytest.raises(ValueError, match="got every=2. Record it with OffloadCallback"):
        scored(method, (run[0], run[1], whole[2]))


@pytest.mark.parametrize("method", ["adamw", "dvemb"])
def test_moves_are_no_gradients(tmp_path_factory, method):
    run = recorded_run(tmp_path_factory, moves=True)
    with pytest.raises(ValueError, match="got update directions of AdamW. Capture without"):
        scored(method, run)


@pytest.mark.parametrize("method", ["less", "adamw", "dvemb"])
def test_missing_records_are_named(tmp_path_factory, method):
    gradients, queries, _ = run = recorded_run(tmp_path_factory)
    with pytest.raises(ValueError, match=r"got None. Record .*: OptimizerStateCallback\(StepStore"):
        scored(method, run, optimizer_states=None)
    other = StepStore(residency="memory")
    with pytest.raises(ValueError, match="wrote, got one that nothing was recorded in. Record"):
        scored(method, run, optimizer_states=other)
    other.define(recorder="ParameterSnapshotCallback")
    with pytest.raises(ValueError, match="got one of 'ParameterSnapshotCallback'"):
        scored(method, run, optimizer_states=other)
    with pytest.raises(ValueError, match="fixed model. Capture with OffloadCallback"):
        scored(method, (queries, queries, run[2]))


@pytest.mark.parametrize("method", ["less", "adamw", "dvemb"])
def test_holes_are_named(tmp_path, method):
    model, gradients, states = recorded(network, squared, ROWS, adamw, steps=5)
    queries = stored_queries(model, squared, QUERY, folder=tmp_path)
    run = gradients, queries, states
    whole = scored(method, run).values
    states.discard(2)
    with pytest.raises(ValueError, match="optimizer_states must hold every .* for 2. Record"):
        scored(method, run)
    rows = scored(method, run, selected_steps=[3, 4]).values
    torch.testing.assert_close(rows, whole[12:], rtol=1e-5, atol=1e-9)
    gradients.discard(2)
    gradients.discard(3)
    if method == "less":  # which scores each step on its own
        assert scored(method, run, selected_steps=[1, 4]).values.shape == (8, 2)
        return
    with pytest.raises(ValueError, match=r"the end, got nothing for 3. .* OffloadCallback\(every"):
        scored(method, run, selected_steps=[1, 4])


def test_training_that_goes_on_after_the_gradients_is_no_end(tmp_path):
    model, gradients, states = recorded(network, squared, ROWS, adamw, steps=4)
    queries = stored_queries(model, squared, QUERY, folder=tmp_path)
    gradients.discard(3)
    with pytest.raises(ValueError, match="train_store must hold the gradients of every step .* 3"):
        scored("dvemb", (gradients, queries, states))


@pytest.mark.parametrize("method", ["less", "adamw", "dvemb"])
def test_records_of_two_runs_are_told_apart(tmp_path_factory, method):
    gradients, queries, _ = recorded_run(tmp_path_factory)
    _, _, states = recorded(network, squared, ROWS.flip(0), adamw, steps=4)
    with pytest.raises(ValueError, match="must be of one run, got other examples in step"):
        scored(method, (gradients, queries, states))


@pytest.mark.parametrize("method", ["less", "adamw", "dvemb"])
def test_layers_without_an_optimizer_are_named(tmp_path, method):
    def partly(model):
        return torch.optim.AdamW(model[2].parameters(), lr=0.01)

    model, gradients, states = recorded(network, squared, ROWS, partly, steps=2)
    queries = stored_queries(model, squared, QUERY, folder=tmp_path)
    with pytest.raises(ValueError, match=r"must hold every layer of train_store, got none of \['0"):
        scored(method, (gradients, queries, states))
    assert scored(method, (gradients, queries, states), layers="2").values.abs().max() > 0


def test_one_record_a_backward_is_refused(tmp_path_factory):
    run = recorded_run(tmp_path_factory)
    store = GradientStore(residency="memory")
    model = network()
    optimizer = adamw(model)
    callback = OffloadCallback(store, recording="per_block")
    manager = HookManager(model, callbacks=[callback], loss_reduction="mean")
    with manager.collect(optimizer):
        squared(model, ROWS[:4]).mean().backward()
        optimizer.step()
    with pytest.raises(ValueError, match="recording='per_block'. Capture with OffloadCallback"):
        scored("adamw", (store, store, run[2]))


def test_divisors_come_from_either_record(tmp_path_factory):
    """Blocks without a divisor of their own take the optimizer's records'; without, an error."""
    gradients, queries, states = recorded_run(tmp_path_factory)
    plain = GradientStore(residency="memory")
    facts = gradients.facts
    plain.define(id_scheme=facts.id_scheme, loss_reduction=facts.loss_reduction)
    for stored in gradients.blocks():
        plain.append(stored.block)
    expected = scored("dvemb", (gradients, queries, states)).values
    assert torch.equal(scored("dvemb", (plain, queries, states)).values, expected)
    other = StepStore(residency="memory")
    other.define(**states.facts)
    for step, tensors, values in states.iterate():
        other.append(step, tensors, {**values, "sizes": [1], "scales": [4.0]})
    with pytest.raises(ValueError, match="what each gradient is divided by, got nothing in step 3"):
        scored("dvemb", (plain, queries, other))


@pytest.mark.parametrize("kind", KINDS)
def test_trak_needs_a_projection(kind):
    """The first row of the table."""
    data = [(row, row.sum().sin().view(1)) for row in ROWS]
    options = {"method": "trak", "progress": False}
    allowed = words(table()[1][5])
    if kind in allowed:
        projection = Projection(kind=kind, dim=3)
        scores = gradtrail.attribute(network(), data, data, projection=projection, **options)
        assert scores.values.shape == (8, 8)
    else:
        with pytest.raises(ValueError, match="projection must be given for method 'trak'"):
            gradtrail.attribute(network(), data, data, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_less_of_checkpoints_takes_any_projection(kind):
    """The second row of the table."""
    data = [(row, row.sum().sin().view(1)) for row in ROWS]
    model = network()
    projection = None if kind is None else Projection(kind=kind, dim=3)
    assert "none" in table()[2][5]
    assert kind is None or kind in words(table()[2][5])
    scores = gradtrail.attribute(
        model, data, data, method="less", optimizer_states=adamw(model), projection=projection,
        progress=False,
    )  # fmt: skip
    assert scores.values.abs().max() <= 0.01 + 1e-6


# ---------------------------------------------------------------- by replay


def loop_loss(output, fields):
    """The loss of the recorded loop, from what replay gives."""
    rows = fields["0"]
    return (output.squeeze(1) - rows.sum(1).sin()).square().mean()


def replayed(run, method, **options):
    _, queries, states, snapshots = run
    manager = HookManager(network(), loss_reduction="mean")
    return gradtrail.attribution.attribute_by_replay(
        manager, snapshots, queries, method=method, optimizer_states=states, loss=loop_loss,
        progress=False, **options,
    )  # fmt: skip


@pytest.fixture(scope="module")
def snapshot_run(tmp_path_factory):
    snapshots = StepStore(residency="memory")
    callback = ParameterSnapshotCallback(snapshots)
    model, gradients, states = recorded(
        network, squared, ROWS, adamw, steps=4, accumulation=2, more=[callback]
    )
    folder = tmp_path_factory.mktemp("queries")
    return gradients, stored_queries(model, squared, QUERY, folder=folder), states, snapshots


@pytest.mark.parametrize("direction", ["query", "train"])
@pytest.mark.parametrize("method", ["adamw", "dvemb"])
def test_replay_gives_the_scores_of_stored_gradients(snapshot_run, method, direction):
    gradients, queries, states, _ = snapshot_run
    expected = scored(method, (gradients, queries, states), direction=direction)
    got = replayed(snapshot_run, method, direction=direction)
    torch.testing.assert_close(got.values, expected.values, rtol=1e-5, atol=1e-9)
    assert got.train_ids == expected.train_ids
    assert got.train_steps == expected.train_steps
    part = replayed(snapshot_run, method, selected_steps=[3, 1])
    rows = expected.values.view(4, 4, -1)[[1, 3]].flatten(0, 1)
    torch.testing.assert_close(part.values, rows, rtol=1e-5, atol=1e-9)


def test_replay_of_less(snapshot_run):
    gradients, queries, states, _ = snapshot_run
    expected = scored("less", (gradients, queries, states)).values
    got = replayed(snapshot_run, "less").values
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-9)


def test_replay_refuses_what_it_cannot_run(snapshot_run, tmp_path):
    gradients, queries, states, snapshots = snapshot_run
    with pytest.raises(ValueError, match="method must score a recorded training, got 'graddot'"):
        replayed(snapshot_run, "graddot")
    with pytest.raises(ValueError, match=r"steps whose parameters .* recorded, got \[9\]"):
        replayed(snapshot_run, "less", selected_steps=[1, 9])
    with pytest.raises(ValueError, match="that ParameterSnapshotCallback wrote, got one of 'Opt"):
        replayed((gradients, queries, states, states), "less")
    other = stored_queries(network(), squared, QUERY, folder=tmp_path, projection=3)
    with pytest.raises(ValueError, match="captured with the projection of the manager, got {'kind"):
        replayed((gradients, other, states, snapshots), "less")
    one = HookManager(network(), layers="2", loss_reduction="mean")
    with pytest.raises(ValueError, match=r"layers that the manager captures, got \['0'\]"):
        gradtrail.attribution.attribute_by_replay(
            one, snapshots, queries, method="less", optimizer_states=states, progress=False
        )


# ---------------------------------------------------------------- a Trainer


@pytest.mark.filterwarnings("ignore:Layers are left out:gradtrail.GradTrailWarning")
@pytest.mark.parametrize("name", [pytest.param("gpt2", marks=pytest.mark.slow), "llama"])
def test_trainer_with_everything_on(tmp_path, monkeypatch, name):
    """Two groups, accumulation, clipping, a schedule, tied weights: the shares add up to 0.2%.

    What the first moment was moved by is the clipped mean over tokens of all micro-batches, entry
    by entry: the strongest check that gradients, divisors and moments belong together.
    """
    gradients, states = GradientStore(tmp_path / "gradients"), StepStore(tmp_path / "states")
    callback = GradTrailCallback(
        [OffloadCallback(gradients), OptimizerStateCallback(states, moments="both")]
    )
    model = make_model(name)
    make_trainer(
        model, tmp_path / "run", [callback], max_steps=6, gradient_accumulation_steps=2,
        weight_decay=0.1, max_grad_norm=0.3, lr_scheduler_type="linear",
    ).train()  # fmt: skip
    layers = list(gradients.layers)
    queries = gradtrail.cache(
        model, make_rows(4, seed=5), cache_dir=tmp_path / "queries", layers=layers, progress=False
    ).train
    monkeypatch.setattr("gradtrail.attribution.adamw._MOST_MISSED", 2e-3)
    run = gradients, queries, states
    assert len({tuple(group.values()) for group in _groups(states)}) == 2
    for method in ("adamw", "dvemb"):
        scores = scored(method, run)
        assert scores.values.shape == (36, 4)
        assert scores.values.abs().min() > 0
        other = scored(method, run, direction="train")
        scale = float(scores.values.abs().max())
        torch.testing.assert_close(scores.values, other.values, rtol=1e-3, atol=1e-5 * scale)
    assert scored("less", run).values.shape == (36, 4)


def _groups(states):
    groups = states.values(0)["before"]["groups"]
    return [{key: group[key] for key in ("lr", "weight_decay")} for group in groups]
