"""The core of the suite on a card: float32 and bfloat16 against the float64 oracle on the CPU."""

import copy

import pytest
import torch
from capturing import (
    by_parameter,
    covered,
    language_batch,
    mlp,
    oracle,
    pair,
    take_one,
    tiny_gpt2,
    tiny_llama,
    train_step,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

from gradtrail import (
    HookManager,
    Projection,
    attribute,
    check,
    example_id,
    reference,
    self_influence,
)
from gradtrail.hooks import select_layers

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::gradtrail.GradTrailWarning")]

DEVICE = "cuda"
LENGTHS = (6, 4, 5, 2)
# of the largest entry; bfloat16 keeps 8 bits and rounds in every layer
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 6e-2}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])


class Images(nn.Module):
    """Convolutions of several kinds, norms and a checkpointed middle."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(2, 4, 3, padding=1, padding_mode="reflect")
        self.middle = nn.Sequential(
            nn.GroupNorm(2, 4), nn.Conv2d(4, 4, 3, groups=2), nn.Tanh(), nn.Dropout(0.2)
        )
        self.up = nn.ConvTranspose2d(4, 3, 2, stride=2)
        self.head = nn.Linear(3, 3)

    def forward(self, x):
        x = torch.tanh(self.stem(x))
        x = checkpoint(self.middle, x, use_reentrant=False)
        return self.head(torch.tanh(self.up(x)).mean((2, 3)))


def images():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 2, 6, 6, generator=generator, dtype=torch.float64)
    return x, torch.tensor([0, 2, 1, 1])


class Recurrent(nn.Module):
    """Whose backward cuDNN offers in training mode alone."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inlet = nn.Linear(4, 6)
        self.memory = nn.LSTM(6, 5, num_layers=2, dropout=0.5, batch_first=True)
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        return self.head(self.memory(torch.tanh(self.inlet(x)))[0])


MODELS = {
    "mlp": (lambda: mlp(8, 16, 3), lambda: pair(4, 5, 8)),
    "images": (lambda: Images().double(), images),
    "recurrent": (lambda: Recurrent().double(), lambda: pair(4, 5, 4)),
    "gpt2": (tiny_gpt2, lambda: language_batch(LENGTHS)),
    "llama": (tiny_llama, lambda: language_batch(LENGTHS)),
}


@pytest.fixture(autouse=True)
def full_float32(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def moved(batch, dtype):
    """A batch in one dtype, still on the CPU: the library brings it to the card."""

    def convert(value):
        return value.to(dtype) if value.is_floating_point() else value

    if isinstance(batch, dict):
        return {name: convert(value) for name, value in batch.items()}
    return tuple(map(convert, batch))


def on_card(batch, dtype):
    batch = moved(batch, dtype)
    if isinstance(batch, dict):
        return {name: value.to(DEVICE) for name, value in batch.items()}
    return tuple(value.to(DEVICE) for value in batch)


def rows_of(batch):
    first = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
    return [take_one(batch, row) for row in range(len(first))]


def both(name, dtype):
    """The model on the card, and one on the CPU that holds the same rounded weights."""
    make, batch = MODELS[name]
    exact = make().eval()
    model = copy.deepcopy(exact).to(DEVICE, dtype)
    with torch.no_grad():
        for wide, narrow in zip(exact.parameters(), model.parameters(), strict=True):
            wide.copy_(narrow.double().cpu())
    return model, exact, batch()


def close(actual, expected, dtype):
    actual, expected = actual.double().cpu(), expected.double()
    bound = TOLERANCE[dtype] * max(float(expected.abs().max()), 1e-12)
    torch.testing.assert_close(actual, expected, rtol=0, atol=bound)


@DTYPES
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("method", ["graddot", "gradcos"])
def test_scores_equal_those_of_the_oracle(name, dtype, method):
    model, exact, batch = both(name, dtype)
    expected = oracle(exact, batch, names=covered(select_layers(exact)))
    wanted = reference.dot_products(expected, expected, normalize=method == "gradcos")
    rows = rows_of(moved(batch, dtype))
    for batch_size in (1, 3, 4):
        found = attribute(model, rows, rows, method=method, batch_size=batch_size, progress=False)
        assert found.values.device.type == "cpu"
        assert found.values.dtype == torch.float32
        close(found.values, wanted, dtype)


@DTYPES
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_token_scores_sum_to_the_example(name, dtype):
    model, _, batch = both(name, dtype)
    rows = rows_of(moved(batch, dtype))
    whole = attribute(model, rows, rows, progress=False).values
    tokens = attribute(model, rows, rows, granularity="token", progress=False)
    assert tokens.values.shape[:2] == (4, max(LENGTHS))
    close(tokens.values.sum(1), whole, torch.float32)


@DTYPES
@pytest.mark.parametrize("kind", ["factored", "dense", "mask"])
def test_projection_is_the_same_on_every_device(kind, dtype):
    model, exact, batch = both("llama", dtype)
    projection = Projection(kind=kind, dim=4, seed=3)
    rows, exact_rows = rows_of(moved(batch, dtype)), rows_of(batch)
    found = attribute(model, rows, rows, projection=projection, progress=False).values
    wanted = attribute(exact, exact_rows, exact_rows, projection=projection, progress=False).values
    close(found, wanted, dtype)


@DTYPES
def test_self_influence_is_the_diagonal(dtype):
    model, _, batch = both("llama", dtype)
    rows = rows_of(moved(batch, dtype))
    scores = attribute(model, rows, rows, progress=False).values
    close(self_influence(model, rows, progress=False), scores.diagonal(), torch.float32)


@DTYPES
@pytest.mark.parametrize("name", MODELS)
def test_training_capture_equals_the_oracle(name, dtype):
    model, exact, batch = both(name, dtype)
    model.train()
    for module in (*model.modules(), *exact.modules()):
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(module, nn.LSTM):
            module.dropout = 0.0
    twin = copy.deepcopy(model)
    train_step(twin, on_card(batch, dtype)).backward()
    manager = HookManager(model)
    with manager.collect():
        train_step(model, on_card(batch, dtype)).backward()
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-3, atol=1e-3)
    got = by_parameter(model, manager._selection.units, manager.last.layers)
    assert got
    expected = oracle(exact, batch, names=sorted(got))
    for parameter, value in got.items():
        assert value.device.type == DEVICE
        close(value, expected[parameter], dtype)


