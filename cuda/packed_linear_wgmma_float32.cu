// Products of packed spikes with a float32 weight, given as three bfloat16 planes, on Hopper.
#include "packed_linear_wgmma.cuh"

WGMMA_ENTRY(float32, Float32)
