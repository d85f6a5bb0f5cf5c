"""What data selection costs inside ``transformers.Trainer``, as a ratio to the same run without it.

Every run is a process of its own; runs without and with the callback alternate, and the median of
the pairs' ratios counts. The clock is the CPU seconds of ``Trainer.train()``, one thread, after
a first step. The validation batch is a quarter of the training batch.

    python benchmarks/selection.py --pairs 3
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import workloads

# contestant: options of DataSelectionCallback; None is the Trainer alone
CONTESTANTS: dict[str, dict[str, Any] | None] = {
    "bare": None,
    "batch": {},
    "batch-materialized": {"scoring_kwargs": {"score_mode": "materialized"}},
    "validation": {"target": "validation"},
}
TARGETS = {"batch": 1.35, "validation": 1.6}


def make_rows(kind: str, count: int, tokens: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Random tokens, of which about half go against the others; or sequences that go up evenly."""
    if kind == "random":
        return workloads.rows(count, tokens, seed)
    generator = torch.Generator().manual_seed(seed)
    first = torch.randint(0, 1000, (count, 1), generator=generator)
    step = torch.randint(1, 5, (count, 1), generator=generator)
    ids = (first + step * torch.arange(tokens)) % 1000
    return [{"input_ids": row, "labels": row} for row in ids]


def run(contestant: str, options: argparse.Namespace) -> dict[str, float]:
    """Train once and time it.

    Args:
        contestant: Name in ``CONTESTANTS``.
        options: Command line.

    Returns:
        CPU and wall seconds of the training after its first step, and the mean share kept.
    """
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from gradtrail.callbacks import DataSelectionCallback, GradTrailCallback

    start: list[tuple[float, float]] = []

    class Start(TrainerCallback):
        """Starts the clock when the first step is over."""

        def on_step_end(self, *_: Any, **__: Any) -> None:
            if not start:
                start.append((time.process_time(), time.perf_counter()))

    model = workloads.build(workloads.Workload(options.model)).train()
    size, choice, callbacks = options.batch_size, CONTESTANTS[contestant], [Start()]
    selection = None
    if choice is not None:
        if choice.get("target") == "validation":
            held_out = make_rows(options.data, size, options.tokens, 2)
            loader = torch.utils.data.DataLoader(held_out, batch_size=size // 4)
            choice = {**choice, "validation_loader": loader}
        selection = DataSelectionCallback(model, renormalize=True, **choice)
        callbacks.append(GradTrailCallback([selection]))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=options.steps + 1,
            per_device_train_batch_size=size,
            report_to=[],
            save_strategy="no",
            logging_steps=options.steps,
            disable_tqdm=True,
            use_cpu=True,
        )
        data = make_rows(options.data, size * (options.steps + 1), options.tokens, 1)
        trainer = Trainer(model, arguments, train_dataset=data, callbacks=callbacks)
        trainer.train()
        cpu, wall = time.process_time() - start[0][0], time.perf_counter() - start[0][1]
    kept = [record.kept_share for record in selection.history] if selection else [1.0]
    return {"cpu": cpu, "wall": wall, "kept_share": statistics.mean(kept)}


def measure(contestant: str, options: argparse.Namespace) -> dict[str, Any]:
    """Alternate the Trainer alone and a contestant.

    Args:
        contestant: Name in ``CONTESTANTS``.
        options: Command line.

    Returns:
        The median ratio, all ratios, the seconds of the runs and the share that was kept.
    """
    pairs = [(one("bare", options), one(contestant, options)) for _ in range(options.pairs)]
    ratios = [held["cpu"] / bare["cpu"] for bare, held in pairs]
    return {
        "contestant": contestant,
        "model": options.model,
        "tokens": options.tokens,
        "batch_size": options.batch_size,
        "data": options.data,
        "cpu_ratio": round(statistics.median(ratios), 3),
        "target": TARGETS.get(contestant),
        "cpu_ratios": [round(ratio, 3) for ratio in ratios],
        "seconds": [(round(bare["cpu"], 2), round(held["cpu"], 2)) for bare, held in pairs],
        "kept_share": round(pairs[-1][1]["kept_share"], 3),
    }


def one(name: str, options: argparse.Namespace) -> dict[str, float]:
    """Run one contestant in a process of its own."""
    command = [sys.executable, __file__, "--run", name, "--model", options.model]
    command += ["--tokens", str(options.tokens), "--steps", str(options.steps)]
    command += ["--batch-size", str(options.batch_size), "--data", options.data]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    """Read the command line and measure, or run one contestant."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--run", choices=CONTESTANTS, help="run this one here and print its figures"
    )
    parser.add_argument("--profile", action="store_true", help="with --run: where its time goes")
    parser.add_argument("--model", choices=("gpt2", "llama"), default="llama")
    parser.add_argument("--tokens", type=int, default=128, help="positions an example")
    parser.add_argument("--batch-size", type=int, default=16, help="examples a batch")
    parser.add_argument("--data", choices=("random", "even"), default="random")
    parser.add_argument("--steps", type=int, default=12, help="optimizer steps that are timed")
    parser.add_argument("--pairs", type=int, default=3, help="alternating pairs of runs")
    parser.add_argument("--only", nargs="*", choices=CONTESTANTS, help="measure these only")
    parser.add_argument("--output", type=Path, help="write the figures to this JSON file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.run and options.profile:
        profile = cProfile.Profile()
        profile.runcall(run, options.run, options)
        pstats.Stats(profile).sort_stats("tottime").print_stats(30)
        return
    if options.run:
        print(json.dumps(run(options.run, options)))
        return
    names = options.only or [name for name in CONTESTANTS if name != "bare"]
    results = []
    for name in names:
        results.append(measure(name, options))
        print(json.dumps(results[-1]), flush=True)
    if options.output:
        options.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
