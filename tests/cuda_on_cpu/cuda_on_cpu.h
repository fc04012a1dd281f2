// Runs CUDA kernels on the CPU: takes the place of the second half of cuda/device.cuh when CPU_SHIM is defined.
//
// Blocks run one after another. Every CUDA thread of a block is a fiber with a stack of its own, which runs until it
// has to wait for others: at __syncthreads, at a warp's vote, shuffle or matrix instruction, or (drawn at random) at an
// atomic. Then another fiber is picked: the first that can run where the seed is 0, one at random otherwise, so that
// a missing barrier shows as a wrong result. The last lane to reach a warp's operation computes it for all lanes.
//
// What a GPU leaves undefined is made to show: shared memory starts as poison, a copy that was not waited for reads as
// poison, a shuffle from a lane that has returned gives poison, sums of a product that runs on are poison. What a GPU
// forbids ends the launch with a message: barriers that not all threads reach, misaligned or wild accesses, writes
// beyond the dynamic shared memory, writes to what a product that runs on reads.
// As with -ftz=true, float32 arithmetic takes and gives zero in place of subnormal numbers (on x86-64).
//
// Not imitated: how tensor cores round, the last bits of expf and its like, what a cast of a float beyond the integers
// gives, threads that interleave between two waits, and blocks that wait for each other.
#pragma once

// With CUDA_ON_CPU_PARSE nothing is defined, so that preprocessing leaves the CUDA keywords in the text.
#ifndef CUDA_ON_CPU_PARSE

#include <csetjmp>
#include <csignal>
#include <cmath>
#include <cstdarg>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <link.h>
#include <list>
#include <pthread.h>
#include <sys/mman.h>
#include <type_traits>
#include <utility>
#include <vector>
#include <ucontext.h>
#if defined(__x86_64__)
#include <immintrin.h>
#else
#define CUDA_ON_CPU_UCONTEXT
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#define __device__
#define __global__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __launch_bounds__(...)
#define __constant__ static

// The loader rewrites `extern __shared__` to `extern __dynamic_shared__`. Static shared memory is thread-local, since
// everything thread-local of a library lies in one block of memory, which can be poisoned. AddressSanitizer puts guard
// zones around static variables only.
#define __dynamic_shared__
#if defined(__SANITIZE_ADDRESS__)
#define __shared__ static
#else
#define __shared__ thread_local
#endif

// ---------------------------------------------------------------------------------------------------------------------
// Vector types

