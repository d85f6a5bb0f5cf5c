"""AdamW-influence against retraining and explicit matrices; both directions; masks."""

from itertools import combinations, product

import pytest
import torch
from torch import nn
from trajectories import (
    Record,
    additive,
    exact_hessian,
    gradients_at,
    groups,
    network,
    options_of,
    positive_rows,
    recorded,
    retrained,
    run,
    squared,
    states_of,
    stored_queries,
    surprise,
)

import gradtrail
from gradtrail import Projection
from gradtrail.attribution.adamw import AdamWMethod, linearise_adamw, step_gradient
from gradtrail.attribution.trajectory import (
    StepBlock,
    TrajectoryStep,
    gauss_newton,
    pull_back,
    push_forward,
)
from gradtrail.attribution.trajectory_masks import Cut

ROWS, QUERY = positive_rows(13), positive_rows(3, seed=1)
BATCH, STEPS = 4, 20
PROBLEMS = {"additive": (additive, surprise), "network": (network, squared)}


def adamw(model, **changes):
    return torch.optim.AdamW(groups(model), betas=(0.8, 0.95), eps=1e-6, **changes)


def map_of(record, name):
    """The linearised step of one parameter, as one layer."""
    options, after = record.options[name], record.after[name]
    before = record.before.get(name)
    first = torch.zeros_like(after["exp_avg"]) if before is None else before["exp_avg"]
    step = linearise_adamw(
        *(value.reshape(1, 1, -1) for value in (first, after["exp_avg"], after["exp_avg_sq"])),
        {
            "lr": options["lr"],
            "beta1": options["betas"][0],
            "beta2": options["betas"][1],
            "eps": options["eps"],
            "weight_decay": options["weight_decay"],
            "step": int(after["step"]),
        },
    )
    stays = before is not None and before["step"] == after["step"]
    return step.where(torch.tensor(False)) if stays else step


def steps_of(model, records, loss, prepare=None):
    """What the sweeps read, with gradients by autograd and each parameter as one layer."""
    steps = []
    for number, record in enumerate(records):
        if prepare is not None:
            prepare(model, number)
        rows = gradients_at(model, record.parameters, ROWS[record.batch], loss)
        layers = {name: values.unsqueeze(0) for name, values in rows.items()}
        half = BATCH // 2  # two backwards a step
        blocks = tuple(
            StepBlock(
                {name: values[:, part] for name, values in layers.items()},
                record.shares[part],
                number * BATCH + part.start,
            )
            for part in (slice(0, half), slice(half, BATCH))
        )
        steps.append(
            TrajectoryStep(number, blocks, {name: map_of(record, name) for name in layers}, {})
        )
    return steps


def exact_curvature(model, records, loss):
    """Product with the second derivatives of each step's loss, in place of Gauss-Newton's."""

    def product(step, vectors, _, into):
        record = records[step.step]
        hessian = exact_hessian(model, record.parameters, ROWS[record.batch], record.shares, loss)
        sizes = [values.numel() for values in record.parameters.values()]
        if not vectors:
            return
        joined = torch.cat([vectors[name] for name in record.parameters], 2) @ hessian
        for name, part in zip(record.parameters, joined.split(sizes, dim=2), strict=True):
            into[name].add_(part)

    return product


def trained(problem):
    make, loss = PROBLEMS[problem]
    model = make()
    records = run(model, loss, ROWS, adamw(model), steps=STEPS, batch_size=BATCH)
    return model, records, loss


def queries_of(model, loss):
    rows = gradients_at(model, dict(model.state_dict()), QUERY, loss)
    return {name: values.unsqueeze(0) for name, values in rows.items()}


