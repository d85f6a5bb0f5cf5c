"""Methods beside the curvature family divide their work among processes and give what one gives."""

import json

import pytest
import rank_methods as checks
from processes import MODELS, WRAPPED, Workers, assert_near

from gradtrail import StoreError
from gradtrail.store import GradientStore


@pytest.fixture(scope="module")
def workers():
    with Workers(3, "rank_methods", MODELS) as started:
        yield started


KNOWN = {}


def expected(name, calls):
    """What one process gives, computed once for each call."""
    missing = [call for call in calls if json.dumps([name, call]) not in KNOWN]
    found = checks.scores(name, "plain", per_block=False, calls=missing) if missing else []
    for call, one in zip(missing, found, strict=True):
        KNOWN[json.dumps([name, call])] = one
    return [KNOWN[json.dumps([name, call])] for call in calls]


def assert_same(found, wanted):
    """Every rank has every result that one process has."""
    for rank in found:
        for got, one in zip(rank, wanted, strict=True):
            if not got or isinstance(got[0], float):
                assert_near(got, one)
            elif len(got) == 3 and isinstance(got[2], list):  # the best of each query
                assert got[0] == one[0]
                assert got[2] == one[2]
                assert_near(got[1], one[1])
            else:
                assert_near(got[0], one[0])
                assert got[1:] == one[1:]


# ---------------------------------------------------------------- trak and less, with a model

TRAK = {"method": "trak", "projection": 3}
LIVE = [
    {**TRAK, "n": 9},
    {**TRAK, "n": 2},  # fewer rows than ranks
    {**TRAK, "n": 3, "q": 0},
    {**TRAK, "n": 5, "alone": True},
    {"method": "less", "n": 5},
    {"method": "less", "n": 2},
    {"method": "less", "n": 4, "alone": True},
]
MORE = [
    {**TRAK, "n": 16, "batch_size": 4, "damping": 0.3},
    {**TRAK, "n": 0},
    {**TRAK, "n": 1, "alone": True},
    {"method": "trak", "n": 16, "projection": {"kind": "dense", "dim": 5}, "batch_size": 1},
    {"method": "trak", "n": 9, "projection": {"kind": "mask", "dim": 9}},
    {"method": "less", "n": 0},
    {"method": "less", "n": 9, "q": 0},
    {"method": "less", "n": 16, "batch_size": 4, "form": "snapshot"},
    {"method": "less", "n": 9, "projection": {"kind": "dense", "dim": 7}},
    {"method": "less", "n": 16, "projection": 3, "batch_size": 1},
    {**TRAK, "n": 9, "checkpoints": 2},
    {"method": "less", "n": 9, "checkpoints": 2},
]
OPTIONS = [
    *MORE[-2:],
    {**TRAK, "n": 9, "gradient_cache_residency": "memory"},
    {**TRAK, "n": 5, "granularity": "token", "exclude": ["*wte", "*wpe", "*ln_*"]},
    {"method": "less", "n": 9, "gradient_cache_residency": "memory"},
]


@pytest.mark.parametrize(
    ("how", "per_block", "world"),
    [("plain", False, 3), ("ddp", False, 2), ("fsdp1", True, 3), ("fully_shard", True, 2)],
)
def test_scores_are_those_of_one_process(workers, how, per_block, world):
    given = {"name": "gpt2", "calls": LIVE}
    found = workers.run("scores", world=world, how=how, per_block=per_block, limit=90, **given)
    assert_same(found, expected(**given))


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize(("how", "per_block"), WRAPPED)
def test_scores_are_those_of_one_process_throughout(workers, name, how, per_block, world):
    calls = [*LIVE, *MORE] if world == 1 else MORE
    given = {"name": name, "calls": calls}
    found = workers.run("scores", world=world, how=how, per_block=per_block, limit=240, **given)
    assert_same(found, expected(**given))


