"""``GradientStore`` and ``StepStore``: what goes in comes out, and what they tell about it."""

import contextlib
import copy
import dataclasses
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
import zlib
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load
from storing import (
    FACTS,
    KINDS,
    Child,
    attempt,
    block_of_all,
    cut,
    drop_capabilities,
    gradient,
    in_child,
    large_block,
    meta_of,
    one_arena,
    open_store,
    same_block,
    same_content,
    same_layer,
    same_tensor,
    shards,
    small_block,
    status_bytes,
    step_tensors,
    tensors_of,
    values,
    write_steps,
    write_store,
)
from torch import nn

import gradtrail
from gradtrail import GradientStore, StoreError
from gradtrail.factors import (
    DenseGradient,
    EmbeddingFactors,
    GradientBlock,
    LinearFactors,
    SumGradient,
    to_dense,
)
from gradtrail.store import BackgroundWriter, StepStore, records_digest

RESIDENCIES = ["disk", "memory", "tiered"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def files(folder):
    return sorted(path.relative_to(folder).as_posix() for path in Path(folder).rglob("*"))


def one_layer(step, layer, *, ids=None, name="layer"):
    return GradientBlock(
        step, tuple(range(layer.num_examples)) if ids is None else ids, {name: layer}
    )


# ---------------------------------------------------------------- what goes in comes out


@pytest.mark.parametrize("into", [None, *DTYPES[:3]], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("residency", RESIDENCIES)
def test_every_kind_round_trips_to_the_bit(residency, dtype, into, tmp_path):
    blocks = [block_of_all(step, b=2 + step, s=3 - step, dtype=dtype) for step in range(3)]
    expected = copy.deepcopy(blocks)
    metas = [meta_of(step) for step in range(3)]
    with open_store(tmp_path / "a", residency, dtype=into, shard_bytes=3000) as store:
        store.define(**FACTS)
        for block, meta in zip(blocks, metas, strict=True):
            store.append(block, meta=meta)
        same_content(store, expected, metas=metas, dtype=into)
        store.flush()
        same_content(store, expected, metas=metas, dtype=into)
        store.verify()
    if residency != "memory":
        with GradientStore(str(tmp_path / "a"), mode="read") as store:
            same_content(store, expected, metas=metas, dtype=into)
            store.verify()
            assert store.dtype == into
            assert store.facts.id_scheme == "index"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("residency", RESIDENCIES)
def test_a_layer_of_its_own_round_trips(residency, kind, tmp_path):
    blocks = [one_layer(step, gradient(kind, b=1 + step, seed=step)) for step in range(3)]
    with open_store(tmp_path / "a", residency, shard_bytes=64) as store:
        store.define(**FACTS)
        for block in blocks:
            store.append(block)
        same_content(store, blocks)
        for stored in store.blocks(layers=["layer"], prefetch=False):
            same_layer(stored.block.layers["layer"], blocks[stored.block.step].layers["layer"])


def mapped_block(step):
    """A block with tensors that are mapped, one of them shared, and one that is read."""
    inputs = values(2, 64, 256, seed=step)
    layers = {
        "q": LinearFactors(inputs, values(2, 64, 200, seed=step + 1)),
        "k": LinearFactors(inputs, values(2, 64, 150, seed=step + 2), True),
        "dense": DenseGradient(values(2, 20_000, seed=step + 3), (100, 200)),
        "norm": gradient("scale", seed=step),
    }
    return GradientBlock(step, (2 * step, 2 * step + 1), layers)


LARGE = {"b": 40, "s": 300}  # so large that tensors are mapped, not read


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("residency", RESIDENCIES)
def test_large_layers_round_trip_and_can_be_cut(residency, kind, tmp_path):
    wide = {"dense": 4000}.get(kind.split()[0])
    blocks = []
    for step in range(3):
        layer = gradient(kind, **LARGE, seed=step)
        if wide is not None:
            layer = DenseGradient(
                values(40, wide + 2 * ("bias" in kind), seed=step), (2, wide // 2), "bias" in kind
            )
        blocks.append(one_layer(step, layer, ids=tuple(range(40 * step, 40 * step + 40))))
    with open_store(
        tmp_path / "a", residency, budget=300_000 if residency == "tiered" else None
    ) as store:
        store.define(**FACTS)
        for block in blocks:
            store.append(block)
        check_large(store, blocks)
    if residency != "memory":
        with GradientStore(tmp_path / "a", mode="read") as store:
            check_large(store, blocks)


def check_large(store, blocks):
    same_content(store, blocks)
    same_content(store, blocks)
    for rows in ([45], [41, 42, 43], [40, 79], list(range(40, 80))):
        (stored,) = store.blocks(rows=rows)
        inside = [row - 40 for row in rows]
        same_layer(stored.block.layers["layer"], cut(blocks[1].layers["layer"], inside))
        same_layer(store.get(rows).layers["layer"], cut(blocks[1].layers["layer"], inside))


LAYOUTS = {
    "transposed": lambda: values(4, 3, 2).transpose(0, 2),
    "expanded": lambda: values(1, 3, 4).expand(2, 3, 4),
    "expanded positions": lambda: values(2, 1, 4).expand(2, 3, 4),
    "part of a whole": lambda: values(9, 3, 4)[5:7],
    "every second": lambda: values(4, 3, 8)[::2, :, ::2],
    "with a graph": lambda: values(2, 3, 4).requires_grad_() * 2,
    "parameter": lambda: nn.Parameter(values(2, 3, 4)),
    "not numbers": lambda: torch.tensor([float("nan"), float("inf"), -0.0, 1e-45]).expand(2, 3, 4),
    "last two exchanged": lambda: values(2, 4, 3).transpose(1, 2),
    "no positions": lambda: values(2, 0, 4),
    "no examples": lambda: values(0, 3, 4),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("residency", RESIDENCIES)
def test_every_layout_round_trips(residency, layout, tmp_path):
    activation = LAYOUTS[layout]()
    b, s, _ = activation.shape
    block = one_layer(0, LinearFactors(activation, values(b, s, 3, seed=1), True))
    expected = one_layer(
        0, LinearFactors(activation.detach().clone(), values(b, s, 3, seed=1), True)
    )
    with open_store(tmp_path / "a", residency) as store:
        store.define(**FACTS)
        store.append(block)
        same_content(store, [expected])
        got = next(iter(store.blocks())).block.layers["layer"].activation_bsi
        assert not got.requires_grad
        assert not got.is_inference()
    if residency == "disk":
        with GradientStore(tmp_path / "a", mode="read") as store:
            same_content(store, [expected])


@pytest.mark.parametrize("residency", RESIDENCIES)
def test_tensors_of_inference_mode_round_trip(residency, tmp_path):
    with torch.inference_mode(), open_store(tmp_path / "a", residency) as store:
        store.define(**FACTS)
        store.append(small_block(0))
        same_content(store, [small_block(0)])
        got = store.get([0, 1])
    assert not any(tensor.is_inference() for tensor in tensors_of(got))


NAMES = [
    "",
    "a.b",
    "a",
    "a.0",
    "a.0.activation_bsi",
    "__metadata__",
    "a/b",
    "../c",
    "é\n",
    '"',
    "0",
]


@pytest.mark.parametrize("residency", RESIDENCIES)
def test_any_layer_name_is_fine(residency, tmp_path):
    layers = {
        name: SumGradient((gradient("linear", seed=n), gradient("dense", seed=n + 50)))
        for n, name in enumerate(NAMES)
    }
    layers["b.c"], layers["b"] = gradient("dense"), gradient("dense", seed=1)
    block = GradientBlock(0, (0, 1), layers)
    with open_store(tmp_path / "a", residency) as store:
        store.define(**FACTS)
        store.append(block)
        same_content(store, [block])
        assert list(store.layers) == list(layers)
    assert (
        files(tmp_path) == []
        if residency == "memory"
        else all(name == "a" or name.startswith("a/") for name in files(tmp_path))
    )


@pytest.mark.parametrize("residency", RESIDENCIES)
def test_names_that_are_made_of_names_do_not_collide(residency, tmp_path):
    """Parts of a sum, roles of a tensor and turned tensors add to a layer's name in the files."""
    turned = LinearFactors(values(2, 4, 3).transpose(1, 2), values(2, 3, 3), True)
    layers = {
        "x": gradient("sum of two calls"),
        "x/0": gradient("linear", seed=1),
        "x/1/a": gradient("dense", seed=2),
        "y": turned,
        "y/a": gradient("sum of two calls", seed=4),
        "y/a/t": gradient("dense", seed=5),
        "y/a/0": gradient("linear", seed=6),
        "0": gradient("dense", seed=7),
        "0:pad": gradient("dense", seed=8),
        "0/x": gradient("linear", seed=9),
        "values": gradient("dense", seed=10),
    }
    mode = "create" if residency == "memory" else "overwrite"
    for order in (list(layers), list(layers)[::-1]):
        ordered = {name: layers[name] for name in order}
        blocks = [GradientBlock(step, (2 * step, 2 * step + 1), ordered) for step in range(2)]
        with open_store(tmp_path / "a", residency, mode=mode) as store:
            store.define(**FACTS)
            for block in blocks:
                store.append(block)
            store.flush()
            same_content(store, blocks)


IDS = ["", "7", "a\nb", "é", "e\u0301", "\u2028", "\x00", "x" * 300, '"', "\U0001f600"]


@pytest.mark.parametrize("residency", RESIDENCIES)
def test_ids_keep_their_kind_and_their_text(residency, tmp_path):
    ids = (*IDS, 7, 0, -3, 2**62, 2**70)
    block = one_layer(0, gradient("dense", b=len(ids)), ids=ids)
    with open_store(tmp_path / "a", residency) as store:
        store.define(**{**FACTS, "id_scheme": "key:name"})
        store.append(block)
        store.flush()
        same_content(store, [block])
        assert store.find(id="7") == (1,)
        assert store.find(id=7) == (len(IDS),)
        assert store.find(id=2**70) == (len(ids) - 1,)
    if residency == "disk":
        with GradientStore(tmp_path / "a", mode="read") as store:
            same_content(store, [block])
            assert store.find(id=7) == (len(IDS),)


@pytest.mark.parametrize("residency", RESIDENCIES)
def test_the_source_may_change_after_append(residency, tmp_path):
    """A disk store keeps nothing of the caller's; one in memory gives the old values or refuses."""
    block, expected = small_block(0), small_block(0)
    with open_store(tmp_path / "a", residency) as store:
        store.define(**FACTS)
        store.append(block)
        for tensor in tensors_of(block):
            tensor.zero_()
        if residency == "disk":
            same_content(store, [expected])
        else:
            got, error = attempt(store.get, [0, 1], refused=RuntimeError)
            assert error is None or "written" in str(error)
            if error is None:
                same_content(store, [expected])
    if residency != "memory":
        with GradientStore(tmp_path / "a", mode="read") as store:
            same_content(store, [expected])


def test_a_disk_store_keeps_no_tensor_of_the_caller(tmp_path):
    gc.disable()
    try:
        with GradientStore(tmp_path / "a") as store:
            store.define(**FACTS)
            block = block_of_all(0)
            held = [weakref.ref(tensor) for tensor in tensors_of(block)]
            store.append(block)
            del block
            assert [ref() for ref in held] == [None] * len(held)
    finally:
        gc.enable()


def test_memory_shares_storage_with_what_came_and_not_with_its_whole():
    whole = values(1000, 5, 4)
    alone, part = values(2, 3, 4), whole[3:5, :3]
    layers = {
        "alone": LinearFactors(alone, values(2, 3, 3)),
        "part": LinearFactors(part, values(2, 3, 3)),
    }
    with GradientStore(residency="memory") as store:
        store.define(**FACTS)
        store.append(GradientBlock(0, (0, 1), layers))
        got = next(iter(store.blocks())).block.layers
        assert got["alone"].activation_bsi.data_ptr() == alone.data_ptr()
        assert got["part"].activation_bsi.untyped_storage().nbytes() <= 4 * part.numel()
        same_tensor(got["part"].activation_bsi, part)


# ---------------------------------------------------------------- inputs that layers share


def shared_block(step, sharing):
    inputs = values(2, 3, 64, seed=step)
    second = {
        "the same tensor": lambda: inputs,
        "a view of it": lambda: inputs.view(2, 3, 64),
        "equal numbers": lambda: inputs.clone(),
        "another shape": lambda: inputs.view(2, 6, 32)[:, :3],
        "in another order": lambda: inputs.view(2, 64, 3).transpose(1, 2),
        "another part": lambda: torch.cat([inputs, inputs], 1)[:, 3:],
    }[sharing]()
    layers = {
        "q": LinearFactors(inputs, values(2, 3, 4, seed=step + 1)),
        "k": LinearFactors(second, values(2, 3, 5, seed=step + 2), True),
        "tied": SumGradient(
            (LinearFactors(inputs, values(2, 3, 4, seed=9)), LinearFactors(second, values(2, 3, 4)))
        ),
    }
    return GradientBlock(step, (2 * step, 2 * step + 1), layers)


@pytest.mark.parametrize("sharing", ["the same tensor", "a view of it"])
@pytest.mark.parametrize("residency", RESIDENCIES)
def test_a_shared_input_is_stored_once_and_comes_as_one(residency, sharing, tmp_path):
    blocks = [shared_block(step, sharing) for step in range(2)]
    one = 4 * 2 * 3 * (64 + 4 + 5 + 4 + 4)
    with open_store(tmp_path / "a", residency, budget=None) as store:
        store.define(**FACTS)
        for block in blocks:
            store.append(block)
        same_content(store, blocks)
        assert store.nbytes == 2 * one
        assert store.records[0].num_bytes == one
    if residency != "memory":
        with GradientStore(tmp_path / "a", mode="read") as store:
            same_content(store, blocks)
            assert store.nbytes == 2 * one
            for stored in store.blocks():
                layers = stored.block.layers
                q, k = layers["q"], layers["k"]
                assert q.activation_bsi.data_ptr() == k.activation_bsi.data_ptr()
                first = layers["tied"].parts[0].activation_bsi
                assert first.data_ptr() == q.activation_bsi.data_ptr()
        assert sum(path.stat().st_size for path in shards(tmp_path / "a")) < 2 * one + 3000


@pytest.mark.parametrize(
    "sharing", ["equal numbers", "another shape", "another part", "in another order"]
)
def test_what_only_looks_shared_is_stored_by_itself(sharing, tmp_path):
    write_store(tmp_path / "a", [shared_block(0, sharing)])
    with GradientStore(tmp_path / "a", mode="read") as store:
        same_content(store, [shared_block(0, sharing)])


def test_sharing_survives_the_cast(tmp_path):
    block = shared_block(0, "the same tensor")
    write_store(tmp_path / "a", [block], dtype="bfloat16")
    with GradientStore(tmp_path / "a", mode="read") as store:
        same_content(store, [block], dtype=torch.bfloat16)
        assert store.nbytes == 2 * 2 * 3 * (64 + 4 + 5 + 4 + 4)


def test_a_sliced_shared_input_stays_one(tmp_path):
    write_store(tmp_path / "a", [shared_block(0, "the same tensor")])
    with GradientStore(tmp_path / "a", mode="read") as store:
        (stored,) = store.blocks(rows=[1])
        layers = stored.block.layers
        q, k = layers["q"].activation_bsi, layers["k"].activation_bsi
        assert q.data_ptr() == k.data_ptr()


# ---------------------------------------------------------------- dtypes


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_a_dtype_may_be_named(name, tmp_path):
    write_store(tmp_path / "a", [small_block(0)], dtype=name)
    write_store(tmp_path / "b", [small_block(0)], dtype=getattr(torch, name))
    for folder in (tmp_path / "a", tmp_path / "b"):
        with GradientStore(folder, mode="read") as store:
            assert store.dtype == getattr(torch, name)
            same_content(store, [small_block(0)], dtype=getattr(torch, name))


@pytest.mark.parametrize("dtype", ["float64", "int8", "half", torch.int32, 3, "nonsense"], ids=str)
def test_another_dtype_is_refused(dtype, tmp_path):
    with pytest.raises((ValueError, TypeError), match="dtype must be"):
        GradientStore(tmp_path / "a", dtype=dtype)
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("residency", RESIDENCIES)
def test_an_overflow_of_float16_names_its_layer(residency, tmp_path):
    layer = LinearFactors(values(2, 3, 4), torch.full((2, 3, 3), 1e5))
    with open_store(tmp_path / "a", residency, dtype="float16") as store:
        store.define(**FACTS)
        store.append(small_block(0))
        bad = GradientBlock(1, (2, 3), {"first": small_block(1).layers["first"], "h.mlp": layer})
        with pytest.raises(
            (ValueError, OverflowError, RuntimeError), match=r"h\.mlp.*(bfloat16|float32)"
        ):
            store.append(bad)
        same_content(store, [small_block(0)], dtype=torch.float16)
        store.append(small_block(1))
        same_content(store, [small_block(0), small_block(1)], dtype=torch.float16)
    if residency != "memory":
        with GradientStore(tmp_path / "a", mode="read") as store:
            same_content(store, [small_block(0), small_block(1)], dtype=torch.float16)


# ---------------------------------------------------------------- looking up


BY_KEY = {**FACTS, "id_scheme": "key:uid"}


@pytest.fixture
def looked_up(tmp_path):
    """Steps 2, 4 (twice), 9; ids that occur several times."""
    blocks = [
        small_block(2, b=3, first_id=0),
        small_block(4, b=2, first_id=1),
        small_block(4, b=1, first_id=0),
        small_block(9, b=2, first_id=2),
    ]
    metas = [{"n": n} for n in range(4)]
    write_store(tmp_path / "a", blocks, metas=metas, facts=BY_KEY, shard_bytes=300)
    with GradientStore(tmp_path / "a", mode="read") as store:
        yield store, blocks


def test_records_ids_and_steps_in_store_order(looked_up):
    store, blocks = looked_up
    assert store.ids == (0, 1, 2, 1, 2, 0, 2, 3)
    assert store.steps == (2, 2, 2, 4, 4, 4, 9, 9)
    assert len(store) == 8
    assert isinstance(store.records, tuple)
    assert [record.step for record in store.records] == [2, 4, 4, 9]
    assert [record.ids for record in store.records] == [block.ids for block in blocks]
    assert [record.number for record in store.records] == [0, 3, 5, 6]
    assert [record.meta for record in store.records] == [{"n": n} for n in range(4)]
    sizes = [sum(tensor.nbytes for tensor in tensors_of(block)) for block in blocks]
    assert [record.num_bytes for record in store.records] == sizes
    assert store.nbytes == sum(sizes)
    on_disk = sum(path.stat().st_size for path in Path(store.path).iterdir())
    assert sum(path.stat().st_size for path in shards(store.path)) <= store.disk_bytes <= on_disk


def test_find(looked_up):
    store, _ = looked_up
    assert store.find(id=2) == (2, 4, 6)
    assert store.find(step=4) == (3, 4, 5)
    assert store.find(id=2, step=4) == (4,)
    assert store.find(id=0, step=4) == (5,)
    assert store.find(id=77) == ()
    with pytest.raises(TypeError, match="id must be int, .* got '2'"):
        store.find(id="2")
    assert store.find(step=3) == ()
    assert store.find(id=3, step=2) == ()


def test_find_nothing_asked_for(looked_up):
    with pytest.raises((ValueError, TypeError), match="id"):
        looked_up[0].find()


@pytest.mark.parametrize("prefetch", [True, False])
def test_blocks_of_some_steps(looked_up, prefetch):
    store, blocks = looked_up
    got = list(store.blocks(steps=[9, 4], prefetch=prefetch))
    assert [stored.row for stored in got] == [3, 5, 6]
    for stored, block in zip(got, blocks[1:], strict=True):
        same_block(stored.block, block)
    assert list(store.blocks(steps=[])) == []


def test_blocks_of_some_layers(looked_up):
    store, blocks = looked_up
    for stored, block in zip(store.blocks(layers=["second"]), blocks, strict=True):
        assert list(stored.block.layers) == ["second"]
        same_layer(stored.block.layers["second"], block.layers["second"])
        with pytest.raises(KeyError):
            stored.block.layers["first"]


def test_an_unknown_step_or_layer_is_named(looked_up):
    store, _ = looked_up
    with pytest.raises((ValueError, KeyError), match=r"(?s)3.*(2|4)"):
        list(store.blocks(steps=[2, 3]))
    with pytest.raises((ValueError, KeyError), match="(?s)second_.*second"):
        list(store.blocks(layers=["first", "second_"]))


def test_an_error_of_blocks_comes_at_once(looked_up):
    """Not only when the first block is asked for, which may be far away."""
    with pytest.raises((ValueError, KeyError)):
        looked_up[0].blocks(steps=[3])


@pytest.mark.parametrize("rows", [[0], [2, 3], [1, 4, 5, 7], list(range(8)), []], ids=str)
@pytest.mark.parametrize("prefetch", [True, False])
def test_blocks_of_some_rows(looked_up, rows, prefetch):
    store, blocks = looked_up
    got, at = list(store.blocks(rows=rows, prefetch=prefetch)), 0
    starts = [0, 3, 5, 6]
    for start, block in zip(starts, blocks, strict=True):
        inside = [row - start for row in rows if start <= row < start + len(block.ids)]
        if not inside:
            continue
        stored, at = got[at], at + 1
        layers = {name: cut(layer, inside) for name, layer in block.layers.items()}
        same_block(
            stored.block,
            GradientBlock(block.step, tuple(block.ids[row] for row in inside), layers),
        )
        assert stored.row == start + inside[0]
    assert at == len(got)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_can_be_cut(kind, tmp_path):
    block = one_layer(0, gradient(kind, b=4))
    write_store(tmp_path / "a", [block])
    with GradientStore(tmp_path / "a", mode="read") as store:
        (stored,) = store.blocks(rows=[1, 3])
        same_layer(stored.block.layers["layer"], cut(block.layers["layer"], [1, 3]))
        same_layer(store.get([2]).layers["layer"], cut(block.layers["layer"], [2]))


def test_rows_and_steps_together(looked_up):
    store, _ = looked_up
    got = [stored.block.ids for stored in store.blocks(rows=[1, 4, 6], steps=[4, 9])]
    assert got == [(2,), (2,)]


@pytest.mark.parametrize("rows", [[8], [-1], [0, 100]], ids=str)
def test_a_row_outside_is_refused(looked_up, rows):
    store, _ = looked_up
    with pytest.raises((IndexError, ValueError), match=str(rows[-1])):
        list(store.blocks(rows=rows))
    with pytest.raises((IndexError, ValueError), match=str(rows[-1])):
        store.get(rows)


@pytest.mark.parametrize("rows", [[3, 1], [2, 2]], ids=str)
def test_rows_of_blocks_ascend(looked_up, rows):
    with pytest.raises(ValueError, match="rows must"):
        list(looked_up[0].blocks(rows=rows))


def test_get(looked_up):
    store, blocks = looked_up
    got = store.get([3, 4, 5])
    assert got.ids == (1, 2, 0)
    for name in ("first", "second"):
        expected = torch.cat([to_dense(block.layers[name]).values_bd for block in blocks[1:3]])
        found = to_dense(got.layers[name]).values_bd
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    same_block(store.get([0, 1, 2]), blocks[0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("residency", RESIDENCIES)
def test_get_joins_blocks_of_different_lengths(residency, kind, tmp_path):
    """Positions that an example has not are worth nothing."""
    blocks = [
        one_layer(
            step, gradient(kind, b=2, s=2 + step, seed=9 * step), ids=(2 * step, 2 * step + 1)
        )
        for step in range(3)
    ]
    rows = [0, 1, 3, 4]
    with open_store(tmp_path / "a", residency) as store:
        store.define(**FACTS)
        for block in blocks:
            store.append(block)
        got = store.get(rows)
        assert got.ids == tuple(rows)
        expected = torch.cat([to_dense(block.layers["layer"]).values_bd for block in blocks])
        found = to_dense(got.layers["layer"]).values_bd
        torch.testing.assert_close(found, expected[rows], rtol=1e-6, atol=1e-6)


def test_layers_lists_what_came(tmp_path):
    layers = {
        "conv": DenseGradient(values(2, 27), (3, 2, 2, 2), True),
        "fc": LinearFactors(values(2, 3, 4), values(2, 3, 6), True, 2),
        "wte": EmbeddingFactors(torch.zeros(2, 3, dtype=torch.long), values(2, 3, 5), 9),
        "norm": gradient("scale with bias"),
    }
    early = GradientBlock(0, (0, 1), {"fc": layers["fc"]})
    write_store(tmp_path / "a", [early, GradientBlock(1, (2, 3), layers)])
    with GradientStore(tmp_path / "a", mode="read") as store:
        assert list(store.layers) == ["fc", "conv", "wte", "norm"]
        assert store.layers["conv"].shape == (3, 2, 2, 2)
        assert store.layers["conv"].has_bias
        assert store.layers["fc"].has_bias
        assert store.layers["fc"].groups == 2
        assert store.layers["fc"].shape == (6, 2)
        assert store.layers["wte"].shape == (9, 5)
        assert not store.layers["wte"].has_bias
        assert store.layers["norm"].shape == (5,)
        assert store.layers["norm"].has_bias


SIDES = {
    "linear": (3, 4),
    "linear in groups": (6, 4),
    "bias alone": (3, 0),
    "embedding": None,
    "scale": None,
    "dense": None,
    "sum of two calls": (3, 4),
    "sum over tied modules": None,
}


@pytest.mark.parametrize("kind", SIDES)
def test_sides_of_the_factors(kind, tmp_path):
    write_store(tmp_path / "a", [one_layer(0, gradient(kind))])
    with GradientStore(tmp_path / "a", mode="read") as store:
        assert store.layers["layer"].sides == SIDES[kind]


@pytest.mark.parametrize("residency", RESIDENCIES)
def test_the_layers_of_a_store_grow(residency, tmp_path):
    blocks = [small_block(0), block_of_all(1)]
    with open_store(tmp_path / "a", residency) as store:
        store.define(**FACTS)
        assert dict(store.layers) == {}
        store.append(blocks[0])
        assert list(store.layers) == ["first", "second"]
        store.append(blocks[1])
        assert list(store.layers) == ["first", "second", *blocks[1].layers]
        kept = dict(store.layers)
    if residency != "memory":
        with GradientStore(tmp_path / "a", mode="read") as store:
            assert dict(store.layers) == kept


def test_a_layer_that_some_blocks_lack(tmp_path):
    blocks = [small_block(0), one_layer(1, gradient("dense"), name="late", ids=(2, 3))]
    write_store(tmp_path / "a", blocks)
    with GradientStore(tmp_path / "a", mode="read") as store:
        got = [list(stored.block.layers) for stored in store.blocks(layers=["late"])]
        assert got in ([[], ["late"]], [["late"]])
        same_content(store, blocks)


@pytest.mark.parametrize("residency", RESIDENCIES)
def test_an_empty_store(residency, tmp_path):
    with open_store(tmp_path / "a", residency) as store:
        store.define(**FACTS)
        assert len(store) == 0
        assert store.ids == store.steps == store.records == ()
        assert list(store.blocks()) == []
        assert store.nbytes == 0
        store.verify()
    if residency == "disk":
        with GradientStore(tmp_path / "a", mode="read") as store:
            assert len(store) == 0
            assert list(store.blocks()) == []
            store.verify()


# ---------------------------------------------------------------- facts


def test_facts(tmp_path):
    facts = {**FACTS, "projection": {"kind": "gaussian", "dim": 8, "seed": 3}}
    write_store(tmp_path / "a", [small_block(0)], facts=facts)
    with GradientStore(tmp_path / "a", mode="read") as store:
        found = {name: getattr(store.facts, name) for name in facts}
        assert found == facts
        with pytest.raises(dataclasses.FrozenInstanceError):
            store.facts.loss = "other"


def test_facts_are_none_before_define(tmp_path):
    with GradientStore(tmp_path / "a") as store:
        assert store.facts is None
        with pytest.raises(RuntimeError, match="define"):
            store.append(small_block(0))
        store.define(**FACTS)
        assert store.facts.recording == "per_example"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("id_scheme", "nonsense"),
        ("id_scheme", "key:"),
        ("recording", "per_token"),
        ("capture", "half"),
        ("extra", {"a": 1}),
        ("projection", {"dim": 3}),
        ("loss", 7),
    ],
)
def test_a_fact_of_another_kind_is_refused(name, value, tmp_path):
    with GradientStore(tmp_path / "a") as store, pytest.raises((ValueError, TypeError), match=name):
        store.define(**{**FACTS, name: value})


def test_an_unknown_fact_is_refused(tmp_path):
    with GradientStore(tmp_path / "a") as store, pytest.raises(TypeError, match="colour"):
        store.define(**FACTS, colour="red")


OTHER = {
    "id_scheme": "key:uid",
    "recording": "per_block",
    "capture": "materialized",
    "projection": {"kind": "gaussian", "dim": 8, "seed": 3},
    "loss_reduction": "mean",
    "loss": None,
    "checkpoint_digest": "other",
    "data_digest": None,
    "extra": {"optimizer": "sgd"},
}


@pytest.mark.parametrize("name", OTHER)
def test_a_resume_with_another_fact_names_it_and_both_values(name, tmp_path):
    folder = write_store(tmp_path / "a", [small_block(0)])
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with (
        GradientStore(folder, mode="resume") as store,
        pytest.raises(StoreError, match=name) as info,
    ):
        store.define(**{**FACTS, name: OTHER[name]})
    for value in (FACTS[name], OTHER[name]):
        words = json.loads(json.dumps(value))
        inside = words.values() if isinstance(words, dict) else [words]
        assert all(str(word) in str(info.value) for word in inside)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_a_resume_with_another_dtype_names_both(tmp_path):
    folder = write_store(tmp_path / "a", [small_block(0)], dtype="float16")
    with (
        pytest.raises(StoreError, match="(?s)dtype.*(float16.*float32|float32.*float16)"),
        GradientStore(folder, mode="resume", dtype="float32") as store,
    ):
        store.define(**FACTS)


def test_defining_again_the_same_is_fine_and_another_is_not(tmp_path):
    with GradientStore(tmp_path / "a") as store:
        store.define(**FACTS)
        store.append(small_block(0))
        with pytest.raises(StoreError, match="(?s)loss.*other"):
            store.define(**{**FACTS, "loss": "other"})
        store.append(small_block(1))
        assert store.facts.loss == FACTS["loss"]


@pytest.mark.parametrize(
    ("scheme", "ids"), [("index", ("a", "b")), ("index", (True, False)), ("content", (1, 2))]
)
def test_ids_of_another_scheme_are_refused(scheme, ids, tmp_path):
    with GradientStore(tmp_path / "a") as store:
        store.define(**{**FACTS, "id_scheme": scheme})
        with pytest.raises((ValueError, TypeError), match="id"):
            store.append(one_layer(0, gradient("dense"), ids=ids))
        assert len(store) == 0


# ---------------------------------------------------------------- blocks that make no sense


def test_a_block_whose_ids_do_not_fit_its_layers(tmp_path):
    with GradientStore(tmp_path / "a") as store:
        store.define(**FACTS)
        with pytest.raises(ValueError, match="layer"):
            store.append(one_layer(0, gradient("dense", b=2), ids=(0, 1, 2)))
        assert len(store) == 0
        store.append(small_block(0))
    with GradientStore(tmp_path / "a", mode="read") as store:
        same_content(store, [small_block(0)])


@pytest.mark.parametrize(
    "meta",
    [{"a": torch.zeros(2)}, {"a": {1, 2}}, {"a": object}, {("x",): 2}],
    ids=range(4),
)
def test_meta_that_is_no_json_is_refused(meta, tmp_path):
    with GradientStore(tmp_path / "a") as store:
        store.define(**FACTS)
        with pytest.raises((TypeError, ValueError), match="meta"):
            store.append(small_block(0), meta=meta)
        assert len(store) == 0
        store.append(small_block(0), meta={"a": 1})
    with GradientStore(tmp_path / "a", mode="read") as store:
        same_content(store, [small_block(0)], metas=[{"a": 1}])


def test_meta_is_a_copy():
    with GradientStore(residency="memory") as store:
        store.define(**FACTS)
        meta = {"lengths": [1, 2]}
        store.append(small_block(0), meta=meta)
        meta["lengths"].append(3)
        assert store.records[0].meta == {"lengths": [1, 2]}


@pytest.mark.parametrize("step", [1.5, "1", True], ids=str)
def test_a_step_is_a_whole_number(step, tmp_path):
    with GradientStore(tmp_path / "a") as store:
        store.define(**FACTS)
        with pytest.raises((TypeError, ValueError), match="step"):
            store.append(one_layer(step, gradient("dense")))
        assert len(store) == 0


# ---------------------------------------------------------------- taking steps back


@pytest.mark.parametrize("residency", RESIDENCIES)
@pytest.mark.parametrize("flushed", [True, False])
def test_a_discarded_step_is_gone(residency, flushed, tmp_path):
    blocks = [small_block(step) for step in range(4)] + [small_block(1, first_id=20)]
    with open_store(tmp_path / "a", residency, shard_bytes=10**6) as store:
        store.define(**FACTS)
        for block in blocks:
            store.append(block)
        if flushed:
            store.flush()
        store.discard(1)
        kept = [blocks[0], blocks[2], blocks[3]]
        same_content(store, kept)
        assert store.find(step=1) == ()
        assert store.find(id=20) == ()
        assert [record.number for record in store.records] == [0, 2, 4]
        same_block(store.get([2, 3]), blocks[2])
        store.flush()
        same_content(store, kept)
        store.verify()
    if residency != "memory":
        with GradientStore(tmp_path / "a", mode="read") as store:
            same_content(store, kept)
            with pytest.raises((ValueError, KeyError), match="1"):
                list(store.blocks(steps=[1]))


def test_a_step_store_discards_and_takes_a_step_again(tmp_path):
    folder = write_steps(tmp_path / "a", range(4))
    with StepStore(folder, mode="resume", shard_bytes=200) as store:
        store.define(optimizer="adamw")
        store.discard(1)
        store.discard(3)
        assert tuple(store.steps) == (0, 2)
        with pytest.raises((KeyError, ValueError), match="1"):
            store.read(1)
        store.append(1, step_tensors(8), {"lr": 1.0})
        assert tuple(store.steps) == (0, 1, 2)
    with StepStore(folder, mode="read") as store:
        assert tuple(store.steps) == (0, 1, 2)
        same_tensors(store.read(1), step_tensors(8))
        assert store.values(1) == {"lr": 1.0}
        assert [step for step, _, _ in store.iterate(reverse=True)] == [2, 1, 0]


@pytest.mark.parametrize("residency", RESIDENCIES)
@pytest.mark.parametrize("flushed", [True, False])
def test_a_step_comes_again_after_it_was_discarded(residency, flushed, tmp_path):
    """As where a training goes on from an older checkpoint."""
    again = small_block(1, b=3, first_id=30)
    with open_store(tmp_path / "a", residency, shard_bytes=10**6) as store:
        store.define(**BY_KEY)
        store.append(small_block(0))
        store.append(small_block(1))
        if flushed:
            store.flush()
        store.discard(1)
        store.append(again)
        same_content(store, [small_block(0), again])
        store.flush()
        same_content(store, [small_block(0), again])
    if residency != "memory":
        with GradientStore(tmp_path / "a", mode="resume") as store:
            store.define(**BY_KEY)
            same_content(store, [small_block(0), again])
            store.append(small_block(2))
        with GradientStore(tmp_path / "a", mode="read") as store:
            same_content(store, [small_block(0), again, small_block(2)])


def test_a_discard_survives_a_close_without_further_blocks(tmp_path):
    write_store(tmp_path / "a", [small_block(0), small_block(1)])
    with GradientStore(tmp_path / "a", mode="resume") as store:
        store.define(**FACTS)
        store.discard(0)
    with GradientStore(tmp_path / "a", mode="read") as store:
        same_content(store, [small_block(1)])


def test_discarding_an_unknown_step(tmp_path):
    write_store(tmp_path / "a", [small_block(0)])
    with GradientStore(tmp_path / "a", mode="resume") as store:
        store.define(**FACTS)
        _, error = attempt(store.discard, 7, refused=(ValueError, KeyError))
        assert error is None or "7" in str(error)
        same_content(store, [small_block(0)])
    with GradientStore(tmp_path / "a", mode="read") as store:
        same_content(store, [small_block(0)])


# ---------------------------------------------------------------- modes


@pytest.mark.parametrize("as_path", [str, Path], ids=["str", "Path"])
@pytest.mark.parametrize("mode", ["create", "resume", "overwrite"])
def test_a_new_folder(mode, as_path, tmp_path):
    folder = as_path(tmp_path / "a" / "b")
    with GradientStore(folder, mode=mode) as store:
        assert store.path == Path(folder)
        assert store.mode == mode
        assert store.residency == "disk"
        assert store.is_writable
        store.define(**FACTS)
        store.append(small_block(0))
    with GradientStore(folder, mode="read") as store:
        assert not store.is_writable
        assert store.mode == "read"
        same_content(store, [small_block(0)])


def test_a_relative_path_stays_where_it_was(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with GradientStore("a") as store:
        store.define(**FACTS)
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        store.append(small_block(0))
        store.flush()
        store.append(small_block(1))
        same_content(store, [small_block(0), small_block(1)])
    assert files(tmp_path / "elsewhere") == []
    with GradientStore(tmp_path / "a", mode="read") as store:
        same_content(store, [small_block(0), small_block(1)])


def test_an_empty_folder_is_fine(tmp_path):
    (tmp_path / "a").mkdir()
    write_store(tmp_path / "a", [small_block(0)])
    with GradientStore(tmp_path / "a", mode="read") as store:
        same_content(store, [small_block(0)])


def test_create_over_a_store_is_refused(tmp_path):
    folder = write_store(tmp_path / "a", [small_block(0)])
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(
        (StoreError, FileExistsError), match="(?s)resume.*overwrite|overwrite.*resume"
    ):
        GradientStore(folder)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_create_beside_other_files_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises((StoreError, FileExistsError), match=r"notes\.txt|empty"):
        GradientStore(tmp_path)
    assert files(tmp_path) == ["notes.txt"]


@pytest.mark.parametrize("residency", ["disk", "tiered"])
def test_resume_goes_on(residency, tmp_path):
    blocks = [small_block(step) for step in range(5)]
    write_store(tmp_path / "a", blocks[:3])
    with open_store(tmp_path / "a", residency, mode="resume") as store:
        store.define(**FACTS)
        same_content(store, blocks[:3])
        for block in blocks[3:]:
            store.append(block)
        same_content(store, blocks)
    with GradientStore(tmp_path / "a", mode="read") as store:
        same_content(store, blocks)


def test_a_resumed_store_equals_one_written_at_once(tmp_path):
    blocks = [block_of_all(step) for step in range(4)]
    write_store(tmp_path / "whole", blocks, shard_bytes=1)
    for number, block in enumerate(blocks):
        mode = "resume" if number else "create"
        write_store(tmp_path / "parts", [block], mode=mode, shard_bytes=1)
    a, b = shards(tmp_path / "whole"), shards(tmp_path / "parts")
    assert [path.name for path in a] == [path.name for path in b]
    assert len(a) == 4
    assert [path.read_bytes() for path in a] == [path.read_bytes() for path in b]


def test_overwrite_deletes_its_own_files_only(tmp_path):
    folder = write_store(tmp_path / "a", [block_of_all(step) for step in range(3)])
    with GradientStore(folder, mode="resume") as store:
        store.define(**FACTS)
        store.attach("covariances", {"a": values(2)}, {})
    others = [
        "notes.txt",
        "model.safetensors",
        "journal.jsonl",
        "manifest.json.bak",
        "sub/0000-000000.safetensors",
    ]
    others += ["0000-000000.safetensors.bak", "x0000-000000.safetensors", "0000-00000.safetensors"]
    for name in others:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("mine")
    with GradientStore(folder, mode="overwrite") as store:
        assert len(store) == 0
        assert store.facts is None
        store.define(**{**FACTS, "loss": "new"})
        assert store.attached("covariances") is None
        store.append(small_block(0))
    with GradientStore(folder, mode="read") as store:
        same_content(store, [small_block(0)])
        assert store.facts.loss == "new"
        assert store.attached("covariances") is None
    assert len(shards(folder)) == 1
    assert all((folder / name).read_text() == "mine" for name in others)


@pytest.mark.parametrize("mode", ["create", "resume", "overwrite", "read"])
def test_a_manifest_of_something_else_is_refused(mode, tmp_path):
    (tmp_path / "manifest.json").write_text('{"files": []}')
    with pytest.raises((StoreError, FileExistsError), match="manifest"):
        GradientStore(tmp_path, mode=mode)
    assert files(tmp_path) in (["manifest.json"], [".lock", "manifest.json"])
    assert (tmp_path / "manifest.json").read_text() == '{"files": []}'


@pytest.mark.parametrize("mode", ["create", "resume", "overwrite", "read"])
def test_a_file_in_place_of_a_folder(mode, tmp_path):
    (tmp_path / "a").write_text("mine")
    with pytest.raises((StoreError, OSError), match="a"):
        GradientStore(tmp_path / "a", mode=mode)
    assert (tmp_path / "a").read_text() == "mine"


@pytest.mark.parametrize("made", [True, False])
def test_there_is_nothing_to_read(made, tmp_path):
    if made:
        (tmp_path / "a").mkdir()
    with pytest.raises((StoreError, FileNotFoundError), match="a"):
        GradientStore(tmp_path / "a", mode="read")
    assert files(tmp_path) == (["a"] if made else [])


def test_options_without_an_effect_are_refused(tmp_path):
    with pytest.raises(ValueError, match="path"):
        GradientStore(tmp_path / "a", residency="memory")
    with pytest.raises(ValueError, match="budget"):
        GradientStore(tmp_path / "a", budget=100)
    with pytest.raises(ValueError, match="residency"):
        GradientStore(tmp_path / "a", residency="device")
    with pytest.raises(ValueError, match="mode"):
        GradientStore(tmp_path / "a", mode="append")
    for mode in ("resume", "overwrite", "read"):
        with pytest.raises(ValueError, match="path"):
            GradientStore(mode=mode)
    for size in (0, -1, 1.5, True):
        with pytest.raises((ValueError, TypeError), match="shard_bytes"):
            GradientStore(tmp_path / "a", shard_bytes=size)
    for budget in (0, -1, True, "1"):
        with pytest.raises((ValueError, TypeError), match="budget"):
            GradientStore(residency="memory", budget=budget)
    with pytest.raises(TypeError, match="path"):
        GradientStore(7)
    assert files(tmp_path) == []


WRITES = {
    "define": lambda store: store.define(**{**FACTS, "loss": "other"}),
    "append": lambda store: store.append(small_block(1)),
    "discard": lambda store: store.discard(0),
    "attach": lambda store: store.attach("a", {"a": values(2)}, {}),
}


@pytest.mark.parametrize("write", WRITES)
def test_nothing_is_written_in_read_mode(write, tmp_path):
    folder = write_store(tmp_path / "a", [small_block(0)])
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()}
    with GradientStore(folder, mode="read") as store:
        with pytest.raises((RuntimeError, OSError), match="read"):
            WRITES[write](store)
        same_content(store, [small_block(0)])
    assert {
        path: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()
    } == before


USES = {
    **WRITES,
    "blocks": lambda store: list(store.blocks()),
    "get": lambda store: store.get([0]),
    "verify": lambda store: store.verify(),
    "attached": lambda store: store.attached("covariances"),
    "enter": lambda store: store.__enter__(),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("residency", RESIDENCIES)
def test_a_closed_store_is_refused(residency, use, tmp_path):
    store = open_store(tmp_path / "a", residency)
    store.define(**FACTS)
    store.append(small_block(0))
    store.close()
    store.close()
    with pytest.raises(RuntimeError, match="closed"):
        USES[use](store)


def test_a_store_that_closes_while_it_is_read(tmp_path):
    write_store(tmp_path / "a", [small_block(step) for step in range(9)], shard_bytes=1)
    store = GradientStore(tmp_path / "a", mode="read")
    blocks = store.blocks()
    next(blocks)
    store.close()
    with pytest.raises(RuntimeError, match="closed"):
        list(blocks)


def test_an_error_in_the_block_keeps_what_was_journalled(tmp_path):
    def fails():
        with GradientStore(tmp_path / "a", shard_bytes=1) as store:
            store.define(**FACTS)
            store.append(small_block(0))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    with GradientStore(tmp_path / "a", mode="resume") as store:
        store.define(**FACTS)
        same_content(store, [small_block(0)])
        store.append(small_block(1))


def test_a_read_while_another_writes(tmp_path):
    with GradientStore(tmp_path / "a", shard_bytes=10**6) as writer:
        writer.define(**FACTS)
        writer.append(small_block(0))
        writer.flush()
        writer.append(small_block(1))
        with GradientStore(tmp_path / "a", mode="read") as reader:
            same_content(reader, [small_block(0)])
            writer.flush()
            same_content(reader, [small_block(0)])
        same_content(writer, [small_block(0), small_block(1)])


def test_appending_while_reading(tmp_path):
    """An iteration goes through what was there when it began."""
    with GradientStore(tmp_path / "a", shard_bytes=500) as store:
        store.define(**FACTS)
        for step in range(3):
            store.append(small_block(step))
        seen = []
        for stored in store.blocks():
            seen.append(stored.block.step)
            store.append(small_block(stored.block.step + 3))
            if len(seen) > 10:
                break
        assert seen == [0, 1, 2]
        same_content(store, [small_block(step) for step in range(6)])


@pytest.mark.parametrize("scheme", ["index", "key:uid", "content"])
def test_rows_are_the_same_while_writing_and_after(scheme, tmp_path):
    """Rows of a data set in their order, else steps in theirs, whatever the order they came in."""
    facts = {**FACTS, "id_scheme": scheme}
    blocks = [small_block(step) for step in (4, 1, 3, 3, 0)]
    for number, block in enumerate(blocks):
        ids = tuple(f"{i}-{number}" for i in block.ids) if scheme == "content" else block.ids
        blocks[number] = dataclasses.replace(block, ids=ids)
    with GradientStore(tmp_path / "a", shard_bytes=500) as store:
        store.define(**facts)
        for block in blocks[:4]:
            store.append(block)
        store.flush()
        store.append(blocks[4])
        seen = store.ids, store.steps, [stored.block.ids for stored in store.blocks()]
        assert store.get([1]).ids == (store.ids[1],)
    assert list(seen[1]) == sorted(seen[1])
    with GradientStore(tmp_path / "a", mode="read") as store:
        assert (store.ids, store.steps, [stored.block.ids for stored in store.blocks()]) == seen
    with GradientStore(tmp_path / "a", mode="resume") as store:
        store.define(**facts)
        ids = ("x", "y") if scheme == "content" else (4, 5)
        late = dataclasses.replace(small_block(2), ids=ids)
        store.append(late)
        assert list(store.steps) == sorted(store.steps)
        assert store.get(store.find(step=2)).ids == late.ids


def test_blocks_backwards(looked_up):
    store, blocks = looked_up
    for prefetch in (True, False):
        got = list(store.blocks(reverse=True, prefetch=prefetch))
        assert [stored.row for stored in got] == [6, 5, 3, 0]
        for stored, block in zip(got, blocks[::-1], strict=True):
            same_block(stored.block, block)
    got = [stored.block.ids for stored in store.blocks(rows=[1, 4, 6], reverse=True)]
    assert got == [(2,), (2,), (1,)]


def test_two_threads_read_at_once(tmp_path):
    blocks = [block_of_all(step) for step in range(6)]
    write_store(tmp_path / "a", blocks, shard_bytes=1)
    errors = []

    def read(store):
        try:
            for _ in range(3):
                same_content(store, blocks)
                store.verify()
                same_block(store.get([4, 5]), blocks[2])
        except Exception as error:  # noqa: BLE001  # told by the test's own thread
            errors.append(error)

    with GradientStore(tmp_path / "a", mode="read") as store:
        threads = [threading.Thread(target=read, args=(store,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert errors == []


def _read_in_forks(say, folder):
    """Readers that were forked from one, as the workers of a data loader are."""
    blocks = [small_block(step) for step in range(4)]
    with GradientStore(folder, mode="read") as store:
        same_content(store, blocks)
        children = []
        for _ in range(2):
            if (child := os.fork()) == 0:
                code = 1
                try:
                    same_content(store, blocks)
                    store.close()
                    code = 0
                finally:
                    os._exit(code)
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        same_content(store, blocks)
    say(codes)


def test_forks_of_a_reader_read(tmp_path):
    write_store(tmp_path / "a", [small_block(step) for step in range(4)], shard_bytes=1)
    child = Child(_read_in_forks, tmp_path / "a")
    assert child.hear() == [0, 0]
    child.end()


def test_no_file_stays_open(tmp_path):
    def opened():
        return len(list(Path("/proc/self/fd").iterdir()))

    def use():
        write_store(tmp_path / "a", [small_block(step) for step in range(4)], mode="overwrite")
        write_steps(tmp_path / "b", range(3), mode="overwrite")
        with GradientStore(tmp_path / "a", mode="read") as store:
            list(store.blocks())
            store.verify()
        with pytest.raises((StoreError, FileExistsError)):
            GradientStore(tmp_path / "a")
        with pytest.raises(StoreError):
            StepStore(tmp_path / "a", mode="resume")

    use()
    gc.collect()
    before = opened()
    for _ in range(3):
        use()
    gc.collect()
    assert opened() == before


@pytest.mark.parametrize("residency", RESIDENCIES)
def test_blocks_come_to_a_device(residency, tmp_path):
    with open_store(tmp_path / "a", residency) as store:
        store.define(**FACTS)
        store.append(shared_block(0, "the same tensor"))
        for device in ("meta", torch.device("meta")):
            (stored,) = store.blocks(device=device)
            assert {tensor.device.type for tensor in tensors_of(stored.block)} == {"meta"}
            layers = stored.block.layers
            q, k = layers["q"].activation_bsi, layers["k"].activation_bsi
            assert q is k
        (stored,) = store.blocks(device="cpu")
        same_block(stored.block, shared_block(0, "the same tensor"))


def test_a_store_that_is_forgotten_loses_nothing(tmp_path):
    store = GradientStore(tmp_path / "a")
    store.define(**FACTS)
    store.append(small_block(0))
    del store
    gc.collect()
    with GradientStore(tmp_path / "a", mode="resume") as store:
        same_content(store, [small_block(0)])


def test_blocks_are_those_that_were_there_when_they_were_asked_for(tmp_path):
    with GradientStore(tmp_path / "a", shard_bytes=300) as store:
        store.define(**BY_KEY)
        for step in (3, 4, 5):
            store.append(small_block(step))
        iterations = [
            store.blocks(steps=[4]),
            store.blocks(rows=[2, 3], prefetch=False),
            store.blocks(steps=[4], reverse=True),
        ]
        store.append(small_block(0))
        store.discard(3)
        store.flush()
        for blocks in iterations:
            (stored,) = blocks
            same_block(stored.block, small_block(4))
            assert stored.row == 2
        (stored,) = store.blocks(steps=[4])
        same_block(stored.block, small_block(4))
        assert stored.row == 2


def test_what_was_refused_leaves_no_trace(tmp_path):
    """Neither in the layers that a store lists nor in what it takes afterwards."""
    wide = one_layer(0, DenseGradient(torch.full((2, 6), 1e6), (2, 3)), name="late")
    with GradientStore(tmp_path / "a", dtype="float16", shard_bytes=1) as store:
        store.define(**FACTS)
        with pytest.raises(OverflowError, match="late"):
            store.append(wide)
        store.append(small_block(1))
        assert list(store.layers) == ["first", "second"]
        other = one_layer(0, DenseGradient(values(2, 8), (2, 4)), name="late")
        store.append(other)
    with GradientStore(tmp_path / "a", mode="read") as store:
        assert store.layers["late"].shape == (2, 4)
        same_content(store, [other, small_block(1)], dtype=torch.float16)


@pytest.mark.parametrize("flushed", [True, False])
def test_a_layer_keeps_its_shape(flushed, tmp_path):
    with GradientStore(tmp_path / "a") as store:
        store.define(**FACTS)
        store.append(one_layer(0, DenseGradient(values(2, 6), (2, 3))))
        if flushed:
            store.flush()
        with pytest.raises(ValueError, match="(?s)layer.*shape"):
            store.append(one_layer(1, DenseGradient(values(2, 8), (2, 4)), ids=(2, 3)))
        store.append(one_layer(1, DenseGradient(values(2, 6), (2, 3)), ids=(2, 3)))
        assert len(store) == 4


def test_two_iterations_at_once(tmp_path):
    blocks = [small_block(step) for step in range(4)]
    write_store(tmp_path / "a", blocks, shard_bytes=1)
    with GradientStore(tmp_path / "a", mode="read") as store:
        for one, other in zip(store.blocks(), store.blocks(), strict=True):
            same_block(one.block, blocks[one.block.step])
            same_block(other.block, one.block)


def test_an_iteration_that_is_left_ends_its_thread(tmp_path):
    write_store(tmp_path / "a", [small_block(step) for step in range(9)], shard_bytes=1)
    before = threading.active_count()
    with GradientStore(tmp_path / "a", mode="read") as store:
        for _ in range(5):
            blocks = store.blocks()
            next(blocks)
            blocks.close()
            del blocks
            gc.collect()
        for _ in store.blocks():
            break
        list(store.blocks())
    gc.collect()
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join(20)
    deadline = time.monotonic() + 20
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before


def test_a_block_outlives_the_store(tmp_path):
    write_store(tmp_path / "a", [small_block(0)])
    write_store(tmp_path / "b", [mapped_block(0)])
    with GradientStore(tmp_path / "a", mode="read") as store:
        (stored,) = store.blocks()
        layer = stored.block.layers["first"]
        got = store.get([0, 1])
    with GradientStore(tmp_path / "b", mode="read") as store:
        (stored,) = store.blocks()
        large = stored.block.layers["q"]
    shutil.rmtree(tmp_path / "b")
    same_layer(layer, small_block(0).layers["first"])
    same_block(got, small_block(0))
    same_layer(large, mapped_block(0).layers["q"])


@pytest.mark.parametrize("make", [small_block, mapped_block], ids=["small", "mapped"])
def test_what_is_read_cannot_change_the_file(make, tmp_path):
    folder = write_store(tmp_path / "a", [make(0)])
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with GradientStore(folder, mode="read") as store:
        (stored,) = store.blocks()
        for tensor in tensors_of(stored.block):
            tensor.zero_()
        del tensor, stored
        same_content(store, [make(0)])
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_shards_are_about_as_large_as_asked_for(tmp_path):
    blocks = [large_block(step, 4000) for step in range(20)]
    folder = write_store(tmp_path / "a", blocks, shard_bytes=15_000)
    assert len(shards(folder)) == 5
    assert all(16_000 <= path.stat().st_size < 20_000 for path in shards(folder))
    folder = write_store(tmp_path / "b", blocks, shard_bytes=10**9)
    assert len(shards(folder)) == 1


# ---------------------------------------------------------------- a folder that may not be written


def _read_only(say, folder):
    drop_capabilities()
    try:
        (folder / "probe").write_text("x")
        say("writable")
        return
    except PermissionError:
        pass
    with GradientStore(folder, mode="read") as store:
        store.verify()
        same_content(store, [small_block(step) for step in range(3)])
    with StepStore(folder.parent / "steps", mode="read") as store:
        assert list(store.steps) == [0, 1]
    errors = []
    for mode in ("create", "resume", "overwrite"):
        try:
            with GradientStore(folder, mode=mode) as store:
                store.define(**FACTS)
                store.append(small_block(3))
        except (OSError, StoreError) as error:
            errors.append(f"{type(error).__name__}: {error}")
        try:
            with GradientStore(folder / "new", mode=mode) as store:
                store.define(**FACTS)
        except OSError as error:
            errors.append(f"{type(error).__name__}: {error}")
    say(errors)


def test_a_read_only_folder(tmp_path):
    folder = write_store(tmp_path / "a", [small_block(step) for step in range(3)])
    steps = write_steps(tmp_path / "steps", [0, 1])
    before = {path: path.read_bytes() for path in folder.iterdir()}
    for path in (*folder.iterdir(), *steps.iterdir()):
        path.chmod(0o444)
    folder.chmod(0o555)
    steps.chmod(0o555)
    try:
        child = Child(_read_only, folder)
        errors = child.hear()
        child.end()
    finally:
        folder.chmod(0o755)
        steps.chmod(0o755)
    assert len(errors) == 6
    assert all(str(folder) in error for error in errors)
    assert all("PermissionError" in error for error in errors[1:])
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


# ---------------------------------------------------------------- memory and tiers


def test_memory_budget():
    with GradientStore(residency="memory", budget=10_000) as store:
        store.define(**FACTS)
        assert store.path is None
        assert store.disk_bytes == 0
        store.append(large_block(0, 4000))
        with pytest.raises(MemoryError, match="(?s)10000.*(tiered|disk)|(tiered|disk).*10000"):
            store.append(large_block(1, 20_000, name="other"))
        same_content(store, [large_block(0, 4000)])
        store.append(large_block(1, 4000))
        with pytest.raises(MemoryError, match="budget"):
            store.append(large_block(2, 4000))
        same_content(store, [large_block(0, 4000), large_block(1, 4000)])
        assert store.nbytes == 8000


@contextmanager
def temporary(folder, monkeypatch):
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    monkeypatch.undo()


@pytest.mark.parametrize("residency", ["disk", "tiered"])
def test_a_store_without_a_path_leaves_nothing(residency, tmp_path, monkeypatch):
    blocks = [small_block(step) for step in range(30)]
    with temporary(tmp_path / "temporary", monkeypatch) as folder:
        with GradientStore(
            residency=residency, budget=3000 if residency == "tiered" else None
        ) as store:
            store.define(**FACTS)
            for block in blocks:
                store.append(block)
            store.flush()
            assert files(folder)
            same_content(store, blocks)
            assert store.disk_bytes > 0
        assert files(folder) == []
        store = GradientStore(residency=residency, budget=1 if residency == "tiered" else None)
        store.define(**FACTS)
        store.append(blocks[0])
        store.flush()
        assert files(folder)
        del store
        gc.collect()
        assert files(folder) == []


@pytest.mark.parametrize("end", ["", "raise SystemExit(3)", "1 / 0", "store.close()"], ids=range(4))
@pytest.mark.parametrize("residency", ["disk", "tiered"])
@pytest.mark.slow
def test_a_store_without_a_path_leaves_nothing_at_the_end(residency, end, tmp_path):
    budget = "budget=1, " if residency == "tiered" else ""
    script = (
        "import sys\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "from storing import FACTS, small_block\n"
        "from gradtrail import GradientStore\n"
        f"store = GradientStore(residency={residency!r}, {budget}shard_bytes=1)\n"
        "store.define(**FACTS)\n"
        "store.append(small_block(0))\n"
        "blocks = store.blocks()\n"
        "kept = next(blocks)\n" + end
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(Path(__file__).parent)],
        env={"TMPDIR": str(tmp_path), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == {"": 0, "raise SystemExit(3)": 3, "1 / 0": 1}.get(end, 0), done.stderr
    assert files(tmp_path) == []


@pytest.mark.parametrize("budget", [1, 2500, 10**8])
def test_tiered_with_a_path_is_all_on_disk(budget, tmp_path):
    blocks = [block_of_all(step) for step in range(4)]
    with GradientStore(tmp_path / "a", residency="tiered", budget=budget, shard_bytes=1) as store:
        store.define(**FACTS)
        for block in blocks:
            store.append(block)
        same_content(store, blocks)
        store.flush()
        with GradientStore(tmp_path / "a", mode="read") as reader:
            same_content(reader, blocks)


def test_tiered_gives_what_fits_from_memory(tmp_path):
    """A damaged shard cannot be told in blocks that are held; the file says so in a fresh store."""
    blocks = [large_block(step, 4000) for step in range(3)]
    with GradientStore(tmp_path / "a", residency="tiered", budget=9000, shard_bytes=1) as store:
        store.define(**FACTS)
        for block in blocks:
            store.append(block)
        held = sum(
            next(iter(store.blocks(rows=[2 * n]))).block.layers["dense"].values_bd.data_ptr()
            == next(iter(store.blocks(rows=[2 * n]))).block.layers["dense"].values_bd.data_ptr()
            for n in range(2)
        )
        assert held == 2


# ---------------------------------------------------------------- attachments


@pytest.mark.parametrize("residency", RESIDENCIES)
def test_attachments(residency, tmp_path):
    first = {"a.activation": values(3, 3), "a.gradient": values(2, 2, dtype=torch.float64)}
    with open_store(tmp_path / "a", residency) as store:
        store.define(**FACTS)
        assert store.attached("covariances") is None
        store.attach("covariances", {"old": values(9)}, {"steps": "0"})
        store.attach("covariances", first, {"steps": "0 1"})
        store.attach("other", {}, {})
        store.append(small_block(0))
        check_attached(store, first)
        for tensor in store.attached("covariances")[0].values():
            tensor.zero_()  # of the caller
        check_attached(store, first)
    if residency != "memory":
        with GradientStore(tmp_path / "a", mode="resume") as store:
            store.define(**FACTS)
            check_attached(store, first)
        with GradientStore(tmp_path / "a", mode="read") as store:
            check_attached(store, first)
            same_content(store, [small_block(0)])
            assert store.attached("none") is None


def check_attached(store, expected):
    tensors, metadata = store.attached("covariances")
    assert set(tensors) == set(expected)
    for name, tensor in expected.items():
        same_tensor(tensors[name], tensor, name)
    assert metadata == {"steps": "0 1"}
    tensors, metadata = store.attached("other")
    assert dict(tensors) == {}
    assert metadata == {}


@pytest.mark.parametrize(
    "name", ["../x", "/tmp/x", "a/b", "", ".", "0000-000000", "manifest", "a\0b", ".lock"]
)
def test_the_name_of_an_attachment_is_no_path(name, tmp_path):
    with GradientStore(tmp_path / "a") as store:
        store.define(**FACTS)
        store.append(small_block(0))
        _, error = attempt(store.attach, name, {"a": values(2)}, {}, refused=ValueError)
        assert error is None or "name" in str(error)
        if error is None:
            same_tensor(store.attached(name)[0]["a"], values(2))
        same_content(store, [small_block(0)])
    assert {path.parts[0] for path in map(Path, files(tmp_path))} == {"a"}
    with GradientStore(tmp_path / "a", mode="read") as store:
        same_content(store, [small_block(0)])


# ---------------------------------------------------------------- lifetimes


def probe(block):
    """Weak references to what a block holds: its tensors, and the layers themselves."""
    return [weakref.ref(tensor) for tensor in tensors_of(block)] + [
        weakref.ref(block.layers[name]) for name in block.layers
    ]


@pytest.mark.parametrize("make", [block_of_all, mapped_block], ids=["small", "mapped"])
@pytest.mark.parametrize("prefetch", [True, False])
@pytest.mark.parametrize("rows", [None, [0, 3, 4, 6, 9, 12]], ids=["whole", "cut"])
def test_nothing_of_a_block_is_alive_when_the_next_is_asked_for(prefetch, rows, make, tmp_path):
    write_store(tmp_path / "a", [make(step) for step in range(8)], shard_bytes=9000)
    gc.collect()
    gc.disable()
    try:
        with GradientStore(tmp_path / "a", mode="read") as store:
            blocks = store.blocks(prefetch=prefetch, rows=rows)
            count = 0
            for _ in range(100):
                stored = next(blocks, None)
                if stored is None:
                    break
                count += 1
                refs = probe(stored.block)
                del stored
                assert len(refs) > 7
                assert [ref() for ref in refs if ref() is not None] == []
            assert count > 4
    finally:
        gc.enable()


def mapped(folder):
    """Files of a folder that this process has mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sorted({line.split("/")[-1] for line in lines if str(folder) in line})


def test_every_mapping_is_let_go(tmp_path):
    folder = write_store(tmp_path / "a", [mapped_block(step) for step in range(6)], shard_bytes=1)
    gc.disable()
    try:
        with GradientStore(folder, mode="read") as store:
            for stored in store.blocks(prefetch=False):
                tensors = tensors_of(stored.block)
                assert len(mapped(folder)) == 1
                del stored, tensors
                assert mapped(folder) == []
            for stored in store.blocks():
                tensors = tensors_of(stored.block)
                assert 1 <= len(mapped(folder)) <= 2
                del stored, tensors
            store.verify()
            store.get([0, 5])
            list(store.blocks(rows=[3]))
        gc.collect()
        assert mapped(folder) == []
    finally:
        gc.enable()


def test_one_layer_is_read_when_it_is_asked_for(tmp_path):
    """The layers of a block are no dict of tensors that are all there."""
    write_store(tmp_path / "a", [block_of_all(0)])
    with GradientStore(tmp_path / "a", mode="read") as store:
        (stored,) = store.blocks()
        assert not isinstance(stored.block.layers, dict)
        same_layer(stored.block.layers["attention.q"], block_of_all(0).layers["attention.q"])
        assert "attention.q" in stored.block.layers
        assert "nothing" not in stored.block.layers
        assert stored.block.layers.get("nothing") is None


def _write_large(folder, num_blocks, num_bytes):
    with GradientStore(folder, shard_bytes=64 << 20) as store:
        store.define(**FACTS)
        block = large_block(0, num_bytes)
        for step in range(num_blocks):
            store.append(GradientBlock(step, (2 * step, 2 * step + 1), block.layers))
    return status_bytes("VmHWM")


def _read_large(folder, prefetch, whole):
    one_arena()
    before, peak, total = status_bytes("VmRSS"), 0, 0.0
    with GradientStore(folder, mode="read") as store:
        if whole:
            store.verify()
        for stored in store.blocks(prefetch=prefetch):
            layer = stored.block.layers["dense"]
            total += float(layer.values_bd[:, -1].sum()) + float(layer.values_bd.sum())
            del stored, layer
            peak = max(peak, status_bytes("VmRSS"))
    return max(peak, status_bytes("VmHWM")) - before, total


@pytest.mark.slow
def test_reading_takes_no_memory_that_grows_with_the_store(tmp_path):
    """1 GiB in blocks of 4 MiB, written and read within 200 MiB."""
    base = in_child(status_bytes, "VmHWM")
    assert in_child(_write_large, tmp_path / "a", 256, 4 << 20) - base < 200 << 20
    for prefetch in (True, False):
        grown, total = in_child(_read_large, tmp_path / "a", prefetch, prefetch)
        assert total != 0
        assert grown < 200 << 20


# ---------------------------------------------------------------- stores of steps


@pytest.mark.parametrize("residency", RESIDENCIES)
def test_a_step_store_round_trips(residency, tmp_path):
    options = {"budget": 100} if residency == "tiered" else {}
    path = None if residency == "memory" else tmp_path / "a"
    with StepStore(path, residency=residency, shard_bytes=150, **options) as store:
        store.define(optimizer="adamw", betas=[0.9, 0.999], groups={"a": None})
        for step in (3, 1, 7):
            store.append(step, step_tensors(step), {"lr": step / 8, "names": ["x", None]})
        check_steps(store, (1, 3, 7))
        store.flush()
        check_steps(store, (1, 3, 7))
    if residency != "memory":
        with StepStore(str(tmp_path / "a"), mode="read") as store:
            check_steps(store, (1, 3, 7))
        with StepStore(tmp_path / "a", mode="resume") as store:
            store.define(optimizer="adamw", betas=[0.9, 0.999], groups={"a": None})
            store.append(2, step_tensors(2), {"lr": 2 / 8, "names": ["x", None]})
            check_steps(store, (1, 2, 3, 7))
        with StepStore(tmp_path / "a", mode="read") as store:
            check_steps(store, (1, 2, 3, 7))
            store.verify()


def check_steps(store, steps):
    assert tuple(store.steps) == steps
    facts = {"optimizer": "adamw", "betas": [0.9, 0.999], "groups": {"a": None}}
    assert dict(store.facts) == facts
    for step in steps:
        assert store.values(step) == {"lr": step / 8, "names": ["x", None]}
        same_tensors(store.read(step), step_tensors(step))
        assert list(store.read(step, names=["step"])) == ["step"]
        same_tensor(
            store.read(step, names=["exp_avg"], device="cpu")["exp_avg"],
            step_tensors(step)["exp_avg"],
        )
    for reverse in (False, True):
        got = []
        for step, tensors, found in store.iterate(reverse=reverse):
            got.append(step)
            same_tensors(tensors, step_tensors(step))
            assert found == {"lr": step / 8, "names": ["x", None]}
        assert tuple(got) == (steps[::-1] if reverse else steps)
    got = [(step, list(tensors)) for step, tensors, _ in store.iterate([7, 3], names=["exp_avg"])]
    assert sorted(got) == [(3, ["exp_avg"]), (7, ["exp_avg"])]


def same_tensors(got, expected):
    assert set(got) == set(expected)
    for name, tensor in expected.items():
        same_tensor(got[name], tensor, name)


def test_a_step_comes_once(tmp_path):
    folder = write_steps(tmp_path / "a", [0, 1])
    with StepStore(folder, mode="resume") as store:
        store.define(optimizer="adamw")
        with pytest.raises((ValueError, StoreError), match="step.*1|1.*step"):
            store.append(1, step_tensors(1), {})
        store.append(2, step_tensors(2), {})
        with pytest.raises((ValueError, StoreError), match="step.*2|2.*step"):
            store.append(2, step_tensors(2), {})
        assert tuple(store.steps) == (0, 1, 2)


def test_what_a_step_store_has_not(tmp_path):
    folder = write_steps(tmp_path / "a", [0, 1])
    with StepStore(folder, mode="read") as store:
        for ask in (store.read, store.values, lambda step: list(store.iterate([step]))):
            with pytest.raises((KeyError, ValueError), match="5"):
                ask(5)
        with pytest.raises((KeyError, ValueError), match="(?s)exp_avrg.*exp_avg"):
            store.read(0, names=["exp_avrg"])
        with pytest.raises((RuntimeError, OSError), match="read"):
            store.append(2, step_tensors(2), {})
    with StepStore(folder, mode="resume") as store:
        with pytest.raises(StoreError, match="(?s)optimizer.*(adamw.*sgd|sgd.*adamw)"):
            store.define(optimizer="sgd")
        with pytest.raises(StoreError, match="more"):
            store.define(optimizer="adamw", more=1)


def test_a_step_store_refuses_what_is_no_json_and_no_tensor(tmp_path):
    with StepStore(tmp_path / "a") as store:
        store.define()
        with pytest.raises((TypeError, ValueError), match="values"):
            store.append(0, step_tensors(0), {"lr": values(1)})
        with pytest.raises((TypeError, ValueError), match="exp_avg"):
            store.append(0, {"exp_avg": [1.0]}, {})
        assert tuple(store.steps) == ()
        store.append(0, {}, {})
        assert store.read(0) == {}


def test_any_tensor_name_is_fine_in_a_step_store(tmp_path):
    tensors = {name: values(2, seed=n) for n, name in enumerate([*NAMES, "metadata"])}
    with StepStore(tmp_path / "a") as store:
        store.define()
        store.append(0, tensors, {})
        store.flush()
        same_tensors(store.read(0), tensors)


def test_shared_tensors_of_a_step_come_back(tmp_path):
    one = values(3, 4)
    tensors = {"a": one, "b": one, "c": one.view(4, 3), "d": one.t(), "e": one[0]}
    with StepStore(tmp_path / "a") as store:
        store.define()
        store.append(0, tensors, {})
    with StepStore(tmp_path / "a", mode="read") as store:
        same_tensors(store.read(0), tensors)


def test_the_two_kinds_of_store_refuse_each_other(tmp_path):
    write_store(tmp_path / "gradients", [small_block(0)])
    write_steps(tmp_path / "steps", [0])
    for mode in ("read", "resume"):
        with pytest.raises(StoreError, match="(?s)steps.*gradients|gradients.*steps"):
            GradientStore(tmp_path / "steps", mode=mode)
        with pytest.raises(StoreError, match="(?s)steps.*gradients|gradients.*steps"):
            StepStore(tmp_path / "gradients", mode=mode)
    with pytest.raises((StoreError, FileExistsError)):
        StepStore(tmp_path / "gradients")


def test_nothing_of_a_step_is_alive_when_the_next_is_asked_for(tmp_path):
    folder = write_steps(tmp_path / "a", range(6))
    gc.collect()
    gc.disable()
    try:
        with StepStore(folder, mode="read") as store:
            for reverse in (False, True):
                steps = store.iterate(reverse=reverse)
                for _ in range(6):
                    _, tensors, _ = next(steps)
                    refs = [weakref.ref(tensor) for tensor in tensors.values()]
                    del tensors
                    assert [ref() for ref in refs] == [None] * 3
    finally:
        gc.enable()


# ---------------------------------------------------------------- the writer in the background


@pytest.mark.parametrize("residency", RESIDENCIES)
def test_the_background_writer_keeps_the_order(residency, tmp_path):
    blocks = [block_of_all(step) if step % 3 else small_block(step) for step in range(20)]
    metas = [meta_of(step) for step in range(20)]
    with open_store(tmp_path / "a", residency, shard_bytes=4000) as store:
        store.define(**FACTS)
        with BackgroundWriter(store, queue_bytes=5000) as writer:
            for block, meta in zip(blocks, metas, strict=True):
                writer.submit(block, meta=meta)
        same_content(store, blocks, metas=metas)
    if residency != "memory":
        with GradientStore(tmp_path / "a", mode="read") as store:
            same_content(store, blocks, metas=metas)


def test_the_background_writer_equals_the_synchronous_one(tmp_path):
    blocks = [block_of_all(step) for step in range(8)]
    write_store(tmp_path / "a", blocks)
    with GradientStore(tmp_path / "b", shard_bytes=2000) as store:
        store.define(**FACTS)
        with BackgroundWriter(store) as writer:
            for block in blocks:
                writer.submit(block)
    for a, b in zip(shards(tmp_path / "a"), shards(tmp_path / "b"), strict=True):
        assert a.read_bytes() == b.read_bytes()


def test_flush_of_the_background_writer(tmp_path):
    with GradientStore(tmp_path / "a") as store:
        store.define(**FACTS)
        with BackgroundWriter(store) as writer:
            for step in range(5):
                writer.submit(small_block(step))
            writer.flush()
            with GradientStore(tmp_path / "a", mode="read") as reader:
                same_content(reader, [small_block(step) for step in range(5)])
            writer.submit(small_block(5))
        assert len(store) == 12


def test_a_block_larger_than_the_queue_passes(tmp_path):
    with GradientStore(tmp_path / "a") as store:
        store.define(**FACTS)
        with BackgroundWriter(store, queue_bytes=10) as writer:
            for step in range(5):
                writer.submit(large_block(step, 4000))
        same_content(store, [large_block(step, 4000) for step in range(5)])


@pytest.mark.parametrize("size", [0, -1, 1.5], ids=str)
def test_a_queue_of_no_size_is_refused(size, tmp_path):
    with GradientStore(tmp_path / "a") as store:
        store.define(**FACTS)
        with pytest.raises((ValueError, TypeError), match="queue_bytes"):
            BackgroundWriter(store, queue_bytes=size)


class Gate:
    """Holds the disk's flush back until it is opened."""

    def __init__(self, monkeypatch):
        self.open = threading.Event()
        fsync = os.fsync

        def held(file):
            assert self.open.wait(60)
            fsync(file)

        monkeypatch.setattr(os, "fsync", held)


def test_the_queue_is_bounded_by_its_bytes(tmp_path, monkeypatch):
    accepted = []
    size = 1 << 20
    with GradientStore(tmp_path / "a", shard_bytes=1) as store:
        store.define(**FACTS)
        gate = Gate(monkeypatch)
        writer = BackgroundWriter(store, queue_bytes=4 * size)

        def submit():
            for step in range(40):
                writer.submit(large_block(step, size))
                accepted.append(step)

        thread = threading.Thread(target=submit)
        thread.start()
        while len(accepted) < 2:
            time.sleep(0.01)
        thread.join(1.0)  # more than it takes; if it took longer, fewer would be accepted
        count = len(accepted)
        gate.open.set()
        thread.join()
        writer.close()
        assert 2 <= count <= 6
        same_content(store, [large_block(step, size) for step in range(40)])


def test_discard_waits_for_what_was_submitted(tmp_path, monkeypatch):
    with GradientStore(tmp_path / "a", shard_bytes=1) as store:
        store.define(**FACTS)
        with BackgroundWriter(store) as writer:
            gate = Gate(monkeypatch)
            for step in range(8):
                writer.submit(small_block(step))
            threading.Timer(0.2, gate.open.set).start()
            store.discard(7)
            same_content(store, [small_block(step) for step in range(7)])
            writer.submit(small_block(7))
        same_content(store, [small_block(step) for step in range(8)])


def test_submit_holds_no_tensor_after_it_was_written(tmp_path):
    with GradientStore(tmp_path / "a", shard_bytes=1) as store:
        store.define(**FACTS)
        with BackgroundWriter(store) as writer:
            block = small_block(0)
            refs = [weakref.ref(tensor) for tensor in tensors_of(block)]
            writer.submit(block)
            writer.flush()
            del block
            gc.collect()
            assert [ref() for ref in refs] == [None] * len(refs)


@pytest.mark.parametrize("call", ["submit", "flush", "close", "exit"])
def test_an_error_of_the_thread_comes_at_the_next_call(call):
    store = GradientStore(residency="memory", budget=1000)
    store.define(**FACTS)
    writer = BackgroundWriter(store)
    writer.submit(small_block(0))
    writer.submit(large_block(1, 5000))

    def submit():
        for step in range(2, 1000):
            writer.submit(small_block(step))
            time.sleep(0.01)

    def leave():
        with writer:
            pass

    calls = {"submit": submit, "exit": leave, "flush": writer.flush, "close": writer.close}
    with pytest.raises(MemoryError, match="budget"):
        calls[call]()
    same_block(store.get([0, 1]), small_block(0))
    if call == "submit":
        with pytest.raises((MemoryError, RuntimeError)):
            writer.submit(small_block(7))
    _, error = attempt(writer.close, refused=(MemoryError, RuntimeError))
    assert error is None or "budget" in str(error)
    store.close()


def test_no_block_after_an_error_is_written():
    """What was submitted before it is there, in order, and nothing of what came after it."""
    with GradientStore(residency="memory", budget=3000) as store:
        store.define(**FACTS)
        writer = BackgroundWriter(store)
        blocks = [small_block(0), small_block(1), large_block(2, 50_000), small_block(3)]

        def submit():
            for block in blocks:
                writer.submit(block)
            writer.flush()

        with pytest.raises(MemoryError):
            submit()
        _, error = attempt(writer.close, refused=(MemoryError, RuntimeError))
        assert error is None or "budget" in str(error)
        with pytest.raises(RuntimeError, match="closed"):
            writer.submit(small_block(4))
        same_content(store, blocks[:2])


def test_submit_after_close(tmp_path):
    with GradientStore(tmp_path / "a") as store:
        store.define(**FACTS)
        writer = BackgroundWriter(store)
        writer.submit(small_block(0))
        writer.close()
        writer.close()
        with pytest.raises(RuntimeError, match="closed"):
            writer.submit(small_block(1))
        same_content(store, [small_block(0)])
        store.append(small_block(1))  # the store itself is open still
    with GradientStore(tmp_path / "a", mode="read") as store:
        same_content(store, [small_block(0), small_block(1)])


def submit_and_fail(store, block):
    with BackgroundWriter(store) as writer:
        writer.submit(block)
        raise ZeroDivisionError


def test_an_error_of_the_caller_is_not_replaced(tmp_path):
    with GradientStore(tmp_path / "a") as store:
        store.define(**FACTS)
        with pytest.raises(ZeroDivisionError):
            submit_and_fail(store, small_block(0))
        same_content(store, [small_block(0)])


def test_both_errors_are_told():

    def fails():
        with GradientStore(residency="memory", budget=100) as store:
            store.define(**FACTS)
            submit_and_fail(store, large_block(0, 5000))

    with pytest.raises((ZeroDivisionError, MemoryError)) as info:
        fails()
    chain = [info.value, info.value.__context__, info.value.__cause__]
    assert any(isinstance(error, ZeroDivisionError) for error in chain)
    assert any(isinstance(error, MemoryError) for error in chain)


def test_the_caller_may_reuse_its_tensors_after_flush(tmp_path):
    block = small_block(0)
    with GradientStore(tmp_path / "a") as store:
        store.define(**FACTS)
        with BackgroundWriter(store) as writer:
            writer.submit(block)
            writer.flush()
            for tensor in tensors_of(block):
                tensor.zero_()
        same_content(store, [small_block(0)])


def in_the_fork(writer, store):
    """What a fork tries; its exit code is 0 if everything was refused."""
    code = 5
    try:
        with pytest.raises(RuntimeError, match="fork|process"):
            writer.submit(small_block(9))
        code = 4
        with pytest.raises(RuntimeError, match="fork|process"):
            store.append(small_block(9))
        code = 3
        writer.close()
        code = 2
        store.close()
        code = 0
    finally:
        os._exit(code)


def _fork_writer(say, folder):
    """Fork with a writer open; the fork must neither write nor hang nor take the store with it."""
    store = GradientStore(folder, shard_bytes=1)
    store.define(**FACTS)
    writer = BackgroundWriter(store)
    writer.submit(small_block(0))
    writer.flush()
    child = os.fork()
    if child == 0:
        in_the_fork(writer, store)
    _, status = os.waitpid(child, 0)
    writer.submit(small_block(1))
    writer.close()
    with pytest.raises((StoreError, OSError)):  # the lock is still there
        GradientStore(folder, mode="resume")
    store.append(small_block(2))
    store.close()
    say(os.waitstatus_to_exitcode(status))


def test_a_fork_of_the_writer_leaves_the_store_alone(tmp_path):
    child = Child(_fork_writer, tmp_path / "a")
    code = child.hear()
    child.end()
    assert code == 0
    with GradientStore(tmp_path / "a", mode="read") as store:
        same_content(store, [small_block(step) for step in range(3)])


def _fork_temporary(say):
    store = GradientStore(shard_bytes=1)
    store.define(**FACTS)
    store.append(small_block(0))
    if (child := os.fork()) == 0:
        store.close()
        del store
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    same_content(store, [small_block(0)])
    store.append(small_block(1))
    same_content(store, [small_block(0), small_block(1)])
    store.close()
    say("fine")


def test_a_fork_of_a_temporary_store_leaves_its_files():
    child = Child(_fork_temporary)
    assert child.hear() == "fine"
    child.end()


SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
from storing import FACTS, large_block
from gradtrail import GradientStore
from gradtrail.store import BackgroundWriter
store = GradientStore(sys.argv[2])
store.define(**FACTS)
writer = BackgroundWriter(store)
for step in range(30):
    writer.submit(large_block(step, 100_000))
"""


@pytest.mark.slow
def test_blocks_that_were_accepted_are_written_at_the_end_of_the_interpreter(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(Path(__file__).parent), str(tmp_path / "a")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    with GradientStore(tmp_path / "a", mode="read") as store:
        count = len(store.records)
        same_content(store, [large_block(step, 100_000) for step in range(count)])
    assert count == 30, done.stderr
    assert done.returncode == 0, done.stderr


def _fork_that_stays(say, folder):
    """The writer is killed while a fork of it lives on."""
    with GradientStore(folder, mode="resume", shard_bytes=1) as store:
        store.define(**FACTS)
        store.append(small_block(0))
        if (child := os.fork()) == 0:
            time.sleep(120)
            os._exit(0)
        say(child)
        time.sleep(120)


def test_a_fork_does_not_hold_the_lock_of_a_killed_writer(tmp_path):
    child = Child(_fork_that_stays, tmp_path / "a")
    fork = child.hear()
    try:
        with pytest.raises((StoreError, OSError)):
            GradientStore(tmp_path / "a", mode="resume")
        child.kill()
        for _ in range(100):  # the fork may not have run yet: it lets go of the lock when it does
            with contextlib.suppress(StoreError):
                write_store(tmp_path / "a", [small_block(1)], mode="resume")
                break
            time.sleep(0.1)
        with GradientStore(tmp_path / "a", mode="read") as store:
            same_content(store, [small_block(0), small_block(1)])
    finally:
        os.kill(fork, signal.SIGKILL)


def test_the_digest_of_records_knows_no_blocks(tmp_path):
    def digest(folder, blocks):
        write_store(tmp_path / folder, blocks, facts=BY_KEY)
        with GradientStore(tmp_path / folder, mode="read") as store:
            return records_digest(store.records)

    whole = digest("whole", [small_block(1, b=4, first_id=0)])
    assert digest("cut", [small_block(1, b=1), small_block(1, b=3, first_id=3)]) != whole
    halves = [small_block(1, b=2, first_id=0), small_block(1, b=2, first_id=2)]
    assert digest("halves", halves) == whole
    assert digest("another step", [small_block(2, b=4, first_id=0)]) != whole
    assert digest("fewer", halves[:1]) != whole
    named = dataclasses.replace(halves[0], ids=("0", "1"))
    assert digest("named", [named, halves[1]]) != whole


def test_the_format_is_what_the_documentation_says(tmp_path):
    """Read a store with JSON and safetensors alone."""
    blocks = [small_block(step, b=1 + step % 2) for step in range(4)]
    metas = [{"n": n} for n in range(4)]
    folder = write_store(tmp_path / "a", blocks, metas=metas, facts=BY_KEY, shard_bytes=300)
    text = (folder / "journal-0000.jsonl").read_text()
    head, *lines = [json.loads(line) for line in text.splitlines()]
    manifest = json.loads((folder / "manifest.json").read_text())
    assert head["run"] == manifest["run"]
    assert head["rank"] == 0
    found = []
    for number, line in enumerate(lines):
        assert line["shard"] == f"0000-{number:06d}.safetensors"
        data = (folder / line["shard"]).read_bytes()
        assert (len(data), zlib.crc32(data)) == (line["bytes"], line["crc32"])
        assert (8 + int.from_bytes(data[:8], "little")) % 8 == 0
        tensors = load(data)
        for place, record in enumerate(line["records"]):
            form = line["layouts"][record["layout"]]["form"]
            first, second = form["first"], form["second"]
            found.append(
                GradientBlock(
                    record["step"],
                    tuple(record["ids"]),
                    {
                        "first": LinearFactors(
                            tensors[f"{place}/{first['a']}"],
                            tensors[f"{place}/{first['g']}"],
                            first["bias"],
                            first["groups"],
                        ),
                        "second": DenseGradient(
                            tensors[f"{place}/{second['values']}"],
                            tuple(second["shape"]),
                            second["bias"],
                        ),
                    },
                )
            )
            assert record["meta"] == {"n": len(found) - 1}
    assert len(lines) > 1
    for got, block in zip(found, blocks, strict=True):
        same_block(got, block)


@pytest.mark.gpu
def test_a_block_of_a_device_may_be_written_into_after_submit(tmp_path):
    """The copy to the host is done, or what the device does next waits for it."""
    blocks = [large_block(step, 64 << 20) for step in range(4)]
    with GradientStore(tmp_path / "a") as store:
        store.define(**FACTS)
        with BackgroundWriter(store) as writer:
            for block in blocks:
                held = block.layers["dense"].values_bd.cuda()
                layer = DenseGradient(held, (1, held.shape[1]))
                writer.submit(GradientBlock(block.step, block.ids, {"dense": layer}))
                del held, layer
                torch.full((2, 8 << 20), 7.0, device="cuda")  # takes the memory that was freed
        same_content(store, blocks)
        for stored in store.blocks(device="cuda"):
            assert {tensor.device.type for tensor in tensors_of(stored.block)} == {"cuda"}


def test_public_names():
    assert gradtrail.GradientStore is gradtrail.store.GradientStore is GradientStore
    assert {"GradientStore", "StoreError"} <= set(gradtrail.__all__)
    assert {"GradientStore", "StepStore", "BackgroundWriter"} <= set(gradtrail.store.__all__)


@pytest.mark.parametrize("height", [333, 1999999], ids=["small", "mapped by itself"])
@pytest.mark.parametrize("widths", [(3, 5), (4, 4), (1, 7)])
def test_what_is_read_lies_where_its_products_do_not_depend_on_the_file(widths, height, tmp_path):
    torch.manual_seed(0)
    with GradientStore(tmp_path / "a") as store:
        store.define(id_scheme="index")
        written = []
        for step in range(3):
            layers = {
                f"layer.{width}": DenseGradient(torch.randn(1, height * width), (height, width))
                for width in widths
            }
            store.append(GradientBlock(step, (step,), layers))
            written.append(layers)
    with GradientStore(tmp_path / "a", mode="read") as store:
        for stored, layers in zip(store.blocks(), written, strict=True):
            for name, gradient in layers.items():
                tensor = stored.block.layers[name].values_bd
                assert tensor.data_ptr() % 16 == 0
                assert torch.equal(tensor, gradient.values_bd)
