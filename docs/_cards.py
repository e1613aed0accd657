"""What training a language model of a Llama's shape takes in memory, by arithmetic, and which card that fits.

Counted are weights, optimizer state and gradients, as ``nanogpt_bench.setup.memory`` counts them on live tensors: an
embedding, norms, routers and biases are float32, the state of every parameter is of 8 bits.  ``python docs/_cards.py``
prints the tables of the page on fine-tuning.
"""

from dataclasses import dataclass

from _markdown import markdown

#: of an 8-bit average, the longest run of weights with one bound
LONGEST_BLOCK = 256
#: GB of the cards that are sold
CARDS = (8, 12, 16, 24, 32, 48, 80)
#: share of a card that weights, state and gradients may take: activations need the rest
SHARE = 0.8


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
    """Experts of a layer, ``inner`` wide each, whose matrices are one parameter for all; 0: no mixture."""
    head: int = 0
    """Width of a head whose queries and keys have norms of their own."""

    def matrices(self) -> list[tuple[int, int]]:
        """Rows and columns of the hidden layers' weights, of experts all rows together."""
        attention = [(self.queries, self.width), *[(self.keys, self.width)] * 2, (self.width, self.queries)]
        if self.experts:
            together = [(2 * self.experts * self.inner, self.width), (self.experts * self.width, self.inner)]
            return [*attention, *together] * self.layers
        return [*attention, *[(self.inner, self.width)] * 2, (self.width, self.inner)] * self.layers

    def heads(self) -> list[tuple[int, int]]:
        """The output layer's weight, unless it is the embedding's."""
        return [] if self.tied else [(self.vocab, self.width)]

    def floats(self) -> list[tuple[int, int]]:
        """What stays float32: the embedding, and what is small."""
        return [(self.vocab, self.width), *self.small()]

    def small(self) -> list[tuple[int, int]]:
        """Norms, routers, biases."""
        norms = [(2 * self.layers + 1, self.width), (2 * self.layers, self.head)]
        routers = [(self.experts, self.width)] * self.layers * bool(self.experts)
        biases = [(self.layers, self.queries + 2 * self.keys)] * self.biases
        return [*(each for each in norms if each[1]), *routers, *biases]

    def parameters(self) -> int:
        """How many there are."""
        return sum(rows * columns for rows, columns in [*self.matrices(), *self.heads(), *self.floats()])


MODELS = (
    Model("SmolLM2-135M", 30, 576, 1536, 49152, 576, 192, tied=True),
    Model("Llama-3.2-1B", 16, 2048, 8192, 128256, 2048, 512, tied=True),
    Model("Qwen2.5-3B", 36, 2048, 11008, 151936, 2048, 256, tied=True, biases=True),
    Model("Llama-2-7B", 32, 4096, 11008, 32000, 4096, 4096, tied=False),
    Model("Qwen2.5-14B", 48, 5120, 13824, 152064, 5120, 1024, tied=False, biases=True),
    Model("Qwen3-30B-A3B", 48, 2048, 768, 151936, 4096, 512, tied=False, experts=128, head=128),
)


@dataclass(frozen=True)
class Memory:
    """Bytes of a training."""

    held: float
    """Weights and optimizer state."""
    gradients: float
    """All of them, in float32."""
    largest: float
    """The largest one alone."""


def in_float32(model: Model) -> Memory:
    """AdamW as torch has it."""
    return Memory(12 * model.parameters(), *_gradients(model))


def in_one_byte(model: Model, *, muon: bool) -> Memory:
    """Linear weights in a byte with a scale a row; averages of 8 bits, two under Adam, one of a hidden matrix' Muon."""
    hidden = sum(_byte(*shape) + (1 if muon else 2) * _average(*shape) for shape in model.matrices())
    heads = sum(_byte(*shape) + 2 * _average(*shape) for shape in model.heads())
    floats = sum(4 * rows * columns + 2 * _average(rows, columns) for rows, columns in model.floats())
    return Memory(hidden + heads + floats, *_gradients(model))


def all_in_codes(model: Model) -> Memory:
    """The same under Muon of a bfloat16 model with its embedding in a byte: gradients take two bytes."""
    hidden = sum(_byte(*shape) + _average(*shape) for shape in model.matrices())
    others = [*model.heads(), (model.vocab, model.width)]
    heads = sum(_byte(*shape) + 2 * _average(*shape) for shape in others)
    floats = sum(2 * rows * columns + 2 * _average(rows, columns) for rows, columns in model.small())
    gradients, largest = _gradients(model)
    return Memory(hidden + heads + floats, gradients / 2, largest / 2)


