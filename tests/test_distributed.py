"""Many processes: shares, sums, joined tensors, and errors that reach every rank in time."""

import math

import pytest
import torch
from processes import Workers

from gradtrail.distributed import (
    agree,
    barrier,
    broadcast_json,
    cost_shards,
    gather_json,
    gather_rows,
    guarded,
    merge_topk,
    rank,
    reduce_sum,
    shard_of,
    world_size,
)


@pytest.fixture(scope="module")
def workers():
    with Workers(3, "rank_checks") as pool:
        yield pool


# ---------------------------------------------------------------- one process


@pytest.mark.parametrize("count", [0, 1, 2, 3, 9, 16, 17])
@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_shares_are_contiguous_and_whole(count, world):
    shares = [shard_of(count, place, world) for place in range(world)]
    assert [row for share in shares for row in share] == list(range(count))
    sizes = [len(share) for share in shares]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("count", "place", "world"), [(-1, 0, 1), (3, 2, 2), (3, -1, 2), (3, 0, 0)]
)
def test_shares_that_do_not_exist(count, place, world):
    with pytest.raises(ValueError, match=f"got {count} rows and rank {place} of {world}"):
        shard_of(count, place, world)


def test_costs_are_spread():
    costs = [5.0, 1.0, 1.0, 4.0, 3.0, 2.0, 0.0]
    shares = cost_shards(costs, 3)
    assert sorted(piece for share in shares for piece in share) == list(range(7))
    loads = [math.fsum(costs[piece] for piece in share) for share in shares]
    assert max(loads) == 6
    assert cost_shards(costs, 1) == [list(range(7))]
    assert cost_shards([], 2) == [[], []]
    assert cost_shards([0.0, 0.0, 0.0], 2) == [[0, 2], [1]]


def test_one_process_needs_no_group():
    assert (rank(), world_size()) == (0, 1)
    total, rows = torch.ones(2), torch.randn(3, 2)
    with guarded("scoring"):
        reduce_sum([total])
        barrier("end")
        agree("method", "ekfac")
    assert total.tolist() == [1, 1]
    assert gather_rows(rows) is rows
    assert gather_rows(rows, to="rank0") is rows
    assert gather_json({"a": (1, 2)}) == [{"a": [1, 2]}]
    assert broadcast_json("x") == "x"
    values, index = merge_topk(torch.tensor([[1.0], [3.0]]), torch.tensor([[5], [2]]), 1)
    assert (values.tolist(), index.tolist()) == ([[3.0]], [[2]])
    with pytest.raises(ValueError, match="is odd"), guarded("scoring"):
        raise ValueError("is odd")
    with pytest.raises(ValueError, match="to must be one of 'all', 'rank0', got 'some'"):
        gather_rows(rows, to="some")
    with pytest.raises(TypeError, match="must be summed over ranks in float32"):
        reduce_sum([torch.zeros(2).half()])


# ---------------------------------------------------------------- several processes


@pytest.mark.parametrize("world", [2, 3])
def test_ranks(workers, world):
    assert workers.run("numbers", world=world) == [[place, world] for place in range(world)]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_sums(workers, world):
    workers.run("sums", world=world)


def test_sums_need_a_wide_dtype(workers):
    for found in workers.run("refused_sums"):
        assert len(found) == 3
        assert found[0].startswith("covariances must be summed over ranks in float32, float64")


def test_sums_of_other_shapes_are_refused(workers):
    for found in workers.try_run("sums_of_other_shapes", world=3):
        assert "RankError: Ranks must come to the same place" in found["error"]
        assert "shapes of covariances: 1 tensors, 2 entries" in found["error"]


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("to", ["all", "rank0"])
def test_rows_come_back_in_order(workers, world, to):
    for count in (0, 1, 2, 9, 16):
        for dtype in ("float64", "bfloat16", "bool", "int64"):
            sizes = workers.run("rows", world=world, count=count, dtype=dtype, to=to)
            assert sum(sizes) == count


