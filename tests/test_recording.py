"""Callbacks that record: nothing is lost or missed in silence, and wrong arguments are named."""

import contextlib
import errno
import re
import resource
import shutil
import warnings

import pytest
import rank_models
import recording_ranks
import torch
from processes import Workers
from test_covariance_callback import assert_equal_states
from test_offload import assert_same_content, content, make_manager, run
from test_offload import train as train_loop
from training import collate, make_model, make_rows, make_trainer

from gradtrail import (
    CurvatureError,
    GradTrailWarning,
    HookManager,
    OptimizerSnapshot,
    Projection,
)
from gradtrail.attribution.stored import attached_covariances
from gradtrail.callbacks import (
    GradTrailCallback,
    KroneckerCovarianceCallback,
    MergedSteps,
    OffloadCallback,
    OptimizerStateCallback,
    ParameterSnapshotCallback,
    read_states,
    replay,
)
from gradtrail.factors import to_dense
from gradtrail.kronecker import covariances_from
from gradtrail.store import GradientStore, StepStore, records_digest

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")

KINDS = {"gradients": GradientStore, "states": StepStore, "parameters": StepStore}


@pytest.fixture(autouse=True)
def fresh_accelerator():
    """The accelerator's state is global: what one test sets up must not reach the next."""
    yield
    accelerate.state.AcceleratorState._reset_state()
    accelerate.state.GradientState._reset_state()


class Failure(RuntimeError):
    """Ends a Trainer's run."""


class Killed(transformers.TrainerCallback):
    """Ends a run after a step, and keeps what a process killed there leaves on the disk."""

    def __init__(self, step, folder):
        self.step, self.folder = step, folder

    def on_step_end(self, args, state, control, **kwargs):
        del args, control, kwargs
        if state.global_step == self.step:
            shutil.copytree(self.folder, self.folder.with_name("left"))
            raise Failure


def opened(folder, **options):
    return {name: kind(folder / name, **options) for name, kind in KINDS.items()}


def everything(stores, *, covariances_first=False):
    inner = [OffloadCallback(stores["gradients"]), KroneckerCovarianceCallback(stores["gradients"])]
    inner += [
        OptimizerStateCallback(stores["states"], moments="both"),
        ParameterSnapshotCallback(stores["parameters"]),
    ]
    return inner[1::-1] + inner[2:] if covariances_first else inner


def trained(folder, inner, *, killed=None, resume=None, **arguments):
    """A Trainer's run of 7 steps with a checkpoint after every third."""
    capture = GradTrailCallback(inner, capture="materialized")
    more = [] if killed is None else [killed]
    trainer = make_trainer(
        make_model("llama"),
        folder,
        [capture, *more],
        **{"max_steps": 7, "save_strategy": "steps", "save_steps": 3, **arguments},
    )
    torch.manual_seed(11)
    with contextlib.nullcontext() if killed is None else pytest.raises(Failure):
        trainer.train(resume_from_checkpoint=resume)
    capture.detach()
    return trainer


def closed(stores):
    for store in stores.values():
        store.close()


# ---------------------------------------------------------------- a run that is killed


@pytest.mark.parametrize(
    ("shard_bytes", "first"),
    [
        (64 << 20, False),
        pytest.param(64 << 20, True, marks=pytest.mark.slow),
        (1000, False),
    ],
    ids=["shards still open", "covariances first", "shards closed since"],
)
def test_a_killed_run_is_whole_when_it_is_resumed(tmp_path, shard_bytes, first):
    """It is killed after step 5, and goes on from the checkpoint after step 3."""
    whole = opened(tmp_path / "whole", shard_bytes=shard_bytes)
    trained(tmp_path / "a", everything(whole), gradient_accumulation_steps=2)
    parts = opened(tmp_path / "parts", shard_bytes=shard_bytes)
    killed = Killed(5, tmp_path / "parts")
    inner = everything(parts, covariances_first=first)
    trained(tmp_path / "b", inner, killed=killed, gradient_accumulation_steps=2)
    closed(parts)

    left = opened(tmp_path / "left", mode="resume", shard_bytes=shard_bytes)
    assert set(left["gradients"].steps) >= {0, 1, 2}
    assert (4 in left["gradients"].steps) == (shard_bytes == 1000)
    checkpoint = str(tmp_path / "b" / "checkpoint-3")
    trained(tmp_path / "b", everything(left), resume=checkpoint, gradient_accumulation_steps=2)
    assert_same_content(left["gradients"], whole["gradients"])
    assert_equal_states(
        left["gradients"].attached("covariances"), whole["gradients"].attached("covariances")
    )
    for name in ("states", "parameters"):
        assert left[name].steps == whole[name].steps == tuple(range(7))
        for step in range(7):
            torch.testing.assert_close(
                left[name].read(step), whole[name].read(step), rtol=0, atol=0
            )
    closed(left)


