"""Trajectory methods against retraining by a second loop, which knows nothing of the package.

The model's likelihood is linear in its parameters, so that the Hessian of its negative logarithm is
the outer product of the gradient with itself, exactly. It has a tied matrix, an embedding, a norm,
several positions a row and two groups of parameters.
"""

import copy
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import nn

import gradtrail
from gradtrail import (
    GradientStore,
    GradTrailCallback,
    HookManager,
    OptimizerSnapshot,
    Projection,
    StepStore,
)
from gradtrail.callbacks import OffloadCallback, OptimizerStateCallback
from gradtrail.factors import to_dense

STEPS, ROWS = 20, 10
ADAMW = {"lr": 0.02}


class Likelihood(nn.Module):
    def __init__(self, tied=True):
        super().__init__()
        self.dense = nn.Linear(4, 3)
        self.norm = nn.LayerNorm(4)
        self.table = nn.Embedding(6, 2)
        self.one = nn.Linear(3, 2, bias=False)
        self.two = nn.Linear(3, 2, bias=False)
        if tied:
            self.two.weight = self.one.weight
        generator = torch.Generator().manual_seed(5)
        for parameter in self.parameters():
            parameter.data = drawn(generator, parameter.shape) / 2 + 0.3
        for name, size in (("dense", 3), ("norm", 4), ("table", 2), ("one", 2), ("two", 2)):
            self.register_buffer(f"out_{name}", drawn(generator, (size,)) + 0.2)
        self.left_out = ()

    def forward(self, x, ids):
        """Likelihood of each row. Shape ``[b]``."""
        inputs = {"dense": x, "norm": x / 2, "table": ids, "one": x[..., :3], "two": x[..., 1:]}
        shares = [
            getattr(self, name)(value) @ getattr(self, f"out_{name}")
            for name, value in inputs.items()
            if name not in self.left_out
        ]
        return sum(shares).sum(1)


def drawn(generator, shape):
    return torch.rand(shape, generator=generator, dtype=torch.float64)


def data(count, seed):
    generator = torch.Generator().manual_seed(seed)
    x = drawn(generator, (count, 3, 4)) * 2
    ids = torch.randint(0, 6, (count, 3), generator=generator)
    return [{"x": x[row], "ids": ids[row]} for row in range(count)]


TRAIN, QUERY = data(ROWS, 3), data(3, 4)


def batch_of(rows):
    return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}


def surprise(model, batch):
    """The loss, one value a row."""
    return -model(**batch).log()


def groups(model, decay=0.3, **options):
    """Matrices decay; what has one axis does not and has a rate of its own."""
    flat = [value for value in model.parameters() if value.dim() == 1]
    wide = [value for value in model.parameters() if value.dim() > 1]
    more = options.get("second", {})
    return [
        {"params": flat, "weight_decay": 0.0, "lr": 0.03, **options.get("first", {})},
        {"params": wide, "weight_decay": decay, **more},
    ]


def adamw(model, **options):
    kinds = {key: options.pop(key) for key in ("first", "second") if key in options}
    return torch.optim.AdamW(groups(model, **kinds), **{**ADAMW, **options})


def sgd(model, decay=0.0, lr=0.01):
    return torch.optim.SGD(
        groups(model, decay, first={"lr": lr / 2, "weight_decay": 2 * decay}), lr=lr
    )


