// Kernels, right and wrong, that tests/test_cuda_on_cpu.py runs.
#include "device.cuh"

// ---------------------------------------------------------------------------------------------------------------------
// Threads and blocks

extern "C" __global__ void number_threads(int* out) {
    int block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    int number = block * blockDim.x + threadIdx.x;
    out[number] += number + 1;
}

extern "C" __global__ void take_turns(int* out, int* counter) {
    out[(*counter)++] = blockIdx.x * blockDim.x + threadIdx.x;
}

// ---------------------------------------------------------------------------------------------------------------------
// Barriers

template <bool barrier>
__device__ __forceinline__ void reverse(const int* values, int* out) {
    __shared__ int tile[256];
    tile[threadIdx.x] = values[threadIdx.x];
    if (barrier) __syncthreads();
    out[threadIdx.x] = tile[blockDim.x - 1 - threadIdx.x];
}

extern "C" __global__ void reverse_block(const int* values, int* out) { reverse<true>(values, out); }

extern "C" __global__ void reverse_block_without_barrier(const int* values, int* out) { reverse<false>(values, out); }

template <bool barrier>
__device__ __forceinline__ void rotate(const int* values, int* out) {
    __shared__ int tile[32];
    tile[threadIdx.x] = values[threadIdx.x];
    if (barrier) __syncwarp();
    out[threadIdx.x] = tile[(threadIdx.x + 1) % 32];
}

extern "C" __global__ void rotate_warp(const int* values, int* out) { rotate<true>(values, out); }

extern "C" __global__ void rotate_warp_without_barrier(const int* values, int* out) { rotate<false>(values, out); }

extern "C" __global__ void barrier_of_half_the_block(int* out) {
    if (threadIdx.x < 32) __syncthreads();
    out[threadIdx.x] = 1;
}

extern "C" __global__ void two_barriers(int* out) {
    if (threadIdx.x < 32) {
        __syncthreads();
    } else {
        out[threadIdx.x] = 1;
        __syncthreads();
    }
}

extern "C" __global__ void barrier_against_ballot(int* out) {
    if (threadIdx.x % 2) {
        __syncthreads();
    } else {
        out[threadIdx.x] = __ballot_sync(FULL_WARP, 1);
    }
}

extern "C" __global__ void ballots_of_different_lines(int* out) {
    if (threadIdx.x % 2) {
        out[threadIdx.x] = __ballot_sync(FULL_WARP, 1);
    } else {
        out[threadIdx.x] = __ballot_sync(FULL_WARP, 1) + 1;
    }
}

extern "C" __global__ void masks_that_disagree(int* out) {
    u32 mask = threadIdx.x % 32 == 7 ? 0x000000ffu : FULL_WARP;
    out[threadIdx.x] = __ballot_sync(mask, 1);
}

extern "C" __global__ void mask_without_self(int* out) {
    if (threadIdx.x == 5) out[threadIdx.x] = __ballot_sync(~(1u << 5), 1);
}

// ---------------------------------------------------------------------------------------------------------------------
// Warps

extern "C" __global__ void shuffles(const int* values, int* out) {
    int lane = threadIdx.x, value = values[lane];
    out[lane] = __shfl_sync(FULL_WARP, value, lane * 5 + 3);
    out[32 + lane] = __shfl_xor_sync(FULL_WARP, value, 5);
    out[64 + lane] = __shfl_up_sync(FULL_WARP, value, 3);
    out[96 + lane] = __shfl_down_sync(FULL_WARP, value, 7);
    out[128 + lane] = __shfl_sync(FULL_WARP, value, 10, 8);
    out[160 + lane] = __shfl_down_sync(FULL_WARP, value, 2, 8);
}

extern "C" __global__ void shuffle_wide(const float* floats, float* out_floats, const i64* longs, i64* out_longs) {
    out_floats[threadIdx.x] = __shfl_xor_sync(FULL_WARP, floats[threadIdx.x], 1);
    out_longs[threadIdx.x] = __shfl_xor_sync(FULL_WARP, longs[threadIdx.x], 1);
}

extern "C" __global__ void votes(const int* given, int* out) {
    int value = given[threadIdx.x];
    out[threadIdx.x] = __ballot_sync(FULL_WARP, value);
    out[blockDim.x + threadIdx.x] = __any_sync(FULL_WARP, value);
    out[2 * blockDim.x + threadIdx.x] = __all_sync(FULL_WARP, value);
}

