"""Capture inside ``transformers.Trainer``, ``accelerate`` and plain loops."""

import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from training import (
    VOCAB,
    Recorder,
    assert_block,
    assert_own_gradients,
    assert_same_training,
    bare_copy,
    collate,
    expected_gradients,
    hooks_on,
    live_tensors,
    logs_of,
    make_model,
    make_rows,
    make_trainer,
    own_loss,
)

from gradtrail import CaptureError, GradTrailWarning, HookManager, Projection, example_id
from gradtrail.callbacks import AbstractStepCallback, GradTrailCallback, MergedSteps
from gradtrail.callbacks.merge import merge_blocks
from gradtrail.callbacks.trainer import _refuse_unknown_ground
from gradtrail.factors import DenseGradient, GradientBlock, LinearFactors, to_dense

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")

# GPT-2's position table is shared by the batch, and the capture says so
quiet = pytest.mark.filterwarnings("ignore::gradtrail.GradTrailWarning")
OLD = tuple(int(part) for part in transformers.__version__.split(".")[:2]) < (4, 50)
EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


@pytest.fixture(autouse=True)
def fresh_accelerator(monkeypatch):
    """The accelerator's state is global: what one test sets up must not reach the next."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")  # older Trainers write to it
    yield
    accelerate.state.AcceleratorState._reset_state()
    accelerate.state.GradientState._reset_state()


# ---------------------------------------------------------------- training does not notice


def run(name, folder, callbacks, *, checkpointing=False, resume=None, **arguments):
    model = make_model(name, checkpointing)
    trainer = make_trainer(
        model,
        folder,
        callbacks,
        eval_strategy="steps",
        eval_steps=5,
        checkpointing=checkpointing,
        **arguments,
    )
    torch.manual_seed(11)
    trainer.train(resume_from_checkpoint=resume)
    return trainer, torch.get_rng_state()


slow = pytest.mark.slow


@quiet
@pytest.mark.parametrize(
    ("name", "checkpointing", "accumulation"),
    [
        ("gpt2", False, 4),
        ("gpt2", True, 1),
        ("llama", False, 1),
        ("llama", True, 4),
        pytest.param("gpt2", False, 1, marks=slow),
        pytest.param("gpt2", True, 4, marks=slow),
        pytest.param("llama", False, 4, marks=slow),
        pytest.param("llama", True, 1, marks=slow),
    ],
)
def test_training_is_equal_to_the_bit(tmp_path, name, checkpointing, accumulation):
    options = {"checkpointing": checkpointing, "gradient_accumulation_steps": accumulation}
    bare, bare_state = run(name, tmp_path, [], **options)
    blocks, recorder = [], Recorder()
    capture = GradTrailCallback([blocks.append, recorder], projection=Projection(dim=2))
    held, state = run(name, tmp_path, [capture], **options)
    for entry in held.state.log_history:
        entry.pop("gradtrail_blocks", None)
    assert_same_training(held, bare)
    assert torch.equal(state, bare_state)
    assert [block.step for block in blocks] == list(range(30))
    # 40 rows, 3 a batch: the 14th batch of an epoch is of one row, its 4th step of two batches
    assert capture.manager.steps == sum(len(step.blocks) for step in recorder.steps)
    assert {len(step.blocks) for step in recorder.steps} == ({1} if accumulation == 1 else {4, 2})
    assert len([entry for entry in logs_of(held) if "eval_loss" in entry]) == 6
    assert hooks_on(held.model) == hooks_on(bare.model)  # checkpointing leaves one of its own


@quiet
def test_resume_from_a_checkpoint(tmp_path):
    """A resumed run is equal to the bit too, and its steps and examples are the whole run's."""
    whole, _ = run("gpt2", tmp_path / "whole", [], save_strategy="steps", save_steps=10)
    blocks, again = [], []
    held, state = run("gpt2", tmp_path / "held", [GradTrailCallback([blocks.append])])
    assert_same_training(held, whole)
    checkpoint = str(tmp_path / "whole" / "checkpoint-10")
    resumed, resumed_state = run(
        "gpt2", tmp_path / "resumed", [GradTrailCallback([again.append])], resume=checkpoint
    )
    bare, _ = run("gpt2", tmp_path / "bare", [], resume=checkpoint)
    assert_same_training(resumed, bare)
    assert torch.equal(resumed_state, state)
    whole.state.log_history[-1] = resumed.state.log_history[-1]  # the mean of its own steps' losses
    assert_same_training(resumed, whole)
    assert [block.step for block in again] == list(range(10, 30))
    assert [block.ids for block in again] == [block.ids for block in blocks[10:]]
    for mine, theirs in zip(again, blocks[10:], strict=True):
        for layer, gradient in mine.layers.items():
            assert torch.equal(
                to_dense(gradient).values_bd, to_dense(theirs.layers[layer]).values_bd
            )


