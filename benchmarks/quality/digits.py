"""Linear datamodeling score on scikit-learn's digits: do scores predict what retraining does?

A network is retrained on random halves of the training data. The score of a method is the rank
correlation, over halves, between the summed scores of a half's examples and minus the loss that
networks trained on it have on a query, averaged over queries (Park et al., 2023,
https://arxiv.org/abs/2303.14186, section 2). 1 would be a perfect order; retraining noise allows
about 0.92 here.

Suffixes: m model, n training example, k example of a model's training set, b example of a batch,
q query, i layer input, o layer output.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from scipy.stats import rankdata
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import gradtrail

WIDTHS = (64, 32, 32, 10)
NUM_TRAIN, NUM_QUERY = 1000, 200
EPOCHS, BATCH = 60, 50
RATE, MOMENTUM, DECAY = 0.1, 0.9, 1e-3
MODELS_AT_ONCE = 250
FULL_MODELS = 5


@dataclass(frozen=True)
class Contestant:
    """A method, how it is called, and what it is held to.

    Attributes:
        options: Options of ``gradtrail.attribute``.
        targets: Smallest score from one model and from five, or None.
        scaled: Whether ``attribute`` makes an ensemble of checkpoints: each score matrix scaled
            to unit standard deviation, then averaged. If not, plain averages are taken here.
    """

    options: dict[str, Any]
    targets: tuple[float, float] | None = None
    scaled: bool = True


CONTESTANTS = {
    "graddot": Contestant({"method": "graddot"}, scaled=False),
    "kfac": Contestant({"method": "kfac"}),
    "ekfac": Contestant({"method": "ekfac"}, (0.51, 0.58)),
    "ekfac-expected": Contestant({"method": "ekfac", "fisher": "expected"}, (0.525, 0.59)),
    "ekfac-cg": Contestant({"method": "ekfac", "refine": "cg"}, (0.60, 0.68)),
}


@dataclass(frozen=True)
class Digits:
    """The data: pixels and classes.

    Attributes:
        inputs_ni: Training digits.
        targets_n: Their classes.
        inputs_qi: Test digits, the queries.
        targets_q: Their classes.
    """

    inputs_ni: Tensor
    targets_n: Tensor
    inputs_qi: Tensor
    targets_q: Tensor

    def train(self) -> list[tuple[Tensor, Tensor]]:
        """Training rows as ``attribute`` takes them."""
        return list(zip(self.inputs_ni, self.targets_n, strict=True))

    def query(self) -> list[tuple[Tensor, Tensor]]:
        """Query rows as ``attribute`` takes them."""
        return list(zip(self.inputs_qi, self.targets_q, strict=True))


def load(scaling: str = "standard") -> Digits:
    """Shuffle the digits once and take the training and the test part.

    Args:
        scaling: ``"standard"`` gives every pixel mean 0 and standard deviation 1 over the training
            digits (a pixel that never changes becomes 0), ``"unit"`` a range from 0 to 1.
    """
    pixels, classes = load_digits(return_X_y=True)
    order = torch.randperm(len(classes), generator=torch.Generator().manual_seed(0))
    inputs = (torch.from_numpy(pixels).float() / 16)[order]
    targets = torch.from_numpy(classes).long()[order]
    last = NUM_TRAIN + NUM_QUERY
    if scaling == "standard":
        spread, mean = torch.std_mean(inputs[:NUM_TRAIN], dim=0, correction=0)
        inputs = (inputs - mean) / torch.where(spread > 0, spread, 1.0)
    return Digits(
        inputs[:NUM_TRAIN], targets[:NUM_TRAIN], inputs[NUM_TRAIN:last], targets[NUM_TRAIN:last]
    )


# ---------------------------------------------------------------- training many models at once


def initial(num_models: int, generator: torch.Generator) -> list[Tensor]:
    """Weights ``[m, i, o]`` and biases ``[m, 1, o]``, distributed as those of ``nn.Linear``."""
    parameters = []
    for inputs, outputs in zip(WIDTHS, WIDTHS[1:], strict=False):
        for shape in ((num_models, inputs, outputs), (num_models, 1, outputs)):
            values = torch.rand(shape, generator=generator).mul_(2).sub_(1)
            parameters.append(values.div_(math.sqrt(inputs)).requires_grad_())
    return parameters


def logits(parameters: list[Tensor], inputs_mbi: Tensor) -> Tensor:
    """Run every model on its own batch."""
    hidden = inputs_mbi
    for layer in range(0, len(parameters), 2):
        hidden = torch.baddbmm(parameters[layer + 1], hidden, parameters[layer])
        if layer + 2 < len(parameters):
            hidden = hidden.relu()
    return hidden


def train_models(
    data: Digits, subsets_mk: Tensor, seed: int, *, epochs: int = EPOCHS
) -> list[Tensor]:
    """Train one model on each subset, all of them side by side.

    Every model has its own initial weights and its own order of examples in each epoch.
    """
    generator = torch.Generator().manual_seed(seed)
    num_models, size = subsets_mk.shape
    parameters = initial(num_models, generator)
    velocities = [torch.zeros_like(parameter) for parameter in parameters]
    steps, step = epochs * (size // BATCH), 0
    for _ in range(epochs):
        order_mk = torch.rand(num_models, size, generator=generator).argsort(dim=1)
        shuffled_mk = subsets_mk.gather(1, order_mk)
        for start in range(0, size - size % BATCH, BATCH):
            rows_mb = shuffled_mk[:, start : start + BATCH]
            output = logits(parameters, data.inputs_ni[rows_mb])
            targets = data.targets_n[rows_mb].flatten()
            loss = F.cross_entropy(output.flatten(0, 1), targets, reduction="sum") / BATCH
            rate = RATE * 0.5 * (1 + math.cos(math.pi * step / steps))
            gradients = torch.autograd.grad(loss, parameters)
            with torch.no_grad():
                for parameter, velocity, gradient in zip(
                    parameters, velocities, gradients, strict=True
                ):
                    velocity.mul_(MOMENTUM).add_(gradient).add_(parameter, alpha=DECAY)
                    parameter.sub_(velocity, alpha=rate)
            step += 1
    return [parameter.detach() for parameter in parameters]


def state_dicts(parameters: list[Tensor]) -> list[dict[str, Tensor]]:
    """The models' weights under the names of ``network()``."""
    states = []
    for model in range(len(parameters[0])):
        state = {}
        for layer in range(len(parameters) // 2):
            state[f"{2 * layer}.weight"] = parameters[2 * layer][model].t().contiguous()
            state[f"{2 * layer}.bias"] = parameters[2 * layer + 1][model, 0].clone()
        states.append(state)
    return states


def network(state: dict[str, Tensor]) -> nn.Module:
    """One of the models as a module."""
    layers: list[nn.Module] = []
    for inputs, outputs in zip(WIDTHS, WIDTHS[1:], strict=False):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    model = nn.Sequential(*layers[:-1])
    model.load_state_dict(state)
    return model.eval()


# ---------------------------------------------------------------- the truth


def random_halves(count: int, seed: int = 1) -> Tensor:
    """Which examples each half holds. Shape ``[m, k]``."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, NUM_TRAIN, generator=generator).argsort(dim=1)[:, : NUM_TRAIN // 2]


def query_losses(data: Digits, parameters: list[Tensor]) -> Tensor:
    """Each model's loss on each query. Shape ``[m, q]``."""
    num_models = len(parameters[0])
    output = logits(parameters, data.inputs_qi.expand(num_models, -1, -1))
    targets = data.targets_q.repeat(num_models)
    return F.cross_entropy(output.flatten(0, 1), targets, reduction="none").view(num_models, -1)


def retrain(data: Digits, halves_mk: Tensor, num_seeds: int) -> Tensor:
    """Retrain on every half with every seed; give minus the query losses ``[seed, m, q]``."""
    subsets = halves_mk.repeat(num_seeds, 1)
    losses = []
    for start in range(0, len(subsets), MODELS_AT_ONCE):
        chunk = subsets[start : start + MODELS_AT_ONCE]
        losses.append(query_losses(data, train_models(data, chunk, seed=1000 + start)))
    return -torch.cat(losses).view(num_seeds, len(halves_mk), -1)


def settings(scaling: str, num_halves: int, num_seeds: int) -> dict[str, str]:
    """What a truth depends on, as it is written into its file."""
    named = {
        "scaling": scaling,
        "widths": WIDTHS,
        "train": NUM_TRAIN,
        "query": NUM_QUERY,
        "epochs": EPOCHS,
        "batch": BATCH,
        "sgd": (RATE, MOMENTUM, DECAY),
        "models at once": MODELS_AT_ONCE,
        "halves": num_halves,
        "seeds": num_seeds,
    }
    return {name: json.dumps(value) for name, value in named.items()}


def truth(
    data: Digits, halves_mk: Tensor, num_seeds: int, expected: dict[str, str], path: Path | None
) -> Tensor:
    """Read the retrained models' figures from a file, or make them and write it."""
    if path is not None and path.exists():
        with safe_open(path, framework="pt") as file:
            found = file.metadata()
            if found != expected:
                raise ValueError(
                    f"--truth must name a file made with {expected}, got {path} with {found}. "
                    "Delete it or name another."
                )
            return file.get_tensor("truth")
    values = retrain(data, halves_mk, num_seeds)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({"truth": values}, path, metadata=expected)
    return values


# ---------------------------------------------------------------- scores against the truth


def rank_correlations(left_mq: np.ndarray, right_mq: np.ndarray) -> np.ndarray:
    """Spearman correlation over the models, one a query."""
    left, right = (rankdata(values, axis=0) for values in (left_mq, right_mq))
    left, right = (values - values.mean(axis=0) for values in (left, right))
    scale = np.sqrt((left**2).sum(axis=0) * (right**2).sum(axis=0))
    return (left * right).sum(axis=0) / scale


def datamodeling_score(scores_nq: Tensor, halves_mk: Tensor, truth_mq: Tensor) -> float:
    """Mean over queries of the correlation between a half's summed scores and the truth."""
    predicted_mq = scores_nq.double()[halves_mk].sum(dim=1)
    return float(rank_correlations(predicted_mq.numpy(), truth_mq.double().numpy()).mean())


def noise_ceiling(truth_smq: Tensor) -> float:
    """What a perfect predictor would score, from the correlation of two halves of the seeds.

    The Spearman-Brown formula gives the reliability of all seeds together; the ceiling is its
    square root.
    """
    half = len(truth_smq) // 2
    left, right = truth_smq[:half].mean(dim=0), truth_smq[half : 2 * half].mean(dim=0)
    agreement = rank_correlations(left.numpy(), right.numpy()).mean()
    return float(math.sqrt(2 * agreement / (1 + agreement)))


def attribute(states: list[dict[str, Tensor]], data: Digits, options: dict[str, Any]) -> Tensor:
    """Scores ``[n, q]`` of one model, or of an ensemble that the library makes."""
    several = {"checkpoints": states} if len(states) > 1 else {}
    return gradtrail.attribute(
        network(states[0]),
        data.train(),
        data.query(),
        batch_size=NUM_TRAIN,
        query_batch_size=NUM_QUERY,
        progress=False,
        **several,
        **options,
    ).values


def contest(
    contestant: Contestant,
    states: list[dict[str, Tensor]],
    data: Digits,
    halves_mk: Tensor,
    truth_mq: Tensor,
) -> dict[str, Any]:
    """Measure one method: from every single model, and from all of them together."""
    start = time.perf_counter()
    single = [attribute([state], data, contestant.options) for state in states]
    seconds = (time.perf_counter() - start) / len(states)
    ones = [datamodeling_score(scores, halves_mk, truth_mq) for scores in single]
    if contestant.scaled:
        together = attribute(states, data, contestant.options)
    else:
        together = torch.stack(single).mean(dim=0)
    return {
        "one": round(sum(ones) / len(ones), 4),
        "one_each": [round(value, 4) for value in ones],
        "five": round(datamodeling_score(together, halves_mk, truth_mq), 4),
        "seconds_one": round(seconds, 2),
        "targets": contestant.targets,
    }


def small(names: tuple[str, ...], *, num_halves: int = 40, num_seeds: int = 1) -> dict[str, float]:
    """Measure methods from one model on a few retrained halves: seconds, and good for a gap.

    Args:
        names: Which contestants.
        num_halves: Random halves.
        num_seeds: Models a half.

    Returns:
        Score by contestant.
    """
    data, halves = load(), random_halves(num_halves)
    truth_mq = retrain(data, halves, num_seeds).mean(dim=0)
    states = full_models(data, 1)
    return {
        name: datamodeling_score(
            attribute(states, data, CONTESTANTS[name].options), halves, truth_mq
        )
        for name in names
    }


def full_models(data: Digits, count: int) -> list[dict[str, Tensor]]:
    """Train models on all training digits."""
    return state_dicts(train_models(data, torch.arange(NUM_TRAIN).expand(count, -1), seed=7))


def main(arguments: list[str] | None = None) -> None:
    """Measure every contestant, print a table and write the results file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--truth", type=Path, help="file to keep the retrained figures in")
    parser.add_argument("--scaling", choices=["standard", "unit"], default="standard")
    parser.add_argument("--halves", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--only", nargs="*", choices=list(CONTESTANTS), default=list(CONTESTANTS))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, help="JSON file for the figures")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    data, halves = load(options.scaling), random_halves(options.halves)
    defined = settings(options.scaling, options.halves, options.seeds)
    start = time.perf_counter()
    truth_smq = truth(data, halves, options.seeds, defined, options.truth)
    states = full_models(data, FULL_MODELS)
    predicted = torch.stack([network(state)(data.inputs_qi).argmax(dim=1) for state in states])
    header = {
        "accuracy": round(float((predicted == data.targets_q).float().mean()), 4),
        "ceiling": round(noise_ceiling(truth_smq), 4) if options.seeds > 1 else None,
        "retraining_seconds": round(time.perf_counter() - start, 1),
        "settings": defined,
        "torch": torch.__version__,
    }
    print(f"test accuracy {header['accuracy']}, noise ceiling {header['ceiling']}")
    print(f"{'method':<16} {'one':>6} {'range':>13} {'target':>7} {'five':>6} {'target':>7}")
    results = {}
    for name in options.only:
        row = contest(CONTESTANTS[name], states, data, halves, truth_smq.mean(dim=0))
        results[name] = row
        shown = [f"{target:.3f}" for target in row["targets"] or ()] or ["", ""]
        extent = f"{min(row['one_each']):.3f}..{max(row['one_each']):.3f}"
        print(
            f"{name:<16} {row['one']:>6.3f} {extent:>13} {shown[0]:>7} "
            f"{row['five']:>6.3f} {shown[1]:>7}  {row['seconds_one']:.1f} s a model",
            flush=True,
        )
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps({**header, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
