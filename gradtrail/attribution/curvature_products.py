r"""Products with the Gauss-Newton matrix: forward mode, the curvature of the loss, reverse mode.

The matrix is :math:`(1/N) \sum_b J_b^T H_b J_b` with ``J`` the Jacobian of the outputs in the
parameters and ``H`` the Hessian of the loss in the outputs: :math:`\mathrm{diag}(p) - p p^T` at
each position whose label counts for cross-entropy, the identity for half squared error.
Schraudolph, 2002, https://doi.org/10.1162/08997660260028683; Martens, 2020, sec. 8,
https://arxiv.org/abs/1412.1193.

Suffixes: b example, c class, q query (or probe).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from gradtrail.attribution.data import Rows, move_batch
from gradtrail.attribution.layer_maps import LayerMap, to_layers, to_parameters
from gradtrail.attribution.losses import Loss, outputs_of
from gradtrail.attribution.outputs import OutputKind, widened
from gradtrail.attribution.session import Session
from gradtrail.distributed import is_main, reduce_sum
from gradtrail.errors import UnsupportedLayerError
from gradtrail.kronecker.conjugate import Vectors
from gradtrail.progress import progress_bar

__all__ = ["GaussNewtonProducts"]

_OPTION = 'refine="cg"'
_NARROW = (torch.float16, torch.bfloat16)
_ALIVE = 4  # tangents of the largest result that are held at once, about
_CHUNK_ENTRIES = {"cpu": 1 << 24, "cuda": 1 << 28}
_UNFIT = ("forward AD", "functorch", "jvp", "vmap", "setup_context", "saved tensor hooks")
_FORWARD_ATTENTION = (None, "eager", "sdpa")


class GaussNewtonProducts:
    """The Gauss-Newton matrix of a model on a data set, as something that multiplies.

    Attributes:
        session: The open session.
        model: Its model, whole.
        rows: The training data.
        loss: Its loss.
        maps: The layers whose parameters the matrix is over.
        batch_size: Rows a batch.
    """

    session: Session
    model: nn.Module
    rows: Rows
    loss: Loss
    maps: Sequence[LayerMap]
    batch_size: int

    def __init__(
        self,
        session: Session,
        model: nn.Module,
        rows: Rows,
        loss: Loss,
        maps: Sequence[LayerMap],
        batch_size: int,
    ) -> None:
        """Prepare products.

        Args:
            session: The open session.
            model: Its model, whole.
            rows: The training data, at least one row.
            loss: A built-in loss.
            maps: The layers whose parameters the matrix is over.
            batch_size: Rows a batch.
        """
        self.session = session
        self.model = model
        self.rows = rows
        self.loss = loss
        self.maps = maps
        self.batch_size = batch_size
        self._outputs = _OutputModel(model, loss)
        parameters = dict(model.named_parameters())
        taken = [part.name for layer in maps for part in layer.parts]
        self._primals = {name: _wide(parameters[name].detach()) for name in taken}
        self._fixed = _widened_rest(model, self._primals)
        self._chunks: dict[int, int] = {}

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Let the model run in forward mode: without hooks, with attention that has it."""
        _check_attention(self.model)
        with ExitStack() as stack:
            stack.enter_context(_refusing_operations())
            stack.enter_context(warnings.catch_warnings())
            # torch's first jvp of a process scripts its decompositions, which it deprecates itself
            warnings.filterwarnings("ignore", "`torch.jit.script", DeprecationWarning)
            stack.enter_context(self.session.live.suspended())
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            for module in self.model.modules():
                if isinstance(module, nn.Embedding) and module.padding_idx is not None:
                    hook = module.register_forward_hook(_without_padding, with_kwargs=True)
                    stack.callback(hook.remove)
            yield

    def multiply(self, vectors: Vectors) -> dict[str, Tensor]:
        """Multiply by the matrix, in one pass over the data.

        Args:
            vectors: What to multiply, by layer. Shape ``[q, d]``.

        Returns:
            The products, in the dtype of ``vectors``. Shape ``[q, d]``.
        """
        tangents = self._tangents(vectors)
        sums = {name: torch.zeros_like(value) for name, value in tangents.items()}
        for function, size in self._batches("refine"):
            logits, pullback, labels = vjp(function, self._primals, has_aux=True)
            curved = partial(_curved, self._outputs.kind, logits, labels)
            count = next(iter(tangents.values())).shape[0]
            for first in range(0, count, size):
                part = slice(first, first + size)
                pushed = self._pushed(function, {k: v[part] for k, v in tangents.items()})
                (products,) = vmap(pullback)(curved(pushed))
                for name, value in products.items():
                    sums[name][part] += value
        if self.rows.whole is not None:
            reduce_sum(list(sums.values()), "products with the Gauss-Newton matrix")
        found = to_layers(self.maps, sums)
        return {name: value.to(vectors[name]) / self.rows.total for name, value in found.items()}

    def quadratic(self, vectors: Vectors) -> Tensor:
        """Multiply by the matrix from both sides, in one forward-mode pass over the data.

        Args:
            vectors: What to multiply, by layer. Shape ``[q, d]``.

        Returns:
            Each vector's quadratic form, on the CPU in float64. Shape ``[q]``.
        """
        tangents = self._tangents(vectors)
        count = next(iter(tangents.values())).shape[0]
        total = torch.zeros(count, dtype=torch.float64)
        for function, size in self._batches("mean curvature"):
            curved = partial(_curved, self._outputs.kind, *function(self._primals))
            for first in range(0, count, size):
                part = slice(first, first + size)
                pushed = self._pushed(function, {k: v[part] for k, v in tangents.items()})
                shares = (pushed * curved(pushed)).flatten(1).sum(1)
                total[part] += shares.cpu().double()
        if self.rows.whole is not None:
            reduce_sum([total], "quadratic forms")
        return total / self.rows.total

    def _tangents(self, vectors: Vectors) -> dict[str, Tensor]:
        cut = to_parameters(self.maps, vectors)
        return {name: value.to(self._primals[name]) for name, value in cut.items()}

    def _pushed(self, function: Callable[..., Any], tangents: Mapping[str, Tensor]) -> Tensor:
        """Directions of the outputs along directions of the parameters."""

        def push(tangent: dict[str, Tensor]) -> Tensor:
            return jvp(lambda primals: function(primals)[0], (self._primals,), (tangent,))[1]

        return vmap(push)(dict(tangents))

    def _batches(self, phase: str) -> Iterator[tuple[Callable[..., Any], int]]:
        """Every batch as a function of the parameters, with how many directions fit at once."""
        session = self.session
        narrow = any(p.dtype in _NARROW for p in self.model.parameters())
        enabled = session.progress and is_main()
        with progress_bar(phase, len(self.rows), enabled=enabled) as bar:
            for start, size, raw in self.rows.batches(self.batch_size):
                batch = move_batch(raw, session.device)
                if narrow:
                    batch = tree_map(_wide, batch)

                def function(primals: dict[str, Tensor], batch: Any = batch) -> Any:  # noqa: ANN401
                    named = {f"model.{name}": value for name, value in primals.items()}
                    return functional_call(self._outputs, {**self._fixed, **named}, (batch,))

                if start not in self._chunks:
                    self._chunks[start] = self._chunk_of(function)
                yield function, self._chunks[start]
                bar.update(size)

    def _chunk_of(self, function: Callable[..., Any]) -> int:
        """How many directions of one batch fit the budget: the same in every run."""
        with torch.no_grad(), _LargestResult() as seen:
            function(self._primals)
        budget = _CHUNK_ENTRIES.get(self.session.device.type, _CHUNK_ENTRIES["cpu"])
        return max(1, budget // (_ALIVE * max(1, seen.entries)))


class _OutputModel(nn.Module):
    """A model that returns what its loss looks at."""

    kind: OutputKind | None = None

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        """Take model and loss."""
        super().__init__()
        self.model = model
        self._loss = loss

    def forward(self, batch: Any) -> tuple[Tensor, Tensor]:  # noqa: ANN401
        """Logits or predictions in float32 or wider, and their labels or targets."""
        outputs = outputs_of(self._loss, self.model, batch, option=_OPTION)
        self.kind = outputs.kind
        return widened(outputs.logits), outputs.labels


class _LargestResult(TorchDispatchMode):
    """Notes the size of the largest tensor that any operation returns."""

    entries = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Run an operation."""
        del types
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.entries = max(self.entries, result.numel())
        return result


def _wide(value: Any) -> Any:  # noqa: ANN401
    return value.float() if isinstance(value, Tensor) and value.dtype in _NARROW else value


def _widened_rest(model: nn.Module, primals: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What else of a low-precision model is to be replaced: products are in float32 or wider."""
    rest = [*model.named_parameters(), *model.named_buffers()]
    return {
        f"model.{name}": value.detach().float()
        for name, value in rest
        if name not in primals and value.dtype in _NARROW
    }


def _curved(kind: OutputKind, logits: Tensor, labels: Tensor, pushed: Tensor) -> Tensor:
    """Multiply directions of the outputs by the curvature of the loss in them."""
    if kind == "squared_error":
        return pushed
    probabilities = logits.detach().softmax(-1) * (labels != -100).unsqueeze(-1)
    weighted = probabilities * pushed
    return weighted.addcmul(probabilities, weighted.sum(-1, keepdim=True), value=-1)


@contextmanager
def _refusing_operations() -> Iterator[None]:
    """Say which option it is that an operation without forward mode, or without vmap, fails."""
    try:
        yield
    except RuntimeError as error:  # NotImplementedError is one
        text = str(error)
        memory = isinstance(error, torch.OutOfMemoryError)
        if memory or not any(part in text for part in _UNFIT):
            raise
        raise UnsupportedLayerError(
            f"{_OPTION} must differentiate the model in forward mode, got an operation that does "
            f"not do that ({text.splitlines()[0][:160]}). Leave refine out."
        ) from error


def _without_padding(
    module: nn.Embedding, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
) -> Tensor:
    """Hold the padding row constant: it has no gradient, so it has no direction either."""
    index = args[0] if args else kwargs["input"]
    return torch.where((index == module.padding_idx).unsqueeze(-1), output.detach(), output)


def _check_attention(model: nn.Module) -> None:
    for module in model.modules():
        config = getattr(module, "config", None)
        chosen = getattr(config, "_attn_implementation", None)
        if chosen not in _FORWARD_ATTENTION:
            raise UnsupportedLayerError(
                f"{_OPTION} must run attention that has forward mode, got attn_implementation="
                f'{chosen!r}. Load the model with "sdpa" or "eager".'
            )