struct alignas(2) uchar2 { u8 x, y; };
struct alignas(4) uchar4 { u8 x, y, z, w; };
struct alignas(4) ushort2 { u16 x, y; };
struct alignas(8) ushort4 { u16 x, y, z, w; };
struct alignas(8) int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(8) uint2 { u32 x, y; };
struct alignas(16) uint4 { u32 x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(16) ulonglong2 { u64 x, y; };
struct uint3 { u32 x, y, z; };
typedef uint3 dim3;

inline uchar2 make_uchar2(u8 x, u8 y) { return {x, y}; }
inline uchar4 make_uchar4(u8 x, u8 y, u8 z, u8 w) { return {x, y, z, w}; }
inline ushort2 make_ushort2(u16 x, u16 y) { return {x, y}; }
inline ushort4 make_ushort4(u16 x, u16 y, u16 z, u16 w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline ulonglong2 make_ulonglong2(u64 x, u64 y) { return {x, y}; }

static uint3 threadIdx, blockIdx;
static dim3 blockDim, gridDim;
static const int warpSize = 32;

static const size_t MAX_DYNAMIC_SHARED = 227 * 1024;
static const size_t DYNAMIC_SHARED_GUARD = 4096;
alignas(16) unsigned char dynamic_shared[MAX_DYNAMIC_SHARED + DYNAMIC_SHARED_GUARD];
// Where it begins in the address space of shared memory: aligned to 16 bytes and no more.
static const u32 DYNAMIC_SHARED_ADDRESS = 1024 + 16;

namespace cuda_on_cpu {

static const u32 MAX_THREADS = 1024;
static const size_t STACK_BYTES = 128 * 1024;
static const size_t PAGE_BYTES = 4096;
static const u8 POISON = 0xff;  // a NaN in every floating-point type
static const u8 GUARD = 0xa5;
static const int POISONED_BLOCKS = 16;  // of a launch, so that a large grid does not spend its time on poisoning

// ---------------------------------------------------------------------------------------------------------------------
// Fibers

struct Copy {
    void* shared;
    const void* global;
    int bytes;
    int valid;
    u32 group;
};

struct Fiber {
    unsigned char* stack;
#if !defined(CUDA_ON_CPU_UCONTEXT)
    void* stack_pointer;
#else
    ucontext_t context;
#endif
    const char* waits_for;  // null: runs, can run or has returned
    int line;
    u32 mask;
    void* record;
    u32 groups;  // committed groups of asynchronous copies
    std::vector<Copy> copies;
    u32 published;  // how often it has made its writes to shared memory visible to products of a warpgroup
};

struct Warp {
    u32 lanes;    // that the block has
    u32 ready;    // can run
    u32 waiting;  // at an operation of the warp
    u32 returned;
};

typedef void (*Entry)(void** arguments);
// Computes a warp's operation; records[lane] is null for a lane that takes no part.
typedef void (*Combine)(void* records[32]);

enum class Order { first, any_warp, favoured_warp };

struct Launch {
    Entry entry;
    void** arguments;
    u32 threads;
    size_t shared_bytes;
    u64 random;
    Order order;
};

static Launch launch;
static Fiber fibers[MAX_THREADS];
static u32 fibers_made;
static Warp warps[32];
static u8 warp_order[32];
static u32 ready_warps;
static u32 current;
static u32 returned;       // threads of the block that have returned
static u32 last_returned;  // one of them
static u32 at_barrier;
static int barrier_line;
static bool failed;
static char message[4096];
static sigjmp_buf after_signal;
#if !defined(CUDA_ON_CPU_UCONTEXT)
static void* scheduler_stack_pointer;
#else
static ucontext_t scheduler_context;
#endif
#if defined(__SANITIZE_ADDRESS__)
static const void* scheduler_stack;
static size_t scheduler_stack_bytes;
#endif

inline u64 random_bits() {
    u64 z = launch.random += 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

#if !defined(CUDA_ON_CPU_UCONTEXT)
asm(R"(
    .text
    .local cuda_on_cpu_switch
    .type cuda_on_cpu_switch, @function
cuda_on_cpu_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
    .size cuda_on_cpu_switch, .-cuda_on_cpu_switch
)");
extern "C" __attribute__((visibility("hidden"))) void cuda_on_cpu_switch(void** from, void* to);
#endif

// Continues fiber `to`, or the scheduler if `to` is MAX_THREADS; `from` is what runs now, in the same numbering.
inline void switch_fibers(u32 from, u32 to) {
#if defined(__SANITIZE_ADDRESS__)
    void* fake_stack;
    if (to == MAX_THREADS) {
        __sanitizer_start_switch_fiber(&fake_stack, scheduler_stack, scheduler_stack_bytes);
    } else {
        __sanitizer_start_switch_fiber(&fake_stack, fibers[to].stack, STACK_BYTES);
    }
#endif
    if (to != MAX_THREADS) {
        current = to;
        threadIdx.x = to;
    }
#if !defined(CUDA_ON_CPU_UCONTEXT)
    cuda_on_cpu_switch(
        from == MAX_THREADS ? &scheduler_stack_pointer : &fibers[from].stack_pointer,
        to == MAX_THREADS ? scheduler_stack_pointer : fibers[to].stack_pointer);
#else
    swapcontext(from == MAX_THREADS ? &scheduler_context : &fibers[from].context,
                to == MAX_THREADS ? &scheduler_context : &fibers[to].context);
#endif
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
#endif
}

[[noreturn]] inline void stop(const char* format, ...) {
    va_list values;
    va_start(values, format);
    vsnprintf(message, sizeof message, format, values);
    va_end(values);
    failed = true;
    switch_fibers(current, MAX_THREADS);
    __builtin_unreachable();
}

inline int random_bit_of(u32 bits) {
    u32 turn = random_bits() & 31;
    u32 turned = turn ? (bits >> turn) | (bits << (32 - turn)) : bits;
    return (__builtin_ctz(turned) + turn) & 31;
}

// Takes a fiber that can run; MAX_THREADS if there is none.
inline u32 pick() {
    if (!ready_warps) return MAX_THREADS;
    int warp, lane;
    switch (launch.order) {
        case Order::first:
            warp = __builtin_ctz(ready_warps);
            lane = __builtin_ctz(warps[warp].ready);
            break;
        case Order::any_warp:
            warp = random_bit_of(ready_warps);
            lane = random_bit_of(warps[warp].ready);
            break;
        default: {
            int i = 0;
            while (!(ready_warps >> warp_order[i] & 1)) i++;
            warp = warp_order[i];
            lane = random_bit_of(warps[warp].ready);
        }
    }
    warps[warp].ready &= ~(1u << lane);
    if (!warps[warp].ready) ready_warps &= ~(1u << warp);
    return warp * 32 + lane;
}

inline void make_ready(int warp, u32 lanes) {
    warps[warp].ready |= lanes;
    ready_warps |= 1u << warp;
}

// Lets others run; returns when this fiber is picked again.
inline void wait() {
    u32 self = current, next = pick();
    if (next != self) switch_fibers(self, next);
}

inline void maybe_yield() {
    if (launch.order == Order::first || (random_bits() & 3)) return;
    make_ready(current / 32, 1u << current % 32);
    wait();
}

// ---------------------------------------------------------------------------------------------------------------------
// Meeting points

// Runs the operation that `lane` waits at if all lanes of its mask that have not returned wait at it too.
inline void complete(int warp_index, int lane, Combine combine) {
    Warp& warp = warps[warp_index];
    Fiber* lanes = fibers + warp_index * 32;
    Fiber& first = lanes[lane];
    u32 present = first.mask & warp.lanes & ~warp.returned;
    if ((warp.waiting & present) != present) return;
    for (u32 rest = present; rest; rest &= rest - 1) {
        if (lanes[__builtin_ctz(rest)].mask != first.mask) return;
    }
    void* records[32];
    for (int i = 0; i < 32; i++) {
        records[i] = nullptr;
        if (!(present >> i & 1)) continue;
        records[i] = lanes[i].record;
        if (lanes[i].waits_for != first.waits_for || lanes[i].line != first.line) {
            stop("the lanes of a warp diverge: thread %d is at %s (line %d), thread %d at %s (line %d), with the same "
                 "mask 0x%08x",
                 warp_index * 32 + lane, first.waits_for, first.line, warp_index * 32 + i, lanes[i].waits_for,
                 lanes[i].line, first.mask);
        }
    }
    if (combine) combine(records);
    for (u32 rest = present; rest; rest &= rest - 1) lanes[__builtin_ctz(rest)].waits_for = nullptr;
    warp.waiting &= ~present;
    make_ready(warp_index, present);
}

// A lane that returns may complete an operation that the rest of its warp waits at, so each record starts with how to
// compute it.
struct Record {
    Combine combine;
};

inline void meet(const char* operation, int line, u32 mask, Record* record) {
    int warp_index = current / 32, lane = current % 32;
    if (!(mask >> lane & 1)) {
        stop("thread %u calls %s (line %d) with the mask 0x%08x, which leaves out its own lane %d", current, operation,
             line, mask, lane);
    }
    Fiber& self = fibers[current];
    self.waits_for = operation;
    self.line = line;
    self.mask = mask;
    self.record = record;
    warps[warp_index].waiting |= 1u << lane;
    complete(warp_index, lane, record->combine);
    wait();
}

inline void require_whole_warp(void* records[32], const char* operation) {
    for (int i = 0; i < 32; i++) {
        if (!records[i]) stop("%s needs all 32 lanes of the warp: lane %d is missing or has returned", operation, i);
    }
}

inline void meet_block(int line) {
    if (returned) {
        stop("thread %u reaches __syncthreads (line %d) after thread %u has returned", current, line, last_returned);
    }
    if (at_barrier && barrier_line != line) {
        stop("thread %u is at __syncthreads of line %d, others at that of line %d", current, line, barrier_line);
    }
    barrier_line = line;
    fibers[current].waits_for = "__syncthreads";
    fibers[current].line = line;
    if (++at_barrier == launch.threads) {
        at_barrier = 0;
        for (u32 i = 0; i < launch.threads; i++) fibers[i].waits_for = nullptr;
        for (u32 w = 0; w * 32 < launch.threads; w++) make_ready(w, warps[w].lanes);
    }
    wait();
}

// ---------------------------------------------------------------------------------------------------------------------
// Asynchronous copies: shared memory holds poison from the start of a copy until it was waited for.

// Who landed a copy last in each 16 bytes of the dynamic shared memory, and how often it had published before.
struct Writer {
    u32 thread;  // counted from 1; 0: nobody
    u32 published;
};
static Writer writers[MAX_DYNAMIC_SHARED / 16];

inline void note_writer(const void* shared, u32 thread, u32 published) {
    size_t offset = static_cast<const unsigned char*>(shared) - dynamic_shared;
    if (offset < MAX_DYNAMIC_SHARED) writers[offset / 16] = {thread + 1, published};
}

inline void land(Fiber& fiber, u32 groups) {
    size_t kept = 0;
    for (const Copy& copy : fiber.copies) {
        if (copy.group >= groups) {
            fiber.copies[kept++] = copy;
            continue;
        }
        memset(copy.shared, 0, copy.bytes);
        memcpy(copy.shared, copy.global, copy.valid);
        note_writer(copy.shared, u32(&fiber - fibers), fiber.published);
    }
    fiber.copies.resize(kept);
}

struct KeepSubnormals {
#if defined(__x86_64__)
    unsigned before = _mm_getcsr();
    KeepSubnormals() { _mm_setcsr(before & ~0x8040u); }
    ~KeepSubnormals() { _mm_setcsr(before); }
#endif
};

// ---------------------------------------------------------------------------------------------------------------------
// Products of a warpgroup, warp by warp: a warp's part needs nothing of the others' registers. A product is computed
// when it is waited for, from what it found when it was started; what has changed in between is a fault.

struct Sums {  // of one warp: 16 rows of 128
    float* at[32];  // the array of each lane: poison while products run
    float values[32][64];
    u32 running;
};

struct Product {
    Sums* sums;
    const u32* a_at[32];
    u32 a[32][4];
    u16 b[128][16];
    u64 descriptor;
    float (*widen)(u16);
    u32 group;
    int line;
};

struct WarpProducts {
    std::list<Product> running;
    std::list<Sums> sums;
    u32 groups;   // committed
    bool fenced;  // since the last commit
    u32 started;
};

static WarpProducts warp_products[32];
static std::vector<u64> group_descriptors[8];  // of the products that each warpgroup has started

inline void forget_products() {
    for (auto& warp : warp_products) {
        warp.running.clear();
        warp.sums.clear();
        warp.groups = warp.started = 0;
        warp.fenced = false;
    }
    for (auto& descriptors : group_descriptors) descriptors.clear();
}

inline void compare_warps() {
    for (u32 w = 0; w * 32 < launch.threads; w++) {
        if (warp_products[w].started == group_descriptors[w / 4].size()) continue;
        snprintf(message, sizeof message, "warp %u starts %u products, another warp of its warpgroup %zu", w,
                 warp_products[w].started, group_descriptors[w / 4].size());
        failed = true;
    }
}

// Reads b by its descriptor, as "matrix descriptor" and "128-byte swizzling mode, K-major" of the PTX manual say.
inline void read_b(u64 descriptor, int line, u16 b[128][16], bool check_published) {
    u32 start = u32(descriptor & 0x3fff) * 16, stride = u32(descriptor >> 32 & 0x3fff) * 16;
    if (descriptor >> 62 != 1 || (descriptor >> 49 & 7)) {
        stop("a product (line %d) by the descriptor 0x%016llx: only 128-byte swizzling from base offset 0 is imitated",
             line, descriptor);
    }
    if (start & 0x380) {
        stop("a product (line %d) by the descriptor 0x%016llx: b is not aligned to 1024 bytes", line, descriptor);
    }
    if ((start & 127) > 96) stop("a product (line %d) reads b across the end of its rows of 128 bytes", line);
    for (u32 n = 0; n < 128; n++) {
        for (u32 k = 0; k < 16; k += 8) {
            u32 address = start + n / 8 * stride + n % 8 * 128 + 2 * k;
            address ^= (address >> 7 & 7) << 4;
            u32 offset = address - DYNAMIC_SHARED_ADDRESS;
            if (address < DYNAMIC_SHARED_ADDRESS || offset + 16 > launch.shared_bytes) {
                stop("a product (line %d) reads b outside the dynamic shared memory", line);
            }
            const Writer& writer = writers[offset / 16];
            if (check_published && writer.thread && fibers[writer.thread - 1].published == writer.published) {
                stop("a product (line %d) reads what thread %u has copied and not published by wgmma_publish_shared",
                     line, writer.thread - 1);
            }
            memcpy(&b[n][k], dynamic_shared + offset, 16);
        }
    }
}

inline bool all_poison(const float* values) {
    for (int i = 0; i < 64; i++) {
        u32 bits;
        memcpy(&bits, values + i, 4);
        if (bits != 0xffffffffu) return false;
    }
    return true;
}

inline void require_untouched(const Sums& sums, int warp, int line) {
    for (int lane = 0; lane < 32; lane++) {
        if (!all_poison(sums.at[lane])) {
            stop("thread %d writes to the sums of a product that runs (line %d)", warp * 32 + lane, line);
        }
    }
}

__attribute__((optimize("O3"))) inline void multiply_rows(
    float d[16][128], const float a[16][16], const float b[16][128]) {
    for (int row = 0; row < 16; row++) {
        for (int k = 0; k < 16; k++) {
            for (int column = 0; column < 128; column++) d[row][column] += a[row][k] * b[k][column];
        }
    }
}

inline void finish_product(Product& product, int warp) {
    static u16 now[128][16];
    read_b(product.descriptor, product.line, now, false);
    if (memcmp(now, product.b, sizeof now)) {
        stop("the shared memory that a product (line %d) reads changes before it is done", product.line);
    }
    Sums& sums = *product.sums;
    require_untouched(sums, warp, product.line);
    static float a[16][16], b[16][128], d[16][128];
    for (int lane = 0; lane < 32; lane++) {
        int g = lane / 4, t = lane % 4;
        if (memcmp(product.a_at[lane], product.a[lane], sizeof product.a[lane])) {
            stop("thread %d writes to the spikes of a product (line %d) that runs", warp * 32 + lane, product.line);
        }
        for (int i = 0; i < 4; i++) {
            for (int e = 0; e < 2; e++) {
                a[g + i % 2 * 8][i / 2 * 8 + 2 * t + e] = product.widen(u16(product.a[lane][i] >> 16 * e));
            }
        }
        for (int i = 0; i < 64; i++) d[g + i / 2 % 2 * 8][i / 4 * 8 + 2 * t + i % 2] = sums.values[lane][i];
    }
    for (int n = 0; n < 128; n++) {
        for (int k = 0; k < 16; k++) b[k][n] = product.widen(product.b[n][k]);
    }
    {
        KeepSubnormals keep;  // tensor cores do
        (void)keep;
        multiply_rows(d, a, b);
    }
    for (int lane = 0; lane < 32; lane++) {
        int g = lane / 4, t = lane % 4;
        for (int i = 0; i < 64; i++) sums.values[lane][i] = d[g + i / 2 % 2 * 8][i / 4 * 8 + 2 * t + i % 2];
    }
    if (--sums.running) return;
    for (int lane = 0; lane < 32; lane++) memcpy(sums.at[lane], sums.values[lane], sizeof sums.values[lane]);
    warp_products[warp].sums.remove_if([](const Sums& old) { return !old.running; });
}

struct Wgmma : Record {
    float* d;
    const u32* a;
    u64 b;
    float (*widen)(u16);
    int line;

    static void combine_start(void* records[32]) {
        require_whole_warp(records, "wgmma");
        int warp_index = current / 32;
        WarpProducts& warp = warp_products[warp_index];
        auto& first = *static_cast<Wgmma*>(records[0]);
        if (launch.threads < u32(warp_index / 4 + 1) * 128) {
            stop("a product (line %d) of a warpgroup that has fewer than four warps", first.line);
        }
        if (!warp.fenced) {
            stop("warp %d starts a product (line %d) without wgmma_fence since the last commit", warp_index,
                 first.line);
        }
        auto& descriptors = group_descriptors[warp_index / 4];
        if (warp.started == descriptors.size()) descriptors.push_back(first.b);
        for (int lane = 0; lane < 32; lane++) {
            if (static_cast<Wgmma*>(records[lane])->b != descriptors[warp.started]) {
                stop("the threads of a warpgroup start a product (line %d) by different descriptors", first.line);
            }
        }
        warp.started++;
        Sums* sums = nullptr;
        for (auto& known : warp.sums) {
            if (known.at[0] == first.d) sums = &known;
        }
        if (sums) {
            require_untouched(*sums, warp_index, first.line);
        } else {
            sums = &warp.sums.emplace_back();
            sums->running = 0;
        }
        Product& product = warp.running.emplace_back();
        for (int lane = 0; lane < 32; lane++) {
            auto& record = *static_cast<Wgmma*>(records[lane]);
            if (sums->running) {
                if (sums->at[lane] != record.d) {
                    stop("the lanes of a warp add to different sums (line %d)", record.line);
                }
            } else {
                sums->at[lane] = record.d;
                memcpy(sums->values[lane], record.d, sizeof sums->values[lane]);
                memset(record.d, POISON, sizeof sums->values[lane]);
            }
            product.a_at[lane] = record.a;
            memcpy(product.a[lane], record.a, sizeof product.a[lane]);
        }
        sums->running++;
        product.sums = sums;
        product.descriptor = first.b;
        product.widen = first.widen;
        product.group = warp.groups;
        product.line = first.line;
        read_b(first.b, first.line, product.b, true);
    }

    static void combine_fence(void* records[32]) {
        require_whole_warp(records, "wgmma_fence");
        warp_products[current / 32].fenced = true;
    }

    static void combine_commit(void* records[32]) {
        require_whole_warp(records, "wgmma_commit");
        warp_products[current / 32].groups++;
        warp_products[current / 32].fenced = false;
    }

    template <u32 pending>
    static void combine_wait(void* records[32]) {
        require_whole_warp(records, "wgmma_wait");
        WarpProducts& warp = warp_products[current / 32];
        while (!warp.running.empty() && warp.running.front().group + pending < warp.groups) {
            finish_product(warp.running.front(), current / 32);
            warp.running.pop_front();
        }
    }
};

inline void meet_warp(const char* operation, int line, Combine combine) {
    Wgmma record;
    record.combine = combine;
    record.line = line;
    meet(operation, line, FULL_WARP, &record);
}

inline void start_product(float* d, const u32* a, u64 b, float (*widen)(u16), int line) {
    Wgmma record;
    record.combine = Wgmma::combine_start;
    record.d = d;
    record.a = a;
    record.b = b;
    record.widen = widen;
    record.line = line;
    meet("wgmma", line, FULL_WARP, &record);
}

// ---------------------------------------------------------------------------------------------------------------------
// The life of a fiber and of a block

inline void leave() {
    Fiber& self = fibers[current];
    int warp_index = current / 32;
    Warp& warp = warps[warp_index];
    if (!self.copies.empty()) land(self, self.groups + 1);
    if (!warp_products[warp_index].running.empty()) {
        stop("thread %u returns while a product of its warpgroup runs (line %d)", current,
             warp_products[warp_index].running.front().line);
    }
    warp.returned |= 1u << current % 32;
    returned++;
    last_returned = current;
    if (at_barrier) {
        stop("thread %u returns while others wait at __syncthreads (line %d)", current, barrier_line);
    }
    for (u32 rest = warp.waiting; rest; rest &= rest - 1) {
        int lane = __builtin_ctz(rest);
        if (warp.waiting >> lane & 1) {
            complete(warp_index, lane, static_cast<Record*>(fibers[warp_index * 32 + lane].record)->combine);
        }
    }
}

inline void fiber_main() {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr);
#endif
    for (;;) {  // once for each block
        u32 self = current;
        launch.entry(launch.arguments);
        leave();
        switch_fibers(self, pick());
    }
}

inline void make_fiber(Fiber& fiber) {
    if (!fiber.stack) {
        void* memory = mmap(nullptr, STACK_BYTES + PAGE_BYTES, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) {
            snprintf(message, sizeof message, "no memory for the stacks of a block's threads");
            failed = true;
            return;
        }
        mprotect(memory, PAGE_BYTES, PROT_NONE);
        fiber.stack = static_cast<unsigned char*>(memory) + PAGE_BYTES;
    }
#if defined(__SANITIZE_ADDRESS__)
    __asan_unpoison_memory_region(fiber.stack, STACK_BYTES);
#endif
#if !defined(CUDA_ON_CPU_UCONTEXT)
    // Six saved registers, the address of fiber_main, and a null return address, which ends backtraces.
    void** top = reinterpret_cast<void**>(fiber.stack + STACK_BYTES) - 8;
    for (int i = 0; i < 8; i++) top[i] = nullptr;
    top[6] = reinterpret_cast<void*>(&fiber_main);
    fiber.stack_pointer = top;
#else
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack;
    fiber.context.uc_stack.ss_size = STACK_BYTES;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, fiber_main, 0);
#endif
}

struct Region {
    unsigned char* start;
    size_t bytes;
};

// The static shared memory of all kernels of this library, for the calling thread.
inline Region static_shared() {
    // The library's one block of thread-local memory holds nothing but static shared memory and this anchor.
    static thread_local char anchor;
    static ptrdiff_t offset;
    static size_t bytes;
    static bool known;
    if (!known) {
        anchor = 0;
        dl_iterate_phdr(
            [](dl_phdr_info* info, size_t, void*) {
                bool ours = false;
                size_t size = 0;
                uintptr_t here = reinterpret_cast<uintptr_t>(&fibers);
                for (int i = 0; i < info->dlpi_phnum; i++) {
                    const auto& segment = info->dlpi_phdr[i];
                    uintptr_t start = info->dlpi_addr + segment.p_vaddr;
                    if (segment.p_type == PT_LOAD) ours |= here >= start && here < start + segment.p_memsz;
                    if (segment.p_type == PT_TLS) size = segment.p_memsz;
                }
                if (!ours || !info->dlpi_tls_data) return 0;
                offset = static_cast<char*>(info->dlpi_tls_data) - &anchor;
                bytes = size;
                return 1;
            },
            nullptr);
        known = true;
    }
    return {reinterpret_cast<unsigned char*>(&anchor) + offset, bytes};
}

inline bool is_shared(const void* pointer, size_t bytes) {
    auto start = static_cast<const unsigned char*>(pointer);
    if (start >= dynamic_shared && start + bytes <= dynamic_shared + launch.shared_bytes) return true;
#if defined(__SANITIZE_ADDRESS__)
    return true;  // static variables, of which nothing tells shared ones
#else
    Region region = static_shared();
    return start >= region.start && start + bytes <= region.start + region.bytes;
#endif
}

inline void describe_deadlock() {
    int length = snprintf(message, sizeof message, "deadlock:");
    const char* operation = nullptr;
    int line = -1, shown = 0;
    for (u32 i = 0; i < launch.threads && shown < 8; i++) {
        const Fiber& fiber = fibers[i];
        if (!fiber.waits_for || (fiber.waits_for == operation && fiber.line == line)) continue;
        operation = fiber.waits_for;
        line = fiber.line;
        length += snprintf(message + length, sizeof message - length, "%s thread %u waits at %s (line %d)",
                           shown++ ? "," : "", i, operation, line);
    }
    if (returned) snprintf(message + length, sizeof message - length, ", %u threads have returned", returned);
    failed = true;
}

inline void run_block() {
    u32 threads = launch.threads;
    returned = at_barrier = ready_warps = 0;
    for (u32 w = 0; w * 32 < threads; w++) {
        u32 lanes = threads - w * 32 >= 32 ? ~0u : (1u << threads % 32) - 1;
        warps[w] = {lanes, 0, 0, 0};
        make_ready(w, lanes);
    }
    for (u32 i = 0; i < threads; i++) {
        fibers[i].waits_for = nullptr;
        fibers[i].groups = 0;
        fibers[i].copies.clear();
        fibers[i].published = 0;
    }
    forget_products();
    memset(writers, 0, (launch.shared_bytes + 15) / 16 * sizeof(Writer));
    switch_fibers(MAX_THREADS, pick());
    if (!failed && returned != threads) describe_deadlock();
    if (!failed) compare_warps();
}

inline void poison_shared(bool statics) {
#if defined(__SANITIZE_ADDRESS__)
    __asan_unpoison_memory_region(dynamic_shared, sizeof dynamic_shared);
    memset(dynamic_shared, POISON, launch.shared_bytes);
    __asan_poison_memory_region(dynamic_shared + launch.shared_bytes, sizeof dynamic_shared - launch.shared_bytes);
    (void)statics;
#else
    memset(dynamic_shared, POISON, launch.shared_bytes);
    memset(dynamic_shared + launch.shared_bytes, GUARD, DYNAMIC_SHARED_GUARD);
    if (statics) {
        Region region = static_shared();
        memset(region.start, POISON, region.bytes);
    }
#endif
}

inline void check_guard() {
#if !defined(__SANITIZE_ADDRESS__)
    for (size_t i = 0; i < DYNAMIC_SHARED_GUARD; i++) {
        if (dynamic_shared[launch.shared_bytes + i] == GUARD) continue;
        snprintf(message, sizeof message, "a thread wrote at byte %zu of the dynamic shared memory, which has %zu",
                 launch.shared_bytes + i, launch.shared_bytes);
        failed = true;
        return;
    }
#endif
}

// ---------------------------------------------------------------------------------------------------------------------
// Faults of a kernel: wild addresses, and what the compiler's checks trap (misalignment, an index beyond an array)

static const int SIGNALS[] = {SIGSEGV, SIGBUS, SIGILL, SIGTRAP, SIGFPE};

inline void on_signal(int number, siginfo_t* info, void* context) {
    uintptr_t at = 0;
#if defined(__x86_64__)
    at = static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_RIP];
#elif defined(__aarch64__)
    at = static_cast<ucontext_t*>(context)->uc_mcontext.pc;
#else
    (void)context;
#endif
    uintptr_t pair[2] = {at, 0};
    dl_iterate_phdr(
        [](dl_phdr_info* module, size_t, void* data) {
            auto pair = static_cast<uintptr_t*>(data);
            for (int i = 0; i < module->dlpi_phnum; i++) {
                const auto& segment = module->dlpi_phdr[i];
                uintptr_t start = module->dlpi_addr + segment.p_vaddr;
                if (segment.p_type == PT_LOAD && pair[0] >= start && pair[0] < start + segment.p_memsz) {
                    pair[1] = module->dlpi_addr;
                    return 1;
                }
            }
            return 0;
        },
        pair);
    auto address = static_cast<unsigned char*>(info->si_addr);
    const unsigned char* stack = fibers[current].stack;
    const char* fault = "an access outside its memory";
    if (number == SIGFPE) fault = "a division by zero";
    if (number == SIGILL || number == SIGTRAP) {
        fault = "a misaligned access, an index beyond an array or undefined arithmetic";
    }
    if (number == SIGSEGV && address < stack && address >= stack - PAGE_BYTES) {
        fault = "too deep a recursion or too large a local array";
    }
    snprintf(message, sizeof message, "thread %u makes %s (address %p) at code +0x%zx", current, fault,
             number == SIGSEGV || number == SIGBUS ? info->si_addr : nullptr, size_t(at - pair[1]));
    failed = true;
    siglongjmp(after_signal, 1);
}

struct Signals {
#if !defined(__SANITIZE_ADDRESS__)
    struct sigaction before[5];
    stack_t stack_before;
    Signals() {
        static unsigned char stack[64 * 1024];
        stack_t ours{};
        ours.ss_sp = stack;
        ours.ss_size = sizeof stack;
        sigaltstack(&ours, &stack_before);
        struct sigaction action{};
        action.sa_sigaction = on_signal;
        action.sa_flags = SA_SIGINFO | SA_ONSTACK;
        for (int i = 0; i < 5; i++) sigaction(SIGNALS[i], &action, &before[i]);
    }
    ~Signals() {
        for (int i = 0; i < 5; i++) sigaction(SIGNALS[i], &before[i], nullptr);
        sigaltstack(&stack_before, nullptr);
    }
#endif
};

struct FlushSubnormals {
#if defined(__x86_64__)
    unsigned before = _mm_getcsr();
    FlushSubnormals() { _mm_setcsr(before | 0x8040); }
    ~FlushSubnormals() { _mm_setcsr(before); }
#endif
};

inline u64 gcd(u64 a, u64 b) { return b ? gcd(b, a % b) : a; }

// Runs the blocks of a launch from `first_block` to before `last_block`, in their natural order (0, 0: all of them);
// returns null, or what went wrong.
inline const char* run(
    const u32* grid, u32 threads, u64 shared_bytes, u64 seed, Entry entry, void** arguments, u64 first_block,
    u64 last_block) {
    launch = {entry, arguments, threads, shared_bytes, seed, Order::first};
    failed = false;
    gridDim = {grid[0], grid[1], grid[2]};
    blockDim = {threads, 1, 1};
    threadIdx = {0, 0, 0};
    u64 blocks = u64(grid[0]) * grid[1] * grid[2], step = 1, block = first_block;
    u64 count = last_block ? last_block - first_block : blocks;
    if (seed) {
        launch.order = random_bits() & 1 ? Order::any_warp : Order::favoured_warp;
        for (int i = 0; i < 32; i++) {
            int j = random_bits() % (i + 1);
            warp_order[i] = warp_order[j];
            warp_order[j] = i;
        }
        if (!last_block) {
            block = random_bits() % blocks;
            do step = 1 + random_bits() % blocks;
            while (gcd(step, blocks) != 1);
        }
    }
    for (; fibers_made < threads && !failed; fibers_made++) make_fiber(fibers[fibers_made]);
#if defined(__SANITIZE_ADDRESS__)
    pthread_attr_t attributes;
    void* stack;
    pthread_getattr_np(pthread_self(), &attributes);
    pthread_attr_getstack(&attributes, &stack, &scheduler_stack_bytes);
    pthread_attr_destroy(&attributes);
    scheduler_stack = stack;
#endif
    {
        Signals signals;
        FlushSubnormals flush;
        (void)signals;
        (void)flush;
        if (!sigsetjmp(after_signal, 1)) {
            for (u64 i = 0; i < count && !failed; i++, block = (block + step) % blocks) {
                blockIdx = {u32(block % grid[0]), u32(block / grid[0] % grid[1]), u32(block / grid[0] / grid[1])};
                poison_shared(i < POISONED_BLOCKS);
                run_block();
                if (!failed) check_guard();
            }
        }
    }
#if defined(__SANITIZE_ADDRESS__)
    __asan_unpoison_memory_region(dynamic_shared, sizeof dynamic_shared);
#endif
    if (!failed) return nullptr;
    fibers_made = 0;  // fibers that were stopped midway start anew
    size_t length = strlen(message);
    snprintf(message + length, sizeof message - length, "; block (%u, %u, %u)", blockIdx.x, blockIdx.y, blockIdx.z);
    return message;
}

// ---------------------------------------------------------------------------------------------------------------------
// Records of warp operations

struct Vote : Record {
    bool given;
    u32 ballot;
    static void combine_all(void* records[32]) {
        u32 ballot = 0;
        for (int i = 0; i < 32; i++) {
            if (records[i] && static_cast<Vote*>(records[i])->given) ballot |= 1u << i;
        }
        for (int i = 0; i < 32; i++) {
            if (records[i]) static_cast<Vote*>(records[i])->ballot = ballot;
        }
    }
};

inline u32 vote(const char* operation, int line, u32 mask, bool given) {
    Vote record;
    record.combine = Vote::combine_all;
    record.given = given;
    meet(operation, line, mask, &record);
    return record.ballot;
}

struct Shuffle : Record {
    u64 value, result;
    int source;  // a lane
    static void combine_all(void* records[32]) {
        for (int i = 0; i < 32; i++) {
            auto record = static_cast<Shuffle*>(records[i]);
            if (!record) continue;
            auto source = static_cast<Shuffle*>(records[record->source]);
            record->result = source ? source->value : ~0ull;  // poison
        }
    }
};

template <typename T>
inline T shuffle(const char* operation, int line, u32 mask, T value, int source, int width) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "shuffles take values of 4 or 8 bytes");
    if (width < 1 || width > 32 || (width & (width - 1))) {
        stop("thread %u calls %s (line %d) with a width of %d, which is no power of two up to 32", current, operation,
             line, width);
    }
    Shuffle record;
    record.combine = Shuffle::combine_all;
    record.value = 0;
    memcpy(&record.value, &value, sizeof(T));
    record.source = source;
    meet(operation, line, mask, &record);
    memcpy(&value, &record.result, sizeof(T));
    return value;
}

