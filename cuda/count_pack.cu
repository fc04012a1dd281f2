// Sums of spikes: counts below 4, 16 or 256, in 2, 4 or 8 bits each.
#include "bit_pack.cuh"

// registers <= 64
PACK_ENTRIES(float32, Float32, 2)
PACK_ENTRIES(float32, Float32, 4)
PACK_ENTRIES(float32, Float32, 8)
PACK_ENTRIES(float16, Float16, 2)
PACK_ENTRIES(float16, Float16, 4)
PACK_ENTRIES(float16, Float16, 8)
PACK_ENTRIES(bfloat16, Bfloat16, 2)
PACK_ENTRIES(bfloat16, Bfloat16, 4)
PACK_ENTRIES(bfloat16, Bfloat16, 8)
PACK_ENTRIES(uint8, Uint8, 2)
PACK_ENTRIES(uint8, Uint8, 4)
PACK_ENTRIES(uint8, Uint8, 8)
