"""The configuration of one training run: these models are the only source of truth.

YAML files, command-line overrides (`--train.max_steps 100`), `run --help` and the resolved `config.yaml` of a run
folder are all derived from the fields below. A field's metadata says what values it takes.
"""

from typing import Any

from nanogpt_bench.config.field import Section, section, setting
from nanogpt_bench.config.metrics import MonitorConfig

#: optimizers of other packages, on float weights or on those packages' own
PEERS = ("torchao_adamw8bit", "torchao_adamwfp8", "optimi_adamw", "sdnq_muon", "sdnq_adamw")
_ADAM: dict[str, Any] = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1}
_SGD: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.0}
_EXPONENT: dict[str, Any] = {"stiffness": 0.0, "stiffness_end": None, "stiffness_schedule": None}
#: the options every optimizer takes, with their defaults; all others must be left out. A rule has rates of its own
OPTIONS: dict[str, dict[str, Any]] = {
    "adamw": _ADAM,
    "sgd": _SGD,
    **dict.fromkeys(PEERS[:3], _ADAM),
    "stiffness_adamw": {**_ADAM, **_EXPONENT},
    "stiffness_sgd": {**_SGD, **_EXPONENT},
    "stiffness_muon": {**_ADAM, **_EXPONENT, "momentum": 0.95, "lr": 4e-3, "float_lr": 4e-3},
    "stiffness_lion": {**_ADAM, **_EXPONENT, "lr": 2.5e-4},
    "madam": {**_ADAM, "lr": 1e-2, "float_lr": 1e-3, "weight_decay": 0.0},
    "riemannian_adam": {**_ADAM, "lr": 0.5, "float_lr": 1e-3},
    "riemannian_sgd": {**_SGD, "lr": 2e4, "float_lr": 0.1},
    "fisher": {**_ADAM, **_EXPONENT, "momentum": 0.9},
    "sdnq_muon": {**_ADAM, "momentum": 0.95, "lr": 2e-2, "float_lr": 4e-3},
    "sdnq_adamw": _ADAM,
}
#: the library's own, each a class of fp8manifold.optim without its underscores
OWN_OPTIMIZERS = tuple(name for name in OPTIONS if name not in ("adamw", "sgd", *PEERS))
#: names of the options, of which each optimizer takes some
OPTION_NAMES = tuple(sorted({option for options in OPTIONS.values() for option in options}))
#: optimizers that step weights on manifolds of geoopt's too
RIEMANNIAN = ("riemannian_adam", "riemannian_sgd")
STORAGES = ("float32", "master", "grid", "fp8", "continuous", "peer")
#: storages that take no format of the library's
WITHOUT_FORMATS = ("float32", "peer")
#: weights of other packages, and the optimizers that step them
PEER_WEIGHTS = {
    **dict.fromkeys(("sdnq-E2M5", "sdnq-E4M3", "sdnq-int8"), ("sdnq_muon", "sdnq_adamw")),
    "torchao-int8": ("torchao_adamw8bit", "torchao_adamwfp8"),
}
#: storages whose points are a format's values: a step is rounded when it is written back
ROUNDED = ("grid", "fp8")
#: storages on the library's manifolds, which its optimizers step; continuous ones without rounding
MANIFOLDS = (*ROUNDED, "continuous")
#: own optimizers that also step a model without a format, as a peer does: each is its own baseline
ON_FLOATS = ("stiffness_adamw", "stiffness_muon")
#: products of fp8manifold.LayerSpec, and the formats that units of FP8 multiply
PRODUCTS = ("decoded", "fp8", "int8", "auto")
FP8_FORMATS = ("E4M3", "E5M2")
#: write-backs of fp8manifold.optim, which imports torch, and those that lose updates; a test compares the two
WRITEBACKS = ("nearest", "stochastic", "residual8", "momentum")
LOSING = ("nearest",)
MOMENTS = ("float32", "bfloat16", "8bit")
#: schedules of an option from its value at the first step to that at the last
COURSES = ("linear", "cosine", "step")
#: where `prepare stdlib` writes and where a run looks when nobody says otherwise
DEFAULT_DATA_DIR = "data/stdlib"