def test_covariances_of_a_resumed_run_that_does_not_come_to_the_end(tmp_path):
    """Stored steps that it did not meet again stay uncovered, and the next run counts them."""
    folder, rows = tmp_path / "store", make_rows(18)
    whole = GradientStore(residency="memory")
    train_loop(make_manager([OffloadCallback(whole), KroneckerCovarianceCallback(whole)]))
    with GradientStore(folder) as store:
        manager = make_manager([OffloadCallback(store), KroneckerCovarianceCallback(store)])
        train_loop(manager, backwards=2, rows=rows[:6])
        rest = make_manager([OffloadCallback(store)], model=manager.model)
        rest.optimizer_steps = 2
        train_loop(rest, backwards=4, rows=rows[6:])
    for last in (4, 6):
        with GradientStore(folder, mode="resume") as store:
            inner = [OffloadCallback(store), KroneckerCovarianceCallback(store)]
            with pytest.warns(GradTrailWarning, match=f"got one whose {last} backwards were"):
                train_loop(make_manager(inner), rows=rows, backwards=last)
            covers = store.attached("covariances")[1]["covers"]
            assert covers == records_digest(store.records[:last])
    with GradientStore(folder, mode="read") as store:
        assert_equal_states(store.attached("covariances"), whole.attached("covariances"))


def test_a_store_that_is_closed_before_the_capture_has_its_covariances(tmp_path):
    """As a ``with`` block does that an exception leaves; the step under way is given up."""
    rows = make_rows(18)
    with GradientStore(tmp_path / "detached") as store:
        inner = [OffloadCallback(store), KroneckerCovarianceCallback(store)]
        train_loop(make_manager(inner), rows=rows, backwards=5, accumulation=2)
        expected, kept = store.attached("covariances"), content(store)
    inner = []

    def close(number):
        if number == 4:
            inner[0].store.close()

    store = GradientStore(tmp_path / "closed")
    inner = [OffloadCallback(store), KroneckerCovarianceCallback(store)]
    train_loop(make_manager(inner), rows=rows, backwards=5, accumulation=2, each=close)
    with GradientStore(tmp_path / "closed", mode="read") as store:
        assert [entry[:2] for entry in content(store)] == [entry[:2] for entry in kept]
        assert store.steps == (0,) * 6 + (1,) * 6
        assert store.attached("covariances")[1]["covers"] == records_digest(store.records)
        assert_equal_states(store.attached("covariances"), expected)


