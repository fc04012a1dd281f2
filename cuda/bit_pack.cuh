// Small integers (spikes, or sums of spikes) of 1, 2, 4 or 8 bits, packed from and to elements of 32, 16 or 8 bits.
//
// The packed stream is little-endian: element i takes the bits from `bits * i` on, counted from the least significant
// bit of byte 0. Bound by memory: each element is read (or written) once, 16 bytes a lane, past the caches.
//
// A warp takes a tile of `group_count * lanes_per_word` loads. The 16 bytes of one load give `chunk_bits` packed bits.
// Where a 32-bit word collects the chunks of several lanes, as many loads are combined at a time: in log2 steps, each
// lane sends half of what it has to its partner and keeps the other half, until each holds one whole word. The words of
// a group are then stored as one full 128-byte line.
#pragma once
#include "device.cuh"

struct Float32 {
    typedef u32 Raw;
    static __device__ __forceinline__ bool is_zero(Raw x) { return (x << 1) == 0; }
    static __device__ __forceinline__ bool is_one(Raw x) { return x == 0x3f800000u; }
    static __device__ __forceinline__ float value(Raw x) { return __uint_as_float(x); }
    static __device__ __forceinline__ Raw from_bit(u32 bit) { return bit * 0x3f800000u; }
    static __device__ __forceinline__ Raw from_count(u32 count) { return __float_as_uint(float(count)); }
};

struct Float16 {
    typedef u16 Raw;
    static __device__ __forceinline__ bool is_zero(Raw x) { return (x & 0x7fffu) == 0; }
    static __device__ __forceinline__ bool is_one(Raw x) { return x == 0x3c00u; }
    static __device__ __forceinline__ float value(Raw x) { return float_from_half(x); }
    static __device__ __forceinline__ Raw from_bit(u32 bit) { return Raw(bit * 0x3c00u); }
    static __device__ __forceinline__ Raw from_count(u32 count) { return half_from_float(float(count)); }
};

struct Bfloat16 {
    typedef u16 Raw;
    static __device__ __forceinline__ bool is_zero(Raw x) { return (x & 0x7fffu) == 0; }
    static __device__ __forceinline__ bool is_one(Raw x) { return x == 0x3f80u; }
    static __device__ __forceinline__ float value(Raw x) { return float_from_bfloat16(x); }
    static __device__ __forceinline__ Raw from_bit(u32 bit) { return Raw(bit * 0x3f80u); }
    // Counts up to 255 have 8 significant bits: they are exact, and the upper half of the float32 pattern.
    static __device__ __forceinline__ Raw from_count(u32 count) { return Raw(__float_as_uint(float(count)) >> 16); }
};

struct Uint8 {
    typedef u8 Raw;
    static __device__ __forceinline__ bool is_zero(Raw x) { return x == 0; }
    static __device__ __forceinline__ bool is_one(Raw x) { return x == 1; }
    static __device__ __forceinline__ Raw from_bit(u32 bit) { return Raw(bit); }
    static __device__ __forceinline__ Raw from_count(u32 count) { return Raw(count); }
};

// The count that an element stands for; clears `fits` if it is no integer between 0 and `maximum`.
template <typename Element, int bits>
__device__ __forceinline__ u32 encode(typename Element::Raw x, u32 maximum, bool& fits) {
    u32 count;
    if constexpr (bits == 1) {
        count = Element::is_one(x);
        fits &= count || Element::is_zero(x);
    } else if constexpr (sizeof(typename Element::Raw) == 1) {
        fits &= x <= maximum;
        count = x & ((1u << bits) - 1);
    } else {
        // Adding 2^23 leaves an integer below 2^23 in the low bits of the mantissa; whatever else comes out of it does
        // not convert back to the same pattern.
        float value = Element::value(x);
        count = __float_as_uint(__fadd_rn(value, 8388608.0f)) & ((1u << bits) - 1);
        fits &= Element::is_zero(x) || (__float_as_uint(float(count)) == __float_as_uint(value) && count <= maximum);
    }
    return count;
}

// Clears the flag and keeps a value that does not fit; `start` says near which element one was met, -1 none. Read again
// for this rare end, so that the loop before it keeps no value.
template <typename Element, int bits>
__device__ __forceinline__ void report(
    const typename Element::Raw* spikes, i64 start, int count, i64 numel, u32 maximum, u8* fits,
    typename Element::Raw* odd) {
    if (start < 0) return;
    *fits = 0;
    for (i64 index = start; index < start + count && index < numel; ++index) {
        bool fitting = true;
        encode<Element, bits>(spikes[index], maximum, fitting);
        if (!fitting) *odd = spikes[index];
    }
}

template <typename Element, int bits>
__device__ __forceinline__ typename Element::Raw decode(u32 count) {
    if constexpr (bits == 1) {
        return Element::from_bit(count);
    } else {
        return Element::from_count(count);
    }
}

