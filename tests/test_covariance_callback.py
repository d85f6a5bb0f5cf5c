"""Covariances summed up while a model trains, next to dense sums from autograd in float64."""

import copy
import dataclasses
import json
import weakref

import pytest
import torch
from capturing import language_batch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from training import Recorder, assert_same_training, collate, make_model, make_rows, make_trainer

from gradtrail import CurvatureError, GradTrailWarning, HookManager, Projection, reference
from gradtrail.callbacks import (
    AbstractStepCallback,
    GradTrailCallback,
    KroneckerCovarianceCallback,
    OffloadCallback,
)
from gradtrail.factors import (
    DenseGradient,
    EmbeddingFactors,
    LinearFactors,
    ScaleFactors,
    SumGradient,
    project,
    to_dense,
)
from gradtrail.hooks.step import Form
from gradtrail.kronecker import (
    CovarianceAccumulator,
    covariance_state,
    covariances_from,
    restored_accumulator,
)
from gradtrail.store import GradientStore, records_digest

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")

F64 = torch.float64
# GPT-2's position table is shared by the batch, and the capture says so
quiet = pytest.mark.filterwarnings("ignore::gradtrail.GradTrailWarning")
NAMES = ["gpt2", "llama"]


@pytest.fixture(autouse=True)
def fresh_accelerator():
    """The accelerator's state is global: what one test sets up must not reach the next."""
    yield
    accelerate.state.AcceleratorState._reset_state()
    accelerate.state.GradientState._reset_state()


def build(name, kind=None, *, attention="sdpa"):
    """A model in float64 without dropout, in training mode, as checkpointing asks for."""
    model = make_model(name).double().train()
    model.config._attn_implementation = attention
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    if kind is not None:
        enable = getattr(model, "activation_checkpointing_enable", None)  # since transformers 5
        (enable or model.gradient_checkpointing_enable)({"use_reentrant": kind})
        model.config.use_cache = False
        model.enable_input_require_grads()
    return model


# ---------------------------------------------------------------- the oracle


def own_loss(model, batch):
    """One example's own loss, summed over its positions."""
    logits = model(input_ids=batch["input_ids"]).logits[0, :-1]
    labels = batch["labels"][0, 1:]
    return nn.functional.cross_entropy(logits, labels, reduction="sum").unsqueeze(0)


def alone(batch, row):
    """One row of a padded batch, without its padding."""
    kept = batch["attention_mask"][row] != 0
    return {name: batch[name][row, kept].unsqueeze(0) for name in ("input_ids", "labels")}


def factors_of(model, example):
    """What every linear layer reads, by autograd: ``{name: (a [s, i], g [s, o])}``, who shares."""
    layers = {
        name: module
        for name, module in model.named_modules()
        if type(module).__name__ in ("Linear", "Conv1D") and name != "lm_head"
    }
    seen, handles = {}, []
    for name, module in layers.items():

        def note(_module, args, output, name=name):
            output.retain_grad()
            seen[name] = (args[0], output)

        handles.append(module.register_forward_hook(note))
    own_loss(model, example).sum().backward()
    for handle in handles:
        handle.remove()
    groups = {}
    for name, (inputs, _) in seen.items():
        groups.setdefault(id(inputs), []).append(name)
    found = {name: (a.detach()[0], output.grad[0]) for name, (a, output) in seen.items()}
    return found, list(groups.values())


def check_factors(model, example, found):
    """The factors are those of the reference's gradients."""
    names = {f"{name}.weight": name for name in found}
    expected = reference.per_example_gradients(model, [example], own_loss, names)
    for weight, name in names.items():
        a, g = found[name]
        gradient = g.t() @ a
        if type(model.get_submodule(name)).__name__ == "Conv1D":
            gradient = gradient.t()
        torch.testing.assert_close(gradient, expected[weight][0], rtol=1e-8, atol=1e-10)


class Dense:
    """Sums of outer products, example by example."""

    def __init__(self, projection=None):
        self.projection = projection
        self.sums = {}
        self.num_examples = 0

    def add(self, model, example):
        model.zero_grad()
        found, groups = factors_of(model, example)
        check_factors(model, example, found)
        if self.projection is not None:
            groups = [[name] for name in found]
            for name, (a, g) in found.items():
                bias = getattr(model.get_submodule(name), "bias", None) is not None
                linear = LinearFactors(a.unsqueeze(0), g.unsqueeze(0), has_bias=bias)
                small = project(name, linear, self.projection)
                assert not small.has_bias
                found[name] = (small.activation_bsi[0], small.output_gradient_bso[0])
        for names in groups:
            # sides that the backward of a batch rounds to another tiny number count as zero here
            counts = torch.stack([found[name][1].abs().amax(1) > 1e-14 for name in names]).any(0)
            for name in names:
                self._add(model, name, *found[name], counts)
        self.num_examples += 1

    def _add(self, model, name, a, g, counts):
        bias = getattr(model.get_submodule(name), "bias", None) is not None
        if bias and self.projection is None:
            a = torch.cat([a, a.new_ones(len(a), 1)], 1)
        entry = self.sums.setdefault(name, [0, 0, 0])
        entry[0] = entry[0] + torch.einsum("s,si,sj->ij", counts.double(), a, a)
        entry[1] = entry[1] + torch.einsum("so,sp->op", g, g)
        entry[2] += int(counts.sum())

    def check(self, got, *, num_examples=None, tolerance=1e-10):
        assert set(got) == set(self.sums)
        n = self.num_examples if num_examples is None else num_examples
        for name, (sum_a, sum_s, count) in self.sums.items():
            one = got[name]
            assert (one.num_positions, one.num_examples) == (count, n)
            for mine, theirs in (
                (one.activation_cov_gii[0], sum_a / count),
                (one.gradient_cov_goo[0], sum_s / n),
            ):
                scale = float(theirs.abs().max())
                torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=tolerance * scale)


