"""The optimizer's state by parameter name, update directions of captured gradients, the records."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from training import (
    Recorder,
    assert_same_training,
    collate,
    make_model,
    make_rows,
    make_trainer,
    own_loss,
)

from gradtrail import GradTrailCallback, HookManager
from gradtrail.callbacks import DataSelectionCallback, OptimizerStateCallback, read_states
from gradtrail.errors import StoreError
from gradtrail.factors import DenseGradient, Projection, project, to_dense
from gradtrail.hooks import (
    DIRECTIONS,
    OptimizerSnapshot,
    layer_parameters,
    layer_states,
    select_layers,
)
from gradtrail.store import StepStore

F64 = torch.float64
pytestmark = [
    pytest.mark.filterwarnings("ignore::gradtrail.GradTrailWarning"),
    # peft asks transformers by a name that is going away
    pytest.mark.filterwarnings("ignore:.*deprecated and will be removed in v6:FutureWarning"),
]
# read once for the whole batch, so that a training capture cannot tell its examples apart
SHARED = {"transformer.wpe", "transformer.wpe.weight"}


class Shapes(nn.Module):
    """One layer of each kind of layout: convolutions, a table, norms, a tied pair of linears."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, 6)
        self.conv = nn.Conv1d(6, 4, 3, padding=1, groups=2)
        self.back = nn.ConvTranspose1d(4, 6, 3, padding=1, groups=2)
        self.norm = nn.LayerNorm(6)
        self.one = nn.Linear(6, 6)
        self.two = nn.Linear(6, 6, bias=False)
        self.two.weight = self.one.weight
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.table.weight

    def forward(self, index):
        hidden = self.back(torch.tanh(self.conv(self.table(index).transpose(1, 2))))
        hidden = self.norm(hidden.transpose(1, 2))
        return self.head(self.two(torch.tanh(self.one(hidden))))


def lora(model):
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    config = peft.LoraConfig(
        r=2, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False
    )
    return peft.get_peft_model(model, config)


def shapes():
    torch.manual_seed(0)
    return Shapes()


MODELS = {
    "gpt2": lambda: make_model("gpt2"),
    "llama": lambda: make_model("llama"),
    "gpt2-lora": lambda: lora(make_model("gpt2")),
    "shapes": shapes,
}


