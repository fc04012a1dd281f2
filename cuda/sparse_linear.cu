// y = s W^T + b for spikes s, by adding the weights of the ones alone.
//
// The ones are listed first, slab by slab of K, so that the product spends no instruction on the zeros. The product
// then is bound by the reading of weights from shared memory: 4 bytes for each one and each output. Everything else is
// arranged around that:
// * A block owns 64 outputs of up to 512 rows and holds a slab of the weights in shared memory, transposed, a row of 64
//   for each k. Eight lanes read such a row as 16 bytes a lane (no bank conflict whatever k), twice, so that one
//   position, found once, serves eight outputs of the lane. Four rows of s share a warp.
// * The sums stay in registers over all slabs: each output is written once, and its weights are added in the order of
//   ascending k, whatever the schedule: results do not change from run to run.
// * While a slab is worked through, the next one is copied asynchronously into the other half of shared memory, 4 bytes
//   at a time to be transposed (16-bit weights by way of registers); a warp's lists arrive likewise, one step ahead.
// * A slab in which the block's rows hold no one at all is not even loaded.
//
// A list has as many bits as the spikes that it lists: it holds one of 16 as a position of 16 bits, and their number.
// Where there are more, the product reads the spikes' bits instead.
#include "device.cuh"

constexpr int THREADS = 512;
constexpr int WARPS = THREADS / 32;
constexpr int COLUMNS = 64;                 // outputs of a block
constexpr int ROW_GROUPS = 8;               // of four rows, at most, for each warp; an even number
constexpr int WEIGHT_STRIDE = COLUMNS + 4;  // floats from one k to the next: 8 k of 4 outputs lie in all 32 banks
constexpr int PIECE = 8;                    // k of a piece: each thread copies one weight of it
constexpr int PIECES = 52;                  // of a slab, at most

// Bytes of a list: an eighth of the spikes of a slab, rounded to a multiple of 16 for the asynchronous copies.
__device__ __forceinline__ int list_bytes(int slab) { return max(16, (slab + 64) / 128 * 16); }