def test_memory_does_not_grow_with_the_steps(tmp_path):
    counts = []

    class Count(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):  # noqa: ARG002
            if state.global_step % 10 == 0:
                counts.append(live_tensors())

    capture = GradTrailCallback([lambda _: None])
    run("llama", tmp_path, [capture, Count()])
    assert len(counts) == 3
    assert counts[2] <= counts[1], counts


# ---------------------------------------------------------------- an example's own gradient


@quiet
@pytest.mark.parametrize(
    ("name", "checkpointing", "accumulation"),
    [
        ("gpt2", False, 4),
        ("gpt2", True, 1),
        ("llama", False, 1),
        ("llama", True, 4),
        pytest.param("gpt2", False, 1, marks=slow),
        pytest.param("gpt2", True, 4, marks=slow),
        pytest.param("llama", False, 4, marks=slow),
        pytest.param("llama", True, 1, marks=slow),
    ],
)
def test_gradients_are_the_examples_own(tmp_path, name, checkpointing, accumulation):
    """Summed over positions, whatever the Trainer divides by; also where parameters move."""
    model, rows, recorder = make_model(name, checkpointing), make_rows(), Recorder(copies=True)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    trainer = make_trainer(
        model,
        tmp_path,
        [GradTrailCallback([recorder])],
        rows=rows,
        max_steps=3,
        gradient_accumulation_steps=accumulation,
        checkpointing=checkpointing,
    )
    trainer.train()
    assert len(recorder.blocks) == 3 * accumulation
    assert_own_gradients(recorder, rows)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_gradients_of_a_classifier(tmp_path, accumulation):
    rows, recorder = make_rows(classes=2), Recorder(copies=True)
    trainer = make_trainer(
        make_model("classifier"),
        tmp_path,
        [GradTrailCallback([recorder])],
        rows=rows,
        max_steps=2,
        gradient_accumulation_steps=accumulation,
    )
    trainer.train()
    assert_own_gradients(recorder, rows)


def autocast_loss(model, row):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return own_loss(model, row)


def test_gradients_under_bfloat16_autocast(tmp_path):
    rows, recorder = make_rows(), Recorder(copies=True)
    capture = GradTrailCallback([recorder])
    trainer = make_trainer(
        make_model("llama"), tmp_path, [capture], rows=rows, max_steps=2, bf16=True
    )
    trainer.train()
    assert_own_gradients(recorder, rows, tolerance=0.05, loss=autocast_loss)


@pytest.mark.skipif(OLD, reason="there the Trainer sums the means of the micro-batches")
def test_merged_block_is_the_optimizer_steps_gradient(tmp_path):
    """The examples' gradients, divided by the labels of all micro-batches, sum to ``.grad``."""
    model, blocks, grads, counts = make_model("llama"), [], [], []

    class Note(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, **kwargs):  # noqa: ARG002
            grads.append({name: p.grad.clone() for name, p in model.named_parameters()})

    rows = make_rows()
    known = {example_id(row): row for row in rows}
    capture = GradTrailCallback([blocks.append])
    trainer = make_trainer(
        model,
        tmp_path,
        [capture, Note()],
        rows=rows,
        max_steps=6,
        gradient_accumulation_steps=4,
        max_grad_norm=0.0,
    )
    trainer.train()
    assert [len(block.ids) for block in blocks[:4]] == [12, 12, 12, 4]
    for block, grad in zip(blocks, grads, strict=True):
        counts = sum(int((known[name]["labels"][1:] != -100).sum()) for name in block.ids)
        for layer, gradient in block.layers.items():
            whole = to_dense(gradient).values_bd.sum(0) / counts
            unit = next(unit for unit in capture.manager.selection.units if unit.name == layer)
            owner = unit.owners[0]
            parts = owner.rule.to_parameters(
                owner.module, DenseGradient(whole.unsqueeze(0), *_shape_of(gradient))
            )
            for role, value in parts.items():
                name = f"{layer}.{role}"
                torch.testing.assert_close(value[0], grad[name], rtol=1e-4, atol=1e-6)


