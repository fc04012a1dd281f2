// The dialect that every kernel of this folder is written in.
//
// A kernel uses plain C++ plus what is listed here: CUDA's built-in variables, vector types and intrinsics, and the
// inline functions below. PTX appears in this file only. With CPU_SHIM defined, a header that runs CUDA threads on the
// CPU takes the place of this file's second half, so that the tests run the very sources that the GPU runs.
//
// Floating-point types of 16 bits are handled as bit patterns (`u16`), so that no header of the CUDA toolkit is needed.
// Kernels are compiled with -ftz=true: a test for zero or one compares bits, never floats.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define FULL_WARP 0xffffffffu

#ifdef CPU_SHIM
#include "cuda_on_cpu.h"
#else

// ---------------------------------------------------------------------------------------------------------------------
// Conversions, bit for bit as torch does them (round to nearest even, NaN stays NaN)

__device__ __forceinline__ float float_from_half(u16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

__device__ __forceinline__ u16 half_from_float(float value) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

__device__ __forceinline__ u16 bfloat16_from_float(float value) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

// ---------------------------------------------------------------------------------------------------------------------
// Asynchronous copies from global to shared memory, of 16 or 4 bytes, both addresses aligned to as much; `valid` bytes
// are copied, the rest is filled with zeros. Those of 16 bytes pass by the L1 cache.

__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void copy_async_16(void* shared, const void* global, int valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global), "r"(valid)
                 : "memory");
}

__device__ __forceinline__ void copy_async_4(void* shared, const void* global, int valid) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(shared)), "l"(global), "r"(valid)
                 : "memory");
}

__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `pending` of the groups committed last are still under way.
template <int pending>
__device__ __forceinline__ void copy_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

// ---------------------------------------------------------------------------------------------------------------------
// Matrix fragments. Lane l of a warp: group g = l / 4, member t = l % 4.

// Four 8x8 matrices of 16-bit values; lane l gives the address of row l % 8 of matrix l / 8 (16 bytes, aligned) and
// gets in out[i] the two values of row g, columns 2 t and 2 t + 1, of matrix i.
__device__ __forceinline__ void load_matrix_x4(u32 out[4], const void* shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(shared_address(shared))
                 : "memory");
}

// The same, each matrix transposed.
__device__ __forceinline__ void load_matrix_x4_transposed(u32 out[4], const void* shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(shared_address(shared))
                 : "memory");
}

// d += a b, with a [16, 16] row by row, b [16, 8] column by column, d [16, 8] in float32:
// a[0]: row g, columns 2t, 2t+1; a[1]: row g+8, same columns; a[2]: row g, columns 2t+8, 2t+9; a[3]: row g+8, those;
// b[0]: rows 2t, 2t+1 of column g; b[1]: rows 2t+8, 2t+9 of column g;
// d[0], d[1]: row g, columns 2t, 2t+1; d[2], d[3]: row g+8, same columns.
__device__ __forceinline__ void multiply_add_bfloat16(float d[4], const u32 a[4], const u32 b[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ __forceinline__ void multiply_add_half(float d[4], const u32 a[4], const u32 b[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

#endif  // CPU_SHIM

__device__ __forceinline__ float float_from_bfloat16(u16 bits) { return __uint_as_float(u32(bits) << 16); }
