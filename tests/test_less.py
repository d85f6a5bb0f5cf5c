"""LESS against a dense re-implementation, from checkpoints and from a recorded training."""

import copy
import math

import pytest
import torch
from models import alone, build, rows_of
from torch import nn
from trajectories import (
    gradients_at,
    groups,
    network,
    positive_rows,
    recorded,
    run,
    squared,
    stored_queries,
)

import gradtrail
from gradtrail import Projection
from gradtrail.attribution import LESSMethod
from gradtrail.callbacks import read_states
from gradtrail.hooks import OptimizerSnapshot

ROWS, QUERY = positive_rows(13), positive_rows(3, seed=1)
BATCH, STEPS = 4, 6
DATA = [(row, 0) for row in ROWS]
QUERIES = [(row, 0) for row in QUERY]


def loss(model, batch):
    return squared(model, batch[0])


def adamw(model, lr=0.01):
    parameters = list(model.named_parameters())
    weights = [value for name, value in parameters if name.endswith("weight")]
    biases = [value for name, value in parameters if name.endswith("bias")]
    return torch.optim.AdamW(
        [{"params": weights, "weight_decay": 0.3}, {"params": biases, "weight_decay": 0.0}],
        lr=lr,
        betas=(0.8, 0.95),
        eps=1e-6,
    )


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, nesterov=True)


def moved_by_adam(gradients, states, options):
    """Gamma of the issue's formula, parameter by parameter."""
    moves = {}
    for name, g in gradients.items():
        state = states.get(name)
        b1, b2 = options[name]["betas"]
        t = 1 if state is None else int(state["step"]) + 1
        m = 0 if state is None else state["exp_avg"].reshape(1, -1)
        v = 0 if state is None else state["exp_avg_sq"].reshape(1, -1)
        m = (b1 * m + (1 - b1) * g) / (1 - b1**t)
        v = (b2 * v + (1 - b2) * g.square()) / (1 - b2**t)
        moves[name] = m / (v.sqrt() + options[name]["eps"])
    return moves


def cosines(moves, queries):
    left = torch.cat([moves[name] for name in queries], 1)
    right = torch.cat(list(queries.values()), 1)
    return (left @ right.T) / left.norm(dim=1).unsqueeze(1) / right.norm(dim=1)


def trained(steps=STEPS, make=adamw):
    model = network()
    optimizer = make(model)
    return model, optimizer, run(model, squared, ROWS, optimizer, steps=steps, batch_size=BATCH)


def attribute(model, **options):
    return gradtrail.attribute(
        model, DATA, QUERIES, method="less", loss=loss, progress=False, **options
    )


# ---------------------------------------------------------------- checkpoints


def test_checkpoints_with_an_optimizer_each():
    """Learning rates come with the optimizers: nothing else says what they were."""
    expected, states, points = 0, [], []
    for steps in (2, 5):
        model, optimizer, records = trained(steps)
        points.append(copy.deepcopy(model.state_dict()))
        states.append(OptimizerSnapshot.of(model, optimizer))
        rows, queries = (
            gradients_at(model, dict(model.state_dict()), data, squared) for data in (ROWS, QUERY)
        )
        moves = moved_by_adam(rows, records[-1].after, records[-1].options)
        expected = expected + optimizer.param_groups[0]["lr"] * cosines(moves, queries)
    assert states[0].parameters["0.weight"].options["lr"] == pytest.approx(0.01 * 0.97**2)
    scores = attribute(network(), checkpoints=points, optimizer_states=states)
    torch.testing.assert_close(scores.values.double(), expected, rtol=1e-5, atol=1e-8)
    assert scores.options["optimizer_states"] == 2


