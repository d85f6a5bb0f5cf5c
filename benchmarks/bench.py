"""Ratios to one bare forward and backward, in CPU and wall seconds, run in pairs.

Every run is a process of its own. A contestant's run stands between two bare runs' places in
time and is divided by its neighbour, so a machine whose speed drifts still compares like with like.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Problem:
    """One contestant on one workload, with the ratio it is held to.

    Attributes:
        contestant: Name in ``contestants.py``, or ``"peer:LIBRARY:METHOD"``.
        model: ``"gpt2"`` or ``"llama"``.
        tokens: Positions an example.
        target: Largest ratio of CPU seconds to the bare pass, or None.
    """

    contestant: str
    model: str
    tokens: int
    target: float | None = None


PROBLEMS = [
    Problem("bare-no-weights", "gpt2", 128),
    Problem("bare-no-weights", "llama", 128),
    Problem("graddot", "gpt2", 128, 1.05),
    Problem("graddot", "llama", 128, 1.0),
    Problem("graddot-projected", "llama", 128, 0.85),
    Problem("graddot", "gpt2", 32, 1.3),
    Problem("graddot", "llama", 32, 1.3),
    Problem("gradcos", "gpt2", 128),
    Problem("kfac", "gpt2", 128, 1.8),
    Problem("ekfac", "gpt2", 128, 3.0),
    Problem("kfac", "llama", 128, 1.6),
    Problem("ekfac", "llama", 128, 2.7),
    Problem("kfac-streamed", "gpt2", 128, 2.8),
    Problem("ekfac-streamed", "gpt2", 128, 4.5),
]

# Methods by library, the modules ``peer_LIBRARY.py``.
PEERS = {
    "dattri_llm": ("graddot", "kfac", "ekfac", "kfac-memory", "ekfac-memory"),
    "kronfluence": ("kfac", "ekfac"),
    "bergson": ("kfac", "ekfac"),
}


def run_once(contestant: str, problem: Problem, options: argparse.Namespace) -> dict[str, float]:
    """Run one process and read its figures."""
    python, script = sys.executable, [str(HERE / "contestants.py"), contestant]
    if contestant.startswith("peer:"):
        _, library, method = contestant.split(":")
        python = options.peer_python[library]
        script = [str(HERE / f"peer_{library}.py"), "--method", method]
    command = [python, *script, "--model", problem.model, "--tokens", str(problem.tokens)]
    command += ["--num-train", str(options.num_train), "--threads", str(options.threads)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(options.threads)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return json.loads(done.stdout.strip().splitlines()[-1])


def measure(problem: Problem, options: argparse.Namespace) -> dict[str, object]:
    """Alternate the bare pass and a contestant and take the median of the pairs."""
    pairs = []
    for _ in range(options.repeats):
        bare = run_once("bare", problem, options)
        pairs.append((bare, run_once(problem.contestant, problem, options)))
    ratios = {
        clock: statistics.median(mine[clock] / bare[clock] for bare, mine in pairs)
        for clock in ("cpu", "wall")
    }
    spread = [mine["cpu"] / bare["cpu"] for bare, mine in pairs]
    return {
        **vars(problem),
        "cpu_ratio": round(ratios["cpu"], 3),
        "wall_ratio": round(ratios["wall"], 3),
        "cpu_ratio_range": [round(min(spread), 3), round(max(spread), 3)],
        "bare_cpu_seconds": round(statistics.median(bare["cpu"] for bare, _ in pairs), 2),
        "peak_mib_above_bare": round(
            statistics.median(mine["peak_mib"] - bare["peak_mib"] for bare, mine in pairs)
        ),
    }


def matmul_rate(threads: int) -> float:
    """Measure this machine's float32 matrix-product rate in GFLOP/s of wall time."""
    torch.set_num_threads(threads)
    import time

    x, y = torch.randn(1024, 1024), torch.randn(1024, 1024)
    best = float("inf")
    for _ in range(20):
        start = time.perf_counter()
        x @ y
        best = min(best, time.perf_counter() - start)
    return 2 * 1024**3 / best / 1e9


def main() -> None:
    """Measure every problem, print a table and write the results file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--num-train", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="64 examples, one pair each")
    parser.add_argument(
        "--peer-python",
        action="append",
        default=[],
        metavar="LIBRARY=INTERPRETER",
        help=f"interpreter of a venv that has one of {', '.join(PEERS)}; may be repeated",
    )
    parser.add_argument("--only", help="measure problems whose contestant:model:tokens holds this")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if options.quick:
        options.repeats, options.num_train = 1, 64
    options.peer_python = dict(pair.split("=", 1) for pair in options.peer_python)
    problems = PROBLEMS + [
        Problem(f"peer:{library}:{method}", model, tokens)
        for library in options.peer_python
        for method in PEERS[library]
        for model, tokens in (("gpt2", 128), ("llama", 128), ("gpt2", 32))
        if tokens == 128 or method == "graddot"
    ]
    if options.only:
        problems = [
            problem
            for problem in problems
            if options.only in f"{problem.contestant}:{problem.model}:{problem.tokens}"
        ]
    rate = matmul_rate(options.threads)
    print(
        f"{platform.processor() or platform.machine()}, {options.threads} threads, "
        f"float32 products {rate:.0f} GFLOP/s, load {os.getloadavg()[0]:.1f}"
    )
    print(f"{'contestant':<28} {'model':<6} {'tokens':>6} {'cpu':>6} {'wall':>6} {'target':>6}")
    results = []
    for problem in problems:
        row = measure(problem, options)
        results.append(row)
        target = "" if problem.target is None else f"{problem.target:.2f}"
        print(
            f"{problem.contestant:<28} {problem.model:<6} {problem.tokens:>6} "
            f"{row['cpu_ratio']:>6.2f} {row['wall_ratio']:>6.2f} {target:>6}",
            flush=True,
        )
    if options.output:
        header = {
            "torch": torch.__version__,
            "threads": options.threads,
            "num_train": options.num_train,
            "gflops": round(rate),
        }
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps({**header, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
