// Integrate-and-fire neurons over T steps, forward and backward, in the order of operations of the eager loop.
//
// x is [T, n], contiguous; the n positions are independent of each other, so any dense layout whose slowest dimension
// is time can be read in the order in which it lies in memory. Membrane potentials are float32 whatever x is.
//
// Charging, with rest = v_reset or 0:
//     IF                  h = v + x
//     LIF, input decays   h = v + (x - (v - rest)) / tau
//     LIF                 h = v - (v - rest) / tau + x
// A spike is h >= threshold (NaN spikes never). Reset: hard v' = s v_reset + (1 - s) h, soft v' = h - s threshold.
//
// Every operation is rounded by itself (__fadd_rn and so on: no fused multiply-add), so float32 results are those of
// torch, bit for bit, except that subnormal numbers become zero. Torch divides by a number on the CPU and multiplies
// with its rounded reciprocal on CUDA: `divide` says which, and `tau` is then the reciprocal.
#include "device.cuh"

enum { CHARGE_IF = 0, CHARGE_LIF_DECAYED_INPUT = 1, CHARGE_LIF = 2 };

struct Neuron {
    int charge;
    int divide;
    float tau;
    float threshold;
    int hard;
    float reset;
};

// The branches are taken by all threads alike, once for `width` positions.
template <int width>
__device__ __forceinline__ void decay(float values[width], const Neuron& neuron) {
    if (neuron.divide) {
#pragma unroll
        for (int j = 0; j < width; j++) values[j] = __fdiv_rn(values[j], neuron.tau);
    } else {
#pragma unroll
        for (int j = 0; j < width; j++) values[j] = __fmul_rn(values[j], neuron.tau);
    }
}

// Turns the inputs h into potentials.
template <int width>
__device__ __forceinline__ void charge(float h[width], const float v[width], const Neuron& neuron) {
    if (neuron.charge == CHARGE_IF) {
#pragma unroll
        for (int j = 0; j < width; j++) h[j] = __fadd_rn(v[j], h[j]);
        return;
    }
    float rest = neuron.hard ? neuron.reset : 0.0f;
    bool input_decays = neuron.charge == CHARGE_LIF_DECAYED_INPUT;
    float change[width];
#pragma unroll
    for (int j = 0; j < width; j++) {
        float above = __fsub_rn(v[j], rest);
        change[j] = input_decays ? __fsub_rn(h[j], above) : above;
    }
    decay<width>(change, neuron);
#pragma unroll
    for (int j = 0; j < width; j++)
        h[j] = input_decays ? __fadd_rn(v[j], change[j]) : __fadd_rn(__fsub_rn(v[j], change[j]), h[j]);
}

// The products with 0 and 1 stay: an infinite potential times 0 is NaN, as in the eager loop.
__device__ __forceinline__ float after_reset(float h, bool spike, const Neuron& neuron) {
    float s = spike ? 1.0f : 0.0f;
    float kept = spike ? 0.0f : 1.0f;
    return neuron.hard ? __fadd_rn(__fmul_rn(s, neuron.reset), __fmul_rn(kept, h))
                       : __fsub_rn(h, __fmul_rn(s, neuron.threshold));
}

// ---------------------------------------------------------------------------------------------------------------------
// Formats of x, spikes and their gradients

struct Float32 {
    typedef float type;
    static __device__ __forceinline__ float widen(float value) { return value; }
    static __device__ __forceinline__ float narrow(float value) { return value; }
    static __device__ __forceinline__ float spike(bool fired) { return fired ? 1.0f : 0.0f; }
};

struct Float16 {
    typedef u16 type;
    static __device__ __forceinline__ float widen(u16 bits) { return float_from_half(bits); }
    static __device__ __forceinline__ u16 narrow(float value) { return half_from_float(value); }
    static __device__ __forceinline__ u16 spike(bool fired) { return fired ? 0x3c00 : 0; }
};

struct Bfloat16 {
    typedef u16 type;
    static __device__ __forceinline__ float widen(u16 bits) { return float_from_bfloat16(bits); }
    static __device__ __forceinline__ u16 narrow(float value) { return bfloat16_from_float(value); }
    static __device__ __forceinline__ u16 spike(bool fired) { return fired ? 0x3f80 : 0; }
};

