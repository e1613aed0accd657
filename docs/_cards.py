"""Memory that training a language model of a Llama's shape takes, by arithmetic.

    at the peak = weights + optimizer state + gradients + activations

Weights, state and gradients are counted by shape and come out as
``nanogpt_bench.setup.memory`` counts them on live tensors. Activations are estimated.
Clipping by the norm needs all gradients at once; with steps in the backward pass only
one exists at a time, the largest of which counts.

``python docs/_cards.py`` prints the tables of the pages on memory and fine-tuning.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from _markdown import markdown

#: weights that share one bound in an 8-bit moment, at most
LONGEST_BLOCK = 256
#: tokens of one sequence
TOKENS = 2048
#: experts that a token goes through, in the only mixture of experts of the tables
EXPERTS_PER_TOKEN = 8

#: rows and columns of a weight
Shape = tuple[int, int]


@dataclass(frozen=True)
class Model:
    """A model's widths; ``queries`` and ``keys`` are those of all heads together."""

    name: str
    layers: int
    width: int
    inner: int
    vocab: int
    queries: int
    keys: int
    tied: bool
    biases: bool = False
    #: experts of a layer, each ``inner`` wide, whose matrices are one parameter for all;
    #: 0 for no mixture
    experts: int = 0
    #: width of a head, if its queries and keys have norms of their own
    head: int = 0

    def matrices(self) -> list[Shape]:
        """Return the shapes of the hidden layers' weights.

        All experts of a layer count as one weight.
        """
        layer = [
            (self.queries, self.width),
            (self.keys, self.width),
            (self.keys, self.width),
            (self.width, self.queries),
        ]
        if self.experts:
            layer += [
                (2 * self.experts * self.inner, self.width),
                (self.experts * self.width, self.inner),
            ]
        else:
            layer += [
                (self.inner, self.width),
                (self.inner, self.width),
                (self.width, self.inner),
            ]
        return layer * self.layers

    def embedding(self) -> Shape:
        """Return the shape of the embedding."""
        return self.vocab, self.width

    def heads(self) -> list[Shape]:
        """Return the shape of the output layer's weight, unless it is the embedding's."""
        return [] if self.tied else [(self.vocab, self.width)]

    def small(self) -> list[Shape]:
        """Return the shapes of norms, routers and biases, those of a kind together."""
        shapes = [(2 * self.layers + 1, self.width)]
        if self.head:
            shapes.append((2 * self.layers, self.head))
        if self.experts:
            shapes += [(self.experts, self.width)] * self.layers
        if self.biases:
            shapes.append((self.layers, self.queries + 2 * self.keys))
        return shapes

    def all_shapes(self) -> list[Shape]:
        """Return the shapes of all parameters."""
        return [*self.matrices(), *self.heads(), self.embedding(), *self.small()]

    def parameters(self) -> int:
        """Return the number of parameters."""
        return sum(rows * columns for rows, columns in self.all_shapes())


MODELS = (
    Model("SmolLM2-135M", 30, 576, 1536, 49152, 576, 192, tied=True),
    Model("Llama-3.2-1B", 16, 2048, 8192, 128256, 2048, 512, tied=True),
    Model("SmolLM2-1.7B", 24, 2048, 8192, 49152, 2048, 2048, tied=True),
    Model("Qwen2.5-3B", 36, 2048, 11008, 151936, 2048, 256, tied=True, biases=True),
    Model("Qwen3-4B", 36, 2560, 9728, 151936, 4096, 1024, tied=True, head=128),
    Model("Llama-2-7B", 32, 4096, 11008, 32000, 4096, 4096, tied=False),
    Model("Llama-3.1-8B", 32, 4096, 14336, 128256, 4096, 1024, tied=False),
    Model("Qwen3-8B", 36, 4096, 12288, 151936, 4096, 1024, tied=False, head=128),
    Model("Qwen2.5-14B", 48, 5120, 13824, 152064, 5120, 1024, tied=False, biases=True),
    Model("Qwen3-30B-A3B", 48, 2048, 768, 151936, 4096, 512, tied=False, experts=128, head=128),
)


@dataclass(frozen=True)
class Memory:
    """Bytes that a training takes without activations."""

    weights_and_state: float
    #: of all gradients
    gradients: float
    #: of the largest gradient
    largest: float

    @property
    def peak(self) -> float:
        """Bytes with all gradients at once, as clipping by the norm needs them."""
        return self.weights_and_state + self.gradients

    @property
    def in_backward(self) -> float:
        """Bytes with one gradient at a time, as with steps in the backward pass."""
        return self.weights_and_state + self.largest


