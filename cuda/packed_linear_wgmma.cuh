// Products of spikes held as bits with a weight by the tensor core instructions of warpgroups, the ones that reach the
// full rate of Hopper's tensor cores (compute capability 9.0, compiled for sm_90a); else as in packed_linear.cuh.
//
// A block of two warpgroups computes 256 x 128 outputs, a warpgroup two blocks of 64 rows, in steps of 128 inputs. The
// instruction takes spikes from registers and weights from shared memory. Weights lie there as wgmma_describe() wants
// them, 64 inputs of all rows and then the other 64, copied asynchronously into a ring of buffers; behind them lie the
// bits, 16 bytes a row. A lane (g, t) needs bits 2 t and 2 t + 1 of each byte, for rows g and g + 8 of its warp: the
// order of inputs is the natural one, and the four lanes of a group read the same word of bits.
//
// A round is 32 inputs: a lane's four words of bits become 16 registers of numbers, and four products follow. There are
// two sets of these registers: while the products of a round run, the numbers of the next are made; when its products
// are started, the warpgroup waits for those of the round before. So the tensor cores have work while a warpgroup
// expands bits or waits for the other at the barrier between steps. The last round of a step is waited for in the next
// step: a buffer is free, and is filled again, behind the barrier of the second step after its own.
#pragma once
#include "packed_linear.cuh"

static const int group_rows = 128;  // of a warpgroup
static const int tile_rows = 256, tile_columns = 128, tile_threads = 256, tile_stages = 4;
static const int half_bytes = tile_columns * 128;  // 64 inputs of all weight rows
static const int tile_stage_bytes = 2 * half_bytes + tile_rows * packed_row_bytes;

// The highest bit of byte `index` of `even`, and that of `odd`, as a pair of 16-bit numbers, 0.0 or 1.0.
template <typename Type, int index>
__device__ __forceinline__ u32 highest_bits_pair(u32 even, u32 odd) {
    return permute_bytes<0xcc88 + 0x1111 * index>(even, odd) & (Type::one * 0x10001u);
}

template <typename Type>
__device__ __forceinline__ void multiply_group(float (&d)[64], const u32 (&a)[4], u64 b) {
    if constexpr (Type::one == 0x3c00) {
        wgmma_half(d, a, b);
    } else {
        wgmma_bfloat16(d, a, b);
    }
}

template <typename Type>
__device__ __forceinline__ void multiply_by_warpgroups(
    const u8* __restrict__ packed, const u16* __restrict__ weight, const typename Type::Element* __restrict__ bias,
    typename Type::Element* __restrict__ out, i64 rows, i64 features, i64 inputs, i64 row_bytes, i64 weight_stride,
    i64 plane_stride, int planes) {
    typedef typename Type::Element Element;
    extern __shared__ __align__(16) unsigned char dynamic_shared[];
    unsigned char* const ring = dynamic_shared + (1024u - shared_address(dynamic_shared)) % 1024u;
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const int g = lane / 4, t = lane % 4;
    const u32 tiles_across = u32((features + tile_columns - 1) / tile_columns);
    const i64 first_row = i64(blockIdx.x / tiles_across) * tile_rows;
    const i64 first_column = i64(blockIdx.x % tiles_across) * tile_columns;

    // Weights: 16 threads copy a row, each its chunk of every 16th row. Bits: a thread copies a row.
    const int chunk = thread % 16, weight_row = thread / 16;
    const int weight_place = chunk / 8 * half_bytes + weight_row * 128 + 16 * (chunk % 8 ^ weight_row % 8);
    const u16* weight_source = weight + (first_column + weight_row) * weight_stride + chunk * 8;
    const i64 below = features - first_column - weight_row;
    const int weight_rows_left = below < tile_columns ? int(below) : tile_columns;  // <= 0: no row
    const bool has_row = first_row + thread < rows;
    const u8* bits_source = packed + (first_row + thread) * row_bytes;
    const int bits_place = 2 * half_bytes + thread * packed_row_bytes;

    const int blocks = int((inputs + step_k - 1) / step_k);
    const int steps = blocks * planes;
    int next_block = 0;

    auto fill_bits = [&](unsigned char* stage) {
        if (!has_row) return;
        const u8* source = bits_source + i64(next_block) * packed_row_bytes;
        copy_bits(stage + bits_place, source, packed, rows * row_bytes, row_bytes);
    };
    // Without a branch: ptxas lets products run on across straight code alone. Where nothing is `wanted`, zeros.
    auto fill_weights = [&](unsigned char* stage, bool wanted) {
        const i64 left = 2 * (inputs - i64(next_block) * step_k - chunk * 8);
        const int valid = left >= 16 ? 16 : left > 0 ? int(left) : 0;
        const int rows_left = wanted && valid ? weight_rows_left : 0;
#pragma unroll
        for (int row = 0; row < tile_columns; row += 16) {
            const bool there = row < rows_left;
            const u16* source = there ? weight_source + row * weight_stride : weight;
            copy_async_16(stage + weight_place + row * 128, source, there ? valid : 0);
        }
        const bool last = next_block + 1 == blocks;
        weight_source += last ? plane_stride - i64(blocks - 1) * step_k : i64(step_k);
        next_block = last ? 0 : next_block + 1;
    };

    float sums[2][64];  // of two blocks of 64 rows
    u32 spikes[2][4][4];  // of two rounds: two products of block 0, then two of block 1
#pragma unroll
    for (int block = 0; block < 2; ++block) {
#pragma unroll
        for (int i = 0; i < 64; ++i) sums[block][i] = 0.0f;
        wgmma_hold(sums[block]);
    }

#pragma unroll
    for (int stage = 0; stage < tile_stages - 2; ++stage) {
        if (stage < steps) {
            fill_bits(ring + stage * tile_stage_bytes);
            fill_weights(ring + stage * tile_stage_bytes, true);
        }
        copy_async_commit();
    }
    int stage = 0, free_stage = tile_stages - 2;
    const int my_bits = 2 * half_bytes + (warp / 4 * group_rows + warp % 4 * 16 + g) * packed_row_bytes;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
        copy_async_wait<tile_stages - 3>();
        wgmma_publish_shared();
        __syncthreads();  // the stage is filled for all, and the one of two steps before is read to its end
        unsigned char* const next = ring + free_stage * tile_stage_bytes;
        const bool wanted = step + tile_stages - 2 < steps;
        if (wanted) fill_bits(next);
        const unsigned char* weights = ring + stage * tile_stage_bytes;
#pragma unroll
        for (int round = 0; round < 4; ++round) {
            u32(&now)[4][4] = spikes[round % 2];
#pragma unroll
            for (int block = 0; block < 2; ++block) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const u32 word = *reinterpret_cast<const u32*>(
                        weights + my_bits + (64 * block + 8 * half) * packed_row_bytes + 4 * round);
                    const u32 even = word << (7 - 2 * t), odd = word << (6 - 2 * t);
                    now[2 * block][half] = highest_bits_pair<Type, 0>(even, odd);
                    now[2 * block][2 + half] = highest_bits_pair<Type, 1>(even, odd);
                    now[2 * block + 1][half] = highest_bits_pair<Type, 2>(even, odd);
                    now[2 * block + 1][2 + half] = highest_bits_pair<Type, 3>(even, odd);
                }
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) wgmma_hold(now[i]);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < 4; ++i) {  // products of one block do not follow each other
                const u64 b = wgmma_describe(weights + round / 2 * half_bytes + round % 2 * 64 + i / 2 * 32);
                multiply_group<Type>(sums[i % 2], now[i % 2 * 2 + i / 2], b);
            }
            wgmma_commit();
            wgmma_wait<1>();
            if (round == 0) {
                fill_weights(next, wanted);
                copy_async_commit();
            }
        }
        stage = stage + 1 == tile_stages ? 0 : stage + 1;
        free_stage = free_stage + 1 == tile_stages ? 0 : free_stage + 1;
    }
    wgmma_wait<0>();
    copy_async_wait<0>();
    __syncthreads();  // nobody reads or writes the ring any more

    // Each warp brings 16 rows of results after the other in order in shared memory of its own, and copies whole rows.
    const int out_row_bytes = tile_columns * sizeof(Element) + 8 * sizeof(Element);
    const int lanes_a_row = tile_columns * sizeof(Element) / 16;
    unsigned char* const mine = ring + warp * 16 * out_row_bytes;
    const bool whole_chunks = (reinterpret_cast<u64>(out) | u64(features) * sizeof(Element)) % 16 == 0;
    struct __align__(2 * sizeof(Element)) Pair { Element first, second; };
