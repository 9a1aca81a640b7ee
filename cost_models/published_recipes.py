"""Published training rows: columns model, gpu, n_gpus, degrees, batch, precision and a throughput, as recipes.

A row is read as one `Recipe`; what it leaves open is taken from its stack's defaults, and the row is then marked as one
that assumes something. The published seconds are those of a step: stated, or from tokens/s, or from TFLOP/s.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from ..plans.errors import RequestError
from .recipe_memory import recipe_memory
from .recipe_rows import degrees_that_fit, published_s, row_recipe
from .recipes import Recipe, recipe_step
from .repricing import Priced, Refused, positive, source_name, whole
from .stacks import Stack, find_stack, load_stacks
from .systems import System, find_system
from .transformers import Transformer, find_transformer, load_transformers, read_shape

__all__ = ["COLUMNS", "Books", "Reading", "price_recipe", "read_recipe", "recipe_kind"]

COLUMNS = frozenset({"model", "gpu", "n_gpus"})


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
    said = " ".join(f"{key}={value}" for key, value in row.items() if value and re.fullmatch(r"\d+", value))
    name, source = row.get("model", ""), source_name(row)
    model = read_shape(row.get("arch_note", ""), name) or find_transformer(books.shapes, name) or read_shape(said, name)
    system = find_system(systems, row.get("gpu", ""))
    if model is None:
        return f"no shape is known of the model {name!r}; say its layers, hidden, heads and vocab in arch_note"
    if system is None:
        return f"no device sheet for {row.get('gpu', '')!r}"
    assumed: list[str] = []
    stack = find_stack(books.stacks, f"{source} {row.get('source', '')} {row.get('schedule_or_note', '')}")
    if stack.match == ".*":
        assumed.append("software")
    recipe = row_recipe(row, stack, assumed)
    if isinstance(recipe, str):
        return recipe
    unfit = degrees_that_fit(model, recipe)
    chunks = not whole(row.get("vp")) and recipe.pp > 1 and bool(stack.defaults.get("interleaved"))
    chunks = chunks and ("micro_batch" in assumed or recipe.virtual > 1)
    if not unfit and (chunks or "micro_batch" in assumed):
        recipe = _tuned(model, recipe, system, stack, chunks=chunks, batch="micro_batch" in assumed)
    peak = system.device.peak_flops_per_s(stack.family(system.device.name, recipe.precision).dtype)
    published = unfit or published_s(row, model, recipe, stack, peak)
    if isinstance(published, str):
        return published
    return Reading(
        model=model, recipe=recipe, system=system, stack=stack, assumed=tuple(assumed), published_s=published
    )


def _tuned(model: Transformer, recipe: Recipe, system: System, stack: Stack, *, chunks: bool, batch: bool) -> Recipe:
    """The recipe with the micro-batch if `batch`, and the model chunks per stage if `chunks`, that its authors would
    have chosen: the fastest that fits the memory, and of the smallest micro-batch where by estimate nothing does."""
    each = math.ceil(model.layers / recipe.pp) if chunks else recipe.virtual  # layers of a stage
    counts = [count for count in range(1, each + 1) if each % count == 0] if chunks else [each]
    sizes = [2**power for power in range(11)] if batch else [recipe.micro_batch]
    found: list[tuple[bool, float, Recipe]] = []
    for micro in sizes:
        if recipe.global_batch % (recipe.dp * micro):
            continue
        steps = recipe.global_batch // (recipe.dp * micro)
        for virtual in counts:
            one = dataclasses.replace(recipe, micro_batch=micro, micro_batches=steps, virtual=virtual)
            if virtual > 1 and steps % recipe.pp:  # interleaved schedules run micro-batches in rounds of pp
                continue
            fits = recipe_memory(model, one, system, stack).total_bytes <= system.device.memory_bytes
            if fits or micro == sizes[0]:
                found.append((not fits, recipe_step(model, one, system, stack).step_s, one))
    return min(found, key=lambda one: one[:2])[2] if found else recipe


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
