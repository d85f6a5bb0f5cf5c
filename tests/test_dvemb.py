"""DVEmb against explicit products of matrices and against retraining; what it refuses."""

import pytest
import torch
from trajectories import (
    additive,
    exact_hessian,
    gradients_at,
    groups,
    network,
    positive_rows,
    recorded,
    retrained,
    run,
    squared,
    stored_queries,
    surprise,
)

import gradtrail
from gradtrail import Projection
from gradtrail.attribution.dvemb import DVEmbMethod, GradientLayerStep
from gradtrail.attribution.trajectory import (
    StepBlock,
    TrajectoryStep,
    pull_back,
    push_forward,
)
from gradtrail.factors import to_dense

ROWS, QUERY = positive_rows(13), positive_rows(3, seed=1)
BATCH, STEPS = 4, 20
PROBLEMS = {"additive": (additive, surprise), "network": (network, squared)}


def sgd(model):
    return torch.optim.SGD(groups(model, decay=0.2, lr=0.05))


def one_rate(model):
    return torch.optim.SGD(model.parameters(), lr=0.05)


def stored(problem, folder, optimizer=sgd, projection=None, **options):
    """A recorded run and its queries, in stores."""
    make, loss = PROBLEMS[problem]
    model, gradients, states = recorded(
        make, loss, ROWS, optimizer, moments="before", projection=projection, **options
    )
    queries = stored_queries(model, loss, QUERY, folder=folder, projection=projection)
    return gradients, queries, states


def scored(stores, **options):
    gradients, queries, states = stores
    return gradtrail.attribute_from_cache(
        gradients, queries, method="dvemb", optimizer_states=states, progress=False, **options
    )


def flat(gradients):
    return torch.cat(list(gradients.values()), 1)


def explicit(problem, *, mean=True, by_layer=False, decay=False):
    """The formula as it stands, with every matrix written out."""
    make, loss = PROBLEMS[problem]
    model = make()
    records = run(model, loss, ROWS, sgd(model), steps=STEPS, batch_size=BATCH, mean=mean)
    query_qd = flat(gradients_at(model, dict(model.state_dict()), QUERY, loss))
    names = [name for name, value in model.named_parameters() for _ in range(value.numel())]
    layers = [name.rpartition(".")[0] for name in names]
    same = torch.tensor([[a == b for b in layers] for a in layers])
    d = len(names)
    carried, scores = torch.eye(d, dtype=torch.float64), []
    for record in reversed(records):
        own_bd = flat(gradients_at(model, record.parameters, ROWS[record.batch], loss))
        shares_bd = record.shares.unsqueeze(1) * own_bd
        c = BATCH if mean else 1
        hessian = c * shares_bd.T @ shares_bd
        if by_layer:
            hessian = hessian * same
        rate_d = torch.tensor([record.options[name]["lr"] for name in names], dtype=torch.float64)
        decay_d = torch.tensor(
            [record.options[name]["weight_decay"] if decay else 0.0 for name in names],
            dtype=torch.float64,
        )
        scores.append((rate_d * shares_bd) @ carried.T @ query_qd.T)
        carried = carried @ (torch.eye(d) - rate_d.unsqueeze(1) * (hessian + decay_d.diag()))
    return torch.cat(scores[::-1])


@pytest.mark.parametrize("by_layer", [False, True], ids=["full", "block_diagonal"])
@pytest.mark.parametrize("mean", [True, False], ids=["mean", "sum"])
@pytest.mark.parametrize("decay", [False, True], ids=["plain", "decay"])
def test_scores_are_those_of_explicit_products(tmp_path, mean, by_layer, decay):
    stores = stored("network", tmp_path, mean=mean)
    expected = explicit("network", mean=mean, by_layer=by_layer, decay=decay)
    for direction in ("query", "train"):
        scores = scored(
            stores,
            curvature="block_diagonal" if by_layer else "full",
            weight_decay=decay,
            direction=direction,
        )
        torch.testing.assert_close(scores.values.double(), expected, rtol=1e-5, atol=1e-7)
    assert scores.train_steps == tuple(step for step in range(STEPS) for _ in range(BATCH))
    assert scores.method == "dvemb"


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("mean", [True, False], ids=["mean", "sum"])
def test_scores_are_those_of_retraining(tmp_path, mean, accumulation):
    """Where the outer products of the gradients are the second derivatives, with weight decay."""
    stores = stored("additive", tmp_path, mean=mean, accumulation=accumulation)
    values = scored(stores, weight_decay=True).values.double()
    for step, place in ((0, 1), (3, 0), (11, 3), (19, 2)):
        expected = retrained(additive, surprise, ROWS, QUERY, sgd, at=(step, place), mean=mean)
        error = float((values[step * BATCH + place] - expected).norm() / expected.norm())
        assert error < 1e-4, (step, place, error)


