"""What the processes of ``test_wrapped_capture`` run: models in DDP, FSDP and ``fully_shard``."""

import contextlib
import copy
import warnings

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from training import collate, expected_gradients, make_model, make_rows

from gradtrail.distributed import rank, world_size
from gradtrail.errors import GradTrailWarning
from gradtrail.factors import Projection, to_dense
from gradtrail.hooks import HookManager, LivePass, OptimizerSnapshot, select_layers
from gradtrail.hooks.sharded import Shards
from gradtrail.hooks.wrapped import named_modules, named_parameters

VOCAB = 17


class Block(nn.Module):
    """A part of ``Tied``: convolution over positions, a norm, two linears."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Conv1d(6, 6, 3, padding=1, groups=2)
        self.norm = nn.LayerNorm(6)
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6, bias=False)

    def forward(self, hidden):
        hidden = hidden + self.mix(hidden.mT).mT
        return hidden + self.down(torch.tanh(self.up(self.norm(hidden))))


class Tied(nn.Module):
    """A language model whose table is its head too, and whose first layer reads a parameter."""

    def __init__(self, blocks=2):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 6)
        self.start = nn.Parameter(torch.randn(1, 1, 6))
        self.project = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(6, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids, labels, **_):
        start = self.project(self.start.expand(len(input_ids), 1, 6))
        hidden = torch.cat([start, self.embed(input_ids)[:, :-1]], 1)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.read(hidden)
        losses = F.cross_entropy(logits.mT, labels, reduction="none")
        return losses.sum(1)

    def read(self, hidden):
        return self.head(hidden)


class OutsideForm(Tied):
    """The same, whose head reads the table without a module's call."""

    def __init__(self):
        super().__init__()
        self.head = None

    def read(self, hidden):
        return hidden @ self.embed.weight.t()


class Regressor(nn.Module):
    """Reads vectors at any number of positions and gives others."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(6, 3)

    def forward(self, hidden):
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def build(name):
    """A model in float64, and the class of its blocks."""
    if name in ("gpt2", "llama", "classifier"):
        model = make_model(name, checkpointing=True).double()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        return model, type((model.transformer.h if name == "gpt2" else model.model.layers)[0])
    torch.manual_seed(4)
    if name == "regressor":
        return Regressor().double(), Block
    return (Tied if name == "tied" else OutsideForm)().double(), Block


def wrap(model, kind, how, per_block):
    """Wrap a model; meshes and devices are named, so that nothing goes to an accelerator."""
    mesh = init_device_mesh("cpu", (world_size(),))
    if how.startswith("ddp"):
        options = how.split("-")[1:]
        return DistributedDataParallel(model, **dict.fromkeys(options, True))
    if how in ("fsdp1", "no_shard"):
        return FullyShardedDataParallel(
            model,
            sharding_strategy=ShardingStrategy.NO_SHARD if how == "no_shard" else None,
            device_mesh=mesh,
            device_id=torch.device("cpu"),
            use_orig_params=True,
            auto_wrap_policy=ModuleWrapPolicy({kind}) if per_block else None,
        )
    if how == "fully_shard":
        units = [m for m in model.modules() if isinstance(m, kind)] if per_block else []
        for module in (*units, model):
            fully_shard(module, mesh=mesh)
    return model


def checkpoint(model, kind, way):
    """Let blocks be recomputed in the backward, by torch's wrapper or the library's own way."""
    if way == "own":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    elif way == "wrapper":
        parents = [
            (parent, name, child)
            for parent in list(model.modules())
            for name, child in parent.named_children()
            if isinstance(child, kind)
        ]
        for parent, name, child in parents:
            setattr(parent, name, checkpoint_wrapper(child))
    return model


def unsynchronized(model):
    """A backward that leaves gradients to the next one to be reduced."""
    if isinstance(model, (DistributedDataParallel, FullyShardedDataParallel)):
        return model.no_sync()

    @contextlib.contextmanager
    def without():
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)

    return without()


def captured(manager, block):
    """A block's gradients by plain parameter name."""
    names = {id(parameter): name for name, parameter in named_parameters(manager.model)}
    found = {}
    for unit in manager.selection.units:
        if unit.name not in block.layers:  # a table of positions, which serves the whole batch
            continue
        owner = unit.owners[0]
        parts = owner.rule.to_parameters(owner.module, to_dense(block.layers[unit.name]))
        for role, value in parts.items():
            found[names[id(owner.module._parameters[role])]] = value
    return found


