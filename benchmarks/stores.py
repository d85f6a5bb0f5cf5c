"""What stores cost: writing beside the capture pass, and scoring beside reading and multiplying.

Every run is a process of its own. A capture without a store and one with it alternate, and the
median of the pairs' ratios counts. Scoring is compared in one process with what nobody can avoid:
reading the shards' bytes once and forming the matrix products of their blocks.

    python benchmarks/stores.py --pairs 3
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import workloads

DIM = 16
# contestant: what it is compared with
WRITERS = {
    "cache-float32": "capture",
    "cache-bfloat16": "capture",
    "cache-projected": "capture-projected",
    "loop-async": "loop",
    "loop-sync": "loop",
    "loop-projected-async": "loop-projected",
}
READERS = {
    "score-factored": {},
    "score-bfloat16": {"dtype": "bfloat16"},
    "score-written": {"layers": 48, "entries": 64 * 64, "blocks": 80},
}


def data_of(work: workloads.Workload) -> list[dict[str, torch.Tensor]]:
    """The training rows."""
    return workloads.rows(work.num_train, work.tokens, 1)


def capture(work: workloads.Workload, folder: Path, projection: int | None = None) -> None:
    """Capture every example's gradient and drop it."""
    from gradtrail.attribution.data import as_rows
    from gradtrail.attribution.losses import resolve_loss
    from gradtrail.attribution.setup import make_session
    from gradtrail.hooks import select_layers

    del folder
    model = workloads.build(work)
    selection = select_layers(model, layers=workloads.block_linears(model, work.model))
    session = make_session(model, selection, None, projection, 0, progress=False)
    rows, loss = as_rows(data_of(work), "train", None, 0), resolve_loss(None, None)
    with session.opened(rows, loss):
        session.capture(
            rows, loss, batch_size=work.batch_size, phase="train", sink=lambda *_: None, done=None
        )


def cache(work: workloads.Workload, folder: Path, **options: Any) -> None:
    """Capture every example's gradient into a store."""
    import gradtrail

    model = workloads.build(work)
    gradtrail.cache(
        model,
        data_of(work),
        cache_dir=folder,
        layers=workloads.block_linears(model, work.model),
        batch_size=work.batch_size,
        progress=False,
        **options,
    )


def loop(
    work: workloads.Workload,
    folder: Path,
    *,
    asynchronous: bool | None = None,
    projection: int | None = None,
) -> None:
    """Train without an optimizer and capture on the way, into a store or into nothing."""
    from gradtrail import HookManager, Projection
    from gradtrail.callbacks import OffloadCallback
    from gradtrail.store import GradientStore

    model, rows = workloads.build(work), data_of(work)
    with GradientStore(folder / "loop") as store:
        callback = (
            (lambda _: None)
            if asynchronous is None
            else OffloadCallback(store, asynchronous=asynchronous)
        )
        manager = HookManager(
            model,
            layers=workloads.block_linears(model, work.model),
            callbacks=[callback],
            projection=None if projection is None else Projection(dim=projection),
            capture="factored" if projection is None else "materialized",
            loss_reduction="model",
        )
        with manager.collect():
            for start in range(0, work.num_train, work.batch_size):
                ids = torch.stack([r["input_ids"] for r in rows[start : start + work.batch_size]])
                model(input_ids=ids, labels=ids).loss.backward()
                model.zero_grad(set_to_none=True)


RUNS: dict[str, Callable[[workloads.Workload, Path], None]] = {
    "capture": capture,
    "capture-projected": lambda work, folder: capture(work, folder, DIM),
    "cache-float32": lambda work, folder: cache(work, folder / "cache"),
    "cache-bfloat16": lambda work, folder: cache(work, folder / "cache", dtype="bfloat16"),
    "cache-projected": lambda work, folder: cache(
        work, folder / "cache", projection=DIM, capture="materialized"
    ),
    "loop": loop,
    "loop-projected": lambda work, folder: loop(work, folder, projection=DIM),
    "loop-async": lambda work, folder: loop(work, folder, asynchronous=True),
    "loop-sync": lambda work, folder: loop(work, folder, asynchronous=False),
    "loop-projected-async": lambda work, folder: loop(
        work, folder, asynchronous=True, projection=DIM
    ),
}