struct Reduce : Record {
    u32 value, result;
    template <typename Operation>
    static void combine_all(void* records[32]) {
        bool first = true;
        u32 result = 0;
        for (int i = 0; i < 32; i++) {
            if (!records[i]) continue;
            u32 value = static_cast<Reduce*>(records[i])->value;
            result = first ? value : Operation()(result, value);
            first = false;
        }
        for (int i = 0; i < 32; i++) {
            if (records[i]) static_cast<Reduce*>(records[i])->result = result;
        }
    }
};

struct LoadMatrix : Record {
    const void* row;
    u32* out;
    template <bool transposed>
    static void combine_all(void* records[32]) {
        require_whole_warp(records, transposed ? "load_matrix_x4_transposed" : "load_matrix_x4");
        for (int m = 0; m < 4; m++) {
            u16 matrix[8][8];
            for (int r = 0; r < 8; r++) memcpy(matrix[r], static_cast<LoadMatrix*>(records[m * 8 + r])->row, 16);
            for (int lane = 0; lane < 32; lane++) {
                int g = lane / 4, t = lane % 4;
                u32 low = transposed ? matrix[2 * t][g] : matrix[g][2 * t];
                u32 high = transposed ? matrix[2 * t + 1][g] : matrix[g][2 * t + 1];
                static_cast<LoadMatrix*>(records[lane])->out[m] = low | high << 16;
            }
        }
    }
};

