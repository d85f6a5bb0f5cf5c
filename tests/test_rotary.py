"""Rotary embeddings that a live pass exchanges: the same numbers, and nothing left behind."""

import functools
import importlib
from contextlib import ExitStack

import pytest
import torch
from models import build, text_rows
from torch import nn

import gradtrail
from gradtrail.hooks.fused import fuse_elementwise
from gradtrail.hooks.rotary import _exchanged, _is_known, _rebuilt, rotary_forward

EXACT = {"rtol": 0, "atol": 1e-12}


def rotate_half(x):
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def interleaved(q, k, cos, sin, unsqueeze_dim=1):
    def pairs(x):
        return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)

    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + pairs(q) * sin, k * cos + pairs(k) * sin


def older(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
    assert position_ids is None
    return apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim)


def other_default(q, k, cos, sin, unsqueeze_dim=2):
    return apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim)


def other_names(query, key, cos, sin, unsqueeze_dim=1):
    return apply_rotary_pos_emb(query, key, cos, sin, unsqueeze_dim)


def one_axis(q, k, cos, sin, unsqueeze_dim=1):
    return apply_rotary_pos_emb(q, k, cos, sin, min(unsqueeze_dim, 1))


def raising(q, k, cos, sin, unsqueeze_dim=1):
    raise RuntimeError(f"no kernel for {len((q, k, cos, sin, unsqueeze_dim))} arguments")


class Callable:
    def __call__(self, q, k, cos, sin, unsqueeze_dim=1):
        return apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim)


def turned(q, k, cos, sin):
    return apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2)


def wrapping(function):
    @functools.wraps(function)
    def around(*args, old=None, **kwargs):
        if old is not None:
            kwargs["sin"] = old
        return function(*args, **kwargs)

    return around


def forgetful(function):
    @functools.wraps(function)
    def around(*args, **kwargs):
        return turned(*args, **kwargs)

    return around


def draw(*shape, dtype=torch.float64, grad=False):
    return torch.randn(shape, dtype=dtype, requires_grad=grad)


def inputs(width=8, dtype=torch.float64):
    torch.manual_seed(0)
    q, k = (
        draw(2, 5, 3, width, dtype=dtype, grad=True),
        draw(2, 5, 1, width, dtype=dtype, grad=True),
    )
    return q, k, draw(2, 5, width, dtype=dtype), draw(2, 5, width, dtype=dtype)


def numbers(function, arguments, **kwargs):
    outputs = function(*arguments, **kwargs)
    directions = [torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view(x.shape) for x in outputs]
    return *outputs, *torch.autograd.grad(outputs, arguments[:2], directions)


@pytest.fixture
def calls(monkeypatch):
    """What reached the function of the module."""
    seen = []
    plain = apply_rotary_pos_emb

    def counted(q, k, cos, sin, unsqueeze_dim=1):
        seen.append(q.shape)
        return plain(q, k, cos, sin, unsqueeze_dim)

    monkeypatch.setitem(globals(), "apply_rotary_pos_emb", counted)
    return seen


def attention(name, implementation):
    """An attention module of a small model in float64, and arguments of one call."""
    torch.manual_seed(0)
    config = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 1}
    config |= {"num_attention_heads": 2, "vocab_size": 30}
    config |= {f"{token}_token_id": 0 for token in ("pad", "bos", "eos")}
    if name != "GPTNeoX":
        config |= {"num_key_value_heads": 1, "head_dim": 8}
    library = importlib.import_module("transformers")
    made = getattr(library, f"{name}Config")(**config, attn_implementation=implementation)
    model = getattr(library, f"{name}ForCausalLM")(made).double().eval()
    (module,) = [m for m in model.modules() if type(m).__name__ == f"{name}Attention"]
    return model, module


