"""What the processes of ``test_many_processes`` run: attribution by every rank together."""

import contextlib
import os
import signal
import warnings

import torch
from rank_models import build, wrap
from training import collate, make_rows

import gradtrail
from gradtrail.distributed import rank
from gradtrail.store import GradientStore


def model_of(name, how="plain", per_block=False):
    plain, kind = build(name)
    return plain if how == "plain" else wrap(plain, kind, how, per_block)


@contextlib.contextmanager
def quiet():
    """Some layers of these models hold no examples, which is said each time."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*layers are left out")
        warnings.filterwarnings("ignore", ".*did not reach cg_tolerance")
        yield


def one_result(scores):
    return {
        "values": scores.values.tolist(),
        "lengths": None if scores.lengths is None else scores.lengths.tolist(),
        "ids": list(scores.train_ids),
        "digests": {k: v for k, v in scores.options.items() if k.endswith("_digest")},
    }


def results_of(scores):
    """Scores as plain lists, one set a damping."""
    if scores is None or isinstance(scores, torch.Tensor):
        return scores if scores is None else scores.tolist()
    several = scores.values() if isinstance(scores, dict) else [scores]
    return [one_result(one) for one in several]


def states(model, steps):
    """Checkpoints that differ from the model."""
    plain = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return [
        {name: value * (1 + 0.1 * step) for name, value in plain.items()} for step in range(steps)
    ]


def scores_of(model, calls, rows=make_rows):
    """Scores of one call after another."""
    found = []
    for call in calls:
        call = {"batch_size": 2, **call}
        n, q, alone = call.pop("n"), call.pop("q", 3), call.pop("alone", False)
        if "checkpoints" in call:
            call["checkpoints"] = states(model, call["checkpoints"])
        shared = {"collate_fn": collate, "progress": False, **call}
        with quiet():
            if alone:
                scores = gradtrail.self_influence(model, rows(n), **shared)
            else:
                scores = gradtrail.attribute(model, rows(n), make_rows(q, seed=5), **shared)
        found.append(results_of(scores))
    return found


def scores(name, how, per_block, calls):
    return scores_of(model_of(name, how, per_block), calls)


# ---------------------------------------------------------------- stores


def cached(model, folder, n, rows=make_rows, **options):
    with quiet():
        return gradtrail.cache(
            model,
            rows(n),
            make_rows(3, seed=5),
            cache_dir=folder,
            collate_fn=collate,
            progress=False,
            **{"batch_size": 2, **options},
        )


def write(name, how, per_block, folder, n, fails_at=None, dies=False, **options):
    def rows(count):
        # the first time a row is read it is for the digest of the data
        return Failing(make_rows(count), fails_at, dies, reads=1)

    stores = cached(model_of(name, how, per_block), folder, n, rows, **options)
    return [len(store) for store in stores]


def read(folder, calls):
    train = GradientStore(f"{folder}/train", mode="read")
    query = GradientStore(f"{folder}/query", mode="read")
    found = []
    for call in calls:
        call = dict(call)
        if call.pop("alone", False):
            found.append(
                gradtrail.self_influence_from_cache(train, progress=False, **call).tolist()
            )
            continue
        scores = gradtrail.attribute_from_cache(train, query, progress=False, **call)
        if "top_k" in call:
            found.append([scores.indices.tolist(), scores.values.tolist(), scores.ids])
        else:
            found.append(results_of(scores))
    return found


# ---------------------------------------------------------------- fits


class Counting(list):
    """Rows that count how often one is read."""

    reads = 0

    def __getitem__(self, number):
        self.reads += 1
        return super().__getitem__(number)


def fits(name, how, folder):
    """A fit is made once, remembered, saved once and loaded: scores and rows that were read."""
    model, rows, query = model_of(name, how), Counting(make_rows(9)), make_rows(3, seed=5)
    options = {"batch_size": 2, "collate_fn": collate, "progress": False}
    found = []
    with quiet(), gradtrail.EKFACAttributor(model, **options) as bound:
        fit = bound.fit(rows, fisher_dir=folder)
        found.append(sorted(fit.records))
        before = rows.reads
        again = bound.fit(rows, fisher_dir=folder)
        assert again is fit
        found.append(rows.reads - before)  # digests alone
        found.append(bound.attribute(rows, query, fisher_dir=folder).values.tolist())
    return found


# ---------------------------------------------------------------- errors


class Failing(list):
    """Rows of which one can be read a few times only; the way it fails may be a signal."""

    def __init__(self, rows, at, dies=False, reads=0):
        super().__init__(rows)
        self.at, self.dies, self.reads = at, dies, reads

    def __getitem__(self, number):
        self.reads -= number == self.at
        if self.reads < 0:
            if self.dies:
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(f"row {number} cannot be read")
        return super().__getitem__(number)


def failing(name, how, method, at, dies=False):
    """A rank fails in the middle of its share."""

    def rows(count):
        return Failing(make_rows(count), at, dies)

    return scores_of(model_of(name, how, per_block=True), [{"n": 16, "method": method}], rows)


def failing_and_exit(**arguments):
    """The same, in a process that ends as one does that nobody catches the error of."""
    try:
        failing(**arguments)
    except OSError:
        os._exit(1)


def differing(what):
    """Ranks that were called with different arguments."""
    model = model_of("gpt2")
    call = {"n": 9, "method": "kfac"}
    if what == "weights" and rank():
        with torch.no_grad():
            next(model.parameters()).mul_(2)
    elif what == "rows":
        call["n"] += rank()
    elif what == "options":
        call["damping"] = 0.1 + rank()
    return scores_of(model, [call])


def call_with(how, call):
    return scores_of(model_of("gpt2", how), [call])
