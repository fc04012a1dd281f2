// Products of packed spikes with a float16 weight on Hopper.
#include "packed_linear_wgmma.cuh"

WGMMA_ENTRY(float16, Float16)