def test_moments_give_back_the_gradient():
    model, records, loss = trained("network")
    for record in records[:3]:
        rows = gradients_at(model, record.parameters, ROWS[record.batch], loss)
        for name, values in rows.items():
            before = record.before.get(name)
            first = 0 if before is None else before["exp_avg"].flatten()
            got = step_gradient(first, record.after[name]["exp_avg"].flatten(), 0.8)
            torch.testing.assert_close(got, record.shares @ values, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("direction", ["query", "train"])
def test_scores_are_those_of_retraining(problem, direction):
    """With exact second derivatives, and where Gauss-Newton's are exact, without them."""
    model, records, loss = trained(problem)
    steps, queries = steps_of(model, records, loss), queries_of(model, loss)
    curvatures = [exact_curvature(model, records, loss)]
    if problem == "additive":
        curvatures.append(gauss_newton(by_layer=False))
    for curvature in curvatures:
        if direction == "query":
            scores = pull_back(reversed(steps), queries, STEPS * BATCH, curvature)
        else:
            ends = push_forward(steps, curvature)
            scores = -sum((ends[name] @ queries[name].mT)[0] for name in ends)
        for step, place in ((0, 1), (3, 0), (11, 3), (18, 2), (19, 0)):
            expected = retrained(
                PROBLEMS[problem][0], loss, ROWS, QUERY, adamw, at=(step, place), steps=STEPS,
                batch_size=BATCH,
            )  # fmt: skip
            got = scores[step * BATCH + place]
            error = float((got - expected).norm() / expected.norm())
            assert error < 1e-5, (step, place, error)


@pytest.mark.parametrize("by_layer", [False, True], ids=["full", "by layer"])
@pytest.mark.parametrize("problem", PROBLEMS)
def test_both_directions_agree(problem, by_layer):
    model, records, loss = trained(problem)
    steps, queries = steps_of(model, records, loss), queries_of(model, loss)
    curvature = gauss_newton(by_layer=by_layer)
    back = pull_back(reversed(steps), queries, STEPS * BATCH, curvature)
    ends = push_forward(steps, curvature)
    forward = -sum((ends[name] @ queries[name].mT)[0] for name in ends)
    torch.testing.assert_close(back, forward, rtol=1e-9, atol=1e-12)
    full = pull_back(reversed(steps), queries, STEPS * BATCH, gauss_newton(by_layer=False))
    assert torch.equal(full, back) != by_layer


# ---------------------------------------------------------------- from stores


def stored(problem="additive", folder=None, **options):
    """A recorded run and its queries, in stores."""
    make, loss = PROBLEMS[problem]
    model, gradients, states = recorded(make, loss, ROWS, adamw, **options)
    return gradients, stored_queries(model, loss, QUERY, folder=folder), states


def scored(stores, **options):
    gradients, queries, states = stores
    return gradtrail.attribute_from_cache(
        gradients, queries, method="adamw", optimizer_states=states, progress=False, **options
    )


@pytest.mark.parametrize("mean", [True, False], ids=["mean", "sum"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_stored_scores_are_those_of_retraining(tmp_path, mean, accumulation):
    """Twenty steps, weight decay in one group, rates that change, every coordinate."""
    stores = stored(folder=tmp_path, mean=mean, accumulation=accumulation)
    for direction in ("query", "train"):
        scores = scored(stores, direction=direction)
        assert scores.values.shape == (STEPS * BATCH, len(QUERY))
        assert scores.train_steps[::BATCH] == tuple(range(STEPS))
        for step, place in ((0, 1), (3, 0), (11, 3), (19, 0)):
            expected = retrained(
                additive, surprise, ROWS, QUERY, adamw, at=(step, place), mean=mean
            )
            got = scores.values[step * BATCH + place].double()
            error = float((got - expected).norm() / expected.norm())
            assert error < 1e-4, (step, place, error)


def test_both_directions_agree_from_stores(tmp_path):
    stores = stored("network", tmp_path)
    for curvature in ("full", "block_diagonal"):
        query = scored(stores, curvature=curvature).values
        train = scored(stores, curvature=curvature, direction="train").values
        torch.testing.assert_close(query, train, rtol=1e-6, atol=1e-12)
    assert not torch.allclose(query, scored(stores).values, rtol=1e-3)


def test_clipping_is_measured(tmp_path):
    """A clipped gradient is the sum of smaller shares; how much smaller is read off the moments."""
    model, gradients, states = recorded(additive, surprise, ROWS, adamw, clip=0.05)
    queries = stored_queries(model, surprise, QUERY, folder=tmp_path)
    scores = scored((gradients, queries, states)).values
    # the same run, its shares scaled by hand to the norm that was left
    model = additive()
    optimizer = adamw(model)
    records = []
    for step in range(STEPS):
        batch = [(step * BATCH + place) % len(ROWS) for place in range(BATCH)]
        parameters = {name: value.detach().clone() for name, value in model.named_parameters()}
        before, options = states_of(model, optimizer), options_of(model, optimizer)
        optimizer.zero_grad()
        surprise(model, ROWS[batch]).mean().backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        for entry in optimizer.param_groups:
            entry["lr"] *= 0.97
        shares = torch.full((BATCH,), 1 / BATCH, dtype=torch.float64) * (0.05 / (norm + 1e-6))
        after = states_of(model, optimizer)
        records.append(Record(batch, shares, parameters, before, after, options))
    steps = steps_of(model, records, surprise)
    expected = pull_back(
        reversed(steps), queries_of(model, surprise), STEPS * BATCH, gauss_newton(by_layer=False)
    )
    torch.testing.assert_close(scores.double(), expected, rtol=1e-4, atol=1e-9)


def test_selected_steps_follow_the_whole_rest(tmp_path):
    """Rows of some steps are those of the whole result: later steps are followed all the same."""
    stores = stored("network", tmp_path)
    whole = scored(stores).values.view(STEPS, BATCH, -1)
    for direction in ("query", "train"):
        part = scored(stores, selected_steps=[4, 17], direction=direction)
        assert part.values.shape == (2 * BATCH, len(QUERY))
        torch.testing.assert_close(
            part.values.view(2, BATCH, -1), whole[[4, 17]], rtol=1e-6, atol=1e-12
        )


class Turned(nn.Module):
    """A layer whose weight is stored turned around, and one that is not always used."""

    is_on = True

    def __init__(self):
        super().__init__()
        conv = pytest.importorskip("transformers.pytorch_utils").Conv1D
        self.first = conv(4, 5)
        self.last = nn.Linear(4, 1)
        self.other = nn.Linear(5, 1)

    def forward(self, rows):
        found = self.last(torch.tanh(self.first(rows)))
        return found + self.other(rows) if self.is_on else found


def turned():
    torch.manual_seed(0)
    return Turned().double()


def switch(model, step):
    model.is_on = step % 3 != 1


@pytest.mark.filterwarnings("ignore:No gradient reached")
def test_orientation_and_layers_without_a_gradient(tmp_path):
    """In a step without a gradient the optimizer leaves a parameter alone, moments and all."""
    model, gradients, states = recorded(turned, squared, ROWS, adamw, prepare=switch)
    switch(model, 0)
    queries = stored_queries(model, squared, QUERY, folder=tmp_path)
    other = turned()
    records = run(other, squared, ROWS, adamw(other), steps=STEPS, batch_size=BATCH, prepare=switch)
    steps = steps_of(other, records, squared, prepare=switch)
    switch(other, 0)
    assert set(gradients.layers) == {"first", "last", "other"}
    expected = pull_back(
        reversed(steps), queries_of(other, squared), STEPS * BATCH, gauss_newton(by_layer=False)
    )
    for direction in ("query", "train"):
        got = scored((gradients, queries, states), direction=direction).values
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-10)


# ---------------------------------------------------------------- masks


def test_masks_of_every_entry_are_exact(tmp_path):
    stores = stored("network", tmp_path)
    expected = scored(stores).values
    for direction in ("query", "train"):
        got = scored(stores, masks=2, mask_dim=24, direction=direction).values
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-12)
        # one layer whole, the other drawn
        got = scored(stores, masks=3, mask_dim=6, direction=direction).values
        other = scored(stores, masks=3, mask_dim=6).values
        torch.testing.assert_close(got, other, rtol=1e-6, atol=1e-12)
    assert not torch.allclose(other, expected, rtol=1e-3)


def test_masks_are_drawn_from_their_seed(tmp_path):
    stores = stored("network", tmp_path)
    options = {"masks": 2, "mask_dim": 5}
    first = scored(stores, **options).values
    assert torch.equal(first, scored(stores, mask_seed=0, **options).values)
    other = scored(stores, mask_seed=2, **options).values
    four = scored(stores, masks=4, mask_dim=5).values
    torch.testing.assert_close(four, (first + other) / 2, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("by_layer", [False, True], ids=["full", "by layer"])
def test_products_over_every_mask_average_to_the_whole(by_layer):
    """Over all draws of 3 of 5 and 2 of 4 entries the product with the curvature has no bias."""
    generator = torch.Generator().manual_seed(0)
    sizes, kept = {"one": 5, "two": 4}, {"one": 3, "two": 2}
    rows, left, right = (
        {
            name: torch.randn(count, size, generator=generator, dtype=torch.float64)
            for name, size in sizes.items()
        }
        for count in (6, 2, 3)
    )
    weights = torch.rand(6, generator=generator, dtype=torch.float64)
    draws = {name: list(combinations(range(sizes[name]), kept[name])) for name in sizes}
    both = list(product(draws["one"], draws["two"]))
    cuts = {
        name: Cut(sizes[name], torch.tensor([pair[place] for pair in both]))
        for place, name in enumerate(sizes)
    }
    block = StepBlock({name: cuts[name].gradients(rows[name]) for name in sizes}, weights, None)
    step = TrajectoryStep(0, (block,), {}, {name: cuts[name].coupling for name in sizes})
    vectors = {name: cuts[name].gradients(right[name]) for name in sizes}
    products = [{name: block.layers[name] @ vectors[name].mT for name in sizes}]
    found = {name: torch.zeros_like(values) for name, values in vectors.items()}
    gauss_newton(by_layer=by_layer)(step, vectors, products, found)
    got = sum((cuts[name].gradients(left[name]) @ found[name].mT).mean(0) for name in sizes)
    every = [list(sizes)] if not by_layer else [["one"], ["two"]]
    expected = 0
    for names in every:
        g, x, y = (torch.cat([values[n] for n in names], 1) for values in (rows, left, right))
        expected = expected + x @ (g.T @ (weights.unsqueeze(1) * g)) @ y.T
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.montecarlo
def test_masks_come_close_to_every_entry(tmp_path):
    """The mean of 2000 masks of 6 of a layer's entries is within 3%, of 12 entries within 1%.

    One product with a curvature has no bias, as the test above shows. Products that meet an entry
    several times in twenty steps have one, which falls with the size of the masks (seen here: 0.9%
    and 0.2%, with standard errors of 0.5% and 0.3%).
    """
    stores = stored("network", tmp_path)
    exact = scored(stores).values
    for dim, tolerance in ((6, 0.03), (12, 0.01)):
        mean = scored(stores, masks=2000, mask_dim=dim).values
        assert float((mean - exact).norm() / exact.norm()) < tolerance


def test_stored_mask_is_one_draw(tmp_path):
    """Gradients that were captured with a mask give what that mask gives of whole ones."""
    whole = scored(stored("network", tmp_path / "whole"), masks=1, mask_dim=5, mask_seed=7).values
    model, gradients, states = recorded(
        network, squared, ROWS, adamw, projection=Projection(kind="mask", dim=5, seed=7)
    )
    queries = stored_queries(
        model, squared, QUERY, folder=tmp_path / "cut", projection=gradients_projection(gradients)
    )
    got = scored((gradients, queries, states)).values
    torch.testing.assert_close(got, whole, rtol=1e-5, atol=1e-9)
    with pytest.raises(ValueError, match="train_store must hold single entries .* kind 'mask'"):
        scored((gradients, queries, states), masks=2)


def gradients_projection(store):
    return Projection(**store.facts.projection)


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"masks": 0}, "masks must be an integer of at least 1, got 0"),
        ({"mask_dim": 8}, "mask_dim must go with masks, got masks=None"),
        ({"mask_seed": 1}, "mask_seed must go with masks, got masks=None"),
        ({"masks": 1, "mask_dim": 0}, "mask_dim must be an integer of at least 1, got 0"),
        ({"masks": 1, "mask_dim": 1}, "mask_dim must be at least 2, .* got 1"),
        ({"curvature": "none"}, "curvature must be one of 'full', 'block_diagonal', got 'none'"),
        ({"direction": "up"}, "direction must be one of 'query', 'train', got 'up'"),
    ],
    ids=str,
)
def test_options_are_checked(options, match):
    with pytest.raises(ValueError, match=match):
        AdamWMethod(**options)


