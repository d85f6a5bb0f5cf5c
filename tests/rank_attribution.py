"""What the processes of ``test_many_processes`` run: attribution by every rank together."""

import warnings

import torch
from rank_models import build, wrap
from training import collate, make_rows

import gradtrail


def data(count, *, seed=0):
    return make_rows(count, seed=seed)


def scores_of(model, calls, folder=None):
    """Scores of one call after another, as lists."""
    found = []
    for call in calls:
        call = dict(call)
        train, query = data(call.pop("n")), data(call.pop("q", 3), seed=5)
        batch = call.pop("batch", 2)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*layers are left out")
            scores = gradtrail.attribute(
                model, train, query, collate_fn=collate, batch_size=batch, progress=False, **call
            )
        if scores is None:
            found.append(None)
            continue
        several = scores if isinstance(scores, dict) else {0.0: scores}
        found.append(
            [
                {
                    "values": one.values.tolist(),
                    "lengths": None if one.lengths is None else one.lengths.tolist(),
                    "digests": {k: v for k, v in one.options.items() if k.endswith("_digest")},
                }
                for one in several.values()
            ]
        )
    return found


def model_of(name, how, per_block):
    plain, kind = build(name)
    return plain if how == "plain" else wrap(plain, kind, how, per_block)


def scores(name, how, per_block, calls):
    return scores_of(model_of(name, how, per_block), calls)