class Copies(AbstractStepCallback):
    """Adds the examples of every backward to the oracle, from the model as it was then."""

    def __init__(self, dense, batches):
        self.dense, self.batches = dense, batches
        self.manager, self.pending, self.step, self.place = None, [], 0, 0

    def on_attach(self, manager):
        self.manager = manager

    def on_step(self, block):
        del block
        self.pending.append(bare(self.manager.model))

    def on_optimizer_step(self, step):
        pending, self.pending = self.pending, []
        for number, model in zip(step.blocks, pending, strict=True):
            batch = self.batches[number]
            for row in range(len(batch["input_ids"])):
                if not step.skipped:
                    self.dense.add(model, alone(batch, row))

    def on_detach(self):
        self.manager = None

    def logs(self):
        return {}


def bare(model):
    """A copy without hooks and checkpointing."""
    twin = copy.deepcopy(model)
    vars(twin).pop("forward", None)
    for module in twin.modules():
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
        if "gradient_checkpointing" in vars(module):
            module.gradient_checkpointing = False
    return twin


FORMS = {
    "factored": {},
    "materialized": {"capture": "materialized"},
    "projected": {"projection": Projection(dim=3), "capture": "materialized"},
}
CHECKPOINTING = {"none": None, "reentrant": True, "not reentrant": False}


def make_batches(*, left=False):
    """Four batches of padded rows; the first position of a row is nobody's label."""
    batches = [
        language_batch(lengths, left=left, seed=seed)
        for seed, lengths in enumerate(((6, 4, 2), (3, 7), (5, 2), (4, 6)))
    ]
    for batch in batches:
        first = batch["attention_mask"].argmax(1)
        batch["labels"][torch.arange(len(first)), first] = -100
    return batches


def train(manager, batches, *, accumulation=2, skip=(), each=None):
    """A plain loop; optimizer steps in ``skip`` do not happen, as where a loss scaler skips."""
    optimizer = torch.optim.SGD(manager.model.parameters(), lr=1e-3)
    with manager.collect(optimizer):
        for number, batch in enumerate(batches):
            loss = nn.functional.cross_entropy(
                manager.model(
                    input_ids=batch["input_ids"],
                    attention_mask=batch["attention_mask"],
                    **positions(batch),
                )
                .logits[:, :-1]
                .flatten(0, 1),
                batch["labels"][:, 1:].flatten(),
                reduction="sum",
            )
            loss.backward()
            if each is not None:
                each(number)
            if number % accumulation == accumulation - 1:
                if number // accumulation in skip:
                    manager.skip_optimizer_step()
                else:
                    optimizer.step()
                optimizer.zero_grad()


def positions(batch):
    """Numbers of the positions, so that padding on the left does not shift them."""
    return {"position_ids": (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)}


# ---------------------------------------------------------------- against the oracle


@quiet
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("form", "kind"),
    [
        ("factored", "none"),
        ("projected", "none"),
        ("materialized", "none"),
        ("materialized", "reentrant"),
        ("materialized", "not reentrant"),
    ],
)
def test_plain_loop(name, form, kind):
    options, left = FORMS[form], form == "materialized"
    batches = make_batches(left=left)
    dense = Dense(options.get("projection"))
    callback = KroneckerCovarianceCallback()
    manager = HookManager(
        # of these two, only "eager" gives the first query a gradient of exactly 0 in any batch, and
        # only "sdpa" takes rows that are padded on the left
        build(name, CHECKPOINTING[kind], attention="sdpa" if left else "eager"),
        callbacks=[callback, Copies(dense, batches)],
        **options,
    )
    train(manager, batches)
    dense.check(callback.covariances())
    assert dense.num_examples == 9


