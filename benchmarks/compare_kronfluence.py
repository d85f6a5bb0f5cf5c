"""K-FAC and EK-FAC scores beside those of kronfluence 1.0.1, in one process of its own venv.

A small causal language model whose blocks are ``nn.Linear`` learns text of a few made-up sources.
Every position has a label, so that both libraries count the same positions. A third set of scores
is written out from plain autograd in float64: where the two libraries differ, it says who is right.

EK-FAC has one spectrum and one rule of damping. For K-FAC kronfluence damps the products of the
covariances' eigenvalues and gradtrail each covariance, so the two agree only where the damping
vanishes; the reference is computed by either rule. kronfluence's ``S`` is a mean over positions,
gradtrail's over examples: K-FAC scores without damping differ by the number of positions.

Needs gradtrail and ``kronfluence==1.0.1`` in one environment; no test depends on it.

    python benchmarks/compare_kronfluence.py

Suffixes: n training example, q query, s position, i input (with a constant for the bias), o output.
"""

from __future__ import annotations

import argparse
import copy
import json
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from kronfluence.analyzer import Analyzer, prepare_model
from kronfluence.arguments import FactorArguments, ScoreArguments
from kronfluence.task import Task
from scipy.stats import spearmanr
from torch import Tensor, nn
from torch.nn import functional as F

import gradtrail
from gradtrail.reference import per_example_gradients

LAYERS, WIDTH, HEADS, VOCABULARY, TOKENS = 2, 48, 4, 100, 32
SOURCES, STEPS, LEAST = 8, 400, 0.9999
FACTORS, SCORES = "factors", "scores"


class Block(nn.Module):
    """Causal attention and a two-layer network, each behind a norm, as in GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x_bsi: Tensor) -> Tensor:
        parts = self.qkv(self.norm_1(x_bsi)).chunk(3, dim=2)
        q, k, v = (part.unflatten(2, (HEADS, -1)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_bsi = x_bsi + self.out(mixed.transpose(1, 2).flatten(2))
        return x_bsi + self.down(F.gelu(self.up(self.norm_2(x_bsi))))


class TinyGPT(nn.Module):
    """Token and position embeddings, blocks, a norm and an output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(0.02 * torch.randn(TOKENS, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids_bs: Tensor) -> Tensor:
        x_bsi = self.tokens(ids_bs) + self.positions[: ids_bs.shape[1]]
        for block in self.blocks:
            x_bsi = block(x_bsi)
        return self.head(self.norm(x_bsi))


def losses(model: nn.Module, batch: Tensor) -> Tensor:
    """Cross-entropy of every next token, summed by example: all positions have a label. ``[b]``."""
    logits = model(batch[:, :-1])
    return F.cross_entropy(logits.transpose(1, 2), batch[:, 1:], reduction="none").sum(1)


def texts(count: int, seed: int) -> list[Tensor]:
    """Rows of ``TOKENS + 1`` tokens, each from one of a few Markov sources."""
    rules = torch.Generator().manual_seed(0)
    moves = 3 * torch.randn(SOURCES, VOCABULARY, VOCABULARY, generator=rules)
    moves = moves.softmax(2)
    draws = torch.Generator().manual_seed(seed)
    source = torch.randint(0, SOURCES, (count,), generator=draws)
    tokens = [torch.randint(0, VOCABULARY, (count,), generator=draws)]
    for _ in range(TOKENS):
        chances = moves[source, tokens[-1]]
        tokens.append(torch.multinomial(chances, 1, generator=draws)[:, 0])
    return list(torch.stack(tokens, dim=1))


def trained(data: list[Tensor], seed: int) -> nn.Module:
    """Train on the data until it is half known by heart, in float32."""
    torch.manual_seed(seed)
    model, rows = TinyGPT(), torch.stack(data)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(STEPS):
        batch = rows[torch.randint(0, len(rows), (32,))]
        loss = losses(model, batch).mean() / TOKENS
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step in {0, STEPS - 1}:
            print(f"step {step}: loss {float(loss.detach()):.3f} a token")
    return model.eval()


def block_linears(model: nn.Module) -> list[str]:
    """Names of the linear layers of the blocks."""
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name.startswith("blocks.")
    ]


# ---------------------------------------------------------------- the two libraries


class SumLoss(Task):
    """The loss of training and measurement: sums over positions and batch, of the data's labels."""

    def __init__(self, names: list[str]) -> None:
        self.names = names

    def compute_train_loss(self, batch: Tensor, model: nn.Module, sample: bool = False) -> Tensor:
        if sample:
            raise ValueError("sample must be False: the empirical Fisher is compared.")
        return losses(model, batch).sum()

    def compute_measurement(self, batch: Tensor, model: nn.Module) -> Tensor:
        return losses(model, batch).sum()

    def get_influence_tracked_modules(self) -> list[str]:
        return self.names


@dataclass(frozen=True)
class Case:
    """What is scored.

    Attributes:
        method: ``"kfac"`` or ``"ekfac"``.
        damping: Ours.
        relative: Whether it is a multiple of a mean eigenvalue.
        theirs: kronfluence's, absolute; None is 0.1 of the mean eigenvalue.
        same_rule: Whether both libraries damp alike here, so that they must agree.
        note: What it shows.
    """

    method: str
    damping: float
    relative: bool
    theirs: float | None
    same_rule: bool
    note: str