def test_an_interrupted_trainer_is_resumed_with_its_covariances(tmp_path):
    """The store is closed by its ``with`` block, the capture comes off after that."""

    class Interrupts(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            del args, control, kwargs
            if state.global_step == 5:
                raise KeyboardInterrupt

    def go(folder, callbacks=(), **options):
        with GradientStore(folder, mode=options.pop("mode", "create")) as store:
            inner = [OffloadCallback(store), KroneckerCovarianceCallback(store)]
            capture.append(GradTrailCallback(inner, capture="materialized"))
            trainer = make_trainer(
                make_model("llama"), folder.with_suffix(".run"), [capture[-1], *callbacks],
                max_steps=7, save_strategy="steps", save_steps=3,
            )  # fmt: skip
            torch.manual_seed(11)
            trainer.train(**options)
            return store.attached("covariances")

    capture = []
    whole = go(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        go(tmp_path / "parts", [Interrupts()])
    with GradientStore(tmp_path / "parts", mode="read") as store:
        assert store.attached("covariances")[1]["covers"] == records_digest(store.records)
        assert sorted(set(store.steps)) == [0, 1, 2, 3, 4]
    capture[-1].detach()
    resumed = go(
        tmp_path / "parts",
        mode="resume",
        resume_from_checkpoint=str(tmp_path / "parts.run" / "checkpoint-3"),
    )
    assert_equal_states(resumed, whole)


def test_a_store_that_failed_has_no_covariances_of_its_last_records(tmp_path):
    """The disk is full when the store is closed: what was flushed before stays."""
    store = GradientStore(tmp_path / "store", shard_bytes=1 << 30)
    inner = [OffloadCallback(store, asynchronous=False), KroneckerCovarianceCallback(store)]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(number):
        if number == 1:
            inner[1].flush()
        if number == 4:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, limits[1]))
            with pytest.raises(OSError, match="could not be written") as caught:
                store.close()
            assert caught.value.errno in {errno.EFBIG, errno.ENOSPC}

    try:
        with pytest.warns(GradTrailWarning, match=r"got one that failed .* of its last flush"):
            train_loop(make_manager(inner), each=fill, backwards=5)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    with GradientStore(tmp_path / "store", mode="read") as store:
        assert store.attached("covariances")[1]["covers"] == records_digest(store.records)


@pytest.mark.parametrize(
    ("form", "end"),
    [
        ("factored", "are fitted to the stored factors instead"),
        ("materialized", "are not fitted to layers that are written out"),
    ],
)
def test_a_run_without_covariances_is_told_what_that_means(form, end):
    store = GradientStore(residency="memory")
    manager = make_manager([OffloadCallback(store)], capture=form)
    train_loop(manager, backwards=2)
    inner = [OffloadCallback(store), KroneckerCovarianceCallback(store)]
    again = make_manager(inner, capture=form)
    again.optimizer_steps = 2
    with pytest.warns(GradTrailWarning, match=f"got none: none are .* K-FAC and EK-FAC {end}"):
        train_loop(again, backwards=2)


# ---------------------------------------------------------------- what is missing is said


def recorder_of(kind, store, **options):
    return {
        "offload": OffloadCallback,
        "states": OptimizerStateCallback,
        "parameters": ParameterSnapshotCallback,
    }[kind](store, **options)


@pytest.mark.parametrize("kind", ["offload", "states", "parameters"])
@pytest.mark.parametrize(
    ("every", "start", "missing"),
    [
        (1, 4, r"at step 1: steps 2 to 3 \(2\) are missing"),
        (1, 3, r"at step 1: step 2 is missing"),
        (1, 2, None),
        (1, 1, None),
        (3, 3, None),
        (3, 4, r"at step 0: step 3 is missing"),
    ],
)
def test_a_gap_before_the_start_is_warned_of(tmp_path, kind, every, start, missing):
    def go(mode, start, backwards):
        kind_of = GradientStore if kind == "offload" else StepStore
        with kind_of(tmp_path / "store", mode=mode) as store:
            manager = make_manager([recorder_of(kind, store, every=every)])
            manager.optimizer_steps = start
            train_loop(manager, backwards=backwards, rows=make_rows(30)[3 * start :])
            return set(store.steps)

    go("create", 0, 2)
    found = contextlib.nullcontext()
    if missing is not None:
        found = pytest.warns(GradTrailWarning, match=f"starts at step {start} .* ends {missing}")
    with found:
        assert start + -start % every in go("resume", start, 3)


def test_a_resumed_store_that_is_empty_has_a_gap_and_a_new_one_has_none(tmp_path):
    def go(mode):
        with GradientStore(tmp_path / mode, mode=mode) as store:
            manager = make_manager([OffloadCallback(store)])
            manager.optimizer_steps = 3
            train_loop(manager, backwards=2)

    go("create")
    with pytest.warns(GradTrailWarning, match=r"that is empty: steps 0 to 2 \(3\) are missing"):
        go("resume")


