"""Memory that training a language model of a Llama's shape takes, by arithmetic.

Weights, optimizer state and gradients are counted as ``nanogpt_bench.setup.memory``
counts them on live tensors; activations are estimated. ``python docs/_cards.py`` prints
the tables of the pages on memory and fine-tuning.
"""

from dataclasses import dataclass

from _markdown import markdown

#: weights that share one bound in an 8-bit moment, at most
LONGEST_BLOCK = 256
#: tokens of one sequence
TOKENS = 2048
#: experts that a token goes through, in the only mixture of experts here
OF_EXPERTS = 8


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
    experts: int = 0
    """Experts of a layer, ``inner`` wide each, whose matrices are one parameter for
    all; 0: no mixture.
    """
    head: int = 0
    """Width of a head whose queries and keys have norms of their own."""

    def matrices(self) -> list[tuple[int, int]]:
        """Rows and columns of the hidden layers' weights; all experts of a layer count
        as one weight.
        """
        attention = [
            (self.queries, self.width),
            *[(self.keys, self.width)] * 2,
            (self.width, self.queries),
        ]
        if self.experts:
            together = [
                (2 * self.experts * self.inner, self.width),
                (self.experts * self.width, self.inner),
            ]
            return [*attention, *together] * self.layers
        return [*attention, *[(self.inner, self.width)] * 2, (self.width, self.inner)] * self.layers

    def heads(self) -> list[tuple[int, int]]:
        """The output layer's weight, unless it is the embedding's."""
        return [] if self.tied else [(self.vocab, self.width)]

    def floats(self) -> list[tuple[int, int]]:
        """Shapes of the parameters that stay float: the embedding and the small ones."""
        return [(self.vocab, self.width), *self.small()]

    def small(self) -> list[tuple[int, int]]:
        """Shapes of norms, routers and biases."""
        norms = [(2 * self.layers + 1, self.width), (2 * self.layers, self.head)]
        routers = [(self.experts, self.width)] * self.layers * bool(self.experts)
        biases = [(self.layers, self.queries + 2 * self.keys)] * self.biases
        return [*(each for each in norms if each[1]), *routers, *biases]

    def parameters(self) -> int:
        """Number of parameters."""
        return sum(
            rows * columns for rows, columns in [*self.matrices(), *self.heads(), *self.floats()]
        )


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

    held: float
    """Weights and optimizer state."""
    gradients: float
    """All gradients."""
    largest: float
    """The largest gradient."""

    @property
    def peak(self) -> float:
        """Weights, state and all gradients at once, as clipping by the norm needs them."""
        return self.held + self.gradients

    @property
    def in_backward(self) -> float:
        """Weights, state and one gradient at a time, as with steps in backward."""
        return self.held + self.largest


def in_float32(model: Model) -> Memory:
    """A model of float32 weights under torch's AdamW."""
    return Memory(12 * model.parameters(), *_gradients(model, 4))


def in_bfloat16(model: Model, moments: float) -> Memory:
    """A model of bfloat16 weights under AdamW, each of whose two moments takes
    `moments` bytes per weight.
    """
    return Memory((2 + 2 * moments) * model.parameters(), *_gradients(model, 2))


def in_one_byte(model: Model, *, muon: bool) -> Memory:
    """Linear weights in a byte with a scale per row, the rest in float32; 8-bit
    moments, one for Muon's matrices.
    """
    hidden = sum(
        _byte(*shape) + (1 if muon else 2) * _average(*shape) for shape in model.matrices()
    )
    heads = sum(_byte(*shape) + 2 * _average(*shape) for shape in model.heads())
    floats = sum(
        4 * rows * columns + 2 * _average(rows, columns) for rows, columns in model.floats()
    )
    return Memory(hidden + heads + floats, *_gradients(model, 4))


def all_in_codes(model: Model, *, muon: bool) -> Memory:
    """Linear weights and embedding in a byte, the rest and all gradients in bfloat16;
    8-bit moments.
    """
    hidden = sum(
        _byte(*shape) + (1 if muon else 2) * _average(*shape) for shape in model.matrices()
    )
    others = [*model.heads(), (model.vocab, model.width)]
    heads = sum(_byte(*shape) + 2 * _average(*shape) for shape in others)
    floats = sum(
        2 * rows * columns + 2 * _average(rows, columns) for rows, columns in model.small()
    )
    return Memory(hidden + heads + floats, *_gradients(model, 2))


def activations(model: Model, tokens: int = TOKENS) -> float:
    """An estimate in bfloat16 with activation checkpointing: the input of each block,
    one block, and the logits.

    A block holds inputs and outputs of its norms and matrices; logits and their
    gradients are in bfloat16 and float32.
    """
    block = (
        6 * model.width
        + 2 * (model.queries + model.keys)
        + 4 * model.inner * (OF_EXPERTS if model.experts else 1)
    )
    return tokens * (2 * model.layers * model.width + 2 * block + 12 * model.vocab)


def to_load(model: Model) -> float:
    """Peak bytes while a model is read into codes, embedding included: codes, bfloat16
    parameters, largest tensor.
    """
    codes = sum(
        _byte(*shape) for shape in [*model.matrices(), *model.heads(), (model.vocab, model.width)]
    )
    return (
        codes + sum(2 * rows * columns for rows, columns in model.small()) + _gradients(model, 2)[1]
    )