def test_forms_of_an_optimizer(tmp_path):
    model, optimizer, _ = trained()
    snapshot = OptimizerSnapshot.of(model, optimizer)
    snapshot.save(tmp_path / "optimizer.safetensors")
    expected = attribute(model, optimizer_states=snapshot).values
    forms = [
        optimizer,
        [optimizer],
        tmp_path / "optimizer.safetensors",
        str(tmp_path / "optimizer.safetensors"),
        OptimizerSnapshot.from_state_dict(
            model,
            optimizer.state_dict(),
            kind="AdamW",
            names=["0.weight", "2.weight", "0.bias", "2.bias"],
        ),
    ]
    for form in forms:
        assert torch.equal(attribute(model, optimizer_states=form).values, expected)


@pytest.mark.parametrize("batch_size", [1, 4, 13])
def test_scores_do_not_depend_on_the_batch_size(batch_size):
    model, optimizer, _ = trained()
    expected = attribute(model, optimizer_states=optimizer).values
    got = attribute(model, optimizer_states=optimizer, batch_size=batch_size).values
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-8)


def test_first_step_of_plain_gradients_is_the_cosine():
    """Exact case: SGD moves along the gradient, so that LESS is the learning rate times gradcos."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    got = attribute(model, optimizer_states=optimizer).values
    expected = gradtrail.attribute(
        model, DATA, QUERIES, method="gradcos", loss=loss, progress=False
    ).values
    torch.testing.assert_close(got, 0.02 * expected, rtol=1e-5, atol=1e-8)


def test_momentum():
    model, optimizer, records = trained(make=sgd)
    rows, queries = (
        gradients_at(model, dict(model.state_dict()), data, squared) for data in (ROWS, QUERY)
    )
    moves = {}
    for name, g in rows.items():
        buffer = 0.9 * records[-1].after[name]["momentum_buffer"].reshape(1, -1) + g
        moves[name] = g + 0.9 * buffer  # Nesterov
    expected = 0.02 * 0.97**STEPS * cosines(moves, queries)
    got = attribute(model, optimizer_states=optimizer).values.double()
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("kind", ["dense", "factored", "mask"])
def test_projection_comes_after_the_update(kind):
    """With a projection that keeps every entry nothing changes; with a smaller one little does."""
    model, optimizer, _ = trained()
    exact = attribute(model, optimizer_states=optimizer).values
    wide = Projection(kind=kind, dim=1000)
    got = attribute(model, optimizer_states=optimizer, projection=wide).values
    torch.testing.assert_close(got, exact, rtol=1e-5, atol=1e-8)
    parts = [
        attribute(
            model, optimizer_states=optimizer, projection=Projection(kind=kind, dim=4, seed=seed)
        ).values
        for seed in range(20)
    ]
    assert not torch.allclose(parts[0], exact, rtol=1e-3)
    mean = torch.stack(parts).mean(0)
    assert float((mean - exact).norm() / exact.norm()) < 0.3


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_transformers(name):
    """HF layers: each moment meets the entries of its own parameter, transposed ones too."""
    model = build(name)
    optimizer = adamw(model)
    rows = rows_of(name)
    for row in rows[:3]:
        model(
            input_ids=row["input_ids"].unsqueeze(0), labels=row["labels"].unsqueeze(0)
        ).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    scores = gradtrail.attribute(
        model, rows, rows[:2], method="less", optimizer_states=optimizer, progress=False
    )
    gradients = {n: v.flatten(1) for n, v in alone(model, rows).items()}
    states = {
        name: optimizer.state[parameter]
        for name, parameter in model.named_parameters()
        if parameter in optimizer.state
    }
    group = optimizer.param_groups[0]
    moves = moved_by_adam(gradients, states, dict.fromkeys(gradients, group))
    covered = [entry.name for entry in scores.coverage.with_status("covered")]
    moves = {name: moves[name] for name in covered}
    queries = {name: gradients[name][:2] for name in covered}
    expected = 0.01 * cosines(moves, queries)
    torch.testing.assert_close(scores.values.double(), expected, rtol=1e-4, atol=1e-8)


def test_self_influence_is_the_diagonal():
    model, optimizer, _ = trained()
    for projection in (None, Projection(kind="dense", dim=5)):
        options = {
            "method": "less", "optimizer_states": optimizer, "loss": loss, "progress": False,
            "projection": projection,
        }  # fmt: skip
        expected = gradtrail.attribute(model, DATA, DATA, **options).values.diagonal()
        got = gradtrail.self_influence(model, DATA, batch_size=3, **options)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-8)


def test_zero_gradients_score_zero_and_nothing_gives_nothing():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    options = {"method": "less", "optimizer_states": optimizer, "progress": False}

    def flat(model, batch):
        return 0 * loss(model, batch)

    scores = gradtrail.attribute(model, DATA, QUERIES, loss=flat, **options)
    assert torch.equal(scores.values, torch.zeros(13, 3))
    assert gradtrail.attribute(model, [], QUERIES, loss=loss, **options).values.shape == (0, 3)
    assert gradtrail.attribute(model, DATA, [], loss=loss, **options).values.shape == (13, 0)


def test_optimizers_are_asked_for():
    model, optimizer, _ = trained()
    with pytest.raises(ValueError, match="optimizer_states must be given for method 'less'"):
        attribute(model)
    points = [model.state_dict()] * 2
    with pytest.raises(ValueError, match=r"one state a checkpoint \(2\), got 1"):
        attribute(model, checkpoints=points, optimizer_states=optimizer)
    with pytest.raises(ValueError, match=r"one state a checkpoint \(1\), got 2"):
        attribute(model, optimizer_states=[optimizer, optimizer])
    with pytest.raises(TypeError, match=r"got dict. Of a state dict, which"):
        attribute(model, optimizer_states=[optimizer.state_dict()])
    with pytest.raises(ValueError, match="granularity must be 'example' for method 'less'"):
        attribute(model, optimizer_states=optimizer, granularity="token")


def test_one_learning_rate():
    """The cosine is over all layers together, so it has one weight."""
    model = network()
    optimizer = torch.optim.SGD(groups(model))
    with pytest.raises(ValueError, match=r"layers must have one learning rate .* \[0.01, 0.02\]"):
        attribute(model, optimizer_states=optimizer)


def test_optimizer_of_other_parameters_is_refused():
    model, other = network(), nn.Linear(2, 2).double()
    with pytest.raises(ValueError, match="optimizer must hold parameters of the model"):
        attribute(model, optimizer_states=torch.optim.SGD(other.parameters(), lr=0.1))


def test_cache_of_projected_gradients_is_refused():
    model, optimizer, _ = trained()
    options = {"optimizer_states": optimizer, "gradient_cache_residency": "memory"}
    got = attribute(model, **options).values
    torch.testing.assert_close(
        got, attribute(model, optimizer_states=optimizer).values, rtol=1e-6, atol=1e-9
    )
    with pytest.raises(ValueError, match="projection must be None for method 'less' with a grad"):
        attribute(model, projection=4, **options)


# ---------------------------------------------------------------- recorded steps


def scored(stores, **options):
    gradients, queries, states = stores
    return gradtrail.attribute_from_cache(
        gradients, queries, method="less", optimizer_states=states, progress=False, **options
    )


def stored(folder, optimizer=adamw, *, moments="before", **options):
    model, gradients, states = recorded(
        network, squared, ROWS, optimizer, steps=STEPS, moments=moments, **options
    )
    projection = gradients.facts.projection
    queries = stored_queries(
        model, squared, QUERY, folder=folder,
        projection=None if projection is None else Projection(**projection),
    )  # fmt: skip
    return gradients, queries, states


def expected_steps(make=adamw):
    """Each step's rows against the queries at the end, from the state before the step."""
    model, _, records = trained(make=make)
    queries = gradients_at(model, dict(model.state_dict()), QUERY, squared)
    parts = []
    for record in records:
        rows = gradients_at(model, record.parameters, ROWS[record.batch], squared)
        moves = moved_by_adam(rows, record.before, record.options)
        parts.append(next(iter(record.options.values()))["lr"] * cosines(moves, queries))
    return torch.cat(parts)