def two_groups(model, cls=torch.optim.AdamW, **options):
    """Matrices with weight decay first, as trainers have it (but the last first), then the rest."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained[::-1] if p.dim() > 1], "weight_decay": 0.3},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0, "lr": 0.02},
    ]
    return cls(groups, **{"lr": 0.05, **options})


def batch_of(model, seed=0, count=3):
    if isinstance(model, Shapes):
        generator = torch.Generator().manual_seed(seed)
        return {"index": torch.randint(0, 7, (count, 5), generator=generator)}
    return collate(make_rows(count, seed=seed))


def summed_loss(model, batch):
    """The sum of the examples' own losses."""
    if isinstance(model, Shapes):
        logits, labels = model(**batch), batch["index"].flip(1)
    else:
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        logits, labels = logits[:, :-1], batch["labels"][:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def train(model, optimizer, steps, seed=10):
    for step in range(steps):
        optimizer.zero_grad()
        summed_loss(model, batch_of(model, seed + step)).backward()
        optimizer.step()
    optimizer.zero_grad()


def names_of(model):
    return {id(parameter): name for name, parameter in model.named_parameters()}


def by_parameter(model, units, layers):
    """Written-out gradients cut into parameters by the layers' own rules. By parameter name."""
    names, found = names_of(model), {}
    for unit in units:
        if unit.name not in layers:
            continue
        owner = unit.owners[0]
        parts = owner.rule.to_parameters(owner.module, to_dense(layers[unit.name]))
        for role, value in parts.items():
            found[names[id(owner.module._parameters[role])]] = value
    return found


def stepped_alone(model, optimizer, batch):
    """What a copy's step on each example alone moves, over -lr, decay off. By parameter name."""
    count = len(next(iter(batch.values())))
    found = {}
    for row in range(count):
        twin, stepper = copy.deepcopy((model, optimizer))
        rates = {}
        for group in stepper.param_groups:
            group["weight_decay"] = 0.0
            rates |= dict.fromkeys(map(id, group["params"]), group["lr"])
        stepper.zero_grad()
        summed_loss(twin, {name: value[row : row + 1] for name, value in batch.items()}).backward()
        for parameter in twin.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        stepper.step()
        old = dict(model.named_parameters())
        for name, parameter in twin.named_parameters():
            if id(parameter) in rates:
                moved = (parameter - old[name]).detach() / -rates[id(parameter)]
                found.setdefault(name, []).append(moved)
    return {name: torch.stack(rows) for name, rows in found.items()}


# ---------------------------------------------------------------- snapshots


@pytest.mark.parametrize("name", MODELS)
def test_every_moment_lands_on_its_own_parameter(name):
    model = MODELS[name]().double()
    optimizer = two_groups(model)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    given = {}
    for number, (own, parameter) in enumerate(trained.items()):
        count = torch.arange(parameter.numel(), dtype=F64).reshape(parameter.shape)
        given[own] = {"exp_avg": count + 1e5 * number, "exp_avg_sq": -count - 1e5 * number}
        optimizer.state[parameter] = {"step": torch.tensor(float(number)), **given[own]}
    order = [p for group in optimizer.param_groups for p in group["params"]]
    assert [id(p) for p in order] != [id(p) for p in trained.values()]  # the groups do reorder

    snapshot = OptimizerSnapshot.of(model, optimizer)
    assert list(snapshot.parameters) == list(trained)
    for number, own in enumerate(trained):
        state = snapshot.state(own)
        assert state.step == number
        assert state.options["weight_decay"] == (0.3 if trained[own].dim() > 1 else 0.0)
        assert state.options["lr"] == (0.05 if trained[own].dim() > 1 else 0.02)
        assert state.options["betas"] == (0.9, 0.999)
        for moment, value in given[own].items():
            assert torch.equal(state.moments[moment], value)

    units = select_layers(model).units
    layers = layer_states(model, units, snapshot)
    assert set(layers) == {unit.name for unit in units}
    assert sum(sum(state.sizes.values()) for state in layers.values()) == sum(
        parameter.numel() for parameter in trained.values()
    )
    gradients = gradients_of(model, units)
    for moment in ("exp_avg", "exp_avg_sq"):
        rows = {
            layer: DenseGradient(
                torch.cat([part.moments[moment] for part in state.parts.values()]).unsqueeze(0),
                gradients[layer].shape,
                gradients[layer].has_bias,
            )
            for layer, state in layers.items()
            if layer not in SHARED
        }
        cut = by_parameter(model, units, rows)
        assert set(cut) == set(trained) - SHARED
        for own, values in cut.items():
            assert torch.equal(values[0], given[own][moment]), own


def gradients_of(model, units):
    """A written-out gradient of every layer."""
    manager = HookManager(model)
    with manager.collect():
        summed_loss(model, batch_of(model)).backward()
    model.zero_grad()
    assert set(manager.last.layers) == {unit.name for unit in units} - SHARED
    return {name: to_dense(gradient) for name, gradient in manager.last.layers.items()}


def test_conv1d_moments_lie_as_its_gradients_do():
    model = make_model("gpt2")
    layer = layer_parameters(select_layers(model).units, model)["transformer.h.0.attn.c_attn"]
    moment_io = torch.randn(8, 24)  # the fused queries, keys and values
    assert layer.parameters["weight"].shape == moment_io.shape
    assert torch.equal(layer.row("weight", moment_io), moment_io.t().flatten())
    square = layer_parameters(select_layers(model).units, model)["transformer.h.0.attn.c_proj"]
    moment_io = torch.randn(8, 8)
    assert torch.equal(square.row("weight", moment_io), moment_io.t().flatten())


def test_a_sparse_or_scalar_moment_has_a_row():
    model = shapes()
    layer = layer_parameters(select_layers(model).units, model)["table"]
    moment = torch.zeros(7, 6)
    moment[2] = 1.0
    assert torch.equal(layer.row("weight", moment.to_sparse()), moment.flatten())
    assert layer.row("weight", torch.tensor(3.0)).dim() == 0


def test_a_snapshot_does_not_follow_the_next_step():
    model = shapes().double()
    optimizer = two_groups(model)
    train(model, optimizer, 2)
    snapshot = OptimizerSnapshot.of(model, optimizer)
    kept = copy.deepcopy(snapshot)
    optimizer.param_groups[0]["lr"] = 7.0
    train(model, optimizer, 1)
    assert OptimizerSnapshot.of(model, optimizer).state("one.weight").options["lr"] == 7.0
    assert_same_snapshot(snapshot, kept)
    live = optimizer.state[model.one.weight]["exp_avg"]
    assert not torch.equal(snapshot.state("one.weight").moments["exp_avg"], live)


def assert_same_snapshot(one, two):
    assert one.kind == two.kind
    assert list(one.parameters) == list(two.parameters)
    for name, mine in one.parameters.items():
        theirs = two.parameters[name]
        assert mine.step == theirs.step
        assert mine.options == theirs.options
        assert mine.moments.keys() == theirs.moments.keys()
        for moment, value in mine.moments.items():
            assert value.dtype == theirs.moments[moment].dtype
            assert torch.equal(value, theirs.moments[moment])


@pytest.mark.parametrize("kind", ["AdamW", "SGD", "NAdam"])
def test_snapshots_come_back_from_files(kind, tmp_path):
    model = shapes().bfloat16()
    options = {"momentum": 0.9} if kind == "SGD" else {}
    optimizer = two_groups(model, getattr(torch.optim, kind), **options)
    train(model, optimizer, 2)
    model.norm.weight.grad = None
    optimizer.state.pop(model.norm.weight)  # a parameter that never had a gradient
    snapshot = OptimizerSnapshot.of(model, optimizer)
    snapshot.save(tmp_path / "deep" / "optimizer.safetensors")
    back = OptimizerSnapshot.load(str(tmp_path / "deep" / "optimizer.safetensors"))
    assert_same_snapshot(snapshot, back)
    assert back.state("norm.weight").moments == {}


def test_files_that_hold_no_snapshot_are_refused(tmp_path):
    from safetensors.torch import save_file

    save_file({"w": torch.ones(2)}, tmp_path / "other.safetensors")
    with pytest.raises(StoreError, match=r"must hold an optimizer's snapshot .*, got None"):
        OptimizerSnapshot.load(tmp_path / "other.safetensors")
    model = nn.Linear(2, 2)
    path = tmp_path / "torn.safetensors"
    OptimizerSnapshot.of(model, torch.optim.SGD(model.parameters(), momentum=0.9)).save(path)
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(StoreError, match="must be a whole safetensors file"):
        OptimizerSnapshot.load(path)


def test_a_state_dict_with_its_order_gives_the_same_snapshot(tmp_path):
    model = make_model("gpt2")
    optimizer = two_groups(model)
    train(model, optimizer, 2)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    loaded = torch.load(tmp_path / "optimizer.pt", weights_only=True)
    names = names_of(model)
    order = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
    snapshot = OptimizerSnapshot.from_state_dict(model, loaded, kind="AdamW", names=order)
    expected = OptimizerSnapshot.of(model, optimizer)
    assert set(snapshot.parameters) == set(expected.parameters)
    for name, state in expected.parameters.items():
        assert snapshot.state(name).options == state.options
        for moment, value in state.moments.items():
            assert torch.equal(snapshot.state(name).moments[moment], value)
    with pytest.raises(ValueError, match="names must be in the order of state_dict's parameters"):
        OptimizerSnapshot.from_state_dict(model, loaded, names=order[::-1])
    with pytest.raises(ValueError, match=r"one name for each of the \d+ parameters .*got 0"):
        OptimizerSnapshot.from_state_dict(model, loaded)
    wrong = ["transformer.wte.wait", *order[1:]]
    with pytest.raises(ValueError, match=r"got 'transformer.wte.wait'. Near names: .*wte.weight"):
        OptimizerSnapshot.from_state_dict(model, loaded, names=wrong)
    with pytest.raises(ValueError, match="state with exp_avg, exp_avg_sq beside momentum_buffer"):
        OptimizerSnapshot.from_state_dict(model, loaded, kind="SGD", names=order)
    fresh = {"state": {}, "param_groups": loaded["param_groups"]}
    with pytest.raises(ValueError, match="A group of RMSprop must have alpha, .* without alpha"):
        OptimizerSnapshot.from_state_dict(model, fresh, kind="RMSprop", names=order)
    with pytest.raises(TypeError, match="must be one of Adadelta.*got Rprop"):
        OptimizerSnapshot.from_state_dict(model, loaded, kind="Rprop", names=order)


def test_a_state_dict_may_know_its_names():
    model = shapes()
    optimizer = torch.optim.SGD(list(model.named_parameters())[::-1], lr=0.1, momentum=0.9)
    train(model, optimizer, 2)
    snapshot = OptimizerSnapshot.from_state_dict(model, optimizer.state_dict(), kind="SGD")
    expected = OptimizerSnapshot.of(model, optimizer)
    for name, state in expected.parameters.items():
        assert torch.equal(
            snapshot.state(name).moments["momentum_buffer"], state.moments["momentum_buffer"]
        )


def test_tied_parameters_have_their_first_name():
    model = make_model("gpt2")
    assert model.lm_head.weight is model.transformer.wte.weight
    snapshot = OptimizerSnapshot.of(model, two_groups(model))
    assert "transformer.wte.weight" in snapshot.parameters
    with pytest.raises(KeyError, match=r"got 'lm_head.weight', which this AdamW does not"):
        snapshot.state("lm_head.weight")


def test_wrapped_optimizers_are_read():
    accelerate = pytest.importorskip("accelerate")
    model = shapes()
    optimizer = two_groups(model)
    train(model, optimizer, 1)
    wrapped = accelerate.Accelerator(cpu=True).prepare(optimizer)
    assert_same_snapshot(
        OptimizerSnapshot.of(model, wrapped), OptimizerSnapshot.of(model, optimizer)
    )


def test_an_optimizer_of_other_parameters_is_refused():
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="must hold parameters of the model, got a SGD of others"):
        OptimizerSnapshot.of(model, torch.optim.SGD(nn.Linear(2, 2).parameters()))


