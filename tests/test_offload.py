"""Training captures written into a store: equal to the captured blocks, resumed, taken back."""

import contextlib
import errno
import gc
import resource

import pytest
import torch
from training import (
    Recorder,
    assert_same_training,
    collate,
    hooks_on,
    make_model,
    make_rows,
    make_trainer,
)

from gradtrail import GradTrailWarning, HookManager, Projection
from gradtrail.callbacks import (
    AbstractStepCallback,
    DataSelectionCallback,
    GradTrailCallback,
    OffloadCallback,
)
from gradtrail.callbacks.recorded_steps import check_same
from gradtrail.callbacks.summed import sum_examples
from gradtrail.errors import StoreError
from gradtrail.factors import (
    DenseGradient,
    EmbeddingFactors,
    LinearFactors,
    ScaleFactors,
    SumGradient,
    tensors_of,
    to_dense,
)
from gradtrail.store import GradientStore

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")

# GPT-2's position table is shared by the batch, and the capture says so
quiet = pytest.mark.filterwarnings("ignore::gradtrail.GradTrailWarning")

FORMS = {
    "factored": {},
    "materialized": {"capture": "materialized"},
    "auto": {"capture": "auto"},
    "projected": {"projection": Projection(dim=3)},
    "projected, written out": {"projection": Projection(dim=3), "capture": "materialized"},
    "dense projection": {"projection": Projection(kind="dense", dim=5)},
}


