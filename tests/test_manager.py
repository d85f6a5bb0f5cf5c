"""HookManager: what it captures in a training loop, and that training does not notice."""

import copy
import gc

import pytest
import torch
from capturing import (
    F64,
    by_parameter,
    close,
    covered,
    language_batch,
    mlp,
    oracle,
    pair,
    tiny_gpt2,
    tiny_llama,
    train_step,
)
from models import MODELS, alone, build, exactly, rows_of
from torch import nn
from torch.utils.checkpoint import checkpoint

from gradtrail import (
    CaptureError,
    GradTrailWarning,
    HookManager,
    Projection,
    attribute,
    check,
    example_id,
    self_influence,
)
from gradtrail.attribution.data import as_rows
from gradtrail.attribution.losses import resolve_loss
from gradtrail.factors import DenseGradient, LinearFactors, SumGradient, project, to_dense
from gradtrail.hooks import select_layers

quiet = pytest.mark.filterwarnings("ignore::gradtrail.GradTrailWarning")


class Convolutional(nn.Module):
    """A small classifier with dropout, and a body that runs under checkpointing where asked."""

    def __init__(self, checkpointing):
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(2, 4, 3, padding=1)
        self.body = nn.Sequential(
            nn.GroupNorm(2, 4), nn.Conv2d(4, 4, 3, groups=2), nn.ReLU(inplace=True), nn.Dropout(0.3)
        )
        self.head = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))
        self.checkpointing = checkpointing

    def forward(self, x):
        x = self.stem(x)
        if self.checkpointing is None:
            x = self.body(x)
        else:
            x = checkpoint(self.body, x, use_reentrant=self.checkpointing)
        return self.head(x.mean((2, 3)))


def image_batches(steps, b=4):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = torch.randn(b, 2, 6, 6, generator=generator)
        yield x, torch.randint(0, 3, (b,), generator=generator)


def text_batches(steps):
    for step in range(steps):
        batch = language_batch((6, 4, 5), seed=step)
        yield batch


def make_gpt2(checkpointing):
    model = tiny_gpt2().float()
    if checkpointing is not None:
        enable = getattr(model, "activation_checkpointing_enable", None)
        enable = enable or model.gradient_checkpointing_enable
        enable({"use_reentrant": checkpointing})
    return model.train()


def image_loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def text_loss(model, batch):
    return model(**batch).loss


KINDS = {
    "gpt2": (make_gpt2, text_batches, text_loss),
    "cnn": (lambda kind: Convolutional(kind).train(), image_batches, image_loss),
}