def test_training_with_checkpointing_is_equal_to_the_bit():
    batch = on_card(images(), torch.float32)
    runs = []
    for captured in (False, True):
        torch.manual_seed(0)
        model = Images().to(DEVICE).train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        manager = HookManager(model, loss_reduction="mean")
        torch.manual_seed(1)
        context = manager.collect() if captured else torch.enable_grad()
        with context, torch.backends.cudnn.flags(deterministic=True, benchmark=False):
            for _ in range(5):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
                optimizer.step()
        assert manager.steps == 5 * captured
        states = (*model.state_dict().values(), torch.cuda.get_rng_state())
        runs.append([state.clone() for state in states])
    for bare, held in zip(*runs, strict=True):
        assert torch.equal(bare, held)


@DTYPES
def test_ids_are_those_of_the_items_on_the_cpu(dtype):
    model, _, batch = both("mlp", dtype)
    manager = HookManager(model)
    x, y = on_card(batch, dtype)
    with manager.collect():
        (model(x) - y).square().sum().backward()
    assert manager.last.ids == tuple(example_id(row) for row in moved(batch, dtype)[0])


def test_live_pass_leaves_the_cards_random_state_and_the_model_alone():
    model, _, batch = both("images", torch.float32)
    model.train()
    before = torch.cuda.get_rng_state(), torch.get_rng_state()
    rows = rows_of(moved(batch, torch.float32))
    attribute(model, rows, rows, projection=4, progress=False)
    assert torch.equal(torch.cuda.get_rng_state(), before[0])
    assert torch.equal(torch.get_rng_state(), before[1])
    assert all(module.training for module in model.modules())
    assert all(parameter.requires_grad for parameter in model.parameters())


@DTYPES
@pytest.mark.parametrize("name", MODELS)
def test_check_agrees(name, dtype):
    model, _, batch = both(name, dtype)
    report = check(model, on_card(batch, dtype))
    assert report.ok, str(report)


def test_memory_does_not_grow_from_batch_to_batch():
    model, _, batch = both("llama", torch.float32)
    rows = rows_of(batch)

    def peak(copies):
        torch.cuda.reset_peak_memory_stats()
        attribute(model, rows * copies, rows, batch_size=4, progress=False)
        return torch.cuda.max_memory_allocated()

    peak(1)
    # scores live on the CPU; what is left of a batch on the card is noise of the allocator
    assert peak(32) <= 1.2 * peak(2)
    assert torch.cuda.memory_allocated() < peak(2)