template <typename Element, int bits>
struct Tile {
    static constexpr int element_bits = 8 * sizeof(typename Element::Raw);
    static constexpr int elements_per_lane = 128 / element_bits;
    static constexpr int chunk_bits = elements_per_lane * bits;
    static constexpr int lanes_per_word = chunk_bits < 32 ? 32 / chunk_bits : 1;
    static constexpr int words_per_lane = chunk_bits < 32 ? 1 : chunk_bits / 32;
    // So many loads of a lane are under way at a time: enough to hide the memory's latency, few enough for no spills.
    static constexpr int loads = lanes_per_word > 4 ? lanes_per_word : 4;
    static constexpr int groups = loads / lanes_per_word;
    static constexpr int elements = loads * 32 * elements_per_lane;
    static constexpr int words = elements * bits / 32;
    static constexpr int words_per_load = 32 * words_per_lane / lanes_per_word;
};

// The elements of 16 bytes, taken from or put into a uint4.
template <typename Raw>
__device__ __forceinline__ Raw element_of(const u32 (&words)[4], int i) {
    constexpr int per_word = 4 / sizeof(Raw);
    return Raw(words[i / per_word] >> (8 * sizeof(Raw) * (i % per_word)));
}

template <typename Element, int bits>
__device__ __forceinline__ void encode_chunk(
    const uint4& loaded, u32 maximum, bool& fits, u32 (&out)[Tile<Element, bits>::words_per_lane]) {
    typedef Tile<Element, bits> T;
    const u32 words[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
#pragma unroll
    for (int w = 0; w < T::words_per_lane; ++w) out[w] = 0;
#pragma unroll
    for (int i = 0; i < T::elements_per_lane; ++i) {
        u32 count = encode<Element, bits>(element_of<typename Element::Raw>(words, i), maximum, fits);
        out[i * bits / 32] |= count << (i * bits % 32);
    }
}

template <typename Element, int bits>
__device__ __forceinline__ uint4 decode_chunk(const u32 (&chunk)[Tile<Element, bits>::words_per_lane]) {
    typedef typename Element::Raw Raw;
    constexpr int per_word = 4 / sizeof(Raw);
    u32 words[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < Tile<Element, bits>::elements_per_lane; ++i) {
        u32 count = (chunk[i * bits / 32] >> (i * bits % 32)) & ((1u << bits) - 1);
        words[i / per_word] |= u32(decode<Element, bits>(count)) << (8 * sizeof(Raw) * (i % per_word));
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}

// spikes [numel] -> packed [ceil(numel * bits / 8)]; `tiles` whole tiles by vector loads (0 where an address is not
// aligned to 16 bytes), the rest byte by byte. `fits` is cleared, and `odd` set, if a value does not fit.
template <typename Element, int bits>
__device__ __forceinline__ void pack(
    const typename Element::Raw* __restrict__ spikes, u8* __restrict__ packed, u8* fits, typename Element::Raw* odd,
    i64 numel, i64 tiles, u32 maximum) {
    typedef Tile<Element, bits> T;
    i64 misfit = -1;
    const int lane = threadIdx.x % 32;
    const i64 warps = i64(gridDim.x) * (blockDim.x / 32);
    const i64 warp = i64(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;

    for (i64 tile = warp; tile < tiles; tile += warps) {
        const uint4* source = reinterpret_cast<const uint4*>(spikes + tile * T::elements);
        u32* target = reinterpret_cast<u32*>(packed) + tile * T::words;
        uint4 loaded[T::loads];
#pragma unroll
        for (int load = 0; load < T::loads; ++load) loaded[load] = __ldcs(source + load * 32 + lane);
#pragma unroll
        for (int group = 0; group < T::groups; ++group) {
            u32 words[T::lanes_per_word][T::words_per_lane];
            const int place = lane % T::lanes_per_word;
#pragma unroll
            for (int i = 0; i < T::lanes_per_word; ++i) {
                const int load = group * T::lanes_per_word + i;
                bool fitting = true;
                encode_chunk<Element, bits>(loaded[load], maximum, fitting, words[i]);
                if (!fitting) misfit = tile * T::elements + i64(load * 32 + lane) * T::elements_per_lane;
                if constexpr (T::lanes_per_word > 1) words[i][0] <<= place * T::chunk_bits;
            }
#pragma unroll
            for (int half = T::lanes_per_word / 2; half > 0; half /= 2) {
                const bool upper = place & half;
#pragma unroll
                for (int i = 0; i < half; ++i) {
                    const u32 sent = upper ? words[i][0] : words[i + half][0];
                    const u32 kept = upper ? words[i + half][0] : words[i][0];
                    words[i][0] = kept | __shfl_xor_sync(FULL_WARP, sent, half);
                }
            }
            // This lane holds the whole word number `lane / lanes_per_word` of load number `place` of the group.
            u32* word = target + (group * T::lanes_per_word + place) * T::words_per_load +
                        lane / T::lanes_per_word * T::words_per_lane;
            if constexpr (T::words_per_lane == 4) {
                __stcs(reinterpret_cast<uint4*>(word), make_uint4(words[0][0], words[0][1], words[0][2], words[0][3]));
            } else if constexpr (T::words_per_lane == 2) {
                __stcs(reinterpret_cast<uint2*>(word), make_uint2(words[0][0], words[0][1]));
            } else {
                __stcs(word, words[0][0]);
            }
        }
    }

    constexpr int per_byte = 8 / bits;
    const i64 bytes = (numel + per_byte - 1) / per_byte;
    const i64 threads = i64(gridDim.x) * blockDim.x;
    for (i64 byte = tiles * T::words * 4 + i64(blockIdx.x) * blockDim.x + threadIdx.x; byte < bytes; byte += threads) {
        u32 out = 0;
        bool fitting = true;
        for (int i = 0; i < per_byte; ++i) {
            const i64 index = byte * per_byte + i;
            if (index < numel) out |= encode<Element, bits>(spikes[index], maximum, fitting) << (i * bits);
        }
        packed[byte] = u8(out);
        if (!fitting) misfit = byte * per_byte;
    }

    report<Element, bits>(spikes, misfit, T::elements_per_lane > 8 ? T::elements_per_lane : 8, numel, maximum, fits, odd);
}

// packed -> spikes [numel], the reverse.
template <typename Element, int bits>
__device__ __forceinline__ void unpack(
    const u8* __restrict__ packed, typename Element::Raw* __restrict__ spikes, i64 numel, i64 tiles) {
    typedef Tile<Element, bits> T;
    const int lane = threadIdx.x % 32;
    const i64 warps = i64(gridDim.x) * (blockDim.x / 32);
    const i64 warp = i64(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;

    for (i64 tile = warp; tile < tiles; tile += warps) {
        const u32* source = reinterpret_cast<const u32*>(packed) + tile * T::words;
        uint4* target = reinterpret_cast<uint4*>(spikes + tile * T::elements);
        const int place = lane % T::lanes_per_word;
        u32 words[T::groups][T::words_per_lane];
#pragma unroll
        for (int group = 0; group < T::groups; ++group) {
            const u32* word = source + (group * T::lanes_per_word + place) * T::words_per_load +
                              lane / T::lanes_per_word * T::words_per_lane;
            if constexpr (T::words_per_lane == 4) {
                const uint4 loaded = __ldcs(reinterpret_cast<const uint4*>(word));
                words[group][0] = loaded.x, words[group][1] = loaded.y;
                words[group][2] = loaded.z, words[group][3] = loaded.w;
            } else if constexpr (T::words_per_lane == 2) {
                const uint2 loaded = __ldcs(reinterpret_cast<const uint2*>(word));
                words[group][0] = loaded.x, words[group][1] = loaded.y;
            } else {
                words[group][0] = __ldcs(word);
            }
        }
#pragma unroll
        for (int group = 0; group < T::groups; ++group) {
#pragma unroll
            for (int i = 0; i < T::lanes_per_word; ++i) {
                u32 chunk[T::words_per_lane];
                if constexpr (T::lanes_per_word > 1) {
                    const u32 word = __shfl_sync(FULL_WARP, words[group][0], lane - place + i);
                    chunk[0] = word >> (place * T::chunk_bits);
                } else {
#pragma unroll
                    for (int w = 0; w < T::words_per_lane; ++w) chunk[w] = words[group][w];
                }
                __stcs(target + (group * T::lanes_per_word + i) * 32 + lane, decode_chunk<Element, bits>(chunk));
            }
        }
    }

    constexpr int per_byte = 8 / bits;
    const i64 bytes = (numel + per_byte - 1) / per_byte;
    const i64 threads = i64(gridDim.x) * blockDim.x;
    for (i64 byte = tiles * T::words * 4 + i64(blockIdx.x) * blockDim.x + threadIdx.x; byte < bytes; byte += threads) {
        const u32 in = packed[byte];
        for (int i = 0; i < per_byte; ++i) {
            const i64 index = byte * per_byte + i;
            if (index < numel) spikes[index] = decode<Element, bits>((in >> (i * bits)) & ((1u << bits) - 1));
        }
    }
}

#define PACK_ENTRIES(name, Element, bits)                                                                             \
    extern "C" __global__ void __launch_bounds__(256, 4) bit_pack_##name##_##bits(                                       \
        const Element::Raw* spikes, u8* packed, u8* fits, Element::Raw* odd, i64 numel, i64 tiles, int maximum) {      \
        pack<Element, bits>(spikes, packed, fits, odd, numel, tiles, u32(maximum));                                   \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(256, 4) bit_unpack_##name##_##bits(                                     \
        const u8* packed, Element::Raw* spikes, i64 numel, i64 tiles) {                                               \
        unpack<Element, bits>(packed, spikes, numel, tiles);                                                          \
    }