def test_live_model_is_refused():
    model = network()
    data = [(row, row.sum().view(1)) for row in ROWS]
    with pytest.raises(ValueError, match="method must score a fixed model, got 'adamw'"):
        gradtrail.plan(model, data, data, method="adamw")
    for call in (gradtrail.attribute, lambda m, d, _, **o: gradtrail.self_influence(m, d, **o)):
        with pytest.raises(ValueError, match="method must score a fixed model, got 'adamw'"):
            call(model, data, data, method="adamw", progress=False)


OTHERS = {
    "SGD": (lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9), "got SGD"),
    "coupled": (
        lambda m: torch.optim.Adam(groups(m)),
        "AdamW .* got Adam with coupled weight decay",
    ),
    "amsgrad": (lambda m: adamw(m, amsgrad=True), "with amsgrad=False .* got True"),
    "maximize": (lambda m: adamw(m, maximize=True), "with maximize=False .* got True"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_optimizers_are_refused(tmp_path, name):
    make, match = OTHERS[name]
    model, gradients, states = recorded(additive, surprise, ROWS, make, steps=2)
    queries = stored_queries(model, surprise, QUERY, folder=tmp_path)
    with pytest.raises(ValueError, match=match):
        scored((gradients, queries, states))


def test_plain_adam_is_adamw_without_decay(tmp_path):
    def adam(model):
        return torch.optim.Adam(model.parameters(), lr=0.01)

    def decoupled(model):
        return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)

    found = []
    for name, make in (("adam", adam), ("adamw", decoupled)):
        model, gradients, states = recorded(additive, surprise, ROWS, make, steps=4)
        queries = stored_queries(model, surprise, QUERY, folder=tmp_path / name)
        found.append(scored((gradients, queries, states)).values)
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-12)


def test_gradients_of_another_sum_are_refused(tmp_path):
    """A penalty that the training adds is in the moments and not among the examples' gradients."""

    def penalised(model, rows):
        return surprise(model, rows) + 40 * model.left.weight.square().sum()

    model, gradients, states = recorded(additive, surprise, ROWS, adamw, steps=2)
    queries = stored_queries(model, surprise, QUERY, folder=tmp_path)
    _, _, other = recorded(additive, penalised, ROWS, adamw, steps=2)
    with pytest.raises(ValueError, match="must hold what the gradient of step 1 was the sum of"):
        scored((gradients, queries, other))


def test_perturbations_that_do_not_fit_are_refused(tmp_path, monkeypatch):
    stores = stored("network", tmp_path, steps=2)
    monkeypatch.setattr("gradtrail.attribution.trajectory_run.free_bytes", lambda _: 100)
    with pytest.raises(ValueError, match="direction='query' must fit .* got 3 queries of 29 entr"):
        scored(stores)
    with pytest.raises(ValueError, match="got 8 training examples of 29 .* direction='query'"):
        scored(stores, direction="train")
