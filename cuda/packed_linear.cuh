// Products of spikes held as bits with a weight on the tensor cores (compute capability 8.0 and later). The weight is of
// 16 bits, or of float32 and split into three bfloat16 planes by split_float32.cu. Each type of weight has a source of
// its own, since each takes a second to compile.
//
//   out[m, n] = sum over k of spike[m, k] * weight[n, k] + bias[n],   spike[m, k] = bit k % 8 of packed[m, k / 8]
//
// The bits never become a matrix of numbers: they travel from global memory to registers as bits, and a lane expands
// the byte that it needs just before the product. A block computes a tile of the output; it steps through K by 128,
// that is, by 256 bytes of each weight row and 16 bytes of each packed row, in a ring of buffers filled by asynchronous
// copies. The order of k inside a step is free as long as both operands share it, so lane (g, t) of a warp takes for
// its rows the 32 values k = 32 t .. 32 t + 31: one word of a packed row, and four times 16 bytes of a weight row.
//
// Memory accesses in shared memory are free of bank conflicts: the words of 8 packed rows are 128 consecutive bytes;
// 16-byte chunk c of weight row n lies at place c ^ (c / 8 % 2) ^ (2 * (n % 2)) of its row, so that the 8 lanes that are
// served together (two rows, chunks j, j + 4, j + 8, j + 12) touch all 32 banks.
#pragma once
#include "device.cuh"

// The types of a product. `one` is 1.0 in the 16-bit type that is multiplied; Element is the type of bias and output.
struct Float32 {  // the weight is given as bfloat16 planes
    typedef float Element;
    static const u32 one = 0x3f80;
    static __device__ __forceinline__ void multiply_add(float d[4], const u32 a[4], const u32 b[2]) {
        multiply_add_bfloat16(d, a, b);
    }
    static __device__ __forceinline__ float widen(float x) { return x; }
    static __device__ __forceinline__ float narrow(float x) { return x; }
};

struct Float16 {
    typedef u16 Element;
    static const u32 one = 0x3c00;
    static __device__ __forceinline__ void multiply_add(float d[4], const u32 a[4], const u32 b[2]) {
        multiply_add_half(d, a, b);
    }
    static __device__ __forceinline__ float widen(u16 x) { return float_from_half(x); }
    static __device__ __forceinline__ u16 narrow(float x) { return half_from_float(x); }
};

struct Bfloat16 {
    typedef u16 Element;
    static const u32 one = 0x3f80;
    static __device__ __forceinline__ void multiply_add(float d[4], const u32 a[4], const u32 b[2]) {
        multiply_add_bfloat16(d, a, b);
    }
    static __device__ __forceinline__ float widen(u16 x) { return float_from_bfloat16(x); }
    static __device__ __forceinline__ u16 narrow(float x) { return bfloat16_from_float(x); }
};

static const int step_k = 128;
static const int weight_row_bytes = 2 * step_k;
static const int packed_row_bytes = step_k / 8;

// Two neighbours of a byte as a pair of 16-bit numbers, 0.0 or 1.0: `spread` has bit b of the byte at b and at b + 15,
// so that bits e and e + 1 stand at e and e + 16. The multiplication moves a bit and makes it the number 1.0 at once;
// `one` has at least 7 zeros at its end, so nothing is lost for e <= 6.
template <typename Type>
__device__ __forceinline__ u32 spike_pair(u32 spread, int e) {
    return (spread & (0x00010001u << e)) * (Type::one >> e);
}