def assert_near(got, expected, tolerance=1e-6):
    for name, value in got.items():
        scale = float(expected[name].abs().max())
        error = float((value - expected[name]).abs().max())
        assert error <= tolerance * scale, f"{name}: {error:.2e} of {scale:.2e}"


def own_rows(step):
    """The rows of one step on this rank, of which the first has one more than the others."""
    rows = make_rows(40)
    count = 3 if rank() == 0 else 2
    start = 10 * step + 3 * rank()
    return rows[start : start + count]


def tied_batch(rows):
    """Rows of one length, all labels counted."""
    ids = torch.stack(
        [F.pad(row["input_ids"][:3], (0, 3 - len(row["input_ids"][:3]))) for row in rows]
    )
    return {"input_ids": ids, "labels": ids}


def tied_loss(model, row):
    return model(**tied_batch([row]))[0]


def full(parameter):
    """A gradient or parameter as a plain tensor."""
    return parameter.full_tensor() if type(parameter).__name__ == "DTensor" else parameter


def capture(name, how, per_block, way=None, reduction="model"):
    """Every rank's per-example gradients are those of its rows in one process, step by step."""
    plain, kind = build(name)
    language = name in ("gpt2", "llama")
    bare = wrap(checkpoint(copy.deepcopy(plain), kind, way), kind, how, per_block)
    model = wrap(checkpoint(copy.deepcopy(plain), kind, way), kind, how, per_block)
    blocks = []
    manager = HookManager(
        model, loss_reduction=reduction if language else "mean", callbacks=[blocks.append]
    )
    there = HookManager(plain, loss_reduction="sum")
    assert manager.layers == there.layers
    assert manager.coverage.entries == there.coverage.entries

    def run(one, capturing):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        with manager.collect(optimizer) if capturing else contextlib.nullcontext():
            for step in range(2):
                for micro in range(2):
                    rows = own_rows(2 * step + micro)
                    last = micro == 1 or "static_graph" in how  # which has no no_sync() at first
                    with contextlib.nullcontext() if last else unsynchronized(one):
                        if language:
                            one(**collate(rows)).loss.backward()
                        else:
                            one(**tied_batch(rows)).mean().backward()
                optimizer.step()
                optimizer.zero_grad()

    run(bare, capturing=False)
    expected = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Layers are left out")
        run(model, capturing=True)
    for mine, theirs in zip(model.parameters(), bare.parameters(), strict=True):
        assert torch.equal(full(mine), full(theirs))  # training does not notice
    with_first = [block for block in blocks if block.step < 2]
    for block in with_first:  # of the parameters as they were built
        rows = own_rows(block.step)
        loss = {} if language else {"loss": tied_loss}
        expected = expected_gradients(plain, rows, **loss)
        got = captured(manager, block)
        assert len(next(iter(got.values()))) == len(rows)
        assert_near(got, expected)
        uncovered = {e.name for e in manager.coverage.entries if e.status != "covered"}
        assert set(got) == set(expected) - uncovered
    return [len(blocks), len(manager.layers)]


def outside(how, per_block):
    """A table that is read outside its own call is found, however it is kept."""
    plain, kind = build("outside")
    manager = HookManager(wrap(plain, kind, how, per_block), loss_reduction="sum")
    with warnings.catch_warnings(record=True) as caught, manager.collect():
        warnings.simplefilter("always")
        manager.model(**tied_batch(own_rows(0))).sum().backward()
    told = [str(one.message) for one in caught if one.category is GradTrailWarning]
    assert any("embed: its parameter is also read outside its own call" in text for text in told)
    assert "embed" not in manager.last.layers
    assert "blocks.0.up" in manager.last.layers


