"""A cluster: how many devices of which kind, and how they hang together."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from .errors import RequestError

__all__ = ["Cluster", "Level", "Link"]

_FORM = re.compile(r"([a-z0-9][a-z0-9._-]{0,63}):(?:([1-9]\d{0,5})x)?([1-9]\d{0,4})")
_DEVICE = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_MOST_DEVICES = 1 << 20
_FILE_LIMIT_BYTES = 1 << 20
_WAY_OUT = "write it as DEVICE:NODESxDEVICES_PER_NODE, e.g. h100-sxm:16x8, or give a .toml or .json file"

Memory = Annotated[int, Meta(ge=1, le=2**60)]


class Link(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One level of wires, as one device sees it."""

    name: Annotated[str, Meta(min_length=1, max_length=64)]
    bandwidth_bytes_per_s: Annotated[float, Meta(gt=0.0, le=1e18)]
    latency_s: Annotated[float, Meta(ge=0.0, le=1e3)]

    def __post_init__(self) -> None:
        _require(
            isinstance(self.name, str) and 0 < len(self.name) <= 64 and self.name.isprintable(),
            "links.name",
            "be 1 to 64 printable characters",
            self.name,
        )
        _require(
            _is_number(self.bandwidth_bytes_per_s) and 0 < self.bandwidth_bytes_per_s <= 1e18,
            "links.bandwidth_bytes_per_s",
            "be a number above 0",
            self.bandwidth_bytes_per_s,
        )
        _require(
            _is_number(self.latency_s) and 0 <= self.latency_s <= 1e3,
            "links.latency_s",
            "be 0 to 1000 seconds",
            self.latency_s,
        )


