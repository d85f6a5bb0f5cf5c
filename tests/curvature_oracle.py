"""The dense oracle of the curvature methods: one example at a time, float64, ``torch.kron``.

Written from the formulas alone. Per layer and example it holds every position's input (a 1 joined
where there is a bias) and output gradient, from hooks of its own on a run of that example alone.

Suffixes: n example, s position, g group, o output, j input with the constant of the bias.
"""

from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn import functional as F

from gradtrail.attribution.data import as_rows
from gradtrail.attribution.losses import resolve_loss

F64 = torch.float64


@dataclass
class Layer:
    """One layer: lists over examples of ``[s, g, j]`` inputs and ``[s, g, o]`` gradients.

    ``reads`` says which layers read the same input, by the name of the first of them.
    """

    inputs: list = field(default_factory=list)
    gradients: list = field(default_factory=list)
    reads: str = ""

    def matrices(self):
        """Per-example gradients ``[n, g, o, j]``."""
        pairs = zip(self.gradients, self.inputs, strict=True)
        return torch.stack([torch.einsum("sgo,sgj->goj", g, a) for g, a in pairs])

    def rows(self):
        """The same, one row an example."""
        return self.matrices().flatten(1)


def observe(model, data, owners, *, loss=None, loss_reduction=None, collate=None):
    """Run every example alone and note what each layer reads and receives.

    ``owners`` maps a layer's name to the names of the modules that own its weight. Dropout is off.
    """
    rows, loss = as_rows(data, "train", collate, 0), resolve_loss(loss, loss_reduction)
    modules = dict(model.named_modules())
    names = [name for group in owners.values() for name in group]
    layers = {name: Layer() for name in owners}
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        for number in range(len(rows)):
            calls = _calls(model, rows.batch([number]), loss, {n: modules[n] for n in names})
            _note(layers, owners, modules, calls)
    finally:
        for module, mode in modes:
            module.training = mode
    return layers


def _calls(model, batch, loss, modules):
    """Inputs, output gradients and identity of the input, by module, of every call."""
    found = {name: [] for name in modules}

    def hook(name):
        def note(_module, args, output):
            found[name].append((args[0], output))

        return note

    handles = [module.register_forward_hook(hook(name)) for name, module in modules.items()]
    try:
        value = loss(model, batch).sum()
    finally:
        for handle in handles:
            handle.remove()
    outputs = [output for calls in found.values() for _, output in calls]
    grads = iter(torch.autograd.grad(value, outputs, allow_unused=True) if outputs else ())
    calls = {}
    for name, entries in found.items():
        calls[name] = []
        for read, output in entries:
            grad = next(grads)
            grad = torch.zeros_like(output) if grad is None else grad
            calls[name].append((read.detach(), grad.detach(), id(read), read))
    return calls


def _note(layers, owners, modules, calls):
    keys = {}
    for name, group in owners.items():
        uses = [(modules[owner], call) for owner in group for call in calls[owner]]
        parts = [positions(module, a, g) for module, (a, g, _, _) in uses]
        layers[name].inputs.append(torch.cat([a for a, _ in parts]))
        layers[name].gradients.append(torch.cat([g for _, g in parts]))
        key = (*(call[2] for _, call in uses), _has_bias(uses[0][0]))
        layers[name].reads = keys.setdefault(key, name)


def _has_bias(module):
    return getattr(module, "bias", None) is not None


def positions(module, a, g):
    """A layer's input and output gradient as ``[s, g, j]`` and ``[s, g, o]``, one example."""
    groups = getattr(module, "groups", 1)
    if isinstance(module, (nn.Conv1d, nn.Conv2d)):
        if isinstance(module, nn.Conv1d):
            a, g = a.unsqueeze(2), g.unsqueeze(2)
        options = [
            (0, *value)
            if isinstance(module, nn.Conv1d) and what == "padding"
            else (1, *value)
            if isinstance(module, nn.Conv1d)
            else value
            for what, value in (
                ("kernel", module.kernel_size),
                ("dilation", module.dilation),
                ("padding", module.padding),
                ("stride", module.stride),
            )
        ]
        a = F.unfold(a, *options)[0].t()
        g = g[0].flatten(1).t()
    else:
        a, g = a.reshape(-1, a.shape[-1]), g.reshape(-1, g.shape[-1])
    a = a.double().unflatten(1, (groups, -1))
    g = g.double().unflatten(1, (groups, -1))
    if _has_bias(module):
        a = torch.cat([a, a.new_ones(*a.shape[:2], 1)], 2)
    return a, g