// Eight positions of a thread, in two fours of neighbours: how they lie in the 256 positions of its warp, so that a
// warp reads and writes whole lines; and which byte of bits the thread writes.
struct Place {
    i64 four[2];
    bool inside[2];
    i64 byte;
    bool byte_inside;
};

template <typename Format>
struct Eight;

// A thread reads 16 bytes here and 16 bytes 512 bytes further on; neighbouring lanes exchange half a byte of bits.
template <>
struct Eight<Float32> {
    uint4 words[2];

    static __device__ __forceinline__ Place place(i64 first, int lane, i64 n) {
        Place place;
        place.four[0] = first + lane * 4;
        place.four[1] = first + 128 + lane * 4;
        place.inside[0] = place.four[0] < n;
        place.inside[1] = place.four[1] < n;
        place.byte = first / 8 + (lane & 1) * 16 + lane / 2;
        place.byte_inside = place.byte * 8 < n;
        return place;
    }

    __device__ __forceinline__ void load(const float* row, const Place& place) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            words[i] = make_uint4(0, 0, 0, 0);
            if (place.inside[i]) words[i] = __ldcs(reinterpret_cast<const uint4*>(row + place.four[i]));
        }
    }

    __device__ __forceinline__ float value(int i) const {
        const uint4& w = words[i / 4];
        return __uint_as_float(i % 4 == 0 ? w.x : i % 4 == 1 ? w.y : i % 4 == 2 ? w.z : w.w);
    }

    static __device__ __forceinline__ void store_spikes(float* row, const Place& place, u32 fired) {
        const u32 one = 0x3f800000u;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            u32 four = fired >> (4 * i);
            uint4 w = make_uint4(four & 1 ? one : 0, four & 2 ? one : 0, four & 4 ? one : 0, four & 8 ? one : 0);
            if (place.inside[i]) *reinterpret_cast<uint4*>(row + place.four[i]) = w;
        }
    }

    // The even lane makes the byte of both lanes' first fours, the odd lane that of their second fours.
    static __device__ __forceinline__ u32 byte_of(u32 fired, int lane) {
        u32 first = fired & 15, second = fired >> 4;
        bool odd = lane & 1;
        u32 other = __shfl_xor_sync(FULL_WARP, odd ? first : second, 1);
        return odd ? (other | second << 4) : (first | other << 4);
    }
};

template <typename Format>
struct Eight16 {
    uint4 words;

    static __device__ __forceinline__ Place place(i64 first, int lane, i64 n) {
        Place place;
        place.four[0] = first + lane * 8;
        place.four[1] = place.four[0] + 4;
        place.inside[0] = place.inside[1] = place.byte_inside = place.four[0] < n;
        place.byte = first / 8 + lane;
        return place;
    }

    __device__ __forceinline__ void load(const u16* row, const Place& place) {
        words = make_uint4(0, 0, 0, 0);
        if (place.inside[0]) words = __ldcs(reinterpret_cast<const uint4*>(row + place.four[0]));
    }

    __device__ __forceinline__ float value(int i) const {
        u32 w = i / 2 == 0 ? words.x : i / 2 == 1 ? words.y : i / 2 == 2 ? words.z : words.w;
        return Format::widen(u16(i % 2 == 0 ? w & 0xffffu : w >> 16));
    }

    static __device__ __forceinline__ void store_spikes(u16* row, const Place& place, u32 fired) {
        const u32 low = Format::spike(true), high = low << 16;
        u32 w[4];
#pragma unroll
        for (int i = 0; i < 4; i++) w[i] = (fired >> (2 * i) & 1 ? low : 0) | (fired >> (2 * i) & 2 ? high : 0);
        if (place.inside[0]) *reinterpret_cast<uint4*>(row + place.four[0]) = make_uint4(w[0], w[1], w[2], w[3]);
    }

    static __device__ __forceinline__ u32 byte_of(u32 fired, int lane) { return fired; }
};

template <>
struct Eight<Float16> : Eight16<Float16> {};
template <>
struct Eight<Bfloat16> : Eight16<Bfloat16> {};

