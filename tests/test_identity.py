"""Ids of examples in a training capture: given by an argument, or hashed from content."""

import pytest
import torch
from capturing import F64, language_batch, mlp, pair, tiny_llama
from torch import nn

from gradtrail import HookManager, example_id
from gradtrail.hooks import batch_ids
from gradtrail.hooks.examples import ExampleIds

LENGTHS = (6, 4, 5, 1)


def raw(batch, row):
    """The item that a row of a padded batch was made from."""
    mask = batch["attention_mask"][row].bool()
    return {name: batch[name][row][mask].tolist() for name in ("input_ids", "labels")}


class Tagged(nn.Module):
    """Takes an id and a second field beside its input."""

    def __init__(self):
        super().__init__()
        self.inner = mlp(4, 3)

    def forward(self, x, ids=None, note=None, *, extra=None):
        del ids, note
        return self.inner(x) if extra is None else self.inner(x + extra)


def ids_of(model, *args, **kwargs):
    options = kwargs.pop("options", {})
    manager = HookManager(model, **options)
    with manager.collect():
        model(*args, **kwargs).sum().backward()
    return manager.last.ids


# ---------------------------------------------------------------- padding


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
def test_ids_do_not_depend_on_padding_and_equal_those_of_the_raw_items(left):
    batch = language_batch(LENGTHS, left=left)
    wide = {
        name: nn.functional.pad(value, (3, 0) if left else (0, 3), value=fill)
        for (name, value), fill in zip(batch.items(), (7, 0, -100), strict=True)
    }
    ids = batch_ids(batch, 4)
    assert len(set(ids)) == 4
    assert batch_ids(wide, 4) == ids
    assert ids == tuple(example_id(raw(batch, row)) for row in range(4))


def test_ids_of_a_captured_step_are_those_of_the_raw_items():
    model = tiny_llama().eval()
    for left in (False, True):
        batch = language_batch(LENGTHS, left=left)
        manager = HookManager(model)
        with manager.collect():
            model(**batch).loss.backward()
        assert manager.last.ids == tuple(example_id(raw(batch, row)) for row in range(4))


def test_ids_do_not_depend_on_the_batch_or_its_order():
    batch = language_batch(LENGTHS)
    ids = batch_ids(batch, 4)
    order = [2, 0, 3]
    assert batch_ids({k: v[order] for k, v in batch.items()}, 3) == tuple(ids[o] for o in order)
    alone = {k: v[1:2, :4] for k, v in batch.items()}
    assert batch_ids(alone, 1) == ids[1:2]


def test_padding_that_hides_a_token_is_no_padding():
    """A mask with a hole takes the position out, whatever stands there."""
    batch = language_batch((6,))
    other = {name: value.clone() for name, value in batch.items()}
    other["input_ids"][0, 2] += 1
    assert batch_ids(batch, 1) != batch_ids(other, 1)
    for one in (batch, other):
        one["attention_mask"][0, 2] = 0
        one["labels"][0, 2] = -100
    assert batch_ids(batch, 1) == batch_ids(other, 1)


def test_rows_without_any_valid_position():
    batch = language_batch((3, 3))
    batch["attention_mask"][0] = 0
    first, second = batch_ids(batch, 2)
    nothing = torch.zeros(0, dtype=torch.long)
    assert first == example_id({"input_ids": nothing, "labels": nothing})
    assert first != second


# ---------------------------------------------------------------- what is in the digest


def test_fields_are_separated_and_typed():
    def one(**fields):
        return example_id(fields)

    assert one(a=[1, 2], b=[3]) != one(a=[1], b=[2, 3])
    assert one(a=[1, 2]) != one(b=[1, 2])
    assert one(a=[1, 2]) != one(a=[[1], [2]])
    assert one(a=[0, 0]) != one(a=torch.zeros(2, dtype=F64))  # the same bytes
    assert one(a=torch.tensor([1], dtype=torch.int32)) != one(a=torch.tensor([1]))
    assert one(a=[1], b=[1]) == one(b=[1], a=[1])
    assert one(a=[1], text="not a tensor") == one(a=[1])
    assert one(a=[0.0]) == one(a=torch.zeros(1))


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bfloat16,
        torch.float16,
        torch.float32,
        F64,
        torch.int8,
        torch.uint8,
        torch.int64,
        torch.bool,
    ],
    ids=str,
)
def test_every_dtype_hashes(dtype):
    x = torch.tensor([[0, 1, 3], [1, 1, 0]]).to(dtype)
    first, second = batch_ids({"0": x}, 2)
    assert first != second
    assert example_id(x[0]) == first
    assert example_id(x[0].clone()[:2]) != first