template <bool transposed>
inline void load_matrix(u32 out[4], const void* shared, int line) {
    const char* operation = transposed ? "load_matrix_x4_transposed" : "load_matrix_x4";
    if (reinterpret_cast<uintptr_t>(shared) % 16 || !is_shared(shared, 16)) {
        stop("thread %u calls %s (line %d) with an address that is not 16 bytes of shared memory, aligned to 16 bytes",
             current, operation, line);
    }
    LoadMatrix record;
    record.combine = LoadMatrix::combine_all<transposed>;
    record.row = shared;
    u32 loaded[4];
    record.out = loaded;
    meet(operation, line, FULL_WARP, &record);
    memcpy(out, loaded, sizeof loaded);
}

struct MultiplyAdd : Record {
    float* d;
    const u32* a;
    const u32* b;

    template <float (*widen)(u16)>
    __attribute__((optimize("O3"))) static void combine_all(void* records[32]) {
        require_whole_warp(records, "multiply_add");
        KeepSubnormals keep;  // tensor cores do
        (void)keep;
        float a[16][16], b[16][8], d[16][8];
        for (int lane = 0; lane < 32; lane++) {
            auto record = static_cast<MultiplyAdd*>(records[lane]);
            int g = lane / 4, t = lane % 4;
            for (int i = 0; i < 4; i++) {
                int row = g + 8 * (i % 2), column = 2 * t + 8 * (i / 2);
                a[row][column] = widen(u16(record->a[i]));
                a[row][column + 1] = widen(u16(record->a[i] >> 16));
            }
            for (int i = 0; i < 2; i++) {
                b[2 * t + 8 * i][g] = widen(u16(record->b[i]));
                b[2 * t + 8 * i + 1][g] = widen(u16(record->b[i] >> 16));
            }
            for (int i = 0; i < 4; i++) d[g + 8 * (i / 2)][2 * t + i % 2] = record->d[i];
        }
        for (int row = 0; row < 16; row++) {
            for (int k = 0; k < 16; k++) {
                for (int column = 0; column < 8; column++) d[row][column] += a[row][k] * b[k][column];
            }
        }
        for (int lane = 0; lane < 32; lane++) {
            auto record = static_cast<MultiplyAdd*>(records[lane]);
            int g = lane / 4, t = lane % 4;
            for (int i = 0; i < 4; i++) record->d[i] = d[g + 8 * (i / 2)][2 * t + i % 2];
        }
    }
};