@pytest.mark.parametrize(
    "how", ["plain", *(pytest.param(how, marks=pytest.mark.slow) for how in ("ddp", "fsdp1"))]
)
def test_options(workers, how):
    given = {"name": "gpt2", "calls": OPTIONS}
    found = workers.run("scores", world=3, how=how, per_block=True, limit=90, **given)
    assert_same(found, expected(**given))


@pytest.mark.parametrize(("how", "per_block"), [WRAPPED[0], WRAPPED[5]])
def test_scores_for_rank_0_alone(workers, how, per_block):
    calls = [{"method": "less", "n": 2}, {**TRAK, "n": 2}]
    given = {"name": "gpt2", "calls": [{**call, "gather": "rank0"} for call in calls]}
    first, *others = workers.run("scores", world=3, how=how, per_block=per_block, **given)
    assert_same([first], expected("gpt2", calls))
    assert others == [[None, None]] * 2


def test_an_optimizers_file_is_read_by_every_rank(workers, tmp_path):
    given = {"name": "gpt2", "calls": [{"method": "less", "n": 5, "form": str(tmp_path)}]}
    found = workers.run("scores", world=2, how="fsdp1", per_block=True, **given)
    assert len(list(tmp_path.iterdir())) == 2
    assert_same(found, expected(**given))


def test_a_part_of_a_model_in_ddp_communicates_nothing(workers):
    """Ranks run it unequally often: the first has a row more."""
    given = {"n": 3, "methods": [{**TRAK, "projection": 2}, {"method": "ekfac"}]}
    found = workers.run("partly_wrapped", world=2, **given)
    assert_same(found, checks.partly_wrapped(wrapped=False, **given))


# ---------------------------------------------------------------- trak from stores

READS = [
    {"method": "trak"},
    {"method": "trak", "batch_size": 5},
    {"method": "trak", "top_k": 4},
    {"method": "trak", "alone": True},
]


@pytest.mark.parametrize("n", [9, 2])
def test_stored_features(workers, n, tmp_path):
    checks.write("gpt2", str(tmp_path / "one"), n, projection=3)
    workers.run("write", world=3, name="gpt2", folder=str(tmp_path / "many"), n=n, projection=3)
    wanted = checks.read(str(tmp_path / "one"), READS)
    for world in (2, 3)[n == 2 :]:
        found = workers.run("read", world=world, folder=str(tmp_path / "many"), calls=READS)
        assert_same(found, wanted)
    assert_same([checks.read(str(tmp_path / "many"), READS)], wanted)


# ---------------------------------------------------------------- search

SEARCHES = [
    {"k": 5},
    {"k": 40},
    {"k": 3, "normalize": "both"},
    {"k": 4, "budget": 60},
    {"k": 2, "selected_steps": [0, 2]},
]


@pytest.mark.parametrize(
    ("train", "query"),
    [([3, 4, 1, 6, 2, 5, 7], [2, 3, 1]), ([2], [3]), ([1, 1, 1], [1])],
    ids=["many", "one block", "single rows"],
)
def test_search_finds_what_one_process_finds(workers, train, query):
    """Scores are whole numbers, of which many are equal: the first rows come first everywhere."""
    calls = [call for call in SEARCHES if "selected_steps" not in call or len(train) > 2]
    given = {"train": train, "query": query, "calls": calls}
    wanted = checks.searched(**given)
    for world in (2, 3):
        assert workers.run("searched", world=world, **given) == [wanted] * world


def test_scores_of_a_search_are_the_same_bits(workers):
    """A row is in the batch that one process puts it in: in others its products round otherwise."""
    given = {"train": [1] * 13, "query": [3], "calls": [{"k": 13}], "whole": False}
    wanted = checks.searched(**given)
    for world in (2, 3):
        assert workers.run("searched", world=world, **given) == [wanted] * world


def test_equal_scores_are_in_the_order_of_rows():
    train, query = [3, 4, 1, 6, 2, 5, 7], [2, 3, 1]
    with checks.numbered(train, 1) as one, checks.numbered(query, 2) as other:
        rows, columns = (store.get(range(len(store))).layers["layer"] for store in (one, other))
    table = rows.values_bd @ columns.values_bd.T
    order = table.argsort(dim=0, descending=True, stable=True)
    for batch_size in (1, 4, None):
        calls = [{"k": k, "batch_size": batch_size} for k in (1, 5, 28, 40)]
        for call, found in zip(calls, checks.searched(train, query, calls), strict=True):
            assert found[0] == order[: call["k"]].T.tolist()