def test_views_and_strides_hash_as_what_they_show():
    x = torch.randn(4, 6, dtype=F64)
    assert batch_ids({"0": x.t().contiguous().t()}, 4) == batch_ids({"0": x}, 4)
    assert batch_ids({"0": x[:, ::2]}, 4) == batch_ids({"0": x[:, ::2].clone()}, 4)
    assert batch_ids({"0": x.requires_grad_()}, 4) == batch_ids({"0": x.detach()}, 4)


def test_low_precision_inputs_hash_in_a_captured_step():
    model, (x, _) = mlp(4, 3).bfloat16(), pair(3, 4)
    ids = ids_of(model, x.bfloat16())
    assert ids == tuple(example_id(row.bfloat16()) for row in x)


# ---------------------------------------------------------------- sample_hash_fields


def test_hash_fields_by_name_and_by_position():
    model, (x, _) = Tagged().double(), pair(3, 4)
    note = torch.arange(3)
    everything = ids_of(model, x, None, note)
    by_place = ids_of(model, x, None, note, options={"sample_hash_fields": [0]})
    assert by_place == tuple(example_id(row) for row in x)
    assert by_place != everything
    named = ids_of(model, x, note=note, options={"sample_hash_fields": ["note"]})
    assert named == tuple(example_id({"note": value}) for value in note)
    both = ids_of(model, x, extra=x, options={"sample_hash_fields": [0, "extra"]})
    assert both == tuple(example_id({"0": row, "extra": row}) for row in x)


def test_hash_fields_of_a_language_model_leave_out_the_rest():
    batch = language_batch(LENGTHS)
    ids = batch_ids(batch, 4, ["input_ids"])
    assert ids == tuple(example_id({"input_ids": raw(batch, row)["input_ids"]}) for row in range(4))
    assert ids == tuple(example_id(raw(batch, row), ["input_ids"]) for row in range(4))


@pytest.mark.parametrize("field", ["absent", 3])
def test_hash_field_that_a_step_lacks_raises(field):
    model, (x, _) = Tagged().double(), pair(3, 4)
    manager = HookManager(model, sample_hash_fields=[0, field])
    with manager.collect(), pytest.raises(KeyError, match=rf"must name .*got \['{field}'\] beside"):
        model(x)
    with manager.collect():  # and the manager is none the worse for it
        with pytest.raises(KeyError):
            model(x)
        manager.ids = ExampleIds(None, [0])
        model(x).sum().backward()
    assert manager.steps == 1


# ---------------------------------------------------------------- sample_id_key


def test_ids_by_name_and_by_position():
    model, (x, _) = Tagged().double(), pair(3, 4)
    ids = torch.tensor([7, 3, 7])
    assert ids_of(model, x, ids=ids, options={"sample_id_key": "ids"}) == (7, 3, 7)
    assert ids_of(model, x, ids, options={"sample_id_key": 1}) == (7, 3, 7)
    names = ["a", "b", "c"]
    assert ids_of(model, x, ids=names, options={"sample_id_key": "ids"}) == ("a", "b", "c")


@pytest.mark.parametrize(
    "ids",
    [None, torch.tensor([1, 2]), torch.tensor(3), ["a"]],
    ids=["none", "two", "scalar", "one"],
)
def test_ids_that_do_not_fit_the_batch_are_refused(ids):
    model, (x, _) = Tagged().double(), pair(3, 4)
    manager = HookManager(model, sample_id_key="ids")
    with manager.collect(), pytest.raises(KeyError, match="must name an argument .* with 3 ids"):
        model(x, ids=ids)