def to_load(model: Model) -> float:
    """Bytes at the peak of reading it: each weight in codes or as it stays, in float32, and the largest tensor."""
    codes = sum(_byte(*shape) for shape in [*model.matrices(), *model.heads()])
    floats = sum(4 * rows * columns for rows, columns in model.floats())
    return codes + floats + _gradients(model)[1]


def _byte(rows: int, columns: int) -> int:
    return rows * columns + 4 * rows


def _average(rows: int, columns: int) -> int:
    """A byte a weight and a bound of four bytes for each block: the longest that divides a row."""
    block = max(size for size in range(1, min(columns, LONGEST_BLOCK) + 1) if columns % size == 0)
    return rows * columns + 4 * rows * columns // block


def _gradients(model: Model) -> tuple[int, int]:
    largest = max(rows * columns for rows, columns in [*model.matrices(), *model.heads(), *model.floats()])
    return 4 * model.parameters(), 4 * largest


def peaks(model: Model) -> dict[str, float]:
    """Bytes at the moment when they are most, by way of training."""
    exact, adam, muon = in_float32(model), in_one_byte(model, muon=False), in_one_byte(model, muon=True)
    every = all_in_codes(model)
    return {
        "float32 AdamW": exact.held + exact.gradients,
        "one-byte AdamW, clipped": adam.held + adam.gradients,
        "one-byte AdamW, step in backward": adam.held + adam.largest,
        "one-byte Muon, step in backward": muon.held + muon.largest,
        "the same, embedding too, bfloat16": every.held + every.largest,
    }


def card(size: float) -> str:
    """The smallest card of whose memory the bytes are four fifths at most.

    >>> card(6.4e9), card(6.5e9), card(65e9)
    ('8 GB', '12 GB', 'none')
    """
    return next((f"{each} GB" for each in CARDS if size <= SHARE * each * 1e9), "none")


def memory_table() -> str:
    """GB of weights and state, and at the peak with gradients."""
    rows = []
    for model in MODELS:
        held = [in_float32(model).held, *(in_one_byte(model, muon=muon).held for muon in (False, False, True))]
        held.append(all_in_codes(model).held)
        pairs = [f"{gb(size)} / {gb(peak)}" for size, peak in zip(held, peaks(model).values(), strict=True)]
        rows.append([model.name, f"{model.parameters() / 1e9:.2f}", *pairs, gb(to_load(model))])
    return markdown(("model", "parameters, billion", *peaks(MODELS[0]), "to load, main memory"), rows)


def cards_table() -> str:
    """The smallest card for each model and way of training."""
    rows = [[model.name, *map(card, peaks(model).values())] for model in MODELS]
    return markdown(("model", *peaks(MODELS[0])), rows)


#: what SmolLM2-135M ended at after 200 steps with one seed, in nats a token of EU law, as the log has it
ENDED = {"AdamW, float32": 2.166, "the ten lines above": 2.178}


def recipe_table() -> str:
    """README's ten lines beside float32 AdamW: loss, and bytes a parameter without and with gradients."""
    model = MODELS[0]
    rows = []
    for (name, loss), memory in zip(ENDED.items(), (in_float32(model), in_one_byte(model, muon=False)), strict=True):
        sizes = (memory.held, memory.held + memory.gradients)
        cells = [f"{size / model.parameters():.1f} ({gb(size)} GB)" for size in sizes]
        rows.append([name, f"{loss:.3f}", *cells])
    header = ("SmolLM2-135M, 200 steps", "loss, nats a token", "bytes a parameter", "at the peak, with gradients")
    return markdown(header, rows)


#: MiB that runs of SmolLM2-135M held after a few steps: weights and state, and together with gradients at the peak
MEASURED = {
    "float32 AdamW": (1539, 2053),
    "one-byte AdamW, clipped": (472, 985),
    "one-byte AdamW, step in backward": (472, 580),
    "one-byte Muon, step in backward": (368, 476),
}


def measured_table() -> str:
    """What was measured, in the unit of the other tables."""
    count = MODELS[0].parameters()
    sizes = {name: [mib * 2**20 for mib in found] for name, found in MEASURED.items()}
    rows = [[name, *(f"{size / count:.1f} ({gb(size)} GB)" for size in of)] for name, of in sizes.items()]
    return markdown(("SmolLM2-135M", "bytes a parameter", "at the peak, with gradients"), rows)


def gb(size: float) -> str:
    """Bytes in GB of 10^9.

    >>> gb(4.96e8), gb(14.84e9), gb(177e9)
    ('0.50', '14.8', '177')
    """
    return f"{size / 1e9:.2f}" if size < 1e10 else f"{size / 1e9:.1f}" if size < 1e11 else f"{size / 1e9:.0f}"


if __name__ == "__main__":
    print("\n".join([recipe_table(), memory_table(), cards_table(), measured_table()]))
