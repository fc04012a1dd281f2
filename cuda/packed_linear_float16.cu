// Products of packed spikes with a float16 weight.
#include "packed_linear.cuh"

PRODUCT_ENTRIES(float16, Float16)