def test_a_search_of_no_queries(workers):
    given = {"train": [3, 2], "query": [], "calls": [{"k": 2}]}
    for found in workers.run("searched", world=2, **given):
        assert found == [[[], [], []]]


def test_other_stores_in_memory_are_refused(workers):
    for found in workers.try_run("search_other_rows", world=2):
        assert "ValueError: train_store must be the same on every rank" in found["error"]


# ---------------------------------------------------------------- preconditioned queries


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("stores"))
    checks.write("gpt2", folder, 9, method="ekfac")
    return folder


@pytest.mark.parametrize("method", ["kfac", "ekfac"])
@pytest.mark.parametrize("world", [2, 3])
def test_every_rank_stores_its_preconditioned_queries(workers, stores, method, world, tmp_path):
    given = {"folder": stores, "method": method}
    one = checks.precondition(out=str(tmp_path / "one"), **given)
    out = str(tmp_path / "many")
    many = workers.run("precondition", world=world, out=out, **given)
    for found in many:
        assert found[0] == "read"
        assert found[1] == one[1]
        assert_near(found[2], one[2])
        assert found[3] == one[3]
    assert one[4] == {"kfac": 0, "ekfac": 9}[method]  # covariances lie beside the gradients
    assert sum(found[4] for found in many) == one[4]  # each fits on its share
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "many").iterdir()}
    shards = {path.name[:4] for path in files if path.suffix == ".safetensors"}
    assert shards == {"0000", "0001"}  # three queries in two blocks
    again = [checks.precondition(out=out, **given)]
    again += workers.run("precondition", world=5 - world, out=out, **given)
    for found in again:
        assert found[0] == "read"
        assert_near(found[2], one[2])
    after = {path: path.stat().st_mtime_ns for path in (tmp_path / "many").iterdir()}
    assert after == files


@pytest.mark.parametrize("given", [True, False], ids=["a store", "in memory"])
def test_a_store_for_preconditioned_queries_is_given(workers, stores, given, tmp_path):
    one = checks.precondition(stores, str(tmp_path / "one"), "kfac")
    place = {"out": str(tmp_path / "many"), "given": True} if given else {"out": "memory"}
    for found in workers.run("precondition", world=2, folder=stores, method="kfac", **place):
        assert found[0] == ("read" if given else "create")
        assert found[1] == one[1]
        assert_near(found[2], one[2])
        assert found[3] == one[3]


@pytest.mark.parametrize("then", [1, 2, 3])
def test_preconditioned_queries_go_on_after_an_error(workers, stores, then, tmp_path):
    one = checks.precondition(stores, str(tmp_path / "one"), "ekfac")
    given = {"folder": stores, "method": "ekfac", "out": str(tmp_path / "many")}
    failed = workers.try_run("precondition", world=2, fails_at=2, limit=20, **given)
    assert failed[1]["error"] == "OSError: row 2 cannot be read"
    assert "Rank 1 failed in cache_preconditioned_query: OSError: row 2" in failed[0]["error"]
    with GradientStore(tmp_path / "many", mode="read") as store:
        assert len(store) < 3
    for found in workers.run("precondition", world=then, **given):
        assert found[1] == one[1]
        assert_near(found[2], one[2])


@pytest.mark.parametrize("world", [1, 2])
def test_the_same_processes_go_on_after_an_error(workers, stores, world, tmp_path):
    """What was written to is closed, though the error and with it the store are still alive."""
    one = checks.precondition(stores, str(tmp_path / "one"), "kfac")
    given = {"folder": stores, "method": "kfac", "out": str(tmp_path / "again"), "fails_at": 2}
    for found in workers.run("precondition_again", world=world, **given):
        assert "OSError: row 2" in found[0] or found[0] == "row 2 cannot be read"
        assert found[1] == one[1]
        assert_near(found[2], one[2])


