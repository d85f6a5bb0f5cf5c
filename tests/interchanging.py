"""Models with a site, pairs for them, and their interchange gradients by two plain forwards."""

import warnings

import torch
from torch import nn
from torch.nn import functional as F

from gradtrail import reference
from gradtrail.attribution.query_source import as_queries, query_loss_of
from gradtrail.attribution.session import Session
from gradtrail.attribution.setup import make_session
from gradtrail.factors import to_dense
from gradtrail.hooks import select_layers
from gradtrail.interchange import random_basis


class Mlp(nn.Module):
    """Two hidden layers with a bare hook point between them, in evaluation mode."""

    def __init__(self, width=6, inputs=4, classes=3):
        super().__init__()
        self.first = nn.Linear(inputs, width)
        self.norm = nn.LayerNorm(width)
        self.second = nn.Linear(width, width)
        self.hook_mid = nn.Identity()
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        hidden = self.norm(torch.tanh(self.first(x)))
        return self.head(torch.tanh(self.hook_mid(self.second(hidden))))


class Doubled(nn.Linear):
    """Its own forward does something to what the weight gives."""

    def forward(self, x):
        return 2 * super().forward(x) + x


class Block(nn.Module):
    """Gives a tuple, as blocks of many models do."""

    def __init__(self, width):
        super().__init__()
        self.inner = Doubled(width, width)

    def forward(self, x):
        past = x.cumsum(1) / torch.arange(1, x.shape[1] + 1, device=x.device).view(1, -1, 1)
        return past, torch.tanh(self.inner(x + past))


class Sequences(nn.Module):
    """Tokens in, a tied head out: embeddings, positions, a tuple-valued block, a norm."""

    def __init__(self, width=6, vocab=11):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.position = nn.Embedding(8, width)
        self.block = Block(width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        places = torch.arange(ids.shape[1], device=ids.device).unsqueeze(0)
        hidden = self.embed(ids) + self.position(places)
        _, hidden = self.block(hidden)
        return self.head(self.norm(hidden))


def seeded(build, seed=0, dtype=torch.float64):
    """Make a model in evaluation mode with entries far from zero, without touching generators."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = build().to(dtype).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def call(model, inputs):
    """Run a model on one tensor."""
    return model(inputs)


def last(model, ids):
    """Run a model of sequences and read its last position."""
    output = model(ids)
    return getattr(output, "logits", output)[:, -1]


def find(model, site):
    return model.get_submodule(site.module)


def two_forwards(site, basis, forward, strength=1.0):
    """The loss of one pair, by a run of the source and a run of the base, with no library code."""

    def loss(model, pair):
        base, source, base_position, source_position, target = pair
        kept = {}

        def activation(output):
            return output if site.output_index is None else output[site.output_index]

        def read(_module, _args, output):
            value = activation(output)
            kept["source"] = value if source_position is None else value[:, source_position]

        def write(_module, _args, output):
            value = activation(output)
            here = value if base_position is None else value[:, base_position]
            new = here + strength * (kept["source"] - here) @ basis @ basis.T
            if base_position is not None:
                pieces = [value[:, :base_position], new.unsqueeze(1), value[:, base_position + 1 :]]
                new = torch.cat(pieces, 1)
            if site.output_index is None:
                return new
            return tuple(
                new if place == site.output_index else entry for place, entry in enumerate(output)
            )

        handle = find(model, site).register_forward_hook(read)
        forward(model, source)
        handle.remove()
        handle = find(model, site).register_forward_hook(write)
        logits = forward(model, base)
        handle.remove()
        return F.cross_entropy(logits, target, reduction="none")

    return loss


def oracle(model, site, basis, pairs, forward, strength=1.0):
    """Per-pair gradients by plain autograd. By parameter name, ``[p, *shape]``."""
    base, source, base_positions, source_positions, targets = pairs
    singles = [
        (
            base[row : row + 1],
            source[row : row + 1],
            None if base_positions is None else int(base_positions[row]),
            None if source_positions is None else int(source_positions[row]),
            targets[row : row + 1],
        )
        for row in range(len(targets))
    ]
    loss = two_forwards(site, basis, forward, strength)
    return reference.per_example_gradients(model, singles, loss)


def captured_queries(model, query, *, batch_size=3, projection=None, **choice):
    """Capture a query source as every method does. By parameter name, ``[q, *shape]``."""
    session: Session = make_session(
        model, select_layers(model, **choice), None, projection, 0, progress=False
    )
    rows = as_queries(query, model, None, 0)
    loss = query_loss_of(query, None, None, None)
    names = {id(value): name for name, value in model.named_parameters()}
    found = {}

    def sink(place, layer, gradient):
        assert gradient.num_examples == place.size
        owner = next(unit for unit in session.selection.units if unit.name == layer).owners[0]
        parts = owner.rule.to_parameters(owner.module, to_dense(gradient))
        for role, value in parts.items():
            if getattr(owner.roles, role):
                name = names[id(owner.module._parameters[role])]
                target = found.setdefault(name, value.new_zeros(len(rows), *value.shape[1:]))
                target[place.start : place.start + place.size] = value

    with warnings.catch_warnings(), session.opened(rows, loss):
        # a projection's queries pass no gradient to the layers above their site
        warnings.filterwarnings("ignore", "No gradient ever reached")
        session.capture(rows, loss, batch_size=batch_size, phase="queries", sink=sink)
    return found


def assert_close(got, expected, tolerance):
    """Compare gradients by name, every entry relative to its parameter's largest."""
    assert set(got) == {name for name, value in expected.items() if value.any()}
    for name, value in got.items():
        scale = max(float(expected[name].abs().max()), 1e-12)
        torch.testing.assert_close(
            value.double() / scale, expected[name].double() / scale, rtol=0, atol=tolerance
        )


def basis_of(width, rank=2, seed=0):
    return random_basis(width, rank, seed=seed, dtype=torch.float64)


def drawn(*shape, seed=0, high=None, dtype=torch.float64):
    """Random numbers of a private generator: normal, or integers below ``high``."""
    generator = torch.Generator().manual_seed(seed)
    if high is not None:
        return torch.randint(high, shape, generator=generator)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def principal(first, second):
    """Smallest cosine between two subspaces."""
    return float(torch.linalg.svdvals(first.double().T @ second.double()).min())
