"""The CPU stand-in for CUDA does what CUDA does, and says so where CUDA would misbehave."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from lightning_memopt.ops.launch import Kernel, launch, read_source, use_backend
from tests.cuda_on_cpu import CpuKernels, KernelError, compile_kernels, entries_of, sanitizing

CPU = torch.device("cpu")
SEEDS = range(12)

SOURCE = Path(__file__).with_name("cuda_on_cpu") / "specimens.cu"


def _read(name: str) -> str:
    return SOURCE.read_text().replace('#include "device.cuh"', read_source("device.cuh"))


def run(
    entry: str,
    *arguments: Any,
    threads: int = 32,
    grid: int | tuple[int, int, int] = 1,
    shared_bytes: int = 0,
    seed: int | None = None,
) -> CpuKernels:
    backend = CpuKernels(seed=seed, read=_read)
    with use_backend("cpu", backend):
        launch(Kernel(SOURCE.name, entry, threads, shared_bytes), grid, *arguments, device=CPU)
    return backend


def ints(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32)


# ---------------------------------------------------------------------------------------------------------------------
# Threads and blocks


def test_every_thread_of_every_block_runs_once_wherever_it_is_in_the_grid() -> None:
    for seed in SEEDS:
        out = ints(5, 3, 2, 70)
        run("number_threads", out, threads=70, grid=(2, 3, 5), seed=seed)
        assert out.flatten().tolist() == list(range(1, 5 * 3 * 2 * 70 + 1))


def test_seed_zero_runs_threads_and_blocks_in_order_and_others_do_not() -> None:
    def order(seed: int | None) -> list[int]:
        out, counter = ints(4 * 64), ints(1)
        run("take_turns", out, counter, threads=64, grid=4, seed=seed)
        assert sorted(out.tolist()) == list(range(4 * 64))
        return out.tolist()

    assert order(0) == list(range(4 * 64))
    assert len({tuple(order(seed)) for seed in SEEDS}) == len(SEEDS)
    assert order(7) == order(7)
    assert order(None) == order(None) != order(0)


def test_a_launch_is_recorded() -> None:
    assert run("number_threads", ints(2, 32), threads=32, grid=2).launches == ["number_threads"]


# ---------------------------------------------------------------------------------------------------------------------
# Barriers


def test_a_barrier_makes_the_writes_of_all_threads_visible() -> None:
    values = torch.randperm(256, dtype=torch.int32)
    for seed in SEEDS:
        out = ints(256)
        run("reverse_block", values, out, threads=256, seed=seed)
        assert torch.equal(out, values.flip(0))


@pytest.mark.parametrize("entry", ["reverse_block_without_barrier", "rotate_warp_without_barrier"])
def test_a_removed_barrier_gives_a_wrong_result(entry: str) -> None:
    threads = 256 if entry.startswith("reverse") else 32
    wrong = 0
    for seed in SEEDS:
        values = torch.randperm(threads, dtype=torch.int32)
        expected = values.flip(0) if entry.startswith("reverse") else values.roll(-1)
        out = ints(threads)
        run(entry, values, out, threads=threads, seed=seed)
        wrong += not torch.equal(out, expected)
    assert wrong > len(SEEDS) // 2


def test_a_warp_barrier_orders_the_threads_of_the_warp() -> None:
    values = torch.randperm(32, dtype=torch.int32)
    for seed in SEEDS:
        out = ints(32)
        run("rotate_warp", values, out, seed=seed)
        assert torch.equal(out, values.roll(-1))


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("barrier_of_half_the_block", r"thread \d+ (returns|reaches).*__syncthreads"),
        ("two_barriers", r"thread \d+ is at __syncthreads of line"),
        ("barrier_against_ballot", r"deadlock.*__syncthreads.*__ballot_sync|deadlock.*__ballot_sync.*__syncthreads"),
        ("ballots_of_different_lines", r"the lanes of a warp diverge.*__ballot_sync"),
        ("masks_that_disagree", r"deadlock.*__ballot_sync"),
        ("mask_without_self", r"leaves out its own lane 5"),
    ],
)
def test_threads_that_wait_for_ever_are_reported(entry: str, message: str) -> None:
    for seed in SEEDS:
        with pytest.raises(KernelError, match=message):
            run(entry, ints(64), threads=64, seed=seed)


def test_a_failed_launch_leaves_the_next_one_intact() -> None:
    values = torch.randperm(256, dtype=torch.int32)
    for seed in SEEDS:
        with pytest.raises(KernelError):
            run("barrier_against_ballot", ints(256), threads=256, seed=seed)
        out = ints(256)
        run("reverse_block", values, out, threads=256, seed=seed)
        assert torch.equal(out, values.flip(0))


def test_the_message_shows_the_line_the_block_and_the_seed() -> None:
    with pytest.raises(KernelError, match=r"(?s)`.*__syncthreads\(\);.*`.*block \(0, 0, 0\).*grid \(1, 1, 1\), seed 3"):
        run("barrier_of_half_the_block", ints(64), threads=64, seed=3)


# ---------------------------------------------------------------------------------------------------------------------
# Warps

LANES = torch.arange(32, dtype=torch.int32)


def test_shuffles_move_values_between_lanes() -> None:
    values = torch.randint(-(2**31), 2**31, (32,), dtype=torch.int64).to(torch.int32)
    out = ints(6, 32)
    for seed in SEEDS:
        run("shuffles", values, out, seed=seed)
        assert torch.equal(out[0], values[(LANES * 5 + 3) % 32])
        assert torch.equal(out[1], values[LANES ^ 5])
        assert torch.equal(out[2], values[torch.where(LANES >= 3, LANES - 3, LANES)])
        assert torch.equal(out[3], values[torch.where(LANES < 25, LANES + 7, LANES)])
        # In groups of 8 lanes
        assert torch.equal(out[4], values[LANES // 8 * 8 + 2])
        assert torch.equal(out[5], values[torch.where(LANES % 8 < 6, LANES + 2, LANES)])


def test_shuffles_take_floats_and_64_bits() -> None:
    floats, longs = torch.randn(32), torch.randint(-(2**62), 2**62, (32,))
    out_floats, out_longs = torch.zeros(32), torch.zeros(32, dtype=torch.int64)
    run("shuffle_wide", floats, out_floats, longs, out_longs)
    assert torch.equal(out_floats, floats[LANES ^ 1])
    assert torch.equal(out_longs, longs[LANES ^ 1])


@pytest.mark.parametrize("threads", [32, 96, 40])
def test_votes_gather_the_predicates_of_a_warp(threads: int) -> None:
    given = torch.rand(threads) < 0.5
    given[64:96] = True
    out = ints(3, threads)
    for seed in SEEDS:
        run("votes", given.to(torch.int32), out, threads=threads, seed=seed)
        for start in range(0, threads, 32):
            warp = given[start : start + 32]
            ballot = sum(1 << i for i, value in enumerate(warp.tolist()) if value)
            assert {value & 0xFFFFFFFF for value in out[0, start : start + 32].tolist()} == {ballot}
            assert set(out[1, start : start + 32].tolist()) == {int(warp.any())}
            assert set(out[2, start : start + 32].tolist()) == {int(warp.all())}


def test_parts_of_a_warp_meet_by_masks_of_their_own() -> None:
    for seed in SEEDS:
        out = ints(32)
        run("halves", out, seed=seed)
        assert out.tolist() == [sum(range(16))] * 16 + [sum(range(16, 32))] * 16


def test_lanes_that_have_returned_are_not_waited_for_and_give_poison() -> None:
    for seed in SEEDS:
        out = ints(2, 32)
        run("early_return", out, seed=seed)
        assert out[0].tolist() == [0x0FFFFF] * 20 + [0] * 12
        assert out[1].tolist() == [-1] * 20 + [0] * 12


def test_reductions_of_a_warp() -> None:
    values = torch.randint(-1000, 1000, (32,), dtype=torch.int32)
    out = ints(3, 32)
    run("reductions", values, out)
    assert out.tolist() == [[int(values.sum())] * 32, [int(values.max())] * 32, [int(values.min())] * 32]


# ---------------------------------------------------------------------------------------------------------------------
# Arithmetic


def test_integer_intrinsics_agree_with_python() -> None:
    words = torch.randint(-(2**31), 2**31, (64,), dtype=torch.int64).to(torch.int32)
    words[:4] = torch.tensor([0, 1, -1, -(2**31)], dtype=torch.int32)
    out = ints(7, 64)
    run("integers", words, out, threads=64)
    for word, (popc, ffs, clz, brev, perm, same, signs) in zip(words.tolist(), out.T.tolist(), strict=True):
        bits = f"{word & 0xFFFFFFFF:032b}"
        assert popc == bits.count("1")
        assert ffs == (len(bits) - bits.rindex("1") if "1" in bits else 0)
        assert clz == (bits.index("1") if "1" in bits else 32)
        assert brev & 0xFFFFFFFF == int(bits[::-1], 2)
        both = (word & 0xFFFFFFFF).to_bytes(4, "little") + (0x44332211).to_bytes(4, "little")
        assert (perm & 0xFFFFFFFF).to_bytes(4, "little") == bytes(both[i] for i in (6, 0, 3, 5))
        assert (same & 0xFFFFFFFF).to_bytes(4, "little") == bytes([both[3]] * 4)
        both = (word & 0xFFFFFFFF).to_bytes(4, "little") + ((word << 4) & 0xFFFFFFFF).to_bytes(4, "little")
        expected = bytes([both[3], 255 * (both[7] >> 7), 255 * (both[3] >> 7), both[5]])
        assert (signs & 0xFFFFFFFF).to_bytes(4, "little") == expected


@pytest.mark.parametrize(
    ("dtype", "entry"), [(torch.float16, "round_to_half"), (torch.bfloat16, "round_to_bfloat16")], ids=["fp16", "bf16"]
)
def test_floats_are_rounded_and_widened_as_torch_does(dtype: torch.dtype, entry: str) -> None:
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    exact = every.float()
    # Every value of 16 bits, the points half-way to the next one, and one step of float32 to either side of both.
    halfway = (exact.double() + exact.double().roll(-1)).div(2).float()
    values = torch.cat([exact, halfway])
    values = torch.cat([values, values.nextafter(torch.tensor(torch.inf)), values.nextafter(torch.tensor(-torch.inf))])
    count = values.numel()
    out, wide = torch.zeros(count, dtype=dtype), torch.zeros(count)
    run(entry, values, out, wide, numpy.int64(count), threads=256, grid=(count + 255) // 256)
    expected = values.to(dtype)
    assert torch.equal(out.isnan(), expected.isnan())
    known = ~expected.isnan()
    assert torch.equal(out.view(torch.int16)[known], expected.view(torch.int16)[known])
    assert torch.equal(wide.view(torch.int32)[known], expected.float().view(torch.int32)[known])
    assert wide[~known].isnan().all()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="written for x86-64 only")
def test_arithmetic_flushes_subnormal_numbers_as_the_gpu_does() -> None:
    tiny = torch.tensor([2.0**-149, 2.0**-126, 2.0**-126, 1.0])
    factor = torch.tensor([1.0, 0.5, 1.0, 2.0**-127])
    out = torch.zeros(4)
    run("multiply", tiny, factor, out, threads=4)
    assert out.tolist() == [0.0, 0.0, 2.0**-126, 0.0]
    assert (torch.tensor(2.0**-126) * 0.5).item() == 2.0**-127, "the launch must not change the process's mode"


def test_atomics_lose_nothing() -> None:
    for seed in SEEDS:
        counts, sums, bits, last = ints(4), torch.zeros(1), ints(4), ints(1)
        run("atomics", counts, sums, bits, last, threads=128, grid=3, seed=seed)
        assert counts.tolist() == [96] * 4
        assert sums.item() == 3 * sum(range(128))
        assert [value & 0xFFFFFFFF for value in bits.tolist()] == [0x11111111 << i for i in range(4)]
        assert 0 <= last.item() < 128


# ---------------------------------------------------------------------------------------------------------------------
# Matrices


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("load", ["by_hand", "by_matrix_loads"])
def test_the_matrix_instruction_multiplies(dtype: torch.dtype, load: str) -> None:
    entry = f"multiply_{load}_{'bfloat16' if dtype == torch.bfloat16 else 'half'}"
    for seed in SEEDS:
        # Integers: every order of summation gives the same.
        a = torch.randint(-8, 8, (16, 16)).to(dtype)
        b = torch.randint(-8, 8, (16, 8)).to(dtype)
        c = torch.randint(-99, 99, (16, 8)).float()
        out = torch.zeros(16, 8)
        run(entry, a, b, c, out, seed=seed)
        assert numpy.array_equal(out.numpy(), a.float().numpy() @ b.float().numpy() + c.numpy())

    a, b, c = torch.randn(16, 16).to(dtype), torch.randn(16, 8).to(dtype), torch.randn(16, 8)
    run(entry, a, b, c, out)
    torch.testing.assert_close(out.double(), a.double() @ b.double() + c, rtol=1e-5, atol=1e-5)


def test_the_matrix_instruction_keeps_subnormal_numbers() -> None:
    a, b = torch.full((16, 16), 2.0**-24, dtype=torch.float16), torch.ones(16, 8, dtype=torch.float16)
    out = torch.zeros(16, 8)
    run("multiply_by_hand_half", a, b, torch.zeros(16, 8), out)
    assert torch.equal(out, torch.full((16, 8), 2.0**-20))


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("matrix_load_misaligned", "load_matrix_x4 .*aligned to 16 bytes"),
        ("matrix_load_of_global_memory", "load_matrix_x4 .*16 bytes of shared memory"),
        ("multiply_by_half_a_warp", "needs all 32 lanes"),
    ],
)
def test_wrong_uses_of_matrix_instructions_are_reported(entry: str, message: str) -> None:
    if sanitizing() and "global" in entry:
        pytest.skip("shared memory is not told from other memory in a build with sanitizers")
    with pytest.raises(KernelError, match=message):
        run(entry, ints(256), shared_bytes=1024)


def multiply_by_warpgroup(entry: str, seed: int, dtype: torch.dtype = torch.bfloat16, threads: int = 128) -> None:
    a, b = torch.randint(-8, 8, (64, 64)).to(dtype), torch.randint(-8, 8, (128, 64)).to(dtype)
    before = torch.randint(-99, 99, (64, 128)).float()
    out = before.clone()
    run(f"warpgroup_{entry}", a, b, out, threads=threads, shared_bytes=128 * 128 + 2048, seed=seed)
    assert torch.equal(out, a.float() @ b.float().t() + before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_a_warpgroup_multiplies(dtype: torch.dtype) -> None:
    for seed in SEEDS:
        multiply_by_warpgroup("bfloat16" if dtype == torch.bfloat16 else "half", seed, dtype)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("no_fence", "without wgmma_fence"),
        ("no_publication", "has copied and not published"),
        ("no_end", "returns while a product of its warpgroup runs"),
        ("weights_changed", "shared memory that a product .* reads changes before it is done"),
        ("spikes_changed", "writes to the spikes of a product .* that runs"),
        ("sums_changed", "writes to the sums of a product that runs"),
        ("misaligned", "not aligned to 1024 bytes"),
        ("past_the_row", "across the end of its rows"),
        ("two_descriptors", "by different descriptors"),
        ("a_warp_less", "warp 2 starts 3 products, another warp of its warpgroup 4"),
    ],
)
def test_wrong_uses_of_a_warpgroup_are_reported(entry: str, message: str) -> None:
    for seed in SEEDS:
        with pytest.raises(KernelError, match=message):
            multiply_by_warpgroup(entry, seed)


def test_a_warpgroup_has_four_warps() -> None:
    with pytest.raises(KernelError, match="fewer than four warps"):
        multiply_by_warpgroup("bfloat16", 1, threads=96)


def test_sums_of_a_warpgroup_that_are_not_waited_for_read_as_poison() -> None:
    out = torch.zeros(64, 128)
    ones = torch.ones(128, 64, dtype=torch.bfloat16)
    run("warpgroup_no_wait", ones[:64], ones, out, threads=128, shared_bytes=128 * 128 + 1024)
    assert out.isnan().all()


# ---------------------------------------------------------------------------------------------------------------------
# Asynchronous copies and shared memory


@pytest.mark.parametrize("threads", [32, 128])
def test_asynchronous_copies_arrive_where_they_are_waited_for(threads: int) -> None:
    values = torch.randint(0, 2**31, (8, threads * 4), dtype=torch.int32)
    for seed in SEEDS:
        out = ints(8, threads * 4)
        run("pipeline", values, out, numpy.int32(8), threads=threads, shared_bytes=3 * threads * 16, seed=seed)
        assert torch.equal(out, values)


@pytest.mark.parametrize(("size", "valid"), [(16, 0), (16, 1), (16, 7), (16, 15), (16, 16), (4, 0), (4, 3), (4, 4)])
def test_bytes_beyond_the_valid_ones_are_zero(size: int, valid: int) -> None:
    values = torch.randint(1, 256, (size,), dtype=torch.uint8)
    out = torch.ones(size, dtype=torch.uint8)
    run(f"copy_{size}_bytes", values, out, numpy.int32(valid), threads=1)
    assert out.tolist() == values[:valid].tolist() + [0] * (size - valid)


@pytest.mark.parametrize("entry", ["pipeline_without_wait", "pipeline_without_commit"])
def test_a_copy_that_is_not_waited_for_reads_as_poison(entry: str) -> None:
    values = torch.randint(0, 2**31, (8, 128), dtype=torch.int32)
    for seed in SEEDS:
        out = ints(8, 128)
        run(entry, values, out, numpy.int32(8), shared_bytes=3 * 32 * 16, seed=seed)
        assert (out == -1).any()


def test_a_barrier_missing_in_a_pipeline_gives_a_wrong_result() -> None:
    values = torch.randint(0, 2**31, (8, 512), dtype=torch.int32)
    wrong = 0
    for seed in SEEDS:
        out = ints(8, 512)
        run("pipeline_without_barrier", values, out, numpy.int32(8), threads=128, shared_bytes=3 * 128 * 16, seed=seed)
        wrong += not torch.equal(out, values)
    assert wrong > len(SEEDS) // 2


@pytest.mark.parametrize("size", [16, 4])
def test_a_misaligned_asynchronous_copy_is_reported(size: int) -> None:
    values, out = torch.zeros(64, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    message = rf"copy_async_{size} \(`.*copy_async_{size}.*`\).*not aligned to {size} bytes"
    with pytest.raises(KernelError, match=message):
        run(f"copy_{size}_bytes", values[size // 2 :], out, numpy.int32(size), threads=1)


@pytest.mark.parametrize("kind", ["static", "template", "dynamic"])
def test_shared_memory_starts_as_poison_in_every_block(kind: str) -> None:
    if sanitizing() and kind != "dynamic":
        pytest.skip("static shared memory is not poisoned in a build with sanitizers")
    for seed in SEEDS:
        out = ints(3, 32)
        run(f"read_{kind}_shared", out, grid=3, shared_bytes=128, seed=seed)
        assert (out == -1).all()


def test_a_write_beyond_the_dynamic_shared_memory_is_reported() -> None:
    if sanitizing():
        pytest.skip("ends the process in a build with sanitizers")
    run("fill_dynamic_shared", numpy.int32(128), threads=32, shared_bytes=128)
    with pytest.raises(KernelError, match="a thread wrote at byte 128 of the dynamic shared memory, which has 128"):
        run("fill_dynamic_shared", numpy.int32(129), threads=32, shared_bytes=128)


def test_more_shared_memory_than_a_block_can_have_is_refused() -> None:
    run("fill_dynamic_shared", numpy.int32(0), shared_bytes=227 * 1024)
    with pytest.raises(KernelError, match=r"232449 bytes .* more than the 232448 of compute capability \(9, 0\)"):
        run("fill_dynamic_shared", numpy.int32(0), shared_bytes=227 * 1024 + 1)


# ---------------------------------------------------------------------------------------------------------------------
# Faults


@pytest.mark.skipif(sanitizing(), reason="ends the process in a build with sanitizers")
@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("read_null", "an access outside its memory"),
        ("read_misaligned", "a misaligned access"),
        ("index_beyond_array", "a misaligned access, an index beyond an array"),
        ("divide_by_zero", "undefined arithmetic|division by zero"),
        ("recurse_for_ever", "too deep a recursion"),
    ],
)
def test_a_fault_is_an_exception_that_shows_the_line(entry: str, message: str) -> None:
    for seed in (0, 1):
        with pytest.raises(KernelError, match=rf"thread \d+ makes .*({message}).* at `.*// {entry}`"):
            run(entry, ints(64), None, numpy.int32(70), threads=33, seed=seed)


# ---------------------------------------------------------------------------------------------------------------------
# What a launch is checked for


def test_arguments_must_be_of_the_declared_types() -> None:
    good = [torch.zeros(4), torch.zeros(4, dtype=torch.bfloat16), ints(4), torch.zeros(4, dtype=torch.bool)]
    scalars = [numpy.int64(1), numpy.int32(2), numpy.float32(3)]
    run("all_types", *good, *scalars)
    run("all_types", *[None] * 4, *scalars)
    run("all_types", good[0], good[1].half(), good[2].view(torch.uint8), good[0], *scalars)
    wrong = {
        0: good[0].double(),
        1: good[0],
        2: good[1],
        3: numpy.int64(0),
        4: numpy.int32(1),
        5: numpy.int64(2),
        6: numpy.float64(3),
    }
    for place, value in wrong.items():
        arguments = [*good, *scalars]
        arguments[place] = value
        with pytest.raises(KernelError, match=f"argument {place} is .*, declared is"):
            run("all_types", *arguments)
    with pytest.raises(KernelError, match="6 arguments given, 7 declared"):
        run("all_types", *good, *scalars[:2])


def test_a_block_has_no_more_threads_than_declared() -> None:
    run("bounded", threads=96)
    with pytest.raises(KernelError, match="launched with 97 threads, declared for 96 at most"):
        run("bounded", threads=97)
    with pytest.raises(KernelError, match="launched with 1025 threads"):
        run("number_threads", ints(1025), threads=1025)


def test_an_unknown_entry_is_named_with_the_known_ones() -> None:
    with pytest.raises(KernelError, match=r"no kernel missing; the source has: .*number_threads"):
        run("missing")


def test_a_source_that_does_not_compile_is_reported_with_the_compilers_words() -> None:
    with pytest.raises(KernelError, match="undeclared_name"):
        compile_kernels('extern "C" __global__ void broken(int* p) { *p = undeclared_name; }', sanitize=False)


def test_without_a_compiler_a_test_is_skipped_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(pytest.skip.Exception, match=r"g\+\+ is missing"):
        CpuKernels()


def test_entries_are_found_whatever_macros_declare_them() -> None:
    text = (
        '#define ENTRY(name, T, n) extern "C" __global__ void __launch_bounds__((n) * 32, 2) name(const T* p) {}\n'
        "constexpr int f(int x) { return x; }\n"
        'ENTRY(first, float, 4)\nextern "C" __global__ __launch_bounds__(f(64)) void second(\n    int n) {}\n'
        'extern "C" __global__ void third() {}\n'
    )
    entries = entries_of(text)
    assert [entry.name for entry in entries] == ["first", "second", "third"]
    assert [entry.bounds.replace(" ", "") for entry in entries] == ["(4)*32,2", "f(64)", ""]
    assert [entry.line for entry in entries] == [3, 4, 6]
