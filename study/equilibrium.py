"""The share of the floor of rounding that a training reaches, from one run in floats.

Law 2 of docs/laws.md: after rates that sum to tau a training pays

    1/4 sum_j q_j (1 - exp(-2 lambda_j tau))

with the eigenvalues of P^(1/2) H P^(1/2), and by direction the noise q_i = S_i E|m_i|. All of it
is read off a run under Muon in floats and its last checkpoint, with nothing fitted:

    python study/equilibrium.py runs/q21-muon-0.95 --formats E7M0

The run has recorded sum |m| S for each kind of layer (`monitor.floor_formats`), which gives the
mean of |m| there. P has one number for each matrix, the mean size of Muon's directions over that
of m. H is the Hessian of the loss over some batches, with respect to the matrices that Muon
steps: the output layer, which Adam steps, is left out. The sum is estimated by stochastic Lanczos
quadrature. Directions of negative curvature have no equilibrium: they count as 0, and the table
has their part of the noise.
"""

import argparse
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path[:0] = [str(Path(__file__).parent.parent / "docs")]

from _markdown import markdown  # noqa: E402

from nanogpt_bench.config.schema import Config  # noqa: E402
from nanogpt_bench.data.batches import Corpus, batch, open_corpus  # noqa: E402
from nanogpt_bench.model.gpt import GPT  # noqa: E402
from nanogpt_bench.model.weights import linear_layers  # noqa: E402
from nanogpt_bench.monitors.floor import FLOOR, layer_kind, spacing_in_codes  # noqa: E402
from nanogpt_bench.runs.load import Run, load_run  # noqa: E402
from nanogpt_bench.runs.trained import choose, fill_floats, load, trained_shape  # noqa: E402
from nanogpt_bench.setup.optimizers import lr_factor  # noqa: E402