class DataConfig(Section):
    """The text, and the order in which it is read."""

    dir: str = setting(
        DEFAULT_DATA_DIR,
        "folder with train.bin, val.bin and meta.json (see prepare)",
        changes_numbers=False,
        of_task=True,
    )
    train_tokens: int | None = setting(
        None, "train on this many tokens, the first of the corpus, only; null: all", minimum=1, of_task=True
    )


class ModelConfig(Section):
    """The GPT and the formats of its linear layers."""

    size: str | None = setting(
        None,
        "named size, for what is not given below; 124M is GPT-2's own; null: 0.8M, or the checkpoint of init_from",
        choices=("0.8M", "10M", "50M", "124M"),
        of_task=True,
    )
    init_from: str | None = setting(
        None,
        "weights to start from: those of a run, by its folder (its newest checkpoint) or one of its checkpoints; or of "
        "a GPT-2 checkpoint in Hugging Face's layout (config.json and model.safetensors), by its folder, an id on the "
        "hub, or gpt2, gpt2-medium, gpt2-large, gpt2-xl; null: random weights",
        of_task=True,
    )
    pretrained: str | None = setting(
        None,
        "a causal language model of transformers (extra hf) in place of the GPT: a folder that save_pretrained wrote, "
        "a .gguf file, or an id on the hub; its layers have its own names; null: the GPT",
        of_task=True,
    )
    n_layer: int | None = setting(None, "transformer blocks; null: the size's", minimum=1, maximum=4096, of_task=True)
    n_head: int | None = setting(None, "attention heads; null: the size's", minimum=1, of_task=True)
    n_embd: int | None = setting(None, "width, a multiple of n_head; null: the size's", minimum=1, of_task=True)
    block_size: int | None = setting(None, "context length in tokens; null: the size's", minimum=1, of_task=True)
    dropout: float = setting(0.0, "dropout probability", minimum=0.0, below=1.0)
    bias: bool | None = setting(None, "bias in Linear and LayerNorm; null: the size's (124M: true)")
    tie_weights: bool | None = setting(None, "lm_head shares the embedding's weight; null: the size's (124M: true)")
    gelu: str | None = setting(
        None, "exact, or GPT-2's tanh approximation; null: the size's (124M: tanh)", choices=("exact", "tanh")
    )
    storage: str | None = setting(
        None,
        "where quantised weights live: master (float32 copy, quantised forward), fp8 (one byte), grid (the same values "
        "in float32), continuous (float32, the format's geometry without its rounding) or peer (another package's own, "
        "see peer); null: the rule's, or what formats and optimizer call for",
        choices=STORAGES,
        of_rule=True,
    )
    format: str | None = setting(
        None, "one for every linear layer: formats {'*': FORMAT}", of_rule=True, of_formats=True, rows_by="--formats"
    )
    formats: dict[str, Any] = setting(
        dict,
        "layer pattern -> weight format, none to leave the layer alone, or a mapping with keys weight, activation, "
        "gradient (each a format, or a mapping with key format and options of its own), granularity (tensor, "
        "channel, block, of weights in codes square), policy (dynamic, static, delayed), history, rounding (nearest, "
        "stochastic, split), ste (identity, clipped, relu, none)",
        of_rule=True,
        of_formats=True,
        words=True,
        maps="layer pattern to format name",
    )
    torchao_float8: str | None = setting(
        None,
        "torchao's float8 training of the blocks' linear layers, by its recipe of scales (extra torchao; emulated "
        "where the device has no FP8 products); null: none",
        choices=("tensorwise", "rowwise", "rowwise_with_gw_hp"),
        rows_by="--rules",
    )
    products: str | None = setting(
        None,
        "fp8 storage: what layers multiply, but for lm_head and those whose format says: decoded weights, codes "
        "on fp8 (E4M3, E5M2) or int8 units (E1M6), emulated on a CPU, or auto: what the device has; null: the rule's, "
        "or decoded",
        choices=PRODUCTS,
        of_rule=True,
        of_formats=True,
        storages=("fp8",),
        rows_by="--rules",
    )
    peer: str | None = setting(
        None,
        "peer storage: whose weights of the linear layers, and their format (extra sdnq, under GPL-3.0, or torchao); "
        "null: the rule's",
        choices=tuple(PEER_WEIGHTS),
        of_rule=True,
        rows_by="--rules",
    )
    headroom: float | None = setting(
        None,
        "grid and fp8 storage: largest value of the grid over a row's initial amax; null: by format, at most 16 (2 "
        "for few binades, or 1 in fp8 storage, whose scales grow)",
        minimum=1.0,
        of_rule=True,
        of_formats=True,
        storages=MANIFOLDS,
    )
    granularity: str | None = setting(
        None,
        "one weight scale per tensor, per row (channel), with fp8 or master storage per block of 32 in a row, or with "
        "fp8 storage per square of 128 x 128; null: channel",
        choices=("tensor", "channel", "block", "square"),
        of_rule=True,
        of_formats=True,
    )
    tied: str | None = setting(
        None,
        "what formats do with an lm_head that shares the embedding's weight: untie (quantise a copy) or leave (in "
        "float); null: refuse a pattern that names it",
        choices=("untie", "leave"),
        of_rule=True,
        of_formats=True,
    )
    embeddings: str | None = setting(
        None, "format of embeddings (and a tied head); null: float", storages=("fp8",), of_rule=True, of_formats=True
    )
    constraint: str | None = setting(
        None,
        "where attn.qkv and attn.proj stay: stiefel (orthonormal columns) or sphere (rows of length 1); null: free",
        choices=("stiefel", "sphere"),
        of_rule=True,
        optimizers=RIEMANNIAN,
    )