// ---------------------------------------------------------------------------------------------------------------------
// packed [rows, ceil(K / 8)] -> lists: for each slab of `slab` spikes (the last may be shorter), for each row (and
// empty ones, up to a multiple of eight), u16 positions within the slab, ascending, and in the last u16 their number;
// the number alone where the list cannot hold them. active[strip, slab] is set where a strip of `strip_rows` rows holds
// a one. A warp makes a list: lane l looks at the spikes 16 l .. 16 l + 15 of the slab (slab <= 512).
extern "C" __global__ void __launch_bounds__(256, 6) list_ones(
    const u8* packed, u8* lists, u8* active, i64 rows, int features, int slab, int strip_rows) {
    const int lane = threadIdx.x % 32;
    const i64 row = i64(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
    const i64 padded_rows = (rows + 7) / 8 * 8;
    const int slabs = (features + slab - 1) / slab;
    const int bytes = list_bytes(slab), capacity = bytes / 2 - 1;
    if (row >= padded_rows) return;
    for (int index = blockIdx.y; index < slabs; index += gridDim.y) {
        const int start = index * slab;
        const int width = min(slab, features - start);
        const int left = row < rows ? width - 16 * lane : 0;  // spikes from this lane's first on
        u32 bits = 0;
        if (left > 0) {
            const u8* from = packed + row * ((features + 7) / 8) + start / 8 + 2 * lane;
            bits = from[0];
            if (left > 8) bits |= u32(from[1]) << 8;
            if (left < 16) bits &= (1u << left) - 1;
        }
        const int count = __popc(bits);
        int through = count;  // ones up to and with this lane
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            const int before = __shfl_up_sync(FULL_WARP, through, distance);
            if (lane >= distance) through += before;
        }
        const int total = __shfl_sync(FULL_WARP, through, 31);
        u16* list = reinterpret_cast<u16*>(lists + (i64(index) * padded_rows + row) * bytes);
        if (lane == 0) {
            list[capacity] = u16(total);
            if (total) active[row / strip_rows * slabs + index] = 1;
        }
        if (total <= capacity) {
            for (int at = through - count; bits; bits &= bits - 1) list[at++] = u16(16 * lane + __ffs(bits) - 1);
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------

struct Float32 {
    typedef float Raw;
    static __device__ __forceinline__ float value(Raw x) { return x; }
    static __device__ __forceinline__ Raw rounded(float x) { return x; }
    static __device__ __forceinline__ void store4(Raw* to, const float (&x)[4]) {
        *reinterpret_cast<float4*>(to) = make_float4(x[0], x[1], x[2], x[3]);
    }
};

template <typename Element>
struct Bits16 {
    typedef u16 Raw;
    static __device__ __forceinline__ void store4(Raw* to, const float (&x)[4]) {
        *reinterpret_cast<uint2*>(to) = make_uint2(
            u32(Element::rounded(x[0])) | u32(Element::rounded(x[1])) << 16,
            u32(Element::rounded(x[2])) | u32(Element::rounded(x[3])) << 16);
    }
};

struct Float16 : Bits16<Float16> {
    static __device__ __forceinline__ float value(Raw x) { return float_from_half(x); }
    static __device__ __forceinline__ Raw rounded(float x) { return half_from_float(x); }
};

struct Bfloat16 : Bits16<Bfloat16> {
    static __device__ __forceinline__ float value(Raw x) { return float_from_bfloat16(x); }
    static __device__ __forceinline__ Raw rounded(float x) { return bfloat16_from_float(x); }
};

extern __shared__ __align__(16) unsigned char dynamic_shared[];

// The weights of a lane's eight outputs at k; `weights`: where in shared memory those of k = 0 are.
struct Eight {
    float4 low, high;

    __device__ __forceinline__ Eight(int weights, int k) {
        const u8* row = dynamic_shared + (weights + k * (4 * WEIGHT_STRIDE));
        low = *reinterpret_cast<const float4*>(row);
        high = *reinterpret_cast<const float4*>(row + 2 * COLUMNS);
    }

    __device__ __forceinline__ void add_to(float (&sums)[8]) const {
        sums[0] = __fadd_rn(sums[0], low.x), sums[1] = __fadd_rn(sums[1], low.y);
        sums[2] = __fadd_rn(sums[2], low.z), sums[3] = __fadd_rn(sums[3], low.w);
        sums[4] = __fadd_rn(sums[4], high.x), sums[5] = __fadd_rn(sums[5], high.y);
        sums[6] = __fadd_rn(sums[6], high.z), sums[7] = __fadd_rn(sums[7], high.w);
    }
};

// Adds the weights at the `count` positions of a list, two positions at a time.
__device__ __forceinline__ void add_listed(float (&sums)[8], int weights, int list, int count) {
    u32 pair = *reinterpret_cast<const u32*>(dynamic_shared + list);
#pragma unroll 1
    for (; count > 1; count -= 2) {
        const Eight first(weights, pair & 0xffff), second(weights, pair >> 16);
        list += 4;
        pair = *reinterpret_cast<const u32*>(dynamic_shared + list);
        first.add_to(sums);
        second.add_to(sums);
    }
    if (count == 1) Eight(weights, pair & 0xffff).add_to(sums);
}

// Adds the weights at the ones among `width` bits.
__device__ __forceinline__ void add_bits(float (&sums)[8], int weights, const u8* bits, int width) {
#pragma unroll 1
    for (int k = 0; k < width; k += 8) {
        u32 byte = __ldg(bits + k / 8);
        if (width - k < 8) byte &= (1u << (width - k)) - 1;
#pragma unroll 1
        for (; byte; byte &= byte - 1) Eight(weights, k + __ffs(byte) - 1).add_to(sums);
    }
}

// One thread's weights on their way to shared memory: of one output, one k in every piece.
template <typename Element>
struct Share {
    typedef typename Element::Raw Raw;
    static constexpr bool async = sizeof(Raw) == 4;  // no asynchronous copy has 2 bytes

    const Raw* from;
    i64 step;   // elements from one piece to the next
    int to;     // where in shared memory
    int left;   // k from here to the end of the slab; nothing to copy where it is not positive
    Raw held[async ? 1 : (PIECES + ROW_GROUPS - 1) / ROW_GROUPS];

    // Starts to load the next `count` pieces.
    __device__ __forceinline__ void load(int count) {
#pragma unroll
        for (int i = 0; i < count; ++i) {
            if constexpr (async) {
                if (PIECE * i < left) copy_async_4(dynamic_shared + (to + offset(i)), from, 4);
            } else {
                if (PIECE * i < left) held[i] = __ldg(from);
            }
            from += step;
        }
        if constexpr (async) advance(count);
    }

    // Stores what was loaded, if it did not go there by itself.
    __device__ __forceinline__ void store(int count) {
        if constexpr (!async) {
#pragma unroll
            for (int i = 0; i < count; ++i) {
                float* target = reinterpret_cast<float*>(dynamic_shared + (to + offset(i)));
                if (PIECE * i < left) *target = Element::value(held[i]);
            }
            advance(count);
        }
    }

    static __device__ __forceinline__ int offset(int piece) { return piece * PIECE * WEIGHT_STRIDE * 4; }

    __device__ __forceinline__ void advance(int count) {
        to += offset(count);
        left -= PIECE * count;
    }
};

// A tile is 64 outputs of a strip of 64 * row_groups rows; tile = columns * strips + strip, so that the blocks that run
// at the same time share weights. Each block works through the tiles blockIdx.x, blockIdx.x + gridDim.x, ..., and loads
// the first slab of the next tile during the last one of this tile.
// Dynamic shared memory: twice `slab` rows of WEIGHT_STRIDE floats, then for each warp twice four lists.
// There are fewer than 2^31 - gridDim.x tiles.
template <typename Element>
__device__ __forceinline__ void sparse_linear(
    const u8* __restrict__ packed, const u8* __restrict__ lists, const u8* __restrict__ active,
    const typename Element::Raw* __restrict__ weight, i64 stride_n, i64 stride_k,
    const typename Element::Raw* __restrict__ bias, typename Element::Raw* __restrict__ out, i64 rows,
    int out_features, int features, int slab, int row_groups) {
    typedef typename Element::Raw Raw;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int slabs = (features + slab - 1) / slab;
    const int strip_rows = WARPS * 4 * row_groups;
    const int strips = int((rows + strip_rows - 1) / strip_rows);
    const int tiles = strips * ((out_features + COLUMNS - 1) / COLUMNS);

    const int buffer_bytes = slab * WEIGHT_STRIDE * 4, bytes = list_bytes(slab);
    const int ring = 2 * buffer_bytes + warp * 8 * bytes;

    // A warp's rows come in an even number of groups of four; lanes 8 i .. 8 i + 7 have row i of a group.
    auto row_of = [&](int strip) { return i64(strip) * strip_rows + warp * 4 * row_groups; };
    auto groups_of = [&](int strip) {
        const i64 left = (rows - row_of(strip) + 7) / 8 * 2;
        return left < 0 ? 0 : left < row_groups ? int(left) : row_groups;
    };
    auto width_of = [&](int index) { return min(slab, features - index * slab); };
    // The next slab in which the strip has a one.
    auto next_active = [&](int strip, int index) {
        do ++index;
        while (index < slabs && !active[i64(strip) * slabs + index]);
        return index;
    };
    auto first_active = [&](int strip) {
        const int index = next_active(strip, -1);
        return index < slabs ? index : 0;  // without any one the outputs still have to be written
    };
    // Where this lane's 16 bytes of the lists of group 0 are.
    auto lists_of = [&](int strip, int index) {
        const i64 padded_rows = (rows + 7) / 8 * 8;
        return lists + (index * padded_rows + row_of(strip)) * bytes + lane * 16;
    };
    auto fetch_lists = [&](int half, const u8* from) {
        if (lane < bytes / 4) copy_async_16(dynamic_shared + (ring + half * 4 * bytes + lane * 16), from, 16);
    };
    auto share_of = [&](int column, int index, int buffer) {
        const int n = threadIdx.x / PIECE, k = threadIdx.x % PIECE;
        Share<Element> share;
        share.from = weight + (column + n) * stride_n + (i64(index) * slab + k) * stride_k;
        share.step = PIECE * stride_k;
        share.to = buffer + (k * WEIGHT_STRIDE + n) * 4;
        share.left = column + n < out_features ? width_of(index) - k : 0;
        return share;
    };

    float sums[ROW_GROUPS][8];
#pragma unroll
    for (int group = 0; group < ROW_GROUPS; ++group) {
#pragma unroll
        for (int i = 0; i < 8; ++i) sums[group][i] = 0.0f;
    }

    int tile = blockIdx.x;
    int strip = tile % strips;
    int column = tile / strips * COLUMNS;
    int index = first_active(strip);
    int current = 0;  // where the slab's weights are; the next ones go to the other buffer
    Share<Element> share = share_of(column, index, current);
#pragma unroll 1
    while (share.left > 0) {
        share.load(4);
        share.store(4);
    }
    copy_async_commit();
    if (groups_of(strip)) fetch_lists(0, lists_of(strip, index));
    copy_async_commit();
    while (tile < tiles) {
        copy_async_wait<1>();  // all but the lists
        __syncthreads();       // this slab is complete, and nobody reads the other buffer any more
        int next_tile = tile, next_strip = strip, next_column = column, next = next_active(strip, index);
        if (next == slabs) {
            next_tile += gridDim.x;
            next_strip = next_tile % strips;
            next_column = next_tile / strips * COLUMNS;
            if (next_tile < tiles) next = first_active(next_strip);
        }
        const bool last_of_tile = next_tile != tile, more = next_tile < tiles;
        const int other = buffer_bytes - current;
        share = share_of(next_column, next, other);  // empty after the last tile, which has no next slab

        const int groups = groups_of(strip);
        const u8* from_lists = lists_of(strip, index);
        const u8* strip_bits = packed + i64(strip) * strip_rows * ((features + 7) / 8);
        const int row_weights = current + lane % 8 * 16;
#pragma unroll
        for (int group = 0; group < ROW_GROUPS; ++group) {
            if (group < groups) {
                copy_async_wait<0>();
                __syncwarp();  // all lanes' copies are here, and the other half of the ring is free
                if (group + 1 < groups) fetch_lists((group + 1) % 2, from_lists + 4 * (group + 1) * bytes);
            }
            const int pieces = PIECES * (group + 1) / ROW_GROUPS - PIECES * group / ROW_GROUPS;
            share.load(pieces);
            copy_async_commit();
            if (group < groups) {
                const int list = ring + (group % 2 * 4 + lane / 8) * bytes;
                const int count = *reinterpret_cast<const u16*>(dynamic_shared + (list + bytes - 2));
                if (count < bytes / 2) {
                    add_listed(sums[group], row_weights, list, count);
                } else {
                    const int row = 4 * (warp * row_groups + group) + lane / 8;
                    const u8* bits = strip_bits + i64(row) * ((features + 7) / 8) + index * (slab / 8);
                    add_bits(sums[group], row_weights, bits, width_of(index));
                }
            }
            share.store(pieces);
        }
        // The last group, an odd one, left the first half of the ring free.
        if (more && groups_of(next_strip)) fetch_lists(0, lists_of(next_strip, next));
        copy_async_commit();

        if (last_of_tile) {
            const bool whole = out_features % 4 == 0;
#pragma unroll
            for (int side = 0; side < 2; ++side) {
                const int first = column + side * (COLUMNS / 2) + lane % 8 * 4;
                float offset[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    offset[i] = bias && first + i < out_features ? Element::value(bias[first + i]) : 0.0f;
                }
#pragma unroll
                for (int group = 0; group < ROW_GROUPS; ++group) {
                    const i64 row = row_of(strip) + 4 * group + lane / 8;
                    float x[4];
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        x[i] = __fadd_rn(sums[group][4 * side + i], offset[i]);
                        sums[group][4 * side + i] = 0.0f;
                    }
                    if (group >= groups || row >= rows) continue;
                    Raw* to = out + row * out_features + first;
                    if (whole) {
                        if (first < out_features) Element::store4(to, x);
                    } else {
#pragma unroll
                        for (int i = 0; i < 4; ++i) {
                            if (first + i < out_features) to[i] = Element::rounded(x[i]);
                        }
                    }
                }
            }
        }
        current = other;
        tile = next_tile, strip = next_strip, column = next_column, index = next;
    }
}

#define LINEAR_ENTRY(name, Element)                                                                                   \
    extern "C" __global__ void __launch_bounds__(THREADS, 1) sparse_linear_##name(                                    \
        const u8* packed, const u8* lists, const u8* active, const Element::Raw* weight, i64 stride_n, i64 stride_k,  \
        const Element::Raw* bias, Element::Raw* out, i64 rows, int out_features, int features, int slab,              \
        int row_groups) {                                                                                             \
        sparse_linear<Element>(                                                                                       \
            packed, lists, active, weight, stride_n, stride_k, bias, out, rows, out_features, features, slab,         \
            row_groups);                                                                                              \
    }

LINEAR_ENTRY(float32, Float32)
LINEAR_ENTRY(float16, Float16)
LINEAR_ENTRY(bfloat16, Bfloat16)