def _shape_of(gradient):
    dense = to_dense(gradient)
    return dense.shape, dense.has_bias


# ---------------------------------------------------------------- losses outside the model


class OwnLoss(transformers.Trainer):
    """Takes a mean over examples from the logits, as many losses in use do."""

    loss_is_scaled_for_ga = False

    def compute_loss(self, model, inputs, return_outputs=False, **_):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = nn.functional.cross_entropy(outputs.logits, labels)
        return (loss, outputs) if return_outputs else loss


def test_loss_that_passes_the_models_own_by_is_refused_until_it_is_described(tmp_path):
    rows, recorder = make_rows(classes=2), Recorder(copies=True)
    options = {"rows": rows, "max_steps": 2, "kind": OwnLoss}
    trainer = make_trainer(make_model("classifier"), tmp_path, [GradTrailCallback()], **options)
    with pytest.raises(CaptureError, match=r"from the loss that the model returns .* passes it by"):
        trainer.train()
    capture = GradTrailCallback([recorder], loss_reduction="mean")
    trainer = make_trainer(make_model("classifier"), tmp_path, [capture], **options)
    trainer.train()
    # the model is not given the labels, so they are no part of the ids
    assert_own_gradients(recorder, rows, key=lambda row: example_id(row, ["input_ids"]))


def test_model_loss_that_is_no_known_mean_is_refused(tmp_path):
    class Doubled(type(make_model("llama"))):
        def forward(self, input_ids, attention_mask, labels, **fields):
            fields |= {"attention_mask": attention_mask, "labels": labels}
            outputs = super().forward(input_ids=input_ids, **fields)
            outputs.loss = 2 * outputs.loss
            return outputs

    model = make_model("llama")
    model.__class__ = Doubled
    trainer = make_trainer(model, tmp_path, [GradTrailCallback()], max_steps=1)
    with pytest.raises(CaptureError, match=r"divided by the number of labels, .* for a sum of"):
        trainer.train()


def test_options_that_cannot_be_are_refused(tmp_path):
    arguments = transformers.TrainingArguments(str(tmp_path), report_to=[], use_cpu=True)
    _refuse_unknown_ground(arguments, "model")
    arguments.label_smoothing_factor = 0.1
    with pytest.raises(ValueError, match=r"label_smoothing_factor must be 0 .* got 0\.1"):
        _refuse_unknown_ground(arguments, "model")
    _refuse_unknown_ground(arguments, "sum")
    arguments.label_smoothing_factor = 0.0
    arguments.fsdp, arguments.fsdp_config = True, {"version": 2}
    _refuse_unknown_ground(arguments, "model")
    arguments.fsdp_config = {"xla": True}
    with pytest.raises(ValueError, match="fsdp_config must be without xla, got xla=True"):
        _refuse_unknown_ground(arguments, "model")
    arguments.fsdp, arguments.deepspeed = None, "config.json"
    with pytest.raises(ValueError, match=r"deepspeed must be off, got 'config\.json'"):
        _refuse_unknown_ground(arguments, "model")
    arguments.deepspeed = None
    arguments._n_gpu = 2
    with pytest.raises(ValueError, match="n_gpu must be at most 1, got 2"):
        _refuse_unknown_ground(arguments, "model")
    with pytest.raises(ValueError, match=r"loss_scale must be None with loss_reduction='model'"):
        HookManager(make_model("llama"), loss_reduction="model", loss_scale=2.0)
    for value in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="loss_scale must be a positive number, got"):
            HookManager(make_model("llama"), loss_scale=value)


# ---------------------------------------------------------------- how training ends


