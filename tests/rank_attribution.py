"""What the processes of ``test_many_processes`` run: attribution by every rank together."""

import contextlib
import os
import signal
import warnings
from functools import partial
from pathlib import Path

import torch
from rank_models import build, full, wrap
from safetensors.torch import save_model
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
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
        {name: value * (1.1 + 0.1 * step) for name, value in plain.items()} for step in range(steps)
    ]


def points(name, model, steps, form):
    """The same checkpoints as state dicts of the plain model, of this one, files or callables."""
    if form == "own":
        found = states(model, steps)
        with torch.no_grad():
            model(**collate(make_rows(2)))  # after which FSDP1 keeps some parameters whole
        return found
    plain = states(model_of(name), steps)
    if form == "callables":
        return [lambda _, state=state: state for state in plain]
    if form == "loaders":
        whole = StateDictOptions(full_state_dict=True)
        return [
            partial(set_model_state_dict, model_state_dict=state, options=whole) for state in plain
        ]
    if form != "plain":
        for number, state in enumerate(plain):
            place = Path(form) / f"{number}-{rank()}"
            place.mkdir(parents=True)
            save_model(_holding(name, state), str(place / "model.safetensors"))
        return [Path(form) / f"{number}-{rank()}" for number in range(steps)]
    return plain


def _holding(name, state):
    model = model_of(name)
    model.load_state_dict(state)
    return model


def pairs(count, seed=0):
    """Vectors at different numbers of positions, with others to be predicted."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for number in range(count):
        vectors = torch.randn(2 + number % 3, 9, generator=generator, dtype=torch.float64)
        found.append((vectors[:, :6], vectors[:, 6:]))
    return found


def padded(rows):
    """Zeros behind the shorter ones: they count too, so that passes take one row at a time."""
    return tuple(torch.nn.utils.rnn.pad_sequence(side, True) for side in zip(*rows, strict=True))


def drawn(model, batch, generator):
    """Labels from the model's own distribution, by a sampler of the user's."""
    chances = model(**{k: v for k, v in batch.items() if k != "labels"}).logits.softmax(-1)
    numbers = torch.rand(len(chances), generator=generator, dtype=chances.dtype)
    return {**batch, "labels": (numbers > chances[:, 0]).long()}


DATA = {"classifier": (partial(make_rows, classes=2), collate), "regressor": (pairs, padded)}


def scores_of(model, calls, rows=None, name="gpt2"):
    """Scores of one call after another."""
    found = []
    made, joins = DATA.get(name, (make_rows, collate))
    rows = made if rows is None else rows
    for call in calls:
        call = {"batch_size": 2, **call}
        n, q, alone = call.pop("n"), call.pop("q", 3), call.pop("alone", False)
        if "checkpoints" in call:
            form = call.pop("form", "plain")
            call["checkpoints"] = points(name, model, call["checkpoints"], form)
        if "label_sampler" in call:
            call["label_sampler"] = drawn
        shared = {"collate_fn": joins, "progress": False, **call}
        with quiet():
            if alone:
                scores = gradtrail.self_influence(model, rows(n), **shared)
            else:
                scores = gradtrail.attribute(model, rows(n), made(q, seed=5), **shared)
        found.append(results_of(scores))
    return found


def scores(name, how, per_block, calls):
    return scores_of(model_of(name, how, per_block), calls, name=name)


def gradients(model):
    """Copies; None where FSDP1 keeps nothing of a parameter here."""
    grads = [parameter.grad for parameter in model.parameters()]
    return [None if grad is None else full(grad).clone() for grad in grads]


def leaves_as_found(name, how, per_block, calls):
    """In the middle of a training: gradients, flags, modes and the training after it."""
    made, joins = DATA.get(name, (make_rows, collate))
    model, other = model_of(name, how, per_block), model_of(name, how, per_block)
    results, batch = [], joins(made(4, seed=7))
    for one in (model, other):
        optimizer = torch.optim.AdamW(one.parameters(), lr=1e-2)
        for step in range(2):
            one.train()
            one(**batch).loss.backward()
            if one is model:
                grads = gradients(one)
                scores_of(one, calls, name=name)
                for parameter, grad, now in zip(
                    one.parameters(), grads, gradients(one), strict=True
                ):
                    assert parameter.requires_grad
                    assert (grad is None) is (now is None)
                    assert grad is None or torch.equal(now, grad)
                assert all(module.training for module in one.modules())
            optimizer.step()
            optimizer.zero_grad(set_to_none=step == 0)
        results.append([full(parameter).detach().clone() for parameter in one.parameters()])
    for mine, theirs in zip(*results, strict=True):
        assert torch.equal(mine, theirs)


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


def by_length(count):
    """The short rows first, so that ranks alone would choose different forms."""
    return sorted(make_rows(count), key=lambda row: len(row["input_ids"]))


def forms(how, folder):
    """Kinds of gradients that are stored of each layer."""
    stores = cached(
        model_of("llama", how, per_block=True), folder, 8, by_length, method="ekfac", capture="auto"
    )
    return {name: list(facts.kinds) for name, facts in stores.train.layers.items()}


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
    elif what == "options of self-influence":
        call |= {"alone": True, "damping": 0.1 + rank()}
    elif what == "layers of self-influence":
        call |= {"alone": True, "layers": ["*.h.0", "*.h.1"][rank()]}
    elif what == "gathering":
        call["gather"] = ["all", "rank0"][rank()]
    elif what == "projection":
        call["projection"] = gradtrail.Projection(dim=3, seed=rank())
    elif what == "checkpoints":
        call |= {"method": "tracin", "checkpoints": 1 + rank()}
    elif what == "weights of checkpoints":
        call |= {"method": "tracin", "checkpoints": 1, "checkpoint_weights": [0.1 + rank()]}
    return scores_of(model, [call])


def wrong_checkpoint(how, wrong):
    """A checkpoint of another model."""
    model = model_of("gpt2", how, per_block=True)
    (state,) = states(model_of("gpt2"), 1)
    wpe = state.pop("transformer.wpe.weight")
    if wrong != "none":
        state["transformer.wpe.weight"] = wpe if wrong == "a name" else torch.zeros(16, 9)
    if wrong == "a name":
        state["other"] = wpe
    gradtrail.attribute(model, make_rows(2), make_rows(1), method="tracin", checkpoints=[state])


def call_with(how, call):
    return scores_of(model_of("gpt2", how), [call])
