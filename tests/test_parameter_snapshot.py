"""Recorded parameters and batches, and the gradients that a replay makes of them again."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from training import (
    assert_same_training,
    collate,
    make_model,
    make_rows,
    make_trainer,
)

from gradtrail import GradTrailCallback, HookManager, MergedSteps, Projection
from gradtrail.callbacks import ParameterSnapshotCallback, replay
from gradtrail.callbacks.snapshot_calls import pack, unpack
from gradtrail.errors import StoreError
from gradtrail.factors import tensors_of, to_dense
from gradtrail.store import StepStore

pytestmark = [
    pytest.mark.filterwarnings("ignore::gradtrail.GradTrailWarning"),
    # peft asks transformers by a name that is going away
    pytest.mark.filterwarnings("ignore:.*deprecated and will be removed in v6:FutureWarning"),
]


def lora(model):
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    config = peft.LoraConfig(
        r=2, target_modules=["c_attn"], lora_dropout=0.3, fan_in_fan_out=True, lora_alpha=4
    )
    return peft.get_peft_model(model, config)


MODELS = {
    "gpt2": lambda: make_model("gpt2"),  # with dropout
    "llama": lambda: make_model("llama"),
    "lora": lambda: lora(make_model("gpt2")),
}


def assert_same_blocks(got, expected):
    assert [block.step for block in got] == [block.step for block in expected]
    for mine, theirs in zip(got, expected, strict=True):
        assert mine.ids == theirs.ids
        assert list(mine.layers) == list(theirs.layers)
        for layer, gradient in mine.layers.items():
            pairs = zip(tensors_of(gradient), tensors_of(theirs.layers[layer]), strict=True)
            for one, two in pairs:
                torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-7)


def trained(name, folder, callbacks=(), **arguments):
    options = {"max_steps": 4, "gradient_accumulation_steps": 2, "weight_decay": 0.1}
    trainer = make_trainer(MODELS[name](), folder, callbacks, **{**options, **arguments})
    trainer.train()
    return trainer


def state_of(model):
    """Everything of a model, and of the process, that a replay must leave alone."""
    return (
        copy.deepcopy(model.state_dict()),
        {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()},
        [module.training for module in model.modules()],
        [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()],
        torch.get_rng_state(),
    )


@pytest.mark.parametrize("name", MODELS)
def test_a_trainers_gradients_are_made_again(name, tmp_path):
    blocks, store = [], StepStore(tmp_path / "store")
    trainer = trained(
        name,
        tmp_path / "run",
        [GradTrailCallback([ParameterSnapshotCallback(store), blocks.append])],
    )
    bare = trained(name, tmp_path / "run")
    assert_same_training(trainer, bare)
    assert store.steps == (0, 1, 2, 3)
    store.close()

    model = MODELS[name]()
    next(p for p in model.parameters() if p.requires_grad).grad = None
    torch.manual_seed(123)
    before = state_of(model.eval())
    with StepStore(tmp_path / "store", mode="read") as store:
        manager = HookManager(model, loss_reduction="model")
        got = list(replay(manager, store))
    assert_same_blocks(got, blocks)
    torch.testing.assert_close(state_of(model), before, rtol=0, atol=0)


def recorded(steps=4, *, micro=1, callbacks=(), store=None, start=0, model=None, **options):
    """A plain loop over a small model with dropout, its loss taken outside: store and blocks."""
    torch.manual_seed(start)
    model = small() if model is None else model
    store = StepStore(residency="memory") if store is None else store
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    blocks = []
    manager = HookManager(
        model,
        callbacks=[
            ParameterSnapshotCallback(store, **options),
            MergedSteps(blocks.append),
            *callbacks,
        ],
    )
    manager.optimizer_steps = start
    generator = torch.Generator().manual_seed(start)
    with manager.collect(optimizer):
        for _ in range(steps):
            optimizer.zero_grad()
            for _ in range(micro):
                x = torch.randn(3, 4, generator=generator)
                y = torch.randint(0, 2, (3,), generator=generator)
                loss_of(model(x, targets=y), {"targets": y}).backward()
            optimizer.step()
    return model, store, blocks


class Small(nn.Module):
    """Dropout, and a module that evaluates while the others train."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.one = nn.Linear(4, 6)
        self.drop = nn.Dropout(0.5)
        self.still = nn.Dropout(0.5).eval()
        self.two = nn.Linear(6, 2)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("shift", torch.ones(6))

    def forward(self, x, targets=None):
        del targets
        self.calls += 1
        hidden = self.drop(torch.tanh(self.one(x))) + self.shift * self.calls
        return self.two(self.still(hidden))