// ---------------------------------------------------------------------------------------------------------------------
// Forward, n a multiple of 8 and all addresses of 16 bytes: a thread carries eight positions through time. Element i of
// the stream [T, n] is bit i % 8 of byte i / 8.

// Steps whose inputs are under way together.
#define STEPS_AHEAD 4

template <typename Format>
__device__ __forceinline__ void forward_eights(const typename Format::type* x, const float* v0, float v_start,
                                               typename Format::type* spikes, u8* bits, float* v_final, i64 n,
                                               int steps, const Neuron& neuron) {
    int lane = threadIdx.x % 32;
    i64 warp = i64(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
    Place place = Eight<Format>::place(warp * 256, lane, n);
    float v[8];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float4 four = make_float4(v_start, v_start, v_start, v_start);
        if (v0 && place.inside[i]) four = *reinterpret_cast<const float4*>(v0 + place.four[i]);
        v[4 * i] = four.x, v[4 * i + 1] = four.y, v[4 * i + 2] = four.z, v[4 * i + 3] = four.w;
    }
    for (int first = 0; first < steps; first += STEPS_AHEAD) {
        Eight<Format> inputs[STEPS_AHEAD];
#pragma unroll
        for (int i = 0; i < STEPS_AHEAD; i++)
            if (first + i < steps) inputs[i].load(x + (first + i) * n, place);
#pragma unroll
        for (int i = 0; i < STEPS_AHEAD; i++) {
            if (first + i >= steps) break;
            float h[8];
#pragma unroll
            for (int j = 0; j < 8; j++) h[j] = inputs[i].value(j);
            charge<8>(h, v, neuron);
            u32 fired = 0;
#pragma unroll
            for (int j = 0; j < 8; j++) {
                bool spike = h[j] >= neuron.threshold;
                fired |= u32(spike) << j;
                v[j] = after_reset(h[j], spike, neuron);
            }
            if (spikes) Eight<Format>::store_spikes(spikes + (first + i) * n, place, fired);
            if (bits) {
                u32 byte = Eight<Format>::byte_of(fired, lane);
                if (place.byte_inside) bits[(first + i) * (n / 8) + place.byte] = u8(byte);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < 2; i++)
        if (place.inside[i])
            *reinterpret_cast<float4*>(v_final + place.four[i]) =
                make_float4(v[4 * i], v[4 * i + 1], v[4 * i + 2], v[4 * i + 3]);
}

// Any other x, as [T, rows, columns]: a lane carries one position, a warp 32 columns of a row. Each row of each step
// has ceil(columns / 8) bytes of bits, the last padded with zeros.
template <typename Format>
__device__ __forceinline__ void forward_rows(const typename Format::type* x, const float* v0, float v_start,
                                             typename Format::type* spikes, u8* bits, float* v_final, i64 rows,
                                             i64 columns, int steps, const Neuron& neuron) {
    int lane = threadIdx.x % 32;
    i64 warp = i64(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
    i64 warps_of_row = (columns + 31) / 32, row_bytes = (columns + 7) / 8, n = rows * columns;
    i64 row = warp / warps_of_row, column = warp % warps_of_row * 32;
    if (row >= rows) return;  // the whole warp
    bool inside = column + lane < columns;
    bool byte_inside = lane < 4 && column / 8 + lane < row_bytes;
    i64 position = row * columns + column + lane, byte = row * row_bytes + column / 8 + lane;
    float v[1] = {v0 && inside ? v0[position] : v_start};
    for (int first = 0; first < steps; first += STEPS_AHEAD) {
        float h[STEPS_AHEAD][1];
#pragma unroll
        for (int i = 0; i < STEPS_AHEAD; i++) {
            h[i][0] = 0.0f;
            if (inside && first + i < steps) h[i][0] = Format::widen(x[(first + i) * n + position]);
        }
#pragma unroll
        for (int i = 0; i < STEPS_AHEAD; i++) {
            if (first + i >= steps) break;
            charge<1>(h[i], v, neuron);
            bool spike = inside && h[i][0] >= neuron.threshold;
            v[0] = after_reset(h[i][0], spike, neuron);
            if (spikes && inside) spikes[(first + i) * n + position] = Format::spike(spike);
            if (bits) {
                u32 fired = __ballot_sync(FULL_WARP, spike);
                if (byte_inside) bits[(first + i) * rows * row_bytes + byte] = u8(fired >> (8 * lane));
            }
        }
    }
    if (inside) v_final[position] = v[0];
}

#define FORWARD(name, Format)                                                                                          \
    extern "C" __global__ void __launch_bounds__(256, 3)                                                               \
        neuron_forward_##name(const Format::type* x, const float* v0, float v_start, Format::type* spikes, u8* bits,   \
                              float* v_final, i64 n, int steps, int charge, int divide, float tau, float threshold,    \
                              int hard, float reset) {                                                                 \
        Neuron neuron = {charge, divide, tau, threshold, hard, reset};                                                 \
        forward_eights<Format>(x, v0, v_start, spikes, bits, v_final, n, steps, neuron);                               \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(256, 3) neuron_forward_rows_##name(                                   \
        const Format::type* x, const float* v0, float v_start, Format::type* spikes, u8* bits, float* v_final,         \
        i64 rows, i64 columns, int steps, int charge, int divide, float tau, float threshold, int hard, float reset) { \
        Neuron neuron = {charge, divide, tau, threshold, hard, reset};                                                 \
        forward_rows<Format>(x, v0, v_start, spikes, bits, v_final, rows, columns, steps, neuron);                     \
    }

FORWARD(float32, Float32)
FORWARD(float16, Float16)
FORWARD(bfloat16, Bfloat16)

// ---------------------------------------------------------------------------------------------------------------------
// Surrogate derivatives at u = h - threshold: the seven formulas as five families, with constants that the host
// computes. Factors of 1 and offsets of 0 change no bit, so each formula keeps its own order of operations.

enum { RATIONAL = 0, QUADRATIC = 1, EXPONENTIAL = 2, GAUSSIAN = 3, LOGISTIC = 4 };

struct Surrogate {
    int family;
    float scale;
    float shift;
    float factor;
    float offset;
    float outer;
};

template <int family>
__device__ __forceinline__ float derivative(float u, const Surrogate& surrogate) {
    if (family == RATIONAL) {  // outer / (factor z^2 + offset), z = scale |u| + shift
        float z = __fadd_rn(__fmul_rn(fabsf(u), surrogate.scale), surrogate.shift);
        float square = __fadd_rn(__fmul_rn(__fmul_rn(z, surrogate.factor), z), surrogate.offset);
        return __fmul_rn(__fdiv_rn(1.0f, square), surrogate.outer);
    }
    if (family == QUADRATIC) {  // max(0, outer - scale |u|), NaN stays
        float z = __fsub_rn(surrogate.outer, __fmul_rn(fabsf(u), surrogate.scale));
        return z < 0.0f ? 0.0f : z;
    }
    if (family == EXPONENTIAL)  // outer e^(-scale |u|)
        return __fmul_rn(expf(-__fmul_rn(fabsf(u), surrogate.scale)), surrogate.outer);
    float z = __fmul_rn(u, surrogate.scale);
    if (family == GAUSSIAN)  // outer e^(-(scale u)^2)
        return __fmul_rn(expf(__fmul_rn(-z, z)), surrogate.outer);
    float s = __fdiv_rn(1.0f, __fadd_rn(1.0f, expf(-z)));  // outer (1 - s) s, s = sigmoid(scale u)
    return __fmul_rn(__fmul_rn(__fsub_rn(1.0f, s), s), surrogate.outer);
}

// ---------------------------------------------------------------------------------------------------------------------
// Backward. With c the gradient that arrives at the potential after step t, g_s at its spike, and sg the surrogate
// derivative at h - threshold,
//     hard    G = g_s - c h + c v_reset,   g_h = G sg + c (1 - s)
//     soft    G = g_s - c threshold,       g_h = G sg + c
//     where the reset is detached, G = g_s
//     g_x = g_h, or g_h / tau where the input decays;     c = g_h, or g_h - g_h / tau for LIF
// in the order in which autograd adds up the gradients of the loop,
// from the last step to the first. Nothing was stored: h is computed again, PIECE steps at a time, in registers. The
// potentials at which the pieces between the first two and the last begin are put down in `starts` on the way forward.
//
// grad_x may be grad_spike itself: a thread has read a step's gradient before it writes there.

// Two neighbouring positions of a thread: in one access where n is even and the addresses allow it (`paired`), else one
// by one, and the second only where it exists.
struct Pair {
    i64 position;
    bool paired;
    bool second;
};

__device__ __forceinline__ void load_pair(const float* row, const Pair& pair, float values[2]) {
    if (pair.paired) {
        float2 both = *reinterpret_cast<const float2*>(row + pair.position);
        values[0] = both.x, values[1] = both.y;
    } else {
        values[0] = row[pair.position];
        if (pair.second) values[1] = row[pair.position + 1];
    }
}

__device__ __forceinline__ void store_pair(float* row, const Pair& pair, const float values[2]) {
    if (pair.paired) {
        *reinterpret_cast<float2*>(row + pair.position) = make_float2(values[0], values[1]);
    } else {
        row[pair.position] = values[0];
        if (pair.second) row[pair.position + 1] = values[1];
    }
}

template <typename Format>
struct PairOf {
    static __device__ __forceinline__ void load(const u16* row, const Pair& pair, float values[2]) {
        u32 both;
        if (pair.paired) {
            both = *reinterpret_cast<const u32*>(row + pair.position);
        } else {
            both = row[pair.position];
            if (pair.second) both |= u32(row[pair.position + 1]) << 16;
        }
        values[0] = Format::widen(u16(both & 0xffffu)), values[1] = Format::widen(u16(both >> 16));
    }

    static __device__ __forceinline__ void store(u16* row, const Pair& pair, const float values[2]) {
        u16 first = Format::narrow(values[0]), second = Format::narrow(values[1]);
        if (pair.paired) {
            *reinterpret_cast<u32*>(row + pair.position) = u32(first) | u32(second) << 16;
        } else {
            row[pair.position] = first;
            if (pair.second) row[pair.position + 1] = second;
        }
    }
};

template <>
struct PairOf<Float32> {
    static __device__ __forceinline__ void load(const float* row, const Pair& pair, float values[2]) {
        load_pair(row, pair, values);
    }
    static __device__ __forceinline__ void store(float* row, const Pair& pair, const float values[2]) {
        store_pair(row, pair, values);
    }
};

// Steps of a piece.
#define PIECE 8

// The last `steps` of a piece, from potentials h and gradients of spikes g: writes the gradients of x, updates carry.
template <typename Format, int family>
__device__ __forceinline__ void unwind(const float h[PIECE][2], float g[PIECE][2], float carry[2],
                                       typename Format::type* grad_x, const Pair& pair, i64 n, int steps, int detach,
                                       const Surrogate& surrogate, const Neuron& neuron) {
#pragma unroll
    for (int i = PIECE - 1; i >= 0; i--) {
        if (i >= steps) continue;
        float leak[2];
#pragma unroll
        for (int j = 0; j < 2; j++) {
            float sg = derivative<family>(__fsub_rn(h[i][j], neuron.threshold), surrogate);
            float grad = g[i][j];
            float passed = carry[j];
            if (neuron.hard) {
                if (!detach) {
                    grad = __fsub_rn(grad, __fmul_rn(passed, h[i][j]));
                    grad = __fadd_rn(grad, __fmul_rn(passed, neuron.reset));
                }
                passed = __fmul_rn(passed, h[i][j] >= neuron.threshold ? 0.0f : 1.0f);
            } else if (!detach) {
                grad = __fsub_rn(grad, __fmul_rn(passed, neuron.threshold));
            }
            leak[j] = g[i][j] = __fadd_rn(__fmul_rn(grad, sg), passed);
        }
        if (neuron.charge != CHARGE_IF) decay<2>(leak, neuron);
#pragma unroll
        for (int j = 0; j < 2; j++) {
            carry[j] = neuron.charge == CHARGE_IF ? g[i][j] : __fsub_rn(g[i][j], leak[j]);
            if (neuron.charge == CHARGE_LIF_DECAYED_INPUT) g[i][j] = leak[j];
        }
        PairOf<Format>::store(grad_x + i * n, pair, g[i]);
    }
}

template <typename Format>
__device__ __forceinline__ void backward(const typename Format::type* x, const float* v0, float v_start,
                                         const typename Format::type* grad_spike, const float* grad_v_final,
                                         typename Format::type* grad_x, float* grad_v0, float* starts, i64 n, int steps,
                                         int paired, int detach, const Surrogate& surrogate, const Neuron& neuron) {
    Pair pair;
    pair.position = (i64(blockIdx.x) * blockDim.x + threadIdx.x) * 2;
    pair.paired = paired;
    pair.second = pair.position + 1 < n;
    if (pair.position >= n) return;
    float v[2] = {v_start, v_start}, carry[2] = {0.0f, 0.0f};
    if (v0) load_pair(v0, pair, v);
    if (grad_v_final) load_pair(grad_v_final, pair, carry);

    // Piece 0, 1, ..., last, and back again: last - 1, ..., 0. On the way forward only potentials are computed.
    int last = (steps + PIECE - 1) / PIECE - 1;
    for (int visit = 0; visit <= 2 * last; visit++) {
        bool forward = visit < last;
        int piece = visit <= last ? visit : 2 * last - visit;
        if (visit > last) {
            v[0] = v[1] = v_start;
            if (piece > 0)
                load_pair(starts + (piece - 1) * n, pair, v);
            else if (v0)
                load_pair(v0, pair, v);
        } else if (visit > 0 && forward) {
            store_pair(starts + (piece - 1) * n, pair, v);
        }
        i64 begin = i64(piece) * PIECE * n;
        int here = steps - piece * PIECE;

        float h[PIECE][2], g[PIECE][2];
#pragma unroll
        for (int i = 0; i < PIECE; i++) {
            h[i][0] = h[i][1] = g[i][0] = g[i][1] = 0.0f;
            if (i < here) PairOf<Format>::load(x + begin + i * n, pair, h[i]);
        }
        if (!forward && grad_spike) {
#pragma unroll
            for (int i = 0; i < PIECE; i++)
                if (i < here) PairOf<Format>::load(grad_spike + begin + i * n, pair, g[i]);
        }
#pragma unroll
        for (int i = 0; i < PIECE; i++) {
            if (i >= here) break;
            charge<2>(h[i], v, neuron);
#pragma unroll
            for (int j = 0; j < 2; j++) v[j] = after_reset(h[i][j], h[i][j] >= neuron.threshold, neuron);
        }
        if (forward) continue;

        typename Format::type* to = grad_x + begin;
        switch (surrogate.family) {
            case RATIONAL: unwind<Format, RATIONAL>(h, g, carry, to, pair, n, here, detach, surrogate, neuron); break;
            case QUADRATIC: unwind<Format, QUADRATIC>(h, g, carry, to, pair, n, here, detach, surrogate, neuron); break;
            case EXPONENTIAL:
                unwind<Format, EXPONENTIAL>(h, g, carry, to, pair, n, here, detach, surrogate, neuron);
                break;
            case GAUSSIAN: unwind<Format, GAUSSIAN>(h, g, carry, to, pair, n, here, detach, surrogate, neuron); break;
            default: unwind<Format, LOGISTIC>(h, g, carry, to, pair, n, here, detach, surrogate, neuron);
        }
    }
    if (grad_v0) store_pair(grad_v0, pair, carry);
}

#define BACKWARD(name, Format)                                                                                         \
    extern "C" __global__ void __launch_bounds__(256, 3) neuron_backward_##name(                                       \
        const Format::type* x, const float* v0, float v_start, const Format::type* grad_spike,                         \
        const float* grad_v_final, Format::type* grad_x, float* grad_v0, float* starts, i64 n, int steps, int paired,  \
        int charge, int divide, float tau, float threshold, int hard, float reset, int detach, int family,             \
        float scale, float shift, float factor, float offset, float outer) {                                           \
        Neuron neuron = {charge, divide, tau, threshold, hard, reset};                                                 \
        Surrogate surrogate = {family, scale, shift, factor, offset, outer};                                           \
        backward<Format>(x, v0, v_start, grad_spike, grad_v_final, grad_x, grad_v0, starts, n, steps, paired, detach,  \
                         surrogate, neuron);                                                                           \
    }

BACKWARD(float32, Float32)
BACKWARD(float16, Float16)
BACKWARD(bfloat16, Bfloat16)
