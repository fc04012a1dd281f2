// Binary spikes: eight in a byte, as one stream or row by row.
#include "bit_pack.cuh"

// registers <= 64
PACK_ENTRIES(float32, Float32, 1)
PACK_ENTRIES(float16, Float16, 1)
PACK_ENTRIES(bfloat16, Bfloat16, 1)
PACK_ENTRIES(uint8, Uint8, 1)

// spikes [rows, columns] -> packed [rows, ceil(columns / 8)]: every row starts at a byte, its last bits are 0.
// For rows that are no whole number of bytes; the others are one stream. A warp takes 1024 columns of a row: 32 votes,
// and lane l keeps vote l, the word of columns 32 l to 32 l + 31.
template <typename Element>
__device__ __forceinline__ void pack_rows(
    const typename Element::Raw* __restrict__ spikes, u8* __restrict__ packed, u8* fits, typename Element::Raw* odd,
    i64 rows, i64 columns) {
    i64 misfit = -1;
    const int lane = threadIdx.x % 32;
    const i64 warps = i64(gridDim.x) * (blockDim.x / 32);
    const i64 pieces = (columns + 1023) / 1024, row_bytes = (columns + 7) / 8;
    for (i64 task = i64(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32; task < rows * pieces; task += warps) {
        const i64 row = task / pieces, start = task % pieces * 1024;
        const i64 left = columns - start;
        const typename Element::Raw* source = spikes + row * columns + start;
        u32 word = 0;
#pragma unroll 8
        for (int vote = 0; vote < 32; ++vote) {
            const int column = vote * 32 + lane;
            u32 bit = 0;
            bool fitting = true;
            if (column < left) bit = encode<Element, 1>(source[column], 1, fitting);
            if (!fitting) misfit = row * columns + start + column;
            const u32 votes = __ballot_sync(FULL_WARP, bit);
            if (vote == lane) word = votes;
        }
        u8* target = packed + row * row_bytes + start / 8 + lane * 4;
#pragma unroll
        for (int byte = 0; byte < 4; ++byte) {
            if (lane * 32 + byte * 8 < left) target[byte] = u8(word >> (byte * 8));
        }
    }
    report<Element, 1>(spikes, misfit, 1, rows * columns, 1, fits, odd);
}

// The reverse: a thread writes one element, a warp 32 consecutive ones of a row.
template <typename Element>
__device__ __forceinline__ void unpack_rows(
    const u8* __restrict__ packed, typename Element::Raw* __restrict__ spikes, i64 rows, i64 columns) {
    const int lane = threadIdx.x % 32;
    const i64 warps = i64(gridDim.x) * (blockDim.x / 32);
    const i64 pieces = (columns + 1023) / 1024, row_bytes = (columns + 7) / 8;
    for (i64 task = i64(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32; task < rows * pieces; task += warps) {
        const i64 row = task / pieces, start = task % pieces * 1024;
        const i64 left = columns - start;
        const u8* source = packed + row * row_bytes + start / 8;
        typename Element::Raw* target = spikes + row * columns + start;
#pragma unroll 8
        for (int step = 0; step < 32; ++step) {
            const int column = step * 32 + lane;
            if (column < left) target[column] = Element::from_bit((u32(source[column / 8]) >> (column % 8)) & 1);
        }
    }
}

#define ROW_ENTRIES(name, Element)                                                                                    \
    extern "C" __global__ void __launch_bounds__(256, 4) bit_pack_rows_##name(                                           \
        const Element::Raw* spikes, u8* packed, u8* fits, Element::Raw* odd, i64 rows, i64 columns) {                 \
        pack_rows<Element>(spikes, packed, fits, odd, rows, columns);                                                 \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(256, 4) bit_unpack_rows_##name(                                         \
        const u8* packed, Element::Raw* spikes, i64 rows, i64 columns) {                                              \
        unpack_rows<Element>(packed, spikes, rows, columns);                                                          \
    }

ROW_ENTRIES(float32, Float32)
ROW_ENTRIES(float16, Float16)
ROW_ENTRIES(bfloat16, Bfloat16)
ROW_ENTRIES(uint8, Uint8)
