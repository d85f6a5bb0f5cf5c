"""What the processes of ``test_many_processes`` run: attribution by every rank together."""

import warnings

from rank_models import build, wrap
from training import collate, make_rows

import gradtrail
from gradtrail.distributed import rank
from gradtrail.store import GradientStore


def model_of(name, how="plain", per_block=False):
    plain, kind = build(name)
    return plain if how == "plain" else wrap(plain, kind, how, per_block)


def one_result(scores):
    return {
        "values": scores.values.tolist(),
        "lengths": None if scores.lengths is None else scores.lengths.tolist(),
        "digests": {k: v for k, v in scores.options.items() if k.endswith("_digest")},
    }


def results_of(scores):
    """Scores as plain lists, one set a damping."""
    if scores is None:
        return None
    several = scores.values() if isinstance(scores, dict) else [scores]
    return [one_result(one) for one in several]


def scores_of(model, calls):
    """Scores of one call after another."""
    found = []
    for call in calls:
        call = dict(call)
        n, q = call.pop("n"), call.pop("q", 3)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*layers are left out")
            scores = gradtrail.attribute(
                model,
                make_rows(n),
                make_rows(q, seed=5),
                collate_fn=collate,
                progress=False,
                **{"batch_size": 2, **call},
            )
        found.append(results_of(scores))
    return found


def scores(name, how, per_block, calls):
    return scores_of(model_of(name, how, per_block), calls)


def cached(model, folder, n, q=3, **options):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*layers are left out")
        return gradtrail.cache(
            model,
            make_rows(n),
            make_rows(q, seed=5),
            cache_dir=folder,
            collate_fn=collate,
            progress=False,
            **{"batch_size": 2, **options},
        )


def write(name, how, per_block, folder, n, **options):
    stores = cached(model_of(name, how, per_block), folder, n, **options)
    return [len(store) for store in stores]


def read(folder, calls):
    train = GradientStore(f"{folder}/train", mode="read")
    query = GradientStore(f"{folder}/query", mode="read")
    found = []
    for call in calls:
        scores = gradtrail.attribute_from_cache(train, query, progress=False, **call)
        if "top_k" in call:
            found.append([scores.indices.tolist(), scores.values.tolist(), scores.ids])
        else:
            found.append(results_of(scores))
    return found