#pragma unroll
    for (int block = 0; block < 2; ++block) {
        wgmma_hold(sums[block]);
#pragma unroll
        for (int n = 0; n < 16; ++n) {
            const i64 column = first_column + 8 * n + 2 * t;
            const float bias0 = bias && column < features ? Type::widen(bias[column]) : 0.0f;
            const float bias1 = bias && column + 1 < features ? Type::widen(bias[column + 1]) : 0.0f;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float* sum = sums[block] + 4 * n + 2 * half;
                *reinterpret_cast<Pair*>(mine + (g + 8 * half) * out_row_bytes + (8 * n + 2 * t) * sizeof(Element)) =
                    Pair{Type::narrow(sum[0] + bias0), Type::narrow(sum[1] + bias1)};
            }
        }
        __syncwarp();
        const i64 row0 = first_row + warp / 4 * group_rows + block * 64 + warp % 4 * 16;
        if (whole_chunks) {
            const i64 column = first_column + lane % lanes_a_row * (16 / int(sizeof(Element)));
#pragma unroll
            for (int row = lane / lanes_a_row; row < 16; row += 32 / lanes_a_row) {
                if (row0 + row < rows && column < features) {
                    *reinterpret_cast<uint4*>(out + (row0 + row) * features + column) =
                        *reinterpret_cast<const uint4*>(mine + row * out_row_bytes + lane % lanes_a_row * 16);
                }
            }
        } else {
#pragma unroll 1
            for (int row = 0; row < 16 && row0 + row < rows; ++row) {
#pragma unroll 1
                for (int i = lane; i < tile_columns && first_column + i < features; i += 32) {
                    out[(row0 + row) * features + first_column + i] =
                        *reinterpret_cast<const Element*>(mine + row * out_row_bytes + i * sizeof(Element));
                }
            }
        }
        __syncwarp();
    }
}

#define WGMMA_ENTRY(name, Type)                                                                                        \
    extern "C" __global__ void __launch_bounds__(tile_threads, 1) packed_linear_wgmma_##name(                          \
        const u8* packed, const u16* weight, const Type::Element* bias, Type::Element* out, i64 rows, i64 features,    \
        i64 inputs, i64 row_bytes, i64 weight_stride, i64 plane_stride, int planes) {                                  \
        multiply_by_warpgroups<Type>(                                                                                  \
            packed, weight, bias, out, rows, features, inputs, row_bytes, weight_stride, plane_stride, planes);        \
    }
