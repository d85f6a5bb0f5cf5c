"""Which rows does a model keep struggling with? Per-example gradients from inside a `Trainer`.

A tiny GPT-2 learns sequences that count up by 1, 2 or 3. A few rows are scrambled, as broken rows
of a real data set would be. `GradTrailCallback` rides along: after every optimizer step it hands
over the gradients of the rows that the step was made of, compressed to 8 by 8 numbers a layer.
Counting is easy to learn and noise is not, so the scrambled rows are those whose gradients stay
large: the script ranks all rows by that and says how many of the scrambled ones come out on top.

Run it with `python examples/trainer_callback.py`; it takes some seconds on a CPU.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from gradtrail import Projection, example_id
from gradtrail.callbacks import GradTrailCallback
from gradtrail.factors import GradientBlock, squared_norm

VOCABULARY, LENGTH = 24, 12
STRIDES, SCRAMBLED = (1, 2, 3), 8
BATCH, ACCUMULATION = 8, 2


def make_rows(seed: int = 0) -> list[dict[str, Tensor]]:
    """Noise in the first `SCRAMBLED` rows, then every start counting up by every stride."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randint(0, VOCABULARY, (SCRAMBLED, LENGTH), generator=generator)
    counts = [
        (start + stride * torch.arange(LENGTH)) % VOCABULARY
        for stride in STRIDES
        for start in range(VOCABULARY)
    ]
    return [{"input_ids": row, "labels": row.clone()} for row in [*noise, *counts]]


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


class GradientNorms:
    """Averages every row's squared gradient norm over the second half of training."""

    def __init__(self, first_step: int) -> None:
        """Start empty; blocks before `first_step` are ignored."""
        self.first_step = first_step
        self.optimizer_steps = 0
        self._found: dict[int | str, list[float]] = defaultdict(list)

    def __call__(self, block: GradientBlock) -> None:
        """Receive the gradients of one optimizer step: all its micro-batches, merged."""
        self.optimizer_steps += 1
        if block.step >= self.first_step:
            norms = sum(squared_norm(layer) for layer in block.layers.values())
            for name, value in zip(block.ids, norms.tolist(), strict=True):
                self._found[name].append(value)

    def ranking(self) -> list[tuple[int | str, float]]:
        """Ids with their mean, largest first."""
        means = {name: sum(values) / len(values) for name, values in self._found.items()}
        return sorted(means.items(), key=lambda pair: -pair[1])


def train(rows: list[dict[str, Tensor]], steps: int, folder: str) -> tuple[GradientNorms, float]:
    """Train with the callback.

    Args:
        rows: The data set.
        steps: Optimizer steps.
        folder: Where the Trainer may write.

    Returns:
        The rows' gradient norms, and the mean loss that the Trainer reports.
    """
    from transformers import PrinterCallback, Trainer, TrainingArguments
    from transformers.utils import logging

    logging.set_verbosity_error()
    norms = GradientNorms(first_step=steps // 2)
    capture = GradTrailCallback(
        [norms],
        layers="transformer.h.*",
        projection=Projection(dim=8),
    )
    arguments = TrainingArguments(
        folder,
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
    model = make_model()
    trainer = Trainer(model, arguments, train_dataset=rows, callbacks=[capture])
    trainer.remove_callback(PrinterCallback)
    result = trainer.train()
    return norms, result.training_loss


def report(rows: list[dict[str, Tensor]], norms: GradientNorms) -> None:
    """Print the ranking. An id is the content hash of a row, so rows are found by hashing them."""
    number_of = {example_id(row): number for number, row in enumerate(rows)}
    ranking = [(number_of[name], value) for name, value in norms.ranking()]
    print(f"\n{'rank':>4} {'row':>4} {'gradient norm':>14}  tokens")
    for rank, (number, value) in enumerate(ranking[: SCRAMBLED + 4], 1):
        mark = "scrambled" if number < SCRAMBLED else ""
        tokens = " ".join(f"{token:>2}" for token in rows[number]["input_ids"].tolist())
        print(f"{rank:>4} {number:>4} {value**0.5:>14.2f}  {tokens}  {mark}")
    hits = sum(number < SCRAMBLED for number, _ in ranking[:SCRAMBLED])
    chance = SCRAMBLED * SCRAMBLED / len(rows)
    print(
        f"\n{hits} of the {SCRAMBLED} rows with the largest gradients are scrambled ones "
        f"({chance:.1f} by chance); {len(ranking)} of {len(rows)} rows were seen since half-way."
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the example.

    Args:
        argv: Command-line arguments; None reads the process's own.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=120, help="optimizer steps (%(default)s)")
    options = parser.parse_args(argv)
    if options.steps < 2:
        parser.error(f"--steps must be at least 2, got {options.steps}.")
    rows = make_rows()
    with tempfile.TemporaryDirectory() as folder:
        norms, loss = train(rows, options.steps, folder)
    print(
        f"{norms.optimizer_steps} optimizer steps of {ACCUMULATION} micro-batches of {BATCH} rows, "
        f"mean loss {loss:.2f} a token"
    )
    report(rows, norms)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