def score_ours(model: nn.Module, train: list[Tensor], query: list[Tensor], case: Case) -> Tensor:
    """One call. Shape ``[n, q]``."""
    return gradtrail.attribute(
        model,
        train,
        query,
        method=case.method,
        loss=losses,
        layers=block_linears(model),
        damping=case.damping,
        relative_damping=case.relative,
        batch_size=16,
        progress=False,
    ).values.double()


def score_theirs(model: nn.Module, train: list[Tensor], query: list[Tensor], case: Case) -> Tensor:
    """Fit the factors and score all pairs. Shape ``[n, q]``."""
    dtype = next(model.parameters()).dtype
    task = SumLoss(block_linears(model))
    factors = FactorArguments(
        strategy=case.method,
        use_empirical_fisher=True,
        activation_covariance_dtype=dtype,
        gradient_covariance_dtype=dtype,
        per_sample_gradient_dtype=dtype,
        lambda_dtype=dtype,
    )
    scores = ScoreArguments(
        damping_factor=case.theirs,
        per_sample_gradient_dtype=dtype,
        precondition_dtype=dtype,
        score_dtype=dtype,
    )
    with tempfile.TemporaryDirectory() as folder:
        analyzer = Analyzer(
            "compare",
            prepare_model(copy.deepcopy(model), task),
            task,
            cpu=True,
            disable_tqdm=True,
            output_dir=folder,
        )
        analyzer.fit_all_factors(FACTORS, train, per_device_batch_size=16, factor_args=factors)
        analyzer.compute_pairwise_scores(
            SCORES,
            FACTORS,
            query,
            train,
            per_device_query_batch_size=16,
            per_device_train_batch_size=16,
            score_args=scores,
        )
        return analyzer.load_pairwise_scores(SCORES)["all_modules"].t().double()


# ---------------------------------------------------------------- the reference


@dataclass(frozen=True, eq=False)
class Layer:
    """What one layer has in float64, by plain autograd.

    Attributes:
        train_noi: Per-example gradients. Shape ``[n, o, i]``.
        query_qoi: Those of the queries. Shape ``[q, o, i]``.
        activation: Eigenvalues and eigenvectors of ``A``.
        gradient: Eigenvalues and eigenvectors of ``S``.
    """

    train_noi: Tensor
    query_qoi: Tensor
    activation: tuple[Tensor, Tensor]
    gradient: tuple[Tensor, Tensor]

    def turned(self, gradients: Tensor) -> Tensor:
        """Gradients in the eigenbases."""
        return self.gradient[1].t() @ gradients @ self.activation[1]

    def spectrum(self, method: str) -> Tensor:
        """Products of eigenvalues, or the mean squares of the gradients. Shape ``[o, i]``."""
        if method == "ekfac":
            return self.turned(self.train_noi).square().mean(0)
        return self.gradient[0].unsqueeze(1) * self.activation[0]

    def scores(self, inverse_oi: Tensor) -> Tensor:
        """Products in the eigenbases, weighed. Shape ``[n, q]``."""
        left, right = self.turned(self.train_noi), self.turned(self.query_qoi) * inverse_oi
        return left.flatten(1) @ right.flatten(1).t()


def reference_layers(model: nn.Module, train: list[Tensor], query: list[Tensor]) -> list[Layer]:
    """Differentiate every example alone.

    Args:
        model: The model in float64.
        train: Training rows.
        query: Queries.

    Returns:
        The layers of ``block_linears``.
    """
    names = block_linears(model)
    wanted = [f"{name}.{part}" for name in names for part in ("weight", "bias")]
    gradients = [
        per_example_gradients(model, (row.unsqueeze(0) for row in rows), losses, wanted)
        for rows in (train, query)
    ]
    moments = covariances(model, names, train)
    layers = []
    for name in names:
        train_noi, query_qoi = (
            torch.cat([found[f"{name}.weight"], found[f"{name}.bias"].unsqueeze(2)], dim=2)
            for found in gradients
        )
        activation, gradient = (torch.linalg.eigh(moment) for moment in moments[name])
        layers.append(Layer(train_noi, query_qoi, activation, gradient))
    return layers


def covariances(
    model: nn.Module, names: list[str], rows: list[Tensor]
) -> dict[str, tuple[Tensor, Tensor]]:
    """``A`` as a mean over positions and ``S`` as a mean over examples of sums over positions."""
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    sums: dict[str, tuple[Tensor, Tensor]] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            del module
            seen[name] = (inputs[0], output)

        return hook

    hooks = [model.get_submodule(name).register_forward_hook(keep(name)) for name in names]
    for row in rows:
        loss = losses(model, row.unsqueeze(0)).sum()
        for name, g in zip(
            names, torch.autograd.grad(loss, [seen[name][1] for name in names]), strict=True
        ):
            a_si, g_so = seen[name][0][0].detach(), g[0]
            a_si = torch.cat([a_si, torch.ones_like(a_si[:, :1])], dim=1)
            new = (a_si.t() @ a_si / len(a_si), g_so.t() @ g_so)
            old = sums.get(name, (0, 0))
            sums[name] = (old[0] + new[0] / len(rows), old[1] + new[1] / len(rows))
    for hook in hooks:
        hook.remove()
    return sums


