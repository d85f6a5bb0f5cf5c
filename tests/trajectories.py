"""Small training runs whose every optimizer step is known, and the same run with another weight."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.func import functional_call

from gradtrail import HookManager, reference
from gradtrail.attribution.cached import cache
from gradtrail.callbacks import OffloadCallback, OptimizerStateCallback
from gradtrail.store import GradientStore, StepStore


class Additive(nn.Module):
    """Two linear layers that add up to a positive number, the likelihood of the row.

    The loss is the number's negative logarithm. Being linear in the parameters, the number gives
    it a Hessian that is exactly the outer product of its gradient: there, the Gauss-Newton product
    of per-example gradients is no approximation.
    """

    def __init__(self):
        super().__init__()
        self.left = nn.Linear(3, 1)
        self.right = nn.Linear(2, 1)

    def forward(self, rows):
        return self.left(rows[:, :3]) + self.right(rows[:, 3:])


def additive(seed=0):
    torch.manual_seed(seed)
    model = Additive().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(0.5, 1.5)
    return model


def surprise(model, rows):
    """The loss of the additive model, one value a row."""
    return -model(rows).squeeze(1).log()


def positive_rows(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, 5, generator=generator, dtype=torch.float64) + 0.2


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def squared(model, rows):
    """A loss that is not quadratic in the parameters of a network."""
    target = rows.sum(1).sin()
    return (model(rows).squeeze(1) - target).square()


@dataclass
class Record:
    """One step of a run.

    Attributes:
        batch: Numbers of the rows it used.
        shares: What of each row's loss was in the loss.
        parameters: The model before it.
        before: The optimizer's state by parameter before it, empty before the first.
        after: The state after it.
        options: The optimizer's options by parameter.
    """

    batch: list
    shares: torch.Tensor
    parameters: dict
    before: dict
    after: dict
    options: dict


def options_of(model, optimizer):
    names = {id(value): name for name, value in model.named_parameters()}
    return {
        names[id(parameter)]: {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


def groups(model, decay=0.1, lr=0.01):
    """Weights decay and are slow, biases neither."""
    named = dict(model.named_parameters())
    weights = [value for name, value in named.items() if name.endswith("weight")]
    biases = [value for name, value in named.items() if name.endswith("bias")]
    return [
        {"params": weights, "weight_decay": decay, "lr": lr},
        {"params": biases, "weight_decay": 0.0, "lr": 2 * lr},
    ]


def states_of(model, optimizer):
    return {
        name: {key: value.clone() for key, value in optimizer.state[parameter].items()}
        for name, parameter in model.named_parameters()
        if parameter in optimizer.state
    }


def run(
    model, loss, rows, optimizer, *, steps=20, batch_size=4, mean=True, weight=None, prepare=None
):
    """Train on the rows in turn, one row's loss weighted otherwise in one step, and record it."""
    records = []
    for step in range(steps):
        if prepare is not None:
            prepare(model, step)
        batch = [(step * batch_size + place) % len(rows) for place in range(batch_size)]
        shares = torch.full((batch_size,), 1 / batch_size if mean else 1.0, dtype=torch.float64)
        parameters = {name: value.detach().clone() for name, value in model.named_parameters()}
        before, options = states_of(model, optimizer), options_of(model, optimizer)
        scaled = shares.clone()
        if weight is not None and weight[0] == step:
            scaled[weight[1]] *= 1 + weight[2]
        optimizer.zero_grad()
        (scaled * loss(model, rows[batch])).sum().backward()
        optimizer.step()
        for entry in optimizer.param_groups:  # a rate of its own in every step
            entry["lr"] *= 0.97
        records.append(
            Record(batch, shares, parameters, before, states_of(model, optimizer), options)
        )
    return records


def gradients_at(model, parameters, rows, loss):
    """Every row's own gradient at given parameters, by autograd. By parameter, ``[b, d]``."""
    own = {name: value.detach().clone() for name, value in model.state_dict().items()}
    model.load_state_dict(parameters, strict=False)
    singles = [row.unsqueeze(0) for row in rows]
    found = reference.per_example_gradients(model, singles, loss, list(parameters))
    model.load_state_dict(own)
    return {name: values.flatten(1) for name, values in found.items()}


def exact_hessian(model, parameters, rows, shares, loss):
    """Second derivatives of a step's loss, ``[D, D]``, parameters in the model's order."""
    names = list(parameters)

    def total(*values):
        named = dict(zip(names, values, strict=True))

        def call(rows):
            return functional_call(model, named, (rows,))

        return (shares * loss(call, rows)).sum()

    blocks = torch.autograd.functional.hessian(total, tuple(parameters.values()))
    sizes = [value.numel() for value in parameters.values()]
    lines = [
        torch.cat([block.reshape(size, other) for block, other in zip(line, sizes, strict=True)], 1)
        for line, size in zip(blocks, sizes, strict=True)
    ]
    return torch.cat(lines)


def retrained(make, loss, rows, query, optimizer_of, *, at, epsilon=1e-4, **options):
    """What a larger weight of one row in one step takes off each query's loss, by retraining.

    ``at`` is the step and the place in its batch. Shape ``[q]``.
    """
    ends = []
    for sign in (1, -1):
        model = make()
        run(model, loss, rows, optimizer_of(model), weight=(*at, sign * epsilon), **options)
        with torch.no_grad():
            ends.append(loss(model, query))
    return -(ends[0] - ends[1]) / (2 * epsilon)


def recorded(make, loss, rows, optimizer_of, *, steps=20, batch_size=4, moments="both", **options):
    """Train as ``run`` does, with what a trajectory method reads recorded: model and stores."""
    accumulation = options.pop("accumulation", 1)
    clip, prepare = options.pop("clip", None), options.pop("prepare", None)
    model = make()
    optimizer = optimizer_of(model)
    gradients = GradientStore(residency="memory", dtype=options.pop("dtype", None))
    states = StepStore(residency="memory")
    every = options.pop("every", 1)
    callbacks = [
        OffloadCallback(gradients, every=every),
        OptimizerStateCallback(states, moments=moments, every=every),
        *options.pop("more", ()),
    ]
    reduction = "mean" if options.pop("mean", True) else "sum"
    scale = 1 / accumulation if reduction == "mean" else 1.0
    if options.pop("moves", False):  # the optimizer's moves in place of gradients
        options["optimizer"] = optimizer
    manager = HookManager(
        model, callbacks=callbacks, loss_reduction=reduction, loss_scale=scale, **options
    )
    with manager.collect(optimizer):
        for step in range(steps):
            if prepare is not None:
                prepare(model, step)
            batch = [(step * batch_size + place) % len(rows) for place in range(batch_size)]
            optimizer.zero_grad()
            size = batch_size // accumulation
            for part in range(0, batch_size, size):
                values = loss(model, rows[batch[part : part + size]])
                total = values.mean() / accumulation if reduction == "mean" else values.sum()
                total.backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            for entry in optimizer.param_groups:
                entry["lr"] *= 0.97
    return model, gradients, states


def stored_queries(model, loss, rows, **options):
    """The queries' gradients at the end, stored."""
    pairs = [(row, 0) for row in rows]
    folder = options.pop("folder")
    cached = cache(
        model, pairs, cache_dir=folder, loss=lambda m, batch: loss(m, batch[0]), progress=False,
        **options,
    )  # fmt: skip
    return cached.train