def test_recursion_with_exact_second_derivatives_is_retraining():
    """The same sweeps with another product in place of the outer products of gradients."""
    model = network()
    records = run(model, squared, ROWS, sgd(model), steps=STEPS, batch_size=BATCH)
    steps = []
    for number, record in enumerate(records):
        rows = gradients_at(model, record.parameters, ROWS[record.batch], squared)
        layers = {name: values.unsqueeze(0) for name, values in rows.items()}
        maps = {}
        for name, values in layers.items():
            options = record.options[name]
            rate = torch.tensor(options["lr"], dtype=torch.float64).expand(1, 1, values.shape[2])
            decay = options["weight_decay"]
            maps[name] = GradientLayerStep(rate, 1 - rate * decay if decay else None)
            assert (maps[name].multiple is None) == bool(decay)
        block = StepBlock(layers, record.shares, number * BATCH)
        steps.append(TrajectoryStep(number, (block,), maps, {}))

    def product(step, vectors, _, into):
        record = records[step.step]
        hessian = exact_hessian(
            model, record.parameters, ROWS[record.batch], record.shares, squared
        )
        sizes = [values.numel() for values in record.parameters.values()]
        if not vectors:
            return
        joined = torch.cat([vectors[name] for name in record.parameters], 2) @ hessian
        for name, part in zip(record.parameters, joined.split(sizes, dim=2), strict=True):
            into[name].add_(part)

    rows = gradients_at(model, dict(model.state_dict()), QUERY, squared)
    queries = {name: values.unsqueeze(0) for name, values in rows.items()}
    back = pull_back(reversed(steps), queries, STEPS * BATCH, product)
    ends = push_forward(steps, product)
    forward = -sum((ends[name] @ queries[name].mT)[0] for name in ends)
    torch.testing.assert_close(back, forward, rtol=1e-9, atol=1e-12)
    for step, place in ((0, 1), (11, 3), (19, 2)):
        expected = retrained(network, squared, ROWS, QUERY, sgd, at=(step, place))
        error = float((back[step * BATCH + place] - expected).norm() / expected.norm())
        assert error < 1e-5, (step, place, error)


@pytest.mark.parametrize("kind", ["dense", "factored", "mask"])
def test_projected_gradients_follow_the_same_recursion(tmp_path, kind):
    """The formula in the projected space, written out there."""
    projection = Projection(kind=kind, dim=3, seed=2)
    stores = stored("network", tmp_path, one_rate, projection)
    gradients, queries, states = stores

    def joined(block):
        layers = [to_dense(block.layers[name]).values_bd for name in sorted(block.layers)]
        return torch.cat(layers, 1).double()

    rows = [joined(gradients.get(gradients.find(step=step))) for step in range(STEPS)]
    query_qk = joined(queries.get(range(len(QUERY))))
    carried, scores = torch.eye(query_qk.shape[1], dtype=torch.float64), []
    for step in reversed(range(STEPS)):
        rate = states.values(step)["before"]["groups"][0]["lr"]
        scores.append(rate * (rows[step] / BATCH) @ carried.T @ query_qk.T)
        carried = carried - rate * carried @ rows[step].T @ rows[step] / BATCH
    expected = torch.cat(scores[::-1])
    for direction in ("query", "train"):
        got = scored(stores, direction=direction).values.double()
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-7)