HEADER = ("run", "format", "floor, nats", "share", "predicted gap, nats", "noise at lambda < 0")
#: Lanczos steps, and start vectors of each format
STEPS, PROBES = 30, 2
#: sequences of a batch of the Hessian, and batches
HESSIAN_BATCH, HESSIAN_BATCHES = 48, 2
#: where batches begin that no training drew
FIRST_STEP = 10**6

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class FloatRun:
    """A run, its model at the last checkpoint, and what it trained on."""

    run: Run
    model: GPT
    config: Config
    corpus: Corpus

    @property
    def rates(self) -> float:
        """The sum of the learning rates, tau."""
        settings, steps = self.config.optimizer, self.config.train.max_steps
        factors = (lr_factor(settings, step, steps) for step in range(steps))
        return (settings.lr or 0.0) * sum(factors)

    def batches(self, size: int, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches of the training text."""
        block = self.model.shape.block_size
        for step in range(FIRST_STEP, FIRST_STEP + count):
            yield batch(self.corpus.train, size, block, seed=self.config.seed, step=step)


@dataclass(frozen=True)
class Noise:
    """q = S E|m|, and P, of each weight."""

    added: Weights
    preconditioner: Weights


@dataclass(frozen=True)
class Spectrum:
    """Ritz values and their weights, whose sum is the squared length of the start vector."""

    values: Tensor
    weights: Tensor

    def reached(self, tau: float) -> float:
        """Return the sum over values of weight times 1 - exp(-2 value tau).

        >>> spectrum = Spectrum(torch.tensor([0.0, 1.0, -1.0]), torch.tensor([1.0, 2.0, 4.0]))
        >>> round(spectrum.reached(0.5 * math.log(2)), 3)
        1.0
        """
        shares = 1 - torch.exp(-2 * self.values.clamp(min=0) * tau)
        return float((self.weights * shares).sum())

    @property
    def total(self) -> float:
        """The sum of the weights."""
        return float(self.weights.sum())

    @property
    def below_zero(self) -> float:
        """The sum of the weights of negative values."""
        return float(self.weights[self.values < 0].sum())


def lanczos(apply: Callable[[Tensor], Tensor], start: Tensor, steps: int) -> Spectrum:
    """Return the spectrum of a symmetric operator as a vector sees it.

    >>> diagonal = torch.tensor([1.0, 2.0, 4.0])
    >>> spectrum = lanczos(lambda x: diagonal * x, torch.tensor([1.0, 1.0, 2.0]), 3)
    >>> [round(float(value), 3) for value in spectrum.values]
    [1.0, 2.0, 4.0]
    >>> [round(float(weight), 3) for weight in spectrum.weights]
    [1.0, 1.0, 4.0]
    """
    basis: list[Tensor] = []
    diagonal: list[float] = []
    beside: list[float] = []
    vector = start / start.norm()
    for _ in range(steps):
        basis.append(vector)
        image = apply(vector)
        diagonal.append(float(vector @ image))
        # twice, since rounding brings components of earlier vectors back
        for _ in range(2):
            for other in basis:
                image = image - (other @ image) * other
        length = float(image.norm())
        if length < 1e-6 * abs(diagonal[0]):
            break
        beside.append(length)
        vector = image / length
    beside = beside[: len(diagonal) - 1]
    matrix = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
    for place, value in enumerate(beside):
        matrix[place, place + 1] = matrix[place + 1, place] = value
    values, vectors = torch.linalg.eigh(matrix)
    return Spectrum(values, vectors[0].square() * float(start.norm()) ** 2)


def read(folder: Path) -> FloatRun:
    """Return a run under Muon at its last checkpoint."""
    path = choose(folder)
    trained = load(path)
    model = GPT(trained_shape(path))
    fill_floats(model, trained, str(path))
    return FloatRun(load_run(folder), model, trained.config, open_corpus(trained.config))


def code_weights(model: GPT) -> Weights:
    """Return the matrices that Muon steps, by name."""
    layers = linear_layers(model)
    layers.pop("lm_head")
    return {f"{name}.weight": layer.weight for name, layer in layers.items()}


def noise_of(trained: FloatRun, fmt: str) -> Noise:
    """Return q and P of each matrix for rounding to a format.

    Spacings are those of the last weights under the scales of new one-byte weights.
    """
    spacings = {}
    for name, weight in code_weights(trained.model).items():
        spacings[name] = spacing_in_codes(weight, fmt)
    totals: dict[str, float] = defaultdict(float)
    for name, spacing in spacings.items():
        totals[_kind(name)] += float(spacing.sum())
    noise = Noise({}, {})
    for name, spacing in spacings.items():
        kind = _kind(name)
        floor = trained.run.curve(f"{FLOOR.part(fmt).name}/{kind}")[1][-1]
        average = 4 * floor / totals[kind]
        noise.added[name] = spacing * average
        size = mean_direction(spacing.shape)
        noise.preconditioner[name] = torch.full_like(spacing, size / average)
    return noise


def _kind(name: str) -> str:
    return layer_kind(name.removesuffix(".weight"))


def mean_direction(shape: torch.Size) -> float:
    """Return the mean size of Muon's directions, of a matrix of normal noise.

    They are ``0.2 sqrt(max(R, C))`` times its orthogonal polar factor.

    >>> round(mean_direction(torch.Size((128, 512))), 3)
    0.16
    """
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    left, _, right = torch.linalg.svd(noise, full_matrices=False)
    return 0.2 * math.sqrt(max(shape)) * float((left @ right).abs().mean())


def hessian_product(trained: FloatRun, noise: Noise) -> Callable[[Tensor], Tensor]:
    """Return the product of ``P^(1/2) H P^(1/2)`` with a flat vector."""
    weights = {name: weight.detach() for name, weight in code_weights(trained.model).items()}
    sizes = [weight.numel() for weight in weights.values()]
    roots = torch.cat([noise.preconditioner[name].flatten() for name in weights]).sqrt()
    batches = list(trained.batches(HESSIAN_BATCH, HESSIAN_BATCHES))

    def loss(values: Mapping[str, Tensor]) -> Tensor:
        total = torch.zeros(())
        for tokens, targets in batches:
            logits = functional_call(trained.model, dict(values), (tokens,))
            total = total + torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), targets.flatten()
            )
        return total / len(batches)

    def product(vector: Tensor) -> Tensor:
        parts = (roots * vector).split(sizes)
        leaves = [weight.clone().requires_grad_() for weight in weights.values()]
        # the fused kernels of attention have no second derivative
        with sdpa_kernel(SDPBackend.MATH):
            value = loss(dict(zip(weights, leaves, strict=True)))
            gradients = torch.autograd.grad(value, leaves, create_graph=True)
            along = sum(
                (gradient * part.view_as(gradient)).sum()
                for gradient, part in zip(gradients, parts, strict=True)
            )
            images = torch.autograd.grad(along, leaves)
        return roots * torch.cat([image.flatten() for image in images])

    return product


def line_of(trained: FloatRun, name: str, fmt: str) -> list[str]:
    """Return the line of a run and a format."""
    noise = noise_of(trained, fmt)
    flat = torch.cat([part.flatten() for part in noise.added.values()])
    apply = hessian_product(trained, noise)
    generator = torch.Generator().manual_seed(0)
    reached = total = below_zero = 0.0
    for _ in range(PROBES):
        signs = torch.randint(0, 2, flat.shape, generator=generator) * 2 - 1
        spectrum = lanczos(apply, flat.sqrt() * signs, STEPS)
        reached += spectrum.reached(trained.rates)
        total += spectrum.total
        below_zero += spectrum.below_zero
    floor = float(flat.sum()) / 4
    return [
        f"`{name}`",
        fmt,
        f"{floor:.3f}",
        f"{reached / total:.2f}",
        f"{floor * reached / total:.3f}",
        f"{below_zero / total:.2f}",
    ]


def table(folders: Sequence[Path], formats: Sequence[str]) -> str:
    """Return a line for each run and format."""
    lines = []
    for folder in folders:
        trained = read(folder)
        lines += [line_of(trained, folder.name, fmt) for fmt in formats]
    return markdown(HEADER, lines)


def main() -> None:
    """Print the table of the runs in the given folders."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folders")
    parser.add_argument("--formats", nargs="+", default=["E2M5", "E4M3", "E5M2", "E7M0"])
    arguments = parser.parse_args()
    print(table(arguments.runs, arguments.formats), end="")


if __name__ == "__main__":
    main()
