"""Attribution in many processes gives, on every rank, what one process gives."""

import itertools
import json

import pytest
import rank_attribution as checks
from processes import MODELS, WRAPPED, Workers, assert_near

from gradtrail.store import GradientStore

METHODS = ("graddot", "kfac", "ekfac")


def crossed(methods, counts, batches, **options):
    return [
        {"method": method, "n": n, "batch_size": batch, **options}
        for method, n, batch in itertools.product(methods, counts, batches)
    ]


@pytest.fixture(scope="module")
def workers():
    with Workers(3, "rank_attribution", MODELS) as started:
        yield started


KNOWN = {}


def expected(name, calls):
    """What one process gives, computed once for each call."""
    found = []
    for call in calls:
        key = json.dumps([name, call], sort_keys=True)
        if key not in KNOWN:
            (KNOWN[key],) = checks.scores_of(checks.model_of(name), [call], name=name)
        found.append(KNOWN[key])
    return found


def assert_same(found, wanted, *, digests=True):
    """Every rank has every set of scores that one process has."""
    for rank in found:
        for got, one in zip(rank, wanted, strict=True):
            if isinstance(one[0], float):
                assert_near(got, one)
                continue
            for mine, theirs in zip(got, one, strict=True):
                assert_near(mine["values"], theirs["values"])
                assert mine["ids"] == theirs["ids"]
                assert mine["lengths"] == theirs["lengths"]
                if digests:
                    assert mine["digests"] == theirs["digests"]


# ---------------------------------------------------------------- live


@pytest.mark.parametrize(
    ("how", "per_block", "world"),
    [
        ("plain", False, 3),
        ("ddp", False, 2),
        ("fsdp1", True, 2),
        ("fsdp1", False, 3),
        ("fully_shard", False, 2),
        ("fully_shard", True, 3),
        pytest.param("no_shard", True, 2, marks=pytest.mark.slow),
    ],
)
def test_scores_are_those_of_one_process(workers, how, per_block, world):
    calls = [
        *crossed(METHODS, [9], [2]),
        {"method": "ekfac", "n": 16, "batch_size": 4},
        {"method": "graddot", "n": 9, "batch_size": 1},
    ]
    found = workers.run(
        "scores", world=world, name="gpt2", how=how, per_block=per_block, calls=calls
    )
    assert_same(found, expected("gpt2", calls))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize(("how", "per_block"), WRAPPED)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_scores_are_those_of_one_process_throughout(workers, name, how, per_block, world):
    calls = crossed(METHODS, [9, 16], [1, 2, 4])
    found = workers.run(
        "scores", world=world, name=name, how=how, per_block=per_block, calls=calls, limit=120
    )
    assert_same(found, expected(name, calls))


UNEVEN = [
    *crossed(METHODS, [0, 1, 2], [2]),
    *crossed(METHODS, [3], [2], q=0),
    {"method": "kfac", "n": 1, "alone": True},
]


@pytest.mark.parametrize(("how", "per_block"), [WRAPPED[0], WRAPPED[3], WRAPPED[5]])
def test_fewer_rows_than_ranks_and_no_queries(workers, how, per_block):
    found = workers.run("scores", world=3, name="gpt2", how=how, per_block=per_block, calls=UNEVEN)
    assert_same(found, expected("gpt2", UNEVEN))


OPTIONS = {
    "cosine": {"method": "gradcos"},
    "positions": {"method": "graddot", "granularity": "token"},
    "positions of ekfac": {"method": "ekfac", "granularity": "token"},
    "written out": {"method": "ekfac", "projection": 4},
    "sweep": {"method": "kfac", "damping_sweep": [0.1, 1.0]},
    "sweep, both norms": {"method": "ekfac", "damping_sweep": [0.1, 1.0], "normalize": "both"},
    "nothing kept": {"method": "ekfac", "gradient_budget": 0},
    "kept by some": {"method": "ekfac", "gradient_budget": 60_000},
    "rank": {"method": "ekfac", "query_rank": 2},
    "dense and diagonal": {
        "method": "ekfac",
        "non_kronecker": "direct",
        "direct_fisher_max_params": 64,
        "diagonal": "*mlp.c_proj",
    },
    "on disk": {"method": "ekfac", "factor_cache_residency": "disk"},
    "self": {"method": "graddot", "alone": True},
    "self of ekfac": {"method": "ekfac", "alone": True},
    "self of kfac, norms": {"method": "kfac", "alone": True, "normalize": "train"},
    "checkpoints": {"method": "tracin", "checkpoints": 2, "checkpoint_weights": [0.1, 0.2]},
    "ensemble": {"method": "ekfac", "checkpoints": 2},
    "drawn": {"method": "ekfac", "fisher": "sampled", "fisher_draws": 2},
    # rounding grows from one iteration to the next, so that a few are compared
    "refined": {"method": "ekfac", "refine": "cg", "damping": 1.0, "cg_max_iterations": 4},
}


