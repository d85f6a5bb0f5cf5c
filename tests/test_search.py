"""``search``: the same rows as a full table of scores gives, from blocks of both stores."""

import math
import subprocess
import sys

import pytest
import torch

import gradtrail
from gradtrail.factors import DenseGradient, GradientBlock, LinearFactors, to_dense
from gradtrail.store import GradientStore

SHAPES = {"first": (3, 4), "second": (5, 2)}
BUDGET = 40 * 22 * 4  # bytes that some forty written-out queries of the stores below take


def dense_block(step, start, count, generator):
    layers = {
        name: DenseGradient(torch.randn(count, math.prod(shape), generator=generator), shape)
        for name, shape in SHAPES.items()
    }
    return GradientBlock(step, tuple(range(start, start + count)), layers)


def factored_block(step, start, count, generator):
    layers = {
        name: LinearFactors(
            torch.randn(count, 3, shape[1], generator=generator),
            torch.randn(count, 3, shape[0], generator=generator),
        )
        for name, shape in SHAPES.items()
    }
    return GradientBlock(step, tuple(range(start, start + count)), layers)


def filled(make, sizes, seed):
    store = GradientStore(residency="memory")
    store.define(id_scheme="index")
    generator, start = torch.Generator().manual_seed(seed), 0
    for step, size in enumerate(sizes):
        store.append(make(step, start, size, generator))
        start += size
    return store


def rows_of(store):
    """All gradients of a store, written out and joined over layers: ``[n, d]``, float64."""
    pieces = []
    for stored in store.blocks():
        layers = stored.block.layers
        pieces.append(torch.cat([to_dense(layers[name]).values_bd for name in SHAPES], 1))
    return torch.cat(pieces).double()


def best(table, k):
    values, indices = table.t().topk(min(k, table.shape[0]), dim=1)
    return values, indices


FORMS = {"dense": dense_block, "factored": factored_block}


@pytest.mark.parametrize("train_form", FORMS)
@pytest.mark.parametrize("query_form", FORMS)
@pytest.mark.parametrize("budget", [None, 1, BUDGET])
def test_best_rows_are_those_of_the_full_table(train_form, query_form, budget):
    with (
        filled(FORMS[train_form], (4, 1, 7, 30, 2), 0) as train,
        filled(FORMS[query_form], (3, 5, 1), 1) as query,
    ):
        found = gradtrail.search(train, query, 6, budget=budget, progress=False)
        values, indices = best(rows_of(train) @ rows_of(query).t(), 6)
    assert found.indices.tolist() == indices.tolist()
    torch.testing.assert_close(found.values, values.float(), rtol=1e-5, atol=1e-5)
    assert found.ids == indices.tolist()


@pytest.mark.parametrize("normalize", ["train", "both"])
def test_normalized_search_is_that_of_the_scores(normalize):
    with filled(dense_block, (8, 8), 2) as train, filled(dense_block, (3,), 3) as query:
        found = gradtrail.search(train, query, 4, normalize=normalize, progress=False)
        left, right = rows_of(train), rows_of(query)
    table = left @ right.t() / left.norm(dim=1, keepdim=True)
    if normalize == "both":
        table = table / right.norm(dim=1)
    values, indices = best(table, 4)
    assert found.indices.tolist() == indices.tolist()
    torch.testing.assert_close(found.values, values.float(), rtol=1e-5, atol=1e-6)


def test_steps_and_layers_are_chosen():
    with filled(dense_block, (4, 6, 5), 4) as train, filled(dense_block, (2,), 5) as query:
        found = gradtrail.search(
            train, query, 3, selected_steps=[0, 2], layers="second", progress=False
        )
        wide = math.prod(SHAPES["first"])
        left = rows_of(train)[[0, 1, 2, 3, 10, 11, 12, 13, 14], wide:]
        values, indices = best(left @ rows_of(query)[:, wide:].t(), 3)
        ids = [train.ids[row if row < 4 else row + 6] for row in indices.flatten().tolist()]
    assert found.indices.tolist() == indices.tolist()
    assert [name for line in found.ids for name in line] == ids
    torch.testing.assert_close(found.values, values.float(), rtol=1e-5, atol=1e-5)


def test_more_than_there_are_gives_all():
    with filled(dense_block, (3,), 6) as train, filled(dense_block, (2,), 7) as query:
        found = gradtrail.search(train, query, 10, progress=False)
    assert found.values.shape == (2, 3)
    assert sorted(found.ids[0]) == [0, 1, 2]


def test_no_query_gives_none():
    with filled(dense_block, (3,), 8) as train, filled(dense_block, (1,), 9) as query:
        query.discard(0)
        found = gradtrail.search(train, query, 2, progress=False)
    assert (found.values.numel(), found.indices.numel(), found.ids) == (0, 0, [])


@pytest.mark.parametrize("option", ["k", "budget"])
def test_counts_must_be_positive(option):
    options = {"k": 1, "budget": 1, option: 0}
    with (
        filled(dense_block, (1,), 10) as train,
        pytest.raises(ValueError, match=f"{option} must"),
    ):
        gradtrail.search(train, train, progress=False, **options)


def test_not_a_number_ranks_nowhere():
    with filled(dense_block, (5,), 11) as train, filled(dense_block, (1,), 12) as query:
        broken = dense_block(1, 5, 1, torch.Generator())
        broken.layers["first"].values_bd[0, 0] = torch.nan
        train.append(broken)
        with pytest.warns(gradtrail.GradTrailWarning, match="1 training examples"):
            found = gradtrail.search(train, query, 3, progress=False)
    assert 5 not in found.ids[0]
    assert torch.isfinite(found.values).all()


MEMORY = """
import resource, sys, torch
import gradtrail
from gradtrail.factors import DenseGradient, GradientBlock
from gradtrail.store import GradientStore

def fill(path, blocks, size):
    store = GradientStore(path, shard_bytes=8 << 20)
    store.define(id_scheme="index")
    for step in range(blocks):
        values = torch.randn(size, 128)
        ids = tuple(range(step * size, (step + 1) * size))
        store.append(GradientBlock(step, ids, {"layer": DenseGradient(values, (8, 16))}))
    store.close()
    return GradientStore(path, mode="read")

torch.set_num_threads(1)
train, query = fill(sys.argv[1], 150, 400), fill(sys.argv[2], 10, 200)
gradtrail.search(train, query, 10, selected_steps=[0], progress=False)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
found = gradtrail.search(train, query, 10, progress=False)
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(tuple(found.values.shape), (after - before) / 1024)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_table(tmp_path):
    """A table of 60,000 x 2,000 scores would take 458 MiB in float32."""
    run = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path / "train"), str(tmp_path / "query")],
        capture_output=True,
        text=True,
        check=True,
    )
    shape, _, grown = run.stdout.strip().rpartition(" ")
    assert shape == "(2000, 10)"
    assert float(grown) < 100