@dataclass
class Loop:
    """A training: how the optimizer is made and what a step is.

    Attributes:
        make: Makes the optimizer of a model.
        sizes: Rows of each backward of a step.
        reduction: Of the loss of a backward, ``"mean"`` or ``"sum"``.
        clip: Largest norm of a gradient, or None.
        factors: What clipping multiplied each step's gradient with.
        repeated: Whether the first row of each backward is its last as well.
        without: Steps that do not reach the dense layer and the table.
    """

    make: object
    sizes: tuple = (5, 3)
    reduction: str = "mean"
    clip: float | None = None
    factors: list = field(default_factory=list)
    repeated: bool = False
    without: tuple = ()

    @property
    def plan(self):
        """Numbers of the rows, by step and backward."""
        generator = torch.Generator().manual_seed(1)
        plan = []
        for _ in range(STEPS):
            order = torch.randperm(ROWS, generator=generator).split([*self.sizes, ROWS - self.rows])
            plan.append([part.tolist() for part in order[:-1]])
        if self.repeated:
            plan = [[[*part, part[0]] for part in step] for step in plan]
        return plan

    @property
    def rows(self):
        return sum(self.sizes)

    @property
    def order(self):
        """Step and row of each row of the result."""
        return [(t, z) for t, step in enumerate(self.plan) for part in step for z in part]

    def run(self, model, optimizer, steps=range(STEPS), weights=None, rates=(1.0, 1.0)):
        """Train; ``weights`` multiplies the loss of a row in a step."""
        for t in steps:
            for group, base in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = base * (1 - t / 30) * min(1, (t + 1) / 4)
            model.left_out = ("dense", "table") if t in self.without else ()
            for part in self.plan[t]:
                values = surprise(model, batch_of([TRAIN[z] for z in part]))
                if weights is not None:
                    values = values * torch.tensor(
                        [weights.get((t, z), 1.0) for z in part], dtype=torch.float64
                    )
                if self.reduction == "sum":
                    values.sum().backward()
                else:
                    (values.mean() / len(self.sizes)).backward()
            self.clipped(model, t)
            optimizer.step()
            optimizer.zero_grad()
        model.left_out = ()
        return model

    def clipped(self, model, t):
        """Clip, by the factor of the first run: what the method holds constant."""
        if self.clip is None:
            return
        if len(self.factors) == t:
            norm = float(nn.utils.get_total_norm([p.grad for p in model.parameters()]))
            self.factors.append(min(1.0, self.clip / norm))
        for parameter in model.parameters():
            parameter.grad.mul_(self.factors[t])

    def trained(self, weights=None):
        model = Likelihood()
        optimizer = self.make(model)
        rates = [group["lr"] for group in optimizer.param_groups]
        return self.run(model, optimizer, weights=weights, rates=rates)

    def retrained(self, model, cases, epsilon=1e-3):
        """What larger weights take off each query's loss, to first order in the parameters."""
        ends = [
            flat(self.trained(dict.fromkeys(cases, 1 + sign * epsilon))) for sign in (1, -1)
        ]  # fmt: skip
        return -(gradients(model, QUERY) @ (ends[0] - ends[1])) / (2 * epsilon)


def flat(model):
    return torch.cat([value.detach().flatten() for value in model.parameters()])


def gradients(model, rows):
    """Every row's gradient by autograd, parameters in the model's order. Shape ``[b, D]``."""
    found = []
    for row in rows:
        loss = surprise(model, batch_of([row])).sum()
        parts = torch.autograd.grad(loss, list(model.parameters()))
        found.append(torch.cat([part.flatten() for part in parts]))
    return torch.stack(found)


@dataclass
class Recorded:
    """What a captured training left: the model at its end and folders."""

    model: nn.Module
    folder: object

    def scores(self, method, **options):
        """Score from stores that are opened again."""
        train = GradientStore(self.folder / "gradients", mode="read")
        states = StepStore(self.folder / "states", mode="read")
        queries = GradientStore(self.folder / "queries" / "train", mode="read")
        return gradtrail.attribute_from_cache(
            train, queries, method=method, optimizer_states=states, progress=False, **options
        )


def record(loop, folder, halves=((0, STEPS),), *, reset=False, dtype=None, every=1):
    """Capture a training as a user would, each part of it in a process of its own, as it were."""
    model = Likelihood()
    optimizer = loop.make(model)
    rates = [group["lr"] for group in optimizer.param_groups]
    end = 0
    for start, stop in halves:
        loop.run(model, optimizer, range(end, start), rates=rates)  # not captured
        if start:
            state, optimizer = optimizer.state_dict(), loop.make(model)
            if not reset:
                optimizer.load_state_dict(state)
        mode = "resume" if start else "create"
        gradients = GradientStore(folder / "gradients", mode=mode, dtype=dtype)
        states = StepStore(folder / "states", mode=mode)
        manager = HookManager(
            model,
            loss_reduction=loop.reduction,
            loss_scale=1 / len(loop.sizes) if loop.reduction == "mean" else None,
            callbacks=[
                OffloadCallback(gradients, every=every),
                OptimizerStateCallback(states, moments="both", every=every),
            ],
        )
        manager.optimizer_steps = start
        with manager.collect(optimizer):
            loop.run(model, optimizer, range(start, stop), rates=rates)
        gradients.close()
        states.close()
        end = stop
    gradtrail.cache(
        model, QUERY, cache_dir=folder / "queries", loss=surprise, progress=False, dtype=dtype
    )
    return Recorded(model, folder)


