// A float32 number as the sum of three bfloat16 numbers, by truncation: each part takes the next 8 significant bits, and
// none is larger in magnitude than the number, so nothing overflows. Infinity and NaN stay in the first part, beside
// zeros, so that they act as they do in a float32 product. What is left of a number below 2^-126 is dropped.
#include "device.cuh"

template <int part>
__device__ __forceinline__ u16 part_of(float x) {
    const u32 bits = __float_as_uint(x), magnitude = bits & 0x7fffffffu;
    const u32 quiet = magnitude > 0x7f800000u ? 0x40u : 0u;  // a NaN must not lose its last bit and become infinite
    if constexpr (part == 0) return u16((bits >> 16) | quiet);
    const float rest = __fsub_rn(x, __uint_as_float(bits & 0xffff0000u));
    const u32 rest_bits = __float_as_uint(rest);
    u32 result = rest_bits;
    if constexpr (part == 2) result = __float_as_uint(__fsub_rn(rest, __uint_as_float(rest_bits & 0xffff0000u)));
    return magnitude >= 0x7f800000u ? u16(0) : u16(result >> 16);
}

__device__ __forceinline__ u16 part_of(float x, int part) {
    return part == 0 ? part_of<0>(x) : part == 1 ? part_of<1>(x) : part_of<2>(x);
}

// matrix [rows, columns], any strides -> planes [count, rows, padded] of strides `plane_stride` and `planes_row_stride`,
// which are multiples of 8, as `padded` is; the columns behind the last are 0. Plane i holds part `smallest_part - i`
// of every number, so the smallest comes first.
extern "C" __global__ void __launch_bounds__(256, 4) split_float32(
    const float* __restrict__ matrix, u16* __restrict__ planes, i64 rows, i64 columns, i64 row_stride,
    i64 column_stride, i64 padded, i64 planes_row_stride, i64 plane_stride, int smallest_part, int count) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (column_stride == 1) {  // a warp takes 128 columns of a row, a lane 4 of them
        const bool aligned = (reinterpret_cast<u64>(matrix) % 16 | u64(row_stride % 4)) == 0;
        const i64 pieces = (padded + 127) / 128;
        for (i64 task = i64(blockIdx.x) * 8 + warp; task < rows * pieces; task += i64(gridDim.x) * 8) {
            const i64 row = task / pieces, column = task % pieces * 128 + lane * 4;
            if (column >= padded) continue;
            const float* source = matrix + row * row_stride + column;
            float x[4];
            if (aligned && column + 4 <= columns) {
                const float4 loaded = *reinterpret_cast<const float4*>(source);
                x[0] = loaded.x, x[1] = loaded.y, x[2] = loaded.z, x[3] = loaded.w;
            } else {
#pragma unroll
                for (int i = 0; i < 4; ++i) x[i] = column + i < columns ? source[i] : 0.0f;
            }
            for (int plane = 0; plane < count; ++plane) {
                u32 parts[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) parts[i] = part_of(x[i], smallest_part - plane);
                *reinterpret_cast<uint2*>(planes + plane * plane_stride + row * planes_row_stride + column) =
                    make_uint2(parts[0] | parts[1] << 16, parts[2] | parts[3] << 16);
            }
        }
        return;
    }
    // Tiles of 32 rows x 64 columns, read along the rows' index and written along the columns'.
    __shared__ float tile[64][33];
    const i64 tiles_across = (padded + 63) / 64, tiles = (rows + 31) / 32 * tiles_across;
    for (i64 task = blockIdx.x; task < tiles; task += gridDim.x) {
        const i64 row0 = task / tiles_across * 32, column0 = task % tiles_across * 64;
        __syncthreads();
#pragma unroll
        for (int i = warp; i < 64; i += 8) {
            const bool inside = row0 + lane < rows && column0 + i < columns;
            tile[i][lane] = inside ? matrix[(row0 + lane) * row_stride + (column0 + i) * column_stride] : 0.0f;
        }
        __syncthreads();
        const i64 column = column0 + 2 * lane;
        for (int i = warp; i < 32; i += 8) {
            if (row0 + i >= rows || column >= padded) continue;
            const float x0 = tile[2 * lane][i], x1 = tile[2 * lane + 1][i];
            for (int plane = 0; plane < count; ++plane) {
                const int part = smallest_part - plane;
                *reinterpret_cast<u32*>(planes + plane * plane_stride + (row0 + i) * planes_row_stride + column) =
                    part_of(x0, part) | u32(part_of(x1, part)) << 16;
            }
        }
    }
}