@quiet
@pytest.mark.parametrize(
    "kind",
    ["not reentrant", *(pytest.param(k, marks=pytest.mark.slow) for k in ("none", "reentrant"))],
)
def test_trainer_with_accumulation_and_a_mean_loss(tmp_path, kind):
    """The Trainer divides by all labels of an optimizer step; the last step has fewer batches."""
    rows = make_rows(10)
    batches, dense = [], Dense()

    class Batches(AbstractStepCallback):
        """Finds the rows of every backward by their ids."""

        def on_attach(self, manager):
            del manager

        def on_step(self, block):
            batches.append(collate([known[name] for name in block.ids]))

        def on_optimizer_step(self, step):
            del step

        def on_detach(self):
            pass

        def logs(self):
            return {}

    from gradtrail import example_id

    known = {example_id(row): row for row in rows}
    with GradientStore(tmp_path / "store") as store:
        callback = KroneckerCovarianceCallback(store)
        inner = [
            OffloadCallback(store),
            callback,
            Batches(),
            Copies(dense, batches),
        ]
        reentrant = CHECKPOINTING[kind]
        arguments = {}
        if reentrant is not None:
            names = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
            new = "activation_checkpointing_kwargs" in names
            key = f"{'activation' if new else 'gradient'}_checkpointing_kwargs"
            arguments[key] = {"use_reentrant": reentrant}
        trainer = make_trainer(
            make_model("llama").double(),
            tmp_path,
            [GradTrailCallback(inner, capture="materialized")],
            rows=rows,
            checkpointing=reentrant is not None,
            max_steps=3,
            gradient_accumulation_steps=3,
            **arguments,
        )
        trainer.train()
        assert len(store) == dense.num_examples
        # the model's own loss is taken in float32
        dense.check(covariances_from(*store.attached("covariances")), tolerance=1e-6)
        assert store.attached("covariances")[1]["covers"] == records_digest(store.records)


@quiet
@pytest.mark.parametrize("name", NAMES)
def test_a_sweep_over_stored_factors_gives_the_same(tmp_path, name):
    batches = make_batches()
    with GradientStore(tmp_path / "store") as store:
        manager = HookManager(
            build(name), callbacks=[OffloadCallback(store), KroneckerCovarianceCallback(store)]
        )
        train(manager, batches)
        found = covariances_from(*store.attached("covariances"))
        sweep = CovarianceAccumulator(max_side=64)
        for stored in store.blocks():
            for layer in found:
                sweep.add(layer, stored.block.layers[layer])
            sweep.end_backward()
        expected = sweep.result(len(store))
    assert found.keys() == expected.keys()
    for layer, one in expected.items():
        mine = found[layer]
        assert (mine.input_of, mine.num_positions) == (one.input_of, one.num_positions)
        pairs = (
            (mine.activation_cov_gii, one.activation_cov_gii),
            (mine.gradient_cov_goo, one.gradient_cov_goo),
        )
        for left, right in pairs:
            torch.testing.assert_close(left, right, rtol=1e-11, atol=1e-13)
    shared = {one.input_of for one in found.values()}
    assert len(shared) == (8 if name == "gpt2" else 8)


# ---------------------------------------------------------------- no trace


def state_of(callback):
    return covariance_state(callback._total.sums, callback._total.num_rows)


def assert_equal_states(one, two):
    assert one[1] == two[1]
    assert one[0].keys() == two[0].keys()
    for name, tensor in one[0].items():
        assert torch.equal(tensor, two[0][name]), name


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_skipped_step_leaves_no_trace(accumulation):
    batches = make_batches() + make_batches(left=True)
    callback, twin = KroneckerCovarianceCallback(), KroneckerCovarianceCallback()
    skipped = 1
    train(
        HookManager(build("llama"), callbacks=[callback]),
        batches,
        accumulation=accumulation,
        skip=[skipped],
    )
    start, stop = skipped * accumulation, (skipped + 1) * accumulation
    train(
        HookManager(build("llama"), callbacks=[twin]),
        batches[:start] + batches[stop:],
        accumulation=accumulation,
    )
    assert_equal_states(state_of(callback), state_of(twin))


@pytest.mark.parametrize("place", ["first", "last"])
@pytest.mark.parametrize("form", FORMS)
def test_a_backward_that_raises_leaves_no_trace(form, place):
    """It has come through some layers, and another one takes its place or ends the step."""
    callback, twin = KroneckerCovarianceCallback(), KroneckerCovarianceCallback()
    batches = make_batches()

    def explode(_gradient):
        raise MemoryError("no memory left")

    def attempt(number):
        if (number == 0) != (place == "first"):
            return
        model = manager.model
        handle = model.model.layers[0].register_forward_hook(
            lambda _m, _a, output: (
                (output if torch.is_tensor(output) else output[0]).register_hook(explode) and None
            )
        )
        batch = batches[2]
        with pytest.raises(MemoryError, match="no memory left"):
            model(input_ids=batch["input_ids"]).logits.sum().backward()
        handle.remove()
        for parameter in model.parameters():
            parameter.grad = None

    manager = HookManager(build("llama"), callbacks=[callback], **FORMS[form])
    train(manager, batches[:2], each=attempt)

    def clear(number):
        if (number == 0) == (place == "first"):
            for parameter in other.model.parameters():
                parameter.grad = None

    other = HookManager(build("llama"), callbacks=[twin], **FORMS[form])
    train(other, batches[:2], each=clear)
    assert callback.covariances()
    assert_equal_states(state_of(callback), state_of(twin))