template <float (*widen)(u16)>
inline void multiply_add(const char* operation, float d[4], const u32 a[4], const u32 b[2], int line) {
    float sums[4];
    memcpy(sums, d, sizeof sums);
    MultiplyAdd record;
    record.combine = MultiplyAdd::combine_all<widen>;
    record.d = sums;
    record.a = a;
    record.b = b;
    meet(operation, line, FULL_WARP, &record);
    memcpy(d, sums, sizeof sums);
}

template <typename To, typename From>
inline To bits_as(From value) {
    static_assert(sizeof(To) == sizeof(From), "");
    To result;
    memcpy(&result, &value, sizeof(To));
    return result;
}

inline float widen_bfloat16(u16 bits) { return bits_as<float>(u32(bits) << 16); }

}  // namespace cuda_on_cpu

// ---------------------------------------------------------------------------------------------------------------------
// CUDA's synchronization, votes and shuffles. `line` is the caller's, for messages.

inline void __syncthreads(int line = __builtin_LINE()) { cuda_on_cpu::meet_block(line); }

inline void __syncwarp(u32 mask = FULL_WARP, int line = __builtin_LINE()) {
    cuda_on_cpu::Record record{nullptr};
    cuda_on_cpu::meet("__syncwarp", line, mask, &record);
}