def test_rows_of_other_width_are_refused(workers):
    for found in workers.try_run("rows_of_other_width"):
        assert "width of scores: torch.float32 (3,)" in found["error"]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_values(workers, world):
    workers.run("values", world=world)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_best_rows_of_a_matrix_nobody_holds(workers, world):
    for count, k in ((0, 2), (1, 2), (7, 3), (16, 4), (5, 9)):
        for largest in (True, False):
            workers.run("best", world=world, count=count, k=k, largest=largest)


def test_options_must_agree(workers):
    workers.run("same_options", world=3)
    for found in workers.try_run("other_options", world=3):
        assert found["error"] == (
            "ValueError: batch_size must be the same on every rank, got 4 on rank 0, 5 on rank 1, "
            "4 on rank 2."
        )


# ---------------------------------------------------------------- errors


def test_a_collective_that_only_some_ranks_take(workers):
    for found in workers.try_run("other_places", world=3):
        assert found["error"] == (
            "RankError: Ranks must come to the same place of the program, got rank 0 at 'writing "
            "the fit', rank 1 at 'gathered values', rank 2 at 'gathered values'."
        )


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("failing", [[0], [1], [0, 1]])
def test_error_on_some_ranks_reaches_all(workers, world, failing):
    found = workers.try_run("error_in_a_section", world=world, failing=failing, batch=2)
    first = failing[0]
    for place, answer in enumerate(found):
        if place in failing:
            assert answer["error"] == f"ValueError: row 2 of rank {place} is odd"
        else:
            assert answer["error"] == (
                f"RankError: Rank {first} failed in scoring: ValueError: row 2 of rank {first} is "
                "odd"
            )


def test_error_after_the_last_collective_reaches_all(workers):
    found = workers.try_run("error_at_the_end", world=3)
    assert found[1]["error"].startswith("OSError: [Errno 28]")
    for place in (0, 2):
        assert "Rank 1 failed in writing: OSError: [Errno 28] No space" in found[place]["error"]


def test_error_leaves_the_group_usable(workers):
    assert workers.run("error_that_leaves_the_group_usable", world=3) == [3, 3, 3]


def test_an_error_of_every_rank_leaves_the_group_usable_where_the_model_communicates(workers):
    found = workers.run("error_of_every_rank", world=3)
    assert found == [["an option is odd", "an option is odd", 9.0]] * 3


@pytest.mark.parametrize(
    "check", ["error_where_the_model_communicates", "error_after_the_others_have_ended"]
)
@pytest.mark.parametrize("world", [2, 3])
def test_error_where_the_model_communicates(workers, check, world):
    found = workers.try_run(check, world=world)
    assert found[1]["error"] == "ValueError: row 2 is odd"
    for place in range(world):
        if place != 1:
            assert found[place]["error"] == (
                "RankError: Rank 1 failed in scoring: ValueError: row 2 is odd"
            )


def test_error_of_a_process_that_ends(workers):
    found = workers.try_run("error_and_exit", lost=(1,))
    text = "RankError: Rank 1 failed in scoring: ValueError: row 2 is odd"
    assert found[0]["error"] == text


@pytest.mark.parametrize("model_communicates", [False, True])
@pytest.mark.parametrize("world", [2, 3])
def test_killed_process(workers, world, model_communicates):
    last = world - 1
    options = {"model_communicates": model_communicates}
    found = workers.try_run("killed", world=world, lost=(last,), **options)
    for answer in found[:last]:
        assert f"must reach all {world}, got a lost connection" in answer["error"]


@pytest.mark.parametrize("how", ["fsdp1", "fully_shard"])
def test_error_inside_fsdp(workers, how):
    found = workers.try_run("error_inside_fsdp", lost=(1,), how=how)
    text = "RankError: Rank 1 failed in scoring: ValueError: row 2 is odd"
    assert found[0]["error"] == text
