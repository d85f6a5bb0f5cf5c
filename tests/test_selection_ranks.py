"""Data selection on several ranks does what one process does on the joined batch."""

import pytest
import torch
from processes import Workers
from test_wrapped_capture import wrapped_once

SHARE = {"threshold_mode": "bottom_fraction", "threshold": 0.5}


@pytest.fixture(scope="module")
def workers():
    with Workers(3, "rank_selection") as pool:
        yield pool


def in_one_process(workers, known={}, **options):  # noqa: B006  # remembers what was run
    key = repr(sorted(options.items()))
    if key not in known:
        (known[key],) = workers.run("select", world=1, how="plain", **options)
    return known[key]


def assert_as_one(workers, how, per_block, world=2, **options):
    """Gradients, scores and decisions are those of one process; the decisions, what ranks did."""
    one = in_one_process(workers, **options)
    many = workers.run("select", world=world, how=how, per_block=per_block, **options)
    decisions = []
    for number, expected in enumerate(one):
        found = [rank[number] for rank in many]
        if isinstance(expected, dict):
            for rank in found:
                assert rank.keys() == expected.keys()
                for name, values in expected.items():
                    close(rank[name], values, name)
            continue
        scores, dropped = expected
        if isinstance(scores, dict):
            for name, values in scores.items():
                close(sum((rank[0][name] for rank in found), []), values, name)
                assert sum((rank[1][name] for rank in found), []) == dropped[name]
            decisions += [flag for values in dropped.values() for flag in values]
        else:
            close(sum((rank[0] for rank in found), []), scores, "scores")
            assert sum((rank[1] for rank in found), []) == dropped
            decisions += dropped
    assert any(decisions)
    return decisions, many


def close(got, expected, name):
    got, expected = torch.tensor(got).double(), torch.tensor(expected).double()
    scale = max(float(expected.abs().max()), 1e-3)
    assert float((got - expected).abs().max()) <= 1e-6 * scale, name


@wrapped_once
@pytest.mark.parametrize("target", ["batch", "validation"])
def test_joined_batch(workers, how, per_block, target):
    decisions, _ = assert_as_one(workers, how, per_block, target=target, **SHARE)
    assert not all(decisions)


@pytest.mark.slow
@pytest.mark.parametrize(
    "option", ["find_unused_parameters", "static_graph", "gradient_as_bucket_view"]
)
def test_options_of_ddp(workers, option):
    assert_as_one(workers, f"ddp-{option}", per_block=False, accumulate=False, **SHARE)


@wrapped_once
def test_layers_decide_on_their_own(workers, how, per_block):
    assert_as_one(workers, how, per_block, layer_wise=True, **SHARE)


@wrapped_once
def test_mean_of_the_kept(workers, how, per_block):
    assert_as_one(workers, how, per_block, renormalize=True, **SHARE)


@wrapped_once
@pytest.mark.parametrize("accumulate", [True, False])
def test_only_some_ranks_reject(workers, how, per_block, accumulate):
    """A threshold that one rank's examples pass and the other's do not."""
    options = {"target": "fixed", "threshold": -6.0, "accumulate": accumulate}
    _, many = assert_as_one(workers, how, per_block, **options)
    counts = [[sum(entry[1]) for entry in rank if isinstance(entry, list)] for rank in many]
    assert any(0 in pair and sum(pair) for pair in zip(*counts, strict=True))


@wrapped_once
def test_what_was_rejected_before_gradients_are_averaged(workers, how, per_block):
    """Only the first micro-batch of a step loses examples; FSDP hides its gradients till later."""
    options = {"target": "fixed", "threshold": -1e9, "seed": 2}
    one = in_one_process(workers, **options)
    first, second = (sorted(entry[0]) for entry in one[:2])
    assert first[0] < second[0]
    options["threshold"] = (first[0] + min(first[1], second[0])) / 2
    decisions, _ = assert_as_one(workers, how, per_block, **options)
    assert sum(decisions[:4]) == 1
    assert sum(decisions[4:8]) == 0


@wrapped_once
def test_nothing_is_left(workers, how, per_block):
    """Where every example of every rank is rejected, no rounding is left for the optimizer."""
    options = {"target": "batch", "threshold": 1e9}
    decisions, many = assert_as_one(workers, how, per_block, **options)
    assert all(decisions)
    for rank in many:
        grads = [entry for entry in rank if isinstance(entry, dict)]
        assert not any(value for grad in grads for values in grad.values() for value in values)


@pytest.mark.parametrize("how", ["ddp", "fsdp1", "fully_shard"])
def test_three_ranks_of_uneven_batches(workers, how):
    """A mean of means over uneven ranks is none over examples, but scores and decisions are."""
    options = {"target": "fixed", "accumulate": False, **SHARE}
    one = in_one_process(workers, **options)
    many = workers.run("select", world=3, how=how, **options)
    assert sum((rank[0][1] for rank in many), []) == one[0][1]
    close(sum((rank[0][0] for rank in many), []), one[0][0], "scores")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("plain", "Data selection in 2 processes must be given the model in its wrapper"),
        ("group", "must meet gradients averaged over all 2 processes, got averages over 1"),
        ("hook", "must be averaged by DistributedDataParallel itself, got a communication hook"),
        ("factor", r"got set_gradient_divide_factor(1.0)"),
    ],
)
def test_what_cannot_work_is_refused(workers, how, message):
    for found in workers.try_run("refused", how=how):
        assert message in found["error"]


@pytest.mark.parametrize("how", ["ddp", "fsdp1", "fully_shard"])
def test_validation_data_must_be_the_same(workers, how):
    for found in workers.try_run("other_validation_data", how=how):
        assert "The target gradient must be the same on every rank, got norms" in found["error"]


def test_a_gradient_that_is_not_its_examples_mean_is_refused_everywhere(workers):
    for found in workers.try_run("spoilt"):
        assert "The gradient of project.bias must be the sum of its examples'" in found["error"]
