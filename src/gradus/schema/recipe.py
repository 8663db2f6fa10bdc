"""Recipe: what to train. It means the same on any hardware."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationInfo, field_validator, model_validator

from gradus.schema.callables import absolute, found_from, is_import_path, short_name
from gradus.schema.errors import InputError, unknown_name
from gradus.schema.intervals import Duration, Interval
from gradus.schema.loading import Document, apply_overrides, dump_yaml, origin, read_document, validated
from gradus.schema.plan import Plan

_STRICT = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)
_OPEN = ConfigDict(extra="allow", strict=True, frozen=True, allow_inf_nan=False)

OWN = "own"  # `use: own`, the default: an own loop brings it, and the recipe does not name it
BUDGETS = ("steps", "epochs", "tokens")
DECAYS = ("constant", "linear", "cosine", "step")
LOSSES = ("cross-entropy", "mse")
METRICS = ("accuracy",)
HOOKS = ("ema",)
OPTIMIZERS: dict[str, tuple[str, ...]] = {  # further keys that each built-in optimizer takes
    "adamw": ("betas", "eps"),
    "sgd": ("momentum", "dampening", "nesterov"),
    "adadelta": ("rho", "eps"),
    "lamb": ("betas", "eps"),
    "lars": ("momentum", "trust", "eps"),
}


@dataclass(frozen=True)
class Origin:
    """Where a recipe was written, for errors about it. No part of its meaning: recipes are equal wherever they lie."""

    file: str = field(default="recipe", compare=False)
    overrides: tuple[str, ...] = field(default=(), compare=False)


class Named(BaseModel):
    """A block whose `use` names something callable; keys that are not fields here are passed to it."""

    model_config = _OPEN

    use: str

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})

    @property
    def built_in(self) -> bool:
        """Whether `use` is one of our own names: neither a callable of the user's nor left to an own loop."""
        return not is_import_path(self.use) and self.use != OWN


class ModelBlock(Named):
    use: str = OWN
    weights: str | None = None  # a safetensors file, or a folder with some, to start from
    weights_skip: list[str] = []  # patterns of names that are not taken from there: they start as initialised


class LoraBlock(BaseModel):
    """Train small matrices beside some Linear layers, which themselves stay as they are."""

    model_config = _STRICT

    rank: int = Field(ge=1)
    alpha: float | None = Field(None, gt=0)  # the update is scaled by alpha / rank; by default alpha = rank
    targets: list[str] = Field(["*"], min_length=1)  # patterns of the names of Linear layers


class BlockShuffle(BaseModel):
    """Blocks of consecutive samples come in random order, and the samples of a few blocks at a time are mixed."""

    model_config = _STRICT

    blocks: int = Field(ge=1)  # samples in a block
    window: int = Field(ge=1)  # blocks that are mixed with each other


Shuffle = Literal["full", "none"] | BlockShuffle


class DataBlock(Named):
    use: str = OWN
    limit: int | None = Field(None, ge=1)  # train on the first few samples only
    shuffle: Shuffle = "full"
    group_by_length: int | None = Field(None, ge=1)  # batches at a time among which samples are sorted by length
    timeout: Duration | None = None  # a loader worker that gives no answer for so long ends the run
    stage: str | None = None  # copy to each node first: to this folder, or (`auto`) to the job's own there
    skip: list[list[int]] = []  # ranges [first, end) of positions of the stream that are left out

    @field_validator("skip")
    @classmethod
    def _ranges(cls, spans: list[list[int]]) -> list[list[int]]:
        for span in spans:
            if len(span) != 2 or not 0 <= span[0] < span[1]:
                raise ValueError(f"{span} is no range of positions; allowed: [first, one past the last]")
        return spans

    @property
    def packs(self) -> bool:
        """Whether samples hold several documents each, be it those of one source of several."""
        sources = self.options.get("sources")
        blocks = [self.options, *(sources.values() if isinstance(sources, dict) else ())]
        return self.built_in and any(isinstance(block, dict) and block.get("packing") is True for block in blocks)


class GroupBlock(BaseModel):
    """Parameters whose names match, with other settings than the rest."""

    model_config = _STRICT

    match: list[str] = Field(min_length=1)  # patterns; a parameter belongs to the first group that it matches
    lr_factor: float = Field(1.0, ge=0)
    weight_decay: float | None = Field(None, ge=0)