def in_float32(model: Model) -> Memory:
    """Return the memory of float32 weights under torch's AdamW."""
    return _with_gradients(model, 12 * model.parameters(), gradient_bytes=4)


def in_bfloat16(model: Model, moments: float) -> Memory:
    """Return the memory of bfloat16 weights under AdamW.

    Each of the two moments takes `moments` bytes per weight.
    """
    return _with_gradients(model, (2 + 2 * moments) * model.parameters(), gradient_bytes=2)


def in_one_byte(model: Model, *, muon: bool) -> Memory:
    """Return the memory of linear weights in one byte, the rest in float32.

    Linear weights have a scale per row. Moments are of 8 bits, one for Muon's matrices
    and two for all other parameters.
    """
    floats = [model.embedding(), *model.small()]
    weights_and_state = (
        _bytes_in_codes(model.matrices(), moments=1 if muon else 2)
        + _bytes_in_codes(model.heads(), moments=2)
        + _bytes_in_floats(floats, weight_bytes=4)
    )
    return _with_gradients(model, weights_and_state, gradient_bytes=4)


def all_in_codes(model: Model, *, muon: bool) -> Memory:
    """Return the memory of linear weights and embedding in one byte, the rest in bfloat16.

    All gradients are in bfloat16. Moments are as in `in_one_byte`.
    """
    weights_and_state = (
        _bytes_in_codes(model.matrices(), moments=1 if muon else 2)
        + _bytes_in_codes([*model.heads(), model.embedding()], moments=2)
        + _bytes_in_floats(model.small(), weight_bytes=2)
    )
    return _with_gradients(model, weights_and_state, gradient_bytes=2)


def activations(model: Model, tokens: int = TOKENS) -> float:
    """Estimate the activations in bfloat16, with activation checkpointing.

    They are the input of each block, one block, and the logits. A block holds inputs
    and outputs of its norms and matrices. Logits and their gradients are in bfloat16
    and in float32.
    """
    experts = EXPERTS_PER_TOKEN if model.experts else 1
    block = 6 * model.width + 2 * (model.queries + model.keys) + 4 * model.inner * experts
    return tokens * (2 * model.layers * model.width + 2 * block + 12 * model.vocab)


def to_load(model: Model) -> float:
    """Return the peak while a model is read into codes, embedding included.

    It holds the codes, the parameters in bfloat16, and the largest tensor.
    """
    coded = [*model.matrices(), *model.heads(), model.embedding()]
    codes = sum(_code_bytes(shape) for shape in coded)
    floats = sum(2 * rows * columns for rows, columns in model.small())
    return codes + floats + _largest_bytes(model, 2)


def _bytes_in_codes(shapes: Iterable[Shape], moments: int) -> int:
    return sum(_code_bytes(shape) + moments * _moment_bytes(shape) for shape in shapes)


def _bytes_in_floats(shapes: Iterable[Shape], weight_bytes: int) -> int:
    total = 0
    for rows, columns in shapes:
        total += weight_bytes * rows * columns + 2 * _moment_bytes((rows, columns))
    return total


def _code_bytes(shape: Shape) -> int:
    """Return the bytes of a weight's codes and of its scales, one per row."""
    rows, columns = shape
    return rows * columns + 4 * rows


def _moment_bytes(shape: Shape) -> int:
    """Return the bytes of an 8-bit moment.

    It has one per weight, and a bound of four for each block. Blocks are the longest
    that divide a row.
    """
    rows, columns = shape
    longest = min(columns, LONGEST_BLOCK)
    block = max(size for size in range(1, longest + 1) if columns % size == 0)
    return rows * columns + 4 * rows * columns // block


def _with_gradients(model: Model, weights_and_state: float, gradient_bytes: int) -> Memory:
    return Memory(
        weights_and_state,
        gradients=gradient_bytes * model.parameters(),
        largest=_largest_bytes(model, gradient_bytes),
    )


def _largest_bytes(model: Model, bytes_per_weight: int) -> int:
    return bytes_per_weight * max(rows * columns for rows, columns in model.all_shapes())


def peaks(model: Model) -> dict[str, float]:
    """Return the bytes at the peak of a step, by way of training."""
    adam = all_in_codes(model, muon=False)
    muon = all_in_codes(model, muon=True)
    with_8_bits = in_bfloat16(model, 1 + 4 / LONGEST_BLOCK)
    return {
        "float32 AdamW": in_float32(model).peak,
        "bfloat16 AdamW": in_bfloat16(model, 2).peak,
        "bfloat16, 8-bit AdamW": with_8_bits.peak,
        "bfloat16, 8-bit AdamW, steps in backward": with_8_bits.in_backward,
        "one-byte AdamW": adam.peak,
        "one-byte AdamW, steps in backward": adam.in_backward,
        "one-byte Muon, steps in backward": muon.in_backward,
    }