# ---------------------------------------------------------------- HookManager(optimizer=...)


@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.SGD], ids=lambda c: c.__name__)
@pytest.mark.parametrize("name", MODELS)
def test_captured_directions_are_steps_on_one_example_alone(name, cls):
    model = MODELS[name]().double().eval()
    options = {"momentum": 0.9, "nesterov": True} if cls is torch.optim.SGD else {}
    optimizer = two_groups(model, cls, **options)
    train(model, optimizer, 3)
    batch = batch_of(model, seed=1)
    expected = stepped_alone(model, optimizer, batch)
    manager = HookManager(model, optimizer=optimizer)
    assert manager.form.transform.kind == cls.__name__
    with manager.collect():
        summed_loss(model, batch).backward()
    got = by_parameter(model, manager.selection.units, manager.last.layers)
    assert set(got) == set(expected) - SHARED
    for own, values in got.items():
        torch.testing.assert_close(values, expected[own], rtol=1e-8, atol=1e-8)


def test_directions_are_those_of_the_examples_own_gradients():
    model = make_model("llama").double()
    optimizer = two_groups(model)
    train(model, optimizer, 2)
    batch = batch_of(model, seed=1)
    expected = stepped_alone(model, optimizer, batch)
    manager = HookManager(model, optimizer=optimizer, loss_reduction="model")
    with manager.collect():
        (0.25 * model(**batch).loss).backward()  # a mean, and a quarter of it
    got = by_parameter(model, manager.selection.units, manager.last.layers)
    for own, values in got.items():
        # the model takes its loss, and so its gradient, in float32
        torch.testing.assert_close(values, expected[own], rtol=1e-4, atol=1e-5)