class OptimizerBlock(Named):
    use: str = "adamw"
    lr: float = Field(1.0, gt=0)  # to be given, except for an own optimizer, which has its own
    warmup: int = Field(0, ge=0)  # steps
    decay: str = "constant"
    decay_to: float = Field(0.0, ge=0, le=1)  # where linear and cosine end, as a fraction of lr
    decay_every: int | None = Field(None, ge=1)  # steps between the drops of `decay: step`
    decay_factor: float = Field(0.1, gt=0, lt=1)
    weight_decay: float = Field(0.0, ge=0)
    decay_norms_and_biases: bool = False
    clip: float | None = Field(None, gt=0)
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    lr_batch: int | None = Field(None, ge=1)  # the batch that `lr` was chosen for
    groups: list[GroupBlock] = []
    moments: Literal["fp32", "bf16"] = "fp32"  # the format of the state of adamw

    @field_validator("moments")
    @classmethod
    def _only_adamw_has_narrow_moments(cls, value: str, others: ValidationInfo) -> str:
        use = others.data.get("use", "adamw")  # if that is no name, it is what is told
        if value != "fp32" and use != "adamw":
            raise ValueError(f"fp32, since optimizer.use is {use}: only adamw has moments in {value}")
        return value

    @property
    def schedules(self) -> bool:
        """Whether the learning rate changes from step to step."""
        return self.warmup > 0 or self.decay != "constant"


class MetricBlock(Named):
    name: str | None = None  # as it is called in results; by default what the callable is called

    @property
    def title(self) -> str:
        return self.name or short_name(self.use)


class EvaluateBlock(BaseModel):
    model_config = _STRICT

    every: int | None = Field(None, ge=1)  # steps; always once at the end
    batches: int | None = Field(None, ge=1)  # at most this many batches of `batch` validation samples
    metric: str = "loss"  # what target, stop_after and checkpoint.best look at
    target: float | None = None  # stop when the metric is at least this good
    stop_after: int | None = Field(None, ge=1)  # stop after so many evaluations without a better value
    better: Literal["lower", "higher"] | None = None  # by default a loss is better lower, anything else higher

    def is_better(self, value: float, than: float) -> bool:
        lower = self.better == "lower" or (self.better is None and self.metric == "loss")
        return value < than if lower else value > than


class CheckpointBlock(BaseModel):
    model_config = _STRICT

    every: Interval | None = None
    keep: int = Field(3, ge=1)  # the newest so many
    keep_every: int | None = Field(None, ge=1)  # and those of every so many steps
    best: bool = False  # and the one with the best evaluation
    background: bool = True  # a process of its own writes while training goes on; takes host memory for a copy
    local: str | None = None  # a folder on each node's own disk (or `auto`) that is written first, and copied behind


class SpikeBlock(BaseModel):
    """What counts as a spike of the loss: so many steps in a row, far above what the steps before had."""

    model_config = _STRICT

    factor: float = Field(6.0, gt=0)  # how far above their median, in standard deviations of theirs (from the MAD)
    rise: float = Field(1.1, ge=1)  # and at least so many times the median
    steps: int = Field(3, ge=1)  # in a row: a batch of hard samples is one step
    window: int = Field(128, ge=16)  # losses that are compared with; until there are so many, nothing is a spike


class ChecksumsBlock(BaseModel):
    """How often replicas compare what they hold."""

    model_config = _STRICT

    every: int | None = Field(500, ge=1)  # steps; and before each checkpoint; null: never


class WatchdogBlock(BaseModel):
    """For how long a run may stand still before it counts as hanging and is ended. `watchdog: off`: for ever."""

    model_config = _STRICT

    after: float = Field(10.0, ge=2)  # times the median step, or the median batch of an evaluation; but
    at_least: Duration = "5m"  # false alarms cost more than minutes: a step may wait for a slow disk, or for a hook
    starting: Duration = "25m"  # without a measure: building, loading, compiling, saving; torch gives up after 30


class PipelineParts(BaseModel):
    """Names of the model's parts: what reads the batch, the list of blocks, what makes the output."""

    model_config = _STRICT

    head: str
    blocks: str
    tail: str


