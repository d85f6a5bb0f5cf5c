"""The cost rule: which form is chosen, and that either gives the same scores."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import gradtrail
from gradtrail.attribution import queries
from gradtrail.attribution.memory import large_zeros
from gradtrail.factors import DenseGradient, LinearFactors, prefers_dense
from gradtrail.hooks.fused import _RMSNorm


def factors(s, i, o, b=8):
    return LinearFactors(torch.zeros(b, s, i), torch.zeros(b, s, o))


@pytest.mark.parametrize(
    ("s", "i", "o", "num_query", "written"),
    [
        (128, 256, 1024, 16, True),  # long sequences: writing out is cheaper by far
        (1, 784, 128, 200, False),  # one position: two inner products instead of a matrix
        (32, 256, 1024, 16, False),  # short sequences: reading the queries again would decide
        (32, 256, 256, 16, True),
    ],
)
def test_rule_counts_products_and_memory(s, i, o, num_query, written):
    assert prefers_dense(factors(s, i, o), num_train=256, num_query=num_query) is written


def test_written_out_gradients_stay_written_out():
    assert prefers_dense(DenseGradient(torch.zeros(2, 6), (2, 3)), num_train=1, num_query=1)


def _scores(monkeypatch, written):
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=2, n_embd=32, n_head=2, vocab_size=50, bos_token_id=0, eos_token_id=0
    )
    model = GPT2LMHeadModel(config).double()
    rows = [{"input_ids": (ids := torch.randint(0, 50, (s,))), "labels": ids} for s in range(3, 12)]
    if written is not None:
        monkeypatch.setattr(queries, "prefers_dense", lambda *_, **__: written)
    return gradtrail.attribute(model, rows, rows[:4], progress=False, batch_size=4).values


def test_every_form_gives_the_same_scores(monkeypatch):
    chosen = _scores(monkeypatch, None)
    for written in (True, False):
        torch.testing.assert_close(_scores(monkeypatch, written), chosen, rtol=1e-6, atol=1e-4)


def test_queries_beyond_the_budget_stay_factored(monkeypatch):
    chosen = _scores(monkeypatch, None)
    monkeypatch.setattr("gradtrail.attribution.inner_product.query_budget", lambda _: 0)
    torch.testing.assert_close(_scores(monkeypatch, True), chosen, rtol=1e-6, atol=1e-4)


def test_large_zeros_are_zero_and_of_the_asked_kind():
    for shape in ((3, 5), (3, 1 << 21)):
        got = large_zeros(shape, like=torch.ones(1, dtype=torch.float64))
        assert got.shape == shape
        assert got.dtype == torch.float64
        assert not got.any()
        got += 1


def test_fused_norm_equals_the_spelt_out_one():
    torch.manual_seed(0)
    x = torch.randn(3, 4, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, dtype=torch.float64, requires_grad=True)
    expected = weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))
    got = _RMSNorm.apply(x, weight, 1e-6)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    direction = torch.randn_like(expected)
    theirs = torch.autograd.grad(expected, (x, weight), direction)
    ours = torch.autograd.grad(got, (x, weight), direction)
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


def test_fused_modules_are_put_back():
    config = GPT2Config(
        n_layer=1, n_embd=16, n_head=2, vocab_size=20, bos_token_id=0, eos_token_id=0
    )
    model = GPT2LMHeadModel(config)
    rows = [{"input_ids": torch.arange(5), "labels": torch.arange(5)}]
    seen = []

    def loss(model, batch):
        seen.append("forward" in vars(model.transformer.h[0].mlp.act))
        logits = model(input_ids=batch["input_ids"]).logits
        return logits.square().sum((1, 2))

    gradtrail.attribute(model, rows, rows, loss=loss, progress=False)
    assert all(seen)
    assert not any("forward" in vars(module) for module in model.modules())
