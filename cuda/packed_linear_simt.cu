// The product of spikes held as bits with a weight on the CUDA cores, for GPUs without the tensor core instructions of
// packed_linear.cuh: float32 products and sums, in the order of k, whatever the weight's type.
//
//   out[m, n] = sum over k of spike[m, k] * weight[n, k] + bias[n],   spike[m, k] = bit k % 8 of packed[m, k / 8]
//
// A block of 256 threads computes 64 x 128 outputs, a thread 4 x 8 of them. Bits become float32 numbers on their way
// into shared memory, where both operands lie with k as the slow index: a step of k costs a thread three 16-byte reads
// for 32 multiplications.
#include "device.cuh"

struct Float32 {
    typedef float Element;
    static __device__ __forceinline__ float widen(float x) { return x; }
    static __device__ __forceinline__ float narrow(float x) { return x; }
};

struct Float16 {
    typedef u16 Element;
    static __device__ __forceinline__ float widen(u16 x) { return float_from_half(x); }
    static __device__ __forceinline__ u16 narrow(float x) { return half_from_float(x); }
};

struct Bfloat16 {
    typedef u16 Element;
    static __device__ __forceinline__ float widen(u16 x) { return float_from_bfloat16(x); }
    static __device__ __forceinline__ u16 narrow(float x) { return bfloat16_from_float(x); }
};

static const int tile_rows = 64, tile_columns = 128, step_k = 32;

template <typename Type>
__device__ __forceinline__ void multiply(
    const u8* __restrict__ packed, const typename Type::Element* __restrict__ weight,
    const typename Type::Element* __restrict__ bias, typename Type::Element* __restrict__ out, i64 rows, i64 features,
    i64 inputs, i64 row_bytes, i64 feature_stride, i64 input_stride) {
    // 4 extra floats a row: lanes that write along k spread over the banks, and 16-byte reads stay aligned.
    __shared__ __align__(16) float spikes[step_k][tile_rows + 4];
    __shared__ __align__(16) float weights[step_k][tile_columns + 4];
    const int thread = threadIdx.x;
    const u32 tiles_across = u32((features + tile_columns - 1) / tile_columns);
    const i64 first_row = i64(blockIdx.x / tiles_across) * tile_rows;
    const i64 first_column = i64(blockIdx.x % tiles_across) * tile_columns;
    const int my_row = thread / 16 * 4, my_column = thread % 16 * 4;  // and the four columns 64 further on

    float sums[4][8];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 8; ++j) sums[i][j] = 0.0f;
    }
    for (i64 k0 = 0; k0 < inputs; k0 += step_k) {
        {
            const int row = thread / 4, byte = thread % 4;
            const i64 index = k0 / 8 + byte;
            u32 bits = 0;
            if (first_row + row < rows && index < row_bytes) bits = packed[(first_row + row) * row_bytes + index];
#pragma unroll
            for (int bit = 0; bit < 8; ++bit) spikes[byte * 8 + bit][row] = (bits >> bit) & 1 ? 1.0f : 0.0f;
        }
#pragma unroll 4
        for (int pass = 0; pass < tile_columns * step_k / 256; ++pass) {
            const int element = pass * 256 + thread;
            // Neighbouring threads read neighbouring elements.
            const bool along_k = input_stride == 1;
            const int column = along_k ? element / step_k : element % tile_columns;
            const int k = along_k ? element % step_k : element / tile_columns;
            float value = 0.0f;
            if (first_column + column < features && k0 + k < inputs) {
                value = Type::widen(weight[(first_column + column) * feature_stride + (k0 + k) * input_stride]);
            }
            weights[k][column] = value;
        }
        __syncthreads();
#pragma unroll 4
        for (int k = 0; k < step_k; ++k) {
            const float4 s = *reinterpret_cast<const float4*>(&spikes[k][my_row]);
            const float4 low = *reinterpret_cast<const float4*>(&weights[k][my_column]);
            const float4 high = *reinterpret_cast<const float4*>(&weights[k][my_column + 64]);
            const float a[4] = {s.x, s.y, s.z, s.w};
            const float b[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
#pragma unroll
                for (int j = 0; j < 8; ++j) sums[i][j] = __fmaf_rn(a[i], b[j], sums[i][j]);
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        const i64 column = first_column + my_column + j % 4 + j / 4 * 64;
        if (column >= features) continue;
        const float start = bias ? Type::widen(bias[column]) : 0.0f;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const i64 row = first_row + my_row + i;
            if (row < rows) out[row * features + column] = Type::narrow(sums[i][j] + start);
        }
    }
}

#define PRODUCT_ENTRY(name, Type)                                                                                     \
    extern "C" __global__ void __launch_bounds__(256, 2) packed_linear_simt_##name(                                   \
        const u8* packed, const Type::Element* weight, const Type::Element* bias, Type::Element* out, i64 rows,       \
        i64 features, i64 inputs, i64 row_bytes, i64 feature_stride, i64 input_stride) {                              \
        multiply<Type>(                                                                                               \
            packed, weight, bias, out, rows, features, inputs, row_bytes, feature_stride, input_stride);              \
    }

PRODUCT_ENTRY(float32, Float32)
PRODUCT_ENTRY(float16, Float16)
PRODUCT_ENTRY(bfloat16, Bfloat16)