def errors(loop, recorded, scores, cases):
    """Relative errors against retraining, each case one weight or several at once."""
    found = []
    for case in cases:
        expected = loop.retrained(recorded.model, case)
        rows = [n for n, place in enumerate(loop.order) if place in case]
        got = scores.values[rows].double().sum(0)
        found.append(float((got - expected).norm() / expected.norm()))
    return found


def cases_of(loop, *places):
    """Rows by step and place in the step, and one row in all steps that use it."""
    rows = [[z for part in step for z in part] for step in loop.plan]
    first = rows[0][0]
    return [{(t, rows[t][place])} for t, place in places] + [
        {(t, z) for t, z in loop.order if z == first}
    ]


def own_options(model):
    return adamw(
        model,
        first={"betas": (0.8, 0.9), "eps": 1e-2},
        second={"betas": (0.95, 0.99), "eps": 1e-5},
    )


LOOPS = {
    "mean of uneven parts": Loop(adamw),
    "sum": Loop(adamw, (4, 4), "sum"),
    "row twice in a part": Loop(adamw, (3, 3), repeated=True),
    "betas and eps of a group": Loop(own_options),
    "layers not reached": Loop(adamw, (6,), without=(5, 6, 11, 12, 13, 19)),
}


@pytest.mark.filterwarnings("ignore:No gradient reached dense")
@pytest.mark.parametrize("name", LOOPS)
def test_adamw_scores_are_those_of_retraining(tmp_path, name):
    loop = LOOPS[name]
    recorded = record(loop, tmp_path)
    scores = recorded.scores("adamw")
    assert list(scores.train_steps) == [t for t, _ in loop.order]
    cases = cases_of(loop, (0, 0), (10, -1))
    assert max(errors(loop, recorded, scores, cases)) < 5e-6
    forward = recorded.scores("adamw", direction="train").values
    torch.testing.assert_close(forward, scores.values, rtol=1e-6, atol=1e-10)


def test_clipped_gradients_with_the_factor_held(tmp_path):
    loop = Loop(adamw, clip=0.3)
    recorded = record(loop, tmp_path)
    assert min(loop.factors) < 0.9
    cases = cases_of(loop, (0, 1), (7, -1))
    assert max(errors(loop, recorded, recorded.scores("adamw"), cases)) < 5e-6


def test_records_in_float32_with_a_beta_close_to_one(tmp_path):
    """1 - beta must not be taken in the records' own precision."""
    loop = Loop(lambda model: adamw(model, betas=(0.9, 0.9999)))
    recorded = record(loop, tmp_path, dtype="float32")
    scores = recorded.scores("adamw")
    assert max(errors(loop, recorded, scores, cases_of(loop, (0, 0), (10, 2)))) < 5e-6


@pytest.mark.parametrize(
    "loop",
    [Loop(sgd), Loop(sgd, (4, 4), "sum"), Loop(sgd, (6,), without=(5, 6, 11, 12, 13, 19))],
    ids=["mean", "sum", "not-reached"],
)
@pytest.mark.filterwarnings("ignore:No gradient reached dense")
@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_dvemb_scores_are_those_of_retraining(tmp_path, loop, decay):
    lr = 0.003 if loop.reduction == "sum" else 0.01
    loop = replace(loop, make=lambda model: sgd(model, decay, lr))
    recorded = record(loop, tmp_path)
    cases = cases_of(loop, (0, 0), (10, -1))
    scores = recorded.scores("dvemb", weight_decay=bool(decay))
    assert max(errors(loop, recorded, scores, cases)) < 1e-6
    forward = recorded.scores("dvemb", weight_decay=bool(decay), direction="train").values
    torch.testing.assert_close(forward, scores.values, rtol=1e-6, atol=1e-10)


@pytest.mark.parametrize(("method", "make"), [("adamw", adamw), ("dvemb", sgd)])
def test_training_in_two_halves(tmp_path, method, make):
    """Records of both halves in one store give what one run gives."""
    loop = Loop(make)
    whole = record(loop, tmp_path / "whole").scores(method)
    halves = record(loop, tmp_path / "halves", ((0, 7), (7, STEPS))).scores(method)
    assert whole.train_ids == halves.train_ids
    assert torch.equal(whole.values, halves.values)


