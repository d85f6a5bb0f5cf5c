"""The highest scores of every query, merged batch by batch: no table of all scores is made.

Suffixes: b example of a batch, k kept example, q query.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from gradtrail.errors import GradTrailWarning

__all__ = ["TopScores"]


class TopScores:
    """Keeps the best of all scores that come, of equal ones the first.

    Examples come in the order of their rows, so that those which are kept, best first, stand before
    what comes and in the order of their rows among equals.
    """

    def __init__(self, k: int, columns: int) -> None:
        """Start with none.

        Args:
            k: How many are kept of every column.
            columns: Number of columns.
        """
        self._k = k
        self._values_kq = torch.zeros(0, columns, dtype=torch.float64)
        self._rows_kq = torch.zeros(0, columns, dtype=torch.int64)
        self._not_finite = 0

    def add(self, start: int, values_bq: Tensor) -> None:
        """Take the scores of some examples.

        Args:
            start: Row of the first one.
            values_bq: Their scores, on the CPU. Shape ``[b, q]``.
        """
        finite = torch.isfinite(values_bq)
        if not bool(finite.all()):
            self._not_finite += int((~finite).any(1).sum())
        rows_b1 = torch.arange(start, start + len(values_bq)).unsqueeze(1)
        if len(self._values_kq) < self._k:
            self._values_kq, self._rows_kq = self._merged(values_bq, rows_b1, slice(None))
            return
        better_q = (values_bq > _ranked(self._values_kq[-1])).any(0).nonzero()[:, 0]
        if len(better_q):
            values, rows = self._merged(values_bq, rows_b1, better_q)
            self._values_kq[:, better_q], self._rows_kq[:, better_q] = values, rows

    def _merged(
        self, values_bq: Tensor, rows_b1: Tensor, columns: Tensor | slice
    ) -> tuple[Tensor, Tensor]:
        """Choose the best of what is kept and of what came, in some columns."""
        values = torch.cat([self._values_kq[:, columns], values_bq[:, columns].double()])
        came = rows_b1.expand(len(values_bq), values.shape[1])
        rows = torch.cat([self._rows_kq[:, columns], came])
        best = _best(_ranked(values), self._k)
        return values.gather(0, best), rows.gather(0, best)

    def result(self) -> tuple[Tensor, Tensor]:
        """Give what was kept, best first.

        Returns:
            Scores, float64, and the rows they are of; fewer than ``k`` where there are fewer
            examples. Shape ``[k, q]`` each.
        """
        if self._not_finite:
            warnings.warn(
                f"The scores of {self._not_finite} training examples are not finite; among the "
                "highest, NaN ranks nowhere. Score without top_k to see which they are.",
                GradTrailWarning,
                stacklevel=6,
            )
        return self._values_kq, self._rows_kq


def _best(values_nq: Tensor, k: int) -> Tensor:
    """Find the largest of every column.

    ``topk`` takes any of equal values: where more than ``k`` reach the smallest that it took, a
    whole column is sorted.

    Args:
        values_nq: Values, none of them NaN. Shape ``[n, q]``.
        k: How many are wanted.

    Returns:
        Their rows, the largest first, and the first row first among equals. Shape
        ``[min(k, n), q]``.
    """
    values_kq, best_kq = values_nq.topk(min(k, len(values_nq)), dim=0)
    tied = ((values_nq >= values_kq[-1:]).sum(0) > len(best_kq)).nonzero()[:, 0]
    if len(tied):
        order = values_nq[:, tied].argsort(dim=0, descending=True, stable=True)
        best_kq[:, tied] = order[: len(best_kq)]
    best_kq = best_kq.sort(dim=0).values
    order = values_nq.gather(0, best_kq).argsort(dim=0, descending=True, stable=True)
    return best_kq.gather(0, order)


def _ranked(values: Tensor) -> Tensor:
    """Values to rank by: NaN ranks nowhere."""
    return torch.where(values.isnan(), -torch.inf, values)