@quiet
def test_a_backward_that_raises_and_one_that_reaches_no_such_layer():
    """What the first one brought does not count for the second."""

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 2)
            self.scale = nn.LayerNorm(3)

        def forward(self, x, long):
            if not long:
                return self.scale(x)
            middle = self.first(x)
            if self.training:
                middle.register_hook(self.explode)
            return self.second(middle)

        def explode(self, _gradient):
            raise MemoryError("no memory left")

    torch.manual_seed(0)
    model, callback = Two(), KroneckerCovarianceCallback()
    manager = HookManager(model, callbacks=[callback])
    with manager.collect():
        with pytest.raises(MemoryError, match="no memory left"):
            model(torch.randn(2, 3), long=True).sum().backward()
        model(torch.randn(2, 3), long=False).sum().backward()
        assert not callback._total.sums.names
        model.eval()
        model(torch.randn(2, 3), long=True).sum().backward()
    found = callback.covariances()
    assert found["second"].num_examples == 4
    assert found["second"].num_positions == 2


def test_an_unfinished_step_is_not_counted(tmp_path):
    with GradientStore(tmp_path / "store") as store:
        callback = KroneckerCovarianceCallback(store)
        manager = HookManager(build("llama"), callbacks=[OffloadCallback(store), callback])
        train(manager, make_batches()[:3])
        assert [record.step for record in store.records] == [0, 0]
        assert store.attached("covariances")[1]["covers"] == records_digest(store.records)
        assert store.attached("covariances")[1]["num_examples"] == "5"


# ---------------------------------------------------------------- nothing is held


def watch_inputs(manager, alive):
    """At every layer, notes which inputs of layers before it are still alive."""
    refs = {}

    def watch(name, gradient):
        if isinstance(gradient, LinearFactors):
            tensor = gradient.activation_bsi
            others = [n for n, ref in refs.items() if ref() is not None and ref() is not tensor]
            alive.append((name, others))
            refs[name] = weakref.ref(tensor)

    return manager.observe(watch)


@pytest.mark.parametrize("kind", ["reentrant", "not reentrant"])
def test_no_input_outlives_its_layers_backward(kind):
    """In the first backward, where it is found out who shares an input, as in later ones.

    An input is watched from its layer's backward on. Without the callback those that were
    recomputed go with their layer, or with the checkpointed block.
    """
    found = {}
    for held in ("nothing", "covariances", "everything"):
        kept, found[held] = [], []
        manager = HookManager(
            build("llama", CHECKPOINTING[kind]),
            capture="materialized",
            callbacks=[KroneckerCovarianceCallback()] if held == "covariances" else [],
        )
        if held == "everything":
            manager.observe(lambda *given, kept=kept: kept.append(given))
        watch_inputs(manager, found[held])
        train(manager, make_batches())
    assert len(found["nothing"]) == 4 * 15
    assert found["covariances"] == found["nothing"]
    last = max(len(others) for _, others in found["nothing"])
    assert last == (1 if kind == "not reentrant" else 5)
    assert max(len(others) for _, others in found["everything"]) > 12


# ---------------------------------------------------------------- beside a store


@pytest.mark.parametrize(("every", "recording"), [(1, "per_example"), (2, "per_block")])
def test_covers_what_is_stored(tmp_path, every, recording):
    batches = make_batches() + make_batches(left=True)
    dense = Dense()
    with GradientStore(tmp_path / "store") as store:
        # in any order, and with a step that is skipped
        inner = [
            KroneckerCovarianceCallback(store),
            OffloadCallback(store, every=every, recording=recording),
        ]
        inner = inner if every == 1 else inner[::-1]
        recorder = Recorder(copies=True)
        manager = HookManager(build("llama"), callbacks=[*inner, recorder], capture="materialized")
        train(manager, batches, skip=[1])
        kept = [0, 2, 3] if every == 1 else [0, 2]
        assert sorted(set(store.steps)) == kept
        for step in kept:
            for number in (2 * step, 2 * step + 1):
                model = recorder.models[number].double()
                for row in range(len(batches[number]["input_ids"])):
                    dense.add(model, alone(batches[number], row))
        tensors, metadata = store.attached("covariances")
        assert metadata["covers"] == records_digest(store.records)
        assert metadata["num_examples"] == str(len(store))
        dense.check(covariances_from(tensors, metadata), num_examples=len(store))