def test_backwards_are_counted_without_an_optimizer():
    store = GradientStore(residency="memory")
    inner = [OffloadCallback(store, gradient_accumulation_steps=2)]
    train_loop(make_manager(inner), backwards=2, optimizer=False)
    manager = make_manager([OffloadCallback(store, gradient_accumulation_steps=2)])
    manager.steps = 6
    with pytest.warns(GradTrailWarning, match=r"in memory that ends at step 0: steps 1 to 2 "):
        train_loop(manager, backwards=2, optimizer=False)


def test_a_capture_that_adds_nothing_is_warned_of(tmp_path):
    with GradientStore(tmp_path / "store") as store:
        run(tmp_path / "a", store, max_steps=3)
    with GradientStore(tmp_path / "store", mode="resume") as store:
        with pytest.warns(GradTrailWarning, match="got one whose 3 backwards were stored already"):
            run(tmp_path / "b", store, max_steps=3)
        assert sorted(set(store.steps)) == [0, 1, 2]
        run(tmp_path / "c", store, max_steps=4)
        assert sorted(set(store.steps)) == [0, 1, 2, 3]


@pytest.fixture(scope="module")
def workers():
    with Workers(2, "recording_ranks", ["transformers.models.llama.modeling_llama"]) as started:
        yield started


def test_processes_that_resume_meet_their_own_examples(tmp_path, workers):
    path = str(tmp_path / "store")
    assert workers.run("capture", path=path, mode="create", backwards=2) == [2, 2]
    assert workers.run("capture", path=path, mode="resume", backwards=3) == [3, 3]


@pytest.mark.parametrize(
    ("how", "form"),
    [
        ("ddp", "materialized"),
        pytest.param("ddp", "factored", marks=pytest.mark.slow),
        pytest.param("fsdp1", "materialized", marks=pytest.mark.slow),
        pytest.param("fully_shard", "materialized", marks=pytest.mark.slow),
    ],
)
def test_covariances_of_several_processes_are_added_up(tmp_path, workers, form, how):
    calls = [{"method": "kfac"}, {"method": "ekfac"}]
    one, many = str(tmp_path / "one"), str(tmp_path / "many")
    recording_ranks.train(one, form, 3, parts=2)
    with GradientStore(one, mode="read") as store:
        expected = covariances_from(*attached_covariances(store))
    workers.run("train", path=many, form=form, steps=2, how=how)
    workers.run("train", path=many, form=form, steps=3, how=how, mode="resume")
    with GradientStore(many, mode="read") as store:
        assert len(store) == 15
        assert store.attached("covariances")[1]["num_examples"] == "9"
        assert store.attached("covariances_0001")[1]["num_examples"] == "6"
        found = covariances_from(*attached_covariances(store))
        assert attached_covariances(store, store.records[:2]) is None
    assert list(found) == list(expected)
    for name, theirs in expected.items():
        mine = found[name]
        assert (mine.num_examples, mine.num_positions, mine.input_of) == (
            theirs.num_examples,
            theirs.num_positions,
            theirs.input_of,
        )
        for key in ("activation_cov_gii", "gradient_cov_goo"):
            want = getattr(theirs, key)
            scale = float(want.abs().max())
            torch.testing.assert_close(getattr(mine, key), want, rtol=0, atol=1e-9 * scale)
    wanted = recording_ranks.scores(one, calls)
    for got in (
        recording_ranks.scores(many, calls),
        *workers.run("scores", path=many, calls=calls),
    ):
        for values, want in zip(got, wanted, strict=True):
            scale = max(map(abs, sum(want, [])))
            torch.testing.assert_close(
                torch.tensor(values), torch.tensor(want), rtol=0, atol=1e-6 * scale
            )


def test_covariances_that_one_process_lacks_are_not_taken_for_all(tmp_path, workers):
    path = str(tmp_path / "store")
    workers.run("train", path=path, form="materialized", steps=1)
    (tmp_path / "store" / "attached-covariances_0001.safetensors").unlink()
    with GradientStore(path, mode="read") as store:
        assert attached_covariances(store) is None
    with pytest.raises(CurvatureError, match="Layers of a store must hold factors, or covariances"):
        recording_ranks.scores(path, [{"method": "kfac"}])