def small():
    return Small()


def loss_of(output, fields):
    return F.cross_entropy(output, fields["targets"], reduction="sum")


@pytest.mark.parametrize("micro", [1, 2])
def test_a_plain_loops_gradients_are_made_again(micro):
    """Dropout, a module that evaluates, and a buffer that every forward changes."""
    model, store, blocks = recorded(micro=micro)
    twin = small()
    got = list(replay(HookManager(twin), store, loss=loss_of))
    assert_same_blocks(got, blocks)
    assert twin.calls == 0
    # backwards: every step on the model as it was
    back = list(replay(HookManager(twin), store, loss=loss_of, reverse=True))
    assert_same_blocks(back, blocks[::-1])
    assert_same_blocks(
        list(replay(HookManager(twin), store, steps=[3, 1], loss=loss_of)), [blocks[1], blocks[3]]
    )
    # a buffer that nothing changed is not stored, and must be the same
    assert "call/0/buffer/shift" not in store.names(0)
    twin.shift += 1
    with pytest.raises(ValueError, match="must be the one that was trained, got one whose shift"):
        list(replay(HookManager(twin), store, loss=loss_of))
    del model


def test_the_model_has_a_steps_parameters_while_its_block_is_used():
    _, store, _ = recorded()
    twin = small()
    start = copy.deepcopy(twin.state_dict())
    for block in replay(HookManager(twin), store, loss=loss_of):
        own = store.read(block.step)["parameter/one.weight"]
        assert torch.equal(twin.one.weight, own)
        assert not twin.one._forward_pre_hooks  # nothing is captured meanwhile
        assert twin.one.weight.grad is None
    torch.testing.assert_close(twin.state_dict(), start, rtol=0, atol=0)


def test_a_replay_that_is_left_puts_everything_back():
    _, store, _ = recorded()
    twin = small()
    twin.one.weight.grad = torch.ones_like(twin.one.weight)
    before = state_of(twin)
    for block in replay(HookManager(twin), store, loss=loss_of):
        assert block.step == 0
        break
    torch.testing.assert_close(state_of(twin), before, rtol=0, atol=0)

    def failing(*_):
        raise ArithmeticError("no loss")

    with pytest.raises(ArithmeticError, match="no loss"):
        list(replay(HookManager(twin), store, loss=failing))
    torch.testing.assert_close(state_of(twin), before, rtol=0, atol=0)


def test_each_stored_step_is_read_once(monkeypatch):
    _, store, _ = recorded(steps=5)
    read = []
    original = store.log.tensor

    def counted(entry, name, *rest):
        read.append((entry.facts["step"], name))
        return original(entry, name, *rest)

    monkeypatch.setattr(store.log, "tensor", counted)
    assert len(list(replay(HookManager(small()), store, loss=loss_of, reverse=True))) == 5
    assert len(read) == len(set(read))


def test_a_replay_captures_as_its_manager_says():
    _, store, blocks = recorded()
    projection = Projection(kind="dense", dim=3)
    manager = HookManager(
        small(), layers="one", projection=projection, capture="materialized", sample_id_key=None
    )
    for got, whole in zip(replay(manager, store, loss=loss_of), blocks, strict=True):
        assert list(got.layers) == ["one"]
        assert got.layers["one"].values_bd.shape == (3, 3)
        assert to_dense(whole.layers["one"]).values_bd.shape == (3, 30)


def test_ids_that_a_trainer_keeps_from_the_model_are_kept_from_it_again(tmp_path):
    rows = [{**row, "number": place} for place, row in enumerate(make_rows(12))]
    blocks, store = [], StepStore(residency="memory")
    trained(
        "llama",
        tmp_path,
        [
            GradTrailCallback(
                [ParameterSnapshotCallback(store), blocks.append], sample_id_key="number"
            )
        ],
        rows=rows,
        max_steps=2,
        remove_unused_columns=False,
    )
    manager = HookManager(make_model("llama"), loss_reduction="model", sample_id_key="number")
    got = list(replay(manager, store))
    assert all(isinstance(name, int) for block in got for name in block.ids)
    assert_same_blocks(got, blocks)
    call = store.values(0)["calls"][0]
    assert call["hidden"] == ["number"]
    assert call["ids"] == list(got[0].ids[:3])