@pytest.mark.parametrize("residency", ["disk", "memory"])
def test_flush_in_between(tmp_path, residency):
    """Also in the middle of a step; what was written does not change with what comes."""
    path = tmp_path / "store" if residency == "disk" else None
    with GradientStore(path, residency=residency) as store:
        callback, seen = KroneckerCovarianceCallback(store), {}

        def write(number):
            callback.flush()
            seen[number] = store.attached("covariances")
            assert seen[number][1]["covers"] == records_digest(store.records)
            assert seen[number][1]["num_examples"] == str(len(store))

        manager = HookManager(build("llama"), callbacks=[OffloadCallback(store), callback])
        train(manager, make_batches(), each=write)
        counts = [int(state[1]["num_examples"]) for state in seen.values()]
        assert counts == [3, 5, 7, 9]
        assert_equal_states(seen[3], store.attached("covariances"))
        key = next(name for name in seen[0][0] if name.endswith("gradient_cov"))
        assert not torch.equal(seen[0][0][key], seen[3][0][key])


@pytest.mark.parametrize("together", [True, False], ids=["one callback", "a callback each"])
def test_several_captures_into_one_store(tmp_path, together):
    batches = make_batches()
    with GradientStore(tmp_path / "store") as store, GradientStore(residency="memory") as whole:
        inner = [OffloadCallback(store), KroneckerCovarianceCallback(store)]
        manager = HookManager(build("llama"), callbacks=inner)
        train(manager, batches[:2])
        if not together:
            inner = [OffloadCallback(store), KroneckerCovarianceCallback(store)]
            steps = manager.optimizer_steps
            manager = HookManager(manager.model, callbacks=inner)
            manager.optimizer_steps = steps
        train(manager, batches[2:])
        inner = [OffloadCallback(whole), KroneckerCovarianceCallback(whole)]
        train(HookManager(build("llama"), callbacks=inner), batches)
        assert_equal_states(store.attached("covariances"), whole.attached("covariances"))


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


def run(folder, store, *, fails=None, resume=None, **arguments):
    capture = []
    if store is not None:
        inner = [OffloadCallback(store), KroneckerCovarianceCallback(store)]
        capture = [GradTrailCallback(inner, capture="materialized")]
    trainer = make_trainer(
        make_model("llama"),
        folder,
        capture + ([] if fails is None else [fails_at(fails)]),
        **{"max_steps": 7, "save_strategy": "steps", "save_steps": 3, **arguments},
    )
    torch.manual_seed(11)
    if fails is None:
        trainer.train(resume_from_checkpoint=resume)
    else:
        with pytest.raises(Failure):
            trainer.train()
    return trainer, capture[0] if capture else None