@pytest.mark.filterwarnings("ignore:.*must go on where its store ends")
@pytest.mark.parametrize("direction", ["query", "train"])
@pytest.mark.parametrize(("method", "make"), [("adamw", adamw), ("dvemb", sgd), ("dvemb", adamw)])
def test_steps_that_no_store_has_are_missed(tmp_path, method, make, direction):
    """Both stores lack them, so that neither tells of the other."""
    recorded = record(Loop(make), tmp_path, ((0, 3), (6, STEPS)))
    with pytest.raises(ValueError, match="got nothing for 3, 4, 5, which no loss scaler skipped"):
        recorded.scores(method, direction=direction)
    later = recorded.scores(method, direction=direction, selected_steps=[6, 7])
    assert set(later.train_steps) == {6, 7}


def test_steps_that_were_not_counted_are_missed(tmp_path):
    """The loop goes on counting where it stopped, the optimizer does not."""
    loop = Loop(adamw)
    model = Likelihood()
    optimizer = adamw(model)
    gradients, states = GradientStore(tmp_path / "gradients"), StepStore(tmp_path / "states")
    callbacks = [OffloadCallback(gradients), OptimizerStateCallback(states, moments="both")]
    manager = HookManager(model, loss_reduction="mean", loss_scale=0.5, callbacks=callbacks)
    for steps in (range(3), range(5, 8)):
        with manager.collect(optimizer):
            loop.run(model, optimizer, steps)
        loop.run(model, optimizer, range(3, 5))
    queries = gradtrail.cache(
        model, QUERY, cache_dir=tmp_path / "queries", loss=surprise, progress=False
    ).train
    for method, match in (
        ("adamw", "with 3 updates after step 2 and 5 before step 3"),
        ("dvemb", "with 2 updates before step 2 and 5 before step 3"),
    ):
        with pytest.raises(ValueError, match=match):
            gradtrail.attribute_from_cache(
                gradients, queries, method=method, optimizer_states=states, progress=False
            )


def test_optimizer_that_starts_anew_is_refused(tmp_path):
    recorded = record(Loop(adamw), tmp_path, ((0, 7), (7, STEPS)), reset=True)
    with pytest.raises(ValueError, match="7 updates after step 6 and 0 before step 7. Record"):
        recorded.scores("adamw")


def halved(scaler):
    return lambda: scaler.get_scale() / 2


@pytest.mark.parametrize("method", ["adamw", "dvemb"])
def test_loss_scaler_of_the_loop(tmp_path, method):
    """A scaler's part is taken out, also where a function names it; a skipped step is no hole."""
    loop, found = Loop(adamw, (4, 4)), {}
    for scaled in (False, True):
        model = Likelihood()
        optimizer = adamw(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3, enabled=scaled)
        folder = tmp_path / str(scaled)
        gradients, states = GradientStore(folder / "gradients"), StepStore(folder / "states")
        manager = HookManager(
            model,
            loss_reduction="mean",
            loss_scale=halved(scaler) if scaled else 0.5,
            callbacks=[OffloadCallback(gradients), OptimizerStateCallback(states, moments="both")],
        )
        with manager.collect(optimizer):
            for t in range(6):
                for part in loop.plan[t]:
                    values = surprise(model, batch_of([TRAIN[z] for z in part]))
                    scaler.scale(values.mean() / 2).backward()
                if t == 4:
                    if scaled:
                        next(model.parameters()).grad[0, 0] = float("inf")
                        scaler.step(optimizer)
                        scaler.update()
                    manager.skip_optimizer_step()
                else:
                    scaler.step(optimizer)
                    scaler.update()
                optimizer.zero_grad()
        queries = gradtrail.cache(
            model, QUERY, cache_dir=folder / "queries", loss=surprise, progress=False
        ).train
        found[scaled] = gradtrail.attribute_from_cache(
            gradients, queries, method=method, optimizer_states=states, progress=False
        )
    assert sorted(set(found[True].train_steps)) == [0, 1, 2, 3, 5]
    torch.testing.assert_close(found[True].values, found[False].values, rtol=1e-5, atol=1e-12)


def gamma(model, optimizer, rows_bd):
    """LESS's moves of gradients that lie in the model's order. Shape ``[b, D]``."""
    group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    found = []
    parameters = list(model.parameters())
    for parameter, part in zip(
        parameters, rows_bd.split([p.numel() for p in parameters], 1), strict=True
    ):
        state, group = optimizer.state.get(parameter), group_of[id(parameter)]
        beta1, beta2 = group["betas"]
        first = state["exp_avg"].flatten() if state else 0.0
        second = state["exp_avg_sq"].flatten() if state else 0.0
        t = int(state["step"]) + 1 if state else 1
        mean = (beta1 * first + (1 - beta1) * part) / (1 - beta1**t)
        square = (beta2 * second + (1 - beta2) * part**2) / (1 - beta2**t)
        found.append(mean / (square.sqrt() + group["eps"]))
    return torch.cat(found, 1).detach()


