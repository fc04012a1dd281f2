// Products of packed spikes with a float32 weight, given as three bfloat16 planes.
#include "packed_linear.cuh"

PRODUCT_ENTRIES(float32, Float32)