@pytest.mark.parametrize("moments", ["before", "both"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_recorded_steps(tmp_path, moments, accumulation):
    stores = stored(tmp_path, moments=moments, accumulation=accumulation)
    scores = scored(stores)
    torch.testing.assert_close(scores.values.double(), expected_steps(), rtol=1e-5, atol=1e-8)
    part = scored(stores, selected_steps=[4, 1])
    assert part.train_steps == (1,) * BATCH + (4,) * BATCH
    rows = expected_steps().view(STEPS, BATCH, -1)[[1, 4]].flatten(0, 1)
    torch.testing.assert_close(part.values.double(), rows, rtol=1e-5, atol=1e-8)
    top = scored(stores, top_k=2)
    assert torch.equal(top.values, scores.topk(2).values)


def test_recorded_steps_of_a_mask(tmp_path):
    """A mask keeps entries, and the moments of those are known."""
    whole = scored(stored(tmp_path / "whole")).values
    wide = stored(tmp_path / "wide", projection=Projection(kind="mask", dim=1000))
    torch.testing.assert_close(scored(wide).values, whole, rtol=1e-5, atol=1e-8)
    projection = Projection(kind="mask", dim=4, seed=3)
    stores = stored(tmp_path / "cut", projection=projection)
    model, _, records = trained()
    layers = {"0": ("0.weight", "0.bias"), "2": ("2.weight", "2.bias")}

    def cut(values):
        kept = {}
        for layer, names in layers.items():
            joined = torch.cat([values[name] for name in names], 1)
            index = gradtrail.factors.mask_coordinates(layer, joined.shape[1], projection)
            kept[layer] = joined[:, index] * math.sqrt(joined.shape[1] / len(index))
        return kept

    queries = cut(gradients_at(model, dict(model.state_dict()), QUERY, squared))
    parts = []
    for record in records:
        rows = gradients_at(model, record.parameters, ROWS[record.batch], squared)
        moves = cut(moved_by_adam(rows, record.before, record.options))
        parts.append(record.options["0.bias"]["lr"] * cosines(moves, queries))
    got = scored(stores).values.double()
    torch.testing.assert_close(got, torch.cat(parts), rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("kind", [None, "dense"])
def test_stored_updates_are_taken_as_they_are(tmp_path, kind):
    """HookManager(optimizer=...) stores moves, projected if need be; only rates are missing."""
    projection = None if kind is None else Projection(kind=kind, dim=1000)
    stores = stored(tmp_path, moments="after", moves=True, projection=projection)
    got = scored(stores).values.double()
    torch.testing.assert_close(got, expected_steps(), rtol=1e-5, atol=1e-8)


def test_every_optimizer_has_its_own_update(tmp_path):
    stores = stored(tmp_path, lambda model: torch.optim.RMSprop(model.parameters(), lr=0.001))
    gradients, queries, states = stores
    got = scored(stores).values.double()
    number = STEPS - 1
    layers = read_states(states.facts, states.values(number), states.read(number), "before")
    block = gradients.get(gradients.find(step=number))
    moves = {name: layers[name].directions(block.layers[name]).values_bd for name in layers}
    plain = queries.get(range(len(QUERY))).layers
    sides = {name: gradtrail.factors.to_dense(plain[name]).values_bd for name in layers}
    rate = 0.001 * 0.97**number
    expected = rate * cosines(moves, sides)
    torch.testing.assert_close(got[-BATCH:], expected, rtol=1e-5, atol=1e-9)


def test_projected_gradients_are_refused(tmp_path):
    stores = stored(tmp_path, projection=Projection(kind="dense", dim=3))
    with pytest.raises(
        ValueError, match="must hold single entries .* 'less', got a proj.* 'dense'"
    ):
        scored(stores)


def test_states_of_checkpoints_do_not_go_with_stores(tmp_path):
    gradients, queries, states = stored(tmp_path)
    method = LESSMethod(optimizer_states=torch.optim.SGD(network().parameters(), lr=0.1))
    with pytest.raises(ValueError, match="optimizer_states must be a StepStore for attribute_from"):
        gradtrail.attribute_from_cache(
            gradients, queries, method=method, optimizer_states=states, progress=False
        )