def test_steps_of_several_processes(tmp_path, workers):
    path = str(tmp_path / "store")
    for steps, error in workers.run("append", path=path, mode="create", steps=[0, 1, 2]):
        assert steps == [0, 1, 2]
        assert "step must be one whose parts of all processes are known, got 0, of which" in error
    with StepStore(path, mode="read") as store:
        assert (store.steps, len(store)) == ((0, 1, 2), 3)
        assert store.names(1) == ("both", "of 0", "of 1")
        assert [part["rank"] for part in store.parts(1)] == [0, 1]
        assert store.values(1)["rank"] == 0
        assert store.read(1)["both"].tolist() == [1, 0]
        assert store.read(1, ["of 1"])["of 1"].tolist() == [1]
        seen = list(store.iterate([2, 0], reverse=True))
        assert [(n, list(t), v["rank"]) for n, t, v in seen] == [
            (2, ["both", "of 0", "of 1"], 0),
            (0, ["both", "of 0", "of 1"], 0),
        ]
        with pytest.raises(ValueError, match="names must be stored, got .of 2."):
            store.read(1, ["of 2"])
    # one process goes on, and makes a step again
    assert recording_ranks.append(path, "resume", [2, 3]) == [[0, 1, 2, 3], None]
    with StepStore(path, mode="read") as store:
        assert [len(store.parts(step)) for step in store.steps] == [2, 2, 1, 1]
        assert list(store.read(2)) == ["both", "of 0"]
    # then both again, one of which is lost in the last step
    for number, (steps, _) in enumerate(
        workers.run("append", path=path, mode="resume", steps=[3, 4, 5], missing=[[1, 5]])
    ):
        assert steps == [0, 1, 2, 3, 4, 5][: 6 - number]
    with StepStore(path, mode="read") as store:
        assert store.steps == (0, 1, 2, 3, 4)
        assert [len(store.parts(step)) for step in store.steps] == [2, 2, 1, 2, 2]
        with pytest.raises(ValueError, match="step must be stored, got 5"):
            store.read(5)


def test_a_training_of_several_processes_is_followed(tmp_path, workers):
    """Batches and optimizer of two ranks are those of one process with a backward for each."""
    recording_ranks.follow(str(tmp_path / "one"), 3, parts=2)
    workers.run("follow", path=str(tmp_path / "many"), steps=2)
    workers.run("follow", path=str(tmp_path / "many"), steps=3, mode="resume")  # from step 0 again
    found, blocks = [], []
    for name in ("one", "many"):
        with StepStore(tmp_path / name / "states", mode="read") as store:
            assert store.steps == (0, 1, 2)
            found.append(
                [
                    (
                        sum((part["ids"] for part in store.parts(step)), []),
                        sum((part["sizes"] for part in store.parts(step)), []),
                        read_states(store.facts, store.values(step), store.read(step), "after"),
                    )
                    for step in store.steps
                ]
            )
            own = [entry.layout.tensors for entry in store.log.entries if entry.rank == 1]
            assert own == [{}] * (0 if name == "one" else 3)
        with StepStore(tmp_path / name / "parameters", mode="read") as store:
            manager = HookManager(rank_models.build("llama")[0], loss_reduction="model")
            blocks.append(
                list(replay(manager, store, reverse=name == "many"))[:: 1 - 2 * len(blocks)]
            )
    for (ids, sizes, states), (others, more, theirs) in zip(*found, strict=True):
        assert (ids, sizes) == (others, more)
        for layer, state in states.items():
            for role, one in state.parts.items():
                for key, value in one.moments.items():
                    other = theirs[layer].parts[role].moments[key]
                    torch.testing.assert_close(other, value, rtol=1e-9, atol=1e-12)
    for mine, theirs in zip(*blocks, strict=True):
        assert (mine.step, mine.ids) == (theirs.step, theirs.ids)
        assert len(mine.ids) == 5
        for layer, gradient in mine.layers.items():
            want, got = to_dense(gradient).values_bd, to_dense(theirs.layers[layer]).values_bd
            torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-9)


def test_processes_that_train_models_of_their_own_are_not_replayed(tmp_path, workers):
    workers.run("follow", path=str(tmp_path), steps=2, how="plain")
    manager = HookManager(rank_models.build("llama")[0], loss_reduction="model")
    with StepStore(tmp_path / "parameters", mode="read") as store:
        blocks = replay(manager, store)
        assert len(next(blocks).ids) == 5  # they begin alike
        with pytest.raises(ValueError, match=r"training of one model, got parameters of process 1"):
            next(blocks)


