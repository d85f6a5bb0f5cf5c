"""Tiny models, rows for them, and two ways to their per-example gradients: captured, and alone."""

import contextlib
import importlib

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from gradtrail import reference
from gradtrail.attribution.data import as_rows
from gradtrail.attribution.losses import resolve_loss
from gradtrail.attribution.setup import make_session
from gradtrail.factors import to_dense
from gradtrail.hooks import select_layers

VOCAB = 29
SIDES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 16,
}
LLAMA_SIDES = {**SIDES, "num_key_value_heads": 1}


def model_class(model, name):
    """A class of a model's modeling file, where this version of the library has it."""
    pytest.importorskip(f"transformers.models.{model}")
    return getattr(importlib.import_module(f"transformers.models.{model}.modeling_{model}"), name)


def _gpt2(t):
    return t.GPT2LMHeadModel(
        t.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=VOCAB, n_positions=16)
    )


def _opt(t):
    sides = {key: value for key, value in SIDES.items() if key != "intermediate_size"}
    return t.OPTForCausalLM(t.OPTConfig(**sides, ffn_dim=24, word_embed_proj_dim=16))


def _t5(t):
    config = t.T5Config(
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=2,
        num_heads=2,
        vocab_size=VOCAB,
        pad_token_id=0,
        decoder_start_token_id=0,
    )
    return t.T5ForConditionalGeneration(config)


def _vit(t):
    sides = {
        key: SIDES[key] for key in SIDES if key not in ("vocab_size", "max_position_embeddings")
    }
    config = t.ViTConfig(**sides, image_size=8, patch_size=4, num_labels=3)
    return t.ViTForImageClassification(config)


def _mixtral(t):
    return t.MixtralForCausalLM(t.MixtralConfig(**LLAMA_SIDES, num_local_experts=4))


MODELS = {
    "gpt2": _gpt2,
    "llama": lambda t: t.LlamaForCausalLM(t.LlamaConfig(**LLAMA_SIDES)),
    "qwen2": lambda t: t.Qwen2ForCausalLM(t.Qwen2Config(**LLAMA_SIDES)),
    "qwen3": lambda t: t.Qwen3ForCausalLM(t.Qwen3Config(**LLAMA_SIDES, head_dim=8)),
    "gemma2": lambda t: t.Gemma2ForCausalLM(t.Gemma2Config(**LLAMA_SIDES, head_dim=8)),
    "gemma3": lambda t: t.Gemma3ForCausalLM(t.Gemma3TextConfig(**LLAMA_SIDES, head_dim=8)),
    "opt": _opt,
    "bert": lambda t: t.BertForMaskedLM(t.BertConfig(**SIDES)),
    "vit": _vit,
    "t5": _t5,
    "mixtral": _mixtral,
}


def build(name, dtype=torch.float64):
    """Make one of the models, in training mode, with no entry left at a special value."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    try:
        model = MODELS[name](transformers)
    except AttributeError as error:
        if "has no attribute" not in str(error) or "transformers" not in str(error):
            raise
        pytest.skip(f"transformers {transformers.__version__} does not have this model")
    if (
        name == "mixtral"
        and dtype == torch.float64
        and hasattr(model, "set_experts_implementation")
    ):
        model.set_experts_implementation("eager")  # the default one has no float64 on the CPU
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.to(dtype).train()


class TinyForCausalLM(nn.Module):
    """A causal language model whose output does not depend on padding, on either side."""

    def __init__(self, width=8):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width, padding_idx=0)
        self.position = nn.Embedding(16, width)
        self.drop = nn.Dropout(0.3)
        self.mix = nn.Linear(width, width, bias=False)
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 12)
        self.down = nn.Linear(12, width)
        self.head = nn.Linear(width, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids, attention_mask):
        mask = attention_mask.unsqueeze(-1)
        place = (attention_mask.cumsum(1) - 1).clamp(min=0)
        hidden = self.drop(self.embed(input_ids) + self.position(place))
        past = (hidden * mask).cumsum(1) / mask.cumsum(1).clamp(min=1)
        hidden = self.norm(hidden + self.mix(past))
        hidden = hidden + self.drop(self.down(torch.tanh(self.up(hidden))))
        return {"logits": self.head(hidden)}


def tiny(dtype=torch.float64, seed=0):
    """Make the tiny language model, in training mode."""
    torch.manual_seed(seed)
    model = TinyForCausalLM().to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.5 * torch.randn_like(parameter))
    return model.train()


def pad_left(rows):
    """Collate rows of text with the padding in front."""
    longest = max(len(row["input_ids"]) for row in rows)
    fills = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    rows = [{**row, "attention_mask": torch.ones_like(row["input_ids"])} for row in rows]
    return {
        name: torch.stack(
            [F.pad(row[name], (longest - len(row[name]), 0), value=fill) for row in rows]
        )
        for name, fill in fills.items()
    }


def text_rows(lengths=(5, 3, 7, 1, 6), seed=0):
    """Rows of a causal language model."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(3, VOCAB, (length,), generator=generator) for length in lengths]
    return [{"input_ids": ids, "labels": ids.clone()} for ids in rows]