def score_reference(layers: list[Layer], case: Case, *, rule: str) -> Tensor:
    """Scores by one library's rule of damping. Shape ``[n, q]``.

    Args:
        layers: Everything in float64.
        case: What is scored.
        rule: ``"factors"`` damps each covariance (ours), ``"product"`` the products of their
            eigenvalues (kronfluence's); EK-FAC has one rule.

    Returns:
        The sum over layers.
    """
    total = torch.zeros(())
    for layer in layers:
        if case.method == "kfac" and rule == "factors":
            sides = []
            for values, _ in (layer.gradient, layer.activation):
                added = case.damping * (values.mean() if case.relative else 1.0)
                sides.append(inverse(values, added))
            total = total + layer.scores(sides[0].unsqueeze(1) * sides[1])
            continue
        spectrum = layer.spectrum(case.method)
        added = 0.1 * spectrum.mean() if case.theirs is None else case.theirs
        total = total + layer.scores(inverse(spectrum, added))
    return total


def inverse(values: Tensor, added: Tensor | float) -> Tensor:
    """Invert a damped spectrum; rounding errors of an undamped one give 0."""
    values = values.clamp(min=0)
    floor = values.max() * 1e-13 if added == 0 else -1.0
    return torch.where(values > floor, 1 / (values + added), torch.zeros_like(values))


# ---------------------------------------------------------------- the comparison


def agreement(left: Tensor, right: Tensor) -> dict[str, float]:
    """Compare two score matrices over all pairs, after one global factor."""
    x, y = left.flatten(), right.flatten()
    factor = float((x @ y) / (y @ y))
    return {
        "pearson": float(torch.corrcoef(torch.stack([x, y]))[0, 1]),
        "spearman": float(spearmanr(x.numpy(), y.numpy()).statistic),
        "factor": factor,
        "largest_difference": float((x - factor * y).abs().max() / x.std()),
    }


def cases(layers: list[Layer]) -> list[Case]:
    """EK-FAC at one relative and one absolute damping, K-FAC without damping and at 0.1."""
    means = torch.stack([layer.spectrum("ekfac").mean() for layer in layers])
    absolute = float(0.1 * means.median())
    products = torch.stack([layer.spectrum("kfac").mean() for layer in layers])
    vanishing = float(1e-9 * products.median() / TOKENS)
    return [
        Case("ekfac", 0.1, True, None, True, "0.1 of the mean eigenvalue in both"),
        Case("ekfac", absolute, False, absolute, True, "one absolute damping in both"),
        Case("kfac", 0.0, True, vanishing, True, "no damping, and a vanishing one in kronfluence"),
        Case("kfac", 0.1, True, None, False, "0.1 of the mean, each by its own rule"),
    ]


def main() -> None:
    """Train, score three times, compare and print; fail where the required agreement is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-train", type=int, default=192)
    parser.add_argument("--num-query", type=int, default=48)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning, module="kronfluence")
    warnings.filterwarnings("ignore", category=gradtrail.GradTrailWarning, message=".*damping=0")
    train, query = texts(options.num_train, 1), texts(options.num_query, 2)
    model = trained(train, options.seed)
    layers = reference_layers(copy.deepcopy(model).double(), train, query)
    results, missed = [], []
    header = f"{'scores':<26} {'pearson':>12} {'spearman':>11} {'factor':>10} {'largest':>9}"
    for dtype in (torch.float32, torch.float64):
        cast = copy.deepcopy(model).to(dtype)
        for case in cases(layers):
            ours, theirs = (score(cast, train, query, case) for score in (score_ours, score_theirs))
            rows = {
                "gradtrail / kronfluence": agreement(ours, theirs),
                "gradtrail / reference": agreement(
                    ours, score_reference(layers, case, rule="factors")
                ),
                "kronfluence / reference": agreement(
                    theirs, score_reference(layers, case, rule="product")
                ),
            }
            print(f"\n{case.method}, {str(dtype).removeprefix('torch.')}, {case.note}\n{header}")
            for name, row in rows.items():
                figures = "{pearson:>12.9f} {spearman:>11.7f} {factor:>10.5f}".format(**row)
                print(f"{name:<26} {figures} {row['largest_difference']:>9.1e}")
            if case.same_rule and rows["gradtrail / kronfluence"]["pearson"] < LEAST:
                missed.append(f"{case.method}, {dtype}, {case.note}")
            results.append({**vars(case), "dtype": str(dtype), **rows})
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        versions = {"torch": torch.__version__, "kronfluence": version("kronfluence")}
        options.output.write_text(json.dumps({**versions, "results": results}, indent=1) + "\n")
    if missed:
        raise SystemExit(f"Pearson below {LEAST}: {'; '.join(missed)}")


if __name__ == "__main__":
    main()