// Copies 16 bytes of a packed row to shared memory: asynchronously where the rows are aligned to 4 bytes, else through
// registers, by the aligned words that hold them. What lies behind the end of a row meets weights that are 0 there; what
// lies outside the whole tensor of `size` bytes is not read.
__device__ __forceinline__ void copy_bits(
    unsigned char* target, const u8* source, const u8* packed, i64 size, i64 row_bytes) {
    const u64 alignment = reinterpret_cast<u64>(packed) | u64(row_bytes);
    if (alignment % 16 == 0) {
        copy_async_16(target, source, 16);
        return;
    }
    if (alignment % 4 == 0) {
#pragma unroll 1
        for (int i = 0; i < 16; i += 4) {
            const bool inside = source + i < packed + size;
            copy_async_4(target + i, inside ? source + i : packed, inside ? 4 : 0);
        }
        return;
    }
    const int offset = int(reinterpret_cast<u64>(source) % 4);
    const u8* first = source - offset;
    u32 words[5];
    if (first >= packed && first + 20 <= packed + size) {
#pragma unroll
        for (int i = 0; i < 5; ++i) words[i] = reinterpret_cast<const u32*>(first)[i];
    } else {
#pragma unroll
        for (int i = 0; i < 5; ++i) {
            words[i] = 0;
#pragma unroll 1
            for (int byte = 0; byte < 4; ++byte) {
                const u8* at = first + 4 * i + byte;
                if (at >= packed && at < packed + size) words[i] |= u32(*at) << (8 * byte);
            }
        }
    }
    const int shift = 8 * offset;
    uint4 row;
    row.x = u32((u64(words[1]) << 32 | words[0]) >> shift);
    row.y = u32((u64(words[2]) << 32 | words[1]) >> shift);
    row.z = u32((u64(words[3]) << 32 | words[2]) >> shift);
    row.w = u32((u64(words[4]) << 32 | words[3]) >> shift);
    *reinterpret_cast<uint4*>(target) = row;
}

// A block of warps_m x warps_n warps; a warp computes tiles_m x tiles_n products of 16 x 8.
template <int tiles_m_, int tiles_n_, int warps_m_, int warps_n_, int stages_>
struct Tile {
    static const int tiles_m = tiles_m_, tiles_n = tiles_n_, warps_m = warps_m_, warps_n = warps_n_, stages = stages_;
    static const int rows = 16 * tiles_m * warps_m;
    static const int columns = 8 * tiles_n * warps_n;
    static const int threads = 32 * warps_m * warps_n;
    static const int stage_bytes = columns * weight_row_bytes + rows * packed_row_bytes;
    static const int weight_rows_per_pass = threads / 16;
    static_assert(rows <= threads || rows % threads == 0, "a thread copies whole packed rows");
    static_assert(columns % weight_rows_per_pass == 0 && weight_rows_per_pass % 2 == 0, "passes copy whole weight rows");
};

// One step: adds the product of the 128 columns in a stage to the sums of this warp.
template <typename Type, typename T>
__device__ __forceinline__ void multiply_step(float (&sums)[T::tiles_m][T::tiles_n][4], const unsigned char* stage) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int g = lane / 4, t = lane % 4;
    const int warp_m = warp / T::warps_n, warp_n = warp % T::warps_n;
    const unsigned char* weights = stage + (warp_n * T::tiles_n * 8 + g) * weight_row_bytes + t * 64;
    const unsigned char* bits = stage + T::columns * weight_row_bytes + (warp_m * T::tiles_m * 16 + g) * packed_row_bytes;
    const int place = (t / 2) | ((g % 2) * 2);
    u32 words[T::tiles_m][2];
#pragma unroll
    for (int i = 0; i < T::tiles_m; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            words[i][half] = *reinterpret_cast<const u32*>(bits + (16 * i + 8 * half) * packed_row_bytes + 4 * t);
        }
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        u32 a[T::tiles_m][2][4];  // two products of k = 16 each
#pragma unroll
        for (int i = 0; i < T::tiles_m; ++i) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const u32 spread = __byte_perm(words[i][half], 0, 0x4440 + j) * 0x8001u;  // byte j
                a[i][0][half] = spike_pair<Type>(spread, 0);
                a[i][0][2 + half] = spike_pair<Type>(spread, 2);
                a[i][1][half] = spike_pair<Type>(spread, 4);
                a[i][1][2 + half] = spike_pair<Type>(spread, 6);
            }
        }
        const unsigned char* chunk = weights + 16 * (j ^ place);