def directions(model, optimizer, batch, **options):
    manager = HookManager(model, optimizer=optimizer, **options)
    with manager.collect():
        summed_loss(model, batch).backward()
    model.zero_grad()
    return manager.last.layers


def test_an_optimizer_is_followed_and_a_snapshot_is_not():
    model = shapes().double()
    optimizer = two_groups(model)
    train(model, optimizer, 2)
    snapshot, batch = OptimizerSnapshot.of(model, optimizer), batch_of(model)
    first = directions(model, optimizer, batch)
    for name, value in directions(model, snapshot, batch).items():
        assert torch.equal(value.values_bd, first[name].values_bd)
    before = copy.deepcopy(model.state_dict())
    train(model, optimizer, 1)
    model.load_state_dict(before)  # the same gradients, later moments
    for name, value in directions(model, snapshot, batch).items():
        assert torch.equal(value.values_bd, first[name].values_bd)
    later = directions(model, optimizer, batch)
    assert all(not torch.equal(later[n].values_bd, first[n].values_bd) for n in first)


def test_a_parameter_may_change_its_group():
    model = shapes().double()
    optimizer = two_groups(model)
    manager = HookManager(model, optimizer=optimizer)
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if p is not model.conv.bias]
    optimizer.add_param_group({"params": [model.conv.bias], "betas": (0.1, 0.2)})
    manager.form.transform._groups.pop(id(model.conv.bias))
    train(model, optimizer, 2)
    with manager.collect():
        summed_loss(model, batch_of(model)).backward()
    expected = stepped_alone(model, optimizer, batch_of(model))["conv.bias"]
    got = by_parameter(model, manager.selection.units, manager.last.layers)["conv.bias"]
    torch.testing.assert_close(got, expected, rtol=1e-8, atol=1e-8)


def test_few_examples_at_a_time_give_the_same_directions(monkeypatch):
    model = shapes()
    optimizer = two_groups(model)
    train(model, optimizer, 2)
    whole = directions(model, optimizer, batch_of(model))
    monkeypatch.setattr("gradtrail.hooks.update_directions._ENTRIES", 50)
    for name, got in directions(model, optimizer, batch_of(model)).items():
        assert torch.equal(got.values_bd, whole[name].values_bd)