# ---------------------------------------------------------------- curvature of one layer


def weights(layers, name):
    """Where any layer with this input has a gradient that is not exactly zero, by example."""
    same = [layer for layer in layers.values() if layer.reads == layers[name].reads]
    count = len(layers[name].inputs)
    return [
        torch.stack([(one.gradients[n] != 0).flatten(1).any(1) for one in same]).any(0)
        for n in range(count)
    ]


def covariances(layers, name):
    """``A`` ``[g, j, j]`` and ``S`` ``[g, o, o]`` as the conventions define them, and ``P``."""
    layer = layers[name]
    keep = torch.cat(weights(layers, name)).double()
    a, g = torch.cat(layer.inputs), torch.cat(layer.gradients)
    total = keep.sum()
    cov_a = torch.einsum("s,sgi,sgj->gij", keep, a, a) / total.clamp(min=1)
    cov_s = torch.einsum("s,sgo,sgp->gop", keep, g, g) / len(layer.inputs)
    return cov_a, cov_s, int(total)


def damped(spectrum_mean, damping, relative):
    return damping * spectrum_mean if relative else damping


def pseudo_inverse(matrix):
    """Inverse of what is above rounding."""
    return torch.linalg.pinv(matrix, rtol=1e-11, hermitian=True)


def bases(layers, name):
    """``Q_S kron Q_A`` over all groups, block-diagonal ``[d, d]``."""
    cov_a, cov_s, _ = covariances(layers, name)
    return torch.block_diag(
        *(
            torch.kron(torch.linalg.eigh(s)[1], torch.linalg.eigh(a)[1])
            for a, s in zip(cov_a, cov_s, strict=True)
        )
    )


def corrected(layers, name):
    """Corrected eigenvalues ``[d]`` in ``bases``."""
    turned = layers[name].rows() @ bases(layers, name)
    return turned.square().mean(0)


def inverse(layers, name, method, damping=0.1, *, relative=True):
    """The damped inverse ``[d, d]`` of one layer."""
    if method == "ekfac":
        basis, values = bases(layers, name), corrected(layers, name)
        extra = damped(values.mean(), damping, relative)
        floor = values.max() * 1e-11 if damping == 0 else 0
        inverted = torch.where(values + extra > floor, 1 / (values + extra), 0)
        return basis @ torch.diag(inverted) @ basis.t()
    cov_a, cov_s, _ = covariances(layers, name)
    sides = []
    for cov in (cov_s, cov_a):
        mean = cov.diagonal(dim1=1, dim2=2).mean()
        extra = damped(mean, damping, relative)
        eye = torch.eye(cov.shape[1], dtype=F64)
        sides.append([pseudo_inverse(one + extra * eye) for one in cov])
    return torch.block_diag(*(torch.kron(s, a) for s, a in zip(*sides, strict=True)))


def dense_inverse(rows, damping=0.1, *, relative=True):
    """Damped inverse of the whole empirical Fisher of rows ``[n, d]``."""
    fisher = rows.t() @ rows / len(rows)
    extra = damped(fisher.diagonal().mean(), damping, relative)
    return pseudo_inverse(fisher + extra * torch.eye(len(fisher), dtype=F64))


def diagonal_inverse(rows, damping=0.1, *, relative=True):
    squares = rows.square().mean(0)
    return torch.diag(1 / (squares + damped(squares.mean(), damping, relative)))


def scores(train, query, method, damping=0.1, *, relative=True):
    """Scores ``[n, q]``, summed over layers."""
    total = 0
    for name in train:
        solve = inverse(train, name, method, damping, relative=relative)
        total = total + train[name].rows() @ solve @ query[name].rows().t()
    return total


def norms(layers):
    """Norms over all layers together ``[n]``."""
    return torch.cat([layer.rows() for layer in layers.values()], 1).norm(dim=1)


def shares(train, query, method, damping=0.1):
    """Per position: a list over examples of ``[s, q]``."""
    found = None
    for name, layer in train.items():
        solved = query[name].rows() @ inverse(train, name, method, damping)
        groups, o = layer.gradients[0].shape[1:]
        solved = solved.unflatten(1, (groups, o, -1))
        parts = [
            torch.einsum("sgo,qgoj,sgj->sq", g, solved, a)
            for g, a in zip(layer.gradients, layer.inputs, strict=True)
        ]
        found = parts if found is None else [x + y for x, y in zip(found, parts, strict=True)]
    return found