@pytest.mark.filterwarnings("ignore:non_kronecker='direct' covers")
@pytest.mark.parametrize("options", list(OPTIONS))
def test_options_of_a_whole_model(workers, options):
    calls = [{"n": 9, **OPTIONS[options]}]
    found = workers.run("scores", world=3, name="gpt2", how="plain", per_block=False, calls=calls)
    assert_same(found, expected("gpt2", calls))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:non_kronecker='direct' covers")
@pytest.mark.parametrize("how", ["fsdp1", "fully_shard"])
@pytest.mark.parametrize("options", list(OPTIONS))
def test_options_of_a_model_in_parts(workers, options, how):
    calls = [{"n": 9, **OPTIONS[options]}]
    found = workers.run("scores", world=3, name="gpt2", how=how, per_block=True, calls=calls)
    assert_same(found, expected("gpt2", calls))


BY_MODEL = {
    "gpt2": [
        {"method": "tracin", "checkpoints": 2, "checkpoint_weights": [0.1, 0.2]},
        {"method": "kfac", "fisher": "sampled", "fisher_draws": 2},
        {"method": "ekfac", "fisher": "sampled", "alone": True, "checkpoints": 1},
        {"method": "ekfac", "refine": "cg", "damping": 1.0, "cg_max_iterations": 3},
    ],
    "classifier": [
        {"method": "ekfac", "fisher": "expected"},
        {"method": "ekfac", "fisher": "sampled", "label_sampler": True, "batch_size": 1},
        {"method": "ekfac", "refine": "cg", "cg_max_iterations": 3},
    ],
    # examples of different length, whose outputs are of different number
    "regressor": [
        {"method": "kfac", "fisher": "expected", "batch_size": 1},
        {"method": "kfac", "fisher": "sampled", "fisher_draws": 2, "batch_size": 1},
        {"method": "ekfac", "refine": "cg", "cg_max_iterations": 3, "batch_size": 1},
    ],
}


@pytest.mark.parametrize(
    ("name", "how", "per_block", "world"),
    [
        ("gpt2", "fsdp1", True, 1),
        ("gpt2", "fsdp1", True, 2),
        ("gpt2", "fully_shard", True, 3),
        ("classifier", "fully_shard", False, 2),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                *itertools.product(["gpt2"], ["fsdp1", "fully_shard"], [False], [1, 2, 3]),
                *itertools.product(
                    ["classifier", "regressor"], ["fsdp1", "fully_shard"], [True], [1, 2, 3]
                ),
            )
        ),
    ],
)
def test_checkpoints_and_drawn_labels_and_refinement(workers, name, how, per_block, world):
    """What runs a model several times, or needs all of its weights, on one in parts."""
    calls = [{"n": 8, **call} for call in BY_MODEL[name]]
    found = workers.run("scores", world=world, name=name, how=how, per_block=per_block, calls=calls)
    assert_same(found, expected(name, calls))


@pytest.mark.parametrize("how", ["fsdp1", "fully_shard"])
@pytest.mark.parametrize("form", ["own", "files", "callables", "loaders"])
def test_forms_of_checkpoints(workers, how, form, tmp_path):
    plain = {"n": 5, "method": "graddot", "checkpoints": 2}
    call = {**plain, "form": str(tmp_path) if form == "files" else form}
    call |= {"method": "tracin"}
    found = workers.run("scores", name="llama", how=how, per_block=True, calls=[call])
    assert_same(found, expected("llama", [plain | {"method": "tracin"}]))


