"""What capture costs inside ``transformers.Trainer``, as a ratio to the same run without it.

Every run is a process of its own; runs without and with the callback alternate, and the median of
the pairs' ratios counts. The clock is the CPU seconds of ``Trainer.train()``, one thread.

    python benchmarks/trainer.py --pairs 3
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import workloads

# contestant: options of GradTrailCallback; None is the Trainer alone
# contestants that write what they capture into a store
STORED = ("stored-16", "stored-64")
CONTESTANTS: dict[str, dict[str, Any] | None] = {
    "bare": None,
    "projected-16": {"dim": 16},
    "projected-32": {"dim": 32},
    "projected-64": {"dim": 64},
    "factors": {},
    "stored-16": {"dim": 16},
    "stored-64": {"dim": 64},
}


def run(contestant: str, model_name: str, tokens: int, steps: int) -> dict[str, float]:
    """Train once and time it.

    Args:
        contestant: Name in ``CONTESTANTS``.
        model_name: ``"gpt2"`` or ``"llama"``.
        tokens: Positions an example.
        steps: Optimizer steps.

    Returns:
        CPU and wall seconds of the training, and the number of blocks that were captured.
    """
    from transformers import Trainer, TrainingArguments

    from gradtrail import Projection
    from gradtrail.callbacks import GradTrailCallback, OffloadCallback
    from gradtrail.store import GradientStore

    model = workloads.build(workloads.Workload(model_name))
    options, blocks = CONTESTANTS[contestant], []
    callbacks = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        if options is not None:
            sinks: list[Any] = [lambda block: blocks.append(len(block.ids))]
            if contestant in STORED:
                store = stack.enter_context(GradientStore(Path(folder) / "store"))
                sinks.append(OffloadCallback(store))
            callbacks = [
                GradTrailCallback(
                    sinks,
                    layers=workloads.block_linears(model, model_name),
                    projection=Projection(**options) if options else None,
                    capture="materialized" if options else "factored",
                )
            ]
        arguments = TrainingArguments(
            folder,
            max_steps=steps,
            per_device_train_batch_size=8,
            report_to=[],
            save_strategy="no",
            logging_steps=steps,
            disable_tqdm=True,
            use_cpu=True,
        )
        data = workloads.rows(8 * steps, tokens, 1)
        trainer = Trainer(model, arguments, train_dataset=data, callbacks=callbacks)
        cpu, wall = time.process_time(), time.perf_counter()
        trainer.train()
        stack.close()  # what waits is written within the time that counts
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    return {"cpu": cpu, "wall": wall, "blocks": len(blocks)}


def measure(contestant: str, options: argparse.Namespace) -> dict[str, Any]:
    """Alternate the Trainer alone and a contestant.

    Args:
        contestant: Name in ``CONTESTANTS``.
        options: Command line.

    Returns:
        The median ratio, all ratios and the seconds of the runs.
    """
    pairs = [(one("bare", options), one(contestant, options)) for _ in range(options.pairs)]
    ratios = [held["cpu"] / bare["cpu"] for bare, held in pairs]
    return {
        "contestant": contestant,
        "model": options.model,
        "tokens": options.tokens,
        "cpu_ratio": round(statistics.median(ratios), 3),
        "cpu_ratios": [round(ratio, 3) for ratio in ratios],
        "seconds": [(round(bare["cpu"], 2), round(held["cpu"], 2)) for bare, held in pairs],
        "blocks": pairs[-1][1]["blocks"],
    }


def one(name: str, options: argparse.Namespace) -> dict[str, float]:
    """Run one contestant in a process of its own."""
    command = [sys.executable, __file__, "--run", name, "--model", options.model]
    command += ["--tokens", str(options.tokens), "--steps", str(options.steps)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    """Read the command line and measure, or run one contestant."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--run", choices=CONTESTANTS, help="run this one here and print its figures"
    )
    parser.add_argument("--model", choices=("gpt2", "llama"), default="llama")
    parser.add_argument("--tokens", type=int, default=128, help="positions an example")
    parser.add_argument("--steps", type=int, default=24, help="optimizer steps of 8 examples")
    parser.add_argument("--pairs", type=int, default=3, help="alternating pairs of runs")
    parser.add_argument("--only", nargs="*", choices=CONTESTANTS, help="measure these only")
    parser.add_argument("--output", type=Path, help="write the figures to this JSON file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.run:
        print(json.dumps(run(options.run, options.model, options.tokens, options.steps)))
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