def memory_table() -> str:
    """Return GB at the peak, of activations, and to read into codes, a line per model."""
    header = (
        "model",
        "parameters, billion",
        *peaks(MODELS[0]),
        f"activations, {TOKENS:,} tokens",
        "to load",
    )
    rows = []
    for model in MODELS:
        sizes = [*peaks(model).values(), activations(model), to_load(model)]
        rows.append([model.name, f"{model.parameters() / 1e9:.2f}", *map(gb, sizes)])
    return markdown(header, rows)


#: README's models
README_MODELS = ("SmolLM2-1.7B", "Qwen3-4B", "Llama-3.1-8B")
#: README's ways of training, and their names in `peaks`
README_WAYS = {
    "bfloat16, torch AdamW": "bfloat16 AdamW",
    "bfloat16, 8-bit AdamW": "bfloat16, 8-bit AdamW",
    "bfloat16, 8-bit AdamW, steps in backward": "bfloat16, 8-bit AdamW, steps in backward",
    "one byte, AdamW": "one-byte AdamW",
    "**one byte, AdamW, steps in backward**": "one-byte AdamW, steps in backward",
    "**one byte, Muon, steps in backward**": "one-byte Muon, steps in backward",
}


def model_named(name: str) -> Model:
    """Return the model of that name."""
    return next(model for model in MODELS if model.name == name)


def readme_table() -> str:
    """Return GB of README's models, activations of one sequence included, a line per way."""
    models = [model_named(name) for name in README_MODELS]
    rows = []
    for name, way in README_WAYS.items():
        rows.append([name, *(gb(peaks(model)[way] + activations(model)) for model in models)])
    return markdown((f"GB, one sequence of {TOKENS:,} tokens", *README_MODELS), rows)


#: final losses of SmolLM2-135M after 200 steps of EU law, in nats per token, for seeds
#: 42, 43 and 44, from the log
FINAL_LOSSES: dict[str, tuple[float, ...]] = {
    "AdamW, float32": (2.166, 2.201, 2.106),
    "AdamW, bfloat16": (2.677, 2.683, 2.680),
    "the code above": (2.181, 2.225, 2.131),
}


def recipe_table() -> str:
    """Return loss and memory of README's recipe and of AdamW.

    Memory is given in bytes per parameter and in GB, without and with gradients.
    """
    header = (
        "SmolLM2-135M, 200 steps",
        "loss, nats per token",
        "bytes per parameter",
        "at the peak, with gradients",
    )
    model = MODELS[0]
    float32 = in_float32(model)
    bfloat16 = in_bfloat16(model, 2)
    recipe = all_in_codes(model, muon=False)
    sizes = (
        (float32.weights_and_state, float32.peak),
        (bfloat16.weights_and_state, bfloat16.peak),
        (recipe.weights_and_state, recipe.in_backward),
    )
    rows = []
    for (name, losses), sizes_of_row in zip(FINAL_LOSSES.items(), sizes, strict=True):
        loss = sum(losses) / len(losses)
        rows.append([name, f"{loss:.3f}", *(_size_text(size, model) for size in sizes_of_row)])
    return markdown(header, rows)


#: measured MiB of SmolLM2-135M after a few steps: of weights and state, and with
#: gradients at the peak
MEASURED = {
    "float32 AdamW": (1539, 2053),
    "one-byte AdamW, clipped": (472, 985),
    "one-byte AdamW, step in backward": (472, 580),
    "one-byte Muon, step in backward": (368, 476),
}


def measured_table() -> str:
    """Return the sizes in MEASURED, in bytes per parameter and in GB."""
    model = MODELS[0]
    rows = []
    for name, mebibytes in MEASURED.items():
        rows.append([name, *(_size_text(size * 2**20, model) for size in mebibytes)])
    return markdown(("SmolLM2-135M", "bytes per parameter", "at the peak, with gradients"), rows)


def _size_text(size: float, model: Model) -> str:
    return f"{size / model.parameters():.1f} ({gb(size)} GB)"


def gb(size: float) -> str:
    """Return bytes as text in GB, 10^9 bytes, with three digits or so.

    >>> gb(4.96e8), gb(14.84e9), gb(177e9)
    ('0.50', '14.8', '177')
    """
    if size < 1e10:
        decimals = 2
    elif size < 1e11:
        decimals = 1
    else:
        decimals = 0
    return f"{size / 1e9:.{decimals}f}"


if __name__ == "__main__":
    print("\n".join([readme_table(), recipe_table(), memory_table(), measured_table()]))