def test_low_precision_stores_come_close(tmp_path):
    exact = explicit("network")
    make, loss = PROBLEMS["network"]
    model, gradients, states = recorded(make, loss, ROWS, sgd, dtype="bfloat16")
    queries = stored_queries(model, loss, QUERY, folder=tmp_path, dtype="bfloat16")
    got = scored((gradients, queries, states)).values.double()
    assert float((got - exact).norm() / exact.norm()) < 0.02


def test_selected_steps_follow_the_whole_rest(tmp_path):
    stores = stored("network", tmp_path)
    whole = scored(stores).values.view(STEPS, BATCH, -1)
    for direction in ("query", "train"):
        part = scored(stores, selected_steps=[19, 2], direction=direction)
        assert part.train_steps == (2,) * BATCH + (19,) * BATCH
        torch.testing.assert_close(
            part.values.view(2, BATCH, -1), whole[[2, 19]], rtol=1e-6, atol=1e-9
        )


def test_every_step_is_read_once(tmp_path, monkeypatch):
    """A sweep asks for one pass over either store, the next step while one is worked on."""
    stores = stored("network", tmp_path)
    gradients, queries, states = stores
    read = {"gradients": [], "states": []}
    blocks, iterate = type(gradients).blocks, type(states).iterate

    def count(kind, iterator, step_of):
        for item in iterator:
            read[kind].append(step_of(item))
            yield item

    def counted_blocks(self, **options):
        found = blocks(self, **options)
        return count("gradients", found, lambda b: b.block.step) if self is gradients else found

    def counted_states(self, *args, **options):
        return count("states", iterate(self, *args, **options), lambda entry: entry[0])

    monkeypatch.setattr(type(gradients), "blocks", counted_blocks)
    monkeypatch.setattr(type(states), "iterate", counted_states)
    for direction, order in (("query", range(STEPS)[::-1]), ("train", range(STEPS))):
        read["gradients"], read["states"] = [], []
        scored(stores, direction=direction)
        assert read["gradients"] == list(order)
        assert read["states"] == list(order)


def test_written_out_gradients_are_let_go(tmp_path, monkeypatch):
    """Without memory to keep them written out, factors are written out again: the same scores."""
    stores = stored("network", tmp_path)
    expected = scored(stores).values
    monkeypatch.setattr("gradtrail.attribution.trajectory_records.free_bytes", lambda _: 0)
    assert torch.equal(scored(stores).values, expected)


def test_nothing_to_score(tmp_path):
    stores = stored("network", tmp_path)
    assert scored(stores, layers="0").values.shape == (STEPS * BATCH, len(QUERY))


# ---------------------------------------------------------------- refusals


def test_options_are_checked():
    with pytest.raises(ValueError, match="curvature must be one of 'full', 'block_diagonal'"):
        DVEmbMethod(curvature="diagonal")
    with pytest.raises(ValueError, match="direction must be one of 'query', 'train'"):
        DVEmbMethod(direction=None)


def test_live_model_is_refused():
    model = network()
    data = [(row, row.sum().view(1)) for row in ROWS]
    with pytest.raises(ValueError, match="method must score a fixed model, got 'dvemb'"):
        gradtrail.attribute(model, data, data, method="dvemb", progress=False)
    with pytest.raises(ValueError, match="method must score a fixed model, got 'dvemb'"):
        gradtrail.plan(model, data, data, method="dvemb")
    with pytest.raises(ValueError, match="method must score a fixed model, got 'dvemb'"):
        gradtrail.self_influence(model, data, method="dvemb", progress=False)


def test_rates_within_a_projected_layer_are_refused(tmp_path):
    projection = Projection(kind="dense", dim=3)
    stores = stored("network", tmp_path, sgd, projection)
    with pytest.raises(ValueError, match="without projection where the parameters of a layer diff"):
        scored(stores)


def test_steps_up_the_gradient_are_refused(tmp_path):
    stores = stored(
        "network", tmp_path, lambda m: torch.optim.SGD(m.parameters(), lr=0.01, maximize=True),
        steps=2,
    )  # fmt: skip
    with pytest.raises(ValueError, match="with maximize=False for method 'dvemb', got True"):
        scored(stores)