def test_queries_without_numbers_keep_their_order(workers, stores, tmp_path):
    given = {"folder": stores, "out": str(tmp_path), "method": "kfac"}
    assert workers.run("of_training", world=2, **given) == ["read"] * 2
    wanted = checks.precondition(stores, str(tmp_path / "one"), "kfac")[2]
    for found in workers.run("go_on", world=3, **given):  # rank 0 has stored its share
        assert found[0] == ["row 0", "row 1", "row 2"]
        assert_near(found[1], wanted)


# ---------------------------------------------------------------- records of a training

FOLLOWED = [
    {"method": "less"},
    {"method": "less", "selected_steps": [1, 3]},
    {"method": "less", "selected_steps": [2]},  # fewer steps than ranks
    {"method": "adamw"},
    {"method": "adamw", "direction": "train"},
    {"method": "adamw", "masks": 2, "mask_dim": 4, "mask_seed": 3},
    {"method": "adamw", "direction": "train", "selected_steps": [1, 4]},
    {"method": "dvemb"},
    {"method": "dvemb", "direction": "train"},
    {"method": "dvemb", "curvature": "block_diagonal", "weight_decay": True},
    {"method": "dvemb", "top_k": 3},
]
REPLAYED = [
    {"method": "less", "replay": True},
    {"method": "adamw", "replay": True},
    {"method": "dvemb", "direction": "train", "replay": True, "selected_steps": [0, 3]},
]


@pytest.mark.parametrize(("queries", "world"), [(3, 2), (4, 3), (1, 3), (0, 2)])
def test_records_of_a_training(workers, queries, world, tmp_path):
    given = {"calls": FOLLOWED, "queries": queries}
    wanted = checks.followed(str(tmp_path / "one"), **given)
    found = workers.run("followed", world=world, folder=str(tmp_path / "many"), **given)
    for rank in found:
        for call, got, one in zip(FOLLOWED, rank, wanted, strict=True):
            if "top_k" in call:
                assert got[0] == one[0]
                assert_near(got[1], one[1])
            else:
                assert_near(got[0], one[0])
                assert got[1] == one[1]


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "ddp"])
def test_replayed_steps(workers, wrapped, tmp_path):
    wanted = checks.followed(str(tmp_path / "one"), REPLAYED)
    found = workers.run(
        "followed", world=2, folder=str(tmp_path / "many"), calls=REPLAYED, wrapped=wrapped
    )
    for rank in found:
        for got, one in zip(rank, wanted, strict=True):
            assert_near(got[0], one[0])
            assert got[1] == one[1]


TOGETHER = ["less", "adamw", "dvemb"]


@pytest.mark.parametrize(
    ("how", "accumulation"), [("ddp", 1), ("ddp", 2), ("fsdp1", 1), ("fully_shard", 2)]
)
def test_a_training_in_two_processes_is_one_on_the_joined_batch(
    workers, how, accumulation, tmp_path
):
    """Each records its own examples, whose gradients are averaged over the processes."""
    given = {"accumulation": accumulation, "methods": TOGETHER}
    # in one process as many rows are a backward as both have together
    wanted = checks.trained_together(str(tmp_path / "one"), "plain", **given)
    found = workers.run("trained_together", folder=str(tmp_path / "two"), how=how, **given)
    for rank in found:
        for got, one in zip(rank, wanted, strict=True):
            assert got[1] == one[1]
            assert_near(got[0], one[0])


def test_batches_of_two_processes_are_run_again(workers, tmp_path):
    """The replayed steps are those of one process on the joined batch."""
    given = {"methods": ["less", "adamw", "dvemb"]}
    wanted = checks.replayed_together(str(tmp_path / "one"), "plain", **given)
    found = workers.run("replayed_together", folder=str(tmp_path / "two"), how="ddp", **given)
    for rank in found:
        for got, one in zip(rank, wanted, strict=True):
            assert got[1] == one[1]
            assert_near(got[0], one[0])


