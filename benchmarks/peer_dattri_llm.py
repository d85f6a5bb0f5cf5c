"""GradDot of dattri-llm 0.1.0 on the same work, run with the interpreter of its own venv."""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time

import torch
import workloads
from dattri_llm import (
    AttributionArguments,
    AttributionTask,
    HookManagerConfig,
    TracInAttributor,
)
from torch import nn


def attribute(model: nn.Module, work: workloads.Workload) -> None:
    """One attribute() call over all training data and queries."""
    names = workloads.block_linears(model, work.model)
    with tempfile.TemporaryDirectory() as folder:
        arguments = AttributionArguments(
            folder,
            per_device_train_batch_size=work.batch_size,
            per_device_eval_batch_size=work.batch_size,
        )
        task = AttributionTask(lambda model, batch: model(**batch).loss, model=model)
        TracInAttributor(arguments, task=task).attribute(
            workloads.rows(work.num_train, work.tokens, 1),
            workloads.rows(work.num_query, work.tokens, 2),
            hook_config=HookManagerConfig(hook_types=dict.fromkeys(names, "linear_io")),
        )


def main() -> None:
    """Run once and print the figures as one line of JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=list(workloads.BLOCKS), default="gpt2")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--num-train", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    work = workloads.Workload(arguments.model, arguments.tokens, arguments.num_train)
    model = workloads.build(work)
    attribute(model, workloads.Workload(work.model, work.tokens, work.batch_size, 2))
    before, wall = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    attribute(model, work)
    wall = time.perf_counter() - wall
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(json.dumps({"wall": wall, "cpu": cpu, "peak_mib": after.ru_maxrss / 1024}))


if __name__ == "__main__":
    main()