def test_early_stopping_detaches(tmp_path):
    recorder = Recorder()
    stop = transformers.EarlyStoppingCallback(early_stopping_patience=1)
    trainer = make_trainer(
        make_model("llama"),
        tmp_path,
        [GradTrailCallback([recorder]), stop],
        learning_rate=1.0,
        eval_strategy="steps",
        save_strategy="steps",
        eval_steps=2,
        save_steps=2,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        greater_is_better=False,
    )
    trainer.train()
    assert trainer.state.global_step < 30
    assert len(recorder.steps) == trainer.state.global_step
    assert recorder.moments[-1] == "detach"
    assert hooks_on(trainer.model) == 0


class FailAt(transformers.TrainerCallback):
    """Raises once, at a moment of the user's choice."""

    def __init__(self, step):
        self.step = step

    def on_step_begin(self, args, state, control, **kwargs):  # noqa: ARG002
        if state.global_step == self.step:
            self.step = None
            raise KeyboardInterrupt


def test_exception_leaves_a_capture_that_takes_itself_off(tmp_path, caplog):
    model, recorder = make_model("llama"), Recorder()
    capture = GradTrailCallback([recorder])
    trainer = make_trainer(model, tmp_path, [capture, FailAt(3)], max_steps=6)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert len(recorder.blocks) == 3
    with caplog.at_level(logging.WARNING, logger="gradtrail"):
        model(**collate(make_rows(2))).loss.backward()
    assert "ended by an exception" in caplog.text
    assert len(recorder.blocks) == 3
    assert recorder.moments[-1] == "detach"
    assert hooks_on(model) == 0


def test_exception_and_another_training_with_the_same_callback(tmp_path):
    model, recorder = make_model("llama"), Recorder()
    capture = GradTrailCallback([recorder])
    trainer = make_trainer(model, tmp_path, [capture, FailAt(3)], max_steps=6)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.train()
    moments = [moment for moment in recorder.moments if moment != "step"]
    assert moments == [
        *["attach", *["optimizer step"] * 3, "detach"],
        *["attach", *["optimizer step"] * 6, "detach"],
    ]
    assert [step.step for step in recorder.steps] == [0, 1, 2, 0, 1, 2, 3, 4, 5]
    assert hooks_on(model) == 0


def test_exception_and_detach(tmp_path):
    model = make_model("llama")
    capture = GradTrailCallback()
    trainer = make_trainer(model, tmp_path, [capture, FailAt(2)], max_steps=6)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert hooks_on(model) > 0
    capture.detach()
    capture.detach()
    assert hooks_on(model) == 0


def test_callback_that_refuses_at_the_start(tmp_path):
    class Refusing(Recorder):
        def on_attach(self, manager):
            super().on_attach(manager)
            raise ValueError("layers must be covered")

    model, first = make_model("llama"), Recorder()
    trainer = make_trainer(model, tmp_path, [GradTrailCallback([first, Refusing()])], max_steps=2)
    with pytest.raises(ValueError, match="layers must be covered"):
        trainer.train()
    assert first.moments == ["attach", "detach"]
    assert hooks_on(model) == 0


# ---------------------------------------------------------------- what callbacks are told


def test_moments_and_logs(tmp_path):
    recorder = Recorder()
    capture = GradTrailCallback([recorder])
    assert isinstance(capture, transformers.TrainerCallback)
    assert isinstance(capture, GradTrailCallback)
    trainer = make_trainer(
        make_model("llama"),
        tmp_path,
        [capture],
        max_steps=2,
        gradient_accumulation_steps=2,
        eval_strategy="steps",
        eval_steps=1,
    )
    trainer.train()
    one_step = ["step", "step", "optimizer step"]
    assert recorder.moments == ["attach", *one_step, *one_step, "detach"]
    assert [step.blocks for step in recorder.steps] == [(0, 1), (2, 3)]
    for step in recorder.steps:
        assert step.ids == tuple(
            name for number in step.blocks for name in recorder.blocks[number].ids
        )
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["gradtrail_blocks"] for entry in logged] == [2.0, 4.0]
    others = [entry for entry in trainer.state.log_history if "loss" not in entry]
    assert not any("gradtrail_blocks" in entry for entry in others)


