"""A Trainer in several processes: captured gradients and data selection are those of one."""

import pytest
import torch
from processes import Workers

pytest.importorskip("transformers")
pytest.importorskip("accelerate")


@pytest.fixture(scope="module")
def workers():
    with Workers(2, "rank_trainer") as pool:
        yield pool


def close(got, expected, name):
    got, expected = torch.tensor(got).double(), torch.tensor(expected).double()
    assert got.shape == expected.shape, name
    scale = max(float(expected.abs().max()), 1e-3)
    assert float((got - expected).abs().max()) <= 1e-6 * scale, name


def assert_as_one(workers, folder, how, **options):
    """Gradients of every step, scores and decisions are those of one process."""
    options["folder"] = str(folder)
    (one,) = workers.run("select", world=1, how="plain", **options)
    many = workers.run("select", how=how, **options)
    for found in many:
        assert len(found["steps"]) == len(one["steps"]) > 0
        for mine, theirs in zip(found["steps"], one["steps"], strict=True):
            assert mine.keys() == theirs.keys()
            for name, values in theirs.items():
                close(mine[name], values, name)
    assert len(many[0]["decisions"]) == len(one["decisions"]) > 0
    for number, (scores, dropped, ids) in enumerate(one["decisions"]):
        parts = [found["decisions"][number] for found in many]
        assert sum((part[2] for part in parts), []) == ids
        close(sum((part[0] for part in parts), []), scores, "scores")
        for layer, mask in dropped.items():
            assert sum((part[1][layer] for part in parts), []) == mask
            assert 0 < sum(mask) < len(mask)
    return many


KINDS = {
    "ddp": "DistributedDataParallel",
    "fsdp1": "FullyShardedDataParallel",
    "fully_shard": "FSDPLlamaForCausalLM",
}
wrapped = pytest.mark.parametrize(
    "how", ["ddp", *(pytest.param(how, marks=pytest.mark.slow) for how in list(KINDS)[1:])]
)


@wrapped
def test_selection_on_two_ranks(workers, tmp_path, how):
    """With accumulation, evaluation, and the mean over all ranks' kept labels of a step."""
    many = assert_as_one(workers, tmp_path, how)
    assert {found["kind"] for found in many} == {KINDS[how]}


@wrapped
@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"target": "validation"},
        {"accumulate": 1, "renormalize": False},
        {"layer_wise": True, "accumulate": 3},
        {"name": "gpt2", "target": "validation", "accumulate": 1},
    ],
    ids=["validation", "without-accumulation", "layer-wise", "gpt2"],
)
def test_selection_on_two_ranks_with(workers, tmp_path, how, options):
    if how == "fully_shard" and options.get("name") == "gpt2":
        pytest.skip("transformers has no plan to shard GPT-2")
    assert_as_one(workers, tmp_path, how, **options)


@pytest.mark.slow
def test_a_run_that_is_resumed(workers, tmp_path):
    """From a checkpoint of two ranks, selection goes on as in the run that was not interrupted."""
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "how": "ddp"}
    whole = workers.run("select", folder=str(tmp_path), **options)
    again = workers.run(
        "select", folder=str(tmp_path), resume=str(tmp_path / "checkpoint-2"), **options
    )
    for mine, theirs in zip(again, whole, strict=True):
        assert len(mine["steps"]) == 2
        assert mine["decisions"] == theirs["decisions"][4:]
        for got, expected in zip(mine["steps"], theirs["steps"][2:], strict=True):
            assert got == expected


@wrapped
def test_gradients_are_the_examples_own(workers, tmp_path, how):
    for blocks, sizes, kind in workers.run("capture", how=how, folder=str(tmp_path)):
        assert blocks == 2
        assert sizes == [4, 4]
        assert kind == KINDS[how]


def test_a_loss_that_ranks_divide_by_their_own_labels_is_not_renormalized(workers, tmp_path):
    for found in workers.try_run("own_counts", folder=str(tmp_path)):
        assert "a loss that every rank divides by the labels of all, got" in found["error"]
        assert "average_tokens_across_devices=True" in found["error"]
