// Positions of the ones in a stream of bits, and the spikes from their positions.
//
// A block takes 32768 bits, 128 for each thread. count_ones counts the ones of each block; their running sum over the
// blocks tells list_positions where each block's positions go. Both read the bits once (1/8 byte an element each); the
// positions are written once.
#include "device.cuh"

constexpr int THREADS = 256;
constexpr int THREAD_BITS = 128;
constexpr int BLOCK_BITS = THREADS * THREAD_BITS;

// The 128 bits from `first` on; zeros from `numel` on.
struct Words {
    u32 word[4];

    __device__ __forceinline__ Words(const u8* packed, i64 first, i64 numel) {
        const bool aligned = (reinterpret_cast<u64>(packed) & 15) == 0;
        if (aligned && first + THREAD_BITS <= numel) {
            const uint4 loaded = __ldg(reinterpret_cast<const uint4*>(packed + first / 8));
            word[0] = loaded.x, word[1] = loaded.y, word[2] = loaded.z, word[3] = loaded.w;
            return;
        }
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            word[w] = 0;
            for (int byte = 0; byte < 4; ++byte) {
                const i64 left = numel - first - 32 * w - 8 * byte;
                if (left <= 0) break;
                u32 bits = packed[first / 8 + 4 * w + byte];
                if (left < 8) bits &= (1u << left) - 1;
                word[w] |= bits << (8 * byte);
            }
        }
    }

    __device__ __forceinline__ int count() const {
        return __popc(word[0]) + __popc(word[1]) + __popc(word[2]) + __popc(word[3]);
    }
};

// counts[block] = ones among the block's bits.
extern "C" __global__ void __launch_bounds__(THREADS, 6) count_ones(const u8* packed, int* counts, i64 numel) {
    __shared__ int of_warp[THREADS / 32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int count = Words(packed, i64(blockIdx.x) * BLOCK_BITS + threadIdx.x * THREAD_BITS, numel).count();
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) count += __shfl_xor_sync(FULL_WARP, count, distance);
    if (lane == 0) of_warp[warp] = count;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int w = 1; w < THREADS / 32; ++w) count += of_warp[w];
        counts[blockIdx.x] = count;
    }
}

// positions[j] = where the j-th one is, for the first `capacity` ones; `numel` for j beyond the last one.
// through[block] = ones in all blocks up to and with this one; *total = their number.
template <typename Index>
__device__ __forceinline__ void list_positions(
    const u8* __restrict__ packed, const i64* __restrict__ through, Index* __restrict__ positions,
    i64* __restrict__ total, i64 numel, i64 capacity) {
    __shared__ int of_warp[THREADS / 32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const i64 first = i64(blockIdx.x) * BLOCK_BITS + threadIdx.x * THREAD_BITS;
    const Words words(packed, first, numel);

    const int count = words.count();
    int up_to_here = count;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const int before = __shfl_up_sync(FULL_WARP, up_to_here, distance);
        if (lane >= distance) up_to_here += before;
    }
    if (lane == 31) of_warp[warp] = up_to_here;
    __syncthreads();
    i64 at = (blockIdx.x ? through[blockIdx.x - 1] : 0) + up_to_here - count;
    for (int w = 0; w < warp; ++w) at += of_warp[w];

#pragma unroll
    for (int w = 0; w < 4; ++w) {
        for (u32 bits = words.word[w]; bits; bits &= bits - 1, ++at) {
            if (at < capacity) positions[at] = Index(first + 32 * w + __ffs(bits) - 1);
        }
    }

    const i64 ones = through[gridDim.x - 1];
    if (blockIdx.x == 0 && threadIdx.x == 0) *total = ones;
    const i64 threads = i64(gridDim.x) * THREADS, thread = i64(blockIdx.x) * THREADS + threadIdx.x;
    for (i64 j = ones + thread; j < capacity; j += threads) positions[j] = Index(numel);
}

// flat[positions[j]] = one, an element's bit pattern; positions outside the tensor are left out.
template <typename Index, typename Raw>
__device__ __forceinline__ void scatter_ones(
    const Index* __restrict__ positions, Raw* __restrict__ flat, i64 count, i64 numel, i64 one) {
    const i64 threads = i64(gridDim.x) * blockDim.x;
    for (i64 j = i64(blockIdx.x) * blockDim.x + threadIdx.x; j < count; j += threads) {
        const i64 position = __ldcs(positions + j);
        if (position >= 0 && position < numel) flat[position] = Raw(one);
    }
}

#define SCATTER_ENTRY(index, Index, bits, Raw)                                                                        \
    extern "C" __global__ void __launch_bounds__(THREADS, 6) scatter_ones_##index##_##bits(                           \
        const Index* positions, Raw* flat, i64 count, i64 numel, i64 one) {                                           \
        scatter_ones<Index, Raw>(positions, flat, count, numel, one);                                                 \
    }

#define INDEX_ENTRIES(index, Index)                                                                                   \
    extern "C" __global__ void __launch_bounds__(THREADS, 6) list_positions_##index(                                  \
        const u8* packed, const i64* through, Index* positions, i64* total, i64 numel, i64 capacity) {                \
        list_positions<Index>(packed, through, positions, total, numel, capacity);                                    \
    }                                                                                                                 \
    SCATTER_ENTRY(index, Index, 8, u8)                                                                                \
    SCATTER_ENTRY(index, Index, 16, u16)                                                                              \
    SCATTER_ENTRY(index, Index, 32, u32)                                                                              \
    SCATTER_ENTRY(index, Index, 64, u64)

INDEX_ENTRIES(int32, int)
INDEX_ENTRIES(int64, i64)