def test_stored_gradients_of_low_precision_have_directions_in_float32():
    model = shapes()
    optimizer = two_groups(model)
    train(model, optimizer, 1)
    states = layer_states(model, select_layers(model).units, OptimizerSnapshot.of(model, optimizer))
    low = DenseGradient(torch.randn(2, 12).bfloat16(), (6,), has_bias=True)
    got = states["norm"].directions(low)
    wide = states["norm"].directions(DenseGradient(low.values_bd.float(), (6,), has_bias=True))
    assert got.values_bd.dtype == torch.float32
    assert torch.equal(got.values_bd, wide.values_bd)


@pytest.mark.parametrize("kind", ["factored", "dense", "mask"])
def test_directions_are_projected_after_the_optimizer(kind):
    model = make_model("llama").double()
    optimizer = two_groups(model)
    train(model, optimizer, 2)
    projection = Projection(kind=kind, dim=3)
    whole = directions(model, optimizer, batch_of(model))
    for name, got in directions(model, optimizer, batch_of(model), projection=projection).items():
        expected = to_dense(project(name, whole[name], projection))
        torch.testing.assert_close(to_dense(got).values_bd, expected.values_bd, rtol=1e-12, atol=0)


def test_what_cannot_give_directions_is_refused():
    model = shapes()
    some = torch.optim.SGD([model.one.weight, model.one.bias])
    with pytest.raises(ValueError, match=r"must hold every captured parameter, got one that lacks"):
        HookManager(model, optimizer=some)
    HookManager(model, layers=["one", "two"], optimizer=some)
    with pytest.raises(ValueError, match=r"lacks table.weight, conv.weight, conv.bias and 4 more"):
        HookManager(model, optimizer=OptimizerSnapshot.of(model, some))
    with pytest.raises(TypeError, match=r"torch.optim.Optimizer or an OptimizerSnapshot, got str"):
        HookManager(model, optimizer="AdamW")
    with pytest.raises(TypeError, match=r"got Rprop: how it turns a gradient into a move"):
        HookManager(model, optimizer=torch.optim.Rprop(model.parameters()))
    manager = HookManager(model, projection=Projection(dim=2))
    with manager.collect():
        summed_loss(model, batch_of(model)).backward()
    states = layer_states(
        model, manager.selection.units, OptimizerSnapshot.of(model, two_groups(model))
    )
    with pytest.raises(ValueError, match=r"must be whole, with 36 entries an example, got"):
        states["one"].directions(manager.last.layers["one"])


def test_data_selection_refuses_directions():
    model = nn.Sequential(nn.Linear(3, 2)).train()
    optimizer = torch.optim.SGD(model.parameters())
    selection = DataSelectionCallback(model, target="batch")
    manager = HookManager(model, optimizer=optimizer, callbacks=[selection])
    with (
        pytest.raises(ValueError, match="must have plain gradients, got optimizer="),
        manager.collect(optimizer),
    ):
        pass


def test_training_does_not_notice_directions():
    def trained(capture):
        model = make_model("gpt2")
        optimizer = two_groups(model)
        torch.manual_seed(5)
        manager = HookManager(model, optimizer=optimizer)
        for step in range(4):
            if capture:
                with manager.collect(optimizer):
                    train(model, optimizer, 1, seed=step)
            else:
                train(model, optimizer, 1, seed=step)
        return model.state_dict(), optimizer.state_dict()["state"], torch.get_rng_state()

    one, two = trained(capture=True), trained(capture=False)
    torch.testing.assert_close(one, two, rtol=0, atol=0)


# ---------------------------------------------------------------- the callback


class Watch(Recorder):
    """Keeps copies of the optimizer around every step, taken by hooks of the test's own."""

    def on_attach(self, manager):
        super().on_attach(manager)
        self.before, self.after = [], []
        optimizer = manager.optimizer
        optimizer.register_step_pre_hook(lambda *_: self.before.append(self.look()))

    def on_optimizer_step(self, step):
        super().on_optimizer_step(step)
        self.after.append(self.look())

    def look(self):
        return OptimizerSnapshot.of(self.manager.model, self.manager.optimizer)


def assert_recorded(model, units, facts, values, tensors, when, expected):
    """One side of a record against a snapshot that the test took itself."""
    states = read_states(facts, values, tensors, when)
    assert set(states) == {unit.name for unit in units}
    for layer, own in layer_states(model, units, expected).items():
        assert states[layer].kind == own.kind
        assert list(states[layer].sizes.items()) == list(own.sizes.items())
        for role, part in own.parts.items():
            got = states[layer].parts[role]
            assert got.step == part.step
            assert got.options == part.options
            assert got.moments.keys() == part.moments.keys()
            for moment, value in part.moments.items():
                assert torch.equal(got.moments[moment], value), (layer, role, moment)