extern "C" __global__ void halves(int* out) {
    int sum = threadIdx.x;
    u32 mask = threadIdx.x < 16 ? 0x0000ffffu : 0xffff0000u;
    for (int step = 8; step > 0; step /= 2) sum += __shfl_xor_sync(mask, sum, step);
    __syncwarp(mask);
    out[threadIdx.x] = sum;
}

extern "C" __global__ void early_return(int* out) {
    if (threadIdx.x >= 20) return;
    out[threadIdx.x] = __ballot_sync(FULL_WARP, 1);
    out[32 + threadIdx.x] = __shfl_sync(FULL_WARP, int(threadIdx.x), 25);
}

extern "C" __global__ void reductions(const int* values, int* out) {
    int value = values[threadIdx.x];
    out[threadIdx.x] = __reduce_add_sync(FULL_WARP, value);
    out[32 + threadIdx.x] = __reduce_max_sync(FULL_WARP, value);
    out[64 + threadIdx.x] = __reduce_min_sync(FULL_WARP, value);
}

// ---------------------------------------------------------------------------------------------------------------------
// Arithmetic

extern "C" __global__ void integers(const int* words, int* out) {
    int word = words[threadIdx.x], n = blockDim.x;
    out[threadIdx.x] = __popc(word);
    out[n + threadIdx.x] = __ffs(word);
    out[2 * n + threadIdx.x] = __clz(word);
    out[3 * n + threadIdx.x] = __brev(word);
    out[4 * n + threadIdx.x] = __byte_perm(word, 0x44332211u, 0x5306);
    out[5 * n + threadIdx.x] = __byte_perm(word, 0x44332211u, 0xbbbb);
    out[6 * n + threadIdx.x] = permute_bytes<0x5bf3>(word, u32(word) << 4);
}

extern "C" __global__ void round_to_half(const float* values, u16* out, float* wide, i64 count) {
    i64 i = i64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= count) return;
    out[i] = half_from_float(values[i]);
    wide[i] = float_from_half(out[i]);
}

extern "C" __global__ void round_to_bfloat16(const float* values, u16* out, float* wide, i64 count) {
    i64 i = i64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= count) return;
    out[i] = bfloat16_from_float(values[i]);
    wide[i] = float_from_bfloat16(out[i]);
}

extern "C" __global__ void multiply(const float* a, const float* b, float* out) {
    out[threadIdx.x] = __fmul_rn(a[threadIdx.x], b[threadIdx.x]);
}

extern "C" __global__ void atomics(int* counts, float* sum, u32* bits, int* last) {
    atomicAdd(counts + threadIdx.x % 4, 1);
    atomicAdd(sum, float(threadIdx.x));
    atomicOr(bits + threadIdx.x % 4, 1u << threadIdx.x % 32);
    atomicExch(last, int(threadIdx.x));
}

// ---------------------------------------------------------------------------------------------------------------------
// Matrices: out = a b + c, a [16, 16], b [16, 8], both row by row

__device__ __forceinline__ void multiply_add(bool half, float d[4], const u32 a[4], const u32 b[2]) {
    if (half) {
        multiply_add_half(d, a, b);
    } else {
        multiply_add_bfloat16(d, a, b);
    }
}

__device__ __forceinline__ void load_sums(float d[4], const float* c) {
    int g = threadIdx.x / 4, t = threadIdx.x % 4;
    for (int i = 0; i < 4; ++i) d[i] = c[(g + i / 2 * 8) * 8 + 2 * t + i % 2];
}