#pragma unroll
        for (int n = 0; n < T::tiles_n; ++n) {
            const uint4 loaded = *reinterpret_cast<const uint4*>(chunk + n * 8 * weight_row_bytes);
            const u32 b[2][2] = {{loaded.x, loaded.y}, {loaded.z, loaded.w}};
#pragma unroll
            for (int i = 0; i < T::tiles_m; ++i) {
                Type::multiply_add(sums[i][n], a[i][0], b[0]);
                Type::multiply_add(sums[i][n], a[i][1], b[1]);
            }
        }
    }
}

// packed [rows, row_bytes] without gaps; weight: `planes` matrices [features, inputs] with strides `plane_stride` and
// `weight_stride` in elements, every row aligned to 16 bytes. The planes are added in their order, the smallest first:
// a sum of bfloat16 numbers of similar size is nearly exact in float32, so the roundings are those of the last plane.
template <typename Type, typename T>
__device__ __forceinline__ void multiply(
    const u8* __restrict__ packed, const u16* __restrict__ weight, const typename Type::Element* __restrict__ bias,
    typename Type::Element* __restrict__ out, i64 rows, i64 features, i64 inputs, i64 row_bytes, i64 weight_stride,
    i64 plane_stride, int planes) {
    extern __shared__ __align__(16) unsigned char dynamic_shared[];
    const int thread = threadIdx.x;
    const u32 tiles_across = u32((features + T::columns - 1) / T::columns);
    const i64 first_row = i64(blockIdx.x / tiles_across) * T::rows;
    const i64 first_column = i64(blockIdx.x % tiles_across) * T::columns;

    // Weights: 16 threads copy a row, each its chunk of every weight_rows_per_pass-th row.
    const int chunk = thread % 16, weight_row = thread / 16;
    const int weight_place = weight_row * weight_row_bytes + 16 * (chunk ^ (chunk / 8) ^ ((weight_row % 2) * 2));
    const u16* weight_source = weight + (first_column + weight_row) * weight_stride + chunk * 8;
    const i64 below = features - first_column - weight_row;
    const int weight_rows_left = below < T::columns ? int(below) : T::columns;  // not positive where there is no row

    // Bits: a thread copies a row, or every `threads`-th row.
    const i64 rows_below = rows - first_row - thread;
    const int bits_left = thread >= T::rows ? 0 : rows_below < T::rows ? int(rows_below) : T::rows;
    const u8* bits_source = packed + (first_row + thread) * row_bytes;
    const int bits_place = T::columns * weight_row_bytes + thread * packed_row_bytes;

    const int blocks = int((inputs + step_k - 1) / step_k);
    const int steps = blocks * planes;
    int next_block = 0;

    auto fill = [&](int stage_index) {
        unsigned char* stage = dynamic_shared + stage_index * T::stage_bytes;
        const i64 left = 2 * (inputs - i64(next_block) * step_k - chunk * 8);
        const int valid = left >= 16 ? 16 : left > 0 ? int(left) : 0;
        const int rows_left = valid ? weight_rows_left : 0;
        const u16* source = weight_source;
        unsigned char* place = stage + weight_place;
#pragma unroll 1
        for (int row = 0; row < T::columns; row += T::weight_rows_per_pass) {
            copy_async_16(place, row < rows_left ? source : weight, row < rows_left ? valid : 0);
            source += T::weight_rows_per_pass * weight_stride;
            place += T::weight_rows_per_pass * weight_row_bytes;
        }
#pragma unroll 1
        for (int row = 0; row < T::rows; row += T::threads) {
            if (row >= bits_left) break;
            copy_bits(stage + bits_place + row * packed_row_bytes, bits_source + row * row_bytes, packed,
                      rows * row_bytes, row_bytes);
        }
        weight_source += step_k;
        bits_source += packed_row_bytes;
        if (++next_block == blocks) {
            next_block = 0;
            weight_source += plane_stride - i64(blocks) * step_k;
            bits_source -= i64(blocks) * packed_row_bytes;
        }
    };

    float sums[T::tiles_m][T::tiles_n][4];
#pragma unroll
    for (int i = 0; i < T::tiles_m; ++i) {
#pragma unroll
        for (int n = 0; n < T::tiles_n; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) sums[i][n][e] = 0.0f;
        }
    }

