"""From the text a user types to a spec: a built-in name, FILE.py[:function], or a config.json."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

from ..plans.errors import RequestError
from .builtin import builtin_spec, spec_names
from .file import file_spec
from .huggingface import huggingface_spec
from .spec import Overrides, Spec

__all__ = ["load_spec", "spec_names"]

_FILE = re.compile(r"(?P<path>.+\.py)(?::(?P<function>[^:/\\]*))?", re.DOTALL)


def load_spec(
    text: str,
    *,
    batch: int | None = None,
    seq_len: int | None = None,
    layers: int | None = None,
    dtype: object | None = None,
) -> Spec:
    """The spec that `text` names, with the given overrides.

    `text` is a built-in name (see `spec_names`), `FILE.py` or `FILE.py:function`, a Hugging Face `config.json` or a
    folder that holds one. A built-in name wins over a folder of the same name; write `./NAME` for the folder.
    """
    overrides = Overrides.of(batch=batch, seq_len=seq_len, layers=layers, dtype=dtype)
    if not isinstance(text, str) or not text:
        raise RequestError(f"'spec' must be a built-in name, FILE.py or a config.json, got {text!r}; {_known()}")
    if text in spec_names():
        return builtin_spec(text, overrides)
    if match := _FILE.fullmatch(text):
        return file_spec(Path(match["path"]), match["function"], overrides, name=text)
    path = Path(text)
    if path.suffix == ".json" or path.is_dir():
        return huggingface_spec(path, overrides, name=text)
    raise RequestError(_unknown(text))


def _known() -> str:
    return f"the built-in specs are {', '.join(spec_names())}"


def _unknown(text: str) -> str:
    near = difflib.get_close_matches(text.lower(), spec_names(), n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    rule = "'spec' must be a built-in name, FILE.py[:function], a config.json or a folder that holds one"
    return f"{rule}, got {text!r}; {hint}{_known()}"