@pytest.mark.parametrize("accumulation", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_a_resumed_run_has_the_covariances_of_an_uninterrupted_one(tmp_path, accumulation):
    settings = {"gradient_accumulation_steps": accumulation}
    with GradientStore(tmp_path / "whole") as store:
        run(tmp_path / "a", store, **settings)
        whole = store.attached("covariances")
    with GradientStore(tmp_path / "parts") as store:
        _, capture = run(tmp_path / "b", store, fails=5, **settings)
        capture.detach()
    with GradientStore(tmp_path / "parts", mode="resume") as store:
        run(tmp_path / "b", store, resume=str(tmp_path / "b" / "checkpoint-3"), **settings)
        assert_equal_states(store.attached("covariances"), whole)
        assert whole[1]["covers"] == records_digest(store.records)


def test_a_run_whose_covariances_are_lost_goes_on_without_and_says_so(tmp_path):
    with GradientStore(tmp_path / "store") as store:
        _, capture = run(tmp_path / "a", store, fails=5)
        capture.detach()
    (tmp_path / "store" / "attached-covariances.safetensors").unlink()
    with GradientStore(tmp_path / "store", mode="resume") as store:
        with pytest.warns(GradTrailWarning, match=r"to go on from there, got none: none are acc"):
            run(tmp_path / "a", store, resume=str(tmp_path / "a" / "checkpoint-3"))
        assert store.attached("covariances") is None
        assert sorted(set(store.steps)) == list(range(7))


def test_covariances_of_fewer_records_are_not_gone_on_from(tmp_path):
    batches = make_batches()
    with GradientStore(tmp_path / "store") as store:
        inner = [OffloadCallback(store), KroneckerCovarianceCallback(store)]
        train(HookManager(build("llama"), callbacks=inner), batches[:2])
        manager = HookManager(build("llama"), callbacks=[OffloadCallback(store)])
        manager.optimizer_steps = 1
        train(manager, batches[2:])
        before = store.attached("covariances")
        callback = KroneckerCovarianceCallback(store)
        manager = HookManager(build("llama"), callbacks=[OffloadCallback(store), callback])
        manager.optimizer_steps = 2
        with pytest.warns(GradTrailWarning, match="got covariances of other records: none are"):
            train(manager, batches[:2])
        with pytest.raises(CurvatureError, match="covariances must be taken after a step"):
            callback.covariances()
        assert_equal_states(store.attached("covariances"), before)
        assert len(store) == 14


def test_what_something_else_stores_is_not_covered(tmp_path):
    with GradientStore(tmp_path / "store") as store:
        callback = KroneckerCovarianceCallback(store)
        manager = HookManager(build("llama"), callbacks=[OffloadCallback(store), callback])

        def disturb(number):
            if number == 2:
                store.discard(0)

        with pytest.warns(GradTrailWarning, match=r"cover what is stored, 2 records, got 4 that"):
            train(manager, make_batches(), each=disturb)
        assert store.attached("covariances") is None


def test_training_is_equal_to_the_bit(tmp_path):
    bare_run, _ = run(tmp_path / "a", None)
    with GradientStore(tmp_path / "store") as store:
        held, _ = run(tmp_path / "b", store)
    assert_same_training(held, bare_run)


def test_blocks_are_what_they_are_without():
    batches, blocks = make_batches(), {}
    for held in (True, False):
        recorder = Recorder()
        callbacks = [recorder, *([KroneckerCovarianceCallback()] if held else [])]
        options = {"capture": "auto", "loss_scale": 3.0}
        train(HookManager(build("llama"), callbacks=callbacks, **options), batches)
        blocks[held] = recorder.blocks
    for mine, theirs in zip(blocks[True], blocks[False], strict=True):
        for name, gradient in theirs.layers.items():
            assert type(mine.layers[name]) is type(gradient)
            for field in vars(gradient):
                left, right = getattr(mine.layers[name], field), getattr(gradient, field)
                same = torch.equal(left, right) if torch.is_tensor(left) else left == right
                assert same, (name, field)


@pytest.mark.parametrize("late", [False, True], ids=["scaled at once", "scaled when asked for"])
@pytest.mark.parametrize("form", FORMS)
def test_observers_see_the_examples_own_gradients_before_they_are_written_out(form, late):
    seen, model = {}, build("llama")
    manager = HookManager(model, loss_scale=0.25, **FORMS[form])
    manager.keeps_unscaled = late
    handle = manager.observe(lambda name, gradient: seen.update({name: gradient}))
    batch = make_batches()[0]
    with manager.collect():
        (model(input_ids=batch["input_ids"]).logits.square().sum() / 4).backward()
        first, seen = seen, {}
        handle.remove()
        model(input_ids=batch["input_ids"]).logits.sum().backward()
    assert seen == {}
    twin = build("llama")
    bare_manager = HookManager(twin, projection=FORMS[form].get("projection"))
    with bare_manager.collect():
        twin(input_ids=batch["input_ids"]).logits.square().sum().backward()
    assert set(first) == set(bare_manager.last.layers)
    for name, gradient in bare_manager.last.layers.items():
        assert type(first[name]) is type(gradient)
        torch.testing.assert_close(
            to_dense(first[name]).values_bd, to_dense(gradient).values_bd, rtol=1e-9, atol=1e-9
        )


def test_the_smaller_form_of_every_kind():
    """``capture="auto"``: numbers of an example as factors against those written out."""
    form = Form(None, "auto")
    a, g = torch.randn(2, 5, 8), torch.randn(2, 5, 6)
    few, many = LinearFactors(a[:, :3], g[:, :3]), LinearFactors(a, g)  # 3.4 positions are equal
    assert form.write_out(few) is few
    assert isinstance(form.write_out(many), DenseGradient)
    twice = SumGradient((few, LinearFactors(a[:, :1], g[:, :1])))
    assert isinstance(form.write_out(twice), DenseGradient)
    assert isinstance(form.write_out(ScaleFactors(a[:, :1], a[:, :1])), DenseGradient)
    index = torch.zeros(2, 5, dtype=torch.long)
    table = EmbeddingFactors(index, g, 6)  # 5 x 7 numbers against 6 x 6
    assert form.write_out(table) is table
    assert isinstance(form.write_out(EmbeddingFactors(index, g, 5)), DenseGradient)
    written = DenseGradient(torch.randn(2, 6), (2, 3))
    assert form.write_out(written) is written


# ---------------------------------------------------------------- what it costs


class Products(TorchDispatchMode):
    """Counts the multiplications of products that are added to something in place."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        del types
        if func is torch.ops.aten.addmm_.default:
            _, left, right = args
            self.count += left.shape[0] * left.shape[1] * right.shape[1]
        return func(*args, **(kwargs or {}))


def test_products_are_those_of_one_sweep():
    """Every position once for the layer, every counted one once for all that read the input."""
    callback, batches = KroneckerCovarianceCallback(), make_batches()
    manager = HookManager(build("llama"), callbacks=[callback])
    with Products() as products:
        train(manager, batches)
    found = callback.covariances()
    positions = sum(batch["input_ids"].numel() for batch in batches)
    expected = sum(positions * one.gradient_cov_goo.shape[-1] ** 2 for one in found.values())
    for name in {one.input_of for one in found.values()}:
        one = found[name]
        expected += one.num_positions * one.activation_cov_gii.shape[-1] ** 2
    assert products.count == expected


# ---------------------------------------------------------------- refusals


class Grouped(nn.Module):
    """A convolution whose groups leave nothing once it is projected."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(4, 4, 1, groups=2)

    def forward(self, x):
        return self.conv(x).flatten(1)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"projection": Projection(kind="dense", dim=4)},
            ValueError,
            r"projection must keep both sides of a layer for its covariances, got kind='dense'",
        ),
        (
            {"projection": Projection(kind="mask", dim=4)},
            ValueError,
            "projection must keep both sides of a layer",
        ),
        ({"layers": "*norm*"}, CurvatureError, "must have a layer with Kronecker structure, got"),
        (
            {"layers": "lm_head"},
            CurvatureError,
            r"at most max_factor_dim=12, got lm_head \(17, 0.0 GiB\) for a covariance",
        ),
    ],
)
def test_captures_without_covariances_are_refused(options, error, message):
    callback = KroneckerCovarianceCallback(max_factor_dim=12)
    manager = HookManager(build("llama"), callbacks=[callback], **options)
    with pytest.raises(error, match=message):
        train(manager, make_batches())