def test_mixed_precision_is_made_again(tmp_path):
    blocks, store = [], StepStore(residency="memory")
    trained(
        "llama",
        tmp_path,
        [GradTrailCallback([ParameterSnapshotCallback(store), blocks.append])],
        bf16=True,
        max_steps=2,
    )
    assert store.values(0)["calls"][0]["autocast"] == "bfloat16"
    got = list(replay(HookManager(make_model("llama"), loss_reduction="model"), store))
    assert_same_blocks(got, blocks)
    layer, manager = "lm_head", HookManager(make_model("llama"), loss_reduction="model")
    with manager.collect():  # in full precision, other gradients
        call = store.values(0)["calls"][0]["kwargs"]
        tensors = {name.removeprefix("call/0/"): v for name, v in store.read(0).items()}
        device = torch.device("cpu")
        batch = {name: unpack(packed, tensors, device) for name, packed in call.items()}
        manager.model.train()(**batch).loss.backward()
    one, two = (to_dense(b.layers[layer]).values_bd for b in (got[0], manager.last))
    assert 1e-3 < (one[:3] - two).abs().max() / two.abs().max() < 0.1


def test_forwards_without_a_backward_and_two_before_their_backwards():
    torch.manual_seed(0)
    model, store = small(), StepStore(residency="memory")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    blocks = []
    manager = HookManager(
        model, callbacks=[ParameterSnapshotCallback(store), MergedSteps(blocks.append)]
    )
    x, y = torch.randn(6, 4), torch.tensor([0, 1, 1, 0, 1, 0])
    with manager.collect(optimizer):
        for _ in range(2):
            first, second = (model(x[k : k + 3], targets=y[k : k + 3]) for k in (0, 3))
            model(x[:2], targets=y[:2])  # nothing comes of it
            with torch.no_grad():
                model(x[1:3])
            loss_of(second, {"targets": y[3:]}).backward()
            loss_of(first, {"targets": y[:3]}).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert [len(store.values(step)["calls"]) for step in store.steps] == [2, 2]
    assert_same_blocks(list(replay(HookManager(small()), store, loss=loss_of)), blocks)


def test_only_some_steps_are_recorded_and_none_that_was_skipped():
    _, store, blocks = recorded(steps=5, every=2)
    assert store.steps == (0, 2, 4)
    assert_same_blocks(list(replay(HookManager(small()), store, loss=loss_of)), blocks[::2])

    model, store = small(), StepStore(residency="memory")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    manager = HookManager(model, callbacks=[ParameterSnapshotCallback(store)])
    with manager.collect(optimizer):
        for skipped in (True, False):
            loss_of(model(torch.ones(2, 4)), {"targets": torch.tensor([0, 1])}).backward()
            manager.skip_optimizer_step() if skipped else optimizer.step()
        optimizer.step()  # without a backward
    assert store.steps == (1,)
    assert len(store.values(1)["calls"]) == 1


def test_a_loop_that_resumes_replaces_its_later_records():
    model, store, blocks = recorded(steps=4)
    model.calls.zero_()
    weight = model.one.weight.detach().clone()
    _, _, again = recorded(steps=1, start=2, store=store, model=model)
    assert store.steps == (0, 1, 2)
    assert torch.equal(store.read(2)["parameter/one.weight"], weight)
    got = list(replay(HookManager(small()), store, loss=loss_of))
    assert_same_blocks(got, [*blocks[:2], *again])


# ---------------------------------------------------------------- refusals


def test_another_frozen_base_is_refused():
    base = make_model("gpt2")
    model, store = lora(base), StepStore(residency="memory")
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    manager = HookManager(
        model, loss_reduction="model", callbacks=[ParameterSnapshotCallback(store)]
    )
    with manager.collect(optimizer):
        model(**collate(make_rows(2))).loss.backward()
        optimizer.step()
    assert {name.split("/")[0] for name in store.names(0)} == {"parameter", "call"}
    assert all("lora" in name for name in store.names(0) if name.startswith("parameter"))
    assert len(list(replay(HookManager(model, loss_reduction="model"), store))) == 1
    with torch.no_grad():
        base.transformer.h[1].mlp.c_fc.weight.mul_(1.5)
    with pytest.raises(ValueError, match=r"got one whose .*h.1.mlp.c_fc.weight differs"):
        replay(HookManager(model, loss_reduction="model"), store)