inline void __threadfence() {}
inline void __threadfence_block() {}

inline u32 __ballot_sync(u32 mask, int predicate, int line = __builtin_LINE()) {
    return cuda_on_cpu::vote("__ballot_sync", line, mask, predicate != 0);
}

inline int __any_sync(u32 mask, int predicate, int line = __builtin_LINE()) {
    return cuda_on_cpu::vote("__any_sync", line, mask, predicate != 0) != 0;
}

inline int __all_sync(u32 mask, int predicate, int line = __builtin_LINE()) {
    return cuda_on_cpu::vote("__all_sync", line, mask, predicate == 0) == 0;
}

template <typename T>
inline T __shfl_sync(u32 mask, T value, int source, int width = 32, int line = __builtin_LINE()) {
    int lane = threadIdx.x % 32;
    return cuda_on_cpu::shuffle("__shfl_sync", line, mask, value, (lane & -width) + (source & (width - 1)), width);
}

template <typename T>
inline T __shfl_xor_sync(u32 mask, T value, int lane_mask, int width = 32, int line = __builtin_LINE()) {
    int lane = threadIdx.x % 32, source = lane ^ lane_mask;
    if (source >= (lane & -width) + width || source < 0) source = lane;
    return cuda_on_cpu::shuffle("__shfl_xor_sync", line, mask, value, source, width);
}

template <typename T>
inline T __shfl_up_sync(u32 mask, T value, u32 delta, int width = 32, int line = __builtin_LINE()) {
    int lane = threadIdx.x % 32, source = lane - int(delta);
    if (source < (lane & -width)) source = lane;
    return cuda_on_cpu::shuffle("__shfl_up_sync", line, mask, value, source, width);
}

template <typename T>
inline T __shfl_down_sync(u32 mask, T value, u32 delta, int width = 32, int line = __builtin_LINE()) {
    int lane = threadIdx.x % 32, source = lane + int(delta);
    if (source >= (lane & -width) + width) source = lane;
    return cuda_on_cpu::shuffle("__shfl_down_sync", line, mask, value, source, width);
}

namespace cuda_on_cpu {

template <typename T>
struct Sum {
    u32 operator()(u32 a, u32 b) const { return a + b; }
};
template <typename T>
struct Largest {
    u32 operator()(u32 a, u32 b) const { return T(a) > T(b) ? a : b; }
};
template <typename T>
struct Smallest {
    u32 operator()(u32 a, u32 b) const { return T(a) < T(b) ? a : b; }
};
struct Either {
    u32 operator()(u32 a, u32 b) const { return a | b; }
};
struct Both {
    u32 operator()(u32 a, u32 b) const { return a & b; }
};
struct Differing {
    u32 operator()(u32 a, u32 b) const { return a ^ b; }
};

template <typename Operation, typename T>
inline T reduce(const char* operation, int line, u32 mask, T value) {
    Reduce record;
    record.combine = Reduce::combine_all<Operation>;
    record.value = u32(value);
    meet(operation, line, mask, &record);
    return T(record.result);
}

}  // namespace cuda_on_cpu