@pytest.mark.parametrize(
    ("how", "world"),
    [
        ("fsdp1", 1),
        ("fsdp1", 2),
        ("fully_shard", 2),
        pytest.param("no_shard", 2, marks=pytest.mark.slow),
        pytest.param("ddp", 2, marks=pytest.mark.slow),
    ],
)
def test_the_model_is_left_as_it_was_found(workers, how, world):
    calls = [
        {"n": 3, "method": "graddot"},
        {"n": 3, "method": "ekfac", "fisher": "sampled"},
        {"n": 3, "method": "tracin", "checkpoints": 2},
        {"n": 3, "method": "ekfac", "refine": "cg", "damping": 1.0, "cg_max_iterations": 1},
    ]
    workers.run("leaves_as_found", world=world, name="gpt2", how=how, per_block=True, calls=calls)


@pytest.mark.parametrize("how", ["fsdp1", "fully_shard"])
def test_checkpoints_that_do_not_fit_are_refused(workers, how):
    for wrong, text in (
        ("a name", "unexpected ['other'] and missing []"),
        ("none", "unexpected [] and missing ['transformer.wpe.weight']"),
        ("a shape", "got (16, 9) for transformer.wpe.weight, which is (16, 8) here"),
    ):
        found = workers.try_run("wrong_checkpoint", how=how, wrong=wrong)
        for one in found:
            assert one["error"].startswith("ValueError: checkpoints must hold")
            assert text in one["error"]


def test_scores_for_rank_0_alone(workers):
    calls = crossed(METHODS, [9], [2], gather="rank0")
    first, *others = workers.run(
        "scores", world=3, name="gpt2", how="fully_shard", per_block=True, calls=calls
    )
    assert_same([first], expected("gpt2", crossed(METHODS, [9], [2])))
    assert others == [[None] * 3] * 2


# ---------------------------------------------------------------- fits


@pytest.mark.parametrize("how", ["plain", "fsdp1"])
def test_a_fit_is_saved_once_and_read_by_all(workers, how, tmp_path):
    alone = checks.fits("gpt2", "plain", str(tmp_path / "one"))
    folder = str(tmp_path / "many")
    for world, name in ((2, how), (3, how), (1, "plain")):
        for found in workers.run("fits", world=world, name="gpt2", how=name, folder=folder):
            assert found[0] == alone[0]
            assert found[1] <= alone[1]  # the digest reads each row once, on one of the ranks
            assert_near(found[2], alone[2])
    assert sorted(path.name for path in (tmp_path / "many").iterdir()) == sorted(
        path.name for path in (tmp_path / "one").iterdir()
    )
    assert_near(checks.fits("gpt2", "plain", folder)[2], alone[2])  # one process reads it too


# ---------------------------------------------------------------- stores

READS = [
    {"method": "kfac"},
    {"method": "ekfac"},
    {"method": "ekfac", "granularity": "token"},
    {"method": "ekfac", "damping_sweep": [0.1, 1.0]},
    {"method": "graddot"},
    {"method": "ekfac", "alone": True},
    {"method": "graddot", "top_k": 4},
    {"method": "ekfac", "top_k": 20},
]


def assert_reads(found, wanted, reads):
    for call, got, one in zip(reads, found, wanted, strict=True):
        if "top_k" in call:
            assert got[0] == one[0]
            assert got[2] == one[2]
            assert_near(got[1], one[1])
        else:
            assert_same([[got]], [one])