@contextlib.contextmanager
def hidden(model, key):
    """Keep an argument from the model, after the capture has seen it."""

    def hide(_module, args, kwargs):
        return args, {name: value for name, value in kwargs.items() if name != key}

    handle = model.register_forward_pre_hook(hide, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


@pytest.fixture(autouse=True)
def fresh_accelerator():
    """The accelerator's state is global: what one test sets up must not reach the next."""
    yield
    accelerate.state.AcceleratorState._reset_state()
    accelerate.state.GradientState._reset_state()


def train(manager, *, optimizer=True, accumulation=1, backwards=6, rows=None, each=None):
    """A plain loop over batches of 3; ``each`` is called after every backward."""
    model = manager.model
    steps = torch.optim.SGD(model.parameters(), lr=1e-2)
    rows = make_rows(backwards * 3) if rows is None else rows
    torch.manual_seed(7)
    with manager.collect(steps if optimizer else None), hidden(model, "number"):
        for number in range(backwards):
            batch = collate(rows[3 * number : 3 * number + 3])
            (model(**batch).loss / accumulation).backward()
            if each is not None:
                each(number)
            if number % accumulation == accumulation - 1:
                steps.step()
                steps.zero_grad()


def make_manager(callbacks, name="llama", *, model=None, **options):
    model = make_model(name) if model is None else model
    return HookManager(model, loss_reduction="model", callbacks=callbacks, **options)


def content(store):
    """Everything that can be read of a store."""
    return [
        (
            stored.block.step,
            stored.block.ids,
            stored.meta,
            {name: tensors_of(gradient) for name, gradient in stored.block.layers.items()},
        )
        for stored in store.blocks()
    ]


def assert_same_content(one, two):
    one, two = content(one), content(two)
    assert [entry[:3] for entry in one] == [entry[:3] for entry in two]
    for (*_, mine), (*_, theirs) in zip(one, two, strict=True):
        assert mine.keys() == theirs.keys()
        for name, tensors in mine.items():
            for left, right in zip(tensors, theirs[name], strict=True):
                assert left.dtype == right.dtype
                assert torch.equal(left, right), name


def assert_same_layers(stored, block):
    """A stored block has the kinds and the numbers of a captured one, to the bit."""
    assert list(stored.layers) == list(block.layers)
    for name, gradient in block.layers.items():
        kept = stored.layers[name]
        assert type(kept) is type(gradient)
        assert to_dense(kept).shape == to_dense(gradient).shape
        for mine, theirs in zip(tensors_of(kept), tensors_of(gradient), strict=True):
            assert mine.dtype == theirs.dtype
            assert torch.equal(mine, theirs), name


# ---------------------------------------------------------------- what is stored


@quiet
@pytest.mark.parametrize(
    ("name", "asynchronous"),
    [
        ("gpt2", True),
        ("llama", False),
        pytest.param("gpt2", False, marks=pytest.mark.slow),
        pytest.param("llama", True, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("form", FORMS)
def test_stored_blocks_are_the_captured_ones(tmp_path, name, form, asynchronous):
    recorder = Recorder()
    with GradientStore(tmp_path / "store") as store:
        manager = make_manager(
            [recorder, OffloadCallback(store, asynchronous=asynchronous)], name, **FORMS[form]
        )
        train(manager, accumulation=2)
        numbers = [step.step for step in recorder.steps for _ in step.blocks]
        assert numbers == [0, 0, 1, 1, 2, 2]
        for stored, block, step in zip(store.blocks(), recorder.blocks, numbers, strict=True):
            assert stored.block.step == step
            assert stored.block.ids == block.ids
            assert_same_layers(stored.block, block)
        assert store.ids == tuple(one for block in recorder.blocks for one in block.ids)
        facts = store.facts
    assert facts.id_scheme == "content"
    assert facts.recording == "per_example"
    assert facts.loss_reduction == "model"
    assert facts.capture == FORMS[form].get("capture", "factored")
    projection = FORMS[form].get("projection")
    expected = projection and {"kind": projection.kind, "dim": projection.dim, "seed": 0}
    assert facts.projection == expected


def test_stored_in_memory():
    recorder = Recorder()
    with GradientStore(residency="memory") as store:
        train(make_manager([recorder, OffloadCallback(store)]))
        for stored, block in zip(store.blocks(), recorder.blocks, strict=True):
            assert_same_layers(stored.block, block)


def test_what_is_known_of_a_block_lies_beside_it(tmp_path):
    """With the scale, examples' gradients add up to what the optimizer met."""
    rows, met = make_rows(12), {}
    with GradientStore(tmp_path / "store") as store:
        manager = make_manager([OffloadCallback(store)])

        def note(number):
            gradients = {n: p.grad.clone() for n, p in manager.model.named_parameters()}
            met.setdefault(number // 2, {}).update(gradients)

        train(manager, accumulation=2, backwards=4, rows=rows, each=note)
        totals = {}
        for stored, start in zip(store.blocks(), range(0, 12, 3), strict=True):
            lengths = [len(row["input_ids"]) for row in rows[start : start + 3]]
            meta = dict(stored.meta)
            for name, gradient in stored.block.layers.items():
                total = to_dense(gradient).values_bd.sum(0) / meta["scale"]
                key = (stored.block.step, name)
                totals[key] = totals.get(key, 0) + total
            assert meta.pop("scale") > 1
            assert meta == {
                "place": (start // 3) % 2,
                "size": 3,
                "tokens": max(lengths),
                "lengths": lengths,
                "padding_left": [0, 0, 0],
            }
    assert len(totals) == 2 * len(manager.layers)
    for (step, name), total in totals.items():
        weight = met[step][f"{name}.weight"].flatten()
        torch.testing.assert_close(total, weight, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("known", ["by the optimizer", "by its get_scale"])
def test_a_loss_scale_is_not_part_of_the_scale(tmp_path, known):
    """What the optimizer meets has been unscaled; a step that was skipped is not stored."""
    model, rows = make_model("llama"), make_rows(9)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    options = {"loss_reduction": "token_mean", "loss_scale": scaler.get_scale}
    announced = optimizer
    if known == "by the optimizer":
        accelerate.Accelerator(cpu=True)
        announced = accelerate.optimizer.AcceleratedOptimizer(
            optimizer, device_placement=False, scaler=scaler
        )
        options["loss_scale"] = lambda: scaler.get_scale()
    with GradientStore(tmp_path / "store") as store:
        manager = HookManager(model, callbacks=[OffloadCallback(store)], **options)
        with manager.collect(announced):
            for number in range(3):
                batch = collate(rows[3 * number : 3 * number + 3])
                scaler.scale(model(**batch).loss).backward()
                if number == 1:
                    model.lm_head.weight.grad[0, 0] = torch.inf
                before = scaler.get_scale()
                scaler.step(optimizer)
                scaler.update()
                if scaler.get_scale() < before:
                    manager.skip_optimizer_step()
                optimizer.zero_grad()
        assert [record.step for record in store.records] == [0, 2]
        counted = [sum(int((row["labels"][1:] != -100).sum()) for row in rows[:3])]
        counted += [sum(int((row["labels"][1:] != -100).sum()) for row in rows[6:])]
        assert [record.meta["scale"] for record in store.records] == counted


@pytest.mark.parametrize(
    ("options", "optimizer", "expected"),
    [
        ({}, True, [0, 0, 1, 1, 2, 2]),
        ({"every": 2}, True, [0, 0, 2, 2]),
        ({}, False, [0, 1, 2, 3, 4, 5]),
        ({"gradient_accumulation_steps": 2}, False, [0, 0, 1, 1, 2, 2]),
        ({"gradient_accumulation_steps": 2, "every": 3}, False, [0, 0]),
    ],
)
def test_steps(tmp_path, options, optimizer, expected):
    rows = make_rows(18)
    with GradientStore(tmp_path / "store") as store:
        manager = make_manager([OffloadCallback(store, **options)], sample_id_key="number")
        rows = [{**row, "number": 100 + number} for number, row in enumerate(rows)]
        train(manager, optimizer=optimizer, accumulation=2, rows=rows)
        assert [record.step for record in store.records] == expected
        assert store.facts.id_scheme == "key:number"
        every = options.get("every", 1)
        kept = [100 + n for n in range(18) if (n // 6) % every == 0]
        assert list(store.ids) == (list(range(100, 118)) if len(expected) == 6 else kept)
        assert store.find(step=expected[-1])


def test_accumulation_is_not_counted_where_the_optimizer_is_announced(tmp_path):
    with GradientStore(tmp_path / "store") as store:
        manager = make_manager([OffloadCallback(store, gradient_accumulation_steps=2)])
        with pytest.raises(ValueError, match=r"gradient_accumulation_steps must be 1 where the"):
            train(manager)
    assert hooks_on(manager.model) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "every must be an integer of at least 1, got 0"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps must be an integer"),
        ({"recording": "sum"}, "recording must be one of 'per_example', 'per_block', got 'sum'"),
    ],
)
def test_options_are_checked(options, message):
    with GradientStore(residency="memory") as store, pytest.raises(ValueError, match=message):
        OffloadCallback(store, **options)


@pytest.mark.parametrize(
    ("options", "scheme"),
    [
        ({}, "content"),
        ({"sample_hash_fields": ["labels", "input_ids"]}, "content:input_ids,labels"),
        ({"sample_hash_fields": ["input_ids", "labels"]}, "content:input_ids,labels"),
        ({"sample_id_key": "labels"}, "key:labels"),
    ],
)
def test_how_examples_are_named_is_declared(options, scheme):
    assert make_manager([], **options).ids.scheme == scheme


def test_update_directions_are_declared():
    with GradientStore(residency="memory") as store, GradientStore(residency="memory") as plain:
        model = make_model("llama")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        options = {"loss_reduction": "model", "optimizer": optimizer, "layers": "*gate_proj"}
        with HookManager(model, callbacks=[OffloadCallback(store)], **options).collect():
            model(**collate(make_rows(3))).loss.backward()
        assert store.facts.extra["gradients"] == "update directions of AdamW"
        train(make_manager([OffloadCallback(plain)]), backwards=1)
        assert "gradients" not in plain.facts.extra
        assert plain.facts.extra["output_layers"] == '["lm_head"]'


def test_two_writers_of_one_store_are_refused():
    with GradientStore(residency="memory") as store:
        manager = make_manager([OffloadCallback(store), OffloadCallback(store)])
        with pytest.raises(ValueError, match="store must be written by one OffloadCallback"):
            train(manager)


def test_two_stores_of_one_capture():
    with GradientStore(residency="memory") as one, GradientStore(residency="memory") as two:
        callbacks = [OffloadCallback(one), OffloadCallback(two, recording="per_block")]
        train(make_manager(callbacks))
        assert (len(one), len(two)) == (18, 6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("form", ["factored", "materialized"])
def test_lower_precision(tmp_path, dtype, form):
    recorder = Recorder()
    with GradientStore(tmp_path / "store", dtype=dtype) as store:
        train(make_manager([recorder, OffloadCallback(store)], **FORMS[form]))
        kind = getattr(torch, dtype)
        for stored, block in zip(store.blocks(), recorder.blocks, strict=True):
            for name, gradient in block.layers.items():
                pairs = zip(
                    tensors_of(stored.block.layers[name]), tensors_of(gradient), strict=True
                )
                for mine, theirs in pairs:
                    expected = theirs.to(kind) if theirs.is_floating_point() else theirs
                    assert torch.equal(mine, expected)


def shards_of(folder):
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


def test_asynchronous_and_synchronous_bytes_are_equal(tmp_path):
    for asynchronous in (True, False):
        folder = tmp_path / str(asynchronous)
        with GradientStore(folder, shard_bytes=20_000) as store:
            train(make_manager([OffloadCallback(store, asynchronous=asynchronous)]))
    assert len(shards_of(tmp_path / "True")) > 2
    assert shards_of(tmp_path / "True") == shards_of(tmp_path / "False")


# ---------------------------------------------------------------- one record a backward


def test_sum_of_examples_keeps_positions_or_adds_entries():
    torch.manual_seed(0)
    a, g = torch.randn(3, 4, 5).double(), torch.randn(3, 4, 6).double()
    linear = LinearFactors(a, g, has_bias=True, constant_bs=torch.randn(3, 4).double())
    scale = ScaleFactors(a, a.flip(0), has_bias=True)
    table = EmbeddingFactors(torch.randint(0, 7, (3, 4)), g, 7, padding_idx=2)
    written = DenseGradient(torch.randn(3, 12).double(), (4, 3))
    twice = SumGradient((linear, LinearFactors(a[:, :2], g[:, :2], has_bias=True)))
    for gradient in (linear, scale, table, written, twice):
        total = sum_examples(gradient)
        assert type(total) is type(gradient)
        assert total.num_examples == 1
        torch.testing.assert_close(
            to_dense(total).values_bd[0], to_dense(gradient).values_bd.sum(0), rtol=1e-12, atol=0
        )
    assert sum_examples(linear).activation_bsi.data_ptr() == a.data_ptr()


@pytest.mark.parametrize("form", ["factored", "materialized", "projected"])
def test_a_record_a_backward(tmp_path, form):
    recorder = Recorder()
    with GradientStore(tmp_path / "store") as store:
        callback = OffloadCallback(store, recording="per_block")
        train(make_manager([recorder, callback], **FORMS[form]), accumulation=2)
        assert store.ids == ("0.0", "0.1", "1.0", "1.1", "2.0", "2.1")
        assert store.facts.recording == "per_block"
        for stored, block in zip(store.blocks(), recorder.blocks, strict=True):
            assert stored.meta["members"] == list(block.ids)
            assert set(stored.meta) == {"members", "place", "scale"}
            for name, gradient in block.layers.items():
                kept = stored.block.layers[name]
                assert type(kept) is type(gradient)
                torch.testing.assert_close(
                    to_dense(kept).values_bd[0],
                    to_dense(gradient).values_bd.sum(0),
                    rtol=1e-4,
                    atol=1e-5,
                )


# ---------------------------------------------------------------- steps that did not happen


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_step_that_the_loop_did_not_complete_is_taken_back(tmp_path, asynchronous):
    with GradientStore(tmp_path / "store") as store:
        train(
            make_manager([OffloadCallback(store, asynchronous=asynchronous)]),
            accumulation=2,
            backwards=5,
        )
        assert [record.step for record in store.records] == [0, 0, 1, 1]
    with GradientStore(tmp_path / "store", mode="read") as store:
        assert [record.step for record in store.records] == [0, 0, 1, 1]


def test_a_backward_that_raises_is_followed_by_another_in_its_place(tmp_path):
    rows = make_rows(9)
    with GradientStore(tmp_path / "store") as store:
        manager = make_manager([OffloadCallback(store)])
        model = manager.model
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

        def explode(_gradient):
            raise MemoryError("no memory left")

        with manager.collect(optimizer):
            for number in range(3):
                batch = collate(rows[3 * number : 3 * number + 3])
                if number == 1:
                    handle = model.model.embed_tokens.register_forward_hook(
                        lambda _m, _a, output: output.register_hook(explode) and None
                    )
                    with pytest.raises(MemoryError, match="no memory left"):
                        model(**batch).loss.backward()
                    handle.remove()
                model(**batch).loss.backward()
            optimizer.step()
        assert [record.meta["place"] for record in store.records] == [0, 1, 2]
        assert len(set(store.ids)) == 9


# ---------------------------------------------------------------- in a Trainer


class Failure(RuntimeError):
    """Ends a Trainer's run."""


def fails_at(step):
    """A callback that ends the run after a step, as a killed process would."""

    class Fails(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            del args, control, kwargs
            if state.global_step == step:
                raise Failure(step)

    return Fails()


def run(folder, store, *, fails=None, resume=None, callbacks=(), options=None, **arguments):
    """A Trainer's run whose gradients go into a store; None for a run without a capture."""
    capture = []
    if store is not None:
        inner = [OffloadCallback(store, **(options or {})), *callbacks]
        capture = [GradTrailCallback(inner)]
    trainer = make_trainer(
        make_model("llama"),
        folder,
        capture + ([] if fails is None else [fails_at(fails)]),
        **{"max_steps": 8, "save_strategy": "steps", "save_steps": 3, **arguments},
    )
    torch.manual_seed(11)
    with contextlib.nullcontext() if fails is None else pytest.raises(Failure):
        trainer.train(resume_from_checkpoint=resume)
    if fails is not None:
        capture[0].detach()
    return trainer


@pytest.mark.parametrize(
    "asynchronous",
    [True, pytest.param(False, marks=pytest.mark.slow)],
    ids=["asynchronous", "synchronous"],
)
def test_training_is_equal_to_the_bit(tmp_path, asynchronous):
    bare = run(tmp_path / "bare", None, gradient_accumulation_steps=2)
    state = torch.get_rng_state()
    with GradientStore(tmp_path / "store") as store:
        options = {"asynchronous": asynchronous}
        held = run(tmp_path / "held", store, options=options, gradient_accumulation_steps=2)
        assert torch.equal(torch.get_rng_state(), state)
        assert sorted(set(store.steps)) == list(range(8))
    assert_same_training(held, bare)
    assert hooks_on(held.model) == hooks_on(bare.model)


@pytest.mark.parametrize(
    ("every", "recording"),
    [
        (2, "per_example"),
        pytest.param(1, "per_example", marks=pytest.mark.slow),
        pytest.param(1, "per_block", marks=pytest.mark.slow),
    ],
)
def test_a_resumed_run_gives_the_store_of_an_uninterrupted_one(tmp_path, every, recording):
    """It fails after step 5, of which everything is stored, and goes on from a save after 3."""
    options = {"every": every, "recording": recording}
    settings = {"options": options, "gradient_accumulation_steps": 2}
    with GradientStore(tmp_path / "whole") as store:
        run(tmp_path / "a", store, **settings)
    with GradientStore(tmp_path / "parts") as store:
        run(tmp_path / "b", store, fails=5, **settings)
        assert max(store.steps) == 4
    with GradientStore(tmp_path / "parts", mode="resume") as store:
        before = len(store)
        checkpoint = str(tmp_path / "b" / "checkpoint-3")
        run(tmp_path / "b", store, resume=checkpoint, **settings)
        assert len(store) > before
        with GradientStore(tmp_path / "whole", mode="read") as whole:
            assert_same_content(store, whole)


def test_a_run_over_other_data_does_not_resume(tmp_path):
    with GradientStore(tmp_path / "store") as store:
        run(tmp_path / "a", store, max_steps=2)
    with GradientStore(tmp_path / "store", mode="resume") as store:
        before = store.records
        with pytest.raises(StoreError, match=r"must meet the examples that are stored, got \['"):
            run(tmp_path / "b", store, max_steps=2, rows=make_rows(seed=4))
        gc.collect()
        assert store.records == before


def test_a_stored_place_is_named():
    with GradientStore(residency="memory") as store:
        callback = OffloadCallback(store)
        manager = make_manager([callback])
        train(manager)
        again = make_manager([OffloadCallback(store)])
        with pytest.raises(StoreError, match=r"in backward 0 of step 0 where the store holds"):
            train(again, rows=make_rows(18, seed=5))
        assert len(store) == 18
        with pytest.warns(GradTrailWarning, match="got one whose 6 backwards were stored already"):
            train(make_manager([OffloadCallback(store)]))
        assert len(store) == 18
    assert callable(check_same)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"projection": Projection(dim=3)}, "projection"),
        ({"capture": "materialized"}, "capture"),
        ({"sample_hash_fields": ["input_ids"]}, "id_scheme"),
        ({"exclude": "lm_head"}, r"extra\.output_layers"),
    ],
)
def test_another_capture_does_not_resume(tmp_path, change, field):
    with GradientStore(tmp_path / "store") as store:
        train(make_manager([OffloadCallback(store)]), backwards=2)
    with GradientStore(tmp_path / "store", mode="resume") as store:
        manager = make_manager([OffloadCallback(store)], **change)
        with pytest.raises(StoreError, match=f"^{field} must be that of the store"):
            train(manager)


def test_a_run_that_fails_leaves_the_store_readable(tmp_path):
    """Also where the store is closed before the capture comes off."""
    store = GradientStore(tmp_path / "store")
    capture = GradTrailCallback([OffloadCallback(store)])
    trainer = make_trainer(make_model("llama"), tmp_path, [capture, fails_at(4)])
    with pytest.raises(Failure):
        trainer.train()
    store.close()
    capture.detach()
    with GradientStore(tmp_path / "store", mode="read") as store:
        store.verify()
        assert sorted(set(store.steps)) == [0, 1, 2, 3]
        assert len(store) == 12
        assert sum(len(stored.block.ids) for stored in store.blocks()) == 12


# ---------------------------------------------------------------- errors of the writer


@pytest.mark.parametrize("asynchronous", [True, False], ids=["asynchronous", "synchronous"])
def test_a_closed_store_fails_the_loop(tmp_path, asynchronous):
    store = GradientStore(tmp_path / "store")
    manager = make_manager([OffloadCallback(store, asynchronous=asynchronous)])

    def close(number):
        if number == 2:
            store.close()

    with pytest.raises(StoreError, match="must be open, got one that was closed"):
        train(manager, each=close)
    assert manager.steps in {4, 5}
    assert hooks_on(manager.model) == 0
    with GradientStore(tmp_path / "store", mode="read") as kept:
        assert [record.step for record in kept.records] == [0, 1, 2]


def test_a_read_only_store_is_refused_at_the_start(tmp_path):
    with GradientStore(tmp_path / "store") as store:
        train(make_manager([OffloadCallback(store)]), backwards=2)
    with GradientStore(tmp_path / "store", mode="read") as store:
        manager = make_manager([OffloadCallback(store)])
        with pytest.raises(StoreError, match="must be open for writing, got mode='read'"):
            train(manager)
    assert manager.steps == 0


@pytest.mark.parametrize("asynchronous", [True, False], ids=["asynchronous", "synchronous"])
def test_a_full_disk_fails_the_loop_and_keeps_what_was_written(tmp_path, asynchronous):
    rows = make_rows(48)
    with GradientStore(tmp_path / "store", shard_bytes=1 << 14) as store:
        train(make_manager([OffloadCallback(store)], capture="materialized"), backwards=2)
        kept = content(store)
    manager = make_manager(
        [OffloadCallback(store, asynchronous=asynchronous)], capture="materialized"
    )
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    store = GradientStore(tmp_path / "store", shard_bytes=1 << 30, mode="resume")
    manager = make_manager(
        [OffloadCallback(store, asynchronous=asynchronous)], capture="materialized"
    )

    def fill(number):
        if number == 3:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 14, limits[1]))

    try:
        with pytest.raises(OSError, match=r"could not be written") as caught:
            train(manager, each=fill, backwards=16, rows=rows)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        with contextlib.suppress(OSError):
            store.close()
    assert caught.value.errno in {errno.EFBIG, errno.ENOSPC}
    with GradientStore(tmp_path / "store", mode="read") as store:
        store.verify()
        found = content(store)
    assert [entry[:2] for entry in found[:2]] == [entry[:2] for entry in kept]


class Broken(AbstractStepCallback):
    """Raises at a backward."""

    def __init__(self, at):
        self.at = at

    def on_attach(self, manager):
        del manager

    def on_step(self, block):
        if block.step == self.at:
            raise Failure(self.at)

    def on_optimizer_step(self, step):
        del step

    def on_detach(self):
        pass

    def logs(self):
        return {}


def test_another_callback_that_fails_does_not_lose_blocks(tmp_path):
    with GradientStore(tmp_path / "store") as store:
        manager = make_manager([OffloadCallback(store), Broken(3)])
        with pytest.raises(Failure):
            train(manager)
        # the step whose backward failed was not completed
        assert [record.step for record in store.records] == [0, 1, 2]


def test_beside_a_data_selection(tmp_path):
    """Gradients that the selection takes unscaled are stored as the examples' own."""
    rows = make_rows(18)
    with GradientStore(tmp_path / "one") as one, GradientStore(tmp_path / "two") as two:
        train(make_manager([OffloadCallback(one)]), rows=rows)
        manager = make_manager([])
        selection = DataSelectionCallback(manager.model, selection_kwargs={"threshold": -1e30})
        manager = HookManager(
            manager.model,
            loss_reduction="model",
            callbacks=[selection, OffloadCallback(two)],
        )
        train(manager, rows=rows)
        assert_same_content(one, two)
