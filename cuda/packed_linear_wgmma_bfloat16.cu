// Products of packed spikes with a bfloat16 weight on Hopper.
#include "packed_linear_wgmma.cuh"

WGMMA_ENTRY(bfloat16, Bfloat16)