def test_processes_that_do_not_train_together_are_refused(workers, tmp_path):
    for found in workers.try_run("two_optimizers", folder=str(tmp_path)):
        assert "optimizer_states must be of one optimizer, got 2 processes" in found["error"]


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(("method", "failing"), [("less", 1), ("adamw", 0)])
def test_records_of_another_run_are_refused_on_every_rank(workers, method, failing, tmp_path):
    """The last step is read by the last rank for ``less``; both read it for ``adamw``."""
    found = workers.try_run(
        "followed_of_another_run", world=2, folder=str(tmp_path), method=method, limit=20
    )
    text = "ValueError: train_store and optimizer_states must be of one run"
    assert found[failing]["error"].startswith(text)
    assert text in found[1 - failing]["error"]
    if method == "less":
        assert "Rank 1 failed in attribute_from_cache" in found[0]["error"]


CALLS = {"trak": TRAK, "less": {"method": "less"}}


@pytest.mark.parametrize("method", list(CALLS))
@pytest.mark.parametrize("how", ["plain", "ddp"])
def test_an_error_in_the_third_batch_of_one_rank_is_everybodys(workers, how, method):
    found = workers.try_run("failing", name="gpt2", how=how, call=CALLS[method], at=13, limit=20)
    assert found[1]["error"] == "OSError: row 13 cannot be read"
    assert "RankError: Rank 1 failed in attribute: OSError: row 13 cannot" in found[0]["error"]


@pytest.mark.parametrize("method", list(CALLS))
@pytest.mark.parametrize("how", ["fsdp1", "fully_shard"])
def test_an_error_of_one_rank_that_others_wait_for(workers, how, method):
    given = {"name": "gpt2", "how": how, "call": CALLS[method], "at": 13}
    found = workers.try_run("failing_and_exit", limit=20, lost=[1], **given)
    assert "RankError: Rank 1 failed in attribute: OSError: row 13 cannot" in found[0]["error"]


def test_a_method_that_needs_all_rows_is_refused(workers):
    for found in workers.try_run("refused", world=2):
        assert "method must be one that shares training examples between" in found["error"]
        assert "got 'Alone' with 2 processes. Set shares_rows=True" in found["error"]


@pytest.mark.parametrize("method", ["adamw", "dvemb"])
def test_a_fixed_model_is_refused_by_methods_of_a_training(workers, method):
    calls = [{"method": method, "n": 4}]
    given = {"name": "gpt2", "how": "plain", "per_block": False, "calls": calls}
    for found in workers.try_run("scores", world=2, **given):
        assert f"method must score a fixed model, got '{method}'" in found["error"]


def test_features_that_cannot_be_solved_with_are_everybodys_error(workers):
    calls = [{**TRAK, "n": 3, "damping": 0.0}]
    given = {"name": "gpt2", "how": "plain", "per_block": False, "calls": calls}
    for found in workers.try_run("scores", world=2, **given):
        assert "CurvatureError: damping must make the" in found["error"]
        assert "got 0.0 with 3 training examples" in found["error"]


def test_optimizers_that_differ_are_refused(workers):
    for found in workers.try_run("other_optimizers", world=2):
        assert "ValueError: optimizer_states must be the same on every rank" in found["error"]


def test_one_process_cannot_go_on_with_blocks_of_others(stores, tmp_path):
    """Rows under ids that are no numbers lie in the order in which they were stored."""
    train, query = checks.opened(stores)
    unnumbered = checks.copied(query)
    whole = checks.cache_preconditioned_query(train, unnumbered, tmp_path / "whole", progress=False)
    part = GradientStore(residency="memory")
    part.define(**checks.dataclasses.asdict(whole.facts))
    second = list(whole.blocks())[1]
    part.append(second.block, meta=second.meta)
    with pytest.raises(StoreError, match="store in memory must be gone on with by as many proc"):
        checks.cache_preconditioned_query(train, unnumbered, part, progress=False)