template <typename T>
inline T __reduce_add_sync(u32 mask, T value, int line = __builtin_LINE()) {
    return cuda_on_cpu::reduce<cuda_on_cpu::Sum<T>>("__reduce_add_sync", line, mask, value);
}

template <typename T>
inline T __reduce_max_sync(u32 mask, T value, int line = __builtin_LINE()) {
    return cuda_on_cpu::reduce<cuda_on_cpu::Largest<T>>("__reduce_max_sync", line, mask, value);
}

template <typename T>
inline T __reduce_min_sync(u32 mask, T value, int line = __builtin_LINE()) {
    return cuda_on_cpu::reduce<cuda_on_cpu::Smallest<T>>("__reduce_min_sync", line, mask, value);
}

inline u32 __reduce_or_sync(u32 mask, u32 value, int line = __builtin_LINE()) {
    return cuda_on_cpu::reduce<cuda_on_cpu::Either>("__reduce_or_sync", line, mask, value);
}

inline u32 __reduce_and_sync(u32 mask, u32 value, int line = __builtin_LINE()) {
    return cuda_on_cpu::reduce<cuda_on_cpu::Both>("__reduce_and_sync", line, mask, value);
}

inline u32 __reduce_xor_sync(u32 mask, u32 value, int line = __builtin_LINE()) {
    return cuda_on_cpu::reduce<cuda_on_cpu::Differing>("__reduce_xor_sync", line, mask, value);
}

// ---------------------------------------------------------------------------------------------------------------------
// CUDA's integer and floating-point intrinsics