class Level(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A level of switches above the nodes: `nodes` in a row share one, whose way up carries `oversubscription` times
    less than they could send, and takes `latency_s` to cross."""

    name: Annotated[str, Meta(min_length=1, max_length=64)]
    nodes: Annotated[int, Meta(ge=1, le=999_999)]
    oversubscription: Annotated[float, Meta(ge=1.0, le=1e6)]
    latency_s: Annotated[float, Meta(ge=0.0, le=1e3)] = 0.0

    def __post_init__(self) -> None:
        named = isinstance(self.name, str) and 0 < len(self.name) <= 64 and self.name.isprintable()
        _require(named, "fabric.name", "be 1 to 64 printable characters", self.name)
        _require(_is_count(self.nodes, 999_999), "fabric.nodes", "be 1 to 999999", self.nodes)
        ratio = _is_number(self.oversubscription) and 1 <= self.oversubscription <= 1e6
        _require(ratio, "fabric.oversubscription", "be a number of at least 1", self.oversubscription)
        late = _is_number(self.latency_s) and 0 <= self.latency_s <= 1e3
        _require(late, "fabric.latency_s", "be 0 to 1000 seconds", self.latency_s)


class Cluster(Struct, frozen=True, forbid_unknown_fields=True):
    """`nodes` machines with `devices_per_node` devices each; given links and memory replace the device sheet's.
    `fabric` is the network above the nodes: the name of one that is known, or its levels from the leaf up.
    `memory_bytes` is one figure for all devices, or one for each, in the order of ranks."""

    device: Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")]
    nodes: Annotated[int, Meta(ge=1, le=999_999)]
    devices_per_node: Annotated[int, Meta(ge=1, le=99_999)]
    links: tuple[Link, ...] | None = None
    memory_bytes: Memory | Annotated[tuple[Memory, ...], Meta(max_length=1 << 20)] | None = None
    fabric: str | tuple[Level, ...] | None = None

    def __post_init__(self) -> None:
        _require(
            isinstance(self.device, str) and _DEVICE.fullmatch(self.device) is not None,
            "device",
            "be a device name of small letters, digits, '.', '_' and '-'",
            self.device,
        )
        _require(_is_count(self.nodes, 999_999), "nodes", "be 1 to 999999", self.nodes)
        _require(_is_count(self.devices_per_node, 99_999), "devices_per_node", "be 1 to 99999", self.devices_per_node)
        _require(self.size <= _MOST_DEVICES, "nodes", f"make at most {_MOST_DEVICES} devices in all", self.size)
        if isinstance(self.memory_bytes, tuple):
            rule = f"give 1 to 2**60 bytes for all devices, or for each of the {self.size}"
            sound = len(self.memory_bytes) == self.size and all(_is_count(m, 2**60) for m in self.memory_bytes)
            _require(sound, "memory_bytes", rule, self.memory_bytes)
        elif self.memory_bytes is not None:
            _require(_is_count(self.memory_bytes, 2**60), "memory_bytes", "be 1 to 2**60 bytes", self.memory_bytes)
        if self.links is not None:
            sound = isinstance(self.links, tuple) and all(isinstance(link, Link) for link in self.links)
            _require(sound, "links", "be a tuple of Link values", self.links)
            names = [link.name for link in self.links]
            _require(0 < len(names) == len(set(names)) <= 16, "links", "be 1 to 16 links of different names", names)
        if self.fabric is not None and not isinstance(self.fabric, str):
            sound = isinstance(self.fabric, tuple) and all(isinstance(level, Level) for level in self.fabric)
            _require(sound, "fabric", "be a name or a tuple of Level values", self.fabric)
            sizes = [level.nodes for level in self.fabric]
            grows = all(big > small and big % small == 0 for small, big in zip(sizes, sizes[1:], strict=False))
            _require(0 < len(sizes) <= 8 and grows, "fabric", "have 1 to 8 levels, each of whole ones below", sizes)

    @classmethod
    def parse(cls, text: str) -> Cluster:
        """A cluster from 'h100-sxm:16x8', 'h100-sxm:8' (one node), a .toml or .json file, or the JSON itself."""
        if not isinstance(text, str):
            raise RequestError(f"'cluster' must be text, got {type(text).__name__}; {_WAY_OUT}")
        if text.startswith("{"):
            return _decode_json(text.encode("utf-8", "replace"), "the text given")
        if text.endswith((".toml", ".json")):
            return _read(text)
        match = _FORM.fullmatch(text)
        if match is None:
            raise RequestError(f"'cluster' must look like h100-sxm:16x8, got {text[:200]!r}; {_WAY_OUT}")
        device, nodes, per_node = match.groups()
        return cls(device=device, nodes=int(nodes or 1), devices_per_node=int(per_node))

    @classmethod
    def local(cls) -> Cluster:
        """This machine as a one-node CPU cluster: one device per rank that torchrun started, else one per core."""
        for variable in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"):
            value = os.environ.get(variable)
            if value is not None:
                if not re.fullmatch(r"[1-9]\d{0,4}", value):
                    raise RequestError(
                        f"'{variable}' must be 1 to 99999, got {value[:200]!r}; from the environment; "
                        "unset it or start the ranks with torchrun"
                    )
                return cls(device="cpu", nodes=1, devices_per_node=int(value))
        return cls(device="cpu", nodes=1, devices_per_node=os.cpu_count() or 1)

    @property
    def size(self) -> int:
        """Number of devices."""
        return self.nodes * self.devices_per_node

    def least_memory_bytes(self, devices: int) -> int | None:
        """Memory of the smallest of the first `devices` devices; None where the device's sheet says."""
        return min(self.memory_bytes[:devices]) if isinstance(self.memory_bytes, tuple) else self.memory_bytes

    @property
    def label(self) -> str:
        """The short form; it leaves out links, memory and fabric."""
        grid = f"{self.nodes}x{self.devices_per_node}" if self.nodes > 1 else str(self.devices_per_node)
        return f"{self.device}:{grid}"

    def __str__(self) -> str:
        plain = self.links is None and self.memory_bytes is None and self.fabric is None
        return self.label if plain else msgspec.json.encode(self).decode()


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_count(value: object, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most


def _require(holds: bool, key: str, rule: str, value: object) -> None:
    if not holds:
        raise RequestError(f"cluster '{key}' must {rule}, got {repr(value)[:200]}; {_WAY_OUT}")


def _read(path: str) -> Cluster:
    """The cluster in a file; what is not given there is taken from the device's sheet."""
    try:
        if not Path(path).is_file():
            raise RequestError(f"'cluster' must name a file that exists, got {path[:200]!r}; {_WAY_OUT}")
        with open(path, "rb") as stream:
            data = stream.read(_FILE_LIMIT_BYTES + 1)
    except (OSError, ValueError) as error:
        if isinstance(error, RequestError):
            raise
        raise RequestError(f"'cluster' must name a readable file, got {path[:200]!r} ({error}); {_WAY_OUT}") from None
    if len(data) > _FILE_LIMIT_BYTES:
        raise RequestError(f"'cluster' file must be at most 1 MiB, got more; in {path[:200]!r}; {_WAY_OUT}")
    return _decode_json(data, path) if path.endswith(".json") else _decode_toml(data, path)


def _decode_json(data: bytes, where: str) -> Cluster:
    try:
        return msgspec.json.decode(data, type=Cluster)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _refuse(where, error) from None


def _decode_toml(data: bytes, where: str) -> Cluster:
    try:
        tree: dict[str, Any] = tomllib.loads(data.decode())
        return msgspec.convert(tree, Cluster)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise _refuse(where, error) from None


def _refuse(where: str, error: Exception) -> RequestError:
    detail = "".join(c if c.isprintable() else "?" for c in str(error))[:400]
    return RequestError(
        f"'cluster' must give device, nodes, devices_per_node and, if wanted, links, fabric and memory_bytes, got "
        f"{detail}; in {where[:200]!r}; see the README for an example"
    )
