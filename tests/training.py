"""What the tests of training loops share: rows, a collator, tiny models and real Trainers."""

import copy
import dataclasses
import gc

import pytest
import torch
from torch.nn import functional as F

from gradtrail import example_id
from gradtrail.callbacks import AbstractStepCallback
from gradtrail.factors import to_dense
from gradtrail.hooks.labels import model_kind
from gradtrail.hooks.wrapped import named_parameters, unwrapped

VOCAB = 17
TIMES = {"train_runtime", "train_samples_per_second", "train_steps_per_second"} | {
    f"eval_{name}" for name in ("runtime", "samples_per_second", "steps_per_second")
}


def make_model(name, checkpointing=False):
    """A tiny model in float32, weights from a fixed seed; GPT-2 with its dropout."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    sides = {"vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    if name == "gpt2":
        config = transformers.GPT2Config(n_positions=16, n_embd=8, n_layer=2, n_head=2, **sides)
        model = transformers.GPT2LMHeadModel(config)
    else:
        sides |= {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2}
        config = transformers.LlamaConfig(
            num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=16, **sides
        )
        kind = {"llama": "LlamaForCausalLM", "classifier": "LlamaForSequenceClassification"}[name]
        model = getattr(transformers, kind)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    if checkpointing:
        model.config.use_cache = False
    return model


def make_rows(count=40, *, classes=None, seed=0):
    """Rows of different length; every third has a prompt whose labels do not count."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for number in range(count):
        length = int(torch.randint(3, 9, (1,), generator=generator))
        ids = torch.randint(1, VOCAB, (length,), generator=generator)
        labels = ids.clone()
        if number % 3 == 0:
            labels[:2] = -100
        rows.append({"input_ids": ids, "labels": labels if classes is None else number % classes})
    return rows


def collate(rows):
    """Pad on the right; whatever else a row holds is stacked."""
    longest = max(len(row["input_ids"]) for row in rows)
    fills = {"input_ids": 0, "attention_mask": 0}
    rows = [{**row, "attention_mask": torch.ones_like(row["input_ids"])} for row in rows]
    if torch.is_tensor(rows[0]["labels"]):
        fills["labels"] = -100
    batch = {
        name: torch.stack(
            [F.pad(row[name], (0, longest - len(row[name])), value=fill) for row in rows]
        )
        for name, fill in fills.items()
    }
    others = [name for name in rows[0] if name not in fills]
    return batch | {name: torch.tensor([row[name] for row in rows]) for name in others}


def make_trainer(
    model, folder, callbacks=(), *, rows=None, kind=None, checkpointing=False, **arguments
):
    """A real Trainer on the CPU, quiet, that logs every step."""
    transformers = pytest.importorskip("transformers")
    if checkpointing:  # renamed in transformers 5
        names = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
        new = "activation_checkpointing" in names
        arguments["activation_checkpointing" if new else "gradient_checkpointing"] = True
    defaults = {
        "max_steps": 30,
        "per_device_train_batch_size": 3,
        "per_device_eval_batch_size": 4,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_num_workers": 0,
    }
    options = {name: arguments.pop(name) for name in ("compute_loss_func",) if name in arguments}
    settings = transformers.TrainingArguments(str(folder), **{**defaults, **arguments})
    trainer = (kind or transformers.Trainer)(
        model,
        settings,
        train_dataset=make_rows() if rows is None else rows,
        eval_dataset=make_rows(8, seed=9),
        data_collator=collate,
        callbacks=list(callbacks),
        **options,
    )
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def hooks_on(model):
    """Number of hooks on a model's modules."""
    return sum(
        len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()
    )


def logs_of(trainer):
    """The Trainer's log without the entries that hold clock times."""
    return [
        {name: value for name, value in entry.items() if name not in TIMES}
        for entry in trainer.state.log_history
    ]


def assert_same_training(one, two):
    """Parameters, optimizer state, logs and random state, to the bit."""
    for (name, mine), theirs in zip(
        one.model.state_dict().items(), two.model.state_dict().values(), strict=True
    ):
        assert torch.equal(mine, theirs), name
    mine, theirs = (trainer.optimizer.state_dict()["state"] for trainer in (one, two))
    assert mine.keys() == theirs.keys()
    for number, state in mine.items():
        for name, value in state.items():
            assert torch.equal(value, theirs[number][name]), (number, name)
    assert logs_of(one) == logs_of(two)


