"""The plan file: strict reading and all-or-nothing writing. Reading a plan never runs anything and never hangs.

Strict means: UTF-8 JSON of at most 64 MiB, every key of the schema once and no other, every value of its type and
within its bounds, and a whole that makes sense (`plan_rules`). Anything else is one PlanError that names the key.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import stat
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from .errors import PlanError, RequestError
from .plan_rules import PlanRuleError, check

if TYPE_CHECKING:
    from .plan import Plan

__all__ = ["LIMIT_BYTES", "decode", "encode", "read", "write"]

LIMIT_BYTES = 64 << 20
_WAY_OUT = "write the plan again with `meshwright plan`, or correct that key"
_UNKNOWN = "not be given, as the schema has no such key"
_AT = re.compile(r"(.+?)(?: - at `([^`]+)`)?", re.DOTALL)
_RULES = (
    (re.compile(r"Expected (`str`) matching regex .*\(R\|S.*", re.DOTALL), "be R, S(dim), P(sum), P(max) or P(min)"),
    (re.compile(r"Expected (.+?), got (?P<got>`.+`)", re.DOTALL), "be {}"),
    (re.compile(r"Expected (.+)", re.DOTALL), "be {}"),
)
_FIELD = re.compile(r"Object (missing required|contains unknown) field `(.*)`", re.DOTALL)
_PART = re.compile(r"([^.\[\]]+)|\[(\d+)\]")


class _Header(Struct, frozen=True):
    """The keys that are read first, so that another version is called that and not a heap of unknown keys."""

    format: Any
    version: Any


def decode(kind: type[Plan], data: bytes, *, where: str) -> Plan:
    """The plan that `data` writes; `where` says in messages where the data came from."""
    if not isinstance(data, bytes):
        raise PlanError(_message("", "be given as bytes", type(data).__name__, where))
    if len(data) > LIMIT_BYTES:
        raise PlanError(_message("", "be at most 64 MiB", f"{len(data)} bytes", where))
    try:
        _check_header(msgspec.json.decode(data, type=_Header), where)
        plan = msgspec.json.decode(data, type=kind)
        raw = json.loads(data, object_pairs_hook=_object)
        _same_keys(raw, json.loads(msgspec.json.encode(plan)), "")
        check(plan)
    except PlanError:
        raise
    except PlanRuleError as error:
        raise PlanError(_message(error.key, error.rule, error.value, where)) from None
    except msgspec.ValidationError as error:
        raise PlanError(_message(*_translate(str(error), data), where)) from None
    except msgspec.MsgspecError as error:
        raise PlanError(_message("", "be JSON", str(error), where)) from None
    except RecursionError:
        raise PlanError(_message("", "be nested as the schema says", "nesting without end", where)) from None
    except ValueError as error:
        raise PlanError(_message("", "be JSON in UTF-8", str(error), where)) from None
    return plan


def encode(plan: Plan) -> bytes:
    """Canonical JSON: the schema's order, two spaces, a newline at the end. It is read back before it is given out."""
    try:
        check(plan)
        data = msgspec.json.format(msgspec.json.encode(plan), indent=2) + b"\n"
    except PlanRuleError as error:
        raise PlanError(_message(error.key, error.rule, error.value, "the plan in memory")) from None
    except (TypeError, AttributeError, ValueError, OverflowError, RecursionError) as error:
        message = _message("", "hold only values of the schema", str(error), "the plan in memory")
        raise PlanError(message) from None
    decode(type(plan), data, where="the plan in memory")
    return data