def _byte(rows: int, columns: int) -> int:
    return rows * columns + 4 * rows


def _average(rows: int, columns: int) -> int:
    """Bytes of an 8-bit moment: one per weight, and a bound of four per block, the
    longest that divides a row.
    """
    block = max(size for size in range(1, min(columns, LONGEST_BLOCK) + 1) if columns % size == 0)
    return rows * columns + 4 * rows * columns // block


def _gradients(model: Model, width: int) -> tuple[int, int]:
    largest = max(
        rows * columns for rows, columns in [*model.matrices(), *model.heads(), *model.floats()]
    )
    return width * model.parameters(), width * largest


def peaks(model: Model) -> dict[str, float]:
    """Bytes at the peak of a step, by way of training."""
    adam, muon = all_in_codes(model, muon=False), all_in_codes(model, muon=True)
    of_8_bits = in_bfloat16(model, 1 + 4 / LONGEST_BLOCK)
    return {
        "float32 AdamW": in_float32(model).peak,
        "bfloat16 AdamW": in_bfloat16(model, 2).peak,
        "bfloat16, 8-bit AdamW": of_8_bits.peak,
        "bfloat16, 8-bit AdamW, steps in backward": of_8_bits.in_backward,
        "one-byte AdamW": adam.peak,
        "one-byte AdamW, steps in backward": adam.in_backward,
        "one-byte Muon, steps in backward": muon.in_backward,
    }


def memory_table() -> str:
    """A table by model: GB at the peak with gradients, of activations, and to read into
    codes.
    """
    header = (
        "model",
        "parameters, billion",
        *peaks(MODELS[0]),
        f"activations, {TOKENS:,} tokens",
        "to load",
    )
    rows = [
        [
            m.name,
            f"{m.parameters() / 1e9:.2f}",
            *map(gb, [*peaks(m).values(), activations(m), to_load(m)]),
        ]
        for m in MODELS
    ]
    return markdown(header, rows)


#: README's models, and its ways of training with their names in `peaks`
OWNED = ("SmolLM2-1.7B", "Qwen3-4B", "Llama-3.1-8B")
WAYS = {
    "bfloat16, torch AdamW": "bfloat16 AdamW",
    "bfloat16, 8-bit AdamW": "bfloat16, 8-bit AdamW",
    "bfloat16, 8-bit AdamW, steps in backward": "bfloat16, 8-bit AdamW, steps in backward",
    "one byte, AdamW": "one-byte AdamW",
    "**one byte, AdamW, steps in backward**": "one-byte AdamW, steps in backward",
    "**one byte, Muon, steps in backward**": "one-byte Muon, steps in backward",
}


def named(name: str) -> Model:
    """The model of that name."""
    return next(model for model in MODELS if model.name == name)


def owned_table() -> str:
    """A table of GB for README's models by way of training, activations of one sequence
    included.
    """
    found = [(peaks(model), activations(model)) for model in map(named, OWNED)]
    rows = [[name, *(gb(peak[way] + more) for peak, more in found)] for name, way in WAYS.items()]
    return markdown((f"GB, one sequence of {TOKENS:,} tokens", *OWNED), rows)


#: final losses of SmolLM2-135M after 200 steps of EU law, in nats per token, for seeds
#: 42, 43 and 44, from the log
ENDED: dict[str, tuple[float, ...]] = {
    "AdamW, float32": (2.166, 2.201, 2.106),
    "AdamW, bfloat16": (2.677, 2.683, 2.680),
    "the code above": (2.200, 2.227, 2.133),
}


def recipe_table() -> str:
    """README's recipe against AdamW: loss, and bytes per parameter without and with
    gradients.
    """
    model = MODELS[0]
    exact, half, ours = in_float32(model), in_bfloat16(model, 2), all_in_codes(model, muon=False)
    memory = [(exact.held, exact.peak), (half.held, half.peak), (ours.held, ours.in_backward)]
    rows = []
    for (name, losses), sizes in zip(ENDED.items(), memory, strict=True):
        cells = [f"{size / model.parameters():.1f} ({gb(size)} GB)" for size in sizes]
        rows.append([name, f"{sum(losses) / len(losses):.3f}", *cells])
    header = (
        "SmolLM2-135M, 200 steps",
        "loss, nats per token",
        "bytes per parameter",
        "at the peak, with gradients",
    )
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
    """The sizes in MEASURED, in bytes per parameter and GB."""
    count = MODELS[0].parameters()
    sizes = {name: [mib * 2**20 for mib in found] for name, found in MEASURED.items()}
    rows = [
        [name, *(f"{size / count:.1f} ({gb(size)} GB)" for size in of)]
        for name, of in sizes.items()
    ]
    return markdown(("SmolLM2-135M", "bytes per parameter", "at the peak, with gradients"), rows)


def gb(size: float) -> str:
    """Bytes as text in GB, 10^9 bytes.

    >>> gb(4.96e8), gb(14.84e9), gb(177e9)
    ('0.50', '14.8', '177')
    """
    return (
        f"{size / 1e9:.2f}"
        if size < 1e10
        else f"{size / 1e9:.1f}"
        if size < 1e11
        else f"{size / 1e9:.0f}"
    )


if __name__ == "__main__":
    print("\n".join([owned_table(), recipe_table(), memory_table(), measured_table()]))
