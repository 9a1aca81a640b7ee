"""What a thing costs: devices, kernels, collectives and the links they cross, in seconds and bytes.

It needs no torch and no program.
The planner uses `Prices`; the modules below it are public so that calibration and tests can reach each part.
"""

from __future__ import annotations

from .calibration import Calibration
from .collectives import KINDS, axis_collective_s, collective_s
from .devices import Attention, Device, DeviceLink, Gemm, Measured, Update, device_names, load_device, read_device
from .kernels import attention_flops, attention_s, gemm_s, memory_s
from .links import AxisLink, axis_link, check_size, cluster_links
from .prices import Prices

__all__ = [
    "KINDS",
    "Attention",
    "AxisLink",
    "Calibration",
    "Device",
    "DeviceLink",
    "Gemm",
    "Measured",
    "Prices",
    "Update",
    "attention_flops",
    "attention_s",
    "axis_collective_s",
    "axis_link",
    "check_size",
    "cluster_links",
    "collective_s",
    "device_names",
    "gemm_s",
    "load_device",
    "memory_s",
    "read_device",
]