# ---------------------------------------------------------------- replays


def test_a_replay_keeps_to_the_reduction_of_the_training(tmp_path):
    store = StepStore(residency="memory")
    capture = GradTrailCallback([ParameterSnapshotCallback(store)])
    trainer = make_trainer(make_model("llama"), tmp_path, [capture], max_steps=2)
    trainer.train()
    assert store.facts["loss_reduction"] == "model"
    with pytest.raises(ValueError, match=r"got 'sum' where 'model' was recorded"):
        replay(HookManager(trainer.model), store)
    assert len(list(replay(HookManager(trainer.model, loss_reduction="model"), store))) == 2


def test_a_replay_of_the_models_loss_has_no_scale():
    store = StepStore(residency="memory")
    model = make_model("llama")
    optimizer, blocks = torch.optim.SGD(model.parameters(), lr=0.1), []
    inner = [ParameterSnapshotCallback(store), MergedSteps(blocks.append)]
    manager = HookManager(model, loss_reduction="token_mean", loss_scale=0.5, callbacks=inner)
    with manager.collect(optimizer):
        (model(**collate(make_rows(3))).loss / 2).backward()
        optimizer.step()
    scaled = HookManager(model, loss_reduction="token_mean", loss_scale=0.5)
    with pytest.raises(ValueError, match=r"loss_scale of the manager must be None .* got 0\.5"):
        replay(scaled, store)
    plain = HookManager(model, loss_reduction="token_mean")
    for found in (
        list(replay(plain, store)),
        list(replay(scaled, store, loss=lambda output, _: output.loss / 2)),
    ):
        for name, gradient in blocks[0].layers.items():
            values = to_dense(found[0].layers[name]).values_bd
            torch.testing.assert_close(values, to_dense(gradient).values_bd, rtol=1e-5, atol=1e-7)


# ---------------------------------------------------------------- moves in a Trainer


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_trainers_moves_are_those_of_its_recorded_optimizer(tmp_path, accumulation):
    """Next to gradients of the same training, and the optimizer's state before each step."""
    moves, gradients, store = [], [], StepStore(residency="memory")
    settings = {"max_steps": 3, "gradient_accumulation_steps": accumulation, "weight_decay": 0.1}
    captures = [
        GradTrailCallback([moves.append], optimizer="trainer"),
        GradTrailCallback([gradients.append, OptimizerStateCallback(store)]),
    ]
    for number, capture in enumerate(captures):
        folder = tmp_path / str(number)
        torch.manual_seed(5)
        make_trainer(make_model("llama"), folder, [capture], **settings).train()
    for moved, plain in zip(moves, gradients, strict=True):
        assert moved.ids == plain.ids
        states = read_states(store.facts, store.values(plain.step), store.read(plain.step))
        for name, gradient in plain.layers.items():
            expected = states[name].directions(gradient).values_bd
            got = moved.layers[name].values_bd
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
            assert plain.step == 0 or not torch.allclose(got, to_dense(gradient).values_bd)


def test_a_trainers_moves_by_a_snapshot(tmp_path):
    model, blocks = make_model("llama"), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(**collate(make_rows(4, seed=3))).loss.backward()
    optimizer.step()
    model.zero_grad()
    snapshot = OptimizerSnapshot.of(model, optimizer)
    capture = GradTrailCallback([blocks.append], optimizer=snapshot)
    make_trainer(model, tmp_path, [capture], max_steps=2).train()
    assert len(blocks) == 2
    assert capture.manager.form.transform.kind == "AdamW"


# ---------------------------------------------------------------- wrong arguments