class OptimizerConfig(Section):
    """The optimizer, its options and schedules, and its write-back."""

    name: str | None = setting(None, "null: the rule's, or adamw", choices=tuple(OPTIONS), rows_by="--rules")
    lr: float | None = setting(
        None,
        "peak learning rate, in value (riemannian_adam, riemannian_sgd: ULPs per step; madam: a share of the weight); "
        "null: the rule's, whether it is named or its settings are given one by one",
        above=0.0,
        is_rate=True,
    )
    float_lr: float | None = setting(
        None,
        "riemannian_adam, riemannian_sgd, madam: learning rate of float parameters; stiffness_muon, sdnq_muon: of what "
        "is no hidden matrix; null: 1e-3, for riemannian_sgd 0.1, for stiffness_muon and sdnq_muon 4e-3",
        above=0.0,
        is_rate=True,
    )
    constrained_lr: float | None = setting(
        None,
        "rate of constrained weights; riemannian_adam: radians per row or column and step, null: 0.01; sgd: null: 0.1",
        above=0.0,
        optimizers=RIEMANNIAN,
    )
    beta1: float | None = setting(None, "decay of the first moment; null: 0.9", minimum=0.0, below=1.0)
    beta2: float | None = setting(None, "decay of the second moment; null: 0.99", minimum=0.0, below=1.0)
    momentum: float | None = setting(
        None,
        "sgd, stiffness_sgd, riemannian_sgd, fisher, stiffness_muon, sdnq_muon: momentum; null: 0.9, for the last two "
        "0.95",
        minimum=0.0,
        below=1.0,
    )
    weight_decay: float | None = setting(
        None,
        "decay of parameters with two or more dimensions: decoupled, times lr per step (riemannian_adam: times "
        "float_lr, quantised weights only; sgd on floats: added to the gradient); null: 0.1, for madam and sgd 0",
        minimum=0.0,
    )
    grad_clip: float = setting(1.0, "largest gradient norm; 0: no clipping", minimum=0.0, of_rule=False)
    clip_by: str | None = setting(
        None,
        "train.step_in_backward: by which norm gradients are clipped to grad_clip, that of the step before (previous) "
        "or of a backward pass of its own (exact)",
        choices=("previous", "exact"),
    )
    writeback: str | None = setting(
        None,
        "grid and fp8 storage: how a step is written back; null: the rule's, or stochastic",
        choices=WRITEBACKS,
        of_formats=True,
        storages=ROUNDED,
        rows_by="--rules",
    )
    writeback_end: str | None = setting(
        None,
        "grid and fp8 storage: how the last steps are written back, after the share step_at of all steps; null: as all "
        "others",
        choices=tuple(name for name in WRITEBACKS if name != "momentum"),
        of_formats=True,
        storages=ROUNDED,
    )
    draws: str | None = setting(
        None,
        "grid and fp8 storage: random draws of rounding, new in every step or spread evenly over steps; null: new",
        choices=("independent", "dither"),
        of_formats=True,
        storages=ROUNDED,
    )
    moments: str | None = setting(
        None,
        "of the library's own optimizers: how running averages are stored; null: float32",
        choices=MOMENTS,
        of_formats=True,
        rows_by="--rules",
    )
    stiffness: float | None = setting(
        None,
        "stiffness_adamw, stiffness_sgd, stiffness_lion, stiffness_muon, fisher: exponent k at the first step; null: 0",
        minimum=0.0,
        maximum=4.0,
    )
    stiffness_end: float | None = setting(
        None, "the same five: k at the last step, reached linearly; null: k stays", minimum=0.0, maximum=4.0
    )
    stiffness_schedule: str | None = setting(
        None, "the same five: schedule of k to stiffness_end; null: linear", choices=COURSES
    )
    schedule: str = setting(
        "cosine",
        "schedule of the learning rate after the warm-up: to min_lr_ratio, or none",
        choices=("cosine", "trapezoid", "constant", "linear", "step"),
        of_rule=False,
    )
    warmup_steps: int = setting(100, "steps of linear warm-up", minimum=0, of_rule=False)
    min_lr_ratio: float = setting(0.1, "last learning rate over the peak", minimum=0.0, maximum=1.0, of_rule=False)
    step_at: float = setting(
        0.5,
        "schedules named step, and writeback_end: share of the steps after which the last value holds",
        minimum=0.0,
        maximum=1.0,
        of_rule=False,
    )


