"""What the tests of captures share: tiny models, and captured gradients next to autograd's."""

import copy

import pytest
import torch
from torch import nn

from gradtrail import GradTrailWarning, HookManager, attribute, reference
from gradtrail.attribution.data import Rows
from gradtrail.attribution.losses import resolve_loss
from gradtrail.attribution.setup import make_session
from gradtrail.factors import to_dense
from gradtrail.hooks import batch_length, select_layers, take_rows

__all__ = [
    "GradTrailWarning",
    "assert_live",
    "assert_training",
    "by_parameter",
    "close",
    "covered",
    "language_batch",
    "live_gradients",
    "oracle",
    "pair",
    "tiny_gpt2",
    "tiny_llama",
    "train_step",
]

F64 = torch.float64


def pair(b=4, *sizes, out=3, seed=0):
    """Inputs ``[b, *sizes]`` and targets ``[b, *sizes[:-1], out]`` in float64."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(b, *sizes, generator=generator, dtype=F64)
    return inputs, torch.randn(b, *sizes[:-1], out, generator=generator, dtype=F64)


def covered(selection, layers=None):
    """Names of the parameters of captured layers."""
    entries = selection.coverage.with_status("covered")
    return [entry.name for entry in entries if layers is None or entry.layer in layers]


def oracle(model, batch, loss=None, names=None):
    """Per-example gradients by autograd, every example alone, of a copy without checkpointing."""
    loss = resolve_loss(loss, None)
    model = copy.deepcopy(model)
    for module in model.modules():
        if "reentrant" in vars(module):
            module.reentrant = None
    singles = [take_rows(batch, [row]) for row in range(batch_length(batch))]
    return reference.per_example_gradients(model, singles, loss, names)


def by_parameter(model, units, layers):
    """Captured layer gradients by parameter name."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = {}
    for unit in units:
        if unit.name in layers:
            owner = unit.owners[0]
            parts = owner.rule.to_parameters(owner.module, to_dense(layers[unit.name]))
            for role, value in parts.items():
                found[names[id(owner.module._parameters[role])]] = value
    return found


def live_gradients(model, batch, loss=None, **choice):
    """Gradients of a live pass by parameter name, zero where nothing came, and the session."""
    selection = select_layers(model, **choice)
    session = make_session(model, selection, None, None, 0, progress=False)
    loss = resolve_loss(loss, None)
    count = batch_length(batch)
    rows = Rows(range(count), lambda numbers: take_rows(batch, numbers))
    layers = {}
    with session.opened(rows, loss):
        session.capture(
            rows,
            loss,
            batch_size=count,
            phase="test",
            sink=lambda _place, name, gradient: layers.update({name: gradient}),
        )
    found = by_parameter(model, session.selection.units, layers)
    shapes = dict(model.named_parameters())
    for name in covered(session.selection):
        found.setdefault(name, torch.zeros(count, *shapes[name].shape, dtype=F64))
    return found, session


def close(actual, expected, *, rtol=1e-10, atol=1e-11):
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol, check_dtype=False)


def assert_live(model, batch, loss=None, *, rows=None, only=None, rtol=1e-10, **choice):
    """A live pass equals autograd: layer by layer, and as scores of ``attribute``."""
    mode = {name: module.training for name, module in model.named_modules()}
    state = torch.get_rng_state()
    got, session = live_gradients(model, batch, loss, **choice)
    assert {name: module.training for name, module in model.named_modules()} == mode
    assert torch.equal(torch.get_rng_state(), state)
    twin = copy.deepcopy(model).eval()
    expected = oracle(twin, batch, loss, sorted(got))
    if only is not None:
        assert set(got) == set(only)
    assert got
    atol = 1e-11 if rtol < 1e-8 else rtol
    close(got, expected, rtol=rtol, atol=atol)
    rows = rows or [take_one(batch, row) for row in range(batch_length(batch))]
    for batch_size in (1, len(rows)):
        scores = attribute(
            model, rows, rows, loss=loss, batch_size=batch_size, progress=False, **choice
        )
        wanted = reference.dot_products(expected, expected)
        scale = float(wanted.abs().max())
        close(scores.values.double(), wanted, rtol=1e-5, atol=1e-6 * scale)
    return session


def take_one(batch, row):
    """One row of a batch of pairs or fields, without its batch axis."""
    if isinstance(batch, dict):
        return {name: value[row] for name, value in batch.items()}
    if isinstance(batch, torch.Tensor):
        return batch[row]
    return tuple(value[row] for value in batch)


def train_step(model, batch, loss=None):
    """Loss of every example, summed; the model as it is."""
    return resolve_loss(loss, None)(model, batch).sum()


def assert_training(model, batch, loss=None, *, only=None, rtol=1e-10, **options):
    """A training capture equals autograd, and leaves loss, gradients and random state equal."""
    bare = copy.deepcopy(model)
    torch.manual_seed(1)
    bare_loss = train_step(bare, batch, loss)
    bare_loss.backward()
    bare_state = torch.get_rng_state()
    manager = HookManager(model, **options)
    torch.manual_seed(1)
    with manager.collect():
        value = train_step(model, batch, loss)
        value.backward()
    assert torch.equal(torch.get_rng_state(), bare_state)
    assert torch.equal(value, bare_loss)
    for (name, mine), theirs in zip(model.named_parameters(), bare.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), name
        assert mine.grad is None or torch.equal(mine.grad, theirs.grad), name
    assert manager.steps == 1
    got = by_parameter(model, manager._selection.units, manager.last.layers)
    if only is not None:
        assert set(got) == set(only)
    assert got
    expected = oracle(model, batch, loss, sorted(got))
    close(got, expected, rtol=rtol)
    return manager


def tiny_gpt2(seed=0, **options):
    """A GPT-2 of two narrow layers in float64."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(seed)
    config = transformers.GPT2Config(
        vocab_size=17,
        n_positions=16,
        n_embd=8,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation="eager",
        **options,
    )
    return transformers.GPT2LMHeadModel(config).double()


def tiny_llama(seed=0, **options):
    """A Llama of two narrow layers in float64."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=17,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation="eager",
        **options,
    )
    return transformers.LlamaForCausalLM(config).double()


def language_batch(lengths=(6, 4, 5, 1), vocabulary=17, *, left=False, seed=0):
    """Padded token rows with labels and a mask."""
    generator = torch.Generator().manual_seed(seed)
    longest = max(lengths)
    ids = torch.zeros(len(lengths), longest, dtype=torch.long)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for row, length in enumerate(lengths):
        place = slice(longest - length, longest) if left else slice(0, length)
        ids[row, place] = torch.randint(1, vocabulary, (length,), generator=generator)
        mask[row, place] = 1
        labels[row, place] = ids[row, place]
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def mlp(*sizes, seed=0, **options):
    """Linears with tanh between them, in float64."""
    torch.manual_seed(seed)
    layers = []
    for left, right in zip(sizes[:-1], sizes[1:], strict=True):
        layers += [nn.Linear(left, right, dtype=F64, **options), nn.Tanh()]
    return nn.Sequential(*layers[:-1])
