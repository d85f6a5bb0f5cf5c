"""Train on digits of which 30% carry a wrong label, without those that validation data reject.

Two runs a seed, from the same weights and on the same batches: plain, and with a
``DataSelectionCallback`` whose target is the gradient of 200 validation examples with right
labels. Of every batch, the fifth with the lowest scores is left out where these are negative:
less than the share of wrong labels, so that few right ones go with them. Prints accuracy, the
share of examples kept and how many of the dropped ones were mislabelled, and draws them.

    python examples/select_data.py --output select_data.png
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradtrail import HookManager
from gradtrail.callbacks import DataSelectionCallback

FLIPPED = 0.3
OPTIONS = {"threshold": 0.2, "threshold_mode": "negative_bottom_fraction"}
BATCH = 64
NUM_VALIDATION = 200
NUM_TEST = 500


@dataclass
class Data:
    """Digits, cut into three parts.

    Attributes:
        images: Training images.
        labels: Their labels, some of them wrong.
        is_flipped: Which are.
        validation: Images and right labels, one batch.
        test: Images and right labels.
    """

    images: Tensor
    labels: Tensor
    is_flipped: Tensor
    validation: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


@dataclass
class Run:
    """What happened, epoch by epoch.

    Attributes:
        accuracy: On the test images, after each epoch.
        kept: Share of the training examples that was kept.
        precision: Share of the dropped ones that were mislabelled.
        recall: Share of the mislabelled ones that were dropped.
    """

    accuracy: list[float] = field(default_factory=list)
    kept: list[float] = field(default_factory=list)
    precision: list[float] = field(default_factory=list)
    recall: list[float] = field(default_factory=list)


def load(seed: int, num_train: int | None) -> Data:
    """Read the digits that come with scikit-learn and spoil some labels.

    Args:
        seed: Decides the parts and the wrong labels.
        num_train: Number of training examples, or None for all that are left.

    Returns:
        The data.
    """
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32)
    # centred, or every two images look alike to an inner product
    images = (images - images.mean(0)) / images.std()
    labels = torch.tensor(digits.target)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(labels), generator=generator)
    parts = order.split([NUM_TEST, NUM_VALIDATION, len(order) - NUM_TEST - NUM_VALIDATION])
    train = parts[2][:num_train]
    wrong = (labels[train] + torch.randint(1, 10, train.shape, generator=generator)) % 10
    is_flipped = torch.rand(train.shape, generator=generator) < FLIPPED
    return Data(
        images[train],
        torch.where(is_flipped, wrong, labels[train]),
        is_flipped,
        (images[parts[1]], labels[parts[1]]),
        (images[parts[0]], labels[parts[0]]),
    )


def train(data: Data, seed: int, epochs: int, *, select: bool) -> Run:
    """Train a small network.

    Args:
        data: The digits.
        seed: Decides weights and batches.
        epochs: Passes over the training examples.
        select: Whether examples are left out.

    Returns:
        What happened.
    """
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    run, collecting, selection = Run(), nullcontext(), None
    if select:
        selection = DataSelectionCallback(
            model,
            target="validation",
            validation_loader=[data.validation],
            renormalize=True,
            selection_kwargs=OPTIONS,
        )
        collecting = HookManager(model, loss_reduction="mean", callbacks=[selection]).collect()
    with collecting:
        for _ in range(epochs):
            dropped = torch.zeros_like(data.is_flipped)
            for rows in torch.randperm(len(data.labels)).split(BATCH):
                optimizer.zero_grad()
                F.cross_entropy(model(data.images[rows]), data.labels[rows]).backward()
                optimizer.step()
                if selection is not None:
                    dropped[rows] = selection.last_dropped
            hits = int((dropped & data.is_flipped).sum())
            run.kept.append(1 - float(dropped.float().mean()))
            run.precision.append(hits / max(1, int(dropped.sum())))
            run.recall.append(hits / max(1, int(data.is_flipped.sum())))
            with torch.no_grad():
                right = model(data.test[0]).argmax(1) == data.test[1]
            run.accuracy.append(float(right.float().mean()))
    return run


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def print_table(plain: Sequence[Run], selected: Sequence[Run]) -> None:
    """Print a row an epoch, each the mean over the seeds."""
    print("epoch  plain  selected   kept  precision  recall")
    for epoch in range(len(plain[0].accuracy)):
        row = [mean([run.accuracy[epoch] for run in plain])]
        for name in ("accuracy", "kept", "precision", "recall"):
            row.append(mean([getattr(run, name)[epoch] for run in selected]))
        print("{:>5}  {:>5.1%}  {:>8.1%}  {:>5.1%}  {:>9.1%}  {:>6.1%}".format(epoch + 1, *row))


def plot(plain: Sequence[Run], selected: Sequence[Run], path: Path) -> None:
    """Draw accuracy and kept share over the epochs."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    epochs = range(1, len(plain[0].accuracy) + 1)
    for runs, label, colour in (
        (plain, "every example", "tab:grey"),
        (selected, "with data selection", "tab:blue"),
    ):
        for run in runs:
            left.plot(epochs, run.accuracy, color=colour, alpha=0.3, linewidth=1)
        line = [mean([run.accuracy[epoch - 1] for run in runs]) for epoch in epochs]
        left.plot(epochs, line, color=colour, linewidth=2, label=label)
    left.set(xlabel="epoch", ylabel="test accuracy", title="Accuracy on held-out digits")
    left.legend(loc="lower left", frameon=False)
    for name, label, colour in (
        ("kept", "share kept", "tab:blue"),
        ("precision", "dropped ones that were mislabelled", "tab:orange"),
    ):
        line = [mean([getattr(run, name)[epoch - 1] for run in selected]) for epoch in epochs]
        right.plot(epochs, line, color=colour, linewidth=2, label=label)
    right.axhline(1 - FLIPPED, color="black", linewidth=0.8, linestyle=":")
    right.annotate(
        "share with a right label",
        (epochs[-1], 1 - FLIPPED),
        (0, 4),
        ha="right",
        textcoords="offset points",
        fontsize=8,
    )
    right.set(xlabel="epoch", ylim=(0, 1.03), title="What the selection did")
    right.legend(loc="lower right", frameon=False)
    figure.savefig(path, dpi=120)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison.

    Args:
        argv: Command-line arguments; None reads the process's own.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument("--epochs", type=int, default=30, help="passes over the digits")
    parser.add_argument("--train", type=int, help="training examples (default: all, 1,097)")
    parser.add_argument("--output", type=Path, help="draw into this file")
    options = parser.parse_args(argv)
    plain, selected = [], []
    for seed in range(options.seeds):
        data = load(seed, options.train)
        plain.append(train(data, seed, options.epochs, select=False))
        selected.append(train(data, seed, options.epochs, select=True))
    print_table(plain, selected)
    gain = mean([run.accuracy[-1] for run in selected]) - mean([run.accuracy[-1] for run in plain])
    print(f"Selection ends {100 * gain:+.1f} points from plain training, mean of {options.seeds}.")
    if options.output:
        plot(plain, selected, options.output)
        print(f"Drawn: {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
