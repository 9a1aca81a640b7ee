"""All-reduce inside one node: our price, that of `torch._inductor.comm_analysis` (torch 2.13) and what was measured.

python benchmarks/compare_inductor.py
"""

from __future__ import annotations

import csv
from pathlib import Path
from unittest import mock

import numpy as np
from torch._inductor import comm_analysis

from meshwright.cost_models.collectives import axis_collective_s
from meshwright.cost_models.systems import find_system, load_systems

ROWS = Path(__file__).resolve().parent / "data" / "published_collectives.csv"
SYSTEMS = {
    "8x A100 NVLink3 (1 node)": comm_analysis.NVIDIA_GPU_TYPE.AMPERE,
    "8x H200 NVLink4 NVSwitch (1 node), NVLS": comm_analysis.NVIDIA_GPU_TYPE.HOPPER,
    "AWS P6-B200 8x B200 NVLink5 (1 node)": comm_analysis.NVIDIA_GPU_TYPE.BLACKWELL,
}


def main() -> None:
    rows = list(csv.DictReader(ROWS.read_text(encoding="utf-8").splitlines()))
    for name, kind in SYSTEMS.items():
        system = find_system(load_systems(), name)
        assert system is not None
        ours, theirs, sizes = [], [], []
        for row in (row for row in rows if row["system"] == name and int(row["payload_bytes"]) >= 2**16):
            size = int(row["payload_bytes"])
            measured = 1.75 * size / float(row["busbw_GBps"]) * 1e-9
            ours.append(float(axis_collective_s("all_reduce", size, system.axis(8, 1))) / measured - 1.0)
            with mock.patch.object(comm_analysis, "get_gpu_type", lambda kind=kind: kind):
                with mock.patch.object(comm_analysis, "_has_nvlink", lambda: True):
                    seconds = comm_analysis.estimate_nccl_collective_runtime_impl(
                        size, 8, comm_analysis.NCCL_COLL.ALL_REDUCE
                    )
            theirs.append(seconds * 1e-3 / measured - 1.0)
            sizes.append(size)
        for who, errors in (("ours", np.array(ours)), ("inductor", np.array(theirs))):
            small = np.array(sizes) < 2**23
            below, above = errors[small].mean(), errors[~small].mean()
            print(f"{name[:34]:36s} {who:9s} mean {np.abs(errors).mean():6.1%}  below 8 MiB {below:+6.1%}  "
                  f"from 8 MiB {above:+6.1%}")  # fmt: skip


if __name__ == "__main__":
    main()
