"""Real processes for tests: started once, they run one check after another in groups of any size.

The parent holds the store, as ``torchrun`` does, so a process that dies takes nothing with it.
Every run makes a process group of its own; who does not answer in time is killed, with the others.
"""

import datetime
import importlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path

import torch
from torch import distributed as dist

START = 60.0  # seconds until every process has imported torch
LIMIT = 40.0  # seconds for one check on a busy machine
GROUP_LIMIT = 20.0  # seconds that a collective waits


class Workers:
    """Processes that wait for checks: functions of a module of the tests, by name."""

    def __init__(self, count, module):
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.runs = 0
        here = Path(__file__).resolve().parent
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": os.pathsep.join(
                [*filter(None, [os.environ.get("PYTHONPATH")]), str(here)]
            ),
        }
        command = [sys.executable, str(Path(__file__)), module, str(self.store.port)]
        self.processes = [
            subprocess.Popen(
                [*command, str(number)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=environment,
                encoding="utf-8",
            )
            for number in range(count)
        ]
        self.threads = []
        self.lines = [queue.Queue() for _ in self.processes]
        for process, lines in zip(self.processes, self.lines, strict=True):
            thread = threading.Thread(target=_read, args=(process.stdout, lines), daemon=True)
            thread.start()
            self.threads.append(thread)
        for number in range(count):
            self._answer(number, time.monotonic() + START)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.wait()
        for thread in self.threads:
            thread.join()
        for process in self.processes:
            process.stdin.close()
            process.stdout.close()

    def run(self, check, *, world=2, limit=LIMIT, lost=(), **arguments):
        """Run a check in a group of some size; what it returns, by rank.

        Ranks that are ``lost`` are expected to die; a check that raises fails the test.
        """
        found = self.try_run(check, world=world, limit=limit, lost=lost, **arguments)
        for number, answer in enumerate(found):
            assert number in lost or "value" in answer, f"rank {number}: {answer}"
        return [None if number in lost else answer["value"] for number, answer in enumerate(found)]

    def try_run(self, check, *, world=2, limit=LIMIT, lost=(), **arguments):
        """The same, with ``{"value": ...}`` or ``{"error": text}`` of every rank."""
        self.runs += 1
        order = {"check": check, "world": world, "run": self.runs, "arguments": arguments}
        for process in self.processes[:world]:
            process.stdin.write(json.dumps(order) + "\n")
            process.stdin.flush()
        deadline = time.monotonic() + limit
        found = []
        for number in range(world):
            if number in lost:
                assert self.processes[number].wait(limit)
                found.append(None)
            else:
                found.append(self._answer(number, deadline))
        return found

    def _answer(self, number, deadline):
        said = []
        while True:
            try:
                line = self.lines[number].get(timeout=max(0.01, deadline - time.monotonic()))
            except queue.Empty:
                self.__exit__()
                raise AssertionError(f"rank {number} did not answer: {''.join(said)}") from None
            if line is None:
                raise AssertionError(f"rank {number} ended: {''.join(said)}")
            if line.startswith("ANSWER "):
                return json.loads(line[7:])
            said.append(line)


def _read(stream, lines):
    for line in stream:
        lines.put(line)
    lines.put(None)


def _answer(value):
    sys.stdout.write("ANSWER " + json.dumps(value) + "\n")
    sys.stdout.flush()


def _serve(module, port, number):
    torch.set_num_threads(1)
    checks = importlib.import_module(module)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    _answer("ready")
    for line in sys.stdin:
        order = json.loads(line)
        try:
            dist.init_process_group(
                "gloo",
                store=dist.PrefixStore(str(order["run"]), store),
                rank=number,
                world_size=order["world"],
                timeout=datetime.timedelta(seconds=GROUP_LIMIT),
            )
            torch.manual_seed(0)
            value = getattr(checks, order["check"])(**order["arguments"])
            _answer({"value": value})
        except Exception as error:  # noqa: BLE001  # the parent tells
            text = f"{type(error).__name__}: {error}"
            _answer({"error": text, "trace": traceback.format_exc()})
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