class Recorder(AbstractStepCallback):
    """Keeps what it was told, and a copy of the model at every backward."""

    def __init__(self, *, copies=False):
        self.moments, self.blocks, self.steps, self.models = [], [], [], []
        self.copies = copies
        self.manager = None

    def on_attach(self, manager):
        self.manager = manager
        self.moments.append("attach")

    def on_step(self, block):
        self.moments.append("step")
        self.blocks.append(block)
        if self.copies:
            self.models.append(bare_copy(self.manager.model))

    def on_optimizer_step(self, step):
        self.moments.append("skipped" if step.skipped else "optimizer step")
        self.steps.append(step)

    def on_detach(self):
        self.moments.append("detach")

    def logs(self):
        return {"gradtrail_blocks": float(len(self.blocks))}


def bare_copy(model):
    """A copy without the hooks and DDP's wrapper, in evaluation mode."""
    twin = copy.deepcopy(unwrapped(model)).eval()
    vars(twin).pop("forward", None)  # accelerate's and TRL's, which are bound to the original
    for module in twin.modules():
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
    return twin


def own_loss(model, row):
    """One example's own loss, summed over its positions, of the bare model's logits."""
    logits = model(input_ids=row["input_ids"].unsqueeze(0)).logits[0]
    labels = torch.as_tensor(row["labels"])
    if labels.dim() == 0:
        return F.cross_entropy(logits, labels)
    if model_kind(model) == "causal":
        logits, labels = logits[:-1], labels[1:]
    return F.cross_entropy(logits, labels, reduction="sum")


def expected_gradients(model, rows, loss=own_loss):
    """Differentiate every row alone by plain autograd. By parameter name, ``[n, *shape]``."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = {name: [] for name in names}
    for row in rows:
        gradients = torch.autograd.grad(loss(model, row), parameters, allow_unused=True)
        for name, parameter, gradient in zip(names, parameters, gradients, strict=True):
            found[name].append(torch.zeros_like(parameter) if gradient is None else gradient)
    return {name: torch.stack(values) for name, values in found.items()}


def block_gradients(manager, block):
    """A block's gradients by parameter name."""
    names = {id(parameter): name for name, parameter in named_parameters(manager.model)}
    found = {}
    for unit in manager.selection.units:
        if unit.name in block.layers:
            owner = unit.owners[0]
            parts = owner.rule.to_parameters(owner.module, to_dense(block.layers[unit.name]))
            for role, value in parts.items():
                found[names[id(owner.module._parameters[role])]] = value
    return found


def assert_own_gradients(recorder, rows, *, tolerance=2e-5, loss=own_loss, key=example_id):
    """Every block holds the gradients of its examples' own losses, known by their ids."""
    known = {key(row): row for row in rows}
    assert recorder.blocks
    for block, model in zip(recorder.blocks, recorder.models, strict=True):
        assert_block(
            recorder.manager,
            block,
            model,
            [known[name] for name in block.ids],
            tolerance=tolerance,
            loss=loss,
        )


def assert_block(manager, block, model, rows, *, tolerance=2e-5, loss=own_loss):
    """One block next to autograd, relative to every parameter's largest entry."""
    got, expected = block_gradients(manager, block), expected_gradients(model, rows, loss)
    left = {entry.name for entry in manager.coverage.with_status("unsupported")}
    assert set(got) == set(expected) - left
    largest = max(float(value.abs().max()) for value in expected.values())
    for name, value in got.items():
        scale = max(float(expected[name].abs().max()), 1e-3 * largest)
        error = float((value - expected[name]).abs().max())
        assert error <= tolerance * scale, f"{name}: {error:.2e} of {scale:.2e}"


def live_tensors():
    """Number of tensors that are alive."""
    gc.collect()
    return sum(issubclass(type(entry), torch.Tensor) for entry in gc.get_objects())