@pytest.mark.parametrize(
    ("how", "capture", "n"),
    [
        ("plain", "factored", 9),
        ("plain", "materialized", 9),
        ("plain", "factored", 2),
        ("fully_shard", "factored", 9),
        pytest.param("fully_shard", "materialized", 9, marks=pytest.mark.slow),
        pytest.param("fsdp1", "auto", 16, marks=pytest.mark.slow),
        pytest.param("ddp", "factored", 16, marks=pytest.mark.slow),
    ],
)
def test_a_store_of_three_ranks_is_read_by_any_number(workers, how, capture, n, tmp_path):
    options = {"name": "gpt2", "n": n, "method": "ekfac", "capture": capture}
    folder, alone = str(tmp_path / "many"), str(tmp_path / "one")
    place = {"how": how, "per_block": True, "folder": folder}
    assert workers.run("write", world=3, **place, **options) == [[n, 3]] * 3
    checks.cached(checks.model_of("gpt2"), alone, n, method="ekfac", capture=capture)
    reads = [read for read in READS if capture == "factored" or "granularity" not in read]
    wanted = checks.read(alone, reads)
    assert_reads(checks.read(folder, reads), wanted, reads)
    for world in (1, 2, 3):
        for found in workers.run("read", world=world, folder=folder, calls=reads):
            assert_reads(found, wanted, reads)
    assert workers.run("write", world=2, **place, **options) == [[n, 3]] * 2  # nothing runs


def test_a_store_of_parameters_that_fsdp_keeps_whole(workers, tmp_path):
    options = {"name": "gpt2", "n": 9, "method": "ekfac"}
    folder, alone = str(tmp_path / "wrapped"), str(tmp_path / "plain")
    place = {"how": "fsdp1", "per_block": True, "folder": folder}
    assert workers.run("write", world=1, **place, **options) == [[9, 3]]
    checks.cached(checks.model_of("gpt2"), alone, 9, method="ekfac")
    reads = READS[:2] + READS[4:5]
    assert_reads(checks.read(folder, reads), checks.read(alone, reads), reads)


@pytest.mark.parametrize(("how", "world"), [("plain", 3), ("fully_shard", 2)])
def test_ranks_agree_on_the_smaller_form(workers, how, world, tmp_path):
    wanted = checks.forms("plain", str(tmp_path / "one"))
    assert {("dense",), ("linear",)} <= {tuple(kinds) for kinds in wanted.values()}
    folder = str(tmp_path / "many")
    assert workers.run("forms", world=world, how=how, folder=folder) == [wanted] * world
    reads = [{"method": "ekfac"}, {"method": "graddot"}]
    assert_reads(checks.read(folder, reads), checks.read(str(tmp_path / "one"), reads), reads)


@pytest.mark.parametrize(
    ("first", "then", "dies", "how"),
    [
        (3, 2, False, "plain"),
        (2, 3, True, "plain"),
        (3, 1, False, "plain"),
        (2, 3, True, "fully_shard"),
    ],
)
def test_a_store_goes_on_with_another_number_of_ranks(workers, first, then, dies, how, tmp_path):
    options = {"name": "llama", "per_block": True, "n": 16, "method": "kfac"}
    folder = str(tmp_path / "many")
    place = {"folder": folder, "fails_at": 14, "dies": dies, "lost": [first - 1] if dies else []}
    failed = workers.try_run("write", world=first, how=how, **place, **options)
    for one in failed:
        assert one is None or ("lost connection" if dies else "row 14 cannot") in one["error"]
    with GradientStore(f"{folder}/train", mode="read") as store:
        store.verify()
        assert 4 <= len(store) <= 14
        assert 14 not in store.ids
    wrote = workers.run(
        "write", world=then, how=how if then > 1 else "plain", folder=folder, **options
    )
    assert wrote == [[16, 3]] * then
    checks.cached(checks.model_of("llama"), str(tmp_path / "one"), 16, method="kfac")
    wanted = checks.read(str(tmp_path / "one"), READS[:1])
    assert_same([checks.read(folder, READS[:1])], wanted)


