"""Published training rows: columns model, gpu, n_gpus, degrees, batch, precision and a throughput, as recipes.

A row is read as one `Recipe`; what it leaves open is taken from its stack's defaults, and the row is then marked as one
that assumes something. The published seconds are those of a step: stated, or from tokens/s, or from TFLOP/s.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ..plans.errors import RequestError
from .recipe_memory import recipe_memory
from .recipes import Recipe, recipe_step
from .repricing import Priced, Refused, positive, source_name
from .stacks import Stack, find_stack, load_stacks
from .systems import System, find_system
from .transformers import Transformer, find_transformer, load_transformers, read_shape

__all__ = ["COLUMNS", "Books", "Reading", "price_recipe", "read_recipe", "recipe_kind"]

COLUMNS = frozenset({"model", "gpu", "n_gpus", "tp", "pp", "global_batch_seqs", "tokens_per_s_per_gpu"})

_PRECISIONS = (
    (r"nvfp4|fp4", "nvfp4"),
    (r"^mxfp8|^fp8-mx|^mx", "mxfp8"),
    (r"fp8|float8", "fp8"),
    (r"bf16|fp16|float16|^$", "bf16"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A row understood: shape, recipe, machine, stack, and the names of what was taken from the stack's defaults."""

    model: Transformer
    recipe: Recipe
    system: System
    stack: Stack
    assumed: tuple[str, ...]
    published_s: float


class Books:
    """Shapes and stacks, read once for all rows of a table."""

    def __init__(self) -> None:
        self.shapes = load_transformers()
        self.stacks = load_stacks()


def price_recipe(number: int, row: Mapping[str, str], systems: tuple[System, ...], books: Books) -> Priced | Refused:
    """The row priced, or what it does not say."""
    try:
        reading = read_recipe(row, systems, books)
        if isinstance(reading, str):
            return Refused(row=number, reason=reading)
        price = recipe_step(reading.model, reading.recipe, reading.system, reading.stack)
        memory = recipe_memory(reading.model, reading.recipe, reading.system, reading.stack)
    except RequestError as error:
        return Refused(row=number, reason=str(error))
    recipe, said = reading.recipe, positive((row.get("memory_GiB") or "").split(" ")[0])
    return Priced(
        row=number, source=source_name(row), model=row["model"], device=reading.system.name, kind=recipe_kind(reading),
        evidence="assumes " + ", ".join(reading.assumed) if reading.assumed else "states all",
        published_s=reading.published_s, predicted_s=price.step_s,
        published_bytes=None if said is None else said * 2.0**30, predicted_bytes=memory.total_bytes,
        group=(source_name(row), row["model"], row["gpu"]), work=recipe.global_batch * recipe.seq_len / recipe.devices,
        terms=price.terms,
    )  # fmt: skip


def read_recipe(row: Mapping[str, str], systems: tuple[System, ...], books: Books) -> Reading | str:
    """What the row says as a recipe, or the reason why it says too little."""
    model = find_transformer(books.shapes, row["model"]) or read_shape(row.get("arch_note", ""), row["model"])
    system, stack = find_system(systems, row["gpu"]), find_stack(books.stacks, source_name(row))
    if model is None:
        return f"no shape is known of the model {row['model']!r}"
    if system is None:
        return f"no device sheet for {row['gpu']!r}"
    if stack is None:
        return f"no software stack is known of the source {source_name(row)!r}"
    devices, tp, pp = (positive(row[key]) for key in ("n_gpus", "tp", "pp"))
    if devices is None or tp is None or pp is None:
        return "it must say the devices and the tensor- and pipeline-parallel degrees"
    assumed: list[str] = []
    recipe = _recipe(row, int(devices), int(tp), int(pp), stack, assumed)
    if isinstance(recipe, str):
        return recipe
    published = _published_s(row, model, recipe, stack)
    if published is None:
        return "it must say a step time, tokens per second or TFLOP/s"
    return Reading(
        model=model, recipe=recipe, system=system, stack=stack, assumed=tuple(assumed), published_s=published
    )