def single_modules(name):
    """Modules that are units of their own keep their rules: ``fully_shard`` changes classes."""
    plain, kind = build(name)
    model = copy.deepcopy(plain)
    mesh = init_device_mesh("cpu", (world_size(),))
    for module in list(model.modules()):
        norm = "RMSNorm" in type(module).__name__
        if type(module).__name__ == "Conv1D" or isinstance(module, nn.LayerNorm) or norm:
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    manager = HookManager(model, loss_reduction="model")
    assert manager.coverage.entries == select_layers(plain).coverage.entries
    rows = own_rows(0)
    with manager.collect():
        model(**collate(rows)).loss.backward()
    got = captured(manager, manager.last)
    assert len(got) >= len(manager.layers) - 1
    assert_near(got, expected_gradients(plain, rows))


def live(name, how, per_block, way=None):
    """A pass over the model held fixed, too, and nothing of it is left behind."""
    plain, kind = build(name)
    model = wrap(checkpoint(copy.deepcopy(plain), kind, way), kind, how, per_block)
    rows = own_rows(0)
    found = {}
    with LivePass(model, select_layers(model)) as opened:
        opened.run(
            lambda: model(**tied_batch(rows)) if name == "tied" else language_losses(model, rows),
            batch=len(rows),
            tokens=3,
            sink=lambda layer, gradient: found.update({layer: gradient}),
        )
        units = opened.selection.units
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(parameter.requires_grad for parameter in model.parameters())
    manager = HookManager(model)
    names = {id(parameter): at for at, parameter in named_parameters(model)}
    got = {}
    for unit in units:
        owner = unit.owners[0]
        parts = owner.rule.to_parameters(owner.module, to_dense(found[unit.name]))
        got |= {names[id(owner.module._parameters[role])]: v for role, v in parts.items()}
    loss = {"loss": tied_loss} if name == "tied" else {}
    expected = expected_gradients(plain, rows, **loss)
    assert_near(got, expected)
    assert manager.layers
    with torch.no_grad():  # leaves some units whole
        model(**(tied_batch(rows) if name == "tied" else collate(rows)))
    with LivePass(model, select_layers(model)) as opened, torch.no_grad():
        model(**(tied_batch(rows) if name == "tied" else collate(rows)))
    assert all(parameter.requires_grad for parameter in model.parameters())
    with manager.collect():
        losses = model(**tied_batch(rows)) if name == "tied" else language_losses(model, rows)
        losses.sum().backward()
    assert_near(captured(manager, manager.last), expected)
    grads = [(p, torch.zeros_like(p) if p.grad is None else p.grad) for p in model.parameters()]
    assert all(bool(whole.any()) for whole in Shards(model).wholes(grads))
    return len(got)


def language_losses(model, rows):
    """One summed loss a row."""
    batch = collate(rows)
    labels = batch.pop("labels")[:, 1:]
    logits = model(**batch).logits[:, :-1]
    return F.cross_entropy(logits.mT, labels, reduction="none").sum(1)


def names(how, per_block, way):
    """Modules and parameters have the names of the plain model."""
    plain, kind = build("tied")
    expected = {name for name, _ in plain.named_modules()}
    parameters = [name for name, _ in plain.named_parameters()]
    model = wrap(checkpoint(plain, kind, way), kind, how, per_block)
    assert {name for name, _ in named_modules(model)} == expected
    assert [name for name, _ in named_parameters(model)] == parameters