def test_ids_of_the_batch_that_the_model_does_not_see(tmp_path):
    class Strict(type(make_model("llama"))):
        def forward(self, input_ids, attention_mask, labels, num_items_in_batch=None):
            return super().forward(
                input_ids=input_ids,
                attention_mask=attention_mask,
                labels=labels,
                num_items_in_batch=num_items_in_batch,
            )

    model, recorder = make_model("llama"), Recorder(copies=True)
    model.__class__ = Strict
    rows = [{"row": 100 + number, **row} for number, row in enumerate(make_rows(12))]
    trainer = make_trainer(
        model,
        tmp_path,
        [GradTrailCallback([recorder], sample_id_key="row")],
        rows=rows,
        max_steps=4,
        remove_unused_columns=False,
    )
    trainer.train()
    assert sorted(name for block in recorder.blocks for name in block.ids) == list(range(100, 112))
    for copied in recorder.models:
        copied.__class__ = Strict.__bases__[0]
    assert_own_gradients(recorder, rows, key=lambda row: row["row"])


# ---------------------------------------------------------------- merging


def test_merged_steps_need_an_optimizer():
    manager = HookManager(make_model("llama"), callbacks=[MergedSteps(print)])
    with pytest.raises(ValueError, match=r"optimizer must be passed to collect\(\)"):
        manager.collect().__enter__()
    assert hooks_on(manager.model) == 0


def test_merging_blocks_of_different_form_and_layers():
    a, g = torch.randn(2, 3, 4), torch.randn(2, 3, 5)
    factors = LinearFactors(a, g)
    dense = to_dense(LinearFactors(torch.randn(1, 7, 4), torch.randn(1, 7, 5)))
    blocks = [
        GradientBlock(0, ("a", "b"), {"both": factors, "first": factors}),
        GradientBlock(1, ("c",), {"both": dense, "second": dense}),
    ]
    merged = merge_blocks(9, blocks, ["first", "both", "second", "neither"])
    assert (merged.step, merged.ids) == (9, ("a", "b", "c"))
    assert list(merged.layers) == ["first", "both", "second"]
    written, rest = to_dense(factors).values_bd, dense.values_bd
    expected = {
        "first": torch.cat([written, torch.zeros_like(rest)]),
        "both": torch.cat([written, rest]),
        "second": torch.cat([torch.zeros_like(written), rest]),
    }
    for name, values in expected.items():
        torch.testing.assert_close(to_dense(merged.layers[name]).values_bd, values)
    alone = merge_blocks(3, blocks[:1])
    assert alone.layers["both"] is factors


def test_layer_refused_in_a_later_micro_batch_is_left_out_of_the_merged_block():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            hidden = self.a(x)
            return hidden + (self.b(x.mean(0)) if x[0, 0] > 10 else self.b(x))

    model, blocks = Model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    manager = HookManager(model, callbacks=[MergedSteps(blocks.append)])
    x = torch.randn(3, 4)
    with manager.collect(optimizer):
        model(x).square().sum().backward()
        with pytest.warns(GradTrailWarning, match="Layers are left out"):
            model(x + 20).square().sum().backward()
        optimizer.step()
    assert list(blocks[0].layers) == ["a"]
    assert len(blocks[0].ids) == 6


