"""What the processes of ``test_trainer_ranks`` run: a real Trainer in several processes."""

import contextlib
import os

import torch
import transformers
from rank_models import full
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from training import (
    block_gradients,
    collate,
    expected_gradients,
    make_model,
    make_rows,
    make_trainer,
)

from gradtrail import example_id
from gradtrail.callbacks import AbstractStepCallback, DataSelectionCallback, GradTrailCallback
from gradtrail.distributed import rank, world_size
from gradtrail.hooks.sharded import Shards
from gradtrail.hooks.wrapped import named_parameters

ROWS = 4  # of a joined micro-batch
SHARE = {"threshold_mode": "bottom_fraction", "threshold": 0.5}


def as_launched():
    """Let transformers and accelerate see this process group, which ``torchrun`` would announce."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._shared_state.clear()
    names = {"RANK": rank(), "LOCAL_RANK": rank(), "WORLD_SIZE": world_size()}
    os.environ.update({name: str(value) for name, value in names.items()})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"})


class InOrder(transformers.Trainer):
    """Takes rows in their order, so that ranks' batches side by side are one process's batch."""

    def _get_train_sampler(self, *_):
        return torch.utils.data.SequentialSampler(self.train_dataset)

    def _sync_replicated_trainable_parameters(self, model):
        """Take FSDP1's slices for what they are; the Trainer's own knows ``fully_shard`` alone."""
        if not isinstance(model, FullyShardedDataParallel):
            super()._sync_replicated_trainable_parameters(model)

    @contextlib.contextmanager
    def _defer_fsdp_gradient_reduction(self):
        """Let FSDP1 wait, too; the Trainer's own does so for ``fully_shard`` alone."""
        if not isinstance(self.model, FullyShardedDataParallel):
            with super()._defer_fsdp_gradient_reduction():
                yield
            return
        with self.model.no_sync():
            yield


def double_model(name):
    model = make_model(name).double()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def sharded(model, how, folder):
    """Shard a model as it is loaded, which is how a Trainer trains one on a CPU."""
    if how == "fully_shard":
        config = transformers.distributed.DistributedConfig(fsdp_size=world_size())
        model.save_pretrained(folder)  # by rank 0
        torch.distributed.barrier()
        return type(model).from_pretrained(folder, distributed_config=config, dtype=torch.float64)
    kind = type((model.model.layers if hasattr(model, "model") else model.transformer.h)[0])
    wrapped = FullyShardedDataParallel(
        model,
        device_mesh=init_device_mesh("cpu", (world_size(),)),
        device_id=torch.device("cpu"),
        use_orig_params=True,
        auto_wrap_policy=ModuleWrapPolicy({kind}),
    )
    wrapped.is_distributed_loading_by_transformers = True  # Accelerate is not to wrap it again
    return wrapped


class Gradients(AbstractStepCallback):
    """Keeps what every optimizer step is made of, joined where ranks hold parts."""

    def __init__(self):
        self.steps, self.manager = [], None

    def on_attach(self, manager):
        self.manager, self.shards = manager, Shards(manager.model)
        self.handle = manager.optimizer.register_step_pre_hook(self.on_optimizer)

    def on_step(self, block):
        """Nothing: several processes select after this."""

    def on_optimizer(self, *_):
        grads = {}
        for name, parameter in named_parameters(self.manager.model):
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            whole = full(self.shards.wholes([(parameter, grad)])[0])
            grads[name] = whole.flatten().tolist()
        self.steps.append(grads)

    def on_optimizer_step(self, step):
        """Nothing: the optimizer told it before."""

    def on_detach(self):
        self.handle.remove()

    def logs(self):
        return {}


def built(how, name, folder):
    """The model of a run, sharded where that is how it is trained."""
    as_launched()
    model = double_model(name)
    return sharded(model, how, folder) if how in ("fsdp1", "fully_shard") else model


def select(how, folder, name="llama", target="batch", accumulate=2, renormalize=True, **arguments):
    """Train with data selection; gradients of the steps, decisions and losses for the parent."""
    model = built(how, name, folder)
    options = {}
    if target == "validation":
        rows = make_rows(4, seed=9)
        options["validation_loader"] = [collate(rows[:2]), collate(rows[2:])]
    layer_wise, resume = arguments.pop("layer_wise", False), arguments.pop("resume", None)
    selection = DataSelectionCallback(
        model,
        target,
        renormalize=renormalize,
        selection_kwargs={**SHARE, "layer_wise": layer_wise},
        **options,
    )
    gradients = Gradients()
    decisions = []
    remember = selection._remember

    def told(block, scores, total, dropped):
        remember(block, scores, total, dropped)
        masks = selection.last_dropped
        masks = {None: masks} if isinstance(masks, torch.Tensor) else masks
        flags = {str(layer): mask.tolist() for layer, mask in masks.items()}
        decisions.append([total.tolist(), flags, list(block.ids)])

    selection._remember = told
    trainer = make_trainer(
        model,
        folder,
        [GradTrailCallback([selection, gradients])],
        rows=make_rows(40),
        kind=InOrder,
        per_device_train_batch_size=ROWS // world_size(),
        gradient_accumulation_steps=accumulate,
        max_grad_norm=0,
        remove_unused_columns=False,
        **{"max_steps": 3, "eval_strategy": "steps", "eval_steps": 1, **arguments},
    )
    trainer.train(resume_from_checkpoint=resume)
    kind = type(trainer.model_wrapped).__name__
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {"steps": gradients.steps, "decisions": decisions, "losses": losses, "kind": kind}


def capture(how, folder, name="llama", accumulate=2):
    """Every rank's gradients are its examples' own, whatever is averaged over ranks afterwards."""
    model = built(how, name, folder)
    plain, rows = double_model(name).eval(), make_rows(40)
    blocks, first = [], {}

    def keep(block):
        blocks.append(block)
        if not first:
            first.update(block_gradients(callback.manager, block))

    callback = GradTrailCallback([keep], sample_hash_fields=["input_ids"])
    trainer = make_trainer(
        model,
        folder,
        [callback],
        rows=rows,
        kind=InOrder,
        per_device_train_batch_size=ROWS // world_size(),
        gradient_accumulation_steps=accumulate,
        remove_unused_columns=False,
        max_steps=2,
        eval_strategy="steps",
        eval_steps=1,
    )
    trainer.train()
    known = {example_id(row, ["input_ids"]): row for row in rows}
    own = [known[name] for name in blocks[0].ids]
    expected = expected_gradients(plain, own)  # of the parameters as they were built
    assert first.keys() == expected.keys()
    largest = max(float(value.abs().max()) for value in expected.values())
    for parameter, value in first.items():
        error = float((value - expected[parameter]).abs().max())
        assert error <= 1e-6 * largest, parameter
    return [len(blocks), [len(block.ids) for block in blocks], type(trainer.model_wrapped).__name__]


def own_counts(folder):
    """Ranks that divide by their own labels cannot make a mean over all of them anew."""
    select("ddp", folder, average_tokens_across_devices=False)