def train(kind, checkpointing, steps, *, options=None, fail_every=None):
    """Train with AdamW; everything that a capture could have changed, and the manager."""
    make, batches, loss = KINDS[kind]
    torch.manual_seed(0)
    model = make(checkpointing)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    switch = {"fail": False}
    middle = list(model.parameters())[len(list(model.parameters())) // 2]
    middle.register_hook(lambda _: 1 / 0 if switch["fail"] else None)
    torch.manual_seed(7)
    losses, counts = [], []
    manager = None if options is None else HookManager(model, **options)

    def loop():
        for step, batch in enumerate(batches(steps)):
            optimizer.zero_grad()
            value = loss(model, batch)
            losses.append(value.item())
            switch["fail"] = fail_every is not None and step % fail_every == fail_every - 1
            if switch["fail"]:
                with pytest.raises(ZeroDivisionError):
                    value.backward()
            else:
                value.backward()
                optimizer.step()
            if step % 50 == 49:
                counts.append(live_tensors())

    if manager is None:
        loop()
    else:
        with manager.collect():
            loop()
    return model, losses, torch.get_rng_state(), counts, manager


def live_tensors():
    gc.collect()
    # by type: isinstance would ask lazy modules for attributes
    return sum(issubclass(type(entry), torch.Tensor) for entry in gc.get_objects())


def assert_same_run(one, two):
    assert one[1] == two[1]
    assert torch.equal(one[2], two[2])
    for mine, theirs in zip(
        one[0].state_dict().values(), two[0].state_dict().values(), strict=True
    ):
        assert torch.equal(mine, theirs)


# ---------------------------------------------------------------- training does not notice


@quiet
@pytest.mark.parametrize("checkpointing", [None, True, False], ids=["plain", "reentrant", "non"])
@pytest.mark.parametrize("kind", KINDS)
def test_training_is_equal_to_the_bit(kind, checkpointing):
    bare = train(kind, checkpointing, 30)
    for options in (
        {"loss_reduction": "mean"},
        {"include_frozen": True, "projection": Projection(dim=2), "capture": "materialized"},
    ):
        with_manager = train(kind, checkpointing, 30, options=options)
        assert with_manager[4].steps == 30
        assert_same_run(with_manager, bare)


@quiet
@pytest.mark.parametrize("kind", [pytest.param("gpt2", marks=pytest.mark.slow), "cnn"])
@pytest.mark.parametrize("checkpointing", [None, False], ids=["plain", "non-reentrant"])
def test_two_hundred_steps_with_a_failure_in_every_tenth(kind, checkpointing):
    bare = train(kind, checkpointing, 200, fail_every=10)
    held = train(kind, checkpointing, 200, options={}, fail_every=10)
    assert held[4].steps == 180
    assert_same_run(held, bare)
    counts = held[3]
    assert len(counts) == 4
    assert counts[-1] <= counts[0], counts
    assert not held[4]._open


@quiet
def test_frozen_layers_under_checkpointing_complete_every_step():
    make, batches, loss = KINDS["gpt2"]
    model = make(False)
    model.transformer.h.requires_grad_(False)
    manager = HookManager(model, include_frozen=True, exclude="*wpe")
    with manager.collect():
        for step, batch in enumerate(batches(5)):
            loss(model, batch).backward()
            assert manager.steps == step + 1
            assert set(manager.last.layers) == set(manager.layers)
    assert len(manager.layers) == 1 + 1 + 2 * 6


@quiet
@pytest.mark.parametrize("b", [4, 5], ids=["b4", "as-many-as-positions"])
@pytest.mark.parametrize("name", MODELS)
def test_language_and_vision_models_in_a_training_capture(name, b):
    """Also where there are as many examples as positions, which shapes alone cannot tell apart."""
    model = build(name).eval()
    generator = torch.Generator().manual_seed(0)
    if name == "vit":
        rows = rows_of(name)[:b]
    else:
        ids = torch.randint(3, 29, (b, 5), generator=generator)
        rows = [{"input_ids": row, "labels": row.clone()} for row in ids]
    batch = as_rows(rows, "train", None, 0).batch(range(b))
    manager = HookManager(model)
    with exactly(), manager.collect():
        train_step(model, batch).backward()
    got = block_of(manager)
    with exactly():
        expected = alone(model, rows, names=sorted(got))
    close(got, expected, rtol=1e-6, atol=1e-9)
    left = {entry.name for entry in manager.coverage.with_status("unsupported")}
    assert set(got) | left == {name for name, _ in model.named_parameters()}
    allowed = ("wpe", "relative_attention_bias", "position_emb", "embed_positions", "expert")
    allowed += ("cls_token", "gate", "router")
    assert all(any(part in one for part in allowed) for one in left), left


# ---------------------------------------------------------------- losses


def masked_lm_like_sum(model, batch):
    return resolve_loss(None, None)(model, batch)


def block_of(manager):
    return by_parameter(manager.model, manager._selection.units, manager.last.layers)


@pytest.mark.parametrize("size", [4, 3, 1], ids=["full", "ragged", "one"])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_loss_reduction_by_example(reduction, size):
    """An example's gradient is that of its own loss, also in a ragged last batch."""
    model = mlp(4, 5, 3)
    x, y = pair(4, 4)
    batch = (x[:size], y[:size])
    manager = HookManager(model, loss_reduction=reduction)
    with manager.collect():
        losses = masked_lm_like_sum(model, batch)
        (losses.sum() if reduction == "sum" else losses.mean()).backward()
    got = block_of(manager)
    close(got, oracle(model, batch, names=sorted(got)))


@quiet
@pytest.mark.parametrize("lengths", [(6, 6, 6), (6, 4, 5), (2, 6, 1), (6,)])
def test_loss_that_is_a_mean_over_tokens(lengths):
    """A batch's mates of other lengths change nothing."""
    model, batch = tiny_gpt2().eval(), language_batch(lengths)
    manager = HookManager(model, loss_reduction="token_mean", exclude="*wpe")
    with manager.collect():
        model(**batch).loss.backward()
    got = block_of(manager)
    # transformers takes the loss in float32
    close(got, oracle(model, batch, names=sorted(got)), rtol=1e-4, atol=1e-7)


@quiet
def test_loss_that_is_a_mean_over_tokens_of_a_model_without_a_shift():
    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.table = nn.Embedding(17, 4, dtype=F64)
            self.head = nn.Linear(4, 5, dtype=F64)

        def forward(self, input_ids, labels):
            logits = self.head(torch.tanh(self.table(input_ids)))
            return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def summed(model, batch):
        value = model(batch["input_ids"], batch["labels"])
        return (value * (batch["labels"] != -100).sum()).reshape(1)

    model = Tagger()
    batch = language_batch((6, 3, 4))
    batch = {"input_ids": batch["input_ids"], "labels": batch["labels"].clamp(max=4)}
    manager = HookManager(model, loss_reduction="token_mean")
    with manager.collect():
        model(**batch).backward()
    got = block_of(manager)
    close(got, oracle(model, batch, summed, names=sorted(got)))


def test_mean_over_tokens_needs_labels():
    model, (x, _) = mlp(4, 3), pair(4, 4)
    manager = HookManager(model, loss_reduction="token_mean")
    with manager.collect(), pytest.raises(CaptureError, match="must find labels= in the model's"):
        model(x)


def test_undoing_a_mean_does_not_round_in_low_precision():
    model, (x, y) = mlp(4, 5, 3).bfloat16(), pair(3, 4)
    x, y = x.bfloat16(), y.bfloat16()
    blocks = []
    for scale in ("sum", "mean"):
        twin = copy.deepcopy(model)
        manager = HookManager(twin, loss_reduction=scale)
        with manager.collect():
            # gradients of the mean rounded to bfloat16, then taken three times
            ((twin(x) - y).float().square().sum(1) / (1 if scale == "sum" else 3)).sum().backward()
        blocks.append(manager.last.layers)
    for name, layer in blocks[1].items():
        assert layer.output_gradient_bso.dtype == torch.float32
        whole = to_dense(blocks[0][name]).values_bd
        assert float((to_dense(layer).values_bd - whole).abs().max()) < 0.02 * whole.abs().max()


# ---------------------------------------------------------------- form of the block


def test_projection_is_that_of_the_exact_gradient():
    model, batch = mlp(4, 9, 3), pair(4, 5, 4)
    projection = Projection(dim=3, seed=5)
    blocks = []
    for chosen in (None, projection):
        manager = HookManager(model, projection=chosen)
        with manager.collect():
            train_step(model, batch).backward()
        blocks.append(manager.last.layers)
    for name, layer in blocks[0].items():
        expected = to_dense(project(name, layer, projection)).values_bd
        close(to_dense(blocks[1][name]).values_bd, expected)
        assert blocks[1][name].activation_bsi.shape[2] <= 4


def test_capture_materialized_factored_and_auto():
    model, batch = mlp(4, 30, 3), pair(4, 5, 4)
    blocks = {}
    for form in ("factored", "materialized", "auto"):
        manager = HookManager(model, capture=form)
        with manager.collect():
            train_step(model, batch).backward()
        blocks[form] = manager.last.layers
        got = block_of(manager)
        close(got, oracle(model, batch, names=sorted(got)))
    assert all(isinstance(layer, LinearFactors) for layer in blocks["factored"].values())
    assert all(isinstance(layer, DenseGradient) for layer in blocks["materialized"].values())
    # 5 positions of 4 + 30 against 4 times 30 entries; of 30 + 3 against 90
    assert [type(layer) for layer in blocks["auto"].values()] == [DenseGradient, DenseGradient]
    manager = HookManager(model, capture="auto")
    with manager.collect():
        train_step(model, pair(4, 4)).backward()
    assert all(isinstance(layer, LinearFactors) for layer in manager.last.layers.values())


def test_layers_that_read_one_input_share_it():
    model, batch = tiny_llama().eval(), language_batch((5, 5))
    manager = HookManager(model)
    with manager.collect():
        train_step(model, batch).backward()
    layers = manager.last.layers
    q, k, v = (
        layers[f"model.layers.0.self_attn.{name}_proj"].activation_bsi for name in ("q", "k", "v")
    )
    gate, up = (layers[f"model.layers.0.mlp.{name}_proj"].activation_bsi for name in ("gate", "up"))
    assert q is k is v
    assert gate is up
    assert q is not gate


def test_block_does_not_change_with_what_it_was_read_from():
    """Optimizers change weights in place, loops refill their input buffers."""

    class Queries(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.queries = nn.Parameter(torch.randn(3, 4, dtype=F64))
            self.read = nn.Linear(4, 4, dtype=F64)
            self.out = nn.Linear(4, 3, dtype=F64)

        def forward(self, x):
            read = self.read(self.queries.expand(x.shape[0], 3, 4))
            return self.out(torch.tanh(x.unsqueeze(1) + read)).sum(1) + self.out(x)

    model, (x, y) = Queries(), pair(4, 4)
    twin, inputs = copy.deepcopy(model), x.clone()
    manager = HookManager(model)
    with manager.collect():
        train_step(model, (x, y)).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
        x.zero_()
    got = block_of(manager)
    close(got, oracle(twin, (inputs, y), names=sorted(got)))


def test_tied_weights_and_a_layer_called_twice_are_sums():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.table = nn.Embedding(7, 4, dtype=F64)
            self.loop = nn.Linear(4, 4, dtype=F64)
            self.head = nn.Linear(4, 7, bias=False, dtype=F64)
            self.head.weight = self.table.weight

        def forward(self, ids):
            x = self.table(ids)
            for _ in range(3):
                x = torch.tanh(self.loop(x))
            return self.head(x)

    model = Model()
    batch = (torch.randint(0, 7, (4, 5)), pair(4, 5, 4, out=7)[1])
    manager = HookManager(model)
    with manager.collect():
        train_step(model, batch).backward()
    assert isinstance(manager.last.layers["table"], SumGradient)
    assert manager.last.layers["loop"].num_positions == 15
    got = block_of(manager)
    assert set(got) == {"table.weight", "loop.weight", "loop.bias"}
    close(got, oracle(model, batch, names=sorted(got)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype):
    """Outputs are of low precision there, inputs and weights are not; all is summed in float32."""
    model, (x, y) = mlp(4, 16, 3), pair(4, 5, 4)
    model, x, y = model.float(), x.float(), y.float()
    manager = HookManager(model)
    with manager.collect():
        with torch.autocast("cpu", dtype=dtype):
            out = model(x)
        assert out.dtype == dtype
        (out.float() - y).square().sum().div(2).backward()
    got = block_of(manager)
    assert all(value.dtype == torch.float32 for value in got.values())
    expected = oracle(mlp(4, 16, 3), (x.double(), y.double()))
    for name, value in expected.items():
        assert float((got[name] - value).abs().max()) < 0.03 * float(value.abs().max())


# ---------------------------------------------------------------- the manager itself


def test_steps_last_layers_coverage_and_remove():
    model, batches = mlp(4, 5, 3), [pair(3, 4, seed=seed) for seed in range(3)]
    manager = HookManager(model)
    assert manager.steps == 0
    assert manager.last is None
    assert manager.layers == ("0", "2")
    assert manager.coverage.share == 1.0
    assert not any(module._forward_hooks for module in model.modules())
    with manager.collect() as entered:
        assert entered is manager
        for number, batch in enumerate(batches):
            train_step(model, batch).backward()
            assert manager.steps == number + 1
            assert manager.last.step == number
            assert list(manager.last.layers) == ["0", "2"]
            assert len(manager.last.ids) == 3
        manager.remove()
        train_step(model, batches[0]).backward()
        assert manager.steps == 3
    assert not any(module._forward_hooks for module in model.modules())
    assert not any(module._forward_pre_hooks for module in model.modules())
    with manager.collect():
        train_step(model, batches[0]).backward()
    assert manager.steps == 4


def test_callbacks_receive_every_block_in_order():
    model, seen = mlp(4, 5, 3), []
    manager = HookManager(
        model,
        callbacks=[
            lambda block: seen.append(("one", block.step)),
            lambda block: seen.append(("two", block.step)),
        ],
    )
    with manager.collect():
        for seed in range(3):
            train_step(model, pair(3, 4, seed=seed)).backward()
    assert seen == [(name, step) for step in range(3) for name in ("one", "two")]


def test_callback_that_raises_fails_its_backward_and_not_the_next():
    model, seen = mlp(4, 5, 3), []

    def failing(block):
        if block.step == 0:
            raise OSError("no space left")
        seen.append(block.step)

    manager = HookManager(model, callbacks=[failing])
    with manager.collect():
        with pytest.raises(OSError, match="no space left"):
            train_step(model, pair(3, 4)).backward()
        train_step(model, pair(3, 4)).backward()
    assert seen == [1]
    got = block_of(manager)
    close(got, oracle(model, pair(3, 4), names=sorted(got)))


def test_choice_of_layers():
    model = mlp(4, 5, 5, 3)
    assert HookManager(model, layers="2").layers == ("2",)
    assert HookManager(model, layers=nn.Linear, exclude=["0"]).layers == ("2", "4")
    assert HookManager(model, layers=lambda name, _: name > "0").layers == ("2", "4")
    with pytest.raises(
        ValueError, match=r"must match a layer of the model, got 'twoo'.*Near names"
    ):
        HookManager(model, layers="twoo")


@pytest.mark.parametrize("option", ["loss_reduction", "capture"])
def test_unknown_choices_are_refused(option):
    with pytest.raises(ValueError, match=f"{option} must be one of .*, got 'most'"):
        HookManager(mlp(4, 3), **{option: "most"})


def test_nested_collect_is_refused():
    model = mlp(4, 3)
    manager = HookManager(model)
    with manager.collect():
        with pytest.raises(RuntimeError, match="must not be nested"), manager.collect():
            pass
        train_step(model, pair(3, 4)).backward()
    assert manager.steps == 1


def test_managers_on_two_models_and_two_on_one():
    one, two = mlp(4, 5, 3), mlp(4, 6, 3, seed=1)
    managers = [HookManager(one), HookManager(two), HookManager(one, layers="2")]
    batch = pair(4, 4)
    with managers[0].collect(), managers[1].collect(), managers[2].collect():
        (train_step(one, batch) + train_step(two, batch)).backward()
        train_step(two, batch).backward()
    assert [manager.steps for manager in managers] == [1, 2, 1]
    for manager in managers:
        got = block_of(manager)
        close(got, oracle(manager.model, batch, names=sorted(got)))


def test_manager_on_a_part_of_a_model_that_has_its_own():
    whole = nn.Sequential(mlp(4, 5, 5), nn.Tanh(), mlp(5, 3, seed=1))
    outer, inner = HookManager(whole), HookManager(whole[0])
    batch = pair(4, 4)
    with outer.collect(), inner.collect():
        train_step(whole, batch).backward()
    assert (outer.steps, inner.steps) == (1, 1)
    got = block_of(inner)
    expected = oracle(whole, batch)
    close(got, {name: expected[f"0.{name}"] for name in got})


def test_model_that_calls_itself():
    class Recursive(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.a = nn.Linear(4, 4, dtype=F64)

        def forward(self, x, depth=2):
            x = torch.tanh(self.a(x))
            return x if depth == 0 else self(x, depth - 1)

    model, (x, _) = Recursive(), pair(4, 4)
    manager = HookManager(model)
    with manager.collect():
        model(x).sum().backward()
    assert manager.steps == 1
    got = block_of(manager)
    close(got, oracle(model, (x, x), lambda model, batch: model(batch[0]).sum(1)))


def test_copy_of_the_model_made_inside_is_not_captured():
    """As moving averages of the weights are made."""
    model, batch = mlp(4, 5, 3), pair(4, 4)
    manager = HookManager(model)
    with manager.collect():
        train_step(model, batch).backward()
        average = copy.deepcopy(model)
        assert average[0]._forward_hooks  # it carries the hooks along
        train_step(average, batch).backward()
        average(batch[0])
        assert manager.steps == 1
        assert not manager._open
        train_step(model, batch).backward()
        assert manager.steps == 2
    train_step(average, batch).backward()
    assert manager.steps == 2


def test_calls_past_the_model_itself_are_reported_once():
    model, (x, y) = mlp(4, 5, 3), pair(4, 4)
    manager = HookManager(model)
    with manager.collect():
        with pytest.warns(GradTrailWarning, match=r"0 was called outside .* Sequential itself"):
            model.forward(x)
        model.forward(x).sum().backward()
        with torch.no_grad():
            model[0](x)
        assert manager.steps == 0
        train_step(model, (x, y)).backward()
    assert manager.steps == 1
    got = block_of(manager)
    close(got, oracle(model, (x, y), names=sorted(got)))


class Nested(nn.Module):
    """Called with one structure that holds the fields."""

    def __init__(self):
        super().__init__()
        self.inner = mlp(4, 3)

    def forward(self, batch):
        fields = batch if isinstance(batch, dict) else {"x": batch[0]}
        return self.inner(fields["x"]) * fields.get("scale", 1.0)


@pytest.mark.parametrize("wrap", [lambda x: {"x": x}, lambda x: (x, "note")], ids=["dict", "tuple"])
def test_batch_passed_as_one_structure(wrap):
    model, (x, _) = Nested(), pair(3, 4)
    manager = HookManager(model)
    with manager.collect():
        model(wrap(x)).square().sum().backward()
    assert len(set(manager.last.ids)) == 3
    got = block_of(manager)
    close(got, oracle(model, (x, x), lambda model, batch: model({"x": batch[0]}).square().sum(1)))
    if isinstance(wrap(x), dict):
        assert manager.last.ids == tuple(example_id({"x": row}) for row in x)
        by_key = HookManager(model, sample_id_key="number", sample_hash_fields=["x"])
        with by_key.collect():
            model({"x": x, "number": torch.arange(3)}).square().sum().backward()
        assert by_key.last.ids == (0, 1, 2)


def test_scalar_argument_before_the_batch():
    class Timed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = mlp(4, 3)

        def forward(self, time, x):
            return self.inner(x) * time

    model, (x, _) = Timed(), pair(3, 4)
    manager = HookManager(model)
    with manager.collect():
        model(torch.tensor(2.0), x).sum().backward()
    assert len(set(manager.last.ids)) == 3


def test_batch_norm_that_mixes_the_examples_is_said():
    """Left out, it still makes every example's gradient depend on its mates."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()
    manager = HookManager(model, exclude=nn.BatchNorm1d)
    with manager.collect():
        with pytest.warns(GradTrailWarning, match=r"BatchNorm in training mode \(1\) makes"):
            train_step(model, pair(4, 4)).backward()
        train_step(model, pair(4, 4)).backward()
    assert manager.steps == 2
    model.eval()
    quiet_manager = HookManager(model)
    with quiet_manager.collect():
        train_step(model, pair(4, 4)).backward()


# ---------------------------------------------------------------- warnings at registration


def test_every_candidate_frozen_warns():
    model = mlp(4, 5, 3).requires_grad_(False)
    with pytest.warns(GradTrailWarning, match=r"is frozen.*include_frozen=True") as caught:
        HookManager(model)
    assert caught[0].filename == __file__
    with pytest.warns(GradTrailWarning, match="No trained parameter comes before 2 frozen layers"):
        HookManager(model, include_frozen=True)
    with pytest.raises(ValueError, match="none: .*frozen"):
        HookManager(model, layers="0")


def test_no_supported_layer_warns():
    with pytest.warns(GradTrailWarning, match="is unsupported or left out"):
        HookManager(nn.LSTM(4, 4))


def test_frozen_layers_below_every_trained_one_warn():
    model = mlp(4, 5, 5, 3)
    model[0].requires_grad_(False)
    with pytest.warns(GradTrailWarning, match=r"before 1 frozen layers \(0\)") as caught:
        manager = HookManager(model, include_frozen=True)
    assert caught[0].filename == __file__
    assert manager.layers == ("0", "2", "4")
    HookManager(model)


def test_frozen_layers_above_a_trained_one_do_not_warn():
    model, batch = mlp(4, 5, 5, 3), pair(4, 4)
    model[2].requires_grad_(False)
    manager = HookManager(model, include_frozen=True)
    with manager.collect():
        train_step(model, batch).backward()
    got = block_of(manager)
    assert set(got) == set(dict(model.named_parameters()))
    close(got, oracle(model, batch, names=sorted(got)))
    assert model[2].weight.grad is None


# ---------------------------------------------------------------- live passes inside a capture


@pytest.mark.parametrize("checkpointing", [None, True, False], ids=["plain", "reentrant", "non"])
def test_live_pass_while_collecting(checkpointing):
    """It makes no steps, and a forward that waits for its backward is none the worse."""
    model = Convolutional(checkpointing).double().train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    batch = next(image_batches(1))
    batch = (batch[0].double(), batch[1])
    rows = list(zip(*batch, strict=True))
    alone = attribute(model, rows, rows, progress=False)
    manager = HookManager(model)
    with manager.collect():
        loss = train_step(model, batch)
        inside = attribute(model, rows, rows, progress=False)
        self_influence(model, rows, progress=False)
        if checkpointing is not True:  # autograd.grad, which it takes, refuses that kind
            assert check(model, batch).ok
        assert manager.steps == 0
        loss.backward()
        assert manager.steps == 1
        attribute(model, rows, rows, progress=False)
        assert manager.steps == 1
        train_step(model, batch).backward()
    assert manager.steps == 2
    close(inside.values, alone.values, rtol=0, atol=0)
    model.checkpointing = None
    got = block_of(manager)
    close(got, oracle(model, batch, names=sorted(got)))


@pytest.mark.parametrize("checkpointing", [None, True, False], ids=["plain", "reentrant", "non"])
def test_live_pass_in_a_callback(checkpointing):
    model = Convolutional(checkpointing).double().eval()
    batch = next(image_batches(1))
    batch = (batch[0].double(), batch[1])
    rows = list(zip(*batch, strict=True))
    alone = attribute(model, rows, rows, progress=False)
    scores = []
    manager = HookManager(
        model, callbacks=[lambda _: scores.append(attribute(model, rows, rows, progress=False))]
    )
    with manager.collect():
        for _ in range(2):
            train_step(model, batch).backward()
    assert manager.steps == 2
    for inside in scores:
        close(inside.values, alone.values, rtol=0, atol=0)
    model.checkpointing = None
    got = block_of(manager)
    close(got, oracle(model, batch, names=sorted(got)))


@pytest.mark.parametrize("checkpointing", [None, True, False], ids=["plain", "reentrant", "non"])
def test_live_pass_after_a_failed_backward_whose_loss_is_kept(checkpointing):
    model = Convolutional(checkpointing).double().eval()
    batch = next(image_batches(1))
    batch = (batch[0].double(), batch[1])
    rows = list(zip(*batch, strict=True))
    alone = attribute(model, rows, rows, progress=False)
    manager = HookManager(model)
    with manager.collect():
        loss = train_step(model, batch)
        handle = model.stem.weight.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        handle.remove()
        inside = attribute(model, rows, rows, progress=False)
        hidden = torch.randn(4, 4, 6, 6, dtype=F64, requires_grad=True)
        with pytest.warns(GradTrailWarning, match="outside the model's own forward"):
            # a part of the model alone, checkpointed, which no capture saw forwards
            checkpoint(model.body, hidden, use_reentrant=False).sum().backward()
        assert loss.grad_fn is not None
    close(inside.values, alone.values, rtol=0, atol=0)


def test_live_pass_over_a_part_and_over_the_whole():
    whole = nn.Sequential(mlp(4, 5, 5), nn.Tanh(), mlp(5, 3, seed=1))
    manager = HookManager(whole[0])
    batch = pair(4, 4)
    rows = list(zip(*batch, strict=True))
    with manager.collect():
        attribute(whole, rows, rows, progress=False)
        assert manager.steps == 0
        train_step(whole, batch).backward()
    assert manager.steps == 1
    outer = HookManager(whole)
    with outer.collect():
        part = list(zip(batch[0], pair(4, 4, out=5)[1], strict=True))
        attribute(whole[0], part, part, progress=False)
        assert outer.steps == 0
        train_step(whole, batch).backward()
    assert outer.steps == 1
    assert covered(select_layers(whole[0])) == [name for name, _ in whole[0].named_parameters()]