def plain_loop(model, callbacks, *, steps=5, micro=2, start=0):
    """Accumulates micro-batches, with a schedule; the learning rates that were used."""
    optimizer = two_groups(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 4)
    manager = HookManager(model, callbacks=callbacks, loss_scale=1 / micro)
    manager.optimizer_steps = start
    used = []
    with manager.collect(optimizer):
        for step in range(steps):
            optimizer.zero_grad()
            for part in range(micro):
                batch = batch_of(model, seed=10 * step + part, count=2 + part)
                (summed_loss(model, batch) / micro).backward()
            used.append([group["lr"] for group in optimizer.param_groups])
            optimizer.step()
            schedule.step()
    return manager, used


@pytest.mark.parametrize("moments", ["before", "after", "both"])
def test_a_plain_loop_is_recorded(moments):
    model, store = shapes(), StepStore(residency="memory")
    watch = Watch()
    manager, used = plain_loop(model, [OptimizerStateCallback(store, moments=moments), watch])
    assert store.steps == (0, 1, 2, 3, 4)
    sides = {"before": watch.before, "after": watch.after}
    for step, tensors, values in store.iterate():
        for when in ("before", "after"):
            if moments in (when, "both"):
                assert_recorded(
                    model,
                    manager.selection.units,
                    store.facts,
                    values,
                    tensors,
                    when,
                    sides[when][step],
                )
            else:
                assert not any(name.startswith(when) for name in tensors)
                with pytest.raises(ValueError, match=f"got records of '{moments}'. Train with"):
                    read_states(store.facts, values, tensors, when)
        assert [group["lr"] for group in values["before"]["groups"]] == used[step]
        assert tuple(values["ids"]) == watch.steps[step].ids
        assert values["sizes"] == [2, 3]
        assert values["scales"] == [2.0, 2.0]
    assert store.facts["optimizer"] == "AdamW"
    assert store.facts["layers"]["one.bias"] == [["bias", "one.bias", 6]]
    layer = store.facts["layers"]["conv"]
    assert layer == [["weight", "conv.weight", 36], ["bias", "conv.bias", 4]]


@pytest.mark.parametrize("name", ["gpt2", "llama", "gpt2-lora"])
def test_a_trainer_is_recorded_and_does_not_notice(name, tmp_path):
    def trained(callbacks):
        trainer = make_trainer(
            MODELS[name](),
            tmp_path / "run",
            callbacks,
            max_steps=6,
            gradient_accumulation_steps=2,
            warmup_steps=3,
            weight_decay=0.2,
            optim="adamw_torch",
        )
        trainer.train()
        return trainer

    store, watch = StepStore(tmp_path / "store"), Watch()
    trainer = trained([GradTrailCallback([OptimizerStateCallback(store, moments="both"), watch])])
    units = select_layers(trainer.model).units
    assert store.steps == tuple(range(6))
    rates = []
    for step, tensors, values in store.iterate():
        for when, sides in (("before", watch.before), ("after", watch.after)):
            assert_recorded(trainer.model, units, store.facts, values, tensors, when, sides[step])
        assert values["sizes"] == [3, 3]
        assert tuple(values["ids"]) == watch.steps[step].ids
        rates.append(values["before"]["groups"][0]["lr"])
        decays = {group["weight_decay"] for group in values["before"]["groups"]}
        assert decays == ({0.2} if name == "gpt2-lora" else {0.0, 0.2})
    # the schedule: up over three steps from 0, then down over the other three
    torch.testing.assert_close(rates, [0.0, 1e-2 / 3, 2e-2 / 3, 1e-2, 2e-2 / 3, 1e-2 / 3])
    store.close()
    # a callback is in the log of neither: the recorder's own numbers aside
    bare = trained([])
    for entry in trainer.state.log_history:
        entry.pop("gradtrail_blocks", None)
    assert_same_training(trainer, bare)


def test_recorded_scales_give_the_loops_gradient(tmp_path):
    """Captured gradients over their scales add up to what the first moment took in."""
    model, store, watch = make_model("llama"), StepStore(residency="memory"), Recorder()
    trainer = make_trainer(
        model,
        tmp_path,
        [GradTrailCallback([OptimizerStateCallback(store, moments="both"), watch])],
        max_steps=2,
        gradient_accumulation_steps=2,
        max_grad_norm=0.0,
        optim="adamw_torch",
    )
    trainer.train()
    values, tensors = store.values(1), store.read(1)
    before, after = (read_states(store.facts, values, tensors, w) for w in ("before", "after"))
    layer = "model.layers.1.self_attn.q_proj"
    first, last = (s[layer].parts["weight"].moments["exp_avg"] for s in (before, after))
    taken = (last - 0.9 * first) / 0.1
    blocks = [block for block in watch.blocks if block.step in watch.steps[1].blocks]
    total = sum(
        to_dense(block.layers[layer]).values_bd.sum(0) / scale
        for block, scale in zip(blocks, values["scales"], strict=True)
    )
    torch.testing.assert_close(taken, total, rtol=1e-4, atol=1e-6)


