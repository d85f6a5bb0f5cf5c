"""The command line and the clock of a peer's process: one method of another library, run once."""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Callable, Mapping

import torch
import workloads
from torch import nn

Run = Callable[[nn.Module, workloads.Workload], object]


def run_peer(methods: Mapping[str, Run], description: str | None) -> None:
    """Run one method after a small warm-up and print its figures as one line of JSON.

    Args:
        methods: What each name of ``--method`` runs; the first is the default.
        description: What the script is, for ``--help``.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--method", choices=list(methods), default=next(iter(methods)))
    parser.add_argument("--model", choices=list(workloads.BLOCKS), default="gpt2")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--num-train", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    work = workloads.Workload(arguments.model, arguments.tokens, arguments.num_train)
    model, run = workloads.build(work), methods[arguments.method]
    run(model, workloads.Workload(work.model, work.tokens, work.batch_size, 2))
    before, wall = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    run(model, work)
    wall = time.perf_counter() - wall
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(json.dumps({"wall": wall, "cpu": cpu, "peak_mib": after.ru_maxrss / 1024}))
