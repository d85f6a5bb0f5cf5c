"""K-FAC and EK-FAC as objects that are bound to a model and remember their last fit."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Literal

from torch import nn

from gradtrail.attribution.bound import AbstractBoundAttributor
from gradtrail.attribution.data import as_rows
from gradtrail.attribution.fit_memory import FitMemory
from gradtrail.attribution.kronecker import KroneckerMethod
from gradtrail.attribution.losses import resolve_loss
from gradtrail.attribution.method import METHODS, make_method
from gradtrail.attribution.setup import (
    as_projection,
    call_of,
    check_ranks,
    make_session,
    padding_id,
)
from gradtrail.attribution.shares import in_step, inner_model
from gradtrail.hooks import select_layers
from gradtrail.kronecker import KroneckerFit

__all__ = ["EKFACAttributor", "KFACAttributor", "KroneckerAttributor"]


class KroneckerAttributor(AbstractBoundAttributor):
    """Scores with one curvature method and fits no more often than needed.

    The last fit is remembered: a call on the same training data, weights, layers and Fisher uses
    it again, whatever its damping, from the model or from stores. Method options (``damping``,
    ``fisher``, ``fisher_dir`` and the others that ``attribute`` takes for the method) go to the
    call.
    """

    def __init__(
        self,
        method: Literal["kfac", "ekfac"],
        model: nn.Module,
        **options: Any,  # noqa: ANN401
    ) -> None:
        """Bind a model; nothing is run.

        Args:
            method: ``"kfac"`` or ``"ekfac"``.
            model: The trained model.
            **options: ``loss``, ``layers``, ``batch_size`` and all else that ``attribute`` takes
                and that is not a call's own.
        """
        super().__init__(method, model, **options)
        self._memory = FitMemory()

    @property
    def fit_(self) -> KroneckerFit | None:
        """The fit that was made, loaded or used last, or None."""
        return self._memory.fit

    def fit(self, train: Any, **options: Any) -> KroneckerFit:  # noqa: ANN401
        """Make the fit, or load it; where it is there already no forward runs.

        Args:
            train: Training examples, at least one.
            **options: Options of the method.

        Returns:
            The fit, open until a newer one replaces it or ``close`` is called; ``describe()``
            prints its spectra.

        Raises:
            ValueError: If there are no training examples.
        """
        method, own = self._bound(options), self._options
        model = inner_model(self.model)
        rows = as_rows(train, "train", own["collate_fn"], padding_id(model))
        if not len(rows):
            raise ValueError("train must hold at least one example to fit on, got none.")
        loss = resolve_loss(own["loss"], own["loss_reduction"])
        selection = select_layers(model, layers=own["layers"], exclude=own["exclude"])
        projection = as_projection(own["projection"], own["seed"])
        selection = method.choose(model, selection, projection)
        session = make_session(
            model,
            selection,
            own["device"],
            projection,
            own["seed"],
            progress=own["progress"],
        )
        check_ranks(session, method)
        call = {
            **call_of(session, method),
            "train": len(rows),
            "batch_size": own["batch_size"],
        }
        with (
            in_step("fit", model, call),
            method.run(session, rows.share(), loss, own["batch_size"]) as run,
        ):
            found = run.find_fit()
            if found is None:
                with session.opened(rows, loss):
                    found = run.make_fit()
        return found

    def close(self) -> None:
        """Let go of the remembered fit and of files that held its tensors."""
        self._memory.close()

    def __enter__(self) -> KroneckerAttributor:
        """Enter a block at whose end the fit is let go.

        Returns:
            The attributor.
        """
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Let go of the fit."""
        self.close()

    def _call(self, options: dict[str, Any]) -> dict[str, Any]:
        """The method as an object, which remembers its fit."""
        return {"method": self._bound(options)}

    def _bound(self, options: dict[str, Any]) -> KroneckerMethod:
        """The method with a call's options, and this object's memory."""
        make_method(self.method, options)  # refuses options that are not the method's
        preset = {**METHODS[self.method].preset, "memory": self._memory}
        return KroneckerMethod(**{**preset, **options})


class KFACAttributor(KroneckerAttributor):
    """K-FAC bound to a model (Martens & Grosse, 2015, https://arxiv.org/abs/1503.05671)."""

    def __init__(self, model: nn.Module, **options: Any) -> None:  # noqa: ANN401
        """Bind a model.

        Args:
            model: The trained model.
            **options: What ``KroneckerAttributor`` takes.
        """
        super().__init__("kfac", model, **options)


class EKFACAttributor(KroneckerAttributor):
    """EK-FAC bound to a model (George et al., 2018, https://arxiv.org/abs/1806.03884)."""

    def __init__(self, model: nn.Module, **options: Any) -> None:  # noqa: ANN401
        """Bind a model.

        Args:
            model: The trained model.
            **options: What ``KroneckerAttributor`` takes.
        """
        super().__init__("ekfac", model, **options)