@pytest.mark.parametrize("residency", ["memory", "disk"])
@pytest.mark.parametrize(("how", "per_block"), [WRAPPED[0], WRAPPED[3]])
def test_gradients_that_are_kept_during_a_call(workers, how, per_block, residency, tmp_path):
    plain = [*crossed(METHODS, [9], [2]), *crossed(["ekfac"], [2], [2])]
    kept = {"gradient_cache_residency": residency}
    calls = [{**call, **kept} for call in plain]
    calls += [{**call, **kept, "capture": "materialized"} for call in plain]
    if residency == "disk":
        calls += [{**plain[2], **kept, "cache_dir": str(tmp_path / "cache")}] * 2
    found = workers.run("scores", world=3, name="gpt2", how=how, per_block=per_block, calls=calls)
    wanted = expected("gpt2", plain)
    wanted = [*wanted, *wanted, *([wanted[2]] * (2 * (residency == "disk")))]
    assert_same(found, wanted)
    if residency == "disk":  # one process goes on with what many wrote
        call = {**plain[2], **kept, "cache_dir": str(tmp_path / "cache")}
        assert_same([checks.scores_of(checks.model_of("gpt2"), [call])], [wanted[2]])


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize("method", ["graddot", "ekfac"])
@pytest.mark.parametrize("how", ["plain", "ddp"])
def test_an_error_in_the_third_batch_of_one_rank_is_everybodys(workers, how, method):
    found = workers.try_run("failing", name="gpt2", how=how, method=method, at=13, limit=20)
    assert found[1]["error"] == "OSError: row 13 cannot be read"
    assert "RankError: Rank 1 failed in attribute: OSError: row 13 cannot" in found[0]["error"]


@pytest.mark.parametrize("method", ["graddot", "ekfac"])
@pytest.mark.parametrize("how", ["fsdp1", "fully_shard"])
def test_an_error_of_one_rank_that_others_wait_for(workers, how, method):
    """The model holds connections, so that the others hear of it when the process ends."""
    found = workers.try_run(
        "failing_and_exit", name="gpt2", how=how, method=method, at=13, limit=20, lost=[1]
    )
    assert "RankError: Rank 1 failed in attribute: OSError: row 13 cannot" in found[0]["error"]


def test_an_error_on_rank_0(workers):
    found = workers.try_run("failing", name="gpt2", how="plain", method="kfac", at=5, limit=20)
    assert "row 5 cannot be read" in found[0]["error"]
    assert "Rank 0 failed in attribute: OSError: row 5 cannot be read" in found[1]["error"]


@pytest.mark.parametrize("how", ["plain", "fsdp1"])
def test_a_rank_that_is_killed_ends_the_others(workers, how):
    found = workers.try_run(
        "failing", lost=[1], name="gpt2", how=how, method="kfac", at=13, dies=True, limit=20
    )
    assert "must reach all 2, got a lost connection" in found[0]["error"]


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("weights", "ValueError: model must be the same on every rank"),
        ("rows", "ValueError: train must be the same on every rank, got 9 on rank 0, 10 on rank 1"),
        ("options", "ValueError: method_options must be the same on every rank"),
        ("options of self-influence", "ValueError: method_options must be the same on every rank"),
        ("layers of self-influence", "ValueError: layers must be the same on every rank"),
        ("gathering", 'gather must be the same on every rank, got "all" on rank 0, "rank0" on'),
        ("projection", "ValueError: projection must be the same on every rank"),
        ("checkpoints", "checkpoints must be the same on every rank, got 1 on rank 0, 2 on rank 1"),
        ("weights of checkpoints", "checkpoint_weights must be the same on every rank"),
    ],
)
def test_ranks_that_were_called_otherwise_are_refused(workers, what, text):
    for found in workers.try_run("differing", what=what):
        assert text in found["error"]


REFUSED = {
    "a method of a training": ("plain", {"method": "adamw"}, "method must score a fixed model"),
    "another gathering": ("plain", {"gather": "main"}, "gather must be one of 'all', 'rank0'"),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_what_does_not_work_in_many_processes_is_refused(workers, case):
    how, call, text = REFUSED[case]
    for found in workers.try_run("call_with", how=how, call={"n": 9, **call}):
        assert text in found["error"]


@pytest.mark.parametrize(
    ("name", "how", "per_block"),
    [("llama", "fsdp1", True), ("gpt2", "fsdp1", False), ("llama", "fully_shard", False)],
)
def test_one_process_in_a_group(workers, name, how, per_block):
    """With tied parameters too, which FSDP1 keeps whole there."""
    calls = crossed(METHODS, [9], [2])
    options = {"name": name, "how": how, "per_block": per_block, "calls": calls}
    assert_same(workers.run("scores", world=1, **options), expected(name, calls))