def choices(how, per_block):
    """Users name layers as in the plain model."""
    plain, kind = build("tied")
    model = wrap(plain, kind, how, per_block)
    assert HookManager(model, layers="blocks.1").layers[:2] == ("blocks.1.mix", "blocks.1.norm")
    assert HookManager(model, layers=["blocks.*.up"]).layers == ("blocks.0.up", "blocks.1.up")
    assert HookManager(model, layers=nn.Conv1d).layers == ("blocks.0.mix", "blocks.1.mix")
    assert HookManager(model, layers=kind, exclude="*.up").layers[:2] == (
        "blocks.0.mix",
        "blocks.0.norm",
    )
    seen = []
    HookManager(model, layers=lambda name, _: seen.append(name) or name == "project")
    assert "blocks.0.up" in seen
    assert all("module" not in name for name in seen)


def flattened():
    """Parameters that are flattened away are refused; so is the inside of a wrapper."""
    plain, _ = build("tied")
    mesh = init_device_mesh("cpu", (world_size(),))
    options = {"device_mesh": mesh, "device_id": torch.device("cpu")}
    model = FullyShardedDataParallel(copy.deepcopy(plain), use_orig_params=False, **options)
    found = []
    for one in (model, FullyShardedDataParallel(plain, use_orig_params=True, **options).module):
        try:
            HookManager(one)
        except ValueError as error:
            found.append(str(error))
    return found


def optimizer_of(kind, model):
    """An optimizer of two groups that a scheduler and another order could mix up."""
    named = list(named_parameters(model))
    decayed = [parameter for name, parameter in reversed(named) if name.endswith("weight")]
    others = [parameter for name, parameter in named if not name.endswith("weight")]
    options = {
        "AdamW": {"lr": 1e-2, "amsgrad": True},
        "SGD": {"lr": 1e-2, "momentum": 0.9},
        "NAdam": {"lr": 1e-2},
        "Adagrad": {"lr": 1e-2},
    }[kind]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 3e-3}]
    return getattr(torch.optim, kind)(groups, **options)


def close(value, expected):
    torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-12, check_dtype=False)


def assert_same_states(mine, theirs):
    assert mine.kind == theirs.kind
    assert list(mine.parameters) == list(theirs.parameters)
    for name, state in mine.parameters.items():
        expected = theirs.parameters[name]
        assert state.step == expected.step, name
        assert state.options == expected.options, name
        assert state.moments.keys() == expected.moments.keys(), name
        for moment, value in state.moments.items():
            close(value, expected.moments[moment])


def states(kind, how, per_block, projected):
    """Moments and the directions made of them are those of the plain model, before every step."""
    plain, block_kind = build("tied")
    model = wrap(copy.deepcopy(plain), block_kind, how, per_block)
    mine, theirs = optimizer_of(kind, model), optimizer_of(kind, plain)
    projection = Projection(kind="mask", dim=5, seed=3) if projected else None
    with torch.no_grad():
        model(**tied_batch(own_rows(0)))  # leaves some units whole
    one = HookManager(model, loss_reduction="mean", optimizer=mine, projection=projection)
    two = HookManager(plain, loss_reduction="mean", optimizer=theirs, projection=projection)
    kept = []
    for step in range(3):
        before = OptimizerSnapshot.of(model, mine)
        assert_same_states(before, OptimizerSnapshot.of(plain, theirs))
        kept.append((before, copy.deepcopy(before)))
        batch = tied_batch(own_rows(step))
        with one.collect(mine):
            model(**batch).mean().backward()
        with two.collect(theirs):
            plain(**batch).mean().backward()
        assert one.last.layers.keys() == two.last.layers.keys()
        for name, gradient in one.last.layers.items():
            expected = to_dense(two.last.layers[name]).values_bd
            torch.testing.assert_close(
                to_dense(gradient).values_bd, expected, rtol=1e-6, atol=1e-9, msg=name
            )
        plain.zero_grad()  # the ranks' mean, in one process
        for place in range(world_size()):
            rows = make_rows(40)[10 * step + 3 * place :][: 3 if place == 0 else 2]
            (plain(**tied_batch(rows)).mean() / world_size()).backward()
        for optimizer in (mine, theirs):
            optimizer.step()
            optimizer.zero_grad()
    for before, copied in kept:  # later steps have not changed what was copied
        assert_same_states(before, copied)
