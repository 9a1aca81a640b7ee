"""What a published training row says, as one `Recipe`: degrees, batch, precision, what is recomputed and sharded.

What a row leaves open is taken from its stack's defaults and named; what contradicts itself or the model is refused
with the reason. Degrees left blank follow from the others where only one number is possible.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import ceil

from .recipes import Recipe
from .repricing import positive, stated, whole
from .stacks import Stack
from .transformers import Transformer

__all__ = ["degrees_that_fit", "published_s", "row_recipe"]

_MOST_DEVICES = 2**20
_MOST_TOKENS = 2**40
_PRECISIONS = (
    (r"nvfp4|fp4", "nvfp4"),
    (r"^mxfp8|^fp8-mx|^mx", "mxfp8"),
    (r"fp8|float8", "fp8"),
    (r"tf32", "tf32"),
    (r"fp32|float32", "fp32"),
    (r"bf16|fp16|float16|half|^amp$|^$", "bf16"),
)
_COUNTS = ("n_gpus", "tp", "pp", "dp", "cp", "ep", "vp", "micro_batch", "global_batch_seqs", "seq_len")


def row_recipe(row: Mapping[str, str], stack: Stack, assumed: list[str]) -> Recipe | str:
    """The recipe of a row, or the reason why there is none; names of what was assumed are added to `assumed`."""
    for name in _COUNTS:
        text = stated(row, name)
        if text and whole(text) is None:
            return f"'{name}' must be a whole number above 0, got {text[:40]!r}"
    degrees = _degrees(row, assumed)
    if isinstance(degrees, str):
        return degrees
    devices, tp, pp, cp = degrees
    dp, ep = devices // (tp * pp * cp), whole(row.get("ep")) or 1
    batch = _batch(row, stack, dp, pp, assumed)
    if isinstance(batch, str):
        return batch
    seq_len, micro, sequences, steps = batch
    defaults, note = stack.defaults, _notes(row)
    recompute, parallel = _recompute(row.get("activation_ckpt", ""), defaults)
    compiled = bool(defaults["compiled"])
    if "compile" in note or "eager" in note:
        compiled = "eager" not in note
    shard, group = _shard(row.get("fsdp_note", "") + " " + row.get("schedule_or_note", ""), str(defaults["shard"]), dp)
    if group and dp * cp % group:
        return f"{dp * cp} replicas cannot be sharded in groups of {group}"
    return Recipe(
        devices=devices, seq_len=seq_len, micro_batch=micro, global_batch=sequences,
        tp=tp, pp=pp, cp=cp, ep=ep, virtual=whole(row.get("vp")) or (2 if pp > 1 and "interleaved" in note else 1),
        recompute=recompute, precision=_precision(row.get("precision", "")),
        shard=shard, shard_group=group, sequence_parallel=parallel and tp > 1,
        async_tp="asynctp" in note.replace(" ", "") or "tp-comm-overlap" in note or bool(defaults.get("async_tp")),
        compiled=compiled,
        skip_mtp="w/o mtp" in row["model"].lower(), micro_batches=steps, prefetch=_told(note, r"prefetch\s*=\s*(\d+)"),
        bucket_bytes=None if (bucket := _told(note, r"bucket\s*=\s*(\d+)\s*mb")) is None else bucket * 1e6,
    )  # fmt: skip


def degrees_that_fit(model: Transformer, recipe: Recipe) -> str | None:
    """Why the degrees of a recipe do not fit the model, or None where they do."""
    chunks, whole_layers = recipe.pp * recipe.virtual, model.layers + model.mtp_layers + 2  # embedding and loss count
    if chunks > whole_layers:
        return f"{model.layers} layers cannot be cut into pp {recipe.pp} x vp {recipe.virtual} pieces"
    if model.heads % recipe.tp and recipe.tp % model.heads:
        return f"{model.heads} heads cannot be split over tp {recipe.tp}"
    if recipe.tp > model.heads:
        return f"tp {recipe.tp} is more than the {model.heads} heads"
    if recipe.seq_len % recipe.cp:
        return f"a sequence of {recipe.seq_len} cannot be split over cp {recipe.cp}"
    if recipe.ep > 1 and not model.is_moe:
        return f"ep {recipe.ep} needs experts, which this model does not have"
    if recipe.ep > 1 and (model.experts % recipe.ep or recipe.devices // recipe.pp % recipe.ep):
        return (
            f"{model.experts} experts on {recipe.devices // recipe.pp} devices of a stage cannot be split over "
            f"ep {recipe.ep}"
        )
    return None


def published_s(
    row: Mapping[str, str], model: Transformer, recipe: Recipe, stack: Stack, peak_flops_per_s: float
) -> float | str:
    """Seconds of a step that the row says, or why it says none that can be true."""
    tokens = float(recipe.global_batch * recipe.seq_len)
    seen = recipe.seq_len if stack.masked_flops else 2 * recipe.seq_len
    flops = tokens * model.flops_per_token(seen)
    done = flops + tokens * _repeated_flops(model, recipe, seen)
    cell = {name: positive(stated(row, name)) for name in _RATES}
    seconds = next(
        (
            _RATES[name](value, tokens, done if name in _REPEATED else flops, recipe, peak_flops_per_s)
            for name, value in cell.items()
            if value is not None
        ),
        None,
    )
    if seconds is None:
        return "it must say a step time, tokens per second, TFLOP/s, MFU or HFU"
    reached = tokens * model.flops_per_token(recipe.seq_len) / seconds / recipe.devices
    if reached > peak_flops_per_s:
        return (
            f"its rate means {reached / 1e12:.0f} TFLOP/s per device, above the peak of {peak_flops_per_s / 1e12:.0f}; "
            "check the unit (per device or in all, tokens or samples)"
        )
    return seconds


# What a row may say of its speed, the most direct first: (value, tokens of a step, FLOP, recipe, peak) to seconds.
_RATES = {
    "step_time_s": lambda v, tokens, flops, recipe, peak: v,
    "step_time_ms": lambda v, tokens, flops, recipe, peak: v * 1e-3,
    "tokens_per_s_per_gpu": lambda v, tokens, flops, recipe, peak: tokens / (v * recipe.devices),
    "tokens_per_s": lambda v, tokens, flops, recipe, peak: tokens / v,
    "samples_per_s": lambda v, tokens, flops, recipe, peak: recipe.global_batch / v,
    "model_tflops_per_gpu": lambda v, tokens, flops, recipe, peak: flops / (v * 1e12 * recipe.devices),
    "mfu_pct": lambda v, tokens, flops, recipe, peak: flops / (v / 100.0 * peak * recipe.devices),
    "hardware_tflops_per_gpu": lambda v, tokens, flops, recipe, peak: flops / (v * 1e12 * recipe.devices),
    "hfu_pct": lambda v, tokens, flops, recipe, peak: flops / (v / 100.0 * peak * recipe.devices),
}
_REPEATED = ("hardware_tflops_per_gpu", "hfu_pct")  # count what is recomputed


def _repeated_flops(model: Transformer, recipe: Recipe, seen: int) -> float:
    """FLOP per token that are computed again: of all blocks, or of the scores alone."""
    scores = model.flops_per_token(seen) - model.flops_per_token(0)
    if recipe.recompute == "full":
        return (model.flops_per_token(seen) - 6.0 * model.vocab * model.hidden) / 3.0
    return scores / 3.0 if recipe.recompute == "selective" else 0.0


def _notes(row: Mapping[str, str]) -> str:
    return f"{row.get('fsdp_note', '')} {row.get('schedule_or_note', '')}".lower()


def _told(note: str, pattern: str) -> int | None:
    found = re.search(pattern, note)
    return int(found.group(1)) if found else None


def _degrees(row: Mapping[str, str], assumed: list[str]) -> tuple[int, int, int, int] | str:
    """Devices, tp, pp and cp. A blank degree is what the others leave, else 1 where the row speaks of replicas only."""
    devices = whole(row.get("n_gpus"))
    if devices is None:
        return "it must say the number of devices"
    if devices > _MOST_DEVICES:
        return f"'n_gpus' must be at most {_MOST_DEVICES}, got {devices}"
    tp, pp, dp, cp = (whole(row.get(name)) for name in ("tp", "pp", "dp", "cp"))
    known = (tp or 1) * (pp or 1) * (cp or 1)
    if tp is None or pp is None:
        left, rest = divmod(devices, known * (dp or 1))
        left = max(1, left)  # fewer devices than degrees: refused below
        alone = not rest and (left == 1 or (dp is not None and (tp is None) != (pp is None)))
        replicas = re.search(r"fsdp(?!=0)|ddp|shard|zero|data.parallel", _notes(row)) and (tp or 1) * (pp or 1) == 1
        if not alone and not replicas and devices > 1:
            return "it must say the tensor- and pipeline-parallel degrees"
        if not alone and devices > 1:
            left = 1
            assumed.append("tp and pp of 1")
        tp, pp = tp or (left if pp is not None else 1), pp or (left if tp is not None else 1)
    cp = cp or 1
    if devices % (tp * pp * cp):
        return f"{devices} devices cannot be split into tp {tp} x pp {pp} x cp {cp}"
    if dp is not None and dp * tp * pp not in (devices, devices // cp):
        return f"tp {tp} x pp {pp} x cp {cp} x dp {dp} must be the {devices} devices"
    return devices, tp, pp, cp


def _batch(
    row: Mapping[str, str], stack: Stack, dp: int, pp: int, assumed: list[str]
) -> tuple[int, int, int, int] | str:
    """Sequence length, sequences of a micro-batch and of a step, and the number of micro-batches."""
    defaults, note = stack.defaults, _notes(row)
    seq_len, micro, batch = (whole(row.get(key)) for key in ("seq_len", "micro_batch", "global_batch_seqs"))
    if seq_len is None and "seq_len" in defaults:
        seq_len = int(defaults["seq_len"])
        assumed.append("seq_len")
    tokens = whole(row.get("global_batch_tokens"))
    if batch is None and tokens and seq_len and tokens % seq_len == 0:
        batch = tokens // seq_len
    local, rounds = re.search(r"local batch (\d+)", note), re.search(r"grad_accum=(\d+)|(\d+) microbatches", note)
    steps = int(rounds.group(1) or rounds.group(2)) if rounds else 0
    if batch is None and (local or micro):
        batch = dp * (int(local.group(1)) if local else (micro or 0) * (steps or 1))
    if micro is None and batch is not None and not steps:
        if pp > 1 and "micro_batches_per_stage" in defaults:
            steps = pp * int(defaults["micro_batches_per_stage"])
            assumed.append("micro-batches")
        elif "micro_batch" in defaults:
            micro = int(defaults["micro_batch"])
            assumed.append("micro_batch")
    if seq_len is None or batch is None or (micro is None and not steps):
        return "it must say the sequence length, the global batch and the micro-batch"
    if batch % dp:
        return f"a global batch of {batch} cannot be split over {dp} replicas"
    if batch * seq_len > _MOST_TOKENS:
        return f"a step of {batch} x {seq_len} tokens must be at most 2**40"
    if micro is not None:
        if micro * dp > batch:
            return f"a global batch of {batch} must hold a micro-batch of {micro} for each of {dp} replicas"
        steps = ceil(batch / (dp * micro))
    return seq_len, micro or ceil(batch / (dp * steps)), batch, steps


def _recompute(text: str, defaults: Mapping[str, object]) -> tuple[str, bool]:
    """What is recomputed, and whether sequences are split beside tensor parallelism."""
    words, parallel = text.lower(), bool(defaults["sequence_parallel"])
    parallel = not re.search(r"no (seq-par|sequence)", words) and (parallel or "sequence parallel" in words)
    for name, pattern in (("selective", r"selective|\bsac\b|attention only"),
                          ("none", r"\b(none|no|off|false)\b(?! seq)"),
                          ("full", r"full|remat|\btrue\b|\bon\b|\byes\b|every|block|layer")):  # fmt: skip
        if re.search(pattern, words):
            return name, parallel
    return str(defaults["recompute"]), parallel


def _shard(text: str, default: str, dp: int) -> tuple[str, int]:
    """What is sharded over the replicas, and in groups of how many (0: all)."""
    words = text.upper()
    sized = re.search(r"FSDP\s*=\s*(\d+)", words)
    hybrid = re.search(r"HSDP|HYBRID", words)
    inner = re.search(r"(?:DP_SHARD|SHARD_GROUP|HSDP|SHARD)\s*=\s*(\d+)", words)
    replicas = re.search(r"(?:DP_REPLICATE|REPLICATE|REPLICAS)\s*=\s*(\d+)", words)
    if hybrid or (inner and replicas):
        group = int(inner.group(1)) if inner else dp // max(1, int(replicas.group(1))) if replicas else 8
        return "full", 0 if group >= dp else max(1, group)
    if sized:
        return ("full", 0) if int(sized.group(1)) > 1 else (default, 0)
    for pattern, name in ((r"SHARD_GRAD_OP|ZERO-?2", "gradients"), (r"FULL_SHARD|FSDP|ZERO-?3", "full"),
                          (r"ZERO-?1|DIST\w*[- ]OPT", "optimizer"), (r"\bDDP\b|NO_SHARD", "none")):  # fmt: skip
        if re.search(pattern, words):
            return name, 0
    return default, 0


def _precision(text: str) -> str:
    plain = re.sub(r"\(.*?\)", "", text).strip()
    return next((name for pattern, name in _PRECISIONS if re.search(pattern, plain, re.IGNORECASE)), plain.lower())
