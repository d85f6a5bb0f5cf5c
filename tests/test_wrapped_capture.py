"""Captures in DDP, FSDP and ``fully_shard``: gradients are the rows' own, states are whole."""

import pytest
from processes import Workers

WRAPPED = {
    "ddp": ("ddp", False),
    "fsdp1-unit-a-block": ("fsdp1", True),
    "fully_shard-unit-a-block": ("fully_shard", True),
    "fsdp1-one-unit": ("fsdp1", False),
    "fully_shard-one-unit": ("fully_shard", False),
}
wrapped = pytest.mark.parametrize(("how", "per_block"), WRAPPED.values(), ids=list(WRAPPED))
# the same, of which make test runs one unit of each kind
wrapped_once = pytest.mark.parametrize(
    ("how", "per_block"),
    [
        pytest.param(*value, id=name, marks=[pytest.mark.slow] * ("one-unit" in name))
        for name, value in WRAPPED.items()
    ],
)


MODELS = [f"transformers.models.{name}.modeling_{name}" for name in ("gpt2", "llama")]


@pytest.fixture(scope="module")
def workers():
    pytest.importorskip("transformers")
    with Workers(2, "rank_models", MODELS) as pool:
        yield pool


@wrapped_once
@pytest.mark.parametrize("way", [None, "wrapper"])
def test_own_gradients(workers, how, per_block, way):
    found = workers.run("capture", name="tied", how=how, per_block=per_block, way=way)
    assert found[0][0] == 4


@wrapped_once
@pytest.mark.parametrize("name", [pytest.param("gpt2", marks=pytest.mark.slow), "llama"])
def test_language_models(workers, name, how, per_block):
    workers.run("capture", name=name, how=how, per_block=per_block)


@pytest.mark.slow
@pytest.mark.parametrize(
    "option", ["find_unused_parameters", "static_graph", "gradient_as_bucket_view"]
)
def test_options_of_ddp(workers, option):
    workers.run("capture", name="tied", how=f"ddp-{option}", per_block=False)


@pytest.mark.slow
@wrapped
@pytest.mark.parametrize("way", ["wrapper", "own"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_language_models_that_checkpoint(workers, name, how, per_block, way):
    workers.run("capture", name=name, how=how, per_block=per_block, way=way)


@pytest.mark.slow
@wrapped
def test_described_reduction(workers, how, per_block):
    """What averages over ranks is none of an example's own, whatever the loop says of its loss."""
    workers.run("capture", name="llama", how=how, per_block=per_block, reduction="token_mean")


@wrapped
def test_table_read_outside(workers, how, per_block):
    workers.run("outside", how=how, per_block=per_block)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_single_modules_as_units(workers, name):
    workers.run("single_modules", name=name)


@wrapped_once
@pytest.mark.parametrize("name", ["tied", pytest.param("llama", marks=pytest.mark.slow)])
def test_live_pass(workers, name, how, per_block):
    workers.run("live", name=name, how=how, per_block=per_block)


@pytest.mark.parametrize("per_block", [False, True])
def test_live_pass_over_parameters_that_fsdp_keeps_whole(workers, per_block):
    """In one process FSDP1 shards nothing; the parameters, some of them tied, stay theirs."""
    workers.run("live", world=1, name="tied", how="fsdp1", per_block=per_block)


@wrapped_once
@pytest.mark.parametrize("way", [None, "wrapper"])
def test_names_of_the_plain_model(workers, how, per_block, way):
    workers.run("names", how=how, per_block=per_block, way=way)


@wrapped_once
def test_choices_by_plain_names(workers, how, per_block):
    workers.run("choices", how=how, per_block=per_block)


def test_flattened_parameters_are_refused(workers):
    for found in workers.run("flattened"):
        assert len(found) == 2
        assert "FSDP must be built with use_orig_params=True, got False" in found[0]
        assert "model must be the FSDP module, got one inside it: start lies" in found[1]


# ---------------------------------------------------------------- optimizer states


@wrapped
def test_states_and_directions_of_adamw(workers, how, per_block):
    """Moments are whole, and those of before the step, which later steps do not change."""
    workers.run("states", kind="AdamW", how=how, per_block=per_block, projected=False)


@wrapped_once
def test_masked_directions_of_adamw(workers, how, per_block):
    workers.run("states", kind="AdamW", how=how, per_block=per_block, projected=True)


@pytest.mark.slow
@wrapped
@pytest.mark.parametrize("kind", ["SGD", "NAdam", "Adagrad"])
def test_states_of_other_optimizers(workers, how, per_block, kind):
    workers.run("states", kind=kind, how=how, per_block=per_block, projected=False)