def test_recorded_states_give_the_directions_of_that_step():
    model, store = shapes().double(), StepStore(residency="memory")
    watch = Recorder(copies=True)
    plain_loop(model, [OptimizerStateCallback(store), watch], micro=1, steps=4)
    for step, tensors, values in store.iterate(reverse=True):
        states = read_states(store.facts, values, tensors, layers=["one", "table"])
        assert set(states) == {"one", "table"}
        block = watch.blocks[step]
        optimizer = two_groups(watch.models[step])
        names = dict(watch.models[step].named_parameters())
        for layer in states:
            for (_, own, _), part in zip(
                store.facts["layers"][layer], states[layer].parts.values(), strict=True
            ):
                moments = {k: v.reshape(names[own].shape) for k, v in part.moments.items()}
                if moments:
                    count = {"step": torch.tensor(float(part.step))}
                    optimizer.state[names[own]] = count | moments
        expected = stepped_alone(
            watch.models[step], optimizer, batch_of(model, seed=10 * step, count=2)
        )
        got = by_parameter(
            model,
            select_layers(model).units,
            {layer: states[layer].directions(block.layers[layer]) for layer in states},
        )
        for own, value in got.items():
            torch.testing.assert_close(value, expected[own], rtol=1e-8, atol=1e-8)


def test_only_some_steps_are_recorded():
    store = StepStore(residency="memory")
    plain_loop(shapes(), [OptimizerStateCallback(store, every=3)], steps=5)
    assert store.steps == (0, 3)
    assert store.facts["every"] == 3


def test_a_skipped_step_leaves_no_record():
    model, store = shapes(), StepStore(residency="memory")
    optimizer = two_groups(model)
    manager = HookManager(model, callbacks=[OptimizerStateCallback(store)])
    with manager.collect(optimizer):
        for step in range(3):
            summed_loss(model, batch_of(model, seed=step)).backward()
            if step == 1:
                manager.skip_optimizer_step()
            else:
                optimizer.step()
            optimizer.zero_grad()
    assert store.steps == (0, 2)
    assert store.values(2)["sizes"] == [3]
    assert store.values(2)["before"]["parameters"]["one.bias"][1] == 1


def test_a_loop_that_resumes_replaces_its_later_records():
    store = StepStore(residency="memory")
    callback = OptimizerStateCallback(store)
    plain_loop(shapes(), [callback], steps=5)
    kept = store.read(2)
    plain_loop(shapes(), [callback], steps=2, start=3)
    assert store.steps == (0, 1, 2, 3, 4)
    torch.testing.assert_close(store.read(2), kept, rtol=0, atol=0)
    assert store.values(3)["before"]["parameters"]["one.bias"][1] == 0  # of the second loop


def test_a_trainer_that_resumes_goes_on_recording(tmp_path):
    def trained(mode, steps, checkpoint=None):
        with StepStore(tmp_path / "store", mode=mode) as store:
            callback = GradTrailCallback([OptimizerStateCallback(store)])
            trainer = make_trainer(
                make_model("llama"),
                tmp_path / "run",
                [callback],
                max_steps=steps,
                save_strategy="steps",
                save_steps=2,
                lr_scheduler_type="constant",
            )
            trainer.train(resume_from_checkpoint=checkpoint)
            return {step: store.read(step) for step in store.steps}, trainer

    _, first = trained("create", 5)
    # a checkpoint's optimizer, loaded into one that is made as in training
    again = make_trainer(make_model("llama"), tmp_path / "other")
    again.create_optimizer()
    path = tmp_path / "run" / "checkpoint-5" / "optimizer.pt"
    again.optimizer.load_state_dict(torch.load(path, weights_only=True))
    loaded = OptimizerSnapshot.of(again.model, again.optimizer)
    for name, state in OptimizerSnapshot.of(first.model, first.optimizer).parameters.items():
        assert torch.equal(state.moments["exp_avg"], loaded.state(name).moments["exp_avg"])

    resumed, _ = trained("resume", 6, str(tmp_path / "run" / "checkpoint-2"))
    with StepStore(tmp_path / "straight") as store:
        make_trainer(
            make_model("llama"),
            tmp_path / "run2",
            [GradTrailCallback([OptimizerStateCallback(store)])],
            max_steps=6,
            lr_scheduler_type="constant",
        ).train()
        straight = {step: store.read(step) for step in store.steps}
    assert list(resumed) == list(range(6))
    torch.testing.assert_close(resumed, straight, rtol=0, atol=0)