def timed(function: Callable[[], Any]) -> dict[str, float]:
    """Wall and CPU seconds of a call."""
    cpu, wall = time.process_time(), time.perf_counter()
    function()
    return {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}


def write(name: str, work: workloads.Workload) -> dict[str, float]:
    """Run a contestant once, after a short one that warms the process up."""
    with tempfile.TemporaryDirectory() as folder:
        small = workloads.Workload(work.model, work.tokens, 2 * work.batch_size, 2, work.batch_size)
        RUNS[name](small, Path(folder) / "warm")
        figures = timed(lambda: RUNS[name](work, Path(folder) / "run"))
        files = [path for path in (Path(folder) / "run").rglob("*") if path.is_file()]
        return {**figures, "mib": sum(path.stat().st_size for path in files) / 2**20}


def read(name: str, work: workloads.Workload, *, cold: bool) -> dict[str, Any]:
    """Write a store, then read its bytes, form its products, and score it."""
    import gradtrail

    with tempfile.TemporaryDirectory() as folder:
        train, query = Path(folder) / "train", Path(folder) / "query"
        if "blocks" in READERS[name]:
            synthetic(train, work.batch_size, **READERS[name])
            synthetic(query, work.batch_size, **{**READERS[name], "blocks": 2})
        else:
            model = workloads.build(work)
            gradtrail.cache(
                model,
                data_of(work),
                workloads.rows(work.num_query, work.tokens, 2),
                cache_dir=folder,
                layers=workloads.block_linears(model, work.model),
                batch_size=work.batch_size,
                progress=False,
                **READERS[name],
            )
        return compare(name, work, train, query, cold=cold)


def compare(
    name: str, work: workloads.Workload, train: Path, query: Path, *, cold: bool
) -> dict[str, Any]:
    """Time reading a store's bytes, forming its products, and scoring it."""
    import gradtrail
    from gradtrail.store import GradientStore

    shards = sorted(train.glob("*.safetensors"))
    sizes = [path.stat().st_size for path in shards]
    buffer, mib = bytearray(max(sizes)), round(sum(sizes) / 2**20)

    def read_bytes() -> None:
        for path in shards:
            with path.open("rb", buffering=0) as file:
                file.readinto(buffer)

    with GradientStore(train, mode="read") as store, GradientStore(query, mode="read") as asked:
        queries, held = written_queries(asked, work), in_memory(store)

        def score() -> None:
            gradtrail.attribute_from_cache(store, asked, progress=False)

        found: dict[str, list[dict[str, float]]] = {"read": [], "products": [], "score": []}
        score()
        for _ in range(5):
            for key, function in (
                ("read", read_bytes),
                ("products", lambda: multiply(queries, held)),
                ("score", score),
            ):
                if cold and key != "products":
                    forget(shards)
                found[key].append(timed(function))
    wall = {key: statistics.median(one["wall"] for one in runs) for key, runs in found.items()}
    cpu = {key: statistics.median(one["cpu"] for one in runs) for key, runs in found.items()}
    return {
        "contestant": name,
        "cold": cold,
        "mib": mib,
        "wall_ratio": round(wall["score"] / (wall["read"] + wall["products"]), 3),
        "cpu_ratio": round(cpu["score"] / (cpu["read"] + cpu["products"]), 3),
        "wall": {key: round(value, 3) for key, value in wall.items()},
        "cpu": {key: round(value, 3) for key, value in cpu.items()},
    }


def multiply(queries: dict[str, Any], held: list[dict[str, Any]]) -> None:
    """Form the matrix products of a scoring.

    Args:
        queries: The queries' gradients by layer, in the form that scores cheapest.
        held: The training gradients by block and layer.
    """
    from gradtrail.factors import GramMemo, cross_gram

    memo = GramMemo()
    for layers in held:
        total = None
        for layer, gradient in layers.items():
            part = cross_gram(gradient, queries[layer], memo=memo)
            total = part if total is None else total.add_(part)
        memo.clear()