class TrainConfig(Section):
    """The length and the shape of the training."""

    max_steps: int = setting(
        2000,
        "optimizer steps",
        minimum=1,
        instead="nanogpt-bench evaluate measures a loss without training",
        of_task=True,
    )
    batch_size: int = setting(12, "sequences in a micro-batch", minimum=1, of_task=True)
    accumulation: int = setting(1, "micro-batches in a step", minimum=1, of_task=True)
    precision: str | None = setting(
        None,
        "float32, bf16-mixed (autocast) or bf16-pure; null: the rule's, or bf16-mixed",
        choices=("float32", "bf16-mixed", "bf16-pure"),
        of_rule=True,
    )
    step_in_backward: bool = setting(
        False,
        "step each parameter as soon as its gradient is there, and free the gradient: the library's optimizers; "
        "optimizer.clip_by says how to clip; micro-batches are summed up in bfloat16, rounded stochastically; "
        "gradients are not watched",
    )
    recompute: bool = setting(
        False, "model.pretrained: keep no activations inside a block, compute them once more in the backward pass"
    )
    parallel: str | None = setting(
        None,
        "how the processes of torchrun share a run: ddp, each holds the model and takes train.batch_size / processes "
        "sequences of every batch; null: one process",
        choices=("ddp",),
        changes_numbers=False,
    )
    max_seconds: float | None = setting(
        None, "stop after this many seconds; null: never", above=0.0, changes_numbers=False
    )
    on_anomaly: str = setting(
        "skip",
        "what becomes of a step whose loss or gradient is not finite: skip it, and end the run after three of them "
        "in a row; stop at the first. Weights or optimizer state that are not finite are never skipped",
        choices=("skip", "stop"),
    )
    stop_on: list[str] = setting(
        lambda: ["nan"],
        "end the run on three steps in a row whose loss or gradient is not finite (nan), on a training loss a tenth "
        "above where it was or should be at three validations in a row (divergence), on a validation loss that did "
        "not fall by a thousandth at five in a row (plateau)",
        choices=("nan", "divergence", "plateau"),
        changes_numbers=False,
    )


