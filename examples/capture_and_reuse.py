"""Capture a training run once, then ask it several questions without the model.

A tiny GPT-2 learns in a `Trainer` to count up by 1, 2 or 3. On the way `OffloadCallback` writes the
gradient of every row of every step into a store, and `KroneckerCovarianceCallback` lays the
curvature's covariances beside it. The gradients of held-out queries go into a second store. Then
the model is gone: GradDot, GradCos and EK-FAC score the two stores, and `search` finds the best
rows under EK-FAC by plain inner products. Each query should be traced to rows that count alike.

Run it with `python examples/capture_and_reuse.py`; it takes some seconds on a CPU. With
`--folder DIR` the stores stay: a second run reads them and trains nothing, and one after a run that
was killed on the way starts anew.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

import gradtrail
from gradtrail.callbacks import (
    GradTrailCallback,
    KroneckerCovarianceCallback,
    OffloadCallback,
)
from gradtrail.store import GradientStore

VOCABULARY, LENGTH = 24, 12
STRIDES, HELD_OUT = (1, 2, 3), 4
BATCH, ACCUMULATION = 6, 2
LAYERS = "transformer.h.*"
METHODS = ("graddot", "gradcos", "ekfac")
BEST = 8

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


def make_model() -> torch.nn.Module:
    """A GPT-2 of two narrow layers with random weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


def train_and_capture(rows: list[Row], steps: int, folder: Path) -> torch.nn.Module:
    """Train, and write the gradients of every step into `folder/train`.

    Args:
        rows: The data set.
        steps: Optimizer steps.
        folder: Where the stores lie.

    Returns:
        The trained model.
    """
    from transformers import PrinterCallback, Trainer, TrainingArguments
    from transformers.utils import logging

    logging.set_verbosity_error()
    model = make_model()
    arguments = TrainingArguments(
        str(folder / "trainer"),
        max_steps=steps,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=ACCUMULATION,
        learning_rate=3e-3,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    # what a run that was killed left is replaced
    with GradientStore(folder / "train", mode="overwrite") as store:
        capture = GradTrailCallback(
            [OffloadCallback(store), KroneckerCovarianceCallback(store)], layers=LAYERS
        )
        trainer = Trainer(model, arguments, train_dataset=rows, callbacks=[capture])
        trainer.remove_callback(PrinterCallback)
        started = time.perf_counter()
        result = trainer.train()
        seconds = time.perf_counter() - started
        print(
            f"trained {steps} steps in {seconds:.1f} s, mean loss {result.training_loss:.2f}; "
            f"{len(store):,} gradients stored, {store.nbytes / 2**20:.0f} MiB"
        )
    return model


def traced(values: Tensor, rows: list[Row], queries: list[Row]) -> float:
    """Share of the best rows of each query that count as the query does."""
    best = values.topk(BEST, dim=0).indices.t().tolist()
    hits = [
        stride_of(rows[number]) == stride_of(query)
        for query, numbers in zip(queries, best, strict=True)
        for number in numbers
    ]
    return sum(hits) / len(hits)


def by_row(scores: gradtrail.AttributionScores, rows: list[Row]) -> Tensor:
    """Add up what a row did in all its steps. Ids are content hashes, so rows are hashed."""
    number_of = {gradtrail.example_id(row): number for number, row in enumerate(rows)}
    numbers = torch.tensor([number_of[name] for name in scores.train_ids])
    totals = torch.zeros(len(rows), scores.values.shape[1])
    return totals.index_add_(0, numbers, scores.values)


def score(folder: Path, rows: list[Row], queries: list[Row]) -> None:
    """Score the stores with three methods, then search them. No model is needed.

    Args:
        folder: Where the stores lie.
        rows: The training data, to name what was found.
        queries: The queries.
    """
    with (
        GradientStore(folder / "train", mode="read") as train,
        GradientStore(folder / "queries" / "train", mode="read") as query,
    ):
        train.verify()
        print(f"\n{'method':<10} {'best rows that count alike':>27} {'seconds':>8}")
        for method in METHODS:
            started = time.perf_counter()
            scores = gradtrail.attribute_from_cache(train, query, method=method, progress=False)
            seconds = time.perf_counter() - started
            share = traced(by_row(scores, rows), rows, queries)
            print(f"{method:<10} {share:>27.0%} {seconds:>8.2f}")
        print(f"{'by chance':<10} {1 / len(STRIDES):>27.0%}")
        with GradientStore(residency="memory") as ready:
            gradtrail.cache_preconditioned_query(
                train, query, ready, method="ekfac", progress=False
            )
            found = gradtrail.search(train, ready, k=1, progress=False)
        steps = train.steps
    name_of = {gradtrail.example_id(row): row["input_ids"].tolist() for row in rows}
    print("\nThe single step that helped a query most, under EK-FAC:")
    for number in range(0, len(queries), HELD_OUT):
        (place,), (name,) = found.indices[number].tolist(), found.ids[number]
        asked = " ".join(f"{token:>2}" for token in queries[number]["input_ids"][:6].tolist())
        taught = " ".join(f"{token:>2}" for token in name_of[name][:6])
        print(f"  {asked} ...  <-  step {steps[place]:>3}: {taught} ...")


def run(folder: Path, steps: int) -> None:
    """Fill the stores where that was never done to the end, then score them."""
    rows, queries = make_rows()
    whole = folder / "captured"
    if not whole.exists():
        model = train_and_capture(rows, steps, folder)
        shutil.rmtree(folder / "queries", ignore_errors=True)  # perhaps of another model
        gradtrail.cache(model, queries, cache_dir=folder / "queries", layers=LAYERS, progress=False)
        del model
        whole.touch()
    score(folder, rows, queries)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the example.

    Args:
        argv: Command-line arguments; None reads the process's own.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps (%(default)s)")
    parser.add_argument("--folder", type=Path, help="where the stores stay; None: they go")
    options = parser.parse_args(argv)
    if options.steps < 1:
        parser.error(f"--steps must be at least 1, got {options.steps}.")
    if options.folder is not None:
        run(options.folder, options.steps)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        run(Path(folder), options.steps)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