__device__ __forceinline__ void store_sums(const float d[4], float* out) {
    int g = threadIdx.x / 4, t = threadIdx.x % 4;
    for (int i = 0; i < 4; ++i) out[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = d[i];
}

__device__ __forceinline__ u32 pair(u16 low, u16 high) { return u32(low) | u32(high) << 16; }

template <bool half>
__device__ __forceinline__ void multiply_by_hand(const u16* a, const u16* b, const float* c, float* out) {
    int g = threadIdx.x / 4, t = threadIdx.x % 4;
    u32 fragment_a[4], fragment_b[2];
    for (int i = 0; i < 4; ++i) {
        const u16* at = a + (g + i % 2 * 8) * 16 + 2 * t + i / 2 * 8;
        fragment_a[i] = pair(at[0], at[1]);
    }
    for (int i = 0; i < 2; ++i) fragment_b[i] = pair(b[(2 * t + 8 * i) * 8 + g], b[(2 * t + 8 * i + 1) * 8 + g]);
    float d[4];
    load_sums(d, c);
    multiply_add(half, d, fragment_a, fragment_b);
    store_sums(d, out);
}

template <bool half>
__device__ __forceinline__ void multiply_by_matrix_loads(const u16* a, const u16* b, const float* c, float* out) {
    __shared__ __align__(16) u16 tile_a[16][16];
    __shared__ __align__(16) u16 tile_b[32][8];
    for (int i = threadIdx.x; i < 256; i += 32) tile_a[i / 16][i % 16] = a[i];
    for (int i = threadIdx.x; i < 128; i += 32) tile_b[i / 8][i % 8] = b[i];
    __syncthreads();
    u32 fragment_a[4], fragment_b[4];
    int matrix = threadIdx.x / 8, row = threadIdx.x % 8;
    load_matrix_x4(fragment_a, &tile_a[matrix % 2 * 8 + row][matrix / 2 * 8]);
    load_matrix_x4_transposed(fragment_b, &tile_b[threadIdx.x][0]);  // the last two are not used
    float d[4];
    load_sums(d, c);
    multiply_add(half, d, fragment_a, fragment_b);
    store_sums(d, out);
}

#define MULTIPLY_ENTRIES(type, half)                                                                                  \
    extern "C" __global__ void multiply_by_hand_##type(const u16* a, const u16* b, const float* c, float* out) {      \
        multiply_by_hand<half>(a, b, c, out);                                                                         \
    }                                                                                                                 \
    extern "C" __global__ void multiply_by_matrix_loads_##type(                                                       \
        const u16* a, const u16* b, const float* c, float* out) {                                                     \
        multiply_by_matrix_loads<half>(a, b, c, out);                                                                 \
    }
MULTIPLY_ENTRIES(bfloat16, false)
MULTIPLY_ENTRIES(half, true)

extern "C" __global__ void matrix_load_misaligned(int* out) {
    extern __shared__ __align__(16) unsigned char dynamic_shared[];
    load_matrix_x4(reinterpret_cast<u32*>(out) + threadIdx.x * 4, dynamic_shared + threadIdx.x * 8);
}

extern "C" __global__ void matrix_load_of_global_memory(int* out) {
    u32 fragment[4];
    load_matrix_x4(fragment, out);
    out[threadIdx.x] = fragment[0];
}

extern "C" __global__ void multiply_by_half_a_warp(int* out) {
    if (threadIdx.x >= 16) return;
    float d[4] = {0, 0, 0, 0};
    u32 a[4] = {0, 0, 0, 0}, b[2] = {0, 0};
    multiply_add_half(d, a, b);
    out[threadIdx.x] = d[0];
}

// ---------------------------------------------------------------------------------------------------------------------
// Products of a warpgroup: out += a b^T, a [64, 64], b [128, 64], all row by row

enum Fault {
    none,
    no_fence,
    no_publication,
    no_wait,
    no_end,
    weights_changed,
    spikes_changed,
    sums_changed,
    misaligned,
    past_the_row,
    two_descriptors,
    a_warp_less,
};

