"""Data sets, loaders, collation and batches of every kind a user passes."""

from collections import UserDict, namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from models import alone, build, exactly, pad_left, rows_of, text_rows, tiny
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
)

import gradtrail
from gradtrail import reference
from gradtrail.attribution.data import Rows, as_rows, move_batch, pad_rows
from gradtrail.hooks import batch_length, example_id, first_tensor, take_rows, tokens_of

TRAIN = text_rows((5, 3, 7, 1, 6))
QUERY = text_rows((4, 6, 2), seed=1)
CPU = torch.device("cpu")


def attribute(model, train, query, **options):
    with exactly():
        return gradtrail.attribute(model, train, query, progress=False, **options).values


def linear():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def pairs(count=5, seed=1):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 3, generator=generator, dtype=torch.float64)
    return [(x, row % 2) for row, x in enumerate(inputs)]


def expected(model, train, query):
    return reference.dot_products(alone(model, train), alone(model, query))


def assert_equal(got, wanted):
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-10 * float(wanted.abs().max()))


# ---------------------------------------------------------------- what is accepted


class Numbered(Dataset):
    """Has a length and rows by number, and says so if it is asked for anything else."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, number):
        if not isinstance(number, int):
            raise TypeError(f"asked for {number!r}")
        return self.rows[number]

    def __iter__(self):
        raise AssertionError("read in some order of its own")


@pytest.mark.parametrize(
    "make",
    [
        Numbered,
        tuple,
        lambda rows: Subset(rows, range(len(rows))),
        lambda rows: DataLoader(rows, batch_size=3),
        lambda rows: DataLoader(Numbered(rows), batch_size=2, drop_last=False),
        lambda rows: DataLoader(
            rows, batch_sampler=BatchSampler(SequentialSampler(rows), 2, False)
        ),
        lambda rows: DataLoader(rows, batch_size=5, drop_last=True),  # drops nothing
    ],
    ids=["Dataset", "tuple", "Subset", "DataLoader", "drop_last=False", "BatchSampler", "even"],
)
def test_data_sets_with_rows_by_number(make):
    model = linear()
    rows, query = pairs(), pairs(2, seed=2)
    assert_equal(attribute(model, make(rows), query), expected(model, rows, query))


def test_tensor_data_set():
    model = linear()
    inputs, labels = torch.stack([x for x, _ in pairs()]), torch.tensor([y for _, y in pairs()])
    got = attribute(model, TensorDataset(inputs, labels), pairs(2, seed=2))
    assert_equal(got, expected(model, pairs(), pairs(2, seed=2)))


def test_loader_keeps_its_own_collator_unless_one_is_given():
    def collate(rows):
        calls.append(len(rows))
        return torch.stack([x for x, _ in rows]), torch.tensor([y for _, y in rows])

    calls = []
    loader = DataLoader(pairs(), batch_size=2, collate_fn=collate)
    attribute(linear(), loader, pairs(2), batch_size=5)
    assert 5 in calls
    calls.clear()
    attribute(linear(), loader, pairs(2), collate_fn=torch.utils.data.default_collate)
    assert not calls


def test_loader_without_a_collator_pads_text():
    model = tiny()
    got = attribute(model, DataLoader(TRAIN, batch_size=4), QUERY)
    assert_equal(got, expected(model, TRAIN, QUERY))


class Endless(IterableDataset):
    def __iter__(self):
        return iter(pairs())


@pytest.mark.parametrize(
    ("data", "error", "match"),
    [
        (lambda rows: DataLoader(rows, shuffle=True), ValueError, "RandomSampler: row numbers"),
        (
            lambda rows: DataLoader(rows, sampler=RandomSampler(rows)),
            ValueError,
            "train must be read in order, got a DataLoader with RandomSampler",
        ),
        (
            lambda rows: DataLoader(rows, batch_sampler=[[0, 1], [4, 2]]),
            ValueError,
            "got a DataLoader with list",
        ),
        (
            lambda rows: DataLoader(rows, batch_size=2, drop_last=True),
            ValueError,
            "train must keep every row, got a DataLoader with drop_last=True",
        ),
        (
            lambda rows: DataLoader(rows, batch_size=None),
            ValueError,
            "train must give rows, got a DataLoader with batch_size=None",
        ),
        (lambda _: Endless(), TypeError, "a length and rows by number, got Endless"),
        (lambda _: DataLoader(Endless()), TypeError, "a length and rows by number, got Endless"),
        (iter, TypeError, "a length and rows by number, got list_iterator"),
        (lambda rows: dict(enumerate(rows)), TypeError, "got dict"),
        (lambda _: "rows.jsonl", TypeError, "got str. Pass a Dataset, a list"),
        (lambda _: None, TypeError, "got NoneType"),
    ],
    ids=[
        "shuffle", "sampler", "batch_sampler", "drop_last", "batch_size=None", "iterable",
        "iterable-loader", "iterator", "mapping", "string", "none",
    ],
)  # fmt: skip
def test_data_sets_that_are_refused(data, error, match):
    with pytest.raises(error, match=match):
        attribute(linear(), data(pairs()), pairs(2))


def test_refusal_names_the_argument():
    with pytest.raises(ValueError, match="query must be read in order"):
        attribute(linear(), pairs(), DataLoader(pairs(), shuffle=True))


# ---------------------------------------------------------------- rows of text


@pytest.mark.parametrize("kind", [list, torch.tensor, np.array], ids=lambda kind: kind.__name__)
def test_text_rows_of_lists_arrays_and_tensors(kind):
    model = tiny()
    rows = [{name: kind(value.tolist()) for name, value in row.items()} for row in TRAIN]
    assert_equal(attribute(model, rows, QUERY), expected(model, TRAIN, QUERY))


def test_strings_and_other_fields_are_kept_and_never_passed():
    model = tiny()
    extra = [
        {
            **row,
            "text": f"row {number}",
            "meta": {"source": number},
            "tags": ["a"] * number,
            "row_id": number,
            "when": None,
        }
        for number, row in enumerate(TRAIN)
    ]
    assert_equal(attribute(model, extra, QUERY), expected(model, TRAIN, QUERY))
    batch = as_rows(extra, "train", None, 0).batch([1, 4])
    assert batch["text"] == ["row 1", "row 4"]
    assert batch["meta"] == [{"source": 1}, {"source": 4}]
    assert batch["row_id"].tolist() == [1, 4]


def test_padding():
    rows = [
        {"input_ids": [5, 6, 7], "labels": [5, 6, 7], "score": 0.5, "token_type_ids": [1, 1, 1]},
        {"input_ids": [8], "labels": [8], "score": 2, "token_type_ids": [1]},
    ]
    batch = pad_rows(rows, 9)
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 9, 9]]
    assert batch["labels"].tolist() == [[5, 6, 7], [8, -100, -100]]
    assert batch["token_type_ids"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["score"].tolist() == [0.5, 2]


def test_mask_of_some_rows_is_kept():
    rows = [{"input_ids": [5, 6], "attention_mask": [0, 1]}, {"input_ids": [7, 8, 9]}]
    assert pad_rows(rows, 0)["attention_mask"].tolist() == [[0, 1, 0], [1, 1, 1]]
    assert pad_rows(rows[::-1], 0)["attention_mask"].tolist() == [[1, 1, 1], [0, 1, 0]]


def test_pad_id_is_the_models_own():
    model = build("llama", torch.float32)
    seen = []

    def loss(model, batch):
        seen.append(batch["input_ids"])
        return model(batch["input_ids"], batch["attention_mask"]).logits.sum((1, 2))

    model.config.pad_token_id = 2
    gradtrail.attribute(model, TRAIN, QUERY, loss=loss, progress=False)
    padding = [ids[row, -1].item() for ids in seen for row in range(len(ids))]
    assert 2 in padding
    assert 0 not in padding


def test_rows_with_a_batch_axis_are_refused():
    rows = [{name: value.unsqueeze(0) for name, value in row.items()} for row in TRAIN]
    with pytest.raises(ValueError, match=r"input_ids of one axis, one row an example, got shapes"):
        attribute(tiny(), rows, QUERY)


@pytest.mark.parametrize("kind", [list, torch.tensor], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("lengths", [(4, 0, 1), (0, 3, 5), (1, 0, 0)], ids=str)
def test_examples_without_tokens(kind, lengths):
    model = tiny()
    rows = text_rows(lengths)
    if kind is list:
        rows = [{name: value.tolist() for name, value in row.items()} for row in rows]
    got = attribute(model, rows, QUERY, batch_size=2)
    reached = [number for number, length in enumerate(lengths) if length > 1]
    assert got.isfinite().all()
    assert got.abs().sum(1).nonzero().flatten().tolist() == reached
    if reached:
        full = text_rows(lengths)
        assert_equal(got[reached], expected(model, [full[row] for row in reached], QUERY))


@pytest.mark.parametrize("name", ["gpt2", "llama", "opt", "gemma2"])
@pytest.mark.parametrize("size", [1, 3])
def test_examples_without_tokens_in_real_models(name, size):
    model, rows = build(name), text_rows((0, 4, 1))
    got = attribute(model, rows, QUERY[:1], batch_size=size)
    assert got.isfinite().all()
    assert got.abs().sum(1).nonzero().flatten().tolist() == [1]


def test_batch_encoding_rows():
    encoding = pytest.importorskip("transformers").BatchEncoding
    model = tiny()
    rows = [encoding({name: value.tolist() for name, value in row.items()}) for row in TRAIN]
    assert_equal(attribute(model, rows, QUERY), expected(model, TRAIN, QUERY))
    rows = [UserDict(row) for row in TRAIN]
    assert_equal(attribute(model, rows, QUERY), expected(model, TRAIN, QUERY))


def test_tokenizer_collators_of_transformers():
    transformers = pytest.importorskip("transformers")
    model, rows = build("gpt2", torch.float32), rows_of("gpt2")
    collator = transformers.DefaultDataCollator()
    even = [{name: value[:2] for name, value in row.items()} for row in rows]
    got = gradtrail.attribute(model, even, even[:2], collate_fn=collator, progress=False)
    own = gradtrail.attribute(model, even, even[:2], progress=False)
    torch.testing.assert_close(got.values, own.values, rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------- rows of other kinds


def test_mapping_rows_without_text():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.out = nn.Linear(3, 4), nn.Linear(2, 4)

        def forward(self, x, z):
            return {"logits": torch.tanh(self.first(x)) + self.out(z)}

    torch.manual_seed(0)
    model = Named().double()
    rows = [
        {"x": x, "z": x[:2] + 1, "labels": y, "name": f"row {y}", "unused": torch.zeros(7)}
        for x, y in pairs()
    ]
    assert_equal(attribute(model, rows, rows[:2]), expected(model, rows, rows[:2]))


def test_lone_tensors_need_a_loss():
    rows = [x for x, _ in pairs()]
    model = linear()
    with pytest.raises(
        ValueError, match="loss must be given where it cannot be inferred.*got Tensor"
    ):
        attribute(model, rows, rows)

    def loss(model, batch):
        return model(batch).square().sum(1)

    left = alone(model, rows, loss=loss)
    for data in (rows, torch.stack(rows)):
        got = attribute(model, data, rows, loss=loss, batch_size=2)
        assert_equal(got, reference.dot_products(left, left))


@dataclass(frozen=True)
class Example:
    x: torch.Tensor
    y: int
    name: str = "example"


@dataclass(frozen=True)
class Batch:
    x: torch.Tensor
    y: torch.Tensor
    names: list


Pair = namedtuple("Pair", "x y")


def collate(rows):
    return Batch(
        torch.stack([row.x for row in rows]),
        torch.tensor([row.y for row in rows]),
        [row.name for row in rows],
    )


def batch_loss(model, batch):
    return nn.functional.cross_entropy(model(batch.x), batch.y, reduction="none")


def test_dataclass_batches_need_a_collator():
    model, rows = linear(), [Example(x, y) for x, y in pairs()]
    with pytest.raises(ValueError, match=r"got Example rows \(.*Pass collate_fn"):
        attribute(model, rows, rows, loss=batch_loss)
    got = attribute(model, rows, rows, loss=batch_loss, collate_fn=collate, batch_size=2)
    assert_equal(got, expected(model, pairs(), pairs()))
    report = gradtrail.check(model, collate(rows), loss=batch_loss)
    assert report.ok
    assert report.num_examples == 4


def test_named_tuples():
    model, rows = linear(), [Pair(x, y) for x, y in pairs()]
    got = attribute(model, rows, rows, loss=batch_loss, batch_size=2)
    assert_equal(got, expected(model, pairs(), pairs()))


def test_inputs_in_a_mapping_or_tuple_beside_targets():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = nn.Linear(3, 2), nn.Linear(3, 2)

        def forward(self, a, b):
            return self.left(a) * self.right(b)

    torch.manual_seed(0)
    model = Two().double()
    by_place = [((x, x + 1), y) for x, y in pairs()]
    by_name = [({"b": x + 1, "a": x}, y) for x, y in pairs()]
    got = attribute(model, by_place, by_name)
    assert_equal(got, expected(model, by_place, by_place))


def test_rows_of_different_length_ask_for_a_collator():
    rows = [(torch.randn(length, 3).double(), 0) for length in (2, 3)]
    match = (
        "train must have rows that torch's default collator can stack, got tuple rows .*collate_fn"
    )
    with pytest.raises(ValueError, match=match):
        attribute(linear(), rows, rows[:1], loss=lambda model, batch: model(batch[0]).sum((1, 2)))


def test_labels_used_outside_the_model():
    model = tiny()

    def loss(model, batch):
        logits = model(batch["input_ids"], batch["attention_mask"])["logits"][:, :-1]
        targets = batch["labels"][:, 1:]
        values = nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
        return values.sum(1)

    assert_equal(attribute(model, TRAIN, QUERY, loss=loss), expected(model, TRAIN, QUERY))


def test_rows_are_read_in_order_and_once_a_pass():
    read = []

    class Noted(Numbered):
        def __getitem__(self, number):
            read.append(number)
            return super().__getitem__(number)

    gradtrail.self_influence(linear(), Noted(pairs(9)), batch_size=4, progress=False)
    assert read[-9:] == list(range(9))
    gradtrail.attribute(linear(), Noted(pairs(9)), pairs(2), batch_size=4, progress=False)
    assert read[-9:] == list(range(9))


# ---------------------------------------------------------------- batches


def test_moving_a_batch_keeps_its_structure():
    x = torch.randn(2, 3, requires_grad=True)
    moved = move_batch(
        {"a": x, "b": [x, "s"], "c": (x, None), "d": Pair(x, 1), "e": Batch(x, x, ["n"])}, CPU
    )
    assert not moved["a"].requires_grad
    assert isinstance(moved["b"], list)
    assert moved["b"][1] == "s"
    assert isinstance(moved["c"], tuple)
    assert isinstance(moved["d"], Pair)
    assert isinstance(moved["e"], Batch)
    assert moved["e"].names == ["n"]
    assert not moved["e"].x.requires_grad


def test_batch_made_in_inference_mode_can_be_saved():
    with torch.inference_mode():
        x = torch.ones(2, 3)
    assert not move_batch(x, CPU).is_inference()


def test_reading_a_batch():
    ids, mask = torch.zeros(2, 5, dtype=torch.long), torch.ones(2, 5)
    batch = {"attention_mask": mask, "input_ids": ids}
    assert first_tensor(batch) is ids
    assert first_tensor(["text", (None, ids)]) is ids
    assert first_tensor(Batch(mask, ids, [])) is mask
    assert first_tensor("text") is None
    assert batch_length(batch) == 2
    assert batch_length({"text": ["a"]}) is None
    assert tokens_of(batch) == 5
    assert tokens_of(torch.zeros(2, 5, 7)) == 5
    assert tokens_of(torch.zeros(2, 7)) == 1
    assert tokens_of({}) == 1


def test_taking_rows_of_a_batch():
    batch = {
        "x": torch.arange(6).view(3, 2),
        "names": ["a", "b", "c"],
        "scale": torch.tensor(2.0),
        "pair": (torch.arange(3), torch.arange(3) + 10),
        "nested": Pair(torch.arange(3), "kept"),
    }
    taken = take_rows(batch, [2, 0, 2])
    assert taken["x"].tolist() == [[4, 5], [0, 1], [4, 5]]
    assert taken["names"] == ["c", "a", "c"]
    assert taken["scale"] == 2
    assert taken["pair"][1].tolist() == [12, 10, 12]
    assert taken["nested"].x.tolist() == [2, 0, 2]
    assert taken["nested"].y == "kept"


def test_rows_make_batches():
    rows = Rows(list(range(7)), lambda numbers: numbers)
    assert list(rows.batches(3)) == [(0, 3, [0, 1, 2]), (3, 3, [3, 4, 5]), (6, 1, [6])]
    assert list(Rows([], list).batches(3)) == []


def test_digest_of_data_does_not_depend_on_padding_or_batches():
    model = tiny()
    options = [
        gradtrail.attribute(model, TRAIN, QUERY, progress=False, **how).options
        for how in ({}, {"batch_size": 2}, {"collate_fn": pad_left})
    ]
    assert len({each["train_digest"] for each in options}) == 1
    assert example_id(TRAIN[0]) != example_id(TRAIN[1])