def rows_of(name, dtype=torch.float64, seed=0):
    """Five rows of different length (or images) with what the model's loss needs."""
    generator = torch.Generator().manual_seed(seed)
    if name == "vit":
        images = torch.randn(5, 3, 8, 8, generator=generator, dtype=torch.float64).to(dtype)
        return [{"pixel_values": image, "labels": row % 3} for row, image in enumerate(images)]
    rows = text_rows((5, 3, 7, 2, 6), seed)
    if name == "bert":
        for row in rows:
            row["labels"] = row["labels"].clone()
            row["labels"][1::2] = -100
    if name == "t5":
        answers = text_rows((2, 4, 1, 3, 2), seed + 1)
        rows = [
            {**row, "labels": answer["labels"]} for row, answer in zip(rows, answers, strict=True)
        ]
    return rows


class _Double(TorchDispatchMode):
    """Turns what model code casts to float32 (softmaxes, norms, angles) into float64."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.ops.aten._to_copy.default and kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


@contextlib.contextmanager
def default_dtype(dtype):
    """Let masks be made in the model's dtype (transformers 4 leaves that to the default one)."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def exactly():
    """Run model code in float64 throughout, so that padding changes no rounding."""
    with default_dtype(torch.float64), _Double():
        yield


def captured(model, data, *, loss=None, loss_reduction=None, batch_size=4, collate=None, **choice):
    """Capture every covered parameter's gradient. By name, ``[n, *shape]``, and the coverage."""
    session = make_session(model, select_layers(model, **choice), None, None, 0, progress=False)
    rows, loss = as_rows(data, "train", collate, 0), resolve_loss(loss, loss_reduction)
    names = {id(value): name for name, value in model.named_parameters()}
    found = {}

    def sink(place, layer, gradient):
        owner = next(unit for unit in session.selection.units if unit.name == layer).owners[0]
        parts = owner.rule.to_parameters(owner.module, to_dense(gradient))
        for role, value in parts.items():
            if not getattr(owner.roles, role):
                continue
            name = names[id(owner.module._parameters[role])]
            target = found.setdefault(name, value.new_zeros(len(rows), *value.shape[1:]))
            target[place.start : place.start + place.size] = value

    with session.opened(rows, loss):
        session.capture(rows, loss, batch_size=batch_size, phase="train", sink=sink)
    return found, session.selection.coverage


def alone(model, data, *, loss=None, loss_reduction=None, collate=None, names=None):
    """Differentiate every example on its own, unpadded, by plain autograd with dropout off."""
    rows, loss = as_rows(data, "train", collate, 0), resolve_loss(loss, loss_reduction)
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        singles = [rows.batch([number]) for number in range(len(rows))]
        return reference.per_example_gradients(model, singles, loss, names)
    finally:
        for module, mode in modes:
            module.training = mode


def assert_same_gradients(got, expected, tolerance):
    """Compare by name, every entry relative to the largest of its layer."""
    assert set(got) == set(expected)
    largest = max(float(value.abs().max()) for value in expected.values())
    scales = {}
    for name, value in expected.items():
        layer = name.rpartition(".")[0]
        scales[layer] = max(scales.get(layer, 1e-4 * largest), float(value.abs().max()))
    for name, value in expected.items():
        scale = scales[name.rpartition(".")[0]]
        error = float((got[name].to(value.dtype) - value).abs().max())
        assert error <= tolerance * scale, f"{name}: {error:.2e} of {scale:.2e}"