def test_update_directions_have_no_covariances():
    model = build("llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    manager = HookManager(model, optimizer=optimizer, callbacks=[KroneckerCovarianceCallback()])
    with pytest.raises(ValueError, match="optimizer must be None for covariances, which are of"):
        train(manager, make_batches())


def test_groups_under_a_projection_are_passed_over():
    torch.manual_seed(0)
    model = Grouped()
    callback = KroneckerCovarianceCallback()
    manager = HookManager(model, projection=Projection(dim=2), callbacks=[callback])
    with pytest.raises(CurvatureError, match="got none"), manager.collect():
        pass
    manager = HookManager(model, callbacks=[callback])
    x = torch.randn(3, 4, 5)
    with manager.collect():
        model(x).square().sum().backward()
    assert callback.covariances()["conv"].activation_cov_gii.shape == (2, 3, 3)


def test_a_store_that_nothing_writes_into_is_refused():
    with GradientStore(residency="memory") as one, GradientStore(residency="memory") as two:
        callbacks = [OffloadCallback(one), KroneckerCovarianceCallback(two)]
        manager = HookManager(build("llama"), callbacks=callbacks)
        with pytest.raises(ValueError, match="store must be that of an OffloadCallback of the"):
            train(manager, make_batches())


def test_options_are_checked():
    with pytest.raises(ValueError, match="max_factor_dim must be an integer of at least 1, got 0"):
        KroneckerCovarianceCallback(max_factor_dim=0)


def test_the_output_embedding_is_left_out_unless_it_is_named():
    callback, named = KroneckerCovarianceCallback(), KroneckerCovarianceCallback()
    train(HookManager(build("llama"), callbacks=[callback]), make_batches())
    train(HookManager(build("llama"), layers="*", callbacks=[named]), make_batches())
    assert set(named.covariances()) - set(callback.covariances()) == {"lm_head"}


# ---------------------------------------------------------------- accumulators and their file


def linear(b=2, s=3, i=4, o=3, *, a=None, zero=None, groups=1, bias=True, dtype=F64):
    a = torch.randn(b, s, i, dtype=dtype) if a is None else a
    g = torch.randn(*a.shape[:2], o, dtype=dtype)
    if zero is not None:
        g[:, zero] = 0
    return LinearFactors(a, g, bias, groups)


def accumulate(batches, **options):
    found = CovarianceAccumulator(max_side=64, **options)
    for batch in batches:
        for name, gradient in batch.items():
            found.add(name, gradient)
        found.end_backward()
    return found


def shared_batches():
    """Layers that read one input, part ways, or come late; groups."""
    torch.manual_seed(4)
    batches = []
    for number in range(4):
        x, y = torch.randn(2, 3, 4, dtype=F64), torch.randn(2, 3, 4, dtype=F64)
        batch = {
            "q": linear(a=x, zero=0),
            "k": linear(a=x if number != 2 else y, zero=1 if number else None),
            "v": linear(a=x),
            "grouped": linear(groups=2, o=6),
        }
        if number > 1:
            batch["late"] = linear(a=x, zero=2)
        batches.append(batch)
    return batches


def assert_same_covariances(one, two):
    assert list(one) == list(two)
    for name, mine in one.items():
        theirs = two[name]
        assert (mine.num_positions, mine.num_examples, mine.input_of) == (
            theirs.num_positions,
            theirs.num_examples,
            theirs.input_of,
        )
        pairs = (
            (mine.activation_cov_gii, theirs.activation_cov_gii),
            (mine.gradient_cov_goo, theirs.gradient_cov_goo),
        )
        for left, right in pairs:
            torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-13)


def test_absorbing_a_backward_at_a_time_is_the_same():
    batches = shared_batches()
    total = CovarianceAccumulator(max_side=64)
    for batch in batches:
        part = accumulate([batch], like=total)
        total.absorb(part)
        assert part.names == ()
    assert_same_covariances(total.result(8), accumulate(batches).result(8))


def test_a_copy_goes_its_own_way():
    batches = shared_batches()
    one = accumulate(batches[:3])
    two = one.copy()
    for batch in batches[3:]:
        for name, gradient in batch.items():
            two.add(name, gradient)
        two.end_backward()
    assert_same_covariances(two.result(8), accumulate(batches).result(8))
    assert_same_covariances(one.result(6), accumulate(batches[:3]).result(6))


