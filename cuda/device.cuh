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
#if __CUDA_ARCH__ >= 800
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
#else  // GPUs before Ampere have no instruction for it
    const u32 bits = __float_as_uint(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return u16(0x7fff);
    return u16((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
#endif
}

// ---------------------------------------------------------------------------------------------------------------------
// Bytes

// Four bytes out of x (0 to 3) and y (4 to 7), as the digits of a hexadecimal number say, the last digit for the lowest
// byte; where a digit has 8 added, the byte's highest bit, eight times. (__byte_perm() takes no notice of that 8.)
template <u32 digits>
__device__ __forceinline__ u32 permute_bytes(u32 x, u32 y) {
    u32 bytes;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(x), "r"(y), "n"(digits));
    return bytes;
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

// ---------------------------------------------------------------------------------------------------------------------
// Products of a warpgroup: four warps, the first a multiple of four. On compute capability 9.0 alone, compiled for
// sm_90a. All 128 threads call each of these functions together. A product runs on behind the call: until wgmma_wait()
// says that it is done, d must not be read, a not be written, nor the shared memory that holds b.

// Makes this thread's writes to shared memory, finished asynchronous copies among them, visible to products that start
// behind the next barrier.
__device__ __forceinline__ void wgmma_publish_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Before the first product, and before one whose a or d was written in between.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most `pending` of the groups of products committed last are still under way.
template <int pending>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

// The compiler does not see that products run on: this keeps it from moving reads and writes of d and a across. To be
// called for d and a between writing them and wgmma_fence(), and for d between wgmma_wait() and reading it.
__device__ __forceinline__ void wgmma_hold(float (&d)[64]) {
#pragma unroll
    for (int i = 0; i < 64; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

__device__ __forceinline__ void wgmma_hold(u32 (&a)[4]) {
    asm volatile("" : "+r"(a[0]), "+r"(a[1]), "+r"(a[2]), "+r"(a[3])::"memory");
}

// d += a b, with a [64, 16], b [16, 128] as described, d [64, 128] in float32. Warp w of the group has rows 16 w to
// 16 w + 15, of which a lane holds a as in multiply_add_bfloat16, and in d[4 n] to d[4 n + 3] what d is there for the
// columns from 8 n on.
#define WGMMA_PRODUCT(name, type)                                                                                      \
    __device__ __forceinline__ void name(float (&d)[64], const u32 (&a)[4], u64 b) {                                   \
        asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type " {"                                 \
                     "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                          \
                     "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "                \
                     "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                \
                     "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"                  \
                     "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 0;"                                                       \
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),             \
                       "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),         \
                       "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]),      \
                       "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),      \
                       "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]),      \
                       "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]),      \
                       "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),      \
                       "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),      \
                       "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]),      \
                       "+f"(d[63])                                                                                     \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)                                              \
                     : "memory");                                                                                      \
    }
WGMMA_PRODUCT(wgmma_bfloat16, "bf16")
WGMMA_PRODUCT(wgmma_half, "f16")
#undef WGMMA_PRODUCT

#endif  // CPU_SHIM

__device__ __forceinline__ float float_from_bfloat16(u16 bits) { return __uint_as_float(u32(bits) << 16); }

// Describes b for a product of a warpgroup as the instruction reads it: 128 rows of 64 16-bit values, without gaps from
// an address on that is aligned to 1024 bytes; chunk c of 16 bytes of row n lies at place c ^ (n % 8) of its row. A
// product takes 16 values of each row. `shared` is where the first of them would lie in row 0 if chunks
// were in order: at byte 0, 32, 64 or 96.
// Bits 0-13: that address; 16-29: not used in this layout; 32-45: bytes from 8 rows to the next 8; all in units of 16
// bytes. Bits 62-63: the layout, 1 for the one above.
__device__ __forceinline__ u64 wgmma_describe(const void* shared) {
    return u64((shared_address(shared) & 0x3ffffu) >> 4) | u64(1) << 16 | u64(1024 >> 4) << 32 | u64(1) << 62;
}
