"""
Rounding of the three-plane product
===================================

A float32 weight is the sum of three bfloat16 planes, and a spike is 0 or 1, so all products are exact; what differs
between the ways to add them is rounding. Tensor cores add the products of 16 columns to a float32 sum and cut off the
bits that do not fit, which this script does in NumPy, on random weights and spikes, beside a float32 sum that rounds to
nearest as CUDA cores and cuBLAS do. Prints the error of each way relative to float64, both as root mean squares.

    python benchmarks/plane_rounding.py [--in-features 4096] [--density 0.5]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.table import Table

_STEP = 16  # columns that a tensor core adds at once
Array = NDArray[np.float64]


def planes_of(weight: torch.Tensor) -> list[Array]:
    """Three bfloat16 planes that add up to a float32 ``weight`` exactly, largest first."""
    rest, planes = weight.clone(), []
    for _ in range(3):
        plane = rest.bfloat16().float()
        planes.append(plane.double().numpy())
        rest -= plane
    assert not rest.any()
    return planes


def cut(values: Array) -> Array:
    """``values`` with float32's digits, the others cut off."""
    mantissa, exponent = np.frexp(values)
    return np.ldexp(np.trunc(np.ldexp(mantissa, 24)), exponent - 24)


def on_tensor_cores(planes: Sequence[Array], start: Array) -> Array:
    """The sum over all columns of each plane in turn, ``[in_features, cases]``, added to ``start``."""
    total = start
    for plane in planes:
        for first in range(0, plane.shape[0], _STEP):
            total = cut(total + plane[first : first + _STEP].sum(axis=0))
    return total


def in_float32(columns: Array) -> Array:
    """One float32 sum after the other, rounded to nearest."""
    total = np.zeros(columns.shape[1], dtype=np.float32)
    for row in columns.astype(np.float32):
        total += row
    return total.astype(np.float64)


def errors(in_features: int, density: float, cases: int) -> dict[str, float]:
    """Error of each way to add, relative to float64 (both as root mean squares)."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(in_features, cases, generator=generator)
    spikes = (torch.rand(in_features, cases, generator=generator) < density).double().numpy()
    planes = [plane * spikes for plane in planes_of(weight)]
    exact = (weight.double().numpy() * spikes).sum(axis=0)
    nothing = np.zeros(cases)
    apart = [on_tensor_cores([plane], nothing) for plane in planes]
    ways = {
        "one float32 sum after the other": in_float32(weight.double().numpy() * spikes),
        "largest plane first": on_tensor_cores(planes, nothing),
        "smallest plane first (the fused kernel)": on_tensor_cores(planes[::-1], nothing),
        "planes apart (by cuBLAS)": sum(reversed(apart[:-1]), apart[-1]).astype(np.float32).astype(np.float64),
    }
    return {way: float(np.linalg.norm(result - exact) / np.linalg.norm(exact)) for way, result in ways.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--in-features", type=int, default=4096, help="products to add")
    parser.add_argument("--density", type=float, default=0.5, help="share of ones among the spikes")
    parser.add_argument("--cases", type=int, default=4096, help="results to look at")
    options = parser.parse_args(arguments)
    table = Table("how the products are added", "relative error", box=box.SIMPLE)
    for way, error in errors(options.in_features, options.density, options.cases).items():
        table.add_row(way, f"{error:.1e}")
    Console().print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
