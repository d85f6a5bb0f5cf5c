"""What one benchmark process runs: the bare pass, or one method of one library."""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Callable
from typing import Any

import torch
import workloads
from torch import nn
from torch.nn import functional as F


def bare(model: nn.Module, work: workloads.Workload, *, weight_gradients: bool) -> None:
    """Forward and backward over the training data, as training would, without an optimizer."""
    data = workloads.rows(work.num_train, work.tokens, 1)
    named = set(workloads.block_linears(model, work.model))
    if not weight_gradients:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("wte" in name or "embed_tokens" in name)
        del named
    for start in range(0, work.num_train, work.batch_size):
        ids = torch.stack([row["input_ids"] for row in data[start : start + work.batch_size]])
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
        labels = F.pad(ids[:, 1:], (0, 1), value=-100)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        loss.backward()
        model.zero_grad(set_to_none=True)


def ours(model: nn.Module, work: workloads.Workload, **options: Any) -> torch.Tensor:
    """One attribute() call over all training data and queries."""
    import gradtrail

    return gradtrail.attribute(
        model,
        workloads.rows(work.num_train, work.tokens, 1),
        workloads.rows(work.num_query, work.tokens, 2),
        layers=workloads.block_linears(model, work.model),
        batch_size=work.batch_size,
        query_batch_size=work.batch_size,
        progress=False,
        **options,
    ).values


CONTESTANTS: dict[str, Callable[..., Any]] = {
    "bare": lambda model, work: bare(model, work, weight_gradients=True),
    "bare-no-weights": lambda model, work: bare(model, work, weight_gradients=False),
    "graddot": lambda model, work: ours(model, work),
    "gradcos": lambda model, work: ours(model, work, method="gradcos"),
    "kfac": lambda model, work: ours(model, work, method="kfac"),
    "ekfac": lambda model, work: ours(model, work, method="ekfac"),
    "kfac-streamed": lambda model, work: ours(model, work, method="kfac", gradient_budget=0),
    "ekfac-streamed": lambda model, work: ours(model, work, method="ekfac", gradient_budget=0),
    "graddot-projected": lambda model, work: ours(model, work, projection=64),
}


def main() -> None:
    """Run one contestant and print its figures as one line of JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("contestant", choices=list(CONTESTANTS))
    parser.add_argument("--model", choices=list(workloads.BLOCKS), default="gpt2")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--num-train", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    work = workloads.Workload(arguments.model, arguments.tokens, arguments.num_train)
    model = workloads.build(work)
    run = CONTESTANTS[arguments.contestant]
    warm = workloads.Workload(work.model, work.tokens, work.batch_size, 2, work.batch_size)
    run(model, warm)
    before_peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    before, wall = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    run(model, work)
    wall = time.perf_counter() - wall
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    figures = {
        "wall": wall,
        "cpu": cpu,
        "peak_mib": after.ru_maxrss / 1024,
        "warm_peak_mib": before_peak / 1024,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
