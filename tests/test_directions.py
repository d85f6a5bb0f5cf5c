"""Update directions: what an optimizer's own step on one example alone moves, divided by -lr."""

import copy
import inspect

import pytest
import torch
from torch import nn

from gradtrail.hooks.directions import DIRECTIONS, ParameterState, update_direction
from gradtrail.hooks.optimizer_state import OptimizerSnapshot, innermost_optimizer

F64 = torch.float64
NUM_EXAMPLES = 4


class Lion(torch.optim.Optimizer):
    """Written anew from the paper's algorithm 2: torch has none to compare with."""

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0, **more):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, **more})

    @torch.no_grad()
    def step(self, closure=None):  # noqa: ARG002  # torch's own signature
        for group in self.param_groups:
            one, two = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                average = self.state[parameter].setdefault("exp_avg", torch.zeros_like(parameter))
                mixed = one * average + (1 - one) * parameter.grad
                parameter -= group["lr"] * (mixed.sign() + group["weight_decay"] * parameter)
                average.copy_(two * average + (1 - two) * parameter.grad)


OPTIM = torch.optim
CASES = {
    "sgd": (OPTIM.SGD, {"lr": 0.1}),
    "sgd-momentum": (OPTIM.SGD, {"lr": 0.1, "momentum": 0.9}),
    "sgd-dampening": (OPTIM.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3}),
    "sgd-nesterov": (OPTIM.SGD, {"lr": 0.1, "momentum": 0.8, "nesterov": True}),
    "sgd-decay": (OPTIM.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.2}),
    "sgd-maximize": (OPTIM.SGD, {"lr": 0.1, "momentum": 0.9, "maximize": True}),
    "adam": (OPTIM.Adam, {"lr": 0.1}),
    "adam-betas": (OPTIM.Adam, {"lr": 0.1, "betas": (0.7, 0.8), "eps": 1e-2}),
    "adam-decay": (OPTIM.Adam, {"lr": 0.1, "weight_decay": 0.2}),
    "adam-amsgrad": (OPTIM.Adam, {"lr": 0.1, "amsgrad": True, "betas": (0.9, 0.3)}),
    "adam-maximize": (OPTIM.Adam, {"lr": 0.1, "maximize": True, "weight_decay": 0.3}),
    "adam-foreach": (OPTIM.Adam, {"lr": 0.1, "foreach": True}),
    "adam-fused": (OPTIM.Adam, {"lr": 0.1, "fused": True}),
    "adam-tensor-lr": (OPTIM.Adam, {"lr": torch.tensor(0.1, dtype=F64)}),
    "adamw": (OPTIM.AdamW, {"lr": 0.1}),
    "adamw-decay": (OPTIM.AdamW, {"lr": 0.1, "weight_decay": 0.4, "eps": 1e-3}),
    "adamw-amsgrad": (OPTIM.AdamW, {"lr": 0.1, "amsgrad": True, "weight_decay": 0.4}),
    "adamw-maximize": (OPTIM.AdamW, {"lr": 0.1, "maximize": True, "weight_decay": 0.4}),
    "adamax": (OPTIM.Adamax, {"lr": 0.1}),
    "adamax-options": (
        OPTIM.Adamax,
        {"lr": 0.1, "betas": (0.7, 0.8), "eps": 1e-2, "weight_decay": 0.2, "maximize": True},
    ),
    "nadam": (OPTIM.NAdam, {"lr": 0.1}),
    "nadam-options": (
        OPTIM.NAdam,
        {"lr": 0.1, "betas": (0.7, 0.8), "momentum_decay": 0.1, "weight_decay": 0.2},
    ),
    "nadam-decoupled": (
        OPTIM.NAdam,
        {"lr": 0.1, "weight_decay": 0.2, "decoupled_weight_decay": True, "maximize": True},
    ),
    "radam": (OPTIM.RAdam, {"lr": 0.1}),
    "radam-rectified-soon": (OPTIM.RAdam, {"lr": 0.1, "betas": (0.7, 0.95), "eps": 1e-3}),
    "radam-decay": (OPTIM.RAdam, {"lr": 0.1, "weight_decay": 0.2, "maximize": True}),
    "radam-decoupled": (
        OPTIM.RAdam,
        {"lr": 0.1, "weight_decay": 0.2, "decoupled_weight_decay": True},
    ),
    "rmsprop": (OPTIM.RMSprop, {"lr": 0.1}),
    "rmsprop-centered": (OPTIM.RMSprop, {"lr": 0.1, "centered": True, "alpha": 0.8}),
    "rmsprop-momentum": (OPTIM.RMSprop, {"lr": 0.1, "momentum": 0.7, "eps": 1e-2}),
    "rmsprop-all": (
        OPTIM.RMSprop,
        {"lr": 0.1, "momentum": 0.7, "centered": True, "weight_decay": 0.2, "maximize": True},
    ),
    "adagrad": (OPTIM.Adagrad, {"lr": 0.1}),
    "adagrad-options": (
        OPTIM.Adagrad,
        {"lr": 0.1, "lr_decay": 0.2, "initial_accumulator_value": 0.3, "weight_decay": 0.2},
    ),
    "adagrad-maximize": (OPTIM.Adagrad, {"lr": 0.1, "eps": 1e-2, "maximize": True}),
    "adadelta": (OPTIM.Adadelta, {"lr": 0.1}),
    "adadelta-options": (
        OPTIM.Adadelta,
        {"lr": 0.1, "rho": 0.6, "eps": 1e-3, "weight_decay": 0.2, "maximize": True},
    ),
    "lion": (Lion, {"lr": 0.1}),
    "lion-decay": (Lion, {"lr": 0.1, "betas": (0.6, 0.8), "weight_decay": 0.3}),
}