def stores():
    return {
        "steps": StepStore(residency="memory"),
        "gradients": GradientStore(residency="memory"),
    }


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda _: OffloadCallback("grads/"),
            "store must be a GradientStore, got 'grads/'. Write "
            "OffloadCallback(GradientStore('grads/')).",
        ),
        (
            lambda s: OffloadCallback(s["steps"]),
            "store must be a GradientStore, got a StepStore. Write "
            "OffloadCallback(GradientStore(...)).",
        ),
        (lambda _: OffloadCallback(GradientStore), "got the class GradientStore. Write Off"),
        (lambda _: OffloadCallback(None), "store must be a GradientStore, got None."),
        (
            lambda s: KroneckerCovarianceCallback(s["steps"]),
            "store must be a GradientStore or None, got a StepStore.",
        ),
        (
            lambda s: OptimizerStateCallback(s["gradients"]),
            "store must be a StepStore, got a GradientStore. Write "
            "OptimizerStateCallback(StepStore(...)).",
        ),
        (lambda _: ParameterSnapshotCallback("run/p"), "ParameterSnapshotCallback(StepStore('run"),
        (
            lambda _: GradTrailCallback([OffloadCallback]),
            "callbacks must be functions or objects, got the class OffloadCallback. Make one: "
            "OffloadCallback(...).",
        ),
        (lambda s: GradTrailCallback([s["gradients"]]), "or callbacks, got GradientStore. Derive"),
        (lambda s: GradTrailCallback(OffloadCallback(s["gradients"])), "a list, got OffloadC"),
        (lambda _: GradTrailCallback(print), "callbacks must be a list, got builtin_function"),
        (lambda _: GradTrailCallback("grads/"), "callbacks must be a list, got 'grads/'. Write"),
        (lambda _: GradTrailCallback(projection=8), "None, got 8. Write Projection(dim=8)."),
        (lambda _: GradTrailCallback(projection="mask"), "Write Projection(kind='mask')."),
        (lambda _: GradTrailCallback(projection=Projection), "Make one: Projection(...)."),
        (lambda _: GradTrailCallback(projection=True), "got True. Make one: Projection(...)."),
        (lambda _: GradTrailCallback(optimizer="adamw"), "'trainer' or None, got 'adamw'. Wr"),
        (
            lambda _: GradTrailCallback(optimizer=torch.optim.SGD([torch.ones(1)])),
            "optimizer must be an OptimizerSnapshot, 'trainer' or None, got 'SGD'.",
        ),
    ],
)
def test_wrong_arguments_are_named_where_they_are_written(make, message):
    with pytest.raises(TypeError, match=re.escape(message)):
        make(stores())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"callbacks": [OffloadCallback]}, "got the class OffloadCallback. Make one"),
        ({"callbacks": [3]}, "callbacks must be functions or callbacks, got 3. Derive it"),
        ({"callbacks": print}, "callbacks must be a list, got builtin_function_or_method."),
        ({"projection": 8}, "projection must be a Projection or None, got 8. Write"),
    ],
    ids=["class", "number", "one", "projection"],
)
def test_a_manager_names_wrong_arguments_too(options, message):
    with pytest.raises(TypeError, match=re.escape(message)):
        HookManager(make_model("llama"), **options)


def test_ids_that_a_trainer_left_out_are_asked_for_with_the_remedy(tmp_path):
    rows = [{"row": number, **row} for number, row in enumerate(make_rows(6))]
    capture = GradTrailCallback(sample_id_key="row")
    trainer = make_trainer(make_model("llama"), tmp_path, [capture], rows=rows, max_steps=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(KeyError, match="remove_unused_columns=False and a data_collator"):
            trainer.train()


def test_a_tied_parameters_second_name_is_explained():
    model = make_model("gpt2")
    snapshot = OptimizerSnapshot.of(model, torch.optim.SGD(model.parameters()))
    with pytest.raises(KeyError, match="A tied parameter has the first of its names"):
        snapshot.state("lm_head.weight")


def test_files_that_hold_no_snapshot_are_told_apart(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"path must be a file that .* got '.*nowhere'"):
        OptimizerSnapshot.load(tmp_path / "nowhere")
    state = torch.optim.SGD([torch.ones(1)]).state_dict()
    for zipped in (True, False):
        torch.save(state, tmp_path / "o.pt", _use_new_zipfile_serialization=zipped)
        with pytest.raises(Exception, match=r"got a pickle, such as a Trainer's optimizer\.pt"):
            OptimizerSnapshot.load(tmp_path / "o.pt")