inline int __popc(u32 x) { return __builtin_popcount(x); }
inline int __popcll(u64 x) { return __builtin_popcountll(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(i64 x) { return __builtin_ffsll(x); }
inline int __clz(int x) { return x ? __builtin_clz(u32(x)) : 32; }
inline int __clzll(i64 x) { return x ? __builtin_clzll(u64(x)) : 64; }

inline u32 __brev(u32 x) {
    x = (x >> 1 & 0x55555555u) | (x & 0x55555555u) << 1;
    x = (x >> 2 & 0x33333333u) | (x & 0x33333333u) << 2;
    x = (x >> 4 & 0x0f0f0f0fu) | (x & 0x0f0f0f0fu) << 4;
    return __builtin_bswap32(x);
}

inline u32 __byte_perm(u32 x, u32 y, u32 selector) {
    u64 both = u64(y) << 32 | x;
    u32 result = 0;
    for (int i = 0; i < 4; i++) result |= (u32(both >> 8 * (selector >> 4 * i & 7)) & 0xff) << 8 * i;
    return result;
}

inline u32 __funnelshift_l(u32 low, u32 high, u32 shift) {
    return u32((u64(high) << 32 | low) << (shift & 31) >> 32);
}
inline u32 __funnelshift_r(u32 low, u32 high, u32 shift) { return u32((u64(high) << 32 | low) >> (shift & 31)); }
inline u32 __umulhi(u32 a, u32 b) { return u32(u64(a) * b >> 32); }

template <typename T>
inline T __ldg(const T* pointer) {
    return *pointer;
}
template <typename T>
inline T __ldcs(const T* pointer) {
    return *pointer;
}
template <typename T>
inline T __ldcg(const T* pointer) {
    return *pointer;
}
template <typename T>
inline void __stcs(T* pointer, T value) {
    *pointer = value;
}
template <typename T>
inline void __stcg(T* pointer, T value) {
    *pointer = value;
}

inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fsqrt_rn(float a) { return sqrtf(a); }
inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline u32 __float_as_uint(float value) { return cuda_on_cpu::bits_as<u32>(value); }
inline int __float_as_int(float value) { return cuda_on_cpu::bits_as<int>(value); }
inline float __uint_as_float(u32 value) { return cuda_on_cpu::bits_as<float>(value); }
inline float __int_as_float(int value) { return cuda_on_cpu::bits_as<float>(value); }

#define CUDA_ON_CPU_MIN_MAX(type)                              \
    inline type min(type a, type b) { return a < b ? a : b; } \
    inline type max(type a, type b) { return a > b ? a : b; }
CUDA_ON_CPU_MIN_MAX(int)
CUDA_ON_CPU_MIN_MAX(u32)
CUDA_ON_CPU_MIN_MAX(long)
CUDA_ON_CPU_MIN_MAX(unsigned long)
CUDA_ON_CPU_MIN_MAX(i64)
CUDA_ON_CPU_MIN_MAX(u64)
#undef CUDA_ON_CPU_MIN_MAX
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }

// ---------------------------------------------------------------------------------------------------------------------
// CUDA's atomics: each returns the value before

#define CUDA_ON_CPU_ATOMIC(name, type, expression)   \
    inline type name(type* address, type value) {    \
        cuda_on_cpu::maybe_yield();                  \
        type before = *address;                      \
        *address = (expression);                     \
        return before;                               \
    }
CUDA_ON_CPU_ATOMIC(atomicAdd, int, int(u32(before) + u32(value)))
CUDA_ON_CPU_ATOMIC(atomicAdd, u32, before + value)
CUDA_ON_CPU_ATOMIC(atomicAdd, u64, before + value)
CUDA_ON_CPU_ATOMIC(atomicAdd, float, before + value)
CUDA_ON_CPU_ATOMIC(atomicOr, int, before | value)
CUDA_ON_CPU_ATOMIC(atomicOr, u32, before | value)
CUDA_ON_CPU_ATOMIC(atomicOr, u64, before | value)
CUDA_ON_CPU_ATOMIC(atomicAnd, int, before & value)
CUDA_ON_CPU_ATOMIC(atomicAnd, u32, before & value)
CUDA_ON_CPU_ATOMIC(atomicExch, int, value)
CUDA_ON_CPU_ATOMIC(atomicExch, u32, value)
CUDA_ON_CPU_ATOMIC(atomicExch, u64, value)
CUDA_ON_CPU_ATOMIC(atomicExch, float, value)
CUDA_ON_CPU_ATOMIC(atomicMax, int, before > value ? before : value)
CUDA_ON_CPU_ATOMIC(atomicMax, u32, before > value ? before : value)
CUDA_ON_CPU_ATOMIC(atomicMin, int, before < value ? before : value)
CUDA_ON_CPU_ATOMIC(atomicMin, u32, before < value ? before : value)
#undef CUDA_ON_CPU_ATOMIC

template <typename T>
inline T atomicCAS(T* address, T expected, T value) {
    cuda_on_cpu::maybe_yield();
    T before = *address;
    if (before == expected) *address = value;
    return before;
}

// ---------------------------------------------------------------------------------------------------------------------
// The functions of device.cuh

inline float float_from_half(u16 bits) {
    u32 sign = u32(bits & 0x8000) << 16, exponent = bits >> 10 & 31, fraction = bits & 1023;
    if (exponent == 31) return __uint_as_float(sign | 0x7f800000u | fraction << 13 | (fraction ? 0x400000u : 0));
    if (exponent) return __uint_as_float(sign | (exponent + 112) << 23 | fraction << 13);
    return __uint_as_float(sign | __float_as_uint(float(fraction) * 0x1p-24f));
}

inline u16 half_from_float(float value) {
    u32 bits = __float_as_uint(value), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
    if (size > 0x7f800000u) return 0x7fff;
    if (size >= 0x47800000u) return u16(sign | 0x7c00);
    if (size < 0x33000000u) return u16(sign);  // below half of the smallest subnormal number
    u32 fraction, shift;
    if (size >= 0x38800000u) {
        fraction = size - 0x38000000u;  // the exponent rides along
        shift = 13;
    } else {
        fraction = (size & 0x7fffff) | 0x800000;
        shift = 126 - (size >> 23);
    }
    u32 result = fraction >> shift, rest = fraction & ((1u << shift) - 1), half = 1u << (shift - 1);
    result += rest > half || (rest == half && (result & 1));
    return u16(sign | result);
}

inline u16 bfloat16_from_float(float value) {
    u32 bits = __float_as_uint(value);
    if ((bits & 0x7fffffff) > 0x7f800000u) return 0x7fff;
    return u16((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

template <u32 digits>
inline u32 permute_bytes(u32 x, u32 y) {
    u32 bytes = __byte_perm(x, y, digits);
    for (int i = 0; i < 4; i++) {
        if (!(digits >> 4 * i & 8)) continue;
        u32 sign = bytes >> 8 * i & 0x80 ? 0xff : 0;
        bytes = (bytes & ~(0xffu << 8 * i)) | sign << 8 * i;
    }
    return bytes;
}

template <int bytes>
inline void copy_async(void* shared, const void* global, int valid, int line) {
    if (reinterpret_cast<uintptr_t>(shared) % bytes || reinterpret_cast<uintptr_t>(global) % bytes) {
        cuda_on_cpu::stop("thread %u calls copy_async_%d (line %d) with an address that is not aligned to %d bytes",
                          cuda_on_cpu::current, bytes, line, bytes);
    }
    if (valid < 0 || valid > bytes) {
        cuda_on_cpu::stop("thread %u calls copy_async_%d (line %d) with %d valid bytes", cuda_on_cpu::current, bytes,
                          line, valid);
    }
    if (!cuda_on_cpu::is_shared(shared, bytes)) {
        cuda_on_cpu::stop("thread %u calls copy_async_%d (line %d) with a target outside the shared memory",
                          cuda_on_cpu::current, bytes, line);
    }
    auto& fiber = cuda_on_cpu::fibers[cuda_on_cpu::current];
    memset(shared, cuda_on_cpu::POISON, bytes);
    fiber.copies.push_back({shared, global, bytes, valid, fiber.groups});
}

inline void copy_async_4(void* shared, const void* global, int valid, int line = __builtin_LINE()) {
    copy_async<4>(shared, global, valid, line);
}

inline void copy_async_16(void* shared, const void* global, int valid, int line = __builtin_LINE()) {
    copy_async<16>(shared, global, valid, line);
}

inline void copy_async_commit() { cuda_on_cpu::fibers[cuda_on_cpu::current].groups++; }

template <int pending>
inline void copy_async_wait() {
    auto& fiber = cuda_on_cpu::fibers[cuda_on_cpu::current];
    if (fiber.groups > pending) cuda_on_cpu::land(fiber, fiber.groups - pending);
}

inline u32 shared_address(const void* shared) {
    return DYNAMIC_SHARED_ADDRESS + u32(static_cast<const unsigned char*>(shared) - dynamic_shared);
}

inline void load_matrix_x4(u32 out[4], const void* shared, int line = __builtin_LINE()) {
    cuda_on_cpu::load_matrix<false>(out, shared, line);
}

inline void load_matrix_x4_transposed(u32 out[4], const void* shared, int line = __builtin_LINE()) {
    cuda_on_cpu::load_matrix<true>(out, shared, line);
}

inline void multiply_add_bfloat16(float d[4], const u32 a[4], const u32 b[2], int line = __builtin_LINE()) {
    cuda_on_cpu::multiply_add<cuda_on_cpu::widen_bfloat16>("multiply_add_bfloat16", d, a, b, line);
}

inline void multiply_add_half(float d[4], const u32 a[4], const u32 b[2], int line = __builtin_LINE()) {
    cuda_on_cpu::multiply_add<float_from_half>("multiply_add_half", d, a, b, line);
}

inline void wgmma_publish_shared() { cuda_on_cpu::fibers[cuda_on_cpu::current].published++; }

inline void wgmma_fence(int line = __builtin_LINE()) {
    cuda_on_cpu::meet_warp("wgmma_fence", line, cuda_on_cpu::Wgmma::combine_fence);
}

inline void wgmma_commit(int line = __builtin_LINE()) {
    cuda_on_cpu::meet_warp("wgmma_commit", line, cuda_on_cpu::Wgmma::combine_commit);
}

template <int pending>
inline void wgmma_wait(int line = __builtin_LINE()) {
    cuda_on_cpu::meet_warp("wgmma_wait", line, cuda_on_cpu::Wgmma::combine_wait<pending>);
}

inline void wgmma_hold(float (&)[64]) {}
inline void wgmma_hold(u32 (&)[4]) {}

inline void wgmma_bfloat16(float (&d)[64], const u32 (&a)[4], u64 b, int line = __builtin_LINE()) {
    cuda_on_cpu::start_product(d, a, b, cuda_on_cpu::widen_bfloat16, line);
}

inline void wgmma_half(float (&d)[64], const u32 (&a)[4], u64 b, int line = __builtin_LINE()) {
    cuda_on_cpu::start_product(d, a, b, float_from_half, line);
}

// ---------------------------------------------------------------------------------------------------------------------
// What the loader asks of an entry: its parameters' types, and a call with the addresses of their values

namespace cuda_on_cpu {

// u, i, f: unsigned, signed or floating point, and the bytes; s: a struct, and the bytes; v: void; * before: a pointer.
template <typename T>
inline int describe(char* out) {
    if constexpr (std::is_pointer_v<T>) {
        out[0] = '*';
        return 1 + describe<std::remove_cv_t<std::remove_pointer_t<T>>>(out + 1);
    } else if constexpr (std::is_void_v<T>) {
        out[0] = 'v';
        return 1;
    } else {
        char kind = std::is_floating_point_v<T> ? 'f' : !std::is_integral_v<T> ? 's' : std::is_signed_v<T> ? 'i' : 'u';
        return sprintf(out, "%c%d", kind, int(sizeof(T)));
    }
}

template <typename... Parameters>
inline const char* signature(void (*)(Parameters...)) {
    static char text[1024];
    char* end = text;
    ((end += describe<Parameters>(end), *end++ = ' '), ...);
    *end = 0;
    return text;
}

template <auto kernel, typename... Parameters, size_t... index>
inline void call(void** arguments, void (*)(Parameters...), std::index_sequence<index...>) {
    kernel(*static_cast<Parameters*>(arguments[index])...);
}

template <auto kernel, typename... Parameters>
inline Entry entry_of(void (*)(Parameters...)) {
    return [](void** arguments) {
        call<kernel>(arguments, static_cast<void (*)(Parameters...)>(nullptr),
                     std::index_sequence_for<Parameters...>());
    };
}

}  // namespace cuda_on_cpu

#define CUDA_ON_CPU_ENTRY(name, ...)                                                                                  \
    extern "C" __attribute__((visibility("default"))) const char* signature_of_##name() {                             \
        return cuda_on_cpu::signature(&name);                                                                         \
    }                                                                                                                 \
    extern "C" __attribute__((visibility("default"))) const int launch_bounds_of_##name[] = {__VA_ARGS__, 0};          \
    extern "C" __attribute__((visibility("default"))) const char* launch_##name(                                      \
        const u32* grid, u32 threads, u64 shared_bytes, u64 seed, void** arguments, u64 first_block, u64 last_block) {\
        return cuda_on_cpu::run(                                                                                      \
            grid, threads, shared_bytes, seed, cuda_on_cpu::entry_of<&name>(&name), arguments, first_block,           \
            last_block);                                                                                              \
    }

#endif  // CUDA_ON_CPU_PARSE