class EvalConfig(Section):
    """The validation: always the same batches."""

    interval: int = setting(250, "steps between validations", minimum=1)
    batches: int = setting(20, "batches of train.batch_size sequences", minimum=1, of_task=True)
    also: str | None = setting(
        None, "another prepared text, in the same tokens, to validate on as well: what a fine-tuning forgets"
    )


class RuntimeConfig(Section):
    """The machine."""

    device: str = setting("auto", "auto takes a GPU when there is one", choices=("auto", "cpu", "cuda"))
    threads: int | None = setting(None, "CPU threads; null: torch's own choice", minimum=1, maximum=1024)
    compile: bool = setting(
        False,
        "compile the model with torch.compile: the first step and the first validation take long; steps into which a "
        "monitor hooks itself run uncompiled",
    )


class ShadowConfig(Section):
    """A float32 model with the run's current weights, whose gradients the run's are compared with."""

    enabled: bool = setting(False, "compare gradients with a float32 model's on the same batches")
    interval: int = setting(100, "steps between two comparisons", minimum=1)


class AlertsConfig(Section):
    """Alerts of failures as a run goes, in alerts.jsonl, on the terminal and in the trackers."""

    enabled: bool = setting(True, "judge the run at every measurement of its monitors")
    save_on_anomaly: bool = setting(True, "keep the state before the first step that is not finite, in anomaly/")
    baseline: str | None = setting(
        None, "run folder whose losses divergence is measured against; null: the run's own", changes_numbers=True
    )


class TrackingConfig(Section):
    """Trackers that get the record of every step, beside metrics.jsonl."""

    wandb: str = setting(
        "off",
        "Weights & Biases, whose WANDB_PROJECT, WANDB_ENTITY and WANDB_TAGS are read; auto: online with an API key, "
        "otherwise offline",
        choices=("off", "auto", "offline", "online"),
    )
    wandb_id: str | None = setting(None, "run to resume, online only; null: a new one")
    wandb_artifacts: bool = setting(
        False, "at the end, keep the last checkpoint there, as an artifact with the alias latest"
    )
    tensorboard: bool = setting(False, "write TensorBoard's event files into the run folder")


class CheckpointConfig(Section):
    """When the state of a run is committed to its folder, and which of these checkpoints stay."""

    every: int | None = setting(
        500,
        "steps between two checkpoints, best a multiple of eval.interval; null: none on the way. A signal that ends "
        "the run is always answered with one",
        minimum=1,
    )
    last: bool = setting(True, "a checkpoint where the run ends, too, unless it failed")
    keep: int = setting(
        2, "newest checkpoints that stay; the one with the lowest validation loss stays beside them", minimum=1
    )
    best: bool = setting(
        False,
        "one more checkpoint at every validation whose loss is the lowest so far; without it the lowest loss has a "
        "checkpoint only if one was due at that step",
    )


class Config(Section):
    """One training run. Keys left null are filled in by `nanogpt_bench.setup.resolve.resolve`."""

    rule: str | None = setting(
        None,
        "preset for storage, optimizer, write-back and precision; null: none",
        changes_numbers=False,
        of_rule=True,
        rows_by="--rules",
    )
    seed: int = setting(42, "of first weights, the order of the data and rounding", minimum=0, maximum=2**64 - 1)
    task: str = setting(
        "language",
        "language: predict the next token; classify: tell a document's labels from its first model.block_size tokens, "
        "in a corpus that has labels (prepare eurlex --task labels)",
        choices=("language", "classify"),
        of_task=True,
    )
    data: DataConfig = section(DataConfig)
    model: ModelConfig = section(ModelConfig)
    optimizer: OptimizerConfig = section(OptimizerConfig, of_rule=True)
    train: TrainConfig = section(TrainConfig)
    eval: EvalConfig = section(EvalConfig)
    monitor: MonitorConfig = section(MonitorConfig)
    shadow: ShadowConfig = section(ShadowConfig)
    alerts: AlertsConfig = section(AlertsConfig, changes_numbers=False)
    tracking: TrackingConfig = section(TrackingConfig, changes_numbers=False)
    checkpoint: CheckpointConfig = section(CheckpointConfig, changes_numbers=False)
    runtime: RuntimeConfig = section(RuntimeConfig)
