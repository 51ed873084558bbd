"""Hold what cards compute and move in a second, as their makers publish it: the roofline of estimated times."""

from __future__ import annotations

from dataclasses import dataclass

_TERA, _GIGA = 10**12, 10**9
_PCIE3, _PCIE4, _PCIE5, _NVLINK_C2C = 16, 32, 64, 450


@dataclass(frozen=True)
class Speed:
    """State a card's peaks, per second.

    ``half`` is FLOPs of dense matrix products of bfloat16 or float16 summed in float32, without sparsity; ``single``
    those of float32 without TF32, torch's default. ``bandwidth`` is bytes of device memory, ``host`` bytes in one
    direction between host and device.
    """

    half: float
    single: float
    bandwidth: float
    host: float


# TFLOP/s of half precision, TFLOP/s of single, GB/s of memory, GB/s to the host. Sources: NVIDIA's data sheets (T4,
# V100 SXM2, A10, A40, L4, L40S, A100 PCIe 40GB and SXM 80GB, H100 SXM, H100 NVL, GH200, H200 SXM, B200 and B300 HGX,
# GB200 NVL72, RTX A6000, RTX 6000 Ada, RTX PRO 6000 Blackwell Workstation), its Turing to Blackwell architecture papers
# (GeForce: products summed in float32, half of what is summed in float16), AWS's G5 page for A10G, AMD's data sheets
# (MI300X to MI355X), Intel's Max Series overview (one stack of two) and product pages of Arc. A Grace's link to its two
# GB200s is shared by them.
_TABLE = {
    "T4": (65, 8.1, 320, _PCIE3),
    "V100-16GB": (125, 15.7, 900, _PCIE3),
    "V100-32GB": (125, 15.7, 900, _PCIE3),
    "RTX 3060": (25.5, 12.7, 360, _PCIE4),
    "RTX 3090": (71, 35.6, 936, _PCIE4),
    "RTX 3080": (59.5, 29.8, 760, _PCIE4),
    "RTX 4070": (58.3, 29.1, 504, _PCIE4),
    "RTX 4070 Ti": (80.2, 40.1, 504, _PCIE4),
    "RTX 4070 Ti SUPER": (88.2, 44.1, 672, _PCIE4),
    "RTX 4080": (97.5, 48.7, 717, _PCIE4),
    "RTX 4080 SUPER": (104.4, 52.2, 736, _PCIE4),
    "RTX 4090": (165.2, 82.6, 1008, _PCIE4),
    "RTX 5070 Ti": (87.9, 43.9, 896, _PCIE5),
    "RTX 5080": (112.6, 56.3, 960, _PCIE5),
    "RTX 5090": (209.5, 104.8, 1792, _PCIE5),
    "RTX 6000 Ada": (364.2, 91.1, 960, _PCIE4),
    "RTX PRO 6000 Blackwell": (503.8, 125, 1792, _PCIE5),
    "A10": (125, 31.2, 600, _PCIE4),
    "A10G": (70, 31.5, 600, _PCIE4),
    "A40": (149.7, 37.4, 696, _PCIE4),
    "A6000": (154.8, 38.7, 768, _PCIE4),
    "L4": (121, 30.3, 300, _PCIE4),
    "L40S": (362, 91.6, 864, _PCIE4),
    "A100-40GB": (312, 19.5, 1555, _PCIE4),
    "A100-80GB": (312, 19.5, 2039, _PCIE4),
    "H100": (989, 67, 3350, _PCIE5),
    "H100 NVL": (835, 60, 3938, _PCIE5),
    "GH200": (989, 67, 4000, _NVLINK_C2C),
    "H200": (989, 67, 4800, _PCIE5),
    "B200": (2250, 75, 8000, _PCIE5),
    "GB200": (2500, 80, 8000, _NVLINK_C2C / 2),
    "B300": (2250, 75, 8000, _PCIE5),
    "MI300X": (1307, 163.4, 5300, _PCIE5),
    "MI325X": (1307, 163.4, 6000, _PCIE5),
    "MI350X": (2307, 144.2, 8000, _PCIE5),
    "MI355X": (2517, 157.3, 8000, _PCIE5),
    "Max 1550": (419, 26.2, 1638, _PCIE5),
    "Arc A770": (137.6, 19.7, 560, _PCIE4),
    "Arc B580": (116.7, 13.7, 456, _PCIE4 / 2),
}
# Cards whose matrix units take float16 and not bfloat16, which runs at float32's rate there.
_FLOAT16_ONLY = {"T4", "V100-16GB", "V100-32GB"}


def speed_of(name: str, *, bfloat16: bool = True) -> Speed | None:
    """Find a card's peaks by its name in :data:`memprof.config.gpus`; None for a card known by its size alone.

    Args:
        name: ``Gpu.name``.
        bfloat16: whether half precision is bfloat16, which cards before Ampere compute as float32.
    """
    if name not in _TABLE:
        return None
    half, single, bandwidth, host = _TABLE[name]
    if bfloat16 and name in _FLOAT16_ONLY:
        half = single
    return Speed(half * _TERA, single * _TERA, bandwidth * _GIGA, host * _GIGA)