def test_forgotten_layers_leave_the_others():
    batches = shared_batches()
    sums = accumulate(batches)
    expected = accumulate(batches).result(8)
    sums.discard({"q", "grouped", "unknown"})
    found = sums.result(8)
    assert set(found) == {"k", "v", "late"}
    for name, one in found.items():
        assert torch.equal(one.activation_cov_gii, expected[name].activation_cov_gii)


@pytest.mark.parametrize("method", ["sums", "copy", "result"])
def test_a_backward_must_have_ended(method):
    sums = CovarianceAccumulator(max_side=64)
    sums.add("q", linear())
    calls = {"sums": sums.sums, "copy": sums.copy, "result": lambda: sums.result(2)}
    with pytest.raises(RuntimeError, match="end_backward must be called before"):
        calls[method]()
    with pytest.raises(RuntimeError, match="end_backward must be called before absorb"):
        CovarianceAccumulator(max_side=64).absorb(sums)


def test_restoring_needs_an_empty_accumulator():
    sums = accumulate(shared_batches())
    with pytest.raises(RuntimeError, match="restore must meet an empty accumulator, got one of 5"):
        sums.restore(sums.sums())


def test_the_state_goes_on_where_it_was_written():
    batches = shared_batches()
    tensors, metadata = covariance_state(accumulate(batches[:3]), 6, "abc")
    assert metadata["covers"] == "abc"
    assert metadata["format"] == "gradtrail-covariances-1"
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    sums, count = restored_accumulator(tensors, metadata, max_side=64)
    assert count == 6
    for batch in batches[3:]:
        for name, gradient in batch.items():
            sums.add(name, gradient)
        sums.end_backward()
    assert_same_covariances(sums.result(8), accumulate(batches).result(8))
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in before.items())
    assert_same_covariances(covariances_from(tensors, metadata), accumulate(batches[:3]).result(6))
    found = covariances_from(tensors, metadata)
    assert found["q"].activation_cov_gii is found["v"].activation_cov_gii


def damaged(change):
    tensors, metadata = covariance_state(accumulate(shared_batches()), 8)
    tensors, metadata = dict(tensors), dict(metadata)
    change(tensors, metadata)
    return tensors, metadata


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda _t, m: m.update(format="other-2"), "must be of format .*, got 'other-2'"),
        (lambda _t, m: m.pop("layers"), "must be whole, got damaged ones"),
        (lambda _t, m: m.update(layers="[1"), "must be whole, got damaged ones"),
        (lambda _t, m: m.update(layers="[1]"), "must be whole, got damaged ones"),
        (lambda _t, m: m.update(num_examples="-1"), r"damaged ones \(num_examples is -1\)"),
        (lambda t, _m: t.pop("q:activation_cov"), "got damaged ones .*q:activation_cov"),
        (lambda t, _m: t.pop("k:gradient_cov"), "got damaged ones .*k:gradient_cov"),
        (
            lambda t, _m: t.update({"q:count": torch.zeros(1)}),
            r"got damaged ones \(q:count is torch.float32 \(1,\)\)",
        ),
        (
            lambda t, _m: t.update({"q:gradient_cov": torch.zeros(1, 3, 4)}),
            r"q:gradient_cov is torch.float32 \(1, 3, 4\)",
        ),
        (
            lambda t, _m: t.update({"q:gradient_cov": torch.zeros(2, 3, 3)}),
            "q has 1 groups of inputs and 2 of outputs",
        ),
        (
            lambda _t, m: m.update(layers=json.dumps({"q": "k", "k": "q"})),
            "q reads the input of 'k'",
        ),
    ],
    ids=range(11),
)
def test_damaged_states_are_refused(change, message):
    with pytest.raises(CurvatureError, match=message):
        covariances_from(*damaged(change))


def test_inputs_are_let_go_once_their_readers_have_come():
    torch.manual_seed(0)
    total = CovarianceAccumulator(max_side=64, holds_inputs=False)
    for number in range(3):
        x = torch.randn(2, 3, 4, dtype=F64)
        for name in "qkv":
            total.add(name, linear(a=x, zero=0 if name == "q" else None))
        ref = weakref.ref(x)
        del x
        assert ref() is None, number
        total.end_backward()
    assert total.result(6)["v"].num_positions == 18


def test_an_input_that_is_read_again_for_each_layer_is_shared_where_it_is_held():
    """As from a store, which gives one tensor only as long as somebody has it."""
    torch.manual_seed(0)
    for holds in (True, False):
        cache = weakref.WeakValueDictionary()
        total = CovarianceAccumulator(max_side=64, holds_inputs=holds)
        for name in "qkv":
            x = cache.get("x")
            if x is None:
                x = cache["x"] = torch.ones(2, 3, 4, dtype=F64)
            total.add(name, linear(a=x))
            del x
        total.end_backward()
        assert len({one.input_of for one in total.result(2).values()}) == (1 if holds else 3)