class Recipe(BaseModel):
    model_config = _STRICT

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    model: ModelBlock = ModelBlock()
    data: DataBlock = DataBlock()
    batch: int = Field(ge=1)  # samples in one optimizer step, on any hardware
    steps: int | None = Field(None, ge=1)
    epochs: float | None = Field(None, gt=0)
    tokens: int | None = Field(None, ge=1)
    optimizer: OptimizerBlock = OptimizerBlock(use=OWN)
    seed: int = Field(1, ge=0)
    loss: Named | None = None
    metrics: list[MetricBlock] = []
    hooks: list[Named] = []
    freeze: list[str] = []  # patterns of the names of parameters that are not trained
    lora: LoraBlock | None = None
    tensor_plan: dict[str, str] = {}  # pattern of a layer's name → how its weight is split over plan.mesh.tensor
    pipeline_parts: PipelineParts | None = None  # where a model of your own may be cut into stages
    evaluate: EvaluateBlock = EvaluateBlock()
    log_every: int = Field(1, ge=1)
    checkpoint: CheckpointBlock = CheckpointBlock()
    deterministic: bool = False
    anomaly: bool = False  # find the forward operation whose backward gave a NaN; slow
    on_nan: Literal["stop", "skip", "rollback"] = "stop"  # a loss, gradient or weight that is no number
    on_spike: Literal["ignore", "warn", "rollback"] = "warn"  # a loss that jumps up and stays there
    spike: SpikeBlock = SpikeBlock()
    checksums: ChecksumsBlock = ChecksumsBlock()
    watchdog: WatchdogBlock | None = WatchdogBlock()  # a run that stands still is ended, and told why; off: never
    exporters: list[Literal["tensorboard", "mlflow", "wandb"]] = []
    plan: Plan = Plan()

    _origin: Origin = PrivateAttr(default=Origin())

    @field_validator("loss", mode="before")
    @classmethod
    def _loss_by_name(cls, value: Any) -> Any:
        return {"use": value} if isinstance(value, str) else value

    @field_validator("watchdog", mode="before")
    @classmethod
    def _watchdog_off(cls, value: Any) -> Any:
        """`off` is what YAML reads as false."""
        return {True: {}, False: None}[value] if isinstance(value, bool) else None if value == "off" else value

    @field_validator("pipeline_parts", mode="before")
    @classmethod
    def _parts_in_order(cls, value: Any) -> Any:
        """`[embedding, blocks, output]` says the same as the three keys."""
        three = isinstance(value, list) and len(value) == 3
        return dict(zip(("head", "blocks", "tail"), value, strict=True)) if three else value

    @field_validator("hooks", "metrics", mode="before")
    @classmethod
    def _all_by_name(cls, value: Any) -> Any:
        if not isinstance(value, list):
            return value
        return [{"use": named} if isinstance(named, str) else named for named in value]

    @model_validator(mode="after")
    def _one_budget(self) -> Recipe:
        given = [key for key in BUDGETS if getattr(self, key) is not None]
        if len(given) != 1:
            raise ValueError(f"exactly one of steps, epochs and tokens; found {', '.join(given) or 'none'}")
        return self

    @classmethod
    def load(cls, path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
        """A recipe from a YAML file, with `a.b.c=value` overrides."""
        return cls.from_document(read_document(Path(path)), str(path), overrides, Path(path).parent)

    @classmethod
    def from_document(
        cls, document: Document, file: str = "recipe", overrides: Sequence[str] = (), folder: Path | None = None
    ) -> Recipe:
        """A recipe from a mapping; files that it names are looked for in `folder`, then in the current directory."""
        changed = apply_overrides(document, overrides)
        budgets = [key for key in BUDGETS if any(o.partition("=")[0].strip() == key for o in overrides)]
        if budgets:  # `--set epochs=1` replaces the budget of the file, whatever its kind
            changed = {key: value for key, value in changed.items() if key not in BUDGETS or key in budgets}
        recipe = validated(cls, changed, file, overrides)
        recipe._origin = Origin(file, tuple(overrides))
        with recipe.blamed():
            recipe._check_names()
        return recipe._with_absolute_files(folder or Path())

    @contextmanager
    def blamed(self) -> Iterator[None]:
        """An InputError about a field of this recipe, from wherever, names the file or `--set` that the field is in."""
        try:
            yield
        except InputError as error:
            error.locate(origin(str(error.details.get("field", "")), self._origin.file, self._origin.overrides))
            raise

    def _check_names(self) -> None:
        """Built-in names and their keys that are known here; models and data sources check their own."""

        def missing(field: str, reason: str) -> InputError:
            return InputError(f"{field}: missing; {reason}", field=field, found="nothing", allowed="a whole number")

        optimizer = self.optimizer
        if optimizer.use != OWN and "lr" not in optimizer.model_fields_set:
            raise InputError("optimizer.lr: missing", field="optimizer.lr", found="nothing", allowed="a number above 0")
        if optimizer.use == OWN and "lr" in optimizer.model_fields_set:
            raise InputError(
                f"optimizer.lr: found {optimizer.lr:g}, but an own optimizer has its own learning rate",
                hint="leave it out; warmup and decay apply to the optimizer's own",
                field="optimizer.lr",
                found=optimizer.lr,
            )
        if not is_import_path(optimizer.use) and optimizer.use != OWN:
            if optimizer.use not in OPTIMIZERS:
                raise unknown_name("optimizer", optimizer.use, OPTIMIZERS, field="optimizer.use")
            allowed = OPTIMIZERS[optimizer.use]
            for key in optimizer.options:
                if key not in allowed:
                    known = [*type(optimizer).model_fields, *allowed]
                    raise unknown_name("key", key, known, field=f"optimizer.{key}")
        if not is_import_path(optimizer.decay) and optimizer.decay not in DECAYS:
            raise unknown_name("decay", optimizer.decay, DECAYS, field="optimizer.decay")
        if optimizer.decay == "step" and optimizer.decay_every is None:
            raise missing("optimizer.decay_every", "decay: step needs the number of steps between drops")
        if optimizer.lr_scaling != "none" and optimizer.lr_batch is None:
            raise missing("optimizer.lr_batch", "lr_scaling needs the batch that lr was chosen for")
        if self.loss and not is_import_path(self.loss.use) and self.loss.use not in LOSSES:
            raise unknown_name("loss", self.loss.use, LOSSES, field="loss")
        self._check_metrics()
        self._check_hooks()

    def _check_hooks(self) -> None:
        names: set[str] = set()
        for hook in self.hooks:
            if not is_import_path(hook.use) and hook.use not in HOOKS:
                raise unknown_name("hook", hook.use, HOOKS, field="hooks")
            name = short_name(hook.use)
            if name in names:
                raise InputError(
                    f"hooks: found two that are called {name!r}; what they keep in checkpoints would be one's",
                    hint="derive a class with another name",
                    field="hooks",
                    found=name,
                )
            names.add(name)

    def _check_metrics(self) -> None:
        titles: set[str] = set()
        for metric in self.metrics:
            if not is_import_path(metric.use):
                if metric.use not in METRICS:
                    raise unknown_name("metric", metric.use, METRICS, field="metrics")
                for key in metric.options:
                    raise unknown_name(f"key of metric {metric.use!r}:", key, ["name"], field="metrics")
            if metric.title in titles or metric.title == "loss":
                raise InputError(
                    f"metrics: found two that are called {metric.title!r}",
                    hint=f"give one of them another name: {{use: {metric.use}, name: ...}}",
                    field="metrics",
                    found=metric.title,
                )
            titles.add(metric.title)

    def _with_absolute_files(self, folder: Path) -> Recipe:
        """Ranks, and a resume from elsewhere, must find the files that the recipe names."""

        def placed(name: str) -> str:
            return absolute(name, folder) if is_import_path(name) else name

        def block(named: Named) -> Any:
            return named.model_copy(update={"use": placed(named.use)})

        optimizer = block(self.optimizer).model_copy(update={"decay": placed(self.optimizer.decay)})
        data = block(self.data)
        if not is_import_path(data.use):
            data = data.model_copy(update=_placed_files(self.data.options, folder))
        model = block(self.model)
        folder_of_model = self.model.options.get("path")
        if isinstance(folder_of_model, str) and self.model.built_in:
            model = model.model_copy(update={"path": found_from(folder, folder_of_model)})
        if self.model.weights is not None:
            model = model.model_copy(update={"weights": found_from(folder, self.model.weights)})
        changes: dict[str, Any] = {"model": model, "data": data, "optimizer": optimizer}
        if self.loss:
            changes["loss"] = block(self.loss)
        if self.metrics:
            changes["metrics"] = [block(metric) for metric in self.metrics]
        if self.hooks:
            changes["hooks"] = [block(hook) for hook in self.hooks]
        return self.model_copy(update=changes)

    def to_yaml(self) -> str:
        return dump_yaml(self.model_dump(exclude_unset=True))


def _placed_files(options: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The keys of the built-in data sources that name files, made absolute. What is no file there stays a name.

    Those of the sources of a mixture too.
    """
    names = {"path": (), "cache": (), "tokenizer": ("bytes",), "template": ("plain", "none", "tokenizer")}
    placed: dict[str, Any] = {}
    if isinstance(options.get("sources"), dict):
        placed["sources"] = {
            name: {**keys, **_placed_files(keys, folder)} if isinstance(keys, dict) else keys
            for name, keys in options["sources"].items()
        }
    for key, kept in names.items():
        value = options.get(key)
        if isinstance(value, str) and value not in kept and "://" not in value:  # an address is no file here
            if glob.has_magic(value) and glob.glob(str(folder / value), recursive=True):
                placed[key] = os.path.abspath(folder / value)
            elif Path(found := found_from(folder, value)).exists() or not kept:
                placed[key] = found
    return placed