#pragma unroll
    for (int stage = 0; stage < T::stages - 1; ++stage) {
        if (stage < steps) fill(stage);
        copy_async_commit();
    }
    int stage = 0, free_stage = T::stages - 1;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
        copy_async_wait<T::stages - 2>();
        __syncthreads();  // the stage is filled for all, and nobody reads the one of the step before any more
        if (step + T::stages - 1 < steps) fill(free_stage);
        copy_async_commit();
        multiply_step<Type, T>(sums, dynamic_shared + stage * T::stage_bytes);
        stage = stage + 1 == T::stages ? 0 : stage + 1;
        free_stage = free_stage + 1 == T::stages ? 0 : free_stage + 1;
    }

    const int lane = thread % 32, warp = thread / 32;
    const i64 row0 = first_row + (warp / T::warps_n) * T::tiles_m * 16 + lane / 4;
    const i64 column0 = first_column + (warp % T::warps_n) * T::tiles_n * 8 + lane % 4 * 2;
    const bool even = features % 2 == 0;
#pragma unroll
    for (int n = 0; n < T::tiles_n; ++n) {
        const i64 column = column0 + 8 * n;
        const bool both = column + 1 < features;
        if (column >= features) continue;
        const float bias0 = bias ? Type::widen(bias[column]) : 0.0f;
        const float bias1 = bias && both ? Type::widen(bias[column + 1]) : 0.0f;
#pragma unroll
        for (int i = 0; i < T::tiles_m; ++i) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const i64 row = row0 + 16 * i + 8 * half;
                if (row >= rows) continue;
                typename Type::Element* target = out + row * features + column;
                const typename Type::Element first = Type::narrow(sums[i][n][2 * half] + bias0);
                const typename Type::Element second = Type::narrow(sums[i][n][2 * half + 1] + bias1);
                if (even) {
                    struct __align__(2 * sizeof(typename Type::Element)) Pair { typename Type::Element first, second; };
                    *reinterpret_cast<Pair*>(target) = Pair{first, second};
                } else {
                    target[0] = first;
                    if (both) target[1] = second;
                }
            }
        }
    }
}

#define PRODUCT_ENTRY(name, Type, size, min_blocks, ...)                                                               \
    extern "C" __global__ void __launch_bounds__(Tile<__VA_ARGS__>::threads, min_blocks) packed_linear_##name##_##size( \
        const u8* packed, const u16* weight, const Type::Element* bias, Type::Element* out, i64 rows, i64 features,    \
        i64 inputs, i64 row_bytes, i64 weight_stride, i64 plane_stride, int planes) {                                  \
        multiply<Type, Tile<__VA_ARGS__>>(                                                                             \
            packed, weight, bias, out, rows, features, inputs, row_bytes, weight_stride, plane_stride, planes);        \
    }

#define PRODUCT_ENTRIES(name, Type)                     \
    PRODUCT_ENTRY(name, Type, 256x128, 1, 4, 8, 4, 2, 2) \
    PRODUCT_ENTRY(name, Type, 256x64, 2, 4, 8, 4, 1, 2)  \
    PRODUCT_ENTRY(name, Type, 256x32, 2, 2, 4, 8, 1, 3)  \
    PRODUCT_ENTRY(name, Type, 256x16, 4, 2, 2, 8, 1, 3)  \
    PRODUCT_ENTRY(name, Type, 64x64, 4, 2, 4, 2, 2, 2)