template <int fault, bool half>
__device__ __forceinline__ void multiply_by_warpgroup(const u16* a, const u16* b, float* out) {
    extern __shared__ __align__(16) unsigned char dynamic_shared[];
    unsigned char* rows = dynamic_shared + (1024u - shared_address(dynamic_shared)) % 1024u;
    if (fault == misaligned) rows += 256;
    int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    for (int i = threadIdx.x; i < 128 * 8; i += blockDim.x) {
        copy_async_16(rows + i / 8 * 128 + (i % 8 ^ i / 8 % 8) * 16, b + i * 8, 16);
    }
    copy_async_commit();
    copy_async_wait<0>();
    if (fault != no_publication) wgmma_publish_shared();
    __syncthreads();
    float d[64];
    u32 spikes[4][4];
    for (int i = 0; i < 64; ++i) d[i] = out[(warp * 16 + g + i / 2 % 2 * 8) * 128 + i / 4 * 8 + 2 * t + i % 2];
    for (int i = 0; i < 16; ++i) {
        const u16* at = a + (warp * 16 + g + i % 2 * 8) * 64 + i / 4 * 16 + i % 4 / 2 * 8 + 2 * t;
        spikes[i / 4][i % 4] = pair(at[0], at[1]);
    }
    wgmma_hold(d);
    for (int k = 0; k < 4; ++k) wgmma_hold(spikes[k]);
    if (fault != no_fence) wgmma_fence();
    for (int k = 0; k < 4; ++k) {
        if (fault == a_warp_less && k == 3 && warp == 2) break;
        int column = fault == two_descriptors && warp == 1 ? 3 - k : k;
        u64 descriptor = wgmma_describe(rows + column * 32 + (fault == past_the_row ? 16 : 0));
        if (half) {
            wgmma_half(d, spikes[k], descriptor);
        } else {
            wgmma_bfloat16(d, spikes[k], descriptor);
        }
        if (fault == sums_changed && k == 2) d[5] = 0;
    }
    wgmma_commit();
    if (fault == no_end) return;
    if (fault == no_wait) wgmma_wait<1>();
    if (fault == weights_changed) rows[threadIdx.x * 16] ^= 1;
    if (fault == spikes_changed) spikes[1][2] ^= 0x80;
    if (fault != no_wait) wgmma_wait<0>();
    wgmma_hold(d);
    for (int i = 0; i < 64; ++i) out[(warp * 16 + g + i / 2 % 2 * 8) * 128 + i / 4 * 8 + 2 * t + i % 2] = d[i];
    if (fault == no_wait) wgmma_wait<0>();
}

#define WARPGROUP_ENTRY(fault, half, name)                                                \
    extern "C" __global__ void warpgroup_##name(const u16* a, const u16* b, float* out) { \
        multiply_by_warpgroup<fault, half>(a, b, out);                                    \
    }
WARPGROUP_ENTRY(none, false, bfloat16)
WARPGROUP_ENTRY(none, true, half)
WARPGROUP_ENTRY(no_fence, false, no_fence)
WARPGROUP_ENTRY(no_publication, false, no_publication)
WARPGROUP_ENTRY(no_wait, false, no_wait)
WARPGROUP_ENTRY(no_end, false, no_end)
WARPGROUP_ENTRY(weights_changed, false, weights_changed)
WARPGROUP_ENTRY(spikes_changed, false, spikes_changed)
WARPGROUP_ENTRY(sums_changed, false, sums_changed)
WARPGROUP_ENTRY(misaligned, false, misaligned)
WARPGROUP_ENTRY(past_the_row, false, past_the_row)
WARPGROUP_ENTRY(two_descriptors, false, two_descriptors)
WARPGROUP_ENTRY(a_warp_less, false, a_warp_less)

// ---------------------------------------------------------------------------------------------------------------------
// Asynchronous copies and shared memory

// Moves rows of 16 bytes a thread through a ring of three rows; each thread reads what its neighbour copied.
template <bool commit, bool wait, bool barrier>
__device__ __forceinline__ void move_rows(const uint4* values, uint4* out, int rows) {
    extern __shared__ __align__(16) unsigned char dynamic_shared[];
    uint4* ring = reinterpret_cast<uint4*>(dynamic_shared);
    int n = blockDim.x, me = threadIdx.x, neighbour = (threadIdx.x + 1) % blockDim.x;
    for (int row = 0; row < 2; ++row) {
        if (row < rows) copy_async_16(ring + row * n + me, values + row * n + me, 16);
        if (commit) copy_async_commit();
    }
    for (int row = 0; row < rows; ++row) {
        if (wait) copy_async_wait<1>();
        if (barrier) __syncthreads();
        if (row + 2 < rows) copy_async_16(ring + (row + 2) % 3 * n + me, values + (row + 2) * n + me, 16);
        if (commit) copy_async_commit();
        out[row * n + neighbour] = ring[row % 3 * n + neighbour];
    }
}

extern "C" __global__ void pipeline(const int* values, int* out, int rows) {
    move_rows<true, true, true>(reinterpret_cast<const uint4*>(values), reinterpret_cast<uint4*>(out), rows);
}

extern "C" __global__ void pipeline_without_wait(const int* values, int* out, int rows) {
    move_rows<true, false, true>(reinterpret_cast<const uint4*>(values), reinterpret_cast<uint4*>(out), rows);
}

extern "C" __global__ void pipeline_without_commit(const int* values, int* out, int rows) {
    move_rows<false, true, true>(reinterpret_cast<const uint4*>(values), reinterpret_cast<uint4*>(out), rows);
}