def synthetic(path: Path, rows: int, layers: int, entries: int, blocks: int) -> None:
    """Write a store of random gradients that are written out, as projected ones are.

    Args:
        path: Its folder.
        rows: Examples a block.
        layers: Number of layers.
        entries: Numbers a layer and example.
        blocks: Number of blocks.
    """
    from gradtrail.factors import DenseGradient, GradientBlock
    from gradtrail.store import GradientStore

    with GradientStore(path) as store:
        store.define(id_scheme="index")
        for step in range(blocks):
            values = torch.randn(layers, rows, entries)
            found = {
                f"layer.{number}": DenseGradient(one, (1, entries))
                for number, one in enumerate(values)
            }
            ids = tuple(range(step * rows, (step + 1) * rows))
            store.append(GradientBlock(step, ids, found))


def written_queries(store: Any, work: workloads.Workload) -> dict[str, Any]:  # noqa: ANN401
    """The queries' gradients in the form that scores cheapest."""
    from gradtrail.attribution.queries import QuerySide

    side = QuerySide(len(store), work.num_train, budget=1 << 30, norms=False)
    for stored in store.blocks():
        for layer in stored.block.layers:
            side.add(stored.row, layer, stored.block.layers[layer])
    side.finish()
    return side.layers


def in_memory(store: Any) -> list[dict[str, Any]]:  # noqa: ANN401
    """Every block's gradients, copied out of the store."""
    from gradtrail.factors import map_tensors

    return [
        {
            layer: map_tensors(gradient, torch.clone)
            for layer, gradient in stored.block.layers.items()
        }
        for stored in store.blocks()
    ]


def forget(paths: list[Path]) -> None:
    """Drop files from the page cache, so that the next read comes from the disk."""
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def child(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run one contestant in a process of its own."""
    command = [sys.executable, __file__, "--run", name, "--model", options.model]
    command += ["--tokens", str(options.tokens), "--num-train", str(options.num_train)]
    command += ["--threads", str(options.threads)] + (["--cold"] if options.cold else [])
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return json.loads(done.stdout.strip().splitlines()[-1])


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Compare a contestant with its baseline."""
    if name in READERS:
        return child(name, options)
    base = WRITERS[name]
    pairs = [(child(base, options), child(name, options)) for _ in range(options.pairs)]
    ratios = {
        clock: [held[clock] / bare[clock] for bare, held in pairs] for clock in ("wall", "cpu")
    }
    return {
        "contestant": name,
        "baseline": base,
        "model": options.model,
        "tokens": options.tokens,
        "mib": round(pairs[-1][1]["mib"]),
        "wall_ratio": round(statistics.median(ratios["wall"]), 3),
        "wall_ratios": [round(ratio, 3) for ratio in ratios["wall"]],
        "cpu_ratio": round(statistics.median(ratios["cpu"]), 3),
        "seconds": [(round(bare["wall"], 2), round(held["wall"], 2)) for bare, held in pairs],
    }


def main() -> None:
    """Read the command line and measure, or run one contestant."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [*RUNS, *READERS]
    parser.add_argument("--run", choices=names, help="run this one here and print its figures")
    parser.add_argument("--model", choices=("gpt2", "llama"), default="gpt2")
    parser.add_argument("--tokens", type=int, default=128, help="positions an example")
    parser.add_argument("--num-train", type=int, default=256, help="training examples")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=3, help="alternating pairs of runs")
    parser.add_argument("--cold", action="store_true", help="read from the disk, not its cache")
    parser.add_argument("--only", nargs="*", choices=names, help="measure these only")
    parser.add_argument("--output", type=Path, help="write the figures to this JSON file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.run:
        work = workloads.Workload(options.model, options.tokens, options.num_train)
        run = options.run
        print(
            json.dumps(read(run, work, cold=options.cold) if run in READERS else write(run, work))
        )
        return
    results = []
    for name in options.only or [*WRITERS, *READERS]:
        results.append(measure(name, options))
        print(json.dumps(results[-1]), flush=True)
    if options.output:
        options.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