@pytest.mark.parametrize(
    ("name", "implementation"),
    [
        *((name, kind) for name in ("Llama", "Mistral", "Gemma") for kind in ("sdpa", "eager")),
        *((name, "eager") for name in ("Qwen2", "StableLm", "GPTNeoX")),
    ],
)
def test_models_compute_the_same(name, implementation):
    model, module = attention(name, implementation)
    if rotary_forward(module) is None:
        assert name != "Llama"
        pytest.skip("this version of transformers calls the function from elsewhere")
    ids = torch.randint(0, 30, (3, 6))
    embedded = model.get_input_embeddings()(ids).detach().requires_grad_()

    def run():
        logits = model(inputs_embeds=embedded).logits
        return logits, *torch.autograd.grad(logits.square().sum(), embedded)

    expected = run()
    module.forward = rotary_forward(module)
    got = run()
    torch.testing.assert_close(got[0], expected[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(got[1], expected[1], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("axis", [1, 2])
def test_rotation_equals_the_spelt_out_one(axis):
    q, k, cos, sin = inputs()
    if axis == 1:
        q, k = (x.detach().transpose(1, 2).requires_grad_() for x in (q, k))
    arguments = (q, k, cos, sin)
    expected = numbers(apply_rotary_pos_emb, arguments, unsqueeze_dim=axis)
    got = numbers(_exchanged(raising), arguments, unsqueeze_dim=axis)
    torch.testing.assert_close(got, expected, **EXACT)


def test_its_gradient_is_the_numerical_one():
    q, k, cos, sin = inputs(4)
    ours = _exchanged(raising)
    assert torch.autograd.gradcheck(lambda q, k: ours(q, k, cos, sin, unsqueeze_dim=2), (q, k))


@pytest.mark.parametrize(
    ("function", "known"),
    [
        (apply_rotary_pos_emb, True),
        (older, True),
        (other_default, False),
        (interleaved, False),
        (other_names, False),
        (one_axis, False),
        (raising, False),
        (Callable(), False),
        (None, False),
    ],
    ids=[
        "halves",
        "older",
        "other default",
        "interleaved",
        "other names",
        "one axis",
        "raising",
        "object",
        "none",
    ],
)
def test_only_a_function_that_computes_the_same_is_exchanged(function, known):
    state = torch.get_rng_state()
    assert _is_known(function) is known
    assert torch.equal(torch.get_rng_state(), state)


def test_a_wrapper_keeps_what_it_does(calls):
    function = wrapping(turned)
    copy = _rebuilt(function)
    q, k, cos, sin = inputs()
    expected = numbers(function, (q, k, cos, sin))
    before = len(calls)
    torch.testing.assert_close(numbers(copy, (q, k, cos, sin)), expected, **EXACT)
    torch.testing.assert_close(numbers(copy, (q, k, cos), old=sin), expected, **EXACT)
    assert len(calls) == before  # and the function of the module is not asked


@pytest.mark.parametrize(
    "function",
    [forgetful(turned), rotate_half, len],
    ids=["calls by name what it wraps", "without rotation", "built in"],
)
def test_what_cannot_be_copied_is_left_alone(function):
    assert _rebuilt(function) is None


@pytest.mark.parametrize(
    "change",
    [
        lambda q, k, cos, sin: (q, k, cos[..., :4], sin[..., :4]),
        lambda q, k, cos, sin: (q.bfloat16(), k.bfloat16(), cos.bfloat16(), sin.bfloat16()),
        lambda q, k, cos, sin: (q.float(), k.float(), cos, sin),
        lambda q, k, cos, sin: (q, k, cos.clone().requires_grad_(), sin),
        lambda q, k, cos, sin: (nn.Parameter(q.detach()), k, cos, sin),
    ],
    ids=["partial", "low precision", "two dtypes", "learnt angles", "subclass"],
)
def test_other_inputs_go_to_the_own_function(change):
    arguments, seen = change(*inputs()), []

    def own(*given, **named):
        seen.append((given, named))
        return "own"

    assert _exchanged(own)(*arguments, unsqueeze_dim=2) == "own"
    ((given, named),) = seen
    assert all(x is y for x, y in zip(given, arguments, strict=True))
    assert named == {"unsqueeze_dim": 2}


@pytest.mark.parametrize(
    ("rest", "named"), [((2,), {}), ((None, 2), {}), ((), {"position_ids": None})]
)
def test_other_arguments_go_to_the_own_function(rest, named):
    arguments, seen = inputs(), []
    _exchanged(lambda *given, **others: seen.append((given[4:], others)))(
        *arguments, *rest, **named
    )
    assert seen == [(rest, named)]


def forwards(model):
    return {name for name, module in model.named_modules() if "forward" in vars(module)}


def test_the_default_device_is_not_asked():
    def fresh(q, k, cos, sin, unsqueeze_dim=1):  # one that was not looked at yet
        return apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim)

    with torch.device("meta"):
        assert _is_known(fresh)


def test_put_back_after_a_pass_and_after_an_error():
    model, rows, seen = build("llama"), text_rows(), []

    def loss(model, batch):
        seen.append(forwards(model))
        if len(seen) > 4:
            raise RuntimeError("a batch failed")
        return model(input_ids=batch["input_ids"]).logits.square().sum((1, 2))

    with pytest.raises(RuntimeError, match="a batch failed"):
        gradtrail.attribute(model, rows, rows[:1], loss=loss, batch_size=1, progress=False)
    assert all(any(name.endswith("self_attn") for name in names) for names in seen)
    assert not forwards(model)


def test_modules_that_bring_something_of_their_own_are_left_alone():
    model = build("llama")
    first, second = (m for m in model.modules() if type(m).__name__ == "LlamaAttention")

    class Subclass(type(first)):
        pass

    first.__class__ = Subclass
    with ExitStack() as stack:
        fuse_elementwise(model, stack)
        assert "forward" not in vars(first)
        assert "forward" in vars(second)
    handle = second.register_forward_hook(lambda *_: None)
    with ExitStack() as stack:
        fuse_elementwise(model, stack)
        assert "forward" not in vars(second)
    handle.remove()
    second.forward = own = second.forward
    with ExitStack() as stack:
        fuse_elementwise(model, stack)
        assert second.forward is own


@pytest.mark.parametrize("reentrant", [None, False, True], ids=["plain", "kept", "reentrant"])
def test_scores_are_those_of_the_class(monkeypatch, reentrant):
    model, rows = build("llama"), text_rows()
    if reentrant is not None:
        enable = getattr(model, "activation_checkpointing_enable", None)
        (enable or model.gradient_checkpointing_enable)({"use_reentrant": reentrant})
        model.train()

    def scores():
        return gradtrail.attribute(model, rows, rows[:2], batch_size=3, progress=False).values

    got = scores()
    monkeypatch.setattr("gradtrail.hooks.fused.rotary_forward", lambda _: None)
    torch.testing.assert_close(got, scores(), rtol=1e-9, atol=1e-9)
