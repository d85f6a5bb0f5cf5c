"""What a sweep over recorded steps costs, beside what nobody can avoid.

A training of 200 steps is recorded once; then reading the bytes that a method needs, forming its
products, and the method's own sweep take turns. The products are, for each step, the gradients
with the queries' vectors and back; for AdamW also the elementwise part of its recursion on one
vector triple a query, for LESS the move that Adam makes of each gradient. CPU seconds count where
other processes run.

    python benchmarks/trajectories.py --queries 16
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

BATCH = 8
METHODS = ("less", "adamw", "dvemb")


def record(folder: Path, steps: int, width: int, capture: str) -> nn.Module:
    """Train a small network and record what the methods read."""
    from gradtrail import HookManager
    from gradtrail.callbacks import OffloadCallback, OptimizerStateCallback
    from gradtrail.store import GradientStore, StepStore

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 8)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs, labels = torch.randn(steps * BATCH, width), torch.randint(0, 8, (steps * BATCH,))
    with GradientStore(folder / "gradients") as gradients, StepStore(folder / "states") as states:
        callbacks = [OffloadCallback(gradients), OptimizerStateCallback(states, moments="both")]
        manager = HookManager(model, callbacks=callbacks, loss_reduction="mean", capture=capture)
        with manager.collect(optimizer):
            for start in range(0, steps * BATCH, BATCH):
                rows = slice(start, start + BATCH)
                optimizer.zero_grad()
                F.cross_entropy(model(inputs[rows]), labels[rows]).backward()
                optimizer.step()
    return model


def read_files(folder: Path) -> None:
    """Read every shard once."""
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            file.readinto(bytearray(path.stat().st_size))


def multiply(method: str, steps: int, sizes: list[int], queries: int) -> None:
    """Form a method's products with gradients that are at hand."""
    layers = [
        (torch.randn(BATCH, size), [torch.randn(queries, size) for _ in range(3)], torch.rand(size))
        for size in sizes
    ]
    for _ in range(steps):
        for rows, (theta, first, second), factor in layers:
            if method == "less":  # what Adam makes of each gradient, its norm and its products
                scale = rows.square().mul_(0.1).add_(factor).sqrt_().add_(1e-8)
                moved = torch.lerp(factor, rows, 0.1).div_(scale)
                _ = moved @ theta.t(), moved.square().sum(1)
                continue
            theta.addmm_((rows @ theta.t()).t(), rows)
            if method == "adamw":  # three decays, three terms with a moment, and their sum
                first.addcmul_(factor, theta)
                second.addcmul_(factor, theta)
                (first * 0.1).addcmul_(factor, second)
                for state in (theta, first, second):
                    state.mul_(0.1)


def timed(function: Callable[[], Any]) -> dict[str, float]:
    """Wall and CPU seconds of a call."""
    cpu, wall = time.process_time(), time.perf_counter()
    function()
    return {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}


def measure(method: str, folder: Path, model: nn.Module, options: argparse.Namespace) -> Any:  # noqa: ANN401
    """Compare a sweep with reading and multiplying."""
    import gradtrail
    from gradtrail.store import GradientStore, StepStore

    width = options.width
    rows = [(torch.randn(width), number % 8) for number in range(options.queries)]
    queries = gradtrail.cache(
        model, rows, cache_dir=folder / f"queries-{method}", progress=False
    ).train
    sizes = [
        module.weight.numel() + module.bias.numel()
        for module in model
        if len(list(module.parameters()))
    ]

    def score() -> None:
        with (
            GradientStore(folder / "gradients", mode="read") as gradients,
            StepStore(folder / "states", mode="read") as states,
        ):
            gradtrail.attribute_from_cache(
                gradients, queries, method=method, optimizer_states=states, progress=False
            )

    def read() -> None:
        read_files(folder / "gradients")
        if method != "dvemb":  # which reads no tensors of the optimizer's
            read_files(folder / "states")

    runs: dict[str, list[dict[str, float]]] = {"read": [], "products": [], "score": []}
    for _ in range(options.repeats):
        runs["read"].append(timed(read))
        runs["products"].append(
            timed(lambda: multiply(method, options.steps, sizes, options.queries))
        )
        runs["score"].append(timed(score))
    found = {
        clock: {key: statistics.median(run[clock] for run in runs[key]) for key in runs}
        for clock in ("wall", "cpu")
    }
    ratios = {
        f"{clock}_ratio": round(took["score"] / (took["read"] + took["products"]), 3)
        for clock, took in found.items()
    }
    rounded = {
        clock: {key: round(value, 3) for key, value in took.items()}
        for clock, took in found.items()
    }
    return {"contestant": method, "capture": options.capture, **ratios, **rounded}


def main() -> None:
    """Read the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--width", type=int, default=256, help="side of the network's layers")
    parser.add_argument("--queries", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--capture", choices=("factored", "materialized"), default="materialized")
    parser.add_argument("--output", type=Path, help="write the figures to this JSON file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    results = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = record(folder, options.steps, options.width, options.capture)
        for method in METHODS:
            results.append(measure(method, folder, model, options))
            print(json.dumps(results[-1]), flush=True)
    if options.output:
        options.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