def cosines(rows, columns):
    return rows @ columns.T / rows.norm(dim=1)[:, None] / columns.norm(dim=1)


def one_rate(model):
    return adamw(model, first={"lr": 0.02, "eps": 1e-3}, second={"eps": 1e-4})


@pytest.mark.parametrize("every", [1, 3])
def test_less_of_recorded_steps_is_the_dense_formula(tmp_path, every):
    loop = Loop(one_rate)
    recorded = record(loop, tmp_path, ((0, 8), (8, STEPS)), every=every)
    twin = Likelihood()
    optimizer = one_rate(twin)
    moves, rates, places = [], [], []
    for t in range(STEPS):
        if t % every == 0:
            rows = [z for part in loop.plan[t] for z in part]
            moves.append(gamma(twin, optimizer, gradients(twin, [TRAIN[z] for z in rows])))
            places += [t] * len(rows)
        loop.run(twin, optimizer, [t], rates=(0.02, 0.02))
        rates.append(optimizer.param_groups[0]["lr"])
    rates = torch.tensor([rates[t] for t in places], dtype=torch.float64)
    expected = rates[:, None] * cosines(torch.cat(moves), gradients(recorded.model, QUERY))
    for chosen in (None, [12, 3, 15]):
        scores = recorded.scores("less", selected_steps=chosen)
        keep = [n for n, t in enumerate(places) if chosen is None or t in chosen]
        assert list(scores.train_steps) == [places[n] for n in keep]
        torch.testing.assert_close(scores.values.double(), expected[keep], rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("batch_size", [1, 4])
def test_less_of_checkpoints_is_the_dense_formula(batch_size):
    loop = Loop(one_rate)
    model = Likelihood()
    optimizer = one_rate(model)
    checkpoints, states, expected = [], [], 0.0
    for t in range(9):
        loop.run(model, optimizer, [t], rates=(0.02, 0.02))
        if t in (0, 4, 8):
            checkpoints.append(copy.deepcopy(model.state_dict()))
            states.append(OptimizerSnapshot.of(model, optimizer))
            rows = gamma(model, optimizer, gradients(model, TRAIN))
            rate = optimizer.param_groups[0]["lr"]
            expected = expected + rate * cosines(rows, gradients(model, QUERY))
    scores = gradtrail.attribute(
        model,
        TRAIN,
        QUERY,
        method="less",
        checkpoints=checkpoints,
        optimizer_states=states,
        loss=surprise,
        batch_size=batch_size,
        progress=False,
    )
    torch.testing.assert_close(scores.values.double(), expected, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize(("damping", "relative"), [(None, True), (0.2, True), (0.3, False)])
def test_trak_is_the_dense_formula_with_a_row_twice(damping, relative):
    model, projection = Likelihood(), Projection(kind="dense", dim=4, seed=2)
    train = [*TRAIN, TRAIN[2], TRAIN[2]]
    found = []
    for rows in (train, QUERY):
        manager = HookManager(model, loss_reduction="sum", projection=projection)
        with manager.collect():
            surprise(model, batch_of(rows)).sum().backward()
            layers = manager.last.layers.values()
            found.append(torch.cat([to_dense(gradient).values_bd for gradient in layers], 1))
    phi, phi_q = found
    gram = phi.T @ phi
    added = 0.1 if damping is None else damping
    added = added * float(gram.diagonal().mean()) if relative else added
    solved = torch.linalg.solve(gram + added * torch.eye(len(gram), dtype=gram.dtype), phi_q.T)
    scores = gradtrail.attribute(
        model,
        train,
        QUERY,
        method="trak",
        projection=projection,
        damping=damping,
        relative_damping=relative,
        loss=surprise,
        batch_size=5,
        progress=False,
    )
    torch.testing.assert_close(scores.values.double(), phi @ solved, rtol=1e-5, atol=1e-7)


class Routed(nn.Module):
    """Rows of small numbers pass by one of its layers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.always = nn.Linear(2, 2)
        self.sometimes = nn.Linear(2, 2)
        self.double()

    def forward(self, x):
        hidden = self.always(x).tanh()
        return self.sometimes(hidden) if float(x.detach().max()) > 0.6 else hidden


def test_trak_where_batches_reach_other_layers():
    """A layer's features come later than the first batch; those before have none of it."""
    model = Routed()
    x = drawn(torch.Generator().manual_seed(3), (16, 2)).sort(0).values
    rows = [(row, row.flip(0)) for row in x]

    def loss(model, batch):
        return (model(batch[0]) - batch[1]).square().sum(1)

    phi = []
    for row in rows:
        value = loss(model, [part[None] for part in row]).sum()
        parts = torch.autograd.grad(
            value, list(model.parameters()), allow_unused=True, materialize_grads=True
        )
        phi.append(torch.cat([part.flatten() for part in parts]))
    phi = torch.stack(phi)
    assert 0 < int((phi[:, 6:] == 0).all(1).sum()) < 16
    assert (phi[0, 6:] == 0).all()
    gram = phi.T @ phi + 0.2 * torch.eye(12, dtype=torch.float64)
    scores = gradtrail.attribute(
        model,
        rows,
        rows[::3],
        method="trak",
        projection=Projection(kind="dense", dim=16),
        damping=0.2,
        relative_damping=False,
        loss=loss,
        batch_size=1,
        progress=False,
    )
    expected = phi @ torch.linalg.solve(gram, phi[::3].T)
    torch.testing.assert_close(scores.values.double(), expected, rtol=1e-5, atol=1e-7)


def test_trainer_that_resumes_from_a_checkpoint(tmp_path):
    """One store with the records of both trainings; steps 3 and 4 were made twice."""
    transformers = pytest.importorskip("transformers")

    class Trainer(transformers.Trainer):
        def compute_loss(self, model, inputs, **_):
            weights = inputs.pop("weight")
            return (weights * surprise(model, inputs)).mean()

    class Stop(transformers.TrainerCallback):
        def on_step_end(self, _, state, control, **__):
            control.should_training_stop = state.global_step == 5

    def train(folder, callbacks=(), resume=None, weights=None, names=False):
        model = Likelihood(tied=False)
        weights = torch.ones(16, dtype=torch.float64) if weights is None else weights
        rows = [
            {**row, "weight": weight, **({"name": number} if names else {})}
            for number, (row, weight) in enumerate(zip(data(16, 3), weights, strict=True))
        ]
        arguments = transformers.TrainingArguments(
            str(folder),
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            num_train_epochs=4,
            learning_rate=0.02,
            weight_decay=0.3,
            warmup_steps=2,
            max_grad_norm=0.0,
            save_strategy="steps" if names else "no",
            save_steps=3,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            logging_strategy="no",
            remove_unused_columns=False,
        )
        Trainer(model, arguments, train_dataset=rows, callbacks=list(callbacks)).train(
            resume_from_checkpoint=resume
        )
        return model

    model = None
    for mode in ("create", "resume"):
        gradients_store = GradientStore(tmp_path / "gradients", mode=mode)
        states = StepStore(tmp_path / "states", mode=mode)
        capture = GradTrailCallback(
            [OffloadCallback(gradients_store), OptimizerStateCallback(states, moments="both")],
            loss_reduction="mean",
            loss_scale=0.5,
            sample_id_key="name",
        )
        resume = None if mode == "create" else str(tmp_path / "run" / "checkpoint-3")
        callbacks = [capture, Stop()] if mode == "create" else [capture]
        model = train(tmp_path / "run", callbacks, resume, names=True)
        gradients_store.close()
        states.close()
    gradtrail.cache(
        model, QUERY, cache_dir=tmp_path / "queries", loss=surprise, progress=False
    )  # fmt: skip
    scores = Recorded(model, tmp_path).scores("adamw")
    assert sorted(set(scores.train_steps)) == list(range(8))
    ends = []
    for sign in (1, -1):
        weights = torch.ones(16, dtype=torch.float64)
        weights[5] += sign * 1e-3
        ends.append(flat(train(tmp_path / "other", weights=weights)))
    expected = -(gradients(model, QUERY) @ (ends[0] - ends[1])) / 2e-3
    own = [n for n, name in enumerate(scores.train_ids) if name == 5]
    assert len(own) == 4
    torch.testing.assert_close(scores.values[own].double().sum(0), expected, rtol=1e-4, atol=1e-9)