def make(case, steps, seed=0):
    """Two parameters, an optimizer that has made some steps, and gradients of four examples."""
    cls, options = CASES[case]
    generator = torch.Generator().manual_seed(seed)
    shapes = {"w": (3, 2), "b": (3,)}
    model = nn.ParameterDict(
        {
            name: nn.Parameter(torch.randn(shape, generator=generator, dtype=F64))
            for name, shape in shapes.items()
        }
    )
    optimizer = cls(model.parameters(), **options)
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=F64)
        optimizer.step()
    gradients = {
        name: torch.randn(NUM_EXAMPLES, *shape, generator=generator, dtype=F64)
        for name, shape in shapes.items()
    }
    gradients["w"][0, 0] = 0  # an entry that the example does not depend on
    return model, optimizer, gradients


def stepped_alone(model, optimizer, gradients, *, decay):
    """Directions by stepping a copy of everything on one example. By name, ``[b, *shape]``."""
    found = {name: [] for name in gradients}
    for row in range(NUM_EXAMPLES):
        twin, stepper = copy.deepcopy((model, optimizer))
        for group in stepper.param_groups:
            group["weight_decay"] = group["weight_decay"] if decay else 0.0
            rate = float(group["lr"])
        for name, parameter in twin.items():
            parameter.grad = gradients[name][row].clone()
        stepper.step()
        for name, parameter in twin.items():
            found[name].append((parameter.detach() - model[name].detach()) / -rate)
    return {name: torch.stack(rows) for name, rows in found.items()}


@pytest.mark.parametrize("decay", [False, True], ids=["without decay", "with decay"])
@pytest.mark.parametrize("steps", [0, 1, 7])
@pytest.mark.parametrize("case", CASES)
def test_direction_is_the_step_on_one_example_alone(case, steps, decay):
    model, optimizer, gradients = make(case, steps)
    before = copy.deepcopy(optimizer.state_dict())
    snapshot = OptimizerSnapshot.of(model, optimizer)
    expected = stepped_alone(model, optimizer, gradients, decay=decay)
    for name, values in gradients.items():
        state = snapshot.state(name)
        flat = {
            key: moment.reshape(-1) if moment.dim() else moment
            for key, moment in state.moments.items()
        }
        got = update_direction(
            snapshot.kind,
            values.flatten(1),
            ParameterState(state.step, flat, state.options),
            parameter=model[name].detach().reshape(-1) if decay else None,
        )
        torch.testing.assert_close(got, expected[name].flatten(1), rtol=1e-8, atol=1e-8)
    for number, state in optimizer.state_dict()["state"].items():  # nothing of it has changed
        for key, value in state.items():
            assert value is None or torch.equal(value, before["state"][number][key])


def test_every_direction_has_a_case_that_moves_and_one_with_decay():
    kinds = {cls.__name__ for cls, _ in CASES.values()}
    assert kinds == set(DIRECTIONS.kinds)
    decayed = {cls.__name__ for cls, options in CASES.values() if "weight_decay" in options}
    assert decayed == kinds