extern "C" __global__ void pipeline_without_barrier(const int* values, int* out, int rows) {
    move_rows<true, true, false>(reinterpret_cast<const uint4*>(values), reinterpret_cast<uint4*>(out), rows);
}

extern "C" __global__ void copy_16_bytes(const u8* values, u8* out, int valid) {
    __shared__ __align__(16) u8 tile[16];
    copy_async_16(tile, values, valid);
    copy_async_commit();
    copy_async_wait<0>();
    for (int i = 0; i < 16; ++i) out[i] = tile[i];
}

extern "C" __global__ void copy_4_bytes(const u8* values, u8* out, int valid) {
    __shared__ __align__(4) u8 tile[4];
    copy_async_4(tile, values, valid);
    copy_async_commit();
    copy_async_wait<0>();
    for (int i = 0; i < 4; ++i) out[i] = tile[i];
}

__device__ __forceinline__ void swap_with(int* tile, int* out) {
    out[blockIdx.x * 32 + threadIdx.x] = tile[threadIdx.x];
    tile[threadIdx.x] = 0;
}

extern "C" __global__ void read_static_shared(int* out) {
    __shared__ int tile[32];
    swap_with(tile, out);
}

template <typename T>
__device__ __forceinline__ void read_shared(T* out) {
    __shared__ T tile[32];
    swap_with(tile, out);
}

extern "C" __global__ void read_template_shared(int* out) { read_shared(out); }

extern "C" __global__ void read_dynamic_shared(int* out) {
    extern __shared__ __align__(16) unsigned char dynamic_shared[];
    swap_with(reinterpret_cast<int*>(dynamic_shared), out);
}

extern "C" __global__ void fill_dynamic_shared(int bytes) {
    extern __shared__ __align__(16) unsigned char dynamic_shared[];
    for (int i = threadIdx.x; i < bytes; i += blockDim.x) dynamic_shared[i] = 1;
}

// ---------------------------------------------------------------------------------------------------------------------
// Faults. Each line is marked with its kernel's name.

extern "C" __global__ void read_null(int* out, const int* null, int n) {
    out[threadIdx.x] = null[threadIdx.x];  // read_null
}

extern "C" __global__ void read_misaligned(int* out, const int* null, int n) {
    out[0] = reinterpret_cast<const uint2*>(out + 1)->x;  // read_misaligned
}

extern "C" __global__ void index_beyond_array(int* out, const int* null, int n) {
    __shared__ int tile[64];
    tile[n - 8] = 0;
    out[threadIdx.x] = tile[n];  // index_beyond_array
}

extern "C" __global__ void divide_by_zero(int* out, const int* null, int n) {
    out[threadIdx.x] = n / (n - 70);  // divide_by_zero
}

__device__ __noinline__ int depth(int n) {
    volatile int frame[256];
    frame[n & 255] = n;
    return depth(n + 1) + frame[n & 127];  // recurse_for_ever
}

extern "C" __global__ void recurse_for_ever(int* out, const int* null, int n) { out[threadIdx.x] = depth(n); }

// ---------------------------------------------------------------------------------------------------------------------
// What a launch is checked for

extern "C" __global__ void all_types(const float* a, u16* b, const u32* c, u8* d, i64 e, int f, float g) {}

constexpr int warps = 3;

extern "C" __global__ void __launch_bounds__(warps * 32, 2) bounded() {}

// ---------------------------------------------------------------------------------------------------------------------
// One element too far, for AddressSanitizer

extern "C" __global__ void read_beyond(const int* values, int* out, int n) { out[0] = values[n]; }

extern "C" __global__ void write_beyond(const int* values, int* out, int n) { out[n] = 1; }

extern "C" __global__ void write_beyond_static_shared(const int* values, int* out, int n) {
    __shared__ int tile[64];
    int* end = tile + n;
    for (int i = n; i < 64; ++i) ++end;
    *end = 1;
    out[0] = tile[0];
}

extern "C" __global__ void write_beyond_dynamic_shared(const int* values, int* out, int n) {
    extern __shared__ __align__(16) unsigned char dynamic_shared[];
    reinterpret_cast<int*>(dynamic_shared)[n] = 1;
}

extern "C" __global__ void read_unaligned(const int* values, int* out, int n) {
    out[0] = reinterpret_cast<const int2*>(values + 1)->x;
}

extern "C" __global__ void stay_within(const int* values, int* out, int n) { out[n - 1] = values[n - 1]; }