def test_another_model_is_refused():
    _, store, _ = recorded()
    frozen = small()
    frozen.two.weight.requires_grad_(False)
    with pytest.raises(ValueError, match=r"got one whose two.weight differs \(or is trained in"):
        replay(HookManager(frozen), store)
    wider = small()
    wider.two = nn.Linear(6, 3)
    with pytest.raises(ValueError, match=r"must have two.weight of shape \(2, 6\).*got shape"):
        list(replay(HookManager(wider), store, loss=loss_of))
    lacking = small()
    lacking.two = nn.Linear(6, 2, bias=False)
    with pytest.raises(ValueError, match=r"must have two.bias of shape \(2,\).*got none"):
        list(replay(HookManager(lacking), store, loss=loss_of))


def test_a_model_without_a_loss_needs_one():
    _, store, _ = recorded(steps=1)
    with pytest.raises(ValueError, match="loss must be given where the model returns none, got"):
        list(replay(HookManager(small()), store))


def test_a_store_of_something_else_is_refused():
    with pytest.raises(ValueError, match="must have been recorded by ParameterSnapshotCallback"):
        replay(HookManager(small()), StepStore(residency="memory"))
    store = StepStore(residency="memory")
    store.define(recorder="OptimizerStateCallback")
    with pytest.raises(StoreError, match="recorder must be that of the store"):
        recorded(steps=1, store=store)


def test_what_cannot_be_recorded_is_refused():
    store = StepStore(residency="memory")
    with pytest.raises(ValueError, match="every must be an integer of at least 1, got 0"):
        ParameterSnapshotCallback(store, every=0)
    callback = ParameterSnapshotCallback(store)
    manager = HookManager(small(), callbacks=[callback])
    with (
        pytest.raises(ValueError, match=r"optimizer must be passed to collect\(\) where param"),
        manager.collect(),
    ):
        pass
    model = small()
    optimizer = torch.optim.SGD(model.parameters())
    manager = HookManager(model, callbacks=[callback, callback])
    with (
        pytest.raises(RuntimeError, match="ParameterSnapshotCallback must be attached once"),
        manager.collect(optimizer),
    ):
        pass
    assert manager.forward_notes == {}
    manager = HookManager(model, callbacks=[callback])
    with (
        pytest.raises(TypeError, match=r"None, or lists, .*got set for argument/targets. Call it"),
        manager.collect(optimizer),
    ):
        model(torch.ones(2, 4), targets={1, 2})


def test_parts_of_parameters_are_refused():
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    mesh = pytest.importorskip("torch.distributed.device_mesh")
    dist = torch.distributed
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = nn.Sequential(nn.Linear(4, 3))
        fsdp.fully_shard(model, mesh=mesh.init_device_mesh("cpu", (1,)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        callback = ParameterSnapshotCallback(StepStore(residency="memory"))
        manager = HookManager(model, callbacks=[callback])
        with (
            pytest.raises(ValueError, match="model must be whole in every process .* got FSDP"),
            manager.collect(optimizer),
        ):
            pass
    finally:
        dist.destroy_process_group()


def test_arguments_come_back_as_they_were():
    value = {
        "a": [torch.ones(2), (torch.tensor(3), None)],
        "b": {1: "text", "c": 2.5, "d": True},
        "e": torch.zeros(0, 3, dtype=torch.int64),
    }
    tensors = {}
    packed = pack(value, "argument/x", tensors)
    value["a"][0].zero_()
    back = unpack(packed, tensors, torch.device("cpu"))
    assert torch.equal(back["a"][0], torch.ones(2))  # as it was when it was packed
    back["a"][0].zero_()
    assert torch.equal(unpack(packed, tensors, torch.device("cpu"))["a"][0], torch.ones(2))
    assert type(back["a"]) is list
    assert type(back["a"][1]) is tuple
    assert back["a"][1][1] is None
    assert back["b"] == value["b"]
    assert back["e"].shape == (0, 3)
    with pytest.raises(TypeError, match="got Tensor for x"):
        pack(torch.ones(2, 2).to_sparse(), "x", {})
