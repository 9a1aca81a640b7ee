"""Checkpoints that are written while training goes on, on a process group of their own, and found after a crash.

One folder per checkpoint, never written twice. PyTorch's `.metadata` appears last, by a rename: a folder that has it is
complete. Older complete ones are removed only after a newer one is complete.
"""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from ...plans.errors import RequestError

__all__ = ["Checkpoints", "newest", "read_extra", "read_into"]

_NAME = re.compile(r"step-(\d{1,12})\.[0-9a-f-]+")
_EXTRA = "meshwright.pt"


def _complete(folder: Path) -> dict[Path, int]:
    """The complete checkpoints in `folder` and the steps done before each."""
    found = ((path, _NAME.fullmatch(path.name)) for path in folder.iterdir()) if folder.is_dir() else ()
    return {path: int(match[1]) for path, match in found if match and (path / ".metadata").is_file()}


def newest(folder: Path) -> Path | None:
    """The complete checkpoint with most steps; None when there is none."""
    found = _complete(folder)
    return max(found, key=lambda path: (found[path], path.stat().st_mtime_ns), default=None)


def read_extra(path: Path) -> dict[str, Any]:
    """What the checkpoint at `path` holds besides tensors; RequestError when it cannot be read."""
    try:
        return torch.load(path / _EXTRA, weights_only=True)
    except (OSError, RuntimeError, ValueError) as error:
        raise RequestError(
            f"'checkpoint' must be a folder that `elastic` wrote, got {path}: {error}; remove it or name another folder"
        ) from error


def read_into(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Fill `tensors`, by their names in the checkpoint; all ranks of the process group together."""
    dcp.load({"state": tensors}, checkpoint_id=path)  # type: ignore[attr-defined]


class Checkpoints:
    """Checkpoints in `folder`, after every `every` steps; the newest `keep` stay."""

    def __init__(self, folder: Path, *, every: int, keep: int) -> None:
        if every < 1 or keep < 1:
            raise RequestError(f"'every' and 'keep' must be at least 1, got {every} and {keep}")
        self.folder, self.every, self.keep = folder, every, keep
        self._thread: threading.Thread | None = None
        self._failed: BaseException | None = None

    def save(
        self,
        tensors: Mapping[str, torch.Tensor],
        extra: dict[str, Any],
        *,
        done: int,
        token: str,
        group: dist.ProcessGroup,
    ) -> None:
        """Begin to write the state after `done` steps; all ranks of `group` together, which nothing else uses. The
        tensors are copied before this returns. Waits for the one before; RuntimeError when that could not be
        written."""
        self.wait()
        path = self.folder / f"step-{done}.{token}"
        copies = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
        first = dist.get_rank(group) == 0
        self._thread = threading.Thread(
            target=self._write, args=(path, copies, extra, group, first), name="meshwright-save", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Wait for the checkpoint that is being written; RuntimeError when it could not be."""
        if self._thread is not None:
            self._thread.join()
        failed, self._thread, self._failed = self._failed, None, None
        if failed is not None:
            # PyTorch's own error for it is no Exception; a lost process may be behind it, as behind any RuntimeError.
            raise RuntimeError(f"a checkpoint could not be written: {failed}") from failed

    def abandon(self) -> BaseException | None:
        """Wait for the end of one whose group may have been cut, so that it stays incomplete; what it met."""
        if self._thread is not None:
            self._thread.join()
        failed, self._thread, self._failed = self._failed, None, None
        return failed

    def _write(
        self, path: Path, copies: dict[str, torch.Tensor], extra: dict[str, Any], group: dist.ProcessGroup, first: bool
    ) -> None:
        try:
            if first:
                path.mkdir(parents=True, exist_ok=True)  # the writers of other ranks make it, too
                torch.save(extra, path / _EXTRA)
            dcp.save({"state": copies}, checkpoint_id=path, process_group=group)  # type: ignore[attr-defined]
            if first:
                self._prune()
        except BaseException as error:  # handed to the main thread
            self._failed = error

    def _prune(self) -> None:
        found = _complete(self.folder)
        kept = sorted(found, key=lambda path: (found[path], path.stat().st_mtime_ns))[-self.keep :]
        least = min((found[path] for path in kept), default=0)
        for path in self.folder.iterdir():
            match = _NAME.fullmatch(path.name)
            if match and path not in kept and (path in found or int(match[1]) < least):
                shutil.rmtree(path, ignore_errors=True)
