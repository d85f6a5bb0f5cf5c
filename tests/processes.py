"""Real processes for tests: started once, they run one check after another in groups of any size.

One process imports what the checks need and is forked for every rank, and again for one that dies.
The test holds the store, as ``torchrun`` does; orders and answers go through it. Every run makes a
process group of its own; if somebody dies or does not answer in time, all are killed, and the next
run starts others.
"""

import datetime
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch
from torch import distributed as dist

START = 60.0  # seconds until everything is imported
LIMIT = 40.0  # seconds for one check on a busy machine
GROUP_LIMIT = 20.0  # seconds that a collective waits
IDLE = datetime.timedelta(hours=1)
WRAPPED = [  # how a model is given to ``model_of``, and whether a unit is a block
    ("plain", False),
    ("ddp", False),
    ("fsdp1", False),
    ("fsdp1", True),
    ("fully_shard", False),
    ("fully_shard", True),
]
MODELS = ["transformers.models.gpt2.modeling_gpt2", "transformers.models.llama.modeling_llama"]


def assert_near(got, wanted, tolerance=1e-6):
    """Compare lists of numbers, relative to the largest."""
    got, wanted = torch.tensor(got), torch.tensor(wanted)
    assert got.shape == wanted.shape
    if got.numel():
        assert wanted.abs().max() > 0
        assert float((got - wanted).abs().max()) <= tolerance * float(wanted.abs().max())


class Workers:
    """Processes that wait for checks: functions of a module of the tests, by name."""

    def __init__(self, count, module, preload=()):
        self._arguments = (count, module, preload)
        self._start(*self._arguments)

    def _start(self, count, module, preload):
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.runs, self.sent, self.deaths = 0, [0] * count, [0] * count
        self.output = tempfile.TemporaryFile()  # noqa: SIM115  # closed at the end
        here = Path(__file__).resolve()
        paths = [os.environ.get("PYTHONPATH"), str(here.parent)]
        self.process = subprocess.Popen(
            [sys.executable, str(here), str(self.store.port), str(count), module, *preload],
            stdout=self.output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # one signal ends all
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "HF_HUB_OFFLINE": "1",
                "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            },
        )
        for number in range(count):
            self._await(f"ready/{number}", START)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.output.close()

    def run(self, check, *, world=2, limit=LIMIT, **arguments):
        """Run a check in a group of some size; what it returns, by rank."""
        found = self.try_run(check, world=world, limit=limit, **arguments)
        for number, answer in enumerate(found):
            assert "value" in answer, f"rank {number}: {answer}"
        return [answer["value"] for answer in found]

    def try_run(self, check, *, world=2, limit=LIMIT, lost=(), **arguments):
        """The same, with ``{"value": ...}`` or ``{"error": text}`` of every rank.

        Ranks that are ``lost`` are expected to die, and give None.
        """
        if self.output.closed:  # a test before this one had to end them
            self._start(*self._arguments)
        self.runs += 1
        order = {"check": check, "world": world, "run": self.runs, "arguments": arguments}
        for number in range(world):
            self.store.set(f"next/{number}", str(self.sent[number] + 1))
            self.store.set(f"order/{number}/{self.sent[number]}", json.dumps(order))
        deadline, found = time.monotonic() + limit, []
        for number in range(world):
            left = deadline - time.monotonic()
            if number in lost:
                self._await(f"lost/{number}/{self.deaths[number]}", left)
                self.deaths[number] += 1
                found.append(None)
            else:
                key = f"answer/{number}/{self.sent[number]}"
                death = f"lost/{number}/{self.deaths[number]}"  # nobody will answer then
                found.append(json.loads(self._await(key, left, unless=death)))
            self.sent[number] += 1
        return found

    def _await(self, key, limit, unless=None):
        deadline = time.monotonic() + limit
        while not self.store.check([key]):
            died = unless is not None and self.store.check([unless])
            if died or time.monotonic() > deadline or self.process.poll() is not None:
                self.output.seek(0)
                said = self.output.read().decode(errors="replace")
                self.__exit__()
                why = self.store.get(unless).decode() if died else "not in time"
                raise AssertionError(f"no {key}, {why}: {said}")
            time.sleep(0.002)
        return self.store.get(key)


def _fork_all(port, count, *modules):
    """Import, then keep one process a rank alive."""
    torch.set_num_threads(1)
    checks, *_ = [importlib.import_module(module) for module in modules]
    ranks = {_fork(checks, port, number, 0): number for number in range(count)}
    deaths = [0] * count
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    while True:
        pid, status = os.waitpid(-1, 0)
        number = ranks.pop(pid)
        ranks[_fork(checks, port, number, int(store.get(f"next/{number}")))] = number
        how = os.waitstatus_to_exitcode(status)
        store.set(f"lost/{number}/{deaths[number]}", f"its process ended with {how}")
        deaths[number] += 1


def _fork(checks, port, number, place):
    pid = os.fork()
    if not pid:
        try:
            _serve(checks, port, number, place)
        finally:
            os._exit(1)
    return pid


def _serve(checks, port, number, place):
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=IDLE)
    store.set(f"ready/{number}", "1")
    while True:
        order = json.loads(store.get(f"order/{number}/{place}"))
        store.set(f"answer/{number}/{place}", json.dumps(_answer(checks, store, number, order)))
        place += 1


def _answer(checks, store, number, order):
    try:
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(str(order["run"]), store),
            rank=number,
            world_size=order["world"],
            timeout=datetime.timedelta(seconds=GROUP_LIMIT),
        )
        # who leaves before the others have connected would close what they are connecting to
        joined = f"joined/{order['run']}"
        if store.add(joined, 1) == order["world"]:
            store.set(f"{joined}/all", "1")
        store.wait([f"{joined}/all"], datetime.timedelta(seconds=GROUP_LIMIT))
        torch.manual_seed(0)
        return {"value": getattr(checks, order["check"])(**order["arguments"])}
    except Exception as error:  # noqa: BLE001  # the test tells
        return {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    _fork_all(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