def test_a_rate_of_zero_has_a_direction_too():
    model, optimizer, gradients = make("adamw", 3)
    expected = stepped_alone(model, optimizer, gradients, decay=False)["b"]
    optimizer.param_groups[0]["lr"] = 0.0
    snapshot = OptimizerSnapshot.of(model, optimizer)
    got = update_direction("AdamW", gradients["b"], snapshot.state("b"))
    torch.testing.assert_close(got, expected, rtol=1e-8, atol=1e-8)


def test_radam_cases_have_both_kinds_of_step():
    model, optimizer, gradients = make("radam-rectified-soon", 7)
    late = OptimizerSnapshot.of(model, optimizer).state("b")
    early = ParameterState(2, late.moments, late.options)
    plain = torch.lerp(late.moments["exp_avg"], gradients["b"], 0.3) / (1 - 0.7**3)
    torch.testing.assert_close(update_direction("RAdam", gradients["b"], early), plain)
    rectified = update_direction("RAdam", gradients["b"], late)
    assert not torch.allclose(rectified * (1 - 0.7**8), plain * (1 - 0.7**3))


def test_low_precision_moments_are_used_in_the_gradients_dtype():
    model, optimizer, gradients = make("adamw", 2)
    state = OptimizerSnapshot.of(model, optimizer).state("b")
    low = {name: moment.bfloat16() for name, moment in state.moments.items()}
    got = update_direction("AdamW", gradients["b"], ParameterState(2, low, state.options))
    assert got.dtype == F64
    wide = {name: moment.double() for name, moment in low.items()}
    expected = update_direction("AdamW", gradients["b"], ParameterState(2, wide, state.options))
    assert torch.equal(got, expected)


# ---------------------------------------------------------------- which optimizers


def weights():
    return [nn.Parameter(torch.ones(2, 2))]


@pytest.mark.parametrize("name", ["Rprop", "ASGD", "LBFGS", "SparseAdam"])
def test_other_optimizers_are_refused_by_name_with_the_list(name):
    listed = "Adadelta, Adagrad, Adam, AdamW, Adamax, Lion, NAdam, RAdam, RMSprop, SGD"
    with pytest.raises(TypeError, match=f"must be one of {listed}, got {name}"):
        DIRECTIONS.find(getattr(OPTIM, name)(weights()))


def test_an_unknown_name_is_refused_with_the_list():
    with pytest.raises(TypeError, match=r"one of Adadelta, .*, SGD, got Adafactor"):
        DIRECTIONS.named("Adafactor")


def test_a_subclass_is_known_by_its_base_unless_it_steps_otherwise():
    class Logged(OPTIM.AdamW):
        """Only says what it does."""

    class Halved(OPTIM.AdamW):
        """Steps half as far."""

        def step(self, closure=None):
            super().step(closure)

    assert DIRECTIONS.find(Logged(weights())).kind == "AdamW"
    OPTIM.AdamW(weights())  # torch wraps the base's step when one is made
    assert DIRECTIONS.find(Logged(weights())).kind == "AdamW"
    with pytest.raises(TypeError, match=r"got Halved, a subclass of AdamW with its own step"):
        DIRECTIONS.find(Halved(weights()))


def test_a_lion_of_another_kind_is_refused():
    parameters = weights()
    model = nn.ParameterList(parameters)
    off = {"cautious_factor": 1, "caution": False, "use_triton": False}
    assert OptimizerSnapshot.of(model, Lion(parameters, **off)).kind == "Lion"
    cautious = Lion(parameters, caution=True)
    with pytest.raises(ValueError, match="must have no hyperparameters besides lr.*caution=True"):
        OptimizerSnapshot.of(model, cautious)
    eight_bit = Lion(parameters)
    eight_bit.state[parameters[0]]["state1"] = torch.zeros(4, dtype=torch.uint8)
    with pytest.raises(ValueError, match="got a state with state1 beside exp_avg"):
        OptimizerSnapshot.of(model, eight_bit)


def test_wrappers_are_looked_through():
    accelerate = pytest.importorskip("accelerate")
    optimizer = OPTIM.SGD(weights(), lr=0.1)
    wrapped = accelerate.Accelerator(cpu=True).prepare(optimizer)
    assert wrapped is not optimizer
    assert innermost_optimizer(wrapped) is optimizer
    assert innermost_optimizer(optimizer) is optimizer


def test_every_family_has_a_file_of_its_own():
    modules = {
        inspect.getmodule(DIRECTIONS.named(kind).function).__name__ for kind in DIRECTIONS.kinds
    }
    assert len(modules) == 8
    assert all(name.startswith("gradtrail.hooks.directions.") for name in modules)