# ---------------------------------------------------------------- accelerate and plain loops


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_accelerate(precision):
    """Its wrapped optimizer, accumulation and backward; the last group of an epoch is short."""
    accelerator = accelerate.Accelerator(
        gradient_accumulation_steps=2, cpu=True, mixed_precision=precision
    )
    rows, recorder, merged = make_rows(15), Recorder(copies=True), []
    model = make_model("llama")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = torch.utils.data.DataLoader(rows, batch_size=3, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    manager = HookManager(
        accelerator.unwrap_model(model),
        loss_reduction="model",
        callbacks=[recorder, MergedSteps(merged.append)],
    )
    with manager.collect(optimizer):
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                optimizer.step()
                optimizer.zero_grad()
    assert [step.blocks for step in recorder.steps] == [(0, 1), (2, 3), (4,)]
    assert [len(block.ids) for block in merged] == [6, 6, 3]
    tight = {"tolerance": 2e-5, "loss": own_loss}
    loose = {"tolerance": 0.05, "loss": autocast_loss}
    assert_own_gradients(recorder, rows, **(tight if precision == "no" else loose))
    assert hooks_on(manager.model) == 0


@pytest.mark.parametrize("measured", [True, False], ids=["model", "described"])
def test_plain_loop_with_accumulation_and_a_loss_scaler(measured):
    """The loss scale is divided out, and a step that the scaler skips is reported as such."""
    rows, recorder, merged = make_rows(18), Recorder(copies=True), []
    model = make_model("llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    options = {"loss_reduction": "model"}
    if not measured:
        options = {
            "loss_reduction": "token_mean",
            "loss_scale": lambda: scaler.get_scale() / 3,
        }
    manager = HookManager(model, callbacks=[recorder, MergedSteps(merged.append)], **options)
    with manager.collect(optimizer):
        for number in range(6):
            batch = collate(rows[3 * number : 3 * number + 3])
            loss = model(**batch).loss / 3
            scaler.scale(loss).backward()
            if number == 4:
                model.lm_head.weight.grad[0, 0] = torch.inf
            if number % 3 == 2:
                before = scaler.get_scale()
                scaler.step(optimizer)
                scaler.update()
                if scaler.get_scale() < before:
                    manager.skip_optimizer_step()
                optimizer.zero_grad()
    kinds = [moment for moment in recorder.moments if moment not in ("attach", "step", "detach")]
    assert kinds == ["optimizer step", "skipped"]
    assert [step.skipped for step in recorder.steps] == [False, True]
    assert [block.step for block in merged] == [0]
    assert_own_gradients(recorder, rows)


def test_plain_loop_of_a_model_that_returns_a_tuple():
    model, rows = make_model("llama"), make_rows(3)
    manager = HookManager(model, loss_reduction="model")
    with manager.collect():
        (7 * model(**collate(rows), return_dict=False)[0]).backward()
    assert_block(manager, manager.last, bare_copy(model), rows)
    assert manager.optimizer is None


def test_plain_loop_with_a_forward_that_has_no_loss():
    """It may be there for something else; a backward through it is what cannot be captured."""
    model, rows = make_model("llama"), make_rows(3)
    batch = collate(rows)
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    manager = HookManager(model, loss_reduction="model")
    with manager.collect():
        model(**inputs)
        with pytest.raises(CaptureError, match="passes it by"):
            model(**inputs).logits.sum().backward()
        with pytest.raises(CaptureError, match="passes it by"):
            model(**batch).logits.sum().backward()
        model(**batch).loss.backward()
    assert manager.steps == 1
    assert_block(manager, manager.last, bare_copy(model), rows)


def test_batch_in_which_no_label_counts():
    """Nothing can be told of its mean, 0 / 0; with a count from the loop its gradients are zero."""
    model, rows = make_model("llama"), make_rows(3)
    batch = collate(rows)
    batch["labels"].fill_(-100)
    manager = HookManager(model, loss_reduction="model")
    with manager.collect():
        model(**batch, num_items_in_batch=torch.tensor(5)).loss.backward()
        for gradient in manager.last.layers.values():
            assert not to_dense(gradient).values_bd.any()
        model(**collate(rows)).loss.backward()
    assert_block(manager, manager.last, bare_copy(model), rows)


@pytest.mark.parametrize("counts", [True, False], ids=["divides-by-items", "ignores-items"])
def test_models_that_ignore_the_loops_count_are_found_out(counts):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 3)

        def forward(self, x, labels, num_items_in_batch=None):
            logits = self.inner(x)
            total = nn.functional.cross_entropy(logits, labels, reduction="sum")
            return {"loss": total / (num_items_in_batch if counts else len(x)), "logits": logits}

    torch.manual_seed(0)
    model, x, labels = Model(), torch.randn(3, 4), torch.tensor([0, 2, 1])
    manager = HookManager(model, loss_reduction="model")
    with manager.collect():
        for items in (3, 12, 12):
            twin = bare_copy(model)
            model(x=x, labels=labels, num_items_in_batch=torch.tensor(items)).get("loss").backward()
            weight = to_dense(manager.last.layers["inner"]).values_bd[:, :12].view(3, 3, 4)
            rows = [{"x": x[row : row + 1], "labels": labels[row : row + 1]} for row in range(3)]
            expected = expected_gradients(
                twin,
                rows,
                lambda model, row: nn.functional.cross_entropy(
                    model.inner(row["x"]), row["labels"]
                ),
            )
            torch.testing.assert_close(weight, expected["inner.weight"], rtol=1e-5, atol=1e-6)


class Scorer(nn.Module):
    """Returns the labels' log-probabilities and leaves the loss to the loop, as TRL's models do."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(VOCAB, 4), nn.Linear(4, VOCAB)

    def forward(self, input_ids, labels=None, **_):
        logits = self.head(self.table(input_ids))
        if labels is None:
            return SimpleNamespace(logits=logits)
        picked = logits.log_softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        return {"loss": None, "log_probs": picked.masked_fill(labels == -100, 0)}


@pytest.mark.parametrize("factor", [-2.0, 0.0])
def test_plain_loop_that_climbs_or_leaves_a_batch_out(factor):
    model, rows = make_model("llama"), make_rows(3)
    manager = HookManager(model, loss_reduction="model")
    with manager.collect():
        (factor * model(**collate(rows)).loss).backward()
    if factor:
        assert_block(manager, manager.last, bare_copy(model), rows)
    else:
        assert not any(to_dense(layer).values_bd.any() for layer in manager.last.layers.values())


def test_plain_loop_that_sums_log_probabilities():
    model, rows = Scorer(), make_rows(3)
    batch = collate(rows)
    manager = HookManager(model, loss_reduction="model")
    with manager.collect():
        (-model(**batch)["log_probs"].sum() / 17 * 1024).backward()
        assert_block(manager, manager.last, bare_copy(model), rows)
        weights = torch.arange(batch["labels"].numel()).view_as(batch["labels"]).float()
        with pytest.raises(CaptureError, match="one weight, got weights that differ in the log-"):
            (-model(**batch)["log_probs"] * weights).sum().backward()
        batch["labels"].fill_(-100)
        (-model(**batch)["log_probs"].sum()).backward()
        assert not any(to_dense(layer).values_bd.any() for layer in manager.last.layers.values())
    assert manager.steps == 2


def test_base_class_lists_every_moment():
    names = AbstractStepCallback.__abstractmethods__
    assert names == {"on_attach", "on_step", "on_optimizer_step", "on_detach", "logs"}


# ---------------------------------------------------------------- on a device, and the example


@pytest.mark.gpu
def test_fp16_trainer_divides_the_loss_scale_out(tmp_path):
    rows, recorder = make_rows(), Recorder(copies=True)
    trainer = make_trainer(
        make_model("llama").cuda(),
        tmp_path,
        [GradTrailCallback([recorder])],
        rows=rows,
        max_steps=4,
        fp16=True,
        use_cpu=False,
    )
    trainer.train()
    assert len(recorder.steps) == 4
    good = [not recorder.steps[number].skipped for number in range(4)]
    for copied in recorder.models:
        copied.cpu()
    recorder.blocks = [block for block, ok in zip(recorder.blocks, good, strict=True) if ok]
    recorder.models = [model for model, ok in zip(recorder.models, good, strict=True) if ok]
    assert_own_gradients(recorder, rows, tolerance=0.02)


@pytest.mark.slow
def test_two_processes(tmp_path):
    """Ranks train on their own examples; what averages over ranks does to the loss is undone."""
    script = str(Path(__file__).with_name("training_ranks.py"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run(
        [*command, script, str(tmp_path)],
        capture_output=True,
        encoding="utf-8",
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert f"rank {rank} of 2: [6, 6, 6]" in done.stdout


def test_example_finds_the_scrambled_rows(tmp_path):
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "trainer_callback.py"), "--steps", "40"],
        capture_output=True,
        encoding="utf-8",
        cwd=tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "40 optimizer steps of 2 micro-batches of 8 rows" in done.stdout
    assert "80 of 80 rows were seen" in done.stdout
    found = re.search(r"^(\d) of the 8 rows with the largest gradients", done.stdout, re.MULTILINE)
    assert int(found[1]) >= 6, done.stdout