def test_layers_that_the_optimizer_does_not_hold_are_left_out():
    model, store = shapes(), StepStore(residency="memory")
    optimizer = torch.optim.SGD([model.one.weight, model.norm.weight, model.norm.bias])
    manager = HookManager(model, callbacks=[OptimizerStateCallback(store, moments="both")])
    with manager.collect(optimizer):
        summed_loss(model, batch_of(model)).backward()
        optimizer.step()
    assert set(store.facts["layers"]) == {"one", "norm"}
    assert store.read(0) == {}  # plain SGD has no moments, but a learning rate
    assert store.values(0)["before"]["groups"][0]["lr"] == 1e-3
    assert read_states(store.facts, store.values(0), {})["norm"].sizes == {"weight": 6, "bias": 6}
    with pytest.raises(KeyError, match=r"recorded for every layer, got none of 'conv'"):
        read_states(store.facts, store.values(0), {}, layers=["one", "conv"])


def attach(callback, optimizer_of=two_groups):
    model = shapes()
    manager = HookManager(model, callbacks=[callback])
    with manager.collect(optimizer_of(model)):
        pass


def test_what_cannot_be_recorded_is_refused():
    def store():
        return StepStore(residency="memory")

    with pytest.raises(ValueError, match="moments must be one of 'before', 'after', 'both', got"):
        OptimizerStateCallback(store(), moments="none")
    with pytest.raises(ValueError, match="every must be an integer of at least 1, got 0"):
        OptimizerStateCallback(store(), every=0)
    with pytest.raises(ValueError, match=r"optimizer must be passed to collect\(\) where its"):
        attach(OptimizerStateCallback(store()), lambda _: None)
    with pytest.raises(TypeError, match="got ASGD: how it turns"):
        attach(OptimizerStateCallback(store()), lambda m: torch.optim.ASGD(m.parameters()))
    with pytest.raises(ValueError, match="must hold a captured layer, got a SGD of other"):
        attach(
            OptimizerStateCallback(store()), lambda _: torch.optim.SGD(nn.Linear(1, 1).parameters())
        )
    twice = OptimizerStateCallback(store())
    model = shapes()
    manager = HookManager(model, callbacks=[twice, twice])
    with (
        pytest.raises(RuntimeError, match="OptimizerStateCallback must be attached once"),
        manager.collect(two_groups(model)),
    ):
        pass
    attach(twice)  # and is clean again


def test_records_of_something_else_are_refused():
    with pytest.raises(ValueError, match=r"got records of 'ParameterSnapshotCallback'. Train"):
        read_states({"recorder": "ParameterSnapshotCallback"}, {}, {})
    with pytest.raises(ValueError, match="when must be one of 'before', 'after', got 'now'"):
        read_states({}, {}, {}, "now")


def test_a_store_keeps_to_what_it_was_begun_with():
    store = StepStore(residency="memory")
    attach(OptimizerStateCallback(store))
    with pytest.raises(StoreError):
        attach(OptimizerStateCallback(store, moments="both"))


def test_every_supported_torch_optimizer_is_recorded():
    for kind in sorted(set(DIRECTIONS.kinds) - {"Lion"}):
        model, store = shapes(), StepStore(residency="memory")
        optimizer = getattr(torch.optim, kind)(model.parameters())
        manager = HookManager(model, callbacks=[OptimizerStateCallback(store, moments="after")])
        with manager.collect(optimizer):
            summed_loss(model, batch_of(model)).backward()
            optimizer.step()
        states = read_states(store.facts, store.values(0), store.read(0), "after")
        own = layer_states(model, manager.selection.units, OptimizerSnapshot.of(model, optimizer))
        for layer, state in own.items():
            for role, part in state.parts.items():
                torch.testing.assert_close(
                    dict(states[layer].parts[role].moments), dict(part.moments), rtol=0, atol=0
                )


def test_own_losses_of_the_helper_are_the_rows_own():
    """The loss that these tests sum is the examples' own, as the rest of the tests has it."""
    model, rows = make_model("llama").double(), make_rows(3, seed=1)
    total = sum(own_loss(model, row) for row in rows)
    torch.testing.assert_close(summed_loss(model, collate(rows)), total)