def _recipe(row: Mapping[str, str], devices: int, tp: int, pp: int, stack: Stack, assumed: list[str]) -> Recipe | str:
    defaults, note = stack.defaults, f"{row.get('fsdp_note', '')} {row.get('schedule_or_note', '')}".lower()
    cp, ep = int(positive(row.get("cp")) or 1), int(positive(row.get("ep")) or 1)
    if devices % (tp * pp * cp):
        return f"{devices} devices cannot be split into tp {tp} x pp {pp} x cp {cp}"
    dp = devices // (tp * pp * cp)
    seq_len, micro, batch = (positive(row.get(key)) for key in ("seq_len", "micro_batch", "global_batch_seqs"))
    local = re.search(r"local batch (\d+)", note)
    if seq_len is None and "seq_len" in defaults:
        seq_len = float(defaults["seq_len"])
        assumed.append("seq_len")
    if batch is None and (local or micro):
        batch = dp * (float(local.group(1)) if local else micro or 0.0)
    stated = re.search(r"(\d+) microbatches", note)
    steps = int(stated.group(1)) if stated else 0
    if micro is None and batch is not None and not steps:
        if pp > 1 and "micro_batches_per_stage" in defaults:
            steps = pp * int(defaults["micro_batches_per_stage"])
            assumed.append("micro-batches")
        elif "micro_batch" in defaults:
            micro = float(defaults["micro_batch"])
            assumed.append("micro_batch")
    if seq_len is None or batch is None or (micro is None and not steps):
        return "it must say the sequence length, the global batch and the micro-batch"
    if batch % dp:
        return f"a global batch of {batch:.0f} cannot be split over {dp} replicas"
    recompute, parallel = _recompute(row.get("activation_ckpt", ""), defaults)
    compiled = bool(defaults["compiled"])
    if "compile" in note or "eager" in note:
        compiled = "eager" not in note
    virtual = int(positive(row.get("vp")) or (2 if pp > 1 and "interleaved" in note else 1))
    return Recipe(
        devices=devices, seq_len=int(seq_len), micro_batch=int(micro or 1), global_batch=int(batch),
        tp=tp, pp=pp, cp=cp, ep=ep, virtual=virtual, recompute=recompute,
        precision=_precision(row.get("precision", "")),
        shard=_shard(row.get("fsdp_note", ""), str(defaults["shard"])), sequence_parallel=parallel,
        async_tp="asynctp" in note.replace(" ", "") or "tp-comm-overlap" in note, compiled=compiled,
        skip_mtp="w/o mtp" in row["model"].lower(), micro_batches=steps,
    )  # fmt: skip


def _recompute(text: str, defaults: Mapping[str, object]) -> tuple[str, bool]:
    """What is recomputed, and whether sequences are split beside tensor parallelism."""
    words, parallel = text.lower(), bool(defaults["sequence_parallel"])
    parallel = False if "no seq-par" in words else parallel or "sequence parallel" in words
    for name in ("selective", "full", "none"):
        if name in words:
            return name, parallel
    return ("full" if "remat" in words else str(defaults["recompute"])), parallel


def _shard(text: str, default: str) -> str:
    words = text.upper()
    sized = re.search(r"FSDP=(\d+)", words)
    if sized:
        return "full" if int(sized.group(1)) > 1 else default
    if "SHARD_GRAD_OP" in words:
        return "gradients"
    return "full" if "FULL_SHARD" in words or "FSDP" in words else default


def _precision(text: str) -> str:
    plain = re.sub(r"\(.*?\)", "", text).strip()
    return next((name for pattern, name in _PRECISIONS if re.search(pattern, plain, re.IGNORECASE)), plain.lower())


def _published_s(row: Mapping[str, str], model: Transformer, recipe: Recipe, stack: Stack) -> float | None:
    stated, rate, flops = (
        positive(row.get(key)) for key in ("step_time_s", "tokens_per_s_per_gpu", "model_tflops_per_gpu")
    )
    tokens = float(recipe.global_batch * recipe.seq_len)
    if stated is not None:
        return stated
    if rate is not None:
        return tokens / (rate * recipe.devices)
    if flops is None:
        return None
    seen = recipe.seq_len if stack.masked_flops else 2 * recipe.seq_len
    return tokens * model.flops_per_token(seen) / (flops * 1e12 * recipe.devices)


def recipe_kind(reading: Reading) -> str:
    """What kind of recipe it is: 'dense' or 'moe', a low precision if any, and what is split."""
    recipe = reading.recipe
    low = "" if recipe.precision == "bf16" else f" {recipe.precision}"
    split = [
        name
        for name, degree in (("tp", recipe.tp), ("pp", recipe.pp), ("cp", recipe.cp), ("ep", recipe.ep))
        if degree > 1
    ]
    return f"{'moe' if reading.model.is_moe else 'dense'}{low} {'+'.join(split) or 'dp'}"
