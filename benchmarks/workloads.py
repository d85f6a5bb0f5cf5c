"""The models and data of the benchmark, the same for every contestant."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

BLOCKS = {"gpt2": "transformer.h.*", "llama": "model.layers.*"}


@dataclass(frozen=True)
class Workload:
    """One benchmark problem.

    Attributes:
        model: ``"gpt2"`` or ``"llama"``.
        tokens: Positions an example.
        num_train: Training examples.
        num_query: Queries.
        batch_size: Examples a batch.
    """

    model: str
    tokens: int = 128
    num_train: int = 256
    num_query: int = 16
    batch_size: int = 8


def build(workload: Workload) -> nn.Module:
    """Make the model with seeded weights: 4 layers, width 256, vocabulary 1,000, float32."""
    torch.manual_seed(0)
    if workload.model == "gpt2":
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(
            n_layer=4, n_embd=256, n_head=4, vocab_size=1000, bos_token_id=0, eos_token_id=0
        )
        return GPT2LMHeadModel(config).eval()
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=4,
        hidden_size=256,
        intermediate_size=688,
        num_attention_heads=4,
        vocab_size=1000,
        bos_token_id=0,
        eos_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def rows(count: int, tokens: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Random token rows whose labels are themselves."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 1000, (count, tokens), generator=generator)
    return [{"input_ids": row, "labels": row} for row in ids]


def block_linears(model: nn.Module, kind: str) -> list[str]:
    """Names of the linear layers inside the blocks."""
    prefix = BLOCKS[kind].rstrip("*")
    return [
        name
        for name, module in model.named_modules()
        if name.startswith(prefix) and type(module).__name__ in ("Linear", "Conv1D")
    ]
