"""Attribute with many processes: each scores its share of the rows, all of them have the result.

A tiny GPT-2 learns to count up by 1, 2 or 3. Then every process makes the same calls: EK-FAC on the
live model, and a store that all write and all read. Process 0 prints which rows taught each query,
and what every process did. Each query should be traced to rows that count alike.

    torchrun --nproc-per-node 2 examples/multi_process.py --wrap fully_shard

Without torchrun it is one process. Scores are the same either way, and with every `--wrap`: the
plain model, DDP, FSDP, or `fully_shard`. It takes some seconds on CPUs, and runs on GPUs where each
process has one.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, distributed, nn

import gradtrail
from gradtrail.distributed import broadcast_json, is_main, shard_of, world_size

VOCABULARY, LENGTH = 24, 12
STRIDES, HELD_OUT = (1, 2, 3), 4
LAYERS = "transformer.h.*"
BEST = 8
WRAPS = ("plain", "ddp", "fsdp", "fully_shard")

Row = dict[str, Tensor]


def make_rows() -> tuple[list[Row], list[Row]]:
    """Every start counting up by every stride; the last starts of each stride are the queries."""
    train, query = [], []
    for stride in STRIDES:
        for start in range(VOCABULARY):
            row = (start + stride * torch.arange(LENGTH)) % VOCABULARY
            side = train if start < VOCABULARY - HELD_OUT else query
            side.append({"input_ids": row, "labels": row.clone()})
    return train, query


def stride_of(row: Row) -> int:
    """By how much a row counts up."""
    first, second = row["input_ids"][:2].tolist()
    return (second - first) % VOCABULARY


def trained_model(rows: list[Row], steps: int, device: torch.device) -> nn.Module:
    """Train a GPT-2 of two narrow layers; every process does the same and has the same weights.

    Args:
        rows: The data set, one batch a step.
        steps: Optimizer steps.
        device: Where the model goes.

    Returns:
        The model.
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=32,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config).to(device)
    batch = {name: torch.stack([row[name] for row in rows]).to(device) for name in rows[0]}
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if world_size() > 1:  # devices may round differently: all take the first one's weights
        for tensor in (*model.parameters(), *model.buffers()):
            distributed.broadcast(tensor.detach(), 0)
    return model


def wrapped(model: nn.Module, how: str, device: torch.device) -> nn.Module:
    """Wrap a model as it is wrapped for training.

    Args:
        model: The model, the same on every process.
        how: One of `WRAPS`.
        device: Where it is.

    Returns:
        What is attributed.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.nn.parallel import DistributedDataParallel

    if how == "plain" or world_size() == 1:
        return model
    if how == "ddp":
        return DistributedDataParallel(model)
    mesh = init_device_mesh(device.type, (world_size(),))
    if how == "fsdp":
        return FullyShardedDataParallel(
            model, device_mesh=mesh, device_id=device, use_orig_params=True
        )
    for block in model.transformer.h:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


@contextmanager
def processes() -> Iterator[torch.device]:
    """Join the processes that torchrun has started, if it has.

    Yields:
        The device of this one.
    """
    local = int(os.environ.get("LOCAL_RANK", "0"))
    on_gpus = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device = torch.device("cuda", local) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    if "RANK" not in os.environ:
        yield device
        return
    distributed.init_process_group("nccl" if on_gpus else "gloo")
    try:
        yield device
    finally:
        distributed.destroy_process_group()


def traced(best: list[list[int]], rows: list[Row], queries: list[Row]) -> float:
    """Share of the best rows of each query that count as the query does."""
    hits = [
        stride_of(rows[number]) == stride_of(query)
        for query, numbers in zip(queries, best, strict=True)
        for number in numbers
    ]
    return sum(hits) / len(hits)


def run(model: nn.Module, rows: list[Row], queries: list[Row], folder: Path) -> None:
    """Make the calls, the same ones in every process.

    Args:
        model: The model, wrapped or not.
        rows: The training data.
        queries: The queries.
        folder: Where the store goes, the same place for all.
    """
    options = {"method": "ekfac", "layers": LAYERS, "progress": False}
    live = gradtrail.attribute(model, rows, queries, **options)
    train, query = gradtrail.cache(model, rows, queries, cache_dir=folder, **options)
    stored = gradtrail.attribute_from_cache(
        train, query, method="ekfac", top_k=BEST, progress=False
    )
    if not is_main():
        return
    ways = {"live": live.topk(BEST).indices, "from the store": stored.indices}
    for way, best in ways.items():
        share = traced(best.tolist(), rows, queries)
        print(f"{way:<15} {share:>4.0%} of the best rows count as their query does")
    print(f"{'by chance':<15} {1 / len(STRIDES):>4.0%}")
    for place in range(world_size()):
        share = shard_of(len(rows), place, world_size())
        print(f"process {place} scored rows {share.start} to {share.stop - 1}")
    print(f"checksum of all scores: {live.values.double().abs().sum():.2f}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the example.

    Args:
        argv: Command-line arguments; None reads the process's own.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps (%(default)s)")
    parser.add_argument("--wrap", choices=WRAPS, default="plain", help="(%(default)s)")
    options = parser.parse_args(argv)
    if options.steps < 1:
        parser.error(f"--steps must be at least 1, got {options.steps}.")
    rows, queries = make_rows()
    with processes() as device, tempfile.TemporaryDirectory() as own:
        folder = Path(broadcast_json(own)) / "cache"  # of process 0, on a disk that all see
        model = wrapped(trained_model(rows, options.steps, device), options.wrap, device)
        run(model, rows, queries, folder)
        if world_size() > 1:
            distributed.barrier()  # the folder goes with process 0
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