def read(path: str | os.PathLike[str]) -> bytes:
    """The bytes of the ordinary file at `path`, at most one more than the limit."""
    try:
        name = os.fspath(path)
    except TypeError:
        raise PlanError(
            f"plan 'path' must be a path, got {_clean(repr(path))}; give the file that `meshwright plan -o FILE` wrote"
        ) from None
    try:
        handle = os.open(name, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        with open(handle, "rb") as stream:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise OSError(errno.EINVAL, "not an ordinary file")
            return stream.read(LIMIT_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise PlanError(
            f"plan 'path' must name a readable file, got {_clean(repr(name))} ({_clean(reason)}); "
            "give the file that `meshwright plan -o FILE` wrote"
        ) from None


def write(path: str | os.PathLike[str], data: bytes, *, what: str = "plan 'path'") -> None:
    """Put `data` at `path` in one move; on any failure what was there stays as it was. Messages call it `what`."""
    try:
        name = os.path.realpath(os.fspath(path))
        folder, base = os.path.split(name)
        if not base or (os.path.exists(name) and not os.path.isfile(name)):
            raise OSError(errno.EINVAL, "not an ordinary file")
        _replace(name, os.path.join(folder, f".{base[:60]}.{secrets.token_hex(6)}.tmp"), data)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise RequestError(
            f"{what} must be writable, got {_clean(repr(os.fspath(path)))} ({_clean(reason)}); give another path"
        ) from None


def _replace(name: str, scratch: str, data: bytes) -> None:
    """Write `data` beside its place, let it reach the disk, then move it there."""
    try:
        with open(scratch, "xb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(scratch, name)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(scratch)
        raise


def _check_header(header: _Header, where: str) -> None:
    if header.format != "meshwright-plan":
        raise PlanError(_message("format", "be 'meshwright-plan'", repr(header.format), where))
    if type(header.version) is not int or header.version not in (1, 2):
        raise PlanError(
            f"plan key 'version' must be 1 or 2, got {_clean(repr(header.version))}; in {_clean(where)}; "
            "read it with the version of meshwright that wrote it, or write the plan again with this one"
        )


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise PlanRuleError(twice, "be given once", "two values")
    return out


def _same_keys(raw: Any, clean: Any, at: str) -> None:
    """Hold that the file has exactly the keys of the plan that was read from it."""
    if isinstance(clean, dict):
        for key in clean.keys() - raw.keys():
            raise PlanRuleError(_join(at, key), "be given", "nothing")
        for key in raw.keys() - clean.keys():
            raise PlanRuleError(_join(at, key), _UNKNOWN, raw[key])
        for key, value in clean.items():
            _same_keys(raw[key], value, _join(at, key))
    elif isinstance(clean, list):
        for index, (left, right) in enumerate(zip(raw, clean, strict=True)):
            if isinstance(right, (dict, list)):
                _same_keys(left, right, f"{at}[{index}]")


def _join(at: str, key: str) -> str:
    return f"{at}.{key}" if at else key


def _translate(text: str, data: bytes) -> tuple[str, str, str]:
    """Key, rule and value from a message of msgspec."""
    match = _AT.fullmatch(text)
    detail, path = match.groups() if match else (text, None)
    key = (path or "$").removeprefix("$").removeprefix(".")
    for form, rule in _RULES:
        found = form.fullmatch(detail)
        if found:
            return key, rule.format(found.group(1)), found.groupdict().get("got") or _value_at(data, key)
    found = _FIELD.fullmatch(detail)
    if found:
        kind, name = found.groups()
        missing = kind == "missing required"
        return _join(key, name), "be given" if missing else _UNKNOWN, "nothing" if missing else "one"
    return key, "follow the schema", detail


def _value_at(data: bytes, key: str) -> str:
    """The value at `key`, in Python's words; nothing is certain about `data` but that msgspec took it for JSON."""
    try:
        value = json.loads(data)
        for name, index in _PART.findall(key):
            value = value[name] if name else value[int(index)]
        return repr(value)[:400]
    except (ValueError, LookupError, TypeError, RecursionError):
        return "another value"


def _message(key: str, rule: str, value: str, where: str) -> str:
    subject = f"plan key '{_clean(key)}'" if key else "plan file"
    # A pipeline's own message draws the grid of its actions.
    got = "\n".join(_clean(line) for line in value.split("\n")[:40]) if key == "pipeline" else _clean(value)
    return f"{subject} must {_clean(rule)}, got {got}; in {_clean(where)}; {_WAY_OUT}"


def _clean(text: str) -> str:
    """`text` fit for a terminal: no control characters, not too long."""
    shown = "".join(c if c.isprintable() else "?" for c in text[:300])
    return shown if len(text) <= 300 else shown + "..."
